//! Devices of a kind of nodes: what each has of a GPU.

use std::collections::{BTreeMap, HashMap};

use divvy_api::names::capacity;
use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

/// An amount of GPU: bytes of memory and multiprocessors.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Amount {
    pub(crate) memory: f64,
    pub(crate) cores: f64,
}

impl Amount {
    pub(crate) fn add(&mut self, other: Self) {
        self.memory += other.memory;
        self.cores += other.cores;
    }

    pub(crate) fn less(self, other: Self) -> Self {
        Self {
            memory: self.memory - other.memory,
            cores: self.cores - other.cores,
        }
    }

    pub(crate) fn times(self, factor: f64) -> Self {
        Self {
            memory: self.memory * factor,
            cores: self.cores * factor,
        }
    }
}

/// A device that is published.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) driver: String,
    pub(crate) pool: String,
    pub(crate) name: String,
    has: Amount,
}

impl Known {
    /// Returns what a claim has of the device: all of it, or its share.
    pub(crate) fn granted(&self, consumed: &BTreeMap<String, i128>) -> Amount {
        let of = |id: &str| {
            let mut amounts = consumed.iter();
            let found = amounts.find(|(name, _)| plain(name) == id);
            found.map(|(_, amount)| nanos(*amount))
        };
        let percent = of(capacity::PERCENT);
        let memory = of(capacity::MEMORY).or(percent.map(|part| self.has.memory * part / 100.0));
        let cores = of(capacity::CORES)
            .or(percent)
            .map(|part| self.has.cores * part / 100.0);
        Amount {
            memory: memory.unwrap_or(self.has.memory),
            cores: cores.unwrap_or(self.has.cores),
        }
    }
}

/// Returns a name without its domain.
fn plain(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, plain)| plain)
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
fn nanos(amount: i128) -> f64 {
    amount as f64 / 1e9
}

/// Devices of the slices, and their places by driver, pool and name.
#[derive(Debug, Default)]
pub(crate) struct Devices {
    pub(crate) known: Vec<Known>,
    places: HashMap<(String, String, String), u32>,
    /// GPUs by name.
    pub(crate) gpus: BTreeMap<String, Amount>,
    /// Memory and multiprocessors of all GPUs.
    pub(crate) total: Amount,
}

impl Devices {
    pub(crate) fn of(slices: &[ResourceSlice]) -> Self {
        let mut all = Self::default();
        let mut gpus: BTreeMap<(String, String), Amount> = BTreeMap::new();
        for slice in slices {
            let (driver, pool) = (&slice.spec.driver, &slice.spec.pool.name);
            for device in slice.spec.devices.iter().flatten() {
                let has = amount(device);
                let place = u32::try_from(all.known.len()).unwrap_or(u32::MAX);
                let key = (driver.clone(), pool.clone(), device.name.clone());
                all.places.insert(key, place);
                all.known.push(Known {
                    driver: driver.clone(),
                    pool: pool.clone(),
                    name: device.name.clone(),
                    has,
                });
                let gpu = gpus
                    .entry((driver.clone(), gpu_of(&device.name)))
                    .or_default();
                gpu.memory = gpu.memory.max(has.memory);
                gpu.cores = gpu.cores.max(has.cores);
            }
        }
        // Shares have percents of their GPU's multiprocessors.
        for device in all
            .known
            .iter_mut()
            .filter(|device| device.has.cores == 0.0)
        {
            let key = (device.driver.clone(), gpu_of(&device.name));
            device.has.cores = gpus.get(&key).map_or(0.0, |gpu| gpu.cores);
        }
        for ((_, name), gpu) in gpus {
            all.total.add(gpu);
            all.gpus.entry(name).or_default().add(gpu);
        }
        all
    }

    pub(crate) fn place(&self, driver: &str, pool: &str, device: &str) -> Option<u32> {
        let key = (driver.to_owned(), pool.to_owned(), device.to_owned());
        self.places.get(&key).copied()
    }

    pub(crate) fn at(&self, place: u32) -> Option<&Known> {
        self.known.get(usize::try_from(place).ok()?)
    }
}

/// Returns the GPU behind a device: `gpu-0` of `gpu-0-mig-1g10gb-19-0`.
pub(crate) fn gpu_of(device: &str) -> String {
    let mut parts = device.splitn(3, '-');
    match (parts.next(), parts.next()) {
        (Some(word), Some(number)) => format!("{word}-{number}"),
        _ => device.to_owned(),
    }
}

fn amount(device: &Device) -> Amount {
    let of = |id: &str| {
        let mut all = device.capacity.iter().flatten();
        let (_, found) = all.find(|(name, _)| plain(name) == id)?;
        Some(nanos(found.value.0.parse::<Quantity>().ok()?.nanos()))
    };
    Amount {
        memory: of(capacity::MEMORY).unwrap_or_default(),
        cores: of(capacity::MULTIPROCESSORS).unwrap_or_default(),
    }
}
