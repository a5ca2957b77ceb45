//! Real use of claims, as the node plugins measured it: values that are read from the text of
//! their `/metrics`. A value that is not there is unknown, never 0.

mod read;
mod text;

use std::collections::BTreeMap;

use serde::Serialize;

pub use self::read::read;
use self::text::Sample;

/// A claim's device: UUID of the GPU, namespace, claim, device.
type Key = (String, String, String, String);

/// The readings of the fleet.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Usage {
    claims: BTreeMap<Key, OfPods>,
    gpus: BTreeMap<String, GpuUsage>,
    /// Sources that could not be read, and what remains unknown.
    pub unread: Vec<String>,
    /// Seconds after which a device is shown as idle, if not those of every fleet.
    pub idle_after: Option<u64>,
}

/// Use of one device by a claim. Memory is in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimUsage {
    /// Memory of all pods of the claim together.
    pub memory_used: Option<u64>,
    pub memory_granted: Option<u64>,
    /// Limit of a share's memory, where the driver keeps one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<u64>,
    /// Utilization of the GPU or partition, from 0 to 1.
    pub utilization: Option<f64>,
    pub source: Option<String>,
    pub idle_seconds: Option<u64>,
    pub over_grant: Option<bool>,
}

/// The memory of a GPU, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuUsage {
    pub memory_used: Option<u64>,
    /// By the driver itself.
    pub memory_reserved: Option<u64>,
    /// By processes that no claim explains.
    pub memory_unattributed: Option<u64>,
    /// Age of the oldest reading.
    pub age_seconds: Option<u64>,
}

/// Readings of a claim's device, with the number of its pods: a sum is known if all of them are.
#[derive(Debug, Clone, Default, PartialEq)]
struct OfPods {
    usage: ClaimUsage,
    /// Pods that hold it.
    pods: u32,
    with_memory: u32,
    with_ratio: u32,
}

impl OfPods {
    fn known(&self) -> ClaimUsage {
        let mut usage = self.usage.clone();
        usage.memory_used = usage.memory_used.filter(|_| self.with_memory >= self.pods);
        if self.with_ratio < self.pods && usage.source.as_deref() == Some(OF_PROCESSES) {
            (usage.utilization, usage.source) = (None, None);
        }
        usage
    }
}

/// The source of utilisations that add up.
const OF_PROCESSES: &str = "process";

impl Usage {
    /// Takes in what one plugin serves. Each pod of a claim has series of its own.
    pub fn add(&mut self, metrics: &str) {
        for sample in text::samples(metrics) {
            let Some(name) = sample.name.strip_prefix("divvy_") else {
                continue;
            };
            if let Some(name) = name.strip_prefix("claim_") {
                self.add_of_claim(name, &sample);
            } else {
                self.add_of_gpu(name, &sample);
            }
        }
    }

    fn add_of_claim(&mut self, name: &str, sample: &Sample) {
        let key = key(sample);
        let mut known = self.claims.get(&key).cloned().unwrap_or_default();
        let of = &mut known.usage;
        let value = sample.value;
        match name {
            "device_info" => known.pods += 1,
            "memory_used_bytes" => {
                known.with_memory += 1;
                add(&mut of.memory_used, whole(value));
            }
            // The grant is the claim's, whichever pod uses it.
            "memory_granted_bytes" => of.memory_granted = of.memory_granted.max(whole(value)),
            "memory_limit_bytes" => of.memory_limit = of.memory_limit.max(whole(value)),
            "utilization_ratio" => {
                let source = sample.label("source").to_owned();
                let before = of.utilization.unwrap_or(0.0);
                // Processes add up; what is read of the device is the same for all pods.
                known.with_ratio += 1;
                let ratio = if source == OF_PROCESSES {
                    before + value
                } else {
                    before.max(value)
                };
                of.utilization = Some(ratio.clamp(0.0, 1.0));
                of.source = Some(source).filter(|source| !source.is_empty());
            }
            "idle_seconds" => {
                let (now, before) = (whole(value), of.idle_seconds);
                of.idle_seconds = before.map_or(now, |before| now.map(|now| now.min(before)));
            }
            "overuse" => of.over_grant = Some(of.over_grant == Some(true) || value > 0.0),
            _ => return,
        }
        self.claims.insert(key, known);
    }

    fn add_of_gpu(&mut self, name: &str, sample: &Sample) {
        let uuid = sample.label("UUID");
        let mut of = self.of_gpu(uuid);
        let value = whole(sample.value);
        match name {
            "gpu_memory_used_bytes" => of.memory_used = value,
            "gpu_memory_reserved_bytes" => of.memory_reserved = value,
            "gpu_memory_unattributed_bytes" => of.memory_unattributed = value,
            "usage_age_seconds" => of.age_seconds = of.age_seconds.max(value),
            _ => return,
        }
        self.gpus.insert(uuid.to_owned(), of);
    }

    /// Returns the use of a device by a claim.
    pub fn of_claim(&self, uuid: &str, namespace: &str, claim: &str, device: &str) -> ClaimUsage {
        let key = (
            uuid.to_owned(),
            namespace.to_owned(),
            claim.to_owned(),
            device.to_owned(),
        );
        self.claims.get(&key).map(OfPods::known).unwrap_or_default()
    }

    /// The memory of a GPU.
    pub fn of_gpu(&self, uuid: &str) -> GpuUsage {
        self.gpus.get(uuid).cloned().unwrap_or_default()
    }
}

fn key(sample: &Sample) -> Key {
    ["UUID", "namespace", "claim", "device"]
        .map(|name| sample.label(name).to_owned())
        .into()
}

fn add(sum: &mut Option<u64>, value: Option<u64>) {
    if let Some(value) = value {
        *sum = Some(sum.unwrap_or(0).saturating_add(value));
    }
}

/// A count; `None` for what counts nothing.
fn whole(value: f64) -> Option<u64> {
    let is_count = value.is_finite() && value >= 0.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates; checked to be positive"
    )]
    is_count.then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVED: &str = r#"
# HELP divvy_claim_memory_used_bytes Memory.
# TYPE divvy_claim_memory_used_bytes gauge
divvy_claim_memory_used_bytes{namespace="a",claim="c",pod="p",device="gpu-0-ts",UUID="GPU-1"} 100
divvy_claim_memory_used_bytes{namespace="a",claim="c",pod="q",device="gpu-0-ts",UUID="GPU-1"} 2e2
divvy_claim_memory_granted_bytes{namespace="a",claim="c",pod="p",device="gpu-0-ts",UUID="GPU-1"} 1000
divvy_claim_memory_granted_bytes{namespace="a",claim="c",pod="q",device="gpu-0-ts",UUID="GPU-1"} 1000
divvy_claim_utilization_ratio{namespace="a",claim="c",pod="p",device="gpu-0-ts",UUID="GPU-1",source="process"} 0.25
divvy_claim_utilization_ratio{namespace="a",claim="c",pod="q",device="gpu-0-ts",UUID="GPU-1",source="process"} 0.5
divvy_claim_idle_seconds{namespace="a",claim="c",pod="p",device="gpu-0-ts",UUID="GPU-1"} 900
divvy_claim_idle_seconds{namespace="a",claim="c",pod="q",device="gpu-0-ts",UUID="GPU-1"} 0
divvy_claim_overuse{namespace="a",claim="c",pod="p",device="gpu-0-ts",UUID="GPU-1"} 1
divvy_claim_overuse{namespace="a",claim="c",pod="q",device="gpu-0-ts",UUID="GPU-1"} 0
divvy_claim_utilization_ratio{namespace="b",claim="d",pod="p",device="gpu-1",UUID="GPU-2",source="gpm"} 0.5
divvy_claim_utilization_ratio{namespace="b",claim="d",pod="q",device="gpu-1",UUID="GPU-2",source="gpm"} 0.5
divvy_claim_memory_used_bytes{namespace="b",claim="d",pod="p",device="gpu-1",UUID="GPU-2"} NaN
divvy_gpu_memory_used_bytes{UUID="GPU-1"} 400
divvy_gpu_memory_unattributed_bytes{UUID="GPU-1"} 0
divvy_usage_age_seconds{UUID="GPU-1",reading="memory"} 3
divvy_usage_age_seconds{UUID="GPU-1",reading="processes"} 12
divvy_claim_seconds_count{operation="prepare"} 7
"#;

    #[test]
    fn pods_of_one_claim_are_added_where_their_processes_are_counted() {
        let mut usage = Usage::default();
        usage.add(SERVED);
        let both = ClaimUsage {
            memory_used: Some(300),
            memory_granted: Some(1000),
            memory_limit: None,
            utilization: Some(0.75),
            source: Some("process".to_owned()),
            idle_seconds: Some(0),
            over_grant: Some(true),
        };
        assert_eq!(usage.of_claim("GPU-1", "a", "c", "gpu-0-ts"), both);
        let of_device = ClaimUsage {
            utilization: Some(0.5),
            source: Some("gpm".to_owned()),
            ..ClaimUsage::default()
        };
        assert_eq!(
            usage.of_claim("GPU-2", "b", "d", "gpu-1"),
            of_device,
            "no number is no memory"
        );
        assert_eq!(usage.claims.len(), 2);
    }

    #[test]
    fn a_sum_is_unknown_if_that_of_one_pod_is() {
        let held = |pod: &str| {
            let labels =
                format!(r#"namespace="a",claim="c",pod="{pod}",device="gpu-0-ts",UUID="GPU-1""#);
            format!("divvy_claim_device_info{{{labels}}} 1\n")
        };
        let with = |pods: &[&str]| {
            let mut usage = Usage::default();
            usage.add(&(SERVED.to_owned() + &pods.iter().map(|pod| held(pod)).collect::<String>()));
            let found = usage.of_claim("GPU-1", "a", "c", "gpu-0-ts");
            (found.memory_used, found.utilization, found.memory_granted)
        };
        assert_eq!(with(&["p", "q"]), (Some(300), Some(0.75), Some(1000)));
        assert_eq!(with(&["p", "q", "r"]), (None, None, Some(1000)));
    }

    #[test]
    fn what_is_not_served_is_unknown_and_0_is_known() {
        let mut usage = Usage::default();
        usage.add(SERVED);
        let known = GpuUsage {
            memory_used: Some(400),
            memory_reserved: None,
            memory_unattributed: Some(0),
            age_seconds: Some(12),
        };
        assert_eq!(usage.of_gpu("GPU-1"), known);
        assert_eq!(usage.of_gpu("GPU-9"), GpuUsage::default());
        assert_eq!(
            usage.of_claim("GPU-1", "a", "c", "gpu-0"),
            ClaimUsage::default()
        );
    }
}
