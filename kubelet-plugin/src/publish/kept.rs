//! What the numbers, records and neighbours of the node keep from being offered, read on a thread for each look.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_api::names::taints as keys;
use divvy_carve::{Instances, Resolved, Taint};
use divvy_claims::{Fence, Head, Phase};
use divvy_executor::HeldDevice;
use divvy_model::mig::Placement;
use divvy_model::{ClaimUid, DeviceKind, DeviceName, GpuUuid, HoldKind, Inventory, Ordinals};

use super::{Carver, Memory};
use crate::health::view::HealthView;
use crate::holders::recorded;
use crate::metrics::PHASES;
use crate::neighbours::Use;
use crate::occupied::{Occupied, Places};

/// Numbers, taints, and what is counted, read from the records on a thread.
pub(super) struct Kept {
    pub(super) ordinals: Ordinals,
    pub(super) taints: BTreeMap<GpuUuid, Vec<Taint>>,
    /// What lingers; what others have made comes to it.
    pub(super) occupied: Occupied,
    /// Devices in use.
    pub(super) recorded: BTreeSet<DeviceName>,
    /// What others have made.
    pub(super) foreign: Vec<(GpuUuid, Placement)>,
    /// Whether something here may be different in a moment, and nobody would tell: what others have made was found out a
    /// moment ago, or a claim is being let go, which the other instance of an update may be doing.
    pub(super) look_soon: bool,
    pub(super) phases: [i64; PHASES.len()],
    pub(super) held: Vec<HeldDevice>,
    /// Claims that were let go, are not gone, and are not being worked on.
    pub(super) lingering: BTreeSet<ClaimUid>,
    pub(super) fenced: usize,
    pub(super) fences: BTreeMap<GpuUuid, Vec<Fence>>,
    pub(super) newer: BTreeMap<ClaimUid, Head>,
}

impl Kept {
    /// Adds the taints of what is ill.
    pub(super) fn add_health(
        &mut self,
        health: &HealthView,
        inventory: &Inventory,
        evicts: impl Fn(&GpuUuid) -> bool,
    ) {
        for (gpu, taints) in health.taints(&evicts) {
            self.taints.entry(gpu).or_default().extend(taints);
        }
        for (gpu, place, taint) in health.places(&evicts) {
            self.occupied.0.entry(gpu.clone()).or_default().push((place, taint));
        }
        // One that is not listed any more may be lost or have been taken out: until that is known it is taken for lost,
        // so that its devices do not come and go.
        let listed = |gpu: &GpuUuid| {
            inventory.gpus.contains_key(gpu) || inventory.problems.iter().any(|problem| problem.gpu == *gpu)
        };
        let lost: Vec<GpuUuid> = self
            .ordinals
            .iter()
            .map(|(gpu, _)| gpu)
            .filter(|gpu| !listed(gpu) && !health.removed.contains(*gpu) && !health.sick.contains_key(*gpu))
            .cloned()
            .collect();
        for gpu in lost {
            taint(&mut self.taints, &gpu, keys::LOST);
        }
    }
}

impl Carver {
    /// Numbers new GPUs, forgets those long gone, and reads what the records say.
    pub(super) async fn kept(
        &self,
        inventory: Option<&Arc<Inventory>>,
        driver_down: bool,
        memory: &Memory,
    ) -> Result<Kept, String> {
        let present: Option<Vec<_>> = inventory
            .map(|i| i.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)).collect());
        // A number may be referred to as long as its device may be allocated: a while after it was withdrawn, and
        // for as long as a claim in the API holds it.
        let patience = self.timing.withdrawn * 10;
        let gone: BTreeSet<GpuUuid> = memory
            .gone
            .iter()
            .filter(|(_, since)| since.elapsed() > patience)
            .map(|(gpu, _)| gpu.clone())
            .collect();
        let held = memory.holders.held.as_ref().map(|(_, held)| held.clone());
        let (executor, inventory) = (self.executor.clone(), inventory.cloned());
        let (busy, foreign) = (self.busy.clone(), self.foreign.clone());
        let neighbours = self.neighbours.borrow().clone();
        let read = tokio::task::spawn_blocking(move || {
            let keep = |gpu: &GpuUuid, ordinal: u32| {
                let of_it =
                    |device: &DeviceName| DeviceKind::parse(device).is_ok_and(|d| d.ordinal() == ordinal);
                !gone.contains(gpu) || held.as_ref().is_none_or(|held| held.iter().any(of_it))
            };
            let ordinals = match present {
                Some(present) => executor.number_gpus(&present, &keep).map_err(|e| crate::chain(&e))?,
                None => executor.ordinals().map_err(|e| crate::chain(&e))?,
            };
            // Work that ends while records are read counts as running: they may be read as they were before its end.
            let mut working = busy();
            let records = executor.held().map_err(|e| crate::chain(&e))?;
            working.append(&mut busy());
            let mut taints = BTreeMap::<GpuUuid, Vec<Taint>>::new();
            let mut occupied = Occupied::default();
            let mut lingering = BTreeSet::new();
            let leaving = || records.iter().filter(|record| matches!(record.phase, Phase::Leaving(_)));
            for record in leaving().filter(|record| !working.contains(&record.claim.uid)) {
                lingering.insert(record.claim.uid.clone());
                // What lingers in a partition is in the way of what overlaps it, not of its neighbours.
                match record.hold.kind {
                    HoldKind::Partition { placement, .. } => {
                        occupied.add(&record.hold.gpu, placement, keys::LINGERING);
                    }
                    HoldKind::Whole | HoldKind::Share | HoldKind::Admin => {
                        taint(&mut taints, &record.hold.gpu, keys::LINGERING);
                    }
                }
            }
            for (gpu, uses) in &*neighbours {
                // One taint of a key is enough; what others have given out weighs more than who is seen there.
                let value = uses.first().map(Use::label);
                taints.entry(gpu.clone()).or_default().push(Taint::no_schedule(keys::NEIGHBOUR, value));
            }
            for gpu in inventory.iter().flat_map(|inventory| inventory.gpus.keys()).filter(|_| driver_down) {
                taint(&mut taints, gpu, keys::DRIVER_DOWN);
            }
            let (foreign, stale) = foreign.look(&executor, inventory.as_deref(), &records);
            let mut fenced = BTreeSet::new();
            let open = executor.fences().map_err(|e| crate::chain(&e))?;
            for gpu in open.keys() {
                taint(&mut taints, gpu, keys::FENCED);
                fenced.insert(gpu.clone());
            }
            let newer = executor.fenced_by_newer().map_err(|e| crate::chain(&e))?;
            for head in newer.values() {
                for gpu in &head.gpus {
                    taint(&mut taints, gpu, keys::FENCED);
                    fenced.insert(gpu.clone());
                }
            }
            Ok(Kept {
                ordinals,
                taints,
                occupied,
                recorded: recorded(&records),
                foreign,
                look_soon: stale || leaving().next().is_some(),
                phases: phases(&records),
                held: records,
                lingering,
                fenced: fenced.len(),
                fences: open,
                newer,
            })
        });
        read.await.unwrap_or_else(|died| Err(died.to_string()))
    }
}

/// Instances of others that are in the way: where they are published as they are, they are not.
pub(super) fn not_static(foreign: Places, resolved: &Resolved) -> Places {
    let is_static =
        |gpu: &GpuUuid| resolved.rules.get(gpu).is_some_and(|rules| rules.instances == Instances::Static);
    foreign.into_iter().filter(|(gpu, _)| !is_static(gpu)).collect()
}

fn taint(taints: &mut BTreeMap<GpuUuid, Vec<Taint>>, gpu: &GpuUuid, key: &str) {
    taints.entry(gpu.clone()).or_default().push(Taint::no_schedule(key, None));
}

/// Claims by phase, in the order of [`PHASES`].
fn phases(records: &[HeldDevice]) -> [i64; PHASES.len()] {
    let claims: BTreeMap<&ClaimUid, &Phase> = records.iter().map(|r| (&r.claim.uid, &r.phase)).collect();
    let count =
        |is: fn(&Phase) -> bool| i64::try_from(claims.values().filter(|p| is(p)).count()).unwrap_or(i64::MAX);
    [
        count(|p| matches!(p, Phase::Preparing)),
        count(|p| matches!(p, Phase::Prepared)),
        count(|p| matches!(p, Phase::Leaving(_))),
    ]
}
