//! Where a new GPU goes: its slot, its numbers, and what it is connected to.

use std::collections::BTreeSet;

use divvy_model::{ComputeMode, GpuFacts, GpuUuid, HostTopology, NvLinkPeer, PciAddress};

use super::{Engine, SimGpu};
use crate::health::well;
use crate::nvlink::NvLinkShape;
use divvy_boards::{NvLinkPort, Profile};

impl Engine {
    pub(super) fn nvlinks(&self, gpu: &SimGpu) -> Vec<NvLinkPeer> {
        let peers = |same: &dyn Fn(NvLinkShape) -> bool, links: u32| {
            let others = self
                .gpus
                .iter()
                .filter(|o| !o.lost && o.facts.uuid != gpu.facts.uuid);
            let connected = others
                .filter(|o| same(o.nvlink))
                .map(|o| NvLinkPeer::Gpu(o.facts.pci_address));
            let mut all: Vec<_> = connected
                .flat_map(|peer| (0..links).map(move |_| peer))
                .collect();
            all.sort_unstable();
            all
        };
        match gpu.nvlink {
            NvLinkShape::None => Vec::new(),
            NvLinkShape::Switch { links } => (0..links).map(|_| NvLinkPeer::Switch).collect(),
            NvLinkShape::Mesh {
                board,
                links_per_peer,
            } => peers(
                &|o| matches!(o, NvLinkShape::Mesh { board: b, .. } if b == board),
                links_per_peer,
            ),
            NvLinkShape::Bridge { bridge, links } => peers(
                &|o| matches!(o, NvLinkShape::Bridge { bridge: b, .. } if b == bridge),
                links,
            ),
        }
    }

    pub(super) fn add(
        &mut self,
        profile: &'static Profile,
        baseboard: Option<NvLinkShape>,
    ) -> GpuUuid {
        let pci_address = self.free_slot(profile);
        let serial = self.next_serial;
        self.next_serial = self.next_serial.wrapping_add(1);
        let node = self.node_number;
        #[expect(clippy::expect_used, reason = "the form is fixed; tested")]
        let uuid: GpuUuid = format!("GPU-12345678-1234-1234-{node:04x}-12345678{serial:04x}")
            .parse()
            .expect("a GPU UUID");
        let make = &profile.make;
        let taken = |pick: fn(&SimGpu) -> Option<u32>| -> BTreeSet<u32> {
            self.gpus.iter().filter_map(pick).collect()
        };
        let gpu = SimGpu {
            next_minor: None,
            model: profile.key.to_owned(),
            facts: GpuFacts {
                uuid: uuid.clone(),
                minor: Some(lowest_free(0, &taken(|g| g.facts.minor))),
                product_name: profile.product_name.to_owned(),
                brand: make.brand,
                architecture: make.architecture,
                compute_capability: make.compute_capability,
                memory_bytes: profile.memory_bytes,
                memory_reserved_bytes: None,
                multiprocessors: Some(profile.multiprocessors),
                pci_address,
                pci_device_id: profile.pci_device_id,
                mig_mode: profile.mig_mode(),
                compute_mode: Some(ComputeMode::Default),
                persistence: Some(true),
                addressing_mode: Some(make.addressing_mode.to_owned()),
                c2c: make.c2c,
                module_id: profile
                    .has_module_id()
                    .then(|| lowest_free(1, &taken(|g| g.facts.module_id))),
                nvlinks: Vec::new(),
                fabric: None,
            },
            topology: HostTopology {
                numa_node: Some(make.chassis.numa_node(pci_address)),
                pcie_root: Some(make.chassis.pcie_root(pci_address)),
            },
            nvlink: baseboard.unwrap_or_else(|| self.connect(profile)),
            lost: false,
            processes: BTreeSet::new(),
            clients: BTreeSet::new(),
            instances: Vec::new(),
            vitals: well(),
            usage: crate::usage::SimUsage::default(),
        };
        self.insert_gpu(gpu);
        uuid
    }

    /// The first slot of the board's chassis that is free.
    fn free_slot(&self, profile: &Profile) -> PciAddress {
        let taken: BTreeSet<_> = self.gpus.iter().map(|g| g.facts.pci_address).collect();
        let free = profile
            .make
            .chassis
            .slots()
            .find(|address| !taken.contains(address));
        free.unwrap_or(PciAddress {
            domain: u32::MAX,
            bus: 0,
            device: 0,
            function: 0,
        })
    }

    /// The NVLink shape of a GPU that joins the ones already there.
    fn connect(&self, profile: &Profile) -> NvLinkShape {
        let same_model = || {
            self.gpus
                .iter()
                .filter(|g| g.model == profile.key)
                .map(|g| g.nvlink)
        };
        match profile.make.nvlink {
            NvLinkPort::None => NvLinkShape::None,
            NvLinkPort::Rack { links } => NvLinkShape::Switch { links },
            NvLinkPort::Sxm { links } => {
                // A GPU put back on a four-GPU baseboard that has a free place.
                let free = same_model().find(|shape| {
                    matches!(shape, NvLinkShape::Mesh { .. })
                        && same_model().filter(|s| s == shape).count() < 4
                });
                free.unwrap_or(NvLinkShape::Switch { links })
            }
            NvLinkPort::Bridge { links } => {
                let half_free = same_model().find(|shape| {
                    matches!(shape, NvLinkShape::Bridge { .. })
                        && same_model().filter(|s| s == shape).count() < 2
                });
                half_free.unwrap_or(NvLinkShape::Bridge {
                    bridge: self.next_board(),
                    links,
                })
            }
        }
    }

    pub(super) fn next_board(&self) -> u32 {
        let number = |g: &SimGpu| match g.nvlink {
            NvLinkShape::Mesh { board: n, .. } | NvLinkShape::Bridge { bridge: n, .. } => Some(n),
            NvLinkShape::None | NvLinkShape::Switch { .. } => None,
        };
        lowest_free(0, &self.gpus.iter().filter_map(number).collect())
    }
}

pub(crate) fn lowest_free(from: u32, taken: &BTreeSet<u32>) -> u32 {
    (from..=u32::MAX)
        .find(|n| !taken.contains(n))
        .unwrap_or(u32::MAX)
}
