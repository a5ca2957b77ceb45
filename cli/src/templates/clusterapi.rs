//! A template as the annotations by which the Cluster API provider of Cluster Autoscaler makes a
//! node of a group that has none. Read in `kubernetes/autoscaler`,
//! `cluster-autoscaler/cloudprovider/clusterapi/clusterapi_unstructured.go` at 0369bcb7
//! (`InstanceResourceSlices`): one slice, devices `gpu-0` and up, their only attribute
//! `type: gpu`.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use divvy_api::names::NODE_LABEL;
use serde::Serialize;

use super::Template;

const COUNT: &str = "capacity.cluster-autoscaler.kubernetes.io/gpu-count";
const DRIVER: &str = "capacity.cluster-autoscaler.kubernetes.io/dra-driver";
const LABELS: &str = "capacity.cluster-autoscaler.kubernetes.io/labels";

/// A part of a MachineDeployment, MachineSet or MachinePool.
#[derive(Debug, Serialize)]
pub struct Annotated {
    metadata: Metadata,
}

#[derive(Debug, Serialize)]
struct Metadata {
    annotations: BTreeMap<&'static str, String>,
}

/// Returns the annotations of a group of such nodes.
///
/// # Errors
/// If the annotations describe other devices than the template has: the autoscaler would add nodes
/// that it never takes for ready.
pub fn annotations(template: &Template) -> Result<Annotated> {
    let names: BTreeSet<&str> = template
        .devices()
        .map(|device| device.name.as_str())
        .collect();
    let wanted: BTreeSet<String> = (0..names.len()).map(|n| format!("gpu-{n}")).collect();
    let is_plain =
        template.specs.len() == 1 && wanted.iter().map(String::as_str).eq(names.iter().copied());
    if names.is_empty() {
        bail!("such a node publishes no devices, and there is nothing to annotate");
    }
    if !is_plain {
        bail!(
            "the annotations can only say \"whole GPUs, gpu-0 and up, in one slice\", and such a node publishes {} devices in {} \
             slices: Cluster Autoscaler would add nodes and never take them for ready. Offer the group's GPUs whole \
             only (--policy, modes: [Whole]), or keep one node in the group, which it copies",
            names.len(),
            template.specs.len()
        );
    }
    Ok(Annotated {
        metadata: Metadata {
            annotations: BTreeMap::from([
                (COUNT, names.len().to_string()),
                (DRIVER, template.driver.clone()),
                (LABELS, format!("{NODE_LABEL}=true")),
            ]),
        },
    })
}
