//! Holders of devices, as the records have them at this moment.

use std::sync::Arc;

use divvy_executor::{Executor, HeldDevice};

/// Returns the devices that claims hold now: a claim may have been prepared since the last fact.
/// `None` if the records cannot be read, which `sources::records` reports for the node.
pub(crate) async fn held_now(executor: &Arc<Executor>) -> Option<Vec<HeldDevice>> {
    let executor = executor.clone();
    let read = tokio::task::spawn_blocking(move || executor.held());
    read.await.ok()?.ok()
}
