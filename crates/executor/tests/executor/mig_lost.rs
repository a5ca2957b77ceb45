//! A GPU that falls off the bus while a claim has a partition of it. Until it answers again it is
//! not known whether the partition outlives that, so the record is kept until then, and no longer
//! than the partition can live.

use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{Event, Executor, Folder, Refresh, Unprepared, chain};
use divvy_gpu_sim::Fault;
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid};

use crate::mig_world::{HALF, SMALL, claim_of, living, mig_world, sim};
use crate::world::accessors::noted;
use crate::world::{Moment, World};

/// A claim of half a GPU, prepared; then the GPU is lost and the claim let go.
struct Lost {
    world: World,
    executor: Executor,
    claim: Claim,
    gpu: GpuUuid,
}

fn prepared() -> Lost {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let claim = claim_of("a", &[HALF], "t1");
    world.lock().api.insert(claim.uid.clone(), claim.clone());
    world.prepare(&executor, &claim).unwrap();
    let gpu = world.gpu(0);
    Lost {
        world,
        executor,
        claim,
        gpu,
    }
}

/// An administrator destroys all instances of a GPU, as a reset does.
fn destroy_instances(world: &World, gpu: &GpuUuid) {
    for (instance, inside) in living(world, gpu) {
        sim(world).edit(|e| {
            for one in inside {
                e.destroy_compute_instance(gpu, instance.id, one.id)
                    .unwrap();
            }
            e.destroy_gpu_instance(gpu, instance.id).unwrap();
        });
    }
}

impl Lost {
    fn restored(&self, refresh: Refresh) -> Vec<Event> {
        self.executor.restore_cdi(refresh).events
    }

    fn unprepared() -> Self {
        let lost = prepared();
        assert!(sim(&lost.world).lose_gpu(&lost.gpu));
        lost.world.lock().api.clear();
        let began = lost.world.lock().now;
        let answer = lost
            .world
            .unprepare(&lost.executor, &lost.claim.uid)
            .unwrap();
        let Unprepared::Lingering(why) = answer else {
            panic!("{answer:?}")
        };
        assert!(why.contains("GPU_IS_LOST"), "{why}");
        let took = lost.world.lock().now.saturating_sub(began);
        assert!(
            took < Duration::from_secs(1),
            "there is nothing to wait for: {took:?}"
        );
        assert!(
            lost.world.lock().cdi.is_empty(),
            "no container may start with it any more"
        );
        lost
    }

    fn restart(&mut self) -> Vec<Event> {
        self.world.kill();
        self.executor = self.world.start();
        self.executor.restore_cdi(Refresh::All).events
    }

    fn finish(&self) -> Vec<Event> {
        self.executor.finish_lingering().0.events
    }

    fn held(&self) -> usize {
        self.executor.held().unwrap().len()
    }

    fn is_clean(&self) -> bool {
        self.held() == 0
            && self.world.lock().cdi.is_empty()
            && living(&self.world, &self.gpu).is_empty()
    }
}

/// A partition of a lost GPU is held after its claim is gone and removed when the GPU is back.
#[test]
fn a_partition_of_a_lost_gpu_is_held_and_removed_when_it_is_back() {
    let mut lost = Lost::unprepared();
    assert!(matches!(&lost.finish()[..], [Event::Kept { .. }]));
    assert_eq!(
        lost.executor.fences().unwrap().len(),
        0,
        "its neighbours are in no doubt"
    );
    let writes = lost.world.lock().syncs;
    lost.finish();
    assert_eq!(
        lost.world.lock().syncs,
        writes,
        "nothing is written while nothing changes"
    );
    assert!(
        matches!(&lost.restart()[..], [Event::Kept { .. }]),
        "another process is as patient"
    );
    assert_eq!(lost.held(), 1);
    sim(&lost.world).restore_gpu(&lost.gpu);
    assert_eq!(
        living(&lost.world, &lost.gpu).len(),
        1,
        "it has kept its partition"
    );
    assert_eq!(
        lost.finish(),
        [Event::Released {
            claim: lost.claim.uid.clone()
        }]
    );
    assert!(lost.is_clean());
}

/// A GPU that comes back without its partition frees the record and keeps the foreign instance at
/// its placement.
#[test]
fn a_gpu_back_without_its_partition_frees_the_record() {
    let lost = Lost::unprepared();
    let (instance, _) = living(&lost.world, &lost.gpu).remove(0);
    let sim = sim(&lost.world);
    sim.restore_gpu(&lost.gpu);
    sim.edit(|e| e.set_driver_loaded(false));
    sim.edit(|e| e.set_driver_loaded(true));
    sim.edit(|e| e.set_mig_mode(&lost.gpu, true)).unwrap();
    let theirs = sim
        .make_foreign_instance(&lost.gpu, instance.profile, 4)
        .unwrap();
    assert_eq!(
        lost.finish(),
        [Event::Released {
            claim: lost.claim.uid.clone()
        }]
    );
    assert_eq!(lost.held(), 0);
    assert_eq!(living(&lost.world, &lost.gpu), [(instance, vec![theirs])]);
}

#[test]
fn a_partition_that_cannot_live_any_more_is_not_waited_for() {
    let lost = Lost::unprepared();
    sim(&lost.world).remove_gpu(&lost.gpu).unwrap();
    assert_eq!(
        lost.finish(),
        [Event::Released {
            claim: lost.claim.uid.clone()
        }]
    );

    let mut lost = Lost::unprepared();
    lost.world.reboot();
    // It is still away.
    sim(&lost.world).lose_gpu(&lost.gpu);
    assert_eq!(
        lost.restart(),
        [Event::Released {
            claim: lost.claim.uid.clone()
        }]
    );
    assert!(lost.is_clean());

    let lost = Lost::unprepared();
    sim(&lost.world).edit(|e| e.set_driver_loaded(false));
    assert_eq!(
        lost.finish(),
        [Event::Released {
            claim: lost.claim.uid.clone()
        }]
    );
    assert!(lost.is_clean());
}

#[test]
fn a_lost_gpu_keeps_of_its_claim_what_is_on_it_and_nothing_on_other_gpus() {
    let two = claim_of("two", &[HALF, "gpu-1-mig-1g10gb-19-0"], "t1");
    for lost in 0..2 {
        let world = mig_world("h100x2", 1);
        let executor = world.start();
        let (lost, healthy) = (world.gpu(lost), world.gpu(1 - lost));
        world.prepare(&executor, &two).unwrap();
        sim(&world).lose_gpu(&lost);
        let answer = world.unprepare(&executor, &two.uid).unwrap();
        assert!(
            matches!(&answer, Unprepared::Lingering(why) if why.contains("GPU_IS_LOST")),
            "{answer:?}"
        );
        assert!(living(&world, &healthy).is_empty(), "{healthy} is not lost");
        let held: Vec<_> = executor
            .held()
            .unwrap()
            .into_iter()
            .map(|held| held.hold.gpu)
            .collect();
        assert_eq!(held, std::slice::from_ref(&lost));
        assert_eq!(noted(&world, &healthy), []);
        let number = usize::from(healthy != world.gpu(0));
        let whole = claim_of("w", &[&format!("gpu-{number}")], "t2");
        world.prepare(&executor, &whole).unwrap();
        sim(&world).restore_gpu(&lost);
        assert_eq!(
            executor.finish_lingering().0.events,
            [Event::Released {
                claim: two.uid.clone()
            }]
        );
        assert!(living(&world, &lost).is_empty());
    }
}

/// The second GPU refuses, and then the first does not give its partition back.
#[test]
fn a_failed_prepare_keeps_what_cannot_be_undone_and_nothing_on_other_gpus() {
    let two = claim_of("two", &[HALF, "gpu-1-mig-1g10gb-19-0"], "t1");
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let (stuck, refuses) = (world.gpu(0), world.gpu(1));
    let fails = |op| Fault::fail(GpuErrorCode::NO_PERMISSION).of(op);
    sim(&world).fault(fails(GpuOp::CreateGpuInstance).on(&refuses));
    sim(&world).fault(fails(GpuOp::DestroyGpuInstance).on(&stuck));
    world.prepare(&executor, &two).unwrap_err();
    sim(&world).clear_faults();

    let held = executor.held().unwrap().into_iter();
    let held: Vec<_> = held.map(|held| held.hold.gpu).collect();
    assert_eq!(held, std::slice::from_ref(&stuck));
    let whole = claim_of("w", &["gpu-1"], "t1");
    world.prepare(&executor, &whole).unwrap();
    assert_eq!(
        executor.finish_lingering().0.events,
        [Event::Released { claim: two.uid }]
    );
    assert!(living(&world, &stuck).is_empty());
}

#[test]
fn an_orphan_on_a_lost_gpu_is_kept_too() {
    let lost = prepared();
    sim(&lost.world).lose_gpu(&lost.gpu);
    lost.world.lock().api.clear();
    lost.executor.reconcile(&lost.world.view());
    lost.world.pass(Duration::from_mins(5));
    lost.executor.reconcile(&lost.world.view());
    assert_eq!(lost.held(), 1);
    sim(&lost.world).restore_gpu(&lost.gpu);
    lost.executor.reconcile(&lost.world.view());
    assert!(lost.is_clean());
}

/// A prepare that was cut short on a GPU that is then lost is taken back when it is back.
#[test]
fn a_cut_short_prepare_on_a_lost_gpu_is_taken_back_when_it_is_back() {
    for moment in [Moment::Before, Moment::After] {
        let mut lost = prepared();
        let sim = sim(&lost.world);
        lost.world
            .unprepare(&lost.executor, &lost.claim.uid)
            .unwrap();
        lost.world.lock().crash_at = Some((GpuOp::CreateGpuInstance.name(), moment));
        lost.world.prepare(&lost.executor, &lost.claim).unwrap_err();
        lost.world.lock().api.clear();
        sim.lose_gpu(&lost.gpu);
        lost.restart();
        assert_eq!(lost.held(), 1, "{moment:?}");
        lost.world
            .unprepare(&lost.executor, &lost.claim.uid)
            .unwrap();
        sim.restore_gpu(&lost.gpu);
        lost.executor.reconcile(&lost.world.view());
        assert!(lost.is_clean(), "{moment:?}");
        assert_eq!(lost.executor.fences().unwrap().len(), 0);
    }
}

/// A GPU that is lost together with its claims record keeps the note of its partition.
#[test]
fn a_gpu_lost_with_its_claims_record_keeps_the_partitions_note() {
    let mut lost = prepared();
    lost.world.lock().put(Folder::Claims, "uid-a.json", None);
    lost.world.lock().api.clear();
    sim(&lost.world).lose_gpu(&lost.gpu);
    // What a new process reads does not have it.
    let inventory = sim(&lost.world).inventory();
    lost.world.lock().inventory = Some(std::sync::Arc::new(inventory));
    lost.restart();
    for _ in 0..2 {
        lost.executor.reconcile(&lost.world.view());
        lost.world.pass(Duration::from_mins(5));
    }
    assert_eq!(lost.held(), 1, "what lives there is not known");
    sim(&lost.world).restore_gpu(&lost.gpu);
    let inventory = sim(&lost.world).inventory();
    lost.world.lock().inventory = Some(std::sync::Arc::new(inventory));
    lost.executor.reconcile(&lost.world.view());
    assert!(lost.is_clean());
    assert_eq!(
        sim(&lost.world)
            .edit(|e| e.gpu_instances(&lost.gpu))
            .map_err(|e| e.code),
        Ok::<_, GpuErrorCode>(Vec::new())
    );
}

/// The driver gives numbers of instances out again: a container that starts again must not get the
/// device nodes of an instance that is gone.
#[test]
fn files_of_a_claim_whose_partition_is_gone_are_withdrawn() {
    let ways: [fn(&Lost); 3] = [
        |lost| destroy_instances(&lost.world, &lost.gpu),
        |lost| {
            sim(&lost.world).edit(|e| e.set_driver_loaded(false));
            sim(&lost.world).edit(|e| e.set_driver_loaded(true));
        },
        // Another one is made in its place.
        |lost| {
            let (instance, _) = living(&lost.world, &lost.gpu).remove(0);
            destroy_instances(&lost.world, &lost.gpu);
            sim(&lost.world)
                .make_foreign_instance(&lost.gpu, instance.profile, 4)
                .unwrap();
        },
    ];
    for (way, happens) in ways.into_iter().enumerate() {
        let mut lost = prepared();
        let (claim, file) = (lost.claim.uid.clone(), lost.world.lock().cdi.clone());
        assert_eq!(lost.restored(Refresh::All), [], "{way}: it lives");
        happens(&lost);
        for refresh in [Refresh::Missing, Refresh::All, Refresh::Missing] {
            let events = lost.restored(refresh);
            let withdrawn = Event::CdiWithdrawn {
                claim: claim.clone(),
            };
            assert!(
                events.is_empty() || events == [withdrawn],
                "{way}: {events:?}"
            );
            assert!(lost.world.lock().cdi.is_empty(), "{way}");
        }
        lost.restart();
        assert!(lost.world.lock().cdi.is_empty(), "{way}: by a new process");
        let refused = lost.world.prepare(&lost.executor, &lost.claim).unwrap_err();
        assert_eq!(refused.category(), "partition-gone", "{way}");
        assert!(chain(&refused).contains("delete all pods of the claim"));
        assert!(lost.world.lock().cdi.is_empty(), "{way}: by a prepare");

        lost.world.unprepare(&lost.executor, &claim).unwrap();
        if way == 2 {
            destroy_instances(&lost.world, &lost.gpu);
        }
        lost.world.prepare(&lost.executor, &lost.claim).unwrap();
        assert_eq!(lost.world.lock().cdi.len(), file.len(), "{way}");
        assert_eq!(living(&lost.world, &lost.gpu).len(), 1, "{way}");
    }
}

#[test]
fn after_a_reboot_a_claim_whose_partition_was_gone_has_its_files() {
    let mut lost = prepared();
    destroy_instances(&lost.world, &lost.gpu);
    lost.restored(Refresh::Missing);
    assert!(lost.world.lock().cdi.is_empty());
    lost.world.reboot();
    let claim = lost.claim.uid.clone();
    assert_eq!(lost.restart(), [Event::ExecutedAgain { claim }]);
    assert_eq!(lost.world.lock().cdi.len(), 1);
    assert_eq!(lost.restored(Refresh::All), []);
}

/// A GPU that does not answer says nothing of its partitions.
#[test]
fn a_file_is_neither_removed_nor_made_while_its_partition_is_unread() {
    let lost = prepared();
    sim(&lost.world).lose_gpu(&lost.gpu);
    for refresh in [Refresh::Missing, Refresh::All] {
        assert_eq!(lost.restored(refresh), []);
        assert_eq!(lost.world.lock().cdi.len(), 1);
    }
    let files = std::mem::take(&mut lost.world.lock().cdi);
    let events = lost.restored(Refresh::Missing);
    assert!(matches!(&events[..], [Event::Failed { .. }]), "{events:?}");
    lost.world.prepare(&lost.executor, &lost.claim).unwrap_err();
    assert!(
        lost.world.lock().cdi.is_empty(),
        "it may have been withdrawn"
    );
    sim(&lost.world).restore_gpu(&lost.gpu);
    let claim = lost.claim.uid.clone();
    assert_eq!(
        lost.restored(Refresh::Missing),
        [Event::CdiRestored { claim }]
    );
    assert_eq!(lost.world.lock().cdi, files);
}

#[test]
fn nothing_is_made_beside_a_partition_that_is_gone_under_its_claim() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let (a, b) = (claim_of("a", &[HALF], "t1"), claim_of("b", &[SMALL], "t1"));
    world.prepare(&executor, &a).unwrap();
    destroy_instances(&world, &world.gpu(0));
    let refused = world.prepare(&executor, &b).unwrap_err();
    assert_eq!(refused.category(), "partition-gone");
    assert!(living(&world, &world.gpu(0)).is_empty());
    let elsewhere = claim_of("c", &["gpu-1-mig-1g10gb-19-0"], "t1");
    world.prepare(&executor, &elsewhere).unwrap();
    world.unprepare(&executor, &a.uid).unwrap();
    world.prepare(&executor, &b).unwrap();
}

#[test]
fn nothing_is_made_again_after_a_boot_beside_a_partition_that_is_gone() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let (a, b) = (claim_of("a", &[HALF], "t1"), claim_of("b", &[SMALL], "t1"));
    for claim in [&a, &b] {
        world.lock().api.insert(claim.uid.clone(), claim.clone());
        world.prepare(&executor, claim).unwrap();
    }
    world.reboot();
    let executor = world.start();
    // The pod of `a` starts again, and its partition is lost.
    world.prepare(&executor, &a).unwrap();
    destroy_instances(&world, &world.gpu(0));

    let refused = world.prepare(&executor, &b).unwrap_err();
    assert_eq!(refused.category(), "partition-gone");
    executor.restore_cdi(Refresh::All);
    assert!(living(&world, &world.gpu(0)).is_empty());
    assert!(world.lock().cdi.is_empty());
    world.unprepare(&executor, &a.uid).unwrap();
    world.prepare(&executor, &b).unwrap();
}
