mod care;

use divvy_allocator::Inputs;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::DeviceRequestAllocationResult;
use serde_json::json;

use super::*;
use crate::random::Random;
use crate::request;
use crate::tests::{classes, kind};

/// Nodes with GPUs of 80 GiB, each whole, as two halves, or as shares.
pub(crate) fn cluster(nodes: usize, gpus: usize) -> Cluster {
    let mut all = Cluster {
        classes: classes(),
        ..Cluster::default()
    };
    for number in 0..nodes {
        let name = format!("node-{number}");
        let of = kind("a", 1, gpus);
        let mut node = of.node;
        node.metadata.name = Some(name.clone());
        all.nodes.push(node);
        for mut slice in of.slices {
            slice.metadata.name = Some(format!("{name}-{}", slice.metadata.name.unwrap()));
            slice.spec.node_name = Some(name.clone());
            slice.spec.pool.name.clone_from(&name);
            all.slices.push(slice);
        }
    }
    all
}

fn held_on(
    cluster: &Cluster,
    node: usize,
    text: &str,
    gone: &[String],
) -> Option<Vec<AllocationResult>> {
    let allocator = Allocator::new(Features::of_kubernetes(37));
    let slices = Slices::new(&cluster.slices);
    let users = |claim: &&ResourceClaim| {
        let mut users = claim
            .status
            .iter()
            .flat_map(|status| &status.reserved_for)
            .flatten()
            .peekable();
        users.peek().is_none() || users.any(|user| !gone.contains(&user.name))
    };
    let allocated = AllocatedState::from_claims(cluster.claims.iter().filter(users));
    let inputs = Inputs {
        slices: &slices,
        classes: &cluster.classes,
        allocated: &allocated,
        node: &cluster.nodes[node],
    };
    let shape = request::shape(text).unwrap();
    let claims: Vec<&ResourceClaim> = shape.claims.iter().collect();
    allocator
        .fit(&inputs, &claims)
        .unwrap()
        .map(|found| found.results)
}

/// Starts a pod on a node; says whether it fitted.
pub(crate) fn start(
    cluster: &mut Cluster,
    name: &str,
    text: &str,
    node: usize,
    priority: i32,
) -> bool {
    let Some(results) = held_on(cluster, node, text, &[]) else {
        return false;
    };
    let mut claim = request::shape(text).unwrap().claims.remove(0);
    claim.metadata.name = Some(format!("{name}-gpu"));
    claim.metadata.namespace = Some("ns".to_owned());
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(results[0].clone()),
        reserved_for: Some(vec![
            serde_json::from_value(
                json!({"resource": "pods", "name": name, "uid": format!("uid-{name}")}),
            )
            .unwrap(),
        ]),
        ..ResourceClaimStatus::default()
    });
    cluster.claims.push(claim);
    let pod = json!({
        "metadata": {
            "namespace": "ns", "name": name, "uid": format!("uid-{name}"), "labels": {"app": "x"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}],
        },
        "spec": {"nodeName": format!("node-{node}"), "priority": priority, "containers": []},
    });
    cluster.pods.push(serde_json::from_value(pod).unwrap());
    true
}

fn budget(allowed: i32) -> PodDisruptionBudget {
    let budget = json!({
        "metadata": {"namespace": "ns", "name": "b"},
        "spec": {"selector": {"matchLabels": {"app": "x"}}},
        "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
    });
    serde_json::from_value(budget).unwrap()
}

pub(crate) fn wanted(text: &str, priority: i32) -> Wanted {
    Wanted {
        shape: request::shape(text).unwrap(),
        priority,
        ..Wanted::default()
    }
}

fn planned(cluster: &Cluster, text: &str, priority: i32) -> Answer {
    plan(cluster, &wanted(text, priority), 37).unwrap()
}

fn names(plan: &Plan) -> Vec<&str> {
    plan.evict
        .iter()
        .map(|victim| victim.name.as_str())
        .collect()
}

/// All subsets of the pods of each node that may go: the lowest cost.
fn brute(
    cluster: &Cluster,
    may_go: &[String],
    text: &str,
    allowed: Option<usize>,
) -> Option<(usize, Vec<i32>)> {
    let mut best: Option<(usize, Vec<i32>)> = None;
    for node in 0..cluster.nodes.len() {
        let on = |pod: &&Pod| {
            pod.spec.as_ref().unwrap().node_name.as_deref() == Some(&format!("node-{node}"))
        };
        let its: Vec<&Pod> = cluster
            .pods
            .iter()
            .filter(on)
            .filter(|pod| may_go.contains(pod.metadata.name.as_ref().unwrap()))
            .collect();
        for subset in 0..1_u32 << its.len() {
            let gone: Vec<&Pod> = its
                .iter()
                .enumerate()
                .filter(|(bit, _)| subset >> bit & 1 == 1)
                .map(|(_, pod)| *pod)
                .collect();
            let labelled = gone
                .iter()
                .filter(|pod| pod.metadata.labels.is_some())
                .count();
            if allowed.is_some_and(|allowed| labelled > allowed) {
                continue;
            }
            let mut ranks: Vec<i32> = gone
                .iter()
                .map(|pod| pod.spec.as_ref().unwrap().priority.unwrap())
                .collect();
            ranks.sort_unstable_by(|a, b| b.cmp(a));
            let cost = (gone.len(), ranks);
            let gone: Vec<String> = gone
                .iter()
                .map(|pod| pod.metadata.name.clone().unwrap())
                .collect();
            if best.as_ref().is_none_or(|best| cost < *best)
                && held_on(cluster, node, text, &gone).is_some()
            {
                best = Some(cost);
            }
        }
    }
    best
}

#[test]
fn no_subset_of_pods_is_better_than_the_plan() {
    let requests = crate::tests::REQUESTS;
    let mut random = Random::new(5);
    let (mut plans, mut without, mut several) = (0, 0, 0);
    for world in 0..120 {
        let mut cluster = cluster(1 + random.below(2), 2);
        let mut may_go = Vec::new();
        for number in 0..9 {
            let name = format!("p{number}");
            let (node, priority) = (
                random.below(cluster.nodes.len()),
                i32::try_from(random.below(4)).unwrap(),
            );
            if !start(
                &mut cluster,
                &name,
                requests[random.below(6)],
                node,
                priority,
            ) {
                continue;
            }
            let pod = cluster.pods.last_mut().unwrap();
            let stays = match random.below(10) {
                0 => {
                    pod.metadata.owner_references = None;
                    true
                }
                1 => {
                    pod.metadata.annotations = Some(
                        [("karpenter.sh/do-not-disrupt".to_owned(), "true".to_owned())].into(),
                    );
                    true
                }
                2..5 => {
                    pod.metadata.labels = None;
                    false
                }
                _ => false,
            };
            if !stays && priority <= 2 {
                may_go.push(name);
            }
        }
        let allowed = (random.below(3) == 0).then(|| random.below(3));
        cluster
            .budgets
            .extend(allowed.map(|allowed| budget(i32::try_from(allowed).unwrap())));
        let text = requests[random.below(6)];
        let expected = brute(&cluster, &may_go, text, allowed);
        let answer = planned(&cluster, text, 2);
        let found = answer.plan.as_ref().map(|plan| {
            let mut ranks: Vec<i32> = plan.evict.iter().map(|victim| victim.priority).collect();
            ranks.sort_unstable_by(|a, b| b.cmp(a));
            (plan.evict.len(), ranks)
        });
        assert_eq!(found, expected, "world {world}: {text}");
        if let Some(plan) = &answer.plan {
            assert!(plan.is_fewest, "world {world}");
            let gone: Vec<String> = names(plan).into_iter().map(str::to_owned).collect();
            assert!(
                gone.iter().all(|name| may_go.contains(name)),
                "world {world}: {gone:?}"
            );
            let node: usize = plan.node.trim_start_matches("node-").parse().unwrap();
            let results = held_on(&cluster, node, text, &gone).expect("it fits the world after");
            let devices = results
                .iter()
                .flat_map(|of| of.devices.as_ref().unwrap().results.as_ref().unwrap());
            let devices: Vec<String> = devices
                .map(|of: &DeviceRequestAllocationResult| format!("{}/{}", of.pool, of.device))
                .collect();
            assert_eq!(plan.devices, devices, "world {world}");
            plans += 1;
            several += usize::from(plan.evict.len() > 1);
        } else {
            without += 1;
        }
    }
    assert!(
        plans > 50 && without > 10 && several > 5,
        "{plans} {without} {several}"
    );
}

#[test]
fn what_fits_already_needs_no_eviction() {
    let mut cluster = cluster(2, 1);
    start(&mut cluster, "a", "gpu", 0, 0);
    let plan = planned(&cluster, "gpu", 0).plan.unwrap();
    assert_eq!((plan.node.as_str(), names(&plan)), ("node-1", vec![]));
}

#[test]
fn victims_say_where_they_fit_then_or_that_they_wait() {
    let mut cluster = cluster(2, 2);
    start(&mut cluster, "half", "mig:half", 0, 0);
    start(&mut cluster, "one", "gpu", 1, 0);
    // Both GPUs of a node: the half of the first node fits the second one afterwards.
    let plan = planned(&cluster, "2*gpu", 0).plan.unwrap();
    assert_eq!((plan.node.as_str(), names(&plan)), ("node-0", vec!["half"]));
    assert_eq!(plan.evict[0].then.as_deref(), Some("node-1"));
    assert_eq!(plan.evict[0].uid, "uid-half");
    start(&mut cluster, "other", "gpu", 1, 5);
    let plan = planned(&cluster, "2*gpu", 0).plan.unwrap();
    assert_eq!(plan.evict[0].then, None);
}

#[test]
fn a_claim_is_free_only_when_all_its_pods_are_gone() {
    let mut cluster = cluster(1, 1);
    start(&mut cluster, "a", "gpu", 0, 0);
    let mut second = cluster.pods[0].clone();
    second.metadata.name = Some("b".to_owned());
    second.metadata.uid = Some("uid-b".to_owned());
    cluster.pods.push(second);
    let reserved = cluster.claims[0]
        .status
        .as_mut()
        .unwrap()
        .reserved_for
        .as_mut()
        .unwrap();
    reserved.push(
        serde_json::from_value(json!({"resource": "pods", "name": "b", "uid": "uid-b"})).unwrap(),
    );
    assert_eq!(
        names(&planned(&cluster, "gpu", 0).plan.unwrap()),
        ["a", "b"]
    );
    // One of them stays, and with it the claim.
    cluster.pods[1].metadata.owner_references = None;
    let answer = planned(&cluster, "gpu", 0);
    assert_eq!(answer.plan, None);
    assert_eq!(
        answer.staying,
        ["ns/b: it has no controller that would make it again"]
    );
    // Something that is no pod holds it.
    let owners = cluster.pods[0].metadata.owner_references.clone();
    cluster.pods[1].metadata.owner_references = owners;
    let reserved = cluster.claims[0]
        .status
        .as_mut()
        .unwrap()
        .reserved_for
        .as_mut()
        .unwrap();
    reserved[1].resource = "podgroups".to_owned();
    assert_eq!(planned(&cluster, "gpu", 0).plan, None);
}

#[test]
fn each_reason_to_stay_is_said() {
    let changed = |change: &dyn Fn(&mut Cluster)| {
        let mut cluster = cluster(1, 1);
        start(&mut cluster, "a", "gpu", 0, 1);
        change(&mut cluster);
        let answer = planned(&cluster, "gpu", 1);
        assert_eq!(answer.plan, None);
        answer.staying.concat()
    };
    let annotated = |key: &'static str, value: &'static str| {
        move |cluster: &mut Cluster| {
            cluster.pods[0].metadata.annotations =
                Some([(key.to_owned(), value.to_owned())].into());
        }
    };
    for (says, change) in [
        (
            "its priority 2 is higher than 1",
            Box::new(|cluster: &mut Cluster| {
                cluster.pods[0].spec.as_mut().unwrap().priority = Some(2);
            }) as Box<dyn Fn(&mut Cluster)>,
        ),
        (
            "asks to stay (divvy.dev/do-not-evict",
            Box::new(annotated("divvy.dev/do-not-evict", "true")),
        ),
        (
            "asks to stay (cluster-autoscaler",
            Box::new(annotated(
                "cluster-autoscaler.kubernetes.io/safe-to-evict",
                "false",
            )),
        ),
        (
            "the kubelet made it of a file",
            Box::new(annotated("kubernetes.io/config.mirror", "x")),
        ),
        (
            "its DaemonSet",
            Box::new(|cluster: &mut Cluster| {
                cluster.pods[0].metadata.owner_references.as_mut().unwrap()[0].kind =
                    "DaemonSet".to_owned();
            }),
        ),
        (
            "PodDisruptionBudget b allows no disruption now",
            Box::new(|cluster: &mut Cluster| cluster.budgets = vec![budget(0)]),
        ),
        (
            "several PodDisruptionBudgets",
            Box::new(|cluster: &mut Cluster| cluster.budgets = vec![budget(5), budget(5)]),
        ),
    ] {
        let said = changed(&*change);
        assert!(said.contains(says), "{says}: {said}");
    }
}

#[test]
fn a_full_node_of_many_small_pods_gives_a_gpu_with_those_of_one_gpu() {
    let mut cluster = cluster(1, 8);
    for number in 0..60 {
        // GPUs are filled one after another, and the last ones have fewer pods.
        start(&mut cluster, &format!("p{number:02}"), "share:10Gi", 0, 0);
    }
    let plan = planned(&cluster, "gpu", 0).plan.unwrap();
    let on_last = 60 - 7 * 8;
    assert_eq!(plan.evict.len(), on_last);
    assert!(!plan.is_fewest, "too many subsets to prove it");
}
