//! What is kept about a claim (`claims/<uid>.json`): enough to answer again, to undo, and to report.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_model::mig::{ComputeInstanceId, GpuInstanceId, Partition};
use divvy_model::{BootId, ClaimUid, GpuUuid, Hold, HoldKind, MigUuid, TimeSlice};
use serde::{Deserialize, Serialize};

use crate::stored::{self, Head, Stored};
use crate::{AllocatedDevice, Allocation, Claim, ClaimRef, Metadata, Outcome, PodRef, Progress, Step};

/// An allocated device, resolved to the GPU that serves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedDevice {
    /// As it was allocated.
    pub allocated: AllocatedDevice,
    /// The GPU, by UUID: names are resolved once.
    pub gpu: GpuUuid,
    /// How it is used.
    pub kind: HoldKind,
    /// The time slice its config asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSlice>,
    /// Device nodes of the host that its config asks for, as written there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_nodes: Vec<String>,
    /// A partition that others have made: it is found, and never made or destroyed.
    #[serde(default, rename = "static", skip_serializing_if = "std::ops::Not::not")]
    pub is_static: bool,
}

/// A partition that a claim's step made, as it lives on the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadePartition {
    /// Its GPU instance.
    pub gpu_instance: GpuInstanceId,
    /// The compute instance in that.
    pub compute_instance: ComputeInstanceId,
    /// UUID of the MIG device.
    pub uuid: MigUuid,
}

impl RecordedDevice {
    /// The step that makes or finds the device, if there is more to it than a GPU.
    pub fn step(&self) -> Option<Step> {
        let HoldKind::Partition { profile, placement } = self.kind else { return None };
        let partition = Partition { gpu: self.gpu.clone(), profile, placement };
        Some(if self.is_static { Step::UsePartition(partition) } else { Step::CreatePartition(partition) })
    }

    /// What the claim's steps have made or found for this device.
    pub fn partition(&self, steps: &[StepState]) -> Option<MadePartition> {
        let own = self.step()?;
        let made = steps.iter().find(|state| state.step == own)?;
        match &made.progress {
            Progress::Done { outcome: Outcome::Partition { gi, ci, uuid } } => {
                Some(MadePartition { gpu_instance: *gi, compute_instance: *ci, uuid: uuid.clone() })
            }
            _ => None,
        }
    }
}

/// A hardware step and how far it has come.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepState {
    pub step: Step,
    pub progress: Progress,
}

/// Why an unprepared claim still holds its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Leaving {
    /// What is in the way, for people.
    pub reason: String,
    /// Whether undoing its steps has begun: then the claim cannot simply be taken up again.
    #[serde(default)]
    pub undoing: bool,
}

/// Where a claim is in its life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase")]
pub enum Phase {
    /// Steps are under way, or a crash cut them short.
    Preparing,
    /// The kubelet may have the answer.
    Prepared,
    /// Unprepare has been answered or begun, and something is still to be undone: *lingering*.
    Leaving(Leaving),
}

/// The record of a claim: the body of its file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    pub uid: ClaimUid,
    /// Namespace, kept in every phase: the claim may be gone when it is needed.
    pub namespace: String,
    pub name: String,
    /// The boot in which the steps were carried out.
    pub boot: BootId,
    /// When the claim was allocated, according to the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_at: Option<String>,
    pub devices: Vec<RecordedDevice>,
    /// Pods the claim was reserved for when it was prepared.
    #[serde(default)]
    pub pods: Vec<PodRef>,
    /// When (time since that boot) the prepare that made it arrived: an unprepare that arrived earlier is not about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<Duration>,
    /// What the files with the metadata of its devices say; a claim without it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
    /// Where it is in its life.
    pub phase: Phase,
    /// Its hardware steps, in the order they are carried out.
    #[serde(default)]
    pub steps: Vec<StepState>,
}

impl Record {
    /// A record of a claim's devices in this boot, before any step.
    pub fn new(claim: &Claim, boot: &BootId, devices: Vec<RecordedDevice>, phase: Phase) -> Self {
        Self {
            uid: claim.uid.clone(),
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            boot: boot.clone(),
            allocated_at: claim.allocation.allocated_at.clone(),
            devices,
            pods: claim.pods.clone(),
            received: None,
            metadata: None,
            phase,
            steps: Vec::new(),
        }
    }

    /// The claim's names.
    pub fn reference(&self) -> ClaimRef {
        ClaimRef { uid: self.uid.clone(), namespace: self.namespace.clone(), name: self.name.clone() }
    }

    /// The allocation the record is of.
    pub fn allocation(&self) -> Allocation {
        Allocation {
            allocated_at: self.allocated_at.clone(),
            results: self.devices.iter().map(|d| d.allocated.clone()).collect(),
        }
    }

    /// Whether the record is of this very allocation. A server without allocation times makes the results decide.
    pub fn is_of(&self, allocation: &Allocation) -> bool {
        Allocation::same_time(self.allocated_at.as_deref(), allocation.allocated_at.as_deref())
            && self.devices.len() == allocation.results.len()
            && self.devices.iter().zip(&allocation.results).all(|(d, r)| d.allocated == *r)
    }

    /// The claim's holds, whatever its phase: a lingering claim holds too.
    pub fn holds(&self) -> impl Iterator<Item = Hold> + '_ {
        self.devices.iter().map(|d| Hold {
            claim: self.uid.clone(),
            gpu: d.gpu.clone(),
            device: d.allocated.device.clone(),
            kind: d.kind,
            time_slice: d.time_slice,
        })
    }

    /// GPUs concerned, in the order their locks are taken.
    pub fn gpus(&self) -> BTreeSet<GpuUuid> {
        self.devices.iter().map(|d| d.gpu.clone()).collect()
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        let head = Head { claim: Some(self.reference()), gpus: self.gpus().into_iter().collect() };
        stored::encode(VERSION, &head, self)
    }

    /// Reads the bytes of a file.
    pub fn decode(bytes: &[u8]) -> Stored<Self> {
        stored::decode(VERSION, bytes)
    }
}

/// Records of the versions before have fields less and nothing else: since version 2 there are partitions among the
/// devices' kinds and steps that have begun, since version 3 shares, time slices and partitions of others; an older reader
/// would call such a record corrupt rather than newer. A field that an older reader may ignore needs no new version. Any other
/// change makes a version 4, with a frozen copy of [`Record`] for these.
const VERSION: u32 = 3;

#[cfg(test)]
mod tests;
