//! Devices that claims hold, instances that are in the way, and GPUs that do not answer.

use divvy_model::{GpuError, GpuErrorCode, GpuOp, GpuProblem};

use super::*;
use crate::Slice;

#[test]
fn a_held_partition_stays_and_takes_its_counters() {
    let mut node = Node::both("h100x1");
    node.hold("gpu-0-mig-1g10gb-me-20-3");
    let pool = node.carve(None).pool;
    assert_eq!(blocked(&pool), ["gpu-0-mig-1g10gb-me-20-3"]);
    assert_eq!(
        device(&pool, "gpu-0-mig-1g10gb-me-20-3").consumes[0]
            .counters
            .len(),
        1
    );

    // The policy is gone: whole only, but not while the partition lives.
    node.rules.clear();
    let carved = node.carve(Some(&pool));
    assert_eq!(names(&carved.pool), ["gpu-0", "gpu-0-mig-1g10gb-me-20-3"]);
    assert_eq!(blocked(&carved.pool), ["gpu-0-mig-1g10gb-me-20-3"]);
    assert_eq!(
        device(&carved.pool, "gpu-0").consumes[0].counters,
        sets(&carved.pool)[0].counters
    );
    assert_eq!(
        findings(&carved),
        [
            "gpu-0-mig-1g10gb-me-20-3 is held by a claim, but no longer offered (this GPU is currently not \
          offered in such partitions): the device stays published with a taint until the claim is released"
        ]
    );

    // And a server that no longer stores counters: the taints must do what the counters did.
    node.features = node.features.without([Feature::Partitions]);
    let pool = node.carve(Some(&pool)).pool;
    assert_eq!(blocked(&pool), names(&pool));
    assert!(pool.devices().all(|device| device.consumes.is_empty()) && sets(&pool).is_empty());
}

#[test]
fn a_held_whole_gpu_takes_everything_while_partitions_are_offered() {
    let mut node = Node::new("h100x1").mig_on();
    node.hold("gpu-0");
    let pool = node.carve(None).pool;
    assert_eq!((names(&pool).len(), blocked(&pool)), (19, vec!["gpu-0"]));
    assert_eq!(
        device(&pool, "gpu-0").consumes[0].counters,
        sets(&pool)[0].counters
    );
}

#[test]
fn a_partition_keeps_the_name_that_a_claim_was_given() {
    let mut node = Node::both("h100x1");
    node.hold("gpu-0-mig-3g39gb-9-4");
    let pool = node.carve(None).pool;
    assert!(
        pool.device(&"gpu-0-mig-3g40gb-9-4".parse().unwrap())
            .is_none()
    );
    let held = device(&pool, "gpu-0-mig-3g39gb-9-4");
    assert_eq!(
        held.attributes["profile"],
        AttributeValue::String("3g.40gb".to_owned())
    );
    assert_eq!((blocked(&pool).len(), names(&pool).len()), (0, 19));
}

#[test]
fn a_held_partition_of_an_unknown_profile_fences_its_gpu() {
    let mut node = Node::both("h100x2");
    node.hold("gpu-0-mig-5g60gb-77-0");
    node.hold("gpu-0-mig-2g20gb-14-1");
    let carved = node.carve(None);
    let of_gpu_0: Vec<_> = names(&carved.pool)
        .into_iter()
        .filter(|name| name.starts_with("gpu-0"))
        .collect();
    assert_eq!((of_gpu_0.len(), blocked(&carved.pool)), (21, of_gpu_0));
    assert!(
        device(&carved.pool, "gpu-0-mig-5g60gb-77-0")
            .consumes
            .is_empty()
    );
    assert_eq!(carved.findings.len(), 2);
}

#[test]
fn everything_over_occupied_slices_is_tainted_and_nothing_else() {
    let mut node = Node::both("h100x1");
    let foreign = Taint::no_schedule(keys::FOREIGN, Some("instance"));
    node.occupied.insert(
        node.uuid(0),
        vec![(Placement { start: 4, size: 2 }, foreign.clone())],
    );
    let pool = node.carve(None).pool;
    let expected = [
        "gpu-0",
        "gpu-0-mig-1g10gb-19-4",
        "gpu-0-mig-1g10gb-19-5",
        "gpu-0-mig-1g20gb-15-4",
        "gpu-0-mig-2g20gb-14-4",
        "gpu-0-mig-3g40gb-9-4",
        "gpu-0-mig-7g80gb-0-0",
    ];
    assert_eq!(blocked(&pool), expected);
    assert_eq!(device(&pool, "gpu-0").taints, [foreign]);

    node.features = node.features.without([Feature::Taints]);
    node.hold("gpu-0-mig-1g10gb-19-4");
    let pool = node.carve(None).pool;
    let left: Vec<_> = names(&pool)
        .into_iter()
        .filter(|name| expected.contains(name))
        .collect();
    assert_eq!(
        left,
        ["gpu-0-mig-1g10gb-19-4"],
        "without taints only what is held stays"
    );
    assert_eq!(names(&pool).len(), 19 - 6);
}

#[test]
fn a_gpu_that_does_not_answer_stays_as_it_was_with_its_counters() {
    let mut node = Node::both("h100x2");
    let before = node.carve(None).pool;
    let uuid = node.uuid(1);
    node.inventory.gpus.remove(&uuid);
    let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::GPU_IS_LOST, &uuid);
    node.inventory
        .problems
        .push(GpuProblem { gpu: uuid, error });
    let after = node.carve(Some(&before)).pool;
    assert_eq!(
        (names(&after), sets(&after)),
        (names(&before), sets(&before))
    );
    assert_eq!(blocked(&after).len(), 19);
    assert!(blocked(&after).iter().all(|name| name.starts_with("gpu-1")));

    // After a restart only what is held is known, and is as unreadable.
    node.hold("gpu-1");
    node.hold("gpu-1-mig-1g10gb-19-3");
    let restarted = node.carve(None).pool;
    assert_eq!(blocked(&restarted), ["gpu-1", "gpu-1-mig-1g10gb-19-3"]);
    let unreadable = [Taint::no_schedule(keys::UNREADABLE, None)];
    assert!(
        blocked(&restarted)
            .iter()
            .all(|name| device(&restarted, name).taints == unreadable)
    );
    assert_eq!(node.carve(Some(&restarted)).pool, restarted);
}

#[test]
fn held_partitions_of_a_gpu_that_is_gone_stay_alone() {
    let mut node = Node::both("h100x2");
    let before = node.carve(None).pool;
    let uuid = node.uuid(1);
    node.inventory.gpus.remove(&uuid);
    node.hold("gpu-1-mig-2g20gb-14-2");
    let gone = |carved: &Carved| -> Vec<Device> {
        carved
            .pool
            .devices()
            .filter(|d| d.name.as_str().starts_with("gpu-1"))
            .cloned()
            .collect()
    };
    let carved = node.carve(Some(&before));
    let mut expected = device(&before, "gpu-1-mig-2g20gb-14-2").clone();
    expected.taints = vec![Taint::no_schedule(keys::LOST, None)];
    assert_eq!(
        (gone(&carved), sets(&carved.pool).len()),
        (vec![expected.clone()], 2)
    );

    let restarted = node.carve(None);
    let [device] = &gone(&restarted)[..] else {
        panic!("{restarted:?}")
    };
    assert_eq!(
        (&device.name, &device.taints, device.consumes.len()),
        (&expected.name, &expected.taints, 0)
    );
    assert_eq!(sets(&restarted.pool).len(), 1);
}

#[test]
fn whatever_goes_in_the_pool_is_valid_and_what_is_held_stays() {
    let held = [
        "gpu-0",
        "gpu-1-mig-1g10gb-19-6",
        "gpu-1-mig-1g10gb-me-20-0",
        "gpu-2-mig-x-99-9",
        "gpu-1-mig-2g19gb-14-2",
    ];
    let servers = [(34, 0), (36, 1), (37, 0)];
    let dropped: [&[Feature]; 3] = [
        &[],
        &[Feature::Taints],
        &[Feature::Partitions, Feature::Taints],
    ];
    let full = Node::both("h100x2,a100-80x1").carve(None).pool;
    for bits in 0..1_u32 << (held.len() + 3) {
        let bit = |n: usize| bits >> n & 1 == 1;
        for (minor, patch) in servers {
            for off in dropped {
                let mut node = Node::both("h100x2,a100-80x1").server(minor, patch);
                if bit(held.len()) {
                    node = node.mig_on();
                }
                node.features = node.features.without(off.iter().copied());
                if bit(held.len() + 1) {
                    let uuid = node.uuid(1);
                    node.inventory.gpus.remove(&uuid);
                }
                held.iter()
                    .enumerate()
                    .filter(|(n, _)| bit(*n))
                    .for_each(|(_, name)| node.hold(name));
                let carved = node.carve(bit(held.len() + 2).then_some(&full));
                for name in &node.held {
                    assert!(
                        carved.pool.device(name).is_some(),
                        "{name} of {:?}",
                        node.held
                    );
                }
                let empty = Slice::default();
                assert!(!carved.pool.slices.contains(&empty));
                assert_eq!(
                    node.carve(Some(&carved.pool)).pool,
                    carved.pool,
                    "carving again changes nothing"
                );
            }
        }
    }
}

/// An update of divvy finds claims on partitions that it would not offer: they stay, and draw on
/// nothing that a claim for all devices could end the scheduler with.
#[test]
fn where_a_claim_can_end_the_scheduler_nothing_draws_on_counters() {
    for version in [(35, 0), (35, 5), (36, 0), (36, 1)] {
        let mut node = Node::only("h100x2", &Form::OFFERED).server(version.0, version.1);
        node.hold("gpu-0-mig-1g10gb-19-3");
        node.hold("gpu-1-ts");
        let carved = node.carve(None);
        for held in ["gpu-0-mig-1g10gb-19-3", "gpu-1-ts"] {
            assert!(carved.pool.device(&held.parse().unwrap()).is_some());
        }
        assert!(
            carved
                .pool
                .devices()
                .all(|device| device.consumes.is_empty())
        );
        let mut sets = carved
            .pool
            .slices
            .iter()
            .flat_map(|slice| &slice.counter_sets);
        assert!(sets.next().is_none(), "{version:?}");
    }
}
