//! Devices that existing claims hold.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::resource::v1::ResourceClaim;

use divvy_model::Quantity;

/// A device of the cluster: driver, pool, name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// The driver that publishes it.
    pub driver: String,
    /// The pool it is in.
    pub pool: String,
    /// Its name, unique in the pool.
    pub device: String,
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.driver, self.pool, self.device)
    }
}

/// A claim that holds a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Its namespace; empty where the claim has none.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl Holder {
    /// The name of a claim.
    pub fn of(claim: &ResourceClaim) -> Self {
        Self {
            namespace: claim.metadata.namespace.clone().unwrap_or_default(),
            name: claim.metadata.name.clone().unwrap_or_default(),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

/// The users of one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Uses {
    /// Claims that hold it alone.
    dedicated: Vec<Holder>,
    shares: Vec<Share>,
}

/// A claim's share of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Share {
    id: String,
    by: Holder,
    /// Amount that it consumes of each capacity, in billionths.
    consumed: BTreeMap<String, i128>,
}

impl Uses {
    /// Says whether any claim holds a share of the device.
    pub(crate) fn is_shared(&self) -> bool {
        !self.shares.is_empty()
    }

    /// Says whether any claim has a share with the id.
    pub(crate) fn has_share(&self, id: &str) -> bool {
        self.shares.iter().any(|s| s.id == id)
    }

    /// Computes how much of a capacity all shares consume, in billionths.
    pub(crate) fn consumed(&self, capacity: &str) -> i128 {
        let amounts = self.shares.iter().filter_map(|s| s.consumed.get(capacity));
        amounts.fold(0, |sum, amount| sum.saturating_add(*amount))
    }

    /// The claims that hold the device or a share of it.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Holder> {
        self.dedicated
            .iter()
            .chain(self.shares.iter().map(|s| &s.by))
    }
}

/// Devices that existing claims hold, collected from their allocations.
///
/// Admin access does not count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllocatedState {
    /// By driver, pool and device name, so that looking up needs no copies.
    devices: BTreeMap<String, BTreeMap<String, BTreeMap<String, Uses>>>,
}

impl AllocatedState {
    /// The allocations of all `claims`; a claim without one is passed over.
    pub fn from_claims<'c>(claims: impl IntoIterator<Item = &'c ResourceClaim>) -> Self {
        let mut state = Self::default();
        for claim in claims {
            state.add(claim);
        }
        state
    }

    /// Adds the allocation of one claim.
    pub fn add(&mut self, claim: &ResourceClaim) {
        let allocation = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
        let results = allocation
            .and_then(|a| a.devices.as_ref())
            .and_then(|d| d.results.as_ref());
        for result in results
            .into_iter()
            .flatten()
            .filter(|r| r.admin_access != Some(true))
        {
            let pools = self.devices.entry(result.driver.clone()).or_default();
            let devices = pools.entry(result.pool.clone()).or_default();
            let uses = devices.entry(result.device.clone()).or_default();
            let Some(id) = &result.share_id else {
                uses.dedicated.push(Holder::of(claim));
                continue;
            };
            let consumed = result.consumed_capacity.iter().flatten();
            // No server stores an amount that is none; if it did, the safe reading is that nothing
            // is left.
            let consumed = consumed.map(|(name, raw)| {
                (
                    name.clone(),
                    raw.0
                        .parse::<Quantity>()
                        .map_or(i128::MAX / 4, |q| q.nanos()),
                )
            });
            uses.shares.push(Share {
                id: id.clone(),
                by: Holder::of(claim),
                consumed: consumed.collect(),
            });
        }
    }

    /// The claims that hold a device, alone or a share of it.
    pub fn holders(&self, driver: &str, pool: &str, device: &str) -> Vec<&Holder> {
        self.uses(driver, pool, device)
            .into_iter()
            .flat_map(Uses::holders)
            .collect()
    }

    /// Says whether a device cannot be given to another claim: held alone or, without the feature,
    /// shared
    /// at all.
    pub(crate) fn is_taken(
        &self,
        driver: &str,
        pool: &str,
        device: &str,
        shares_count: bool,
    ) -> bool {
        self.uses(driver, pool, device)
            .is_some_and(|u| shares_count || !u.dedicated.is_empty())
    }

    /// The users of a device, if it has any.
    pub(crate) fn uses(&self, driver: &str, pool: &str, device: &str) -> Option<&Uses> {
        self.devices.get(driver)?.get(pool)?.get(device)
    }

    /// The devices of a pool that have users.
    pub(crate) fn of_pool(&self, driver: &str, pool: &str) -> impl Iterator<Item = (&str, &Uses)> {
        let devices = self.devices.get(driver).and_then(|pools| pools.get(pool));
        devices
            .into_iter()
            .flatten()
            .map(|(name, uses)| (name.as_str(), uses))
    }
}
