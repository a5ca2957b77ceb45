//! Time-sliced shares, the mode lock and policies. Every case takes GPUs by UUID and says in a
//! policy of its own what they may become, so that it depends on nothing that the chart was
//! installed with.

mod capped_mps;
mod caps;
mod flips;
pub(super) mod groups;
mod intervals;
mod lock;
mod mps;
mod mps_hostile;
mod mps_kills;
mod mps_parts;
mod mps_wedged;
mod older;
mod policies;
mod prometheus;
mod quota;
mod reclaimed;
mod shown;
mod slow_write;
mod usage;
mod uses;

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use serde_json::{Value, json};

pub(super) use capped_mps::capped_mps;
pub(super) use caps::caps;
pub(super) use flips::flips;
pub(super) use intervals::intervals;
pub(super) use lock::{leaves, over_capacity, partitions_and_shares, whole_and_shares};
pub(super) use mps::{mps, mps_of_any_size};
pub(super) use mps_hostile::hostile_mps;
pub(super) use mps_kills::killed_mps;
pub(super) use mps_parts::mps_in_partitions;
pub(super) use mps_wedged::wedged_mps;
pub(super) use older::{not_twice, one_mode};
pub(super) use policies::{bad, hot, per_gpu, per_node, two};
pub(super) use prometheus::prometheus;
pub(super) use quota::quota;
pub(super) use reclaimed::reclaimed;
pub(super) use slow_write::slow_write;
pub(super) use usage::usage;
pub(super) use uses::{admin, deployment, extended, killed_kubelet, several, static_partitions};

use super::SHARED;
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim_for};
use crate::wait::{poll, wait_for};

/// The policies of the cluster.
const POLICIES: &str = "/apis/divvy.dev/v1beta1/gpupolicies";

/// Returns an H100 by its index.
fn h100<'a>(env: &Env<'a>, index: usize) -> Result<&'a str> {
    let all = env.driver.gpus().of_product(SHARED);
    all.get(index)
        .copied()
        .with_context(|| format!("the node has no H100 number {index}"))
}

/// A policy that is gone when the case is over, however it ends.
pub(super) struct Policy<'a> {
    env: &'a Env<'a>,
    name: String,
}

impl<'a> Policy<'a> {
    pub(super) fn create(env: &'a Env<'a>, name: &str, spec: &Value) -> Result<Self> {
        let object = json!({
            "apiVersion": names::API_VERSION,
            "kind": "GpuPolicy",
            "metadata": {"name": name},
            "spec": spec,
        });
        env.api().create(POLICIES, &object)?;
        Ok(Self {
            env,
            name: name.to_owned(),
        })
    }

    /// Creates a policy of what these GPUs may become: `Whole`, `Mig`, `TimeSlicing`.
    pub(super) fn modes(env: &'a Env<'a>, gpus: &[&str], modes: &[&str]) -> Result<Self> {
        let name = env.namespace.clone();
        let policy = Self::create(env, &name, &spec(gpus, modes))?;
        wait_for_modes(env, gpus, modes)?;
        Ok(policy)
    }

    fn change(&self, spec: &Value) -> Result<()> {
        self.env
            .api()
            .patch(&format!("{POLICIES}/{}", self.name), &json!({"spec": spec}))
            .map(drop)
    }
}

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        if let Err(error) = self
            .env
            .api()
            .delete(&format!("{POLICIES}/{}", self.name), &json!({}))
        {
            crate::process::say(&format!("policy {} is left: {error:#}", self.name));
        }
    }
}

/// A policy's spec with one rule for these GPUs.
fn spec(gpus: &[&str], modes: &[&str]) -> Value {
    json!({"rules": [{"gpus": {"uuids": gpus}, "modes": modes}]})
}

/// The types under which devices of these modes are published.
fn types(modes: &[&str]) -> BTreeSet<String> {
    let of = |mode: &&str| match *mode {
        "Whole" => "gpu",
        "Mig" => "mig",
        "Mps" => "gpu-mps",
        _ => "gpu-share",
    };
    modes.iter().map(|mode| of(mode).to_owned()).collect()
}

/// The types of a GPU's devices that are open to new claims; the admin device aside.
fn offered(env: &Env, gpu: &str) -> Result<BTreeSet<String>> {
    let devices = env.driver.devices()?;
    let ours = devices
        .iter()
        .filter(|device| at(device, "attributes.gpuUUID.string") == gpu);
    let free = ours.filter(|device| !is_withdrawn(device));
    let types = free.filter_map(|device| at(device, "attributes.type.string").as_str());
    Ok(types
        .filter(|kind| *kind != "gpu-admin")
        .map(str::to_owned)
        .collect())
}

/// Returns true if the device is published only until no claim can have it.
pub(super) fn is_withdrawn(device: &Value) -> bool {
    let taints = at(device, "taints").as_array().cloned().unwrap_or_default();
    taints.iter().any(|taint| {
        at(taint, "key")
            .as_str()
            .is_some_and(|key| key == names::taints::WITHDRAWN)
    })
}

pub(super) fn wait_for_modes(env: &Env, gpus: &[&str], modes: &[&str]) -> Result<()> {
    for gpu in gpus {
        let mut last = BTreeSet::new();
        poll(&format!("{gpu} offered as {modes:?}"), PATIENCE, || {
            last = offered(env, gpu)?;
            Ok(last == types(modes))
        })
        .with_context(|| format!("it is offered as {last:?}"))?;
    }
    Ok(())
}

/// CEL that selects devices of these GPUs.
fn of(gpus: &[&str]) -> String {
    let gpus: Vec<String> = gpus.iter().map(|gpu| format!("'{gpu}'")).collect();
    format!(
        "device.attributes['{}'].gpuUUID in [{}]",
        names::DRIVER,
        gpus.join(", ")
    )
}

/// A request of a class, on one of these GPUs.
fn request(name: &str, class: &str, gpus: &[&str]) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": class,
        "selectors": [{"cel": {"expression": of(gpus)}}],
    }})
}

/// A request for a share with these capacities, as `[("memory", "30Gi")]`.
fn share(name: &str, gpus: &[&str], capacity: &[(&str, &str)]) -> Value {
    part((name, names::CLASS_SHARE), gpus, capacity)
}

/// The same for a share of any class.
fn part((name, class): (&str, &str), gpus: &[&str], capacity: &[(&str, &str)]) -> Value {
    let mut request = request(name, class, gpus);
    let wanted: serde_json::Map<String, Value> = capacity
        .iter()
        .map(|(name, amount)| ((*name).to_owned(), json!(amount)))
        .collect();
    if let Some(exactly) = request.get_mut("exactly").and_then(Value::as_object_mut) {
        exactly.insert("capacity".to_owned(), json!({"requests": wanted}));
    }
    request
}

/// A partition of one of these GPUs.
fn partition(name: &str, gpus: &[&str], profile: &str) -> Value {
    partition_of((name, names::CLASS_MIG), gpus, profile)
}

/// A device of a class of partitions, of one of these GPUs.
fn partition_of((name, class): (&str, &str), gpus: &[&str], profile: &str) -> Value {
    let mut request = request(name, class, gpus);
    let cel = format!(
        "device.attributes['{}'].profile == '{profile}' && {}",
        names::DRIVER,
        of(gpus)
    );
    if let Some(exactly) = request.get_mut("exactly").and_then(Value::as_object_mut) {
        exactly.insert(
            "selectors".to_owned(),
            json!([{"cel": {"expression": cel}}]),
        );
    }
    request
}

/// The whole of one of these GPUs.
fn whole(gpus: &[&str]) -> Value {
    request("gpu", names::CLASS_GPU, gpus)
}

/// Creates a pod with one claim of its own, without waiting for it; the claim has the pod's name.
/// Returns its UID.
fn create(env: &Env, name: &str, requests: &[Value]) -> Result<String> {
    let spec = json!({"devices": {"requests": requests}});
    let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
    env.create(&Pod::new(name).claim(name).build())?;
    Ok(uid)
}

/// A running pod with one claim of its own.
fn run(env: &Env, name: &str, requests: &[Value]) -> Result<String> {
    let uid = create(env, name, requests)?;
    check(env, name, "main", name)?;
    Ok(uid)
}

/// A device that a claim was given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Given {
    device: String,
    share: String,
    memory: String,
    cores: String,
}

/// Returns the devices that a claim was given.
fn given(env: &Env, claim: &str) -> Result<Vec<Given>> {
    let results = wait_for(&format!("allocation of claim {claim}"), PATIENCE, || {
        Ok(at(&env.claim(claim)?, "status.allocation.devices.results")
            .as_array()
            .cloned())
    })?;
    let text =
        |result: &Value, path: &str| at(result, path).as_str().unwrap_or_default().to_owned();
    let given = results.iter().map(|result| Given {
        device: text(result, "device"),
        share: text(result, "shareID"),
        memory: text(result, "consumedCapacity.memory"),
        cores: text(result, "consumedCapacity.cores"),
    });
    Ok(given.collect())
}

/// The GPU that a published device is on. While the pool is written anew a device may be in none of
/// its slices.
fn gpu_of(env: &Env, device: &str) -> Result<String> {
    wait_for(
        &format!("published device {device} with a gpuUUID"),
        PATIENCE,
        || {
            let devices = env.driver.devices()?;
            let found = devices.iter().find(|found| at(found, "name") == device);
            Ok(found
                .and_then(|found| at(found, "attributes.gpuUUID.string").as_str())
                .map(str::to_owned))
        },
    )
}

/// Waits until a pod runs and checks that a container sees exactly the GPUs of a claim, and in its
/// environment what it was granted of each share.
fn check(env: &Env, pod: &str, container: &str, claim: &str) -> Result<()> {
    env.wait_until_running(pod)?;
    let mut minors = BTreeSet::new();
    let said = env.log(pod, container)?;
    for one in given(env, claim)? {
        minors.insert(env.driver.gpus().get(&gpu_of(env, &one.device)?)?.minor);
        if !one.share.is_empty() {
            let reported = format!("{}=", names::env::share_memory(&one.device));
            ensure!(
                said.lines().any(|line| line.starts_with(&reported)),
                "container {container} of pod {pod} lacks the variable with its memory of {}: {said}",
                one.device
            );
        }
    }
    let seen = env.seen(pod, container)?;
    ensure!(
        seen == minors,
        "container {container} of pod {pod} sees GPUs {seen:?}; its claim has {minors:?}"
    );
    Ok(())
}

/// Ends a pod and its claim, and waits until nothing of it is left on the node.
fn end(env: &Env, name: &str, claim_uid: &str) -> Result<()> {
    env.end(name, claim_uid)?;
    env.delete("ResourceClaim", name)?;
    env.wait_until_gone("ResourceClaim", name)
}

/// Checks that pods still wait after the scheduler has looked at something else: a pod on another
/// GPU, which runs.
fn still_waiting(env: &Env, pods: &[&str], other: &str, round: usize) -> Result<()> {
    let name = format!("probe-{round}");
    let uid = run(env, &name, &[request("gpu", names::CLASS_GPU, &[other])])?;
    end(env, &name, &uid)?;
    for pod in pods {
        let found = env
            .api()
            .get(&env.path("Pod", pod)?)?
            .with_context(|| format!("pod {pod} is gone"))?;
        ensure!(
            at(&found, "spec.nodeName").is_null(),
            "pod {pod} was scheduled"
        );
    }
    Ok(())
}
