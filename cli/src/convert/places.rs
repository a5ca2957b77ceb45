//! Pods in objects of any kind: where a kind keeps the fields of a pod, and how it takes claims.

use super::notes::under;
use crate::yaml::{Map, Node};

mod kinds;
mod layout;

pub(super) use self::kinds::claimless;
pub(super) use self::layout::{Claims, Layout};

/// Kinds of Kubernetes itself that have a template of pods.
const BUILT_IN: [&str; 8] = [
    "PodTemplate",
    "ReplicationController",
    "ReplicaSet",
    "Deployment",
    "StatefulSet",
    "DaemonSet",
    "Job",
    "CronJob",
];

/// A pod, or a template of pods, in an object.
#[derive(Debug, Clone)]
pub(super) struct Place {
    steps: Vec<Step>,
    pub(super) layout: &'static Layout,
    /// True if the kind has its pods there, false if only their containers were recognised.
    pub(super) is_known: bool,
}

/// Way from a value to one below it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Step {
    Field(String),
    Item(usize),
}

impl Place {
    /// Returns the path of the fields that make the pod.
    pub(super) fn path(&self) -> String {
        path(&self.steps)
    }

    /// Returns the path of the pod's spec.
    pub(super) fn spec(&self) -> String {
        self.layout.field(&Map::default(), &self.path(), "spec")
    }

    /// Returns the fields that make the pod.
    pub(super) fn host<'o>(&self, object: &'o Map) -> Option<&'o Map> {
        let Some((first, rest)) = self.steps.split_first() else {
            return Some(object);
        };
        let Step::Field(first) = first else {
            return None;
        };
        let found = rest
            .iter()
            .try_fold(object.get(first)?, |node, step| match step {
                Step::Field(field) => node.map()?.get(field),
                Step::Item(number) => node.items().get(*number),
            });
        found?.map()
    }

    /// Returns the same, to change them.
    pub(super) fn host_mut<'o>(&self, object: &'o mut Map) -> Option<&'o mut Map> {
        let Some((first, rest)) = self.steps.split_first() else {
            return Some(object);
        };
        let Step::Field(first) = first else {
            return None;
        };
        let found = rest
            .iter()
            .try_fold(object.get_mut(first)?, |node, step| match step {
                Step::Field(field) => node.map_mut()?.get_mut(field),
                Step::Item(number) => node.items_mut()?.get_mut(*number),
            });
        found?.map_mut()
    }

    /// Returns the pod with `metadata` and `spec`, whatever its layout in the object.
    pub(super) fn template(&self, object: &Map) -> Option<Map> {
        self.host(object).map(|host| self.layout.template(host))
    }
}

fn path(steps: &[Step]) -> String {
    steps.iter().fold(String::new(), |path, step| match step {
        Step::Field(field) => under(&path, field),
        Step::Item(number) => format!("{path}[{number}]"),
    })
}

/// Finds the pods of an object: those that its kind is known for, and wherever else there are
/// containers. Its metadata and its status have none.
pub(super) fn of(object: &Map) -> Vec<Place> {
    let text = |field: &str| object.get(field).and_then(Node::text).unwrap_or_default();
    let (version, kind) = (text("apiVersion"), text("kind"));
    if kind == "Pod" {
        let is_pod = object.get("spec").is_some_and(|spec| spec.map().is_some());
        let pod = Place {
            steps: Vec::new(),
            layout: &Layout::TEMPLATE,
            is_known: true,
        };
        return if is_pod { vec![pod] } else { Vec::new() };
    }
    let mut found = Vec::new();
    for known in kinds::of(version, kind) {
        let pattern: Vec<&str> = known.path.split('.').collect();
        let mut steps = Vec::new();
        matches(object, &pattern, &mut steps, known.layout, &mut found);
    }
    for (field, node) in object.iter() {
        if !["apiVersion", "kind", "metadata", "status"].contains(&field) {
            let mut steps = vec![Step::Field(field.to_owned())];
            search(node, &mut steps, kind, &mut found);
        }
    }
    found
}

/// Follows a pattern of fields, in which `*` stands for each field or item.
fn matches(
    map: &Map,
    pattern: &[&str],
    steps: &mut Vec<Step>,
    layout: &'static Layout,
    found: &mut Vec<Place>,
) {
    let Some((field, rest)) = pattern.split_first() else {
        if layout.is_in(map) {
            found.push(Place {
                steps: steps.clone(),
                layout,
                is_known: true,
            });
        }
        return;
    };
    for (name, node) in map.iter() {
        if *field != "*" && *field != name {
            continue;
        }
        steps.push(Step::Field(name.to_owned()));
        match node {
            Node::Map(map) => matches(map, rest, steps, layout, found),
            Node::List(items) if rest.first() == Some(&"*") => {
                for (number, item) in items.iter().enumerate() {
                    steps.push(Step::Item(number));
                    if let Some(item) = item.map() {
                        matches(
                            item,
                            rest.get(1..).unwrap_or_default(),
                            steps,
                            layout,
                            found,
                        );
                    }
                    steps.pop();
                }
            }
            _ => {}
        }
        steps.pop();
    }
}

/// Finds pods by their containers. Places that are there are not looked into again.
fn search(node: &Node, steps: &mut Vec<Step>, kind: &str, found: &mut Vec<Place>) {
    if found.iter().any(|place| place.steps == *steps) {
        return;
    }
    match node {
        Node::Map(map) => {
            let layout = if map.get("spec").is_some_and(is_spec) {
                Some(&Layout::TEMPLATE)
            } else if is_spec(node) {
                Some(&Layout::SPEC)
            } else {
                None
            };
            if let Some(layout) = layout {
                return found.push(Place {
                    steps: steps.clone(),
                    layout,
                    is_known: BUILT_IN.contains(&kind),
                });
            }
            for (field, node) in map.iter() {
                steps.push(Step::Field(field.to_owned()));
                search(node, steps, kind, found);
                steps.pop();
            }
        }
        Node::List(items) => {
            for (number, node) in items.iter().enumerate() {
                steps.push(Step::Item(number));
                search(node, steps, kind, found);
                steps.pop();
            }
        }
        _ => {}
    }
}

/// Says whether a value has the containers of a pod.
fn is_spec(node: &Node) -> bool {
    let containers = node.at(&["containers"]).map(Node::items);
    let is_container = |item: &Node| {
        let fields = ["name", "image", "resources"];
        item.map()
            .is_some_and(|map| fields.iter().any(|field| map.get(field).is_some()))
    };
    containers.is_some_and(|all| !all.is_empty() && all.iter().all(is_container))
}
