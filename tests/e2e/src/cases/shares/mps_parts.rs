//! MPS inside MIG partitions, with a stand-in for NVIDIA's programs: shares of a partition by
//! policy, and the server of a claim that has a partition alone.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use fs_err as fs;
use serde_json::json;

use super::mps::{client, reaches_its_server, running, with_mps};
use super::{Policy, end, given, h100, partition, partition_of, run};
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim_for};
use crate::process::Signal;
use crate::wait::{poll, wait_for};

/// Two pods share a partition by MPS, one has a partition alone with a server for its containers,
/// and one has a plain partition: two daemons, each of which sees its partition alone. They outlive
/// supervisor and plugin, come again when they are killed, and end with their partitions.
pub(in crate::cases) fn mps_in_partitions(env: &Env) -> Result<()> {
    with_mps(env, switched_on)
}

fn switched_on(env: &Env) -> Result<()> {
    let gpu = h100(env, 0)?;
    let rule = json!({
        "gpus": {"uuids": [gpu]}, "modes": ["Mig"], "mig": {"sharing": ["Mps"]}, "shares": {"slots": 2},
    });
    let _policy = Policy::create(env, &env.namespace, &json!({"rules": [rule]}))?;
    poll("MPS shares of partitions", PATIENCE, || {
        let devices = env.driver.devices()?;
        let is_it = |device: &serde_json::Value| {
            at(device, "attributes.gpuUUID.string") == gpu
                && at(device, "attributes.type.string") == "mig-mps"
        };
        Ok(devices.iter().any(is_it))
    })?;

    // Two pods in the two slots of one partition.
    let of_twin = partition_of(("gpu", names::CLASS_MIG_MPS), &[gpu], "1g.10gb");
    let mut pods = Vec::new();
    for name in ["one", "two"] {
        let spec = json!({"devices": {"requests": [of_twin]}});
        pods.push((name, served(env, name, &spec)?));
    }
    let device = |claim: &str| -> Result<String> {
        let given = given(env, claim)?;
        let first = given.first().context("nothing was given")?;
        Ok(first.device.clone())
    };
    ensure!(
        device("one")? == device("two")?,
        "they are in two partitions"
    );
    // One that has its partition alone, with two containers.
    let config = json!([{"opaque": {"driver": names::DRIVER, "parameters": {
        "apiVersion": names::API_VERSION, "kind": "MigConfig", "mps": {"limits": {"cores": 50}},
    }}}]);
    let of_partition = partition("gpu", &[gpu], "1g.10gb");
    let spec = json!({"devices": {"requests": [of_partition], "config": config}});
    pods.push(("alone", served(env, "alone", &spec)?));
    pods.push(("plain", run(env, "plain", &[of_partition])?));

    // A daemon for each of the two partitions that need one, and each sees nothing else.
    let before = daemons(env)?;
    let living: BTreeSet<String> = partitions(env, gpu)?;
    ensure!(
        living.len() == 3,
        "there are not three partitions: {living:?}"
    );
    let seen: BTreeSet<&String> = before.keys().collect();
    ensure!(
        seen.len() == 2 && seen.iter().all(|uuid| living.contains(*uuid)),
        "daemons see {seen:?}, and there are {living:?}"
    );

    // Who started them may go, and so may the plugin.
    env.driver.replace_mps_pod()?;
    env.driver.kill()?;
    ensure!(
        daemons(env)? == before,
        "a daemon has ended with another process: {:?}",
        daemons(env)?
    );

    // Killed, each comes again in its partition.
    for pid in before.values() {
        env.cluster.send(*pid, Signal::Kill)?;
    }
    wait_for("other MPS daemons in the same partitions", PATIENCE, || {
        let now = daemons(env)?;
        let other = now
            .values()
            .all(|pid| !before.values().any(|old| old == pid));
        Ok((now.keys().eq(before.keys()) && other).then_some(()))
    })?;

    // One user of the partition goes, and it stays for the other; with the last, server and
    // partition go.
    for (pod, uid) in pods {
        end(env, pod, &uid)?;
        let left = partitions(env, gpu)?.len();
        let expected = match pod {
            "one" => 3,
            "two" => 2,
            "alone" => 1,
            _ => 0,
        };
        ensure!(left == expected, "after {pod} there are {left} partitions");
    }
    ensure!(daemons(env)?.is_empty(), "a daemon is left");
    Ok(())
}

/// A running pod with this claim, with a server to be found. Returns the UID of its claim.
fn served(env: &Env, name: &str, spec: &serde_json::Value) -> Result<String> {
    let uid = Env::uid(&env.create(&claim_for(name, spec))?)?;
    let mut pod = Pod::new(name)
        .claim(name)
        .container_running("main", &[name], &client());
    if name == "alone" {
        pod = pod.container_running("other", &[name], &client());
    }
    env.create(&pod.build())?;
    running(env, name)?;
    reaches_its_server(env, name, "main")?;
    if name == "alone" {
        reaches_its_server(env, name, "other")?;
    }
    Ok(uid)
}

/// Returns the daemons that run, by the device that each sees.
fn daemons(env: &Env) -> Result<BTreeMap<String, u32>> {
    let mut all = BTreeMap::new();
    for pid in env.driver.mps_daemons()? {
        let path = env.cluster.node_path(format!("/proc/{pid}/environ"));
        // It may have ended since it was listed.
        let variables = fs::read_to_string(path).unwrap_or_default();
        let mut variables = variables.split('\0');
        let sees = variables.find_map(|one| one.strip_prefix("CUDA_VISIBLE_DEVICES="));
        all.extend(sees.map(|sees| (sees.to_owned(), pid)));
    }
    Ok(all)
}

/// Returns the UUIDs of the partitions that live on a GPU.
fn partitions(env: &Env, gpu: &str) -> Result<BTreeSet<String>> {
    let instances = env.driver.gpus().instances(gpu)?;
    let inside = instances.into_iter().flat_map(|instance| instance.compute);
    Ok(inside.map(|one| one.uuid.to_string()).collect())
}
