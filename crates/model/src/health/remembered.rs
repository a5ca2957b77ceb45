//! What a process that starts later cannot ask a driver: what GPUs have told by events.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Ailment, GpuHealth, HealthBook, Illness};
use crate::GpuUuid;
use crate::mig::GpuInstanceId;

/// What a GPU has told by events and is not over. Good for the boot in which it was told: a GPU is reset by a reboot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Remembered {
    /// Of the whole GPU.
    pub ailments: BTreeSet<Ailment>,
    /// Of single GPU instances.
    pub partitions: BTreeMap<GpuInstanceId, BTreeSet<Ailment>>,
    /// It was away since: all of this is over as soon as it answers often enough.
    pub away: bool,
}

impl HealthBook {
    /// What a later process has to be told, by GPU; of GPUs that events have said nothing about, nothing.
    pub fn remembered(&self) -> BTreeMap<GpuUuid, Remembered> {
        let told = |ailments: &super::Ailments| -> BTreeSet<Ailment> {
            ailments.keys().copied().filter(|ailment| ailment.is_of_a_moment()).collect()
        };
        let of = |gpu: &GpuHealth| Remembered {
            ailments: told(&gpu.ailments),
            partitions: gpu
                .partitions
                .iter()
                .map(|(id, ailments)| (*id, told(ailments)))
                .filter(|(_, ailments)| !ailments.is_empty())
                .collect(),
            away: gpu.was_away,
        };
        let all = self.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), of(gpu)));
        all.filter(|(_, told)| !told.ailments.is_empty() || !told.partitions.is_empty()).collect()
    }

    /// Takes in what an earlier process of the same boot remembered, as if it had been seen now.
    pub fn remember(&mut self, now: Duration, earlier: BTreeMap<GpuUuid, Remembered>) {
        let ill = |ailments: BTreeSet<Ailment>| {
            let since = |ailment| (ailment, Illness { since: now, seen: now, good_polls: 0 });
            ailments.into_iter().filter(|ailment| ailment.is_of_a_moment()).map(since).collect()
        };
        for (uuid, Remembered { ailments, partitions, away }) in earlier {
            let gpu = self.gpus.entry(uuid).or_default();
            gpu.ailments = ill(ailments);
            gpu.partitions = partitions.into_iter().map(|(id, ailments)| (id, ill(ailments))).collect();
            gpu.was_away = away;
        }
    }
}
