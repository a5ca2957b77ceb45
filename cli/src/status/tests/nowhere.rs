//! A cluster in which divvy runs on no node.

use super::*;
use crate::status::plugins::Plugins;

fn labelled(name: &str, labels: &Value) -> Value {
    let mut node = node(name);
    node["metadata"]["labels"] = labels.clone();
    node
}

fn fleet(nodes: &[Value]) -> (bool, String) {
    let snapshot = Snapshot {
        nodes: nodes.iter().cloned().map(typed).collect(),
        ..Snapshot::default()
    };
    let fleet = report::fleet(&snapshot, None);
    (fleet.needs_person, render::fleet(&snapshot, &fleet, false))
}

#[test]
fn a_forgotten_label_is_named_with_the_nodes_that_want_it() {
    let no_gpu = labelled("n0", &json!({}));
    for labels in [
        json!({"feature.node.kubernetes.io/pci-10de.present": "true"}),
        json!({"feature.node.kubernetes.io/pci-0302_10de.present": "true"}),
        json!({"nvidia.com/gpu.present": "true"}),
        json!({"cloud.google.com/gke-accelerator": "nvidia-l4"}),
    ] {
        let (needs_person, text) = fleet(&[no_gpu.clone(), labelled("n1", &labels)]);
        assert!(needs_person, "{text}");
        let expected = "n1 has GPUs by their labels: kubectl label node n1 divvy.dev/gpu=true";
        assert!(text.contains(expected), "{text}");
    }
    let (needs_person, text) = fleet(&[no_gpu]);
    assert!(
        needs_person && text.contains("kubectl label node NODE"),
        "{text}"
    );
    let (_, text) = fleet(&[node("n1")]);
    assert!(!text.contains("no node has the label"), "{text}");
    let (needs_person, text) = fleet(&[]);
    assert!(
        !needs_person && text.contains("no node reports GPUs"),
        "{text}"
    );
}

/// The chart's DaemonSet, and what is known of its pods on node n1.
fn plugins(events: &Value, pods: &Value) -> Plugins {
    let set = json!({
        "metadata": { "namespace": "divvy", "name": "divvy-node" },
        "spec": {
            "selector": {},
            "template": { "spec": {
                "containers": [],
                "tolerations": [{ "key": "nvidia.com/gpu", "operator": "Exists" }],
            } },
        },
    });
    Plugins {
        sets: vec![typed(set)],
        pods: typed(pods.clone()),
        events: [("divvy/divvy-node".to_owned(), typed(events.clone()))].into(),
        forbidden: Vec::new(),
    }
}

fn event(minute: u32, message: &str) -> Value {
    json!({
        "metadata": {}, "involvedObject": {}, "reason": "FailedCreate", "type": "Warning",
        "lastTimestamp": format!("2026-11-21T19:{minute}:00Z"), "message": message,
    })
}

/// Returns the words about a labelled node that has no report.
fn said(plugins: Plugins, taints: &Value) -> String {
    let mut one = node("n1");
    one["spec"] = json!({ "taints": taints });
    let snapshot = Snapshot {
        now: "2026-11-21T20:00:00Z".parse().unwrap(),
        nodes: vec![typed(one)],
        plugins: Some(plugins),
        ..Snapshot::default()
    };
    let fleet = report::fleet(&snapshot, None);
    assert!(fleet.needs_person);
    let text = render::fleet(&snapshot, &fleet, false);
    let node = report::node(&snapshot, "n1").unwrap();
    assert_eq!(node.troubles[0].trouble.kind, "no-report");
    assert!(text.contains(&node.troubles[0].trouble.remedy), "{text}");
    let trouble = &node.troubles[0].trouble;
    format!("{}. {}", trouble.why, trouble.remedy)
}

const POD_SECURITY: &str = r#"Error creating: pods "divvy-node-" is forbidden: violates PodSecurity "baseline:latest": host namespaces (hostPID=true)"#;

#[test]
fn a_node_without_a_plugins_pod_says_what_keeps_the_daemonset_from_it() {
    let quota = r#"Error creating: pods "divvy-node-8x" is forbidden: exceeded quota: small, requested: pods=1"#;
    let webhook = r#"Error creating: admission webhook "validate.kyverno.svc" denied the request: no privileged pods"#;
    let other = "Error creating: no more names";
    for (message, remedy) in [
        (
            POD_SECURITY,
            "kubectl label namespace divvy pod-security.kubernetes.io/enforce=privileged --overwrite",
        ),
        (quota, "kubectl -n divvy describe resourcequota"),
        (webhook, "leave namespace divvy out of it"),
        (other, "kubectl -n divvy describe daemonset divvy-node"),
    ] {
        let events = json!([event(57, message), event(13, "earlier")]);
        let text = said(plugins(&events, &json!([])), &json!([]));
        let expected = format!(
            "DaemonSet divvy/divvy-node has no pod there: FailedCreate (3m ago): {message}"
        );
        assert!(text.contains(&expected) && text.contains(remedy), "{text}");
        assert!(!text.contains("earlier"), "{text}");
    }
    let text = said(plugins(&json!([]), &json!([])), &json!([]));
    assert!(text.contains("no Event says why"), "{text}");
    let text = said(Plugins::default(), &json!([]));
    assert!(text.contains("no DaemonSet of divvy's plugin"), "{text}");
}

/// The controller makes no pod for such a node, and reports nothing.
#[test]
fn a_taint_that_keeps_the_plugin_off_its_node_is_named() {
    let event = json!([event(57, "of another node")]);
    let taint = |key: &str, effect: &str| json!([{ "key": key, "effect": effect }]);
    for (taints, named) in [
        (taint("team", "NoSchedule"), true),
        (taint("team", "NoExecute"), true),
        (taint("team", "PreferNoSchedule"), false),
        (taint("nvidia.com/gpu", "NoSchedule"), false),
        (taint("node.kubernetes.io/not-ready", "NoExecute"), false),
    ] {
        let text = said(plugins(&event, &json!([])), &taints);
        let says = text.contains("does not tolerate the node's taint team");
        assert_eq!(says, named, "{taints}: {text}");
    }
}

#[test]
fn a_plugins_pod_that_does_not_run_is_said_with_its_reason() {
    let pod = |state: &Value| {
        json!([{
            "metadata": { "namespace": "divvy", "name": "divvy-node-x" },
            "spec": { "nodeName": "n1", "containers": [] },
            "status": { "containerStatuses": [{
                "name": "plugin", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
            }] },
        }])
    };
    let pulls = json!({ "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } });
    let text = said(plugins(&json!([]), &pod(&pulls)), &json!([]));
    let expected = "pod divvy/divvy-node-x does not run: plugin: ImagePullBackOff: no such image";
    assert!(text.contains(expected), "{text}");
    let text = said(
        plugins(&json!([]), &pod(&json!({ "running": {} }))),
        &json!([]),
    );
    assert!(
        text.contains("kubectl -n divvy logs divvy-node-x"),
        "{text}"
    );
}

#[test]
fn what_may_not_be_read_of_the_plugin_is_said_and_not_guessed() {
    for (resource, inside, expected) in [
        (
            "daemonsets.apps",
            "",
            "kubectl auth can-i list daemonsets.apps -A",
        ),
        ("pods", "", "kubectl auth can-i list pods -A"),
        ("events", "divvy", "kubectl auth can-i list events -n divvy"),
    ] {
        let mut plugins = plugins(&json!([]), &json!([]));
        let status = kube::core::Status::failure("no", "Forbidden").with_code(403);
        let refused = Err(kube::Error::Api(Box::new(status)));
        let listed = plugins.allowed::<()>(resource, inside, refused).unwrap();
        assert!(listed.is_empty());
        let text = said(plugins, &json!([]));
        assert!(
            text.contains(&format!("you may not list {resource}")),
            "{text}"
        );
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains("has no pod there"), "{text}");
    }
}

/// A plugin that is gone from a node leaves its report behind, and the kubelet removes its slices.
#[test]
fn a_plugin_that_is_gone_from_its_node_says_why_it_does_not_come_back() {
    let events = json!([event(57, POD_SECURITY)]);
    let away = Snapshot {
        now: "2026-11-21T20:00:00Z".parse().unwrap(),
        nodes: vec![typed(node("n1"))],
        reports: [("n1".to_owned(), status(vec![gpu(0, None)], Vec::new(), ""))].into(),
        plugins: Some(plugins(&events, &json!([]))),
        ..Snapshot::default()
    };
    let trouble = report::troubles(&away, "n1").remove(0).trouble;
    assert_eq!(trouble.kind, "not-published");
    assert!(trouble.why.contains(POD_SECURITY), "{trouble:?}");
}
