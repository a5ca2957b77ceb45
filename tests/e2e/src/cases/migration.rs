//! The way from NVIDIA's device plugin to divvy, and back: node by node, under a Deployment that
//! asks for `nvidia.com/gpu` and knows of neither. Each of two nodes has two GPUs for it.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use serde_json::{Value, json};

use super::SHARED;
use super::neighbours::RESOURCE;
use super::shares::is_withdrawn;
use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::cluster::Cluster;
use crate::config::Layout;
use crate::device_plugin::{DevicePlugin, PluginGpu};
use crate::driver::NAMESPACE;
use crate::gpus::Gpus;
use crate::objects::{Pod, deployment};
use crate::wait::poll;

const CLASS: &str = "/apis/resource.k8s.io/v1/deviceclasses";
/// The Deployment, and the class that its resource stands for where divvy is.
const NAME: &str = "e2e-migration";
const GPUS: usize = 2;
/// Devices that a policy before has offered are published for a minute and a half.
const WITHDRAWN: Duration = Duration::from_secs(150);

/// A node, and who gives its GPUs out.
struct Node<'a> {
    cluster: &'a Cluster,
    gpus: Vec<PluginGpu>,
    /// None while divvy does.
    plugin: Option<DevicePlugin>,
}

pub(super) fn one_by_one(env: &Env) -> Result<()> {
    let cluster = env.cluster.second_node()?;
    let second = env
        .driver
        .prepare_second(&cluster, &format!("h200x{GPUS}"))?;
    let gpus = env.driver.gpus();
    let mut nodes = [
        Node {
            cluster: env.cluster,
            gpus: given(gpus, &gpus.of_product(SHARED))?,
            plugin: None,
        },
        Node {
            cluster: &cluster,
            gpus: given(&second, &second.of_product(""))?,
            plugin: None,
        },
    ];
    let moved = moves(env, &mut nodes);
    env.api().delete(&format!("{CLASS}/{NAME}"), &json!({}))?;
    // With the newer class the scheduler forgets the resource (Kubernetes 1.37,
    // extendedresourcecache): the chart's class counts again once it changes, as
    // docs/migrate/device-plugin.md says.
    let touched = json!({"metadata": {"annotations": {"example.com/touched": NAME}}});
    env.api()
        .patch(&format!("{CLASS}/{}", names::CLASS_GPU), &touched)?;
    env.delete("Deployment", NAME)?;
    env.driver.label_node(Layout::NODE, true)?;
    nodes.iter().try_for_each(|node| node.cordon(env, false))?;
    moved
}

/// The last of these GPUs, as a device plugin gives them out.
fn given(gpus: &Gpus, uuids: &[&str]) -> Result<Vec<PluginGpu>> {
    let last = uuids.iter().rev().take(GPUS);
    last.map(|&uuid| {
        let node = format!("/dev/nvidia{}", gpus.get(uuid)?.minor);
        Ok(PluginGpu {
            uuid: uuid.to_owned(),
            node: (format!("{}{node}", gpus.root().display()), node),
        })
    })
    .collect()
}

fn moves(env: &Env, nodes: &mut [Node; 2]) -> Result<()> {
    poll("nothing to be withdrawn", WITHDRAWN, || {
        Ok(!env.driver.devices()?.iter().any(is_withdrawn))
    })?;
    let [_, second] = nodes;
    second.start_plugin(env)?;
    env.api().create(CLASS, &class(nodes))?;
    let pods = deployment(NAME, u32::try_from(2 * GPUS)?, &Pod::new(NAME));
    env.create(&with_gpu(
        pods,
        "/spec/template/spec/containers/0/resources",
    )?)?;
    check(env, nodes)?;
    let [_, second] = nodes;
    second.over(env)?;
    check(env, nodes)?;
    let [first, _] = nodes;
    first.back(env)?;
    check(env, nodes)?;
    let [first, _] = nodes;
    first.over(env)?;
    check(env, nodes)?;
    // Nothing runs when the second node goes.
    let none = json!({"spec": {"replicas": 0}});
    env.api().patch(&env.path("Deployment", NAME)?, &none)?;
    nodes.iter().try_for_each(|node| node.wait_until_empty(env))
}

/// divvy's whole GPUs under the name of the device plugin's: here those GPUs alone that the plugin
/// has, too. It is newer than the chart's class of that name, so it counts.
fn class(nodes: &[Node]) -> Value {
    let uuids: Vec<&str> = nodes
        .iter()
        .flat_map(|node| &node.gpus)
        .map(|gpu| gpu.uuid.as_str())
        .collect();
    let driver = names::DRIVER;
    let expression = format!(
        "device.driver == '{driver}' && device.attributes['{driver}'].type == 'gpu' && \
         device.attributes['{driver}'].uuid in {uuids:?}"
    );
    json!({
        "metadata": {"name": NAME},
        "spec": {"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": RESOURCE},
    })
}

fn with_gpu(mut object: Value, path: &str) -> Result<Value> {
    *object.pointer_mut(path).context("no resources")? = json!({"limits": {RESOURCE: "1"}});
    Ok(object)
}

/// Every GPU has one pod, each pod has its GPU from whom its node has it from, and there is none
/// for another pod.
fn check(env: &Env, nodes: &[Node; 2]) -> Result<()> {
    env.wait_for_replicas(NAME, u32::try_from(2 * GPUS)?)?;
    let mut used = BTreeSet::new();
    for node in nodes {
        for pod in node.pods(env)? {
            let name = at(&pod, "metadata.name")
                .as_str()
                .context("a pod without a name")?;
            let of_divvy = at(&pod, "status.extendedResourceClaimStatus").is_object();
            ensure!(
                of_divvy == node.plugin.is_none(),
                "pod {name} has its GPU from the wrong one: {pod}"
            );
            let said = env.log(name, "main")?;
            let seen: Vec<&str> = said
                .lines()
                .filter(|line| line.starts_with("/dev/nvidia"))
                .collect();
            let &[gpu] = seen.as_slice() else {
                anyhow::bail!("pod {name} sees {seen:?}")
            };
            ensure!(
                node.gpus.iter().any(|given| given.node.1 == gpu),
                "pod {name} has no GPU of ours: {gpu}"
            );
            ensure!(
                used.insert((node.name(), gpu.to_owned())),
                "{gpu} of {} is in two pods",
                node.name()
            );
        }
    }
    ensure!(used.len() == 2 * GPUS, "not every GPU is used: {used:?}");
    env.create(&with_gpu(
        Pod::new("one-more").build(),
        "/spec/containers/0/resources",
    )?)?;
    env.wait_until_unschedulable("one-more")?;
    env.delete("Pod", "one-more")?;
    env.wait_until_gone("Pod", "one-more")
}

impl Node<'_> {
    fn name(&self) -> &'static str {
        self.cluster.layout().node()
    }

    /// From the device plugin to divvy.
    fn over(&mut self, env: &Env) -> Result<()> {
        self.drain(env)?;
        self.plugin = None;
        self.wait_for_allocatable(env, 0)?;
        env.driver.label_node(self.name(), true)?;
        poll("divvy on the node", PATIENCE, || {
            Ok(self
                .divvy(env)?
                .iter()
                .any(|pod| has_condition(pod, "Ready")))
        })?;
        self.cordon(env, false)
    }

    /// From divvy to the device plugin.
    fn back(&mut self, env: &Env) -> Result<()> {
        self.drain(env)?;
        env.driver.label_node(self.name(), false)?;
        poll("end of divvy on the node", PATIENCE, || {
            Ok(self.divvy(env)?.is_empty())
        })?;
        self.start_plugin(env)?;
        self.cordon(env, false)
    }

    fn start_plugin(&mut self, env: &Env) -> Result<()> {
        self.plugin = Some(DevicePlugin::start(
            self.cluster,
            RESOURCE,
            self.gpus.clone(),
        )?);
        self.wait_for_allocatable(env, GPUS)
    }

    /// No pod comes, and those that are there go.
    fn drain(&self, env: &Env) -> Result<()> {
        self.cordon(env, true)?;
        for pod in self.pods(env)? {
            env.delete(
                "Pod",
                at(&pod, "metadata.name").as_str().unwrap_or_default(),
            )?;
        }
        self.wait_until_empty(env)
    }

    fn wait_until_empty(&self, env: &Env) -> Result<()> {
        poll(
            &format!("end of the pods of {}", self.name()),
            PATIENCE,
            || Ok(self.pods(env)?.is_empty()),
        )
    }

    fn cordon(&self, env: &Env, closed: bool) -> Result<()> {
        let path = format!("/api/v1/nodes/{}", self.name());
        env.api()
            .patch(&path, &json!({"spec": {"unschedulable": closed}}))
            .map(drop)
    }

    fn wait_for_allocatable(&self, env: &Env, gpus: usize) -> Result<()> {
        let path = format!("/api/v1/nodes/{}", self.name());
        poll(
            &format!("{gpus} GPUs of the device plugin on {}", self.name()),
            PATIENCE,
            || {
                let node = env.api().get(&path)?.context("the node is gone")?;
                let known = at(&node, "status.allocatable")
                    .get(RESOURCE)
                    .and_then(Value::as_str)
                    .unwrap_or("0");
                Ok(known == gpus.to_string())
            },
        )
    }

    /// The pods of the Deployment on the node.
    fn pods(&self, env: &Env) -> Result<Vec<Value>> {
        self.list(env, &env.namespace, &format!("app={NAME}"))
    }

    fn divvy(&self, env: &Env) -> Result<Vec<Value>> {
        self.list(env, NAMESPACE, "app.kubernetes.io/component=node")
    }

    fn list(&self, env: &Env, namespace: &str, label: &str) -> Result<Vec<Value>> {
        let here = format!(
            "labelSelector={label}&fieldSelector=spec.nodeName={}",
            self.name()
        );
        env.api()
            .list(&format!("/api/v1/namespaces/{namespace}/pods?{here}"))
    }
}
