//! Setting a cap, and seeing that it holds.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use divvy_claims::ClaimRef;
use divvy_host::HostRoot;
use divvy_model::{ClaimUid, GpuDriver, GpuError, GpuErrorCode, GpuUuid};
use serde::Deserialize;

use super::ability::{CONTROLLERS, backend, controllers};
use super::claims::{CappedClaims, name};
use super::entries::is_limit;
use super::group::Group;
use super::ledger::Ledger;
use super::note::User;
use super::rounds::Repaired;
use crate::host::pods::of_node;

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

/// A cap that is not set.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("a pod's note cannot be read, or not be written")]
    Notes(#[from] std::io::Error),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error("the claims of the node are not known: {0}")]
    Claims(String),
    #[error(
        "the driver says another limit for {} than the {expected} bytes that were set",
        leaf.display()
    )]
    Hidden { leaf: PathBuf, expected: u64 },
}

/// The setter of caps.
pub(crate) struct Capper {
    pub(super) claims: Arc<dyn CappedClaims>,
    pub(super) gpus: Arc<dyn GpuDriver>,
    pub(super) host: HostRoot,
    /// Root of the hierarchy of control groups, as NVML in this process sees it.
    pub(super) groups: PathBuf,
    pub(super) ledger: Ledger,
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
        let advised = |error: GpuError| failed(&advice(error.code, &pod), &error);
        let Some(bytes) = share.bytes else {
            let done = self.uncap(&share.gpu, [&pod, &leaf]);
            return done.map_err(advised)?.map_err(refused);
        };
        let backend = self.backend_of(&pod).map_err(&refused)?;
        let name = name(&asked.claim, &asked.device);
        let done = self.hold(&share.gpu, (name, bytes), &group, backend);
        done.map_err(|trouble| match trouble {
            Trouble::Gpu(error) => advised(error),
            Trouble::Hidden { .. } => refused(trouble.to_string()),
            Trouble::Notes(_) | Trouble::Claims(_) => {
                failed("the caps of its pod are not known", &trouble)
            }
        })
    }

    /// Holds the pod of a container to the sum of its shares of a GPU, with this one.
    fn hold(
        &self,
        gpu: &GpuUuid,
        (name, bytes): (String, u64),
        group: &Group,
        backend: &str,
    ) -> Result<(), Trouble> {
        // Two containers of a pod may start at once. A GPU that hangs keeps its own waiting, and
        // none of the others: the lock of the notes is free meanwhile.
        let _alone = self.ledger.lock_gpu(gpu)?;
        // Phase 1: the share is noted before the cap is set. A plugin that is killed in between
        // leaves a cap that is too small at worst, and the hook asks again.
        let caps = self.noted(&group.pod, &group.of_pod)?;
        self.settled(gpu, &group.pod, caps)?;
        let caps = self.edit(&group.pod, &group.of_pod, |caps| {
            self.without_gone(gpu, caps.with(gpu, name.clone(), bytes))
                .0
        })?;
        // Phase 2: the cap of the pod.
        let entries = self.set_entries(gpu, &caps, true)?;
        // Phase 3: the container's own group must say the same.
        let entries = if backend == "misc" {
            let known = caps.user(gpu, &group.leaf);
            let paths = (&*group.of_pod, &*group.leaf);
            let hides = known.is_some_and(|user| user.hides)
                || self.is_hidden(gpu, paths, entries.of(&group.of_pod))?;
            let shares = [name].into();
            let caps = self.edit(&group.pod, &group.of_pod, |mut caps| {
                caps.add_user(gpu, &group.leaf, User { hides, shares });
                caps
            })?;
            self.set_entries(gpu, &caps, false)?
        } else {
            self.set_own(gpu, &group.leaf, entries.of(&group.leaf))?;
            entries
        };
        let (expected, leaf) = (entries.of(&group.leaf), self.groups.join(&group.leaf));
        if is_limit(self.limit(gpu, &leaf)?, expected) {
            Ok(())
        } else {
            Err(Trouble::Hidden { leaf, expected })
        }
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

    /// Returns the control group of a process; `None` for one of no pod.
    pub(super) fn group_of(&self, pid: u32) -> std::io::Result<Option<Group>> {
        let found = Group::all(&self.host.cgroups(pid)?);
        Ok(of_node(&self.host, found, |group| &group.pod))
    }

    /// Clears limits that earlier groups left at the addresses of these, of a whole GPU: they would
    /// hold a program that has all of it to the size of a former share. The inner `Err` says what
    /// cannot be cleared.
    fn uncap(&self, gpu: &GpuUuid, groups: [&Path; 2]) -> Result<Result<(), String>, GpuError> {
        for group in groups {
            if self.limit(gpu, group)?.is_some() {
                self.gpus.set_memory_limit(gpu, group, None)?;
            }
        }
        let [_, leaf] = groups;
        Ok(match self.limit(gpu, leaf)? {
            None => Ok(()),
            Some(bytes) => Err(format!(
                "the driver says a limit of {bytes} bytes for {}, left by an earlier control group, and does not clear it",
                leaf.display()
            )),
        })
    }
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
