//! MIG capabilities: the two device nodes that let a container use a partition, one for its GPU
//! instance and one for its compute instance. The kernel module writes which minors they have into
//! proc when the instances are made.

use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};

use crate::kernel::{char_majors, read_if_there};
use crate::nodes::{DeviceNode, DeviceNodes, NodeError, NodeInfo};
use crate::root::HostRoot;

/// The entry of the capabilities in `/proc/devices`.
const MODULE: &str = "nvidia-caps";
/// In the container a node is the pod's own copy; only its module's rights on the host may be
/// narrower.
const READABLE: u32 = 0o444;

/// The capabilities of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MigNodes {
    /// Node of its GPU instance.
    pub gpu_instance: DeviceNode,
    /// Node of its compute instance.
    pub compute_instance: DeviceNode,
    /// The minors are those of [`capability_minor`]. If not, the driver counts differently;
    /// what proc says is used in any case.
    pub as_expected: bool,
}

/// The nodes of the partition with these ids on the GPU with this minor number.
///
/// On a simulated host ([`DeviceNodes::Given`]) no module writes into proc: there, what is missing
/// is computed.
pub fn mig_nodes(
    host: &HostRoot,
    nodes: &DeviceNodes,
    gpu_minor: u32,
    gpu_instance: GpuInstanceId,
    compute_instance: ComputeInstanceId,
) -> Result<MigNodes, NodeError> {
    let folder = format!(
        "driver/nvidia/capabilities/gpu{gpu_minor}/mig/gi{}",
        gpu_instance.0
    );
    let majors = char_majors(host).map_err(NodeError::Host)?;
    let node = |access: &str, computed: u32| {
        // The module assigns the minors. A computed one could open another partition, so on a real
        // host proc is the only source.
        let (minor, mode) = match (read_access(host, access)?, nodes) {
            (Some(found), _) => found,
            (None, DeviceNodes::Given(_)) => (computed, READABLE),
            (None, DeviceNodes::Real) => {
                return Err(NodeError::NoCapability {
                    file: format!("/proc/{access}"),
                });
            }
        };
        let path = format!("/dev/nvidia-caps/nvidia-cap{minor}");
        let major = majors.get(MODULE).copied();
        let major = major.ok_or_else(|| NodeError::NoMajor {
            path: path.clone(),
            module: MODULE,
        })?;
        Ok((
            DeviceNode {
                path,
                info: NodeInfo {
                    major,
                    minor,
                    mode: mode | READABLE,
                    gid: 0,
                },
            },
            minor == computed,
        ))
    };
    let (first, first_expected) = node(
        &format!("{folder}/access"),
        capability_minor(gpu_minor, gpu_instance, None),
    )?;
    let (second, second_expected) = node(
        &format!("{folder}/ci{}/access", compute_instance.0),
        capability_minor(gpu_minor, gpu_instance, Some(compute_instance)),
    )?;
    Ok(MigNodes {
        gpu_instance: first,
        compute_instance: second,
        as_expected: first_expected && second_expected,
    })
}

/// The minor that drivers have given to a capability so far: only a cross-check, proc decides.
pub fn capability_minor(
    gpu_minor: u32,
    gpu_instance: GpuInstanceId,
    compute_instance: Option<ComputeInstanceId>,
) -> u32 {
    // The list in `/proc/driver/nvidia-caps/mig-minors`: 0 to 2 are no GPU's, then there are for
    // each GPU 15 GPU instances of 9, each with itself and 8 compute instances.
    const FIRST: u32 = 3;
    const PER_GPU: u32 = 135;
    const PER_INSTANCE: u32 = 9;
    let of_gi = FIRST
        .saturating_add(gpu_minor.saturating_mul(PER_GPU))
        .saturating_add(gpu_instance.0.saturating_mul(PER_INSTANCE));
    compute_instance.map_or(of_gi, |ci| of_gi.saturating_add(1).saturating_add(ci.0))
}

/// Minor and rights from an `access` file; `None` if there is none.
fn read_access(host: &HostRoot, file: &str) -> Result<Option<(u32, u32)>, NodeError> {
    const WHAT: &str = "a MIG capability";
    let path = host.proc(file);
    let Some(text) = read_if_there(&path, WHAT).map_err(NodeError::Host)? else {
        return Ok(None);
    };
    let number = |name: &str| {
        text.lines().find_map(|line| {
            line.split_once(':')
                .filter(|(n, _)| n.trim() == name)?
                .1
                .trim()
                .parse()
                .ok()
        })
    };
    match number("DeviceFileMinor") {
        Some(minor) => Ok(Some((
            minor,
            number("DeviceFileMode").unwrap_or(READABLE) & 0o777,
        ))),
        None => Err(NodeError::Host(crate::HostFileError::Malformed {
            what: WHAT,
            path,
            text,
        })),
    }
}
