//! Whatever policies, holds, servers and boards do one after another, and whatever a broken
//! scheduler has given out: the pool is valid, what claims hold stays, no counter is below zero,
//! and nothing is given out that only a scheduler which counts right could keep from a GPU that is
//! used otherwise. `PROPTEST_CASES` raises the number of sequences.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};

use divvy_gpu_sim::{Engine, mig_capabilities};
use divvy_model::mig::{MigCapabilities, Placement};
use divvy_model::{
    DeviceKind, DeviceName, Form, GpuUuid, Inventory, MigMode, Mode, MpsAbility, MpsProtocol,
    Ordinals,
};
use divvy_offer::{
    Amount, Carved, Device, Feature, GpuRules, Input, Instances, KubeVersion, ModeLock, Modes,
    PlacementOrder, Pool, Rules, ServerFeatures, Taint, carve, validate,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// An event in the cluster.
#[derive(Debug, Clone)]
enum Event {
    /// The rules of a GPU change.
    Rules(Index, GpuRules),
    /// The rules of a GPU are gone.
    NoRules(Index),
    /// A claim is given something by a scheduler that knows its trade.
    Give(Index),
    /// A claim is given something by one that does not.
    GiveAnything(Index),
    /// A claim was given something by an earlier version, or before a driver renamed a profile.
    GiveNamed(Index, String),
    /// A claim goes.
    Take(Index),
    /// The MIG mode of a GPU is changed.
    MigMode(Index, bool),
    /// A GPU leaves or returns.
    Lose(Index),
    Find,
    /// A GPU's MIG mode cannot be changed, or can again.
    /// A GPU has something of unknown origin.
    Occupied(Index, Option<u32>),
    /// The server changes.
    Server(KubeVersion),
    Dropped(Feature),
    Lock(ModeLock),
    Conflict,
    /// The plugin forgets what it published.
    Restart,
}

fn rules() -> impl Strategy<Value = GpuRules> {
    let modes = prop_oneof![
        Just(Modes::AsIs),
        Just(Modes::everything()),
        prop::sample::subsequence(Form::HELD.to_vec(), 0..=Form::HELD.len())
            .prop_map(|modes| Modes::Only(modes.into_iter().collect())),
    ];
    let order = prop_oneof![
        Just(PlacementOrder::Ascending),
        Just(PlacementOrder::Descending)
    ];
    let profiles =
        prop::option::weighted(0.2, Just(["1g.10gb", "3g.40gb"].map(str::to_owned).into()));
    (
        modes,
        order,
        profiles,
        0..40_u32,
        0..200_000_u64,
        prop::bool::weighted(0.2),
    )
        .prop_map(
            |(modes, order, profiles, slots, held_back_mib, is_static)| {
                let mut rules = GpuRules {
                    modes,
                    order,
                    profiles,
                    held_back_mib,
                    ..GpuRules::default()
                };
                rules.shares.slots = slots;
                rules.shares.smallest_mib = Some(held_back_mib / 7);
                rules.shares.smallest_cores = slots * 5;
                if is_static {
                    rules.instances = Instances::Static;
                }
                rules
            },
        )
}

fn event() -> impl Strategy<Value = Event> {
    let gpu = any::<Index>;
    let name = prop_oneof![
        Just("mig-3g39gb-9-4".to_owned()),
        Just("mig-1g10gb-me-20-1".to_owned()),
        Just("mig-9g90gb-77-0".to_owned()),
        Just("ts".to_owned()),
        Just("mps".to_owned()),
        Just("admin".to_owned()),
    ];
    prop_oneof![
        3 => (gpu(), rules()).prop_map(|(gpu, rules)| Event::Rules(gpu, rules)),
        1 => gpu().prop_map(Event::NoRules),
        6 => gpu().prop_map(Event::Give),
        1 => gpu().prop_map(Event::GiveAnything),
        1 => (gpu(), name).prop_map(|(gpu, name)| Event::GiveNamed(gpu, name)),
        3 => gpu().prop_map(Event::Take),
        1 => (gpu(), any::<bool>()).prop_map(|(gpu, on)| Event::MigMode(gpu, on)),
        1 => gpu().prop_map(Event::Lose),
        1 => Just(Event::Find),
        1 => (gpu(), prop::option::of(0..8_u32)).prop_map(|(gpu, at)| Event::Occupied(gpu, at)),
        1 => (34..38_u32, 0..4_u32).prop_map(|(minor, patch)| Event::Server(KubeVersion::new(1, minor, patch))),
        1 => prop::sample::select(Feature::ALL.to_vec()).prop_map(Event::Dropped),
        1 => prop::sample::select(vec![ModeLock::Auto, ModeLock::On, ModeLock::Off]).prop_map(Event::Lock),
        1 => Just(Event::Conflict),
        1 => Just(Event::Restart),
    ]
}

struct World {
    all: Inventory,
    inventory: Inventory,
    ordinals: Ordinals,
    capabilities: BTreeMap<GpuUuid, MigCapabilities>,
    rules: Rules,
    occupied: BTreeMap<GpuUuid, Vec<(Placement, Taint)>>,
    held: BTreeSet<DeviceName>,
    features: ServerFeatures,
    /// Returns whether anything was given out against the counters.
    broken: bool,
    last: Option<Pool>,
}

impl World {
    fn new(spec: &str) -> Self {
        let engine = Engine::new(&spec.parse().unwrap());
        let mut inventory = engine.inventory();
        inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        let caps = |gpu: &divvy_gpu_sim::SimGpu| {
            Some((gpu.facts.uuid.clone(), mig_capabilities(&gpu.model)?))
        };
        let capabilities = engine.gpus().iter().filter_map(caps).collect();
        Self {
            all: inventory.clone(),
            inventory,
            ordinals,
            capabilities,
            rules: Rules::new(),
            occupied: BTreeMap::new(),
            held: BTreeSet::new(),
            features: ServerFeatures::default().observe(KubeVersion::new(1, 37, 1)),
            broken: false,
            last: None,
        }
    }

    fn gpu(&self, at: Index) -> GpuUuid {
        at.get(&self.all.gpus.keys().cloned().collect::<Vec<_>>())
            .clone()
    }

    fn carve(&self) -> Carved {
        let Self {
            inventory,
            ordinals,
            held,
            features,
            capabilities,
            rules,
            occupied,
            ..
        } = self;
        let previous = self.last.as_ref();
        let plain = Input::plain("n1", inventory, ordinals, features);
        carve(&Input {
            capabilities,
            rules,
            occupied,
            held,
            recorded: held,
            previous,
            ..plain
        })
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Rules(gpu, rules) => drop(self.rules.insert(self.gpu(gpu), rules)),
            Event::NoRules(gpu) => drop(self.rules.remove(&self.gpu(gpu))),
            Event::Give(which) => {
                let Some(pool) = &self.last else { return };
                let fits: Vec<_> = pool
                    .devices()
                    .filter(|device| self.would_give(pool, device))
                    .collect();
                if !fits.is_empty() {
                    self.held.insert(which.get(&fits).name.clone());
                }
            }
            Event::GiveAnything(which) => {
                let Some(pool) = &self.last else { return };
                let all: Vec<_> = pool.devices().collect();
                if !all.is_empty() {
                    self.held.insert(which.get(&all).name.clone());
                    self.broken = true;
                }
            }
            Event::GiveNamed(gpu, name) => {
                let ordinal = self.ordinals.of(&self.gpu(gpu)).unwrap();
                self.held
                    .insert(format!("gpu-{ordinal}-{name}").parse().unwrap());
                self.broken = true;
            }
            Event::Take(which) => {
                if !self.held.is_empty() {
                    let name = which
                        .get(&self.held.iter().cloned().collect::<Vec<_>>())
                        .clone();
                    self.held.remove(&name);
                }
            }
            Event::MigMode(gpu, on) => {
                let gpu = self.gpu(gpu);
                for inventory in [&mut self.all, &mut self.inventory] {
                    if let Some(gpu) = inventory.gpus.get_mut(&gpu)
                        && gpu.facts.mig_mode != MigMode::Unsupported
                    {
                        gpu.facts.mig_mode = MigMode::Supported {
                            current: on,
                            pending: on,
                        };
                    }
                }
            }
            Event::Lose(gpu) => drop(self.inventory.gpus.remove(&self.gpu(gpu))),
            Event::Find => self.inventory = self.all.clone(),
            Event::Occupied(gpu, None) => drop(self.occupied.remove(&self.gpu(gpu))),
            Event::Occupied(gpu, Some(start)) => {
                let taint = Taint::no_schedule("gpu.divvy.dev/foreign", None);
                self.occupied
                    .insert(self.gpu(gpu), vec![(Placement { start, size: 1 }, taint)]);
            }
            Event::Server(version) => self.features = self.features.observe(version),
            Event::Dropped(feature) => self.features = self.features.without([feature]),
            Event::Lock(lock) => self.features = self.features.with_mode_lock(lock),
            Event::Conflict => self.features = self.features.with_conflict(true),
            Event::Restart => self.last = None,
        }
    }

    /// Returns whether a scheduler that counts right would give out a device: as much as its
    /// version lets it.
    fn would_give(&self, pool: &Pool, device: &Device) -> bool {
        let blocked = !device.taints.is_empty();
        let taken = self.held.contains(&device.name) && !device.allow_multiple;
        if blocked || taken || is_admin(device) {
            return false;
        }
        if self.held.contains(&device.name) {
            return true;
        }
        let mut held = self.held.clone();
        held.insert(device.name.clone());
        below_zero(pool, &held).is_none()
    }
}

fn is_admin(device: &Device) -> bool {
    !DeviceKind::parse(&device.name).unwrap().sharing.holds()
}

/// A counter of the pool that claims have more of than there is.
fn below_zero(pool: &Pool, held: &BTreeSet<DeviceName>) -> Option<String> {
    let mut left: BTreeMap<(&str, &str), i128> = BTreeMap::new();
    for set in pool.slices.iter().flat_map(|slice| &slice.counter_sets) {
        left.extend(
            set.counters
                .iter()
                .map(|(name, n)| ((&*set.name, &**name), i128::from(n.value()))),
        );
    }
    for uses in pool
        .devices()
        .filter(|device| held.contains(&device.name))
        .flat_map(|d| &d.consumes)
    {
        for (name, amount) in &uses.counters {
            *left.entry((&uses.set, name)).or_default() -= i128::from(Amount::value(*amount));
        }
    }
    left.iter()
        .find(|(_, left)| **left < 0)
        .map(|((set, name), left)| format!("{set} {name}: {left}"))
}

fn mode(device: &Device) -> Option<(u32, Form)> {
    let kind = DeviceKind::parse(&device.name).unwrap();
    let mode = (kind.ordinal(), kind.form());
    kind.sharing.holds().then_some(mode)
}

fn check(world: &World, carved: &Carved) -> Result<(), TestCaseError> {
    let pool = &carved.pool;
    prop_assert_eq!(validate(pool), Ok(()));
    for name in &world.held {
        let is_admin = !DeviceKind::parse(name).unwrap().sharing.holds();
        prop_assert!(
            is_admin || pool.device(name).is_some(),
            "{} is held and withdrawn",
            name
        );
    }
    prop_assert_eq!(below_zero(pool, &world.held), None);

    let mut open: BTreeMap<u32, BTreeSet<Form>> = BTreeMap::new();
    let mut used: BTreeMap<u32, BTreeSet<Form>> = BTreeMap::new();
    for device in pool.devices() {
        let Some((ordinal, mode)) = mode(device) else {
            continue;
        };
        let held = world.held.contains(&device.name);
        let taints = world.features.supports(Feature::Taints);
        // A device that one claim holds is open to no other; that no more shares are open only a
        // taint can express.
        let is_open = device.taints.is_empty();
        if is_open && !(held && (!device.allow_multiple || !taints)) {
            open.entry(ordinal).or_default().insert(mode);
        }
        if held {
            used.entry(ordinal).or_default().insert(mode);
        }
    }
    for (ordinal, open) in &open {
        let nothing = BTreeSet::new();
        let of_gpu: BTreeSet<_> = open.union(used.get(ordinal).unwrap_or(&nothing)).collect();
        if of_gpu.len() > 1 {
            prop_assert!(
                world.features.one_mode().is_none(),
                "gpu-{} is open in {:?}",
                ordinal,
                of_gpu
            );
            let counted =
                |d: &Device| !d.consumes.is_empty() || mode(d).is_none_or(|(n, _)| n != *ordinal);
            prop_assert!(
                pool.devices().all(counted),
                "gpu-{} is not counted",
                ordinal
            );
        }
    }
    let again = World {
        last: Some(pool.clone()),
        ..snapshot(world)
    }
    .carve();
    prop_assert_eq!(&again.pool, pool, "carving again changes nothing");
    Ok(())
}

fn snapshot(world: &World) -> World {
    World {
        all: world.all.clone(),
        inventory: world.inventory.clone(),
        ordinals: world.ordinals.clone(),
        capabilities: world.capabilities.clone(),
        rules: world.rules.clone(),
        occupied: world.occupied.clone(),
        held: world.held.clone(),
        features: world.features.clone(),
        broken: world.broken,
        last: world.last.clone(),
    }
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(64);
    ProptestConfig {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    /// Never two modes without the lock nor a held device withdrawn nor a counter below zero.
    #[test]
    fn modes_held_devices_and_counters_stay_valid_whatever_comes(
        spec in prop::sample::select(vec!["h100x2", "a100-40x1,h100x1", "l4x1,a30x1,h100x1"]),
        events in vec(event(), 1..30),
    ) {
        let mut world = World::new(spec);
        for event in events {
            world.happens(event);
            let carved = world.carve();
            check(&world, &carved)?;
            world.last = Some(carved.pool);
            // Without a broken scheduler nothing was ever given out in two modes of one GPU.
            if !world.broken {
                // A partition and a share of another are one mode.
                let mut used: BTreeMap<u32, BTreeSet<Mode>> = BTreeMap::new();
                for device in world.last.iter().flat_map(Pool::devices) {
                    if let Some((ordinal, mode)) = mode(device).filter(|_| world.held.contains(&device.name)) {
                        used.entry(ordinal).or_default().extend(mode.mode());
                    }
                }
                prop_assert!(used.values().all(|modes| modes.len() == 1), "{:?}", used);
            }
        }
    }
}
