//! The opaque configs: an example of each kind with every field, as the types write it.

use anyhow::{Context, Result, ensure};
use divvy_api::{ConfigKind, DeviceConfig, MemoryBound, MpsOptions, decode};
use divvy_model::{MpsPriority, TimeSlice};
use serde_json::Value;

const INTRO: &str = "# Configs of claims and classes

`config[].opaque.parameters` of a claim, a template or a DeviceClass, with `driver: gpu.divvy.dev`. A config of a claim replaces that of the
class for the requests that it names. Unknown fields, wrong kinds and wrong values are refused when the object is applied, if the chart's
`claimPolicy` is on, else when the pod starts ([when a mistake is reported](../refusals.md)). A claim needs none.
";

const FIELDS: &[(&str, &str)] = &[
    (
        "timeSlicing.interval",
        "How long each program on the GPU runs in turn. When the claim is released, the GPU gets back what it had. For shares, a \
         GpuPolicy sets it ([time slices](../sharing.md#the-time-slice)).",
    ),
    (
        "limits.memory",
        "For shares: how much memory the pod may use of the share, at least what it requests. Without it, that is the limit. It needs a \
         node that caps memory, and a GpuPolicy that allows it ([request and limit](../sharing.md#request-and-limit)). For MPS shares: it \
         must be what a slot of the GPU has (`slotMemoryMiB`), as `limits.cores`.",
    ),
    (
        "limits.cores",
        "Percent of the GPU's threads. It must be what a slot of the GPU has (`slotCores`): slots are equal, and another value is \
          refused when the pod starts ([MPS](../sharing.md#mps)).",
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

pub(super) fn page() -> Result<String> {
    let limit = MemoryBound::Amount("16Gi".parse()?);
    let nodes = vec!["/dev/gdrdrv".to_owned()];
    let nothing = MpsOptions::default();
    let of_mps = MpsOptions {
        cores: Some(25),
        memory: Some(16 << 30),
        priority: Some(MpsPriority::BelowNormal),
    };
    let all = [
        (
            "whole GPUs",
            ConfigKind::Gpu,
            Some(TimeSlice::Long),
            nothing,
        ),
        ("MIG partitions", ConfigKind::Mig, None, nothing),
        ("time-sliced shares", ConfigKind::Share, None, nothing),
        ("MPS shares", ConfigKind::Mps, None, of_mps),
    ]
    .map(|(what, kind, time_slice, mps)| {
        (
            what,
            DeviceConfig {
                kind,
                time_slice,
                memory_limit: (kind == ConfigKind::Share).then_some(limit),
                extra_nodes: nodes.clone(),
                mps,
            },
        )
    });
    let intervals = [
        TimeSlice::Default,
        TimeSlice::Short,
        TimeSlice::Medium,
        TimeSlice::Long,
    ];
    let mut text = INTRO.to_owned();
    let mut described = 0;
    for (what, config) in &all {
        let value = config.to_value();
        ensure!(
            decode(&value).ok().as_ref() == Some(config),
            "{} is not read as it is written",
            config.kind.name()
        );
        let yaml = serde_saphyr::to_string(&value).context("a config as YAML")?;
        text += &format!(
            "\n## {}\n\nFor {what}.\n\n```yaml\n{}\n```\n\n",
            config.kind.name(),
            yaml.trim_end()
        );
        text += "| field | values | meaning |\n|---|---|---|\n";
        for (field, meaning) in FIELDS {
            let Some(found) = value.pointer(&format!("/{}", field.replace('.', "/"))) else {
                continue;
            };
            let values = match *field {
                _ if found.is_array() => "paths below `/dev`".to_owned(),
                "limits.memory" => {
                    "an amount with a unit (`16Gi`), or for shares `1%` to `100%` of the GPU"
                        .to_owned()
                }
                "limits.cores" => "1 to 100".to_owned(),
                "priority" => MpsPriority::ALL
                    .map(|priority| format!("`{}`", priority.name()))
                    .join(", "),
                _ => intervals
                    .map(|interval| format!("`{}`", interval.name()))
                    .join(", "),
            };
            text += &format!("| `{field}` | {values} | {meaning} |\n");
            described += 1;
        }
    }
    // Fields of an object count by themselves, and apiVersion and kind are in each.
    let count = |value: &Value| match value.as_object() {
        Some(inside) => inside.len(),
        None => 1,
    };
    let fields = all
        .iter()
        .filter_map(|(_, config)| {
            let value = config.to_value();
            Some(value.as_object()?.values().map(count).sum::<usize>() - 2)
        })
        .sum::<usize>();
    ensure!(
        fields == described,
        "a config has a field that is not described in xtask/src/reference/configs.rs"
    );
    Ok(text)
}
