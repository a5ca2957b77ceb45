//! Ordinals: the stable number in a device's name, kept per GPU UUID on disk so that `gpu-3` stays the same card
//! when another one is lost, added or replaced (DESIGN section 1, "names are stable").

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{GpuUuid, PciAddress};

/// Which number each GPU has. A number is never given to another GPU while the first may still be referred to.
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
        self.0.iter().find(|(_, o)| **o == ordinal).map(|(gpu, _)| gpu)
    }

    /// All GPUs with their ordinals, by UUID.
    pub fn iter(&self) -> impl Iterator<Item = (&GpuUuid, u32)> {
        self.0.iter().map(|(gpu, ordinal)| (gpu, *ordinal))
    }

    /// Gives each GPU that has none the lowest free ordinal, in order of PCI address (so that a fresh node counts
    /// as NVML does). GPUs that are gone keep theirs. Returns whether anything changed.
    pub fn assign(&mut self, present: impl IntoIterator<Item = (GpuUuid, PciAddress)>) -> bool {
        let mut fresh: Vec<_> = present.into_iter().filter(|(gpu, _)| !self.0.contains_key(gpu)).collect();
        fresh.sort_by(|a, b| (a.1, &a.0).cmp(&(b.1, &b.0)));
        fresh.dedup_by(|a, b| a.0 == b.0);
        let mut taken: BTreeSet<u32> = self.0.values().copied().collect();
        let changed = !fresh.is_empty();
        for (gpu, _) in fresh {
            let free = (0..=u32::MAX).find(|n| !taken.contains(n)).unwrap_or(u32::MAX);
            taken.insert(free);
            self.0.insert(gpu, free);
        }
        changed
    }

    /// Forgets GPUs that are neither present nor referred to by an allocation, so that their numbers are free
    /// again. Returns whether anything changed.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> (GpuUuid, PciAddress) {
        (
            format!("GPU-12345678-1234-1234-1234-1234567800{n:02x}").parse().unwrap(),
            PciAddress { domain: 0, bus: 0x40 - n, device: 0, function: 0 },
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
        assert_eq!(ordinals.of(&gpu(4).0), Some(3), "numbers of absent GPUs are not reused");
        assert!(ordinals.forget(|g, _| *g != gpu(3).0));
        assert!(ordinals.assign([gpu(5)]));
        assert_eq!(ordinals.of(&gpu(5).0), Some(0));
        assert_eq!(ordinals.gpu(0), Some(&gpu(5).0));
    }
}
