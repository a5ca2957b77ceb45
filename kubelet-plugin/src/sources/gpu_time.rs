//! Counts for how long claims have had how much of the node's GPUs, saves the sums, and shows what
//! is saved.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use divvy_executor::{Clock, Executor, HeldDevice, SystemClock};
use divvy_model::mig::GpuInstanceProfile;
use divvy_model::{Form, Gpu, Inventory, Sharing, TargetKind};
use divvy_usage::{Amounts, DeviceUsage, HeldTime, HoldKey, Ledger, Moment, Series, WHOLE};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::host::saved;
use crate::metrics::GpuTimeMetrics;
use crate::node::facts::{GpusSeen, Used};

/// Time between two writes while the same claims hold GPUs.
const HELD: Duration = Duration::from_mins(1);
/// Time between two writes while claims come and go.
const CHANGED: Duration = Duration::from_secs(5);
/// Label of what is not known.
const UNKNOWN: &str = "unknown";
const MIB: u64 = 1 << 20;

/// Counts.
pub(crate) struct GpuTime {
    pub(crate) executor: Arc<Executor>,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    pub(crate) used: watch::Receiver<Arc<Used>>,
    /// `true` while this instance publishes: one of two counts.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// Devices that claims hold, sent with every reading of the records.
    pub(crate) held: watch::Receiver<Option<Arc<Vec<HeldDevice>>>>,
    pub(crate) file: PathBuf,
    pub(crate) metrics: GpuTimeMetrics,
}

/// The sums, and what of them is on disk.
struct Counting {
    ledger: Ledger,
    holds: BTreeSet<HoldKey>,
    saved: BTreeSet<HoldKey>,
    saved_at: Option<Instant>,
    /// True once the log says that the sums cannot be saved.
    failed: bool,
}

impl GpuTime {
    /// Runs until `stop`, and saves the sums then.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut counting: Option<Counting> = None;
        loop {
            tokio::select! {
                Ok(()) = self.held.changed() => {}
                Ok(()) = self.in_charge.changed() => {}
                () = stop.cancelled() => break,
                else => break,
            }
            // The other instance of an update goes on from the file.
            if !*self.in_charge.borrow_and_update() {
                if let Some(counting) = counting.take() {
                    self.save(counting).await;
                }
                continue;
            }
            // While GPUs or records are unknown the interval grows: what was held is still held.
            let Some(inventory) = self.seen.borrow_and_update().inventory.clone() else {
                continue;
            };
            let Some(held) = self.held.borrow_and_update().clone() else {
                continue;
            };
            let used = self.used.borrow_and_update().clone();
            let held = times(&held, &inventory, &used);
            let mut now = match counting.take() {
                None => self.begin(held).await,
                Some(mut counting) => {
                    counting.holds = holds(&held);
                    counting.ledger.step(self.now(), held);
                    counting
                }
            };
            if now.is_due() {
                now = self.save(now).await;
            }
            counting = Some(now);
        }
        if let Some(counting) = counting {
            self.save(counting).await;
        }
    }

    /// Goes on from what is saved, or begins.
    async fn begin(&self, held: Vec<HeldTime>) -> Counting {
        let file = self.file.clone();
        let saved = tokio::task::spawn_blocking(move || saved::load::<Ledger>(&file));
        let (now, holds) = (self.now(), holds(&held));
        let ledger = match saved.await.ok().flatten() {
            None => Ledger::new(now, held),
            Some(mut ledger) => {
                self.metrics.show(&ledger);
                let ended = self.executor.records_changed().map(millis);
                ledger.resume(now.clone(), held, ended.unwrap_or(now.wall));
                ledger
            }
        };
        Counting {
            ledger,
            saved: BTreeSet::new(),
            holds,
            saved_at: None,
            failed: false,
        }
    }

    /// Saves the sums, and shows them once they are on disk: one that was shown and lost would be
    /// counted twice.
    async fn save(&self, mut counting: Counting) -> Counting {
        let (file, ledger) = (self.file.clone(), counting.ledger.clone());
        let done = tokio::task::spawn_blocking(move || saved::save(&file, &ledger));
        let done = done.await.unwrap_or_else(|died| Err(died.into()));
        counting.saved_at = Some(Instant::now());
        match done {
            Ok(()) => {
                self.metrics.show(&counting.ledger);
                counting.saved = counting.holds.clone();
                counting.failed = false;
            }
            Err(error) if !counting.failed => {
                let file = self.file.display();
                tracing::warn!(%file, %error, "failed to save the sums of GPU time, which stay as shown until then");
                counting.failed = true;
            }
            Err(_) => {}
        }
        counting
    }

    fn now(&self) -> Moment {
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Moment {
            boot: self.executor.boot().clone(),
            since_boot: millis(SystemClock.now()),
            wall: millis(wall.unwrap_or_default()),
        }
    }
}

impl Counting {
    /// Returns whether the sums are to be saved. On an idle node nothing is written.
    fn is_due(&self) -> bool {
        let every = if self.holds != self.saved {
            CHANGED
        } else if self.holds.is_empty() {
            return false;
        } else {
            HELD
        };
        self.saved_at.is_none_or(|at| at.elapsed() >= every)
    }
}

fn holds(held: &[HeldTime]) -> BTreeSet<HoldKey> {
    held.iter().map(|one| one.hold.clone()).collect()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns what is counted of the devices that claims have. Admin access keeps nothing from others.
fn times(held: &[HeldDevice], inventory: &Inventory, used: &Used) -> Vec<HeldTime> {
    let holding = held.iter().filter(|held| held.hold.sharing.holds());
    let mut times: Vec<HeldTime> = Vec::new();
    for held in holding {
        let gpu = inventory.gpus.get(&held.hold.gpu);
        let (claim, device) = (&held.hold.claim, &held.hold.device);
        // The use of a claim's shares of one device is read together.
        let is_first = |one: &HeldTime| (&one.hold.claim, &one.hold.device) != (claim, device);
        let has = has(held, gpu);
        let of_gpu = used.gpus.get(&held.hold.gpu);
        let mut devices = of_gpu.into_iter().flat_map(|gpu| &gpu.devices);
        let usage = devices.find(|usage| usage.claim.uid == *claim && usage.device == *device);
        let first = usage.filter(|_| times.iter().all(is_first));
        times.push(HeldTime {
            hold: HoldKey {
                claim: claim.clone(),
                device: device.clone(),
                share: held.allocated.share_id.clone().unwrap_or_default(),
            },
            gpu: held.hold.gpu.clone(),
            series: Series {
                namespace: held.claim.namespace.clone(),
                class: held.class.clone().unwrap_or_else(|| UNKNOWN.to_owned()),
                product: gpu
                    .map_or(UNKNOWN, |gpu| &gpu.facts.product_name)
                    .to_owned(),
                form: label(held.hold.form()).to_owned(),
            },
            has,
            uses: first.map_or_else(Amounts::default, |usage| uses_of(usage, held, has)),
            allocated: held.allocated_at.as_deref().and_then(wall),
        });
    }
    times
}

/// Returns the part of its GPU that a device is, by memory, and its memory in MiB.
fn has(held: &HeldDevice, gpu: Option<&Gpu>) -> Amounts {
    let total = gpu.and_then(|gpu| gpu.facts.memory_bytes);
    let profile = || {
        let capabilities = &gpu?.mig.as_ref()?.capabilities;
        capabilities.profile(held.hold.target.place()?.profile)
    };
    let form = held.hold.form();
    let memory = match (form.target, form.sharing.is_shared()) {
        (TargetKind::Gpu, false) => total,
        (TargetKind::Partition, false) => profile().map(GpuInstanceProfile::memory_bytes),
        (_, true) => held.amounts.memory,
    };
    let by_memory = || Some(memory?.saturating_mul(WHOLE) / total.filter(|total| *total > 0)?);
    let by_cores = || Some(held.amounts.cores? * (WHOLE / 100));
    let part = match form {
        Form::WHOLE => WHOLE,
        _ => by_memory().or_else(by_cores).unwrap_or(0).min(WHOLE),
    };
    Amounts {
        part,
        memory: memory.unwrap_or(0) / MIB,
    }
}

/// Returns what a claim uses of a device. A figure that cannot be read counts as nothing.
fn uses_of(usage: &DeviceUsage, held: &HeldDevice, has: Amounts) -> Amounts {
    let memory = usage.pods.iter().filter_map(|pod| pod.memory.as_ref().ok());
    // The driver says how much of the GPU a share uses, and how much of a partition its user does.
    let whole = match held.hold.target.kind() {
        TargetKind::Gpu => WHOLE,
        TargetKind::Partition => has.part,
    };
    let ratio = usage
        .utilization
        .as_ref()
        .map_or(0.0, |measured| measured.ratio);
    Amounts {
        part: Duration::try_from_secs_f64(ratio).map_or(0, millis) * whole / 1000,
        memory: memory.sum::<u64>() / MIB,
    }
}

/// Returns a form as a label, which distinguishes shares of partitions from those of GPUs.
fn label(form: Form) -> &'static str {
    match (form.target, form.sharing) {
        (TargetKind::Gpu, Sharing::Exclusive) => "whole",
        (TargetKind::Partition, Sharing::Exclusive) => "partition",
        (TargetKind::Gpu, Sharing::TimeSliced) => "time-sliced",
        (TargetKind::Gpu, Sharing::Mps) => "mps",
        (TargetKind::Partition, Sharing::TimeSliced) => "partition-time-sliced",
        (TargetKind::Partition, Sharing::Mps) => "partition-mps",
        (_, Sharing::Admin) => "admin",
    }
}

/// Returns a time of the API in milliseconds since 1970.
fn wall(text: &str) -> Option<u64> {
    let time: Timestamp = text.parse().ok()?;
    u64::try_from(time.as_millisecond()).ok()
}

#[cfg(test)]
mod tests;
