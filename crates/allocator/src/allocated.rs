//! What existing claims hold.

use std::collections::BTreeMap;
use std::fmt;

use k8s_openapi::api::resource::v1::ResourceClaim;

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
struct Uses {
    /// Claims that hold it alone.
    dedicated: Vec<Holder>,
    /// Claims that hold a share of it, with the share's id.
    shared: BTreeMap<String, Holder>,
}

/// What existing claims hold, collected from their allocations.
///
/// Admin access does not count. Shares are recorded, but shared devices are not allocated yet.
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
        let results = allocation.and_then(|a| a.devices.as_ref()).and_then(|d| d.results.as_ref());
        for result in results.into_iter().flatten().filter(|r| r.admin_access != Some(true)) {
            let pools = self.devices.entry(result.driver.clone()).or_default();
            let devices = pools.entry(result.pool.clone()).or_default();
            let uses = devices.entry(result.device.clone()).or_default();
            match &result.share_id {
                Some(share) => {
                    uses.shared.insert(share.clone(), Holder::of(claim));
                }
                None => uses.dedicated.push(Holder::of(claim)),
            }
        }
    }

    /// The claims that hold a device: alone or, for `shares`, a part of it.
    pub fn holders(&self, driver: &str, pool: &str, device: &str) -> Vec<&Holder> {
        let uses = self.uses(driver, pool, device);
        uses.into_iter().flat_map(|u| u.dedicated.iter().chain(u.shared.values())).collect()
    }

    /// Whether a device cannot be given to anyone else: held alone or, without the feature, shared at all.
    pub(crate) fn is_taken(&self, driver: &str, pool: &str, device: &str, shares_count: bool) -> bool {
        self.uses(driver, pool, device).is_some_and(|u| shares_count || !u.dedicated.is_empty())
    }

    fn uses(&self, driver: &str, pool: &str, device: &str) -> Option<&Uses> {
        self.devices.get(driver)?.get(pool)?.get(device)
    }
}
