//! The manifests in `examples/`, which the demo runs when it is given no others.

use anyhow::{Result, bail};
use divvy_api::policy::GpuPolicy;

use super::Stay;
use crate::manifests::Manifests;

macro_rules! examples {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../../examples/", $name, "/manifests.yaml")))),*]
    };
}

/// Every folder of `examples/`, in the order of the demo.
pub(super) const EXAMPLES: &[(&str, &str)] = examples![
    "mode-lock",
    "one-gpu",
    "two-pods-two-gpus",
    "shared-claim",
    "two-containers",
    "two-claims",
    "two-gpus",
    "select-by-attribute",
    "deployment",
    "device-config",
    "mig-partitions",
    "mig-two-containers",
    "mig-same-gpu",
    "share-small",
    "share-many",
    "share-spread",
    "share-pack",
    "share-interval",
    "whole-mig-and-shares",
    "class-per-team",
    "extended-resource",
    "admin-beside-others",
    "policy-per-gpu",
    "policy-shares",
    "policy-profiles",
    "policy-one-mode",
    "admin-access",
];

/// Examples for nodes without a policy, whose GPUs are offered as they are.
const AS_IT_IS: [&str; 1] = ["admin-access"];

/// Every GPU as everything that it can become.
const EVERYTHING: &str = include_str!("../../../examples/mode-lock/policy.yaml");

/// The demo's policy where a manifest brings none.
pub(super) fn everything() -> Result<Vec<GpuPolicy>> {
    Ok(Manifests::parse("everything", EVERYTHING)?.policies)
}

/// The examples whose names contain the text, those that need no other policy on one node.
pub(super) fn stays(only: Option<&str>) -> Result<Vec<Stay>> {
    let mut common = Stay { policies: everything()?, manifests: Vec::new() };
    let mut others = Vec::new();
    for (name, text) in EXAMPLES.iter().filter(|(name, _)| only.is_none_or(|only| name.contains(only))) {
        let manifests = Manifests::parse(name, text)?;
        let example = ((*name).to_owned(), manifests);
        if AS_IT_IS.contains(name) || !example.1.policies.is_empty() {
            others.push(Stay { policies: example.1.policies.clone(), manifests: vec![example] });
        } else {
            common.manifests.push(example);
        }
    }
    if common.manifests.is_empty() && others.is_empty() {
        let names: Vec<&str> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        bail!("--only {}: no example has that in its name ({})", only.unwrap_or_default(), names.join(", "));
    }
    let mut stays = if common.manifests.is_empty() { Vec::new() } else { vec![common] };
    stays.extend(others);
    Ok(stays)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_in_the_demo() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let mut there: Vec<String> = fs_err::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        there.sort();
        let mut shown: Vec<&str> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        shown.sort_unstable();
        assert_eq!(there, shown);
    }
}
