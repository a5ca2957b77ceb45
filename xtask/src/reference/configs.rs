//! The opaque configs: an example of each kind with every field, as the types write it.

use anyhow::{Context, Result, ensure};
use divvy_api::{ConfigKind, DeviceConfig, MemoryBound, MpsLimits, MpsOptions, decode};
use divvy_model::{MpsPriority, TimeSlice};
use serde_json::Value;

const INTRO: &str = "# Configs of claims and classes

`config[].opaque.parameters` of a claim, a template or a DeviceClass, with `driver: gpu.divvy.dev`. A config of a claim replaces that of the
class for the requests that it names. Unknown fields, wrong kinds and wrong values are refused when the object is applied, if the chart's
`claimPolicy` is on, else when the pod starts ([when a mistake is reported](../refusals.md)). A claim needs none.

JSON schemas for editors and checks are in `docs/schemas`, with that of GpuPolicy: `# yaml-language-server: $schema=…/docs/schemas/GpuPolicy.json`
as the first line of a file.
";

pub(super) const FIELDS: &[(&str, &str)] = &[
    (
        "timeSlicing.interval",
        "How long each program on the GPU runs in turn. When the claim is released, the GPU gets back what it had. For shares, a \
         GpuPolicy sets it ([time slices](../sharing.md#the-time-slice)).",
    ),
    (
        "mps",
        "An MPS server for the claim: the programs of all its containers and pods run at once on the GPU or partition, which stays the claim's alone. `{}` \
         is a server without limits. Not with `timeSlicing`, and for one GPU or partition of a claim ([MPS in a claim](../mps.md#mps-in-a-claim)).",
    ),
    (
        "mps.limits.cores",
        "Percent of the threads of the GPU or partition that each program can use at most; on a whole GPU with R615 and later all of them together.",
    ),
    (
        "mps.limits.memory",
        "Memory that each program can allocate at most, its context included. A program that wants to can make the server drop it.",
    ),
    (
        "limits.memory",
        "For shares: how much memory the pod may use of the share, at least what it requests. Without it, that is the limit. It needs a \
         node that caps memory, and a GpuPolicy that allows it ([request and limit](../memory-caps.md#request-and-limit)). For MPS \
         shares with drivers before R615 it must be what a slot of the GPU has (`slotMemoryMiB`), as `limits.cores`.",
    ),
    (
        "limits.cores",
        "Percent of the GPU's threads that the claim's programs can use at most: what it requests or more. With drivers before R615 it must be \
          what a slot of the GPU has (`slotCores`): slots are equal. Another value is refused when the pod starts ([MPS](../mps.md)).",
    ),
    (
        "priority",
        "Priority of the claim's programs beside those of other claims: a hint to the driver.",
    ),
    (
        "extraNodes",
        "Device nodes of the host that the containers need besides those of the GPU. Each must be listed, spelt identically, in the \
         chart's value `extraNodes`; a `*` at the end stands for the rest of the name ([containers](../containers.md)).",
    ),
];

/// Returns examples of each kind, which have all fields between them, with the devices that the
/// kind is for.
pub(super) fn examples() -> Result<[(&'static str, Vec<DeviceConfig>); 4]> {
    let limit = MemoryBound::Amount("16Gi".parse()?);
    let nodes = vec!["/dev/gdrdrv".to_owned()];
    let limits = MpsLimits {
        cores: Some(25),
        memory: Some(16 << 30),
    };
    let of = |kind| DeviceConfig {
        extra_nodes: nodes.clone(),
        ..DeviceConfig::empty(kind)
    };
    // Fields that exclude each other are in examples of their own.
    Ok([
        (
            "whole GPUs",
            vec![
                DeviceConfig {
                    time_slice: Some(TimeSlice::Long),
                    ..of(ConfigKind::Gpu)
                },
                DeviceConfig {
                    mps_server: Some(limits),
                    ..DeviceConfig::empty(ConfigKind::Gpu)
                },
            ],
        ),
        (
            "MIG partitions",
            vec![DeviceConfig {
                mps_server: Some(limits),
                ..of(ConfigKind::Mig)
            }],
        ),
        (
            "time-sliced shares",
            vec![DeviceConfig {
                memory_limit: Some(limit),
                ..of(ConfigKind::Share)
            }],
        ),
        (
            "MPS shares",
            vec![DeviceConfig {
                mps: MpsOptions {
                    limits,
                    priority: Some(MpsPriority::BelowNormal),
                },
                ..of(ConfigKind::Mps)
            }],
        ),
    ])
}

pub(super) fn page() -> Result<String> {
    let all = examples()?;
    let intervals = [
        TimeSlice::Default,
        TimeSlice::Short,
        TimeSlice::Medium,
        TimeSlice::Long,
    ];
    let intervals = intervals.map(|interval| format!("`{}`", interval.name()));
    let mut text = INTRO.to_owned();
    for (what, examples) in &all {
        let kind = examples.first().context("a kind without an example")?.kind;
        text += &format!("\n## {}\n\nFor {what}.\n\n", kind.name());
        let mut rows: Vec<String> = Vec::new();
        for config in examples {
            let value = config.to_value();
            ensure!(
                decode(&value).ok().as_ref() == Some(config),
                "{} is not read as it is written",
                kind.name()
            );
            let yaml = serde_saphyr::to_string(&value).context("a config as YAML")?;
            text += &format!("```yaml\n{}\n```\n\n", yaml.trim_end());
            rows.extend(fields(&value, &intervals.join(", "))?);
        }
        text += "| field | values | meaning |\n|---|---|---|\n";
        text += &rows.concat();
    }
    Ok(text)
}

/// Returns a row for each field of an example. `intervals` are the values of a time slice.
fn fields(example: &Value, intervals: &str) -> Result<Vec<String>> {
    let mut rows = Vec::new();
    for (field, meaning) in FIELDS {
        let Some(found) = example.pointer(&format!("/{}", field.replace('.', "/"))) else {
            continue;
        };
        let values = match *field {
            _ if found.is_array() => "paths below `/dev`".to_owned(),
            "limits.memory" => {
                "an amount with a unit (`16Gi`), or for shares `1%` to `100%` of the GPU".to_owned()
            }
            "mps.limits.memory" => "an amount with a unit (`16Gi`)".to_owned(),
            "limits.cores" | "mps.limits.cores" => "1 to 100".to_owned(),
            "mps" => "`{}`, or with `limits`".to_owned(),
            "priority" => MpsPriority::ALL
                .map(|priority| format!("`{}`", priority.name()))
                .join(", "),
            _ => intervals.to_owned(),
        };
        rows.push(format!("| `{field}` | {values} | {meaning} |\n"));
    }
    ensure!(
        rows.len() == objects_and_values(example) - 2,
        "a config has a field that is not described in xtask/src/reference/configs.rs"
    );
    Ok(rows)
}

/// Counts the fields that are described: those with a value, apiVersion and kind among them, and
/// `mps`, which means something without any.
fn objects_and_values(value: &Value) -> usize {
    let Some(fields) = value.as_object() else {
        return 1;
    };
    let inside: usize = fields.values().map(objects_and_values).sum();
    inside + usize::from(fields.contains_key("mps"))
}
