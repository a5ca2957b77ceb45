//! Equal problems of several GPUs or nodes, as one.

use std::collections::BTreeSet;

use super::report::NodeTrouble;
use super::snapshot::Snapshot;

/// Consecutive GPUs of which only the first and the last are named.
const RUN: usize = 3;

/// Problems that have the same words.
pub(super) struct Folded<'a> {
    entries: Vec<&'a NodeTrouble>,
    pub(super) why: String,
    pub(super) remedy: String,
}

impl<'a> Folded<'a> {
    pub(super) fn kind(&self) -> &'a str {
        self.entries.first().map_or("", |one| &one.trouble.kind)
    }

    pub(super) fn claim(&self) -> &'a str {
        self.entries.first().map_or("", |one| &one.trouble.claim)
    }

    /// The time since which the oldest is there.
    pub(super) fn since(&self) -> Option<&'a str> {
        let all = self.entries.iter();
        all.filter_map(|one| one.trouble.since.as_deref()).min()
    }

    /// The claims that hold any of the GPUs.
    pub(super) fn affects(&self) -> BTreeSet<&'a String> {
        self.entries.iter().flat_map(|one| &one.affects).collect()
    }

    /// The GPUs and nodes, one text for each node: `n1 gpu-0 to gpu-7`.
    pub(super) fn places(&self) -> Vec<String> {
        let mut nodes: Vec<(&str, &str, Vec<&str>)> = Vec::new();
        for NodeTrouble { node, trouble, .. } in &self.entries {
            let gpu = trouble.gpu.as_str();
            match nodes.iter_mut().find(|(known, ..)| known == node) {
                Some((.., gpus)) => gpus.push(gpu),
                None => nodes.push((node, &trouble.subject, vec![gpu])),
            }
        }
        let place = |(node, subject, gpus): (&str, &str, Vec<&str>)| {
            let gpus = in_runs(&gpus);
            let parts = [node, &gpus, subject].into_iter();
            let parts: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
            parts.join(" ")
        };
        nodes.into_iter().map(place).collect()
    }
}

/// Folds problems with the same words, in the order of the first of each. A GPU's UUID in them
/// makes no difference: it is in the table of the node.
pub(super) fn fold<'a>(snapshot: &Snapshot, troubles: &[&'a NodeTrouble]) -> Vec<Folded<'a>> {
    let mut all: Vec<Folded<'a>> = Vec::new();
    for entry in troubles {
        let uuid = uuid_of(snapshot, entry);
        let general = |text: &str| match uuid {
            Some(uuid) => text.replace(uuid, "UUID"),
            None => text.to_owned(),
        };
        let (why, remedy) = (general(&entry.trouble.why), general(&entry.trouble.remedy));
        let is_equal = |known: &&mut Folded<'_>| {
            let of = known.entries.first().map(|one| &one.trouble);
            of.is_some_and(|of| {
                (&of.kind, &of.subject, &of.claim)
                    == (
                        &entry.trouble.kind,
                        &entry.trouble.subject,
                        &entry.trouble.claim,
                    )
            }) && (&known.why, &known.remedy) == (&why, &remedy)
        };
        match all.iter_mut().find(is_equal) {
            Some(known) => known.entries.push(entry),
            None => all.push(Folded {
                entries: vec![entry],
                why,
                remedy,
            }),
        }
    }
    // A problem that is alone keeps its words.
    for one in &mut all {
        if let [only] = one.entries.as_slice() {
            one.why.clone_from(&only.trouble.why);
            one.remedy.clone_from(&only.trouble.remedy);
        }
    }
    all
}

fn uuid_of<'s>(snapshot: &'s Snapshot, entry: &NodeTrouble) -> Option<&'s str> {
    let report = snapshot.reports.get(&entry.node)?;
    let gpu = report
        .gpus
        .iter()
        .find(|gpu| gpu.name == entry.trouble.gpu)?;
    Some(gpu.uuid.as_str()).filter(|uuid| !uuid.is_empty())
}

/// Names GPUs, and of consecutive ones the first and the last: `gpu-0 to gpu-3, gpu-6`.
fn in_runs(gpus: &[&str]) -> String {
    let number = |gpu: &str| gpu.strip_prefix("gpu-")?.parse::<u32>().ok();
    let follows = |before: &str, next: &str| {
        let (before, next) = (number(before), number(next));
        before.is_some() && before.and_then(|before| before.checked_add(1)) == next
    };
    let runs = gpus.chunk_by(|before, next| follows(before, next));
    let named = runs.map(|run| match run {
        [first, .., last] if run.len() >= RUN => format!("{first} to {last}"),
        few => few.join(", "),
    });
    named.collect::<Vec<_>>().join(", ")
}
