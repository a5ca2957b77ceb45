//! The record of a claim (`claims/<uid>.json`): its holds and what its containers were given, and
//! nothing about how that came about.
//!
//! Invariants:
//! - A record is on disk before an instance is made for its claim, and is removed only after its
//!   instances are gone.
//! - A record holds its devices in every phase, and for as long as it cannot be read.
//! - `given` is on disk before the CDI file that names it: that file can be made again at any time
//!   from the record alone.
//! - Devices are resolved once. Later changes of policies, numbers and configs do not change a
//!   record.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_model::{
    BootId, ClaimUid, GpuUuid, Hold, MpsNamespace, MpsPriority, MpsServer, Place, Sharing, Target,
    TimeSlice,
};
use serde::{Deserialize, Serialize};

use crate::stored::{self, Head, Stored};
use crate::{
    AllocatedDevice, Allocation, Claim, ClaimRef, Filling, Living, Made, Metadata, PodRef,
};

/// An allocated device, resolved to the GPU that serves it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordedDevice {
    /// Result of the allocation, as the API has it.
    pub allocated: AllocatedDevice,
    /// The GPU, by UUID: names are resolved once.
    pub gpu: GpuUuid,
    pub target: Target,
    pub sharing: Sharing,
    /// A partition that others have made (`static`): it is found, and never made or removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub theirs: bool,
    /// Time slice that its config asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSlice>,
    /// Memory in bytes that the percent of a share, or its MPS slot, came to when it was prepared:
    /// a later change of the policy changes nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_memory: Option<u64>,
    /// Memory in bytes that the driver caps its containers' share to, as promised when it was
    /// prepared; `None` on a node that caps nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_cap: Option<u64>,
    /// A whole GPU on a node whose driver keeps limits of control groups that are gone: they are
    /// cleared for each of its containers before it starts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub clears_caps: bool,
    /// Place at the MPS server of its GPU: of an MPS share, or of a whole GPU whose config asks for
    /// a server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsSlot>,
    /// Device nodes of the host that its config asks for, as written there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_nodes: Vec<String>,
    /// Partition that its containers were given: the CDI file names it. The GPU's file says how it
    /// came about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<Made>,
}

/// A place at the MPS server of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsSlot {
    /// The server, as it was when the place was given.
    pub server: MpsServer,
    /// Priority that the claim's config asks for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<MpsPriority>,
    /// Namespace with all that the claim has of the GPU, at a server that has namespaces: the
    /// containers of a claim have it together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<MpsNamespace>,
}

impl RecordedDevice {
    /// Returns the place of a partition that is ours to make.
    pub fn own_place(&self) -> Option<Place> {
        self.target.place().filter(|_| !self.theirs)
    }

    /// Returns whether the partition that the device was given is certainly gone, by what fills its
    /// place: another one, or nothing. A partition that cannot be read may live.
    pub fn is_gone(&self, filling: &Filling) -> bool {
        match (&self.given, filling) {
            (Some(given), Ok(living)) => {
                living.as_ref().and_then(Living::as_partition).as_ref() != Some(given)
            }
            (None, _) | (Some(_), Err(_)) => false,
        }
    }

    /// Returns whether it is an MPS share of a GPU or partition.
    pub fn is_mps_share(&self) -> bool {
        self.sharing == Sharing::Mps
    }

    /// Returns the claim's hold through this device.
    pub fn hold(&self, claim: &ClaimUid) -> Hold {
        Hold {
            claim: claim.clone(),
            gpu: self.gpu.clone(),
            device: self.allocated.device.clone(),
            target: self.target,
            sharing: self.sharing,
            theirs: self.theirs,
            time_slice: self.time_slice,
            mps: self.mps.map(|place| place.server),
        }
    }
}

/// State of an unprepared claim that still holds its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Leaving {
    /// Obstacle, in words for people.
    pub reason: String,
    /// True if its partitions are being removed: then the claim cannot simply be taken up again.
    #[serde(default)]
    pub undoing: bool,
}

/// Phase in the life of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase")]
pub enum Phase {
    /// A prepare is making something, or a crash cut it short.
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
    /// The boot in which it was prepared; unknown in a record that was made again.
    pub boot: BootId,
    /// Time at which the claim was allocated, according to the API.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated_at: Option<String>,
    pub devices: Vec<RecordedDevice>,
    /// DeviceClass of each request, by its name in results; for sums of GPU time alone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub classes: BTreeMap<String, String>,
    /// Pods the claim was reserved for when it was prepared.
    #[serde(default)]
    pub pods: Vec<PodRef>,
    /// Time since that boot at which the prepare that made it arrived: an unprepare that arrived
    /// earlier is not about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received: Option<Duration>,
    /// Content of the metadata files of its devices; a claim without it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Metadata>,
    /// Phase in its life.
    pub phase: Phase,
}

impl Record {
    /// Makes the record of a claim's devices in this boot.
    pub fn new(claim: &Claim, boot: &BootId, devices: Vec<RecordedDevice>, phase: Phase) -> Self {
        Self {
            uid: claim.uid.clone(),
            namespace: claim.namespace.clone(),
            name: claim.name.clone(),
            boot: boot.clone(),
            allocated_at: claim.allocation.allocated_at.clone(),
            devices,
            classes: claim.classes.clone(),
            pods: claim.pods.clone(),
            received: None,
            metadata: None,
            phase,
        }
    }

    /// Returns the claim's names.
    pub fn reference(&self) -> ClaimRef {
        ClaimRef {
            uid: self.uid.clone(),
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        }
    }

    /// Returns the allocation that the record is of.
    pub fn allocation(&self) -> Allocation {
        Allocation {
            allocated_at: self.allocated_at.clone(),
            results: self.devices.iter().map(|d| d.allocated.clone()).collect(),
        }
    }

    /// Returns true if the record is of this very allocation. A server without allocation times
    /// makes the results decide.
    pub fn is_of(&self, allocation: &Allocation) -> bool {
        Allocation::same_time(
            self.allocated_at.as_deref(),
            allocation.allocated_at.as_deref(),
        ) && self.devices.len() == allocation.results.len()
            && self
                .devices
                .iter()
                .zip(&allocation.results)
                .all(|(d, r)| d.allocated == *r)
    }

    /// Returns true if the claim may have been prepared in this boot, so that its programs and what
    /// was made for it may be there. A record that was made again may be of any boot.
    pub fn may_be_of(&self, boot: &BootId) -> bool {
        self.boot == *boot || self.boot == BootId::unknown()
    }

    /// Returns true if its devices are being removed: it is never taken up as it is.
    pub fn is_undoing(&self) -> bool {
        matches!(&self.phase, Phase::Leaving(leaving) if leaving.undoing)
    }

    /// Returns true if its claim is answered from it: prepared in this boot, for this allocation.
    pub fn answers(&self, allocation: &Allocation, boot: &BootId) -> bool {
        self.phase == Phase::Prepared && self.boot == *boot && self.is_of(allocation)
    }

    /// Returns the phase in this boot: a claim that was prepared before it has devices again only
    /// after it is carried out again.
    pub fn phase_in(&self, boot: &BootId) -> Phase {
        match &self.phase {
            Phase::Prepared if self.boot != *boot => Phase::Preparing,
            phase => phase.clone(),
        }
    }

    /// Returns the claim's holds, whatever its phase: a lingering claim holds too.
    pub fn holds(&self) -> impl Iterator<Item = Hold> + '_ {
        self.devices.iter().map(|device| device.hold(&self.uid))
    }

    /// Returns the GPUs concerned, in the order in which their locks are taken.
    pub fn gpus(&self) -> BTreeSet<GpuUuid> {
        self.devices.iter().map(|d| d.gpu.clone()).collect()
    }

    /// Returns the bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        // The head stays readable for other versions: they see which GPUs to avoid, and whose
        // record it is.
        let head = Head {
            claim: Some(self.reference()),
            gpus: self.gpus().into_iter().collect(),
        };
        stored::encode(VERSION, &head, self)
    }

    /// Reads the bytes of a file.
    pub fn decode(bytes: &[u8]) -> Stored<Self> {
        stored::decode(VERSION, bytes)
    }
}

const VERSION: u32 = 1;

#[cfg(test)]
mod tests;
