//! A node with a plugin on it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use divvy_executor::MpsServers;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_node, mk_result, reserved};
use divvy_fake_cluster::{ClaimRef, FakeApi, FakeKubelet, KubeletConfig};
use divvy_gpu_sim::SimNode;
use divvy_host::fixture::{Fixture, FixtureGpu, FixtureHost};
use divvy_kubelet_plugin::{Args, Config, Deps, run};
use divvy_model::GpuDriver;
use divvy_proto::dra::v1::Device;
use divvy_telemetry::{MetricsRegistry, Readiness};
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, OpaqueDeviceConfiguration, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde_json::Value;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const DRIVER: &str = "gpu.divvy.dev";
pub(crate) const POOL: &str = "n1/divvy";
/// Longer than anything here may take, also on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A running plugin.
pub(crate) struct Plugin {
    stop: CancellationToken,
    task: JoinHandle<anyhow::Result<()>>,
    pub(crate) metrics: MetricsRegistry,
    pub(crate) readiness: Readiness,
    pub(crate) config: Config,
}

impl Plugin {
    /// Stops the plugin as SIGTERM does.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// Ends it as near to SIGKILL as one process allows: sockets stay behind, nothing is finished.
    pub(crate) async fn kill(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }

    pub(crate) async fn wait_ready(&self) {
        wait("readiness", || {
            self.readiness.missing().is_empty().then_some(())
        })
        .await;
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Returns the error with which the run ends by itself.
    pub(crate) async fn ended(self) -> String {
        let error = tokio::time::timeout(PATIENCE, self.task)
            .await
            .unwrap()
            .unwrap()
            .unwrap_err();
        divvy_telemetry::Chain(error.as_ref()).to_string()
    }
}

/// The machine, the cluster it is in, and its kubelet.
pub(crate) struct Node {
    pub(crate) api: FakeApi,
    pub(crate) kubelet: FakeKubelet,
    pub(crate) sim: SimNode,
    pub(crate) host: FixtureHost,
    /// Description that the host was made from.
    pub(crate) fixture: Fixture,
    pub(crate) dir: TempDir,
}

/// A test that fails while a call hangs must end, too: the runtime waits for its thread.
impl Drop for Node {
    fn drop(&mut self) {
        self.sim.clear_faults();
    }
}

impl Node {
    /// A node with GPUs such as `h100x2`, and nothing running yet.
    pub(crate) fn new(gpus: &str) -> Self {
        Self::with(gpus, |config| config)
    }

    pub(crate) fn with(gpus: &str, change: impl FnOnce(KubeletConfig) -> KubeletConfig) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let sim = SimNode::parse(gpus).unwrap();
        let inventory = sim.inventory();
        let fixture = inventory.gpus.values().map(|gpu| FixtureGpu {
            minor: gpu.facts.minor.unwrap(),
            pci: gpu.facts.pci_address,
            numa_node: gpu.topology.numa_node,
            pcie_root: gpu
                .topology
                .pcie_root
                .clone()
                .unwrap_or_else(|| "pci0000:00".into()),
        });
        let fixture = Fixture::new(fixture.collect());
        let host = fixture.build(&dir.path().join("host")).unwrap();
        fs_err::create_dir_all(dir.path().join("run/cdi")).unwrap();
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        let config = change(KubeletConfig::new(dir.path().join("k"), "n1", api.clone()));
        let kubelet = FakeKubelet::start(config).unwrap();
        Self {
            api,
            kubelet,
            sim,
            host,
            fixture,
            dir,
        }
    }

    /// A plugin's configuration for this node.
    pub(crate) fn config(&self, more: &[&str]) -> Config {
        let kubelet = self.kubelet.config();
        let flags: [(&str, PathBuf); 10] = [
            ("--node-name", "n1".into()),
            ("--plugin-dir", kubelet.plugin_dir(DRIVER)),
            ("--run-dir", self.dir.path().join("host/run/divvy")),
            ("--registry-dir", kubelet.registry_dir()),
            ("--pod-resources-socket", kubelet.pod_resources_socket()),
            ("--cdi-dir", self.cdi_dir()),
            ("--driver-root", self.dir.path().join("host")),
            ("--host-driver-root", "/".into()),
            ("--host-root", self.dir.path().join("host")),
            ("--device-nodes", self.host.node_table.clone()),
        ];
        let mut args = vec!["plugin".to_owned()];
        for (flag, value) in [("--http", ""), ("--library-delivery", "mounts")] {
            if !more.contains(&flag) {
                args.extend([flag.to_owned(), value.to_owned()]);
            }
        }
        args.extend(
            flags
                .into_iter()
                .flat_map(|(flag, value)| [flag.to_owned(), value.display().to_string()]),
        );
        args.extend(more.iter().map(|flag| (*flag).to_owned()));
        let mut config = Config::try_from(Args::try_parse_from(args).unwrap()).unwrap();
        let timing = &mut config.timing;
        timing.list = Duration::from_millis(50);
        timing.usage = Duration::from_millis(100);
        timing.usage_lists = Duration::from_millis(100);
        timing.refresh = Duration::from_millis(500);
        timing.driver_retry = Duration::from_millis(100);
        timing.health = Duration::from_millis(100);
        timing.health_busy = Duration::from_millis(50);
        timing.reconcile_busy = Duration::from_millis(50);
        timing.withdrawn = Duration::from_millis(200);
        timing.leave = Duration::from_millis(200);
        timing.gpu_node = Duration::from_millis(100);
        timing.gpu_node_look = Duration::from_millis(100);
        timing.policy_retry = Duration::from_millis(100);
        timing.cdi_settle = Duration::from_millis(20);
        timing.publisher_poll = Duration::from_millis(100);
        timing.call = Duration::from_secs(10);
        timing.executor.hand_over = Duration::from_secs(2);
        timing.executor.process_wait = Duration::from_millis(200);
        config.health.recover_after = Duration::from_millis(200);
        config
    }

    /// The same for a plugin that looks at nothing by the clock: a test waits for what an event
    /// brings about.
    pub(crate) fn seldom(&self) -> Config {
        let mut config = self.config(&[]);
        for period in [
            &mut config.timing.refresh,
            &mut config.timing.reconcile,
            &mut config.timing.cdi_check,
        ] {
            *period = Duration::from_hours(1);
        }
        config
    }

    pub(crate) fn metadata_dir(&self) -> PathBuf {
        self.dir
            .path()
            .join("host/run/divvy")
            .join(DRIVER)
            .join("metadata")
    }

    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.dir.path().join("run/cdi")
    }

    pub(crate) fn start_with(&self, config: Config) -> Plugin {
        self.start_on(config, Arc::new(self.sim.clone()))
    }

    pub(crate) fn start_on(&self, config: Config, gpus: Arc<dyn GpuDriver>) -> Plugin {
        self.start_by(config, gpus, None)
    }

    /// A plugin whose MPS servers are these.
    pub(crate) fn start_by(
        &self,
        config: Config,
        gpus: Arc<dyn GpuDriver>,
        mps: Option<Arc<dyn MpsServers>>,
    ) -> Plugin {
        let deps = Deps {
            mps,
            client: self.api.client(),
            kube: None,
            gpus,
            metrics: MetricsRegistry::new(),
            readiness: Readiness::new(),
        };
        let (metrics, readiness) = (deps.metrics.clone(), deps.readiness.clone());
        let stop = CancellationToken::new();
        let task = tokio::spawn(run(config.clone(), deps, stop.clone()));
        Plugin {
            stop,
            task,
            metrics,
            readiness,
            config,
        }
    }

    /// A plugin that is registered and ready.
    pub(crate) async fn start(&self) -> Plugin {
        let plugin = self.start_with(self.config(&[]));
        plugin.wait_ready().await;
        plugin
    }

    /// The same with so much time for a call that waits for something that a busy machine gets
    /// there.
    pub(crate) async fn start_patient(&self, more: &[&str]) -> Plugin {
        let mut config = self.config(more);
        config.timing.call = PATIENCE;
        config.timing.executor.hand_over = PATIENCE;
        let plugin = self.start_with(config);
        plugin.wait_ready().await;
        plugin
    }

    /// Waits until a plugin has made the API calls of its start: the publisher, the brain, the
    /// watch for neighbours and the numbering of the GPUs of a fresh node have each listed slices,
    /// and the GpuNode has been written.
    pub(crate) async fn wait_calm(&self) {
        let calm = || {
            self.api.count("list", "resourceslices") >= 4
                && self.api.count("patch", "gpunodes/status") > 0
        };
        wait("the first lists and the node's report", || {
            calm().then_some(())
        })
        .await;
    }

    /// A claim in the API with these devices of ours allocated.
    pub(crate) fn claim(&self, name: &str, devices: &[&str]) -> ClaimRef {
        let results = devices
            .iter()
            .map(|device| mk_result("gpu", DRIVER, POOL, device))
            .collect();
        let count = i64::try_from(devices.len().max(1)).unwrap();
        self.put(allocated(mk_claim("default", name, DRIVER, count), results))
    }

    pub(crate) fn put(&self, claim: ResourceClaim) -> ClaimRef {
        let name = claim.metadata.name.clone().unwrap();
        let stored = self
            .api
            .put(&reserved(
                claim,
                "pod",
                "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab",
            ))
            .unwrap();
        ClaimRef::new("default", &name, &stored.metadata.uid.unwrap())
    }

    /// Calls prepare for one claim, as the kubelet does.
    pub(crate) async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<Device>, String> {
        self.kubelet
            .prepare(DRIVER, std::slice::from_ref(claim))
            .await
            .unwrap()
            .remove(&claim.uid)
            .unwrap()
    }

    pub(crate) async fn unprepare(&self, claim: &ClaimRef) -> Result<(), String> {
        self.kubelet
            .unprepare(DRIVER, std::slice::from_ref(claim))
            .await
            .unwrap()
            .remove(&claim.uid)
            .unwrap()
    }

    /// The CDI files, read as JSON.
    pub(crate) fn cdi_files(&self) -> BTreeMap<String, Value> {
        let Ok(entries) = fs_err::read_dir(self.cdi_dir()) else {
            return BTreeMap::new();
        };
        // Others are being written.
        let entries = entries
            .map(Result::unwrap)
            .filter(|e| e.path().extension().is_some_and(|e| e == "json"));
        entries
            .map(|entry| {
                let text = fs_err::read_to_string(entry.path()).unwrap();
                (
                    entry.file_name().into_string().unwrap(),
                    serde_json::from_str(&text).unwrap(),
                )
            })
            .collect()
    }

    /// Names of the records.
    pub(crate) fn records(&self) -> Vec<String> {
        self.names_in("claims")
    }

    /// Returns the names of the files in a folder of the plugin, sorted. A plugin that was killed
    /// while it wrote one has left a temporary file, which begins with a dot and stays for minutes.
    pub(crate) fn names_in(&self, folder: &str) -> Vec<String> {
        let dir = self.kubelet.config().plugin_dir(DRIVER).join(folder);
        let Ok(entries) = fs_err::read_dir(dir) else {
            return Vec::new();
        };
        let mut names: Vec<_> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        names
    }

    /// The records themselves, for messages.
    pub(crate) fn record_texts(&self) -> Vec<String> {
        let dir = self.kubelet.config().plugin_dir(DRIVER).join("claims");
        self.records()
            .iter()
            .filter_map(|name| fs_err::read_to_string(dir.join(name)).ok())
            .collect()
    }

    /// Names of published devices, in the scheduler's order, with the keys of their taints.
    pub(crate) fn published(&self) -> Vec<(String, Vec<String>)> {
        devices(self.api.list::<ResourceSlice>())
    }
}

/// The claim with a config for all its requests, of these fields.
pub(crate) fn with_config(mut claim: ResourceClaim, mut fields: Value) -> ResourceClaim {
    fields
        .as_object_mut()
        .unwrap()
        .insert("apiVersion".to_owned(), "divvy.dev/v1beta1".into());
    let entry = DeviceAllocationConfiguration {
        opaque: Some(OpaqueDeviceConfiguration {
            driver: DRIVER.to_owned(),
            parameters: RawExtension(fields),
        }),
        requests: None,
        source: "FromClaim".to_owned(),
    };
    let status = claim.status.as_mut().unwrap();
    status
        .allocation
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap()
        .config = Some(vec![entry]);
    claim
}

pub(crate) fn devices(mut slices: Vec<ResourceSlice>) -> Vec<(String, Vec<String>)> {
    slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let devices = slices
        .into_iter()
        .flat_map(|slice| slice.spec.devices.unwrap_or_default());
    devices
        .map(|device| {
            (
                device.name,
                device
                    .taints
                    .unwrap_or_default()
                    .into_iter()
                    .map(|t| t.key)
                    .collect(),
            )
        })
        .collect()
}

/// Devices without taints.
pub(crate) fn plain(names: &[&str]) -> Vec<(String, Vec<String>)> {
    names
        .iter()
        .map(|name| ((*name).to_owned(), Vec::new()))
        .collect()
}

/// The answer for one device.
pub(crate) fn device(claim: &ClaimRef, request: &str, name: &str) -> Device {
    Device {
        request_names: vec![request.to_owned()],
        pool_name: POOL.to_owned(),
        device_name: name.to_owned(),
        cdi_device_ids: vec![format!("{DRIVER}/claim={}-{name}", claim.uid)],
        share_id: None,
    }
}

/// Looks again and again until something is there.
pub(crate) async fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            tokio::time::Instant::now() < until,
            "waited in vain for {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
