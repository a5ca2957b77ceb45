//! The publisher against a fake API server that misbehaves, and against neighbours that do. Time is paused: waits cost
//! nothing and the limits are exact.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::time::Duration;

use divvy_carve::{Device, Pool, Slice, Taint};
use divvy_controller::{PublishStatus, Publisher, PublisherConfig, slice_name, spawn};
use divvy_fake_cluster::build::{mk_device, mk_node, mk_slice};
use divvy_fake_cluster::{FakeApi, Fault, Gate};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const DRIVER: &str = "gpu.divvy.dev";
const NODE: &str = "node-1";
const SLICES: &str = "resourceslices";
const PATIENCE: Duration = Duration::from_mins(5);

/// A pool with one slice for each list of device names.
fn pool(slices: &[&[&str]]) -> Pool {
    let device = |name: &&str| Device::new(name.parse().unwrap());
    let slice = |names: &&[&str]| Slice { devices: names.iter().map(device).collect(), counter_sets: vec![] };
    Pool { name: "node-1/divvy".into(), slices: slices.iter().map(slice).collect() }
}

struct World {
    api: FakeApi,
    desired: watch::Sender<Option<Pool>>,
    status: watch::Receiver<PublishStatus>,
    publisher: Publisher,
    stop: CancellationToken,
}

fn start(api: &FakeApi, desired: Option<Pool>) -> World {
    let (desired, receiver) = watch::channel(desired);
    let stop = CancellationToken::new();
    let config = PublisherConfig { driver: DRIVER.into(), node_name: NODE.into() };
    let publisher = spawn(api.client(), config, receiver, stop.clone());
    World { api: api.clone(), desired, status: publisher.status(), publisher, stop }
}

fn server() -> FakeApi {
    let api = FakeApi::new();
    api.put(&mk_node(NODE)).unwrap();
    api
}

impl World {
    async fn until(&mut self, condition: impl FnMut(&PublishStatus) -> bool) -> PublishStatus {
        let seen = timeout(PATIENCE, self.status.wait_for(condition)).await.map(|seen| seen.unwrap().clone());
        seen.unwrap_or_else(|_| unreachable!("not within {PATIENCE:?}: {:?}", *self.status.borrow()))
    }

    async fn published(&mut self, pool: &Pool) -> PublishStatus {
        self.until(|status| status.in_sync && status.published.as_deref() == Some(pool)).await
    }

    /// Waits until the server has exactly this pool and the publisher is content.
    async fn stored(&mut self, pool: &Pool) -> PublishStatus {
        let wanted: Vec<Vec<String>> =
            pool.slices.iter().map(|s| s.devices.iter().map(|d| d.name.to_string()).collect()).collect();
        self.api.wait_until(|view| devices(&view.list()) == wanted, PATIENCE).await.unwrap();
        self.published(pool).await
    }

    fn slices(&self) -> Vec<ResourceSlice> {
        self.api.list()
    }
}

fn devices(slices: &[ResourceSlice]) -> Vec<Vec<String>> {
    let names = |slice: &ResourceSlice| slice.spec.devices.iter().flatten().map(|d| d.name.clone()).collect();
    slices.iter().map(names).collect()
}

fn name(index: usize) -> String {
    slice_name(index, DRIVER, NODE)
}

#[tokio::test(start_paused = true)]
async fn a_failed_write_is_told_and_tried_again_until_it_works() {
    for (fault, message) in [
        (
            Fault::Status(500),
            "cannot create ResourceSlice 00000-gpu.divvy.dev-node-1: injected: create resourceslices fails",
        ),
        (Fault::DropBefore, "cannot create ResourceSlice 00000-gpu.divvy.dev-node-1: "),
        (
            Fault::Hang,
            "cannot create ResourceSlice 00000-gpu.divvy.dev-node-1: no answer in 10s; it may have happened all the same",
        ),
        (Fault::Status(403), "nodes, and the admission policy must allow this node)"),
    ] {
        let api = server();
        api.fail_next(3, "create", SLICES, fault);
        let wanted = pool(&[&["gpu-1", "gpu-0"]]);
        let mut world = start(&api, Some(wanted.clone()));
        let told = world.until(|status| status.last_error.is_some()).await;
        let text = told.last_error.unwrap();
        assert!(text.contains(message) && !told.in_sync, "{text}");
        let status = world.stored(&wanted).await;
        assert_eq!((status.last_error, status.writes.failed, status.writes.created), (None, 3, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_was_lost_is_not_done_twice() {
    let api = server();
    api.fail_next(1, "create", SLICES, Fault::DropAfter);
    let first = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    assert_eq!(api.list::<ResourceSlice>().len(), 2);
    for (verb, next) in [("update", pool(&[&["gpu-0"], &["gpu-2"]])), ("delete", pool(&[&["gpu-0"]]))] {
        api.fail_next(1, verb, SLICES, Fault::DropAfter);
        world.desired.send_replace(Some(next.clone()));
        let status = world.stored(&next).await;
        assert!(status.writes.failed > 0, "{verb}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_resolved_with_a_fresh_list() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"]]), pool(&[&["gpu-0", "gpu-1"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("update", SLICES);
    world.desired.send_replace(Some(second.clone()));
    api.wait_until(|view| view.count("update", SLICES) == 1, PATIENCE).await.unwrap();
    api.modify::<ResourceSlice>("", &name(0), |s| s.spec.devices = Some(vec![mk_device("stranger")]))
        .unwrap();
    drop(held);
    api.clear_faults();
    let status = world.stored(&second).await;
    assert_eq!(status.writes.failed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_is_gone_before_its_delete_is_fine() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"], &["gpu-1"]]), pool(&[&["gpu-0"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("delete", SLICES);
    world.desired.send_replace(Some(second.clone()));
    api.wait_until(|view| view.count("delete", SLICES) == 1, PATIENCE).await.unwrap();
    api.delete::<ResourceSlice>("", &name(1)).unwrap();
    drop(held);
    api.clear_faults();
    let status = world.stored(&second).await;
    assert_eq!((status.writes.failed, status.writes.deleted), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_slice_deleted_by_others_while_it_is_written_comes_back() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"], &["gpu-1"]]), pool(&[&["gpu-0"], &["gpu-1", "gpu-2"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("update", SLICES);
    world.desired.send_replace(Some(second.clone()));
    api.wait_until(|view| view.count("update", SLICES) == 1, PATIENCE).await.unwrap();
    assert_eq!(api.wipe_slices(NODE, None), 2);
    drop(held);
    api.clear_faults();
    world.stored(&second).await;
}

#[tokio::test(start_paused = true)]
async fn foreign_deletes_and_edits_are_repaired_within_a_second() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"], &["gpu-2"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    for round in 0..30 {
        let started = Instant::now();
        match round % 3 {
            0 => assert_eq!(api.wipe_slices(NODE, Some(DRIVER)), 3),
            1 => api.delete::<ResourceSlice>("", &name(1)).unwrap(),
            _ => drop(api.modify::<ResourceSlice>("", &name(2), |s| s.spec.devices = None).unwrap()),
        }
        let before = world.status.borrow().rounds;
        world.until(|status| status.rounds > before).await;
        world.stored(&wanted).await;
        assert!(started.elapsed() < Duration::from_secs(1), "round {round} took {:?}", started.elapsed());
    }
    assert_eq!(world.status.borrow().foreign_deletes, 10 * 3 + 10);
}

#[tokio::test(start_paused = true)]
async fn an_expired_or_closed_watch_misses_nothing() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    for close in [FakeApi::expire_watches, FakeApi::close_watches] {
        api.delete::<ResourceSlice>("", &name(0)).unwrap();
        close(&api);
        world.until(|status| !status.in_sync).await;
        world.stored(&wanted).await;
        api.delete::<ResourceSlice>("", &name(1)).unwrap();
        world.until(|status| !status.in_sync).await;
        world.stored(&wanted).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_was_away_finds_the_slices_as_they_should_be() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"]]), pool(&[&["gpu-0", "gpu-1"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    api.stop();
    world.desired.send_replace(Some(second.clone()));
    let told = world.until(|status| status.last_error.is_some() && status.watch_error.is_some()).await;
    assert!(told.last_error.unwrap().contains("the fake API server is stopped"));
    assert!(told.watch_error.unwrap().starts_with("cannot watch ResourceSlices: "));
    tokio::time::sleep(Duration::from_mins(10)).await;
    api.delete::<ResourceSlice>("", &name(0)).unwrap();
    let back = Instant::now();
    api.start();
    world.stored(&second).await;
    world.until(|status| status.last_error.is_none() && status.watch_error.is_none()).await;
    assert!(back.elapsed() < Duration::from_secs(6), "{:?}", back.elapsed());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_and_little_is_read_while_nothing_changes() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut world = start(&api, Some(wanted.clone()));
    let before = world.stored(&wanted).await;
    api.forget_requests();
    tokio::time::sleep(Duration::from_hours(24)).await;
    assert_eq!(*world.status.borrow(), before);
    for verb in ["create", "update", "patch", "delete", "get"] {
        assert_eq!(api.count(verb, "*"), 0, "{verb}");
    }
    assert_eq!(api.count("list", "*"), 0);
    assert!(api.count("watch", "*") <= 24 * 13, "{} watches in a day", api.count("watch", "*"));
}

#[tokio::test(start_paused = true)]
async fn dropped_fields_are_reported_once_and_not_sent_again() {
    let api = server();
    api.turn_off(Gate::DeviceTaints);
    let mut wanted = pool(&[&["gpu-0"]]);
    wanted.slices[0].devices[0].taints = vec![Taint::no_schedule("gpu.divvy.dev/lost", None)];
    let mut world = start(&api, Some(wanted.clone()));
    let status = world.published(&wanted).await;
    assert_eq!(status.dropped, [divvy_carve::Feature::Taints].into());
    assert_eq!(status.altered, [name(0)].into());
    tokio::time::sleep(Duration::from_hours(1)).await;
    world.desired.send_replace(Some(wanted.clone()));
    world.until(|status| status.rounds == 2).await;
    assert_eq!((api.count("create", SLICES), api.count("update", SLICES)), (1, 0));
    let without = pool(&[&["gpu-0"]]);
    world.desired.send_replace(Some(without.clone()));
    let status = world.published(&without).await;
    assert_eq!(status.dropped, [].into(), "what is not sent is not dropped");
}

#[tokio::test(start_paused = true)]
async fn without_a_pool_what_is_there_stays_and_stopping_keeps_the_slices() {
    let api = server();
    let old = api.put(&mk_slice("old", DRIVER, NODE, vec![mk_device("gpu-0")])).unwrap();
    let other = api.put(&mk_slice("other", DRIVER, "node-2", vec![mk_device("gpu-0")])).unwrap();
    let mut world = start(&api, None);
    api.wait_until(|view| view.count("watch", SLICES) == 1, PATIENCE).await.unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(world.slices(), [old, other.clone()]);
    let wanted = pool(&[&["gpu-7"]]);
    world.desired.send_replace(Some(wanted.clone()));
    world.published(&wanted).await;
    assert_eq!(devices(&world.slices()), [["gpu-7"], ["gpu-0"]]);
    world.stop.cancel();
    world.publisher.stopped().await;
    assert_eq!(devices(&api.list()), [["gpu-7"], ["gpu-0"]]);
    assert_eq!(api.get::<ResourceSlice>("", "other"), Some(other), "another node's slice is not touched");
}

#[tokio::test(start_paused = true)]
async fn slices_belong_to_the_node_even_after_it_was_made_anew() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    let owner = |api: &FakeApi| api.list::<ResourceSlice>()[0].owner_references()[0].uid.clone();
    assert_eq!(owner(&api), api.get::<Node>("", NODE).unwrap().uid().unwrap());
    api.delete::<Node>("", NODE).unwrap();
    api.put(&mk_node(NODE)).unwrap();
    api.wipe_slices(NODE, None); // as the garbage collector does
    world.until(|status| status.rounds == 2).await;
    assert_eq!(owner(&api), api.get::<Node>("", NODE).unwrap().uid().unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_missing_node_and_a_taken_name_are_told_with_what_to_do() {
    let api = FakeApi::new();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    let told = world.until(|status| status.last_error.is_some()).await;
    assert_eq!(
        told.last_error.unwrap(),
        "cannot get Node node-1: nodes \"node-1\" not found (--node-name must be the name of the Node object)"
    );
    api.put(&mk_slice(&name(0), "other.example.com", "node-2", vec![])).unwrap();
    api.put(&mk_node(NODE)).unwrap();
    let taken =
        world.until(|status| status.last_error.as_ref().is_some_and(|e| !e.contains("Node node-1"))).await;
    assert_eq!(
        taken.last_error.unwrap(),
        "ResourceSlice 00000-gpu.divvy.dev-node-1 belongs to driver other.example.com on node node-2, not to this \
         node: delete it with `kubectl delete resourceslice 00000-gpu.divvy.dev-node-1`"
    );
    api.delete::<ResourceSlice>("", &name(0)).unwrap();
    world.stored(&wanted).await;
}

#[tokio::test(start_paused = true)]
async fn a_pool_over_a_limit_is_not_sent_and_not_tried_again() {
    let api = server();
    let mut world = start(&api, Some(pool(&[&["gpu-0"], &["gpu-0"]])));
    let told = world.until(|status| status.last_error.is_some()).await;
    assert_eq!(
        told.last_error.unwrap(),
        "the pool cannot be published: slice 1: the device \"gpu-0\" is there twice"
    );
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!((world.status.borrow().writes.failed, api.count("create", "*")), (1, 0));
    let good = pool(&[&["gpu-0"], &["gpu-1"]]);
    world.desired.send_replace(Some(good.clone()));
    world.stored(&good).await;
}

#[tokio::test(start_paused = true)]
async fn two_publishers_of_one_pool_do_not_fight() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut one = start(&api, Some(wanted.clone()));
    let mut two = start(&api, Some(wanted.clone()));
    one.stored(&wanted).await;
    two.stored(&wanted).await;
    api.forget_requests();
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert_eq!(
        (api.count("create", SLICES), api.count("update", SLICES), api.count("delete", SLICES)),
        (0, 0, 0)
    );
}

/// A small deterministic generator; std has none.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// `DIVVY_SEEDS` raises the number of sequences.
#[tokio::test(start_paused = true)]
async fn any_sequence_of_pools_faults_and_neighbours_ends_with_the_last_pool() {
    let seeds = std::env::var("DIVVY_SEEDS").ok().and_then(|n| n.parse().ok()).unwrap_or(40);
    for seed in 0..seeds {
        let mut random = Random(seed);
        let api = server();
        let mut world = start(&api, None);
        let mut last = pool(&[]);
        for _ in 0..random.below(12) + 3 {
            match random.below(8) {
                0 => drop(api.wipe_slices(NODE, None)),
                1 => api.expire_watches(),
                2 => {
                    let index = usize::try_from(random.below(3)).unwrap();
                    let _missing_is_fine = api.delete::<ResourceSlice>("", &name(index));
                }
                3 | 4 => {
                    let verb = ["create", "update", "delete", "list", "watch"]
                        [usize::try_from(random.below(5)).unwrap()];
                    let faults = [
                        Fault::Status(500),
                        Fault::Status(409),
                        Fault::DropBefore,
                        Fault::DropAfter,
                        Fault::Hang,
                    ];
                    api.fail_next(1, verb, SLICES, faults[usize::try_from(random.below(5)).unwrap()]);
                }
                _ => {
                    let slices: Vec<Vec<String>> = (0..random.below(4))
                        .map(|s| (0..random.below(4)).map(|d| format!("gpu-{s}-{d}")).collect())
                        .collect();
                    let names: Vec<Vec<&str>> =
                        slices.iter().map(|s| s.iter().map(String::as_str).collect()).collect();
                    last = pool(&names.iter().map(Vec::as_slice).collect::<Vec<_>>());
                    world.desired.send_replace(Some(last.clone()));
                }
            }
            if random.below(2) == 0 {
                tokio::time::sleep(Duration::from_millis(random.below(3000))).await;
            }
        }
        world.desired.send_replace(Some(last.clone()));
        let mut wanted: Vec<Vec<String>> =
            last.slices.iter().map(|s| s.devices.iter().map(|d| d.name.to_string()).collect()).collect();
        if wanted.is_empty() {
            wanted.push(vec![]);
        }
        let settled = |slices: Vec<ResourceSlice>| {
            let pools: Vec<_> =
                slices.iter().map(|s| (s.spec.pool.generation, s.spec.pool.resource_slice_count)).collect();
            let count = i64::try_from(wanted.len()).unwrap();
            devices(&slices) == wanted && pools.iter().all(|pool| *pool == (pools[0].0, count))
        };
        let done = api.wait_until(|view| settled(view.list()), PATIENCE).await;
        assert!(
            done.is_ok(),
            "seed {seed}: {done:?}\n{:?}\n{:?}",
            api.list::<ResourceSlice>(),
            *world.status.borrow()
        );
        world.published(&last).await;
        world.stop.cancel();
        world.publisher.stopped().await;
    }
}
