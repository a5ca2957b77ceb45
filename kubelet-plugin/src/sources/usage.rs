//! Reads how much of the GPUs is used that claims hold: the one reader of it on the node. Nothing is read of GPUs that no
//! claim holds. What is read is attributed to claims and pods by [`divvy_usage`] and decides nothing.
//!
//! Lists of processes are dear: the driver walks through all its clients under a lock that submits of work need too.
//! They are read less often than utilisation, and everything less often while a call is slow.

mod gpu;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::capacity;
use divvy_claims::Phase;
use divvy_executor::{Executor, HeldDevice};
use divvy_host::HostRoot;
use divvy_model::{DeviceKind, GpuDriver, GpuUuid, MigDevice};
use divvy_telemetry::Durations;
use divvy_usage::{GpuUsage, Granted, Holding, attribute};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::Timing;
use crate::sources::inventory::GpusSeen;

use gpu::OnGpu;

/// How long the first answers of a round are waited for; later ones belong to the next.
const ROUND: Duration = Duration::from_secs(1);

/// What is used on the node, of GPUs that claims hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Used {
    pub(crate) gpus: BTreeMap<GpuUuid, GpuUsage>,
    /// Names of the GPUs, and how old the oldest of their figures is.
    pub(crate) about: BTreeMap<GpuUuid, (String, Duration)>,
}

/// Reads.
pub(crate) struct UsageSource {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) host: HostRoot,
    pub(crate) node: String,
    pub(crate) timing: Timing,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// Whether this instance publishes: one of the node's is enough.
    pub(crate) publishes: watch::Receiver<bool>,
    pub(crate) used: watch::Sender<Arc<Used>>,
    pub(crate) seconds: Durations,
}

impl UsageSource {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut gpus = BTreeMap::<GpuUuid, OnGpu>::new();
        let mut reads = JoinSet::<(GpuUuid, OnGpu)>::new();
        let mut rounds = 0_u64;
        loop {
            rounds += 1;
            let pause = self.pause(rounds);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
            let look =
                *self.publishes.borrow_and_update() && self.seen.borrow_and_update().released.is_none();
            let held = if look { self.held().await } else { Some(BTreeMap::new()) };
            let Some(held) = held else { continue };
            gpus.retain(|gpu, _| held.contains_key(gpu));
            for (gpu, holdings) in &held {
                let state = gpus.entry(gpu.clone()).or_insert_with(|| OnGpu::new(&self.timing));
                if let Some((due, before)) = state.begin(holdings) {
                    let (driver, host) = (self.gpus.clone(), self.host.clone());
                    let (gpu, seconds) = (gpu.clone(), self.seconds.clone());
                    reads.spawn_blocking(move || {
                        let read = before.read(&*driver, &host, &gpu, due, &seconds);
                        (gpu, read)
                    });
                }
            }
            self.collect(&mut gpus, &mut reads).await;
            // After the readings: a claim that came meanwhile accounts for its processes.
            let Some(held) = self.held().await else { continue };
            self.publish(&gpus, &held);
        }
    }

    /// Instances of the plugin and other readers of the node are not to ask at the same moments.
    fn pause(&self, round: u64) -> Duration {
        let mut hasher = DefaultHasher::new();
        (&self.node, round).hash(&mut hasher);
        let spread = u32::try_from(hasher.finish() % 200).unwrap_or(0);
        self.timing.usage * (900 + spread) / 1000
    }

    /// Waits until all have been read, but not for one that hangs.
    async fn collect(&self, gpus: &mut BTreeMap<GpuUuid, OnGpu>, reads: &mut JoinSet<(GpuUuid, OnGpu)>) {
        let until = Instant::now() + ROUND;
        while let Ok(Some(done)) = tokio::time::timeout_at(until, reads.join_next()).await {
            // A reading that panicked is of a GPU that stays busy: its age says so.
            let Ok((gpu, read)) = done else { continue };
            if let Some(state) = gpus.get_mut(&gpu) {
                *state = read;
            }
        }
    }

    /// What claims hold, by GPU; `None` if the records cannot be read.
    async fn held(&self) -> Option<BTreeMap<GpuUuid, Vec<Holding>>> {
        let executor = self.executor.clone();
        let held = tokio::task::spawn_blocking(move || executor.held()).await.ok()?.ok()?;
        let mut by_gpu = BTreeMap::<GpuUuid, Vec<Holding>>::new();
        for held in held.into_iter().filter(|held| held.phase == Phase::Prepared) {
            by_gpu.entry(held.hold.gpu.clone()).or_default().push(holding(held));
        }
        Some(by_gpu)
    }

    fn publish(&self, gpus: &BTreeMap<GpuUuid, OnGpu>, held: &BTreeMap<GpuUuid, Vec<Holding>>) {
        let ordinals = self.executor.ordinals().unwrap_or_default();
        let name = |gpu: &GpuUuid| ordinals.of(gpu).map(|ordinal| DeviceKind::Whole { ordinal }.to_string());
        let mut used = Used::default();
        for (gpu, state) in gpus {
            let Some(holdings) = held.get(gpu) else { continue };
            used.gpus.insert(gpu.clone(), attribute(&state.reading, &state.pods, holdings));
            used.about.insert(gpu.clone(), (name(gpu).unwrap_or_default(), state.age()));
        }
        self.used.send_if_modified(|known| {
            let changed = !(known.gpus.is_empty() && used.gpus.is_empty());
            *known = Arc::new(used);
            changed
        });
    }
}

fn holding(held: HeldDevice) -> Holding {
    let part = held.made.map(|made| MigDevice { gpu_instance: made.gpu_instance, uuid: made.uuid });
    let granted = Granted {
        memory: held.allocated.granted(capacity::MEMORY),
        cores: held.allocated.granted(capacity::CORES),
    };
    Holding {
        claim: held.claim,
        device: held.hold.device,
        kind: held.hold.kind,
        pods: held.pods,
        part,
        granted,
    }
}

#[cfg(test)]
mod tests;
