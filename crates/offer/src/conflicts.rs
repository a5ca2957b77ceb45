//! A GPU that was given out in two modes: until when that lasts, and what people read about it.

use std::collections::BTreeSet;

use divvy_model::{DeviceKind, DeviceName, HoldKind};

use crate::Note;
use crate::world::{Conflict, ModeConflict, Records, World};

impl World {
    /// Forgets conflicts that are over: the claim does not have its device any more, or is served after all, or what used
    /// the GPU is gone. Its record may be read a moment after the conflict is reported.
    pub(crate) fn end_conflicts(&mut self, records: &Records) {
        let listed = self.listed.as_ref();
        self.conflicts.retain_mut(|conflict| {
            let Conflict { of: ModeConflict { claim, device, gpu, .. }, since, .. } = &*conflict;
            let has_it = listed.is_none_or(|listed| {
                listed.asked < *since
                    || listed.holders.get(device).is_some_and(|claims| claims.contains(claim))
            });
            let mut on_it = records.held.iter().filter(|held| {
                held.hold.gpu == *gpu && held.hold.kind != HoldKind::Admin && held.hold.device != *device
            });
            let is_served = records.held.iter().any(|held| held.hold.claim == claim.uid);
            let in_use = on_it.any(|held| held.hold.claim != claim.uid);
            let was_in_use = conflict.in_use;
            conflict.in_use |= in_use;
            has_it && !is_served && (in_use || !was_in_use)
        });
    }

    /// Which claims have been given one GPU twice. The claim that was refused at prepare has no record.
    pub(crate) fn name_claims(&self, records: &Records, notes: &mut BTreeSet<Note>) {
        for conflict in &self.conflicts {
            let Some(gpu) = records.ordinals.of(&conflict.of.gpu) else { continue };
            let is_noted = |note: &Note| matches!(note, Note::GivenTwice { gpu: known, .. } if *known == gpu);
            if !notes.iter().any(is_noted) {
                let devices = format!("{}, {}", conflict.of.device, conflict.of.held);
                notes.insert(Note::GivenTwice { gpu, devices, claims: Vec::new() });
            }
        }
        *notes = std::mem::take(notes)
            .into_iter()
            .map(|note| match note {
                Note::GivenTwice { gpu, devices, .. } => {
                    Note::GivenTwice { gpu, devices, claims: self.claims_on(records, gpu) }
                }
                other => other,
            })
            .collect();
    }

    /// The claims that have a GPU or a part of it, each with its device: by the API, by records, and by what was refused.
    pub(crate) fn claims_on(&self, records: &Records, ordinal: u32) -> Vec<String> {
        let of_it =
            |device: &DeviceName| DeviceKind::parse(device).is_ok_and(|kind| kind.ordinal() == ordinal);
        let listed = self.listed.iter().flat_map(|listed| &listed.holders);
        let listed =
            listed.flat_map(|(device, claims)| claims.iter().map(move |claim| (&claim.name, device)));
        let recorded = records.held.iter().filter(|held| held.hold.kind != HoldKind::Admin);
        let recorded = recorded.map(|held| (&held.claim, &held.hold.device));
        let conflicts = self.conflicts.iter().map(|conflict| &conflict.of);
        let refused = conflicts.flat_map(|of| [(&of.claim.name, &of.device), (&of.holder.name, &of.held)]);
        let all: BTreeSet<_> =
            listed.chain(recorded).chain(refused).filter(|(_, device)| of_it(device)).collect();
        let is_refused =
            |claim: &String| self.conflicts.iter().any(|conflict| conflict.of.claim.name == *claim);
        all.into_iter()
            .map(|(claim, device)| {
                let refused = if is_refused(claim) { ", refused at prepare" } else { "" };
                format!("{claim} has {device}{refused}")
            })
            .collect()
    }
}
