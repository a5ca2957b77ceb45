//! The accounts of a search: counters of pools, capacities of shared devices.
//!
//! The devices of existing claims are taken off at the start; what the search picks is charged and
//! given back.

use crate::allocated::{AllocatedState, Holder, Uses};
use crate::pools::{Charge, Gathered, Pool};

/// Rest of the counters of every pool of the node.
#[derive(Debug)]
pub(crate) struct Ledger {
    pools: Vec<Account>,
}

#[derive(Debug)]
struct Account {
    /// By counter, in billionths.
    left: Vec<i128>,
    /// The first counter of which more is held than there is: then no device of the pool that
    /// charges any can be had.
    overdrawn: Option<usize>,
}

/// Why a device's counters cannot be charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Short {
    /// Not enough is left of a counter.
    Counter { charge: Charge, left: i128 },
    /// More of a counter is held than there is, which blocks all devices of the pool that consume
    /// counters.
    Overdrawn { counter: usize, left: i128 },
}

impl Ledger {
    /// Computes what the claims that are allocated leave.
    pub(crate) fn new(pools: &[Gathered<'_>], allocated: &AllocatedState) -> Self {
        Self {
            pools: pools
                .iter()
                .map(|pool| Account::new(pool, allocated))
                .collect(),
        }
    }

    /// Returns what keeps the charges from being made, if anything does.
    pub(crate) fn short(&self, pool: usize, charges: &[Charge]) -> Option<Short> {
        let account = self.pools.get(pool)?;
        if let Some(counter) = account.overdrawn {
            return Some(Short::Overdrawn {
                counter,
                left: account.left.get(counter).copied().unwrap_or(0),
            });
        }
        // Nothing else is overdrawn, and charging never overdraws: only what is charged now can be
        // short.
        charges.iter().find_map(|charge| {
            let left = account.left.get(charge.counter).copied().unwrap_or(0);
            (left < charge.amount).then_some(Short::Counter {
                charge: *charge,
                left,
            })
        })
    }

    /// Charges the counters of a pool.
    pub(crate) fn charge(&mut self, pool: usize, charges: &[Charge]) {
        self.change(pool, charges, i128::saturating_sub);
    }

    /// Takes a charge back.
    pub(crate) fn give_back(&mut self, pool: usize, charges: &[Charge]) {
        self.change(pool, charges, i128::saturating_add);
    }

    fn change(&mut self, pool: usize, charges: &[Charge], by: fn(i128, i128) -> i128) {
        let Some(account) = self.pools.get_mut(pool) else {
            return;
        };
        for charge in charges {
            if let Some(left) = account.left.get_mut(charge.counter) {
                *left = by(*left, charge.amount);
            }
        }
    }
}

impl Account {
    fn new(pool: &Pool<'_>, allocated: &AllocatedState) -> Self {
        let mut left: Vec<i128> = pool.counters.iter().map(|c| c.declared).collect();
        if left.is_empty() {
            return Self {
                left,
                overdrawn: None,
            };
        }
        // A device with many shares is in the map once and charged once.
        for (device, _) in allocated.of_pool(pool.driver, pool.name) {
            for charge in pool.consumed_by(device).flat_map(|charges| charges.iter()) {
                if let Some(left) = left.get_mut(charge.counter) {
                    *left = left.saturating_sub(charge.amount);
                }
            }
        }
        let overdrawn = left.iter().position(|left| *left < 0);
        Self { left, overdrawn }
    }
}

/// The claims whose devices consume a counter of a pool, each once.
pub(crate) fn holders(pool: &Pool<'_>, allocated: &AllocatedState, counter: usize) -> Vec<Holder> {
    let consumes = |device: &str| {
        pool.consumed_by(device)
            .flat_map(|c| c.iter())
            .any(|c| c.counter == counter && c.amount != 0)
    };
    let devices = allocated
        .of_pool(pool.driver, pool.name)
        .filter(|(device, _)| consumes(device));
    let mut holders: Vec<Holder> = devices
        .flat_map(|(_, uses)| uses.holders())
        .cloned()
        .collect();
    holders.sort();
    holders.dedup();
    holders
}

/// The shares of one device that the search has picked, beside those that exist.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shared {
    /// Shares that were picked.
    pub(crate) picked: usize,
    /// By capacity: what they consume together, in billionths.
    pub(crate) consumed: Vec<i128>,
}

impl Shared {
    /// Computes how much of capacity number `place` is left of `total`, after existing shares and
    /// picks.
    pub(crate) fn left(&self, place: usize, name: &str, total: i128, uses: Option<&Uses>) -> i128 {
        let existing = uses.map_or(0, |u| u.consumed(name));
        let picked = self.consumed.get(place).copied().unwrap_or(0);
        total.saturating_sub(existing).saturating_sub(picked)
    }

    /// Adds a share.
    pub(crate) fn add(&mut self, amounts: impl Iterator<Item = i128>) {
        self.picked += 1;
        for (place, amount) in amounts.enumerate() {
            match self.consumed.get_mut(place) {
                Some(sum) => *sum = sum.saturating_add(amount),
                None => self.consumed.push(amount),
            }
        }
    }

    /// Takes a share back.
    pub(crate) fn remove(&mut self, amounts: impl Iterator<Item = i128>) {
        self.picked -= 1;
        for (sum, amount) in self.consumed.iter_mut().zip(amounts) {
            *sum = sum.saturating_sub(amount);
        }
    }
}
