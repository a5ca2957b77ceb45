//! Objects of a file: which of their parts ask for GPUs, and where the new templates go.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names;

use super::Settings;
use super::notes::{Note, Notes};
use super::places::{self, Claims, Place};
use super::resources::Part;
use super::{beside, configs, dra, hints, left, nim, pod, ray, resources};
use crate::claim::template::{Claim, Request};
use crate::comments::Comments;
use crate::yaml::{self, Map, Node};

/// Key of a ResourceQuota that counts the devices of a class.
const DEVICES: &str = ".deviceclass.resource.k8s.io/devices";

/// A document of the output, with the notes about it.
#[derive(Debug)]
pub(crate) struct Document {
    pub(crate) node: Node,
    pub(crate) notes: Vec<Note>,
    /// Comments of the document that it was.
    pub(super) comments: Comments,
    /// Number of that document in the input.
    pub(super) origin: usize,
}

impl Document {
    fn of(node: Node, notes: Vec<Note>) -> Self {
        Self {
            node,
            notes,
            comments: Comments::default(),
            origin: 0,
        }
    }

    /// Writes the document with its comments.
    pub(super) fn text(&self) -> anyhow::Result<String> {
        Ok(self.comments.put(&yaml::text(&self.node)?))
    }
}

/// Converts the objects of one input, whose names must not clash.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Templates by namespace and name: those of the input, and those that were made.
    templates: BTreeMap<(String, String), Node>,
    /// Claims of the input in the same way.
    claims: BTreeMap<(String, String), Node>,
    classes: BTreeSet<String>,
    /// Classes of the input with MPS.
    served: BTreeSet<String>,
    /// Requests of all claims that were made.
    pub(super) requests: Vec<Request>,
    /// Pods with a claim: true if classes stand for all that the pod asked for.
    pub(super) stand: Vec<bool>,
    /// Parts of a GPU that were made one number.
    pub(super) parts: Vec<Part>,
    settings: Settings,
}

/// Returns a text of an object's metadata.
fn meta<'o>(object: &'o Map, field: &str) -> Option<&'o str> {
    object
        .get("metadata")?
        .text_at(&[field])
        .filter(|text| !text.is_empty())
}

/// Makes documents, of which the first has the notes: they are read first.
fn documents(objects: Vec<Node>, report: Notes) -> Vec<Document> {
    let mut notes = Some(report.into_all());
    let with_notes = |node| Document::of(node, notes.take().unwrap_or_default());
    objects.into_iter().map(with_notes).collect()
}

impl Objects {
    /// Takes note of the templates that the input has already.
    pub(super) fn of(documents: &[Node], settings: Settings) -> Self {
        let mut objects = Self {
            settings,
            ..Self::default()
        };
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
            if object.get("spec").is_some_and(beside::has_server) {
                self.served.insert(name.to_owned());
            }
        }
        let namespace = meta(object, "namespace").unwrap_or("default");
        let key = (namespace.to_owned(), name.to_owned());
        match node.text_at(&["kind"]) {
            Some("ResourceClaimTemplate") => drop(self.templates.insert(key, node.clone())),
            Some("ResourceClaim") => drop(self.claims.insert(key, node.clone())),
            _ => {}
        }
    }

    /// Converts one document; the templates of its claims come before it, in a list as well.
    pub(super) fn convert(&mut self, node: Node) -> Vec<Document> {
        let Some(object) = node.map() else {
            return vec![Document::of(node, Vec::new())];
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
            "" => String::new(),
            "DeviceClass" | "DeviceTaintRule" => format!("{kind} {name}"),
            _ => format!("{kind} {namespace}/{name}"),
        });
        let mut made = Vec::new();
        let new = if let Some(policies) = configs::convert(object, &mut notes) {
            return documents(policies, notes);
        } else if dra::is_kind(&version, &kind) {
            dra::convert(object, &kind, &self.classes, &mut notes)
        } else if (version.as_str(), kind.as_str()) == ("v1", "ResourceQuota") {
            Some(quota(object, &mut notes))
        } else {
            Some(self.workload(object, (&version, &kind), &mut notes, &mut made))
        };
        made.push(new.map_or(node, Node::Map));
        documents(made, notes)
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
        Document::of(new.into(), notes)
    }

    /// Converts each pod in an object, wherever it is.
    fn workload(
        &mut self,
        object: &Map,
        (version, kind): (&str, &str),
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
        };
        nim::convert(&mut new, notes);
        let claimless = places::claimless(version, kind);
        let places = if claimless.is_some() {
            Vec::new()
        } else {
            places::of(&new)
        };
        let mut guessed = Vec::new();
        for place in &places {
            let changed = self.pod(&mut new, place, &mut owner, notes);
            if changed && !place.is_known {
                guessed.push(place.spec());
            }
        }
        if !guessed.is_empty() {
            let what =
                "is converted as a template of pods; see that the kind takes resourceClaims there";
            notes.note(&guessed.join(", "), what);
        }
        let paths: Vec<String> = places.iter().map(Place::path).collect();
        if !paths.iter().any(String::is_empty) {
            outside(&new, notes);
        }
        left::notes(&new, &paths, claimless, notes);
        made.append(&mut owner.made);
        new
    }

    /// Converts the pod at a place, and says whether something was converted.
    fn pod(
        &mut self,
        object: &mut Map,
        place: &Place,
        owner: &mut Owner,
        notes: &mut Notes,
    ) -> bool {
        let Some((old, template)) = place.host(object).cloned().zip(place.template(object)) else {
            return false;
        };
        let at = place.path();
        let (mut stands, settings) = (true, self.settings);
        let new = notes.at(
            |field| place.layout.field(&old, &at, field),
            |notes| {
                let mut template_of = |asked: pod::Asked| {
                    self.requests.extend(asked.claim.requests.iter().cloned());
                    self.parts.extend(asked.parts.iter().copied());
                    stands &= asked.stands;
                    self.template(&asked.claim, owner)
                };
                pod::convert(&template, settings, notes, &mut template_of)
            },
        );
        let after = new.as_ref().unwrap_or(&template);
        notes.at(
            |field| place.layout.field(&old, &at, field),
            |notes| beside::memory(after, |entry| self.is_served(entry, owner), notes),
        );
        let Some((new, host)) = new.zip(place.host_mut(object)) else {
            return false;
        };
        place.layout.put(host, new);
        if place.layout.claims == Claims::Ray {
            ray::count(host, &template, &at, notes);
        }
        self.stand.push(stands);
        true
    }

    /// Says whether an entry of a pod's claims asks for MPS.
    fn is_served(&self, entry: &Node, owner: &Owner) -> bool {
        let namespace = owner.namespace.as_deref().unwrap_or("default");
        let find = |field: &str, all: &BTreeMap<(String, String), Node>, path: &[&str]| {
            let name = entry.text_at(&[field])?;
            let found = all.get(&(namespace.to_owned(), name.to_owned()))?;
            let devices = found.at(path)?;
            Some(beside::asks_for_mps(devices, |class| {
                self.served.contains(class)
            }))
        };
        let by_template = find(
            "resourceClaimTemplateName",
            &self.templates,
            &["spec", "spec", "devices"],
        );
        let by_name = find("resourceClaimName", &self.claims, &["spec", "devices"]);
        by_template.or(by_name) == Some(true)
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
