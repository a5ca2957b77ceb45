//! Where the GPUs of the node were last seen, so that one that is gone is missed. Pure.

use std::collections::BTreeMap;

use divvy_model::{GpuUuid, PciAddress};

/// The place of each GPU that belongs to the node.
pub(super) type Slots = BTreeMap<GpuUuid, PciAddress>;

/// Notes where the GPUs are now. A GPU that was never seen before replaces the one that was in its
/// place, as a new board does, or the GPU of a virtual machine that was started on another host. A
/// known GPU that only moved does not: a machine may number its buses anew when a board is dead.
pub(super) fn see(slots: &mut Slots, listed: Slots) {
    let is_new = |gpu: &GpuUuid| !slots.contains_key(gpu);
    let new = listed.iter().filter(|(gpu, _)| is_new(gpu));
    let taken: Vec<PciAddress> = new.map(|(_, slot)| *slot).collect();
    slots.retain(|gpu, slot| listed.contains_key(gpu) || !taken.contains(slot));
    slots.extend(listed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(gpu: u32, bus: u8) -> (GpuUuid, PciAddress) {
        let uuid = format!("GPU-12345678-1234-1234-1234-12345678000{gpu}");
        let slot = format!("0000:{bus:02x}:00.0");
        (uuid.parse().unwrap(), slot.parse().unwrap())
    }

    #[test]
    fn only_a_gpu_that_is_new_replaces_the_one_in_whose_place_it_is() {
        let mut slots = Slots::new();
        see(&mut slots, [at(1, 1), at(2, 2), at(3, 3)].into());
        // The second is dead, and the buses are numbered anew.
        see(&mut slots, [at(1, 1), at(3, 2)].into());
        assert_eq!(slots, [at(1, 1), at(2, 2), at(3, 2)].into());
        // A new board elsewhere, then one in its place.
        see(&mut slots, [at(1, 1), at(3, 3), at(4, 4)].into());
        assert!(slots.contains_key(&at(2, 2).0));
        see(&mut slots, [at(1, 1), at(3, 3), at(4, 4), at(5, 2)].into());
        let all = [at(1, 1), at(3, 3), at(4, 4), at(5, 2)];
        assert_eq!(slots, all.into());
    }
}
