//! Records that cannot be read, or are not there although their claim was prepared: made again from what the API, the CDI
//! file and the hardware still tell.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{
    AllocatedDevice, Allocation, Claim, Leaving, Living, Phase, Record, RecordedDevice, Snapshot, StepError,
    Stored, resolve_devices,
};
use divvy_model::{ClaimUid, DeviceKind, DeviceName, GpuUuid, HoldKind, Ordinals};

use crate::prepare::gpus_of;
use crate::release::{BRIEFLY, nothing_is_known_to_run};
use crate::state::Traced;
use crate::{Event, Executor, LockError, StoreError, chain};

impl Executor {
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
                return match self.stand_in(uid, &in_the_way) {
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
        let (modes, living) = (BTreeMap::new(), Living::new());
        let seen = Snapshot {
            driver: &self.config.driver,
            inventory: inventory.as_deref(),
            ordinals: &ordinals,
            records: &records,
            gpus: &gpus,
            boot: &self.config.boot,
            modes: &modes,
            living: &living,
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

    pub(crate) fn unprepared_in_this_boot(&self, uid: &ClaimUid) -> Result<bool, StoreError> {
        let tombstone = self.state.trace(Traced::Unprepare, uid)?;
        Ok(tombstone.is_some_and(|tombstone| tombstone.boot == self.config.boot))
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
    /// it was given. It holds the partitions that its CDI file names, and else the GPUs with such processes, until these
    /// are gone; no other GPU is kept from anybody.
    fn stand_in(&self, uid: &ClaimUid, in_the_way: &BTreeMap<GpuUuid, String>) -> Result<String, String> {
        let ordinals = self.state.ordinals().map_err(|e| chain(&e))?;
        let mut devices = self.partitions_of_cdi_file(uid, &ordinals);
        let gpus = devices.iter().map(|d| d.gpu.clone()).chain(in_the_way.keys().cloned()).collect();
        let until = self.parts.clock.now() + BRIEFLY;
        let _gpu_locks = self.lock_gpus(&gpus, until).map_err(|e| chain(&e))?;
        let mut steps = Vec::new();
        for step in devices.iter().filter_map(RecordedDevice::step) {
            steps.extend(self.adopt(uid, &step).map_err(|e| chain(&e))?);
        }
        // What is gone is nobody's.
        devices.retain(|device| device.partition(&steps).is_some());
        let whole = in_the_way.keys().filter(|gpu| devices.iter().all(|device| device.gpu != **gpu));
        let whole: Vec<_> = whole.filter_map(|gpu| stand_in_device(gpu, &ordinals)).collect();
        devices.extend(whole);
        let reasons: Vec<_> = in_the_way.values().map(String::as_str).collect();
        let reason =
            format!("its record could not be read and its claim is gone, but {}", reasons.join("; "));
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
        let record = Record { steps, ..Record::new(&claim, &self.config.boot, devices, phase) };
        self.state.write_record(&record).map_err(|e| chain(&e))?;
        Ok(reason)
    }

    pub(crate) fn gpus_of_cdi_file(&self, uid: &ClaimUid, ordinals: &Ordinals) -> Option<BTreeSet<GpuUuid>> {
        let bytes = self.parts.cdi.read(&self.cdi_name(uid)).ok()??;
        let spec = divvy_cdi::Spec::from_json_bytes(&bytes).ok()?;
        let gpu = |name: &str| {
            let device = name.strip_prefix(uid.as_str())?.strip_prefix('-')?;
            // The id of a share follows its device.
            let device = device.find("-ts-").map_or(Some(device), |at| device.get(..at + 3))?;
            let device: DeviceName = device.parse().ok()?;
            ordinals.gpu(DeviceKind::parse(&device).ok()?.ordinal()).cloned()
        };
        // One that cannot be told makes the file no help.
        spec.devices.iter().map(|device| gpu(&device.name)).collect()
    }
}

/// A whole GPU, as far as that can be said of one that nobody knows to be allocated.
fn stand_in_device(gpu: &GpuUuid, ordinals: &Ordinals) -> Option<RecordedDevice> {
    let allocated = AllocatedDevice {
        request: String::new(),
        pool: String::new(),
        device: DeviceKind::Whole { ordinal: ordinals.of(gpu)? }.device_name(),
        share_id: None,
        admin_access: false,
        consumed_capacity: BTreeMap::new(),
    };
    Some(RecordedDevice {
        allocated,
        gpu: gpu.clone(),
        kind: HoldKind::Whole,
        time_slice: None,
        is_static: false,
    })
}
