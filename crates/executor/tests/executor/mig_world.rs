//! A machine of H100s that are really cut into partitions: what lives there, and claims of it by
//! the names of devices.

use divvy_claims::{AllocatedDevice, Allocation, Claim};
use divvy_executor::Executor;
use divvy_gpu_sim::SimNode;
use divvy_model::mig::{ComputeInstance, GpuInstance};
use divvy_model::{GpuDriver, GpuUuid, MigMode};

use crate::world::{World, claim, result};

pub(crate) const HALF: &str = "gpu-0-mig-3g40gb-9-4";
pub(crate) const SMALL: &str = "gpu-0-mig-1g10gb-19-0";

/// A machine of H100s whose policies let them be cut into partitions.
pub(crate) fn mig_world(gpus: &str, seed: u64) -> World {
    let world = World::new(gpus, seed);
    world.lock().is_cut = true;
    world
}

/// A claim of devices by their names.
pub(crate) fn claim_of(name: &str, devices: &[&str], allocated_at: &str) -> Claim {
    let one = |device: &&str| AllocatedDevice {
        device: device.parse().unwrap(),
        ..result(0, false)
    };
    let allocation = Allocation {
        allocated_at: Some(allocated_at.to_owned()),
        results: devices.iter().map(one).collect(),
    };
    Claim {
        allocation,
        ..claim(name, &[], allocated_at)
    }
}

/// The two halves of each of these GPUs.
pub(crate) fn halves(gpus: &[usize]) -> Vec<String> {
    let half = |gpu: &usize| [0, 4].map(|start| format!("gpu-{gpu}-mig-3g40gb-9-{start}"));
    gpus.iter().flat_map(half).collect()
}

/// A claim of both halves of each of these GPUs.
pub(crate) fn claim_of_halves(name: &str, gpus: &[usize], allocated_at: &str) -> Claim {
    let halves = halves(gpus);
    let names: Vec<_> = halves.iter().map(String::as_str).collect();
    claim_of(name, &names, allocated_at)
}

pub(crate) fn sim(world: &World) -> SimNode {
    world.lock().sim.clone()
}

/// Returns the instances that live on a GPU now, whether or not it can be asked.
pub(crate) fn living(world: &World, gpu: &GpuUuid) -> Vec<(GpuInstance, Vec<ComputeInstance>)> {
    let engine = sim(world).engine();
    let there = engine
        .gpus()
        .iter()
        .filter(|g| g.facts.uuid == *gpu)
        .flat_map(|g| &g.instances);
    there
        .map(|living| (living.instance, living.compute.clone()))
        .collect()
}

/// Two of them, and a claim of half of the first that is not prepared yet.
pub(crate) fn setup() -> (World, Executor, Claim, GpuUuid) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let a = claim_of("a", &[HALF], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let gpu = world.gpu(0);
    (world, executor, a, gpu)
}

/// Profile id, start, and number of compute instances of all that lives.
pub(crate) fn shape(world: &World) -> Vec<(u32, u32, usize)> {
    let all = (0..2).flat_map(|n| living(world, &world.gpu(n)));
    all.map(|(i, inside)| (i.profile.0, i.placement.start, inside.len()))
        .collect()
}

/// Nothing of any claim is left.
pub(crate) fn is_clean(world: &World) -> bool {
    let m = world.lock();
    m.records().is_empty() && m.cdi.is_empty() && {
        drop(m);
        shape(world).is_empty()
    }
}

/// Returns true if MIG mode of a GPU is on.
pub(crate) fn mode(world: &World, gpu: &GpuUuid) -> bool {
    sim(world).mig_mode(gpu).is_ok_and(MigMode::is_on)
}
