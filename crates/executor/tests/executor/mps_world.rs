//! Nodes with MPS servers, and claims of their shares.

use divvy_claims::Claim;
use divvy_executor::{Executor, InventorySource};
use divvy_model::{ComputeMode, GpuUuid, Grant, MpsProtocol, MpsServer};

use crate::mig_world::{claim_of, mig_world, sim};
use crate::world::World;
use crate::world::accessors::set_protocol;

/// Time-sliced share of a partition.
pub(crate) const TS: &str = "gpu-0-mig-1g10gb-19-0-ts";
/// MPS share of a partition.
pub(crate) const MPS: &str = "gpu-0-mig-1g10gb-19-0-mps";

/// Returns a node that runs, and its first GPU.
pub(crate) fn start() -> (World, Executor, GpuUuid) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    (world, executor, gpu)
}

/// Grants MPS servers of equal slots, on GPUs and in partitions.
pub(crate) fn grants(world: &World, executor: &Executor) {
    let grant = Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(true),
        mps: MpsServer::equal(4, Some(1 << 14)),
        mps_slots_in_partitions: Some(4),
        ..Grant::default()
    };
    executor.grant(&[(world.gpu(0), grant)].into()).unwrap();
}

/// Returns the same on a driver whose servers have namespaces.
pub(crate) fn v3() -> (World, Executor, GpuUuid) {
    let (world, executor, gpu) = start();
    set_protocol(&world, MpsProtocol::V3);
    let grant = Grant {
        mps: Some(MpsServer::NAMESPACES),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    (world, executor, gpu)
}

/// Makes a claim of a share.
pub(crate) fn shared(name: &str, device: &str) -> Claim {
    let mut claim = claim_of(name, &[device], "t1");
    for result in &mut claim.allocation.results {
        result.share_id = Some(format!("share-{name}"));
    }
    claim
}

/// Makes a claim of an MPS share with so many percent of the cores.
pub(crate) fn part(name: &str, cores: u32) -> Claim {
    let mut claim = shared(name, "gpu-0-mps");
    for result in &mut claim.allocation.results {
        result.consumed_capacity = [
            ("cores".to_owned(), cores.to_string()),
            ("memory".to_owned(), "1Gi".to_owned()),
        ]
        .into();
    }
    claim
}

/// Prepares a claim that the API has.
pub(crate) fn prepared(world: &World, executor: &Executor, claim: &Claim) {
    world.lock().api.insert(claim.uid.clone(), claim.clone());
    world.prepare(executor, claim).unwrap();
}

/// Sets EXCLUSIVE_PROCESS, as an administrator's unit does at each boot.
pub(crate) fn set_exclusive(world: &World, gpu: &GpuUuid) {
    sim(world).edit(|engine| {
        let facts = &mut engine.gpu(gpu).unwrap().facts;
        facts.compute_mode = Some(ComputeMode::ExclusiveProcess);
    });
    world.changed(gpu).unwrap();
}
