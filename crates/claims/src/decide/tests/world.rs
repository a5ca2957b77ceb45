//! A node as decisions see it, and claims of its devices.

use super::*;
use divvy_model::mig::{
    Engines, GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex, MigCapabilities, Placement,
};
use divvy_model::{
    Architecture, Brand, ComputeCapability, CudaVersion, GpuError, GpuErrorCode, GpuFacts, GpuMig, GpuOp,
    GpuProblem, HostTopology, MigMode, PciAddress, SystemFacts,
};

use crate::{AllocatedDevice, Allocation};

pub(super) fn gpu(n: u32) -> GpuUuid {
    format!("GPU-12345678-1234-1234-1234-1234567800{n:02x}").parse().unwrap()
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
        multiprocessors: Some(132),
        pci_address: PciAddress { domain: 0, bus: 0x10 + u8::try_from(n).unwrap(), device: 0, function: 0 },
        pci_device_id: 0x2330_10de,
        mig_mode: MigMode::Supported { current: mig, pending: mig },
        compute_mode: None,
        addressing_mode: None,
        c2c: None,
        module_id: None,
        nvlinks: Vec::new(),
        fabric: None,
    };
    Gpu { facts, topology: HostTopology::default(), mig: Some(mig_of_h100()) }
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
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
        driver_name: None,
    };
    let profiles = [
        profile(19, 0, 1, 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(9, 2, 3, 4, &[0, 4]),
        profile(0, 4, 7, 8, &[0]),
    ];
    GpuMig {
        capabilities: MigCapabilities::new(80 << 30, profiles),
        instances: Vec::new(),
        uuids: BTreeMap::new(),
    }
}

/// A node of three GPUs with the numbers 0 to 2; 3 is known but gone, 4 cannot be read. MIG mode of 2 is on.
pub(super) struct World {
    pub(super) inventory: Inventory,
    pub(super) ordinals: Ordinals,
    pub(super) records: BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    pub(super) gpus: BTreeMap<GpuUuid, Arc<Stored<GpuState>>>,
    pub(super) boot: BootId,
    pub(super) modes: BTreeMap<GpuUuid, Result<MigMode, GpuError>>,
    pub(super) processes: BTreeMap<GpuUuid, Vec<ProcessOnGpu>>,
    pub(super) living: Living,
    pub(super) extra_nodes: Vec<String>,
}

impl World {
    pub(super) fn new() -> Self {
        let system = SystemFacts {
            driver_version: "580.95.05".to_owned(),
            nvml_version: None,
            cuda_version: Some(CudaVersion { major: 13, minor: 0 }),
        };
        let gpus = [(gpu(0), facts(0, false)), (gpu(1), facts(1, false)), (gpu(2), facts(2, true))].into();
        let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::GPU_IS_LOST, &gpu(4));
        Self {
            inventory: Inventory { system, gpus, problems: vec![GpuProblem { gpu: gpu(4), error }] },
            ordinals: (0..5).map(|n| (gpu(n), n)).collect(),
            records: BTreeMap::new(),
            gpus: BTreeMap::new(),
            boot: "boot-1".parse().unwrap(),
            modes: BTreeMap::new(),
            processes: BTreeMap::new(),
            living: Living::new(),
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
            modes: self.modes.clone(),
            processes: self.processes.clone(),
            living: self.living.clone(),
            extra_nodes: &self.extra_nodes,
        }
    }

    /// The policies let prepare change MIG mode of every GPU.
    pub(super) fn grant_all(&mut self) {
        for number in 0..5 {
            let known = self.gpus.get(&gpu(number)).and_then(|stored| stored.fine()).cloned();
            let state = GpuState { may_change_mode: true, ..known.unwrap_or_default() };
            self.gpus.insert(gpu(number), Arc::new(Stored::Fine(state)));
        }
    }

    pub(super) fn decide(&self, claim: &Claim) -> Decision {
        decide(claim, &self.seen())
    }

    pub(super) fn record(&self, claim: &Claim, phase: Phase) -> Record {
        Record::new(claim, &self.boot, resolve_devices(claim, &self.seen()).unwrap(), phase)
    }

    pub(super) fn keep(&mut self, record: Record) {
        self.records.insert(record.uid.clone(), Arc::new(Stored::Fine(record)));
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
        allocation: Allocation { allocated_at: Some("t1".to_owned()), results },
        configs: Vec::new(),
        pods: Vec::new(),
    }
}

pub(super) fn admin(mut result: AllocatedDevice) -> AllocatedDevice {
    result.admin_access = true;
    result
}

pub(super) fn plan(decision: Decision) -> Plan {
    match decision {
        Decision::Run(plan) => plan,
        other => panic!("{other:?}"),
    }
}

pub(super) fn holders(decision: Decision) -> Vec<Holder> {
    match decision {
        Decision::Wait(holders) => holders.holders,
        other => panic!("{other:?}"),
    }
}
