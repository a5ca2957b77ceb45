//! A GPU that was given out in two modes: until when that lasts, and what people read about it.

use std::collections::BTreeSet;

use divvy_model::{DeviceKind, DeviceName};

use crate::Finding;
use crate::world::{Conflict, Memory, ModeConflict, Records};

impl Memory {
    /// Forgets conflicts that are over: the claim does not have its device any more, or is served
    /// after all, or what used the GPU is gone. Its record may be read a moment after the conflict
    /// is reported.
    pub(crate) fn end_conflicts(&mut self, records: &Records) {
        let listed = self.listed.as_ref();
        self.conflicts.retain_mut(|conflict| {
            let Conflict {
                of: ModeConflict {
                    claim, device, gpu, ..
                },
                since,
                ..
            } = &*conflict;
            // A list from before the conflict cannot know it.
            let has_it = listed.is_none_or(|listed| {
                listed.asked < *since
                    || listed
                        .holders
                        .get(device)
                        .is_some_and(|claims| claims.contains(claim))
            });
            let mut on_it = records.held.iter().filter(|held| {
                held.hold.gpu == *gpu && held.hold.sharing.holds() && held.hold.device != *device
            });
            // The refused claim has a record once it is served after all.
            let is_served = records.held.iter().any(|held| held.hold.claim == claim.uid);
            let in_use = on_it.any(|held| held.hold.claim != claim.uid);
            // The record of the holder may be read a moment after the conflict. So a GPU without a
            // user ends it only if it was seen to have one before.
            let was_in_use = conflict.in_use;
            conflict.in_use |= in_use;
            has_it && !is_served && (in_use || !was_in_use)
        });
    }

    /// Notes which claims have been given one GPU twice. The claim that was refused at prepare
    /// has no record.
    pub(crate) fn name_claims(&self, records: &Records, findings: &mut BTreeSet<Finding>) {
        // First a finding for each conflict that counters have not shown already.
        for conflict in &self.conflicts {
            let Some(gpu) = records.ordinals.of(&conflict.of.gpu) else {
                continue;
            };
            let is_noted = |note: &Finding| matches!(note, Finding::GivenTwice { gpu: known, .. } if *known == gpu);
            if !findings.iter().any(is_noted) {
                let devices = format!("{}, {}", conflict.of.device, conflict.of.held);
                findings.insert(Finding::GivenTwice {
                    gpu,
                    devices,
                    claims: Vec::new(),
                });
            }
        }
        // Then the claims of each, which only the world knows: the carving that found it knows
        // devices.
        *findings = std::mem::take(findings)
            .into_iter()
            .map(|note| match note {
                Finding::GivenTwice { gpu, devices, .. } => Finding::GivenTwice {
                    gpu,
                    devices,
                    claims: self.claims_on(records, gpu),
                },
                other => other,
            })
            .collect();
    }

    /// The claims that have a GPU or a part of it, each with its device: by the API, by records,
    /// and by what was refused.
    pub(crate) fn claims_on(&self, records: &Records, ordinal: u32) -> Vec<String> {
        let of_it = |device: &DeviceName| {
            DeviceKind::parse(device).is_ok_and(|kind| kind.ordinal() == ordinal)
        };
        // Three sources, since each alone misses some: the list may be old, a record exists only
        // once a claim is prepared, and a refused claim has none.
        let listed = self.listed.iter().flat_map(|listed| &listed.holders);
        let listed = listed
            .flat_map(|(device, claims)| claims.iter().map(move |claim| (&claim.name, device)));
        let recorded = records.held.iter().filter(|held| held.hold.sharing.holds());
        let recorded = recorded.map(|held| (&held.claim, &held.hold.device));
        let conflicts = self.conflicts.iter().map(|conflict| &conflict.of);
        let refused =
            conflicts.flat_map(|of| [(&of.claim.name, &of.device), (&of.holder.name, &of.held)]);
        let all: BTreeSet<_> = listed
            .chain(recorded)
            .chain(refused)
            .filter(|(_, device)| of_it(device))
            .collect();
        let is_refused = |claim: &String| {
            self.conflicts
                .iter()
                .any(|conflict| conflict.of.claim.name == *claim)
        };
        all.into_iter()
            .map(|(claim, device)| {
                let refused = if is_refused(claim) {
                    ", refused at prepare"
                } else {
                    ""
                };
                format!("{claim} has {device}{refused}")
            })
            .collect()
    }
}
