//! Pure: what is known of the node in, the status of its `GpuNode` out.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Summary, Versions};
use divvy_carve::{Pool, TaintEffect};
use divvy_claims::{Fence, Phase};
use divvy_executor::HeldDevice;
use divvy_model::{DeviceKind, GpuUuid, HoldKind, Inventory, Mode, Ordinals};

use crate::policy::Effective;

/// What is known.
pub(crate) struct Facts<'a> {
    pub(crate) inventory: &'a Inventory,
    pub(crate) ordinals: &'a Ordinals,
    pub(crate) records: &'a [HeldDevice],
    pub(crate) fences: &'a BTreeMap<GpuUuid, Fence>,
    pub(crate) pool: &'a Pool,
    pub(crate) effective: &'a Effective,
    /// The API server's version.
    pub(crate) kubernetes: String,
}

/// What a `GpuNode` says of it. [`GpuNodeStatus::changed`] is left to the writer.
pub(crate) fn report(facts: &Facts<'_>) -> GpuNodeStatus {
    let mut by_ordinal: Vec<(u32, &GpuUuid)> = facts.ordinals.iter().map(|(uuid, n)| (n, uuid)).collect();
    by_ordinal.sort();
    let known = |(n, uuid): &(u32, &GpuUuid)| {
        facts.inventory.gpus.contains_key(*uuid)
            || facts.records.iter().any(|r| r.hold.gpu == **uuid)
            || facts.pool.devices().any(|d| DeviceKind::parse(&d.name).is_ok_and(|k| k.ordinal() == *n))
    };
    let gpus: Vec<GpuStatus> =
        by_ordinal.into_iter().filter(known).map(|(n, uuid)| gpu(facts, n, uuid)).collect();
    let claims: BTreeSet<&String> = gpus.iter().flat_map(|g| &g.holders).map(|h| &h.uid).collect();
    let free = gpus.iter().filter(|g| g.holders.is_empty() && g.taints.is_empty() && !g.offered.is_empty());
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    GpuNodeStatus {
        summary: Summary {
            gpus: count(gpus.len()),
            free: count(free.count()),
            claims: count(claims.len()),
            modes: modes(&gpus),
            trouble: trouble(&gpus),
        },
        versions: Versions {
            divvy: env!("CARGO_PKG_VERSION").to_owned(),
            driver: facts.inventory.system.driver_version.clone(),
            kubernetes: facts.kubernetes.clone(),
        },
        bad_policies: facts.effective.known.bad.keys().cloned().collect(),
        gpus,
        changed: None,
    }
}

fn gpu(facts: &Facts<'_>, ordinal: u32, uuid: &GpuUuid) -> GpuStatus {
    let held: Vec<&HeldDevice> = facts.records.iter().filter(|record| record.hold.gpu == *uuid).collect();
    let mode = held.iter().find_map(|record| record.hold.kind.needs()).unwrap_or(Mode::Idle);
    let (mut offered, mut taints) = (BTreeSet::new(), BTreeSet::new());
    for device in facts.pool.devices() {
        let Ok(kind) = DeviceKind::parse(&device.name) else { continue };
        if kind.ordinal() != ordinal {
            continue;
        }
        let what = match kind {
            DeviceKind::Whole { .. } => "whole",
            DeviceKind::Partition(_) => "partitions",
            DeviceKind::Share { .. } => "shares",
            DeviceKind::Admin { .. } => continue,
        };
        let away = device.taints.iter().filter(|taint| taint.effect != TaintEffect::None);
        let keys: Vec<&str> = away.map(|taint| taint.key.rsplit('/').next().unwrap_or(&taint.key)).collect();
        if !keys.contains(&"withdrawn") {
            offered.insert(what.to_owned());
        }
        taints.extend(keys.into_iter().map(str::to_owned));
    }
    let mut holders: Vec<Holder> = held.into_iter().map(holder).collect();
    holders.sort();
    GpuStatus {
        name: format!("gpu-{ordinal}"),
        uuid: uuid.to_string(),
        product: facts.inventory.gpus.get(uuid).map(|gpu| gpu.facts.product_name.clone()).unwrap_or_default(),
        mode: mode.name().to_owned(),
        offered: offered.into_iter().collect(),
        policy: facts.effective.resolved.by.get(uuid).map(ToString::to_string).unwrap_or_default(),
        holders,
        taints: taints.into_iter().collect(),
        fence: facts.fences.get(uuid).map(|fence| fence.reason.clone()).unwrap_or_default(),
    }
}

fn holder(held: &HeldDevice) -> Holder {
    let (phase, reason) = match &held.phase {
        Phase::Preparing => ("preparing", String::new()),
        Phase::Prepared => ("prepared", String::new()),
        Phase::Leaving(leaving) => ("leaving", leaving.reason.clone()),
    };
    let device = match held.hold.kind {
        HoldKind::Admin => format!("{} (admin)", held.hold.device),
        HoldKind::Whole | HoldKind::Partition { .. } | HoldKind::Share => held.hold.device.to_string(),
    };
    Holder {
        namespace: held.claim.namespace.clone(),
        name: held.claim.name.clone(),
        uid: held.claim.uid.to_string(),
        device,
        phase: phase.to_owned(),
        reason,
    }
}

/// `2 whole, 1 partitioned, 5 idle`.
fn modes(gpus: &[GpuStatus]) -> String {
    let all = [Mode::Whole, Mode::Partitioned, Mode::TimeSliced, Mode::Mps, Mode::Idle];
    let counts = all.into_iter().filter_map(|mode| {
        let count = gpus.iter().filter(|gpu| gpu.mode == mode.name()).count();
        (count > 0).then(|| format!("{count} {}", mode.name()))
    });
    counts.collect::<Vec<_>>().join(", ")
}

/// `gpu-3 lost, gpu-4 fenced+lingering`. What only makes room for another mode or policy is no trouble.
fn trouble(gpus: &[GpuStatus]) -> String {
    let of = gpus.iter().filter_map(|gpu| {
        let keys: Vec<&str> = gpu
            .taints
            .iter()
            .map(String::as_str)
            .filter(|key| !matches!(*key, "withdrawn" | "mode"))
            .collect();
        (!keys.is_empty()).then(|| format!("{} {}", gpu.name, keys.join("+")))
    });
    of.collect::<Vec<_>>().join(", ")
}
