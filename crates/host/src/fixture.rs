//! A host that does not exist: the files of a node with GPUs and a driver, made in a folder.
//!
//! For tests, the demo and the end-to-end suite. Device nodes cannot be made without rights, so
//! their numbers are given in a table ([`DeviceNodes::Given`]); libraries are the smallest files
//! that a loader accepts as libraries.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use divvy_model::{GpuUuid, PciAddress, TimeSlice};

use crate::driver::DriverRoot;
use crate::nodes::{DeviceNodes, NodeInfo};
use crate::root::HostRoot;

/// A GPU of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FixtureGpu {
    /// Minor number of `/dev/nvidia<minor>`.
    pub minor: u32,
    pub pci: PciAddress,
    /// NUMA node; `None` is written as -1.
    pub numa_node: Option<u32>,
    /// PCIe root, such as `pci0000:00`.
    pub pcie_root: String,
}

/// Description of the host.
#[derive(Debug, Clone)]
pub struct Fixture {
    pub gpus: Vec<FixtureGpu>,
    /// The driver's version, such as `580.95.05`.
    pub driver_version: String,
    /// The driver's root, a path of the host.
    pub driver_root: PathBuf,
    /// A file to install as NVML, such as the mock library; `None` installs an empty library.
    pub nvml: Option<PathBuf>,
    /// True if the driver comes with its programs for MPS.
    pub mps: bool,
    pub boot_id: String,
}

/// A host made by [`Fixture::build`].
#[derive(Debug, Clone)]
pub struct FixtureHost {
    /// Where it is seen.
    pub host: HostRoot,
    /// Its device nodes' numbers, also in [`FixtureHost::node_table`].
    pub nodes: DeviceNodes,
    /// The file that holds the numbers as text, for another process.
    pub node_table: PathBuf,
    /// The driver's root under the name it really has, so that mounts made from it work; for
    /// [`crate::find_driver_at`].
    pub driver_root: DriverRoot,
}

const LIBRARIES: [(&str, &str); 6] = [
    ("libcuda", "libcuda.so.1"),
    ("libnvidia-ml", "libnvidia-ml.so.1"),
    ("libnvidia-ptxjitcompiler", "libnvidia-ptxjitcompiler.so.1"),
    ("libnvidia-nvvm", "libnvidia-nvvm.so.4"),
    ("libnvidia-opticalflow", "libnvidia-opticalflow.so.1"),
    // Its name carries the whole version: no link is needed.
    ("libnvidia-glcore", ""),
];
const LIBRARY_FOLDER: &str = "usr/lib/x86_64-linux-gnu";
// 195 and 226 are assigned (Documentation/admin-guide/devices.txt); the others are given out when a
// module is loaded, so these are examples.
const NVIDIA_MAJOR: u32 = 195;
const UVM_MAJOR: u32 = 511;
const DRM_MAJOR: u32 = 226;
const CAPS_MAJOR: u32 = 507;

/// Keeps each GPU's time slice in a file, as the kernel module does in memory.
const SMI: &str = r#"if [ "$1 $2" = "compute-policy -i" ]; then
    kept=$(dirname "$0")/../../run/nvidia-timeslices
    case "$4" in
    --list) echo "| 0 Timeslice $(sed "s/0/Default/;s/1/Short/;s/2/Medium/;s/3/Long/" "$kept/$3" 2>/dev/null || echo Default) |" ;;
    --set-timeslice)
        case "$5" in [0-3]) ;; *) exit 2 ;; esac
        mkdir -p "$kept" && echo "$5" >"$kept/$3.$$" && mv "$kept/$3.$$" "$kept/$3" || exit 255 ;;
    *) exit 2 ;;
    esac
    exit
fi
"#;

impl Fixture {
    /// A host with these GPUs and a driver installed on the host itself.
    pub fn new(gpus: Vec<FixtureGpu>) -> Self {
        Self {
            gpus,
            driver_version: "580.95.05".to_owned(),
            driver_root: PathBuf::from("/"),
            nvml: None,
            mps: false,
            boot_id: "6f5902ac-237d-4d85-b20d-3ae1a2a0c1f4".to_owned(),
        }
    }

    /// Makes the host below `dir`, which becomes its `/`. Called again with another driver version,
    /// it upgrades the driver.
    pub fn build(&self, dir: &Path) -> io::Result<FixtureHost> {
        let host = HostRoot::under(dir);
        self.proc_files(&host)?;
        for (index, gpu) in self.gpus.iter().enumerate() {
            gpu_files(&host, gpu, index)?;
        }
        let nodes = self.nodes();
        if let DeviceNodes::Given(table) = &nodes {
            for path in table.keys() {
                file(&host.see(Path::new(path)), b"")?;
            }
        }
        let node_table = host.see(Path::new("/device-nodes"));
        file(&node_table, nodes.to_table().as_bytes())?;
        self.driver(&host.see(&self.driver_root))?;
        let root = host.see(&self.driver_root);
        Ok(FixtureHost {
            driver_root: DriverRoot::new(&root, &root),
            host,
            nodes,
            node_table,
        })
    }

    fn proc_files(&self, host: &HostRoot) -> io::Result<()> {
        file(
            &host.proc("sys/kernel/random/boot_id"),
            format!("{}\n", self.boot_id).as_bytes(),
        )?;
        file(&host.proc("sys/kernel/osrelease"), b"6.12.0-divvy\n")?;
        let devices = format!(
            "Character devices:\n  1 mem\n{NVIDIA_MAJOR} nvidia\n{NVIDIA_MAJOR} nvidiactl\n{DRM_MAJOR} drm\n{CAPS_MAJOR} nvidia-caps\n{UVM_MAJOR} nvidia-uvm\n\nBlock devices:\n259 blkext\n"
        );
        file(&host.proc("devices"), devices.as_bytes())?;
        let version = format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (divvy)\nGCC version:\n",
            self.driver_version
        );
        file(&host.proc("driver/nvidia/version"), version.as_bytes())?;
        let params =
            b"ModifyDeviceFiles: 1\nDeviceFileUID: 0\nDeviceFileGID: 0\nDeviceFileMode: 438\nRmMsg: \"\"\n";
        file(&host.proc("driver/nvidia/params"), params)?;
        file(
            &host.sys("module/nvidia/version"),
            format!("{}\n", self.driver_version).as_bytes(),
        )
    }

    fn nodes(&self) -> DeviceNodes {
        let node = |major, minor| NodeInfo {
            major,
            minor,
            mode: 0o666,
            gid: 0,
        };
        let control = [
            ("/dev/nvidiactl", NVIDIA_MAJOR, 255),
            ("/dev/nvidia-modeset", NVIDIA_MAJOR, 254),
            ("/dev/nvidia-uvm", UVM_MAJOR, 0),
            ("/dev/nvidia-uvm-tools", UVM_MAJOR, 1),
        ];
        let control = control
            .into_iter()
            .map(|(path, major, minor)| (path.to_owned(), node(major, minor)));
        let gpus = self.gpus.iter().map(|gpu| {
            (
                format!("/dev/nvidia{}", gpu.minor),
                node(NVIDIA_MAJOR, gpu.minor),
            )
        });
        let drm = (0..self.gpus.len())
            .flat_map(drm_names)
            .map(|(name, minor)| {
                (
                    format!("/dev/dri/{name}"),
                    NodeInfo {
                        mode: 0o660,
                        ..node(DRM_MAJOR, minor)
                    },
                )
            });
        DeviceNodes::Given(control.chain(gpus).chain(drm).collect())
    }

    fn driver(&self, root: &Path) -> io::Result<()> {
        let version = &self.driver_version;
        let folder = root.join(LIBRARY_FOLDER);
        for (name, soname) in LIBRARIES {
            let full = format!("{name}.so.{version}");
            let soname = if soname.is_empty() {
                full.as_str()
            } else {
                soname
            };
            match (&self.nvml, name) {
                (Some(nvml), "libnvidia-ml") => {
                    fs_err::create_dir_all(&folder)?;
                    fs_err::copy(nvml, folder.join(&full)).map(drop)?;
                }
                _ => file(&folder.join(&full), &minimal_library(soname))?,
            }
            if soname != full {
                link(&full, &folder.join(soname))?;
            }
        }
        let mps = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];
        let mps = mps.into_iter().filter(|_| self.mps);
        for name in ["nvidia-smi", "nvidia-debugdump"].into_iter().chain(mps) {
            let path = root.join("usr/bin").join(name);
            let does = if name == "nvidia-smi" { SMI } else { "" };
            file(
                &path,
                format!("#!/bin/sh\n{does}echo {name} of driver {version}\n").as_bytes(),
            )?;
            fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        }
        file(&root.join("usr/share/nvidia/nvoptix.bin"), b"")?;
        file(
            &root
                .join("lib/firmware/nvidia")
                .join(version)
                .join("gsp_ga10x.bin"),
            b"",
        )?;
        file(&root.join("run/nvidia-persistenced/socket"), b"")
    }
}

impl FixtureHost {
    /// The time slice that its `nvidia-smi` has set for a GPU.
    pub fn time_slice(&self, gpu: &GpuUuid) -> TimeSlice {
        let kept = self
            .driver_root
            .see(&Path::new("run/nvidia-timeslices").join(gpu.as_str()));
        let text = fs_err::read_to_string(kept).unwrap_or_default();
        let is_it = |slice: &TimeSlice| slice.number().to_string() == text.trim();
        TimeSlice::ALL
            .into_iter()
            .find(is_it)
            .unwrap_or(TimeSlice::Default)
    }

    /// Writes what the kernel module does when a GPU instance with one compute instance is made:
    /// the numbers of their capabilities, which need not be those that [`crate::capability_minor`]
    /// computes.
    pub fn mig_access(
        &self,
        gpu_minor: u32,
        gpu_instance: u32,
        compute_instance: u32,
        minors: (u32, u32),
    ) -> io::Result<()> {
        let folder = self
            .host
            .proc("driver/nvidia/capabilities")
            .join(format!("gpu{gpu_minor}/mig/gi{gpu_instance}"));
        let text =
            |minor| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 256\nDeviceFileModify: 1\n");
        file(&folder.join("access"), text(minors.0).as_bytes())?;
        file(
            &folder.join(format!("ci{compute_instance}")).join("access"),
            text(minors.1).as_bytes(),
        )
    }
}

/// Names and minors of a GPU's DRM nodes.
fn drm_names(index: usize) -> [(String, u32); 2] {
    let index = u32::try_from(index).unwrap_or(u32::MAX - 128);
    [
        (format!("card{index}"), index),
        (format!("renderD{}", 128 + index), 128 + index),
    ]
}

fn gpu_files(host: &HostRoot, gpu: &FixtureGpu, index: usize) -> io::Result<()> {
    let pci = gpu.pci.to_string();
    let device = host.sys("devices").join(&gpu.pcie_root).join(&pci);
    let numa = gpu
        .numa_node
        .map_or_else(|| "-1\n".to_owned(), |node| format!("{node}\n"));
    file(&device.join("numa_node"), numa.as_bytes())?;
    for (name, minor) in drm_names(index) {
        file(
            &device.join("drm").join(name).join("dev"),
            format!("{DRM_MAJOR}:{minor}\n").as_bytes(),
        )?;
    }
    link(
        &format!("../../../devices/{}/{pci}", gpu.pcie_root),
        &host.sys("bus/pci/devices").join(&pci),
    )
}

fn file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs_err::create_dir_all(folder)?;
    }
    fs_err::write(path, bytes)
}

fn link(target: &str, path: &Path) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs_err::create_dir_all(folder)?;
    }
    // Made again for another driver version, the link leads to the new file.
    match fs_err::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs_err::os::unix::fs::symlink(target, path),
    }
}

/// The bytes of a shared library that contains nothing but its name, for this machine's
/// architecture.
pub fn minimal_library(soname: &str) -> Vec<u8> {
    const HEADER: u64 = 64;
    const SEGMENT: u64 = 56;
    const TAGS: [u64; 6] = [5, 6, 10, 11, 14, 0]; // STRTAB, SYMTAB, STRSZ, SYMENT, SONAME, NULL
    let machine: u16 = if cfg!(target_arch = "aarch64") {
        183
    } else {
        62
    };
    let dynamic_at = HEADER + 2 * SEGMENT;
    let dynamic_size = TAGS.len() as u64 * 16;
    let symbols_at = dynamic_at + dynamic_size;
    let strings_at = symbols_at + 24;
    let strings = [b"\0", soname.as_bytes(), b"\0"].concat();
    let end = strings_at + strings.len() as u64;

    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    bytes.extend(3u16.to_le_bytes()); // a shared library
    // The header in the order of elf(5): machine, version, offsets, flags, sizes and counts.
    bytes.extend(machine.to_le_bytes());
    bytes.extend(1u32.to_le_bytes());
    for word in [0, HEADER, 0] {
        bytes.extend(word.to_le_bytes()); // entry, segments, sections
    }
    bytes.extend(0u32.to_le_bytes());
    for half in [64u16, 56, 2, 64, 0, 0] {
        bytes.extend(half.to_le_bytes());
    }
    // Two segments: one that loads the whole file at address 0, so that addresses are offsets, and
    // the dynamic section.
    for (kind, flags, at, size, align) in [
        (1u32, 4u32, 0, end, 4096),
        (2, 4, dynamic_at, dynamic_size, 8),
    ] {
        bytes.extend(kind.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        for word in [at, at, at, size, size, align] {
            bytes.extend(word.to_le_bytes());
        }
    }
    for (tag, value) in
        TAGS.into_iter()
            .zip([strings_at, symbols_at, strings.len() as u64, 24, 1, 0])
    {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(value.to_le_bytes());
    }
    bytes.extend([0; 24]); // the one empty symbol that every table begins with
    bytes.extend(strings);
    bytes
}
