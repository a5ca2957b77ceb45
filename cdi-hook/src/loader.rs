//! `update-ldcache`: the driver's libraries become findable by the image's dynamic loader, glibc's or musl's.

use crate::error::HookError;
use crate::ldcache::{self, Cache};
use crate::rootfs::RootFs;

#[cfg(target_arch = "x86_64")]
mod machine {
    pub(super) const ELF: u16 = 62;
    pub(super) const GLIBC: &str = "/lib64/ld-linux-x86-64.so.2";
    pub(super) const MUSL: &str = "/lib/ld-musl-x86_64.so.1";
    pub(super) const MUSL_PATH: &str = "/etc/ld-musl-x86_64.path";
}
#[cfg(target_arch = "aarch64")]
mod machine {
    pub(super) const ELF: u16 = 183;
    pub(super) const GLIBC: &str = "/lib/ld-linux-aarch64.so.1";
    pub(super) const MUSL: &str = "/lib/ld-musl-aarch64.so.1";
    pub(super) const MUSL_PATH: &str = "/etc/ld-musl-aarch64.path";
}

const CACHE: &str = "/etc/ld.so.cache";
const CONFIG: &str = "/etc/ld.so.conf";
const CONFIG_FOLDER: &str = "/etc/ld.so.conf.d";
/// Read before the image's own: what `ldconfig` finds first wins.
const OUR_CONFIG: &str = "/etc/ld.so.conf.d/00-divvy.conf";
/// What musl has without a path file; a path file replaces it.
const MUSL_DEFAULT: &str = "/lib\n/usr/local/lib\n/usr/lib\n";

/// Enters the libraries of `folders`. Does nothing if they hold none.
pub(crate) fn update(root: &RootFs, folders: &[String]) -> Result<(), HookError> {
    let mut libraries = Vec::new();
    for folder in folders {
        libraries.extend(libraries_in(root, folder)?);
    }
    if libraries.is_empty() {
        return Ok(());
    }
    let musl = root.exists(machine::MUSL);
    if musl {
        musl_path(root, folders)?;
    }
    // An image with neither loader may get one later, from a volume; the cache does no harm.
    if !musl || root.exists(machine::GLIBC) {
        glibc_cache(root, folders, &libraries)?;
        glibc_config(root, folders)?;
    }
    Ok(())
}

/// Names and paths of this machine's libraries in a folder. Links count: their names are what programs ask for.
fn libraries_in(root: &RootFs, folder: &str) -> Result<Vec<(String, String)>, HookError> {
    let mut found = Vec::new();
    for name in root.names(folder)? {
        if !is_library_name(&name) {
            continue;
        }
        let path = format!("{folder}/{name}");
        // Anything that cannot be read as a library, a link that leads nowhere for instance, is none.
        if root.head::<20>(&path).is_ok_and(|head| is_native(&head)) {
            found.push((name, path));
        }
    }
    Ok(found)
}

/// `libx.so` and `libx.so.1`: the ending of one is the middle of the other.
pub(crate) fn is_library_name(name: &str) -> bool {
    name.starts_with("lib") && format!("{name}.").contains(".so.")
}

fn is_native(head: &[u8; 20]) -> bool {
    let [magic @ .., low, high] = head;
    magic.starts_with(b"\x7fELF\x02\x01") && u16::from_le_bytes([*low, *high]) == machine::ELF
}

/// An unusable cache is replaced: the loader ignores it, too. So is one that is too large to be written again.
fn glibc_cache(root: &RootFs, folders: &[String], libraries: &[(String, String)]) -> Result<(), HookError> {
    let old = root.read(CACHE)?;
    let with_ours = |cache| with(cache, folders, libraries);
    let merged = old.as_deref().and_then(ldcache::parse).and_then(with_ours);
    let too_large = || HookError::inside("write", CACHE, std::io::Error::other("it would be too large"));
    root.write(CACHE, &merged.or_else(|| with_ours(Cache::default())).ok_or_else(too_large)?)
}

fn with<'a>(mut cache: Cache<'a>, folders: &[String], libraries: &'a [(String, String)]) -> Option<Vec<u8>> {
    cache.enter(folders, libraries);
    cache.to_bytes()
}

/// So that the libraries stay in the cache when `ldconfig` runs in the container, as package managers do.
fn glibc_config(root: &RootFs, folders: &[String]) -> Result<(), HookError> {
    root.write(OUR_CONFIG, format!("# by divvy\n{}\n", folders.join("\n")).as_bytes())?;
    let old = root.read(CONFIG)?.unwrap_or_default();
    if String::from_utf8_lossy(&old).contains(CONFIG_FOLDER) {
        return Ok(());
    }
    let mut text = format!("include {CONFIG_FOLDER}/*.conf\n").into_bytes();
    text.extend(old);
    root.write(CONFIG, &text)
}

fn musl_path(root: &RootFs, folders: &[String]) -> Result<(), HookError> {
    let old = root.read(machine::MUSL_PATH)?;
    let old =
        old.map_or_else(|| MUSL_DEFAULT.to_owned(), |bytes| String::from_utf8_lossy(&bytes).into_owned());
    let missing = folders.iter().filter(|folder| !old.split([':', '\n']).any(|known| known == **folder));
    let lines = old.split([':', '\n']).filter(|line| !line.is_empty()).chain(missing.map(String::as_str));
    let text = lines.collect::<Vec<_>>().join("\n") + "\n";
    root.write(machine::MUSL_PATH, text.as_bytes())
}
