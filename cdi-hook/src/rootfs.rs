//! The container's root file system, used without ever leaving it.
//!
//! Every path is opened by `openat2` relative to the root's descriptor with `RESOLVE_IN_ROOT`: the
//! kernel treats the root as `/` for absolute links and `..` alike, also when folders are exchanged
//! for links meanwhile. Two kinds of paths are distinguished by [`Reach`]:
//!
//! - Paths of the image stay on the root's own mount (`RESOLVE_NO_XDEV`), for reading and for
//!   writing. The hook runs as root before the container is confined: a link of the image may lead
//!   to a file of `/proc` that is not masked yet, or to a file of a volume that only root may read.
//!   A copy of it would be open to the container's users. And a volume of the pod, perhaps a folder
//!   of the host, is never changed.
//! - Paths of the runtime (`/dev`, `/proc`) enter mounts, but follow no link.
//!
//! A file that replaces another one keeps its owner and mode, so that no copy has more readers.

use std::ffi::CString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Gid, Mode, OFlags, RawDir, ResolveFlags, Stat, Uid};
use rustix::io::Errno;

use crate::error::HookError;
use crate::read_only::{Opened, mounts_in};

/// Bounds on what an image can make the hook read and keep.
const MOST_BYTES: u64 = 16 << 20;
const MOST_FILES: usize = 16 << 10;
const FOLDER_MODE: u32 = 0o755;

/// Limit on how far a path may lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Files of the image. Its links are followed among them; no mount is entered.
    Image,
    /// Files that the runtime has mounted. No link is followed, so the image does not choose them.
    Runtime,
}

impl Reach {
    fn rules(self) -> ResolveFlags {
        let limit = match self {
            Self::Image => ResolveFlags::NO_XDEV,
            Self::Runtime => ResolveFlags::NO_SYMLINKS,
        };
        // `RESOLVE_IN_ROOT` excludes magic links (`/proc/PID/root`), too, but openat2(2) says that
        // this may change.
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | limit
    }
}

/// Owner and mode of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rights {
    mode: u32,
    /// User and group; `None` stands for those of the hook, which is root of the container.
    owner: Option<(u32, u32)>,
}

impl Rights {
    /// Rights of a file that every user may read: one without any content of the image.
    pub(crate) const PUBLIC: Self = Self {
        mode: 0o644,
        owner: None,
    };

    fn of(seen: &Stat) -> Self {
        Self {
            mode: seen.st_mode & 0o777,
            owner: Some((seen.st_uid, seen.st_gid)),
        }
    }

    /// Returns `true` if every user may read the file.
    pub(crate) fn is_public(self) -> bool {
        self.mode & 0o004 != 0
    }
}

/// Content of a file, with the rights that a changed copy of it keeps.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) bytes: Vec<u8>,
    pub(crate) rights: Rights,
}

/// Root of one container.
#[derive(Debug)]
pub(crate) struct RootFs {
    root: OwnedFd,
}

impl RootFs {
    /// Opens the root at `path` of the host.
    pub(crate) fn open(path: &Path) -> Result<Self, HookError> {
        let opened = fs::open(
            path,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        let failed = |error: Errno| HookError::Root {
            path: PathBuf::from(path),
            source: error.into(),
        };
        let root = opened.map_err(failed)?;
        // No runtime makes a container of it, and all that is written below would be the host's.
        let own = fs::stat("/").map_err(failed)?;
        if is_same(&fs::fstat(&root).map_err(failed)?, &own) {
            return Err(HookError::HostsRoot {
                path: PathBuf::from(path),
            });
        }
        Ok(Self { root })
    }

    /// Runs a step that changes the root, also where the runtime has made its mount read-only
    /// already ([`crate::read_only`]).
    pub(crate) fn change(
        &self,
        step: impl FnOnce() -> Result<(), HookError>,
    ) -> Result<(), HookError> {
        let opened = Opened::new(&self.root);
        let outcome = step();
        // Also after a failure: a step may be left out, and the container starts.
        let closed = opened.map_or(Ok(()), Opened::close);
        outcome.and(closed.map_err(|error| HookError::inside("make read-only again", "/", error)))
    }

    fn way<'a>(&'a self, path: &'a str, reach: Reach) -> Way<'a> {
        Way {
            start: self.root.as_fd(),
            name: path.as_bytes(),
            rules: reach.rules(),
            path,
        }
    }

    /// Returns `true` if the image has something at `path`, links followed.
    pub(crate) fn exists(&self, path: &str) -> bool {
        // With `O_PATH` nothing is opened: a look has no effect on a pipe or a device.
        self.way(path, Reach::Image).open(OFlags::PATH).is_ok()
    }

    /// Returns whether the image has something at `path`, links followed; fails with `EXDEV` if the
    /// path leads into a mount.
    pub(crate) fn has(&self, path: &str) -> Result<bool, HookError> {
        match self.way(path, Reach::Image).open(OFlags::PATH) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(error) => Err(HookError::inside("open", path, error)),
        }
    }

    /// Lists the names of mounts that are in a folder, by the list of mounts: a folder of a volume
    /// is not opened for it.
    pub(crate) fn mounted_in(&self, folder: &str) -> Result<Vec<String>, HookError> {
        let failed = |error: io::Error| HookError::inside("list the mounts of", folder, error);
        let own = format!("/proc/self/fd/{}", self.root.as_raw_fd());
        let own = fs_err::read_link(own).map_err(failed)?;
        let folder = own.join(folder.trim_start_matches('/'));
        mounts_in(&folder).map_err(failed)
    }

    /// Reads the first bytes of a file that is mounted at `path`, no link followed.
    pub(crate) fn head_of_mount<const N: usize>(&self, path: &str) -> Result<[u8; N], HookError> {
        let mut found = self.way(path, Reach::Runtime).find_file()?;
        let mut bytes = [0; N];
        let read = found.file.read_exact(&mut bytes);
        read.map_err(|error| HookError::inside("read", path, error))?;
        Ok(bytes)
    }

    /// Finds a folder of the runtime without opening it.
    pub(crate) fn find(&self, path: &str) -> Result<OwnedFd, HookError> {
        self.way(path, Reach::Runtime)
            .open(OFlags::PATH)
            .map_err(|error| HookError::inside("open", path, error))
    }

    /// Reads a file of the image; `None` if there is none. It fails with `EXDEV`
    /// ([`HookError::is_outside`]) if the path leads into a mount.
    pub(crate) fn read(&self, path: &str) -> Result<Option<Content>, HookError> {
        let found = self.way(path, Reach::Image).find_file();
        present(found)?.map(|found| found.read(path)).transpose()
    }

    /// Reads a file of the runtime, and returns its place, too, so that what is done there next
    /// is done to the same file; `None` if there is none.
    pub(crate) fn read_of_runtime(
        &self,
        path: &str,
    ) -> Result<Option<(OwnedFd, Content)>, HookError> {
        let Some(found) = present(self.way(path, Reach::Runtime).find_file())? else {
            return Ok(None);
        };
        let content = found.read(path)?;
        Ok(Some((found.place, content)))
    }

    /// Reads the first bytes of `name` in a folder of the image. `name` is a file of the image, or
    /// one that is mounted in this very folder, as the driver's libraries are, or a link to either.
    pub(crate) fn head<const N: usize>(
        &self,
        folder: &str,
        name: &str,
    ) -> Result<[u8; N], HookError> {
        let path = format!("{folder}/{name}");
        let mut found = match self.way(&path, Reach::Image).find_file() {
            Err(error) if error.is_outside() => self.find_mounted(folder, name, &path)?,
            other => other?,
        };
        let mut bytes = [0; N];
        found
            .file
            .read_exact(&mut bytes)
            .map_err(|error| HookError::inside("read", &path, error))?;
        Ok(bytes)
    }

    /// Finds a file that is mounted at `name` in `folder`, or at another name of it to which `name`
    /// is a link. A link with a `/` in it could lead into any mount, and is refused.
    fn find_mounted(&self, folder: &str, name: &str, path: &str) -> Result<Found, HookError> {
        const LINKS: usize = 8;
        let failed = |error: Errno| HookError::inside("read", path, error);
        let folder = self
            .way(folder, Reach::Image)
            .open(OFlags::PATH | OFlags::DIRECTORY)
            .map_err(failed)?;
        let mut name = CString::new(name).map_err(|_| failed(Errno::INVAL))?;
        for _ in 0..LINKS {
            match fs::readlinkat(&folder, &name, Vec::new()) {
                Ok(target) if !target.as_bytes().contains(&b'/') => name = target,
                Ok(_) => return Err(failed(Errno::XDEV)),
                // Not a link, so it is the mount.
                Err(Errno::INVAL) => {
                    let mounted = Way {
                        start: folder.as_fd(),
                        name: name.as_bytes(),
                        rules: ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
                        path,
                    };
                    return mounted.find_file();
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Err(failed(Errno::LOOP))
    }

    /// Lists the names in a folder, sorted; none if there is no such folder.
    pub(crate) fn names(&self, path: &str, reach: Reach) -> Result<Vec<String>, HookError> {
        let failed = |error: Errno| HookError::inside("list", path, error);
        let folder = match self
            .way(path, reach)
            .open(OFlags::RDONLY | OFlags::DIRECTORY)
        {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut buffer = Vec::with_capacity(8192);
        let mut entries = RawDir::new(folder, buffer.spare_capacity_mut());
        let (mut names, mut count) = (Vec::new(), 0usize);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(failed)?;
            if matches!(entry.file_name().to_bytes(), b"." | b"..") {
                continue;
            }
            count += 1;
            if count > MOST_FILES {
                return Err(HookError::inside(
                    "list",
                    path,
                    io::Error::other("more than 16384 files"),
                ));
            }
            // A name that is not text belongs to no file of the driver or of the hook.
            if let Ok(name) = entry.file_name().to_str() {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Opens the folder of `path`, made where it is missing; returns it and the name in it.
    fn folder_of<'a>(&self, path: &'a str) -> Result<(OwnedFd, &'a str), HookError> {
        let failed = |error: Errno| HookError::inside("make the folder of", path, error);
        let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let name = parts.pop().ok_or_else(|| failed(Errno::INVAL))?;
        let open = |place: &str| {
            self.way(place, Reach::Image)
                .open(OFlags::PATH | OFlags::DIRECTORY)
        };
        let (mut folder, mut place) = (open("/").map_err(failed)?, String::new());
        // Each folder by its whole path from the root, so that the kernel resolves links within the
        // root. Only `mkdirat` goes by the parent, with a name of one part.
        for part in parts {
            place.push('/');
            place.push_str(part);
            folder = match open(&place) {
                Err(Errno::NOENT) => {
                    match fs::mkdirat(&folder, part, Mode::from_raw_mode(FOLDER_MODE)) {
                        // A link that leads nowhere, or made meanwhile: opening it again shows
                        // which.
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(error) => return Err(failed(error)),
                    }
                    open(&place).map_err(failed)?
                }
                other => other.map_err(failed)?,
            };
        }
        Ok((folder, name))
    }

    /// Writes a file as a whole: anything at `path`, a link included, is replaced and not followed.
    /// Fails if a folder or a mount is there.
    pub(crate) fn write(&self, path: &str, bytes: &[u8], rights: Rights) -> Result<(), HookError> {
        const CLOSED: u32 = 0o600;
        let failed = |error: io::Error| HookError::inside("write", path, error);
        let (folder, name) = self.folder_of(path)?;
        let temporary = temporary(name);
        let make = || -> io::Result<()> {
            // Made beside its place and closed to others.
            let flags =
                OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = fs::openat(
                &folder,
                temporary.as_str(),
                flags,
                Mode::from_raw_mode(CLOSED),
            )?;
            // The owner first: with the mode first, a group that must not read could for a moment.
            if let Some((user, group)) = rights.owner {
                let own = fs::fstat(&file)?;
                if (own.st_uid, own.st_gid) != (user, group) {
                    fs::fchown(&file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
                }
            }
            fs::fchmod(&file, Mode::from_raw_mode(rights.mode))?;
            std::fs::File::from(file).write_all(bytes)?;
            // In its place only when it is whole.
            fs::renameat(&folder, temporary.as_str(), &folder, name)?;
            Ok(())
        };
        put(&folder, &temporary, make).map_err(failed)
    }

    /// Makes a link; anything at `path` is replaced, unless it is a folder.
    pub(crate) fn link(&self, target: &str, path: &str) -> Result<(), HookError> {
        let failed = |error: io::Error| HookError::inside("make the link", path, error);
        let (folder, name) = self.folder_of(path)?;
        // A link that is right already is left alone, so that an image that is read-only needs no
        // change.
        if fs::readlinkat(&folder, name, Vec::new())
            .is_ok_and(|old| old.as_bytes() == target.as_bytes())
        {
            return Ok(());
        }
        let temporary = temporary(name);
        let make = || -> io::Result<()> {
            fs::symlinkat(target, &folder, temporary.as_str())?;
            fs::renameat(&folder, temporary.as_str(), &folder, name)?;
            Ok(())
        };
        put(&folder, &temporary, make).map_err(failed)
    }
}

/// Path with a start and the rules by which the kernel resolves it.
struct Way<'a> {
    start: BorrowedFd<'a>,
    name: &'a [u8],
    rules: ResolveFlags,
    /// Path as errors show it.
    path: &'a str,
}

impl Way<'_> {
    fn open(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        const TRIES: usize = 16;
        let flags = flags | OFlags::CLOEXEC;
        let mut last = Errno::AGAIN;
        for _ in 0..TRIES {
            match fs::openat2(self.start, self.name, flags, Mode::empty(), self.rules) {
                // A folder on the way is being renamed; the kernel asks for another try.
                Err(error @ (Errno::AGAIN | Errno::INTR)) => last = error,
                other => return other,
            }
        }
        Err(last)
    }

    /// Opens a regular file, and nothing else: opening a pipe would wait for a writer, opening a
    /// device might do anything.
    fn find_file(&self) -> Result<Found, HookError> {
        // Look first, then open, then compare: the path may be exchanged in between.
        let (place, seen) = self.look()?;
        let file = self.open_seen(&seen)?;
        Ok(Found { place, seen, file })
    }

    /// Finds a regular file without opening it.
    fn look(&self) -> Result<(OwnedFd, Stat), HookError> {
        let failed = |error: Errno| self.failed(error);
        let place = self.open(OFlags::PATH).map_err(failed)?;
        let seen = fs::fstat(&place).map_err(failed)?;
        if FileType::from_raw_mode(seen.st_mode) != FileType::RegularFile {
            return Err(self.failed(io::Error::other("not a regular file")));
        }
        Ok((place, seen))
    }

    /// Opens the file that was seen; fails if another has taken its place.
    fn open_seen(&self, seen: &Stat) -> Result<std::fs::File, HookError> {
        let failed = |error: Errno| self.failed(error);
        // Should it have been exchanged for a pipe or a terminal, opening it neither waits nor
        // gives the hook a controlling terminal.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = self.open(flags).map_err(failed)?;
        if !is_same(&fs::fstat(&file).map_err(failed)?, seen) {
            return Err(self.failed(io::Error::other("it was exchanged meanwhile")));
        }
        Ok(file.into())
    }

    fn failed(&self, source: impl Into<io::Error>) -> HookError {
        HookError::inside("read", self.path, source)
    }
}

/// Regular file, opened.
struct Found {
    place: OwnedFd,
    seen: Stat,
    file: std::fs::File,
}

impl Found {
    fn read(&self, path: &str) -> Result<Content, HookError> {
        let mut bytes = Vec::new();
        let failed = |error| HookError::inside("read", path, error);
        // A byte more than is permitted, to see that there is more.
        (&self.file)
            .take(MOST_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        if bytes.len() as u64 > MOST_BYTES {
            // Cut off, a configuration would be another one.
            return Err(failed(io::Error::other("larger than 16 MiB")));
        }
        Ok(Content {
            bytes,
            rights: Rights::of(&self.seen),
        })
    }
}

/// Turns the failure that there is no file into `None`.
fn present<T>(found: Result<T, HookError>) -> Result<Option<T>, HookError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_missing() => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

fn temporary(name: &str) -> String {
    format!(".{name}.divvy-{}", std::process::id())
}

/// Runs `make`, which makes `temporary` and renames it.
///
/// Phases: make; if something has that name already, remove it and make once more; if that failed,
/// remove what was made. A left-over can only be the hook's own, or an image's that wants to be in
/// the way; it is removed and never written into, as it may be a hard link.
fn put(folder: &impl AsFd, temporary: &str, make: impl Fn() -> io::Result<()>) -> io::Result<()> {
    let remove = || fs::unlinkat(folder, temporary, AtFlags::empty());
    let mut outcome = make();
    if matches!(&outcome, Err(error) if error.kind() == io::ErrorKind::AlreadyExists) {
        remove()?;
        outcome = make();
    }
    outcome.inspect_err(|_| {
        // The first failure is the one to report.
        let _ = remove();
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_exchanged_between_look_and_opening_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = RootFs::open(dir.path()).unwrap();
        let path = dir.path().join("file");
        fs_err::write(&path, b"first").unwrap();
        let way = root.way("/file", Reach::Image);
        let (_, seen) = way.look().unwrap();
        way.open_seen(&seen).unwrap();
        fs_err::rename(&path, dir.path().join("away")).unwrap();
        fs_err::write(&path, b"second").unwrap();
        let error = way.open_seen(&seen).unwrap_err();
        assert!(
            crate::error::chain(&error).ends_with("it was exchanged meanwhile"),
            "{error}"
        );
    }
}
