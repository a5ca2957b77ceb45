//! The events of a story, one function each.

use std::collections::BTreeSet;

use divvy_claims::{Phase, PodRef, Record, Stored};
use divvy_executor::{Folder, LockName};
use divvy_model::mig::{PartitionName, Placement};
use divvy_model::{DeviceKind, GpuUuid};

use super::{GPUS, Story, is_lost, overlap, slices};
use crate::mig_world::{claim_of, living, sim};
use crate::story::uid;
use crate::world::accessors::{given, is_under_way, is_whole, place_of};

impl Story {
    /// A device at random, whole or any partition at any place.
    pub(super) fn any_device(&mut self) -> String {
        let number = self.chance.below(GPUS);
        if self.chance.one_in(6) {
            return format!("gpu-{number}");
        }
        let gpu = self.world.gpu(number);
        let inventory = self.world.lock().inventory.clone().unwrap();
        let caps = &inventory.gpus[&gpu].mig.as_ref().unwrap().capabilities;
        let plain: Vec<_> = caps
            .placements()
            .filter(|(profile, _)| !profile.variant().is_rare())
            .collect();
        let (profile, placement) = plain[self.chance.below(plain.len())];
        let name = caps.name(profile).unwrap().to_string();
        let number = u32::try_from(number).unwrap();
        PartitionName::new(number, &name, profile.id, placement.start).to_string()
    }

    /// The scheduler: devices that overlap with no claim in the API.
    pub(super) fn allocate(&mut self, name: &str) {
        if self.world.lock().api.contains_key(&uid(name)) {
            return;
        }
        let api = self.world.lock().api.clone();
        let mut taken: Vec<_> = api
            .values()
            .flat_map(|c| &c.allocation.results)
            .map(|r| slices(&self.world, r.device.as_str()))
            .collect();
        let mut devices = Vec::new();
        for _ in 0..=self.chance.below(2) {
            let device = self.any_device();
            let wants = slices(&self.world, &device);
            if !taken.iter().any(|t| overlap(t, &wants)) {
                taken.push(wants);
                devices.push(device);
            }
        }
        if devices.is_empty() {
            return;
        }
        self.allocations += 1;
        let names: Vec<_> = devices.iter().map(String::as_str).collect();
        let new = claim_of(name, &names, &format!("t{}", self.allocations));
        self.say(format!("allocate {name} {devices:?}"));
        self.world.lock().api.insert(new.uid.clone(), new);
    }

    pub(super) fn prepare(&mut self, name: &str) {
        let Some((wanted, answer)) = self.ask_to_prepare(name) else {
            return;
        };
        // Allocated anew: what was answered for the earlier allocation is over as soon as that is
        // undone.
        let undone = !self.world.lock().records().contains_key(&wanted.uid);
        if undone
            && self
                .answered
                .get(&wanted.uid)
                .is_some_and(|(c, _)| c.allocation != wanted.allocation)
        {
            self.answered.remove(&wanted.uid);
            self.lingering.remove(&wanted.uid);
        }
        if let Ok(prepared) = answer
            && !self.world.lock().dead
        {
            self.forget_released();
            self.note_answer(wanted, prepared);
        }
        self.recover();
    }

    pub(super) fn unprepare(&mut self, name: &str) {
        self.ask_to_unprepare(name);
        self.recover();
    }

    pub(super) fn reconcile(&mut self) {
        self.say("reconcile".to_owned());
        let report = self.executor.reconcile(&self.world.view());
        let foreign = self.executor.foreign();
        self.say(format!("    {:?}", report.events));
        if !self.world.lock().dead {
            // A GPU that another call works on is left for the next look.
            let is_seen = |gpu: &GpuUuid| {
                let lock = LockName::Gpu(gpu.clone());
                !is_lost(&self.world, gpu) && !self.world.lock().busy.contains(&lock)
            };
            let reported: BTreeSet<_> = foreign
                .iter()
                .flat_map(|(gpu, i)| i.iter().map(move |i| (gpu.clone(), i.id)))
                .filter(|(gpu, _)| is_seen(gpu))
                .collect();
            let made: BTreeSet<_> = self
                .foreign
                .iter()
                .flat_map(|(gpu, made)| made.iter().map(move |c| (gpu.clone(), c.gpu_instance)))
                .filter(|(gpu, _)| is_seen(gpu))
                .collect();
            let busy = !self.world.lock().mig_late.is_empty();
            assert!(
                busy || reported == made,
                "reported {reported:?}, made {made:?}"
            );
        }
        self.recover();
        let records = self.world.lock().records();
        let api = self.world.lock().api.clone();
        let gone: Vec<_> = self
            .answered
            .keys()
            .filter(|uid| !records.contains_key(*uid))
            .cloned()
            .collect();
        for uid in gone {
            let (answered, _) = self.answered.remove(&uid).unwrap();
            let live = api
                .get(&uid)
                .is_some_and(|c| c.allocation == answered.allocation);
            assert!(
                !live || self.lingering.contains(&uid),
                "reconcile undid {uid}, which is in use"
            );
        }
        self.forget_released();
    }

    /// An admin makes an instance by hand, where nothing of ours is open.
    pub(super) fn make_foreign(&mut self) {
        let device = self.any_device();
        let kind = DeviceKind::parse(&device.parse().unwrap()).unwrap();
        let Some(name) = kind.partition() else {
            return;
        };
        let (gpu, _) = slices(&self.world, &device);
        let open = self
            .world
            .lock()
            .records()
            .values()
            .any(|stored| match stored {
                Stored::Fine(r) => is_under_way(r),
                _ => true,
            });
        if open || !self.world.lock().mig_late.is_empty() {
            return;
        }
        // An administrator who turns MIG mode on under a whole GPU's holder takes the GPU away;
        // divvy cannot repair that.
        let whole = self
            .world
            .lock()
            .records()
            .values()
            .filter_map(Stored::fine)
            .any(|record| record.devices.iter().any(|d| d.gpu == gpu && is_whole(d)));
        let sim = sim(&self.world);
        if !whole && self.chance.one_in(4) {
            drop(sim.edit(|e| e.set_mig_mode(&gpu, true)));
        }
        if let Ok(made) = sim.make_foreign_instance(&gpu, name.profile, name.start) {
            self.say(format!("a foreign {device}: {made:?}"));
            self.foreign.entry(gpu).or_default().push(made);
        }
    }

    pub(super) fn remove_foreign(&mut self, which: impl Fn(&GpuUuid, Placement) -> bool) {
        for (gpu, made) in &mut self.foreign {
            if is_lost(&self.cast.world, gpu) {
                continue;
            }
            let there = living(&self.cast.world, gpu);
            made.retain(|foreign| {
                let (instance, _) = there.iter().find(|(_, c)| c.contains(foreign)).unwrap();
                if which(gpu, instance.placement) {
                    sim(&self.cast.world).edit(|e| {
                        e.destroy_compute_instance(gpu, instance.id, foreign.id)
                            .unwrap();
                        e.destroy_gpu_instance(gpu, instance.id).unwrap();
                    });
                    return false;
                }
                true
            });
        }
        self.foreign.retain(|_, made| !made.is_empty());
    }

    /// A container of some claim starts to compute.
    pub(super) fn start_process(&mut self) {
        let running: Vec<_> = self
            .answered
            .values()
            .filter(|(c, _)| !self.lingering.contains(&c.uid))
            .cloned()
            .collect();
        if running.is_empty() {
            return;
        }
        let (claim, _) = &running[self.chance.below(running.len())];
        let records = self.world.lock().records();
        let Some(Stored::Fine(record)) = records.get(&claim.uid) else {
            return;
        };
        for device in &record.devices {
            let sim = sim(&self.world);
            match given(record, device) {
                Some(made) => {
                    let there = living(&self.world, &device.gpu);
                    if there
                        .iter()
                        .any(|(_, c)| c.iter().any(|c| c.uuid == made.uuid))
                    {
                        sim.start_process_in(&device.gpu, made.gi, 100);
                    }
                }
                None if place_of(device).is_none() => {
                    sim.start_process(&device.gpu, 100);
                }
                None => {}
            }
        }
        self.say(format!("process of {}", claim.name));
        self.world
            .lock()
            .pods
            .insert(100, format!("pod-{}", claim.name));
    }

    /// A file is torn or lost while containers run. Whatever is asked next, all is known again
    /// after that.
    pub(super) fn damage(&mut self) {
        let trouble = {
            let m = self.world.lock();
            let faults = m.hardware_fault.is_some() || m.process_error.is_some();
            faults || !m.mig_late.is_empty() || !m.busy.is_empty()
        };
        if trouble || (0..GPUS).any(|n| is_lost(&self.world, &self.world.gpu(n))) {
            return;
        }
        let records = self.world.lock().records();
        let api = self.world.lock().api.clone();
        let live = |stored: &Stored<Record>| {
            let record = stored.fine()?;
            let same = api
                .get(&record.uid)
                .is_some_and(|claim| record.is_of(&claim.allocation));
            let made = record
                .devices
                .iter()
                .any(|device| place_of(device).is_some());
            (same && record.phase == Phase::Prepared).then(|| (record.name.clone(), made))
        };
        let live: Vec<_> = records.values().filter_map(live).collect();
        if live.is_empty() {
            return;
        }
        let (name, made) = live[self.chance.below(live.len())].clone();
        let number = self.chance.below(GPUS);
        let gpu = self.world.gpu(number);
        let (folder, file, torn) = match self.chance.below(3) {
            0 => (Folder::Gpus, format!("{gpu}.json"), true),
            1 if made => (Folder::Claims, format!("uid-{name}.json"), false),
            _ => (Folder::Claims, format!("uid-{name}.json"), true),
        };
        let Some(bytes) = self.world.lock().file(folder, &file) else {
            return;
        };
        self.say(format!("{file} is {}", if torn { "torn" } else { "lost" }));
        let cut = self.chance.below(bytes.len());
        self.world
            .lock()
            .put(folder, &file, torn.then(|| &bytes[..cut]));
        match self.chance.below(5) {
            0 => self.restart(),
            1 => self.prepare(&name),
            2 => self.unprepare(&name),
            3 => {
                let before = self.world.lock().api.remove(&uid(&name)).unwrap();
                self.allocate(&name);
                // Where nothing is free for it, it keeps what it has.
                let mut m = self.world.lock();
                m.api.entry(uid(&name)).or_insert(before);
                drop(m);
                self.prepare(&name);
            }
            _ => {}
        }
        self.recover();
        self.world.no_crash();
        self.reconcile();
        self.reconcile();
        // As the one who publishes does.
        self.world.grant(&self.executor, true);
        for (uid, stored) in self.world.lock().records() {
            assert!(stored.fine().is_some(), "{uid}: {stored:?}");
        }
        assert!(
            self.executor.fences().unwrap().is_empty() || !self.world.lock().mig_late.is_empty()
        );
    }

    /// More pods use a claim, and the one it was prepared for is gone.
    pub(super) fn other_pods(&mut self, name: &str) {
        let later = PodRef {
            name: "later".to_owned(),
            uid: format!("pod-later-{name}"),
        };
        if let Some(claim) = self.world.lock().api.get_mut(&uid(name)) {
            claim.pods = vec![later];
        }
    }

    pub(super) fn gpus_come_back(&self) {
        self.say("GPUs come back".to_owned());
        for number in 0..GPUS {
            sim(&self.world).restore_gpu(&self.world.gpu(number));
        }
    }

    pub(super) fn quiet(&self) {
        sim(&self.world).edit(|e| {
            e.end_process(100);
            for index in 0..GPUS {
                e.gpu_at(index).unwrap().clients.clear();
            }
        });
    }
}
