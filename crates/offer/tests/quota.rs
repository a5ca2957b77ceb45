//! The counter `memory`: what a queue charges by it is what a claim is given, on every board and
//! under every policy, and nothing else changes.
//!
//! Kueue's rule is that of `computeCounterCharges` and `matchDevicesWithSelectors` in
//! `pkg/dra/counters.go` (kubernetes-sigs/kueue at 00d42bb7): of all devices of complete pools that
//! class and request select, the most that one draws of the counter.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};

use divvy_gpu_sim::{SimNode, profiles};
use divvy_model::mig::ProfileVariant;
use divvy_model::{
    AttributeValue, DeviceKind, Form, GpuUuid, Inventory, MpsAbility, Ordinals, Sharing, TargetKind,
};
use divvy_offer::{
    Amount, CounterUse, Device, GpuRules, Input, KubeVersion, Modes, Pool, ServerFeatures, carve,
    validate,
};

const MEMORY: &str = "memory";

/// Returns the rules of a few policies.
fn policies() -> Vec<GpuRules> {
    let only = |forms: &[Form]| GpuRules {
        modes: Modes::Only(forms.iter().copied().collect()),
        ..GpuRules::default()
    };
    let mut partitions = only(&[Form::PARTITIONS, Form::SHARED_PARTITIONS]);
    partitions.rare = [
        ProfileVariant::Media,
        ProfileVariant::AllMedia,
        ProfileVariant::NoMedia,
    ]
    .into();
    vec![
        GpuRules::default(),
        only(&Form::OFFERED),
        only(&[Form::WHOLE]),
        only(&[Form::TIME_SLICED]),
        only(&[Form::WHOLE, Form::MPS]),
        partitions,
    ]
}

fn pool(inventory: &Inventory, rules: &GpuRules) -> Pool {
    let mut inventory = inventory.clone();
    let driver = inventory.system.driver_version.clone();
    inventory.system.mps = MpsAbility::of_node(&driver, true, true, None);
    let mut ordinals = Ordinals::default();
    let gpus = inventory.gpus.iter();
    ordinals.assign(gpus.map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
    let of_all: BTreeMap<GpuUuid, GpuRules> = inventory
        .gpus
        .keys()
        .map(|uuid| (uuid.clone(), rules.clone()))
        .collect();
    let capabilities = inventory
        .gpus
        .iter()
        .filter_map(|(uuid, gpu)| Some((uuid.clone(), gpu.mig.as_ref()?.capabilities.clone())))
        .collect();
    let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1));
    let plain = Input::plain("n1", &inventory, &ordinals, &features);
    let pool = carve(&Input {
        capabilities: &capabilities,
        rules: &of_all,
        ..plain
    })
    .pool;
    validate(&pool).unwrap();
    pool
}

fn drawn(device: &Device) -> Option<u64> {
    let counters = device.consumes.iter().flat_map(|uses| &uses.counters);
    let mut memory = counters.filter(|(name, _)| *name == MEMORY);
    memory.next().map(|(_, amount)| amount.value())
}

/// Returns what a claim asks for: form, product and, of partitions, the profile.
fn request(device: &Device) -> (Form, String, String) {
    let text = |name: &str| match device.attributes.get(name) {
        Some(AttributeValue::String(text)) => text.clone(),
        _ => String::new(),
    };
    let form = DeviceKind::parse(&device.name).unwrap().form();
    (form, text("productName"), text("profile"))
}

/// Checks every board alone and beside others, under every policy, without the counter and with it.
fn each(mut check: impl FnMut(&str, &Inventory, &Pool, &Pool)) {
    let boards = profiles().iter().map(|board| format!("{}x2", board.key));
    for sim in boards.chain(["h100x4,l4x2,a30x2".to_owned()]) {
        let inventory = SimNode::parse(&sim).unwrap().inventory();
        for rules in policies() {
            let counted = GpuRules {
                counts_memory: true,
                ..rules.clone()
            };
            let [plain, counted] = [&rules, &counted].map(|rules| pool(&inventory, rules));
            check(
                &format!("{sim}, {:?}", rules.modes),
                &inventory,
                &plain,
                &counted,
            );
        }
    }
}

#[test]
fn what_a_queue_charges_by_the_counter_is_what_a_claim_is_given() {
    let mut seen = 0;
    each(|what, _, _, pool| {
        let mut charges: BTreeMap<_, u64> = BTreeMap::new();
        let held = || {
            pool.devices()
                .filter(|device| request(device).0.sharing.holds())
        };
        for device in held() {
            let drawn = drawn(device).unwrap_or_default();
            let charge = charges.entry(request(device)).or_default();
            *charge = (*charge).max(drawn);
        }
        for device in held() {
            // Whichever device the scheduler takes for the request.
            assert_eq!(
                drawn(device).unwrap_or_default(),
                charges[&request(device)],
                "{what}: {}",
                device.name
            );
            seen += 1;
        }
    });
    assert!(seen > 1_000, "{seen}");
}

#[test]
fn a_whole_gpu_is_charged_as_the_sum_of_what_is_cut_from_it() {
    each(|what, inventory, _, pool| {
        let sets: BTreeMap<&str, u64> = pool
            .slices
            .iter()
            .flat_map(|slice| &slice.counter_sets)
            .filter_map(|set| Some((set.name.as_str(), set.counters.get(MEMORY)?.value())))
            .collect();
        for device in pool.devices() {
            let form = request(device).0;
            let Some(memory) = drawn(device) else {
                // Nothing to count: no memory of its own, or no claim holds it.
                let of_gpu = inventory
                    .gpus
                    .values()
                    .any(|gpu| gpu.facts.memory_bytes.is_some());
                assert!(!form.sharing.holds() || !of_gpu, "{what}: {}", device.name);
                continue;
            };
            let total = sets[device.consumes[0].set.as_str()];
            if form.target == TargetKind::Gpu {
                assert_eq!(memory, total, "{what}: {}", device.name);
            }
            // As many as its memory slices are of those of the GPU, to the byte.
            let places = |counters: &BTreeMap<String, Amount>| -> u64 {
                let of = counters
                    .iter()
                    .filter(|(name, _)| *name == "gpu" || name.starts_with("memory-slice"));
                of.map(|(_, amount)| amount.value()).sum()
            };
            let set = pool.slices.iter().flat_map(|slice| &slice.counter_sets);
            let set = set
                .into_iter()
                .find(|set| set.name == device.consumes[0].set)
                .unwrap();
            let [part, all] = [&device.consumes[0].counters, &set.counters].map(places);
            assert_eq!(memory * all, total * part, "{what}: {}", device.name);
            // The driver's part is in it: never less than what programs can allocate.
            if form.sharing == Sharing::Exclusive && form.target == TargetKind::Partition {
                let usable = device.capacity[MEMORY].value.value();
                assert!(
                    memory >= usable,
                    "{what}: {} has {usable} and is charged {memory}",
                    device.name
                );
            }
        }
        let published: BTreeSet<u64> = inventory
            .gpus
            .values()
            .filter_map(|gpu| gpu.facts.memory_bytes)
            .collect();
        for total in sets.values() {
            // Bytes that no number of slices divides are fewer than the slices.
            assert!(
                published
                    .iter()
                    .any(|memory| memory.checked_sub(*total).is_some_and(|rest| rest < 32)),
                "{what}: {total}"
            );
        }
    });
}

#[test]
fn the_counter_changes_nothing_else_of_what_is_published() {
    each(|what, _, plain, counted| {
        let names = |pool: &Pool| -> Vec<Vec<String>> {
            let of_slice = pool.slices.iter().map(|slice| {
                let devices = slice.devices.iter();
                devices.map(|device| device.name.to_string()).collect()
            });
            of_slice
                .filter(|names: &Vec<String>| !names.is_empty())
                .collect()
        };
        assert_eq!(names(plain), names(counted), "{what}");
        for (before, after) in plain.devices().zip(counted.devices()) {
            let without = |device: &Device| {
                let mut device = device.clone();
                for CounterUse { counters, .. } in &mut device.consumes {
                    counters.remove(MEMORY);
                }
                device
            };
            let mut after = without(after);
            // A GPU with a single form has a set for this alone.
            if before.consumes.is_empty() {
                after.consumes.clear();
            }
            assert_eq!(without(before), after, "{what}");
        }
    });
}
