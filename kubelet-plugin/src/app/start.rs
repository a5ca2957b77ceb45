//! From flags to a running plugin: logs, a small runtime, the Kubernetes client, the GPUs, and
//! signals to stop.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use divvy_executor::FileMarks;
use divvy_host::HostRoot;
use divvy_model::{GpuDriver, GpuError, GpuErrorCode, GpuOp};
use divvy_nvml::{NvmlDriver, Session, SessionConfig};
use divvy_telemetry::{MetricsRegistry, Readiness, init_logs, stop_on_signals};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Args, Config, Deps, run};

/// The executor's threads are not among these: it has one for each claim at work.
const WORKER_THREADS: usize = 2;
const NO_RUNTIME: &str = "failed to start the runtime";
const NO_API: &str =
    "no access to the Kubernetes API (run in a pod with a service account, or give --kubeconfig)";

/// Runs the plugin until SIGTERM or SIGINT. The caller has installed the TLS provider.
pub fn start(args: Args) -> anyhow::Result<()> {
    init_logs(args.log_format, &args.log_level)
        .context("failed to set up logging (--log-format, --log-level)")?;
    raise_file_limit();
    let mut config = Config::try_from(args)?;
    config.args.hook_path = config.args.hook_path.or_else(hook_beside_us);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKER_THREADS)
        .enable_all()
        .build();
    let runtime = runtime.context(NO_RUNTIME)?;
    let outcome = runtime.block_on(async {
        let stop = stop_on_signals().context(NO_RUNTIME)?;
        let kube = kube_config(config.kubeconfig.clone())
            .await
            .context(NO_API)?;
        let deps = Deps {
            mps: None,
            client: Client::try_from(kube.clone()).context(NO_API)?,
            kube: Some(kube),
            gpus: gpus(&config),
            metrics: MetricsRegistry::new(),
            readiness: Readiness::new(),
        };
        // On the heap: it holds the whole config.
        Box::pin(run(config, deps, stop)).await
    });
    // A call that hangs in the driver must not keep the process.
    runtime.shutdown_background();
    outcome
}

/// Container runtimes start programs with 1024 file descriptors, for those that still use `select`.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    ) {
        tracing::warn!(%error, ?limit, "the limit of open files cannot be raised");
    }
}

fn hook_beside_us() -> Option<PathBuf> {
    let hook = std::env::current_exe()
        .ok()?
        .with_file_name("divvy-cdi-hook");
    hook.is_file().then_some(hook)
}

/// NVML, opened when first needed and again when it must be; of the driver that is there at that
/// time.
fn gpus(config: &Config) -> Arc<dyn GpuDriver> {
    let library = config.nvml_library.clone();
    let host = HostRoot::under(&config.host_root);
    let at = config.driver_at();
    let marks = Arc::new(FileMarks::new(config.plugin_dir.join("locks")));
    Arc::new(Session::marked(
        SessionConfig::default(),
        marks,
        move || {
            let library: PathBuf = match &library {
                Some(library) => library.clone(),
                None => {
                    at.find(&host)
                        .map_err(|error| {
                            GpuError::global(GpuOp::Init, GpuErrorCode::LIBRARY_NOT_FOUND)
                                .with_detail(crate::chain(&error))
                        })?
                        .nvml_library
                }
            };
            NvmlDriver::open(Some(&library))
        },
    ))
}

async fn kube_config(kubeconfig: Option<PathBuf>) -> anyhow::Result<kube::Config> {
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?
        }
        None => kube::Config::infer().await?,
    };
    // Each caller retries by itself, with a deadline, and logs it; retries inside the client would
    // hide the error.
    config.default_retry = false;
    // An answer that stops in the middle. A watch may be silent for as long as it lives: just under
    // five minutes.
    config.read_timeout = Some(Duration::from_mins(5));
    Ok(config)
}
