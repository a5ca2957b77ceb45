//! `kubectl divvy status` on a real cluster: a pod runs, another waits, and the GPU of both is
//! lost.

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use serde_json::{Value, json};

use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::objects::{Pod, claim, product};
use crate::wait::{poll, wait_for};

/// A kind of which there is one GPU: cases that have the cluster to themselves may lose it.
const PRODUCT: &str = "NVIDIA L4";

/// Asks until the answer has this exit status and all of these words: nodes write their reports a
/// few seconds later.
pub(super) fn says(env: &Env, args: &[&str], code: i32, words: &[&str]) -> Result<String> {
    let mut last = (None, String::new());
    let found = wait_for(
        &format!("`kubectl divvy {}` that says {words:?}", args.join(" ")),
        PATIENCE,
        || {
            last = env.driver.kubectl_divvy(args)?;
            let all = last.0 == Some(code) && words.iter().all(|word| last.1.contains(word));
            Ok(all.then(|| last.1.clone()))
        },
    );
    found.with_context(|| format!("it says, with exit status {:?}:\n{}", last.0, last.1))
}

pub(super) fn shows(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let gpu = gpus.only(PRODUCT)?;
    env.create(&claim("held", &product(PRODUCT)))?;
    env.create(&Pod::new("a").claim("held").build())?;
    env.check("a", "main", &["held"])?;
    env.create(&claim("waits", &product(PRODUCT)))?;
    env.create(&Pod::new("b").claim("waits").build())?;
    env.wait_until_unschedulable("b")?;
    let (held, waits) = (
        format!("{}/held", env.namespace),
        format!("{}/waits", env.namespace),
    );

    // Nothing is wrong: it waits for the other.
    let waiting = [
        "waiting: no device is allocated",
        "is whole for a: it starts when",
        "scheduler: 0/1",
    ];
    says(env, &["status", "claim", &waits], 0, &waiting)?;
    says(
        env,
        &["status", "claim", "held", "-n", &env.namespace],
        0,
        &["devices are ready", gpu, "pods a"],
    )?;
    let found = says(
        env,
        &["status", "gpu", gpu],
        0,
        &[PRODUCT, "mode whole", &held, "prepared"],
    )?;
    let words: Vec<&str> = found.split_whitespace().collect();
    let [name, "of", "node", node, ..] = words.as_slice() else {
        anyhow::bail!("it begins with {found:?}");
    };
    let node = node.trim_end_matches(',');
    says(env, &["status", "node", node], 0, &[gpu, &held])?;

    gpus.set_lost(gpu, true)?;
    let trouble = format!("{node} {name}: lost, for ");
    let affected = format!("held by: {held} (pod a)");
    let wrong = [
        trouble.as_str(),
        "why: the GPU fell off the bus",
        &affected,
        "do:  reset the GPU or reboot the node",
    ];
    let fleet = says(env, &["status"], 3, &wrong)?;
    ensure!(
        fleet.contains(&format!("pod {}/b", env.namespace)),
        "no pod waits: {fleet}"
    );
    says(
        env,
        &["status", "gpu", &format!("{node}/{name}")],
        3,
        &wrong,
    )?;
    says(env, &["status", "claim", &held], 3, &wrong)?;
    // It would not fit if the other went: the GPU is tainted.
    let tainted = format!("{name} is tainted with {}", names::taints::LOST);
    says(env, &["status", "claim", &waits], 3, &["why: ", &tainted])?;
    let line = env.cluster.kubectl(&["get", "gpunodes"])?;
    ensure!(
        line.contains("TROUBLE") && line.contains(&format!("{name} lost")),
        "kubectl get gpunodes: {line}"
    );

    // Since when outlasts the plugin.
    let since = |text: &str| {
        text.split("(since ")
            .nth(1)
            .and_then(|rest| rest.split(')').next())
            .map(str::to_owned)
    };
    let before = since(&fleet).context("no time")?;
    let written = || -> Result<String> {
        let object = env
            .api()
            .get(&format!("/apis/{}/gpunodes/{node}", names::API_VERSION))?;
        let object = object.context("the node has no GpuNode")?;
        Ok(at(&object, "status.changed")
            .as_str()
            .unwrap_or_default()
            .to_owned())
    };
    let last = written()?;
    env.driver.kill()?;
    poll("the report of the next plugin", PATIENCE, || {
        Ok(written()? != last)
    })?;
    let after = says(env, &["status", "gpu", gpu], 3, &wrong)?;
    ensure!(
        since(&after).as_ref() == Some(&before),
        "lost since {before}, and after a restart {after}"
    );

    gpus.set_lost(gpu, false)?;
    poll("end of the taint", PATIENCE * 3, || {
        Ok(env.driver.taints(gpu)?.is_empty())
    })?;
    says(env, &["status", "gpu", gpu], 0, &[&held])?;
    Ok(())
}

/// A deleted GpuNode comes back, also where nothing else changes.
pub(super) fn gpu_node_deleted(env: &Env) -> Result<()> {
    let path = format!("/apis/{}/gpunodes/{}", names::API_VERSION, Layout::NODE);
    let gpus = |object: &Value| at(object, "status.gpus").as_array().map_or(0, Vec::len);
    let before = wait_for("GpuNode", PATIENCE, || env.api().get(&path))?;
    let uid = Env::uid(&before)?;
    env.api().delete(&path, &json!({}))?;
    wait_for("another GpuNode with all GPUs", PATIENCE, || {
        let found = env
            .api()
            .get(&path)?
            .filter(|found| gpus(found) == env.driver.gpus().count());
        Ok(found.filter(|found| Env::uid(found).is_ok_and(|found| found != uid)))
    })
    .map(drop)
}
