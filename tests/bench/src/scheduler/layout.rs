//! What nodes publish.

use std::collections::BTreeSet;

use anyhow::Result;
use divvy_carve::{Offer, PartitionRules};
use divvy_model::mig::ProfileVariant;
use serde::{Deserialize, Serialize};

use super::world::Asked;
use crate::offered::Offered;

/// What all GPUs are offered as.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) name: String,
    /// Whether the budget is meant for it.
    pub(crate) judged: bool,
    partitions: bool,
    /// The rare profiles, too.
    rare: bool,
}

/// Whole GPUs only, and what is added to them.
pub(crate) fn standard() -> Vec<Layout> {
    let layout =
        |name: &str, judged, partitions, rare| Layout { name: name.to_owned(), judged, partitions, rare };
    vec![
        layout("whole", false, false, false),
        layout("whole+mig", true, true, false),
        layout("whole+mig+rare", false, true, true),
    ]
}

/// Whole GPUs only, and one profile added to them.
pub(crate) fn profiles(_gpus: &str) -> Result<Vec<Layout>> {
    anyhow::bail!("not yet")
}

impl Layout {
    /// A node with these GPUs.
    pub(crate) fn offered(&self, gpus: &str, version: &str) -> Result<Offered> {
        let mut rules = PartitionRules::default();
        if self.partitions {
            rules.offer = Offer::Both;
        }
        if self.rare {
            rules.rare = BTreeSet::from([
                ProfileVariant::Media,
                ProfileVariant::AllMedia,
                ProfileVariant::NoMedia,
                ProfileVariant::Graphics,
            ]);
        }
        Offered::new(gpus, &rules, version)
    }

    /// What can be asked for.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        let mut asked = vec![Asked::Whole];
        if self.partitions {
            asked.push(Asked::Partition);
        }
        asked
    }
}
