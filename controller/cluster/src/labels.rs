//! Labels of nodes, worked out of their GpuNodes. Pure: what a node is to have, and which of it is
//! this controller's to write. `writer` reads and writes.
//!
//! A label belongs to the managers that have it in `metadata.managedFields`. Labels that are there
//! and not, or not only, this controller's stay as they are: GPU Feature Discovery writes the same
//! ones.

mod writer;

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::{FIELD_MANAGER_LABELS, node_labels as names};
use divvy_api::node::{GpuNodeStatus, GpuStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use serde_json::Value;

pub(crate) use writer::Writer;

/// Length of a label's value that the API takes.
const MAX_VALUE: usize = 63;

/// A label as its node is to have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Label that is there with this value.
    Is(String),
    /// Without the label.
    Gone,
    /// Unchanged, since its value cannot be read at the moment.
    Kept,
}

/// Labels by their names.
pub(crate) type Labels = BTreeMap<String, String>;

/// Works out the labels of a node.
///
/// Labels about the GPUs have what all of them have in common, and are absent where they differ.
/// While one of them cannot be read, such labels stay.
pub(crate) fn wanted(report: Option<&GpuNodeStatus>) -> BTreeMap<&'static str, Wanted> {
    let gpus = report.map_or(&[][..], |report| &report.gpus);
    let mut all: BTreeMap<_, _> = names::ALL
        .into_iter()
        .map(|name| (name, Wanted::Gone))
        .collect();
    let Some(report) = report.filter(|_| !gpus.is_empty()) else {
        return all;
    };
    let is_unread = gpus.iter().any(|gpu| gpu.product.is_empty());
    let mut of_gpus = |name, value: &dyn Fn(&GpuStatus) -> Option<String>| {
        let wanted = if is_unread {
            Wanted::Kept
        } else {
            common(gpus, value)
        };
        all.insert(name, wanted);
    };
    of_gpus(names::PRODUCT, &|gpu| label(&gpu.product));
    // Of a mixed node it would be read as the number of the product that is named.
    let is_mixed = gpus
        .iter()
        .any(|gpu| Some(&gpu.product) != gpus.first().map(|first| &first.product));
    of_gpus(names::COUNT, &|_| {
        (!is_mixed).then(|| gpus.len().to_string())
    });
    of_gpus(names::MEMORY, &|gpu| Some(gpu.memory_mib?.to_string()));
    of_gpus(names::FAMILY, &|gpu| family(gpu));
    of_gpus(names::COMPUTE_MAJOR, &|gpu| {
        Some(compute(gpu)?.0.to_string())
    });
    of_gpus(names::COMPUTE_MINOR, &|gpu| {
        Some(compute(gpu)?.1.to_string())
    });
    of_gpus(names::CLIQUE, &|gpu| label(&gpu.fabric));
    of_gpus(names::NVLINK_DOMAIN, &|gpu| label(&gpu.nvlink_domain));
    let any_mig = gpus.iter().any(|gpu| gpu.mig_capable == Some(true));
    let mig = if any_mig || !is_unread {
        Wanted::Is(any_mig.to_string())
    } else {
        Wanted::Kept
    };
    all.insert(names::MIG_CAPABLE, mig);
    let parts: Vec<&str> = report.versions.driver.split('.').collect();
    let is_version =
        (2..=3).contains(&parts.len()) && parts.iter().all(|part| part.parse::<u64>().is_ok());
    let versions = [
        (names::DRIVER, Some(&*report.versions.driver)),
        (names::DRIVER_MAJOR, parts.first().copied()),
        (names::DRIVER_MINOR, parts.get(1).copied()),
        (
            names::DRIVER_REVISION,
            Some(parts.get(2).copied().unwrap_or_default()),
        ),
    ];
    for (name, part) in versions {
        let value = part.filter(|_| is_version);
        all.insert(
            name,
            value.map_or(Wanted::Kept, |value| Wanted::Is(value.to_owned())),
        );
    }
    all
}

/// Returns the value that all GPUs have.
fn common(gpus: &[GpuStatus], value: &dyn Fn(&GpuStatus) -> Option<String>) -> Wanted {
    let mut values: BTreeSet<Option<String>> = gpus.iter().map(value).collect();
    match (values.pop_first(), values.is_empty()) {
        (Some(Some(value)), true) => Wanted::Is(value),
        _ => Wanted::Gone,
    }
}

/// Returns a text as the value of a label, as GPU Feature Discovery writes products: blanks are
/// dashes, and what a label cannot have is left out.
fn label(text: &str) -> Option<String> {
    let kept = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ' ');
    let plain: String = text.chars().filter(kept).collect();
    let joined = plain.split_whitespace().collect::<Vec<_>>().join("-");
    let cut = joined.get(..MAX_VALUE).unwrap_or(&joined);
    let value = cut.trim_matches(|c: char| !c.is_ascii_alphanumeric());
    (!value.is_empty()).then(|| value.to_owned())
}

/// Returns the architecture as GPU Feature Discovery names it.
fn family(gpu: &GpuStatus) -> Option<String> {
    match compute(gpu)? {
        (7, ..5) => Some("volta".to_owned()),
        (7, _) => Some("turing".to_owned()),
        (8, ..9) => Some("ampere".to_owned()),
        (8, _) => Some("ada-lovelace".to_owned()),
        _ => label(&gpu.architecture.to_lowercase()),
    }
}

fn compute(gpu: &GpuStatus) -> Option<(u32, u32)> {
    let (major, minor) = gpu.compute_capability.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Labels to write of a node, and labels of other managers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decision {
    /// The labels to apply, which replace those of the last apply; `None`: they are as they are to
    /// be.
    pub(crate) apply: Option<Labels>,
    /// Labels of others with another value than would be written, with that and theirs.
    pub(crate) left: Vec<Left>,
}

/// A label of another manager.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Left {
    pub(crate) name: &'static str,
    pub(crate) theirs: String,
    pub(crate) ours: String,
    /// Names of those who have it, as far as the API server knows them.
    pub(crate) managers: String,
}

/// Decides which of the wanted labels are written.
pub(crate) fn decide(
    labels: &Labels,
    managed: &[ManagedFieldsEntry],
    wanted: &BTreeMap<&'static str, Wanted>,
) -> Decision {
    let is_ours = |entry: &&ManagedFieldsEntry| {
        entry.manager.as_deref() == Some(FIELD_MANAGER_LABELS)
            && entry.operation.as_deref() == Some("Apply")
    };
    let has = |entry: &ManagedFieldsEntry, name: &str| {
        let fields = entry.fields_v1.as_ref();
        fields.is_some_and(|fields| has_label(&fields.0, name))
    };
    let mut ours = Labels::new();
    let mut current = Labels::new();
    let mut left = Vec::new();
    for (name, wanted) in wanted {
        let found = labels.get(*name);
        let is_mine = managed.iter().filter(is_ours).any(|entry| has(entry, name));
        if is_mine {
            current.insert((*name).to_owned(), found.cloned().unwrap_or_default());
        }
        let mut others = managed
            .iter()
            .filter(|entry| !is_ours(entry) && has(entry, name))
            .peekable();
        let is_theirs = others.peek().is_some() || (found.is_some() && !is_mine);
        match (wanted, found) {
            (Wanted::Is(ours), Some(theirs)) if is_theirs => {
                if ours != theirs {
                    let managers = others.filter_map(|entry| entry.manager.clone());
                    let managers: BTreeSet<String> = managers.collect();
                    left.push(Left {
                        name,
                        theirs: theirs.clone(),
                        ours: ours.clone(),
                        managers: managers.into_iter().collect::<Vec<_>>().join(", "),
                    });
                }
            }
            (Wanted::Is(value), _) => {
                ours.insert((*name).to_owned(), value.clone());
            }
            (Wanted::Kept, Some(value)) if is_mine && !is_theirs => {
                ours.insert((*name).to_owned(), value.clone());
            }
            (Wanted::Kept | Wanted::Gone, _) => {}
        }
    }
    Decision {
        apply: (ours != current).then_some(ours),
        left,
    }
}

/// Returns whether a set of fields has a label.
fn has_label(fields: &Value, name: &str) -> bool {
    let labels = fields
        .get("f:metadata")
        .and_then(|metadata| metadata.get("f:labels"));
    labels.is_some_and(|labels| labels.get(format!("f:{name}")).is_some())
}

/// Leaves of a Node's metadata only what decides here.
pub(crate) fn shorten(labels: &mut Option<Labels>, managed: &mut Option<Vec<ManagedFieldsEntry>>) {
    if let Some(labels) = labels {
        labels.retain(|name, _| names::ALL.contains(&name.as_str()));
    }
    let Some(managed) = managed else { return };
    managed.retain_mut(|entry| {
        let Some(fields) = &mut entry.fields_v1 else {
            return false;
        };
        let has = names::ALL
            .into_iter()
            .filter(|name| has_label(&fields.0, name));
        let has: serde_json::Map<String, Value> = has
            .map(|name| (format!("f:{name}"), Value::Object(serde_json::Map::new())))
            .collect();
        let is_any = !has.is_empty();
        fields.0 = serde_json::json!({"f:metadata": {"f:labels": has}});
        is_any
    });
}

#[cfg(test)]
mod tests;
