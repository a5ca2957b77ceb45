//! The [`Executor`]: its ports, its settings, and its reports about the claims it holds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_claims::{
    AllocatedDevice, Claim, ClaimRef, Decision, Head, MadePartition, Phase, PodRef, RecordedDevice, Snapshot,
    Stored, decide,
};
use divvy_model::{BootId, ClaimUid, DeviceName, GpuUuid, Grant, Hold, Ordinals};
use serde::Serialize;

use crate::owned::Owned;
use crate::partitions::Instances;
use crate::reconcile::Orphans;
use crate::state::StateFiles;
use crate::{
    Call, Cancel, CdiDir, ClaimsApi, Clock, DeviceEdits, InventorySource, Locks, MetadataDir, ProcessSource,
    Steps, Store, StoreError, TimeSlices,
};

/// How long things may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A prepare tries again inside its call for this long: holders about to leave, a driver that is not there yet.
    pub hand_over: Duration,
    /// An unprepare waits this long for processes to leave before the claim lingers.
    pub process_wait: Duration,
    /// How often a call that has waited for long looks whether the records changed.
    pub poll: Duration,
    /// How often it looks at everything else.
    pub look_again: Duration,
    /// A claim must look orphaned for this long, with a connected kubelet, before it is undone. Longer than the
    /// kubelet's own clean-up loop of 60 s.
    pub orphan_grace: Duration,
    /// Tombstones are kept this long: longer than any call lasts.
    pub tombstones: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            hand_over: Duration::from_secs(40),
            process_wait: Duration::from_secs(10),
            poll: Duration::from_millis(20),
            look_again: Duration::from_millis(250),
            orphan_grace: Duration::from_mins(2),
            tombstones: Duration::from_mins(5),
        }
    }
}

/// Settings of an [`Executor`].
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// Our driver's name: vendor of the CDI kind, start of CDI file names.
    pub driver: String,
    pub boot: BootId,
    /// How long things may take.
    pub timing: Timing,
    /// A folder that all drivers of ours on the node share, which keeps a GPU from being given out by two. `None`: there
    /// is no other.
    pub lock_dir: Option<PathBuf>,
    /// Device nodes of the host that claims may ask for.
    pub extra_nodes: Vec<String>,
    /// Whether claims get files with the metadata of their devices.
    pub metadata: bool,
    /// The decision; tests put one here that asks for hardware steps.
    pub decide: fn(&Claim, &Snapshot<'_>) -> Decision,
}

impl ExecutorConfig {
    /// The usual settings.
    pub fn new(driver: impl Into<String>, boot: BootId) -> Self {
        let timing = Timing::default();
        let driver = driver.into();
        Self { driver, boot, timing, lock_dir: None, extra_nodes: Vec::new(), metadata: true, decide }
    }
}

/// What an [`Executor`] works on.
#[derive(Clone)]
pub struct Parts {
    /// Records, GPU states, tombstones, ordinals.
    pub store: Arc<dyn Store>,
    /// Locks on claims and GPUs.
    pub locks: Arc<dyn Locks>,
    /// The folder of CDI files.
    pub cdi: Arc<dyn CdiDir>,
    /// The folder of files with the metadata of devices.
    pub metadata: Arc<dyn MetadataDir>,
    /// What containers need for a device.
    pub edits: Arc<dyn DeviceEdits>,
    pub steps: Arc<dyn Steps>,
    /// Time slices of GPUs.
    pub time_slices: Arc<dyn TimeSlices>,
    /// Processes on GPUs.
    pub processes: Arc<dyn ProcessSource>,
    /// The node's GPUs.
    pub inventory: Arc<dyn InventorySource>,
    /// The API server.
    pub claims: Arc<dyn ClaimsApi>,
    pub clock: Arc<dyn Clock>,
}

/// Carries claims out. Shared between threads; one thread per call.
pub struct Executor {
    pub(crate) config: ExecutorConfig,
    pub(crate) parts: Parts,
    pub(crate) state: StateFiles,
    pub(crate) owned: Option<Owned>,
    pub(crate) orphans: Mutex<Orphans>,
    /// What a prepare may do, as last granted to this process, for files of GPUs that are made again.
    pub(crate) grants: Mutex<BTreeMap<GpuUuid, Grant>>,
    /// GPU instances of others, as last seen.
    pub(crate) last_foreign: Mutex<Instances>,
}

/// A device that a claim holds, for taints, metrics, Events and the debug page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldDevice {
    pub claim: ClaimRef,
    /// How it holds what.
    pub hold: Hold,
    /// Where the claim is in its life.
    pub phase: Phase,
    /// The pods that it was prepared for.
    pub pods: Vec<PodRef>,
    /// When the claim was allocated, according to the API.
    pub allocated_at: Option<String>,
    /// The device as it was allocated.
    #[serde(skip)]
    pub allocated: AllocatedDevice,
    /// The partition that was made for it, where the device is one.
    #[serde(skip)]
    pub made: Option<MadePartition>,
}

impl Executor {
    /// Nothing is read or changed yet. Call [`Executor::restore_cdi`] before the plugin registers.
    pub fn new(config: ExecutorConfig, parts: Parts) -> Self {
        let state = StateFiles::new(parts.store.clone());
        let owned = config.lock_dir.clone().map(|dir| Owned::new(dir, config.driver.clone()));
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

    pub fn boot(&self) -> &BootId {
        &self.config.boot
    }

    /// Marks the arrival of a call that must be answered within `budget`.
    pub fn begin(&self, budget: Duration) -> Call {
        let received = self.parts.clock.now();
        Call { received, until: received + budget, cancel: Cancel::new() }
    }

    /// All holds, by claim; lingering ones too.
    pub fn held(&self) -> Result<Vec<HeldDevice>, StoreError> {
        let records = self.state.records()?;
        let fine = records.values().filter_map(|stored| stored.fine());
        Ok(fine
            .flat_map(|record| {
                let of = |(hold, device): (Hold, &RecordedDevice)| HeldDevice {
                    claim: record.reference(),
                    hold,
                    phase: record.phase.clone(),
                    pods: record.pods.clone(),
                    allocated_at: record.allocated_at.clone(),
                    allocated: device.allocated.clone(),
                    made: device.partition(&record.steps),
                };
                record.holds().zip(&record.devices).map(of).collect::<Vec<_>>()
            })
            .collect())
    }

    /// The instances that a claim's partitions are, by device; none for a claim without partitions, or without a record.
    pub fn partitions(&self, claim: &ClaimUid) -> Result<BTreeMap<DeviceName, MadePartition>, StoreError> {
        let stored = self.state.record(claim)?;
        let Some(record) = stored.fine() else { return Ok(BTreeMap::new()) };
        let made = record
            .devices
            .iter()
            .filter_map(|d| Some((d.allocated.device.clone(), d.partition(&record.steps)?)));
        Ok(made.collect())
    }

    /// GPUs that records of a later version name, with those records' claims: nothing new may go there.
    pub fn fenced_by_newer(&self) -> Result<BTreeMap<ClaimUid, Head>, StoreError> {
        let records = self.state.records()?;
        Ok(records
            .iter()
            .filter_map(|(uid, stored)| match stored.as_ref() {
                Stored::Newer { head, .. } => Some((uid.clone(), head.clone())),
                Stored::Absent | Stored::Corrupt { .. } | Stored::Fine(_) => None,
            })
            .collect())
    }

    /// The numbers in device names.
    pub fn ordinals(&self) -> Result<Ordinals, StoreError> {
        self.state.ordinals()
    }

    /// Everything kept, for `/debug/state`. Without opaque configs: those are users'.
    pub fn debug_state(&self) -> serde_json::Value {
        let records = self.state.records().map(|records| {
            let one = |stored: &Stored<divvy_claims::Record>| match stored {
                Stored::Fine(record) => serde_json::json!({
                    "claim": record.reference(),
                    "phase": record.phase,
                    "boot": record.boot,
                    "devices": record.devices,
                    "pods": record.pods,
                    "steps": record.steps,
                }),
                Stored::Corrupt { reason } => serde_json::json!({ "corrupt": reason }),
                Stored::Newer { version, head } => serde_json::json!({ "newer": version, "head": head }),
                Stored::Absent => serde_json::Value::Null,
            };
            records
                .iter()
                .map(|(uid, stored)| (uid.to_string(), one(stored)))
                .collect::<serde_json::Map<_, _>>()
        });
        serde_json::json!({
            "boot": self.config.boot,
            "claims": records.map_or_else(|e| serde_json::json!({ "error": crate::chain(&e) }), Into::into),
            "fences": self.fences().map_or_else(|e| serde_json::json!({ "error": crate::chain(&e) }), |f| serde_json::json!(f)),
            "ordinals": self.ordinals().map_or_else(|e| serde_json::json!({ "error": crate::chain(&e) }), |o| serde_json::json!(o)),
        })
    }
}
