//! The document's types, field for field, in the order in which they are written.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// One CDI file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    /// Version of the format. [`Spec::to_json_bytes`] replaces it by the lowest version that the content needs.
    pub cdi_version: String,
    /// `vendor/class`; see [`crate::Kind`].
    pub kind: String,
    /// Free-form notes; runtimes ignore them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices, by unique name.
    pub devices: Vec<Device>,
    /// Applied once to a container that asks for any of the devices.
    #[serde(skip_serializing_if = "ContainerEdits::is_empty")]
    pub container_edits: ContainerEdits,
}

/// One device that a container may ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Device {
    /// Unique within the kind, over all files of the folder.
    pub name: String,
    /// Free-form notes; runtimes ignore them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
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
    /// Network devices to move in (1.1.0).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Programs that the runtime calls on the host while it makes the container.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Bind mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Cache allocation (0.7.0).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
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

    /// Adds all of `more` behind what is here; a group is listed once.
    pub fn append(&mut self, more: ContainerEdits) {
        self.env.extend(more.env);
        self.device_nodes.extend(more.device_nodes);
        self.net_devices.extend(more.net_devices);
        self.hooks.extend(more.hooks);
        self.mounts.extend(more.mounts);
        self.intel_rdt = more.intel_rdt.or(self.intel_rdt.take());
        self.additional_gids.extend(more.additional_gids);
        self.additional_gids.sort_unstable();
        self.additional_gids.dedup();
    }
}

/// A device node in the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    /// Path on the host, where it differs (0.5.0). Only looked at by a runtime if type and numbers are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `c`, `b`, `u` or `p`. With the numbers given, the host's node need not exist.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub node_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// What the device cgroup allows: a part of `rwm`, or `none`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

impl DeviceNode {
    /// A character device that need not exist on the host, with all rights of use (`rwm`). Group 0 is left out.
    pub fn character(path: impl Into<String>, major: u32, minor: u32, mode: u32, gid: u32) -> Self {
        Self {
            path: path.into(),
            node_type: Some("c".to_owned()),
            major: Some(i64::from(major)),
            minor: Some(i64::from(minor)),
            file_mode: Some(mode),
            permissions: Some("rwm".to_owned()),
            gid: Some(gid).filter(|gid| *gid != 0),
            ..Self::default()
        }
    }
}

/// A network device to move into the container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NetDevice {
    /// Name on the host.
    pub host_interface_name: String,
    /// Name in the container.
    pub name: String,
}

/// A bind mount.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Mount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// Filesystem type (0.4.0).
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub mount_type: Option<String>,
}

impl Mount {
    /// A bind mount; that it is one is said by the options (`bind` or `rbind`).
    pub fn new(host: impl Into<String>, container: impl Into<String>, options: Vec<String>) -> Self {
        Self { host_path: host.into(), container_path: container.into(), options, mount_type: None }
    }
}

/// A program that the runtime calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    pub hook_name: HookName,
    /// Absolute path on the host.
    pub path: String,
    /// All arguments, the program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its whole environment. Empty means: whatever the runtime has, which may come from the container image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds until the runtime gives up on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u32>,
}

impl Hook {
    /// A program called in the container's namespaces before its root is changed.
    pub fn create_container(path: impl Into<String>, args: Vec<String>, env: Vec<String>) -> Self {
        Self { hook_name: HookName::CreateContainer, path: path.into(), args, env, timeout: None }
    }
}

/// The moments at which a runtime calls hooks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// Old name for the moment before the container's process starts.
    Prestart,
    /// Namespaces exist, in the runtime's namespace.
    CreateRuntime,
    /// In the container's namespaces, before the root is changed: where driver libraries are made findable.
    CreateContainer,
    /// In the container's namespaces, after the root is changed.
    StartContainer,
    /// After the container's process has started.
    Poststart,
    /// After the container is gone.
    Poststop,
    /// A name that this crate does not know; [`Spec::validate`] refuses it.
    #[serde(untagged)]
    Unknown(String),
}

impl fmt::Display for HookName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prestart => "prestart",
            Self::CreateRuntime => "createRuntime",
            Self::CreateContainer => "createContainer",
            Self::StartContainer => "startContainer",
            Self::Poststart => "poststart",
            Self::Poststop => "poststop",
            Self::Unknown(raw) => raw,
        })
    }
}

/// Cache allocation settings, carried through unchanged; divvy never makes them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct IntelRdt {
    /// Class of service.
    #[serde(rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    /// L3 cache schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub l3_cache_schema: Option<String>,
    /// Memory bandwidth schema.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mem_bw_schema: Option<String>,
    /// Complete schemata lines (1.1.0).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub schemata: Vec<String>,
}
