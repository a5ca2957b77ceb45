//! The demo's node: simulated GPUs, an API server in this process, a host made of files, the real
//! plugin on its real socket, and a stand-in kubelet. Everything lives in one temporary folder and
//! goes with it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::{CommandFactory as _, FromArgMatches as _};
use divvy_api::names;
use divvy_api::policy::GpuPolicy;
use divvy_fake_cluster::{FakeApi, FakeKubelet, KubeletConfig, build};
use divvy_gpu_sim::SimNode;
use divvy_host::fixture::{Fixture, FixtureGpu};
use divvy_kubelet_plugin::{Args, Config, Deps};
use divvy_offer::{GpuRules, NodeFacts};
use divvy_telemetry::{MetricsRegistry, Readiness};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, DeviceClass, ResourceSlice};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use divvy_cli::offered::{Offered, offered};
use divvy_why::driver::NVIDIA;

/// Name of the demo's node.
pub(crate) const NODE: &str = "demo-node";
/// Its labels, beside its name: what the chart and the policies of the examples look for.
pub(crate) const LABELS: [(&str, &str); 2] =
    [(names::NODE_LABEL, "true"), ("divvy.dev/try", "true")];
/// Longest time of a step of the demo; one that takes longer counts as broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Folder of the MPS supervisor, in the demo's own.
const MPS: &str = "run/divvy/mps";
/// Name of the supervisor's socket in it.
const SUPERVISOR: &str = "supervisor.sock";

/// Returns the labels of the demo's node.
pub(crate) fn labels() -> BTreeMap<String, String> {
    let labels = LABELS.into_iter();
    labels
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect()
}

/// A running node.
pub(crate) struct World {
    pub(crate) api: FakeApi,
    pub(crate) kubelet: FakeKubelet,
    /// Time from the plugin's start to its first slices in the API.
    pub(crate) published_after: Duration,
    /// Parts of the policies that the node does not publish, with the reason.
    pub(crate) notes: Vec<String>,
    /// Policies that decide nothing about the node, each with a sentence that says so.
    pub(crate) idle: Vec<String>,
    /// Devices that had taints at the start.
    tainted: BTreeSet<String>,
    plugin: JoinHandle<Result<()>>,
    stop: CancellationToken,
    folder: TempDir,
    /// Name of the driver.
    pub(crate) driver: &'static str,
}

impl World {
    /// Starts the node and waits until its GPUs are published, with taints on those that are
    /// `troubled`, and the plugin is registered. The node has `labels` beside its own.
    pub(crate) async fn start(
        sim: &SimNode,
        troubled: &[usize],
        policies: &[GpuPolicy],
        driver: &'static str,
        labels: &[(String, String)],
    ) -> Result<Self> {
        let labels = self::labels()
            .into_iter()
            .chain(labels.iter().cloned())
            .collect();
        let facts = NodeFacts {
            name: NODE,
            labels: &labels,
        };
        let Offered {
            pool, notes, idle, ..
        } = offered(&sim.inventory(), &facts, policies, &GpuRules::default());
        let expected: BTreeSet<String> = pool
            .devices()
            .map(|device| device.name.to_string())
            .collect();
        let folder = tempfile::Builder::new()
            .prefix("divvy-demo-")
            .tempdir()
            .context("a temporary folder")?;
        let mut fixture = host_of(sim);
        fixture.mps = true;
        let host = fixture
            .build(&folder.path().join("host"))
            .context("the demo's host")?;
        let api = cluster(labels, policies, driver)?;
        let kubelet_config = KubeletConfig::new(folder.path().join("kubelet"), NODE, api.clone());
        let mut args = args(folder.path(), &kubelet_config, host.node_table, driver)?;
        args.mps_dir = Some(folder.path().join(MPS));
        let kubelet = FakeKubelet::start(kubelet_config).context("the demo's kubelet")?;
        let deps = Deps {
            mps: Some(Arc::new(divvy_executor::ListedServers::default())),
            client: api.client(),
            kube: None,
            gpus: Arc::new(sim.clone()),
            metrics: MetricsRegistry::new(),
            readiness: Readiness::new(),
        };
        let stop = CancellationToken::new();
        answer_for_supervisor(&folder.path().join(MPS), stop.clone())?;
        let started = Instant::now();
        let config = Config::try_from(args).context("the plugin's configuration")?;
        let mut plugin = tokio::spawn(divvy_kubelet_plugin::run(config, deps, stop.clone()));
        let ready = |slices: &[ResourceSlice]| {
            let tainted = tainted(slices);
            let found = |number: &usize| {
                let (whole, other) = (format!("gpu-{number}"), format!("gpu-{number}-"));
                tainted
                    .iter()
                    .any(|device| *device == whole || device.starts_with(&other))
            };
            is_published(slices, &expected) && troubled.iter().all(found)
        };
        let published = api.wait_until(|seen| ready(&seen.list()), PATIENCE);
        tokio::select! {
            published = published => published.with_context(|| {
                let names = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(" ");
                let there = names_of(devices(&api.list::<ResourceSlice>()));
                format!(
                    "the plugin does not publish what the policies ask for: missing {}; too much {}",
                    names(&expected.difference(&there).cloned().collect()),
                    names(&there.difference(&expected).cloned().collect())
                )
            })?,
            ended = &mut plugin => {
                ended.context("the plugin died")?.context("the plugin stopped")?;
                bail!("the plugin stopped by itself");
            }
        }
        let published_after = started.elapsed();
        kubelet
            .wait_registered(driver, PATIENCE)
            .await
            .context("the plugin did not register")?;
        let tainted = tainted(&api.list());
        Ok(Self {
            api,
            kubelet,
            published_after,
            notes,
            idle,
            tainted,
            plugin,
            stop,
            folder,
            driver,
        })
    }

    /// Waits until no device is tainted that was not tainted at the start.
    pub(crate) async fn settle(&self) -> Result<()> {
        let settled = self
            .api
            .wait_until(|seen| tainted(&seen.list()) == self.tainted, PATIENCE)
            .await;
        settled.with_context(|| {
            let now: Vec<String> = tainted(&self.api.list())
                .difference(&self.tainted)
                .cloned()
                .collect();
            format!(
                "everything was given back, and still tainted: {}",
                now.join(" ")
            )
        })
    }

    /// The CDI document of a claim.
    pub(crate) fn cdi(&self, uid: &str) -> Option<serde_json::Value> {
        let file = self
            .folder
            .path()
            .join("cdi")
            .join(divvy_claims::cdi_file_name(self.driver, &uid.parse().ok()?));
        let text = fs_err::read_to_string(file).ok()?;
        // On a node the folders are at the root.
        serde_json::from_str(&text.replace(self.folder.path().to_str()?, "")).ok()
    }

    /// Stops the plugin and names what claims have left on the node: records and CDI files.
    pub(crate) async fn stop(self) -> Result<Vec<String>> {
        self.stop.cancel();
        self.plugin
            .await
            .context("the plugin died")?
            .context("the plugin did not stop cleanly")?;
        let mut left = Vec::new();
        let records = self.kubelet.config().plugin_dir(self.driver).join("claims");
        for folder in [records, self.folder.path().join("cdi")] {
            if !folder.is_dir() {
                continue;
            }
            for entry in fs_err::read_dir(&folder)? {
                let path = entry?.path();
                // Locks are never unlinked, so that no two holders can lock different files of one
                // name.
                if path.extension().is_some_and(|e| e == "json") {
                    left.push(
                        path.strip_prefix(self.folder.path())
                            .unwrap_or(&path)
                            .display()
                            .to_string(),
                    );
                }
            }
        }
        Ok(left)
    }
}

/// Listens in the place of the node's MPS supervisor until `stop`: the plugin taints MPS shares
/// otherwise. No request comes, since the demo's MPS servers are a list.
fn answer_for_supervisor(folder: &Path, stop: CancellationToken) -> Result<()> {
    fs_err::create_dir_all(folder)?;
    let socket = UnixListener::bind(folder.join(SUPERVISOR)).context("the demo's supervisor")?;
    tokio::spawn(stop.run_until_cancelled_owned(async move {
        loop {
            drop(socket.accept().await);
        }
    }));
    Ok(())
}

fn host_of(sim: &SimNode) -> Fixture {
    let inventory = sim.inventory();
    let mut gpus: Vec<FixtureGpu> = inventory
        .gpus
        .values()
        .filter_map(|gpu| {
            Some(FixtureGpu {
                minor: gpu.facts.minor?,
                pci: gpu.facts.pci_address,
                numa_node: gpu.topology.numa_node,
                pcie_root: gpu
                    .topology
                    .pcie_root
                    .clone()
                    .unwrap_or_else(|| "pci0000:00".to_owned()),
            })
        })
        .collect();
    gpus.sort_by_key(|gpu| gpu.minor);
    let mut fixture = Fixture::new(gpus);
    fixture
        .driver_version
        .clone_from(&inventory.system.driver_version);
    fixture
}

/// The API server of a cluster with the chart, these policies and the node.
fn cluster(
    labels: BTreeMap<String, String>,
    policies: &[GpuPolicy],
    driver: &str,
) -> Result<FakeApi> {
    let api = FakeApi::new();
    let mut node: Node = build::mk_node(NODE);
    node.metadata.labels.get_or_insert_default().extend(labels);
    api.put(&node).context("the demo's node")?;
    for policy in policies {
        let spec = serde_json::to_value(&policy.spec).context("a GpuPolicy")?;
        api.put(&divvy_fake_cluster::GpuPolicy::new(&policy.name, spec))
            .context("a GpuPolicy")?;
    }
    for class in classes(driver)? {
        api.put(&class).context("the demo's device classes")?;
    }
    Ok(api)
}

/// The plugin's arguments: its defaults, with folders of its own.
fn args(
    folder: &Path,
    kubelet: &KubeletConfig,
    device_nodes: PathBuf,
    driver: &str,
) -> Result<Args> {
    // The hook is copied and named in CDI files; no container runs here that would call it.
    let hook = folder.join("divvy-cdi-hook");
    fs_err::write(&hook, "")?;
    // Control groups with a controller by which a driver from R615 on caps memory; an older one
    // caps none.
    let groups = folder.join("cgroup");
    fs_err::create_dir(&groups)?;
    fs_err::write(groups.join("cgroup.controllers"), "misc\n")?;
    let host = folder.join("host");
    let flags = [
        ("node-name", NODE.into()),
        ("driver-name", driver.into()),
        ("plugin-dir", kubelet.plugin_dir(driver)),
        ("registry-dir", kubelet.registry_dir()),
        ("pod-resources-socket", kubelet.pod_resources_socket()),
        ("cdi-dir", folder.join("cdi")),
        ("driver-root", host.clone()),
        ("host-driver-root", "/".into()),
        ("host-root", host),
        ("device-nodes", device_nodes),
        ("hook-path", hook),
        ("hook-dir", folder.join("opt/divvy")),
        ("run-dir", folder.join("run")),
        ("memory-caps", "true".into()),
        ("cgroup-root", groups),
        ("http", PathBuf::new()),
    ];
    let flags = flags
        .into_iter()
        .flat_map(|(flag, value)| [format!("--{flag}").into(), value.into_os_string()]);
    // The variables of a node's plugin have no meaning for the demo's.
    let command = Args::command()
        .no_binary_name(true)
        .mut_args(|arg| arg.env(None::<&str>));
    Ok(Args::from_arg_matches(
        &command.try_get_matches_from(flags)?,
    )?)
}

/// The slices of the newest generation, if all of them are there.
fn whole(slices: &[ResourceSlice]) -> Option<Vec<&ResourceSlice>> {
    let newest = slices
        .iter()
        .map(|slice| slice.spec.pool.generation)
        .max()?;
    let newest: Vec<_> = slices
        .iter()
        .filter(|slice| slice.spec.pool.generation == newest)
        .collect();
    let count = newest.first()?.spec.pool.resource_slice_count;
    (usize::try_from(count) == Ok(newest.len())).then_some(newest)
}

fn devices<'s>(
    slices: impl IntoIterator<Item = &'s ResourceSlice>,
) -> impl Iterator<Item = &'s Device> {
    slices
        .into_iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
}

fn names_of<'s>(devices: impl Iterator<Item = &'s Device>) -> BTreeSet<String> {
    devices.map(|device| device.name.clone()).collect()
}

/// Says whether the pool is whole, with exactly these devices: more may come once the plugin has
/// heard
/// the API server's version and the policies.
fn is_published(slices: &[ResourceSlice], expected: &BTreeSet<String>) -> bool {
    whole(slices).is_some_and(|slices| names_of(devices(slices)) == *expected)
}

/// The devices with taints.
fn tainted(slices: &[ResourceSlice]) -> BTreeSet<String> {
    let has_taint = |device: &&Device| {
        device
            .taints
            .as_ref()
            .is_some_and(|taints| !taints.is_empty())
    };
    names_of(devices(slices).filter(has_taint))
}

/// DeviceClasses as the chart makes them by default. `cargo xtask chart` compares the file with the
/// chart.
const CLASSES: &str = include_str!("classes.yaml");

/// Returns the classes that the chart installs with a driver's name.
pub(crate) fn classes(driver: &str) -> Result<Vec<DeviceClass>> {
    let mut text = CLASSES.to_owned();
    if driver == NVIDIA {
        for (ours, theirs) in STANDING_IN {
            text = text.replace(ours, theirs);
        }
    }
    serde_saphyr::from_multiple(&text).context("the chart's device classes")
}

/// Differences of the chart's classes with `driverName: gpu.nvidia.com`. `cargo xtask chart`
/// compares them, too.
const STANDING_IN: [(&str, &str); 3] = [
    ("'gpu.divvy.dev'", "'gpu.nvidia.com'"),
    ("  name: gpu.divvy.dev\n", "  name: gpu.nvidia.com\n"),
    ("  name: mig.divvy.dev\n", "  name: mig.nvidia.com\n"),
];

#[cfg(test)]
mod tests {
    use tokio::net::UnixStream;

    use super::*;

    /// Looks more often than connections may wait to be accepted.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_supervisor_answers_on_the_demos_node_for_as_long_as_it_runs() {
        let (sim, _) = crate::tests::gpus("h100x1").start().unwrap();
        let world = World::start(&sim, &[], &[], NVIDIA, &[]).await.unwrap();
        let socket = world.folder.path().join(MPS).join(SUPERVISOR);
        for look in 0..5000 {
            let answer = UnixStream::connect(&socket).await;
            assert!(answer.is_ok(), "look {look}: {answer:?}");
        }
        world.stop().await.unwrap();
    }
}
