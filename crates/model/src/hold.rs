//! A claim's use of a device, and which uses exclude each other.

use serde::{Deserialize, Serialize};

use crate::{ClaimUid, DeviceName, Form, GpuUuid, MpsServer, Sharing, Target, TimeSlice};

/// A claim's use of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Hold {
    /// The claim that holds.
    pub claim: ClaimUid,
    /// The GPU held, whatever part of it.
    pub gpu: GpuUuid,
    /// The device as it was allocated.
    pub device: DeviceName,
    /// The part of the GPU.
    pub target: Target,
    /// The way of use. Admin access to a device that is published for others is [`Sharing::Admin`]
    /// too.
    pub sharing: Sharing,
    /// A partition that others have made: it is found, and never made or removed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub theirs: bool,
    /// The time slice that the claim asked for with a whole GPU, or that the GPU's shares had;
    /// `None` is content with any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSlice>,
    /// The MPS server of the whole GPU that its users need: of an MPS share, or of a claim that has
    /// the GPU alone and whose users share it by MPS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsServer>,
}

impl Hold {
    /// Returns whether both cannot be had at once: their targets overlap, unless both are shares of
    /// one target by the same sharing. Admin access excludes nothing.
    pub fn conflicts(&self, other: &Self) -> bool {
        let shared = (self.target, self.sharing) == (other.target, other.sharing)
            && self.sharing.is_shared();
        self.gpu == other.gpu
            && self.sharing.holds()
            && other.sharing.holds()
            && self.target.overlaps(other.target)
            && !shared
    }

    /// Returns the kind of use.
    pub fn form(&self) -> Form {
        Form::new(self.target.kind(), self.sharing)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Place;
    use crate::mig::{GpuInstanceProfileId, Placement};

    const SLICES: u32 = 8;

    fn target() -> impl Strategy<Value = Target> {
        let place = (0..3_u32, 0..SLICES, 1..4_u32).prop_map(|(profile, start, size)| {
            Target::Partition(Place {
                profile: GpuInstanceProfileId(profile),
                placement: Placement {
                    start,
                    size: size.min(SLICES - start),
                },
            })
        });
        prop_oneof![Just(Target::Gpu), place]
    }

    fn hold() -> impl Strategy<Value = Hold> {
        let sharing = prop::sample::select(Sharing::ALL.to_vec());
        (0..2_u32, target(), sharing).prop_map(|(gpu, target, sharing)| Hold {
            claim: "0b5a4a3e-9b1f-4a8e-b3f1-00000000000c".parse().unwrap(),
            gpu: format!("GPU-12345678-1234-1234-1234-12345678000{gpu}")
                .parse()
                .unwrap(),
            device: "gpu-0".parse().unwrap(),
            target,
            sharing,
            theirs: false,
            time_slice: None,
            mps: None,
        })
    }

    /// Returns the memory slices that a target takes.
    fn slices(target: Target) -> std::ops::Range<u32> {
        target
            .place()
            .map_or(0..SLICES, |place| place.placement.slices())
    }

    proptest! {
        /// The table of DESIGN section 1, from the slices that each form consumes: an
        /// exclusive device is for one claim, shares are charged once for their target.
        #[test]
        fn holds_conflict_as_the_counters_of_their_devices_do(one in hold(), other in hold()) {
            let one_device = one.form() == other.form() && one.target == other.target;
            let meets = slices(one.target).any(|slice| slices(other.target).contains(&slice));
            let expected = match (one.sharing, other.sharing) {
                (Sharing::Admin, _) | (_, Sharing::Admin) => false,
                (Sharing::TimeSliced, Sharing::TimeSliced) | (Sharing::Mps, Sharing::Mps) => {
                    meets && !one_device
                }
                (Sharing::Exclusive | Sharing::TimeSliced | Sharing::Mps, _) => meets,
            };
            prop_assert_eq!(one.conflicts(&other), one.gpu == other.gpu && expected);
            prop_assert_eq!(other.conflicts(&one), one.conflicts(&other));
            prop_assert_eq!(one.conflicts(&one), one.sharing == Sharing::Exclusive);
        }
    }
}
