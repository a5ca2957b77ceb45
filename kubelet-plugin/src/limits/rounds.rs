//! The rounds: what was noted is compared with what the driver says, and with who uses the GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use divvy_claims::ClaimRef;
use divvy_model::{GpuError, GpuErrorCode, GpuUuid, lock};
use divvy_usage::pod_of_cgroup;

use super::cap::{Capper, is_limit};
use super::claims::Held;
use super::group::Group;
use super::ledger::{Noted, PodCaps};

/// Depth below the root of the hierarchy to which a pod's group is looked for: that of a kubelet in
/// a container under systemd.
const DEEPEST: u32 = 7;

/// A fault that a round has put right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repair {
    /// The driver had forgotten the cap: it was loaded anew, or no program had the GPU open.
    Restored,
    /// A container ran without its cap: its runtime has not called the hook.
    Late,
    /// The note of the pod could not be read, and was made again.
    Rebuilt,
}

impl Repair {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Restored, Self::Late, Self::Rebuilt];

    /// Returns the reason of its Event.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Self::Restored => "limit-restored",
            Self::Late => "memory-capped-late",
            Self::Rebuilt => "limits-rebuilt",
        }
    }

    /// Returns it for the people whose claim it is about.
    pub(crate) fn note(self, bytes: u64) -> String {
        let mib = bytes >> 20;
        match self {
            Self::Restored => format!(
                "The driver had forgotten that the memory of a pod of this claim is capped at {mib} MiB (it was loaded again, or no program had the GPU open); it is capped again. What was allocated meanwhile is not counted"
            ),
            Self::Late => format!(
                "A container of this claim ran without a cap of its memory, since its container runtime had not called divvy's program (is CDI switched on in the runtime?); the pod is capped at {mib} MiB now. What it allocated before is not counted"
            ),
            Self::Rebuilt => format!(
                "The node plugin's note of the shares of a pod of this claim could not be read and was made again; the pod stays capped at {mib} MiB"
            ),
        }
    }
}

/// A cap that a round has set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Repaired {
    pub(crate) what: Repair,
    pub(crate) pod: String,
    pub(crate) gpu: GpuUuid,
    pub(crate) bytes: u64,
    /// The claims whose shares it is of.
    pub(crate) claims: Vec<ClaimRef>,
}

/// The results of a round.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) repaired: Vec<Repaired>,
    pub(crate) errors: Vec<String>,
}

/// The capped shares that claims have.
struct Shares(Vec<(Held, u64)>);

impl Shares {
    fn of_pod<'s>(&'s self, pod: &'s str) -> impl Iterator<Item = &'s (Held, u64)> {
        let has = move |held: &Held| held.pods.iter().any(|of| of.uid == pod);
        self.0.iter().filter(move |(held, _)| has(held))
    }

    /// Returns a pod's note with the shares that records say it has.
    fn added_to(&self, caps: PodCaps, pod: &str) -> PodCaps {
        self.of_pod(pod).fold(caps, |caps, (held, bytes)| {
            caps.with(&held.gpu, held.name(), *bytes)
        })
    }

    fn repaired(&self, what: Repair, pod: &str, caps: &PodCaps, gpu: &GpuUuid) -> Repaired {
        Repaired {
            what,
            pod: pod.to_owned(),
            gpu: gpu.clone(),
            bytes: caps.sum(gpu),
            claims: self.claims(caps, gpu),
        }
    }

    /// Returns the claims that a pod's note names.
    fn claims(&self, caps: &PodCaps, gpu: &GpuUuid) -> Vec<ClaimRef> {
        let noted: BTreeSet<&str> = caps.claims(gpu).collect();
        let of = |(held, _): &(Held, u64)| {
            let claim = &held.claim;
            noted.contains(claim.uid.as_str()).then(|| claim.clone())
        };
        let found: BTreeSet<ClaimRef> = self.0.iter().filter_map(of).collect();
        found.into_iter().collect()
    }
}

impl Capper {
    fn shares(&self) -> Result<Shares, String> {
        let held = self.claims.held()?.into_iter();
        let capped = held.filter_map(|held| {
            let bytes = held.bytes?;
            Some((held, bytes))
        });
        Ok(Shares(capped.collect()))
    }

    /// Returns whether any claim here calls for a cap, or any pod is noted.
    pub(crate) fn is_needed(&self) -> bool {
        // A record that cannot be read may be of such a claim.
        self.claims.held().map_or(true, |held| !held.is_empty())
            || self.ledger.pods().map_or(true, |pods| !pods.is_empty())
    }

    /// Sets caps again that the driver has forgotten, sets those that a container has not called
    /// for, and forgets pods that are gone. Stops where `is_there` says that the driver is not
    /// there any more.
    pub(crate) fn round(&self, is_there: &dyn Fn() -> bool) -> Round {
        let mut round = Round::default();
        let shares = match self.shares() {
            Ok(shares) => shares,
            Err(error) => {
                round.errors.push(error);
                Shares(Vec::new())
            }
        };
        // Phase 1: what is noted, pod by pod. Each pod under the locks for itself: a hook waits for
        // them.
        let pods = self.ledger.pods().unwrap_or_else(|error| {
            round.errors.push(crate::chain(&error));
            Vec::new()
        });
        for pod in pods.into_iter().take_while(|_| is_there()) {
            let _one = lock(&self.one);
            if let Err(error) = self.round_of(&pod, &shares, &mut round.repaired) {
                round.errors.push(format!("pod {pod}: {error}"));
            }
        }
        // Phase 2: who uses the GPUs, and is noted nowhere.
        let gpus: BTreeSet<&GpuUuid> = shares.0.iter().map(|(held, _)| &held.gpu).collect();
        for gpu in gpus.into_iter().take_while(|_| is_there()) {
            if let Err(error) = self.cap_late(gpu, &shares, &mut round.repaired) {
                round.errors.push(format!("{gpu}: {error}"));
            }
        }
        round.repaired.append(&mut lock(&self.rebuilt));
        round
    }

    fn round_of(
        &self,
        pod: &str,
        shares: &Shares,
        repaired: &mut Vec<Repaired>,
    ) -> Result<(), String> {
        let _alone = self.ledger.lock().map_err(|e| crate::chain(&e))?;
        let caps = match self.ledger.read(pod).map_err(|e| crate::chain(&e))? {
            Noted::Nothing => return Ok(()),
            Noted::Shares(caps) => caps,
            Noted::Torn(why) => match find_pod(&self.groups, pod) {
                Some(group) => self.rebuild(pod, &group, &why)?,
                None => return self.ledger.remove(pod).map_err(|e| crate::chain(&e)),
            },
        };
        let group = self.groups.join(&caps.group);
        if !group.exists() {
            return self.ledger.remove(pod).map_err(|e| crate::chain(&e));
        }
        let (caps, what) = self.completed(pod, caps, shares)?;
        // A GPU that does not answer keeps no other from its cap.
        let mut failed = None;
        for (gpu, bytes) in caps.sums() {
            match self.set_again(gpu, &group, bytes) {
                Ok(false) => {}
                Ok(true) => repaired.push(shares.repaired(what, pod, &caps, gpu)),
                Err(error) => failed = Some(crate::chain(&error)),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Adds to a note that was made again what records say by now. Returns also the fault that a
    /// cap which is set then puts right.
    fn completed(
        &self,
        pod: &str,
        caps: PodCaps,
        shares: &Shares,
    ) -> Result<(PodCaps, Repair), String> {
        if !caps.of_records {
            return Ok((caps, Repair::Restored));
        }
        let known = shares.added_to(caps.clone(), pod);
        if known == caps {
            return Ok((caps, Repair::Restored));
        }
        self.ledger
            .write(pod, &known)
            .map_err(|e| crate::chain(&e))?;
        Ok((known, Repair::Rebuilt))
    }

    /// Sets a cap unless it is there. Returns whether it was not.
    fn set_again(&self, gpu: &GpuUuid, group: &Path, bytes: u64) -> Result<bool, GpuError> {
        if is_limit(self.limit(gpu, group)?, bytes) {
            return Ok(false);
        }
        self.gpus.set_memory_limit(gpu, group, Some(bytes))?;
        Ok(true)
    }

    /// Returns what the driver says of a group; `None` also where it has no entry.
    fn limit(&self, gpu: &GpuUuid, group: &Path) -> Result<Option<u64>, GpuError> {
        match self.gpus.memory_limit(gpu, group) {
            Ok(limit) => Ok(limit.hard),
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Caps pods that use a GPU and have called for no cap: their runtime has skipped the hook. A
    /// pod that is noted has called, if not yet for all of its shares.
    fn cap_late(
        &self,
        gpu: &GpuUuid,
        shares: &Shares,
        repaired: &mut Vec<Repaired>,
    ) -> Result<(), String> {
        let processes = match self.gpus.processes(gpu) {
            Ok(processes) => processes,
            // Some systems list none, ever.
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => return Ok(()),
            Err(error) => return Err(crate::chain(&error)),
        };
        // A process that has ended meanwhile has no group.
        let groups = processes.iter().filter_map(|p| self.group_of(p.pid).ok()?);
        let mut pods = BTreeMap::<String, BTreeMap<String, Group>>::new();
        for group in groups {
            let leaves = pods.entry(group.pod.clone()).or_default();
            leaves.insert(group.leaf.clone(), group);
        }
        for (pod, leaves) in pods {
            let Some(group) = leaves.values().next() else {
                continue;
            };
            let own: Vec<_> = shares
                .of_pod(&pod)
                .filter(|(held, _)| held.gpu == *gpu && held.prepared)
                .collect();
            if own.is_empty() {
                continue;
            }
            // Locked, then read: the hook of this very pod may be at it.
            let _one = lock(&self.one);
            let failed = |error: std::io::Error| crate::chain(&error);
            let _alone = self.ledger.lock().map_err(failed)?;
            let noted = self.noted(&pod, &group.of_pod).map_err(failed)?;
            if noted.has(gpu) {
                continue;
            }
            let add =
                |caps: PodCaps, (held, bytes): &&(Held, u64)| caps.with(gpu, held.name(), *bytes);
            let mut caps = own.iter().fold(noted, add);
            caps.group.clone_from(&group.of_pod);
            self.ledger.write(&pod, &caps).map_err(failed)?;
            let (sum, folder) = (caps.sum(gpu), self.groups.join(&group.of_pod));
            let failed = |error: GpuError| crate::chain(&error);
            let set = |group: &Path| self.gpus.set_memory_limit(gpu, group, Some(sum));
            set(&folder).map_err(failed)?;
            repaired.push(shares.repaired(Repair::Late, &pod, &caps, gpu));
            // A limit that an earlier group left at the address of a container's hides the pod's. A
            // container that has ended meanwhile has no group.
            for leaf in leaves.keys().map(|leaf| self.groups.join(leaf)) {
                if leaf.exists() && !is_limit(self.limit(gpu, &leaf).map_err(failed)?, sum) {
                    set(&leaf).map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Returns what is noted of a pod; a note that cannot be read is set aside, and made again. The
    /// locks are held.
    pub(super) fn noted(&self, pod: &str, of_pod: &str) -> std::io::Result<PodCaps> {
        match self.ledger.read(pod)? {
            Noted::Nothing => Ok(PodCaps::default()),
            Noted::Shares(caps) => Ok(caps),
            Noted::Torn(why) => self
                .rebuild(pod, of_pod, &why)
                .map_err(std::io::Error::other),
        }
    }

    /// Makes the note of a pod again: of the shares of the claims that were prepared for it, and of
    /// what the driver holds the pod to beyond that, which stands for shares that are not known any
    /// more. The cap of a pod that runs never falls by it.
    fn rebuild(&self, pod: &str, of_pod: &str, why: &str) -> Result<PodCaps, String> {
        let shares = self.shares()?;
        let mut caps = shares.added_to(PodCaps::default(), pod);
        of_pod.clone_into(&mut caps.group);
        caps.of_records = true;
        let folder = self.groups.join(of_pod);
        let gpus: BTreeSet<GpuUuid> = shares.0.iter().map(|(held, _)| held.gpu.clone()).collect();
        for gpu in gpus {
            let limit = self.limit(&gpu, &folder).map_err(|e| crate::chain(&e))?;
            let more = limit.unwrap_or(0).saturating_sub(caps.sum(&gpu));
            if more > 0 {
                caps = caps.with_unknown(&gpu, more);
            }
        }
        tracing::error!(
            pod.uid = pod,
            why,
            "the note of a pod's capped shares cannot be read; it is set aside and made again"
        );
        let failed = |error: std::io::Error| crate::chain(&error);
        self.ledger.set_aside(pod).map_err(failed)?;
        self.ledger.write(pod, &caps).map_err(failed)?;
        // The next round reports it: here a container may wait.
        let all = caps.sums().map(|(gpu, _)| gpu);
        let all = all.map(|gpu| shares.repaired(Repair::Rebuilt, pod, &caps, gpu));
        lock(&self.rebuilt).extend(all);
        Ok(caps)
    }
}

/// Returns the path of a pod's group below the root of the hierarchy.
fn find_pod(root: &Path, pod: &str) -> Option<String> {
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
