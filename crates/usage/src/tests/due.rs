//! Claims whose pods are to be evicted, and figures that are not known.

use super::*;

const EVICTS: UsagePolicy = UsagePolicy {
    idle_after: None,
    evict: true,
    reclaim: None,
};

/// Seconds with GiB used by shares of 40, 30 and 1 GiB of a GPU with 78 (`None`: not known): whose
/// pods are to go.
fn harm(policy: UsagePolicy, readings: &[(u64, [Option<u64>; 3])]) -> Vec<String> {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    for (at, (second, used)) in readings.iter().enumerate() {
        let [a, b, c] = used.map(Option::unwrap_or_default);
        let (mut read, pods) = reading(&[(1, "a", a, 9), (2, "b", b, 9), (3, "c", c, 9)]);
        read.number = at as u64 + 1;
        let known = used.map(|used| used.map(|gib| gib * GIB));
        for (process, known) in read.processes.as_mut().unwrap().iter_mut().zip(known) {
            process.memory_bytes = known;
        }
        let usage = gpus(attribute(
            &read,
            &pods,
            &[
                share("c", 40, &["a"]),
                share("d", 30, &["b"]),
                share("e", 1, &["c"]),
            ],
        ));
        let policies = usage.keys().map(|gpu| (gpu.clone(), policy)).collect();
        for change in watch.step(&usage, &policies, Duration::from_secs(*second)) {
            if let Change::Due { claim, due, .. } = change {
                said.push(format!("{second}: {} {due:?}", claim.name));
            }
        }
    }
    said
}

#[test]
fn a_share_is_to_go_if_it_harms_for_a_minute_and_the_policy_says_so() {
    // Free: 78 less all that is used, 1 of it by no process. The others may still take 30 and 1.
    let [harms, barely] = [[Some(50), Some(1), Some(0)], [Some(48), Some(0), Some(0)]];
    let constant = |used, until| (0..=until).map(|at| (at * 15, used)).collect::<Vec<_>>();
    assert_eq!(
        harm(EVICTS, &constant(harms, 6)),
        ["75: c Some(Overuse)"],
        "two readings, then a minute"
    );
    assert_eq!(harm(UsagePolicy::default(), &constant(harms, 9)), [""; 0]);
    let within = [Some(40), Some(30), Some(1)];
    assert_eq!(harm(EVICTS, &constant(within, 9)), [""; 0]);
    let harmless = [Some(47), Some(0), Some(0)];
    assert_eq!(
        harm(EVICTS, &constant(harmless, 9)),
        [""; 0],
        "over its grant, with enough for all"
    );
    assert_eq!(
        harm(EVICTS, &constant(barely, 6)),
        ["75: c Some(Overuse)"],
        "one GiB too much"
    );
    // Nothing is said once anything of the GPU is not known.
    let blind = [Some(50), Some(1), None];
    assert_eq!(harm(EVICTS, &constant(blind, 9)), [""; 0]);
    let mut then_blind = constant(harms, 5);
    then_blind.extend([(90, blind), (105, harms), (150, harms), (165, harms)]);
    assert_eq!(
        harm(EVICTS, &then_blind),
        ["75: c Some(Overuse)", "90: c None", "165: c Some(Overuse)"]
    );
    // The one with the largest excess of several, and after it the next.
    let [two, next] = [[Some(44), Some(0), Some(6)], [Some(0), Some(0), Some(6)]];
    assert_eq!(harm(EVICTS, &constant(two, 6)), ["75: e Some(Overuse)"]);
    assert_eq!(
        harm(EVICTS, &[&constant(two, 5)[..], &[(90, next)]].concat())[1..],
        ["90: e None"]
    );
    let other = [Some(50), Some(0), Some(6)];
    let changes = [
        &constant(two, 5)[..],
        &[(90, other), (149, other), (150, other)],
    ]
    .concat();
    let expected = ["75: e Some(Overuse)", "150: e None", "150: c Some(Overuse)"];
    assert_eq!(
        harm(EVICTS, &changes),
        expected,
        "after a minute as the one with the largest excess"
    );
}

#[test]
fn nothing_is_to_go_while_a_pod_with_admin_access_has_an_unknown_amount() {
    let mut watch = Watch::new(AFTER);
    for number in 1..=8 {
        let (mut read, pods) = reading(&[(1, "a", 60, 9), (2, "b", 0, 9), (3, "mon", 1, 9)]);
        read.number = number;
        read.processes.as_mut().unwrap()[2].memory_bytes = None;
        let monitor = hold("m", Form::ADMIN, &["mon"]);
        let usage = gpus(attribute(
            &read,
            &pods,
            &[share("c", 10, &["a"]), share("d", 30, &["b"]), monitor],
        ));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        let changes = watch.step(&usage, &policies, Duration::from_secs(number * 15));
        assert!(
            !changes
                .iter()
                .any(|change| matches!(change, Change::Due { .. })),
            "{changes:?}"
        );
    }
}

#[test]
fn a_share_within_its_grant_again_is_not_to_go() {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    // 10 GiB of a process that is in no pod, and a share of 40 GiB beside one of 30.
    for (at, gib) in [50, 50, 50, 50, 50, 50, 40, 40].into_iter().enumerate() {
        let (read, pods) = reading(&[(1, "a", gib, 9), (2, "b", 1, 9), (3, "", 10, 9)]);
        let read = GpuReading {
            number: at as u64 + 1,
            ..read
        };
        let usage = gpus(attribute(
            &read,
            &pods,
            &[share("c", 40, &["a"]), share("d", 30, &["b"])],
        ));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        for change in watch.step(&usage, &policies, Duration::from_secs(at as u64 * 15)) {
            if let Change::Due { due, .. } = change {
                said.push((at, due.is_some()));
            }
        }
    }
    assert_eq!(
        said,
        [(5, true), (6, false)],
        "with the first reading that says so"
    );
}

#[test]
fn one_reading_looked_at_again_and_again_proves_no_harm() {
    let mut watch = Watch::new(AFTER);
    let mut step = |number, second| {
        let (read, pods) = reading(&[(1, "a", 60, 0), (2, "b", 0, 0)]);
        let read = GpuReading { number, ..read };
        let usage = gpus(attribute(
            &read,
            &pods,
            &[share("c", 10, &["a"]), share("d", 30, &["b"])],
        ));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        let changes = watch.step(&usage, &policies, Duration::from_secs(second));
        changes
            .iter()
            .filter(|change| matches!(change, Change::Due { .. }))
            .count()
    };
    let due: Vec<usize> = [(1, 0), (2, 15), (2, 80), (2, 200), (3, 215)]
        .map(|(n, at)| step(n, at))
        .into();
    assert_eq!(due, [0, 0, 0, 0, 1]);
}

/// Minutes with what is computed on two GPUs of one claim: whether it is to go when.
fn reclaims(
    policies: [UsagePolicy; 2],
    kind: Form,
    minutes: &[(u64, Option<u32>)],
) -> Vec<(u64, bool)> {
    let mut watch = Watch::new(AFTER);
    let mut said = Vec::new();
    for (minute, percent) in minutes {
        let (mut read, pods) = reading(&[(1, "a", 1, percent.unwrap_or(0))]);
        if percent.is_none() {
            (read.busy, read.computed) = (Err(Unknown::Failed), Err(Unknown::Failed));
        }
        let usage = attribute(&read, &pods, &[hold("c", kind, &["a"])]);
        let mut both = gpus(usage.clone());
        both.insert(
            "GPU-12345678-1234-1234-1234-123456780002".parse().unwrap(),
            usage,
        );
        let policies = both.keys().cloned().zip(policies).collect();
        let changes = watch.step(&both, &policies, Duration::from_secs(minute * 60));
        said.extend(changes.iter().filter_map(|change| match change {
            Change::Due { due, .. } => Some((*minute, due.is_some())),
            _ => None,
        }));
    }
    said
}

#[test]
fn an_idle_claim_is_to_go_after_its_grace_if_all_policies_say_so() {
    let reclaim = |minutes| UsagePolicy {
        reclaim: Some(Duration::from_mins(minutes)),
        ..UsagePolicy::default()
    };
    let zero = |minutes: &[u64]| minutes.iter().map(|m| (*m, Some(0))).collect::<Vec<_>>();
    let hour = zero(&[0, 59, 60, 69, 70, 71]);
    assert_eq!(
        reclaims([reclaim(10), reclaim(5)], Form::WHOLE, &hour),
        [(70, true)],
        "the longest grace"
    );
    assert_eq!(
        reclaims([reclaim(10), UsagePolicy::default()], Form::WHOLE, &hour),
        []
    );
    assert_eq!(
        reclaims([reclaim(10); 2], Form::ADMIN, &hour),
        [],
        "never with admin access"
    );
    let soon = UsagePolicy {
        idle_after: Some(Duration::from_mins(20)),
        ..reclaim(0)
    };
    assert_eq!(reclaims([soon; 2], Form::WHOLE, &hour), [(59, true)]);
    assert_eq!(
        reclaims([soon, reclaim(0)], Form::WHOLE, &hour),
        [(60, true)],
        "the longest time"
    );
    let ends = [(0, Some(0)), (75, Some(0)), (76, Some(5))];
    assert_eq!(
        reclaims([reclaim(10); 2], Form::WHOLE, &ends),
        [(75, true), (76, false)]
    );
    let blind = [
        (0, Some(0)),
        (75, Some(0)),
        (76, None),
        (77, Some(0)),
        (146, Some(0)),
        (147, Some(0)),
    ];
    assert_eq!(
        reclaims([reclaim(10); 2], Form::WHOLE, &blind),
        [(75, true), (76, false), (147, true)],
        "what was not seen may have been use"
    );
}

#[test]
fn another_pod_of_an_idle_claim_has_all_of_the_time() {
    let mut watch = Watch::new(AFTER);
    let reclaim = UsagePolicy {
        reclaim: Some(Duration::from_mins(10)),
        ..UsagePolicy::default()
    };
    let mut said = Vec::new();
    let minutes: [(u64, &[&str]); 7] = [
        (0, &["a"]),
        (70, &["a"]),
        (75, &["a", "b"]),
        (80, &["b"]),
        (144, &["b"]),
        (145, &["b"]),
        (146, &["c"]),
    ];
    for (minute, pods) in minutes {
        let (read, of) = reading(&[]);
        let usage = gpus(attribute(&read, &of, &[hold("c", Form::WHOLE, pods)]));
        let policies = usage.keys().map(|gpu| (gpu.clone(), reclaim)).collect();
        for change in watch.step(&usage, &policies, Duration::from_mins(minute)) {
            if let Change::Due { due, .. } = change {
                said.push((minute, due.is_some()));
            }
        }
    }
    assert_eq!(said, [(70, true), (75, false), (145, true), (146, false)]);
}

/// Shares of 10, 10 and 30 GiB of a GPU with 78: those that are marked, after each reading. `used`
/// has the GiB of the first two; the third has nothing.
fn marked(used: impl IntoIterator<Item = (u64, u64)>) -> Vec<Vec<String>> {
    let mut watch = Watch::new(AFTER);
    let mut now: Vec<String> = Vec::new();
    let step = |(at, (first, second)): (usize, (u64, u64))| {
        let (read, pods) = reading(&[(1, "a", first, 9), (2, "b", second, 9), (3, "c", 0, 0)]);
        let number = at as u64 + 1;
        let read = GpuReading { number, ..read };
        let holdings = [
            share("c", 10, &["a"]),
            share("d", 10, &["b"]),
            share("e", 30, &["c"]),
        ];
        let usage = gpus(attribute(&read, &pods, &holdings));
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        for change in watch.step(&usage, &policies, Duration::from_secs(at as u64 * 15)) {
            if let Change::Due { claim, due, .. } = change {
                now.retain(|name| *name != claim.name);
                now.extend(due.map(|_| claim.name));
            }
        }
        now.clone()
    };
    used.into_iter().enumerate().map(step).collect()
}

#[test]
fn of_shares_that_take_turns_in_harm_one_is_marked_and_stays_so() {
    // Caching allocators grow and shrink: the larger excess changes with every reading.
    let turns = |at: u64| {
        if at.is_multiple_of(2) {
            (34, 33)
        } else {
            (33, 34)
        }
    };
    let found = marked((0..120).map(turns));
    let first = found.iter().position(|names| !names.is_empty()).unwrap();
    assert_eq!(first, 5, "a minute after the second reading");
    assert!(found[first..].iter().all(|names| names == &found[first]));
    assert_eq!(found[first].len(), 1);
}

/// When the marked share is within its grant the next that was over as long is marked at once.
#[test]
fn the_next_share_over_its_grant_is_marked_at_once() {
    let both = std::iter::repeat_n((34, 33), 6);
    let found = marked(both.chain([(10, 45), (10, 45)]));
    assert_eq!(found[5], ["c"]);
    assert_eq!(found[6..], [["d"], ["d"]]);
}

#[test]
fn a_new_share_is_not_marked_for_the_harm_that_another_does() {
    // The second is the worse of the two, for less than a minute.
    let one = std::iter::repeat_n((60, 0), 4);
    let found = marked(one.chain(std::iter::repeat_n((34, 36), 7)));
    assert_eq!(found[4], [""; 0]);
    assert_eq!(found[5..9], [["c"], ["c"], ["c"], ["c"]]);
    // Over its grant with the sixth reading, long so with the tenth, the worst for a minute with
    // the fourteenth.
    assert_eq!(found[10], ["c"]);
}

#[test]
fn nothing_is_said_of_a_claim_that_is_gone() {
    let mut watch = Watch::new(AFTER);
    let policy = UsagePolicy {
        reclaim: Some(Duration::ZERO),
        ..UsagePolicy::default()
    };
    let mut step = |minute, holdings: &[Holding]| {
        let (read, pods) = reading(&[]);
        let usage = gpus(attribute(&read, &pods, holdings));
        let policies = usage.keys().map(|gpu| (gpu.clone(), policy)).collect();
        let changes = watch.step(&usage, &policies, Duration::from_mins(minute));
        let is_due = |change: &Change| matches!(change, Change::Due { .. });
        changes.iter().filter(|change| is_due(change)).count()
    };
    let held = [hold("c", Form::WHOLE, &["a"])];
    assert_eq!([step(0, &held), step(60, &held)], [0, 1]);
    assert_eq!(step(61, &[]), 0, "its conditions went with it");
}

#[test]
fn a_share_whose_pods_are_not_known_uses_an_unknown_amount() {
    let (read, pods) = reading(&[(1, "a", 60, 9)]);
    let holdings = [share("c", 10, &["a"]), share("d", 30, &[])];
    let usage = attribute(&read, &pods, &holdings);
    let used: Vec<_> = usage.groups.iter().map(|group| group.used).collect();
    assert_eq!(used, [Ok(60 * GIB), Err(Unknown::NoPods)]);
    let mut watch = Watch::new(AFTER);
    for number in 1..=8 {
        let usage = gpus(GpuUsage {
            number,
            ..usage.clone()
        });
        let policies = usage.keys().map(|gpu| (gpu.clone(), EVICTS)).collect();
        let changes = watch.step(&usage, &policies, Duration::from_secs(number * 15));
        let is_due = |change: &Change| matches!(change, Change::Due { .. });
        assert!(!changes.iter().any(is_due), "{changes:?}");
    }
    assert_eq!(watch.verdicts(Duration::ZERO).over.len(), 1);
}

#[test]
fn samples_that_add_up_to_more_than_the_time_are_all_of_it() {
    // Processes of a pod, and pods of a claim.
    let read = reading(&[(1, "a", 1, 70), (2, "a", 1, 60), (3, "b", 1, 80)]);
    let holdings = [share("c", 10, &["a", "b"])];
    assert_eq!(
        of(&read, &holdings),
        ["c a 2 100% process", "c b 1 80% process", "rest 1"]
    );
    let usage = attribute(&read.0, &read.1, &holdings);
    let ratio = usage.devices[0].utilization.unwrap().ratio;
    assert!((ratio - 1.0).abs() < 1e-9, "{ratio}");
}

#[test]
fn a_process_that_is_listed_twice_has_computed_once() {
    let mut read = reading(&[(1, "a", 1, 30), (2, "a", 1, 20)]);
    let first = read.0.processes.as_ref().unwrap()[0].clone();
    read.0.processes.as_mut().unwrap().push(first);
    assert_eq!(of(&read, &[share("c", 10, &["a"])])[0], "c a 3 50% process");
}

#[test]
fn what_is_not_a_finite_number_is_not_known_wherever_it_comes_from() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let of_first = |read: &(GpuReading, BTreeMap<u32, String>), holding: Holding| {
            let usage = attribute(&read.0, &read.1, &[holding]);
            let device = usage.devices[0].clone();
            let pods = pod_utilization([&usage]);
            assert!(
                pods.into_values().all(|ratio| ratio.is_err()),
                "{bad} of {:?}",
                device.kind
            );
            (device.utilization, device.quiet)
        };
        let failed = (Err(Unknown::Failed), Err(Unknown::Failed));
        let whole = || hold("c", Form::WHOLE, &["a"]);

        let mut read = reading(&[(1, "a", 1, 30)]);
        read.0.busy = Ok(bad);
        assert_eq!(of_first(&read, whole()), failed, "of the GPU");
        read.0.sm = Ok(bad);
        assert_eq!(of_first(&read, whole()), failed, "of the monitors");
        read.0.busy = Ok(0.25);
        let usage = attribute(&read.0, &read.1, &[whole()]);
        let instead = usage.devices[0].utilization.unwrap();
        assert_eq!(instead.source, Source::Device, "the GPU has another figure");

        let mut read = reading(&[(1, "a", 1, 30)]);
        read.0.computed = Ok(BTreeMap::from([(1, bad)]));
        assert_eq!(
            of_first(&read, share("c", 10, &["a"])),
            failed,
            "of samples"
        );

        let mut read = reading(&[(1, "a", 1, 30)]);
        read.0.processes.as_mut().unwrap()[0].gpu_instance = Some(1);
        let holding = partition("c", 1, &["a"]);
        let part = PartReading {
            sm: Ok(bad),
            ..PartReading::default()
        };
        read.0.parts = BTreeMap::from([(holding.part.clone().unwrap().uuid, part)]);
        assert_eq!(of_first(&read, holding), failed, "of a partition");
    }
}

#[test]
fn a_share_without_compute_has_the_use_of_the_gpu() {
    let (read, pods) = reading(&[(1, "a", 1, 50)]);
    let mut holding = share("c", 10, &["a"]);
    holding.granted.cores = Some(0);
    let usage = attribute(&read, &pods, &[holding]);
    let found = pod_utilization([&usage]).into_values().next().unwrap();
    assert!((found.unwrap() - 0.5).abs() < 1e-9, "{found:?}");
}

#[test]
fn grants_whose_sum_is_no_number_are_not_known() {
    let mut holdings = [share("c", 1, &["a"]), share("c", 1, &["a"])];
    holdings[0].granted.memory = Some(u64::MAX);
    let (read, pods) = reading(&[]);
    let usage = attribute(&read, &pods, &holdings);
    assert_eq!(usage.devices[0].limit, Err(Unknown::NoGrant));
}
