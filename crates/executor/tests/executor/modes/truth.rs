//! Checks of a story after every event.

use std::collections::BTreeMap;

use divvy_claims::{Phase, Record};
use divvy_model::{GpuUuid, Target, TimeSlice};

use super::Story;
use crate::mig_world::{living, sim};
use crate::world::accessors::{counts, given, is_theirs, is_whole};

impl Story {
    /// True after every event.
    pub(super) fn check(&self) {
        let (boot, records) = (self.boot(), self.records());
        let mut holds: BTreeMap<GpuUuid, Vec<_>> = BTreeMap::new();
        for record in &records {
            for hold in record.holds().filter(|hold| hold.sharing.holds()) {
                holds.entry(hold.gpu.clone()).or_default().push(hold);
            }
        }
        for holds in holds.values() {
            for (n, one) in holds.iter().enumerate() {
                for other in &holds[n + 1..] {
                    assert!(!one.conflicts(other), "{one:?} and {other:?}");
                }
            }
        }
        for record in records
            .iter()
            .filter(|r| r.phase == Phase::Prepared && r.boot == boot)
        {
            self.check_hardware(record);
        }
        for (gpu, made) in &self.foreign {
            let there: Vec<_> = living(&self.world, gpu)
                .into_iter()
                .flat_map(|(_, c)| c)
                .collect();
            assert!(
                made.iter().all(|m| there.contains(m)),
                "of {made:?} only {there:?} live"
            );
        }
        for (uid, (claim, _)) in &self.answered {
            let anew = self
                .world
                .lock()
                .api
                .get(uid)
                .is_some_and(|now| now.allocation != claim.allocation);
            assert!(
                anew || records.iter().any(|r| r.uid == *uid),
                "{uid} is in use and has no record"
            );
        }
    }

    fn check_hardware(&self, record: &Record) {
        for device in &record.devices {
            let on = sim(&self.world).edit(|e| e.gpu(&device.gpu).unwrap().facts.mig_mode);
            match device.target {
                _ if !counts(device) => {}
                Target::Partition(_) => {
                    assert!(on.is_on());
                    let made = given(record, device).expect("on record");
                    let there = living(&self.world, &device.gpu);
                    let found = there
                        .iter()
                        .flat_map(|(_, c)| c)
                        .find(|c| c.uuid == made.uuid);
                    assert!(found.is_some(), "{} does not live", device.allocated.device);
                    let theirs = self
                        .foreign
                        .get(&device.gpu)
                        .is_some_and(|f| f.contains(found.unwrap()));
                    assert_eq!(theirs, is_theirs(device), "{}", device.allocated.device);
                }
                Target::Gpu => assert!(
                    !on.is_on(),
                    "MIG mode is on under {}",
                    device.allocated.device
                ),
            }
            // A server that dies is started again by reconcile.
            if let (Some(slot), Some(runs)) = (device.mps, self.world.lock().mps.get(&device.gpu)) {
                assert_eq!(slot.server, *runs, "of {}", device.gpu);
            }
            // Shares have that of the policy, which reconcile brings to them.
            if let Some(slice) = device.time_slice.filter(|_| is_whole(device)) {
                let set = self.world.lock().slices.clone().unwrap();
                let set = set.get(&device.gpu).copied().unwrap_or(TimeSlice::Default);
                assert_eq!(set, slice, "of {}", device.gpu);
            }
        }
    }
}
