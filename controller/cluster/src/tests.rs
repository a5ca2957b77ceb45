//! Pods that are due, and reasons to keep them.

use std::time::Duration;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_pod, mk_result, reserved};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Namespace, Pod, PodCondition, PodExtendedResourceClaimStatus, PodResourceClaim,
    PodResourceClaimStatus, PodStatus,
};
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};

use crate::due::{Candidate, DeviceId, Reason, candidates, due};
use crate::verdict::{Kept, claim_names, verdict};

const DRIVER: &str = "gpu.divvy.dev";

fn now() -> Timestamp {
    Timestamp::UNIX_EPOCH + Duration::from_hours(1_000)
}

fn ago(minutes: u64) -> Timestamp {
    now() - Duration::from_mins(minutes)
}

/// A claim of one pod for devices of ours.
fn claim(name: &str, devices: &[&str]) -> ResourceClaim {
    let results = devices
        .iter()
        .map(|device| mk_result("gpu", DRIVER, "node", device));
    reserved(
        allocated(mk_claim("n", name, "c", 1), results.collect()),
        "p",
        "uid-p",
    )
}

fn condition(status: &str, reason: &str, since: Timestamp) -> Condition {
    Condition {
        type_: "ReclaimDue".into(),
        status: status.into(),
        reason: reason.into(),
        message: String::new(),
        last_transition_time: Time(since),
        observed_generation: None,
    }
}

/// Another condition of the same device, which says the contrary.
fn opposite(condition: &Condition) -> Condition {
    let is_true = condition.status == "True";
    Condition {
        type_: "Idle".into(),
        status: if is_true { "False" } else { "True" }.into(),
        ..condition.clone()
    }
}

fn marked(mut claim: ResourceClaim, device: &str, condition: Condition) -> ResourceClaim {
    let entry = AllocatedDeviceStatus {
        driver: DRIVER.into(),
        pool: "node".into(),
        device: device.into(),
        conditions: Some(vec![opposite(&condition), condition]),
        ..AllocatedDeviceStatus::default()
    };
    claim
        .status
        .as_mut()
        .unwrap()
        .devices
        .get_or_insert_default()
        .push(entry);
    claim
}

fn idle(name: &str, device: &str) -> ResourceClaim {
    marked(
        claim(name, &[device]),
        device,
        condition("True", "Idle", ago(4)),
    )
}

fn annotated(metadata: &mut ObjectMeta, value: &str) {
    metadata
        .annotations
        .get_or_insert_default()
        .insert("divvy.dev/keep-idle".into(), value.into());
}

#[test]
fn a_claim_is_due_while_its_condition_is_true_and_confirmed() {
    let with = |status, reason, since| {
        due(
            &marked(
                claim("c", &["gpu-0"]),
                "gpu-0",
                condition(status, reason, since),
            ),
            DRIVER,
            now(),
        )
    };
    assert_eq!(with("True", "Idle", ago(0)), Some(Reason::Idle));
    assert_eq!(with("True", "OverGrant", ago(10)), Some(Reason::OverGrant));
    assert_eq!(with("False", "NotDue", ago(0)), None);
    assert_eq!(with("False", "Idle", ago(0)), None, "taken back");
    assert_eq!(with("Unknown", "OverGrant", ago(0)), None);
    assert_eq!(with("True", "Unheard", ago(0)), None);
    let (old, ahead) = (
        ago(10) - Duration::from_secs(1),
        now() + Duration::from_secs(601),
    );
    assert_eq!(with("True", "Idle", old), None, "its node may be down");
    assert_eq!(
        with("True", "Idle", ahead),
        None,
        "clocks differ by more than a confirmation lasts"
    );
    assert_eq!(due(&claim("c", &["gpu-0"]), DRIVER, now()), None);
    assert_eq!(due(&idle("c", "gpu-0"), "other.dev", now()), None);
}

#[test]
fn every_device_must_be_idle_and_one_that_is_used_too_much_is_enough() {
    let (both, at) = (claim("c", &["gpu-0", "gpu-1"]), ago(1));
    let one = marked(both, "gpu-0", condition("True", "Idle", at));
    assert_eq!(due(&one, DRIVER, now()), None);
    let second = |status, reason| {
        due(
            &marked(one.clone(), "gpu-1", condition(status, reason, at)),
            DRIVER,
            now(),
        )
    };
    assert_eq!(second("True", "Idle"), Some(Reason::Idle));
    assert_eq!(second("False", "NotDue"), None);
    assert_eq!(second("True", "OverGrant"), Some(Reason::OverGrant));
}

#[test]
fn shares_of_one_device_count_each_and_admin_access_does_not_count() {
    let mut two = claim("c", &["gpu-0-ts", "gpu-0-ts"]);
    let allocation = two.status.as_mut().unwrap().allocation.as_mut().unwrap();
    let results = allocation
        .devices
        .as_mut()
        .unwrap()
        .results
        .as_mut()
        .unwrap();
    for (result, id) in results.iter_mut().zip(["1", "2"]) {
        result.share_id = Some(id.into());
    }
    let mut one = marked(two, "gpu-0-ts", condition("True", "Idle", ago(1)));
    one.status.as_mut().unwrap().devices.as_mut().unwrap()[0].share_id = Some("1".into());
    assert_eq!(
        due(&one, DRIVER, now()),
        None,
        "nothing is said of the second"
    );
    let mut both = marked(one, "gpu-0-ts", condition("True", "Idle", ago(1)));
    both.status.as_mut().unwrap().devices.as_mut().unwrap()[1].share_id = Some("2".into());
    assert_eq!(due(&both, DRIVER, now()), Some(Reason::Idle));

    let mut admin = idle("c", "gpu-0");
    let allocation = admin.status.as_mut().unwrap().allocation.as_mut().unwrap();
    allocation
        .devices
        .as_mut()
        .unwrap()
        .results
        .as_mut()
        .unwrap()[0]
        .admin_access = Some(true);
    assert_eq!(due(&admin, DRIVER, now()), None);
}

#[test]
fn candidates_are_all_pods_of_idle_claims_and_the_last_of_overused_ones() {
    let shared = |claim| reserved(claim, "later", "uid-later");
    let over = marked(
        claim("over", &["gpu-1-ts"]),
        "gpu-1-ts",
        condition("True", "OverGrant", ago(1)),
    );
    let mut kept = idle("kept", "gpu-2");
    annotated(&mut kept.metadata, "true");
    let mut not_kept = idle("a", "gpu-3");
    annotated(&mut not_kept.metadata, "false");
    let mut group = idle("group", "gpu-4");
    let consumer = &mut group
        .status
        .as_mut()
        .unwrap()
        .reserved_for
        .as_mut()
        .unwrap()[0];
    (consumer.api_group, consumer.resource) =
        (Some("scheduling.k8s.io".into()), "podgroups".into());
    // Something that is called a pod, and is none of Kubernetes.
    let mut others = idle("others", "gpu-5");
    let consumer = &mut others
        .status
        .as_mut()
        .unwrap()
        .reserved_for
        .as_mut()
        .unwrap()[0];
    consumer.api_group = Some("example.invalid".into());
    // Something of Kubernetes that is no pod.
    let mut service = idle("service", "gpu-6");
    let consumer = &mut service
        .status
        .as_mut()
        .unwrap()
        .reserved_for
        .as_mut()
        .unwrap()[0];
    consumer.resource = "services".into();
    let claims = [
        shared(idle("idle", "gpu-0")),
        shared(over),
        kept,
        not_kept,
        group,
        others,
        service,
    ];
    let found = candidates(&claims, DRIVER, now());
    let names = found
        .iter()
        .map(|one| (one.claim.as_str(), one.pod.as_str(), one.reason));
    let expected = [
        ("over", "later", Reason::OverGrant),
        ("idle", "later", Reason::Idle),
        ("a", "p", Reason::Idle),
        ("idle", "p", Reason::Idle),
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    assert_eq!(
        found[0].devices,
        [DeviceId {
            pool: "node".into(),
            device: "gpu-1-ts".into()
        }]
    );
}

/// Everything that is read about a pod.
struct Read {
    candidate: Candidate,
    pod: Pod,
    namespace: Namespace,
    claims: Vec<ResourceClaim>,
    now: Timestamp,
}

fn read(claims: Vec<ResourceClaim>) -> Read {
    read_at(claims, now())
}

fn read_at(claims: Vec<ResourceClaim>, now: Timestamp) -> Read {
    let candidate = candidates(&claims, DRIVER, now).remove(0);
    let mut pod = mk_pod("n", "p", Some("node"), &[]);
    pod.metadata.uid = Some("uid-p".into());
    pod.status = Some(PodStatus {
        start_time: Some(Time(ago(90))),
        ..PodStatus::default()
    });
    Read {
        candidate,
        pod,
        namespace: Namespace::default(),
        claims,
        now,
    }
}

impl Read {
    fn verdict(&self) -> Result<(), Kept> {
        verdict(
            &self.candidate,
            &self.pod,
            &self.namespace,
            &self.claims,
            DRIVER,
            self.now,
        )
    }

    fn with(claims: Vec<ResourceClaim>, change: impl FnOnce(&mut Self)) -> Result<(), Kept> {
        let mut read = read(claims);
        change(&mut read);
        read.verdict()
    }
}

#[test]
fn a_pod_goes_only_if_it_is_the_same_lives_and_is_none_of_the_systems() {
    let with = |change: fn(&mut Read)| Read::with(vec![idle("c", "gpu-0")], change);
    assert_eq!(with(|_| {}), Ok(()));
    assert_eq!(
        with(|read| read.pod.metadata.uid = Some("other".into())),
        Err(Kept::Gone)
    );
    assert_eq!(
        with(|read| read.pod.metadata.deletion_timestamp = Some(Time(now()))),
        Err(Kept::Ending)
    );
    let ended = |read: &mut Read| {
        read.pod.status = Some(PodStatus {
            phase: Some("Failed".into()),
            ..PodStatus::default()
        });
    };
    assert_eq!(with(ended), Err(Kept::Ending));
    let system = |read: &mut Read| read.pod.spec.as_mut().unwrap().priority = Some(2_000_000_000);
    assert_eq!(with(system), Err(Kept::System));
    assert_eq!(with(|read| read.claims.clear()), Err(Kept::NotDue));
    let taken_back = |read: &mut Read| {
        read.claims[0] = marked(
            claim("c", &["gpu-0"]),
            "gpu-0",
            condition("False", "NotDue", now()),
        );
    };
    assert_eq!(
        with(taken_back),
        Err(Kept::NotDue),
        "what the watch had not yet"
    );
}

#[test]
fn a_pod_that_came_after_its_claim_was_found_due_stays() {
    // The condition is four minutes old.
    let with = |change: &dyn Fn(&mut Read)| Read::with(vec![idle("c", "gpu-0")], change);
    let came = |at: Timestamp| with(&|read| read.pod.metadata.creation_timestamp = Some(Time(at)));
    assert_eq!(came(ago(5)), Ok(()));
    assert_eq!(came(ago(3)), Err(Kept::New));
    assert_eq!(
        came(ago(4) - Duration::from_secs(29)),
        Err(Kept::New),
        "the node learns of it a while later"
    );
    assert_eq!(came(ago(4) - Duration::from_secs(30)), Ok(()));
    // It may have waited long for its node.
    let since = |status: PodStatus| {
        with(&|read| {
            read.pod.metadata.creation_timestamp = Some(Time(ago(90)));
            read.pod.status = Some(PodStatus {
                start_time: status.start_time.clone().or(Some(Time(ago(80)))),
                ..status.clone()
            });
        })
    };
    let started = |at| {
        since(PodStatus {
            start_time: Some(Time(at)),
            ..PodStatus::default()
        })
    };
    assert_eq!(
        (started(ago(80)), started(ago(3))),
        (Ok(()), Err(Kept::New))
    );
    let scheduled = |at| {
        let condition = PodCondition {
            type_: "PodScheduled".into(),
            status: "True".into(),
            last_transition_time: Some(Time(at)),
            ..PodCondition::default()
        };
        since(PodStatus {
            conditions: Some(vec![condition]),
            ..PodStatus::default()
        })
    };
    assert_eq!(
        (scheduled(ago(80)), scheduled(ago(3))),
        (Ok(()), Err(Kept::New))
    );
    let became_ready = PodCondition {
        type_: "Ready".into(),
        status: "True".into(),
        last_transition_time: Some(Time(ago(1))),
        ..PodCondition::default()
    };
    let ready = since(PodStatus {
        conditions: Some(vec![became_ready]),
        ..PodStatus::default()
    });
    assert_eq!(ready, Ok(()), "readiness is no arrival");
    assert_eq!(
        with(&|read| read.pod.spec.as_mut().unwrap().node_name = None),
        Err(Kept::New)
    );
    assert_eq!(
        with(&|read| read.pod.status.as_mut().unwrap().start_time = None),
        Err(Kept::New),
        "it has not started"
    );
    let over = marked(
        claim("c", &["gpu-0-ts"]),
        "gpu-0-ts",
        condition("True", "OverGrant", ago(4)),
    );
    let newer = Read::with(vec![over], |read| {
        read.pod.metadata.creation_timestamp = Some(Time(ago(3)));
    });
    assert_eq!(newer, Err(Kept::New), "it has taken nothing");
}

#[test]
fn a_pod_stays_if_its_claims_are_unknown_or_now_reserved_for_others() {
    let mut read = read(vec![idle("c", "gpu-0")]);
    let reserved_for = &mut read.claims[0].status.as_mut().unwrap().reserved_for;
    reserved_for.as_mut().unwrap()[0].uid = "other".into();
    assert_eq!(read.verdict(), Err(Kept::NotDue));

    let with = |known: &dyn Fn(&mut Pod)| {
        Read::with(vec![idle("c", "gpu-0")], |read| known(&mut read.pod))
    };
    let template = |pod: &mut Pod| {
        let template = PodResourceClaim {
            name: "t".into(),
            resource_claim_template_name: Some("t".into()),
            ..PodResourceClaim::default()
        };
        pod.spec
            .as_mut()
            .unwrap()
            .resource_claims
            .get_or_insert_default()
            .push(template);
    };
    assert_eq!(with(&template), Err(Kept::Unknown("t".into())));
    let named = |pod: &mut Pod| {
        template(pod);
        let made = PodResourceClaimStatus {
            name: "t".into(),
            resource_claim_name: None,
        };
        pod.status.as_mut().unwrap().resource_claim_statuses = Some(vec![made]);
    };
    assert_eq!(with(&named), Ok(()), "none was needed");
    let by_name = |pod: &mut Pod| {
        let claim = PodResourceClaim {
            name: "gpu".into(),
            resource_claim_name: Some("c".into()),
            ..PodResourceClaim::default()
        };
        let claims = &mut pod.spec.as_mut().unwrap().resource_claims;
        claims.get_or_insert_default().push(claim);
    };
    assert_eq!(with(&by_name), Ok(()), "the pod itself says its name");
}

#[test]
fn a_pod_goes_only_for_the_claim_and_the_reason_for_which_it_was_found() {
    let over = |name, device| {
        let condition = condition("True", "OverGrant", ago(4));
        marked(claim(name, &[device]), device, condition)
    };
    // Another claim is the first of those that are read.
    let second = Read::with(vec![idle("c", "gpu-0"), over("d", "gpu-1-ts")], |_| {});
    assert_eq!(second, Ok(()), "the candidate is for its claim d");
    let not_the_first = Read::with(
        vec![over("c", "gpu-0-ts"), claim("d", &["gpu-1"])],
        |read| {
            read.candidate.claim = "d".into();
        },
    );
    assert_eq!(not_the_first, Err(Kept::NotDue), "claim d is not due");
    let other_reason = Read::with(vec![idle("c", "gpu-0")], |read| {
        read.claims[0] = over("c", "gpu-0");
    });
    assert_eq!(
        other_reason,
        Err(Kept::NotDue),
        "the next look finds it for its new reason, with the limits of that"
    );
}

#[test]
fn an_idle_pod_stays_if_it_opts_out_or_another_claim_of_it_is_in_use() {
    let with = |change: fn(&mut Read)| Read::with(vec![idle("c", "gpu-0")], change);
    let kept = |what| Err(Kept::OptedOut(what));
    assert_eq!(
        with(|read| annotated(&mut read.pod.metadata, "true")),
        kept("the pod")
    );
    assert_eq!(
        with(|read| annotated(&mut read.namespace.metadata, "true")),
        kept("the namespace")
    );
    assert_eq!(
        with(|read| annotated(&mut read.claims[0].metadata, "true")),
        kept("one of its claims")
    );
    assert_eq!(
        with(|read| annotated(&mut read.namespace.metadata, "no")),
        Ok(())
    );

    let other = Read::with(vec![idle("c", "gpu-0"), claim("d", &["gpu-1"])], |_| {});
    assert_eq!(other, Err(Kept::InUse("d".into())));
    let also_idle = Read::with(vec![idle("c", "gpu-0"), idle("d", "gpu-1")], |_| {});
    assert_eq!(also_idle, Ok(()));
    let not_allocated = mk_claim("n", "d", "c", 1);
    assert_eq!(
        Read::with(vec![idle("c", "gpu-0"), not_allocated], |_| {}),
        Ok(()),
        "nothing of ours"
    );
}

#[test]
fn a_pod_that_harms_others_cannot_opt_out() {
    let over = marked(
        claim("c", &["gpu-0-ts"]),
        "gpu-0-ts",
        condition("True", "OverGrant", ago(1)),
    );
    let change = |read: &mut Read| {
        annotated(&mut read.pod.metadata, "true");
        annotated(&mut read.claims[0].metadata, "true");
    };
    assert_eq!(
        Read::with(vec![over, claim("d", &["gpu-1"])], change),
        Ok(())
    );
}

#[test]
fn claims_of_a_pod_are_named_or_from_templates_or_extended_resources() {
    let mut pod = mk_pod("n", "p", None, &["named"]);
    let made = |name: Option<&str>| PodResourceClaimStatus {
        name: "t".into(),
        resource_claim_name: name.map(str::to_owned),
    };
    let extended = PodExtendedResourceClaimStatus {
        resource_claim_name: "extended".into(),
        ..PodExtendedResourceClaimStatus::default()
    };
    pod.status = Some(PodStatus {
        resource_claim_statuses: Some(vec![made(Some("made")), made(None)]),
        extended_resource_claim_status: Some(extended),
        ..PodStatus::default()
    });
    assert_eq!(claim_names(&pod), ["extended", "made", "named"]);
}

#[test]
fn a_pod_that_came_a_moment_ago_stays_whatever_the_clocks_say() {
    // Minutes by which the clocks are ahead of the true time: of the node, of the API server with
    // the scheduler, and of this process. The pod started a second ago; the condition was said two
    // minutes ago, or just now.
    for (node, server, own) in [
        (0, 0, 0),
        (7, 0, 0),
        (0, 7, 0),
        (0, 0, 7),
        (7, 7, 0),
        (7, 0, 7),
        (0, 7, 7),
        (7, 7, 7),
    ] {
        for (reason, device) in [("Idle", "gpu-0"), ("OverGrant", "gpu-0-ts")] {
            for said in [120, 0] {
                let by = |ahead: u64, before: u64| {
                    now() + Duration::from_mins(ahead) - Duration::from_secs(before)
                };
                let confirmed = condition("True", reason, by(node, said));
                let due = marked(claim("c", &[device]), device, confirmed);
                let mut read = read_at(vec![due], by(own, 0));
                read.pod.metadata.creation_timestamp = Some(Time(by(server, 1)));
                read.pod.status.as_mut().unwrap().start_time = Some(Time(by(node, 1)));
                let found = read.verdict();
                assert_eq!(
                    found,
                    Err(Kept::New),
                    "{node} {server} {own} {reason} {said}"
                );
            }
        }
    }
}

#[test]
fn a_clock_set_back_says_nothing_about_a_pod_that_just_came() {
    let ahead = now() + Duration::from_mins(7);
    for (reason, device) in [("Idle", "gpu-0"), ("OverGrant", "gpu-0-ts")] {
        let due = marked(
            claim("c", &[device]),
            device,
            condition("True", reason, ahead),
        );
        let came = |seconds| {
            Read::with(vec![due.clone()], |read| {
                let at = Some(Time(now() - Duration::from_secs(seconds)));
                read.pod.metadata.creation_timestamp.clone_from(&at);
                read.pod.status.as_mut().unwrap().start_time = at;
            })
        };
        assert_eq!(came(29), Err(Kept::New), "{reason}");
        assert_eq!(came(30), Ok(()), "{reason}");
    }
}

#[test]
fn what_is_said_now_of_any_device_that_counts_decides_when_it_was_said() {
    let came = |claim: ResourceClaim, minutes| {
        Read::with(vec![claim], |read| {
            read.pod.metadata.creation_timestamp = Some(Time(ago(minutes)));
            read.pod.status.as_mut().unwrap().start_time = Some(Time(ago(minutes)));
        })
    };
    let two = || claim("c", &["gpu-0-ts", "gpu-1-ts"]);
    let over = || marked(two(), "gpu-0-ts", condition("True", "OverGrant", ago(2)));
    for (status, reason, since) in [
        ("False", "NotDue", 120),  // taken back
        ("True", "OverGrant", 90), // not confirmed
        ("True", "Idle", 7),       // of another kind
        ("True", "OverGrant", 7),  // said before the pod came, too
    ] {
        let other = condition(status, reason, ago(since));
        assert_eq!(
            came(marked(over(), "gpu-1-ts", other), 5),
            Ok(()),
            "{status} {reason} {since}"
        );
    }
    assert_eq!(came(over(), 1), Err(Kept::New));
    // Every device is idle: the pod was there when each was found to be so.
    let idle = marked(two(), "gpu-0-ts", condition("True", "Idle", ago(2)));
    let both = marked(idle, "gpu-1-ts", condition("True", "Idle", ago(7)));
    assert_eq!(came(both.clone(), 5), Err(Kept::New));
    assert_eq!(came(both, 8), Ok(()));
}
