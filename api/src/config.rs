//! The opaque configs (`config[].opaque.parameters` of claims and classes).

use divvy_model::TimeSlice;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::fields::{Fields, near};
use crate::names::API_VERSION;
use crate::{ConfigError, names};

const GPU: &str = "GpuConfig";
const MIG: &str = "MigConfig";
const SHARE: &str = "ShareConfig";

/// The kinds that [`decode`] reads.
pub const KINDS: [&str; 3] = [GPU, MIG, SHARE];

/// How the programs on a whole GPU take turns. Shares have the time slice of their GPU's policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimeSlicing {
    /// How long each runs in turn. When the claim is gone, the GPU gets back what it had before.
    pub interval: TimeSlice,
}

/// A config for whole GPUs. [`GpuConfig::default`], which sets nothing, is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuConfig {
    /// For a claim whose containers or pods have the GPU together. Nothing is set unless this is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slicing: Option<TimeSlicing>,
    /// See [`DeviceConfig::extra_nodes`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_nodes: Vec<String>,
}

/// A config for MIG partitions. Which partition a claim gets is said by its requests. [`MigConfig::default`], which sets
/// nothing, is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigConfig {
    /// See [`DeviceConfig::extra_nodes`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_nodes: Vec<String>,
}

/// A config for shares of a GPU. How much of the GPU a claim gets is said by its requests. [`ShareConfig::default`],
/// which sets nothing, is what a claim without a config gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareConfig {
    /// See [`DeviceConfig::extra_nodes`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_nodes: Vec<String>,
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
        let Some(fields) = value.as_object_mut() else { return value };
        if let Some(slice) = self.time_slice() {
            fields.insert("timeSlicing".to_owned(), json!({ "interval": slice.name() }));
        }
        if !self.extra_nodes().is_empty() {
            fields.insert("extraNodes".to_owned(), json!(self.extra_nodes()));
        }
        value
    }

    /// The time slice that is asked for.
    pub fn time_slice(&self) -> Option<TimeSlice> {
        match self {
            Self::Gpu(GpuConfig { time_slicing, .. }) => {
                time_slicing.as_ref().map(|slicing| slicing.interval)
            }
            Self::Mig(_) | Self::Share(_) => None,
        }
    }

    /// Device nodes of the host that the containers need besides those of the GPU, such as `/dev/gdrdrv` (GDRCopy),
    /// `/dev/nvidia-fs*` (GPUDirect Storage) or `/dev/nvidia-caps-imex-channels/channel0`. Each must stand in the same
    /// words in the chart's `extraNodes`; a `*` at the end stands for the rest of the name.
    pub fn extra_nodes(&self) -> &[String] {
        match self {
            Self::Gpu(GpuConfig { extra_nodes, .. })
            | Self::Mig(MigConfig { extra_nodes })
            | Self::Share(ShareConfig { extra_nodes }) => extra_nodes,
        }
    }
}

/// Decodes the parameters of one config entry, strictly: an unknown field, a wrong type or another version is an
/// error.
pub fn decode(parameters: &Value) -> Result<DeviceConfig, ConfigError> {
    let mut fields = Fields::open("", parameters.clone())?;
    let version = fields.string("apiVersion", &format!("\"apiVersion\": {API_VERSION:?}"))?;
    if version != names::API_VERSION {
        return Err(ConfigError::ApiVersion { found: version });
    }
    let kind = fields.string("kind", &format!("\"kind\": {GPU:?}"))?;
    match kind.as_str() {
        GPU => {
            let (time_slicing, extra_nodes) = (time_slicing(&mut fields)?, extra_nodes(&mut fields)?);
            fields.finish(GPU)?;
            Ok(DeviceConfig::Gpu(GpuConfig { time_slicing, extra_nodes }))
        }
        MIG => {
            let extra_nodes = extra_nodes(&mut fields)?;
            fields.finish(MIG)?;
            Ok(DeviceConfig::Mig(MigConfig { extra_nodes }))
        }
        SHARE => {
            if fields.object("timeSlicing").is_ok_and(|found| found.is_some()) {
                return Err(ConfigError::OfThePolicy { path: fields.path("timeSlicing") });
            }
            let extra_nodes = extra_nodes(&mut fields)?;
            fields.finish(SHARE)?;
            Ok(DeviceConfig::Share(ShareConfig { extra_nodes }))
        }
        _ => Err(ConfigError::Kind { near: near(&kind, &KINDS), found: kind, known: KINDS.to_vec() }),
    }
}

/// `timeSlicing: { interval: … }`. An empty object is a mistake: it requests nothing, although its author wanted a time slice.
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

/// `extraNodes: [/dev/gdrdrv]`.
fn extra_nodes(fields: &mut Fields) -> Result<Vec<String>, ConfigError> {
    let paths = fields.strings("extraNodes")?;
    match paths.iter().position(|path| !is_device_node(path)) {
        None => Ok(paths),
        Some(at) => {
            let path = fields.path(&format!("extraNodes[{at}]"));
            let found = paths.into_iter().nth(at).unwrap_or_default();
            Err(ConfigError::Value { path, found, known: vec![DEVICE_NODE], near: None })
        }
    }
}

/// What [`is_device_node`] takes, for messages.
pub const DEVICE_NODE: &str = "a path below /dev that is no GPU's, as /dev/gdrdrv or /dev/nvidia-fs*";

/// Whether a text names a device node of the host, or several by a `*` at the end; none of a GPU, which only an allocation
/// gives.
pub fn is_device_node(path: &str) -> bool {
    let Some(rest) = path.strip_prefix("/dev/") else { return false };
    let name = rest.strip_suffix('*').unwrap_or(rest);
    let is_path = !name.contains('*') && name.split('/').all(|part| !["", ".", ".."].contains(&part));
    let starts_with_number = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    let of_gpu = name.starts_with("nvidia-caps/")
        || name.starts_with("dri/")
        || name.strip_prefix("nvidia").is_some_and(starts_with_number)
        || rest.ends_with('*') && "nvidia".starts_with(name);
    is_path && !of_gpu
}

#[cfg(test)]
mod tests {
    use super::is_device_node;

    #[test]
    fn extra_nodes_are_nodes_of_other_modules_and_never_those_of_gpus() {
        for right in [
            "/dev/gdrdrv",
            "/dev/nvidia-fs*",
            "/dev/nvidia-fs0",
            "/dev/infiniband/uverbs*",
            "/dev/nvidia-caps-imex-channels/channel0",
        ] {
            assert!(is_device_node(right), "{right}");
        }
        for wrong in [
            "gdrdrv",
            "/dev/",
            "/dev/*",
            "/dev/../etc",
            "/dev/a*b",
            "/dev/nv*",
            "/dev/nvidia*",
            "/dev/nvidia0",
            "/dev/nvidia1*",
            "/dev/nvidia-caps/nvidia-cap*",
            "/dev/dri/renderD128",
        ] {
            assert!(!is_device_node(wrong), "{wrong}");
        }
    }
}
