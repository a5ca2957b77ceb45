//! Ordinals: the stable number in a device's name, kept per GPU UUID on disk so that `gpu-3` stays
//! the same card when another one is lost, added or replaced.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{GpuUuid, PciAddress};

/// The number of each GPU. A number is never given to another GPU while the first may still be
/// referred to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ordinals(BTreeMap<GpuUuid, u32>);

impl Ordinals {
    /// The ordinal of a GPU.
    pub fn of(&self, gpu: &GpuUuid) -> Option<u32> {
        self.0.get(gpu).copied()
    }

    /// The GPU with an ordinal.
    pub fn gpu(&self, ordinal: u32) -> Option<&GpuUuid> {
        self.0
            .iter()
            .find(|(_, o)| **o == ordinal)
            .map(|(gpu, _)| gpu)
    }

    /// Returns whether no GPU has a number yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all GPUs with their ordinals, by UUID.
    pub fn iter(&self) -> impl Iterator<Item = (&GpuUuid, u32)> {
        self.0.iter().map(|(gpu, ordinal)| (gpu, *ordinal))
    }

    /// Gives each GPU that has none the lowest free ordinal, in order of PCI address (so that a
    /// fresh node counts as NVML does). GPUs that are gone keep theirs. Returns whether anything
    /// changed.
    pub fn assign(&mut self, present: impl IntoIterator<Item = (GpuUuid, PciAddress)>) -> bool {
        let mut fresh: Vec<_> = present
            .into_iter()
            .filter(|(gpu, _)| !self.0.contains_key(gpu))
            .collect();
        // In order of PCI address, as NVML counts: on a fresh node `gpu-3` is `nvidia-smi`'s GPU 3.
        fresh.sort_by(|a, b| (a.1, &a.0).cmp(&(b.1, &b.0)));
        fresh.dedup_by(|a, b| a.0 == b.0);
        let mut taken: BTreeSet<u32> = self.0.values().copied().collect();
        let changed = !fresh.is_empty();
        for (gpu, _) in fresh {
            // The last number is never reached: there are fewer GPUs than numbers.
            let free = (0..=u32::MAX)
                .find(|n| !taken.contains(n))
                .unwrap_or(u32::MAX);
            taken.insert(free);
            self.0.insert(gpu, free);
        }
        changed
    }

    /// Numbers made again from what refers to them, after their file was lost: `recorded` by
    /// claims' records, `published` by the node's slices, and `allocated` by claims in the API,
    /// which name no GPU. Where they contradict each other, records are right: containers run with
    /// what they say. A number whose GPU is unknown, or that belongs to a GPU which has another,
    /// stays taken by a stand-in, so that no other GPU gets it before [`Ordinals::forget`] removes
    /// that.
    pub fn rebuild(
        recorded: impl IntoIterator<Item = (u32, GpuUuid)>,
        published: impl IntoIterator<Item = (u32, GpuUuid)>,
        allocated: impl IntoIterator<Item = u32>,
    ) -> Self {
        let mut numbers = BTreeMap::<u32, GpuUuid>::new();
        let mut referred = BTreeSet::new();
        for (number, gpu) in recorded.into_iter().chain(published) {
            referred.insert(number);
            // The first mention wins, for a GPU as for a number, and records are chained before
            // slices.
            if !numbers.values().any(|known| *known == gpu) {
                numbers.entry(number).or_insert(gpu);
            }
        }
        referred.extend(allocated);
        // Only numbers that are still free get a stand-in, so that a new GPU does not inherit the
        // allocation that refers to one of them.
        for number in referred {
            if let Some(stand_in) = stand_in(number) {
                numbers.entry(number).or_insert(stand_in);
            }
        }
        numbers
            .into_iter()
            .map(|(number, gpu)| (gpu, number))
            .collect()
    }

    /// Returns whether two GPUs have one number: then the map is not what was written.
    pub fn is_ambiguous(&self) -> bool {
        self.0.values().collect::<BTreeSet<_>>().len() < self.0.len()
    }

    /// Forgets GPUs that are neither present nor referred to by an allocation, so that their
    /// numbers are free again. Returns whether anything changed.
    pub fn forget(&mut self, keep: impl Fn(&GpuUuid, u32) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|gpu, ordinal| keep(gpu, *ordinal));
        self.0.len() != before
    }
}

impl FromIterator<(GpuUuid, u32)> for Ordinals {
    fn from_iter<T: IntoIterator<Item = (GpuUuid, u32)>>(iter: T) -> Self {
        Self(iter.into_iter().collect())
    }
}

/// A UUID that no GPU has.
fn stand_in(number: u32) -> Option<GpuUuid> {
    format!("GPU-00000000-0000-0000-0000-{number:012x}")
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> (GpuUuid, PciAddress) {
        (
            format!("GPU-12345678-1234-1234-1234-1234567800{n:02x}")
                .parse()
                .unwrap(),
            PciAddress {
                domain: 0,
                bus: 0x40 - n,
                device: 0,
                function: 0,
            },
        )
    }

    #[test]
    fn a_fresh_node_counts_by_pci_address_and_a_lost_gpu_keeps_its_number() {
        let mut ordinals = Ordinals::default();
        assert!(ordinals.assign([gpu(1), gpu(2), gpu(3)]));
        assert_eq!(ordinals.of(&gpu(3).0), Some(0));
        assert_eq!(ordinals.of(&gpu(1).0), Some(2));
        assert!(!ordinals.assign([gpu(1)]));
        assert!(ordinals.assign([gpu(4)]));
        assert_eq!(
            ordinals.of(&gpu(4).0),
            Some(3),
            "numbers of absent GPUs are not reused"
        );
        assert!(ordinals.forget(|g, _| *g != gpu(3).0));
        assert!(ordinals.assign([gpu(5)]));
        assert_eq!(ordinals.of(&gpu(5).0), Some(0));
        assert_eq!(ordinals.gpu(0), Some(&gpu(5).0));
    }

    #[test]
    fn numbers_are_rebuilt_from_references_and_none_goes_to_another_gpu() {
        type Known<'a> = &'a [(u32, u8)];
        // What refers to numbers, and which GPU each has after GPUs 1 to 4 were numbered; 0 is a
        // stand-in.
        let cases: [(&str, Known<'_>, Known<'_>, &[u32], Known<'_>); 7] = [
            (
                "nothing: as on a fresh node",
                &[],
                &[],
                &[],
                &[(0, 4), (1, 3), (2, 2), (3, 1)],
            ),
            (
                "records",
                &[(7, 1), (0, 2)],
                &[],
                &[],
                &[(0, 2), (1, 4), (2, 3), (7, 1)],
            ),
            (
                "slices",
                &[],
                &[(3, 4), (2, 3), (1, 2), (0, 1)],
                &[0, 3],
                &[(0, 1), (1, 2), (2, 3), (3, 4)],
            ),
            (
                "both agree",
                &[(1, 1)],
                &[(1, 1), (0, 2)],
                &[1],
                &[(0, 2), (1, 1), (2, 4), (3, 3)],
            ),
            (
                "a GPU that is gone",
                &[(0, 9)],
                &[(1, 8)],
                &[],
                &[(0, 9), (1, 8), (2, 4), (3, 3), (4, 2), (5, 1)],
            ),
            (
                "an allocation of an unknown GPU",
                &[],
                &[],
                &[1],
                &[(0, 4), (1, 0), (2, 3), (3, 2), (4, 1)],
            ),
            (
                "records are right, and what only slices say belongs to a stand-in",
                &[(0, 1), (5, 2)],
                &[(0, 2), (1, 1), (2, 3)],
                &[],
                &[(0, 1), (1, 0), (2, 3), (3, 4), (5, 2)],
            ),
        ];
        for (what, recorded, published, allocated, expected) in cases {
            let known = |known: Known<'_>| {
                known
                    .iter()
                    .map(|(n, g)| (*n, gpu(*g).0))
                    .collect::<Vec<_>>()
            };
            let mut numbers =
                Ordinals::rebuild(known(recorded), known(published), allocated.iter().copied());
            numbers.assign([gpu(1), gpu(2), gpu(3), gpu(4)]);
            let expected = expected.iter().map(|(number, of)| {
                (
                    if *of == 0 {
                        stand_in(*number).unwrap()
                    } else {
                        gpu(*of).0
                    },
                    *number,
                )
            });
            assert_eq!(numbers, expected.collect(), "{what}");
            assert!(!numbers.is_ambiguous());
        }
        assert!(Ordinals::from_iter([(gpu(1).0, 3), (gpu(2).0, 3)]).is_ambiguous());
    }
}
