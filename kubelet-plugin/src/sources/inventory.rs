//! The task that owns the inventory: lists the GPUs often (cheap), reads all facts when the list
//! has changed, on request and at intervals, and waits for a driver that is not installed yet.
//!
//! Other tasks read the latest [`Seen`]; a failed read keeps the last inventory, so that one bad
//! minute of NVML withdraws nothing. While the driver is absent, or lacks files that containers
//! need, the inventory is marked as down. While a release is requested and no claim holds a device,
//! the driver is released (see `drain`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_host::{HostRoot, NvidiaModule, nvidia_module};
use divvy_model::{
    GpuDriver, GpuError, GpuErrorCode, GpuOp, GpuUuid, HostTopology, Inventory, MpsAbility,
    PciAddress,
};
use divvy_offer::Finding;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::app::config::Timing;
use crate::caps::ability;
use crate::host::edits::HostEdits;
use crate::host::mps::SupervisedMps;
use crate::node::facts::{Facts, GpusSeen, NodeFacts, Report};
use crate::sinks::notifier::Notifier;
use crate::upkeep::drain;

/// Reads the GPUs.
pub(crate) struct InventoryOwner {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) host: HostRoot,
    pub(crate) timing: Timing,
    pub(crate) seen: watch::Sender<GpusSeen>,
    pub(crate) facts: Facts,
    /// Asks for a full read now.
    pub(crate) refresh: Arc<Notify>,
    /// The files that containers get of the driver.
    pub(crate) edits: Arc<HostEdits>,
    /// Root of the node's control groups.
    pub(crate) cgroups: PathBuf,
    /// False if an administrator has switched caps of memory off.
    pub(crate) memory_caps: bool,
    /// The supervisor of MPS daemons, if there is one.
    pub(crate) mps: Option<Arc<SupervisedMps>>,
    /// The node's object: a drain shows there.
    pub(crate) node: watch::Receiver<Option<Arc<NodeFacts>>>,
    /// The file that asks for the driver to be let go.
    pub(crate) release_file: PathBuf,
    /// Returns whether a claim holds a device, or one is being worked on; may block.
    pub(crate) in_use: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Reports a driver that stays away, in the background.
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) reports: TaskTracker,
}

/// The result of one poll.
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
            // Released or read, never both: a read would open the driver that is to be unloaded.
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
            // Reports and facts after the new state is in `seen`: its other followers have it by
            // then.
            self.report(&mut trouble);
            if sent.has_changed().unwrap_or_default()
                && self
                    .facts
                    .send(Report::Gpus(sent.borrow_and_update().clone()).into())
                    .is_err()
            {
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.refresh.notified() => full_at = Instant::now(),
                // A cordon may ask for the driver to be released; when it ends, the driver may be
                // read again.
                Ok(()) = self.node.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Returns the request to release the driver, if it may be: its GPUs were read once, and no
    /// claim needs it.
    async fn may_let_go(&mut self) -> Option<String> {
        let node = self.node.borrow_and_update().clone();
        let file = self
            .release_file
            .exists()
            .then_some(self.release_file.as_path());
        let asked = drain::asked(node.as_deref(), file)?;
        // GPUs that were never read have no numbers, and are not released. The cheap conditions
        // come first: use is found out from files, and from the calls in flight.
        self.seen.borrow().inventory.as_ref()?;
        let in_use = self.in_use.clone();
        let used = tokio::task::spawn_blocking(move || in_use())
            .await
            .unwrap_or(true);
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
        // Shown only once the session is closed: an administrator who waits for it unloads the
        // module next.
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
        let (cgroups, wanted) = (self.cgroups.clone(), self.memory_caps);
        let supervisor = self.mps.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let before = known.as_deref();
            // A driver that was exchanged between two looks answers as before, so the version of
            // its module is compared. The module before the list: a driver that is exchanged in
            // between is noticed at the next look.
            let module = nvidia_module(&host).ok().flatten();
            let usable = || edits.check().err().map(|error| crate::chain(&error));
            // The list is cheap and usually the same. A full read is due at intervals, after a
            // change, and when the module is another.
            if !full
                && module == last_module
                && let Some(before) = before
            {
                let mut listed = gpus.list()?;
                listed.sort();
                if listed == all_of(before) {
                    return Ok(Poll {
                        changed: None,
                        down: usable(),
                        module,
                    });
                }
            }
            let began = std::time::Instant::now();
            let topology = |address: PciAddress| topology(&host, address);
            let mut found = divvy_nvml::read_inventory_after(&*gpus, &topology, before)?;
            // NVML knows what the driver can; the rest of the way of a cap is the node's.
            found.system.memory_caps = ability::of_node(
                found.system.memory_caps,
                &cgroups,
                wanted,
                edits.calls_hook(),
            );
            found.system.caps_linger = ability::caps_linger(found.system.memory_caps, &cgroups);
            let driver = &found.system.driver_version;
            let for_all = supervisor.as_ref().and_then(|mps| mps.serves_all_users());
            // A supervisor that is away has not changed its mind.
            let for_all = for_all.or_else(|| {
                let same = before.filter(|known| known.system.driver_version == *driver);
                same?.system.mps.for_all_users()
            });
            let has_programs = edits.has_mps_programs();
            found.system.mps =
                MpsAbility::of_node(driver, supervisor.is_some(), has_programs, for_all);
            let changed = (before != Some(&found)).then(|| (began, Arc::new(found)));
            Ok(Poll {
                changed,
                down: usable(),
                module,
            })
        });
        match looked.await {
            Ok(result) => result,
            // Only a panic of the driver's code ends here; the next look tries again.
            Err(died) => {
                Err(GpuError::global(GpuOp::List, GpuErrorCode::UNKNOWN)
                    .with_detail(died.to_string()))
            }
        }
    }

    fn good(&self, look: Poll) {
        let Poll { changed, down, .. } = look;
        // Say what has changed before the old state is replaced.
        let before = self.seen.borrow().clone();
        if before.problem.is_some() || before.released.is_some() {
            tracing::info!("the NVIDIA driver answers again");
        }
        if let Some(why) = down.as_ref().filter(|_| before.down != down) {
            tracing::error!(
                why,
                "GPUs answer, but cannot be given to containers, will retry"
            );
        }
        if let Some((_, inventory)) = &changed {
            tracing::info!(
                gpus = inventory.gpus.len(),
                unreadable = inventory.problems.len(),
                driver_version = %inventory.system.driver_version,
                memory_caps = inventory.system.memory_caps.lack().unwrap_or("available"),
                mps = inventory.system.mps.lack().unwrap_or("available"),
                "read the node's GPUs"
            );
        }
        let is_new = changed.is_some();
        let now = GpusSeen {
            read_at: changed
                .as_ref()
                .map_or(before.read_at, |(began, _)| Some(*began)),
            inventory: changed
                .map(|(_, found)| found)
                .or_else(|| before.inventory.clone()),
            problem: None,
            down,
            released: None,
        };
        let same = !is_new
            && before.problem.is_none()
            && before.released.is_none()
            && before.down == now.down;
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
        // The inventory stays as it was. `down` is set only where the driver is away as a whole,
        // since no claim can be prepared then.
        let down = is_away(error.code).then(|| problem.clone());
        self.seen.send_modify(|seen| {
            seen.released = None;
            seen.problem = Some(problem);
            seen.down = down.or_else(|| seen.down.take());
        });
    }

    /// A driver that stays away is reported by an Event on the node, once until it is back, unless
    /// its release was requested.
    fn report(&self, trouble: &mut Trouble) {
        let seen = self.seen.borrow().clone();
        let why = seen
            .problem
            .or(seen.down)
            .filter(|_| seen.released.is_none());
        let Some(why) = why else {
            *trouble = Trouble::default();
            return;
        };
        // After a boot the driver may take a while: only an absence that lasts is worth an Event.
        let since = *trouble.since.get_or_insert_with(Instant::now);
        if !trouble.reported && since.elapsed() >= self.timing.driver_away {
            trouble.reported = true;
            let notifier = self.notifier.clone();
            let down = Finding::DriverDown { why };
            self.reports.spawn(async move {
                notifier.warn_node(&down.reason(), &down.to_string()).await;
            });
        }
    }
}

/// Codes that say that the driver is not there, or that its parts do not fit: no passing trouble of
/// one call.
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

/// Reads the topology from sysfs; unknown values are left out.
fn topology(host: &HostRoot, address: PciAddress) -> HostTopology {
    divvy_host::topology(host, address).unwrap_or_else(|error| {
        tracing::warn!(pci = %address, error = %crate::chain(&error), "failed to read the GPU's topology");
        HostTopology::default()
    })
}
