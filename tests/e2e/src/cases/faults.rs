//! Components that are killed, stopped and started under running pods. Each has the cluster to
//! itself.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::SHARED;
use super::policy::{OF_NODE, Token};
use super::shares::is_withdrawn;
use super::status::says;
use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::components::Component;
use crate::driver::NAMESPACE;
use crate::gpus::Gpus;
use crate::objects::{Pod, claim, product};
use crate::process::Signal;
use crate::wait::{poll, wait_for};

/// A pod with a GPU of its own; the claim has the pod's name.
pub(crate) fn pod_with_gpu(env: &Env, name: &str) -> Result<String> {
    let uid = Env::uid(&env.create(&claim(name, &product(SHARED)))?)?;
    env.create(&Pod::new(name).claim(name).build())?;
    env.check(name, "main", &[name])?;
    Ok(uid)
}

/// Checks that a pod has run all the time.
pub(crate) fn undisturbed(env: &Env, name: &str) -> Result<()> {
    let pod = env.wait_until_running(name)?;
    let restarts = at(&pod, "status.containerStatuses.0.restartCount");
    ensure!(restarts == 0, "pod {name} was restarted {restarts} times");
    Ok(())
}

pub(super) fn plugin_killed(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "before")?;
    env.driver.kill()?;
    undisturbed(env, "before")?;
    let after = pod_with_gpu(env, "after")?;
    ensure!(
        env.minors("before")? != env.minors("after")?,
        "one GPU was given out twice"
    );
    env.end("before", &uid)?;
    env.end("after", &after)
}

/// Numbers, records and all else of the plugin's folder are lost while the slices stay published:
/// an administrator empties it, or the node gets a new disk and keeps its name.
pub(super) fn folder_emptied(env: &Env) -> Result<()> {
    let before = pod_with_gpu(env, "before")?;
    let named = || -> Result<BTreeSet<String>> {
        let named = env.driver.devices()?.into_iter().map(|device| {
            let text = |path: &str| at(&device, path).as_str().unwrap_or_default().to_owned();
            format!("{} {}", text("name"), text("attributes.uuid.string"))
        });
        Ok(named.collect())
    };
    let published = named()?;
    let folder = env.driver.plugin_dir();
    let numbers = folder.join("node/ordinals.json");
    // Twice: what the first one has made again has to be enough for the next.
    for pod in ["first", "second"] {
        env.driver.kill_and(|| {
            for entry in fs_err::read_dir(&folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    fs_err::remove_dir_all(path)?;
                } else {
                    fs_err::remove_file(path)?;
                }
            }
            Ok(())
        })?;
        poll("the numbers and the record, made again", PATIENCE, || {
            Ok(numbers.exists() && env.driver.record(&before).exists())
        })?;
        undisturbed(env, "before")?;
        let uid = pod_with_gpu(env, pod)?;
        ensure!(
            env.minors("before")? != env.minors(pod)?,
            "one GPU was given out twice"
        );
        ensure!(
            named()? == published,
            "devices have other names: {published:?} were {:?}",
            named()?
        );
        let claim = format!("{}/before", env.namespace);
        says(
            env,
            &["status", "claim", &claim],
            0,
            &["devices are ready", "pods before"],
        )?;
        env.end(pod, &uid)?;
    }
    says(env, &["status"], 0, &["no action required"])?;
    env.end("before", &before)
}

/// A process that hangs is killed at once when the kubelet has found out: it gets no minute to
/// finish what it does.
pub(super) fn plugin_hangs(env: &Env) -> Result<()> {
    let before = pod_with_gpu(env, "before")?;
    env.driver.hang()?;
    undisturbed(env, "before")?;
    let after = pod_with_gpu(env, "after")?;
    env.end("before", &before)?;
    env.end("after", &after)
}

pub(super) fn kubelet_restarted(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "before")?;
    let old = uids(&env.driver.wait_for_slices()?)?;
    env.cluster.component(Component::Kubelet).restart()?;
    // A kubelet that starts removes all slices of its node.
    wait_for(
        "new ResourceSlices in the place of those that the kubelet removed",
        PATIENCE,
        || {
            let slices = env.driver.wait_for_slices()?;
            Ok(uids(&slices)?
                .iter()
                .all(|uid| !old.contains(uid))
                .then_some(()))
        },
    )?;
    undisturbed(env, "before")?;
    let after = pod_with_gpu(env, "after")?;
    env.end("before", &uid)?;
    env.end("after", &after)
}

/// Another client takes every second device out of the slices, and puts in a GPU that does not
/// exist; then it takes devices out over and over. The slices come back as they were, and pods get
/// GPUs that are there.
pub(super) fn slices_edited(env: &Env) -> Result<()> {
    const TURNS: usize = 20;
    let published = || -> Result<BTreeSet<String>> {
        let devices = env.driver.devices()?;
        let name = |device: &Value| at(device, "name").as_str().map(str::to_owned);
        Ok(devices.iter().filter_map(name).collect())
    };
    let edit = |phantom: bool| -> Result<()> {
        for slice in env.driver.slices()? {
            let devices = at(&slice, "spec.devices").as_array();
            let mut left: Vec<Value> = devices.into_iter().flatten().step_by(2).cloned().collect();
            let mut more = left.first().filter(|_| phantom).cloned();
            if let Some(name) = more.as_mut().and_then(|device| device.get_mut("name")) {
                *name = json!("gpu-77");
            }
            left.extend(more);
            if left.is_empty() {
                continue;
            }
            let name = at(&slice, "metadata.name").as_str().unwrap_or_default();
            let path = format!("/apis/resource.k8s.io/v1/resourceslices/{name}");
            env.api()
                .patch(&path, &json!({"spec": {"devices": left}}))?;
        }
        Ok(())
    };
    let before = published()?;
    edit(true)?;
    poll("slices without a GPU that does not exist", PATIENCE, || {
        Ok(published()? == before)
    })?;
    for _ in 0..TURNS {
        edit(false)?;
    }
    poll("slices with all GPUs", PATIENCE, || {
        Ok(published()? == before)
    })?;
    let uid = pod_with_gpu(env, "after")?;
    env.end("after", &uid)
}

fn uids(slices: &[Value]) -> Result<Vec<String>> {
    slices.iter().map(Env::uid).collect()
}

pub(super) fn api_server_stopped(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "before")?;
    let api_server = env.cluster.component(Component::ApiServer);
    let old = uids(&env.driver.slices()?)?;
    api_server.stop(Signal::Kill)?;
    poll(
        "refused connection to the API server",
        Duration::from_secs(10),
        || Ok(env.api().text("/readyz").is_err()),
    )?;
    api_server.start()?;
    env.cluster.wait_for_api()?;
    undisturbed(env, "before")?;
    ensure!(
        uids(&env.driver.wait_for_slices()?)? == old,
        "slices were written again although nothing had changed"
    );
    let after = pod_with_gpu(env, "after")?;
    env.end("before", &uid)?;
    env.end("after", &after)
}

/// Returns true if what containers get of the driver is mounted from this folder of the node.
fn mounts_from(env: &Env, claim_uid: &str, folder: &str) -> Result<bool> {
    let mut text = String::new();
    for file in env.driver.cdi_files(claim_uid)? {
        text.push_str(&fs_err::read_to_string(file)?);
    }
    Ok(text.contains(&format!("\"{folder}/")))
}

pub(super) fn updated(env: &Env) -> Result<()> {
    let before = pod_with_gpu(env, "before")?;
    // Found, not configured: that is what the suite's installation does.
    ensure!(
        mounts_from(env, &before, Gpus::DRIVER_ROOT)?,
        "the driver found is not in {}",
        Gpus::DRIVER_ROOT
    );
    let reported = format!(
        "{}{}",
        env.driver.gpus().root().display(),
        Gpus::DRIVER_ROOT
    );
    env.driver
        .upgrade(&[&format!("driverRoot={}", Gpus::DRIVER_ROOT)])?;
    undisturbed(env, "before")?;
    let after = pod_with_gpu(env, "after")?;
    ensure!(
        mounts_from(env, &after, &reported)?,
        "the driver is not taken from the root that was set, {reported}"
    );
    ensure!(
        env.minors("before")? != env.minors("after")?,
        "one GPU was given out twice"
    );
    env.driver.upgrade(&[])?;
    undisturbed(env, "after")?;
    env.end("before", &before)?;
    env.end("after", &after)
}

/// Not in a pod: a program of the node, whose token the API server knows to be that node's.
pub(super) fn host_process(env: &Env) -> Result<()> {
    let token = Token::new(env, &OF_NODE)?;
    let before = pod_with_gpu(env, "before")?;
    env.driver.stop()?;
    let daemon = env.cluster.daemon("host-plugin");
    let (args, more) = env.driver.host_process(&token.kubeconfig);
    daemon.define(&args, &more)?;
    daemon.start()?;
    let served = served_by_host(env, &before);
    let served = served.with_context(|| format!("the plugin's last lines:\n{}", daemon.log_tail()));
    daemon.stop(Signal::Term)?;
    env.driver.start()?;
    served
}

fn served_by_host(env: &Env, before: &str) -> Result<()> {
    // It wants what it publishes to be there: nothing else shows that it may write.
    let slices = env.driver.slices()?;
    let first = slices
        .first()
        .map(|slice| at(slice, "metadata.name").clone());
    let first = first
        .as_ref()
        .and_then(Value::as_str)
        .context("nothing is published")?;
    env.cluster.kubectl(&["delete", "resourceslice", first])?;
    env.driver.wait_for_slices()?;
    undisturbed(env, "before")?;
    let after = pod_with_gpu(env, "after")?;
    ensure!(
        env.minors("before")? != env.minors("after")?,
        "one GPU was given out twice"
    );
    env.end("before", before)?;
    env.end("after", &after)
}

pub(super) fn claim_deleted_meanwhile(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "a")?;
    let minors = env.minors("a")?;
    env.driver.stop()?;
    env.force_delete("a")?;
    env.delete("ResourceClaim", "a")?;
    env.wait_until_gone("ResourceClaim", "a")?;
    ensure!(
        env.driver.record(&uid).exists(),
        "the record went although no plugin ran"
    );
    env.driver.start()?;
    env.driver.wait_until_unprepared(&uid)?;
    // The GPU can be had again.
    let gpu = minors.first().copied().unwrap_or_default();
    let card = env.driver.uuid_of(&format!("gpu-{gpu}"))?;
    let this = format!(
        "device.attributes['{}'].uuid == '{card}'",
        divvy_api::names::DRIVER
    );
    env.create(&claim("again", &this))?;
    env.create(&Pod::new("b").claim("again").build())?;
    env.check("b", "main", &["again"]).map(drop)
}

/// An instance that can never serve, beside one that does: the node goes on with the one that does.
pub(super) fn updated_badly(env: &Env) -> Result<()> {
    // An old pod that is not ready would be replaced at once.
    env.driver.wait_until_alone()?;
    env.driver.change(&["driverRoot=/nope"])?;
    let outcome = poll("a new plugin that is not ready", PATIENCE, || {
        let pods = env.driver.pods()?;
        let events = env
            .api()
            .list(&format!("/api/v1/namespaces/{NAMESPACE}/events"))?;
        // Asked a few times: it has had the time to register.
        let failed = |pod: &Value| {
            events.iter().any(|event| {
                at(event, "reason") == "Unhealthy"
                    && at(event, "involvedObject.uid") == at(pod, "metadata.uid")
                    && at(event, "count").as_u64() >= Some(3)
            })
        };
        Ok(pods.len() == 2
            && pods
                .iter()
                .any(|pod| !has_condition(pod, "Ready") && failed(pod)))
    })
    .and_then(|()| served_by_the_healthy(env));
    env.driver.change(&[])?;
    env.driver.wait_until_alone()?;
    outcome?;
    let after = pod_with_gpu(env, "after")?;
    env.end("after", &after)
}

fn served_by_the_healthy(env: &Env) -> Result<()> {
    env.driver.wait_for_slices()?;
    // A case before may have left devices that are still withdrawn.
    let devices = env.driver.devices()?;
    let tainted = |device: &&Value| {
        at(device, "taints")
            .as_array()
            .is_some_and(|taints| !taints.is_empty())
    };
    let tainted: Vec<_> = devices
        .iter()
        .filter(tainted)
        .filter(|device| !is_withdrawn(device))
        .collect();
    ensure!(
        tainted.is_empty(),
        "devices are tainted by the new instance: {tainted:?}"
    );
    let uid = pod_with_gpu(env, "meanwhile")?;
    let refused = env
        .messages("meanwhile")
        .into_iter()
        .find(|m| m.contains("prepare dynamic resources"));
    ensure!(refused.is_none(), "a pod was refused: {refused:?}");
    env.end("meanwhile", &uid)
}

/// The API server answers nothing while pods start and end.
pub(super) fn etcd_held(env: &Env) -> Result<()> {
    let ending = pod_with_gpu(env, "ending")?;
    let mut minors = BTreeSet::new();
    let names = ["a", "b", "c"];
    for name in names {
        env.create(&claim(name, &product(SHARED)))?;
    }
    for name in names {
        env.create(&Pod::new(name).claim(name).build())?;
    }
    env.delete("Pod", "ending")?;
    let held = env.cluster.component(Component::Etcd).hold()?;
    poll(
        "an API server without its store",
        Duration::from_secs(20),
        || Ok(env.api().text("/readyz").is_err()),
    )?;
    drop(held);
    env.cluster.wait_for_api()?;
    for name in names {
        env.nudge(name)?;
        minors.append(&mut env.check(name, "main", &[name])?);
    }
    ensure!(
        minors.len() == names.len(),
        "one GPU was given out twice: {minors:?}"
    );
    env.wait_until_gone("Pod", "ending")?;
    env.driver.wait_until_unprepared(&ending)?;
    for name in names {
        env.end(name, &Env::uid(&env.claim(name)?)?)?;
    }
    Ok(())
}
