//! Guards of the setter of caps and its rounds.

use std::path::Path;
use std::time::Duration;

use divvy_model::{GpuError, GpuFacts, GpuProcess, MemoryLimit, MigMode, SystemFacts};
use divvy_telemetry::MetricsRegistry;
use kube::{Client, Config as KubeConfig};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::*;
use crate::caps::serve::Limits;
use crate::metrics::Metrics;
use crate::node::facts::GpusSeen;
use crate::sinks::notifier::Notifier;

/// A driver that keeps a limit whatever it is asked.
struct Deaf(SimNode);

impl GpuDriver for Deaf {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.0.system()
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.0.list()
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        self.0.facts(gpu)
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.0.mig_mode(gpu)
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.0.processes(gpu)
    }
    fn memory_limit(&self, _: &GpuUuid, _: &Path) -> Result<MemoryLimit, GpuError> {
        Ok(MemoryLimit {
            hard: Some(64 * MIB),
            used: 0,
        })
    }
    fn set_memory_limit(&self, _: &GpuUuid, _: &Path, _: Option<u64>) -> Result<(), GpuError> {
        Ok(())
    }
}

/// A program with a whole GPU would be out of memory early, and nothing would say why.
#[test]
fn a_whole_gpu_with_a_limit_that_stays_is_refused() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, None);
    let pid = world.container(0, "a");
    world.capper = Capper::new(
        world.claims.clone(),
        Arc::new(Deaf(world.sim.clone())),
        HostRoot::under(world.dir.path().join("host")),
        world.groups(),
        &world.ledger(),
    );
    let refused = world.ask(1, pid).unwrap_err();
    assert!(refused.why.contains("does not clear it"), "{}", refused.why);
    assert!(!refused.failed, "asking again does not help");
}

/// With `dmem` each group has a limit, and a program asks for that of its own.
#[test]
fn with_dmem_a_containers_own_group_says_what_its_pod_has() {
    let mut world = World::new(LimitBackend::Dmem);
    world.prepare(1, 0, Some(64));
    world.prepare(2, 0, Some(32));
    let pid = world.container(0, "a");
    for (claim, mib) in [(1, 64), (2, 96)] {
        world.ask(claim, pid).unwrap();
        assert_eq!(world.limit(&format!("{}/a", pod_path(0))), Some(mib * MIB));
    }
    let skipped = world.container(1, "a");
    world.prepare(3, 1, Some(16));
    assert!(world.sim.start_process(&world.gpu, skipped));
    world.round();
    assert_eq!(world.limit(&format!("{}/a", pod_path(1))), Some(16 * MIB));
}

#[test]
fn the_note_of_a_pod_that_is_gone_goes() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let pid = world.container(0, "a");
    world.ask(1, pid).unwrap();
    assert_eq!(world.notes(), 1);
    // The claim is still there: the kubelet releases it later.
    world.end(0);
    let round = world.round();
    assert_eq!((round.repaired.len(), round.errors.len()), (0, 0));
    assert_eq!(world.notes(), 0);
}

/// A claim that is let go may be of a pod that has ended, and whose GPU another one has by now.
#[test]
fn a_pod_is_not_capped_for_a_claim_that_is_not_prepared() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    lock(&world.claims.0)[0].prepared = false;
    let pid = world.container(0, "a");
    assert!(world.sim.start_process(&world.gpu, pid));
    assert_eq!(world.round().repaired, []);
    assert_eq!(world.limit(&pod_path(0)), None);
    lock(&world.claims.0)[0].prepared = true;
    assert_eq!(world.round().repaired.len(), 1);
}

/// Another program has raised it.
#[test]
fn a_cap_that_was_raised_is_set_again() {
    for backend in [LimitBackend::Misc, LimitBackend::Dmem] {
        let mut world = World::new(backend);
        world.prepare(1, 0, Some(64));
        let pid = world.container(0, "a");
        world.ask(1, pid).unwrap();
        world.leave(&pod_path(0), Some(128 * MIB));
        let repairs: Vec<_> = world.round().repaired.iter().map(|r| r.what).collect();
        assert_eq!(repairs, [Repair::Restored], "{backend:?}");
        assert_eq!(world.limit(&pod_path(0)), Some(64 * MIB), "{backend:?}");
    }
}

/// A note of a GPU must not become a limit of none: a pod without shares has no cap there.
#[test]
fn a_pod_without_shares_is_held_to_nothing() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 1, Some(64));
    let pid = world.container(0, "a");
    world.group(&pod_path(0));
    fs_err::create_dir_all(world.ledger()).unwrap();
    fs_err::write(world.ledger().join(format!("{}.json", pod_uid(0))), "{").unwrap();
    assert!(world.sim.start_process(&world.gpu, pid));
    for _ in 0..2 {
        assert_eq!(world.round().errors, [""; 0]);
        assert_eq!(world.limit(&pod_path(0)), None);
    }
}

/// Two instances would report each repair twice, and a question would open a driver that was let
/// go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_are_repaired_by_the_instance_in_charge_of_a_driver_that_is_there() {
    let mut world = World::new(LimitBackend::Misc);
    world.prepare(1, 0, Some(64));
    let pid = world.container(0, "a");
    world.ask(1, pid).unwrap();
    world.sim.edit(divvy_gpu_sim::Engine::forget_limits);
    // The claim goes, so that no claim is left for an Event.
    world.unprepare(1);
    let there = GpusSeen::default();
    let released = GpusSeen {
        released: Some("an upgrade".to_owned()),
        ..there.clone()
    };
    let down = GpusSeen {
        problem: Some("no driver".to_owned()),
        ..there.clone()
    };
    let socket = world.dir.path().join("hook.sock");
    let cases = [
        (false, &there),
        (true, &released),
        (true, &down),
        (true, &there),
    ];
    for (number, (is_in_charge, seen)) in cases.into_iter().enumerate() {
        let kube = KubeConfig::new("http://127.0.0.1:1".parse().unwrap());
        let notifier = Notifier::new(Client::try_from(kube).unwrap(), "gpu.divvy.dev", "n");
        let limits = Limits {
            capper: Arc::new(capper(&world.dir, &world.sim, &world.claims)),
            socket: socket.clone(),
            wanted: true,
            every: Duration::from_millis(5),
            in_charge: watch::channel(is_in_charge).1,
            seen: watch::channel(seen.clone()).1,
            words: None,
            notifier: Arc::new(notifier),
            metrics: Metrics::new(&MetricsRegistry::new()),
            reports: TaskTracker::new(),
        };
        let stop = CancellationToken::new();
        let runs = tokio::spawn(limits.run(stop.clone()));
        if number + 1 < cases.len() {
            // Each time that the socket comes back, a round was decided about before.
            for _ in 0..20 {
                eventually(|| socket.exists()).await;
                fs_err::remove_file(&socket).unwrap();
            }
            let limit = world.limit(&pod_path(0));
            assert_eq!(limit, None, "{is_in_charge} {seen:?}");
        } else {
            eventually(|| world.limit(&pod_path(0)) == Some(64 * MIB)).await;
        }
        stop.cancel();
        runs.await.unwrap();
    }
}

/// Waits until it is so.
async fn eventually(is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait)
        .await
        .unwrap();
}
