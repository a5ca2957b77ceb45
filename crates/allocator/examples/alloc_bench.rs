//! What one claim costs on a cluster of 100 nodes with 8 GPUs each, beside a bare loop over the same devices.
//!
//! `cargo run --release -p divvy-allocator --example alloc_bench`
//!
//! The reference evaluates the class's condition in plain Rust for every device that the allocator visits, so the
//! factor between the two is what CEL, pools and search cost on this machine in this run.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "an example prints and may fail loudly")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, Device, DeviceAllocationResult, DeviceAttribute, DeviceCapacity,
    DeviceClaim, DeviceClass, DeviceClassSpec, DeviceRequest, DeviceRequestAllocationResult, DeviceSelector,
    ExactDeviceRequest, ResourceClaim, ResourceClaimSpec, ResourceClaimStatus, ResourcePool, ResourceSlice,
    ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const DRIVER: &str = "gpu.divvy.dev";
const NODES: usize = 100;
const GPUS: usize = 8;
const ROUNDS: usize = 200;

fn text(value: &str) -> DeviceAttribute {
    DeviceAttribute { string: Some(value.to_owned()), ..DeviceAttribute::default() }
}

fn gpu(node: usize, index: usize) -> Device {
    let version = DeviceAttribute { version: Some("580.95.5".to_owned()), ..DeviceAttribute::default() };
    let numa = DeviceAttribute { int: Some(i64::try_from(index / 4).unwrap()), ..DeviceAttribute::default() };
    let attributes = [
        ("type", text("gpu")),
        ("uuid", text(&format!("GPU-{node:04}-{index}"))),
        ("productName", text("NVIDIA H100 80GB HBM3")),
        ("brand", text("Nvidia")),
        ("architecture", text("Hopper")),
        ("driverVersion", version.clone()),
        ("cudaDriverVersion", version),
        ("sharing", text("exclusive")),
        ("resource.kubernetes.io/pcieRoot", text("pci0000:00")),
        ("resource.kubernetes.io/numaNode", numa),
    ];
    let memory = DeviceCapacity { value: Quantity("81559Mi".to_owned()), request_policy: None };
    Device {
        name: format!("gpu-{index}"),
        attributes: Some(attributes.map(|(k, v)| (k.to_owned(), v)).into()),
        capacity: Some([("memory".to_owned(), memory)].into()),
        ..Device::default()
    }
}

fn slice(node: usize) -> ResourceSlice {
    let mut slice = ResourceSlice::default();
    slice.metadata.name = Some(format!("00000-{DRIVER}-node-{node:03}"));
    let pool = ResourcePool { name: format!("node-{node:03}-gpus"), generation: 1, resource_slice_count: 1 };
    slice.spec = ResourceSliceSpec {
        driver: DRIVER.to_owned(),
        node_name: Some(format!("node-{node:03}")),
        pool,
        devices: Some((0..GPUS).map(|index| gpu(node, index)).collect()),
        ..ResourceSliceSpec::default()
    };
    slice
}

fn selector(expression: &str) -> Vec<DeviceSelector> {
    vec![DeviceSelector { cel: Some(CELDeviceSelector { expression: expression.to_owned() }) }]
}

fn claim() -> ResourceClaim {
    let exact = ExactDeviceRequest {
        device_class_name: DRIVER.to_owned(),
        count: Some(1),
        selectors: Some(selector(
            r#"device.attributes["gpu.divvy.dev"].productName.lowerAscii().matches("h100.*hbm") &&
               device.capacity["gpu.divvy.dev"].memory.compareTo(quantity("40Gi")) >= 0"#,
        )),
        ..ExactDeviceRequest::default()
    };
    let request = DeviceRequest { name: "gpu".to_owned(), exactly: Some(exact), first_available: None };
    let devices = DeviceClaim { requests: Some(vec![request]), ..DeviceClaim::default() };
    let mut claim = ResourceClaim::default();
    claim.metadata.name = Some("train".to_owned());
    claim.spec = Some(ResourceClaimSpec { devices: Some(devices) });
    claim
}

/// A claim that holds the first `count` devices of every node.
fn holding(count: usize) -> ResourceClaim {
    let results = (0..NODES).flat_map(|node| {
        (0..count).map(move |index| DeviceRequestAllocationResult {
            driver: DRIVER.to_owned(),
            pool: format!("node-{node:03}-gpus"),
            device: format!("gpu-{index}"),
            ..DeviceRequestAllocationResult::default()
        })
    });
    let devices = DeviceAllocationResult { results: Some(results.collect()), config: None };
    let allocation = AllocationResult { devices: Some(devices), ..AllocationResult::default() };
    let status = ResourceClaimStatus { allocation: Some(allocation), ..ResourceClaimStatus::default() };
    ResourceClaim { status: Some(status), ..ResourceClaim::default() }
}

/// The median of the rounds.
fn median(mut round: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times.get(ROUNDS / 2).copied().unwrap_or_default()
}

/// The condition of class and claim, by hand.
fn by_hand(device: &Device) -> bool {
    let text =
        |name: &str| device.attributes.as_ref().and_then(|a| a.get(name)).and_then(|a| a.string.as_deref());
    let memory = device.capacity.as_ref().and_then(|c| c.get("memory"));
    let enough = memory.and_then(|m| m.value.0.strip_suffix("Mi")).and_then(|m| m.parse::<u64>().ok());
    text("type") == Some("gpu")
        && text("productName").is_some_and(|p| p.to_ascii_lowercase().contains("h100"))
        && enough.is_some_and(|m| m >= 40 * 1024)
}

fn main() {
    let published: Vec<ResourceSlice> = (0..NODES).map(slice).collect();
    let mut class = DeviceClass::default();
    class.metadata.name = Some(DRIVER.to_owned());
    class.spec = Some(DeviceClassSpec {
        selectors: Some(selector(
            r#"device.driver == "gpu.divvy.dev" && device.attributes["gpu.divvy.dev"].type == "gpu""#,
        )),
        ..DeviceClassSpec::default()
    });
    let classes = [class];
    let nodes: Vec<Node> = (0..NODES)
        .map(|node| {
            let mut object = Node::default();
            object.metadata.name = Some(format!("node-{node:03}"));
            object
        })
        .collect();
    let claim = claim();
    let allocator = Allocator::new(Features::ALL);
    println!("{NODES} nodes x {GPUS} GPUs, median of {ROUNDS} rounds");
    let index = median(|| drop(black_box(Slices::new(&published))));
    println!("index the slices                          {index:>12?}");
    let device = gpu(0, 0);
    let selectors = classes.iter().flat_map(|c| c.spec.iter().flat_map(|s| s.selectors.iter().flatten()));
    let requests = claim.spec.iter().flat_map(|s| s.devices.iter().flat_map(|d| d.requests.iter().flatten()));
    let of_claim = requests.flat_map(|r| r.exactly.iter().flat_map(|e| e.selectors.iter().flatten()));
    for (what, selector) in ["class", "claim"].iter().zip(selectors.chain(of_claim)) {
        let expression = selector.cel.as_ref().map(|c| c.expression.as_str()).unwrap_or_default();
        let program = divvy_allocator::cel::compile(expression).unwrap();
        let compiling = median(|| drop(black_box(divvy_allocator::cel::compile(expression))));
        let thousand = median(|| {
            for _ in 0..1000 {
                black_box(divvy_allocator::cel::eval(&program, DRIVER, black_box(&device))).unwrap();
            }
        });
        println!("selector of the {what}: compile {compiling:?}, evaluate {:?}", thousand / 1000);
    }

    for (what, held) in [("every GPU free", 0), ("7 of 8 held", 7), ("all held: why not?", GPUS)] {
        let allocated = AllocatedState::from_claims([&holding(held)]);
        let slices = Slices::new(&published);
        let on = |node: &Node| {
            let inputs = Inputs { slices: &slices, classes: &classes, allocated: &allocated, node };
            match allocator.allocate_one(&inputs, &claim).unwrap() {
                Outcome::Fits(allocated) => allocated.steps,
                Outcome::DoesNotFit(explanation) => explanation.requests.len() as u64,
            }
        };
        let one = median(|| {
            black_box(on(nodes.first().unwrap()));
        });
        let all = median(|| {
            black_box(nodes.iter().map(on).sum::<u64>());
        });
        // What a search in first-fit order has to look at: up to the first free device.
        let visited = (held + 1).min(GPUS);
        let reference = median(|| {
            let devices = published.iter().flat_map(|s| s.spec.devices.iter().flatten().take(visited));
            black_box(devices.filter(|d| by_hand(black_box(d))).count());
        });
        let factor = all.as_secs_f64() / reference.as_secs_f64();
        println!(
            "{what:<20} one node {one:>10?}  all nodes {all:>10?}  bare loop {reference:>10?}  x{factor:.1}"
        );
    }
}
