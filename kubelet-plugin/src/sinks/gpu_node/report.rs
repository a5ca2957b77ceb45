//! Pure: what is known of the node in, the status of its `GpuNode` out.

use std::collections::BTreeSet;

use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Summary, Trouble, Versions};
use divvy_claims::Phase;
use divvy_executor::HeldDevice;
use divvy_model::mig::Placement;
use divvy_model::{DeviceKind, GpuUuid, HoldKind, Inventory, Mode};
use divvy_offer::{Device, HealthView, Note, OneMode, Pool};

use super::troubles::troubles;
use crate::neighbours::Uses;
use crate::node::Recorded;
use crate::sources::policies::Effective;

/// Behind the device of a holder with admin access, which holds nothing.
const ADMIN: &str = " (admin)";

/// What is known.
pub(crate) struct Facts<'a> {
    /// `None` where the driver has not answered since the plugin started.
    pub(crate) inventory: Option<&'a Inventory>,
    /// Numbers, records and fences.
    pub(crate) recorded: &'a Recorded,
    pub(crate) pool: Option<&'a Pool>,
    pub(crate) effective: Option<&'a Effective>,
    pub(crate) health: &'a HealthView,
    /// GPUs that others use.
    pub(crate) neighbours: &'a Uses,
    /// Instances that others have made.
    pub(crate) foreign: &'a [(GpuUuid, Placement)],
    /// What is not published as it could be.
    pub(crate) notes: &'a BTreeSet<Note>,
    /// Why there is one mode for each GPU although more are asked for.
    pub(crate) one_mode: Option<&'a OneMode>,
    /// Why the driver cannot be used now.
    pub(crate) driver: Option<&'a str>,
    /// Who has asked that the driver be let go, while it is.
    pub(crate) released: Option<&'a str>,
    /// The API server's version.
    pub(crate) kubernetes: String,
}

impl Facts<'_> {
    fn devices(&self) -> impl Iterator<Item = (&Device, DeviceKind)> {
        let all = self.pool.into_iter().flat_map(Pool::devices);
        all.filter_map(|device| Some((device, DeviceKind::parse(&device.name).ok()?)))
    }
}

/// What a `GpuNode` says of it. Times are left to the writer.
pub(crate) fn report(facts: &Facts<'_>) -> GpuNodeStatus {
    let mut by_ordinal: Vec<(u32, &GpuUuid)> =
        facts.recorded.ordinals.iter().map(|(uuid, n)| (n, uuid)).collect();
    by_ordinal.sort();
    let known = |(n, uuid): &(u32, &GpuUuid)| {
        facts.inventory.is_none_or(|inventory| inventory.gpus.contains_key(*uuid))
            || facts.recorded.held.iter().any(|r| r.hold.gpu == **uuid)
            || facts.devices().any(|(_, kind)| kind.ordinal() == *n)
    };
    let gpus: Vec<GpuStatus> =
        by_ordinal.into_iter().filter(known).map(|(n, uuid)| gpu(facts, n, uuid)).collect();
    let claims: BTreeSet<&String> = gpus.iter().flat_map(|g| &g.holders).map(|h| &h.uid).collect();
    let is_held = |gpu: &GpuStatus| gpu.holders.iter().any(|holder| !holder.device.ends_with(ADMIN));
    let free = gpus.iter().filter(|gpu| !is_held(gpu) && gpu.taints.is_empty() && !gpu.offered.is_empty());
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let troubles = troubles(facts);
    let driver = facts.inventory.map(|inventory| inventory.system.driver_version.clone());
    GpuNodeStatus {
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
            kubernetes: facts.kubernetes.clone(),
        },
        bad_policies: facts.effective.map(|e| e.known.bad.keys().cloned().collect()).unwrap_or_default(),
        gpus,
        troubles,
        changed: None,
    }
}

fn gpu(facts: &Facts<'_>, ordinal: u32, uuid: &GpuUuid) -> GpuStatus {
    let held: Vec<&HeldDevice> =
        facts.recorded.held.iter().filter(|record| record.hold.gpu == *uuid).collect();
    let mode = held.iter().find_map(|record| record.hold.kind.needs()).unwrap_or(Mode::Idle);
    let (mut offered, mut taints) = (BTreeSet::new(), BTreeSet::new());
    for (device, kind) in facts.devices() {
        if kind.ordinal() != ordinal {
            continue;
        }
        let what = match kind {
            DeviceKind::Whole { .. } => "whole",
            DeviceKind::Partition(_) => "partitions",
            DeviceKind::Share { .. } => "shares",
            DeviceKind::Admin { .. } => continue,
        };
        let keys = device.taints.iter().map(|taint| &taint.key);
        let keys: Vec<&str> = keys.map(|key| key.rsplit('/').next().unwrap_or(key)).collect();
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
        product: facts
            .inventory
            .and_then(|inventory| inventory.gpus.get(uuid))
            .map(|gpu| gpu.facts.product_name.clone())
            .unwrap_or_default(),
        mode: mode.name().to_owned(),
        offered: offered.into_iter().collect(),
        policy: facts
            .effective
            .and_then(|effective| effective.resolved.by.get(uuid))
            .map(ToString::to_string)
            .unwrap_or_default(),
        holders,
        taints: taints.into_iter().collect(),
        fence: facts
            .recorded
            .fences
            .get(uuid)
            .and_then(|fences| fences.first())
            .map(|fence| fence.reason.clone())
            .unwrap_or_default(),
    }
}

fn holder(held: &HeldDevice) -> Holder {
    let (phase, reason) = match &held.phase {
        Phase::Preparing => ("preparing", String::new()),
        Phase::Prepared => ("prepared", String::new()),
        Phase::Leaving(leaving) => ("leaving", leaving.reason.clone()),
    };
    let device = match held.hold.kind {
        HoldKind::Admin => format!("{}{ADMIN}", held.hold.device),
        HoldKind::Whole | HoldKind::Partition { .. } | HoldKind::Share => held.hold.device.to_string(),
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
    let all = [Mode::Whole, Mode::Partitioned, Mode::TimeSliced, Mode::Mps, Mode::Idle];
    let counts = all.into_iter().filter_map(|mode| {
        let count = gpus.iter().filter(|gpu| gpu.mode == mode.name()).count();
        (count > 0).then(|| format!("{count} {}", mode.name()))
    });
    counts.collect::<Vec<_>>().join(", ")
}

/// `bad-policy, gpu-3 lost, gpu-4 fenced+lingering`: what needs a person.
fn trouble(troubles: &[Trouble]) -> String {
    let mut of: Vec<(&str, Vec<&str>)> = Vec::new();
    for trouble in troubles.iter().filter(|trouble| !trouble.notice) {
        match of.iter_mut().find(|(gpu, _)| *gpu == trouble.gpu) {
            Some((_, kinds)) if kinds.contains(&trouble.kind.as_str()) => {}
            Some((_, kinds)) => kinds.push(&trouble.kind),
            None => of.push((&trouble.gpu, vec![&trouble.kind])),
        }
    }
    let each = of.iter().map(|(gpu, kinds)| match *gpu {
        "" => kinds.join(", "),
        gpu => format!("{gpu} {}", kinds.join("+")),
    });
    each.collect::<Vec<_>>().join(", ")
}
