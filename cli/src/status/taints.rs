//! Effects of taints that people do not expect: rules of administrators that keep nothing away, or
//! not all of a GPU, and pods that an evicting taint leaves where they are. Pure.

use std::collections::BTreeSet;

use divvy_api::names::taints::WITHDRAWN;
use divvy_api::node::Trouble;
use divvy_model::DeviceKind;
use divvy_offer::pool_name;
use k8s_openapi::api::resource::v1::{Device, DeviceTaint, DeviceTaintSelector, ResourceClaim};

use super::read::SLICES;
use super::report::NodeTrouble;
use super::snapshot::{Snapshot, full_name, name};

/// The scheduler's mark on the claims that it makes for pods with extended resources.
const EXTENDED: &str = "resource.kubernetes.io/extended-resource-claim";
/// Names in a sentence.
const SHOWN: usize = 3;

/// Returns the rules that select no device, and those that select one form of a GPU and leave
/// others to claims. An administrator believes that the GPU is out of service.
pub(super) fn rules(snapshot: &Snapshot) -> Vec<NodeTrouble> {
    if snapshot.lacks(&SLICES) {
        return Vec::new();
    }
    let found = snapshot.taint_rules.iter().filter_map(|rule| {
        let selector = rule.spec.device_selector.as_ref()?;
        let other = selector
            .driver
            .as_ref()
            .is_some_and(|d| *d != snapshot.driver);
        let mut trouble = if other {
            return None;
        } else if selects(snapshot, selector).next().is_none() {
            matches_nothing(snapshot, selector)
        } else {
            leaves_forms(snapshot, selector, &rule.spec.taint)?
        };
        name(&rule.metadata).clone_into(&mut trouble.subject);
        let node = selector.pool.as_deref();
        let node = node.and_then(|pool| snapshot.node_of(pool));
        Some(NodeTrouble {
            node: node.unwrap_or_default().to_owned(),
            trouble,
            affects: Vec::new(),
        })
    });
    found.collect()
}

/// Returns the pool and the devices that a selector of a rule fits.
fn selects<'a>(
    snapshot: &'a Snapshot,
    selector: &'a DeviceTaintSelector,
) -> impl Iterator<Item = (&'a str, &'a Device)> {
    let fits =
        |wanted: &Option<String>, found: &str| wanted.as_ref().is_none_or(|wanted| wanted == found);
    let slices = snapshot.slices.iter().map(|slice| &slice.spec);
    let slices = slices
        .filter(move |slice| fits(&selector.driver, &slice.driver))
        .filter(move |slice| fits(&selector.pool, &slice.pool.name));
    slices.flat_map(move |slice| {
        let devices = slice.devices.iter().flatten();
        devices
            .filter(move |device| fits(&selector.device, &device.name))
            .map(|device| (slice.pool.name.as_str(), device))
    })
}

fn matches_nothing(snapshot: &Snapshot, selector: &DeviceTaintSelector) -> Trouble {
    let any = DeviceTaintSelector {
        device: None,
        ..selector.clone()
    };
    let pool = selector.pool.as_deref().unwrap_or_default();
    let is_node = snapshot
        .nodes
        .iter()
        .any(|node| name(&node.metadata) == pool);
    let (why, remedy) = if selects(snapshot, &any).next().is_some() {
        (
            format!(
                "the DeviceTaintRule has no effect: no device is called {} there",
                selector.device.as_deref().unwrap_or_default()
            ),
            "correct spec.deviceSelector.device (`kubectl get resourceslices -o yaml` has the names), or delete the rule".to_owned(),
        )
    } else if is_node {
        (
            format!("the DeviceTaintRule has no effect: {pool} is a node and no pool"),
            format!("set spec.deviceSelector.pool to {}", pool_name(pool)),
        )
    } else {
        (
            format!(
                "the DeviceTaintRule has no effect: no pool {pool:?} of {} is published",
                snapshot.driver
            ),
            "the pool of a node is called NODE/divvy: correct spec.deviceSelector.pool, or delete the rule if the node is gone".to_owned(),
        )
    };
    Trouble {
        kind: "rule-matches-nothing".to_owned(),
        why,
        remedy,
        ..Trouble::default()
    }
}

/// Says which forms of a GPU a rule leaves to claims. A rule for one partition means just that.
fn leaves_forms(
    snapshot: &Snapshot,
    selector: &DeviceTaintSelector,
    taint: &DeviceTaint,
) -> Option<Trouble> {
    let kind = |device: &str| DeviceKind::parse(&device.parse().ok()?).ok();
    let this = kind(selector.device.as_deref()?)?;
    if this.partition().is_some() || !this.sharing.holds() {
        return None;
    }
    let any = DeviceTaintSelector {
        device: None,
        ..selector.clone()
    };
    let left = selects(snapshot, &any).filter(|(_, device)| {
        let taints = || device.taints.iter().flatten();
        kind(&device.name)
            .is_some_and(|other| other.ordinal() == this.ordinal() && other.sharing.holds())
            && !taints().any(|other| {
                other.key == WITHDRAWN || (&other.key, &other.effect) == (&taint.key, &taint.effect)
            })
    });
    let left: BTreeSet<&str> = left.map(|(_, device)| device.name.as_str()).collect();
    let shown: Vec<&str> = left.iter().copied().take(SHOWN).collect();
    let more = match left.len().checked_sub(SHOWN) {
        None | Some(0) => String::new(),
        Some(more) => format!(" and {more} more"),
    };
    (!left.is_empty()).then(|| Trouble {
        kind: "rule-leaves-forms".to_owned(),
        notice: true,
        gpu: DeviceKind::whole(this.ordinal()).to_string(),
        why: format!(
            "the DeviceTaintRule keeps claims off {} only, and they can have the same GPU as {}{more}",
            selector.device.as_deref().unwrap_or_default(),
            shown.join(", ")
        ),
        remedy: "write a rule for each device of the GPU (examples/device-taint)".to_owned(),
        ..Trouble::default()
    })
}

/// Returns the claims of pods with extended resources on devices of a node whose taint evicts:
/// Kubernetes does not evict such pods.
pub(super) fn not_evicted(snapshot: &Snapshot, node: &str) -> Vec<Trouble> {
    let pool = pool_name(node);
    let selector = DeviceTaintSelector {
        driver: Some(snapshot.driver.clone()),
        pool: Some(pool.clone()),
        device: None,
    };
    let evicting = selects(snapshot, &selector).filter_map(|(_, device)| {
        let mut taints = device.taints.iter().flatten();
        let taint = taints.find(|taint| taint.effect == "NoExecute")?;
        Some((device.name.as_str(), taint.key.as_str()))
    });
    let evicting: Vec<(&str, &str)> = evicting.collect();
    if evicting.is_empty() {
        return Vec::new();
    }
    let is_extended = |claim: &&ResourceClaim| {
        let annotations = claim.metadata.annotations.as_ref();
        annotations.is_some_and(|all| all.get(EXTENDED).is_some_and(|value| value == "true"))
    };
    let claims = snapshot.claims.iter().filter(is_extended);
    let found = claims.filter_map(|claim| {
        let status = claim.status.as_ref()?;
        let results = status.allocation.as_ref()?.devices.as_ref()?.results.iter();
        let mut ours = results
            .flatten()
            .filter(|result| result.driver == snapshot.driver && result.pool == pool);
        let (device, key) = ours.find_map(|result| {
            let is_its = |(device, _): &&(&str, &str)| *device == result.device;
            evicting.iter().find(is_its)
        })?;
        let pods = status.reserved_for.iter().flatten();
        let pods: Vec<&str> = pods.map(|pod| pod.name.as_str()).collect();
        let kind = DeviceKind::parse(&device.parse().ok()?).ok()?;
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        Some(Trouble {
            kind: "not-evicted".to_owned(),
            gpu: DeviceKind::whole(kind.ordinal()).to_string(),
            subject: (*device).to_owned(),
            claim: full_name(&claim.metadata),
            why: format!(
                "its taint {key} evicts, and Kubernetes does not evict pods that ask for GPUs in `limits` (docs/health.md)"
            ),
            remedy: format!("`kubectl -n {namespace} delete pod {}`", pods.join(" ")),
            ..Trouble::default()
        })
    });
    // A pod whose claim is released already leaves by itself.
    found.filter(|one| !one.remedy.ends_with("pod `")).collect()
}
