//! [`MigCapabilities`]: everything a GPU can be cut into.

use serde::{Deserialize, Serialize};

use super::{GpuInstanceProfile, GpuInstanceProfileId, Placement, ProfileName};

/// The profiles of one GPU with their placements. Does not change while driver and board stay the
/// same, so the last answer may be kept when the driver cannot be asked (before R550: while MIG
/// mode is off).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigCapabilities {
    /// Memory of the GPU in bytes (`nvmlDeviceGetMemoryInfo`). Names depend on it.
    pub memory_bytes: u64,
    profiles: Vec<GpuInstanceProfile>,
}

impl MigCapabilities {
    /// Profiles in any order; those without a placement are left out.
    pub fn new(memory_bytes: u64, profiles: impl IntoIterator<Item = GpuInstanceProfile>) -> Self {
        let mut profiles: Vec<_> = profiles
            .into_iter()
            .filter(|profile| !profile.placements.is_empty())
            .map(|mut profile| {
                profile.placements.sort_unstable();
                profile.placements.dedup();
                profile
            })
            .collect();
        profiles.sort_by_key(|p| (p.slices, p.memory_slices(), p.variant(), p.id));
        // A second index of the same profile would give two devices one name.
        let mut seen = std::collections::BTreeSet::new();
        profiles.retain(|profile| seen.insert(profile.id));
        Self {
            memory_bytes,
            profiles,
        }
    }

    /// The profiles, small before large and plain before others of the size.
    pub fn profiles(&self) -> &[GpuInstanceProfile] {
        &self.profiles
    }

    /// Adds the profiles and placements of an earlier answer of the same driver that this one
    /// lacks: an odd answer of NVML may have left them out.
    #[must_use]
    pub fn with_those_of(mut self, earlier: &Self) -> Self {
        for known in &earlier.profiles {
            // The union: `new` sorts placements and drops those that both answers have.
            match self.profiles.iter_mut().find(|own| own.id == known.id) {
                Some(own) => own.placements.extend(&known.placements),
                None => self.profiles.push(known.clone()),
            }
        }
        Self::new(self.memory_bytes, self.profiles)
    }

    /// A profile by its id.
    pub fn profile(&self, id: GpuInstanceProfileId) -> Option<&GpuInstanceProfile> {
        self.profiles.iter().find(|profile| profile.id == id)
    }

    /// Returns how many memory slices the GPU has: as many as its largest placement reaches over.
    /// Not always a power of two.
    pub fn memory_slices(&self) -> u32 {
        self.placements()
            .map(|(_, placement)| placement.end())
            .max()
            .unwrap_or(0)
    }

    /// The profile that takes the whole GPU; `None` where it was left out of the answer.
    pub fn whole(&self) -> Option<&GpuInstanceProfile> {
        let all = Placement {
            start: 0,
            size: self.memory_slices(),
        };
        let mut plain = self.profiles.iter().rev();
        plain.find(|profile| profile.placements.contains(&all))
    }

    /// Every profile at every placement.
    pub fn placements(&self) -> impl Iterator<Item = (&GpuInstanceProfile, Placement)> {
        self.profiles
            .iter()
            .flat_map(|profile| profile.placements.iter().map(move |at| (profile, *at)))
    }

    /// The exact placement of a profile at a start.
    pub fn placement(&self, id: GpuInstanceProfileId, start: u32) -> Option<Placement> {
        self.profile(id)?
            .placements
            .iter()
            .copied()
            .find(|placement| placement.start == start)
    }

    /// The name of a profile as nvidia-smi and NVIDIA's driver write it. For a profile newer than
    /// this version: what the driver calls it; `None` if it does not say.
    pub fn name(&self, profile: &GpuInstanceProfile) -> Option<ProfileName> {
        match profile.variant().suffix() {
            Some(suffix) => Some(ProfileName::compute(
                profile.slices,
                profile.memory_mib,
                self.memory_bytes,
                suffix,
            )),
            None => profile
                .driver_name
                .as_deref()?
                .trim_start_matches("MIG ")
                .parse()
                .ok(),
        }
    }

    /// Returns how many instances of a profile live beside each other at most. By its placements:
    /// the driver's own number is wrong on the A30, and counts only where something else than the
    /// place is limited.
    pub fn most(&self, profile: &GpuInstanceProfile) -> u32 {
        // Greedy by first end is the most that do not overlap.
        let mut placements = profile.placements.clone();
        placements.sort_by_key(|placement| placement.end());
        let (mut count, mut free) = (0, 0);
        for placement in placements {
            if placement.start >= free {
                count += 1;
                free = placement.end();
            }
        }
        // `+me` profiles need engines of which the GPU has one set, and placements do not show
        // that. For an unknown variant the driver's number is the safe one.
        if profile.variant().is_limited() {
            profile.max_instances.min(count)
        } else {
            count
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Engines, GpuInstanceProfileIndex};
    use super::*;

    fn profile(id: u32, index: u32, slices: u32, size: u32, starts: &[u32]) -> GpuInstanceProfile {
        GpuInstanceProfile {
            id: GpuInstanceProfileId(id),
            index: GpuInstanceProfileIndex(index),
            slices,
            memory_mib: 4864 * u64::from(size),
            multiprocessors: 14 * slices,
            engines: Engines::default(),
            max_instances: 1,
            placements: starts
                .iter()
                .map(|start| Placement {
                    start: *start,
                    size,
                })
                .collect(),
            driver_name: Some("MIG 1g.5gb+new".to_owned()),
        }
    }

    #[test]
    fn instances_are_counted_by_place_and_limited_ones_by_the_driver() {
        let caps = MigCapabilities::new(
            40 << 30,
            [
                profile(0, 4, 7, 8, &[0]),
                profile(14, 1, 2, 2, &[4, 0, 2, 2]),
                profile(20, 7, 1, 1, &[0, 1, 2]),
                profile(15, 9, 1, 2, &[0, 1, 3, 6]),
                profile(99, 5, 8, 8, &[]),
                profile(30, 0x30, 1, 1, &[0]),
            ],
        );
        let rows: Vec<_> = caps
            .profiles()
            .iter()
            .map(|p| {
                (
                    p.id.0,
                    caps.most(p),
                    caps.name(p)
                        .map(|name| name.to_string())
                        .unwrap_or_default(),
                )
            })
            .collect();
        let expected = [
            (20, 1, "1g.5gb+me"),
            (30, 1, "1g.5gb+new"),
            (15, 3, "1g.10gb"),
            (14, 3, "2g.10gb"),
            (0, 1, "7g.40gb"),
        ];
        assert_eq!(
            rows,
            expected.map(|(id, most, name)| (id, most, name.to_owned()))
        );
        assert_eq!(
            (caps.memory_slices(), caps.placements().count()),
            (8, 3 + 1 + 4 + 3 + 1)
        );
        assert_eq!(
            caps.placement(GpuInstanceProfileId(14), 4),
            Some(Placement { start: 4, size: 2 })
        );
        assert_eq!(caps.placement(GpuInstanceProfileId(14), 1), None);
    }
}
