//! What the chart installs beside the plugin: rights, the admission policy, refused values.

use anyhow::{Context, Result, ensure};
use divvy_api::names;
use serde_json::json;

use crate::case::Env;
use crate::config::Layout;
use crate::driver::{NAMESPACE, chart, helm};
use crate::process::output_of;

pub(super) fn own_slices(env: &Env) -> Result<()> {
    let bound = ["--bound-object-kind=Node", "--bound-object-name", Layout::NODE];
    let with_node = Token::new(env, &bound)?;
    let without = Token::new(env, &[])?;
    let (own, other) = (env.namespace.as_str(), format!("{}-other", env.namespace));

    with_node.create(own, Layout::NODE, "gpu.divvy.dev").context("a slice of its own node is refused")?;
    with_node.refused(
        &other,
        "node-2",
        names::DRIVER,
        "may write only ResourceSlices with that spec.nodeName, not node-2",
    )?;
    with_node.refused(
        &other,
        Layout::NODE,
        "gpu.example.com",
        "may write only ResourceSlices of driver gpu.divvy.dev",
    )?;
    without.refused(&other, Layout::NODE, names::DRIVER, "only with a token that is bound to a node")?;

    // An admin may write anything; the plugin may not delete it.
    env.cluster.apply(&slice(&other, "node-2", names::DRIVER))?;
    let denied =
        with_node.kubectl(&["delete", "resourceslice", &other], "").err().map(|error| format!("{error:#}"));
    env.cluster.kubectl(&["delete", "resourceslice", &other])?;
    with_node
        .kubectl(&["delete", "resourceslice", own], "")
        .context("a slice of its own node cannot be deleted")?;
    ensure!(
        denied.as_ref().is_some_and(|text| text.contains("ValidatingAdmissionPolicy")),
        "deleting another node's slice was not refused: {denied:?}"
    );
    let secrets = with_node.kubectl(&["get", "secrets", "--all-namespaces"], "");
    ensure!(secrets.is_err(), "the plugin may read secrets");
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

    fn create(&self, name: &str, node: &str, driver: &str) -> Result<()> {
        self.kubectl(&["create", "--filename", "-"], &slice(name, node, driver)).map(drop)
    }

    fn refused(&self, name: &str, node: &str, driver: &str, why: &str) -> Result<()> {
        match self.create(name, node, driver) {
            Ok(()) => {
                self.env.cluster.kubectl(&["delete", "resourceslice", name])?;
                anyhow::bail!("a slice of driver {driver} on node {node} was not refused ({why})")
            }
            Err(error) => {
                let text = format!("{error:#}");
                ensure!(text.contains(why), "the slice was refused for another reason: {text}");
                Ok(())
            }
        }
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
