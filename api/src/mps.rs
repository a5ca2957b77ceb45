//! MPS as users write it: the options of an MPS share (`MpsConfig`), and the limits of a claim that
//! has a GPU or partition alone, with an MPS server (`mps` of a `GpuConfig` or `MigConfig`).

use divvy_model::{MpsPriority, Quantity};
use serde_json::{Map, Value, json};

use crate::ConfigError;
use crate::fields::{Fields, near};

/// Form of `limits.cores`, for messages.
pub(crate) const CORES: &str = "a whole number from 1 to 100 (percent)";
/// Form of `limits.memory`, for messages.
const MEMORY: &str = "an amount of 1Mi or more with its unit, as \"10Gi\"";

/// Limits that an MPS server sets for each of its clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MpsLimits {
    /// Limit of compute in percent of the GPU's threads.
    pub cores: Option<u32>,
    /// Limit of memory in bytes.
    pub memory: Option<u64>,
}

/// Options of a claim's MPS share. The default leaves everything to the server of the GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MpsOptions {
    /// Limits, which are those of a slot.
    pub limits: MpsLimits,
    /// Priority of its programs beside those of other claims.
    pub priority: Option<MpsPriority>,
}

impl MpsLimits {
    /// Takes `limits`, which may be absent.
    fn take(fields: &mut Fields) -> Result<Self, ConfigError> {
        let Some(mut limits) = fields.object("limits")? else {
            return Ok(Self::default());
        };
        let cores = limits.whole_number("cores", 1..=100, CORES)?;
        let memory = limits.optional_string("memory")?;
        let memory = memory
            .map(|text| bytes(limits.path("memory"), text))
            .transpose()?;
        limits.finish("limits")?;
        Ok(Self { cores, memory })
    }

    /// Takes `mps` of a whole GPU or partition. An empty object asks for the server without limits.
    pub(crate) fn take_server(fields: &mut Fields) -> Result<Option<Self>, ConfigError> {
        let Some(mut server) = fields.object("mps")? else {
            return Ok(None);
        };
        let limits = Self::take(&mut server)?;
        server.finish("mps")?;
        Ok(Some(limits))
    }

    /// Returns `mps` as a user would write it.
    pub(crate) fn to_server(self) -> Value {
        let mut server = Map::new();
        self.put(&mut server);
        server.into()
    }

    /// Adds `limits`, if there are any.
    fn put(self, fields: &mut Map<String, Value>) {
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
    }
}

impl MpsOptions {
    /// Takes `limits` and `priority`.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, ConfigError> {
        let limits = MpsLimits::take(fields)?;
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
        Ok(Self { limits, priority })
    }

    /// Adds the fields as a user would write them.
    pub(crate) fn put(self, fields: &mut Map<String, Value>) {
        self.limits.put(fields);
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
