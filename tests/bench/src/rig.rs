//! The plugin as it is released, in a process of its own, between a fake API server on a loopback
//! port and a fake kubelet on Unix sockets, over GPUs that the mock NVML library simulates.
//!
//! Server and kubelet have a thread of their own, so that a request of this process crosses threads
//! as the plugin's crosses processes; what measures runs on the calling thread alone.

use std::fmt::Write as _;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use divvy_api::names::DRIVER;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_node, reserved};
use divvy_fake_cluster::{FakeApi, FakeKubelet, HttpServer, KubeletConfig};
use divvy_gpu_sim::{Engine, SimSpec};
use divvy_model::CudaVersion;
use divvy_proto::dra::v1::Claim;
use divvy_proto::dra::v1::dra_plugin_client::DraPluginClient;
use fs_err as fs;
use k8s_openapi::api::resource::v1::{
    Device, DeviceRequestAllocationResult, ResourceClaim, ResourceSlice,
};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use nvidia_ml::MockState;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::{Channel, Endpoint};

/// The node's name.
pub(crate) const NODE: &str = "bench-node";
/// The namespace of claims.
pub(crate) const NAMESPACE: &str = "default";
/// Time limit of the plugin for things that take milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Programs that are measured.
#[derive(Debug, Clone)]
pub(crate) struct Programs {
    /// The plugin's binary.
    pub(crate) plugin: PathBuf,
    /// The mock NVML library.
    pub(crate) mock: PathBuf,
}

/// Where files are that are in memory on a real node too, or that only exist for the measurement.
pub(crate) const MEMORY: &str = "/dev/shm";

/// Folder that stands for the node's root and its driver's.
const HOST: &str = "host";
/// State of the mock library.
const STATE: &str = "gpus.json";

/// All but the plugin. Dropping it removes everything.
pub(crate) struct Rig {
    /// The kubelet's folder, with the plugin's in it.
    _disk: TempDir,
    /// CDI files (`/var/run/cdi`), the host, simulated GPUs, logs.
    memory: TempDir,
    programs: Programs,
    count: usize,
    /// More flags of the plugin.
    flags: Vec<String>,
    /// The API server, unless a real one is used.
    pub(crate) api: FakeApi,
    kubelet: FakeKubelet,
    _server: HttpServer,
    /// A client of the API server that is used.
    client: kube::Client,
    real: bool,
    /// Where measurements run. Before the servers' runtime, so that connections end first.
    here: Runtime,
    _servers: Runtime,
}

/// A running plugin; killed when dropped.
pub(crate) struct Plugin {
    process: Child,
    /// When it was started, for comparing with the API server's events and with its log.
    pub(crate) started: (Instant, SystemTime),
    log: PathBuf,
}

impl Rig {
    /// Makes a node with these GPUs, the kubelet's folder below `parent`. With the kubeconfig of a
    /// real API server's admin, that one is used.
    pub(crate) fn new(
        programs: &Programs,
        parent: &Path,
        gpus: &str,
        real: Option<&Path>,
    ) -> Result<Self> {
        Self::with_driver(programs, parent, gpus, real, None)
    }

    /// Makes a node with a driver of this version, or with that of the simulation.
    pub(crate) fn with_driver(
        programs: &Programs,
        parent: &Path,
        gpus: &str,
        real: Option<&Path>,
        driver: Option<&str>,
    ) -> Result<Self> {
        let folder = |parent: &Path| {
            tempfile::Builder::new()
                .prefix("divvy-bench-")
                .tempdir_in(parent)
        };
        let (disk, memory) = (folder(parent)?, folder(Path::new(MEMORY))?);
        let engine = engine(memory.path(), gpus, driver)?;
        let count = host(&memory.path().join(HOST), &engine, &programs.mock)?;
        let here = Builder::new_current_thread().enable_all().build()?;
        let servers = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let api = FakeApi::new();
        api.put(&mk_node(NODE))?;
        let (server, kubelet) = {
            let _in_runtime = servers.enter();
            let kubelet = KubeletConfig::new(disk.path().join("kubelet"), NODE, api.clone());
            (
                servers.block_on(api.serve_http())?,
                FakeKubelet::start(kubelet)?,
            )
        };
        fs::create_dir(memory.path().join("cdi"))?;
        let kubeconfig = memory.path().join("kubeconfig");
        match real {
            Some(real) => drop(fs::copy(real, &kubeconfig)?),
            None => fs::write(&kubeconfig, server.kubeconfig())?,
        }
        let client = here.block_on(client(&kubeconfig))?;
        if real.is_some() {
            here.block_on(Api::all(client.clone()).create(&PostParams::default(), &mk_node(NODE)))?;
        }
        Ok(Self {
            _disk: disk,
            memory,
            programs: programs.clone(),
            count,
            flags: Vec::new(),
            api,
            kubelet,
            _server: server,
            client,
            real: real.is_some(),
            here,
            _servers: servers,
        })
    }

    /// Lets the plugin offer GPUs as everything that they can become.
    pub(crate) fn offering_everything(self) -> Self {
        self.with_flags(["--offer", "everything"])
    }

    /// Gives the plugin more flags.
    pub(crate) fn with_flags<const N: usize>(mut self, flags: [&str; N]) -> Self {
        self.flags.extend(flags.map(str::to_owned));
        self
    }

    /// Runs on this thread.
    pub(crate) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.here.block_on(work)
    }

    /// Returns the number of GPUs.
    pub(crate) fn gpus(&self) -> usize {
        self.count
    }

    /// Returns a folder in memory, with a short path.
    pub(crate) fn folder(&self) -> &Path {
        self.memory.path()
    }

    /// Returns the folder that stands for the node's root and its driver's.
    pub(crate) fn host(&self) -> PathBuf {
        self.memory.path().join(HOST)
    }

    /// Returns the folder of CDI files.
    pub(crate) fn cdi_dir(&self) -> PathBuf {
        self.memory.path().join("cdi")
    }

    /// Returns the plugin's folder.
    pub(crate) fn plugin_dir(&self) -> PathBuf {
        self.kubelet.config().plugin_dir(DRIVER)
    }

    /// Returns a kubeconfig file for the API server.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.memory.path().join("kubeconfig")
    }

    /// Returns the plugin's program with all its flags.
    fn command(&self) -> Command {
        let (root, kubelet) = (self.memory.path(), self.kubelet.config());
        let mut command = Command::new(&self.programs.plugin);
        for (flag, value) in [
            ("--plugin-dir", &self.plugin_dir()),
            ("--registry-dir", &kubelet.registry_dir()),
            ("--pod-resources-socket", &kubelet.pod_resources_socket()),
            ("--cdi-dir", &self.cdi_dir()),
            ("--run-dir", &root.join("run")),
            ("--host-root", &self.host()),
            ("--driver-root", &self.host()),
            ("--device-nodes", &self.host().join("device-nodes")),
            ("--nvml-library", &self.programs.mock),
            ("--kubeconfig", &self.kubeconfig()),
        ] {
            command.arg(flag).arg(value);
        }
        command
            .args([
                "--node-name",
                NODE,
                "--driver-name",
                DRIVER,
                "--http",
                "127.0.0.1:0",
            ])
            .args(["--log-format", "json", "--log-level", "info"])
            // No container is run, so none calls a hook.
            .args(["--library-delivery", "mounts"])
            .args(&self.flags)
            .env("DIVVY_MOCK_STATE", root.join(STATE))
            // As the chart sets it.
            .env("MALLOC_ARENA_MAX", "4")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    }

    /// Starts the plugin.
    pub(crate) fn start(&self) -> Result<Plugin> {
        let log = self.memory.path().join("plugin.log");
        let mut command = self.command();
        command.stderr(fs::File::create(&log)?.into_parts().0);
        let started = (Instant::now(), SystemTime::now());
        let process = command
            .spawn()
            .with_context(|| format!("cannot start {}", self.programs.plugin.display()))?;
        Ok(Plugin {
            process,
            started,
            log,
        })
    }

    /// Removes what an earlier plugin has left, slices included.
    pub(crate) fn forget_plugin(&self) -> Result<()> {
        for folder in [
            self.plugin_dir(),
            self.kubelet.config().registry_dir(),
            self.cdi_dir(),
        ] {
            if folder.exists() {
                fs::remove_dir_all(&folder)?;
            }
            fs::create_dir_all(&folder)?;
        }
        self.api.wipe_slices(NODE, None);
        Ok(())
    }

    /// Waits until every GPU is published, and says when that was.
    pub(crate) fn wait_until_published(&self, plugin: &mut Plugin) -> Result<Instant> {
        let all = |slices: &[ResourceSlice]| {
            let devices = slices
                .iter()
                .flat_map(|slice| slice.spec.devices.iter().flatten());
            let gpus = devices.filter(|device| is_gpu(device)).count();
            (gpus == self.count).then(Instant::now)
        };
        if !self.real {
            let published = self.run(self.api.wait_for(|view| all(&view.list()), PATIENCE));
            return published.map_err(|error| plugin.explain(&error.to_string()));
        }
        let slices = Api::<ResourceSlice>::all(self.client());
        let ours = ListParams::default().fields(&format!("spec.nodeName={NODE}"));
        self.run(async {
            let end = Instant::now() + PATIENCE;
            while Instant::now() < end {
                if let Some(at) = all(&slices.list(&ours).await?.items) {
                    return Ok(at);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(plugin.explain("its GPUs are not published"))
        })
    }

    /// Opens a connection to the plugin's DRA service, kept as the kubelet keeps it.
    pub(crate) fn connect(&self, plugin: &mut Plugin) -> Result<DraPluginClient<Channel>> {
        self.run(async {
            let registered = self.kubelet.wait_registered(DRIVER, PATIENCE).await;
            let registered = registered.map_err(|error| plugin.explain(&error.to_string()))?;
            let channel = Endpoint::from_shared(format!("unix:{}", registered.endpoint))?
                .connect()
                .await?;
            Ok(DraPluginClient::new(channel))
        })
    }

    /// Returns a client of the API server, like the plugin's.
    pub(crate) fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Returns true if the API server is a real one.
    pub(crate) fn is_real(&self) -> bool {
        self.real
    }

    /// Starts the plugin, waits until it has published every GPU, and connects to it.
    pub(crate) fn ready(&self) -> Result<(Plugin, DraPluginClient<Channel>)> {
        let mut plugin = self.start()?;
        self.wait_until_published(&mut plugin)?;
        let dra = self.connect(&mut plugin)?;
        Ok((plugin, dra))
    }

    /// Stores a claim with this one result of its request, reserved for a pod of this name and UID,
    /// as a scheduler leaves it.
    pub(crate) fn claim(
        &self,
        name: &str,
        result: DeviceRequestAllocationResult,
        pod: (&str, &str),
    ) -> Result<Claim> {
        let claim = allocated(mk_claim(NAMESPACE, name, DRIVER, 1), vec![result]);
        let stored = self.put(&reserved(claim, pod.0, pod.1))?;
        let uid = stored.metadata.uid.context("a stored claim has no UID")?;
        Ok(Claim {
            namespace: NAMESPACE.to_owned(),
            name: name.to_owned(),
            uid,
        })
    }

    fn put(&self, claim: &ResourceClaim) -> Result<ResourceClaim> {
        if !self.real {
            return Ok(self.api.put(claim)?);
        }
        let claims = Api::<ResourceClaim>::namespaced(self.client(), NAMESPACE);
        self.run(async {
            let mut stored = claims.create(&PostParams::default(), claim).await?;
            stored.status.clone_from(&claim.status);
            let name = stored.metadata.name.clone().unwrap_or_default();
            Ok(claims
                .replace_status(&name, &PostParams::default(), &stored)
                .await?)
        })
    }

    /// Deletes a claim.
    pub(crate) fn delete(&self, claim: &str) -> Result<()> {
        if !self.real {
            return Ok(self.api.delete::<ResourceClaim>(NAMESPACE, claim)?);
        }
        let claims = Api::<ResourceClaim>::namespaced(self.client(), NAMESPACE);
        Ok(self
            .run(claims.delete(claim, &DeleteParams::default()))
            .map(drop)?)
    }
}

/// Makes a client like the plugin's.
pub(crate) async fn client(kubeconfig: &Path) -> Result<kube::Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let mut config =
        kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(kube::Client::try_from(config)?)
}

/// Returns true if a published device is the whole of a GPU.
fn is_gpu(device: &Device) -> bool {
    let kind = device.attributes.as_ref().and_then(|all| all.get("type"));
    kind.is_some_and(|kind| kind.string.as_deref() == Some("gpu"))
}

/// Makes the GPUs of the mock library.
fn engine(folder: &Path, gpus: &str, driver: Option<&str>) -> Result<Engine> {
    let gpus: SimSpec = gpus.parse()?;
    let state = MockState::open_or_create(folder.join(STATE), &gpus)?;
    if let Some(driver) = driver {
        let cuda = CudaVersion {
            major: 13,
            minor: 0,
        };
        state.edit(|engine| engine.set_driver_version(driver, cuda))?;
    }
    Ok(Engine::clone(&*state.read()?))
}

/// Writes the host's files for these GPUs; returns their number.
fn host(root: &Path, engine: &Engine, mock: &Path) -> Result<usize> {
    let mut fixture = divvy_e2e::gpus::fixture_of(&engine.inventory())?;
    let count = fixture.gpus.len();
    fixture.nvml = Some(mock.to_owned());
    let host = fixture.build(root)?;
    for gpu in &fixture.gpus {
        divvy_e2e::gpus::capabilities(&host, gpu.minor)?;
    }
    Ok(count)
}

impl Plugin {
    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the time from its start to a line that contains this. Its own clock, written
    /// into the line.
    pub(crate) fn logged(&self, part: &str) -> Result<Duration> {
        let at = SystemTime::from(self.said(part, "timestamp")?.parse::<jiff::Timestamp>()?);
        Ok(at.duration_since(self.started.1)?)
    }

    /// Returns a field of the first line that it logged with this in it.
    fn said(&self, part: &str, field: &str) -> Result<String> {
        let log = fs::read_to_string(&self.log)?;
        let line = log.lines().find(|line| line.contains(part));
        let line = line.with_context(|| format!("the plugin did not log {part:?}"))?;
        let entry: serde_json::Value = serde_json::from_str(line)?;
        let of = entry
            .get("fields")
            .and_then(|fields| fields.get(field))
            .or_else(|| entry.get(field));
        let of = of.and_then(serde_json::Value::as_str);
        Ok(of
            .with_context(|| format!("the line has no {field}: {line}"))?
            .to_owned())
    }

    /// Ends it at once.
    pub(crate) fn kill(&mut self) -> Result<()> {
        ensure!(
            self.process.try_wait()?.is_none(),
            self.explain("the plugin ended by itself")
        );
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Returns an error with the last lines of the log.
    pub(crate) fn explain(&mut self, problem: &str) -> anyhow::Error {
        let mut message = problem.to_owned();
        if let Ok(Some(status)) = self.process.try_wait() {
            let _ = write!(message, "; the plugin has ended ({status})");
        }
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        message.push_str("; the plugin's last lines:");
        let lines: Vec<_> = log.lines().collect();
        for line in lines.iter().skip(lines.len().saturating_sub(12)) {
            let _ = write!(message, "\n  {line}");
        }
        anyhow::Error::msg(message)
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        // Ended already is as good.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the filesystem a path is on, as `ext4 (/dev/vda)`.
pub(crate) fn filesystem(path: &Path) -> Result<String> {
    let path = fs::canonicalize(path)?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let found = mounts.lines().filter_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let point = place.split(' ').nth(4)?;
        let mut kind = kind.split(' ');
        let shown = format!("{} ({})", kind.next()?, kind.next()?);
        path.starts_with(point).then_some((point.len(), shown))
    });
    match found.max_by_key(|(length, _)| *length) {
        Some((_, shown)) => Ok(shown),
        None => bail!("no mount point has {}", path.display()),
    }
}
