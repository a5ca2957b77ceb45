//! Time-sliced shares: the whole way of a claim, and the real process killed at random moments
//! while 64 claims come and go on one GPU.
//!
//! More kills than the default: `DIVVY_KILLS=300 cargo test -p divvy-kubelet-plugin --test plugin
//! shares -- --nocapture`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_fake_cluster::{ClaimRef, GpuNode, GpuPolicy};
use divvy_model::{ComputeMode, GpuDriver, TimeSlice};
use futures::StreamExt as _;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Api;
use kube::runtime::watcher;
use kube::runtime::watcher::Event;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::binary::Process;
use crate::kills::{Dice, killer, prepare, unprepare, until_done};
use crate::node::{DRIVER, Node, PATIENCE, POOL, device, wait, with_config};

const SHARES: usize = 64;

/// The policy of the node's GPU: shares, with a time slice.
fn policy(node: &Node, slice: Option<&str>) {
    let modes = ["Whole", "TimeSlicing"];
    let rule = match slice {
        Some(slice) => json!({ "modes": modes, "shares": { "timeSlice": slice } }),
        None => json!({ "modes": modes }),
    };
    node.api
        .put(&GpuPolicy::new("shares", json!({ "rules": [rule] })))
        .unwrap();
}

/// The same, and a plugin that has published it; before that prepares may go by what was said
/// earlier.
async fn published(node: &Node, slice: Option<&str>) {
    policy(node, slice);
    let expected = slice.unwrap_or("Default");
    wait("the time slice in the slices", || {
        let slices = node.api.list::<ResourceSlice>();
        let mut devices = slices
            .iter()
            .filter_map(|slice| slice.spec.devices.as_ref())
            .flatten();
        let share = devices.find(|device| device.name == "gpu-0-ts")?;
        let found = share
            .attributes
            .as_ref()?
            .get("timeSlice")?
            .string
            .as_deref();
        (found == Some(expected)).then_some(())
    })
    .await;
}

/// A claim of shares of one GPU, so much memory each.
fn shares(node: &Node, name: &str, ids: &[&str]) -> ClaimRef {
    let share = |id: &&str| {
        let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0-ts");
        let granted = [("memory", "1Gi"), ("cores", "1"), ("slots", "1")];
        let granted = granted.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())));
        result.share_id = Some((*id).to_owned());
        result.consumed_capacity = Some(BTreeMap::from(granted));
        result
    };
    let count = i64::try_from(ids.len()).unwrap();
    node.put(allocated(
        mk_claim("default", name, DRIVER, count),
        ids.iter().map(share).collect(),
    ))
}

fn time_slice(node: &Node) -> TimeSlice {
    node.host.time_slice(&node.sim.uuids().remove(0))
}

/// Nothing but the policy itself changes: no claim comes or goes, and no round is due.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_time_slice_is_set_under_shares_that_are_in_use() {
    let node = Node::new("h100x1");
    policy(&node, Some("Long"));
    let plugin = node.start_with(node.seldom());
    plugin.wait_ready().await;
    published(&node, Some("Long")).await;
    let claim = shares(&node, "c", &["s-1"]);
    node.prepare(&claim).await.unwrap();
    assert_eq!(time_slice(&node), TimeSlice::Long);
    policy(&node, Some("Short"));
    let is_short = || (time_slice(&node) == TimeSlice::Short).then_some(());
    wait("the time slice of the changed policy", is_short).await;
    plugin.stop().await;
}

/// Returns whether a version of the share device has a taint, and the slots it offers.
fn shown(slice: &ResourceSlice) -> Option<(bool, String)> {
    let devices = slice.spec.devices.iter().flatten();
    let share = devices.into_iter().find(|d| d.name == "gpu-0-ts")?;
    let slots = share.capacity.as_ref()?.get("slots")?.value.0.clone();
    Some((share.taints.iter().flatten().next().is_some(), slots))
}

/// A withdrawn device that comes back with other limits loses its taint with them, and not before:
/// claims would be allocated by the limits of the earlier policy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withdrawn_share_comes_back_with_the_limits_of_its_new_policy() {
    let node = Node::new("h100x1");
    // What prepare has to know of a policy changes with what is reserved.
    let slots = |slots: u32, reserved: &str| {
        let shares = json!({ "slots": slots, "reservedMemory": reserved });
        let rule = json!({ "modes": ["TimeSlicing"], "shares": shares });
        let policy = GpuPolicy::new("slots", json!({ "rules": [rule] }));
        node.api.put(&policy).unwrap();
    };
    slots(16, "1Gi");
    let mut config = node.config(&[]);
    // Withdrawn until the test has done with it.
    config.timing.leave = PATIENCE;
    let plugin = node.start_with(config);
    let published = |expected: (bool, &str)| {
        let found = node.api.list::<ResourceSlice>();
        let found = found.iter().find_map(shown);
        (found == Some((expected.0, expected.1.to_owned()))).then_some(())
    };
    wait("sixteen slots", || published((false, "16"))).await;
    let versions = Arc::new(Mutex::new(Vec::new()));
    let slices = Api::<ResourceSlice>::all(node.api.client());
    let (seen, begun) = (versions.clone(), Arc::new(Notify::new()));
    let watches = begun.clone();
    let watch = tokio::spawn(async move {
        let mut events = std::pin::pin!(watcher(slices, watcher::Config::default()));
        while let Some(event) = events.next().await {
            if let Ok(Event::InitApply(slice) | Event::Apply(slice)) = event {
                seen.lock().unwrap().extend(shown(&slice));
                watches.notify_one();
            }
        }
    });
    begun.notified().await;
    node.api.delete::<GpuPolicy>("", "slots").unwrap();
    wait("the withdrawn share", || published((true, "16"))).await;
    // The grant of the new limits cannot be stored for a while.
    let lock = plugin.config.plugin_dir.join("locks");
    let lock = lock.join(format!("{}.lock", node.sim.uuids()[0]));
    fs_err::remove_file(&lock).unwrap();
    fs_err::create_dir(&lock).unwrap();
    slots(4, "2Gi");
    wait("the trouble", || {
        let report = node.api.get::<GpuNode>("", "n1")?.status;
        report.to_string().contains("not-stored").then_some(())
    })
    .await;
    assert_eq!(published((true, "16")), Some(()));
    fs_err::remove_dir(&lock).unwrap();
    wait("four slots", || published((false, "4"))).await;
    let last = (false, "4".to_owned());
    wait("all versions", || {
        (versions.lock().unwrap().last() == Some(&last)).then_some(())
    })
    .await;
    let versions = versions.lock().unwrap().clone();
    let withdrawn = versions.iter().skip_while(|version| !version.0);
    let early = withdrawn.filter(|version| **version == (false, "16".to_owned()));
    assert_eq!(early.count(), 0, "{versions:?}");
    watch.abort();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_come_with_ids_env_and_slice_and_the_last_gives_it_back() {
    let node = Node::new("h100x1");
    policy(&node, Some("Long"));
    let plugin = node.start().await;
    published(&node, Some("Long")).await;
    let first = shares(&node, "first", &["s-1", "s-2"]);
    let answer = node.prepare(&first).await.unwrap();
    let expected = ["s-1", "s-2"].map(|id| {
        let mut expected = device(&first, "gpu", "gpu-0-ts");
        expected.share_id = Some(id.to_owned());
        expected.cdi_device_ids = vec![format!("{}-{id}", expected.cdi_device_ids[0])];
        expected
    });
    assert_eq!(answer, expected);
    assert_eq!(time_slice(&node), TimeSlice::Long);
    let text = node.cdi_files().into_values().next().unwrap().to_string();
    assert!(text.contains("DIVVY_MEMORY_GPU_0_TS=2147483648"), "{text}");
    assert!(text.contains("DIVVY_CORES_GPU_0_TS=2"), "{text}");

    // A changed policy is for those that hold the GPU, too.
    published(&node, Some("Short")).await;
    let second = shares(&node, "second", &["s-4"]);
    node.prepare(&second).await.unwrap();
    assert_eq!(time_slice(&node), TimeSlice::Short);
    let other = shares(&node, "other", &["s-3"]);
    let asks = json!({ "kind": "ShareConfig", "timeSlicing": { "interval": "Long" } });
    let claim = node.api.get::<ResourceClaim>("default", "other").unwrap();
    node.put(with_config(claim, asks));
    let refused = node.prepare(&other).await.unwrap_err();
    assert!(
        refused.contains("a claim selects shares by their attribute timeSlice"),
        "{refused}"
    );
    node.api
        .delete::<ResourceClaim>("default", "other")
        .unwrap();
    let whole = node.claim("whole", &["gpu-0"]);
    let refused = node.prepare(&whole).await.unwrap_err();
    assert!(
        refused.contains("in another mode than claim default/"),
        "{refused}"
    );

    for claim in [&first, &second] {
        assert_eq!(time_slice(&node), TimeSlice::Short, "a share is left");
        node.unprepare(claim).await.unwrap();
        node.api
            .delete::<ResourceClaim>("default", &claim.name)
            .unwrap();
    }
    assert_eq!(time_slice(&node), TimeSlice::Default);
    node.prepare(&whole).await.unwrap();
    plugin.stop().await;
}

/// A GPU left in an exclusive compute mode is shared in default and a prohibited one is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exclusive_compute_mode_is_changed_and_a_prohibited_one_named() {
    let node = Node::new("h100x1");
    let gpu = node.sim.uuids().remove(0);
    let set = |mode| {
        node.sim
            .edit(|e| e.gpu(&gpu).unwrap().facts.compute_mode = Some(mode));
    };
    let mode = || node.sim.facts(&gpu).unwrap().compute_mode.unwrap();
    set(ComputeMode::ExclusiveProcess);
    let plugin = node.start().await;
    let share = shares(&node, "share", &["s"]);
    node.prepare(&share).await.unwrap();
    assert_eq!(mode(), ComputeMode::Default);
    node.unprepare(&share).await.unwrap();
    assert_eq!(mode(), ComputeMode::ExclusiveProcess, "as it was found");
    set(ComputeMode::Prohibited);
    let command = format!("nvidia-smi -i {gpu} -c DEFAULT");
    let until = Instant::now() + PATIENCE;
    // Until the plugin has read it.
    while !node
        .prepare(&share)
        .await
        .is_err_and(|refused| refused.contains(&command))
    {
        assert!(Instant::now() < until, "it is never refused");
        node.unprepare(&share).await.unwrap();
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_without_time_slices_is_named() {
    let node = Node::new("h100x1");
    let program = node.dir.path().join("host/usr/bin/nvidia-smi");
    fs_err::write(
        &program,
        "#!/bin/sh\necho 'Setting the timeslice is not supported for GPU 0'\nexit 3\n",
    )
    .unwrap();
    policy(&node, Some("Long"));
    let plugin = node.start().await;
    published(&node, Some("Long")).await;
    let claim = shares(&node, "c", &["s"]);
    let refused = node.prepare(&claim).await.unwrap_err();
    let gpu = node.sim.uuids().remove(0);
    assert!(
        refused.contains(&format!(
            "{gpu} (NVIDIA H100 80GB HBM3) does not support setting a time slice"
        )),
        "{refused}"
    );
    assert_eq!((node.records().len(), node.cdi_files().len()), (0, 0));
    published(&node, Some("Default")).await;
    let anyway = shares(&node, "d", &["t"]);
    node.prepare(&anyway).await.unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreadable_time_slice_is_set_and_taken_for_the_default() {
    let node = Node::new("h100x1");
    let host = node.dir.path().join("host");
    let said = host.join("said");
    let script = format!("[ $4 = --list ] && exit 2\necho $4 $5 >>{}", said.display());
    fs_err::write(
        host.join("usr/bin/nvidia-smi"),
        format!("#!/bin/sh\n{script}\n"),
    )
    .unwrap();
    policy(&node, Some("Long"));
    let plugin = node.start().await;
    published(&node, Some("Long")).await;
    let claim = shares(&node, "c", &["s"]);
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    assert_eq!(
        fs_err::read_to_string(&said).unwrap(),
        "--set-timeslice 3\n--set-timeslice 0\n"
    );
    plugin.stop().await;
}

/// Checks that nothing is left. Settings of a GPU that could not be given back at once are given
/// back when the plugin looks again.
async fn assert_nothing_is_left(node: &Node) {
    let files = node.cdi_files().into_keys().chain(node.records());
    assert_eq!(files.collect::<Vec<_>>(), Vec::<String>::new());
    let states = node.kubelet.config().plugin_dir(DRIVER).join("gpus");
    for file in node.names_in("gpus").iter().map(|name| states.join(name)) {
        let rest = || {
            let state = divvy_claims::decode_gpu_state(&fs_err::read(&file).unwrap());
            let granted = state.fine().unwrap().clone();
            divvy_claims::GpuState {
                grant: divvy_claims::Granted::default(),
                ..granted
            }
        };
        let what = format!("nothing to be left on the GPU, there is {:?}", rest());
        wait(&what, || rest().is_default().then_some(())).await;
    }
}

/// Sixty four shares outlive kills and the GPU is free exactly when the last is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_shares_outlive_kills_and_the_last_frees_the_gpu() {
    let kills = std::env::var("DIVVY_KILLS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(10);
    let node = Node::new("h100x1");
    let server = node.api.serve_http().await.unwrap();
    let kubeconfig = server.kubeconfig();
    let begun = Instant::now();
    let over = tokio_util::sync::CancellationToken::new();
    let whole = node.claim("whole", &["gpu-0"]);

    // As many claims at once as there are shares; those that are left at the end stay.
    let lives = async |number: usize| {
        let mut dice = Dice(0x51ab_1e00 + number as u64);
        for round in 0_u64.. {
            if dice.below(16) == 0 {
                policy(&node, dice.below(2).eq(&0).then_some("Long"));
            }
            let name = format!("c{number}-{round}");
            let claim = shares(&node, &name, &[&format!("s-{number}-{round}")]);
            until_done("prepare", async || prepare(&node, &claim).await).await;
            if over.is_cancelled() {
                return (claim, round);
            }
            tokio::time::sleep(Duration::from_millis(dice.below(300))).await;
            until_done("unprepare", async || unprepare(&node, &claim).await).await;
            node.api.delete::<ResourceClaim>("default", &name).unwrap();
        }
        unreachable!()
    };
    let kill = async {
        let process = killer(&node, &kubeconfig, kills, 2500, &mut Dice(0x2545_f491)).await;
        over.cancel();
        process
    };
    // One share stays all the while, so that the GPU is never free.
    let anchor = shares(&node, "anchor", &["s-anchor"]);
    let others = async {
        until_done("the first prepare", async || prepare(&node, &anchor).await).await;
        let intruder = async {
            let mut tried = 0;
            while !over.is_cancelled() {
                tried += u64::from(
                    !prepare(&node, &whole)
                        .await
                        .unwrap_err()
                        .contains("connect"),
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            tried
        };
        tokio::join!(futures::future::join_all((1..SHARES).map(lives)), intruder)
    };
    let (mut process, (last, refused)) = tokio::join!(kill, others);
    let rounds: u64 = last.iter().map(|(_, rounds)| rounds).sum();
    assert_eq!(last.len() + 1, SHARES);

    // All 64 are there. They go in another order than they came, with the plugin killed now and
    // then.
    let mut dice = Dice(0x7e57);
    let mut left: Vec<_> = last.into_iter().map(|(claim, _)| claim).collect();
    while !left.is_empty() {
        let at = usize::try_from(dice.below(left.len() as u64)).unwrap();
        let claim = left.swap_remove(at);
        if dice.below(16) == 0 {
            process.signal(Signal::KILL);
            process.end().await;
            process = Process::start_with(&node, &kubeconfig, &[("LOG_LEVEL", "error")]);
        }
        until_done("unprepare", async || unprepare(&node, &claim).await).await;
        node.api
            .delete::<ResourceClaim>("default", &claim.name)
            .unwrap();
    }
    until_done("a call", async || match prepare(&node, &whole).await {
        Err(why) if why.contains("claim default/anchor") => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    assert_eq!(unprepare(&node, &anchor).await, Ok(()));
    wait("the time slice to be back", || {
        (time_slice(&node) == TimeSlice::Default).then_some(())
    })
    .await;
    assert_eq!(
        prepare(&node, &whole).await,
        Ok(()),
        "free with the last release, not some time after it"
    );
    assert_eq!(unprepare(&node, &whole).await, Ok(()));

    assert_nothing_is_left(&node).await;
    process.signal(Signal::TERM);
    assert!(process.end().await.success());
    eprintln!(
        "{kills} kills, {rounds} claims before the last {SHARES}, {refused} attempts on the whole GPU refused, {:.1?}",
        begun.elapsed()
    );
}
