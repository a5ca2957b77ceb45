use super::*;
use crate::{Fence, Head, Leaving, PreparedDevice, Retry, StepState};

mod compute_mode;
mod partitions;
mod shares;
mod world;

use self::world::*;

#[test]
fn a_new_claim_is_one_cdi_file_and_no_hardware_step() {
    let world = World::new();
    let c = claim("a", vec![result("main/big", "gpu-1")]);
    let devices = vec![RecordedDevice {
        allocated: result("main/big", "gpu-1"),
        gpu: gpu(1),
        kind: HoldKind::Whole,
        time_slice: None,
        extra_nodes: Vec::new(),
        is_static: false,
    }];
    let expected = Plan { undo_first: false, devices, steps: Vec::new() };
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
        let step = Step::create_partition(
            gpu(0),
            divvy_model::mig::GpuInstanceProfileId(0),
            divvy_model::mig::Placement { start: 0, size: 8 },
        );
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
                "device gpu-0 ({}) of claim ns/claim-b (UID b): its GPU is held by claim UID x, whose record was written by a later version of divvy (format 2) (run that version again, or delete the holding claim and its pod)",
                gpu(0)
            )
        )
    );
    world.records.insert("b".parse().unwrap(), newer(vec![gpu(1)]));
    assert_eq!(
        world.refusal(&c).1,
        "claim ns/claim-b (UID b): its record was written by a later version of divvy (format 2) and is left unchanged (run that version again, or delete the pod and the claim)"
    );
    world.records =
        BTreeMap::from([("b".parse().unwrap(), Arc::new(Stored::Corrupt { reason: String::new() }))]);
    assert!(matches!(world.decide(&c), Decision::Rebuild), "the claim's own unreadable record is made again");
}

#[test]
fn a_holder_that_has_its_device_allocated_is_in_use_and_each_clash_has_its_words() {
    let mut world = World::new();
    let first = claim("a", vec![result("main", "gpu-0")]);
    let record = world.record(&first, Phase::Prepared);
    world.keep(record);
    let second = claim("b", vec![result("main", "gpu-0")]);
    let Decision::Wait(holders) = world.decide(&second) else { panic!("nothing is waited for") };
    let [holder] = &holders.holders[..] else { panic!("{holders:?}") };
    assert!(holder.is_in_use(&first));
    assert!(!holder.is_in_use(&claim("a", vec![result("main", "gpu-1")])), "allocated anew elsewhere");
    let kind = |in_use| holder.refusal(&second, &holders, in_use).why.kind();
    assert_eq!(kind(true), ("conflict", Retry::Never));
    assert_eq!(kind(false), ("held", Retry::Later));
    let Holder::Record { claim: of, device, .. } = holder.clone() else { panic!("{holder:?}") };
    let clashes = [
        (Clash::Device, "conflict", "it is held by claim ns/claim-a"),
        (
            Clash::Mode,
            "mode-conflict",
            "it needs its GPU exclusively or in another mode than claim ns/claim-a",
        ),
    ];
    for (clash, category, words) in clashes {
        let other = Holder::Record { claim: of.clone(), device: device.clone(), leaving: None, clash };
        let refusal = other.refusal(&second, &holders, true);
        assert_eq!(refusal.category(), category);
        assert!(refusal.to_string().contains(words), "{refusal}");
        // The author of a claim elsewhere does not learn whose GPU it is.
        let stranger = Claim { namespace: "tenant-b".to_owned(), ..second.clone() };
        let text = other.refusal(&stranger, &holders, true).to_string();
        assert!(text.contains("a claim of another namespace") && !text.contains("ns/"), "{text}");
    }
    let unreadable = Holder::Unreadable { claim: "x".parse().unwrap(), reason: String::new() };
    assert!(!unreadable.is_in_use(&first));
}

#[test]
fn a_process_that_no_claim_accounts_for_refuses_all_but_a_claim_that_is_taken_up_again() {
    let c = claim("a", vec![result("main", "gpu-0")]);
    let decided = |change: Option<&dyn Fn(&mut Record)>| {
        let mut world = World::new();
        let process = ProcessOnGpu { pid: 7, gpu_instance: None, pod: None };
        world.processes.insert(gpu(0), vec![process]);
        if let Some(change) = change {
            let leaving = Leaving { reason: "process 7".to_owned(), undoing: false };
            let mut record = world.record(&c, Phase::Leaving(leaving));
            change(&mut record);
            world.keep(record);
        }
        match world.decide(&c) {
            Decision::Refuse(refusal) => refusal.category(),
            other => {
                plan(other);
                "planned"
            }
        }
    };
    assert_eq!(decided(None), "foreign-processes");
    assert_eq!(decided(Some(&|_| {})), "planned", "it is its own");
    assert_eq!(decided(Some(&|r| r.allocated_at = Some("t0".to_owned()))), "foreign-processes");
}

#[test]
fn a_claim_without_a_record_for_which_an_instance_was_made_in_this_boot_is_made_again() {
    let mut world = World::new();
    let c = claim("a", vec![result("main", "gpu-0")]);
    let mut note = |claim: &str, boot: &str| {
        let step = Step::create_partition(
            gpu(0),
            divvy_model::mig::GpuInstanceProfileId(19),
            divvy_model::mig::Placement { start: 0, size: 1 },
        );
        let state = StepState { step, progress: Progress::Intended { before: Vec::new() } };
        let (claim, boot) = (claim.parse().unwrap(), boot.parse().unwrap());
        let instances = vec![crate::OwnedInstance { claim, boot, state }];
        world.gpus.insert(gpu(0), Arc::new(Stored::Fine(GpuState { instances, ..GpuState::default() })));
        world.decide(&c)
    };
    assert!(matches!(note("a", "boot-1"), Decision::Rebuild));
    assert!(!matches!(note("b", "boot-1"), Decision::Rebuild), "of another claim");
    assert!(!matches!(note("a", "boot-0"), Decision::Rebuild), "a reboot has removed it");
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
                "device gpu-3 ({}) of claim ns/claim-a (UID a): its GPU does not answer on this node (delete the pod and the claim, so that they are scheduled again, or restore the GPU)",
                gpu(3)
            )
        )
    );
    assert_eq!(
        refused("gpu-4"),
        (
            "gpu-unreadable",
            format!(
                "device gpu-4 ({}) of claim ns/claim-a (UID a): its GPU cannot be read (check the node plugin's log, and that nvidia-smi works on the node)",
                gpu(4)
            )
        )
    );
    assert_eq!(
        refused("gpu-9"),
        (
            "unknown-device",
            "device gpu-9 of claim ns/claim-a (UID a): no GPU of this node has this number any more (delete the pod and the claim, so that they are scheduled again)".to_owned()
        )
    );
    assert_eq!(
        refused("nic-0"),
        (
            "unknown-device",
            "device nic-0 of claim ns/claim-a (UID a): this driver publishes no such device (delete the pod and the claim, so that they are scheduled again)".to_owned()
        )
    );
    assert_eq!(
        refused("gpu-2"),
        (
            "wrong-mode",
            format!(
                "device gpu-2 ({0}) of claim ns/claim-a (UID a): it is not a partition, but MIG mode of its GPU is on (turn it off with `nvidia-smi -i {0} -mig 0`, or delete the pod and the claim, so that they are scheduled again)",
                gpu(2)
            )
        )
    );
    assert_eq!(
        world.refusal(&claim("a", vec![result("one", "gpu-0"), result("two", "gpu-0")])),
        (
            "allocated-twice",
            format!(
                "device gpu-0 ({}) of claim ns/claim-a (UID a): it is allocated twice to the claim (this is a bug in the scheduler: delete the pod and the claim)",
                gpu(0)
            )
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
            claim: Some(claim.parse().unwrap()),
            reason: "a call hangs".to_owned(),
            boot: boot.parse().unwrap(),
        };
        Stored::Fine(GpuState { fences: vec![fence], ..GpuState::default() })
    };
    world.gpus.insert(gpu(0), Arc::new(fence("a", "boot-1")));
    assert_eq!(
        world.refusal(&c),
        (
            "fenced",
            format!(
                "device gpu-0 ({}) of claim ns/claim-b (UID b): its GPU is fenced because the outcome of an earlier change is unknown: a call hangs (the plugin checks it again automatically; a reboot ends the fence)",
                gpu(0)
            )
        )
    );
    plan(world.decide(&claim("w", vec![admin(result("see", "gpu-0"))])));
    for harmless in [fence("a", "boot-0"), fence("b", "boot-1")] {
        world.gpus.insert(gpu(0), Arc::new(harmless));
        plan(world.decide(&c));
    }
    world.gpus.insert(gpu(0), Arc::new(Stored::Corrupt { reason: "it ends early".to_owned() }));
    assert_eq!(world.refusal(&c).0, "fenced", "what was done to the GPU is not known");
    world.gpus.insert(gpu(0), Arc::new(Stored::Newer { version: 3, head: Head::default() }));
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
    let expected = Plan { undo_first: true, devices: Vec::new(), steps: Vec::new() };
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
                format!(
                    "device gpu-3 ({}) of claim ns/claim-a (UID a): the NVIDIA driver of this node does not answer yet (check the node plugin's log, and that nvidia-smi works on the node)",
                    gpu(3)
                )
            );
        }
        other => panic!("{other:?}"),
    }
}
