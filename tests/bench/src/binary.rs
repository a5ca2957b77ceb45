//! The size of the released binary.

use anyhow::{Context, Result};
use fs_err as fs;

use crate::rig::Programs;
use crate::table::{Budget, Row, Value};

const MIB: u64 = 1 << 20;
/// Section type of a symbol table: stripping removes it, and leaves the dynamic one.
const SYMTAB: u32 = 2;

/// How large the plugin is.
pub(crate) fn size(programs: &Programs) -> Result<Vec<Row>> {
    let bytes = fs::read(&programs.plugin)?;
    let stripped = is_stripped(&bytes).context("the plugin is no ELF file of 64 bits")?;
    let stripped = if stripped { "stripped" } else { "NOT stripped" };
    let row = Row::new(format!("release binary, {stripped}"), Value::Bytes(bytes.len() as u64));
    Ok(vec![row.budget(Budget::AtMost(Value::Bytes(15 * MIB))).theirs("81 MiB, not stripped")])
}

/// Whether a little-endian ELF file of 64 bits is without a symbol table; `None` if it is no such file.
fn is_stripped(elf: &[u8]) -> Option<bool> {
    let field = |at: usize, size: usize| -> Option<usize> {
        let bytes = elf.get(at..at.checked_add(size)?)?;
        Some(bytes.iter().rev().fold(0, |number, byte| (number << 8) | usize::from(*byte)))
    };
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (sections, size, count) = (field(40, 8)?, field(58, 2)?, field(60, 2)?);
    let mut kinds = (0..count).map(|n| field(sections + n * size + 4, 4));
    kinds.try_fold(true, |stripped, kind| Some(stripped && kind? != SYMTAB as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_table_is_found_and_another_file_is_recognized() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(is_stripped(&own), Some(false), "test binaries keep their symbols");
        assert_eq!(is_stripped(b"#!/bin/sh\n"), None);
        assert_eq!(is_stripped(b"\x7fELF\x02\x01"), None);
    }
}
