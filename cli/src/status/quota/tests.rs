use serde_json::json;

use super::*;

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn claim(name: &str, device: Option<&str>) -> ResourceClaim {
    let mut claim = json!({
        "metadata": {"namespace": "red", "name": name, "uid": name},
        "spec": {"devices": {"requests": [
            {"name": "r", "exactly": {"deviceClassName": "gpu.divvy.dev", "allocationMode": "ExactCount", "count": 1}},
        ]}},
    });
    if let Some(device) = device {
        claim["status"] = json!({
            "allocation": {"devices": {"results": [
                {"request": "r", "driver": "gpu.divvy.dev", "pool": "n1", "device": device},
            ]}},
            "reservedFor": [{"resource": "pods", "name": format!("{name}-0"), "uid": "u"}],
        });
    }
    typed(claim)
}

fn world(claims: Vec<ResourceClaim>) -> Snapshot {
    let gpu = |name: &str| json!({"name": name, "capacity": {"memory": {"value": "80Gi"}}});
    Snapshot {
        driver: "gpu.divvy.dev".to_owned(),
        slices: vec![typed(json!({
            "metadata": {"name": "s"},
            "spec": {"driver": "gpu.divvy.dev", "nodeName": "n1", "devices": [gpu("gpu-0"), gpu("gpu-1")],
                "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}},
        }))],
        classes: vec![typed(json!({
            "metadata": {"name": "gpu.divvy.dev"},
            "spec": {"selectors": [{"cel": {"expression": "device.driver == 'gpu.divvy.dev'"}}]},
        }))],
        claims,
        ..Snapshot::default()
    }
}

fn gpu_quota(inside: &str, name: &str, limits: &Value) -> DynamicObject {
    typed(json!({
        "apiVersion": "divvy.dev/v1beta1", "kind": "GpuQuota",
        "metadata": {"namespace": inside, "name": name}, "spec": {"limits": limits},
    }))
}

fn text(world: &Snapshot, gpu: Vec<DynamicObject>, resource: Vec<ResourceQuota>) -> String {
    let all = Quotas {
        gpu,
        resource,
        unread: Vec::new(),
    };
    render(&quotas(world, &all, None))
}

#[test]
fn a_quota_shows_what_is_used_the_limit_and_by_whom() {
    let mut through = claim("b", None);
    let grant = "memory=85899345920,percent=100".to_owned();
    let annotations = through.metadata.annotations.get_or_insert_default();
    annotations.insert(divvy_api::names::annotations::QUOTA.to_owned(), grant);
    let world = world(vec![claim("a", Some("gpu-0")), through, claim("c", None)]);
    let quota = gpu_quota(
        "red",
        "default",
        &json!({"memory": "200Gi", "percent": 250}),
    );
    assert_eq!(
        text(&world, vec![quota], Vec::new()),
        "\
NAMESPACE  USED   LIMIT  USED %  LIMIT %  WAITING
─────────  ─────  ─────  ──────  ───────  ───────
red        160Gi  200Gi  200     250      1

NAMESPACE  CLAIM  STATE     MEMORY  %    PODS  WHY
─────────  ─────  ────────  ──────  ───  ────  ────────────────────────────────
red        a      has       80Gi    100  a-0
red        b      may take  80Gi    100  -
red        c      waits     80Gi    100  -     the rest of the quota is smaller"
    );
}

#[test]
fn bad_quotas_are_named_with_their_field_and_the_fix() {
    let world = world(vec![claim("a", Some("gpu-0"))]);
    let quotas = vec![
        gpu_quota("red", "default", &json!({"memory": "-1Gi"})),
        gpu_quota("red", "second", &json!({"memory": "1Gi"})),
        gpu_quota("blue", "default", &json!({"memory": "0"})),
    ];
    let hard = json!({
        "share.divvy.de.deviceclass.resource.k8s.io/devices": "8",
        "gpu.divvy.dev.deviceclass.resource.k8s.io/devices": "2",
        "requests.nvidia.com/gpu": "1", "pods": "5",
    });
    let resource = vec![typed(json!({
        "metadata": {"namespace": "red", "name": "gpus"}, "spec": {"hard": hard},
        "status": {"used": {"gpu.divvy.dev.deviceclass.resource.k8s.io/devices": "1"}},
    }))];
    let text = text(&world, quotas, resource);
    for line in [
        "GpuQuota red/default: spec.limits.memory: \"-1Gi\" is no amount of memory",
        "GpuQuota red/second: metadata.name: a namespace has one GpuQuota, named default: delete this one",
        "spec.hard[share.divvy.de.deviceclass.resource.k8s.io/devices] counts nothing, since there is no DeviceClass share.divvy.de: write one of `kubectl get deviceclasses`",
        "red        gpus           gpu.divvy.dev            1     2",
        "red        gpus           requests.nvidia.com/gpu  ?     1",
    ] {
        assert!(text.contains(line), "{line}\nin\n{text}");
    }
    assert!(!text.contains("pods "), "{text}");
}

#[test]
fn a_namespace_without_a_quota_shows_none_of_another() {
    let world = world(vec![claim("a", Some("gpu-0"))]);
    let all = Quotas {
        gpu: vec![gpu_quota("red", "default", &json!({"percent": 50}))],
        ..Quotas::default()
    };
    let report = quotas(&world, &all, Some("blue"));
    assert_eq!(render(&report), "No quota counts GPUs.");
    let report = quotas(&world, &all, Some("red"));
    assert!(report.needs_person);
    assert!(render(&report).contains("claims have more than its limits"));
}
