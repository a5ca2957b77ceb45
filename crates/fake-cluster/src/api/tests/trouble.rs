//! Faults, gates, stopping.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Counter, Device, DeviceCounterConsumption, DeviceTaint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{ListParams, PostParams, WatchParams};

use super::*;
use crate::build::mk_node;
use futures::TryStreamExt;

#[tokio::test]
async fn the_next_requests_fail_as_requested_and_then_no_longer() {
    let api = FakeApi::new();
    api.fail_next(2, "create", "resourceslices", Fault::Status(503));
    for _ in 0..2 {
        assert_eq!(
            refusal(
                slices(&api)
                    .create(&PostParams::default(), &slice("a", "n"))
                    .await
            )
            .0,
            503
        );
    }
    slices(&api)
        .create(&PostParams::default(), &slice("a", "n"))
        .await
        .unwrap();
    assert_eq!(api.count("create", "resourceslices"), 3);
    assert_eq!(api.count("*", "*"), 3);
}

#[tokio::test]
async fn a_broken_connection_may_or_may_not_have_written() {
    let api = FakeApi::new();
    api.fail_next(1, "create", "*", Fault::DropBefore);
    slices(&api)
        .create(&PostParams::default(), &slice("a", "n"))
        .await
        .unwrap_err();
    assert_eq!(api.get::<ResourceSlice>("", "a"), None);
    api.fail_next(1, "create", "*", Fault::DropAfter);
    let error = slices(&api)
        .create(&PostParams::default(), &slice("a", "n"))
        .await
        .unwrap_err();
    assert!(
        !matches!(error, kube::Error::Api(_)),
        "the caller learns nothing: {error}"
    );
    assert!(api.get::<ResourceSlice>("", "a").is_some());
}

#[tokio::test]
async fn a_held_request_continues_and_a_hanging_one_ends_with_the_server() {
    let api = FakeApi::new();
    api.put(&slice("a", "n")).unwrap();
    let held = api.hold("get", "resourceslices");
    let reader = slices(&api);
    let get = tokio::spawn(async move { reader.get("a").await });
    api.wait_until(|view| view.count("get", "resourceslices") == 1, SOON)
        .await
        .unwrap();
    assert!(!get.is_finished());
    drop(held);
    get.await.unwrap().unwrap();
    api.clear_faults();
    api.fail_next(1, "list", "*", Fault::Hang);
    let reader = slices(&api);
    let list = tokio::spawn(async move { reader.list(&ListParams::default()).await });
    api.wait_until(|view| view.count("list", "resourceslices") == 1, SOON)
        .await
        .unwrap();
    api.stop();
    list.await.unwrap().unwrap_err();
    slices(&api).get("a").await.unwrap_err();
    api.start();
    slices(&api).get("a").await.unwrap();
}

#[tokio::test]
async fn a_cache_that_lags_is_seen_only_by_requests_for_any_version() {
    let api = FakeApi::new();
    api.freeze_cache(true);
    api.put(&slice("a", "n")).unwrap();
    let any = ListParams::default().match_any();
    assert_eq!(slices(&api).list(&any).await.unwrap().items.len(), 0);
    assert_eq!(
        slices(&api)
            .list(&ListParams::default())
            .await
            .unwrap()
            .items
            .len(),
        1
    );
    api.freeze_cache(false);
    assert_eq!(slices(&api).list(&any).await.unwrap().items.len(), 1);
}

#[tokio::test]
async fn a_gate_that_is_off_drops_its_fields_and_only_those() {
    let api = FakeApi::new();
    let mut wanted = slice("a", "n");
    let counters = [(
        "memory".to_owned(),
        Counter {
            value: Quantity("1Gi".into()),
        },
    )]
    .into();
    let consumed = DeviceCounterConsumption {
        counter_set: "gpu-0".into(),
        counters,
        compatibility_groups: None,
    };
    let taint = DeviceTaint {
        key: "k".into(),
        effect: "NoSchedule".into(),
        ..DeviceTaint::default()
    };
    let device = Device {
        taints: Some(vec![taint]),
        consumes_counters: Some(vec![consumed.clone()]),
        allow_multiple_allocations: Some(true),
        ..mk_device("gpu-0")
    };
    wanted.spec.devices = Some(vec![device.clone()]);
    for gate in [Gate::DeviceTaints, Gate::ConsumableCapacity] {
        api.turn_off(gate);
    }
    let stored = slices(&api)
        .create(&PostParams::default(), &wanted)
        .await
        .unwrap();
    let kept = Device {
        consumes_counters: Some(vec![consumed]),
        ..mk_device("gpu-0")
    };
    assert_eq!(stored.spec.devices, Some(vec![kept]));
    api.turn_off(Gate::PartitionableDevices);
    let in_use = slices(&api)
        .replace("a", &PostParams::default(), &stored)
        .await
        .unwrap();
    assert_eq!(in_use.spec, stored.spec, "fields in use are kept on update");
    let mut other = wanted;
    other.metadata.name = Some("b".into());
    let stored = slices(&api)
        .create(&PostParams::default(), &other)
        .await
        .unwrap();
    assert_eq!(stored.spec.devices, Some(vec![mk_device("gpu-0")]));
}

#[tokio::test]
async fn the_server_answers_http_and_refuses_connections_while_stopped() {
    let api = FakeApi::new();
    let server = api.serve_http().await.unwrap();
    let mut config = kube::Config::new(server.url().parse().unwrap());
    // Without the client's own retries, so that a refusal is seen as one.
    config.default_retry = false;
    let client = kube::Client::try_from(config).unwrap();
    let file = kube::config::Kubeconfig::from_yaml(&server.kubeconfig()).unwrap();
    let named =
        kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default())
            .await;
    assert_eq!(
        named.unwrap().cluster_url,
        server.url().parse::<http::Uri>().unwrap()
    );
    let remote: Api<ResourceSlice> = Api::all(client.clone());
    let stored = remote
        .create(&PostParams::default(), &slice("a", "n"))
        .await
        .unwrap();
    assert_eq!(api.get::<ResourceSlice>("", "a"), Some(stored));
    let mut events = Box::pin(remote.watch(&WatchParams::default(), "0").await.unwrap());
    assert!(events.try_next().await.unwrap().is_some());
    api.stop();
    let ended = tokio::time::timeout(SOON, events.try_next()).await.unwrap();
    assert!(
        !matches!(ended, Ok(Some(_))),
        "the open watch breaks: {ended:?}"
    );
    remote.get("a").await.unwrap_err();
    api.start();
    let back = async { while remote.get("a").await.is_err() {} };
    tokio::time::timeout(SOON, back).await.unwrap();
}

#[tokio::test]
async fn a_list_comes_in_parts_of_the_size_asked_for() {
    let api = FakeApi::new();
    for number in 0..5 {
        api.put(&mk_node(&format!("node-{number}"))).unwrap();
    }
    let nodes = kube::Api::<Node>::all(api.client());
    let (mut names, mut token, mut parts) = (Vec::new(), None::<String>, 0);
    loop {
        let mut asked = kube::api::ListParams::default().limit(2);
        if let Some(token) = &token {
            asked = asked.continue_token(token);
        }
        let part = nodes.list(&asked).await.unwrap();
        parts += 1;
        let version = part.metadata.resource_version.clone();
        names.extend(part.items.into_iter().filter_map(|node| node.metadata.name));
        // What comes meanwhile is seen by a watch from the version of the first part.
        api.put(&mk_node(&format!("a-node-{parts}"))).unwrap();
        let first = nodes.get("node-4").await.unwrap().metadata.resource_version;
        assert_eq!(version, first, "the last one that was there before");
        token = part.metadata.continue_.filter(|token| !token.is_empty());
        if token.is_none() {
            break;
        }
    }
    let expected: Vec<String> = (0..5).map(|number| format!("node-{number}")).collect();
    assert_eq!((names, parts), (expected, 3));
    // A read of any version is answered from the cache, as a whole.
    let any = http::Request::get("/api/v1/nodes?limit=2&resourceVersion=0");
    let any: kube::api::ObjectList<Node> = api
        .client()
        .request(any.body(Vec::new()).unwrap())
        .await
        .unwrap();
    assert_eq!(any.items.len(), 8);
}
