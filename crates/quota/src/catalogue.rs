//! The published devices of our driver, reduced to what decides about an amount: a device's
//! attributes that many have in common, and its capacities. Devices that are equal so are kept
//! once, so that a thousand nodes are some megabytes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_api::node::GpuNodeStatus;
use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, ResourceSlice};

use crate::amount::{Amount, MILLI, WHOLE};

const MIB: u64 = 1 << 20;

/// Attributes that many devices have in common. A selector that reads another one is taken for one
/// that selects every device.
const COMMON: &[&str] = &[
    attr::TYPE,
    attr::PROFILE,
    attr::PRODUCT_NAME,
    attr::BRAND,
    attr::ARCHITECTURE,
    attr::CUDA_COMPUTE_CAPABILITY,
    attr::DRIVER_VERSION,
    attr::CUDA_DRIVER_VERSION,
    attr::ADDRESSING_MODE,
    attr::C2C_ENABLED,
    attr::SHARING,
    attr::TIME_SLICE,
    attr::MEMORY_MIB,
    attr::SLOT_MEMORY_MIB,
    attr::SLOT_CORES,
    attr::ISOLATION,
    attr::MEMORY_ENFORCEMENT,
    attr::MEMORY_LIMIT_MAX_PERCENT,
    attr::COMPUTE_ENFORCEMENT,
    attr::FAULT_DOMAIN,
];

/// A device, reduced: without its name, its taints, and what only it has.
#[derive(Debug)]
pub(crate) struct Reduced {
    pub(crate) device: Device,
    /// Memory of it as a whole, in bytes.
    memory: Option<u64>,
}

/// The devices of a slice.
#[derive(Debug)]
struct SliceDevices {
    pool: String,
    node: String,
    /// Sorted by name.
    devices: Vec<(Box<str>, Arc<Reduced>)>,
}

/// A kind of devices, and the memory of the GPUs that have it.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub(crate) reduced: Arc<Reduced>,
    pub(crate) gpu: Option<u64>,
}

/// The published devices of a driver.
#[derive(Debug, Default)]
pub struct Catalogue {
    pub(crate) driver: String,
    slices: BTreeMap<String, SliceDevices>,
    /// Names of slices, by pool.
    pools: BTreeMap<String, BTreeSet<String>>,
    /// Memory of GPUs as nodes report it, by node and name.
    gpus: BTreeMap<String, BTreeMap<String, u64>>,
    known: BTreeMap<String, Arc<Reduced>>,
    /// Names of attributes that were left out, and domains of other drivers and of Kubernetes.
    pub(crate) left_out: BTreeSet<String>,
    kinds: Vec<Kind>,
    /// Answers of each kind, by selector.
    pub(crate) answers: BTreeMap<String, Vec<bool>>,
    is_current: bool,
}

impl Catalogue {
    /// Returns one without devices.
    pub fn new(driver: &str) -> Self {
        Self {
            driver: driver.to_owned(),
            ..Self::default()
        }
    }

    /// Takes a slice in, in the place of its earlier version. Slices of other drivers are ignored.
    pub fn put(&mut self, slice: &ResourceSlice) {
        let name = slice.metadata.name.clone().unwrap_or_default();
        self.remove(&name);
        if slice.spec.driver != self.driver {
            return;
        }
        let named = slice.spec.devices.iter().flatten();
        let mut devices: Vec<(Box<str>, _)> = named
            .map(|device| (device.name.as_str().into(), self.reduced(device)))
            .collect();
        devices.sort_by(|(one, _), (other, _)| one.cmp(other));
        let pool = slice.spec.pool.name.clone();
        self.pools
            .entry(pool.clone())
            .or_default()
            .insert(name.clone());
        let node = slice.spec.node_name.clone().unwrap_or_default();
        self.slices.insert(
            name,
            SliceDevices {
                pool,
                node,
                devices,
            },
        );
        self.is_current = false;
    }

    /// Forgets a slice.
    pub fn remove(&mut self, name: &str) {
        let Some(gone) = self.slices.remove(name) else {
            return;
        };
        if let Some(names) = self.pools.get_mut(&gone.pool) {
            names.remove(name);
            if names.is_empty() {
                self.pools.remove(&gone.pool);
            }
        }
        self.is_current = false;
    }

    /// Forgets all slices but these.
    pub fn keep(&mut self, names: &BTreeSet<String>) {
        let gone: Vec<_> = self
            .slices
            .keys()
            .filter(|name| !names.contains(*name))
            .cloned()
            .collect();
        for name in gone {
            self.remove(&name);
        }
    }

    /// Takes in what a node reports of the memory of its GPUs; `None` forgets it.
    pub fn report(&mut self, node: &str, status: Option<&GpuNodeStatus>) {
        let gpus: BTreeMap<_, _> = status
            .iter()
            .flat_map(|status| &status.gpus)
            .filter_map(|gpu| Some((gpu.name.clone(), gpu.memory_mib?.checked_mul(MIB)?)))
            .collect();
        if self.gpus.get(node) == Some(&gpus) {
            return;
        }
        self.is_current = false;
        if gpus.is_empty() {
            self.gpus.remove(node);
        } else {
            self.gpus.insert(node.to_owned(), gpus);
        }
    }

    /// Returns the number of devices.
    pub fn len(&self) -> usize {
        self.slices.values().map(|slice| slice.devices.len()).sum()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the kinds of all devices, each once.
    pub(crate) fn kinds(&mut self) -> &[Kind] {
        if !self.is_current {
            self.is_current = true;
            let mut seen = BTreeSet::new();
            let mut kinds = Vec::new();
            for pool in self.pools.keys() {
                let gpus = self.memory_of_gpus(pool);
                for slice in self.slices_of(pool) {
                    for (name, reduced) in &slice.devices {
                        let gpu = gpus.get(gpu_of(name)).copied();
                        if seen.insert((Arc::as_ptr(reduced), gpu)) {
                            kinds.push(Kind {
                                reduced: reduced.clone(),
                                gpu,
                            });
                        }
                    }
                }
            }
            self.kinds = kinds;
            self.answers.clear();
            // One here, one in the slice.
            self.known.retain(|_, one| Arc::strong_count(one) > 1);
        }
        &self.kinds
    }

    /// Returns the kind of a published device.
    pub(crate) fn kind(&self, pool: &str, device: &str) -> Option<Kind> {
        let reduced = self.slices_of(pool).find_map(|slice| {
            let at = slice
                .devices
                .binary_search_by(|(name, _)| (**name).cmp(device))
                .ok()?;
            slice.devices.get(at).map(|(_, reduced)| reduced.clone())
        })?;
        let gpu = self.memory_of_gpus(pool).get(gpu_of(device)).copied();
        Some(Kind { reduced, gpu })
    }

    fn slices_of(&self, pool: &str) -> impl Iterator<Item = &SliceDevices> {
        let names = self.pools.get(pool).into_iter().flatten();
        names.filter_map(|name| self.slices.get(name))
    }

    /// Returns the memory of a pool's GPUs: as the node reports it, else that of their largest
    /// device.
    fn memory_of_gpus(&self, pool: &str) -> BTreeMap<&str, u64> {
        let mut gpus = BTreeMap::new();
        for slice in self.slices_of(pool) {
            for (name, reduced) in &slice.devices {
                let largest = gpus.entry(gpu_of(name)).or_insert(0);
                *largest = reduced.memory.unwrap_or(0).max(*largest);
            }
        }
        let node = self.slices_of(pool).map(|slice| slice.node.as_str()).next();
        let reported = node.and_then(|node| self.gpus.get(node));
        for (name, memory) in reported.into_iter().flatten() {
            if let Some(known) = gpus.get_mut(name.as_str()) {
                *known = *memory;
            }
        }
        gpus.retain(|_, memory| *memory > 0);
        gpus
    }

    fn reduced(&mut self, device: &Device) -> Arc<Reduced> {
        let domain = format!("{}/", self.driver);
        let mut reduced = Device {
            attributes: Some(BTreeMap::new()),
            capacity: device.capacity.clone(),
            allow_multiple_allocations: device.allow_multiple_allocations,
            ..Device::default()
        };
        for (name, value) in device.attributes.iter().flatten() {
            if COMMON.contains(&name.strip_prefix(&domain).unwrap_or(name)) {
                reduced
                    .attributes
                    .get_or_insert_default()
                    .insert(name.clone(), value.clone());
            } else {
                self.leave_out(name);
            }
        }
        // Plain values: this cannot fail, and two kinds taken for one would only be that.
        let key = serde_json::to_string(&reduced).unwrap_or_default();
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let new = Arc::new(Reduced {
            memory: whole_memory(&reduced),
            device: reduced,
        });
        self.known.insert(key, new.clone());
        new
    }
}

impl Catalogue {
    /// Notes the name of an attribute, and its domain if that is not the driver's: whether a map of
    /// attributes has any can be asked, too.
    fn leave_out(&mut self, name: &str) {
        let (domain, short) = name.rsplit_once('/').unwrap_or(("", name));
        let of_others = Some(domain).filter(|domain| !domain.is_empty() && *domain != self.driver);
        for word in of_others.into_iter().chain([short]) {
            if !self.left_out.contains(word) {
                self.left_out.insert(word.to_owned());
            }
        }
    }
}

impl Kind {
    /// Returns whether many claims have the device.
    pub(crate) fn is_shared(&self) -> bool {
        self.reduced.device.allow_multiple_allocations == Some(true)
    }

    /// Returns the amount that a claim has of the device. `consumed` is what it takes of its
    /// capacities, of a device that many claims have.
    pub(crate) fn amount(&self, consumed: &BTreeMap<String, Quantity>) -> Amount {
        let device = &self.reduced.device;
        if !self.is_shared() {
            let memory = self.reduced.memory.unwrap_or(0);
            let is_part = text(device, attr::PROFILE).is_some();
            let percent = match self.gpu {
                Some(gpu) if is_part => part(memory, gpu),
                _ => WHOLE,
            };
            return Amount { memory, percent };
        }
        let taken = |name: &str| {
            let named = consumed.iter().find(|(full, _)| is_named(full, name));
            named.map(|(_, amount)| rounded_up(amount))
        };
        let mib = |name| integer(device, name).unwrap_or(0).saturating_mul(MIB);
        let (memory, percent) = match (taken(cap::MEMORY), taken(cap::PERCENT), taken(cap::SLOTS)) {
            (Some(memory), ..) => (memory, None),
            (None, Some(percent), _) => {
                let whole = u128::from(mib(attr::MEMORY_MIB)) * u128::from(percent);
                (narrow(whole.div_ceil(100)), Some(percent * MILLI))
            }
            (None, None, Some(slots)) => (
                mib(attr::SLOT_MEMORY_MIB).saturating_mul(slots),
                integer(device, attr::SLOT_CORES).map(|cores| cores * slots * MILLI),
            ),
            (None, None, None) => (0, None),
        };
        let of_gpu = self.gpu.filter(|_| memory > 0);
        let is_part = text(device, attr::PROFILE).is_some();
        let percent = match (of_gpu, percent) {
            // Percent of a partition are not percent of its GPU.
            (Some(gpu), _) if is_part => part(memory, gpu),
            (_, Some(percent)) => percent,
            (Some(gpu), None) => part(memory, gpu),
            // A board without memory of its own divides its compute.
            (None, None) => taken(cap::CORES).map_or(WHOLE, |cores| cores * MILLI),
        };
        Amount {
            memory,
            percent: percent.min(WHOLE),
        }
    }
}

/// Returns the name of the GPU that a device is of: `gpu-3` of `gpu-3-mig-1g10gb-19-0`.
fn gpu_of(device: &str) -> &str {
    let second = device.match_indices('-').nth(1);
    second.map_or(device, |(at, _)| device.get(..at).unwrap_or(device))
}

/// Returns whether a name with or without a domain is this one.
fn is_named(full: &str, name: &str) -> bool {
    full.rsplit('/').next() == Some(name)
}

fn rounded_up(amount: &Quantity) -> u64 {
    u64::try_from(amount.rounded_up().max(0)).unwrap_or(u64::MAX)
}

fn narrow(amount: u128) -> u64 {
    u64::try_from(amount).unwrap_or(u64::MAX)
}

/// Returns the part that it is of a GPU, rounded up.
fn part(memory: u64, gpu: u64) -> u64 {
    let milli = u128::from(memory) * u128::from(WHOLE);
    narrow(milli.div_ceil(u128::from(gpu.max(1)))).min(WHOLE)
}

fn whole_memory(device: &Device) -> Option<u64> {
    let mut capacities = device.capacity.iter().flatten();
    let memory = capacities.find(|(name, _)| is_named(name, cap::MEMORY));
    let memory = memory.and_then(|(_, capacity)| capacity.value.0.parse::<Quantity>().ok());
    let by_percent = || integer(device, attr::MEMORY_MIB)?.checked_mul(MIB);
    memory.map(|amount| rounded_up(&amount)).or_else(by_percent)
}

fn attribute<'d>(device: &'d Device, name: &str) -> Option<&'d DeviceAttribute> {
    let mut all = device.attributes.iter().flatten();
    all.find(|(full, _)| is_named(full, name))
        .map(|(_, value)| value)
}

fn text<'d>(device: &'d Device, name: &str) -> Option<&'d str> {
    attribute(device, name)?.string.as_deref()
}

fn integer(device: &Device, name: &str) -> Option<u64> {
    u64::try_from(attribute(device, name)?.int?).ok()
}
