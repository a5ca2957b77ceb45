//! divvy in the place of NVIDIA's driver: the release has its name. The first case runs manifests
//! that are written for it; in the second a cluster moves from it node by node, and back; the third
//! has NVIDIA's second driver beside it. Each has the cluster to itself, and gives the release its
//! name back.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_api::names::{self, NVIDIA_DRIVER};
use serde_json::{Value, json};

use super::SHARED;
use crate::api::{at, has_condition};
use crate::case::Env;
use crate::cluster::Cluster;
use crate::config::Layout;
use crate::device_plugin::PluginGpu;
use crate::dra_plugin::{self, COMPUTE_DOMAIN, DraPlugin};
use crate::driver::NAMESPACE;
use crate::gpus::Gpus;
use crate::objects::{Pod, SAY_AND_STAY, claim_for};
use crate::programs::workspace;
use crate::wait::poll;

/// An upgrade of the release, and the kubelet's half minute until it removes the slices of a plugin
/// that is gone.
const PATIENCE: Duration = Duration::from_secs(150);
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// Manifests in NVIDIA's names, each of another form; `demo/src/tests/stand_in.rs` runs all.
const FORMS: [&str; 10] = [
    "one-gpu",
    "two-containers",
    "shared-claim",
    "two-claims",
    "two-gpus",
    "deployment",
    "extended-resource",
    "by-product",
    "by-driver-version",
    "time-slicing",
];

/// The release with NVIDIA's name.
const RENAMED: &str = "driverName=gpu.nvidia.com";
/// A class without a resource. The chart moves `nvidia.com/gpu` from one class to another in two
/// steps.
const WITHOUT: &str = "deviceClass.extendedResourceNames.gpu=";

/// Gives the release NVIDIA's name while something is done, and then its own again.
fn under_its_name(env: &Env, run: impl FnOnce() -> Result<()>) -> Result<()> {
    env.driver.change(&[WITHOUT])?;
    let ran = env.driver.upgrade(&[RENAMED]).and_then(|()| run());
    env.driver.label_node(Layout::NODE, true)?;
    env.driver.change(&[RENAMED, WITHOUT])?;
    env.driver.upgrade(&[])?;
    env.driver.wait_for_slices()?;
    ran
}

/// Returns the slices under NVIDIA's name of a node.
fn slices(env: &Env, node: &str) -> Result<Vec<Value>> {
    let selector = format!("spec.driver={NVIDIA_DRIVER},spec.nodeName={node}");
    env.api()
        .list(&format!("{SLICES}?fieldSelector={selector}"))
}

/// Waits until the slices of a node under NVIDIA's name are of this pool alone.
fn wait_for_pool(env: &Env, node: &str, pool: &str) -> Result<()> {
    poll(&format!("pool {pool} alone on {node}"), PATIENCE, || {
        let slices = slices(env, node)?;
        let is = |slice: &Value| at(slice, "spec.pool.name") == pool;
        Ok(!slices.is_empty() && slices.iter().all(is))
    })
}

fn own_pool(node: &str) -> String {
    format!("{node}/divvy")
}

pub(super) fn manifests(env: &Env) -> Result<()> {
    under_its_name(env, || {
        wait_for_pool(env, Layout::NODE, &own_pool(Layout::NODE))?;
        let run = |name: &&str| form(env, name).with_context(|| format!("manifest {name}"));
        FORMS.iter().try_for_each(run)
    })
}

/// Applies a manifest, and waits until each of its pods runs with what NVIDIA's users expect.
fn form(env: &Env, name: &str) -> Result<()> {
    let file = workspace().join(format!("demo/fixtures/stand-in/{name}.yaml"));
    let file = file.display().to_string();
    let namespace = format!("stand-in-{name}");
    env.cluster.kubectl(&["apply", "-f", &file])?;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let ran = poll(&format!("the pods of {namespace}"), PATIENCE, || {
        let pods = env.api().list(&pods)?;
        let is_well = |pod: &Value| has_condition(pod, "Ready");
        Ok(!pods.is_empty() && pods.iter().all(is_well))
    })
    .and_then(|()| {
        let pods = env.api().list(&pods)?;
        pods.iter().try_for_each(|pod| sees_its_gpus(env, pod))
    });
    let delete = ["delete", "--wait", "--ignore-not-found", "-f", &file];
    env.cluster.kubectl(&delete)?;
    ran
}

/// Checks that the programs of the driver are in every container.
fn sees_its_gpus(env: &Env, pod: &Value) -> Result<()> {
    let part = |path: &str| at(pod, path).as_str().unwrap_or_default();
    let (namespace, name) = (part("metadata.namespace"), part("metadata.name"));
    for container in at(pod, "spec.containers").as_array().into_iter().flatten() {
        let container = at(container, "name").as_str().unwrap_or_default();
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/log?container={container}");
        poll(&format!("words of {container} of {name}"), PATIENCE, || {
            Ok(env.api().text(&path)?.contains("nvidia-smi of driver"))
        })?;
    }
    Ok(())
}

/// A node of the move.
struct Node<'a> {
    cluster: &'a Cluster,
    gpu: PluginGpu,
    product: String,
}

impl<'a> Node<'a> {
    fn new(cluster: &'a Cluster, gpus: &Gpus, product: &str) -> Result<Self> {
        let all = gpus.of_product(product);
        let uuid = *all.last().context("the node has no such GPU")?;
        let gpu = gpus.get(uuid)?;
        let node = format!("/dev/nvidia{}", gpu.minor);
        Ok(Self {
            cluster,
            product: gpu.product.clone(),
            gpu: PluginGpu {
                uuid: uuid.to_owned(),
                node: (format!("{}{node}", gpus.root().display()), node),
            },
        })
    }

    fn name(&self) -> &'static str {
        self.cluster.layout().node()
    }

    /// Starts the stand-in for NVIDIA's plugin, with its slice.
    fn start_nvidia(&self, env: &Env) -> Result<DraPlugin> {
        let plugin = DraPlugin::start(self.cluster, self.gpu.clone())?;
        let slice = dra_plugin::slice(self.name(), &self.gpu.uuid, &self.product);
        env.api().create(SLICES, &slice)?;
        Ok(plugin)
    }

    /// Returns divvy's pods on the node.
    fn divvy(&self, env: &Env) -> Result<Vec<Value>> {
        let here = format!(
            "labelSelector=app.kubernetes.io/component=node&fieldSelector=spec.nodeName={}",
            self.name()
        );
        env.api()
            .list(&format!("/api/v1/namespaces/{NAMESPACE}/pods?{here}"))
    }

    /// Waits until divvy serves the node: it is ready, and its pool alone is published.
    fn wait_for_divvy(&self, env: &Env) -> Result<()> {
        let name = self.name();
        poll(&format!("divvy on {name}, ready"), PATIENCE, || {
            let pods = self.divvy(env)?;
            Ok(pods.iter().any(|pod| has_condition(pod, "Ready")))
        })?;
        wait_for_pool(env, name, &own_pool(name))
    }

    /// Creates a pod with a GPU of class gpu.nvidia.com on this node, and waits until it sees one.
    fn pod(&self, env: &Env, name: &str) -> Result<()> {
        let one = json!({"deviceClassName": NVIDIA_DRIVER});
        let spec = json!({"devices": {"requests": [{"name": "gpu", "exactly": one}]}});
        env.create(&claim_for(name, &spec))?;
        let mut pod = Pod::new(name).claim(name).build();
        let spec = pod.pointer_mut("/spec").and_then(Value::as_object_mut);
        let here = json!({"kubernetes.io/hostname": self.name()});
        spec.context("a pod without spec")?
            .insert("nodeSelector".to_owned(), here);
        env.create(&pod)?;
        env.wait_until_running(name)?;
        let said = env.log(name, "main")?;
        ensure!(
            said.lines().any(|line| line.starts_with("/dev/nvidia")),
            "pod {name} sees no GPU: {said}"
        );
        let claim = env.claim(name)?;
        let result = at(&claim, "status.allocation.devices.results.0");
        ensure!(
            at(result, "driver") == NVIDIA_DRIVER,
            "the claim of {name} is of another driver: {result}"
        );
        Ok(())
    }
}

/// NVIDIA's second driver runs beside divvy, under divvy's name and under that of the first: one
/// claim has devices of both, and neither touches what the other has.
pub(super) fn second_driver(env: &Env) -> Result<()> {
    const CLASSES: &str = "/apis/resource.k8s.io/v1/deviceclasses";
    let class = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": COMPUTE_DOMAIN},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == {COMPUTE_DOMAIN:?}")}}]},
    });
    env.api().create(CLASSES, &class)?;
    let ran = beside_the_second(env, names::CLASS_GPU, "own-name").and_then(|()| {
        under_its_name(env, || {
            wait_for_pool(env, Layout::NODE, &own_pool(Layout::NODE))?;
            beside_the_second(env, NVIDIA_DRIVER, "its-name")
        })
    });
    let class = format!("{CLASSES}/{COMPUTE_DOMAIN}");
    env.api().delete(&class, &json!({}))?;
    ran
}

/// Runs a pod with a GPU of divvy's class and a channel of the second driver, under which divvy's
/// plugin is killed and the other one leaves and comes back.
fn beside_the_second(env: &Env, class: &str, name: &str) -> Result<()> {
    const CHANNEL: &str = "/dev/nvidia-caps-imex-channels/channel0";
    let channel = PluginGpu {
        uuid: "channel-0".to_owned(),
        node: ("/dev/null".to_owned(), CHANNEL.to_owned()),
    };
    let slice = dra_plugin::slice_as(COMPUTE_DOMAIN, Layout::NODE, &[("type", "channel")]);
    let published = format!(
        "{SLICES}/{}",
        at(&slice, "metadata.name").as_str().unwrap_or_default()
    );
    let started = DraPlugin::start_as(env.cluster, COMPUTE_DOMAIN, channel.clone())?;
    let version = || -> Result<Value> {
        let found = env.api().get(&published)?;
        let found = found.context("the second driver's slice is gone")?;
        Ok(at(&found, "metadata.resourceVersion").clone())
    };
    env.api().create(SLICES, &slice)?;
    let before = version()?;

    let of = |name: &str, class: &str| json!({"name": name, "exactly": {"deviceClassName": class}});
    let requests = [of("gpu", class), of("channel", COMPUTE_DOMAIN)];
    let spec = json!({"devices": {"requests": requests}});
    let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
    let script = format!("ls -d {CHANNEL}; {SAY_AND_STAY}");
    let pod = Pod::new(name).claim(name);
    env.create(&pod.container_running("main", &[name], &script).build())?;
    let sees_both = |said: &str| {
        said.lines().any(|line| line == CHANNEL)
            && said
                .lines()
                .any(|line| line.starts_with("/dev/nvidia") && line != CHANNEL)
    };
    env.wait_until_running(name)?;
    poll(
        &format!("a GPU and a channel in pod {name}"),
        PATIENCE,
        || Ok(sees_both(&env.log(name, "main")?)),
    )?;
    let file = env
        .cluster
        .node_path(format!("/run/cdi/k8s.{COMPUTE_DOMAIN}-claim_{uid}.json"));
    let content = fs_err::read_to_string(&file)?;

    env.driver.kill()?;
    drop(started);
    let _again = DraPlugin::start_as(env.cluster, COMPUTE_DOMAIN, channel)?;
    undisturbed(env, name)?;
    ensure!(
        version()? == before,
        "divvy wrote the second driver's slice"
    );
    ensure!(
        fs_err::read_to_string(&file)? == content,
        "divvy changed the second driver's CDI file"
    );
    end(env, name)?;
    env.driver.wait_until_unprepared(&uid)?;
    ensure!(
        !file.exists(),
        "the second driver was not asked to unprepare"
    );
    env.api().delete(&published, &json!({}))
}

/// Ends a pod with its claim.
fn end(env: &Env, name: &str) -> Result<()> {
    env.delete("Pod", name)?;
    env.wait_until_gone("Pod", name)?;
    env.delete("ResourceClaim", name)?;
    env.wait_until_gone("ResourceClaim", name)
}

/// Checks that a pod was never restarted.
fn undisturbed(env: &Env, name: &str) -> Result<()> {
    let pod = env.wait_until_running(name)?;
    ensure!(
        at(&pod, "status.containerStatuses.0.restartCount") == 0,
        "pod {name} was restarted"
    );
    Ok(())
}

/// From NVIDIA's driver to divvy under its name: node 2 first, then node 1 under the pod of node 2,
/// and node 1 back.
pub(super) fn node_by_node(env: &Env) -> Result<()> {
    let cluster = env.cluster.second_node()?;
    let gpus = env.driver.prepare_second(&cluster, "h200x1")?;
    let first = Node::new(env.cluster, env.driver.gpus(), SHARED)?;
    let second = Node::new(&cluster, &gpus, "")?;
    // Not on node 1 yet: its slices under the own name go with it.
    env.driver.stop()?;
    env.driver.change(&[WITHOUT])?;
    env.driver.change(&[RENAMED])?;
    let moved = moves(env, &first, &second);
    env.driver.label_node(second.name(), false)?;
    env.driver.label_node(Layout::NODE, true)?;
    env.driver.change(&[RENAMED, WITHOUT])?;
    env.driver.change(&[])?;
    env.driver.wait_until_alone()?;
    env.driver.wait_for_slices()?;
    moved
}

fn moves(env: &Env, first: &Node, second: &Node) -> Result<()> {
    let nvidia = first.start_nvidia(env)?;
    first.pod(env, "first")?;
    env.driver.label_node(second.name(), true)?;
    second.wait_for_divvy(env)?;
    second.pod(env, "second")?;

    // Node 1 is labelled too early: divvy waits there for the end of NVIDIA's plugin, whose pod and
    // whose slice stay as they are.
    env.driver.label_node(first.name(), true)?;
    poll("divvy on node 1, running and not ready", PATIENCE, || {
        let pods = first.divvy(env)?;
        let waits = |pod: &Value| {
            at(pod, "status.containerStatuses.0.state.running").is_object()
                && !has_condition(pod, "Ready")
        };
        Ok(pods.iter().any(waits))
    })?;
    poll("a report of what it waits for", PATIENCE, || {
        let path = format!("/apis/divvy.dev/v1beta1/gpunodes/{}", first.name());
        let node = env.api().get(&path)?.unwrap_or_default();
        Ok(node.to_string().contains("nvidia-serves"))
    })?;
    wait_for_pool(env, first.name(), first.name())?;
    undisturbed(env, "first")?;

    // It moves: its pod ends, then NVIDIA's plugin. The pod of node 2 runs on.
    end(env, "first")?;
    drop(nvidia);
    first.wait_for_divvy(env)?;
    first.pod(env, "moved")?;
    undisturbed(env, "second")?;

    // And back.
    end(env, "moved")?;
    env.driver.label_node(first.name(), false)?;
    poll("end of divvy on node 1", PATIENCE, || {
        Ok(first.divvy(env)?.is_empty() && slices(env, first.name())?.is_empty())
    })?;
    let nvidia = first.start_nvidia(env)?;
    wait_for_pool(env, first.name(), first.name())?;
    first.pod(env, "back")?;
    undisturbed(env, "second")?;
    end(env, "back")?;
    end(env, "second")?;
    drop(nvidia);
    poll("end of the slice of NVIDIA's plugin", PATIENCE, || {
        Ok(slices(env, first.name())?.is_empty())
    })
}
