//! The claims whose containers are capped, as the setter of caps asks for them.

use divvy_claims::{ClaimRef, Phase, PodRef, cdi_device_name};
use divvy_executor::{CappedShare, Executor};
use divvy_model::{ClaimUid, GpuUuid};

/// A device of a claim whose containers call for a cap, or for the end of earlier ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) claim: ClaimRef,
    pub(crate) gpu: GpuUuid,
    /// Pods that the claim was prepared for.
    pub(crate) pods: Vec<PodRef>,
    /// Name of its CDI device.
    pub(crate) device: String,
    /// Cap in bytes; `None` for a whole GPU.
    pub(crate) bytes: Option<u64>,
    /// True if its containers may start.
    pub(crate) prepared: bool,
}

impl Held {
    /// Returns the name by which the ledger knows it.
    pub(crate) fn name(&self) -> String {
        name(&self.claim.uid, &self.device)
    }
}

/// Returns the name by which the ledger knows a device of a claim.
pub(crate) fn name(claim: &ClaimUid, device: &str) -> String {
    format!("{}/{device}", claim.as_str())
}

/// The claims of the node.
pub(crate) trait CappedClaims: Send + Sync {
    /// Returns a device by its name in the claim's CDI file; `None` if the claim has no such device
    /// here, or none about whose cap anything is to be done.
    fn share(&self, claim: &ClaimUid, device: &str) -> Result<Option<CappedShare>, String>;

    /// Returns all of them.
    fn held(&self) -> Result<Vec<Held>, String>;
}

impl CappedClaims for Executor {
    fn share(&self, claim: &ClaimUid, device: &str) -> Result<Option<CappedShare>, String> {
        self.capped_share(claim, device)
            .map_err(|error| crate::chain(&error))
    }

    fn held(&self) -> Result<Vec<Held>, String> {
        let held = Self::held(self).map_err(|error| crate::chain(&error))?;
        let of = held.into_iter().filter(|held| held.calls_for_caps);
        let of = of.map(|held| Held {
            device: cdi_device_name(
                &held.claim.uid,
                &held.allocated.device,
                held.allocated.share_id.as_deref(),
            ),
            claim: held.claim,
            gpu: held.hold.gpu,
            pods: held.pods,
            bytes: held.amounts.limit,
            prepared: held.phase == Phase::Prepared,
        });
        Ok(of.collect())
    }
}
