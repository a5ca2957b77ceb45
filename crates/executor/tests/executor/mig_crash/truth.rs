//! Checks of a story: after every event, and at its end.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{Allocation, Phase, Stored};
use divvy_model::mig::{ComputeInstance, GpuInstance, Partition};
use divvy_model::{ClaimUid, GpuUuid};

use super::{GPUS, Story, overlap, slices};
use crate::mig_world::{living, mig_world, mode};
use crate::world::World;
use crate::world::accessors::{given, place_of, places_given};

/// State at the end, which must not depend on how the machine got there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct End {
    records: BTreeMap<ClaimUid, (Allocation, Phase, usize)>,
    cdi: BTreeMap<String, String>,
    /// Without what others made.
    instances: BTreeMap<GpuUuid, Vec<(Partition, usize)>>,
    /// MIG modes of GPUs that are held. (Off is lazy: an idle GPU may be left in either mode.)
    modes: BTreeMap<GpuUuid, bool>,
}

impl Story {
    /// True after every event.
    pub(super) fn check(&self) {
        for (gpu, made) in &self.foreign {
            let there: Vec<_> = living(&self.world, gpu)
                .into_iter()
                .flat_map(|(_, c)| c)
                .collect();
            for foreign in made {
                assert!(
                    there.contains(foreign),
                    "foreign {foreign:?} is gone from {gpu}: {there:?}"
                );
            }
        }
        let boot: divvy_model::BootId = format!("boot-{}", self.world.lock().boot).parse().unwrap();
        let records = self.world.lock().records();
        let api = self.world.lock().api.clone();
        let mut used = Vec::new();
        for (claim, _) in self.answered.values() {
            // A claim that is going holds what could not be removed; the rest is free.
            let left = match records.get(&claim.uid) {
                Some(Stored::Fine(record)) if matches!(record.phase, Phase::Leaving(_)) => {
                    let devices = record.devices.iter();
                    Some(
                        devices
                            .map(|device| &device.allocated.device)
                            .collect::<Vec<_>>(),
                    )
                }
                _ => None,
            };
            let results = claim.allocation.results.iter();
            let held = results.filter(|result| {
                left.as_ref()
                    .is_none_or(|left| left.contains(&&result.device))
            });
            for result in held {
                let wants = slices(&self.world, result.device.as_str());
                assert!(
                    !used.iter().any(|u| overlap(u, &wants)),
                    "{} is used twice",
                    result.device
                );
                used.push(wants);
            }
            // Allocated anew: its next prepare has undone the earlier one, and may have got no
            // further.
            let anew = api
                .get(&claim.uid)
                .is_some_and(|c| c.allocation != claim.allocation);
            if anew && !records.contains_key(&claim.uid) {
                continue;
            }
            let Some(Stored::Fine(record)) = records.get(&claim.uid) else {
                panic!("{} is in use and has no record", claim.uid)
            };
            if record.phase != Phase::Prepared || record.boot != boot {
                continue;
            }
            for device in record.devices.iter().filter(|d| place_of(d).is_some()) {
                let made = given(record, device).expect("a prepared partition is on record");
                let there = living(&self.world, &device.gpu);
                let found = there
                    .iter()
                    .flat_map(|(_, c)| c)
                    .find(|c| c.uuid == made.uuid);
                assert_eq!(
                    found.map(|c| (c.gpu_instance, c.id)),
                    Some((made.gi, made.ci)),
                    "{} of {} does not live",
                    device.allocated.device,
                    claim.uid
                );
            }
        }
    }

    pub(super) fn without_trouble(&self) -> End {
        let world = mig_world("h100x2", 0);
        let executor = world.start();
        for claim in self.world.lock().api.values() {
            world.prepare(&executor, claim).unwrap();
        }
        end(&world, &BTreeMap::new())
    }
}

pub(super) fn end(world: &World, foreign: &BTreeMap<GpuUuid, Vec<ComputeInstance>>) -> End {
    let records = world.lock().records();
    let fine: Vec<_> = records
        .values()
        .map(|stored| match stored {
            Stored::Fine(record) => record.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    let held: BTreeSet<_> = fine.iter().flat_map(divvy_claims::Record::gpus).collect();
    let instances = (0..GPUS).map(|n| world.gpu(n)).map(|gpu| {
        let theirs = |inside: &[ComputeInstance]| {
            foreign
                .get(&gpu)
                .is_some_and(|f| inside.iter().any(|c| f.contains(c)))
        };
        let ours = living(world, &gpu)
            .into_iter()
            .filter(|(_, inside)| !theirs(inside));
        let place = |(i, inside): (GpuInstance, Vec<_>)| {
            (
                Partition {
                    gpu: gpu.clone(),
                    profile: i.profile,
                    placement: i.placement,
                },
                inside.len(),
            )
        };
        let places = ours.map(place).collect();
        (gpu, places)
    });
    let cdi = world
        .lock()
        .cdi
        .clone()
        .into_iter()
        .map(|(n, b)| (n, String::from_utf8(b).unwrap()))
        .collect();
    End {
        records: fine
            .iter()
            .map(|r| {
                (
                    r.uid.clone(),
                    (r.allocation(), r.phase.clone(), places_given(r).len()),
                )
            })
            .collect(),
        cdi,
        instances: instances.collect(),
        modes: held
            .iter()
            .map(|gpu| (gpu.clone(), mode(world, gpu)))
            .collect(),
    }
}
