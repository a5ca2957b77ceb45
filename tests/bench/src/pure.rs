//! What is decided in this process: carving a node, and allocating a claim on a hundred of them.

use std::hint::black_box;

use anyhow::{Context, Result, ensure};
use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use divvy_api::names::DRIVER;
use divvy_carve::{GpuRules, Modes};
use divvy_fake_cluster::build::{mk_claim, mk_class, mk_node};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, Device, DeviceAllocationResult, DeviceRequestAllocationResult,
    DeviceSelector, ResourceClaim, ResourceClaimStatus, ResourceSlice,
};

use crate::offered::Offered;
use crate::rig::NODE;
use crate::stats::median;
use crate::table::{Budget, Row, Value};

/// Deciding what a node publishes that offers everything, beside a copy of the decision.
pub(crate) fn carving(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (gpus, mig) in [("h100x8", false), ("h100x16", false), ("a100-40x16", true)] {
        let rules = GpuRules { modes: Modes::everything(), ..GpuRules::default() };
        let offered = Offered::with_mig_mode(gpus, &rules, "1.37.1", mig)?;
        let pool = offered.carve(NODE).pool;
        let (devices, slices) = (pool.devices().count(), pool.slices.len());
        ensure!(devices > 0, "nothing was carved");
        let carving = median(rounds, || drop(black_box(offered.carve(black_box(NODE)))));
        let copying = median(rounds, || drop(black_box(black_box(&pool).clone())));
        let row = Row::new(
            format!("carve {gpus} offered as everything: {devices} devices, {slices} slices"),
            carving,
        );
        let row = row.beside("clone of the pool", copying);
        rows.push(row.budget(Budget::AtMost(Value::Seconds(0.002))));
    }
    Ok(rows)
}

const NODES: usize = 100;

/// What the class asks for, and the claim; [`by_hand`] asks the same.
const OF_CLASS: &str =
    r#"device.driver == "gpu.divvy.dev" && device.attributes["gpu.divvy.dev"].type == "gpu""#;
const OF_CLAIM: &str = r#"device.attributes["gpu.divvy.dev"].productName.lowerAscii().matches("h100.*hbm") &&
    device.capacity["gpu.divvy.dev"].memory.compareTo(quantity("40Gi")) >= 0"#;

/// One claim on a hundred nodes that publish what one does, beside a bare loop over the same devices.
pub(crate) fn allocating(of_one_node: &[ResourceSlice], rounds: usize) -> Result<Vec<Row>> {
    let published: Vec<_> = (0..NODES).flat_map(|node| on_node(of_one_node, node)).collect();
    let nodes: Vec<Node> = (0..NODES).map(|node| mk_node(&node_name(node))).collect();
    let gpus = devices(of_one_node).count();
    ensure!(gpus > 0, "the plugin published no device");
    let mut class = mk_class(DRIVER, DRIVER);
    class.spec.get_or_insert_default().selectors = Some(vec![selector(OF_CLASS)]);
    let mut claim = mk_claim("bench", "train", DRIVER, 1);
    let requests =
        claim.spec.iter_mut().flat_map(|s| s.devices.iter_mut().flat_map(|d| d.requests.iter_mut()));
    for exact in requests.flatten().filter_map(|request| request.exactly.as_mut()) {
        exact.selectors = Some(vec![selector(OF_CLAIM)]);
    }
    let (allocator, classes, slices) = (Allocator::new(Features::ALL), [class], Slices::new(&published));
    let mut rows = Vec::new();
    for (what, held) in [("all GPUs free", 0), ("one GPU of each free", gpus - 1)] {
        let allocated = AllocatedState::from_claims([&holding(&published, held)]);
        let fits = |node: &Node| {
            let inputs = Inputs { slices: &slices, classes: &classes, allocated: &allocated, node };
            matches!(allocator.allocate_one(&inputs, &claim), Ok(Outcome::Fits(_)))
        };
        let fitting = nodes.iter().filter(|node| fits(node)).count();
        ensure!(fitting == NODES, "the claim fits on {fitting} of {NODES} nodes ({what})");
        let first = nodes.first().context("no node")?;
        let one = median(rounds, || {
            black_box(fits(black_box(first)));
        });
        let all = median(rounds, || {
            black_box(nodes.iter().filter(|node| fits(node)).count());
        });
        // First fit looks at every device up to the first free one.
        let bare = median(rounds, || {
            let visited = published.iter().flat_map(|s| s.spec.devices.iter().flatten().take(held + 1));
            black_box(visited.filter(|device| by_hand(black_box(device))).count());
        });
        let title = format!("one claim on each of {NODES} nodes × {gpus} GPUs, {what}");
        let row = Row::new(title, all).beside("bare loop over the devices visited", bare);
        rows.push(row.budget(Budget::AtMost(Value::Seconds(0.001))));
        rows.push(Row::new(format!("the same claim on one node, {what}"), one));
    }
    Ok(rows)
}

fn node_name(node: usize) -> String {
    format!("node-{node:03}")
}

/// The slices of one node as another would publish them.
fn on_node(slices: &[ResourceSlice], node: usize) -> impl Iterator<Item = ResourceSlice> {
    let name = node_name(node);
    slices.iter().cloned().map(move |mut slice| {
        let spec = &mut slice.spec;
        slice.metadata.name = slice.metadata.name.map(|old| format!("{old}-{name}"));
        spec.pool.name = spec.pool.name.replace(NODE, &name);
        spec.node_name = Some(name.clone());
        slice
    })
}

fn devices(slices: &[ResourceSlice]) -> impl Iterator<Item = &Device> {
    slices.iter().flat_map(|slice| slice.spec.devices.iter().flatten())
}

fn selector(expression: &str) -> DeviceSelector {
    DeviceSelector { cel: Some(CELDeviceSelector { expression: expression.to_owned() }) }
}

/// A claim that holds the first `count` devices of every slice.
fn holding(slices: &[ResourceSlice], count: usize) -> ResourceClaim {
    let held = slices.iter().flat_map(|slice| {
        slice.spec.devices.iter().flatten().take(count).map(|device| DeviceRequestAllocationResult {
            driver: slice.spec.driver.clone(),
            pool: slice.spec.pool.name.clone(),
            device: device.name.clone(),
            ..DeviceRequestAllocationResult::default()
        })
    });
    let devices = DeviceAllocationResult { results: Some(held.collect()), config: None };
    let allocation = AllocationResult { devices: Some(devices), ..AllocationResult::default() };
    let status = ResourceClaimStatus { allocation: Some(allocation), ..ResourceClaimStatus::default() };
    ResourceClaim { status: Some(status), ..ResourceClaim::default() }
}

/// The conditions of class and claim without CEL.
fn by_hand(device: &Device) -> bool {
    let text =
        |name: &str| device.attributes.as_ref().and_then(|a| a.get(name)).and_then(|a| a.string.as_deref());
    let memory = device.capacity.as_ref().and_then(|c| c.get("memory"));
    let enough = memory.and_then(|m| m.value.0.strip_suffix("Mi")).and_then(|m| m.parse::<u64>().ok());
    text("type") == Some("gpu")
        && text("productName").is_some_and(|p| p.to_ascii_lowercase().contains("h100"))
        && enough.is_some_and(|m| m >= 40 * 1024)
}
