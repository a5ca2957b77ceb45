//! The facts of one GPU, read call by call: what NVML does not say is left out, what it says in
//! numbers we don't know is kept as a number.

use divvy_model::health::FabricState;
use divvy_model::{
    Architecture, Brand, ComputeCapability, ComputeMode, FabricFacts, GpuErrorCode, GpuFacts,
    GpuUuid, MigMode, NvLinkPeer, PciAddress,
};

use crate::ffi::{Fabric, Failure, Handle, Library, Pci};

/// Number after the highest of a link that any NVML knows (`NVML_NVLINK_MAX_LINKS`: 18 before NVML
/// 13, 36 since).
const LINKS: u32 = 36;

/// Far more memory than any GPU has: 1 PiB.
const MOST_BYTES: u64 = 1 << 50;

pub(crate) fn read(library: &Library, handle: Handle, uuid: &GpuUuid) -> Result<GpuFacts, Failure> {
    // First the answers without which the GPU cannot be used or named. Each other fact may be
    // missing (ADR 7).
    let product_name = library.name(handle)?;
    let (major, minor) = library.compute_capability(handle)?;
    let compute_capability = ComputeCapability { major, minor };
    let pci = library.pci(handle)?;
    let pci_address = address(&pci).ok_or_else(|| Failure {
        code: GpuErrorCode::UNKNOWN,
        detail: Some(format!(
            "NVML's PCI address {:?} cannot be read",
            pci.bus_id
        )),
    })?;
    let asked = Asked {
        library,
        gpu: handle,
    };
    let cores = asked.optional("cores", Library::cores)?;
    let (memory_bytes, memory_reserved_bytes) = memory(library, handle)?.unzip();
    Ok(GpuFacts {
        uuid: uuid.clone(),
        minor: asked.optional("minor number", Library::minor)?,
        product_name,
        brand: Brand(asked.optional("brand", Library::brand)?.unwrap_or(0)),
        architecture: Architecture::from_nvml(
            asked
                .optional("architecture", Library::architecture)?
                .unwrap_or(u32::MAX),
        ),
        compute_capability,
        memory_bytes,
        memory_reserved_bytes: memory_reserved_bytes.flatten(),
        multiprocessors: cores.and_then(|cores| multiprocessors(cores, compute_capability)),
        pci_address,
        pci_device_id: pci.device_id,
        mig_mode: mig_mode(library, handle)?,
        compute_mode: asked
            .optional("compute mode", Library::compute_mode)?
            .and_then(ComputeMode::from_nvml),
        persistence: asked.optional("persistence mode", Library::persistence_mode)?,
        addressing_mode: asked
            .optional("addressing mode", Library::addressing_mode)?
            .and_then(addressing_mode),
        c2c: asked.optional("NVLink-C2C", Library::c2c_enabled)?,
        module_id: asked.optional("module id", Library::module_id)?,
        nvlinks: asked.nvlinks()?,
        fabric: fabric(library, handle)?.and_then(attached),
    })
}

/// A GPU, and whom to ask about it.
#[derive(Clone, Copy)]
struct Asked<'a> {
    library: &'a Library,
    gpu: Handle,
}

/// Reads the MIG mode. An answer that there is none is asked for twice: one odd answer must not
/// make a whole GPU of one that is cut.
pub(crate) fn mig_mode(library: &Library, handle: Handle) -> Result<MigMode, Failure> {
    match mig_mode_once(library, handle)? {
        // A library without the function is older than MIG (before R450), and says so for good.
        (MigMode::Unsupported, false) => Ok(mig_mode_once(library, handle)?.0),
        (mode, _) => Ok(mode),
    }
}

/// Reads the MIG mode, and whether that is certain.
fn mig_mode_once(library: &Library, handle: Handle) -> Result<(MigMode, bool), Failure> {
    let failure = match library.mig_mode(handle) {
        Ok((current, pending)) => {
            let (current, pending) = (current != 0, pending != 0);
            return Ok((MigMode::Supported { current, pending }, true));
        }
        Err(failure) => failure,
    };
    if ![
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::FUNCTION_NOT_FOUND,
    ]
    .contains(&failure.code)
    {
        return Err(failure);
    }
    if failure.detail.is_some() {
        return Ok((MigMode::Unsupported, true));
    }
    // A board without MIG has no profile either.
    match library.gpu_instance_profile(handle, 0) {
        Ok(_) => Err(Failure {
            code: GpuErrorCode::UNKNOWN,
            detail: Some(format!(
                "NVML reports MIG profiles, and no MIG mode ({})",
                failure.code
            )),
        }),
        Err(_) => Ok((MigMode::Unsupported, false)),
    }
}

/// Reads the size of a GPU's memory, and how much of it the driver reserves. Version 2 counts that;
/// where an older driver lacks it, version 1.
pub(crate) fn memory(
    library: &Library,
    handle: Handle,
) -> Result<Option<(u64, Option<u64>)>, Failure> {
    let asked = Asked {
        library,
        gpu: handle,
    };
    let bytes = match asked.optional("memory", Library::memory_v2)? {
        Some(memory) => Some((memory.total, Some(memory.reserved))),
        None => asked
            .optional("memory, in the first version", Library::memory_v1)?
            .map(|total| (total, None)),
    };
    // Zero is the answer of GPUs whose memory is the host's.
    Ok(bytes.filter(|(bytes, _)| (1..=MOST_BYTES).contains(bytes)))
}

/// Reads a GPU's place in its NVLink fabric: by the struct of version 3, else 2, else by the first
/// call.
pub(crate) fn fabric(library: &Library, handle: Handle) -> Result<Option<Fabric>, Failure> {
    let asked = Asked {
        library,
        gpu: handle,
    };
    let mut info = asked.optional("fabric", Library::fabric_v3)?;
    if info.is_none() {
        info = asked.optional("fabric, in version 2", Library::fabric_v2)?;
    }
    if info.is_none() {
        info = asked.optional("fabric, in the first version", Library::fabric_v1)?;
    }
    Ok(info)
}

/// Membership counts once registration is complete and successful, in a cluster that has a name.
fn attached(fabric: Fabric) -> Option<FabricFacts> {
    // A registration that failed is complete too, and a GPU outside of a fabric has no cluster.
    if fabric.state != FabricState::COMPLETED
        || fabric.status != 0
        || fabric.cluster_uuid == [0; 16]
    {
        return None;
    }
    // In the form of a UUID, as NVIDIA's label `nvidia.com/gpu.clique` has it.
    let hex = format!("{:032x}", u128::from_be_bytes(fabric.cluster_uuid));
    let part = |range| hex.get(range).unwrap_or_default();
    let cluster_uuid = format!(
        "{}-{}-{}-{}-{}",
        part(0..8),
        part(8..12),
        part(12..16),
        part(16..20),
        part(20..32)
    );
    Some(FabricFacts {
        cluster_uuid,
        clique_id: fabric.clique_id,
    })
}

impl Asked<'_> {
    fn optional<T>(
        self,
        question: &'static str,
        ask: impl FnOnce(&Library, Handle) -> Result<T, Failure>,
    ) -> Result<Option<T>, Failure> {
        self.library
            .optional(Some(self.gpu), question, ask(self.library, self.gpu))
    }

    fn nvlinks(self) -> Result<Vec<NvLinkPeer>, Failure> {
        let mut peers = Vec::new();
        for link in 0..LINKS {
            let active = self.library.nvlink_is_active(self.gpu, link);
            // No links with this number and above.
            if active
                .as_ref()
                .is_err_and(|f| f.code == GpuErrorCode::INVALID_ARGUMENT)
            {
                break;
            }
            if self.optional("NVLink", |_, _| active)? == Some(true) {
                peers.push(self.peer(link)?);
            }
        }
        peers.sort_unstable();
        Ok(peers)
    }

    fn peer(self, link: u32) -> Result<NvLinkPeer, Failure> {
        // `NVML_NVLINK_DEVICE_TYPE_*`.
        const GPU: u32 = 0;
        const SWITCH: u32 = 2;
        const UNKNOWN: u32 = 0xff;
        let kind = self.optional("NVLink's other end", |library, gpu| {
            library.nvlink_remote_type(gpu, link)
        })?;
        Ok(match kind.unwrap_or(UNKNOWN) {
            SWITCH => NvLinkPeer::Switch,
            GPU => {
                let pci = self.optional("NVLink's peer", |library, gpu| {
                    library.nvlink_remote_pci(gpu, link)
                })?;
                // A GPU without an address that can be read joins no domain.
                pci.as_ref()
                    .and_then(address)
                    .map_or(NvLinkPeer::Other(GPU), NvLinkPeer::Gpu)
            }
            other => NvLinkPeer::Other(other),
        })
    }
}

fn address(pci: &Pci) -> Option<PciAddress> {
    let numbers = || {
        let (bus, device) = (u8::try_from(pci.bus).ok()?, u8::try_from(pci.device).ok()?);
        // Nothing was written where all is zero: no GPU is there.
        let is_given = (pci.domain, bus, device) != (0, 0, 0);
        (is_given && device < 32).then_some(PciAddress {
            domain: pci.domain,
            bus,
            device,
            function: 0,
        })
    };
    // The text carries the function; the numbers are there when a library leaves the text empty.
    pci.bus_id.parse().ok().or_else(|| {
        if pci.bus_id.is_empty() {
            numbers()
        } else {
            None
        }
    })
}

fn addressing_mode(raw: u32) -> Option<String> {
    Some(match raw {
        0 => "None".to_owned(),
        1 => "HMM".to_owned(),
        2 => "ATS".to_owned(),
        _ => return None,
    })
}

/// NVML counts CUDA cores; the compute capability implies the number of cores per multiprocessor.
/// `None` for a capability we don't know, and where the cores don't divide evenly: left out, not
/// guessed.
fn multiprocessors(cores: u32, capability: ComputeCapability) -> Option<u32> {
    let per_multiprocessor = match (capability.major, capability.minor) {
        // FP32 cores of a multiprocessor, from the CUDA programming guide's table of throughput by
        // compute capability.
        (3, _) => 192,
        (5 | 9..=12, _) | (6 | 8, 1..) => 128,
        (6 | 8, 0) | (7, _) => 64,
        _ => return None,
    };
    (cores > 0 && cores.is_multiple_of(per_multiprocessor)).then_some(cores / per_multiprocessor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multiprocessors_follow_from_cores_where_the_capability_is_known() {
        let count =
            |cores, major, minor| multiprocessors(cores, ComputeCapability { major, minor });
        assert_eq!(count(16896, 9, 0), Some(132));
        assert_eq!(count(6912, 8, 0), Some(108));
        assert_eq!(count(7424, 8, 9), Some(58));
        assert_eq!(count(2560, 7, 5), Some(40));
        assert_eq!(count(18944, 10, 0), Some(148));
        assert_eq!(
            (count(100, 9, 0), count(12800, 99, 0), count(0, 9, 0)),
            (None, None, None)
        );
    }

    #[test]
    fn a_fabric_counts_only_when_registered_and_named() {
        let uuid = [
            0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8,
        ];
        let full = Fabric {
            cluster_uuid: uuid,
            status: 0,
            clique_id: 7,
            state: 3,
            health: 1,
        };
        assert_eq!(
            attached(full),
            Some(FabricFacts {
                cluster_uuid: "12345678-9abc-def0-0102-030405060708".to_owned(),
                clique_id: 7
            })
        );
        for part in [
            Fabric { state: 2, ..full },
            Fabric { status: 15, ..full },
            Fabric {
                cluster_uuid: [0; 16],
                ..full
            },
        ] {
            assert_eq!(attached(part), None, "{part:?}");
        }
    }

    #[test]
    fn an_address_is_read_from_the_text_or_else_the_numbers() {
        let pci = |bus_id: &str| Pci {
            bus_id: bus_id.to_owned(),
            domain: 1,
            bus: 0x3b,
            device: 0,
            device_id: 0,
        };
        assert_eq!(
            address(&pci("00000000:3B:00.0")),
            "0000:3b:00.0".parse().ok()
        );
        assert_eq!(address(&pci("")), "0001:3b:00.0".parse().ok());
        assert_eq!(address(&pci("nonsense")), None);
    }
}
