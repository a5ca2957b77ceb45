//! Claims that change under their pods: other pods come to use them, and people write their status
//! by hand.

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use divvy_model::health::{GpuEventKind, RecoveryAction};
use serde_json::{Value, json};

use super::faults::{pod_with_gpu, undisturbed};
use super::health::{WELL, wait_reported};
use super::status::says;
use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::objects::{Pod, claim, product};
use crate::wait::{poll, wait_for};

const PRODUCT: &str = "NVIDIA L4";

/// The kubelet prepares a claim once, so a later pod of it is known only from the API or the
/// kubelet's list.
pub(super) fn later_pods(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let gpu = gpus.only(PRODUCT)?;
    env.create(&claim("kept", &product(PRODUCT)))?;
    for pod in ["first", "second"] {
        env.create(&Pod::new(pod).claim("kept").build())?;
        env.check(pod, "main", &["kept"])?;
    }
    env.delete("Pod", "first")?;
    env.wait_until_gone("Pod", "first")?;
    let kept = format!("{}/kept", env.namespace);
    let node = format!("/apis/{}/gpunodes/{}", names::API_VERSION, Layout::NODE);
    poll("GpuNode with the pod that runs", PATIENCE, || {
        let node = env.api().get(&node)?.unwrap_or_default();
        let gpus = at(&node, "status.gpus")
            .as_array()
            .cloned()
            .unwrap_or_default();
        let holders = gpus
            .iter()
            .find(|found| at(found, "uuid") == gpu)
            .map(|found| at(found, "holders.0"));
        Ok(holders.is_some_and(|holder| *at(holder, "pods") == json!(["second"])))
    })?;

    let set = |action: RecoveryAction| {
        gpus.edit(gpu, |engine, uuid| engine.set_recovery(uuid, Some(action)))?
            .context("the GPU has no vitals")
    };
    set(RecoveryAction::Reset)?;
    gpus.edit(gpu, |engine, uuid| {
        engine.send_event(uuid, GpuEventKind::Xid(119), None)
    })?;
    let reported = |pod: &str| {
        env.messages(pod)
            .iter()
            .any(|message| message.contains("Xid 119"))
    };
    let outcome = poll("Event of the pod that runs", PATIENCE, || {
        Ok(reported("second"))
    })
    .and_then(|()| wait_reported(env, "second", "Unhealthy"))
    .and_then(|_| {
        let affected = format!("held by: {kept} (pod second)");
        says(env, &["status", "gpu", gpu], 3, &[&affected])
    });
    let first_has_event = reported("first");
    set(RecoveryAction::Nothing)?;
    poll("end of the taints", WELL, || {
        Ok(env.driver.taints(gpu)?.is_empty())
    })?;
    outcome?;
    ensure!(
        !first_has_event,
        "the pod that is gone has an Event about its GPU"
    );
    env.end("second", &Env::uid(&env.claim("kept")?)?)
}

/// Writes a part of a claim's status as only an admin can.
fn write_status(env: &Env, claim: &str, status: &Value) -> Result<()> {
    let path = format!("{}/status", env.path("ResourceClaim", claim)?);
    env.api().patch(&path, &json!({"status": status})).map(drop)
}

/// `reservedFor` names a pod that does not exist: nothing is taken from the pod that runs.
pub(super) fn reserved_for_edited(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "kept")?;
    let reserved =
        || Ok::<_, anyhow::Error>(at(&env.claim("kept")?, "status.reservedFor.0.name").clone());
    let ghost = json!([{"resource": "pods", "name": "ghost", "uid": "00000000-0000-4000-8000-000000000001"}]);
    write_status(env, "kept", &json!({"reservedFor": ghost}))?;
    // Kubernetes takes the ghost out and puts the pod back in; where it looks in between, it takes
    // the allocation as well.
    let is_reserved = wait_for("the ghost gone from reservedFor", PATIENCE, || {
        let now = reserved()?;
        env.nudge("kept")?;
        Ok(if now == "kept" {
            Some(true)
        } else {
            at(&env.claim("kept")?, "status.allocation")
                .is_null()
                .then_some(false)
        })
    })?;
    undisturbed(env, "kept")?;
    if is_reserved {
        let beside = pod_with_gpu(env, "beside")?;
        ensure!(
            env.minors("kept")? != env.minors("beside")?,
            "one GPU was given out twice"
        );
        env.end("beside", &beside)?;
    }
    ensure!(
        env.driver.record(&uid).exists(),
        "the record of a claim in use is gone"
    );
    env.end("kept", &uid)
}

/// A claim whose allocation is wiped under its pod keeps the GPU until that pod is gone: the
/// scheduler gives it to another claim.
pub(super) fn status_wiped(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "first")?;
    let device = at(
        &env.claim("first")?,
        "status.allocation.devices.results.0.device",
    )
    .clone();
    let gpu = env.driver.uuid_of(device.as_str().context("no device")?)?;
    write_status(
        env,
        "first",
        &json!({"allocation": null, "reservedFor": null}),
    )?;
    let this = format!("device.attributes['{}'].uuid == '{gpu}'", names::DRIVER);
    env.create(&claim("second", &this))?;
    env.create(&Pod::new("second").claim("second").build())?;
    ensure!(
        env.minors("second")?.len() == 1,
        "the second claim has no GPU"
    );
    // A pod that comes later runs: the kubelet has had the time to start the second.
    let probe = pod_with_gpu(env, "probe")?;
    env.end("probe", &probe)?;
    let second = env
        .api()
        .get(&env.path("Pod", "second")?)?
        .context("the second pod is gone")?;
    ensure!(
        !has_condition(&second, "Ready"),
        "one GPU is in two pods: {gpu}"
    );
    undisturbed(env, "first")?;

    env.end("first", &uid)?;
    env.nudge("second")?;
    env.wait_until_running("second")?;
    let uid = Env::uid(&env.claim("second")?)?;
    env.end("second", &uid)
}
