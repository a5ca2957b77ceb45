//! What the demo found, as values: shown as tables or as JSON.

use std::collections::BTreeMap;

use divvy_api::names::attributes;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde::Serialize;
use serde_json::Value;

use super::gpus::GpuPicture;
use crate::device::{memory, text};

/// The whole demo.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// The simulated GPUs, as asked for.
    pub(crate) sim: String,
    /// The policies of the node that `published` is of; none for the chart's defaults.
    pub(crate) policies: Vec<String>,
    /// What the policies ask for and the node does not publish, and why.
    pub(crate) notes: Vec<String>,
    /// What the node published.
    pub(crate) published: Vec<PublishedDevice>,
    /// Time from the plugin's start to its first slices in the API, in milliseconds.
    pub(crate) published_after_ms: u64,
    /// One entry a manifest.
    pub(crate) scenarios: Vec<Scenario>,
    /// Records, CDI files or holds that were still there when everything had been given back: always empty.
    pub(crate) left_behind: Vec<String>,
}

impl Report {
    /// What went wrong, one sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let of = |scenario: &Scenario| {
            let name = scenario.name.clone();
            scenario.problems().into_iter().map(move |problem| format!("{name}: {problem}"))
        };
        let left = self.left_behind.iter().map(|what| format!("left behind: {what}"));
        self.scenarios.iter().flat_map(of).chain(left).collect()
    }
}

impl Scenario {
    /// What went wrong, one sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = self.problem.iter().cloned().collect();
        for round in &self.rounds {
            problems.extend(round.surprises.iter().cloned());
            for claim in &round.claims {
                let (what, reason) = match &claim.state {
                    State::Failed { reason } => ("failed", reason),
                    State::Pending { reason, expected: false } => ("stays pending", reason),
                    State::Pending { .. } | State::Prepared { .. } => continue,
                };
                let problem = format!("claim {} {what}: {reason}", claim.claim);
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
            }
        }
        problems
    }
}

/// A device in the node's slices, as the API server has it. What it does not say is left out.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PublishedDevice {
    pub(crate) name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) product: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) numa_node: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uuid: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) taints: Vec<String>,
}

/// One manifest.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Scenario {
    pub(crate) name: String,
    /// The comment in its first line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) title: Option<String>,
    /// Why the node cannot run it: what it needs and the node does not have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<String>,
    /// What is doubtful in it, what of it was passed over, and what of its policies has no effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    /// The GpuPolicies that it brings; with none it is the demo's, which asks for everything.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) policies: Vec<String>,
    /// What the node published under them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) published: Vec<PublishedDevice>,
    /// The state after every pod had its turn, and again after some pods had ended.
    pub(crate) rounds: Vec<Round>,
    /// What kept the whole scenario from running.
    pub(crate) problem: Option<String>,
}

/// What was seen at one time.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Round {
    /// The pods that ended before it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) ended: Vec<String>,
    pub(crate) claims: Vec<ClaimReport>,
    /// What every GPU was.
    pub(crate) gpus: Vec<GpuPicture>,
    /// What is not as the manifest expects it, claims that failed or are pending excepted.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) surprises: Vec<String>,
}

/// One claim.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimReport {
    /// `namespace/name`.
    pub(crate) claim: String,
    /// Pods that use it; none for a claim on its own.
    pub(crate) pods: Vec<String>,
    #[serde(flatten)]
    pub(crate) state: State,
    /// The CDI document of the claim.
    pub(crate) cdi: Option<Value>,
}

/// What became of a claim.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "state", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub(crate) enum State {
    /// Prepared, and given back.
    Prepared {
        /// Its devices.
        devices: Vec<DeviceReport>,
        /// Time of the kubelet's call, in microseconds.
        prepare_us: u64,
    },
    /// Not allocated.
    Pending {
        /// Why.
        reason: String,
        /// Whether the manifest says so.
        expected: bool,
    },
    /// Allocated, but prepare or unprepare failed.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A device of a prepared claim.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceReport {
    pub(crate) requests: Vec<String>,
    pub(crate) device: String,
    pub(crate) cdi_ids: Vec<String>,
    /// Which share of it, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) share: Option<String>,
    /// What the share was granted of each capacity.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) consumed: BTreeMap<String, String>,
    /// Whether with admin access, beside the holders.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) admin: bool,
}

/// Devices by name; those that differ only in where a partition begins are one row: `gpu-0-mig-1g10gb-19-{0,1,2}`.
pub(crate) fn rows(devices: &[PublishedDevice]) -> Vec<(String, &PublishedDevice)> {
    let mut rows: BTreeMap<&str, (Vec<&str>, &PublishedDevice)> = BTreeMap::new();
    for device in devices {
        let partition = device.name.rsplit_once('-').filter(|(stem, _)| stem.contains("-mig-"));
        let (stem, start) = partition.unzip();
        let (starts, _) = rows.entry(stem.unwrap_or(&device.name)).or_insert((Vec::new(), device));
        starts.extend(start);
    }
    let name = |stem: &str, starts: &[&str]| match starts {
        [] => stem.to_owned(),
        [one] => format!("{stem}-{one}"),
        several => format!("{stem}-{{{}}}", several.join(",")),
    };
    let rows = rows.into_iter().map(|(stem, (starts, device))| (name(stem, &starts), device));
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|(a, _), (b, _)| a.cmp(b));
    rows
}

/// The devices of the slices in the API, in the order in which the scheduler tries them.
pub(crate) fn published(slices: &[ResourceSlice]) -> Vec<PublishedDevice> {
    let mut slices: Vec<&ResourceSlice> = slices.iter().collect();
    slices.sort_by_key(|slice| slice.metadata.name.clone());
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten()).map(of_device).collect()
}

fn of_device(device: &Device) -> PublishedDevice {
    let numa_node = device.attributes.as_ref().and_then(|all| all.get(attributes::NUMA_NODE)?.int);
    PublishedDevice {
        name: device.name.clone(),
        product: text(device, attributes::PRODUCT_NAME).map(str::to_owned),
        memory_bytes: memory(device),
        numa_node,
        uuid: text(device, attributes::UUID).map(str::to_owned),
        taints: device.taints.iter().flatten().map(|taint| taint.key.clone()).collect(),
    }
}
