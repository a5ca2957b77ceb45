//! A root that has no file of the host but this program and what its loader needs: what an image
//! has.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind_recursive, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Exit status of a process that may not have a mount namespace of its own.
pub(crate) const NOT_ALLOWED: u8 = 5;

/// Where this program is in such a root.
pub(crate) const PROGRAM: &str = "/usr/bin/divvy-hardware";

/// Libraries of the libc that NVIDIA's libraries ask for.
const NEEDED: [&str; 4] = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6"];

/// Where programs look for their loader.
const LOADERS: [&str; 2] = ["/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"];

/// This process in a mount namespace of its own, and the files that its program needs.
pub(crate) struct Alone {
    program: PathBuf,
    libraries: BTreeSet<PathBuf>,
}

impl Alone {
    /// `None` if it is not allowed here.
    pub(crate) fn new() -> Result<Option<Self>> {
        // Before: afterwards the paths of what is mapped are those of the namespace that is left.
        let libraries = libraries(&fs_err::read_to_string("/proc/self/maps")?, &|path| {
            path.exists()
        });
        let program = std::env::current_exe()?;
        // SAFETY: no thread has been started in this process; only the mount namespace is left, not
        // the file table.
        let left = unsafe { unshare_unsafe(UnshareFlags::NEWNS) };
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        let alone = left.is_ok() && mount_change("/", private).is_ok();
        Ok(alone.then_some(Self { program, libraries }))
    }

    /// Makes the root in an empty folder.
    pub(crate) fn make(&self, root: &Path) -> Result<()> {
        mount("tmpfs", root, "tmpfs", MountFlags::NOSUID, None::<&CStr>)?;
        for folder in ["etc", "tmp"] {
            fs_err::create_dir(root.join(folder))?;
        }
        for library in &self.libraries {
            bind(library, &below(root, library))?;
        }
        bind(&self.program, &below(root, Path::new(PROGRAM)))
    }
}

/// The libraries of a process that has loaded none by itself, and those beside its libc.
fn libraries(maps: &str, exists: &dyn Fn(&Path) -> bool) -> BTreeSet<PathBuf> {
    let paths = maps.lines().filter_map(|line| {
        line.find('/')
            .and_then(|at| line.get(at..))
            .map(PathBuf::from)
    });
    let is_library = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().contains(".so"))
    };
    let mut all: BTreeSet<_> = paths.filter(is_library).collect();
    let beside = all.iter().find(|path| path.ends_with("libc.so.6")).cloned();
    let beside = beside
        .iter()
        .flat_map(|libc| NEEDED.map(|name| libc.with_file_name(name)));
    let more: Vec<_> = beside
        .chain(LOADERS.map(PathBuf::from))
        .filter(|path| exists(path))
        .collect();
    all.extend(more);
    all
}

/// A path of the root as it is seen from outside.
pub(crate) fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Makes a file or folder be seen at another place too.
pub(crate) fn bind(from: &Path, to: &Path) -> Result<()> {
    let what = || format!("binding {} to {}", from.display(), to.display());
    fs_err::create_dir_all(to.parent().unwrap_or(to))?;
    if from.is_dir() {
        fs_err::create_dir_all(to)?;
    } else if !to.exists() {
        fs_err::write(to, "")?;
    }
    mount_bind_recursive(from, to).with_context(what)
}

/// Enters the root.
pub(crate) fn enter(root: &Path) -> Result<()> {
    rustix::process::chroot(root)?;
    rustix::process::chdir(CString::new("/")?.as_c_str())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_needs_is_what_it_has_mapped_and_what_is_beside_its_libc() {
        let maps = "55-56 r-xp 0 08:01 1 /opt/divvy-hardware\n\
                    7f-80 r-xp 0 08:01 2      /usr/lib/x86_64-linux-gnu/libc.so.6\n\
                    7f-80 r--p 0 08:01 3      /usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2\n\
                    7f-80 rw-p 0 00:00 0      [stack]\n";
        let exists = |path: &Path| !path.ends_with("librt.so.1") && !path.starts_with("/lib");
        let found = libraries(maps, &|path| path.starts_with("/lib64") || exists(path));
        let names: Vec<_> = found
            .iter()
            .map(|path| path.display().to_string())
            .collect();
        assert_eq!(
            names,
            [
                "/lib64/ld-linux-x86-64.so.2",
                "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
                "/usr/lib/x86_64-linux-gnu/libc.so.6",
                "/usr/lib/x86_64-linux-gnu/libdl.so.2",
                "/usr/lib/x86_64-linux-gnu/libm.so.6",
                "/usr/lib/x86_64-linux-gnu/libpthread.so.0",
            ]
        );
    }
}
