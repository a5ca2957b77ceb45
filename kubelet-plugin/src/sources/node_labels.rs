//! This node's object in the API, as far as decisions need it: its labels, and whether it is
//! cordoned.

use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node::facts::NodeFacts;

/// Keeps `facts` up to date until `stop`. The last known labels stay while the API does not answer,
/// and when the object is gone.
pub(crate) async fn run(
    client: Client,
    node: String,
    facts: watch::Sender<Option<Arc<NodeFacts>>>,
    stop: CancellationToken,
) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let changes = watcher(Api::<Node>::all(client), config)
        .default_backoff()
        .applied_objects();
    let mut changes = std::pin::pin!(changes);
    let follow = async {
        let mut reported = false;
        while let Some(change) = changes.next().await {
            match change {
                Ok(object) => {
                    reported = false;
                    let now = NodeFacts::from(object);
                    // The kubelet writes its Node every few minutes. Followers wake only for labels
                    // and the cordon.
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
