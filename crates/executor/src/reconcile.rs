//! Reconcile: records, API claims, CDI files and the kubelet's view of running pods are squared with each other, at
//! start and periodically, by the one plugin instance that is in charge.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use divvy_claims::{Claim, Phase, Record, Stored, claim_of_cdi_file};
use divvy_model::{ClaimUid, DeviceName};

use crate::release::{BRIEFLY, Release, gpus_of_record};
use crate::state::Records;
use crate::{Event, Executor, LockName, Refresh, Report, chain};

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
        report.foreign = self.foreign();
        let now = self.parts.clock.now();
        let old = now.saturating_sub(self.config.timing.tombstones);
        let lock = |uid: &ClaimUid| self.parts.locks.acquire(&LockName::Claim(uid.clone()), now).ok();
        let pruned = self.state.prune_traces(&self.config.boot, old, lock);
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
            Ok(Release::Blocked { why, .. }) => kept(&format!("its claim is gone, but {why}")),
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

    /// Fences whose claim has no record any more, or of another boot: nothing is open about those GPUs.
    fn check_fences(&self, report: &mut Report) {
        let states = match self.state.gpus() {
            Ok(states) => states,
            Err(error) => return report.push(Event::Failed { claim: None, error: chain(&error) }),
        };
        for (gpu, stored) in states {
            if stored.fine().is_none_or(|state| state.fences.is_empty()) {
                continue;
            }
            let Ok(_gpu_lock) =
                self.lock_gpus(&BTreeSet::from([gpu.clone()]), self.parts.clock.now() + BRIEFLY)
            else {
                continue;
            };
            let cleared = self.gpu_state(&gpu).and_then(|mut state| {
                let before = state.fences.len();
                state.fences.retain(|fence| {
                    let gone = |claim| self.state.record(claim).is_ok_and(|record| record == Stored::Absent);
                    fence.boot == self.config.boot && !fence.claim.as_ref().is_some_and(gone)
                });
                let over = state.fences.len() < before;
                if over {
                    self.state.write_gpu(&gpu, &state, self.parts.clock.now())?;
                }
                Ok(over && state.fences.is_empty())
            });
            match cleared {
                Ok(true) => report.push(Event::FenceCleared { gpu }),
                Ok(false) => {}
                Err(error) => report.push(Event::Failed { claim: None, error: chain(&error) }),
            }
        }
    }
}
