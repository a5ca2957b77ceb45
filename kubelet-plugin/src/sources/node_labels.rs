//! This node's object in the API, as far as decisions need it: its labels, and whether it is cordoned.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What is known of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// Its labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Whether it is cordoned.
    pub(crate) cordoned: bool,
}

impl From<Node> for NodeFacts {
    fn from(node: Node) -> Self {
        let cordoned = node.spec.and_then(|spec| spec.unschedulable).unwrap_or_default();
        Self { labels: node.metadata.labels.unwrap_or_default(), cordoned }
    }
}

/// Keeps `facts` up to date until `stop`. What was known stays while the API does not answer, and when the object is
/// gone.
pub(crate) async fn run(
    client: Client,
    node: String,
    facts: watch::Sender<Option<Arc<NodeFacts>>>,
    stop: CancellationToken,
) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let changes = watcher(Api::<Node>::all(client), config).default_backoff().applied_objects();
    let mut changes = std::pin::pin!(changes);
    let follow = async {
        let mut reported = false;
        while let Some(change) = changes.next().await {
            match change {
                Ok(object) => {
                    reported = false;
                    let now = NodeFacts::from(object);
                    facts.send_if_modified(|known| {
                        let new = known.as_deref() != Some(&now);
                        if new {
                            *known = Some(Arc::new(now));
                        }
                        new
                    });
                }
                Err(error) => {
                    if !std::mem::replace(&mut reported, true) {
                        tracing::warn!(
                            error = %crate::chain(&error),
                            "failed to watch the Node; using its last known labels and cordon, will retry"
                        );
                    }
                }
            }
        }
    };
    tokio::select! {
        () = follow => {}
        () = stop.cancelled() => {}
    }
}
