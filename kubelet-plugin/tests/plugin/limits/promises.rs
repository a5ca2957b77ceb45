//! Promises of caps: when they end, by whose clock, and what is lost with a file.

use std::path::PathBuf;

use divvy_fake_cluster::{ClaimRef, Fault as ApiFault};
use divvy_gpu_sim::LimitBackend;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;

use super::{Capped, level};
use crate::node::{DRIVER, Plugin, wait};

fn refused_as(refused: bool, answer: &Result<(), String>, about: &str) {
    match answer {
        Ok(()) => assert!(!refused, "{about}"),
        Err(why) => {
            assert!(refused, "{about}: {why}");
            assert!(why.contains("caps are switched off"), "{why}");
        }
    }
}

impl Capped {
    /// Prepares a share of a node that caps nothing, and lets it go.
    async fn tries(&self, claim: &ClaimRef, refused: bool, about: &str) {
        let answer = self.node.prepare(claim).await;
        refused_as(refused, &answer.map(drop), about);
        self.node.unprepare(claim).await.unwrap();
    }

    /// Starts a plugin that caps nothing.
    async fn start_uncapped(&self) -> Plugin {
        let plugin = self.node.start_with(self.config_with("false"));
        plugin.wait_ready().await;
        plugin
    }

    /// Waits until the GPU's file notes the end of the promise.
    async fn end(&self) {
        let has_ended = || self.promise().contains("ended").then_some(());
        wait("the end of the promise", has_ended).await;
    }

    /// Returns the file of the GPU, and the second copy of its promise.
    fn files(&self) -> [PathBuf; 2] {
        let gpu = self.node.sim.uuids().remove(0);
        let folder = self.node.kubelet.config().plugin_dir(DRIVER);
        ["gpus/", "node/caps-"].map(|name| folder.join(format!("{name}{gpu}.json")))
    }
}

/// The scheduler may have chosen the node by what it published; the pod must not start on less. The
/// level falls while the plugin is down, and the API server takes no new slices at first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_allocated_by_slices_with_caps_is_refused_without_them() {
    let capped = Capped::new(LimitBackend::Misc);
    let api = &capped.node.api;
    let ask = async |name: &str, seconds: i64, refused: bool| {
        let claim = capped.share_after(name, SignedDuration::from_secs(seconds));
        capped.tries(&claim, refused, name).await;
    };
    // A node that never promised a cap has lost none.
    let plugin = capped.start_uncapped().await;
    ask("never", -60, false).await;
    plugin.stop().await;
    let plugin = capped.start().await;
    ask("while-capped", -60, false).await;
    // Where the API server keeps no time of the allocation, that of the claim counts.
    let unknown = capped.share("unknown", 2);
    plugin.stop().await;

    for verb in ["update", "create"] {
        api.fail_next(usize::MAX, verb, "resourceslices", ApiFault::Status(503));
    }
    let plugin = capped.node.start_with(capped.config_with("false"));
    let refused = || (api.count("update", "resourceslices") > 2).then_some(());
    wait("writes of slices", refused).await;
    assert_eq!(level(&capped.node).unwrap(), "cgroup");
    // The slices still promise it, whenever a claim is allocated.
    ask("before", -60, true).await;
    ask("still", 3600, true).await;
    api.clear_faults();
    let is_so = || (level(&capped.node)? == "none").then_some(());
    wait("the level", is_so).await;
    capped.end().await;
    ask("early", -60, true).await;
    ask("late", 7200, false).await;
    capped.tries(&unknown, true, "unknown").await;
    let claim = capped.node.claim("whole", &["gpu-0"]);
    capped.node.prepare(&claim).await.unwrap();
    capped.node.unprepare(&claim).await.unwrap();
    plugin.stop().await;

    // Another restart changes nothing.
    let promise = capped.promise();
    let plugin = capped.start_uncapped().await;
    ask("early-again", -60, true).await;
    ask("late-again", 7200, false).await;
    assert_eq!(capped.promise(), promise);
    plugin.stop().await;
}

/// Claims have times of the API server, from which the node's clock may differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn caps_end_by_the_clock_of_the_api_server() {
    for ahead in [-60, -5, 5, 60, 86_400].map(SignedDuration::from_secs) {
        let capped = Capped::new(LimitBackend::Misc);
        capped.node.api.set_clock_ahead(ahead);
        let plugin = capped.start().await;
        let early = capped.share_after("early", ahead);
        let waits = capped.share("waits", 2);
        plugin.stop().await;
        let plugin = capped.start_uncapped().await;
        capped.end().await;
        for chosen in [&early, &waits] {
            capped.tries(chosen, true, &format!("{ahead}")).await;
        }
        let late = ahead + SignedDuration::from_secs(4);
        let late = capped.share_after("late", late);
        capped.tries(&late, false, &format!("{ahead}")).await;
        plugin.stop().await;
    }
}

/// The scheduler notes an allocation by its own clock. A clock that is far ahead says nothing, and
/// the claim was there while the slices promised a cap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocation_from_the_future_is_not_believed_to_be_late() {
    let capped = Capped::new(LimitBackend::Misc);
    let plugin = capped.start().await;
    let claim = capped.share_after("early", SignedDuration::ZERO);
    let scheduler = SignedDuration::from_mins(10);
    let ahead = |claim: &mut ResourceClaim| {
        let allocation = claim.status.as_mut().unwrap().allocation.as_mut();
        let time = capped.node.api.time() + scheduler;
        allocation.unwrap().allocation_timestamp = Some(Time(time));
    };
    let api = &capped.node.api;
    api.modify("default", &claim.name, ahead).unwrap();
    plugin.stop().await;
    let plugin = capped.start_uncapped().await;
    capped.end().await;
    capped.tries(&claim, true, "early").await;
    // Once that time has come it is one like any other.
    let claim = capped.share_after("late", scheduler);
    capped.tries(&claim, false, "late").await;
    plugin.stop().await;
}

/// The promise is kept twice: shares that wait were chosen for it, whatever happens to a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_or_torn_file_loses_no_promise_of_caps() {
    let lose: [fn(&PathBuf); 2] = [
        |file| fs_err::remove_file(file).unwrap(),
        |file| fs_err::write(file, "torn").unwrap(),
    ];
    for (lost, (gpus, copies)) in [
        (0, (1, 0)),
        (1, (1, 0)),
        (0, (0, 1)),
        (1, (0, 1)),
        (1, (1, 1)),
    ] {
        let about = format!("{lost}: {gpus} {copies}");
        let capped = Capped::new(LimitBackend::Misc);
        let plugin = capped.start().await;
        let early = capped.share_after("early", SignedDuration::ZERO);
        plugin.stop().await;
        let plugin = capped.start_uncapped().await;
        capped.end().await;
        capped.tries(&early, true, &about).await;
        let files = capped.files();
        let which = files.iter().zip([gpus, copies]).filter(|(_, is)| *is == 1);
        let which: Vec<_> = which.map(|(file, _)| file.clone()).collect();
        // While the plugin runs, and over a restart.
        which.iter().for_each(lose[lost]);
        if lost == 0 {
            capped.tries(&early, true, &about).await;
        }
        plugin.stop().await;
        which
            .iter()
            .filter(|file| file.exists())
            .for_each(lose[lost]);
        let plugin = capped.start_uncapped().await;
        capped.end().await;
        capped.tries(&early, true, &about).await;
        let late = capped.share_after("late", SignedDuration::from_mins(1));
        capped.tries(&late, false, &about).await;
        plugin.stop().await;
    }
}
