//! On every board: fewer counters refuse what all of them refuse, whatever is published.

use std::collections::BTreeSet;

use divvy_gpu_sim::{MIG_BOARDS, mig_capabilities};
use divvy_model::mig::{GpuInstanceProfile, MigCapabilities, PartitionName, Placement};

use super::*;
use crate::counters::Budget;

type At<'a> = (&'a GpuInstanceProfile, Placement);

fn device(caps: &MigCapabilities, budget: &Budget, (profile, at): At<'_>) -> Device {
    let label = caps.name(profile).unwrap().to_string();
    let mut device = Device::new(PartitionName::new(0, &label, profile.id, at.start).device_name());
    device.consumes.push(budget.partition(profile, at));
    device
}

fn takes(set: &CounterSet, devices: &[&Device]) -> bool {
    let mut left: BTreeMap<&str, u64> = set
        .counters
        .iter()
        .map(|(name, amount)| (name.as_str(), amount.value()))
        .collect();
    devices
        .iter()
        .flat_map(|d| &d.consumes)
        .flat_map(|uses| &uses.counters)
        .all(|(name, amount)| {
            let left = left.get_mut(name.as_str()).expect("a counter of the set");
            let enough = *left >= amount.value();
            *left = left.saturating_sub(amount.value());
            enough
        })
}

/// Every set of places that do not overlap.
fn sets(places: &[At<'_>]) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = vec![Vec::new()];
    for (index, (_, at)) in places.iter().enumerate() {
        let fits = |set: &&Vec<usize>| set.iter().all(|other| !places[*other].1.overlaps(*at));
        let more: Vec<_> = all
            .iter()
            .filter(fits)
            .map(|set| set.iter().copied().chain([index]).collect())
            .collect();
        all.extend(more);
    }
    all
}

/// Checks what is published of a board, and returns what is counted then.
fn counted(
    board: &str,
    published: impl Fn(&GpuInstanceProfile) -> bool,
) -> BTreeMap<String, Amount> {
    let caps = mig_capabilities(board).unwrap();
    let budget = Budget::new(0, &caps).unwrap();
    let places: Vec<At<'_>> = caps
        .placements()
        .filter(|(profile, _)| published(profile))
        .collect();
    let before: Vec<Device> = places
        .iter()
        .map(|place| device(&caps, &budget, *place))
        .collect();
    let (all, mut after) = (budget.counter_set(), before.clone());
    let set = lean(&all, &mut after);
    let of = |devices: &'_ [Device], chosen: &[usize]| -> Vec<Device> {
        chosen.iter().map(|index| devices[*index].clone()).collect()
    };
    for chosen in sets(&places) {
        let (many, few) = (of(&before, &chosen), of(&after, &chosen));
        let verdict = takes(&all, &many.iter().collect::<Vec<_>>());
        assert_eq!(
            takes(&set, &few.iter().collect::<Vec<_>>()),
            verdict,
            "{board}: {chosen:?}"
        );
    }
    for (index, (_, at)) in places.iter().enumerate() {
        for (other, (_, beside)) in places.iter().enumerate().skip(index + 1) {
            let both = takes(&set, &[&after[index], &after[other]]);
            assert!(
                !both || !at.overlaps(*beside),
                "{board}: {index} and {other}"
            );
        }
        let used = after[index].consumes[0]
            .counters
            .keys()
            .collect::<BTreeSet<_>>();
        assert!(!used.is_empty(), "{board}: it excludes the whole GPU");
    }
    set.counters
}

#[test]
fn fewer_counters_refuse_the_same_on_every_board_whatever_is_published() {
    for board in MIG_BOARDS {
        counted(board, |_| true);
        counted(board, |profile| !profile.variant().is_rare());
        for profile in mig_capabilities(board).unwrap().profiles() {
            counted(board, |other| other.id == profile.id);
            counted(board, |other| other.id != profile.id);
        }
    }
}

#[test]
fn only_what_refuses_something_is_counted() {
    let names = |counters: BTreeMap<String, Amount>| -> Vec<String> {
        counters
            .iter()
            .map(|(name, amount)| format!("{name} {amount}"))
            .collect()
    };
    let pairs = [
        "memory-slices-0-1 2",
        "memory-slices-2-3 2",
        "memory-slices-4-5 2",
        "memory-slices-6-7 2",
    ];
    assert_eq!(
        names(counted("h100", |profile| !profile.variant().is_rare())),
        pairs
    );
    let smallest = |profile: &GpuInstanceProfile| profile.id.0 == 19;
    assert_eq!(names(counted("h100", smallest)), ["memory-slices-0-7 8"]);
    let everything = names(counted("h100", |_| true));
    let slices = (0..8).map(|slice| format!("memory-slice-{slice} 1"));
    assert_eq!(
        everything,
        slices
            .chain(["ofa-engines 1".to_owned()])
            .collect::<Vec<_>>()
    );
}

#[test]
fn what_draws_on_nothing_still_does() {
    let caps = mig_capabilities("h100").unwrap();
    let budget = Budget::new(0, &caps).unwrap();
    let mut lost = vec![Device::new("gpu-0-mig-1g10gb-19-0".parse().unwrap())];
    let before = lost.clone();
    let set = lean(&budget.counter_set(), &mut lost);
    assert_eq!((lost, set.counters.len()), (before, 1));
}
