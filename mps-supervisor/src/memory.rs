//! File systems of their own for what containers can write: in memory, and bounded, so that
//! the node's `/run` is not filled through them, and gone with their content once unmounted.

use std::ffi::CString;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// Name that the mounts have in the node's list.
const NAME: &str = "divvy-mps";
/// Least size: a page.
const LEAST: u64 = 4 << 10;
/// Files that one file system can have: each costs kernel memory, also one without content.
const FILES: u32 = 1 << 16;
/// Sockets and the files beside them.
const OF_SOCKETS: Bounds = Bounds {
    bytes: 1 << 20,
    files: 1 << 12,
    mode: 0o755,
};

/// Size of the memory that a server shares with its clients, as `4Gi` or `512Mi`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(u64);

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no size (write 4Gi or 512Mi)")]
pub struct NoSize(String);

impl FromStr for Size {
    type Err = NoSize;

    fn from_str(text: &str) -> Result<Self, NoSize> {
        let units = [("Mi", 20), ("Gi", 30)];
        let read = units.iter().find_map(|(unit, shift)| {
            let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
            number.checked_mul(1 << shift)
        });
        let size = read.filter(|bytes| *bytes >= LEAST).map(Self);
        size.ok_or_else(|| NoSize(text.to_owned()))
    }
}

/// Most that one file system can hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    bytes: u64,
    files: u32,
    /// Rights of its folder.
    mode: u32,
}

impl Bounds {
    /// Returns those of a folder of sockets.
    pub(crate) fn of_sockets() -> Self {
        OF_SOCKETS
    }

    /// Returns those of memory that a server shares with clients of all users.
    pub(crate) fn of_memory(Size(bytes): Size) -> Self {
        Self {
            bytes,
            files: FILES,
            mode: 0o1777,
        }
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, files, mode } = self;
        write!(f, "size={bytes},nr_inodes={files},mode={mode:o}")
    }
}

/// Mounts a file system on a folder, unless there is one: containers have it mounted, and get the
/// next daemon there. Links in it are not followed on the node.
pub(crate) fn bound(dir: &Path, bounds: Bounds) -> io::Result<()> {
    fs_err::create_dir_all(dir)?;
    if is_mount(dir)? {
        return Ok(());
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let data = CString::new(bounds.to_string())?;
    let flags = flags | MountFlags::NOSYMFOLLOW;
    Ok(mount(NAME, dir, "tmpfs", flags, data.as_c_str())?)
}

/// Unmounts the file system of a folder, if there is one. It lives on in containers that have it.
pub(crate) fn unbound(dir: &Path) -> io::Result<()> {
    match is_mount(dir) {
        Ok(false) => return Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Ok(true) | Err(_) => {}
    }
    match unmount(dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        done => Ok(done?),
    }
}

/// Returns whether a folder is on another file system than the one above it.
fn is_mount(dir: &Path) -> io::Result<bool> {
    let above = dir.parent().unwrap_or(dir);
    let device = |path: &Path| Ok::<_, io::Error>(fs_err::symlink_metadata(path)?.dev());
    Ok(device(dir)? != device(above)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_in_mebibytes_and_gibibytes() {
        for (text, expected) in [
            ("4Gi", Some(4 << 30)),
            ("512Mi", Some(512 << 20)),
            ("0Gi", None),
            ("4G", None),
            ("-1Gi", None),
            ("17179869184Gi", None),
            ("Gi", None),
            ("", None),
        ] {
            assert_eq!(text.parse().ok(), expected.map(Size), "{text}");
        }
        let error = "half".parse::<Size>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "\"half\" is no size (write 4Gi or 512Mi)"
        );
    }

    #[test]
    fn bounds_are_those_of_a_tmpfs() {
        let memory = Bounds::of_memory("4Gi".parse().unwrap());
        let expected = "size=4294967296,nr_inodes=65536,mode=1777";
        assert_eq!(memory.to_string(), expected);
        let sockets = Bounds::of_sockets();
        assert_eq!(sockets.to_string(), "size=1048576,nr_inodes=4096,mode=755");
    }
}
