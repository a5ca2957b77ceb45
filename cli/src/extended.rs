//! Extended resources in `limits`, and the claim that the scheduler makes of them. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use divvy_model::Quantity;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceRequest, ExactDeviceRequest};

/// A class as an extended resource without a name of its own.
const BY_CLASS: &str = "deviceclass.resource.kubernetes.io/";

/// Extended resources of a pod that the scheduler makes a claim of.
#[derive(Debug, Default, PartialEq)]
pub struct Extended {
    pub requests: Vec<DeviceRequest>,
    /// Resources that no class stands for.
    pub without_class: BTreeSet<String>,
}

/// Says whether the name is one that node resources and Kubernetes itself do not have.
pub fn is_extended(resource: &str) -> bool {
    let domain = resource.split_once('/').map(|(domain, _)| domain);
    let of_kubernetes =
        |domain: &str| domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    resource.starts_with(BY_CLASS) || domain.is_some_and(|domain| !of_kubernetes(domain))
}

/// Returns the class that a resource names by itself.
pub fn class_in(resource: &str) -> Option<&str> {
    resource.strip_prefix(BY_CLASS)
}

/// Reads an amount of devices: a whole number.
pub fn amount(text: &str) -> Option<i64> {
    let quantity: Quantity = text.parse().ok()?;
    quantity
        .to_i64()
        .filter(|whole| i128::from(*whole) * 1_000_000_000 == quantity.nanos())
}

/// Returns the requests of a pod, as the scheduler makes them: one for each container that runs on,
/// and for the init containers that run before them one for what the biggest of them needs beyond
/// that.
pub fn requests(spec: &PodSpec, classes: &[DeviceClass]) -> Extended {
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let containers: Vec<&Container> = init.iter().chain(&spec.containers).collect();
    let goes_on = |index: usize, container: &Container| {
        index >= init.len() || container.restart_policy.as_deref() == Some("Always")
    };
    let resources: BTreeSet<&str> = containers
        .iter()
        .flat_map(|container| asked(container).into_keys())
        .filter(|r| is_extended(r))
        .collect();
    let mut found = Extended::default();
    for resource in resources {
        let Some(class) = class_of(resource, classes) else {
            found.without_class.insert(resource.to_owned());
            continue;
        };
        let wants = |container: &Container| asked(container).get(resource).copied().unwrap_or(0);
        let going_on: Vec<i64> = containers
            .iter()
            .enumerate()
            .map(|(index, container)| {
                if goes_on(index, container) {
                    wants(container)
                } else {
                    0
                }
            })
            .collect();
        let beyond = containers
            .iter()
            .enumerate()
            .filter(|(i, c)| !goes_on(*i, c))
            .map(|(index, container)| {
                let reused = going_on.iter().skip(index);
                let reused = reused.fold(0_i64, |sum, count| sum.saturating_add(*count));
                (index, wants(container).saturating_sub(reused))
            });
        // Of equals the first.
        let most = beyond.fold(
            (0, 0),
            |most, next| if next.1 > most.1 { next } else { most },
        );
        let all = going_on
            .into_iter()
            .enumerate()
            .chain([most])
            .filter(|(_, count)| *count > 0);
        for (index, count) in all {
            let place = containers
                .get(index)
                .and_then(|c| asked(c).keys().position(|key| *key == resource));
            found.requests.push(DeviceRequest {
                name: format!("container-{index}-request-{}", place.unwrap_or(0)),
                exactly: Some(ExactDeviceRequest {
                    device_class_name: class.clone(),
                    count: Some(count),
                    ..ExactDeviceRequest::default()
                }),
                ..DeviceRequest::default()
            });
        }
    }
    found.requests.sort_by(|a, b| a.name.cmp(&b.name));
    found
}

/// Returns the resources of a container; limits are requests where there are none.
pub fn asked(container: &Container) -> BTreeMap<&str, i64> {
    let Some(resources) = &container.resources else {
        return BTreeMap::new();
    };
    let all = resources
        .limits
        .iter()
        .flatten()
        .chain(resources.requests.iter().flatten());
    all.map(|(name, of)| (name.as_str(), amount(&of.0).unwrap_or(0)))
        .collect()
}

/// Returns the class that stands for a resource: of several the one that was created last.
/// Classes that no cluster has created are in the order of their creation.
pub fn class_of(resource: &str, classes: &[DeviceClass]) -> Option<String> {
    let is_it = |class: &&DeviceClass| {
        let named = class
            .spec
            .as_ref()
            .and_then(|spec| spec.extended_resource_name.as_deref());
        let name = class.metadata.name.as_deref();
        named == Some(resource)
            || resource
                .strip_prefix(BY_CLASS)
                .is_some_and(|class| Some(class) == name)
    };
    // A cluster has times of creation; of one second the first name counts.
    let age = |(place, class): &(usize, &DeviceClass)| {
        let created = class.metadata.creation_timestamp.clone();
        let name = created
            .is_some()
            .then(|| Reverse(class.metadata.name.clone()));
        (created, name, *place)
    };
    let named = classes.iter().enumerate().filter(|(_, class)| is_it(class));
    named.max_by_key(age)?.1.metadata.name.clone()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn asked_for(spec: Value) -> Vec<(String, i64)> {
        let class = json!({"metadata": {"name": "gpus"}, "spec": {"extendedResourceName": "example.com/gpu"}});
        let classes = [serde_json::from_value(class).unwrap()];
        let spec: PodSpec = serde_json::from_value(spec).unwrap();
        let found = requests(&spec, &classes).requests.into_iter();
        found
            .map(|r| (r.name, r.exactly.unwrap().count.unwrap()))
            .collect()
    }

    fn container(gpus: Option<i64>) -> Value {
        let limits = gpus.map(|n| json!({"example.com/gpu": n.to_string(), "cpu": "1"}));
        json!({"name": "c", "resources": {"limits": limits}})
    }

    /// Each row as the scheduler's own code does it
    /// (pkg/scheduler/framework/plugins/dynamicresources, 1.37).
    #[test]
    fn init_containers_reuse_what_later_containers_have() {
        let named = |all: &[(&str, i64)]| {
            all.iter()
                .map(|(n, c)| ((*n).to_owned(), *c))
                .collect::<Vec<_>>()
        };
        let sidecar = |gpus| {
            let mut it = container(gpus);
            it["restartPolicy"] = json!("Always");
            it
        };
        for (init, main, expected) in [
            (
                vec![],
                vec![Some(1), None, Some(2)],
                named(&[("container-0-request-1", 1), ("container-2-request-1", 2)]),
            ),
            (
                vec![container(Some(1))],
                vec![Some(1)],
                named(&[("container-1-request-1", 1)]),
            ),
            (
                vec![container(Some(3))],
                vec![Some(1)],
                named(&[("container-0-request-1", 2), ("container-1-request-1", 1)]),
            ),
            // The biggest need beyond is one request, and all init containers use it.
            (
                vec![container(Some(2)), container(Some(3))],
                vec![Some(1)],
                named(&[("container-1-request-1", 2), ("container-2-request-1", 1)]),
            ),
            // A sidecar goes on; only what starts before it may use its GPU.
            (
                vec![sidecar(Some(1)), container(Some(1))],
                vec![None],
                named(&[("container-0-request-1", 1), ("container-1-request-1", 1)]),
            ),
            (
                vec![container(Some(1)), sidecar(Some(1))],
                vec![None],
                named(&[("container-1-request-1", 1)]),
            ),
            (vec![], vec![Some(0)], vec![]),
        ] {
            let main: Vec<Value> = main.into_iter().map(container).collect();
            let spec = json!({"initContainers": init, "containers": main});
            assert_eq!(asked_for(spec.clone()), expected, "{spec}");
        }
    }

    #[test]
    fn a_resource_without_a_class_is_named_and_those_of_kubernetes_are_not() {
        let limits = json!({"nvidia.com/gpu": 1, "cpu": 1, "hugepages-2Mi": "2Mi", "requests.storage.kubernetes.io/x": 1});
        let spec = json!({"containers": [{"name": "c", "resources": {"limits": limits}}]});
        let found = requests(&serde_json::from_value(spec).unwrap(), &[]);
        assert_eq!(
            found.without_class,
            BTreeSet::from(["nvidia.com/gpu".to_owned()])
        );
    }

    #[test]
    fn amounts_are_whole_numbers() {
        for (text, whole) in [
            ("1", Some(1)),
            ("1k", Some(1000)),
            ("0.5", None),
            ("500m", None),
            ("x", None),
        ] {
            assert_eq!(amount(text), whole, "{text}");
        }
    }

    #[test]
    fn the_newest_class_counts_and_of_one_second_the_first_by_name() {
        let class = |name: &str, created: Option<&str>| {
            let class = json!({
                "metadata": {"name": name, "creationTimestamp": created},
                "spec": {"extendedResourceName": "example.com/gpu"},
            });
            serde_json::from_value::<DeviceClass>(class).unwrap()
        };
        let (old, new) = (Some("2026-11-21T19:00:00Z"), Some("2026-11-21T19:00:01Z"));
        for (classes, expected) in [
            ([class("a", new), class("b", old)], "a"),
            ([class("b", new), class("a", new)], "a"),
            ([class("a", None), class("b", None)], "b"),
            ([class("b", None), class("a", None)], "a"),
        ] {
            assert_eq!(
                class_of("example.com/gpu", &classes).as_deref(),
                Some(expected)
            );
        }
    }
}
