//! The task that owns the inventory: asks for the list of GPUs often (cheap), reads all facts when the list has
//! changed, on request and now and then, and waits for a driver that is not there yet.
//!
//! Everyone else reads the latest [`Seen`]; a failed read keeps the last inventory, so that one bad minute of NVML
//! withdraws nothing.

use std::sync::Arc;
use std::time::Duration;

use divvy_host::HostRoot;
use divvy_model::{GpuDriver, GpuError, GpuUuid, HostTopology, Inventory, PciAddress};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::Timing;

/// The latest state of the GPUs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    /// What was read last; `None` before the first success.
    pub(crate) inventory: Option<Arc<Inventory>>,
    /// Why the last attempt failed, if it did.
    pub(crate) problem: Option<String>,
}

/// Reads the GPUs.
pub(crate) struct InventoryOwner {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) host: HostRoot,
    pub(crate) timing: Timing,
    pub(crate) seen: watch::Sender<Seen>,
    /// Asks for a full read now.
    pub(crate) refresh: Arc<Notify>,
}

/// What one look found.
enum Look {
    Same,
    Changed(Arc<Inventory>),
}

const FIRST_PAUSE: Duration = Duration::from_millis(200);

impl InventoryOwner {
    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let mut pause = FIRST_PAUSE;
        let mut full_at = Instant::now();
        loop {
            let now = Instant::now();
            let full = now >= full_at;
            let look = self.look(full).await;
            let wait = match look {
                Ok(look) => {
                    if full || matches!(look, Look::Changed(_)) {
                        full_at = now + self.timing.refresh;
                    }
                    self.good(look);
                    pause = FIRST_PAUSE;
                    self.timing.list
                }
                Err(error) => {
                    self.bad(&error);
                    full_at = now;
                    let wait = pause.min(self.timing.driver_retry);
                    pause = (pause * 2).min(self.timing.driver_retry);
                    wait
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.refresh.notified() => full_at = Instant::now(),
                () = stop.cancelled() => return,
            }
        }
    }

    async fn look(&self, full: bool) -> Result<Look, GpuError> {
        let known = self.seen.borrow().inventory.clone();
        let (gpus, host) = (self.gpus.clone(), self.host.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let before = known.as_deref();
            if !full && let Some(before) = before {
                let mut listed = gpus.list()?;
                listed.sort();
                if listed == all_of(before) {
                    return Ok(Look::Same);
                }
            }
            let topology = |address: PciAddress| topology(&host, address);
            let found = divvy_nvml::read_inventory_after(&*gpus, &topology, before)?;
            Ok(if before == Some(&found) { Look::Same } else { Look::Changed(Arc::new(found)) })
        });
        match looked.await {
            Ok(result) => result,
            // Only a panic of the driver's code ends here; the next look tries again.
            Err(died) => Err(GpuError::global(divvy_model::GpuOp::List, divvy_model::GpuErrorCode::UNKNOWN)
                .with_detail(died.to_string())),
        }
    }

    fn good(&self, look: Look) {
        let recovered = self.seen.borrow().problem.is_some();
        match look {
            Look::Same if !recovered => {}
            Look::Same => {
                tracing::info!("the NVIDIA driver answers again");
                self.seen.send_modify(|seen| seen.problem = None);
            }
            Look::Changed(inventory) => {
                tracing::info!(
                    gpus = inventory.gpus.len(),
                    unreadable = inventory.problems.len(),
                    driver_version = %inventory.system.driver_version,
                    "GPUs of this node read"
                );
                self.seen.send_replace(Seen { inventory: Some(inventory), problem: None });
            }
        }
    }

    fn bad(&self, error: &GpuError) {
        let problem = crate::chain(error);
        // Once for each different problem, not once for each attempt.
        if self.seen.borrow().problem.as_ref() == Some(&problem) {
            return;
        }
        tracing::error!(error = %problem, "the NVIDIA driver does not answer; nothing new is published until it does, tried again by itself");
        self.seen.send_modify(|seen| seen.problem = Some(problem));
    }
}

fn all_of(inventory: &Inventory) -> Vec<GpuUuid> {
    let mut all: Vec<GpuUuid> = inventory.gpus.keys().cloned().collect();
    all.extend(inventory.problems.iter().map(|problem| problem.gpu.clone()));
    all.sort();
    all
}

/// What sysfs says; unknown is left out.
fn topology(host: &HostRoot, address: PciAddress) -> HostTopology {
    divvy_host::topology(host, address).unwrap_or_else(|error| {
        tracing::warn!(pci = %address, error = %crate::chain(&error), "place of the GPU in the host is not known");
        HostTopology::default()
    })
}
