//! Finds out whether the plugin's folder takes files: at the start and now and then, so that people
//! hear of a full disk before a claim does, and again and again while it takes none.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::node::facts::{Facts, Report};

/// The task that tries.
pub(crate) struct DiskSource {
    pub(crate) folder: PathBuf,
    /// Notified when a record could not be written.
    pub(crate) failed: Arc<Notify>,
    /// The pause between two attempts.
    pub(crate) retry: Duration,
    pub(crate) facts: Facts,
}

/// The pause while it works: seldom, since each attempt waits for the disk.
const CALM: Duration = Duration::from_mins(5);

impl DiskSource {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut known = None;
        let mut pause = Duration::ZERO;
        loop {
            let has_failed = tokio::select! {
                () = self.failed.notified() => true,
                () = tokio::time::sleep(pause) => false,
                () = stop.cancelled() => return,
            };
            // Try with a file of one's own: records are written only when a claim needs one.
            let folder = self.folder.clone();
            let tried = tokio::task::spawn_blocking(move || write_something(&folder)).await;
            let why = tried.unwrap_or_else(|died| Some(died.to_string()));
            pause = if why.is_some() { self.retry } else { CALM };
            // After a failure in any case: it was one of a moment if the attempt succeeds.
            if !has_failed && why == known {
                continue;
            }
            known.clone_from(&why);
            if self.facts.send(Report::Unwritable(why).into()).is_err() {
                return;
            }
        }
    }
}

/// Returns the file that is tried: a temporary one of the store, which removes it after a crash.
fn trial(folder: &Path) -> PathBuf {
    folder.join(format!(".writable.{}.tmp", std::process::id()))
}

/// Writes and removes a file as large as a record; returns the error, if there is one.
fn write_something(folder: &Path) -> Option<String> {
    let file = trial(folder);
    let written = fs_err::write(&file, [0; 4096])
        .and_then(|()| fs_err::File::open(&file)?.sync_all())
        .err();
    // A file that was not made is not there.
    drop(fs_err::remove_file(&file));
    written.map(|error| crate::chain(&error))
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    /// `/dev/full` takes nothing, as a full disk.
    #[test]
    fn a_full_disk_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(write_something(dir.path()), None);
        fs_err::os::unix::fs::symlink("/dev/full", trial(dir.path())).unwrap();
        let why = write_something(dir.path()).unwrap();
        assert!(why.contains("No space left on device"), "{why}");
        assert_eq!(write_something(dir.path()), None, "the link is removed");
    }

    /// No claim has to fail first. On a clock that goes on by itself when nothing else happens.
    #[tokio::test(start_paused = true)]
    async fn a_folder_that_takes_nothing_is_found_without_a_claim() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("claims");
        fs_err::write(&folder, "not a folder").unwrap();
        let (facts, mut found) = mpsc::unbounded_channel();
        let source = DiskSource {
            folder: folder.clone(),
            failed: Arc::default(),
            retry: Duration::from_secs(1),
            facts,
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(source.run(stop.clone()));
        let mut next = async || {
            let fact = tokio::time::timeout(CALM * 2, found.recv()).await;
            match fact.unwrap().unwrap().report {
                Some(Report::Unwritable(why)) => why,
                other => panic!("{other:?}"),
            }
        };
        assert!(next().await.is_some(), "at the start");
        fs_err::remove_file(&folder).unwrap();
        fs_err::create_dir(&folder).unwrap();
        assert_eq!(next().await, None);
        fs_err::remove_dir(&folder).unwrap();
        fs_err::write(&folder, "not a folder").unwrap();
        assert!(next().await.is_some(), "without a failed claim");
        stop.cancel();
        task.await.unwrap();
    }
}
