//! Processes on the GPU of a claim that is prepared: which are in its way.

use super::shares::share;
use super::*;
use crate::PodRef;

/// The GPU instance of the partition that an administrator has made.
const INSTANCE: u32 = 7;

fn process(pid: u32, gpu_instance: Option<u32>, pod: Option<&str>) -> ProcessOnGpu {
    ProcessOnGpu {
        pid,
        gpu_instance,
        pod: pod.map(str::to_owned),
    }
}

/// A node on which these processes compute on a GPU, with these claims prepared.
fn node(number: u32, processes: Vec<ProcessOnGpu>, prepared: &[Claim]) -> World {
    let mut world = World::new();
    world.grant_all();
    world.lives(2, small(0), Ok(Some(&made(INSTANCE, "MIG-0"))));
    for claim in prepared {
        let record = world.record(claim, Phase::Prepared);
        world.keep(record);
    }
    world.processes.insert(gpu(number), Ok(processes));
    world
}

/// Returns whether a claim is refused for a process; otherwise it is to be held.
fn is_refused(world: &World, claim: &Claim) -> bool {
    match world.decide(claim) {
        Decision::Refuse(refusal) => {
            assert_eq!(refusal.category(), "foreign-processes");
            true
        }
        other => plan(other).devices.is_empty(),
    }
}

fn for_pod(uid: &str, claim: Claim) -> Claim {
    let (name, uid) = (format!("pod-{uid}"), uid.to_owned());
    Claim {
        pods: vec![PodRef { name, uid }],
        ..claim
    }
}

fn shared(uid: &str, device: &str) -> Claim {
    claim(uid, vec![share("main", device, uid)])
}

/// The first hold had the check; processes that are there later belong to the claims that hold.
#[test]
fn a_process_is_in_the_way_unless_another_claim_holds_its_very_gpu() {
    let wanted = shared("b", "gpu-0-ts");
    let refused = |beside: &[Claim]| {
        let processes = vec![process(1, None, None)];
        is_refused(&node(0, processes, beside), &wanted)
    };
    assert!(refused(&[]));
    assert!(refused(&[shared("a", "gpu-1-ts")]), "on another GPU");
    let watcher = claim("a", vec![admin(result("see", "gpu-0"))]);
    assert!(refused(&[watcher]), "it reserves nothing");
    assert!(!refused(&[shared("a", "gpu-0-ts")]));
}

/// A monitor with admin access may compute where others do, on its GPU only.
#[test]
fn a_process_of_its_own_pod_or_of_a_watcher_of_the_gpu_is_in_no_way() {
    let wanted = claim("b", vec![result("main", "gpu-0")]);
    let watcher = |device| for_pod("watch", claim("a", vec![admin(result("see", device))]));
    let refused = |pod, wanted: &Claim, beside: &[Claim]| {
        let processes = vec![process(1, None, Some(pod))];
        is_refused(&node(0, processes, beside), wanted)
    };
    let own = for_pod("own", wanted.clone());
    assert!(!refused("own", &own, &[]));
    assert!(refused("other", &own, &[]));
    assert!(!refused("watch", &wanted, &[watcher("gpu-0")]));
    assert!(refused("watch", &wanted, &[watcher("gpu-1")]));
}

#[test]
fn a_refusal_names_the_processes_in_the_way_and_no_others() {
    let own = for_pod("own", claim("b", vec![result("main", "gpu-0")]));
    let processes = vec![
        process(1, None, Some("own")),
        process(2, None, Some("other")),
        process(3, None, None),
    ];
    let (_, text) = node(0, processes, &[]).refusal(&own);
    let named = "is used by process 2 (of the pod with UID other), 3, which";
    assert!(text.contains(named), "{text}");
}

/// This driver did not make it, so that there was no moment at which nothing computed in it.
#[test]
fn a_process_in_a_partition_of_others_is_in_the_way_of_its_claim() {
    let wanted = claim("b", vec![result("main", "gpu-2-mig-static-1g10gb-19-0")]);
    let neighbour = claim("a", vec![result("main", "gpu-2-mig-1g10gb-19-3")]);
    for beside in [&[][..], &[neighbour]] {
        let refused = |instance| {
            let processes = vec![process(1, instance, None)];
            is_refused(&node(2, processes, beside), &wanted)
        };
        assert!(refused(Some(INSTANCE)), "{beside:?}");
        assert!(!refused(Some(INSTANCE + 1)), "in another partition");
        assert_eq!(refused(None), beside.is_empty(), "outside of partitions");
    }
}

#[test]
fn a_process_in_a_partition_is_in_the_way_of_the_whole_gpu_alone() {
    let refused = |device| {
        let processes = vec![process(1, Some(INSTANCE), None)];
        let wanted = claim("b", vec![result("main", device)]);
        is_refused(&node(2, processes, &[]), &wanted)
    };
    assert!(refused("gpu-2"));
    assert!(!refused("gpu-2-mig-1g10gb-19-3"), "it is not made yet");
}
