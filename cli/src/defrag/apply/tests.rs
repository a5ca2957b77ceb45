use divvy_api::names::annotations::DEFRAG;
use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_class, mk_device, mk_node, mk_pod, mk_result, mk_slice, reserved,
};
use divvy_fake_cluster::{FakeApi, Fault};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::*;
use crate::defrag::Source;
use crate::defrag::round::Rules;
use crate::format::Output;
use crate::status::read::Access;

const DRIVER: &str = "gpu.divvy.dev";

/// A node with two GPUs, each of which a pod of a ReplicaSet has.
struct Two {
    api: FakeApi,
}

impl Two {
    fn new() -> Self {
        let api = FakeApi::new();
        api.register::<PodDisruptionBudget>(true, true);
        api.put(&mk_node("n1")).unwrap();
        api.put(&mk_class(DRIVER, DRIVER)).unwrap();
        let devices = vec![mk_device("gpu-0"), mk_device("gpu-1")];
        let mut slice = mk_slice("n1-0", DRIVER, "n1", devices);
        slice.spec.pool.name = "n1".to_owned();
        api.put(&slice).unwrap();
        for (name, device) in [("a", "gpu-0"), ("b", "gpu-1")] {
            start(&api, name, device);
        }
        Self { api }
    }

    fn there(&self, name: &str) -> bool {
        self.api.get::<Pod>("ns", name).is_some()
    }

    async fn apply(&self, say: &mut dyn FnMut(&str)) -> Done {
        planned(&self.api.client(), &args(), say).await.unwrap()
    }
}

fn start(api: &FakeApi, name: &str, device: &str) {
    let claim_name = format!("{name}-gpu");
    let mut pod = mk_pod("ns", name, Some("n1"), &[&claim_name]);
    pod.metadata.owner_references = Some(vec![OwnerReference {
        controller: Some(true),
        kind: "ReplicaSet".to_owned(),
        api_version: "apps/v1".to_owned(),
        name: "r".to_owned(),
        uid: "r".to_owned(),
        ..OwnerReference::default()
    }]);
    let pod = api.put(&pod).unwrap();
    let result = mk_result("gpu", DRIVER, "n1", device);
    let claim = mk_claim("ns", &claim_name, DRIVER, 1);
    let claim = allocated(claim, vec![result]);
    let uid = pod.metadata.uid.unwrap();
    api.put(&reserved(claim, name, &uid)).unwrap();
}

fn args() -> Args {
    Args {
        plan: false,
        apply: true,
        patience: 0,
        pod: None,
        want: Some("2*gpu".to_owned()),
        priority: 0,
        rules: Rules::default(),
        source: Source {
            objects: None,
            access: Access::default(),
            kubernetes: 37,
            output: Output::Table,
        },
    }
}

#[tokio::test]
async fn the_pods_of_a_plan_are_evicted_one_by_one_until_it_fits() {
    let two = Two::new();
    let mut said = Vec::new();
    let done = two.apply(&mut |line| said.push(line.to_owned())).await;
    assert!(done.fits, "{done:?}");
    assert_eq!(done.evicted, ["ns/a", "ns/b"]);
    assert_eq!(
        done.why,
        "2 pods evicted; now it fits node n1: n1/gpu-0, n1/gpu-1"
    );
    assert_eq!(said[1..], ["evicted ns/a", "evicted ns/b"]);
    assert!(!two.there("a") && !two.there("b"));
    // A second time, nothing is in the way; the claims of pods that are gone still are.
    for claim in two.api.list::<ResourceClaim>() {
        two.api
            .delete::<ResourceClaim>("ns", &claim.metadata.name.unwrap())
            .unwrap();
    }
    let done = two.apply(&mut |_| {}).await;
    assert_eq!((done.fits, done.evicted.len()), (true, 0));
    assert_eq!(two.api.count("create", "pods/eviction"), 2);
}

/// A refusal, of whatever kind, ends it: says why, and leaves what comes later where it is.
#[tokio::test]
async fn a_refused_eviction_stops_the_rest_and_says_why() {
    for (fault, says) in [
        (
            Fault::Budget,
            "a budget keeps ns/a: The disruption budget b needs 1 healthy pods",
        ),
        (Fault::Status(429), "the API server has too much to do"),
        (
            Fault::Status(403),
            "you may not evict ns/a: the right to create pods/eviction",
        ),
        (Fault::Status(500), "ns/a is not evicted"),
        (
            Fault::DropBefore,
            "no answer, and ns/a may be evicted or not",
        ),
    ] {
        let two = Two::new();
        two.api.fail_next(1, "create", "pods/eviction", fault);
        let done = two.apply(&mut |_| {}).await;
        assert!(!done.fits && done.evicted.is_empty(), "{done:?}");
        assert!(
            done.why.starts_with("stopped with 0 pods of 2 evicted: "),
            "{}",
            done.why
        );
        assert!(done.why.contains(says), "{}", done.why);
        assert!(two.there("a") && two.there("b"));
        assert_eq!(two.api.count("create", "pods/eviction"), 1);
    }
}

#[tokio::test]
async fn a_budget_that_is_used_up_midway_stops_the_rest() {
    let two = Two::new();
    let api = two.api.clone();
    let done = two
        .apply(&mut |line| {
            if line == "evicted ns/a" {
                api.fail_next(1, "create", "pods/eviction", Fault::Budget);
            }
        })
        .await;
    assert_eq!(done.evicted, ["ns/a"]);
    assert!(
        done.why
            .starts_with("stopped with 1 pod of 2 evicted: a budget keeps ns/b"),
        "{}",
        done.why
    );
    assert!(two.there("b"));
}

#[tokio::test]
async fn a_pod_that_is_gone_already_is_not_missed() {
    let two = Two::new();
    let api = two.api.clone();
    let done = two
        .apply(&mut |line| {
            if line.starts_with("evict ") {
                api.delete::<Pod>("ns", "a").unwrap();
            }
        })
        .await;
    assert!(done.fits, "{done:?}");
    assert_eq!(done.evicted, ["ns/b"]);
}

/// A change of the world.
type Change = fn(&FakeApi);

/// Each change of the world after the first eviction keeps the second pod where it is.
#[tokio::test]
async fn a_world_that_is_not_that_of_the_plan_stops_the_rest() {
    let takes = |api: &FakeApi| {
        // The freed GPU is given to another pod, which is more important.
        start(api, "c", "gpu-0");
        api.modify::<Pod>("ns", "c", |pod| {
            pod.spec.as_mut().unwrap().priority = Some(7);
        })
        .unwrap();
    };
    let asks_to_stay = |api: &FakeApi| {
        api.modify::<Pod>("ns", "b", |pod| {
            let note = ("divvy.dev/do-not-evict".to_owned(), "true".to_owned());
            pod.metadata.annotations = Some([note].into());
        })
        .unwrap();
    };
    let another = |api: &FakeApi| {
        api.delete::<Pod>("ns", "b").unwrap();
        start(api, "b2", "gpu-1");
    };
    let changes: [(Change, &str); 3] = [
        (
            takes,
            "it does not fit node n1 any more when the rest is evicted",
        ),
        (asks_to_stay, "pod ns/b stays: it asks to stay"),
        (another, "pod ns/b has left node n1"),
    ];
    for (change, says) in changes {
        let two = Two::new();
        let api = two.api.clone();
        let done = two
            .apply(&mut |line| {
                if line == "evicted ns/a" {
                    change(&api);
                }
            })
            .await;
        assert!(!done.fits, "{done:?}");
        assert_eq!(done.evicted, ["ns/a"]);
        assert!(done.why.contains(says), "{}: {}", says, done.why);
        assert_eq!(two.api.count("create", "pods/eviction"), 1);
    }
}

#[tokio::test]
async fn where_it_fits_by_then_no_more_is_evicted() {
    let two = Two::new();
    let api = two.api.clone();
    let done = two
        .apply(&mut |line| {
            if line == "evicted ns/a" {
                api.put(&mk_node("n2")).unwrap();
                let devices = vec![mk_device("gpu-0"), mk_device("gpu-1")];
                let mut slice = mk_slice("n2-0", DRIVER, "n2", devices);
                slice.spec.pool.name = "n2".to_owned();
                api.put(&slice).unwrap();
            }
        })
        .await;
    assert!(done.fits && two.there("b"), "{done:?}");
    assert_eq!(
        done.why,
        "1 pod evicted; now it fits node n2: n2/gpu-0, n2/gpu-1"
    );
}

/// A pod that does not end in time is said to be evicted and alive.
#[tokio::test]
async fn a_pod_that_does_not_end_stops_the_rest() {
    let two = Two::new();
    two.api
        .modify::<Pod>("ns", "a", |pod| {
            pod.metadata.finalizers = Some(vec!["example.com/slow".to_owned()]);
        })
        .unwrap();
    let done = two.apply(&mut |_| {}).await;
    assert!(!done.fits, "{done:?}");
    assert!(
        done.why
            .contains("ns/a is evicted and has not ended after 0 s"),
        "{}",
        done.why
    );
    assert!(two.there("b"));
}

fn is_cordoned(api: &FakeApi) -> bool {
    let node = api.get::<Node>("", "n1").unwrap();
    let annotated = node.metadata.annotations.unwrap_or_default();
    let cordoned = node.spec.and_then(|spec| spec.unschedulable) == Some(true);
    assert_eq!(annotated.contains_key(DEFRAG), cordoned);
    cordoned
}

/// Replacements of evicted pods cannot take the node's other free devices.
#[tokio::test]
async fn the_node_is_cordoned_while_pods_are_evicted_and_open_afterwards() {
    let two = Two::new();
    let api = two.api.clone();
    let mut seen = Vec::new();
    let done = two
        .apply(&mut |line| {
            if line.starts_with("evicted") {
                seen.push(is_cordoned(&api));
            }
        })
        .await;
    assert!(done.fits, "{done:?}");
    assert_eq!(seen, [true, true]);
    assert!(!is_cordoned(&api));
    // Also where a budget stops it.
    let two = Two::new();
    two.api
        .fail_next(1, "create", "pods/eviction", Fault::Budget);
    assert!(!two.apply(&mut |_| {}).await.fits);
    assert!(!is_cordoned(&two.api));
}

#[tokio::test]
async fn a_node_that_an_administrator_has_cordoned_is_left_alone() {
    let two = Two::new();
    let cordon = |node: &mut Node| {
        node.spec.get_or_insert_default().unschedulable = Some(true);
    };
    two.api.modify("", "n1", cordon).unwrap();
    let done = two.apply(&mut |_| {}).await;
    assert!(done.why.contains("node n1 is cordoned"), "{}", done.why);
    assert!(two.there("a") && two.there("b"));
    assert_eq!(two.api.count("patch", "nodes"), 0);
}

#[tokio::test]
async fn without_the_right_to_cordon_no_pod_is_evicted() {
    let two = Two::new();
    two.api.fail_next(1, "patch", "nodes", Fault::Status(403));
    let done = two.apply(&mut |_| {}).await;
    assert!(
        done.why.contains("node n1 cannot be cordoned"),
        "{}",
        done.why
    );
    assert_eq!(two.api.count("create", "pods/eviction"), 0);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_cannot_be_opened_again_is_named() {
    let two = Two::new();
    let api = two.api.clone();
    let done = two
        .apply(&mut |line| {
            if line == "evicted ns/b" {
                api.fail_next(5, "patch", "nodes", Fault::Status(500));
            }
        })
        .await;
    assert!(!done.fits, "{done:?}");
    assert!(done.why.contains("kubectl uncordon n1"), "{}", done.why);
    assert_eq!(done.evicted, ["ns/a", "ns/b"]);
}

/// An answer that is lost leaves the node cordoned or not: it is open afterwards in both cases.
#[tokio::test]
async fn a_node_is_opened_where_the_answer_to_its_cordon_is_lost() {
    for fault in [Fault::DropBefore, Fault::DropAfter] {
        let two = Two::new();
        two.api.fail_next(1, "patch", "nodes", fault);
        let done = two.apply(&mut |_| {}).await;
        assert!(done.why.contains("cannot be cordoned"), "{}", done.why);
        assert!(!is_cordoned(&two.api));
        assert_eq!(two.api.count("create", "pods/eviction"), 0);
    }
}

/// A node that has changed since it was read is read again before it is cordoned.
#[tokio::test]
async fn a_node_that_has_changed_is_read_again_before_it_is_cordoned() {
    let two = Two::new();
    two.api.fail_next(1, "patch", "nodes", Fault::Status(409));
    let done = two.apply(&mut |_| {}).await;
    assert!(done.fits, "tried again: {done:?}");
    assert!(!is_cordoned(&two.api));
}

/// A command that is to end evicts no more, says so, and leaves the node open.
#[tokio::test]
async fn an_interrupted_command_opens_the_node() {
    let two = Two::new();
    let client = two.api.client();
    let stop = tokio_util::sync::CancellationToken::new();
    let settings = carry_out::Settings {
        kubernetes: 37,
        patience: Duration::ZERO,
        driver: None,
        stop: stop.clone(),
    };
    let cluster = carry_out::read(&client).await.unwrap();
    let asked = wanted(&args(), &cluster).unwrap();
    let plan = plan(&cluster, &asked, 37).unwrap().plan.unwrap();
    let wish = |cluster: &Cluster| Wish::Open(wanted(&args(), cluster).unwrap());
    let mut interrupt = |line: &str| {
        if line == "evicted ns/a" {
            stop.cancel();
        }
    };
    let done = carry_out::carry_out(&client, &plan, &settings, &wish, &mut interrupt).await;
    assert_eq!(done.why, "stopped with 1 pod of 2 evicted: interrupted");
    assert!(two.there("b") && !is_cordoned(&two.api));
}
