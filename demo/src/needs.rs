//! Needs of an example, in annotations of its namespace that only the demo reads. An
//! example whose needs are not met is passed over with the reason. Pure.

use anyhow::{Context, Result, bail};
use divvy_api::names::attributes;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

use divvy_cli::manifests::Manifests;
use divvy_why::device::{amount, memory, text};

/// Devices: `2 gpu, 1 gpu-share memory 4Gi, 1 mig 1g`.
const NEEDS: &str = "demo.divvy.dev/needs";
/// The policy that it is for, if it brings none: `all-modes`, or the chart's default.
const POLICY: &str = "demo.divvy.dev/policy";

/// The types of devices that can be needed.
const TYPES: [&str; 7] = [
    "gpu",
    "gpu-share",
    "gpu-mps",
    "gpu-admin",
    "mig",
    "mig-share",
    "mig-mps",
];

/// So many devices of a type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Need {
    count: usize,
    /// Value of the devices' attribute `type`.
    kind: String,
    /// Profile of a partition, or its beginning before a dot.
    profile: Option<String>,
    /// Memory that each must have at least.
    memory: Option<u64>,
}

/// Reads the needs of manifests.
pub(super) fn of(manifests: &Manifests) -> Result<Vec<Need>> {
    let mut needs = Vec::new();
    for text in annotations(manifests, NEEDS) {
        for part in text.split(',') {
            needs
                .push(parse(part.trim()).with_context(|| format!("annotation {NEEDS}: {text:?}"))?);
        }
    }
    Ok(needs)
}

/// Says whether manifests without a policy are for nodes with all modes.
pub(super) fn all_modes(manifests: &Manifests) -> Result<bool> {
    let mut asked = false;
    for text in annotations(manifests, POLICY) {
        if text != "all-modes" {
            bail!("annotation {POLICY}: {text:?} is not all-modes");
        }
        asked = true;
    }
    Ok(asked)
}

fn annotations<'m>(manifests: &'m Manifests, key: &'m str) -> impl Iterator<Item = &'m str> {
    let of = |namespace: &'m k8s_openapi::api::core::v1::Namespace| {
        namespace
            .metadata
            .annotations
            .as_ref()?
            .get(key)
            .map(String::as_str)
    };
    manifests.namespaces.iter().filter_map(of)
}

fn parse(text: &str) -> Result<Need> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let (words, memory) = match words.as_slice() {
        [words @ .., "memory", of] => (
            words,
            Some(amount(of).with_context(|| format!("{of:?} is not an amount"))?),
        ),
        words => (words, None),
    };
    let (count, kind, profile) = match words {
        [count, kind] => (count, kind, None),
        [count, kind @ ("mig" | "mig-share" | "mig-mps"), profile] => {
            (count, kind, Some((*profile).to_owned()))
        }
        _ => bail!("{text:?} is not a number, a type and, for mig, a profile"),
    };
    if !TYPES.contains(kind) {
        bail!("{kind:?} is not one of {}", TYPES.join(", "));
    }
    let count = count
        .parse()
        .with_context(|| format!("{count:?} is not a number"))?;
    Ok(Need {
        count,
        kind: (*kind).to_owned(),
        profile,
        memory,
    })
}

impl Need {
    fn fits(&self, device: &Device) -> bool {
        let profile = |wanted: &String| {
            let rest = text(device, attributes::PROFILE)
                .and_then(|profile| profile.strip_prefix(wanted.as_str()));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        text(device, attributes::TYPE) == Some(&self.kind)
            && self
                .memory
                .is_none_or(|wanted| memory(device).is_some_and(|has| has >= wanted))
            && device.taints.as_ref().is_none_or(Vec::is_empty)
            && self.profile.as_ref().is_none_or(profile)
    }

    /// The need in words.
    fn named(&self) -> String {
        let what = match (self.kind.as_str(), &self.profile) {
            ("gpu", _) => "whole GPU".to_owned(),
            ("gpu-share", _) => "GPU in shares".to_owned(),
            ("gpu-mps", _) => "GPU in MPS shares".to_owned(),
            ("gpu-admin", _) => "GPU in several modes".to_owned(),
            ("mig-share", Some(profile)) => format!("{profile} partition in shares"),
            ("mig-share", None) => "partition in shares".to_owned(),
            ("mig-mps", Some(profile)) => format!("{profile} partition in MPS shares"),
            ("mig-mps", None) => "partition in MPS shares".to_owned(),
            (_, None) => "partition".to_owned(),
            (_, Some(profile)) => format!("{profile} partition"),
        };
        let with = self
            .memory
            .map(|memory| format!(" with {} of memory", divvy_why::device::bytes(memory)));
        let with = with.unwrap_or_default();
        match (self.count, what.split_once(" in ")) {
            (1, _) => format!("1 {what}{with}"),
            (count, Some((what, rest))) => format!("{count} {what}s in {rest}{with}"),
            (count, None) => format!("{count} {what}s{with}"),
        }
    }
}

/// Why a node with these devices cannot run what has these needs.
pub(super) fn unmet(needs: &[Need], slices: &[ResourceSlice]) -> Option<String> {
    let devices: Vec<&Device> = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .collect();
    needs.iter().find_map(|need| {
        let there = devices.iter().filter(|device| need.fits(device)).count();
        let there_is = if there == 0 {
            "none".to_owned()
        } else {
            there.to_string()
        };
        (there < need.count).then(|| format!("needs {}, the node has {there_is}", need.named()))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Result<Vec<Need>, String> {
        let text = format!(
            "{{apiVersion: v1, kind: Namespace, metadata: {{name: x, annotations: {{{NEEDS}: {text:?}}}}}}}"
        );
        of(&Manifests::parse("x", &text).unwrap()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn needs_are_counted_among_devices_that_are_free_of_taints() {
        let device = |kind: &str, profile: &str, taints: serde_json::Value| json!({"name": "d", "capacity": {"memory": {"value": "8Gi"}}, "attributes": {"type": {"string": kind}, "profile": {"string": profile}}, "taints": taints});
        let devices = [
            device("gpu", "", json!([])),
            device("gpu", "", json!([{"key": "k", "effect": "NoSchedule"}])),
            device("mig", "1g.10gb", json!([])),
        ];
        let pool = json!({"name": "p", "generation": 1, "resourceSliceCount": 1});
        let slice = json!({"spec": {"driver": "d", "pool": pool, "devices": devices}});
        let slices: Vec<ResourceSlice> = vec![serde_json::from_value(slice).unwrap()];
        for (needs, reason) in [
            ("1 gpu, 1 mig, 1 mig 1g, 1 mig 1g.10gb", None),
            ("2 gpu", Some("needs 2 whole GPUs, the node has 1")),
            ("1 gpu memory 8Gi", None),
            (
                "1 gpu memory 9Gi",
                Some("needs 1 whole GPU with 9 GiB of memory, the node has none"),
            ),
            ("1 mig 2g", Some("needs 1 2g partition, the node has none")),
            (
                "1 mig 1g.1",
                Some("needs 1 1g.1 partition, the node has none"),
            ),
            (
                "2 gpu-share",
                Some("needs 2 GPUs in shares, the node has none"),
            ),
        ] {
            assert_eq!(
                unmet(&read(needs).unwrap(), &slices).as_deref(),
                reason,
                "{needs}"
            );
        }
    }

    #[test]
    fn needs_are_read_strictly() {
        for bad in [
            "gpu",
            "x gpu",
            "1 card",
            "1 gpu 1g",
            "1 gpu memory",
            "1 gpu memory x",
            "",
        ] {
            assert!(
                read(bad)
                    .unwrap_err()
                    .starts_with("annotation demo.divvy.dev/needs"),
                "{bad}"
            );
        }
    }
}
