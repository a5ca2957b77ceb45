//! Roots that are read-only before the hook has run.
//!
//! A container with a read-only root has a layer of its own all the same. runc and crun from 1.26
//! on make its mount read-only after `createContainer` hooks, older crun before them. The hook
//! makes it writable for as long as it works, so that a container gets the same from each: its
//! program does not run yet, and no other process is in its mount namespace.
//!
//! A root that *is* read-only stays so: a read-only file system, and a read-only mount of files
//! that may be others' too, as a layer that containers share. Hence only a mount that hides the
//! very same folder, which can be written to underneath, is made writable, or one that has a whole
//! file system.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount_remount};

/// Mounts that the hook sees.
const MOUNTS: &str = "/proc/self/mountinfo";

/// Mount of a root that was made writable.
#[derive(Debug)]
pub(crate) struct Opened<'a> {
    root: BorrowedFd<'a>,
    flags: MountFlags,
}

impl<'a> Opened<'a> {
    /// Makes the root's mount writable; `None` if it is, or if it must stay as it is.
    pub(crate) fn new(root: &'a impl AsFd) -> Option<Self> {
        let root = root.as_fd();
        let mask = StatxFlags::MNT_ID;
        let seen = statx(root, "", AtFlags::EMPTY_PATH, mask).ok()?;
        if seen.stx_mask & mask.bits() == 0 {
            return None;
        }
        let mounts = fs_err::read(MOUNTS).ok()?;
        let flags = to_be_opened(&mounts, seen.stx_mnt_id)?;
        remount(root, flags).ok()?;
        Some(Self { root, flags })
    }

    /// Makes it read-only again.
    pub(crate) fn close(self) -> Result<(), Errno> {
        remount(self.root, self.flags | MountFlags::RDONLY)
    }
}

/// Lists the names of the mounts that are in a folder.
pub(crate) fn mounts_in(folder: &Path) -> std::io::Result<Vec<String>> {
    let mounts = fs_err::read(MOUNTS)?;
    let seen = mounts.split(|b| *b == b'\n').filter_map(Seen::parse);
    let here = seen.filter(|mount| mount.place.parent() == Some(folder));
    // A name that is not text belongs to no file of the driver.
    let names = here.filter_map(|mount| Some(mount.place.file_name()?.to_str()?.to_owned()));
    Ok(names.collect())
}

/// Changes the flags of the root's mount.
fn remount(root: BorrowedFd<'_>, flags: MountFlags) -> Result<(), Errno> {
    // `mount` takes no descriptor. The working directory is the root, whatever a path leads to.
    rustix::process::fchdir(root)?;
    let outcome = mount_remount(".", MountFlags::BIND | flags, "");
    rustix::process::chdir("/")?;
    outcome
}

/// Returns the other flags of the mount with this number, if it is read-only and is to be made
/// writable.
fn to_be_opened(mounts: &[u8], id: u64) -> Option<MountFlags> {
    let find = |id| {
        mounts
            .split(|b| *b == b'\n')
            .filter_map(Seen::parse)
            .find(|m| m.id == id)
    };
    let own = find(id)?;
    if own.is_writable() || !own.has_writable_files {
        return None;
    }
    let is_whole = own.root == Path::new("/");
    let covers_itself =
        || find(own.parent).is_some_and(|below| below.is_writable() && below.has_same_folder(&own));
    (is_whole || covers_itself()).then(|| own.flags())
}

/// Line of `mountinfo`.
#[derive(Debug)]
struct Seen<'a> {
    id: u64,
    parent: u64,
    device: &'a [u8],
    /// Folder of the file system that is mounted.
    root: PathBuf,
    place: PathBuf,
    options: &'a [u8],
    /// `true` if the file system can be written to.
    has_writable_files: bool,
}

impl<'a> Seen<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let number = |field: Option<&[u8]>| std::str::from_utf8(field?).ok()?.parse().ok();
        let (id, parent) = (number(fields.next())?, number(fields.next())?);
        let (device, root, place) = (fields.next()?, fields.next()?, fields.next()?);
        let options = fields.next()?;
        // Optional fields end with a dash; behind it are type, source and options.
        fields.find(|field| *field == b"-")?;
        let of_files = fields.nth(2)?;
        Some(Self {
            id,
            parent,
            device,
            root: unescaped(root),
            place: unescaped(place),
            options,
            has_writable_files: has(of_files, "rw"),
        })
    }

    fn is_writable(&self) -> bool {
        has(self.options, "rw")
    }

    /// Returns `true` if this mount has, where `above` is mounted, the folder that `above` shows.
    fn has_same_folder(&self, above: &Seen<'_>) -> bool {
        let Ok(way) = above.place.strip_prefix(&self.place) else {
            return false;
        };
        self.device == above.device && self.root.join(way) == above.root
    }

    /// Returns the flags that a change of the mount would clear if they were not named.
    fn flags(&self) -> MountFlags {
        // `MS_NOSYMFOLLOW`, which rustix does not name.
        let no_links = MountFlags::from_bits_retain(0x100);
        [
            ("nosuid", MountFlags::NOSUID),
            ("nodev", MountFlags::NODEV),
            ("noexec", MountFlags::NOEXEC),
            ("noatime", MountFlags::NOATIME),
            ("nodiratime", MountFlags::NODIRATIME),
            ("relatime", MountFlags::RELATIME),
            ("nosymfollow", no_links),
        ]
        .into_iter()
        .filter(|(name, _)| has(self.options, name))
        .fold(MountFlags::empty(), |flags, (_, flag)| flags | flag)
    }
}

fn has(options: &[u8], name: &str) -> bool {
    options
        .split(|b| *b == b',')
        .any(|option| option == name.as_bytes())
}

/// Reads a path in which the kernel wrote blanks and backslashes as octal numbers.
fn unescaped(text: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let octal = (*first == b'\\')
            .then(|| after.split_at_checked(3))
            .flatten();
        let number = octal.and_then(|(digits, after)| {
            let digits = std::str::from_utf8(digits).ok()?;
            Some((u8::from_str_radix(digits, 8).ok()?, after))
        });
        let (byte, after) = number.unwrap_or((*first, after));
        bytes.push(byte);
        rest = after;
    }
    PathBuf::from(OsStr::from_bytes(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OVER_ITSELF: &str = "\
20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 20 0:40 / /run/b/rootfs rw,relatime - overlay overlay rw,lowerdir=/a
31 30 0:40 / /run/b/rootfs ro,nosuid,relatime master:3 - overlay overlay rw,lowerdir=/a
";

    fn found(mounts: &str, id: u64) -> Option<MountFlags> {
        to_be_opened(mounts.as_bytes(), id)
    }

    #[test]
    fn a_root_that_its_runtime_closed_is_opened_with_its_other_flags() {
        let flags = MountFlags::NOSUID | MountFlags::RELATIME;
        assert_eq!(found(OVER_ITSELF, 31), Some(flags));
        // A folder of the host, and one with a blank in its name.
        for path in ["/b/rootfs", "/a\\040b/rootfs"] {
            let mounts = format!(
                "20 1 8:1 /@ / rw - ext4 /dev/sda1 rw\n30 20 8:1 /@{path} {path} ro - ext4 /dev/sda1 rw\n"
            );
            assert_eq!(found(&mounts, 30), Some(MountFlags::empty()), "{path}");
        }
        // A whole file system, over nothing.
        let whole = "31 20 0:50 / /run/b/rootfs ro - tmpfs layer rw\n";
        assert_eq!(found(whole, 31), Some(MountFlags::empty()));
    }

    #[test]
    fn a_root_that_others_may_have_too_stays_read_only() {
        for (mounts, why) in [
            (
                OVER_ITSELF.replace("overlay rw", "overlay ro"),
                "the file system is read-only",
            ),
            (
                "20 1 8:1 / / rw - ext4 d rw\n31 20 8:1 /layers/5 /run/b/rootfs ro - ext4 d rw\n"
                    .to_owned(),
                "a layer is mounted read-only",
            ),
            (
                "20 1 8:1 / / rw - ext4 d rw\n30 20 8:1 /layers/5 /b ro - ext4 d rw\n\
                 31 30 8:1 /layers/5 /b ro - ext4 d rw\n"
                    .to_owned(),
                "the same, under a mount of the runtime",
            ),
            (
                "20 1 8:2 / / rw - ext4 e rw\n31 20 8:1 /b /b ro - ext4 d rw\n".to_owned(),
                "another file system is underneath",
            ),
            ("31 20 8:1 /b /b ro\n".to_owned(), "a line that is cut off"),
            (OVER_ITSELF.replace("31 30", "32 30"), "no such mount"),
        ] {
            assert_eq!(found(&mounts, 31), None, "{why}");
        }
        assert_eq!(found(OVER_ITSELF, 30), None, "it is writable");
    }
}
