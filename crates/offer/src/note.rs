//! [`Note`]: what is not published, or not as it could be, and why.

use divvy_model::mig::Placement;
use divvy_model::{DeviceName, GpuUuid};

use crate::{OfferedMode, OneMode};

/// Something that was left out, with its reason. The caller logs each once, when it first appears.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Note {
    /// Its MIG mode is on: it is for partitions.
    #[error(
        "{gpu} is not published as a whole GPU: its MIG mode is on (turn it off with `nvidia-smi -i {gpu} -mig 0` while it is idle)"
    )]
    MigModeOn { gpu: GpuUuid },
    /// NVML lists it and cannot read it.
    #[error("{gpu} cannot be read{}: {error}", if *.published { ", it is published with a taint" } else { " and is not published" })]
    Unreadable {
        gpu: GpuUuid,
        /// What NVML said.
        error: String,
        /// Whether it is still published, tainted.
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
    HeldAndGone { device: DeviceName },
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
        mode: OfferedMode,
        why: OneMode,
    },
    /// Its MIG mode would have to change for what is asked for.
    #[error("{gpu} is offered only in its current MIG mode, which changes only with a GPU reset")]
    NeedsReset { gpu: GpuUuid },
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
    /// Its MIG mode is on, and the server cannot store what partitions need.
    #[error(
        "{gpu} is not offered in partitions: that needs Kubernetes 1.35 or later with the feature gate DRAPartitionableDevices"
    )]
    NoCounters { gpu: GpuUuid },
    /// Its grid is larger than a counter set of the API.
    #[error(
        "{gpu} is not offered in partitions: it has {found} memory slices, a counter set has room for {max}"
    )]
    TooManySlices {
        gpu: GpuUuid,
        /// How many it has.
        found: u32,
        /// How many there may be.
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
    /// The driver's numbers contradict each other, and counting by them would refuse what the hardware takes.
    #[error(
        "{counter} of {gpu} are not counted: partitions that fit together have {needed}, the largest has {total}"
    )]
    CounterDropped {
        gpu: GpuUuid,
        counter: &'static str,
        /// What partitions that fit beside each other have in sum.
        needed: u64,
        /// What the set would have.
        total: u64,
    },
    /// A claim holds a device that nothing is known about.
    #[error(
        "a claim holds {device}, which this version of the driver does not know: delete the claim, or run the version that published the device"
    )]
    HeldUnknown { device: DeviceName },
}

fn by(claims: &[String]) -> String {
    if claims.is_empty() { String::new() } else { format!(" ({})", claims.join(", ")) }
}
