//! Results of the demo as values, shown as tables or as JSON.

use std::collections::BTreeMap;

use divvy_api::names::attributes;
use divvy_model::Sharing;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde::Serialize;
use serde_json::Value;

use super::gpus::GpuPicture;
use super::schedule::PLACE;
use divvy_why::cause::{Cause, Mig, Reader, mig, named};
use divvy_why::device::{memory, text};

/// Beginning of what the API server refuses.
pub(crate) const REFUSED: &str = "the API server refuses it: ";

/// The whole demo.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Report {
    /// The simulated GPUs, as asked for.
    pub(crate) sim: String,
    /// The policies of the node that `published` is of; none for the chart's defaults.
    pub(crate) policies: Vec<String>,
    /// Parts of the policies that the node does not publish, with the reason.
    pub(crate) notes: Vec<String>,
    /// Devices that the node published.
    pub(crate) published: Vec<PublishedDevice>,
    /// Time from the plugin's start to its first slices in the API, in milliseconds.
    pub(crate) published_after_ms: u64,
    /// Manifests in the order of the demo.
    pub(crate) scenarios: Vec<Scenario>,
    /// Records, CDI files or holds that were still there when everything had been given back:
    /// always empty.
    pub(crate) left_behind: Vec<String>,
}

impl Report {
    /// Returns the problems, one sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let of = |scenario: &Scenario| {
            let name = scenario.name.clone();
            scenario
                .problems()
                .into_iter()
                .map(move |problem| format!("{name}: {problem}"))
        };
        let left = self
            .left_behind
            .iter()
            .map(|what| format!("left behind: {what}"));
        self.scenarios.iter().flat_map(of).chain(left).collect()
    }
}

impl Scenario {
    /// Returns the problems, one sentence each.
    pub(crate) fn problems(&self) -> Vec<String> {
        let mut problems: Vec<String> = match &self.problem {
            // Each refusal is a problem of its own.
            Some(all) if all.starts_with(REFUSED) => {
                let each = all.split(REFUSED).map(|one| one.trim_end().to_owned());
                let each = each.filter(|one| !one.is_empty());
                each.map(|one| format!("{REFUSED}{one}")).collect()
            }
            other => other.iter().cloned().collect(),
        };
        for round in &self.rounds {
            problems.extend(round.surprises.iter().cloned());
            let unexpected = |claim: &&ClaimReport| match &claim.state {
                State::Pending { expected, .. } => !expected,
                State::Failed { .. } => true,
                State::Prepared { .. } => false,
            };
            for alike in alike(round.claims.iter().filter(unexpected)) {
                let claims: Vec<&str> = alike.iter().map(|claim| claim.claim.as_str()).collect();
                let problem = match (alike.first().map(|claim| &claim.state), claims.as_slice()) {
                    (Some(State::Failed { reason }), [claim, ..]) => {
                        format!("claim {claim} failed: {reason}")
                    }
                    (_, [claim]) => format!("claim {claim} stays pending: {}", reason(&alike)),
                    (_, claims) => {
                        format!("claims {} stay pending: {}", named(claims), reason(&alike))
                    }
                };
                if !problems.contains(&problem) {
                    problems.push(problem);
                }
            }
        }
        problems
    }
}

/// Puts claims together that are pending for the same reason: replicas of one workload.
pub(super) fn alike<'c>(
    claims: impl Iterator<Item = &'c ClaimReport>,
) -> Vec<Vec<&'c ClaimReport>> {
    let mut groups: Vec<Vec<&ClaimReport>> = Vec::new();
    for claim in claims {
        let same = |group: &&mut Vec<&ClaimReport>| match (
            group.first().map(|first| &first.state),
            &claim.state,
        ) {
            (
                Some(State::Pending {
                    reason, expected, ..
                }),
                State::Pending {
                    reason: other,
                    expected: too,
                    ..
                },
            ) => (reason, expected) == (other, too),
            _ => false,
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.push(claim),
            None => groups.push(vec![claim]),
        }
    }
    groups
}

/// Returns the reason for which claims of a group are pending.
pub(super) fn reason(alike: &[&ClaimReport]) -> String {
    match alike.first().map(|first| &first.state) {
        Some(State::Pending {
            cause: Some(cause), ..
        }) => cause.full(PLACE, alike.len() > 1, Reader::Demo),
        Some(State::Pending { reason, .. } | State::Failed { reason }) => reason.clone(),
        _ => String::new(),
    }
}

/// A device in the node's slices, as the API server has it. Parts that it lacks are left out.
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
    /// Ability of its GPU to be partitioned.
    #[serde(skip)]
    pub(crate) mig: Option<Mig>,
}

/// A manifest that ran.
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
    /// Notes: doubtful parts, objects that were passed over, and parts of its policies without
    /// effect.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) notes: Vec<String>,
    /// The GpuPolicies that it brings; with none it is the demo's, which asks for everything.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) policies: Vec<String>,
    /// Devices that the node published under them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) published: Vec<PublishedDevice>,
    /// The state after every pod had its turn, and again after some pods had ended.
    pub(crate) rounds: Vec<Round>,
    /// Problem that kept the whole scenario from running.
    pub(crate) problem: Option<String>,
}

/// State at one time.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Round {
    /// The pods that ended before it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) ended: Vec<String>,
    pub(crate) claims: Vec<ClaimReport>,
    /// Pictures of all GPUs.
    pub(crate) gpus: Vec<GpuPicture>,
    /// Deviations from what the manifest expects, but for claims that failed or are pending.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) surprises: Vec<String>,
}

/// A claim and its state.
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

/// State of a claim.
#[derive(Debug, Clone, Serialize)]
#[serde(
    tag = "state",
    rename_all = "lowercase",
    rename_all_fields = "camelCase"
)]
pub(crate) enum State {
    /// Prepared, and given back.
    Prepared {
        devices: Vec<DeviceReport>,
        /// Time of the kubelet's call, in microseconds.
        prepare_us: u64,
    },
    /// Not allocated.
    Pending {
        /// Why, and the way out, in a sentence.
        reason: String,
        /// Reasons device by device, as the scheduler sees them.
        #[serde(skip_serializing_if = "String::is_empty")]
        detail: String,
        #[serde(skip)]
        cause: Option<Cause>,
        /// True where the manifest expects it.
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
    /// ID of the share, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) share: Option<String>,
    /// Amount of each capacity that the share was granted.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) consumed: BTreeMap<String, String>,
    /// Bytes of memory that the percent of the share are, of one that is given out so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_of_percent: Option<u64>,
    /// Bytes that the driver caps the memory of the share to, where it caps any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) memory_limit: Option<u64>,
    /// Admin access, beside the holders.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) admin: bool,
}

/// Devices by name; those that differ only in where a partition begins are one row:
/// `gpu-0-mig-1g10gb-19-{0,1,2}`.
pub(crate) fn rows(devices: &[PublishedDevice]) -> Vec<(String, &PublishedDevice)> {
    let mut rows: BTreeMap<(&str, &str), (Vec<&str>, &PublishedDevice)> = BTreeMap::new();
    for device in devices {
        // Shares of partitions have a suffix behind the start.
        let shares = Sharing::TimeSliced.suffix();
        let bare = device.name.strip_suffix(shares);
        let (bare, suffix) = bare.map_or((device.name.as_str(), ""), |bare| (bare, shares));
        let partition = bare
            .rsplit_once('-')
            .filter(|(stem, _)| stem.contains("-mig-"));
        let (stem, start) = partition.unzip();
        let key = stem.map_or((device.name.as_str(), ""), |stem| (stem, suffix));
        let (starts, _) = rows.entry(key).or_insert((Vec::new(), device));
        starts.extend(start);
    }
    let name = |(stem, suffix): (&str, &str), starts: &[&str]| match starts {
        [] => stem.to_owned(),
        [one] => format!("{stem}-{one}{suffix}"),
        several => format!("{stem}-{{{}}}{suffix}", several.join(",")),
    };
    let rows = rows
        .into_iter()
        .map(|(key, (starts, device))| (name(key, &starts), device));
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by(|(a, _), (b, _)| a.cmp(b));
    rows
}

/// The devices of the slices in the API, in the order in which the scheduler tries them.
pub(crate) fn published(slices: &[ResourceSlice]) -> Vec<PublishedDevice> {
    let mut slices: Vec<&ResourceSlice> = slices.iter().collect();
    slices.sort_by_key(|slice| slice.metadata.name.clone());
    slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .map(of_device)
        .collect()
}

fn of_device(device: &Device) -> PublishedDevice {
    let numa_node = device
        .attributes
        .as_ref()
        .and_then(|all| all.get(attributes::NUMA_NODE)?.int);
    let product = text(device, attributes::PRODUCT_NAME);
    PublishedDevice {
        name: device.name.clone(),
        mig: product.map(|product| mig(device, product)),
        product: product.map(str::to_owned),
        memory_bytes: memory(device),
        numa_node,
        uuid: text(device, attributes::UUID).map(str::to_owned),
        taints: device
            .taints
            .iter()
            .flatten()
            .map(|taint| taint.key.clone())
            .collect(),
    }
}
