//! Caps over time: containers that start, plugins that are killed, drivers that are loaded again.
//! Each case is a directory tree in the place of control groups and a simulated driver over it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use divvy_claims::{ClaimRef, PodRef};
use divvy_executor::CappedShare;
use divvy_gpu_sim::{Fault, FaultEffect, LimitBackend, SimGroup, SimNode};
use divvy_host::HostRoot;
use divvy_model::{ClaimUid, CudaVersion, GpuDriver, GpuErrorCode, GpuOp, GpuUuid, lock};
use proptest::prelude::*;
use proptest::test_runner::Config;
use tempfile::TempDir;

use super::cap::{Capper, Question, Uncapped};
use super::claims::{CappedClaims, Held};
use super::ledger::Ledger;
use super::rounds::{Repair, Round};

mod divided;
mod guards;
mod hung;

const MIB: u64 = 1 << 20;

#[derive(Default)]
struct Claims(Mutex<Vec<Held>>);

impl CappedClaims for Claims {
    fn share(&self, claim: &ClaimUid, device: &str) -> Result<Option<CappedShare>, String> {
        let all = lock(&self.0);
        let found = all
            .iter()
            .find(|held| held.claim.uid == *claim && held.device == device);
        Ok(found.map(|held| CappedShare {
            claim: held.claim.clone(),
            gpu: held.gpu.clone(),
            bytes: held.bytes,
        }))
    }

    fn held(&self) -> Result<Vec<Held>, String> {
        Ok(lock(&self.0).clone())
    }
}

struct World {
    dir: TempDir,
    sim: SimNode,
    gpu: GpuUuid,
    backend: LimitBackend,
    claims: Arc<Claims>,
    /// Restarted by every kill.
    capper: Capper,
    pids: u32,
}

fn pod_uid(pod: usize) -> String {
    format!("0b5a4a3e-9b1f-4a8e-b3f1-{pod:012}")
}

fn pod_path(pod: usize) -> String {
    format!("kubepods/pod{}", pod_uid(pod))
}

fn claim_uid(claim: usize) -> ClaimUid {
    format!("claim-{claim}").parse().unwrap()
}

impl World {
    fn new(backend: LimitBackend) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let sim = SimNode::parse("h100x1").unwrap();
        let cuda = CudaVersion {
            major: 13,
            minor: 4,
        };
        sim.edit(|e| {
            e.set_driver_version("615.71.09", cuda);
            e.limits.backend = backend;
        });
        let claims = Arc::new(Claims::default());
        let capper = capper(&dir, &sim, &claims);
        let world = Self {
            gpu: sim.uuids().remove(0),
            dir,
            sim,
            backend,
            claims,
            capper,
            pids: 0,
        };
        world.group("");
        world.group("kubepods");
        world
    }

    fn groups(&self) -> PathBuf {
        self.dir.path().join("cgroup")
    }

    fn group(&self, path: &str) -> PathBuf {
        let group = self.groups().join(path);
        fs_err::create_dir_all(&group).unwrap();
        let list = match self.backend {
            LimitBackend::Misc => "cpu misc",
            LimitBackend::Dmem => "cpu dmem misc",
        };
        fs_err::write(group.join("cgroup.controllers"), list).unwrap();
        if self.backend == LimitBackend::Dmem {
            let capacity = "nvidia/0000:06:00.0/vidmem 85899345920\n";
            fs_err::write(group.join("dmem.capacity"), capacity).unwrap();
        }
        group
    }

    /// A claim of a pod, with a share or (`None`) a whole GPU.
    fn prepare(&self, claim: usize, pod: usize, mib: Option<u64>) {
        lock(&self.claims.0).push(Held {
            claim: ClaimRef {
                uid: claim_uid(claim),
                namespace: "ns".to_owned(),
                name: format!("c{claim}"),
            },
            gpu: self.gpu.clone(),
            pods: vec![PodRef {
                name: format!("p{pod}"),
                uid: pod_uid(pod),
            }],
            device: "d".to_owned(),
            bytes: mib.map(|mib| mib * MIB),
            prepared: true,
        });
    }

    /// A pod comes to a claim that is prepared, and the claim's record learns of it.
    fn join(&self, claim: usize, pod: usize) {
        let mut all = lock(&self.claims.0);
        let mut of = all.iter_mut().filter(|h| h.claim.uid == claim_uid(claim));
        of.next().unwrap().pods.push(PodRef {
            name: format!("p{pod}"),
            uid: pod_uid(pod),
        });
    }

    fn unprepare(&self, claim: usize) {
        lock(&self.claims.0).retain(|held| held.claim.uid != claim_uid(claim));
    }

    /// Makes the group of a container of a pod, and its process. Returns the process.
    fn container(&mut self, pod: usize, leaf: &str) -> u32 {
        self.group(&pod_path(pod));
        let path = format!("{}/{leaf}", pod_path(pod));
        self.group(&path);
        self.pids += 1;
        let proc = self.dir.path().join(format!("host/proc/{}", self.pids));
        fs_err::create_dir_all(&proc).unwrap();
        fs_err::write(proc.join("cgroup"), format!("0::/{path}\n")).unwrap();
        self.pids
    }

    fn ask(&self, claim: usize, pid: u32) -> Result<(), Uncapped> {
        self.capper.cap(&Question {
            claim: claim_uid(claim),
            device: "d".to_owned(),
            pid,
        })
    }

    /// The plugin is killed and starts again.
    fn kill(&mut self) {
        self.capper = capper(&self.dir, &self.sim, &self.claims);
    }

    /// A program in this group allocates, as CUDA does. Returns false if it is out of memory.
    fn allocate(&self, path: &str, bytes: u64) -> bool {
        let chain = SimGroup::chain(&self.groups().join(path)).unwrap();
        self.sim
            .edit(|e| e.allocate(&self.gpu, &chain, bytes))
            .is_ok()
    }

    /// Returns how much programs in these groups could allocate together, up to so much each.
    fn could_allocate(&self, paths: &[String], most: u64) -> u64 {
        let chain = |path: &String| SimGroup::chain(&self.groups().join(path)).unwrap();
        let chains: Vec<_> = paths.iter().map(chain).collect();
        self.sim.edit(|e| {
            let mut copy = e.clone();
            let mut all = 0;
            for chain in &chains {
                // The largest piece that fits, then the next one.
                let (mut left, mut piece) = (most, most);
                while piece > 0 {
                    let next = piece.min(left);
                    if next > 0 && copy.allocate(&self.gpu, chain, next).is_ok() {
                        (left, all) = (left - next, all + next);
                    } else {
                        piece /= 2;
                    }
                }
            }
            all
        })
    }

    /// Leaves the limit of an earlier group at the address of this one.
    fn leave(&self, path: &str, bytes: Option<u64>) {
        let group = self.groups().join(path);
        let left = self.sim.set_memory_limit(&self.gpu, &group, bytes);
        left.unwrap();
    }

    fn limit(&self, path: &str) -> Option<u64> {
        let limit = self.sim.memory_limit(&self.gpu, &self.groups().join(path));
        limit.ok()?.hard
    }

    fn end(&self, pod: usize) {
        fs_err::remove_dir_all(self.groups().join(pod_path(pod))).unwrap();
    }

    fn round(&self) -> Round {
        self.capper.round(&|| true)
    }

    fn ledger(&self) -> PathBuf {
        self.dir.path().join("caps")
    }

    fn notes(&self) -> usize {
        fs_err::read_dir(self.ledger()).map_or(0, Iterator::count)
    }
}

fn capper(dir: &TempDir, sim: &SimNode, claims: &Arc<Claims>) -> Capper {
    Capper::new(
        claims.clone(),
        Arc::new(sim.clone()),
        HostRoot::under(dir.path().join("host")),
        dir.path().join("cgroup"),
        &dir.path().join("caps"),
    )
}

#[derive(Debug, Clone)]
enum Step {
    /// A claim with a share of so many MiB comes to a pod.
    Prepare(usize, u64),
    /// A container of one of the claims starts. The plugin is killed at this call of NVML, before
    /// or after the driver has done it, if at any.
    Start(prop::sample::Index, Option<(u32, bool)>),
    /// A container starts, and its runtime calls no hook.
    Skip(prop::sample::Index),
    /// An earlier group has left a limit at the address of the next container's.
    Stale(u64),
    /// The claims of a pod end, and the pod with them.
    End(usize),
    /// The pod lives on without one of its claims.
    Unprepare(prop::sample::Index),
    Kill,
    Reload,
    /// The note of a pod is cut off.
    Tear(usize),
}

const PODS: usize = 2;

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => (0..PODS, 1..64_u64).prop_map(|(pod, mib)| Step::Prepare(pod, mib * 64)),
        8 => (index(), prop::option::of((0..6_u32, any::<bool>())))
            .prop_map(|(which, kill)| Step::Start(which, kill)),
        1 => index().prop_map(Step::Skip),
        1 => (1..64_u64).prop_map(Step::Stale),
        2 => (0..PODS).prop_map(Step::End),
        1 => index().prop_map(Step::Unprepare),
        1 => Just(Step::Kill),
        1 => Just(Step::Reload),
        1 => (0..PODS).prop_map(Step::Tear),
    ]
}

/// Expectations of the test.
#[derive(Default)]
struct Model {
    /// Claims with their pods and MiB.
    claims: BTreeMap<usize, (usize, u64)>,
    /// MiB of all shares that a pod was given in its life.
    given: BTreeMap<usize, u64>,
    /// Containers that run, by path, with the claim they have.
    running: BTreeMap<String, (usize, u64)>,
    stale: Option<u64>,
    next: usize,
    /// The pod that is in each place now: none comes back under the UID of another.
    pods: [usize; PODS],
}

impl Model {
    fn new() -> Self {
        Self {
            pods: std::array::from_fn(|place| place),
            next: PODS,
            ..Self::default()
        }
    }
}

impl Model {
    /// Leaves the limit of an earlier group at the address of this one.
    fn leave_stale(&mut self, world: &World, path: &str) {
        let stale = self.stale.take();
        if let Some(stale) = stale.filter(|_| world.backend == LimitBackend::Misc) {
            world.leave(path, Some(stale * 64 * MIB));
        }
    }
}

/// Carries a step out, and says what no order of steps may make wrong.
fn carry_out(world: &mut World, model: &mut Model, step: &Step) {
    let pick = |model: &Model, which: &prop::sample::Index| {
        let all: Vec<usize> = model.claims.keys().copied().collect();
        (!all.is_empty()).then(|| *which.get(&all))
    };
    match step {
        Step::Prepare(place, mib) => {
            let pod = &model.pods[*place];
            let claim = model.next;
            model.next += 1;
            model.claims.insert(claim, (*pod, *mib));
            *model.given.entry(*pod).or_default() += mib;
            world.prepare(claim, *pod, Some(*mib));
        }
        Step::Start(which, kill) => {
            let Some(claim) = pick(model, which) else {
                return;
            };
            let (pod, mib) = model.claims[&claim];
            model.next += 1;
            let leaf = format!("c{}", model.next);
            let pid = world.container(pod, &leaf);
            let path = format!("{}/{leaf}", pod_path(pod));
            model.leave_stale(world, &path);
            if let Some((skip, after)) = kill {
                let effect = if *after {
                    FaultEffect::FailAfter(GpuErrorCode::UNKNOWN)
                } else {
                    FaultEffect::Fail(GpuErrorCode::UNKNOWN)
                };
                world.sim.fault(Fault {
                    skip: *skip,
                    times: Some(1),
                    effect,
                    ..Fault::fail(GpuErrorCode::UNKNOWN)
                });
                // Whatever it would have answered, it is gone. The hook asks again.
                drop(world.ask(claim, pid));
                world.sim.clear_faults();
                world.kill();
            }
            world.ask(claim, pid).unwrap();
            model.running.insert(path, (pod, mib));
        }
        Step::Skip(which) => {
            let Some(claim) = pick(model, which) else {
                return;
            };
            let (pod, _) = model.claims[&claim];
            model.next += 1;
            let leaf = format!("c{}", model.next);
            let pid = world.container(pod, &leaf);
            model.leave_stale(world, &format!("{}/{leaf}", pod_path(pod)));
            assert!(world.sim.start_process(&world.gpu, pid));
            world.round();
            // It is capped, if maybe at less than it has: that of the pod's shares that called.
            let path = format!("{}/{leaf}", pod_path(pod));
            model.running.insert(path, (pod, 0));
            world.sim.end_process(pid);
        }
        Step::Stale(mib) => model.stale = Some(*mib),
        Step::End(place) => {
            let pod = &std::mem::replace(&mut model.pods[*place], model.next);
            model.next += 1;
            let path = pod_path(*pod);
            model.running.retain(|leaf, _| !leaf.starts_with(&path));
            model.given.remove(pod);
            for claim in model.claims.extract_if(.., |_, of| of.0 == *pod) {
                world.unprepare(claim.0);
            }
            if world.groups().join(&path).exists() {
                world.end(*pod);
            }
        }
        Step::Unprepare(which) => {
            // Its containers have ended; which of the pod's these are the test need not know.
            if let Some(claim) = pick(model, which) {
                let (pod, _) = model.claims.remove(&claim).unwrap();
                let path = pod_path(pod);
                model.running.retain(|leaf, _| !leaf.starts_with(&path));
                world.unprepare(claim);
            }
        }
        Step::Kill => world.kill(),
        Step::Reload => {
            world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
            world.round();
        }
        Step::Tear(place) => {
            let pod = &model.pods[*place];
            let file = world.ledger().join(format!("{}.json", pod_uid(*pod)));
            if file.exists() {
                fs_err::write(file, "{\"group\":").unwrap();
                world.round();
            }
        }
    }
}

/// No pod gets more than all that it was given, all of its containers together. Each can have what
/// its own share is: where a limit at its address hides the pod's, a part of it, since such a
/// container has no memory in common with others.
fn holds(world: &World, model: &Model, step: &Step) {
    let mut pods = BTreeMap::<usize, Vec<String>>::new();
    for (path, (pod, own)) in &model.running {
        let ways = if world.backend == LimitBackend::Misc {
            fs_err::read_dir(world.groups().join(pod_path(*pod)))
                .unwrap()
                .filter(|entry| entry.as_ref().unwrap().path().is_dir())
                .count()
        } else {
            1
        };
        let part = own * MIB / u64::try_from(ways).unwrap();
        assert!(
            world.could_allocate(std::slice::from_ref(path), part) >= part,
            "{step:?}: {path} does not get {part} bytes of its {own} MiB"
        );
        pods.entry(*pod).or_default().push(path.clone());
    }
    for (pod, paths) in pods {
        let all = model.given[&pod] * MIB;
        let found = world.could_allocate(&paths, all + MIB);
        assert!(found <= all, "{step:?}: pod {pod} gets {found} of {all}");
    }
}

/// Orders that are tried: with 48 a fault that nearly each 400 find passed now and then.
const ORDERS: u32 = 400;

proptest! {
    #![proptest_config(Config {
        cases: Config::default().cases.max(ORDERS),
        failure_persistence: None,
        ..Config::default()
    })]

    #[test]
    fn no_order_of_events_leaves_a_client_of_a_capped_share_without_its_cap(
        dmem in any::<bool>(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let backend = if dmem { LimitBackend::Dmem } else { LimitBackend::Misc };
        let mut world = World::new(backend);
        let mut model = Model::new();
        for step in &steps {
            carry_out(&mut world, &mut model, step);
            holds(&world, &model, step);
        }
        for pod in 0..PODS {
            carry_out(&mut world, &mut model, &Step::End(pod));
        }
        world.round();
        prop_assert_eq!(world.notes(), 0);
    }
}

/// Two instances of a rolling update: each knows only its own lock.
#[test]
fn a_second_instance_waits_for_the_note_that_the_first_is_writing() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let pid = world.container(0, "a");
    let other = Ledger::new(&world.ledger());
    let held = other.lock().unwrap();
    let lock_file = world.ledger().with_extension("lock");
    let inode = std::os::unix::fs::MetadataExt::ino(&fs_err::metadata(lock_file).unwrap());
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| world.ask(1, pid));
        // The kernel lists those who wait behind an arrow.
        let waits = || {
            let locks = fs_err::read_to_string("/proc/locks").unwrap();
            let of = format!(":{inode} ");
            locks
                .lines()
                .any(|line| line.contains("-> ") && line.contains(&of))
        };
        while !waits() {
            assert!(!asked.is_finished(), "it has not waited");
            std::thread::yield_now();
        }
        drop(held);
        asked.join().unwrap().unwrap();
    });
}

/// A question would open a driver that is to be unloaded.
#[test]
fn a_round_leaves_a_released_driver_alone() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let pid = world.container(0, "a");
    world.ask(1, pid).unwrap();
    world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
    let round = world.capper.round(&|| false);
    assert_eq!((round.repaired.len(), round.errors.len()), (0, 0));
    assert_eq!(world.limit(&pod_path(0)), None, "nothing was set");
    let round = world.round();
    let repairs: Vec<_> = round.repaired.iter().map(|cap| cap.what).collect();
    assert_eq!(repairs, [Repair::Restored]);
    assert_eq!(round.repaired[0].claims[0].name, "c1");
}

/// crun makes a group below the one that other programs know, without the controller.
#[test]
fn a_lower_limit_between_pod_and_container_is_noticed_at_the_leaf() {
    let mut world = World::new(LimitBackend::Dmem);
    world.prepare(1, 0, Some(2048));
    world.group(&pod_path(0));
    let scope = world.group(&format!("{}/crio-1.scope", pod_path(0)));
    let pid = world.container(0, "crio-1.scope/container");
    let leaf = scope.join("container");
    fs_err::write(leaf.join("cgroup.controllers"), "cpu").unwrap();
    // As the hook of another toolkit does.
    let other = world
        .sim
        .set_memory_limit(&world.gpu, &scope, Some(64 * MIB));
    other.unwrap();
    let refused = world.ask(1, pid).unwrap_err();
    assert!(
        refused.why.contains("the driver says another limit for"),
        "{}",
        refused.why
    );
    world
        .sim
        .set_memory_limit(&world.gpu, &scope, Some(2048 * MIB))
        .unwrap();
    world.ask(1, pid).unwrap();
}

/// A limit of such a group reads back and never binds.
#[test]
fn a_pod_without_the_controller_is_refused_although_its_limit_reads_back() {
    for backend in [LimitBackend::Misc, LimitBackend::Dmem] {
        let mut world = World::new(backend);
        world.prepare(1, 0, Some(64));
        let pid = world.container(0, "a");
        let list = world.groups().join(pod_path(0)).join("cgroup.controllers");
        fs_err::write(&list, "cpu").unwrap();
        let refused = world.ask(1, pid).unwrap_err();
        let expected = "is not switched on for";
        assert!(refused.why.contains(expected), "{}", refused.why);
        assert_eq!(world.notes(), 0, "nothing was noted");
    }
}

/// With `misc` a limit stays when its group is removed.
#[test]
fn a_whole_gpu_is_freed_of_limits_that_earlier_groups_left() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, None);
    let pid = world.container(0, "a");
    let (pod, leaf) = (pod_path(0), format!("{}/a", pod_path(0)));
    world.ask(1, pid).unwrap();
    for stale in [vec![&pod], vec![&leaf], vec![&pod, &leaf]] {
        world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
        for path in stale {
            let group = world.groups().join(path);
            let left = world
                .sim
                .set_memory_limit(&world.gpu, &group, Some(64 * MIB));
            left.unwrap();
        }
        assert!(!world.allocate(&leaf, 65 * MIB));
        world.ask(1, pid).unwrap();
        assert_eq!(world.limit(&leaf), None);
        assert!(world.allocate(&leaf, 65 * MIB));
    }
    assert_eq!(world.notes(), 0, "it has no cap to look after");
    let fault = Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::MemoryLimit);
    world.sim.fault(fault.times(1));
    assert!(world.ask(1, pid).unwrap_err().failed);
}

#[test]
fn a_container_whose_runtime_has_called_no_hook_is_capped_and_named() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    world.prepare(2, 1, Some(64));
    let [skipped, other] = [0, 7].map(|pod| world.container(pod, "a"));
    for pid in [skipped, other] {
        assert!(world.sim.start_process(&world.gpu, pid));
    }
    let round = world.round();
    let found: Vec<_> = round
        .repaired
        .iter()
        .map(|cap| (cap.what, cap.claims[0].name.as_str(), cap.bytes))
        .collect();
    assert_eq!(found, [(Repair::Late, "c1", 64 * MIB)]);
    assert_eq!(world.limit(&pod_path(0)), Some(64 * MIB));
    assert_eq!(world.limit(&pod_path(7)), None, "a pod of no claim here");
    let reasons: BTreeSet<_> = Repair::ALL.map(Repair::reason).into();
    assert_eq!(
        reasons.len(),
        Repair::ALL.len(),
        "Events of one reason are counted as one"
    );
    assert_eq!(world.round().repaired, [], "once");
}

/// A pod with two claims, of which one is gone: what it may have stays.
#[test]
fn a_note_that_cannot_be_read_is_made_again_and_lowers_no_cap() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    world.prepare(2, 0, Some(128));
    let pid = world.container(0, "a");
    for claim in [1, 2] {
        world.ask(claim, pid).unwrap();
    }
    world.unprepare(2);
    let file = world.ledger().join(format!("{}.json", pod_uid(0)));
    for by_hook in [true, false] {
        fs_err::write(&file, "{").unwrap();
        if by_hook {
            world.ask(1, pid).unwrap();
        }
        let round = world.round();
        let found: Vec<_> = round
            .repaired
            .iter()
            .map(|cap| (cap.what, cap.claims[0].name.as_str(), cap.bytes))
            .collect();
        assert_eq!(found, [(Repair::Rebuilt, "c1", 192 * MIB)], "{by_hook}");
        assert_eq!(world.limit(&pod_path(0)), Some(192 * MIB), "{by_hook}");
        assert!(file.with_extension("torn").exists(), "for people");
    }
    world.end(0);
    fs_err::write(&file, "{").unwrap();
    world.round();
    assert_eq!(world.notes(), 0, "of a pod that is gone");
}

/// A claim is prepared once. Its record learns of a pod that comes to it later with the next look
/// at the API, after that pod's container has started.
#[test]
fn a_pod_that_comes_to_a_prepared_claim_keeps_its_cap() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let [first, later] = [0, 1].map(|pod| world.container(pod, "a"));
    for pid in [first, later] {
        world.ask(1, pid).unwrap();
    }
    let caps = |world: &World| [0, 1].map(|pod| world.limit(&pod_path(pod)));
    let both = [Some(64 * MIB); 2];
    for _ in 0..2 {
        world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
        world.round();
        assert_eq!(caps(&world), both);
        world.kill();
    }
    // Its note is lost as well, so that nothing says for a time what it is held to.
    let file = world.ledger().join(format!("{}.json", pod_uid(1)));
    fs_err::write(&file, "{").unwrap();
    world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
    world.round();
    world.join(1, 1);
    world.kill();
    world.round();
    assert_eq!(caps(&world), both);
}

/// The driver's limit stands for the shares of a note that cannot be read, until they are known
/// again.
#[test]
fn a_share_that_is_known_again_is_not_counted_twice() {
    for by_hook in [true, false] {
        let mut world = World::new(LimitBackend::Misc);
        world.prepare(1, 0, Some(64));
        world.prepare(2, 1, Some(32));
        let pid = world.container(1, "a");
        for claim in [1, 2] {
            world.ask(claim, pid).unwrap();
        }
        let file = world.ledger().join(format!("{}.json", pod_uid(1)));
        fs_err::write(&file, "{").unwrap();
        world.round();
        assert_eq!(world.limit(&pod_path(1)), Some(96 * MIB), "{by_hook}");
        if by_hook {
            world.ask(1, pid).unwrap();
        } else {
            world.join(1, 1);
        }
        world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
        world.round();
        assert_eq!(world.limit(&pod_path(1)), Some(96 * MIB), "{by_hook}");
    }
}
