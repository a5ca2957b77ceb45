//! `divvy defrag --apply`: the evictions of a plan, one after the other.
//!
//! Each eviction is asked of the Eviction API, which counts budgets. After each one the cluster is
//! read again, and the rest is left undone unless it is still what makes room.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_controller::{budget, evict};
use divvy_fleet::Cluster;
use divvy_fleet::defrag::{Look, Plan, Victim, Wanted, look_again, plan};
use divvy_telemetry::Chain;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::{Args, read, table, wanted};
use crate::{Usage, format};

/// Time between looks at a pod that is ending.
const PAUSE: Duration = Duration::from_secs(1);

/// Outcome of the evictions.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Done {
    plan: Option<Plan>,
    /// Evicted pods, as namespace and name.
    evicted: Vec<String>,
    /// Mark of a wanted pod that fits now.
    fits: bool,
    /// State of things at the end, in one sentence.
    why: String,
}

/// Outcome of an eviction.
enum Evicted {
    Yes,
    Gone,
    /// Nothing more is evicted, for this reason.
    Stop(String),
}

pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let mut progress = |line: &str| {
        // The outcome is shown also where nothing reads the progress.
        let _ = writeln!(std::io::stderr(), "{line}");
    };
    let done = runtime.block_on(async {
        let (client, _, server) = args.source.access.client().await?;
        carry_out(&client, args, &mut progress)
            .await
            .context(server)
    })?;
    format::show(&done, args.source.output.format(), |done| done.why.clone())?;
    Ok(if done.fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn carry_out(client: &Client, args: &Args, say: &mut dyn FnMut(&str)) -> Result<Done> {
    let mut cluster = read(client).await?;
    let first = wanted(args, &cluster).map_err(|error| Usage(format!("{error:#}")))?;
    let answer = plan(&cluster, &first, args.source.kubernetes)?;
    let text = table(&answer);
    let mut done = Done {
        fits: false,
        evicted: Vec::new(),
        why: text.clone(),
        plan: answer.plan,
    };
    let Some(plan) = done.plan.clone() else {
        return Ok(done);
    };
    if plan.evict.is_empty() {
        done.fits = true;
        return Ok(done);
    }
    say(&text);
    let mut rest = plan.evict.as_slice();
    while let [victim, later @ ..] = rest {
        let name = format!("{}/{}", victim.namespace, victim.name);
        match eviction(client, victim, args.patience).await? {
            Evicted::Yes => {
                say(&format!("evicted {name}"));
                done.evicted.push(name);
            }
            Evicted::Gone => say(&format!("{name} is gone already")),
            Evicted::Stop(why) => {
                done.why = stopped(&done, &why);
                return Ok(done);
            }
        }
        rest = later;
        let left = std::mem::take(&mut cluster.left);
        cluster = read(client).await?;
        cluster.left = left;
        cluster.left.insert(victim.uid.clone());
        match look(args, &cluster, &plan.node, rest)? {
            Look::AsPlanned => {}
            Look::Fits { node, devices } => {
                let devices = devices.join(", ");
                done.fits = true;
                done.why = format!(
                    "{} evicted; now it fits node {node}: {devices}",
                    counted(done.evicted.len())
                );
                return Ok(done);
            }
            Look::Changed(why) => {
                done.why = stopped(&done, &why);
                return Ok(done);
            }
        }
    }
    Ok(done)
}

fn look(args: &Args, cluster: &Cluster, node: &str, rest: &[Victim]) -> Result<Look> {
    let wanted: Wanted = match wanted(args, cluster) {
        Ok(wanted) => wanted,
        Err(error) => return Ok(Look::Changed(format!("{error:#}"))),
    };
    Ok(look_again(
        cluster,
        &wanted,
        (node, rest),
        args.source.kubernetes,
    )?)
}

/// Evicts a pod and waits until it is gone.
async fn eviction(client: &Client, victim: &Victim, patience: u64) -> Result<Evicted> {
    let pods = Api::<Pod>::namespaced(client.clone(), &victim.namespace);
    let name = format!("{}/{}", victim.namespace, victim.name);
    match evict(&pods, &victim.name, &victim.uid).await {
        Ok(()) => {}
        // Of a conflict, another pod has the name.
        Err(kube::Error::Api(status)) if [404, 409].contains(&status.code) => {
            return Ok(Evicted::Gone);
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
            return Ok(Evicted::Stop(why));
        }
        Err(error) => {
            let why = format!(
                "no answer, and {name} may be evicted or not: {}",
                Chain(&error)
            );
            return Ok(Evicted::Stop(why));
        }
    }
    let until = Instant::now() + Duration::from_secs(patience);
    loop {
        let there = pods.get_opt(&victim.name).await.context("pods")?;
        if there.is_none_or(|pod| pod.metadata.uid.as_deref() != Some(&victim.uid)) {
            return Ok(Evicted::Yes);
        }
        if Instant::now() >= until {
            let why =
                format!("{name} is evicted and has not ended after {patience} s (--patience)");
            return Ok(Evicted::Stop(why));
        }
        sleep(PAUSE).await;
    }
}

fn counted(pods: usize) -> String {
    match pods {
        1 => "1 pod".to_owned(),
        pods => format!("{pods} pods"),
    }
}

fn stopped(done: &Done, why: &str) -> String {
    let planned = done.plan.as_ref().map_or(0, |plan| plan.evict.len());
    format!(
        "stopped with {} of {planned} evicted: {why}",
        counted(done.evicted.len())
    )
}

#[cfg(test)]
mod tests;
