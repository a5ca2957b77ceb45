use super::*;

fn one_request(slices: Vec<ResourceSlice>, count: i64) -> World {
    World::new(slices, vec![claim("c", vec![request("r", CLASS_A, count)])])
}

fn generation(slice: ResourceSlice, generation: i64) -> ResourceSlice {
    with(slice, |s| s.spec.pool.generation = generation)
}

#[test]
fn obsolete_slice() {
    let slices = vec![
        with(slice(&["device-1"]), |s| {
            s.metadata.name = Some("slice-0".to_owned());
        }),
        generation(slice(&["device-2"]), 2),
    ];
    assert_eq!(one_request(slices, 1).try_it(), "r=device-2 @node-1");
}

#[test]
fn duplicate_slice_makes_the_pool_incomplete() {
    let slices = vec![slice(&["device-1"]), part(slice(&["device-2"]), 2, 1)];
    let world = one_request(slices, 1);
    assert_eq!(world.try_it(), "does not fit");
    assert_eq!(
        world.explanation().unusable_pools,
        [(
            "driver-a/pool-1".to_owned(),
            "is being updated: 2 of 1 slices exist".to_owned()
        )]
    );
}

#[test]
fn no_allocation_from_incomplete_pools() {
    assert_eq!(
        one_request(vec![part(slice(&["device-1"]), 1, 2)], 1).try_it(),
        "does not fit"
    );
}

#[test]
fn invalid_pool_is_ok_if_devices_can_be_allocated_from_other() {
    let slices = vec![
        slice(&["device-1", "device-1"]),
        in_pool(slice(&["device-1"]), DRIVER_A, "pool-2"),
    ];
    assert_eq!(
        one_request(slices, 1).try_it(),
        "r=driver-a/pool-2/device-1 @node-1"
    );
}

#[test]
fn invalid_pool_is_error_if_no_other_device_can_be_allocated() {
    let error = one_request(vec![slice(&["device-1", "device-1"])], 1)
        .outcome()
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "resource pool driver-a/pool-1 is invalid: duplicate device name device-1; no other pool of the node can satisfy the claim"
    );
    assert!(error.is_of_node());
}

#[test]
fn an_unknown_counter_set_or_counter_makes_the_pool_invalid() {
    use k8s_openapi::api::resource::v1::{Counter, CounterSet, DeviceCounterConsumption};
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    let one = || Counter {
        value: Quantity("1".to_owned()),
    };
    let consuming = |set: &str, counter: &str| {
        let consumption = DeviceCounterConsumption {
            counter_set: set.to_owned(),
            counters: [(counter.to_owned(), one())].into(),
            ..DeviceCounterConsumption::default()
        };
        Device {
            consumes_counters: Some(vec![consumption]),
            ..device("device-1")
        }
    };
    let sets = || {
        let set = CounterSet {
            name: "gpu".to_owned(),
            counters: [("memory".to_owned(), one())].into(),
        };
        with(part(slice_of(Vec::new()), 2, 2), |s| {
            s.spec.shared_counters = Some(vec![set]);
        })
    };
    for (set, counter, problem) in [
        (
            "other",
            "memory",
            "device device-1 references unknown counter set other",
        ),
        (
            "gpu",
            "cores",
            "device device-1 references unknown counter cores in counter set gpu",
        ),
    ] {
        let slices = vec![part(slice_of(vec![consuming(set, counter)]), 1, 2), sets()];
        let error = one_request(slices, 1).outcome().unwrap_err();
        assert_eq!(
            error,
            AllocError::InvalidPool {
                pool: "driver-a/pool-1".to_owned(),
                problem: problem.to_owned()
            }
        );
    }
    // partitionable-devices-disabled-{device-consumes-counters,
    // other-device-do-not-consume-counters}
    let off = |devices| {
        let slices = vec![part(slice_of(devices), 1, 2), sets()];
        one_request(slices, 1)
            .features(|f| f.partitionable_devices = false)
            .try_it()
    };
    assert_eq!(off(vec![consuming("gpu", "memory")]), "does not fit");
    assert_eq!(
        off(vec![consuming("gpu", "memory"), device("device-2")]),
        "r=device-2 @node-1"
    );
}

#[test]
fn different_resourceslices_in_pool_can_target_different_nodes() {
    let slices = vec![
        part(slice(&["device-1"]), 1, 2),
        on_node(part(slice(&["device-2"]), 2, 2), "node-2"),
    ];
    assert_eq!(
        one_request(slices.clone(), 1).try_it(),
        "r=device-1 @node-1"
    );
    assert_eq!(one_request(slices, 2).try_it(), "does not fit");
}

#[test]
fn all_devices_with_multi_host_resource_pool() {
    let slices = vec![
        part(slice(&["device-1"]), 1, 2),
        on_node(part(slice(&["device-2"]), 2, 2), "node-2"),
    ];
    let world = World::new(slices, vec![claim("c", vec![all_of("r", CLASS_A)])]);
    assert_eq!(world.try_it(), "r=device-1 @node-1");
}

#[test]
fn multi_host_resource_pool_with_stale_slice_for_current_node() {
    // The pool has moved on: what node-1 still sees of it does not count.
    let slices = vec![
        part(slice(&["device-1"]), 1, 1),
        generation(on_node(part(slice(&["device-2"]), 2, 1), "node-2"), 2),
    ];
    let world = one_request(slices, 1);
    assert_eq!(
        world.try_it(),
        "r=device-1 @node-1",
        "complete by its own count: the scheduler does not look further"
    );
    let slices = vec![
        part(slice(&["device-1"]), 1, 2),
        generation(on_node(part(slice(&["device-2"]), 2, 1), "node-2"), 2),
    ];
    let world = one_request(slices, 1);
    assert_eq!(world.try_it(), "does not fit");
    assert_eq!(world.explanation().unusable_pools, []);
}

#[test]
fn multi_host_resource_pool_incomplete_update() {
    let slices = vec![
        generation(part(slice(&["device-1"]), 1, 2), 2),
        on_node(part(slice(&["device-2"]), 2, 2), "node-2"),
    ];
    assert_eq!(
        one_request(slices, 1).explanation().unusable_pools,
        [(
            "driver-a/pool-1".to_owned(),
            "is being updated: 1 of 2 slices exist".to_owned()
        )]
    );
}

#[test]
fn node_restriction_per_device() {
    let here = Device {
        node_name: Some("node-1".to_owned()),
        ..device("device-1")
    };
    let there = Device {
        node_name: Some("node-2".to_owned()),
        ..device("device-2")
    };
    let zoned = Device {
        node_selector: Some(zone("a")),
        ..device("device-3")
    };
    let other_zone = Device {
        node_selector: Some(zone("b")),
        ..device("device-4")
    };
    let anywhere = Device {
        all_nodes: Some(true),
        ..device("device-5")
    };
    let slices = |devices| {
        vec![with(slice_of(devices), |s| {
            s.spec.node_name = None;
            s.spec.per_device_node_selection = Some(true);
        })]
    };
    let all = vec![here, there.clone(), zoned.clone(), other_zone, anywhere];
    assert_eq!(
        one_request(slices(all.clone()), 3).try_it(),
        "r=device-1 r=device-3 r=device-5 @node-1"
    );
    assert_eq!(one_request(slices(all.clone()), 4).try_it(), "does not fit");
    assert_eq!(
        one_request(slices(vec![zoned]), 1).try_it(),
        "r=device-3 @zone In a"
    );
    assert_eq!(one_request(slices(vec![there]), 1).try_it(), "does not fit");
    let off = one_request(slices(all), 1).features(|f| f.partitionable_devices = false);
    assert_eq!(off.try_it(), "does not fit");
}

#[test]
fn lexicographical_sorting_of_pools_and_slices() {
    let slices = vec![
        in_pool(slice(&["device-1"]), DRIVER_B, "pool-0"),
        in_pool(slice(&["device-1"]), DRIVER_A, "pool-3"),
        in_pool(slice(&["device-1"]), DRIVER_A, "pool-20"),
    ];
    let mut world = one_request(slices, 3);
    world.classes[0].spec = None;
    assert_eq!(
        world.try_it(),
        "r=driver-a/pool-20/device-1 r=driver-a/pool-3/device-1 r=driver-b/pool-0/device-1 @node-1"
    );
}

#[test]
fn binding_conditions_come_after_and_are_in_the_result() {
    let bound = Device {
        binding_conditions: Some(vec!["Ready".to_owned()]),
        binding_failure_conditions: Some(vec!["Failed".to_owned()]),
        ..device("device-1")
    };
    let slices = || {
        vec![
            in_pool(slice_of(vec![bound.clone()]), DRIVER_A, "a"),
            in_pool(slice(&["device-1"]), DRIVER_A, "b"),
        ]
    };
    let world = one_request(slices(), 2);
    assert_eq!(
        world.try_it(),
        "r=driver-a/b/device-1 r=driver-a/a/device-1 @node-1"
    );
    let results = world.results()[0].devices.clone().unwrap().results.unwrap();
    let conditions: Vec<_> = results
        .iter()
        .map(|r| r.binding_conditions.clone())
        .collect();
    assert_eq!(conditions, [None, Some(vec!["Ready".to_owned()])]);
    assert_eq!(
        results[1].binding_failure_conditions,
        Some(vec!["Failed".to_owned()])
    );
    let off = one_request(slices(), 2).features(|f| f.device_binding = false);
    assert_eq!(off.try_it(), "does not fit");
}

#[test]
fn a_slice_with_an_unknown_way_to_say_where_it_is_does_not_count() {
    let unknown = with(slice(&["device-1"]), |s| s.spec.node_name = None);
    assert_eq!(one_request(vec![unknown], 1).try_it(), "does not fit");
}

#[test]
fn a_bad_node_selector_is_an_error() {
    let bad = with(in_zone(slice(&["device-1"]), "a"), |s| {
        let term = &mut s.spec.node_selector.as_mut().unwrap().node_selector_terms[0];
        term.match_expressions.as_mut().unwrap()[0].operator = "Like".to_owned();
    });
    assert_eq!(
        one_request(vec![bad], 1).outcome(),
        Err(AllocError::NodeSelector(NodeSelectorError::Operator(
            "Like".to_owned()
        )))
    );
}
