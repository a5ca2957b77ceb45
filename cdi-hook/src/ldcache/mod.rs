//! `/etc/ld.so.cache`: the file in which glibc's loader looks up libraries, read and written here.
//!
//! Running `ldconfig` would be the usual way, but the container's own is a program of the image,
//! and the host's is not there on every host. The format is small and has not changed incompatibly
//! since glibc 2.2; the loader looks for a library in the cache first and in its default folders
//! next, so even a cache with nothing but our libraries is right.
//!
//! Layout, all numbers in the machine's order: a header of 48 bytes (magic, number of entries,
//! length of the strings, byte order, offset of the extension), entries of 24 bytes (flags, offsets
//! of name and path, unused, hwcap), strings, and an extension with the names of `glibc-hwcaps`
//! folders. Entries are sorted, highest name first, because the loader searches by halving; among
//! entries of one name the first that fits the machine wins. Before glibc 2.32 an older table could
//! stand before the header.

mod order;
mod read;
mod write;

pub(crate) use read::parse;

/// Flags of a 64-bit library of this machine.
#[cfg(target_arch = "x86_64")]
// glibc's ldconfig.h: `FLAG_ELF_LIBC6` (3) with `FLAG_X8664_LIB64` (0x0300), or below with
// `FLAG_AARCH64_LIB64` (0x0a00).
pub(crate) const NATIVE: i32 = 0x0303;
/// Flags of a 64-bit library of this machine.
#[cfg(target_arch = "aarch64")]
pub(crate) const NATIVE: i32 = 0x0a03;

const MAGIC: &[u8; 20] = b"glibc-ld.so.cache1.1";
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0\0";
const HEADER: usize = 48;
const ENTRY: usize = 24;
// `cache_extension_magic` of glibc's dl-cache.h, -358342284.
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
const TAG_GENERATOR: u32 = 0;
const TAG_HWCAPS: u32 = 1;

/// Limits on what an image can make us keep and write: its entries may all share one long string. A
/// cache beyond them is treated as damaged; a large distribution's has a few thousand entries and
/// is smaller than 1 MiB.
const MOST_ENTRIES: usize = 64 << 10;
const LONGEST_NAME: usize = 255;
const LONGEST_PATH: usize = 4096;
const MOST_BYTES: usize = 16 << 20;

/// Library in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry<'a> {
    pub(crate) flags: i32,
    /// Name by which programs ask for the library.
    pub(crate) name: &'a [u8],
    pub(crate) path: &'a [u8],
    os_version: u32,
    hwcap: u64,
}

/// Whole cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cache<'a> {
    entries: Vec<Entry<'a>>,
    /// Names of `glibc-hwcaps` folders; entries refer to them by index.
    hwcaps: Vec<&'a [u8]>,
}

impl<'a> Cache<'a> {
    /// Enters libraries by name and path. They come before others of the same name, so that the
    /// host's driver wins over a stub or an older driver in the image; what an earlier call entered
    /// from `folders` is replaced.
    pub(crate) fn enter(&mut self, folders: &[String], libraries: &'a [(String, String)]) {
        let ours = |path: &[u8]| {
            folders.iter().any(|folder| {
                path.strip_prefix(folder.as_bytes())
                    .is_some_and(|rest| rest.first() == Some(&b'/'))
            })
        };
        self.entries.retain(|entry| !ours(entry.path));
        let entry = |(name, path): &'a (String, String)| Entry {
            flags: NATIVE,
            name: name.as_bytes(),
            path: path.as_bytes(),
            os_version: 0,
            hwcap: 0,
        };
        self.entries.splice(0..0, libraries.iter().map(entry));
        // Stable: among equals, ours stay first and the others keep their order, which the loader
        // relies on.
        self.entries.sort_by(|a, b| order::compare(b.name, a.name));
    }
}

#[cfg(test)]
mod tests;
