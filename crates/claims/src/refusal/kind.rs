//! What kind of refusal it is: for metrics and conditions, and for whether to try again.

use super::Refusal;

/// Whether trying again can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// It can pass within seconds: tried again inside the same call.
    Soon,
    /// It can pass, but not by waiting in the call: the kubelet tries again.
    Later,
    /// Somebody has to change something.
    Never,
}

impl Refusal {
    /// A short stable name, for metrics and conditions.
    pub fn category(&self) -> &'static str {
        match self {
            Self::BadConfig { .. } => "bad-config",
            Self::WrongConfigKind { .. } => "wrong-config-kind",
            Self::UnknownDevice { .. } | Self::UnknownOrdinal { .. } | Self::NoSuchPartition { .. } => {
                "unknown-device"
            }
            Self::DeviceGone { .. } => "device-gone",
            Self::GpuUnreadable { .. } => "gpu-unreadable",
            Self::NoInventory => "no-driver",
            Self::MigModeOn { .. } | Self::MigModeOff { .. } => "wrong-mode",
            Self::ComputeMode { .. } => "compute-mode",
            Self::PartitionsUnknown { .. } => "partitions-unknown",
            Self::AdminPartition { .. } => "admin-partition",
            Self::AdminShare { .. } => "admin-share",
            Self::AdminOnly { .. } => "admin-only",
            Self::AllocatedTwice { .. } | Self::Overlap { .. } => "allocated-twice",
            Self::Fenced { .. } => "fenced",
            Self::GpuStateNewer { .. } | Self::RecordNewer { .. } | Self::HeldByNewer { .. } => "newer-state",
            Self::HeldByLiveClaim { .. } => "conflict",
            Self::ModeConflict { .. } => "mode-conflict",
            Self::TimeSliceConflict { .. } | Self::TwoTimeSlices { .. } => "time-slice-conflict",
            Self::TimeSliceUnsupported { .. } => "time-slice-unsupported",
            Self::NoStaticPartition { .. } => "no-static-partition",
            Self::StillHeld { .. } => "held",
            Self::Strangers { .. } => "foreign-processes",
            Self::OtherDriver { .. } => "other-driver",
            Self::UnreadableHolder { .. } => "unreadable-record",
        }
    }

    /// Whether trying again can help.
    pub fn retry(&self) -> Retry {
        match self {
            Self::GpuUnreadable { source, .. } if !source.is_transient() => Retry::Later,
            Self::NoInventory
            | Self::OtherDriver { .. }
            | Self::Strangers { .. }
            | Self::Fenced { .. }
            | Self::GpuUnreadable { .. } => Retry::Soon,
            Self::DeviceGone { .. }
            | Self::MigModeOn { .. }
            | Self::MigModeOff { .. }
            | Self::ComputeMode { .. }
            | Self::PartitionsUnknown { .. }
            | Self::StillHeld { .. }
            | Self::TimeSliceConflict { .. }
            | Self::NoStaticPartition { .. }
            | Self::UnreadableHolder { .. } => Retry::Later,
            Self::BadConfig { .. }
            | Self::WrongConfigKind { .. }
            | Self::UnknownDevice { .. }
            | Self::UnknownOrdinal { .. }
            | Self::NoSuchPartition { .. }
            | Self::AdminPartition { .. }
            | Self::AdminShare { .. }
            | Self::AdminOnly { .. }
            | Self::Overlap { .. }
            | Self::AllocatedTwice { .. }
            | Self::GpuStateNewer { .. }
            | Self::RecordNewer { .. }
            | Self::HeldByNewer { .. }
            | Self::ModeConflict { .. }
            | Self::TwoTimeSlices { .. }
            | Self::TimeSliceUnsupported { .. }
            | Self::HeldByLiveClaim { .. } => Retry::Never,
        }
    }
}
