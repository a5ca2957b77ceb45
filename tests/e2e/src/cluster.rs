//! A cluster: brought up, used, taken down.

mod second;

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use serde_json::json;

use crate::api::{Api, has_condition};
use crate::cgroups;
use crate::components::Component;
use crate::config::Layout;
use crate::images;
use crate::logs;
use crate::namespaces::Namespaces;
use crate::oci::Image;
use crate::options::{Extent, Gates, Options};
use crate::parts::Parts;
use crate::process::{Daemon, Signal, output, output_of};
use crate::wait::{poll, wait_for};

/// Time that a start may take on a busy machine. It takes seconds on an idle one.
const START: Duration = Duration::from_mins(2);

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    name: String,
    parts: Parts,
    layout: Layout,
    namespaces: Namespaces,
    owned: bool,
}

impl Cluster {
    /// Brings a cluster up, until its node is Ready and pods can be made.
    pub fn up(options: &Options) -> Result<Self> {
        let state = state_dir(&options.name)?;
        if Namespaces::find(&state)?.is_some() {
            let name = &options.name;
            bail!(
                "cluster {name} is already up; take it down with: cargo xtask cluster down --name {name}"
            );
        }
        let layout = Layout::new(&options.name, &state);
        Self::create(options, layout, |cluster| {
            cluster.start(options.extent, options.gates)
        })
    }

    fn create(
        options: &Options,
        layout: Layout,
        start: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<Self> {
        let (name, state) = (options.name.clone(), state_dir(&options.name)?);
        let parts = Parts::ensure(&options.version)?;
        clean(&name, &state)?;
        make(&state)?;
        fs::write(state.join("version"), &options.version)?;
        cgroups::create(&layout.cgroup())?;
        let namespaces = Namespaces::create(&state, layout.address(), options.owned)?;
        let mut cluster = Self {
            name,
            parts,
            layout,
            namespaces,
            owned: options.owned,
        };
        if let Err(error) = start(&mut cluster) {
            let logs = cluster.component_tails();
            // Kept for inspection, unless it could not be ended with us.
            if cluster.owned {
                cluster.take_down()?;
            }
            return Err(error.context(format!("cluster {} did not start\n{logs}", options.name)));
        }
        Ok(cluster)
    }

    /// Finds a running cluster by name.
    pub fn find(name: &str) -> Result<Option<Self>> {
        let state = state_dir(name)?;
        let Some(namespaces) = Namespaces::find(&state)? else {
            return Ok(None);
        };
        let parts = Parts::ensure(fs::read_to_string(state.join("version"))?.trim())?;
        let layout = Layout::new(name, &state);
        Ok(Some(Self {
            name: name.to_owned(),
            parts,
            layout,
            namespaces,
            owned: false,
        }))
    }

    /// Ends a cluster by name and removes all it left on the host. Nothing to end is fine.
    pub fn down(name: &str) -> Result<()> {
        let state = state_dir(name)?;
        if let Some(mut namespaces) = Namespaces::find(&state)? {
            namespaces.end()?;
        }
        clean(name, &state)
    }

    /// The names of all clusters that have a state folder, running or not.
    pub fn names() -> Result<Vec<String>> {
        let Ok(entries) = fs::read_dir(clusters_dir()) else {
            return Ok(Vec::new());
        };
        let mut names: Vec<String> = entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        names.sort();
        Ok(names)
    }

    fn start(&mut self, extent: Extent, gates: Gates) -> Result<()> {
        self.layout.write(&self.parts)?;
        for &component in extent.components() {
            let path = self.parts.path_env().to_string_lossy().into_owned();
            let env = [
                ("PATH".to_owned(), path),
                ("HOME".to_owned(), "/root".to_owned()),
            ];
            let mut args = component.args(&self.parts, &self.layout)?;
            if (component, extent) == (Component::Scheduler, Extent::Packing) {
                args.push(format!("--config={}", self.layout.file("packing.yaml")));
            }
            args.extend(
                gates
                    .flag()
                    .filter(|_| component.has_gates())
                    .map(str::to_owned),
            );
            self.component(component).define(&args, &env)?;
        }
        if extent != Extent::Node {
            self.component(Component::Etcd).start()?;
            self.component(Component::ApiServer).start()?;
        }
        if !extent.is_scheduling() {
            // Meanwhile: the API server starts.
            self.component(Component::Containerd).start()?;
            let socket = self.node_path("/run/containerd/containerd.sock");
            self.alive_until(Component::Containerd, "containerd's socket", || {
                Ok(socket.exists())
            })?;
            for image in images::common(&self.parts)? {
                self.import(&image)?;
            }
        }
        if extent != Extent::Node {
            // The API server makes the certificate that every client wants to see.
            let ca = PathBuf::from(self.layout.ca());
            self.alive_until(
                Component::ApiServer,
                "certificate of the API server",
                || Ok(ca.exists()),
            )?;
            self.component(Component::ApiProxy).start()?;
            self.wait_for_api()?;
            self.let_nodes_read_claims()?;
        }
        for &component in extent.components() {
            self.component(component).start()?;
        }
        if extent.is_scheduling() {
            return Ok(());
        }
        let node = format!("/api/v1/nodes/{}", self.layout.node());
        self.alive_until(Component::Kubelet, "ready node", || {
            Ok(self
                .api()
                .get(&node)?
                .is_some_and(|node| has_condition(&node, "Ready")))
        })?;
        if extent == Extent::Node {
            return Ok(());
        }
        self.alive_until(
            Component::ControllerManager,
            "default ServiceAccount",
            || {
                Ok(self
                    .api()
                    .get("/api/v1/namespaces/default/serviceaccounts/default")?
                    .is_some())
            },
        )
    }

    /// The node authorizer allows a kubelet to read a claim only after it has itself heard of the
    /// pod's binding. On a busy machine the kubelet was sometimes faster, was refused, and then
    /// tried again a minute later: true of any cluster, but not what is tested here. Rare: without
    /// this, none of 110 pods on 1.37.1 was refused at a load of 20.
    fn let_nodes_read_claims(&self) -> Result<()> {
        let name = "e2e-nodes-read-claims";
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let reading = json!({"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]});
        let role = json!({"metadata": {"name": name}, "rules": [reading]});
        let binding = json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "system:nodes"}],
        });
        self.api().create(&format!("{rbac}/clusterroles"), &role)?;
        self.api()
            .create(&format!("{rbac}/clusterrolebindings"), &binding)
            .map(drop)
    }

    /// Waits until the API server says that it is ready.
    pub fn wait_for_api(&self) -> Result<()> {
        self.alive_until(Component::ApiServer, "ready API server", || {
            Ok(self.api().text("/readyz")? == "ok")
        })
    }

    /// Waits, but not for something that a dead program will never do.
    fn alive_until(
        &self,
        component: Component,
        what: &str,
        mut check: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        let daemon = self.component(component);
        let ended = wait_for(what, START, || {
            if !daemon.is_running() {
                return Ok(Some(true));
            }
            Ok(check()?.then_some(false))
        })?;
        ensure!(
            !ended,
            "{} has ended\n{}",
            component.name(),
            daemon.log_tail()
        );
        Ok(())
    }

    /// The cluster's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its paths and addresses.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Its folder on the host.
    pub fn state(&self) -> &Path {
        self.namespaces.state()
    }

    /// Its objects, to be read.
    pub fn api(&self) -> Api {
        Api::new(self.layout.api_socket())
    }

    /// A component, to be stopped, killed, restarted.
    pub fn component(&self, component: Component) -> Daemon<'_> {
        self.daemon(component.name())
    }

    /// Any long-running program of this cluster by name: a component, or a host process that a test
    /// has defined.
    pub fn daemon(&self, name: &str) -> Daemon<'_> {
        Daemon::new(&self.namespaces, name)
    }

    /// A connection to a port of the node's loopback address.
    pub fn connect_to(&self, port: u16) -> Result<TcpStream> {
        self.namespaces.connect_to(port)
    }

    /// Where a file of the node is for us; `/var/run` must be written `/run`.
    pub fn node_path(&self, inside: impl AsRef<Path>) -> PathBuf {
        self.namespaces.path(inside)
    }

    /// A command on the node, with the cluster's programs in its `PATH` and its admin's kubeconfig.
    pub fn command<S: AsRef<OsStr>>(&self, program: impl AsRef<OsStr>, args: &[S]) -> Command {
        let mut command = self.namespaces.command(program, args);
        let mut path = self.programs().into_os_string();
        path.push(":");
        path.push(self.parts.path_env());
        command.env("PATH", path);
        command.env("KUBECONFIG", self.layout.kubeconfig("admin"));
        command.env("CONTAINERD_NAMESPACE", "k8s.io");
        command
    }

    fn programs(&self) -> PathBuf {
        self.state().join("bin")
    }

    /// Makes a program available to [`Cluster::command`] under this name.
    pub fn link(&self, name: &str, program: &Path) -> Result<()> {
        fs::create_dir_all(self.programs())?;
        Ok(fs::os::unix::fs::symlink(
            fs::canonicalize(program)?,
            self.programs().join(name),
        )?)
    }

    /// Runs kubectl and returns what it printed; a failure is an error with what it said.
    pub fn kubectl(&self, args: &[&str]) -> Result<String> {
        output(&mut self.command("kubectl", args))
    }

    /// Creates or changes the objects of a YAML text.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        let args = [
            "apply",
            "--server-side",
            "--force-conflicts",
            "--filename",
            "-",
        ];
        output_of(&mut self.command("kubectl", &args), yaml).map(drop)
    }

    /// Makes an image available to pods.
    pub fn import(&self, image: &Image) -> Result<()> {
        // Cases that run at once import images, too.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let archive = self.state().join(format!("image-{number}.tar"));
        image.write_archive(&archive)?;
        let archive_name = archive.display().to_string();
        output(&mut self.command(
            "ctr",
            &["--namespace", "k8s.io", "images", "import", &archive_name],
        ))?;
        Ok(fs::remove_file(archive)?)
    }

    /// Gives an image further names.
    pub fn tag(&self, image: &str, names: &BTreeSet<String>) -> Result<()> {
        let names = names.iter().map(String::as_str);
        let args: Vec<&str> = ["images", "tag", image].into_iter().chain(names).collect();
        output(&mut self.command("ctr", &args)).map(drop)
    }

    /// The process ids, on the node, of programs whose command line fits.
    pub fn processes(&self, fits: impl Fn(&[String]) -> bool) -> Result<Vec<u32>> {
        let mut pids = Vec::new();
        for entry in fs::read_dir(self.node_path("/proc"))? {
            let entry = entry?;
            let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
                continue;
            };
            // It may have ended since it was listed; then it has no command line either.
            let bytes = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let args: Vec<String> = bytes
                .split(|&byte| byte == 0)
                .map(|arg| String::from_utf8_lossy(arg).into_owned())
                .collect();
            if fits(&args) && self.namespaces.is_alive(pid) {
                pids.push(pid);
            }
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// Signals a process of the node.
    pub fn send(&self, pid: u32, signal: Signal) -> Result<()> {
        self.namespaces.send(pid, signal)
    }

    /// Writes everything that explains a failure into a folder: logs, events, objects, files of the
    /// node.
    pub fn collect_logs(&self, dir: &Path) -> Result<()> {
        logs::collect(self, dir)
    }

    /// Returns true if the cluster's first process lives.
    pub fn is_up(&self) -> bool {
        self.namespaces.are_alive()
    }

    /// Returns the last lines of the components that have ended.
    fn component_tails(&self) -> String {
        let mut tails = Vec::new();
        for component in Component::ALL {
            let daemon = self.component(component);
            if daemon.log().exists() && !daemon.is_running() {
                tails.push(format!(
                    "{} has ended:\n{}",
                    component.name(),
                    daemon.log_tail()
                ));
            }
        }
        tails.join("\n")
    }

    fn take_down(&mut self) -> Result<()> {
        self.namespaces.end()?;
        if !self.layout.is_first() {
            self.forget()?;
        }
        clean(&self.name, self.namespaces.state())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.owned
            && self.is_up()
            && let Err(error) = self.take_down()
        {
            crate::process::say(&format!(
                "cluster {} is not entirely gone: {error:#}",
                self.name
            ));
        }
    }
}

fn clusters_dir() -> PathBuf {
    // Not the runtime folder: that is below /run, which is another one inside the namespaces.
    env::temp_dir().join("divvy-clusters")
}

fn state_dir(name: &str) -> Result<PathBuf> {
    let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    ensure!(
        (1..=32).contains(&name.len()) && name.chars().all(fine),
        "cluster name {name:?} is not 1 to 32 of a-z, 0-9 and -"
    );
    Ok(clusters_dir().join(name))
}

/// Makes the state folder. Another cluster that begins or ends removes the folder above it while
/// that is empty.
fn make(state: &Path) -> Result<()> {
    const TIMES: usize = 100;
    for _ in 1..TIMES {
        match fs::create_dir_all(state) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            made => return Ok(made?),
        }
    }
    Ok(fs::create_dir_all(state)?)
}

/// Removes what a cluster that has ended left on the host.
fn clean(name: &str, state: &Path) -> Result<()> {
    cgroups::remove(&Layout::new(name, state).cgroup())?;
    if state.exists() {
        fs::remove_dir_all(state).context("cannot remove the state folder of the cluster")?;
    }
    // Gone when this was the last; another cluster's folder keeps it.
    let _ = fs::remove_dir(clusters_dir());
    poll(
        "removal of the state folder",
        Duration::from_secs(1),
        || Ok(!state.exists()),
    )
}
