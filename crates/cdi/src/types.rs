//! The document's types, field for field, in the order in which they are written. Fields of the format that divvy never
//! writes are left out.

use serde::{Deserialize, Serialize};

/// One CDI file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// Version of the format; [`Spec::into_json_bytes`] finds the lowest that the content needs.
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    /// The devices, by unique name.
    pub devices: Vec<Device>,
    /// Applied once to a container that asks for any of the devices.
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// One device that a container may ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Unique within the kind, over all files of the folder.
    pub name: String,
    /// What a container that asks for this device gets; must not be empty.
    pub container_edits: ContainerEdits,
}

/// Changes to a container's OCI configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerEdits {
    /// `NAME=value`, replacing the image's and the pod's value.
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
    /// Edits of environment variables only.
    pub fn env<S: Into<String>>(env: impl IntoIterator<Item = S>) -> Self {
        Self { env: env.into_iter().map(Into::into).collect(), ..Self::default() }
    }

    /// Whether nothing would be changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A device node in the container.
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
    /// What the device cgroup allows.
    permissions: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gid: Option<u32>,
}

impl DeviceNode {
    /// A character device that need not exist on the host, with all rights of use (`rwm`). Group 0 is left out.
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

/// A bind mount; that it is one is said by the options (`bind` or `rbind`).
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

/// A program that the runtime calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    #[serde(rename = "hookName")]
    moment: String,
    /// Absolute path on the host.
    pub path: String,
    /// All arguments, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its whole environment. Empty means: whatever the runtime has, which may come from the container image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds until the runtime gives up on it.
    pub timeout: u32,
}

impl Hook {
    /// A program called in the container's namespaces before its root is changed: where driver libraries are made
    /// findable.
    pub fn create_container(path: String, args: Vec<String>, env: Vec<String>, timeout: u32) -> Self {
        Self { moment: "createContainer".to_owned(), path, args, env, timeout }
    }
}
