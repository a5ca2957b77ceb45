//! From an API server to a [`Snapshot`]. What may not be read is told and left out.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_kubelet_plugin::gpu_nodes;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;

use super::snapshot::Snapshot;

/// No answer is worth waiting longer for.
const PATIENCE: Duration = Duration::from_secs(30);
/// Objects in one answer of the server.
const PAGE: u32 = 500;

/// How to reach the cluster; named as kubectl does.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Access {
    /// The kubeconfig file; without it $KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
}

/// What to ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Our driver's name.
    pub(crate) driver: &'a str,
    /// Claims, classes and waiting pods too.
    pub(crate) claims: bool,
}

impl Access {
    /// A client, and the namespace of its context.
    pub(crate) async fn client(&self) -> Result<(Client, String)> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        let config = match &self.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path);
                let file = file.with_context(|| format!("--kubeconfig {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &options).await.map_err(anyhow::Error::new)
            }
            None if self.context.is_some() => {
                Config::from_kubeconfig(&options).await.map_err(anyhow::Error::new)
            }
            None => Config::infer().await.map_err(anyhow::Error::new),
        };
        let mut config = config.context("no cluster to ask (give --kubeconfig or --context)")?;
        config.connect_timeout = Some(PATIENCE);
        config.read_timeout = Some(PATIENCE);
        let namespace = config.default_namespace.clone();
        Ok((Client::try_from(config)?, namespace))
    }
}

/// Reads.
pub(crate) async fn read(client: &Client, wanted: Wanted<'_>) -> Result<Snapshot> {
    let version = client.apiserver_version().await.context("the API server does not answer")?;
    // Clouds write `37+`.
    let digits: String = version.minor.chars().take_while(char::is_ascii_digit).collect();
    let mut snapshot = Snapshot {
        now: Timestamp::now(),
        driver: wanted.driver.to_owned(),
        minor: digits.parse().unwrap_or(u32::MAX),
        ..Snapshot::default()
    };
    let reports = gpu_nodes(client);
    let everything = ListParams::default();
    let unread = &mut snapshot.unread;
    let found = list(&reports, &everything, "GpuNodes", "what nodes tell of their GPUs", unread).await?;
    let all = |client: &Client| client.clone();
    snapshot.nodes =
        list(&Api::all(all(client)), &everything, "Nodes", "whether nodes are ready", unread).await?;
    snapshot.slices =
        list(&Api::all(all(client)), &everything, "ResourceSlices", "what is published", unread).await?;
    if wanted.claims {
        snapshot.claims =
            list(&Api::all(all(client)), &everything, "ResourceClaims", "who holds and who waits", unread)
                .await?;
        snapshot.classes =
            list(&Api::all(all(client)), &everything, "DeviceClasses", "what claims ask for", unread).await?;
        let pending = ListParams::default().fields("status.phase=Pending");
        snapshot.pods = list(&Api::all(all(client)), &pending, "Pods", "which pods wait", unread).await?;
    }
    for object in found {
        let name = object.metadata.name.unwrap_or_default();
        let status = object.data.get("status").cloned().unwrap_or_default();
        match serde_json::from_value(status) {
            Ok(status) => drop(snapshot.reports.insert(name, status)),
            // Nothing was told yet.
            Err(_) if object.data.get("status").is_none() => {}
            Err(error) => snapshot.unread.push(format!("GpuNode {name} cannot be read: {error}")),
        }
    }
    Ok(snapshot)
}

/// All objects, page by page. A kind that is not there or not allowed is none, and `unread` says so.
async fn list<K>(
    api: &Api<K>,
    params: &ListParams,
    kind: &str,
    missing: &str,
    unread: &mut Vec<String>,
) -> Result<Vec<K>>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    let mut params = params.clone().limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = match api.list(&params).await {
            Ok(page) => page,
            Err(kube::Error::Api(status)) if status.code == 404 && kind == "GpuNodes" => {
                let why = "the cluster has no GpuNodes (is divvy's chart installed?)";
                unread.push(format!("{why}: {missing} is not known"));
                return Ok(Vec::new());
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {
                unread.push(format!("{kind} may not be listed: {missing} is not known"));
                return Ok(Vec::new());
            }
            Err(error) => return Err(error).with_context(|| format!("{kind} cannot be listed")),
        };
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(all),
        }
    }
}
