//! Setting a cap, and seeing that it holds.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use divvy_claims::ClaimRef;
use divvy_host::HostRoot;
use divvy_model::{ClaimUid, GpuDriver, GpuError, GpuErrorCode, GpuUuid, lock};
use serde::Deserialize;

use super::ability::{CONTROLLERS, backend, controllers};
use super::claims::{CappedClaims, name};
use super::group::Group;
use super::ledger::Ledger;
use super::rounds::Repaired;

/// A question of the hook: a container of this claim's device is about to start.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Question {
    /// UID of the claim.
    pub(crate) claim: ClaimUid,
    /// Name of the CDI device.
    pub(crate) device: String,
    /// The process that becomes the container, as the node counts processes.
    pub(crate) pid: u32,
}

/// A share without its cap: its container does not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Uncapped {
    /// The claim, where its record is known.
    pub(crate) claim: Option<ClaimRef>,
    /// The reason, for people.
    pub(crate) why: String,
    /// Returns true if asking again may help: a call failed. Otherwise something has to be changed.
    pub(crate) failed: bool,
}

/// The setter of caps.
pub(crate) struct Capper {
    pub(super) claims: Arc<dyn CappedClaims>,
    pub(super) gpus: Arc<dyn GpuDriver>,
    pub(super) host: HostRoot,
    /// Root of the hierarchy of control groups, as NVML in this process sees it.
    pub(super) groups: PathBuf,
    pub(super) ledger: Ledger,
    /// Held from reading a pod's shares to the end: two containers of a pod may start at once.
    pub(super) one: Mutex<()>,
    /// Notes that were made again since the last round.
    pub(super) rebuilt: Mutex<Vec<Repaired>>,
}

impl Capper {
    pub(crate) fn new(
        claims: Arc<dyn CappedClaims>,
        gpus: Arc<dyn GpuDriver>,
        host: HostRoot,
        groups: PathBuf,
        ledger: &Path,
    ) -> Self {
        Self {
            claims,
            gpus,
            host,
            groups,
            ledger: Ledger::new(ledger),
            one: Mutex::default(),
            rebuilt: Mutex::default(),
        }
    }

    /// Caps the memory of the pod of a container that is about to start, for one of its devices.
    /// May block.
    pub(crate) fn cap(&self, asked: &Question) -> Result<(), Uncapped> {
        // Phase 1: the claim's record says which GPU, and how much of it.
        let refused = |claim: Option<&ClaimRef>, why: String| Uncapped {
            claim: claim.cloned(),
            why,
            failed: false,
        };
        let share = self.claims.share(&asked.claim, &asked.device);
        let share = share.map_err(|why| Uncapped {
            claim: None,
            why,
            failed: true,
        })?;
        let share = share.ok_or_else(|| {
            let why = format!(
                "claim {} has no share {} on this node that is capped (was it unprepared?)",
                asked.claim.as_str(),
                asked.device
            );
            refused(None, why)
        })?;
        let refused = |why: String| refused(Some(&share.claim), why);
        let failed = |what: &str, error: &dyn std::error::Error| Uncapped {
            claim: Some(share.claim.clone()),
            why: format!("{what}: {}", crate::chain(error)),
            failed: true,
        };
        // Phase 2: the pod's group. The process is stopped before its program, in its final group.
        let group = self
            .group_of(asked.pid)
            .map_err(|error| failed("failed to read the container's control group", &error))?;
        let group = group.ok_or_else(|| {
            refused(format!(
                "process {} is in no pod's control group of version 2",
                asked.pid
            ))
        })?;
        let (pod, leaf) = (
            self.groups.join(&group.of_pod),
            self.groups.join(&group.leaf),
        );
        let call = |done: Result<(), GpuError>| {
            done.map_err(|error| failed(&advice(error.code, &pod), &error))
        };
        let Some(bytes) = share.bytes else {
            return self
                .uncap(&share.gpu, [&pod, &leaf], &call)
                .and_then(|done| done.map_err(refused));
        };
        let backend = self.backend_of(&pod).map_err(&refused)?;
        // Phase 3: the share is noted before the cap is set. A plugin that is killed in between
        // leaves a cap that is too small at worst, and the hook asks again.
        let _one = lock(&self.one);
        let unreadable = |error| failed("the caps of its pod are not known", &error);
        let _alone = self.ledger.lock().map_err(unreadable)?;
        let caps = self.noted(&group.pod, &group.of_pod).map_err(unreadable)?;
        let name = name(&asked.claim, &asked.device);
        let mut caps = caps.with(&share.gpu, name, bytes);
        caps.group.clone_from(&group.of_pod);
        let unwritten = |error| failed("the caps of its pod cannot be noted", &error);
        self.ledger.write(&group.pod, &caps).map_err(unwritten)?;
        // Phase 4: the cap of the pod, the sum of its shares.
        let sum = caps.sum(&share.gpu);
        call(self.gpus.set_memory_limit(&share.gpu, &pod, Some(sum)))?;
        // Phase 5: the container's own group must say the same.
        self.set_at_leaf(&share.gpu, backend, (&pod, &leaf), sum, &call)?;
        if self.holds(&share.gpu, &leaf, sum, &call)? {
            return Ok(());
        }
        Err(refused(format!(
            "the driver says another limit for {} than the {sum} bytes that were set for its pod",
            leaf.display()
        )))
    }

    /// Sets the limit of a container's own group where the pod's does not show through it: an entry
    /// that an earlier group left at the same address would come before the pod's. With `dmem` each
    /// group has a limit of its own, which is what the program sees as the memory of its GPU.
    fn set_at_leaf(
        &self,
        gpu: &GpuUuid,
        backend: &str,
        (pod, leaf): (&Path, &Path),
        sum: u64,
        call: &dyn Fn(Result<(), GpuError>) -> Result<(), Uncapped>,
    ) -> Result<(), Uncapped> {
        let own_limit = controllers(leaf)
            .is_ok_and(|list| list.is_some_and(|list| list.iter().any(|c| c == "dmem")));
        if backend == "dmem" && own_limit {
            call(self.gpus.set_memory_limit(gpu, leaf, Some(sum)))?;
        }
        if backend == "misc" {
            // A stale entry may have the very amount: another one of the pod shows through the
            // container's group only if there is none.
            let other = sum.saturating_add(PROBE);
            call(self.gpus.set_memory_limit(gpu, pod, Some(other)))?;
            let is_hidden = !self.holds(gpu, leaf, other, call)?;
            call(self.gpus.set_memory_limit(gpu, pod, Some(sum)))?;
            if is_hidden {
                call(self.gpus.set_memory_limit(gpu, leaf, Some(sum)))?;
            }
        }
        Ok(())
    }

    /// Returns the controller that caps the memory of a group, if it is switched on there: a limit
    /// of a group without it can be read back and never binds.
    fn backend_of(&self, pod: &Path) -> Result<&'static str, String> {
        let unreadable = |error| crate::chain(&error);
        let wanted = backend(&self.groups).map_err(unreadable)?.ok_or_else(|| {
            let all = CONTROLLERS.join(" nor ");
            format!("the node's control groups have neither {all}")
        })?;
        let list = controllers(pod).map_err(unreadable)?;
        let list = list.ok_or_else(|| format!("{} is no control group", pod.display()))?;
        if list.iter().any(|name| name == wanted) {
            Ok(wanted)
        } else {
            Err(format!(
                "the controller {wanted} is not switched on for {} (see cgroup.subtree_control of the group above it)",
                pod.display()
            ))
        }
    }

    /// Returns whether the driver says this limit for a group.
    fn holds(
        &self,
        gpu: &GpuUuid,
        group: &Path,
        bytes: u64,
        call: &dyn Fn(Result<(), GpuError>) -> Result<(), Uncapped>,
    ) -> Result<bool, Uncapped> {
        match self.gpus.memory_limit(gpu, group) {
            Ok(limit) => Ok(is_limit(limit.hard, bytes)),
            // No entry at all.
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => Ok(false),
            Err(error) => call(Err(error)).map(|()| false),
        }
    }

    /// Returns the control group of a process; `None` for one of no pod.
    pub(super) fn group_of(&self, pid: u32) -> std::io::Result<Option<Group>> {
        let path = self.host.see(Path::new(&format!("/proc/{pid}/cgroup")));
        Ok(Group::of(&fs_err::read_to_string(path)?))
    }

    /// Clears limits that earlier groups left at the addresses of these, of a whole GPU: they would
    /// hold a program that has all of it to the size of a former share. The inner `Err` says what
    /// cannot be cleared.
    fn uncap(
        &self,
        gpu: &GpuUuid,
        groups: [&Path; 2],
        call: &dyn Fn(Result<(), GpuError>) -> Result<(), Uncapped>,
    ) -> Result<Result<(), String>, Uncapped> {
        let limit = |group: &Path| match self.gpus.memory_limit(gpu, group) {
            Ok(limit) => Ok(limit.hard),
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => Ok(None),
            Err(error) => call(Err(error)).map(|()| None),
        };
        for group in groups {
            if limit(group)?.is_some() {
                call(self.gpus.set_memory_limit(gpu, group, None))?;
            }
        }
        let [_, leaf] = groups;
        Ok(match limit(leaf)? {
            None => Ok(()),
            Some(bytes) => Err(format!(
                "the driver says a limit of {bytes} bytes for {}, left by an earlier control group, and does not clear it",
                leaf.display()
            )),
        })
    }
}

/// Difference between a cap and the one that stands for it while a hidden one is looked for.
const PROBE: u64 = 8 << 20;
/// Bound on what the kernel may round a limit down by: its largest page.
const ROUNDED: u64 = 2 << 20;

/// Returns whether a limit is the one that was set.
pub(super) fn is_limit(found: Option<u64>, set: u64) -> bool {
    found.is_some_and(|found| found <= set && set - found < ROUNDED)
}

/// Explains NVML's answer to a limit that is set.
fn advice(code: GpuErrorCode, group: &Path) -> String {
    let group = group.display();
    match code {
        GpuErrorCode::NOT_SUPPORTED => {
            format!(
                "the driver caps no memory of {group} (MIG mode is on, or its kernel module has caps switched off)"
            )
        }
        GpuErrorCode::NOT_FOUND => format!("{group} lacks the controller dmem"),
        GpuErrorCode::OPERATING_SYSTEM => format!("{group} is gone"),
        GpuErrorCode::NO_PERMISSION => {
            format!("divvy's node plugin may not limit {group} (it has to run as root)")
        }
        GpuErrorCode::INVALID_ARGUMENT => {
            format!("the programs in {group} use more memory than it may have from now on")
        }
        _ => format!("failed to cap the memory of {group}"),
    }
}
