//! Permissions of prepare on a GPU, as the node's policies gave them last.

use divvy_model::{Burst, CapsPromise, Grant, MpsServer, ShareUnit, TimeSlice};
use serde::{Deserialize, Serialize};

/// Permissions that the node's policies give to prepare, as last granted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Granted {
    /// True if MIG mode may be changed where that needs no reset. A mode that we turned on is
    /// turned off again for another use, whatever this says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_change_mode: bool,
    /// True if a rule offers partitions of the GPU: while none does, a MIG mode that we turned on
    /// is given back once nothing is held.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offers_partitions: bool,
    /// Time slice of the GPU while claims have shares of it. `None`: none is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_time_slice: Option<TimeSlice>,
    /// The unit in which shares of the GPU were last published: claims may hold some, also after a
    /// restart. `None`: there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_unit: Option<ShareUnit>,
    /// Memory in MiB that shares do not get.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub share_reserved_mib: u64,
    /// Factor by which the memory limit of a share may be above its request.
    #[serde(default, skip_serializing_if = "Burst::is_none")]
    pub share_burst: Burst,
    /// The MPS server that was last granted: claims may hold its slots, also after a restart.
    /// `None`: none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsServer>,
    /// The equal slots of a partition with MPS shares, as they were last granted. `None`: none
    /// were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_slots_in_partitions: Option<u32>,
    /// True if an MPS server that is wedged is started anew also while it has clients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarts_wedged_mps: bool,
    /// Promise that the memory of shares of the GPU is capped, also after a restart.
    #[serde(default, skip_serializing_if = "CapsPromise::is_never")]
    pub caps: CapsPromise,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Granted {
    /// Stores the permissions of prepare. A part that the grant leaves open (no policy read yet)
    /// stays as it was granted last.
    pub(crate) fn take(&mut self, grant: &Grant) {
        *self = Self {
            may_change_mode: grant.may_change_mode.unwrap_or(self.may_change_mode),
            offers_partitions: grant.offers_partitions.unwrap_or(self.offers_partitions),
            share_time_slice: grant.share_time_slice,
            share_unit: grant.share_unit,
            share_reserved_mib: grant.share_reserved_mib,
            share_burst: grant.share_burst,
            mps: grant.mps.or(self.mps),
            mps_slots_in_partitions: grant
                .mps_slots_in_partitions
                .or(self.mps_slots_in_partitions),
            restarts_wedged_mps: grant.restarts_wedged_mps,
            caps: self.caps.then(grant.caps),
        };
    }
}
