//! `divvy defrag`: which pods to evict so that a wanted one fits, and their evictions.

mod apply;
mod carry_out;
mod closed;
mod round;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use divvy_fleet::defrag::{Answer, Victim, Wanted, plan};
use divvy_fleet::{Cluster, pod, request, waiting};

use self::round::Rules;
use crate::Usage;
use crate::format::{self, Output};
use crate::objects::Printed;
use crate::status::read::Access;
use crate::table::Table;

/// Arguments of `divvy defrag`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print the plan; nothing is evicted
    #[arg(long, required_unless_present = "apply")]
    plan: bool,
    /// Cordon the plan's node, evict its pods one after the other, look at the cluster again after
    /// each, and uncordon the node
    #[arg(long, conflicts_with_all = ["plan", "objects"])]
    apply: bool,
    /// Time that an evicted pod has to end
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 300,
        requires = "apply"
    )]
    patience: u64,
    /// The pod that waits
    #[arg(long, value_name = "NAMESPACE/NAME", required_unless_present_any = ["want", "waiting"])]
    pod: Option<String>,
    /// Devices that are to fit instead: gpu, 4*gpu, mig:3g.40gb, share:10Gi or mps:10Gi
    #[arg(long, value_name = "REQUEST", conflicts_with = "pod")]
    want: Option<String>,
    /// Priority of what is wanted: pods with a higher one stay
    #[arg(
        long,
        default_value_t = 0,
        allow_negative_numbers = true,
        conflicts_with_all = ["pod", "waiting"]
    )]
    priority: i32,
    #[command(flatten)]
    rules: Rules,
    #[command(flatten)]
    source: Source,
}

/// The cluster that is asked about, and the form of the answer.
#[derive(Debug, clap::Args)]
pub(crate) struct Source {
    /// Objects of a cluster instead of the cluster: what kubectl get
    /// nodes,pods,pdb,deviceclasses,resourceslices,resourceclaims -A -o yaml prints
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kubeconfig", "context"])]
    pub(crate) objects: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) access: Access,
    /// Release of Kubernetes, 1.34 to 1.37
    #[arg(long, value_name = "RELEASE", default_value = "1.37", value_parser = format::release)]
    pub(crate) kubernetes: u32,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

impl Source {
    /// Reads the cluster.
    pub(crate) fn cluster(&self) -> Result<Cluster> {
        match &self.objects {
            Some(file) => of_file(file).map_err(|error| Usage(format!("{error:#}")).into()),
            None => of_cluster(&self.access),
        }
    }
}

/// Runs `divvy defrag`. Exit status 1 when no allowed eviction makes room, or where the evictions
/// were stopped.
pub fn run(args: &Args) -> Result<ExitCode> {
    if args.rules.waiting {
        return round::run(args);
    }
    if args.apply {
        return apply::run(args);
    }
    let cluster = args.source.cluster()?;
    let wanted = wanted(args, &cluster).map_err(|error| Usage(error.to_string()))?;
    let answer = plan(&cluster, &wanted, args.source.kubernetes)?;
    format::show(&answer, args.source.output.format(), table)?;
    Ok(if answer.plan.is_some() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

pub(crate) fn of_file(file: &std::path::Path) -> Result<Cluster> {
    let printed = Printed::read(file)?;
    let cluster = Cluster {
        nodes: printed.of("Node")?,
        slices: printed.of("ResourceSlice")?,
        classes: printed.of("DeviceClass")?,
        claims: printed.of("ResourceClaim")?,
        pods: printed.of("Pod")?,
        budgets: printed.of("PodDisruptionBudget")?,
        ..Cluster::default()
    };
    if cluster.nodes.is_empty() || cluster.slices.is_empty() {
        bail!("{}: no Node or no ResourceSlice in it", file.display());
    }
    Ok(cluster)
}

fn of_cluster(access: &Access) -> Result<Cluster> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (client, _, server) = access.client().await?;
        carry_out::read(&client).await.context(server)
    })
}

/// Words that ask for nothing that can be planned for.
#[derive(Debug)]
enum Asked {
    Request(request::RequestError),
    Pod(waiting::WaitingError),
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request(error) => error.fmt(f),
            Self::Pod(error) => error.fmt(f),
        }
    }
}

fn wanted(args: &Args, cluster: &Cluster) -> Result<Wanted, Asked> {
    if let Some(text) = &args.want {
        return Ok(Wanted {
            shape: request::shape(text).map_err(Asked::Request)?,
            priority: args.priority,
            ..Wanted::default()
        });
    }
    let found = waiting::find(cluster, args.pod.as_deref().unwrap_or_default());
    let found = found.map_err(Asked::Pod)?;
    Ok(Wanted {
        priority: pod::priority(found),
        shape: waiting::shape_of(found, &cluster.claims).map_err(Asked::Pod)?,
        ..Wanted::default()
    })
}

fn table(answer: &Answer) -> String {
    let Some(plan) = &answer.plan else {
        let staying = answer.staying.iter().map(|why| format!("\n- {why}"));
        let staying: String = staying.collect();
        return format!("no eviction that is allowed makes room{staying}");
    };
    let devices = plan.devices.join(", ");
    if plan.evict.is_empty() {
        return format!("it fits node {} already: {devices}", plan.node);
    }
    let mut pods = Table::new(["evict", "priority", "then"]);
    let then = |of: &Victim| match &of.then {
        Some(node) => format!("fits on {node}"),
        None => "waits".to_owned(),
    };
    for of in &plan.evict {
        pods.row([of.to_string(), of.priority.to_string(), then(of)]);
    }
    let proof = if plan.is_fewest {
        "no other evictions are fewer or less important"
    } else {
        "too many ways to try all: fewer evictions may do"
    };
    format!(
        "{}\n\nthen it fits node {}: {devices}\n{proof}",
        pods.render(0),
        plan.node
    )
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use k8s_openapi::api::resource::v1::ResourceClaim;

    use super::*;

    fn pod(text: &str) -> Pod {
        serde_saphyr::from_str(text).unwrap()
    }

    fn asked(cluster: &Cluster, pod: &str) -> Result<Wanted, Asked> {
        let args = Args {
            plan: true,
            apply: false,
            patience: 300,
            pod: Some(pod.to_owned()),
            want: None,
            priority: 0,
            rules: Rules::default(),
            source: Source {
                objects: None,
                access: Access::default(),
                kubernetes: 37,
                output: Output::Table,
            },
        };
        wanted(&args, cluster)
    }

    #[test]
    fn a_pod_that_waits_is_wanted_with_all_its_claims() {
        let waiting = "metadata: {name: a, namespace: n}\nspec:\n  priority: 7\n  containers: []\n  resourceClaims:\n  \
                       - {name: x, resourceClaimTemplateName: t}\n  - {name: y, resourceClaimName: own}\nstatus:\n  \
                       resourceClaimStatuses: [{name: x, resourceClaimName: a-x-1}]\n";
        let claim = |name: &str| -> ResourceClaim {
            serde_saphyr::from_str(&format!(
                "metadata: {{name: {name}, namespace: n}}\nspec: {{}}\n"
            ))
            .unwrap()
        };
        let mut cluster = Cluster {
            pods: vec![pod(waiting)],
            claims: vec![claim("a-x-1"), claim("own")],
            ..Cluster::default()
        };
        let wanted = asked(&cluster, "n/a").unwrap();
        assert_eq!((wanted.priority, wanted.shape.claims.len()), (7, 2));
        cluster.claims.clear();
        let missing = asked(&cluster, "n/a").unwrap_err();
        assert_eq!(missing.to_string(), "claim n/a-x-1 does not exist");
    }

    #[test]
    fn a_printed_cluster_gives_the_plan_of_the_page() {
        let page = include_str!("../../docs/defrag.md");
        let (_, cluster) = page.split_once("```yaml\n# cluster.yaml\n").unwrap();
        let (cluster, _) = cluster.split_once("```").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("cluster.yaml");
        fs_err::write(&file, cluster).unwrap();
        let cluster = of_file(&file).unwrap();
        let wanted = |priority| Wanted {
            shape: request::shape("2*gpu").unwrap(),
            priority,
            ..Wanted::default()
        };
        let text = table(&plan(&cluster, &wanted(100), 37).unwrap());
        assert!(page.contains(&format!("```text\n{text}\n```")), "{text}");
        // Whatever is less important than all of them evicts none.
        let answer = plan(&cluster, &wanted(-1), 37).unwrap();
        let staying = [
            "team-a/notebook: its priority 0 is higher than -1",
            "team-b/training: its priority 100 is higher than -1",
        ];
        assert_eq!(answer.staying, staying);
        fs_err::write(&file, "kind: Pod\n").unwrap();
        assert!(
            of_file(&file)
                .unwrap_err()
                .to_string()
                .contains("no Node or no ResourceSlice")
        );
    }

    #[test]
    fn the_table_says_whom_to_evict_and_where_they_fit_then() {
        let victim = |name: &str, then: Option<&str>| Victim {
            namespace: "n".to_owned(),
            name: name.to_owned(),
            uid: String::new(),
            priority: 3,
            then: then.map(str::to_owned),
        };
        let mut plan = divvy_fleet::defrag::Plan {
            node: "node-1".to_owned(),
            evict: vec![victim("a", Some("node-2")), victim("b", None)],
            devices: vec!["p/gpu-0".to_owned()],
            is_fewest: true,
        };
        let shown = |plan: &divvy_fleet::defrag::Plan| {
            table(&Answer {
                plan: Some(plan.clone()),
                staying: Vec::new(),
            })
        };
        let text = shown(&plan);
        for part in [
            "n/a    3         fits on node-2",
            "n/b    3         waits",
            "then it fits node node-1: p/gpu-0",
            "no other evictions",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        plan.evict.clear();
        assert_eq!(shown(&plan), "it fits node node-1 already: p/gpu-0");
        let none = Answer {
            plan: None,
            staying: vec!["n/a: it has no controller".to_owned()],
        };
        assert_eq!(
            table(&none),
            "no eviction that is allowed makes room\n- n/a: it has no controller"
        );
    }
}
