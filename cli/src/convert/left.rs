//! Resources that ask for GPUs outside of the pods that were converted.

use super::notes::{Notes, under};
use super::resources;
use crate::yaml::{Map, Node};

/// Maps whose keys are no resources.
const NO_AMOUNTS: [&str; 6] = [
    "annotations",
    "labels",
    "matchLabels",
    "nodeLabels",
    "nodeSelector",
    "selector",
];

/// Names the resources of other systems that are still there, outside of these pods.
///
/// `claimless` is why the pods of the kind have no claims, if it is known.
pub(super) fn notes(
    object: &Map,
    pods: &[String],
    claimless: Option<&'static str>,
    notes: &mut Notes,
) {
    let mut left = Left {
        pods,
        claimless,
        notes,
    };
    for (field, node) in object.iter() {
        if !["apiVersion", "kind", "metadata", "status"].contains(&field) {
            left.node(node, field);
        }
    }
}

struct Left<'n> {
    pods: &'n [String],
    claimless: Option<&'static str>,
    notes: &'n mut Notes,
}

impl Left<'_> {
    fn node(&mut self, node: &Node, path: &str) {
        if self.pods.iter().any(|pod| pod.is_empty() || pod == path) {
            return;
        }
        match node {
            Node::Map(map) => {
                let last = path.rsplit('.').next().unwrap_or_default();
                let has_amounts = !NO_AMOUNTS.contains(&last);
                for (field, value) in map.iter() {
                    let is_amount = value.scalar().is_some_and(|n| !n.is_empty());
                    if has_amounts && is_amount && resources::is_foreign(field) {
                        self.resource(path, field);
                    }
                    self.node(value, &under(path, field));
                }
            }
            Node::List(items) => {
                for (number, item) in items.iter().enumerate() {
                    self.node(item, &format!("{path}[{number}]"));
                }
            }
            _ => {}
        }
    }

    fn resource(&mut self, path: &str, resource: &str) {
        let at = format!("{path}[{resource}]");
        if path.starts_with("spec.limits[") {
            let is_default = path.ends_with("default") || path.ends_with("defaultRequest");
            let what = if is_default {
                "gives each container a GPU beside that of its claim: remove it; a ResourceQuota can count the claims of a class \
                 (docs/sharing.md)"
            } else {
                "limits no claim: remove it; a ResourceQuota can count the claims of a class (docs/sharing.md)"
            };
            return self.notes.unknown(&at, what);
        }
        let why = self.claimless.unwrap_or(
            "no pod with containers is there, and convert does not know how the kind takes claims",
        );
        if resources::stands(resource) {
            let what = format!("{why}; it stays, and needs Kubernetes 1.36 or later");
            self.notes.note(&at, what);
        } else {
            let what = format!(
                "{why}: write the claim with divvy claim, and see how this kind takes resourceClaims"
            );
            self.notes.unknown(&at, what);
        }
    }
}
