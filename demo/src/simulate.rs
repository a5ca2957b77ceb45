//! `divvy simulate`: a fleet under a workload, side by side for fleets, policies and releases.

mod html;
mod jobs;
mod text;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use divvy_api::names::DRIVER;
use divvy_api::policy::GpuPolicy;
use divvy_cli::Usage;
use divvy_cli::format::{self, Format};
use divvy_cli::manifests::{self, Manifests};
use divvy_cli::objects::Printed;
use divvy_cli::seen::Seen;
use divvy_cli::status::read::Access;
use divvy_cli::taints::taint;
use divvy_fleet::{
    Kind, NOT_MODELLED, Nodes, Picture, Placed, Report, Settings, Strategy, Weights, node_names,
    picture, simulate,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceSlice};
use serde::Serialize;

use self::jobs::Workload;
use crate::fleet::{Fleet, Spec};
use crate::world::classes;

/// Arguments of `divvy simulate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The fleet: nodes and their GPUs, such as 40*h100x8,10*l40sx4+l4x2; several are compared
    #[arg(long, value_name = "FLEET", conflicts_with_all = ["context", "kubeconfig"])]
    sim: Vec<Spec>,
    /// Nodes and ResourceSlices of a cluster instead, as kubectl get nodes,resourceslices -o yaml
    /// prints them
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sim", "policy", "node_label", "context", "kubeconfig"])]
    nodes: Option<PathBuf>,
    /// A cluster instead, as it is now, from an archive or a folder of divvy bundle
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sim", "nodes", "policy", "node_label", "context", "kubeconfig"])]
    bundle: Option<PathBuf>,
    #[command(flatten)]
    access: Access,
    /// Label of the simulated nodes, which policies and pods can select; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = divvy_cli::inventory::label, conflicts_with_all = ["context", "kubeconfig"])]
    node_label: Vec<(String, String)>,
    /// GpuPolicies that decide what the nodes publish: a file or folder; several are compared
    #[arg(long, value_name = "FILE", conflicts_with_all = ["context", "kubeconfig"])]
    policy: Vec<PathBuf>,
    /// Classes, claims, templates, pods and workloads, which all come at the beginning and stay: a
    /// file, a folder, or - for standard input; may be given several times
    #[arg(short, long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Pods over time: CSV with the columns time,namespace,request,duration,priority, or JSON lines
    /// with these fields; times are seconds, a request is gpu, 4*gpu, mig:1g.10gb, share:10Gi,
    /// mps:10Gi, template:NAME or an extended resource (4*nvidia.com/gpu)
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Pods that are drawn: a mix (notebooks, inference, training) and their number, such as
    /// notebooks=2000; may be given several times
    #[arg(long, value_name = "MIX=PODS", value_parser = jobs::drawn)]
    generate: Vec<jobs::Drawn>,
    /// Extended resource by which drawn pods ask for whole GPUs, such as nvidia.com/gpu, instead of
    /// by a claim
    #[arg(long, value_name = "RESOURCE", requires = "generate")]
    limits: Option<String>,
    /// Time over which drawn pods arrive
    #[arg(long, value_name = "HOURS", default_value_t = 24.0, value_parser = jobs::hours)]
    hours: f64,
    /// Decides what is drawn, and between nodes of equal score
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Processor time and memory of each simulated node, such as 192,2Ti
    #[arg(long, value_name = "CPU,MEMORY", value_parser = jobs::resources, requires = "sim")]
    node_resources: Option<jobs::Resources>,
    /// Processor time and memory that pods of a trace or mix request for a GPU, such as 20,240Gi;
    /// for a part of one as much as it has of 80 GiB
    #[arg(long, value_name = "CPU,MEMORY", value_parser = jobs::resources)]
    pod_resources: Option<jobs::Resources>,
    /// Where the scheduler puts pods (NodeResourcesFit): by processor time and memory, of nodes
    /// that say what they have, and by devices; several are compared
    #[arg(long, value_enum, default_value = "least-allocated")]
    strategy: Vec<Packing>,
    /// Weight of devices that pods ask for as an extended resource (nvidia.com/gpu) in that
    /// strategy, beside 1 for processor time and for memory; other requests of devices have none
    #[arg(long, value_name = "WEIGHT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    device_weight: u8,
    /// The scheduler's percentageOfNodesToScore
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    percentage_of_nodes_to_score: Option<u8>,
    /// Release of Kubernetes, 1.34 to 1.37; several are compared
    #[arg(long, value_name = "RELEASE", default_value = "1.37", value_parser = format::release)]
    kubernetes: Vec<u32>,
    /// Also write where each pod went to this file: JSON lines with the time, the node and the
    /// devices
    #[arg(long, value_name = "FILE")]
    assignments: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Format of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// For people
    Table,
    /// For programs
    Json,
    /// For people and programs
    Yaml,
    /// A page with the GPUs over time, which needs no other file
    Html,
}

/// Values of `--strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Packing {
    /// Where most is left, as by default
    LeastAllocated,
    /// Where least is left
    MostAllocated,
}

impl Packing {
    fn name(self) -> String {
        let value = clap::ValueEnum::to_possible_value(&self);
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl From<Packing> for Strategy {
    fn from(packing: Packing) -> Self {
        match packing {
            Packing::LeastAllocated => Self::LeastAllocated,
            Packing::MostAllocated => Self::MostAllocated,
        }
    }
}

/// Answers of the command.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Answer {
    pub(crate) runs: Vec<OneRun>,
    /// Remarks on policies and on the workload.
    pub(crate) notes: Vec<String>,
    /// Parts of a cluster that are left out.
    pub(crate) not_modelled: Vec<String>,
    #[serde(skip)]
    assignments: Vec<Assignment>,
}

/// Place of a pod.
#[derive(Debug, Serialize)]
struct Assignment {
    /// Number of the pod, in the order of arrival.
    pod: usize,
    name: String,
    request: String,
    /// Time in seconds.
    at: f64,
    node: String,
    devices: Vec<String>,
}

/// A column of the answer.
#[derive(Debug, Serialize)]
pub(crate) struct OneRun {
    /// Difference from the other columns.
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) report: Report,
    #[serde(skip)]
    pub(crate) picture: Option<Picture>,
}

/// Runs `divvy simulate`.
pub fn run(args: &Args) -> Result<ExitCode> {
    let answer = answer(args)?;
    if let Some(file) = &args.assignments {
        if answer.runs.len() != 1 {
            bail!(Usage(
                "--assignments is of one run: give one fleet, policy, release and strategy"
                    .to_owned()
            ));
        }
        let lines: Result<Vec<String>, _> = answer
            .assignments
            .iter()
            .map(serde_json::to_string)
            .collect();
        fs_err::write(file, lines?.join("\n") + "\n")?;
    }
    match args.output {
        Output::Table => format::show(&answer, Format::Table, text::table)?,
        Output::Json => format::show(&answer, Format::Json, text::table)?,
        Output::Yaml => format::show(&answer, Format::Yaml, text::table)?,
        Output::Html => format::print(&html::page(&answer)?)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn usage(error: &anyhow::Error) -> anyhow::Error {
    Usage(format!("{error:#}")).into()
}

pub(crate) fn answer(args: &Args) -> Result<Answer> {
    let manifests = Manifests::of_files(&args.files).map_err(|error| usage(&error))?;
    let seen = seen(args)?;
    let of_cluster = seen.as_ref().and_then(|seen| seen.classes.clone());
    let mut known = match of_cluster {
        Some(classes) => classes,
        None => classes(DRIVER)?,
    };
    let named = |class: &DeviceClass| class.metadata.name.clone();
    known.retain(|class| {
        manifests
            .classes
            .iter()
            .all(|new| named(new) != named(class))
    });
    known.extend(manifests.classes.iter().cloned());
    let (waiting, left_out) = seen.as_ref().map(Seen::waiting).unwrap_or_default();
    let workload = Workload::of(args, &manifests, &known, &waiting);
    let mut workload = workload.map_err(|error| usage(&error))?;
    workload.notes.extend(left_out);
    let mut answer = Answer {
        notes: workload.notes.clone(),
        not_modelled: NOT_MODELLED.map(str::to_owned).to_vec(),
        ..Answer::default()
    };
    for (name, mut fleet) in fleets(args, &manifests, seen)? {
        for kind in &mut fleet.kinds {
            taint(&mut kind.slices, &manifests.taint_rules);
        }
        answer.notes.extend(fleet.notes.iter().map(|note| {
            if name.is_empty() {
                note.clone()
            } else {
                format!("{name}: {note}")
            }
        }));
        let ways = args.kubernetes.iter();
        let ways = ways.flat_map(|of| args.strategy.iter().map(move |strategy| (of, strategy)));
        for (kubernetes, strategy) in ways {
            let settings = Settings {
                seed: args.seed,
                strategy: (*strategy).into(),
                weights: Weights {
                    devices: i64::from(args.device_weight),
                    ..Weights::default()
                },
                percentage: args.percentage_of_nodes_to_score.map(usize::from),
                kubernetes: *kubernetes,
            };
            let nodes = Nodes {
                kinds: &fleet.kinds,
                classes: &known,
            };
            let (report, placed) = simulate(nodes, &workload.shapes, &workload.jobs, settings);
            answer.assignments = assignments(&fleet.kinds, &workload, &placed);
            let release = (args.kubernetes.len() > 1).then(|| format!("1.{kubernetes}"));
            let name: Vec<String> = Some(name.clone())
                .filter(|name| !name.is_empty())
                .into_iter()
                .chain(release)
                .chain((args.strategy.len() > 1).then(|| strategy.name()))
                .collect();
            answer.runs.push(OneRun {
                name: name.join(" "),
                report,
                picture: (args.output == Output::Html)
                    .then(|| picture(&fleet.kinds, &workload.jobs, &placed)),
            });
        }
    }
    Ok(answer)
}

/// Reads the cluster, where one is the fleet.
fn seen(args: &Args) -> Result<Option<Seen>> {
    if let Some(file) = &args.bundle {
        let seen = Seen::of_bundle(file).map_err(|error| usage(&error))?;
        return Ok(Some(seen));
    }
    if !args.sim.is_empty() || args.nodes.is_some() || !args.access.is_given() {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (client, _, server) = args.access.client().await?;
        let seen = Seen::of_cluster(&client).await.context(server)?;
        Ok(Some(seen))
    })
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds of a run fit")]
fn assignments(kinds: &[Kind], workload: &Workload, placed: &[Placed]) -> Vec<Assignment> {
    let nodes = node_names(kinds);
    let of = |placed: &Placed| {
        let job = workload.jobs.get(placed.job)?;
        Some(Assignment {
            pod: placed.job,
            name: job.name.clone(),
            request: workload.shapes.get(job.shape)?.name.clone(),
            at: placed.at as f64 / 1000.0,
            node: nodes.get(placed.node)?.clone(),
            devices: placed.devices.iter().map(|of| of.name.clone()).collect(),
        })
    };
    placed.iter().filter_map(of).collect()
}

/// Returns the fleets to compare: each of `--sim` under each of `--policy`.
fn fleets(args: &Args, manifests: &Manifests, seen: Option<Seen>) -> Result<Vec<(String, Fleet)>> {
    if let Some(seen) = seen {
        let mut notes = seen.notes.clone();
        notes.push("what runs now is taken to stay".to_owned());
        let kinds = seen.kinds();
        return Ok(vec![(String::new(), Fleet { kinds, notes })]);
    }
    if let Some(file) = &args.nodes {
        return Ok(vec![(
            String::new(),
            of_file(file).map_err(|error| usage(&error))?,
        )]);
    }
    if args.sim.is_empty() {
        bail!(Usage(
            "give a fleet (--sim 40*h100x8), its nodes (--nodes FILE), a cluster (--context NAME), or a bundle \
             of one (--bundle FILE)"
                .to_owned()
        ));
    }
    let mut policies: Vec<(String, Vec<GpuPolicy>)> = Vec::new();
    for file in &args.policy {
        let all = crate::examples::of_files(std::slice::from_ref(file), false, Some(DRIVER))
            .map_err(|error| usage(&error))?;
        policies.push((manifests::source(file), all.policies));
    }
    if policies.is_empty() {
        policies.push((String::new(), manifests.policies.clone()));
    }
    let mut fleets = Vec::new();
    for spec in &args.sim {
        for (file, policies_of) in &policies {
            let mut fleet = spec.nodes(DRIVER, policies_of, &args.node_label)?;
            if let Some(resources) = &args.node_resources {
                for kind in &mut fleet.kinds {
                    resources.give(&mut kind.node);
                }
            }
            let sim = (args.sim.len() > 1).then(|| spec.to_string());
            let policy = (policies.len() > 1).then(|| file.clone());
            let name: Vec<String> = sim.into_iter().chain(policy).collect();
            fleets.push((name.join(" "), fleet));
        }
    }
    Ok(fleets)
}

/// Reads nodes and their slices, each node a kind of its own.
fn of_file(file: &Path) -> Result<Fleet> {
    let printed = Printed::read(file)?;
    let (mut nodes, mut slices) = (printed.of("Node")?, printed.of("ResourceSlice")?);
    nodes.sort_by(|a: &Node, b| a.metadata.name.cmp(&b.metadata.name));
    slices.sort_by(|a: &ResourceSlice, b| a.metadata.name.cmp(&b.metadata.name));
    if nodes.is_empty() {
        bail!(
            "{}: no Node in it (kubectl get nodes,resourceslices -o yaml prints them)",
            file.display()
        );
    }
    let kinds = nodes.into_iter().map(|node| {
        let name = node.metadata.name.clone().unwrap_or_default();
        let its = |slice: &&ResourceSlice| slice.spec.node_name.as_ref() == Some(&name);
        Kind {
            slices: slices.iter().filter(its).cloned().collect(),
            name,
            count: 1,
            node,
            ..Kind::default()
        }
    });
    let elsewhere = slices
        .iter()
        .filter(|slice| slice.spec.node_name.is_none())
        .count();
    let mut fleet = Fleet {
        kinds: kinds.collect(),
        notes: Vec::new(),
    };
    if elsewhere > 0 {
        fleet.notes.push(format!(
            "{elsewhere} ResourceSlices without a node are left out"
        ));
    }
    Ok(fleet)
}

#[cfg(test)]
mod tests;
