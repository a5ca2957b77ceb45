//! Reading, writing and validating objects.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceCapacity, DeviceTaint, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::ResourceExt;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions as Must};
use serde_json::json;

use super::*;
use crate::build::{allocated, mk_pod, mk_result, reserved};

#[tokio::test]
async fn a_created_object_gets_uid_version_and_generation_and_a_generated_name() {
    let api = FakeApi::new();
    let mut wanted = slice("x", "node-1");
    wanted.metadata.name = None;
    wanted.metadata.generate_name = Some("0000-gpu-".into());
    let stored = slices(&api)
        .create(&PostParams::default(), &wanted)
        .await
        .unwrap();
    assert!(
        stored.name_any().starts_with("0000-gpu-")
            && stored.name_any().len() == "0000-gpu-".len() + 5
    );
    assert_eq!(stored.metadata.generation, Some(1));
    assert!(stored.uid().is_some() && stored.resource_version().is_some());
    assert!(stored.metadata.creation_timestamp.is_some());
    assert_eq!(slices(&api).get(&stored.name_any()).await.unwrap(), stored);
    let again = slices(&api)
        .create(&PostParams::default(), &slice(&stored.name_any(), "node-1"))
        .await;
    assert_eq!(refusal(again).0, 409);
}

#[tokio::test]
async fn a_stale_update_is_a_conflict_and_a_spec_change_raises_the_generation() {
    let api = FakeApi::new();
    let first = slices(&api)
        .create(&PostParams::default(), &slice("a", "n"))
        .await
        .unwrap();
    let mut changed = first.clone();
    changed.spec.devices = Some(vec![mk_device("gpu-0"), mk_device("gpu-1")]);
    let second = slices(&api)
        .replace("a", &PostParams::default(), &changed)
        .await
        .unwrap();
    assert_eq!(second.metadata.generation, Some(2));
    let same = slices(&api)
        .replace("a", &PostParams::default(), &second)
        .await
        .unwrap();
    assert_eq!(
        same, second,
        "a write that changes nothing keeps the version"
    );
    let (code, message) = refusal(
        slices(&api)
            .replace("a", &PostParams::default(), &first)
            .await,
    );
    assert_eq!(code, 409);
    assert!(
        message.contains("the object has been modified"),
        "{message}"
    );
}

#[tokio::test]
async fn a_delete_checks_its_preconditions() {
    let api = FakeApi::new();
    let stored = slices(&api)
        .create(&PostParams::default(), &slice("a", "n"))
        .await
        .unwrap();
    let must = |uid: Option<String>, resource_version: Option<String>| DeleteParams {
        preconditions: Some(Must {
            uid,
            resource_version,
        }),
        ..DeleteParams::default()
    };
    assert_eq!(
        refusal(
            slices(&api)
                .delete("a", &must(Some("other".into()), None))
                .await
        )
        .0,
        409
    );
    assert_eq!(
        refusal(
            slices(&api)
                .delete("a", &must(None, Some("1".into())))
                .await
        )
        .0,
        409
    );
    slices(&api)
        .delete("a", &must(stored.uid(), stored.resource_version()))
        .await
        .unwrap();
    assert_eq!(
        refusal(slices(&api).delete("a", &DeleteParams::default()).await).0,
        404
    );
}

#[tokio::test]
async fn a_delete_waits_for_finalizers() {
    let api = FakeApi::new();
    let mut claim = mk_claim("ns", "c", "gpu.divvy.dev", 1);
    claim.metadata.finalizers = Some(vec!["resource.kubernetes.io/delete-protection".into()]);
    claims(&api)
        .create(&PostParams::default(), &claim)
        .await
        .unwrap();
    claims(&api)
        .delete("c", &DeleteParams::default())
        .await
        .unwrap();
    assert!(
        claims(&api)
            .get("c")
            .await
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_some()
    );
    let release = json!({"metadata": {"finalizers": null}});
    claims(&api)
        .patch("c", &PatchParams::default(), &Patch::Merge(release))
        .await
        .unwrap();
    assert_eq!(claims(&api).get_opt("c").await.unwrap(), None);
}

#[tokio::test]
async fn lists_follow_selectors() {
    let api = FakeApi::new();
    for (name, node) in [("a", "n1"), ("b", "n2"), ("c", "n1")] {
        api.put(&slice(name, node)).unwrap();
    }
    let on_n1 = ListParams::default()
        .fields("spec.nodeName=n1,spec.driver=gpu.divvy.dev,spec.pool.name=n1");
    let names: Vec<_> = slices(&api)
        .list(&on_n1)
        .await
        .unwrap()
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    assert_eq!(names, ["a", "c"]);
    api.put(&mk_pod("one", "p", Some("n1"), &[])).unwrap();
    api.put(&mk_pod("two", "p", None, &[])).unwrap();
    let pods: kube::Api<Pod> = kube::Api::all(api.client());
    let here = pods
        .list(&ListParams::default().fields("spec.nodeName=n1"))
        .await
        .unwrap();
    assert_eq!(
        here.iter()
            .map(|p| p.namespace().unwrap())
            .collect::<Vec<_>>(),
        ["one"]
    );
}

#[tokio::test]
async fn object_and_status_are_written_apart() {
    let api = FakeApi::new();
    let claim = allocated(
        mk_claim("ns", "c", "gpu.divvy.dev", 1),
        vec![mk_result("gpu", "d", "p", "gpu-0")],
    );
    let created = claims(&api)
        .create(&PostParams::default(), &claim)
        .await
        .unwrap();
    assert_eq!(created.status, None, "a created claim has no status");
    let mut with_status = created.clone();
    with_status.status = claim.status.clone();
    let stored = claims(&api)
        .replace_status("c", &PostParams::default(), &with_status)
        .await
        .unwrap();
    assert_eq!(stored.status, claim.status);
    let mut without = stored.clone();
    without.status = None;
    let label = [("a".to_owned(), "b".to_owned())].into();
    without.metadata.labels = Some(label);
    let kept = claims(&api)
        .replace("c", &PostParams::default(), &without)
        .await
        .unwrap();
    assert_eq!(
        kept.status, claim.status,
        "a write to the object leaves the status alone"
    );
}

#[tokio::test]
async fn claims_keep_their_spec_and_their_allocation() {
    let api = FakeApi::new();
    let claim = allocated(
        mk_claim("ns", "c", "gpu.divvy.dev", 1),
        vec![mk_result("gpu", "d", "p", "gpu-0")],
    );
    let claim = api.put(&reserved(claim, "pod", "u")).unwrap();
    let spec = Patch::Merge(json!({"spec": mk_claim("ns", "c", "other", 1).spec}));
    let (code, message) = refusal(
        claims(&api)
            .patch("c", &PatchParams::default(), &spec)
            .await,
    );
    assert_eq!(code, 422);
    assert!(
        message.contains("spec: Invalid value: field is immutable"),
        "{message}"
    );
    let moved = allocated(claim.clone(), vec![mk_result("gpu", "d", "p", "gpu-1")]);
    assert_eq!(
        refusal(
            claims(&api)
                .replace_status("c", &PostParams::default(), &moved)
                .await
        )
        .0,
        422
    );
    let mut freed = claim;
    freed.status = Some(ResourceClaimStatus::default());
    claims(&api)
        .replace_status("c", &PostParams::default(), &freed)
        .await
        .unwrap();
    let device = json!([{"driver": "d", "pool": "p", "device": "gpu-0"}]);
    let status = Patch::Merge(json!({"status": {"devices": device}}));
    let (_, message) = refusal(
        claims(&api)
            .patch_status("c", &PatchParams::default(), &status)
            .await,
    );
    assert!(
        message.contains("must be an allocated device in the claim"),
        "{message}"
    );
}

#[tokio::test]
async fn apply_creates_then_owns_what_it_applied() {
    let api = FakeApi::new();
    let apply = |manager: &str| PatchParams::apply(manager);
    let both = mk_slice("a", "d", "n", vec![mk_device("gpu-0"), mk_device("gpu-1")]);
    slices(&api)
        .patch("a", &apply("divvy"), &Patch::Apply(&both))
        .await
        .unwrap();
    let mut labelled = mk_slice("a", "d", "n", vec![mk_device("gpu-0")]);
    labelled.metadata.labels = Some([("k".to_owned(), "v".to_owned())].into());
    let stored = slices(&api)
        .patch("a", &apply("divvy"), &Patch::Apply(&labelled))
        .await
        .unwrap();
    assert_eq!(
        stored.spec.devices.as_deref(),
        Some(&[mk_device("gpu-0")][..])
    );
    let bare = slices(&api)
        .patch("a", &apply("divvy"), &Patch::Apply(slice_of("a", "gpu-0")))
        .await
        .unwrap();
    assert_eq!(
        bare.metadata.labels, None,
        "what is no longer applied goes away"
    );
    let stranger = Patch::Apply(slice_of("a", "gpu-9"));
    assert_eq!(
        refusal(slices(&api).patch("a", &apply("stranger"), &stranger).await).0,
        409
    );
    slices(&api)
        .patch("a", &apply("stranger").force(), &stranger)
        .await
        .unwrap();
}

fn slice_of(name: &str, device: &str) -> ResourceSlice {
    mk_slice(name, "d", "n", vec![mk_device(device)])
}

#[tokio::test]
async fn slices_come_back_in_the_form_the_server_stores() {
    let api = FakeApi::new();
    let mut wanted = slice("a", "n");
    let mut device = mk_device("gpu-0");
    let memory = DeviceCapacity {
        value: Quantity("1024Mi".into()),
        request_policy: None,
    };
    device.capacity = Some([("memory".to_owned(), memory)].into());
    device.attributes = Some([].into());
    let taint = DeviceTaint {
        key: "k".into(),
        effect: "NoSchedule".into(),
        ..DeviceTaint::default()
    };
    device.taints = Some(vec![taint]);
    wanted.spec.devices = Some(vec![device]);
    let stored = slices(&api)
        .create(&PostParams::default(), &wanted)
        .await
        .unwrap();
    let device = stored.spec.devices.unwrap().remove(0);
    assert_eq!(
        device.capacity.unwrap()["memory"].value,
        Quantity("1Gi".into())
    );
    assert_eq!(device.attributes, None, "empty maps are not kept");
    assert!(
        device.taints.unwrap()[0].time_added.is_some(),
        "the server stamps taints"
    );
}

#[tokio::test]
async fn the_version_can_be_set() {
    let api = FakeApi::new();
    api.set_version("1.34.9");
    let info = api.client().apiserver_version().await.unwrap();
    assert_eq!(
        (
            info.major.as_str(),
            info.minor.as_str(),
            info.git_version.as_str()
        ),
        ("1", "34", "v1.34.9")
    );
    api.fail_next(1, "get", "version", Fault::Status(500));
    assert_eq!(refusal(api.client().apiserver_version().await).0, 500);
    assert_eq!(api.count("get", "version"), 2);
    let young = ListParams::default().fields("spec.pool.name=p");
    assert_eq!(refusal(slices(&api).list(&young).await).0, 400);
}

#[tokio::test]
async fn a_resource_is_served_once_it_is_registered() {
    let api = FakeApi::new();
    let deployments: kube::Api<Deployment> = kube::Api::namespaced(api.client(), "ns");
    let mut wanted = Deployment::default();
    wanted.metadata.name = Some("d".into());
    assert_eq!(
        refusal(deployments.create(&PostParams::default(), &wanted).await).0,
        404
    );
    let unknown = api.put(&wanted).unwrap_err().to_string();
    assert_eq!(
        unknown,
        "NotFound (404): Deployment is not served: register it first"
    );
    api.register::<Deployment>(true, true);
    let stored = deployments
        .create(&PostParams::default(), &wanted)
        .await
        .unwrap();
    assert_eq!(api.get::<Deployment>("ns", "d"), Some(stored));
}

/// Managers of a label, with the operation by which each has it.
fn owners(node: &Node, label: &str) -> Vec<String> {
    let entries = node.metadata.managed_fields.iter().flatten();
    let has = |fields: &serde_json::Value| {
        let labels = fields.pointer("/f:metadata/f:labels");
        labels.is_some_and(|labels| labels.get(format!("f:{label}")).is_some())
    };
    let of = entries.filter(|entry| {
        entry
            .fields_v1
            .as_ref()
            .is_some_and(|fields| has(&fields.0))
    });
    of.map(|entry| {
        let [manager, operation] = [&entry.manager, &entry.operation].map(|it| it.clone().unwrap());
        format!("{manager}/{operation}")
    })
    .collect()
}

#[tokio::test]
async fn a_label_of_a_node_belongs_to_who_applied_or_changed_it() {
    let api = FakeApi::new();
    api.put(&crate::build::mk_node("n1")).unwrap();
    let nodes = Api::<Node>::all(api.client());
    let apply = async |manager: &str, labels: serde_json::Value| {
        let patch = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "labels": labels}});
        nodes
            .patch("n1", &PatchParams::apply(manager), &Patch::Apply(&patch))
            .await
    };
    let node = apply("a", json!({"x": "1", "y": "1"})).await.unwrap();
    assert_eq!(owners(&node, "x"), ["a/Apply"]);
    // The same value is shared, another is refused, and what both have stays until both let go.
    let node = apply("b", json!({"x": "1"})).await.unwrap();
    assert_eq!(owners(&node, "x"), ["a/Apply", "b/Apply"]);
    assert_eq!(refusal(apply("b", json!({"x": "2"})).await).0, 409);
    let node = apply("a", json!({"y": "1"})).await.unwrap();
    assert_eq!(owners(&node, "x"), ["b/Apply"]);
    assert_eq!(node.metadata.labels.unwrap()["x"], "1");
    // Any other write takes what it changes, and from then on an apply is refused.
    let patch = json!({"metadata": {"labels": {"y": "3", "z": null}}});
    let node = nodes
        .patch("n1", &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
    assert_eq!(owners(&node, "y"), ["other/Update"]);
    assert_eq!(refusal(apply("a", json!({"y": "1"})).await).0, 409);
    let node = apply("b", json!({})).await.unwrap();
    let labels = node.metadata.labels.unwrap();
    assert_eq!((labels.get("x"), labels["y"].as_str()), (None, "3"));
}
