//! Published devices beside what claims have of them: what is granted, where on its GPU, and what
//! is free.

use std::collections::BTreeMap;

use divvy_api::names::{attributes, capacity, counters};
use divvy_model::{DeviceKind, Sharing, TargetKind};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;

use crate::format::total;
use crate::status::read::{CLAIMS, SLICES};
use crate::status::snapshot::Snapshot;
use divvy_why::device::{amount, kind, memory, percent, share_memory, slot, text};
use divvy_why::driver::own;

/// A device by pool and name.
type Id<'a> = (&'a str, &'a str);

/// Our devices.
pub(super) struct Published<'a> {
    snapshot: &'a Snapshot,
    devices: BTreeMap<Id<'a>, &'a Device>,
    /// Counters by pool, set and name: all of it, and what allocated devices have.
    counters: BTreeMap<(&'a str, &'a str, &'a str), (i128, i128)>,
    given: BTreeMap<Id<'a>, Vec<Given<'a>>>,
}

/// A device that a claim was allocated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) claim: &'a ResourceClaim,
    pub(super) admin: bool,
    /// Memory of a share.
    memory: Option<u64>,
    /// Limit of it, where the driver keeps one.
    limit: Option<u64>,
    /// Percent of its GPU, of a share that is given out so.
    percent: Option<u64>,
    /// True if its users share the whole GPU by MPS.
    by_mps: bool,
}

/// Devices that a pod could still get. Each figure stands alone: a free GPU counts in all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Free {
    pub whole_gpus: u32,
    /// The profile of the largest partition, such as `3g.40gb`.
    pub largest_partition: Option<String>,
    /// Memory for shares, in bytes, on all GPUs together.
    pub share_memory: u64,
    pub largest_share: u64,
}

impl<'a> Published<'a> {
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let mut newest: BTreeMap<&str, i64> = BTreeMap::new();
        let ours = || {
            snapshot
                .slices
                .iter()
                .map(|slice| &slice.spec)
                .filter(|spec| spec.driver == snapshot.driver)
        };
        for spec in ours() {
            let at = newest.entry(&spec.pool.name).or_default();
            *at = spec.pool.generation.max(*at);
        }
        let mut all = Self {
            snapshot,
            devices: BTreeMap::new(),
            counters: BTreeMap::new(),
            given: BTreeMap::new(),
        };
        for spec in
            ours().filter(|spec| newest.get(spec.pool.name.as_str()) == Some(&spec.pool.generation))
        {
            let pool = spec.pool.name.as_str();
            all.devices.extend(
                spec.devices
                    .iter()
                    .flatten()
                    .map(|device| ((pool, device.name.as_str()), device)),
            );
            for set in spec.shared_counters.iter().flatten() {
                let totals = set.counters.iter().map(|(name, counter)| {
                    (
                        (pool, set.name.as_str(), name.as_str()),
                        (units(&counter.value), 0),
                    )
                });
                all.counters.extend(totals);
            }
        }
        for claim in &snapshot.claims {
            all.take(claim);
        }
        all
    }

    fn take(&mut self, claim: &'a ResourceClaim) {
        let status = claim.status.as_ref();
        let Some(allocation) = status.and_then(|status| status.allocation.as_ref()) else {
            return;
        };
        let devices = allocation.devices.as_ref();
        let results = devices
            .and_then(|devices| devices.results.as_ref())
            .into_iter()
            .flatten();
        for result in results.filter(|result| result.driver == self.snapshot.driver) {
            let id = (result.pool.as_str(), result.device.as_str());
            let consumed_capacity = result.consumed_capacity.as_ref();
            let device = self.devices.get(&id).copied();
            let memory = consumed_capacity.and_then(|consumed| share_memory(device, consumed));
            let percent = consumed_capacity.and_then(percent);
            let admin = result.admin_access == Some(true);
            let given = self.given.entry(id).or_default();
            // A share draws on its counters once, whatever the number of its claims.
            let first = given.iter().all(|given| given.admin);
            given.push(Given {
                claim,
                admin,
                memory,
                limit: crate::limit::of_share(allocation, result, device),
                percent,
                by_mps: crate::limit::of_mps_server(allocation, result).is_some(),
            });
            if admin || !first {
                continue;
            }
            for (key, amount) in self
                .devices
                .get(&id)
                .into_iter()
                .flat_map(|device| consumed(id.0, device))
            {
                if let Some((_, taken)) = self.counters.get_mut(&key) {
                    *taken += amount;
                }
            }
        }
    }

    /// Devices of a pool that claims have.
    pub(super) fn given(&self, pool: &str) -> impl Iterator<Item = (&'a str, &Given<'a>)> {
        let of_pool = self.given.iter().filter(move |((of, _), _)| *of == pool);
        of_pool.flat_map(|((_, device), given)| given.iter().map(move |given| (*device, given)))
    }

    /// The memory that a claim has of a device: its shares together, or all that the device has.
    pub(super) fn granted(&self, id: Id<'_>, claim: &str) -> Option<u64> {
        let given = self.given.get(&id).into_iter().flatten();
        let of_claim: Vec<_> = given
            .filter(|given| given.claim.metadata.uid.as_deref() == Some(claim))
            .collect();
        let shares: Vec<u64> = of_claim.iter().filter_map(|given| given.memory).collect();
        let device = self.devices.get(&id)?;
        match shares.as_slice() {
            [] if device.allow_multiple_allocations == Some(true) => None,
            [] => memory(device),
            shares => Some(total(shares.iter().copied())),
        }
    }

    /// The limit of a claim's memory of a device, of its shares together; none where one has none.
    pub(super) fn limit(&self, id: Id<'_>, claim: &str) -> Option<u64> {
        let given = self.given.get(&id)?.iter();
        let mut of_claim = given
            .filter(|given| given.claim.metadata.uid.as_deref() == Some(claim))
            .peekable();
        of_claim.peek()?;
        let limits: Option<Vec<u64>> = of_claim.map(|given| given.limit).collect();
        limits.map(total)
    }

    /// Returns whether the users of a claim share its whole GPU by MPS.
    pub(super) fn is_by_mps(&self, id: Id<'_>, claim: &str) -> bool {
        let mut given = self.given.get(&id).into_iter().flatten();
        given.any(|given| given.by_mps && given.claim.metadata.uid.as_deref() == Some(claim))
    }

    /// The percent of a GPU that a claim has in shares, where it is given out so.
    pub(super) fn percent(&self, id: Id<'_>, claim: &str) -> Option<u64> {
        let given = self.given.get(&id).into_iter().flatten();
        let percents: Option<Vec<u64>> = given
            .filter(|given| given.claim.metadata.uid.as_deref() == Some(claim))
            .map(|given| given.percent)
            .collect();
        percents.map(total)
    }

    /// The memory of a GPU.
    pub(super) fn memory_of(&self, pool: &str, ordinal: u32) -> Option<u64> {
        let names = Sharing::ALL.map(|sharing| DeviceKind::of_gpu(ordinal, sharing).to_string());
        names
            .iter()
            .find_map(|name| memory(self.devices.get(&(pool, name.as_str()))?))
    }

    /// The memory of a device.
    pub(super) fn memory(&self, id: Id<'_>) -> Option<u64> {
        memory(self.devices.get(&id)?)
    }

    /// The MIG profile of a partition.
    pub(super) fn profile(&self, id: Id<'_>) -> Option<&'a str> {
        let device = self.devices.get(&id)?;
        text(device, attributes::PROFILE)
    }

    /// Where on its GPU a partition is, as parts of the GPU's memory slices.
    pub(super) fn place(&self, id: Id<'_>, start: u32) -> Option<(f64, f64)> {
        let device = self.devices.get(&id)?;
        let slices = |name: &str| {
            name.starts_with(counters::MEMORY_SLICE) || name.starts_with(counters::MEMORY_SLICES)
        };
        let uses = consumed(id.0, device).filter(|((_, _, name), _)| slices(name));
        let size: i128 = uses.map(|(_, amount)| amount).sum();
        let set = device
            .consumes_counters
            .as_ref()?
            .first()?
            .counter_set
            .as_str();
        let of_set = self
            .counters
            .iter()
            .filter(|((pool, of, name), _)| *pool == id.0 && *of == set && slices(name));
        let all: i128 = of_set.map(|(_, (total, _))| total).sum();
        #[expect(clippy::cast_precision_loss, reason = "some dozens of slices")]
        let part = |slices: i128| (slices as f64 / all as f64).min(1.0);
        (size > 0 && all > 0).then(|| (part(i128::from(start)), part(i128::from(start) + size)))
    }

    /// Counts what is free; `None` where devices or claims cannot all be read.
    pub(super) fn free(&self) -> Option<Free> {
        if [SLICES, CLAIMS]
            .iter()
            .any(|kind| self.snapshot.lacks(kind))
        {
            return None;
        }
        let mut free = Free::default();
        let mut largest = 0;
        // Shares of two kinds are of the same memory: the most of them counts.
        let mut shares: BTreeMap<(&str, u32), u64> = BTreeMap::new();
        for (id, device) in self
            .devices
            .iter()
            .filter(|(id, device)| self.is_free(**id, device))
        {
            let memory = memory(device).unwrap_or(0);
            let Some(kind) = kind(id.1) else {
                continue;
            };
            let form = kind.form();
            match (form.target, form.sharing) {
                (TargetKind::Gpu, Sharing::Exclusive) => free.whole_gpus += 1,
                (TargetKind::Partition, Sharing::Exclusive) if memory > largest => {
                    largest = memory;
                    free.largest_partition = self.profile(*id).map(str::to_owned);
                }
                (TargetKind::Gpu, sharing) if sharing.is_shared() => {
                    let given = self.given.get(id).into_iter().flatten();
                    let given = total(given.filter_map(|given| given.memory));
                    let (all, largest) = match slots(device) {
                        Some((slot, slots)) => (slot.saturating_mul(slots), slot),
                        None => (memory, memory),
                    };
                    let left = all.saturating_sub(given);
                    let of_gpu = shares.entry((id.0, kind.ordinal())).or_default();
                    *of_gpu = left.max(*of_gpu);
                    free.largest_share = free.largest_share.max(left.min(largest));
                }
                // Shares of partitions have the memory of partitions: it is not counted again.
                _ => {}
            }
        }
        free.share_memory = total(shares.into_values());
        Some(free)
    }

    fn is_free(&self, id: Id<'_>, device: &Device) -> bool {
        let tainted = device
            .taints
            .iter()
            .flatten()
            .any(|taint| taint.effect != "None");
        let given = self
            .given
            .get(&id)
            .is_some_and(|given| given.iter().any(|given| !given.admin));
        if tainted || given {
            return !tainted && device.allow_multiple_allocations == Some(true);
        }
        consumed(id.0, device).all(|(key, amount)| {
            self.counters
                .get(&key)
                .is_some_and(|(total, taken)| taken + amount <= *total)
        })
    }
}

/// Returns the memory of a slot of MPS shares, and the number of slots.
fn slots(device: &Device) -> Option<(u64, u64)> {
    let slots = own(device.capacity.as_ref()?, capacity::SLOTS)?;
    Some((slot(device).0?, amount(&slots.value.0)?))
}

fn consumed<'d>(
    pool: &'d str,
    device: &'d Device,
) -> impl Iterator<Item = ((&'d str, &'d str, &'d str), i128)> {
    device
        .consumes_counters
        .iter()
        .flatten()
        .flat_map(move |uses| {
            let counters = uses.counters.iter();
            counters.map(move |(name, counter)| {
                (
                    (pool, uses.counter_set.as_str(), name.as_str()),
                    units(&counter.value),
                )
            })
        })
}

/// A counter that cannot be read counts nothing: the scheduler refuses such a slice.
fn units(quantity: &Quantity) -> i128 {
    quantity
        .0
        .parse::<divvy_model::Quantity>()
        .map_or(0, |quantity| quantity.rounded_up())
}
