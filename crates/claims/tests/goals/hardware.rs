//! The GPU of a story: what is on it, and how its calls fail, lie and land late.

use super::*;

/// A small deterministic source of chance.
pub(super) struct Chance(pub(super) u64);

impl Chance {
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// An instance on the hardware, and whether it is ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Real {
    pub(super) gi: u32,
    pub(super) uuid: Option<String>,
    pub(super) ours: bool,
}

/// The hardware as it is.
#[derive(Debug)]
pub(super) struct Hardware {
    pub(super) mig: bool,
    pub(super) compute: ComputeMode,
    pub(super) slice: TimeSlice,
    /// The MPS servers that run, with the partition that each sees.
    pub(super) mps: BTreeMap<Target, (MpsServer, Option<String>)>,
    /// Namespaces of that of the whole GPU.
    pub(super) namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
    /// Servers that are wedged, and whether they have no client.
    pub(super) wedged: BTreeMap<Target, bool>,
    pub(super) instances: BTreeMap<Place, Real>,
    pub(super) made: u32,
    /// Calls that have timed out and land later.
    pub(super) late: Vec<Call>,
}

/// A call of the driver.
#[derive(Debug, Clone)]
pub(super) enum Call {
    Mig(bool),
    Compute(ComputeMode),
    Slice(TimeSlice),
    StopMps(Target),
    StartMps(Target, Option<String>, MpsServer),
    RestartMps(Target, Option<String>, MpsServer),
    PutNamespace(MpsNamespace),
    RemoveNamespace(MpsNamespaceName),
    CreateGpuInstance(Place),
    CreateComputeInstance(Place),
    DestroyComputeInstance(Place, String),
    DestroyGpuInstance(Place, u32),
}

/// Failure of a call of the driver.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    Refuses,
    Lies,
    Late,
    Never,
}

/// Why a call was not made.
#[derive(Debug)]
pub(super) enum Failed {
    NotDone,
    Unknown,
    /// The process has died.
    Died,
}

impl Hardware {
    /// A server dies or is stopped: its namespaces go with it.
    pub(super) fn server_ends(&mut self, target: Target) {
        self.mps.remove(&target);
        self.wedged.remove(&target);
        if target == Target::Gpu {
            self.namespaces.clear();
        }
    }

    fn serves(&self, target: Target) -> bool {
        self.mps.keys().any(|other| other.overlaps(target))
    }

    pub(super) fn run(&mut self, call: &Call) -> Result<(), Failed> {
        match call {
            Call::Mig(on) if self.mig == *on => {}
            Call::Mig(false) if !self.instances.is_empty() => return Err(Failed::NotDone),
            Call::Mig(on) => {
                let served = self.serves(Target::Gpu);
                assert!(!served, "MIG mode is changed under an MPS server");
                self.mig = *on;
            }
            Call::Compute(to) => self.compute = *to,
            Call::Slice(to) => self.slice = *to,
            Call::StopMps(target) => self.server_ends(*target),
            Call::RestartMps(target, partition, server) => {
                self.server_ends(*target);
                return self.run(&Call::StartMps(*target, partition.clone(), *server));
            }
            Call::StartMps(target, partition, server) => {
                let others = self.mps.keys().filter(|other| *other != target);
                let beside = others.filter(|other| other.overlaps(*target)).count();
                assert_eq!(beside, 0, "two servers of one part of the GPU");
                let wanted = (*server, partition.clone());
                if self.mps.get(target).is_some_and(|runs| *runs != wanted) {
                    return Err(Failed::NotDone);
                }
                self.mps.insert(*target, wanted);
            }
            Call::PutNamespace(namespace) => {
                let server = self.mps.get(&Target::Gpu);
                if !server.is_some_and(|(server, _)| server.has_namespaces()) {
                    return Err(Failed::NotDone);
                }
                self.namespaces.insert(namespace.name, *namespace);
            }
            Call::RemoveNamespace(name) => drop(self.namespaces.remove(name)),
            Call::CreateGpuInstance(place) => {
                let served = self.serves(Target::Partition(*place));
                assert!(!served, "a partition beside an MPS server");
                let taken = self.instances.keys().any(|other| other.overlaps(*place));
                if !self.mig || taken {
                    return Err(Failed::NotDone);
                }
                let gi = self.free_id();
                let (uuid, ours) = (None, true);
                self.instances.insert(*place, Real { gi, uuid, ours });
            }
            Call::CreateComputeInstance(place) => {
                self.made += 1;
                let uuid = format!("MIG-{}", self.made);
                match self.instances.get_mut(place) {
                    Some(real) if real.uuid.is_none() => real.uuid = Some(uuid),
                    _ => return Err(Failed::NotDone),
                }
            }
            Call::DestroyComputeInstance(place, uuid) => match self.instances.get_mut(place) {
                Some(real) if real.uuid.as_ref() == Some(uuid) => {
                    let server = self.mps.get(&Target::Partition(*place));
                    let is_used = server.is_some_and(|(_, sees)| sees.as_ref() == Some(uuid));
                    assert!(!is_used, "a partition is removed under its MPS server");
                    real.uuid = None;
                }
                _ => {}
            },
            Call::DestroyGpuInstance(place, gi) => match self.instances.get(place) {
                Some(real) if real.uuid.is_some() => return Err(Failed::NotDone),
                Some(real) if real.gi == *gi => {
                    assert!(real.ours, "a GPU instance of others was removed");
                    self.instances.remove(place);
                }
                _ => {}
            },
        }
        Ok(())
    }

    /// NVML gives the lowest free id.
    pub(super) fn free_id(&self) -> u32 {
        (1..)
            .find(|id| self.instances.values().all(|real| real.gi != *id))
            .unwrap()
    }

    pub(super) fn living(&self, place: Place) -> Option<Living> {
        let real = self.instances.get(&place)?;
        let inside = real.uuid.iter().map(|uuid| ComputeInstance {
            id: ComputeInstanceId(0),
            gpu_instance: GpuInstanceId(real.gi),
            profile: ComputeInstanceProfileId(0),
            uuid: uuid.parse().unwrap(),
        });
        Some(Living {
            instance: GpuInstance {
                id: GpuInstanceId(real.gi),
                profile: place.profile,
                placement: place.placement,
            },
            inside: inside.collect(),
        })
    }
}

pub(super) fn place(start: u32) -> Place {
    Place {
        profile: GpuInstanceProfileId(9),
        placement: Placement { start, size: 4 },
    }
}
