//! A control plane with nodes that are only objects, and pods that are bound and never run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use divvy_e2e::api::{Api, at};
use divvy_e2e::driver::{chart, helm};
use divvy_e2e::objects::{claim_for, collection};
use divvy_e2e::process::Signal;
use divvy_e2e::{Cluster, Component, Extent, Gates, Options, poll};
use serde_json::{Value, json};

use super::layout::Asked;
use crate::offered::{Offered, slices};

const NAME: &str = "scheduler-bench";
const NAMESPACE: &str = "default";
/// For what takes seconds.
const PATIENCE: Duration = Duration::from_mins(1);
/// Ticks of a second in `/proc/PID/stat`, whatever the kernel's own are.
const TICKS: f64 = 100.0;
/// How long nothing may be bound before that is an error.
const STUCK: Duration = Duration::from_mins(1);

/// What binding took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// Bindings per second.
    pub(crate) rate: f64,
    /// Processor time of the scheduler for one, in seconds: what else the machine does falls on the rate, not on it.
    pub(crate) cpu: f64,
}

/// How much is published, on all nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) devices: u64,
    pub(crate) slices: u64,
}

/// The control plane and its nodes. Dropping it ends everything.
pub(crate) struct World {
    cluster: Cluster,
    counts: Counts,
}

impl World {
    /// Brings it up with so many nodes that all publish the same.
    pub(crate) fn new(version: &str, offered: &Offered, nodes: usize) -> Result<Self> {
        Cluster::down(NAME)?;
        let cluster = Cluster::up(&Options {
            name: NAME.to_owned(),
            version: version.to_owned(),
            owned: true,
            extent: Extent::Scheduling,
            gates: Gates::Default,
        })?;
        let api = cluster.api();
        // Pods need an account, which only a controller would make.
        let namespace = format!("/api/v1/namespaces/{NAMESPACE}");
        poll("namespace", PATIENCE, || Ok(api.get(&namespace)?.is_some()))?;
        api.create(&format!("{namespace}/serviceaccounts"), &json!({"metadata": {"name": "default"}}))?;
        let classes = ["template", "divvy", &chart(), "--show-only", "templates/deviceclass.yaml"];
        cluster.apply(&helm(&cluster, &classes)?)?;
        let mut counts = Counts::default();
        for number in 0..nodes {
            let name = format!("node-{number:03}");
            let uid = create_node(&api, &name)?;
            let pool = offered.carve(&name).pool;
            counts.devices += pool.devices().count() as u64;
            for slice in slices(&pool, &name, &uid) {
                counts.slices += 1;
                api.create("/apis/resource.k8s.io/v1/resourceslices", &serde_json::to_value(&slice)?)?;
            }
        }
        Ok(Self { cluster, counts })
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts
    }

    /// Lets the scheduler bind so many pods with a claim each, and says what that took. Everything is free before, and
    /// again afterwards.
    pub(crate) fn bind(&self, asked: &Asked, pods: usize) -> Result<Pace> {
        let (api, scheduler) = (self.cluster.api(), self.cluster.component(Component::Scheduler));
        // Stopped, so that it finds all pods waiting: how fast this program creates them is not measured.
        scheduler.stop(Signal::Term)?;
        let names: Vec<String> = (0..pods).map(|number| format!("pod-{number:04}")).collect();
        for name in &names {
            api.create(&all("ResourceClaim")?, &claim_for(name, &asked.spec()))?;
            api.create(&all("Pod")?, &pod(name))?;
        }
        scheduler.start()?;
        let cpu = self.wait_until_bound(&api, pods)?;
        let rate = bindings(&api, pods)?;
        forget(&api, &names)?;
        Ok(Pace { rate, cpu })
    }

    /// Returns the processor time of the scheduler for one of them, in seconds.
    fn wait_until_bound(&self, api: &Api, pods: usize) -> Result<f64> {
        // Those that wait are few enough to be listed, and the API server has an index of them.
        let waiting = format!("{}?fieldSelector=spec.nodeName%3D", all("Pod")?);
        let (mut left, mut since) = (pods, Instant::now());
        // From the first look at which it binds: until then it reads what there is.
        let mut begun = None;
        while left > 0 {
            let now = api.list(&waiting)?.len();
            if now != left {
                (left, since) = (now, Instant::now());
                begun.get_or_insert((now, self.cpu()?));
            }
            let tail = || self.cluster.component(Component::Scheduler).log_tail();
            ensure!(since.elapsed() < STUCK, "{left} of {pods} pods are not bound\n{}", tail());
            std::thread::sleep(Duration::from_millis(200));
        }
        let (rest, before) =
            begun.filter(|(rest, _)| *rest > 0).context("all pods were bound at one look")?;
        Ok((self.cpu()? - before) / f64::from(u32::try_from(rest)?))
    }

    /// Processor time that the scheduler has used, in seconds.
    fn cpu(&self) -> Result<f64> {
        let pid = self.cluster.component(Component::Scheduler).pid().context("the scheduler does not run")?;
        let stat = fs_err::read_to_string(self.cluster.node_path(format!("/proc/{pid}/stat")))?;
        let fields: Vec<&str> = stat.rsplit_once(") ").context("no stat")?.1.split(' ').collect();
        let ticks = |at: usize| fields.get(at)?.parse::<u32>().ok();
        let ticks =
            ticks(11).zip(ticks(12)).map(|(user, system)| user + system).context("no processor time")?;
        Ok(f64::from(ticks) / TICKS)
    }
}

/// Bindings per second, by the scheduler's own clock: the time it wrote into its Events.
fn bindings(api: &Api, pods: usize) -> Result<f64> {
    let path =
        format!("/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events?fieldSelector=reason%3DScheduled");
    let mut times = Vec::new();
    poll("events of all bindings", PATIENCE, || {
        let events = api.list(&path)?;
        times = events.iter().filter_map(|event| at(event, "eventTime").as_str()?.parse().ok()).collect();
        Ok(times.len() == pods)
    })?;
    times.sort_unstable();
    let (first, last): (jiff::Timestamp, jiff::Timestamp) =
        times.first().copied().zip(times.last().copied()).context("no pod was bound")?;
    let seconds = last.duration_since(first).as_secs_f64();
    ensure!(seconds > 0.0, "all pods were bound at once");
    Ok(f64::from(u32::try_from(pods - 1)?) / seconds)
}

/// Removes pods, claims and events.
fn forget(api: &Api, names: &[String]) -> Result<()> {
    let now = json!({"gracePeriodSeconds": 0});
    api.delete(&all("Pod")?, &now)?;
    for name in names {
        // What the controller of claims would do: there is none here.
        let path = format!("{}/{name}", all("ResourceClaim")?);
        api.patch(&path, &json!({"metadata": {"finalizers": null}}))?;
    }
    api.delete(&all("ResourceClaim")?, &now)?;
    api.delete(&format!("/apis/events.k8s.io/v1/namespaces/{NAMESPACE}/events"), &now)?;
    for kind in ["Pod", "ResourceClaim"] {
        let path = all(kind)?;
        poll("end of all pods and claims", PATIENCE, || Ok(api.list(&path)?.is_empty()))?;
    }
    Ok(())
}

fn all(kind: &str) -> Result<String> {
    collection(kind, NAMESPACE).with_context(|| format!("unknown kind {kind}"))
}

/// A node that is Ready and has room, by its object. Returns its UID.
fn create_node(api: &Api, name: &str) -> Result<String> {
    let room = json!({"cpu": "192", "memory": "2Ti", "pods": "250"});
    let node = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Bench"}],
        },
    });
    let stored = api.create("/api/v1/nodes", &node)?;
    // Every new node has a taint that a controller removes when the node is Ready.
    api.patch(&format!("/api/v1/nodes/{name}"), &json!({"spec": {"taints": null}}))?;
    Ok(at(&stored, "metadata.uid").as_str().context("a stored node has no UID")?.to_owned())
}

fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}],
            "automountServiceAccountToken": false,
        },
    })
}
