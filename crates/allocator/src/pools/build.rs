//! A pool as one node sees it, put together from its slices.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};

use super::counters::{Charges, Counter, Table};
use super::devices;
use crate::features::Features;

/// A pool as one node sees it.
#[derive(Debug)]
pub(crate) struct Pool<'a> {
    pub(crate) driver: &'a str,
    pub(crate) name: &'a str,
    /// The devices of slices that are for this node, or for it in part, in the order in which they
    /// are tried.
    pub(crate) devices: Vec<PoolDevice<'a>>,
    /// The counters that devices draw on; charges name them by their place.
    pub(crate) counters: Vec<Counter<'a>>,
    /// All devices that consume counters, by name; those of other nodes, which draw on the same,
    /// are among them.
    pub(crate) consumers: Vec<(&'a str, Charges)>,
    /// Why it must not be used now, if so.
    pub(crate) problem: Option<PoolProblem>,
    /// Need to attach a device of it first.
    pub(super) waits: bool,
}

/// A device of a pool.
#[derive(Debug)]
pub(crate) struct PoolDevice<'a> {
    pub(crate) slice: &'a ResourceSlice,
    pub(crate) device: &'a Device,
    /// Counters of the pool that it consumes.
    pub(crate) charges: Option<Charges>,
}

/// Why a pool is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PoolProblem {
    /// Slices are missing: it is being updated.
    Incomplete { seen: usize, wanted: i64 },
    /// It contradicts itself.
    Invalid(String),
}

impl<'a> Pool<'a> {
    /// The pool from its slices that are for the node; `None` when a newer generation is only
    /// elsewhere.
    pub(super) fn build(
        driver: &'a str,
        name: &'a str,
        relevant: Vec<&'a ResourceSlice>,
        everywhere: &[&'a ResourceSlice],
        features: Features,
    ) -> Option<Self> {
        let generation = relevant.iter().map(|s| s.spec.pool.generation).max()?;
        let mut slices: Vec<&ResourceSlice> = relevant
            .into_iter()
            .filter(|s| s.spec.pool.generation == generation)
            .collect();
        let wanted = slices.first()?.spec.pool.resource_slice_count;
        let complete = |seen: usize| i64::try_from(seen) == Ok(wanted);
        let mut problem = None;
        let mut others = Vec::new();
        if !complete(slices.len()) {
            if everywhere
                .iter()
                .any(|s| s.spec.pool.generation > generation)
            {
                return None;
            }
            let here: BTreeSet<*const ResourceSlice> =
                slices.iter().map(|s| std::ptr::from_ref(*s)).collect();
            let same = everywhere
                .iter()
                .copied()
                .filter(|s| s.spec.pool.generation == generation);
            others = same
                .filter(|s| !here.contains(&std::ptr::from_ref(*s)))
                .collect();
            let seen = slices.len() + others.len();
            if !complete(seen) {
                problem = Some(PoolProblem::Incomplete { seen, wanted });
            }
        }
        slices.sort_by_key(|s| s.metadata.name.as_deref());
        others.sort_by_key(|s| s.metadata.name.as_deref());
        let declares = |s: &&ResourceSlice| s.spec.shared_counters.is_some();
        let (mut counters, slices): (Vec<_>, Vec<_>) = slices.into_iter().partition(declares);
        let (more_counters, elsewhere): (Vec<_>, Vec<_>) = others.into_iter().partition(declares);
        counters.extend(more_counters);
        let mut pool = Self {
            driver,
            name,
            devices: Vec::new(),
            counters: Vec::new(),
            consumers: Vec::new(),
            problem,
            waits: false,
        };
        for slice in slices {
            pool.devices
                .extend(devices(&slice.spec).map(|device| PoolDevice {
                    slice,
                    device,
                    charges: None,
                }));
        }
        pool.waits = pool.devices.iter().any(|d| {
            d.device
                .binding_conditions
                .as_ref()
                .is_some_and(|c| !c.is_empty())
        });
        if pool.problem.is_none() {
            let elsewhere = elsewhere.into_iter().flat_map(|s| devices(&s.spec));
            pool.problem = pool
                .check(&counters, elsewhere, features)
                .err()
                .map(PoolProblem::Invalid);
        }
        Some(pool)
    }

    /// Fills in the counters; the error says what makes the pool invalid.
    fn check(
        &mut self,
        counters: &[&'a ResourceSlice],
        elsewhere: impl Iterator<Item = &'a Device>,
        features: Features,
    ) -> Result<(), String> {
        let mut names: Vec<&str> = self
            .devices
            .iter()
            .map(|d| d.device.name.as_str())
            .collect();
        names.sort_unstable();
        if let Some(name) = names.windows(2).find_map(|pair| match pair {
            [a, b] if a == b => Some(*a),
            _ => None,
        }) {
            return Err(format!("duplicate device name {name}"));
        }
        if !features.partitionable_devices {
            // Counters mean nothing then; a device that consumes some is not usable, the others
            // are.
            return Ok(());
        }
        let table = Table::read(counters)?;
        for PoolDevice {
            device, charges, ..
        } in &mut self.devices
        {
            *charges = table.charges(device)?;
            self.consumers.extend(
                charges
                    .clone()
                    .map(|charges| (device.name.as_str(), charges)),
            );
        }
        for device in elsewhere {
            self.consumers.extend(
                table
                    .charges(device)?
                    .map(|charges| (device.name.as_str(), charges)),
            );
        }
        self.consumers.sort_by_key(|(name, _)| *name);
        self.counters = table.counters;
        Ok(())
    }

    /// Returns what the devices of a name consume; two can have the same, on different nodes.
    pub(crate) fn consumed_by(&self, device: &str) -> impl Iterator<Item = &Charges> {
        let first = self.consumers.partition_point(|(name, _)| *name < device);
        let rest = self.consumers.get(first..).unwrap_or_default();
        rest.iter()
            .take_while(move |(name, _)| *name == device)
            .map(|(_, charges)| charges)
    }

    /// `driver/pool`, for messages.
    pub(crate) fn id(&self) -> String {
        format!("{}/{}", self.driver, self.name)
    }

    /// Returns the fault of the pool, if it is invalid.
    pub(crate) fn invalid(&self) -> Option<&str> {
        match &self.problem {
            Some(PoolProblem::Invalid(problem)) => Some(problem),
            Some(PoolProblem::Incomplete { .. }) | None => None,
        }
    }
}
