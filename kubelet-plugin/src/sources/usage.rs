//! Reads how much of the GPUs is used that claims hold: the one reader of it on the node. Nothing
//! is read of GPUs that no claim holds. The figures are attributed to claims and pods by
//! [`divvy_usage`] and decides nothing.
//!
//! Lists of processes are dear: the driver walks through all its clients under a lock that submits
//! of work need too. They are read less often than utilisation, and everything less often while a
//! call is slow.

mod gpu;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::Phase;
use divvy_executor::{Executor, HeldDevice};
use divvy_host::HostRoot;
use divvy_model::{DeviceKind, GpuDriver, GpuUuid, MigDevice};
use divvy_telemetry::Durations;
use divvy_usage::{Granted, Holding, attribute};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::app::config::Timing;
use crate::claims::held::held_now;
use crate::node::facts::{GpusSeen, Used};

use gpu::OnGpu;

/// Time to wait for the answers of a round; later ones belong to the next.
const ROUND: Duration = Duration::from_secs(1);

/// Reads.
pub(crate) struct UsageSource {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) host: HostRoot,
    pub(crate) node: String,
    pub(crate) timing: Timing,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// `true` while this instance publishes: a single reader on the node is enough.
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
            // The pause first: at the start there is nothing to read yet.
            rounds += 1;
            let pause = self.pause(rounds);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
            let look = *self.publishes.borrow_and_update()
                && self.seen.borrow_and_update().released.is_none();
            let held = if look {
                self.held().await
            } else {
                Some(BTreeMap::new())
            };
            let Some(held) = held else { continue };
            // Figures of a GPU that no claim holds are forgotten, so that its next holder does not
            // begin with them.
            gpus.retain(|gpu, _| held.contains_key(gpu));
            for (gpu, holdings) in &held {
                let state = gpus
                    .entry(gpu.clone())
                    .or_insert_with(|| OnGpu::new(&self.timing));
                // A single reading at a time for each GPU: a call that hangs blocks one thread.
                if let Some((due, before)) = state.begin(holdings) {
                    let (driver, host) = (self.gpus.clone(), self.host.clone());
                    let (gpu, seconds) = (gpu.clone(), self.seconds.clone());
                    reads.spawn_blocking(move || {
                        let read = before.read(&*driver, &host, &gpu, due, &seconds);
                        (gpu, read)
                    });
                }
            }
            // All GPUs are asked at once. A GPU that hangs costs a round a second, but no figure of
            // the others.
            self.collect(&mut gpus, &mut reads).await;
            // After the readings: a claim that came meanwhile accounts for its processes.
            let Some(held) = self.held().await else {
                continue;
            };
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
    async fn collect(
        &self,
        gpus: &mut BTreeMap<GpuUuid, OnGpu>,
        reads: &mut JoinSet<(GpuUuid, OnGpu)>,
    ) {
        let until = Instant::now() + ROUND;
        while let Ok(Some(done)) = tokio::time::timeout_at(until, reads.join_next()).await {
            // A reading that panicked is of a GPU that stays busy: its age says so.
            let Ok((gpu, read)) = done else { continue };
            if let Some(state) = gpus.get_mut(&gpu) {
                *state = read;
            }
        }
    }

    /// Returns the devices that claims hold, by GPU; `None` if the records cannot be read.
    async fn held(&self) -> Option<BTreeMap<GpuUuid, Vec<Holding>>> {
        let held = held_now(&self.executor).await?;
        let mut by_gpu = BTreeMap::<GpuUuid, Vec<Holding>>::new();
        for held in held
            .into_iter()
            .filter(|held| held.phase == Phase::Prepared)
        {
            by_gpu
                .entry(held.hold.gpu.clone())
                .or_default()
                .push(holding(held));
        }
        Some(by_gpu)
    }

    fn publish(&self, gpus: &BTreeMap<GpuUuid, OnGpu>, held: &BTreeMap<GpuUuid, Vec<Holding>>) {
        let ordinals = self.executor.ordinals().unwrap_or_default();
        let name = |gpu: &GpuUuid| {
            ordinals
                .of(gpu)
                .map(|ordinal| DeviceKind::whole(ordinal).to_string())
        };
        let mut used = Used::default();
        for (gpu, state) in gpus {
            // A claim that ended during the readings has no figures: its pods are gone.
            let Some(holdings) = held.get(gpu) else {
                continue;
            };
            used.gpus.insert(
                gpu.clone(),
                attribute(&state.reading, &state.pods, holdings),
            );
            used.about
                .insert(gpu.clone(), (name(gpu).unwrap_or_default(), state.age()));
        }
        self.used.send_if_modified(|known| {
            let changed = !(known.gpus.is_empty() && used.gpus.is_empty());
            *known = Arc::new(used);
            changed
        });
    }
}

fn holding(held: HeldDevice) -> Holding {
    let part = held.made.map(|made| MigDevice {
        gpu_instance: made.gi,
        uuid: made.uuid,
    });
    let granted = Granted {
        memory: held.amounts.memory,
        limit: held.amounts.limit,
        cores: held.amounts.cores,
    };
    Holding {
        claim: held.claim,
        kind: held.hold.form(),
        device: held.hold.device,
        pods: held.pods,
        part,
        granted,
    }
}

#[cfg(test)]
mod tests;
