//! The NVIDIA driver is installed late, released, reloaded, upgraded, removed, and lost with a
//! reboot: under claims, and without intervention.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use divvy_fake_cluster::ClaimRef;
use divvy_gpu_sim::{Fault, SimNode};
use divvy_host::fixture::Fixture;
use divvy_kubelet_plugin::Config;
use divvy_model::{
    CudaVersion, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuProcess, GpuUuid, MigMode,
    SystemFacts,
};
use divvy_nvml::{Session, SessionConfig};
use k8s_openapi::api::core::v1::Node as NodeObject;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;

use crate::binary::{Process, library};
use crate::gpu_node::status;
use crate::node::{DRIVER, Node, PATIENCE, device, plain, wait};

impl Node {
    pub(crate) fn host_file(&self, path: &str) -> PathBuf {
        self.dir.path().join("host").join(path)
    }

    /// Takes the driver off the node: module, libraries and what the kernel says of it.
    fn remove_driver(&self) {
        self.sim.edit(|engine| engine.set_driver_loaded(false));
        for folder in [
            "usr",
            "run/nvidia",
            "sys/module/nvidia",
            "proc/driver/nvidia",
        ] {
            let _was_not_there = fs_err::remove_dir_all(self.host_file(folder));
        }
        fs_err::write(
            self.host_file("proc/devices"),
            "Character devices:\n  1 mem\n\nBlock devices:\n",
        )
        .unwrap();
    }

    /// Installs a driver and loads it.
    fn install_driver(&self, version: &str) {
        let fixture = Fixture {
            driver_version: version.to_owned(),
            ..self.fixture.clone()
        };
        fixture.build(&self.dir.path().join("host")).unwrap();
        self.sim.edit(|engine| {
            engine.set_driver_version(
                version,
                CudaVersion {
                    major: 13,
                    minor: 1,
                },
            );
            engine.set_driver_loaded(true);
        });
    }

    /// Switches the node off and on: another boot id, and a driver that is not loaded yet.
    fn reboot(&self, boot_id: &str) {
        self.sim.edit(|engine| {
            engine.reboot();
            engine.set_driver_loaded(false);
        });
        fs_err::write(
            self.host_file("proc/sys/kernel/random/boot_id"),
            format!("{boot_id}\n"),
        )
        .unwrap();
        // A runtime folder is empty after a boot.
        fs_err::remove_dir_all(self.cdi_dir()).unwrap();
        fs_err::create_dir_all(self.cdi_dir()).unwrap();
    }

    fn cdi_text(&self, claim: &ClaimRef) -> String {
        self.cdi_files()
            .remove(&format!("{DRIVER}-claim_{}.json", claim.uid))
            .unwrap_or_default()
            .to_string()
    }

    fn cordon(&self, on: bool) {
        let cordon = |node: &mut NodeObject| {
            node.spec.get_or_insert_default().unschedulable = Some(on);
        };
        self.api.modify::<NodeObject>("", "n1", cordon).unwrap();
    }

    fn node_events(&self) -> Vec<(String, String)> {
        let about_node = |e: &Event| {
            e.regarding
                .as_ref()
                .is_some_and(|r| r.kind.as_deref() == Some("Node"))
        };
        let events = self.api.list::<Event>().into_iter().filter(about_node);
        events
            .map(|e| (e.reason.unwrap_or_default(), e.note.unwrap_or_default()))
            .collect()
    }
}

fn down(names: &[&str]) -> Vec<(String, Vec<String>)> {
    names
        .iter()
        .map(|n| {
            (
                (*n).to_owned(),
                vec!["gpu.divvy.dev/driver-down".to_owned()],
            )
        })
        .collect()
}

fn driver_versions(node: &Node) -> Vec<String> {
    let devices = node
        .api
        .list::<ResourceSlice>()
        .into_iter()
        .flat_map(|s| s.spec.devices.unwrap_or_default());
    let version =
        |d: k8s_openapi::api::resource::v1::Device| d.attributes?.remove("driverVersion")?.version;
    devices.filter_map(version).collect()
}

/// A driver container that mounts its root after the plugin started is found by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_container_mounted_after_the_start_is_found() {
    let node = Node::new("h100x2");
    let root = "/run/nvidia/driver";
    node.remove_driver();
    // The container has made its folder and not filled it.
    fs_err::create_dir_all(node.host_file("run/nvidia/driver")).unwrap();
    let server = node.api.serve_http().await.unwrap();
    let found = [
        ("DRIVER_ROOT", ""),
        ("HOST_DRIVER_ROOT", ""),
        ("NVML_LIBRARY", ""),
        ("LOG_LEVEL", "off"),
    ];
    let mut process = Process::start_with(&node, &server.kubeconfig(), &found);
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    assert_eq!(node.published(), []);

    let fixture = Fixture {
        driver_root: root.into(),
        nvml: Some(library()),
        ..node.fixture.clone()
    };
    fixture.build(&node.dir.path().join("host")).unwrap();
    wait("slices", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    let claim = node.claim("c", &["gpu-1"]);
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-1")])
    );
    let text = node.cdi_text(&claim);
    assert!(
        text.contains(&format!(
            "\"{root}/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05\""
        )),
        "{text}"
    );
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    process.signal(rustix::process::Signal::TERM);
    assert!(process.end().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_that_stays_away_is_reported_once_by_an_event_on_the_node() {
    let node = Node::new("l4x1");
    let fault = node.sim.fault(Fault::fail(GpuErrorCode::LIBRARY_NOT_FOUND));
    let mut config = node.config(&[]);
    config.timing.driver_away = Duration::from_millis(200);
    let plugin = node.start_with(config);
    let reported = wait("the Event", || node.node_events().pop()).await;
    assert_eq!(reported.0, "NvidiaDriverDown");
    assert!(
        reported
            .1
            .contains("LIBRARY_NOT_FOUND (12) (check --driver-root"),
        "{}",
        reported.1
    );
    node.sim.edit(|engine| engine.clear_faults(Some(fault)));
    plugin.wait_ready().await;
    assert_eq!(node.node_events().len(), 1);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_control_nodes_keep_gpus_from_being_given_out() {
    let node = Node::new("l4x1");
    let table = fs_err::read_to_string(&node.host.node_table).unwrap();
    let without: Vec<_> = table.lines().filter(|line| !line.contains("uvm")).collect();
    fs_err::write(&node.host.node_table, without.join("\n")).unwrap();
    let devices = fs_err::read_to_string(node.host_file("proc/devices")).unwrap();
    fs_err::write(
        node.host_file("proc/devices"),
        devices.replace("511 nvidia-uvm\n", ""),
    )
    .unwrap();
    let plugin = node.start_with(node.config(&[]));
    wait("the taint", || {
        (node.published() == down(&["gpu-0"])).then_some(())
    })
    .await;
    let missing = wait("the reason", || {
        plugin
            .readiness
            .missing()
            .into_iter()
            .find(|m| m.starts_with("inventory: "))
            .filter(|m| m.contains("uvm"))
    })
    .await;
    assert!(
        missing.contains(
            "/dev/nvidia-uvm does not exist and its kernel module is not loaded (load nvidia-uvm on the node)"
        ),
        "{missing}"
    );
    // The module is loaded: nodes need not be there, their numbers are enough.
    fs_err::write(node.host_file("proc/devices"), devices).unwrap();
    wait("the end of the taint", || {
        (node.published() == plain(&["gpu-0"])).then_some(())
    })
    .await;
    plugin.wait_ready().await;
    plugin.stop().await;
}

/// A driver upgraded under live claims taints while it is away and their files follow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_upgrade_under_live_claims_taints_and_their_files_follow() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let (kept, gone) = (
        node.claim("kept", &["gpu-0"]),
        node.claim("gone", &["gpu-1"]),
    );
    for claim in [&kept, &gone] {
        node.prepare(claim).await.unwrap();
    }
    assert!(node.cdi_text(&kept).contains("libcuda.so.580.95.05"));
    let answer = node.prepare(&kept).await;

    node.remove_driver();
    wait("the taints", || {
        (node.published() == down(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    assert_eq!(node.unprepare(&gone).await, Ok(()), "served without NVML");
    assert_eq!(
        node.records(),
        [format!("{}.json", kept.uid)],
        "and nothing lingers"
    );

    node.install_driver("590.44.01");
    wait("the file to follow", || {
        node.cdi_text(&kept)
            .contains("libcuda.so.590.44.01")
            .then_some(())
    })
    .await;
    assert!(
        !node.cdi_text(&kept).contains("580.95.05"),
        "{}",
        node.cdi_text(&kept)
    );
    wait("the end of the taints", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    wait("the attribute", || {
        (driver_versions(&node) == ["590.44.1", "590.44.1"]).then_some(())
    })
    .await;
    assert_eq!(node.prepare(&kept).await, answer);
    assert_eq!(node.unprepare(&kept).await, Ok(()));
    plugin.stop().await;
}

/// A driver reloaded under a partition and removed before its unprepare leaves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_of_a_reloaded_and_removed_driver_leaves_nothing() {
    let node = Node::new("h100x1");
    let everything: Config = node.config(&["--offer", "everything"]);
    let plugin = node.start_with(everything);
    plugin.wait_ready().await;
    let name = "gpu-0-mig-1g10gb-19-2";
    let claim = node.claim("c", &[name]);
    let answer = node.prepare(&claim).await;
    assert_eq!(answer, Ok(vec![device(&claim, "gpu", name)]));
    let instances = || node.sim.engine().gpus()[0].instances.len();

    // On Hopper an unload takes MIG mode and instances with it.
    node.sim.edit(|engine| engine.set_driver_loaded(false));
    assert_eq!(instances(), 0);
    wait("the taints", || {
        node.published()
            .iter()
            .all(|(_, taints)| !taints.is_empty())
            .then_some(())
    })
    .await;
    node.sim.edit(|engine| engine.set_driver_loaded(true));
    wait("the end of the CDI file", || {
        (fs_err::read_dir(node.cdi_dir()).unwrap().count() == 0).then_some(())
    })
    .await;
    let refused = node.prepare(&claim).await.unwrap_err();
    assert!(
        refused.contains("its MIG instance is gone"),
        "its pod has the old device nodes: {refused}"
    );
    node.unprepare(&claim).await.unwrap();
    wait("the end of the taints", || {
        node.published()
            .iter()
            .all(|(_, t)| t.is_empty())
            .then_some(())
    })
    .await;
    assert_eq!(
        node.prepare(&claim).await,
        answer,
        "made again under the same name"
    );
    assert_eq!(instances(), 1);

    node.remove_driver();
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    node.install_driver("580.95.05");
    wait("the record's end", || {
        node.records().is_empty().then_some(())
    })
    .await;
    assert_eq!((node.cdi_files().len(), instances()), (0, 0));
    plugin.stop().await;
}

/// After a reboot pods end without a driver and those that stay get the same devices when it is
/// there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_pods_end_without_a_driver_and_others_keep_devices() {
    let node = Node::new("h100x2");
    let everything = || node.config(&["--offer", "everything"]);
    let plugin = node.start_with(everything());
    plugin.wait_ready().await;
    let (part, part_name) = (
        node.claim("part", &["gpu-0-mig-2g20gb-14-2"]),
        "gpu-0-mig-2g20gb-14-2",
    );
    let ended = node.claim("ended", &["gpu-1-mig-1g10gb-19-0"]);
    let answer = node.prepare(&part).await;
    assert_eq!(answer, Ok(vec![device(&part, "gpu", part_name)]));
    node.prepare(&ended).await.unwrap();
    let files = node.cdi_files();
    plugin.stop().await;
    node.reboot("11111111-2222-4333-8444-555555555555");

    let plugin = node.start_with(everything());
    // The kubelet knows this one, not the one that died.
    let waits_for = |part: &str| {
        plugin
            .readiness
            .missing()
            .iter()
            .any(|m| m.starts_with(part))
    };
    wait("the new plugin", || {
        (!waits_for("registered") && !waits_for("sockets")).then_some(())
    })
    .await;
    // Its pod waited for this over the reboot; what the hardware had is gone with the boot.
    assert_eq!(node.unprepare(&ended).await, Ok(()));
    assert_eq!(node.records(), [format!("{}.json", part.uid)]);
    assert_eq!(
        node.cdi_files().len(),
        0,
        "without the driver there is nothing to give"
    );

    node.sim.edit(|engine| engine.set_driver_loaded(true));
    let file = format!("{DRIVER}-claim_{}.json", part.uid);
    let names = |file: &serde_json::Value| file["devices"][0]["name"].clone();
    let restored = wait("the file", || node.cdi_files().remove(&file)).await;
    assert_eq!(
        names(&restored),
        names(&files[&file]),
        "the kubelet remembers the name"
    );
    let engine = node.sim.engine();
    assert_eq!(
        (
            engine.gpus()[0].instances.len(),
            engine.gpus()[1].instances.len()
        ),
        (1, 0)
    );
    assert_eq!(node.prepare(&part).await, answer);
    assert_eq!(node.unprepare(&part).await, Ok(()));
    assert_eq!(node.sim.engine().gpus()[0].instances.len(), 0);
    plugin.stop().await;
}

/// Its record is of the boot before, and the kubelet's calls for it are refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_reboot_a_claim_that_cannot_be_had_again_is_not_prepared() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    plugin.stop().await;
    node.reboot("11111111-2222-4333-8444-555555555555");
    node.sim.edit(|engine| engine.set_driver_loaded(true));
    node.sim.start_process(&node.sim.uuids()[0], 4711);

    let mut config = node.config(&[]);
    config.timing.neighbours = Duration::from_millis(50);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let refused = node.prepare(&claim).await.unwrap_err();
    assert!(refused.contains("4711"), "{refused}");
    let tainted = vec![(
        "gpu-0".to_owned(),
        vec!["gpu.divvy.dev/neighbour".to_owned()],
    )];
    wait("the taint", || (node.published() == tainted).then_some(())).await;
    let shown = &node;
    let phase_is = |phase: &'static str| {
        wait(phase, move || {
            status(shown).filter(|status| {
                let holders = status.gpus.iter().flat_map(|gpu| &gpu.holders);
                holders.map(|holder| &*holder.phase).eq([phase])
            })
        })
    };
    phase_is("preparing").await;
    assert_eq!(node.cdi_files().len(), 0);
    node.sim.end_process(4711);
    phase_is("prepared").await;
    node.prepare(&claim).await.unwrap();
    plugin.stop().await;
}

/// A simulated driver that counts how often it is open.
struct Counted {
    sim: SimNode,
    open: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl GpuDriver for Counted {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.sim.system()
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.sim.list()
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        self.sim.facts(gpu)
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.sim.mig_mode(gpu)
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.sim.processes(gpu)
    }
}

/// A node that is given to divvy is drained first, and open to pods when divvy is ready.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_cordoned_node_a_new_plugin_gets_ready_and_publishes() {
    let node = Node::new("l4x2");
    node.cordon(true);
    let plugin = node.start().await;
    wait("the taints", || {
        (node.published() == down(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    assert!(
        plugin.readiness.missing().is_empty(),
        "{:?}",
        plugin.readiness.missing()
    );
    node.cordon(false);
    wait("the end of the taints", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// GPUs that were never read have no numbers: a driver is read once before it is released, also
/// where the request is older than the plugin.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_from_before_the_start_waits_for_the_first_reading() {
    let node = Node::new("l4x2");
    let dir = node.kubelet.config().plugin_dir(DRIVER);
    let file = dir.join("release-driver");
    fs_err::create_dir_all(&dir).unwrap();
    fs_err::write(&file, "").unwrap();
    let plugin = node.start().await;
    wait("the taints", || {
        (node.published() == down(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    fs_err::remove_file(&file).unwrap();
    wait("the end of the taints", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// A driver that is exchanged between two looks lists the same GPUs: its module has another
/// version.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_driver_exchanged_between_two_looks_is_read_as_a_whole() {
    let node = Node::new("h100x2");
    let mut config = node.config(&[]);
    // A full reading by the clock is not what finds it.
    config.timing.refresh = Duration::from_hours(1);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    wait("a look at the module", || {
        (driver_versions(&node).len() == 2).then_some(())
    })
    .await;
    // Longer than it takes from one look to the next.
    tokio::time::sleep(Duration::from_millis(300)).await;
    // NVML first: the version of the module is what a look compares.
    let (version, cuda) = (
        "590.44.01",
        node.sim.system().unwrap().cuda_version.unwrap(),
    );
    node.sim
        .edit(|engine| engine.set_driver_version(version, cuda));
    node.install_driver(version);
    wait("the attribute", || {
        (driver_versions(&node) == ["590.44.1", "590.44.1"]).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// While a drain asks and no claim holds a GPU the driver is let go and can be unloaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_drain_asks_an_unheld_driver_is_let_go() {
    let node = Node::new("l4x2");
    let open = Arc::new(AtomicUsize::new(0));
    let (sim, opened) = (node.sim.clone(), open.clone());
    let session = Session::new(SessionConfig::default(), move || {
        let sim = sim.open()?;
        opened.fetch_add(1, Ordering::SeqCst);
        Ok(Counted {
            sim,
            open: opened.clone(),
        })
    });
    let is_open = || open.load(Ordering::SeqCst) > 0;
    let plugin = node.start_on(node.config(&[]), Arc::new(session));
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();

    node.cordon(true);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(
        is_open(),
        "containers have the GPU: letting go would win nothing"
    );
    assert_eq!(node.published(), plain(&["gpu-1", "gpu-0"]));
    // Drained.
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    wait("the driver to be let go", || (!is_open()).then_some(())).await;
    wait("the taints", || {
        (node.published() == down(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    let calls = node.sim.calls(divvy_model::GpuOp::List);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(
        (is_open(), node.sim.calls(divvy_model::GpuOp::List)),
        (false, calls),
        "and stays so"
    );
    assert!(
        plugin.readiness.missing().is_empty(),
        "or a rolling update would wait for the drain's end"
    );

    // The module is unloaded and loaded again meanwhile, which this test does not wait for.
    node.sim.edit(|engine| engine.set_driver_loaded(false));
    node.sim.edit(|engine| engine.set_driver_loaded(true));
    node.cordon(false);
    wait("the end of the taints", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    assert!(is_open());

    // The GPU Operator's way, and a file, for hosts without it.
    let label = |value: &str| {
        let value = value.to_owned();
        let label = |node: &mut NodeObject| {
            let labels = node.metadata.labels.get_or_insert_default();
            labels.insert("nvidia.com/gpu.deploy.dcgm".to_owned(), value);
        };
        node.api.modify::<NodeObject>("", "n1", label).unwrap();
    };
    label("paused-for-driver-upgrade");
    wait("the driver to be let go", || (!is_open()).then_some(())).await;
    label("true");
    wait("the driver", || is_open().then_some(())).await;
    let file = node
        .kubelet
        .config()
        .plugin_dir(DRIVER)
        .join("release-driver");
    fs_err::write(&file, "").unwrap();
    wait("the driver to be let go", || (!is_open()).then_some(())).await;
    // A claim that comes all the same is served, and the driver let go after it.
    let late = node.claim("late", &["gpu-1"]);
    assert_eq!(
        node.prepare(&late).await,
        Ok(vec![device(&late, "gpu", "gpu-1")])
    );
    assert_eq!(node.unprepare(&late).await, Ok(()));
    wait("the driver to be let go", || (!is_open()).then_some(())).await;
    fs_err::remove_file(&file).unwrap();
    wait("the end of the taints", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_polled_again_after_the_driver_was_released_during_a_poll() {
    let node = Node::new("l4x2");
    let plugin = node.start().await;
    let gpu = node.sim.uuids().remove(0);
    let hang = node
        .sim
        .fault(Fault::hang().of(divvy_model::GpuOp::Vitals).on(&gpu));
    wait("the hanging poll", || {
        node.sim.wait_until_hanging(1, Duration::ZERO).then_some(())
    })
    .await;
    node.cordon(true);
    wait("the release", || {
        (node.published() == down(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    node.sim.release(hang);
    node.cordon(false);
    wait("the return", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    let polls = || node.sim.calls(divvy_model::GpuOp::Vitals);
    // Those of the poll that was given up come, too.
    let before = polls();
    wait("more polls", || (polls() > before + 10).then_some(())).await;
    plugin.stop().await;
}
