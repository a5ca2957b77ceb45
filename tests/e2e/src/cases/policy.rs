//! Rights and admission policies, which the chart installs beside the plugin.

use anyhow::{Context, Result, bail, ensure};
use divvy_api::names;
use serde_json::{Value, json};

use crate::api::at;
use crate::case::{Env, PATIENCE};
use crate::components::Component;
use crate::config::Layout;
use crate::driver::{NAMESPACE, chart, helm};
use crate::objects::claim_for;
use crate::process::{output, output_of, say};
use crate::wait::wait_for;

/// Binds a token to the node, as the kubelet does for a pod's.
pub(super) const OF_NODE: [&str; 3] = [
    "--bound-object-kind=Node",
    "--bound-object-name",
    Layout::NODE,
];

/// The policy's own words.
const OTHER_NODE: &str = "may write only ResourceSlices with that spec.nodeName, not node-2";
const OTHER_DRIVER: &str = "may write only ResourceSlices of driver gpu.divvy.dev";
const NO_NODE: &str = "only with a token that is bound to a node";

pub(super) fn own_slices(env: &Env) -> Result<()> {
    let (with_node, without) = (Token::new(env, &OF_NODE)?, Token::new(env, &[])?);
    let name = env.namespace.as_str();

    with_node
        .create(&slice(name, Layout::NODE, names::DRIVER))
        .context("a slice of its own node is refused")?;
    refused(
        with_node.create(&slice(name, "node-2", names::DRIVER)),
        OTHER_NODE,
    )?;
    refused(
        with_node.create(&slice(name, Layout::NODE, "gpu.example.com")),
        OTHER_DRIVER,
    )?;
    refused(
        without.create(&slice(name, Layout::NODE, names::DRIVER)),
        NO_NODE,
    )?;

    // An admin may publish for another node; the plugin here may not take that away.
    env.cluster.apply(&slice(name, "node-2", names::DRIVER))?;
    let theirs = with_node.delete(name);
    env.cluster.kubectl(&["delete", "resourceslice", name])?;
    refused(theirs, OTHER_NODE)?;
    let slices = env.driver.slices()?;
    let ours = slices
        .first()
        .and_then(|slice| at(slice, "metadata.name").as_str());
    with_node
        .delete(ours.context("nothing is published")?)
        .context("deleting a slice of its own node is refused")?;

    refused(
        with_node
            .kubectl(&["get", "secrets", "--all-namespaces"], "")
            .map(drop),
        "forbidden",
    )
}

/// The words of the policy on claims.
const OTHER_ENTRIES: &str =
    "may change only entries of status.devices with driver gpu.divvy.dev and that pool";
const SCHEDULERS: &str = "may not change status.allocation or status.reservedFor";
const CLAIM_NO_NODE: &str =
    "may write the status of ResourceClaims only with a token that is bound to a node";

pub(super) fn own_status(env: &Env) -> Result<()> {
    let ours = json!({"driver": names::DRIVER, "pool": format!("{}/divvy", Layout::NODE), "device": "gpu-99"});
    let elsewhere = json!({"driver": names::DRIVER, "pool": "node-2/divvy", "device": "gpu-99"});
    let theirs = json!({"driver": "gpu.example.com", "pool": Layout::NODE, "device": "one"});
    // Allocated as no scheduler would do it, for a pod that there will never be.
    let asked =
        |name: &str| json!({"name": name, "exactly": {"deviceClassName": names::CLASS_GPU}});
    let spec = json!({"devices": {"requests": [asked("a"), asked("b"), asked("c")]}});
    env.create(&claim_for("mixed", &spec))?;
    let result = |name: &str, device: &Value| {
        let mut result = device.clone();
        result
            .as_object_mut()
            .map(|fields| fields.insert("request".to_owned(), json!(name)));
        result
    };
    let results = [
        result("a", &ours),
        result("b", &elsewhere),
        result("c", &theirs),
    ];
    let here = json!({"key": "metadata.name", "operator": "In", "values": [Layout::NODE]});
    let allocation = json!({
        "devices": {"results": results},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]},
    });
    let status = format!("{}/status", env.path("ResourceClaim", "mixed")?);
    env.api().patch(
        &status,
        &json!({"status": {"allocation": allocation, "devices": [theirs]}}),
    )?;

    let (with_node, without) = (Token::new(env, &OF_NODE)?, Token::new(env, &[])?);
    let devices = |devices: &[&Value]| json!({"devices": devices});
    // With the chart's rights and that to read what is patched, which kubectl does and the plugin
    // does not.
    let _reading = MoreRights::grant(
        env,
        "e2e-reads-status",
        &[rule("resourceclaims/status", &["get"])],
    )?;
    wait_for("right to read the status of claims", PATIENCE, || {
        let question = [
            "auth",
            "can-i",
            "get",
            "resourceclaims",
            "--subresource=status",
        ];
        Ok((with_node.kubectl(&question, "")?.trim() == "yes").then_some(()))
    })?;
    with_node
        .patch_status(&devices(&[&theirs, &ours]))
        .context("its own device's status is refused")?;
    refused(
        without.patch_status(&devices(&[&theirs, &ours])),
        "forbidden",
    )?;

    // With more rights than the chart gives, so that the policy alone is in the way.
    let writing = ["update", "patch"];
    let anywhere = ["arbitrary-node:update", "arbitrary-node:patch"];
    let _writing = MoreRights::grant(
        env,
        "e2e-writes-status",
        &[
            rule("resourceclaims/binding", &writing),
            rule("resourceclaims/driver", &anywhere),
        ],
    )?;
    wait_for("more rights", PATIENCE, || {
        let said = with_node.patch_status(&json!({"allocation": null})).err();
        Ok(said
            .filter(|error| format!("{error:#}").contains(SCHEDULERS))
            .map(drop))
    })?;
    with_node
        .patch_status(&devices(&[&theirs, &ours]))
        .context("its own device's status is refused")?;
    refused(with_node.patch_status(&devices(&[&ours])), OTHER_ENTRIES)?;
    refused(
        with_node.patch_status(&devices(&[&theirs, &elsewhere])),
        OTHER_ENTRIES,
    )?;
    let pod = json!([{"resource": "pods", "name": "x", "uid": "y"}]);
    refused(
        with_node.patch_status(&json!({"reservedFor": pod})),
        SCHEDULERS,
    )?;
    refused(
        without.patch_status(&devices(&[&theirs, &ours])),
        CLAIM_NO_NODE,
    )
}

pub(super) fn own_events(env: &Env) -> Result<()> {
    let with_node = Token::new(env, &OF_NODE)?;
    let event = |name: &str, reporter: &str, node: &str| {
        json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event",
            "metadata": {"name": name, "namespace": env.namespace},
            "eventTime": "2026-01-01T00:00:00.000000Z", "action": "Prepare", "reason": "Test", "type": "Normal",
            "reportingController": reporter, "reportingInstance": node,
            "regarding": {"kind": "Pod", "name": "x", "namespace": env.namespace},
        })
        .to_string()
    };
    with_node
        .create(&event("own", names::REPORTER, Layout::NODE))
        .context("an Event of its own is refused")?;
    refused(
        with_node.create(&event("theirs", "kubelet", Layout::NODE)),
        "only Events with reportingController",
    )?;
    // `node` is the beginning of this node's name.
    for elsewhere in ["node-2", "node"] {
        refused(
            with_node.create(&event("elsewhere", names::REPORTER, elsewhere)),
            "may write only Events with that reportingInstance",
        )?;
    }
    // Another reporter's is not taken over; kubectl reads what it patches, which the plugin may
    // not.
    let read = json!({"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["get"]});
    let _reading = MoreRights::grant(env, "e2e-reads-events", &[read])?;
    wait_for("right to read Events", PATIENCE, || {
        let question = ["auth", "can-i", "get", "events.events.k8s.io"];
        Ok((with_node.kubectl(&question, "")?.trim() == "yes").then_some(()))
    })?;
    env.cluster
        .apply(&event("kubelets", "kubelet", Layout::NODE))?;
    let own = json!({"series": {"count": 2, "lastObservedTime": "2026-01-01T00:00:01.000000Z"}})
        .to_string();
    let patch = [
        "patch",
        "events.events.k8s.io",
        "kubelets",
        "--namespace",
        &env.namespace,
        "--type=merge",
        "--patch",
        &own,
    ];
    refused(
        with_node.kubectl(&patch, "").map(drop),
        "only Events with reportingController",
    )
}

/// A rule of a role, about resources of claims.
fn rule(resource: &str, verbs: &[&str]) -> Value {
    json!({"apiGroups": ["resource.k8s.io"], "resources": [resource], "verbs": verbs})
}

/// More rights than the chart gives for a ServiceAccount, until dropped.
struct MoreRights<'a> {
    env: &'a Env<'a>,
    name: &'static str,
}

const RBAC: &str = "rbac.authorization.k8s.io";

impl<'a> MoreRights<'a> {
    fn grant(env: &'a Env<'a>, name: &'static str, rules: &[Value]) -> Result<Self> {
        let more = Self { env, name };
        let role = json!({"metadata": {"name": name}, "rules": rules});
        env.api()
            .create(&format!("/apis/{RBAC}/v1/clusterroles"), &role)?;
        more.bind(name, "divvy-node", NAMESPACE)?;
        Ok(more)
    }

    fn bind(&self, role: &str, account: &str, namespace: &str) -> Result<()> {
        let binding = json!({
            "metadata": {"name": self.name},
            "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        });
        self.env
            .api()
            .create(&format!("/apis/{RBAC}/v1/clusterrolebindings"), &binding)
            .map(drop)
    }
}

impl Drop for MoreRights<'_> {
    fn drop(&mut self) {
        for kind in ["clusterrolebindings", "clusterroles"] {
            let path = format!("/apis/{RBAC}/v1/{kind}/{}", self.name);
            if let Err(error) = self.env.api().delete(&path, &json!({})) {
                say(&format!("{path} is left: {error:#}"));
            }
        }
    }
}

/// A user with the role `view` in the whole cluster, not an admin, runs `divvy status`.
pub(super) fn viewers(env: &Env) -> Result<()> {
    let namespace = env.namespace.as_str();
    env.cluster.kubectl(&[
        "create",
        "serviceaccount",
        "viewer",
        "--namespace",
        namespace,
    ])?;
    let viewer = Token::of(env, "viewer", namespace, &[])?;
    let status = || {
        env.driver
            .kubectl_divvy(&["status", "--kubeconfig", &viewer.kubeconfig])
    };

    // Without any right the output names the missing rights, and what to ask for.
    let (code, said) = status()?;
    for words in [
        "you may not list gpunodes.divvy.dev in the whole cluster",
        "ask a cluster admin for a ClusterRoleBinding to divvy-view",
        "you may not list resourceclaims.resource.k8s.io in the whole cluster",
    ] {
        ensure!(
            code == Some(0) && said.contains(words),
            "without rights, exit status {code:?}: {said}"
        );
    }

    let more = MoreRights {
        env,
        name: "e2e-viewer",
    };
    more.bind("view", "viewer", namespace)?;
    let mut last = String::new();
    wait_for(
        "an answer of `divvy status` to who may view the cluster",
        PATIENCE,
        || {
            let (code, said) = status()?;
            let unread: Vec<&str> = said
                .lines()
                .filter(|line| line.contains("cannot be listed"))
                .collect();
            // That of nodes is not ours to give.
            let only_nodes =
                matches!(unread.as_slice(), [only] if only.starts_with("  Nodes cannot be listed"));
            let reported =
                said.lines().any(|line| line.starts_with(Layout::NODE)) && code != Some(1);
            last = said;
            Ok((reported && only_nodes).then_some(()))
        },
    )
    .with_context(|| format!("it says: {last}"))?;
    viewer.kubectl(
        &["get", "gpunodes,gpupolicies,resourceslices,deviceclasses"],
        "",
    )?;

    // To look is all.
    let change = [
        "annotate",
        "--dry-run=server",
        "gpunode",
        Layout::NODE,
        "e2e=changed",
    ];
    refused(viewer.kubectl(&change, "").map(drop), "forbidden")?;
    for (values, expected) in [
        (&[][..], &["divvy-node", "divvy-view (aggregated)"][..]),
        (&["viewRole.aggregate=false"], &["divvy-node", "divvy-view"]),
        (&["viewRole.enabled=false"], &["divvy-node"]),
    ] {
        let roles = rendered_roles(env, values)?;
        ensure!(
            roles == expected,
            "the chart's ClusterRoles with {values:?} are {roles:?}"
        );
    }
    Ok(())
}

/// The ClusterRoles that the chart makes with these values.
fn rendered_roles(env: &Env, values: &[&str]) -> Result<Vec<String>> {
    let chart = chart();
    let mut args = vec!["template", "divvy", &chart];
    for value in values {
        args.extend(["--set", value]);
    }
    let yaml = helm(env.cluster, &args)?;
    let roles = yaml
        .split("\n---\n")
        .filter(|document| document.contains("\nkind: ClusterRole\n"));
    let reported = roles.map(|role| {
        let name = role
            .lines()
            .find_map(|line| line.strip_prefix("  name: "))
            .unwrap_or_default();
        let aggregated = role.contains("rbac.authorization.k8s.io/aggregate-to-view: \"true\"");
        format!("{name}{}", if aggregated { " (aggregated)" } else { "" })
    });
    let mut reported: Vec<String> = reported.collect();
    reported.sort();
    Ok(reported)
}

/// Port of `/debug/state` on the pod's loopback address, as the chart has it.
const DEBUG: &str = "http://127.0.0.1:9441/debug/state";

#[expect(clippy::too_many_lines, reason = "one story")]
pub(super) fn plugin_pod(env: &Env) -> Result<()> {
    let pod = env.driver.wait_until_ready()?;
    let &[pid] = env.driver.pids()?.as_slice() else {
        bail!("there is not one plugin process")
    };
    let namespace = |pid: u32, kind: &str| {
        fs_err::read_link(env.cluster.node_path(format!("/proc/{pid}/ns/{kind}")))
    };
    let kubelet = env
        .cluster
        .component(Component::Kubelet)
        .pid()
        .context("no kubelet")?;
    ensure!(
        namespace(pid, "pid")? == namespace(kubelet, "pid")?,
        "the plugin is not in the node's PID namespace: NVIDIA's module would report no process to it"
    );
    ensure!(
        namespace(pid, "net")? != namespace(kubelet, "net")?,
        "the plugin is in the node's network"
    );

    // Everyone sees whether it is ready, only its own pod what it knows.
    let name = at(&pod, "metadata.name")
        .as_str()
        .context("a pod without a name")?;
    let asked = |path: &str| {
        env.api().text(&format!(
            "/api/v1/namespaces/{NAMESPACE}/pods/{name}:8080/proxy/{path}"
        ))
    };
    ensure!(
        asked("readyz")? == "ok\n",
        "/readyz is not served on the pod's address"
    );
    ensure!(
        asked("metrics")?.contains("divvy_"),
        "/metrics is not served on the pod's address"
    );
    refused(asked("debug/state").map(drop), "404")?;
    let inside = [
        "--target",
        &pid.to_string(),
        "--net",
        "busybox",
        "wget",
        "-q",
        "-O",
        "-",
        DEBUG,
    ];
    let state: Value =
        serde_json::from_str(&output(&mut env.cluster.command("nsenter", &inside))?)?;
    ensure!(
        at(&state, "node") == Layout::NODE,
        "not the plugin's state: {state}"
    );

    let plain = rendered(env, &[])?;
    ensure!(at(&plain, "hostPID") == true, "no hostPID in {plain}");
    let reported = rendered(env, &["driverRoot=/opt/driver"])?;
    for (pod, expected) in [
        (&plain, None),
        (&reported, Some(("/host/opt/driver", "/opt/driver"))),
    ] {
        let env = at(pod, "containers.0.env")
            .as_array()
            .cloned()
            .unwrap_or_default();
        let value = |name: &str| {
            env.iter()
                .find(|entry| at(entry, "name") == name)
                .map(|entry| at(entry, "value"))
        };
        let found = value("DRIVER_ROOT").zip(value("HOST_DRIVER_ROOT"));
        let found =
            found.map(|(seen, host)| (seen.as_str().unwrap_or(""), host.as_str().unwrap_or("")));
        ensure!(
            found == expected,
            "the driver's root is {found:?}, not {expected:?}"
        );
    }
    let mounts = at(&plain, "containers.0.volumeMounts")
        .as_array()
        .cloned()
        .unwrap_or_default();
    let writable = mounts.iter().filter(|mount| at(mount, "readOnly") != true);
    let mut writable: Vec<_> = writable
        .filter_map(|mount| at(mount, "mountPath").as_str())
        .collect();
    writable.sort_unstable();
    let expected = [
        "/dev",
        "/opt/divvy/gpu.divvy.dev",
        "/run/divvy",
        "/var/lib/kubelet/plugins/gpu.divvy.dev",
        "/var/lib/kubelet/plugins_registry",
        "/var/run/cdi",
    ];
    ensure!(writable == expected, "it may write {writable:?}");
    ensure!(
        mounts
            .iter()
            .all(|mount| at(mount, "mountPropagation") != "Bidirectional"),
        "what it mounts, the node sees"
    );
    Ok(())
}

/// The pod of the DaemonSet, as the chart makes it with these values.
fn rendered(env: &Env, values: &[&str]) -> Result<Value> {
    let chart = chart();
    let mut args = vec![
        "template",
        "divvy",
        &chart,
        "--show-only",
        "templates/daemonset.yaml",
    ];
    for value in values {
        args.extend(["--set", value]);
    }
    let yaml = helm(env.cluster, &args)?;
    let read = [
        "create",
        "--dry-run=client",
        "--output=json",
        "--filename",
        "-",
    ];
    let json = output_of(&mut env.cluster.command("kubectl", &read), &yaml)?;
    Ok(at(&serde_json::from_str(&json)?, "spec.template.spec").clone())
}

/// Checks that something was refused, with these words.
pub(super) fn refused(result: Result<()>, why: &str) -> Result<()> {
    let said = result.err().map(|error| format!("{error:#}"));
    ensure!(
        said.as_ref().is_some_and(|text| text.contains(why)),
        "it must be refused ({why}), but: {said:?}"
    );
    Ok(())
}

/// A token of the plugin's ServiceAccount.
pub(super) struct Token<'a> {
    env: &'a Env<'a>,
    pub(super) kubeconfig: String,
}

impl<'a> Token<'a> {
    /// Bound to what these flags of kubectl say.
    pub(super) fn new(env: &'a Env<'a>, bound: &[&str]) -> Result<Self> {
        Self::of(env, "divvy-node", NAMESPACE, bound)
    }

    fn of(env: &'a Env<'a>, account: &str, namespace: &str, bound: &[&str]) -> Result<Self> {
        let token = env.cluster.kubectl(
            &[
                &["create", "token", account, "--namespace", namespace],
                bound,
            ]
            .concat(),
        )?;
        let file = env
            .cluster
            .layout()
            .kubeconfig(&format!("{}-{}", env.namespace, bound.len()));
        fs_err::write(&file, env.cluster.layout().kubeconfig_text(token.trim()))?;
        Ok(Self {
            env,
            kubeconfig: file,
        })
    }

    fn kubectl(&self, args: &[&str], input: &str) -> Result<String> {
        let mut command = self.env.cluster.command("kubectl", args);
        output_of(command.env("KUBECONFIG", &self.kubeconfig), input)
    }

    // All on trial: the running plugin removes a slice of its node that it does not know.
    fn create(&self, slice: &str) -> Result<()> {
        self.kubectl(&["create", "--dry-run=server", "--filename", "-"], slice)
            .map(drop)
    }

    /// Changes fields of the status of the claim `mixed`.
    fn patch_status(&self, change: &Value) -> Result<()> {
        let change = json!({"status": change}).to_string();
        let claim = [
            "patch",
            "resourceclaim",
            "mixed",
            "--namespace",
            &self.env.namespace,
        ];
        let how = [
            "--subresource=status",
            "--type=merge",
            "--dry-run=server",
            "--patch",
            &change,
        ];
        self.kubectl(&[&claim[..], &how].concat(), "").map(drop)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.kubectl(&["delete", "--dry-run=server", "resourceslice", name], "")
            .map(drop)
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
