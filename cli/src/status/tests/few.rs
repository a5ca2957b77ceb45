//! Slices that an overview reads: as few as it needs.

use divvy_api::node::GpuNode;
use divvy_fake_cluster::FakeApi;
use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_class, mk_device, mk_node, mk_pod, mk_result, mk_slice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::*;
use crate::status::read::{ClaimsWanted, PodWanted, SLICES, SlicesWanted, Wanted, read};

/// A server with two nodes, of which the first publishes so many slices.
fn api(slices: usize) -> FakeApi {
    let api = FakeApi::new();
    api.put(&mk_class(DRIVER, DRIVER)).unwrap();
    for name in ["n1", "n2"] {
        let mut node = mk_node(name);
        let labels = node.metadata.labels.get_or_insert_default();
        labels.insert("divvy.dev/gpu".to_owned(), "true".to_owned());
        api.put(&node).unwrap();
        let report = json!({"metadata": {"name": name}, "spec": {}, "status": {
            "driverName": DRIVER, "summary": {"gpus": 1, "free": 1, "claims": 0, "modes": "", "trouble": ""},
            "versions": {"divvy": "0.1.0", "driver": "570", "cuda": "12.8", "kubernetes": "1.37.1"},
            "gpus": [{"name": "gpu-0", "uuid": "GPU-1", "product": "x", "memoryMib": 81559, "mode": "Free",
                      "offered": ["Whole"], "holders": []}],
        }});
        api.put(&typed::<GpuNode>(report)).unwrap();
    }
    for number in 0..slices {
        let devices = vec![mk_device("gpu-0"), mk_device("gpu-0-ts")];
        let mut slice = mk_slice(&format!("n1-{number}"), DRIVER, "n1", devices);
        slice.spec.pool.name = "n1/divvy".to_owned();
        slice.spec.pool.resource_slice_count = i64::try_from(slices).unwrap();
        slice.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: "n1".to_owned(),
            uid: "n1".to_owned(),
            ..OwnerReference::default()
        }]);
        api.put(&slice).unwrap();
    }
    api
}

async fn overview(api: &FakeApi, slices: SlicesWanted<'_>) -> Snapshot {
    let wanted = Wanted {
        driver: None,
        claims: ClaimsWanted::Waiting,
        events: false,
        policies: false,
        plugins: false,
        namespace: "ns",
        pod: PodWanted::No,
        slices,
    };
    read(&api.client(), wanted).await.unwrap()
}

/// Troubles of a fleet, as their kinds with the node.
fn troubles(snapshot: &Snapshot) -> Vec<String> {
    let value = serde_json::to_value(report::fleet(snapshot, None)).unwrap();
    let text = value.to_string();
    let known = ["not-published", "no-report"];
    let found = known.iter().filter(|kind| text.contains(*kind));
    found.map(|kind| (*kind).to_owned()).collect()
}

#[tokio::test]
async fn where_nothing_waits_and_nothing_is_shared_names_are_enough() {
    let api = api(3);
    let held = allocated(
        mk_claim("ns", "a", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, "n1/divvy", "gpu-0")],
    );
    api.put(&held).unwrap();
    let few = overview(&api, SlicesWanted::Few).await;
    assert!(
        few.slices.is_empty() && few.unread.is_empty(),
        "{:?}",
        few.unread
    );
    assert!(few.publishes("n1") && !few.publishes("n2"));
    // What is said is the same as with all of them: the second node publishes nothing.
    let all = overview(&api, SlicesWanted::All).await;
    assert_eq!(all.slices.len(), 3);
    assert_eq!(troubles(&few), ["not-published"]);
    assert_eq!(
        serde_json::to_value(report::fleet(&few, None)).unwrap(),
        serde_json::to_value(report::fleet(&all, None)).unwrap()
    );
}

#[tokio::test]
async fn what_waits_and_what_is_shared_has_its_devices_read() {
    let api = api(3);
    let shared = allocated(
        mk_claim("ns", "s", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, "n1/divvy", "gpu-0-ts")],
    );
    api.put(&shared).unwrap();
    let few = overview(&api, SlicesWanted::Few).await;
    // Those of its node, which is the only one that publishes.
    assert_eq!((few.slices.len(), few.published.is_some()), (3, true));
    let before = api.count("list", "resourceslices");
    api.put(&mk_claim("ns", "waits", DRIVER, 1)).unwrap();
    let few = overview(&api, SlicesWanted::Few).await;
    assert_eq!((few.slices.len(), few.published.is_some()), (3, false));
    assert_eq!(api.count("list", "resourceslices") - before, 2);
}

#[tokio::test]
async fn a_pod_that_asks_by_limits_counts_as_waiting() {
    let api = api(3);
    let mut pod = mk_pod("ns", "p", None, &[]);
    let container = &mut pod.spec.as_mut().unwrap().containers[0];
    container.resources = Some(typed(json!({"limits": {"cpu": "1"}})));
    pod.status = Some(typed(json!({"phase": "Pending"})));
    api.put(&pod).unwrap();
    assert!(overview(&api, SlicesWanted::Few).await.slices.is_empty());
    let change = |pod: &mut k8s_openapi::api::core::v1::Pod| {
        let container = &mut pod.spec.as_mut().unwrap().containers[0];
        container.resources = Some(typed(json!({"limits": {"nvidia.com/gpu": "1"}})));
    };
    api.modify("ns", "p", change).unwrap();
    assert_eq!(overview(&api, SlicesWanted::Few).await.slices.len(), 3);
}

/// Reasons in a large cluster are left to commands about one claim, and that is said.
#[tokio::test]
async fn what_would_take_too_many_slices_is_said() {
    let api = api(1_501);
    api.put(&mk_claim("ns", "waits", DRIVER, 1)).unwrap();
    let few = overview(&api, SlicesWanted::Few).await;
    assert!(few.slices.is_empty() && few.publishes("n1") && few.lacks(&SLICES));
    assert!(
        few.unread[0].contains("too many for an overview (1501)"),
        "{:?}",
        few.unread
    );
    assert_eq!(troubles(&few), ["not-published"]);
    let shown = report::fleet(&few, None);
    let text = render::fleet(&few, &shown, false);
    assert!(text.contains("divvy explain NAMESPACE/POD"), "{text}");
    assert_eq!(overview(&api, SlicesWanted::All).await.slices.len(), 1_501);
}

#[tokio::test]
async fn a_node_is_answered_with_its_own_slices() {
    let api = api(3);
    let of = overview(&api, SlicesWanted::Of("n2")).await;
    assert!(of.slices.is_empty() && !of.publishes("n2"));
    assert_eq!(overview(&api, SlicesWanted::Of("n1")).await.slices.len(), 3);
}
