//! The chart on an API server. `cargo xtask chart` checks without one what it makes of which
//! values.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use divvy_api::names;
use serde_json::{Value, json};

use super::SHARED;
use super::policy::refused;
use super::shares::Policy;
use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::driver::{WITHOUT_RESOURCES, chart, helm};
use crate::objects::{Pod, claim_for};
use crate::process::output_of;
use crate::wait::{poll, wait_for};

/// Values under which every object must be taken; PodMonitors and SecurityContextConstraints are
/// other projects' kinds.
const TAKEN: &[&str] = &[
    "{}",
    r#"{"driverName": "gpu.taken.example", "fullnameOverride": "taken", "nodeSelection": "discovered",
        "networkPolicy": {"enabled": true, "from": [{"namespaceSelector": {}}]}, "service": {"enabled": true},
        "resourceQuota": {"enabled": true}, "adminAccess": {"namespaces": ["a", "b"]},
        "clusterController": {"enabled": true, "dryRun": false, "quota": true, "nodeLabels": true, "replicas": 2, "nodeSelector": {"a": "b"}},
        "defragmentation": {"enabled": true, "dryRun": false, "timeZone": "Etc/UTC", "preemption": {"enabled": true, "dryRun": false}}}"#,
    r#"{"claimTemplates": {"namespaces": ["default"], "templates": {"tenth": {"memory": "8Gi", "cores": 10}, "one": {"slots": 1}}},
        "migClasses": ["1g.10gb", "1g.10gb+me", "1g.10gb+me.all", "1g.24gb-me", "1g.24gb+gfx"], "commonLabels": {"team": "a"},
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "taken", "namespace": "{{ .Release.Namespace }}"}}]}"#,
    r#"{"nvidiaDeviceClasses": {"enabled": true, "bothDrivers": true}, "extraDeviceClasses": [
        {"name": "big", "mode": "gpu", "selectors": ["device.capacity['gpu.divvy.dev'].memory.compareTo(quantity('40Gi')) >= 0"],
         "config": {"timeSlicing": {"interval": "Long"}}, "extendedResourceName": "example.com/big"},
        {"name": "small", "mode": "share", "config": {"extraNodes": ["/dev/gdrdrv"]}}]}"#,
    r#"{"deviceClass": {"extendedResourceNames": {"gpu": "nvidia.com/gpu", "mig": "nvidia.com/mig", "share": "nvidia.com/gpu.shared"}},
        "serviceAccount": {"create": false, "name": "own"}, "podLabels": {"team": "a"}, "podAnnotations": {"b": "c"},
        "priorityClassName": "", "libraryDelivery": "mounts", "driverRoot": "/opt/driver", "updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}"#,
];

/// Dry runs of server-side apply: with the server's schema, its validation, and its compiler of
/// CEL.
pub(super) fn taken(env: &Env) -> Result<()> {
    let file = env.cluster.state().join("taken.json");
    let apply = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--dry-run=server",
        "--validate=strict",
    ];
    for values in TAKEN {
        fs_err::write(&file, values)?;
        let (chart, file) = (chart(), file.display().to_string());
        let args = [
            "template",
            "divvy",
            &chart,
            "--namespace",
            &env.namespace,
            "--values",
            &file,
        ];
        let yaml = helm(env.cluster, &args)?;
        let mut command = env
            .cluster
            .command("kubectl", &[&apply[..], &["--filename", "-"]].concat());
        let said = output_of(&mut command, &yaml).with_context(|| format!("values {values}"))?;
        let taken = said
            .lines()
            .filter(|line| line.ends_with("serverside-applied (server dry run)"))
            .count();
        let made = yaml
            .lines()
            .filter(|line| line.starts_with("kind: "))
            .count();
        ensure!(
            taken == made,
            "values {values}: {made} objects made, {taken} taken: {said}"
        );
    }
    Ok(())
}

/// Where the chart lists namespaces, Kubernetes' label is not enough.
pub(super) fn admin_access(env: &Env) -> Result<()> {
    let label = json!({"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}});
    env.api()
        .patch(&format!("/api/v1/namespaces/{}", env.namespace), &label)?;
    let asked = json!({"devices": {"requests": [{"name": "gpu", "exactly": {
        "deviceClassName": names::CLASS_ADMIN, "adminAccess": true, "allocationMode": "All",
    }}]}});
    let claims = format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims?dryRun=All",
        env.namespace
    );
    let tried = || {
        env.api()
            .create(&claims, &claim_for("monitor", &asked))
            .map(drop)
    };
    let allow = |namespaces: &str| {
        env.driver
            .change(&[&format!("adminAccess.namespaces={{{namespaces}}}")])
    };
    tried().context("the label alone is not enough without the chart's list")?;

    allow("elsewhere")?;
    let outcome = wait_for("refusal of admin access in this namespace", PATIENCE, || Ok(tried().err())).and_then(
        |error| {
            let words = format!("claims with adminAccess are not allowed in namespace {}", env.namespace);
            refused(Err(error), &words)?;
            let template = json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
                "metadata": {"name": "monitor"}, "spec": {"spec": asked},
            });
            refused(env.create(&template).map(drop), &words)?;
            let plain = json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": names::CLASS_GPU}}]}});
            env.api().create(&claims, &claim_for("plain", &plain)).context("a claim without adminAccess")?;
            allow(&format!("elsewhere,{}", env.namespace))?;
            poll("admin access in a listed namespace", PATIENCE, || Ok(tried().is_ok()))
        },
    );
    env.driver.change(&[])?;
    outcome
}

/// A release of its own, and the driver's name; its definitions belong to the other release.
const RELEASE: &str = "divvy-gone";
const DRIVER: &str = "gpu.gone.example";

/// `helm uninstall` takes every object of the release, the kubelet the slices; the plugin's folder
/// stays.
pub(super) fn uninstalled(env: &Env) -> Result<()> {
    let slices =
        format!("/apis/resource.k8s.io/v1/resourceslices?fieldSelector=spec.driver={DRIVER}");
    env.driver.install_second(RELEASE, DRIVER)?;
    let published = poll("devices of the second driver", PATIENCE, || {
        Ok(!env.api().list(&slices)?.is_empty())
    });
    let kinds = "daemonsets,pods,serviceaccounts,clusterroles,clusterrolebindings,deviceclasses,\
        validatingadmissionpolicies,validatingadmissionpolicybindings,crds,services,resourcequotas,networkpolicies";
    let of_release = format!("--selector=app.kubernetes.io/instance={RELEASE}");
    let left = || {
        env.cluster.kubectl(&[
            "get",
            kinds,
            "--all-namespaces",
            &of_release,
            "--output=name",
        ])
    };
    let before = left();
    helm(
        env.cluster,
        &["uninstall", RELEASE, "--namespace", RELEASE, "--wait"],
    )?;
    published?;
    ensure!(
        before?.lines().count() > 10,
        "the release's objects are not found by their label"
    );

    // Its pod ends by itself.
    let mut still = String::new();
    poll("end of the release's objects", PATIENCE, || {
        still = left()?;
        Ok(still.trim().is_empty())
    })
    .with_context(|| format!("there are still: {still}"))?;
    poll("end of the published slices", PATIENCE * 2, || {
        Ok(env.api().list(&slices)?.is_empty())
    })?;
    let folder = env
        .cluster
        .node_path(format!("/var/lib/kubelet/plugins/{DRIVER}"));
    ensure!(
        folder.join("node/ordinals.json").exists(),
        "the numbers of the GPUs are gone from {}",
        folder.display()
    );
    let nodes = env.api().list("/apis/divvy.dev/v1beta1/gpunodes")?;
    ensure!(
        nodes
            .iter()
            .any(|node| !at(node, "metadata.name").is_null()),
        "the GpuNodes are gone"
    );

    // Definitions that stay carry the marks of the release that made them.
    let chart = chart();
    let own = format!("driverName={DRIVER}");
    let again = [
        "install",
        RELEASE,
        &chart,
        "--namespace",
        RELEASE,
        "--set",
        &own,
        "--dry-run=server",
    ];
    // The first release's class has the name.
    refused(
        helm(env.cluster, &again).map(drop),
        "DeviceClass gpu.divvy.dev of this cluster stands for nvidia.com/gpu already",
    )?;
    let again = [&again[..], &WITHOUT_RESOURCES].concat();
    refused(
        helm(env.cluster, &again).map(drop),
        "invalid ownership metadata",
    )?;
    helm(env.cluster, &[&again[..], &["--take-ownership"]].concat())?;
    serves_anew(env, &slices, &folder)
}

/// Installed once more over a node without the folder, the release serves pods: nothing that it has
/// left elsewhere (sockets, slices, GpuNodes, policies) stands in the way.
fn serves_anew(env: &Env, slices: &str, folder: &Path) -> Result<()> {
    fs_err::remove_dir_all(folder)?;
    env.driver.install_second(RELEASE, DRIVER)?;
    let serves = || {
        poll("devices of the release that came again", PATIENCE, || {
            Ok(!env.api().list(slices)?.is_empty())
        })?;
        let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": DRIVER}}]}});
        let uid = Env::uid(&env.create(&claim_for("again", &spec))?)?;
        env.create(&Pod::new("again").claim("again").build())?;
        env.wait_until_running("again")?;
        let record = folder.join(format!("claims/{uid}.json"));
        ensure!(record.exists(), "there is no {}", record.display());
        env.delete("Pod", "again")?;
        env.wait_until_gone("Pod", "again")?;
        poll("end of the record", PATIENCE, || Ok(!record.exists()))?;
        env.delete("ResourceClaim", "again")?;
        env.wait_until_gone("ResourceClaim", "again")
    };
    let outcome = serves();
    helm(
        env.cluster,
        &["uninstall", RELEASE, "--namespace", RELEASE, "--wait"],
    )?;
    outcome
}

/// The value of docs/migrate/device-plugin.md for shares; whole GPUs and MIG profiles have their
/// resources by default.
const RESOURCES: &[&str] = &["deviceClass.extendedResourceNames.share=nvidia.com/gpu.shared"];

/// The pods of public articles, as the demo has them.
const ARTICLES: &str = include_str!("../../../../demo/fixtures/own/extended.yaml");

/// Pods that were written for the device plugin get devices of each mode.
pub(super) fn extended_resources(env: &Env) -> Result<()> {
    let &[.., cut, shared] = env.driver.gpus().of_product(SHARED).as_slice() else {
        bail!("the node has not two such GPUs")
    };
    let spec = json!({"rules": [
        {"gpus": {"uuids": [cut]}, "modes": ["Mig"], "mig": {"profiles": ["1g.10gb"]}},
        {"gpus": {"uuids": [shared]}, "modes": ["TimeSlicing"], "shares": {"slots": 4}},
    ]});
    let _policy = Policy::create(env, &env.namespace, &spec)?;
    env.driver.change(RESOURCES)?;
    let ran = run_as_written(env)
        .and_then(|()| runs_with(env, "shared", &json!({"nvidia.com/gpu.shared": "1"}), 1));
    env.driver.change(&[])?;
    ran
}

/// With one value a pod that asks for `nvidia.com/gpu: 1` gets a share, without any GpuPolicy. In a
/// release that has another profile the name is taken from whole GPUs first, as the chart asks.
pub(super) fn profile_shared(env: &Env) -> Result<()> {
    const WITHOUT: &str = "deviceClass.extendedResourceNames.gpu=";
    let before = format!("profile={}", env.driver.offer()?);
    let in_one_step = env.driver.change(&["profile=shared"]);
    ensure!(in_one_step.is_err(), "the name moved in one step");
    env.driver.change(&[&before, WITHOUT])?;
    env.driver.upgrade(&["profile=shared", "slots=4"])?;
    let limits = json!({"nvidia.com/gpu": "1"});
    let ran = runs_with(env, "shared", &limits, 1);
    env.driver.upgrade(&[&before, WITHOUT])?;
    env.driver.change(&[&before])?;
    ran
}

/// Runs the articles' pods one after another, with their names and limits; the image is one that
/// the cluster has.
fn run_as_written(env: &Env) -> Result<()> {
    let pods: Vec<Value> =
        serde_saphyr::from_multiple(ARTICLES).context("the articles' pods are not YAML")?;
    ensure!(pods.len() == 2, "not the pods that this case knows");
    for pod in &pods {
        let name = at(pod, "metadata.name").as_str().unwrap_or_default();
        let limits = at(pod, "spec.containers.0.resources.limits");
        let asked: Vec<u64> = limits
            .as_object()
            .into_iter()
            .flat_map(|all| all.values().filter_map(Value::as_u64))
            .collect();
        let &[count] = asked.as_slice() else {
            bail!("pod {name} asks for {limits}, not for one resource")
        };
        runs_with(env, name, limits, usize::try_from(count)?)?;
    }
    Ok(())
}

/// Runs a pod with these limits, which is to get so many devices.
fn runs_with(env: &Env, name: &str, limits: &Value, count: usize) -> Result<()> {
    let mut pod = Pod::new(name).build();
    if let Some(main) = pod.pointer_mut("/spec/containers/0/resources") {
        *main = json!({"limits": limits});
    }
    env.create(&pod)?;
    let ran = env.wait_until_running(name)?;
    let claim = at(&ran, "status.extendedResourceClaimStatus.resourceClaimName").as_str();
    let claim = env.claim(claim.context("the pod has no claim for its extended resource")?)?;
    let devices: BTreeSet<&str> = at(&claim, "status.allocation.devices.results")
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|result| at(result, "device").as_str())
        .collect();
    let is_right = |device: &str| match name {
        "seed-mig" => device.contains("-mig-1g10gb-"),
        "shared" => device.ends_with("-ts"),
        _ => device
            .strip_prefix("gpu-")
            .is_some_and(|number| number.parse::<u32>().is_ok()),
    };
    ensure!(
        devices.len() == count && devices.iter().all(|device| is_right(device)),
        "pod {name} with {limits} has {devices:?}"
    );
    env.end(name, &Env::uid(&claim)?)
}
