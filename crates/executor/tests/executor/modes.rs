//! The modes of GPUs under a scheduler that cannot be trusted: any claims of whole GPUs, shares,
//! partitions and admin devices, rules that change, processes, crashes at any call, time slices
//! that fail. A GPU is never in two modes, no hold is lost or leaked, foreign instances stay, and
//! the time slice is restored once no claim requests another.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use divvy_claims::{
    AllocatedDevice, Claim, ConfigEntry, ConfigSource, Phase, Record, RecordedDevice, Stored,
};
use divvy_executor::{Event, Folder, LockName, PrepareCause, PrepareError, Refresh};
use divvy_gpu_sim::Fault;
use divvy_model::mig::{ComputeInstance, GpuInstanceProfileId};
use divvy_model::{
    BootId, ComputeMode, GpuDriver, GpuErrorCode, GpuOp, GpuTarget, GpuUuid, Grant, MpsProtocol,
    MpsServer, Target, TimeSlice,
};
use serde_json::{Value, json};

use crate::mig_world::{claim_of, living, mig_world, sim};
use crate::story::{Cast, alone, sequences, uid, with_log};
use crate::world::accessors::{
    counts, picture_of, place_of, set_protocol, settings, wanted_time_slice,
};
use crate::world::{DRIVER, HardwareFault, Place};

mod truth;

const SEQUENCES: &str = "DIVVY_MODE_SEQUENCES";
const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
const GPUS: usize = 2;
const PARTITIONS: [&str; 8] = [
    "mig-1g10gb-19-0",
    "mig-1g10gb-19-1",
    "mig-3g40gb-9-4",
    "mig-1g10gb-19-0-ts",
    "mig-3g40gb-9-4-ts",
    "mig-7g80gb-0-0",
    "mig-static-1g10gb-19-0",
    "mig-static-3g40gb-9-4",
];

/// A claim of devices by their names; shares get ids of their own. `slice` goes into the config of
/// whole GPUs.
pub(crate) fn claim(
    name: &str,
    devices: &[String],
    slice: Option<TimeSlice>,
    allocated_at: &str,
) -> Claim {
    let config = slice.map(|slice| json!({ "timeSlicing": { "interval": slice.name() } }));
    configured(name, devices, config, allocated_at)
}

/// The same, with these fields in the config of whole GPUs; options of MPS in that of partitions
/// too.
fn configured(name: &str, devices: &[String], config: Option<Value>, allocated_at: &str) -> Claim {
    let names: Vec<_> = devices.iter().map(String::as_str).collect();
    let mut claim = claim_of(name, &names, allocated_at);
    for (n, result) in claim.allocation.results.iter_mut().enumerate() {
        let is = |end: &str| result.device.as_str().ends_with(end);
        let (share, admin) = (is("-ts") || is("-mps"), is("-admin"));
        let share_id = share.then(|| format!("{name}-{allocated_at}-{n}"));
        *result = AllocatedDevice {
            share_id,
            admin_access: admin,
            ..result.clone()
        };
    }
    let of_kind = |kind: &str, mut config: Value| {
        config["apiVersion"] = json!("divvy.dev/v1beta1");
        config["kind"] = json!(kind);
        ConfigEntry {
            source: ConfigSource::Claim,
            requests: Vec::new(),
            driver: DRIVER.to_owned(),
            parameters: config,
        }
    };
    let of_partitions = config.clone().filter(|config| config.get("mps").is_some());
    let of_partitions = of_partitions.map(|config| of_kind("MigConfig", config));
    claim
        .configs
        .extend(config.map(|config| of_kind("GpuConfig", config)));
    claim.configs.extend(of_partitions);
    claim
}

struct Story {
    cast: Cast,
    /// GPUs whose MIG mode no policy lets us change.
    fixed: BTreeSet<GpuUuid>,
    /// Instances created outside of divvy.
    foreign: BTreeMap<GpuUuid, Vec<ComputeInstance>>,
    /// Numbers of prepares that were refused, by why.
    refused: BTreeMap<&'static str, usize>,
    /// Protocol of the node's MPS servers.
    protocol: MpsProtocol,
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
        let mut story = Self {
            cast: Cast::new(mig_world("h100x2", seed), seed),
            fixed: BTreeSet::new(),
            foreign: BTreeMap::new(),
            refused: BTreeMap::new(),
            protocol: MpsProtocol::of_number(if seed.is_multiple_of(2) { 2 } else { 3 }).unwrap(),
        };
        set_protocol(&story.world, story.protocol);
        if story.chance.one_in(3) {
            story.admin_partitions();
        }
        story
    }

    fn boot(&self) -> BootId {
        format!("boot-{}", self.world.lock().boot).parse().unwrap()
    }

    fn records(&self) -> Vec<Record> {
        let records = self.world.lock().records().into_values();
        records
            .map(|stored| match stored {
                Stored::Fine(record) => record,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    /// The last GPU is the administrator's, who makes two instances, and says so, or will.
    fn admin_partitions(&mut self) {
        let gpu = self.world.gpu(GPUS - 1);
        let free = living(&self.world, &gpu).is_empty()
            && self.records().iter().all(|r| !r.gpus().contains(&gpu));
        if !free || !self.world.lock().mig_late.is_empty() {
            return;
        }
        let sim = sim(&self.world);
        drop(sim.edit(|e| e.set_mig_mode(&gpu, true)));
        for (profile, start) in [(19, 0), (9, 4)] {
            if let Ok(made) = sim.make_foreign_instance(&gpu, GpuInstanceProfileId(profile), start)
            {
                self.foreign.entry(gpu.clone()).or_default().push(made);
            }
        }
        self.fixed.insert(gpu);
        self.new_rules("the administrator cuts the last GPU");
    }

    fn new_rules(&mut self, what: &str) {
        self.say(format!("{what}: MIG mode stays on {:?}", self.fixed));
        let mut grants = BTreeMap::new();
        for n in 0..GPUS {
            let gpu = self.world.gpu(n);
            let slice =
                [None, None, Some(TimeSlice::Long), Some(TimeSlice::Short)][self.chance.below(4)];
            self.say(format!("    shares of {gpu} have {slice:?}"));
            let may = Some(!self.fixed.contains(&gpu));
            grants.insert(
                gpu,
                Grant {
                    may_change_mode: may,
                    offers_partitions: Some(true),
                    share_time_slice: slice,
                    mps: match self.protocol {
                        MpsProtocol::V2 => {
                            MpsServer::equal(if slice.is_some() { 2 } else { 4 }, None)
                        }
                        MpsProtocol::V3 => Some(MpsServer::NAMESPACES),
                    },
                    ..Grant::default()
                },
            );
        }
        // The process may die meanwhile.
        drop(self.executor.grant(&grants));
    }

    fn any_device(&mut self) -> String {
        let gpu = format!("gpu-{}", self.chance.below(GPUS));
        match self.chance.below(13) {
            0..=1 => gpu,
            2..=5 => format!("{gpu}-ts"),
            10..=12 => format!("{gpu}-mps"),
            6 => format!("{gpu}-admin"),
            _ => format!("{gpu}-{}", PARTITIONS[self.chance.below(PARTITIONS.len())]),
        }
    }

    /// A scheduler that knows nothing of counters.
    fn allocate(&mut self, name: &str) {
        if self.world.lock().api.contains_key(&uid(name)) {
            return;
        }
        let devices: Vec<_> = (0..=self.chance.below(2))
            .map(|_| self.any_device())
            .collect();
        let configs = [
            None,
            None,
            Some(json!({ "timeSlicing": { "interval": "Long" } })),
            Some(json!({ "timeSlicing": { "interval": "Short" } })),
            Some(json!({ "mps": {} })),
            Some(json!({ "mps": { "limits": { "cores": 25 } } })),
            Some(json!({ "mps": { "limits": { "cores": 50, "memory": "1Gi" } } })),
        ];
        let config = configs[self.chance.below(configs.len())].clone();
        self.allocations += 1;
        let at = format!("t{}", self.allocations);
        self.say(format!("allocate {name} {devices:?} {config:?}"));
        let new = configured(name, &devices, config, &at);
        self.world.lock().api.insert(new.uid.clone(), new);
    }

    fn prepare(&mut self, name: &str) -> bool {
        // No container outlives a reboot, and this call makes what was there before anew.
        let boot = self.boot();
        if self
            .records()
            .iter()
            .any(|record| record.uid == uid(name) && record.boot != boot)
        {
            self.answered.remove(&uid(name));
        }
        let Some((wanted, answer)) = self.ask_to_prepare(name) else {
            return false;
        };
        let alive = !self.world.lock().dead;
        let answered = answer.is_ok() && alive;
        match answer {
            Ok(prepared) if alive => {
                let names: BTreeSet<_> = prepared.devices.iter().flat_map(|d| &d.cdi_ids).collect();
                let distinct: BTreeSet<_> = wanted
                    .allocation
                    .results
                    .iter()
                    .map(|r| (&r.device, &r.share_id))
                    .collect();
                assert_eq!(
                    names.len(),
                    distinct.len(),
                    "each share has a CDI device of its own"
                );
                self.note_answer(wanted, prepared);
            }
            Err(PrepareError {
                cause: PrepareCause::Refused(refusal),
                ..
            }) if alive => {
                *self.refused.entry(refusal.category()).or_default() += 1;
            }
            _ => {}
        }
        self.recover();
        answered
    }

    fn unprepare(&mut self, name: &str) {
        self.ask_to_unprepare(name);
        self.recover();
    }

    fn restart(&mut self) {
        self.say("restart".to_owned());
        self.world.kill();
        self.begin_again();
    }

    fn begin_again(&mut self) {
        self.executor = self.world.start();
        // Policies may come before or after the first claims.
        if self.chance.one_in(2) {
            self.new_rules("said again");
        }
        let refresh = [Refresh::Missing, Refresh::All][self.chance.below(2)];
        let report = self.executor.restore_cdi(refresh);
        self.new_rules("said again");
        self.say(format!("    {:?}", report.events));
    }

    fn recover(&mut self) {
        while self.world.lock().dead {
            self.restart();
        }
        let known: BTreeSet<_> = self.records().into_iter().map(|r| r.uid).collect();
        let api = self.world.lock().api.clone();
        let Cast {
            answered,
            lingering,
            ..
        } = &mut self.cast;
        answered.retain(|uid, (claim, _)| {
            let live = api
                .get(uid)
                .is_some_and(|now| now.allocation == claim.allocation);
            known.contains(uid) || (live && !lingering.contains(uid))
        });
        lingering.retain(|uid| known.contains(uid));
    }

    /// After a reconcile every GPU has the time slice that its holds and its policy want, and no
    /// other.
    fn check_time_slices(&self) {
        let records = self.records();
        let set = self.world.lock().slices.clone().unwrap();
        for gpu in (0..GPUS).map(|n| self.world.gpu(n)) {
            // Left for the next time.
            if self.world.lock().busy.contains(&LockName::Gpu(gpu.clone())) {
                continue;
            }
            let holds = records
                .iter()
                .flat_map(Record::holds)
                .filter(|hold| hold.gpu == gpu);
            let holds: Vec<_> = holds.collect();
            let wanted = wanted_time_slice(&self.world, &gpu);
            let wanted = wanted.filter(|slice| *slice != TimeSlice::Default);
            assert_eq!(set.get(&gpu).copied(), wanted, "{gpu} is held by {holds:?}");
        }
    }

    /// After a reconcile an MPS server runs where claims hold its slots, and nowhere else; then the
    /// compute mode is as it was found.
    fn check_mps_servers(&self) {
        let records = self.records();
        for gpu in (0..GPUS).map(|n| self.world.gpu(n)) {
            if self.world.lock().busy.contains(&LockName::Gpu(gpu.clone())) {
                continue;
            }
            let holds = |record: &&Record| {
                let mut holds = record.holds();
                holds
                    .any(|hold| hold.gpu == gpu && hold.target == Target::Gpu && hold.mps.is_some())
            };
            // A claim of an earlier boot gets its server when it is carried out again.
            let used = records.iter().filter(holds);
            let undone = |record: &Record| matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing);
            let is_now = |record: &Record| record.boot == self.boot() && !undone(record);
            let used_now = used.clone().any(is_now);
            let runs = self.world.lock().mps.contains_key(&gpu);
            let mode = sim(&self.world).facts(&gpu).unwrap().compute_mode;
            let exclusive = mode == Some(ComputeMode::ExclusiveProcess);
            if used_now {
                assert!(runs && exclusive, "no MPS server on {gpu}: {records:?}");
            } else if used.clone().count() == 0 {
                assert!(!runs && !exclusive, "an MPS server on {gpu}: {records:?}");
            }
            if used_now {
                let here = used.filter(|record| is_now(record));
                let here = here.flat_map(|record| &record.devices);
                let wanted = here.filter(|device| device.gpu == gpu);
                let wanted: BTreeMap<_, _> = wanted
                    .filter_map(|device| device.mps?.namespace)
                    .map(|namespace| (namespace.name, namespace))
                    .collect();
                let found = self.world.lock().namespaces.get(&gpu).cloned();
                assert_eq!(found.unwrap_or_default(), wanted, "on {gpu}: {records:?}");
            }
        }
    }

    /// After a reconcile each partition that lives has the MPS server that its claim needs, and no
    /// other runs.
    fn check_servers_of_partitions(&self) {
        let records = self.records();
        let mut running = self.world.lock().mps_in.clone();
        let busy = self.world.lock().busy.clone();
        for record in &records {
            let undone = matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing);
            for device in &record.devices {
                let (gpu, target) = (device.gpu.clone(), device.target);
                let (Some(slot), Some(_)) = (device.mps, target.place()) else {
                    continue;
                };
                let runs = running.remove(&GpuTarget { gpu, target });
                let is_now = record.boot == self.boot() && !undone;
                // A claim of an earlier boot gets its server when it is carried out again.
                let Some(given) = device.given.as_ref().filter(|_| is_now) else {
                    continue;
                };
                if !busy.contains(&LockName::Gpu(device.gpu.clone())) && self.lives(device) {
                    let wanted = (slot.server, given.uuid.clone());
                    assert_eq!(runs, Some(wanted), "{record:?}");
                }
            }
        }
        running.retain(|of, _| !busy.contains(&LockName::Gpu(of.gpu.clone())));
        assert_eq!(running, BTreeMap::new(), "no claim needs them: {records:?}");
    }

    /// Returns whether the partition that a device was given is there.
    fn lives(&self, device: &RecordedDevice) -> bool {
        let given = device.given.as_ref().map(|given| &given.uuid);
        let mut living = living(&self.world, &device.gpu).into_iter();
        living.any(|(_, inside)| inside.iter().any(|one| Some(&one.uuid) == given))
    }

    fn reconcile(&mut self) {
        self.say("reconcile".to_owned());
        let report = self.executor.reconcile(&self.world.view());
        self.say(format!("    {:?}", report.events));
        let dead = self.world.lock().dead;
        if !dead
            && !report
                .events
                .iter()
                .any(|e| matches!(e, Event::Failed { .. }))
        {
            self.check_time_slices();
            self.check_mps_servers();
            self.check_servers_of_partitions();
        }
        self.recover();
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
        match self.chance.below(34) {
            31..=33 => self.while_answers_are_odd(&allocated, &known),
            0..=4 => self.allocate(any),
            5..=10 => drop(self.prepare(&allocated)),
            11..=13 => {
                self.unprepare(&known);
                if self.chance.one_in(2) {
                    self.world.lock().api.remove(&uid(&known));
                }
            }
            14 => {
                self.say(format!("deallocate {allocated}"));
                self.world.lock().api.remove(&uid(&allocated));
            }
            15..=16 => self.crash_within(40),
            17 => self.restart(),
            18 if self.chance.one_in(2) => {
                self.say("reboot".to_owned());
                self.world.reboot();
                self.foreign.clear();
                self.begin_again();
            }
            19 => self.start_process(),
            20 => sim(&self.world).edit(|e| e.end_process(100)),
            21 => {
                let after = Duration::from_secs(1);
                let faults = [
                    HardwareFault::Refuses,
                    HardwareFault::Lies,
                    HardwareFault::Late {
                        after,
                        succeeds: true,
                    },
                    HardwareFault::Late {
                        after,
                        succeeds: false,
                    },
                ];
                let fault = faults[self.chance.below(4)];
                self.say(format!("next time slice: {fault:?}"));
                self.world.lock().slice_fault = Some(fault);
            }
            22 => self.change_policy(),
            23 => self.admin_partitions(),
            24 => self.reconcile(),
            25..=26 => self.lock_is_held_or_let_go(&NAMES, GPUS),
            28 => {
                let number = self.chance.below(GPUS);
                let gpu = self.world.gpu(number);
                self.say(format!("the MPS daemon of {gpu} dies"));
                self.world.lock().server_dies(&gpu);
            }
            29 => {
                let faults = [HardwareFault::Refuses, HardwareFault::Lies];
                let fault = faults[self.chance.below(2)];
                self.say(format!("next MPS server: {fault:?}"));
                self.world.lock().mps_fault = Some(fault);
            }
            _ => {
                let time = Duration::from_secs([1, 30, 200][self.chance.below(3)]);
                self.world.pass(time);
            }
        }
        self.recover();
        self.check();
    }

    /// A call in which some answers of the GPUs mean nothing.
    fn while_answers_are_odd(&mut self, allocated: &str, known: &str) {
        let ops = [
            GpuOp::GpuInstances,
            GpuOp::ComputeInstances,
            GpuOp::MigMode,
            GpuOp::Processes,
            GpuOp::Facts,
        ];
        let codes = [
            GpuErrorCode::UNKNOWN,
            GpuErrorCode::TIMEOUT,
            GpuErrorCode::NOT_FOUND,
            GpuErrorCode::NOT_SUPPORTED,
            GpuErrorCode::GPU_IS_LOST,
        ];
        let (op, code) = (
            ops[self.chance.below(ops.len())],
            codes[self.chance.below(codes.len())],
        );
        let fault = Fault {
            op: Some(op),
            skip: u32::try_from(self.chance.below(8)).unwrap(),
            times: Some(1 + u32::try_from(self.chance.below(2)).unwrap()),
            ..Fault::fail(code)
        };
        self.say(format!("odd answers: {fault:?}"));
        if op == GpuOp::Processes {
            self.world.lock().odd_processes = Some(code);
        }
        sim(&self.world).fault(fault);
        match self.chance.below(5) {
            0..=2 => drop(self.prepare(allocated)),
            3 => self.unprepare(known),
            _ => drop(self.executor.reconcile(&self.world.view())),
        }
        self.recover();
        sim(&self.world).clear_faults();
        self.world.lock().odd_processes = None;
    }

    fn change_policy(&mut self) {
        let number = self.chance.below(GPUS);
        let gpu = self.world.gpu(number);
        if !self.fixed.remove(&gpu) {
            self.fixed.insert(gpu);
        }
        self.new_rules("another policy");
    }

    /// A container of some claim starts to compute.
    fn start_process(&mut self) {
        let records: Vec<_> = self
            .records()
            .into_iter()
            .filter(|r| r.phase == Phase::Prepared)
            .collect();
        if records.is_empty() {
            return;
        }
        let record = &records[self.chance.below(records.len())];
        for device in record
            .devices
            .iter()
            .filter(|d| counts(d) && place_of(d).is_none())
        {
            sim(&self.world).start_process(&device.gpu, 100);
        }
        self.say(format!("process of {}", record.name));
        self.world
            .lock()
            .pods
            .insert(100, format!("pod-{}", record.name));
    }

    /// All claims go: nothing is left of any mode, and every GPU can take every mode again.
    fn end(&mut self) {
        self.say("end".to_owned());
        self.world.no_crash();
        self.recover();
        self.world.lock().slice_fault = None;
        self.world.lock().mps_fault = None;
        self.world.lock().busy.clear();
        sim(&self.world).edit(|e| e.end_process(100));
        self.world.pass(Duration::from_mins(5));
        self.world.lock().api.clear();
        // Some are never unprepared.
        if self.chance.one_in(2) {
            for name in NAMES {
                self.unprepare(name);
            }
        }
        for _ in 0..2 {
            self.reconcile();
            self.world.pass(Duration::from_mins(5));
        }
        self.check();
        assert_eq!(self.records(), []);
        let m = self.world.lock();
        assert_eq!(m.cdi.keys().collect::<Vec<_>>(), Vec::<&String>::new());
        assert_eq!(
            m.slices.clone().unwrap(),
            BTreeMap::new(),
            "every time slice is back at the default"
        );
        assert_eq!(m.mps, BTreeMap::new(), "no MPS server is left");
        assert_eq!(m.mps_in, BTreeMap::new(), "none of a partition");
        assert_eq!(m.namespaces, BTreeMap::new());
        for (file, bytes) in m.files(Folder::Gpus) {
            let state = picture_of(&bytes);
            assert!(
                state.settings.slice.is_none() && state.open.is_empty(),
                "{file}: {state:?}"
            );
        }
        drop(m);
        self.fixed.clear();
        self.new_rules("the end");
        let foreign: BTreeSet<_> = self.foreign.keys().cloned().collect();
        for number in 0..GPUS {
            if foreign.contains(&self.world.gpu(number)) {
                continue;
            }
            assert!(
                living(&self.world, &self.world.gpu(number)).is_empty(),
                "instances are left"
            );
            for device in ["", "-ts", "-mps", "-mig-7g80gb-0-0"] {
                let last = claim("last", &[format!("gpu-{number}{device}")], None, "t");
                self.world.lock().api.insert(last.uid.clone(), last);
                assert!(self.prepare("last"), "gpu-{number}{device} is not free");
                self.unprepare("last");
                self.world.lock().api.clear();
            }
        }
    }
}

/// A GPU is never in two modes whatever the scheduler gives out and whenever the process dies.
#[test]
fn a_gpu_is_never_in_two_modes_whenever_the_process_dies() {
    let mut refused = BTreeMap::<_, usize>::new();
    sequences(SEQUENCES, 60, |seed| {
        let mut story = Story::new(seed);
        let world = story.world.clone();
        with_log(&alone(SEQUENCES, seed), &world, || {
            let steps = 20 + story.chance.below(60);
            (0..steps).for_each(|_| story.random_step());
            story.end();
        });
        for (category, times) in story.refused {
            *refused.entry(category).or_default() += times;
        }
        world.lock().calls
    });
    println!("refused: {refused:?}");
}

/// After a reboot the time slice that a claim asked for is set again before its containers start.
#[test]
fn after_a_reboot_a_time_slice_is_set_before_containers_start() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let a = claim("a", &["gpu-0".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.reboot();
    assert_eq!(
        world.lock().slices,
        Some(BTreeMap::new()),
        "the driver has forgotten it"
    );
    let events = world.start().restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: a.uid }]);
    assert_eq!(
        world.lock().slices,
        Some(BTreeMap::from([(gpu, TimeSlice::Long)]))
    );
}

/// The time slice could not be given back with the last claim, and the next look meets another call
/// at the GPU: it is due again soon, and not only with a look by the clock.
#[test]
fn a_gpu_that_a_look_leaves_out_is_due_again_soon() {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let a = claim("a", &["gpu-0".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().slice_fault = Some(HardwareFault::Refuses);
    world.unprepare(&executor, &a.uid).unwrap();
    world.lock().slice_fault = None;
    assert!(settings(&world, &gpu).slice.is_some(), "not given back");

    world.lock().busy.insert(LockName::Gpu(gpu.clone()));
    let report = executor.tidy();
    assert!(report.left_out && report.is_open(), "{report:?}");
    world.lock().busy.clear();
    let report = executor.tidy();
    assert!(!report.is_open(), "{report:?}");
    assert!(settings(&world, &gpu).slice.is_none());
}

#[test]
fn a_gpu_without_time_slices_serves_the_default_and_refuses_others() {
    for (slice, cannot_be_read) in [TimeSlice::Default, TimeSlice::Long]
        .into_iter()
        .flat_map(|slice| [(slice, false), (slice, true)])
    {
        let is_served = slice == TimeSlice::Default;
        let world = mig_world("h100x2", 1);
        let executor = world.start();
        world.lock().slices = None;
        world.lock().slice_fault = cannot_be_read.then_some(HardwareFault::Refuses);
        let a = claim("a", &["gpu-0".to_owned()], Some(slice), "t1");
        let answer = world.prepare(&executor, &a);
        assert_eq!(answer.is_ok(), is_served, "{slice:?}: {answer:?}");
        let gpu = world.gpu(0);
        assert!(settings(&world, &gpu).slice.is_none());
    }
}

/// The driver was reloaded under a pod, and has forgotten the time slice, of which the GPU's file
/// says that it is set.
#[test]
fn a_forgotten_time_slice_is_set_again_by_a_full_refresh() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let a = claim("a", &["gpu-0".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &a).unwrap();
    let slices = || world.lock().slices.clone().unwrap();
    world.lock().slices = Some(BTreeMap::new());
    executor.restore_cdi(Refresh::Missing);
    assert_eq!(
        slices(),
        BTreeMap::new(),
        "what is known to be set costs no call"
    );
    executor.restore_cdi(Refresh::All);
    assert_eq!(slices(), BTreeMap::from([(gpu, TimeSlice::Long)]));
}

#[test]
fn a_time_slice_that_may_not_have_been_set_is_set_again() {
    for fault in [
        HardwareFault::Late {
            after: Duration::ZERO,
            succeeds: false,
        },
        HardwareFault::Lies,
    ] {
        let world = mig_world("h100x2", 1);
        let executor = world.start();
        let gpu = world.gpu(0);
        let policy = |slice| {
            let grant = Grant {
                may_change_mode: None,
                offers_partitions: Some(true),
                share_time_slice: slice,
                ..Grant::default()
            };
            executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
        };
        let set = || world.lock().slices.clone().unwrap().get(&gpu).copied();
        policy(Some(TimeSlice::Long));
        let a = claim("a", &["gpu-0-ts".to_owned()], None, "t1");
        world.prepare(&executor, &a).unwrap();
        world.lock().api.insert(a.uid.clone(), a.clone());
        // nvidia-smi hangs when the policy changes, and works again afterwards.
        policy(Some(TimeSlice::Short));
        world.lock().slice_fault = Some(fault);
        let events = executor.reconcile(&world.view()).events;
        let text = format!("failed to set the time slice of {gpu} to Short: ");
        assert!(
            matches!(&events[..], [Event::Failed { error, .. }] if error.starts_with(&text)),
            "{events:?}"
        );
        executor.reconcile(&world.view());
        assert_eq!(set(), Some(TimeSlice::Short));
        // The same when the last share lets go in between.
        policy(Some(TimeSlice::Long));
        world.lock().slice_fault = Some(fault);
        executor.reconcile(&world.view());
        world.unprepare(&executor, &a.uid).unwrap();
        assert_eq!(set(), None, "restored");
        assert!(settings(&world, &gpu).slice.is_none());
    }
}

#[test]
fn a_time_slice_that_unprepare_could_not_restore_reconcile_does() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let a = claim("a", &["gpu-0".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().slice_fault = Some(HardwareFault::Refuses);
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        divvy_executor::Unprepared::Done
    );
    let slices = || world.lock().slices.clone().unwrap();
    assert_eq!(slices(), BTreeMap::from([(gpu.clone(), TimeSlice::Long)]));
    let events = executor.reconcile(&world.view()).events;
    assert_eq!(events, [Event::SettingsGivenBack { gpu }]);
    assert_eq!(slices(), BTreeMap::new());
}

/// A slice is given back although the note that it is not sure any more cannot be written before.
#[test]
fn a_full_disk_keeps_no_time_slice_from_being_given_back() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &["gpu-0".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().write_error = Some((Place::Store, std::io::ErrorKind::StorageFull));
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        divvy_executor::Unprepared::Done
    );
    assert_eq!(world.lock().slices.clone().unwrap(), BTreeMap::new());
}
