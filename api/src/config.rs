//! The opaque configs (`config[].opaque.parameters` of claims and classes).

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fields::{Fields, near};
use crate::names::API_VERSION;
use crate::tree::Tree;
use crate::{ConfigError, names};

const GPU: &str = "GpuConfig";
const MIG: &str = "MigConfig";
const SHARE: &str = "ShareConfig";

/// The kinds that [`decode`] reads.
pub const KINDS: [&str; 3] = [GPU, MIG, SHARE];

/// A config for whole GPUs. There is nothing to set yet: it exists so that a claim which carries one keeps working
/// when there is. [`GpuConfig::default`] is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuConfig {}

/// A config for MIG partitions. There is nothing to set yet, as for whole GPUs: which partition a claim gets is said by
/// its requests. [`MigConfig::default`] is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigConfig {}

/// A config for shares of a GPU. [`ShareConfig::default`] is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareConfig {}

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
        match self {
            Self::Gpu(GpuConfig {}) | Self::Mig(MigConfig {}) | Self::Share(ShareConfig {}) => {
                serde_json::json!({ "apiVersion": API_VERSION, "kind": self.kind() })
            }
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
            fields.finish(GPU)?;
            Ok(DeviceConfig::Gpu(GpuConfig::default()))
        }
        MIG => {
            fields.finish(MIG)?;
            Ok(DeviceConfig::Mig(MigConfig::default()))
        }
        SHARE => {
            fields.finish(SHARE)?;
            Ok(DeviceConfig::Share(ShareConfig::default()))
        }
        _ => Err(ConfigError::Kind { near: near(&kind, &KINDS), found: kind, known: KINDS.to_vec() }),
    }
}
