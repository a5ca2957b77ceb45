//! Folders that containers have mounted, and may write to: nothing in them is followed, waited for
//! or believed. A folder itself is safe, since its entry is in one that no container has.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

/// Time in which a folder is emptied: a container can make more and more of it.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// Returns the end of a file, so many bytes at most. `None` if there is no such file, or if it is
/// not a regular one.
pub(crate) fn tail(path: &Path, most: u64) -> Option<String> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let of = rustix::fs::fstat(&file).ok()?;
    if !FileType::from_raw_mode(of.st_mode).is_file() {
        return None;
    }
    let mut file = File::from(file);
    let len = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(most))).ok()?;
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// Empties a regular file that is longer than this; nothing else in its place is touched.
pub(crate) fn empty_above(path: &Path, longest: u64) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // No file, a link, a FIFO without a reader.
        Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let of = file.metadata()?;
    if of.is_file() && of.len() > longest {
        file.set_len(0)?;
    }
    Ok(())
}

/// Opens a folder; a link in its place is not followed.
fn folder(beside: impl AsFd, name: &CStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(beside, name, flags, Mode::empty())
}

/// Makes a folder with these rights, or gives them back to it: root in a container can change them.
pub(crate) fn open(path: &Path, rights: u32) -> io::Result<OwnedFd> {
    fs_err::create_dir_all(path)?;
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    let held = folder(rustix::fs::CWD, &name)?;
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    rustix::fs::fchown(&held, Some(user), Some(group))?;
    rustix::fs::fchmod(&held, Mode::from_raw_mode(rights))?;
    Ok(held)
}

/// Makes a folder that programs of all users may look into, and removes what is in it, but for
/// folders on so many levels below it.
pub(crate) fn clear(path: &Path, levels: u32) -> io::Result<()> {
    let held = open(path, 0o755)?;
    empty(held.as_fd(), levels, Instant::now() + EMPTY_WITHIN)
}

/// Removes a folder with all that is in it, if there is one.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    let name = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    match folder(rustix::fs::CWD, &name) {
        Ok(held) => empty(held.as_fd(), 0, Instant::now() + EMPTY_WITHIN)?,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    match fs_err::remove_dir(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes what is in a folder, but for folders on so many levels below it. However deep a tree of
/// folders is, it is taken apart at its top, so that neither files nor memory are needed for each
/// level.
fn empty(dir: BorrowedFd<'_>, levels: u32, until: Instant) -> io::Result<()> {
    let mut number = 0;
    // Each round finds what the one before has moved here, and what was made meanwhile.
    loop {
        let mut is_done = true;
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if [c".", c".."].contains(&name) {
                continue;
            }
            if Instant::now() >= until {
                return Err(ErrorKind::TimedOut.into());
            }
            match folder(dir, name) {
                Ok(inner) if levels > 0 => empty(inner.as_fd(), levels - 1, until)?,
                Ok(inner) => {
                    is_done = false;
                    raise(&inner, dir, &mut number)?;
                    gone(rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR))?;
                }
                // A file, a link, a socket.
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    is_done &= gone(rustix::fs::unlinkat(dir, name, AtFlags::empty()))?;
                }
                Err(error) => is_done &= gone(Err(error))?,
            }
        }
        if is_done {
            return Ok(());
        }
    }
}

/// Moves the folders in a folder to one above it, and removes all else that is in it.
fn raise(inner: &OwnedFd, above: BorrowedFd<'_>, number: &mut u32) -> io::Result<()> {
    for entry in Dir::read_from(inner)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        match rustix::fs::unlinkat(inner, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => {}
            done => {
                gone(done)?;
                continue;
            }
        }
        // Another name, which may be there already.
        *number += 1;
        let to = format!("gone-{number}");
        gone(rustix::fs::renameat_with(
            inner,
            name,
            above,
            to.as_str(),
            RenameFlags::NOREPLACE,
        ))?;
    }
    Ok(())
}

/// Returns whether an entry is gone; `false` if it was changed meanwhile: the next round sees that.
fn gone(done: rustix::io::Result<()>) -> io::Result<bool> {
    match done {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR | Errno::ISDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn the_end_of_a_file_is_read_and_nothing_else_than_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs_err::write(at("file"), "first\nlast").unwrap();
        assert_eq!(tail(&at("file"), 4).as_deref(), Some("last"));
        assert_eq!(tail(&at("file"), 99).as_deref(), Some("first\nlast"));
        symlink(at("file"), at("link")).unwrap();
        let mode = Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), FileType::Fifo, mode, 0).unwrap();
        for name in ["link", "fifo", "missing", "."] {
            assert_eq!(tail(&at(name), 4), None, "{name}");
        }
    }

    #[test]
    fn a_folder_is_cleared_but_for_so_many_levels() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        fs_err::create_dir_all(at("a/s/c/made/below")).unwrap();
        for path in ["a/file", "a/s/file", "a/s/c/file", "a/s/c/made/below/file"] {
            fs_err::write(at(path), "").unwrap();
        }
        let closed = std::fs::Permissions::from_mode(0o700);
        fs_err::set_permissions(at("a"), closed).unwrap();
        clear(&at("a"), 2).unwrap();
        assert!(at("a/s/c").exists());
        assert_eq!(fs_err::read_dir(at("a/s/c")).unwrap().count(), 0);
        assert_eq!(fs_err::read_dir(at("a")).unwrap().count(), 1);
        let mode = fs_err::metadata(at("a")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
        clear(&at("a"), 0).unwrap();
        assert_eq!(fs_err::read_dir(at("a")).unwrap().count(), 0);
        remove(&at("a")).unwrap();
        remove(&at("a")).unwrap();
        assert!(!at("a").exists());
    }

    #[test]
    fn the_link_in_the_place_of_a_folder_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| dir.path().join(path);
        fs_err::create_dir_all(at("other/below")).unwrap();
        symlink(at("other"), at("link")).unwrap();
        clear(&at("link"), 0).unwrap_err();
        remove(&at("link")).unwrap_err();
        assert!(at("other/below").exists());
    }
}
