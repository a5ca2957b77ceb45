//! The demo's scheduler: our allocator over what the API server holds. Pending claims get a reason.

use anyhow::{Context, Result};
use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use divvy_fake_cluster::{FakeApi, build};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimStatus,
    ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::workload::Consumer;
use super::world::NODE;
use divvy_cli::taints::taint;
use divvy_why::cause::{self, Cause, Reader, Scene};
use divvy_why::detail::detail;
use divvy_why::taints::behind;

/// Node of the demo in its sentences.
pub(crate) const PLACE: &str = "this node";

/// Why a pod gets no devices.
#[derive(Debug, Clone)]
pub(crate) struct Unplaced {
    /// The reason for its user, with the way out.
    pub(crate) reason: String,
    /// The same as a value, where devices are the reason.
    pub(crate) cause: Option<Box<Cause>>,
    /// Reasons device by device.
    pub(crate) detail: String,
}

impl From<String> for Unplaced {
    fn from(reason: String) -> Self {
        Self {
            reason,
            cause: None,
            detail: String::new(),
        }
    }
}

/// Allocates and reserves claims for consumers, one after another.
pub(crate) struct Scheduler {
    api: FakeApi,
    allocator: Allocator,
    driver: &'static str,
}

impl Scheduler {
    pub(crate) fn new(api: FakeApi, driver: &'static str) -> Self {
        // The embedded API server speaks as 1.37.
        Self {
            api,
            allocator: Allocator::new(Features::of_kubernetes(37)),
            driver,
        }
    }

    /// Allocates what the consumer's claims still need and reserves them for it.
    pub(crate) fn place(&self, consumer: &Consumer) -> Result<(), Unplaced> {
        let claims: Vec<ResourceClaim> = consumer
            .claims
            .iter()
            .map(|name| {
                self.api
                    .get(&consumer.namespace, name)
                    .ok_or_else(|| format!("claim {name} is gone"))
            })
            .collect::<Result<_, String>>()?;
        let wanting: Vec<&ResourceClaim> = claims
            .iter()
            .filter(|c| c.status.as_ref().is_none_or(|s| s.allocation.is_none()))
            .collect();
        self.allocate(&wanting)?;
        for name in &consumer.claims {
            self.reserve(consumer, name)
                .map_err(|error| format!("{error:#}"))?;
        }
        Ok(())
    }

    fn allocate(&self, claims: &[&ResourceClaim]) -> Result<(), Unplaced> {
        if claims.is_empty() {
            return Ok(());
        }
        let node: Node = self
            .api
            .get("", NODE)
            .ok_or_else(|| "the node is gone".to_owned())?;
        let mut published = self.api.list::<ResourceSlice>();
        let rules = self.api.list::<DeviceTaintRule>();
        taint(&mut published, &rules);
        let slices = Slices::new(&published);
        let classes = self.api.list::<DeviceClass>();
        let all = self.api.list::<ResourceClaim>();
        let allocated = AllocatedState::from_claims(&all);
        let inputs = Inputs {
            slices: &slices,
            classes: &classes,
            allocated: &allocated,
            node: &node,
        };
        let found = match self.allocator.allocate(&inputs, claims) {
            Ok(Outcome::Fits(found)) => found,
            Ok(Outcome::DoesNotFit(explanation)) => {
                let rules = behind(&explanation, &rules);
                let scene = Scene::new(self.driver, &published, &all);
                let cause = cause::of(&explanation, &scene).set_by(rules);
                return Err(Unplaced {
                    reason: cause.full(PLACE, false, Reader::Demo),
                    cause: Some(Box::new(cause)),
                    detail: detail(&explanation),
                });
            }
            Err(error) => {
                let scene = Scene::new(self.driver, &published, &all);
                let reason = cause::of_error(&error, &scene, &classes, Reader::Demo);
                return Err(Unplaced {
                    detail: divvy_telemetry::Chain(&error).to_string(),
                    ..Unplaced::from(reason)
                });
            }
        };
        for (claim, allocation) in claims.iter().zip(found.results) {
            let (namespace, name) = (
                claim.metadata.namespace.as_deref(),
                claim.metadata.name.as_deref(),
            );
            self.api
                .modify::<ResourceClaim>(
                    namespace.unwrap_or_default(),
                    name.unwrap_or_default(),
                    |claim| {
                        claim
                            .status
                            .get_or_insert_with(ResourceClaimStatus::default)
                            .allocation = Some(AllocationResult {
                            allocation_timestamp: Some(Time(Timestamp::now())),
                            ..allocation
                        });
                    },
                )
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn reserve(&self, consumer: &Consumer, claim: &str) -> Result<()> {
        let Some(pod) = &consumer.pod else {
            return Ok(());
        };
        self.api
            .modify::<ResourceClaim>(&consumer.namespace, claim, |claim| {
                *claim = build::reserved(std::mem::take(claim), pod, &format!("uid-of-{pod}"));
            })
            .with_context(|| format!("reserving claim {claim} for pod {pod}"))?;
        Ok(())
    }
}
