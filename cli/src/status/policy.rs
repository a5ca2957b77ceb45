//! Policies: on how many nodes and GPUs each rule decides, and what in them has no effect, and why.
//! The nodes report which rule decides about a GPU; the reasons are worked out in [`idle`].

mod idle;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use divvy_api::node::{GpuStatus, Trouble};
use divvy_api::policy::{GpuPolicy, NodeMatch, PolicyError, PolicyRule};
use divvy_offer::{NodeFacts, RuleRef, fits_node, pool_name};
use k8s_openapi::api::resource::v1::Device;
use serde::Serialize;

use super::read::{GPU_NODES, NODES};
use super::report::{NodeTrouble, is_ours, missing};
use super::snapshot::{Snapshot, name};
use divvy_why::device::kind;
use divvy_why::some;

/// Policies, and what has no effect.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyReport {
    /// Need for action by an administrator.
    pub(crate) needs_person: bool,
    /// In the order in which they are asked; unreadable ones last.
    pub(crate) policies: Vec<PolicyLine>,
    /// GPUs without a rule, if all policies are shown.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) without_rule: Gpus,
    /// Parts without effect, and what nodes report of the policies.
    pub(crate) troubles: Vec<NodeTrouble>,
    /// Kinds that could not be read.
    pub(crate) unread: Vec<String>,
}

/// Names of GPUs, by node.
pub(crate) type Gpus = BTreeMap<String, Vec<String>>;

/// A policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyLine {
    pub(crate) name: String,
    /// Unknown if the policy cannot be read.
    pub(crate) priority: Option<i32>,
    /// Nodes on which its mode lock counts, if it sets one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mode_lock: Option<Vec<String>>,
    pub(crate) rules: Vec<RuleLine>,
}

/// A rule.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RuleLine {
    /// Its name, or `rules[0]`.
    pub(crate) rule: String,
    /// True if only an earlier version of the policy has it, which nodes still follow.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) earlier: bool,
    /// Nodes that it applies to.
    pub(crate) nodes: Vec<String>,
    /// The number of GPUs that it decides about, unless no report can be read.
    pub(crate) gpus: Option<usize>,
    /// Names of these GPUs.
    pub(crate) decides: Gpus,
}

/// Reports on all policies, or on one.
pub(crate) fn policies(snapshot: &Snapshot, wanted: Option<&str>) -> Result<PolicyReport> {
    if let Some(wanted) = wanted.filter(|name| !snapshot.policies.contains_key(*name)) {
        let hint = match snapshot.policies.len() {
            0 => String::new(),
            _ => format!("; there are {}", some(snapshot.policies.keys())),
        };
        let unread = missing(snapshot);
        bail!("GpuPolicy {wanted} does not exist{hint}{unread}");
    }
    let fleet = Fleet::of(snapshot);
    let mut report = PolicyReport {
        unread: snapshot.unread.clone(),
        ..PolicyReport::default()
    };
    let good = fleet.policies.iter().map(|policy| &policy.name);
    let bad = snapshot
        .policies
        .iter()
        .filter(|(_, policy)| policy.is_err());
    for name in good.chain(bad.map(|(name, _)| name)) {
        let Some(policy) = snapshot.policies.get(name) else {
            continue;
        };
        if wanted.is_some_and(|wanted| wanted != name) {
            continue;
        }
        let line = fleet.line(name, policy);
        let reported = fleet.reported(&line);
        let own = match policy {
            Ok(policy) if !snapshot.lacks(&GPU_NODES) => idle::parts(&fleet, policy, &line),
            Err(error) if reported.iter().all(|one| one.trouble.kind != BAD_POLICY) => {
                vec![idle::part(BAD_POLICY, name, false, &error.to_string(), "")]
            }
            _ => Vec::new(),
        };
        report.policies.push(line);
        report.troubles.extend(reported);
        report
            .troubles
            .extend(own.into_iter().map(|trouble| NodeTrouble {
                node: String::new(),
                trouble,
                affects: Vec::new(),
            }));
    }
    if wanted.is_none() {
        report.without_rule = fleet.decided("");
    }
    report.troubles.sort_by_key(|one| one.trouble.notice);
    report.needs_person = report.troubles.iter().any(|one| !one.trouble.notice);
    Ok(report)
}

/// Kinds of what nodes report of policies.
const BAD_POLICY: &str = "bad-policy";
const RULE_WITHOUT_EFFECT: &str = "rule-without-effect";
const NOT_OFFERED: &str = "not-offered";

/// Everything that policies are about.
struct Fleet<'a> {
    snapshot: &'a Snapshot,
    places: Vec<Place<'a>>,
    /// Readable ones, in the order in which they are asked.
    policies: Vec<&'a GpuPolicy>,
}

/// A node with divvy.
struct Place<'a> {
    name: &'a str,
    /// Nothing if nodes cannot be listed.
    labels: Option<BTreeMap<String, String>>,
    gpus: Vec<Seen<'a>>,
}

/// A GPU that a node reports.
struct Seen<'a> {
    node: &'a str,
    gpu: &'a GpuStatus,
    /// Its devices, as published.
    devices: Vec<&'a Device>,
}

impl<'a> Fleet<'a> {
    fn of(snapshot: &'a Snapshot) -> Self {
        let ours = snapshot.nodes.iter().filter(|node| is_ours(node));
        let ours = ours.map(|node| name(&node.metadata));
        let reporting = snapshot.reports.keys().map(String::as_str);
        let names: BTreeSet<&str> = ours.chain(reporting).collect();
        let mut policies: Vec<&GpuPolicy> = snapshot.policies.values().flatten().collect();
        // Equals stay in the order of their names.
        policies.sort_by_key(|policy| Reverse(policy.spec.priority));
        Self {
            snapshot,
            places: (names.into_iter())
                .map(|name| Place::of(snapshot, name))
                .collect(),
            policies,
        }
    }

    fn gpus(&self) -> impl Iterator<Item = &Seen<'a>> {
        self.places.iter().flat_map(|place| &place.gpus)
    }

    /// Returns the GPUs about which this rule decides, as the nodes report it.
    fn decided(&self, rule: &str) -> Gpus {
        let mut all = Gpus::new();
        for seen in self.gpus().filter(|seen| seen.gpu.policy == rule) {
            let of_node = all.entry(seen.node.to_owned()).or_default();
            of_node.push(seen.gpu.name.clone());
        }
        all
    }

    fn line(&self, name: &str, policy: &Result<GpuPolicy, PolicyError>) -> PolicyLine {
        let unknown = self.snapshot.lacks(&GPU_NODES);
        let rule = |of: &str, mut nodes: Vec<String>, earlier| {
            let decides = self.decided(of);
            // Without labels, nodes that it applies to are at least these.
            if self.snapshot.lacks(&NODES) {
                nodes.extend(decides.keys().cloned());
                nodes.sort();
                nodes.dedup();
            }
            RuleLine {
                rule: of.split_once('/').map_or(of, |(_, rule)| rule).to_owned(),
                earlier,
                nodes,
                gpus: (!unknown).then(|| decides.values().map(Vec::len).sum()),
                decides,
            }
        };
        let mut line = PolicyLine {
            name: name.to_owned(),
            ..PolicyLine::default()
        };
        let mut current = Vec::new();
        if let Ok(policy) = policy {
            current = references(policy);
            line.priority = Some(policy.spec.priority);
            line.mode_lock = policy.spec.mode_lock.map(|_| self.locked_by(policy));
            for (of, spec) in current.iter().zip(&policy.spec.rules) {
                let nodes = self.places(policy, Some(spec));
                let nodes = nodes.map(|place| place.name.to_owned());
                line.rules.push(rule(of, nodes.collect(), false));
            }
        }
        // Nodes follow the last version that they could read.
        let earlier: BTreeSet<&String> = self
            .gpus()
            .map(|seen| &seen.gpu.policy)
            .filter(|by| by.split_once('/').is_some_and(|(of, _)| of == name))
            .filter(|by| !current.contains(by))
            .collect();
        for of in earlier {
            let nodes = self.decided(of).into_keys().collect();
            line.rules.push(rule(of, nodes, true));
        }
        line
    }

    /// Returns the nodes on which this policy is the first that sets the mode lock.
    fn locked_by(&self, policy: &GpuPolicy) -> Vec<String> {
        let first = |place: &&Place<'_>| {
            let mut setting = self.policies.iter().filter(|p| p.spec.mode_lock.is_some());
            let first = setting.find(|p| place.is(p.spec.nodes.as_ref()));
            first.is_some_and(|first| first.name == policy.name)
        };
        let nodes = self.places.iter().filter(first);
        nodes.map(|place| place.name.to_owned()).collect()
    }

    /// Returns the nodes that a policy, or a rule of it, applies to.
    fn places(
        &self,
        policy: &GpuPolicy,
        rule: Option<&PolicyRule>,
    ) -> impl Iterator<Item = &Place<'a>> {
        self.places.iter().filter(move |place| {
            place.is(policy.spec.nodes.as_ref())
                && rule.is_none_or(|rule| place.is(rule.nodes.as_ref()))
        })
    }

    /// Returns what nodes report of a policy and its rules; what several report is there once.
    fn reported(&self, policy: &PolicyLine) -> Vec<NodeTrouble> {
        let decides = |of: &str| {
            let rule = of.split_once('/').filter(|(of, _)| *of == policy.name);
            let is_it = |line: &RuleLine| rule.is_some_and(|(_, rule)| line.rule == rule);
            policy
                .rules
                .iter()
                .any(|line| is_it(line) && !line.decides.is_empty())
        };
        let mut all: Vec<(Trouble, BTreeSet<&str>)> = Vec::new();
        for (node, status) in &self.snapshot.reports {
            for trouble in &status.troubles {
                let mut gpus = status.gpus.iter();
                let (subject, is_its) = match trouble.kind.as_str() {
                    BAD_POLICY => (&trouble.subject, trouble.subject == policy.name),
                    // Why a rule decides about no GPU is worked out for all nodes together.
                    RULE_WITHOUT_EFFECT => (&trouble.subject, decides(&trouble.subject)),
                    NOT_OFFERED => match gpus.find(|gpu| gpu.name == trouble.gpu) {
                        Some(gpu) => (&gpu.policy, decides(&gpu.policy)),
                        None => continue,
                    },
                    _ => continue,
                };
                if !is_its {
                    continue;
                }
                let trouble = Trouble {
                    subject: subject.clone(),
                    gpu: String::new(),
                    since: None,
                    ..trouble.clone()
                };
                match all.iter_mut().find(|(same, _)| *same == trouble) {
                    Some((_, nodes)) => drop(nodes.insert(node)),
                    None => all.push((trouble, BTreeSet::from([node.as_str()]))),
                }
            }
        }
        let all = all.into_iter().map(|(trouble, nodes)| NodeTrouble {
            node: some(nodes.iter()),
            trouble,
            affects: Vec::new(),
        });
        all.collect()
    }
}

impl<'a> Place<'a> {
    fn of(snapshot: &'a Snapshot, name: &'a str) -> Self {
        let pool = pool_name(name);
        let slices = snapshot
            .slices
            .iter()
            .filter(|slice| slice.spec.driver == snapshot.driver && slice.spec.pool.name == pool);
        let mut devices: BTreeMap<String, Vec<&Device>> = BTreeMap::new();
        for device in slices.flat_map(|slice| slice.spec.devices.iter().flatten()) {
            if let Some(kind) = kind(&device.name) {
                let gpu = format!("gpu-{}", kind.ordinal());
                devices.entry(gpu).or_default().push(device);
            }
        }
        let gpus = snapshot.reports.get(name).map(|status| &status.gpus);
        let node =
            |node: &&k8s_openapi::api::core::v1::Node| node.metadata.name.as_deref() == Some(name);
        let labels = snapshot
            .nodes
            .iter()
            .find(node)
            .and_then(|node| node.metadata.labels.clone());
        Self {
            name,
            labels: (!snapshot.lacks(&NODES)).then(|| labels.unwrap_or_default()),
            gpus: gpus
                .into_iter()
                .flatten()
                .map(|gpu| Seen {
                    node: name,
                    gpu,
                    devices: devices.remove(&gpu.name).unwrap_or_default(),
                })
                .collect(),
        }
    }

    /// Returns whether it is selected. Without labels only names count.
    fn is(&self, wanted: Option<&NodeMatch>) -> bool {
        let name = self.name;
        match &self.labels {
            Some(labels) => fits_node(wanted, &NodeFacts { name, labels }),
            None => wanted.is_none_or(|wanted| wanted.names.contains(name)),
        }
    }
}

/// Returns the rules of a policy as nodes name them.
fn references(policy: &GpuPolicy) -> Vec<String> {
    let rules = policy.spec.rules.iter().enumerate();
    let named = rules.map(|(index, rule)| RuleRef {
        policy: policy.name.clone(),
        index,
        name: rule.name.clone(),
    });
    named.map(|rule| rule.to_string()).collect()
}
