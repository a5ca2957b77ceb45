//! Reconcile: records, API claims, CDI files and the kubelet's view of running pods are squared with each other, at
//! start and periodically, by the one plugin instance that is in charge.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use divvy_claims::{Claim, Phase, Record, Stored, claim_of_cdi_file};
use divvy_model::{ClaimUid, DeviceName};

use crate::state::Records;
use crate::unprepare::{BRIEFLY, gpus_of_record};
use crate::unwind::LeftBehind;
use crate::{Event, Executor, LockName, Refresh, Report, UnprepareCause, chain};

/// A device of a running container, as listed by the kubelet's PodResources.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningDevice {
    /// Namespace of pod and claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
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
    /// As the reconcile before has left it.
    last: BTreeMap<ClaimUid, Duration>,
    now: BTreeMap<ClaimUid, Duration>,
}

/// So many files that could not be read are kept for people.
const CORRUPT_KEPT: usize = 20;

impl Executor {
    /// Compares everything once. Never takes long: a claim that a call is working on is left for the next time.
    pub fn reconcile(&self, view: &ClusterView) -> Report {
        let mut report = self.restore_cdi(Refresh::Missing);
        let records = match self.state.records() {
            Ok(records) => records,
            Err(error) => {
                report.events.push(Event::failed(None, &error));
                return report;
            }
        };
        if let Some(claims) = &view.claims {
            for (uid, stored) in &records {
                match stored.as_ref() {
                    Stored::Corrupt { .. } => {
                        let rebuilt = match claims.get(uid) {
                            Some(claim) => self.rebuild_and_finish(uid, Some(claim)),
                            None => self.check_unreadable_orphan(uid, &records, view),
                        };
                        report.events.extend(rebuilt);
                    }
                    Stored::Fine(record) if record.phase == Phase::Prepared => {
                        report.events.extend(Event::of(uid, self.follow_pods(record, claims)));
                        report.events.extend(Event::of(uid, self.check_orphan(record, claims, view)));
                    }
                    Stored::Fine(_) | Stored::Newer { .. } | Stored::Absent => {}
                }
            }
            report.events.extend(self.check_lost(claims, view));
            let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
            orphans.last = std::mem::take(&mut orphans.now);
        }
        self.check_gpus(&mut report);
        let now = self.parts.clock.now();
        let old = now.saturating_sub(self.config.timing.tombstones);
        let lock = |uid: &ClaimUid| self.parts.locks.acquire(&LockName::Claim(uid.clone()), now).ok();
        let pruned = self.state.prune_tombstones(&self.config.boot, old, lock);
        if let Err(error) = pruned.and_then(|()| self.state.prune_corrupt(CORRUPT_KEPT)) {
            report.events.push(Event::failed(None, &error));
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
    ) -> Result<Option<Event>, UnprepareCause> {
        let uid = &record.uid;
        // Allocated anew with some of the same devices: what is on record still has to go, and waits for its prepare.
        if claims.get(uid).is_some_and(|claim| record.is_of(&claim.allocation)) {
            return Ok(None);
        }
        let kept = |why: &str| Ok(Some(Event::Kept { claim: uid.clone(), why: why.to_owned() }));
        // What the view says may be older than the prepare.
        let since = record.received.filter(|_| record.boot == self.config.boot).unwrap_or_default();
        if !self.grace_is_over(uid, view, since) {
            return kept("its claim no longer exists; waiting for an unprepare");
        }
        let Some(running) = &view.running else {
            return kept(
                "its claim no longer exists, but the kubelet did not report whether a pod still runs",
            );
        };
        // By its devices too: a later claim may have its name.
        let has = |device: &DeviceName| record.devices.iter().any(|d| d.allocated.device == *device);
        let is_its =
            |r: &RunningDevice| r.namespace == record.namespace && r.claim == record.name && has(&r.device);
        if running.iter().any(is_its) {
            return kept("its claim no longer exists, but a running pod still has its devices");
        }
        let until = self.parts.clock.now() + BRIEFLY;
        let _claim_lock = self.lock_claim(uid, until)?;
        // Prepared anew since the view was taken?
        if self.state.record(uid)?.fine() != Some(record) {
            return Ok(None);
        }
        let _gpu_locks = self.lock_gpus(&gpus_of_record(record), until)?;
        match self.release(record) {
            Ok(()) => Ok(Some(Event::OrphanUndone { claim: uid.clone() })),
            Err(LeftBehind::InUse(why)) => kept(&format!("its claim no longer exists, but {why}")),
            Err(left) => Ok(Some(Event::failed(Some(uid), &left))),
        }
    }

    /// An unreadable record of a claim that is gone is an orphan like any other, except that its names are unknown.
    fn check_unreadable_orphan(
        &self,
        uid: &ClaimUid,
        records: &Records,
        view: &ClusterView,
    ) -> Option<Event> {
        let kept = |why: &str| Some(Event::Kept { claim: uid.clone(), why: why.to_owned() });
        // Unprepared, but unreadable then: only its processes are waited for.
        if self.unprepared_in_this_boot(uid).unwrap_or(false) {
            return self.rebuild_and_finish(uid, None);
        }
        if !self.grace_is_over(uid, view, Duration::ZERO) {
            return kept(
                "its record cannot be read and its claim no longer exists; waiting for an unprepare",
            );
        }
        let Some(running) = &view.running else {
            return kept(
                "its record cannot be read, and the kubelet did not report whether a pod still has its devices",
            );
        };
        let known: BTreeSet<_> = Self::others(records, uid).map(|r| (&r.namespace, &r.name)).collect();
        if let Some(unknown) = running.iter().find(|r| !known.contains(&(&r.namespace, &r.claim))) {
            return kept(&format!(
                "its record cannot be read, and a running pod has {} of claim {}/{}, which has no record",
                unknown.device, unknown.namespace, unknown.claim
            ));
        }
        self.rebuild_and_finish(uid, None)
    }

    /// Whether a claim has looked orphaned for long enough, counted from `begin` at the earliest.
    fn grace_is_over(&self, uid: &ClaimUid, view: &ClusterView, begin: Duration) -> bool {
        let now = self.parts.clock.now();
        let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
        let since = orphans.last.get(uid).copied().unwrap_or(now);
        orphans.now.insert(uid.clone(), since);
        view.kubelet_connected_since.is_some_and(|connected| {
            now.saturating_sub(since.max(connected).max(begin)) >= self.config.timing.orphan_grace
        })
    }

    /// A claim is prepared once, and later pods are read from the API: to know its processes.
    fn follow_pods(
        &self,
        record: &Record,
        claims: &BTreeMap<ClaimUid, Claim>,
    ) -> Result<Option<Event>, UnprepareCause> {
        let claim = claims.get(&record.uid).filter(|claim| record.is_of(&claim.allocation));
        let Some(pods) =
            claim.map(|claim| &claim.pods).filter(|pods| !pods.is_empty() && **pods != record.pods)
        else {
            return Ok(None);
        };
        let _claim_lock = self.lock_claim(&record.uid, self.parts.clock.now() + BRIEFLY)?;
        // Prepared anew since the view was taken?
        if self.state.record(&record.uid)?.fine() != Some(record) {
            return Ok(None);
        }
        self.state.write_record(&Record { pods: pods.clone(), ..record.clone() })?;
        Ok(Some(Event::PodsChanged { claim: record.uid.clone() }))
    }

    /// Makes a record again, and lets go at once what cannot stay.
    fn rebuild_and_finish(&self, uid: &ClaimUid, claim: Option<&Claim>) -> Option<Event> {
        match self.rebuild(uid, claim) {
            kept @ Some(Event::Kept { .. }) => self.finish(uid, self.parts.clock.now() + BRIEFLY).or(kept),
            done => done,
        }
    }

    /// Claims without a record that have a CDI file, or for which instances were made: of one that is still allocated here
    /// the record was lost and is made again; of others all is removed.
    fn check_lost(&self, claims: &BTreeMap<ClaimUid, Claim>, view: &ClusterView) -> Vec<Event> {
        let lost = match self.without_record() {
            Ok(lost) => lost,
            Err(error) => return vec![Event::Failed { claim: None, error }],
        };
        let one = |uid: &ClaimUid| {
            if let Some(claim) = claims.get(uid) {
                return self.rebuild_and_finish(uid, Some(claim));
            }
            if !self.grace_is_over(uid, view, Duration::ZERO) {
                return None;
            }
            let rebuilt = self.rebuild_and_finish(uid, None);
            rebuilt.or_else(|| Event::of(uid, self.remove_stray_cdi(uid)))
        };
        lost.iter().filter_map(one).collect()
    }

    /// Claims without a record that have files, or for which instances were made.
    fn without_record(&self) -> Result<BTreeSet<ClaimUid>, String> {
        let place = || self.parts.cdi.place();
        let files =
            self.parts.cdi.list().map_err(|e| format!("the CDI folder {} cannot be read: {e}", place()))?;
        let metadata = self.parts.metadata.claims();
        let metadata = metadata.map_err(|e| format!("the folder of device metadata cannot be read: {e}"))?;
        let mut lost: BTreeSet<ClaimUid> = self.instances().map_err(|e| chain(&e))?.into_keys().collect();
        lost.extend(files.iter().filter_map(|file| claim_of_cdi_file(&self.config.driver, file)));
        lost.extend(metadata);
        lost.retain(|uid| self.state.record(uid).is_ok_and(|record| record == Stored::Absent));
        Ok(lost)
    }

    /// Whether there is any record, readable or not; also where that is not known.
    pub fn has_records(&self) -> bool {
        self.state.records().map_or(true, |records| !records.is_empty())
    }

    /// Whether there is a claim whose namespace and name no record says: [`ClusterView::claims`] must then have all claims of the
    /// cluster, since one that is missing there counts as gone.
    pub fn has_nameless_claims(&self) -> Result<bool, String> {
        let records = self.state.records().map_err(|e| chain(&e))?;
        let is_unreadable = |record: &Arc<Stored<_>>| matches!(**record, Stored::Corrupt { .. });
        Ok(records.values().any(is_unreadable) || !self.without_record()?.is_empty())
    }

    fn remove_stray_cdi(&self, uid: &ClaimUid) -> Result<Option<Event>, UnprepareCause> {
        let _claim_lock = self.lock_claim(uid, self.parts.clock.now() + BRIEFLY)?;
        if self.state.record(uid)? != Stored::Absent || !self.instances_of(uid)?.is_empty() {
            return Ok(None);
        }
        self.remove_cdi(uid)?;
        Ok(Some(Event::CdiRemoved { file: self.cdi_name(uid) }))
    }
}
