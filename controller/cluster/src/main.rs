//! The binary: flags in, exit code out; everything else is [`divvy_cluster_controller`].

mod args;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use divvy_cluster_controller::{Config, run};
use divvy_telemetry::{HttpServer, MetricsRegistry, Readiness, init_logs, stop_on_signals};
use kube::Client;
use tokio::net::TcpListener;

use crate::args::Args;

fn main() -> ExitCode {
    // First of all: a process has one TLS provider, and kube's client panics if none is installed.
    drop(rustls::crypto::ring::default_provider().install_default());
    match start(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Logs may be what could not be set up.
            drop(writeln!(
                std::io::stderr(),
                "divvy-cluster-controller: {error:#}"
            ));
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn start(args: Args) -> Result<()> {
    init_logs(args.log_format, &args.log_level)
        .context("failed to set up logging (--log-format, --log-level)")?;
    let mut kube = kube::Config::infer()
        .await
        .context("no access to the Kubernetes API")?;
    // An answer that stops in the middle. A watch may be silent for as long as it lives: just under
    // five minutes.
    kube.read_timeout = Some(Duration::from_mins(5));
    kube.default_retry = false;
    let client = Client::try_from(kube).context("no access to the Kubernetes API")?;
    let (metrics, readiness) = (MetricsRegistry::new(), Readiness::new());
    let stop = stop_on_signals().context("failed to handle signals")?;
    let listener = TcpListener::bind(&args.http.0[..]).await;
    let listener =
        listener.with_context(|| format!("failed to listen on {:?} (--http)", args.http.0))?;
    let server = HttpServer::new(metrics.clone(), readiness.clone());
    let serving = tokio::spawn(server.serve(listener, stop.clone().cancelled_owned()));
    run(config(args), client, &metrics, &readiness, stop.clone()).await;
    stop.cancel();
    serving.await.context("the HTTP server failed")
}

fn config(args: Args) -> Config {
    Config {
        driver: args.driver_name,
        namespace: args.namespace,
        lease: args.lease,
        identity: args.identity,
        dry_run: args.dry_run,
        per_minute: args.evictions_per_minute,
        node_labels: args.node_labels,
        quota: args.quota,
        look: Duration::from_secs(10),
        renew: Duration::from_secs(2),
    }
}
