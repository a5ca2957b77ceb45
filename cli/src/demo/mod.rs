//! `divvy demo`: the whole driver in one process, without a cluster and without a GPU. Real: the plugin and its
//! sockets, records and CDI files, the publisher, the allocator. Stand-ins: the GPUs, the API server, the kubelet, and
//! the controllers that make pods and claims of manifests.

mod render;
mod report;
mod schedule;
mod workload;
mod world;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_api::names;
use divvy_fake_cluster::ClaimRef;
use divvy_gpu_sim::SimNode;
use divvy_kubelet_plugin::Offer;
use divvy_model::mig::GpuInstance;
use divvy_model::{DeviceKind, Ordinals};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};

use self::report::{ClaimReport, DeviceReport, Report, Scenario, State};
use self::schedule::Scheduler;
use self::workload::{Consumer, Workload, expand};
use self::world::{NODE, World};
use crate::format::{self, Format};
use crate::manifests::Manifests;
use crate::slices::Picture;

/// What `divvy demo` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The simulated GPUs: models and numbers, such as h100x8 or a100-40x4,l4x2
    #[arg(long, value_name = "GPUS", default_value = "h100x2")]
    sim: String,
    /// Manifests to run instead of the examples; pods, Deployments or bare ResourceClaims
    #[arg(short, long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// How to show the result
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// What the plugin logs, on standard error: a level, or filter directives
    #[arg(long, default_value = "error", value_name = "LEVEL")]
    log_level: String,
}

/// The manifests in `examples/`.
const EXAMPLES: &[(&str, &str)] = &[
    ("one-gpu", include_str!("../../../examples/one-gpu/manifests.yaml")),
    ("two-pods-two-gpus", include_str!("../../../examples/two-pods-two-gpus/manifests.yaml")),
    ("shared-claim", include_str!("../../../examples/shared-claim/manifests.yaml")),
    ("two-containers", include_str!("../../../examples/two-containers/manifests.yaml")),
    ("two-claims", include_str!("../../../examples/two-claims/manifests.yaml")),
    ("two-gpus", include_str!("../../../examples/two-gpus/manifests.yaml")),
    ("select-by-attribute", include_str!("../../../examples/select-by-attribute/manifests.yaml")),
    ("deployment", include_str!("../../../examples/deployment/manifests.yaml")),
    ("device-config", include_str!("../../../examples/device-config/manifests.yaml")),
    ("mig-partitions", include_str!("../../../examples/mig-partitions/manifests.yaml")),
    ("mig-two-containers", include_str!("../../../examples/mig-two-containers/manifests.yaml")),
    ("mig-same-gpu", include_str!("../../../examples/mig-same-gpu/manifests.yaml")),
    ("admin-access", include_str!("../../../examples/admin-access/manifests.yaml")),
];

/// Examples for nodes whose GPUs are offered as they are. A GPU that is offered in several ways has counters, and
/// admin requests are checked against them too: a busy one cannot be had (docs/adr/0003).
const AS_IT_IS: [&str; 1] = ["admin-access"];

/// Runs the demo. Exit status 1 when a claim failed or stays pending, or anything was left behind.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    divvy_telemetry::init_logs(divvy_telemetry::LogFormat::Plain, &args.log_level).context("--log-level")?;
    let sim = SimNode::parse(&args.sim).context("--sim cannot be used")?;
    let mut manifests = Vec::new();
    if args.files.is_empty() {
        for (name, text) in EXAMPLES {
            manifests.push(((*name).to_owned(), Manifests::parse(name, text)?));
        }
    } else {
        for path in &args.files {
            let name = path.display().to_string();
            manifests.push((name.clone(), Manifests::parse(&name, &fs_err::read_to_string(path)?)?));
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let report = runtime.block_on(perform(&args.sim, &sim, &manifests))?;
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

async fn perform(sim_text: &str, sim: &SimNode, manifests: &[(String, Manifests)]) -> Result<Report> {
    let world = World::start(sim, Offer::Everything).await?;
    let published = report::published(&world.api.list::<ResourceSlice>());
    let published_after_ms = millis(world.published_after);
    let mut scenarios = Vec::new();
    let as_it_is = |name: &str| AS_IT_IS.contains(&name);
    for (name, manifests) in manifests.iter().filter(|(name, _)| !as_it_is(name)) {
        scenarios.push(scenario(&world, sim, name, manifests).await);
    }
    let mut left_behind = world.stop().await?;
    let rest: Vec<_> = manifests.iter().filter(|(name, _)| as_it_is(name)).collect();
    if !rest.is_empty() {
        // What it left of MIG mode is of no concern to the next: a fresh node.
        let sim = SimNode::parse(sim_text).context("--sim cannot be used")?;
        let world = World::start(&sim, Offer::Auto).await?;
        for (name, manifests) in rest {
            scenarios.push(scenario(&world, &sim, name, manifests).await);
        }
        left_behind.extend(world.stop().await?);
    }
    let instances = pictures(sim, &Claims::new());
    left_behind.extend(instances.iter().flat_map(|picture| {
        picture.partitions.iter().map(|part| format!("{} at {} of {}", part.profile, part.start, picture.gpu))
    }));
    Ok(Report { sim: sim_text.to_owned(), published, published_after_ms, scenarios, left_behind })
}

/// One manifest from its objects in the API to everything given back.
async fn scenario(world: &World, sim: &SimNode, name: &str, manifests: &Manifests) -> Scenario {
    let name = name.to_owned();
    match enact(world, sim, manifests).await {
        Ok((claims, gpus)) => Scenario { name, claims, gpus, problem: None },
        Err(error) => {
            Scenario { name, claims: Vec::new(), gpus: Vec::new(), problem: Some(format!("{error:#}")) }
        }
    }
}

/// Claims by `namespace/name`, in order of appearance, with what is known so far.
type Claims = BTreeMap<(String, String), ClaimReport>;

async fn enact(
    world: &World,
    sim: &SimNode,
    manifests: &Manifests,
) -> Result<(Vec<ClaimReport>, Vec<Picture>)> {
    let workload = expand(manifests)?;
    for class in &manifests.classes {
        world.api.put(class).context("a DeviceClass of the manifest")?;
    }
    let mut reports = Claims::new();
    let mut references = BTreeMap::new();
    for claim in &workload.claims {
        let stored: ResourceClaim = world.api.put(claim).context("a ResourceClaim of the manifest")?;
        let text = |field: Option<String>| field.unwrap_or_default();
        let key = (text(stored.metadata.namespace), text(stored.metadata.name));
        let reference = ClaimRef::new(&key.0, &key.1, &text(stored.metadata.uid));
        references.insert(key, reference);
    }
    let scheduler = Scheduler::new(world.api.clone(), NODE);
    for consumer in &workload.consumers {
        let outcome = scheduler.place(consumer);
        prepare(world, consumer, outcome, &references, &mut reports).await?;
    }
    let gpus = pictures(sim, &reports);
    give_back(world, &references, &mut reports).await?;
    clean(world, &workload, manifests)?;
    Ok((reports.into_values().collect(), gpus))
}

/// The GPUs as the hardware is cut now, if any of them is; who has what is what claims were told.
fn pictures(sim: &SimNode, reports: &Claims) -> Vec<Picture> {
    let inventory = sim.inventory();
    let mut ordinals = Ordinals::default();
    ordinals.assign(inventory.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
    let mut gpus: Vec<(u32, Picture)> = Vec::new();
    for (uuid, gpu) in &inventory.gpus {
        let (Some(ordinal), Some(mig)) = (ordinals.of(uuid), &gpu.mig) else { continue };
        let holder = |instance: &GpuInstance| {
            let is_it = |device: &DeviceReport| {
                let name = device.device.parse().ok().and_then(|name| DeviceKind::parse(&name).ok());
                matches!(name, Some(DeviceKind::Partition(name)) if (name.ordinal, name.profile, name.start)
                    == (ordinal, instance.profile, instance.placement.start))
            };
            let has_it = |report: &&ClaimReport| match &report.state {
                State::Prepared { devices, .. } => devices.iter().any(is_it),
                State::Pending { .. } | State::Failed { .. } => false,
            };
            reports.values().find(has_it).map(|report| report.claim.clone())
        };
        let picture = Picture::of(format!("gpu-{ordinal}"), &mig.capabilities, &mig.instances, holder);
        gpus.push((ordinal, picture));
    }
    if gpus.iter().all(|(_, picture)| picture.partitions.is_empty()) {
        return Vec::new();
    }
    gpus.sort_by_key(|(ordinal, _)| *ordinal);
    gpus.into_iter().map(|(_, picture)| picture).collect()
}

/// Prepares what a consumer needs and is not prepared yet, in one call as the kubelet does, and notes what came of it.
async fn prepare(
    world: &World,
    consumer: &Consumer,
    placed: Result<(), String>,
    references: &BTreeMap<(String, String), ClaimRef>,
    reports: &mut Claims,
) -> Result<()> {
    let mut call = Vec::new();
    for name in &consumer.claims {
        let key = (consumer.namespace.clone(), name.clone());
        if let Some(known) = reports.get_mut(&key) {
            known.pods.extend(consumer.pod.clone());
            if !matches!(known.state, State::Pending { .. }) {
                continue;
            }
        }
        match &placed {
            Ok(()) => call.extend(references.get(&key).cloned()),
            Err(reason) => {
                let state = State::Pending { reason: reason.trim_end().to_owned() };
                let pods = consumer.pod.iter().cloned().collect();
                reports.entry(key).or_insert_with(|| ClaimReport {
                    claim: format!("{}/{name}", consumer.namespace),
                    pods,
                    state,
                    cdi: None,
                });
            }
        }
    }
    if call.is_empty() {
        return Ok(());
    }
    let started = Instant::now();
    let answers = world.kubelet.prepare(names::DRIVER, &call).await?;
    let prepare_us = micros(started.elapsed());
    for reference in call {
        let state = match answers.get(&reference.uid) {
            Some(Ok(devices)) => {
                State::Prepared { devices: devices.iter().map(device).collect(), prepare_us }
            }
            Some(Err(reason)) => State::Failed { reason: reason.clone() },
            None => State::Failed { reason: "the plugin's answer leaves the claim out".to_owned() },
        };
        let report = ClaimReport {
            claim: format!("{}/{}", reference.namespace, reference.name),
            pods: consumer.pod.iter().cloned().collect(),
            state,
            cdi: world.cdi(&reference.uid),
        };
        reports.insert((reference.namespace, reference.name), report);
    }
    Ok(())
}

fn device(device: &divvy_proto::dra::v1::Device) -> DeviceReport {
    DeviceReport {
        requests: device.request_names.clone(),
        device: device.device_name.clone(),
        cdi_ids: device.cdi_device_ids.clone(),
    }
}

/// Unprepares every claim that was tried, prepared or not: after a failed prepare the kubelet does the same.
async fn give_back(
    world: &World,
    references: &BTreeMap<(String, String), ClaimRef>,
    reports: &mut Claims,
) -> Result<()> {
    let tried: Vec<ClaimRef> = reports
        .iter()
        .filter(|(_, report)| !matches!(report.state, State::Pending { .. }))
        .filter_map(|(key, _)| references.get(key).cloned())
        .collect();
    for (uid, answer) in world.kubelet.unprepare(names::DRIVER, &tried).await? {
        let (Err(reason), Some(reference)) = (answer, tried.iter().find(|r| r.uid == uid)) else { continue };
        if let Some(report) = reports.get_mut(&(reference.namespace.clone(), reference.name.clone())) {
            report.state = State::Failed { reason: format!("unprepare: {reason}") };
        }
    }
    Ok(())
}

/// Takes the manifest's objects out of the API again.
fn clean(world: &World, workload: &Workload, manifests: &Manifests) -> Result<()> {
    for claim in &workload.claims {
        let meta = &claim.metadata;
        let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
        world.api.delete::<ResourceClaim>(namespace.unwrap_or_default(), name.unwrap_or_default())?;
    }
    let ours = |name: Option<&str>| world::CLASSES.iter().any(|(class, _)| Some(*class) == name);
    for class in manifests.classes.iter().filter(|c| !ours(c.metadata.name.as_deref())) {
        let name = class.metadata.name.as_deref().unwrap_or_default();
        world.api.delete::<k8s_openapi::api::resource::v1::DeviceClass>("", name)?;
    }
    Ok(())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::EXAMPLES;

    #[test]
    fn every_example_is_in_the_demo() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let mut there: Vec<String> = fs_err::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        there.sort();
        let mut shown: Vec<&str> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        shown.sort_unstable();
        assert_eq!(there, shown);
    }
}
