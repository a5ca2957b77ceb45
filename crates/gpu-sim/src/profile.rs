//! The boards we can simulate: what NVML says about them and how they sit in a server. Values from
//! `hardware.md` 1.4 and 9.3.

use divvy_model::{Architecture, Brand, ComputeCapability, MigMode, PciAddress};
use serde::{Deserialize, Serialize};

/// How a board reaches others over NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NvLinkShape {
    /// Not at all.
    None,
    /// Through NVSwitches: everything behind them reaches everything.
    Switch {
        /// Active links to the switches.
        links: u32,
    },
    /// Directly to each other GPU of the same baseboard (HGX boards with four GPUs).
    Mesh {
        /// Number of the baseboard.
        board: u32,
        /// Active links to each other GPU.
        links_per_peer: u32,
    },
    /// A bridge between two neighbouring PCIe cards.
    Bridge {
        /// Number of the bridge: the two GPUs with the same number are connected.
        bridge: u32,
        /// Active links over the bridge.
        links: u32,
    },
}

/// What a board has for NVLink, before it is known how many are in the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NvLinkPort {
    None,
    /// SXM: a baseboard with NVSwitches, or four GPUs connected directly.
    Sxm {
        links: u32,
    },
    /// PCIe with a connector for a bridge between two cards.
    Bridge {
        links: u32,
    },
}

/// How a server for this board wires its PCIe slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chassis {
    /// Bus numbers of the slots, those of the first socket first.
    pub(crate) buses: &'static [u8],
    /// Whether all slots of a socket hang under one root complex, or each PCIe switch under its own.
    pub(crate) one_root_per_socket: bool,
}

/// One kind of board.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Profile {
    /// Our name for it, as in `h100x2`.
    pub key: &'static str,
    /// NVML's product name.
    pub product_name: &'static str,
    /// `device << 16 | vendor`.
    pub pci_device_id: u32,
    /// Total memory in bytes.
    pub memory_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA compute capability.
    pub compute_capability: ComputeCapability,
    /// Architecture.
    pub architecture: Architecture,
    /// Brand.
    pub brand: Brand,
    /// Whether it can do MIG.
    pub mig: bool,
    pub(crate) nvlink: NvLinkPort,
    pub(crate) chassis: Chassis,
}

impl Profile {
    /// CUDA cores, as `nvmlDeviceGetNumGpuCores` counts them.
    pub fn cores(&self) -> u32 {
        self.multiprocessors * cores_per_multiprocessor(self.compute_capability)
    }

    pub(crate) fn mig_mode(&self) -> MigMode {
        if self.mig { MigMode::Supported { current: false, pending: false } } else { MigMode::Unsupported }
    }

    /// Whether the board is on a baseboard and so has a module number.
    pub(crate) fn is_sxm(&self) -> bool {
        matches!(self.nvlink, NvLinkPort::Sxm { .. })
    }

    pub(crate) fn pcie_root(&self, address: PciAddress) -> String {
        let bus = if self.chassis.one_root_per_socket { address.bus & 0x80 } else { address.bus & 0xf0 };
        format!("pci{:04x}:{bus:02x}", address.domain)
    }
}

/// CUDA cores of one multiprocessor: 64 on Volta, Turing and GA100, 128 on GA10x and everything later.
pub(crate) fn cores_per_multiprocessor(capability: ComputeCapability) -> u32 {
    match (capability.major, capability.minor) {
        (7, _) | (8, 0) => 64,
        _ => 128,
    }
}

const fn cc(major: u32, minor: u32) -> ComputeCapability {
    ComputeCapability { major, minor }
}

/// NVML's `NVML_BRAND_NVIDIA`.
const NVIDIA: Brand = Brand(14);

const DGX_A100: Chassis =
    Chassis { buses: &[0x07, 0x0f, 0x47, 0x4e, 0x87, 0x90, 0xb7, 0xbd], one_root_per_socket: true };
const HGX_HOPPER: Chassis =
    Chassis { buses: &[0x1a, 0x1b, 0x4a, 0x4b, 0x8a, 0x8b, 0xca, 0xcb], one_root_per_socket: false };
const PCIE_8: Chassis =
    Chassis { buses: &[0x17, 0x2a, 0x3d, 0x65, 0x98, 0xb1, 0xc8, 0xe3], one_root_per_socket: false };
const PCIE_4: Chassis = Chassis { buses: &[0x3b, 0x86, 0xaf, 0xd8], one_root_per_socket: false };

const A100_40: Profile = Profile {
    key: "a100-40",
    product_name: "NVIDIA A100-SXM4-40GB",
    pci_device_id: 0x20b0_10de,
    memory_bytes: 42_949_672_960,
    multiprocessors: 108,
    compute_capability: cc(8, 0),
    architecture: Architecture::Ampere,
    brand: NVIDIA,
    mig: true,
    nvlink: NvLinkPort::Sxm { links: 12 },
    chassis: DGX_A100,
};
const H100: Profile = Profile {
    key: "h100",
    product_name: "NVIDIA H100 80GB HBM3",
    pci_device_id: 0x2330_10de,
    memory_bytes: 85_520_809_984,
    multiprocessors: 132,
    compute_capability: cc(9, 0),
    architecture: Architecture::Hopper,
    brand: NVIDIA,
    mig: true,
    nvlink: NvLinkPort::Sxm { links: 18 },
    chassis: HGX_HOPPER,
};
const L40S: Profile = Profile {
    key: "l40s",
    product_name: "NVIDIA L40S",
    pci_device_id: 0x26b9_10de,
    memory_bytes: 48_305_799_168,
    multiprocessors: 142,
    compute_capability: cc(8, 9),
    architecture: Architecture::Ada,
    brand: NVIDIA,
    mig: false,
    nvlink: NvLinkPort::None,
    chassis: PCIE_8,
};

static PROFILES: [Profile; 14] = [
    A100_40,
    Profile {
        key: "a100-80",
        product_name: "NVIDIA A100-SXM4-80GB",
        pci_device_id: 0x20b2_10de,
        memory_bytes: 85_899_345_920,
        ..A100_40
    },
    Profile {
        key: "a100-pcie-40",
        product_name: "NVIDIA A100-PCIE-40GB",
        pci_device_id: 0x20f1_10de,
        nvlink: NvLinkPort::Bridge { links: 12 },
        chassis: PCIE_8,
        ..A100_40
    },
    Profile {
        key: "a100-pcie-80",
        product_name: "NVIDIA A100 80GB PCIe",
        pci_device_id: 0x20b5_10de,
        memory_bytes: 85_899_345_920,
        nvlink: NvLinkPort::Bridge { links: 12 },
        chassis: PCIE_8,
        ..A100_40
    },
    Profile {
        key: "a30",
        product_name: "NVIDIA A30",
        pci_device_id: 0x20b7_10de,
        memory_bytes: 25_769_803_776,
        multiprocessors: 56,
        nvlink: NvLinkPort::Bridge { links: 4 },
        chassis: PCIE_8,
        ..A100_40
    },
    Profile {
        key: "b200",
        product_name: "NVIDIA B200",
        pci_device_id: 0x2901_10de,
        memory_bytes: 183_359 << 20,
        multiprocessors: 148,
        compute_capability: cc(10, 0),
        architecture: Architecture::Blackwell,
        ..H100
    },
    H100,
    Profile {
        key: "h100-nvl",
        product_name: "NVIDIA H100 NVL",
        pci_device_id: 0x2321_10de,
        memory_bytes: 100_485_038_080,
        nvlink: NvLinkPort::Bridge { links: 12 },
        chassis: PCIE_8,
        ..H100
    },
    Profile {
        key: "h100-pcie",
        product_name: "NVIDIA H100 PCIe",
        pci_device_id: 0x2331_10de,
        multiprocessors: 114,
        nvlink: NvLinkPort::Bridge { links: 12 },
        chassis: PCIE_8,
        ..H100
    },
    Profile {
        key: "h200",
        product_name: "NVIDIA H200",
        pci_device_id: 0x2335_10de,
        memory_bytes: 150_754_820_096,
        ..H100
    },
    Profile {
        key: "l4",
        product_name: "NVIDIA L4",
        pci_device_id: 0x27b8_10de,
        memory_bytes: 24_152_899_584,
        multiprocessors: 58,
        ..L40S
    },
    L40S,
    Profile {
        key: "rtx-pro-6000",
        product_name: "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        pci_device_id: 0x2bb5_10de,
        memory_bytes: 97_887 << 20,
        multiprocessors: 188,
        compute_capability: cc(12, 0),
        architecture: Architecture::Blackwell,
        mig: true,
        ..L40S
    },
    Profile {
        key: "t4",
        product_name: "Tesla T4",
        pci_device_id: 0x1eb8_10de,
        memory_bytes: 16_106_127_360,
        multiprocessors: 40,
        compute_capability: cc(7, 5),
        architecture: Architecture::Turing,
        chassis: PCIE_4,
        ..L40S
    },
];

/// All boards, by key.
pub fn profiles() -> &'static [Profile] {
    &PROFILES
}

/// A board by its key; `h100-sxm` is another name of `h100`.
pub fn profile(key: &str) -> Option<&'static Profile> {
    let key = if key == "h100-sxm" { "h100" } else { key };
    PROFILES.iter().find(|p| p.key == key)
}
