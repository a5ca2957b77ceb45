//! Obstacles of a claim: holds of other claims, and GPUs whose state is not known.

use std::sync::Arc;

use divvy_model::{ClaimUid, DeviceName, GpuUuid, Hold, Sharing, Target};

use super::{Snapshot, is_held};
use crate::{Claim, ClaimRef, OtherClaim, Phase, RecordedDevice, Refusal, Stored, Why};

/// Kind of a conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clash {
    /// The holder has the same part of the GPU.
    Device,
    /// The holder has the GPU in another mode.
    Mode,
}

/// A claim that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// The record of a claim says that it holds the GPU.
    Record {
        claim: ClaimRef,
        device: DeviceName,
        /// Reason, if it has been unprepared and only something left over is in the way.
        leaving: Option<String>,
        /// Kind of the conflict.
        clash: Clash,
    },
    /// The record of a claim cannot be read, so it may hold the GPU.
    Unreadable {
        /// UID, from the file's name.
        claim: ClaimUid,
        /// Error in the record.
        reason: String,
    },
}

/// Claims to wait for, and the device they are in the way of. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders {
    /// The device asked for.
    pub device: DeviceName,
    pub gpu: GpuUuid,
    /// Claims in the way.
    pub holders: Vec<Holder>,
}

impl Holder {
    /// Returns the UID of the claim, and its names where its record can be read.
    pub fn claim(&self) -> (&ClaimUid, Option<&ClaimRef>) {
        match self {
            Self::Record { claim, .. } => (&claim.uid, Some(claim)),
            Self::Unreadable { claim, .. } => (claim, None),
        }
    }

    /// Returns true if its claim, as the API has it now, has the device allocated: then nothing but
    /// its end helps.
    pub fn is_in_use(&self, found: &Claim) -> bool {
        matches!(self, Self::Record { device, .. } if found.allocates(device))
    }

    /// Returns the refusal of a claim that this holder is in the way of.
    pub fn refusal(&self, claim: &Claim, wanted: &Holders, in_use: bool) -> Refusal {
        let named = |holder: &ClaimRef| OtherClaim::seen_from(&claim.namespace, holder);
        let why = match self {
            Self::Record {
                claim: holder,
                device,
                clash,
                ..
            } if in_use => Why::InUse {
                holder: named(holder),
                held: device.clone(),
                clash: *clash,
            },
            Self::Record {
                claim: holder,
                leaving,
                ..
            } => Why::StillHeld {
                holder: named(holder),
                why: leaving
                    .clone()
                    .unwrap_or_else(|| "it is not yet unprepared".to_owned()),
            },
            Self::Unreadable {
                claim: holder,
                reason,
            } => Why::UnreadableHolder {
                holder: holder.to_string(),
                reason: reason.clone(),
            },
        };
        why.of(claim, Some(&wanted.device), Some(&wanted.gpu))
    }
}

impl Holders {
    /// Returns the refusal that names the first holder, for which the claim waited in vain.
    pub fn refusal(&self, claim: &Claim) -> Refusal {
        match self.holders.first() {
            Some(holder) => holder.refusal(claim, self, false),
            None => Refusal::no_driver(claim.reference()),
        }
    }
}

/// Returns the claims that are in the way of these devices. Admin access and other claims are not
/// in each other's way.
pub(crate) fn conflicts(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<Option<Holders>, Refusal> {
    // Device by device, and the fence of its GPU before its holders: while the state is not known,
    // nothing says who is in the way.
    for wanted in devices.iter().filter(|device| device.sharing.holds()) {
        let found = not_fenced(&claim.uid, &wanted.gpu, seen)
            .and_then(|()| holders(&claim.uid, wanted, seen));
        let holders = found.map_err(|why| why.about(claim, wanted))?;
        if !holders.is_empty() {
            let (device, gpu) = (wanted.allocated.device.clone(), wanted.gpu.clone());
            return Ok(Some(Holders {
                device,
                gpu,
                holders,
            }));
        }
    }
    Ok(None)
}

/// Refuses a GPU that is fenced: the outcome of a change for another claim is not known, or the
/// GPU's own file cannot be used.
fn not_fenced(own: &ClaimUid, gpu: &GpuUuid, seen: &Snapshot<'_>) -> Result<(), Why> {
    match seen.gpus.get(gpu).map(Arc::as_ref) {
        None | Some(Stored::Absent) => nothing_in_flight(gpu, seen),
        // Until its file is made again, the changes of the GPU that were begun are not known.
        Some(Stored::Corrupt { reason }) => Err(Why::Fenced(format!(
            "its state file cannot be read and is being rebuilt: {reason}"
        ))),
        Some(Stored::Newer { version, .. }) => Err(Why::GpuStateNewer { version: *version }),
        Some(Stored::Fine(state)) => {
            let mut others = state
                .fences(seen.boot)
                // A claim is not kept out by its own doubt: its prepare is what settles it.
                .filter(|fence| fence.claim.as_ref() != Some(own));
            match others.next() {
                Some(fence) => Err(Why::Fenced(fence.reason)),
                None => nothing_in_flight(gpu, seen),
            }
        }
    }
}

/// Refuses while a call that changes the GPU has not returned: it may still have its effect.
fn nothing_in_flight(gpu: &GpuUuid, seen: &Snapshot<'_>) -> Result<(), Why> {
    match seen.hardware.get(gpu).and_then(|gpu| gpu.in_flight) {
        None => Ok(()),
        Some(op) => Err(Why::Fenced(format!(
            "an earlier call ({}) has not returned",
            op.name()
        ))),
    }
}

fn holders(
    own: &ClaimUid,
    wanted: &RecordedDevice,
    seen: &Snapshot<'_>,
) -> Result<Vec<Holder>, Why> {
    let mut holders = Vec::new();
    for (uid, stored) in seen.records.iter().filter(|(uid, _)| *uid != own) {
        match stored.as_ref() {
            Stored::Corrupt { reason } => {
                holders.push(Holder::Unreadable {
                    claim: uid.clone(),
                    reason: reason.clone(),
                });
            }
            Stored::Newer { version, head } if head.gpus.contains(&wanted.gpu) => {
                return Err(Why::HeldByNewer {
                    holder: uid.clone(),
                    version: *version,
                });
            }
            // The head of a record of a later version names its GPUs: this one is not among them.
            Stored::Absent | Stored::Newer { .. } => {}
            Stored::Fine(record) => {
                let undoing = matches!(&record.phase, Phase::Leaving(leaving) if leaving.undoing);
                let clashing = record
                    .holds()
                    .find_map(|hold| Some((clash(&hold, own, wanted, undoing)?, hold.device)));
                holders.extend(clashing.map(|(clash, device)| Holder::Record {
                    claim: record.reference(),
                    device,
                    leaving: match &record.phase {
                        Phase::Leaving(leaving) => Some(leaving.reason.clone()),
                        Phase::Preparing | Phase::Prepared => None,
                    },
                    clash,
                }));
            }
        }
    }
    // Instances whose record was lost hold their place as a record would.
    holders.extend(strays(own, wanted, seen));
    Ok(holders)
}

/// Returns the claims for which instances were made that are in the way and that no record holds.
fn strays(own: &ClaimUid, wanted: &RecordedDevice, seen: &Snapshot<'_>) -> Vec<Holder> {
    let state = seen.state(&wanted.gpu);
    let instances = state
        .into_iter()
        .flat_map(|state| state.instances_in(seen.boot));
    instances
        .filter(|(place, instance)| {
            instance.made_for != *own
                && wanted.target.overlaps(Target::Partition(*place))
                && !is_held(&wanted.gpu, *place, &seen.records)
                && !seen.records.contains_key(&instance.made_for)
        })
        .map(|(place, instance)| Holder::Unreadable {
            claim: instance.made_for.clone(),
            reason: format!(
                "it was lost, and its partition of {} may still be there",
                place.in_words()
            ),
        })
        .collect()
}

/// Returns why a hold of another claim is in the way of a device, if it is. While a claim is being
/// undone, nothing joins it.
fn clash(hold: &Hold, own: &ClaimUid, wanted: &RecordedDevice, undoing: bool) -> Option<Clash> {
    let wanted = wanted.hold(own);
    // `Hold::conflicts` lets shares of one target join each other. A holder that is being undone
    // must not be joined: its settings and partition are about to go.
    let overlap = hold.gpu == wanted.gpu
        && hold.sharing.holds()
        && wanted.sharing.holds()
        && hold.target.overlaps(wanted.target);
    let in_the_way = hold.conflicts(&wanted) || (undoing && overlap);
    if !in_the_way {
        return None;
    }
    // A mode is the kind of target with the way of sharing: partitions beside partitions are one
    // mode, the GPU whole and shares of it are two.
    let mode = |hold: &Hold| (matches!(hold.target, Target::Gpu), shared(hold.sharing));
    Some(if mode(hold) == mode(&wanted) {
        Clash::Device
    } else {
        Clash::Mode
    })
}

/// Returns how a use is shared, if it is.
fn shared(sharing: Sharing) -> Option<Sharing> {
    Some(sharing).filter(|sharing| sharing.is_shared())
}
