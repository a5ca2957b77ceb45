//! An API server that accepts requests and never answers them.

use std::time::Duration;

use divvy_fake_cluster::{Fault, GpuNode, GpuPolicy};
use serde_json::{Value, json};

use crate::node::{Node, wait};

/// An API server that leaves the first request of each kind without an answer hangs nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_each_kind_without_an_answer_hangs_nothing() {
    let node = Node::new("h100x1");
    let verbs = ["get", "list", "watch", "create", "patch"];
    for resource in ["nodes", "resourceslices", "gpupolicies", "gpunodes"] {
        for verb in verbs {
            node.api.fail_next(1, verb, resource, Fault::Hang);
        }
    }
    let mut config = node.config(&[]);
    config.timing.answer = Duration::from_millis(200);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let report = || {
        node.api
            .get::<GpuNode>("", "n1")
            .filter(|object| object.status != Value::Null)
    };
    wait("the report", report).await;
    let spec = json!({ "rules": [{ "modes": ["TimeSlicing"] }] });
    node.api.put(&GpuPolicy::new("p", spec)).unwrap();
    wait("shares", || {
        node.published()
            .into_iter()
            .find(|(name, _)| name == "gpu-0-ts")
    })
    .await;
    plugin.stop().await;
}
