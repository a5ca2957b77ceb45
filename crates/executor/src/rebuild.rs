//! Records that cannot be read, or are not there although their claim was prepared: made again from what the API and the
//! GPUs' files say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{
    AllocatedDevice, Allocation, Claim, Leaving, Observed, Outcome, Phase, Progress, Record, RecordedDevice,
    Retry, Step, StepState, Stored, rebuild,
};
use divvy_model::mig::{Partition, PartitionName};
use divvy_model::{ClaimUid, DeviceKind, DeviceName, GpuUuid, HoldKind, Ordinals};

use crate::prepare::gpus_of;
use crate::unprepare::{BRIEFLY, nothing_is_known_to_run};
use crate::{Event, Executor, StoreError, UnprepareCause, chain};

impl Executor {
    /// Replaces a record that cannot be read, or was lost, by what the API and the GPUs' files say; without `claim` the API
    /// knows no such claim. `None` means that nothing was to be done, or that another call is at work on the claim.
    pub(crate) fn rebuild(&self, uid: &ClaimUid, claim: Option<&Claim>) -> Option<Event> {
        let until = self.parts.clock.now() + BRIEFLY;
        let _claim_lock = match self.lock_claim(uid, until) {
            Ok(lock) => lock,
            Err(error) => return Event::of(uid, Err(error.into())),
        };
        self.rebuild_locked(uid, claim, until)
    }

    /// The same under the claim's lock.
    pub(crate) fn rebuild_locked(
        &self,
        uid: &ClaimUid,
        claim: Option<&Claim>,
        until: Duration,
    ) -> Option<Event> {
        let claim = claim.filter(|claim| !claim.allocation.results.is_empty());
        self.remake(uid, claim, until).unwrap_or_else(|error| Some(Event::failed(Some(uid), &error)))
    }

    fn remake(
        &self,
        uid: &ClaimUid,
        claim: Option<&Claim>,
        until: Duration,
    ) -> Result<Option<Event>, UnprepareCause> {
        let unreadable = match self.state.record(uid)? {
            Stored::Corrupt { reason } => Some(reason),
            Stored::Absent => None,
            Stored::Newer { .. } | Stored::Fine(_) => return Ok(None),
        };
        let ordinals = self.state.ordinals()?;
        // What is noted of a claim changes only under its lock.
        let noted = self.instances_of(uid)?;
        if unreadable.is_none() && noted.is_empty() && !(claim.is_some() && self.was_lost(uid)?) {
            return Ok(None);
        }
        let on: BTreeSet<_> = noted.iter().map(|state| state.step.gpu().clone()).collect();
        let mut gpus = on.clone();
        gpus.extend(claim.map(|claim| gpus_of(claim, &ordinals)).unwrap_or_default());
        let gpu_locks = self.lock_gpus(&gpus, until)?;
        let owned: Vec<_> = noted.into_iter().filter_map(|state| self.still_there(state)).collect();
        // A note alone says no more than that an instance was about to be made.
        let was_prepared = unreadable.is_some() || !owned.is_empty() || self.was_lost(uid)?;
        let rebuilt = match claim.filter(|_| was_prepared) {
            Some(claim) => match rebuild(claim, &self.look(claim, &ordinals, &gpus)?, &owned) {
                Ok(record) => record.map(|record| (record, claim)),
                // It cannot be said yet.
                Err(refusal) if refusal.retry() != Retry::Never => {
                    return Ok(Some(Event::failed(Some(uid), &refusal)));
                }
                Err(_) => None,
            },
            None => None,
        };
        if unreadable.is_some()
            && let Err(error) = self.state.copy_record_aside(uid, self.parts.clock.now())
        {
            // Letting go must work on a full disk too.
            tracing::warn!(claim.uid = %uid, error = chain(&error), "failed to keep a copy of an unreadable record");
        }
        if let Some((mut record, claim)) = rebuilt {
            record.metadata = self.metadata_of(claim, &record.devices);
            self.state.write_record(&record)?;
            self.refresh_cdi(&record)?;
            return Ok(Some(Event::Rebuilt { claim: uid.clone() }));
        }
        let whole = match &unreadable {
            Some(_) => self.unaccounted_processes(uid)?,
            None => BTreeMap::new(),
        };
        if owned.is_empty() && whole.is_empty() {
            self.remove_cdi(uid)?;
            self.forget_on(&on, uid)?;
            self.state.remove_record(uid)?;
            let reason = unreadable.unwrap_or_default();
            return Ok(Some(Event::SetAside { claim: uid.clone(), reason }));
        }
        drop(gpu_locks);
        gpus.extend(whole.keys().cloned());
        let _gpu_locks = self.lock_gpus(&gpus, until)?;
        let (record, why) = self.stand_in(uid, claim, owned, &whole, &ordinals);
        self.remove_cdi(uid)?;
        self.state.write_record(&record)?;
        Ok(Some(Event::Kept { claim: uid.clone(), why }))
    }

    /// What is left of an instance that a GPU's file names; `None` if nothing is. What cannot be read counts as there.
    fn still_there(&self, noted: StepState) -> Option<StepState> {
        let (steps, Step::CreatePartition(wanted)) = (&self.parts.steps, &noted.step) else { return None };
        let progress = match noted.progress {
            Progress::Undone => return None,
            Progress::Intended { ref before } | Progress::Begun { ref before, .. } => {
                match steps.probe(wanted, before) {
                    Observed::Absent => return None,
                    Observed::Ours(outcome) => Progress::Done { outcome },
                    Observed::InFlight | Observed::Uncertain(_) => noted.progress,
                }
            }
            Progress::Done { outcome } => match steps.living(wanted) {
                Ok(None) => return None,
                // Another one has its place.
                Ok(Some(Outcome::Partition { uuid, .. })) if matches!(&outcome, Outcome::Partition { uuid: ours, .. } if *ours != uuid) =>
                {
                    return None;
                }
                // Half of it is removed as a whole.
                Ok(Some(_)) | Err(_) => Progress::Done { outcome },
            },
        };
        Some(StepState { step: noted.step, progress })
    }

    /// Whether a claim without a record was not simply unprepared: its CDI file is there and no unprepare left a trace.
    fn was_lost(&self, uid: &ClaimUid) -> Result<bool, UnprepareCause> {
        Ok(!self.unprepared_in_this_boot(uid)? && self.has_cdi(uid)?)
    }

    pub(crate) fn unprepared_in_this_boot(&self, uid: &ClaimUid) -> Result<bool, StoreError> {
        let tombstone = self.state.tombstone(uid)?;
        Ok(tombstone.is_some_and(|tombstone| tombstone.boot == self.config.boot))
    }

    /// Processes on GPUs that an unreadable record may be about, by GPU: those of all GPUs that no other record holds.
    fn unaccounted_processes(&self, uid: &ClaimUid) -> Result<BTreeMap<GpuUuid, String>, StoreError> {
        let (records, ordinals) = (self.state.records()?, self.state.ordinals()?);
        let mut known: BTreeSet<_> = Self::others(&records, uid)
            .flat_map(Record::holds)
            .filter(|hold| hold.kind.needs().is_some())
            .map(|hold| hold.gpu)
            .collect();
        // Those have partitions, and processes in partitions.
        known.extend(self.instances_of(uid)?.into_iter().map(|state| state.step.gpu().clone()));
        let mut unaccounted = BTreeMap::new();
        for (gpu, _) in ordinals.iter().filter(|(gpu, _)| !known.contains(*gpu)) {
            let admins = Self::pods_on(&records, uid, gpu);
            let why = match self.parts.processes.on_gpu(gpu) {
                Ok(found) => {
                    let theirs = |pod: Option<&str>| pod.is_some_and(|pod| admins.contains(pod));
                    let stranger = found.iter().find(|process| !theirs(process.pod.as_deref()));
                    stranger.map(|process| format!("process {} still uses {gpu}", process.pid))
                }
                Err(error) if nothing_is_known_to_run(&error) => None,
                Err(error) => Some(format!("the processes on {gpu} cannot be listed: {error}")),
            };
            unaccounted.extend(why.map(|why| (gpu.clone(), why)));
        }
        Ok(unaccounted)
    }

    /// A record in the place of one that cannot be read or was lost, while something is left of what its claim was given:
    /// it holds the instances that were made for the claim, and GPUs with processes that no record accounts for, until
    /// these are gone. No other GPU is kept from other claims.
    fn stand_in(
        &self,
        uid: &ClaimUid,
        claim: Option<&Claim>,
        owned: Vec<StepState>,
        whole: &BTreeMap<GpuUuid, String>,
        ordinals: &Ordinals,
    ) -> (Record, String) {
        let made = owned.iter().filter_map(|state| device_of(&state.step, ordinals));
        let whole_gpu = |gpu: &GpuUuid| {
            let name = DeviceKind::Whole { ordinal: ordinals.of(gpu)? }.device_name();
            Some(device(name, gpu, HoldKind::Whole))
        };
        let devices = made.chain(whole.keys().filter_map(whole_gpu)).collect();
        let reasons: Vec<_> = whole.values().map(String::as_str).collect();
        let reason = match (claim, &reasons[..]) {
            (_, []) => "its record was lost, and its partition is being removed".to_owned(),
            (Some(_), _) => format!("its record could not be read, and {}", reasons.join("; ")),
            (None, _) => {
                format!("its record could not be read and its claim is gone, but {}", reasons.join("; "))
            }
        };
        let unknown = || "unknown".to_owned();
        let stood_for = Claim {
            uid: uid.clone(),
            namespace: claim.map_or_else(unknown, |claim| claim.namespace.clone()),
            name: claim.map_or_else(unknown, |claim| claim.name.clone()),
            pod_claim_name: None,
            allocation: Allocation::default(),
            configs: Vec::new(),
            pods: Vec::new(),
        };
        let phase = Phase::Leaving(Leaving { reason: reason.clone(), undoing: false });
        (Record { steps: owned, ..Record::new(&stood_for, &self.config.boot, devices, phase) }, reason)
    }
}

/// The device that an instance was made for.
fn device_of(step: &Step, ordinals: &Ordinals) -> Option<RecordedDevice> {
    let Step::CreatePartition(Partition { gpu, profile, placement }) = step else { return None };
    let name = PartitionName::new(ordinals.of(gpu)?, "unknown", *profile, placement.start).device_name();
    Some(device(name, gpu, HoldKind::Partition { profile: *profile, placement: *placement }))
}

fn device(name: DeviceName, gpu: &GpuUuid, kind: HoldKind) -> RecordedDevice {
    let allocated = AllocatedDevice {
        request: String::new(),
        pool: String::new(),
        device: name,
        share_id: None,
        admin_access: false,
        consumed_capacity: BTreeMap::new(),
    };
    RecordedDevice {
        allocated,
        gpu: gpu.clone(),
        kind,
        time_slice: None,
        extra_nodes: Vec::new(),
        is_static: false,
    }
}
