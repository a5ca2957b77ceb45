//! The GPUs of a cluster as claims see them: whose they are now, and what each could become.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{DeviceId, Holder};
use divvy_api::names::attributes;
use divvy_model::{Form, Mode, Sharing};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice, ResourceSliceSpec};

use super::named;
use crate::device::{kind, text};
use crate::{driver, lookup};

/// A GPU by pool and number.
type Gpu = (String, u32);

/// Published devices, and who has them.
#[derive(Debug, Default)]
pub struct Scene<'a> {
    driver: &'a str,
    devices: BTreeMap<(&'a str, &'a str), &'a Device>,
    /// The mode of each GPU that is held, and its users: pods, or claims without any.
    uses: BTreeMap<Gpu, (Mode, BTreeSet<(String, String)>)>,
    /// Names of what all drivers publish.
    names: Names,
    /// Pods of claims, by namespace and name of the claim.
    pods: BTreeMap<(String, String), Vec<String>>,
}

/// Names that selectors can read, as `domain/name`.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) attributes: BTreeSet<String>,
    pub(super) capacities: BTreeSet<String>,
}

impl Names {
    /// Adds the names of the devices of a slice.
    fn add(&mut self, slice: &ResourceSliceSpec) {
        let full = |name: &String| lookup::full(&slice.driver, name);
        for device in slice.devices.iter().flatten() {
            self.attributes
                .extend(device.attributes.iter().flat_map(BTreeMap::keys).map(full));
            self.capacities
                .extend(device.capacity.iter().flat_map(BTreeMap::keys).map(full));
        }
    }
}

/// Ability of a GPU to be partitioned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mig {
    /// MIG mode changes at once.
    AtOnce,
    /// MIG mode changes with a reset.
    WithReset,
    /// It has no MIG.
    No,
}

impl<'a> Scene<'a> {
    /// Collects what belongs to the driver.
    pub fn new(driver: &'a str, slices: &'a [ResourceSlice], claims: &'a [ResourceClaim]) -> Self {
        let mut scene = Self {
            driver,
            ..Self::default()
        };
        for spec in slices.iter().map(|slice| &slice.spec) {
            scene.names.add(spec);
            if spec.driver == driver {
                let of_slice = spec.devices.iter().flatten();
                let named = of_slice.map(|d| ((spec.pool.name.as_str(), d.name.as_str()), d));
                scene.devices.extend(named);
            }
        }
        for claim in claims {
            scene.add(claim);
        }
        scene
    }

    fn add(&mut self, claim: &ResourceClaim) {
        let Some(status) = &claim.status else { return };
        let holder = Holder::of(claim);
        let reserved = status.reserved_for.iter().flatten();
        let pods: Vec<String> = reserved.map(|user| user.name.clone()).collect();
        let users = if pods.is_empty() {
            vec![holder.name.clone()]
        } else {
            pods.clone()
        };
        self.pods
            .insert((holder.namespace.clone(), holder.name), pods);
        let allocation = status.allocation.as_ref();
        let results = allocation.and_then(|a| a.devices.as_ref()?.results.as_ref());
        for result in results.into_iter().flatten() {
            let ours = result.driver == self.driver && result.admin_access != Some(true);
            let Some(kind) = kind(&result.device).filter(|_| ours) else {
                continue;
            };
            let Some(mode) = kind.form().mode() else {
                continue;
            };
            let (_, all) = self
                .uses
                .entry((result.pool.clone(), kind.ordinal()))
                .or_insert((mode, BTreeSet::new()));
            all.extend(
                users
                    .iter()
                    .map(|user| (holder.namespace.clone(), user.clone())),
            );
        }
    }

    /// Returns the form of the devices of a class of the chart.
    pub(super) fn form(&self, class: &str) -> Option<Form> {
        driver::form(self.driver, class)
    }

    /// Returns the names that selectors can read here.
    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Returns the pods of a claim, or the claim, as seen from a namespace.
    pub(super) fn user(&self, holder: &Holder, from: &str) -> String {
        let key = (holder.namespace.clone(), holder.name.clone());
        let pods = self.pods.get(&key).filter(|pods| !pods.is_empty());
        let names = pods.map_or_else(|| holder.name.clone(), |pods| named(pods));
        if holder.namespace == from {
            names
        } else {
            format!("{}/{names}", holder.namespace)
        }
    }

    /// Returns the number of the GPU that a device of ours belongs to.
    pub(super) fn gpu_of(&self, id: &DeviceId) -> Option<u32> {
        (id.driver == self.driver)
            .then(|| kind(&id.device))?
            .map(|kind| kind.ordinal())
    }

    /// Says what a GPU is now and for whom, as seen from a namespace: `is shared by a, b`.
    pub(super) fn state(&self, pool: &str, ordinal: u32, from: &str) -> Option<(Mode, String)> {
        let (mode, users) = self.uses.get(&(pool.to_owned(), ordinal))?;
        let names: Vec<String> = users
            .iter()
            .map(|(namespace, name)| {
                if namespace == from {
                    name.clone()
                } else {
                    format!("{namespace}/{name}")
                }
            })
            .collect();
        let names = named(&names);
        let state = match mode {
            Mode::Whole => format!("is whole for {names}"),
            Mode::Partitioned => format!("is in partitions for {names}"),
            _ => format!("is shared by {names}"),
        };
        Some((*mode, state))
    }

    pub(super) fn device(&self, id: &DeviceId) -> Option<&'a Device> {
        self.devices
            .get(&(id.pool.as_str(), id.device.as_str()))
            .copied()
            .filter(|_| id.driver == self.driver)
    }

    /// Returns the products of these devices with their ability to be partitioned, and whether any
    /// of the devices is more than a partition.
    pub(super) fn boards<'d>(
        &self,
        ids: impl Iterator<Item = &'d DeviceId>,
    ) -> (BTreeSet<(Mig, String)>, bool) {
        let mut boards = BTreeSet::new();
        let mut undivided = false;
        for id in ids {
            let Some(device) = self.device(id) else {
                continue;
            };
            let product = text(device, attributes::PRODUCT_NAME).unwrap_or("this GPU");
            boards.insert((mig(device, product), product.to_owned()));
            let kind = kind(&id.device);
            undivided |= kind
                .is_some_and(|kind| kind.partition().is_none() && kind.sharing != Sharing::Admin);
        }
        (boards, undivided)
    }
}

/// Reads a GPU's ability to be partitioned from what is published of it. MIG is there with compute
/// capability 8.0 (A100, A30), 9.0 (Hopper), 10.x (Blackwell), and with 12.0 on RTX PRO boards
/// (NVIDIA Multi-Instance GPU User Guide, "Supported GPUs").
pub fn mig(device: &Device, product: &str) -> Mig {
    let all = device.attributes.as_ref();
    let capability = all
        .and_then(|all| {
            all.get(attributes::CUDA_COMPUTE_CAPABILITY)?
                .version
                .as_deref()
        })
        .unwrap_or_default();
    let mut numbers = capability.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(8)), Some(Ok(0))) => Mig::WithReset,
        (Some(Ok(9..=11)), _) => Mig::AtOnce,
        (Some(Ok(12)), Some(Ok(0))) if product.contains("RTX PRO") => Mig::AtOnce,
        _ => Mig::No,
    }
}
