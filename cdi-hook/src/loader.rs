//! `update-ldcache`: the driver's libraries become findable by the image's dynamic loader, glibc's
//! or musl's.

mod covered;

use crate::error::{HookError, left_out};
use crate::ldcache::{self, Cache};
use crate::rootfs::{Reach, Rights, RootFs};
use crate::symlinks::INSTEAD;

#[cfg(target_arch = "x86_64")]
mod machine {
    pub(super) const ELF: u16 = 62;
    pub(super) const GLIBC: &str = "/lib64/ld-linux-x86-64.so.2";
    pub(super) const MUSL: &str = "/lib/ld-musl-x86_64.so.1";
    pub(super) const MUSL_PATH: &str = "/etc/ld-musl-x86_64.path";
    pub(super) const DEFAULTS: [&str; 2] = ["/usr/lib64", "/usr/lib/x86_64-linux-gnu"];
}
#[cfg(target_arch = "aarch64")]
mod machine {
    pub(super) const ELF: u16 = 183;
    pub(super) const GLIBC: &str = "/lib/ld-linux-aarch64.so.1";
    pub(super) const MUSL: &str = "/lib/ld-musl-aarch64.so.1";
    pub(super) const MUSL_PATH: &str = "/etc/ld-musl-aarch64.path";
    pub(super) const DEFAULTS: [&str; 2] = ["/usr/lib64", "/usr/lib/aarch64-linux-gnu"];
}

const CACHE: &str = "/etc/ld.so.cache";
const CONFIG: &str = "/etc/ld.so.conf";
/// File for a configuration that the hook does not change. It is read in the order of names.
const SECOND_BEST: &str = "/etc/ld.so.conf.d/00-divvy.conf";
/// Folders that musl has without a path file; a path file replaces them.
const MUSL_DEFAULT: &str = "/lib\n/usr/local/lib\n/usr/lib\n";

/// Enters the libraries of `folders`. Does nothing if they hold none.
///
/// Phases: list the libraries; then, for each loader that the image has, write its files. A call
/// that was cut off between two files leaves each of them whole, and a further call writes all.
pub(crate) fn update(root: &RootFs, folders: &[String]) -> Result<(), HookError> {
    let (mut libraries, mut searched) = (Vec::new(), Vec::new());
    for folder in folders {
        match libraries_in(root, folder) {
            Err(error) if error.is_outside() => {
                libraries.extend(covered::libraries_of(root, folder, error)?);
                // First: it has what an image brings for a newer CUDA.
                searched.push(INSTEAD.to_owned());
            }
            found => libraries.extend(found?),
        }
        searched.push(folder.clone());
    }
    let folders = &*searched;
    if libraries.is_empty() {
        return Ok(());
    }
    let without_files = |done: Result<(), HookError>, defaults: &[&str]| match done {
        Err(error) if error.is_outside() => {
            covered::link_in_defaults(root, defaults, &libraries, error)?;
            // Never read, whatever the volume has there.
            let text = "the loader's files are in a volume: its own folders have links instead";
            left_out(Err(HookError::Covered), text);
            Ok(())
        }
        done => done,
    };
    let musl = root.exists(machine::MUSL);
    if musl {
        without_files(musl_path(root, folders), &[])?;
    }
    // An image with neither loader may get one later, from a volume; the cache does no harm.
    if !musl || root.exists(machine::GLIBC) {
        without_files(glibc_cache(root, folders, &libraries), &machine::DEFAULTS)?;
        // Only `ldconfig` reads it: the loader has the cache.
        left_out(
            glibc_config(root, folders),
            "after an ldconfig in the container the driver's libraries may not be found",
        );
    }
    Ok(())
}

/// Lists names and paths of this machine's libraries in a folder. Links count: their names are the
/// ones that programs ask for.
fn libraries_in(root: &RootFs, folder: &str) -> Result<Vec<(String, String)>, HookError> {
    let mut found = Vec::new();
    for name in root.names(folder, Reach::Image)? {
        // Anything that cannot be read as a library, a link that leads nowhere for instance, is
        // none.
        let is_library = is_library_name(&name)
            && root
                // The head up to `e_machine`, the two bytes at 18.
                .head::<20>(folder, &name)
                .is_ok_and(|head| is_native(&head));
        if is_library {
            let path = format!("{folder}/{name}");
            found.push((name, path));
        }
    }
    Ok(found)
}

/// Returns `true` for `libx.so` and `libx.so.1`: the ending of one is the middle of the other.
pub(crate) fn is_library_name(name: &str) -> bool {
    name.starts_with("lib") && format!("{name}.").contains(".so.")
}

/// Returns `true` for the beginning of a 64-bit ELF file of this machine.
fn is_native(head: &[u8; 20]) -> bool {
    let [magic @ .., low, high] = head;
    magic.starts_with(b"\x7fELF\x02\x01") && u16::from_le_bytes([*low, *high]) == machine::ELF
}

/// Enters libraries into the image's cache. An unusable cache is replaced: the loader ignores it,
/// too. So is one that is too large to be written again.
fn glibc_cache(
    root: &RootFs,
    folders: &[String],
    libraries: &[(String, String)],
) -> Result<(), HookError> {
    if let Some(old) = root.read(CACHE)?
        && let Some(cache) = ldcache::parse(&old.bytes)
        && let Some(merged) = with(cache, folders, libraries)
    {
        return root.write(CACHE, &merged, old.rights);
    }
    let too_large = || {
        HookError::inside(
            "write",
            CACHE,
            std::io::Error::other("it would be too large"),
        )
    };
    let ours = with(Cache::default(), folders, libraries).ok_or_else(too_large)?;
    root.write(CACHE, &ours, Rights::PUBLIC)
}

fn with<'a>(
    mut cache: Cache<'a>,
    folders: &[String],
    libraries: &'a [(String, String)],
) -> Option<Vec<u8>> {
    cache.enter(folders, libraries);
    cache.to_bytes()
}

/// Writes the configuration of `ldconfig`, so that the libraries stay in the cache, and first in
/// it, when it runs in the container, as package managers do.
///
/// `ldconfig` takes a library from the folder that it comes to first, and the order of included
/// files is that of their names, which the image chooses. So the folders are the first lines of the
/// configuration itself.
fn glibc_config(root: &RootFs, folders: &[String]) -> Result<(), HookError> {
    let ours = format!("# by divvy\n{}\n", folders.join("\n"));
    match root.read(CONFIG) {
        Ok(Some(old)) if old.bytes.starts_with(ours.as_bytes()) => Ok(()),
        Ok(Some(old)) => {
            let text = [ours.as_bytes(), &old.bytes].concat();
            root.write(CONFIG, &text, old.rights)
        }
        Ok(None) => root.write(CONFIG, ours.as_bytes(), Rights::PUBLIC),
        // A file of the pod, or a link into a mount. It is left as it is; most include this folder.
        Err(error) if error.is_outside() => {
            root.write(SECOND_BEST, ours.as_bytes(), Rights::PUBLIC)
        }
        Err(error) => Err(error),
    }
}

/// Puts the folders first in musl's path file.
fn musl_path(root: &RootFs, folders: &[String]) -> Result<(), HookError> {
    let (old, rights) = match root.read(machine::MUSL_PATH)? {
        Some(old) => (String::from_utf8_lossy(&old.bytes).into_owned(), old.rights),
        None => (MUSL_DEFAULT.to_owned(), Rights::PUBLIC),
    };
    let others = old
        .split([':', '\n'])
        .filter(|line| !line.is_empty() && !folders.iter().any(|folder| folder == line));
    let lines = folders.iter().map(String::as_str).chain(others);
    let text = lines.collect::<Vec<_>>().join("\n") + "\n";
    root.write(machine::MUSL_PATH, text.as_bytes(), rights)
}
