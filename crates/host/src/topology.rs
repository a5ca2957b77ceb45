//! Where a GPU sits: NUMA node, PCIe root, DRM nodes, from sysfs.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use divvy_model::{HostTopology, PciAddress};

use crate::kernel::{HostFileError, read_if_there};
use crate::root::HostRoot;

/// A display or render node of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DrmNode {
    /// `card0` or `renderD128`.
    pub name: String,
    pub major: u32,
    pub minor: u32,
}

/// Reads NUMA node and PCIe root of a device. Parts that the kernel does not report stay out.
pub fn topology(host: &HostRoot, pci: PciAddress) -> Result<HostTopology, HostFileError> {
    let device = device_dir(host, pci);
    let target = match fs_err::read_link(&device) {
        Ok(target) => target,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(HostFileError::NoPciDevice {
                pci: pci.to_string(),
                path: device,
            });
        }
        Err(source) => {
            return Err(HostFileError::Read {
                what: "a PCI device's place",
                source,
            });
        }
    };
    let numa = read_if_there(&device.join("numa_node"), "a GPU's NUMA node")?;
    // -1: the firmware does not say.
    let numa_node = numa.and_then(|text| text.trim().parse().ok());
    Ok(HostTopology {
        numa_node,
        pcie_root: pcie_root(&target),
    })
}

fn device_dir(host: &HostRoot, pci: PciAddress) -> PathBuf {
    host.sys("bus/pci/devices").join(pci.to_string())
}

/// `../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0` → `pci0000:3a`. Arm machines have
/// platform folders in between, and a storage controller may hold a further root of its own: the
/// first root on the way counts.
fn pcie_root(target: &Path) -> Option<String> {
    let parts = target.iter().filter_map(|part| part.to_str());
    let after = parts.skip_while(|part| *part != "devices").skip(1);
    after.filter(|part| is_root(part)).map(str::to_owned).next()
}

fn is_root(part: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    part.strip_prefix("pci")
        .and_then(|rest| rest.split_once(':'))
        .is_some_and(|(domain, bus)| domain.len() >= 4 && hex(domain) && bus.len() == 2 && hex(bus))
}

/// The DRM nodes of a device, sorted by name; none if the kernel's DRM driver is not loaded.
pub fn drm_nodes(host: &HostRoot, pci: PciAddress) -> Result<Vec<DrmNode>, HostFileError> {
    const WHAT: &str = "a GPU's DRM nodes";
    let entries = match fs_err::read_dir(device_dir(host, pci).join("drm")) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(HostFileError::Read { what: WHAT, source }),
    };
    let mut nodes = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|source| HostFileError::Read { what: WHAT, source })?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        if !(name.starts_with("card") || name.starts_with("renderD")) {
            continue;
        }
        // Connectors (card0-DP-1) are here too; they have no `dev`.
        let Some(text) = read_if_there(&entry.path().join("dev"), WHAT)? else {
            continue;
        };
        let numbers = text
            .trim()
            .split_once(':')
            .and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let Some((major, minor)) = numbers else {
            return Err(HostFileError::Malformed {
                what: WHAT,
                path: entry.path().join("dev"),
                text,
            });
        };
        nodes.push(DrmNode { name, major, minor });
    }
    nodes.sort();
    Ok(nodes)
}
