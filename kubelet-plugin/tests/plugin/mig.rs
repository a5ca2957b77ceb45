//! MIG partitions: made when their claim is prepared, gone when it is let go.

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_fake_cluster::{ClaimRef, Fault as ApiFault};
use divvy_gpu_sim::Fault;
use divvy_kubelet_plugin::Config;
use divvy_model::{Gpu, GpuErrorCode, GpuOp, GpuUuid, MigMode};
use futures::future::join_all;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use crate::node::{DRIVER, Node, POOL, Plugin, device, wait};

mod offered;
mod others;

const ON: MigMode = MigMode::Supported {
    current: true,
    pending: true,
};

impl Node {
    /// GPU 0, 1, … as devices are named.
    fn gpu(&self, ordinal: usize) -> GpuUuid {
        self.sim.uuids().swap_remove(ordinal)
    }

    fn look_at(&self, ordinal: usize) -> Gpu {
        self.sim
            .inventory()
            .gpus
            .remove(&self.gpu(ordinal))
            .unwrap()
    }

    /// Returns true if MIG mode of a GPU is on.
    fn mig_is_on(&self, ordinal: usize) -> bool {
        self.look_at(ordinal).facts.mig_mode.is_on()
    }

    fn turn_mig_on(&self, ordinal: usize) {
        let gpu = self.gpu(ordinal);
        self.sim
            .edit(|engine| engine.gpu(&gpu).unwrap().facts.mig_mode = ON);
    }

    /// Returns the instances that live on a GPU: profile id, start and size, by start.
    fn instances(&self, ordinal: usize) -> Vec<(u32, u32, u32)> {
        let live = self.look_at(ordinal).mig.unwrap().instances.unwrap();
        let mut live: Vec<_> = live
            .iter()
            .map(|i| (i.profile.0, i.placement.start, i.placement.size))
            .collect();
        live.sort_by_key(|(_, start, _)| *start);
        live
    }

    fn everything(&self) -> Config {
        self.config(&["--offer", "everything"])
    }

    /// A plugin that offers everything, with partitions published.
    async fn start_with_everything(&self) -> Plugin {
        self.start_cutting(self.everything()).await
    }

    async fn start_cutting(&self, config: Config) -> Plugin {
        let plugin = self.start_with(config);
        plugin.wait_ready().await;
        wait("partitions", || {
            self.published()
                .iter()
                .any(|(name, _)| name.contains("-mig-"))
                .then_some(())
        })
        .await;
        plugin
    }

    fn nothing_is_left(&self) {
        assert_eq!((self.records(), self.cdi_files().len()), (vec![], 0));
        for ordinal in 0..self.sim.uuids().len() {
            assert_eq!(self.instances(ordinal), [], "gpu-{ordinal}");
        }
    }
}

/// The answer to a prepare that works.
#[expect(clippy::unnecessary_wraps, reason = "compared with answers")]
fn named(claim: &ClaimRef, name: &str) -> Result<Vec<divvy_proto::dra::v1::Device>, String> {
    Ok(vec![device(claim, "gpu", name)])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_is_made_at_its_exact_placement_and_the_claim_has_its_uuid() {
    let node = Node::new("h100x2");
    let plugin = node.start_with_everything().await;
    let claim = node.claim("c", &["gpu-1-mig-1g10gb-19-3"]);
    assert!(!node.mig_is_on(1));
    assert_eq!(
        node.prepare(&claim).await,
        named(&claim, "gpu-1-mig-1g10gb-19-3")
    );
    assert_eq!(
        (node.instances(0), node.instances(1)),
        (vec![], vec![(19, 3, 1)])
    );
    let live = node.sim.engine().gpus()[1].instances[0].clone();
    let (gi, uuid) = (live.instance.id.0, live.compute[0].uuid.to_string());

    let files = node.cdi_files();
    let edits =
        &files[&format!("{DRIVER}-claim_{}.json", claim.uid)]["devices"][0]["containerEdits"];
    let nodes: Vec<_> = edits["deviceNodes"].as_array().unwrap().iter().collect();
    let paths: Vec<_> = nodes
        .iter()
        .map(|n| n["path"].as_str().unwrap().to_owned())
        .collect();
    let minor = 3 + 135 + gi * 9;
    let cap = |minor: u32| format!("/dev/nvidia-caps/nvidia-cap{minor}");
    assert_eq!(
        paths,
        ["/dev/nvidia1".to_owned(), cap(minor), cap(minor + 1)]
    );
    assert_eq!(
        (&nodes[1]["major"], &nodes[1]["minor"]),
        (&json!(507), &json!(minor))
    );
    assert_eq!(
        edits["env"],
        json!([format!("DIVVY_MIG_UUID_GPU_1_MIG_1G10GB_19_3={uuid}")])
    );
    let reported = wait("the claim's status", || {
        let claim: ResourceClaim = node.api.get("default", "c")?;
        claim.status?.devices?.into_iter().next()?.data
    })
    .await;
    assert_eq!(reported.0, json!({ "uuid": uuid }));

    assert_eq!(
        node.prepare(&claim).await,
        named(&claim, "gpu-1-mig-1g10gb-19-3"),
        "again: the same"
    );
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    node.nothing_is_left();
    assert!(
        node.mig_is_on(1),
        "MIG mode goes off when something else needs it"
    );

    let whole = node.claim("whole", &["gpu-1"]);
    assert_eq!(node.prepare(&whole).await, named(&whole, "gpu-1"));
    assert!(!node.mig_is_on(1));
    plugin.stop().await;
}

/// Paths of the device nodes that a claim's only device has.
fn node_paths(node: &Node, claim: &ClaimRef) -> Vec<String> {
    let file = node
        .cdi_files()
        .remove(&format!("{DRIVER}-claim_{}.json", claim.uid))
        .unwrap();
    let nodes = file.pointer("/devices/0/containerEdits/deviceNodes");
    let nodes = nodes.and_then(serde_json::Value::as_array).into_iter();
    let path = |node: &serde_json::Value| Some(node.get("path")?.as_str()?.to_owned());
    nodes.flatten().filter_map(path).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_with_a_new_minor_after_mig_mode_has_the_new_nodes_at_once() {
    let node = Node::new("h100x1");
    let table = &node.host.node_table;
    let known = fs_err::read_to_string(table).unwrap();
    fs_err::write(table, format!("{known}/dev/nvidia5 195 5 666 0\n")).unwrap();
    let gpu = node.gpu(0);
    let next = |minor| {
        node.sim
            .edit(|engine| engine.gpu(&gpu).unwrap().next_minor = Some(minor));
    };
    next(5);
    let plugin = node.start_with_everything().await;

    let part = node.claim("part", &["gpu-0-mig-1g10gb-19-3"]);
    node.prepare(&part).await.unwrap();
    let gi = node.sim.engine().gpus()[0].instances[0].instance.id.0;
    let cap = 3 + 135 * 5 + gi * 9;
    assert_eq!(
        node_paths(&node, &part),
        [
            "/dev/nvidia5".to_owned(),
            format!("/dev/nvidia-caps/nvidia-cap{cap}"),
            format!("/dev/nvidia-caps/nvidia-cap{}", cap + 1)
        ]
    );
    assert_eq!(node.unprepare(&part).await, Ok(()));

    // And back, for a whole GPU.
    next(0);
    let whole = node.claim("whole", &["gpu-0"]);
    node.prepare(&whole).await.unwrap();
    assert_eq!(node_paths(&node, &whole)[0], "/dev/nvidia0");
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_plugin_writes_the_status_that_a_killed_one_did_not_write() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let claim = node.claim("c", &["gpu-0-mig-1g10gb-19-3"]);
    node.prepare(&claim).await.unwrap();
    let reported = || {
        node.api
            .get::<ResourceClaim>("default", "c")?
            .status?
            .devices?
            .into_iter()
            .next()?
            .data
    };
    let before = wait("the claim's status", reported).await;
    plugin.stop().await;
    let forget = |claim: &mut ResourceClaim| claim.status.as_mut().unwrap().devices = None;
    node.api.modify("default", "c", forget).unwrap();
    node.api
        .fail_next(1, "patch", "resourceclaims/status", ApiFault::Status(500));
    let plugin = node.start_with_everything().await;
    assert_eq!(wait("the claim's status again", reported).await, before);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_mix_that_fits_is_made_at_once_and_goes_again() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let mixes: [&[(&str, u32, u32, u32)]; 5] = [
        &[
            ("1g10gb", 19, 0, 1),
            ("1g10gb", 19, 1, 1),
            ("1g10gb", 19, 2, 1),
            ("1g10gb", 19, 3, 1),
            ("1g10gb", 19, 4, 1),
            ("1g10gb", 19, 5, 1),
            ("1g10gb", 19, 6, 1),
        ],
        &[
            ("1g10gb", 19, 0, 1),
            ("2g20gb", 14, 2, 2),
            ("3g40gb", 9, 4, 4),
        ],
        &[
            ("4g40gb", 5, 0, 4),
            ("2g20gb", 14, 4, 2),
            ("1g10gb", 19, 6, 1),
        ],
        &[("7g80gb", 0, 0, 8)],
        &[
            ("1g20gb", 15, 0, 2),
            ("1g20gb", 15, 2, 2),
            ("1g20gb", 15, 4, 2),
            ("1g20gb", 15, 6, 2),
        ],
    ];
    for (number, mix) in mixes.iter().enumerate() {
        let devices = mix
            .iter()
            .map(|(name, id, start, _)| format!("gpu-0-mig-{name}-{id}-{start}"));
        let claims: Vec<_> = devices
            .enumerate()
            .map(|(n, device)| (node.claim(&format!("c{number}-{n}"), &[&device]), device))
            .collect();
        let answers = join_all(claims.iter().map(|(claim, _)| node.prepare(claim))).await;
        for ((claim, device), answer) in claims.iter().zip(answers) {
            assert_eq!(answer, named(claim, device));
        }
        let expected: Vec<_> = mix
            .iter()
            .map(|(_, id, start, size)| (*id, *start, *size))
            .collect();
        assert_eq!(node.instances(0), expected);
        let references: Vec<_> = claims.into_iter().map(|(claim, _)| claim).collect();
        let answers = node.kubelet.unprepare(DRIVER, &references).await.unwrap();
        assert!(answers.values().all(Result::is_ok), "{answers:?}");
        node.nothing_is_left();
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_claim_with_two_partitions_gives_each_container_its_own() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let (train, serve) = ("gpu-0-mig-3g40gb-9-4", "gpu-0-mig-1g10gb-19-0");
    let results = vec![
        mk_result("train", DRIVER, POOL, train),
        mk_result("serve", DRIVER, POOL, serve),
    ];
    let claim = node.put(allocated(mk_claim("default", "both", DRIVER, 1), results));
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![
            device(&claim, "train", train),
            device(&claim, "serve", serve)
        ])
    );
    let files = node.cdi_files();
    let devices = files.values().next().unwrap()["devices"]
        .as_array()
        .unwrap()
        .clone();
    let caps = |n: usize| {
        let nodes = devices[n]["containerEdits"]["deviceNodes"]
            .as_array()
            .unwrap();
        nodes[1..]
            .iter()
            .map(|node| node["minor"].as_u64().unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!((devices.len(), caps(0).len(), caps(1).len()), (2, 2, 2));
    assert!(caps(0).iter().all(|minor| !caps(1).contains(minor)));
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    node.nothing_is_left();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_gpu_is_refused_while_a_partition_lives_and_served_after_it() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let small = node.claim("small", &["gpu-0-mig-1g10gb-19-6"]);
    node.prepare(&small).await.unwrap();
    let whole = node.claim("whole", &["gpu-0"]);
    let refused = node.prepare(&whole).await.unwrap_err();
    assert!(refused.contains("default/small"), "{refused}");
    let over = node.claim("over", &["gpu-0-mig-7g80gb-0-0"]);
    let refused = node.prepare(&over).await.unwrap_err();
    assert!(refused.contains("default/small"), "{refused}");
    assert_eq!(node.instances(0), [(19, 6, 1)]);

    assert_eq!(node.unprepare(&small).await, Ok(()));
    node.api.delete::<ResourceClaim>("default", "over").unwrap();
    assert_eq!(node.prepare(&whole).await, named(&whole, "gpu-0"));
    assert!(!node.mig_is_on(0));
    assert_eq!(node.unprepare(&whole).await, Ok(()));
    let again = node.claim("again", &["gpu-0-mig-7g80gb-0-0"]);
    assert_eq!(
        node.prepare(&again).await,
        named(&again, "gpu-0-mig-7g80gb-0-0")
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_outlive_the_plugin_and_the_next_one_lets_them_go() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let claims: Vec<_> = (0..3)
        .map(|n| node.claim(&format!("c{n}"), &[&format!("gpu-0-mig-1g10gb-19-{n}")]))
        .collect();
    for claim in &claims {
        node.prepare(claim).await.unwrap();
    }
    let before = node.sim.engine().gpus()[0].instances.clone();
    plugin.kill().await;
    let plugin = node.start_with_everything().await;
    assert_eq!(
        node.prepare(&claims[1]).await,
        named(&claims[1], "gpu-0-mig-1g10gb-19-1")
    );
    assert_eq!(
        node.sim.engine().gpus()[0].instances,
        before,
        "the same instances"
    );
    assert!(
        node.published().iter().all(|(_, taints)| taints.is_empty()),
        "none of them is foreign"
    );
    let answers = node.kubelet.unprepare(DRIVER, &claims).await.unwrap();
    assert!(answers.values().all(Result::is_ok), "{answers:?}");
    node.nothing_is_left();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_that_died_between_instance_and_record_leaves_nothing() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let hang = node
        .sim
        .fault(Fault::hang_after().of(GpuOp::CreateGpuInstance));
    let claim = node.claim("c", &["gpu-0-mig-2g20gb-14-2"]);
    let call = node.prepare(&claim);
    let die = async {
        let sim = node.sim.clone();
        let hangs = move || sim.wait_until_hanging(1, crate::node::PATIENCE);
        assert!(tokio::task::spawn_blocking(hangs).await.unwrap());
        assert_eq!(node.instances(0), [(14, 2, 2)]);
        plugin.kill().await;
    };
    tokio::select! { _ = call => {}, () = die => {} }
    node.sim.clear_faults();
    node.sim.release(hang);
    let plugin = node.start_with_everything().await;
    let answer = wait_prepared(&node, &claim).await;
    assert_eq!(answer, vec![device(&claim, "gpu", "gpu-0-mig-2g20gb-14-2")]);
    assert_eq!(node.instances(0), [(14, 2, 2)]);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    node.nothing_is_left();
    plugin.stop().await;
}

/// Prepares a claim as the kubelet does: again until it works.
async fn wait_prepared(node: &Node, claim: &ClaimRef) -> Vec<divvy_proto::dra::v1::Device> {
    let until = tokio::time::Instant::now() + crate::node::PATIENCE;
    loop {
        match node.prepare(claim).await {
            Ok(devices) => return devices,
            Err(error) => assert!(tokio::time::Instant::now() < until, "{error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_creation_is_reported_leaves_nothing_and_is_tried_again() {
    let node = Node::new("h100x1");
    let plugin = node.start_with_everything().await;
    let claim = node.claim("c", &["gpu-0-mig-1g10gb-19-0"]);
    node.sim
        .fault(Fault::fail(GpuErrorCode::NO_PERMISSION).of(GpuOp::CreateComputeInstance));
    let refused = node.prepare(&claim).await.unwrap_err();
    assert!(refused.contains("NO_PERMISSION"), "{refused}");
    assert_eq!(node.instances(0), [], "the GPU instance is not left alone");
    node.sim.clear_faults();
    assert_eq!(wait_prepared(&node, &claim).await.len(), 1);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    node.nothing_is_left();
    plugin.stop().await;
}
