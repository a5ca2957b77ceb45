//! Who is in the way of a claim: holds of other claims, and GPUs whose state is not known.

use divvy_model::{ClaimUid, DeviceName, GpuUuid, Hold, HoldKind, TimeSlice};

use super::Snapshot;
use crate::{Claim, ClaimRef, Phase, RecordedDevice, Refusal, Stored};

/// Why a holder is in the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clash {
    /// It holds what is wanted.
    Device,
    /// It holds the GPU in another mode.
    Mode,
    /// It has set another time slice.
    TimeSlice {
        /// What is wanted.
        wanted: TimeSlice,
        /// What it has set.
        found: TimeSlice,
    },
}

/// A claim that is in the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Its record says that it holds the GPU.
    Record {
        /// The claim.
        claim: ClaimRef,
        /// Its device.
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
    /// Its GPU.
    pub gpu: GpuUuid,
    /// Who is in the way.
    pub holders: Vec<Holder>,
}

/// Who is in the way of these devices. Admin access is in nobody's way, and nobody in its.
pub(crate) fn conflicts(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<Option<Holders>, Refusal> {
    for wanted in devices.iter().filter(|d| d.kind.needs().is_some()) {
        let (device, gpu) = (&wanted.allocated.device, &wanted.gpu);
        let names = || (claim.reference(), device.clone(), gpu.clone());
        match seen.gpus.get(gpu).map(std::sync::Arc::as_ref) {
            None | Some(Stored::Absent) => {}
            // What was done to the GPU is not known until its file is made again.
            Some(Stored::Corrupt { reason }) => {
                let (claim, device, gpu) = names();
                let reason = format!("its state file cannot be read, and is made again: {reason}");
                return Err(Refusal::Fenced { claim, device, gpu, reason });
            }
            Some(Stored::Newer { version, .. }) => {
                let (claim, device, gpu) = names();
                return Err(Refusal::GpuStateNewer { claim, device, gpu, version: *version });
            }
            Some(Stored::Fine(state)) => {
                // A reboot settles what a fence was for.
                let mut others = state.fences.iter().filter(|fence| fence.claim.as_ref() != Some(&claim.uid));
                if let Some(fence) = others.find(|fence| fence.boot == *seen.boot) {
                    let (claim, device, gpu) = names();
                    return Err(Refusal::Fenced { claim, device, gpu, reason: fence.reason.clone() });
                }
            }
        }
        let mut holders = Vec::new();
        for (uid, stored) in seen.records.iter().filter(|(uid, _)| **uid != claim.uid) {
            match stored.as_ref() {
                Stored::Absent => {}
                Stored::Corrupt { reason } => {
                    holders.push(Holder::Unreadable { claim: uid.clone(), reason: reason.clone() });
                }
                Stored::Newer { version, head } => {
                    if head.gpus.contains(gpu) {
                        let (claim, device, gpu) = names();
                        let holder = match &head.claim {
                            Some(reference) => format!("claim {reference}"),
                            None => format!("claim UID {uid}"),
                        };
                        return Err(Refusal::HeldByNewer { claim, device, gpu, holder, version: *version });
                    }
                }
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
        if !holders.is_empty() {
            let (_, device, gpu) = names();
            return Ok(Some(Holders { device, gpu, holders }));
        }
    }
    Ok(None)
}

/// Whether a hold is in the way of a device, and why.
fn clash(hold: &Hold, wanted: &RecordedDevice) -> Option<Clash> {
    if hold.gpu != wanted.gpu {
        return None;
    }
    if !may_share(hold.kind, wanted.kind) {
        let same = hold.kind.needs() == wanted.kind.needs();
        return Some(if same { Clash::Device } else { Clash::Mode });
    }
    match (wanted.time_slice, hold.time_slice) {
        (Some(wanted), Some(found)) if wanted != found => Some(Clash::TimeSlice { wanted, found }),
        _ => None,
    }
}

/// Whether two holds fit on one GPU: by the mode lock (DESIGN section 1), only partitions beside each other, and shares.
pub(super) fn may_share(a: HoldKind, b: HoldKind) -> bool {
    match (a, b) {
        (HoldKind::Admin, _) | (_, HoldKind::Admin) | (HoldKind::Share, HoldKind::Share) => true,
        (HoldKind::Partition { placement: a, .. }, HoldKind::Partition { placement: b, .. }) => {
            !a.overlaps(b)
        }
        (HoldKind::Whole | HoldKind::Share, _) | (_, HoldKind::Whole | HoldKind::Share) => false,
    }
}
