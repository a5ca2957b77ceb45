//! [`Inventory`]: everything known about a node's GPUs at one moment; the input of `carve` and of
//! the prepare decision.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::mig::{GpuInstance, GpuInstanceId, MigCapabilities};
use crate::{GpuError, GpuFacts, GpuUuid, MigMode, MigUuid, SystemFacts};

/// Where a GPU sits in the host, from sysfs. Unknown is left out, never invented.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostTopology {
    /// NUMA node of the PCI slot; `None` when the kernel says -1 or nothing.
    pub numa_node: Option<u32>,
    /// PCIe root complex, `pci0000:00`.
    pub pcie_root: Option<String>,
}

/// A GPU: NVML's facts and its place in the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    pub facts: GpuFacts,
    /// Place in the host.
    pub topology: HostTopology,
    /// Its MIG profiles and its instances when it was read; `None` where they are unknown: the GPU
    /// does not support MIG, or the driver does not report them while MIG mode is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<GpuMig>,
}

/// A GPU that can be cut into partitions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMig {
    /// Profiles and placements.
    pub capabilities: MigCapabilities,
    /// GPU instances that lived when it was last read, by id; none while MIG mode is off, `None`
    /// where the driver has not listed them yet. Only a hint: before a change the driver is asked.
    pub instances: Option<Vec<GpuInstance>>,
    /// The MIG devices of those instances that have exactly one compute instance, as old as the
    /// list.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub uuids: BTreeMap<GpuInstanceId, MigUuid>,
}

/// A GPU that NVML lists but that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProblem {
    pub gpu: GpuUuid,
    /// The error that its driver reported.
    pub error: GpuError,
}

/// A node's GPUs at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Driver, NVML and CUDA versions.
    pub system: SystemFacts,
    /// GPUs that answered, by UUID.
    pub gpus: BTreeMap<GpuUuid, Gpu>,
    /// GPUs that are there but could not be read: one bad GPU does not hide the others.
    pub problems: Vec<GpuProblem>,
    /// The MIG mode of each GPU that ever had one, as it was last read: also of GPUs that could not
    /// be read now. A GPU that may be cut must not be taken for one that never is.
    pub with_mig: BTreeMap<GpuUuid, MigMode>,
}

impl Inventory {
    /// The NVLink domain of each GPU, as an opaque label: GPUs with the same label reach each other
    /// over NVLink. A fabric's label is `<cluster>.<clique>`; behind NVSwitches all GPUs of the
    /// node are one domain; otherwise the connected components of direct links, each named after
    /// its first GPU (by UUID). GPUs without a link have no label.
    pub fn nvlink_domains(&self) -> BTreeMap<GpuUuid, String> {
        use crate::NvLinkPeer;
        // NVML names the other end of a link by its PCI address.
        let by_pci: BTreeMap<_, _> = self
            .gpus
            .iter()
            .map(|(uuid, gpu)| (gpu.facts.pci_address, uuid))
            .collect();
        let switched: Vec<&GpuUuid> = self
            .gpus
            .iter()
            .filter(|(_, gpu)| gpu.facts.nvlinks.contains(&NvLinkPeer::Switch))
            .map(|(uuid, _)| uuid)
            .collect();
        // Connected components by union-find. The smaller UUID becomes the root, so that a label
        // does not depend on the order of GPUs or links.
        let mut root: BTreeMap<&GpuUuid, &GpuUuid> =
            self.gpus.keys().map(|uuid| (uuid, uuid)).collect();
        let mut join = |a, b| {
            let (a, b) = (find(&root, a), find(&root, b));
            let (low, high) = if a <= b { (a, b) } else { (b, a) };
            root.insert(high, low);
        };
        for (uuid, gpu) in &self.gpus {
            for link in &gpu.facts.nvlinks {
                // An address that is not in the inventory is of a GPU that cannot be read or is
                // bound to another driver: it joins nothing.
                if let NvLinkPeer::Gpu(address) = link
                    && let Some(peer) = by_pci.get(address)
                {
                    join(uuid, peer);
                }
            }
        }
        // Behind NVSwitches every GPU reaches every other, so all of them become one component.
        for pair in switched.windows(2) {
            if let [a, b] = pair {
                join(a, b);
            }
        }
        self.gpus
            .iter()
            .filter_map(|(uuid, gpu)| {
                // The fabric goes first: it reaches beyond the node, and its label is the same on
                // all nodes of the clique. Links to other things than GPUs and switches lead to no
                // GPU and give no label.
                let label = match &gpu.facts.fabric {
                    Some(fabric) => format!("{}.{}", fabric.cluster_uuid, fabric.clique_id),
                    None if gpu
                        .facts
                        .nvlinks
                        .iter()
                        .any(|l| !matches!(l, NvLinkPeer::Other(_))) =>
                    {
                        find(&root, uuid).to_string()
                    }
                    None => return None,
                };
                Some((uuid.clone(), label))
            })
            .collect()
    }

    /// For GPUs bridged in twos: the label of the pair (its first GPU's UUID). A GPU with direct
    /// links to exactly one other GPU of the node, and that one back to it alone, is in a pair.
    pub fn nvlink_pairs(&self) -> BTreeMap<GpuUuid, String> {
        use crate::NvLinkPeer;
        let by_pci: BTreeMap<_, _> = self
            .gpus
            .iter()
            .map(|(uuid, gpu)| (gpu.facts.pci_address, uuid))
            .collect();
        let only_peer = |uuid: &GpuUuid| -> Option<&GpuUuid> {
            let mut peers: Vec<_> = self
                .gpus
                .get(uuid)?
                .facts
                .nvlinks
                .iter()
                .map(|link| match link {
                    NvLinkPeer::Gpu(address) => by_pci.get(address).copied(),
                    NvLinkPeer::Switch | NvLinkPeer::Other(_) => None,
                })
                .collect();
            // Several links to one peer are neighbours, since the links are sorted. A switch, or a
            // GPU outside the inventory, is a `None` beside the peer, and the GPU is then in no
            // pair.
            peers.dedup();
            match peers.as_slice() {
                [Some(peer)] => Some(peer),
                _ => None,
            }
        };
        self.gpus
            .keys()
            .filter_map(|uuid| {
                let peer = only_peer(uuid)?;
                // Both ends have to agree: a GPU in a chain of three has one peer that has two.
                (only_peer(peer)? == uuid).then(|| (uuid.clone(), uuid.min(peer).to_string()))
            })
            .collect()
    }
}

/// The root of a GPU's tree: its connected component.
fn find<'a>(root: &BTreeMap<&'a GpuUuid, &'a GpuUuid>, mut at: &'a GpuUuid) -> &'a GpuUuid {
    while let Some(&up) = root.get(at) {
        if up == at {
            break;
        }
        at = up;
    }
    at
}
