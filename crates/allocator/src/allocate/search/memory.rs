//! What the search remembers of the branches that failed.
//!
//! A state is all that the rest of the search depends on: where it stands, what is left of devices, counters and
//! capacities, and what the constraints have seen. Two states that differ only in names are one: devices of one
//! *kind* are the same to every request, and a *group* (devices that draw on the same counters, such as all that a
//! GPU can become) can stand for another of the same class. Counters that cannot run out are left out of it.

mod symmetry;

use std::collections::{BTreeMap, BTreeSet};

use super::super::constraints::Value;
use super::super::request::{Mode, Request};
use super::{At, Search, Verdict};
use crate::allocated::Uses;
use crate::pools::Charge;

/// A counter of the node: number of its pool, number in it.
type CounterId = (usize, usize);

/// The states that failed.
pub(super) struct Memory {
    groups: Vec<Group>,
    pub(super) failed: BTreeSet<Vec<i128>>,
}

/// Kinds of devices that draw on the same counters.
struct Group {
    /// Groups of one class are the same but for the names.
    class: i128,
    kinds: Vec<Kind>,
    /// Places of kinds that can stand for one another, as placements of one profile often can.
    orbits: Vec<Vec<usize>>,
}

/// Candidates that are the same to every request; a device that can be shared is a kind of its own.
struct Kind {
    signature: Vec<i128>,
    /// What each of them charges, of counters that can run out.
    charges: Vec<(CounterId, i128)>,
    shared: bool,
    members: Vec<usize>,
}

/// Whether any request could get a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Opinion {
    Never,
    Perhaps,
    /// Looking at it is an error.
    Error,
}

impl<'a> Search<'_, 'a> {
    /// Sorts the devices by what all requests think of them.
    pub(super) fn kinds(&mut self) -> Memory {
        let signatures: Vec<_> = (0..self.prepared.candidates.len()).map(|i| self.signature(i)).collect();
        let scarce = self.scarce(&signatures);
        let mut kinds: Vec<Kind> = Vec::new();
        let mut numbers = BTreeMap::new();
        for (index, signature) in signatures.into_iter().enumerate() {
            let (Some(signature), Some(candidate)) = (signature, self.prepared.candidates.get(index)) else {
                continue;
            };
            let charges = self.first_charges(index).unwrap_or_default().iter();
            let charges: Vec<(CounterId, i128)> = charges
                .map(|c| ((candidate.home, c.counter), c.amount))
                .filter(|(id, _)| scarce.contains_key(id))
                .collect();
            let shared = candidate.shared;
            let own = if shared { index } else { usize::MAX };
            let number = *numbers.entry((signature.clone(), charges.clone(), own)).or_insert(kinds.len());
            match kinds.get_mut(number) {
                Some(kind) => kind.members.push(index),
                None => kinds.push(Kind { signature, charges, shared, members: vec![index] }),
            }
        }
        let mut classes = BTreeMap::new();
        let groups = symmetry::grouped(kinds).into_iter().map(|kinds| {
            let next = number(classes.len());
            let class = classes.entry(symmetry::description(&kinds, &scarce));
            let (class, orbits) = class.or_insert_with(|| (next, symmetry::orbits(&kinds, &scarce))).clone();
            Group { class, kinds, orbits }
        });
        Memory { groups: groups.collect(), failed: BTreeSet::new() }
    }

    /// All that requests and constraints can tell about a device; `None` for one that nobody can get.
    fn signature(&mut self, index: usize) -> Option<Vec<i128>> {
        let prepared = self.prepared;
        let candidate = prepared.candidates.get(index)?;
        let mut signature = vec![i128::from(candidate.shared)];
        let mut wanted = Opinion::Never;
        for request in prepared.claims.iter().flat_map(|c| &c.requests).flat_map(|r| &r.alternatives) {
            wanted = wanted.max(self.opinion(request, index, &mut signature));
        }
        let overdrawn = || {
            let initial = |c: &Charge| self.ledger.initial(candidate.home, c.counter) < c.amount;
            self.first_charges(index).is_some_and(|charges| charges.iter().any(initial))
        };
        if self.is_taken(candidate) || wanted == Opinion::Never || (wanted == Opinion::Perhaps && overdrawn())
        {
            return None;
        }
        if wanted == Opinion::Error {
            // Like no other: whoever reaches it must meet the error.
            signature.push(number(index));
        }
        if candidate.shared {
            let uses = self.uses(candidate);
            signature.push(i128::from(uses.is_some_and(Uses::is_shared)));
            let capacities = candidate.device.capacity.iter().flatten();
            signature.extend(capacities.map(|(name, _)| uses.map_or(0, |u| u.consumed(name))));
        }
        for claim in 0..prepared.claims.len() {
            let constraints = prepared.claims.get(claim).map_or(0, |c| c.constraints.len());
            for constraint in 0..constraints {
                let value = self.value(claim, constraint, index);
                signature.push(value.map_or(-1, number));
                let state = self.constraints.get(claim).and_then(|c| c.get(constraint));
                if value.zip(state).is_some_and(|(v, state)| state.list(v).contains(&Value::Unknown)) {
                    // With what cannot be compared, the order of picks matters.
                    signature.push(number(index));
                }
            }
        }
        Some(signature)
    }

    /// What a request thinks of a device, added as numbers.
    fn opinion(&mut self, request: &Request<'a>, index: usize, signature: &mut Vec<i128>) -> Opinion {
        let prepared = self.prepared;
        let Some(candidate) = prepared.candidates.get(index) else { return Opinion::Never };
        let place = signature.len();
        signature.push(0);
        let selected = match self.verdict(request, index) {
            Ok(verdict) => verdict == Verdict::Selected,
            Err(_) => return Opinion::Error,
        };
        if !selected {
            return Opinion::Never;
        }
        if prepared.features.consumable_capacity && (request.capacity.is_some() || candidate.shared) {
            if self.demand(request, index).is_err() {
                return Opinion::Error;
            }
            let Some(Some(Ok(demands))) = self.demands.get(request.id).and_then(|d| d.get(index)) else {
                return Opinion::Never;
            };
            signature.push(number(demands.len()));
            signature.extend(demands.iter().flat_map(|d| [d.amount.nanos(), d.total.nanos()]));
        }
        if !candidate.shared {
            match self.lacking(request, index) {
                Ok(None) => {}
                Ok(Some(_)) => return Opinion::Never,
                Err(_) => return Opinion::Error,
            }
        }
        if self.untolerated(request, candidate).is_some() {
            return Opinion::Never;
        }
        if let Some(slot) = signature.get_mut(place) {
            *slot = 1;
        }
        Opinion::Perhaps
    }

    /// The counters that can run out: all devices together would charge more than is left.
    fn scarce(&self, signatures: &[Option<Vec<i128>>]) -> BTreeMap<CounterId, i128> {
        let mut sums: BTreeMap<CounterId, i128> = BTreeMap::new();
        for (index, candidate) in self.prepared.candidates.iter().enumerate() {
            if signatures.get(index).is_none_or(Option::is_none) {
                continue;
            }
            for charge in self.first_charges(index).unwrap_or_default() {
                let sum = sums.entry((candidate.home, charge.counter)).or_default();
                *sum = sum.saturating_add(charge.amount);
            }
        }
        let left = |(pool, counter): CounterId| self.ledger.initial(pool, counter);
        sums.into_iter().filter(|(id, sum)| *sum > left(*id)).map(|(id, _)| (id, left(id))).collect()
    }

    /// All that the rest of the search depends on.
    pub(super) fn key(&self, memory: &Memory, at: At, alternative: usize, results: usize) -> Vec<i128> {
        let mut key: Vec<i128> =
            [at.claim, at.request, alternative, at.found, results].into_iter().map(number).collect();
        let constraints = self.prepared.claims.get(at.claim).map(|c| &c.constraints);
        let states = self.constraints.get(at.claim).into_iter().flatten();
        for (constraint, state) in constraints.into_iter().flatten().zip(states) {
            state.digest(constraint.kind, &mut key);
        }
        let requests = || self.prepared.claims.iter().flat_map(|c| &c.requests).flat_map(|r| &r.alternatives);
        if requests().any(|r| r.admin || r.mode == Mode::All) {
            self.exactly(at, &mut key);
            return key;
        }
        let mut groups: Vec<Vec<i128>> = memory
            .groups
            .iter()
            .map(|group| {
                let mut state = vec![group.class];
                for orbit in &group.orbits {
                    let kinds = orbit.iter().filter_map(|place| group.kinds.get(*place));
                    let mut states: Vec<Vec<i128>> =
                        kinds.map(|kind| self.state_of(kind, at.start)).collect();
                    states.sort_unstable();
                    state.extend(states.into_iter().flatten());
                }
                state
            })
            .collect();
        groups.sort_unstable();
        key.extend(groups.into_iter().flatten());
        key
    }

    /// What is left of a kind: of all, and of those that this request can still reach.
    fn state_of(&self, kind: &Kind, start: usize) -> Vec<i128> {
        if kind.shared {
            let Some(index) = kind.members.first() else { return Vec::new() };
            let mut state = vec![i128::from(*index >= start)];
            if let Some(shared) = self.shared.get(*index) {
                state.extend([i128::from(shared.picked > 0), number(shared.consumed.len())]);
                state.extend(&shared.consumed);
            }
            return state;
        }
        let free = |index: &&usize| self.taking.get(**index).is_some_and(Vec::is_empty);
        let (mut all, mut reachable) = (0, 0);
        for index in kind.members.iter().filter(free) {
            all += 1;
            reachable += i128::from(*index >= start);
        }
        vec![all, reachable]
    }

    /// Who has which device, where that matters and not only how many of a kind are left.
    fn exactly(&self, at: At, key: &mut Vec<i128>) {
        key.push(number(at.start));
        for (index, (claims, shared)) in self.taking.iter().zip(&self.shared).enumerate() {
            if !claims.is_empty() {
                key.extend([number(index), number(claims.len())]);
                key.extend(claims.iter().map(|c| number(*c)));
            }
            if shared.picked > 0 {
                key.extend([number(index), -1, number(shared.consumed.len())]);
                key.extend(&shared.consumed);
            }
        }
    }
}

fn number(count: usize) -> i128 {
    i128::try_from(count).unwrap_or(i128::MAX)
}
