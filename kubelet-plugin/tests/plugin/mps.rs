//! A claim whose pods share its GPU by MPS: what their containers find, and what they learn of a server that
//! has died.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_claims::ChangeError;
use divvy_executor::{MpsServers, RunningServer};
use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_model::{ComputeMode, GpuDriver, GpuUuid, MpsServer};
use k8s_openapi::api::events::v1::Event;
use serde_json::json;

use crate::node::{DRIVER, Node, POOL, wait, with_config};

/// Servers that are there once they are started.
#[derive(Default)]
struct Servers(Mutex<BTreeMap<GpuUuid, MpsServer>>);

impl Servers {
    fn all(&self) -> Vec<MpsServer> {
        self.0.lock().unwrap().values().copied().collect()
    }
}

impl MpsServers for Servers {
    fn running(&self, _: Duration) -> Result<BTreeMap<GpuUuid, RunningServer>, String> {
        let running = |(gpu, server): (&GpuUuid, &MpsServer)| {
            let (server, pids) = (*server, BTreeSet::new());
            (gpu.clone(), RunningServer { server, pids })
        };
        Ok(self.0.lock().unwrap().iter().map(running).collect())
    }

    fn start(&self, gpu: &GpuUuid, server: MpsServer, _: Duration) -> Result<(), ChangeError> {
        self.0.lock().unwrap().insert(gpu.clone(), server);
        Ok(())
    }

    fn stop(&self, gpu: &GpuUuid, _: Duration) -> Result<(), ChangeError> {
        self.0.lock().unwrap().remove(gpu);
        Ok(())
    }
}

/// Returns what the CDI files of a node say of MPS: variables, and mounts with their paths in containers.
fn edits(node: &Node) -> Vec<String> {
    let specs = node
        .cdi_files()
        .into_values()
        .map(serde_json::from_value::<divvy_cdi::Spec>);
    let devices = specs.flat_map(|spec| spec.unwrap().devices);
    let found = devices.flat_map(|device| {
        let edits = device.container_edits;
        let env = edits.env.into_iter().filter(|line| line.contains("MPS"));
        let mounts = edits.mounts.into_iter();
        let mounts = mounts.filter(|mount| !mount.container_path.contains("kubernetes"));
        env.chain(mounts.map(|mount| mount.container_path))
            .collect::<Vec<_>>()
    });
    found.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_has_a_server_and_an_event_says_when_it_began_again() {
    let mut node = Node::new("h100x1");
    node.fixture.mps = true;
    node.host = node.fixture.build(&node.dir.path().join("host")).unwrap();
    let dir = node.dir.path().join("mps").display().to_string();
    let mut config = node.config(&["--mps-dir", &dir]);
    config.timing.mps = Duration::from_millis(50);
    let servers = Arc::new(Servers::default());
    let sim = Arc::new(node.sim.clone());
    let plugin = node.start_by(config, sim.clone(), Some(servers.clone()));
    plugin.wait_ready().await;
    let claim = allocated(
        mk_claim("default", "served", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, POOL, "gpu-0")],
    );
    let limits = json!({"kind": "GpuConfig", "mps": {"limits": {"cores": 50, "memory": "10Gi"}}});
    let claim = node.put(with_config(claim, limits));
    node.prepare(&claim).await.unwrap();
    let server = MpsServer::of_claim(Some(50), Some(10 << 30));
    assert_eq!(servers.all(), [server]);
    assert_eq!(
        edits(&node),
        [
            "CUDA_MPS_PIPE_DIRECTORY=/run/divvy/mps",
            "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=10240M",
            "/run/divvy/mps",
            "/dev/shm",
        ]
    );
    // The pool says what it said.
    assert!(node.published().iter().all(|(name, _)| name != "gpu-0-mps"));

    servers.0.lock().unwrap().clear();
    let text = wait("an Event on the claim", || {
        let mut events = node.api.list::<Event>().into_iter();
        let about = |event: &Event| event.regarding.as_ref()?.name.clone();
        let found = events.find(|event| {
            event.reason.as_deref() == Some("MpsServerRestarted")
                && about(event).as_deref() == Some("served")
        });
        found?.note
    })
    .await;
    assert!(text.contains("had ended and was started again"), "{text}");
    assert_eq!(servers.all(), [server]);
    node.unprepare(&claim).await.unwrap();
    assert_eq!(servers.all(), []);
    let gpu = node.sim.inventory().gpus.keys().next().unwrap().clone();
    let mode = sim.facts(&gpu).unwrap().compute_mode;
    assert_eq!(mode, Some(ComputeMode::Default));
    plugin.stop().await;
}
