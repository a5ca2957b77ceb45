//! Every set of partitions of every board: the counters refuse what the hardware refuses and
//! nothing else.

use divvy_gpu_sim::{MIG_BOARDS, mig_capabilities};
use divvy_model::mig::{GpuInstanceProfileId, ProfileVariant};

use super::*;

type At<'a> = (&'a GpuInstanceProfile, Placement);

/// Every set of partitions that do not overlap, the empty one too.
fn sets(caps: &MigCapabilities) -> Vec<Vec<At<'_>>> {
    let mut all = vec![Vec::new()];
    for (profile, placement) in caps.placements() {
        let fits = |set: &&Vec<At<'_>>| set.iter().all(|(_, other)| !other.overlaps(placement));
        let more: Vec<_> = all
            .iter()
            .filter(fits)
            .map(|set| set.iter().copied().chain([(profile, placement)]).collect())
            .collect();
        all.extend(more);
    }
    all
}

/// Returns whether the hardware takes a set, as the driver documents it: one instance with extra
/// media engines, and no other media engines beside all of them.
fn hardware_takes(set: &[At<'_>]) -> bool {
    let is = |variant| move |(profile, _): &&At<'_>| profile.variant() == variant;
    let all = set.iter().filter(is(ProfileVariant::AllMedia)).count();
    let some = set.iter().filter(is(ProfileVariant::Media)).count();
    let media = set
        .iter()
        .filter(|(profile, _)| profile.engines.has_media())
        .count();
    all + some <= 1 && (all == 0 || media == 1)
}

/// Every set, with whether the counters are enough for it.
fn judged<'a>(caps: &'a MigCapabilities, budget: &Budget) -> Vec<(Vec<At<'a>>, bool)> {
    // Counters as places in a list: this runs for every board, and a map would take most of the
    // time.
    let totals: Vec<(String, u64)> = budget
        .everything()
        .into_iter()
        .map(|(name, amount)| (name, amount.value()))
        .collect();
    let place = |name: &String| {
        totals
            .iter()
            .position(|(counter, _)| counter == name)
            .unwrap()
    };
    let uses: BTreeMap<(GpuInstanceProfileId, Placement), Vec<(usize, u64)>> = caps
        .placements()
        .map(|(profile, at)| {
            let counters = budget.partition(profile, at).counters;
            (
                (profile.id, at),
                counters
                    .iter()
                    .map(|(name, amount)| (place(name), amount.value()))
                    .collect(),
            )
        })
        .collect();
    let fits = |set: &[At<'_>]| {
        let mut spent = vec![0; totals.len()];
        for (counter, amount) in set
            .iter()
            .flat_map(|(profile, at)| &uses[&(profile.id, *at)])
        {
            spent[*counter] += amount;
        }
        spent
            .iter()
            .zip(&totals)
            .all(|(spent, (_, total))| spent <= total)
    };
    sets(caps)
        .into_iter()
        .map(|set| (fits(&set), set))
        .map(|(fits, set)| (set, fits))
        .collect()
}

fn disagreements(caps: &MigCapabilities, judged: &[(Vec<At<'_>>, bool)]) -> Vec<String> {
    judged
        .iter()
        .filter(|(set, takes)| *takes != hardware_takes(set))
        .map(|(set, _)| {
            let names = set
                .iter()
                .map(|(p, at)| format!("{}@{}", caps.name(p).unwrap(), at.start));
            names.collect::<Vec<_>>().join(" ")
        })
        .collect()
}

#[test]
fn counters_refuse_what_the_hardware_refuses_and_nothing_else() {
    for board in MIG_BOARDS {
        let caps = mig_capabilities(board).unwrap();
        let budget = Budget::new(0, &caps).unwrap();
        assert_eq!(budget.dropped, [], "{board}");
        let judged = judged(&caps, &budget);
        assert_eq!(
            disagreements(&caps, &judged),
            Vec::<String>::new(),
            "{board}"
        );
        for profile in caps.profiles() {
            let taken = judged.iter().filter(|(_, takes)| *takes);
            let most = taken
                .map(|(set, _)| set.iter().filter(|(p, _)| p.id == profile.id).count())
                .max();
            assert_eq!(
                most,
                usize::try_from(profile.max_instances).ok(),
                "{board} {}",
                caps.name(profile).unwrap()
            );
        }
        let all = [(8, 5536), (6, 38), (4, 122), (12, 1602)];
        assert!(
            all.contains(&(caps.memory_slices(), judged.len())),
            "{board} {}",
            judged.len()
        );
    }
}

#[test]
fn two_partitions_that_overlap_share_a_counter() {
    for board in MIG_BOARDS {
        let caps = mig_capabilities(board).unwrap();
        let budget = Budget::new(0, &caps).unwrap();
        let slices = |at: At<'_>| -> Vec<String> {
            let counters = budget.partition(at.0, at.1).counters.into_keys();
            counters
                .filter(|name| name.starts_with(names::MEMORY_SLICE))
                .collect()
        };
        for a in caps.placements() {
            for b in caps.placements() {
                let shared = slices(a).iter().any(|slice| slices(b).contains(slice));
                assert_eq!(shared, a.1.overlaps(b.1), "{board} {} {}", a.1, b.1);
            }
        }
    }
}

/// The profiles of a board, one of them changed.
fn changed(board: &str, id: u32, change: impl Fn(&mut GpuInstanceProfile)) -> MigCapabilities {
    changed_in(&mig_capabilities(board).unwrap(), id, change)
}

#[test]
fn a_counter_that_lies_is_dropped_and_the_others_still_agree() {
    // Seen in a dump of an A100-80: a 2g has two decoders. Three fit, and a 1g.20gb with one beside
    // them.
    let caps = changed("a100-80", 14, |profile| profile.engines.decoders = 2);
    let budget = Budget::new(0, &caps).unwrap();
    assert_eq!(budget.dropped, [("decoders", 7, 5)]);
    assert!(!budget.everything().contains_key("decoders"));
    assert_eq!(
        disagreements(&caps, &judged(&caps, &budget)),
        Vec::<String>::new()
    );

    // Only a mix shows it: two 3g fit, a 3g beside a 4g would not.
    let caps = changed("h100", 9, |profile| profile.multiprocessors = 66);
    let caps = changed_in(&caps, 5, |profile| profile.multiprocessors = 68);
    let budget = Budget::new(0, &caps).unwrap();
    assert_eq!(budget.dropped, [("multiprocessors", 134, 132)]);
    assert_eq!(
        disagreements(&caps, &judged(&caps, &budget)),
        Vec::<String>::new()
    );

    // A driver that says more instances of a limited profile fit than it has engines for.
    let caps = changed("h100", 20, |profile| profile.max_instances = 2);
    assert_eq!(
        Budget::new(0, &caps).unwrap().dropped,
        [("ofa-engines", 2, 1)]
    );
}

fn changed_in(
    caps: &MigCapabilities,
    id: u32,
    change: impl Fn(&mut GpuInstanceProfile),
) -> MigCapabilities {
    let profiles = caps.profiles().iter().cloned().map(|mut profile| {
        if profile.id == GpuInstanceProfileId(id) {
            change(&mut profile);
        }
        profile
    });
    MigCapabilities::new(caps.memory_bytes, profiles)
}

#[test]
fn unused_counters_are_left_out_and_a_grid_that_does_not_fit_is_refused() {
    let h100 = Budget::new(0, &mig_capabilities("h100").unwrap()).unwrap();
    assert!(!h100.everything().contains_key("encoders"));
    let rtx = Budget::new(0, &mig_capabilities("rtx-pro-6000").unwrap()).unwrap();
    assert_eq!(rtx.everything().len(), 7 + 12);
    let at = |size| {
        changed("h100", 0, |p| {
            p.placements = vec![Placement { start: 0, size }];
        })
    };
    assert_eq!(Budget::new(0, &at(25)).unwrap().everything().len(), 6 + 25);
    for size in [26, u32::MAX] {
        assert!(Budget::new(0, &at(size)).is_none());
    }
}
