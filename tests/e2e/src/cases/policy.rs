//! What the chart installs beside the plugin: rights, the admission policy, refused values.

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use serde_json::json;

use crate::api::at;
use crate::case::Env;
use crate::config::Layout;
use crate::driver::{NAMESPACE, chart, helm};
use crate::process::output_of;

/// The policy's own words.
const OTHER_NODE: &str = "may write only ResourceSlices with that spec.nodeName, not node-2";
const OTHER_DRIVER: &str = "may write only ResourceSlices of driver gpu.divvy.dev";
const NO_NODE: &str = "only with a token that is bound to a node";

pub(super) fn own_slices(env: &Env) -> Result<()> {
    let bound = ["--bound-object-kind=Node", "--bound-object-name", Layout::NODE];
    let (with_node, without) = (Token::new(env, &bound)?, Token::new(env, &[])?);
    let name = env.namespace.as_str();

    with_node
        .create(&slice(name, Layout::NODE, names::DRIVER))
        .context("a slice of its own node is refused")?;
    refused(with_node.create(&slice(name, "node-2", names::DRIVER)), OTHER_NODE)?;
    refused(with_node.create(&slice(name, Layout::NODE, "gpu.example.com")), OTHER_DRIVER)?;
    refused(without.create(&slice(name, Layout::NODE, names::DRIVER)), NO_NODE)?;

    // An admin may publish for another node; the plugin here may not take that away.
    env.cluster.apply(&slice(name, "node-2", names::DRIVER))?;
    let theirs = with_node.delete(name);
    env.cluster.kubectl(&["delete", "resourceslice", name])?;
    refused(theirs, OTHER_NODE)?;
    let slices = env.driver.slices()?;
    let ours = slices.first().and_then(|slice| at(slice, "metadata.name").as_str());
    with_node
        .delete(ours.context("nothing is published")?)
        .context("deleting a slice of its own node is refused")?;

    refused(with_node.kubectl(&["get", "secrets", "--all-namespaces"], "").map(drop), "forbidden")
}

/// Checks that something was refused, with these words.
fn refused(result: Result<()>, why: &str) -> Result<()> {
    let said = result.err().map(|error| format!("{error:#}"));
    ensure!(
        said.as_ref().is_some_and(|text| text.contains(why)),
        "it must be refused ({why}), but: {said:?}"
    );
    Ok(())
}

/// A token of the plugin's ServiceAccount.
struct Token<'a> {
    env: &'a Env<'a>,
    kubeconfig: String,
}

impl<'a> Token<'a> {
    fn new(env: &'a Env<'a>, bound: &[&str]) -> Result<Self> {
        let token = env
            .cluster
            .kubectl(&[&["create", "token", "divvy-node", "--namespace", NAMESPACE], bound].concat())?;
        let file = env.cluster.layout().kubeconfig(&format!("{}-{}", env.namespace, bound.len()));
        fs_err::write(&file, env.cluster.layout().kubeconfig_text(token.trim()))?;
        Ok(Self { env, kubeconfig: file })
    }

    fn kubectl(&self, args: &[&str], input: &str) -> Result<String> {
        let mut command = self.env.cluster.command("kubectl", args);
        output_of(command.env("KUBECONFIG", &self.kubeconfig), input)
    }

    // All on trial: the running plugin removes a slice of its node that it does not know.
    fn create(&self, slice: &str) -> Result<()> {
        self.kubectl(&["create", "--dry-run=server", "--filename", "-"], slice).map(drop)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.kubectl(&["delete", "--dry-run=server", "resourceslice", name], "").map(drop)
    }
}

fn slice(name: &str, node: &str, driver: &str) -> String {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        // A pool of its own and never complete: no scheduler looks at it.
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": name, "generation": 1, "resourceSliceCount": 2},
            "devices": [{"name": "none"}],
        },
    })
    .to_string()
}

/// Values and what helm must say about them.
const REFUSED: &[(&[&str], &str)] = &[
    (&["nodeSelector=null"], "nodeSelector"),
    (&["nodeSelector.divvy\\.dev/gpu=null"], "minProperties: got 0, want 1"),
    (&["drivername=gpu.divvy.dev"], "additional properties 'drivername' not allowed"),
    (&["driverName=GPU"], "'GPU' does not match pattern"),
    (&["kubeletDir=var/lib/kubelet"], "'var/lib/kubelet' does not match pattern"),
    (&["driverName=a-name-that-is-as-long-as-a-name-may-be.but-not-on-unix.example.com"], "driverName"),
    (&["kubeletDir=/a/folder/whose/name/is/longer/than/most"], "the limit is 107; shorten driverName"),
    (&["driverRoot=/run/nvidia/driver", "nvmlLibrary=/usr/lib/libnvidia-ml.so.1"], "is not below driverRoot"),
    (&["extraEnv[0].name=NODE_NAME"], "extraEnv must not set NODE_NAME"),
];

pub(super) fn chart_values(env: &Env) -> Result<()> {
    helm(env.cluster, &["lint", "--strict", &chart()])?;
    for (values, why) in REFUSED {
        let chart = chart();
        let mut args = vec!["template", "divvy", &chart];
        for value in *values {
            args.extend(["--set", value]);
        }
        let said = helm(env.cluster, &args).err().map(|error| format!("{error:#}"));
        ensure!(
            said.as_ref().is_some_and(|text| text.contains(why)),
            "{values:?} must be refused ({why}): {said:?}"
        );
    }
    let old = helm(env.cluster, &["template", "divvy", &chart(), "--kube-version=1.33.0"]);
    ensure!(old.is_err(), "the chart accepts Kubernetes 1.33");
    Ok(())
}
