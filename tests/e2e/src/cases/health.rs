//! Sick GPUs under running pods. Each case has the cluster to itself.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use divvy_api::names::{self, taints};
use divvy_model::health::{FabricState, GpuEventKind, GpuVitals, RecoveryAction, RowRemap};
use serde_json::{Value, json};

use super::SHARED;
use super::shares::Policy;
use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim, claim_for, product, request};
use crate::process::say;
use crate::wait::poll;

const PRODUCT: &str = "NVIDIA L4";
/// A recovered GPU counts as well after a while without its ailment.
pub(super) const WELL: Duration = Duration::from_mins(3);

/// Returns the health of a pod's first device, by the pod's status, and the message.
pub(super) fn reported(env: &Env, pod: &str) -> Result<(String, String)> {
    let pod = env
        .api()
        .get(&env.path("Pod", pod)?)?
        .context("the pod is gone")?;
    let first = at(
        &pod,
        "status.containerStatuses.0.allocatedResourcesStatus.0.resources.0",
    )
    .clone();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok((text(at(&first, "health")), text(at(&first, "message"))))
}

pub(super) fn wait_reported(env: &Env, pod: &str, health: &str) -> Result<String> {
    let what = format!("status of pod {pod} that says {health}");
    poll(&what, PATIENCE, || Ok(reported(env, pod)?.0 == health))
        .with_context(|| format!("it says {:?}", reported(env, pod).ok()))?;
    Ok(reported(env, pod)?.1)
}

/// Returns true if a GPU's devices have this taint; fails if other devices of the node have it.
fn tainted(env: &Env, gpu: &str, key: &str) -> Result<bool> {
    let has = |keys: &[String]| keys.iter().any(|one| one == key);
    let others: Vec<&str> = env
        .driver
        .gpus()
        .of_product("")
        .into_iter()
        .filter(|uuid| *uuid != gpu)
        .collect();
    for other in others {
        ensure!(
            !has(&env.driver.taints(other)?),
            "{other} is tainted with {key}, although {gpu} is sick"
        );
    }
    Ok(has(&env.driver.taints(gpu)?))
}

pub(super) fn xid(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let gpu = gpus.only(PRODUCT)?;
    let uid = Env::uid(&env.create(&claim("first", &product(PRODUCT)))?)?;
    env.create(&Pod::new("a").claim("first").build())?;
    env.check("a", "main", &["first"])?;
    wait_reported(env, "a", "Healthy")?;

    let vitals = |vitals: GpuVitals| {
        gpus.edit(gpu, |engine, uuid| {
            engine.gpu(uuid).map(|gpu| gpu.vitals = vitals)
        })?
        .context("no such GPU")
    };
    let well = GpuVitals {
        recovery: Some(RecoveryAction::Nothing),
        remap: Some(RowRemap {
            pending: false,
            failed: false,
        }),
        uncorrected_ecc: Some(0),
        fabric: Some(FabricState::READY),
    };
    gpus.edit(gpu, |engine, uuid| {
        // An application's own fault, and then one that is not.
        engine.send_event(uuid, GpuEventKind::Xid(13), None);
        engine.send_event(uuid, GpuEventKind::Xid(119), None);
    })?;
    vitals(GpuVitals {
        recovery: Some(RecoveryAction::Reset),
        remap: Some(RowRemap {
            pending: true,
            failed: false,
        }),
        uncorrected_ecc: Some(2),
        fabric: Some(FabricState {
            state: FabricState::NOT_STARTED,
            status: 0,
            health: 0,
        }),
    })?;
    for key in [
        taints::XID,
        taints::RECOVERY,
        taints::FABRIC,
        taints::ROW_REMAP,
        taints::ECC,
    ] {
        poll(&format!("taint {key} of the sick GPU"), PATIENCE, || {
            tainted(env, gpu, key)
        })?;
    }
    let message = wait_reported(env, "a", "Unhealthy")?;
    ensure!(
        message.contains("Xid 119"),
        "the pod's status says {message:?}"
    );
    poll("Event of the pod", PATIENCE, || {
        Ok(env.messages("a").iter().any(|m| m.contains("Xid 119")))
    })?;
    ensure!(
        !env.messages("a").iter().any(|m| m.contains("Xid 13")),
        "an application's Xid is reported as the GPU's"
    );
    // The running pod stays; no other pod gets the GPU when it has gone.
    env.end("a", &uid)?;
    env.create(&claim("second", &product(PRODUCT)))?;
    env.create(&Pod::new("b").claim("second").build())?;
    env.wait_until_unschedulable("b")?;

    let start = std::time::Instant::now();
    vitals(well)?;
    poll("end of the taints", WELL, || {
        Ok(env.driver.taints(gpu)?.is_empty())
    })?;
    say(&format!(
        "     a GPU that was reset was given out again after {:.0} s",
        start.elapsed().as_secs_f32()
    ));
    env.check("b", "main", &["second"])?;
    wait_reported(env, "b", "Healthy")?;
    Ok(())
}

/// The effects of the taints of a GPU's devices, by key.
fn effects(env: &Env, gpu: &str) -> Result<BTreeMap<String, String>> {
    let devices = env.driver.devices()?;
    let found = devices
        .iter()
        .find(|device| at(device, "attributes.uuid.string") == gpu);
    let taints = at(
        found.with_context(|| format!("{gpu} is not published"))?,
        "taints",
    )
    .as_array();
    let text =
        |taint: &Value, field: &str| at(taint, field).as_str().unwrap_or_default().to_owned();
    let taints = taints.map_or(&[][..], Vec::as_slice);
    Ok(taints
        .iter()
        .map(|taint| (text(taint, "key"), text(taint, "effect")))
        .collect())
}

/// A policy may say that pods leave a sick GPU: those of that GPU do, and of no other.
pub(super) fn evicted(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let [sick, well, ..] = gpus.of_product(SHARED)[..] else {
        bail!("the node has no two H100s")
    };
    let of = |gpu: &str| format!("device.attributes['{}'].uuid == '{gpu}'", names::DRIVER);
    let set = |gpu: &str, action: RecoveryAction| {
        gpus.edit(gpu, |engine, uuid| engine.set_recovery(uuid, Some(action)))?
            .context("the GPU has no vitals")
    };
    for (name, gpu) in [("leaves", sick), ("stays", well)] {
        env.create(&claim(name, &of(gpu)))?;
        env.create(&Pod::new(name).claim(name).build())?;
    }
    env.check("leaves", "main", &["leaves"])?;
    env.check("stays", "main", &["stays"])?;
    let before = env.wait_until_running("stays")?;

    set(sick, RecoveryAction::Reset)?;
    gpus.edit(sick, |engine, uuid| {
        engine.send_event(uuid, GpuEventKind::Xid(119), None)
    })?;
    let both = |effect: &str| {
        [taints::XID, taints::RECOVERY]
            .map(|key| (key.to_owned(), effect.to_owned()))
            .into()
    };
    let wait_for_effect = |effect: &str| {
        poll(
            &format!("{effect} taints of the sick GPU"),
            PATIENCE,
            || Ok(effects(env, sick)? == both(effect)),
        )
    };
    // Without a word in a policy it stays.
    wait_for_effect("NoSchedule")?;
    wait_reported(env, "leaves", "Unhealthy")?;
    let found = env
        .api()
        .get(&env.path("Pod", "leaves")?)?
        .context("the pod is gone without a policy")?;
    ensure!(
        at(&found, "metadata.deletionTimestamp").is_null(),
        "it has to leave without a policy"
    );

    let rules = json!({"rules": [{"gpus": {"uuids": [sick, well]}, "health": {"evict": true}}]});
    let _policy = Policy::create(env, &env.namespace, &rules)?;
    wait_for_effect("NoExecute")?;
    env.wait_until_gone("Pod", "leaves")?;
    poll("Event of the eviction", PATIENCE, || {
        Ok(env
            .messages("leaves")
            .iter()
            .any(|message| message.contains("Marking for deletion")))
    })
    .with_context(|| format!("its Events: {:?}", env.messages("leaves")))?;
    ensure!(
        effects(env, well)?.is_empty(),
        "the healthy GPU is tainted: {:?}",
        effects(env, well)?
    );
    env.create(&claim("next", &of(sick)))?;
    env.create(&Pod::new("next").claim("next").build())?;
    env.wait_until_unschedulable("next")?;

    set(sick, RecoveryAction::Nothing)?;
    poll("end of the taints", WELL, || {
        Ok(effects(env, sick)?.is_empty())
    })?;
    env.check("next", "main", &["next"])?;
    let after = env
        .api()
        .get(&env.path("Pod", "stays")?)?
        .context("the pod of the healthy GPU is gone")?;
    let same = |path: &str| at(&before, path) == at(&after, path);
    ensure!(
        same("metadata.uid") && same("status.containerStatuses") && has_condition(&after, "Ready"),
        "the pod of the healthy GPU was touched: {after}"
    );
    ensure!(
        reported(env, "stays")?.0 == "Healthy",
        "{:?}",
        reported(env, "stays")?
    );
    Ok(())
}

pub(super) fn lost(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let gpu = gpus.only(PRODUCT)?;
    env.create(&claim("held", &product(PRODUCT)))?;
    env.create(&Pod::new("a").claim("held").build())?;
    env.check("a", "main", &["held"])?;
    gpus.set_lost(gpu, true)?;
    poll("taint of the lost GPU", PATIENCE, || {
        tainted(env, gpu, taints::LOST)
    })?;
    wait_reported(env, "a", "Unhealthy")?;
    gpus.set_lost(gpu, false)?;
    poll("end of the taint", WELL, || {
        Ok(env.driver.taints(gpu)?.is_empty())
    })?;
    wait_reported(env, "a", "Healthy")?;
    env.wait_until_running("a").map(drop)
}

/// The rule of `examples/device-taint`, for the only GPU of its product.
pub(super) fn tainted_by_an_admin(env: &Env) -> Result<()> {
    const RULES: &str = "/apis/resource.k8s.io/v1/devicetaintrules";
    let uuid = env.driver.gpus().only(PRODUCT)?.to_owned();
    let devices = env.driver.devices()?;
    let whole = devices
        .iter()
        .find(|device| at(device, "attributes.uuid.string").as_str() == Some(&uuid))
        .context("the GPU is not published as a whole")?;
    let device = at(whole, "name").as_str().unwrap_or_default();
    let slices = env.driver.slices()?;
    let slice = slices.first().context("no slice is published")?;
    let node = at(slice, "spec.nodeName").as_str().unwrap_or_default();
    let rule = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "divvy-under-test"},
        "spec": {
            "deviceSelector": {
                "driver": names::DRIVER,
                // As the example says it.
                "pool": format!("{node}/divvy"),
                "device": device,
            },
            "taint": {"key": "example.com/under-test", "effect": "NoSchedule"},
        },
    });
    env.api().create(RULES, &rule)?;
    let ended = (|| {
        env.create(&claim("kept-off", &product(PRODUCT)))?;
        env.create(&Pod::new("a").claim("kept-off").build())?;
        let why = env.wait_until_unschedulable("a")?;
        say(&format!("without a toleration: {why}"));
        let mut spec = request(&product(PRODUCT), 1);
        let exactly = spec.pointer_mut("/devices/requests/0/exactly");
        let exactly = exactly.and_then(|exactly| exactly.as_object_mut());
        exactly.context("the claim has no exact request")?.insert(
            "tolerations".to_owned(),
            json!([{"key": "example.com/under-test", "operator": "Exists"}]),
        );
        env.create(&claim_for("tolerant", &spec))?;
        env.create(&Pod::new("b").claim("tolerant").build())?;
        env.check("b", "main", &["tolerant"])?;
        Ok(())
    })();
    env.api()
        .delete(&format!("{RULES}/divvy-under-test"), &json!({}))?;
    ended
}
