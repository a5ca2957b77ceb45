//! Counters that the forms of one GPU draw on: its memory slices one by one, and the rest by
//! number, so that the scheduler gives out exactly what the hardware can hold at once.

use std::collections::BTreeMap;

use divvy_api::names::counters as names;
use divvy_forms::partition::{RESOURCES, amounts};
use divvy_model::mig::{GpuInstanceProfile, MigCapabilities, Placement};

use crate::validate::MAX_COUNTERS;
use crate::{Amount, CounterSet, CounterUse};

/// Name of a GPU's counter set.
pub(crate) fn set_name(ordinal: u32) -> String {
    format!("gpu-{ordinal}")
}

/// The counters of one GPU.
#[derive(Debug)]
pub(crate) struct Budget {
    set: String,
    /// By [`RESOURCES`]; `None` where nothing is counted.
    totals: [Option<Amount>; 7],
    /// Names of the memory slices.
    slices: Vec<String>,
    /// The most of each resource that a profile has.
    pub(crate) largest: [Amount; 7],
    /// Counters that would refuse what fits: name, what fits together has, what the largest profile
    /// has.
    pub(crate) dropped: Vec<(&'static str, u64, u64)>,
}

impl Budget {
    /// The number of memory slices that a counter set has room for.
    pub(crate) const MAX_SLICES: u32 = {
        #[expect(clippy::cast_possible_truncation, reason = "32 less 7")]
        let max = (MAX_COUNTERS - RESOURCES.len()) as u32;
        max
    };

    /// The counters of a GPU: of each resource as much as the profile with the most has (the whole
    /// GPU has more on some boards, but not in MIG mode). `None` if there are more memory slices
    /// than a set has room for.
    pub(crate) fn new(ordinal: u32, caps: &MigCapabilities) -> Option<Self> {
        let slices = caps.memory_slices();
        if slices > Self::MAX_SLICES {
            return None;
        }
        let per_profile: Vec<_> = caps
            .profiles()
            .iter()
            .map(|profile| (profile, amounts(profile)))
            .collect();
        // First the most of each resource that a profile has: the total that the set would have.
        let mut largest = amounts_of_nothing();
        for (_, amounts) in &per_profile {
            for (most, amount) in largest.iter_mut().zip(amounts) {
                if amount.value() > most.value() {
                    *most = *amount;
                }
            }
        }
        // Then a check of each total against arrangements that the hardware takes. A counter that
        // would refuse one of them is left out: memory slices still exclude what overlaps.
        let mut totals = [None; 7];
        let mut dropped = Vec::new();
        for (index, (((counter, _), most), total)) in
            RESOURCES.iter().zip(largest).zip(&mut totals).enumerate()
        {
            let of = |amounts: &[Amount; 7]| amounts.get(index).map_or(0, |amount| amount.value());
            let needed = most_at_once(caps, &per_profile, slices, of);
            match most.value() {
                // Nothing is there to be short of.
                0 => {}
                value if needed > value => dropped.push((*counter, needed, value)),
                _ => *total = Some(most),
            }
        }
        let slices = (0..slices)
            .map(|slice| format!("{}{slice}", names::MEMORY_SLICE))
            .collect();
        Some(Self {
            set: set_name(ordinal),
            totals,
            slices,
            largest,
            dropped,
        })
    }

    /// The set to publish.
    pub(crate) fn counter_set(&self) -> CounterSet {
        CounterSet {
            name: self.set.clone(),
            counters: self.everything(),
        }
    }

    /// Returns what a partition takes.
    pub(crate) fn partition(
        &self,
        profile: &GpuInstanceProfile,
        placement: Placement,
    ) -> CounterUse {
        let of_profile = RESOURCES.iter().zip(&self.totals).zip(amounts(profile));
        let by_number = of_profile
            // Only counters that the set has: one unknown counter makes the whole pool invalid for
            // the scheduler.
            .filter(|((_, total), amount)| total.is_some() && amount.value() > 0)
            .map(|(((counter, _), _), amount)| ((*counter).to_owned(), amount));
        let by_slice = placement
            .slices()
            .filter_map(|slice| self.slices.get(usize::try_from(slice).ok()?))
            .map(|slice| (slice.clone(), Amount::Count(1)));
        CounterUse {
            set: self.set.clone(),
            counters: by_number.chain(by_slice).collect(),
        }
    }

    fn everything(&self) -> BTreeMap<String, Amount> {
        let by_number = RESOURCES
            .iter()
            .zip(self.totals)
            .filter_map(|((counter, _), total)| Some(((*counter).to_owned(), total?)));
        by_number
            .chain(
                self.slices
                    .iter()
                    .map(|slice| (slice.clone(), Amount::Count(1))),
            )
            .collect()
    }
}

fn amounts_of_nothing() -> [Amount; 7] {
    [
        Amount::Count(0),
        Amount::Count(0),
        Amount::Count(0),
        Amount::Count(0),
        Amount::Bytes(0),
        Amount::Count(0),
        Amount::Count(0),
    ]
}

/// The most of a resource that instances have which the hardware takes beside each other: those
/// limited by place alone in the best of all arrangements, and each limited profile as often as it
/// may be there.
///
/// More than the total means that the driver's numbers contradict each other (a dump of the A100-80
/// gives a 2g two decoders; three fit, and the whole GPU has five).
fn most_at_once(
    caps: &MigCapabilities,
    per_profile: &[(&GpuInstanceProfile, [Amount; 7])],
    slices: u32,
    of: impl Fn(&[Amount; 7]) -> u64,
) -> u64 {
    // Profiles that are limited in number beside each other, however they are placed.
    let limited = per_profile
        .iter()
        .filter(|(profile, _)| profile.variant().is_limited())
        .map(|(profile, amounts)| u64::from(caps.most(profile)).saturating_mul(of(amounts)))
        .max();
    // best[end]: the most within the first `end` slices.
    let mut best: Vec<u64> = vec![0];
    for end in 1..=slices {
        let mut most = best.last().copied().unwrap_or(0);
        for (profile, amounts) in per_profile
            .iter()
            .filter(|(profile, _)| !profile.variant().is_limited())
        {
            for at in profile.placements.iter().filter(|at| at.end() == end) {
                let before = usize::try_from(at.start)
                    .ok()
                    .and_then(|start| best.get(start).copied());
                most = most.max(before.unwrap_or(0).saturating_add(of(amounts)));
            }
        }
        best.push(most);
    }
    best.last().copied().unwrap_or(0).max(limited.unwrap_or(0))
}

#[cfg(test)]
mod tests;
