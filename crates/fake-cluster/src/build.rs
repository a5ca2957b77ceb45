//! Builders: the smallest valid objects, to be changed by the caller.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, Node, Pod, PodResourceClaim, PodSpec, ResourceClaim as ContainerClaim,
    ResourceRequirements,
};
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, Device, DeviceAllocationResult, DeviceClaim, DeviceClass,
    DeviceClassSpec, DeviceRequest, DeviceRequestAllocationResult, DeviceSelector,
    ExactDeviceRequest, ResourceClaim, ResourceClaimConsumerReference, ResourceClaimSpec,
    ResourceClaimStatus, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

fn meta(namespace: &str, name: &str) -> ObjectMeta {
    let namespace = (!namespace.is_empty()).then(|| namespace.to_owned());
    ObjectMeta {
        name: Some(name.into()),
        namespace,
        ..ObjectMeta::default()
    }
}

/// A node with nothing on it.
pub fn mk_node(name: &str) -> Node {
    let labels = BTreeMap::from([("kubernetes.io/hostname".to_owned(), name.to_owned())]);
    Node {
        metadata: ObjectMeta {
            labels: Some(labels),
            ..meta("", name)
        },
        ..Node::default()
    }
}

/// A device class whose devices are those of one driver.
pub fn mk_class(name: &str, driver: &str) -> DeviceClass {
    let expression = format!("device.driver == '{driver}'");
    let selector = DeviceSelector {
        cel: Some(CELDeviceSelector { expression }),
    };
    let spec = DeviceClassSpec {
        selectors: Some(vec![selector]),
        ..DeviceClassSpec::default()
    };
    DeviceClass {
        metadata: meta("", name),
        spec: Some(spec),
    }
}

/// A slice of a node's only pool slice, of generation 1, named after the node.
pub fn mk_slice(name: &str, driver: &str, node: &str, devices: Vec<Device>) -> ResourceSlice {
    let pool = ResourcePool {
        name: node.into(),
        generation: 1,
        resource_slice_count: 1,
    };
    let devices = (!devices.is_empty()).then_some(devices);
    ResourceSlice {
        metadata: meta("", name),
        spec: ResourceSliceSpec {
            driver: driver.into(),
            node_name: Some(node.into()),
            pool,
            devices,
            ..ResourceSliceSpec::default()
        },
    }
}

/// A device with a name and nothing else.
pub fn mk_device(name: &str) -> Device {
    Device {
        name: name.into(),
        ..Device::default()
    }
}

/// A claim with one request, `gpu`, for `count` devices of a class.
pub fn mk_claim(namespace: &str, name: &str, class: &str, count: i64) -> ResourceClaim {
    let exactly = ExactDeviceRequest {
        device_class_name: class.into(),
        count: Some(count),
        allocation_mode: Some("ExactCount".into()),
        ..ExactDeviceRequest::default()
    };
    let request = DeviceRequest {
        name: "gpu".into(),
        exactly: Some(exactly),
        first_available: None,
    };
    let devices = DeviceClaim {
        requests: Some(vec![request]),
        ..DeviceClaim::default()
    };
    ResourceClaim {
        metadata: meta(namespace, name),
        spec: Some(ResourceClaimSpec {
            devices: Some(devices),
        }),
        status: None,
    }
}

/// The allocation of one device to a request.
pub fn mk_result(
    request: &str,
    driver: &str,
    pool: &str,
    device: &str,
) -> DeviceRequestAllocationResult {
    DeviceRequestAllocationResult {
        request: request.into(),
        driver: driver.into(),
        pool: pool.into(),
        device: device.into(),
        ..DeviceRequestAllocationResult::default()
    }
}

/// Gives a claim its allocation, as a scheduler would; configs are left to the caller.
pub fn allocated(
    mut claim: ResourceClaim,
    results: Vec<DeviceRequestAllocationResult>,
) -> ResourceClaim {
    let devices = DeviceAllocationResult {
        results: Some(results),
        config: None,
    };
    let allocation = AllocationResult {
        devices: Some(devices),
        ..AllocationResult::default()
    };
    claim
        .status
        .get_or_insert_with(ResourceClaimStatus::default)
        .allocation = Some(allocation);
    claim
}

/// Reserves a claim for a pod.
pub fn reserved(mut claim: ResourceClaim, pod: &str, uid: &str) -> ResourceClaim {
    let consumer = ResourceClaimConsumerReference {
        resource: "pods".into(),
        name: pod.into(),
        uid: uid.into(),
        ..ResourceClaimConsumerReference::default()
    };
    let status = claim
        .status
        .get_or_insert_with(ResourceClaimStatus::default);
    status
        .reserved_for
        .get_or_insert_with(Vec::new)
        .push(consumer);
    claim
}

/// Reserves a claim for a PodGroup: its status names none of the group's pods.
pub fn reserved_for_group(mut claim: ResourceClaim, group: &str) -> ResourceClaim {
    let consumer = ResourceClaimConsumerReference {
        api_group: Some("scheduling.k8s.io".into()),
        resource: "podgroups".into(),
        name: group.into(),
        uid: format!("uid-of-{group}"),
    };
    let status = claim
        .status
        .get_or_insert_with(ResourceClaimStatus::default);
    status
        .reserved_for
        .get_or_insert_with(Vec::new)
        .push(consumer);
    claim
}

/// A pod with one container, `main`, that uses all of its claims.
pub fn mk_pod(namespace: &str, name: &str, node: Option<&str>, claims: &[&str]) -> Pod {
    let used = claims.iter().map(|claim| ContainerClaim {
        name: (*claim).into(),
        request: None,
    });
    let container = Container {
        name: "main".into(),
        image: Some("example.invalid/main".into()),
        resources: Some(ResourceRequirements {
            claims: Some(used.collect()),
            ..ResourceRequirements::default()
        }),
        ..Container::default()
    };
    let claims = claims.iter().map(|claim| PodResourceClaim {
        name: (*claim).into(),
        resource_claim_name: Some((*claim).into()),
        resource_claim_template_name: None,
    });
    let spec = PodSpec {
        containers: vec![container],
        node_name: node.map(str::to_owned),
        resource_claims: Some(claims.collect()),
        ..PodSpec::default()
    };
    Pod {
        metadata: meta(namespace, name),
        spec: Some(spec),
        status: None,
    }
}
