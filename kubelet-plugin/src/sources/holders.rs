//! Asks the API what the brain wants to know: which claims hold devices of this node, and what its
//! slices say.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_model::DeviceName;
use divvy_offer::{Answer, Ask, Claimant, Fact};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::Api;
use kube::api::ListParams;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::claims::api::KubeClaims;
use crate::node::facts::Facts;

/// Asks.
pub(crate) struct HoldersSource {
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) asked: watch::Receiver<Option<Ask>>,
    pub(crate) facts: Facts,
}

impl HoldersSource {
    /// Runs until `stop`. Every question gets an answer, if only that there is none.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                Ok(()) = self.asked.changed() => {}
                () = stop.cancelled() => return,
            }
            // The newest question only: an answer counts from when it was asked, and there is one
            // at a time.
            let Some(ask) = *self.asked.borrow_and_update() else {
                continue;
            };
            let answer = self.ask(ask).await;
            if let Err(error) = &answer {
                tracing::warn!(
                    error = crate::chain(error),
                    "failed to list claims; withdrawn devices stay published until their holders are known"
                );
            }
            if self.facts.send(Fact::Answer(answer.ok()).into()).is_err() {
                return;
            }
        }
    }

    async fn ask(&self, ask: Ask) -> Result<Answer, kube::Error> {
        // Slices before claims: a device that is withdrawn in between is in the slices, and its
        // claim in the list.
        let published = if ask.slices {
            self.published().await?
        } else {
            BTreeSet::new()
        };
        Ok(Answer {
            published,
            holders: self.holders(self.claims.list().await?),
        })
    }

    /// Devices in this node's slices.
    async fn published(&self) -> Result<BTreeSet<DeviceName>, kube::Error> {
        let ours = format!(
            "spec.driver={},spec.nodeName={}",
            self.claims.driver, self.claims.node
        );
        let slices = Api::<ResourceSlice>::all(self.claims.client.clone());
        let slices = slices
            .list(&ListParams::default().fields(&ours))
            .await?
            .items
            .into_iter();
        let devices = slices
            .filter(|slice| slice.spec.pool.name == self.claims.pool)
            .filter_map(|slice| slice.spec.devices)
            .flatten();
        let names = devices.filter_map(|device| device.name.parse().ok());
        Ok(names.filter(|name| !is_for_admins(name)).collect())
    }

    /// Devices of our pool that claims have allocated. Admin access excludes no other claim, and is
    /// served by name.
    fn holders(&self, claims: Vec<ResourceClaim>) -> BTreeMap<DeviceName, BTreeSet<Claimant>> {
        let mut holders = BTreeMap::<DeviceName, BTreeSet<Claimant>>::new();
        for claim in claims {
            let results = claim
                .status
                .and_then(|status| status.allocation?.devices?.results);
            let (namespace, name) = (claim.metadata.namespace, claim.metadata.name);
            let name = format!(
                "{}/{}",
                namespace.unwrap_or_default(),
                name.unwrap_or_default()
            );
            let Some(uid) = claim.metadata.uid.and_then(|uid| uid.parse().ok()) else {
                continue;
            };
            let claimant = Claimant { uid, name };
            for result in results.into_iter().flatten() {
                let ours = result.driver == self.claims.driver && result.pool == self.claims.pool;
                if let Ok(device) = result.device.parse()
                    && ours
                    && result.admin_access != Some(true)
                {
                    holders.entry(device).or_default().insert(claimant.clone());
                }
            }
        }
        holders
    }
}

fn is_for_admins(name: &DeviceName) -> bool {
    divvy_model::DeviceKind::parse(name).is_ok_and(|kind| !kind.sharing.holds())
}
