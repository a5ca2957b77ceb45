//! Slices that are removed, and those that are not.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::time::Duration;

use divvy_api::names::DRIVER;
use divvy_controller::{PublisherConfig, remove_slices};
use divvy_fake_cluster::FakeApi;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::{from_value, json};

fn slice(name: &str, pool: &str) -> ResourceSlice {
    from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": name },
        "spec": {
            "driver": DRIVER,
            "nodeName": "n1",
            "pool": { "name": pool, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0" }],
        },
    }))
    .unwrap()
}

fn config() -> PublisherConfig {
    PublisherConfig {
        driver: DRIVER.to_owned(),
        node_name: "n1".to_owned(),
    }
}

fn names(api: &FakeApi) -> Vec<String> {
    let slices = api.list::<ResourceSlice>().into_iter();
    slices.filter_map(|slice| slice.metadata.name).collect()
}

#[tokio::test]
async fn slices_of_other_pools_stay() {
    let api = FakeApi::new();
    for (name, pool) in [("a", "ours"), ("b", "theirs")] {
        api.put(&slice(name, pool)).unwrap();
    }
    let removed = remove_slices(&api.client(), &config(), |pool| pool == "ours").await;
    assert_eq!(removed.unwrap(), 1);
    assert_eq!(names(&api), ["b"]);
}

/// Another plugin publishes under the name in the meantime.
#[tokio::test]
async fn a_slice_that_was_made_since_stays() {
    let api = FakeApi::new();
    api.put(&slice("a", "ours")).unwrap();
    let gate = api.hold("delete", "resourceslices");
    let client = api.client();
    let remove = async { remove_slices(&client, &config(), |_| true).await };
    let anew = async {
        let arrives = async {
            while api.count("delete", "resourceslices") == 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(10), arrives).await;
        in_time.unwrap();
        api.delete::<ResourceSlice>("", "a").unwrap();
        api.put(&slice("a", "ours")).unwrap();
        drop(gate);
    };
    let (removed, ()) = tokio::join!(remove, anew);
    assert!(removed.is_err(), "it is not the one that was listed");
    assert_eq!(names(&api), ["a"]);
}
