//! A claim, prepared by the node plugin itself: its real sockets, records and CDI file, in a
//! folder of this program, against a fake API server and a fake kubelet.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_node, mk_result, reserved};
use divvy_fake_cluster::{ClaimRef, FakeApi, FakeKubelet, KubeletConfig};
use divvy_kubelet_plugin::{Config, Deps};
use divvy_model::GpuUuid;
use divvy_nvml::{NvmlDriver, Session, SessionConfig};
use divvy_telemetry::{MetricsRegistry, Readiness};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::smi::see;

const NODE: &str = "this-machine";
const DRIVER: &str = "gpu.divvy.dev";
const PATIENCE: Duration = Duration::from_mins(1);

/// A prepared claim, and all that keeps it so.
pub(crate) struct Prepared {
    /// Its CDI document.
    pub(crate) cdi: Value,
    /// Multiprocessors of its device, as published.
    pub(crate) multiprocessors: Option<u32>,
    claim: ClaimRef,
    kubelet: FakeKubelet,
    plugin: JoinHandle<Result<()>>,
    stop: CancellationToken,
    folder: TempDir,
    runtime: Runtime,
}

/// Device that is to be claimed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Want<'a> {
    /// The whole GPU.
    Whole(&'a GpuUuid),
    /// A partition of it: the first that is published. MIG mode may be changed for that.
    Partition(&'a GpuUuid),
}

/// Prepares a claim of one device.
pub(crate) fn prepared(args: &crate::Args, library: &Path, want: Want<'_>) -> Result<Prepared> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let folder = tempfile::Builder::new()
        .prefix("divvy-hardware-")
        .tempdir()?;
    let guard = runtime.enter();
    let api = FakeApi::new();
    api.put(&mk_node(NODE))?;
    let kubelet = FakeKubelet::start(KubeletConfig::new(
        folder.path().join("kubelet"),
        NODE,
        api.clone(),
    ))?;
    let config = config(args, want, &kubelet, folder.path())?;
    let stop = CancellationToken::new();
    let library = library.to_owned();
    let session = Session::new(SessionConfig::default(), move || {
        NvmlDriver::open(Some(&library))
    });
    let deps = Deps {
        mps: None,
        client: api.client(),
        kube: None,
        gpus: Arc::new(session),
        metrics: MetricsRegistry::new(),
        readiness: Readiness::new(),
    };
    let plugin = runtime.spawn(divvy_kubelet_plugin::run(config, deps, stop.clone()));
    let published = runtime.block_on(async {
        kubelet
            .wait_registered(DRIVER, PATIENCE)
            .await
            .context("the plugin did not register")?;
        let device = api.wait_for(|seen| device_of(&seen.list(), want), PATIENCE);
        device.await.context("the GPU was not published")
    })?;
    let (pool, device) = published;
    let published = device
        .capacity
        .as_ref()
        .and_then(|all| all.get("multiprocessors"));
    let multiprocessors = published.and_then(|capacity| capacity.value.0.parse().ok());
    let results = vec![mk_result("gpu", DRIVER, &pool, &device.name)];
    let claim = allocated(mk_claim("default", "one", DRIVER, 1), results);
    let stored = api.put(&reserved(
        claim,
        "pod",
        "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab",
    ))?;
    let claim = ClaimRef::new(
        "default",
        "one",
        &stored.metadata.uid.context("a claim without UID")?,
    );
    let mut answers = runtime.block_on(kubelet.prepare(DRIVER, std::slice::from_ref(&claim)))?;
    match answers.remove(&claim.uid) {
        Some(Ok(devices)) => ensure!(devices.len() == 1, "not one device but {}", devices.len()),
        Some(Err(error)) => bail!("the claim was refused: {error}"),
        None => bail!("the claim was not answered"),
    }
    let file = folder
        .path()
        .join("cdi")
        .join(format!("{DRIVER}-claim_{}.json", claim.uid));
    let cdi = serde_json::from_slice(&fs_err::read(file)?)?;
    drop(guard);
    Ok(Prepared {
        cdi,
        multiprocessors,
        claim,
        kubelet,
        plugin,
        stop,
        folder,
        runtime,
    })
}

fn config(
    args: &crate::Args,
    want: Want<'_>,
    kubelet: &FakeKubelet,
    folder: &Path,
) -> Result<Config> {
    let kubelet = kubelet.config();
    let mut flags = vec!["plugin".to_owned(), "--http".to_owned(), String::new()];
    for (flag, value) in [
        ("--node-name", Path::new(NODE).to_owned()),
        ("--plugin-dir", kubelet.plugin_dir(DRIVER)),
        ("--registry-dir", kubelet.registry_dir()),
        ("--pod-resources-socket", kubelet.pod_resources_socket()),
        ("--cdi-dir", folder.join("cdi")),
    ] {
        flags.extend([flag.to_owned(), value.display().to_string()]);
    }
    let mut flag =
        |name: &str, value: &Path| flags.extend([name.to_owned(), value.display().to_string()]);
    flag("--host-root", &args.host_root);
    if let Some(root) = &args.driver_root {
        flag("--driver-root", &see(&args.prefix, root));
        flag("--host-driver-root", root);
    }
    for (name, value) in [
        ("--device-nodes", &args.device_nodes),
        ("--hook-path", &args.hook),
    ] {
        if let Some(value) = value {
            flag(name, value);
        }
    }
    if let Want::Partition(_) = want {
        flags.extend(["--offer", "everything", "--mode-lock", "on"].map(str::to_owned));
    }
    Ok(Config::try_from(
        divvy_kubelet_plugin::Args::try_parse_from(flags)?,
    )?)
}

/// The device and its pool.
fn device_of(slices: &[ResourceSlice], want: Want<'_>) -> Option<(String, Device)> {
    let wanted = match want {
        Want::Whole(gpu) => [("type", "gpu"), ("uuid", gpu.as_str())],
        Want::Partition(gpu) => [("type", "mig"), ("parentUUID", gpu.as_str())],
    };
    slices.iter().find_map(|slice| {
        let device = slice.spec.devices.iter().flatten().find(|device| {
            wanted.iter().all(|(name, value)| {
                let attribute = device.attributes.as_ref().and_then(|all| all.get(*name));
                attribute.and_then(|a| a.string.as_deref()) == Some(value)
            })
        })?;
        Some((slice.spec.pool.name.clone(), device.clone()))
    })
}

impl Prepared {
    /// Unprepares it, stops the plugin, and checks that nothing is left.
    pub(crate) fn let_go(self) -> Result<()> {
        let Self {
            claim,
            kubelet,
            plugin,
            stop,
            folder,
            runtime,
            ..
        } = self;
        let mut answers =
            runtime.block_on(kubelet.unprepare(DRIVER, std::slice::from_ref(&claim)))?;
        match answers.remove(&claim.uid) {
            Some(Ok(())) => {}
            Some(Err(error)) => bail!("the claim was not let go: {error}"),
            None => bail!("the claim was not answered"),
        }
        stop.cancel();
        runtime
            .block_on(plugin)?
            .context("the plugin did not stop cleanly")?;
        for left in [
            folder.path().join("cdi"),
            kubelet.config().plugin_dir(DRIVER).join("claims"),
        ] {
            let mut files = fs_err::read_dir(&left)?
                .filter_map(Result::ok)
                .map(|entry| entry.path());
            if let Some(file) = files.find(|path| path.extension().is_some_and(|e| e == "json")) {
                bail!("{} was left behind", file.display());
            }
        }
        Ok(())
    }
}
