//! Pods whose programs use a GPU without the cap that they should have.

use std::collections::BTreeMap;

use divvy_model::{GpuError, GpuErrorCode, GpuUuid};

use super::cap::{Capper, Trouble};
use super::claims::Held;
use super::entries::is_limit;
use super::group::Group;
use super::ledger::Noted;
use super::note::{PodCaps, User};
use super::rounds::{Repair, Repaired, Round, Shares, is_silent};

impl Capper {
    /// Caps pods that use a GPU and have called for no cap: their runtime has skipped the hook. A
    /// pod that is noted has called; groups of it that have not, or that a container has made
    /// itself, may lie at the address of an earlier group whose limit hides that of the pod.
    pub(super) fn cap_late(&self, gpu: &GpuUuid, shares: &Shares, round: &mut Round) {
        let pods = self.users(gpu).unwrap_or_else(|error| {
            round
                .errors
                .push(format!("{gpu}: {}", crate::chain(&error)));
            BTreeMap::new()
        });
        for (pod, groups) in pods {
            match self.cap_users(gpu, &pod, &groups, shares) {
                Ok(repaired) => round.repaired.extend(repaired),
                Err(error) => {
                    round
                        .errors
                        .push(format!("pod {pod}: {}", crate::chain(&error)));
                    if is_silent(&error) {
                        return;
                    }
                }
            }
        }
    }

    /// Caps a pod whose processes in these groups use a GPU. Returns what was put right.
    fn cap_users(
        &self,
        gpu: &GpuUuid,
        pod: &str,
        groups: &BTreeMap<String, Group>,
        shares: &Shares,
    ) -> Result<Option<Repaired>, Trouble> {
        let Some(group) = groups.values().next() else {
            return Ok(None);
        };
        let of_gpu = |(held, _): &&(Held, u64)| held.gpu == *gpu && held.prepared;
        let own: Vec<_> = shares.of_pod(pod).filter(of_gpu).collect();
        // Locked, then read: the hook of this very pod may be at it.
        let _alone = self.ledger.lock_gpu(gpu)?;
        let mut caps = match self.ledger.read(pod)? {
            Noted::Nothing if own.is_empty() => return Ok(None),
            _ => self.noted(pod, &group.of_pod)?,
        };
        // Phase 1: the shares of a pod that has called for none.
        let is_late = !caps.has(gpu);
        if is_late {
            if own.is_empty() {
                return Ok(None);
            }
            caps = self.edit(pod, &group.of_pod, |caps| {
                let add = |caps: PodCaps, (held, bytes): &&(Held, u64)| {
                    caps.with(gpu, held.name(), *bytes)
                };
                own.iter().fold(caps, add)
            })?;
        }
        let entries = self.set_entries(gpu, &caps, is_late)?;
        // Phase 2: its groups. A container that has ended meanwhile has none.
        let leaves = groups.keys();
        let leaves = leaves.filter(|leaf| self.groups.join(leaf).exists());
        let mut what = is_late.then_some(Repair::Late);
        if self.lingers()? {
            let pool = entries.of(&caps.group);
            for leaf in leaves {
                let (next, found) = self.look_at(gpu, (pod, leaf), caps, pool)?;
                (caps, what) = (next, what.or(found));
            }
            self.set_entries(gpu, &caps, false)?;
        } else if is_late {
            for leaf in leaves {
                self.set_own(gpu, leaf, entries.of(leaf))?;
            }
        }
        Ok(what.map(|what| shares.repaired(what, pod, &caps, gpu)))
    }

    /// Looks at a group of a noted pod that uses a GPU, and notes it. Returns also the fault, if a
    /// limit hides that of the pod, which has these bytes.
    fn look_at(
        &self,
        gpu: &GpuUuid,
        (pod, leaf): (&str, &str),
        caps: PodCaps,
        bytes: u64,
    ) -> Result<(PodCaps, Option<Repair>), Trouble> {
        let known = caps.user(gpu, leaf);
        let hides = match known {
            Some(user) if user.hides => true,
            Some(_) => !is_limit(self.limit(gpu, &self.groups.join(leaf))?, bytes),
            None => self.is_hidden(gpu, (&caps.group, leaf), bytes)?,
        };
        if known.is_some_and(|user| user.hides == hides) {
            return Ok((caps, None));
        }
        let (shares, is_within) = caps.shares_of(gpu, leaf);
        let called = is_within || known.is_some();
        let caps = self.edit(pod, &caps.group, |mut caps| {
            caps.add_user(gpu, leaf, User { hides, shares });
            caps
        })?;
        let what = if called { Repair::Hidden } else { Repair::Late };
        Ok((caps, hides.then_some(what)))
    }

    /// Returns the groups whose processes use a GPU, by pod and path.
    pub(super) fn users(
        &self,
        gpu: &GpuUuid,
    ) -> Result<BTreeMap<String, BTreeMap<String, Group>>, GpuError> {
        let mut pods = BTreeMap::<String, BTreeMap<String, Group>>::new();
        let processes = match self.gpus.processes(gpu) {
            Ok(processes) => processes,
            // Some systems list none, ever.
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => return Ok(pods),
            Err(error) => return Err(error),
        };
        // A process that has ended meanwhile has no group.
        for group in processes.iter().filter_map(|p| self.group_of(p.pid).ok()?) {
            let leaves = pods.entry(group.pod.clone()).or_default();
            leaves.insert(group.leaf.clone(), group);
        }
        Ok(pods)
    }
}
