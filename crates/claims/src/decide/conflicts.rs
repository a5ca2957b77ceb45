//! Who is in the way of a claim: holds of other claims, and GPUs whose state is not known.

use std::sync::Arc;

use divvy_model::{ClaimUid, DeviceName, GpuUuid, Hold, HoldKind};

use super::Snapshot;
use crate::{Claim, ClaimRef, OtherClaim, Phase, RecordedDevice, Refusal, Stored, Why};

/// Why a holder is in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clash {
    /// It holds what is wanted.
    Device,
    /// It holds the GPU in another mode.
    Mode,
}

/// A claim that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Its record says that it holds the GPU.
    Record {
        claim: ClaimRef,
        device: DeviceName,
        /// Whether it has been unprepared and only something left over is in the way, and what.
        leaving: Option<String>,
        /// Why it is in the way.
        clash: Clash,
    },
    /// Its record cannot be read, so it may.
    Unreadable {
        /// UID, from the file's name.
        claim: ClaimUid,
        /// What is wrong with the record.
        reason: String,
    },
}

/// Who is to be waited for, and for which device. Never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders {
    /// The device asked for.
    pub device: DeviceName,
    pub gpu: GpuUuid,
    /// Who is in the way.
    pub holders: Vec<Holder>,
}

impl Holder {
    /// UID of the claim, and its names where its record can be read.
    pub fn claim(&self) -> (&ClaimUid, Option<&ClaimRef>) {
        match self {
            Self::Record { claim, .. } => (&claim.uid, Some(claim)),
            Self::Unreadable { claim, .. } => (claim, None),
        }
    }

    /// Whether its claim, as the API has it now, has the device allocated: then nothing but its end helps.
    pub fn is_in_use(&self, found: &Claim) -> bool {
        matches!(self, Self::Record { device, .. } if found.allocates(device))
    }

    /// What a claim is refused for that this holder is in the way of.
    pub fn refusal(&self, claim: &Claim, wanted: &Holders, in_use: bool) -> Refusal {
        let named = |holder: &ClaimRef| OtherClaim::seen_from(&claim.namespace, holder);
        let why = match self {
            Self::Record { claim: holder, device, clash, .. } if in_use => {
                Why::InUse { holder: named(holder), held: device.clone(), clash: *clash }
            }
            Self::Record { claim: holder, leaving, .. } => Why::StillHeld {
                holder: named(holder),
                why: leaving.clone().unwrap_or_else(|| "it is not yet unprepared".to_owned()),
            },
            Self::Unreadable { claim: holder, reason } => {
                Why::UnreadableHolder { holder: holder.to_string(), reason: reason.clone() }
            }
        };
        why.of(claim, Some(&wanted.device), Some(&wanted.gpu))
    }
}

/// Which claims are in the way of these devices. Admin access and other claims are not in each other's way.
pub(crate) fn conflicts(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<Option<Holders>, Refusal> {
    for wanted in devices.iter().filter(|device| device.kind.needs().is_some()) {
        let found =
            not_fenced(&claim.uid, &wanted.gpu, seen).and_then(|()| holders(&claim.uid, wanted, seen));
        let holders = found.map_err(|why| why.about(claim, wanted))?;
        if !holders.is_empty() {
            let (device, gpu) = (wanted.allocated.device.clone(), wanted.gpu.clone());
            return Ok(Some(Holders { device, gpu, holders }));
        }
    }
    Ok(None)
}

/// A GPU is fenced while the outcome of a step of another claim is not known, or its own file cannot be used.
fn not_fenced(own: &ClaimUid, gpu: &GpuUuid, seen: &Snapshot<'_>) -> Result<(), Why> {
    match seen.gpus.get(gpu).map(Arc::as_ref) {
        None | Some(Stored::Absent) => Ok(()),
        // What was done to the GPU is not known until its file is made again.
        Some(Stored::Corrupt { reason }) => {
            Err(Why::Fenced(format!("its state file cannot be read and is being rebuilt: {reason}")))
        }
        Some(Stored::Newer { version, .. }) => Err(Why::GpuStateNewer { version: *version }),
        Some(Stored::Fine(state)) => {
            // A reboot settles what a fence was for.
            let now = state.fences.iter().filter(|fence| fence.boot == *seen.boot);
            let mut others = now.filter(|fence| fence.claim.as_ref() != Some(own));
            others.next().map_or(Ok(()), |fence| Err(Why::Fenced(fence.reason.clone())))
        }
    }
}

fn holders(own: &ClaimUid, wanted: &RecordedDevice, seen: &Snapshot<'_>) -> Result<Vec<Holder>, Why> {
    let mut holders = Vec::new();
    for (uid, stored) in seen.records.iter().filter(|(uid, _)| *uid != own) {
        match stored.as_ref() {
            Stored::Corrupt { reason } => {
                holders.push(Holder::Unreadable { claim: uid.clone(), reason: reason.clone() });
            }
            Stored::Newer { version, head } if head.gpus.contains(&wanted.gpu) => {
                return Err(Why::HeldByNewer { holder: uid.clone(), version: *version });
            }
            Stored::Absent | Stored::Newer { .. } => {}
            Stored::Fine(record) => {
                let clashing = record.holds().find_map(|hold| Some((clash(&hold, wanted)?, hold.device)));
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
    Ok(holders)
}

/// Whether a hold is in the way of a device, and why.
fn clash(hold: &Hold, wanted: &RecordedDevice) -> Option<Clash> {
    if hold.gpu != wanted.gpu {
        return None;
    }
    if may_share(hold.kind, wanted.kind) {
        return None;
    }
    let same = hold.kind.needs() == wanted.kind.needs();
    Some(if same { Clash::Device } else { Clash::Mode })
}

/// Whether two holds fit on one GPU: by the mode lock, only partitions beside each other, and shares.
pub(super) fn may_share(a: HoldKind, b: HoldKind) -> bool {
    match (a, b) {
        (HoldKind::Admin, _) | (_, HoldKind::Admin) | (HoldKind::Share, HoldKind::Share) => true,
        (HoldKind::Partition { placement: a, .. }, HoldKind::Partition { placement: b, .. }) => {
            !a.overlaps(b)
        }
        (HoldKind::Whole | HoldKind::Share, _) | (_, HoldKind::Whole | HoldKind::Share) => false,
    }
}
