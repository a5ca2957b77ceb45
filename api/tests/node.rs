//! `GpuNode`: its columns, and what is read of a report.

use divvy_api::node::{GpuNode, GpuNodeStatus, GpuStatus, Holder, Summary, Trouble, Versions};
use kube_core::CustomResourceExt;

/// Every field of every type has a value, by name: a new field does not compile without a line
/// here.
fn full() -> GpuNodeStatus {
    let text = || "x".to_owned();
    let time = || Some("2026-11-21T20:00:00Z".to_owned());
    let holder = Holder {
        namespace: text(),
        name: text(),
        uid: text(),
        device: text(),
        phase: text(),
        reason: text(),
        pods: vec![text()],
        since: time(),
    };
    let trouble = Trouble {
        kind: text(),
        notice: true,
        gpu: text(),
        subject: text(),
        claim: text(),
        why: text(),
        remedy: text(),
        since: time(),
    };
    let gpu = GpuStatus {
        name: text(),
        uuid: text(),
        product: text(),
        memory_mib: Some(1),
        architecture: text(),
        compute_capability: text(),
        mig_capable: Some(true),
        nvlink_domain: text(),
        fabric: text(),
        mode: text(),
        offered: vec![text()],
        policy: text(),
        holders: vec![holder],
        taints: vec![text()],
        fence: text(),
    };
    GpuNodeStatus {
        driver_name: text(),
        summary: Summary {
            gpus: 1,
            free: 1,
            claims: 1,
            modes: text(),
            trouble: text(),
            since: time(),
        },
        versions: Versions {
            divvy: text(),
            driver: text(),
            cuda: text(),
            kubernetes: text(),
        },
        share_memory: text(),
        gpus: vec![gpu],
        troubles: vec![trouble],
        bad_policies: vec![text()],
        changed: time(),
    }
}

#[test]
fn every_column_shows_a_field_that_there_is() {
    let written = serde_json::json!({ "status": full() });
    for column in GpuNode::crd().spec.versions[0]
        .additional_printer_columns
        .as_ref()
        .unwrap()
    {
        let path = column.json_path.replace('.', "/");
        let value = written
            .pointer(&path)
            .unwrap_or_else(|| panic!("{path} does not exist"));
        assert_eq!(column.type_ == "integer", value.is_number(), "{path}");
    }
}

#[test]
fn a_report_of_an_earlier_version_is_read() {
    let earlier = serde_json::json!({ "summary": { "gpus": 1 }, "gpus": [{ "name": "gpu-0" }], "novel": true });
    let read: GpuNodeStatus = serde_json::from_value(earlier).unwrap();
    let gpu = GpuStatus {
        name: "gpu-0".to_owned(),
        ..GpuStatus::default()
    };
    let summary = Summary {
        gpus: 1,
        ..Summary::default()
    };
    assert_eq!(
        read,
        GpuNodeStatus {
            summary,
            gpus: vec![gpu],
            ..GpuNodeStatus::default()
        }
    );
}
