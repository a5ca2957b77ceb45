//! A GPU that falls off the bus while a claim has a partition of it. Whether the partition outlives that is the GPU's
//! secret until it answers again, so the record is kept until then, and no longer than the partition can live.

use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{Event, Executor, Folder, Refresh, Unprepared};
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid};

use crate::mig_world::{HALF, claim_of, living, mig_world, sim};
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
    Lost { world, executor, claim, gpu }
}

impl Lost {
    fn unprepared() -> Self {
        let lost = prepared();
        assert!(sim(&lost.world).lose_gpu(&lost.gpu));
        lost.world.lock().api.clear();
        let began = lost.world.lock().now;
        let answer = lost.world.unprepare(&lost.executor, &lost.claim.uid).unwrap();
        let Unprepared::Lingering(why) = answer else { panic!("{answer:?}") };
        assert!(why.contains("GPU_IS_LOST"), "{why}");
        let took = lost.world.lock().now.saturating_sub(began);
        assert!(took < Duration::from_secs(1), "there is nothing to wait for: {took:?}");
        assert!(lost.world.lock().cdi.is_empty(), "no container may start with it any more");
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
        self.held() == 0 && self.world.lock().cdi.is_empty() && living(&self.world, &self.gpu).is_empty()
    }
}

#[test]
fn a_partition_of_a_lost_gpu_is_held_after_its_claim_is_gone_and_removed_when_the_gpu_is_back() {
    let mut lost = Lost::unprepared();
    assert!(matches!(&lost.finish()[..], [Event::Kept { .. }]));
    assert_eq!(lost.executor.fences().unwrap().len(), 0, "its neighbours are in no doubt");
    let writes = lost.world.lock().syncs;
    lost.finish();
    assert_eq!(lost.world.lock().syncs, writes, "nothing is written while nothing changes");
    assert!(matches!(&lost.restart()[..], [Event::Kept { .. }]), "another process is as patient");
    assert_eq!(lost.held(), 1);
    sim(&lost.world).restore_gpu(&lost.gpu);
    assert_eq!(living(&lost.world, &lost.gpu).len(), 1, "it has kept its partition");
    assert_eq!(lost.finish(), [Event::Released { claim: lost.claim.uid.clone() }]);
    assert!(lost.is_clean());
}

#[test]
fn a_gpu_that_comes_back_without_its_partition_frees_the_record_and_keeps_the_foreign_instance_at_its_placement()
 {
    let lost = Lost::unprepared();
    let (instance, _) = living(&lost.world, &lost.gpu).remove(0);
    let sim = sim(&lost.world);
    sim.restore_gpu(&lost.gpu);
    sim.edit(|e| e.set_driver_loaded(false));
    sim.edit(|e| e.set_driver_loaded(true));
    sim.edit(|e| e.set_mig_mode(&lost.gpu, true)).unwrap();
    let theirs = sim.make_foreign_instance(&lost.gpu, instance.profile, 4).unwrap();
    assert_eq!(lost.finish(), [Event::Released { claim: lost.claim.uid.clone() }]);
    assert_eq!(lost.held(), 0);
    assert_eq!(living(&lost.world, &lost.gpu), [(instance, vec![theirs])]);
}

#[test]
fn what_cannot_live_any_more_is_not_waited_for_a_board_that_was_taken_out_another_boot_no_kernel_module() {
    let lost = Lost::unprepared();
    sim(&lost.world).remove_gpu(&lost.gpu).unwrap();
    assert_eq!(lost.finish(), [Event::Released { claim: lost.claim.uid.clone() }]);

    let mut lost = Lost::unprepared();
    lost.world.reboot();
    // It is still away.
    sim(&lost.world).lose_gpu(&lost.gpu);
    assert_eq!(lost.restart(), [Event::Released { claim: lost.claim.uid.clone() }]);
    assert!(lost.is_clean());

    let lost = Lost::unprepared();
    sim(&lost.world).edit(|e| e.set_driver_loaded(false));
    assert_eq!(lost.finish(), [Event::Released { claim: lost.claim.uid.clone() }]);
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
        assert!(matches!(&answer, Unprepared::Lingering(why) if why.contains("GPU_IS_LOST")), "{answer:?}");
        assert!(living(&world, &healthy).is_empty(), "{healthy} is not lost");
        let held: Vec<_> = executor.held().unwrap().into_iter().map(|held| held.hold.gpu).collect();
        assert_eq!(held, std::slice::from_ref(&lost));
        assert_eq!(world.lock().gpu_state(&healthy).instances, []);
        let number = usize::from(healthy != world.gpu(0));
        let whole = claim_of("w", &[&format!("gpu-{number}")], "t2");
        world.prepare(&executor, &whole).unwrap();
        sim(&world).restore_gpu(&lost);
        assert_eq!(executor.finish_lingering().0.events, [Event::Released { claim: two.uid.clone() }]);
        assert!(living(&world, &lost).is_empty());
    }
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

#[test]
fn a_prepare_that_was_cut_short_on_a_gpu_that_is_then_lost_is_taken_back_when_it_is_back() {
    for moment in [Moment::Before, Moment::After] {
        let mut lost = prepared();
        let sim = sim(&lost.world);
        lost.world.unprepare(&lost.executor, &lost.claim.uid).unwrap();
        lost.world.lock().crash_at = Some((GpuOp::CreateGpuInstance.name(), moment));
        lost.world.prepare(&lost.executor, &lost.claim).unwrap_err();
        lost.world.lock().api.clear();
        sim.lose_gpu(&lost.gpu);
        lost.restart();
        assert_eq!(lost.held(), 1, "{moment:?}");
        lost.world.unprepare(&lost.executor, &lost.claim.uid).unwrap();
        sim.restore_gpu(&lost.gpu);
        lost.executor.reconcile(&lost.world.view());
        assert!(lost.is_clean(), "{moment:?}");
        assert_eq!(lost.executor.fences().unwrap().len(), 0);
    }
}

#[test]
fn a_gpu_that_is_lost_together_with_its_claims_record_keeps_the_note_of_its_partition() {
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
        sim(&lost.world).edit(|e| e.gpu_instances(&lost.gpu)).map_err(|e| e.code),
        Ok::<_, GpuErrorCode>(Vec::new())
    );
}
