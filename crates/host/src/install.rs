//! Puts the hook program where the container runtime can call it.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

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
/// Folder and program: in a container with a user namespace, the caller is none of the host's users.
const OPEN_TO_ALL: u32 = 0o755;

/// Copies the hook program into a folder (as this process sees it), executable for all, atomically: a container that starts
/// meanwhile finds the old or the new program, never half of one. Does nothing if the bytes are already there. Returns the
/// program's path.
pub fn install_hook(from: &Path, folder: &Path) -> Result<PathBuf, InstallError> {
    let to = folder.join(NAME);
    match copy(from, folder, &to) {
        Ok(()) => Ok(to),
        Err(source) => Err(InstallError { from: from.to_owned(), to, source }),
    }
}

fn copy(from: &Path, folder: &Path, to: &Path) -> io::Result<()> {
    let bytes = fs_err::read(from)?;
    fs_err::create_dir_all(folder)?;
    fs_err::set_permissions(folder, Permissions::from_mode(OPEN_TO_ALL))?;
    if rustix::fs::statvfs(folder)?.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        return Err(io::Error::other("it is mounted noexec"));
    }
    if let (Ok(old), Ok(meta)) = (fs_err::read(to), fs_err::metadata(to))
        && old == bytes
        && meta.permissions().mode() & 0o777 == OPEN_TO_ALL
    {
        return Ok(());
    }
    let temporary = folder.join(format!("{NAME}.{}.tmp", std::process::id()));
    let written = (|| {
        let mut file = fs_err::File::create(&temporary)?;
        io::Write::write_all(&mut file, &bytes)?;
        file.set_permissions(Permissions::from_mode(OPEN_TO_ALL))?;
        file.sync_all()?;
        drop(file);
        fs_err::rename(&temporary, to)
    })();
    if written.is_err() {
        // The first failure is the one to report; the left-over is overwritten by the next try.
        let _ = fs_err::remove_file(&temporary);
    }
    written
}
