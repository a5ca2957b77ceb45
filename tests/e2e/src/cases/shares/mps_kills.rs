//! Plugin and supervisor that are killed in the middle of many prepares and releases of MPS shares.

use anyhow::{Context as _, Result, ensure};
use divvy_api::names;
use divvy_model::ComputeMode;
use serde_json::{Value, json};

use super::mps::{
    client, compute_mode, namespaces, only_daemon, reaches_its_server, running, sizes_of,
    with_capping_driver,
};
use super::{Policy, h100, part, wait_for_modes};
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim_for};
use crate::process::Signal;
use crate::wait::poll;

/// Number of shares of the GPU.
const SHARES: usize = 12;
/// Shares that are ready, or let go, when the processes are killed.
const MIDDLE: usize = 4;

/// Twelve pods get MPS shares at once, and later leave at once. In the middle of either both
/// processes of the node are killed: each pod gets what it asked for, one daemon serves all, and
/// nothing is left behind the last.
pub(in crate::cases) fn killed_mps(env: &Env) -> Result<()> {
    with_capping_driver(env, killed_twice)
}

fn killed_twice(env: &Env) -> Result<()> {
    let gpu = h100(env, 0)?;
    let slots = json!({"slots": SHARES});
    let rules = json!({"rules": [{"gpus": {"uuids": [gpu]}, "modes": ["Mps"], "shares": slots}]});
    let _policy = Policy::create(env, &env.namespace, &rules)?;
    wait_for_modes(env, &[gpu], &["Mps"])?;

    let request = part(
        ("gpu", names::CLASS_MPS),
        &[gpu],
        &[("cores", "8"), ("memory", "4Gi")],
    );
    let spec = json!({"devices": {"requests": [request]}});
    let mut pods = Vec::new();
    for number in 0..SHARES {
        let name = format!("share-{number}");
        let uid = Env::uid(&env.create(&claim_for(&name, &spec))?)?;
        let pod = Pod::new(&name)
            .claim(&name)
            .container_running("main", &[&name], &client());
        env.create(&pod.build())?;
        pods.push((name, uid));
    }
    poll("records of some of the claims", PATIENCE, || {
        let made = pods
            .iter()
            .filter(|(_, uid)| env.driver.record(uid).exists());
        Ok(made.count() >= MIDDLE)
    })?;
    kill_both(env)?;
    // The kubelet repeats a prepare that has failed with the pod's next sandbox.
    poll("pods that run after the kills", PATIENCE * 3, || {
        for (name, _) in &pods {
            let pod = env.api().get(&env.path("Pod", name)?)?;
            let pod = pod.with_context(|| format!("pod {name} is gone"))?;
            if at(&pod, "status.phase") != "Running" {
                return Ok(false);
            }
        }
        Ok(true)
    })?;
    for (name, _) in &pods {
        running(env, name)?;
        reaches_its_server(env, name, "main")?;
    }
    let found = namespaces(env, only_daemon(env)?)?;
    let expected = [&["1.00"][..], &["8.00"; SHARES]].concat();
    ensure!(sizes_of(&found) == expected, "{found:?}");

    for (name, _) in &pods {
        env.delete("Pod", name)?;
    }
    poll("release of some of the claims", PATIENCE, || {
        let left = pods
            .iter()
            .filter(|(_, uid)| env.driver.record(uid).exists());
        Ok(left.count() <= SHARES - MIDDLE)
    })?;
    kill_both(env)?;
    for (name, uid) in &pods {
        env.wait_until_gone("Pod", name)?;
        env.driver.wait_until_unprepared(uid)?;
    }
    poll("end of the MPS daemon", PATIENCE, || {
        Ok(env.driver.mps_daemons()?.is_empty() && env.driver.mps_servers()?.is_empty())
    })?;
    ensure!(
        compute_mode(env, gpu)? == ComputeMode::Default,
        "the compute mode is not back"
    );
    let taints = env.driver.taints(gpu)?;
    ensure!(taints.is_empty(), "{gpu} has taints: {taints:?}");
    Ok(())
}

/// Kills the supervisor's process and the plugin's, and waits until both serve again.
fn kill_both(env: &Env) -> Result<()> {
    let restarts = |pods: Vec<Value>| -> u64 {
        let of = |pod: &Value| {
            let restarts = at(pod, "status.containerStatuses.0.restartCount");
            restarts.as_u64().unwrap_or(0)
        };
        pods.iter().map(of).sum()
    };
    let before = restarts(env.driver.mps_pods()?);
    let pid = supervisor(env)?.context("no process of the MPS supervisor runs")?;
    env.driver
        .kill_and(|| env.cluster.send(pid, Signal::Kill))?;
    poll("another process of the MPS supervisor", PATIENCE, || {
        Ok(restarts(env.driver.mps_pods()?) > before && supervisor(env)?.is_some())
    })
}

/// Returns the supervisor's process. A child that it is about to start has its name for a moment.
fn supervisor(env: &Env) -> Result<Option<u32>> {
    Ok(env.driver.mps_supervisors()?.into_iter().min())
}
