//! Evictions of a plan, one after the other.
//!
//! The node is cordoned meanwhile: what comes in the place of an evicted pod would take the node's
//! other free devices, and the evictions would be for nothing.
//!
//! Each eviction is asked of the Eviction API, which counts budgets. After each one the cluster is
//! read again, and the rest is left undone unless it is still what makes room.

use std::time::Duration;

use anyhow::Result;
use divvy_controller::{budget, evict};
use divvy_fleet::Cluster;
use divvy_fleet::defrag::{Look, Plan, Victim, Wanted, look_again};
use divvy_fleet::waiting::WaitingError;
use divvy_telemetry::Chain;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::closed;
use crate::objects;

/// Time between looks at a pod that is ending.
const PAUSE: Duration = Duration::from_secs(1);

/// Outcome of the evictions.
#[derive(Debug, Default)]
pub(super) struct Done {
    /// Evicted pods.
    pub(super) evicted: Vec<Victim>,
    /// Mark of a wanted pod that fits now.
    pub(super) fits: bool,
    /// State of things at the end, in one sentence.
    pub(super) why: String,
}

/// Outcome of an eviction.
enum Evicted {
    Yes,
    Gone,
    /// Nothing more is evicted, for this reason.
    Stop(String),
}

/// Settings of the evictions.
#[derive(Debug, Clone)]
pub(super) struct Settings<'s> {
    /// Release of Kubernetes, 1.`kubernetes`.
    pub(super) kubernetes: u32,
    /// Time that an evicted pod has to end.
    pub(super) patience: Duration,
    /// Driver whose devices are looked at; without one, those of all.
    pub(super) driver: Option<&'s str>,
    /// Cancelled when the command is to end: the node is opened before.
    pub(super) stop: CancellationToken,
}

/// A wish, as the cluster is by then.
pub(super) enum Wish {
    Open(Wanted),
    /// The pod has its devices, as it says in words.
    Granted(String),
    /// A wish of the past, with the reason.
    Gone(String),
}

impl Wish {
    /// Returns the wish of a pod about which this is known.
    pub(super) fn of(wanted: Result<Wanted, WaitingError>) -> Self {
        match wanted {
            Ok(wanted) => Self::Open(wanted),
            Err(error @ (WaitingError::Runs(_) | WaitingError::HasDevices { .. })) => {
                Self::Granted(error.to_string())
            }
            Err(error) => Self::Gone(error.to_string()),
        }
    }
}

/// Reads a cluster: all that a plan looks at.
pub(super) async fn read(client: &Client) -> Result<Cluster> {
    Ok(Cluster {
        // Claims come before pods: a pod that is newer than its claim's list is no victim.
        claims: objects::all(client).await?,
        nodes: objects::all(client).await?,
        slices: objects::all(client).await?,
        classes: objects::all(client).await?,
        pods: objects::all(client).await?,
        budgets: objects::all(client).await?,
        ..Cluster::default()
    })
}

/// Leaves only the devices of a driver.
pub(super) fn only(mut cluster: Cluster, driver: Option<&str>) -> Cluster {
    let slices = &mut cluster.slices;
    slices.retain(|slice| driver.is_none_or(|driver| slice.spec.driver == driver));
    cluster
}

/// Carries out a plan: cordons the node, evicts, waits until replacements of moved pods are on
/// other nodes, and opens the node again. `wish` returns what is wanted as the cluster is by then;
/// `say` hears of each pod that has left.
pub(super) async fn carry_out(
    client: &Client,
    plan: &Plan,
    settings: &Settings<'_>,
    wish: &dyn Fn(&Cluster) -> Wish,
    say: &mut dyn FnMut(&str),
) -> Done {
    let mut done = Done::default();
    match closed::close(client, &plan.node).await {
        Ok(true) => {}
        Ok(false) => return done.stopped(plan, &format!("node {} is cordoned", plan.node)),
        Err(error) => {
            let why = format!("node {} cannot be cordoned: {}", plan.node, Chain(&error));
            done = done.stopped(plan, &why);
            // It may be cordoned all the same: the answer was lost.
            return done.opened(client, plan).await;
        }
    }
    let moved = closed::Moved::of(client, plan).await;
    done = evictions(client, plan, settings, wish, say).await;
    if done.fits {
        moved.settle(client, settings).await;
    }
    done.opened(client, plan).await
}

async fn evictions(
    client: &Client,
    plan: &Plan,
    settings: &Settings<'_>,
    wish: &dyn Fn(&Cluster) -> Wish,
    say: &mut dyn FnMut(&str),
) -> Done {
    let mut done = Done::default();
    let mut cluster = Cluster::default();
    let mut rest = plan.evict.as_slice();
    while let [victim, later @ ..] = rest {
        let name = victim.to_string();
        if settings.stop.is_cancelled() {
            return done.stopped(plan, "interrupted");
        }
        match eviction(client, victim, settings).await {
            Evicted::Yes => {
                say(&format!("evicted {name}"));
                done.evicted.push(victim.clone());
            }
            Evicted::Gone => say(&format!("{name} is gone already")),
            Evicted::Stop(why) => return done.stopped(plan, &why),
        }
        rest = later;
        let left = std::mem::take(&mut cluster.left);
        cluster = match read(client).await {
            Ok(cluster) => closed::opened(only(cluster, settings.driver)),
            Err(error) => return done.stopped(plan, &format!("{error:#}")),
        };
        cluster.left = left;
        cluster.left.insert(victim.uid.clone());
        let count = counted(done.evicted.len());
        let look = match wish(&cluster) {
            Wish::Open(wanted) => {
                let rest = (plan.node.as_str(), rest);
                let look = look_again(&cluster, &wanted, rest, settings.kubernetes);
                look.unwrap_or_else(|error| Look::Changed(Chain(&error).to_string()))
            }
            // The scheduler was faster than this look.
            Wish::Granted(how) => {
                done.fits = true;
                done.why = format!("{count} evicted; {how}");
                return done;
            }
            Wish::Gone(why) => Look::Changed(why),
        };
        match look {
            Look::AsPlanned => {}
            Look::Fits { node, devices } => {
                let devices = devices.join(", ");
                done.fits = true;
                done.why = format!("{count} evicted; now it fits node {node}: {devices}");
                return done;
            }
            Look::Changed(why) => return done.stopped(plan, &why),
        }
    }
    done
}

impl Done {
    /// Opens the plan's node again; what keeps it cordoned is added to the outcome.
    async fn opened(mut self, client: &Client, plan: &Plan) -> Self {
        if let Err(error) = closed::open(client, &plan.node).await {
            let (node, error) = (&plan.node, Chain(&error));
            self.fits = false;
            self.why +=
                &format!("; node {node} may be cordoned (kubectl uncordon {node}): {error}");
        }
        self
    }

    fn stopped(mut self, plan: &Plan, why: &str) -> Self {
        let (count, planned) = (counted(self.evicted.len()), plan.evict.len());
        self.why = format!("stopped with {count} of {planned} evicted: {why}");
        self
    }
}

/// Evicts a pod and waits until it is gone.
async fn eviction(client: &Client, victim: &Victim, settings: &Settings<'_>) -> Evicted {
    let pods = Api::<Pod>::namespaced(client.clone(), &victim.namespace);
    let name = victim.to_string();
    match evict(&pods, &victim.name, &victim.uid).await {
        Ok(()) => {}
        // Of a conflict, another pod has the name.
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => {
            return Evicted::Gone;
        }
        Err(kube::Error::Api(status)) => {
            let why = match (budget(&status), status.code) {
                (Some(words), _) => format!("a budget keeps {name}: {words}"),
                (None, 403) => format!(
                    "you may not evict {name}: the right to create pods/eviction in its namespace is missing"
                ),
                (None, 429) => "the API server has too much to do: try again later".to_owned(),
                (None, code) => format!("{name} is not evicted: {} ({code})", status.message),
            };
            return Evicted::Stop(why);
        }
        Err(error) => {
            let why = format!(
                "no answer, and {name} may be evicted or not: {}",
                Chain(&error)
            );
            return Evicted::Stop(why);
        }
    }
    let until = Instant::now() + settings.patience;
    loop {
        let there = match pods.get_opt(&victim.name).await {
            Ok(there) => there,
            Err(error) => {
                let why = Chain(&error);
                return Evicted::Stop(format!("{name} is evicted and may have ended: {why}"));
            }
        };
        if there.is_none_or(|pod| pod.metadata.uid.as_deref() != Some(&victim.uid)) {
            return Evicted::Yes;
        }
        if Instant::now() >= until {
            let seconds = settings.patience.as_secs();
            let why = format!("{name} is evicted and has not ended after {seconds} s (--patience)");
            return Evicted::Stop(why);
        }
        tokio::select! {
            () = settings.stop.cancelled() => {
                return Evicted::Stop(format!("{name} is evicted and has not ended: interrupted"));
            }
            () = sleep(PAUSE) => {}
        }
    }
}

fn counted(pods: usize) -> String {
    match pods {
        1 => "1 pod".to_owned(),
        pods => format!("{pods} pods"),
    }
}
