//! A cluster around one `World`: claims, a scheduler that counts right and writes late, and an API
//! that answers late.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::policy::GpuPolicy;
use divvy_gpu_sim::{Engine, mig_capabilities};
use divvy_model::health::Ailment;
use divvy_model::{
    ClaimUid, DeviceKind, DeviceName, GpuUuid, Hold, Inventory, Ordinals, ShareUnit, Target,
};
use divvy_offer::{
    Answer, Ask, Claimant, Device, Fact, GpuRules, HealthView, Held, KubeVersion, ModeLock,
    Outputs, Pool, Records, Settings, Sick, World, step,
};

pub(crate) const LEAVE: Duration = Duration::from_mins(1);
/// From the scheduler's choice to its write, its view of the slices included.
pub(crate) const LATEST_WRITE: u64 = 55;

pub(crate) struct Claim {
    pub(crate) uid: ClaimUid,
    pub(crate) device: DeviceName,
    /// When the scheduler's write arrives.
    pub(crate) written: Duration,
    pub(crate) prepared: bool,
    /// True if it was given percent of its device.
    pub(crate) percent: bool,
}

pub(crate) struct Cluster {
    pub(crate) world: World,
    pub(crate) now: Duration,
    pub(crate) all: Inventory,
    pub(crate) inventory: Inventory,
    ordinals: Ordinals,
    pub(crate) health: HealthView,
    policy: Vec<GpuPolicy>,
    version: KubeVersion,
    pub(crate) claims: Vec<Claim>,
    made: u32,
    /// The units that the grants have; they outlast a process.
    units: BTreeMap<GpuUuid, ShareUnit>,
    pub(crate) ask: Option<Ask>,
    pub(crate) out: Outputs,
    /// The content of the slices; outlasts a process.
    pub(crate) slices: Arc<Pool>,
}

pub(crate) fn settings() -> Settings {
    Settings {
        node: "n1".to_owned(),
        rules: GpuRules::default(),
        mode_lock: ModeLock::Auto,
        neighbours_first: false,
        leave: LEAVE,
        ask_again: Duration::from_secs(30),
        retry: Duration::from_secs(5),
    }
}

pub(crate) fn policy(rules: &str) -> Vec<GpuPolicy> {
    let spec = serde_json::from_str(&format!(r#"{{"rules":[{rules}]}}"#)).unwrap();
    vec![GpuPolicy {
        name: "p".to_owned(),
        uid: None,
        generation: None,
        spec,
    }]
}

impl Cluster {
    /// A node with these GPUs and this rule, on the newest Kubernetes, with its first pool
    /// published.
    pub(crate) fn new(spec: &str, rules: &str) -> Self {
        let engine = Engine::new(&spec.parse().unwrap());
        let all = engine.inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            all.gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        assert!(
            engine
                .gpus()
                .iter()
                .all(|gpu| mig_capabilities(&gpu.model).is_some())
        );
        let mut cluster = Self {
            world: World::new(settings()),
            now: Duration::from_secs(1000),
            inventory: all.clone(),
            all,
            ordinals,
            health: HealthView::default(),
            policy: policy(rules),
            version: KubeVersion::new(1, 37, 1),
            claims: Vec::new(),
            made: 0,
            units: BTreeMap::new(),
            ask: None,
            out: Outputs::default(),
            slices: Arc::new(Pool {
                name: String::new(),
                slices: Vec::new(),
            }),
        };
        cluster.begin();
        cluster.answer(true);
        cluster
    }

    /// Another process: it knows nothing and learns everything again.
    pub(crate) fn begin(&mut self) {
        self.begin_with(settings());
    }

    pub(crate) fn begin_with(&mut self, settings: Settings) {
        self.world = World::new(settings);
        self.ask = None;
        self.server(self.version);
        self.learn(Fact::Policies {
            policies: self.policy.clone(),
            labels: BTreeMap::new(),
        });
        self.records();
        self.read();
        self.learn(Fact::Health(Arc::new(self.health.clone())));
    }

    pub(crate) fn learn(&mut self, fact: Fact) {
        self.out = step(&mut self.world, fact, self.now);
        self.ask = self.ask.or(self.out.ask);
        for (gpu, grant) in &self.out.grants {
            match grant.share_unit {
                Some(unit) => self.units.insert(gpu.clone(), unit),
                None => self.units.remove(gpu),
            };
        }
        if let Some(pool) = &self.out.pool {
            self.slices = pool.clone();
        }
    }

    pub(crate) fn gpu(&self, ordinal: u32) -> GpuUuid {
        self.ordinals.gpu(ordinal).unwrap().clone()
    }

    pub(crate) fn read(&mut self) {
        self.learn(Fact::Inventory {
            gpus: Arc::new(self.inventory.clone()),
            driver_down: false,
        });
    }

    /// The rules are others, and no process knows it yet.
    pub(crate) fn set_rules(&mut self, rules: &str) {
        self.policy = policy(rules);
    }

    pub(crate) fn rules(&mut self, rules: &str) {
        self.set_rules(rules);
        self.learn(Fact::Policies {
            policies: self.policy.clone(),
            labels: BTreeMap::new(),
        });
    }

    pub(crate) fn server(&mut self, version: KubeVersion) {
        self.version = version;
        // As often as it takes for an older one to be forgotten.
        for _ in 0..8 {
            self.learn(Fact::Server {
                version,
                dropped: None,
            });
        }
    }

    pub(crate) fn sick(&mut self, ordinal: u32, is_sick: bool) {
        let gpu = self.gpu(ordinal);
        if is_sick {
            let sick = Sick {
                gpu: [Ailment::Xid(79)].into(),
                ..Sick::default()
            };
            self.health.sick.insert(gpu, sick);
        } else {
            self.health.sick.remove(&gpu);
        }
        self.learn(Fact::Health(Arc::new(self.health.clone())));
    }

    /// Time passes, in steps as small as the outputs ask for.
    pub(crate) fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        for _ in 0..1000 {
            let next = self.out.wake_at.filter(|at| *at <= until).unwrap_or(until);
            self.now = self.now.max(next);
            self.learn(Fact::Time);
            if self.now == until {
                return;
            }
        }
        panic!("it wakes up without an end");
    }

    /// The API answers what it was asked, or does not.
    pub(crate) fn answer(&mut self, well: bool) {
        let Some(ask) = self.ask.take() else { return };
        let mut holders = BTreeMap::<DeviceName, BTreeSet<Claimant>>::new();
        for claim in self.claims.iter().filter(|claim| claim.written <= self.now) {
            holders
                .entry(claim.device.clone())
                .or_default()
                .insert(claimant(claim));
        }
        let published = self
            .slices
            .devices()
            .filter(|device| ask.slices && !is_admin(&device.name));
        let published = published.map(|device| device.name.clone()).collect();
        self.learn(Fact::Answer(well.then_some(Answer { holders, published })));
    }

    pub(crate) fn records(&mut self) {
        self.records_with(|_| {});
    }

    /// Learns the records, and more than they say.
    pub(crate) fn records_with(&mut self, more: impl FnOnce(&mut Records)) {
        let held = self
            .claims
            .iter()
            .filter(|claim| claim.prepared)
            .map(|claim| Held {
                claim: claimant(claim).name,
                hold: Hold {
                    claim: claim.uid.clone(),
                    gpu: self.gpu(DeviceKind::parse(&claim.device).unwrap().ordinal()),
                    device: claim.device.clone(),
                    target: Target::Gpu,
                    sharing: DeviceKind::parse(&claim.device).unwrap().sharing,
                    theirs: false,
                    time_slice: None,
                    mps: None,
                },
                lingering: false,
            });
        let mut records = Records {
            ordinals: self.ordinals.clone(),
            held: held.collect(),
            share_units: self.units.clone(),
            ..Records::default()
        };
        more(&mut records);
        self.learn(Fact::Records(records));
    }

    /// The scheduler chooses a device; its write arrives so many seconds later.
    pub(crate) fn choose(&mut self, device: &DeviceName, seconds: u64) -> ClaimUid {
        self.made += 1;
        let uid: ClaimUid = format!("00000000-0000-0000-0000-{:012}", self.made)
            .parse()
            .unwrap();
        let written = self.now + Duration::from_secs(seconds);
        let percent = self.slices.device(device).is_some_and(is_by_percent);
        self.claims.push(Claim {
            uid: uid.clone(),
            device: device.clone(),
            written,
            prepared: false,
            percent,
        });
        uid
    }

    /// The device as the scheduler would give it out now.
    pub(crate) fn can_be_given(&self, device: &Device) -> bool {
        let taken = self.claims.iter().any(|claim| claim.device == device.name);
        if blocked(device) || is_admin(&device.name) || (taken && !device.allow_multiple) {
            return false;
        }
        taken || self.fits(Some(device))
    }

    /// Returns whether everything that is given out, and one more, is within the counters.
    pub(crate) fn fits(&self, more: Option<&Device>) -> bool {
        let given: BTreeSet<&DeviceName> = self.claims.iter().map(|claim| &claim.device).collect();
        let mut left = BTreeMap::new();
        for set in self
            .slices
            .slices
            .iter()
            .flat_map(|slice| &slice.counter_sets)
        {
            for (counter, amount) in &set.counters {
                left.insert((&set.name, counter), i128::from(amount.value()));
            }
        }
        let given = given
            .into_iter()
            .filter_map(|name| self.slices.device(name));
        for uses in given.chain(more).flat_map(|device| &device.consumes) {
            for (counter, amount) in &uses.counters {
                *left.entry((&uses.set, counter)).or_default() -= i128::from(amount.value());
            }
        }
        left.values().all(|left| *left >= 0)
    }

    /// Names of devices that are open to new claims, without those for admins.
    pub(crate) fn open(&self) -> Vec<&str> {
        let open = self
            .slices
            .devices()
            .filter(|device| !blocked(device) && !is_admin(&device.name));
        open.map(|device| device.name.as_str()).collect()
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        let all = self
            .slices
            .devices()
            .filter(|device| !is_admin(&device.name));
        all.map(|device| device.name.as_str()).collect()
    }

    /// The API answers at once until nothing changes any more.
    pub(crate) fn settle(&mut self) {
        for _ in 0..12 {
            self.pass(Duration::from_secs(61));
            self.answer(true);
        }
    }
}

pub(crate) fn claimant(claim: &Claim) -> Claimant {
    Claimant {
        uid: claim.uid.clone(),
        name: format!("default/{}", claim.device),
    }
}

pub(crate) fn blocked(device: &Device) -> bool {
    !device.taints.is_empty()
}

/// Returns whether a device is given out by percent.
pub(crate) fn is_by_percent(device: &Device) -> bool {
    device.capacity.contains_key("percent")
}

pub(crate) fn is_admin(name: &DeviceName) -> bool {
    name.as_str().ends_with("-admin")
}
