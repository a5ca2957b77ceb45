//! Writing a cache.

use super::{Cache, ENTRY, EXTENSION_MAGIC, HEADER, MAGIC, MOST_BYTES, TAG_GENERATOR, TAG_HWCAPS};

/// Flag in the header: the file is in this machine's byte order.
const BYTE_ORDER: u8 = if cfg!(target_endian = "little") { 2 } else { 3 };
/// Name of the program that wrote the file, which `ldconfig -p` shows.
const GENERATOR: &[u8] = b"divvy-cdi-hook";

impl Cache<'_> {
    /// Returns the file's bytes; `None` if there would be too many.
    pub(crate) fn to_bytes(&self) -> Option<Vec<u8>> {
        // Strings come behind the table, so their offsets are known while the table is written.
        let mut strings = Strings {
            at: HEADER + ENTRY * self.entries.len(),
            bytes: Vec::new(),
        };
        let mut table = Vec::with_capacity(ENTRY * self.entries.len());
        for entry in &self.entries {
            table.extend(entry.flags.to_ne_bytes());
            table.extend(strings.add(entry.name)?.to_ne_bytes());
            table.extend(strings.add(entry.path)?.to_ne_bytes());
            table.extend(entry.os_version.to_ne_bytes());
            table.extend(entry.hwcap.to_ne_bytes());
        }
        let hwcaps = self
            .hwcaps
            .iter()
            .map(|name| strings.add(name))
            .collect::<Option<Vec<u32>>>()?;
        let strings_length = u32::try_from(strings.bytes.len()).ok()?;
        let extension_at = (strings.at + strings.bytes.len()).next_multiple_of(4);

        // The header: magic, number of entries, length of the strings, byte order and padding,
        // offset of the extension, three unused words.
        let mut file = MAGIC.to_vec();
        file.extend(u32::try_from(self.entries.len()).ok()?.to_ne_bytes());
        file.extend(strings_length.to_ne_bytes());
        file.extend([BYTE_ORDER, 0, 0, 0]);
        file.extend(u32::try_from(extension_at).ok()?.to_ne_bytes());
        file.extend([0; 12]);
        file.extend(table);
        file.extend(strings.bytes);
        file.resize(extension_at, 0);
        extension(&mut file, &hwcaps)?;
        Some(file)
    }
}

/// Appends the directory of sections, then the sections.
fn extension(file: &mut Vec<u8>, hwcaps: &[u32]) -> Option<()> {
    const DIRECTORY: usize = 8 + 2 * 16;
    let hwcaps_at = file.len() + DIRECTORY;
    let generator_at = hwcaps_at + 4 * hwcaps.len();
    file.extend(EXTENSION_MAGIC.to_ne_bytes());
    file.extend(2u32.to_ne_bytes());
    let sections = [
        (TAG_GENERATOR, generator_at, GENERATOR.len()),
        (TAG_HWCAPS, hwcaps_at, 4 * hwcaps.len()),
    ];
    for (tag, at, size) in sections {
        for number in [tag, 0, u32::try_from(at).ok()?, u32::try_from(size).ok()?] {
            file.extend(number.to_ne_bytes());
        }
    }
    file.extend(hwcaps.iter().flat_map(|offset| offset.to_ne_bytes()));
    file.extend(GENERATOR);
    Some(())
}

struct Strings {
    /// Offset of the strings in the file.
    at: usize,
    bytes: Vec<u8>,
}

impl Strings {
    fn add(&mut self, text: &[u8]) -> Option<u32> {
        let at = self.at + self.bytes.len();
        if at + text.len() >= MOST_BYTES {
            return None;
        }
        self.bytes.extend(text);
        self.bytes.push(0);
        u32::try_from(at).ok()
    }
}
