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
    /// The MPS server that runs.
    pub(super) mps: Option<MpsServer>,
    /// Its namespaces.
    pub(super) namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
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
    StopMps,
    StartMps(MpsServer),
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
    /// The server dies or is stopped: its namespaces go with it.
    pub(super) fn server_ends(&mut self) {
        self.mps = None;
        self.namespaces.clear();
    }

    pub(super) fn run(&mut self, call: &Call) -> Result<(), Failed> {
        match call {
            Call::Mig(on) if self.mig == *on => {}
            Call::Mig(false) if !self.instances.is_empty() => return Err(Failed::NotDone),
            Call::Mig(on) => {
                assert_eq!(self.mps, None, "MIG mode is changed under an MPS server");
                self.mig = *on;
            }
            Call::Compute(to) => self.compute = *to,
            Call::Slice(to) => self.slice = *to,
            Call::StopMps => self.server_ends(),
            Call::StartMps(server) if self.mps.is_none_or(|runs| runs == *server) => {
                self.mps = Some(*server);
            }
            Call::StartMps(_) => return Err(Failed::NotDone),
            Call::PutNamespace(namespace) => {
                if !self.mps.is_some_and(MpsServer::has_namespaces) {
                    return Err(Failed::NotDone);
                }
                self.namespaces.insert(namespace.name, *namespace);
            }
            Call::RemoveNamespace(name) => drop(self.namespaces.remove(name)),
            Call::CreateGpuInstance(place) => {
                assert_eq!(self.mps, None, "a partition beside an MPS server");
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
                Some(real) if real.uuid.as_ref() == Some(uuid) => real.uuid = None,
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
