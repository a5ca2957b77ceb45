use super::*;
use crate::{AllocatedDevice, Allocation, Fence, Head, Leaving, PreparedDevice, StepState};
use divvy_model::mig::{
    Engines, GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex, MigCapabilities, Placement,
};
use divvy_model::{
    Architecture, Brand, ComputeCapability, CudaVersion, GpuError, GpuErrorCode, GpuFacts, GpuMig, GpuOp,
    GpuProblem, HostTopology, MigMode, PciAddress, SystemFacts,
};

fn gpu(n: u32) -> GpuUuid {
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
        addressing_mode: None,
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
struct World {
    inventory: Inventory,
    ordinals: Ordinals,
    records: BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    gpus: BTreeMap<GpuUuid, Stored<GpuState>>,
    boot: BootId,
    toggle_mig: bool,
    rights: Rights,
}

impl World {
    fn new() -> Self {
        let system = SystemFacts {
            driver_version: "580.95.05".to_owned(),
            nvml_version: "13.580.95.05".to_owned(),
            cuda_version: CudaVersion { major: 13, minor: 0 },
        };
        let gpus = [(gpu(0), facts(0, false)), (gpu(1), facts(1, false)), (gpu(2), facts(2, true))].into();
        let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::GPU_IS_LOST, &gpu(4));
        Self {
            inventory: Inventory { system, gpus, problems: vec![GpuProblem { gpu: gpu(4), error }] },
            ordinals: (0..5).map(|n| (gpu(n), n)).collect(),
            records: BTreeMap::new(),
            gpus: BTreeMap::new(),
            boot: "boot-1".parse().unwrap(),
            toggle_mig: false,
            rights: Rights::default(),
        }
    }

    fn seen(&self) -> Snapshot<'_> {
        Snapshot {
            driver: "gpu.divvy.dev",
            inventory: Some(&self.inventory),
            ordinals: &self.ordinals,
            records: &self.records,
            gpus: &self.gpus,
            boot: &self.boot,
            toggle_mig: self.toggle_mig,
            rights: &self.rights,
        }
    }

    fn decide(&self, claim: &Claim) -> Decision {
        decide(claim, &self.seen())
    }

    fn record(&self, claim: &Claim, phase: Phase) -> Record {
        Record::new(claim, &self.boot, resolve_devices(claim, &self.seen()).unwrap(), phase)
    }

    fn keep(&mut self, record: Record) {
        self.records.insert(record.uid.clone(), Arc::new(Stored::Fine(record)));
    }

    fn refusal(&self, claim: &Claim) -> (&'static str, String) {
        match self.decide(claim) {
            Decision::Refuse(refusal) => (refusal.category(), refusal.to_string()),
            other => panic!("{other:?}"),
        }
    }
}

fn result(request: &str, device: &str) -> AllocatedDevice {
    AllocatedDevice {
        request: request.to_owned(),
        pool: "node-a-gpus".to_owned(),
        device: device.parse().unwrap(),
        share_id: None,
        admin_access: false,
        consumed_capacity: BTreeMap::new(),
    }
}

fn claim(uid: &str, results: Vec<AllocatedDevice>) -> Claim {
    Claim {
        uid: uid.parse().unwrap(),
        namespace: "ns".to_owned(),
        name: format!("claim-{uid}"),
        allocation: Allocation { allocated_at: Some("t1".to_owned()), results },
        configs: Vec::new(),
        pods: Vec::new(),
    }
}

fn admin(mut result: AllocatedDevice) -> AllocatedDevice {
    result.admin_access = true;
    result
}

fn plan(decision: Decision) -> Plan {
    match decision {
        Decision::Run(plan) => plan,
        other => panic!("{other:?}"),
    }
}

fn holders(decision: Decision) -> Vec<Holder> {
    match decision {
        Decision::Wait(holders) => holders.holders,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_new_claim_is_one_cdi_file_and_no_hardware_step() {
    let world = World::new();
    let c = claim("a", vec![result("main/big", "gpu-1")]);
    let devices = vec![RecordedDevice {
        allocated: result("main/big", "gpu-1"),
        gpu: gpu(1),
        kind: HoldKind::Whole,
        time_slice: None,
        is_static: false,
    }];
    let expected = Plan { undo_first: false, set_aside: false, devices, steps: vec![Step::WriteCdi] };
    assert_eq!(plan(world.decide(&c)), expected);
}

#[test]
fn a_prepared_claim_gets_the_same_answer_with_base_request_names_and_its_share() {
    let mut world = World::new();
    let mut shared = result("main/big", "gpu-0");
    shared.share_id = Some("s1".to_owned());
    let c = claim("a", vec![shared, admin(result("see", "gpu-1"))]);
    let record = world.record(&c, Phase::Prepared);
    world.keep(record);
    let device = |request: &str, device: &str, id: &str, share_id: Option<&str>| PreparedDevice {
        requests: vec![request.to_owned()],
        pool: "node-a-gpus".to_owned(),
        device: device.parse().unwrap(),
        cdi_ids: vec![format!("gpu.divvy.dev/claim={id}")],
        share_id: share_id.map(str::to_owned),
    };
    let expected = Prepared {
        devices: vec![
            device("main", "gpu-0", "a-gpu-0-s1", Some("s1")),
            device("see", "gpu-1", "a-gpu-1", None),
        ],
    };
    match world.decide(&c) {
        Decision::Ready(prepared) => assert_eq!(prepared, expected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn another_allocation_another_boot_or_a_prepare_cut_short_is_undone_first_and_a_lingering_one_is_taken_up_again()
 {
    let c = claim("a", vec![result("main", "gpu-0")]);
    let undo_first = |change: &dyn Fn(&mut Record)| {
        let mut world = World::new();
        let mut record = world.record(&c, Phase::Prepared);
        change(&mut record);
        world.keep(record);
        plan(world.decide(&c)).undo_first
    };
    let leaving = |undoing| Phase::Leaving(Leaving { reason: "process 1".to_owned(), undoing });
    assert!(undo_first(&|r| r.allocated_at = Some("t0".to_owned())));
    assert!(undo_first(&|r| r.devices[0].allocated.device = "gpu-1".parse().unwrap()));
    assert!(undo_first(&|r| r.boot = "boot-0".parse().unwrap()));
    assert!(undo_first(&|r| r.phase = Phase::Preparing));
    assert!(undo_first(&|r| r.phase = leaving(true)));
    assert!(!undo_first(&|r| r.phase = leaving(false)));
    assert!(undo_first(&|r| {
        r.phase = leaving(false);
        let step = Step::CreatePartition { gpu: gpu(0), profile: 0, start: 0, size: 8 };
        r.steps = vec![StepState { step, progress: Progress::Intended { before: Vec::new() } }];
    }));
}

#[test]
fn a_gpu_held_by_another_claim_is_waited_for_unless_one_side_has_admin_access() {
    let mut world = World::new();
    let first = claim("a", vec![result("main", "gpu-0")]);
    let record = world.record(&first, Phase::Prepared);
    world.keep(record.clone());
    let second = claim("b", vec![result("main", "gpu-0")]);
    let device = || "gpu-0".parse().unwrap();
    assert_eq!(
        holders(world.decide(&second)),
        [Holder::Record { claim: first.reference(), device: device(), leaving: None, clash: Clash::Device }]
    );
    let lingering = Leaving { reason: "process 7 still uses it".to_owned(), undoing: false };
    world.keep(Record { phase: Phase::Leaving(lingering.clone()), ..record });
    assert_eq!(
        holders(world.decide(&second)),
        [Holder::Record {
            claim: first.reference(),
            device: device(),
            leaving: Some(lingering.reason),
            clash: Clash::Device
        }]
    );
    let watcher = claim("w", vec![admin(result("see", "gpu-0"))]);
    assert_eq!(plan(world.decide(&watcher)).devices[0].kind, HoldKind::Admin);
    let mut world = World::new();
    let record = world.record(&watcher, Phase::Prepared);
    world.keep(record);
    assert_eq!(plan(world.decide(&second)).devices[0].kind, HoldKind::Whole);
}

#[test]
fn an_unreadable_record_may_hold_any_gpu_and_a_newer_one_holds_those_it_names() {
    let mut world = World::new();
    let c = claim("b", vec![result("main", "gpu-0")]);
    let reason = "the file is empty".to_owned();
    world.records.insert("x".parse().unwrap(), Arc::new(Stored::Corrupt { reason: reason.clone() }));
    assert_eq!(holders(world.decide(&c)), [Holder::Unreadable { claim: "x".parse().unwrap(), reason }]);
    let newer = |gpus| Arc::new(Stored::Newer { version: 2, head: Head { claim: None, gpus } });
    world.records.insert("x".parse().unwrap(), newer(vec![gpu(1)]));
    plan(world.decide(&c));
    world.records.insert("x".parse().unwrap(), newer(vec![gpu(0)]));
    assert_eq!(
        world.refusal(&c),
        (
            "newer-state",
            format!(
                "device gpu-0 of claim ns/claim-b (UID b): {} is held by claim UID x, whose record was written by a later divvy (version 2) (run that version again, or delete the pod and claim named last)",
                gpu(0)
            )
        )
    );
    world.records.insert("b".parse().unwrap(), newer(vec![gpu(1)]));
    assert_eq!(
        world.refusal(&c).1,
        "the record of claim ns/claim-b (UID b) was written by a later divvy (version 2); it is left untouched (run that version again, or delete the pod and the claim)"
    );
    world.records =
        BTreeMap::from([("b".parse().unwrap(), Arc::new(Stored::Corrupt { reason: String::new() }))]);
    assert!(plan(world.decide(&c)).set_aside, "the claim's own unreadable record is replaced");
}

#[test]
fn devices_that_cannot_be_served_are_refused_by_name_with_what_to_do() {
    let world = World::new();
    let refused = |device: &str| world.refusal(&claim("a", vec![result("main", device)]));
    assert_eq!(
        refused("gpu-3"),
        (
            "device-gone",
            format!(
                "device gpu-3 of claim ns/claim-a (UID a) is gone: {} does not answer on this node (delete the pod and the claim to be scheduled anew, or bring the GPU back)",
                gpu(3)
            )
        )
    );
    assert_eq!(
        refused("gpu-4"),
        ("gpu-unreadable", format!("device gpu-4 of claim ns/claim-a (UID a): {} cannot be read", gpu(4)))
    );
    assert_eq!(
        refused("gpu-9"),
        (
            "unknown-device",
            "device gpu-9 of claim ns/claim-a (UID a) is no GPU this node knows: it was removed and forgotten (delete the pod and the claim, so that they are scheduled anew)".to_owned()
        )
    );
    assert_eq!(
        refused("nic-0"),
        (
            "unknown-device",
            "claim ns/claim-a (UID a) has an allocated device that this driver does not know (delete the pod and the claim, so that they are scheduled anew)".to_owned()
        )
    );
    assert_eq!(
        refused("gpu-2"),
        (
            "wrong-mode",
            format!(
                "device gpu-2 of claim ns/claim-a (UID a) is a whole GPU, but MIG mode of {0} is on (turn it off with `nvidia-smi -i {0} -mig 0`, or delete the pod and the claim)",
                gpu(2)
            )
        )
    );
    assert_eq!(
        world.refusal(&claim("a", vec![result("one", "gpu-0"), result("two", "gpu-0")])),
        (
            "allocated-twice",
            "claim ns/claim-a (UID a) has device gpu-0 allocated twice (this is a fault of the scheduler: delete the pod and the claim)".to_owned()
        )
    );
    plan(world.decide(&claim("a", vec![result("one", "gpu-0"), admin(result("two", "gpu-0"))])));
}

#[test]
fn a_fenced_gpu_is_refused_to_others_until_a_reboot_and_a_state_of_a_later_version_always() {
    let mut world = World::new();
    let c = claim("b", vec![result("main", "gpu-0")]);
    let fence = |claim: &str, boot: &str| {
        let fence = Fence {
            claim: claim.parse().unwrap(),
            reason: "a call hangs".to_owned(),
            boot: boot.parse().unwrap(),
        };
        Stored::Fine(GpuState { fence: Some(fence), ..GpuState::default() })
    };
    world.gpus.insert(gpu(0), fence("a", "boot-1"));
    assert_eq!(
        world.refusal(&c),
        (
            "fenced",
            format!(
                "device gpu-0 of claim ns/claim-b (UID b): {} is fenced, since an earlier change has an unknown outcome: a call hangs (it is looked at again by itself; a reboot settles it)",
                gpu(0)
            )
        )
    );
    plan(world.decide(&claim("w", vec![admin(result("see", "gpu-0"))])));
    for harmless in [fence("a", "boot-0"), fence("b", "boot-1"), Stored::Corrupt { reason: String::new() }] {
        world.gpus.insert(gpu(0), harmless);
        plan(world.decide(&c));
    }
    world.gpus.insert(gpu(0), Stored::Newer { version: 3, head: Head::default() });
    assert_eq!(world.refusal(&c).0, "newer-state");
}

#[test]
fn a_claim_without_devices_of_ours_is_ready_and_its_earlier_devices_are_undone() {
    let mut world = World::new();
    match world.decide(&claim("a", Vec::new())) {
        Decision::Ready(prepared) => assert_eq!(prepared, Prepared::default()),
        other => panic!("{other:?}"),
    }
    let record = world.record(&claim("a", vec![result("main", "gpu-0")]), Phase::Prepared);
    world.keep(record);
    let expected = Plan { undo_first: true, set_aside: false, devices: Vec::new(), steps: Vec::new() };
    assert_eq!(plan(world.decide(&claim("a", Vec::new()))), expected);
}

#[test]
fn without_an_inventory_nothing_is_known_to_be_gone() {
    let world = World::new();
    let c = claim("a", vec![result("main", "gpu-3")]);
    match decide(&c, &Snapshot { inventory: None, ..world.seen() }) {
        Decision::Refuse(refusal) => {
            assert_eq!(refusal.retry(), crate::Retry::Soon);
            assert_eq!(
                refusal.to_string(),
                "the NVIDIA driver of this node does not answer yet (see the node plugin's log; nvidia-smi must work on the node)"
            );
        }
        other => panic!("{other:?}"),
    }
}

const SMALL: &str = "gpu-2-mig-1g10gb-19-0";
const HALF: &str = "gpu-2-mig-3g40gb-9-4";

fn partition_hold(profile: u32, start: u32, size: u32) -> HoldKind {
    HoldKind::Partition { profile: GpuInstanceProfileId(profile), placement: Placement { start, size } }
}

#[test]
fn partitions_are_made_at_their_exact_place_after_mig_mode_is_on_and_before_the_cdi_file() {
    let mut world = World::new();
    let c = claim("a", vec![result("main", HALF), result("side", SMALL)]);
    let planned = plan(world.decide(&c));
    let kinds: Vec<_> = planned.devices.iter().map(|d| d.kind).collect();
    assert_eq!(kinds, [partition_hold(9, 4, 4), partition_hold(19, 0, 1)]);
    let make = |profile, start, size| Step::CreatePartition { gpu: gpu(2), profile, start, size };
    let own = [make(9, 4, 4), make(19, 0, 1), Step::WriteCdi];
    assert_eq!(planned.steps, own, "MIG mode is not ours to change");
    world.toggle_mig = true;
    let on = Step::SetMigMode { gpu: gpu(2), on: true };
    assert_eq!(plan(world.decide(&c)).steps, [&[on][..], &own].concat(), "the inventory may be old");
    // Another name of the same profile, as another driver version would have published it.
    let renamed = claim("a", vec![result("main", "gpu-2-mig-3g37gb-9-4")]);
    assert_eq!(plan(world.decide(&renamed)).devices[0].kind, partition_hold(9, 4, 4));
}

#[test]
fn mig_mode_is_changed_only_where_that_is_allowed_or_was_our_doing() {
    let mut world = World::new();
    let whole = claim("a", vec![result("main", "gpu-2")]);
    let part = claim("b", vec![result("main", "gpu-0-mig-1g10gb-19-3")]);
    let refused = |world: &World, claim| world.refusal(claim).0;
    assert_eq!((refused(&world, &whole), refused(&world, &part)), ("wrong-mode", "wrong-mode"));
    let ours = GpuState { applied: vec![crate::Setting::MigMode { on: true }], ..GpuState::default() };
    world.gpus.insert(gpu(2), Stored::Fine(ours));
    let off = Step::SetMigMode { gpu: gpu(2), on: false };
    assert_eq!(plan(world.decide(&whole)).steps, [off, Step::WriteCdi]);
    assert_eq!(refused(&world, &part), "wrong-mode");
    world.toggle_mig = true;
    assert_eq!(plan(world.decide(&part)).steps[0], Step::SetMigMode { gpu: gpu(0), on: true });
    for of in world.inventory.gpus.values_mut() {
        of.facts.architecture = Architecture::Ampere;
    }
    assert_eq!(refused(&world, &part), "wrong-mode", "it would need a reset");
}

#[test]
fn partitions_share_a_gpu_unless_they_overlap_and_never_with_a_whole_gpu_claim() {
    let mut world = World::new();
    world.toggle_mig = true;
    let first = claim("a", vec![result("main", HALF)]);
    let record = world.record(&first, Phase::Prepared);
    world.keep(record);
    plan(world.decide(&claim("b", vec![result("main", SMALL)])));
    plan(world.decide(&claim("w", vec![admin(result("see", "gpu-2"))])));
    for device in ["gpu-2", "gpu-2-mig-1g10gb-19-4", "gpu-2-mig-7g80gb-0-0", HALF] {
        let clash = if device == "gpu-2" { Clash::Mode } else { Clash::Device };
        let holder =
            Holder::Record { claim: first.reference(), device: HALF.parse().unwrap(), leaving: None, clash };
        assert_eq!(holders(world.decide(&claim("b", vec![result("main", device)]))), [holder], "{device}");
    }
    let refused =
        |devices: &[&str]| world.refusal(&claim("c", devices.iter().map(|d| result("main", d)).collect()));
    assert_eq!(refused(&["gpu-0", "gpu-0-mig-1g10gb-19-0"]).0, "allocated-twice");
    assert_eq!(refused(&[SMALL, SMALL]).0, "allocated-twice");
    assert_eq!(
        refused(&[SMALL, "gpu-2-mig-3g40gb-9-0"]),
        (
            "allocated-twice",
            format!(
                "claim ns/claim-c (UID c) has devices {SMALL} and gpu-2-mig-3g40gb-9-0 allocated, which need the same part of {} (this is a fault of the scheduler: delete the pod and the claim)",
                gpu(2)
            )
        )
    );
}

#[test]
fn a_partition_that_cannot_be_is_refused_with_the_reason() {
    let mut world = World::new();
    let one = |result| claim("a", vec![result]);
    let refused = |world: &World, device| world.refusal(&one(result("main", device)));
    assert_eq!(
        refused(&world, "gpu-2-mig-3g40gb-9-1"),
        (
            "unknown-device",
            format!(
                "device gpu-2-mig-3g40gb-9-1 of claim ns/claim-a (UID a) is no partition that {} can be cut into (delete the pod and the claim, so that they are scheduled anew)",
                gpu(2)
            )
        )
    );
    assert_eq!(refused(&world, "gpu-2-mig-9g99gb-77-0").0, "unknown-device");
    assert_eq!(world.refusal(&one(admin(result("see", SMALL)))).0, "admin-partition");
    world.inventory.gpus.get_mut(&gpu(2)).unwrap().mig = None;
    assert_eq!(refused(&world, SMALL).0, "partitions-unknown");
    world.inventory.gpus.get_mut(&gpu(2)).unwrap().facts.mig_mode = MigMode::Unsupported;
    assert_eq!(refused(&world, SMALL).0, "unknown-device");
}

mod shares;
