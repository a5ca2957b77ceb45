use std::path::Path;

use divvy_model::mig::{GpuInstanceProfileId, Placement};
use divvy_model::{ClaimUid, GpuUuid, Place, Sharing, Target};
use serde_json::Value;

use super::*;
use crate::{AllocatedDevice, Made, Phase};

const DRIVER: &str = "gpu.divvy.dev";

fn device(request: &str, name: &str, sharing: Sharing) -> RecordedDevice {
    let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
    let share = sharing.is_shared();
    RecordedDevice {
        allocated: AllocatedDevice {
            request: request.to_owned(),
            pool: "node-a/divvy".to_owned(),
            device: name.parse().unwrap(),
            share_id: share.then(|| "5d4c".to_owned()),
            admin_access: false,
            consumed_capacity: if share {
                [("memory".to_owned(), "10Gi".to_owned())].into()
            } else {
                BTreeMap::new()
            },
        },
        gpu,
        target: Target::Gpu,
        sharing,
        theirs: false,
        time_slice: None,
        share_memory: None,
        memory_cap: None,
        clears_caps: false,
        mps: None,
        extra_nodes: Vec::new(),
        given: None,
    }
}

fn partition(request: &str, name: &str, start: u32) -> RecordedDevice {
    let place = Place {
        profile: GpuInstanceProfileId(19),
        placement: Placement { start, size: 1 },
    };
    RecordedDevice {
        target: Target::Partition(place),
        ..device(request, name, Sharing::Exclusive)
    }
}

/// A record with these devices, whose partitions have been made.
fn record(pod_claim_name: Option<&str>, devices: Vec<RecordedDevice>) -> Record {
    let mut devices = devices;
    for (n, device) in devices.iter_mut().enumerate() {
        device.given = device.target.place().map(|_| Made {
            gi: divvy_model::mig::GpuInstanceId(7),
            ci: divvy_model::mig::ComputeInstanceId(0),
            uuid: format!("MIG-{n:04}").parse().unwrap(),
        });
    }
    let attributes: Attributes = [
        (
            "gpuUUID",
            AttributeValue::String("GPU-12345678-1234-1234-1234-123456780001".to_owned()),
        ),
        (
            "driverVersion",
            AttributeValue::Version("580.95.5".to_owned()),
        ),
        ("c2cEnabled", AttributeValue::Bool(false)),
        ("resource.kubernetes.io/numaNode", AttributeValue::Int(1)),
        (
            "resource.kubernetes.io/pciBusID",
            AttributeValue::String("0000:10:00.0".to_owned()),
        ),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    Record {
        uid: "0f0e0d0c-1111-2222-3333-444455556666".parse().unwrap(),
        namespace: "team-a".to_owned(),
        name: "train-gpu-x7k2p".to_owned(),
        boot: "boot-1".parse().unwrap(),
        allocated_at: None,
        metadata: Some(Metadata {
            pod_claim_name: pod_claim_name.map(str::to_owned),
            attributes: devices
                .iter()
                .map(|d| (d.allocated.device.clone(), attributes.clone()))
                .collect(),
        }),
        devices,
        classes: BTreeMap::new(),
        pods: Vec::new(),
        received: None,
        phase: Phase::Prepared,
    }
}

/// Reads a file like the reference reader: takes the first object whose apiVersion it knows, passes
/// over those that it does not know, and fails at anything else that is wrong.
fn read(bytes: &[u8], known: &[&str]) -> Result<Value, String> {
    for object in serde_json::Deserializer::from_slice(bytes).into_iter::<Value>() {
        let object = object.map_err(|error| error.to_string())?;
        let version = object["apiVersion"]
            .as_str()
            .ok_or("an object without apiVersion")?;
        if known.contains(&version) {
            return if object["kind"] == "DeviceMetadata" {
                Ok(object)
            } else {
                Err("another kind".to_owned())
            };
        }
    }
    Err(format!("none of {known:?}"))
}

fn golden(name: &str, files: &[MetadataFile]) {
    let mut text = String::new();
    for file in files {
        text += &format!("{} by {}\n", file.container_path, file.cdi_device);
        text += std::str::from_utf8(&file.bytes).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures")
        .join(name);
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs_err::write(&path, &text).unwrap();
    }
    assert_eq!(
        text,
        fs_err::read_to_string(&path).unwrap(),
        "{name}; UPDATE_FIXTURES=1 writes it anew"
    );
}

#[test]
fn the_files_of_each_kind_of_claim_are_as_captured() {
    let whole = |request: &str, name: &str| device(request, name, Sharing::Exclusive);
    let cases = [
        (
            "metadata-template.txt",
            record(Some("gpu"), vec![whole("main", "gpu-0")]),
        ),
        (
            "metadata-named.txt",
            record(None, vec![whole("main", "gpu-0")]),
        ),
        (
            "metadata-subrequest.txt",
            record(None, vec![whole("main/big", "gpu-0")]),
        ),
        (
            "metadata-partition.txt",
            record(None, vec![partition("main", "gpu-0-mig-1g10gb-19-2", 2)]),
        ),
        (
            "metadata-share.txt",
            record(None, vec![device("main", "gpu-0-ts", Sharing::TimeSliced)]),
        ),
        (
            "metadata-requests.txt",
            record(None, vec![whole("one", "gpu-0"), whole("other", "gpu-1")]),
        ),
        (
            "metadata-devices.txt",
            record(
                None,
                vec![
                    partition("main", "gpu-0-mig-1g10gb-19-0", 0),
                    whole("other", "gpu-1"),
                    partition("main", "gpu-0-mig-1g10gb-19-2", 2),
                ],
            ),
        ),
    ];
    for (name, record) in cases {
        let files = metadata_files(DRIVER, &record);
        golden(name, &files);
        for file in files {
            let all = [
                "metadata.resource.k8s.io/v1beta1",
                "metadata.resource.k8s.io/v1alpha1",
            ];
            let newest = read(&file.bytes, &all).unwrap();
            assert_eq!(newest["apiVersion"], all[0]);
            let mut oldest = read(&file.bytes, &all[1..]).unwrap();
            oldest["apiVersion"] = newest["apiVersion"].clone();
            assert_eq!(oldest, newest, "all versions mean the same");
            assert!(read(&file.bytes, &["metadata.resource.k8s.io/v1"]).is_err());
            assert!(file.bytes.ends_with(b"}\n"));
            // KubeVirt wants one request, by the name that the claim has for it.
            assert_eq!(newest["requests"].as_array().unwrap().len(), 1);
            // A file that is cut short is never read as something else.
            assert!(read(&file.bytes[..file.bytes.len() / 4], &all).is_err());
        }
    }
}

#[test]
fn a_record_without_metadata_has_no_files() {
    let whole = device("main", "gpu-0", Sharing::Exclusive);
    let old = Record {
        metadata: None,
        ..record(Some("gpu"), vec![whole])
    };
    assert_eq!(metadata_files(DRIVER, &old), []);
}

#[test]
fn a_record_keeps_what_its_files_say() {
    let whole = device("main", "gpu-0", Sharing::Exclusive);
    let record = record(Some("gpu"), vec![whole]);
    let back = Record::decode(&record.encode());
    assert_eq!(
        metadata_files(DRIVER, back.fine().unwrap()),
        metadata_files(DRIVER, &record)
    );
}

#[test]
fn a_file_names_no_other_claim_and_no_other_request() {
    let uid: ClaimUid = "0f0e0d0c-1111-2222-3333-444455556666".parse().unwrap();
    let devices = vec![
        device("one", "gpu-0", Sharing::Exclusive),
        device("other", "gpu-1", Sharing::Exclusive),
    ];
    let files = metadata_files(DRIVER, &record(None, devices));
    let text = |n: usize| String::from_utf8(files[n].bytes.clone()).unwrap();
    assert!(text(0).contains("gpu-0") && !text(0).contains("gpu-1") && !text(0).contains("other"));
    assert!(
        text(1).contains("gpu-1") && !text(1).contains("gpu-0") && text(1).contains(uid.as_str())
    );
}

#[test]
fn only_labels_become_parts_of_paths() {
    for good in ["a", "gpu-0", "0", &"x".repeat(63)] {
        assert!(is_label(good), "{good}");
    }
    for bad in [
        "",
        "..",
        "a/b",
        "-a",
        "a-",
        "A",
        "a.b",
        "a b",
        &"x".repeat(64),
    ] {
        assert!(!is_label(bad), "{bad}");
    }
    let outside = device("../../etc", "gpu-0", Sharing::Exclusive);
    assert_eq!(metadata_files(DRIVER, &record(None, vec![outside])), []);
}

/// Programs find the attributes under the names by which selectors chose the device.
#[test]
fn files_have_the_published_names() {
    let share = device("gpu", "gpu-0-ts", Sharing::TimeSliced);
    let files = metadata_files("gpu.nvidia.com", &record(None, vec![share]));
    let object = read(&files[0].bytes, &["metadata.resource.k8s.io/v1beta1"]).unwrap();
    let attributes = object["requests"][0]["devices"][0]["attributes"]
        .as_object()
        .unwrap();
    assert_eq!(
        attributes.keys().collect::<Vec<_>>(),
        [
            "driverVersion",
            "gpu.divvy.dev/c2cEnabled",
            "gpu.divvy.dev/gpuUUID",
            "gpu.divvy.dev/memoryGranted",
            "resource.kubernetes.io/numaNode",
            "resource.kubernetes.io/pciBusID",
        ]
    );
}

#[test]
fn a_share_by_percent_says_what_it_came_to() {
    let mut share = device("gpu", "gpu-0-ts", Sharing::TimeSliced);
    share.allocated.consumed_capacity = [("percent".to_owned(), "25".to_owned())].into();
    share.share_memory = Some(20 << 30);
    let record = record(None, vec![share]);
    let files = metadata_files(DRIVER, &record);
    let object = read(&files[0].bytes, &["metadata.resource.k8s.io/v1alpha1"]).unwrap();
    let attributes = &object["requests"][0]["devices"][0]["attributes"];
    assert_eq!(attributes["memoryGranted"]["string"], "21474836480");
    assert_eq!(attributes["coresGranted"]["string"], "25");
}
