//! Puts the hook program where the container runtime can call it.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Putting the program on the host failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot install the CDI hook {} to {}; the target must be a writable folder of the host, not mounted noexec", from.display(), to.display())]
pub struct InstallError {
    /// The program in our image.
    from: PathBuf,
    /// Where it was to go.
    to: PathBuf,
    /// The failed operation.
    #[source]
    source: io::Error,
}

/// Copies the hook program to `to` (as this process sees it), executable, atomically: a container that starts meanwhile
/// finds the old or the new program, never half of one. Does nothing if the bytes are already there.
pub fn install_hook(from: &Path, to: &Path) -> Result<(), InstallError> {
    copy(from, to).map_err(|source| InstallError { from: from.to_owned(), to: to.to_owned(), source })
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    const EXECUTABLE: u32 = 0o755;
    let bytes = fs_err::read(from)?;
    if let (Ok(old), Ok(meta)) = (fs_err::read(to), fs_err::metadata(to))
        && old == bytes
        && meta.permissions().mode() & 0o777 == EXECUTABLE
    {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs_err::create_dir_all(folder)?;
    }
    let mut name = to.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = to.with_file_name(name);
    let written = (|| {
        let mut file = fs_err::File::create(&temporary)?;
        io::Write::write_all(&mut file, &bytes)?;
        file.set_permissions(std::fs::Permissions::from_mode(EXECUTABLE))?;
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
