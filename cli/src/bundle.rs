//! `divvy bundle`: all that a report of a fault needs, in one archive: the answer of `divvy
//! status`, objects of the API, Events and logs of divvy's pods, without secrets. Parts that may
//! not be read are named in it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{ListParams, LogParams};
use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client, ResourceExt as _};
use serde_json::Value;

use crate::format;
use crate::status::read::{Access, ClaimsWanted, PodWanted, SlicesWanted, Wanted, read};
use crate::status::{render, report};

mod open;
mod redact;

pub use self::open::Opened;

/// Objects in one answer of the server.
const PAGE: u32 = 500;
/// Label of what the chart installs.
const OWN: &str = "app.kubernetes.io/name=divvy";

/// Arguments of `divvy bundle`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    access: Access,
    /// The archive (.tar.gz), or a folder, which must not be there yet
    #[arg(
        short,
        long,
        value_name = "FILE",
        default_value = "divvy-bundle.tar.gz"
    )]
    output: PathBuf,
    /// Namespace of claims and pods if those of all namespaces may not be read
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// Lines of each log, from its end
    #[arg(long, value_name = "NUMBER", default_value_t = 2000, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    log_lines: i64,
}

/// Files of a bundle by their paths, and what could not be read.
#[derive(Debug, Default)]
struct Bundle {
    files: BTreeMap<String, String>,
    unread: Vec<String>,
}

/// A kind of objects in a bundle.
struct Kind {
    group: &'static str,
    version: &'static str,
    name: &'static str,
    plural: &'static str,
    /// Objects of the one namespace where those of all may not be read.
    namespaced: bool,
    /// Objects to ask for, of kinds with many others.
    labels: &'static str,
}

const fn kind(
    group: &'static str,
    version: &'static str,
    name: &'static str,
    plural: &'static str,
) -> Kind {
    Kind {
        group,
        version,
        name,
        plural,
        namespaced: false,
        labels: "",
    }
}

/// Kinds of the bundle.
const KINDS: [Kind; 10] = [
    kind("divvy.dev", "v1beta1", "GpuNode", "gpunodes"),
    kind("divvy.dev", "v1beta1", "GpuPolicy", "gpupolicies"),
    kind("", "v1", "Node", "nodes"),
    kind("resource.k8s.io", "v1", "ResourceSlice", "resourceslices"),
    kind("resource.k8s.io", "v1", "DeviceClass", "deviceclasses"),
    kind(
        "resource.k8s.io",
        "v1",
        "DeviceTaintRule",
        "devicetaintrules",
    ),
    Kind {
        namespaced: true,
        ..kind("resource.k8s.io", "v1", "ResourceClaim", "resourceclaims")
    },
    Kind {
        namespaced: true,
        ..kind(
            "resource.k8s.io",
            "v1",
            "ResourceClaimTemplate",
            "resourceclaimtemplates",
        )
    },
    Kind {
        labels: OWN,
        ..kind("apps", "v1", "DaemonSet", "daemonsets")
    },
    Kind {
        labels: OWN,
        ..kind("apps", "v1", "Deployment", "deployments")
    },
];

/// Collects and writes. `about` is what the program says of itself. Exit status 1 where nothing
/// could be read.
pub fn run(args: &Args, about: &str) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let bundle = runtime.block_on(collect(args, about))?;
    write(&args.output, &bundle.files)?;
    let mut text = format!(
        "{}: {} files, without secrets. Look through it before you send it",
        args.output.display(),
        bundle.files.len()
    );
    for what in &bundle.unread {
        text += &format!("\nnot in it: {what}");
    }
    format::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

async fn collect(args: &Args, about: &str) -> Result<Bundle> {
    let (client, namespace, server) = args.access.client().await?;
    let namespace = args.namespace.clone().unwrap_or(namespace);
    let mut bundle = Bundle::default();
    let version = client
        .apiserver_version()
        .await
        .with_context(|| format!("{server} does not answer"))?;
    bundle.status(&client, &namespace).await;
    for kind in &KINDS {
        bundle.objects(&client, kind, &namespace).await?;
    }
    bundle.own(&client, args.log_lines).await?;
    let mut readme = format!("{about}\nKubernetes {}\n", version.git_version);
    readme += "\nValues of variables, tokens, addresses and managed fields are left out.\n";
    if !bundle.unread.is_empty() {
        readme += "\nNot in it:\n";
        readme.extend(bundle.unread.iter().map(|what| format!("- {what}\n")));
    }
    bundle.files.insert("README.txt".to_owned(), readme);
    Ok(bundle)
}

impl Bundle {
    fn json(&mut self, path: &str, value: &Value) -> Result<()> {
        let text = serde_json::to_string_pretty(value)?;
        self.files.insert(path.to_owned(), text + "\n");
        Ok(())
    }

    /// Adds the answer of `divvy status`.
    async fn status(&mut self, client: &Client, namespace: &str) {
        let wanted = Wanted {
            driver: None,
            claims: ClaimsWanted::Waiting,
            events: false,
            policies: true,
            plugins: true,
            namespace,
            pod: PodWanted::No,
            slices: SlicesWanted::All,
        };
        let added = match read(client, wanted).await {
            Ok(snapshot) => {
                let fleet = report::fleet(&snapshot, None);
                let text = render::fleet(&snapshot, &fleet, true);
                self.files.insert("status.txt".to_owned(), text + "\n");
                serde_json::to_value(&fleet)
                    .map_err(anyhow::Error::new)
                    .and_then(|value| self.json("status.json", &value))
            }
            Err(error) => Err(error),
        };
        if let Err(error) = added {
            self.unread.push(format!("divvy status: {error:#}"));
        }
    }

    /// Adds the objects of a kind. A kind that may not be read is noted; one that does not exist is
    /// not missed.
    async fn objects(&mut self, client: &Client, of: &Kind, namespace: &str) -> Result<()> {
        let gvk = GroupVersionKind::gvk(of.group, of.version, of.name);
        let resource = ApiResource::from_gvk_with_plural(&gvk, of.plural);
        let everything = Api::<DynamicObject>::all_with(client.clone(), &resource);
        let mut params = ListParams::default().limit(PAGE);
        if !of.labels.is_empty() {
            params = params.labels(of.labels);
        }
        let mut place = String::new();
        let mut found = pages(&everything, &params).await;
        if of.namespaced && is_refused(&found) {
            let own = Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource);
            found = pages(&own, &params).await;
            place = format!(" of namespaces other than {namespace}");
        }
        match found {
            Ok(all) => {
                if !place.is_empty() {
                    self.unread.push(format!("{}{place}", of.plural));
                }
                let mut items = all
                    .into_iter()
                    .map(serde_json::to_value)
                    .collect::<Result<Vec<Value>, _>>()?;
                items.iter_mut().for_each(redact::object);
                self.json(&format!("objects/{}.json", of.plural), &Value::from(items))
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
            Err(error) => {
                self.unread
                    .push(format!("{}: {}", of.plural, short(&error)));
                Ok(())
            }
        }
    }

    /// Adds divvy's own pods with their logs, and the Events of their namespaces.
    async fn own(&mut self, client: &Client, lines: i64) -> Result<()> {
        let params = ListParams::default().labels(OWN).limit(PAGE);
        let pods = match pages(&Api::<Pod>::all(client.clone()), &params).await {
            Ok(pods) => pods,
            Err(error) => {
                let what = format!("divvy's pods, logs and Events: {}", short(&error));
                self.unread.push(what);
                return Ok(());
            }
        };
        let mut namespaces: Vec<String> = pods
            .iter()
            .filter_map(kube::ResourceExt::namespace)
            .collect();
        namespaces.sort();
        namespaces.dedup();
        for pod in &pods {
            self.logs(client, pod, lines).await;
        }
        let mut items = pods
            .iter()
            .map(serde_json::to_value)
            .collect::<Result<Vec<Value>, _>>()?;
        items.iter_mut().for_each(redact::object);
        self.json("objects/pods.json", &Value::from(items))?;
        for namespace in namespaces {
            let events = Api::<Event>::namespaced(client.clone(), &namespace);
            match pages(&events, &ListParams::default().limit(PAGE)).await {
                Ok(all) => {
                    let mut items = all
                        .iter()
                        .map(serde_json::to_value)
                        .collect::<Result<Vec<Value>, _>>()?;
                    items.iter_mut().for_each(redact::object);
                    self.json(&format!("events/{namespace}.json"), &Value::from(items))?;
                }
                Err(error) => {
                    let what = format!("Events of namespace {namespace}: {}", short(&error));
                    self.unread.push(what);
                }
            }
        }
        Ok(())
    }

    async fn logs(&mut self, client: &Client, pod: &Pod, lines: i64) {
        let namespace = pod.namespace().unwrap_or_default();
        let name = pod.name_any();
        let api = Api::<Pod>::namespaced(client.clone(), &namespace);
        let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
        for container in containers.map(|container| container.name.clone()) {
            let params = LogParams {
                container: Some(container.clone()),
                tail_lines: Some(lines),
                timestamps: true,
                ..LogParams::default()
            };
            let path = format!("logs/{namespace}/{name}/{container}");
            match api.logs(&name, &params).await {
                Ok(text) => {
                    self.files.insert(format!("{path}.log"), redact::log(&text));
                }
                Err(error) => {
                    let what = format!("log of pod {namespace}/{name}: {}", short(&error));
                    self.unread.push(what);
                    return;
                }
            }
            let before = LogParams {
                previous: true,
                ..params
            };
            // A container that never ended has none.
            if let Ok(text) = api.logs(&name, &before).await {
                self.files
                    .insert(format!("{path}.previous.log"), redact::log(&text));
            }
        }
    }
}

fn is_refused<T>(found: &Result<T, kube::Error>) -> bool {
    matches!(found, Err(kube::Error::Api(status)) if status.code == 403)
}

/// Says why something could not be read, in the server's words where it answered.
fn short(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 403 => "you may not read them".to_owned(),
        kube::Error::Api(status) => format!("{} ({})", status.message, status.code),
        other => divvy_telemetry::Chain(other).to_string(),
    }
}

/// Reads page by page.
async fn pages<K>(api: &Api<K>, params: &ListParams) -> Result<Vec<K>, kube::Error>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut params = params.clone();
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

/// Writes the files as an archive, or into a folder where the name is of none.
fn write(output: &Path, files: &BTreeMap<String, String>) -> Result<()> {
    let name = output.to_string_lossy();
    if !name.ends_with(".tar.gz") && !name.ends_with(".tgz") {
        fs_err::create_dir(output)?;
        for (path, text) in files {
            let path = output.join(path);
            if let Some(folder) = path.parent() {
                fs_err::create_dir_all(folder)?;
            }
            fs_err::write(path, text)?;
        }
        return Ok(());
    }
    let file = fs_err::File::create(output)?;
    let mut archive = tar::Builder::new(GzEncoder::new(file, Compression::default()));
    for (path, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(u64::try_from(text.len())?);
        header.set_mode(0o644);
        let path = Path::new("divvy-bundle").join(path);
        archive.append_data(&mut header, path, text.as_bytes())?;
    }
    archive.into_inner()?.finish()?.flush()?;
    Ok(())
}
