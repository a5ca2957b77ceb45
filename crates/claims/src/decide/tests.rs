use super::*;
use crate::{Head, Instance, Leaving, Life, PreparedDevice, Retry, TimeSlice};
use divvy_gpu::Change;

use divvy_model::{GpuErrorCode, GpuOp};

mod compute_mode;
mod foreign_processes;
mod limits;
mod mps;
mod mps_shares;
mod partitions;
mod rebuilt;
mod refusals;
mod rest;
mod shares;
mod world;

use self::world::*;

#[test]
fn a_new_claim_of_a_whole_gpu_changes_nothing_of_it() {
    let world = World::new();
    let c = claim("a", vec![result("main/big", "gpu-1")]);
    let devices = vec![RecordedDevice {
        allocated: result("main/big", "gpu-1"),
        gpu: gpu(1),
        target: Target::Gpu,
        sharing: Sharing::Exclusive,
        theirs: false,
        time_slice: None,
        share_memory: None,
        memory_cap: None,
        clears_caps: false,
        mps: None,
        extra_nodes: Vec::new(),
        given: None,
    }];
    assert_eq!(world.changes(&c, 1), []);
    let expected = Planned {
        let_go_first: false,
        devices,
    };
    assert_eq!(plan(world.decide(&c)), expected);
}

#[test]
fn a_prepared_claim_gets_the_same_answer_with_base_requests_and_share() {
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
fn an_earlier_record_is_let_go_first_or_gone_on_with() {
    let c = claim("a", vec![result("main", "gpu-0")]);
    let let_go_first = |change: &dyn Fn(&mut Record)| {
        let mut world = World::new();
        let mut record = world.record(&c, Phase::Prepared);
        change(&mut record);
        world.keep(record);
        plan(world.decide(&c)).let_go_first
    };
    let leaving = |undoing| {
        Phase::Leaving(Leaving {
            reason: "process 1".to_owned(),
            undoing,
        })
    };
    assert!(let_go_first(&|r| r.allocated_at = Some("t0".to_owned())));
    assert!(let_go_first(
        &|r| r.devices[0].allocated.device = "gpu-1".parse().unwrap()
    ));
    assert!(let_go_first(&|r| r.phase = Phase::Preparing));
    assert!(let_go_first(&|r| r.phase = leaving(true)));
    assert!(!let_go_first(&|r| r.phase = leaving(false)));
    assert!(!let_go_first(&|r| r.boot = "boot-0".parse().unwrap()));
    // Whatever it was in the middle of: a reboot has ended it.
    assert!(!let_go_first(&|r| {
        r.boot = "boot-0".parse().unwrap();
        r.phase = leaving(true);
    }));
}

/// Rules may say something else now.
#[test]
fn a_lingering_claim_is_taken_up_again_with_what_it_had() {
    let mut world = World::new();
    let c = claim("a", vec![result("main", "gpu-0")]);
    let leaving = Phase::Leaving(Leaving {
        reason: "process 1".to_owned(),
        undoing: false,
    });
    let mut record = world.record(&c, leaving);
    record.devices[0].time_slice = Some(TimeSlice::Long);
    world.keep(record.clone());
    assert_eq!(plan(world.decide(&c)).devices, record.devices);
}

#[test]
fn a_prepared_claim_whose_partition_is_gone_is_refused() {
    let mut world = World::new();
    world.grant_all();
    let c = claim("a", vec![result("main", "gpu-2-mig-1g10gb-19-0")]);
    let mut record = world.record(&c, Phase::Prepared);
    let made = made(7, "MIG-1");
    record.devices[0].given = Some(made.clone());
    world.keep(record);
    let is_ready = |world: &World| matches!(world.decide(&c), Decision::Ready(_));
    assert!(is_ready(&world), "it was not asked for");
    world.lives(2, small(0), Ok(Some(&made)));
    assert!(is_ready(&world));
    world.lives(2, small(0), Err(GpuErrorCode::TIMEOUT));
    assert!(is_ready(&world), "not known");
    for other in [None, Some(&world::made(7, "MIG-2"))] {
        world.lives(2, small(0), Ok(other));
        let (category, said) = world.refusal(&c);
        assert_eq!(category, "partition-gone");
        assert!(said.contains("delete all pods of the claim"), "{said}");
    }
    // No container outlives a boot.
    world.boot = "boot-2".parse().unwrap();
    world.lives(2, small(0), Ok(None));
    assert!(!plan(world.decide(&c)).let_go_first);
}

/// The driver gives numbers of instances out again, and with them the device nodes that the pods
/// of the claim still have.
#[test]
fn nothing_is_made_on_a_gpu_where_the_partition_of_another_claim_is_gone() {
    let mut world = World::new();
    world.grant_all();
    let first = claim("a", vec![result("main", "gpu-2-mig-1g10gb-19-0")]);
    let second = claim("b", vec![result("main", "gpu-2-mig-1g10gb-19-1")]);
    let given = made(7, "MIG-1");
    let mut record = world.record(&first, Phase::Prepared);
    record.devices[0].given = Some(given.clone());
    world.keep(record.clone());
    world.lives(2, small(1), Ok(None));
    for living in [Ok(Some(&given)), Err(GpuErrorCode::TIMEOUT)] {
        world.lives(2, small(0), living);
        plan(world.decide(&second));
    }
    world.lives(2, small(0), Ok(None));
    let (category, said) = world.refusal(&second);
    assert_eq!(category, "partition-gone");
    assert!(
        said.contains("a MIG instance of claim") && said.contains("delete the pods of that claim"),
        "{said}"
    );
    // Of another boot no container is left.
    world.keep(Record {
        boot: "boot-0".parse().unwrap(),
        ..record
    });
    plan(world.decide(&second));
}

#[test]
fn a_gpu_of_another_claim_is_waited_for_unless_one_side_is_admin() {
    let mut world = World::new();
    let first = claim("a", vec![result("main", "gpu-0")]);
    let record = world.record(&first, Phase::Prepared);
    world.keep(record.clone());
    let second = claim("b", vec![result("main", "gpu-0")]);
    let device = || "gpu-0".parse().unwrap();
    assert_eq!(
        holders(world.decide(&second)),
        [Holder::Record {
            claim: first.reference(),
            device: device(),
            leaving: None,
            clash: Clash::Device
        }]
    );
    let lingering = Leaving {
        reason: "process 7 still uses it".to_owned(),
        undoing: false,
    };
    world.keep(Record {
        phase: Phase::Leaving(lingering.clone()),
        ..record
    });
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
    assert_eq!(
        plan(world.decide(&watcher)).devices[0].sharing,
        Sharing::Admin
    );
    let mut world = World::new();
    let record = world.record(&watcher, Phase::Prepared);
    world.keep(record);
    let second = plan(world.decide(&second));
    assert_eq!(second.devices[0].sharing, Sharing::Exclusive);
}

#[test]
fn an_unreadable_record_may_hold_any_gpu_and_a_newer_one_its_own() {
    let mut world = World::new();
    let c = claim("b", vec![result("main", "gpu-0")]);
    let reason = "the file is empty".to_owned();
    world.records.insert(
        "x".parse().unwrap(),
        Arc::new(Stored::Corrupt {
            reason: reason.clone(),
        }),
    );
    assert_eq!(
        holders(world.decide(&c)),
        [Holder::Unreadable {
            claim: "x".parse().unwrap(),
            reason
        }]
    );
    let newer = |gpus| {
        Arc::new(Stored::Newer {
            version: 2,
            head: Head { claim: None, gpus },
        })
    };
    world
        .records
        .insert("x".parse().unwrap(), newer(vec![gpu(1)]));
    plan(world.decide(&c));
    world
        .records
        .insert("x".parse().unwrap(), newer(vec![gpu(0)]));
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
    world
        .records
        .insert("b".parse().unwrap(), newer(vec![gpu(1)]));
    assert_eq!(
        world.refusal(&c).1,
        "claim ns/claim-b (UID b): its record was written by a later version of divvy (format 2) and is left unchanged (run that version again, or delete the pod and the claim)"
    );
    world.records = BTreeMap::from([(
        "b".parse().unwrap(),
        Arc::new(Stored::Corrupt {
            reason: String::new(),
        }),
    )]);
    assert!(
        matches!(world.decide(&c), Decision::Rebuild),
        "the claim's own unreadable record is made again"
    );
}

#[test]
fn a_holder_with_its_device_allocated_is_in_use_and_each_clash_named() {
    let mut world = World::new();
    let first = claim("a", vec![result("main", "gpu-0")]);
    let record = world.record(&first, Phase::Prepared);
    world.keep(record);
    let second = claim("b", vec![result("main", "gpu-0")]);
    let Decision::Wait(holders) = world.decide(&second) else {
        panic!("nothing is waited for")
    };
    let [holder] = &holders.holders[..] else {
        panic!("{holders:?}")
    };
    assert!(holder.is_in_use(&first));
    assert!(
        !holder.is_in_use(&claim("a", vec![result("main", "gpu-1")])),
        "allocated anew elsewhere"
    );
    let kind = |in_use| holder.refusal(&second, &holders, in_use).why.kind();
    assert_eq!(kind(true), ("conflict", Retry::Never));
    assert_eq!(kind(false), ("held", Retry::Later));
    let Holder::Record {
        claim: of, device, ..
    } = holder.clone()
    else {
        panic!("{holder:?}")
    };
    let clashes = [
        (Clash::Device, "conflict", "it is held by claim ns/claim-a"),
        (
            Clash::Mode,
            "mode-conflict",
            "it needs its GPU exclusively or in another mode than claim ns/claim-a",
        ),
    ];
    for (clash, category, words) in clashes {
        let other = Holder::Record {
            claim: of.clone(),
            device: device.clone(),
            leaving: None,
            clash,
        };
        let refusal = other.refusal(&second, &holders, true);
        assert_eq!(refusal.category(), category);
        assert!(refusal.to_string().contains(words), "{refusal}");
        // The author of a claim elsewhere does not learn whose GPU it is.
        let stranger = Claim {
            namespace: "tenant-b".to_owned(),
            ..second.clone()
        };
        let text = other.refusal(&stranger, &holders, true).to_string();
        assert!(
            text.contains("a claim of another namespace") && !text.contains("ns/"),
            "{text}"
        );
    }
    let unreadable = Holder::Unreadable {
        claim: "x".parse().unwrap(),
        reason: String::new(),
    };
    assert!(!unreadable.is_in_use(&first));
}

/// A process that no claim accounts for refuses all but a claim that is taken up again.
#[test]
fn a_foreign_process_refuses_all_but_a_claim_that_is_taken_up_again() {
    let c = claim("a", vec![result("main", "gpu-0")]);
    let decided = |change: Option<&dyn Fn(&mut Record)>| {
        let mut world = World::new();
        let process = ProcessOnGpu {
            pid: 7,
            gpu_instance: None,
            pod: None,
        };
        world.processes.insert(gpu(0), Ok(vec![process]));
        if let Some(change) = change {
            let leaving = Leaving {
                reason: "process 7".to_owned(),
                undoing: false,
            };
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
    assert_eq!(
        decided(Some(&|r| r.allocated_at = Some("t0".to_owned()))),
        "foreign-processes"
    );
    let boot = |r: &mut Record| r.boot = "boot-0".parse().unwrap();
    assert_eq!(decided(Some(&boot)), "foreign-processes");
    let prepared = |r: &mut Record| {
        boot(r);
        r.phase = Phase::Prepared;
    };
    assert_eq!(decided(Some(&prepared)), "foreign-processes");
}

#[test]
fn a_gpu_that_does_not_list_its_processes_now_is_not_taken_for_free() {
    for (code, retry) in [
        (GpuErrorCode::TIMEOUT, Retry::Soon),
        (GpuErrorCode::GPU_IS_LOST, Retry::Later),
    ] {
        let mut world = World::new();
        let error = GpuError::on_gpu(GpuOp::Processes, code, &gpu(0));
        world.processes.insert(gpu(0), Err(error));
        let Decision::Refuse(refusal) = world.decide(&claim("a", vec![result("main", "gpu-0")]))
        else {
            panic!("a process may compute on it");
        };
        assert_eq!(
            (refusal.category(), refusal.retry()),
            ("gpu-unreadable", retry)
        );
        let said = refusal.to_string();
        assert!(said.contains("cannot be listed"), "{said}");
    }
}

#[test]
fn a_claim_without_a_record_for_which_an_instance_was_made_is_made_again() {
    let mut world = World::new();
    let c = claim("a", vec![result("main", "gpu-0")]);
    let mut note = |claim: &str, boot: &str| {
        world.note(0, small(0), claim, boot, None);
        world.decide(&c)
    };
    assert!(matches!(note("a", "boot-1"), Decision::Rebuild));
    // Of another claim without a record, which is to be made again first.
    assert_eq!(
        holders(note("b", "boot-1")),
        [Holder::Unreadable {
            claim: "b".parse().unwrap(),
            reason: format!(
                "it was lost, and its partition of {} may still be there",
                small(0).in_words()
            ),
        }]
    );
    assert!(
        !matches!(note("a", "boot-0"), Decision::Rebuild),
        "a reboot has removed it"
    );
    // Another claim has it: the one for which it was made first is not asked.
    world.note(0, small(0), "a", "boot-1", None);
    world.grant_all();
    let other = claim("b", vec![result("main", "gpu-0-mig-1g10gb-19-0")]);
    let record = world.record(&other, Phase::Prepared);
    world.keep(record);
    assert!(!matches!(world.decide(&c), Decision::Rebuild));
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
        world.refusal(&claim(
            "a",
            vec![result("one", "gpu-0"), result("two", "gpu-0")]
        )),
        (
            "allocated-twice",
            format!(
                "device gpu-0 ({}) of claim ns/claim-a (UID a): it is allocated twice to the claim (this is a bug in the scheduler: delete the pod and the claim)",
                gpu(0)
            )
        )
    );
    plan(world.decide(&claim(
        "a",
        vec![result("one", "gpu-0"), admin(result("two", "gpu-0"))],
    )));
}

/// Until a reboot; a state of a later version always.
#[test]
fn a_fenced_gpu_is_refused_to_others() {
    let mut world = World::new();
    let c = claim("b", vec![result("main", "gpu-0")]);
    let keep = |world: &mut World, of: &str, boot: &str| {
        let holder = claim(of, vec![result("main", "gpu-1")]);
        let record = world.record(&holder, Phase::Prepared);
        world.keep(record);
        world.note(0, small(0), of, boot, Some("a call hangs"));
    };
    keep(&mut world, "a", "boot-1");
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
    keep(&mut world, "a", "boot-0");
    plan(world.decide(&c));
    world.gpus.insert(
        gpu(0),
        Arc::new(Stored::Corrupt {
            reason: "it ends early".to_owned(),
        }),
    );
    assert_eq!(
        world.refusal(&c).0,
        "fenced",
        "what was done to the GPU is not known"
    );
    world.gpus.insert(
        gpu(0),
        Arc::new(Stored::Newer {
            version: 3,
            head: Head::default(),
        }),
    );
    assert_eq!(world.refusal(&c).0, "newer-state");
}

#[test]
fn nothing_is_decided_beside_a_call_in_flight_but_an_answer_given_before() {
    let mut world = World::new();
    let c = claim("b", vec![result("main", "gpu-0")]);
    world.hardware.entry(gpu(0)).or_default().in_flight = Some(divvy_model::GpuOp::SetMigMode);
    let (category, text) = world.refusal(&c);
    assert_eq!(category, "fenced");
    assert!(
        text.contains("an earlier call (set_mig_mode) has not returned"),
        "{text}"
    );
    let record = world.record(&c, Phase::Prepared);
    world.keep(record);
    assert!(matches!(world.decide(&c), Decision::Ready(_)));
}

#[test]
fn a_gpu_of_another_driver_is_refused_by_its_name() {
    let mut world = World::new();
    world
        .other_drivers
        .insert(gpu(0), "driver gpu.b".to_owned());
    let c = claim("b", vec![result("main", "gpu-0")]);
    assert_eq!(world.refusal(&c).0, "other-driver");
    plan(world.decide(&claim("b", vec![result("main", "gpu-1")])));
    plan(world.decide(&claim("w", vec![admin(result("see", "gpu-0"))])));
}

/// The partition may be gone at any moment, and a twin that joined would be given it.
#[test]
fn nothing_joins_a_claim_that_is_being_undone() {
    let mut world = World::new();
    let first = claim("a", vec![shares::share("main", "gpu-0-ts", "s1")]);
    let second = claim("b", vec![shares::share("main", "gpu-0-ts", "s2")]);
    for (undoing, waits) in [(false, false), (true, true)] {
        let leaving = Leaving {
            reason: "process 1".to_owned(),
            undoing,
        };
        let record = world.record(&first, Phase::Leaving(leaving));
        world.keep(record);
        let decided = world.decide(&second);
        assert_eq!(matches!(decided, Decision::Wait(_)), waits);
    }
}

#[test]
fn a_claim_without_devices_is_ready_and_its_earlier_ones_are_undone() {
    let mut world = World::new();
    match world.decide(&claim("a", Vec::new())) {
        Decision::Ready(prepared) => assert_eq!(prepared, Prepared::default()),
        other => panic!("{other:?}"),
    }
    let record = world.record(&claim("a", vec![result("main", "gpu-0")]), Phase::Prepared);
    world.keep(record);
    let expected = Planned {
        let_go_first: true,
        devices: Vec::new(),
    };
    assert_eq!(plan(world.decide(&claim("a", Vec::new()))), expected);
}

#[test]
fn without_an_inventory_nothing_is_known_to_be_gone() {
    let world = World::new();
    let c = claim("a", vec![result("main", "gpu-3")]);
    match decide(
        &c,
        &Snapshot {
            inventory: None,
            ..world.seen()
        },
    ) {
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
