//! The inventory as a value, for programs and for the table. Names are in one case, and amounts are
//! in bytes.

use std::collections::BTreeMap;

use divvy_api::names::{Naming, attributes, capacity};
use divvy_model::{
    AttributeValue, Form, Inventory, MemoryCaps, MigMode, NvLinkPeer, Sharing, TargetKind,
};
use divvy_offer::Device;
use serde::Serialize;

use crate::offered::Offered;
use crate::slices::Picture;
use divvy_why::device::kind;
use divvy_why::driver;

/// GPUs of a machine, and the devices that divvy would publish of them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Shown {
    /// The name under which devices would be published.
    pub(super) driver_name: &'static str,
    pub(super) driver_version: String,
    /// The newest CUDA version of the driver.
    pub(super) cuda_version: Option<String>,
    pub(super) nvml_version: Option<String>,
    /// The driver's ability to cap the memory of shares; the node may lack more.
    pub(super) memory_caps: MemoryCaps,
    /// By number.
    pub(super) gpus: Vec<Gpu>,
    /// Forms in which GPUs would be published, in the order of products and GPUs.
    pub(super) forms: Vec<Group>,
    /// Devices that would be published, in the order in which the scheduler tries them.
    pub(super) devices: Vec<String>,
    /// Devices that would be left out, with the reason.
    pub(super) notes: Vec<String>,
    /// GPUs that are there but could not be read.
    pub(super) problems: Vec<String>,
}

/// A GPU.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Gpu {
    /// Name that begins the names of its devices; none for a GPU without a number.
    pub(super) name: Option<String>,
    pub(super) uuid: String,
    pub(super) product_name: String,
    pub(super) brand: Option<&'static str>,
    pub(super) architecture: Option<&'static str>,
    pub(super) compute_capability: String,
    pub(super) memory_bytes: Option<u64>,
    pub(super) multiprocessors: Option<u32>,
    pub(super) pci_address: String,
    pub(super) pcie_root: Option<String>,
    pub(super) numa_node: Option<u32>,
    /// `unsupported`, `off` or `on`.
    pub(super) mig: &'static str,
    /// Number of GPUs that it is linked with, or `switch`.
    pub(super) nvlink: Option<String>,
    /// GPUs with the same value reach each other over NVLink.
    pub(super) nvlink_domain: Option<String>,
    /// The rule of a policy that decides what it may become.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) decided_by: Option<String>,
    /// Its partitions now, if it can have any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) picture: Option<Picture>,
}

/// Devices of one form, all alike, of GPUs of one product.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Group {
    /// Product of the GPUs.
    pub(super) product_name: String,
    /// `whole`, `share`, `admin`, or the profile of a partition.
    pub(super) name: String,
    pub(super) class: &'static str,
    /// GPUs that are offered so.
    pub(super) gpus: Vec<String>,
    /// Devices of each of these GPUs: of a partition, its places.
    pub(super) devices_per_gpu: usize,
    /// Claims that can share each device at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) slots: Option<u64>,
    /// Memory of each device.
    pub(super) memory_bytes: Option<u64>,
    /// The largest limit of memory of a share, in percent of its request; 0 where nothing keeps
    /// limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_limit_max_percent: Option<i64>,
    /// Expression in CEL that selects this form among those of its class, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) selector: Option<String>,
    /// Capacities that a request can name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) requests: Vec<String>,
}

impl Shown {
    /// Arranges what was read and what would be published.
    pub(super) fn of(inventory: &Inventory, offered: &Offered, driver: &'static str) -> Self {
        let domains = inventory.nvlink_domains();
        let mut gpus: Vec<(Option<u32>, Gpu)> = Vec::new();
        for (uuid, gpu) in &inventory.gpus {
            let ordinal = offered.ordinals.of(uuid);
            let name = ordinal.map(|number| format!("gpu-{number}"));
            let facts = &gpu.facts;
            let picture = gpu.mig.as_ref().and_then(|mig| {
                let living = mig.instances.as_ref()?;
                let name = name.clone().unwrap_or_default();
                Some(Picture::of(name, &mig.capabilities, living, |_| {
                    (Vec::new(), false)
                }))
            });
            let shown = Gpu {
                name,
                uuid: uuid.to_string(),
                product_name: facts.product_name.clone(),
                brand: facts.brand.name(),
                architecture: facts.architecture.name(),
                compute_capability: facts.compute_capability.to_string(),
                memory_bytes: facts.memory_bytes,
                multiprocessors: facts.multiprocessors,
                pci_address: facts.pci_address.to_string(),
                pcie_root: gpu.topology.pcie_root.clone(),
                numa_node: gpu.topology.numa_node,
                mig: match facts.mig_mode {
                    MigMode::Unsupported => "unsupported",
                    mode if mode.is_on() => "on",
                    MigMode::Supported { .. } => "off",
                },
                nvlink: nvlink(&facts.nvlinks),
                nvlink_domain: domains.get(uuid).cloned(),
                decided_by: offered.resolved.by.get(uuid).map(ToString::to_string),
                picture,
            };
            gpus.push((ordinal, shown));
        }
        gpus.sort_by_key(|(ordinal, _)| *ordinal);
        let system = &inventory.system;
        Self {
            driver_name: driver,
            driver_version: system.driver_version.clone(),
            cuda_version: system.cuda_version.map(|version| version.to_string()),
            nvml_version: system.nvml_version.clone(),
            memory_caps: system.memory_caps,
            gpus: gpus.into_iter().map(|(_, gpu)| gpu).collect(),
            forms: forms(offered.pool.devices(), driver),
            devices: offered
                .pool
                .devices()
                .map(|device| device.name.to_string())
                .collect(),
            notes: offered.notes.clone(),
            problems: inventory
                .problems
                .iter()
                .map(|problem| problem.error.to_string())
                .collect(),
        }
    }
}

/// Product, place of the class, memory and name of a form: the order of the table.
type Key = (String, u8, Option<u64>, String);

/// Groups devices that are alike for a claim, except for their GPU.
fn forms<'d>(devices: impl Iterator<Item = &'d Device>, driver: &'static str) -> Vec<Group> {
    // With the number of devices of each GPU.
    let mut groups: BTreeMap<Key, (Group, BTreeMap<u32, usize>)> = BTreeMap::new();
    for device in devices {
        let Some(kind) = kind(device.name.as_str()) else {
            continue;
        };
        let text = |name: &str| match device.attributes.get(name) {
            Some(AttributeValue::String(text)) => Some(text.clone()),
            _ => None,
        };
        let product = text(attributes::PRODUCT_NAME).unwrap_or_default();
        let profile = text(attributes::PROFILE);
        // Of MPS shares, the memory of a slot.
        let slot = match device.attributes.get(attributes::SLOT_MEMORY_MIB) {
            Some(AttributeValue::Int(mib)) => u64::try_from(*mib).ok().map(|mib| mib << 20),
            _ => None,
        };
        let memory = device.capacity.get(capacity::MEMORY);
        let memory = memory.map(|memory| memory.value.value()).or(slot);
        let form = profile
            .clone()
            .unwrap_or_else(|| kind.form().noun().to_owned());
        let form_of = kind.form();
        let class = driver::class(driver, form_of).unwrap_or_default();
        let rank = rank(form_of);
        let new = || Group {
            product_name: product.clone(),
            name: form.clone(),
            class,
            gpus: Vec::new(),
            devices_per_gpu: 0,
            slots: device
                .capacity
                .get(capacity::SLOTS)
                .map(|slots| slots.value.value()),
            memory_bytes: memory,
            memory_limit_max_percent: match device
                .attributes
                .get(attributes::MEMORY_LIMIT_MAX_PERCENT)
            {
                Some(AttributeValue::Int(most)) => Some(*most),
                _ => None,
            },
            selector: profile
                .as_ref()
                .map(|profile| selector(driver, attributes::PROFILE, profile)),
            requests: requests(device, driver),
        };
        let (_, gpus) = groups
            .entry((product.clone(), rank, memory, form.clone()))
            .or_insert_with(|| (new(), BTreeMap::new()));
        *gpus.entry(kind.ordinal()).or_default() += 1;
    }
    let done = groups.into_values().map(|(form, gpus)| Group {
        devices_per_gpu: gpus.values().copied().max().unwrap_or(0),
        gpus: gpus.into_keys().map(|n| format!("gpu-{n}")).collect(),
        ..form
    });
    done.collect()
}

/// Returns the amounts that a claim can name of shares. A claim of an MPS slot gets that, and names
/// none.
fn requests(device: &Device, driver: &str) -> Vec<String> {
    let amounts = [capacity::MEMORY, capacity::CORES, capacity::PERCENT];
    let is_given_out = |name: &&str| device.allow_multiple && device.capacity.contains_key(*name);
    if !amounts.iter().any(&is_given_out) {
        return Vec::new();
    }
    let all = amounts.into_iter().chain([capacity::SLOTS]);
    let naming = Naming::of(driver);
    let named = all
        .filter(is_given_out)
        .map(|name| naming.capacity(name).into_owned());
    named.collect()
}

/// Returns an expression that compares an attribute, as a driver of this name publishes it.
pub(super) fn selector(driver: &str, attribute: &str, value: &str) -> String {
    let naming = Naming::of(driver);
    let published = naming.attribute(attribute);
    let (domain, name) = Naming::in_cel(driver, &published);
    format!("device.attributes[\"{domain}\"].{name} == \"{value}\"")
}

/// Returns the place of a form in the table.
fn rank(form: Form) -> u8 {
    match (form.sharing, form.target) {
        (Sharing::Exclusive, TargetKind::Gpu) => 0,
        (Sharing::Exclusive, TargetKind::Partition) => 1,
        (Sharing::TimeSliced, _) => 2,
        (Sharing::Mps, _) => 3,
        (Sharing::Admin, _) => 4,
    }
}

fn nvlink(links: &[NvLinkPeer]) -> Option<String> {
    let peers = links
        .iter()
        .filter(|link| matches!(link, NvLinkPeer::Gpu(_)))
        .count();
    match (links.contains(&NvLinkPeer::Switch), peers) {
        (true, _) => Some("switch".to_owned()),
        (false, 0) => None,
        (false, n) => Some(n.to_string()),
    }
}
