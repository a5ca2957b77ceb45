//! Partitions whose claim's record was lost or cannot be read any more: adopted, made anew or removed, by what else is
//! known of them.

use std::time::Duration;

use divvy_claims::Phase;
use divvy_executor::{Event, Folder, Unprepared};
use divvy_model::mig::{GpuInstanceId, GpuInstanceProfileId};

use crate::mig_world::{SMALL, claim_of, living, setup, shape, sim};
use crate::story::uid;

#[test]
fn after_a_lost_record_store_partitions_are_adopted_from_allocated_claims_with_a_cdi_file_and_no_others() {
    for by_prepare in [true, false] {
        let (world, executor, a, gpu) = setup();
        let answer = world.prepare(&executor, &a).unwrap();
        let theirs = sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0).unwrap();
        let before = living(&world, &gpu);
        world.kill();
        let files = world.lock().files(Folder::Claims);
        for name in files.into_keys() {
            world.lock().put(Folder::Claims, &name, None);
        }
        let executor = world.start();
        if by_prepare {
            assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
        } else {
            let report = executor.reconcile(&world.view());
            assert_eq!(report.events, [Event::Rebuilt { claim: a.uid.clone() }]);
        }
        assert_eq!(living(&world, &gpu), before, "nothing is made anew under a running container");
        let told = executor.foreign();
        assert_eq!(told[&gpu].iter().map(|i| i.id).collect::<Vec<_>>(), [theirs.gpu_instance]);
        assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
        assert_eq!(shape(&world), [(19, 0, 1)]);
        // Allocated, never prepared: an instance at its place is somebody else's.
        let b = claim_of("b", &[SMALL], "t2");
        world.lock().api.insert(b.uid.clone(), b.clone());
        assert_eq!(world.prepare(&executor, &b).unwrap_err().category(), "step");
        assert_eq!(shape(&world), [(19, 0, 1)]);
    }
}

#[test]
fn a_lost_record_whose_partition_is_gone_too_is_made_anew() {
    let (world, executor, a, gpu) = setup();
    let answer = world.prepare(&executor, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    sim(&world).edit(|e| {
        e.destroy_compute_instance(&gpu, instance.id, inside[0].id).unwrap();
    });
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"rubbish"));
    let executor = {
        drop(executor);
        world.start()
    };
    executor.reconcile(&world.view());
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(shape(&world), [(9, 4, 1)], "half of one is no partition");
    assert_eq!(instance.id, GpuInstanceId(2));
    let phase = world.lock().records()[&uid("a")].fine().unwrap().phase.clone();
    assert_eq!(phase, Phase::Prepared);
}

#[test]
fn partitions_of_a_claim_that_is_gone_together_with_its_record_are_removed_by_what_its_cdi_file_says() {
    for record in [None, Some(b"rubbish".as_slice())] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0).unwrap();
        world.lock().api.clear();
        world.kill();
        world.lock().put(Folder::Claims, "uid-a.json", record);
        let executor = world.start();
        executor.reconcile(&world.view());
        assert_eq!(shape(&world).len(), 2, "a grace period");
        world.pass(Duration::from_mins(5));
        executor.reconcile(&world.view());
        assert_eq!(shape(&world), [(19, 0, 1)]);
        let m = world.lock();
        assert!(m.records().is_empty() && m.cdi.is_empty());
    }
}

#[test]
fn an_unreadable_record_of_a_gone_claim_whose_partition_is_in_use_holds_that_partition_and_nothing_else() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.lock().api.clear();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"rubbish"));
    let over = world.prepare(&executor, &claim_of("b", &["gpu-0-mig-1g10gb-19-4"], "t2")).unwrap_err();
    assert_eq!(over.category(), "held");
    world.prepare(&executor, &claim_of("b", &[SMALL], "t3")).unwrap();
    sim(&world).end_process(4711);
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(19, 0, 1)]);
}
