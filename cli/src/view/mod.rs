//! The fleet as one value: who holds what, what they really use of it, what is free, wrong and
//! waited for. `divvy top` makes tables of it, `divvy ui` a page.

mod published;
#[cfg(test)]
pub(crate) mod tests;

use std::cmp::Reverse;

use divvy_api::node::{GpuStatus, Holder};
use divvy_model::{DeviceKind, Form, Sharing};
use divvy_offer::pool_name;
use serde::Serialize;

pub use self::published::Free;
use self::published::Published;
use crate::status::claim::{ClaimLine, reserved};
use crate::status::read::GPU_NODES;
use crate::status::report::{self, NodeTrouble, Waiting};
use crate::status::snapshot::{Snapshot, name, namespace, time};
use crate::usage::{ClaimUsage, GpuUsage, Usage};
use divvy_why::device::kind;

/// Time for which a device has been idle when it is shown as idle: programs start, load and pause.
pub const IDLE: u64 = 600;

/// The end of a holder's device, of admin access.
const ADMIN: &str = " (admin)";

/// The fleet.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct View {
    /// The time of reading.
    pub now: String,
    /// Caption of the example that is being played; for the demo.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caption: Option<String>,
    /// Name of the cluster for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<String>,
    /// Why no node reports GPUs, and what to do, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty: Option<String>,
    /// Unknown where devices or claims cannot be read.
    pub free: Option<Free>,
    pub nodes: Vec<NodeView>,
    pub troubles: Vec<NodeTrouble>,
    pub refused: Vec<ClaimLine>,
    pub waiting: Vec<Waiting>,
    /// Kinds that could not be read.
    pub unread: Vec<String>,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    pub name: String,
    pub free: u32,
    /// Problems that its plugin reports, in short.
    pub trouble: String,
    pub driver: String,
    pub gpus: Vec<GpuView>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    pub name: String,
    pub uuid: String,
    pub product: String,
    /// `idle`, `whole`, `partitioned`, `time-sliced` or `mps`.
    pub mode: String,
    /// Kinds of problems that need a person.
    pub troubles: Vec<String>,
    pub memory: Option<u64>,
    #[serde(flatten)]
    pub usage: GpuUsage,
    /// By place.
    pub holds: Vec<Hold>,
}

/// A claim's part of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hold {
    pub namespace: String,
    pub claim: String,
    pub pods: Vec<String>,
    pub device: String,
    /// `whole`, `share`, `MPS share`, `admin`, the profile of a partition, or `share of` that.
    pub part: String,
    /// Where on the GPU, from 0 to 1. Admin access has no place.
    pub place: Option<(f64, f64)>,
    /// Where the partition is of which it is a share; others are there too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within: Option<(f64, f64)>,
    /// `allocated`, `preparing`, `prepared` or `leaving`.
    pub phase: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    #[serde(flatten)]
    pub usage: ClaimUsage,
    /// Granted and not used, in bytes.
    pub wasted: Option<u64>,
    /// Mark that it has been idle for long.
    pub idle: bool,
}

impl Hold {
    /// Returns whether it is admin access, which takes nothing of the GPU.
    pub fn is_admin(&self) -> bool {
        self.part == Form::ADMIN.noun()
    }

    /// By what is wasted: what is idle, the longest first; then by memory that is not used; the
    /// unknown last.
    pub fn rank(&self) -> impl Ord + use<'_> {
        let idle = self.usage.idle_seconds.filter(|_| self.idle);
        (
            Reverse(idle),
            Reverse(self.wasted),
            &self.namespace,
            &self.claim,
            &self.device,
        )
    }
}

impl View {
    /// All parts of GPUs that claims hold, each with its node and GPU.
    pub fn holds(&self) -> impl Iterator<Item = (&NodeView, &GpuView, &Hold)> {
        let gpus = self
            .nodes
            .iter()
            .flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
        gpus.flat_map(|(node, gpu)| gpu.holds.iter().map(move |hold| (node, gpu, hold)))
    }
}

/// The view of what was read.
pub fn of(snapshot: &Snapshot, usage: &Usage) -> View {
    let fleet = report::fleet(snapshot, None);
    let published = Published::new(snapshot);
    let nodes = fleet.nodes.into_iter().map(|line| {
        let gpus = snapshot
            .reports
            .get(&line.name)
            .map(|status| status.gpus.as_slice())
            .unwrap_or_default();
        let pool = pool_name(&line.name);
        let gpus = gpus.iter().map(|gpu| {
            let troubles = report::kinds(&fleet.troubles, &line.name, &gpu.name);
            GpuView {
                troubles,
                ..self::gpu(&published, usage, &pool, gpu)
            }
        });
        let gpus: Vec<GpuView> = gpus.collect();
        // Claims may be newer than the node's report.
        let reported = snapshot.reports.get(&line.name);
        let is_idle = |gpu: &GpuStatus| {
            gpu.holders
                .iter()
                .all(|holder| holder.device.ends_with(ADMIN))
        };
        let idle = reported
            .iter()
            .flat_map(|status| &status.gpus)
            .filter(|gpu| is_idle(gpu));
        let is_held = |idle: &&GpuStatus| {
            let mut now = gpus.iter().filter(|gpu| gpu.name == idle.name);
            now.any(|gpu| !gpu.holds.iter().all(Hold::is_admin))
        };
        let newly = u32::try_from(idle.filter(is_held).count()).unwrap_or(u32::MAX);
        let free = line.free.saturating_sub(newly);
        NodeView {
            name: line.name,
            free,
            trouble: line.trouble,
            driver: line.versions.driver,
            gpus,
        }
    });
    let nodes: Vec<NodeView> = nodes.collect();
    // A claim that is gone may still have its devices, as its node reports.
    let unheld = nodes.iter().map(|node| node.free).sum();
    let reported = !snapshot.lacks(&GPU_NODES);
    let free = published.free().map(|free| Free {
        whole_gpus: if reported {
            free.whole_gpus.min(unheld)
        } else {
            free.whole_gpus
        },
        ..free
    });
    View {
        now: snapshot.now.to_string(),
        caption: None,
        cluster: None,
        empty: fleet.nowhere,
        free,
        nodes,
        troubles: fleet.troubles,
        refused: fleet.refused,
        waiting: fleet.waiting,
        unread: snapshot
            .unread
            .iter()
            .chain(&usage.unread)
            .cloned()
            .collect(),
    }
}

fn gpu(published: &Published<'_>, usage: &Usage, pool: &str, gpu: &GpuStatus) -> GpuView {
    let ordinal = kind(&gpu.name).map(|kind| kind.ordinal());
    let memory = ordinal.and_then(|ordinal| published.memory_of(pool, ordinal));
    let mut holds: Vec<Hold> = holders(published, pool, gpu)
        .into_iter()
        .map(|holder| hold(published, usage, (pool, &gpu.uuid), holder))
        .collect();
    let mode = holds
        .iter()
        .filter(|hold| !hold.is_admin())
        .find_map(|hold| kind(&hold.device)?.form().mode());
    // What came last is behind what was there.
    holds.sort_by(|a, b| {
        (&a.since, &a.namespace, &a.claim).cmp(&(&b.since, &b.namespace, &b.claim))
    });
    place_in_partitions(&mut holds, |device| published.memory((pool, device)));
    place_shares(
        holds.iter_mut().filter(|hold| is_open(hold)),
        memory,
        (0.0, 1.0),
    );
    holds.sort_by(|a, b| {
        let start = |hold: &Hold| hold.place.map_or(f64::INFINITY, |(start, _)| start);
        start(a).total_cmp(&start(b))
    });
    GpuView {
        name: gpu.name.clone(),
        uuid: gpu.uuid.clone(),
        product: gpu.product.clone(),
        mode: mode.map_or_else(|| gpu.mode.clone(), |mode| mode.name().to_owned()),
        troubles: Vec::new(),
        memory,
        usage: usage.of_gpu(&gpu.uuid),
        holds,
    }
}

/// Whom the node reports, and the claims that it has not reported yet.
fn holders(published: &Published<'_>, pool: &str, gpu: &GpuStatus) -> Vec<Holder> {
    let mut all: Vec<Holder> = Vec::new();
    for holder in &gpu.holders {
        if !all
            .iter()
            .any(|other| (&other.uid, &other.device) == (&holder.uid, &holder.device))
        {
            all.push(holder.clone());
        }
    }
    let on_gpu = |device: &str| {
        kind(device).is_some_and(|kind| format!("gpu-{}", kind.ordinal()) == gpu.name)
    };
    for (device, given) in published.given(pool).filter(|(device, _)| on_gpu(device)) {
        let meta = &given.claim.metadata;
        let uid = meta.uid.as_deref().unwrap_or_default();
        if all
            .iter()
            .any(|other| other.uid == uid && other.device.split(' ').next() == Some(device))
        {
            continue;
        }
        let allocation = given
            .claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref());
        all.push(Holder {
            namespace: namespace(meta).to_owned(),
            name: name(meta).to_owned(),
            uid: uid.to_owned(),
            device: if given.admin {
                format!("{device} (admin)")
            } else {
                device.to_owned()
            },
            phase: "allocated".to_owned(),
            pods: reserved(given.claim),
            since: allocation
                .and_then(|allocation| allocation.allocation_timestamp.as_ref())
                .map(time),
            ..Holder::default()
        });
    }
    all
}

fn hold(
    published: &Published<'_>,
    usage: &Usage,
    (pool, uuid): (&str, &str),
    holder: Holder,
) -> Hold {
    // Admin access is marked behind the device's name.
    let (device, admin) = match holder.device.split_once(' ') {
        Some((device, _)) => (device.to_owned(), true),
        None => (holder.device, false),
    };
    let id = (pool, device.as_str());
    let kind = kind(&device);
    let used = match kind.as_ref().map(DeviceKind::form) {
        _ if admin => Form::ADMIN,
        Some(used) => used,
        None => Form::WHOLE,
    };
    let partition = kind.as_ref().and_then(DeviceKind::partition);
    let mut within = None;
    let (part, place) = match (used.sharing, partition) {
        (Sharing::Exclusive, Some(at)) => {
            let profile = published.profile(id).unwrap_or(used.noun());
            (profile.to_owned(), published.place(id, at.start))
        }
        (Sharing::Exclusive, None) => {
            let by_mps = published.is_by_mps(id, &holder.uid);
            let part = if by_mps { "whole by MPS" } else { used.noun() };
            (part.to_owned(), Some((0.0, 1.0)))
        }
        (Sharing::Admin, _) => (used.noun().to_owned(), None),
        _ => {
            let percent = published.percent(id, &holder.uid).filter(|of| *of > 0);
            let percent = percent.map_or_else(String::new, |of| format!(" {of} %"));
            match partition {
                Some(at) => {
                    let profile = published.profile(id).unwrap_or("a partition");
                    within = published.place(id, at.start);
                    (format!("{}{percent} of {profile}", used.noun()), None)
                }
                None => (format!("{}{percent}", used.noun()), None),
            }
        }
    };
    let idle_after = usage.idle_after.unwrap_or(IDLE);
    let mut usage = usage.of_claim(uuid, &holder.namespace, &holder.name, &device);
    if used == Form::ADMIN {
        usage.memory_granted = None;
    } else {
        usage.memory_granted = usage
            .memory_granted
            .or_else(|| published.granted(id, &holder.uid));
        usage.memory_limit = usage
            .memory_limit
            .or_else(|| published.limit(id, &holder.uid));
    }
    Hold {
        wasted: usage
            .memory_granted
            .zip(usage.memory_used)
            .map(|(granted, used)| granted.saturating_sub(used)),
        idle: usage.idle_seconds.is_some_and(|idle| idle >= idle_after),
        namespace: holder.namespace,
        claim: holder.name,
        pods: holder.pods,
        device,
        part,
        place,
        within,
        phase: holder.phase,
        since: holder.since,
        usage,
    }
}

/// Returns whether it has no place yet, and is to have one.
fn is_open(hold: &Hold) -> bool {
    hold.place.is_none() && !hold.is_admin()
}

/// Places the shares of partitions, each within its partition. `memory` knows that of devices.
fn place_in_partitions(holds: &mut [Hold], memory: impl Fn(&str) -> Option<u64>) {
    while let Some((device, within)) = holds
        .iter()
        .filter(|hold| is_open(hold))
        .find_map(|hold| Some((hold.device.clone(), hold.within?)))
    {
        // Shares of another kind that are leaving are at the same place.
        let of = |hold: &&mut Hold| is_open(hold) && hold.within == Some(within);
        place_shares(holds.iter_mut().filter(of), memory(&device), within);
    }
}

/// Places shares one behind the other, as long as their memory; with equal lengths if that is
/// unknown, or more than there is. So are partitions whose place is unknown.
fn place_shares<'h>(
    shares: impl Iterator<Item = &'h mut Hold>,
    memory: Option<u64>,
    (from, to): (f64, f64),
) {
    let shares: Vec<&mut Hold> = shares.collect();
    #[expect(clippy::cast_precision_loss, reason = "the length of a bar")]
    let known = |hold: &Hold| match (hold.usage.memory_granted, memory) {
        (Some(granted), Some(memory)) if memory > 0 => Some(granted as f64 / memory as f64),
        _ => None,
    };
    let parts: Option<Vec<f64>> = shares.iter().map(|hold| known(hold)).collect();
    let parts = parts.filter(|parts| parts.iter().sum::<f64>() <= 1.0 + f64::EPSILON * 16.0);
    #[expect(clippy::cast_precision_loss, reason = "some dozens of shares")]
    let equal = 1.0 / shares.len().max(1) as f64;
    let parts = parts.unwrap_or_else(|| vec![equal; shares.len()]);
    let mut start = 0.0;
    for (hold, part) in shares.into_iter().zip(parts) {
        let end = f64::min(start + part, 1.0);
        let at = |part: f64| from + part * (to - from);
        hold.place = Some((at(start), at(end)));
        start = end;
    }
}
