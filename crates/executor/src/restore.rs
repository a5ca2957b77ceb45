//! What must be right before the kubelet may call: CDI files, records of an earlier boot, prepares that a crash cut
//! short.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::{Phase, Record, RecordedDevice, Refusal, Step, Stored, Why};
use divvy_model::{ClaimUid, ComputeMode, HoldKind};

use crate::run::Before;
use crate::state::Records;
use crate::unprepare::{BRIEFLY, gpus_of_record};
use crate::{Event, Executor, Lookup, PrepareCause, PrepareError, Report, StoreError, UnprepareCause};

/// Which CDI files are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refresh {
    /// Those that are not there.
    Missing,
    /// Also those that differ from what would be written today: at start, and when driver files have changed.
    All,
}

/// How long one claim may take to be carried out again after a reboot.
const EXECUTE_AGAIN: Duration = Duration::from_mins(1);

/// How long the API is waited for before a claim is carried out again.
const ASK_WITHIN: Duration = Duration::from_secs(2);

impl Executor {
    /// Takes back prepares that a crash cut short, finishes lingering claims, carries records of an earlier boot out
    /// again under the same CDI names, and writes CDI files. Call it before registering with the kubelet, which asks
    /// again only for new sandboxes, and whenever files in the CDI folder vanish.
    pub fn restore_cdi(&self, refresh: Refresh) -> Report {
        let mut report = Report::default();
        self.own_what_is_recorded();
        let records = match self.state.records() {
            Ok(records) => records,
            Err(error) => {
                report.events.push(Event::failed(None, &error));
                return report;
            }
        };
        // Those that let go first: another boot's record may need what they hold.
        for (uid, stored) in &records {
            if stored.fine().is_some_and(|r| r.phase != Phase::Prepared) {
                report.events.extend(self.finish(uid, self.parts.clock.now() + BRIEFLY));
            }
        }
        let mut ask = true;
        for (uid, stored) in &records {
            match stored.as_ref() {
                Stored::Fine(record) if record.phase == Phase::Prepared => {
                    let is_gone = self.is_gone(record, &mut ask);
                    report.events.extend(Event::of(uid, self.restore(uid, refresh, is_gone)));
                }
                Stored::Newer { version, .. } => report.events.push(Event::Kept {
                    claim: uid.clone(),
                    why: format!("its record was written by a later version of divvy (format {version})"),
                }),
                Stored::Corrupt { reason } => report.events.push(Event::Kept {
                    claim: uid.clone(),
                    why: format!("its record cannot be read and is rebuilt from the API: {reason}"),
                }),
                Stored::Fine(_) | Stored::Absent => {}
            }
        }
        self.settle_all_settings(refresh == Refresh::All, &mut report);
        report
    }

    /// Finishes lingering claims, as far as that is possible now, by asking only the GPUs. Whether any is left.
    pub fn finish_lingering(&self) -> (Report, bool) {
        let mut report = Report::default();
        let lingering = |records: Records| {
            let leaving = |stored: &Stored<Record>| {
                stored.fine().is_some_and(|record| matches!(record.phase, Phase::Leaving(_)))
            };
            records.into_iter().filter(|(_, stored)| leaving(stored)).map(|(uid, _)| uid).collect::<Vec<_>>()
        };
        let left = self.state.records().map(lingering).and_then(|claims| {
            let finish = |uid| self.finish(uid, self.parts.clock.now() + BRIEFLY);
            report.events.extend(claims.iter().filter_map(finish));
            if claims.is_empty() { Ok(claims) } else { self.state.records().map(lingering) }
        });
        let any_left = left.map_or_else(
            |error| {
                report.events.push(Event::failed(None, &error));
                // Not known is not none.
                true
            },
            |left| !left.is_empty(),
        );
        (report, any_left)
    }

    /// Whether the API says that a claim of another boot no longer has what its record says. An API that does not answer
    /// is asked once.
    fn is_gone(&self, record: &Record, ask: &mut bool) -> bool {
        if !*ask || record.boot == self.config.boot {
            return false;
        }
        let until = self.parts.clock.now() + ASK_WITHIN;
        match self.parts.claims.look_up(&record.uid, Some(&record.reference()), until) {
            Lookup::Found(claim) => !record.is_of(&claim.allocation),
            Lookup::Gone => true,
            Lookup::Unknown(_) => {
                *ask = false;
                false
            }
        }
    }

    fn restore(
        &self,
        uid: &ClaimUid,
        refresh: Refresh,
        is_gone: bool,
    ) -> Result<Option<Event>, UnprepareCause> {
        let now = self.parts.clock.now();
        let _claim_lock = self.lock_claim(uid, now + BRIEFLY)?;
        let record = match self.state.record(uid)? {
            Stored::Fine(record) if record.phase == Phase::Prepared => record,
            _ => return Ok(None),
        };
        let claim = uid.clone();
        if record.boot != self.config.boot {
            if is_gone {
                // Nothing of it is left but files.
                let _gpu_locks = self.lock_gpus(&gpus_of_record(&record), now + BRIEFLY)?;
                return Ok(Some(match self.unwind(record) {
                    Ok(()) => Event::Released { claim },
                    Err(left) => Event::failed(Some(uid), &left),
                }));
            }
            let reference = record.reference();
            return Ok(Some(match self.execute_again(record, now + EXECUTE_AGAIN) {
                Ok(()) => Event::ExecutedAgain { claim },
                Err(cause) => Event::failed(Some(uid), &PrepareError { claim: reference, cause }),
            }));
        }
        self.own_instances(&record)?;
        let written = match refresh {
            Refresh::Missing => self.ensure_cdi(&record)?,
            Refresh::All => self.refresh_cdi(&record)?,
        };
        Ok(written.then_some(Event::CdiRestored { claim }))
    }

    /// Hardware state does not outlast a reboot; the same steps are done again for the same devices.
    fn execute_again(&self, mut record: Record, until: Duration) -> Result<(), PrepareCause> {
        if self.parts.inventory.inventory().is_none() {
            // The record stays as it is, and is carried out as soon as the driver answers.
            let claim = record.reference();
            return Err(Refusal { claim, device: None, gpu: None, why: Why::NoInventory }.into());
        }
        let _gpu_locks = self.lock_gpus(&gpus_of_record(&record), until)?;
        let earlier = Before::OtherBoot(record.clone());
        let mut steps = self.steps_of(&record)?;
        let others = std::mem::take(&mut record.steps).into_iter().map(|s| s.step);
        steps.extend(others.filter(|step| !steps.contains(step)).collect::<Vec<_>>());
        record.boot = self.config.boot.clone();
        record.received = None;
        if let Some(metadata) = &mut record.metadata {
            // A card may have another address now.
            metadata.attributes = self.attributes_of(&record.devices);
        }
        // A failure leaves the record of the earlier boot: it goes on holding its GPUs and is carried out later.
        let record = self.run_steps(record, steps, until, &earlier)?;
        self.complete(record, &earlier).map(drop)
    }

    /// What a record's devices need, in the order of a prepare. They say it all; the steps of a prepare that was never
    /// finished may say less. Who makes the instances sets the MIG mode.
    fn steps_of(&self, record: &Record) -> Result<Vec<Step>, StoreError> {
        let (mut modes, mut computes, mut slices) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for device in &record.devices {
            let gpu = &device.gpu;
            let on = matches!(device.kind, HoldKind::Partition { .. });
            let is_set = on || (device.kind.needs().is_some() && self.gpu_state(gpu)?.turned_mig_on());
            if is_set && !device.is_static {
                modes.insert(gpu, Step::SetMigMode { gpu: gpu.clone(), on });
            }
            let exclusive = self.compute_mode(gpu) == Some(ComputeMode::ExclusiveProcess);
            if device.kind == HoldKind::Share && exclusive {
                let to = ComputeMode::Default;
                computes.insert(gpu, Step::SetComputeMode { gpu: gpu.clone(), to });
            }
            slices.extend(device.time_slice.map(|to| (gpu, Step::SetTimeSlice { gpu: gpu.clone(), to })));
        }
        let partitions = record.devices.iter().filter_map(RecordedDevice::step);
        let settings = modes.into_values().chain(computes.into_values()).chain(slices.into_values());
        Ok(settings.chain(partitions).collect())
    }
}
