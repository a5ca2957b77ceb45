//! Labels of GKE's nodes, by which a pod there says what its `nvidia.com/gpu` is: a partition, or a
//! share.

use super::notes::{Notes, under};
use super::resources::{self, Ask};
use crate::claim::template::Request;
use crate::yaml::{Map, Node};

/// Beginning of GKE's labels.
const DOMAIN: &str = "cloud.google.com/gke-";
const PARTITION: &str = "cloud.google.com/gke-gpu-partition-size";
const SHARING: &str = "cloud.google.com/gke-gpu-sharing-strategy";
const CLIENTS: &str = "cloud.google.com/gke-max-shared-clients-per-gpu";

/// Strategy by which GPUs are shared on the nodes that a pod selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    Turns,
    Mps,
}

/// Meaning of the labels for a GPU.
#[derive(Debug, Default)]
pub(super) struct Labels {
    profile: Option<String>,
    sharing: Option<Sharing>,
    /// Labels that were taken out, by path, with what is said of them.
    pub(super) read: Vec<(String, String)>,
}

/// Says whether a label is a request, which divvy's nodes do not have.
pub(super) fn is_request(label: &str) -> bool {
    [PARTITION, SHARING, CLIENTS].contains(&label)
}

/// Says whether a label describes nodes with GPUs, as GKE makes them.
pub(super) fn is_of_nodes(label: &str) -> bool {
    let rest = label.strip_prefix(DOMAIN);
    rest.is_some_and(|name| name.starts_with("accelerator") || name.contains("gpu"))
}

/// Takes the labels out of a pod's node selector, and out of a node affinity that says the same.
pub(super) fn take(spec: &mut Map, at: &str, notes: &mut Notes) -> Labels {
    let mut labels = Labels::default();
    for label in [PARTITION, SHARING, CLIENTS] {
        let selector = spec.get_mut("nodeSelector").and_then(Node::map_mut);
        let by_selector = selector.and_then(|selector| selector.remove(label));
        let by_selector = by_selector.map(|value| (value, under(at, "nodeSelector")));
        let by_affinity = || {
            let value = in_affinity(spec, label)?;
            Some((value, under(at, "affinity.nodeAffinity")))
        };
        let Some((value, at)) = by_selector.or_else(by_affinity) else {
            continue;
        };
        let value = value.scalar().unwrap_or_default();
        let at = format!("{at}[{label}]");
        let what = match (label, value.as_str()) {
            (PARTITION, size) => {
                labels.profile = resources::profile_of(size);
                if labels.profile.is_none() {
                    notes.refuse(&at, format!("{size:?} is not a MIG profile: write 1g.10gb"));
                }
                "the claim asks for a partition of this profile: removed".to_owned()
            }
            (SHARING, "time-sharing") => {
                labels.sharing = Some(Sharing::Turns);
                "the claim asks for a share: removed".to_owned()
            }
            (SHARING, "mps") => {
                labels.sharing = Some(Sharing::Mps);
                "the claim asks for a slot of MPS: removed".to_owned()
            }
            (SHARING, other) => {
                let what = format!("{other:?} is not a strategy: write time-sharing or mps");
                notes.refuse(&at, what);
                String::new()
            }
            (_, clients) => format!(
                "how many have a GPU together is decided by shares: {{slots: {clients}}} of a GpuPolicy (docs/policy.md): removed"
            ),
        };
        labels.read.push((at, what));
    }
    spec.remove_if_empty("nodeSelector");
    labels
}

/// Takes a label out of the required node affinity, if it is one value of all nodes.
fn in_affinity(spec: &mut Map, label: &str) -> Option<Node> {
    let affinity = spec.get_mut("affinity")?;
    let terms = affinity.at_mut(&[
        "nodeAffinity",
        "requiredDuringSchedulingIgnoredDuringExecution",
        "nodeSelectorTerms",
    ])?;
    let [term] = terms.items_mut()?.as_mut_slice() else {
        return None;
    };
    let all = term.at_mut(&["matchExpressions"])?.items_mut()?;
    let is_it = |one: &Node| {
        let values = one.at(&["values"]).map(Node::items).unwrap_or_default();
        one.text_at(&["key"]) == Some(label)
            && one.text_at(&["operator"]) == Some("In")
            && values.len() == 1
    };
    let place = all.iter().position(is_it)?;
    let value = all.remove(place).at(&["values"])?.items().first()?.clone();
    let is_empty = all.is_empty() && term.at(&["matchFields"]).is_none();
    if is_empty {
        let affinity = affinity.map_mut()?;
        let node = affinity.get_mut("nodeAffinity").and_then(Node::map_mut);
        if let Some(node) = node {
            node.remove("requiredDuringSchedulingIgnoredDuringExecution");
        }
        affinity.remove_if_empty("nodeAffinity");
        spec.remove_if_empty("affinity");
    }
    Some(value)
}

impl Labels {
    /// Returns what a number of `nvidia.com/gpu` is on such nodes.
    pub(super) fn ask(&self, count: u64) -> Ask {
        let (form, request) = match (&self.profile, self.sharing) {
            (None, None) => ("gpu".to_owned(), Request::gpus(count)),
            (None, Some(Sharing::Turns)) => {
                ("share".to_owned(), Request::shares(count, None, None))
            }
            (None, Some(Sharing::Mps)) => ("mps".to_owned(), Request::slots(count)),
            (Some(profile), sharing) => {
                let request = match sharing {
                    None => Request::of_profile(divvy_api::names::DRIVER, profile, count),
                    Some(Sharing::Turns) => Request::shares_of_profile(profile, count),
                    Some(Sharing::Mps) => Request::slots_of_profile(profile, count),
                };
                (format!("mig-{profile}"), request)
            }
        };
        Ask::new(&form, request)
    }
}
