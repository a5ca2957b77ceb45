//! Partitions on simulated GPUs, in any order of events with crashes at any call: no slice is ever
//! lost, leaked or used twice, what others made is left alone, and the end is as if nothing had
//! gone wrong.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use divvy_model::mig::{ComputeInstance, Placement};
use divvy_model::{DeviceKind, GpuUuid};

use self::truth::end;
use crate::mig_world::{claim_of, mig_world, sim};
use crate::story::{Cast, MOMENTS, alone, sequences, uid, with_log};
use crate::world::{HardwareFault, World};

mod events;
mod truth;

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
const GPUS: usize = 2;

const SEQUENCES: &str = "DIVVY_MIG_SEQUENCES";

struct Story {
    cast: Cast,
    /// Instances created outside of divvy.
    foreign: BTreeMap<GpuUuid, Vec<ComputeInstance>>,
}

impl Deref for Story {
    type Target = Cast;
    fn deref(&self) -> &Cast {
        &self.cast
    }
}

impl DerefMut for Story {
    fn deref_mut(&mut self) -> &mut Cast {
        &mut self.cast
    }
}

impl Story {
    fn new(seed: u64) -> Self {
        Self {
            cast: Cast::new(mig_world("h100x2", seed), seed),
            foreign: BTreeMap::new(),
        }
    }

    fn random_step(&mut self) {
        let any = NAMES[self.chance.below(NAMES.len())];
        let allocated: Vec<_> = self
            .world
            .lock()
            .api
            .values()
            .map(|c| c.name.clone())
            .collect();
        let known: Vec<_> = self
            .answered
            .values()
            .map(|(c, _)| c.name.clone())
            .collect();
        let (allocated, known) = (self.one_of(&allocated, any), self.one_of(&known, any));
        match self.chance.below(33) {
            0..=3 => self.allocate(any),
            4..=8 => self.prepare(&allocated),
            9..=11 => self.unprepare(&known),
            12 => {
                self.say(format!("deallocate {allocated}"));
                self.world.lock().api.remove(&uid(&allocated));
            }
            13..=14 => self.crash_within(40),
            15 => self.restart(),
            16 => {
                self.reboot();
                self.foreign.clear();
            }
            17..=18 => {
                let after = Duration::from_secs([1, 20, 100][self.chance.below(3)]);
                let fault = match self.chance.below(4) {
                    0 => HardwareFault::Refuses,
                    1 => HardwareFault::Lies,
                    n => HardwareFault::Late {
                        after,
                        succeeds: n == 2,
                    },
                };
                self.say(format!("next change: {fault:?}"));
                self.world.lock().hardware_fault = Some(fault);
            }
            19 => self.start_process(),
            20 => {
                self.say("all processes and clients end".to_owned());
                self.quiet();
            }
            21 => {
                let number = self.chance.below(GPUS);
                let gpu = self.world.gpu(number);
                self.say(format!("a monitor opens {gpu}"));
                sim(&self.world).edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
            }
            22 => {
                if self.chance.one_in(3) {
                    self.say("all foreign instances are removed".to_owned());
                    self.remove_foreign(|_, _| true);
                } else {
                    self.make_foreign();
                }
            }
            23 => {
                self.say("CDI files vanish".to_owned());
                self.world.lock().cdi.clear();
            }
            24 => self.reconcile(),
            25 => {
                let number = self.chance.below(GPUS);
                let gpu = self.world.gpu(number);
                self.say(format!("{gpu} falls off the bus"));
                sim(&self.world).lose_gpu(&gpu);
            }
            26 => self.gpus_come_back(),
            27..=28 => self.damage(),
            29 => self.other_pods(&known),
            30..=31 => self.lock_is_held_or_let_go(&NAMES, GPUS),
            _ => self.time_passes(),
        }
        self.recover();
        self.check();
    }

    fn settle(&mut self) {
        self.say("settle".to_owned());
        self.world.no_crash();
        self.recover();
        {
            let mut m = self.world.lock();
            m.busy.clear();
            m.hardware_fault = None;
            m.process_error = None;
        }
        self.quiet();
        self.gpus_come_back();
        self.world.pass(Duration::from_mins(5));
        // Holders in the way of an allocated claim are released.
        let wanted: Vec<_> = self.world.lock().api.values().cloned().collect();
        let places: Vec<_> = wanted
            .iter()
            .flat_map(|c| &c.allocation.results)
            .map(|r| slices(&self.world, r.device.as_str()))
            .collect();
        self.remove_foreign(|gpu, placement| {
            places.iter().any(|p| overlap(p, &(gpu.clone(), placement)))
        });
        if self.chance.one_in(3) {
            self.restart();
        }
        let silent = self.chance.one_in(2);
        for name in NAMES {
            if !silent && !self.world.lock().api.contains_key(&uid(name)) {
                self.unprepare(name);
            }
        }
        self.reconcile();
        self.world.pass(Duration::from_mins(5));
        self.reconcile();
        for claim in wanted {
            self.prepare(&claim.name);
            assert!(
                self.answered
                    .get(&claim.uid)
                    .is_some_and(|(c, _)| c.allocation == claim.allocation),
                "not prepared"
            );
        }
        self.reconcile();
        self.check();
    }
}

fn is_lost(world: &World, gpu: &GpuUuid) -> bool {
    sim(world)
        .engine()
        .gpus()
        .iter()
        .any(|g| g.facts.uuid == *gpu && g.lost)
}

/// The memory slices a device needs.
fn slices(world: &World, device: &str) -> (GpuUuid, Placement) {
    let kind = DeviceKind::parse(&device.parse().unwrap()).unwrap();
    let gpu = world.gpu(usize::try_from(kind.ordinal()).unwrap());
    let placement = match kind.partition() {
        None => Placement { start: 0, size: 8 },
        Some(name) => {
            let inventory = world.lock().inventory.clone().unwrap();
            inventory.gpus[&gpu]
                .mig
                .as_ref()
                .unwrap()
                .capabilities
                .placement(name.profile, name.start)
                .unwrap()
        }
    };
    (gpu, placement)
}

fn overlap(a: &(GpuUuid, Placement), b: &(GpuUuid, Placement)) -> bool {
    a.0 == b.0 && a.1.overlaps(b.1)
}

/// No slice is lost leaked or used twice whatever happens to claims process driver and machine.
#[test]
fn no_slice_is_lost_leaked_or_used_twice_whatever_happens() {
    sequences(SEQUENCES, 120, |seed| {
        let mut story = Story::new(seed);
        let world = story.world.clone();
        with_log(&alone(SEQUENCES, seed), &world, || {
            let steps = 10 + story.chance.below(40);
            (0..steps).for_each(|_| story.random_step());
            story.settle();
            assert_eq!(end(&story.world, &story.foreign), story.without_trouble());
            story.world.lock().calls
        })
    });
}

/// A crash before during and after every single call of two partitions lives changes nothing at the
/// end.
#[test]
fn a_crash_at_every_call_of_two_partitions_lives_changes_nothing() {
    let began = Instant::now();
    let mut points = 0;
    for reboot in [false, true] {
        for moment in MOMENTS {
            for at in 0.. {
                let mut story = Story::new(u64::try_from(at).unwrap() + 77);
                let world = story.world.clone();
                let done = with_log(
                    &format!("crash {moment:?} call {at}, reboot {reboot}"),
                    &world,
                    || {
                        let first = claim_of(
                            "a",
                            &["gpu-0-mig-3g40gb-9-4", "gpu-1-mig-1g10gb-19-0"],
                            "t1",
                        );
                        let second = claim_of("a", &["gpu-0-mig-1g20gb-15-6", "gpu-1"], "t2");
                        story.world.crash_in(at, moment);
                        // Prepare, unprepare, another allocation of the same claim, prepare.
                        for part in 0..4 {
                            match part {
                                0 => {
                                    story
                                        .world
                                        .lock()
                                        .api
                                        .insert(first.uid.clone(), first.clone());
                                    drop(story.world.prepare(&story.executor, &first));
                                }
                                1 => drop(story.world.unprepare(&story.executor, &first.uid)),
                                2 => drop(
                                    story
                                        .world
                                        .lock()
                                        .api
                                        .insert(second.uid.clone(), second.clone()),
                                ),
                                _ => drop(story.world.prepare(&story.executor, &second)),
                            }
                            if story.world.lock().dead {
                                if reboot {
                                    story.world.reboot();
                                }
                                story.restart();
                            }
                        }
                        let done = story.world.lock().calls <= at;
                        story.settle();
                        assert_eq!(end(&story.world, &story.foreign), story.without_trouble());
                        done
                    },
                );
                points += 1;
                if done {
                    break;
                }
            }
        }
    }
    println!("{points} crash points, {:.2?}", began.elapsed());
}
