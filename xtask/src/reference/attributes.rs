//! Attributes and capacities: their meaning from the comments beside their names, where they are
//! from what simulated GPUs publish.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use divvy_gpu_sim::{Engine, mig_capabilities};
use divvy_model::{Form, MpsAbility, MpsProtocol, Ordinals, ShareUnit};
use divvy_offer::{
    AttributeValue, GpuRules, Input, KubeVersion, Modes, Pool, ServerFeatures, carve,
};

use super::cell;

/// A GPU of each sort that publishes something of its own.
const GPUS: &str = "h100-pciex2,gb200x1,a30x1,l4x1";

const INTRO: &str = "# Attributes and capacities

What a device has in a ResourceSlice, and what CEL sees: `device.attributes[\"gpu.divvy.dev\"].productName`,
`device.capacity[\"gpu.divvy.dev\"].memory`. A name with a domain is that domain's: `device.attributes[\"resource.kubernetes.io\"].pcieRoot`.
Names and types are those of NVIDIA's driver wherever it has one. The kinds of devices are those of the attribute `type`: `gpu` (class
`gpu.divvy.dev`), `mig` (`mig.divvy.dev`), `gpu-share` (`share.divvy.dev`), `mig-share` (`mig-share.divvy.dev`), `gpu-mps` (`mps.divvy.dev`),
`mig-mps` (`mig-mps.divvy.dev`) and `gpu-admin` (`admin.divvy.dev`).

An expression that reads an attribute that a device lacks *fails*, and a claim with it is not scheduled: where the table does not list the
kind, or says \"some\", write `device.attributes[\"gpu.divvy.dev\"].?name.orValue(…)`.

The examples are what simulated GPUs publish. A value without an example is not published yet, or not by these GPUs.
";

struct Seen {
    kinds: BTreeMap<String, usize>,
    kind_of_value: &'static str,
    values: BTreeSet<String>,
}

pub(super) fn page(names: &str) -> Result<String> {
    let pool = pool(GPUS)?;
    let mut attributes: BTreeMap<String, Seen> = BTreeMap::new();
    let mut capacities: BTreeMap<String, Seen> = BTreeMap::new();
    let mut of_kind: BTreeMap<String, usize> = BTreeMap::new();
    for device in pool.slices.iter().flat_map(|slice| &slice.devices) {
        let Some(AttributeValue::String(kind)) = device.attributes.get("type") else {
            continue;
        };
        *of_kind.entry(kind.clone()).or_default() += 1;
        for (name, value) in &device.attributes {
            let (kind_of_value, example) = shown(value);
            note(&mut attributes, name, kind, kind_of_value, example);
        }
        for (name, capacity) in &device.capacity {
            note(
                &mut capacities,
                name,
                kind,
                "quantity",
                capacity.value.to_string(),
            );
        }
    }
    let mut text = INTRO.to_owned();
    for (title, module, seen) in [
        ("Attributes", "attributes", attributes),
        ("Capacities", "capacity", capacities),
    ] {
        text += &format!(
            "\n## {title}\n\n| name | type | devices | examples | meaning |\n|---|---|---|---|---|\n"
        );
        let documented = constants(names, module)?;
        let known: BTreeSet<&str> = documented.iter().map(|(name, _)| name.as_str()).collect();
        ensure!(
            seen.keys().all(|name| known.contains(name.as_str())),
            "a device has one of {:?}, which names.rs lacks",
            seen.keys()
        );
        for (name, meaning) in &documented {
            let seen = seen
                .get(name)
                .with_context(|| format!("no simulated GPU publishes {name}"))?;
            let kinds: Vec<String> = seen
                .kinds
                .iter()
                .map(|(kind, count)| {
                    if Some(count) == of_kind.get(kind) {
                        kind.clone()
                    } else {
                        format!("{kind} (some)")
                    }
                })
                .collect();
            // All of few, one of many.
            let short = seen.values.iter().map(String::len).sum::<usize>() <= 60;
            let shown = if short { seen.values.len() } else { 1 };
            text += &format!(
                "| `{name}` | {} | {} | `{}` | {} |\n",
                seen.kind_of_value,
                if kinds.len() == of_kind.len()
                    && !kinds.iter().any(|kind| kind.ends_with("(some)"))
                {
                    "all".to_owned()
                } else {
                    kinds.join(", ")
                },
                cell(
                    &seen
                        .values
                        .iter()
                        .take(shown)
                        .cloned()
                        .collect::<Vec<_>>()
                        .join("`, `")
                ),
                cell(meaning)
            );
        }
    }
    Ok(text)
}

fn note(
    all: &mut BTreeMap<String, Seen>,
    name: &str,
    kind: &str,
    kind_of_value: &'static str,
    value: String,
) {
    let seen = all.entry(name.to_owned()).or_insert(Seen {
        kinds: BTreeMap::new(),
        kind_of_value,
        values: BTreeSet::new(),
    });
    seen.values.insert(value);
    *seen.kinds.entry(kind.to_owned()).or_default() += 1;
}

fn shown(value: &AttributeValue) -> (&'static str, String) {
    match value {
        AttributeValue::Bool(value) => ("bool", value.to_string()),
        AttributeValue::Int(value) => ("int", value.to_string()),
        AttributeValue::String(value) => ("string", value.clone()),
        AttributeValue::Version(value) => ("version", value.clone()),
    }
}

/// Returns the devices that simulated GPUs publish in every mode: shares of all but the last by
/// amounts, of the last by percent.
fn pool(spec: &str) -> Result<Pool> {
    let engine = Engine::new(&spec.parse()?);
    let mut inventory = engine.inventory();
    inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
    let mut ordinals = Ordinals::default();
    ordinals.assign(
        inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
    );
    let capabilities = engine
        .gpus()
        .iter()
        .filter_map(|gpu| Some((gpu.facts.uuid.clone(), mig_capabilities(&gpu.model)?)))
        .collect();
    let rules = GpuRules {
        modes: Modes::Only(Form::HELD.into()),
        ..GpuRules::default()
    };
    let last = ordinals.iter().map(|(_, ordinal)| ordinal).max();
    let rules = inventory
        .gpus
        .keys()
        .map(|uuid| {
            let mut rules = rules.clone();
            if ordinals.of(uuid) == last {
                rules.shares.unit = ShareUnit::Percent;
            }
            (uuid.clone(), rules)
        })
        .collect();
    let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1));
    let plain = Input::plain("node", &inventory, &ordinals, &features);
    Ok(carve(&Input {
        capabilities: &capabilities,
        rules: &rules,
        ..plain
    })
    .pool)
}

/// Returns the constants of a module of names.rs: their values, and the comments above them.
fn constants(source: &str, module: &str) -> Result<Vec<(String, String)>> {
    let start = source
        .split_once(&format!("pub mod {module} {{\n"))
        .context("names.rs has no such module")?
        .1;
    let body = start.split_once("\n}\n").map_or(start, |(body, _)| body);
    let mut found = Vec::new();
    let mut comment = String::new();
    for line in body.lines().map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            comment += text;
        } else if let Some((_, value)) = line.split_once(": &str = ") {
            found.push((
                value.trim_matches(['"', ';']).to_owned(),
                std::mem::take(&mut comment),
            ));
        }
    }
    ensure!(!found.is_empty(), "names.rs has no constants in {module}");
    Ok(found)
}
