//! Removes slices of pools that are not to be served on this node any more.

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, ListParams, Preconditions};

use crate::PublisherConfig;
use crate::error::PublishError;

/// Deletes the slices of this driver and node that are of certain pools; returns their number. Not
/// to be called while a publisher of these pools runs, which would create them anew.
pub async fn remove_slices(
    client: &kube::Client,
    config: &PublisherConfig,
    of_pool: impl Fn(&str) -> bool + Send,
) -> Result<usize, PublishError> {
    let slices = Api::<ResourceSlice>::all(client.clone());
    let selector = config.selector();
    let listed = slices.list(&ListParams::default().fields(&selector)).await;
    let listed = listed.map_err(PublishError::of("list", "ResourceSlices"))?;
    let mut removed = 0;
    let chosen = listed.items.into_iter();
    for slice in chosen.filter(|slice| of_pool(&slice.spec.pool.name)) {
        let name = slice.metadata.name.unwrap_or_default();
        // Only the very object that was listed: one that was made since is another plugin's.
        let must = DeleteParams {
            preconditions: Some(Preconditions {
                uid: slice.metadata.uid,
                resource_version: None,
            }),
            ..DeleteParams::default()
        };
        match slices.delete(&name, &must).await {
            // It is gone, as was wanted.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => {
                return Err(PublishError::of("delete", format!("ResourceSlice {name}"))(
                    error,
                ));
            }
            Ok(_) => removed += 1,
        }
    }
    Ok(removed)
}
