//! Parts of a policy without effect: nodes and GPUs that do not exist, and rules that others hide.

use std::collections::BTreeSet;

use divvy_api::names::attributes::{PCI_BUS_ID, PROFILE};
use divvy_api::node::Trouble;
use divvy_api::policy::{GpuMatch, GpuPolicy, Instances, NodeMatch, PolicyRule};
use divvy_model::PciAddress;
use divvy_offer::is_like;

use super::{Fleet, Place, PolicyLine, Seen, references};
use crate::status::read::{NODES, SLICES};
use divvy_why::device::text;
use divvy_why::some;

/// Kind of a part without effect. It needs a person if its policy or rule decides nothing.
const WITHOUT_EFFECT: &str = "without-effect";

/// Returns the parts of a policy that have no effect.
pub(super) fn parts(fleet: &Fleet<'_>, policy: &GpuPolicy, line: &PolicyLine) -> Vec<Trouble> {
    let locks = line.mode_lock.as_ref();
    let decides = line.rules.iter().any(|rule| !rule.decides.is_empty())
        || locks.is_some_and(|nodes| !nodes.is_empty());
    let of_policy = |why: &str, hint: &str| part(WITHOUT_EFFECT, &policy.name, decides, why, hint);
    let mut all = Vec::new();
    if policy.spec.rules.is_empty() && locks.is_none() {
        all.push(of_policy("it has neither rules nor modeLock", ""));
    }
    let everywhere: Vec<_> = fleet.places.iter().collect();
    let nodes = no_such_node(fleet, policy.spec.nodes.as_ref(), &everywhere);
    all.extend(nodes.map(|why| of_policy(&why, NODES_HINT)));
    let nodes: Vec<_> = fleet.places(policy, None).collect();
    if nodes.is_empty() {
        return all;
    }
    if locks.is_some_and(Vec::is_empty) {
        let why = "modeLock: on each of its nodes, a policy that is asked earlier sets it";
        all.push(of_policy(why, "raise spec.priority, or leave it out"));
    }
    let rules = line.rules.iter().zip(&policy.spec.rules);
    for (rule, (line, spec)) in references(policy).into_iter().zip(rules) {
        let wants = Rule {
            fleet,
            name: &rule,
            spec,
            decides: !line.decides.is_empty(),
        };
        let why = no_such_node(fleet, spec.nodes.as_ref(), &nodes);
        all.extend(why.map(|why| wants.part(&why, NODES_HINT)));
        // Its nodes and their GPUs are known, but for nodes that only labels select.
        let by_labels = [policy.spec.nodes.as_ref(), spec.nodes.as_ref()]
            .into_iter()
            .flatten()
            .any(|nodes| nodes.selector.is_some());
        let blind = by_labels && fleet.snapshot.lacks(&NODES);
        if !line.nodes.is_empty() && !blind {
            let gpus = fleet
                .places(policy, Some(spec))
                .flat_map(|place| &place.gpus);
            all.extend(wants.parts(&gpus.collect::<Vec<_>>(), decides));
        }
    }
    all
}

/// Returns a trouble of a policy or rule, with the hint in front of the way to correct it.
pub(super) fn part(kind: &str, of: &str, notice: bool, why: &str, hint: &str) -> Trouble {
    let policy = of.split_once('/').map_or(of, |(policy, _)| policy);
    let comma = if hint.is_empty() { "" } else { ": " };
    Trouble {
        kind: kind.to_owned(),
        notice,
        subject: of.to_owned(),
        why: why.to_owned(),
        remedy: format!("{hint}{comma}`kubectl edit gpupolicy {policy}`"),
        ..Trouble::default()
    }
}

const NODES_HINT: &str = "label a node, or correct nodes (`divvy status` lists those with divvy)";

/// Returns which names no node has, and whether the selector fits no node.
fn no_such_node(
    fleet: &Fleet<'_>,
    nodes: Option<&NodeMatch>,
    among: &[&Place<'_>],
) -> Option<String> {
    let nodes = nodes?;
    let is_there = |name: &&String| among.iter().any(|place| place.name == name.as_str());
    let names: Vec<_> = nodes.names.iter().filter(|name| !is_there(name)).collect();
    let by_labels = NodeMatch {
        names: BTreeSet::new(),
        selector: nodes.selector.clone(),
    };
    let is_idle = nodes.selector.is_some()
        && !fleet.snapshot.lacks(&NODES)
        && !among.iter().any(|place| place.is(Some(&by_labels)));
    let names = (!names.is_empty())
        .then(|| format!("names: no such node with divvy: {}", some(names.iter())));
    let selector = is_idle.then(|| "selector: it fits the labels of no node with divvy".to_owned());
    let parts: Vec<String> = names.into_iter().chain(selector).collect();
    (!parts.is_empty()).then(|| format!("nodes.{}", parts.join("; nodes.")))
}

/// A rule that is judged.
struct Rule<'a> {
    fleet: &'a Fleet<'a>,
    /// `policy/rule`.
    name: &'a str,
    spec: &'a PolicyRule,
    /// True if it decides about a GPU.
    decides: bool,
}

impl Rule<'_> {
    fn part(&self, why: &str, hint: &str) -> Trouble {
        part(WITHOUT_EFFECT, self.name, self.decides, why, hint)
    }

    /// Returns why it decides about none of the GPUs of its nodes, or what in it matches none.
    fn parts(&self, gpus: &[&Seen<'_>], policy_decides: bool) -> Vec<Trouble> {
        if self.decides {
            let profiles = self.profiles(gpus).map(|why| self.part(&why, ""));
            return self.unmatched(gpus).into_iter().chain(profiles).collect();
        }
        let notice = |why: &str, remedy: &str| Trouble {
            notice: true,
            remedy: remedy.to_owned(),
            ..self.part(why, "")
        };
        if gpus.is_empty() {
            return vec![notice(
                "its nodes report no GPU",
                "`divvy status` shows their problems",
            )];
        }
        let matched: Vec<_> = gpus
            .iter()
            .filter(|seen| seen.fits(self.spec.gpus.as_ref()))
            .collect();
        if matched.is_empty() {
            return self.unmatched(gpus);
        }
        let order: Vec<String> = self
            .fleet
            .policies
            .iter()
            .flat_map(|p| references(p))
            .collect();
        let earlier: BTreeSet<&str> = order
            .iter()
            .map(String::as_str)
            .take_while(|rule| *rule != self.name)
            .collect();
        let open = matched
            .iter()
            .filter(|seen| !earlier.contains(seen.gpu.policy.as_str()));
        let open: Vec<_> = open
            .map(|seen| format!("{}/{}", seen.node, seen.gpu.name))
            .collect();
        if !open.is_empty() {
            let why = format!(
                "{}: the node has not reported yet that it decides",
                some(open.iter())
            );
            return vec![notice(
                &why,
                "look again in some seconds; then `divvy status node NODE` shows why not",
            )];
        }
        let by: BTreeSet<&str> = matched
            .iter()
            .map(|seen| seen.gpu.policy.as_str())
            .collect();
        let why = format!(
            "rules that are asked earlier decide about all its GPUs: {}",
            some(by.iter())
        );
        let hint = "raise spec.priority, move the rule up, or remove it";
        // Usual of a last rule for all the rest.
        vec![Trouble {
            notice: policy_decides,
            ..self.part(&why, hint)
        }]
    }

    /// Returns the entries of its `gpus` that match no GPU, list by list.
    fn unmatched(&self, gpus: &[&Seen<'_>]) -> Vec<Trouble> {
        let products = gpus.iter().map(|seen| seen.gpu.product.as_str());
        let products: BTreeSet<&str> = products.filter(|name| !name.is_empty()).collect();
        let mut parts = Vec::new();
        for (list, mut none) in entries(self.spec.gpus.as_ref()) {
            none.retain(|entry| !gpus.iter().any(|seen| seen.has(list, entry)));
            let unknown = list == PCI && self.fleet.snapshot.lacks(&SLICES);
            if list == PRODUCTS {
                parts.extend(
                    none.iter()
                        .filter_map(|entry| self.no_product(entry, &products)),
                );
            } else if !none.is_empty() && !unknown {
                let why = format!("gpus.{list}: no GPU of its nodes has {}", some(none.iter()));
                let hint = "`divvy status node NODE` lists numbers and UUIDs";
                parts.push(self.part(&why, hint));
            }
        }
        parts
    }

    /// Says why a pattern matches none of the products.
    fn no_product(&self, pattern: &str, products: &BTreeSet<&str>) -> Option<Trouble> {
        let stars = format!("*{}*", pattern.trim_matches('*'));
        let Some(product) = products.iter().find(|product| is_like(product, &stars)) else {
            let all = some(products.iter());
            let why =
                format!("gpus.products: no GPU of its nodes is like {pattern} (they are {all})");
            return Some(self.part(&why, ""));
        };
        let why = format!(
            "gpus.products: {pattern} is only a part of {product}, and has to match all of it"
        );
        // Its node reports the same of a rule that decides.
        let reported = self.decides && !pattern.contains('*');
        (!reported).then(|| self.part(&why, &format!("write \"{stars}\"")))
    }

    /// Says which of its profiles none of its GPUs with partitions offers.
    fn profiles(&self, gpus: &[&Seen<'_>]) -> Option<String> {
        let mig = self.spec.mig.as_ref()?;
        let own = gpus.iter().filter(|seen| seen.gpu.policy == self.name);
        let offered = own.flat_map(|seen| &seen.devices);
        let offered: BTreeSet<&str> = offered.filter_map(|device| text(device, PROFILE)).collect();
        let none = mig
            .profiles
            .iter()
            .flatten()
            .filter(|one| !offered.contains(one.as_str()));
        let none: Vec<&String> = none.collect();
        // With static instances, only existing ones are offered.
        let unknown = offered.is_empty() || mig.instances == Some(Instances::Static);
        (!unknown && !none.is_empty()).then(|| {
            let (none, offered) = (some(none.iter()), some(offered.iter()));
            format!("mig.profiles: none of its GPUs has {none} (they have {offered})")
        })
    }
}

const PRODUCTS: &str = "products";
const PCI: &str = "pciAddresses";

/// Returns the lists of a `gpus`, with their names.
fn entries(gpus: Option<&GpuMatch>) -> Vec<(&'static str, Vec<String>)> {
    let Some(gpus) = gpus else {
        return Vec::new();
    };
    let listed = |entries: &BTreeSet<String>| entries.iter().cloned().collect();
    vec![
        ("uuids", listed(&gpus.uuids)),
        (
            "ordinals",
            gpus.ordinals.iter().map(ToString::to_string).collect(),
        ),
        (PRODUCTS, listed(&gpus.products)),
        (PCI, listed(&gpus.pci_addresses)),
    ]
}

impl Seen<'_> {
    /// Returns whether an entry of a list matches.
    fn has(&self, list: &str, entry: &str) -> bool {
        match list {
            "uuids" => self.gpu.uuid.eq_ignore_ascii_case(entry),
            "ordinals" => self.gpu.name == format!("gpu-{entry}"),
            PRODUCTS => is_like(&self.gpu.product, entry),
            _ => {
                let address = |text: &str| text.parse::<PciAddress>().ok();
                let mut published = self
                    .devices
                    .iter()
                    .filter_map(|device| text(device, PCI_BUS_ID));
                published.any(|own| address(own).is_some() && address(own) == address(entry))
            }
        }
    }

    fn fits(&self, wanted: Option<&GpuMatch>) -> bool {
        let has = |(list, entries): &(&str, Vec<String>)| {
            entries.iter().any(|entry| self.has(list, entry))
        };
        wanted.is_none() || entries(wanted).iter().any(has)
    }
}
