//! Pure: what is known of the node in, the status of its `GpuNode` out.

use std::collections::BTreeSet;

use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Summary, Trouble, Versions};
use divvy_claims::Phase;
use divvy_executor::HeldDevice;
use divvy_model::{Gpu, GpuUuid, Inventory, MigMode, Mode, Ordinals};
use divvy_offer::Finding;

use super::troubles::{ordinal, troubles};
use crate::node::findings::Known;

/// Behind the device of a holder with admin access, which holds nothing.
const ADMIN: &str = " (admin)";

/// Returns whether a claim can have the GPU now in whatever form it is offered. A form that is
/// being withdrawn does not count: it takes nothing from the others.
fn is_open(known: &Known<'_>, ordinal: u32) -> bool {
    let mut offered = known.offered(ordinal).peekable();
    offered.peek().is_some() && offered.all(|device| device.taints.is_empty())
}

/// Works out the status of a `GpuNode`. Times and the driver's name are left to the writer.
pub(crate) fn report(known: &Known<'_>, findings: &BTreeSet<Finding>) -> GpuNodeStatus {
    let mut by_ordinal: Vec<(u32, &GpuUuid)> = known
        .recorded
        .ordinals
        .iter()
        .map(|(uuid, n)| (n, uuid))
        .collect();
    // By number, as people read it. A GPU that has only a number left, from before it was taken
    // out, is no part of the node.
    by_ordinal.sort();
    let is_known = |(n, uuid): &(u32, &GpuUuid)| {
        known
            .inventory
            .is_none_or(|inventory| inventory.gpus.contains_key(*uuid))
            || known.recorded.held.iter().any(|r| r.hold.gpu == **uuid)
            || known.devices().any(|(_, kind)| kind.ordinal() == *n)
    };
    by_ordinal.retain(is_known);
    let domains = known.inventory.map(Inventory::nvlink_domains);
    let gpus: Vec<GpuStatus> = by_ordinal
        .iter()
        .map(|(n, uuid)| {
            let found = known.inventory.and_then(|all| all.gpus.get(*uuid));
            let domain = domains.as_ref().and_then(|all| all.get(*uuid));
            let facts = found.map(|found| facts(found, domain)).unwrap_or_default();
            gpu(known, *n, uuid, facts)
        })
        .collect();
    let claims: BTreeSet<&String> = gpus
        .iter()
        .flat_map(|g| &g.holders)
        .map(|h| &h.uid)
        .collect();
    let is_held = |gpu: &GpuStatus| {
        gpu.holders
            .iter()
            .any(|holder| !holder.device.ends_with(ADMIN))
    };
    let free = by_ordinal
        .iter()
        .zip(&gpus)
        .filter(|((n, _), gpu)| !is_held(gpu) && is_open(known, *n));
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let troubles = troubles(findings, &known.recorded.ordinals);
    let driver = known
        .inventory
        .map(|inventory| inventory.system.driver_version.clone());
    GpuNodeStatus {
        driver_name: String::new(),
        summary: Summary {
            gpus: count(gpus.len()),
            free: count(free.count()),
            claims: count(claims.len()),
            modes: modes(&gpus),
            trouble: trouble(&troubles),
            since: None,
        },
        versions: Versions {
            divvy: env!("CARGO_PKG_VERSION").to_owned(),
            driver: driver.unwrap_or_default(),
            cuda: known
                .inventory
                .and_then(|inventory| inventory.system.cuda_version)
                .map(|version| version.to_string())
                .unwrap_or_default(),
            kubernetes: known.kubernetes.clone(),
        },
        share_memory: known.inventory.map(share_memory).unwrap_or_default(),
        bad_policies: known
            .effective
            .map(|e| e.known.bad.keys().cloned().collect())
            .unwrap_or_default(),
        gpus,
        troubles,
        changed: None,
    }
}

/// Says whether the memory of shares is capped, and what is lacking for it.
fn share_memory(inventory: &Inventory) -> String {
    match inventory.system.memory_caps.lack() {
        None => "capped by the driver".to_owned(),
        Some(lack) => format!("counted and not enforced: {lack}"),
    }
}

/// Works out the status that stays when the plugin is stopped on a node that is no longer its own:
/// the GPUs that claims still hold, by the UIDs of these claims. Nothing is offered any more.
pub(crate) fn last_report(before: &GpuNodeStatus, held: &BTreeSet<String>) -> GpuNodeStatus {
    let mut gpus = before.gpus.clone();
    for gpu in &mut gpus {
        gpu.holders.retain(|holder| held.contains(&holder.uid));
        gpu.offered.clear();
    }
    gpus.retain(|gpu| !gpu.holders.is_empty());
    let left = Finding::NodeLeft { claims: held.len() };
    let troubles = troubles(&BTreeSet::from([left]), &Ordinals::default());
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    GpuNodeStatus {
        summary: Summary {
            gpus: count(gpus.len()),
            free: 0,
            claims: count(held.len()),
            modes: modes(&gpus),
            trouble: trouble(&troubles),
            since: None,
        },
        bad_policies: Vec::new(),
        gpus,
        troubles,
        ..before.clone()
    }
}

/// Works out what the report says of the card itself.
fn facts(gpu: &Gpu, domain: Option<&String>) -> GpuStatus {
    let facts = &gpu.facts;
    let fabric = facts.fabric.as_ref();
    GpuStatus {
        product: facts.product_name.clone(),
        memory_mib: facts.memory_bytes.map(|bytes| bytes >> 20),
        architecture: facts.architecture.name().unwrap_or_default().to_owned(),
        compute_capability: facts.compute_capability.to_string(),
        mig_capable: Some(facts.mig_mode != MigMode::Unsupported),
        nvlink_domain: domain.cloned().unwrap_or_default(),
        fabric: fabric
            .map(|fabric| format!("{}.{}", fabric.cluster_uuid, fabric.clique_id))
            .unwrap_or_default(),
        ..GpuStatus::default()
    }
}

fn gpu(known: &Known<'_>, ordinal: u32, uuid: &GpuUuid, facts: GpuStatus) -> GpuStatus {
    let held: Vec<&HeldDevice> = known
        .recorded
        .held
        .iter()
        .filter(|record| record.hold.gpu == *uuid)
        .collect();
    // The mode by records: what the GPU is now. What it is offered as, and its taints, are by the
    // pool.
    let mode = Mode::of(held.iter().map(|record| record.hold.form()));
    let (mut offered, mut taints) = (BTreeSet::new(), BTreeSet::new());
    for (device, kind) in known.devices() {
        if kind.ordinal() != ordinal || !kind.sharing.holds() {
            continue;
        }
        let of_device = device.taints.iter().map(|taint| &taint.key);
        let of_device: Vec<&str> = of_device
            .map(|key| key.rsplit('/').next().unwrap_or(key))
            .collect();
        if !device.is_withdrawn() {
            offered.insert(kind.form().nouns().to_owned());
        }
        taints.extend(of_device.into_iter().map(str::to_owned));
    }
    let mut holders: Vec<Holder> = held.into_iter().map(holder).collect();
    holders.sort();
    GpuStatus {
        name: format!("gpu-{ordinal}"),
        uuid: uuid.to_string(),
        mode: mode.name().to_owned(),
        offered: offered.into_iter().collect(),
        policy: known
            .effective
            .and_then(|effective| effective.resolved.by.get(uuid))
            .map(ToString::to_string)
            .unwrap_or_default(),
        holders,
        taints: taints.into_iter().collect(),
        fence: known
            .recorded
            .fences
            .get(uuid)
            .and_then(|fences| fences.first())
            .map(|fence| fence.reason.clone())
            .unwrap_or_default(),
        ..facts
    }
}

fn holder(held: &HeldDevice) -> Holder {
    let (phase, reason) = match &held.phase {
        Phase::Preparing => ("preparing", String::new()),
        Phase::Prepared => ("prepared", String::new()),
        Phase::Leaving(leaving) => ("leaving", leaving.reason.clone()),
    };
    let device = if held.hold.sharing.holds() {
        held.hold.device.to_string()
    } else {
        format!("{}{ADMIN}", held.hold.device)
    };
    Holder {
        namespace: held.claim.namespace.clone(),
        name: held.claim.name.clone(),
        uid: held.claim.uid.to_string(),
        device,
        phase: phase.to_owned(),
        reason,
        pods: held.pods.iter().map(|pod| pod.name.clone()).collect(),
        since: held.allocated_at.clone(),
    }
}

/// `2 whole, 1 partitioned, 5 idle`.
fn modes(gpus: &[GpuStatus]) -> String {
    let counts = Mode::ALL.into_iter().filter_map(|mode| {
        let count = gpus.iter().filter(|gpu| gpu.mode == mode.name()).count();
        (count > 0).then(|| format!("{count} {}", mode.name()))
    });
    counts.collect::<Vec<_>>().join(", ")
}

/// `bad-policy, gpu-0 to gpu-2 lost, gpu-4 fenced+lingering`: what needs a person.
fn trouble(troubles: &[Trouble]) -> String {
    let mut of: Vec<(&str, Vec<&str>)> = Vec::new();
    for trouble in troubles.iter().filter(|trouble| !trouble.notice) {
        match of.iter_mut().find(|(gpu, _)| *gpu == trouble.gpu) {
            Some((_, kinds)) if kinds.contains(&trouble.kind.as_str()) => {}
            Some((_, kinds)) => kinds.push(&trouble.kind),
            None => of.push((&trouble.gpu, vec![&trouble.kind])),
        }
    }
    let follows = |(gpu, kinds): &(&str, Vec<&str>), (next, of_next): &(&str, Vec<&str>)| {
        let (gpu, next) = (ordinal(gpu), ordinal(next));
        kinds == of_next
            && gpu
                .and_then(|gpu| gpu.checked_add(1))
                .is_some_and(|gpu| next == Some(gpu))
    };
    let each = of.chunk_by(follows).flat_map(|run| match run {
        // Two are as short by their names.
        [(first, kinds), _, .., (last, _)] => {
            vec![format!("{first} to {last} {}", kinds.join("+"))]
        }
        few => few.iter().map(of_one).collect(),
    });
    each.collect::<Vec<_>>().join(", ")
}

fn of_one((gpu, kinds): &(&str, Vec<&str>)) -> String {
    match *gpu {
        "" => kinds.join(", "),
        gpu => format!("{gpu} {}", kinds.join("+")),
    }
}
