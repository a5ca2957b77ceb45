//! Flags, each with its environment twin.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use clap::Parser;
use divvy_telemetry::LogFormat;

/// Addresses of which the first that can be is listened on.
#[derive(Debug, Clone)]
pub(crate) struct Listen(pub(crate) Vec<SocketAddr>);

/// An address and a port, or `:PORT` for every address of the machine.
fn listen(text: &str) -> Result<Listen, String> {
    let refused = || "expected an address and a port, as 127.0.0.1:9441 or :9441".to_owned();
    match text.strip_prefix(':') {
        Some(port) => {
            let port: u16 = port.parse().map_err(|_| refused())?;
            // The first serves both, where the kernel has IPv6.
            Ok(Listen(vec![
                (Ipv6Addr::UNSPECIFIED, port).into(),
                (Ipv4Addr::UNSPECIFIED, port).into(),
            ]))
        }
        None => Ok(Listen(vec![text.parse().map_err(|_| refused())?])),
    }
}

/// The cluster controller of divvy: evicts the pods of claims that GpuPolicies call to reclaim.
#[derive(Debug, Clone, Parser)]
#[command(name = "divvy-cluster-controller", version, about)]
pub(crate) struct Args {
    /// Driver name in claims.
    #[arg(long, env = "DRIVER_NAME", default_value = divvy_api::names::DRIVER)]
    pub(crate) driver_name: String,
    /// Namespace of the Lease by which instances agree on the one that acts.
    #[arg(long, env = "POD_NAMESPACE")]
    pub(crate) namespace: String,
    /// Name of that Lease.
    #[arg(long, env = "LEASE", default_value = "divvy-cluster-controller")]
    pub(crate) lease: String,
    /// Name of this instance, different from all others: that of its pod.
    #[arg(long, env = "POD_NAME")]
    pub(crate) identity: String,
    /// Report pods that would be evicted, with Events and metrics, and evict none.
    #[arg(long, env = "DRY_RUN", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) dry_run: bool,
    /// Maximum number of pods evicted in any minute, in the whole cluster.
    #[arg(long, env = "EVICTIONS_PER_MINUTE", default_value_t = 5)]
    pub(crate) evictions_per_minute: usize,
    /// Label nodes with what their GpuNodes say, as GPU Feature Discovery does.
    #[arg(long, env = "NODE_LABELS", default_value_t = false, action = clap::ArgAction::Set)]
    pub(crate) node_labels: bool,
    /// Let claims through as the GpuQuota of their namespace allows.
    #[arg(long, env = "QUOTA", default_value_t = false, action = clap::ArgAction::Set)]
    pub(crate) quota: bool,
    /// Address of /metrics, /healthz and /readyz.
    #[arg(long, env = "HTTP_ADDR", default_value = "127.0.0.1:9441", value_parser = listen)]
    pub(crate) http: Listen,
    /// Log format: plain or json.
    #[arg(long, env = "LOG_FORMAT", default_value = "plain")]
    pub(crate) log_format: LogFormat,
    /// Log filter: a level, or directives such as `info,kube=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub(crate) log_level: String,
}
