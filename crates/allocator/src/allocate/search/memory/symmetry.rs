//! What of the devices is the same but for names: groups, their classes, and kinds that can be exchanged.

use std::collections::BTreeMap;

use super::{CounterId, Kind, number};

/// Puts the kinds together that draw on the same counters, in the order of their first devices.
pub(super) fn grouped(kinds: Vec<Kind>) -> Vec<Vec<Kind>> {
    let mut leader: Vec<usize> = (0..kinds.len()).collect();
    let mut first_user: BTreeMap<CounterId, usize> = BTreeMap::new();
    for (place, kind) in kinds.iter().enumerate() {
        for (counter, _) in &kind.charges {
            let other = *first_user.entry(*counter).or_insert(place);
            let (a, b) = (lead(&leader, other), lead(&leader, place));
            if let Some(slot) = leader.get_mut(a.max(b)) {
                *slot = a.min(b);
            }
        }
    }
    let mut groups: BTreeMap<usize, Vec<Kind>> = BTreeMap::new();
    for (place, kind) in kinds.into_iter().enumerate() {
        groups.entry(lead(&leader, place)).or_default().push(kind);
    }
    groups.into_values().collect()
}

fn lead(leader: &[usize], mut place: usize) -> usize {
    while let Some(next) = leader.get(place).copied().filter(|next| *next != place) {
        place = next;
    }
    place
}

/// A group without the names of its counters: they are numbered as they come.
pub(super) fn description(kinds: &[Kind], left: &BTreeMap<CounterId, i128>) -> Vec<i128> {
    let mut numbers: BTreeMap<CounterId, usize> = BTreeMap::new();
    let mut amounts = Vec::new();
    let mut text = Vec::new();
    for kind in kinds {
        text.extend([number(kind.signature.len()), number(kind.members.len()), number(kind.charges.len())]);
        text.extend(&kind.signature);
        for (counter, amount) in &kind.charges {
            let next = numbers.len();
            let local = *numbers.entry(*counter).or_insert(next);
            if local == next {
                amounts.push(left.get(counter).copied().unwrap_or(0));
            }
            text.extend([number(local), *amount]);
        }
    }
    text.extend(amounts);
    text
}

/// The places of the kinds, those together that can be exchanged without anybody noticing.
pub(super) fn orbits(kinds: &[Kind], left: &BTreeMap<CounterId, i128>) -> Vec<Vec<usize>> {
    let mut orbits: Vec<Vec<usize>> = Vec::new();
    for (place, kind) in kinds.iter().enumerate() {
        let same = |orbit: &&mut Vec<usize>| {
            // Exchanging is transitive: one member speaks for all.
            let first = orbit.first().and_then(|first| kinds.get(*first));
            first.is_some_and(|first| exchangeable(first, kind, kinds, left))
        };
        match orbits.iter_mut().find(same) {
            Some(orbit) => orbit.push(place),
            None => orbits.push(vec![place]),
        }
    }
    orbits
}

/// Whether two kinds are the same once the counters that only one of them charges change places too.
fn exchangeable(a: &Kind, b: &Kind, kinds: &[Kind], left: &BTreeMap<CounterId, i128>) -> bool {
    if a.signature != b.signature || a.members.len() != b.members.len() || a.shared != b.shared {
        return false;
    }
    let only = |of: &Kind, other: &Kind| {
        of.charges.iter().filter(|charge| !other.charges.contains(charge)).copied().collect::<Vec<_>>()
    };
    let (of_a, of_b) = (only(a, b), only(b, a));
    let charge = |kind: &Kind, counter: CounterId| {
        kind.charges.iter().find(|(id, _)| *id == counter).map_or(0, |(_, amount)| *amount)
    };
    // Two that charge one counter differently are not found to be the same: it would have to stand for itself.
    let pairs = of_a.iter().zip(&of_b);
    of_a.len() == of_b.len()
        && pairs.clone().all(|((c, x), (d, y))| {
            x == y && left.get(c) == left.get(d) && charge(b, *c) == 0 && charge(a, *d) == 0
        })
        && kinds
            .iter()
            .filter(|k| !std::ptr::eq(*k, a) && !std::ptr::eq(*k, b))
            .all(|other| pairs.clone().all(|((c, _), (d, _))| charge(other, *c) == charge(other, *d)))
}
