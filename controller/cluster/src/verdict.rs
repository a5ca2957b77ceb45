//! The decision to evict a pod, with everything that was just read about it.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

use crate::due::{Candidate, Reason, due, due_since, holds, is_for, opts_out};

/// Pods of this priority and above are the system's.
const SYSTEM_PRIORITY: i32 = 2_000_000_000;

/// A node learns of a pod of a claim that it holds already after so long: what it says before is
/// not about that pod.
const LEARNS: Duration = Duration::from_secs(30);

/// Reason to keep a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Another pod has its name now.
    Gone,
    /// It is being deleted, or has ended.
    Ending,
    /// Its priority is one of the system's.
    System,
    /// The pod, its namespace or one of its claims has the annotation.
    OptedOut(&'static str),
    /// The condition of the claim was taken back, or the pod does not use the claim.
    NotDue,
    /// It came after the claim was found to be due: nothing was seen of it.
    New,
    /// A claim that is made for the pod from a template is not known (yet).
    Unknown(String),
    /// Another claim of the pod is in use.
    InUse(String),
}

impl Kept {
    /// For logs.
    pub(crate) fn why(&self) -> String {
        match self {
            Self::Gone => "it is gone".to_owned(),
            Self::Ending => "it is ending".to_owned(),
            Self::System => "its priority is one of the system's".to_owned(),
            Self::OptedOut(what) => format!("{what} has the annotation that keeps idle claims"),
            Self::NotDue => "its claim is not to be reclaimed any more".to_owned(),
            Self::New => "it came after its claim was found to be due".to_owned(),
            Self::Unknown(name) => format!("its claim for {name} is not known"),
            Self::InUse(claim) => format!("its claim {claim} is in use"),
        }
    }
}

/// Decides whether a pod may be evicted. `claims` are all of its claims.
pub(crate) fn verdict(
    candidate: &Candidate,
    pod: &Pod,
    namespace: &Namespace,
    claims: &[ResourceClaim],
    driver: &str,
    now: Timestamp,
) -> Result<(), Kept> {
    if pod.metadata.uid.as_deref() != Some(&candidate.uid) {
        return Err(Kept::Gone);
    }
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    if pod.metadata.deletion_timestamp.is_some() || matches!(phase, Some("Succeeded" | "Failed")) {
        return Err(Kept::Ending);
    }
    if pod
        .spec
        .as_ref()
        .and_then(|spec| spec.priority)
        .is_some_and(|priority| priority >= SYSTEM_PRIORITY)
    {
        return Err(Kept::System);
    }
    let name_of = |claim: &ResourceClaim| claim.metadata.name.clone().unwrap_or_default();
    let claim = claims
        .iter()
        .find(|claim| name_of(claim) == candidate.claim)
        .ok_or(Kept::NotDue)?;
    let said = due_since(claim, driver, now)
        .filter(|(reason, _)| *reason == candidate.reason && is_for(claim, &candidate.uid));
    let Some((_, said)) = said else {
        return Err(Kept::NotDue);
    };
    if !was_seen(pod, said, now) {
        return Err(Kept::New);
    }
    // A share that harms others cannot opt out of that.
    if candidate.reason == Reason::OverGrant {
        return Ok(());
    }
    if opts_out(&pod.metadata) {
        return Err(Kept::OptedOut("the pod"));
    }
    if opts_out(&namespace.metadata) {
        return Err(Kept::OptedOut("the namespace"));
    }
    if let Some(name) = unknown_claim(pod) {
        return Err(Kept::Unknown(name.to_owned()));
    }
    for claim in claims.iter().filter(|claim| holds(claim, driver)) {
        if opts_out(&claim.metadata) {
            return Err(Kept::OptedOut("one of its claims"));
        }
        if due(claim, driver, now) != Some(Reason::Idle) {
            return Err(Kept::InUse(name_of(claim)));
        }
    }
    Ok(())
}

/// Returns whether the pod was on its node for [`LEARNS`] when that was said of its claim.
///
/// Four clocks are involved, each of which may be wrong. The kubelet writes when the pod started,
/// by the clock by which the node plugin says what it has seen: these two are compared as they are,
/// so that an error of that clock cancels out. A pod that has not started has used nothing. The API
/// server and the scheduler write the other times, by clocks that the node's may be ahead of:
/// nothing can have been said later than now.
fn was_seen(pod: &Pod, said: Timestamp, now: Timestamp) -> bool {
    let (spec, status) = (pod.spec.as_ref(), pod.status.as_ref());
    let is_on_node = spec.is_some_and(|spec| spec.node_name.is_some());
    let Some(started) = status.and_then(|status| status.start_time.as_ref()) else {
        return false;
    };
    let scheduled = status
        .and_then(|status| status.conditions.as_ref())
        .into_iter()
        .flatten();
    let scheduled = scheduled
        .filter(|condition| condition.type_ == "PodScheduled")
        .filter_map(|condition| condition.last_transition_time.as_ref());
    // A pod may have waited long for its node.
    let created = pod.metadata.creation_timestamp.iter();
    let mut came = created.chain(scheduled).chain([started]);
    is_on_node && came.all(|came| came.0 + LEARNS <= said.min(now))
}

/// Returns a claim from a template whose name the pod does not say.
fn unknown_claim(pod: &Pod) -> Option<&str> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.resource_claim_statuses.as_ref());
    let is_said = |name: &str| {
        statuses
            .into_iter()
            .flatten()
            .any(|status| status.name == name)
    };
    let mut claims = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let unknown = claims.find(|claim| claim.resource_claim_name.is_none() && !is_said(&claim.name));
    unknown.map(|claim| claim.name.as_str())
}

/// Returns the names of all claims of a pod.
pub(crate) fn claim_names(pod: &Pod) -> Vec<String> {
    let spec = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let named = spec.filter_map(|claim| claim.resource_claim_name.clone());
    let statuses = pod
        .status
        .iter()
        .flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let made = statuses.filter_map(|status| status.resource_claim_name.clone());
    let extended = pod
        .status
        .iter()
        .filter_map(|status| status.extended_resource_claim_status.as_ref());
    let mut all: Vec<String> = named
        .chain(made)
        .chain(extended.map(|status| status.resource_claim_name.clone()))
        .collect();
    all.sort();
    all.dedup();
    all
}
