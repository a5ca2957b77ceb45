//! The meaning of an Xid, by the immediate action of NVIDIA's catalog (October 2025, Ampere and
//! later).

use serde::{Deserialize, Serialize};

/// The reaction that an Xid asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum XidClass {
    /// The application's own affair: it has to be started again, the GPU is fine.
    Application,
    Information,
    /// The GPU has to be reset, or looked at by its maker.
    Reset,
    /// The node has to be rebooted.
    Node,
    /// The GPU's vitals show what has to be done.
    FollowUp,
    /// Not in the catalog, or without an action there.
    Unknown,
}

impl XidClass {
    pub const ALL: [Self; 6] = [
        Self::Application,
        Self::Information,
        Self::Reset,
        Self::Node,
        Self::FollowUp,
        Self::Unknown,
    ];

    /// The class of an Xid. 109 is a reset by the catalog, although NVIDIA's own Kubernetes
    /// components ignore it.
    pub fn of(xid: u32) -> Self {
        match xid {
            // `RESTART_APP`; and 43 and 45, by which the driver reports that it has stopped a
            // process.
            8
            | 11
            | 13
            | 25
            | 31
            | 32
            | 39..=41
            | 43
            | 45
            | 60
            | 68..=72
            | 75..=77
            | 80
            | 82..=86
            | 88
            | 89
            | 94
            | 96..=105
            | 126..=135
            | 139 => Self::Application,
            // `IGNORE`: notes of the driver, such as that a bad row was remapped (63).
            14 | 37 | 38 | 44 | 63 | 66 | 67 | 92 | 93 | 106 | 107 | 121 | 137 | 141 | 152
            | 153 | 157 | 160 | 161 => Self::Information,
            // `RESET_GPU`; 48 (uncorrectable ECC), whose workflow ends in a reset; and 54, 78 and
            // 159, for which the catalog names actions on the board or its software.
            46 | 48 | 54 | 62 | 64 | 78 | 95 | 109 | 110 | 119 | 120 | 136 | 140 | 143 | 155
            | 156 | 158 | 159 => Self::Reset,
            // `RESTART_BM`, for a GPU that fell off the bus, and `RESTART_VM`.
            79 | 151 => Self::Node,
            // Workflows. 154 reports that another recovery action is due.
            74 | 144..=150 | 154 => Self::FollowUp,
            _ => Self::Unknown,
        }
    }

    /// A short stable name, for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Application => "application",
            Self::Information => "information",
            Self::Reset => "reset",
            Self::Node => "node",
            Self::FollowUp => "follow-up",
            Self::Unknown => "unknown",
        }
    }

    /// Returns whether the GPU is fit although it reported this.
    pub fn is_harmless(self) -> bool {
        matches!(self, Self::Application | Self::Information)
    }
}
