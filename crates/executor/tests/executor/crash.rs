//! Whatever happens on the way, the end is the same: random orders of everything, with crashes at
//! any call.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use divvy_claims::{AllocatedDevice, Claim, Phase, Prepared, Stored};
use divvy_executor::{Folder, ProcessOnGpu};
use divvy_model::{ClaimUid, DeviceKind, GpuUuid};

use crate::mig_world::{claim_of_halves, mig_world};
use crate::story::{Cast, MOMENTS, alone, sequences, uid, with_log};
use crate::world::accessors::made;
use crate::world::{FinalState, HardwareFault, Place, claim, final_state, result};

const NAMES: [&str; 5] = ["a", "b", "half-a", "half-b", "watch"];
const GPUS: usize = 2;

const SEQUENCES: &str = "DIVVY_SEQUENCES";

/// Whole GPUs, and claims (`half`) of both halves of GPUs.
struct Story(Cast);

/// Number of the GPU that a device is of.
fn number_of(device: &AllocatedDevice) -> usize {
    let kind = DeviceKind::parse(&device.device).unwrap();
    usize::try_from(kind.ordinal()).unwrap()
}

/// Makes a claim of this name as the scheduler allocates it, of these GPUs.
fn devices_of(name: &str, gpus: &[usize]) -> Vec<AllocatedDevice> {
    if name.starts_with("half") {
        claim_of_halves(name, gpus, "").allocation.results
    } else {
        gpus.iter().map(|n| result(*n, false)).collect()
    }
}

impl Deref for Story {
    type Target = Cast;
    fn deref(&self) -> &Cast {
        &self.0
    }
}

impl DerefMut for Story {
    fn deref_mut(&mut self) -> &mut Cast {
        &mut self.0
    }
}

impl Story {
    fn new(seed: u64) -> Self {
        Self(Cast::new(mig_world("h100x2", seed), seed))
    }

    /// The scheduler: a GPU that no claim in the API has. `watch` has admin access to anything.
    fn allocate(&mut self, name: &str) {
        let taken: BTreeSet<_> = self
            .world
            .lock()
            .api
            .values()
            .filter(|c| c.name != "watch")
            .flat_map(|c| c.allocation.results.clone())
            .map(|r| number_of(&r))
            .collect();
        if self.world.lock().api.contains_key(&uid(name)) {
            return;
        }
        let free: Vec<_> = (0..GPUS).filter(|n| !taken.contains(n)).collect();
        self.allocations += 1;
        let mut new = claim(name, &[], &format!("t{}", self.allocations));
        if name == "watch" {
            new.allocation.results = vec![result(self.chance.below(GPUS), true)];
        } else if free.is_empty() {
            return;
        } else if free.len() == GPUS && self.chance.one_in(4) {
            new.allocation.results = devices_of(name, &free);
        } else {
            new.allocation.results = devices_of(name, &[free[self.chance.below(free.len())]]);
        }
        self.say(format!(
            "allocate {name} {:?}",
            new.allocation
                .results
                .iter()
                .map(|r| r.device.to_string())
                .collect::<Vec<_>>()
        ));
        self.world.lock().api.insert(new.uid.clone(), new);
    }

    fn prepare(&mut self, name: &str) {
        let wanted = self.world.lock().api.get(&uid(name)).cloned();
        // The kubelet unprepares a claim only when no container has it.
        let held =
            wanted.is_some_and(|claim| self.holds(&claim) && !self.lingering.contains(&claim.uid));
        let Some((wanted, answer)) = self.ask_to_prepare(name) else {
            return;
        };
        if let Ok(prepared) = answer {
            self.forget_released(); // A waiting call also finishes lingering claims.
            self.check_answer(&wanted, &prepared);
            self.note_answer(wanted, prepared);
        } else if held {
            assert!(
                self.holds(&wanted),
                "a prepare that failed let go what the claim held before"
            );
        }
        self.recover();
    }

    /// Returns whether containers of this allocation of the claim may be running: it was prepared
    /// in this boot, and nothing has been undone.
    fn holds(&self, claim: &Claim) -> bool {
        let m = self.world.lock();
        let records = m.records();
        records
            .get(&claim.uid)
            .and_then(Stored::fine)
            .is_some_and(|record| {
                let whole = match &record.phase {
                    Phase::Prepared => true,
                    Phase::Leaving(leaving) => !leaving.undoing,
                    Phase::Preparing => false,
                };
                whole
                    && record.is_of(&claim.allocation)
                    && record.boot.to_string() == format!("boot-{}", m.boot)
            })
    }

    /// Returns whether an answered claim may use its devices on a GPU: one that lingers goes on
    /// holding only the GPUs that are on its record.
    fn may_use(&self, uid: &ClaimUid, gpu: &GpuUuid) -> bool {
        let records = self.world.lock().records();
        let record = records.get(uid).and_then(Stored::fine);
        !self.lingering.contains(uid) || record.is_none_or(|record| record.gpus().contains(gpu))
    }

    fn check_answer(&self, wanted: &Claim, prepared: &Prepared) {
        let m = self.world.lock();
        if m.dead {
            return; // The answer never left the process.
        }
        let name = format!("{}.json", wanted.uid);
        let record = m.file(Folder::Claims, &name);
        assert_eq!(
            record,
            m.synced(Folder::Claims, &name),
            "answered before the record was on disk"
        );
        match divvy_claims::Record::decode(&record.unwrap()) {
            Stored::Fine(r) => {
                assert_eq!(
                    (r.allocation(), r.phase),
                    (wanted.allocation.clone(), Phase::Prepared)
                );
            }
            other => panic!("{other:?}"),
        }
        let file = m
            .cdi
            .get(&format!("gpu.divvy.dev-claim_{}.json", wanted.uid))
            .expect("a CDI file");
        let spec: divvy_cdi::Spec = serde_json::from_slice(file).unwrap();
        let ids: Vec<_> = spec
            .devices
            .iter()
            .map(|d| format!("{}={}", spec.kind, d.name))
            .collect();
        let answered: Vec<_> = prepared
            .devices
            .iter()
            .flat_map(|d| d.cdi_ids.clone())
            .collect();
        assert_eq!(
            ids, answered,
            "the CDI file has other devices than the answer"
        );
        drop(m);
        // Nothing held twice.
        for result in wanted.allocation.results.iter().filter(|r| !r.admin_access) {
            let number = number_of(result);
            for (other, (claim, _)) in &self.answered {
                let twice = *other != wanted.uid
                    && self.may_use(other, &self.world.gpu(number))
                    && claim
                        .allocation
                        .results
                        .iter()
                        .any(|r| !r.admin_access && number_of(r) == number);
                assert!(
                    !twice,
                    "{} is held by {} and {other}",
                    result.device, wanted.uid
                );
            }
            let gpu = self.world.gpu(number);
            let m = self.world.lock();
            let foreign: Vec<_> = m
                .processes
                .get(&gpu)
                .into_iter()
                .flatten()
                .filter(|p| {
                    p.pod.as_deref() != Some(&format!("pod-{}", wanted.name))
                        && p.pod.as_deref() != Some("pod-watch")
                })
                .collect();
            assert!(
                foreign.is_empty(),
                "{} was given out while {foreign:?} use it",
                result.device
            );
        }
    }

    fn unprepare(&mut self, name: &str) {
        if self.ask_to_unprepare(name) {
            let m = self.world.lock();
            let record = m.synced(Folder::Claims, &format!("uid-{name}.json"));
            assert_eq!(record, None, "a lost power brings it back");
            assert!(
                !m.cdi
                    .contains_key(&format!("gpu.divvy.dev-claim_uid-{name}.json"))
            );
        }
        self.recover();
    }

    fn reconcile(&mut self) {
        self.say("reconcile".to_owned());
        let before = self.world.lock().records();
        let report = self.executor.reconcile(&self.world.view());
        self.say(format!("    {:?}", report.events));
        self.recover();
        // Whatever it let go must not be allocated as it was answered, or have been unprepared.
        let records = self.world.lock().records();
        let api = self.world.lock().api.clone();
        let gone: Vec<_> = self
            .answered
            .keys()
            .filter(|uid| !records.contains_key(*uid))
            .cloned()
            .collect();
        for uid in gone {
            let (answered, _) = self.answered.remove(&uid).unwrap();
            let live = api
                .get(&uid)
                .is_some_and(|c| c.allocation == answered.allocation);
            // One of an earlier boot may have been let go by a prepare that then failed.
            assert!(
                !live || !before.contains_key(&uid) || self.lingering.contains(&uid),
                "reconcile undid {uid}, which is in use"
            );
        }
        self.forget_released();
    }

    #[expect(
        clippy::too_many_lines,
        reason = "all that can happen, with its chance"
    )]
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
        match self.chance.below(28) {
            0..=3 => self.allocate(any),
            4..=8 => self.prepare(&allocated),
            9..=10 => self.unprepare(&known),
            11..=12 => {
                self.say(format!("deallocate {allocated}"));
                self.world.lock().api.remove(&uid(&allocated));
            }
            13 => self.crash_within(25),
            14 => self.restart(),
            15 => self.reboot(),
            16 => {
                let after = Duration::from_secs([1, 20, 100][self.chance.below(3)]);
                let fault = match self.chance.below(4) {
                    0 => HardwareFault::Refuses,
                    1 => HardwareFault::Lies,
                    n => HardwareFault::Late {
                        after,
                        succeeds: n == 2,
                    },
                };
                self.say(format!("next hardware call: {fault:?}"));
                self.world.lock().hardware_fault = Some(fault);
            }
            17 | 22 => {
                // A container of some claim starts to compute. After a reboot there is none before
                // the claim has been prepared or carried out again.
                let records = self.world.lock().records();
                let boot = format!("boot-{}", self.world.lock().boot);
                let may_run = |uid: &ClaimUid| {
                    !self.lingering.contains(uid)
                        && records
                            .get(uid)
                            .and_then(Stored::fine)
                            .is_some_and(|r| r.boot.to_string() == boot)
                };
                let running = self.answered.values().filter(|(c, _)| may_run(&c.uid));
                let running: Vec<_> = running.map(|(c, _)| c.clone()).collect();
                if !running.is_empty() {
                    let claim = &running[self.chance.below(running.len())];
                    let partitions = made(&self.world, &claim.uid);
                    let mut used: Vec<_> = partitions
                        .into_iter()
                        .map(|(gpu, made)| (gpu, Some(made.gi.0)))
                        .collect();
                    if !claim.name.starts_with("half") {
                        let whole = claim.allocation.results.iter().map(number_of);
                        used.extend(whole.map(|number| (self.world.gpu(number), None)));
                    }
                    for (gpu, gpu_instance) in used {
                        let process = ProcessOnGpu {
                            pid: 100,
                            gpu_instance,
                            pod: Some(format!("pod-{}", claim.name)),
                        };
                        self.say(format!(
                            "process of {} on {gpu} {gpu_instance:?}",
                            claim.name
                        ));
                        self.world
                            .lock()
                            .processes
                            .entry(gpu)
                            .or_default()
                            .push(process);
                    }
                }
            }
            18 => {
                self.say("all processes end".to_owned());
                self.world.lock().processes.clear();
            }
            19 => {
                self.say("CDI files vanish".to_owned());
                self.world.lock().cdi.clear();
            }
            20 => self.reconcile(),
            23 => {
                let fault = [Place::Store, Place::Cdi][self.chance.below(2)];
                let kind =
                    [ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem][self.chance.below(2)];
                self.say(format!("writes fail: {fault:?} {kind:?}"));
                self.world.lock().write_error = Some((fault, kind));
            }
            24 => {
                self.say("writes work".to_owned());
                self.world.lock().write_error = None;
            }
            25 => {
                let mut m = self.world.lock();
                m.api_down = !m.api_down;
                let text = format!("the API {}", if m.api_down { "is down" } else { "answers" });
                m.log.push(text);
            }
            26 => self.lock_is_held_or_let_go(&NAMES, GPUS),
            _ => self.time_passes(),
        }
        self.recover();
    }

    /// Faults end; the kubelet prepares what the API has allocated and unprepares the rest, or no
    /// unprepare comes and reconcile has to find out.
    fn settle(&mut self) {
        self.say("settle".to_owned());
        self.world.no_crash();
        self.recover();
        {
            let mut m = self.world.lock();
            m.busy.clear();
            m.hardware_fault = None;
            m.process_error = None;
            m.processes.clear();
            m.write_error = None;
            m.api_down = false;
        }
        self.world.pass(Duration::from_mins(5));
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
        let wanted: Vec<_> = self.world.lock().api.values().cloned().collect();
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
    }

    /// The same claims on a machine on which nothing ever went wrong.
    fn without_trouble(&self) -> FinalState {
        let world = mig_world("h100x2", 0);
        let executor = world.start();
        for claim in self.world.lock().api.values() {
            world.prepare(&executor, claim).unwrap();
        }
        final_state(&world)
    }
}

#[test]
fn any_order_of_events_with_crashes_ends_as_if_nothing_went_wrong() {
    sequences(SEQUENCES, 300, |seed| {
        let mut story = Story::new(seed);
        let world = story.world.clone();
        with_log(&alone(SEQUENCES, seed), &world, || {
            let steps = 10 + story.chance.below(40);
            (0..steps).for_each(|_| story.random_step());
            story.settle();
            assert_eq!(final_state(&story.world), story.without_trouble());
            story.world.lock().calls
        })
    });
}

/// A crash before during and after every single call of a claims life changes nothing at its end.
#[test]
fn a_crash_at_every_call_of_a_claims_life_changes_nothing_at_its_end() {
    let mut points = 0;
    for name in ["a", "half-a"] {
        for reboot in [false, true] {
            for moment in MOMENTS {
                for at in 0.. {
                    let mut story = Story::new(u64::try_from(at).unwrap() + 77);
                    let world = story.world.clone();
                    let mut done = false;
                    with_log(
                        &format!("{name}, crash {moment:?} call {at}"),
                        &world,
                        || {
                            story.allocate(name);
                            story.world.crash_in(at, moment);
                            // Prepare, unprepare, another allocation of the same claim, prepare.
                            for part in 0..4 {
                                match part {
                                    0 | 3 => {
                                        let wanted = story.world.lock().api[&uid(name)].clone();
                                        drop(story.world.prepare(&story.executor, &wanted));
                                    }
                                    1 => drop(story.world.unprepare(&story.executor, &uid(name))),
                                    _ => {
                                        story.world.lock().api.clear();
                                        story.allocate(name);
                                    }
                                }
                                if story.world.lock().dead {
                                    if reboot {
                                        story.world.reboot();
                                    }
                                    story.restart();
                                }
                            }
                            done = story.world.lock().calls <= at;
                            story.settle();
                            assert_eq!(final_state(&story.world), story.without_trouble());
                        },
                    );
                    points += 1;
                    if done {
                        break;
                    }
                }
            }
        }
    }
    println!("{points} crash points");
}
