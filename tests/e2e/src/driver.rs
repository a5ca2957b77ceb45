//! The driver on a cluster: image imported, chart installed, node labelled.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use divvy_api::names;
use divvy_gpu_sim::SimSpec;
use serde_json::{Value, json};

use crate::api::{at, has_condition};
use crate::cluster::Cluster;
use crate::config::Layout;
use crate::gpus::Gpus;
use crate::images;
use crate::parts;
use crate::process::{Signal, output};
use crate::programs::Programs;
use crate::wait::{poll, wait_for};

/// Where the chart is installed.
pub const NAMESPACE: &str = "divvy";
/// The plugin's program.
const PROGRAM: &str = "divvy-kubelet-plugin";
/// File name of the supervisor of MPS daemons.
const MPS_PROGRAM: &str = "divvy-mps-supervisor";
/// Time that the driver may take to start or stop on a busy machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// Values of a release whose classes stand for no extended resource, since another's do.
pub const WITHOUT_RESOURCES: [&str; 4] = [
    "--set",
    "deviceClass.extendedResourceNames.gpu=",
    "--set-json",
    "migClasses=[]",
];

/// The driver, installed on a cluster.
#[derive(Debug)]
pub struct Driver<'a> {
    cluster: &'a Cluster,
    gpus: Gpus,
    programs: Programs,
}

impl<'a> Driver<'a> {
    /// Installs the driver for simulated GPUs, and waits until it is ready and they are published.
    pub fn install(cluster: &'a Cluster, programs: &Programs, gpus: &str) -> Result<Self> {
        Self::install_with(cluster, programs, gpus, &[], &[])
    }

    /// Installs it as [`Driver::install`] does, with these variables for the plugin, also after
    /// upgrades, and at first with these values (`key=value`) of the chart.
    pub fn install_with(
        cluster: &'a Cluster,
        programs: &Programs,
        gpus: &str,
        env: &[(&str, &str)],
        set: &[&str],
    ) -> Result<Self> {
        let version = env!("CARGO_PKG_VERSION");
        let gpus = Gpus::create(
            &cluster.state().join("host"),
            &gpus.parse()?,
            &programs.mock,
        )?;
        let driver = Self {
            cluster,
            gpus,
            programs: programs.clone(),
        };
        driver.prepare(cluster, &driver.gpus)?;
        cluster.tag(images::BUSYBOX, &images::of_examples()?)?;
        driver.link_tools()?;
        fs_err::write(
            driver.values_file(),
            driver.values(version, env).to_string(),
        )?;
        cluster.kubectl(&["create", "namespace", NAMESPACE])?;
        driver.helm(&["install"], set)?;
        driver.label_node(Layout::NODE, true)?;
        // What is published can be used: the plugin waits until the kubelet knows it.
        driver.wait_for_slices()?;
        Ok(driver)
    }

    /// Gives another node GPUs of its own, and the plugin's image. All plugins have the same
    /// arguments, so these GPUs are there, too, where this node's are.
    pub fn prepare_second(&self, node: &Cluster, gpus: &str) -> Result<Gpus> {
        let gpus = gpus.parse::<SimSpec>()?.on_node(2);
        let gpus = Gpus::create(&node.state().join("host"), &gpus, &self.programs.mock)?;
        self.prepare(node, &gpus)?;
        let [from, to] = [gpus.root(), self.gpus.root()].map(|root| root.display().to_string());
        output(&mut node.command("mount", &["--rbind", &from, &to]))?;
        Ok(gpus)
    }

    fn prepare(&self, node: &Cluster, gpus: &Gpus) -> Result<()> {
        mount_driver(node, gpus)?;
        mount_devices(node, gpus)?;
        node.import(&self.programs.image(&format!(
            "{}:{}",
            images::DRIVER,
            env!("CARGO_PKG_VERSION")
        ))?)
    }

    /// Links programs that people call in the cluster. A folder of ready programs may lack ours.
    fn link_tools(&self) -> Result<()> {
        self.cluster.link("helm", &parts::helm()?)?;
        if self.programs.cli.exists() {
            for name in ["divvy", "kubectl-divvy"] {
                self.cluster.link(name, &self.programs.cli)?;
            }
        }
        Ok(())
    }

    fn values_file(&self) -> PathBuf {
        self.cluster.state().join("values.json")
    }

    /// Runs helm's `action` on the release, with the values of this cluster and then these
    /// (`key=value`).
    fn helm(&self, action: &[&str], set: &[&str]) -> Result<()> {
        let (chart, values) = (chart(), self.values_file().display().to_string());
        let mut args = action.to_vec();
        args.extend([
            "divvy",
            &chart,
            "--namespace",
            NAMESPACE,
            "--values",
            &values,
        ]);
        for value in set {
            args.extend(["--set", value]);
        }
        helm(self.cluster, &args).map(drop)
    }

    /// Installs the chart a second time, in a namespace of the release's name, for a driver of
    /// another name. The extended resources stay with the first.
    pub fn install_second(&self, release: &str, driver: &str) -> Result<()> {
        let (chart, values) = (chart(), self.values_file().display().to_string());
        let own = format!("driverName={driver},crds.install=false,viewRole.enabled=false");
        let args = [
            "install",
            release,
            &chart,
            "--namespace",
            release,
            "--create-namespace",
        ];
        helm(
            self.cluster,
            &[
                &args[..],
                &["--values", &values, "--set", &own],
                &WITHOUT_RESOURCES,
            ]
            .concat(),
        )
        .map(drop)
    }

    /// The chart's value `profile`, as the plugin has it.
    pub fn offer(&self) -> Result<String> {
        let path =
            "jsonpath={.items[*].spec.template.spec.containers[*].env[?(@.name=='OFFER')].value}";
        self.cluster.kubectl(&[
            "get",
            "daemonsets",
            "--namespace",
            NAMESPACE,
            "--output",
            path,
        ])
    }

    /// Installs the chart again, with these values changed, and waits until only the new plugin
    /// runs.
    pub fn upgrade(&self, set: &[&str]) -> Result<()> {
        let uids = |pods: &[Value]| {
            pods.iter()
                .map(|pod| at(pod, "metadata.uid").clone())
                .collect::<Vec<_>>()
        };
        let old = uids(&self.pods()?);
        self.helm(&["upgrade"], set)?;
        poll("the next plugin alone, ready", PATIENCE, || {
            let pods = self.pods()?;
            let new = uids(&pods).iter().all(|uid| !old.contains(uid));
            Ok(new && pods.len() == 1 && pods.iter().all(|pod| has_condition(pod, "Ready")))
        })
        .with_context(|| self.explain())
    }

    /// Installs the chart again with these values and does not wait for what comes of it.
    pub fn change(&self, set: &[&str]) -> Result<()> {
        self.helm(&["upgrade"], set)
    }

    /// Waits until there is one plugin, ready.
    pub fn wait_until_alone(&self) -> Result<()> {
        poll("one plugin, ready", PATIENCE, || {
            let pods = self.pods()?;
            Ok(pods.len() == 1 && pods.iter().all(|pod| has_condition(pod, "Ready")))
        })
        .with_context(|| self.explain())
    }

    fn values(&self, tag: &str, env: &[(&str, &str)]) -> Value {
        let mock = self.gpus.mock_state();
        let env = env
            .iter()
            .map(|(name, value)| json!({"name": name, "value": value}));
        let own = [
            json!({"name": "DIVVY_MOCK_STATE", "value": mock}),
            json!({"name": "CGROUP_ROOT", "value": Gpus::groups_in_pod()}),
        ];
        let folder = mock.parent().unwrap_or(Path::new("/"));
        // What nvidia-smi writes is the kernel module's memory on a real node; the host's files are
        // read only here.
        let slices = self
            .gpus
            .root()
            .join(Gpus::TIME_SLICES.trim_start_matches('/'));
        let seen = format!("/host{}", Gpus::TIME_SLICES);
        json!({
            "image": {"tag": tag, "pullPolicy": "Never", "preloaded": true},
            "hostRoot": self.gpus.root(),
            // A minute by default, for which cases with sick GPUs would only wait.
            "recoverAfter": 5,
            // What libraries say about every frame would hide what the driver says.
            "log": {"level": "debug,h2=info,hyper=info,hyper_util=info,tower=info,tonic=info,rustls=info"},
            "extraEnv": own.into_iter().chain(env).collect::<Vec<_>>(),
            "extraVolumes": [
                {"name": "mock", "hostPath": {"path": folder}},
                {"name": "time-slices", "hostPath": {"path": slices}},
            ],
            "extraVolumeMounts": [
                {"name": "mock", "mountPath": folder},
                {"name": "time-slices", "mountPath": seen},
            ],
        })
    }

    /// The node's GPUs.
    pub fn gpus(&self) -> &Gpus {
        &self.gpus
    }

    /// `kubectl divvy` with these arguments: its exit status, and what it says.
    pub fn kubectl_divvy(&self, args: &[&str]) -> Result<(Option<i32>, String)> {
        let mut command = self
            .cluster
            .command("kubectl", &[&["divvy"], args].concat());
        let done = command.output().context("kubectl cannot be started")?;
        let said = [done.stdout, done.stderr].concat();
        Ok((
            done.status.code(),
            String::from_utf8_lossy(&said).into_owned(),
        ))
    }

    /// The plugin as a program of the node, and not in a pod: its command line, with this
    /// kubeconfig.
    pub fn host_process(&self, kubeconfig: &str) -> (Vec<String>, Vec<(String, String)>) {
        let root = self.gpus.root();
        let (host, mock) = (
            root.display().to_string(),
            self.gpus.mock_state().display().to_string(),
        );
        let hook = self.programs.hook.display().to_string();
        let folder = format!("/var/lib/kubelet/plugins/{}", names::DRIVER);
        let mut args = vec![self.programs.plugin.display().to_string()];
        for (flag, value) in [
            ("node-name", Layout::NODE),
            ("plugin-dir", &folder),
            ("host-root", &host),
            ("hook-path", &hook),
            ("kubeconfig", kubeconfig),
        ] {
            args.push(format!("--{flag}={value}"));
        }
        (args, vec![("DIVVY_MOCK_STATE".to_owned(), mock)])
    }

    /// Labels a node for the driver, or takes the label away: the DaemonSet follows.
    pub fn label_node(&self, node: &str, wanted: bool) -> Result<()> {
        let value = if wanted { json!("true") } else { Value::Null };
        let path = format!("/api/v1/nodes/{node}");
        self.cluster
            .api()
            .patch(
                &path,
                &json!({"metadata": {"labels": {names::NODE_LABEL: value}}}),
            )
            .map(drop)
    }

    /// The plugin's pod, once it is ready.
    pub fn wait_until_ready(&self) -> Result<Value> {
        wait_for("ready plugin pod", PATIENCE, || {
            let pods = self.pods()?;
            Ok(pods.into_iter().find(|pod| has_condition(pod, "Ready")))
        })
        .with_context(|| self.explain())
    }

    /// Stops the plugin (its pod ends) and waits until it is gone.
    pub fn stop(&self) -> Result<()> {
        self.label_node(Layout::NODE, false)?;
        poll("end of the plugin", PATIENCE, || {
            Ok(self.pods()?.is_empty() && self.pids()?.is_empty())
        })
    }

    /// Starts the plugin again after [`Driver::stop`]. Slices stay published meanwhile, so they do
    /// not say when it is back.
    pub fn start(&self) -> Result<()> {
        self.label_node(Layout::NODE, true)?;
        self.wait_until_ready().map(drop)
    }

    /// Kills the plugin's process with SIGKILL and waits until the one that the kubelet starts in
    /// its place is ready.
    pub fn kill(&self) -> Result<()> {
        self.kill_and(|| Ok(()))
    }

    /// [`Driver::kill`], with something to do as soon as the process is killed.
    pub fn kill_and(&self, then: impl FnOnce() -> Result<()>) -> Result<()> {
        self.restarted_after(Signal::Kill, then)
    }

    /// Stops the plugin's process with SIGSTOP and waits until the kubelet has replaced it and the
    /// next is ready.
    pub fn hang(&self) -> Result<()> {
        self.restarted_after(Signal::Stop, || Ok(()))
    }

    fn restarted_after(&self, signal: Signal, then: impl FnOnce() -> Result<()>) -> Result<()> {
        let running = self.pids()?;
        let &[pid] = running.as_slice() else {
            bail!("expected one plugin process, found {running:?}")
        };
        let restarts = |pod: &Value| {
            at(pod, "status.containerStatuses.0.restartCount")
                .as_u64()
                .unwrap_or(0)
        };
        let before = restarts(&self.wait_until_ready()?);
        self.cluster.send(pid, signal)?;
        then()?;
        poll(&format!("ready plugin after {signal:?}"), PATIENCE, || {
            let pods = self.pods()?;
            Ok(pods
                .iter()
                .any(|found| restarts(found) > before && has_condition(found, "Ready")))
        })
        .with_context(|| self.explain())
    }

    /// The process ids of the plugin on the node.
    pub fn pids(&self) -> Result<Vec<u32>> {
        self.cluster.processes(|args| {
            args.first()
                .is_some_and(|program| program.ends_with(PROGRAM))
        })
    }

    /// Adds the driver's programs for MPS to the node.
    pub fn install_mps(&self) -> Result<()> {
        self.gpus.install_mps(&self.programs.mps)
    }

    /// The pods of the supervisor of MPS daemons.
    pub fn mps_pods(&self) -> Result<Vec<Value>> {
        let pods = format!(
            "/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io/component=mps-supervisor"
        );
        self.cluster.api().list(&pods)
    }

    /// The processes of the supervisor.
    pub fn mps_supervisors(&self) -> Result<Vec<u32>> {
        self.cluster.processes(|args| {
            args.first()
                .is_some_and(|program| program.ends_with(MPS_PROGRAM))
        })
    }

    /// Deletes the supervisor's pod and waits until another one is ready.
    pub fn replace_mps_pod(&self) -> Result<()> {
        let name = |pod: &Value| {
            at(pod, "metadata.name")
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let before: Vec<String> = self.mps_pods()?.iter().map(name).collect();
        for pod in &before {
            let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{pod}");
            self.cluster.api().delete(&path, &json!({}))?;
        }
        poll("another pod of the MPS supervisor", PATIENCE, || {
            let pods = self.mps_pods()?;
            let is_new = |pod: &Value| !before.contains(&name(pod)) && has_condition(pod, "Ready");
            Ok(pods.len() == 1 && pods.iter().all(is_new))
        })
    }

    /// The MPS daemons that run on the node; the same program gives them commands.
    pub fn mps_daemons(&self) -> Result<Vec<u32>> {
        self.cluster.processes(|args| {
            let is_program = |program: &String| program.ends_with(crate::gpus::mps::DAEMON);
            args.first().is_some_and(is_program) && args.iter().any(|arg| arg == "--as-daemon")
        })
    }

    /// The processes of MPS servers.
    pub fn mps_servers(&self) -> Result<Vec<u32>> {
        self.cluster.processes(|args| {
            let is_program = |program: &String| program.ends_with(crate::gpus::mps::SERVER);
            args.first().is_some_and(is_program)
        })
    }

    /// The plugin's pods.
    pub fn pods(&self) -> Result<Vec<Value>> {
        let pods = format!(
            "/api/v1/namespaces/{NAMESPACE}/pods?labelSelector=app.kubernetes.io/component=node"
        );
        self.cluster.api().list(&pods)
    }

    /// The driver's ResourceSlices of the node.
    pub fn slices(&self) -> Result<Vec<Value>> {
        let ours = format!(
            "spec.driver={},spec.nodeName={}",
            names::DRIVER,
            Layout::NODE
        );
        let path = format!("/apis/resource.k8s.io/v1/resourceslices?fieldSelector={ours}");
        self.cluster.api().list(&path)
    }

    /// Waits until every GPU is published, in a complete pool.
    pub fn wait_for_slices(&self) -> Result<Vec<Value>> {
        wait_for("ResourceSlices with every GPU", PATIENCE, || {
            let slices = self.slices()?;
            let devices = slices
                .iter()
                .filter_map(|slice| at(slice, "spec.devices").as_array())
                .flatten();
            let gpus = devices
                .filter(|device| at(device, "attributes.type.string") == "gpu")
                .count();
            Ok((gpus == self.gpus.count()).then_some(slices))
        })
        .with_context(|| self.explain())
    }

    /// Every published device.
    pub fn devices(&self) -> Result<Vec<Value>> {
        let slices = self.slices()?;
        let devices = slices
            .iter()
            .filter_map(|slice| at(slice, "spec.devices").as_array());
        Ok(devices.flatten().cloned().collect())
    }

    /// The taints of the published GPU with this UUID, by key.
    pub fn taints(&self, uuid: &str) -> Result<Vec<String>> {
        let slices = self.slices()?;
        let mut devices = slices
            .iter()
            .filter_map(|slice| at(slice, "spec.devices").as_array())
            .flatten();
        let found = devices.find(|found| at(found, "attributes.uuid.string") == uuid);
        let found = found.with_context(|| format!("no GPU with UUID {uuid} is published"))?;
        let taints = at(found, "taints")
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        Ok(taints
            .iter()
            .filter_map(|taint| at(taint, "key").as_str().map(str::to_owned))
            .collect())
    }

    /// The UUID of a published device.
    pub fn uuid_of(&self, device: &str) -> Result<String> {
        let slices = self.slices()?;
        let mut devices = slices
            .iter()
            .filter_map(|slice| at(slice, "spec.devices").as_array())
            .flatten();
        let found = devices.find(|found| at(found, "name") == device);
        let uuid = found.and_then(|found| at(found, "attributes.uuid.string").as_str());
        uuid.map(str::to_owned)
            .with_context(|| format!("no published device {device} has a uuid"))
    }

    /// The record of a claim, on the node.
    pub fn record(&self, claim_uid: &str) -> PathBuf {
        self.plugin_dir()
            .join("claims")
            .join(format!("{claim_uid}.json"))
    }

    /// The folder with the metadata of a claim's devices, on the node.
    pub fn metadata(&self, claim_uid: &str) -> PathBuf {
        self.cluster
            .node_path("/run/divvy")
            .join(names::DRIVER)
            .join("metadata")
            .join(claim_uid)
    }

    /// The CDI files of a claim, on the node. A plugin that was killed while it wrote one has left
    /// a temporary file, which begins with a dot and which no runtime reads.
    pub fn cdi_files(&self, claim_uid: &str) -> Result<Vec<PathBuf>> {
        let folder = self.cluster.node_path("/run/cdi");
        let mut files = Vec::new();
        for entry in fs_err::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with('.') && name.contains(claim_uid) {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Waits until nothing on the node is left of a claim.
    pub fn wait_until_unprepared(&self, claim_uid: &str) -> Result<()> {
        poll(
            &format!("unprepare of claim {claim_uid} (record and CDI file gone)"),
            PATIENCE,
            || Ok(!self.record(claim_uid).exists() && self.cdi_files(claim_uid)?.is_empty()),
        )
    }

    /// The plugin's folder, on the node.
    pub fn plugin_dir(&self) -> PathBuf {
        self.cluster
            .node_path(format!("/var/lib/kubelet/plugins/{}", names::DRIVER))
    }

    /// Returns the last lines of the plugin, for an error message.
    fn explain(&self) -> String {
        let args = [
            "logs",
            "--namespace",
            NAMESPACE,
            "--selector=app.kubernetes.io/component=node",
            "--tail=10",
        ];
        let said = self
            .cluster
            .kubectl(&args)
            .unwrap_or_else(|error| format!("{error:#}"));
        format!("the plugin's last lines:\n{said}")
    }
}

/// The plugin finds the driver below [`Gpus::root`], and containers get it from where the node
/// itself has it.
fn mount_driver(node: &Cluster, gpus: &Gpus) -> Result<()> {
    let files = gpus.driver_files().display().to_string();
    output(&mut node.command("mkdir", &["--parents", Gpus::DRIVER_ROOT]))?;
    output(&mut node.command("mount", &["--bind", &files, Gpus::DRIVER_ROOT])).map(drop)
}

/// The node's `/dev` has its GPUs, as on a real node, and what the machine's has. It is a mount of
/// its own, so that the plugin, which sees the rest of [`Gpus::root`] read-only, may make nodes
/// there.
fn mount_devices(node: &Cluster, gpus: &Gpus) -> Result<()> {
    const SCRIPT: &str = r#"set -eu
        mount --bind "$1" "$1"
        for entry in /dev/*; do
            to=$1/${entry#/dev/}
            if [ -L "$entry" ]; then cp -P "$entry" "$to"
            elif [ -d "$entry" ]; then mkdir -p "$to" && mount --rbind "$entry" "$to"
            else touch "$to" && mount --bind "$entry" "$to"; fi
        done
        mount --rbind "$1" /dev"#;
    let dev = gpus.root().join("dev").display().to_string();
    output(&mut node.command("/bin/sh", &["-c", SCRIPT, "sh", &dev])).map(drop)
}

/// The chart's folder.
pub fn chart() -> String {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/chart/divvy").to_owned()
}

/// The objects that a template of the chart makes with this value on.
pub fn rendered(cluster: &Cluster, template: &str, value: &str) -> Result<Vec<Value>> {
    let (only, on) = (format!("templates/{template}"), format!("{value}=true"));
    let yaml = helm(
        cluster,
        &[
            "template",
            "divvy",
            &chart(),
            "--show-only",
            &only,
            "--set",
            &on,
        ],
    )?;
    serde_saphyr::from_multiple(&yaml).with_context(|| format!("the chart's {only} is not YAML"))
}

/// Runs helm on a cluster and returns what it printed. The image is on the nodes, also where the
/// values are not those of [`Driver::values`].
pub fn helm(cluster: &Cluster, args: &[&str]) -> Result<String> {
    let preloaded: &[&str] = if matches!(args.first(), Some(&("install" | "template"))) {
        &["--set", "image.preloaded=true"]
    } else {
        &[]
    };
    output(&mut cluster.command(parts::helm()?, &[args, preloaded].concat()))
}
