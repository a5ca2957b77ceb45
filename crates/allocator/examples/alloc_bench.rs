//! What one claim costs on a cluster of 100 nodes with 8 GPUs each, beside a bare loop over the same devices.
//!
//! `cargo run --release -p divvy-allocator --example alloc_bench`
//!
//! First with whole GPUs only. The reference evaluates the class's condition in plain Rust for every device that the
//! allocator visits, so the factor between the two is what CEL, pools and search cost on this machine in this run.
//! Then with everything that a GPU can become: the whole, a share and 25 partitions on common counters.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "an example prints and may fail loudly")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, CELDeviceSelector, CapacityRequestPolicy, CapacityRequestPolicyRange,
    CapacityRequirements, Counter, CounterSet, Device, DeviceAllocationResult, DeviceAttribute,
    DeviceCapacity, DeviceClaim, DeviceClass, DeviceClassSpec, DeviceCounterConsumption, DeviceRequest,
    DeviceRequestAllocationResult, DeviceSelector, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
    ResourceClaimStatus, ResourcePool, ResourceSlice, ResourceSliceSpec,
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

/// The partitions of an H100: name, memory slices from and to, compute slices, in MiB.
fn partitions() -> Vec<(String, usize, usize, usize, u32)> {
    let profiles = [
        ("1g10gb-19", 1, 1, 9984, &[0, 1, 2, 3, 4, 5, 6][..]),
        ("1g10gb-me-20", 1, 1, 9984, &[0, 1, 2, 3, 4, 5, 6]),
        ("1g20gb-15", 2, 1, 20096, &[0, 2, 4, 6]),
        ("2g20gb-14", 2, 2, 20096, &[0, 2, 4]),
        ("3g40gb-9", 4, 3, 40448, &[0, 4]),
        ("4g40gb-5", 4, 4, 40448, &[0]),
        ("7g80gb-0", 8, 7, 81152, &[0]),
    ];
    let placed = profiles.iter().flat_map(|(name, memory, compute, mib, placements)| {
        placements.iter().map(move |from| (format!("{name}-{from}"), *from, from + memory, *compute, *mib))
    });
    placed.collect()
}

fn counters(from: usize, to: usize, compute: usize) -> std::collections::BTreeMap<String, Counter> {
    let one = |value: usize| Counter { value: Quantity(value.to_string()) };
    let slices = (from..to).map(|slice| (format!("memory-slice-{slice}"), one(1)));
    slices.chain([("compute".to_owned(), one(compute))]).collect()
}

/// What a GPU can become draws on one set of counters.
fn drawing(device: Device, gpu: usize, from: usize, to: usize, compute: usize) -> Device {
    let consumption = DeviceCounterConsumption {
        counter_set: format!("gpu-{gpu}"),
        counters: counters(from, to, compute),
        ..DeviceCounterConsumption::default()
    };
    Device { consumes_counters: Some(vec![consumption]), ..device }
}

fn named(mut device: Device, name: String, kind: &str, mib: u32) -> Device {
    device.name = name;
    device.attributes.get_or_insert_default().insert("type".to_owned(), text(kind));
    let memory = DeviceCapacity { value: Quantity(format!("{mib}Mi")), request_policy: None };
    device.capacity = Some([("memory".to_owned(), memory)].into());
    device
}

fn share(node: usize, index: usize) -> Device {
    let mut device = named(gpu(node, index), format!("gpu-{index}-ts"), "share", 81152);
    device.allow_multiple_allocations = Some(true);
    let quantity = |text: &str| Quantity(text.to_owned());
    let range = CapacityRequestPolicyRange { min: quantity("1Mi"), max: None, step: Some(quantity("1Mi")) };
    let policy = CapacityRequestPolicy {
        default: Some(quantity("1Gi")),
        valid_range: Some(range),
        valid_values: None,
    };
    for capacity in device.capacity.iter_mut().flat_map(std::collections::BTreeMap::values_mut) {
        capacity.request_policy = Some(policy.clone());
    }
    device
}

/// The slices of a node that offers everything: whole GPUs and shares first, then partitions, then counters.
fn everything(node: usize) -> Vec<ResourceSlice> {
    let few = (0..GPUS).rev().map(|i| drawing(gpu(node, i), i, 0, 8, 7));
    let few = few.chain((0..GPUS).map(|i| drawing(share(node, i), i, 0, 8, 7)));
    let mut groups: Vec<Vec<Device>> = vec![few.collect()];
    for pair in 0..GPUS / 2 {
        let both = [pair * 2, pair * 2 + 1].into_iter().flat_map(|i| {
            partitions().into_iter().map(move |(profile, from, to, compute, mib)| {
                let device = named(gpu(node, i), format!("gpu-{i}-mig-{profile}"), "mig", mib);
                let profile = profile.split('-').next().unwrap_or_default().to_owned();
                let mut device = drawing(device, i, from, to, compute);
                device.attributes.get_or_insert_default().insert("profile".to_owned(), text(&profile));
                device
            })
        });
        groups.push(both.collect());
    }
    let count = i64::try_from(groups.len() + 1).unwrap();
    let mut slices = Vec::new();
    for (number, devices) in groups.into_iter().enumerate() {
        let mut slice = slice(node);
        slice.metadata.name = Some(format!("{number:05}-{DRIVER}-node-{node:03}"));
        slice.spec.pool.resource_slice_count = count;
        slice.spec.devices = Some(devices);
        slices.push(slice);
    }
    let mut last = slice(node);
    last.metadata.name = Some(format!("99999-{DRIVER}-node-{node:03}"));
    last.spec.pool.resource_slice_count = count;
    last.spec.devices = None;
    let set = |gpu| CounterSet { name: format!("gpu-{gpu}"), counters: counters(0, 8, 7) };
    last.spec.shared_counters = Some((0..GPUS).map(set).collect());
    slices.push(last);
    slices
}

fn selector(expression: &str) -> Vec<DeviceSelector> {
    vec![DeviceSelector { cel: Some(CELDeviceSelector { expression: expression.to_owned() }) }]
}

fn claim() -> ResourceClaim {
    claim_of(ExactDeviceRequest {
        device_class_name: DRIVER.to_owned(),
        count: Some(1),
        selectors: Some(selector(
            r#"device.attributes["gpu.divvy.dev"].productName.lowerAscii().matches("h100.*hbm") &&
               device.capacity["gpu.divvy.dev"].memory.compareTo(quantity("40Gi")) >= 0"#,
        )),
        ..ExactDeviceRequest::default()
    })
}

fn claim_of(exact: ExactDeviceRequest) -> ResourceClaim {
    let request = DeviceRequest { name: "gpu".to_owned(), exactly: Some(exact), first_available: None };
    let devices = DeviceClaim { requests: Some(vec![request]), ..DeviceClaim::default() };
    let mut claim = ResourceClaim::default();
    claim.metadata.name = Some("train".to_owned());
    claim.spec = Some(ResourceClaimSpec { devices: Some(devices) });
    claim
}

/// A claim that holds the first `count` devices of every node.
fn holding(count: usize) -> ResourceClaim {
    holding_of(&(0..count).map(|index| format!("gpu-{index}")).collect::<Vec<_>>())
}

/// A claim that holds these devices of every node.
fn holding_of(devices: &[String]) -> ResourceClaim {
    let results = (0..NODES).flat_map(|node| {
        devices.iter().map(move |device| DeviceRequestAllocationResult {
            driver: DRIVER.to_owned(),
            pool: format!("node-{node:03}-gpus"),
            device: device.clone(),
            ..DeviceRequestAllocationResult::default()
        })
    });
    let devices = DeviceAllocationResult { results: Some(results.collect()), config: None };
    let allocation = AllocationResult { devices: Some(devices), ..AllocationResult::default() };
    let status = ResourceClaimStatus { allocation: Some(allocation), ..ResourceClaimStatus::default() };
    ResourceClaim { status: Some(status), ..ResourceClaim::default() }
}

/// The median of the rounds.
fn median(round: impl FnMut()) -> Duration {
    median_of(ROUNDS, round)
}

fn median_of(rounds: usize, mut round: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times.get(rounds / 2).copied().unwrap_or_default()
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

    everything_that_a_gpu_can_become(&allocator, &nodes);
}

fn class(name: &str, kind: &str) -> DeviceClass {
    let mut class = DeviceClass::default();
    class.metadata.name = Some(name.to_owned());
    let expression =
        format!(r#"device.driver == "gpu.divvy.dev" && device.attributes["gpu.divvy.dev"].type == "{kind}""#);
    class.spec =
        Some(DeviceClassSpec { selectors: Some(selector(&expression)), ..DeviceClassSpec::default() });
    class
}

fn everything_that_a_gpu_can_become(allocator: &Allocator, nodes: &[Node]) {
    let published: Vec<ResourceSlice> = (0..NODES).flat_map(everything).collect();
    let devices: usize = published.iter().map(|s| s.spec.devices.as_ref().map_or(0, Vec::len)).sum();
    println!("\nwhole, share and 25 partitions of each GPU: {devices} devices in {} slices", published.len());
    let index = median_of(ROUNDS / 10, || drop(black_box(Slices::new(&published))));
    println!("index and check the slices                {index:>12?}");
    let classes = [class("gpu", "gpu"), class("share", "share"), class("mig", "mig")];
    let of = |class: &str| ExactDeviceRequest {
        device_class_name: class.to_owned(),
        count: Some(1),
        ..ExactDeviceRequest::default()
    };
    let small = ExactDeviceRequest {
        selectors: Some(selector(r#"device.attributes["gpu.divvy.dev"].profile == "1g10gb""#)),
        ..of("mig")
    };
    let memory = [("memory".to_owned(), Quantity("10Gi".to_owned()))].into();
    let share =
        ExactDeviceRequest { capacity: Some(CapacityRequirements { requests: Some(memory) }), ..of("share") };
    let claims = [
        ("whole GPU", claim_of(of("gpu"))),
        ("share of 10Gi", claim_of(share)),
        ("1g partition", claim_of(small)),
    ];
    let full: Vec<String> = (0..GPUS).map(|gpu| format!("gpu-{gpu}-mig-7g80gb-0-0")).collect();
    let half: Vec<String> =
        (0..GPUS).flat_map(|gpu| [0, 1, 2].map(|i| format!("gpu-{gpu}-mig-1g10gb-19-{i}"))).collect();
    let slices = Slices::new(&published);
    for (what, held) in [("free", &[][..]), ("three 1g on every GPU", &half), ("full: why not?", &full)] {
        let allocated = AllocatedState::from_claims([&holding_of(held)]);
        for (name, claim) in &claims {
            let on = |node: &Node| {
                let inputs = Inputs { slices: &slices, classes: &classes, allocated: &allocated, node };
                matches!(allocator.allocate_one(&inputs, claim).unwrap(), Outcome::Fits(_))
            };
            let one = median(|| {
                black_box(on(nodes.first().unwrap()));
            });
            let all = median_of(ROUNDS / 20, || {
                black_box(nodes.iter().filter(|node| on(node)).count());
            });
            let fits = if on(nodes.first().unwrap()) { "fits" } else { "does not" };
            println!("{what:<22} {name:<14} {fits:<9} one node {one:>10?}  all nodes {all:>10?}");
        }
    }
}
