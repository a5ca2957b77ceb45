//! The [`Executor`]: its settings, its ports, and the doors to its rooms.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{
    AllocatedDevice, Claim, ClaimRef, Head, Phase, PodRef, Prepared, Record, RecordedDevice,
    ShareAmounts, Stored, cdi_device_name,
};
use divvy_gpu::{Fence, Made, MpsNote};
use divvy_model::{
    BootId, ClaimUid, DeviceName, GpuDriver, GpuTarget, GpuUuid, Grant, Hold, Ordinals, PciAddress,
    ShareUnit,
};
use serde::Serialize;

use crate::context::Context;
use crate::gpus::{Gpus, Instances};
use crate::numbers::number_gpus;
use crate::prepare::prepare;
use crate::reconcile::Keeper;
use crate::records::fine;
use crate::restore::{finish_lingering, restore_cdi};
use crate::unprepare::unprepare;
use crate::{
    Call, Cancel, CdiDir, ClaimsApi, Clock, ClusterView, DeviceEdits, InventorySource, Locks,
    MetadataDir, MpsServers, NumberError, PrepareError, ProcessSource, Refresh, Report, Stamp,
    Store, StoreError, TimeSlices, UnprepareError, Unprepared,
};

/// Time limits and intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// A prepare tries again inside its call for this long: holders about to leave, a driver that
    /// is not there yet.
    pub hand_over: Duration,
    /// An unprepare waits this long for processes to leave before the claim lingers.
    pub process_wait: Duration,
    /// Interval at which a call that has waited for long looks whether the records changed.
    pub poll: Duration,
    /// Interval at which it looks at everything else.
    pub look_again: Duration,
    /// A claim must look orphaned for this long, with a connected kubelet, before it is undone.
    /// Longer than the kubelet's own clean-up loop of 60 s.
    pub orphan_grace: Duration,
    /// Tombstones are kept this long: longer than any call lasts.
    pub tombstones: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            // Just under the kubelet's deadline of 45 s for a call: a refusal costs the pod 60 to
            // 90 s until the next attempt, so that waiting is cheaper.
            hand_over: Duration::from_secs(40),
            // Processes of a killed container leave the GPU within seconds. The kubelet keeps the
            // pod in Terminating for as long as this takes.
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
    /// Time limits and intervals.
    pub timing: Timing,
    /// A folder that all drivers of ours on the node share, which keeps a GPU from being given out
    /// by two. `None`: there is no other.
    pub lock_dir: Option<PathBuf>,
    /// Device nodes of the host that claims may ask for.
    pub extra_nodes: Vec<String>,
    /// True if claims get files with the metadata of their devices.
    pub metadata: bool,
}

impl ExecutorConfig {
    /// The usual settings.
    pub fn new(driver: impl Into<String>, boot: BootId) -> Self {
        let timing = Timing::default();
        let driver = driver.into();
        Self {
            driver,
            boot,
            timing,
            lock_dir: None,
            extra_nodes: Vec::new(),
            metadata: true,
        }
    }
}

/// The things that an [`Executor`] works on.
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
    /// The needs of containers for a device.
    pub edits: Arc<dyn DeviceEdits>,
    /// The GPUs, by a driver whose calls have deadlines.
    pub gpus: Arc<dyn GpuDriver>,
    /// Time slices of GPUs.
    pub time_slices: Arc<dyn TimeSlices>,
    /// MPS servers of GPUs.
    pub mps: Arc<dyn MpsServers>,
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
    context: Context,
}

/// A device whose containers are capped, or freed of the caps of earlier ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CappedShare {
    pub claim: ClaimRef,
    pub gpu: GpuUuid,
    /// Cap of a share in bytes; `None` for a whole GPU, which has none.
    pub bytes: Option<u64>,
}

/// A device that a claim holds, for taints, metrics, Events and the debug page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldDevice {
    pub claim: ClaimRef,
    /// The target that it holds, and its sharing.
    pub hold: Hold,
    /// Where the claim is in its life, in this boot.
    pub phase: Phase,
    /// The pods that it was prepared for.
    pub pods: Vec<PodRef>,
    /// When the claim was allocated, according to the API.
    pub allocated_at: Option<String>,
    /// The device as it was allocated.
    #[serde(skip)]
    pub allocated: AllocatedDevice,
    /// The DeviceClass that it was asked for by, if that is known.
    #[serde(skip)]
    pub class: Option<String>,
    /// The amounts of its GPU that a share was granted.
    #[serde(skip)]
    pub amounts: ShareAmounts,
    /// True if its containers call for a cap, or for the end of earlier ones, when they start.
    #[serde(skip)]
    pub calls_for_caps: bool,
    /// The partition that it was given, where the device is one.
    #[serde(skip)]
    pub made: Option<Made>,
}

impl Executor {
    /// Makes an executor. Nothing is read or changed yet. Call [`Executor::restore_cdi`] before the
    /// plugin registers.
    pub fn new(config: ExecutorConfig, parts: Parts) -> Self {
        Self {
            context: Context::new(config, parts),
        }
    }

    pub fn boot(&self) -> &BootId {
        &self.context.config.boot
    }

    /// Marks the arrival of a call that must be answered within `budget`.
    pub fn begin(&self, budget: Duration) -> Call {
        // Taken before anything is awaited: the order of arrival decides between a prepare and an
        // unprepare, also of two instances, since time since boot is the same for both.
        let received = self.context.now();
        Call {
            received,
            until: received + budget,
            cancel: Cancel::new(),
        }
    }

    /// Prepares a claim and returns the answer for the kubelet. Blocks: everything that can pass
    /// within seconds is retried inside the call. Calls for one claim may come at once; they take
    /// turns.
    pub fn prepare(&self, claim: &Claim, call: &Call) -> Result<Prepared, PrepareError> {
        prepare(&self.context, claim, call).map_err(|cause| PrepareError {
            claim: claim.reference(),
            cause,
        })
    }

    /// Unprepares a claim. Waits for a prepare of it that is at work; one that only waits gives up
    /// by itself.
    pub fn unprepare(&self, uid: &ClaimUid, call: &Call) -> Result<Unprepared, UnprepareError> {
        unprepare(&self.context, uid, call).map_err(|cause| UnprepareError {
            claim: uid.clone(),
            cause,
        })
    }

    /// Makes everything right that must be before the kubelet may call: see [`Refresh`] for CDI
    /// files. Also called whenever files in the CDI folder vanish.
    pub fn restore_cdi(&self, refresh: Refresh) -> Report {
        restore_cdi(&self.context, refresh)
    }

    /// Finishes lingering claims, as far as that is possible now, by asking only the GPUs. Returns
    /// whether any is left.
    pub fn finish_lingering(&self) -> (Report, bool) {
        finish_lingering(&self.context)
    }

    /// Brings GPUs to what claims and policies ask of them now, by asking only the GPUs.
    pub fn tidy(&self) -> Report {
        let mut report = Report::default();
        Gpus::of(&self.context).tidy(false, &mut report);
        report
    }

    /// Gives back the MIG modes that divvy has changed, on GPUs that nothing holds: the node goes
    /// to another driver. The caller serves no claims any more.
    pub fn leave(&self) -> Report {
        let mut report = Report::default();
        Gpus::of(&self.context).leave(&mut report);
        report
    }

    /// Compares everything once. Never takes long: a claim that a call is working on is left for
    /// the next time.
    pub fn reconcile(&self, view: &ClusterView) -> Report {
        Keeper::of(&self.context).reconcile(view)
    }

    /// Returns whether there is any record, readable or not; also where that is not known.
    pub fn has_records(&self) -> bool {
        Keeper::of(&self.context).has_records()
    }

    /// Returns whether there is a claim whose namespace and name no record says:
    /// [`ClusterView::claims`] must then have all claims of the cluster, since one that is missing
    /// there counts as gone.
    pub fn has_nameless_claims(&self) -> Result<bool, String> {
        Keeper::of(&self.context).has_nameless_claims()
    }

    /// Gives new GPUs a number and forgets GPUs that are neither present nor kept: see
    /// [`number_gpus`].
    pub fn number_gpus(
        &self,
        present: &[(GpuUuid, PciAddress)],
        keep: &dyn Fn(&GpuUuid, u32) -> bool,
    ) -> Result<Ordinals, NumberError> {
        number_gpus(&self.context, present, keep)
    }

    /// Returns when a record came or went last, as time since 1970 by the disk's clock; `None` if
    /// that cannot be read.
    pub fn records_changed(&self) -> Option<Duration> {
        let Stamp(_, (seconds, nanos), _) = self.context.state.records_stamp()?;
        Some(Duration::new(
            seconds.try_into().ok()?,
            nanos.try_into().ok()?,
        ))
    }

    /// Returns the numbers in device names.
    pub fn ordinals(&self) -> Result<Ordinals, StoreError> {
        self.context.state.ordinals()
    }

    /// Keeps what a prepare may do with GPUs on disk, so that a restart and the other instance
    /// know. GPUs that are not named keep what was granted last.
    pub fn grant(&self, grants: &BTreeMap<GpuUuid, Grant>) -> Result<(), StoreError> {
        Gpus::of(&self.context).grant(grants)
    }

    /// Returns the GPUs that are fenced in this boot, and why.
    pub fn fences(&self) -> Result<BTreeMap<GpuUuid, Vec<Fence>>, StoreError> {
        Gpus::of(&self.context).fences()
    }

    /// Returns the GPUs whose MIG mode divvy has changed, with the mode as it was found.
    pub fn mig_found(&self) -> Result<BTreeMap<GpuUuid, bool>, StoreError> {
        Gpus::of(&self.context).mig_found()
    }

    /// Returns the units in which shares of GPUs were last published, of those that had any.
    pub fn share_units(&self) -> Result<BTreeMap<GpuUuid, ShareUnit>, StoreError> {
        Gpus::of(&self.context).share_units()
    }

    /// Returns the MPS servers that are noted, by GPU.
    pub fn mps_servers(&self) -> Result<BTreeMap<GpuTarget, MpsNote>, StoreError> {
        Gpus::of(&self.context).mps_servers()
    }

    /// Returns GPU instances that no record accounts for: they were created outside of divvy and
    /// are never changed.
    pub fn foreign(&self) -> Instances {
        Gpus::of(&self.context).foreign()
    }

    /// Returns all holds, by claim; lingering ones too.
    pub fn held(&self) -> Result<Vec<HeldDevice>, StoreError> {
        let records = self.context.state.records()?;
        let of_record = |record: &Record| {
            let of = |device: &RecordedDevice| HeldDevice {
                claim: record.reference(),
                hold: device.hold(&record.uid),
                phase: record.phase_in(&self.context.config.boot),
                pods: record.pods.clone(),
                allocated_at: record.allocated_at.clone(),
                allocated: device.allocated.clone(),
                class: record.classes.get(&device.allocated.request).cloned(),
                amounts: device.amounts(),
                calls_for_caps: device.memory_cap.is_some() || device.clears_caps,
                made: device.given.clone(),
            };
            record.devices.iter().map(of).collect::<Vec<_>>()
        };
        // A record that cannot be read has no entry here. A prepare sees it all the same, and waits
        // for it.
        Ok(fine(&records).flat_map(of_record).collect())
    }

    /// Returns the memory that a device of a CDI file is capped to; `None` if the claim has no such
    /// device here, or none about whose cap anything is to be done.
    pub fn capped_share(
        &self,
        claim: &ClaimUid,
        cdi_device: &str,
    ) -> Result<Option<CappedShare>, StoreError> {
        let record = match self.context.state.record(claim)? {
            Stored::Fine(record)
                if record.phase_in(&self.context.config.boot) == Phase::Prepared =>
            {
                record
            }
            Stored::Fine(_) | Stored::Absent => return Ok(None),
            // It is made again soon, or a later version of divvy is to read it.
            Stored::Corrupt { .. } | Stored::Newer { .. } => {
                return Err(StoreError {
                    what: format!("the record of claim UID {claim}"),
                    action: "read",
                    source: std::io::ErrorKind::InvalidData.into(),
                });
            }
        };
        let is_it = |device: &&RecordedDevice| {
            let of = &device.allocated;
            cdi_device_name(claim, &of.device, of.share_id.as_deref()) == cdi_device
        };
        let share = record.devices.iter().find(is_it);
        let share = share.filter(|share| share.memory_cap.is_some() || share.clears_caps);
        Ok(share.map(|share| CappedShare {
            claim: record.reference(),
            gpu: share.gpu.clone(),
            bytes: share.memory_cap,
        }))
    }

    /// Returns the partitions that a claim was given, by device; none for a claim without a record.
    pub fn partitions(&self, claim: &ClaimUid) -> Result<BTreeMap<DeviceName, Made>, StoreError> {
        let stored = self.context.state.record(claim)?;
        let devices = stored.fine().into_iter().flat_map(|record| &record.devices);
        Ok(devices
            .filter_map(|d| Some((d.allocated.device.clone(), d.given.clone()?)))
            .collect())
    }

    /// Returns GPUs that records of a later version name, with those records' claims: nothing new
    /// may go there.
    pub fn fenced_by_newer(&self) -> Result<BTreeMap<ClaimUid, Head>, StoreError> {
        let records = self.context.state.records()?;
        let newer = records
            .iter()
            .filter_map(|(uid, stored)| match stored.as_ref() {
                Stored::Newer { head, .. } => Some((uid.clone(), head.clone())),
                Stored::Absent | Stored::Corrupt { .. } | Stored::Fine(_) => None,
            });
        Ok(newer.collect())
    }

    /// Returns everything kept, for `/debug/state`. Without opaque configs: they are users'.
    pub fn debug_state(&self) -> serde_json::Value {
        fn shown<T: Serialize>(read: Result<T, StoreError>) -> serde_json::Value {
            read.map_or_else(
                |error| serde_json::json!({ "error": crate::chain(&error) }),
                |value| serde_json::json!(value),
            )
        }
        let one = |stored: &Stored<Record>| match stored {
            Stored::Fine(record) => serde_json::json!({
                "claim": record.reference(),
                "phase": record.phase,
                "boot": record.boot,
                "devices": record.devices,
                "pods": record.pods,
            }),
            Stored::Corrupt { reason } => serde_json::json!({ "corrupt": reason }),
            Stored::Newer { version, head } => {
                serde_json::json!({ "newer": version, "head": head })
            }
            Stored::Absent => serde_json::Value::Null,
        };
        let records = self.context.state.records().map(|records| {
            let all = records
                .iter()
                .map(|(uid, stored)| (uid.to_string(), one(stored)));
            all.collect::<serde_json::Map<_, _>>()
        });
        serde_json::json!({
            "boot": self.context.config.boot,
            "claims": shown(records),
            "fences": shown(self.fences()),
            "ordinals": shown(self.ordinals()),
        })
    }
}
