//! A cluster in which divvy runs on no node.

use super::*;

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
