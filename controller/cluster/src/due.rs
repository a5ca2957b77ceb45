//! Pods that are to be evicted, as the conditions of claims say. Node plugins write these
//! conditions (`ReclaimDue`) where a GpuPolicy calls for it, and confirm them every few minutes.

use std::time::Duration;

use divvy_api::names::{annotations, conditions, reclaim};
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, DeviceRequestAllocationResult, ResourceClaim,
    ResourceClaimConsumerReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta};
use serde::{Deserialize, Serialize};

/// A condition that was not confirmed for so long does not count: its node may be down and cannot
/// take it back. The same goes for one that is that far in the future.
const FRESH: Duration = Duration::from_mins(10);

/// Reason to evict the pods of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reason {
    /// A share uses so much more memory than it was granted that others cannot get theirs.
    OverGrant,
    /// Nothing has used the devices of the claim for a long time.
    Idle,
}

impl Reason {
    pub(crate) const ALL: [Self; 2] = [Self::OverGrant, Self::Idle];

    /// Returns its name in metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::OverGrant => "overuse",
            Self::Idle => "idle",
        }
    }

    fn of(condition: &Condition) -> Option<Self> {
        match condition.reason.as_str() {
            reclaim::OVER_GRANT => Some(Self::OverGrant),
            reclaim::IDLE => Some(Self::Idle),
            _ => None,
        }
    }
}

/// A device, as allocations name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct DeviceId {
    pub(crate) pool: String,
    pub(crate) device: String,
}

/// A pod that is to be evicted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Candidate {
    pub(crate) reason: Reason,
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) uid: String,
    pub(crate) claim: String,
    pub(crate) devices: Vec<DeviceId>,
}

/// Returns the pods that are to be evicted: those that harm others first, in a fixed order. A claim
/// that is over its grant has only the pod that came last in it: when it is gone, the next reading
/// shows whether that was enough. Idle claims that opt out are left out.
pub(crate) fn candidates<'a>(
    claims: impl IntoIterator<Item = &'a ResourceClaim>,
    driver: &str,
    now: Timestamp,
) -> Vec<Candidate> {
    let mut found = Vec::new();
    for claim in claims {
        let Some(reason) = due(claim, driver, now) else {
            continue;
        };
        if reason == Reason::Idle && opts_out(&claim.metadata) {
            continue;
        }
        let (Some(namespace), Some(name)) = (&claim.metadata.namespace, &claim.metadata.name)
        else {
            continue;
        };
        let pods = pods(claim);
        let first = if reason == Reason::OverGrant {
            pods.len().saturating_sub(1)
        } else {
            0
        };
        found.extend(pods.into_iter().skip(first).map(|pod| Candidate {
            reason,
            namespace: namespace.clone(),
            pod: pod.name.clone(),
            uid: pod.uid.clone(),
            claim: name.clone(),
            devices: own(claim, driver).map(id).collect(),
        }));
    }
    found.sort();
    found
}

/// Returns why the pods of a claim are to be evicted, if they are: a device of the claim is used
/// too much, or every one is idle.
pub(crate) fn due(claim: &ResourceClaim, driver: &str, now: Timestamp) -> Option<Reason> {
    due_since(claim, driver, now).map(|(reason, _)| reason)
}

/// Returns why the pods of a claim are to be evicted, and when that was last confirmed, by the
/// node's clock. Only conditions that call for the eviction count for the time: for an idle claim
/// the oldest of them, because the pod must have been there when each device was found idle; for a
/// claim over its grant the newest, because one device is enough.
pub(crate) fn due_since(
    claim: &ResourceClaim,
    driver: &str,
    now: Timestamp,
) -> Option<(Reason, Timestamp)> {
    let said = own(claim, driver).map(|result| {
        let condition = condition_of(claim, result)?;
        let at = condition.last_transition_time.0;
        let counts = condition.status == "True" && now.duration_since(at).unsigned_abs() <= FRESH;
        Some((Reason::of(condition).filter(|_| counts)?, at))
    });
    let said: Vec<Option<(Reason, Timestamp)>> = said.collect();
    let of = |reason: Reason| {
        let same = said.iter().flatten().filter(move |(it, _)| *it == reason);
        same.map(|(_, at)| *at)
    };
    if let Some(newest) = of(Reason::OverGrant).max() {
        return Some((Reason::OverGrant, newest));
    }
    let oldest = of(Reason::Idle).min()?;
    (of(Reason::Idle).count() == said.len()).then_some((Reason::Idle, oldest))
}

/// Returns whether the claim is reserved for the pod.
pub(crate) fn is_for(claim: &ResourceClaim, uid: &str) -> bool {
    pods(claim).iter().any(|pod| pod.uid == uid)
}

/// Returns whether the claim has devices of the driver that are its own: admin access is not.
pub(crate) fn holds(claim: &ResourceClaim, driver: &str) -> bool {
    own(claim, driver).next().is_some()
}

/// Returns whether an object says that idle claims are to be kept.
pub(crate) fn opts_out(metadata: &ObjectMeta) -> bool {
    let annotations = metadata.annotations.as_ref();
    annotations
        .and_then(|all| all.get(annotations::KEEP_IDLE))
        .is_some_and(|value| value == "true")
}

fn own<'a>(
    claim: &'a ResourceClaim,
    driver: &str,
) -> impl Iterator<Item = &'a DeviceRequestAllocationResult> {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results
        .into_iter()
        .flatten()
        .filter(move |result| result.driver == driver && result.admin_access != Some(true))
}

fn condition_of<'a>(
    claim: &'a ResourceClaim,
    result: &DeviceRequestAllocationResult,
) -> Option<&'a Condition> {
    let is_it = |entry: &&AllocatedDeviceStatus| {
        (&entry.driver, &entry.pool, &entry.device, &entry.share_id)
            == (
                &result.driver,
                &result.pool,
                &result.device,
                &result.share_id,
            )
    };
    let entry = claim
        .status
        .as_ref()?
        .devices
        .as_ref()?
        .iter()
        .find(is_it)?;
    entry
        .conditions
        .as_ref()?
        .iter()
        .find(|condition| condition.type_ == conditions::RECLAIM_DUE)
}

fn id(result: &DeviceRequestAllocationResult) -> DeviceId {
    DeviceId {
        pool: result.pool.clone(),
        device: result.device.clone(),
    }
}

/// Returns the pods for which the claim is reserved, in the order in which they came.
fn pods(claim: &ResourceClaim) -> Vec<&ResourceClaimConsumerReference> {
    let consumers = claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref());
    let is_pod = |consumer: &&ResourceClaimConsumerReference| {
        consumer.resource == "pods" && consumer.api_group.as_deref().unwrap_or_default().is_empty()
    };
    consumers.into_iter().flatten().filter(is_pod).collect()
}
