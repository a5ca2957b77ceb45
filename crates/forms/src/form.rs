//! [`Definition`]: all that is said of a form in one place; [`FORMS`]: every form that is
//! published.

use std::fmt::Debug;

use divvy_model::{
    DeviceKind, Form, Gpu, GpuFacts, Grant, MemoryCaps, MpsAbility, MpsServer, ShareUnit,
    SystemFacts, TimeSlice,
};

use crate::admin::Admin;
use crate::mps::Mps;
use crate::partition::Partition;
use crate::share::Share;
use crate::whole::Whole;
use crate::{Amount, Device, GpuRules};

/// Every form that is published. All else is asked of these definitions, so that a further form is
/// a folder here and a line in this list.
pub static FORMS: [&dyn Definition; 7] = [
    &Whole,
    &Partition,
    &Share::OF_GPUS,
    &Share::OF_PARTITIONS,
    &Mps::OF_GPUS,
    &Mps::OF_PARTITIONS,
    &Admin,
];

/// A form, with all that follows from it.
pub trait Definition: Debug + Sync {
    /// Returns the form that it defines.
    fn form(&self) -> Form;

    /// Returns its device of a target, without taints. `plain` is what the target would say to one
    /// claim that has it alone. `None` if nothing of the target is left to give out.
    fn device(&self, plain: Device, from: &Source<'_>) -> Option<Device>;

    /// Returns its device with nothing to give out.
    fn described(&self, kind: &DeviceKind, plain: Device, said: Said) -> Device;

    /// Returns the words for a GPU that is offered as it: "as time-sliced shares".
    fn offered(&self) -> String;

    /// Returns whether it is given out in a unit on such a node.
    fn has_units(&self, _node: MpsAbility) -> bool {
        false
    }

    /// Returns what a node lacks for it; `None` if it lacks nothing.
    fn node_lacks(&self, _node: MpsAbility) -> Option<&'static str> {
        None
    }

    /// Returns what a GPU or its node lacks for it; `None` if they lack nothing.
    fn lack(&self, _gpu: &GpuFacts, _node: MpsAbility) -> Option<&'static str> {
        None
    }

    /// Writes what prepare may do for claims that have it, where the rules of a GPU ask for it.
    /// `gpu` is `None` if the GPU does not answer.
    fn grant(
        &self,
        _rules: &GpuRules,
        _gpu: Option<&GpuFacts>,
        _node: MpsAbility,
        _to: &mut Grant,
    ) {
    }
}

/// Returns the definition of a form; `None` for one that is not published.
pub fn definition(form: Form) -> Option<&'static dyn Definition> {
    FORMS
        .iter()
        .copied()
        .find(|definition| definition.form() == form)
}

/// Facts that a device is made from.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Name of the device, in parts.
    pub kind: &'a DeviceKind,
    pub gpu: &'a Gpu,
    pub system: &'a SystemFacts,
    pub rules: &'a GpuRules,
    /// The unit of the GPU's shares.
    pub unit: ShareUnit,
    /// The MPS server that runs for the target.
    pub server: Option<MpsServer>,
    /// The most of each resource that a profile of the GPU has, in the order of
    /// [`crate::partition::RESOURCES`]. `None` if its profiles do not list the whole GPU.
    pub largest: Option<[Amount; 7]>,
}

/// Statements of a device beside those about its target.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Said {
    /// The time slice of shares; left out if it is not known.
    pub time_slice: Option<TimeSlice>,
    /// Enforcement of memory limits on the node.
    pub caps: MemoryCaps,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_form_that_is_published_has_one_definition() {
        let defined: Vec<Form> = FORMS.iter().map(|one| one.form()).collect();
        let forms: BTreeSet<Form> = defined.iter().copied().collect();
        assert_eq!(forms.len(), defined.len());
        let published: BTreeSet<Form> = Form::HELD.into_iter().chain([Form::ADMIN]).collect();
        assert_eq!(forms, published);
        assert!(
            definition(Form::new(
                divvy_model::TargetKind::Partition,
                divvy_model::Sharing::Admin
            ))
            .is_none()
        );
    }

    #[test]
    fn every_form_has_words_of_its_own() {
        let words: BTreeSet<String> = FORMS.iter().map(|one| one.offered()).collect();
        assert_eq!(words.len(), FORMS.len());
    }
}
