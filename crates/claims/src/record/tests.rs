use std::collections::BTreeMap;

use divvy_model::mig::{ComputeInstanceId, GpuInstanceId, GpuInstanceProfileId, Placement};

use super::*;
use crate::{Cause, ChangeError, Leaving};

/// A record with every field and every kind of device.
fn expected() -> Record {
    let gpu = |n: u32| -> GpuUuid {
        format!("GPU-12345678-1234-1234-1234-{n:012}")
            .parse()
            .unwrap()
    };
    let device = |request: &str, name: &str, n| RecordedDevice {
        allocated: AllocatedDevice {
            request: request.to_owned(),
            pool: "node-a/divvy".to_owned(),
            device: name.parse().unwrap(),
            share_id: None,
            admin_access: false,
            consumed_capacity: BTreeMap::new(),
        },
        gpu: gpu(n),
        target: Target::Gpu,
        sharing: Sharing::Exclusive,
        theirs: false,
        time_slice: None,
        share_memory: None,
        memory_cap: None,
        clears_caps: false,
        mps: None,
        extra_nodes: Vec::new(),
        given: None,
    };
    let mut share = device("main/big", "gpu-0-ts", 1);
    share.allocated.share_id = Some("5d4c".to_owned());
    share.allocated.consumed_capacity = [("memory".to_owned(), "10Gi".to_owned())].into();
    share.sharing = Sharing::TimeSliced;
    share.time_slice = Some(TimeSlice::Long);
    share.extra_nodes = vec!["/dev/gdrdrv".to_owned()];
    let mut part = device("part", "gpu-1-mig-static-1g10gb-19-2", 2);
    part.target = Target::Partition(Place {
        profile: GpuInstanceProfileId(19),
        placement: Placement { start: 2, size: 1 },
    });
    part.theirs = true;
    part.given = Some(Made {
        gi: GpuInstanceId(3),
        ci: ComputeInstanceId(0),
        uuid: "MIG-aaaa".parse().unwrap(),
    });
    let mut monitor = device("monitor", "gpu-1-admin", 2);
    monitor.allocated.admin_access = true;
    monitor.sharing = Sharing::Admin;
    Record {
        uid: "0f0e0d0c-1111-2222-3333-444455556666".parse().unwrap(),
        namespace: "team-a".to_owned(),
        name: "train".to_owned(),
        boot: "b0071d00-0000-0000-0000-000000000001".parse().unwrap(),
        allocated_at: Some("2026-11-21T14:00:00Z".to_owned()),
        devices: vec![share, part, monitor],
        classes: [("share".to_owned(), "gpu.divvy.dev-share".to_owned())].into(),
        pods: vec![PodRef {
            name: "train-0".to_owned(),
            uid: "p0d".to_owned(),
        }],
        received: None,
        metadata: None,
        phase: Phase::Leaving(Leaving {
            reason: "process 42 still uses it".to_owned(),
            undoing: true,
        }),
    }
}

/// Until the first release a change of the format changes this file; after it, a version is added.
#[test]
fn a_record_is_written_and_read_as_captured() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/record-v1.json");
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs_err::write(&path, expected().encode()).unwrap();
    }
    let captured = fs_err::read(path).unwrap();
    assert_eq!(Record::decode(&captured), Stored::Fine(expected()));
    let body =
        |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap()["body"].clone();
    assert_eq!(body(&expected().encode()), body(&captured));
}

#[test]
fn a_record_cut_off_anywhere_or_with_any_byte_changed_is_corrupt() {
    let whole = expected().encode();
    let end = whole.len() - 1; // the newline at the end may go
    for length in 0..end {
        assert!(
            matches!(Record::decode(&whole[..length]), Stored::Corrupt { .. }),
            "cut to {length} bytes"
        );
    }
    for at in 0..end {
        let mut changed = whole.clone();
        changed[at] ^= 0x01;
        assert!(
            matches!(Record::decode(&changed), Stored::Corrupt { .. }),
            "byte {at} changed"
        );
    }
    let reason = |bytes: &[u8]| match Record::decode(bytes) {
        Stored::Corrupt { reason } => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(reason(b""), "the file is empty");
    assert_eq!(
        reason(&whole[..100]),
        "the file ends early, after 100 bytes"
    );
    let not_ours = reason(b"driver: gpu.divvy.dev\n");
    assert!(
        not_ours.starts_with("the file is not valid JSON: "),
        "{not_ours}"
    );
    let text = String::from_utf8(whole).unwrap();
    assert_eq!(
        reason(text.replace("team-a", "team-b").as_bytes()),
        "the checksum does not match the content"
    );
}

#[test]
fn a_record_of_a_later_version_still_shows_its_claim_and_its_gpus() {
    let head = Head {
        claim: Some(expected().reference()),
        gpus: expected().gpus().into_iter().collect(),
    };
    let bytes = stored::encode(7, &head, &serde_json::json!({"holds": "in some new way"}));
    assert_eq!(
        Record::decode(&bytes),
        Stored::Newer {
            version: 7,
            head: head.clone()
        }
    );
    // There never was a version 0: nothing is known of it either.
    let mut body = serde_json::to_value(expected()).unwrap();
    body["version"] = 0.into();
    assert_eq!(
        Record::decode(&stored::encode(0, &head, &body)),
        Stored::Newer { version: 0, head }
    );
}

#[test]
fn the_identity_of_an_allocation_is_its_time_and_its_results() {
    let record = expected();
    let same = record.allocation();
    assert!(record.is_of(&same));
    assert!(!record.is_of(&Allocation {
        allocated_at: Some("2026-11-21T15:00:00Z".to_owned()),
        ..same.clone()
    }));
    // The same moment, as another version of this program or of a library may have written it.
    for written in [
        "2026-11-21T15:00:00+01:00",
        "2026-11-21T14:00:00.000Z",
        "2026-11-21 14:00:00+00:00",
    ] {
        assert!(
            record.is_of(&Allocation {
                allocated_at: Some(written.to_owned()),
                ..same.clone()
            }),
            "{written}"
        );
    }
    for none in [None, Some("soon".to_owned())] {
        assert!(
            !record.is_of(&Allocation {
                allocated_at: none.clone(),
                ..same.clone()
            }),
            "{none:?}"
        );
        let unknown = Record {
            allocated_at: none,
            ..expected()
        };
        assert!(unknown.is_of(&unknown.allocation()));
    }
    let mut other = same.clone();
    other.results[0].device = "gpu-5".parse().unwrap();
    assert!(!record.is_of(&other));
    other.results.truncate(1);
    assert!(!record.is_of(&other));
}

#[test]
fn a_failed_change_says_in_its_chain_whether_it_may_have_happened() {
    let error = ChangeError::Unknown(Cause::new("no answer after 10 s"));
    assert_eq!(error.to_string(), "its outcome is not known");
    assert_eq!(
        std::error::Error::source(&error).unwrap().to_string(),
        "no answer after 10 s"
    );
}

#[test]
fn the_arrival_of_the_prepare_survives_the_file_and_need_not_be_there() {
    let record = Record {
        received: Some(std::time::Duration::from_millis(12_345)),
        ..expected()
    };
    assert_eq!(Record::decode(&record.encode()), Stored::Fine(record));
}
