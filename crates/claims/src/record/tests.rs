use super::*;
use crate::{Cause, Leaving, Outcome, StepError};
use divvy_model::mig::{GpuInstanceProfileId, Placement};
use std::collections::BTreeMap;

fn expected() -> Record {
    let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
    let step = |start| {
        Step::create_partition(
            gpu.clone(),
            divvy_model::mig::GpuInstanceProfileId(19),
            divvy_model::mig::Placement { start, size: 1 },
        )
    };
    let done = Outcome::Partition {
        gi: divvy_model::mig::GpuInstanceId(3),
        ci: divvy_model::mig::ComputeInstanceId(0),
        uuid: "MIG-aaaa".parse().unwrap(),
    };
    Record {
        uid: "0f0e0d0c-1111-2222-3333-444455556666".parse().unwrap(),
        namespace: "team-a".to_owned(),
        name: "train".to_owned(),
        boot: "b0071d00-0000-0000-0000-000000000001".parse().unwrap(),
        allocated_at: Some("2026-11-21T14:00:00Z".to_owned()),
        devices: vec![
            RecordedDevice {
                allocated: AllocatedDevice {
                    request: "main/big".to_owned(),
                    pool: "node-a-gpus".to_owned(),
                    device: "gpu-0".parse().unwrap(),
                    share_id: Some("5d4c".to_owned()),
                    admin_access: false,
                    consumed_capacity: BTreeMap::from([("memory".to_owned(), "10Gi".to_owned())]),
                },
                gpu: gpu.clone(),
                kind: HoldKind::Whole,
                time_slice: None,
                extra_nodes: Vec::new(),
                is_static: false,
            },
            RecordedDevice {
                allocated: AllocatedDevice {
                    request: "monitor".to_owned(),
                    pool: "node-a-gpus".to_owned(),
                    device: "gpu-1".parse().unwrap(),
                    share_id: None,
                    admin_access: true,
                    consumed_capacity: BTreeMap::new(),
                },
                gpu: "GPU-12345678-1234-1234-1234-123456780002".parse().unwrap(),
                kind: HoldKind::Admin,
                time_slice: None,
                extra_nodes: Vec::new(),
                is_static: false,
            },
        ],
        pods: vec![PodRef { name: "train-0".to_owned(), uid: "p0d".to_owned() }],
        received: None,
        metadata: None,
        phase: Phase::Leaving(Leaving { reason: "process 42 still uses it".to_owned(), undoing: true }),
        steps: vec![
            StepState { step: step(0), progress: Progress::Done { outcome: done } },
            StepState {
                step: step(1),
                progress: Progress::Intended { before: vec![divvy_model::mig::GpuInstanceId(3)] },
            },
            StepState { step: step(2), progress: Progress::Undone },
        ],
    }
}

/// What version 2 can say beyond version 1.
fn expected_v2() -> Record {
    let mut record = expected();
    record.devices[0].kind =
        HoldKind::Partition { profile: GpuInstanceProfileId(19), placement: Placement { start: 0, size: 1 } };
    let made = Outcome::GpuInstance { gi: divvy_model::mig::GpuInstanceId(9) };
    record.steps[1].progress = Progress::Begun { before: vec![divvy_model::mig::GpuInstanceId(3)], made };
    record
}

/// What version 3 can say beyond version 2.
fn expected_v3() -> Record {
    let mut record = expected_v2();
    record.devices[0].kind = HoldKind::Share;
    record.devices[0].time_slice = Some(TimeSlice::Long);
    record.devices[1].kind =
        HoldKind::Partition { profile: GpuInstanceProfileId(19), placement: Placement { start: 2, size: 1 } };
    record.devices[1].is_static = true;
    record.steps[2].step = record.devices[1].step().unwrap();
    record
}

#[test]
fn a_device_finds_what_its_own_step_has_made() {
    let record = expected_v2();
    let made = MadePartition {
        gpu_instance: GpuInstanceId(3),
        compute_instance: ComputeInstanceId(0),
        uuid: "MIG-aaaa".parse().unwrap(),
    };
    assert_eq!(record.devices[0].partition(&record.steps), Some(made));
    assert_eq!(record.devices[0].partition(&record.steps[1..]), None);
    assert_eq!(record.devices[1].partition(&record.steps), None);
}

#[test]
fn every_version_of_a_record_has_a_captured_file_that_still_reads() {
    let fixtures = [
        (include_bytes!("../../fixtures/record-v1.json").as_slice(), expected()),
        (include_bytes!("../../fixtures/record-v2.json").as_slice(), expected_v2()),
        (include_bytes!("../../fixtures/record-v3.json").as_slice(), expected_v3()),
    ];
    assert_eq!(fixtures.len(), usize::try_from(VERSION).unwrap(), "one fixture per version");
    let (newest, live) = fixtures.last().unwrap().clone();
    for (bytes, expected) in fixtures {
        assert_eq!(Record::decode(bytes), Stored::Fine(expected));
    }
    let body = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap()["body"].clone();
    assert_eq!(body(&live.encode()), body(newest), "the newest version is written as captured");
}

#[test]
fn a_record_cut_off_anywhere_or_with_any_byte_changed_is_corrupt_and_never_absent_newer_or_fine() {
    let whole = expected().encode();
    let end = whole.len() - 1; // the newline at the end may go
    for length in 0..end {
        assert!(matches!(Record::decode(&whole[..length]), Stored::Corrupt { .. }), "cut to {length} bytes");
    }
    for at in 0..end {
        let mut changed = whole.clone();
        changed[at] ^= 0x01;
        assert!(matches!(Record::decode(&changed), Stored::Corrupt { .. }), "byte {at} changed");
    }
    let reason = |bytes: &[u8]| match Record::decode(bytes) {
        Stored::Corrupt { reason } => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(b""), "the file is empty");
    assert_eq!(reason(&whole[..100]), "the file ends early, after 100 bytes");
    let text = String::from_utf8(whole).unwrap();
    assert_eq!(
        reason(text.replace("team-a", "team-b").as_bytes()),
        "the checksum does not match the content"
    );
}

#[test]
fn a_record_of_a_later_version_still_shows_its_claim_and_its_gpus() {
    let head = Head { claim: Some(expected().reference()), gpus: expected().gpus().into_iter().collect() };
    let bytes = stored::encode(7, &head, &serde_json::json!({"holds": "in some new way"}));
    assert_eq!(Record::decode(&bytes), Stored::Newer { version: 7, head: head.clone() });
    // There never was a version 0: nothing is known of it either.
    let mut body = serde_json::to_value(expected()).unwrap();
    body["version"] = 0.into();
    assert_eq!(Record::decode(&stored::encode(0, &head, &body)), Stored::Newer { version: 0, head });
}

#[test]
fn the_identity_of_an_allocation_is_its_time_and_its_results() {
    let record = expected();
    let same = record.allocation();
    assert!(record.is_of(&same));
    assert!(
        !record.is_of(&Allocation { allocated_at: Some("2026-11-21T15:00:00Z".to_owned()), ..same.clone() })
    );
    // The same moment, as another version of this program or of a library may have written it.
    for written in ["2026-11-21T15:00:00+01:00", "2026-11-21T14:00:00.000Z", "2026-11-21 14:00:00+00:00"] {
        assert!(
            record.is_of(&Allocation { allocated_at: Some(written.to_owned()), ..same.clone() }),
            "{written}"
        );
    }
    for none in [None, Some("soon".to_owned())] {
        assert!(!record.is_of(&Allocation { allocated_at: none.clone(), ..same.clone() }), "{none:?}");
        let unknown = Record { allocated_at: none, ..expected() };
        assert!(unknown.is_of(&unknown.allocation()));
    }
    let mut other = same.clone();
    other.results[0].device = "gpu-5".parse().unwrap();
    assert!(!record.is_of(&other));
    other.results.truncate(1);
    assert!(!record.is_of(&other));
}

#[test]
fn a_failed_step_says_in_its_chain_whether_it_may_have_happened() {
    let error = StepError::Unknown(Cause::new("no answer after 10 s"));
    assert_eq!(error.to_string(), "its outcome is not known");
    assert_eq!(std::error::Error::source(&error).unwrap().to_string(), "no answer after 10 s");
}

#[test]
fn the_arrival_of_the_prepare_survives_the_file_and_need_not_be_there() {
    let record = Record { received: Some(std::time::Duration::from_millis(12_345)), ..expected() };
    assert_eq!(Record::decode(&record.encode()), Stored::Fine(record));
}
