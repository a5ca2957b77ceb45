//! Reading a cache. It comes from an image: every offset may be wrong.

use super::{
    Cache, ENTRY, EXTENSION_MAGIC, Entry, HEADER, LONGEST_NAME, LONGEST_PATH, MAGIC, MOST_ENTRIES,
    OLD_MAGIC, TAG_HWCAPS,
};

/// Reads a cache; `None` if it is none that a loader would use, or beyond what a real one needs.
pub(crate) fn parse(file: &[u8]) -> Option<Cache<'_>> {
    let start = if file.starts_with(OLD_MAGIC) {
        behind_old_table(file)?
    } else {
        0
    };
    // All offsets count from the header.
    let bytes = file.get(start..)?;
    if !bytes.starts_with(MAGIC) {
        return None;
    }
    // Before the table is looked at: a count of an image must not decide how much is kept.
    let count = usize::try_from(u32_at(bytes, 20)?)
        .ok()
        .filter(|count| *count <= MOST_ENTRIES)?;
    let table = bytes.get(HEADER..HEADER.checked_add(count.checked_mul(ENTRY)?)?)?;
    let entries = table
        .chunks_exact(ENTRY)
        .map(|raw| entry(bytes, raw))
        .collect::<Option<_>>()?;
    // The loader counts an extension's offsets from the file's beginning. Behind an old table they
    // would be others; without them it passes over entries of `glibc-hwcaps` folders.
    let hwcaps = if start == 0 { hwcaps(bytes) } else { None };
    Some(Cache {
        entries,
        hwcaps: hwcaps.unwrap_or_default(),
    })
}

/// Returns the offset of the header behind an old table, which is a header of 16 bytes and entries
/// of 12, aligned.
fn behind_old_table(file: &[u8]) -> Option<usize> {
    let count = usize::try_from(u32_at(file, 12)?).ok()?;
    16usize
        .checked_add(count.checked_mul(12)?)?
        .checked_next_multiple_of(8)
}

/// Reads an entry of the table.
fn entry<'a>(bytes: &'a [u8], raw: &[u8]) -> Option<Entry<'a>> {
    Some(Entry {
        flags: i32::from_ne_bytes(raw.get(..4)?.try_into().ok()?),
        name: string_at(bytes, u32_at(raw, 4)?, LONGEST_NAME)?,
        path: string_at(bytes, u32_at(raw, 8)?, LONGEST_PATH)?,
        os_version: u32_at(raw, 12)?,
        hwcap: u64::from_ne_bytes(raw.get(16..24)?.try_into().ok()?),
    })
}

/// Reads the names of `glibc-hwcaps` folders from the extension.
fn hwcaps(bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let at = usize::try_from(u32_at(bytes, 32)?).ok()?;
    let extension = bytes.get(at..).filter(|_| at != 0)?;
    if u32_at(extension, 0)? != EXTENSION_MAGIC {
        return None;
    }
    let sections = extension
        .get(8..)?
        .chunks_exact(16)
        .take(usize::try_from(u32_at(extension, 4)?).ok()?);
    for section in sections {
        if u32_at(section, 0)? == TAG_HWCAPS {
            let (at, size) = (
                usize::try_from(u32_at(section, 8)?).ok()?,
                usize::try_from(u32_at(section, 12)?).ok()?,
            );
            let offsets = bytes.get(at..at.checked_add(size)?)?;
            let offsets = offsets.chunks_exact(4).take(MOST_ENTRIES);
            return offsets
                .map(|raw| string_at(bytes, u32_at(raw, 0)?, LONGEST_NAME))
                .collect();
        }
    }
    None
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}

fn string_at(bytes: &[u8], at: u32, longest: usize) -> Option<&[u8]> {
    let rest = bytes.get(usize::try_from(at).ok()?..)?;
    rest.get(
        ..rest
            .iter()
            .take(longest.saturating_add(1))
            .position(|byte| *byte == 0)?,
    )
}
