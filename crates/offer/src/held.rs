//! Devices that stay published without being offered: devices of GPUs that do not answer, and those
//! that claims hold.
//!
//! Counters are charged only for devices that are still published, so a device that is allocated is
//! never withdrawn.

use divvy_forms::{Builder, Said, definition, partition, whole};
use divvy_model::mig::{MigCapabilities, PartitionName};
use divvy_model::{DeviceKind, DeviceName, GpuUuid, NamedTarget};

use crate::carve::{Carving, is_of};
use crate::taints::{Standing, Subject};
use crate::{Device, Finding, Pool};

impl Carving<'_> {
    /// GPUs that NVML lists and cannot read, or that only health still knows: published as they
    /// were, tainted, so that one bad minute does not withdraw them and people can see what is
    /// wrong.
    pub(crate) fn gpus_that_do_not(&mut self) {
        let input = self.input;
        let unreadable = input
            .inventory
            .problems
            .iter()
            .map(|p| (&p.gpu, Some(p.error.to_string())));
        let lost = input
            .taints
            .iter()
            .filter(|(_, t)| !t.is_empty())
            .map(|(gpu, _)| (gpu, None));
        // Unreadable ones first: a GPU that is both unreadable and tainted is reported as
        // unreadable.
        for (uuid, error) in unreadable.chain(lost) {
            if input.inventory.gpus.contains_key(uuid) {
                continue;
            }
            let Some(ordinal) = input.ordinals.of(uuid) else {
                continue;
            };
            if self.cards.contains_key(&ordinal) {
                continue;
            }
            // Its content as published last. To withdraw it would cost the claims their counters,
            // to change it would need facts that cannot be read.
            let devices = self.last_known(ordinal, uuid);
            let mut standing = Standing::AsItWas;
            if let Some(error) = error {
                let published = !devices.is_empty();
                self.findings.push(Finding::Unreadable {
                    gpu: uuid.clone(),
                    error,
                    published,
                });
                standing = Standing::Unreadable;
            }
            for (kind, device) in devices {
                self.publish(&kind, device, &of(&kind, uuid).standing(standing));
            }
        }
    }

    /// Devices that claims have on GPUs that are gone.
    pub(crate) fn held_without_gpu(&mut self) {
        let input = self.input;
        for name in input.staying() {
            let is_held = input.held.contains(name);
            // A device without a GPU that has its number cannot be published: nothing says what it
            // would draw on. It is only reported.
            let kind = DeviceKind::parse(name).ok();
            let known = kind.and_then(|kind| Some((input.ordinals.gpu(kind.ordinal())?, kind)));
            let Some((uuid, kind)) = known else {
                if is_held {
                    self.findings.push(Finding::HeldUnknown {
                        device: name.clone(),
                    });
                }
                continue;
            };
            // Devices of GPUs that answer, or did, are there from the phases before.
            let there = self
                .cards
                .get(&kind.ordinal())
                .is_some_and(|card| card.has(name));
            // Admin access excludes nothing.
            if there || !kind.sharing.holds() {
                continue;
            }
            if is_held {
                self.findings.push(Finding::HeldAndGone {
                    device: name.clone(),
                    recorded: input.recorded.contains(name),
                });
            }
            self.kept.insert(name.clone());
            let device = self.previous_or_bare(&kind, uuid);
            self.publish(&kind, device, &of(&kind, uuid).standing(Standing::Gone));
        }
    }

    /// Returns the devices of a GPU that does not answer: those published last, and those that
    /// claims hold or may hold. A device that is held and was not published before (a restart) is
    /// as unreadable as one that was.
    fn last_known(&self, ordinal: u32, uuid: &GpuUuid) -> Vec<(DeviceKind, Device)> {
        let last = self.input.previous.into_iter().flat_map(Pool::devices);
        let kind_of = |name: &DeviceName| {
            DeviceKind::parse(name)
                .ok()
                .filter(|kind| kind.ordinal() == ordinal)
        };
        let mut devices: Vec<_> = last
            .filter(|device| is_of(device, uuid))
            .filter_map(|device| Some((kind_of(&device.name)?, device.clone())))
            .collect();
        for kind in self.input.staying().filter_map(kind_of) {
            let name = kind.device_name();
            if kind.sharing.holds() && !devices.iter().any(|(_, d)| d.name == name) {
                let device = self.previous_or_bare(&kind, uuid);
                devices.push((kind, device));
            }
        }
        devices
    }

    pub(crate) fn previous_or_bare(&self, kind: &DeviceKind, uuid: &GpuUuid) -> Device {
        let name = kind.device_name();
        let previous = self
            .input
            .previous
            .and_then(|previous| previous.device(&name));
        previous
            .filter(|device| is_of(device, uuid))
            .cloned()
            .unwrap_or_else(|| bare(kind, uuid))
    }

    fn publish(&mut self, kind: &DeviceKind, device: Device, subject: &Subject<'_>) {
        let stays = self.stays(&device.name);
        let taints = self.taints(subject);
        let Some(device) = self.tainted(subject.gpu, device, taints, stays) else {
            return;
        };
        self.card(kind.ordinal()).add(kind.form(), device);
    }

    /// Partitions, and shares of them, that claims have and of which it is not known where on the
    /// GPU they are.
    pub(crate) fn lost_partitions(
        &self,
        ordinal: u32,
        caps: Option<&MigCapabilities>,
    ) -> Vec<DeviceKind> {
        let held = self.held_partitions.get(&ordinal).into_iter().flatten();
        let known = |kind: &&DeviceKind| {
            let place = |name: &PartitionName| caps?.placement(name.profile, name.start);
            kind.partition().and_then(place).is_some()
        };
        held.filter(|kind| !known(kind)).cloned().collect()
    }

    /// A device that a claim has, or may have, of which no more can be said than was: published as
    /// it was.
    pub(crate) fn publish_kept(&mut self, kind: &DeviceKind, why: &str, subject: Subject<'_>) {
        // Without counters: it is not known what a partition takes, and a guess could bring one
        // below zero. The taints of its GPU keep claims off the rest.
        self.keep(&kind.device_name(), why.to_owned());
        let mut device = self.previous_or_bare(kind, subject.gpu);
        device.consumes.clear();
        self.publish(
            kind,
            device,
            &subject.standing(Standing::Withdrawn("not-offered")),
        );
    }
}

/// Returns what the taints of a device depend on whose GPU does not answer.
fn of<'a>(kind: &DeviceKind, gpu: &'a GpuUuid) -> Subject<'a> {
    Subject::offered(gpu, kind.form())
}

/// Returns a device of a GPU that nothing is known about but its UUID.
fn bare(kind: &DeviceKind, uuid: &GpuUuid) -> Device {
    let plain = match &kind.target {
        NamedTarget::Gpu { ordinal } => whole::bare(*ordinal, uuid),
        NamedTarget::Partition(_) => {
            let mut nothing = Vec::new();
            let mut to = Builder::new(kind.device_name(), &mut nothing);
            partition::identify(&mut to, uuid);
            to.device
        }
    };
    match definition(kind.form()) {
        Some(form) => form.described(kind, plain, Said::default()),
        None => plain,
    }
}
