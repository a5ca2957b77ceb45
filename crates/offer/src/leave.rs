//! The first half of a withdrawal: what is published stays for a moment and nobody is given it any more.

use std::collections::BTreeSet;

use divvy_api::names::taints as keys;
use divvy_model::DeviceName;

use crate::settle::given_twice;
use crate::validate::MAX_TAINTS;
use crate::{Pool, Taint};

/// `published` with the taints that its devices would have in `offered`, and with a taint on the devices that are
/// `leaving`: an update in place. The scheduler may have given one of them out before it sees the taint, so who holds
/// them is to be asked after it.
#[must_use]
pub fn taint_leaving(published: &Pool, offered: &Pool, leaving: &BTreeSet<DeviceName>) -> Pool {
    let mut pool = published.clone();
    for device in pool.slices.iter_mut().flat_map(|slice| &mut slice.devices) {
        if let Some(next) = offered.device(&device.name) {
            // A GPU that was given out twice is published without counters, and has only this to keep claims off.
            let fence = device.taints.iter().find(|taint| **taint == given_twice()).cloned();
            device.taints.clone_from(&next.taints);
            if let Some(fence) = fence.filter(|fence| !device.taints.contains(fence)) {
                device.taints.retain(|other| (&other.key, other.effect) != (&fence.key, fence.effect));
                device.taints.push(fence);
                device.taints.sort();
            }
        } else if leaving.contains(&device.name)
            && device.taints.len() < MAX_TAINTS
            && !device.taints.iter().any(|taint| taint.key == keys::WITHDRAWN)
        {
            device.taints.push(Taint::no_schedule(keys::WITHDRAWN, Some("not-offered")));
            device.taints.sort();
        }
    }
    pool
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Slice};

    fn pool(devices: &[(&str, &[&str])]) -> Pool {
        let devices = devices.iter().map(|(name, taints)| Device {
            taints: taints.iter().map(|key| Taint::no_schedule(*key, Some("not-offered"))).collect(),
            ..Device::new(name.parse().unwrap())
        });
        let slices = vec![Slice { devices: devices.collect(), counter_sets: Vec::new() }];
        Pool { name: "p".to_owned(), slices }
    }

    #[test]
    fn what_has_no_counters_because_it_was_given_out_twice_stays_fenced() {
        let mut published = pool(&[("gpu-0", &[]), ("gpu-1", &[])]);
        for device in published.slices.iter_mut().flat_map(|slice| &mut slice.devices) {
            device.taints = vec![given_twice()];
        }
        let offered = pool(&[("gpu-0", &[]), ("gpu-1", &["x/b"])]);
        let pool = taint_leaving(&published, &offered, &BTreeSet::new());
        assert!(pool.devices().all(|device| device.taints.contains(&given_twice())), "{pool:?}");
        assert_eq!(pool.devices().map(|device| device.taints.len()).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn only_taints_change() {
        let published = pool(&[("gpu-0", &["x/a"]), ("gpu-1", &["x/a"]), ("gpu-2", &[])]);
        let offered = pool(&[("gpu-2", &["x/b"]), ("gpu-3", &[])]);
        let leaving = BTreeSet::from(["gpu-0".parse().unwrap()]);
        let expected =
            pool(&[("gpu-0", &[keys::WITHDRAWN, "x/a"]), ("gpu-1", &["x/a"]), ("gpu-2", &["x/b"])]);
        let once = taint_leaving(&published, &offered, &leaving);
        assert_eq!(once, expected);
        assert_eq!(taint_leaving(&once, &offered, &leaving), expected);
    }
}
