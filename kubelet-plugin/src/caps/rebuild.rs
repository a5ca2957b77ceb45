//! Notes of pods, read and changed, and made again where they cannot be read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use divvy_model::{GpuUuid, lock};
use divvy_usage::pod_of_cgroup;

use super::cap::{Capper, Trouble};
use super::ledger::Noted;
use super::note::{PodCaps, User};
use super::rounds::Repair;

/// Depth below the root of the hierarchy to which a pod's group is looked for: that of a kubelet in
/// a container under systemd.
const DEEPEST: u32 = 7;

/// Bound on the groups of a pod that are looked at: containers can make more.
const MOST_GROUPS: usize = 256;

impl Capper {
    /// Returns what is noted of a pod; a note that cannot be read is set aside, and made again.
    pub(super) fn noted(&self, pod: &str, of_pod: &str) -> Result<PodCaps, Trouble> {
        let _alone = self.ledger.lock()?;
        self.read(pod, of_pod)
    }

    /// Changes the note of a pod, and returns it as it is then.
    pub(super) fn edit(
        &self,
        pod: &str,
        of_pod: &str,
        change: impl FnOnce(PodCaps) -> PodCaps,
    ) -> Result<PodCaps, Trouble> {
        let _alone = self.ledger.lock()?;
        let before = self.read(pod, of_pod)?;
        let mut caps = change(before.clone());
        of_pod.clone_into(&mut caps.group);
        if caps != before {
            self.ledger.write(pod, &caps)?;
        }
        Ok(caps)
    }

    /// Reads a note. The lock of the notes is held.
    fn read(&self, pod: &str, of_pod: &str) -> Result<PodCaps, Trouble> {
        match self.ledger.read(pod)? {
            Noted::Nothing => Ok(PodCaps::default()),
            Noted::Shares(caps) => Ok(caps),
            Noted::Torn(why) => self.rebuild(pod, of_pod, &why),
        }
    }

    /// Forgets groups of a note that are gone, since others may have what they had. Returns also
    /// whether there were any.
    pub(super) fn without_gone(&self, gpu: &GpuUuid, mut caps: PodCaps) -> (PodCaps, bool) {
        let gone = caps.retain_users(gpu, |path| self.groups.join(path).exists());
        (caps, gone)
    }

    /// Makes the note of a pod again, of the shares of the claims that were prepared for it. The
    /// lock of the notes is held. The limits that the driver has are asked for GPU by GPU
    /// ([`Self::settled`]).
    pub(super) fn rebuild(&self, pod: &str, of_pod: &str, why: &str) -> Result<PodCaps, Trouble> {
        let mut caps = self.shares()?.added_to(PodCaps::default(), pod);
        of_pod.clone_into(&mut caps.group);
        caps.of_records = true;
        tracing::error!(
            pod.uid = pod,
            why,
            "the note of a pod's capped shares cannot be read; it is set aside and made again"
        );
        self.ledger.set_aside(pod)?;
        self.ledger.write(pod, &caps)?;
        Ok(caps)
    }

    /// Adds to a note that was made again what the driver holds the pod to beyond it, which stands
    /// for shares that are not known any more: the cap of a pod that runs never falls. The lock of
    /// the GPU is held.
    pub(super) fn settled(
        &self,
        gpu: &GpuUuid,
        pod: &str,
        caps: PodCaps,
    ) -> Result<PodCaps, Trouble> {
        if !caps.is_unsettled(gpu) {
            return Ok(caps);
        }
        // Phase 1: the pod's own limit, and those that may hide it. Of a group without a program
        // on the GPU it is not known whose limit it is: an earlier group may have left it.
        let folder = self.groups.join(&caps.group);
        let own = self.limit(gpu, &folder)?;
        let mut held = own.unwrap_or(0);
        let mut users = BTreeMap::new();
        if let Some(own) = own.filter(|_| self.lingers().unwrap_or(false)) {
            let running = self.users(gpu)?.remove(pod).unwrap_or_default();
            for leaf in below(&self.groups, &caps.group) {
                let hides = self.is_hidden(gpu, (&caps.group, &leaf), own)?;
                if hides && running.contains_key(&leaf) {
                    let more = self.limit(gpu, &self.groups.join(&leaf))?;
                    held = held.saturating_add(more.unwrap_or(0));
                }
                users.insert(leaf, hides);
            }
        }
        // Phase 2: the note.
        let more = held.saturating_sub(caps.sum(gpu));
        let group = caps.group.clone();
        let caps = self.edit(pod, &group, |mut caps| {
            if more > 0 {
                caps = caps.with_unknown(gpu, more);
            }
            for (leaf, hides) in users {
                let shares = caps.shares_of(gpu, "").0;
                caps.add_user(gpu, &leaf, User { hides, shares });
            }
            caps.settle(gpu);
            caps
        })?;
        // The next round reports it: here a container may wait.
        if caps.has(gpu) {
            let repaired = self.shares()?.repaired(Repair::Rebuilt, pod, &caps, gpu);
            lock(&self.rebuilt).push(repaired);
        }
        Ok(caps)
    }
}

/// Returns the paths of the groups below a pod's, the nearest first.
fn below(root: &Path, pod: &str) -> Vec<String> {
    let mut found = vec![pod.to_owned()];
    let mut next = 0;
    while let Some(above) = found.get(next).cloned() {
        next += 1;
        let entries = fs_err::read_dir(root.join(&above)).into_iter().flatten();
        for entry in entries.flatten() {
            let is_group = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let name = entry.file_name();
            if let (true, Some(name)) = (is_group && found.len() <= MOST_GROUPS, name.to_str()) {
                found.push(format!("{above}/{name}"));
            }
        }
    }
    found.split_off(1)
}

/// Returns the path of a pod's group below the root of the hierarchy.
pub(super) fn find_pod(root: &Path, pod: &str) -> Option<String> {
    let mut level = vec![PathBuf::new()];
    for _ in 0..DEEPEST {
        let mut next = Vec::new();
        for above in level {
            let Ok(entries) = fs_err::read_dir(root.join(&above)) else {
                continue;
            };
            for entry in entries.flatten() {
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                let path = above.join(entry.file_name());
                if entry
                    .file_name()
                    .to_str()
                    .and_then(pod_of_cgroup)
                    .as_deref()
                    == Some(pod)
                {
                    return path.to_str().map(str::to_owned);
                }
                next.push(path);
            }
        }
        level = next;
    }
    None
}
