//! Objects of a file: which of their parts ask for GPUs, and where the new templates go.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names;

use super::notes::{Note, Notes, under};
use super::{dra, hints, pod, resources};
use crate::claim::template::{Claim, Request};
use crate::yaml::{Map, Node};

/// Kinds of Kubernetes itself that have a template of pods.
const BUILT_IN: [&str; 9] = [
    "Pod",
    "PodTemplate",
    "ReplicationController",
    "ReplicaSet",
    "Deployment",
    "StatefulSet",
    "DaemonSet",
    "Job",
    "CronJob",
];

/// Key of a ResourceQuota that counts the devices of a class.
const DEVICES: &str = ".deviceclass.resource.k8s.io/devices";

/// A document of the output, with the notes about it.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) node: Node,
    pub(crate) notes: Vec<Note>,
}

/// Converts the objects of one input, whose names must not clash.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Templates by namespace and name: those of the input, and those that were made.
    templates: BTreeMap<(String, String), Node>,
    /// Classes of the input.
    classes: BTreeSet<String>,
    /// Requests of all claims that were made.
    pub(super) requests: Vec<Request>,
}

/// Returns a text of an object's metadata.
fn meta<'o>(object: &'o Map, field: &str) -> Option<&'o str> {
    object
        .get("metadata")?
        .text_at(&[field])
        .filter(|text| !text.is_empty())
}

impl Objects {
    /// Takes note of the templates that the input has already.
    pub(super) fn of(documents: &[Node]) -> Self {
        let mut objects = Self::default();
        for document in documents {
            objects.remember(document);
        }
        objects
    }

    fn remember(&mut self, node: &Node) {
        let Some(object) = node.map() else { return };
        if let Some(items) = object.get("items") {
            items.items().iter().for_each(|item| self.remember(item));
        }
        let name = meta(object, "name").unwrap_or_default();
        if node.text_at(&["kind"]) == Some("DeviceClass") {
            self.classes.insert(name.to_owned());
        }
        if node.text_at(&["kind"]) == Some("ResourceClaimTemplate") {
            let namespace = meta(object, "namespace").unwrap_or("default");
            self.templates
                .insert((namespace.to_owned(), name.to_owned()), node.clone());
        }
    }

    /// Converts one document; the templates of its claims come before it, in a list as well.
    pub(super) fn convert(&mut self, node: Node) -> Vec<Document> {
        let Some(object) = node.map() else {
            return vec![Document {
                node,
                notes: Vec::new(),
            }];
        };
        let text = |field: &str| object.get(field).and_then(Node::text).unwrap_or_default();
        let (version, kind) = (text("apiVersion").to_owned(), text("kind").to_owned());
        if kind.ends_with("List") && object.get("items").is_some() {
            return vec![self.list(object)];
        }
        let name = meta(object, "name")
            .or(meta(object, "generateName"))
            .unwrap_or("(no name)");
        let namespace = meta(object, "namespace").unwrap_or("default");
        let mut notes = Notes::of(match kind.as_str() {
            "DeviceClass" | "DeviceTaintRule" => format!("{kind} {name}"),
            _ => format!("{kind} {namespace}/{name}"),
        });
        let mut made = Vec::new();
        let new = if dra::is_kind(&version, &kind) {
            dra::convert(object, &kind, &self.classes, &mut notes)
        } else if (version.as_str(), kind.as_str()) == ("v1", "ResourceQuota") {
            Some(quota(object, &mut notes))
        } else {
            Some(self.workload(object, &kind, &mut notes, &mut made))
        };
        let mut documents: Vec<Document> = made
            .into_iter()
            .map(|node| Document {
                node,
                notes: Vec::new(),
            })
            .collect();
        let notes = notes.into_all();
        let node = new.map_or(node, Node::Map);
        documents.push(Document { node, notes });
        // The notes are read first.
        if documents.len() > 1
            && let Some(last) = documents.last_mut()
        {
            let notes = std::mem::take(&mut last.notes);
            if let Some(first) = documents.first_mut() {
                first.notes = notes;
            }
        }
        documents
    }

    fn list(&mut self, object: &Map) -> Document {
        let mut new = object.clone();
        let items = object.get("items").map(Node::items).unwrap_or_default();
        let (mut all, mut notes) = (Vec::new(), Vec::new());
        for item in items {
            for document in self.convert(item.clone()) {
                all.push(document.node);
                notes.extend(document.notes);
            }
        }
        new.set("items", Node::List(all));
        // A list of one kind cannot have templates.
        if new.get("items").map(Node::items).unwrap_or_default().len() > items.len() {
            new.set("apiVersion", "v1");
            new.set("kind", "List");
        }
        Document {
            node: new.into(),
            notes,
        }
    }

    /// Converts each template of pods in an object, wherever it is.
    fn workload(
        &mut self,
        object: &Map,
        kind: &str,
        notes: &mut Notes,
        made: &mut Vec<Node>,
    ) -> Map {
        let mut new = object.clone();
        let mut owner = Owner {
            name: meta(object, "name")
                .or(meta(object, "generateName"))
                .unwrap_or("pod")
                .trim_end_matches('-')
                .to_owned(),
            namespace: meta(object, "namespace").map(str::to_owned),
            kind: kind.to_lowercase(),
            made: Vec::new(),
            seen: Vec::new(),
        };
        self.templates_in(&mut new, "", &mut owner, notes);
        let places: Vec<&String> = owner.seen.iter().map(|(path, _)| path).collect();
        let changed = owner.seen.iter().filter(|(_, changed)| *changed);
        let changed: Vec<String> = changed.map(|(path, _)| under(path, "spec")).collect();
        if !BUILT_IN.contains(&kind) && !changed.is_empty() {
            let what =
                "is converted as a template of pods; see that the kind takes resourceClaims there";
            notes.note(&changed.join(", "), what);
        }
        if !places.iter().any(|path| path.is_empty()) {
            outside(&new, notes);
        }
        left(&Node::Map(new.clone()), "", &places, notes);
        made.append(&mut owner.made);
        new
    }

    fn templates_in(&mut self, object: &mut Map, path: &str, owner: &mut Owner, notes: &mut Notes) {
        let containers = object.get("spec").and_then(|spec| spec.at(&["containers"]));
        if containers.is_some_and(|containers| matches!(containers, Node::List(_))) {
            let mut template_of = |claim: &Claim| {
                self.requests.extend(claim.requests.iter().cloned());
                self.template(claim, owner)
            };
            let new = pod::convert(object, path, notes, &mut template_of);
            owner.seen.push((path.to_owned(), new.is_some()));
            if let Some(new) = new {
                *object = new;
            }
            return;
        }
        for (field, node) in object.iter_mut() {
            if path.is_empty() && ["metadata", "status"].contains(&field) {
                continue;
            }
            let at = under(path, field);
            match node {
                Node::Map(map) => self.templates_in(map, &at, owner, notes),
                Node::List(items) => {
                    for (number, item) in items.iter_mut().enumerate() {
                        if let Some(map) = item.map_mut() {
                            let at = format!("{at}[{number}]");
                            self.templates_in(map, &at, owner, notes);
                        }
                    }
                }
                _ => {}
            }
        }
    }

    /// Makes the template of a claim, and returns its name. The same claim of the same object needs
    /// only one.
    fn template(&mut self, claim: &Claim, owner: &mut Owner) -> String {
        let namespace = owner.namespace.as_deref();
        let first = format!("{}-gpu", owner.name);
        let others = (2..).map(|number| format!("{}-{}-gpu-{number}", owner.name, owner.kind));
        let second = format!("{}-{}-gpu", owner.name, owner.kind);
        for name in [first.clone(), second].into_iter().chain(others) {
            let template = claim.template(&name, namespace);
            let key = (namespace.unwrap_or("default").to_owned(), name.clone());
            match self.templates.get(&key) {
                Some(other) if *other == template => return name,
                Some(_) => {}
                None => {
                    self.templates.insert(key, template.clone());
                    owner.made.push(template);
                    return name;
                }
            }
        }
        first
    }
}

/// Object that templates are named after.
struct Owner {
    name: String,
    namespace: Option<String>,
    kind: String,
    /// Templates that were made for it.
    made: Vec<Node>,
    /// Templates of pods in it, by path, each with whether it was changed.
    seen: Vec<(String, bool)>,
}

/// Notes keys of these systems in the metadata of an object that is not a pod.
fn outside(object: &Map, notes: &mut Notes) {
    let Some(meta) = object.get("metadata") else {
        return;
    };
    for field in ["annotations", "labels"] {
        let all = meta.at(&[field]).and_then(Node::map);
        for (name, _) in all.into_iter().flat_map(Map::iter) {
            let at = format!("metadata.{field}[{name}]");
            if field == "annotations" && hints::asks_for_part(name) {
                notes.unknown(
                    &at,
                    "is read of pods only: move it to the template of the pods",
                );
            } else if hints::is_of_domains(name) {
                notes.note(&at, "divvy does not read it: it stays, without effect");
            }
        }
    }
}

/// Names the resources of these systems that are still there, outside of templates of pods.
fn left(node: &Node, path: &str, templates: &[&String], notes: &mut Notes) {
    if templates.iter().any(|template| *template == path) {
        return;
    }
    match node {
        Node::Map(map) => {
            for (field, value) in map.iter() {
                if path.is_empty() && ["metadata", "status"].contains(&field) {
                    continue;
                }
                if resources::is_foreign(field) {
                    let is_default = ["default", "defaultRequest"]
                        .iter()
                        .any(|list| path.ends_with(list));
                    let what = if is_default && path.starts_with("spec.limits[") {
                        "gives each container a GPU beside that of its claim: remove it; a ResourceQuota can count the claims of a class \
                         (docs/sharing.md)"
                    } else if path.starts_with("spec.limits[") {
                        "limits no claim: remove it; a ResourceQuota can count the claims of a class (docs/sharing.md)"
                    } else {
                        "is not in a template of pods: write the claim with divvy claim, and see how this kind takes \
                                resourceClaims"
                    };
                    notes.unknown(&format!("{path}[{field}]"), what);
                }
                left(value, &under(path, field), templates, notes);
            }
        }
        Node::List(items) => {
            for (number, item) in items.iter().enumerate() {
                left(item, &format!("{path}[{number}]"), templates, notes);
            }
        }
        _ => {}
    }
}

/// Lets a quota count claimed devices instead of extended resources.
fn quota(object: &Map, notes: &mut Notes) -> Map {
    let mut new = object.clone();
    let hard = new.get_mut("spec").and_then(|spec| spec.at_mut(&["hard"]));
    let Some(hard) = hard.and_then(Node::map_mut) else {
        return new;
    };
    let keys: Vec<String> = hard.iter().map(|(key, _)| key.to_owned()).collect();
    for key in keys {
        let Some((list, resource)) = key.split_once('.') else {
            continue;
        };
        if !["requests", "limits"].contains(&list) || !resources::is_foreign(resource) {
            continue;
        }
        let at = format!("spec.hard[{key}]");
        let class = match resource {
            "nvidia.com/gpu" => names::CLASS_GPU,
            "nvidia.com/gpu.shared" => names::CLASS_SHARE,
            _ => {
                let what = "a quota counts devices of a class, neither amounts nor profiles: \
                            share.divvy.dev.deviceclass.resource.k8s.io/devices counts shares, mig.divvy.dev.… partitions, \
                            mig-share.divvy.dev.… shares of them";
                notes.unknown(&at, what);
                continue;
            }
        };
        let new_key = format!("{class}{DEVICES}");
        if hard.get(&new_key).is_some() {
            hard.remove(&key);
        } else {
            hard.rename(&key, &new_key);
        }
        notes.note(&at, format!("becomes {new_key}, for claims"));
    }
    new
}
