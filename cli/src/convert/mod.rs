//! `divvy convert`: manifests for the device plugin, HAMi, KAI, gpu-manager and NVIDIA's DRA
//! driver, as claims of divvy. Pure but for [`run`].

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use divvy_api::names;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::claim::template::{Claim, Request};
use crate::yaml::{self, Node};
use crate::{Usage, format, manifests};

mod cel;
mod dra;
mod gke;
mod hints;
mod notes;
mod object;
mod pod;
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
    /// Output format; JSON is one List, and has no comments
    #[arg(short, long, value_enum, default_value_t = Output::Yaml)]
    output: Output,
}

/// Format of manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
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
    let mut documents = Vec::new();
    for file in &args.files {
        for (name, text) in manifests::texts(file).map_err(usage)? {
            documents.extend(yaml::documents(&name, &text).map_err(usage)?);
        }
    }
    if documents.is_empty() {
        return Err(Usage("no objects in the files".to_owned()).into());
    }
    let converted = convert(documents);
    let text = match args.output {
        Output::Yaml => converted.yaml()?,
        Output::Json => converted.json()?,
    };
    format::print(text.trim_end())?;
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

/// Rewrites manifests.
pub(crate) fn convert(documents: Vec<Node>) -> Converted {
    let mut objects = Objects::of(&documents);
    let before = documents.clone();
    let documents: Vec<Document> = documents
        .into_iter()
        .flat_map(|document| objects.convert(document))
        .collect();
    let is_same = documents.iter().map(|document| &document.node).eq(&before);
    let found_any = !is_same || documents.iter().any(|document| !document.notes.is_empty());
    Converted {
        documents,
        notes: policies(&objects.requests),
        found_any,
    }
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
    pub(crate) fn yaml(&self) -> Result<String> {
        let comment = |note: &Note| format!("# {note}\n");
        let mut text: String = self.notes.iter().map(comment).collect();
        for (number, document) in self.documents.iter().enumerate() {
            if number > 0 {
                text += "---\n";
            }
            text.extend(document.notes.iter().map(comment));
            text += &yaml::text(&document.node)?;
        }
        Ok(text)
    }

    /// Writes the documents as one object.
    fn json(&self) -> Result<String> {
        let nodes: Vec<Node> = self
            .documents
            .iter()
            .map(|document| document.node.clone())
            .collect();
        let list = match nodes.as_slice() {
            [one] => one.clone(),
            _ => Node::from([
                ("apiVersion", "v1".into()),
                ("kind", "List".into()),
                ("items", Node::List(nodes)),
            ]),
        };
        Ok(serde_json::to_string_pretty(&list)?)
    }
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
    let mut take = |claim: &Claim| {
        let words: Vec<String> = claim.requests.iter().map(Request::in_words).collect();
        meant = Some(words.join("; "));
        String::new()
    };
    let mut notes = notes::Notes::default();
    pod::convert(object.map()?, "", &mut notes, &mut take);
    let refused = notes.into_all().into_iter();
    let why: Vec<String> = refused
        .filter(|note| note.level == Level::NotConverted)
        .map(|note| note.reason().to_owned())
        .collect();
    let meant = meant.ok_or_else(|| why.join("; "));
    Some(Foreign { keys, meant })
}
