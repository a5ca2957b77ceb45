//! `MpsConfig`: the options of an MPS share, as users write them.

use divvy_model::{MpsPriority, Quantity};
use serde_json::{Map, Value, json};

use crate::ConfigError;
use crate::fields::{Fields, near};

/// Form of `limits.cores`, for messages.
const CORES: &str = "a whole number from 1 to 100 (percent)";
/// Form of `limits.memory`, for messages.
const MEMORY: &str = "an amount of 1Mi or more with its unit, as \"10Gi\"";

/// Options of a claim's MPS share. The default leaves everything to the server of the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MpsOptions {
    /// Limit of compute in percent of the GPU's threads.
    pub cores: Option<u32>,
    /// Limit of memory in bytes.
    pub memory: Option<u64>,
    /// Priority of its programs beside those of other claims.
    pub priority: Option<MpsPriority>,
}

impl MpsOptions {
    /// Takes `limits` and `priority`.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ConfigError> {
        let (mut cores, mut memory) = (None, None);
        if let Some(mut limits) = fields.object("limits")? {
            cores = limits.whole_number("cores", 1..=100, CORES)?;
            memory = limits
                .optional_string("memory")?
                .map(|text| bytes(limits.path("memory"), text))
                .transpose()?;
            limits.finish("limits")?;
        }
        let known = MpsPriority::ALL.map(MpsPriority::name);
        let priority = match fields.optional_string("priority")? {
            None => None,
            Some(found) => Some(
                MpsPriority::parse(&found).ok_or_else(|| ConfigError::Value {
                    path: fields.path("priority"),
                    near: near(&found, &known),
                    known: known.to_vec(),
                    found,
                })?,
            ),
        };
        Ok(Self {
            cores,
            memory,
            priority,
        })
    }

    /// Adds the fields as a user would write them.
    pub(crate) fn put(self, fields: &mut Map<String, Value>) {
        let mut limits = Map::new();
        if let Some(cores) = self.cores {
            limits.insert("cores".to_owned(), json!(cores));
        }
        if let Some(memory) = self.memory {
            limits.insert("memory".to_owned(), json!(in_units(memory)));
        }
        if !limits.is_empty() {
            fields.insert("limits".to_owned(), limits.into());
        }
        if let Some(priority) = self.priority {
            fields.insert("priority".to_owned(), json!(priority.name()));
        }
    }
}

/// Reads an amount of memory. Without a unit it would be bytes, which is never meant.
fn bytes(path: String, text: String) -> Result<u64, ConfigError> {
    let has_unit = text.ends_with(|last: char| last.is_ascii_alphabetic());
    let parsed = text.parse::<Quantity>().ok().filter(|_| has_unit);
    let bytes = parsed.and_then(|amount| u64::try_from(amount.rounded_up()).ok());
    bytes
        .filter(|bytes| *bytes >= 1 << 20)
        .ok_or(ConfigError::Value {
            path,
            found: text,
            known: vec![MEMORY],
            near: None,
        })
}

/// Writes bytes in the largest unit that divides them.
fn in_units(bytes: u64) -> String {
    let units = [(30, "Gi"), (20, "Mi"), (10, "Ki")];
    let fits = |(shift, _): &&(u32, &str)| bytes.trailing_zeros() >= *shift;
    units.iter().find(fits).map_or_else(
        // Without a unit it would not read back.
        || format!("{bytes}000m"),
        |(shift, unit)| format!("{}{unit}", bytes >> shift),
    )
}
