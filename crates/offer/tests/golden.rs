//! The pools of whole nodes, line by line. `UPDATE_FIXTURES=1` writes the files anew.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use divvy_gpu_sim::{Engine, mig_capabilities, profiles};
use divvy_model::Ordinals;
use divvy_offer::{
    Allowed, Amount, AttributeValue, Capacity, Device, GpuRules, Input, KubeVersion, Modes, Pool,
    ServerFeatures, attributes, carve, validate,
};

/// The pool of a node whose GPUs may become everything.
fn everything(spec: &str, version: KubeVersion) -> Pool {
    everything_of(&Engine::new(&spec.parse().unwrap()), version)
}

fn everything_of(engine: &Engine, version: KubeVersion) -> Pool {
    let inventory = engine.inventory();
    let mut ordinals = Ordinals::default();
    ordinals.assign(
        inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
    );
    let caps =
        |gpu: &divvy_gpu_sim::SimGpu| Some((gpu.facts.uuid.clone(), mig_capabilities(&gpu.model)?));
    let capabilities = engine.gpus().iter().filter_map(caps).collect();
    let all = GpuRules {
        modes: Modes::everything(),
        ..GpuRules::default()
    };
    let rules = inventory
        .gpus
        .keys()
        .map(|uuid| (uuid.clone(), all.clone()))
        .collect();
    let features = ServerFeatures::default().observe(version);
    let plain = Input::plain("n1", &inventory, &ordinals, &features);
    let pool = carve(&Input {
        capabilities: &capabilities,
        rules: &rules,
        ..plain
    })
    .pool;
    assert_eq!(validate(&pool), Ok(()));
    pool
}

fn as_text(pool: &Pool) -> String {
    let mut text = format!("pool {}\n", pool.name);
    for (number, slice) in pool.slices.iter().enumerate() {
        writeln!(text, "\nslice {number}").unwrap();
        for device in &slice.devices {
            writeln!(text, "{}", line(device)).unwrap();
        }
        for set in &slice.counter_sets {
            writeln!(text, "counters {}: {}", set.name, amounts(&set.counters)).unwrap();
        }
    }
    text
}

fn line(device: &Device) -> String {
    let said = ["type", "sharing", "isolation", "profile"]
        .into_iter()
        .filter_map(|name| match device.attributes.get(name)? {
            AttributeValue::String(text) => Some(text.as_str()),
            _ => None,
        });
    let mut line = format!("{}: {}", device.name, said.collect::<Vec<_>>().join(" "));
    for (name, capacity) in &device.capacity {
        write!(line, ", {name} {}", size(capacity)).unwrap();
    }
    for uses in &device.consumes {
        write!(line, "; takes {}: {}", uses.set, amounts(&uses.counters)).unwrap();
    }
    line + if device.allow_multiple {
        "; for many claims"
    } else {
        ""
    }
}

fn size(capacity: &Capacity) -> String {
    let Some(policy) = &capacity.policy else {
        return capacity.value.to_string();
    };
    let allowed = match &policy.allowed {
        Allowed::Range {
            min,
            max: None,
            step: Some(step),
        } => format!("from {min} by {step}"),
        other => format!("{other:?}"),
    };
    format!("{} ({allowed}, else {})", capacity.value, policy.default)
}

fn amounts(counters: &BTreeMap<String, Amount>) -> String {
    let mut text = Vec::new();
    let mut slices = Vec::new();
    for (name, amount) in counters {
        match name.strip_prefix("memory-slice-") {
            Some(slice) => slices.push(slice),
            None => text.push(format!("{name} {amount}")),
        }
    }
    if !slices.is_empty() {
        text.push(format!("memory slices {}", slices.join(" ")));
    }
    text.join(", ")
}

fn check(file: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(file);
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs_err::write(&path, text).unwrap();
    }
    assert_eq!(fs_err::read_to_string(&path).unwrap(), text, "{file}");
}

#[test]
fn an_h100_that_may_become_everything() {
    check(
        "pool-h100-everything.txt",
        &as_text(&everything("h100x1", KubeVersion::new(1, 37, 1))),
    );
}

#[test]
fn two_l4_as_wholes_and_in_shares() {
    check(
        "pool-l4-shares.txt",
        &as_text(&everything("l4x2", KubeVersion::new(1, 37, 1))),
    );
}

#[test]
fn an_old_scheduler_gets_one_mode_of_each_gpu() {
    check(
        "pool-h100-1.36.1.txt",
        &as_text(&everything("h100x2", KubeVersion::new(1, 36, 1))),
    );
}

/// The offer of one GPU of each board: its attributes, and each kind of device once, with how
/// many there are.
#[test]
fn every_board_that_may_become_everything() {
    let mut text = String::new();
    for board in profiles() {
        let pool = everything(board.key, KubeVersion::new(1, 37, 1));
        writeln!(
            text,
            "{}: {} devices in {} slices",
            board.key,
            pool.devices().count(),
            pool.slices.len()
        )
        .unwrap();
        let whole = pool
            .devices()
            .find(|device| device.name.to_string() == "gpu-0")
            .unwrap();
        let said = [
            "productName",
            "architecture",
            "cudaComputeCapability",
            "addressingMode",
            "c2cEnabled",
        ];
        let said = said
            .into_iter()
            .filter_map(|name| match whole.attributes.get(name)? {
                AttributeValue::String(text) | AttributeValue::Version(text) => Some(text.clone()),
                AttributeValue::Bool(on) => Some(format!("{name} {on}")),
                AttributeValue::Int(_) => None,
            });
        writeln!(text, "  {}", said.collect::<Vec<_>>().join(", ")).unwrap();
        let mut kinds: Vec<(String, usize)> = Vec::new();
        for device in pool.devices() {
            let kind = line(device).replacen(&device.name.to_string(), "", 1);
            let kind = kind
                .split("; takes")
                .next()
                .unwrap()
                .trim_start_matches(": ")
                .to_owned();
            match kinds.iter_mut().find(|(known, _)| *known == kind) {
                Some((_, count)) => *count += 1,
                None => kinds.push((kind, 1)),
            }
        }
        for (kind, count) in kinds {
            writeln!(text, "  {count} x {kind}").unwrap();
        }
    }
    check("boards.txt", &text);
}

#[test]
fn a_device_is_described_to_its_holder_as_it_is_published() {
    let engine = Engine::new(&"h100x4".parse().unwrap());
    let inventory = engine.inventory();
    let pool = everything_of(&engine, KubeVersion::new(1, 37, 1));
    let mut kinds = BTreeSet::new();
    for device in pool.devices() {
        let of = |name: &str| match device.attributes.get(name) {
            Some(AttributeValue::String(text)) => text.clone(),
            other => panic!("{name}: {other:?}"),
        };
        let gpu = of("gpuUUID").parse().unwrap();
        let described = attributes(&device.name, &gpu, &inventory, None);
        // The largest limit changes with the policy; what a claim has of it is its limit.
        let stays = |(name, _): &(&std::borrow::Cow<'static, str>, _)| {
            name.as_ref() != divvy_api::names::attributes::MEMORY_LIMIT_MAX_PERCENT
        };
        let published: BTreeMap<_, _> = device
            .attributes
            .iter()
            .filter(stays)
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect();
        assert_eq!(described, published, "{}", device.name);
        // With what is added once a claim has it: a UUID, or what was granted.
        assert!(described.len() < 32, "{}", device.name);
        kinds.insert(of("type"));
    }
    assert_eq!(
        kinds.into_iter().collect::<Vec<_>>(),
        ["gpu", "gpu-admin", "gpu-share", "mig"]
    );
}
