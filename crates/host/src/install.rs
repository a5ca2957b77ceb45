//! Puts the hook program where the container runtime can call it.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use divvy_files::{Durability, Mode, Replace};
use rustix::fs::StatVfsMountFlags;

/// Putting the program on the host failed.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot install the CDI hook {} to {} (--hook-dir, chart value hookDir: a writable folder of the host that is not mounted noexec)",
    from.display(), to.display()
)]
pub struct InstallError {
    /// The program in our image.
    from: PathBuf,
    /// Where it was to go.
    to: PathBuf,
    /// The failed operation.
    #[source]
    source: io::Error,
}

/// The program's name in its folder.
const NAME: &str = "divvy-cdi-hook";
/// Folder and program: in a container with a user namespace, the caller is none of the host's
/// users.
const OPEN_TO_ALL: u32 = 0o755;

/// Copies the hook program into a folder (as this process sees it), executable for all, atomically:
/// a container that starts meanwhile finds the old or the new program, never half of one. Does
/// nothing if the bytes are already there. Returns the program's path.
pub fn install_hook(from: &Path, folder: &Path) -> Result<PathBuf, InstallError> {
    let to = folder.join(NAME);
    match copy(from, folder, &to, mount_flags) {
        Ok(()) => Ok(to),
        Err(source) => Err(InstallError {
            from: from.to_owned(),
            to,
            source,
        }),
    }
}

/// Reads how the file system of a folder is mounted.
fn mount_flags(folder: &Path) -> io::Result<StatVfsMountFlags> {
    Ok(rustix::fs::statvfs(folder)?.f_flag)
}

fn copy(
    from: &Path,
    folder: &Path,
    to: &Path,
    mount_flags: impl Fn(&Path) -> io::Result<StatVfsMountFlags>,
) -> io::Result<()> {
    // The folder, open to all whatever the umask is.
    let bytes = fs_err::read(from)?;
    fs_err::create_dir_all(folder)?;
    fs_err::set_permissions(folder, Permissions::from_mode(OPEN_TO_ALL))?;
    // The runtime calls the program there, and would fail in each pod.
    if mount_flags(folder)?.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::other("it is mounted noexec"));
    }
    // The same program is left alone: it may be running.
    if let (Ok(old), Ok(meta)) = (fs_err::read(to), fs_err::metadata(to))
        && old == bytes
        && meta.permissions().mode() & 0o777 == OPEN_TO_ALL
    {
        return Ok(());
    }
    // A new file beside it, whole and on the disk before it gets the name.
    let temporary = folder.join(format!("{NAME}.{}.tmp", std::process::id()));
    Replace::new(to, temporary, Durability::Content)
        .mode(Mode::Exactly(OPEN_TO_ALL))
        .write(&bytes)
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_mounted_noexec_is_refused_before_anything_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let (from, folder) = (dir.path().join("from"), dir.path().join("hooks"));
        fs_err::write(&from, "program").unwrap();
        let to = folder.join(NAME);
        let noexec = |_: &Path| Ok(StatVfsMountFlags::NOEXEC | StatVfsMountFlags::NOSUID);
        let error = copy(&from, &folder, &to, noexec).unwrap_err();
        assert_eq!(error.to_string(), "it is mounted noexec");
        assert!(!to.exists());
        copy(&from, &folder, &to, |_| Ok(StatVfsMountFlags::NOSUID)).unwrap();
        assert!(to.exists());
    }

    #[test]
    fn the_flags_are_those_of_the_folders_mount() {
        let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap();
        let mut all = std::collections::BTreeMap::new();
        for line in mounts.lines() {
            let mut words = line.split(' ').skip(1);
            // A later mount covers an earlier one of the same folder.
            all.insert(words.next().unwrap(), words.nth(1).unwrap());
        }
        let folders = ["/", "/proc", "/sys", "/dev", "/dev/shm", "/dev/pts", "/run"];
        for folder in folders {
            let Some(options) = all.get(folder) else {
                continue;
            };
            let noexec = options.split(',').any(|option| option == "noexec");
            let flags = mount_flags(Path::new(folder)).unwrap();
            assert_eq!(
                flags.contains(StatVfsMountFlags::NOEXEC),
                noexec,
                "{folder}"
            );
        }
    }
}
