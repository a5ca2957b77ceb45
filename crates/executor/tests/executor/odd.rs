//! Odd answers of NVML, from the library's C functions through the inventory and the offer to
//! prepare and unprepare: any number of calls answer with a code that means nothing, or succeed
//! with sizes, counts and texts that cannot be.
//!
//! A sequence is some rounds. In each, GPUs are read, offered, allocated, prepared and unprepared
//! while NVML is odd; then it answers well. While it is odd, nothing is published that is not so,
//! and a prepare fails or gives what was allocated. From the first good reading on, what is
//! published is what would be without all that; every claim can be prepared, and nothing is left of
//! any. `DIVVY_ODD_SEQUENCES=1000000 cargo test --release -p divvy-executor --test executor odd::`
//! runs a million.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_api::policy::GpuPolicy;
use divvy_claims::{AllocatedDevice, Claim, Phase, Record, Stored};
use divvy_executor::{Executor, Folder, Unprepared, chain};
use divvy_gpu_sim::{Engine, Fault, SimGpu};
use divvy_model::{
    AttributeValue, DeviceKind, DeviceName, GpuErrorCode, GpuOp, GpuUuid, Inventory, MigMode,
    Sharing, Target, lock,
};
use divvy_nvml::{NvmlDriver, read_inventory_after};
use divvy_offer::{
    Answer, Ask, Claimant, Device, Fact, GpuRules, HealthView, Held, KubeVersion, ModeLock,
    Outputs, Pool, Records, Settings, step,
};
use nvidia_ml::Loaded;

use crate::mig_world::{claim_of, is_clean, mode, setup, sim};
use crate::story::{alone, sequences, uid};
use crate::world::accessors::{made, picture};
use crate::world::{Chance, World};

const SEQUENCES: &str = "DIVVY_ODD_SEQUENCES";
/// So many readings after an odd time all is known again at the latest.
const READINGS: usize = 18;
/// Odd times, each with a good one after it, in a sequence.
const ROUNDS: usize = 3;
const NAMES: [&str; 4] = ["a", "b", "c", "d"];
/// The library of this process, which a test has alone.
static LIBRARY: Mutex<()> = Mutex::new(());
const EVERYTHING: &str = r#"{"rules":[{"modes":["Whole","Mig","TimeSlicing"]}]}"#;

/// A node as it is found.
struct Node {
    engine: Engine,
    policies: Vec<GpuPolicy>,
    /// The reading and the offer of it while nothing is odd.
    good: Option<(Arc<Inventory>, Arc<Pool>)>,
}

impl Node {
    /// GPUs under a policy that offers everything, or without a policy; `cut` turns MIG mode on.
    fn new(spec: &str, policies: Option<&str>, cut: bool) -> Self {
        let mut engine = Engine::new(&spec.parse().unwrap());
        let gpus: Vec<_> = engine.gpus().iter().map(|g| g.facts.uuid.clone()).collect();
        for gpu in gpus.iter().filter(|_| cut) {
            let facts = &mut engine.gpu(gpu).unwrap().facts;
            facts.mig_mode = MigMode::Supported {
                current: true,
                pending: true,
            };
        }
        let policies = policies.map(policy).unwrap_or_default();
        Self {
            engine,
            policies,
            good: None,
        }
    }

    fn all() -> Vec<Self> {
        vec![
            Self::new("h100x1", Some(EVERYTHING), false),
            Self::new("h100x1", Some(EVERYTHING), true),
            Self::new("a30x1", None, true),
            Self::new("a100-40x1,l4x1", Some(EVERYTHING), true),
            Self::new("l4x1", Some(EVERYTHING), false),
        ]
    }
}

fn policy(spec: &str) -> Vec<GpuPolicy> {
    vec![GpuPolicy {
        name: "p".to_owned(),
        uid: None,
        generation: None,
        spec: serde_json::from_str(spec).unwrap(),
    }]
}

fn settings() -> Settings {
    Settings {
        node: "n1".to_owned(),
        rules: GpuRules::default(),
        mode_lock: ModeLock::Auto,
        leave: Duration::from_mins(1),
        ask_again: Duration::from_secs(30),
        retry: Duration::from_secs(5),
        neighbours_first: false,
    }
}

struct Story<'a> {
    loaded: &'a Loaded,
    node: &'a Node,
    world: World,
    executor: Executor,
    brain: divvy_offer::World,
    out: Outputs,
    ask: Option<Ask>,
    chance: Chance,
    allocations: u32,
    /// Rounds after which more than one good reading was needed.
    slow: usize,
}

impl<'a> Story<'a> {
    fn new(loaded: &'a Loaded, node: &'a Node, seed: u64) -> Self {
        loaded.good();
        assert!(loaded.keep(&node.engine));
        let world = World::new("l4x1", seed);
        {
            let mut m = world.lock();
            m.inventory = None;
            // A prepare that is refused for a while tries again often enough.
            m.is_cut = true;
        }
        let executor = world.start();
        let driver = NvmlDriver::open(Some(loaded.path())).unwrap();
        let mut story = Self {
            loaded,
            node,
            world,
            executor,
            brain: divvy_offer::World::new(settings()),
            out: Outputs::default(),
            ask: None,
            chance: Chance(seed ^ 0x0dd),
            allocations: 0,
            slow: 0,
        };
        story.world.lock().driver = Some(Arc::new(driver));
        for _ in 0..8 {
            story.learn(Fact::Server {
                version: KubeVersion::new(1, 37, 1),
                dropped: None,
            });
        }
        let policies = node.policies.clone();
        let labels = BTreeMap::new();
        story.learn(Fact::Policies { policies, labels });
        story.learn(Fact::Health(Arc::new(HealthView::default())));
        story
    }

    fn say(&self, text: String) {
        self.world.lock().log.push(text);
    }

    fn now(&self) -> Duration {
        self.world.lock().now
    }

    fn learn(&mut self, fact: Fact) {
        let now = self.now();
        let before = std::mem::take(&mut self.out.grants);
        self.out = step(&mut self.brain, fact, now);
        self.ask = self.ask.or(self.out.ask);
        if self.out.grants != before {
            self.executor.grant(&self.out.grants).unwrap();
        }
    }

    /// The API answers what it was asked.
    fn answer(&mut self) {
        if self.ask.take().is_none() {
            return;
        }
        let mut holders = BTreeMap::<DeviceName, BTreeSet<Claimant>>::new();
        for claim in self.world.lock().api.values() {
            for result in &claim.allocation.results {
                holders
                    .entry(result.device.clone())
                    .or_default()
                    .insert(Claimant {
                        uid: claim.uid.clone(),
                        name: format!("{}/{}", claim.namespace, claim.name),
                    });
            }
        }
        let published = BTreeSet::new();
        self.learn(Fact::Answer(Some(Answer { holders, published })));
    }

    fn pass(&mut self, time: Duration) {
        self.world.pass(time);
        self.learn(Fact::Time);
        self.answer();
    }

    /// Opens NVML anew where the last session is over, as a session of the plugin does.
    fn reopen(&mut self) {
        self.say("NVML is opened again".to_owned());
        // Closed first: NVML initialises itself again only then.
        self.world.lock().driver = None;
        for attempt in 0.. {
            if attempt == 20 {
                self.loaded.good();
            }
            if let Ok(driver) = NvmlDriver::open(Some(self.loaded.path())) {
                self.world.lock().driver = Some(Arc::new(driver));
                return;
            }
        }
    }

    /// The GPUs are read, and what is read is offered.
    fn read(&mut self) {
        let before = self.world.lock().inventory.clone();
        let topology = |address| {
            let found = self.node.engine.topology();
            found.get(&address).cloned().unwrap_or_default()
        };
        let driver = self.world.lock().driver.clone().unwrap();
        let read = read_inventory_after(&*driver, &topology, before.as_deref());
        drop(driver);
        match read {
            Ok(found) => {
                let found = Arc::new(found);
                if !found.problems.is_empty() {
                    self.say(format!("    {:?}", found.problems));
                }
                self.world.lock().inventory = Some(found.clone());
                self.number();
                self.learn(Fact::Inventory {
                    gpus: found,
                    driver_down: false,
                });
            }
            Err(error) => {
                self.say(format!("    {error}"));
                self.reopen();
            }
        }
        self.records();
        self.answer();
        self.check_pool();
    }

    fn number(&self) {
        let Some(inventory) = self.world.lock().inventory.clone() else {
            return;
        };
        let present = inventory.gpus.iter();
        let present: Vec<_> = present
            .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address))
            .collect();
        let forget = self.out.forget.clone();
        let keep = |gpu: &GpuUuid, _| !forget.contains(gpu);
        self.executor.number_gpus(&present, &keep).unwrap();
    }

    /// The records are read, as the plugin reads them.
    fn records(&mut self) {
        let held = self.executor.held().unwrap();
        let inventory = self.world.lock().inventory.clone();
        let gpus = inventory.iter().flat_map(|inventory| &inventory.gpus);
        let any_unknown = gpus.filter_map(|(_, gpu)| gpu.mig.as_ref()).any(|mig| {
            let listed = mig.instances.as_ref();
            listed.is_none_or(|all| {
                !all.iter().all(|instance| {
                    held.iter().any(|held| match held.hold.target {
                        Target::Partition(place) => place.is_filled_by(instance),
                        Target::Gpu => false,
                    })
                })
            })
        });
        let foreign = if any_unknown {
            let all = self.executor.foreign().into_iter();
            all.flat_map(|(gpu, all)| all.into_iter().map(move |one| (gpu.clone(), one.placement)))
                .collect()
        } else {
            Vec::new()
        };
        let held = held.into_iter().map(|held| Held {
            claim: format!("{}/{}", held.claim.namespace, held.claim.name),
            lingering: matches!(held.phase, Phase::Leaving(_)),
            hold: held.hold,
        });
        let servers = self.executor.mps_servers().unwrap();
        let wedged = servers
            .iter()
            .filter_map(|(of, noted)| Some((of.clone(), noted.wedged?)));
        let records = Records {
            mps_wedged: wedged.collect(),
            ordinals: self.executor.ordinals().unwrap(),
            held: held.collect(),
            fenced: self.executor.fences().unwrap().into_keys().collect(),
            foreign,
            mig_found: self.executor.mig_found().unwrap(),
            share_units: self.executor.share_units().unwrap(),
            mps_servers: servers
                .iter()
                .map(|(of, n)| (of.clone(), n.server))
                .collect(),
        };
        self.learn(Fact::Records(records));
    }

    /// Nothing is published that is not so: each device is one of those that are offered where
    /// nothing is odd, and says nothing else about itself.
    fn check_pool(&self) {
        let (Some((_, good)), Some(pool)) = (&self.node.good, &self.out.pool) else {
            return;
        };
        let mut seen = BTreeSet::new();
        for device in pool.devices() {
            assert!(seen.insert(&device.name), "{} twice", device.name);
            let name = &device.name;
            let Some(so) = good.device(name) else {
                panic!("{name} does not exist: {device:?}");
            };
            // An unknown brand or architecture is said to be unknown.
            let known =
                |value: &&AttributeValue| **value != AttributeValue::String("Unknown".to_owned());
            let said = device.attributes.iter().filter(|(_, value)| known(value));
            for (key, value) in said {
                assert_eq!(Some(value), so.attributes.get(key), "{name}: {key}");
            }
            for (key, value) in &device.capacity {
                assert_eq!(Some(value), so.capacity.get(key), "{name}: {key}");
            }
        }
    }

    /// The scheduler gives a claim a device that is free by the counters.
    fn allocate(&mut self) {
        let name = NAMES[self.chance.below(NAMES.len())];
        let Some(pool) = self.out.pool.clone() else {
            return;
        };
        if self.world.lock().api.contains_key(&uid(name)) {
            return;
        }
        let free = self.free(&pool);
        if free.is_empty() {
            return;
        }
        let device = &free[self.chance.below(free.len())].name;
        self.allocations += 1;
        let at = format!("t{}", self.allocations);
        let mut claim = claim_of(name, &[device.as_str()], &at);
        let is_share = DeviceKind::parse(device).unwrap().sharing == Sharing::TimeSliced;
        for result in &mut claim.allocation.results {
            *result = AllocatedDevice {
                share_id: is_share.then(|| format!("{name}-{at}")),
                ..result.clone()
            };
        }
        self.say(format!("allocate {name} {device}"));
        self.world.lock().api.insert(claim.uid.clone(), claim);
    }

    fn free<'p>(&self, pool: &'p Pool) -> Vec<&'p Device> {
        let given: BTreeSet<_> = {
            let m = self.world.lock();
            let results = m.api.values().flat_map(|claim| &claim.allocation.results);
            results.map(|result| result.device.clone()).collect()
        };
        let mut left = BTreeMap::new();
        for set in pool.slices.iter().flat_map(|slice| &slice.counter_sets) {
            for (counter, amount) in &set.counters {
                left.insert((&*set.name, &**counter), i128::from(amount.value()));
            }
        }
        let needs = |device: &'p Device| {
            let sets = device.consumes.iter();
            sets.flat_map(|uses| {
                let counters = uses.counters.iter();
                counters.map(move |(name, n)| ((&*uses.set, &**name), i128::from(n.value())))
            })
        };
        for (counter, amount) in given
            .iter()
            .filter_map(|name| pool.device(name))
            .flat_map(needs)
        {
            *left.entry(counter).or_default() -= amount;
        }
        let is_free = |device: &&'p Device| {
            let kind = DeviceKind::parse(&device.name).unwrap();
            if !device.taints.is_empty() || !kind.sharing.holds() {
                return false;
            }
            if given.contains(&device.name) {
                return device.allow_multiple;
            }
            needs(device).all(|(counter, n)| left.get(&counter).is_some_and(|left| *left >= n))
        };
        pool.devices().filter(is_free).collect()
    }

    /// Prepares a claim; what it is given is what was allocated.
    fn prepare(&mut self, claim: &Claim) -> bool {
        self.say(format!("prepare {}", claim.name));
        let answer = self.world.prepare(&self.executor, claim);
        let said = answer
            .as_ref()
            .map_or_else(|e| chain(e), |_| "ready".to_owned());
        self.say(format!("    {said}"));
        if answer.is_ok() {
            self.check_given(claim);
        }
        self.records();
        answer.is_ok()
    }

    fn check_given(&self, claim: &Claim) {
        let engine = self.loaded.kept().unwrap();
        let record = match self.world.lock().records().remove(&claim.uid) {
            Some(Stored::Fine(record)) => record,
            other => panic!("{other:?}"),
        };
        assert_eq!(record.allocation(), claim.allocation);
        let given = made(&self.world, &claim.uid);
        for device in &record.devices {
            let name = &device.allocated.device;
            let found = engine.gpus().iter().find(|g| g.facts.uuid == device.gpu);
            let gpu = found.unwrap();
            let kind = DeviceKind::parse(name).unwrap();
            let Some(partition) = kind.partition() else {
                assert!(!gpu.facts.mig_mode.is_on(), "{name} is cut");
                continue;
            };
            let lives = gpu.instances.iter().find(|lives| {
                lives.instance.profile == partition.profile
                    && lives.instance.placement.start == partition.start
            });
            let lives = lives.unwrap_or_else(|| panic!("{name} does not live: {gpu:?}"));
            assert_eq!(lives.compute.len(), 1, "{name}");
            let uuids: Vec<_> = given.iter().map(|(_, made)| &made.uuid).collect();
            assert_eq!(uuids, [&lives.compute[0].uuid], "{name}");
        }
    }

    fn unprepare(&mut self, claim: &Claim) -> bool {
        self.say(format!("unprepare {}", claim.name));
        let answer = self.world.unprepare(&self.executor, &claim.uid);
        self.say(format!("    {answer:?}"));
        self.records();
        matches!(answer, Ok(Unprepared::Done | Unprepared::NothingThere))
    }

    fn any_claim(&mut self) -> Option<Claim> {
        let claims: Vec<_> = self.world.lock().api.values().cloned().collect();
        (!claims.is_empty()).then(|| claims[self.chance.below(claims.len())].clone())
    }

    fn reconcile(&mut self) {
        let report = self.executor.reconcile(&self.world.view());
        self.say(format!("reconcile: {:?}", report.events));
        self.records();
    }

    /// So many things happen while NVML is odd.
    fn odd_round(&mut self) {
        let one_in = [0, 3, 20, 60, 200][self.chance.below(5)];
        let sites = if one_in == 0 || self.chance.one_in(4) {
            [4, 12, 40][self.chance.below(3)]
        } else {
            0
        };
        let seed = self.chance.below(usize::MAX) as u64;
        self.say(format!("NVML is odd: one in {one_in}, sites {sites}"));
        self.loaded.odd(seed, one_in, sites);
        for _ in 0..=self.chance.below(5) {
            match self.chance.below(9) {
                0..=3 => self.read(),
                4 => self.allocate(),
                5..=6 => {
                    if let Some(claim) = self.any_claim() {
                        self.prepare(&claim);
                    }
                }
                7 => {
                    if let Some(claim) = self.any_claim()
                        && self.unprepare(&claim)
                    {
                        self.world.lock().api.remove(&claim.uid);
                    }
                }
                _ => {
                    // The number of a GPU that is not listed for minutes is free.
                    let seconds = [1, 40][self.chance.below(2)];
                    self.pass(Duration::from_secs(seconds));
                }
            }
            self.log_odd();
        }
        if self.chance.one_in(4) {
            self.reconcile();
        }
        self.log_odd();
        self.loaded.good();
    }

    /// Logs which odd answers were given.
    fn log_odd(&self) {
        self.say(self.loaded.noted());
    }

    /// From now on NVML answers well: all is as if it always had.
    fn good_round(&mut self) {
        self.say("NVML is good".to_owned());
        // The first reading says everything again, unless what it left out came twice in the same
        // way and is asked for again only after a while.
        self.read();
        self.slow += usize::from(!self.has_profiles());
        for _ in 0..READINGS {
            if !self.has_profiles() {
                self.read();
            }
        }
        let (Some(inventory), Some((good, _))) =
            (self.world.lock().inventory.clone(), &self.node.good)
        else {
            panic!("nothing was read");
        };
        for (uuid, gpu) in &good.gpus {
            let found = inventory.gpus.get(uuid).expect("the GPU is read again");
            assert_eq!(profiles(found), profiles(gpu), "profiles are read again");
        }
        // Claims get what they were allocated, and leave nothing.
        let claims: Vec<_> = self.world.lock().api.values().cloned().collect();
        for claim in &claims {
            if self.chance.one_in(2) {
                let is_ready = self.prepare(claim);
                assert!(is_ready, "{} is not ready", claim.name);
            }
        }
        for claim in &claims {
            let mut is_done = false;
            for _ in 0..3 {
                is_done = self.unprepare(claim);
                if is_done {
                    break;
                }
                self.pass(Duration::from_mins(5));
                self.reconcile();
            }
            assert!(is_done, "{} is not let go", claim.name);
            self.world.lock().api.remove(&claim.uid);
        }
        for _ in 0..2 {
            self.reconcile();
            self.pass(Duration::from_mins(5));
        }
        let report = self.executor.leave();
        self.say(format!("leave: {:?}", report.events));
        self.check_nothing_left();
        // The offer is the one that would be.
        self.read();
        self.check_good();
        self.read();
        self.check_good();
    }

    fn has_profiles(&self) -> bool {
        let inventory = self.world.lock().inventory.clone();
        let (Some(found), Some((good, _))) = (inventory, &self.node.good) else {
            return false;
        };
        good.gpus.iter().all(|(uuid, gpu)| {
            found
                .gpus
                .get(uuid)
                .is_some_and(|f| profiles(f) == profiles(gpu))
        })
    }

    fn check_nothing_left(&self) {
        let engine = self.loaded.kept().unwrap();
        let shape = |gpu: &SimGpu| {
            let facts = &gpu.facts;
            let instances: Vec<_> = gpu.instances.iter().map(|i| i.instance).collect();
            (facts.mig_mode, facts.compute_mode, instances)
        };
        for (found, left) in self.node.engine.gpus().iter().zip(engine.gpus()) {
            assert_eq!(shape(left), shape(found), "the GPU is as it was found");
            let picture = picture(&self.world, &left.facts.uuid);
            assert_eq!(picture.open, []);
            assert_eq!(picture.noted, []);
        }
        let m = self.world.lock();
        assert_eq!(m.records(), BTreeMap::<_, Stored<Record>>::new());
        assert!(m.cdi.is_empty(), "{:?}", m.cdi.keys());
        assert!(m.metadata.is_empty(), "{:?}", m.metadata.keys());
        assert!(m.files(Folder::Claims).is_empty());
    }

    fn check_good(&self) {
        let (good, pool) = self.node.good.as_ref().unwrap();
        let inventory = self.world.lock().inventory.clone().unwrap();
        assert_eq!(&inventory, good);
        assert_eq!(self.out.pool.as_ref(), Some(pool));
    }

    fn run(&mut self, rounds: usize) {
        // Numbers are given in the order in which GPUs are found.
        if self.node.engine.gpus().len() > 1 || self.chance.one_in(2) {
            self.begin_well();
        }
        for _ in 0..rounds {
            self.odd_round();
            self.good_round();
        }
    }

    /// Reads and offers the node while nothing is odd.
    fn begin_well(&mut self) {
        for _ in 0..2 {
            self.read();
        }
    }
}

fn profiles(gpu: &divvy_model::Gpu) -> Option<&divvy_model::mig::MigCapabilities> {
    gpu.mig.as_ref().map(|mig| &mig.capabilities)
}

#[test]
fn odd_answers_publish_and_give_nothing_wrong_and_lose_nothing() {
    let _alone = lock(&LIBRARY);
    let loaded = Loaded::beside_this_test().expect("the library is built with the tests");
    let mut nodes = Node::all();
    for node in &mut nodes {
        let offered = |node: &Node| {
            let mut story = Story::new(&loaded, node, 0);
            story.begin_well();
            let inventory = story.world.lock().inventory.clone().unwrap();
            (inventory, story.out.pool.clone().unwrap())
        };
        node.good = Some(offered(node));
    }
    let mut slow = 0;
    sequences(SEQUENCES, 300, |seed| {
        let node = &nodes[usize::try_from(seed).unwrap() % nodes.len()];
        let mut story = Story::new(&loaded, node, seed);
        let world = story.world.clone();
        crate::story::with_log(&alone(SEQUENCES, seed), &world, || {
            story.run(ROUNDS);
        });
        slow += story.slow;
        world.lock().calls
    });
    println!("{ROUNDS} odd times each; more than one good reading was needed after {slow}");
}

/// Calls of NVML that each of some readings or prepares in a row makes.
fn calls<'a>(story: &mut Story<'a>, mut act: impl FnMut(&mut Story<'a>)) -> Vec<u64> {
    let one = |_| {
        let before = story.loaded.calls();
        act(story);
        story.loaded.calls() - before
    };
    (0..40).map(one).collect()
}

/// Kept answers of NVML are asked for again while GPUs are read, and not while a pod waits.
#[test]
fn a_prepare_pays_for_no_answer_that_is_asked_for_again() {
    let _alone = lock(&LIBRARY);
    let loaded = Loaded::beside_this_test().expect("the library is built with the tests");
    for cut in [false, true] {
        let node = Node::new("h100x8", Some(EVERYTHING), cut);
        let mut story = Story::new(&loaded, &node, 0);
        println!("8 H100s, MIG mode on: {cut}");
        println!("  readings: {:?}", calls(&mut story, Story::read));
        for device in ["gpu-0", "gpu-1-mig-1g10gb-19-0"] {
            let claim = claim_of("a", &[device], "t1");
            story
                .world
                .lock()
                .api
                .insert(claim.uid.clone(), claim.clone());
            let mut prepares = Vec::new();
            let both = calls(&mut story, |story| {
                let before = story.loaded.calls();
                let answer = story.world.prepare(&story.executor, &claim);
                assert!(answer.is_ok(), "{answer:?}");
                prepares.push(story.loaded.calls() - before);
                story.world.unprepare(&story.executor, &claim.uid).unwrap();
            });
            println!("  prepares of {device}: {prepares:?}; with unprepare: {both:?}");
            // The first may turn MIG mode on or off, and lists a partition of its kind for the
            // first time.
            let later: BTreeSet<_> = prepares.iter().skip(1).collect();
            assert_eq!(later.len(), 1, "{device}: {prepares:?}");
            assert!(prepares[0] < 130, "{device}: {prepares:?}");
        }
    }
}

/// An instance that is taken for gone is never removed, and no record says that it was ours.
#[test]
fn an_odd_answer_that_nothing_lives_leaves_no_partition_behind() {
    let ops = [
        GpuOp::GpuInstances,
        GpuOp::ComputeInstances,
        GpuOp::DestroyComputeInstance,
        GpuOp::DestroyGpuInstance,
    ];
    for code in [GpuErrorCode::NOT_FOUND, GpuErrorCode::NOT_SUPPORTED] {
        for op in ops {
            let (world, executor, a, _) = setup();
            world.prepare(&executor, &a).unwrap();
            let sim = sim(&world);
            sim.fault(Fault::fail(code).of(op).times(1));
            // It may fail; the kubelet asks again.
            drop(world.unprepare(&executor, &a.uid));
            sim.clear_faults();
            world.unprepare(&executor, &a.uid).unwrap();
            assert!(is_clean(&world), "{op:?} answered {code}");
        }
    }
}

/// A GPU is gone, with all that lived on it, if it is not listed any more, and not by what it
/// answers.
#[test]
fn a_gpu_that_is_listed_keeps_its_partitions_whatever_it_says() {
    let codes = [
        GpuErrorCode::NOT_FOUND,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::GPU_NOT_FOUND,
    ];
    for code in codes {
        for op in [GpuOp::GpuInstances, GpuOp::ComputeInstances] {
            let (world, executor, a, _) = setup();
            world.prepare(&executor, &a).unwrap();
            let sim = sim(&world);
            for op in [op, GpuOp::GpuInstances, GpuOp::MigMode] {
                sim.fault(Fault::fail(code).of(op));
            }
            let answer = world.unprepare(&executor, &a.uid);
            assert!(!matches!(answer, Ok(Unprepared::Done)), "{op:?} {code}");
            sim.clear_faults();
            world.unprepare(&executor, &a.uid).unwrap();
            assert!(is_clean(&world), "{op:?} answered {code}");
        }
    }
}

/// Three questions show that a driver is gone with all that lived on its GPUs; an odd answer to
/// each does not.
#[test]
fn partitions_are_not_gone_with_a_driver_that_is_away_for_a_moment() {
    let ops = [GpuOp::GpuInstances, GpuOp::MigMode, GpuOp::List];
    for times in 1..=2 {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        let sim = sim(&world);
        for op in ops {
            let fails = Fault::fail(GpuErrorCode::DRIVER_NOT_LOADED);
            sim.fault(fails.of(op).times(times));
        }
        // It may fail; the kubelet asks again.
        drop(world.unprepare(&executor, &a.uid));
        sim.clear_faults();
        world.unprepare(&executor, &a.uid).unwrap();
        assert!(is_clean(&world), "{times} odd answers each");
    }
}

/// A mode that we have turned on is given back, whatever is said of that.
#[test]
fn a_mig_mode_that_may_be_on_is_ours_whatever_is_said_of_it() {
    let codes = [
        GpuErrorCode::IN_USE,
        GpuErrorCode::UNKNOWN,
        GpuErrorCode::TIMEOUT,
    ];
    for code in codes {
        for passing in 0..12 {
            let (world, executor, a, gpu) = setup();
            assert!(!mode(&world, &gpu));
            let sim = sim(&world);
            let fails = Fault::fail_after(code).of(GpuOp::SetMigMode);
            sim.fault(fails.times(1));
            let fails = Fault::fail(GpuErrorCode::NO_PERMISSION).of(GpuOp::MigMode);
            sim.fault(fails.after(passing).times(1));
            drop(world.prepare(&executor, &a));
            sim.clear_faults();
            world.prepare(&executor, &a).unwrap();
            world.unprepare(&executor, &a.uid).unwrap();
            executor.leave();
            let is_back = is_clean(&world) && !mode(&world, &gpu);
            assert!(is_back, "{code}, after {passing} readings");
        }
    }
}

/// The same while it is made: a compute instance fails, and then its GPU instance cannot be seen.
#[test]
fn an_instance_that_is_half_made_is_ours_whatever_is_said_of_it() {
    for code in [GpuErrorCode::NOT_FOUND, GpuErrorCode::NOT_SUPPORTED] {
        for op in [GpuOp::GpuInstances, GpuOp::ComputeInstances] {
            for passing in 0..4 {
                let (world, executor, a, _) = setup();
                let sim = sim(&world);
                let fails = Fault::fail(GpuErrorCode::UNKNOWN);
                sim.fault(fails.of(GpuOp::CreateComputeInstance).times(1));
                let fails = Fault::fail(GpuErrorCode::UNKNOWN);
                sim.fault(fails.of(GpuOp::DestroyGpuInstance).times(1));
                sim.fault(Fault::fail(code).of(op).after(passing).times(1));
                drop(world.prepare(&executor, &a));
                sim.clear_faults();
                let answer = world.prepare(&executor, &a);
                assert!(answer.is_ok(), "{op:?} {code} {passing}: {answer:?}");
                world.unprepare(&executor, &a.uid).unwrap();
                assert!(is_clean(&world), "{op:?} answered {code}");
            }
        }
    }
}
