//! The partitions of a GPU: every profile at every placement, beside the whole GPU where both are
//! offered, all of them drawing on the GPU's counters.

use std::collections::BTreeSet;

use divvy_api::names::attributes as attr;
use divvy_forms::partition::{describe, of_profile};
use divvy_forms::{Builder, Definition, FORMS};
use divvy_model::mig::{
    GpuInstanceProfile, GpuInstanceProfileId, MigCapabilities, PartitionName, Placement,
};
use divvy_model::{
    DeviceKind, Form, GpuTarget, GpuUuid, MigMode, MigUuid, NamedTarget, Place, ShareUnit, Target,
    TargetKind,
};

use crate::carve::Carving;
use crate::counters::Budget;
use crate::modes::{self, Choice, Facts, Refused};
use crate::readable::ReadableGpu;
use crate::taints::{Standing, Subject};
use crate::{AttributeValue, Device, Feature, Finding, GpuRules, Instances, Modes, PlacementOrder};

impl Carving<'_> {
    /// In which modes a GPU is offered, with findings of those that it could not be.
    pub(crate) fn choose(
        &mut self,
        one: &ReadableGpu<'_>,
        rules: &GpuRules,
        cuttable: bool,
    ) -> Choice {
        let facts = &one.gpu.facts;
        let on = facts.mig_mode.is_on();
        let node = self.input.inventory.system.mps;
        let lack = |one: &&dyn Definition| Some((one.form(), one.lack(facts, node)?));
        let lacks = FORMS.iter().filter_map(lack);
        let nothing = BTreeSet::new();
        let in_use = self.in_use.get(&one.ordinal).unwrap_or(&nothing);
        let choice = modes::choose(&Facts {
            asked: &rules.modes,
            instances: rules.instances,
            any_lives: one
                .gpu
                .mig
                .as_ref()
                // Instances that were not listed yet may live.
                .is_some_and(|mig| mig.instances.as_ref().is_none_or(|all| !all.is_empty())),
            has_mig: facts.mig_mode != MigMode::Unsupported,
            on,
            found_on: self.input.mig_found.get(one.uuid).copied().unwrap_or(on),
            toggles: facts.architecture.toggles_mig_without_reset(),
            cuttable,
            lacks: &lacks.collect(),
            features: self.input.features,
            in_use,
            leaving: self.leaving.get(&one.ordinal).unwrap_or(&nothing),
            recorded: self.recorded.get(&one.ordinal).unwrap_or(&nothing),
        });
        let is_whole = in_use.contains(&Form::WHOLE);
        let gpu = || one.uuid.clone();
        // A finding for each mode that was asked for and is not offered, but one finding only where
        // nothing is offered at all.
        if choice.modes.is_empty() && on && rules.modes == Modes::AsIs && !is_whole {
            self.findings.push(Finding::MigModeOn { gpu: gpu() });
        }
        for refused in &choice.refused {
            match refused {
                Refused::NoCounters(why) if on || choice.one_mode.is_none() => {
                    let (gpu, why) = (gpu(), *why);
                    self.findings.push(Finding::NoCounters { gpu, why });
                }
                Refused::NoMps(lack) => self.findings.push(Finding::NoMps {
                    gpu: gpu(),
                    lack: (*lack).to_owned(),
                }),
                Refused::NoShares => self.findings.push(Finding::NoShares { gpu: gpu() }),
                Refused::NoMig | Refused::Static | Refused::NeedsReset
                    if choice.modes.is_empty() && rules.modes != Modes::AsIs =>
                {
                    self.findings.push(Finding::NothingOffered { gpu: gpu() });
                }
                Refused::NeedsReset => self.findings.push(Finding::NeedsReset { gpu: gpu() }),
                Refused::NoCounters(_) | Refused::NoMig | Refused::Static => {}
            }
        }
        if let (Some(why), Some(mode)) = (&choice.one_mode, choice.modes.first()) {
            self.findings.push(Finding::OneMode {
                gpu: gpu(),
                mode: *mode,
                why: why.clone(),
            });
        }
        choice
    }

    /// Publishes the partitions of a GPU that answers.
    pub(crate) fn partitions(&mut self, from: &Source<'_>) {
        let template = self.template(from.one);
        let held = self
            .held_partitions
            .get(&from.one.ordinal)
            .cloned()
            .unwrap_or_default();
        self.publish_profiles(from, &held, &template);
        // A GPU whose driver does not report persistence mode gets no notice.
        let has_any = !from.offered.is_empty() || !held.is_empty();
        if has_any && from.one.gpu.facts.persistence == Some(false) {
            let gpu = from.one.uuid.clone();
            self.findings.push(Finding::NotPersistent { gpu });
        }
        if from.rules.instances == Instances::Static
            && let Some(mig) = &from.one.gpu.mig
        {
            let unusable = mig
                .instances
                .iter()
                .flatten()
                .filter(|instance| !mig.uuids.contains_key(&instance.id));
            self.findings
                .extend(unusable.map(|instance| Finding::NotOneComputeInstance {
                    gpu: from.one.uuid.clone(),
                    at: instance.placement,
                }));
        }
    }

    /// The GPU's counters, with findings of what was wrong with them.
    pub(crate) fn budget(
        &mut self,
        ordinal: u32,
        uuid: &GpuUuid,
        caps: &MigCapabilities,
    ) -> Option<Budget> {
        if caps.profiles().is_empty() {
            return None;
        }
        let budget = Budget::new(ordinal, caps);
        match &budget {
            None => self.findings.push(Finding::TooManySlices {
                gpu: uuid.clone(),
                found: caps.memory_slices(),
                max: Budget::MAX_SLICES,
            }),
            Some(budget) => {
                self.findings
                    .extend(budget.dropped.iter().map(|(counter, needed, total)| {
                        Finding::CounterDropped {
                            gpu: uuid.clone(),
                            counter,
                            needed: *needed,
                            total: *total,
                        }
                    }));
            }
        }
        budget
    }

    /// Returns what all partitions of a GPU say.
    fn template(&mut self, one: &ReadableGpu<'_>) -> Device {
        // Notes of values left out name the whole GPU, once.
        let name = DeviceKind::whole(one.ordinal).device_name();
        let mut left_out = Vec::new();
        let mut to = Builder::new(name, &mut left_out);
        describe(&mut to, one.uuid, one.gpu, &self.input.inventory.system);
        let device = to.device;
        self.findings
            .extend(left_out.into_iter().map(Finding::from));
        device
    }

    fn publish_profiles(&mut self, from: &Source<'_>, held: &[DeviceKind], template: &Device) {
        let is_static = from.rules.instances == Instances::Static;
        for profile in from.caps.profiles() {
            let name = from.caps.name(profile);
            // By name where the rule names profiles. Instances of an administrator are all meant.
            // Otherwise the rare profiles only if they are asked for, since every device costs the
            // scheduler.
            let asked_for = match &from.rules.profiles {
                Some(asked) => name
                    .as_ref()
                    .is_some_and(|name| asked.contains(&name.to_string())),
                None if is_static => true,
                None => {
                    !profile.variant().is_rare() || from.rules.rare.contains(&profile.variant())
                }
            };
            // A profile that is not offered is gone through all the same if any partition is held:
            // the held one may be of it.
            let offered = !from.offered.is_empty() && asked_for;
            if !offered && held.is_empty() {
                continue;
            }
            if name.is_none() && offered {
                self.findings.push(Finding::UnknownProfile {
                    gpu: from.one.uuid.clone(),
                    profile: profile.id.0,
                });
            }
            let of_profile = OfProfile {
                profile,
                device: of_profile(template, profile, name.as_ref()),
                offered: offered && name.is_some(),
                label: name.map(|name| name.to_string()).unwrap_or_default(),
            };
            let mut publish = |placement: Placement| {
                self.publish_placement(from, held, &of_profile, placement);
            };
            match from.rules.order {
                // The scheduler takes the first that fits, so the order of publishing is the order
                // of placement.
                PlacementOrder::Ascending => {
                    profile.placements.iter().copied().for_each(&mut publish);
                }
                PlacementOrder::Descending => profile
                    .placements
                    .iter()
                    .rev()
                    .copied()
                    .for_each(&mut publish),
            }
        }
    }

    fn publish_placement(
        &mut self,
        from: &Source<'_>,
        held: &[DeviceKind],
        of_profile: &OfProfile<'_>,
        placement: Placement,
    ) {
        let profile = of_profile.profile;
        let name = PartitionName::new(
            from.one.ordinal,
            &of_profile.label,
            profile.id,
            placement.start,
        );
        let is_static = from.rules.instances == Instances::Static;
        let living = from.living(profile.id, placement);
        // Partitions of divvy and those made outside it have different names (ADR 5).
        for name in [name.clone(), name.into_static()] {
            let offered = of_profile.offered
                && name.is_static == is_static
                && (!is_static || living.is_some());
            for definition in FORMS {
                let form = definition.form();
                if form.target != TargetKind::Partition {
                    continue;
                }
                let offered = offered && from.offered.contains(&form);
                // A profile's name changes with the driver. The device keeps the one that a claim
                // was given.
                let mut names: Vec<_> = held
                    .iter()
                    .filter(|held| held.sharing == form.sharing)
                    .filter_map(DeviceKind::partition)
                    .filter(|held| held.is_same_partition(&name))
                    .collect();
                if names.is_empty() && offered {
                    names.push(&name);
                }
                for called in names {
                    let kind = DeviceKind {
                        target: NamedTarget::Partition(called.clone()),
                        sharing: form.sharing,
                    };
                    let mut plain = Device {
                        name: kind.device_name(),
                        ..of_profile.device.clone()
                    };
                    if let Some(uuid) = living.filter(|_| name.is_static) {
                        let uuid = AttributeValue::String(uuid.to_string());
                        plain.attributes.insert(attr::UUID.into(), uuid);
                    }
                    if self.input.features.supports(Feature::Partitions) {
                        plain
                            .consumes
                            .push(from.budget.partition(profile, placement));
                    }
                    let place = Place {
                        profile: profile.id,
                        placement,
                    };
                    let made = definition.device(plain, &self.source(from, &kind, place));
                    if let Some(device) = made {
                        self.publish_partition(from, definition, placement, device, offered);
                    }
                }
            }
        }
    }

    /// Returns what a device of a partition is made from.
    fn source<'s>(
        &'s self,
        from: &Source<'s>,
        kind: &'s DeviceKind,
        place: Place,
    ) -> divvy_forms::Source<'s> {
        let (gpu, target) = (from.one.uuid.clone(), Target::Partition(place));
        divvy_forms::Source {
            kind,
            gpu: from.one.gpu,
            system: &self.input.inventory.system,
            rules: from.rules,
            unit: from.unit,
            server: self
                .input
                .mps_servers
                .get(&GpuTarget { gpu, target })
                .copied(),
            largest: None,
        }
    }

    /// Publishes a partition or the shares of one, with its taints: they depend on the place, and
    /// on whether the device is offered.
    fn publish_partition(
        &mut self,
        from: &Source<'_>,
        definition: &dyn Definition,
        placement: Placement,
        device: Device,
        offered: bool,
    ) {
        let mode = definition.form();
        let mut subject = Subject {
            place: Some(placement),
            mode,
            ..from.subject
        };
        if !offered {
            let why = format!("this GPU is currently not offered {}", definition.offered());
            self.keep(&device.name, why);
            subject.standing = Standing::Withdrawn("not-offered");
        }
        let stays = self.stays(&device.name);
        let taints = self.taints(&subject);
        if let Some(device) = self.tainted(from.one.uuid, device, taints, stays) {
            self.card(from.one.ordinal).add(mode, device);
        }
    }
}

/// A GPU, while its partitions are made.
pub(crate) struct Source<'a> {
    pub(crate) one: &'a ReadableGpu<'a>,
    pub(crate) caps: &'a MigCapabilities,
    pub(crate) budget: &'a Budget,
    pub(crate) rules: &'a GpuRules,
    /// The facts that the taints of its partitions depend on, but for their places.
    pub(crate) subject: Subject<'a>,
    /// The unit of its shares.
    pub(crate) unit: ShareUnit,
    /// The forms in which partitions are offered.
    pub(crate) offered: BTreeSet<Form>,
}

impl Source<'_> {
    /// The MIG device that lives at exactly this place.
    fn living(&self, profile: GpuInstanceProfileId, placement: Placement) -> Option<&MigUuid> {
        let mig = self.one.gpu.mig.as_ref()?;
        let instance = mig
            .instances
            .iter()
            .flatten()
            .find(|i| (i.profile, i.placement) == (profile, placement))?;
        mig.uuids.get(&instance.id)
    }
}

/// The parts that all placements of a profile have in common.
struct OfProfile<'a> {
    profile: &'a GpuInstanceProfile,
    device: Device,
    offered: bool,
    label: String,
}

#[cfg(test)]
mod tests;
