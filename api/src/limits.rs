//! `limits` of a `ShareConfig`: how much a share may use beyond what it requests.

use std::fmt;

use divvy_model::ShareUnit;
use serde_json::{Value, json};

use crate::ConfigError;
use crate::fields::Fields;
use crate::policy::MemorySize;

/// Limit of the memory of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryBound {
    /// The same on every GPU.
    Amount(MemorySize),
    /// 1 to 100 percent of the memory that the shares of the GPU have together.
    Percent(u8),
}

/// The forms that [`MemoryBound`] takes, for messages.
const FORM: &str = "a whole number with Mi, Gi or Ti, such as \"16Gi\", or 1 to 100 percent of the GPU, such as \"50%\"";
/// The least limit: less is a forgotten or a wrong unit.
const LEAST: u64 = 1 << 20;

impl MemoryBound {
    /// Returns the limit in bytes, on a GPU whose shares have `mib` of memory together.
    pub fn bytes(self, mib: u64) -> u64 {
        match self {
            Self::Amount(size) => size.bytes,
            Self::Percent(percent) => ShareUnit::part_of_memory(mib, percent.into()),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        if let Some(number) = text.strip_suffix('%') {
            // Digits alone, without leading zeros: no sign.
            let digits = number.bytes().all(|b| b.is_ascii_digit()) && !number.starts_with('0');
            let percent = digits.then(|| number.parse().ok()).flatten()?;
            return (1..=100)
                .contains(&percent)
                .then_some(Self::Percent(percent));
        }
        // A limit without a unit is in bytes: most likely the unit was forgotten.
        let has_unit = text.ends_with(|c: char| c.is_ascii_alphabetic());
        let size: MemorySize = has_unit.then(|| text.parse().ok()).flatten()?;
        (size.bytes >= LEAST).then_some(Self::Amount(size))
    }
}

impl fmt::Display for MemoryBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // With a unit, whatever the amount: one without is not read.
            Self::Amount(size) if size.bytes % 1024 != 0 => match size.bytes % 1000 {
                0 => write!(f, "{}k", size.bytes / 1000),
                _ => size.fmt(f),
            },
            Self::Amount(size) => size.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// Reads `limits: { memory: 16Gi }`. An empty object is a mistake: it limits nothing, although its
/// author wanted a limit.
pub(crate) fn read(fields: &mut Fields) -> Result<Option<MemoryBound>, ConfigError> {
    let Some(mut inside) = fields.object("limits")? else {
        return Ok(None);
    };
    let found = inside.string("memory", "\"memory\": \"16Gi\"");
    let found = found.map_err(|error| match error {
        ConfigError::WrongType { path, found, .. } => ConfigError::WrongType {
            path,
            expected: "a string with a unit, such as \"16Gi\"",
            found,
        },
        other => other,
    })?;
    let bound = MemoryBound::parse(&found).ok_or_else(|| ConfigError::Value {
        path: inside.path("memory"),
        near: nearest(&found),
        found,
        known: vec![FORM],
    })?;
    inside.finish("limits")?;
    Ok(Some(bound))
}

/// Returns what was most likely meant by a number without a unit.
fn nearest(found: &str) -> Option<String> {
    match found.parse::<u32>().ok()? {
        1..1024 => Some(format!("{found}Gi")),
        1024..0x10_0000 => Some(format!("{found}Mi")),
        _ => None,
    }
}

/// Returns the limit as its author would write it.
pub(crate) fn to_value(bound: MemoryBound) -> Value {
    json!({ "memory": bound.to_string() })
}
