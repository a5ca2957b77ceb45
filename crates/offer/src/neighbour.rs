//! [`Use`]: a use of a GPU by others than claims of divvy.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use divvy_model::GpuUuid;
use serde::Serialize;

/// Uses of GPUs outside of divvy.
pub type Uses = BTreeMap<GpuUuid, BTreeSet<Use>>;

/// A use of a GPU outside of divvy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Use {
    /// A device plugin has given it out.
    DevicePlugin {
        resource: String,
        /// The pod.
        to: String,
    },
    /// Another DRA driver has given it out.
    Driver {
        name: String,
        /// The claim or pod.
        to: String,
    },
    /// divvy has given it out under another name of its driver, which it may have had before.
    OtherName {
        name: String,
        /// The claim or pod.
        to: String,
    },
    /// NVIDIA's plugin has given it out, in whose place divvy stands.
    NvidiaPlugin {
        /// The claim or pod.
        to: String,
    },
    /// These processes compute on it, and no claim of ours holds it.
    Processes {
        /// Their ids.
        pids: Vec<u32>,
    },
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DevicePlugin { resource, to } => {
                write!(
                    f,
                    "the device plugin of {resource} has allocated it to {to}"
                )
            }
            Self::Driver { name, to } => write!(f, "the driver {name} has allocated it to {to}"),
            Self::OtherName { name, to } => {
                write!(
                    f,
                    "divvy has allocated it to {to} under the driver name {name}"
                )
            }
            Self::NvidiaPlugin { to } => write!(f, "NVIDIA's plugin has allocated it to {to}"),
            Self::Processes { pids } => {
                let pids: Vec<_> = pids.iter().map(u32::to_string).collect();
                write!(
                    f,
                    "process {} computes on it without a claim of divvy",
                    pids.join(", ")
                )
            }
        }
    }
}

impl Use {
    /// Returns the value of the taint.
    pub fn label(&self) -> &'static str {
        match self {
            Self::DevicePlugin { .. } => "device-plugin",
            Self::Driver { .. } | Self::OtherName { .. } | Self::NvidiaPlugin { .. } => {
                "other-driver"
            }
            Self::Processes { .. } => "processes",
        }
    }
}
