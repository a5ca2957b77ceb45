//! [`Finding`]: something that people should know about a node. The status of the GpuNode, Events
//! and the log show the same list; `table` says what is shown where, `words` in which words.

mod news;
mod table;
mod words;

use divvy_forms::LeftOut;
use divvy_model::health::Ailment;
use divvy_model::mig::Placement;
use divvy_model::{ClaimUid, DeviceName, Form, GpuUuid, MpsFault};

use crate::{NoPartitions, OneMode, PolicyProblem, RuleRef, Use};

pub use news::{News, news};
pub use table::{Event, Severity, Shown};
pub use words::Object;

/// Something that people should know. Its text is a sentence that needs no heading, for Events
/// and the log.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Finding {
    // Facts and faults that the offer follows from.
    /// A rule decides about a GPU.
    #[error("rule {by} decides the modes of {gpu}")]
    RuleDecides { gpu: GpuUuid, by: RuleRef },
    /// A rule that matches a GPU does not do what was probably meant.
    #[error("{0}")]
    RuleWithoutEffect(PolicyProblem),
    /// A policy cannot be read.
    #[error("{why}")]
    BadPolicy { policy: String, why: String },
    /// GPUs are published in one mode only although several are asked for.
    #[error("each GPU is offered in one mode instead of several: {why}")]
    OneModeForEach { why: OneMode },
    /// The plugin was stopped for good on a node that lost its labels.
    #[error(
        "the node no longer has the labels of divvy, so its plugin was stopped{}", words::still_held(*.claims)
    )]
    NodeLeft {
        /// Number of claims that hold devices of the node all the same.
        claims: usize,
    },
    /// NVIDIA's plugin serves the node under the driver's name that divvy has too.
    #[error(
        "NVIDIA's plugin serves this node under the same driver name: divvy neither publishes nor prepares anything here meanwhile"
    )]
    NvidiaServes,
    /// The MPS supervisor of the node does not answer.
    #[error(
        "the MPS supervisor does not answer on {socket}{}: MPS shares can be neither prepared nor released", words::other_supervisor(.other.as_deref())
    )]
    SupervisorAway {
        socket: String,
        /// Name of the driver whose supervisor runs on the node instead.
        other: Option<String>,
    },
    /// The pool breaks a limit of the API.
    #[error("the pool exceeds a limit of the API and is not published (a bug in divvy): {error}")]
    OverLimit { error: String },
    /// The driver was let go on request.
    #[error("the NVIDIA driver is released on request: {asked}")]
    DriverReleased { asked: String },
    /// The driver cannot be used.
    #[error("{why}")]
    DriverDown { why: String },
    /// A fault of a GPU, or of the part of it at a place.
    #[error("{} {ailment}", if .place.is_some() { "a partition of the GPU" } else { "the GPU" })]
    Ill {
        gpu: GpuUuid,
        place: Option<Placement>,
        ailment: Ailment,
    },
    /// NVML lists a GPU and cannot read it, and health knows no fault of it.
    #[error("the GPU cannot be read: {error}")]
    Silent { gpu: GpuUuid, error: String },
    /// NVML does not list a GPU, and it is not known yet whether it was taken out.
    #[error("the driver no longer lists the GPU")]
    Unlisted { gpu: GpuUuid },
    /// A GPU was taken out.
    #[error("the driver no longer lists the GPU, which was there before")]
    Removed { gpu: GpuUuid },
    /// A partition that a claim holds is gone.
    #[error("the MIG instance at memory slices {at} is gone although a claim holds it")]
    PartitionGone { gpu: GpuUuid, at: Placement },
    /// A claim holds a partition that is gone, or a device of a GPU that is.
    #[error("a claim holds it, and {why}")]
    GoneUnderClaim {
        gpu: GpuUuid,
        device: DeviceName,
        claim: String,
        why: String,
    },
    /// The events of a GPU are not received.
    #[error("the plugin receives no events (Xids) of it, so that only polls detect faults: {why}")]
    Unmonitored {
        gpu: GpuUuid,
        why: String,
        /// True if the driver has no events at all.
        for_good: bool,
    },
    /// A change of a GPU was cut off.
    #[error("the state of the GPU is uncertain: {reason}")]
    Uncertain {
        gpu: GpuUuid,
        claim: String,
        reason: String,
    },
    /// A later version of divvy has written the record of a claim.
    #[error("the record of a claim on it was written by a later version of divvy")]
    NewerRecord {
        gpu: GpuUuid,
        claim: String,
        uid: ClaimUid,
    },
    /// A claim was released and still uses its device.
    #[error("the claim was released but still holds it: {reason}")]
    Lingering {
        gpu: GpuUuid,
        device: DeviceName,
        claim: String,
        reason: String,
        /// The fault because of which the processes of the GPU cannot be listed.
        blind: Option<Ailment>,
    },
    /// The MPS server of a GPU or partition serves no new program.
    #[error("its MPS server {fault} for more than 30 seconds, so that no program can connect to it{}", words::users(.claims))]
    MpsWedged {
        gpu: GpuUuid,
        /// The place of a partition.
        place: Option<Placement>,
        fault: MpsFault,
        /// The claims that use it, as `namespace/name`.
        claims: Vec<String>,
    },
    /// Others use a GPU.
    #[error(
        "{gpu} is not allocated to new claims: {used} ({})", words::end_of_use(.used)
    )]
    Neighbour { gpu: GpuUuid, used: Use },
    /// A MIG instance made outside divvy is in the way.
    #[error(
        "{gpu} has a MIG instance at {} that divvy did not create: devices that overlap it are not allocated ({})", words::slices(*.at), words::removal_of_foreign(.gpu)
    )]
    ForeignInstance { gpu: GpuUuid, at: Placement },
    /// The plugin's folder takes nothing.
    #[error("no claim can be prepared: the plugin's folder cannot be written: {why}")]
    NotStored { why: String },
    /// The changes that prepare may make on a GPU cannot be stored.
    #[error("changes of its policy do not take effect, since they cannot be stored: {why}")]
    GrantNotStored { gpu: GpuUuid, why: String },
    /// Nothing of a GPU is offered, and no other finding says why.
    #[error(
        "no claim can have the GPU{}", words::nothing_offered(.by.as_ref(), .reasons)
    )]
    OutOfUse {
        gpu: GpuUuid,
        /// The rule that decides about it.
        by: Option<RuleRef>,
        reasons: Vec<String>,
    },

    // Parts of the offer that are left out, or not as they could be.
    /// Its MIG mode is on: it is for partitions.
    #[error(
        "{gpu} is not published as a whole GPU: its MIG mode is on (turn it off with `nvidia-smi -i {gpu} -mig 0` while it is idle)"
    )]
    MigModeOn { gpu: GpuUuid },
    /// NVML lists it and cannot read it.
    #[error("{gpu} cannot be read{}: {error}", if *.published { ", it is published with a taint" } else { " and is not published" })]
    Unreadable {
        gpu: GpuUuid,
        /// NVML's words.
        error: String,
        /// True if it is still published, tainted.
        published: bool,
    },
    /// It is unfit and the server cannot store the taint that would say so.
    #[error(
        "{gpu} is not published: it is tainted ({taint}) and the API server drops taints (feature gate DRADeviceTaints)"
    )]
    TaintsDropped {
        gpu: GpuUuid,
        /// The key of the first taint that counts.
        taint: String,
    },
    /// A value is over a limit of the API.
    #[error("{name} of {device} is left out: {why}")]
    ValueLeftOut {
        device: DeviceName,
        /// The attribute or capacity.
        name: String,
        why: String,
    },
    /// A claim holds a device whose GPU is gone.
    #[error(
        "{device} is held by a claim, but its GPU is gone: the device stays published with a taint until the claim is released"
    )]
    HeldAndGone {
        device: DeviceName,
        /// True if the node has a record of it, by which it is reported with its claim.
        recorded: bool,
    },
    /// A claim holds a device that is no longer offered.
    #[error(
        "{device} is held by a claim, but no longer offered ({why}): the device stays published with a taint until the claim is released"
    )]
    HeldAndWithdrawn {
        device: DeviceName,
        /// Why it is not offered.
        why: String,
    },
    /// Several modes are asked for, and only one of them can be offered.
    #[error("{gpu} is offered in only one of its modes ({}): {why}", .mode.name())]
    OneMode {
        gpu: GpuUuid,
        /// The mode that is offered.
        mode: Form,
        why: OneMode,
    },
    /// Its MIG mode would have to change for what is asked for.
    #[error("{gpu} is offered only in its current MIG mode, which changes only with a GPU reset")]
    NeedsReset { gpu: GpuUuid },
    /// Its partitions are lost when no program has it open.
    #[error(
        "{gpu} has no persistence mode: its partitions are lost whenever no program has the GPU open, as while the plugin of a node restarts (run nvidia-persistenced on the node, or set `nvidia-smi -i {gpu} -pm 1`)"
    )]
    NotPersistent { gpu: GpuUuid },
    /// Nothing of what its rules ask for can be offered.
    #[error(
        "{gpu} is not offered: it supports none of the modes of its rule (it does not support MIG, its MIG mode changes only with a GPU reset, or it has MIG instances that this driver did not create)"
    )]
    NothingOffered { gpu: GpuUuid },
    /// The server cannot store what shares need.
    #[error(
        "{gpu} is not offered in shares: they need Kubernetes 1.35 or later with the feature gate DRAConsumableCapacity (on by default from 1.36)"
    )]
    NoShares { gpu: GpuUuid },
    /// MPS shares need what the GPU or its node lacks.
    #[error("{gpu} is not offered in MPS shares: {lack}")]
    NoMps { gpu: GpuUuid, lack: String },
    /// All of its memory is held back.
    #[error("{gpu} is not offered in shares: its rule reserves all of its memory")]
    NothingToShare { gpu: GpuUuid },
    /// A MIG instance created outside of divvy that cannot be offered.
    #[error(
        "the MIG instance of {gpu} at memory slices {at} is not offered: it must have exactly one compute instance (create it with `nvidia-smi mig -i {gpu} -cci`)"
    )]
    NotOneComputeInstance {
        gpu: GpuUuid,
        /// Where it is.
        at: Placement,
    },
    /// Claims have devices of one GPU that it cannot be at once.
    #[error(
        "claims hold {devices}, which exclude each other on one GPU{}: no part of gpu-{gpu} is allocated until one of the claims is released", by(.claims)
    )]
    GivenTwice {
        /// The number of the GPU.
        gpu: u32,
        devices: String,
        /// The claims, each with its device; without those that have admin access.
        claims: Vec<String>,
    },
    /// The server cannot store what partitions need, or its scheduler does not survive it.
    #[error("{gpu} is not offered in partitions: {why}")]
    NoCounters { gpu: GpuUuid, why: NoPartitions },
    /// Its grid is larger than a counter set of the API.
    #[error(
        "{gpu} is not offered in partitions: it has {found} memory slices, a counter set has room for {max}"
    )]
    TooManySlices {
        gpu: GpuUuid,
        /// The number that it has.
        found: u32,
        /// The number that there may be.
        max: u32,
    },
    /// A profile has no name.
    #[error(
        "GPU instance profile {profile} of {gpu} is not offered: this version does not know it and the driver does not name it"
    )]
    UnknownProfile {
        gpu: GpuUuid,
        /// NVML's id of the profile.
        profile: u32,
    },
    /// The driver's numbers contradict each other, and counting by them would refuse what the
    /// hardware takes.
    #[error(
        "{counter} of {gpu} are not counted: partitions that fit together have {needed}, the largest has {total}"
    )]
    CounterDropped {
        gpu: GpuUuid,
        counter: &'static str,
        /// The sum over partitions that fit beside each other.
        needed: u64,
        /// The total that the set would have.
        total: u64,
    },
    /// A claim holds a device that nothing is known about.
    #[error(
        "a claim holds {device}, which this version of the driver does not know: delete the claim, or run the version that published the device"
    )]
    HeldUnknown { device: DeviceName },
}

impl From<LeftOut> for Finding {
    fn from(LeftOut { device, name, why }: LeftOut) -> Self {
        Self::ValueLeftOut { device, name, why }
    }
}

fn by(claims: &[String]) -> String {
    if claims.is_empty() {
        String::new()
    } else {
        format!(" ({})", claims.join(", "))
    }
}
