//! A pod: its claims on the way to running containers, and what keeps it from the next step.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use divvy_offer::pool_name;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use serde::Serialize;

use super::claim::{self, ClaimReport, State, unscheduled};
use super::hook;
use super::read::{CLAIMS, CLASSES, FAILED_PREPARE};
use super::report::missing;
use super::snapshot::{Snapshot, full_name, name, namespace, time};
use super::waiting::{Asker, claims_of, node_of, open_claims};
use crate::extended;
use divvy_why::Why;

/// Warnings that are shown, the latest of each reason.
const WARNINGS: usize = 5;
/// Pods that are named where several begin as asked.
const NAMED: usize = 5;

/// The step that a pod is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Step {
    /// Its scheduling gates keep it from the scheduler.
    Gated,
    /// It has no node, or claims without devices.
    Waiting,
    /// It has a node, which prepares its claims.
    Preparing,
    /// Its devices are ready; the containers are not.
    Starting,
    /// Containers run.
    Running,
    /// It is to be deleted.
    Ending,
    /// All containers have ended.
    Ended,
}

/// A pod in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodReport {
    /// Need for action by an administrator or user.
    pub(crate) needs_person: bool,
    /// `namespace/name`.
    pub(crate) pod: String,
    pub(crate) step: Step,
    /// The node that it is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node: Option<String>,
    /// The time since which it exists or, once it is on a node, since when it is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    /// Claims that exist, without the reason for waiting.
    pub(crate) claims: Vec<ClaimReport>,
    /// Claims and classes that do not exist, each in a sentence.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) missing: Vec<String>,
    /// The reason why its claims have no devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) waiting: Option<Why>,
    /// The scheduler's message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) scheduler: Option<String>,
    /// Containers that do not run, with the kubelet's reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) containers: Vec<String>,
    /// Warnings of controllers and the kubelet, `reason: message`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) warnings: Vec<String>,
    /// Advice for the step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
    /// Kinds that could not be read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) unread: Vec<String>,
}

/// Reports on the pod that [`Snapshot::named`] has.
pub(crate) fn pod(snapshot: &Snapshot, in_namespace: &str, wanted: &str) -> Result<PodReport> {
    match snapshot.named.as_slice() {
        [pod] => Ok(of(snapshot, pod)),
        [] => {
            let is_claim = |claim: &&ResourceClaim| {
                name(&claim.metadata) == wanted && namespace(&claim.metadata) == in_namespace
            };
            let hint = match snapshot.claims.iter().find(is_claim) {
                Some(_) => format!("; it is a claim: `divvy status claim {in_namespace}/{wanted}`"),
                None => String::new(),
            };
            bail!(
                "pod {in_namespace}/{wanted} does not exist, nor one whose name begins so{hint}{}",
                missing(snapshot)
            )
        }
        several => {
            let named: Vec<&str> = several
                .iter()
                .take(NAMED)
                .map(|pod| name(&pod.metadata))
                .collect();
            let more = match several.len().saturating_sub(NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            bail!(
                "{in_namespace}/{wanted} matches several pods: {}{more}",
                named.join(", ")
            )
        }
    }
}

fn of(snapshot: &Snapshot, pod: &Pod) -> PodReport {
    let names: BTreeSet<String> = claims_of(pod).into_iter().collect();
    let inside = namespace(&pod.metadata);
    let is_its = |claim: &&ResourceClaim| {
        namespace(&claim.metadata) == inside && names.contains(name(&claim.metadata))
    };
    let mut claims: Vec<ClaimReport> = snapshot
        .claims
        .iter()
        .filter(is_its)
        .map(|claim| claim::of(snapshot, claim, Some(pod)))
        .collect();
    let missing = absent(snapshot, pod);
    let is_ours = |claim: &ClaimReport| {
        let mut drivers = claim.devices.iter().map(|device| &device.driver);
        drivers.any(|driver| *driver == snapshot.driver)
    };
    let step = step(pod, &claims, &missing, is_ours);
    let waiting = claims.iter_mut().find_map(|claim| claim.waiting.take());
    // A claim for extended resources is made only when it can be allocated.
    let waiting = match step {
        Step::Waiting if missing.is_empty() => asked_for(snapshot, pod).or(waiting),
        _ => None,
    };
    let warnings = warnings(snapshot, pod, step);
    let status = pod.status.clone().unwrap_or_default();
    let containers = not_running(pod);
    let other_name = other_name(snapshot, pod, &claims);
    let is_left =
        other_name.is_some() && matches!(step, Step::Preparing | Step::Starting | Step::Ending);
    let hint = other_name.or_else(|| hint(step, pod, &claims));
    let rejected = status
        .reason
        .as_deref()
        .is_some_and(|reason| reason == "UnexpectedAdmissionError" || reason.starts_with("OutOf"));
    let stuck = match step {
        Step::Waiting => !missing.is_empty(),
        Step::Starting => warnings.iter().any(|warning| warning.starts_with("Failed")),
        Step::Ended => rejected,
        _ => false,
    };
    let hopeless = waiting
        .as_ref()
        .is_some_and(|why| why.verdict.is_hopeless());
    let made = pod.metadata.creation_timestamp.as_ref();
    PodReport {
        needs_person: is_left || stuck || hopeless || claims.iter().any(|claim| claim.needs_person),
        pod: full_name(&pod.metadata),
        step,
        node: node_of(pod).map(str::to_owned),
        since: status.start_time.as_ref().or(made).map(time),
        claims,
        missing,
        waiting,
        scheduler: unscheduled(pod).filter(|_| matches!(step, Step::Waiting | Step::Gated)),
        containers,
        warnings,
        hint,
        unread: snapshot.unread.clone(),
    }
}

/// Finds the step of a pod, from its phase and from its claims. Only of ours does a node report the
/// progress.
fn step(
    pod: &Pod,
    claims: &[ClaimReport],
    missing: &[String],
    is_ours: impl Fn(&ClaimReport) -> bool,
) -> Step {
    let status = pod.status.as_ref();
    let phase = status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending");
    let gates = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.scheduling_gates.as_ref());
    if matches!(phase, "Succeeded" | "Failed") {
        Step::Ended
    } else if pod.metadata.deletion_timestamp.is_some() {
        Step::Ending
    } else if phase == "Running" {
        Step::Running
    } else if gates.is_some_and(|gates| !gates.is_empty()) {
        Step::Gated
    } else if node_of(pod).is_none()
        || !missing.is_empty()
        || claims
            .iter()
            .any(|claim| matches!(claim.state, State::Waiting | State::Unused))
    {
        Step::Waiting
    } else if claims
        .iter()
        .all(|claim| claim.state == State::Prepared || !is_ours(claim))
    {
        Step::Starting
    } else {
        Step::Preparing
    }
}

/// Names the claims that a pod needs and that are not there, and resources without a class.
fn absent(snapshot: &Snapshot, pod: &Pod) -> Vec<String> {
    if snapshot.lacks(&CLAIMS) {
        return Vec::new();
    }
    let inside = namespace(&pod.metadata);
    let exists = |wanted: &str| {
        snapshot
            .claims
            .iter()
            .any(|claim| name(&claim.metadata) == wanted && namespace(&claim.metadata) == inside)
    };
    let spec = pod.spec.clone().unwrap_or_default();
    let made = pod
        .status
        .as_ref()
        .and_then(|status| status.resource_claim_statuses.as_deref());
    let mut all = Vec::new();
    for entry in spec.resource_claims.iter().flatten() {
        if let Some(named) = &entry.resource_claim_name {
            if !exists(named) {
                all.push(format!("claim {inside}/{named} does not exist: create it"));
            }
            continue;
        }
        let template = entry
            .resource_claim_template_name
            .as_deref()
            .unwrap_or_default();
        let of_entry = made
            .into_iter()
            .flatten()
            .find(|status| status.name == entry.name);
        match of_entry {
            None => all.push(format!(
                "no claim is made yet of ResourceClaimTemplate {inside}/{template} for entry {:?}: does the template exist?",
                entry.name
            )),
            Some(status) => {
                let gone = status.resource_claim_name.as_deref().filter(|name| !exists(name));
                all.extend(gone.map(|name| {
                    format!("claim {inside}/{name} was deleted: delete the pod, so that both are made again")
                }));
            }
        }
    }
    if !snapshot.lacks(&CLASSES) && node_of(pod).is_none() {
        let without = extended::requests(&spec, &snapshot.classes).without_class;
        all.extend(without.into_iter().filter(|resource| resource.ends_with("/gpu") || resource.contains("/mig-")).map(
            |resource| {
                format!(
                    "no DeviceClass stands for {resource}: only a device plugin can offer it (divvy's chart sets \
                     deviceClass.extendedResourceNames)"
                )
            },
        ));
    }
    all
}

/// Asks why the claims of a pod are not allocated, with the claim that the scheduler would make of
/// its extended resources.
fn asked_for(snapshot: &Snapshot, pod: &Pod) -> Option<Why> {
    let made = pod
        .status
        .as_ref()
        .is_some_and(|status| status.extended_resource_claim_status.is_some());
    let spec = pod.spec.clone().unwrap_or_default();
    let requests = if made || snapshot.lacks(&CLASSES) {
        Vec::new()
    } else {
        extended::requests(&spec, &snapshot.classes).requests
    };
    let extended = (!requests.is_empty()).then(|| extended_claim(pod, requests));
    let mut together = open_claims(pod, snapshot);
    together.extend(&extended);
    (!together.is_empty()).then(|| Asker::new(snapshot).ask(&together, Some(pod)))
}

fn extended_claim(pod: &Pod, requests: Vec<DeviceRequest>) -> ResourceClaim {
    let devices = DeviceClaim {
        requests: Some(requests),
        ..DeviceClaim::default()
    };
    let mut claim = ResourceClaim {
        spec: Some(ResourceClaimSpec {
            devices: Some(devices),
        }),
        ..ResourceClaim::default()
    };
    claim.metadata.namespace.clone_from(&pod.metadata.namespace);
    claim.metadata.name = Some(format!("{}-extended-resources", name(&pod.metadata)));
    claim
}

/// Returns the latest warning of each reason about the pod; failures to prepare are with the
/// claims.
fn warnings(snapshot: &Snapshot, pod: &Pod, step: Step) -> Vec<String> {
    if matches!(step, Step::Running | Step::Ended) {
        return Vec::new();
    }
    let uid = pod.metadata.uid.as_deref();
    let mut events: Vec<_> = snapshot
        .events
        .iter()
        .filter(|event| {
            let of = &event.involved_object;
            let same = of.uid.is_none() || uid.is_none() || of.uid.as_deref() == uid;
            // The scheduler's is the pod's condition, too.
            let reason = event.reason.as_deref().unwrap_or_default();
            same && ![FAILED_PREPARE, "FailedScheduling"].contains(&reason)
                && of.name == pod.metadata.name
        })
        .collect();
    events.sort_by_key(|event| std::cmp::Reverse(event.last_timestamp.as_ref().map(|time| time.0)));
    let mut reasons = BTreeSet::new();
    events.retain(|event| reasons.insert(event.reason.clone()));
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let line = |event: &&k8s_openapi::api::core::v1::Event| {
        let (reason, message) = (text(&event.reason), text(&event.message));
        let meaning = hook::reason(&message).map(|meaning| format!(" ({meaning})"));
        format!("{reason}: {message}{}", meaning.unwrap_or_default())
    };
    events.iter().take(WARNINGS).map(line).collect()
}

/// Returns the containers that do not run, with the reason.
pub(super) fn not_running(pod: &Pod) -> Vec<String> {
    let status = pod.status.as_ref();
    let statuses = status.into_iter().flat_map(|status| {
        let init = status.init_container_statuses.iter().flatten();
        init.chain(status.container_statuses.iter().flatten())
    });
    let waits = |of: &ContainerStatus| {
        let waiting = of.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref()?;
        // The beginning of every container.
        if ["ContainerCreating", "PodInitializing"].contains(&reason) {
            return None;
        }
        let message = waiting
            .message
            .as_deref()
            .map(|message| format!(": {message}"));
        Some(format!(
            "{}: {reason}{}",
            of.name,
            message.unwrap_or_default()
        ))
    };
    let ended = status.and_then(|status| {
        let reason = status.reason.as_deref()?;
        Some(format!(
            "pod: {reason}: {}",
            status.message.as_deref().unwrap_or_default()
        ))
    });
    statuses.filter_map(waits).chain(ended).collect()
}

/// Returns advice for a pod whose node serves another name of divvy's driver than its claims have:
/// no plugin prepares or releases these.
fn other_name(snapshot: &Snapshot, pod: &Pod, claims: &[ClaimReport]) -> Option<String> {
    let node = node_of(pod)?;
    let now = &snapshot.reports.get(node)?.driver_name;
    let pool = pool_name(node);
    let names = |claim: &&ResourceClaim| {
        claims
            .iter()
            .any(|one| one.claim == full_name(&claim.metadata))
    };
    let allocated = snapshot
        .claims
        .iter()
        .filter(names)
        .filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref());
    let mut results = allocated.flat_map(|devices| devices.results.iter().flatten());
    let theirs = results.find(|result| result.pool == pool && result.driver != *now)?;
    Some(format!(
        "its claims are of divvy's driver {}, and the node serves {now} now: the pod can neither start nor end until the chart is installed under that name again (docs/upgrade.md)",
        theirs.driver
    ))
    .filter(|_| !now.is_empty())
}

/// Returns advice for the step, where the claims have none.
fn hint(step: Step, pod: &Pod, claims: &[ClaimReport]) -> Option<String> {
    let advised = claims.iter().any(|claim| claim.needs_person);
    let text = match step {
        Step::Gated => {
            let gates = pod.spec.as_ref()?.scheduling_gates.iter().flatten();
            let gates: Vec<&str> = gates.map(|gate| gate.name.as_str()).collect();
            format!(
                "the scheduler looks at the pod when the owners of its scheduling gates have removed them: {}",
                gates.join(", ")
            )
        }
        Step::Preparing if !advised => {
            "the kubelet asks again every few seconds; if nothing changes within a minute: `divvy status node NODE`".to_owned()
        }
        Step::Starting => {
            "the devices are ready: what is left is up to the container runtime and the image (`kubectl describe pod`)".to_owned()
        }
        _ => return None,
    };
    Some(
        match pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
            Some(node) => text.replace("NODE", node),
            None => text,
        },
    )
}
