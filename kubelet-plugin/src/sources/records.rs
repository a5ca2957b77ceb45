//! Reads what the records, the GPU states and the numbers on disk say, whenever they may have
//! changed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::Phase;
use divvy_executor::{Executor, HeldDevice};
use divvy_model::mig::{GpuInstance, Placement};
use divvy_model::{ClaimUid, GpuUuid, Inventory, Place, Target};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::app::config::Timing;
use crate::node::facts::{Facts, GpusSeen, Recorded, Report};

/// Changes of records come in bursts; one look after each is enough.
const SETTLE: Duration = Duration::from_millis(50);
/// Time for which an answer about instances made outside divvy counts: the GPUs are locked while
/// they are read.
const FOREIGN_LASTS: Duration = Duration::from_secs(1);

/// Reads records.
pub(crate) struct RecordsSource {
    pub(crate) executor: Arc<Executor>,
    /// Claims that are being worked on: what their records say is about to change.
    pub(crate) busy: Arc<dyn Fn() -> BTreeSet<ClaimUid> + Send + Sync>,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// GPUs whose number no allocation refers to.
    pub(crate) forget: watch::Receiver<BTreeSet<GpuUuid>>,
    /// Records have changed.
    pub(crate) changed: Arc<Notify>,
    /// Devices that claims hold, after each reading.
    pub(crate) held: watch::Sender<Option<Arc<Vec<HeldDevice>>>>,
    pub(crate) facts: Facts,
    pub(crate) timing: Timing,
}

/// Instances without a record; as of when.
type Foreign = Option<(Instant, Vec<(GpuUuid, Placement)>)>;

/// A reading of the records.
struct Reading {
    recorded: Recorded,
    foreign: Foreign,
    /// True if it may be different in a moment without a notification: instances of others were
    /// read a moment ago, or a claim is being let go, which the other instance of an update may be
    /// doing.
    look_soon: bool,
}

impl RecordsSource {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut foreign: Foreign = None;
        let mut problem: Option<String> = None;
        loop {
            // Marked as seen before the read: a change that comes meanwhile leads to another round.
            let inventory = self.seen.borrow_and_update().inventory.clone();
            let forget = self.forget.borrow_and_update().clone();
            let (executor, busy, last) = (self.executor.clone(), self.busy.clone(), foreign.take());
            let read = tokio::task::spawn_blocking(move || {
                read(&executor, &*busy, inventory.as_deref(), &forget, last)
            });
            let again = match read.await.unwrap_or_else(|died| Err(died.to_string())) {
                Ok(reading) => {
                    problem = None;
                    foreign = reading.foreign;
                    let held = Arc::new(reading.recorded.held.clone());
                    self.held.send_replace(Some(held));
                    if self
                        .facts
                        .send(Report::Records(reading.recorded).into())
                        .is_err()
                    {
                        return;
                    }
                    if reading.look_soon {
                        FOREIGN_LASTS
                    } else {
                        self.timing.withdrawn
                    }
                }
                Err(error) => {
                    if problem.as_ref() != Some(&error) {
                        tracing::error!(
                            error,
                            "failed to read the records; the pool stays unchanged, will retry"
                        );
                        problem = Some(error);
                    }
                    self.timing.driver_retry
                }
            };
            tokio::select! {
                Ok(()) = self.seen.changed() => {}
                Ok(()) = self.forget.changed() => {}
                () = self.changed.notified() => sleep(SETTLE).await,
                // The other instance of a rolling update does not notify this one.
                () = sleep(again) => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// Numbers new GPUs, forgets those that may be, and reads everything.
fn read(
    executor: &Executor,
    busy: &(dyn Fn() -> BTreeSet<ClaimUid> + Send + Sync),
    inventory: Option<&Inventory>,
    forget: &BTreeSet<GpuUuid>,
    last: Foreign,
) -> Result<Reading, String> {
    // Numbers first: a GPU without one is not offered, and names of devices are made of them.
    let ordinals = match inventory {
        Some(inventory) => {
            let present = inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address));
            let present: Vec<_> = present.collect();
            let numbered = executor.number_gpus(&present, &|gpu, _| !forget.contains(gpu));
            numbered.map_err(|error| crate::chain(&error))?
        }
        None => executor.ordinals().map_err(|error| crate::chain(&error))?,
    };
    let (held, working) = while_working(busy, || executor.held());
    let held = held.map_err(|error| crate::chain(&error))?;
    let is_leaving = |record: &&HeldDevice| matches!(record.phase, Phase::Leaving(_));
    let leaving = held
        .iter()
        .filter(is_leaving)
        .map(|record| record.claim.uid.clone());
    let leaving: BTreeSet<ClaimUid> = leaving.collect();
    // Instances are compared with the records just read, so that one of a claim that is new is not
    // taken for another owner's.
    let (found, foreign, stale) = foreign(executor, inventory, &held, last);
    let recorded = Recorded {
        ordinals,
        lingering: leaving.difference(&working).cloned().collect(),
        fences: executor.fences().map_err(|error| crate::chain(&error))?,
        newer: executor
            .fenced_by_newer()
            .map_err(|error| crate::chain(&error))?,
        foreign: found,
        mig_found: executor.mig_found().map_err(|error| crate::chain(&error))?,
        share_units: executor
            .share_units()
            .map_err(|error| crate::chain(&error))?,
        mps_servers: executor
            .mps_servers()
            .map_err(|error| crate::chain(&error))?,
        held,
    };
    Ok(Reading {
        recorded,
        foreign,
        look_soon: stale || !leaving.is_empty(),
    })
}

/// Reads the records between two looks at running work. Work that ends or begins meanwhile counts
/// as running: the records may be read as they were before its end, or as they are after its begin.
fn while_working<T>(
    busy: &dyn Fn() -> BTreeSet<ClaimUid>,
    records: impl FnOnce() -> T,
) -> (T, BTreeSet<ClaimUid>) {
    let mut working = busy();
    let read = records();
    working.append(&mut busy());
    (read, working)
}

/// Instances that no record accounts for, and whether that is an answer of a moment ago. The
/// executor is asked, under the GPUs' locks, only when an instance was there when the GPUs were
/// last read and has no record now: it was made outside divvy, or was ours and is gone.
fn foreign(
    executor: &Executor,
    inventory: Option<&Inventory>,
    records: &[HeldDevice],
    last: Foreign,
) -> (Vec<(GpuUuid, Placement)>, Foreign, bool) {
    let gpus = inventory.into_iter().flat_map(|inventory| &inventory.gpus);
    let mut cut = gpus.filter_map(|(uuid, gpu)| Some((uuid, gpu.mig.as_ref()?)));
    let has_record = |gpu: &GpuUuid, instance: &GpuInstance| {
        let target = Target::Partition(Place {
            profile: instance.profile,
            placement: instance.placement,
        });
        records
            .iter()
            .any(|record| record.hold.gpu == *gpu && record.hold.target == target)
    };
    // Instances that were not listed may be others'.
    let is_ours = |(gpu, mig): (&GpuUuid, &divvy_model::GpuMig)| {
        let listed = mig.instances.as_ref();
        listed.is_some_and(|all| all.iter().all(|instance| has_record(gpu, instance)))
    };
    // The cheap answer first: the executor would take the locks of all GPUs.
    if cut.all(is_ours) {
        return (Vec::new(), None, false);
    }
    if let Some((at, found)) = last
        && at.elapsed() < FOREIGN_LASTS
    {
        return (found.clone(), Some((at, found)), true);
    }
    let all = executor.foreign().into_iter();
    let found: Vec<_> = all
        .flat_map(|(gpu, all)| all.into_iter().map(move |one| (gpu.clone(), one.placement)))
        .collect();
    (found.clone(), Some((Instant::now(), found)), false)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn work_that_ends_or_begins_while_records_are_read_counts_as_running() {
        let claims = |names: &[&str]| -> BTreeSet<ClaimUid> {
            names.iter().map(|name| name.parse().unwrap()).collect()
        };
        let running = RefCell::new(claims(&["ends", "lasts"]));
        let (read, working) = while_working(&|| running.borrow().clone(), || {
            running.replace(claims(&["begins", "lasts"]));
            "records"
        });
        assert_eq!(read, "records");
        assert_eq!(working, claims(&["begins", "ends", "lasts"]));
    }
}
