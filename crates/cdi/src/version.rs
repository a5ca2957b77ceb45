//! The lowest format version that a document's content needs.

use std::fmt;

use crate::types::{ContainerEdits, Spec};

/// Published versions of the format that gate a field, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CdiVersion {
    /// The base: environment, device nodes, mounts, hooks.
    V0_3_0,
    /// `mount.type`.
    V0_4_0,
    /// `deviceNode.hostPath`; device names that begin with a digit.
    V0_5_0,
    /// Annotations; dots in the class.
    V0_6_0,
    /// `intelRdt`, `additionalGids`.
    V0_7_0,
    /// `netDevices`, `intelRdt.schemata`.
    V1_1_0,
}

impl fmt::Display for CdiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_4_0 => "0.4.0",
            Self::V0_5_0 => "0.5.0",
            Self::V0_6_0 => "0.6.0",
            Self::V0_7_0 => "0.7.0",
            Self::V1_1_0 => "1.1.0",
        })
    }
}

impl Spec {
    /// The lowest version whose readers accept this document. Older runtimes refuse newer versions, so nothing higher than
    /// needed is ever written.
    pub fn minimum_version(&self) -> CdiVersion {
        let mut least = of_edits(&self.container_edits);
        for device in &self.devices {
            least = least.max(of_edits(&device.container_edits));
            if device.name.starts_with(|c: char| c.is_ascii_digit()) {
                least = least.max(CdiVersion::V0_5_0);
            }
            if !device.annotations.is_empty() {
                least = least.max(CdiVersion::V0_6_0);
            }
        }
        let dotted_class = self.kind.split_once('/').is_some_and(|(_, class)| class.contains('.'));
        if !self.annotations.is_empty() || dotted_class {
            least = least.max(CdiVersion::V0_6_0);
        }
        least
    }
}

pub(crate) fn of_edits(edits: &ContainerEdits) -> CdiVersion {
    let mut least = CdiVersion::V0_3_0;
    if edits.mounts.iter().any(|m| m.mount_type.is_some()) {
        least = least.max(CdiVersion::V0_4_0);
    }
    if edits.device_nodes.iter().any(|n| n.host_path.is_some()) {
        least = least.max(CdiVersion::V0_5_0);
    }
    if edits.intel_rdt.is_some() || !edits.additional_gids.is_empty() {
        least = least.max(CdiVersion::V0_7_0);
    }
    if !edits.net_devices.is_empty() || edits.intel_rdt.as_ref().is_some_and(|r| !r.schemata.is_empty()) {
        least = least.max(CdiVersion::V1_1_0);
    }
    least
}
