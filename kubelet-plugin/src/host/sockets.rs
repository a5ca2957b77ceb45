//! The two Unix sockets of the plugin: their names, and binding them over a stale file.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use divvy_api::names::Naming;
use tokio::net::UnixListener;

/// Longest path of a Unix socket (`sun_path` less its terminating zero).
const LONGEST: usize = 107;

/// Where the plugin listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketNames {
    /// The DRA service; named to the kubelet at registration.
    pub dra: PathBuf,
    /// The registration service, found by the kubelet in its registry folder.
    ///
    /// Its file name carries an `@`: the kubelet dials it with the percent-encoded path as
    /// `:authority`, which the `http` crate accepts only as user information before an `@`.
    pub registration: PathBuf,
}

/// A socket path that the kernel would refuse.
#[derive(Debug, thiserror::Error)]
#[error("--{flag}: the path of socket {} has {} bytes, the limit is {LONGEST}: choose a shorter folder or driver name", path.display(), path.as_os_str().len())]
pub struct TooLong {
    /// The flag that decides the folder.
    pub flag: &'static str,
    pub path: PathBuf,
}

impl SocketNames {
    /// Names for an instance. With a pod's UID they are its own, so that two instances of a rolling
    /// update can be registered at once; the UID is shortened where the path would be too long.
    pub fn new(
        driver: &str,
        plugin_dir: &Path,
        registry: &Path,
        pod_uid: Option<&str>,
    ) -> Result<Self, TooLong> {
        let Some(uid) = pod_uid else {
            // NVIDIA's plugin has the usual name in the same folder.
            let dra = if Naming::of(driver).stands_in() {
                "dra-divvy.sock"
            } else {
                "dra.sock"
            };
            return Ok(Self {
                dra: fits("plugin-dir", plugin_dir.join(dra))?,
                registration: fits("registry-dir", registry.join(format!("{driver}@reg.sock")))?,
            });
        };
        // The first group of a UUID distinguishes the pods of one DaemonSet on one node.
        let short = uid.split('-').next().unwrap_or(uid);
        Ok(Self {
            dra: fits("plugin-dir", plugin_dir.join(format!("dra-{uid}.sock")))
                .or_else(|_| fits("plugin-dir", plugin_dir.join(format!("dra-{short}.sock"))))?,
            registration: fits(
                "registry-dir",
                registry.join(format!("{driver}-{uid}@reg.sock")),
            )
            .or_else(|_| {
                fits(
                    "registry-dir",
                    registry.join(format!("{driver}-{short}@reg.sock")),
                )
            })?,
        })
    }
}

/// Returns the path, if a socket can have it.
pub(crate) fn fits(flag: &'static str, path: PathBuf) -> Result<PathBuf, TooLong> {
    if path.as_os_str().len() <= LONGEST {
        Ok(path)
    } else {
        Err(TooLong { flag, path })
    }
}

/// Removes sockets of instances that died without doing so: the kubelet would dial a registration
/// socket for ever. Only sockets with this driver's names are removed, and only if no process
/// listens; that of NVIDIA's plugin, in whose place we stand, is its own to replace.
pub(crate) fn remove_stale(names: &SocketNames, driver: &str) {
    let stands_in = Naming::of(driver).stands_in();
    for (path, stem, suffix) in [
        (&names.registration, driver, "@reg.sock"),
        (&names.dra, "dra", ".sock"),
    ] {
        let Some(Ok(entries)) = path.parent().map(fs_err::read_dir) else {
            continue;
        };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let own_part = name
                .to_str()
                .and_then(|name| name.strip_prefix(stem)?.strip_suffix(suffix));
            let ours = own_part.is_some_and(|part| {
                part.starts_with('-') || part.is_empty() && !(stands_in && stem == "dra")
            });
            // Refused means that no process listens. Any other failure, such as a missing right,
            // says nothing.
            let refused = |e: io::Error| e.kind() == io::ErrorKind::ConnectionRefused;
            if ours
                && entry.path() != *path
                && std::os::unix::net::UnixStream::connect(entry.path()).is_err_and(refused)
            {
                match fs_err::remove_file(entry.path()) {
                    Ok(()) => {
                        tracing::info!(socket = %entry.path().display(), "removed the socket of a dead instance");
                    }
                    Err(error) => {
                        tracing::warn!(%error, "failed to remove the socket of a dead instance");
                    }
                }
            }
        }
    }
}

/// A socket file that is ours: removed by [`SocketFile::remove`], unless another instance has put
/// its own there.
pub(crate) struct SocketFile {
    path: PathBuf,
    inode: u64,
}

/// Binds a Unix socket; a socket file left by a dead instance is replaced, anything else at the
/// path is not touched.
pub(crate) fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    if let Some(folder) = path.parent() {
        fs_err::create_dir_all(folder)?;
    }
    if let Ok(found) = fs_err::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            let what = format!("{} exists and is not a socket (remove it)", path.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        // The name has the pod's UID in it, where there is one: a socket there is from before a
        // restart of this container.
        fs_err::remove_file(path)?;
    }
    let listener = UnixListener::bind(path).map_err(|e| {
        io::Error::new(
            e.kind(),
            format!("failed to bind socket {}: {e}", path.display()),
        )
    })?;
    let inode = fs_err::symlink_metadata(path)?.ino();
    Ok((
        listener,
        SocketFile {
            path: path.to_owned(),
            inode,
        },
    ))
}

impl SocketFile {
    /// Returns whether the file at the path is still this one.
    pub(crate) fn is_ours(&self) -> bool {
        fs_err::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode)
    }

    /// Removes the file if it is still ours.
    pub(crate) fn remove(self) {
        if self.is_ours()
            && let Err(error) = fs_err::remove_file(&self.path)
        {
            tracing::warn!(%error, "failed to remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rolling_updates_instance_has_short_sockets_of_its_own() {
        let uid = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
        let names = |driver: &str, registry: &str| {
            SocketNames::new(driver, Path::new("/p"), Path::new(registry), Some(uid))
        };
        let short = names("gpu.divvy.dev", "/r").unwrap();
        assert_eq!(
            short.dra,
            Path::new("/p/dra-0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab.sock")
        );
        assert_eq!(
            short.registration,
            Path::new("/r/gpu.divvy.dev-0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab@reg.sock")
        );
        let long = format!("/{}", "r".repeat(70));
        assert_eq!(
            names("gpu.divvy.dev", &long).unwrap().registration,
            Path::new(&long).join("gpu.divvy.dev-0b5a4a3e@reg.sock")
        );
        let longer = format!("/{}", "r".repeat(100));
        assert_eq!(
            names("gpu.divvy.dev", &longer).unwrap_err().to_string(),
            format!(
                "--registry-dir: the path of socket {longer}/gpu.divvy.dev-0b5a4a3e@reg.sock has 133 bytes, the limit is 107: choose a shorter folder or driver name"
            )
        );
    }

    #[tokio::test]
    async fn the_sockets_of_nvidias_plugin_are_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        let (plugin, registry) = (dir.path().join("p"), dir.path().join("r"));
        let names = |uid| SocketNames::new("gpu.nvidia.com", &plugin, &registry, uid).unwrap();
        let theirs = [
            plugin.join("dra.sock"),
            registry.join("gpu.nvidia.com-reg.sock"),
        ];
        let (service, pod) = (names(None), names(Some("dead")));
        for ours in [&service, &pod] {
            assert!(!theirs.contains(&ours.dra) && !theirs.contains(&ours.registration));
        }
        for left in theirs.iter().chain([&pod.dra, &pod.registration]) {
            drop(bind(left).unwrap());
        }
        remove_stale(&service, "gpu.nvidia.com");
        let there = [&theirs[0], &theirs[1], &pod.dra, &pod.registration].map(|p| p.exists());
        assert_eq!(there, [true, true, false, false]);
    }

    #[tokio::test]
    async fn sockets_of_dead_instances_go_and_all_others_stay() {
        let dir = tempfile::tempdir().unwrap();
        let names = |uid| {
            SocketNames::new(
                "d.io",
                &dir.path().join("p"),
                &dir.path().join("r"),
                Some(uid),
            )
            .unwrap()
        };
        let (dead, alive, own) = (names("dead"), names("alive"), names("own"));
        let other = dir.path().join("r/d.io.example.com-1@reg.sock");
        drop((
            bind(&dead.dra).unwrap(),
            bind(&dead.registration).unwrap(),
            bind(&other).unwrap(),
        ));
        let _listening = (
            bind(&alive.dra).unwrap(),
            bind(&alive.registration).unwrap(),
        );
        remove_stale(&own, "d.io");
        let there = [
            &dead.dra,
            &dead.registration,
            &alive.dra,
            &alive.registration,
            &other,
        ]
        .map(|p| p.exists());
        assert_eq!(there, [false, false, true, true, true]);
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_another_file_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/x@reg.sock");
        drop(bind(&path).unwrap());
        assert!(path.exists(), "the file of a dead listener stays");
        let (_first, old) = bind(&path).unwrap();
        let (_second, new) = bind(&path).unwrap();
        old.remove();
        assert!(path.exists(), "a later instance's socket is not removed");
        new.remove();
        assert!(!path.exists());
        let file = dir.path().join("file");
        fs_err::write(&file, "precious").unwrap();
        let error = bind(&file).map(drop).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{} exists and is not a socket (remove it)", file.display())
        );
        assert_eq!(fs_err::read_to_string(&file).unwrap(), "precious");
    }
}
