//! The uses of a GPU, as records have them.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_gpu::{Holds, Since, Standing, Use, Whose};
use divvy_model::{BootId, ClaimUid, GpuUuid};

use crate::record::{Phase, Record, RecordedDevice};
use crate::stored::Stored;

/// The claim that a call is about, and its devices.
#[derive(Debug, Clone, Copy)]
pub enum Caller<'a> {
    /// The claim gets these devices.
    Gets(&'a ClaimUid, &'a [RecordedDevice]),
    /// The claim lets these devices go.
    LetsGo(&'a ClaimUid, &'a [RecordedDevice]),
    /// No claim: a round of reconcile.
    Round,
}

/// Returns the uses of a GPU, sorted by the part that they have in a call.
pub fn holds_on(
    gpu: &GpuUuid,
    caller: Caller<'_>,
    records: &BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    boot: &BootId,
) -> Holds {
    let own = |claim: &ClaimUid, devices: &[RecordedDevice]| {
        let here = devices.iter().filter(|device| device.gpu == *gpu);
        uses(claim, here, Since::ThisBoot, Standing::Preparing)
    };
    let (claim, whose) = match caller {
        Caller::Gets(claim, devices) => {
            (Some(claim), Whose::Gets(claim.clone(), own(claim, devices)))
        }
        Caller::LetsGo(claim, devices) => (
            Some(claim),
            Whose::LetsGo(claim.clone(), own(claim, devices)),
        ),
        Caller::Round => (None, Whose::Round),
    };
    let mut holds = Holds {
        others: Vec::new(),
        unknown: false,
        whose,
    };
    for (_, stored) in records.iter().filter(|(uid, _)| Some(*uid) != claim) {
        match stored.as_ref() {
            // A corrupt file has no list of GPUs that can be trusted, so it may hold any; the head
            // of a newer version can be read and names them.
            Stored::Corrupt { .. } => holds.unknown = true,
            Stored::Newer { head, .. } => holds.unknown |= head.gpus.contains(gpu),
            Stored::Absent => {}
            Stored::Fine(record) => holds.others.extend(uses_of(record, gpu, boot)),
        }
    }
    holds
}

/// Returns the uses of a GPU that a record names.
pub fn uses_of(record: &Record, gpu: &GpuUuid, boot: &BootId) -> Vec<Use> {
    let since = if record.boot == *boot {
        Since::ThisBoot
    } else if record.may_be_of(boot) {
        Since::Unknown
    } else {
        Since::EarlierBoot
    };
    let standing = match &record.phase {
        Phase::Preparing => Standing::Preparing,
        Phase::Prepared => Standing::Prepared,
        Phase::Leaving(leaving) if leaving.undoing => Standing::Undone,
        Phase::Leaving(_) => Standing::Lingering,
    };
    let here = record.devices.iter().filter(|device| device.gpu == *gpu);
    uses(&record.uid, here, since, standing)
}

fn uses<'d>(
    claim: &ClaimUid,
    devices: impl Iterator<Item = &'d RecordedDevice>,
    since: Since,
    standing: Standing,
) -> Vec<Use> {
    let holding = devices.filter(|device| device.sharing.holds());
    let one = |device: &RecordedDevice| Use {
        hold: device.hold(claim),
        namespace: device.mps.and_then(|slot| slot.namespace),
        given: device.given.clone(),
        since,
        standing,
    };
    holding.map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stored::Head;

    /// The file of a newer version names its GPUs, and no other GPU needs to wait for it.
    #[test]
    fn a_record_of_a_newer_version_may_hold_the_gpus_that_it_names() {
        let gpu = |number: u32| -> GpuUuid {
            let uuid = format!("GPU-12345678-1234-1234-1234-12345678000{number}");
            uuid.parse().unwrap()
        };
        let head = Head {
            gpus: vec![gpu(1)],
            ..Head::default()
        };
        let newer = Stored::Newer { version: 99, head };
        let records = [("a".parse().unwrap(), Arc::new(newer))].into();
        let boot: BootId = "boot-1".parse().unwrap();
        for (number, unknown) in [(1, true), (2, false)] {
            let holds = holds_on(&gpu(number), Caller::Round, &records, &boot);
            assert_eq!(holds.unknown, unknown, "GPU {number}");
        }
    }
}
