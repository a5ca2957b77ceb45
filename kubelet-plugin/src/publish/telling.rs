//! What is said, once each, of GPUs that are not offered as they could be: in the log, and as Events of the node.

use std::collections::BTreeSet;

use divvy_carve::{Note, OneMode, ServerFeatures};
use divvy_model::GpuUuid;
use divvy_model::mig::Placement;

use super::{Carver, Memory, Offering};

impl Carver {
    pub(super) fn tell_foreign(&self, memory: &mut Memory, foreign: &[(GpuUuid, Placement)]) {
        let now: BTreeSet<_> = foreign.iter().cloned().collect();
        for (gpu, at) in now.difference(&memory.foreign) {
            let note = format!(
                "{gpu} has a MIG instance at memory slices {}..{} that this driver has not made: what overlaps it is not given out (whoever made it can remove it with `nvidia-smi mig -i {gpu} -dci` and `-dgi`)",
                at.start,
                at.end().saturating_sub(1)
            );
            tracing::warn!("{note}");
            let teller = self.teller.clone();
            self.told.spawn(async move { teller.warn_node("foreign-mig-instance", &note).await });
        }
        memory.foreign = now;
    }

    /// Tells why GPUs are published in one mode only although several are asked for, once.
    pub(super) fn tell_one_mode(
        &self,
        memory: &mut Memory,
        notes: &BTreeSet<Note>,
        features: &ServerFeatures,
    ) {
        let asked = notes.iter().any(|note| matches!(note, Note::OneMode { .. }));
        let why = features.one_mode().filter(|_| asked);
        for name in OneMode::NAMES {
            self.metrics.one_mode(name, why.as_ref().is_some_and(|why| why.name() == name));
        }
        self.offering.send_replace(Offering {
            one_mode: features.one_mode(),
            several_asked: asked,
            notes: notes.iter().map(ToString::to_string).collect(),
        });
        if memory.one_mode != why {
            if let Some(why) = &why {
                let note = format!("GPUs are offered in one mode each, not in all that are asked for: {why}");
                tracing::warn!(reason = why.name(), "{note}");
                let teller = self.teller.clone();
                self.told.spawn(async move { teller.warn_node("one-mode-for-each-gpu", &note).await });
            } else {
                tracing::info!("GPUs may be offered in several modes");
            }
            memory.one_mode = why;
        }
    }
}

/// The reason of an Event on the node, for notes that somebody should look into.
pub(super) fn concerns_operators(note: &Note) -> Option<&'static str> {
    match note {
        Note::Unreadable { .. } => Some("gpu-unreadable"),
        Note::HeldAndGone { .. } => Some("gpu-lost"),
        Note::HeldUnknown { .. } => Some("unknown-device"),
        Note::GivenTwice { .. } => Some("given-twice"),
        _ => None,
    }
}
