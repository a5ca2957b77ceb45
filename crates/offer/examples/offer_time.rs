//! Prints how long a step of a node takes whose GPUs are offered whole, in partitions and in shares
//! (budget: 2 ms for 16 GPUs), how long its parts take, and how much it publishes: `cargo run
//! --release -p divvy-offer --example offer_time`.

#![expect(clippy::print_stdout, reason = "its output is its purpose")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_gpu_sim::{Engine, SimSpec, mig_capabilities};
use divvy_model::health::Ailment;
use divvy_model::mig::ProfileVariant;
use divvy_model::{Inventory, MigMode, Ordinals};
use divvy_offer::{
    Answer, Fact, GpuRules, HealthView, Input, KubeVersion, ModeLock, Modes, Records,
    ServerFeatures, Settings, Sick, World, carve, step, validate,
};

const ROUNDS: usize = 200;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (spec, rare) in [
        ("h100x8", false),
        ("a100-40x16", false),
        ("h100x16", false),
        ("h100x16", true),
    ] {
        let engine = Engine::new(&spec.parse::<SimSpec>()?);
        let mut inventory = engine.inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        let mut capabilities = BTreeMap::new();
        let mut rules = BTreeMap::new();
        for gpu in engine.gpus() {
            capabilities
                .extend(mig_capabilities(&gpu.model).map(|caps| (gpu.facts.uuid.clone(), caps)));
            let rare = if rare {
                BTreeSet::from([ProfileVariant::Media])
            } else {
                BTreeSet::new()
            };
            rules.insert(
                gpu.facts.uuid.clone(),
                GpuRules {
                    modes: Modes::everything(),
                    rare,
                    ..GpuRules::default()
                },
            );
        }
        for gpu in inventory.gpus.values_mut() {
            if !gpu.facts.architecture.toggles_mig_without_reset() {
                gpu.facts.mig_mode = MigMode::Supported {
                    current: true,
                    pending: true,
                };
            }
        }
        let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1));
        let plain = Input::plain("node-1", &inventory, &ordinals, &features);
        let input = Input {
            capabilities: &capabilities,
            rules: &rules,
            ..plain
        };
        let mut times: Vec<(Duration, Duration)> = Vec::new();
        let mut pool = carve(&input).pool;
        for _ in 0..ROUNDS {
            let start = Instant::now();
            let next = carve(&input).pool;
            let carved = start.elapsed();
            pool = next;
            let start = Instant::now();
            validate(&pool)?;
            times.push((carved, start.elapsed()));
        }
        times.sort();
        let at = |percent: usize| {
            times
                .get(ROUNDS * percent / 100)
                .copied()
                .unwrap_or_default()
        };
        let ((best, _), (p50, checked), (p99, _)) = (at(0), at(50), at(99));
        let step = step_time(&inventory, &ordinals, rare);
        println!(
            "{spec}{}: {} devices in {} slices; carve best {best:?} p50 {p50:?} p99 {p99:?}, validate {checked:?}; step p50 {step:?}",
            if rare { " with +me" } else { "" },
            pool.devices().count(),
            pool.slices.len(),
        );
    }
    Ok(())
}

/// A GPU falls ill and recovers, again and again: the median time until the pool says so.
fn step_time(inventory: &Inventory, ordinals: &Ordinals, rare: bool) -> Duration {
    let rare = if rare {
        BTreeSet::from([ProfileVariant::Media])
    } else {
        BTreeSet::new()
    };
    let mut world = World::new(Settings {
        node: "node-1".to_owned(),
        rules: GpuRules {
            modes: Modes::everything(),
            rare,
            ..GpuRules::default()
        },
        mode_lock: ModeLock::Auto,
        neighbours_first: false,
        leave: Duration::from_mins(1),
        ask_again: Duration::from_secs(30),
        retry: Duration::from_secs(5),
    });
    let mut learn = |fact| drop(step(&mut world, fact, Duration::ZERO));
    learn(Fact::Server {
        version: KubeVersion::new(1, 37, 1),
        dropped: None,
    });
    learn(Fact::Policies {
        policies: Vec::new(),
        labels: BTreeMap::new(),
    });
    learn(Fact::Records(Records {
        ordinals: ordinals.clone(),
        ..Records::default()
    }));
    learn(Fact::Inventory {
        gpus: Arc::new(inventory.clone()),
        driver_down: false,
    });
    learn(Fact::Answer(Some(Answer::default())));
    let mut times: Vec<Duration> = Vec::new();
    for round in 0..ROUNDS {
        let mut health = HealthView::default();
        if let Some(gpu) = inventory.gpus.keys().next().filter(|_| round % 2 == 0) {
            let sick = Sick {
                gpu: [Ailment::Xid(79)].into(),
                ..Sick::default()
            };
            health.sick.insert(gpu.clone(), sick);
        }
        let start = Instant::now();
        learn(Fact::Health(Arc::new(health)));
        times.push(start.elapsed());
    }
    times.sort();
    times.get(ROUNDS / 2).copied().unwrap_or_default()
}
