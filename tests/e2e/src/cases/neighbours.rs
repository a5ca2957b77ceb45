//! Others who give GPUs of the node away, or use them. Each has the cluster to itself: GPUs change
//! hands, and the plugin looks around every 15 s only.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_api::names::{self, taints};
use serde_json::{Value, json};

use super::SHARED;
use crate::api::{Api, at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::config::Layout;
use crate::device_plugin::{DevicePlugin, PluginGpu};
use crate::driver::helm;
use crate::gpus::Gpus;
use crate::objects::{Pod, claim, claim_for};
use crate::wait::{poll, wait_for};

/// Resource name that NVIDIA's device plugin gives to its GPUs.
pub(super) const RESOURCE: &str = "nvidia.com/gpu";
const NOTICED: Duration = Duration::from_mins(1);
/// A process that no claim accounts for.
const STRANGER: u32 = 4_000_002;

/// CEL that selects one GPU.
fn this(gpu: &str) -> String {
    format!("device.attributes['{}'].uuid == '{gpu}'", names::DRIVER)
}

fn is_tainted(env: &Env, gpu: &str) -> Result<bool> {
    Ok(env
        .driver
        .taints(gpu)?
        .iter()
        .any(|key| key == taints::NEIGHBOUR))
}

/// Waits until a GPU is withheld, or no longer, and checks that no other GPU is.
fn wait_withheld(env: &Env, gpu: &str, withheld: bool) -> Result<()> {
    let what = format!(
        "a GPU that others use {}",
        if withheld {
            "tainted"
        } else {
            "without a taint"
        }
    );
    poll(&what, NOTICED, || Ok(is_tainted(env, gpu)? == withheld))?;
    for other in env
        .driver
        .gpus()
        .of_product("")
        .into_iter()
        .filter(|other| *other != gpu)
    {
        ensure!(
            !is_tainted(env, other)?,
            "{other} is tainted for its neighbour"
        );
    }
    Ok(())
}

/// Waits until an Event of the node says these words about a GPU.
fn wait_reported(env: &Env, gpu: &str, words: &str) -> Result<()> {
    poll(
        &format!("Event of the node that says {words:?}"),
        PATIENCE,
        || {
            Ok(env
                .node_messages()?
                .iter()
                .any(|text| text.contains(gpu) && text.contains(words)))
        },
    )
    .with_context(|| {
        format!(
            "it says: {}",
            env.node_messages().unwrap_or_default().join("; ")
        )
    })
}

/// A pod that gets a GPU of the device plugin, and says which.
fn pod_of_plugin(env: &Env, name: &str, minor: u32) -> Result<()> {
    let mut pod = Pod::new(name).build();
    let resources = pod
        .pointer_mut("/spec/containers/0/resources")
        .context("a pod without containers")?;
    *resources = json!({"limits": {RESOURCE: "1"}});
    env.create(&pod)?;
    env.wait_until_running(name)?;
    let said = env.log(name, "main")?;
    ensure!(
        said.contains(&format!("/dev/nvidia{minor}\n")),
        "pod {name} sees another GPU: {said}"
    );
    Ok(())
}

fn allocatable(api: &Api) -> Result<Value> {
    let node = api
        .get(&format!("/api/v1/nodes/{}", Layout::NODE))?
        .context("the node is gone")?;
    Ok(at(&node, "status.allocatable")
        .get(RESOURCE)
        .cloned()
        .unwrap_or_default())
}

pub(super) fn device_plugin(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let gpu = gpus
        .of_product(SHARED)
        .last()
        .copied()
        .context("the node has no such GPU")?;
    let minor = gpus.get(gpu)?.minor;
    let node = format!("/dev/nvidia{minor}");
    let on_host = format!("{}{node}", gpus.root().display());
    let given = PluginGpu {
        uuid: gpu.to_owned(),
        node: (on_host, node),
    };
    let _plugin = DevicePlugin::start(env.cluster, RESOURCE, vec![given])?;
    poll("a GPU of the device plugin", PATIENCE, || {
        Ok(allocatable(&env.api())? == "1")
    })?;

    // What it has given out divvy does not give out.
    pod_of_plugin(env, "theirs", minor)?;
    wait_withheld(env, gpu, true)?;
    wait_reported(
        env,
        gpu,
        &format!(
            "device plugin of {RESOURCE} has allocated it to pod {}/theirs",
            env.namespace
        ),
    )?;
    let uid = Env::uid(&env.create(&claim("ours", &this(gpu)))?)?;
    env.create(&Pod::new("ours").claim("ours").build())?;
    env.wait_until_unschedulable("ours")?;
    env.delete("Pod", "theirs")?;
    wait_withheld(env, gpu, false)?;
    env.check("ours", "main", &["ours"])?;

    // The device plugin does not know divvy's allocations: no other pod gets the GPU then, and
    // divvy's pod continues.
    pod_of_plugin(env, "also", minor)?;
    wait_withheld(env, gpu, true)?;
    let ours = env.wait_until_running("ours")?;
    ensure!(
        at(&ours, "status.containerStatuses.0.restartCount") == 0,
        "the pod was restarted"
    );
    env.end("ours", &uid)?;
    ensure!(
        is_tainted(env, gpu)?,
        "the GPU can be had although the device plugin's pod has it"
    );
    env.delete("Pod", "also")?;
    wait_withheld(env, gpu, false)
}

pub(super) fn other_driver(env: &Env) -> Result<()> {
    const OTHER: &str = "gpu.example.com";
    let gpu = env
        .driver
        .gpus()
        .of_product(SHARED)
        .last()
        .copied()
        .context("the node has no such GPU")?;
    let name = env.namespace.as_str();
    let class = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == '{OTHER}'")}}]},
    });
    let slice = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": OTHER,
            "nodeName": Layout::NODE,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "card", "attributes": {"uuid": {"string": gpu}}}],
        },
    });
    env.driver.stop()?;
    env.cluster.apply(&class.to_string())?;
    env.cluster.apply(&slice.to_string())?;
    let used =
        json!({"devices": {"requests": [{"name": "card", "exactly": {"deviceClassName": name}}]}});
    env.create(&claim_for("theirs", &used))?;
    // No plugin serves that driver: the claim is allocated, and its pod waits for ever.
    env.create(&Pod::new("theirs").claim("theirs").build())?;
    let allocated = || Ok(!at(&env.claim("theirs")?, "status.allocation").is_null());
    let outcome = poll("allocation by the other driver", PATIENCE, allocated)
        .and_then(|()| env.driver.start())
        .and_then(|()| wait_withheld(env, gpu, true))
        .and_then(|()| {
            let words = format!(
                "driver {OTHER} has allocated it to claim {}/theirs",
                env.namespace
            );
            wait_reported(env, gpu, &words)
        });
    env.driver.start()?;
    env.force_delete("theirs")?;
    env.delete("ResourceClaim", "theirs")?;
    for path in [
        format!("/apis/resource.k8s.io/v1/resourceslices/{name}"),
        format!("/apis/resource.k8s.io/v1/deviceclasses/{name}"),
    ] {
        env.api().delete(&path, &json!({}))?;
    }
    outcome?;
    env.wait_until_gone("ResourceClaim", "theirs")?;
    wait_withheld(env, gpu, false)
}

/// The other divvy of [`two_releases`], and its release and namespace.
const SECOND: &str = "gpu.two.example";
const SECOND_RELEASE: &str = "divvy-two";

/// Two divvys with names of their own on one node: a GPU is in one pod at a time, and comes back
/// when it is let go.
pub(super) fn two_releases(env: &Env) -> Result<()> {
    let slices =
        format!("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver={SECOND}");
    env.driver.install_second(SECOND_RELEASE, SECOND)?;
    let outcome = poll("devices of the second driver", PATIENCE, || {
        Ok(!env.api().list(&slices)?.is_empty())
    })
    .and_then(|()| one_at_a_time(env));
    // While both drivers are there: the kubelet lets a pod go only when its driver has answered.
    for pod in ["ours", "theirs"] {
        env.delete("Pod", pod)?;
        env.wait_until_gone("Pod", pod)?;
    }
    helm(
        env.cluster,
        &[
            "uninstall",
            SECOND_RELEASE,
            "--namespace",
            SECOND_RELEASE,
            "--wait",
        ],
    )?;
    // The kubelet would do that half a minute later.
    let theirs = format!("--field-selector=spec.driver={SECOND}");
    env.cluster
        .kubectl(&["delete", "resourceslices", &theirs])?;
    outcome
}

fn one_at_a_time(env: &Env) -> Result<()> {
    let gpu = env
        .driver
        .gpus()
        .of_product(SHARED)
        .last()
        .copied()
        .context("the node has no such GPU")?;
    let cel = format!("device.attributes['{SECOND}'].uuid == '{gpu}'");
    let one = json!({"deviceClassName": SECOND, "selectors": [{"cel": {"expression": cel}}]});
    let of_second = json!({"devices": {"requests": [{"name": "gpu", "exactly": one}]}});
    env.create(&claim_for("theirs", &of_second))?;
    env.create(&claim("ours", &this(gpu)))?;
    for name in ["ours", "theirs"] {
        env.create(&Pod::new(name).claim(name).build())?;
    }
    let runs = |name: &str| -> Result<bool> {
        Ok(env
            .api()
            .get(&env.path("Pod", name)?)?
            .is_some_and(|pod| has_condition(&pod, "Ready")))
    };
    let (winner, loser) = wait_for("a pod that has the GPU", PATIENCE, || {
        if runs("ours")? {
            return Ok(Some(("ours", "theirs")));
        }
        Ok(runs("theirs")?.then_some(("theirs", "ours")))
    })?;
    // The other driver is refused the GPU, or its neighbour has tainted it before it could be given
    // out.
    poll("the other driver kept away", NOTICED, || {
        let refused = env
            .messages(loser)
            .iter()
            .any(|text| text.contains("is held by driver"));
        Ok(refused || is_tainted(env, gpu)?)
    })?;
    ensure!(!runs(loser)?, "one GPU is in two pods");
    if winner == "theirs" {
        wait_withheld(env, gpu, true)?;
    }
    let end = |name: &str| {
        env.delete("Pod", name)?;
        env.wait_until_gone("Pod", name)?;
        env.delete("ResourceClaim", name)
    };
    end(winner)?;
    env.nudge(loser)?;
    env.wait_until_running(loser)?;
    end(loser)?;
    wait_withheld(env, gpu, false)
}

/// Allocated before the process was seen: the first hold is refused, and the refusal names the
/// process.
pub(super) fn first_hold(env: &Env) -> Result<()> {
    let gpus: &Gpus = env.driver.gpus();
    let gpu = gpus
        .of_product(SHARED)
        .last()
        .copied()
        .context("the node has no such GPU")?;
    env.driver.stop()?;
    let uid = Env::uid(&env.create(&claim("first", &this(gpu)))?)?;
    env.create(&Pod::new("a").claim("first").build())?;
    env.minors("first")?;
    gpus.start_process(gpu, STRANGER)?;
    let words = format!("process {STRANGER}");
    let outcome = env
        .driver
        .start()
        .and_then(|()| env.nudge("a"))
        .and_then(|()| {
            poll("refusal that names the process", NOTICED * 2, || {
                let reported = [env.messages("a"), env.messages("first")].concat();
                Ok(reported
                    .iter()
                    .any(|text| text.contains(&words) && text.contains(gpu)))
            })
        });
    gpus.end_process(STRANGER)?;
    env.driver.start()?;
    outcome?;
    env.nudge("a")?;
    env.check("a", "main", &["first"])?;
    env.end("a", &uid)?;
    wait_withheld(env, gpu, false)
}
