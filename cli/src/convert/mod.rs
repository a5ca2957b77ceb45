//! `divvy convert`: manifests for the device plugin, HAMi, KAI, gpu-manager and NVIDIA's DRA
//! driver, as claims of divvy. Pure but for [`run`].

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use divvy_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::claim::template::Request;
use crate::comments::{self, Comments};
use crate::yaml::{self, Node};
use crate::{Usage, format, manifests};

mod beside;
mod cel;
mod configs;
mod dra;
mod fit;
mod gke;
mod hints;
mod left;
mod nim;
mod notes;
mod nvfractions;
mod object;
mod old;
mod places;
mod pod;
mod ray;
mod resources;
#[cfg(test)]
pub(crate) mod tests;

use self::notes::{Level, Note};
use self::object::{Document, Objects};

/// Arguments of `divvy convert`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Manifests to rewrite: a file, a folder, or - for standard input
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Look into the folders of a folder, too
    #[arg(short = 'R', long)]
    recursive: bool,
    /// Output format; JSON is one List, and has no comments
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
    /// Write each file again where something was converted, with its comments; notes are on
    /// standard error alone
    #[arg(long, conflicts_with = "output")]
    in_place: bool,
    /// Memory of each GPU, such as 80Gi: parts in percent become amounts, with memory and compute
    /// apart
    #[arg(long, value_name = "AMOUNT")]
    gpu_memory: Option<divvy_model::Quantity>,
}

/// Facts beside the manifests.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Settings {
    /// Memory of each GPU in MiB.
    gpu_memory: Option<u64>,
}

impl Args {
    fn settings(&self) -> Result<Settings, Usage> {
        let mebibytes = |amount: &divvy_model::Quantity| {
            let bytes = u64::try_from(amount.rounded_up()).unwrap_or(0);
            let mebibytes = bytes >> 20;
            let unclear = || {
                Usage(format!(
                    "--gpu-memory {amount} is less than 1Mi: write an amount such as 80Gi"
                ))
            };
            (mebibytes > 0).then_some(mebibytes).ok_or_else(unclear)
        };
        let gpu_memory = self.gpu_memory.as_ref().map(mebibytes).transpose()?;
        Ok(Settings { gpu_memory })
    }
}

/// Format of manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Output {
    /// For people and programs
    Yaml,
    /// For programs
    Json,
}

/// Manifests as they are for divvy.
#[derive(Debug)]
pub(crate) struct Converted {
    pub(crate) documents: Vec<Document>,
    /// Notes about the whole.
    pub(crate) notes: Vec<Note>,
    /// False if nothing in the manifests asks for a GPU of these systems.
    pub(crate) found_any: bool,
}

/// Prints the manifests as they are for divvy, and notes on standard error. Exit status 1 when a
/// part could not be converted.
pub fn run(args: &Args) -> Result<ExitCode> {
    let usage = |error: anyhow::Error| Usage(format!("{error:#}"));
    let mut files: Vec<(String, usize)> = Vec::new();
    let mut documents = Vec::new();
    for path in &args.files {
        if args.in_place && path.as_os_str() == "-" {
            return Err(Usage("--in-place needs files, and - is standard input".to_owned()).into());
        }
        for (name, text) in manifests::texts(path, args.recursive).map_err(usage)? {
            let read = yaml::documents(&name, &text).map_err(usage)?;
            let mut comments = comments::of(&text).into_iter();
            documents.extend(
                read.into_iter()
                    .map(|node| (node, comments.next().unwrap_or_default())),
            );
            files.push((name, documents.len()));
        }
    }
    if documents.is_empty() {
        return Err(Usage("no objects in the files".to_owned()).into());
    }
    let before: Vec<Node> = documents.iter().map(|(node, _)| node.clone()).collect();
    let converted = convert_all(documents, args.settings()?);
    if args.in_place {
        converted.write(&files, &before)?;
    } else {
        // On a terminal the notes are read once.
        let with_notes = !std::io::stdout().is_terminal();
        let text = match args.output {
            Output::Yaml => converted.yaml(with_notes)?,
            Output::Json => converted.json()?,
        };
        format::print(text.trim_end())?;
    }
    converted
        .all_notes()
        .for_each(|note| format::talk(&note.to_string()));
    if !converted.found_any {
        format::talk(
            "note: nothing here asks for a GPU that divvy convert knows; it is printed as it is",
        );
    }
    Ok(if converted.is_complete() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Rewrites the documents of a text, as `divvy convert -f` does, without notes.
pub fn text(name: &str, text: &str) -> Result<String> {
    let documents = yaml::documents(name, text)?;
    let documents = documents
        .into_iter()
        .map(|node| (node, Comments::default()));
    convert_all(documents.collect(), Settings::default()).yaml(false)
}

/// Rewrites manifests without comments.
#[cfg(test)]
pub(crate) fn convert(documents: Vec<Node>, settings: Settings) -> Converted {
    let documents = documents
        .into_iter()
        .map(|node| (node, Comments::default()));
    convert_all(documents.collect(), settings)
}

/// Rewrites manifests, each with its comments.
fn convert_all(documents: Vec<(Node, Comments)>, settings: Settings) -> Converted {
    let before: Vec<Node> = documents.iter().map(|(node, _)| node.clone()).collect();
    let mut objects = Objects::of(&before, settings);
    let mut all: Vec<Document> = Vec::new();
    for (origin, (node, comments)) in documents.into_iter().enumerate() {
        let mut new = objects.convert(node);
        for document in &mut new {
            document.origin = origin;
        }
        // What is new comes before the object that the comments are of.
        if let Some(last) = new.last_mut() {
            last.comments = comments;
        }
        all.extend(new);
    }
    let documents = all;
    let is_same = documents.iter().map(|document| &document.node).eq(&before);
    let found_any = !is_same || documents.iter().any(|document| !document.notes.is_empty());
    let notes = standing(&objects.stand)
        .into_iter()
        .chain(policies(&objects.requests))
        .chain(fit::notes(&objects.parts, &objects.requests));
    Converted {
        documents,
        notes: notes.collect(),
        found_any,
    }
}

/// Says what needs no conversion: extended resources that classes of the chart stand for.
fn standing(pods: &[bool]) -> Option<Note> {
    let stand = pods.iter().filter(|stands| **stands).count();
    let what = match stand {
        0 => return None,
        _ if stand == pods.len() => {
            "on Kubernetes 1.36 and later nothing here has to be converted: classes of divvy's chart stand for nvidia.com/gpu and \
             nvidia.com/mig-PROFILE (docs/migrate/device-plugin.md)"
        }
        _ => {
            "on Kubernetes 1.36 and later nothing has to be converted that asks for nvidia.com/gpu or nvidia.com/mig-PROFILE alone: classes \
             of divvy's chart stand for them (docs/migrate/device-plugin.md)"
        }
    };
    Some(Note::general(what))
}

/// Notes the policies that the claims need, since divvy offers neither shares nor, where MIG mode
/// is off, partitions by itself.
pub(crate) fn policies(requests: &[Request]) -> Vec<Note> {
    let any = |is: &dyn Fn(&Request) -> bool| requests.iter().any(is);
    let needs = [
        (
            any(&|request| request.is_fraction()),
            "percent: a part of any GPU needs a GpuPolicy with shares: {unit: Percent}, such as examples/by-percent.yaml (docs/sharing.md)",
        ),
        (
            any(&|request| request.class == names::CLASS_SHARE && !request.is_fraction()),
            "shares need a GpuPolicy that offers them, such as examples/all-modes.yaml (docs/policy.md)",
        ),
        (
            any(&|request| request.class == names::CLASS_MIG_SHARE),
            "shares of partitions need a GpuPolicy with mig: {sharing: [TimeSlicing]}, as in examples/mig-share (docs/shares-in-partitions.md)",
        ),
        (
            any(&|request| request.class == names::CLASS_MPS),
            "MPS needs mps.enabled in the chart, and a GpuPolicy with modes: [Mps], as in examples/mps-share (docs/mps.md)",
        ),
        (
            any(&|request| request.class == names::CLASS_MIG_MPS),
            "MPS in partitions needs mps.enabled in the chart, and a GpuPolicy with mig: {sharing: [Mps]}, as in examples/mig-mps \
             (docs/shares-in-partitions.md)",
        ),
        (
            any(&|request| request.class == names::CLASS_MIG),
            "partitions need MIG mode, or a GpuPolicy that offers them, such as examples/all-modes.yaml (docs/policy.md)",
        ),
    ];
    needs
        .into_iter()
        .filter(|(needed, _)| *needed)
        .map(|(_, text)| Note::general(text))
        .collect()
}

impl Converted {
    /// Returns all notes, in the order of the documents.
    pub(crate) fn all_notes(&self) -> impl Iterator<Item = &Note> {
        let of_documents = self.documents.iter().flat_map(|document| &document.notes);
        self.notes.iter().chain(of_documents)
    }

    /// Says whether everything was converted.
    pub(crate) fn is_complete(&self) -> bool {
        self.all_notes().all(|note| note.level == Level::Note)
    }

    /// Writes the documents, each after its notes.
    pub(crate) fn yaml(&self, with_notes: bool) -> Result<String> {
        let comment = |note: &Note| format!("# {note}\n");
        let mut text = String::new();
        if with_notes {
            text.extend(self.notes.iter().map(comment));
        }
        for (number, document) in self.documents.iter().enumerate() {
            if number > 0 {
                text += "---\n";
            }
            if with_notes {
                text.extend(document.notes.iter().map(comment));
            }
            text += &document.text()?;
        }
        Ok(text)
    }

    /// Writes each file again in which something changed. `files` are names, each with the number
    /// of documents up to its end, and `before` is what all documents were.
    fn write(&self, files: &[(String, usize)], before: &[Node]) -> Result<()> {
        let mut start = 0;
        for (name, end) in files {
            let own = || {
                let all = self.documents.iter();
                all.filter(move |document| (start..*end).contains(&document.origin))
            };
            let old = before.get(start..*end).unwrap_or_default();
            if !own().map(|document| &document.node).eq(old) {
                let texts: Result<Vec<String>> = own().map(Document::text).collect();
                // Whole or not at all: what is there is the only copy.
                let new = format!("{name}.divvy-new");
                fs_err::write(&new, texts?.join("---\n"))?;
                fs_err::rename(&new, name)?;
                format::talk(&format!("{name}: converted"));
            }
            start = *end;
        }
        Ok(())
    }

    /// Writes the documents as one object.
    fn json(&self) -> Result<String> {
        let nodes: Vec<Node> = self
            .documents
            .iter()
            .map(|document| document.node.clone())
            .collect();
        yaml::json(&nodes)
    }
}

/// Returns the pods in an object that makes them, each with its path.
pub fn pods(object: &serde_json::Value) -> Vec<(String, serde_json::Value)> {
    let node = serde_json::from_value::<Node>(object.clone());
    let Ok(Node::Map(object)) = node else {
        return Vec::new();
    };
    let pod = |place: places::Place| {
        let template = Node::Map(place.template(&object)?);
        Some((place.spec(), serde_json::to_value(template).ok()?))
    };
    places::of(&object).into_iter().filter_map(pod).collect()
}

/// Returns the path of a resource by which an object asks for a GPU outside of pods.
pub fn asks_elsewhere(object: &serde_json::Value) -> Option<String> {
    let node = serde_json::from_value::<Node>(object.clone()).ok()?;
    let mut notes = notes::Notes::default();
    left::notes(node.map()?, &[], None, &mut notes);
    let first = notes.into_all().into_iter().next()?;
    Some(first.field().to_owned())
}

/// Says whether an object is a configuration of another system, which becomes policies.
pub fn is_configuration(object: &serde_json::Value) -> bool {
    let node = serde_json::from_value::<Node>(object.clone());
    let policies = |node: Node| configs::convert(node.map()?, &mut notes::Notes::default());
    node.ok().and_then(policies).is_some()
}

/// Request of a pod for a part of a GPU, which the scheduler and divvy do not understand.
#[derive(Debug, PartialEq)]
pub(crate) struct Foreign {
    /// Resources and annotations that make it.
    pub(crate) keys: Vec<String>,
    /// The claim that is meant, or the reason why there is none.
    pub(crate) meant: Result<String, String>,
}

/// Returns a pod's request by HAMi's, KAI's or gpu-manager's means, and the claim that it is.
pub(crate) fn foreign(pod: &Pod) -> Option<Foreign> {
    let annotations = pod.metadata.annotations.iter().flat_map(|all| all.keys());
    let mut keys: Vec<String> = annotations
        .filter(|name| hints::asks_for_part(name))
        .cloned()
        .collect();
    let spec = pod.spec.as_ref()?;
    let containers = spec
        .init_containers
        .iter()
        .flatten()
        .chain(&spec.containers);
    for resources in containers.filter_map(|container| container.resources.as_ref()) {
        let amounts = resources.limits.iter().chain(&resources.requests).flatten();
        let names = amounts.map(|(name, _)| name);
        keys.extend(names.filter(|name| resources::is_amount(name)).cloned());
    }
    keys.sort();
    keys.dedup();
    if keys.is_empty() {
        return None;
    }
    let object = json!({"metadata": {"annotations": pod.metadata.annotations}, "spec": spec});
    let object: Node = serde_json::from_value(object).ok()?;
    let mut meant = None;
    let mut take = |asked: pod::Asked| {
        let requests = asked.claim.requests.iter();
        let words: Vec<String> = requests.map(Request::in_words).collect();
        meant = Some(words.join("; "));
        String::new()
    };
    let mut notes = notes::Notes::default();
    pod::convert(object.map()?, Settings::default(), &mut notes, &mut take);
    let refused = notes.into_all().into_iter();
    let why: Vec<String> = refused
        .filter(|note| note.level == Level::NotConverted)
        .map(|note| note.reason().to_owned())
        .collect();
    let meant = meant.ok_or_else(|| why.join("; "));
    Some(Foreign { keys, meant })
}
