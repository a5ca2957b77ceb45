//! Devices of GPUs that answer: every form that is offered, and those that claims hold.

use std::collections::BTreeSet;

use divvy_model::{DeviceKind, Form, Gpu, GpuTarget, GpuUuid, MpsProtocol, Sharing, TargetKind};

use crate::carve::Carving;
use crate::modes::{Choice, fits_mig_mode};
use crate::partition::Source;
use crate::settle::CounterSets;
use crate::taints::{Standing, Subject};
use divvy_forms::admin::device as admin;
use divvy_forms::mps::device as mps;
use divvy_forms::share::device as share;
use divvy_forms::whole::device::{self as whole, Links};

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
        let ReadableGpu { ordinal, uuid, gpu } = *one;
        let system = &self.input.inventory.system;
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

        // Phase 2: its devices, without taints. Share and admin device are made from the whole GPU
        // before engines are added to it: these have no engines to give out.
        let mut left_out = Vec::new();
        let mut whole = whole::device(ordinal, uuid, gpu, system, links, &mut left_out);
        self.findings
            .extend(left_out.into_iter().map(Finding::from));
        let shares = |sharing| {
            let given_out = (unit, system.memory_caps);
            share::device((ordinal, sharing), &whole, &gpu.facts, rules, given_out)
        };
        let share = shares(Sharing::TimeSliced);
        // That of a claim which has the GPU alone says nothing about slots.
        let server = self.input.mps_servers.get(&GpuTarget::whole(uuid.clone()));
        let server = server.copied();
        let server = server.filter(|server| server.slots.is_some());
        let server = server.or_else(|| mps::server(&gpu.facts, rules, system.mps));
        let mps = server.and_then(|server| match server.protocol {
            MpsProtocol::V2 => Some(mps::slots(ordinal, &whole, server)),
            MpsProtocol::V3 => shares(Sharing::Mps),
        });
        let is_share_of_gpu =
            |mode: &Form| mode.sharing.is_shared() && mode.target == TargetKind::Gpu;
        let is_all_reserved = share.is_none() || mps.is_none();
        if is_all_reserved && choice.modes.iter().any(is_share_of_gpu) {
            self.findings
                .push(Finding::NothingToShare { gpu: uuid.clone() });
        }
        let admin = admin::device(ordinal, &whole);
        // Where the profile of the whole GPU is missing, others have fewer engines than the GPU.
        let is_listed = caps.is_some_and(|caps| caps.whole().is_some());
        if let Some(budget) = budget.as_ref().filter(|_| is_listed) {
            whole
                .capacity
                .extend(divvy_forms::partition::device::engines(budget.largest));
        }
        // Phase 3: each form that is offered or held goes onto the card, with its taints.
        if let (Some(caps), Some(budget)) = (caps, &budget) {
            let offered: BTreeSet<_> = choice
                .modes
                .iter()
                .filter(|mode| mode.target == TargetKind::Partition)
                .map(|mode| mode.sharing)
                .collect();
            let subject = subject(Form::PARTITIONS);
            self.partitions(&Source {
                one,
                caps,
                budget,
                rules,
                subject,
                unit,
                offered,
            });
        }
        for kind in lost {
            let subject = subject(kind.form());
            self.publish_kept(&kind, "its profile is unknown", subject);
        }
        for (sharing, shares) in [(Sharing::TimeSliced, &share), (Sharing::Mps, &mps)] {
            let kind = DeviceKind::of_gpu(ordinal, sharing);
            if shares.is_none() && self.stays(&kind.device_name()) {
                let why = "its rule reserves all of the GPU's memory";
                self.publish_kept(&kind, why, subject(kind.form()));
            }
        }
        if let Some(whole) = self.form(one, whole, &choice, subject(Form::WHOLE)) {
            self.card(ordinal).add(Form::WHOLE, whole);
        }
        for (mode, shares) in [(Form::TIME_SLICED, share), (Form::MPS, mps)] {
            let shares = shares.and_then(|shares| self.form(one, shares, &choice, subject(mode)));
            if let Some(shares) = shares {
                self.card(ordinal).add(mode, shares);
            }
        }
        // Phase 4: what is only known once the card is full.
        let Some(card) = self.cards.get_mut(&ordinal) else {
            return;
        };
        card.sets = Some(CounterSets::new(ordinal, budget.as_ref()));
        // A GPU that is there for one claim as a whole can be had with admin access as it is.
        if card.held_as().any(|(used, _)| used != Form::WHOLE) {
            let given = self.input.taints.get(uuid).map_or(&[][..], Vec::as_slice);
            if let Some(admin) = self.tainted(uuid, admin, admin::taints(given), false) {
                self.card(ordinal).add(Form::ADMIN, admin);
            }
        }
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
                    (
                        format!("this GPU is currently not offered as {}", mode.name()),
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
