//! The allocator against the case titles of the upstream allocator (own fixtures, compact
//! expectations).
//!
//! A case is a [`World`]; [`World::try_it`] renders the outcome as a text: for each claim its
//! results as `request=device` with the pool where it matters and `{what is consumed}`, then `@`
//! where it can be used.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests; a failure is a panic"
)]

mod all_devices;
mod constraints;
mod consumable;
mod fixtures;
mod general;
mod mode_lock;
mod partitionable;
mod plain_search;
mod pools;
mod prioritized;
mod reasons;
mod search_cost;
mod tainted;

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, Device, DeviceAttribute, DeviceClaim,
    DeviceClaimConfiguration, DeviceClass, DeviceClassConfiguration, DeviceClassSpec,
    DeviceRequest, DeviceSelector, DeviceSubRequest, DeviceTaint, DeviceToleration,
    ExactDeviceRequest, OpaqueDeviceConfiguration, ResourceClaim, ResourceClaimSpec, ResourcePool,
    ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;

use divvy_allocator::{
    AllocError, AllocatedState, Allocator, CelError, DeviceId, Explanation, Features, Holder,
    Inputs, NodeSelectorError, Outcome, SelectorError, Slices,
};
use divvy_why::detail::detail;

use fixtures::*;

const DRIVER_A: &str = "driver-a";
const DRIVER_B: &str = "driver-b";
const CLASS_A: &str = "class-a";
const CLASS_B: &str = "class-b";

/// Objects that a case starts from: node-1, and a class for each of two drivers.
struct World {
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    held: Vec<ResourceClaim>,
    claims: Vec<ResourceClaim>,
    node: Node,
    features: Features,
}

impl World {
    fn new(slices: Vec<ResourceSlice>, claims: Vec<ResourceClaim>) -> Self {
        let mut node = Node::default();
        node.metadata.name = Some("node-1".to_owned());
        node.metadata.labels = Some([("zone".to_owned(), "a".to_owned())].into());
        let classes = vec![class(CLASS_A, DRIVER_A), class(CLASS_B, DRIVER_B)];
        Self {
            slices,
            classes,
            held: Vec::new(),
            claims,
            node,
            features: Features::ALL,
        }
    }

    /// Devices of `driver-a/pool-1` that another claim holds.
    fn held(mut self, devices: &[&str]) -> Self {
        self.held.push(holding("other", devices, false));
        self
    }

    fn features(mut self, change: impl FnOnce(&mut Features)) -> Self {
        change(&mut self.features);
        self
    }

    fn outcome(&self) -> Result<Outcome, AllocError> {
        let slices = Slices::new(&self.slices);
        let allocated = AllocatedState::from_claims(&self.held);
        let inputs = Inputs {
            slices: &slices,
            classes: &self.classes,
            allocated: &allocated,
            node: &self.node,
        };
        let claims: Vec<&ResourceClaim> = self.claims.iter().collect();
        Allocator::new(self.features).allocate(&inputs, &claims)
    }

    fn results(&self) -> Vec<AllocationResult> {
        match self.outcome() {
            Ok(Outcome::Fits(allocated)) => allocated.results,
            other => panic!("{other:?}"),
        }
    }

    fn explanation(&self) -> Explanation {
        match self.outcome() {
            Ok(Outcome::DoesNotFit(explanation)) => explanation,
            other => panic!("{other:?}"),
        }
    }

    /// The claims get what they want and hold it; the next are these.
    fn then(&mut self, next: Vec<ResourceClaim>) -> String {
        let text = self.try_it();
        if let Ok(Outcome::Fits(allocated)) = self.outcome() {
            for (claim, result) in self.claims.iter().zip(allocated.results) {
                self.held.push(fixtures::allocated(claim.clone(), result));
            }
        }
        self.claims = next;
        text
    }

    /// Allocates to the pod of these claims, which keeps it.
    fn place(&mut self, claims: Vec<ResourceClaim>) -> String {
        self.claims = claims;
        self.then(Vec::new())
    }

    /// The claim ends.
    fn release(&mut self, name: &str) {
        self.held
            .retain(|c| c.metadata.name.as_deref() != Some(name));
    }

    fn try_it(&self) -> String {
        match self.outcome() {
            Err(error) => format!("error: {error}"),
            Ok(Outcome::DoesNotFit(_)) => "does not fit".to_owned(),
            Ok(Outcome::Fits(allocated)) => allocated
                .results
                .iter()
                .map(rendered)
                .collect::<Vec<_>>()
                .join(" | "),
        }
    }
}

/// `req-0=device-1 req-1=device-2(admin) @node-1`; devices outside of driver-a/pool-1 with both
/// names.
fn rendered(result: &AllocationResult) -> String {
    let devices = result
        .devices
        .iter()
        .flat_map(|d| d.results.iter().flatten());
    let mut words: Vec<String> = devices
        .map(|r| {
            let place = if (r.driver.as_str(), r.pool.as_str()) == (DRIVER_A, "pool-1") {
                String::new()
            } else {
                format!("{}/{}/", r.driver, r.pool)
            };
            let admin = if r.admin_access == Some(true) {
                "(admin)"
            } else {
                ""
            };
            format!(
                "{}={place}{}{admin}{}",
                r.request,
                r.device,
                fixtures::amounts(r)
            )
        })
        .collect();
    for term in result
        .node_selector
        .iter()
        .flat_map(|s| &s.node_selector_terms)
    {
        let all = term
            .match_fields
            .iter()
            .chain(&term.match_expressions)
            .flatten();
        let all = all.map(|r| {
            let values = r
                .values
                .iter()
                .flatten()
                .cloned()
                .collect::<Vec<_>>()
                .join(",");
            if r.key == "metadata.name" {
                values
            } else {
                format!("{} {} {values}", r.key, r.operator)
            }
        });
        words.push(format!("@{}", all.collect::<Vec<_>>().join("&")));
    }
    words.join(" ")
}

fn selector(expression: &str) -> DeviceSelector {
    DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: expression.to_owned(),
        }),
    }
}

fn class(name: &str, driver: &str) -> DeviceClass {
    let mut class = DeviceClass::default();
    class.metadata.name = Some(name.to_owned());
    class.spec = Some(DeviceClassSpec {
        selectors: Some(vec![selector(&format!("device.driver == \"{driver}\""))]),
        ..DeviceClassSpec::default()
    });
    class
}

fn opaque(driver: &str, value: &str) -> OpaqueDeviceConfiguration {
    OpaqueDeviceConfiguration {
        driver: driver.to_owned(),
        parameters: RawExtension(serde_json::json!({ "value": value })),
    }
}

/// A device with an attribute `index` (its last character) and `big` (true for names that begin
/// with "big").
fn device(name: &str) -> Device {
    let index = name
        .chars()
        .last()
        .and_then(|c| c.to_digit(10))
        .map(i64::from);
    let attributes = [
        (
            "index".to_owned(),
            DeviceAttribute {
                int: index,
                ..DeviceAttribute::default()
            },
        ),
        (
            "big".to_owned(),
            DeviceAttribute {
                bool: Some(name.starts_with("big")),
                ..DeviceAttribute::default()
            },
        ),
    ];
    Device {
        name: name.to_owned(),
        attributes: Some(attributes.into()),
        ..Device::default()
    }
}

fn tainted(name: &str, taints: &[(&str, &str)]) -> Device {
    let taint = |(key, effect): &(&str, &str)| DeviceTaint {
        key: (*key).to_owned(),
        value: Some("yes".to_owned()),
        effect: (*effect).to_owned(),
        time_added: None,
    };
    Device {
        taints: Some(taints.iter().map(taint).collect()),
        ..device(name)
    }
}

fn toleration(key: &str, operator: &str, value: &str) -> DeviceToleration {
    DeviceToleration {
        key: Some(key.to_owned()),
        operator: Some(operator.to_owned()),
        value: Some(value.to_owned()),
        ..DeviceToleration::default()
    }
}

/// The only slice of `driver-a/pool-1`, for node-1.
fn slice(devices: &[&str]) -> ResourceSlice {
    slice_of(devices.iter().map(|d| device(d)).collect())
}

fn slice_of(devices: Vec<Device>) -> ResourceSlice {
    let mut slice = ResourceSlice::default();
    slice.metadata.name = Some("slice-1".to_owned());
    slice.spec = ResourceSliceSpec {
        driver: DRIVER_A.to_owned(),
        node_name: Some("node-1".to_owned()),
        pool: ResourcePool {
            name: "pool-1".to_owned(),
            generation: 1,
            resource_slice_count: 1,
        },
        devices: Some(devices),
        ..ResourceSliceSpec::default()
    };
    slice
}

/// The slice changed, in one expression.
fn with(mut slice: ResourceSlice, change: impl FnOnce(&mut ResourceSlice)) -> ResourceSlice {
    change(&mut slice);
    slice
}

fn in_pool(slice: ResourceSlice, driver: &str, pool: &str) -> ResourceSlice {
    with(slice, |s| {
        s.metadata.name = Some(format!("slice-{driver}-{pool}"));
        driver.clone_into(&mut s.spec.driver);
        pool.clone_into(&mut s.spec.pool.name);
    })
}

/// Slice number `index` of `count` of its pool.
fn part(slice: ResourceSlice, index: usize, count: i64) -> ResourceSlice {
    with(slice, |s| {
        s.metadata.name = Some(format!("slice-{index}"));
        s.spec.pool.resource_slice_count = count;
    })
}

fn on_node(slice: ResourceSlice, node: &str) -> ResourceSlice {
    with(slice, |s| s.spec.node_name = Some(node.to_owned()))
}

fn on_all_nodes(slice: ResourceSlice) -> ResourceSlice {
    with(slice, |s| {
        s.spec.node_name = None;
        s.spec.all_nodes = Some(true);
    })
}

fn zone(value: &str) -> NodeSelector {
    let requirement = NodeSelectorRequirement {
        key: "zone".to_owned(),
        operator: "In".to_owned(),
        values: Some(vec![value.to_owned()]),
    };
    let term = NodeSelectorTerm {
        match_expressions: Some(vec![requirement]),
        match_fields: None,
    };
    NodeSelector {
        node_selector_terms: vec![term],
    }
}

fn in_zone(slice: ResourceSlice, value: &str) -> ResourceSlice {
    with(slice, |s| {
        s.spec.node_name = None;
        s.spec.node_selector = Some(zone(value));
    })
}

fn claim(name: &str, requests: Vec<DeviceRequest>) -> ResourceClaim {
    let mut claim = ResourceClaim::default();
    claim.metadata.name = Some(name.to_owned());
    claim.metadata.namespace = Some("default".to_owned());
    let devices = DeviceClaim {
        requests: Some(requests),
        ..DeviceClaim::default()
    };
    claim.spec = Some(ResourceClaimSpec {
        devices: Some(devices),
    });
    claim
}

fn configured(mut claim: ResourceClaim, configs: &[(&[&str], &str)]) -> ResourceClaim {
    let configs = configs
        .iter()
        .map(|(requests, value)| DeviceClaimConfiguration {
            requests: Some(requests.iter().map(|r| (*r).to_owned()).collect()),
            opaque: Some(opaque(DRIVER_A, value)),
        });
    if let Some(devices) = claim.spec.as_mut().and_then(|s| s.devices.as_mut()) {
        devices.config = Some(configs.collect());
    }
    claim
}

fn request(name: &str, class: &str, count: i64) -> DeviceRequest {
    exact(name, class, |r| r.count = Some(count))
}

fn all_of(name: &str, class: &str) -> DeviceRequest {
    exact(name, class, |r| r.allocation_mode = Some("All".to_owned()))
}

fn exact(name: &str, class: &str, change: impl FnOnce(&mut ExactDeviceRequest)) -> DeviceRequest {
    let mut exact = ExactDeviceRequest {
        device_class_name: class.to_owned(),
        ..ExactDeviceRequest::default()
    };
    change(&mut exact);
    DeviceRequest {
        name: name.to_owned(),
        exactly: Some(exact),
        first_available: None,
    }
}

fn selecting(name: &str, class: &str, count: i64, expression: &str) -> DeviceRequest {
    exact(name, class, |r| {
        r.count = Some(count);
        r.selectors = Some(vec![selector(expression)]);
    })
}

fn first_of(name: &str, subrequests: Vec<DeviceSubRequest>) -> DeviceRequest {
    DeviceRequest {
        name: name.to_owned(),
        exactly: None,
        first_available: Some(subrequests),
    }
}

fn sub(name: &str, class: &str, count: i64) -> DeviceSubRequest {
    DeviceSubRequest {
        name: name.to_owned(),
        device_class_name: class.to_owned(),
        count: Some(count),
        ..DeviceSubRequest::default()
    }
}

/// An allocated claim with devices of driver-a/pool-1.
fn holding(name: &str, devices: &[&str], admin: bool) -> ResourceClaim {
    use k8s_openapi::api::resource::v1::{
        DeviceAllocationResult, DeviceRequestAllocationResult, ResourceClaimStatus,
    };
    let results = devices.iter().map(|device| DeviceRequestAllocationResult {
        request: "req-0".to_owned(),
        driver: DRIVER_A.to_owned(),
        pool: "pool-1".to_owned(),
        device: (*device).to_owned(),
        admin_access: admin.then_some(true),
        ..DeviceRequestAllocationResult::default()
    });
    let devices = DeviceAllocationResult {
        results: Some(results.collect()),
        config: None,
    };
    let allocation = AllocationResult {
        devices: Some(devices),
        ..AllocationResult::default()
    };
    let mut claim = claim(name, Vec::new());
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(allocation),
        ..ResourceClaimStatus::default()
    });
    claim
}
