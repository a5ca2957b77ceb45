//! Refusals of claims, in words for the person who wrote the claim, with the remedy.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use divvy_api::{ConfigError, MemoryBound};
use divvy_gpu::Retry;
use divvy_model::{
    Burst, ClaimUid, DeviceName, Format, GpuError, GpuUuid, MpsFault, MpsServer,
    ParseDeviceNameError, Quantity,
};

use crate::{Claim, ClaimRef, Clash, ConfigSource, OtherClaim, Record, RecordedDevice};

/// A claim that is not served.
#[derive(Debug)]
pub struct Refusal {
    pub claim: ClaimRef,
    /// The device that cannot be given, where it is about one.
    pub device: Option<DeviceName>,
    /// The device's GPU, where that is known.
    pub gpu: Option<GpuUuid>,
    /// Obstacle.
    pub why: Why,
}

/// Reason why a claim is not served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Why {
    /// A config entry of ours that cannot be decoded.
    #[error("config entry {} of {} for this driver is invalid", .at.index, .at.place())]
    BadConfig {
        at: EntryAt,
        /// Error of the decoder.
        #[source]
        source: ConfigError,
    },
    /// A config entry that names a request whose device is of another kind.
    #[error("config entry {} of {} is a {found}, but request {request:?} was allocated this device, which takes a {wanted}", .at.index, .at.place())]
    WrongConfigKind {
        at: EntryAt,
        /// The request it names.
        request: String,
        /// The entry's kind, as written.
        found: String,
        wanted: &'static str,
    },
    /// A device name that this version cannot read.
    #[error("this driver publishes no such device")]
    UnknownDevice(#[source] ParseDeviceNameError),
    /// A number that no GPU of this node has.
    #[error("no GPU of this node has this number any more")]
    UnknownOrdinal,
    /// The GPU is known but not there.
    #[error("its GPU does not answer on this node")]
    DeviceGone,
    /// The GPU is there but cannot be read.
    #[error("its GPU cannot be read")]
    GpuUnreadable(#[source] GpuError),
    /// There is no inventory yet.
    #[error("the NVIDIA driver of this node does not answer yet")]
    NoInventory,
    /// MIG mode is on where a whole GPU or a share was allocated, or off where a partition was, and
    /// is not ours to change.
    #[error("{}", if *.on { "it is not a partition, but MIG mode of its GPU is on" } else { "it is a partition, but MIG mode of its GPU is off" })]
    MigMode {
        /// True if it is on.
        on: bool,
    },
    /// The GPU's compute mode keeps every container from it.
    #[error("compute mode of its GPU is PROHIBITED, so its container would fail")]
    ComputeProhibited,
    /// A partition that the GPU cannot have.
    #[error("its GPU does not support this partition")]
    NoSuchPartition,
    /// The driver does not report what the GPU can be cut into.
    #[error("the NVIDIA driver does not report the MIG profiles of its GPU")]
    PartitionsUnknown,
    /// Admin access to a partition.
    #[error("it is a partition, for which admin access is not supported")]
    AdminPartition,
    /// Admin access to a share.
    #[error("it is a share, for which admin access is not supported")]
    AdminShare,
    /// A device for admin access was allocated to a request without it.
    #[error("it is only for requests with adminAccess: true, because it reserves nothing")]
    AdminOnly,
    /// A claim got two devices that need the same part of a GPU.
    #[error("it needs the same part of its GPU as device {other} of the same claim")]
    Overlap {
        /// The device that came first.
        other: DeviceName,
    },
    /// A claim got the same exclusive device twice.
    #[error("it is allocated twice to the claim")]
    AllocatedTwice,
    /// The GPU is fenced.
    #[error("its GPU is fenced because the outcome of an earlier change is unknown: {0}")]
    Fenced(String),
    /// The GPU's state was written by a later version.
    #[error(
        "the state of its GPU was written by a later version of divvy (format {version}) and is left unchanged"
    )]
    GpuStateNewer { version: u32 },
    /// The claim's own record was written by a later version.
    #[error(
        "its record was written by a later version of divvy (format {version}) and is left unchanged"
    )]
    RecordNewer { version: u32 },
    /// Another claim, whose record was written by a later version, may hold the GPU.
    #[error(
        "its GPU is held by claim UID {holder}, whose record was written by a later version of divvy (format {version})"
    )]
    HeldByNewer {
        /// The claim that holds it.
        holder: ClaimUid,
        version: u32,
    },
    /// A claim that is in use holds what is wanted.
    #[error("{}{holder}, which is in use with device {held}", .clash.begin())]
    InUse {
        /// The claim that holds it.
        holder: OtherClaim,
        /// The holder's device.
        held: DeviceName,
        /// Kind of the conflict.
        clash: Clash,
    },
    /// A config requests a device node of the host that the node does not offer to claims.
    #[error("the claim's config requests {path} (extraNodes), but this node offers {} to claims", offered_nodes(.offered))]
    ExtraNode {
        /// Path, as the config has it.
        path: String,
        /// The nodes that claims may request.
        offered: Vec<String>,
    },
    /// Nothing lives at the place of a partition that an administrator was to make.
    #[error(
        "its MIG instance does not exist; the instances of this GPU are static, so an administrator has to create it"
    )]
    NoStaticPartition,
    /// The claim was promised a cap of its memory, and the node caps none any more.
    #[error("the memory of its share is to be capped, which cannot be done: {0}")]
    CapLost(&'static str),
    /// Its config sets a limit of memory, which nothing keeps here.
    #[error("limits.memory of its config cannot be kept on this node: {0}")]
    LimitNotKept(&'static str),
    /// A limit of memory that is less than what the scheduler counts.
    #[error("limits.memory of its config, {}, is below the {} that its share has been granted", limit_words(.bound, *.limit), bytes(*.request))]
    LimitBelowRequest {
        /// The limit as it is written.
        bound: MemoryBound,
        /// In bytes.
        limit: u64,
        /// Bytes that the share was granted.
        request: u64,
    },
    /// A limit of memory that is more than the GPU has.
    #[error("limits.memory of its config, {}, is above the {} that all shares of its GPU have together", limit_words(.bound, *.limit), bytes(*.all))]
    LimitAboveGpu {
        /// The limit as it is written.
        bound: MemoryBound,
        /// In bytes.
        limit: u64,
        /// Bytes of the GPU that shares can have.
        all: u64,
    },
    /// A limit of memory that is further above the request than the policy allows.
    #[error("limits.memory of its config, {}, is above {}, the most that the policy of its GPU allows for the {} that its share has been granted (shares.burst.memory: {burst})", limit_words(.bound, *.limit), bytes(*.most), bytes(*.request))]
    LimitAbovePolicy {
        /// The limit as it is written.
        bound: MemoryBound,
        /// In bytes.
        limit: u64,
        /// Bytes that it may be.
        most: u64,
        /// The policy's factor.
        burst: Burst,
        /// Bytes that the share was granted.
        request: u64,
    },
    /// The node, or the rules of the GPU, lack what an MPS share needs.
    #[error("it is an MPS share, which cannot be served: {0}")]
    MpsUnavailable(&'static str),
    /// The node, or the GPU, lacks what the MPS server of a claim's config needs.
    #[error("its config asks for an MPS server, which cannot be had here: {0}")]
    MpsServerUnavailable(&'static str),
    /// The config of an MPS share asks for other limits than a slot has.
    #[error(
        "its config limits it to {asked}, and its MPS server has one limit for all its clients: each of {} equal slots has {}", .slot.places(), slot_in_words(.slot)
    )]
    MpsUnequal {
        /// The limit, as the config has it.
        asked: String,
        /// The server.
        slot: MpsServer,
    },
    /// The config of an MPS share limits its compute to less than it was granted.
    #[error(
        "limits.cores of its MpsConfig, {asked}, is below the {granted} percent that its share has been granted"
    )]
    CoresBelowGrant {
        /// Percent, as the config has it.
        asked: u32,
        /// Percent that the share was granted.
        granted: u32,
    },
    /// More claims have shares of an MPS server than it has slots.
    #[error("all {slots} slots of the MPS server of its GPU are held by other claims")]
    MpsFull {
        /// The number of slots.
        slots: u32,
    },
    /// The MPS server that the claim would use serves no new client.
    #[error(
        "the MPS server that it would share with other claims {fault}, and no program can connect to it"
    )]
    MpsWedged { fault: MpsFault },
    /// A claim has MPS of two GPUs.
    #[error(
        "its claim has MPS on device {other} already, and a program can use the MPS server of one GPU or partition only"
    )]
    MpsTargets {
        /// The device that came first.
        other: DeviceName,
    },
    /// The partition that the claim was given is gone under its pods.
    #[error(
        "its MIG instance is gone: the GPU was reset, the driver loaded again, or the instance destroyed"
    )]
    PartitionGone,
    /// The partition of another claim on the GPU is gone under that claim's pods.
    #[error(
        "a MIG instance of {holder} on its GPU is gone (the GPU was reset, the driver loaded again, or the instance destroyed), and the driver may give the device nodes that the pods of that claim still have to a new instance"
    )]
    PartitionGoneBeside {
        /// The claim whose partition is gone.
        holder: OtherClaim,
    },
    /// The hand-over took longer than a call may last.
    #[error("it is still held by {holder}, to which it is no longer allocated: {why}")]
    StillHeld {
        /// The claim that holds it.
        holder: OtherClaim,
        /// Obstacle of the holder.
        why: String,
    },
    /// Processes that no claim accounts for compute on the GPU.
    #[error("its GPU is used by process {0}, which belongs to no claim of this driver")]
    ForeignProcesses(String),
    /// The GPU does not list its processes now: some may belong to no claim.
    #[error("the processes on its GPU cannot be listed, and one may belong to no claim")]
    ProcessesUnknown(#[source] GpuError),
    /// Another driver of ours has given the GPU out.
    #[error("its GPU is held by {0}")]
    OtherDriver(String),
    /// A record that cannot be read may hold the GPU, and the API could not say.
    #[error("the record of claim UID {holder} cannot be read, and it may hold its GPU: {reason}")]
    UnreadableHolder {
        /// UID of the record.
        holder: String,
        /// Error in the record.
        reason: String,
    },
}

/// Position of a config entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryAt {
    /// Source: the DeviceClass or the claim.
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
                "correct spec.devices.config of the claim or its template; a claim's spec is immutable, so create a new claim"
            }
        }
    }
}

impl Clash {
    fn begin(self) -> &'static str {
        match self {
            Self::Device => "it is held by ",
            Self::Mode => "it needs its GPU exclusively or in another mode than ",
        }
    }
}

/// Returns a limit as it is written, with what it comes to if that is a percentage.
fn limit_words(bound: &MemoryBound, limit: u64) -> String {
    match bound {
        MemoryBound::Amount(_) => bound.to_string(),
        MemoryBound::Percent(_) => format!("{bound} or {}", bytes(limit)),
    }
}

fn bytes(amount: u64) -> Quantity {
    Quantity::from_units(amount, Format::BinarySi)
}

fn offered_nodes(paths: &[String]) -> Cow<'static, str> {
    if paths.is_empty() {
        "none".into()
    } else {
        format!("only {}", paths.join(", ")).into()
    }
}

/// Returns what a slot has, in words.
fn slot_in_words(server: &MpsServer) -> String {
    let threads = format!("{} percent of the threads", server.cores);
    match server.memory_mib {
        Some(mib) => format!("{threads} and {mib}Mi"),
        None => threads,
    }
}

const RESCHEDULE: &str = "delete the pod and the claim, so that they are scheduled again";
const NEW_CLAIM: &str = "A claim's spec is immutable, so a change of it takes a new claim";
const SCHEDULER: &str = "this is a bug in the scheduler: delete the pod and the claim";

impl Why {
    /// Refuses a claim because of one of its devices.
    pub fn about(self, claim: &Claim, device: &RecordedDevice) -> Refusal {
        self.of(claim, Some(&device.allocated.device), Some(&device.gpu))
    }

    /// Refuses a claim.
    pub fn of(self, claim: &Claim, device: Option<&DeviceName>, gpu: Option<&GpuUuid>) -> Refusal {
        Refusal {
            claim: claim.reference(),
            device: device.cloned(),
            gpu: gpu.cloned(),
            why: self,
        }
    }

    /// Returns a short stable name, for metrics and conditions, and the class of retry.
    pub(crate) fn kind(&self) -> (&'static str, Retry) {
        use Retry::{Later, Never, Soon};
        match self {
            // `Never` for what is fixed in the claim, its allocation or the program: another
            // attempt would read the same. `Later` for what takes longer than a call: an
            // administrator, a reset, the end of another claim. `Soon` for what often ends within
            // one: a driver that starts, a process that is ending.
            Self::BadConfig { .. } => ("bad-config", Never),
            Self::WrongConfigKind { .. } => ("wrong-config-kind", Never),
            Self::UnknownDevice(_) | Self::UnknownOrdinal | Self::NoSuchPartition => {
                ("unknown-device", Never)
            }
            Self::DeviceGone => ("device-gone", Later),
            Self::GpuUnreadable(error) | Self::ProcessesUnknown(error) => (
                "gpu-unreadable",
                if error.is_transient() { Soon } else { Later },
            ),
            Self::NoInventory => ("no-driver", Soon),
            // An administrator has to change the mode, which may take longer than the 40 s of a
            // call.
            Self::MigMode { .. } => ("wrong-mode", Later),
            Self::ComputeProhibited => ("compute-mode", Later),
            Self::PartitionsUnknown => ("partitions-unknown", Later),
            Self::AdminPartition => ("admin-partition", Never),
            Self::AdminShare => ("admin-share", Never),
            Self::AdminOnly => ("admin-only", Never),
            Self::AllocatedTwice | Self::Overlap { .. } => ("allocated-twice", Never),
            // The probe of the hardware may answer within the same call. A failed prepare costs the
            // pod 60 to 90 s, so a short wait is worth it.
            Self::Fenced(_) => ("fenced", Soon),
            Self::GpuStateNewer { .. } | Self::RecordNewer { .. } | Self::HeldByNewer { .. } => {
                ("newer-state", Never)
            }
            // The scheduler has given one part of the GPU twice. The holder keeps it for as long as
            // its pods run.
            Self::InUse {
                clash: Clash::Device,
                ..
            } => ("conflict", Never),
            Self::InUse {
                clash: Clash::Mode, ..
            } => ("mode-conflict", Never),
            Self::NoStaticPartition => ("no-static-partition", Later),
            Self::CapLost(_) => ("cap-lost", Later),
            Self::LimitNotKept(_) => ("limit-not-kept", Later),
            Self::LimitBelowRequest { .. }
            | Self::LimitAboveGpu { .. }
            | Self::CoresBelowGrant { .. } => ("bad-limit", Never),
            Self::LimitAbovePolicy { .. } => ("limit-above-policy", Later),
            Self::MpsUnavailable(_) | Self::MpsServerUnavailable(_) => ("mps-unavailable", Later),
            Self::MpsUnequal { .. } => ("mps-unequal", Never),
            Self::MpsFull { .. } => ("mps-full", Later),
            // A round starts it anew within seconds once its clients have ended.
            Self::MpsWedged { .. } => ("mps-wedged", Soon),
            Self::MpsTargets { .. } => ("mps-targets", Never),
            Self::PartitionGone | Self::PartitionGoneBeside { .. } => ("partition-gone", Later),
            Self::ExtraNode { .. } => ("extra-node", Never),
            Self::StillHeld { .. } => ("held", Later),
            Self::ForeignProcesses(_) => ("foreign-processes", Soon),
            Self::OtherDriver(_) => ("other-driver", Soon),
            // Its record is rebuilt as soon as the API answers, in a round of reconcile.
            Self::UnreadableHolder { .. } => ("unreadable-record", Later),
        }
    }

    /// Returns the remedy; `gpu` is the name for use in commands.
    fn hint(&self, gpu: &str) -> Cow<'static, str> {
        match self {
            Self::BadConfig { at, .. } | Self::WrongConfigKind { at, .. } => at.fix().into(),
            Self::UnknownDevice(_) | Self::UnknownOrdinal | Self::NoSuchPartition => RESCHEDULE.into(),
            Self::DeviceGone => format!("{RESCHEDULE}, or restore the GPU").into(),
            Self::GpuUnreadable(_) | Self::ProcessesUnknown(_) | Self::NoInventory => {
                "check the node plugin's log, and that nvidia-smi works on the node".into()
            }
            Self::MigMode { on } => {
                let (turn, to) = if *on { ("off", 0) } else { ("on", 1) };
                format!("turn it {turn} with `nvidia-smi -i {gpu} -mig {to}`, or {RESCHEDULE}").into()
            }
            Self::ComputeProhibited => {
                format!("an administrator has set this mode; reset it with `nvidia-smi -i {gpu} -c DEFAULT`").into()
            }
            Self::PartitionsUnknown => format!(
                "drivers before version 550 report them only with MIG mode on: turn it on with `nvidia-smi -i {gpu} -mig 1`"
            )
            .into(),
            Self::AdminPartition => "request the whole GPU, which gives access to all its partitions".into(),
            Self::AdminShare => "request the whole GPU, which gives access to all its processes".into(),
            Self::AdminOnly => "request a GPU, a partition or a share".into(),
            Self::AllocatedTwice | Self::Overlap { .. } => SCHEDULER.into(),
            Self::Fenced(_) => "the plugin checks it again automatically; a reboot ends the fence".into(),
            Self::GpuStateNewer { .. } => "run that version again, or reboot and remove the file".into(),
            Self::RecordNewer { .. } => "run that version again, or delete the pod and the claim".into(),
            Self::HeldByNewer { .. } => {
                "run that version again, or delete the holding claim and its pod".into()
            }
            Self::InUse { clash: Clash::Device, .. } => {
                "the scheduler allocated one GPU to both claims: delete one of them and its pod".into()
            }
            Self::InUse { clash: Clash::Mode, .. } => {
                "the scheduler does not count the modes of a GPU correctly (too old, or modified): delete one of the two claims and its pod. The node now offers each GPU in one mode only".into()
            }
            Self::ExtraNode { path, .. } => {
                format!("remove {path} from the config, or let an administrator add it to the chart value extraNodes").into()
            }
            Self::NoStaticPartition => format!("create it with nvidia-smi, or {RESCHEDULE}").into(),
            Self::LimitNotKept(_) => {
                "remove limits.memory, or have the claim select memoryLimitMaxPercent >= 100, so that it gets a node that keeps limits; a claim's spec is immutable, so create a new claim".into()
            }
            Self::LimitBelowRequest { .. } => {
                format!("raise limits.memory to the request or more, or leave it out: the limit is then the request. {NEW_CLAIM}").into()
            }
            Self::LimitAboveGpu { all, .. } => {
                format!("lower limits.memory to {} or less. {NEW_CLAIM}", bytes(*all)).into()
            }
            Self::LimitAbovePolicy { limit, request, .. } => {
                // Rounded up: a factor that is rounded down would not do.
                let percent = (u128::from(*limit) * 100).div_ceil(u128::from(*request).max(1));
                format!("lower limits.memory, select memoryLimitMaxPercent >= {percent}, or raise shares.burst.memory in the GpuPolicy. {NEW_CLAIM}").into()
            }
            Self::CapLost(_) | Self::MpsUnavailable(_) => format!("restore that on the node, or {RESCHEDULE}").into(),
            Self::MpsServerUnavailable(_) => format!(
                "restore that on the node, select nodes that have it, or remove mps from the GpuConfig of the claim or class. {NEW_CLAIM}"
            ).into(),
            Self::MpsUnequal { .. } => {
                "remove limits from the MpsConfig of the claim or class, or change shares.slots in the GpuPolicy".into()
            }
            Self::CoresBelowGrant { .. } => {
                format!("raise limits.cores to the request or more, or leave it out: the limit is then the request. {NEW_CLAIM}").into()
            }
            Self::MpsFull { .. } => {
                "shares.slots of its GpuPolicy is smaller than when the claims were allocated: delete the pod and the claim, or one of the others".into()
            }
            Self::MpsWedged { fault: MpsFault::Fault } => {
                "it is restarted once its last program has ended: delete the pods of the other claims, or this one (docs/runbooks/mps-wedged.md)".into()
            }
            Self::MpsWedged { fault: MpsFault::NoAnswer } => {
                "it ends with the last claim that has it: delete the pods of the other claims, or this one (docs/runbooks/mps-wedged.md)".into()
            }
            Self::MpsWedged { fault: MpsFault::Held } => {
                "it serves again once the process that holds it up has ended: delete its pod, which the Event MpsServerWedged of the other claims names (docs/runbooks/mps-wedged.md)".into()
            }
            Self::MpsTargets { .. } => "request MPS of several GPUs or partitions by a claim each, in a container each; a config with mps can name one of the requests".into(),
            Self::PartitionGone => {
                "delete all pods of the claim: a new pod gets a new instance once the claim is released".into()
            }
            Self::PartitionGoneBeside { .. } => "delete the pods of that claim".into(),
            Self::StillHeld { .. } => "it is free when the last container of that claim has ended".into(),
            Self::ForeignProcesses(_) => {
                "end the process, or remove the GPU from the driver that allocated it: a GPU belongs to one driver".into()
            }
            Self::OtherDriver(_) => {
                "a GPU belongs to one driver: release it there, or run the two drivers on different nodes".into()
            }
            Self::UnreadableHolder { .. } => {
                "the record is rebuilt when the API server answers".into()
            }
        }
    }
}

impl Refusal {
    /// Refuses a claim while what it was given under an earlier allocation is still in use.
    pub fn earlier_in_use(claim: &Claim, record: &Record, why: String) -> Option<Self> {
        let holder = OtherClaim::seen_from(&claim.namespace, &record.reference());
        let device = record.devices.first()?;
        Some(Why::StillHeld { holder, why }.about(claim, device))
    }

    /// Refuses a claim while what it was given before cannot be removed.
    pub fn earlier_stuck(claim: &Claim, record: &Record, why: String) -> Option<Self> {
        let device = record.devices.first()?;
        Some(Why::Fenced(why).about(claim, device))
    }

    /// Refuses a claim whose partition has gone since it was decided about.
    pub fn partition_gone(claim: &Claim) -> Self {
        Why::PartitionGone.of(claim, None, None)
    }

    /// Refuses a claim while it cannot be read whether its partitions live.
    pub fn partitions_unreadable(claim: &Claim, error: GpuError) -> Self {
        Why::GpuUnreadable(error).of(claim, None, None)
    }

    /// Refuses a claim while the NVIDIA driver does not answer.
    pub fn no_driver(claim: ClaimRef) -> Self {
        Self {
            claim,
            device: None,
            gpu: None,
            why: Why::NoInventory,
        }
    }

    /// Returns true if an open question about the GPU is in the way: asking the hardware again may
    /// answer it.
    pub fn is_about_doubt(&self) -> bool {
        matches!(self.why, Why::Fenced(_))
    }

    /// Returns true if a user of the GPU outside of this driver is in the way, which may last.
    pub fn is_about_others(&self) -> bool {
        matches!(self.why, Why::OtherDriver(_) | Why::ForeignProcesses(_))
    }

    /// Returns a short stable name, for metrics and conditions.
    pub fn category(&self) -> &'static str {
        self.why.kind().0
    }

    /// Returns the class of retry.
    pub fn retry(&self) -> Retry {
        self.why.kind().1
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            claim,
            device,
            gpu,
            why,
        } = self;
        match (device, gpu) {
            (Some(device), Some(gpu)) => write!(f, "device {device} ({gpu}) of claim {claim}: ")?,
            (Some(device), None) => write!(f, "device {device} of claim {claim}: ")?,
            (None, _) => write!(f, "claim {claim}: ")?,
        }
        write!(
            f,
            "{why} ({})",
            why.hint(gpu.as_ref().map_or("<GPU>", GpuUuid::as_str))
        )
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
        let arms = source
            .split("(\"")
            .skip(1)
            .filter_map(|rest| rest.split_once("\", "));
        let after = ["Soon)", "Later)", "Never)", "if error"];
        let categories: Vec<_> = arms
            .filter(|(_, rest)| after.iter().any(|end| rest.starts_with(end)))
            .collect();
        assert!(categories.len() > 20, "{}", categories.len());
        for (category, _) in categories {
            assert!(
                refusals.contains(&format!("`{category}`")),
                "{category} is not in docs/refusals.md"
            );
            assert!(
                runbook.contains(&format!("`{category}`")),
                "{category} is not in the runbook"
            );
        }
    }
}
