//! The boards we can simulate, a line each.
//!
//! Names and PCI ids are those of the list of supported chips in the driver's README (R580, R590).
//! Memory is what `nvidia-smi` prints as total, multiprocessors what CUDA counts; both were seen in
//! public output of the board unless its line says *inferred*. Where a board sits in the host
//! follows one server that is sold with it.

use divvy_model::{Architecture, Brand, ComputeCapability};

use crate::profile::{Chassis, Make, NvLinkPort, Profile};

/// `NVML_BRAND_TESLA`, `NVML_BRAND_NVIDIA_RTX` and `NVML_BRAND_NVIDIA`.
const TESLA: Brand = Brand(2);
const NVIDIA_RTX: Brand = Brand(13);
const NVIDIA: Brand = Brand(14);

const fn cc(major: u32, minor: u32) -> ComputeCapability {
    ComputeCapability { major, minor }
}

const DGX_A100: Chassis = Chassis::Sockets {
    buses: &[0x07, 0x0f, 0x47, 0x4e, 0x87, 0x90, 0xb7, 0xbd],
    one_root: true,
};
const HGX_HOPPER: Chassis = Chassis::Sockets {
    buses: &[0x1a, 0x1b, 0x4a, 0x4b, 0x8a, 0x8b, 0xca, 0xcb],
    one_root: false,
};
const PCIE_8: Chassis = Chassis::Sockets {
    buses: &[0x17, 0x2a, 0x3d, 0x65, 0x98, 0xb1, 0xc8, 0xe3],
    one_root: false,
};
const PCIE_4: Chassis = Chassis::Sockets {
    buses: &[0x3b, 0x86, 0xaf, 0xd8],
    one_root: false,
};
/// `nvidia-smi` of a GH200 says 00000009:01:00.0; of a GB200 00000008:01:00.0 first, of a GB300
/// 00000008:06:00.0, of a DGX Spark 0000000F:01:00.0. The segments of the second processor are
/// inferred.
const GH200_HOST: Chassis = Chassis::Superchips {
    segments: &[0x9],
    bus: 1,
};
const GB200_TRAY: Chassis = Chassis::Superchips {
    segments: &[0x8, 0x9],
    bus: 1,
};
const GB300_TRAY: Chassis = Chassis::Superchips {
    segments: &[0x8, 0x9],
    bus: 6,
};
const DGX_SPARK: Chassis = Chassis::Superchips {
    segments: &[0xf],
    bus: 1,
};

const VOLTA: Make = Make {
    compute_capability: cc(7, 0),
    architecture: Architecture::Volta,
    brand: TESLA,
    mig: false,
    addressing_mode: "None",
    c2c: None,
    nvlink: NvLinkPort::Sxm { links: 6 },
    chassis: DGX_A100,
};
const TURING: Make = Make {
    compute_capability: cc(7, 5),
    architecture: Architecture::Turing,
    brand: NVIDIA,
    nvlink: NvLinkPort::None,
    chassis: PCIE_4,
    ..VOLTA
};
/// HMM comes with the open kernel module.
const GA100: Make = Make {
    compute_capability: cc(8, 0),
    architecture: Architecture::Ampere,
    brand: NVIDIA,
    mig: true,
    addressing_mode: "HMM",
    nvlink: NvLinkPort::Sxm { links: 12 },
    ..VOLTA
};
const GA100_PCIE: Make = Make {
    nvlink: NvLinkPort::Bridge { links: 12 },
    chassis: PCIE_8,
    ..GA100
};
const A30: Make = Make {
    nvlink: NvLinkPort::Bridge { links: 4 },
    ..GA100_PCIE
};
const GA102: Make = Make {
    compute_capability: cc(8, 6),
    mig: false,
    nvlink: NvLinkPort::None,
    ..GA100_PCIE
};
const ADA: Make = Make {
    compute_capability: cc(8, 9),
    architecture: Architecture::Ada,
    ..GA102
};
/// C2C "Disabled" was seen on an H100 80GB HBM3; on its sisters it is inferred.
const HOPPER: Make = Make {
    compute_capability: cc(9, 0),
    architecture: Architecture::Hopper,
    c2c: Some(false),
    nvlink: NvLinkPort::Sxm { links: 18 },
    chassis: HGX_HOPPER,
    ..GA100
};
const HOPPER_PCIE: Make = Make {
    nvlink: NvLinkPort::Bridge { links: 12 },
    chassis: PCIE_8,
    ..HOPPER
};
/// Four cards of H200 NVL can be bridged, too; the simulator knows pairs.
const H200_NVL: Make = Make {
    nvlink: NvLinkPort::Bridge { links: 18 },
    ..HOPPER_PCIE
};
/// With one processor and GPU each: the pair of a GH200 NVL2 is not simulated.
const GRACE_HOPPER: Make = Make {
    addressing_mode: "ATS",
    c2c: Some(true),
    nvlink: NvLinkPort::None,
    chassis: GH200_HOST,
    ..HOPPER
};
const BLACKWELL: Make = Make {
    compute_capability: cc(10, 0),
    architecture: Architecture::Blackwell,
    c2c: None,
    ..HOPPER
};
const BLACKWELL_ULTRA: Make = Make {
    compute_capability: cc(10, 3),
    ..BLACKWELL
};
const GRACE_BLACKWELL: Make = Make {
    addressing_mode: "ATS",
    c2c: Some(true),
    nvlink: NvLinkPort::Rack { links: 18 },
    chassis: GB200_TRAY,
    ..BLACKWELL
};
const GRACE_BLACKWELL_ULTRA: Make = Make {
    compute_capability: cc(10, 3),
    chassis: GB300_TRAY,
    ..GRACE_BLACKWELL
};
const RTX_SERVER: Make = Make {
    compute_capability: cc(12, 0),
    nvlink: NvLinkPort::None,
    chassis: PCIE_8,
    ..BLACKWELL
};
/// The brand is inferred.
const RTX_WORKSTATION: Make = Make {
    brand: NVIDIA_RTX,
    chassis: PCIE_4,
    ..RTX_SERVER
};
/// ATS and C2C "Enabled": NVIDIA/warp, design note on unified memory, driver 580.95.05.
const SPARK: Make = Make {
    compute_capability: cc(12, 1),
    mig: false,
    addressing_mode: "ATS",
    c2c: Some(true),
    chassis: DGX_SPARK,
    ..RTX_SERVER
};

/// Memory in MiB, 0 where NVML does not say.
const fn board(
    key: &'static str,
    product_name: &'static str,
    device: u32,
    mib: u64,
    multiprocessors: u32,
    make: Make,
) -> Profile {
    let memory_bytes = if mib == 0 { None } else { Some(mib << 20) };
    Profile {
        key,
        product_name,
        pci_device_id: device << 16 | 0x10de,
        memory_bytes,
        multiprocessors,
        make,
    }
}

#[rustfmt::skip]
static PROFILES: [Profile; 30] = [
    board("a10",          "NVIDIA A10",              0x2236,  23_028,  72, GA102),
    board("a100-40",      "NVIDIA A100-SXM4-40GB",   0x20b0,  40_960, 108, GA100),
    board("a100-80",      "NVIDIA A100-SXM4-80GB",   0x20b2,  81_920, 108, GA100),
    board("a100-pcie-40", "NVIDIA A100-PCIE-40GB",   0x20f1,  40_960, 108, GA100_PCIE),
    board("a100-pcie-80", "NVIDIA A100 80GB PCIe",   0x20b5,  81_920, 108, GA100_PCIE),
    board("a30",          "NVIDIA A30",              0x20b7,  24_576,  56, A30),
    board("b200",         "NVIDIA B200",             0x2901, 183_359, 148, BLACKWELL),
    board("b300",         "NVIDIA B300 SXM6 AC",     0x3182, 275_040, 148, BLACKWELL_ULTRA),
    // Memory is NOT_SUPPORTED: dra-driver-nvidia-gpu#1073, nvitop#208.
    board("gb10",         "NVIDIA GB10",             0x2e12,       0,  48, SPARK),
    board("gb200",        "NVIDIA GB200",            0x2941, 189_471, 152, GRACE_BLACKWELL),
    board("gb300",        "NVIDIA GB300",            0x31c2, 284_208, 152, GRACE_BLACKWELL_ULTRA),
    // The name says the processor's memory; boards with 120GB in the name are the same but for
    // that.
    board("gh200-96",     "NVIDIA GH200 480GB",      0x2342,  97_871, 132, GRACE_HOPPER),
    board("gh200-144",    "NVIDIA GH200 144G HBM3e", 0x2348, 146_831, 132, GRACE_HOPPER),
    board("h100",         "NVIDIA H100 80GB HBM3",   0x2330,  81_559, 132, HOPPER),
    board("h100-nvl",     "NVIDIA H100 NVL",         0x2321,  95_830, 132, HOPPER_PCIE),
    board("h100-pcie",    "NVIDIA H100 PCIe",        0x2331,  81_559, 114, HOPPER_PCIE),
    board("h20",          "NVIDIA H20",              0x2329,  97_871,  78, HOPPER),
    board("h200",         "NVIDIA H200",             0x2335, 143_771, 132, HOPPER),
    board("h200-nvl",     "NVIDIA H200 NVL",         0x233b, 143_771, 132, H200_NVL),
    board("l20",          "NVIDIA L20",              0x26ba,  46_068,  92, ADA),
    board("l4",           "NVIDIA L4",               0x27b8,  23_034,  58, ADA),
    board("l40",          "NVIDIA L40",              0x26b5,  46_068, 142, ADA),
    board("l40s",         "NVIDIA L40S",             0x26b9,  46_068, 142, ADA),
    board("rtx-pro-5000", "NVIDIA RTX PRO 5000 Blackwell", 0x2bb3, 48_935, 110, RTX_WORKSTATION),
    board("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 0x2bb5, 97_887, 188, RTX_SERVER),
    board("rtx-pro-6000-maxq", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 0x2bb4, 97_887, 188, RTX_WORKSTATION),
    board("rtx-pro-6000-ws", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 0x2bb1, 97_887, 188, RTX_WORKSTATION),
    board("t4",           "Tesla T4",                0x1eb8,  15_360,  40, TURING),
    board("v100",         "Tesla V100-SXM2-32GB",    0x1db5,  32_768,  80, VOLTA),
    board("v100-16",      "Tesla V100-SXM2-16GB",    0x1db1,  16_384,  80, VOLTA),
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
