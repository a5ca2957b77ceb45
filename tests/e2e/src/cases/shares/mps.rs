//! Shares of a GPU by MPS, with a stand-in for NVIDIA's programs: the chart's second DaemonSet, and what
//! becomes of its daemon when another process dies.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use divvy_model::ComputeMode;
use serde_json::json;

use super::{
    Policy, create, end, given, gpu_of, h100, partition, request, run, share, wait_for_modes,
};
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, SAY_AND_STAY, claim_for};
use crate::process::Signal;
use crate::wait::{poll, wait_for};

/// Number of shares of the GPU.
const SLOTS: usize = 4;

/// Four pods with a share each beside a time-sliced GPU and a partitioned one: they have one server, which
/// goes on when supervisor and plugin are replaced, comes again when it is killed, and ends with the last
/// of them.
pub(in crate::cases) fn mps(env: &Env) -> Result<()> {
    env.driver.install_mps()?;
    env.driver.change(&["mps.enabled=true"])?;
    let outcome = switched_on(env);
    env.driver.change(&[])?;
    env.driver.wait_until_alone()?;
    env.driver.gpus().remove_mps()?;
    outcome
}

fn switched_on(env: &Env) -> Result<()> {
    let [by_mps, sliced, cut] = [h100(env, 0)?, h100(env, 1)?, h100(env, 2)?];
    let mps_slots = json!({"slots": SLOTS});
    let _policy = Policy::create(
        env,
        &env.namespace,
        &json!({"rules": [
            {"gpus": {"uuids": [by_mps]}, "modes": ["Mps"], "shares": mps_slots},
            {"gpus": {"uuids": [sliced]}, "modes": ["TimeSlicing"]},
            {"gpus": {"uuids": [cut]}, "modes": ["Mig"]},
        ]}),
    )?;
    wait_for_modes(env, &[by_mps], &["Mps"])?;
    wait_for_modes(env, &[sliced], &["TimeSlicing"])?;
    wait_for_modes(env, &[cut], &["Mig"])?;
    let beside = [
        (
            "sliced",
            run(
                env,
                "sliced",
                &[share("gpu", &[sliced], &[("memory", "10Gi")])],
            )?,
        ),
        (
            "cut",
            run(env, "cut", &[partition("gpu", &[cut], "1g.10gb")])?,
        ),
    ];

    // All four, with one daemon, and no fifth.
    let mut pods = Vec::new();
    for name in ["one", "two", "three", "four"] {
        pods.push((name, with_share(env, name, by_mps)?));
    }
    let daemon = only_daemon(env)?;
    ensure!(
        compute_mode(env, by_mps)? == ComputeMode::ExclusiveProcess,
        "others can get past the server"
    );
    let fifth = create(env, "five", &[request("gpu", names::CLASS_MPS, &[by_mps])])?;
    env.wait_until_unschedulable("five")?;

    // The daemon is in no container: who started it may go, and so may the plugin.
    env.driver.replace_mps_pod()?;
    ensure!(
        only_daemon(env)? == daemon,
        "the daemon ended with the pod of its supervisor"
    );
    env.driver.kill()?;
    ensure!(
        only_daemon(env)? == daemon,
        "the daemon ended with the plugin"
    );
    let (first, uid) = pods.remove(0);
    end(env, first, &uid)?;
    running(env, "five")?;
    pods.push(("five", fifth));
    ensure!(
        only_daemon(env)? == daemon,
        "the daemon ended with one of its users"
    );

    // Killed, it comes again: the clients that it had are lost, and their pods stay.
    env.cluster.send(daemon, Signal::Kill)?;
    let next = wait_for("another MPS daemon", PATIENCE, || {
        let now = env.driver.mps_daemons()?;
        Ok((now.len() == 1 && now != [daemon]).then_some(now))
    })?;

    for (pod, uid) in pods {
        ensure!(
            env.driver.mps_daemons()? == next,
            "it was replaced once more"
        );
        end(env, pod, &uid)?;
    }
    poll("end of the MPS daemon", PATIENCE, || {
        Ok(env.driver.mps_daemons()?.is_empty())
    })?;
    ensure!(
        compute_mode(env, by_mps)? == ComputeMode::Default,
        "the compute mode is not back"
    );
    for (pod, uid) in beside {
        end(env, pod, &uid)?;
    }
    Ok(())
}

/// A running pod with an MPS share of a GPU. Returns the UID of its claim.
fn with_share(env: &Env, name: &str, gpu: &str) -> Result<String> {
    let spec = json!({"devices": {"requests": [request("gpu", names::CLASS_MPS, &[gpu])]}});
    let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
    // A client finds its server by the variable, and memory that it shares with it in /dev/shm.
    let script =
        format!("test -S $CUDA_MPS_PIPE_DIRECTORY/control && echo server is there; {SAY_AND_STAY}");
    let pod = Pod::new(name)
        .claim(name)
        .container_running("main", &[name], &script);
    env.create(&pod.build())?;
    running(env, name)?;
    let said = env.log(name, "main")?;
    ensure!(
        said.contains("server is there"),
        "pod {name} does not reach its server: {said}"
    );
    Ok(uid)
}

fn running(env: &Env, pod: &str) -> Result<()> {
    env.wait_until_running(pod)?;
    let mut expected = BTreeSet::new();
    for one in given(env, pod)? {
        expected.insert(env.driver.gpus().get(&gpu_of(env, &one.device)?)?.minor);
    }
    let seen = env.seen(pod, "main")?;
    ensure!(
        seen == expected,
        "pod {pod} sees GPUs {seen:?}; its claim has {expected:?}"
    );
    Ok(())
}

fn only_daemon(env: &Env) -> Result<u32> {
    let daemons = env.driver.mps_daemons()?;
    ensure!(
        daemons.len() == 1,
        "there is not one MPS daemon, but {daemons:?}"
    );
    daemons.first().copied().context("no MPS daemon")
}

fn compute_mode(env: &Env, gpu: &str) -> Result<ComputeMode> {
    let mode = env.driver.gpus().edit(gpu, |engine, uuid| {
        engine.gpu(uuid).map(|gpu| gpu.facts.compute_mode)
    })?;
    mode.flatten().context("the GPU has no compute mode")
}
