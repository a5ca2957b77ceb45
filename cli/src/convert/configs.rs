//! Configurations of nodes by other systems, as policies of divvy: the device plugin's `sharing`,
//! mig-parted's `mig-configs` and HAMi's `nodeconfig`, as a file or in a ConfigMap.

use divvy_api::names;

use super::notes::{Notes, under};
use super::resources;
use crate::yaml::{self, Map, Node};

/// Label of the device plugin by which a node chooses one of several configurations.
const PLUGIN: &str = "nvidia.com/device-plugin.config";
/// The same of the MIG manager.
const MANAGER: &str = "nvidia.com/mig.config";
/// Characters of a name at most.
const LONGEST: usize = 253;

/// Policies of an object or a file, or `None` if it is no configuration that is known, or stays.
pub(super) fn convert(object: &Map, notes: &mut Notes) -> Option<Vec<Node>> {
    let policies = notes.attempt(|notes| policies(object, notes)).flatten();
    policies.filter(|policies| !policies.is_empty())
}

fn policies(object: &Map, notes: &mut Notes) -> Option<Vec<Node>> {
    if object.get("kind").is_none() {
        return of_file(object, "", None, notes);
    }
    let is_map = object.get("kind").and_then(Node::text) == Some("ConfigMap");
    let data = object.get("data").filter(|_| is_map)?.map()?;
    let several = data.iter().count() > 1;
    let name = object
        .get("metadata")
        .and_then(|meta| meta.text_at(&["name"]))
        .unwrap_or("policy");
    let mut all = Vec::new();
    let mut found = false;
    for (key, text) in data.iter() {
        let documents = text.text().map(|text| yaml::documents(key, text));
        let Some(Ok(documents)) = documents else {
            continue;
        };
        for document in documents.iter().filter_map(Node::map) {
            let at = format!("data[{key}]");
            let from = From {
                map: name,
                key: several.then_some(key),
            };
            if let Some(policies) = of_file(document, &at, Some(from), notes) {
                found = true;
                all.extend(policies);
            }
        }
    }
    found.then_some(all)
}

/// ConfigMap that a configuration comes from.
#[derive(Clone, Copy)]
struct From<'m> {
    map: &'m str,
    /// Key, if there are several.
    key: Option<&'m str>,
}

fn of_file(file: &Map, at: &str, from: Option<From<'_>>, notes: &mut Notes) -> Option<Vec<Node>> {
    if let Some(configs) = file.get("mig-configs").and_then(Node::map) {
        return Some(partitions(configs, &under(at, "mig-configs"), notes));
    }
    if let Some(configs) = file.get("nodeconfig").map(Node::items) {
        return Some(of_hami(configs, &under(at, "nodeconfig"), notes));
    }
    let sharing = file.get("sharing").and_then(Node::map)?;
    let is_plugins = ["timeSlicing", "mps"]
        .iter()
        .any(|way| sharing.get(way).is_some());
    is_plugins.then(|| {
        sharing_of(sharing, &under(at, "sharing"), from, notes)
            .into_iter()
            .collect()
    })
}

/// Policy under construction.
struct Policy {
    name: String,
    /// Label and value of its nodes; all nodes of divvy without one.
    nodes: (String, String),
    rules: Vec<Node>,
}

impl Policy {
    fn node(self) -> Node {
        let (label, value) = self.nodes;
        let labels = Map::from([(label, value.into())]);
        let selector = Map::from([("matchLabels", labels.into())]);
        let nodes = Map::from([("selector", selector.into())]);
        let spec = Map::from([("nodes", nodes.into()), ("rules", self.rules.into())]);
        policy(&self.name, spec)
    }
}

fn policy(name: &str, spec: Map) -> Node {
    let metadata = Map::from([("name", named(name).into())]);
    Node::from([
        ("apiVersion", names::API_VERSION.into()),
        ("kind", divvy_api::policy::KIND.into()),
        ("metadata", metadata.into()),
        ("spec", spec.into()),
    ])
}

/// Makes a name that Kubernetes takes.
fn named(text: &str) -> String {
    let plain = |c: char| match c.to_ascii_lowercase() {
        c if c.is_ascii_alphanumeric() || c == '.' => c,
        _ => '-',
    };
    let name: String = text.chars().map(plain).take(LONGEST).collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() {
        "policy".to_owned()
    } else {
        name.to_owned()
    }
}

/// Nodes that the administrator gives to divvy.
fn labelled() -> (String, String) {
    ("divvy.dev/gpu".to_owned(), "true".to_owned())
}

/// Converts `sharing` of the device plugin.
fn sharing_of(sharing: &Map, at: &str, from: Option<From<'_>>, notes: &mut Notes) -> Option<Node> {
    let mut rules = Vec::new();
    for (field, mode) in [("timeSlicing", "TimeSlicing"), ("mps", "Mps")] {
        let Some(way) = sharing.get(field).and_then(Node::map) else {
            continue;
        };
        let at = under(at, field);
        way_of(way, mode, &at, &mut rules, notes);
        if mode == "Mps" {
            let what = "needs mps.enabled in the chart (docs/mps.md)";
            notes.note(&at, what);
        }
    }
    let key = from.and_then(|from| from.key);
    let selected = match key {
        Some(key) => {
            let what = format!(
                "is for the nodes with the label {PLUGIN}={key}, which they keep; a default that nodes without the label had is a policy \
                 without nodes, of a lower priority"
            );
            notes.note(at, what);
            (PLUGIN.to_owned(), key.to_owned())
        }
        None => labelled(),
    };
    if rules.is_empty() {
        notes.note(at, "shares nothing: no policy is needed");
        return None;
    }
    let name = match from {
        None => "device-plugin".to_owned(),
        Some(From { map, key: None }) => map.to_owned(),
        Some(From {
            map,
            key: Some(key),
        }) => format!("{map}-{key}"),
    };
    let new = Policy {
        name,
        nodes: selected,
        rules,
    };
    Some(new.node())
}

/// Converts `timeSlicing` or `mps`.
fn way_of(way: &Map, mode: &str, at: &str, rules: &mut Vec<Node>, notes: &mut Notes) {
    let is_true = |field: &str| way.get(field) == Some(&Node::Bool(true));
    if is_true("failRequestsGreaterThanOne") {
        let what =
            "a count above 1 is that many shares of different GPUs, and is not refused: removed";
        notes.note(&under(at, "failRequestsGreaterThanOne"), what);
    }
    let resources = way.get("resources").map(Node::items).unwrap_or_default();
    let mut named = Vec::new();
    for (number, resource) in resources.iter().enumerate() {
        let at = format!("{at}.resources[{number}]");
        let name = resource.text_at(&["name"]).unwrap_or("nvidia.com/gpu");
        let name = if name.contains('/') {
            name.to_owned()
        } else {
            format!("nvidia.com/{name}")
        };
        let replicas = resource.at(&["replicas"]).and_then(Node::scalar);
        let replicas = replicas.unwrap_or_else(|| "1".to_owned());
        let Some(slots) = replicas
            .parse::<u64>()
            .ok()
            .filter(|slots| (1..=1024).contains(slots))
        else {
            let what = format!("{replicas:?} is not a number from 1 to 1024: write one");
            notes.refuse(&under(&at, "replicas"), what);
            continue;
        };
        let rename = resource.text_at(&["rename"]);
        if rename.is_some() {
            notes.note(
                &under(&at, "rename"),
                "the device plugin ignores it: removed",
            );
        }
        let Some(gpus) = devices(resource.at(&["devices"]), &under(&at, "devices"), notes) else {
            continue;
        };
        let Some(rule) = rule_of(&name, mode, slots, &at, notes) else {
            continue;
        };
        let mut rule = rule;
        if !gpus.is_empty() {
            let what = "the device plugin ignores the field and shares all GPUs; the policy takes it at its word";
            notes.note(&under(&at, "devices"), what);
            let mut first = Map::from([("gpus", gpus.into())]);
            for (field, value) in rule.iter() {
                first.set(field, value.clone());
            }
            rule = first;
        }
        let shown = if is_true("renameByDefault") {
            format!("{name}.shared")
        } else {
            name.clone()
        };
        named.push((name, shown, slots));
        rules.push(rule.into());
    }
    for (name, shown, slots) in named {
        resource_note(at, &name, &shown, slots, mode, notes);
    }
}

/// Says by which value the resource stays that pods ask for.
fn resource_note(at: &str, name: &str, shown: &str, slots: u64, mode: &str, notes: &mut Notes) {
    if slots == 1 {
        return;
    }
    let what = if name != "nvidia.com/gpu" {
        format!("pods ask for a part of {name} by a claim, which divvy convert writes of {shown}")
    } else if mode == "Mps" {
        format!(
            "pods ask for deviceclass.resource.kubernetes.io/{} instead of {shown}, or by a claim",
            names::CLASS_MPS
        )
    } else {
        let other = if shown == name { "gpu: \"\", " } else { "" };
        format!(
            "pods go on to ask for {shown} with the values deviceClass.extendedResourceNames: {{{other}share: {shown}}} \
             (docs/migrate/device-plugin.md#time-slicing)"
        )
    };
    notes.note(at, what);
}

/// Makes the rule of a resource.
fn rule_of(name: &str, mode: &str, slots: u64, at: &str, notes: &mut Notes) -> Option<Map> {
    let list =
        |items: &[&str]| -> Vec<Node> { items.iter().map(|item| Node::from(*item)).collect() };
    if name == "nvidia.com/gpu" {
        if slots == 1 {
            return Some(Map::from([("modes", list(&["Whole"]).into())]));
        }
        return Some(Map::from([
            ("modes", list(&[mode]).into()),
            ("shares", Map::from([("slots", Node::from(slots))]).into()),
        ]));
    }
    let profile = name
        .strip_prefix("nvidia.com/mig-")
        .and_then(resources::profile_of);
    let Some(profile) = profile else {
        let what = format!(
            "{name}: only nvidia.com/gpu and nvidia.com/mig-PROFILE are shared: write one of them"
        );
        notes.refuse(&under(at, "name"), what);
        return None;
    };
    if mode == "Mps" {
        let what = "the device plugin refuses MPS of partitions, and divvy offers it";
        notes.note(at, what);
    }
    let mut mig = Map::from([("profiles", vec![Node::from(profile.as_str())].into())]);
    let mut rule = Map::from([("modes", list(&["Mig"]).into())]);
    if slots > 1 {
        mig.set("sharing", list(&[mode]));
        rule.set("mig", mig);
        rule.set("shares", Map::from([("slots", Node::from(slots))]));
    } else {
        rule.set("mig", mig);
    }
    Some(rule)
}

/// Reads `devices` as the match of a rule, which is empty for all; `None` after a refusal.
fn devices(node: Option<&Node>, at: &str, notes: &mut Notes) -> Option<Map> {
    let mut gpus = Map::default();
    let items = match node {
        None | Some(Node::Null) => return Some(gpus),
        Some(Node::Text(all)) if all == "all" => return Some(gpus),
        Some(Node::List(items)) => items,
        Some(other) => {
            let text = other.scalar().unwrap_or_default();
            let what = format!("{text}: a rule names its GPUs: write their numbers or UUIDs");
            notes.refuse(at, what);
            return None;
        }
    };
    let (mut ordinals, mut uuids) = (Vec::new(), Vec::new());
    for item in items {
        let text = item.scalar().unwrap_or_default();
        if let Ok(number) = text.parse::<u64>() {
            ordinals.push(Node::from(number));
        } else if text.starts_with("GPU-") {
            uuids.push(Node::from(text));
        } else {
            let what = format!(
                "{text:?} is not a GPU: a rule names GPUs by their numbers or UUIDs, and no partitions"
            );
            notes.refuse(at, what);
            return None;
        }
    }
    if !ordinals.is_empty() {
        gpus.set("ordinals", ordinals);
    }
    if !uuids.is_empty() {
        gpus.set("uuids", uuids);
    }
    Some(gpus)
}

/// Converts `mig-configs` of mig-parted: a policy for each configuration, for the nodes whose label
/// chooses it.
fn partitions(configs: &Map, at: &str, notes: &mut Notes) -> Vec<Node> {
    let mut all = Vec::new();
    let mut counts = false;
    for (name, entries) in configs.iter() {
        let at = format!("{at}.{name}");
        let rules = partition_rules(entries.items(), &at, &mut counts, notes);
        if rules.is_empty() {
            continue;
        }
        let policy = Policy {
            name: format!("mig-{name}"),
            nodes: (MANAGER.to_owned(), name.to_owned()),
            rules,
        };
        all.push(policy.node());
    }
    if !all.is_empty() {
        let what = format!(
            "each configuration is a policy for the nodes with its label {MANAGER}; for all nodes, keep one and select {}=true \
             (docs/migrate/mig-parted.md)",
            labelled().0
        );
        notes.note(at, what);
    }
    if counts {
        let what =
            "numbers of partitions have no counterpart: divvy makes them on demand, as many as fit";
        notes.note(at, what);
    }
    all
}

/// Makes the rules of one configuration.
fn partition_rules(entries: &[Node], at: &str, counts: &mut bool, notes: &mut Notes) -> Vec<Node> {
    // Entries for different models of GPUs are one rule: a GPU offers only profiles that it has.
    let mut merged: Vec<(Map, bool, Vec<String>)> = Vec::new();
    for (number, entry) in entries.iter().enumerate() {
        let at = format!("{at}[{number}]");
        let is_on = entry.at(&["mig-enabled"]) == Some(&Node::Bool(true));
        let Some(gpus) = devices(entry.at(&["devices"]), &under(&at, "devices"), notes) else {
            continue;
        };
        let has_filter = entry.at(&["device-filter"]).is_some();
        let mut profiles = Vec::new();
        let wanted = entry.at(&["mig-devices"]).and_then(Node::map);
        for (profile, count) in wanted.into_iter().flat_map(Map::iter) {
            if count.scalar().as_deref() == Some("0") {
                continue;
            }
            if resources::profile_of(profile).as_deref() != Some(profile) {
                let what = format!(
                    "{profile:?} is not a profile of a GPU instance: divvy makes no compute instances of their own"
                );
                notes.refuse(&under(&at, "mig-devices"), what);
                continue;
            }
            *counts = true;
            profiles.push(profile.to_owned());
        }
        match merged
            .iter_mut()
            .find(|(of, on, _)| *of == gpus && *on == is_on)
        {
            Some((.., there)) if has_filter => there.extend(profiles),
            None => merged.push((gpus, is_on, profiles)),
            Some(_) => {}
        }
        let is_split = has_filter
            && merged
                .iter()
                .any(|(of, on, _)| of.is_empty() && *on != is_on);
        if is_split {
            let what = "rules name GPUs by product, and not by PCI device IDs: write gpus: {products: [...]} for each";
            notes.refuse(&under(&at, "device-filter"), what);
        }
    }
    // The first rule that matches decides: those for some GPUs come before those for all.
    merged.sort_by_key(|(gpus, ..)| gpus.is_empty());
    let rule = |(gpus, is_on, mut profiles): (Map, bool, Vec<String>)| {
        let mut rule = Map::default();
        if !gpus.is_empty() {
            rule.set("gpus", gpus);
        }
        let mode = if is_on { "Mig" } else { "Whole" };
        rule.set("modes", vec![Node::from(mode)]);
        profiles.sort();
        profiles.dedup();
        if is_on && !profiles.is_empty() {
            let profiles: Vec<Node> = profiles.into_iter().map(Node::from).collect();
            rule.set("mig", Map::from([("profiles", profiles.into())]));
        }
        Node::Map(rule)
    };
    merged.into_iter().map(rule).collect()
}

/// Converts `nodeconfig` of HAMi's device plugin: a policy for each node.
fn of_hami(configs: &[Node], at: &str, notes: &mut Notes) -> Vec<Node> {
    let mut all = Vec::new();
    for (number, node) in configs.iter().enumerate() {
        let at = format!("{at}[{number}]");
        let name = node.text_at(&["name"]).unwrap_or_default();
        if name.is_empty() {
            notes.refuse(
                &under(&at, "name"),
                "is missing: write the name of the node",
            );
            continue;
        }
        let mut rule = Map::default();
        let mode = node.text_at(&["operatingmode"]).unwrap_or("hami-core");
        let mode = match mode {
            "mig" => "Mig",
            "mps" => "Mps",
            _ => "TimeSlicing",
        };
        rule.set("modes", vec![Node::from(mode)]);
        let count = node.at(&["devicesplitcount"]).and_then(Node::scalar);
        let count = count.and_then(|count| count.parse::<u64>().ok());
        if let Some(slots) = count.filter(|slots| *slots > 0 && mode != "Mig") {
            rule.set("shares", Map::from([("slots", Node::from(slots))]));
        }
        for (field, what) in [
            (
                "devicememoryscaling",
                "memory is not given out twice: requests add up to that of the GPU; with shares.burst, pods may use more than they \
                 request (docs/memory-caps.md#request-and-limit)",
            ),
            (
                "devicecorescaling",
                "compute is not given out twice: cores of all shares add up to 100",
            ),
        ] {
            let scale = node.at(&[field]).and_then(Node::scalar);
            if scale.is_some_and(|scale| scale.parse::<f64>().is_ok_and(|scale| scale > 1.0)) {
                notes.unknown(&under(&at, field), what);
            }
        }
        for list in ["uuid", "index"] {
            let left = node.at(&["filterdevices", list]).map(Node::items);
            if left.is_some_and(|left| !left.is_empty()) {
                let what = "a policy leaves out no GPU: exclude it at the node, or give it a rule with modes: [Whole] before this one";
                notes.unknown(&format!("{at}.filterdevices.{list}"), what);
            }
        }
        let names = Map::from([("names", vec![Node::from(name)].into())]);
        let spec = Map::from([
            ("nodes", names.into()),
            ("rules", vec![Node::Map(rule)].into()),
        ]);
        all.push(policy(&format!("hami-{name}"), spec));
    }
    all
}
