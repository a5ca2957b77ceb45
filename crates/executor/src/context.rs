//! The things that every part of the executor works on: its settings, its ports, and the locks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use divvy_model::{ClaimUid, GpuUuid, Grant};

use crate::executor::{ExecutorConfig, Parts};
use crate::gpus::Instances;
use crate::owned::Owned;
use crate::reconcile::Orphans;
use crate::state::StateFiles;
use crate::{LockError, LockGuard, LockName};

/// Time for which reconcile and waiting prepares wait for a lock before they leave a claim to the
/// call that holds it.
pub(crate) const BRIEFLY: Duration = Duration::from_millis(100);

pub(crate) struct Context {
    pub(crate) config: ExecutorConfig,
    pub(crate) parts: Parts,
    pub(crate) state: StateFiles,
    /// Locks against other drivers of ours; `None`: there is no other.
    pub(crate) owned: Option<Owned>,
    pub(crate) orphans: Mutex<Orphans>,
    /// Grants to this process, for files of GPUs that are lost.
    pub(crate) grants: Mutex<BTreeMap<GpuUuid, Grant>>,
    /// GPU instances of others, as last seen.
    pub(crate) last_foreign: Mutex<Instances>,
}

impl Context {
    pub(crate) fn new(config: ExecutorConfig, parts: Parts) -> Self {
        let state = StateFiles::new(parts.store.clone());
        let lock_dir = config.lock_dir.clone();
        let owned = lock_dir.map(|dir| Owned::new(dir, config.driver.clone()));
        Self {
            config,
            parts,
            state,
            owned,
            orphans: Mutex::default(),
            grants: Mutex::default(),
            last_foreign: Mutex::default(),
        }
    }

    /// Returns the time since boot.
    pub(crate) fn now(&self) -> Duration {
        self.parts.clock.now()
    }

    /// Returns the time until which a lock is waited for that a call at work may hold.
    pub(crate) fn briefly(&self) -> Duration {
        self.now() + BRIEFLY
    }

    pub(crate) fn lock_claim(
        &self,
        uid: &ClaimUid,
        until: Duration,
    ) -> Result<LockGuard, LockError> {
        let name = LockName::Claim(uid.clone());
        self.parts.locks.acquire(&name, until)
    }

    /// Takes the locks of GPUs in UUID order, after the claim's lock, so that calls cannot
    /// deadlock.
    pub(crate) fn lock_gpus(
        &self,
        gpus: &BTreeSet<GpuUuid>,
        until: Duration,
    ) -> Result<Vec<LockGuard>, LockError> {
        gpus.iter()
            .map(|gpu| self.parts.locks.acquire(&LockName::Gpu(gpu.clone()), until))
            .collect()
    }

    /// Takes one GPU's lock, unless a call that takes long has it.
    pub(crate) fn lock_gpu(&self, gpu: &GpuUuid) -> Result<LockGuard, LockError> {
        let name = LockName::Gpu(gpu.clone());
        self.parts.locks.acquire(&name, self.briefly())
    }
}
