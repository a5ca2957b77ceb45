use super::*;

/// Steps of a generator (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % most
    }
}

fn held(number: u64, gpu: u64, part: u64, allocated: u64) -> HeldTime {
    HeldTime {
        hold: HoldKey {
            claim: format!("00000000-0000-0000-0000-{number:012}")
                .parse()
                .unwrap(),
            device: format!("gpu-{gpu}").parse().unwrap(),
            share: String::new(),
        },
        gpu: format!("GPU-00000000-0000-0000-0000-{gpu:012}")
            .parse()
            .unwrap(),
        series: Series {
            namespace: format!("team-{}", number % 3),
            class: "share.divvy.dev".to_owned(),
            product: "NVIDIA L4".to_owned(),
            form: if part == WHOLE { "whole" } else { "share" }.to_owned(),
        },
        has: Amounts {
            part,
            memory: part / 10,
        },
        uses: Amounts {
            part: part / 2,
            memory: part / 20,
        },
        allocated: Some(allocated),
    }
}

/// The node: true time, the boot, and a wall clock that may be wrong.
struct World {
    true_time: u64,
    boot: u64,
    booted: u64,
    wrong: i64,
}

impl World {
    fn now(&self) -> Moment {
        Moment {
            boot: format!("boot-{}", self.boot).parse().unwrap(),
            since_boot: self.true_time - self.booted,
            wall: self.true_time.strict_add_signed(self.wrong),
        }
    }
}

const START: u64 = 1_800_000_000_000;
const MONTH: u64 = 30 * 24 * 3_600_000;

/// A month of claims that come and go on four GPUs, in which the process is killed at any point,
/// also just after a change that it has not counted, the node boots again, and its clock is set
/// while the process runs: the sums are those of what was allocated, to the millisecond.
#[test]
#[expect(
    clippy::too_many_lines,
    reason = "all that can happen, with its chance"
)]
fn sums_are_the_integral_of_allocations_over_kills_boots_and_clocks() {
    for seed in 0..8 {
        let mut random = Random(seed);
        let mut world = World {
            true_time: START,
            boot: 0,
            booted: START - 5000,
            wrong: 0,
        };
        let mut there: Vec<HeldTime> = Vec::new();
        let mut saved = serde_json::to_string(&Ledger::new(world.now(), Vec::new())).unwrap();
        let (mut truth, mut blocked) = (BTreeMap::<Series, Amounts>::new(), 0);
        let (mut next, mut kills) = (0, 0);
        // The running process; `None` while it is down, with the time of the last change.
        let mut running: Option<Ledger> = serde_json::from_str(&saved).ok();
        let mut changed = START;
        while world.true_time < START + MONTH {
            let time = 1 + random.below(3_600_000);
            world.true_time += time;
            for one in &there {
                truth
                    .entry(one.series.clone())
                    .or_default()
                    .add(one.has, time);
            }
            for gpu in 0..4 {
                let on: Vec<_> = there
                    .iter()
                    .filter(|one| one.gpu == held(0, gpu, 0, 0).gpu)
                    .collect();
                let granted: u64 = on.iter().map(|one| one.has.part).sum();
                blocked += if on.is_empty() {
                    0
                } else {
                    (WHOLE - granted) * time
                };
            }
            // Nothing begins or ends while the process is down.
            match (&mut running, random.below(10)) {
                (None, _) => {
                    if random.below(3) == 0 {
                        world.boot += 1;
                        world.booted = world.true_time;
                    }
                    let mut ledger: Ledger = serde_json::from_str(&saved).unwrap();
                    ledger.resume(world.now(), there.clone(), changed);
                    saved = serde_json::to_string(&ledger).unwrap();
                    running = Some(ledger);
                }
                (Some(ledger), 0) => {
                    world.wrong = random.below(7_200_000).cast_signed() - 3_600_000;
                    ledger.step(world.now(), there.clone());
                    saved = serde_json::to_string(ledger).unwrap();
                }
                (Some(ledger), what) => {
                    let gpu = random.below(4);
                    let on = there
                        .iter()
                        .position(|one| one.gpu == held(0, gpu, 0, 0).gpu);
                    let count = there
                        .iter()
                        .filter(|one| one.gpu == held(0, gpu, 0, 0).gpu)
                        .count();
                    let is_whole = on.is_some_and(|at| there[at].has.part == WHOLE);
                    let part = if on.is_none() && random.below(2) == 0 {
                        WHOLE
                    } else {
                        WHOLE / 4
                    };
                    // The last change before a kill may be one that was not counted.
                    let is_killed = what == 1;
                    if is_killed {
                        world.wrong = 0;
                        ledger.step(world.now(), there.clone());
                        saved = serde_json::to_string(ledger).unwrap();
                        let more = random.below(1000);
                        world.true_time += more;
                        for one in &there {
                            truth
                                .entry(one.series.clone())
                                .or_default()
                                .add(one.has, more);
                        }
                        for gpu in 0..4 {
                            let on: Vec<_> = there
                                .iter()
                                .filter(|one| one.gpu == held(0, gpu, 0, 0).gpu)
                                .collect();
                            let granted: u64 = on.iter().map(|one| one.has.part).sum();
                            blocked += if on.is_empty() {
                                0
                            } else {
                                (WHOLE - granted) * more
                            };
                        }
                    }
                    changed = world.now().wall;
                    if what % 2 == 0
                        && let Some(at) = on
                    {
                        there.remove(at);
                    } else if count < 4 && !is_whole {
                        there.push(held(next, gpu, part, changed));
                        next += 1;
                    }
                    if is_killed {
                        running = None;
                        kills += 1;
                    } else {
                        ledger.step(world.now(), there.clone());
                        saved = serde_json::to_string(ledger).unwrap();
                    }
                }
            }
        }
        let mut ledger: Ledger = serde_json::from_str(&saved).unwrap();
        ledger.resume(world.now(), there.clone(), changed);
        let found: BTreeMap<_, _> = ledger
            .sums()
            .map(|(series, sums)| (series.clone(), sums.granted))
            .collect();
        truth.retain(|_, amounts| *amounts != Amounts::default());
        assert_eq!(found, truth, "seed {seed}");
        let rest: u64 = ledger.blocked().map(|(_, _, rest)| rest).sum();
        assert_eq!(rest, blocked, "seed {seed}");
        for (_, sums) in ledger.sums() {
            assert_eq!(sums.used.part * 2, sums.granted.part);
        }
        assert!(kills > 20, "{kills} kills");
    }
}

/// The wall clock goes back by a year, and forward again: not a millisecond is lost or added.
#[test]
fn a_clock_that_is_set_changes_nothing() {
    let mut world = World {
        true_time: START,
        boot: 0,
        booted: START,
        wrong: 0,
    };
    let one = held(1, 0, WHOLE, START);
    let mut ledger = Ledger::new(world.now(), vec![one.clone()]);
    for wrong in [-31_536_000_000, 31_536_000_000, 0] {
        world.true_time += 1000;
        world.wrong = wrong;
        ledger.step(world.now(), vec![one.clone()]);
    }
    assert_eq!(ledger.sums().next().unwrap().1.granted.gpu_seconds(), 3);
    assert_eq!(ledger.blocked().count(), 0);
}

/// A reboot with a clock that went back counts nothing twice.
#[test]
fn a_boot_before_the_last_one_counts_nothing() {
    let mut world = World {
        true_time: START,
        boot: 0,
        booted: START,
        wrong: 0,
    };
    let one = held(1, 0, WHOLE, START);
    let mut ledger = Ledger::new(world.now(), vec![one.clone()]);
    world.boot = 1;
    world.booted = START;
    world.wrong = -1000;
    ledger.resume(world.now(), vec![one], START);
    assert_eq!(ledger.sums().next().unwrap().1.granted, Amounts::default());
}

/// The clock of a machine that has just booted is years ahead.
#[test]
fn a_reboot_counts_a_day_at_most() {
    let mut world = World {
        true_time: START,
        boot: 0,
        booted: START,
        wrong: 0,
    };
    let one = held(1, 0, WHOLE, START);
    let mut ledger = Ledger::new(world.now(), vec![one.clone()]);
    world.boot = 1;
    world.true_time += 60_000;
    world.booted = world.true_time;
    world.wrong = i64::try_from(120 * MONTH).unwrap();
    ledger.resume(world.now(), vec![one], START);
    let (_, sums) = ledger.sums().next().unwrap();
    assert_eq!(sums.granted.gpu_seconds(), 24 * 3600);
}

#[test]
fn shares_are_their_tenants_and_the_rest_of_their_gpu_is_its_own() {
    let mut world = World {
        true_time: START,
        boot: 0,
        booted: START,
        wrong: 0,
    };
    let both = vec![held(1, 0, WHOLE / 4, START), held(2, 0, WHOLE / 4, START)];
    let mut ledger = Ledger::new(world.now(), both);
    world.true_time += 8000;
    ledger.step(world.now(), Vec::new());
    let sums: Vec<_> = ledger
        .sums()
        .map(|(series, sums)| (series.namespace.as_str(), sums.granted.gpu_seconds()))
        .collect();
    assert_eq!(sums, [("team-1", 2), ("team-2", 2)]);
    let blocked: Vec<_> = ledger.blocked().collect();
    assert_eq!(blocked, [("NVIDIA L4", "share", 4 * 1000 * WHOLE)]);
    // While no claim holds it, it is not blocked either.
    world.true_time += 8000;
    ledger.step(world.now(), Vec::new());
    assert_eq!(ledger.blocked().next().unwrap().2, 4 * 1000 * WHOLE);
}

#[test]
fn more_namespaces_than_series_are_counted_together_and_none_is_lost() {
    let world = World {
        true_time: START,
        boot: 0,
        booted: START,
        wrong: 0,
    };
    let mut ledger = Ledger::new(world.now(), Vec::new());
    let mut later = world.now();
    for number in 0..1500 {
        let mut one = held(number, 0, WHOLE, START);
        one.series.namespace = format!("ns-{number}");
        ledger.step(later.clone(), vec![one]);
        later.since_boot += 1000;
    }
    ledger.step(later, Vec::new());
    assert!(ledger.sums().count() <= MOST_SERIES + 1);
    let sum: u64 = ledger
        .sums()
        .map(|(_, sums)| sums.granted.gpu_seconds())
        .sum();
    assert_eq!(sum, 1500);
}
