//! The task that owns the inventory: lists the GPUs often (cheap), reads all facts when the list has changed, on request
//! and at intervals, and waits for a driver that is not installed yet.
//!
//! Other tasks read the latest [`Seen`]; a failed read keeps the last inventory, so that one bad minute of NVML withdraws
//! nothing. While the driver is absent, or lacks files that containers need, the inventory is marked as down. While a
//! release is requested and no claim holds a device, the driver is released (see `drain`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_host::{HostRoot, NvidiaModule, nvidia_module};
use divvy_model::{GpuDriver, GpuError, GpuErrorCode, GpuOp, GpuUuid, HostTopology, Inventory, PciAddress};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Timing;
use crate::drain;
use crate::edits::HostEdits;
use crate::events::Notifier;
use crate::node::{Fact, Facts};
use crate::sources::node_labels::NodeFacts;

/// The latest state of the GPUs.
#[derive(Debug, Clone, Default)]
pub(crate) struct GpusSeen {
    /// What was read last; `None` before the first success.
    pub(crate) inventory: Option<Arc<Inventory>>,
    /// When that reading began.
    pub(crate) read_at: Option<std::time::Instant>,
    /// Why the last attempt failed, if it did.
    pub(crate) problem: Option<String>,
    /// Why nothing that needs the driver can be prepared now, although its GPUs were seen.
    pub(crate) down: Option<String>,
    /// Who has asked that the driver be let go, while it is.
    pub(crate) released: Option<String>,
}

/// Reads the GPUs.
pub(crate) struct InventoryOwner {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) host: HostRoot,
    pub(crate) timing: Timing,
    pub(crate) seen: watch::Sender<GpusSeen>,
    pub(crate) facts: Facts,
    /// Asks for a full read now.
    pub(crate) refresh: Arc<Notify>,
    /// What containers get of the driver.
    pub(crate) edits: Arc<HostEdits>,
    /// The node's object: a drain shows there.
    pub(crate) node: watch::Receiver<Option<Arc<NodeFacts>>>,
    /// The file that asks for the driver to be let go.
    pub(crate) release_file: PathBuf,
    /// Whether a claim holds a device, or one is being worked on; may block.
    pub(crate) in_use: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Reports a driver that stays away, in the background.
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) reports: TaskTracker,
}

/// What one look found.
struct Poll {
    /// Something else than before, and when reading it began.
    changed: Option<(std::time::Instant, Arc<Inventory>)>,
    /// Why nothing can be prepared although the GPUs answer.
    down: Option<String>,
    module: Option<NvidiaModule>,
}

/// A driver that is absent, since when, and whether that was reported.
#[derive(Default)]
struct Trouble {
    since: Option<Instant>,
    reported: bool,
}

const FIRST_PAUSE: Duration = Duration::from_millis(200);

impl InventoryOwner {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut pause = FIRST_PAUSE;
        let mut full_at = Instant::now();
        let mut module = None;
        let mut trouble = Trouble::default();
        let mut sent = self.seen.subscribe();
        loop {
            let now = Instant::now();
            let wait = if let Some(asked) = self.may_let_go().await {
                self.let_go(&asked).await;
                full_at = now;
                self.timing.list
            } else {
                let full = now >= full_at;
                match self.look(full, module.clone()).await {
                    Ok(look) => {
                        if full || look.changed.is_some() {
                            full_at = now + self.timing.refresh;
                        }
                        module.clone_from(&look.module);
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
                }
            };
            self.report(&mut trouble);
            if sent.has_changed().unwrap_or_default()
                && self.facts.send(Fact::Gpus(sent.borrow_and_update().clone())).is_err()
            {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.refresh.notified() => full_at = Instant::now(),
                Ok(()) = self.node.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Who asks for the driver to be let go, if it may be: its GPUs were read once, and no claim needs it.
    async fn may_let_go(&mut self) -> Option<String> {
        let node = self.node.borrow_and_update().clone();
        let file = self.release_file.exists().then_some(self.release_file.as_path());
        let asked = drain::asked(node.as_deref(), file)?;
        self.seen.borrow().inventory.as_ref()?;
        let in_use = self.in_use.clone();
        let used = tokio::task::spawn_blocking(move || in_use()).await.unwrap_or(true);
        (!used).then_some(asked)
    }

    /// Again each time: a claim that came and went has opened it.
    async fn let_go(&self, asked: &str) {
        let gpus = self.gpus.clone();
        let released = tokio::task::spawn_blocking(move || gpus.release()).await;
        if released.is_err() || self.seen.borrow().released.as_deref() == Some(asked) {
            return;
        }
        tracing::info!(
            asked,
            "released the NVIDIA driver: no claim needs it, and its module may be unloaded"
        );
        let down = Some(format!("the NVIDIA driver is released: {asked}"));
        self.seen.send_modify(|seen| {
            *seen = GpusSeen {
                inventory: seen.inventory.take(),
                read_at: seen.read_at,
                problem: None,
                down,
                released: Some(asked.to_owned()),
            };
        });
    }

    async fn look(&self, full: bool, last_module: Option<NvidiaModule>) -> Result<Poll, GpuError> {
        let known = self.seen.borrow().inventory.clone();
        let (gpus, host, edits) = (self.gpus.clone(), self.host.clone(), self.edits.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let before = known.as_deref();
            // One that was exchanged between two looks answers as if nothing had been.
            let module = nvidia_module(&host).ok().flatten();
            let usable = || edits.check().err().map(|error| crate::chain(&error));
            if !full
                && module == last_module
                && let Some(before) = before
            {
                let mut listed = gpus.list()?;
                listed.sort();
                if listed == all_of(before) {
                    return Ok(Poll { changed: None, down: usable(), module });
                }
            }
            let began = std::time::Instant::now();
            let topology = |address: PciAddress| topology(&host, address);
            let found = divvy_nvml::read_inventory_after(&*gpus, &topology, before)?;
            let changed = (before != Some(&found)).then(|| (began, Arc::new(found)));
            Ok(Poll { changed, down: usable(), module })
        });
        match looked.await {
            Ok(result) => result,
            // Only a panic of the driver's code ends here; the next look tries again.
            Err(died) => {
                Err(GpuError::global(GpuOp::List, GpuErrorCode::UNKNOWN).with_detail(died.to_string()))
            }
        }
    }

    fn good(&self, look: Poll) {
        let Poll { changed, down, .. } = look;
        let before = self.seen.borrow().clone();
        if before.problem.is_some() || before.released.is_some() {
            tracing::info!("the NVIDIA driver answers again");
        }
        if let Some(why) = down.as_ref().filter(|_| before.down != down) {
            tracing::error!(why, "GPUs answer, but cannot be given to containers, will retry");
        }
        if let Some((_, inventory)) = &changed {
            tracing::info!(
                gpus = inventory.gpus.len(),
                unreadable = inventory.problems.len(),
                driver_version = %inventory.system.driver_version,
                "read the node's GPUs"
            );
        }
        let is_new = changed.is_some();
        let now = GpusSeen {
            read_at: changed.as_ref().map_or(before.read_at, |(began, _)| Some(*began)),
            inventory: changed.map(|(_, found)| found).or_else(|| before.inventory.clone()),
            problem: None,
            down,
            released: None,
        };
        let same =
            !is_new && before.problem.is_none() && before.released.is_none() && before.down == now.down;
        if !same {
            self.seen.send_replace(now);
        }
    }

    fn bad(&self, error: &GpuError) {
        let problem = crate::chain(error);
        // Once for each different problem, not once for each attempt.
        if self.seen.borrow().problem.as_ref() == Some(&problem) {
            return;
        }
        tracing::error!(error = %problem, "the NVIDIA driver does not answer; no new device is published until it does, will retry");
        let down = is_away(error.code).then(|| problem.clone());
        self.seen.send_modify(|seen| {
            seen.released = None;
            seen.problem = Some(problem);
            seen.down = down.or_else(|| seen.down.take());
        });
    }

    /// A driver that stays away is reported by an Event on the node, once until it is back, unless its release was requested.
    fn report(&self, trouble: &mut Trouble) {
        let seen = self.seen.borrow().clone();
        let why = seen.problem.or(seen.down).filter(|_| seen.released.is_none());
        let Some(why) = why else {
            *trouble = Trouble::default();
            return;
        };
        let since = *trouble.since.get_or_insert_with(Instant::now);
        if !trouble.reported && since.elapsed() >= self.timing.driver_away {
            trouble.reported = true;
            let notifier = self.notifier.clone();
            self.reports.spawn(async move { notifier.warn_node("nvidia-driver-down", &why).await });
        }
    }
}

/// Codes that say that the driver is not there, or that its parts do not fit: no passing trouble of one call.
fn is_away(code: GpuErrorCode) -> bool {
    [
        GpuErrorCode::LIBRARY_NOT_FOUND,
        GpuErrorCode::DRIVER_NOT_LOADED,
        GpuErrorCode::LIB_RM_VERSION_MISMATCH,
        GpuErrorCode::UNINITIALIZED,
    ]
    .contains(&code)
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
        tracing::warn!(pci = %address, error = %crate::chain(&error), "failed to read the GPU's topology");
        HostTopology::default()
    })
}
