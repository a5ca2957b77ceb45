//! What runtimes would refuse, found before a file is written: one bad field makes them ignore the whole file, and the pod
//! then fails with no more than "unresolvable CDI devices".

use std::collections::BTreeSet;

use crate::names::{Kind, NameError, check_device_name};
use crate::types::{ContainerEdits, DeviceNode, Hook, HookName, Mount, Spec};

/// Why a document would be refused. `place` says which edits: `containerEdits` or `device NAME`.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error("the document's kind is invalid")]
    Kind(#[source] NameError),
    /// A device's name.
    #[error("a device name is invalid")]
    DeviceName(#[source] NameError),
    /// Two devices of the same name.
    #[error("device {name} is listed twice")]
    DuplicateDevice { name: String },
    /// No devices at all.
    #[error("the document lists no device")]
    NoDevices,
    /// A device that changes nothing.
    #[error("device {name} changes nothing: its containerEdits are empty")]
    EmptyEdits { name: String },
    /// An environment variable without name or `=`.
    #[error("{place}: env {env:?} is not of the form NAME=value")]
    Env { place: String, env: String },
    /// A path that is relative or has `..` in it.
    #[error("{place}: {field} {path:?} must be an absolute path without '..'")]
    Path { place: String, field: &'static str, path: String },
    /// The same path given twice: the runtime would keep one of the two.
    #[error("{place}: {field} {path:?} is listed twice")]
    DuplicatePath { place: String, field: &'static str, path: String },
    /// A device node's type.
    #[error("{place}: device node {path}: type {node_type:?} must be one of b, c, u, p")]
    NodeType { place: String, path: String, node_type: String },
    /// A block or character node with a type but not both numbers: the runtime would make a wrong node.
    #[error("{place}: device node {path}: type, major and minor go together")]
    NodeNumbers { place: String, path: String },
    /// A device node's permissions.
    #[error(
        "{place}: device node {path}: permissions {permissions:?} must be a part of \"rwm\", or \"none\""
    )]
    Permissions { place: String, path: String, permissions: String },
    /// A hook's moment.
    #[error("{place}: hook {path}: hookName {name:?} is not known to runtimes")]
    HookName { place: String, path: String, name: String },
    /// A network device without a name.
    #[error("{place}: a network device needs hostInterfaceName and name")]
    NetDevice { place: String },
    /// Turning the document into bytes failed.
    #[error("the document cannot be written as JSON")]
    Json(#[source] serde_json::Error),
}

impl Spec {
    /// Where an error in the common edits is said to be.
    pub(crate) const COMMON: &str = "containerEdits";

    /// Checks everything that runtimes check, and duplicates that they resolve silently.
    pub fn validate(&self) -> Result<(), SpecError> {
        self.kind.parse::<Kind>().map_err(SpecError::Kind)?;
        if self.devices.is_empty() {
            return Err(SpecError::NoDevices);
        }
        check_edits(Self::COMMON, &self.container_edits)?;
        let mut seen = BTreeSet::new();
        for device in &self.devices {
            check_device_name(&device.name).map_err(SpecError::DeviceName)?;
            if !seen.insert(&device.name) {
                return Err(SpecError::DuplicateDevice { name: device.name.clone() });
            }
            if device.container_edits.is_empty() {
                return Err(SpecError::EmptyEdits { name: device.name.clone() });
            }
            check_edits(&format!("device {}", device.name), &device.container_edits)?;
        }
        Ok(())
    }
}

pub(crate) fn check_edits(place: &str, edits: &ContainerEdits) -> Result<(), SpecError> {
    for env in &edits.env {
        check_env(place, env)?;
    }
    for node in &edits.device_nodes {
        check_node(place, node)?;
    }
    for net in &edits.net_devices {
        if net.name.is_empty() || net.host_interface_name.is_empty() {
            return Err(SpecError::NetDevice { place: place.to_owned() });
        }
    }
    for mount in &edits.mounts {
        check_mount(place, mount)?;
    }
    for hook in &edits.hooks {
        check_hook(place, hook)?;
    }
    unique(place, "deviceNodes.path", edits.device_nodes.iter().map(|n| &n.path))?;
    unique(place, "mounts.containerPath", edits.mounts.iter().map(|m| &m.container_path))
}

fn check_env(place: &str, env: &str) -> Result<(), SpecError> {
    match env.split_once('=') {
        Some((name, _)) if !name.is_empty() && !env.contains('\0') => Ok(()),
        _ => Err(SpecError::Env { place: place.to_owned(), env: env.to_owned() }),
    }
}

fn check_path(place: &str, field: &'static str, path: &str) -> Result<(), SpecError> {
    let good = path.starts_with('/') && !path.contains('\0') && path.split('/').all(|part| part != "..");
    if good { Ok(()) } else { Err(SpecError::Path { place: place.to_owned(), field, path: path.to_owned() }) }
}

fn check_node(place: &str, node: &DeviceNode) -> Result<(), SpecError> {
    check_path(place, "deviceNodes.path", &node.path)?;
    if let Some(host) = &node.host_path {
        check_path(place, "deviceNodes.hostPath", host)?;
    }
    let (place_owned, path) = (|| place.to_owned(), || node.path.clone());
    match (node.node_type.as_deref(), node.major, node.minor) {
        (None | Some("p"), None, None) => {}
        (Some("b" | "c" | "u"), Some(major), Some(minor)) if major >= 0 && minor >= 0 => {}
        (Some("b" | "c" | "u" | "p") | None, _, _) => {
            return Err(SpecError::NodeNumbers { place: place_owned(), path: path() });
        }
        (Some(other), _, _) => {
            return Err(SpecError::NodeType {
                place: place_owned(),
                path: path(),
                node_type: other.to_owned(),
            });
        }
    }
    if let Some(text) = &node.permissions {
        let part = !text.is_empty() && text.chars().all(|c| matches!(c, 'r' | 'w' | 'm'));
        if !part && text != "none" {
            return Err(SpecError::Permissions {
                place: place_owned(),
                path: path(),
                permissions: text.clone(),
            });
        }
    }
    Ok(())
}

fn check_mount(place: &str, mount: &Mount) -> Result<(), SpecError> {
    check_path(place, "mounts.hostPath", &mount.host_path)?;
    check_path(place, "mounts.containerPath", &mount.container_path)
}

fn check_hook(place: &str, hook: &Hook) -> Result<(), SpecError> {
    check_path(place, "hooks.path", &hook.path)?;
    if let HookName::Unknown(name) = &hook.hook_name {
        return Err(SpecError::HookName {
            place: place.to_owned(),
            path: hook.path.clone(),
            name: name.clone(),
        });
    }
    hook.env.iter().try_for_each(|env| check_env(place, env))
}

fn unique<'a>(
    place: &str,
    field: &'static str,
    paths: impl Iterator<Item = &'a String>,
) -> Result<(), SpecError> {
    let mut seen = BTreeSet::new();
    for path in paths {
        if !seen.insert(path) {
            return Err(SpecError::DuplicatePath { place: place.to_owned(), field, path: path.clone() });
        }
    }
    Ok(())
}
