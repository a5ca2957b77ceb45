//! Holders of devices, as the records have them at this moment.

use std::sync::Arc;

use divvy_executor::{Executor, HeldDevice, StoreError};

/// Returns the devices that claims hold now: a claim may have been prepared since the last fact.
/// `None` if the records cannot be read, which `sources::records` reports for the node.
pub(crate) async fn held_now(executor: &Arc<Executor>) -> Option<Vec<HeldDevice>> {
    let executor = executor.clone();
    read_now(move || executor.held()).await
}

/// Reads where it may block. Records that cannot be read are unknown and not none.
async fn read_now(
    read: impl FnOnce() -> Result<Vec<HeldDevice>, StoreError> + Send + 'static,
) -> Option<Vec<HeldDevice>> {
    tokio::task::spawn_blocking(read).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn records_that_cannot_be_read_are_unknown_and_not_none() {
        assert_eq!(
            read_now(|| Ok(Vec::new())).await.map(|held| held.len()),
            Some(0)
        );
        let unreadable = || {
            Err(StoreError {
                what: "the folder of records".to_owned(),
                action: "read",
                source: std::io::ErrorKind::PermissionDenied.into(),
            })
        };
        assert!(read_now(unreadable).await.is_none(), "an error");
        let panics = || -> Result<_, StoreError> { panic!("a bug in the reader") };
        assert!(read_now(panics).await.is_none(), "a panic");
    }
}
