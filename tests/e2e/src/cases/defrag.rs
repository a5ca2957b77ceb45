//! Two nodes with two GPUs each, and a pod of one GPU on each of them: a claim for two GPUs fits
//! once one of the two pods has moved to the other node.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::SHARED;
use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::driver::NAMESPACE;
use crate::objects::{Pod, claim_for, deployment, request, template};
use crate::wait::{poll, wait_for};

const GPUS: usize = 2;
const BUDGETS: &str = "/apis/policy/v1/namespaces";
/// Rounds by hand alone: once a year is never here.
const SETTINGS: [&str; 3] = [
    "defragmentation.enabled=true",
    "defragmentation.schedule=0 0 1 1 *",
    "defragmentation.minWaitMinutes=1",
];

pub(super) fn moved(env: &Env) -> Result<()> {
    let cluster = env.cluster.second_node()?;
    let gpus = env
        .driver
        .prepare_second(&cluster, &format!("h200x{GPUS}"))?;
    let nodes = [Layout::NODE, cluster.layout().node()];
    env.driver.label_node(nodes[1], true)?;
    let first = env.driver.gpus().of_product(SHARED);
    let first: Vec<&str> = first.into_iter().rev().take(GPUS).collect();
    let uuids = [first, gpus.of_product("")].concat();
    let outcome = moves(env, nodes, &uuids);
    nodes.iter().try_for_each(|node| cordon(env, node, false))?;
    for name in ["kept", "moved"] {
        env.delete("Deployment", name)?;
    }
    let budget = format!("{BUDGETS}/{}/poddisruptionbudgets/kept", env.namespace);
    env.api().delete(&budget, &json!({}))?;
    env.driver.label_node(nodes[1], false)?;
    env.driver.change(&[])?;
    outcome
}

fn moves(env: &Env, nodes: [&str; 2], uuids: &[&str]) -> Result<()> {
    let of_these = format!("device.attributes['gpu.divvy.dev'].uuid in {uuids:?}");
    env.create(&template("one", &request(&of_these, 1)))?;
    poll("the GPUs of the second node", PATIENCE, || {
        let slices = env.api().list("/apis/resource.k8s.io/v1/resourceslices")?;
        let there = |slice: &Value| at(slice, "spec.nodeName") == nodes[1];
        Ok(slices.iter().any(there))
    })?;
    // A budget keeps the pod of the first node.
    for (name, node, other) in [("kept", nodes[0], nodes[1]), ("moved", nodes[1], nodes[0])] {
        cordon(env, other, true)?;
        env.create(&deployment(
            name,
            1,
            &Pod::new(name).template("one").grace(1),
        ))?;
        env.wait_for_replicas(name, 1)?;
        cordon(env, other, false)?;
        ensure!(only(env, name)?.1 == node, "pod {name} is not on {node}");
    }
    let budget = json!({
        "metadata": {"name": "kept"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "kept"}}},
    });
    let budgets = format!("{BUDGETS}/{}/poddisruptionbudgets", env.namespace);
    env.api().create(&budgets, &budget)?;
    let (kept, _) = only(env, "kept")?;
    let (moved, _) = only(env, "moved")?;

    env.create(&claim_for("both", &request(&of_these, GPUS)))?;
    env.create(&Pod::new("large").claim("both").build())?;
    env.wait_until_unschedulable("large")?;
    let pod = format!("{}/large", env.namespace);
    let (status, said) = env.driver.kubectl_divvy(&["explain", &pod])?;
    ensure!(
        status == Some(0) && said.contains("moved-"),
        "explain ended with {status:?}: {said}"
    );
    let plan = ["defrag", "--plan", "--pod", &pod];
    let (status, said) = env.driver.kubectl_divvy(&plan)?;
    ensure!(
        status == Some(0) && said.contains(&format!("fits on {}", nodes[0])),
        "defrag --plan ended with {status:?}: {said}"
    );

    // A dry run changes nothing and says what it would do.
    env.driver.change(&SETTINGS)?;
    poll("an Event of the dry run", PATIENCE * 2, || {
        round(env, "dry")?;
        let said = env.messages("large");
        Ok(said.iter().any(|said| said.contains("; then it fits node")))
    })?;
    ensure!(only(env, "moved")?.0 == moved, "a dry run evicted a pod");

    let applied = [&SETTINGS[..], &["defragmentation.dryRun=false"]].concat();
    env.driver.change(&applied)?;
    let log = round(env, "applied")?;
    ensure!(
        log.contains("done, it is on its node"),
        "the round said: {log}"
    );
    let large = env.wait_until_running("large")?;
    ensure!(
        at(&large, "spec.nodeName") == nodes[1],
        "the large pod is elsewhere"
    );
    for node in nodes {
        let node = env.api().get(&format!("/api/v1/nodes/{node}"))?;
        let node = node.context("the node is gone")?;
        ensure!(
            at(&node, "spec.unschedulable").is_null(),
            "a node is still cordoned"
        );
    }
    env.wait_for_replicas("moved", 1)?;
    ensure!(
        only(env, "moved")?.1 == nodes[0],
        "the moved pod is not on the first node"
    );
    ensure!(only(env, "kept")?.0 == kept, "a budget was broken");
    let said: BTreeSet<String> = env.messages("large").into_iter().collect();
    ensure!(
        said.iter()
            .any(|said| said.contains("done, it is on its node")),
        "Events of the large pod: {said:?}"
    );
    env.delete("Pod", "large")?;
    env.wait_until_gone("Pod", "large")
}

/// Runs a round of the chart's CronJob, and returns what it said.
fn round(env: &Env, name: &str) -> Result<String> {
    let from = "--from=cronjob/divvy-defrag";
    let of_driver = ["--namespace", NAMESPACE];
    let create = ["create", "job", name, from];
    env.cluster.kubectl(&[&create[..], &of_driver].concat())?;
    let path = format!("/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{name}");
    let ended = wait_for("end of the round", PATIENCE, || {
        let job = env.api().get(&path)?.context("the job is gone")?;
        let ended = ["Complete", "Failed"].map(|how| has_condition(&job, how));
        Ok(ended.contains(&true).then_some(ended))
    })?;
    let job = format!("job/{name}");
    let log = env
        .cluster
        .kubectl(&[&["logs", &job][..], &of_driver].concat())?;
    let delete = ["delete", "job", name, "--wait"];
    env.cluster.kubectl(&[&delete[..], &of_driver].concat())?;
    ensure!(ended == [true, false], "the round failed: {log}");
    Ok(log)
}

/// Returns the UID and the node of the pod of a Deployment that is not on its way out.
fn only(env: &Env, name: &str) -> Result<(String, String)> {
    let path = format!(
        "/api/v1/namespaces/{}/pods?labelSelector=app={name}",
        env.namespace
    );
    let pods = env.api().list(&path)?;
    let mut pods = pods
        .iter()
        .filter(|pod| at(pod, "metadata.deletionTimestamp").is_null());
    let pod = pods.next().with_context(|| format!("no pod of {name}"))?;
    let text = |path| at(pod, path).as_str().unwrap_or_default().to_owned();
    Ok((text("metadata.uid"), text("spec.nodeName")))
}

fn cordon(env: &Env, node: &str, closed: bool) -> Result<()> {
    let path = format!("/api/v1/nodes/{node}");
    let change = json!({"spec": {"unschedulable": closed}});
    env.api().patch(&path, &change).map(drop)
}
