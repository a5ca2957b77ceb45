//! The document's types, field for field, in the order in which they are written. Fields of the
//! format that divvy never writes are left out.

use serde::{Deserialize, Serialize};

/// CDI file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// Version of the format; [`Spec::into_json_bytes`] finds the lowest that the content needs.
    pub cdi_version: String,
    /// Vendor and class, as `vendor/class`.
    pub kind: String,
    /// Devices, by unique name.
    pub devices: Vec<Device>,
    /// Edits that are applied once to a container that asks for any of the devices.
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// Device that a container may ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Name, unique within the kind over all files of the folder.
    pub name: String,
    /// Edits of a container that asks for this device; must not be empty.
    pub container_edits: ContainerEdits,
}

/// Changes to a container's OCI configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// Variables as `NAME=value`, replacing the image's and the pod's value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes to make, with the cgroup rule that allows their use.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Programs that the runtime calls on the host while it makes the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Bind mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Extra groups of the container's process (0.7.0).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
}

impl ContainerEdits {
    /// Makes edits of environment variables only.
    pub fn env<S: Into<String>>(env: impl IntoIterator<Item = S>) -> Self {
        Self {
            env: env.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// Returns `true` if nothing would be changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Device node in the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    #[serde(rename = "type")]
    node_type: String,
    pub major: u32,
    pub minor: u32,
    /// Permission bits of the node.
    file_mode: u32,
    /// Rights that the device cgroup gives: `r`, `w` and `m`.
    permissions: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gid: Option<u32>,
}

impl DeviceNode {
    /// Describes a character device that need not exist on the host, with all rights of use
    /// (`rwm`). Group 0 is left out.
    pub fn character(path: impl Into<String>, major: u32, minor: u32, mode: u32, gid: u32) -> Self {
        Self {
            path: path.into(),
            node_type: "c".to_owned(),
            major,
            minor,
            file_mode: mode,
            permissions: "rwm".to_owned(),
            gid: (gid != 0).then_some(gid),
        }
    }
}

/// Bind mount: a mount with `bind` or `rbind` among its options.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// Moment at which a runtime calls a hook, under its name in the OCI runtime specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stage {
    /// Moment in the runtime's namespaces, after the container's were made: a hook knows the
    /// container's process, and through it its cgroup.
    CreateRuntime,
    /// Moment in the container's namespaces, before its root is changed: a hook makes driver
    /// libraries findable.
    CreateContainer,
}

/// Program that the runtime calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    #[serde(rename = "hookName")]
    stage: Stage,
    /// Absolute path on the host.
    pub path: String,
    /// Arguments, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Whole environment. An empty one stands for the runtime's, which may come from the container
    /// image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds until the runtime gives up on it.
    pub timeout: u32,
}

impl Hook {
    /// Describes a program that is called at a stage.
    pub fn new(
        stage: Stage,
        path: String,
        args: Vec<String>,
        env: Vec<String>,
        timeout: u32,
    ) -> Self {
        Self {
            stage,
            path,
            args,
            env,
            timeout,
        }
    }
}
