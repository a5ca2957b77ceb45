//! The little of ELF that is needed to know under which name a library is looked for.

use std::io;
use std::path::Path;

use fs_err::os::unix::fs::FileExt;

/// A 64-bit little-endian shared library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elf {
    /// `e_machine`.
    pub machine: u16,
    /// The name programs ask for, such as `libcuda.so.1`.
    pub soname: Option<String>,
}

/// Why a file is not usable as a library.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// Cannot be read.
    #[error("cannot read the library")]
    Read(#[source] io::Error),
    /// Something else, such as a linker script or a 32-bit library.
    #[error("not a 64-bit little-endian ELF library")]
    NotElf,
    /// Cut off or inconsistent.
    #[error("its dynamic section is damaged")]
    Damaged,
}

const PT_LOAD: u64 = 1;
const PT_DYNAMIC: u64 = 2;
const DT_NULL: u64 = 0;
const DT_STRTAB: u64 = 5;
const DT_SONAME: u64 = 14;
/// Far above what real libraries have; bounds what a damaged file can make us read.
const MOST_BYTES: u64 = 1 << 20;
const LONGEST_NAME: usize = 256;

impl Elf {
    /// Reads a library's header and dynamic section; the rest of the file, often tens of megabytes,
    /// is not touched.
    pub fn read(path: &Path) -> Result<Self, ElfError> {
        let file = fs_err::File::open(path).map_err(ElfError::Read)?;
        let part = |offset: u64, length: u64| -> Result<Vec<u8>, ElfError> {
            if length > MOST_BYTES {
                return Err(ElfError::Damaged);
            }
            let mut bytes = vec![0; usize::try_from(length).map_err(|_| ElfError::Damaged)?];
            match file.read_exact_at(&mut bytes, offset) {
                Ok(()) => Ok(bytes),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    Err(ElfError::Damaged)
                }
                Err(error) => Err(ElfError::Read(error)),
            }
        };
        // A file that is shorter than the header is none, and not a damaged library.
        let header = part(0, 64).map_err(|error| match error {
            ElfError::Damaged => ElfError::NotElf,
            other => other,
        })?;
        // Magic, 64 bit, little endian.
        if header.get(..6) != Some(b"\x7fELF\x02\x01") {
            return Err(ElfError::NotElf);
        }
        let number = |bytes: &[u8], at: usize, length: usize| {
            little(bytes, at, length).ok_or(ElfError::Damaged)
        };
        // Offsets of the header as elf(5) has them: `e_machine` 18, `e_phoff` 32, `e_phentsize` 54,
        // `e_phnum` 56; of a segment below: `p_offset` 8, `p_vaddr` 16, `p_filesz` 32.
        let machine = u16::try_from(number(&header, 18, 2)?).map_err(|_| ElfError::Damaged)?;
        let (table, entry, count) = (
            number(&header, 32, 8)?,
            number(&header, 54, 2)?,
            number(&header, 56, 2)?,
        );
        let segments = part(table, entry * count)?;
        let (mut loads, mut dynamic) = (Vec::new(), None);
        // `chunks_exact` panics at zero.
        let entry = usize::try_from(entry)
            .map_err(|_| ElfError::Damaged)?
            .max(1);
        for segment in segments.chunks_exact(entry) {
            let (offset, address, size) = (
                number(segment, 8, 8)?,
                number(segment, 16, 8)?,
                number(segment, 32, 8)?,
            );
            match number(segment, 0, 4)? {
                PT_LOAD => loads.push((address, offset, size)),
                PT_DYNAMIC => dynamic = Some((offset, size)),
                _ => {}
            }
        }
        let Some((offset, size)) = dynamic else {
            return Ok(Self {
                machine,
                soname: None,
            });
        };
        let (mut strings, mut name) = (None, None);
        for pair in part(offset, size)?.chunks_exact(16) {
            match (number(pair, 0, 8)?, number(pair, 8, 8)?) {
                (DT_NULL, _) => break,
                (DT_STRTAB, value) => strings = Some(value),
                (DT_SONAME, value) => name = Some(value),
                _ => {}
            }
        }
        let (Some(strings), Some(name)) = (strings, name) else {
            return Ok(Self {
                machine,
                soname: None,
            });
        };
        // `DT_STRTAB` is an address in memory. The loaded segment that holds it says where in the
        // file that is.
        let inside = loads.iter().find(|(address, _, size)| {
            (*address..address.saturating_add(*size)).contains(&strings)
        });
        let (address, offset, _) = inside.ok_or(ElfError::Damaged)?;
        let at = (strings - address)
            .checked_add(*offset)
            .and_then(|n| n.checked_add(name))
            .ok_or(ElfError::Damaged)?;
        // The length of a name is not noted anywhere: read as much as one may have, up to its NUL.
        let mut text = vec![0; LONGEST_NAME];
        let read = file.read_at(&mut text, at).map_err(ElfError::Read)?;
        text.truncate(read);
        let end = text
            .iter()
            .position(|byte| *byte == 0)
            .ok_or(ElfError::Damaged)?;
        text.truncate(end);
        let soname = String::from_utf8(text).map_err(|_| ElfError::Damaged)?;
        Ok(Self {
            machine,
            // A name becomes a link in the libraries' folder; with a slash it would be one
            // elsewhere.
            soname: Some(soname).filter(|name| !name.is_empty() && !name.contains('/')),
        })
    }
}

fn little(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let part = bytes.get(at..at.checked_add(length)?)?;
    Some(
        part.iter()
            .rev()
            .fold(0, |sum, byte| (sum << 8) | u64::from(*byte)),
    )
}
