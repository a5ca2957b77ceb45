//! Pods on a real Kubernetes: with and without a claim, and after a pod that was deleted by force.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use divvy_e2e::api::has_condition;
use divvy_e2e::case::{Env, PATIENCE};
use divvy_e2e::driver::Driver;
use divvy_e2e::objects::{Pod, collection, request, template};
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::process::output;
use divvy_e2e::programs::Programs;
use divvy_e2e::{Cluster, Extent, Gates, Options};
use serde_json::json;

use crate::stats::Samples;
use crate::table::{Budget, Report, Row, Value};

/// One GPU, so that every claim gets the same.
const GPUS: &str = "h100x1";
const NAME: &str = "bench";
const TEMPLATE: &str = "gpu";
/// How often a pod is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// How claims are measured against the cluster's API server.
pub(crate) struct Real<'a> {
    /// Few rounds.
    pub(crate) quick: bool,
    /// Where the kubelet's folder is to be.
    pub(crate) dir: &'a Path,
}

/// Brings a cluster up with the driver on it, measures so many pods of each kind, then claims against its API
/// server, and takes it down.
pub(crate) fn measure(programs: &Programs, pods: usize, real: &Real<'_>) -> Result<(Vec<Row>, Report)> {
    let version = parts::version_setting();
    Parts::ensure(&version)?;
    Cluster::down(NAME)?;
    let cluster = Cluster::up(&Options {
        name: NAME.to_owned(),
        version,
        owned: true,
        extent: Extent::Whole,
        gates: Gates::Default,
    })?;
    let driver = Driver::install(&cluster, programs, GPUS)?;
    driver.wait_until_ready()?;
    let env = Env { cluster: &cluster, driver: &driver, namespace: NAME.to_owned() };
    prepare_namespace(&env)?;

    let (mut bare, mut claiming, mut next) = (Samples::default(), Samples::default(), Samples::default());
    for round in 0..=pods {
        let without = start(&env, &Pod::new(&format!("bare-{round}")))?;
        let with = start(&env, &Pod::new(&format!("claiming-{round}")).template(TEMPLATE))?;
        // The first of each warms up: images are unpacked, caches filled.
        if round > 0 {
            bare.push(without);
            claiming.push(with);
        }
    }
    let forced = pods.div_ceil(4);
    for round in 0..forced {
        next.push(after_forced(&env, round)?);
    }
    let row = Row::new(format!("pod with a claim, created to Ready, p50 of {pods}"), claiming.p50());
    let after = Row::new(format!("pod after one deleted by force, same GPU, p50 of {forced}"), next.p50());
    let rows = vec![
        Row::new(format!("pod without a claim, created to Ready, p50 of {pods}"), bare.p50()),
        row.beside("without a claim", bare.p50()),
        after
            .beside("with a claim", claiming.p50())
            .budget(Budget::AtMost(Value::Seconds(3.0)))
            .theirs("90 s"),
        Row::new("the slowest of these", next.quantile(100)).budget(Budget::AtMost(Value::Seconds(3.0))),
    ];
    // The driver's own plugin is not to compete with the one that is measured.
    driver.stop()?;
    Ok((rows, claims(&cluster, programs, real)?))
}

/// This program again, inside the cluster's namespaces, where its API server can be reached.
fn claims(cluster: &Cluster, programs: &Programs, real: &Real<'_>) -> Result<Report> {
    let report = cluster.state().join("bench.json");
    let admin = PathBuf::from(cluster.layout().kubeconfig("admin"));
    let mut command = cluster.command(std::env::current_exe()?, &[] as &[&str]);
    for (flag, value) in [
        ("--plugin", programs.plugin.as_path()),
        ("--mock", &programs.mock),
        ("--real-api", &admin),
        ("--dir", real.dir),
        ("--json", &report),
    ] {
        command.arg(flag).arg(value);
    }
    if real.quick {
        command.arg("--quick");
    }
    output(&mut command)?;
    Ok(serde_json::from_slice(&fs_err::read(report)?)?)
}

fn prepare_namespace(env: &Env) -> Result<()> {
    let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": env.namespace}});
    env.api().create("/api/v1/namespaces", &object)?;
    let account = format!("/api/v1/namespaces/{}/serviceaccounts/default", env.namespace);
    divvy_e2e::wait_for("default ServiceAccount of the namespace", PATIENCE, || env.api().get(&account))?;
    env.create(&template(TEMPLATE, &request("true", 1))).map(drop)
}

/// How long a pod takes to be Ready; it is gone, and unprepared, afterwards.
fn start(env: &Env, pod: &Pod) -> Result<Duration> {
    let pod = pod.build();
    let name =
        pod.pointer("/metadata/name").and_then(|name| name.as_str()).context("a pod without a name")?;
    let begun = Instant::now();
    env.create(&pod)?;
    let took = until_ready(env, name, begun)?;
    let claims = collection("ResourceClaim", &env.namespace).context("claims have no collection")?;
    let claims = env.api().list(&claims)?;
    env.delete("Pod", name)?;
    env.wait_until_gone("Pod", name)?;
    for claim in claims {
        env.driver.wait_until_unprepared(&Env::uid(&claim)?)?;
    }
    Ok(took)
}

/// From the forced deletion of a pod to the next one, which waits for its GPU, being Ready.
fn after_forced(env: &Env, round: usize) -> Result<Duration> {
    let (first, second) = (format!("first-{round}"), format!("second-{round}"));
    env.create(&Pod::new(&first).template(TEMPLATE).build())?;
    until_ready(env, &first, Instant::now())?;
    env.create(&Pod::new(&second).template(TEMPLATE).build())?;
    env.wait_until_unschedulable(&second)?;
    let begun = Instant::now();
    env.force_delete(&first)?;
    let took = until_ready(env, &second, begun)?;
    env.delete("Pod", &second)?;
    env.wait_until_gone("Pod", &second)?;
    Ok(took)
}

fn until_ready(env: &Env, pod: &str, begun: Instant) -> Result<Duration> {
    let path = env.path("Pod", pod)?;
    loop {
        let seen = env.api().get(&path)?;
        let took = begun.elapsed();
        if seen.is_some_and(|pod| has_condition(&pod, "Ready")) {
            return Ok(took);
        }
        let why = || format!("pod {pod} is not ready; events: {}", env.messages(pod).join("; "));
        ensure!(took < PATIENCE, why());
        sleep(LOOK);
    }
}
