//! Uses of shares, and of GPUs that others hold.

use std::collections::BTreeSet;

use divvy_model::mig::GpuInstanceProfileId;

use super::{
    Context, Env, Pod, Policy, Result, Value, at, check, claim_for, create, end, ensure, given,
    gpu_of, h100, json, names, of, poll, request, run, share, spec, whole,
};
use crate::case::PATIENCE;
use crate::components::Component;
use crate::objects::{self, template};
use crate::process::Signal;

pub(in crate::cases) fn several(env: &Env) -> Result<()> {
    let gpus = [h100(env, 4)?, h100(env, 5)?];
    let _policy = Policy::modes(env, &gpus, &["TimeSlicing"])?;
    let wanted = [("memory", "10Gi")];
    let constrained = |constraint: &str| {
        json!({"devices": {
            "requests": [share("x", &gpus, &wanted), share("y", &gpus, &wanted)],
            "constraints": [{constraint: format!("{}/gpuUUID", names::DRIVER)}],
        }})
    };
    // Two shares of one card in one pod, one for each container, both for a third.
    let uid = Env::uid(&env.create(&claim_for("packed", &constrained("matchAttribute")))?)?;
    let pod = Pod::new("packed").claim("packed");
    let pod = pod
        .container("x", &["packed/x"])
        .container("y", &["packed/y"])
        .container("both", &["packed"]);
    env.create(&pod.build())?;
    check(env, "packed", "both", "packed")?;
    let packed = given(env, "packed")?;
    let devices: BTreeSet<&str> = packed.iter().map(|one| one.device.as_str()).collect();
    let shares: BTreeSet<&str> = packed.iter().map(|one| one.share.as_str()).collect();
    ensure!(
        devices.len() == 1 && shares.len() == 2,
        "expected two shares of one GPU, got {packed:?}"
    );
    let bytes = 10_u64 << 30;
    let reported = |container: &str| -> Result<BTreeSet<String>> {
        let log = env.log("packed", container)?;
        Ok(log
            .lines()
            .filter(|line| line.starts_with("DIVVY_MEMORY_"))
            .map(str::to_owned)
            .collect())
    };
    for device in &devices {
        let line =
            |bytes: u64| BTreeSet::from([format!("{}={bytes}", names::env::share_memory(device))]);
        ensure!(
            reported("x")? == line(bytes),
            "container x has {:?}",
            reported("x")?
        );
    }
    end(env, "packed", &uid)?;

    // Spread over cards.
    let uid = Env::uid(&env.create(&claim_for("spread", &constrained("distinctAttribute")))?)?;
    env.create(&Pod::new("spread").claim("spread").build())?;
    check(env, "spread", "main", "spread")?;
    let spread = given(env, "spread")?;
    let devices: BTreeSet<&str> = spread.iter().map(|one| one.device.as_str()).collect();
    ensure!(
        devices.len() == 2,
        "expected shares of two GPUs, got {spread:?}"
    );
    end(env, "spread", &uid)
}

/// N pods on one card, from a template, 10 % each.
pub(in crate::cases) fn deployment(env: &Env) -> Result<()> {
    const PODS: u32 = 8;
    let gpu = h100(env, 6)?;
    let _policy = Policy::modes(env, &[gpu], &["TimeSlicing"])?;
    let wanted = [("memory", "100Mi"), ("cores", "10")];
    let spec = json!({"devices": {"requests": [share("gpu", &[gpu], &wanted)]}});
    env.create(&template("share", &spec))?;
    env.create(&objects::deployment(
        "d",
        PODS,
        &Pod::new("").template("share"),
    ))?;
    env.wait_for_replicas("d", PODS)?;
    let mut uids = Vec::new();
    for pod in &env.api().list(&env.path("Pod", "")?)? {
        let (name, claim) = (
            at(pod, "metadata.name").as_str().unwrap_or_default(),
            Env::claim_of(pod)?,
        );
        check(env, name, "main", &claim)?;
        uids.push(Env::uid(&env.claim(&claim)?)?);
    }
    env.delete("Deployment", "d")?;
    uids.iter()
        .try_for_each(|uid| env.driver.wait_until_unprepared(uid))
}

/// Kubelet and plugin are killed together while many shares start, and the kubelet again while all
/// run: each pod runs, none is restarted, later pods start, and nothing is left behind.
pub(in crate::cases) fn killed_kubelet(env: &Env) -> Result<()> {
    const PODS: u32 = 24;
    let gpus = [h100(env, 5)?, h100(env, 6)?];
    let _policy = Policy::modes(env, &gpus, &["TimeSlicing"])?;
    let wanted = [("memory", "100Mi"), ("cores", "5")];
    let spec = json!({"devices": {"requests": [share("gpu", &gpus, &wanted)]}});
    env.create(&template("share", &spec))?;
    env.create(&objects::deployment(
        "d",
        PODS,
        &Pod::new("").template("share"),
    ))?;
    let kubelet = env.cluster.component(Component::Kubelet);
    let records =
        || -> Result<usize> { Ok(env.driver.plugin_dir().join("claims").read_dir()?.count()) };
    poll("records of some of the claims", PATIENCE, || {
        Ok(records()? >= 4)
    })?;
    env.driver.kill_and(|| {
        kubelet.stop(Signal::Kill)?;
        kubelet.start()
    })?;
    let pods = || env.api().list(&env.path("Pod", "")?);
    // A prepare that fails because no driver is registered yet costs its pod over a minute: the
    // kubelet repeats it with the pod's next sandbox.
    poll("pods that run after the kills", PATIENCE * 3, || {
        let runs = |pod: &&Value| at(pod, "status.phase") == "Running";
        Ok(pods()?.iter().filter(runs).count() == PODS as usize)
    })?;
    env.wait_for_replicas("d", PODS)?;

    let restarts = || -> Result<u64> {
        let of = |pod: &Value| at(pod, "status.containerStatuses.0.restartCount").as_u64();
        Ok(pods()?.iter().filter_map(of).sum())
    };
    let before = restarts()?;
    kubelet.stop(Signal::Kill)?;
    kubelet.start()?;
    // A kubelet that starts removes all slices of its node: the pod waits for new ones.
    let later = run(env, "later", &[share("gpu", &gpus, &wanted)])?;
    env.wait_for_replicas("d", PODS)?;
    ensure!(restarts()? == before, "containers were restarted");
    let mut uids = vec![later];
    for pod in &pods()? {
        let name = at(pod, "metadata.name").as_str().unwrap_or_default();
        if name == "later" {
            continue;
        }
        let claim = Env::claim_of(pod)?;
        check(env, name, "main", &claim)?;
        uids.push(Env::uid(&env.claim(&claim)?)?);
    }
    env.delete("Deployment", "d")?;
    env.delete("Pod", "later")?;
    uids.iter()
        .try_for_each(|uid| env.driver.wait_until_unprepared(uid))
}

/// A monitor sees a GPU that others hold, whatever it is.
pub(in crate::cases) fn admin(env: &Env) -> Result<()> {
    let (shared, cut) = (h100(env, 7)?, h100(env, 8)?);
    let _policy = Policy::modes(env, &[shared, cut], &["Whole", "Mig", "TimeSlicing"])?;
    let label = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
    env.api()
        .patch(&format!("/api/v1/namespaces/{}", env.namespace), &label)?;
    let first = run(
        env,
        "share",
        &[share("gpu", &[shared], &[("memory", "10Gi")])],
    )?;
    let second = create(env, "part", &[super::partition("part", &[cut], "1g.10gb")])?;
    env.wait_until_running("part")?;
    for (name, gpu) in [("sees-shared", shared), ("sees-cut", cut)] {
        let mut asked = request("gpu", names::CLASS_ADMIN, &[gpu]);
        if let Some(exactly) = asked.get_mut("exactly").and_then(Value::as_object_mut) {
            exactly.insert("adminAccess".to_owned(), json!(true));
        }
        let uid = run(env, name, &[asked])?;
        end(env, name, &uid)?;
    }
    // Devices for monitors are closed to other claims.
    let refused = create(
        env,
        "cheat",
        &[request("gpu", names::CLASS_ADMIN, &[shared])],
    );
    let words = "is for requests with adminAccess: true only";
    ensure!(
        refused
            .as_ref()
            .is_err_and(|error| format!("{error:#}").contains(words)),
        "an admin device for a claim without admin access: {refused:?}"
    );
    end(env, "share", &first)?;
    end(env, "part", &second)
}

/// A pod that knows nothing of claims: the class says which extended resource it is.
pub(in crate::cases) fn extended(env: &Env) -> Result<()> {
    let gpu = h100(env, 9)?;
    let _policy = Policy::modes(env, &[gpu], &["TimeSlicing"])?;
    let class = format!(
        "{}.example.com",
        env.namespace.chars().take(20).collect::<String>()
    );
    let resource = "example.com/gpu-share";
    let expression = format!(
        "device.driver == '{}' && device.allowMultipleAllocations && {}",
        names::DRIVER,
        of(&[gpu])
    );
    env.cluster.apply(
        &json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceClass",
            "metadata": {"name": class},
            "spec": {"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": resource},
        })
        .to_string(),
    )?;
    let mut pod = Pod::new("plain").build();
    if let Some(main) = pod.pointer_mut("/spec/containers/0/resources") {
        *main = json!({"limits": {resource: "1"}});
    }
    env.create(&pod)?;
    let ran = env.wait_until_running("plain");
    env.api().delete(
        &format!("/apis/resource.k8s.io/v1/deviceclasses/{class}"),
        &json!({}),
    )?;
    let claim = at(
        &ran?,
        "status.extendedResourceClaimStatus.resourceClaimName",
    )
    .as_str()
    .map(str::to_owned);
    let claim = claim.context("the pod has no claim for its extended resource")?;
    check(env, "plain", "main", &claim)?;
    let uid = Env::uid(&env.claim(&claim)?)?;
    env.end("plain", &uid)
}

/// Instances that an admin made are given out as they are.
pub(in crate::cases) fn static_partitions(env: &Env) -> Result<()> {
    let gpu = h100(env, 9)?;
    env.driver.gpus().edit(gpu, |engine, uuid| {
        engine.set_mig_mode(uuid, true)?;
        // 3g.40gb in the lower half.
        engine.make_foreign_instance(uuid, GpuInstanceProfileId(9), 0)
    })??;
    let before = env.driver.gpus().instances(gpu)?;
    let mut rules = spec(&[gpu], &["Mig"]);
    if let Some(rule) = rules.pointer_mut("/rules/0").and_then(Value::as_object_mut) {
        rule.insert("mig".to_owned(), json!({"instances": "Static"}));
    }
    let _policy = Policy::create(env, &env.namespace, &rules)?;
    poll(
        "the one partition that lives, offered with its UUID",
        PATIENCE,
        || {
            let devices = env.driver.devices()?;
            let on = |device: &&Value| at(device, "attributes.gpuUUID.string") == gpu;
            let parts: Vec<&Value> = devices
                .iter()
                .filter(on)
                .filter(|device| {
                    at(device, "attributes.type.string") == "mig" && !super::is_withdrawn(device)
                })
                .collect();
            Ok(parts.len() == 1
                && parts
                    .iter()
                    .all(|part| at(part, "attributes.uuid.string").is_string()))
        },
    )?;
    let part = create(env, "part", &[super::partition("part", &[gpu], "3g.40gb")])?;
    env.wait_until_running("part")?;
    ensure!(
        env.driver.gpus().instances(gpu)? == before,
        "an instance was made or destroyed"
    );
    create(env, "none", &[super::partition("part", &[gpu], "1g.10gb")])?;
    env.wait_until_unschedulable("none")?;
    create(env, "whole", &[whole(&[gpu])])?;
    env.wait_until_unschedulable("whole")?;
    let gpu_of_part = gpu_of(
        env,
        &given(env, "part")?.first().context("nothing given")?.device,
    )?;
    ensure!(gpu_of_part == gpu, "the partition is on {gpu_of_part}");
    end(env, "part", &part)?;
    ensure!(
        env.driver.gpus().instances(gpu)? == before,
        "an instance of the admin's is gone"
    );
    // As it was: the admin removes it.
    env.driver.stop()?;
    env.driver.gpus().edit(gpu, |engine, uuid| {
        engine.reset_gpu(uuid)?;
        engine.set_mig_mode(uuid, false)
    })??;
    env.driver.start()
}
