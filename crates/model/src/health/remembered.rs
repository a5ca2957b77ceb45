//! Faults that a process that starts later cannot read from the driver: those known from events,
//! and bad memory, which a GPU does not report while it has MIG instances.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Ailment, GpuHealth, HealthBook, Illness};
use crate::GpuUuid;
use crate::mig::GpuInstanceId;

/// Faults of a GPU that a later process cannot read, and that are not over. Valid for the boot in
/// which they occurred: a reboot resets a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Remembered {
    /// Ailments of the whole GPU.
    pub ailments: BTreeSet<Ailment>,
    /// Ailments of single GPU instances.
    pub partitions: BTreeMap<GpuInstanceId, BTreeSet<Ailment>>,
    /// It was away since: all of this is over as soon as it answers often enough.
    pub away: bool,
}

impl HealthBook {
    /// Returns what a later process needs to know, by GPU; GPUs without such faults are left out.
    pub fn remembered(&self) -> BTreeMap<GpuUuid, Remembered> {
        let known = |ailments: &super::Ailments| -> BTreeSet<Ailment> {
            ailments
                .keys()
                .copied()
                .filter(|ailment| ailment.outlasts_process())
                .collect()
        };
        let of = |gpu: &GpuHealth| Remembered {
            ailments: known(&gpu.ailments),
            partitions: gpu
                .partitions
                .iter()
                .map(|(id, ailments)| (*id, known(ailments)))
                .filter(|(_, ailments)| !ailments.is_empty())
                .collect(),
            away: gpu.was_away,
        };
        let all = self.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), of(gpu)));
        all.filter(|(_, known)| !known.ailments.is_empty() || !known.partitions.is_empty())
            .collect()
    }

    /// Takes in what an earlier process of the same boot remembered, as if it had been seen now.
    pub fn remember(&mut self, now: Duration, earlier: BTreeMap<GpuUuid, Remembered>) {
        let ill = |ailments: BTreeSet<Ailment>| {
            // Seen now, so that the wait for recovery begins anew: polls of the earlier process are
            // not known.
            let since = |ailment| {
                (
                    ailment,
                    Illness {
                        since: now,
                        seen: now,
                        good_polls: 0,
                    },
                )
            };
            ailments
                .into_iter()
                // The driver is asked for all others, whatever the file says.
                .filter(|ailment| ailment.outlasts_process())
                .map(since)
                .collect()
        };
        for (
            uuid,
            Remembered {
                ailments,
                partitions,
                away,
            },
        ) in earlier
        {
            let gpu = self.gpus.entry(uuid).or_default();
            gpu.ailments = ill(ailments);
            gpu.partitions = partitions
                .into_iter()
                .map(|(id, ailments)| (id, ill(ailments)))
                .collect();
            gpu.was_away = away;
        }
    }
}
