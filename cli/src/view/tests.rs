//! The view of a made-up fleet: every mode, busy, idle, unknown and over the grant.

use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Summary, Versions};
use serde_json::{Value, json};

use super::{Free, View, of};
use crate::status::read::CLAIMS;
use crate::status::snapshot::Snapshot;
use crate::usage::Usage;

const DRIVER: &str = "gpu.divvy.dev";
const GIB: u64 = 1 << 30;

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn uuid(number: u32) -> String {
    format!("GPU-{number}")
}

/// A device that takes `slices` of the eight of its GPU, from `start` on.
fn device(name: &str, profile: Option<&str>, gib: u32, (start, slices): (u32, u32)) -> Value {
    let gpu: String = name.split('-').take(2).collect::<Vec<_>>().join("-");
    // As published: two slices are one counter.
    let counters: serde_json::Map<String, Value> = (0..4)
        .filter_map(|pair| {
            let taken = (2 * pair..2 * pair + 2)
                .filter(|slice| (start..start + slices).contains(slice))
                .count();
            let name = format!("memory-slices-{}-{}", 2 * pair, 2 * pair + 1);
            (taken > 0).then(|| (name, json!({ "value": taken.to_string() })))
        })
        .collect();
    let mut device = json!({
        "name": name,
        "capacity": { "memory": { "value": format!("{gib}Gi") } },
        "consumesCounters": [{ "counterSet": gpu, "counters": counters }],
        "allowMultipleAllocations": name.ends_with("-ts"),
    });
    if let Some(profile) = profile {
        device["attributes"] = json!({ "profile": { "string": profile } });
    }
    device
}

fn devices(gpu: u32) -> Vec<Value> {
    let name = |rest: &str| format!("gpu-{gpu}{rest}");
    vec![
        device(&name(""), None, 80, (0, 8)),
        device(&name("-ts"), None, 80, (0, 8)),
        device(&name("-mig-3g40gb-9-0"), Some("3g.40gb"), 40, (0, 4)),
        device(&name("-mig-3g40gb-9-4"), Some("3g.40gb"), 40, (4, 4)),
        device(&name("-mig-1g10gb-19-1"), Some("1g.10gb"), 10, (1, 1)),
    ]
}

fn slices(node: &str, gpus: u32) -> Vec<Value> {
    let sets: Vec<Value> = (0..gpus)
        .map(|gpu| {
            let counters: serde_json::Map<String, Value> = ["0-1", "2-3", "4-5", "6-7"]
                .iter()
                .map(|pair| (format!("memory-slices-{pair}"), json!({ "value": "2" })))
                .collect();
            json!({ "name": format!("gpu-{gpu}"), "counters": counters })
        })
        .collect();
    let slice = |number: u32, content: Value| {
        let pool =
            json!({ "name": format!("{node}/divvy"), "generation": 1, "resourceSliceCount": 2 });
        let mut spec = json!({ "driver": DRIVER, "nodeName": node, "pool": pool });
        spec.as_object_mut()
            .unwrap()
            .extend(content.as_object().unwrap().clone());
        json!({ "metadata": { "name": format!("{node}-{number}") }, "spec": spec })
    };
    let all: Vec<Value> = (0..gpus).flat_map(devices).collect();
    vec![
        slice(0, json!({ "devices": all })),
        slice(1, json!({ "sharedCounters": sets })),
    ]
}

/// A claim with a device; a share of so many GiB.
fn claim(name: &str, device: &str, share: Option<u32>) -> Value {
    let (namespace, claim) = name.split_once('/').unwrap();
    let mut result =
        json!({ "request": "gpu", "driver": DRIVER, "pool": "n1/divvy", "device": device });
    if let Some(gib) = share {
        result["consumedCapacity"] = json!({ "memory": format!("{gib}Gi") });
    }
    json!({
        "metadata": { "namespace": namespace, "name": claim, "uid": name },
        "spec": {},
        "status": {
            "allocation": { "allocationTimestamp": "2026-11-21T19:30:00Z", "devices": { "results": [result] } },
            "reservedFor": [{ "resource": "pods", "name": format!("{claim}-0"), "uid": "u" }],
        },
    })
}

fn gpu(number: u32, mode: &str, holders: &[(&str, &str)]) -> GpuStatus {
    let holder = |(name, device): &(&str, &str)| {
        let (namespace, claim) = name.split_once('/').unwrap();
        Holder {
            namespace: namespace.to_owned(),
            name: claim.to_owned(),
            uid: (*name).to_owned(),
            device: (*device).to_owned(),
            phase: "prepared".to_owned(),
            pods: vec![format!("{claim}-0")],
            since: Some("2026-11-21T19:30:00Z".to_owned()),
            ..Holder::default()
        }
    };
    GpuStatus {
        name: format!("gpu-{number}"),
        uuid: uuid(number),
        product: "NVIDIA H100".to_owned(),
        mode: mode.to_owned(),
        holders: holders.iter().map(holder).collect(),
        ..GpuStatus::default()
    }
}

fn status(gpus: Vec<GpuStatus>, free: u32) -> GpuNodeStatus {
    let summary = Summary {
        gpus: u32::try_from(gpus.len()).unwrap(),
        free,
        ..Summary::default()
    };
    let versions = Versions {
        driver: "580.95.05".to_owned(),
        ..Versions::default()
    };
    GpuNodeStatus {
        summary,
        versions,
        gpus,
        ..GpuNodeStatus::default()
    }
}

/// n1: a whole GPU, one in partitions (one of them new), one in shares, an idle one; n2: an idle
/// one.
pub(crate) fn world() -> Snapshot {
    let shares = [("web/chat", "gpu-2-ts"), ("web/ocr", "gpu-2-ts")];
    let n1 = vec![
        gpu(
            0,
            "whole",
            &[("lab/train", "gpu-0"), ("ops/watch", "gpu-0 (admin)")],
        ),
        gpu(1, "partitioned", &[("lab/tune", "gpu-1-mig-3g40gb-9-4")]),
        gpu(2, "time-sliced", &shares),
        gpu(3, "idle", &[]),
    ];
    let mut n2 = gpu(0, "idle", &[]);
    n2.uuid = "GPU-9".to_owned();
    let mut watch = claim("ops/watch", "gpu-0", None);
    watch["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = json!(true);
    Snapshot {
        now: "2026-11-21T20:00:00Z".parse().unwrap(),
        driver: DRIVER.to_owned(),
        minor: 37,
        reports: [("n1", status(n1, 1)), ("n2", status(vec![n2], 1))]
            .map(|(name, s)| (name.to_owned(), s))
            .into(),
        slices: typed(Value::Array([slices("n1", 4), slices("n2", 1)].concat())),
        claims: typed(json!([
            claim("lab/train", "gpu-0", None),
            watch,
            claim("lab/tune", "gpu-1-mig-3g40gb-9-4", None),
            claim("lab/new", "gpu-1-mig-1g10gb-19-1", None),
            claim("web/chat", "gpu-2-ts", Some(30)),
            claim("web/ocr", "gpu-2-ts", Some(10)),
        ])),
        ..Snapshot::default()
    }
}

/// train is busy, tune has been idle for two hours, of new nothing is known, ocr uses more than it
/// was granted.
pub(crate) fn usage() -> Usage {
    let mut served = String::new();
    for (claim, device, uuid, gib, busy, idle) in [
        ("lab/train", "gpu-0", "GPU-0", 60, "0.93", 0),
        ("lab/tune", "gpu-1-mig-3g40gb-9-4", "GPU-1", 2, "0", 7200),
        ("web/chat", "gpu-2-ts", "GPU-2", 12, "0.25", 0),
        ("web/ocr", "gpu-2-ts", "GPU-2", 11, "0.5", 0),
    ] {
        let (namespace, name) = claim.split_once('/').unwrap();
        let labels = format!(
            "namespace=\"{namespace}\",claim=\"{name}\",pod=\"{name}-0\",device=\"{device}\",UUID=\"{uuid}\""
        );
        served += &format!("divvy_claim_memory_used_bytes{{{labels}}} {}\n", gib * GIB);
        served += &format!("divvy_claim_utilization_ratio{{{labels},source=\"process\"}} {busy}\n");
        served += &format!("divvy_claim_idle_seconds{{{labels}}} {idle}\n");
        served += &format!(
            "divvy_claim_overuse{{{labels}}} {}\n",
            u8::from(name == "ocr")
        );
    }
    served += &format!(
        "divvy_gpu_memory_used_bytes{{UUID=\"GPU-2\"}} {}\n",
        25 * GIB
    );
    served += &format!("divvy_gpu_memory_unattributed_bytes{{UUID=\"GPU-2\"}} {GIB}\n");
    let mut usage = Usage::default();
    usage.add(&served);
    usage
}

#[test]
fn the_view_has_every_holder_with_its_place_and_use() {
    crate::golden::same(
        "view/view.json",
        &serde_json::to_string_pretty(&of(&world(), &usage())).unwrap(),
    );
}

fn hold<'v>(view: &'v View, claim: &str) -> &'v super::Hold {
    view.holds()
        .map(|(_, _, hold)| hold)
        .find(|hold| hold.claim == claim)
        .unwrap()
}

#[test]
fn without_readings_use_is_unknown_and_grants_are_those_of_the_allocation() {
    let view = of(&world(), &Usage::default());
    let known: Vec<_> = view
        .holds()
        .map(|(_, _, hold)| (hold.claim.as_str(), hold.usage.memory_granted))
        .collect();
    let expected = [
        ("train", Some(80 * GIB)),
        ("watch", None),
        ("new", Some(10 * GIB)),
        ("tune", Some(40 * GIB)),
        ("chat", Some(30 * GIB)),
        ("ocr", Some(10 * GIB)),
    ];
    assert_eq!(known, expected);
    for (_, gpu, hold) in view.holds() {
        let usage = &hold.usage;
        assert_eq!(
            (
                usage.memory_used,
                hold.wasted,
                usage.utilization,
                usage.idle_seconds
            ),
            (None, None, None, None)
        );
        assert_eq!((gpu.usage.memory_used, hold.idle), (None, false));
    }
}

#[test]
fn holders_are_where_their_slices_and_their_memory_are() {
    let view = of(&world(), &usage());
    for (claim, place) in [
        ("train", Some((0.0, 1.0))),
        ("watch", None),
        ("tune", Some((0.5, 1.0))),
        ("new", Some((0.125, 0.25))),
        ("chat", Some((0.0, 0.375))),
        ("ocr", Some((0.375, 0.5))),
    ] {
        assert_eq!(hold(&view, claim).place, place, "{claim}");
    }
    // Without slices, shares and partitions are equally long.
    let mut blind = world();
    blind.slices.clear();
    let view = of(&blind, &usage());
    assert_eq!(
        (hold(&view, "chat").place, hold(&view, "ocr").place),
        (Some((0.0, 0.5)), Some((0.5, 1.0)))
    );
    assert_eq!(hold(&view, "tune").place, Some((0.5, 1.0)));
}

/// A GPU that no claim can have is not free in place of one that a claim has just got.
#[test]
fn a_gpu_out_of_use_is_not_free_for_one_that_is_newly_held() {
    let mut world = world();
    let report = world.reports.get_mut("n1").unwrap();
    report.gpus.push(gpu(4, "idle", &[]));
    let free = |world: &Snapshot| of(world, &Usage::default()).nodes[0].free;
    assert_eq!(free(&world), 1);
    world.claims.push(typed(claim("lab/late", "gpu-3", None)));
    assert_eq!(free(&world), 0);
}

/// The fleet with two claims in shares of the partition at the second slice of n1's gpu-3.
pub(crate) fn with_shared_partition() -> Snapshot {
    const DEVICE: &str = "gpu-3-mig-1g10gb-19-1-ts";
    let mut world = world();
    let device = device(DEVICE, Some("1g.10gb"), 10, (1, 1));
    let devices = world.slices[0].spec.devices.as_mut().unwrap();
    devices.push(typed(device));
    let held = [("web/draw", 2), ("web/sing", 4)];
    let claims = held.map(|(name, gib)| typed(claim(name, DEVICE, Some(gib))));
    world.claims.extend(claims);
    let holders = held.map(|(name, _)| (name, DEVICE));
    let report = world.reports.get_mut("n1").unwrap();
    report.gpus[3] = gpu(3, "partitioned", &holders);
    report.summary.free = 0;
    world
}

/// The claims of a shared partition are beside each other within it, and not one over the other.
#[test]
fn shares_of_a_partition_are_beside_each_other_within_it() {
    let view = of(&with_shared_partition(), &Usage::default());
    let place = |claim: &str| hold(&view, claim).place.unwrap();
    let near = |(a, b): (f64, f64), (c, d): (f64, f64)| (a - c).abs() + (b - d).abs() < 1e-9;
    assert!(near(place("draw"), (0.125, 0.15)), "{:?}", place("draw"));
    assert!(near(place("sing"), (0.15, 0.2)), "{:?}", place("sing"));
    for claim in ["draw", "sing"] {
        assert_eq!(hold(&view, claim).within, Some((0.125, 0.25)));
        assert_eq!(hold(&view, claim).part, "share of 1g.10gb");
    }
    let (.., gpu, _) = view
        .holds()
        .find(|(.., hold)| hold.claim == "sing")
        .unwrap();
    assert_eq!(gpu.mode, "partitioned");
    // While one of them has left the API, both are equally long.
    let mut leaving = with_shared_partition();
    leaving.claims.pop();
    let view = of(&leaving, &Usage::default());
    let place = |claim: &str| hold(&view, claim).place.unwrap();
    assert!(near(place("draw"), (0.125, 0.1875)) && near(place("sing"), (0.1875, 0.25)));
}

/// Programs read it, too: a share of a partition is a hold like others.
#[test]
fn the_json_has_shares_of_partitions_with_their_place() {
    let view = of(&with_shared_partition(), &Usage::default());
    let json = serde_json::to_value(&view).unwrap();
    let holds = json["nodes"][0]["gpus"][3]["holds"].as_array().unwrap();
    let said = holds.iter().map(|hold| {
        let [claim, device, part, granted, within] =
            ["claim", "device", "part", "memoryGranted", "within"].map(|name| &hold[name]);
        json!([claim, device, part, granted, within])
    });
    let (device, part, within) = (
        "gpu-3-mig-1g10gb-19-1-ts",
        "share of 1g.10gb",
        [0.125, 0.25],
    );
    assert_eq!(
        said.collect::<Vec<_>>(),
        [
            json!(["draw", device, part, 2 * GIB, within]),
            json!(["sing", device, part, 4 * GIB, within])
        ]
    );
}

/// An idle GPU in shares of two kinds has its memory once, and slots are not put together.
#[test]
fn memory_for_shares_counts_slots_of_mps_and_each_gpu_once() {
    let mut world = world();
    let free = |world: &Snapshot| of(world, &Usage::default()).free.unwrap();
    let before = free(&world);
    let mps = |gpu: u32| {
        json!({
            "name": format!("gpu-{gpu}-mps"), "allowMultipleAllocations": true,
            "attributes": { "slotMemoryMiB": { "int": 15 << 10 } },
            "capacity": { "slots": { "value": "4" } },
        })
    };
    let devices = |world: &mut Snapshot, all: &[Value]| {
        let devices = world.slices[0].spec.devices.as_mut().unwrap();
        devices.extend(
            all.iter()
                .cloned()
                .map(typed::<k8s_openapi::api::resource::v1::Device>),
        );
    };
    devices(&mut world, &[mps(3)]);
    assert_eq!(free(&world), before);
    // One in MPS shares alone, of which a claim has a slot.
    let devices = world.slices[0].spec.devices.as_mut().unwrap();
    devices.retain(|device| !["gpu-3-ts", "gpu-3"].contains(&device.name.as_str()));
    let mut slot = claim("web/slot", "gpu-3-mps", None);
    slot["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"] =
        json!({ "slots": "1" });
    world.claims.push(typed(slot));
    let after = free(&world);
    assert_eq!(after.share_memory, before.share_memory - (80 - 45) * GIB);
    for slice in &mut world.slices {
        let devices = slice.spec.devices.iter_mut();
        devices.for_each(|devices| devices.retain(|device| device.name.ends_with("-mps")));
    }
    assert_eq!(
        (free(&world).share_memory, free(&world).largest_share),
        (45 * GIB, 15 * GIB)
    );
}

#[test]
fn what_is_free_is_what_the_scheduler_could_still_give() {
    let free = |snapshot: &Snapshot| of(snapshot, &Usage::default()).free;
    let mut world = world();
    // gpu-3 of n1 and gpu-0 of n2; 40 of 80 GiB of gpu-2; the other half of gpu-1 is not free: one
    // slice of it is taken.
    let all = Free {
        whole_gpus: 2,
        largest_partition: Some("3g.40gb".to_owned()),
        share_memory: (40 + 80 + 80) * GIB,
        largest_share: 80 * GIB,
    };
    assert_eq!(free(&world), Some(all.clone()));
    // A taint and a claim without a report take the idle ones away.
    let taint = json!([{ "key": "gpu.divvy.dev/lost", "effect": "NoSchedule" }]);
    for device in world.slices[2].spec.devices.iter_mut().flatten() {
        device.taints = typed(taint.clone());
    }
    world.claims.push(typed(claim("lab/late", "gpu-3", None)));
    let rest = Free {
        whole_gpus: 0,
        largest_partition: None,
        share_memory: 40 * GIB,
        largest_share: 40 * GIB,
    };
    assert_eq!(free(&world), Some(rest));
    // An administrator's eye takes nothing away.
    world
        .claims
        .retain(|claim| claim.metadata.name.as_deref() == Some("watch"));
    assert_eq!(
        free(&world).unwrap().whole_gpus,
        2,
        "the nodes still report the holders"
    );
    for status in world.reports.values_mut() {
        status.summary.free = 4;
        status.gpus.iter_mut().for_each(|gpu| gpu.holders.clear());
    }
    assert_eq!(free(&world).unwrap().whole_gpus, 4);
    world
        .unread
        .push(format!("{} cannot be listed", CLAIMS.name));
    assert_eq!(
        free(&world),
        None,
        "claims that cannot be read may hold everything"
    );
}
