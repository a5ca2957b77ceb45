//! Pods: from Pending to running, and the reasons that concern a pod with several claims.

use serde_json::{Value, json};

use super::*;
use crate::status::pod::{self as pods, Step};

/// Puts a pod that is asked about into a world; it waits, too, if it is Pending.
#[expect(clippy::needless_pass_by_value, reason = "callers make it for this")]
fn named(mut world: Snapshot, pod: Value) -> Snapshot {
    let phase = pod["status"]["phase"]
        .as_str()
        .unwrap_or("Pending")
        .to_owned();
    world.named = typed(json!([pod]));
    world.pods = if phase == "Pending" {
        world.named.clone()
    } else {
        Vec::new()
    };
    world
}

/// The pod `w` with these claims.
fn with(claims: &[&str], change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = pod("w", claims);
    change(&mut pod);
    pod
}

fn report(world: &Snapshot) -> pods::PodReport {
    pods::pod(world, "default", "w").unwrap()
}

fn on(pod: &mut Value, node: &str, phase: &str) {
    pod["spec"]["nodeName"] = node.into();
    pod["status"] = json!({ "phase": phase, "startTime": "2026-11-21T19:55:00Z" });
}

#[test]
fn a_pod_is_followed_from_waiting_to_running() {
    let mut ready = world();
    let holder = |phase: &str| {
        let mut gpu = gpu(0, Some("early"));
        phase.clone_into(&mut gpu.holders[0].phase);
        gpu
    };
    ready.claims.push(typed(allocated("early", "n3", "gpu-0")));
    let mut preparing = ready.clone();
    ready.reports.insert(
        "n3".to_owned(),
        status(vec![holder("prepared")], Vec::new(), ""),
    );
    preparing.reports.insert(
        "n3".to_owned(),
        status(vec![holder("preparing")], Vec::new(), ""),
    );
    let gated = with(&["waits"], |pod| {
        pod["spec"]["schedulingGates"] = json!([{ "name": "example.com/quota" }]);
    });
    let steps = [
        (named(world(), gated), Step::Gated, false),
        (
            named(world(), with(&["waits"], |_| ())),
            Step::Waiting,
            false,
        ),
        (
            named(world(), with(&["greedy"], |_| ())),
            Step::Waiting,
            true,
        ),
        (
            named(world(), with(&["absent"], |_| ())),
            Step::Waiting,
            true,
        ),
        (
            named(
                preparing.clone(),
                with(&["early"], |pod| on(pod, "n3", "Pending")),
            ),
            Step::Preparing,
            false,
        ),
        (
            named(world(), with(&["d"], |pod| on(pod, "n2", "Pending"))),
            Step::Preparing,
            true,
        ),
        (
            named(
                ready.clone(),
                with(&["early"], |pod| on(pod, "n3", "Pending")),
            ),
            Step::Starting,
            false,
        ),
        (
            named(
                ready.clone(),
                with(&["early"], |pod| on(pod, "n3", "Running")),
            ),
            Step::Running,
            false,
        ),
        (
            named(
                ready.clone(),
                with(&["early"], |pod| on(pod, "n3", "Succeeded")),
            ),
            Step::Ended,
            false,
        ),
        (
            named(
                ready.clone(),
                with(&["early"], |pod| {
                    on(pod, "n3", "Failed");
                    pod["status"]["reason"] = "UnexpectedAdmissionError".into();
                }),
            ),
            Step::Ended,
            true,
        ),
    ];
    for (number, (world, step, needs_person)) in steps.into_iter().enumerate() {
        let report = report(&world);
        assert_eq!(
            (report.step, report.needs_person),
            (step, needs_person),
            "{number}: {report:?}"
        );
    }
}

#[test]
fn a_waiting_pod_shows_its_claims_and_why_they_have_no_devices() {
    let world = named(world(), with(&["waits"], |_| ()));
    golden(
        "pod-waits.txt",
        &render::pod(&world, &report(&world), false),
    );
    let world = named(super::world(), with(&["d"], |pod| on(pod, "n2", "Pending")));
    golden(
        "pod-refused.txt",
        &render::pod(&world, &report(&world), false),
    );
}

#[test]
fn warnings_of_the_kubelet_show_what_is_left_when_the_devices_are_ready() {
    let mut world = world();
    world.claims.push(typed(allocated("early", "n3", "gpu-0")));
    world.reports.insert(
        "n3".to_owned(),
        status(vec![gpu(0, Some("early"))], Vec::new(), ""),
    );
    let mut world = named(
        world,
        with(&["early"], |pod| {
            on(pod, "n3", "Pending");
            let waiting = json!({ "waiting": { "reason": "CreateContainerError", "message": "failed to inject CDI devices" } });
            pod["status"]["containerStatuses"] = json!([{ "name": "main", "state": waiting }]);
        }),
    );
    let event = |reason: &str, at: &str, message: &str| {
        let mut event = failed("w", at, message);
        event["reason"] = reason.into();
        event
    };
    let by_crun = "error executing hook `/opt/divvy-cdi-hook` (exit code: 75)";
    world.events = typed(json!([
        event("Failed", "2026-11-21T19:59:00Z", "unresolvable CDI devices"),
        event("Failed", "2026-11-21T19:58:00Z", "an earlier one"),
        event("FailedScheduling", "2026-11-21T19:57:00Z", "0/3 nodes"),
        event("FailedStart", "2026-11-21T19:56:00Z", by_crun),
        failed("w", "2026-11-21T19:56:00Z", "of the preparation before"),
    ]));
    let report = report(&world);
    let meant = "(volumes of the pod cover the folders of the driver's names and of the loader: mount them elsewhere)";
    let expected = [
        "Failed: unresolvable CDI devices".to_owned(),
        format!("FailedStart: {by_crun} {meant}"),
    ];
    assert_eq!(report.warnings, expected);
    assert_eq!(
        report.containers,
        ["main: CreateContainerError: failed to inject CDI devices"]
    );
    assert!(
        report.needs_person && report.claims[0].kubelet.is_none(),
        "{report:?}"
    );
}

/// The scheduler makes a claim for extended resources only when it can allocate it.
#[test]
fn a_pod_with_an_extended_resource_waits_for_the_claim_that_would_be_made() {
    let asks = |resource: &str| {
        with(&[], |pod| {
            let limits = json!({ "limits": { resource: "9" } });
            pod["spec"]["containers"] = json!([{ "name": "c", "resources": limits }]);
        })
    };
    let mut world = world();
    world.classes[0]
        .spec
        .as_mut()
        .unwrap()
        .extended_resource_name = Some("example.com/gpu".to_owned());
    let greedy = report(&named(world.clone(), asks("example.com/gpu")));
    assert_eq!(greedy.waiting.unwrap().verdict, Verdict::NeverFits);
    let other = report(&named(world.clone(), asks("nvidia.com/gpu")));
    assert!(
        other.missing[0].starts_with("no DeviceClass stands for nvidia.com/gpu"),
        "{:?}",
        other.missing
    );
    assert!(other.needs_person);
    // Once it is allocated it is a claim of the pod.
    let made = with(&[], |pod| {
        on(pod, "n1", "Running");
        pod["status"]["extendedResourceClaimStatus"] =
            json!({ "resourceClaimName": "a", "requestMappings": [] });
    });
    assert_eq!(report(&named(world, made)).claims[0].claim, "default/a");
}

#[test]
fn a_pod_that_is_not_there_is_distinguished_from_a_claim_and_from_several() {
    let mut world = world();
    let error = |world: &Snapshot, wanted: &str| {
        pods::pod(world, "default", wanted).unwrap_err().to_string()
    };
    assert_eq!(
        error(&world, "waits"),
        "pod default/waits does not exist, nor one whose name begins so; it is a claim: `divvy status claim default/waits`"
    );
    world.named = typed(json!([pod("w-1", &[]), pod("w-2", &[])]));
    assert_eq!(
        error(&world, "w"),
        "default/w matches several pods: w-1, w-2"
    );
}

#[test]
fn claims_of_templates_that_are_not_made_or_were_deleted_are_missing() {
    let pod = with(&[], |pod| {
        pod["spec"]["resourceClaims"] = json!([
            { "name": "new", "resourceClaimTemplateName": "t" },
            { "name": "gone", "resourceClaimTemplateName": "t" },
        ]);
        pod["status"]["resourceClaimStatuses"] =
            json!([{ "name": "gone", "resourceClaimName": "w-gone-x" }]);
    });
    let missing = report(&named(world(), pod)).missing;
    assert_eq!(
        missing,
        [
            "no claim is made yet of ResourceClaimTemplate default/t for entry \"new\": does the template exist?",
            "claim default/w-gone-x was deleted: delete the pod, so that both are made again",
        ]
    );
}

/// Only node n3, whose one GPU the pod's other claim has.
#[test]
fn the_pods_own_claim_is_no_other_whose_end_would_help() {
    let mut world = world();
    world
        .nodes
        .retain(|node| node.metadata.name.as_deref() == Some("n3"));
    world.nodes[0].spec.as_mut().unwrap().unschedulable = None;
    world
        .slices
        .retain(|slice| slice.spec.node_name.as_deref() == Some("n3"));
    let held = allocated("mine", "n3", "gpu-0");
    world.claims = typed(json!([held, ask("waits", DRIVER, 1)]));
    let own = report(&named(world.clone(), with(&["mine", "waits"], |_| ())));
    let why = own.waiting.unwrap();
    assert_eq!((why.verdict, own.needs_person), (Verdict::NeverFits, true));
    let reasons = why.nodes[0].reasons.join("\n");
    assert!(
        reasons.contains("the pod's own claim default/mine holds some of them"),
        "{reasons}"
    );
    assert!(!reasons.contains("held by"), "{reasons}");
    assert!(
        why.hint
            .unwrap()
            .contains("ask for all of them in one claim")
    );
    // Another pod's is.
    let other = report(&named(world, with(&["waits"], |_| ())));
    assert_eq!(other.waiting.unwrap().verdict, Verdict::NoRoom);
}

#[test]
fn a_node_that_was_set_by_hand_passes_the_scheduler_by() {
    let pod = with(&["waits"], |pod| pod["spec"]["nodeName"] = "n1".into());
    let world = named(world(), pod);
    let report = report(&world);
    let why = report.waiting.unwrap();
    assert_eq!(
        (why.verdict, report.needs_person),
        (Verdict::Bypassed, true)
    );
    assert!(
        why.hint
            .unwrap()
            .contains("nodeSelector: {kubernetes.io/hostname: n1}")
    );
    let fleet = super::report::fleet(&world, None);
    assert_eq!(fleet.waiting[0].why.verdict, Verdict::Bypassed);
}

#[test]
fn nine_claims_on_eight_gpus_are_counted() {
    let mut world = world();
    world.nodes.truncate(1);
    let gpus: Vec<String> = (0..8).map(|number| format!("gpu-{number}")).collect();
    let gpus: Vec<(&str, bool)> = gpus.iter().map(|name| (name.as_str(), false)).collect();
    world.slices = typed(json!([slice("n1", &gpus)]));
    let names: Vec<String> = (0..9).map(|number| format!("c{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    world.claims = names
        .iter()
        .map(|name| typed(ask(name, DRIVER, 1)))
        .collect();
    let report = report(&named(world, with(&names, |_| ())));
    let why = report.waiting.unwrap();
    assert_eq!(why.verdict, Verdict::NeverFits);
    assert_eq!(
        why.nodes[0].reasons,
        [
            "each request can be met alone, but not all together: 9 devices are wanted, 8 at most can be had"
        ]
    );
}

#[test]
fn the_rule_that_taints_a_device_is_named() {
    let mut world = world();
    let rule = json!({
        "metadata": { "name": "repair" },
        "spec": { "deviceSelector": {}, "taint": { "key": "example.com/repair", "effect": "NoSchedule" } },
    });
    world.taint_rules = typed(json!([rule]));
    crate::taints::taint(&mut world.slices, &world.taint_rules);
    let why = report(&named(world, with(&["waits"], |_| ())))
        .waiting
        .unwrap();
    let reasons = why.nodes[0].reasons.join("\n");
    assert!(
        reasons.contains("the taint example.com/repair is of DeviceTaintRule repair"),
        "{reasons}"
    );
}

#[test]
fn one_of_a_kind_is_counted_in_the_singular() {
    let world = world();
    let node = super::report::node(&world, "n3").unwrap();
    let text = render::node(&world, &node);
    assert!(
        text.starts_with("node n3: 1 GPU, 1 free, 0 claims"),
        "{text}"
    );
}

#[test]
fn a_pod_that_waits_for_its_own_set_alone_needs_a_person() {
    let mut world = world();
    let owner = json!([{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": true }]);
    for pod in &mut world.pods {
        pod.metadata.owner_references = serde_json::from_value(owner.clone()).unwrap();
    }
    let verdict = |world: &Snapshot| {
        let fleet = report::fleet(world, None);
        let mut waiting = fleet.waiting.iter();
        let w = waiting.find(|one| one.pod == "default/w").unwrap();
        (w.why.verdict, w.why.hint.clone().unwrap_or_default())
    };
    assert_eq!(verdict(&world).0, Verdict::NoRoom);
    let user = json!([{ "resource": "pods", "name": "db-0", "uid": "u" }]);
    for claim in &mut world.claims {
        if let Some(status) = &mut claim.status {
            status.reserved_for = serde_json::from_value(user.clone()).unwrap();
        }
    }
    let (verdict, hint) = verdict(&world);
    assert_eq!(verdict, Verdict::OwnPods);
    assert!(
        verdict.is_hopeless() && hint.starts_with("fewer replicas in StatefulSet db"),
        "{hint}"
    );
}

/// After a change of the driver's name no plugin releases the claims of its former one.
#[test]
fn a_pod_of_the_drivers_former_name_says_what_releases_it() {
    let now = "gpu.nvidia.com";
    let mut world = world();
    world.driver = now.to_owned();
    world.claims.push(typed(allocated("early", "n3", "gpu-0")));
    let served = |world: &mut Snapshot, name: &str| {
        name.clone_into(&mut world.reports.get_mut("n3").unwrap().driver_name);
    };
    let ending =
        |pod: &mut Value| pod["metadata"]["deletionTimestamp"] = "2026-11-21T19:59:00Z".into();
    for (phase, ends, needs) in [
        ("Running", true, true),
        ("Pending", false, true),
        ("Running", false, false),
    ] {
        let pod = with(&["early"], |pod| {
            on(pod, "n3", phase);
            if ends {
                ending(pod);
            }
        });
        let mut world = named(world.clone(), pod);
        served(&mut world, now);
        let said = report(&world);
        let hint = said.hint.unwrap();
        assert!(
            hint.contains("divvy's driver gpu.divvy.dev, and the node serves gpu.nvidia.com now"),
            "{hint}"
        );
        assert!(said.needs_person || !needs, "{phase} {ends}");
        for same in [DRIVER, ""] {
            served(&mut world, same);
            let said = report(&world);
            assert!(!said.hint.unwrap_or_default().contains("serves"), "{same}");
        }
    }
}
