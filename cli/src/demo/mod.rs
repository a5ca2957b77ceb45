//! `divvy demo`: the whole driver in one process, without a cluster and without a GPU. Real: the plugin and its
//! sockets, records and CDI files, the publisher, the allocator. Stand-ins: the GPUs, the API server, the kubelet, and
//! the controllers that make pods and claims of manifests.

mod examples;
mod expect;
mod gpus;
mod render;
mod report;
mod scenario;
mod schedule;
mod workload;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::policy::GpuPolicy;
use divvy_gpu_sim::SimNode;
use k8s_openapi::api::resource::v1::ResourceSlice;

use self::report::{Report, Scenario};
use self::world::World;
use crate::format::{self, Format};
use crate::manifests::Manifests;

/// What `divvy demo` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The simulated GPUs: models and numbers, such as h100x8 or a100-40x4,l4x2
    #[arg(long, value_name = "GPUS", default_value = "h100x2")]
    sim: String,
    /// Manifests to run instead of the examples: pods, Deployments or bare ResourceClaims, with DeviceClasses and
    /// GpuPolicies. Without a GpuPolicy in any of them, GPUs are offered as everything they can become
    #[arg(short, long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Run only the examples whose names contain this
    #[arg(long, value_name = "TEXT", conflicts_with = "files")]
    only: Option<String>,
    /// How to show the result
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// What the plugin logs, on standard error: a level, or filter directives
    #[arg(long, default_value = "error", value_name = "LEVEL")]
    log_level: String,
}

/// Manifests that one node runs, one after another, under these policies.
struct Stay {
    policies: Vec<GpuPolicy>,
    manifests: Vec<(String, Manifests)>,
}

/// Runs the demo. Exit status 1 when a claim failed or stays pending and the manifest does not expect it, or anything
/// was left behind.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    divvy_telemetry::init_logs(divvy_telemetry::LogFormat::Plain, &args.log_level).context("--log-level")?;
    SimNode::parse(&args.sim).context("--sim cannot be used")?;
    let stays = if args.files.is_empty() {
        examples::stays(args.only.as_deref())?
    } else {
        vec![of_files(&args.files)?]
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = runtime.block_on(perform(&args.sim, &stays))?;
    format::show(&report, args.output, render::render)?;
    let problems = report.problems();
    if problems.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    if args.output != Format::Table {
        for problem in &problems {
            format::talk(&format!("divvy demo: {problem}"));
        }
    }
    Ok(ExitCode::FAILURE)
}

/// What files ask for: the policies of all of them are those of the node; a file of nothing else is no scenario.
fn of_files(files: &[PathBuf]) -> Result<Stay> {
    let mut stay = Stay { policies: Vec::new(), manifests: Vec::new() };
    for path in files {
        let name = path.display().to_string();
        let manifests = Manifests::parse(&name, &fs_err::read_to_string(path)?)?;
        stay.policies.extend(manifests.policies.iter().cloned());
        if manifests.has_users() {
            stay.manifests.push((name, manifests));
        }
    }
    if stay.policies.is_empty() {
        stay.policies = examples::everything()?;
    }
    Ok(stay)
}

async fn perform(sim_text: &str, stays: &[Stay]) -> Result<Report> {
    let mut report = Report { sim: sim_text.to_owned(), ..Report::default() };
    for (number, stay) in stays.iter().enumerate() {
        // What a node left of MIG mode is of no concern to the next: fresh GPUs.
        let sim = SimNode::parse(sim_text).context("--sim cannot be used")?;
        let world = match World::start(&sim, &stay.policies).await {
            Ok(world) => world,
            Err(error) if number == 0 => return Err(error),
            Err(error) => {
                let failed = |(name, _): &(String, Manifests)| Scenario {
                    name: name.clone(),
                    problem: Some(format!("{error:#}")),
                    ..Scenario::default()
                };
                report.scenarios.extend(stay.manifests.iter().map(failed));
                continue;
            }
        };
        let published = report::published(&world.api.list::<ResourceSlice>());
        if number == 0 {
            report.published.clone_from(&published);
            report.published_after_ms = millis(world.published_after);
        }
        for (name, manifests) in &stay.manifests {
            let scenario = scenario::run(&world, &sim, name, manifests).await;
            let of_its_own = !scenario.policies.is_empty();
            report.scenarios.push(Scenario {
                published: if of_its_own && number > 0 { published.clone() } else { Vec::new() },
                ..scenario
            });
        }
        report.left_behind.extend(world.stop().await?);
        for gpu in gpus::pictures(&sim.inventory(), &[], &[]) {
            if let gpus::Mode::Partitioned { picture } = gpu.mode {
                let of = |part: &crate::slices::Part| {
                    format!("{} at {} of {}", part.profile, part.start, picture.gpu)
                };
                report.left_behind.extend(picture.partitions.iter().map(of));
            }
        }
    }
    Ok(report)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_example_does_what_it_says() {
        let report = perform("h100x2", &examples::stays(None).unwrap()).await.unwrap();
        assert_eq!(report.problems(), Vec::<String>::new());
        assert_eq!(report.scenarios.len(), examples::EXAMPLES.len());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_pod_that_runs_although_it_was_to_wait_is_a_problem() {
        let text = "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c, annotations: {demo.divvy.dev/expect: Pending}}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.divvy.dev}}]}}
";
        let manifests = vec![("m".to_owned(), Manifests::parse("m", text).unwrap())];
        let stay = Stay { policies: examples::everything().unwrap(), manifests };
        let report = perform("h100x1", &[stay]).await.unwrap();
        assert_eq!(report.problems(), ["m: claim default/c was expected to stay pending and does not"]);
    }
}
