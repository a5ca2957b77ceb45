//! The whole-GPU form: a GPU's facts as attributes and capacities, named and typed as
//! NVIDIA's driver has them so that existing CEL keeps working.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::{CudaVersion, DeviceKind, Form, Gpu, GpuUuid, Sharing, SystemFacts, TargetKind};

use crate::builder::{Builder, LeftOut};
use crate::{Amount, AttributeValue, Device};

/// Labels that need the whole node to know.
#[derive(Default)]
pub struct Links<'a> {
    pub domain: Option<&'a str>,
    pub pair: Option<&'a str>,
}

/// A GPU as a device, without taints.
pub fn device(
    ordinal: u32,
    uuid: &GpuUuid,
    gpu: &Gpu,
    system: &SystemFacts,
    links: &Links<'_>,
    left_out: &mut Vec<LeftOut>,
) -> Device {
    let facts = &gpu.facts;
    let mut to = bare_builder(ordinal, uuid, left_out);
    describe(&mut to, gpu, system);
    to.string(attr::NVLINK_DOMAIN, links.domain);
    to.string(attr::NVLINK_PAIR, links.pair);
    to.capacity(cap::MEMORY, facts.memory_bytes.map(Amount::Bytes));
    to.capacity(
        cap::MULTIPROCESSORS,
        facts.multiprocessors.map(|n| Amount::Count(n.into())),
    );
    to.device
}

/// Writes what is said of every device cut from a GPU.
pub fn describe(to: &mut Builder<'_>, gpu: &Gpu, system: &SystemFacts) {
    let facts = &gpu.facts;
    let compute = facts.compute_capability;
    to.string(attr::PRODUCT_NAME, Some(&facts.product_name));
    to.string(attr::BRAND, facts.brand.name());
    to.string(attr::ARCHITECTURE, facts.architecture.name());
    to.version(
        attr::CUDA_COMPUTE_CAPABILITY,
        &format!("{}.{}", compute.major, compute.minor),
    );
    to.version(attr::DRIVER_VERSION, &system.driver_version);
    if let Some(CudaVersion { major, minor }) = system.cuda_version {
        to.version(attr::CUDA_DRIVER_VERSION, &format!("{major}.{minor}"));
    }
    to.string(attr::ADDRESSING_MODE, facts.addressing_mode.as_deref());
    if let Some(on) = facts.c2c {
        to.put(attr::C2C_ENABLED, AttributeValue::Bool(on));
    }
    if facts.pci_address.is_standard() {
        to.string(attr::PCI_BUS_ID, Some(&facts.pci_address.to_string()));
    } else {
        to.leave_out(
            attr::PCI_BUS_ID,
            format!(
                "{} has a domain of more than four digits",
                facts.pci_address
            ),
        );
    }
    to.string(attr::PCIE_ROOT, gpu.topology.pcie_root.as_deref());
    if let Some(node) = gpu.topology.numa_node {
        to.put(attr::NUMA_NODE, AttributeValue::Int(i64::from(node)));
    }
}

/// A device of a GPU that nothing is known about but its UUID.
pub fn bare(ordinal: u32, uuid: &GpuUuid) -> Device {
    bare_builder(ordinal, uuid, &mut Vec::new()).device
}

fn bare_builder<'a>(ordinal: u32, uuid: &GpuUuid, left_out: &'a mut Vec<LeftOut>) -> Builder<'a> {
    let mut to = Builder::new(DeviceKind::whole(ordinal).device_name(), left_out);
    to.string(attr::TYPE, Some(Form::WHOLE.device_type()));
    to.string(attr::UUID, Some(uuid.as_str()));
    to.string(attr::GPU_UUID, Some(uuid.as_str()));
    to.string(attr::SHARING, Some(Sharing::Exclusive.attribute()));
    to.limits(TargetKind::Gpu, Sharing::Exclusive);
    to
}
