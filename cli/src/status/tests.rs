//! The answers about a made-up fleet, as text and as values.

use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Summary, Trouble, Versions};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::claim::State;
use super::snapshot::Snapshot;
use super::{claim, full_name, render, report};
use divvy_why::Verdict;

mod few;
mod folded;
mod gpus;
mod nowhere;
mod pods;
mod policies;
mod shares;

const DRIVER: &str = "gpu.divvy.dev";

fn typed<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn node(name: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "divvy.dev/gpu": "true", "disk": "fast" } },
        "spec": {},
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] },
    })
}

/// A slice with these whole GPUs; `lost` ones are tainted.
fn slice(node: &str, gpus: &[(&str, bool)]) -> Value {
    let device = |(name, lost): &(&str, bool)| {
        let mut device = json!({ "name": name, "attributes": { "type": { "string": "gpu" } } });
        if *lost {
            device["taints"] = json!([{ "key": "gpu.divvy.dev/lost", "effect": "NoSchedule" }]);
        }
        device
    };
    json!({
        "metadata": { "name": format!("{node}-0") },
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": { "name": format!("{node}/divvy"), "generation": 1, "resourceSliceCount": 1 },
            "devices": gpus.iter().map(device).collect::<Vec<_>>(),
        },
    })
}

fn ask(name: &str, class: &str, count: u32) -> Value {
    let exactly =
        json!({ "deviceClassName": class, "allocationMode": "ExactCount", "count": count });
    json!({
        "metadata": {
            "namespace": "default", "name": name, "uid": format!("uid-{name}"),
            "creationTimestamp": "2026-11-21T19:00:00Z",
        },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": exactly }] } },
    })
}

fn allocated(name: &str, node: &str, device: &str) -> Value {
    let mut claim = ask(name, DRIVER, 1);
    let pool = format!("{node}/divvy");
    claim["status"] = json!({
        "allocation": {
            "allocationTimestamp": "2026-11-21T19:30:00Z",
            "devices": { "results": [{ "request": "gpu", "driver": DRIVER, "pool": pool, "device": device }] },
        },
        "reservedFor": [{ "resource": "pods", "name": format!("{name}-pod"), "uid": "u" }],
    });
    claim
}

fn refused(name: &str, node: &str, device: &str) -> Value {
    let mut claim = allocated(name, node, device);
    claim["status"]["devices"] = json!([{
        "driver": DRIVER, "pool": format!("{node}/divvy"), "device": device,
        "conditions": [{
            "type": "Prepared", "status": "False", "reason": "WrongMode",
            "message": "gpu-1 is used in shares\nhint: delete pod x", "lastTransitionTime": "2026-11-21T19:45:00Z",
        }],
    }]);
    claim
}

fn pod(name: &str, claims: &[&str]) -> Value {
    json!({
        "metadata": { "namespace": "default", "name": name, "creationTimestamp": "2026-11-21T19:50:00Z" },
        "spec": {
            "containers": [],
            "resourceClaims": claims.iter().map(|c| json!({ "name": c, "resourceClaimName": c })).collect::<Vec<_>>(),
        },
        "status": { "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
            "message": "0/3 nodes are available",
        }] },
    })
}

fn gpu(number: u32, holder: Option<&str>) -> GpuStatus {
    let holder = holder.map(|name| Holder {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        device: format!("gpu-{number}"),
        phase: "prepared".to_owned(),
        pods: vec![format!("{name}-pod")],
        since: Some("2026-11-21T19:30:00Z".to_owned()),
        ..Holder::default()
    });
    GpuStatus {
        name: format!("gpu-{number}"),
        uuid: format!("GPU-12345678-1234-1234-1234-12345678000{number}"),
        product: "NVIDIA L4".to_owned(),
        mode: if holder.is_some() { "whole" } else { "idle" }.to_owned(),
        offered: vec!["whole".to_owned()],
        holders: holder.into_iter().collect(),
        ..GpuStatus::default()
    }
}

fn status(gpus: Vec<GpuStatus>, troubles: Vec<Trouble>, trouble: &str) -> GpuNodeStatus {
    let held = u32::try_from(gpus.iter().filter(|gpu| !gpu.holders.is_empty()).count()).unwrap();
    let all = u32::try_from(gpus.len()).unwrap();
    let summary = Summary {
        gpus: all,
        free: all - held,
        claims: held,
        modes: format!("{held} whole, {} idle", all - held),
        trouble: trouble.to_owned(),
        since: None,
    };
    let versions = Versions {
        divvy: "0.1.0".to_owned(),
        driver: "580.95.05".to_owned(),
        kubernetes: "1.37.1".to_owned(),
        ..Versions::default()
    };
    let changed = Some("2026-11-21T19:58:00Z".to_owned());
    GpuNodeStatus {
        summary,
        versions,
        gpus,
        troubles,
        changed,
        ..GpuNodeStatus::default()
    }
}

fn lost() -> Trouble {
    Trouble {
        kind: "lost".to_owned(),
        gpu: "gpu-1".to_owned(),
        why: "the GPU fell off the bus".to_owned(),
        remedy: "reset the GPU or reboot the node".to_owned(),
        since: Some("2026-11-21T19:48:00Z".to_owned()),
        ..Trouble::default()
    }
}

/// n1: one GPU held, one lost under a claim; n2: both held; n3: cordoned; n4: silent.
fn world() -> Snapshot {
    let mut cordoned = node("n3");
    cordoned["spec"] = json!({ "unschedulable": true });
    let class = json!({
        "metadata": { "name": DRIVER },
        "spec": { "selectors": [{ "cel": { "expression": "device.driver == 'gpu.divvy.dev' && device.attributes['gpu.divvy.dev'].type == 'gpu'" } }] },
    });
    let notice = Trouble {
        kind: "one-mode".to_owned(),
        notice: true,
        why: "GPUs are offered in one mode each".to_owned(),
        ..Trouble::default()
    };
    Snapshot {
        now: "2026-11-21T20:00:00Z".parse::<Timestamp>().unwrap(),
        driver: DRIVER.to_owned(),
        minor: 37,
        nodes: typed(json!([node("n1"), node("n2"), cordoned, node("n4")])),
        reports: [
            (
                "n1",
                status(
                    vec![gpu(0, Some("a")), gpu(1, Some("b"))],
                    vec![lost()],
                    "gpu-1 lost",
                ),
            ),
            (
                "n2",
                status(vec![gpu(0, Some("c")), gpu(1, Some("d"))], vec![notice], ""),
            ),
            ("n3", status(vec![gpu(0, None)], Vec::new(), "")),
        ]
        .map(|(name, status)| (name.to_owned(), status))
        .into(),
        policies: std::collections::BTreeMap::new(),
        published: None,
        slices: typed(json!([
            slice("n1", &[("gpu-0", false), ("gpu-1", true)]),
            slice("n2", &[("gpu-0", false), ("gpu-1", false)]),
            slice("n3", &[("gpu-0", false)]),
        ])),
        claims: typed(json!([
            allocated("a", "n1", "gpu-0"),
            allocated("b", "n1", "gpu-1"),
            allocated("c", "n2", "gpu-0"),
            refused("d", "n2", "gpu-1"),
            ask("waits", DRIVER, 1),
            ask("greedy", DRIVER, 9),
            ask("wrong", "no.such.divvy.dev", 1),
            ask("unused", DRIVER, 1),
        ])),
        classes: typed(json!([class])),
        pods: typed(json!([
            pod("w", &["waits"]),
            pod("g", &["greedy"]),
            pod("x", &["wrong"])
        ])),
        events: Vec::new(),
        taint_rules: Vec::new(),
        named: Vec::new(),
        plugins: None,
        unread: Vec::new(),
    }
}

/// The kubelet's Event on a pod.
fn failed(pod: &str, at: &str, message: &str) -> Value {
    json!({
        "metadata": { "name": format!("{pod}.{at}"), "namespace": "default" },
        "involvedObject": { "kind": "Pod", "name": pod, "namespace": "default" },
        "reason": "FailedPrepareDynamicResources", "lastTimestamp": at, "message": message,
    })
}

fn golden(name: &str, text: &str) {
    crate::golden::same(&format!("status/{name}"), text);
}

/// The samples in README and docs/status.md are the goldens of these tests; `DIVVY_BLESS=1` puts
/// them there.
#[test]
fn the_document_shows_what_the_program_prints() {
    let root = env!("CARGO_MANIFEST_DIR");
    let status = "docs/status.md";
    let pod = "divvy status pod default/w";
    for (page, command, name) in [
        (status, "divvy status", "fleet.txt"),
        (status, pod, "pod-waits.txt"),
        (status, "divvy status policy", "policies.txt"),
        ("README.md", pod, "pod-waits.txt"),
    ] {
        let path = format!("{root}/../{page}");
        let document = fs_err::read_to_string(&path).unwrap();
        let printed = fs_err::read_to_string(format!("{root}/fixtures/status/{name}")).unwrap();
        let start = format!("```text\n$ {command}\n");
        let (before, rest) = document.split_once(&start).unwrap();
        let (shown, after) = rest.split_once("```\n").unwrap();
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(&path, format!("{before}{start}{printed}```\n{after}")).unwrap();
        } else {
            assert_eq!(
                shown, printed,
                "DIVVY_BLESS=1 cargo test -p divvy-cli the_document_shows"
            );
        }
    }
}

#[test]
fn the_fleet_shows_its_nodes_then_what_is_wrong_then_who_waits_for_what() {
    let world = world();
    let fleet = report::fleet(&world, None);
    assert!(fleet.needs_person);
    golden("fleet.txt", &render::fleet(&world, &fleet, false));
    golden("fleet.json", &serde_json::to_string_pretty(&fleet).unwrap());
}

#[test]
fn a_healthy_fleet_requires_no_action_also_while_pods_wait_for_room() {
    let mut world = world();
    world
        .nodes
        .retain(|node| node.metadata.name.as_deref() == Some("n2"));
    world.reports.retain(|name, _| name == "n2");
    world
        .slices
        .retain(|slice| slice.spec.node_name.as_deref() == Some("n2"));
    world
        .claims
        .retain(|claim| !["greedy", "wrong"].contains(&claim.metadata.name.as_deref().unwrap()));
    world.claims.iter_mut().for_each(|claim| {
        claim
            .status
            .iter_mut()
            .for_each(|status| status.devices = None);
    });
    let fleet = report::fleet(&world, None);
    let waiting: Vec<_> = fleet
        .waiting
        .iter()
        .map(|one| (one.pod.as_str(), one.why.verdict))
        .collect();
    assert_eq!(waiting, [("default/w", Verdict::NoRoom)]);
    assert!(!fleet.needs_person);
    // A tenant's mistake is an alarm for those who ask for its namespace.
    world
        .claims
        .push(typed(ask("wrong", "no.such.divvy.dev", 1)));
    world.pods.push(typed(pod("x", &["wrong"])));
    assert!(!report::fleet(&world, None).needs_person);
    assert!(report::fleet(&world, Some("default")).needs_person);
    // Of another namespace nothing is shown.
    assert_eq!(report::fleet(&world, Some("other")).waiting, []);
}

#[test]
fn pods_of_one_owner_that_wait_for_the_same_are_one_line() {
    let mut world = world();
    let owned = |name: &str, claim: &str| {
        let mut pod = pod(name, &[claim]);
        pod["metadata"]["ownerReferences"] =
            json!([{ "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r" }]);
        pod
    };
    world.claims.push(typed(ask("waits-2", DRIVER, 1)));
    world.pods = typed(json!([owned("r-1", "waits"), owned("r-2", "waits-2")]));
    let waiting = report::fleet(&world, None).waiting;
    assert_eq!(waiting.len(), 1);
    assert_eq!(
        (waiting[0].pod.as_str(), waiting[0].others),
        ("default/r-1", 1)
    );
}

#[test]
fn a_node_shows_its_gpus_and_what_is_wrong_with_them() {
    let world = world();
    let node = report::node(&world, "n1").unwrap();
    assert!(node.needs_person);
    golden("node.txt", &render::node(&world, &node));
    assert!(!report::node(&world, "n2").unwrap().needs_person);
    let silent = report::node(&world, "n4").unwrap();
    assert_eq!(silent.troubles[0].trouble.kind, "no-report");
    assert_eq!(
        report::node(&world, "n9").unwrap_err().to_string(),
        "node n9 does not exist"
    );
}

#[test]
fn a_claim_shows_what_it_has_or_why_it_waits_node_by_node() {
    let world = world();
    let about = |name: &str| claim::claim(&world, "default", name).unwrap();
    let states = ["a", "b", "d", "waits", "greedy", "wrong", "unused"].map(|name| {
        let report = about(name);
        (
            name,
            report.state,
            report.waiting.map(|why| why.verdict),
            report.needs_person,
        )
    });
    assert_eq!(
        states,
        [
            ("a", State::Prepared, None, false),
            ("b", State::Prepared, None, true),
            ("d", State::Refused, None, true),
            ("waits", State::Waiting, Some(Verdict::NoRoom), false),
            ("greedy", State::Waiting, Some(Verdict::NeverFits), true),
            ("wrong", State::Waiting, Some(Verdict::Mistake), true),
            ("unused", State::Unused, None, false),
        ]
    );
    for name in ["b", "d", "waits", "wrong"] {
        golden(
            &format!("claim-{name}.txt"),
            &render::claim(&world, &about(name), false),
        );
    }
    let missing = claim::claim(&world, "other", "a").unwrap_err().to_string();
    assert_eq!(
        missing,
        "claim other/a does not exist; did you mean default/a?"
    );
}

#[test]
fn the_refusal_of_the_kubelet_is_shown_until_the_claim_is_prepared() {
    let mut world = world();
    let mut early = allocated("early", "n3", "gpu-0");
    early["status"]["reservedFor"] = json!([{ "resource": "pods", "name": "e", "uid": "e" }]);
    world.claims.push(typed(early));
    let report = |world: &Snapshot| claim::claim(world, "default", "early").unwrap();
    assert_eq!(
        (report(&world).state, report(&world).needs_person),
        (State::Allocated, false)
    );
    world.events = typed(json!([
        failed(
            "e",
            "2026-11-21T19:59:00Z",
            "old ResourceClaim with same name early and different UID still exists"
        ),
        failed("e", "2026-11-21T19:58:00Z", "an earlier one"),
        failed("other", "2026-11-21T19:59:30Z", "of another pod"),
    ]));
    let refused = report(&world);
    assert!(refused.needs_person);
    let text = render::claim(&world, &refused, false);
    assert!(
        text.contains("\nkubelet: old ResourceClaim with same name early"),
        "{text}"
    );
    // Of one that is prepared it says nothing: that is over.
    let used = claim::claim(&world, "default", "a").unwrap();
    assert_eq!(used.kubelet, None);
}

/// In the world of [`world`], claim `c` is to be evicted because it is idle, and `a` is over its
/// grant.
fn using() -> Snapshot {
    let mut world = world();
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        json!({
            "type": kind, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": "2026-11-21T19:50:00Z",
        })
    };
    let of = |name: &str, node: &str, conditions: Vec<Value>| {
        let mut claim = allocated(name, node, "gpu-0");
        let pool = format!("{node}/divvy");
        let device =
            json!({ "driver": DRIVER, "pool": pool, "device": "gpu-0", "conditions": conditions });
        claim["status"]["devices"] = json!([device]);
        claim
    };
    let over = condition(
        "WithinGrant",
        "False",
        "MemoryOverGrant",
        "12288 MiB used, 10240 MiB granted",
    );
    let idle = condition(
        "Idle",
        "True",
        "NotUsed",
        "nothing has used the devices of the claim for 60 minutes",
    );
    let due = condition(
        "ReclaimDue",
        "True",
        "Idle",
        "the policy of the GPU calls for the eviction of its pods",
    );
    let within = condition("WithinGrant", "True", "Fine", "not a report");
    world.claims = typed(json!([
        of("a", "n1", vec![over]),
        of("b", "n1", vec![within]),
        of("c", "n2", vec![idle, due]),
    ]));
    world
}

#[test]
fn claims_that_use_too_much_or_nothing_have_the_most_serious_report() {
    let world = using();
    let fleet = report::fleet(&world, None);
    let named: Vec<_> = fleet
        .reported_use
        .iter()
        .map(|one| (&*one.claim, &*one.reason))
        .collect();
    assert_eq!(
        named,
        [
            ("default/a", "MemoryOverGrant"),
            ("default/c", "ReclaimDue")
        ]
    );
    let text = render::fleet(&world, &fleet, false);
    let expected = "\nover their grants, or idle:\n  default/a (pods a-pod): MemoryOverGrant, for 10m \
        (since 2026-11-21T19:50:00Z)\n    12288 MiB used, 10240 MiB granted\n  default/c (pods c-pod): ReclaimDue,";
    assert!(text.contains(expected), "{text}");

    let claim = claim::claim(&world, "default", "c").unwrap();
    let reasons: Vec<_> = claim.reported_use.iter().map(|one| &*one.reason).collect();
    assert_eq!(reasons, ["ReclaimDue", "NotUsed"]);
    let text = render::claim(&world, &claim, false);
    assert!(
        text.contains("over their grants, or idle:") && text.contains("for 60 minutes"),
        "{text}"
    );
}

#[test]
fn a_claim_of_a_pod_group_has_the_pods_that_its_node_reports() {
    let mut world = world();
    let claim = world
        .claims
        .iter_mut()
        .find(|claim| claim.metadata.name.as_deref() == Some("a"))
        .unwrap();
    let group = json!([{ "apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "train", "uid": "g" }]);
    claim.status.as_mut().unwrap().reserved_for = Some(typed(group));
    assert_eq!(
        claim::claim(&world, "default", "a").unwrap().pods,
        ["a-pod"]
    );
}

/// Counters are charged for what is allocated, and one below zero blocks all devices of the pool.
#[test]
fn a_pool_that_claims_block_for_all_others_is_an_alarm_that_names_them() {
    let mut world = world();
    world
        .nodes
        .retain(|node| node.metadata.name.as_deref() == Some("n2"));
    world.reports.retain(|name, _| name == "n2");
    let mut devices = slice(
        "n2",
        &[("gpu-0", false), ("gpu-1", false), ("gpu-2", false)],
    );
    let of = |set: &str| json!([{ "counterSet": set, "counters": { "slices": { "value": "8" } } }]);
    for (number, set) in [(0, "a"), (1, "a"), (2, "b")] {
        devices["spec"]["devices"][number]["consumesCounters"] = of(set);
    }
    devices["spec"]["pool"]["resourceSliceCount"] = 2.into();
    let mut counters = slice("n2", &[]);
    counters["metadata"]["name"] = "n2-counters".into();
    counters["spec"]["pool"]["resourceSliceCount"] = 2.into();
    counters["spec"]["devices"] = Value::Null;
    let sets =
        ["a", "b"].map(|name| json!({ "name": name, "counters": { "slices": { "value": "8" } } }));
    counters["spec"]["sharedCounters"] = json!(sets);
    world.slices = typed(json!([devices, counters]));
    let held = [allocated("c", "n2", "gpu-0"), allocated("d", "n2", "gpu-1")];
    world.claims = typed(json!([held[0], ask("waits", DRIVER, 1)]));
    assert_eq!(
        report::fleet(&world, None).waiting[0].why.verdict,
        Verdict::Fits
    );
    world.claims.push(typed(held[1].clone()));
    let fleet = report::fleet(&world, None);
    assert_eq!(fleet.waiting[0].why.verdict, Verdict::Blocked);
    assert!(
        fleet.needs_person,
        "also without a namespace: no pod of any namespace gets a device"
    );
    let waits = claim::claim(&world, "default", "waits").unwrap();
    assert!(waits.needs_person);
    golden("claim-blocked.txt", &render::claim(&world, &waits, false));
}

#[test]
fn a_claim_that_only_the_scheduler_can_evaluate_is_unknown_and_no_mistake() {
    let mut world = world();
    let waits = world
        .claims
        .iter_mut()
        .find(|claim| claim.metadata.name.as_deref() == Some("waits"))
        .unwrap();
    let devices = waits.spec.as_mut().unwrap().devices.as_mut().unwrap();
    let exact = devices.requests.as_mut().unwrap()[0]
        .exactly
        .as_mut()
        .unwrap();
    exact.selectors = Some(typed(
        json!([{"cel": {"expression": "duration('1h') > duration('30m')"}}]),
    ));
    let report = claim::claim(&world, "default", "waits").unwrap();
    let why = report.waiting.unwrap();
    assert_eq!(
        (why.verdict, report.needs_person),
        (Verdict::Offline, false)
    );
    let hint = why.hint.unwrap();
    assert!(
        hint.ends_with("divvy cannot evaluate this selector offline because it uses `duration`"),
        "{hint}"
    );
}

#[test]
fn room_that_came_free_is_seen_and_the_rest_is_left_to_the_scheduler() {
    let mut world = world();
    world
        .nodes
        .iter_mut()
        .for_each(|node| node.spec.as_mut().unwrap().unschedulable = None);
    let waits = claim::claim(&world, "default", "waits").unwrap();
    assert_eq!(waits.waiting.unwrap().verdict, Verdict::Fits);
    assert_eq!(waits.scheduler.as_deref(), Some("0/3 nodes are available"));
    // Unless the pod selects other nodes.
    let spec = world.pods[0].spec.as_mut().unwrap();
    spec.node_selector = Some([("disk".to_owned(), "slow".to_owned())].into());
    let why = claim::claim(&world, "default", "waits")
        .unwrap()
        .waiting
        .unwrap();
    assert_eq!(why.verdict, Verdict::NeverFits);
    assert_eq!(
        why.nodes[0].reasons,
        ["the node lacks the label disk=slow, which the pod selects"]
    );
}

/// The scheduler tries only nodes on which the pod's allocated claims can be used.
#[test]
fn a_pod_with_another_claim_is_bound_to_the_node_of_that_claim() {
    let mut world = world();
    let mut here = allocated("a", "n1", "gpu-0");
    here["status"]["allocation"]["nodeSelector"] = json!({ "nodeSelectorTerms": [
        { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["n1"] }] },
    ] });
    world.claims = typed(json!([
        here,
        allocated("b", "n1", "gpu-1"),
        ask("waits", DRIVER, 1)
    ]));
    world.pods = typed(json!([pod("w", &["a", "waits"])]));
    let why = |world: &Snapshot| report::fleet(world, None).waiting.remove(0).why;
    let bound = why(&world);
    // Its own claim has one GPU of n1, and the other is lost: no end of another claim helps.
    assert_eq!(bound.verdict, Verdict::NeverFits);
    let n2 = bound
        .nodes
        .iter()
        .find(|group| group.nodes.contains(&"n2".to_owned()))
        .unwrap();
    assert_eq!(
        n2.reasons,
        ["claim default/a of the pod is allocated on another node"]
    );
    // Without it, n2 has room.
    world.pods = typed(json!([pod("w", &["waits"])]));
    assert_eq!(why(&world).verdict, Verdict::Fits);
}

#[test]
fn a_pod_of_a_daemon_set_can_be_on_a_cordoned_node() {
    let mut world = world();
    world
        .slices
        .retain(|slice| slice.spec.node_name.as_deref() == Some("n3"));
    let mut of_set = pod("w", &["waits"]);
    let verdict = |world: &Snapshot| report::fleet(world, None).waiting.remove(0).why.verdict;
    for (toleration, expected) in [
        (
            json!({ "key": "nvidia.com/gpu", "operator": "Exists" }),
            Verdict::NeverFits,
        ),
        (
            json!({ "key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule" }),
            Verdict::Fits,
        ),
        (json!({ "operator": "Exists" }), Verdict::Fits),
    ] {
        of_set["spec"]["tolerations"] = json!([toleration]);
        world.pods = typed(json!([of_set]));
        assert_eq!(verdict(&world), expected, "{toleration}");
    }
}

#[test]
fn unreadable_kinds_are_listed_and_a_dead_plugin_shows() {
    let mut world = world();
    world.slices.clear();
    world.unread.push(
        "ResourceClaims cannot be listed; unknown: which claims hold devices and which wait"
            .to_owned(),
    );
    let node = report::node(&world, "n3").unwrap();
    assert_eq!(
        (node.troubles.len(), node.troubles[0].trouble.kind.as_str()),
        (1, "not-published")
    );
    assert!(render::node(&world, &node).ends_with(
        "unknown:\n  ResourceClaims cannot be listed; unknown: which claims hold devices and which wait"
    ));
    world.nodes[2] = typed({
        let mut node = self::node("n3");
        let condition = json!({ "type": "Ready", "status": "Unknown", "message": "Kubelet stopped posting node status." });
        node["status"] = json!({ "conditions": [condition] });
        node
    });
    assert_eq!(
        report::node(&world, "n3").unwrap().troubles[0].trouble.kind,
        "node-not-ready"
    );
}

/// The world as a user without access to these kinds reads it.
fn without(kinds: &[&str]) -> Snapshot {
    let mut world = world();
    for kind in kinds {
        world
            .unread
            .push(format!("{kind} cannot be listed; unknown"));
        match *kind {
            "GpuNodes" => world.reports.clear(),
            "Nodes" => world.nodes.clear(),
            "ResourceSlices" => world.slices.clear(),
            "DeviceClasses" => world.classes.clear(),
            _ => world.claims.retain(|claim| claim.status.is_none()),
        }
    }
    world
}

#[test]
fn unreadable_kinds_are_not_taken_for_absent_ones() {
    let asked = |world: &Snapshot, claim: &str| {
        let report = claim::claim(world, "default", claim).unwrap();
        (report.waiting.unwrap().verdict, report.needs_person)
    };
    assert_eq!(asked(&world(), "waits"), (Verdict::NoRoom, false));
    // Slices say which nodes there are; that the one with room is cordoned is not known.
    let nodes = without(&["Nodes"]);
    assert_eq!(asked(&nodes, "waits"), (Verdict::Fits, false));
    assert_eq!(asked(&nodes, "greedy"), (Verdict::NeverFits, true));
    for kind in ["ResourceSlices", "DeviceClasses"] {
        assert_eq!(
            asked(&without(&[kind]), "waits"),
            (Verdict::Unknown, false),
            "{kind}"
        );
    }
    // Unseen claims may hold the device; what does not fit on empty nodes fits in no case.
    let claims = without(&["ResourceClaims"]);
    assert_eq!(asked(&claims, "waits"), (Verdict::Unknown, false));
    assert_eq!(asked(&claims, "greedy"), (Verdict::NeverFits, true));

    let reports = without(&["GpuNodes"]);
    let fleet = report::fleet(&reports, None);
    assert_eq!(fleet.nodes, []);
    assert!(
        fleet
            .troubles
            .iter()
            .all(|entry| entry.trouble.kind != "no-report"),
        "{:?}",
        fleet.troubles
    );
    assert!(
        render::fleet(&reports, &fleet, false)
            .starts_with("GpuNodes cannot be read: the state of the nodes' GPUs is unknown\n")
    );
    let error = report::node(&reports, "n1").unwrap_err().to_string();
    assert_eq!(
        error,
        "the GpuNode of node n1 cannot be read; GpuNodes cannot be listed; unknown"
    );
}

#[test]
fn a_claim_is_named_with_its_namespace_or_in_that_of_the_context() {
    assert_eq!(
        full_name("claim", "a/b", None, "default").unwrap(),
        ("a", "b")
    );
    assert_eq!(
        full_name("claim", "b", Some("a"), "default").unwrap(),
        ("a", "b")
    );
    assert_eq!(full_name("claim", "b", None, "ctx").unwrap(), ("ctx", "b"));
    assert!(full_name("claim", "a/b", Some("c"), "default").is_err());
}
