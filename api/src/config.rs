//! The opaque configs (`config[].opaque.parameters` of claims and classes).

use divvy_model::TimeSlice;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::fields::{Fields, near};
use crate::names::API_VERSION;
use crate::tree::Tree;
use crate::{ConfigError, names};

const GPU: &str = "GpuConfig";
const MIG: &str = "MigConfig";
const SHARE: &str = "ShareConfig";

/// The kinds that [`decode`] reads.
pub const KINDS: [&str; 3] = [GPU, MIG, SHARE];

/// How the programs on a GPU take turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicing {
    /// How long each runs in turn. It is the GPU's: claims that have shares of one GPU must ask for the same, or for
    /// nothing. When the last that asked is gone, the GPU gets back what it had before.
    pub interval: TimeSlice,
}

/// A config for whole GPUs. [`GpuConfig::default`], which sets nothing, is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuConfig {
    /// For a claim whose containers or pods have the GPU together. Nothing is set unless this is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
}

/// A config for MIG partitions. There is nothing to set yet, as for whole GPUs: which partition a claim gets is said by
/// its requests. [`MigConfig::default`] is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigConfig {}

/// A config for shares of a GPU. How much of the GPU a claim gets is said by its requests. [`ShareConfig::default`],
/// which sets nothing, is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareConfig {
    /// Nothing is set unless this is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
}

/// A decoded and validated config, by the kind of device it is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceConfig {
    /// For whole GPUs.
    Gpu(GpuConfig),
    /// For partitions.
    Mig(MigConfig),
    /// For shares.
    Share(ShareConfig),
}

impl DeviceConfig {
    /// The kind as users write it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Gpu(_) => GPU,
            Self::Mig(_) => MIG,
            Self::Share(_) => SHARE,
        }
    }

    /// The config as a user would write it, with all defaults filled in.
    pub fn to_value(&self) -> Value {
        let mut value = json!({ "apiVersion": API_VERSION, "kind": self.kind() });
        if let (Some(slice), Some(fields)) = (self.time_slice(), value.as_object_mut()) {
            fields.insert("timeSlicing".to_owned(), json!({ "interval": slice.name() }));
        }
        value
    }

    /// The time slice that is asked for.
    pub fn time_slice(&self) -> Option<TimeSlice> {
        match self {
            Self::Gpu(GpuConfig { time_slicing }) | Self::Share(ShareConfig { time_slicing }) => {
                time_slicing.as_ref().map(|slicing| slicing.interval)
            }
            Self::Mig(MigConfig {}) => None,
        }
    }
}

/// Decodes the parameters of one config entry, strictly: an unknown field, a wrong type or another version is an
/// error. The API server has already dropped duplicate fields of a [`Value`]; see [`decode_slice`].
pub fn decode(parameters: &Value) -> Result<DeviceConfig, ConfigError> {
    decode_tree(parameters.into())
}

/// As [`decode`], from JSON text; refuses duplicate fields too.
pub fn decode_slice(json: &[u8]) -> Result<DeviceConfig, ConfigError> {
    decode_tree(serde_json::from_slice(json).map_err(ConfigError::Syntax)?)
}

fn decode_tree(tree: Tree) -> Result<DeviceConfig, ConfigError> {
    let mut fields = Fields::open("", tree)?;
    let version = fields.string("apiVersion", &format!("\"apiVersion\": {API_VERSION:?}"))?;
    if version != names::API_VERSION {
        return Err(ConfigError::ApiVersion { found: version });
    }
    let kind = fields.string("kind", &format!("\"kind\": {GPU:?}"))?;
    match kind.as_str() {
        GPU => {
            let time_slicing = time_slicing(&mut fields)?;
            fields.finish(GPU)?;
            Ok(DeviceConfig::Gpu(GpuConfig { time_slicing }))
        }
        MIG => {
            fields.finish(MIG)?;
            Ok(DeviceConfig::Mig(MigConfig::default()))
        }
        SHARE => {
            let time_slicing = time_slicing(&mut fields)?;
            fields.finish(SHARE)?;
            Ok(DeviceConfig::Share(ShareConfig { time_slicing }))
        }
        _ => Err(ConfigError::Kind { near: near(&kind, &KINDS), found: kind, known: KINDS.to_vec() }),
    }
}

/// `timeSlicing: { interval: … }`. An empty object is a mistake: it asks for nothing, and whoever wrote it wanted something.
fn time_slicing(fields: &mut Fields) -> Result<Option<TimeSlicing>, ConfigError> {
    let Some(mut inside) = fields.object("timeSlicing")? else { return Ok(None) };
    let known = TimeSlice::ALL.map(TimeSlice::name);
    let found = inside
        .string("interval", &format!("\"interval\": {}", known.map(|k| format!("{k:?}")).join(" or ")))?;
    let Some(interval) = TimeSlice::parse(&found) else {
        let near = near(&found, &known);
        return Err(ConfigError::Value { path: inside.path("interval"), found, known: known.to_vec(), near });
    };
    inside.finish("timeSlicing")?;
    Ok(Some(TimeSlicing { interval }))
}
