//! The opaque configs (`config[].opaque.parameters` of claims and classes).

use divvy_model::TimeSlice;
use serde_json::{Value, json};

use crate::fields::{Fields, near};
use crate::limits::{self, MemoryBound};
use crate::names::{API_VERSION, NVIDIA_API_VERSION, Naming};
use crate::nvidia;
use crate::{ConfigError, MpsLimits, MpsOptions};

const KINDS: [&str; 4] = [
    ConfigKind::Gpu.name(),
    ConfigKind::Mig.name(),
    ConfigKind::Share.name(),
    ConfigKind::Mps.name(),
];

/// The kind of device that a config is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigKind {
    /// Whole GPUs.
    Gpu,
    /// MIG partitions. The requests of a claim say which one it gets.
    Mig,
    /// Time-sliced shares of a GPU. The requests of a claim say how much it gets of the GPU.
    Share,
    /// MPS shares of a GPU.
    Mps,
}

impl ConfigKind {
    /// All kinds, in the order of the documents.
    pub const ALL: [Self; 4] = [Self::Gpu, Self::Mig, Self::Share, Self::Mps];

    /// Returns it as users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GpuConfig",
            Self::Mig => "MigConfig",
            Self::Share => "ShareConfig",
            Self::Mps => "MpsConfig",
        }
    }
}

/// A decoded and validated config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceConfig {
    /// The kind of device it is for.
    pub kind: ConfigKind,
    /// The time slice of whole GPUs: how long each program of a claim whose containers or pods have
    /// the GPU together runs in turn. When the claim is gone, the GPU gets back what it had before.
    /// Shares have the time slice of their GPU's policy.
    pub time_slice: Option<TimeSlice>,
    /// The MPS server of a whole GPU or partition (`mps: {}`): the programs of a claim whose
    /// containers or pods have it together run at once, and each is kept to these limits. It stays
    /// the claim's alone. Not together with `timeSlicing`.
    pub mps_server: Option<MpsLimits>,
    /// The limit of a share's memory (`limits: {memory: 16Gi}`): the driver keeps the pod within
    /// it. It is at least what the share requests, the limit of shares without one. A claim that
    /// sets it is served only where the memory of shares is capped (attribute `memoryEnforcement`),
    /// and up to what the GPU's policy allows (`shares.burst`, attribute `memoryLimitMaxPercent`).
    pub memory_limit: Option<MemoryBound>,
    /// Device nodes of the host that the containers need besides those of the GPU, such as
    /// `/dev/gdrdrv` (GDRCopy), `/dev/nvidia-fs*` (GPUDirect Storage) or
    /// `/dev/nvidia-caps-imex-channels/channel0`. Each must stand in the same words in the chart's
    /// `extraNodes`; a `*` at the end stands for the rest of the name.
    pub extra_nodes: Vec<String>,
    /// Options of MPS shares.
    pub mps: MpsOptions,
}

impl DeviceConfig {
    /// A config that sets nothing: what a claim without one gets.
    pub fn empty(kind: ConfigKind) -> Self {
        Self {
            kind,
            time_slice: None,
            mps_server: None,
            memory_limit: None,
            extra_nodes: Vec::new(),
            mps: MpsOptions::default(),
        }
    }

    /// The config as a user would write it, with all defaults filled in.
    pub fn to_value(&self) -> Value {
        let mut value = json!({ "apiVersion": API_VERSION, "kind": self.kind.name() });
        let Some(fields) = value.as_object_mut() else {
            return value;
        };
        if let Some(slice) = self.time_slice {
            fields.insert(
                "timeSlicing".to_owned(),
                json!({ "interval": slice.name() }),
            );
        }
        if let Some(limits) = self.mps_server {
            fields.insert("mps".to_owned(), limits.to_server());
        }
        if let Some(bound) = self.memory_limit {
            fields.insert("limits".to_owned(), limits::to_value(bound));
        }
        self.mps.put(fields);
        if !self.extra_nodes.is_empty() {
            fields.insert("extraNodes".to_owned(), json!(self.extra_nodes));
        }
        value
    }
}

/// Decodes the parameters of one config entry for a driver of this name, strictly. In the place of
/// NVIDIA's driver its kinds are read beside ours.
pub fn decode_for(driver: &str, parameters: &Value) -> Result<DeviceConfig, ConfigError> {
    if !Naming::of(driver).stands_in() {
        return decode(parameters);
    }
    if nvidia::is_theirs(parameters) {
        return nvidia::decode(parameters);
    }
    decode(parameters).map_err(|error| match error {
        ConfigError::ApiVersion { found, .. } => ConfigError::ApiVersion {
            found,
            known: &[API_VERSION, NVIDIA_API_VERSION],
        },
        other => other,
    })
}

/// Decodes the parameters of one config entry, strictly: an unknown field, a wrong type or another
/// version is an error.
pub fn decode(parameters: &Value) -> Result<DeviceConfig, ConfigError> {
    // Version and kind before all else: fields of another version or kind have other meanings, and
    // an error about one of them would mislead.
    let mut fields = Fields::open("", parameters.clone())?;
    let version = fields.string("apiVersion", &format!("\"apiVersion\": {API_VERSION:?}"))?;
    if version != API_VERSION {
        return Err(ConfigError::ApiVersion {
            found: version,
            known: &[API_VERSION],
        });
    }
    let kind = fields.string("kind", "\"kind\": \"GpuConfig\"")?;
    let kinds = [
        ConfigKind::Gpu,
        ConfigKind::Mig,
        ConfigKind::Share,
        ConfigKind::Mps,
    ];
    let Some(kind) = kinds.into_iter().find(|known| known.name() == kind) else {
        return Err(ConfigError::Kind {
            near: near(&kind, &KINDS),
            found: kind,
            known: KINDS.to_vec(),
        });
    };
    let time_slice = match kind {
        ConfigKind::Gpu => time_slice(&mut fields)?,
        ConfigKind::Mig | ConfigKind::Mps => None,
        ConfigKind::Share => {
            // Known, though refused: it has another place now, which an unknown field would not
            // show (ADR 13).
            // A value of a wrong type is refused as well: the field is.
            if !matches!(fields.object("timeSlicing"), Ok(None)) {
                return Err(ConfigError::OfThePolicy {
                    path: fields.path("timeSlicing"),
                });
            }
            None
        }
    };
    let mps_server = match kind {
        ConfigKind::Gpu | ConfigKind::Mig => MpsLimits::take_server(&mut fields)?,
        // That it is unknown would not say why.
        ConfigKind::Share if fields.contains("mps") => {
            return Err(ConfigError::NotOfShares {
                path: fields.path("mps"),
            });
        }
        ConfigKind::Share | ConfigKind::Mps => None,
    };
    if mps_server.is_some() && time_slice.is_some() {
        return Err(ConfigError::NotTogether {
            path: fields.path("mps"),
            other: fields.path("timeSlicing"),
        });
    }
    let memory_limit = match kind {
        ConfigKind::Share => limits::read(&mut fields)?,
        ConfigKind::Gpu | ConfigKind::Mig | ConfigKind::Mps => None,
    };
    let mps = match kind {
        ConfigKind::Mps => MpsOptions::take(&mut fields)?,
        ConfigKind::Gpu | ConfigKind::Mig | ConfigKind::Share => MpsOptions::default(),
    };
    let extra_nodes = extra_nodes(&mut fields)?;
    fields.finish(kind.name())?;
    Ok(DeviceConfig {
        kind,
        time_slice,
        mps_server,
        memory_limit,
        extra_nodes,
        mps,
    })
}

/// `timeSlicing: { interval: … }`. An empty object is a mistake: it requests nothing, although its
/// author wanted a time slice.
fn time_slice(fields: &mut Fields) -> Result<Option<TimeSlice>, ConfigError> {
    let Some(mut inside) = fields.object("timeSlicing")? else {
        return Ok(None);
    };
    let known = TimeSlice::ALL.map(TimeSlice::name);
    let found = inside.string(
        "interval",
        &format!(
            "\"interval\": {}",
            known.map(|k| format!("{k:?}")).join(" or ")
        ),
    )?;
    let interval = read_time_slice(inside.path("interval"), found)?;
    inside.finish("timeSlicing")?;
    Ok(Some(interval))
}

/// Reads the name of a time slice.
pub(crate) fn read_time_slice(path: String, found: String) -> Result<TimeSlice, ConfigError> {
    let known = TimeSlice::ALL.map(TimeSlice::name);
    TimeSlice::parse(&found).ok_or_else(|| ConfigError::Value {
        path,
        near: near(&found, &known),
        found,
        known: known.to_vec(),
    })
}

/// `extraNodes: [/dev/gdrdrv]`.
fn extra_nodes(fields: &mut Fields) -> Result<Vec<String>, ConfigError> {
    let paths = fields.strings("extraNodes")?;
    match paths.iter().position(|path| !is_device_node(path)) {
        None => Ok(paths),
        Some(at) => {
            let path = fields.path(&format!("extraNodes[{at}]"));
            let found = paths.into_iter().nth(at).unwrap_or_default();
            Err(ConfigError::Value {
                path,
                found,
                known: vec![DEVICE_NODE],
                near: None,
            })
        }
    }
}

/// The form that [`is_device_node`] takes, for messages.
pub const DEVICE_NODE: &str =
    "a path below /dev that is no GPU's, as /dev/gdrdrv or /dev/nvidia-fs*";

/// Returns whether a text names a device node of the host, or several by a `*` at the end; none of
/// a GPU, which only an allocation gives.
pub fn is_device_node(path: &str) -> bool {
    let Some(rest) = path.strip_prefix("/dev/") else {
        return false;
    };
    let name = rest.strip_suffix('*').unwrap_or(rest);
    // A path that leads out of `/dev`, or that could be written in two ways, is none: configs are
    // compared as text with the node's list.
    let is_path =
        !name.contains('*') && name.split('/').all(|part| !["", ".", ".."].contains(&part));
    let starts_with_number = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    // Nodes that only an allocation gives: MIG capabilities, DRM nodes, and `nvidia<number>`. A `*`
    // does not reach into a folder below, so of patterns only those are left that `nvidia<number>`
    // could match.
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
