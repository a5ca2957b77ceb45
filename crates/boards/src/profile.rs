//! Facts about each kind of board: what NVML says about it, and how it sits in a server.

use divvy_model::{Architecture, Brand, ComputeCapability, MigMode, PciAddress};

/// NVLink of a board, before it is known how many are in the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvLinkPort {
    None,
    /// SXM: a baseboard with NVSwitches, or four GPUs connected directly.
    Sxm {
        links: u32,
    },
    /// A tray of a rack: NVSwitches outside of the server, however many GPUs it has.
    Rack {
        links: u32,
    },
    /// PCIe with a connector for a bridge between two cards.
    Bridge {
        links: u32,
    },
}

/// Where a server for this board has its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chassis {
    /// Two sockets: bus numbers of the slots, those of the first socket first, and whether all
    /// slots of a socket hang under one root complex, or each PCIe switch under its own.
    Sockets {
        buses: &'static [u8],
        one_root: bool,
    },
    /// GPUs soldered beside Arm processors, each in a PCI segment of its own: the segments of the
    /// first processor (the next has 16 more), and the bus in all of them.
    Superchips { segments: &'static [u32], bus: u8 },
}

impl Chassis {
    /// Places for GPUs, in the order in which they are filled. Beyond the chassis: the same slots
    /// of another PCI segment, or another processor.
    pub fn slots(self) -> impl Iterator<Item = PciAddress> {
        let slot = |domain, bus| PciAddress {
            domain,
            bus,
            device: 0,
            function: 0,
        };
        (0..0x100).flat_map(move |round| -> Vec<_> {
            match self {
                Self::Sockets { buses, .. } => buses.iter().map(|bus| slot(round, *bus)).collect(),
                Self::Superchips { segments, bus } => segments
                    .iter()
                    .map(|segment| slot(segment + 0x10 * round, bus))
                    .collect(),
            }
        })
    }

    /// The NUMA node of the processor it hangs on.
    pub fn numa_node(self, at: PciAddress) -> u32 {
        match self {
            Self::Sockets { .. } => at.domain * 2 + u32::from(at.bus >= 0x80),
            Self::Superchips { .. } => at.domain / 0x10,
        }
    }

    pub fn pcie_root(self, at: PciAddress) -> String {
        let bus = match self {
            Self::Sockets { one_root: true, .. } => at.bus & 0x80,
            Self::Sockets {
                one_root: false, ..
            } => at.bus & 0xf0,
            Self::Superchips { .. } => 0,
        };
        format!("pci{:04x}:{bus:02x}", at.domain)
    }
}

/// Facts that boards of one make have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Make {
    /// CUDA compute capability.
    pub compute_capability: ComputeCapability,
    pub architecture: Architecture,
    pub brand: Brand,
    /// Capability for MIG.
    pub mig: bool,
    /// Its way to the host's memory: `ATS` where that is coherent.
    pub addressing_mode: &'static str,
    /// State of NVLink-C2C to the processor; `None` where NVML says NOT_SUPPORTED.
    pub c2c: Option<bool>,
    pub nvlink: NvLinkPort,
    pub chassis: Chassis,
}

/// A kind of board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Our name for it, as in `h100x2`.
    pub key: &'static str,
    /// NVML's product name.
    pub product_name: &'static str,
    /// `device << 16 | vendor`.
    pub pci_device_id: u32,
    /// Total memory in bytes; `None` where it shares the host's and NVML does not say.
    pub memory_bytes: Option<u64>,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Facts that it shares with others.
    pub make: Make,
}

impl Profile {
    /// CUDA cores, as `nvmlDeviceGetNumGpuCores` counts them.
    pub fn cores(&self) -> u32 {
        self.multiprocessors * cores_per_multiprocessor(self.make.compute_capability)
    }

    pub fn mig_mode(&self) -> MigMode {
        if self.make.mig {
            MigMode::Supported {
                current: false,
                pending: false,
            }
        } else {
            MigMode::Unsupported
        }
    }

    /// Returns whether the board is on a baseboard and so has a module number.
    pub fn has_module_id(&self) -> bool {
        matches!(
            self.make.nvlink,
            NvLinkPort::Sxm { .. } | NvLinkPort::Rack { .. }
        )
    }
}

/// CUDA cores of one multiprocessor: 64 on Volta, Turing and GA100, 128 on GA10x and everything
/// later.
pub fn cores_per_multiprocessor(capability: ComputeCapability) -> u32 {
    match (capability.major, capability.minor) {
        (7, _) | (8, 0) => 64,
        _ => 128,
    }
}
