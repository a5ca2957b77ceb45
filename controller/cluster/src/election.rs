//! Holds the Lease, or tries for it.

use std::time::Duration;

use divvy_telemetry::Gauge;
use divvy_telemetry::chain;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::Clock;
use crate::lease::Election;

const CONFLICT: u16 = 409;

/// Until when this instance acts, and whether, for metrics.
type Leads = (watch::Sender<Option<Duration>>, Gauge);

/// Runs until `stop`, then gives the Lease back.
pub(crate) async fn run(
    leases: Api<Lease>,
    mut election: Election,
    clock: Clock,
    (leads, gauge): Leads,
    every: Duration,
    stop: CancellationToken,
) {
    let mut led = false;
    loop {
        if let Err(error) = attempt(&leases, &mut election, clock).await {
            tracing::warn!(error = chain(&error), "failed to get the Lease");
        }
        let until = election.leads_until();
        let leading = until.is_some_and(|until| clock.now() < until);
        if leading != led {
            tracing::info!(leading, "leader election");
            led = leading;
        }
        gauge.set(i64::from(leading));
        leads.send_replace(until);
        tokio::select! {
            () = stop.cancelled() => break,
            () = sleep(every) => {}
        }
    }
    if let Err(error) = release(&leases, &mut election).await {
        tracing::warn!(
            error = chain(&error),
            "failed to give the Lease back; another instance waits for its end"
        );
    }
}

async fn attempt(
    leases: &Api<Lease>,
    election: &mut Election,
    clock: Clock,
) -> Result<(), kube::Error> {
    let began = clock.now();
    let found = leases.get_opt(&election.name).await?;
    let Some(lease) = election.next(found.as_ref(), began, Timestamp::now()) else {
        return Ok(());
    };
    let written = match found {
        None => leases.create(&PostParams::default(), &lease).await,
        Some(_) => {
            leases
                .replace(&election.name, &PostParams::default(), &lease)
                .await
        }
    };
    match written {
        Ok(_) => election.wrote(began),
        // Another instance was faster.
        Err(kube::Error::Api(status)) if status.code == CONFLICT => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

async fn release(leases: &Api<Lease>, election: &mut Election) -> Result<(), kube::Error> {
    let Some(found) = leases.get_opt(&election.name).await? else {
        return Ok(());
    };
    if let Some(free) = election.release(&found) {
        leases
            .replace(&election.name, &PostParams::default(), &free)
            .await?;
    }
    Ok(())
}
