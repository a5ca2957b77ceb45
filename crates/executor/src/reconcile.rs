//! Reconcile: records, API claims, CDI files and the kubelet's view of running pods are squared with each other, at
//! start and periodically, by the one plugin instance that is in charge.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use divvy_claims::{
    Claim, Leaving, Phase, Record, RecordedDevice, Snapshot, StepError, Stored, claim_of_cdi_file,
    resolve_devices,
};
use divvy_model::{ClaimUid, DeviceKind, DeviceName, GpuUuid, Ordinals};

use crate::prepare::gpus_of;
use crate::release::{Release, gpus_of_record, nothing_is_known_to_run};
use crate::state::{Records, Traced};
use crate::{Event, Executor, LockError, Refresh, Report, StoreError, chain};

/// A device that a running container has, as the kubelet's PodResources tells.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningDevice {
    /// Namespace of pod and claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    /// The device.
    pub device: DeviceName,
}

/// What others know. `None` means "could not be asked", never "nothing".
#[derive(Debug, Clone, Default)]
pub struct ClusterView {
    /// Claims that have devices of ours on this node allocated.
    pub claims: Option<BTreeMap<ClaimUid, Claim>>,
    /// Devices of running pods.
    pub running: Option<BTreeSet<RunningDevice>>,
    /// Since when (time since boot) a kubelet has been connected.
    pub kubelet_connected_since: Option<Duration>,
}

/// Since when claims have looked orphaned, in one reconcile after the other.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// Counts reconciles.
    pass: u64,
    /// Since when, and in which reconcile it was last so.
    since: BTreeMap<ClaimUid, (Duration, u64)>,
}

const BRIEFLY: Duration = Duration::from_millis(100);

/// So many files that could not be read are kept for people.
const CORRUPT_KEPT: usize = 20;

impl Executor {
    /// Squares everything once. Never takes long: a claim that somebody is at work on is left for the next time.
    pub fn reconcile(&self, view: &ClusterView) -> Report {
        let mut report = self.restore_cdi(Refresh::Missing);
        let records = match self.state.records() {
            Ok(records) => records,
            Err(error) => {
                report.push(Event::Failed { claim: None, error: chain(&error) });
                return report;
            }
        };
        if let Some(claims) = &view.claims {
            for (uid, stored) in &records {
                match stored.as_ref() {
                    Stored::Corrupt { .. } => {
                        let rebuilt = match claims.get(uid) {
                            Some(claim) => self.rebuild(uid, Some(claim)),
                            None => self.check_unreadable_orphan(uid, &records, view),
                        };
                        report.events.extend(rebuilt);
                    }
                    Stored::Fine(record) if record.phase == Phase::Prepared => {
                        report.events.extend(self.check_orphan(record, claims, view));
                    }
                    Stored::Fine(_) | Stored::Newer { .. } | Stored::Absent => {}
                }
            }
            report.events.extend(self.check_cdi_files(claims, view));
            let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
            let pass = orphans.pass;
            orphans.since.retain(|_, (_, last)| *last == pass);
            orphans.pass += 1;
        }
        self.check_fences(&mut report);
        self.retry_modes(&records);
        report.foreign = self.foreign();
        let old = self.parts.clock.now().saturating_sub(self.config.timing.tombstones);
        let pruned = self.state.prune_traces(&self.config.boot, old);
        if let Err(error) = pruned.and_then(|()| self.state.prune_corrupt(CORRUPT_KEPT)) {
            report.push(Event::Failed { claim: None, error: chain(&error) });
        }
        report
    }

    /// An orphan is undone only if its claim no longer has this allocation, no running pod lists it, it has been so
    /// for a grace period with a connected kubelet, and no process is on it.
    fn check_orphan(
        &self,
        record: &Record,
        claims: &BTreeMap<ClaimUid, Claim>,
        view: &ClusterView,
    ) -> Option<Event> {
        let uid = &record.uid;
        // Allocated anew with some of the same devices: what is on record still has to go, and waits for its prepare.
        if claims.get(uid).is_some_and(|claim| record.is_of(&claim.allocation)) {
            return None;
        }
        let kept = |why: &str| Some(Event::Kept { claim: uid.clone(), why: why.to_owned() });
        let failed = |error: String| Some(Event::Failed { claim: Some(uid.clone()), error });
        if !self.grace_is_over(uid, view) {
            return kept("its claim is gone; an unprepare is waited for");
        }
        let runs = |running: &BTreeSet<RunningDevice>| {
            running.iter().any(|r| r.namespace == record.namespace && r.claim == record.name)
        };
        match &view.running {
            None => {
                return kept("its claim is gone, but the kubelet could not tell whether a pod still runs");
            }
            Some(running) if runs(running) => {
                return kept("its claim is gone, but a running pod still has its devices");
            }
            Some(_) => {}
        }
        let until = self.parts.clock.now() + BRIEFLY;
        let _claim_lock = self.lock_claim(uid, until).ok()?;
        // Prepared anew since the view was taken?
        if !self.state.record(uid).is_ok_and(|now| now.fine() == Some(record)) {
            return None;
        }
        let _gpu_locks = self.lock_gpus(&gpus_of_record(record), until).ok()?;
        match self.release(record) {
            Ok(Release::Released) => Some(Event::OrphanUndone { claim: uid.clone() }),
            Ok(Release::Blocked(why)) => kept(&format!("its claim is gone, but {why}")),
            Err(left) => failed(left.to_string()),
        }
    }

    /// An unreadable record of a claim that is gone is an orphan like any other, except that nobody knows its names.
    fn check_unreadable_orphan(
        &self,
        uid: &ClaimUid,
        records: &Records,
        view: &ClusterView,
    ) -> Option<Event> {
        let kept = |why: &str| Some(Event::Kept { claim: uid.clone(), why: why.to_owned() });
        // Unprepared, but nobody could say then what it was: only its processes are waited for.
        if self.unprepared_in_this_boot(uid).unwrap_or(false) {
            return self.rebuild(uid, None);
        }
        if !self.grace_is_over(uid, view) {
            return kept("its record cannot be read and its claim is gone; an unprepare is waited for");
        }
        let Some(running) = &view.running else {
            return kept(
                "its record cannot be read, and the kubelet could not tell whether a pod still has its devices",
            );
        };
        let known: BTreeSet<_> = Self::others(records, uid).map(|r| (&r.namespace, &r.name)).collect();
        if let Some(unknown) = running.iter().find(|r| !known.contains(&(&r.namespace, &r.claim))) {
            return kept(&format!(
                "its record cannot be read, and a running pod has {} of claim {}/{}, which has no record",
                unknown.device, unknown.namespace, unknown.claim
            ));
        }
        self.rebuild(uid, None)
    }

    /// Processes on GPUs that an unreadable record may be about, by GPU: those its CDI file names; without that, all that
    /// no other record holds.
    fn unaccounted_processes(&self, uid: &ClaimUid) -> Result<BTreeMap<GpuUuid, String>, StoreError> {
        let (records, ordinals) = (self.state.records()?, self.state.ordinals()?);
        let named = self.gpus_of_cdi_file(uid, &ordinals);
        let held: BTreeSet<_> = Self::others(&records, uid)
            .flat_map(Record::holds)
            .filter(|hold| hold.kind.needs().is_some())
            .map(|hold| hold.gpu)
            .collect();
        let pods: BTreeSet<_> =
            Self::others(&records, uid).flat_map(|r| &r.pods).map(|pod| pod.uid.as_str()).collect();
        let all = || ordinals.iter().map(|(gpu, _)| gpu.clone()).collect();
        let mut unaccounted = BTreeMap::new();
        for gpu in named.unwrap_or_else(all).into_iter().filter(|gpu| !held.contains(gpu)) {
            let why = match self.parts.processes.on_gpu(&gpu) {
                Ok(found) => {
                    let theirs = |pod: Option<&str>| pod.is_some_and(|pod| pods.contains(pod));
                    let stranger = found.iter().find(|process| !theirs(process.pod.as_deref()));
                    stranger.map(|process| format!("process {} still uses {gpu}", process.pid))
                }
                Err(error) if nothing_is_known_to_run(&error) => None,
                Err(error) => Some(format!("the processes on {gpu} cannot be told: {error}")),
            };
            unaccounted.extend(why.map(|why| (gpu, why)));
        }
        Ok(unaccounted)
    }

    /// Puts a record in the place of one that cannot be read, of a claim that is gone while processes may still use what
    /// it was given: it holds the GPUs with such processes until they are gone, and no others.
    fn stand_in(&self, uid: &ClaimUid, in_the_way: BTreeMap<GpuUuid, String>) -> Result<String, String> {
        let ordinals = self.state.ordinals().map_err(|e| chain(&e))?;
        let reasons: Vec<_> = in_the_way.values().cloned().collect();
        let reason =
            format!("its record could not be read and its claim is gone, but {}", reasons.join("; "));
        let device = |gpu: GpuUuid| {
            let device = DeviceKind::Whole { ordinal: ordinals.of(&gpu)? }.name().ok()?;
            let allocated = AllocatedDevice {
                request: String::new(),
                pool: String::new(),
                device,
                share_id: None,
                admin_access: false,
                consumed_capacity: BTreeMap::new(),
            };
            Some(RecordedDevice { allocated, gpu, kind: HoldKind::Whole })
        };
        let devices = in_the_way.into_keys().filter_map(device).collect();
        let unknown = || "unknown".to_owned();
        let claim = Claim {
            uid: uid.clone(),
            namespace: unknown(),
            name: unknown(),
            allocation: Allocation::default(),
            configs: Vec::new(),
            pods: Vec::new(),
        };
        let phase = Phase::Leaving(Leaving { reason: reason.clone(), undoing: false });
        let record = Record::new(&claim, &self.config.boot, devices, phase);
        self.state.write_record(&record).map_err(|e| chain(&e))?;
        Ok(reason)
    }

    fn gpus_of_cdi_file(&self, uid: &ClaimUid, ordinals: &Ordinals) -> Option<BTreeSet<GpuUuid>> {
        let bytes = self.parts.cdi.read(&self.cdi_name(uid)).ok()??;
        let spec = divvy_cdi::Spec::from_json_bytes(&bytes).ok()?;
        let gpu = |name: &str| {
            let device: DeviceName = name.strip_prefix(uid.as_str())?.strip_prefix('-')?.parse().ok()?;
            ordinals.gpu(DeviceKind::parse(&device).ok()?.ordinal()).cloned()
        };
        // One that cannot be told makes the file no help.
        spec.devices.iter().map(|device| gpu(&device.name)).collect()
    }

    fn grace_is_over(&self, uid: &ClaimUid, view: &ClusterView) -> bool {
        let now = self.parts.clock.now();
        let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
        let pass = orphans.pass;
        let entry = orphans.since.entry(uid.clone()).or_insert((now, pass));
        entry.1 = pass;
        let since = entry.0;
        view.kubelet_connected_since.is_some_and(|connected| {
            now.saturating_sub(since.max(connected)) >= self.config.timing.orphan_grace
        })
    }

    /// CDI files of ours without a record: of a claim that is still allocated here the record was lost and is made
    /// again; others are removed.
    fn check_cdi_files(&self, claims: &BTreeMap<ClaimUid, Claim>, view: &ClusterView) -> Vec<Event> {
        let files = match self.parts.cdi.list() {
            Ok(files) => files,
            Err(error) => {
                let error = format!("the CDI folder {} cannot be read: {error}", self.parts.cdi.place());
                return vec![Event::Failed { claim: None, error }];
            }
        };
        let ours =
            files.into_iter().filter_map(|file| Some((claim_of_cdi_file(&self.config.driver, &file)?, file)));
        ours.filter_map(|(uid, file)| {
            if self.state.record(&uid).ok()? != Stored::Absent {
                return None;
            }
            if let Some(claim) = claims.get(&uid) {
                return self.rebuild(&uid, Some(claim));
            }
            if !self.grace_is_over(&uid, view) {
                return None;
            }
            let _claim_lock = self.lock_claim(&uid, self.parts.clock.now() + BRIEFLY).ok()?;
            if self.state.record(&uid).ok()? != Stored::Absent {
                return None;
            }
            let removed =
                self.remove_abandoned(&uid).and_then(|()| self.remove_cdi(&uid).map_err(|e| chain(&e)));
            match removed {
                Ok(()) => Some(Event::CdiRemoved { file }),
                Err(error) => Some(Event::Failed { claim: Some(uid), error }),
            }
        })
        .collect()
    }

    /// Replaces a record that cannot be read, or was lost, by what the API says; `None` means that the API knows no such
    /// claim. The unreadable bytes are kept for people.
    pub(crate) fn rebuild(&self, uid: &ClaimUid, claim: Option<&Claim>) -> Option<Event> {
        let failed = |error: String| Some(Event::Failed { claim: Some(uid.clone()), error });
        let until = self.parts.clock.now() + BRIEFLY;
        let _claim_lock = match self.lock_claim(uid, until) {
            Ok(lock) => lock,
            Err(LockError::TimedOut { .. }) => return None,
            Err(error) => return failed(chain(&error)),
        };
        let reason = match self.state.record(uid) {
            Ok(Stored::Corrupt { reason }) => Some(reason),
            // A file was seen without its record; it may have been unprepared since.
            Ok(Stored::Absent) if claim.is_some() => match self.was_lost(uid) {
                Ok(true) => None,
                Ok(false) => return None,
                Err(error) => return failed(error),
            },
            Ok(_) => return None,
            Err(error) => return failed(chain(&error)),
        };
        let set_aside = || match reason {
            Some(_) => self.state.copy_aside(uid, self.parts.clock.now()).map(drop),
            None => Ok(()),
        };
        let Some(claim) = claim.filter(|c| !c.allocation.results.is_empty()) else {
            let in_the_way = match self.unaccounted_processes(uid) {
                Ok(in_the_way) => in_the_way,
                Err(error) => return failed(chain(&error)),
            };
            // Letting go must work on a full disk too.
            if let Err(error) = set_aside() {
                tracing::warn!(claim.uid = %uid, error = chain(&error), "no copy kept of an unreadable record");
            }
            if !in_the_way.is_empty() {
                return match self.stand_in(uid, in_the_way) {
                    Ok(why) => Some(Event::Kept { claim: uid.clone(), why }),
                    Err(error) => failed(error),
                };
            }
            let gone = self.remove_abandoned(uid);
            let gone = gone.and_then(|()| self.remove_cdi(uid).map_err(|e| chain(&e)));
            let gone = gone.and_then(|()| self.state.remove_record(uid).map_err(|e| chain(&e)));
            return match gone {
                Ok(()) => Some(Event::SetAside { claim: uid.clone(), reason: reason.unwrap_or_default() }),
                Err(error) => failed(error),
            };
        };
        let ordinals = match self.state.ordinals() {
            Ok(ordinals) => ordinals,
            Err(error) => return failed(chain(&error)),
        };
        let inventory = self.parts.inventory.inventory();
        let (records, gpus) = (BTreeMap::new(), BTreeMap::new());
        let seen = Snapshot {
            driver: &self.config.driver,
            inventory: inventory.as_deref(),
            ordinals: &ordinals,
            records: &records,
            gpus: &gpus,
            boot: &self.config.boot,
            toggle_mig: self.config.toggle_mig,
        };
        let _gpu_locks = match self.lock_gpus(&gpus_of(claim, &ordinals), until) {
            Ok(locks) => locks,
            Err(LockError::TimedOut { .. }) => return None,
            Err(error) => return failed(chain(&error)),
        };
        let rebuilt = resolve_devices(claim, &seen)
            .map_err(|e| chain(&e))
            .map(|devices| Record::new(claim, &self.config.boot, devices, Phase::Prepared))
            .and_then(|record| self.with_adopted(record).map_err(|e| chain(&e)))
            .and_then(|record| set_aside().map(|()| record).map_err(|e| chain(&e)))
            .and_then(|record| self.state.write_record(&record).map(|()| record).map_err(|e| chain(&e)))
            .and_then(|record| match record.phase {
                Phase::Prepared => self.refresh_cdi(&record).map_err(|e| chain(&e)),
                _ => Ok(false),
            });
        match rebuilt {
            Ok(_) => Some(Event::Rebuilt { claim: uid.clone() }),
            Err(error) => failed(error),
        }
    }

    /// The partitions of a record that is made again. If one is gone, so is what the claim was given: the rest is taken
    /// back, and made anew if the claim is prepared again.
    fn with_adopted(&self, mut record: Record) -> Result<Record, StepError> {
        for step in record.devices.iter().filter_map(RecordedDevice::step).collect::<Vec<_>>() {
            if let Some(adopted) = self.adopt(&record.uid, &step)? {
                record.steps.push(adopted);
            } else {
                let reason = format!("what the step to {step} made is gone, and so was its record");
                record.phase = Phase::Leaving(Leaving { reason, undoing: true });
            }
        }
        Ok(record)
    }

    /// Whether a prepare of a claim without a readable record may find partitions that an earlier one has made.
    pub(crate) fn record_was_lost(&self, uid: &ClaimUid, earlier: Option<&[u8]>) -> bool {
        match earlier {
            Some(bytes) => matches!(Record::decode(bytes), Stored::Corrupt { .. }),
            None => self.was_lost(uid).unwrap_or(false),
        }
    }

    /// Whether a claim without a record was not simply unprepared: its CDI file is there and no unprepare left a trace.
    fn was_lost(&self, uid: &ClaimUid) -> Result<bool, String> {
        if self.unprepared_in_this_boot(uid).map_err(|e| chain(&e))? {
            return Ok(false);
        }
        self.parts
            .cdi
            .exists(&self.cdi_name(uid))
            .map_err(|error| format!("the CDI folder {} cannot be read: {error}", self.parts.cdi.place()))
    }

    fn unprepared_in_this_boot(&self, uid: &ClaimUid) -> Result<bool, StoreError> {
        let tombstone = self.state.trace(Traced::Unprepare, uid)?;
        Ok(tombstone.is_some_and(|tombstone| tombstone.boot == self.config.boot))
    }

    /// Fences whose claim has no record any more, or of another boot: nothing is open about those GPUs.
    fn check_fences(&self, report: &mut Report) {
        let states = match self.state.gpus() {
            Ok(states) => states,
            Err(error) => return report.push(Event::Failed { claim: None, error: chain(&error) }),
        };
        for (gpu, stored) in states {
            let Some(fence) = stored.fine().and_then(|state| state.fence.clone()) else { continue };
            let Ok(_gpu_lock) =
                self.lock_gpus(&BTreeSet::from([gpu.clone()]), self.parts.clock.now() + BRIEFLY)
            else {
                continue;
            };
            let over = fence.boot != self.config.boot
                || self.state.record(&fence.claim).is_ok_and(|record| record == Stored::Absent);
            if !over {
                continue;
            }
            let cleared = self.gpu_state(&gpu).and_then(|mut state| {
                state.fence = None;
                self.state.write_gpu(&gpu, &state, self.parts.clock.now())
            });
            report.push(match cleared {
                Ok(()) => Event::FenceCleared { gpu },
                Err(error) => Event::Failed { claim: None, error: chain(&error) },
            });
        }
    }
}
