//! Partitions on simulated GPUs, in any order of events with crashes at any call: no slice is ever lost, leaked or used
//! twice, what others made is left alone, and the end is as if nothing had gone wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use divvy_claims::{AllocatedDevice, Allocation, Claim, Phase, Stored};
use divvy_gpu_sim::SimNode;
use divvy_model::mig::{ComputeInstance, GpuInstance, Partition, PartitionName, Placement};
use divvy_model::{ClaimUid, DeviceKind, GpuDriver, GpuUuid, MigMode};

use crate::story::{Cast, MOMENTS, alone, sequences, told, uid};
use crate::world::{HardwareFault, World, claim, result};

const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "f"];
const GPUS: usize = 2;

const SEQUENCES: &str = "DIVVY_MIG_SEQUENCES";

/// A machine of H100s that are really cut into partitions.
pub(crate) fn mig_world(gpus: &str, seed: u64) -> World {
    let world = World::new(gpus, seed);
    let sim = SimNode::parse(gpus).unwrap();
    let mut m = world.lock();
    m.inventory = Some(std::sync::Arc::new(sim.inventory()));
    m.sim = Some(sim);
    drop(m);
    world
}

/// A claim of devices by their names.
pub(crate) fn claim_of(name: &str, devices: &[&str], allocated_at: &str) -> Claim {
    let one = |device: &&str| AllocatedDevice { device: device.parse().unwrap(), ..result(0, false) };
    let allocation = Allocation {
        allocated_at: Some(allocated_at.to_owned()),
        results: devices.iter().map(one).collect(),
    };
    Claim { allocation, ..claim(name, &[], allocated_at) }
}

pub(crate) fn sim(world: &World) -> SimNode {
    world.lock().sim.clone().unwrap()
}

/// What lives on a GPU now, whether or not it can be asked.
pub(crate) fn living(world: &World, gpu: &GpuUuid) -> Vec<(GpuInstance, Vec<ComputeInstance>)> {
    let engine = sim(world).engine();
    let there = engine.gpus().iter().filter(|g| g.facts.uuid == *gpu).flat_map(|g| &g.instances);
    there.map(|living| (living.instance, living.compute.clone())).collect()
}

fn is_lost(world: &World, gpu: &GpuUuid) -> bool {
    sim(world).engine().gpus().iter().any(|g| g.facts.uuid == *gpu && g.lost)
}

/// The memory slices a device needs.
fn slices(world: &World, device: &str) -> (GpuUuid, Placement) {
    let kind = DeviceKind::parse(&device.parse().unwrap()).unwrap();
    let gpu = world.gpu(usize::try_from(kind.ordinal()).unwrap());
    let placement = match kind {
        DeviceKind::Whole { .. } | DeviceKind::Share { .. } | DeviceKind::Admin { .. } => {
            Placement { start: 0, size: 8 }
        }
        DeviceKind::Partition(name) => {
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

struct Story {
    cast: Cast,
    /// What somebody else has made.
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

/// What must not depend on how the machine got there.
#[derive(Debug, PartialEq, Eq)]
struct End {
    records: BTreeMap<ClaimUid, (Allocation, Phase, usize)>,
    cdi: BTreeMap<String, String>,
    /// Without what others made.
    instances: BTreeMap<GpuUuid, Vec<(Partition, usize)>>,
    /// Of GPUs that are held. (Off is lazy: an idle GPU may be left in either mode.)
    modes: BTreeMap<GpuUuid, bool>,
}

impl Story {
    fn new(seed: u64) -> Self {
        Self { cast: Cast::new(mig_world("h100x2", seed), seed), foreign: BTreeMap::new() }
    }

    /// A device at random, whole or any partition at any place.
    fn any_device(&mut self) -> String {
        let number = self.chance.below(GPUS);
        if self.chance.one_in(6) {
            return format!("gpu-{number}");
        }
        let gpu = self.world.gpu(number);
        let inventory = self.world.lock().inventory.clone().unwrap();
        let caps = &inventory.gpus[&gpu].mig.as_ref().unwrap().capabilities;
        let plain: Vec<_> = caps.placements().filter(|(profile, _)| !profile.variant().is_rare()).collect();
        let (profile, placement) = plain[self.chance.below(plain.len())];
        let name = caps.name(profile).unwrap().to_string();
        let number = u32::try_from(number).unwrap();
        PartitionName::new(number, &name, profile.id, placement.start).to_string()
    }

    /// The scheduler: devices that overlap with no claim in the API.
    fn allocate(&mut self, name: &str) {
        if self.world.lock().api.contains_key(&uid(name)) {
            return;
        }
        let api = self.world.lock().api.clone();
        let mut taken: Vec<_> = api
            .values()
            .flat_map(|c| &c.allocation.results)
            .map(|r| slices(&self.world, r.device.as_str()))
            .collect();
        let mut devices = Vec::new();
        for _ in 0..=self.chance.below(2) {
            let device = self.any_device();
            let wants = slices(&self.world, &device);
            if !taken.iter().any(|t| overlap(t, &wants)) {
                taken.push(wants);
                devices.push(device);
            }
        }
        if devices.is_empty() {
            return;
        }
        self.allocations += 1;
        let names: Vec<_> = devices.iter().map(String::as_str).collect();
        let new = claim_of(name, &names, &format!("t{}", self.allocations));
        self.say(format!("allocate {name} {devices:?}"));
        self.world.lock().api.insert(new.uid.clone(), new);
    }

    fn prepare(&mut self, name: &str) {
        let Some((wanted, answer)) = self.ask_to_prepare(name) else { return };
        // Allocated anew: what was answered for the earlier allocation is over as soon as that is undone.
        let undone = !self.world.lock().records().contains_key(&wanted.uid);
        if undone && self.answered.get(&wanted.uid).is_some_and(|(c, _)| c.allocation != wanted.allocation) {
            self.answered.remove(&wanted.uid);
            self.lingering.remove(&wanted.uid);
        }
        if let Ok(prepared) = answer
            && !self.world.lock().dead
        {
            self.forget_released();
            self.note_answer(wanted, prepared);
        }
        self.recover();
    }

    fn unprepare(&mut self, name: &str) {
        self.ask_to_unprepare(name);
        self.recover();
    }

    fn reconcile(&mut self) {
        self.say("reconcile".to_owned());
        let report = self.executor.reconcile(&self.world.view());
        self.say(format!("    {:?}", report.events));
        if !self.world.lock().dead {
            let told: BTreeSet<_> = report
                .foreign
                .iter()
                .flat_map(|(gpu, i)| i.iter().map(move |i| (gpu.clone(), i.id)))
                .filter(|(gpu, _)| !is_lost(&self.world, gpu))
                .collect();
            let made: BTreeSet<_> = self
                .foreign
                .iter()
                .flat_map(|(gpu, made)| made.iter().map(move |c| (gpu.clone(), c.gpu_instance)))
                .filter(|(gpu, _)| !is_lost(&self.world, gpu))
                .collect();
            let busy = !self.world.lock().mig_late.is_empty();
            assert!(busy || told == made, "told {told:?}, made {made:?}");
        }
        self.recover();
        let records = self.world.lock().records();
        let api = self.world.lock().api.clone();
        let gone: Vec<_> = self.answered.keys().filter(|uid| !records.contains_key(*uid)).cloned().collect();
        for uid in gone {
            let (answered, _) = self.answered.remove(&uid).unwrap();
            let live = api.get(&uid).is_some_and(|c| c.allocation == answered.allocation);
            assert!(!live || self.lingering.contains(&uid), "reconcile undid {uid}, which is in use");
        }
        self.forget_released();
    }

    /// An admin makes an instance by hand, where nothing of ours is open.
    fn make_foreign(&mut self) {
        let device = self.any_device();
        let DeviceKind::Partition(name) = DeviceKind::parse(&device.parse().unwrap()).unwrap() else {
            return;
        };
        let (gpu, _) = slices(&self.world, &device);
        let open = self.world.lock().records().values().any(|stored| match stored {
            Stored::Fine(r) => r.steps.iter().any(|s| {
                !matches!(s.progress, divvy_claims::Progress::Done { .. } | divvy_claims::Progress::Undone)
            }),
            _ => true,
        });
        if open || !self.world.lock().mig_late.is_empty() {
            return;
        }
        // Whoever turns MIG mode on under a whole GPU's holder takes it from him; that is not ours to mend.
        let whole = self.world.lock().records().values().filter_map(Stored::fine).any(|record| {
            record.devices.iter().any(|d| d.gpu == gpu && d.kind == divvy_model::HoldKind::Whole)
        });
        let sim = sim(&self.world);
        if !whole && self.chance.one_in(4) {
            drop(sim.edit(|e| e.set_mig_mode(&gpu, true)));
        }
        if let Ok(made) = sim.make_foreign_instance(&gpu, name.profile, name.start) {
            self.say(format!("somebody makes {device}: {made:?}"));
            self.foreign.entry(gpu).or_default().push(made);
        }
    }

    fn remove_foreign(&mut self, which: impl Fn(&GpuUuid, Placement) -> bool) {
        for (gpu, made) in &mut self.foreign {
            if is_lost(&self.cast.world, gpu) {
                continue;
            }
            let there = living(&self.cast.world, gpu);
            made.retain(|foreign| {
                let (instance, _) = there.iter().find(|(_, c)| c.contains(foreign)).unwrap();
                if which(gpu, instance.placement) {
                    sim(&self.cast.world).edit(|e| {
                        e.destroy_compute_instance(gpu, instance.id, foreign.id).unwrap();
                        e.destroy_gpu_instance(gpu, instance.id).unwrap();
                    });
                    return false;
                }
                true
            });
        }
        self.foreign.retain(|_, made| !made.is_empty());
    }

    /// True after every event.
    fn check(&self) {
        for (gpu, made) in &self.foreign {
            let there: Vec<_> = living(&self.world, gpu).into_iter().flat_map(|(_, c)| c).collect();
            for foreign in made {
                assert!(
                    there.contains(foreign),
                    "{foreign:?} of somebody else is gone from {gpu}: {there:?}"
                );
            }
        }
        let boot: divvy_model::BootId = format!("boot-{}", self.world.lock().boot).parse().unwrap();
        let records = self.world.lock().records();
        let api = self.world.lock().api.clone();
        let mut used = Vec::new();
        for (claim, _) in self.answered.values() {
            for result in &claim.allocation.results {
                let wants = slices(&self.world, result.device.as_str());
                assert!(!used.iter().any(|u| overlap(u, &wants)), "{} is used twice", result.device);
                used.push(wants);
            }
            // Allocated anew: its next prepare has undone the earlier one, and may have got no further.
            let anew = api.get(&claim.uid).is_some_and(|c| c.allocation != claim.allocation);
            if anew && !records.contains_key(&claim.uid) {
                continue;
            }
            let Some(Stored::Fine(record)) = records.get(&claim.uid) else {
                panic!("{} is in use and has no record", claim.uid)
            };
            if record.phase != Phase::Prepared || record.boot != boot {
                continue;
            }
            for device in record.devices.iter().filter(|d| d.step().is_some()) {
                let made = device.partition(&record.steps).expect("a prepared partition is on record");
                let there = living(&self.world, &device.gpu);
                let found = there.iter().flat_map(|(_, c)| c).find(|c| c.uuid == made.uuid);
                assert_eq!(
                    found.map(|c| (c.gpu_instance, c.id)),
                    Some((made.gpu_instance, made.compute_instance)),
                    "{} of {} does not live",
                    device.allocated.device,
                    claim.uid
                );
            }
        }
    }

    fn random_step(&mut self) {
        let any = NAMES[self.chance.below(NAMES.len())];
        let allocated: Vec<_> = self.world.lock().api.values().map(|c| c.name.clone()).collect();
        let known: Vec<_> = self.answered.values().map(|(c, _)| c.name.clone()).collect();
        let (allocated, known) = (self.one_of(&allocated, any), self.one_of(&known, any));
        match self.chance.below(28) {
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
                    n => HardwareFault::Late { after, succeeds: n == 2 },
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
                    self.say("somebody removes all he made".to_owned());
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
            _ => self.time_passes(),
        }
        self.recover();
        self.check();
    }

    /// A container of some claim starts to compute.
    fn start_process(&mut self) {
        let running: Vec<_> =
            self.answered.values().filter(|(c, _)| !self.lingering.contains(&c.uid)).cloned().collect();
        if running.is_empty() {
            return;
        }
        let (claim, _) = &running[self.chance.below(running.len())];
        let records = self.world.lock().records();
        let Some(Stored::Fine(record)) = records.get(&claim.uid) else { return };
        for device in &record.devices {
            let sim = sim(&self.world);
            match device.partition(&record.steps) {
                Some(made) => {
                    let there = living(&self.world, &device.gpu);
                    if there.iter().any(|(_, c)| c.iter().any(|c| c.uuid == made.uuid)) {
                        sim.start_process_in(&device.gpu, made.gpu_instance, 100);
                    }
                }
                None if device.step().is_none() => {
                    sim.start_process(&device.gpu, 100);
                }
                None => {}
            }
        }
        self.say(format!("process of {}", claim.name));
        self.world.lock().pods.insert(100, format!("pod-{}", claim.name));
    }

    fn gpus_come_back(&self) {
        self.say("GPUs come back".to_owned());
        for number in 0..GPUS {
            sim(&self.world).restore_gpu(&self.world.gpu(number));
        }
    }

    fn quiet(&self) {
        sim(&self.world).edit(|e| {
            e.end_process(100);
            for index in 0..GPUS {
                e.gpu_at(index).unwrap().clients.clear();
            }
        });
    }

    fn settle(&mut self) {
        self.say("settle".to_owned());
        self.world.no_crash();
        self.recover();
        {
            let mut m = self.world.lock();
            m.hardware_fault = None;
            m.process_error = None;
        }
        self.quiet();
        self.gpus_come_back();
        self.world.pass(Duration::from_mins(5));
        // Whoever is in the way of an allocated claim goes.
        let wanted: Vec<_> = self.world.lock().api.values().cloned().collect();
        let places: Vec<_> = wanted
            .iter()
            .flat_map(|c| &c.allocation.results)
            .map(|r| slices(&self.world, r.device.as_str()))
            .collect();
        self.remove_foreign(|gpu, placement| places.iter().any(|p| overlap(p, &(gpu.clone(), placement))));
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
                self.answered.get(&claim.uid).is_some_and(|(c, _)| c.allocation == claim.allocation),
                "not prepared"
            );
        }
        self.reconcile();
        self.check();
    }

    fn without_trouble(&self) -> End {
        let world = mig_world("h100x2", 0);
        let executor = world.start();
        for claim in self.world.lock().api.values() {
            world.prepare(&executor, claim).unwrap();
        }
        end(&world, &BTreeMap::new())
    }
}

fn end(world: &World, foreign: &BTreeMap<GpuUuid, Vec<ComputeInstance>>) -> End {
    let records = world.lock().records();
    let fine: Vec<_> = records
        .values()
        .map(|stored| match stored {
            Stored::Fine(record) => record.clone(),
            other => panic!("{other:?}"),
        })
        .collect();
    let held: BTreeSet<_> = fine.iter().flat_map(divvy_claims::Record::gpus).collect();
    let on = |gpu: &GpuUuid| sim(world).mig_mode(gpu).is_ok_and(MigMode::is_on);
    let instances = (0..GPUS).map(|n| world.gpu(n)).map(|gpu| {
        let theirs = |inside: &[ComputeInstance]| {
            foreign.get(&gpu).is_some_and(|f| inside.iter().any(|c| f.contains(c)))
        };
        let ours = living(world, &gpu).into_iter().filter(|(_, inside)| !theirs(inside));
        let place = |(i, inside): (GpuInstance, Vec<_>)| {
            (Partition { gpu: gpu.clone(), profile: i.profile, placement: i.placement }, inside.len())
        };
        let places = ours.map(place).collect();
        (gpu, places)
    });
    let cdi = world.lock().cdi.clone().into_iter().map(|(n, b)| (n, String::from_utf8(b).unwrap())).collect();
    End {
        records: fine
            .iter()
            .map(|r| (r.uid.clone(), (r.allocation(), r.phase.clone(), r.steps.len())))
            .collect(),
        cdi,
        instances: instances.collect(),
        modes: held.iter().map(|gpu| (gpu.clone(), on(gpu))).collect(),
    }
}

#[test]
fn no_slice_is_lost_leaked_or_used_twice_whatever_happens_to_claims_process_driver_and_machine() {
    sequences(SEQUENCES, 120, |seed| {
        let mut story = Story::new(seed);
        let world = story.world.clone();
        told(&alone(SEQUENCES, seed), &world, || {
            let steps = 10 + story.chance.below(40);
            (0..steps).for_each(|_| story.random_step());
            story.settle();
            assert_eq!(end(&story.world, &story.foreign), story.without_trouble());
            story.world.lock().calls
        })
    });
}

#[test]
fn a_crash_before_during_and_after_every_single_call_of_two_partitions_lives_changes_nothing_at_the_end() {
    let began = Instant::now();
    let mut points = 0;
    for reboot in [false, true] {
        for moment in MOMENTS {
            for at in 0.. {
                let mut story = Story::new(u64::try_from(at).unwrap() + 77);
                let world = story.world.clone();
                let done = told(&format!("crash {moment:?} call {at}, reboot {reboot}"), &world, || {
                    let first = claim_of("a", &["gpu-0-mig-3g40gb-9-4", "gpu-1-mig-1g10gb-19-0"], "t1");
                    let second = claim_of("a", &["gpu-0-mig-1g20gb-15-6", "gpu-1"], "t2");
                    story.world.crash_in(at, moment);
                    // Prepare, unprepare, another allocation of the same claim, prepare.
                    for part in 0..4 {
                        match part {
                            0 => {
                                story.world.lock().api.insert(first.uid.clone(), first.clone());
                                drop(story.world.prepare(&story.executor, &first));
                            }
                            1 => drop(story.world.unprepare(&story.executor, &first.uid)),
                            2 => drop(story.world.lock().api.insert(second.uid.clone(), second.clone())),
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
                });
                points += 1;
                if done {
                    break;
                }
            }
        }
    }
    println!("{points} crash points, {:.2?}", began.elapsed());
}
