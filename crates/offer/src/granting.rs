//! The pool to publish while prepare does not know yet what it may do for a GPU.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::attributes;
use divvy_model::{DeviceKind, GpuUuid};

use crate::carve::GpuOffer;
use crate::counters::set_name;
use crate::taints::{add, not_granted};
use crate::{AttributeValue, CounterSet, Device, Pool, layout};

impl Pool {
    /// Returns this pool where the GPUs in `waiting` are as `published` has them: their grants are
    /// not stored, so their content is not to change yet. Taints that this pool adds go out; none
    /// is taken away, or a device could be allocated with the limits of earlier rules. A GPU of
    /// which nothing is published comes as it is here, with a taint of its own: claims may hold its
    /// devices from before this process began.
    #[must_use]
    pub fn held_back(&self, published: &Self, waiting: &BTreeSet<GpuUuid>) -> Self {
        let waiting = self.ordinals_of(published, waiting);
        let mut cards = BTreeMap::<u32, GpuOffer>::new();
        let mut put = |kind: &DeviceKind, device: Device| {
            let card = cards.entry(kind.ordinal()).or_default();
            card.add(kind.form(), device);
        };
        // GPUs that wait and are published: their devices as they are, with every taint that the
        // new pool has for them. A taint protects; to take one away needs the grant.
        let known: BTreeSet<u32> = published.kinds().map(|(kind, _)| kind.ordinal()).collect();
        for (kind, device) in published.kinds() {
            if waiting.contains(&kind.ordinal()) {
                let mut device = device.clone();
                for taint in self
                    .device(&device.name)
                    .into_iter()
                    .flat_map(|d| &d.taints)
                {
                    add(&mut device.taints, taint.clone());
                }
                put(&kind, device);
            }
        }
        // All other GPUs as the new pool has them. One that waits and is not published yet gets a
        // taint of its own: left out it would look withdrawn to claims that hold it.
        for (kind, device) in self.kinds() {
            let (waits, known) = (
                waiting.contains(&kind.ordinal()),
                known.contains(&kind.ordinal()),
            );
            let mut device = device.clone();
            if waits && !known && kind.sharing.holds() {
                add(&mut device.taints, not_granted());
            }
            if !waits || !known {
                put(&kind, device);
            }
        }
        // The counter set of a GPU has to be of the same pool as its devices: they name counters of
        // it.
        for (ordinal, card) in &mut cards {
            let from = if waiting.contains(ordinal) && known.contains(ordinal) {
                published
            } else {
                self
            };
            card.counter_set = from.counter_set(&set_name(*ordinal)).cloned();
        }
        Self {
            name: self.name.clone(),
            slices: layout::slices(cards),
        }
    }

    /// Returns the numbers of these GPUs, by the devices in either pool.
    fn ordinals_of(&self, other: &Self, gpus: &BTreeSet<GpuUuid>) -> BTreeSet<u32> {
        let of = |device: &Device| match device.attributes.get(attributes::GPU_UUID) {
            Some(AttributeValue::String(uuid)) => gpus.iter().any(|gpu| gpu.as_str() == uuid),
            _ => false,
        };
        let all = self.kinds().chain(other.kinds());
        all.filter(|(_, device)| of(device))
            .map(|(kind, _)| kind.ordinal())
            .collect()
    }

    fn kinds(&self) -> impl Iterator<Item = (DeviceKind, &Device)> {
        self.devices()
            .filter_map(|device| Some((DeviceKind::parse(&device.name).ok()?, device)))
    }

    fn counter_set(&self, name: &str) -> Option<&CounterSet> {
        let sets = self.slices.iter().flat_map(|slice| &slice.counter_sets);
        sets.into_iter().find(|set| set.name == name)
    }
}

#[cfg(test)]
mod tests {
    use divvy_gpu_sim::SimNode;
    use divvy_model::{Inventory, Ordinals};

    use super::*;
    use crate::{GpuRules, Input, Modes, ServerFeatures, Taint, TaintEffect, carve, validate};

    fn node(gpus: &str) -> (Inventory, Ordinals) {
        let inventory = SimNode::parse(gpus).unwrap().inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        (inventory, ordinals)
    }

    fn pool(inventory: &Inventory, ordinals: &Ordinals) -> Pool {
        let features =
            ServerFeatures::default().observe(crate::KubeVersion::parse("v1.37.1").unwrap());
        carve(&Input::plain("n", inventory, ordinals, &features)).pool
    }

    fn change(pool: &mut Pool, name: &str, change: impl Fn(&mut Device)) {
        let devices = pool.slices.iter_mut().flat_map(|slice| &mut slice.devices);
        devices
            .filter(|device| device.name.as_str() == name)
            .for_each(change);
    }

    fn taint(key: &str) -> Taint {
        Taint {
            key: format!("gpu.divvy.dev/{key}"),
            value: None,
            effect: TaintEffect::NoSchedule,
        }
    }

    #[test]
    fn a_waiting_gpu_keeps_its_content_and_the_others_are_new() {
        let (inventory, ordinals) = node("h100x2");
        let mut published = pool(&inventory, &ordinals);
        for name in ["gpu-0", "gpu-1"] {
            change(&mut published, name, |device| {
                device.taints = vec![taint("withdrawn")];
            });
        }
        let mut next = pool(&inventory, &ordinals);
        for name in ["gpu-0", "gpu-1"] {
            change(&mut next, name, |device| {
                device.capacity.clear();
                device.taints = vec![taint("lost")];
            });
        }
        let waiting = BTreeSet::from([ordinals.gpu(0).unwrap().clone()]);
        let both = next.held_back(&published, &waiting);
        validate(&both).unwrap();
        let of = |name: &str| both.device(&name.parse().unwrap()).unwrap();
        let before = published.device(&"gpu-0".parse().unwrap()).unwrap();
        assert_eq!(of("gpu-0").capacity, before.capacity);
        assert_eq!(of("gpu-0").taints, [taint("lost"), taint("withdrawn")]);
        assert!(of("gpu-1").capacity.is_empty());
        assert_eq!(of("gpu-1").taints, [taint("lost")]);
        assert_eq!(next.held_back(&published, &BTreeSet::new()), next);
    }

    #[test]
    fn a_gpu_that_waits_and_was_not_published_comes_with_a_taint() {
        let (inventory, ordinals) = node("h100x2");
        let next = pool(&inventory, &ordinals);
        let nothing = Pool {
            slices: Vec::new(),
            ..next.clone()
        };
        let waiting = BTreeSet::from([ordinals.gpu(1).unwrap().clone()]);
        let both = next.held_back(&nothing, &waiting);
        let of = |name: &str| both.device(&name.parse().unwrap()).unwrap();
        assert_eq!(of("gpu-0").taints, []);
        assert_eq!(of("gpu-1").taints, [not_granted()]);
    }

    /// Monitoring must come to a GPU whatever becomes of its grant.
    #[test]
    fn a_device_for_admin_access_waits_for_no_grant() {
        let (inventory, ordinals) = node("h100x1");
        let gpu = ordinals.gpu(0).unwrap();
        // It is there beside uses that several claims have.
        let rules = GpuRules {
            modes: Modes::everything(),
            ..GpuRules::default()
        };
        let features =
            ServerFeatures::default().observe(crate::KubeVersion::parse("v1.37.1").unwrap());
        let next = carve(&Input {
            rules: &[(gpu.clone(), rules)].into(),
            ..Input::plain("n", &inventory, &ordinals, &features)
        });
        let nothing = Pool {
            slices: Vec::new(),
            ..next.pool.clone()
        };
        let both = next.pool.held_back(&nothing, &[gpu.clone()].into());
        let (admin, others): (Vec<_>, Vec<_>) =
            (both.kinds()).partition(|(kind, _)| !kind.sharing.holds());
        assert_eq!(admin.len(), 1);
        for (_, device) in admin {
            assert_eq!(device.taints, [], "{}", device.name);
        }
        assert!(!others.is_empty());
        for (_, device) in others {
            assert_eq!(device.taints, [not_granted()], "{}", device.name);
        }
    }
}
