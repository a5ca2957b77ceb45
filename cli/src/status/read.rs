//! Reads a [`Snapshot`] from an API server. Kinds that the user may not list are left out, and the answer names them.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::node::GpuNode;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::DeserializeGuard;
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;

use super::snapshot::Snapshot;

/// Timeout of one request.
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
    /// Events of the namespace, too: what its kubelets report of claims.
    pub(crate) events: bool,
    /// Where claims and pods are looked for if not all namespaces may be read.
    pub(crate) namespace: &'a str,
}

/// A kind of objects that answers are made of.
pub(crate) struct Kind {
    /// Entries of `unread` begin with it.
    pub(crate) name: &'static str,
    /// As rights call it.
    resource: &'static str,
    /// What is not known without it.
    missing: &'static str,
    /// What to ask an admin of the cluster for.
    remedy: &'static str,
}

/// A role that the chart creates (`viewRole.enabled`).
const OUR_ROLE: &str = "a ClusterRoleBinding to divvy-view, a ClusterRole of divvy's chart";
/// What a user of one namespace usually lacks.
const VIEW: &str = "a ClusterRoleBinding to view, or choose a namespace that you may read (-n)";

pub(crate) const GPU_NODES: Kind = Kind {
    name: "GpuNodes",
    resource: "gpunodes.divvy.dev",
    missing: "the state of the nodes' GPUs",
    remedy: OUR_ROLE,
};
pub(crate) const NODES: Kind = Kind {
    name: "Nodes",
    resource: "nodes",
    missing: "readiness and labels of nodes",
    remedy: "a ClusterRole that grants it (neither view nor divvy-view does)",
};
pub(crate) const SLICES: Kind = Kind {
    name: "ResourceSlices",
    resource: "resourceslices.resource.k8s.io",
    missing: "the published devices",
    remedy: OUR_ROLE,
};
const TAINT_RULES: Kind = Kind {
    name: "DeviceTaintRules",
    resource: "devicetaintrules.resource.k8s.io",
    missing: "which devices administrators keep claims off",
    remedy: OUR_ROLE,
};
pub(crate) const CLASSES: Kind = Kind {
    name: "DeviceClasses",
    resource: "deviceclasses.resource.k8s.io",
    missing: "which devices the classes select",
    remedy: OUR_ROLE,
};
pub(crate) const CLAIMS: Kind = Kind {
    name: "ResourceClaims",
    resource: "resourceclaims.resource.k8s.io",
    missing: "which claims hold devices and which wait",
    remedy: VIEW,
};
const PODS: Kind = Kind { name: "Pods", resource: "pods", missing: "which pods are waiting", remedy: VIEW };

impl Access {
    /// A client, the namespace of its context, and its server as errors are to name it.
    pub(crate) async fn client(&self) -> Result<(Client, String, String)> {
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
        let mut config = config.context("no cluster is configured (use --kubeconfig or --context)")?;
        config.connect_timeout = Some(PATIENCE);
        config.read_timeout = Some(PATIENCE);
        let namespace = config.default_namespace.clone();
        let server = format!("cluster {}", config.cluster_url);
        Ok((Client::try_from(config)?, namespace, server))
    }
}

/// Reads all kinds that the answer needs.
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
    let reports = Api::<DeserializeGuard<GpuNode>>::all(client.clone());
    let everything = ListParams::default();
    let mut reader = Reader { namespace: wanted.namespace, unread: Vec::new() };
    let found = reader.list(&GPU_NODES, &everything, &reports, None).await?;
    snapshot.nodes = reader.list(&NODES, &everything, &Api::all(client.clone()), None).await?;
    snapshot.slices = reader.list(&SLICES, &everything, &Api::all(client.clone()), None).await?;
    // Before 1.37 they are served in other versions, or not at all.
    if wanted.claims && snapshot.minor >= 37 {
        let rules = reader.list(&TAINT_RULES, &everything, &Api::all(client.clone()), None).await?;
        taint(&mut snapshot.slices, &rules);
    }
    if wanted.claims {
        let own = Api::namespaced(client.clone(), wanted.namespace);
        snapshot.claims = reader.list(&CLAIMS, &everything, &Api::all(client.clone()), Some(&own)).await?;
        snapshot.classes = reader.list(&CLASSES, &everything, &Api::all(client.clone()), None).await?;
        let pending = ListParams::default().fields("status.phase=Pending");
        let own = Api::namespaced(client.clone(), wanted.namespace);
        snapshot.pods = reader.list(&PODS, &pending, &Api::all(client.clone()), Some(&own)).await?;
    }
    if wanted.events {
        snapshot.events = reader.failures(&Api::namespaced(client.clone(), wanted.namespace)).await?;
    }
    snapshot.unread = reader.unread;
    for object in found {
        match object.0 {
            Ok(GpuNode { metadata, status, .. }) => {
                snapshot.reports.extend(status.map(|status| (metadata.name.unwrap_or_default(), status)));
            }
            Err(bad) => {
                let name = bad.metadata.name.unwrap_or_default();
                snapshot.unread.push(format!("GpuNode {name} cannot be read: {}", bad.error));
            }
        }
    }
    Ok(snapshot)
}

/// Adds the taints of these rules to the devices that they select, as the scheduler does.
fn taint(slices: &mut [ResourceSlice], rules: &[DeviceTaintRule]) {
    let fits = |wanted: Option<&String>, found: &str| wanted.is_none_or(|wanted| wanted == found);
    for rule in rules {
        // A rule without a selector is for no device; an empty selector is for all.
        let Some(selector) = &rule.spec.device_selector else { continue };
        for slice in slices.iter_mut().map(|slice| &mut slice.spec) {
            let fits_slice = fits(selector.driver.as_ref(), &slice.driver)
                && fits(selector.pool.as_ref(), &slice.pool.name);
            if !fits_slice {
                continue;
            }
            let devices = slice.devices.iter_mut().flatten();
            for device in devices.filter(|device| fits(selector.device.as_ref(), &device.name)) {
                device.taints.get_or_insert_default().push(rule.spec.taint.clone());
            }
        }
    }
}

/// Lists, and keeps what may not be read.
struct Reader<'a> {
    namespace: &'a str,
    unread: Vec<String>,
}

impl Reader<'_> {
    /// All objects, or those of `own`, the API of the one namespace, if others cannot be listed. A kind that does not exist
    /// or is forbidden yields none, and `unread` says so.
    async fn list<K>(
        &mut self,
        kind: &Kind,
        params: &ListParams,
        all: &Api<K>,
        own: Option<&Api<K>>,
    ) -> Result<Vec<K>>
    where
        K: Clone + std::fmt::Debug + DeserializeOwned,
    {
        let Kind { name, resource, missing, remedy } = kind;
        let failed = || format!("{name} cannot be listed");
        match pages(all, params).await {
            Err(kube::Error::Api(status)) if status.code == 404 && *name == GPU_NODES.name => {
                let why = "the cluster does not serve GpuNodes (is divvy's chart installed?)";
                self.unread.push(format!("{why}; unknown: {missing}"));
                return Ok(Vec::new());
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {}
            other => return other.with_context(failed),
        }
        let right =
            format!("you may not list {resource} in the whole cluster; ask a cluster admin for {remedy}");
        if let Some(own) = own {
            match pages(own, params).await {
                Ok(found) => {
                    let others = format!("{name} of namespaces other than {}", self.namespace);
                    self.unread
                        .push(format!("{others} cannot be listed; unknown there: {missing} ({right})"));
                    return Ok(found);
                }
                Err(kube::Error::Api(status)) if status.code == 403 => {}
                other => return other.with_context(failed),
            }
        }
        self.unread.push(format!("{name} cannot be listed; unknown: {missing} ({right})"));
        Ok(Vec::new())
    }

    /// What kubelets report of claims that they could not prepare, in the one namespace.
    async fn failures(&mut self, own: &Api<Event>) -> Result<Vec<Event>> {
        let failed = ListParams::default().fields("reason=FailedPrepareDynamicResources");
        match pages(own, &failed).await {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                let events = format!("Events of namespace {} cannot be listed", self.namespace);
                self.unread.push(format!("{events}; unknown: what the kubelet reports of the claim"));
                Ok(Vec::new())
            }
            other => other.context("Events cannot be listed"),
        }
    }
}

/// Page by page.
async fn pages<K>(api: &Api<K>, params: &ListParams) -> Result<Vec<K>, kube::Error>
where
    K: Clone + std::fmt::Debug + DeserializeOwned,
{
    let mut params = params.clone().limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list(&params).await?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(all),
        }
    }
}
