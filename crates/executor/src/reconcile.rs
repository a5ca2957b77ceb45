//! Reconcile: records, API claims, CDI files and the kubelet's view of running pods are squared
//! with each other, at start and periodically, by the one plugin instance that is in charge.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Claim, Phase, Record, Stored, claim_of_cdi_file};
use divvy_model::{ClaimUid, DeviceName, lock};

use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::rebuild::rebuild;
use crate::records::{others, unprepared_in_this_boot};
use crate::release::{LeftBehind, finish, let_go};
use crate::restore::{restore, restore_cdi};
use crate::state::Records;
use crate::{Event, LockName, Refresh, Report, UnprepareCause, chain};

/// A device of a running container, as listed by the kubelet's PodResources.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RunningDevice {
    /// Namespace of pod and claim.
    pub namespace: String,
    /// Name of the claim.
    pub claim: String,
    pub device: DeviceName,
}

/// Knowledge of others. `None` means "could not be asked", never "nothing".
#[derive(Debug, Clone, Default)]
pub struct ClusterView {
    /// Claims that have devices of ours on this node allocated.
    pub claims: Option<BTreeMap<ClaimUid, Claim>>,
    /// Devices of running pods.
    pub running: Option<BTreeSet<RunningDevice>>,
    /// Since when (time since boot) a kubelet has been connected.
    pub kubelet_connected_since: Option<Duration>,
}

/// Times since which claims have looked orphaned, in one round after the other.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    /// Claims that looked so in the round before.
    last: BTreeMap<ClaimUid, Duration>,
    now: BTreeMap<ClaimUid, Duration>,
}

/// Number of corrupt files kept for debugging.
const CORRUPT_KEPT: usize = 20;

/// The periodic look at everything, by the one plugin instance that is in charge.
#[derive(Clone, Copy)]
pub(crate) struct Keeper<'a> {
    context: &'a Context,
}

impl<'a> Keeper<'a> {
    pub(crate) fn of(context: &'a Context) -> Self {
        Self { context }
    }

    /// Compares everything once. Never takes long: a claim that a call is working on is left for
    /// the next time.
    pub(crate) fn reconcile(self, view: &ClusterView) -> Report {
        // Files and unfinished claims first: nothing of that needs the API.
        let mut report = restore_cdi(self.context, Refresh::Missing);
        let records = match self.context.state.records() {
            Ok(records) => records,
            Err(error) => {
                report.events.push(Event::failed(None, &error));
                return report;
            }
        };
        if let Some(claims) = &view.claims {
            // Records that cannot be read come first: they may hold what else looks lost.
            for (uid, stored) in &records {
                if let Stored::Corrupt { .. } = stored.as_ref() {
                    report.events.extend(match claims.get(uid) {
                        Some(claim) => self.rebuild_and_finish(uid, Some(claim)),
                        None => self.check_unreadable_orphan(uid, &records, view),
                    });
                }
            }
            // Then claims that the API no longer has, or has with other pods.
            for (uid, stored) in &records {
                let Some(record) = stored.fine().filter(|r| r.phase == Phase::Prepared) else {
                    continue;
                };
                let pods = self.follow_pods(record, claims);
                report.events.extend(Event::of(uid, pods));
                let orphan = self.check_orphan(record, claims, view);
                report.events.extend(Event::of(uid, orphan));
            }
            // Last what no record names.
            report.events.extend(self.check_lost(claims, view));
            // A setting that a released claim could not give back is tried once more: the files
            // above were compared before.
            let is_release = |event: &Event| {
                matches!(event, Event::Released { .. } | Event::OrphanUndone { .. })
            };
            if report.events.iter().any(is_release) {
                Gpus::of(self.context).tidy(false, &mut report);
            }
            let mut orphans = lock(&self.context.orphans);
            // Only a round that knew the claims replaces the last: during an outage of the API no
            // time of an orphan is lost.
            orphans.last = std::mem::take(&mut orphans.now);
        }
        // Remove what has had its time.
        let now = self.context.now();
        let old = now.saturating_sub(self.context.config.timing.tombstones);
        // Claims share lock files, so a lock may be busy for another claim. A deadline of now takes
        // it only if it is free.
        let lock = |uid: &ClaimUid| {
            self.context
                .parts
                .locks
                .acquire(&LockName::Claim(uid.clone()), now)
                .ok()
        };
        let pruned = self
            .context
            .state
            .prune_tombstones(&self.context.config.boot, old, lock);
        if let Err(error) = pruned.and_then(|()| self.context.state.prune_corrupt(CORRUPT_KEPT)) {
            report.events.push(Event::failed(None, &error));
        }
        report
    }

    /// An orphan is undone only if its claim no longer has this allocation, no running pod lists
    /// it, it has been so for a grace period with a connected kubelet, and no process is on it.
    fn check_orphan(
        self,
        record: &Record,
        claims: &BTreeMap<ClaimUid, Claim>,
        view: &ClusterView,
    ) -> Result<Option<Event>, UnprepareCause> {
        let uid = &record.uid;
        // Allocated anew with some of the same devices: what is on record still has to go, and
        // waits for its prepare.
        if claims
            .get(uid)
            .is_some_and(|claim| record.is_of(&claim.allocation))
        {
            return Ok(None);
        }
        let kept = |why: &str| {
            Ok(Some(Event::Kept {
                claim: uid.clone(),
                why: why.to_owned(),
            }))
        };
        // The view may be older than the prepare.
        let since = record
            .received
            .filter(|_| record.boot == self.context.config.boot)
            .unwrap_or_default();
        if self.note_orphan(uid, view, since) < self.grace() {
            return kept("its claim no longer exists; waiting for an unprepare");
        }
        let Some(running) = &view.running else {
            return kept(
                "its claim no longer exists, but the kubelet did not report whether a pod still runs",
            );
        };
        // By its devices too: a later claim may have its name.
        let has =
            |device: &DeviceName| record.devices.iter().any(|d| d.allocated.device == *device);
        let is_its = |r: &RunningDevice| {
            r.namespace == record.namespace && r.claim == record.name && has(&r.device)
        };
        if running.iter().any(is_its) {
            return kept("its claim no longer exists, but a running pod still has its devices");
        }
        // Only now take locks: most claims are no orphans.
        let until = self.context.briefly();
        let _claim_lock = self.context.lock_claim(uid, until)?;
        // Prepared anew since the view was taken?
        if self.context.state.record(uid)?.fine() != Some(record) {
            return Ok(None);
        }
        let _gpu_locks = self.context.lock_gpus(&record.gpus(), until)?;
        match let_go(self.context, record, &BTreeSet::new()) {
            Ok(()) => Ok(Some(Event::OrphanUndone { claim: uid.clone() })),
            Err(LeftBehind::InUse(why)) => kept(&format!("its claim no longer exists, but {why}")),
            Err(left) => Ok(Some(Event::failed(Some(uid), &left))),
        }
    }

    /// An unreadable record of a claim that is gone is an orphan like any other, except that its
    /// names are unknown.
    fn check_unreadable_orphan(
        self,
        uid: &ClaimUid,
        records: &Records,
        view: &ClusterView,
    ) -> Option<Event> {
        let kept = |why: &str| {
            Some(Event::Kept {
                claim: uid.clone(),
                why: why.to_owned(),
            })
        };
        // Unprepared, but unreadable then: only its processes are waited for.
        // Not known counts as no: then everything below is asked.
        if unprepared_in_this_boot(self.context, uid).unwrap_or(false) {
            return self.rebuild_and_finish(uid, None);
        }
        if self.note_orphan(uid, view, Duration::ZERO) < self.grace() {
            return kept(
                "its record cannot be read and its claim no longer exists; waiting for an unprepare",
            );
        }
        let Some(running) = &view.running else {
            return kept(
                "its record cannot be read, and the kubelet did not report whether a pod still has its devices",
            );
        };
        // Without names the claim cannot be found among running pods. A running device that no
        // readable record explains may be its own.
        let known: BTreeSet<_> = others(records, uid)
            .map(|r| (&r.namespace, &r.name))
            .collect();
        if let Some(unknown) = running
            .iter()
            .find(|r| !known.contains(&(&r.namespace, &r.claim)))
        {
            return kept(&format!(
                "its record cannot be read, and a running pod has {} of claim {}/{}, which has no record",
                unknown.device, unknown.namespace, unknown.claim
            ));
        }
        self.rebuild_and_finish(uid, None)
    }

    fn grace(self) -> Duration {
        self.context.config.timing.orphan_grace
    }

    /// Notes that a claim looks orphaned in this round, and returns for how long it has, counted
    /// from `begin` at the earliest and only while a kubelet was connected.
    fn note_orphan(self, uid: &ClaimUid, view: &ClusterView, begin: Duration) -> Duration {
        let now = self.context.now();
        let mut orphans = lock(&self.context.orphans);
        let since = orphans.last.get(uid).copied().unwrap_or(now);
        orphans.now.insert(uid.clone(), since);
        view.kubelet_connected_since
            .map_or(Duration::ZERO, |connected| {
                now.saturating_sub(since.max(connected).max(begin))
            })
    }

    /// A claim is prepared once, and later pods are read from the API: to know its processes.
    fn follow_pods(
        self,
        record: &Record,
        claims: &BTreeMap<ClaimUid, Claim>,
    ) -> Result<Option<Event>, UnprepareCause> {
        let claim = claims
            .get(&record.uid)
            .filter(|claim| record.is_of(&claim.allocation));
        let Some(pods) = claim
            .map(|claim| &claim.pods)
            .filter(|pods| !pods.is_empty() && **pods != record.pods)
        else {
            return Ok(None);
        };
        let _claim_lock = self
            .context
            .lock_claim(&record.uid, self.context.briefly())?;
        // Prepared anew since the view was taken?
        if self.context.state.record(&record.uid)?.fine() != Some(record) {
            return Ok(None);
        }
        self.context.state.write_record(&Record {
            pods: pods.clone(),
            ..record.clone()
        })?;
        Ok(Some(Event::PodsChanged {
            claim: record.uid.clone(),
        }))
    }

    /// Makes a record again, and lets go at once what cannot stay.
    fn rebuild_and_finish(self, uid: &ClaimUid, claim: Option<&Claim>) -> Option<Event> {
        let done = match rebuild(self.context, uid, claim) {
            kept @ Some(Event::Kept { .. }) => {
                finish(self.context, uid, self.context.briefly()).or(kept)
            }
            // Its GPUs may be as another boot has left them.
            rebuilt @ Some(Event::Rebuilt { .. }) => {
                let done = restore(self.context, uid, Refresh::Missing, false);
                match Event::of(uid, done) {
                    Some(failed @ (Event::Failed { .. } | Event::Kept { .. })) => Some(failed),
                    _ => rebuilt,
                }
            }
            done => done,
        };
        if matches!(done, Some(Event::SetAside { .. })) {
            // Should the claim come back, its time as an orphan begins anew.
            let mut orphans = lock(&self.context.orphans);
            orphans.now.remove(uid);
        }
        done
    }

    /// Claims without a record that have a CDI file, or for which instances were made: of one that
    /// is still allocated here the record was lost and is made again; of others all is removed.
    fn check_lost(self, claims: &BTreeMap<ClaimUid, Claim>, view: &ClusterView) -> Vec<Event> {
        let lost = match self.without_record() {
            Ok(lost) => lost,
            Err(error) => return vec![Event::Failed { claim: None, error }],
        };
        let one = |uid: &ClaimUid| {
            if let Some(claim) = claims.get(uid) {
                return self.rebuild_and_finish(uid, Some(claim));
            }
            if self.note_orphan(uid, view, Duration::ZERO) < self.grace() {
                return None;
            }
            let rebuilt = self.rebuild_and_finish(uid, None);
            rebuilt.or_else(|| Event::of(uid, self.remove_stray_cdi(uid)))
        };
        lost.iter().filter_map(one).collect()
    }

    /// Claims without a record that have files, or for which instances were made.
    fn without_record(self) -> Result<BTreeSet<ClaimUid>, String> {
        let place = || self.context.parts.cdi.place();
        let files = self
            .context
            .parts
            .cdi
            .list()
            .map_err(|e| format!("the CDI folder {} cannot be read: {e}", place()))?;
        let metadata = self.context.parts.metadata.claims();
        let metadata =
            metadata.map_err(|e| format!("the folder of device metadata cannot be read: {e}"))?;
        let strays = Gpus::of(self.context).strays();
        let strays = strays.map_err(|e| chain(&e))?.into_keys();
        let mut lost: BTreeSet<ClaimUid> = strays.collect();
        lost.extend(
            files
                .iter()
                .filter_map(|file| claim_of_cdi_file(&self.context.config.driver, file)),
        );
        lost.extend(metadata);
        // Records are read after the files: a claim that is prepared meanwhile has its record by
        // now, as that is written before the CDI file.
        lost.retain(|uid| {
            self.context
                .state
                .record(uid)
                .is_ok_and(|record| record == Stored::Absent)
        });
        Ok(lost)
    }

    /// Returns whether there is any record, readable or not; also where that is not known.
    pub(crate) fn has_records(self) -> bool {
        self.context
            .state
            .records()
            .map_or(true, |records| !records.is_empty())
    }

    /// Returns whether there is a claim whose namespace and name no record says:
    /// [`ClusterView::claims`] must then have all claims of the cluster, since one that is missing
    /// there counts as gone.
    pub(crate) fn has_nameless_claims(self) -> Result<bool, String> {
        let records = self.context.state.records().map_err(|e| chain(&e))?;
        let is_unreadable = |record: &Arc<Stored<_>>| matches!(**record, Stored::Corrupt { .. });
        Ok(records.values().any(is_unreadable) || !self.without_record()?.is_empty())
    }

    fn remove_stray_cdi(self, uid: &ClaimUid) -> Result<Option<Event>, UnprepareCause> {
        let _claim_lock = self.context.lock_claim(uid, self.context.briefly())?;
        // Once more under the lock: a prepare may have begun since the claim was listed.
        if self.context.state.record(uid)? != Stored::Absent
            || !Gpus::of(self.context).strays_of(uid)?.is_empty()
        {
            return Ok(None);
        }
        Files::of(self.context).remove_cdi(uid)?;
        Ok(Some(Event::CdiRemoved {
            file: Files::of(self.context).cdi_name(uid),
        }))
    }
}
