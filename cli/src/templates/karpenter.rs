//! A template as a DRAConfig of Karpenter, by which its `dra-kwok-driver` publishes slices for
//! simulated nodes. Read in the Go module `sigs.k8s.io/karpenter` v1.14.1:
//! `dra-kwok-driver/pkg/apis/v1alpha1/draconfig_types.go`,
//! `dra-kwok-driver/pkg/controllers/resourceslice.go`.

use anyhow::{Result, bail};
use k8s_openapi::api::resource::v1::Device;
use serde::Serialize;

use super::Template;

/// Length of the name of a pool that the definition of a DRAConfig takes.
const MAX_NAME: usize = 63;

/// A DRAConfig.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DraConfig {
    api_version: &'static str,
    kind: &'static str,
    metadata: Metadata,
    spec: Spec,
}

#[derive(Debug, Serialize)]
struct Metadata {
    name: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    driver: String,
    pools: Vec<Pool>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Pool {
    name: String,
    node_selector_terms: Vec<Term>,
    resource_slices: Vec<Slice>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Term {
    match_expressions: Vec<Expression>,
}

#[derive(Debug, Serialize)]
struct Expression {
    key: &'static str,
    operator: &'static str,
    values: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Slice {
    devices: Vec<Device>,
}

/// Returns the DRAConfig for nodes of these instance types.
///
/// # Errors
/// If it has no words for the template: it knows devices, and no counters.
pub fn dra_config(template: &Template, instance_types: &[String]) -> Result<DraConfig> {
    let [first, ..] = instance_types else {
        bail!(
            "-o karpenter needs --instance-type: a DRAConfig is for the nodes that Karpenter \
             labels with it (node.kubernetes.io/instance-type)"
        );
    };
    let counting = template
        .devices()
        .filter(|device| device.consumes_counters.is_some())
        .count();
    if counting > 0 {
        bail!(
            "{counting} of {} devices draw on shared counters, and a DRAConfig of Karpenter 1.14.1 has no \
             sharedCounters: its nodes would give each GPU out several times over. Use -o yaml, or a policy \
             that offers each GPU in one form without partitions (--policy, such as modes: [Whole])",
            template.devices().count()
        );
    }
    let slices: Vec<Slice> = template
        .specs
        .iter()
        .filter_map(|spec| spec.devices.clone())
        .map(|devices| Slice { devices })
        .collect();
    if slices.is_empty() {
        bail!("such a node publishes no devices, and a DRAConfig needs one");
    }
    let name = pool_name(first);
    let term = Term {
        match_expressions: vec![Expression {
            key: "node.kubernetes.io/instance-type",
            operator: "In",
            values: instance_types.to_vec(),
        }],
    };
    Ok(DraConfig {
        api_version: "test.karpenter.sh/v1alpha1",
        kind: "DRAConfig",
        metadata: Metadata { name: name.clone() },
        spec: Spec {
            driver: template.driver.clone(),
            pools: vec![Pool {
                name,
                node_selector_terms: vec![term],
                resource_slices: slices,
            }],
        },
    })
}

/// Returns a name for a pool that differs between instance types: the pools of all DRAConfigs of a
/// driver are merged, and the names of slices are made of theirs.
fn pool_name(instance_type: &str) -> String {
    let plain = |c: char| match c.to_ascii_lowercase() {
        c @ ('a'..='z' | '0'..='9') => c,
        _ => '-',
    };
    let name: String = "divvy-"
        .chars()
        .chain(instance_type.chars().map(plain))
        .take(MAX_NAME)
        .collect();
    name.trim_end_matches('-').to_owned()
}
