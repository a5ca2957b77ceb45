//! Reads a [`Snapshot`] from an API server. Kinds that the user may not list are left out, and the
//! answer names them.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::node::GpuNode;
use divvy_api::policy::{GpuPolicyObject, decode_policy};
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, DeserializeGuard, DynamicObject, TypeMeta};
use kube::{Api, Client, Config};
use serde::de::DeserializeOwned;
use tower::util::MapResponseLayer;

use super::plugins::{PLUGINS, Plugins};
use super::report::is_ours;
use super::snapshot::{Policies, Snapshot, full_name, name, namespace};
use crate::taints::taint;

/// Timeout of one request.
const PATIENCE: Duration = Duration::from_secs(30);
/// Reason of the kubelet's Event about a claim that could not be prepared.
pub const FAILED_PREPARE: &str = "FailedPrepareDynamicResources";
/// Objects in one answer of the server.
const PAGE: u32 = 500;

/// Way to the cluster; its flags are named as kubectl's.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Access {
    /// The kubeconfig file; without it $KUBECONFIG, ~/.kube/config, or the pod's service account
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
}

/// Kinds and objects to ask for.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Our driver's name. `None`: the one that most nodes report.
    pub driver: Option<&'a str>,
    /// Claims, too.
    pub claims: ClaimsWanted,
    /// Events of the namespace, too: what its kubelets report of claims.
    pub events: bool,
    /// `GpuPolicies`, too.
    pub policies: bool,
    /// The plugin's DaemonSet, too, if a node that is to have its pod reports nothing.
    pub plugins: bool,
    /// Where claims and pods are looked for if not all namespaces may be read.
    pub namespace: &'a str,
    /// A pod of the namespace, in any state.
    pub pod: PodWanted<'a>,
    /// ResourceSlices to read.
    pub slices: SlicesWanted<'a>,
}

/// ResourceSlices to read: a node that offers everything has 200 KB of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlicesWanted<'a> {
    /// All.
    All,
    /// Slices of one node.
    Of(&'a str),
    /// The fewest that an overview needs: names alone where nothing waits and nothing is shared.
    Few,
}

/// Claims to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimsWanted {
    /// None.
    No,
    /// Claims alone, for what they were granted.
    Granted,
    /// Claims, classes and waiting pods.
    Waiting,
}

/// A pod to look for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodWanted<'a> {
    /// None: those that have not started are enough.
    No,
    /// The pod of this name, else those whose names begin so.
    Named(&'a str),
    /// The pod of this name, unless there is a claim of the name.
    UnlessClaim(&'a str),
}

/// A kind of objects that answers are made of.
pub struct Kind {
    /// Entries of `unread` begin with it.
    pub name: &'static str,
    /// Name of its resource in rights.
    pub resource: &'static str,
    /// Part of the answer that is not known without it.
    pub missing: &'static str,
    /// Right to ask an admin of the cluster for.
    pub remedy: &'static str,
}

impl Kind {
    /// Returns the right that is missing, and who grants it.
    fn right(&self) -> String {
        let Self {
            resource, remedy, ..
        } = self;
        format!(
            "you may not list {resource} in the whole cluster; ask a cluster admin for {remedy}"
        )
    }

    /// Returns what is unknown where a list is refused.
    fn forbidden(&self) -> String {
        let (name, missing, right) = (self.name, self.missing, self.right());
        format!("{name} cannot be listed; unknown: {missing} ({right})")
    }
}

/// A role that the chart creates (`viewRole.enabled`).
const OUR_ROLE: &str = "a ClusterRoleBinding to divvy-view, a ClusterRole of divvy's chart";
/// Right that a user of one namespace usually lacks.
const VIEW: &str = "a ClusterRoleBinding to view, or choose a namespace that you may read (-n)";

pub const GPU_NODES: Kind = Kind {
    name: "GpuNodes",
    resource: "gpunodes.divvy.dev",
    missing: "the state of the nodes' GPUs",
    remedy: OUR_ROLE,
};
pub const POLICIES: Kind = Kind {
    name: "GpuPolicies",
    resource: "gpupolicies.divvy.dev",
    missing: "what the policies say",
    remedy: OUR_ROLE,
};
pub const NODES: Kind = Kind {
    name: "Nodes",
    resource: "nodes",
    missing: "readiness and labels of nodes",
    remedy: "a ClusterRole that grants it (neither view nor divvy-view does)",
};
pub const SLICES: Kind = Kind {
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
pub const CLASSES: Kind = Kind {
    name: "DeviceClasses",
    resource: "deviceclasses.resource.k8s.io",
    missing: "which devices the classes select",
    remedy: OUR_ROLE,
};
pub const CLAIMS: Kind = Kind {
    name: "ResourceClaims",
    resource: "resourceclaims.resource.k8s.io",
    missing: "which claims hold devices and which wait",
    remedy: VIEW,
};
const PODS: Kind = Kind {
    name: "Pods",
    resource: "pods",
    missing: "which pods are waiting",
    remedy: VIEW,
};

/// Entry of `unread` for a cluster without the definition of [`GPU_NODES`], whose name begins it.
pub const NOT_SERVED: &str = "GpuNodes are not served: the CRD gpunodes.divvy.dev is missing, and divvy's chart installs it \
     (helm upgrade --install, again where it was deleted)";

impl Access {
    /// A client, the namespace of its context, and its server as errors are to name it.
    pub async fn client(&self) -> Result<(Client, String, String)> {
        let options = KubeConfigOptions {
            context: self.context.clone(),
            ..KubeConfigOptions::default()
        };
        let config = match &self.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path);
                let file = file.with_context(|| format!("--kubeconfig {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &options)
                    .await
                    .map_err(anyhow::Error::new)
            }
            None if self.context.is_some() => Config::from_kubeconfig(&options)
                .await
                .map_err(anyhow::Error::new),
            // The error for a kubeconfig is in the error's own text, too, and is shown once.
            None => Config::infer().await.map_err(|error| {
                let kubeconfig = std::error::Error::source(&error);
                // Paths come in quotes of two kinds, one in the other.
                let text = kubeconfig.map_or_else(|| error.to_string(), ToString::to_string);
                anyhow::Error::msg(text.replace(['"', '\''], "").replace('`', ""))
            }),
        };
        let mut config = config.context(
            "no cluster is configured (KUBECONFIG, --kubeconfig or --context says which)",
        )?;
        config.connect_timeout = Some(PATIENCE);
        config.read_timeout = Some(PATIENCE);
        let namespace = config.default_namespace.clone();
        let server = format!("cluster {}", config.cluster_url);
        // One object of a tenant keeps no list from its reader.
        let client = ClientBuilder::try_from(config)?
            .with_layer(&MapResponseLayer::new(divvy_controller::shallow))
            .build();
        Ok((client, namespace, server))
    }
}

impl Access {
    /// Returns the way that the words of a command line name.
    pub fn of_words(words: &[String]) -> Self {
        let value = |name: &str| {
            let equals = format!("{name}=");
            let joined = words.iter().find_map(|word| word.strip_prefix(&equals));
            let after = words.iter().position(|word| word == name);
            let after = after.and_then(|place| words.get(place + 1));
            joined.map(str::to_owned).or_else(|| after.cloned())
        };
        Self {
            kubeconfig: value("--kubeconfig").map(PathBuf::from),
            context: value("--context"),
        }
    }

    /// Says whether the command line names a cluster.
    pub fn is_given(&self) -> bool {
        self.kubeconfig.is_some() || self.context.is_some()
    }

    /// Returns the name of the context that is used, if a kubeconfig is.
    pub fn context_name(&self) -> Option<String> {
        let current = || {
            let file = match &self.kubeconfig {
                Some(path) => Kubeconfig::read_from(path),
                None => Kubeconfig::read(),
            };
            file.ok()?.current_context
        };
        self.context.clone().or_else(current)
    }
}

/// Reads all kinds that the answer needs.
pub async fn read(client: &Client, wanted: Wanted<'_>) -> Result<Snapshot> {
    let version = client.apiserver_version().await.map_err(unanswered)?;
    // Clouds write `37+`.
    let digits: String = version
        .minor
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    let mut snapshot = Snapshot {
        now: Timestamp::now(),
        minor: digits.parse().unwrap_or(u32::MAX),
        ..Snapshot::default()
    };
    let reports = Api::<DeserializeGuard<GpuNode>>::all(client.clone());
    let everything = ListParams::default();
    let mut reader = Reader {
        namespace: wanted.namespace,
        unread: Vec::new(),
    };
    let found = reader.list(&GPU_NODES, &everything, &reports, None).await?;
    let statuses = found.iter().filter_map(|node| node.0.as_ref().ok());
    let names = statuses.filter_map(|node| node.status.as_ref().map(|s| &*s.driver_name));
    let (driver, others) = divvy_why::driver::shown(wanted.driver, names);
    snapshot.driver = driver;
    reader.unread.extend(others);
    snapshot.nodes = reader
        .list(&NODES, &everything, &Api::all(client.clone()), None)
        .await?;
    if wanted.policies {
        snapshot.policies = reader.policies(client).await?;
    }
    // Before 1.37 they are served in other versions, or not at all.
    if wanted.claims == ClaimsWanted::Waiting && snapshot.minor >= 37 {
        let rules = reader
            .list(&TAINT_RULES, &everything, &Api::all(client.clone()), None)
            .await?;
        snapshot.taint_rules = rules;
    }
    if wanted.claims != ClaimsWanted::No {
        let own = Api::namespaced(client.clone(), wanted.namespace);
        snapshot.claims = reader
            .list(&CLAIMS, &everything, &Api::all(client.clone()), Some(&own))
            .await?;
    }
    if wanted.claims == ClaimsWanted::Waiting {
        snapshot.classes = reader
            .list(&CLASSES, &everything, &Api::all(client.clone()), None)
            .await?;
        let pending = ListParams::default().fields("status.phase=Pending");
        let own = Api::namespaced(client.clone(), wanted.namespace);
        snapshot.pods = reader
            .list(&PODS, &pending, &Api::all(client.clone()), Some(&own))
            .await?;
    }
    reader.slices(client, wanted.slices, &mut snapshot).await?;
    taint(&mut snapshot.slices, &snapshot.taint_rules);
    let events = Api::namespaced(client.clone(), wanted.namespace);
    if wanted.events {
        let failed = ListParams::default().fields(&format!("reason={FAILED_PREPARE}"));
        snapshot.events = reader.events(&events, &failed).await?;
    }
    snapshot.named = reader.named(client, wanted, &snapshot.claims).await?;
    if let [only] = snapshot.named.as_slice() {
        let name = only.metadata.name.as_deref().unwrap_or_default();
        let warnings = format!("involvedObject.name={name},type=Warning");
        let warnings = ListParams::default().fields(&warnings);
        let is_other = |event: &Event| event.reason.as_deref() != Some(FAILED_PREPARE);
        let more = reader.events(&events, &warnings).await?;
        snapshot.events.extend(more.into_iter().filter(is_other));
        reader.unread.dedup();
    }
    snapshot.unread = reader.unread;
    let reported: Vec<_> = found.iter().map(reporter).collect();
    if wanted.plugins && snapshot.lacks_a_plugin(&reported, wanted.slices) {
        snapshot.plugins = Some(plugins(client).await?);
    }
    snapshot.take_reports(found);
    Ok(snapshot)
}

impl Snapshot {
    /// Returns whether a labelled node, or the only one that is asked about, has published nothing,
    /// or is not among those that report, as far as reports can be read.
    fn lacks_a_plugin(&self, reported: &[Option<String>], slices: SlicesWanted<'_>) -> bool {
        if self.lacks(&GPU_NODES) {
            return false;
        }
        let is_away = |node: &Node| {
            !reported.contains(&node.metadata.name) || !self.publishes(name(&node.metadata))
        };
        let is_asked = |node: &&Node| match slices {
            SlicesWanted::Of(only) => only == name(&node.metadata),
            SlicesWanted::All | SlicesWanted::Few => true,
        };
        let mut asked = self.nodes.iter().filter(is_asked);
        asked.any(|node| is_ours(node) && is_away(node))
    }

    /// Sorts the reports of nodes from those that cannot be read.
    fn take_reports(&mut self, found: Vec<DeserializeGuard<GpuNode>>) {
        for object in found {
            match object.0 {
                Ok(GpuNode {
                    metadata, status, ..
                }) => {
                    self.reports
                        .extend(status.map(|status| (metadata.name.unwrap_or_default(), status)));
                }
                Err(bad) => {
                    let name = bad.metadata.name.unwrap_or_default();
                    self.unread
                        .push(format!("GpuNode {name} cannot be read: {}", bad.error));
                }
            }
        }
    }
}

/// Returns the name of a GpuNode, whatever is in it.
fn reporter(found: &DeserializeGuard<GpuNode>) -> Option<String> {
    match &found.0 {
        Ok(node) => node.metadata.name.clone(),
        Err(bad) => bad.metadata.name.clone(),
    }
}

/// Reads the plugin's DaemonSets, their pods and the warnings about them.
async fn plugins(client: &Client) -> Result<Plugins> {
    let labelled = ListParams::default().labels(PLUGINS);
    let mut found = Plugins::default();
    let sets = pages(&Api::all(client.clone()), &labelled).await;
    found.sets = found.allowed("daemonsets.apps", "", sets)?;
    let pods = pages(&Api::all(client.clone()), &labelled).await;
    found.pods = found.allowed("pods", "", pods)?;
    for set in found.sets.clone() {
        let (inside, name) = (namespace(&set.metadata), name(&set.metadata));
        let about =
            format!("involvedObject.kind=DaemonSet,involvedObject.name={name},type=Warning");
        let about = ListParams::default().fields(&about);
        let events = pages(&Api::namespaced(client.clone(), inside), &about).await;
        let events = found.allowed("events", inside, events)?;
        found.events.insert(full_name(&set.metadata), events);
    }
    Ok(found)
}

/// Slices that an overview reads: those of some 200 nodes that offer everything.
const FEW: usize = 1_500;
/// Nodes whose slices an overview reads one by one, for what is left of their shares.
const FEW_NODES: usize = 20;

impl Snapshot {
    /// Says whether an answer about all claims depends on every node's devices.
    fn depends_on_all_devices(&self) -> bool {
        let waits = |claim: &ResourceClaim| {
            let status = claim.status.as_ref();
            status.is_none_or(|status| status.allocation.is_none())
        };
        let asks = |pod: &Pod| {
            let spec = pod.spec.as_ref();
            let containers = spec.into_iter().flat_map(|spec| &spec.containers);
            let resources = containers.filter_map(|of| of.resources.as_ref()?.limits.as_ref());
            let mut names = resources.flat_map(|limits| limits.keys());
            let is_placed = spec.is_some_and(|spec| spec.node_name.is_some());
            let claims = spec.and_then(|spec| spec.resource_claims.as_deref());
            let has_claims = claims.is_some_and(|claims| !claims.is_empty());
            !is_placed && (has_claims || names.any(|name| crate::extended::is_extended(name)))
        };
        !self.taint_rules.is_empty() || self.claims.iter().any(waits) || self.pods.iter().any(asks)
    }

    /// Returns the nodes of which claims have shares.
    fn sharing(&self) -> BTreeSet<String> {
        let results = self.claims.iter().filter_map(|claim| {
            let allocation = claim.status.as_ref()?.allocation.as_ref()?;
            allocation.devices.as_ref()?.results.as_ref()
        });
        let shares = results.flatten().filter(|result| {
            let kind = divvy_why::device::kind(&result.device);
            result.driver == self.driver && kind.is_some_and(|kind| kind.sharing.is_shared())
        });
        let pools: BTreeSet<&str> = shares.map(|result| result.pool.as_str()).collect();
        let nodes = pools.into_iter().filter_map(|pool| self.node_of(pool));
        nodes.map(str::to_owned).collect()
    }
}

/// Lists of kinds that a single answer is about.
pub(crate) struct Lists<'a>(Reader<'a>);

impl<'a> Lists<'a> {
    /// Returns it for a user who may read at least this namespace.
    pub(crate) fn new(namespace: &'a str) -> Self {
        Self(Reader {
            namespace,
            unread: Vec::new(),
        })
    }

    /// Lists all objects, or those of the one namespace, if others cannot be listed.
    pub(crate) async fn list<K>(
        &mut self,
        kind: &Kind,
        all: &Api<K>,
        own: &Api<K>,
    ) -> Result<Vec<K>>
    where
        K: Clone + std::fmt::Debug + DeserializeOwned,
    {
        self.0
            .list(kind, &ListParams::default(), all, Some(own))
            .await
    }

    /// Returns what could not be read.
    pub(crate) fn unread(self) -> Vec<String> {
        self.0.unread
    }
}

/// Lists, and keeps what may not be read.
struct Reader<'a> {
    namespace: &'a str,
    unread: Vec<String>,
}

impl Reader<'_> {
    /// Reads slices, the fewer the better: of a large cluster they are most of all there is.
    async fn slices(
        &mut self,
        client: &Client,
        wanted: SlicesWanted<'_>,
        snapshot: &mut Snapshot,
    ) -> Result<()> {
        let api = Api::all(client.clone());
        let of_node = |node: &str| ListParams::default().fields(&format!("spec.nodeName={node}"));
        match wanted {
            SlicesWanted::All => {
                let all = ListParams::default();
                snapshot.slices = self.list(&SLICES, &all, &api, None).await?;
                return Ok(());
            }
            SlicesWanted::Of(node) => {
                snapshot.slices = self.list(&SLICES, &of_node(node), &api, None).await?;
                return Ok(());
            }
            SlicesWanted::Few => {}
        }
        let names = match published(&api, &snapshot.driver).await {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                self.unread.push(SLICES.forbidden());
                return Ok(());
            }
            names => names.with_context(|| format!("{} cannot be listed", SLICES.name))?,
        };
        let (count, sharing) = (names.count, snapshot.sharing());
        let depends = snapshot.depends_on_all_devices();
        if count <= FEW && (depends || sharing.len() > FEW_NODES) {
            let all = ListParams::default();
            snapshot.slices = self.list(&SLICES, &all, &api, None).await?;
            return Ok(());
        }
        snapshot.published = Some(names.nodes);
        for node in sharing.iter().take(FEW_NODES) {
            let its: Vec<ResourceSlice> = self.list(&SLICES, &of_node(node), &api, None).await?;
            snapshot.slices.extend(its);
        }
        if depends || sharing.len() > FEW_NODES {
            self.unread.push(format!(
                "ResourceSlices are too many for an overview ({count}); unknown: why claims wait, and what is left of \
                 shares (divvy status claim|pod|node NAME, or divvy explain NAMESPACE/POD, says it)"
            ));
        }
        Ok(())
    }

    /// Policies as written, not as the type: the decoder says which field of which rule is wrong.
    async fn policies(&mut self, client: &Client) -> Result<Policies> {
        let kind = ApiResource::erase::<GpuPolicyObject>(&());
        let all = Api::<DynamicObject>::all_with(client.clone(), &kind);
        let objects = self
            .list(&POLICIES, &ListParams::default(), &all, None)
            .await?;
        let mut policies = Policies::new();
        for mut object in objects {
            object.types = Some(TypeMeta::resource::<GpuPolicyObject>());
            let name = object.metadata.name.clone().unwrap_or_default();
            let policy = decode_policy(&serde_json::to_value(object)?);
            policies.insert(name, policy);
        }
        Ok(policies)
    }

    /// All objects, or those of `own`, the API of the one namespace, if others cannot be listed. A
    /// kind that does not exist or is forbidden yields none, and `unread` says so.
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
        let Kind {
            name,
            resource,
            missing,
            ..
        } = kind;
        let failed = || format!("{name} cannot be listed");
        match pages(all, params).await {
            Err(kube::Error::Api(status)) if status.code == 404 && *name == GPU_NODES.name => {
                self.unread
                    .push(format!("{NOT_SERVED}; unknown: {missing}"));
                return Ok(Vec::new());
            }
            // A definition that this answer can do without.
            Err(kube::Error::Api(status))
                if status.code == 404 && resource.ends_with(".divvy.dev") =>
            {
                self.unread.push(format!(
                    "{name} are not served: divvy's chart installs their CRD; unknown: {missing}"
                ));
                return Ok(Vec::new());
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {}
            Err(error) if is_unknown_user(&error) => return Err(unanswered(error)),
            other => return other.with_context(failed),
        }
        let right = kind.right();
        if let Some(own) = own {
            match pages(own, params).await {
                Ok(found) => {
                    let others = format!("{name} of namespaces other than {}", self.namespace);
                    self.unread.push(format!(
                        "{others} cannot be listed; unknown there: {missing} ({right})"
                    ));
                    return Ok(found);
                }
                Err(kube::Error::Api(status)) if status.code == 403 => {}
                other => return other.with_context(failed),
            }
        }
        self.unread.push(kind.forbidden());
        Ok(Vec::new())
    }

    /// Lists Events in the one namespace.
    async fn events(&mut self, own: &Api<Event>, params: &ListParams) -> Result<Vec<Event>> {
        match pages(own, params).await {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                let events = format!("Events of namespace {} cannot be listed", self.namespace);
                self.unread.push(format!(
                    "{events}; unknown: what the kubelet reports of the claim"
                ));
                Ok(Vec::new())
            }
            other => other.context("Events cannot be listed"),
        }
    }

    /// Lists the pods that are asked about: the one of the very name, else those that begin so.
    async fn named(
        &mut self,
        client: &Client,
        wanted: Wanted<'_>,
        claims: &[ResourceClaim],
    ) -> Result<Vec<Pod>> {
        let is_claim = |name: &str| {
            claims.iter().any(|claim| {
                let meta = &claim.metadata;
                meta.name.as_deref() == Some(name)
                    && meta.namespace.as_deref() == Some(wanted.namespace)
            })
        };
        let (name, may_begin) = match wanted.pod {
            PodWanted::Named(name) => (name, true),
            PodWanted::UnlessClaim(name) if !is_claim(name) => (name, false),
            PodWanted::No | PodWanted::UnlessClaim(_) => return Ok(Vec::new()),
        };
        let own = Api::<Pod>::namespaced(client.clone(), wanted.namespace);
        let mut pods = match pages(&own, &ListParams::default()).await {
            Err(kube::Error::Api(status)) if status.code == 403 && may_begin => {
                let namespace = wanted.namespace;
                anyhow::bail!(
                    "you may not list pods in namespace {namespace} (kubectl auth can-i list pods -n {namespace}): ask a cluster admin for {VIEW}"
                );
            }
            Err(kube::Error::Api(status)) if status.code == 403 => {
                let pods = format!("Pods of namespace {} cannot be listed", self.namespace);
                self.unread
                    .push(format!("{pods}; ask a cluster admin for {VIEW}"));
                Vec::new()
            }
            other => other.context("Pods cannot be listed")?,
        };
        let name_of = |pod: &Pod| pod.metadata.name.clone().unwrap_or_default();
        if pods.iter().any(|pod| name_of(pod) == name) {
            pods.retain(|pod| name_of(pod) == name);
        } else {
            pods.retain(|pod| may_begin && name_of(pod).starts_with(name));
        }
        Ok(pods)
    }
}

/// Says whether the API server does not know who asks.
fn is_unknown_user(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 401)
}

/// Returns the error for a server that gave no answer, or none to this user.
fn unanswered(error: kube::Error) -> anyhow::Error {
    if is_unknown_user(&error) {
        return anyhow::Error::msg(
            "the API server refuses your credentials (401): log in again, or choose another --context",
        );
    }
    anyhow::Error::new(error).context("the API server does not answer")
}

/// Page by page.
/// Nodes that publish slices of a driver, and the number of the slices.
struct PublishedBy {
    nodes: BTreeSet<String>,
    count: usize,
}

/// Finds the nodes that publish, by the owners of their slices.
async fn published(api: &Api<ResourceSlice>, driver: &str) -> Result<PublishedBy, kube::Error> {
    let of_driver = ListParams::default().fields(&format!("spec.driver={driver}"));
    let mut params = of_driver.limit(PAGE);
    let mut found = PublishedBy {
        nodes: BTreeSet::new(),
        count: 0,
    };
    loop {
        let page = api.list_metadata(&params).await?;
        found.count += page.items.len();
        let owners = page
            .items
            .iter()
            .flat_map(kube::ResourceExt::owner_references);
        let nodes = owners.filter(|owner| owner.kind == "Node");
        found.nodes.extend(nodes.map(|owner| owner.name.clone()));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok(found),
        }
    }
}

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
