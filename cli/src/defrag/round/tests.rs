use divvy_api::names::annotations::DEFRAG;
use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_class, mk_device, mk_node, mk_pod, mk_result, mk_slice, reserved,
};
use divvy_fake_cluster::{FakeApi, Fault};
use k8s_openapi::api::core::v1::{HostAlias, Node, PodCondition, PodStatus};
use k8s_openapi::api::events::v1::Event as Written;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};

use super::*;
use crate::defrag::Source;
use crate::format::Output;
use crate::status::read::Access;

const DRIVER: &str = "gpu.divvy.dev";

/// Nodes with two GPUs each.
struct Nodes {
    api: FakeApi,
}

impl Nodes {
    fn new(nodes: &[&str]) -> Self {
        let api = FakeApi::new();
        api.register::<PodDisruptionBudget>(true, true);
        api.put(&mk_class(DRIVER, DRIVER)).unwrap();
        api.put(&mk_class("nic", "nic.example.com")).unwrap();
        for name in nodes {
            api.put(&mk_node(name)).unwrap();
            let devices = vec![mk_device("gpu-0"), mk_device("gpu-1")];
            let mut slice = mk_slice(&format!("{name}-0"), DRIVER, name, devices);
            slice.spec.pool.name = (*name).to_owned();
            api.put(&slice).unwrap();
        }
        Self { api }
    }

    /// A pod of a ReplicaSet that runs, with a GPU.
    fn runs(&self, name: &str, node: &str, device: &str, priority: i32) {
        let claim = format!("{name}-gpu");
        let mut pod = mk_pod("ns", name, Some(node), &[&claim]);
        pod.metadata.creation_timestamp = Some(ago(9_000));
        pod.spec.as_mut().unwrap().priority = Some(priority);
        pod.metadata.owner_references = Some(vec![OwnerReference {
            controller: Some(true),
            kind: "ReplicaSet".to_owned(),
            api_version: "apps/v1".to_owned(),
            name: "r".to_owned(),
            uid: "r".to_owned(),
            ..OwnerReference::default()
        }]);
        let uid = self.api.put(&pod).unwrap().metadata.uid.unwrap();
        let result = mk_result("gpu", DRIVER, node, device);
        let held = allocated(mk_claim("ns", &claim, DRIVER, 1), vec![result]);
        self.api.put(&reserved(held, name, &uid)).unwrap();
    }

    /// A pod that has waited for so many seconds.
    fn waits(&self, name: &str, count: i64, priority: i32, seconds: i64) {
        let claim = format!("{name}-gpu");
        self.api
            .put(&mk_claim("ns", &claim, DRIVER, count))
            .unwrap();
        let mut pod = mk_pod("ns", name, None, &[&claim]);
        pod.metadata.creation_timestamp = Some(ago(seconds));
        pod.spec.as_mut().unwrap().priority = Some(priority);
        pod.status = Some(PodStatus {
            conditions: Some(vec![PodCondition {
                type_: "PodScheduled".to_owned(),
                status: "False".to_owned(),
                reason: Some("Unschedulable".to_owned()),
                last_transition_time: Some(ago(seconds)),
                ..PodCondition::default()
            }]),
            ..PodStatus::default()
        });
        self.api.put(&pod).unwrap();
    }

    async fn round(&self, args: &Args) -> Round {
        of_cluster(&self.api.client(), args).await.unwrap()
    }

    /// Places a pod as soon as another one is gone, as the scheduler does.
    fn places(&self, pod: &'static str, node: &'static str, evictions: u64) {
        let api = self.api.clone();
        tokio::spawn(async move {
            while api.count("create", "pods/eviction") < evictions {
                tokio::task::yield_now().await;
            }
            let bind = |pod: &mut Pod| {
                pod.spec.as_mut().unwrap().node_name = Some(node.to_owned());
            };
            api.modify::<Pod>("ns", pod, bind).unwrap();
        });
    }

    fn there(&self, name: &str) -> bool {
        self.api.get::<Pod>("ns", name).is_some()
    }

    /// Events, as the name of their pod and their reason.
    fn said(&self) -> Vec<(String, String)> {
        let events = self.api.list::<Written>().into_iter();
        let said = events.map(|event| {
            let pod = event.regarding.and_then(|of| of.name);
            (pod.unwrap_or_default(), event.reason.unwrap_or_default())
        });
        let mut said: Vec<(String, String)> = said.collect();
        said.sort();
        said
    }
}

fn ago(seconds: i64) -> Time {
    let now = Timestamp::now().as_second();
    Time(Timestamp::from_second(now - seconds).unwrap())
}

fn args(apply: bool) -> Args {
    Args {
        plan: !apply,
        apply,
        patience: 0,
        pod: None,
        want: None,
        priority: 0,
        rules: Rules {
            waiting: true,
            events: true,
            ..Rules::default()
        },
        source: Source {
            objects: None,
            access: Access::default(),
            kubernetes: 37,
            output: Output::Table,
        },
    }
}

fn words(round: &Round) -> Vec<String> {
    let line = |line: &Line| format!("{} {}", line.pod, line.outcome.words());
    round.pods.iter().map(line).collect()
}

#[tokio::test]
async fn a_pod_is_moved_for_one_that_waits_and_both_hear_of_it() {
    let nodes = Nodes::new(&["n1", "n2"]);
    nodes.runs("a", "n1", "gpu-0", 0);
    nodes.runs("b", "n2", "gpu-0", 0);
    nodes.waits("big", 2, 0, 700);
    // A plan alone evicts nothing, and says so on the pod that waits.
    let round = nodes.round(&args(false)).await;
    assert_eq!(words(&round), ["ns/big move ns/a; then it fits node n1"]);
    let text = table(&round);
    assert!(text.contains("ns/big  0         70"), "{text}");
    let planned = ("big".to_owned(), "GpuDefragPlanned".to_owned());
    assert_eq!(nodes.said(), std::slice::from_ref(&planned));
    assert_eq!(nodes.api.count("create", "pods/eviction"), 0);

    nodes.places("big", "n1", 1);
    let round = nodes.round(&args(true)).await;
    assert_eq!(words(&round), ["ns/big move ns/a: done, it is on its node"]);
    assert!(!nodes.there("a") && nodes.there("b"));
    let said = [("a", "GpuDefragEvicted"), ("big", "GpuDefragDone")];
    let mut said = said
        .map(|(pod, why)| (pod.to_owned(), why.to_owned()))
        .to_vec();
    said.push(planned);
    assert_eq!(nodes.said(), said);
}

/// Each pod for which nothing may be evicted says why, and nothing is.
#[tokio::test]
async fn who_is_left_alone_says_why() {
    // Two pods of one node would have to go; the other node is full, so that they would wait.
    let full = || {
        let nodes = Nodes::new(&["n1"]);
        nodes.runs("a", "n1", "gpu-0", 0);
        nodes.runs("b", "n1", "gpu-1", 0);
        nodes
    };
    let no_room = "no eviction that is allowed makes room";

    let nodes = full();
    nodes.waits("big", 1, 5, 700);
    assert_eq!(
        words(&nodes.round(&args(true)).await),
        [format!("ns/big {no_room}")]
    );

    // Less important ones may go where that is asked for.
    let mut preempts = args(true);
    preempts.rules.preempt = Some(Preempt::Plan);
    let round = nodes.round(&preempts).await;
    assert_eq!(words(&round), ["ns/big preempt ns/a; then it fits node n1"]);
    nodes
        .api
        .modify::<Pod>("ns", "big", |pod| {
            pod.spec.as_mut().unwrap().preemption_policy = Some("Never".to_owned());
        })
        .unwrap();
    assert_eq!(
        words(&nodes.round(&preempts).await),
        [format!("ns/big {no_room}")]
    );

    // Of equal importance, none goes.
    let nodes = full();
    nodes.waits("big", 1, 0, 700);
    assert_eq!(
        words(&nodes.round(&preempts).await),
        [format!("ns/big {no_room}")]
    );

    // Newer pods stay.
    let nodes = full();
    nodes.waits("big", 1, 5, 20_000);
    assert_eq!(
        words(&nodes.round(&preempts).await),
        [format!("ns/big {no_room}")]
    );

    // Those of the same second go: a whole application may be applied at once.
    let nodes = full();
    nodes.waits("big", 1, 5, 700);
    let made = nodes.api.get::<Pod>("ns", "big").unwrap().metadata;
    for name in ["a", "b"] {
        let same = |pod: &mut Pod| {
            pod.metadata
                .creation_timestamp
                .clone_from(&made.creation_timestamp);
        };
        nodes.api.modify("ns", name, same).unwrap();
    }
    let round = nodes.round(&preempts).await;
    assert_eq!(words(&round), ["ns/big preempt ns/a; then it fits node n1"]);

    let nodes = full();
    nodes.waits("big", 2, 5, 700);
    preempts.rules.max_evictions = 1;
    let says = "ns/big 2 evictions make room on node n1: too many (--max-evictions)";
    assert_eq!(words(&nodes.round(&preempts).await), [says]);

    // What waits for a moment, for another driver or for nothing of devices is none of ours.
    let nodes = full();
    nodes.waits("early", 1, 5, 500);
    nodes.waits("other", 1, 5, 700);
    let is_other = |claim: &mut k8s_openapi::api::resource::v1::ResourceClaim| {
        let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
        let request = &mut devices.requests.as_mut().unwrap()[0];
        request.exactly.as_mut().unwrap().device_class_name = "nic".to_owned();
    };
    let claims = &nodes.api;
    claims
        .modify::<k8s_openapi::api::resource::v1::ResourceClaim>("ns", "other-gpu", is_other)
        .unwrap();
    let devices = vec![mk_device("nic-0")];
    nodes
        .api
        .put(&mk_slice("n1-nic", "nic.example.com", "n1", devices))
        .unwrap();
    assert_eq!(
        words(&nodes.round(&preempts).await),
        [format!("ns/other {no_room}")]
    );

    let nodes = full();
    nodes.waits("big", 1, 5, 700);
    nodes
        .api
        .modify::<Pod>("ns", "big", |pod| {
            let spec = pod.spec.as_mut().unwrap();
            spec.host_aliases = Some(vec![HostAlias::default()]);
            spec.volumes = serde_json::from_value(serde_json::json!([
                {"name": "v", "persistentVolumeClaim": {"claimName": "c"}}
            ]))
            .unwrap();
        })
        .unwrap();
    let says = "ns/big it demands persistent volumes, which is not looked at";
    assert_eq!(words(&nodes.round(&preempts).await), [says]);
    assert_eq!(nodes.api.count("create", "pods/eviction"), 0);
}

#[tokio::test]
async fn where_it_fits_already_no_pod_is_evicted() {
    let nodes = Nodes::new(&["n1"]);
    nodes.waits("a", 2, 0, 700);
    assert_eq!(
        words(&nodes.round(&args(true)).await),
        ["ns/a fits node n1 already"]
    );
}

/// Another pod took the place: nothing more is evicted in this round.
#[tokio::test(start_paused = true)]
async fn a_pod_that_is_not_placed_ends_the_round() {
    let nodes = Nodes::new(&["n1", "n2"]);
    nodes.runs("a", "n1", "gpu-0", 0);
    nodes.runs("b", "n2", "gpu-0", 0);
    nodes.waits("big", 2, 7, 700);
    nodes.waits("later", 2, 6, 700);
    let round = nodes.round(&args(true)).await;
    assert_eq!(round.pods.len(), 1);
    let says = &words(&round)[0];
    assert!(
        says.contains("the scheduler has not placed it after 60 s"),
        "{says}"
    );
    assert!(round.ended.is_some() && table(&round).contains("left for the next round"));
    assert_eq!(nodes.api.count("create", "pods/eviction"), 1);
    assert!(nodes.there("b"));
    assert_eq!(nodes.said()[1].1, "GpuDefragStopped");
}

/// The rest of what a round may evict is for the pods that come after.
#[tokio::test]
async fn a_round_evicts_no_more_than_it_may() {
    let nodes = Nodes::new(&["n1", "n2", "n3"]);
    for (name, node) in [("a", "n1"), ("b", "n2"), ("c", "n3")] {
        nodes.runs(name, node, "gpu-0", 0);
    }
    nodes.waits("one", 2, 7, 700);
    nodes.waits("two", 2, 6, 700);
    nodes.places("one", "n1", 1);
    let mut few = args(true);
    few.rules.max_evictions = 1;
    let round = nodes.round(&few).await;
    assert_eq!(
        words(&round)[0],
        "ns/one move ns/a: done, it is on its node"
    );
    assert!(!words(&round)[1].contains("done"), "{:?}", words(&round));
    assert_eq!(nodes.api.count("create", "pods/eviction"), 1);
}

/// An API server that stops answering after the evictions: what was done is reported all the same.
#[tokio::test]
async fn what_was_evicted_is_reported_where_the_cluster_cannot_be_read_again() {
    let nodes = Nodes::new(&["n1", "n2"]);
    nodes.runs("a", "n1", "gpu-0", 0);
    nodes.runs("b", "n2", "gpu-0", 0);
    nodes.waits("big", 2, 0, 700);
    nodes.waits("later", 2, 0, 650);
    nodes.places("big", "n1", 1);
    // Claims are listed before the plan, after the eviction, and once the pod is on its node.
    let api = nodes.api.clone();
    tokio::spawn(async move {
        while api.count("list", "resourceclaims") < 2 {
            tokio::task::yield_now().await;
        }
        api.fail_next(1, "list", "resourceclaims", Fault::Status(500));
    });
    let round = nodes.round(&args(true)).await;
    assert_eq!(words(&round), ["ns/big move ns/a: done, it is on its node"]);
    let ended = round.ended.as_deref().unwrap_or_default();
    assert!(
        ended.contains("resourceclaims") && ended.contains("next round"),
        "{ended}"
    );
    assert!(nodes.there("b"));
}

/// A round that was killed has left a node cordoned: the next one opens it, and a plan does not.
#[tokio::test]
async fn a_node_that_a_killed_round_has_left_cordoned_is_opened() {
    let nodes = Nodes::new(&["n1", "n2"]);
    let left = |node: &mut Node| {
        let annotation = (DEFRAG.to_owned(), "true".to_owned());
        node.metadata.annotations = Some([annotation].into());
        node.spec.get_or_insert_default().unschedulable = Some(true);
    };
    nodes.api.modify("", "n1", left).unwrap();
    let cordon = |node: &mut Node| {
        node.spec.get_or_insert_default().unschedulable = Some(true);
    };
    nodes.api.modify("", "n2", cordon).unwrap();
    nodes.round(&args(false)).await;
    assert_eq!(nodes.api.count("patch", "nodes"), 0);
    nodes.round(&args(true)).await;
    let cordoned = |name: &str| {
        let node = nodes.api.get::<Node>("", name).unwrap();
        node.spec.and_then(|spec| spec.unschedulable) == Some(true)
    };
    assert!(!cordoned("n1") && cordoned("n2"));
}

/// The node opens only when what comes in the place of a moved pod has a node.
#[tokio::test]
async fn a_moved_pod_has_its_place_before_the_node_opens() {
    let nodes = Nodes::new(&["n1", "n2"]);
    nodes.runs("a", "n1", "gpu-0", 0);
    nodes.runs("b", "n2", "gpu-0", 0);
    nodes.waits("big", 2, 0, 700);
    let api = nodes.api.clone();
    tokio::spawn(async move {
        while api.count("create", "pods/eviction") < 1 {
            tokio::task::yield_now().await;
        }
        // Three lists of pods later, the controller has made another one.
        let before = api.count("list", "pods");
        while api.count("list", "pods") < before + 3 {
            tokio::task::yield_now().await;
        }
        let node = api.get::<Node>("", "n1").unwrap();
        assert_eq!(node.spec.and_then(|spec| spec.unschedulable), Some(true));
        let mut pod = mk_pod("ns", "a2", Some("n2"), &[]);
        pod.metadata.owner_references =
            api.get::<Pod>("ns", "b").unwrap().metadata.owner_references;
        api.put(&pod).unwrap();
        let node = |api: &FakeApi| api.get::<Node>("", "n1").unwrap().spec;
        while node(&api).and_then(|spec| spec.unschedulable) == Some(true) {
            tokio::task::yield_now().await;
        }
        let bind = |pod: &mut Pod| pod.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
        api.modify::<Pod>("ns", "big", bind).unwrap();
    });
    let mut patient = args(true);
    patient.patience = 30;
    let round = nodes.round(&patient).await;
    assert_eq!(words(&round), ["ns/big move ns/a: done, it is on its node"]);
}
