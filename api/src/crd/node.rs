//! The definition of `GpuNode`.

use serde_json::{Value, json};

use super::{Names, column, definition, object, text, with};
use crate::node::{KIND, PLURAL};

/// The definition of `GpuNode`.
pub fn gpu_node() -> Value {
    let names = Names { kind: KIND, plural: PLURAL, singular: "gpunode", short: "gpun" };
    let columns = [
        column("GPUs", "integer", ".status.summary.gpus", "GPUs of the node"),
        column("Free", "integer", ".status.summary.free", "GPUs that nobody holds and that can be given out"),
        column("Claims", "integer", ".status.summary.claims", "Claims that hold something"),
        column("Modes", "string", ".status.summary.modes", "What the GPUs are now"),
        column("Trouble", "string", ".status.summary.trouble", "What needs a person"),
        column("Since", "date", ".status.summary.since", "Since when the oldest trouble is so"),
        column("Driver", "string", ".status.versions.driver", "Version of the NVIDIA driver"),
        column("Changed", "date", ".status.changed", "When any of this changed last"),
        wide(column("Divvy", "string", ".status.versions.divvy", "Version of divvy's node plugin")),
        wide(column("Kubernetes", "string", ".status.versions.kubernetes", "Version of the API server")),
    ];
    let schema = object(
        "GpuNode says what the GPUs of a node are now, who holds them and what is wrong with them. Written by the \
         node's plugin; changes by others are overwritten.",
        json!({
            "apiVersion": { "type": "string" },
            "kind": { "type": "string" },
            "metadata": { "type": "object" },
            "status": status(),
        }),
    );
    definition(&names, &schema, &columns, true)
}

fn list(description: &str, item: &Value) -> Value {
    json!({ "type": "array", "description": description, "x-kubernetes-list-type": "atomic", "items": item })
}

/// A column that only `-o wide` shows.
fn wide(column: Value) -> Value {
    with(column, json!({ "priority": 1 }))
}

fn time(description: &str) -> Value {
    with(text(description), json!({ "format": "date-time" }))
}

fn count(description: &str) -> Value {
    json!({ "type": "integer", "format": "int64", "description": description })
}

fn status() -> Value {
    let holder = object(
        "A claim that holds a device.",
        json!({
            "namespace": text("The claim's namespace."),
            "name": text("The claim's name."),
            "uid": text("The claim's UID."),
            "device": text("The device."),
            "phase": text("preparing, prepared, leaving."),
            "reason": text("What keeps it, while it is leaving."),
            "pods": list("The pods that the claim was prepared for.", &text("Name of a pod.")),
            "since": time("When the claim was allocated, if the API server tells."),
        }),
    );
    let trouble = object(
        "Something that is wrong with the node, a GPU or a part of it, or not as it could be.",
        json!({
            "kind": text("What, as a stable word: lost, xid, fenced, lingering, neighbour, driver-down."),
            "notice": json!({
                "type": "boolean",
                "description": "Whether nobody needs to do anything: it was asked for, or goes by itself.",
            }),
            "gpu": text("The GPU, such as gpu-3; empty: the node."),
            "subject": text("The device, partition or policy, where it is not all of the GPU or node."),
            "claim": text("The claim concerned, as namespace/name."),
            "why": text("Why, in words."),
            "remedy": text("What to do about it."),
            "since": time("Since when."),
        }),
    );
    let gpu = object(
        "A GPU.",
        json!({
            "name": text("As in the names of its devices, such as gpu-3."),
            "uuid": text("Its UUID."),
            "product": text("Its product, if it can be read."),
            "mode": text("idle, whole, partitioned, time-sliced."),
            "offered": list("What it is offered as: whole, partitions, shares.", &text("A kind of device.")),
            "policy": text("The rule that decides what it may become, as policy/rule; empty: none."),
            "holders": list("Who holds it.", &holder),
            "taints": list("Why it, or part of it, is not given out.", &text("A taint's key without its domain.")),
            "fence": text("Why it is fenced, in words."),
        }),
    );
    object(
        "What is so now.",
        json!({
            "summary": object(
                "Numbers for columns.",
                json!({
                    "gpus": count("GPUs known."),
                    "free": count("GPUs that nobody holds and that can be given out."),
                    "claims": count("Claims that hold something."),
                    "modes": text("GPUs by mode, in words."),
                    "trouble": text("What needs a person, in words."),
                    "since": time("Since when the oldest of it is so."),
                }),
            ),
            "versions": object(
                "Versions in force.",
                json!({
                    "divvy": text("Of divvy's node plugin."),
                    "driver": text("Of the NVIDIA driver."),
                    "kubernetes": text("Of the API server, as the node has seen it."),
                }),
            ),
            "gpus": list("The GPUs, by number.", &gpu),
            "troubles": list("What is wrong or not as it could be.", &trouble),
            "badPolicies": list(
                "Policies whose present version the node cannot read.", &text("Name of a policy."),
            ),
            "changed": time("When any of this changed last."),
        }),
    )
}
