//! Devices of GPUs that answer: every form that is offered, and those that claims hold.

use divvy_forms::whole::{self, Links};
use divvy_forms::{Definition, FORMS, definition};
use divvy_model::{DeviceKind, Form, Gpu, GpuTarget, GpuUuid, ShareUnit, TargetKind};

use crate::carve::Carving;
use crate::counters::Budget;
use crate::modes::{Choice, fits_mig_mode};
use crate::partition::Source;
use crate::settle::CounterSets;
use crate::taints::{Standing, Subject, beside_use};
use crate::{Device, Finding};

/// A GPU that answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadableGpu<'a> {
    pub(crate) ordinal: u32,
    pub(crate) uuid: &'a GpuUuid,
    pub(crate) gpu: &'a Gpu,
}

impl Carving<'_> {
    /// Publishes them all.
    pub(crate) fn gpus_that_answer(&mut self) {
        let input = self.input;
        let domains = input.inventory.nvlink_domains();
        let pairs = input.inventory.nvlink_pairs();
        for (uuid, gpu) in &input.inventory.gpus {
            // A new GPU has its number in a moment.
            let Some(ordinal) = input.ordinals.of(uuid) else {
                continue;
            };
            let links = Links {
                domain: domains.get(uuid).map(String::as_str),
                pair: pairs.get(uuid).map(String::as_str),
            };
            self.make_gpu(&ReadableGpu { ordinal, uuid, gpu }, &links);
        }
    }

    /// Publishes the forms of a GPU that answers.
    fn make_gpu(&mut self, one: &ReadableGpu<'_>, links: &Links<'_>) {
        let ReadableGpu { ordinal, uuid, .. } = *one;
        let rules = self.input.rules_of(uuid);
        let caps = self.input.capabilities.get(uuid);
        // Phase 1: what the GPU may be offered as. The budget first, since a GPU without counters
        // cannot be cut; partitions that claims hold and that have no known place fence the others.
        let budget = caps.and_then(|caps| self.budget(ordinal, uuid, caps));
        let mut choice = self.choose(one, rules, budget.is_some());
        // While shares in another unit are there, none is given out in the new one.
        let unit = self.input.share_unit(uuid);
        if unit != rules.shares.unit {
            choice.modes.retain(|mode| !self.input.has_units(*mode));
        }
        let lost = self.lost_partitions(ordinal, if budget.is_some() { caps } else { None });
        let (guard, unknown_held) = (choice.guard, !lost.is_empty());
        let subject = |mode| Subject {
            guard,
            unknown_held,
            ..Subject::offered(uuid, mode)
        };

        // Phase 2: partitions that are offered or held, also those without a known place.
        if let (Some(caps), Some(budget)) = (caps, &budget) {
            let is_of_partition = |form: &&Form| form.target == TargetKind::Partition;
            let offered = choice.modes.iter().filter(is_of_partition);
            let subject = subject(Form::PARTITIONS);
            self.partitions(&Source {
                one,
                caps,
                budget,
                rules,
                subject,
                unit,
                offered: offered.copied().collect(),
            });
        }
        for kind in lost {
            let subject = subject(kind.form());
            self.publish_kept(&kind, "its profile is unknown", subject);
        }

        // Phase 3: each form of the whole GPU that is offered or held goes onto the card.
        let made = self.of_whole_gpu(one, links, unit, budget.as_ref());
        let is_share_of_gpu =
            |form: &Form| form.sharing.is_shared() && form.target == TargetKind::Gpu;
        let is_any_reserved = made.iter().any(|(_, device)| device.is_none());
        if is_any_reserved && choice.modes.iter().any(is_share_of_gpu) {
            self.findings
                .push(Finding::NothingToShare { gpu: uuid.clone() });
        }
        let mut beside = Vec::new();
        for (kind, device) in made {
            let form = kind.form();
            match device {
                None if self.stays(&kind.device_name()) => {
                    let why = "its rule reserves all of the GPU's memory";
                    self.publish_kept(&kind, why, subject(form));
                }
                None => {}
                // Without a use of its own: see the next phase.
                Some(device) if !form.sharing.holds() => beside.push((form, device)),
                Some(device) => {
                    if let Some(device) = self.form(one, device, &choice, subject(form)) {
                        self.card(ordinal).add(form, device);
                    }
                }
            }
        }

        // Phase 4: what is only known once the card is full.
        let Some(card) = self.cards.get_mut(&ordinal) else {
            return;
        };
        card.sets = Some(CounterSets::new(ordinal, budget.as_ref()));
        // A GPU that is there for one claim as a whole can be had with admin access as it is.
        if card.held_as().any(|(used, _)| used != Form::WHOLE) {
            self.publish_beside(one, beside);
        }
    }

    /// Publishes devices that go with any use of their GPU.
    fn publish_beside(&mut self, one: &ReadableGpu<'_>, devices: Vec<(Form, Device)>) {
        let given = self.input.taints.get(one.uuid);
        let given = given.map_or(&[][..], Vec::as_slice);
        for (form, device) in devices {
            if let Some(device) = self.tainted(one.uuid, device, beside_use(given), false) {
                self.card(one.ordinal).add(form, device);
            }
        }
    }

    /// Returns the devices of the whole GPU in every form, without taints. `None` for one that has
    /// nothing left to give out.
    fn of_whole_gpu(
        &mut self,
        one: &ReadableGpu<'_>,
        links: &Links<'_>,
        unit: ShareUnit,
        budget: Option<&Budget>,
    ) -> Vec<(DeviceKind, Option<Device>)> {
        let ReadableGpu { ordinal, uuid, gpu } = *one;
        // Where the profile of the whole GPU is missing, others have fewer engines than the GPU.
        let caps = self.input.capabilities.get(uuid);
        let is_listed = caps.is_some_and(|caps| caps.whole().is_some());
        let largest = budget.filter(|_| is_listed).map(|budget| budget.largest);
        let system = &self.input.inventory.system;
        let mut left_out = Vec::new();
        let plain = whole::device(ordinal, uuid, gpu, system, links, &mut left_out);
        self.findings
            .extend(left_out.into_iter().map(Finding::from));
        let target = GpuTarget::whole(uuid.clone());
        let of_gpus = FORMS
            .iter()
            .filter(|definition| definition.form().target == TargetKind::Gpu);
        let made = of_gpus.map(|definition| {
            let kind = DeviceKind::of_gpu(ordinal, definition.form().sharing);
            let from = divvy_forms::Source {
                kind: &kind,
                gpu,
                system,
                rules: self.input.rules_of(uuid),
                unit,
                server: self.input.mps_servers.get(&target).copied(),
                largest,
            };
            let device = definition.device(plain.clone(), &from);
            (kind, device)
        });
        made.collect()
    }

    /// The whole GPU or its shares, if they are offered or held.
    fn form(
        &mut self,
        one: &ReadableGpu<'_>,
        device: Device,
        choice: &Choice,
        mut subject: Subject<'_>,
    ) -> Option<Device> {
        let (stays, mode) = (self.stays(&device.name), subject.mode);
        if !choice.offers(mode) {
            if !stays {
                return None;
            }
            let on = one.gpu.facts.mig_mode.is_on();
            let unit = self.input.rules_of(one.uuid).shares.unit;
            let (why, value) =
                if self.input.has_units(mode) && self.input.share_unit(one.uuid) != unit {
                    let why = format!("this GPU is to be shared {}", unit.in_words());
                    (why, "not-offered")
                } else if fits_mig_mode(mode, on) {
                    let offered = definition(mode).map(Definition::offered);
                    let offered = offered.unwrap_or_default();
                    (
                        format!("this GPU is currently not offered {offered}"),
                        "not-offered",
                    )
                } else {
                    ("its MIG mode is on".to_owned(), "mig-mode-on")
                };
            self.keep(&device.name, why);
            subject.standing = Standing::Withdrawn(value);
        }
        self.tainted(one.uuid, device, self.taints(&subject), stays)
    }
}
