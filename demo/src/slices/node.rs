//! The kind of a node of the cluster: what divvy knows of boards like its GPUs, with what the node
//! itself says of them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use divvy_api::names::{Naming, attributes as attr, capacity as cap};
use divvy_api::node::{GpuNodeStatus, GpuStatus};
use divvy_cli::offered::Granted;
use divvy_cli::status::snapshot::Snapshot;
use divvy_gpu_sim::{SimNode, profiles};
use divvy_model::{
    CudaVersion, Inventory, MemoryCaps, NvLinkPeer, PciAddress, Sharing, TargetKind,
};
use divvy_offer::KubeVersion;
use divvy_why::device::{amount, kind as device_kind, number, text};
use k8s_openapi::api::resource::v1::Device;

use super::{Kind, set_driver};
use crate::start::{Which, switch_mig_on};

/// Returns the kind of a node.
///
/// # Errors
/// If the node is not there, has no report, or has GPUs that divvy knows no board of.
pub(crate) fn kind(snapshot: &Snapshot, name: &str) -> Result<Kind> {
    let node = snapshot
        .nodes
        .iter()
        .find(|node| node.metadata.name.as_deref() == Some(name));
    let node = node.with_context(|| format!("there is no node {name} (kubectl get nodes)"))?;
    let report = snapshot.reports.get(name).with_context(|| {
        format!(
            "node {name} has no GpuNode: divvy's plugin has not run there (kubectl get gpunodes)"
        )
    })?;
    let mut policies = Vec::new();
    for (name, policy) in &snapshot.policies {
        match policy {
            Ok(policy) => policies.push(policy.clone()),
            Err(error) => bail!("GpuPolicy {name}: {error}"),
        }
    }
    let devices: Vec<&Device> = snapshot
        .slices
        .iter()
        .filter(|slice| {
            slice.spec.driver == report.driver_name && slice.spec.node_name.as_deref() == Some(name)
        })
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .collect();
    let kubernetes = KubeVersion::parse(&format!(
        "v{}",
        report.versions.kubernetes.trim_start_matches('v')
    ));
    let is_mps = |device: &&Device| {
        device_kind(&device.name).is_some_and(|kind| kind.sharing == Sharing::Mps)
    };
    let all = Granted::default();
    Ok(Kind {
        inventory: inventory(name, report, &devices)?,
        driver: report.driver_name.clone(),
        name: name.to_owned(),
        labels: node.metadata.labels.clone().unwrap_or_default(),
        policies,
        granted: Granted {
            kubernetes: kubernetes.unwrap_or(all.kubernetes),
            // The node does not say whether it has a supervisor; what it publishes does.
            mps: devices.iter().any(is_mps),
        },
    })
}

/// Returns the GPUs of a node as a fresh node of its kind has them.
fn inventory(node: &str, report: &GpuNodeStatus, devices: &[&Device]) -> Result<Inventory> {
    if report.gpus.is_empty() {
        bail!("node {node} reports no GPUs (kubectl divvy status node {node})");
    }
    let of_gpu: Vec<Vec<&Device>> = report
        .gpus
        .iter()
        .map(|gpu| {
            let is_of = |device: &&&Device| {
                device_kind(&device.name)
                    .is_some_and(|kind| gpu.name == format!("gpu-{}", kind.ordinal()))
            };
            devices.iter().filter(is_of).copied().collect()
        })
        .collect();
    let mut boards: Vec<(&str, usize)> = Vec::new();
    for (gpu, devices) in report.gpus.iter().zip(&of_gpu) {
        let board = board(node, gpu, devices)?;
        match boards.last_mut() {
            Some((last, count)) if *last == board => *count += 1,
            _ => boards.push((board, 1)),
        }
    }
    let spec: Vec<String> = boards
        .iter()
        .map(|(board, count)| format!("{board}x{count}"))
        .collect();
    let sim =
        SimNode::parse(&spec.join(",")).with_context(|| format!("the GPUs of node {node}"))?;
    if !report.versions.driver.is_empty() {
        set_driver(&sim, &report.versions.driver);
    }
    let with_mig: Vec<usize> = of_gpu
        .iter()
        .enumerate()
        .filter(|(_, devices)| is_partitions_only(devices))
        .map(|(number, _)| number)
        .collect();
    switch_mig_on(&sim, Some(&Which::Numbers(with_mig)))?;
    let mut inventory = sim.inventory();
    if !report.share_memory.starts_with("capped")
        && inventory.system.memory_caps == MemoryCaps::Available
    {
        inventory.system.memory_caps = MemoryCaps::SwitchedOff;
    }
    let cuda = devices.iter().find_map(|device| {
        let attributes = device.attributes.as_ref()?;
        let name = Naming::of(&report.driver_name)
            .attribute(attr::CUDA_DRIVER_VERSION)
            .into_owned();
        let mut parts = attributes
            .get(&name)?
            .version
            .as_ref()?
            .split('.')
            .map(str::parse);
        Some(CudaVersion {
            major: parts.next()?.ok()?,
            minor: parts.next()?.ok()?,
        })
    });
    inventory.system.cuda_version = cuda.or(inventory.system.cuda_version);
    let places: BTreeMap<PciAddress, PciAddress> = sim
        .uuids()
        .iter()
        .zip(&of_gpu)
        .filter_map(|(uuid, devices)| {
            let gpu = inventory.gpus.get_mut(uuid)?;
            let before = gpu.facts.pci_address;
            overlay(gpu, devices);
            Some((before, gpu.facts.pci_address))
        })
        .collect();
    // Links name the other end by its place.
    for gpu in inventory.gpus.values_mut() {
        for link in &mut gpu.facts.nvlinks {
            if let NvLinkPeer::Gpu(at) = link {
                *at = places.get(at).copied().unwrap_or(*at);
            }
        }
        gpu.facts.nvlinks.sort();
    }
    Ok(inventory)
}

/// Returns divvy's name of the board that a GPU is.
fn board(node: &str, gpu: &GpuStatus, devices: &[&Device]) -> Result<&'static str> {
    if gpu.product.is_empty() {
        bail!(
            "node {node} cannot read {}, so that its kind is not known: repair it, or choose another node of the kind \
             (kubectl divvy status gpu {node}/{})",
            gpu.name,
            gpu.name
        );
    }
    let like: Vec<_> = profiles()
        .iter()
        .filter(|board| board.product_name == gpu.product)
        .collect();
    let memory = whole_memory(devices);
    let exact = like
        .iter()
        .find(|board| memory.is_some() && board.memory_bytes == memory);
    let Some(board) = exact.or(like.first()) else {
        let known: Vec<&str> = profiles().iter().map(|board| board.key).collect();
        bail!(
            "{} of node {node} is an {}, of which divvy knows no board ({}): run divvy inventory -o json on the node \
             itself, whose driver knows it",
            gpu.name,
            gpu.product,
            known.join(", ")
        );
    };
    Ok(board.key)
}

/// Returns the memory of a GPU, if it is published as a whole.
fn whole_memory(devices: &[&Device]) -> Option<u64> {
    let device = devices.iter().find(|device| is_whole(device))?;
    amount(&device.capacity.as_ref()?.get(cap::MEMORY)?.value.0)
}

fn is_whole(device: &Device) -> bool {
    device_kind(&device.name)
        .is_some_and(|kind| kind.partition().is_none() && kind.sharing == Sharing::Exclusive)
}

/// Returns whether the GPU is offered in partitions and in nothing else, as one is whose MIG mode
/// is on.
fn is_partitions_only(devices: &[&Device]) -> bool {
    let kinds = devices
        .iter()
        .filter_map(|device| device_kind(&device.name));
    let mut targets = kinds
        .filter(|kind| kind.sharing.holds())
        .map(|kind| kind.form().target)
        .peekable();
    targets.peek().is_some() && targets.all(|target| target == TargetKind::Partition)
}

/// Takes over what the node's devices say of a GPU.
fn overlay(gpu: &mut divvy_model::Gpu, devices: &[&Device]) {
    let Some(any) = devices.first() else { return };
    if let Some(at) = text(any, attr::PCI_BUS_ID).and_then(|text| text.parse().ok()) {
        gpu.facts.pci_address = at;
    }
    let root = text(any, attr::PCIE_ROOT).map(str::to_owned);
    gpu.topology.pcie_root = root.or(gpu.topology.pcie_root.take());
    let numa = number(any, attr::NUMA_NODE).and_then(|node| u32::try_from(node).ok());
    gpu.topology.numa_node = numa.or(gpu.topology.numa_node);
    let mode = text(any, attr::ADDRESSING_MODE).map(str::to_owned);
    gpu.facts.addressing_mode = mode.or(gpu.facts.addressing_mode.take());
    gpu.facts.memory_bytes = whole_memory(devices).or(gpu.facts.memory_bytes);
}
