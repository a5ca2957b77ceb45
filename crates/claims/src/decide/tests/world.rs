//! A node as decisions see it, and claims of its devices.

use super::*;
use divvy_model::mig::{
    Engines, GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex, MigCapabilities,
    Placement,
};
use divvy_model::{
    Architecture, Brand, ComputeCapability, CudaVersion, GpuError, GpuFacts, GpuMig, GpuOp,
    GpuProblem, HostTopology, MigMode, PciAddress, SystemFacts,
};

use divvy_gpu::{Ask, Change, Goal, Scope, diff};

use crate::{AllocatedDevice, Allocation, Caller, GpuSeen, Living, Made, Times, holds_on};

pub(super) fn gpu(n: u32) -> GpuUuid {
    format!("GPU-12345678-1234-1234-1234-1234567800{n:02x}")
        .parse()
        .unwrap()
}

fn facts(n: u32, mig: bool) -> Gpu {
    let facts = GpuFacts {
        uuid: gpu(n),
        minor: Some(n),
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: Brand(14),
        architecture: Architecture::Hopper,
        compute_capability: ComputeCapability { major: 9, minor: 0 },
        memory_bytes: Some(80 << 30),
        memory_reserved_bytes: None,
        multiprocessors: Some(132),
        pci_address: PciAddress {
            domain: 0,
            bus: 0x10 + u8::try_from(n).unwrap(),
            device: 0,
            function: 0,
        },
        pci_device_id: 0x2330_10de,
        mig_mode: MigMode::Supported {
            current: mig,
            pending: mig,
        },
        compute_mode: None,
        persistence: None,
        addressing_mode: None,
        c2c: None,
        module_id: None,
        nvlinks: Vec::new(),
        fabric: None,
    };
    Gpu {
        facts,
        topology: HostTopology::default(),
        mig: Some(mig_of_h100()),
    }
}

/// Three of its profiles.
fn mig_of_h100() -> GpuMig {
    let profile = |id, index, slices, size: u32, starts: &[u32]| GpuInstanceProfile {
        id: GpuInstanceProfileId(id),
        index: GpuInstanceProfileIndex(index),
        slices,
        memory_mib: 9984 * u64::from(size),
        multiprocessors: 16 * slices,
        engines: Engines::default(),
        max_instances: 7,
        placements: starts
            .iter()
            .map(|start| Placement {
                start: *start,
                size,
            })
            .collect(),
        driver_name: None,
    };
    let profiles = [
        profile(19, 0, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(9, 2, 3, 4, &[0, 4]),
        profile(0, 4, 7, 8, &[0]),
    ];
    GpuMig {
        capabilities: MigCapabilities::new(80 << 30, profiles),
        instances: Some(Vec::new()),
        uuids: BTreeMap::new(),
    }
}

/// A node of three GPUs with the numbers 0 to 2; 3 is known but gone, 4 cannot be read. MIG mode of
/// 2 is on.
pub(super) struct World {
    pub(super) inventory: Inventory,
    pub(super) ordinals: Ordinals,
    pub(super) records: BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    pub(super) gpus: BTreeMap<GpuUuid, Arc<Stored<GpuState>>>,
    pub(super) boot: BootId,
    pub(super) hardware: BTreeMap<GpuUuid, GpuSeen>,
    pub(super) other_drivers: BTreeMap<GpuUuid, String>,
    pub(super) processes: BTreeMap<GpuUuid, Result<Vec<ProcessOnGpu>, GpuError>>,
    pub(super) extra_nodes: Vec<String>,
}

impl World {
    pub(super) fn new() -> Self {
        let system = SystemFacts {
            driver_version: "580.95.05".to_owned(),
            nvml_version: None,
            memory_caps: divvy_model::MemoryCaps::default(),
            caps_linger: false,
            mps: divvy_model::MpsAbility::default(),
            cuda_version: Some(CudaVersion {
                major: 13,
                minor: 0,
            }),
        };
        let gpus = [
            (gpu(0), facts(0, false)),
            (gpu(1), facts(1, false)),
            (gpu(2), facts(2, true)),
        ]
        .into();
        let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::GPU_IS_LOST, &gpu(4));
        Self {
            inventory: Inventory {
                system,
                gpus,
                problems: vec![GpuProblem { gpu: gpu(4), error }],
                with_mig: BTreeMap::new(),
            },
            ordinals: (0..5).map(|n| (gpu(n), n)).collect(),
            records: BTreeMap::new(),
            gpus: BTreeMap::new(),
            boot: "boot-1".parse().unwrap(),
            hardware: BTreeMap::new(),
            other_drivers: BTreeMap::new(),
            processes: BTreeMap::new(),
            extra_nodes: Vec::new(),
        }
    }

    pub(super) fn seen(&self) -> Snapshot<'_> {
        Snapshot {
            driver: "gpu.divvy.dev",
            inventory: Some(Arc::new(self.inventory.clone())),
            ordinals: &self.ordinals,
            records: self.records.clone(),
            gpus: self.gpus.clone(),
            boot: &self.boot,
            hardware: self.hardware.clone(),
            other_drivers: self.other_drivers.clone(),
            processes: self.processes.clone(),
            extra_nodes: &self.extra_nodes,
        }
    }

    /// The policies let prepare change MIG mode of every GPU.
    pub(super) fn grant_all(&mut self) {
        for number in 0..5 {
            let known = self
                .gpus
                .get(&gpu(number))
                .and_then(|stored| stored.fine())
                .cloned();
            let mut state = known.unwrap_or_default();
            state.grant.may_change_mode = true;
            self.gpus.insert(gpu(number), Arc::new(Stored::Fine(state)));
        }
    }

    /// MIG mode of a GPU as it is now, whatever the inventory says.
    pub(super) fn mig_mode(&mut self, number: u32, mode: Result<MigMode, GpuError>) {
        self.hardware.entry(gpu(number)).or_default().mig = Some(mode);
    }

    /// Sets the content of a place now.
    pub(super) fn lives(
        &mut self,
        number: u32,
        place: Place,
        made: Result<Option<&Made>, GpuErrorCode>,
    ) {
        let living = made.map(|made| {
            made.map(|made| Living {
                instance: divvy_model::mig::GpuInstance {
                    id: made.gi,
                    profile: place.profile,
                    placement: place.placement,
                },
                inside: vec![divvy_model::mig::ComputeInstance {
                    id: made.ci,
                    gpu_instance: made.gi,
                    profile: divvy_model::mig::ComputeInstanceProfileId(0),
                    uuid: made.uuid.clone(),
                }],
            })
        });
        let filling =
            living.map_err(|code| GpuError::on_gpu(GpuOp::GpuInstances, code, &gpu(number)));
        let seen = self.hardware.entry(gpu(number)).or_default();
        seen.places.insert(place, filling);
    }

    /// The GPU's file notes an instance that is in the making.
    pub(super) fn note(
        &mut self,
        number: u32,
        place: Place,
        made_for: &str,
        boot: &str,
        doubt: Option<&str>,
    ) {
        let instance = Instance {
            made_for: made_for.parse().unwrap(),
            life: Life::Begun,
            doubt: doubt.map(str::to_owned),
        };
        let state = GpuState {
            boot: Some(boot.parse().unwrap()),
            instances: [(place, instance)].into(),
            ..GpuState::default()
        };
        self.gpus.insert(gpu(number), Arc::new(Stored::Fine(state)));
    }

    /// The changes of a GPU that a claim's prepare makes.
    pub(super) fn changes(&self, claim: &Claim, number: u32) -> Vec<Change> {
        let devices = plan(self.decide(claim)).devices;
        let gpu = gpu(number);
        let known = self.gpus.get(&gpu).and_then(|stored| stored.fine());
        let state = known.cloned().unwrap_or_default().in_boot(&self.boot);
        let holds = holds_on(
            &gpu,
            Caller::Gets(&claim.uid, &devices),
            &self.records,
            &self.boot,
        );
        let found = &self.inventory.gpus[&gpu];
        let scope = Scope::new(holds, state.grant, &state.instances);
        let goal = Goal::of(&scope, &state.mps);
        let read = self.hardware.get(&gpu).cloned().unwrap_or_default();
        let mut seen = GpuSeen {
            mig: read.mig.or(Some(Ok(found.facts.mig_mode))),
            compute: found.facts.compute_mode.map(Ok),
            slice: Ask::of(&state, &goal, &scope).slice_in_force,
            ..read
        };
        for place in &goal.instances {
            seen.places.entry(*place).or_insert(Ok(None));
        }
        diff(&state, &seen, &goal, &scope)
    }

    pub(super) fn decide(&self, claim: &Claim) -> Decision {
        decide(claim, &self.seen())
    }

    pub(super) fn record(&self, claim: &Claim, phase: Phase) -> Record {
        Record::new(
            claim,
            &self.boot,
            resolve_devices(claim, &self.seen()).unwrap(),
            phase,
        )
    }

    pub(super) fn keep(&mut self, record: Record) {
        self.records
            .insert(record.uid.clone(), Arc::new(Stored::Fine(record)));
    }

    pub(super) fn refusal(&self, claim: &Claim) -> (&'static str, String) {
        match self.decide(claim) {
            Decision::Refuse(refusal) => (refusal.category(), refusal.to_string()),
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn result(request: &str, device: &str) -> AllocatedDevice {
    AllocatedDevice {
        request: request.to_owned(),
        pool: "node-a-gpus".to_owned(),
        device: device.parse().unwrap(),
        share_id: None,
        admin_access: false,
        consumed_capacity: BTreeMap::new(),
    }
}

pub(super) fn claim(uid: &str, results: Vec<AllocatedDevice>) -> Claim {
    Claim {
        uid: uid.parse().unwrap(),
        namespace: "ns".to_owned(),
        name: format!("claim-{uid}"),
        pod_claim_name: None,
        classes: BTreeMap::new(),
        times: Times::default(),
        allocation: Allocation {
            allocated_at: Some("t1".to_owned()),
            results,
        },
        configs: Vec::new(),
        pods: Vec::new(),
    }
}

pub(super) fn admin(mut result: AllocatedDevice) -> AllocatedDevice {
    result.admin_access = true;
    result
}

/// A place of the smallest profile.
pub(super) fn small(start: u32) -> Place {
    Place {
        profile: GpuInstanceProfileId(19),
        placement: Placement { start, size: 1 },
    }
}

/// A partition that lives.
pub(super) fn made(gi: u32, uuid: &str) -> Made {
    Made {
        gi: divvy_model::mig::GpuInstanceId(gi),
        ci: divvy_model::mig::ComputeInstanceId(0),
        uuid: uuid.parse().unwrap(),
    }
}

/// A decision to hold.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) let_go_first: bool,
    pub(super) devices: Vec<RecordedDevice>,
}

pub(super) fn plan(decision: Decision) -> Planned {
    match decision {
        Decision::Hold {
            devices,
            let_go_first,
        } => Planned {
            let_go_first,
            devices,
        },
        other => panic!("{other:?}"),
    }
}

pub(super) fn holders(decision: Decision) -> Vec<Holder> {
    match decision {
        Decision::Wait(holders) => holders.holders,
        other => panic!("{other:?}"),
    }
}
