//! NVIDIA's plugin on this node, where divvy has the name of its driver. The two share that name at
//! the kubelet and a folder, so only one of them may serve a node: divvy waits for the other to
//! end.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_api::names::NVIDIA_DRIVER;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::app::config::Config;
use crate::node::facts::{Facts, Report};

/// Looks in a row that must find no plugin after there was one: a container that is restarted is
/// away for a moment.
const PATIENCE: u32 = 3;
/// Time limit of a connection: a process that listens and does not accept serves as well.
const DIAL: Duration = Duration::from_secs(1);

/// The registration socket of NVIDIA's plugin, and what was seen of it.
pub(crate) struct NvidiaPlugin {
    /// `None` under another name of the driver: nothing is looked for.
    socket: Option<PathBuf>,
    watched: Watched,
}

/// The result of one look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    /// A process listens, or it is not known that none does.
    Listens,
    /// A socket file without a process; the number of the file.
    Refuses(u64),
    /// There is none.
    Nothing,
}

/// The memory from one look to the next.
#[derive(Debug, Default, PartialEq, Eq)]
struct Watched {
    serves: bool,
    /// Looks in a row that found no process.
    missed: u32,
    /// The file that the last look found without a process.
    refused: Option<u64>,
}

impl Watched {
    /// Takes in what was seen. Returns whether the file is left over: it is the same as at the last
    /// look. A process binds its socket a moment before it listens.
    fn learn(&mut self, seen: Seen) -> bool {
        let refused = match seen {
            Seen::Listens => {
                *self = Self {
                    serves: true,
                    ..Self::default()
                };
                return false;
            }
            Seen::Refuses(file) => Some(file),
            Seen::Nothing => None,
        };
        self.missed = self.missed.saturating_add(1);
        self.serves &= self.missed < PATIENCE;
        let before = std::mem::replace(&mut self.refused, refused);
        refused.is_some() && refused == before
    }
}

impl NvidiaPlugin {
    pub(crate) fn new(config: &Config) -> Self {
        let name = format!("{NVIDIA_DRIVER}-reg.sock");
        let stands_in = config.naming().stands_in();
        Self {
            socket: stands_in.then(|| config.registry_dir.join(name)),
            watched: Watched::default(),
        }
    }

    /// Looks once; returns whether it serves the node.
    pub(crate) async fn look(&mut self) -> bool {
        let Some(socket) = &self.socket else {
            return false;
        };
        if self.watched.learn(see(socket).await) {
            let socket_file = socket.display();
            match fs_err::remove_file(socket) {
                Ok(()) => {
                    tracing::info!(%socket_file, "removed the registration socket of NVIDIA's plugin, which has ended");
                }
                Err(error) => {
                    tracing::warn!(%error, "failed to remove the registration socket of NVIDIA's plugin");
                }
            }
        }
        self.watched.serves
    }

    /// Looks at intervals until `stop`.
    pub(crate) async fn run(
        mut self,
        serves: watch::Sender<bool>,
        facts: Facts,
        every: Duration,
        stop: CancellationToken,
    ) {
        if self.socket.is_none() {
            // A task that ends would end the plugin.
            return stop.cancelled().await;
        }
        let report = |serves| {
            // Without a brain the plugin ends.
            drop(facts.send(Report::NvidiaServes(serves).into()));
        };
        report(*serves.borrow());
        loop {
            tokio::select! {
                () = tokio::time::sleep(every) => {}
                () = stop.cancelled() => return,
            }
            let now = self.look().await;
            if serves.send_if_modified(|known| std::mem::replace(known, now) != now) {
                report(now);
            }
        }
    }
}

/// Looks at a socket.
pub(super) async fn see(socket: &Path) -> Seen {
    let Ok(found) = fs_err::symlink_metadata(socket) else {
        return Seen::Nothing;
    };
    if !found.file_type().is_socket() {
        return Seen::Nothing;
    }
    match tokio::time::timeout(DIAL, UnixStream::connect(socket)).await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Seen::Refuses(found.ino())
        }
        Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound => Seen::Nothing,
        // Any other failure, such as a full queue, does not show that it has ended.
        Ok(Ok(_) | Err(_)) | Err(_) => Seen::Listens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_serves_until_it_is_away_for_several_looks() {
        let mut watched = Watched::default();
        let mut look = |seen| {
            watched.learn(seen);
            watched.serves
        };
        assert!(!look(Seen::Nothing), "none was ever there");
        assert!(look(Seen::Listens));
        assert!(look(Seen::Nothing) && look(Seen::Refuses(1)));
        assert!(look(Seen::Listens), "it came back");
        let gone = [Seen::Nothing, Seen::Refuses(2), Seen::Nothing].map(&mut look);
        assert_eq!(gone, [true, true, false]);
        assert!(look(Seen::Listens));
    }

    #[test]
    fn a_file_is_left_over_once_it_refuses_twice() {
        let mut watched = Watched::default();
        let seen = [
            Seen::Refuses(1),
            Seen::Refuses(2),
            Seen::Listens,
            Seen::Refuses(2),
            Seen::Nothing,
            Seen::Refuses(2),
            Seen::Refuses(2),
        ];
        let left = seen.map(|seen| watched.learn(seen));
        assert_eq!(left, [false, false, false, false, false, false, true]);
    }

    #[tokio::test]
    async fn only_a_process_that_listens_serves() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("gpu.nvidia.com-reg.sock");
        assert_eq!(see(&socket).await, Seen::Nothing);
        fs_err::write(&socket, "a file").unwrap();
        assert_eq!(see(&socket).await, Seen::Nothing);
        fs_err::remove_file(&socket).unwrap();
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert_eq!(see(&socket).await, Seen::Listens);
        drop(listener);
        assert!(matches!(see(&socket).await, Seen::Refuses(_)));
    }
}
