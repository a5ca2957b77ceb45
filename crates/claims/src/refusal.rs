//! Why a claim is not served, in words for the person who wrote it, and what to do about it.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use divvy_api::ConfigError;
use divvy_model::{ClaimUid, DeviceName, GpuError, GpuUuid, ParseDeviceNameError, TimeSlice};

use crate::{Claim, ClaimRef, Clash, ConfigSource, OtherClaim, RecordedDevice};

/// A claim that is not served.
#[derive(Debug)]
pub struct Refusal {
    /// The claim.
    pub claim: ClaimRef,
    /// The device that cannot be given, where it is about one.
    pub device: Option<DeviceName>,
    /// The device's GPU, where that is known.
    pub gpu: Option<GpuUuid>,
    /// What is in the way.
    pub why: Why,
}

/// What is in the way of a claim.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// A config entry of ours that cannot be decoded.
    #[error("config entry {} of {} for this driver cannot be used", .at.index, .at.place())]
    BadConfig {
        /// Which entry.
        at: EntryAt,
        /// What is wrong with it.
        #[source]
        source: ConfigError,
    },
    /// A config entry that names a request whose device is of another kind.
    #[error("config entry {} of {} is a {found}, but request {request:?} got this device, which takes a {wanted}", .at.index, .at.place())]
    WrongConfigKind {
        /// Which entry.
        at: EntryAt,
        /// The request it names.
        request: String,
        /// The entry's kind.
        found: &'static str,
        /// The device's.
        wanted: &'static str,
    },
    /// A device name that this version cannot read.
    #[error("this driver publishes no such device")]
    UnknownDevice(#[source] ParseDeviceNameError),
    /// A number that no GPU of this node has.
    #[error("no GPU of this node has this number: it was removed and forgotten")]
    UnknownOrdinal,
    /// The GPU is known but not there.
    #[error("its GPU is gone: it does not answer on this node")]
    DeviceGone,
    /// The GPU is there but cannot be read.
    #[error("its GPU cannot be read")]
    GpuUnreadable(#[source] GpuError),
    /// There is no inventory yet.
    #[error("the NVIDIA driver of this node does not answer yet")]
    NoInventory,
    /// MIG mode is on where a whole GPU or a share was allocated, or off where a partition was, and is not ours to change.
    #[error("{}", if *.on { "it is not a partition, but MIG mode of its GPU is on" } else { "it is a partition, but MIG mode of its GPU is off" })]
    MigMode {
        /// Whether it is on.
        on: bool,
    },
    /// The GPU's compute mode keeps every container from it.
    #[error("compute mode of its GPU is PROHIBITED, so its container would fail")]
    ComputeProhibited,
    /// A partition that the GPU cannot have.
    #[error("its GPU cannot be cut into such a partition")]
    NoSuchPartition,
    /// The driver does not report what the GPU can be cut into.
    #[error("the NVIDIA driver does not report what its GPU can be cut into")]
    PartitionsUnknown,
    /// Admin access to a partition.
    #[error("it is a partition, which admin access cannot have")]
    AdminPartition,
    /// Admin access to a share.
    #[error("it is a share, which admin access cannot have")]
    AdminShare,
    /// A device for admin access was allocated to a request without it.
    #[error("it is for requests with adminAccess: true only, since it reserves nothing")]
    AdminOnly,
    /// One claim got two devices that need the same part of a GPU.
    #[error("it needs the same part of its GPU as device {other}, which the claim has allocated too")]
    Overlap {
        /// The device that came first.
        other: DeviceName,
    },
    /// One claim got one exclusive device twice.
    #[error("the claim has it allocated twice")]
    AllocatedTwice,
    /// The GPU is fenced.
    #[error("its GPU is fenced, since an earlier change has an unknown outcome: {0}")]
    Fenced(String),
    /// The GPU's state was written by a later version.
    #[error("the state of its GPU was written by a later divvy (version {version}); it is left untouched")]
    GpuStateNewer {
        /// Version of the file.
        version: u32,
    },
    /// The claim's own record was written by a later version.
    #[error("its record was written by a later divvy (version {version}); it is left untouched")]
    RecordNewer {
        /// Version of the file.
        version: u32,
    },
    /// Another claim, whose record was written by a later version, may hold the GPU.
    #[error(
        "its GPU is held by claim UID {holder}, whose record was written by a later divvy (version {version})"
    )]
    HeldByNewer {
        /// The claim that holds it.
        holder: ClaimUid,
        /// Version of the file.
        version: u32,
    },
    /// A claim that is in use holds what is wanted.
    #[error("{}{holder}, which has {held} allocated and is in use{}", .clash.begin(), .clash.end())]
    InUse {
        /// The claim that holds it.
        holder: OtherClaim,
        /// The holder's device.
        held: DeviceName,
        /// Why the two do not go together.
        clash: Clash,
    },
    /// A claim asks for two time slices of one GPU.
    #[error(
        "the claim asks for time slice {wanted} with it and for {other_wanted} with device {other}, and a GPU has one for all"
    )]
    TwoTimeSlices {
        /// What is asked for with the device.
        wanted: TimeSlice,
        /// The device that came first.
        other: DeviceName,
        /// What is asked for with that.
        other_wanted: TimeSlice,
    },
    /// A config asks for a device node of the host that the node does not offer to claims.
    #[error("the claim's config asks for {path} (extraNodes), and this node offers {} to claims", offered_nodes(.offered))]
    ExtraNode {
        /// As the config has it.
        path: String,
        /// What claims may ask for.
        offered: Vec<String>,
    },
    /// Nothing lives at the place of a partition that an administrator was to make.
    #[error(
        "no MIG device lives at its place; the node's administrator makes those of this GPU (policy: static), and this driver makes none"
    )]
    NoStaticPartition,
    /// The hand-over took longer than a call may last.
    #[error("it is still held by {holder}, which no longer has it allocated: {why}")]
    StillHeld {
        /// The claim that holds it.
        holder: OtherClaim,
        /// What the holder waits for.
        why: String,
    },
    /// Processes that no claim accounts for compute on the GPU.
    #[error("its GPU is used by process {0}, which no claim of this driver accounts for")]
    ForeignProcesses(String),
    /// Another driver of ours has given the GPU out.
    #[error("its GPU is held by {0}")]
    OtherDriver(String),
    /// A record that cannot be read may hold the GPU, and the API could not say.
    #[error("the record of claim UID {holder} cannot be read, and it may hold its GPU: {reason}")]
    UnreadableHolder {
        /// UID of the record.
        holder: String,
        /// What is wrong with the record.
        reason: String,
    },
}

/// Whether trying again can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// It can pass within seconds: tried again inside the same call.
    Soon,
    /// It can pass, but not by waiting in the call: the kubelet tries again.
    Later,
    /// Something has to be changed first.
    Never,
}

/// Which config entry is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryAt {
    /// Whether it stands in the DeviceClass or in the claim.
    pub source: ConfigSource,
    /// Its place among the entries of that source, of all drivers, from 0.
    pub index: usize,
}

impl EntryAt {
    fn place(self) -> &'static str {
        match self.source {
            ConfigSource::Class => "its DeviceClass",
            ConfigSource::Claim => "the claim",
        }
    }

    fn fix(self) -> &'static str {
        match self.source {
            ConfigSource::Class => {
                "correct spec.config of the DeviceClass, then delete the claim: it holds a copy"
            }
            ConfigSource::Claim => {
                "correct spec.devices.config of the claim or its template; a claim's spec is immutable, so make it anew"
            }
        }
    }
}

impl Clash {
    fn begin(self) -> Cow<'static, str> {
        match self {
            Self::Device => "it is held by ".into(),
            Self::Mode => "it needs its GPU for itself or in another mode than ".into(),
            Self::TimeSlice { wanted, found } => {
                format!("it asks for time slice {wanted}, but {found} is set for ").into()
            }
        }
    }

    fn end(self) -> &'static str {
        if let Self::TimeSlice { .. } = self { ", and a GPU has one for all" } else { "" }
    }
}

fn offered_nodes(paths: &[String]) -> Cow<'static, str> {
    if paths.is_empty() { "none".into() } else { format!("only {}", paths.join(", ")).into() }
}

const RESCHEDULE: &str = "delete the pod and the claim, so that they are scheduled anew";
const SCHEDULER: &str = "this is a fault of the scheduler: delete the pod and the claim";

impl Why {
    /// The refusal of a claim for what is in the way of one of its devices.
    pub fn about(self, claim: &Claim, device: &RecordedDevice) -> Refusal {
        self.of(claim, Some(&device.allocated.device), Some(&device.gpu))
    }

    /// The refusal of a claim.
    pub fn of(self, claim: &Claim, device: Option<&DeviceName>, gpu: Option<&GpuUuid>) -> Refusal {
        Refusal { claim: claim.reference(), device: device.cloned(), gpu: gpu.cloned(), why: self }
    }

    /// A short stable name, for metrics and conditions, and whether trying again can help.
    pub(crate) fn kind(&self) -> (&'static str, Retry) {
        use Retry::{Later, Never, Soon};
        match self {
            Self::BadConfig { .. } => ("bad-config", Never),
            Self::WrongConfigKind { .. } => ("wrong-config-kind", Never),
            Self::UnknownDevice(_) | Self::UnknownOrdinal | Self::NoSuchPartition => {
                ("unknown-device", Never)
            }
            Self::DeviceGone => ("device-gone", Later),
            Self::GpuUnreadable(error) => ("gpu-unreadable", if error.is_transient() { Soon } else { Later }),
            Self::NoInventory => ("no-driver", Soon),
            Self::MigMode { .. } => ("wrong-mode", Later),
            Self::ComputeProhibited => ("compute-mode", Later),
            Self::PartitionsUnknown => ("partitions-unknown", Later),
            Self::AdminPartition => ("admin-partition", Never),
            Self::AdminShare => ("admin-share", Never),
            Self::AdminOnly => ("admin-only", Never),
            Self::AllocatedTwice | Self::Overlap { .. } => ("allocated-twice", Never),
            Self::Fenced(_) => ("fenced", Soon),
            Self::GpuStateNewer { .. } | Self::RecordNewer { .. } | Self::HeldByNewer { .. } => {
                ("newer-state", Never)
            }
            Self::InUse { clash: Clash::Device, .. } => ("conflict", Never),
            Self::InUse { clash: Clash::Mode, .. } => ("mode-conflict", Never),
            Self::InUse { clash: Clash::TimeSlice { .. }, .. } => ("time-slice-conflict", Later),
            Self::TwoTimeSlices { .. } => ("time-slice-conflict", Never),
            Self::NoStaticPartition => ("no-static-partition", Later),
            Self::ExtraNode { .. } => ("extra-node", Later),
            Self::StillHeld { .. } => ("held", Later),
            Self::ForeignProcesses(_) => ("foreign-processes", Soon),
            Self::OtherDriver(_) => ("other-driver", Soon),
            Self::UnreadableHolder { .. } => ("unreadable-record", Later),
        }
    }

    /// What to do about it; `gpu` is what commands name.
    fn hint(&self, gpu: &str) -> Cow<'static, str> {
        match self {
            Self::BadConfig { at, .. } | Self::WrongConfigKind { at, .. } => at.fix().into(),
            Self::UnknownDevice(_) | Self::UnknownOrdinal | Self::NoSuchPartition => RESCHEDULE.into(),
            Self::DeviceGone => format!("{RESCHEDULE}, or bring the GPU back").into(),
            Self::GpuUnreadable(_) | Self::NoInventory => {
                "see the node plugin's log; nvidia-smi must work on the node".into()
            }
            Self::MigMode { on } => {
                let (turn, to) = if *on { ("off", 0) } else { ("on", 1) };
                format!("turn it {turn} with `nvidia-smi -i {gpu} -mig {to}`, or {RESCHEDULE}").into()
            }
            Self::ComputeProhibited => {
                format!("set it back with `nvidia-smi -i {gpu} -c DEFAULT`; an administrator has changed it").into()
            }
            Self::PartitionsUnknown => format!(
                "before version 550 it does so only with MIG mode on: turn it on with `nvidia-smi -i {gpu} -mig 1`"
            )
            .into(),
            Self::AdminPartition => "ask for the whole GPU: it shows all its partitions".into(),
            Self::AdminShare => "ask for the whole GPU: it shows what all its shares do".into(),
            Self::AdminOnly => "ask for a GPU, a partition or a share".into(),
            Self::AllocatedTwice | Self::Overlap { .. } => SCHEDULER.into(),
            Self::Fenced(_) => "it is looked at again by itself; a reboot settles it".into(),
            Self::GpuStateNewer { .. } => "run that version again, or reboot and remove the file".into(),
            Self::RecordNewer { .. } => "run that version again, or delete the pod and the claim".into(),
            Self::HeldByNewer { .. } => {
                "run that version again, or delete the pod and claim named last".into()
            }
            Self::InUse { clash: Clash::Device, .. } => {
                "the scheduler gave one GPU to both: delete one of the two claims and its pod".into()
            }
            Self::InUse { clash: Clash::Mode, .. } => {
                "the scheduler must know better: it is too old or was changed; delete one of the two claims and its pod. The node now offers each GPU in one mode only".into()
            }
            Self::InUse { clash: Clash::TimeSlice { found, .. }, .. } => {
                format!("ask for {found} or for none in timeSlicing.interval, or wait until that claim is gone").into()
            }
            Self::TwoTimeSlices { .. } => {
                "write the same timeSlicing.interval into both configs; a claim's spec is immutable, so make it anew".into()
            }
            Self::ExtraNode { path, .. } => {
                format!("an administrator can add {path} to the chart value extraNodes; else leave it out of the config").into()
            }
            Self::NoStaticPartition => format!("make it again with nvidia-smi, or {RESCHEDULE}").into(),
            Self::StillHeld { .. } => "it is handed over when its last container is gone".into(),
            Self::ForeignProcesses(_) => {
                "end it, or take the GPU from whatever gave it out: a GPU belongs to one driver".into()
            }
            Self::OtherDriver(_) => {
                "a GPU belongs to one driver: let that one go, or give the two drivers different nodes".into()
            }
            Self::UnreadableHolder { .. } => {
                "it is rebuilt from the API server as soon as that answers".into()
            }
        }
    }
}

impl Refusal {
    /// A short stable name, for metrics and conditions.
    pub fn category(&self) -> &'static str {
        self.why.kind().0
    }

    /// Whether trying again can help.
    pub fn retry(&self) -> Retry {
        self.why.kind().1
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claim, device, gpu, why } = self;
        match (device, gpu) {
            (Some(device), Some(gpu)) => write!(f, "device {device} ({gpu}) of claim {claim}: ")?,
            (Some(device), None) => write!(f, "device {device} of claim {claim}: ")?,
            (None, _) => write!(f, "claim {claim}: ")?,
        }
        write!(f, "{why} ({})", why.hint(gpu.as_ref().map_or("<GPU>", GpuUuid::as_str)))
    }
}

impl Error for Refusal {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.why.source()
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_category_is_in_the_documents() {
        let refusals = include_str!("../../../docs/refusals.md");
        let runbook = include_str!("../../../docs/runbooks/prepare-fails.md");
        let source = include_str!("refusal.rs");
        let arms = source.split("(\"").skip(1).filter_map(|rest| rest.split_once("\", "));
        let after = ["Soon)", "Later)", "Never)", "if error"];
        let categories: Vec<_> =
            arms.filter(|(_, rest)| after.iter().any(|end| rest.starts_with(end))).collect();
        assert!(categories.len() > 20, "{}", categories.len());
        for (category, _) in categories {
            assert!(refusals.contains(&format!("`{category}`")), "{category} is not in docs/refusals.md");
            assert!(runbook.contains(&format!("`{category}`")), "{category} is not in the runbook");
        }
    }
}
