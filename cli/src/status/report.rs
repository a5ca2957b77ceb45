//! The answers of `divvy status` as values: the fleet, a node, a GPU. Functions of a [`Snapshot`].

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use divvy_api::names::{CLASS_ADMIN, NODE_LABEL};
use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Trouble, Versions};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::Serialize;

use super::claim::{ClaimLine, refused, reported_use};
use super::plugins::Absence;
use super::read::{GPU_NODES, NODES, NOT_SERVED, SLICES};
use super::shares;
use super::snapshot::{Snapshot, full_name, name, namespace, time};
use super::taints;
use super::waiting::{Asker, open_claims};
use divvy_why::{Verdict, Why};

/// Questions that are answered for the fleet; pods of one Deployment ask the same.
const ANSWERED: usize = 200;

/// All nodes and all problems.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Fleet {
    /// Reason why divvy runs on no node, with what to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nowhere: Option<String>,
    /// Need for action by an administrator or user.
    pub(crate) needs_person: bool,
    /// Nodes with divvy, by name.
    pub(crate) nodes: Vec<NodeLine>,
    /// Problems and notices, by node.
    pub(crate) troubles: Vec<NodeTrouble>,
    /// Claims that their nodes refuse to prepare.
    pub(crate) refused: Vec<ClaimLine>,
    /// Claims that are over their grants, or idle, with the most serious report of each.
    pub(crate) reported_use: Vec<ClaimLine>,
    /// Pods whose claims are not allocated.
    pub(crate) waiting: Vec<Waiting>,
    /// Kinds that could not be read.
    pub(crate) unread: Vec<String>,
}

/// A node in short.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeLine {
    pub(crate) name: String,
    pub(crate) gpus: u32,
    pub(crate) free: u32,
    pub(crate) claims: u32,
    pub(crate) modes: String,
    pub(crate) trouble: String,
    pub(crate) versions: Versions,
    /// Level to which the memory of shares is capped, with what is lacking for it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) share_memory: String,
    /// When anything of it changed last.
    pub(crate) changed: Option<String>,
}

/// A problem, its node, and the claims it affects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTrouble {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) node: String,
    /// Kind, reason, start and remedy.
    #[serde(flatten)]
    pub(crate) trouble: Trouble,
    /// Claims that hold the GPU, with their pods.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) affects: Vec<String>,
}

/// A pod that waits for its claims.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// `namespace/name`.
    pub(crate) pod: String,
    /// Other pods that ask for the very same.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) others: usize,
    /// `namespace/name` of the claims.
    pub(crate) claims: Vec<String>,
    /// When the pod was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) since: Option<String>,
    #[serde(flatten)]
    pub(crate) why: Why,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A node in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NodeReport {
    /// Need for action by an administrator or user.
    pub(crate) needs_person: bool,
    pub(crate) node: NodeLine,
    /// Its GPUs, by number.
    pub(crate) gpus: Vec<GpuStatus>,
    pub(crate) troubles: Vec<NodeTrouble>,
    /// Kinds that could not be read.
    pub(crate) unread: Vec<String>,
}

/// A GPU in full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct GpuReport {
    /// Need for action by an administrator or user.
    pub(crate) needs_person: bool,
    pub(crate) node: String,
    pub(crate) gpu: GpuStatus,
    /// Amounts that the shares of the GPU and of its partitions were granted, by claim and device.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) granted: BTreeMap<String, BTreeMap<String, String>>,
    /// Amounts that the shares of each device leave, such as `memory 40 GiB of 80 GiB, cores 50 of
    /// 100`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) left: BTreeMap<String, String>,
    /// Problems of the GPU and of its node.
    pub(crate) troubles: Vec<NodeTrouble>,
    /// Kinds that could not be read.
    pub(crate) unread: Vec<String>,
}

/// The fleet; waiting and refused claims of one namespace, or of all.
pub(crate) fn fleet(snapshot: &Snapshot, only: Option<&str>) -> Fleet {
    let reported = snapshot
        .reports
        .iter()
        .map(|(name, status)| line(name, status));
    let silent = snapshot.nodes.iter().filter(|node| {
        is_ours(node)
            && !snapshot.lacks(&GPU_NODES)
            && !snapshot.reports.contains_key(name(&node.metadata))
    });
    let silent = silent.map(|node| line(name(&node.metadata), &GpuNodeStatus::default()));
    let mut nodes: Vec<NodeLine> = reported.chain(silent).collect();
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    let mut troubles: Vec<NodeTrouble> = nodes
        .iter()
        .flat_map(|node| troubles(snapshot, &node.name))
        .chain(taints::rules(snapshot))
        .collect();
    troubles.sort_by_key(|entry| entry.trouble.notice);
    let shown = |of: &str| only.is_none_or(|only| only == of);
    let claims = snapshot
        .claims
        .iter()
        .filter(|claim| shown(namespace(&claim.metadata)));
    let refused: Vec<ClaimLine> = claims
        .clone()
        .filter_map(|claim| refused(claim, &snapshot.driver))
        .collect();
    let reported_use =
        claims.filter_map(|claim| reported_use(claim, &snapshot.driver).into_iter().next());
    let reported_use = reported_use.collect();
    let waiting = waiting(snapshot, &shown);
    // A mistake of one tenant is no alarm for the whole cluster; a blocked pool is.
    let hopeless = |one: &Waiting| {
        let verdict = one.why.verdict;
        verdict == Verdict::Blocked || only.is_some() && verdict.is_hopeless()
    };
    let claims_need = only.is_some() && !refused.is_empty() || waiting.iter().any(hopeless);
    // Nodes are labelled, and the definition of their reports is gone.
    let gone = snapshot
        .unread
        .iter()
        .any(|what| what.starts_with(NOT_SERVED))
        && snapshot.nodes.iter().any(is_ours);
    let nowhere = nodes.is_empty().then(|| nowhere(snapshot)).flatten();
    let in_trouble = troubles.iter().any(|entry| !entry.trouble.notice);
    let needs_person = claims_need || gone || nowhere.is_some() || in_trouble;
    Fleet {
        nowhere,
        needs_person,
        nodes,
        troubles,
        refused,
        reported_use,
        waiting,
        unread: snapshot.unread.clone(),
    }
}

/// Says that no node has the label of divvy, if that is so, and which nodes may want it.
fn nowhere(snapshot: &Snapshot) -> Option<String> {
    let is_known = !snapshot.lacks(&GPU_NODES) && !snapshot.lacks(&NODES);
    if !is_known || snapshot.nodes.is_empty() || snapshot.nodes.iter().any(is_ours) {
        return None;
    }
    let label = format!("{NODE_LABEL}=true");
    let with_gpus: Vec<&str> = snapshot
        .nodes
        .iter()
        .filter(|node| has_gpus(node))
        .map(|node| name(&node.metadata))
        .collect();
    let what = match with_gpus.as_slice() {
        [] => format!("kubectl label node NODE {label}"),
        [first, ..] => {
            let more = match with_gpus.len() {
                1 => String::new(),
                all => format!(" and {} more", all - 1),
            };
            let have = if with_gpus.len() == 1 { "has" } else { "have" };
            format!("{first}{more} {have} GPUs by their labels: kubectl label node {first} {label}")
        }
    };
    Some(format!(
        "no node has the label {label}, so divvy runs nowhere (unless the chart has nodeSelection: discovered). {what}"
    ))
}

/// Says whether a node has GPUs of NVIDIA by labels of Node Feature Discovery, GPU Feature
/// Discovery or GKE, or by a device plugin.
fn has_gpus(node: &Node) -> bool {
    let labels = node.metadata.labels.iter().flatten();
    let mut labels = labels.map(|(key, value)| (key.as_str(), value.as_str()));
    let by_label = labels.any(|(key, value)| match key {
        "nvidia.com/gpu.present" => value == "true",
        "cloud.google.com/gke-accelerator" => true,
        _ => {
            let device = key.strip_prefix("feature.node.kubernetes.io/pci-");
            device.is_some_and(|device| device.contains("10de")) && value == "true"
        }
    });
    let allocatable = node
        .status
        .as_ref()
        .and_then(|status| status.allocatable.as_ref());
    let by_plugin = allocatable.and_then(|all| all.get("nvidia.com/gpu"));
    by_label || by_plugin.is_some_and(|number| number.0 != "0")
}

pub(crate) fn node(snapshot: &Snapshot, wanted: &str) -> Result<NodeReport> {
    let status = status_of(snapshot, wanted)?;
    let troubles = troubles(snapshot, wanted);
    Ok(NodeReport {
        needs_person: troubles.iter().any(|entry| !entry.trouble.notice),
        node: line(wanted, &status),
        gpus: status.gpus,
        troubles,
        unread: snapshot.unread.clone(),
    })
}

/// Says why no GPU is called so: the node, or the GPU of a node that is there.
fn no_gpu(snapshot: &Snapshot, wanted: &str) -> String {
    let Some((node, _)) = wanted.split_once('/') else {
        return format!(
            "no GPU matches {wanted:?}: give a UUID (or its beginning, GPU-…) or NODE/gpu-0; `divvy status` lists the nodes"
        );
    };
    let is_it = |name: &Option<String>| name.as_deref() == Some(node);
    match snapshot.reports.iter().find(|(name, _)| *name == node) {
        Some((_, status)) if status.gpus.is_empty() => format!(
            "node {node} reports no GPUs: kubectl describe gpunode {node}, or divvy status node {node}"
        ),
        Some((_, status)) => {
            let there: Vec<&str> = status.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
            format!(
                "node {node} has no {}: there are {}",
                wanted.get(node.len() + 1..).unwrap_or_default(),
                divvy_why::cause::named(&there)
            )
        }
        None if snapshot.nodes.iter().any(|of| is_it(&of.metadata.name)) => {
            format!("node {node} reports no GPUs: divvy status node {node} says why")
        }
        None => format!("there is no node {node}: `divvy status` lists those with GPUs"),
    }
}

/// Reports on a GPU, by its UUID, the beginning of that, or `NODE/gpu-N`.
pub(crate) fn gpu(snapshot: &Snapshot, wanted: &str) -> Result<GpuReport> {
    let is = |node: &str, gpu: &GpuStatus| match wanted.split_once('/') {
        Some((on, name)) => on == node && name == gpu.name,
        None => wanted.starts_with("GPU-") && gpu.uuid.starts_with(wanted),
    };
    let all = snapshot
        .reports
        .iter()
        .flat_map(|(node, status)| status.gpus.iter().map(move |gpu| (node, gpu)));
    let found: Vec<_> = all.filter(|(node, gpu)| is(node, gpu)).collect();
    let [(node, gpu)] = found.as_slice() else {
        let named: Vec<String> = found
            .iter()
            .take(5)
            .map(|(node, gpu)| format!("{node}/{}", gpu.name))
            .collect();
        if named.is_empty() {
            bail!("{}{}", no_gpu(snapshot, wanted), missing(snapshot));
        }
        let more = match found.len() - named.len() {
            0 => String::new(),
            more => format!(" and {more} more; give more of the UUID"),
        };
        bail!(
            "{wanted:?} matches several GPUs: {}{more}",
            named.join(", ")
        );
    };
    let troubles: Vec<NodeTrouble> = troubles(snapshot, node)
        .into_iter()
        .filter(|entry| entry.trouble.gpu.is_empty() || entry.trouble.gpu == gpu.name)
        .collect();
    Ok(GpuReport {
        needs_person: troubles.iter().any(|entry| !entry.trouble.notice),
        node: (*node).clone(),
        gpu: (*gpu).clone(),
        granted: shares::granted(snapshot, node, gpu),
        left: shares::left(snapshot, node, gpu),
        troubles,
        unread: snapshot.unread.clone(),
    })
}

fn status_of(snapshot: &Snapshot, wanted: &str) -> Result<GpuNodeStatus> {
    if let Some(status) = snapshot.reports.get(wanted) {
        return Ok(status.clone());
    }
    match snapshot
        .nodes
        .iter()
        .find(|node| name(&node.metadata) == wanted)
    {
        Some(_) if snapshot.lacks(&GPU_NODES) => {
            bail!(
                "the GpuNode of node {wanted} cannot be read{}",
                missing(snapshot)
            )
        }
        Some(node) if is_ours(node) => Ok(GpuNodeStatus::default()),
        Some(_) => bail!(
            "divvy does not run on node {wanted}: the node lacks the label {NODE_LABEL}=true (`kubectl label node {wanted} {NODE_LABEL}=true`){}",
            missing(snapshot)
        ),
        None => bail!("node {wanted} does not exist{}", missing(snapshot)),
    }
}

/// Unread kinds, as further explanations of why something was not found.
pub(super) fn missing(snapshot: &Snapshot) -> String {
    snapshot
        .unread
        .iter()
        .fold(String::new(), |text, unread| text + "; " + unread)
}

pub(super) fn is_ours(node: &Node) -> bool {
    node.metadata
        .labels
        .as_ref()
        .and_then(|labels| labels.get(NODE_LABEL))
        .is_some_and(|value| value == "true")
}

fn line(name: &str, status: &GpuNodeStatus) -> NodeLine {
    let summary = status.summary.clone();
    NodeLine {
        name: name.to_owned(),
        gpus: summary.gpus,
        free: summary.free,
        claims: summary.claims,
        modes: summary.modes,
        trouble: summary.trouble,
        versions: status.versions.clone(),
        share_memory: status.share_memory.clone(),
        changed: status.changed.clone(),
    }
}

/// The kinds of a GPU's problems that need a person.
pub(crate) fn kinds(troubles: &[NodeTrouble], node: &str, gpu: &str) -> Vec<String> {
    let of_gpu = |entry: &&NodeTrouble| {
        !entry.trouble.notice && entry.node == node && entry.trouble.gpu == gpu
    };
    let mut kinds: Vec<String> = troubles
        .iter()
        .filter(of_gpu)
        .map(|entry| entry.trouble.kind.clone())
        .collect();
    kinds.dedup();
    kinds
}

/// Problems that a node's plugin reports, and those visible only in other objects.
pub(crate) fn troubles(snapshot: &Snapshot, node: &str) -> Vec<NodeTrouble> {
    let status = snapshot.reports.get(node);
    let mut all: Vec<NodeTrouble> = outside(snapshot, node, status)
        .into_iter()
        .chain(taints::not_evicted(snapshot, node))
        .map(|trouble| NodeTrouble {
            node: node.to_owned(),
            trouble,
            affects: Vec::new(),
        })
        .collect();
    let reported = status
        .iter()
        .flat_map(|status| status.troubles.iter().map(move |trouble| (status, trouble)));
    all.extend(reported.map(|(status, trouble)| {
        let of_gpu = status
            .gpus
            .iter()
            .filter(|gpu| !trouble.notice && gpu.name == trouble.gpu);
        // Admin access does not hold the GPU: ending it frees nothing.
        let holders = of_gpu
            .flat_map(|gpu| &gpu.holders)
            .filter(|held| !held.device.ends_with(" (admin)"));
        let claims: BTreeSet<String> = holders.map(holder).collect();
        NodeTrouble {
            node: node.to_owned(),
            trouble: trouble.clone(),
            affects: claims.into_iter().collect(),
        }
    }));
    all
}

fn outside(snapshot: &Snapshot, node: &str, status: Option<&GpuNodeStatus>) -> Option<Trouble> {
    let object = snapshot
        .nodes
        .iter()
        .find(|object| name(&object.metadata) == node);
    let conditions = object.and_then(|object| object.status.as_ref()?.conditions.as_ref());
    let not_ready = conditions
        .into_iter()
        .flatten()
        .find(|c| c.type_ == "Ready" && c.status != "True");
    if let Some(condition) = not_ready {
        return Some(Trouble {
            kind: "node-not-ready".to_owned(),
            why: condition
                .message
                .clone()
                .unwrap_or_else(|| "the kubelet does not answer".to_owned()),
            remedy: "restore the node's kubelet; the reported GPU state is older than the failure"
                .to_owned(),
            since: condition.last_transition_time.as_ref().map(time),
            ..Trouble::default()
        });
    }
    if status.is_none() && snapshot.lacks(&GPU_NODES) {
        return None;
    }
    let Some(status) = status else {
        if let Some(plugins) = &snapshot.plugins {
            let Absence { why, remedy } = plugins.absence(node, object, snapshot.now);
            return Some(Trouble {
                kind: "no-report".to_owned(),
                why,
                remedy,
                ..Trouble::default()
            });
        }
        return Some(Trouble {
            kind: "no-report".to_owned(),
            why: format!(
                "the node has the label {NODE_LABEL}=true, but no plugin reports its GPUs"
            ),
            remedy: format!(
                "check the plugin's pod and its log: `kubectl get pods -A -l app.kubernetes.io/name=divvy --field-selector spec.nodeName={node}` (docs/runbooks/not-registered.md)"
            ),
            ..Trouble::default()
        });
    };
    let published = snapshot.publishes(node);
    let offers = status.gpus.iter().any(|gpu| !gpu.offered.is_empty());
    let unknown = snapshot.lacks(&SLICES) && snapshot.published.is_none();
    if !offers || published || unknown {
        return None;
    }
    let plugins = snapshot.plugins.as_ref();
    let absence = plugins.filter(|plugins| plugins.is_away(node));
    let absence = absence.map(|plugins| plugins.absence(node, object, snapshot.now));
    let absence = absence.unwrap_or_else(|| Absence {
        why: "the node offers GPUs, but has no ResourceSlice: its plugin is not running or is not registered with the kubelet".to_owned(),
        remedy: "check the plugin's pod and log (docs/runbooks/slices-not-published.md)".to_owned(),
    });
    Some(Trouble {
        kind: "not-published".to_owned(),
        why: absence.why,
        remedy: absence.remedy,
        ..Trouble::default()
    })
}

/// `default/train (pod a, b)`.
fn holder(holder: &Holder) -> String {
    let pods = match holder.pods.as_slice() {
        [] => String::new(),
        pods => format!(" (pod {})", pods.join(", ")),
    };
    format!("{}/{}{pods}", holder.namespace, holder.name)
}

fn waiting(snapshot: &Snapshot, shown: &dyn Fn(&str) -> bool) -> Vec<Waiting> {
    let mut asker = Asker::new(snapshot);
    let mut lines: BTreeMap<String, usize> = BTreeMap::new();
    let mut all: Vec<Waiting> = Vec::new();
    for pod in snapshot
        .pods
        .iter()
        .filter(|pod| shown(namespace(&pod.metadata)))
    {
        let claims = open_claims(pod, snapshot);
        if claims.is_empty() || !asks_us(snapshot, &claims) || lines.len() >= ANSWERED {
            continue;
        }
        let why = asker.ask(&claims, Some(pod));
        // Pods of one owner that wait for the same reason are one line.
        let owner = owner(pod);
        let key = serde_json::json!([namespace(&pod.metadata), owner, why]).to_string();
        if let (Some(_), Some(at)) = (&owner, lines.get(&key)) {
            if let Some(first) = all.get_mut(*at) {
                first.others += 1;
            }
            continue;
        }
        lines.insert(key, all.len());
        all.push(Waiting {
            pod: full_name(&pod.metadata),
            others: 0,
            claims: claims
                .iter()
                .map(|claim| full_name(&claim.metadata))
                .collect(),
            since: pod.metadata.creation_timestamp.as_ref().map(time),
            why,
        });
    }
    all
}

fn owner(pod: &Pod) -> Option<String> {
    pod.metadata
        .owner_references
        .iter()
        .flatten()
        .map(|owner| owner.uid.clone())
        .next()
}

/// Says whether one of the claims asks for a class of ours: one that names our driver or is called
/// as
/// ours are.
fn asks_us(snapshot: &Snapshot, claims: &[&k8s_openapi::api::resource::v1::ResourceClaim]) -> bool {
    let domain = CLASS_ADMIN
        .split_once('.')
        .map_or(CLASS_ADMIN, |(_, domain)| domain);
    let ours: BTreeSet<&str> = snapshot
        .classes
        .iter()
        .filter(|class| {
            let selectors = class
                .spec
                .iter()
                .flat_map(|spec| spec.selectors.iter().flatten());
            let mut expressions = selectors.filter_map(|s| Some(&s.cel.as_ref()?.expression));
            expressions.any(|expression| expression.contains(&snapshot.driver))
        })
        .map(|class| name(&class.metadata))
        .collect();
    let requests = claims
        .iter()
        .filter_map(|claim| claim.spec.as_ref()?.devices.as_ref()?.requests.as_ref());
    let mut classes = requests.flatten().flat_map(|request| {
        let exact = request
            .exactly
            .iter()
            .map(|exactly| exactly.device_class_name.as_str());
        let first = request
            .first_available
            .iter()
            .flatten()
            .map(|sub| sub.device_class_name.as_str());
        exact.chain(first).collect::<Vec<_>>()
    });
    classes.any(|class| ours.contains(class) || class.ends_with(domain))
}
