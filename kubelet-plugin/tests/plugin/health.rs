//! Unhealthy GPUs: taints, Events, metrics, the kubelet's health service, and recovery.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_api::node::GpuNodeStatus;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_result, reserved};
use divvy_fake_cluster::{ClaimRef, GpuNode, GpuPolicy, HealthWatch};
use divvy_gpu_sim::{Fault, profile};
use divvy_model::health::{FabricState, GpuEventKind, RecoveryAction, RowRemap};
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid, MigMode};
use divvy_proto::health::v1::HealthStatus;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::json;

use crate::node::{DRIVER, Node, PATIENCE, POOL, plain, wait};

impl Node {
    fn uuid(&self, index: usize) -> GpuUuid {
        self.sim.uuids().swap_remove(index)
    }

    fn xid(&self, gpu: &GpuUuid, number: u32, gpu_instance: Option<u32>) {
        assert!(
            self.sim
                .send_event(gpu, GpuEventKind::Xid(number), gpu_instance)
        );
    }

    fn recovery(&self, gpu: &GpuUuid, action: RecoveryAction) {
        self.sim
            .edit(|e| e.set_recovery(gpu, Some(action)))
            .unwrap();
    }

    /// Taints of each device, as `key=value:effect`.
    pub(crate) fn taints(&self) -> BTreeMap<String, Vec<String>> {
        let slices = self.api.list::<ResourceSlice>();
        let devices = slices
            .into_iter()
            .flat_map(|slice| slice.spec.devices.unwrap_or_default());
        let taints = |device: &k8s_openapi::api::resource::v1::Device| {
            let taints = device.taints.iter().flatten();
            let text = taints.map(|t| {
                format!(
                    "{}={}:{}",
                    t.key,
                    t.value.as_deref().unwrap_or_default(),
                    t.effect
                )
            });
            text.collect()
        };
        devices
            .map(|device| (device.name.clone(), taints(&device)))
            .collect()
    }

    async fn wait_tainted(&self, expected: &[(&str, &[&str])]) {
        let expected: BTreeMap<String, Vec<String>> = expected
            .iter()
            .map(|(name, taints)| {
                (
                    (*name).to_owned(),
                    taints.iter().map(|t| (*t).to_owned()).collect(),
                )
            })
            .collect();
        let until = tokio::time::Instant::now() + PATIENCE;
        while self.taints() != expected {
            let now = tokio::time::Instant::now();
            assert!(
                now < until,
                "taints are {:#?}, not {expected:#?}",
                self.taints()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until the node's GpuNode sums up its troubles in these words.
    async fn wait_trouble(&self, expected: &str) {
        wait(&format!("trouble {expected:?}"), || {
            let status = self.api.get::<GpuNode>("", "n1")?.status;
            let status: GpuNodeStatus = serde_json::from_value(status).ok()?;
            (status.summary.trouble == expected).then_some(())
        })
        .await;
    }

    /// Kind, name and note of each Event with this reason.
    fn events(&self, reason: &str) -> Vec<(String, String, String)> {
        let mut events: Vec<_> = self
            .api
            .list::<Event>()
            .into_iter()
            .filter(|event| event.reason.as_deref() == Some(reason))
            .map(|event| {
                let about = event.regarding.unwrap();
                (
                    about.kind.unwrap(),
                    about.name.unwrap(),
                    event.note.unwrap(),
                )
            })
            .collect();
        events.sort();
        events
    }
}

/// Waits until the health service reports these devices as expected: the messages of those that are
/// unhealthy.
async fn reported(watch: &mut HealthWatch, expected: &[(&str, Option<&str>)]) {
    let look = async {
        loop {
            let devices = watch.next().await.unwrap().unwrap();
            let reported: Vec<(String, Option<String>)> = devices
                .into_iter()
                .map(|device| {
                    let id = device.device.unwrap();
                    assert_eq!(id.pool_name, POOL);
                    assert!(
                        device.last_updated_time > 0 && device.health_check_timeout_seconds == 30
                    );
                    let fit = device.health == i32::from(HealthStatus::Healthy);
                    (id.device_name, (!fit).then_some(device.message))
                })
                .collect();
            let as_expected = reported.len() == expected.len()
                && reported
                    .iter()
                    .zip(expected)
                    .all(|((name, message), (expected, said))| {
                        name == expected && message.as_deref() == *said
                    });
            if as_expected {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, look).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unhealthy_gpu_is_tainted_and_reported_everywhere_until_it_recovers() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let sick = node.uuid(0);
    for (name, device) in [("c", "gpu-0"), ("other", "gpu-1")] {
        node.prepare(&node.claim(name, &[device])).await.unwrap();
    }
    let mut v1 = node
        .kubelet
        .watch_health(DRIVER, "v1.DRAResourceHealth")
        .await
        .unwrap();
    let mut alpha = node
        .kubelet
        .watch_health(DRIVER, "v1alpha1.DRAResourceHealth")
        .await
        .unwrap();
    reported(&mut v1, &[("gpu-0", None), ("gpu-1", None)]).await;

    node.recovery(&sick, RecoveryAction::Reset);
    node.xid(&sick, 119, None);
    node.wait_tainted(&[
        (
            "gpu-0",
            &[
                "gpu.divvy.dev/recovery=reset:NoSchedule",
                "gpu.divvy.dev/xid=119:NoSchedule",
            ],
        ),
        ("gpu-1", &[]),
    ])
    .await;
    let message = "the GPU needs recovery: reset and reported Xid 119 (reset) (drain the node, then reset the GPU or reboot (docs/maintenance.md))";
    reported(&mut v1, &[("gpu-0", Some(message)), ("gpu-1", None)]).await;
    reported(&mut alpha, &[("gpu-0", Some(message)), ("gpu-1", None)]).await;
    let events = wait("the Events", || {
        let events = node.events("GpuXid");
        (events.len() == 3).then_some(events)
    })
    .await;
    let about: Vec<_> = events
        .iter()
        .map(|(kind, name, _)| (kind.as_str(), name.as_str()))
        .collect();
    assert_eq!(
        about,
        [("Node", "n1"), ("Pod", "pod"), ("ResourceClaim", "c")]
    );
    assert_eq!(
        events[0].2,
        format!(
            "{sick} (gpu-0) reported Xid 119 (reset): no new claim is placed on it (drain the node, then reset the GPU or reboot (docs/maintenance.md))"
        )
    );
    let metrics = plugin.metrics.encode();
    for line in [
        format!("divvy_gpu_healthy{{UUID=\"{sick}\",device=\"gpu-0\"}} 0"),
        format!("divvy_gpu_ailment{{UUID=\"{sick}\",device=\"gpu-0\",ailment=\"xid\"}} 1"),
        format!("divvy_gpu_xids_total{{UUID=\"{sick}\",xid=\"119\",class=\"reset\"}} 1"),
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} in {metrics}");
    }

    node.recovery(&sick, RecoveryAction::Nothing);
    node.wait_tainted(&[("gpu-0", &[]), ("gpu-1", &[])]).await;
    reported(&mut v1, &[("gpu-0", None), ("gpu-1", None)]).await;
    wait("the good news", || {
        (node.events("GpuRecovered").len() == 2).then_some(())
    })
    .await;
    let metrics = plugin.metrics.encode();
    assert!(metrics.contains(&format!(
        "divvy_gpu_healthy{{UUID=\"{sick}\",device=\"gpu-0\"}} 1"
    )));
    assert!(!metrics.contains("divvy_gpu_ailment{"), "{metrics}");
    // A server waits for its streams: the plugin ends them.
    plugin.stop().await;
    while let Ok(Some(_)) = v1.next().await {}
}

/// Two pods have a claim, and one of them is deleted: the record keeps it until the next round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_about_a_fault_is_written_on_pods_that_are_there() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let results = vec![mk_result("gpu", DRIVER, POOL, "gpu-0")];
    let claim = allocated(mk_claim("default", "c", DRIVER, 1), results);
    let claim = node.put(reserved(claim, "stays", "uid-of-stays"));
    node.prepare(&claim).await.unwrap();
    let leave = |claim: &mut ResourceClaim| {
        let consumers = claim.status.as_mut().unwrap().reserved_for.as_mut();
        consumers.unwrap().retain(|one| one.name == "stays");
    };
    node.api.modify("default", "c", leave).unwrap();
    node.xid(&node.uuid(0), 79, None);
    let events = wait("the Events", || {
        let events = node.events("GpuXid");
        events
            .iter()
            .any(|(_, name, _)| name == "stays")
            .then_some(events)
    })
    .await;
    let about: Vec<_> = events
        .iter()
        .map(|(kind, name, _)| (kind.as_str(), name.as_str()))
        .collect();
    assert_eq!(
        about,
        [("Node", "n1"), ("Pod", "stays"), ("ResourceClaim", "c")]
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_xid_of_a_partition_concerns_that_partition_alone_and_goes_with_it() {
    let node = Node::new("h100x1");
    let gpu = node.uuid(0);
    node.sim.edit(|e| {
        e.gpu(&gpu).unwrap().facts.mig_mode = MigMode::Supported {
            current: true,
            pending: true,
        };
        // As with a driver that does not report it: only the end of the partition ends the fault.
        e.set_recovery(&gpu, None).unwrap();
    });
    let plugin = node.start_with(node.config(&["--mig-profiles", ""]));
    plugin.wait_ready().await;
    let (left, right) = ("gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-5");
    let claims = [node.claim("left", &[left]), node.claim("right", &[right])];
    for claim in &claims {
        node.prepare(claim).await.unwrap();
    }
    let mut watch = node
        .kubelet
        .watch_health(DRIVER, "v1.DRAResourceHealth")
        .await
        .unwrap();
    reported(&mut watch, &[(left, None), (right, None)]).await;
    let living = node.sim.engine().gpus()[0].instances.clone();
    let at_five = living
        .iter()
        .find(|i| i.instance.placement.start == 5)
        .unwrap()
        .instance
        .id;

    node.xid(&gpu, 95, Some(at_five.0));
    let message = "the GPU reported Xid 95 (reset) (drain the node, then reset the GPU or reboot (docs/maintenance.md))";
    reported(&mut watch, &[(left, None), (right, Some(message))]).await;
    let overlapping = |taints: &BTreeMap<String, Vec<String>>| -> Vec<String> {
        let xid = vec!["gpu.divvy.dev/xid=95:NoSchedule".to_owned()];
        taints
            .iter()
            .filter(|(_, taints)| **taints == xid)
            .map(|(name, _)| name.clone())
            .collect()
    };
    let tainted = wait("taints", || {
        Some(overlapping(&node.taints())).filter(|all| !all.is_empty())
    })
    .await;
    assert_eq!(
        tainted,
        [
            "gpu-0-mig-1g10gb-19-5",
            "gpu-0-mig-1g20gb-15-4",
            "gpu-0-mig-2g20gb-14-4",
            "gpu-0-mig-3g40gb-9-4",
            "gpu-0-mig-7g80gb-0-0"
        ]
    );
    let events = wait("the Events", || {
        Some(node.events("GpuXid")).filter(|all| all.len() == 3)
    })
    .await;
    assert_eq!(events[2].1, "right");

    // Another process cannot ask for it and knows it all the same, from the first pool on.
    plugin.stop().await;
    for slice in node.api.list::<ResourceSlice>() {
        node.api
            .delete::<ResourceSlice>("", &slice.metadata.name.unwrap())
            .unwrap();
    }
    let plugin = node.start_with(node.config(&["--mig-profiles", ""]));
    plugin.wait_ready().await;
    let again = wait("the pool", || {
        Some(node.taints()).filter(|taints| taints.contains_key(right))
    })
    .await;
    assert_eq!(overlapping(&again), tainted);
    let mut watch = node
        .kubelet
        .watch_health(DRIVER, "v1.DRAResourceHealth")
        .await
        .unwrap();
    reported(&mut watch, &[(left, None), (right, Some(message))]).await;

    node.unprepare(&claims[1]).await.unwrap();
    wait("the taints' end", || {
        overlapping(&node.taints()).is_empty().then_some(())
    })
    .await;
    reported(&mut watch, &[(left, None)]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn harmless_and_ignored_xids_are_counted_and_nothing_else() {
    let node = Node::new("h100x1");
    let plugin = node.start_with(node.config(&["--ignored-xids", "109"]));
    plugin.wait_ready().await;
    let gpu = node.uuid(0);
    for xid in [31, 63, 109] {
        node.xid(&gpu, xid, None);
    }
    wait("the counts", || {
        let metrics = plugin.metrics.encode();
        let counted = |xid, class| {
            metrics.contains(&format!(
                "divvy_gpu_xids_total{{UUID=\"{gpu}\",xid=\"{xid}\",class=\"{class}\"}} 1"
            ))
        };
        (counted(31, "application") && counted(63, "information") && counted(109, "reset"))
            .then_some(())
    })
    .await;
    assert_eq!(node.published(), plain(&["gpu-0"]));
    assert_eq!(node.api.list::<Event>().len(), 0);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_was_sick_before_the_plugin_began_is_never_published_as_well() {
    let node = Node::new("h100x2");
    node.sim.edit(|e| {
        for (index, remap) in [(0, (true, false)), (1, (false, true))] {
            let (pending, failed) = remap;
            e.gpu_at(index).unwrap().vitals.remap = Some(RowRemap { pending, failed });
        }
    });
    let plugin = node.start().await;
    node.wait_tainted(&[
        ("gpu-0", &["gpu.divvy.dev/row-remap=pending:NoSchedule"]),
        ("gpu-1", &["gpu.divvy.dev/row-remap=failed:NoSchedule"]),
    ])
    .await;
    assert_eq!(
        (
            node.api.count("create", "resourceslices"),
            node.api.count("update", "resourceslices")
        ),
        (1, 0)
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_events_the_polls_still_find_out_and_it_is_said() {
    let node = Node::new("h100x1");
    node.sim
        .fault(Fault::fail(GpuErrorCode::NOT_SUPPORTED).of(GpuOp::Events));
    let plugin = node.start().await;
    wait("the gauge", || {
        plugin
            .metrics
            .encode()
            .contains("divvy_gpus_unmonitored 1")
            .then_some(())
    })
    .await;
    node.recovery(&node.uuid(0), RecoveryAction::Reboot);
    node.wait_tainted(&[("gpu-0", &["gpu.divvy.dev/recovery=reboot:NoSchedule"])])
        .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_hangs_in_every_poll_keeps_no_other_back() {
    let node = Node::new("h100x2");
    let hang = node
        .sim
        .fault(Fault::hang().of(GpuOp::Vitals).on(&node.uuid(0)));
    let plugin = node.start().await;
    assert_eq!(node.published(), plain(&["gpu-1", "gpu-0"]));
    node.sim.release(hang);
    node.recovery(&node.uuid(1), RecoveryAction::Reset);
    node.wait_tainted(&[
        ("gpu-0", &[]),
        ("gpu-1", &["gpu.divvy.dev/recovery=reset:NoSchedule"]),
    ])
    .await;
    plugin.stop().await;
}

/// A card that replaces a lost one in its slot is another GPU and the old one stays while it is
/// held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_card_in_a_lost_ones_slot_is_another_and_the_old_one_stays() {
    let node = Node::new("h100x2");
    let mut config = node.config(&[]);
    config.health.lost_for_good = Duration::from_millis(300);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let old = node.uuid(0);
    node.sim.lose_gpu(&old);
    node.wait_tainted(&[
        ("gpu-0", &["gpu.divvy.dev/lost=:NoSchedule"]),
        ("gpu-1", &[]),
    ])
    .await;
    wait("the Events", || {
        (node.events("GpuLost").len() == 3).then_some(())
    })
    .await;

    let slot = node.sim.remove_gpu(&old).unwrap().facts.pci_address;
    let new = node.sim.add_gpu(profile("h100").unwrap()).unwrap();
    assert_eq!(
        node.sim
            .engine()
            .gpus()
            .iter()
            .find(|g| g.facts.uuid == new)
            .unwrap()
            .facts
            .pci_address,
        slot
    );
    node.wait_tainted(&[
        ("gpu-0", &["gpu.divvy.dev/lost=:NoSchedule"]),
        ("gpu-1", &[]),
        ("gpu-2", &[]),
    ])
    .await;
    let next = node.claim("next", &["gpu-2"]);
    assert!(node.prepare(&next).await.is_ok());

    node.unprepare(&claim).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "c").unwrap();
    node.wait_tainted(&[("gpu-1", &[]), ("gpu-2", &[])]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_leave_a_sick_gpu_where_a_policy_says_so_also_one_that_is_lost() {
    let node = Node::new("h100x2");
    let rule =
        json!({ "gpus": { "ordinals": [0] }, "modes": ["Whole"], "health": { "evict": true } });
    node.api
        .put(&GpuPolicy::new("evict", json!({ "rules": [rule] })))
        .unwrap();
    let plugin = node.start().await;
    for index in [0, 1] {
        node.recovery(&node.uuid(index), RecoveryAction::Reset);
    }
    node.wait_tainted(&[
        ("gpu-0", &["gpu.divvy.dev/recovery=reset:NoExecute"]),
        ("gpu-1", &["gpu.divvy.dev/recovery=reset:NoSchedule"]),
    ])
    .await;
    node.sim.lose_gpu(&node.uuid(0));
    node.wait_tainted(&[
        (
            "gpu-0",
            &[
                "gpu.divvy.dev/lost=:NoExecute",
                "gpu.divvy.dev/recovery=reset:NoExecute",
            ],
        ),
        ("gpu-1", &["gpu.divvy.dev/recovery=reset:NoSchedule"]),
    ])
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fault_from_before_a_restart_is_published_without_a_poll() {
    let node = Node::new("h100x2");
    let (sick, slow) = (node.uuid(0), node.uuid(1));
    // As with a driver that does not report it: after a restart it is known from the file only.
    node.sim.edit(|e| e.set_recovery(&sick, None)).unwrap();
    let plugin = node.start().await;
    node.xid(&sick, 79, None);
    let tainted: [(&str, &[&str]); 2] = [
        ("gpu-0", &["gpu.divvy.dev/xid=79:NoSchedule"]),
        ("gpu-1", &[]),
    ];
    node.wait_tainted(&tainted).await;
    plugin.stop().await;
    for slice in node.api.list::<ResourceSlice>() {
        node.api
            .delete::<ResourceSlice>("", &slice.metadata.name.unwrap())
            .unwrap();
    }
    let hang = node.sim.fault(Fault::hang().of(GpuOp::Vitals).on(&slow));
    let plugin = node.start().await;
    node.wait_tainted(&tainted).await;
    node.sim.release(hang);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_hangs_in_a_poll_delays_no_event_of_another() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let hang = node
        .sim
        .fault(Fault::hang().of(GpuOp::Vitals).on(&node.uuid(0)));
    wait("the hanging poll", || {
        node.sim.wait_until_hanging(1, Duration::ZERO).then_some(())
    })
    .await;
    node.xid(&node.uuid(1), 119, None);
    node.wait_tainted(&[
        ("gpu-0", &[]),
        ("gpu-1", &["gpu.divvy.dev/xid=119:NoSchedule"]),
    ])
    .await;
    node.sim.release(hang);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_is_gone_is_not_said_to_have_recovered() {
    let node = Node::new("h100x2");
    let mut config = node.config(&[]);
    config.health.lost_for_good = Duration::from_millis(300);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let old = node.uuid(0);
    node.sim.lose_gpu(&old);
    wait("the Event", || {
        (node.events("GpuLost").len() == 1).then_some(())
    })
    .await;
    node.sim.remove_gpu(&old).unwrap();
    wait("its end", || {
        (node.events("GpuRemoved").len() == 1).then_some(())
    })
    .await;
    assert_eq!(node.events("GpuRecovered"), []);
    plugin.stop().await;
}

/// The fabric manager is down: pods would start, and fail in CUDA.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_whose_fabric_is_not_ready_is_tainted_until_it_is() {
    let node = Node::new("h100x2");
    let gpu = node.sim.uuids().remove(0);
    let set = |fabric| {
        let set = node.sim.edit(|e| e.set_fabric(&gpu, Some(fabric)));
        set.unwrap();
    };
    set(FabricState {
        state: FabricState::IN_PROGRESS,
        status: 0,
        health: 0,
    });
    let plugin = node.start().await;
    node.wait_tainted(&[
        ("gpu-0", &["gpu.divvy.dev/fabric=in-progress:NoSchedule"]),
        ("gpu-1", &[]),
    ])
    .await;
    set(FabricState::READY);
    node.wait_tainted(&[("gpu-0", &[]), ("gpu-1", &[])]).await;
    plugin.stop().await;
}

/// A restart of the fabric manager under running pods keeps new ones away, and evicts none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fabric_that_may_soon_be_ready_does_not_evict_pods() {
    let node = Node::new("h100x1");
    let rule = json!({ "modes": ["Whole"], "health": { "evict": true } });
    node.api
        .put(&GpuPolicy::new("evict", json!({ "rules": [rule] })))
        .unwrap();
    let fabric = FabricState {
        state: FabricState::IN_PROGRESS,
        status: 0,
        health: 0,
    };
    let gpu = node.uuid(0);
    let set = node.sim.edit(|e| e.set_fabric(&gpu, Some(fabric)));
    set.unwrap();
    for (evict_after, taint) in [
        (PATIENCE, "gpu.divvy.dev/fabric=in-progress:NoSchedule"),
        (
            Duration::from_millis(100),
            "gpu.divvy.dev/fabric=in-progress:NoExecute",
        ),
    ] {
        let mut config = node.config(&[]);
        config.health.evict_after = evict_after;
        let plugin = node.start_with(config);
        plugin.wait_ready().await;
        node.wait_tainted(&[("gpu-0", &[taint])]).await;
        plugin.stop().await;
    }
}

/// A GPU that is taken out under a claim is reported everywhere and its pods may leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_taken_out_under_a_claim_is_reported_and_its_pods_may_leave() {
    let node = Node::new("h100x2");
    let rule = json!({ "modes": ["Whole"], "health": { "evict": true } });
    node.api
        .put(&GpuPolicy::new("evict", json!({ "rules": [rule] })))
        .unwrap();
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let mut watch = node
        .kubelet
        .watch_health(DRIVER, "v1.DRAResourceHealth")
        .await
        .unwrap();
    reported(&mut watch, &[("gpu-0", None)]).await;
    let gone = node.uuid(0);
    node.sim.remove_gpu(&gone).unwrap();
    let message = "the device is gone: the driver no longer lists its GPU (delete the pod)";
    reported(&mut watch, &[("gpu-0", Some(message))]).await;
    node.wait_tainted(&[
        ("gpu-0", &["gpu.divvy.dev/lost=:NoExecute"]),
        ("gpu-1", &[]),
    ])
    .await;
    let events = wait("the Events", || {
        Some(node.events("GpuRemoved")).filter(|all| all.len() == 3)
    })
    .await;
    let kinds: Vec<&str> = events.iter().map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!(kinds, ["Node", "Pod", "ResourceClaim"]);
    node.wait_trouble("gpu-0 gpu-removed+held-and-gone").await;

    // Released: the node misses the GPU, also when its number is free again.
    let missing = format!("{gone} gpu-removed");
    node.unprepare(&claim).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "c").unwrap();
    node.wait_trouble("gpu-0 gpu-removed").await;
    node.wait_trouble(&missing).await;
    plugin.stop().await;
}

/// A node without one of its GPUs is trouble for as long as it takes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_gpu_is_trouble_until_it_is_back_replaced_or_given_up() {
    let node = Node::new("h100x3");
    let plugin = node.start().await;
    node.wait_trouble("").await;
    let gpus = node.sim.uuids();
    let missing = |gpu: &GpuUuid| format!("{gpu} gpu-removed");
    let board = node.sim.remove_gpu(&gpus[1]).unwrap();
    node.wait_trouble(&missing(&gpus[1])).await;
    // A later process knows it as well, also after a reboot.
    plugin.stop().await;
    fs_err::write(
        node.host_file("proc/sys/kernel/random/boot_id"),
        "11111111-2222-4333-8444-555555555555\n",
    )
    .unwrap();
    let plugin = node.start().await;
    let stays = format!("divvy_gpu_healthy{{UUID=\"{}\",device=\"\"}} 0", gpus[1]);
    wait("its metric", || {
        plugin.metrics.encode().contains(&stays).then_some(())
    })
    .await;
    node.wait_trouble(&missing(&gpus[1])).await;
    node.sim.edit(|e| e.insert_gpu(board));
    node.wait_trouble("").await;

    // Another one in its place.
    let board = node.sim.remove_gpu(&gpus[1]).unwrap();
    node.wait_trouble(&missing(&gpus[1])).await;
    let mut other = board;
    other.facts.uuid = "GPU-99999999-1234-1234-1234-123456780001".parse().unwrap();
    let new = other.facts.uuid.clone();
    node.sim.edit(|e| e.insert_gpu(other));
    node.wait_trouble("").await;

    // Taken out for good: an administrator says so.
    node.sim.remove_gpu(&new).unwrap();
    node.wait_trouble(&missing(&new)).await;
    node.api.delete::<GpuNode>("", "n1").unwrap();
    node.wait_trouble("").await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_gpu_that_is_taken_out_is_reported() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    node.wait_trouble("").await;
    node.sim.remove_gpu(&node.uuid(1)).unwrap();
    wait("the Event", || {
        (node.events("GpuRemoved").len() == 1).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_gone_under_a_claim_is_reported_and_not_built_over() {
    let node = Node::new("h100x1");
    let gpu = node.uuid(0);
    let rule = json!({ "modes": ["Mig"], "health": { "evict": true } });
    node.api
        .put(&GpuPolicy::new("evict", json!({ "rules": [rule] })))
        .unwrap();
    let plugin = node.start().await;
    let (left, right) = ("gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-5");
    let claims = [node.claim("left", &[left]), node.claim("right", &[right])];
    for claim in &claims {
        node.prepare(claim).await.unwrap();
    }
    let mut watch = node
        .kubelet
        .watch_health(DRIVER, "v1.DRAResourceHealth")
        .await
        .unwrap();
    reported(&mut watch, &[(left, None), (right, None)]).await;
    let living = node.sim.engine().gpus()[0].instances.clone();
    let at_five = living
        .iter()
        .find(|i| i.instance.placement.start == 5)
        .unwrap()
        .instance
        .id;
    node.sim.edit(|e| {
        let compute = e.compute_instances(&gpu, at_five).unwrap();
        for instance in compute {
            e.destroy_compute_instance(&gpu, at_five, instance.id)
                .unwrap();
        }
        e.destroy_gpu_instance(&gpu, at_five).unwrap();
    });
    let message = "the device is gone: its MIG instance is gone (the GPU was reset, the driver loaded again, or the instance destroyed) (delete the pod)";
    reported(&mut watch, &[(left, None), (right, Some(message))]).await;
    let taints = wait("the taints", || {
        let taints = node.taints();
        let all = taints.iter().filter(|(name, _)| !name.ends_with("-admin"));
        all.clone()
            .all(|(_, taints)| {
                taints.contains(&"gpu.divvy.dev/lost=partition-gone:NoSchedule".to_owned())
            })
            .then_some(taints)
    })
    .await;
    let evicted = "gpu.divvy.dev/lost=:NoExecute".to_owned();
    assert!(taints[right].contains(&evicted) && !taints[left].contains(&evicted));
    let events = wait("the Events", || {
        Some(node.events("PartitionGone")).filter(|all| all.len() == 3)
    })
    .await;
    assert_eq!(events[2].1, "right");
    node.wait_trouble("gpu-0 held-and-gone").await;
    // A container that starts again must not get the device nodes of another instance.
    let file = |claim: &ClaimRef| {
        let names = fs_err::read_dir(node.cdi_dir()).unwrap();
        let mut names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.any(|name| !name.starts_with('.') && name.contains(&claim.uid))
    };
    wait("the end of its CDI file", || {
        (!file(&claims[1])).then_some(())
    })
    .await;
    assert!(file(&claims[0]));
    fs_err::remove_dir_all(node.cdi_dir()).unwrap();
    fs_err::create_dir(node.cdi_dir()).unwrap();
    wait("the CDI file of its neighbour", || {
        file(&claims[0]).then_some(())
    })
    .await;
    assert!(!file(&claims[1]));
    let refused = node.prepare(&claims[1]).await.unwrap_err();
    assert!(
        refused.contains("delete all pods of the claim"),
        "{refused}"
    );
    // While records cannot be read it is not known what claims have, so nothing has come back.
    let unreadable = plugin.config.plugin_dir.join("claims/uid-x.json");
    fs_err::create_dir(&unreadable).unwrap();
    let polls = node.sim.calls(GpuOp::Vitals) + 4;
    wait("some polls", || {
        (node.sim.calls(GpuOp::Vitals) > polls).then_some(())
    })
    .await;
    assert!(
        node.taints()[left].contains(&"gpu.divvy.dev/lost=partition-gone:NoSchedule".to_owned())
    );
    fs_err::remove_dir(&unreadable).unwrap();

    node.unprepare(&claims[1]).await.unwrap();
    reported(&mut watch, &[(left, None)]).await;
    node.wait_trouble("").await;
    node.prepare(&claims[1]).await.unwrap();
    assert!(file(&claims[1]));
    plugin.stop().await;
}
