//! `divvy defrag --apply`: the evictions of a plan, and what came of them.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_fleet::Cluster;
use divvy_fleet::defrag::{Plan, plan};
use divvy_telemetry::stop_on_signals;
use kube::Client;
use serde::Serialize;

use super::carry_out::{self, Settings, Wish, read};
use super::{Args, Asked, table, wanted};
use crate::{Usage, format};

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
        planned(&client, args, &mut progress).await.context(server)
    })?;
    format::show(&done, args.source.output.format(), |done| done.why.clone())?;
    Ok(if done.fits {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn planned(client: &Client, args: &Args, say: &mut dyn FnMut(&str)) -> Result<Done> {
    let cluster = read(client).await?;
    let first = wanted(args, &cluster).map_err(|error| Usage(error.to_string()))?;
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
    let settings = Settings {
        kubernetes: args.source.kubernetes,
        patience: Duration::from_secs(args.patience),
        driver: None,
        stop: stop_on_signals().context("failed to handle signals")?,
    };
    let again = |cluster: &Cluster| match wanted(args, cluster) {
        Err(Asked::Request(error)) => Wish::Gone(error.to_string()),
        Err(Asked::Pod(error)) => Wish::of(Err(error)),
        Ok(wanted) => Wish::Open(wanted),
    };
    let carried_out = carry_out::carry_out(client, &plan, &settings, &again, say).await;
    done.evicted = carried_out
        .evicted
        .iter()
        .map(ToString::to_string)
        .collect();
    done.fits = carried_out.fits;
    done.why = carried_out.why;
    Ok(done)
}

#[cfg(test)]
mod tests;
