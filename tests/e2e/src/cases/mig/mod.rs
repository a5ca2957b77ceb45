//! GPUs offered whole and in partitions at once. These cases come last: the first of them installs
//! the chart with `profile=everything`, and each can say what lives on a GPU and what does not.
//!
//! [`Gpus::instances`](crate::gpus::Gpus::instances) says what the hardware would say, not the
//! driver.

mod faults;
mod pods;
mod sick;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use divvy_model::DeviceName;
use divvy_model::mig::{MigCapabilities, PartitionName, Placement};
use serde_json::{Value, json};

pub(super) use faults::{foreign, gone, killed, left, policy_deleted, rebooted};
pub(super) use pods::{
    ampere, each_profile, full_gpu, same_gpu, two_containers, user_namespace, whole_gpu,
};
pub(super) use sick::sick;

use super::SHARED;
use super::shares::is_withdrawn;
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim, claim_for};
use crate::wait::{poll, wait_for};

static INSTALLING: Mutex<()> = Mutex::new(());

/// A partition: profile and first memory slice, as in a device's name.
type Place = (u32, u32);

/// Offers GPUs in partitions, too, from now on.
pub(super) fn everything(env: &Env) -> Result<()> {
    // Those of other products are offered so when an administrator has set their mode, and some may
    // be left of a policy.
    let is_offered = |device: &Value| {
        let is_shared = at(device, "attributes.productName.string") == SHARED;
        is_partition(device) && is_shared && !is_withdrawn(device)
    };
    let partitions = || Ok(env.driver.devices()?.iter().any(is_offered));
    // Cases that run at once install it once.
    let installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if env.driver.offer()? != "everything" {
        env.driver.upgrade(&["profile=everything"])?;
    }
    drop(installing);
    poll("published partitions", PATIENCE, partitions)
}

fn is_partition(device: &Value) -> bool {
    at(device, "attributes.type.string") == "mig"
}

/// Returns an H100 by its index. Each case takes others.
fn h100<'a>(env: &Env<'a>, index: usize) -> Result<&'a str> {
    let all = env.driver.gpus().of_product(SHARED);
    all.get(index)
        .copied()
        .with_context(|| format!("the node has no H100 number {index}"))
}

/// CEL that selects partitions of a profile on one of these GPUs.
fn on(gpus: &[&str], profile: &str) -> String {
    let driver = names::DRIVER;
    let gpus: Vec<String> = gpus.iter().map(|gpu| format!("'{gpu}'")).collect();
    let gpus = gpus.join(", ");
    format!(
        "device.attributes['{driver}'].profile == '{profile}' \
         && device.attributes['{driver}'].parentUUID in [{gpus}]"
    )
}

/// A request for partitions.
fn partitions(name: &str, cel: &str, count: usize) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": names::CLASS_MIG,
        "count": count,
        "selectors": [{"cel": {"expression": cel}}],
    }})
}

/// The spec of a claim with these requests.
fn requests(requests: &[Value]) -> Value {
    json!({"devices": {"requests": requests}})
}

/// Creates a pod with a partition of its own, without waiting for it; the claim has the pod's name.
/// Returns its UID.
fn create_pod(env: &Env, name: &str, gpu: &str, profile: &str) -> Result<String> {
    let spec = requests(&[partitions("part", &on(&[gpu], profile), 1)]);
    let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
    env.create(&Pod::new(name).claim(name).build())?;
    Ok(uid)
}

/// A running pod with a partition of its own.
fn run_pod(env: &Env, name: &str, gpu: &str, profile: &str) -> Result<String> {
    let uid = create_pod(env, name, gpu, profile)?;
    check(env, name, "main", &[(name, "")])?;
    Ok(uid)
}

/// Creates a pod with a whole GPU; the claim has the pod's name. Returns the claim's UID.
fn create_whole(env: &Env, name: &str, gpu: &str) -> Result<String> {
    let this = format!("device.attributes['{}'].uuid == '{gpu}'", names::DRIVER);
    let uid = Env::uid(&env.create(&claim(name, &this))?)?;
    env.create(&Pod::new(name).claim(name).build())?;
    Ok(uid)
}

/// Returns the partitions that a claim's request (empty: all requests) was given, by device name.
fn allocated(env: &Env, claim: &str, request: &str) -> Result<BTreeMap<String, Place>> {
    let results = wait_for(&format!("allocation of claim {claim}"), PATIENCE, || {
        Ok(at(&env.claim(claim)?, "status.allocation.devices.results")
            .as_array()
            .cloned())
    })?;
    let fits = |result: &&Value| request.is_empty() || at(result, "request") == request;
    let place = |result: &Value| {
        let device = at(result, "device")
            .as_str()
            .context("a result without device")?;
        let name = PartitionName::parse(&device.parse::<DeviceName>()?)?;
        Ok((device.to_owned(), (name.profile.0, name.start)))
    };
    results.iter().filter(fits).map(place).collect()
}

/// The GPU that a published partition is on.
fn parent(env: &Env, device: &str) -> Result<String> {
    let devices = env.driver.devices()?;
    let found = devices.iter().find(|found| at(found, "name") == device);
    let parent = found.and_then(|found| at(found, "attributes.parentUUID.string").as_str());
    parent
        .map(str::to_owned)
        .with_context(|| format!("no published device {device} has a parentUUID"))
}

/// Waits until a pod runs and checks that a container has exactly the partitions of these claims'
/// requests: their nodes and UUIDs are those of instances that live, and the claims say these
/// UUIDs, too.
fn check(env: &Env, pod: &str, container: &str, claims: &[(&str, &str)]) -> Result<()> {
    env.wait_until_running(pod)?;
    let log = env.log(pod, container)?;
    let lines = |prefix: &str| -> BTreeSet<String> {
        log.lines()
            .filter(|line| line.starts_with(prefix))
            .map(str::to_owned)
            .collect()
    };
    let (mut nodes, mut uuids) = (BTreeSet::new(), BTreeSet::new());
    for (claim, request) in claims {
        for (device, place) in allocated(env, claim, request)? {
            let gpu = parent(env, &device)?;
            let minor = env.driver.gpus().get(&gpu)?.minor;
            let living = env.driver.gpus().instances(&gpu)?;
            let found = living
                .iter()
                .find(|one| (one.instance.profile.0, one.instance.placement.start) == place);
            let found = found
                .with_context(|| format!("{device} of claim {claim} does not live on {gpu}"))?;
            let [compute] = found.compute.as_slice() else {
                anyhow::bail!(
                    "{device} has not one compute instance but {:?}",
                    found.compute
                );
            };
            for id in [None, Some(compute.id)] {
                let node = divvy_host::capability_minor(minor, found.instance.id, id);
                nodes.insert(format!("/dev/nvidia-caps/nvidia-cap{node}"));
            }
            uuids.insert(format!(
                "{}={}",
                names::env::mig_uuid(&device),
                compute.uuid
            ));
            wait_for(
                &format!("UUID of {device} in the status of claim {claim}"),
                PATIENCE,
                || {
                    let claim = env.claim(claim)?;
                    let reported = at(&claim, "status.devices")
                        .as_array()
                        .cloned()
                        .unwrap_or_default();
                    let reported = reported
                        .iter()
                        .find(|reported| at(reported, "device") == device.as_str());
                    Ok(reported
                        .filter(|reported| at(reported, "data.uuid") == compute.uuid.as_str())
                        .map(drop))
                },
            )?;
        }
    }
    let found = (lines("/dev/nvidia-caps/"), lines("DIVVY_MIG_UUID_"));
    ensure!(
        found == (nodes.clone(), uuids.clone()),
        "container {container} of pod {pod} has {found:?}; its claims have {:?}",
        (nodes, uuids)
    );
    Ok(())
}

/// Checks that a GPU has the instances of these claims and no other: none leaked, none lost.
fn only(env: &Env, gpu: &str, claims: &[&str]) -> Result<()> {
    let mut expected = BTreeSet::new();
    for claim in claims {
        expected.extend(allocated(env, claim, "")?.into_values());
    }
    let living = places(env, gpu)?;
    ensure!(
        living == expected,
        "{gpu} has the instances {living:?}; the claims {claims:?} have {expected:?}"
    );
    Ok(())
}

/// The GPU instances that live.
fn places(env: &Env, gpu: &str) -> Result<BTreeSet<Place>> {
    let living = env.driver.gpus().instances(gpu)?;
    Ok(living
        .iter()
        .map(|one| (one.instance.profile.0, one.instance.placement.start))
        .collect())
}

/// Returns true if a taint is on exactly the devices of a GPU that overlap this place, or on none.
fn tainted_as(
    env: &Env,
    gpu: &str,
    caps: &MigCapabilities,
    key: &str,
    place: Option<Placement>,
) -> Result<bool> {
    let devices = env.driver.devices()?;
    // The device for admins excludes no other device.
    let is_of = |device: &&Value| {
        at(device, "attributes.type.string") != "gpu-admin"
            && [
                at(device, "attributes.parentUUID.string"),
                at(device, "attributes.uuid.string"),
            ]
            .iter()
            .any(|uuid| *uuid == gpu)
    };
    let mut count = 0;
    for device in devices.iter().filter(is_of) {
        count += 1;
        let taints = at(device, "taints").as_array().cloned().unwrap_or_default();
        let tainted = taints.iter().any(|taint| at(taint, "key") == key);
        let overlaps = |tainted: Placement| -> Result<bool> {
            if !is_partition(device) {
                return Ok(true);
            }
            let name = at(device, "name")
                .as_str()
                .context("a device without a name")?;
            let name = PartitionName::parse(&name.parse::<DeviceName>()?)?;
            let place = caps.placement(name.profile, name.start);
            Ok(place
                .with_context(|| format!("the GPU has no {name}"))?
                .overlaps(tainted))
        };
        if tainted != place.map_or(Ok(false), overlaps)? {
            return Ok(false);
        }
    }
    Ok(count > 1)
}

/// Ends a pod and its claim, and waits until nothing of it is left on the node.
fn end(env: &Env, name: &str, claim_uid: &str) -> Result<()> {
    env.end(name, claim_uid)?;
    env.delete("ResourceClaim", name)?;
    env.wait_until_gone("ResourceClaim", name)
}
