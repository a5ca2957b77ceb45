//! Errors that runtimes would find, found before a file is written: one bad field makes them ignore
//! the whole file, and the pod then fails with no more than "unresolvable CDI devices".

use std::collections::BTreeSet;

use crate::types::{ContainerEdits, Spec};

/// Reason for which a document would be refused. `place` is the edits: `containerEdits` or
/// `device NAME`.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Kind that is not vendor and class.
    #[error(
        "kind {0:?} is not of the form vendor/class, such as gpu.divvy.dev/claim: both begin with a letter, end with a letter or digit, and hold only letters, digits, '_', '.' and '-' (at most 253 and 63)"
    )]
    Kind(String),
    /// Name of a device with a wrong character or ending.
    #[error(
        "device name {0:?} must begin and end with a letter or digit and hold only letters, digits, '_', '.', ':' and '-'"
    )]
    DeviceName(String),
    /// Two devices of the same name.
    #[error("device {0} is listed twice")]
    DuplicateDevice(String),
    /// Document without any device.
    #[error("the document lists no device")]
    NoDevices,
    /// Device that changes nothing.
    #[error("device {0} changes nothing: its containerEdits are empty")]
    EmptyEdits(String),
    /// Environment variable without name or `=`.
    #[error("{place}: env {env:?} is not of the form NAME=value")]
    Env { place: String, env: String },
    /// Path that is relative or has `..` in it.
    #[error("{place}: {field} {path:?} must be an absolute path without '..'")]
    Path {
        place: String,
        field: &'static str,
        path: String,
    },
    /// Path that is given twice: the runtime would keep one of the two.
    #[error("{place}: {field} {path:?} is listed twice")]
    DuplicatePath {
        place: String,
        field: &'static str,
        path: String,
    },
    /// Failure to turn the document into bytes.
    #[error("the document cannot be written as JSON")]
    Json(#[source] serde_json::Error),
}

impl Spec {
    /// Checks everything that runtimes check, and duplicates that they resolve silently; the common
    /// edits are checked once, when they are made.
    pub(crate) fn validate(&self) -> Result<(), SpecError> {
        // The vendor is a driver's name, a DNS subdomain of at most 253 characters; the class is no
        // longer than a label.
        let is_kind = |(vendor, class)| is_name(vendor, 253) && is_name(class, 63);
        if !self.kind.split_once('/').is_some_and(is_kind) {
            return Err(SpecError::Kind(self.kind.clone()));
        }
        if self.devices.is_empty() {
            return Err(SpecError::NoDevices);
        }
        let mut seen = BTreeSet::new();
        for device in &self.devices {
            let name = || device.name.clone();
            if !is_device_name(&device.name) {
                return Err(SpecError::DeviceName(name()));
            }
            if !seen.insert(&device.name) {
                return Err(SpecError::DuplicateDevice(name()));
            }
            if device.container_edits.is_empty() {
                return Err(SpecError::EmptyEdits(name()));
            }
            device
                .container_edits
                .check(&format!("device {}", device.name))?;
        }
        Ok(())
    }
}

impl ContainerEdits {
    /// Checks edits; `place` names their owner in errors.
    pub(crate) fn check(&self, place: &str) -> Result<(), SpecError> {
        for env in self
            .env
            .iter()
            .chain(self.hooks.iter().flat_map(|hook| &hook.env))
        {
            // Hooks get their environment from the file as well. The kernel ends strings at NUL, so
            // a value with one cannot be passed on.
            let is_named = env
                .split_once('=')
                .is_some_and(|(name, _)| !name.is_empty());
            if !is_named || env.contains('\0') {
                return Err(SpecError::Env {
                    place: place.to_owned(),
                    env: env.clone(),
                });
            }
        }
        let nodes = self
            .device_nodes
            .iter()
            .map(|node| ("deviceNodes.path", &node.path));
        let inside = self
            .mounts
            .iter()
            .map(|mount| ("mounts.containerPath", &mount.container_path));
        let outside = self
            .mounts
            .iter()
            .map(|mount| ("mounts.hostPath", &mount.host_path));
        let hooks = self.hooks.iter().map(|hook| ("hooks.path", &hook.path));
        for (field, path) in nodes
            .clone()
            .chain(inside.clone())
            .chain(outside)
            .chain(hooks)
        {
            let good = path.starts_with('/')
                && !path.contains('\0')
                && path.split('/').all(|part| part != "..");
            if !good {
                return Err(SpecError::Path {
                    place: place.to_owned(),
                    field,
                    path: path.clone(),
                });
            }
        }
        // Paths on the host are left out: one file may be mounted at two places.
        let mut seen = BTreeSet::new();
        for (field, path) in nodes.chain(inside) {
            if !seen.insert((field, path)) {
                return Err(SpecError::DuplicatePath {
                    place: place.to_owned(),
                    field,
                    path: path.clone(),
                });
            }
        }
        Ok(())
    }
}

fn is_name(text: &str, longest: usize) -> bool {
    text.len() <= longest
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn is_device_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.ends_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | ':' | '-'))
}
