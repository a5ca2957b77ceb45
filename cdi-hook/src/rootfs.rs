//! The container's root file system, used without ever leaving it.
//!
//! Every path is opened by `openat2` relative to the root's descriptor with `RESOLVE_IN_ROOT`: the kernel treats the root as
//! `/` for absolute links and `..` alike, also when folders are exchanged for links meanwhile. Writing in addition
//! stays on the root's own mount (`RESOLVE_NO_XDEV`): a volume of the pod, perhaps a folder of the host, is never changed.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::error::HookError;

/// Bound what an image can make us read and keep.
const MOST_BYTES: u64 = 16 << 20;
const MOST_FILES: usize = 16 << 10;
const FOLDER_MODE: u32 = 0o755;

/// Whether a path may lead into file systems that are mounted in the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mounts {
    Enter,
    Refuse,
}

/// The root of one container.
#[derive(Debug)]
pub(crate) struct RootFs {
    root: OwnedFd,
}

impl RootFs {
    pub(crate) fn open(path: &Path) -> Result<Self, HookError> {
        let opened = fs::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let failed = |error: Errno| HookError::Root { path: PathBuf::from(path), source: error.into() };
        let root = opened.map_err(failed)?;
        // No runtime makes a container of it, and all that is written below would be the host's.
        let own = fs::stat("/").map_err(failed)?;
        if is_same(&fs::fstat(&root).map_err(failed)?, &own) {
            return Err(HookError::HostsRoot { path: PathBuf::from(path) });
        }
        Ok(Self { root })
    }

    fn resolve(&self, path: &str, flags: OFlags, mounts: Mounts) -> Result<OwnedFd, Errno> {
        const TRIES: usize = 16;
        let mut resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        if mounts == Mounts::Refuse {
            resolve |= ResolveFlags::NO_XDEV;
        }
        let mut last = Errno::AGAIN;
        for _ in 0..TRIES {
            match fs::openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                // A folder on the way is being renamed; the kernel asks for another try.
                Err(error @ (Errno::AGAIN | Errno::INTR)) => last = error,
                other => return other,
            }
        }
        Err(last)
    }

    /// A place that exists, links followed, mounts entered.
    pub(crate) fn find(&self, path: &str) -> Result<OwnedFd, HookError> {
        self.resolve(path, OFlags::PATH, Mounts::Enter)
            .map_err(|error| HookError::inside("open", path, error))
    }

    pub(crate) fn exists(&self, path: &str) -> bool {
        self.resolve(path, OFlags::PATH, Mounts::Enter).is_ok()
    }

    /// Opens a regular file, and nothing else: opening a pipe would hang, opening a device might do anything.
    fn open_file(&self, path: &str) -> Result<std::fs::File, HookError> {
        self.open_seen(path, &self.look_at(path)?)
    }

    /// What is at `path`, which must be a regular file, without opening it.
    fn look_at(&self, path: &str) -> Result<Stat, HookError> {
        let failed = |error: Errno| HookError::inside("read", path, error);
        let place = self.resolve(path, OFlags::PATH, Mounts::Enter).map_err(failed)?;
        let seen = fs::fstat(&place).map_err(failed)?;
        if FileType::from_raw_mode(seen.st_mode) != FileType::RegularFile {
            return Err(HookError::inside("read", path, io::Error::other("not a regular file")));
        }
        Ok(seen)
    }

    /// Opens what was looked at. On a volume that others write to, something else may have taken its place.
    fn open_seen(&self, path: &str, seen: &Stat) -> Result<std::fs::File, HookError> {
        let failed = |error: Errno| HookError::inside("read", path, error);
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = self.resolve(path, flags, Mounts::Enter).map_err(failed)?;
        if !is_same(&fs::fstat(&file).map_err(failed)?, seen) {
            return Err(HookError::inside("read", path, io::Error::other("it was exchanged meanwhile")));
        }
        Ok(file.into())
    }

    /// The content of a file; `None` if there is none.
    pub(crate) fn read(&self, path: &str) -> Result<Option<Vec<u8>>, HookError> {
        let file = match self.open_file(path) {
            Ok(file) => file,
            Err(error) if error.is_missing() => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        let failed = |error| HookError::inside("read", path, error);
        file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MOST_BYTES {
            // Cut off, a configuration would be another one.
            return Err(failed(io::Error::other("larger than 16 MiB")));
        }
        Ok(Some(bytes))
    }

    /// The first bytes of a file.
    pub(crate) fn head<const N: usize>(&self, path: &str) -> Result<[u8; N], HookError> {
        let mut bytes = [0; N];
        let mut file = self.open_file(path)?;
        file.read_exact(&mut bytes).map_err(|error| HookError::inside("read", path, error))?;
        Ok(bytes)
    }

    /// The names in a folder, sorted; empty if there is no such folder.
    pub(crate) fn names(&self, path: &str) -> Result<Vec<String>, HookError> {
        let failed = |error: Errno| HookError::inside("list", path, error);
        let folder = match self.resolve(path, OFlags::RDONLY | OFlags::DIRECTORY, Mounts::Enter) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut buffer = Vec::with_capacity(8192);
        let mut entries = RawDir::new(folder, buffer.spare_capacity_mut());
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            if names.len() > MOST_FILES {
                return Err(HookError::inside("list", path, io::Error::other("more than 16384 files")));
            }
            // A name that is not text is nothing that we or the driver made.
            if let Ok(name) = entry.map_err(failed)?.file_name().to_str() {
                names.push(name.to_owned());
            }
        }
        names.retain(|name| name != "." && name != "..");
        names.sort();
        Ok(names)
    }

    /// The folder of `path`, made where it is missing, and the name in it.
    fn folder_of<'a>(&self, path: &'a str) -> Result<(OwnedFd, &'a str), HookError> {
        let failed = |error: Errno| HookError::inside("make the folder of", path, error);
        let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let name = parts.pop().ok_or_else(|| failed(Errno::INVAL))?;
        let open = |place: &str| self.resolve(place, OFlags::PATH | OFlags::DIRECTORY, Mounts::Refuse);
        let (mut folder, mut place) = (open("/").map_err(failed)?, String::new());
        for part in parts {
            place.push('/');
            place.push_str(part);
            folder = match open(&place) {
                Err(Errno::NOENT) => {
                    match fs::mkdirat(&folder, part, Mode::from_raw_mode(FOLDER_MODE)) {
                        // A link that leads nowhere, or made meanwhile: opening it again shows which.
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

    /// Writes a file as a whole: whatever is at `path`, a link included, is replaced and not followed.
    pub(crate) fn write(&self, path: &str, bytes: &[u8]) -> Result<(), HookError> {
        const MODE: u32 = 0o644;
        let failed = |error: io::Error| HookError::inside("write", path, error);
        let (folder, name) = self.folder_of(path)?;
        let temporary = temporary(name);
        let make = || -> io::Result<()> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = fs::openat(&folder, temporary.as_str(), flags, Mode::from_raw_mode(MODE))?;
            // Not subject to the umask that the runtime happens to have.
            fs::fchmod(&file, Mode::from_raw_mode(MODE))?;
            std::fs::File::from(file).write_all(bytes)?;
            fs::renameat(&folder, temporary.as_str(), &folder, name)?;
            Ok(())
        };
        put(&folder, &temporary, make).map_err(failed)
    }

    /// Makes a link; whatever is at `path` is replaced, unless it is a folder.
    pub(crate) fn link(&self, target: &str, path: &str) -> Result<(), HookError> {
        let failed = |error: io::Error| HookError::inside("make the link", path, error);
        let (folder, name) = self.folder_of(path)?;
        if fs::readlinkat(&folder, name, Vec::new()).is_ok_and(|old| old.as_bytes() == target.as_bytes()) {
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

fn is_same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

fn temporary(name: &str) -> String {
    format!(".{name}.divvy-{}", std::process::id())
}

/// Runs `make`, which makes `temporary` and renames it; cleans up around it. A left-over can only be of our own making or
/// of an image that wants to be in the way; neither is worth keeping.
fn put(folder: &impl AsFd, temporary: &str, make: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let remove = || fs::unlinkat(folder, temporary, AtFlags::empty());
    match remove() {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error.into()),
    }
    make().inspect_err(|_| {
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
        let seen = root.look_at("/file").unwrap();
        root.open_seen("/file", &seen).unwrap();
        fs_err::rename(&path, dir.path().join("away")).unwrap();
        fs_err::write(&path, b"second").unwrap();
        let error = root.open_seen("/file", &seen).unwrap_err();
        assert!(crate::error::chain(&error).ends_with("it was exchanged meanwhile"), "{error}");
    }
}
