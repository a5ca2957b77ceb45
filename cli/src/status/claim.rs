//! One claim: its state, devices and users, and why it waits.

use anyhow::{Result, bail};
use divvy_api::names::conditions;
use divvy_api::node::GpuStatus;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde::Serialize;

use super::report::{NodeTrouble, missing, troubles};
use super::snapshot::{Snapshot, full_name, name, namespace, time};
use super::waiting::{Asker, Why, claims_of, open_claims};

/// A claim in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimLine {
    /// `namespace/name`.
    pub(crate) claim: String,
    /// Pods that it is reserved for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) pods: Vec<String>,
    /// In CamelCase.
    pub(crate) reason: String,
    /// What is wrong and what to do.
    pub(crate) message: String,
    pub(crate) since: String,
}

/// The state of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// No pod needs it, so nothing is allocated.
    Unused,
    /// A pod waits for it.
    Waiting,
    /// It has devices, but no pod was prepared with them yet.
    Allocated,
    /// Its devices are being made ready.
    Preparing,
    /// Its devices are ready for its pods.
    Prepared,
    /// Its node refuses to prepare it.
    Refused,
    /// It was released, but its devices are still in use.
    Leaving,
}

/// One claim in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimReport {
    /// Whether an administrator or user has to act.
    pub(crate) needs_person: bool,
    /// `namespace/name`.
    pub(crate) claim: String,
    pub(crate) uid: String,
    pub(crate) state: State,
    /// When it was allocated, or made where it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    /// Pods that use it or wait for it.
    pub(crate) pods: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) devices: Vec<DeviceLine>,
    /// The condition that its node has set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) condition: Option<ClaimLine>,
    /// What its node reports of the use of its devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) reported_use: Vec<ClaimLine>,
    /// What is wrong with the GPUs that it has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) troubles: Vec<NodeTrouble>,
    /// Why it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) waiting: Option<Why>,
    /// The scheduler's message about the waiting pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scheduler: Option<String>,
    /// What the kubelet reports of an allocated claim that is not prepared: it may refuse the claim itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kubelet: Option<String>,
    /// What could not be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) unread: Vec<String>,
}

/// A device that a claim has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct DeviceLine {
    pub(crate) request: String,
    pub(crate) driver: String,
    pub(crate) device: String,
    /// The node; the pool where that is not known.
    pub(crate) node: String,
    /// The GPU's name, UUID and mode, where it is ours.
    pub(crate) gpu: String,
    pub(crate) uuid: String,
    pub(crate) mode: String,
    /// What a share was granted, `cores 25, memory 20Gi`.
    pub(crate) granted: String,
    /// The node's progress: `preparing`, `prepared`, `leaving`; empty before it begins.
    pub(crate) phase: String,
    /// Why the device is still in use, while it is leaving.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
}

/// The refusal of the claim's node, if it refuses it.
pub(crate) fn refused(claim: &ResourceClaim, driver: &str) -> Option<ClaimLine> {
    condition(claim, driver, conditions::PREPARED)
        .filter(|condition| condition.status == "False")
        .map(|condition| claim_line(claim, condition))
}

/// What its node reports of the use of a claim's devices: first that its pods are to be evicted.
pub(crate) fn reported_use(claim: &ResourceClaim, driver: &str) -> Vec<ClaimLine> {
    let bad =
        [(conditions::RECLAIM_DUE, "True"), (conditions::WITHIN_GRANT, "False"), (conditions::IDLE, "True")];
    let found = bad.into_iter().filter_map(|(kind, status)| {
        let condition = all_conditions(claim, driver).find(|c| c.type_ == kind && c.status == status)?;
        let line = claim_line(claim, condition);
        // Its reasons are those of the others.
        Some(if kind == conditions::RECLAIM_DUE {
            ClaimLine { reason: kind.to_owned(), ..line }
        } else {
            line
        })
    });
    found.collect()
}

fn condition<'a>(claim: &'a ResourceClaim, driver: &str, kind: &str) -> Option<&'a Condition> {
    all_conditions(claim, driver).find(|condition| condition.type_ == kind)
}

fn all_conditions<'a>(claim: &'a ResourceClaim, driver: &str) -> impl Iterator<Item = &'a Condition> {
    let devices = claim.status.iter().flat_map(|status| status.devices.iter().flatten());
    devices
        .filter(move |device| device.driver == driver)
        .filter_map(|device| device.conditions.as_ref())
        .flatten()
}

fn claim_line(claim: &ResourceClaim, condition: &Condition) -> ClaimLine {
    ClaimLine {
        claim: full_name(&claim.metadata),
        pods: reserved(claim),
        reason: condition.reason.clone(),
        message: condition.message.clone(),
        since: time(&condition.last_transition_time),
    }
}

/// The pods that it is reserved for.
pub(crate) fn reserved(claim: &ResourceClaim) -> Vec<String> {
    let users = claim.status.iter().flat_map(|status| status.reserved_for.iter().flatten());
    users.filter(|user| user.resource == "pods").map(|user| user.name.clone()).collect()
}

/// The pods that use it. The status of a claim of a PodGroup names none of its pods; its node does.
fn users(snapshot: &Snapshot, claim: &ResourceClaim, uid: &str) -> Vec<String> {
    let mut pods = reserved(claim);
    if pods.is_empty() {
        let gpus = snapshot.reports.values().flat_map(|node| &node.gpus);
        let own = gpus.flat_map(|gpu| &gpu.holders).filter(|holder| holder.uid == uid);
        pods.extend(own.flat_map(|holder| &holder.pods).cloned());
        pods.sort();
        pods.dedup();
    }
    pods
}

pub(crate) fn claim(snapshot: &Snapshot, in_namespace: &str, wanted: &str) -> Result<ClaimReport> {
    let is = |c: &&ResourceClaim| name(&c.metadata) == wanted && namespace(&c.metadata) == in_namespace;
    let Some(claim) = snapshot.claims.iter().find(is) else {
        let elsewhere: Vec<String> = snapshot
            .claims
            .iter()
            .filter(|claim| name(&claim.metadata) == wanted)
            .map(|claim| full_name(&claim.metadata))
            .take(5)
            .collect();
        let hint = match elsewhere.as_slice() {
            [] => String::new(),
            found => format!("; did you mean {}?", found.join(", ")),
        };
        bail!("claim {in_namespace}/{wanted} does not exist{hint}{}", missing(snapshot));
    };
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|a| a.devices.as_ref()?.results.as_ref());
    let devices: Vec<DeviceLine> =
        results.into_iter().flatten().map(|result| device(snapshot, &uid, result)).collect();
    let wants = |pod: &&Pod| {
        namespace(&pod.metadata) == in_namespace && claims_of(pod).iter().any(|claim| claim == wanted)
    };
    let pod = snapshot.pods.iter().find(wants);
    let waiting = (allocation.is_none() && pod.is_some()).then(|| {
        let together = pod.map(|pod| open_claims(pod, snapshot)).unwrap_or_default();
        Asker::new(snapshot).ask(&together, pod)
    });
    let scheduler = pod.filter(|_| allocation.is_none()).and_then(unscheduled);
    let condition = condition(claim, &snapshot.driver, conditions::PREPARED);
    let refused = condition.is_some_and(|condition| condition.status == "False");
    let phases: Vec<&str> = devices.iter().map(|device| device.phase.as_str()).collect();
    let state = match allocation {
        None if pod.is_some() => State::Waiting,
        None => State::Unused,
        Some(_) if phases.contains(&"leaving") => State::Leaving,
        Some(_) if refused => State::Refused,
        Some(_) if phases.contains(&"preparing") => State::Preparing,
        Some(_) if phases.contains(&"prepared") => State::Prepared,
        Some(_) => State::Allocated,
    };
    let of_its_gpus = |entry: &NodeTrouble| {
        let is_its = |d: &DeviceLine| {
            d.node == entry.node && (entry.trouble.gpu.is_empty() || entry.trouble.gpu == d.gpu)
        };
        devices.iter().any(is_its)
    };
    let mut nodes: Vec<&str> = devices.iter().map(|device| device.node.as_str()).collect();
    nodes.dedup();
    let troubles: Vec<NodeTrouble> =
        nodes.into_iter().flat_map(|node| troubles(snapshot, node)).filter(of_its_gpus).collect();
    let mut pods = users(snapshot, claim, &uid);
    pods.extend(pod.map(|pod| name(&pod.metadata).to_owned()).filter(|pod| !pods.contains(pod)));
    let made = claim.metadata.creation_timestamp.as_ref().map(time);
    let hopeless = waiting.as_ref().is_some_and(|why| why.verdict.is_hopeless());
    let kubelet =
        (state == State::Allocated).then(|| kubelet_failure(snapshot, in_namespace, &pods)).flatten();
    Ok(ClaimReport {
        needs_person: refused
            || hopeless
            || kubelet.is_some()
            || troubles.iter().any(|entry| !entry.trouble.notice),
        claim: full_name(&claim.metadata),
        uid,
        state,
        since: allocation.and_then(|a| a.allocation_timestamp.as_ref()).map(time).or(made),
        pods,
        devices,
        condition: condition.map(|condition| claim_line(claim, condition)),
        reported_use: reported_use(claim, &snapshot.driver),
        troubles,
        waiting,
        scheduler,
        kubelet,
        unread: snapshot.unread.clone(),
    })
}

/// The scheduler's message about a pod that it cannot place.
fn unscheduled(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "False")?;
    scheduled.message.clone()
}

/// The kubelet's latest Event on these pods.
fn kubelet_failure(snapshot: &Snapshot, namespace: &str, pods: &[String]) -> Option<String> {
    let is_theirs = |event: &&Event| {
        let of = &event.involved_object;
        of.namespace.as_deref() == Some(namespace) && of.name.as_ref().is_some_and(|name| pods.contains(name))
    };
    let theirs = snapshot.events.iter().filter(is_theirs);
    theirs
        .max_by_key(|event| event.last_timestamp.as_ref().map(|t| t.0))
        .and_then(|event| event.message.clone())
}

fn device(snapshot: &Snapshot, claim: &str, result: &DeviceRequestAllocationResult) -> DeviceLine {
    let ours = result.driver == snapshot.driver;
    let node = snapshot.node_of(&result.pool).filter(|_| ours);
    let kind = crate::device::kind(&result.device);
    let gpu: Option<&GpuStatus> = node.and_then(|node| {
        let name = format!("gpu-{}", kind?.ordinal());
        snapshot.reports.get(node)?.gpus.iter().find(|gpu| gpu.name == name)
    });
    let held = gpu.and_then(|gpu| {
        // Admin access is marked behind the device's name.
        let is = |device: &str| device.split(' ').next() == Some(result.device.as_str());
        gpu.holders.iter().find(|holder| holder.uid == claim && is(&holder.device))
    });
    let consumed = result.consumed_capacity.iter().flatten();
    let granted: Vec<String> = consumed.map(|(name, amount)| format!("{name} {}", amount.0)).collect();
    DeviceLine {
        request: result.request.clone(),
        driver: result.driver.clone(),
        device: result.device.clone(),
        node: node.unwrap_or(&result.pool).to_owned(),
        gpu: gpu.map(|gpu| gpu.name.clone()).unwrap_or_default(),
        uuid: gpu.map(|gpu| gpu.uuid.clone()).unwrap_or_default(),
        mode: gpu.map(|gpu| gpu.mode.clone()).unwrap_or_default(),
        granted: granted.join(", "),
        phase: held.map(|held| held.phase.clone()).unwrap_or_default(),
        reason: held.map(|held| held.reason.clone()).unwrap_or_default(),
    }
}
