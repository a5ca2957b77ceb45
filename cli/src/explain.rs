//! `divvy explain`: why a pod waits, on which nodes, and what would make it fit.

use std::process::ExitCode;

use anyhow::Result;
use divvy_api::names::DRIVER;
use divvy_fleet::advice::{Way, advise};
use divvy_fleet::defrag::Wanted;
use divvy_fleet::waiting::{find, shape_of};
use divvy_fleet::{Cluster, request};
use divvy_why::{NodesWhy, Verdict, Why};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde::Serialize;

use crate::Usage;
use crate::defrag::Source;
use crate::format;
use crate::status::snapshot::Snapshot;
use crate::status::waiting::Asker;

/// Nodes that are named in a line.
const NAMED: usize = 4;

/// Arguments of `divvy explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The pod that waits, as NAMESPACE/NAME
    #[arg(value_name = "NAMESPACE/NAME", required_unless_present = "want")]
    pod: Option<String>,
    /// Devices that are to fit instead: gpu, 4*gpu, mig:3g.40gb, share:10Gi or mps:10Gi
    #[arg(long, value_name = "REQUEST", conflicts_with = "pod")]
    want: Option<String>,
    #[command(flatten)]
    source: Source,
}

/// The answer.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Explained {
    /// The pod, or the devices that were asked for.
    asked: String,
    why: Why,
    /// Ways in which it fits, the cheapest kind first.
    ways: Vec<Way>,
    /// Mark of a pod, for which more pods than one can be evicted.
    is_pod: bool,
}

/// Runs `divvy explain`. Exit status 1 when there is no way.
pub fn run(args: &Args) -> Result<ExitCode> {
    let explained = explain(args, args.source.cluster()?)?;
    let has_way = !explained.ways.is_empty();
    format::show(&explained, args.source.output.format(), table)?;
    Ok(if has_way {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn explain(args: &Args, cluster: Cluster) -> Result<Explained> {
    let usage = |error: anyhow::Error| Usage(format!("{error:#}"));
    let (asked, pod, shape) = match (&args.want, &args.pod) {
        (Some(text), _) => {
            let mut shape = request::shape(text).map_err(|error| usage(error.into()))?;
            for claim in &mut shape.claims {
                // Reasons name the claim.
                claim.metadata.name = Some(text.clone());
            }
            (text.clone(), None, shape)
        }
        (None, pod) => {
            let name = pod.as_deref().unwrap_or_default();
            let found = find(&cluster, name)
                .map_err(|error| usage(error.into()))?
                .clone();
            let shape = shape_of(&found, &cluster.claims);
            let shape = shape.map_err(|error| usage(error.into()))?;
            (format!("pod {name}"), Some(found), shape)
        }
    };
    let wanted = Wanted {
        shape,
        ..Wanted::default()
    };
    // Claims that cannot be allocated as written are explained below, and have no other way.
    let ways = advise(&cluster, &wanted, args.source.kubernetes).unwrap_or_default();
    let snapshot = Snapshot {
        driver: DRIVER.to_owned(),
        minor: args.source.kubernetes,
        nodes: cluster.nodes,
        slices: cluster.slices,
        claims: cluster.claims,
        classes: cluster.classes,
        ..Snapshot::default()
    };
    let claims: Vec<&ResourceClaim> = wanted.shape.claims.iter().collect();
    let why = Asker::new(&snapshot).ask(&claims, pod.as_ref());
    Ok(Explained {
        asked,
        why,
        ways,
        is_pod: pod.is_some(),
    })
}

fn table(explained: &Explained) -> String {
    let Explained {
        asked,
        why,
        ways,
        is_pod,
    } = explained;
    if let ([Way::Now { node }], false) = (ways.as_slice(), *is_pod) {
        return format!("{asked}: it fits node {node} as it is");
    }
    let mistake = why.mistake.as_ref();
    let mut lines = vec![format!(
        "{asked}: {}",
        mistake.map_or_else(|| why.sentence(), String::as_str)
    )];
    lines.extend(why.nodes.iter().map(of_nodes));
    // Where there are ways, they say more than the advice to wait or to ask for less.
    let hint = why.hint.as_ref();
    let hint = hint.filter(|_| ways.is_empty() || why.verdict != Verdict::NoRoom);
    lines.extend(hint.map(|hint| format!("  do: {hint}")));
    let is_unclear = matches!(
        why.verdict,
        Verdict::Mistake | Verdict::Unknown | Verdict::Offline | Verdict::Bypassed
    );
    if ways.is_empty() && is_unclear {
        return lines.join("\n");
    }
    lines.push(String::new());
    if ways.is_empty() {
        let more = if *is_pod {
            format!(
                "; `divvy defrag --plan --pod {}` tries the ends of several",
                asked.trim_start_matches("pod ")
            )
        } else {
            "; `divvy defrag --plan --want` tries the ends of several".to_owned()
        };
        let more = match why.verdict {
            Verdict::NoRoom | Verdict::Blocked | Verdict::OwnPods => more.as_str(),
            _ => "",
        };
        lines.push(format!(
            "no smaller request, no other form and no end of a single pod makes it fit{more}"
        ));
        return lines.join("\n");
    }
    if !matches!(ways.as_slice(), [Way::Now { .. }]) {
        lines.push("it would fit:".to_owned());
    }
    lines.extend(ways.iter().map(in_words));
    lines.join("\n")
}

fn of_nodes(of: &NodesWhy) -> String {
    let named: Vec<&str> = of.nodes.iter().take(NAMED).map(String::as_str).collect();
    let more = match of.nodes.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("  {}{more}: {}", named.join(", "), of.reasons.join("; "))
}

fn in_words(way: &Way) -> String {
    match way {
        Way::Now { node } => {
            format!("it fits node {node} as it is: the scheduler tries again soon")
        }
        Way::Less {
            request,
            what,
            asked,
            fits,
            node,
        } => {
            format!("- with less: {what} {fits} instead of {asked} (request {request}), on {node}")
        }
        Way::Form {
            request,
            fits,
            node,
        } => format!("- in another form: {fits} (request {request}), on {node}"),
        Way::Wait { pods, more, node } => {
            let others = match more {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let ends = match (pods.as_slice(), more) {
                ([pod], 0) => format!("pod {pod} ends"),
                _ => format!("one of these pods ends: {}{others}", pods.join(", ")),
            };
            format!("- when {ends}, first on {node}")
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::defrag::of_file;

    fn args(words: &[&str]) -> Args {
        #[derive(clap::Parser)]
        struct Only {
            #[command(flatten)]
            args: Args,
        }
        let words = ["explain"].iter().chain(words);
        <Only as clap::Parser>::parse_from(words).args
    }

    /// The cluster of the page about evictions.
    fn printed(folder: &std::path::Path) -> PathBuf {
        let page = include_str!("../../docs/defrag.md");
        let (_, cluster) = page.split_once("```yaml\n# cluster.yaml\n").unwrap();
        let (cluster, _) = cluster.split_once("```").unwrap();
        let file = folder.join("cluster.yaml");
        fs_err::write(&file, cluster).unwrap();
        file
    }

    #[test]
    fn a_printed_cluster_gives_the_ways_of_the_page() {
        let folder = tempfile::tempdir().unwrap();
        let cluster = of_file(&printed(folder.path())).unwrap();
        let asked = args(&["--want", "2*gpu", "--objects", "x"]);
        let text = table(&explain(&asked, cluster).unwrap());
        let page = include_str!("../../docs/explain.md");
        assert!(page.contains(&format!("```text\n{text}\n```")), "{text}");
        let cluster = of_file(&printed(folder.path())).unwrap();
        let fits = table(&explain(&args(&["--want", "gpu"]), cluster).unwrap());
        assert_eq!(fits, "gpu: it fits node node-1 as it is");
    }

    #[test]
    fn a_pod_that_waits_is_explained_with_all_its_claims() {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = of_file(&printed(folder.path())).unwrap();
        let yaml = |text: &str| serde_saphyr::from_str(text).unwrap();
        let class = "deviceClassName: gpu.divvy.dev, count: 2";
        cluster.claims.push(yaml(&format!(
            "metadata: {{name: c, namespace: n}}\nspec: {{devices: {{requests: [{{name: two, exactly: {{{class}}}}}]}}}}\n"
        )));
        cluster.pods.push(
            serde_saphyr::from_str(
                "metadata: {name: w, namespace: n}\nspec: {containers: [], resourceClaims: [{name: x, resourceClaimName: c}]}\n",
            )
            .unwrap(),
        );
        let explained = explain(&args(&["n/w"]), cluster.clone()).unwrap();
        assert_eq!(
            (explained.asked.as_str(), explained.why.verdict),
            ("pod n/w", Verdict::NoRoom)
        );
        let less = explained.ways.iter().any(|way| {
            matches!(way, Way::Less { request, what, fits, .. } if request == "two" && what == "count" && fits == "1")
        });
        assert!(less, "{:?}", explained.ways);
        // A class that does not exist is no question of room.
        let claim = cluster.claims.last_mut().unwrap();
        let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
        let request = devices.requests.as_mut().unwrap().first_mut().unwrap();
        request.exactly.as_mut().unwrap().device_class_name = "no.such".to_owned();
        let explained = explain(&args(&["n/w"]), cluster.clone()).unwrap();
        assert_eq!(
            (explained.why.verdict, explained.ways.len()),
            (Verdict::Mistake, 0)
        );
        assert!(
            table(&explained).contains("no.such"),
            "{}",
            table(&explained)
        );
        assert!(!table(&explained).contains("no smaller request"));
        let error = explain(&args(&["n/none"]), cluster).unwrap_err();
        assert!(error.to_string().contains("does not exist"), "{error}");
    }

    #[test]
    fn every_way_has_its_words() {
        let of = |way: Way| in_words(&way);
        let node = || "n1".to_owned();
        let pods = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let alone = Way::Wait {
            pods: pods(&["a/b"]),
            more: 0,
            node: node(),
        };
        assert_eq!(of(alone), "- when pod a/b ends, first on n1");
        let several = Way::Wait {
            pods: pods(&["a/b", "a/c", "a/d"]),
            more: 2,
            node: node(),
        };
        assert_eq!(
            of(several),
            "- when one of these pods ends: a/b, a/c, a/d and 2 more, first on n1"
        );
        let form = Way::Form {
            request: "gpu".to_owned(),
            fits: "share:40Gi".to_owned(),
            node: node(),
        };
        assert_eq!(
            of(form),
            "- in another form: share:40Gi (request gpu), on n1"
        );
        assert!(of(Way::Now { node: node() }).contains("node n1 as it is"));
    }
}
