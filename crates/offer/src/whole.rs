//! The whole-GPU form: a GPU's facts as attributes and capacities, named and typed as
//! NVIDIA's driver has them so that existing CEL keeps working.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::{
    CudaVersion, DeviceKind, DeviceName, Enforcement, Form, Gpu, GpuUuid, Limits, MemoryCaps,
    Sharing, SystemFacts, TargetKind, normalise_version,
};

use crate::validate::{MAX_INTEGER, MAX_STRING};
use crate::{Amount, AttributeValue, Capacity, Device, Finding};

/// Labels that need the whole node to know.
#[derive(Default)]
pub(crate) struct Links<'a> {
    pub(crate) domain: Option<&'a str>,
    pub(crate) pair: Option<&'a str>,
}

/// A GPU as a device, without taints.
pub(crate) fn device(
    ordinal: u32,
    uuid: &GpuUuid,
    gpu: &Gpu,
    system: &SystemFacts,
    links: &Links<'_>,
    findings: &mut Vec<Finding>,
) -> Device {
    let facts = &gpu.facts;
    let mut to = bare_builder(ordinal, uuid, findings);
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
pub(crate) fn describe(to: &mut Builder<'_>, gpu: &Gpu, system: &SystemFacts) {
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
pub(crate) fn bare(ordinal: u32, uuid: &GpuUuid) -> Device {
    bare_builder(ordinal, uuid, &mut Vec::new()).device
}

fn bare_builder<'a>(ordinal: u32, uuid: &GpuUuid, findings: &'a mut Vec<Finding>) -> Builder<'a> {
    let mut to = Builder::new(DeviceKind::whole(ordinal).device_name(), findings);
    to.string(attr::TYPE, Some(Form::WHOLE.device_type()));
    to.string(attr::UUID, Some(uuid.as_str()));
    to.string(attr::GPU_UUID, Some(uuid.as_str()));
    to.string(attr::SHARING, Some(Sharing::Exclusive.attribute()));
    to.limits(TargetKind::Gpu, Sharing::Exclusive);
    to
}

/// Returns the attributes that say what keeps a program within a device in this use.
pub(crate) fn limits(
    target: TargetKind,
    sharing: Sharing,
    caps: MemoryCaps,
) -> [(&'static str, &'static str); 4] {
    let limits = Limits::of(target, sharing, caps);
    [
        // The older of them, in a single word: what no neighbour can reach. A cap ends no faults,
        // so that it isolates nothing.
        (
            attr::ISOLATION,
            match limits.memory {
                Enforcement::Hardware => limits.memory.attribute(),
                Enforcement::Cgroup | Enforcement::MpsServer | Enforcement::Nothing => {
                    Enforcement::Nothing.attribute()
                }
            },
        ),
        (attr::MEMORY_ENFORCEMENT, limits.memory.attribute()),
        (attr::COMPUTE_ENFORCEMENT, limits.compute.attribute()),
        (attr::FAULT_DOMAIN, limits.fault_domain),
    ]
}

/// Adds values that are known and within the API's limits; the others are noted.
pub(crate) struct Builder<'a> {
    pub(crate) device: Device,
    pub(crate) findings: &'a mut Vec<Finding>,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(name: DeviceName, findings: &'a mut Vec<Finding>) -> Self {
        Self {
            device: Device::new(name),
            findings,
        }
    }

    fn put(&mut self, name: &'static str, value: AttributeValue) {
        self.device.attributes.insert(name.into(), value);
    }

    fn leave_out(&mut self, name: &str, why: String) {
        self.findings.push(Finding::ValueLeftOut {
            device: self.device.name.clone(),
            name: name.to_owned(),
            why,
        });
    }

    pub(crate) fn limits(&mut self, target: TargetKind, sharing: Sharing) {
        // Whole GPUs and partitions: what caps the memory of shares says nothing of them.
        for (name, value) in limits(target, sharing, MemoryCaps::default()) {
            self.string(name, Some(value));
        }
    }

    pub(crate) fn string(&mut self, name: &'static str, value: Option<&str>) {
        match value {
            None | Some("") => {}
            Some(text) if text.len() <= MAX_STRING => {
                self.put(name, AttributeValue::String(text.to_owned()));
            }
            Some(text) => {
                self.leave_out(
                    name,
                    format!(
                        "{text:?} has {} bytes, the API takes {MAX_STRING}",
                        text.len()
                    ),
                );
            }
        }
    }

    fn version(&mut self, name: &'static str, text: &str) {
        // Strict semver, which the API requires: `535.161.07` has a zero in front, `12.4` lacks a
        // number.
        match normalise_version(text).map(|version| version.to_string()) {
            Some(version) if version.len() <= MAX_STRING => {
                self.put(name, AttributeValue::Version(version));
            }
            _ => self.leave_out(name, format!("{text:?} is not a version")),
        }
    }

    pub(crate) fn capacity(&mut self, name: &'static str, amount: Option<Amount>) {
        match amount {
            None => {}
            Some(amount) if amount.value() <= MAX_INTEGER => {
                self.device
                    .capacity
                    .insert(name.into(), Capacity::whole(amount));
            }
            Some(amount) => self.leave_out(name, format!("{} is over 63 bits", amount.value())),
        }
    }
}
