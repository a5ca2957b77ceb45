//! Fleets of simulated nodes, in kinds: so many nodes of the same GPUs, and what each publishes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result};
use divvy_api::policy::GpuPolicy;
use divvy_cli::offered::{Offered, offered};
use divvy_fleet::Kind;
use divvy_gpu_sim::SimNode;
use divvy_offer::{GpuRules, NodeFacts};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::world::LABELS;

/// Name of the node that stands for all of a kind.
const NODE: &str = "node";
/// The most nodes of a fleet.
const MOST_NODES: usize = 100_000;

/// The argument of `--sim`: `40*h100x8,10*l40sx4`, with `+` between the boards of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spec(pub(crate) Vec<(usize, String)>);

impl FromStr for Spec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut kinds = Vec::new();
        for part in text.split(',').map(str::trim) {
            let (count, gpus) = match part.split_once('*') {
                Some((count, gpus)) => {
                    let count = count.trim().parse().ok().filter(|count| *count > 0);
                    let wrong = format!("{part:?}: write nodes*GPUs, such as 40*h100x8");
                    (count.ok_or(wrong)?, gpus)
                }
                None => (1, part),
            };
            kinds.push((count, crate::boards::simulated(&gpus.replace('+', ","))?));
        }
        let nodes = kinds
            .iter()
            .fold(0_usize, |sum, (count, _)| sum.saturating_add(*count));
        if nodes > MOST_NODES {
            return Err(format!("{nodes} nodes are too many, {MOST_NODES} at most"));
        }
        Ok(Self(kinds))
    }
}

/// The kinds of a fleet, and what is to be said of the policies.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    pub(crate) kinds: Vec<Kind>,
    pub(crate) notes: Vec<String>,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (count, gpus)) in self.0.iter().enumerate() {
            let comma = if number > 0 { "," } else { "" };
            write!(f, "{comma}{count}*{}", gpus.replace(',', "+"))?;
        }
        Ok(())
    }
}

impl Spec {
    /// Works out what the nodes publish under policies.
    pub(crate) fn nodes(
        &self,
        driver: &str,
        policies: &[GpuPolicy],
        labels: &[(String, String)],
    ) -> Result<Fleet> {
        let mut all: BTreeMap<String, String> = labels.iter().cloned().collect();
        let usual = LABELS.map(|(key, value)| (key.to_owned(), value.to_owned()));
        all.extend(usual);
        let facts = NodeFacts {
            name: NODE,
            labels: &all,
        };
        let mut fleet = Fleet::default();
        let mut by_kind = Vec::new();
        for (count, gpus) in &self.0 {
            let node = SimNode::parse(gpus).with_context(|| format!("--sim {gpus}"))?;
            let Offered { pool, notes, .. } =
                offered(&node.inventory(), &facts, policies, &GpuRules::default());
            let specs = divvy_controller::specs(driver, NODE, &pool).into_iter();
            let slices = specs.enumerate().map(|(index, spec)| ResourceSlice {
                metadata: ObjectMeta {
                    name: Some(divvy_controller::slice_name(index, driver, NODE)),
                    ..ObjectMeta::default()
                },
                spec,
            });
            fleet.kinds.push(Kind {
                name: gpus.replace(',', "+"),
                count: *count,
                node: Node {
                    metadata: ObjectMeta {
                        name: Some(NODE.to_owned()),
                        labels: Some(all.clone()),
                        ..ObjectMeta::default()
                    },
                    ..Node::default()
                },
                slices: slices.collect(),
                ..Kind::default()
            });
            by_kind.push(notes);
        }
        fleet.notes = joined(&by_kind);
        Ok(fleet)
    }
}

/// Returns the notes of all kinds. A policy without effect is one only where it has none anywhere.
fn joined(by_kind: &[Vec<String>]) -> Vec<String> {
    let all: BTreeSet<&String> = by_kind.iter().flatten().collect();
    let everywhere = |note: &&&String| by_kind.iter().all(|notes| notes.contains(note));
    let counts = |note: &&&String| !note.contains("has no effect on node") || everywhere(note);
    all.iter()
        .filter(counts)
        .map(|note| (*note).clone())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fleets_are_written_as_counts_of_nodes() {
        let spec = |text: &str| text.parse::<Spec>().map(|spec| spec.0);
        assert_eq!(
            spec("40*h100x8, 10*L40Sx4+l4"),
            Ok(vec![
                (40, "h100x8".to_owned()),
                (10, "l40sx4,l4x1".to_owned())
            ])
        );
        assert_eq!(spec("h100"), Ok(vec![(1, "h100".to_owned())]));
        for (text, says) in [
            ("0*h100x8", "write nodes*GPUs"),
            ("x*h100x8", "write nodes*GPUs"),
            ("40*nothing", "known models"),
            ("100001*h100", "too many"),
        ] {
            assert!(spec(text).unwrap_err().contains(says), "{text}");
        }
    }

    #[test]
    fn a_policy_for_one_kind_of_node_is_not_without_effect() {
        let notes = [
            vec![
                "GpuPolicy a has no effect on node node".to_owned(),
                "odd".to_owned(),
            ],
            vec!["GpuPolicy b has no effect on node node".to_owned()],
        ];
        assert_eq!(joined(&notes), ["odd"]);
        let twice = [notes[1].clone(), notes[1].clone()];
        assert_eq!(joined(&twice), notes[1]);
    }
}
