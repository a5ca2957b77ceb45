//! Why a claim is not served, in words for the person who wrote it. [`kind`] says whether trying again can help.

mod entry;
mod kind;

use divvy_api::ConfigError;
use divvy_model::{ComputeMode, DeviceName, GpuError, GpuUuid, ParseDeviceNameError, TimeSlice};

use crate::ClaimRef;

pub(crate) use self::entry::EntryAt;
pub use self::kind::Retry;

/// A claim that is not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// A config entry of ours that cannot be decoded.
    #[error("config entry {} of {} {claim} for this driver cannot be used ({})", .at.index, .at.place(), .at.fix())]
    BadConfig {
        /// The claim.
        claim: ClaimRef,
        /// Which entry.
        at: EntryAt,
        /// What is wrong with it.
        #[source]
        source: ConfigError,
    },
    /// A config entry that names a request whose device is of another kind.
    #[error(
        "config entry {} of {} {claim} is a {found}, but request {request:?} got device {device}, which takes a {wanted} ({})",
        .at.index, .at.place(), .at.fix()
    )]
    WrongConfigKind {
        /// The claim.
        claim: ClaimRef,
        /// Which entry.
        at: EntryAt,
        /// The request it names.
        request: String,
        /// What the request got.
        device: DeviceName,
        /// The entry's kind.
        found: &'static str,
        /// The device's.
        wanted: &'static str,
    },
    /// A device name that this version cannot read.
    #[error(
        "claim {claim} has an allocated device that this driver does not know (delete the pod and the claim, so that they are scheduled anew)"
    )]
    UnknownDevice {
        /// The claim.
        claim: ClaimRef,
        /// Its name.
        #[source]
        source: ParseDeviceNameError,
    },
    /// A number that no GPU of this node has.
    #[error(
        "device {device} of claim {claim} is no GPU this node knows: it was removed and forgotten (delete the pod and the claim, so that they are scheduled anew)"
    )]
    UnknownOrdinal {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
    },
    /// The GPU is known but not there.
    #[error(
        "device {device} of claim {claim} is gone: {gpu} does not answer on this node (delete the pod and the claim to be scheduled anew, or bring the GPU back)"
    )]
    DeviceGone {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// The GPU is there but cannot be read.
    #[error("device {device} of claim {claim}: {gpu} cannot be read")]
    GpuUnreadable {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// What its driver said.
        #[source]
        source: GpuError,
    },
    /// There is no inventory yet.
    #[error(
        "the NVIDIA driver of this node does not answer yet (see the node plugin's log; nvidia-smi must work on the node)"
    )]
    NoInventory,
    /// A whole GPU was allocated, but its MIG mode is on.
    #[error(
        "device {device} of claim {claim} is a whole GPU, but MIG mode of {gpu} is on (turn it off with `nvidia-smi -i {gpu} -mig 0`, or delete the pod and the claim)"
    )]
    MigModeOn {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// A partition of a GPU whose MIG mode is off, and is not ours to change.
    #[error(
        "device {device} of claim {claim} is a partition, but MIG mode of {gpu} is off (turn it on with `nvidia-smi -i {gpu} -mig 1`, or delete the pod and the claim)"
    )]
    MigModeOff {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// The GPU's compute mode keeps the container from it.
    #[error(
        "device {device} of claim {claim}: compute mode of {gpu} is {mode}, so its container would fail (set it back with `nvidia-smi -i {gpu} -c DEFAULT`; an MPS daemon or an administrator has changed it)"
    )]
    ComputeMode {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// What it is.
        mode: ComputeMode,
    },
    /// A partition that the GPU cannot have.
    #[error(
        "device {device} of claim {claim} is no partition that {gpu} can be cut into (delete the pod and the claim, so that they are scheduled anew)"
    )]
    NoSuchPartition {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// The driver does not tell what the GPU can be cut into.
    #[error(
        "device {device} of claim {claim}: the NVIDIA driver does not tell what {gpu} can be cut into (before version 550 it does so only with MIG mode on: turn it on with `nvidia-smi -i {gpu} -mig 1`)"
    )]
    PartitionsUnknown {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// Admin access to a partition.
    #[error(
        "device {device} of claim {claim} is a partition, which admin access cannot have (ask for the whole GPU: it shows all its partitions)"
    )]
    AdminPartition {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
    },
    /// Admin access to a share.
    #[error(
        "device {device} of claim {claim} is a share, which admin access cannot have (ask for the whole GPU: it shows what all its shares do)"
    )]
    AdminShare {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
    },
    /// A device for admin access was allocated to a request without it.
    #[error(
        "device {device} of claim {claim} is for requests with adminAccess: true only, since nothing of it is held for anybody (ask for a GPU, a partition or a share)"
    )]
    AdminOnly {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
    },
    /// One claim got two devices that need the same part of a GPU.
    #[error(
        "claim {claim} has devices {other} and {device} allocated, which need the same part of {gpu} (this is a fault of the scheduler: delete the pod and the claim)"
    )]
    Overlap {
        /// The claim.
        claim: ClaimRef,
        /// The second device.
        device: DeviceName,
        /// The first.
        other: DeviceName,
        /// Their GPU.
        gpu: GpuUuid,
    },
    /// One claim got one exclusive device twice.
    #[error(
        "claim {claim} has device {device} allocated twice (this is a fault of the scheduler: delete the pod and the claim)"
    )]
    AllocatedTwice {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
    },
    /// The GPU is fenced.
    #[error(
        "device {device} of claim {claim}: {gpu} is fenced, since an earlier change has an unknown outcome: {reason} (it is looked at again by itself; a reboot settles it)"
    )]
    Fenced {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// What is not known.
        reason: String,
    },
    /// The GPU's state was written by a later version.
    #[error(
        "device {device} of claim {claim}: the state of {gpu} was written by a later divvy (version {version}); it is left untouched (run that version again, or reboot and remove the file)"
    )]
    GpuStateNewer {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// Version of the file.
        version: u32,
    },
    /// The claim's own record was written by a later version.
    #[error(
        "the record of claim {claim} was written by a later divvy (version {version}); it is left untouched (run that version again, or delete the pod and the claim)"
    )]
    RecordNewer {
        /// The claim.
        claim: ClaimRef,
        /// Version of the file.
        version: u32,
    },
    /// Another claim, whose record was written by a later version, may hold the GPU.
    #[error(
        "device {device} of claim {claim}: {gpu} is held by {holder}, whose record was written by a later divvy (version {version}) (run that version again, or delete the pod and claim named last)"
    )]
    HeldByNewer {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// Who holds it.
        holder: String,
        /// Version of the file.
        version: u32,
    },
    /// The API has the device allocated to two claims.
    #[error(
        "device {device} of claim {claim} is held by claim {holder}, which has {held} allocated and is in use (the scheduler gave one GPU to both: delete one of the two claims and its pod)"
    )]
    HeldByLiveClaim {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Who holds it.
        holder: ClaimRef,
        /// The holder's device.
        held: DeviceName,
    },
    /// A claim that is in use holds the GPU in another mode.
    #[error(
        "device {device} of claim {claim} needs {gpu} for itself or in another mode than claim {holder} has it, which has {held} allocated and is in use (the scheduler must know better: it is too old or was changed; delete one of the two claims and its pod. The node now offers each GPU in one mode only)"
    )]
    ModeConflict {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// Who holds it.
        holder: ClaimRef,
        /// The holder's device.
        held: DeviceName,
    },
    /// A claim that is in use has set another time slice on the GPU.
    #[error(
        "device {device} of claim {claim} asks for time slice {wanted}, but claim {holder}, which is in use, has set {found} on {gpu}, and a GPU has one for all (ask for {found} or for none in timeSlicing.interval, or wait until that claim is gone)"
    )]
    TimeSliceConflict {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// What it asks for.
        wanted: TimeSlice,
        /// Who has set another.
        holder: ClaimRef,
        /// Which.
        found: TimeSlice,
    },
    /// A claim asks for two time slices of one GPU.
    #[error(
        "claim {claim} asks for time slice {wanted} with device {device} and for {other_wanted} with device {other}, both on {gpu}, and a GPU has one for all (write the same timeSlicing.interval into both configs; a claim's spec is immutable, so make it anew)"
    )]
    TwoTimeSlices {
        /// The claim.
        claim: ClaimRef,
        /// The second device.
        device: DeviceName,
        /// What is asked for with it.
        wanted: TimeSlice,
        /// The first.
        other: DeviceName,
        /// What is asked for with that.
        other_wanted: TimeSlice,
        /// Their GPU.
        gpu: GpuUuid,
    },
    /// A GPU without time slices that can be set.
    #[error(
        "device {device} of claim {claim} asks for time slice {wanted}, but {which} (leave timeSlicing out of the config: the GPU is shared all the same, in turns of a length that the driver chooses)"
    )]
    TimeSliceUnsupported {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// What it asks for.
        wanted: TimeSlice,
        /// Which GPU that is, and what was said about it.
        which: String,
    },
    /// A partition that others were to have made does not live.
    #[error(
        "device {device} of claim {claim}: nothing lives at its place on {gpu}, whose MIG instances are made by the node's administrator (policy: static); this driver makes none there (make it again with nvidia-smi, or delete the pod and the claim)"
    )]
    NoStaticPartition {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
    },
    /// The hand-over took longer than a call may last.
    #[error(
        "device {device} of claim {claim} is still held by claim {holder}, which no longer has it allocated: {why} (it is handed over when its last container is gone)"
    )]
    StillHeld {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Who holds it.
        holder: ClaimRef,
        /// What the holder waits for.
        why: String,
    },
    /// Processes that no claim accounts for compute on the GPU.
    #[error(
        "device {device} of claim {claim}: {gpu} is used by process {processes}, which no claim of this driver accounts for (end it, or take the GPU from whoever gave it out: a GPU belongs to one driver)"
    )]
    Strangers {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// Process ids, and the pods they belong to where known.
        processes: String,
    },
    /// Another driver of ours has given the GPU out.
    #[error(
        "device {device} of claim {claim}: {gpu} is held by {by} (a GPU belongs to one driver: let that one go, or give the two drivers different nodes)"
    )]
    OtherDriver {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// Who has it, and for whom.
        by: String,
    },
    /// A record that cannot be read may hold the GPU, and the API could not say.
    #[error(
        "device {device} of claim {claim}: the record of claim UID {holder} cannot be read, and it may hold {gpu}: {reason} (it is rebuilt from the API server as soon as that answers)"
    )]
    UnreadableHolder {
        /// The claim.
        claim: ClaimRef,
        /// The device.
        device: DeviceName,
        /// Its GPU.
        gpu: GpuUuid,
        /// UID of the record.
        holder: String,
        /// What is wrong with the record.
        reason: String,
    },
}
