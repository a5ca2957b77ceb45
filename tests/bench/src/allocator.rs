//! Our allocator, in this process: a claim on each of a hundred nodes whose GPUs are offered as
//! everything.

use std::hint::black_box;

use anyhow::{Context, Result};
use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Slices};
use divvy_api::names::{CLASS_GPU, CLASS_MIG, CLASS_SHARE, DRIVER};
use divvy_fake_cluster::build::{allocated, mk_claim, mk_class, mk_node, mk_result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, DeviceClass, DeviceSelector, ResourceClaim, ResourceSlice,
};

use crate::offered::{everything as offered, slices};
use crate::rig::NODE;
use crate::stats::median;
use crate::table::{Budget, Row, Value};

const NODES: usize = 100;

/// Selectors of the class and of the claim.
const OF_CLASS: &str =
    r#"device.driver == "gpu.divvy.dev" && device.attributes["gpu.divvy.dev"].type == "gpu""#;
const OF_CLAIM: &str = r#"device.attributes["gpu.divvy.dev"].productName.lowerAscii().matches("h100.*hbm") &&
    device.capacity["gpu.divvy.dev"].memory.compareTo(quantity("40Gi")) >= 0"#;

/// Returns the classes of whole GPUs, partitions and shares.
pub(crate) fn classes() -> Vec<DeviceClass> {
    let of_type = |class: &str, kind: &str| {
        let expression = OF_CLASS.replace("\"gpu\"", &format!("\"{kind}\""));
        let mut class = mk_class(class, DRIVER);
        class.spec.get_or_insert_default().selectors = Some(vec![selector(&expression)]);
        class
    };
    vec![
        of_type(CLASS_GPU, "gpu"),
        of_type(CLASS_MIG, "mig"),
        of_type(CLASS_SHARE, "gpu-share"),
    ]
}

/// A hundred nodes that publish the same.
struct Cluster {
    nodes: Vec<Node>,
    published: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
}

impl Cluster {
    fn new(of_one: &[ResourceSlice]) -> Self {
        Self {
            nodes: (0..NODES).map(|node| mk_node(&node_name(node))).collect(),
            published: (0..NODES).flat_map(|node| on_node(of_one, node)).collect(),
            classes: classes(),
        }
    }

    /// Counts the nodes on which a claim fits while these devices of every node are held, and takes
    /// the time that finding this out takes, for the first node and for all.
    fn allocate(
        &self,
        slices: &Slices,
        claim: &ResourceClaim,
        held: &[String],
        rounds: usize,
    ) -> Result<Took> {
        let allocator = Allocator::new(Features::ALL);
        let allocated = AllocatedState::from_claims([&holding(&self.published, held)]);
        let fits = |node: &Node| {
            let inputs = Inputs {
                slices,
                classes: &self.classes,
                allocated: &allocated,
                node,
            };
            matches!(allocator.fit(&inputs, &[claim]), Ok(Some(_)))
        };
        let first = self.nodes.first().context("no node")?;
        let one = median(rounds, || {
            black_box(fits(black_box(first)));
        });
        let all = median(rounds.div_ceil(10), || {
            black_box(self.nodes.iter().filter(|node| fits(node)).count());
        });
        Ok(Took {
            fitting: self.nodes.iter().filter(|node| fits(node)).count(),
            one,
            all,
        })
    }
}

struct Took {
    fitting: usize,
    one: std::time::Duration,
    all: std::time::Duration,
}

/// Measures claims for everything that eight H100 can become.
pub(crate) fn everything(rounds: usize) -> Result<Vec<Row>> {
    let pool = offered("h100x8", NODE)?;
    let count = pool.devices().count();
    let cluster = Cluster::new(&slices(&pool, NODE, "bench"));
    let mut rows = Vec::new();
    let index = median(rounds.div_ceil(20), || {
        drop(black_box(Slices::new(&cluster.published)));
    });
    rows.push(Row::new(
        format!("index and check the slices of {NODES} nodes, {count} devices each"),
        index,
    ));
    let one_g = |number: usize| format!("mig-1g10gb-19-{number}");
    let partitions: Vec<String> = (0..8)
        .flat_map(|gpu| (0..3).map(move |number| format!("gpu-{gpu}-{}", one_g(number))))
        .collect();
    let full: Vec<String> = (0..8)
        .map(|gpu| format!("gpu-{gpu}-mig-7g80gb-0-0"))
        .collect();
    let one = format!(r#"device.attributes["{DRIVER}"].profile == "1g.10gb""#);
    let whole = ("whole GPU", claim_for(CLASS_GPU, OF_CLAIM));
    let partition = ("1g.10gb", claim_for(CLASS_MIG, &one));
    let slices = Slices::new(&cluster.published);
    for (state, held) in [
        ("all free", &[][..]),
        ("three 1g on each GPU", &partitions),
        ("full", &full),
    ] {
        for (what, claim) in [&whole, &partition] {
            let took = cluster.allocate(&slices, claim, held, rounds)?;
            let answer = match took.fitting {
                0 => "does not fit",
                NODES => "fits",
                _ => "fits on some",
            };
            let row = Row::new(
                format!("{what} on each of {NODES} nodes, {state}: {answer}"),
                took.all,
            );
            rows.push(row.budget(Budget::AtMost(Value::Seconds(0.01))));
            rows.push(Row::new(format!("{what} on one node, {state}"), took.one));
        }
    }
    Ok(rows)
}

fn node_name(node: usize) -> String {
    format!("node-{node:03}")
}

/// Returns the slices of one node as another would publish them.
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

fn selector(expression: &str) -> DeviceSelector {
    DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: expression.to_owned(),
        }),
    }
}

fn claim_for(class: &str, expression: &str) -> ResourceClaim {
    let mut claim = mk_claim("bench", "train", class, 1);
    let requests = claim
        .spec
        .iter_mut()
        .flat_map(|s| s.devices.iter_mut().flat_map(|d| d.requests.iter_mut()));
    for exact in requests
        .flatten()
        .filter_map(|request| request.exactly.as_mut())
    {
        exact.selectors = Some(vec![selector(expression)]);
    }
    claim
}

/// Returns a claim that holds these devices of every node.
fn holding(slices: &[ResourceSlice], names: &[String]) -> ResourceClaim {
    let held = slices.iter().flat_map(|slice| {
        let devices = slice
            .spec
            .devices
            .iter()
            .flatten()
            .filter(|device| names.contains(&device.name));
        devices.map(|device| mk_result("", &slice.spec.driver, &slice.spec.pool.name, &device.name))
    });
    allocated(ResourceClaim::default(), held.collect())
}
