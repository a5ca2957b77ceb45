//! Requests to release the NVIDIA driver, so that its kernel module can be unloaded (ADR 4).
//!
//! An open NVML session pins the module. The plugin closes it while a release is requested and no
//! claim holds a device of this node; while a claim does, its containers pin the module anyway.

use std::path::{Path, PathBuf};

use crate::node::facts::NodeFacts;

/// The GPU Operator's components: its driver manager and MIG manager change their values to
/// `paused-for-…`.
const OPERATOR: &str = "nvidia.com/gpu.deploy.";
const PAUSED: &str = "paused-for-";
/// The name of a file in the plugin's folder, for hosts whose driver is replaced by other means.
const FILE: &str = "release-driver";

/// The file that asks for it.
pub(crate) fn file_in(plugin_dir: &Path) -> PathBuf {
    plugin_dir.join(FILE)
}

/// Returns the request in words, if there is one. `file` is the file that asks, if it is there.
pub(crate) fn asked(node: Option<&NodeFacts>, file: Option<&Path>) -> Option<String> {
    if let Some(file) = file {
        return Some(format!("the file {} exists", file.display()));
    }
    let node = node?;
    let paused = node
        .labels
        .iter()
        .find(|(label, value)| label.starts_with(OPERATOR) && value.starts_with(PAUSED));
    match paused {
        Some((label, value)) => Some(format!("the node's label {label} is {value}")),
        None if node.cordoned => Some("the node is cordoned".to_owned()),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(cordoned: bool, labels: &[(&str, &str)]) -> NodeFacts {
        let labels = labels
            .iter()
            .map(|(label, value)| ((*label).to_owned(), (*value).to_owned()));
        NodeFacts {
            labels: labels.collect(),
            cordoned,
        }
    }

    #[test]
    fn a_cordon_a_paused_component_or_the_file_asks_and_nothing_else_does() {
        let running = [
            ("nvidia.com/gpu.deploy.dcgm", "true"),
            ("nvidia.com/gpu.present", "true"),
        ];
        let paused = [(
            "nvidia.com/gpu.deploy.dra-driver",
            "paused-for-driver-upgrade",
        )];
        let other = [("example.com/deploy", "paused-for-lunch")];
        let cases: [(Option<NodeFacts>, Option<&str>, Option<&str>); 7] = [
            (None, None, None),
            (Some(node(false, &running)), None, None),
            (Some(node(false, &other)), None, None),
            (
                Some(node(true, &running)),
                None,
                Some("the node is cordoned"),
            ),
            (
                Some(node(false, &paused)),
                None,
                Some(
                    "the node's label nvidia.com/gpu.deploy.dra-driver is paused-for-driver-upgrade",
                ),
            ),
            (
                None,
                Some("/p/release-driver"),
                Some("the file /p/release-driver exists"),
            ),
            (
                Some(node(true, &[])),
                Some("/p/release-driver"),
                Some("the file /p/release-driver exists"),
            ),
        ];
        for (node, file, expected) in cases {
            assert_eq!(
                asked(node.as_ref(), file.map(Path::new)).as_deref(),
                expected,
                "{node:?} {file:?}"
            );
        }
    }
}
