//! Letting a claim go: unprepare, and finishing what an unprepare or a crash has left.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_claims::{Leaving, Phase, Record, Stored};
use divvy_model::{ClaimUid, GpuError, GpuErrorCode, GpuUuid, HoldKind};

use crate::state::Tombstone;
use crate::unwind::LeftBehind;
use crate::{Call, Event, Executor, Lookup, StoreError, UnprepareCause, UnprepareError};

/// How an unprepare ended. All of these are a success towards the kubelet: an error would leave the pod terminating.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unprepared {
    /// The devices are free.
    Done,
    /// There was nothing to undo.
    NothingThere,
    /// The claim still holds its devices, for this reason; reconcile finishes it.
    Lingering(String),
    /// The record is of a later version of divvy and stays as it is.
    LeftToNewer { version: u32 },
    /// A later prepare took the claim up again meanwhile.
    PreparedAgain,
}

/// Why a claim still holds its devices.
struct Blocked {
    /// What is in the way.
    why: String,
    /// Whether that can pass within seconds: a GPU that is lost does not.
    soon: bool,
    /// Its record could not be made to say so. The caller must then not report success, since no later call would look at a
    /// claim whose record says that it is prepared.
    unwritten: Option<StoreError>,
}

/// How long reconcile and waiting prepares wait for a lock before they leave a claim to the call that holds it.
pub(crate) const BRIEFLY: Duration = Duration::from_millis(100);

/// Pause between two looks at the processes on a device.
const PROCESS_PAUSE: Duration = Duration::from_millis(100);

impl Executor {
    /// Unprepares a claim. Waits for a prepare of it that is at work; one that only waits gives up by itself.
    pub fn unprepare(&self, uid: &ClaimUid, call: &Call) -> Result<Unprepared, UnprepareError> {
        self.release_until_done(uid, call).map_err(|cause| UnprepareError { claim: uid.clone(), cause })
    }

    fn release_until_done(&self, uid: &ClaimUid, call: &Call) -> Result<Unprepared, UnprepareCause> {
        let wait_until = call.until.min(call.received + self.config.timing.process_wait);
        let mut waited = false;
        // The claim lingers, and that could not be written: its record still says that it is prepared.
        let mut unwritten = None;
        // A record that is unreadable again right after it was made again is left to reconcile.
        let mut made_again = false;
        loop {
            let outcome = {
                let _claim_lock = self.lock_claim(uid, call.until)?;
                if !waited {
                    self.bury(uid, call);
                }
                let record = self.state.record(uid)?;
                if Self::is_prepared(&record) {
                    let taken_up_again = waited && unwritten.is_none();
                    if taken_up_again || record.fine().is_some_and(|record| self.came_later(record, call)) {
                        return Ok(Unprepared::PreparedAgain);
                    }
                }
                match record {
                    Stored::Absent if !self.instances_of(uid)?.is_empty() => {
                        match self.rebuild_locked(uid, None, call.until) {
                            Some(Event::Failed { error: why, .. }) => {
                                Ok(Some(Blocked { why, soon: true, unwritten: None }))
                            }
                            // Known again, or gone.
                            _ if !std::mem::replace(&mut made_again, true) => continue,
                            _ => Err("it is lost again".to_owned()),
                        }
                    }
                    Stored::Absent => {
                        self.remove_cdi(uid)?;
                        return Ok(if waited { Unprepared::Done } else { Unprepared::NothingThere });
                    }
                    Stored::Newer { version, .. } => return Ok(Unprepared::LeftToNewer { version }),
                    Stored::Corrupt { reason } => Err(reason),
                    Stored::Fine(record) => {
                        let _gpu_locks = self.lock_gpus(&gpus_of_record(&record), call.until)?;
                        Ok(self.release_or_linger(record)?)
                    }
                }
            };
            // No lock is held from here on.
            let (reason, soon) = match outcome {
                Ok(None) => return Ok(Unprepared::Done),
                Ok(Some(blocked)) => {
                    unwritten = blocked.unwritten;
                    (blocked.why, blocked.soon)
                }
                Err(corrupt) => match self.read_again_from_api(uid, wait_until) {
                    Some(Event::SetAside { .. }) => return Ok(Unprepared::Done),
                    // Known again; now it can be undone. Not `waited`: no other call prepared it.
                    Some(Event::Rebuilt { .. } | Event::Kept { .. })
                        if !std::mem::replace(&mut made_again, true) =>
                    {
                        continue;
                    }
                    _ => return Ok(Unprepared::Lingering(format!("its record cannot be read: {corrupt}"))),
                },
            };
            waited = true;
            if !soon || self.parts.clock.now() >= wait_until || call.cancel.is_cancelled() {
                return match unwritten {
                    None => Ok(Unprepared::Lingering(reason)),
                    Some(source) => Err(UnprepareCause::CannotLinger { reason, source }),
                };
            }
            self.parts.clock.sleep(PROCESS_PAUSE);
        }
    }

    /// Keeps prepares that arrived before from bringing the claim back. Letting go must not fail for want of it: on a
    /// full disk nothing can be written, but everything can be removed.
    fn bury(&self, uid: &ClaimUid, call: &Call) {
        let known = self.state.tombstone(uid).ok().flatten();
        // A later unprepare, of the other instance, had the lock first.
        if known.is_some_and(|known| known.boot == self.config.boot && known.at >= call.received) {
            return;
        }
        let tombstone = Tombstone { boot: self.config.boot.clone(), at: call.received };
        if let Err(error) = self.state.write_tombstone(uid, &tombstone) {
            tracing::warn!(
                claim.uid = %uid,
                error = crate::chain(&error),
                "failed to write the claim's tombstone; a running prepare may still complete"
            );
        }
    }

    /// Whether a prepare that arrived after this unprepare, at the other plugin instance, has had the lock first: it made
    /// the record, or found it ready.
    fn came_later(&self, record: &Record, call: &Call) -> bool {
        record.boot == self.config.boot && record.received.is_some_and(|at| at > call.received)
    }

    fn read_again_from_api(&self, uid: &ClaimUid, until: Duration) -> Option<Event> {
        match self.parts.claims.look_up(uid, None, until) {
            Lookup::Found(claim) => self.rebuild(uid, Some(&claim)),
            Lookup::Gone => self.rebuild(uid, None),
            Lookup::Unknown(_) => None,
        }
    }

    /// Releases the claim if nothing is in the way; else records that the claim lingers, and why.
    fn release_or_linger(&self, record: Record) -> Result<Option<Blocked>, UnprepareCause> {
        match self.release(&record) {
            Ok(()) => Ok(None),
            Err(LeftBehind::InUse(why)) => {
                self.remove_cdi(&record.uid)?;
                let undoing = matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing);
                let phase = Phase::Leaving(Leaving { reason: why.clone(), undoing });
                let mut unwritten = None;
                if record.phase != phase {
                    unwritten = self.state.write_record(&Record { phase, ..record }).err();
                }
                Ok(Some(Blocked { why, soon: true, unwritten }))
            }
            Err(LeftBehind::Steps { reason: why, soon }) => Ok(Some(Blocked { why, soon, unwritten: None })),
            Err(LeftBehind::Store(error)) => Err(error.into()),
            Err(LeftBehind::Cdi(error)) => Err(error.into()),
        }
    }

    /// Lets go if no process is in the way. Under the locks of the claim and its GPUs.
    pub(crate) fn release(&self, record: &Record) -> Result<(), LeftBehind> {
        match self.in_the_way(record)? {
            Some(why) => Err(LeftBehind::InUse(why)),
            None => self.unwind(record.clone()),
        }
    }

    /// Processes on the claim's exclusive devices: neither an unprepare nor a gone claim proves that its containers
    /// are gone.
    pub(crate) fn in_the_way(&self, record: &Record) -> Result<Option<String>, StoreError> {
        // Of another boot: no process is left. Never answered: no container was started.
        if record.boot != self.config.boot || record.phase == Phase::Preparing {
            return Ok(None);
        }
        for device in record.devices.iter().filter(|d| d.kind.needs().is_some()) {
            let partition = device.partition(&record.steps).map(|made| made.gpu_instance.0);
            if device.step().is_some() && partition.is_none() {
                // Nothing was made for it, or it is gone.
                continue;
            }
            let shared = device.kind == HoldKind::Share && self.is_shared(&device.gpu, &record.uid)?;
            let found = match self.parts.processes.on_gpu(&device.gpu) {
                Ok(mut found) => {
                    found.retain(|p| partition.is_none() || p.gpu_instance == partition);
                    // Beside other shares, only what is known to be its own is in the way; the last share answers for
                    // all that is left, since another mode may come next.
                    let own = |pod: &String| record.pods.iter().any(|own| own.uid == *pod);
                    found.retain(|p| !shared || p.pod.as_ref().is_some_and(own));
                    found
                }
                Err(error) if nothing_is_known_to_run(&error) => continue,
                Err(error) => {
                    return Ok(Some(format!("failed to list the processes on {}: {error}", device.gpu)));
                }
            };
            if found.is_empty() {
                continue;
            }
            // Processes of pods that have admin access to the same GPU, or another part of it, are not in the way.
            let records = self.state.records()?;
            let mut others = Self::pods_on(&records, &record.uid, &device.gpu);
            for own in &record.pods {
                others.remove(own.uid.as_str());
            }
            let mut pids: Vec<_> = found
                .iter()
                .filter(|p| !p.pod.as_deref().is_some_and(|pod| others.contains(pod)))
                .map(|p| p.pid)
                .collect();
            pids.sort_unstable();
            pids.dedup();
            if !pids.is_empty() {
                let list: Vec<_> = pids.iter().map(u32::to_string).collect();
                return Ok(Some(format!("process {} still uses {}", list.join(", "), device.gpu)));
            }
        }
        Ok(None)
    }

    /// Whether other claims have shares of the GPU.
    fn is_shared(&self, gpu: &GpuUuid, uid: &ClaimUid) -> Result<bool, StoreError> {
        let records = self.state.records()?;
        let mut holds = Self::others(&records, uid).flat_map(Record::holds);
        Ok(holds.any(|hold| hold.gpu == *gpu && hold.kind == HoldKind::Share))
    }

    /// Finishes a claim that lingers, or whose prepare a crash interrupted. A claim that a call is working on, or that is
    /// simply prepared, is left alone. Locks are waited for until `until`.
    pub(crate) fn finish(&self, uid: &ClaimUid, until: Duration) -> Option<Event> {
        Event::of(uid, self.try_finish(uid, until))
    }

    fn try_finish(&self, uid: &ClaimUid, until: Duration) -> Result<Option<Event>, UnprepareCause> {
        let _claim_lock = self.lock_claim(uid, until)?;
        let record = match self.state.record(uid)? {
            Stored::Fine(record) if record.phase != Phase::Prepared => record,
            _ => return Ok(None),
        };
        let _gpu_locks = self.lock_gpus(&gpus_of_record(&record), until)?;
        let (claim, cut_short) = (uid.clone(), record.phase == Phase::Preparing);
        Ok(Some(match self.release_or_linger(record)? {
            None if cut_short => Event::TakenBack { claim },
            None => Event::Released { claim },
            // Here the record says already that it is not prepared; only the reason may be an old one.
            Some(blocked) => Event::Kept { claim, why: blocked.why },
        }))
    }
}

/// GPUs to lock for a record: of its devices and of its steps.
pub(crate) fn gpus_of_record(record: &Record) -> BTreeSet<GpuUuid> {
    let mut gpus = record.gpus();
    gpus.extend(record.steps.iter().map(|s| s.step.gpu().clone()));
    gpus
}

/// A GPU that is gone, or has no kernel module, runs nothing; without NVML (the driver was removed) processes cannot be
/// listed, and an unprepare must not wait for it. A GPU that never lists processes (vGPU, WSL) does not block either.
pub(crate) fn nothing_is_known_to_run(error: &GpuError) -> bool {
    [
        GpuErrorCode::DRIVER_NOT_LOADED,
        GpuErrorCode::LIBRARY_NOT_FOUND,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::GPU_IS_LOST,
        GpuErrorCode::GPU_NOT_FOUND,
        GpuErrorCode::NOT_FOUND,
    ]
    .contains(&error.code)
}
