//! Device nodes: numbers and rights of the nodes that a container gets.
//!
//! A node that is not there yet (nothing has called `nvidia-modprobe` since boot) is made up from
//! the kernel's majors; a CDI file that carries type and numbers does not need it on the host, but
//! for pods with a user namespace: [`crate::make_nodes`].

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use divvy_model::PciAddress;

use crate::kernel::{HostFileError, char_majors, nvidia_params};
use crate::root::HostRoot;
use crate::topology::drm_nodes;

const OPEN_TO_ALL: u32 = 0o666;

/// Numbers and rights of a character device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeInfo {
    pub major: u32,
    pub minor: u32,
    /// Permission bits.
    pub mode: u32,
    pub gid: u32,
}

/// A character device in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Its path, the same as on the host.
    pub path: String,
    /// Numbers and rights.
    pub info: NodeInfo,
}

impl From<&DeviceNode> for divvy_cdi::DeviceNode {
    fn from(node: &DeviceNode) -> Self {
        let NodeInfo {
            major,
            minor,
            mode,
            gid,
        } = node.info;
        Self::character(node.path.as_str(), major, minor, mode, gid)
    }
}

/// Where numbers come from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DeviceNodes {
    /// From the host's nodes.
    #[default]
    Real,
    /// From a table, by path such as `/dev/nvidia0`: where real nodes cannot be made (tests, the
    /// demo).
    Given(BTreeMap<String, NodeInfo>),
}

/// Device nodes cannot be known.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A node cannot be looked at.
    #[error("cannot inspect a device node")]
    Stat(#[source] io::Error),
    /// Something else is in a node's place.
    #[error("{} is not a character device; remove it and run nvidia-modprobe, or reboot the node", path.display())]
    NotADevice { path: PathBuf },
    /// A folder or file is where a node of another module is looked for.
    #[error("{path} is {what} and no device node; {fix}")]
    NotAnExtraNode {
        path: String,
        /// The kind of file.
        what: &'static str,
        fix: String,
    },
    /// The kernel module is not loaded, so there are no numbers.
    #[error(
        "{path} does not exist and /proc/devices has no entry for {module}; load the kernel module ({module}) on the node"
    )]
    NoMajor {
        path: String,
        /// The module to load.
        module: &'static str,
    },
    /// The driver has not made the capability of an instance.
    #[error(
        "the MIG instance has no capability: {file} does not exist (check that the host's /proc is mounted and that the instance exists)"
    )]
    NoCapability {
        /// The file with its number.
        file: String,
    },
    /// Proc or sysfs.
    #[error("cannot determine device nodes")]
    Host(#[source] HostFileError),
    /// A table of given nodes.
    #[error(
        "device table, line {line}: expected \"path major minor mode(octal) gid\", got {text:?}"
    )]
    Table {
        /// Counted from 1.
        line: usize,
        text: String,
    },
}

impl DeviceNodes {
    /// Reads a table: one node a line, `path major minor mode gid`, the mode in octal; `#` begins a
    /// comment.
    pub fn from_table(text: &str) -> Result<Self, NodeError> {
        let mut table = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let parse = || {
                let mut words = line.split_whitespace();
                let path = words.next()?.to_owned();
                let (major, minor) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
                let mode = u32::from_str_radix(words.next()?, 8).ok()?;
                let gid = words.next()?.parse().ok()?;
                words.next().is_none().then_some((
                    path,
                    NodeInfo {
                        major,
                        minor,
                        mode,
                        gid,
                    },
                ))
            };
            let (path, info) = parse().ok_or_else(|| NodeError::Table {
                line: index + 1,
                text: line.to_owned(),
            })?;
            table.insert(path, info);
        }
        Ok(Self::Given(table))
    }

    /// Writes the table that [`DeviceNodes::from_table`] reads; empty for real nodes.
    pub fn to_table(&self) -> String {
        let Self::Given(table) = self else {
            return String::new();
        };
        let line = |(path, n): (&String, &NodeInfo)| {
            format!("{path} {} {} {:o} {}\n", n.major, n.minor, n.mode, n.gid)
        };
        table.iter().map(line).collect()
    }

    /// The node at `path` (such as `/dev/nvidia0`), if it is there.
    fn look_up(&self, host: &HostRoot, path: &str) -> Result<Option<NodeInfo>, NodeError> {
        match self {
            Self::Given(table) => Ok(table.get(path).copied()),
            Self::Real => stat(&host.dev(path.trim_start_matches("/dev/"))),
        }
    }

    /// Paths of a folder's nodes whose names begin so.
    fn beginning_with(&self, host: &HostRoot, begin: &str) -> Result<Vec<String>, NodeError> {
        let (folder, name) = begin.rsplit_once('/').unwrap_or(("", begin));
        if let Self::Given(table) = self {
            let fits = |path: &&String| {
                path.strip_prefix(begin)
                    .is_some_and(|rest| !rest.contains('/'))
            };
            return Ok(table.keys().filter(fits).cloned().collect());
        }
        let entries = match fs_err::read_dir(
            host.dev(folder.trim_start_matches("/dev").trim_start_matches('/')),
        ) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(NodeError::Stat(error)),
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut paths: Vec<_> = names
            .filter(|found| found.starts_with(name))
            .map(|found| format!("{folder}/{found}"))
            .collect();
        paths.sort();
        Ok(paths)
    }
}

fn stat(path: &Path) -> Result<Option<NodeInfo>, NodeError> {
    let meta = match fs_err::metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(NodeError::Stat(error)),
    };
    if !meta.file_type().is_char_device() {
        return Err(NodeError::NotADevice {
            path: path.to_owned(),
        });
    }
    let device = meta.rdev();
    Ok(Some(NodeInfo {
        major: rustix::fs::major(device),
        minor: rustix::fs::minor(device),
        mode: meta.mode() & 0o777,
        gid: meta.gid(),
    }))
}

/// The nodes every container with a GPU needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ControlNodes {
    /// In a fixed order.
    pub nodes: Vec<DeviceNode>,
    /// Nodes that are neither there nor can be made up. Without `nvidia-uvm`, CUDA does not start.
    pub missing: Vec<MissingNode>,
}

/// A control node that cannot be given to containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingNode {
    pub path: String,
    /// The kernel module that brings it.
    pub module: &'static str,
    /// CUDA does not work without it.
    pub needed: bool,
}

struct Control {
    path: &'static str,
    /// Names in `/proc/devices`.
    majors: &'static [&'static str],
    minor: u32,
    module: &'static str,
    needed: bool,
}

/// The main driver's entries; the name depends on its version.
const MAIN_MAJORS: &[&str] = &["nvidia", "nvidia-frontend", "nvidiactl"];
const CONTROL: [Control; 4] = [
    Control {
        path: "/dev/nvidiactl",
        majors: MAIN_MAJORS,
        minor: 255,
        module: "nvidia",
        needed: true,
    },
    Control {
        path: "/dev/nvidia-uvm",
        majors: &["nvidia-uvm"],
        minor: 0,
        module: "nvidia-uvm",
        needed: true,
    },
    Control {
        path: "/dev/nvidia-uvm-tools",
        majors: &["nvidia-uvm"],
        minor: 1,
        module: "nvidia-uvm",
        needed: false,
    },
    // Made up only if the module is loaded, which is the case when its own entry is there.
    Control {
        path: "/dev/nvidia-modeset",
        majors: &["nvidia-modeset"],
        minor: 254,
        module: "nvidia-modeset",
        needed: false,
    },
];

/// The control nodes: numbers from the kernel's majors, since a node of the host may be left from a
/// module that was loaded before and had another one; the rights are those of the host's node.
pub fn control_nodes(host: &HostRoot, nodes: &DeviceNodes) -> Result<ControlNodes, NodeError> {
    let majors = char_majors(host).map_err(NodeError::Host)?;
    let rights = Rights::of(host)?;
    let mut control = ControlNodes::default();
    for node in CONTROL {
        let major = node.majors.iter().find_map(|name| majors.get(*name));
        let path = node.path.to_owned();
        match (nodes.look_up(host, node.path)?, major) {
            (Some(info), Some(major)) if *nodes == DeviceNodes::Real => {
                let info = NodeInfo {
                    major: *major,
                    minor: node.minor,
                    ..info
                };
                control.nodes.push(DeviceNode { path, info });
            }
            // Given nodes, or a module that has no entry in `/proc/devices` under a known name: the
            // node's own numbers are the best there are.
            (Some(info), _) => control.nodes.push(DeviceNode { path, info }),
            (None, Some(major)) => {
                control.nodes.push(DeviceNode {
                    path,
                    info: rights.node(*major, node.minor),
                });
            }
            (None, None) => {
                control.missing.push(MissingNode {
                    path,
                    module: node.module,
                    needed: node.needed,
                });
            }
        }
    }
    Ok(control)
}

/// A device node of the host's other modules, such as GDRCopy's `/dev/gdrdrv`; by a `*` at the end
/// all nodes of its folder whose names begin so, in the order of their names. None where the host
/// has none.
pub fn extra_nodes(
    host: &HostRoot,
    nodes: &DeviceNodes,
    path: &str,
) -> Result<Vec<DeviceNode>, NodeError> {
    let pattern = path.strip_suffix('*');
    let paths = match pattern {
        None => vec![path.to_owned()],
        Some(begin) => nodes.beginning_with(host, begin)?,
    };
    let mut all = Vec::new();
    for path in paths {
        match nodes.look_up(host, &path) {
            Ok(Some(info)) => all.push(DeviceNode { path, info }),
            Ok(None) => {}
            // It is no file of NVIDIA's driver, which its own program would make again.
            Err(NodeError::NotADevice { path: file }) => {
                let is_folder = file.is_dir();
                // A pattern is for nodes: `/dev/infiniband/*` has folders of links beside them.
                if pattern.is_some() && is_folder {
                    continue;
                }
                let (what, fix) = if is_folder {
                    (
                        "a folder",
                        format!("ask for the nodes in it, by name or as {path}/*"),
                    )
                } else {
                    (
                        "a file",
                        "ask for device nodes only, or remove it from the node".to_owned(),
                    )
                };
                return Err(NodeError::NotAnExtraNode { path, what, fix });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(all)
}

/// The nodes of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuNodes {
    /// `/dev/nvidia<minor>`.
    pub main: DeviceNode,
    /// `/dev/dri/card*` and `/dev/dri/renderD*`.
    pub drm: Vec<DeviceNode>,
    /// The host has `/dev/dri/by-path`.
    pub has_links: bool,
}

/// udev's links to DRM nodes by PCI address.
pub(crate) const DRM_LINKS: &str = "/dev/dri/by-path";

/// The nodes of the GPU with this minor number (which need not be its index) at this address.
pub fn gpu_nodes(
    host: &HostRoot,
    nodes: &DeviceNodes,
    minor: u32,
    pci: PciAddress,
) -> Result<GpuNodes, NodeError> {
    let path = format!("/dev/nvidia{minor}");
    let info = if let Some(info) = nodes.look_up(host, &path)? {
        info
    } else {
        let majors = char_majors(host).map_err(NodeError::Host)?;
        let major = MAIN_MAJORS.iter().find_map(|name| majors.get(*name));
        let major = major.ok_or_else(|| NodeError::NoMajor {
            path: path.clone(),
            module: "nvidia",
        })?;
        Rights::of(host)?.node(*major, minor)
    };
    let drm = drm_nodes(host, pci).map_err(NodeError::Host)?;
    let mut there = Vec::new();
    for node in drm {
        let path = format!("/dev/dri/{}", node.name);
        // Without one on the host (no udev, a kernel with another /dev) a runtime could not bind
        // it, and graphics is seldom what the pod is for.
        if nodes.look_up(host, &path)?.is_some() {
            // On the host these belong to the groups video and render. In the container the node is
            // its own copy and the GPU is the pod's, so it is open to all: the groups' ids would
            // need CDI 0.7, which older runtimes refuse.
            let info = NodeInfo {
                major: node.major,
                minor: node.minor,
                mode: OPEN_TO_ALL,
                gid: 0,
            };
            there.push(DeviceNode { path, info });
        }
    }
    let has_links = !there.is_empty() && host.see(Path::new(DRM_LINKS)).is_dir();
    Ok(GpuNodes {
        main: DeviceNode { path, info },
        drm: there,
        has_links,
    })
}

/// The rights that the module gives to the nodes it makes.
struct Rights {
    mode: u32,
    gid: u32,
}

impl Rights {
    fn of(host: &HostRoot) -> Result<Self, NodeError> {
        let params = nvidia_params(host).map_err(NodeError::Host)?;
        let number = |name: &str| params.get(name).and_then(|text| text.parse::<u32>().ok());
        Ok(Self {
            mode: number("DeviceFileMode").map_or(OPEN_TO_ALL, |mode| mode & 0o777),
            gid: number("DeviceFileGID").unwrap_or(0),
        })
    }

    fn node(&self, major: u32, minor: u32) -> NodeInfo {
        NodeInfo {
            major,
            minor,
            mode: self.mode,
            gid: self.gid,
        }
    }
}
