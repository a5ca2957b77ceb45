//! The supervisor's binary: flags in, exit code out; everything else is [`divvy_mps_supervisor`].

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use divvy_host::{DriverAt, HostRoot, become_other};
use divvy_mps_supervisor::{Settings, Size, Supervisor, serve};
use divvy_telemetry::{Chain, LogFormat, init_logs, stop_on_signals};
use rustix::fs::FlockOperation;

/// Time in which a supervisor that was killed is gone.
const ENDING: Duration = Duration::from_secs(5);
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// Keeps the MPS daemons of a node for divvy's node plugin.
#[derive(Debug, Parser)]
#[command(name = "divvy-mps-supervisor", version)]
struct Args {
    /// Folder of the daemons and of the socket, on which the node plugin asks.
    #[arg(long, env = "MPS_DIR", value_name = "DIR")]
    mps_dir: PathBuf,
    /// The node's root, as this process sees it.
    #[arg(long, env = "HOST_ROOT", value_name = "DIR", default_value = "/")]
    host_root: PathBuf,
    /// Root of the NVIDIA driver, as this process sees it. Without it the places known to hold
    /// drivers are searched.
    #[arg(long, env = "DRIVER_ROOT", value_name = "DIR")]
    driver_root: Option<PathBuf>,
    /// The same folder, as the node names it.
    #[arg(long, env = "HOST_DRIVER_ROOT", value_name = "DIR")]
    host_driver_root: Option<PathBuf>,
    /// Control group for daemons, as a folder that this process may write: they then outlive its
    /// container.
    #[arg(long, env = "MPS_CGROUP", value_name = "DIR")]
    mps_cgroup: Option<PathBuf>,
    /// Size of the memory that a server shares with its clients.
    #[arg(long, env = "MPS_MEMORY", value_name = "SIZE", default_value = "4Gi")]
    mps_memory: Size,
    /// Mount nothing, for a process that may not: containers can then fill the file system of the
    /// folder.
    #[arg(long)]
    mps_unbounded: bool,
    /// Log format: plain or json.
    #[arg(long, env = "LOG_FORMAT", default_value = "plain")]
    log_format: LogFormat,
    /// Log filter: a level, or directives such as `info,hyper=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    log_level: String,
}

fn main() -> ExitCode {
    // Started by itself to run NVIDIA's program.
    if let Some(code) = become_other(std::env::args_os()) {
        return code.into();
    }
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            drop(writeln!(
                std::io::stderr(),
                "divvy-mps-supervisor: {}",
                Chain(error.as_ref())
            ));
            ExitCode::FAILURE
        }
    }
}

/// Takes the lock of the folder. Waits for a supervisor that has been killed just now, whose last
/// child may still have it: an error here costs a pod the pause before its next start.
fn take(lock: &fs_err::File) -> rustix::io::Result<()> {
    let until = Instant::now() + ENDING;
    loop {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(LOOK);
            }
            done => return done,
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    init_logs(args.log_format, &args.log_level)?;
    let dir = args.mps_dir;
    let unusable = || format!("the folder {} of --mps-dir cannot be used", dir.display());
    fs_err::create_dir_all(&dir).with_context(unusable)?;
    // Two supervisors of one folder would start two daemons for a GPU.
    let lock = fs_err::File::create(dir.join("lock")).with_context(unusable)?;
    take(&lock).with_context(|| format!("another supervisor has the folder {}", dir.display()))?;
    let supervisor = Supervisor::new(Settings {
        host: HostRoot::under(args.host_root),
        driver: DriverAt {
            seen: args.driver_root,
            host: args.host_driver_root,
        },
        cgroup: args.mps_cgroup,
        memory: Some(args.mps_memory).filter(|_| !args.mps_unbounded),
        dir: dir.clone(),
    });
    let kept = supervisor
        .adopt()
        .context("the daemons of before cannot be looked at")?;
    tracing::info!(kept, "looked for the MPS daemons of before");
    match supervisor.serves_all_users() {
        Ok(for_all_users) => tracing::info!(for_all_users, "tried the driver's MPS"),
        // Tried again at the first start: a driver may come later.
        Err(error) => {
            let error = divvy_telemetry::chain(&error);
            tracing::info!(error, "no MPS server can be started now");
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let stop = stop_on_signals()?;
        let supervisor = Arc::new(supervisor);
        let served = serve(supervisor.clone(), &dir.join("supervisor.sock"), stop).await;
        supervisor.leave();
        served
    })
}
