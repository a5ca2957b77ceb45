//! The demo's scheduler: our allocator over what the API server holds. Pending claims get a reason.

use anyhow::{Context, Result};
use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use divvy_fake_cluster::{FakeApi, build};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimStatus, ResourceSlice};

use super::workload::Consumer;
use super::world::NODE;

/// Allocates and reserves claims for consumers, one after another.
pub(crate) struct Scheduler {
    api: FakeApi,
    allocator: Allocator,
}

impl Scheduler {
    pub(crate) fn new(api: FakeApi) -> Self {
        // The embedded API server speaks as 1.37.
        Self { api, allocator: Allocator::new(Features::of_kubernetes(37)) }
    }

    /// Allocates what the consumer's claims still need and reserves them for it. `Err` holds the reason for people.
    pub(crate) fn place(&self, consumer: &Consumer) -> Result<(), String> {
        let claims: Vec<ResourceClaim> = consumer
            .claims
            .iter()
            .map(|name| {
                self.api.get(&consumer.namespace, name).ok_or_else(|| format!("claim {name} is gone"))
            })
            .collect::<Result<_, _>>()?;
        let wanting: Vec<&ResourceClaim> =
            claims.iter().filter(|c| c.status.as_ref().is_none_or(|s| s.allocation.is_none())).collect();
        self.allocate(&wanting)?;
        for name in &consumer.claims {
            self.reserve(consumer, name).map_err(|error| format!("{error:#}"))?;
        }
        Ok(())
    }

    fn allocate(&self, claims: &[&ResourceClaim]) -> Result<(), String> {
        if claims.is_empty() {
            return Ok(());
        }
        let node: Node = self.api.get("", NODE).ok_or("the node is gone")?;
        let published = self.api.list::<ResourceSlice>();
        let slices = Slices::new(&published);
        let classes = self.api.list::<DeviceClass>();
        let all = self.api.list::<ResourceClaim>();
        let allocated = AllocatedState::from_claims(&all);
        let inputs = Inputs { slices: &slices, classes: &classes, allocated: &allocated, node: &node };
        let found = match self.allocator.allocate(&inputs, claims) {
            Ok(Outcome::Fits(found)) => found,
            Ok(Outcome::DoesNotFit(explanation)) => return Err(explanation.to_string()),
            Err(error) => return Err(format!("{:#}", anyhow::Error::new(error))),
        };
        for (claim, allocation) in claims.iter().zip(found.results) {
            let (namespace, name) = (claim.metadata.namespace.as_deref(), claim.metadata.name.as_deref());
            self.api
                .modify::<ResourceClaim>(namespace.unwrap_or_default(), name.unwrap_or_default(), |claim| {
                    claim.status.get_or_insert_with(ResourceClaimStatus::default).allocation =
                        Some(allocation);
                })
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn reserve(&self, consumer: &Consumer, claim: &str) -> Result<()> {
        let Some(pod) = &consumer.pod else { return Ok(()) };
        self.api
            .modify::<ResourceClaim>(&consumer.namespace, claim, |claim| {
                *claim = build::reserved(std::mem::take(claim), pod, &format!("uid-of-{pod}"));
            })
            .with_context(|| format!("reserving claim {claim} for pod {pod}"))?;
        Ok(())
    }
}
