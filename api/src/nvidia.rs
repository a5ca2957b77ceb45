//! The configs of NVIDIA's driver, read in its place: each becomes one of ours, or is refused by
//! the name of what cannot be kept.

use divvy_model::{Quantity, TimeSlice};
use serde_json::{Map, Value};

use crate::config::read_time_slice;
use crate::fields::{Fields, near};
use crate::mps::CORES;
use crate::names::{NVIDIA_API_VERSION, NVIDIA_MIG_CONFIG};
use crate::{ConfigError, ConfigKind, DeviceConfig, MpsLimits};

/// Kind of configs of whole GPUs.
const GPU: &str = "GpuConfig";
/// Kind of configs of MIG partitions.
const MIG: &str = NVIDIA_MIG_CONFIG;

/// Kinds of NVIDIA's drivers that divvy does not serve, each with the reason.
const NOT_SERVED: [(&str, &str); 3] = [
    ("VfioDeviceConfig", VFIO),
    ("ComputeDomainChannelConfig", COMPUTE_DOMAIN),
    ("ComputeDomainDaemonConfig", COMPUTE_DOMAIN),
];
const VFIO: &str = "divvy gives GPUs to containers and passes none through to a virtual machine (run such pods on \
                    nodes of NVIDIA's driver)";
const COMPUTE_DOMAIN: &str = "it belongs to the driver compute-domain.nvidia.com, which runs beside divvy (name that driver in the \
                              config entry)";

/// Strategies of `sharing`.
const STRATEGIES: [&str; 2] = [TIME_SLICING, MPS];
const TIME_SLICING: &str = "TimeSlicing";
const MPS: &str = "MPS";
/// Objects of `sharing`, each for one of the strategies.
const TIME_SLICING_CONFIG: &str = "timeSlicingConfig";
const MPS_CONFIG: &str = "mpsConfig";
/// Form of an amount of pinned memory, for messages.
const MEMORY: &str = "an amount of 1Mi or more, as \"10Gi\"";

/// Returns whether these are parameters of NVIDIA's API, in the version that is read.
pub(crate) fn is_theirs(parameters: &Value) -> bool {
    parameters.get("apiVersion").and_then(Value::as_str) == Some(NVIDIA_API_VERSION)
}

/// Decodes a config of NVIDIA's driver, strictly.
pub(crate) fn decode(parameters: &Value) -> Result<DeviceConfig, ConfigError> {
    let mut fields = Fields::open("", without_nulls(parameters.clone()))?;
    fields.string("apiVersion", NVIDIA_API_VERSION)?;
    let kind = fields.string("kind", "\"kind\": \"GpuConfig\"")?;
    let config = match kind.as_str() {
        GPU => gpu(&mut fields)?,
        MIG => mig(&mut fields)?,
        other => return Err(not_a_kind(other)),
    };
    fields.finish(if config.kind == ConfigKind::Gpu {
        GPU
    } else {
        MIG
    })?;
    Ok(config)
}

/// Removes what is null, at any depth: NVIDIA's driver reads it as absent.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(_, value)| !value.is_null());
            let kept = kept.map(|(name, value)| (name, without_nulls(value)));
            Value::Object(kept.collect::<Map<_, _>>())
        }
        other => other,
    }
}

fn not_a_kind(found: &str) -> ConfigError {
    let known = NOT_SERVED.iter().find(|(kind, _)| *kind == found);
    match known {
        Some((kind, why)) => ConfigError::NotServed { kind, why },
        None => ConfigError::Kind {
            // `MigConfig` is ours, and not far from `GpuConfig` either.
            near: if found.starts_with("Mig") {
                Some(MIG.to_owned())
            } else {
                near(found, &[GPU, MIG])
            },
            found: found.to_owned(),
            known: vec![GPU, MIG],
        },
    }
}

/// Reads the rest of a `GpuConfig`.
fn gpu(fields: &mut Fields) -> Result<DeviceConfig, ConfigError> {
    let mut config = DeviceConfig::empty(ConfigKind::Gpu);
    let Some(mut sharing) = fields.object("sharing")? else {
        return Ok(config);
    };
    let is_mps = is_mps(&mut sharing)?;
    let (slicing, mps) = (
        sharing.object(TIME_SLICING_CONFIG)?,
        sharing.object(MPS_CONFIG)?,
    );
    sharing.only_with(TIME_SLICING_CONFIG, slicing.is_some(), !is_mps)?;
    sharing.only_with(MPS_CONFIG, mps.is_some(), is_mps)?;
    sharing.finish("sharing")?;
    if is_mps {
        config.mps_server = Some(mps.map(limits).transpose()?.unwrap_or_default());
    } else {
        let interval = slicing.map(interval).transpose()?.flatten();
        config.time_slice = Some(interval.unwrap_or(TimeSlice::Default));
    }
    Ok(config)
}

/// Reads the rest of a `MigDeviceConfig`. Time-slicing of a partition is accepted and means
/// nothing, as at NVIDIA: the hardware has no time slice of a partition.
fn mig(fields: &mut Fields) -> Result<DeviceConfig, ConfigError> {
    let mut config = DeviceConfig::empty(ConfigKind::Mig);
    let Some(mut sharing) = fields.object("sharing")? else {
        return Ok(config);
    };
    let is_mps = is_mps(&mut sharing)?;
    let mps = sharing.object(MPS_CONFIG)?;
    sharing.only_with(MPS_CONFIG, mps.is_some(), is_mps)?;
    sharing.finish("sharing")?;
    if is_mps {
        config.mps_server = Some(mps.map(limits).transpose()?.unwrap_or_default());
    }
    Ok(config)
}

/// Takes the strategy; returns whether it is MPS.
fn is_mps(sharing: &mut Fields) -> Result<bool, ConfigError> {
    let found = sharing.string("strategy", "\"strategy\": \"TimeSlicing\" or \"MPS\"")?;
    if !STRATEGIES.contains(&found.as_str()) {
        return Err(ConfigError::Value {
            path: sharing.path("strategy"),
            near: near(&found, &STRATEGIES),
            found,
            known: STRATEGIES.to_vec(),
        });
    }
    Ok(found == MPS)
}

impl Fields {
    /// Refuses an object of the strategy that is not chosen.
    fn only_with(&self, name: &str, is_there: bool, chosen: bool) -> Result<(), ConfigError> {
        if !is_there || chosen {
            return Ok(());
        }
        let why = if name == MPS_CONFIG {
            "it belongs to the strategy MPS, and the strategy is TimeSlicing (leave out the one that is not meant)"
        } else {
            "it belongs to the strategy TimeSlicing, and the strategy is MPS (leave out the one that is not meant)"
        };
        Err(ConfigError::NotKept {
            path: self.path(name),
            why,
        })
    }
}

/// Reads `timeSlicingConfig`.
fn interval(mut slicing: Fields) -> Result<Option<TimeSlice>, ConfigError> {
    let found = slicing.optional_string("interval")?;
    let path = slicing.path("interval");
    slicing.finish(TIME_SLICING_CONFIG)?;
    found.map(|found| read_time_slice(path, found)).transpose()
}

/// Reads `mpsConfig` as the limits of our MPS server.
fn limits(mut mps: Fields) -> Result<MpsLimits, ConfigError> {
    let cores = mps.whole_number("defaultActiveThreadPercentage", 1..=100, CORES)?;
    let memory = mps.quantity("defaultPinnedDeviceMemoryLimit", MEMORY)?;
    let memory = memory.map(|(text, amount)| {
        let bytes = u64::try_from(amount.rounded_up()).ok();
        bytes
            .filter(|bytes| *bytes >= 1 << 20)
            .ok_or(ConfigError::Value {
                path: mps.path("defaultPinnedDeviceMemoryLimit"),
                found: text,
                known: vec![MEMORY],
                near: None,
            })
    });
    let memory = memory.transpose()?;
    let by_device = mps.object("defaultPerDevicePinnedMemoryLimit")?;
    if by_device.is_some_and(|by_device| !by_device.is_empty()) {
        return Err(ConfigError::NotKept {
            path: mps.path("defaultPerDevicePinnedMemoryLimit"),
            why: "a limit of divvy's is for every GPU of its config entry (write defaultPinnedDeviceMemoryLimit, in a config entry \
                  for each request)",
        });
    }
    // Either way: the servers of divvy serve programs of all users.
    mps.boolean("multiUser")?;
    mps.finish(MPS_CONFIG)?;
    Ok(MpsLimits { cores, memory })
}

impl Fields {
    /// Takes an amount as Kubernetes has it: a string or a number.
    fn quantity(
        &mut self,
        name: &'static str,
        form: &'static str,
    ) -> Result<Option<(String, Quantity)>, ConfigError> {
        let Some(text) = self.text_or_number(name)? else {
            return Ok(None);
        };
        match text.parse() {
            Ok(amount) => Ok(Some((text, amount))),
            Err(_) => Err(ConfigError::Value {
                path: self.path(name),
                found: text,
                known: vec![form],
                near: None,
            }),
        }
    }
}
