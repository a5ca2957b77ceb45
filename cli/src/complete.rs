//! Completion of a command line: subcommands, options and their values from the command itself, and
//! names of nodes, GPUs, pods, claims and policies from the cluster. It serves kubectl, which runs
//! `kubectl_complete-divvy` with the words so far.

use std::collections::BTreeSet;
use std::time::Duration;

use clap::{Arg, Command};
use divvy_api::node::GpuNode;
use divvy_api::policy::GpuPolicyObject;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::core::DynamicObject;
use kube::{Api, Client, ResourceExt as _};
use serde::de::DeserializeOwned;

use crate::status::read::Access;

/// Time that a person waits for names of the cluster; without them there is still the rest.
const PATIENCE: Duration = Duration::from_secs(3);
/// Names that one answer has at most.
const MOST: u32 = 500;

/// Names of objects that complete a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    Nodes,
    /// Names such as `NODE/gpu-0`.
    Gpus,
    /// Names such as `NAMESPACE/NAME`.
    Pods,
    /// Names such as `NAMESPACE/NAME`.
    Claims,
    Policies,
    Namespaces,
    Contexts,
}

/// Words that can come next, and whether they are names of files.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Candidates {
    pub words: Vec<String>,
    /// Names from the cluster that are candidates, too.
    pub names: Option<Names>,
    pub files: bool,
}

/// Values of options by their long names.
const OF_OPTIONS: [(&str, Names); 3] = [
    ("namespace", Names::Namespaces),
    ("context", Names::Contexts),
    ("node-name", Names::Nodes),
];
/// Arguments of subcommands by their paths.
const OF_COMMANDS: [(&str, Names); 5] = [
    ("status node", Names::Nodes),
    ("status gpu", Names::Gpus),
    ("status pod", Names::Pods),
    ("status claim", Names::Claims),
    ("status policy", Names::Policies),
];
/// Options whose values are files.
const FILES: [&str; 6] = [
    "file",
    "policy",
    "kubeconfig",
    "from",
    "driver-root",
    "nvml-library",
];

/// Returns what can come after these words, of which the last is the beginning that is there.
pub fn candidates(root: &Command, words: &[String]) -> Candidates {
    let Some((last, before)) = words.split_last() else {
        return Candidates::default();
    };
    let mut command = root;
    let mut path: Vec<&str> = Vec::new();
    let mut globals: Vec<&Arg> = Vec::new();
    let mut arguments = 0_usize;
    let mut waiting: Option<&Arg> = None;
    for word in before {
        if waiting.take().is_some() {
            continue;
        }
        if word.starts_with('-') && word.len() > 1 {
            let of = option(command, &globals, word);
            waiting = of.filter(|of| takes_value(of) && !word.contains('='));
        } else if let Some(inner) = command.find_subcommand(word) {
            globals.extend(command.get_arguments().filter(|arg| arg.is_global_set()));
            path.push(inner.get_name());
            command = inner;
            arguments = 0;
        } else {
            arguments += 1;
        }
    }
    if let Some(of) = waiting {
        return values(of, last, "");
    }
    if let Some((name, value)) = last.split_once('=').filter(|_| last.starts_with("--")) {
        let of = option(command, &globals, name);
        return of.map_or_else(Candidates::default, |of| {
            values(of, value, &format!("{name}="))
        });
    }
    let mut found = Candidates::default();
    if last.starts_with('-') {
        let all = command.get_arguments().chain(globals.iter().copied());
        let long = all
            .filter(|arg| !arg.is_hide_set())
            .filter_map(Arg::get_long);
        let long = long.map(|name| format!("--{name}"));
        found.words = matching(long, last);
        return found;
    }
    let inner = command.get_subcommands();
    let inner = inner.filter(|inner| !inner.is_hide_set() && arguments == 0);
    found.words = matching(inner.map(|inner| inner.get_name().to_owned()), last);
    let mut positional = command.get_positionals();
    if let Some(of) = positional.nth(arguments) {
        let possible = of.get_possible_values().into_iter();
        let possible = possible.filter(|value| !value.is_hide_set());
        let possible = possible.map(|value| value.get_name().to_owned());
        found.words.extend(matching(possible, last));
        let path = path.join(" ");
        let names = OF_COMMANDS.iter().find(|(of, _)| *of == path);
        found.names = names.map(|(_, names)| *names);
    }
    found
}

/// Returns the option that is written so.
fn option<'c>(command: &'c Command, globals: &[&'c Arg], word: &str) -> Option<&'c Arg> {
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    let is_it = |arg: &&Arg| match name.strip_prefix("--") {
        Some(long) => arg.get_long() == Some(long),
        None => arg.get_short() == name.chars().nth(1) && name.chars().count() == 2,
    };
    let mut all = command.get_arguments().chain(globals.iter().copied());
    all.find(is_it)
}

fn takes_value(of: &Arg) -> bool {
    of.get_action().takes_values()
}

/// Returns the values that an option can have, each after `before`.
fn values(of: &Arg, begins: &str, before: &str) -> Candidates {
    let long = of.get_long().unwrap_or_default();
    let possible = of.get_possible_values().into_iter();
    let possible = possible
        .filter(|value| !value.is_hide_set())
        .map(|value| value.get_name().to_owned());
    let words = matching(possible, begins)
        .into_iter()
        .map(|word| format!("{before}{word}"))
        .collect();
    let names = OF_OPTIONS.iter().find(|(of, _)| *of == long);
    Candidates {
        words,
        names: names.map(|(_, names)| *names),
        files: FILES.contains(&long),
    }
}

fn matching(all: impl Iterator<Item = String>, begins: &str) -> Vec<String> {
    let all: BTreeSet<String> = all.filter(|word| word.starts_with(begins)).collect();
    all.into_iter().collect()
}

/// Returns the answer as kubectl reads it of a plugin: a word a line, and a sum of directives: 4
/// for no names of files.
pub fn answer(found: &Candidates, names: &[String], last: &str) -> String {
    let value = last.split_once('=').filter(|_| last.starts_with("--"));
    let (before, begins) = value.map_or(("", last), |(name, value)| (name, value));
    let before = if before.is_empty() {
        String::new()
    } else {
        format!("{before}=")
    };
    let names = names.iter().filter(|name| name.starts_with(begins));
    let names = names.map(|name| format!("{before}{name}"));
    let words = found.words.iter().cloned().chain(names);
    let mut text: String = words.map(|word| word + "\n").collect();
    text += if found.files { ":0" } else { ":4" };
    text
}

/// Returns names from the cluster of a context; none where it does not answer soon.
pub fn names(of: Names, words: &[String]) -> Vec<String> {
    if of == Names::Contexts {
        let file = kube::config::Kubeconfig::read();
        let contexts = file.map(|file| file.contexts).unwrap_or_default();
        return contexts.into_iter().map(|context| context.name).collect();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let Ok(runtime) = runtime else {
        return Vec::new();
    };
    let found = runtime.block_on(async { tokio::time::timeout(PATIENCE, read(of, words)).await });
    found.ok().and_then(Result::ok).unwrap_or_default()
}

async fn read(of: Names, words: &[String]) -> anyhow::Result<Vec<String>> {
    let access = Access::of_words(words);
    let (client, namespace, _) = access.client().await?;
    let own = |long: &str, short: &str| {
        let mut pairs = words.windows(2);
        let pair = pairs.find(|pair| matches!(pair, [name, _] if name == long || name == short));
        pair.and_then(|pair| pair.get(1)).cloned()
    };
    let inside = own("--namespace", "-n");
    match of {
        Names::Nodes => Ok(named(&Api::<Node>::all(client)).await?),
        Names::Policies => {
            let kind = kube::core::ApiResource::erase::<GpuPolicyObject>(&());
            Ok(named(&Api::<DynamicObject>::all_with(client, &kind)).await?)
        }
        Names::Namespaces => Ok(named(&Api::<Namespace>::all(client)).await?),
        Names::Gpus => {
            let all = Api::<GpuNode>::all(client).list(&few()).await?;
            let of_node = |node: GpuNode| {
                let name = node.name_any();
                let gpus = node.status.map(|status| status.gpus).unwrap_or_default();
                gpus.into_iter()
                    .map(move |gpu| format!("{name}/{}", gpu.name))
            };
            Ok(all.items.into_iter().flat_map(of_node).collect())
        }
        Names::Pods => full_names::<Pod>(client, inside, &namespace).await,
        Names::Claims => full_names::<ResourceClaim>(client, inside, &namespace).await,
        Names::Contexts => Ok(Vec::new()),
    }
}

fn few() -> ListParams {
    ListParams::default().limit(MOST)
}

async fn named<K>(api: &Api<K>) -> Result<Vec<String>, kube::Error>
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned,
{
    let all = api.list_metadata(&few()).await?;
    Ok(all.items.iter().map(kube::ResourceExt::name_any).collect())
}

/// Returns names with their namespaces, or alone with `-n`; of the context's own namespace where
/// others may not be read.
async fn full_names<K>(
    client: Client,
    inside: Option<String>,
    default: &str,
) -> anyhow::Result<Vec<String>>
where
    K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + DeserializeOwned,
{
    if let Some(namespace) = inside {
        return Ok(named(&Api::<K>::namespaced(client, &namespace)).await?);
    }
    let everywhere = Api::<K>::all(client.clone());
    let all = if let Ok(all) = everywhere.list_metadata(&few()).await {
        all
    } else {
        let own = Api::<K>::namespaced(client, default);
        own.list_metadata(&few()).await?
    };
    let full = |object: &kube::core::PartialObjectMeta<K>| {
        let namespace = object.namespace().unwrap_or_default();
        format!("{namespace}/{}", object.name_any())
    };
    Ok(all.items.iter().map(full).collect())
}

#[cfg(test)]
mod tests {
    use clap::{Arg, ArgAction};

    use super::*;

    fn root() -> Command {
        let namespace = Arg::new("namespace")
            .long("namespace")
            .short('n')
            .global(true);
        let output = Arg::new("output")
            .long("output")
            .short('o')
            .value_parser(["json", "table"]);
        let pod = Command::new("pod").arg(Arg::new("pod"));
        let node = Command::new("node").arg(Arg::new("name"));
        let status = Command::new("status")
            .arg(namespace)
            .arg(output)
            .subcommands([pod, node]);
        let file = Arg::new("file")
            .long("file")
            .short('f')
            .action(ArgAction::Append);
        let convert = Command::new("convert").arg(file);
        let top = Command::new("top").arg(Arg::new("by").value_parser(["claims", "gpus"]));
        Command::new("divvy").subcommands([status, convert, top])
    }

    fn of(line: &str) -> Candidates {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        candidates(&root(), &words)
    }

    #[test]
    fn what_can_come_next_follows_from_the_words_before() {
        for (line, words, names) in [
            ("s", vec!["status"], None),
            ("status ", vec!["node", "pod"], None),
            ("status pod ", vec![], Some(Names::Pods)),
            ("status pod team-a/t", vec![], Some(Names::Pods)),
            ("status pod a/b ", vec![], None),
            ("status -n team node ", vec![], Some(Names::Nodes)),
            ("status pod -n ", vec![], Some(Names::Namespaces)),
            ("status pod --namespace=t", vec![], Some(Names::Namespaces)),
            ("status -o ", vec!["json", "table"], None),
            ("status --output=j", vec!["--output=json"], None),
            ("status pod --n", vec!["--namespace"], None),
            ("top g", vec!["gpus"], None),
        ] {
            let found = of(line);
            assert_eq!(
                (found.words, found.names),
                (words.iter().map(|word| (*word).to_owned()).collect(), names),
                "{line}"
            );
        }
        assert!(of("convert -f ").files);
    }

    #[test]
    fn kubectl_gets_a_word_a_line_and_a_directive() {
        let names = ["team-a/train".to_owned(), "team-b/x".to_owned()];
        assert_eq!(
            answer(&of("status pod team-a"), &names, "team-a"),
            "team-a/train\n:4"
        );
        let names = ["team-a".to_owned()];
        let last = "--namespace=te";
        assert_eq!(
            answer(&of(&format!("status {last}")), &names, last),
            "--namespace=team-a\n:4"
        );
        assert_eq!(answer(&of("convert -f "), &[], ""), ":0");
    }
}
