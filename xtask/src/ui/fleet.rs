//! A made-up fleet for the page: 40 nodes of 8 GPUs in all modes, and 25 pods that wait.

use serde_json::{Value, json};

/// Modes of GPUs with claims.
pub(super) const MODES: [&str; 4] = ["whole", "partitioned", "time-sliced", "mps"];
const GIB: u64 = 1 << 30;
const MEMORY: u64 = 80 * GIB;

/// Returns the fleet as the page gets it: one GPU is lost, and each fifth has no claim.
pub(super) fn view() -> Value {
    let nodes: Vec<Value> = (0..40).map(node).collect();
    let waits = |number: u32| {
        let (cause, verdict) = if number < 20 {
            ("it asks for a whole GPU, and each has claims", "no-room")
        } else {
            ("no GPU is offered as 7g.80gb", "never-fits")
        };
        json!({
            "pod": format!("lab/waits-{number}"), "claims": [format!("lab/waits-{number}")],
            "since": format!("2026-11-21T19:{:02}:00Z", 10 + number), "verdict": verdict, "cause": cause, "nodes": [],
            "hint": "show what is offered: kubectl divvy status",
        })
    };
    let waiting: Vec<Value> = (0..25).map(waits).collect();
    let lost = json!({
        "node": "node-7.example.com", "gpu": "gpu-0", "kind": "lost", "why": "gpu-0 is lost", "since": "2026-11-21T19:50:00Z",
        "remedy": "drain and reboot the node (docs/maintenance.md#reboot-a-node)", "affects": ["lab/a", "lab/b", "lab/c", "lab/d", "lab/e"],
    });
    json!({
        "now": "2026-11-21T20:00:00Z", "cluster": "prod-eu", "unread": [], "refused": [], "troubles": [lost], "waiting": waiting,
        "nodes": nodes,
        "free": { "wholeGpus": 64, "largestPartition": "7g.80gb", "shareMemory": 900 * GIB, "largestShare": 60 * GIB },
    })
}

fn node(number: u32) -> Value {
    let gpus: Vec<Value> = (0..8).map(|gpu| self::gpu(number, gpu)).collect();
    json!({ "name": format!("node-{number}.example.com"), "free": 1, "trouble": "", "driver": "580.159.04", "gpus": gpus })
}

fn gpu(node: u32, gpu: u32) -> Value {
    let [whole, partitioned, shared, mps] = MODES;
    let mode = match (node * 3 + gpu) % 5 {
        0 => "idle",
        1 => whole,
        2 => partitioned,
        3 => shared,
        _ => mps,
    };
    let (parts, of) = match mode {
        "idle" => (0, 1),
        "whole" => (1, 1),
        "partitioned" => (1 + (node + gpu) % 7, 7),
        _ => (1 + (node + gpu) % 4, 4),
    };
    let holds: Vec<Value> = (0..parts)
        .map(|part| hold((node, gpu), mode, part, of))
        .collect();
    let troubles = if (node, gpu) == (7, 0) {
        json!(["lost"])
    } else {
        json!([])
    };
    json!({
        "name": format!("gpu-{gpu}"), "uuid": format!("GPU-{node}-{gpu}"), "product": "NVIDIA H100 80GB HBM3", "mode": mode,
        "troubles": troubles, "memory": MEMORY, "memoryUsed": MEMORY / 4, "memoryUnattributed": null, "holds": holds,
    })
}

fn hold((node, gpu): (u32, u32), mode: &str, part: u32, of: u32) -> Value {
    let granted = MEMORY / u64::from(of);
    let idle = mode == "time-sliced" && part == 0;
    let name = format!("job-{node}-{gpu}-{part}");
    let namespace = format!("team-{}", node % 3);
    json!({
        "namespace": namespace, "claim": name, "pods": [name], "device": format!("gpu-{gpu}"),
        "part": mode, "place": [f64::from(part) / f64::from(of), f64::from(part + 1) / f64::from(of)], "phase": "prepared",
        "memoryGranted": granted, "memoryUsed": granted / 3, "utilization": 0.5, "idleSeconds": if idle { 7200 } else { 0 },
        "overGrant": false, "wasted": granted - granted / 3, "idle": idle,
    })
}
