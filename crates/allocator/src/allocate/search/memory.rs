//! What the search remembers of the branches that failed.

use std::collections::{BTreeMap, BTreeSet};

use super::super::request::Mode;
use super::{At, Search, Verdict};

/// The states that failed.
pub(super) struct Memory {
    /// By candidate: devices of one kind are the same to every request.
    kinds: Vec<usize>,
    kind_count: usize,
    pub(super) failed: BTreeSet<Vec<usize>>,
}

impl Search<'_, '_> {
    /// Sorts the devices by what all requests think of them.
    pub(super) fn kinds(&mut self) -> Memory {
        let prepared = self.prepared;
        let requests = || prepared.claims.iter().flat_map(|c| &c.requests).flat_map(|r| &r.alternatives);
        let mut numbers = BTreeMap::new();
        let mut kinds = Vec::with_capacity(prepared.candidates.len());
        for (index, candidate) in prepared.candidates.iter().enumerate() {
            let mut signature = vec![usize::from(self.is_taken(candidate))];
            for request in requests() {
                // A device whose selector fails is like no other: whoever reaches it must meet the error.
                signature.push(match self.verdict(request, index) {
                    Ok(Verdict::Selected) => usize::from(self.untolerated(request, candidate).is_some()),
                    Ok(_) => 2,
                    Err(_) => 3 + index,
                });
            }
            let next = numbers.len();
            kinds.push(*numbers.entry(signature).or_insert(next));
        }
        Memory { kinds, kind_count: numbers.len(), failed: BTreeSet::new() }
    }

    /// All that the rest of the search depends on.
    pub(super) fn key(&self, memory: &Memory, at: At, alternative: usize, results: usize) -> Vec<usize> {
        let mut key = vec![at.claim, at.request, alternative, at.found, at.start, results];
        let requests = || self.prepared.claims.iter().flat_map(|c| &c.requests).flat_map(|r| &r.alternatives);
        if requests().any(|r| r.admin || r.mode == Mode::All) {
            // Who has which device matters then, not only how many of a kind are left.
            let used = self.taking.iter().enumerate().filter(|(_, claims)| !claims.is_empty());
            for (index, claims) in used {
                key.push(index);
                key.push(claims.len());
                key.extend(claims);
            }
            return key;
        }
        // Used devices by kind: of all, and of those that this request can still reach.
        let mut counts = vec![0; memory.kind_count * 2];
        for (index, (claims, kind)) in self.taking.iter().zip(&memory.kinds).enumerate() {
            if claims.is_empty() {
                continue;
            }
            let reachable = if index >= at.start { memory.kind_count } else { 0 };
            for slot in [*kind, reachable + *kind] {
                if let Some(count) = counts.get_mut(slot) {
                    *count += 1;
                }
            }
        }
        key.extend(counts);
        key
    }
}
