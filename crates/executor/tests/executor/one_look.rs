//! Questions of a prepare to its GPU: each is asked once under the locks, and what is decided on is
//! what the plan is made of.

use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::Executor;
use divvy_gpu_sim::{Fault, FaultEffect};
use divvy_model::{GpuErrorCode, GpuOp, Grant, MpsServer};

use crate::mig_world::{HALF, SMALL, claim_of, mig_world, mode, setup, sim};
use crate::mps_world::{prepared, shared};
use crate::story::uid;
use crate::world::accessors::picture;
use crate::world::{HardwareFault, World};

/// Reads of a GPU and of the supervisor, by kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Asked {
    mode: u64,
    instances: u64,
    inside: u64,
    facts: u64,
    servers: usize,
}

const NOTHING: Asked = Asked {
    mode: 0,
    instances: 0,
    inside: 0,
    facts: 0,
    servers: 0,
};

fn asked(world: &World) -> Asked {
    let (node, servers) = (sim(world), world.lock().mps_looks);
    Asked {
        mode: node.calls(GpuOp::MigMode),
        instances: node.calls(GpuOp::GpuInstances),
        inside: node.calls(GpuOp::ComputeInstances),
        facts: node.calls(GpuOp::Facts),
        servers,
    }
}

/// Returns the reads of one prepare.
fn reads(world: &World, executor: &Executor, claim: &Claim) -> Asked {
    let before = asked(world);
    prepared(world, executor, claim);
    let after = asked(world);
    Asked {
        mode: after.mode - before.mode,
        instances: after.instances - before.instances,
        inside: after.inside - before.inside,
        facts: after.facts - before.facts,
        servers: after.servers - before.servers,
    }
}

/// Returns a node whose rules ask for everything, so that nothing is left unread for want of a
/// grant.
fn node() -> (World, Executor) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let grant = Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(true),
        mps: MpsServer::equal(4, Some(1 << 14)),
        ..Grant::default()
    };
    let grants = [0, 1].map(|number| (world.gpu(number), grant));
    executor.grant(&grants.into()).unwrap();
    (world, executor)
}

#[test]
fn a_prepare_of_a_whole_gpu_reads_its_mode_once_and_nothing_else() {
    let (world, executor) = node();
    let whole = claim_of("a", &["gpu-1"], "t1");
    let once = Asked { mode: 1, ..NOTHING };
    assert_eq!(reads(&world, &executor, &whole), once);
    assert_eq!(reads(&world, &executor, &whole), once, "prepared again");
}

/// The look, and one more at the place right before something is made there: it must be empty.
#[test]
fn a_prepare_of_a_partition_lists_instances_once_beside_the_creation() {
    let (world, executor) = node();
    let first = claim_of("a", &[HALF], "t1");
    let made = Asked {
        mode: 1,
        instances: 2,
        ..NOTHING
    };
    // Before and after a change of MIG mode the driver is asked for it, and the inventory after it.
    let mode_too = Asked {
        mode: 3,
        facts: 1,
        ..made
    };
    assert_eq!(reads(&world, &executor, &first), mode_too);
    let beside = Asked { inside: 1, ..made };
    let second = claim_of("b", &[SMALL], "t1");
    assert_eq!(reads(&world, &executor, &second), beside);
    let again = Asked {
        mode: 1,
        instances: 1,
        inside: 1,
        ..NOTHING
    };
    assert_eq!(reads(&world, &executor, &first), again, "prepared again");
}

#[test]
fn a_prepare_of_an_mps_share_reads_modes_and_servers_once() {
    let (world, executor) = node();
    let once = Asked {
        mode: 1,
        facts: 1,
        servers: 1,
        ..NOTHING
    };
    // The inventory reads the GPU again after the change of its compute mode.
    let first = Asked { facts: 2, ..once };
    assert_eq!(
        reads(&world, &executor, &shared("a", "gpu-1-mps")),
        first,
        "its server is started"
    );
    assert_eq!(reads(&world, &executor, &shared("b", "gpu-1-mps")), once);
}

/// The earlier allocation goes first, which takes time: what was read before is read again.
#[test]
fn a_gpu_is_read_again_after_an_earlier_allocation_was_let_go() {
    let (world, executor) = node();
    prepared(&world, &executor, &claim_of("a", &[HALF], "t1"));
    let again = claim_of("a", &[HALF], "t2");
    let asked = reads(&world, &executor, &again);
    // Two looks, one of the plan to let it go, one of the removal, and one of the creation.
    assert_eq!((asked.mode, asked.instances), (3, 5), "{asked:?}");
}

/// The only read of a place fails: nothing is made there, and nothing removed.
#[test]
fn a_place_that_cannot_be_read_is_not_planned_as_if_it_were_empty() {
    for op in [GpuOp::GpuInstances, GpuOp::ComputeInstances] {
        let (world, executor) = node();
        prepared(&world, &executor, &claim_of("a", &[HALF], "t1"));
        let before = crate::mig_world::living(&world, &world.gpu(0));
        sim(&world).fault(Fault {
            op: Some(op),
            times: None,
            effect: FaultEffect::Fail(GpuErrorCode::UNKNOWN),
            ..Fault::fail(GpuErrorCode::UNKNOWN)
        });
        let b = claim_of("b", &[SMALL], "t1");
        let call = executor.begin(Duration::from_millis(5));
        let answer = executor.prepare(&b, &call);
        sim(&world).clear_faults();
        let there = crate::mig_world::living(&world, &world.gpu(0));
        assert!(there.starts_with(&before), "{op:?}: {answer:?}");
    }
}

/// Whatever its reads say, the note has what is to be given back.
#[test]
fn a_call_that_returns_during_a_look_leaves_the_note_of_what_was_found() {
    for answers in 0..4 {
        let (world, executor, a, gpu) = setup();
        world.lock().hardware_fault = Some(HardwareFault::Late {
            after: Duration::from_secs(1_000),
            succeeds: true,
        });
        let call = executor.begin(Duration::from_millis(5));
        executor.prepare(&a, &call).unwrap_err();
        assert!(!mode(&world, &gpu), "the call has not returned");
        world.lock().lands_after = Some((GpuOp::MigMode, answers));
        for _ in 0..4 {
            executor.reconcile(&world.view());
        }
        world.lock().api.remove(&uid("a"));
        assert!(mode(&world, &gpu), "the call has returned");
        let found = picture(&world, &gpu);
        assert!(found.turned_mig_on(), "after {answers} answers: {found:?}");
    }
}
