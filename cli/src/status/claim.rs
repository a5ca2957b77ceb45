//! A claim: its state, devices and users, and why it waits.

use anyhow::{Result, bail};
use divvy_api::names::conditions;
use divvy_api::node::GpuStatus;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde::Serialize;

use super::read::FAILED_PREPARE;
use super::report::{NodeTrouble, missing, troubles};
use super::snapshot::{Snapshot, full_name, name, namespace, time};
use super::waiting::{Asker, claims_of, open_claims};
use divvy_why::Why;

/// A claim in one line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimLine {
    /// `namespace/name`.
    pub(crate) claim: String,
    /// Pods that it is reserved for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) pods: Vec<String>,
    /// In CamelCase.
    pub(crate) reason: String,
    /// Fault and remedy.
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

/// A claim in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClaimReport {
    /// Need for action by an administrator or user.
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
    /// Reports of its node about the use of its devices.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) reported_use: Vec<ClaimLine>,
    /// Problems of the GPUs that it has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) troubles: Vec<NodeTrouble>,
    /// Why it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) waiting: Option<Why>,
    /// The scheduler's message about the waiting pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scheduler: Option<String>,
    /// Report of the kubelet about an allocated claim that is not prepared: it may refuse the claim
    /// itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kubelet: Option<String>,
    /// Kinds that could not be read.
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
    /// Amounts that a share was granted, `cores 25, memory 20Gi` or `percent 50, memory 40 GiB`.
    pub(crate) granted: String,
    /// The node's progress: `preparing`, `prepared`, `leaving`; empty before it begins.
    pub(crate) phase: String,
    /// Why the device is still in use, while it is leaving.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) reason: String,
    /// The claim that has to leave the GPU before this one is prepared.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) after: String,
}

impl State {
    /// Returns the state as a word of a table.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Unused => "unused",
            Self::Waiting => "waiting",
            Self::Allocated => "allocated",
            Self::Preparing => "preparing",
            Self::Prepared => "ready",
            Self::Refused => "refused",
            Self::Leaving => "leaving",
        }
    }
}

/// Returns the refusal of the claim's node, if it refuses it.
pub(crate) fn refused(claim: &ResourceClaim, driver: &str) -> Option<ClaimLine> {
    condition(claim, driver, conditions::PREPARED)
        .filter(|condition| condition.status == "False")
        .map(|condition| claim_line(claim, condition))
}

/// Returns the reports of its node about the use of a claim's devices: first that its pods are to
/// be evicted.
pub(crate) fn reported_use(claim: &ResourceClaim, driver: &str) -> Vec<ClaimLine> {
    let bad = [
        (conditions::RECLAIM_DUE, "True"),
        (conditions::WITHIN_GRANT, "False"),
        (conditions::IDLE, "True"),
    ];
    let found = bad.into_iter().filter_map(|(kind, status)| {
        let condition =
            all_conditions(claim, driver).find(|c| c.type_ == kind && c.status == status)?;
        let line = claim_line(claim, condition);
        // Its reasons are those of the others.
        Some(if kind == conditions::RECLAIM_DUE {
            ClaimLine {
                reason: kind.to_owned(),
                ..line
            }
        } else {
            line
        })
    });
    found.collect()
}

fn condition<'a>(claim: &'a ResourceClaim, driver: &str, kind: &str) -> Option<&'a Condition> {
    all_conditions(claim, driver).find(|condition| condition.type_ == kind)
}

fn all_conditions<'a>(
    claim: &'a ResourceClaim,
    driver: &str,
) -> impl Iterator<Item = &'a Condition> {
    let devices = claim
        .status
        .iter()
        .flat_map(|status| status.devices.iter().flatten());
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
    let users = claim
        .status
        .iter()
        .flat_map(|status| status.reserved_for.iter().flatten());
    users
        .filter(|user| user.resource == "pods")
        .map(|user| user.name.clone())
        .collect()
}

/// The pods that use it. The status of a claim of a PodGroup names none of its pods; its node does.
fn users(snapshot: &Snapshot, claim: &ResourceClaim, uid: &str) -> Vec<String> {
    let mut pods = reserved(claim);
    if pods.is_empty() {
        let gpus = snapshot.reports.values().flat_map(|node| &node.gpus);
        let own = gpus
            .flat_map(|gpu| &gpu.holders)
            .filter(|holder| holder.uid == uid);
        pods.extend(own.flat_map(|holder| &holder.pods).cloned());
        pods.sort();
        pods.dedup();
    }
    pods
}

/// Reports on a claim by its name.
pub(crate) fn claim(snapshot: &Snapshot, in_namespace: &str, wanted: &str) -> Result<ClaimReport> {
    let is =
        |c: &&ResourceClaim| name(&c.metadata) == wanted && namespace(&c.metadata) == in_namespace;
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
        bail!(
            "claim {in_namespace}/{wanted} does not exist{hint}{}",
            missing(snapshot)
        );
    };
    let wants = |pod: &&Pod| {
        namespace(&pod.metadata) == in_namespace
            && claims_of(pod).iter().any(|claim| claim == wanted)
    };
    Ok(of(snapshot, claim, snapshot.pods.iter().find(wants)))
}

/// Reports on a claim, for the pod that waits for it.
pub(super) fn of(snapshot: &Snapshot, claim: &ResourceClaim, pod: Option<&Pod>) -> ClaimReport {
    let in_namespace = namespace(&claim.metadata);
    let uid = claim.metadata.uid.clone().unwrap_or_default();
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|a| a.devices.as_ref()?.results.as_ref());
    let devices: Vec<DeviceLine> = results
        .into_iter()
        .flatten()
        .map(|result| device(snapshot, claim, result))
        .collect();
    let waiting = (allocation.is_none() && pod.is_some()).then(|| {
        let together = pod
            .map(|pod| open_claims(pod, snapshot))
            .unwrap_or_default();
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
    let troubles: Vec<NodeTrouble> = nodes
        .into_iter()
        .flat_map(|node| troubles(snapshot, node))
        .filter(of_its_gpus)
        .collect();
    let mut pods = users(snapshot, claim, &uid);
    pods.extend(
        pod.map(|pod| name(&pod.metadata).to_owned())
            .filter(|pod| !pods.contains(pod)),
    );
    let made = claim.metadata.creation_timestamp.as_ref().map(time);
    let hopeless = waiting
        .as_ref()
        .is_some_and(|why| why.verdict.is_hopeless());
    let kubelet = (state == State::Allocated)
        .then(|| kubelet_failure(snapshot, in_namespace, &pods))
        .flatten();
    ClaimReport {
        needs_person: refused
            || hopeless
            || kubelet.is_some()
            || troubles.iter().any(|entry| !entry.trouble.notice),
        claim: full_name(&claim.metadata),
        uid,
        state,
        since: allocation
            .and_then(|a| a.allocation_timestamp.as_ref())
            .map(time)
            .or(made),
        pods,
        devices,
        condition: condition.map(|condition| claim_line(claim, condition)),
        reported_use: reported_use(claim, &snapshot.driver),
        troubles,
        waiting,
        scheduler,
        kubelet,
        unread: snapshot.unread.clone(),
    }
}

/// The scheduler's message about a pod that it cannot place.
pub(super) fn unscheduled(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions
        .iter()
        .find(|c| c.type_ == "PodScheduled" && c.status == "False")?;
    scheduled.message.clone()
}

/// The kubelet's latest Event on these pods.
fn kubelet_failure(snapshot: &Snapshot, namespace: &str, pods: &[String]) -> Option<String> {
    let is_theirs = |event: &&Event| {
        let of = &event.involved_object;
        event.reason.as_deref() == Some(FAILED_PREPARE)
            && of.namespace.as_deref() == Some(namespace)
            && of.name.as_ref().is_some_and(|name| pods.contains(name))
    };
    let theirs = snapshot.events.iter().filter(is_theirs);
    theirs
        .max_by_key(|event| event.last_timestamp.as_ref().map(|t| t.0))
        .and_then(|event| event.message.clone())
}

/// Returns what is not counted of a share's memory, as its device is published now: the memory that
/// its percent are, and the limit that the driver keeps.
fn memory_of_share(
    snapshot: &Snapshot,
    claim: &ResourceClaim,
    result: &DeviceRequestAllocationResult,
) -> Vec<String> {
    let Some(consumed) = &result.consumed_capacity else {
        return Vec::new();
    };
    let pool = snapshot
        .slices
        .iter()
        .filter(|slice| slice.spec.driver == result.driver && slice.spec.pool.name == result.pool);
    let device = pool
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == result.device);
    let percent = divvy_why::device::percent(consumed);
    let memory = percent.and_then(|_| divvy_why::device::share_memory(device, consumed));
    let allocation = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
    let limit = allocation.and_then(|of| crate::limit::of_share(of, result, device));
    let words = [("memory", memory), ("memory limit", limit)];
    let words = words
        .into_iter()
        .filter_map(|(name, amount)| Some((name, amount?)));
    words
        .map(|(name, amount)| format!("{name} {}", crate::format::bytes(amount)))
        .collect()
}

/// Says for whose end on the GPU a claim that is not prepared waits, if its node reports such a
/// claim: one that is leaving the same device, or that has the GPU in another form.
fn former(gpu: &GpuStatus, claim: &str, of: &DeviceRequestAllocationResult) -> Option<String> {
    let form = |device: &str| divvy_why::device::kind(device).map(|kind| kind.form());
    let own = form(&of.device)?;
    let holder = gpu.holders.iter().find(|holder| {
        let is_admin = holder.device.ends_with(" (admin)");
        let same = holder.device == of.device && of.share_id.is_none();
        holder.uid != claim && !is_admin && (same || form(&holder.device) != Some(own))
    })?;
    let pods = match holder.pods.as_slice() {
        [] => String::new(),
        pods => format!(" (pod {})", pods.join(", ")),
    };
    let reason = match holder.reason.as_str() {
        "" => String::new(),
        reason => format!(": {reason}"),
    };
    Some(format!(
        "waits until claim {}/{}{pods} has left {}; it is {}{reason}",
        holder.namespace, holder.name, gpu.name, holder.phase
    ))
}

fn device(
    snapshot: &Snapshot,
    of: &ResourceClaim,
    result: &DeviceRequestAllocationResult,
) -> DeviceLine {
    let claim = of.metadata.uid.as_deref().unwrap_or_default();
    let ours = result.driver == snapshot.driver;
    let node = snapshot.node_of(&result.pool).filter(|_| ours);
    let kind = divvy_why::device::kind(&result.device);
    let gpu: Option<&GpuStatus> = node.and_then(|node| {
        let name = format!("gpu-{}", kind?.ordinal());
        snapshot
            .reports
            .get(node)?
            .gpus
            .iter()
            .find(|gpu| gpu.name == name)
    });
    let held = gpu.and_then(|gpu| {
        // Admin access is marked behind the device's name.
        let is = |device: &str| device.split(' ').next() == Some(result.device.as_str());
        gpu.holders
            .iter()
            .find(|holder| holder.uid == claim && is(&holder.device))
    });
    let consumed = result.consumed_capacity.iter().flatten();
    let mut granted: Vec<String> = consumed
        .map(|(name, amount)| format!("{} {}", divvy_why::driver::plain(name), amount.0))
        .collect();
    granted.extend(memory_of_share(snapshot, of, result));
    let allocation = of.status.as_ref().and_then(|s| s.allocation.as_ref());
    let server = allocation.and_then(|all| crate::limit::of_mps_server(all, result));
    granted.extend(server.map(crate::limit::mps_in_words));
    let ready = held.is_some_and(|held| held.phase != "preparing");
    let before = gpu.filter(|_| !ready && result.admin_access != Some(true));
    let before = before.and_then(|gpu| former(gpu, claim, result));
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
        after: before.unwrap_or_default(),
    }
}
