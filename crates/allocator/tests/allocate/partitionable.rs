//! Shared counters (KEP-4815); the titles of the upstream group are in the names.

use super::*;

/// A partition that consumes `memory` of the set `gpu`.
fn partition(name: &str, memory: &str) -> Device {
    drawing(device(name), "gpu", &[("memory", memory)])
}

fn gpu(memory: &str) -> ResourceSlice {
    sets(&[("gpu", &[("memory", memory)])])
}

fn world(memory: &str, devices: Vec<Device>, requests: Vec<DeviceRequest>) -> World {
    World::new(
        one_pool(vec![gpu(memory), slice_of(devices)]),
        vec![claim("c", requests)],
    )
}

#[test]
fn partitionable_devices_single_device() {
    let world = world(
        "18Gi",
        vec![partition("device-1", "4Gi")],
        vec![request("r", CLASS_A, 1)],
    );
    assert_eq!(world.try_it(), "r=device-1 @node-1");
}

#[test]
fn partitionable_devices_prioritized_list() {
    let devices = vec![
        partition("device-1", "8Gi"),
        partition("device-2", "8Gi"),
        partition("device-3", "8Gi"),
    ];
    let alternatives = vec![sub("three", CLASS_A, 3), sub("two", CLASS_A, 2)];
    let world = world("18Gi", devices, vec![first_of("r", alternatives)]);
    assert_eq!(world.try_it(), "r/two=device-1 r/two=device-2 @node-1");
}

#[test]
fn partitionable_devices_multiple_devices() {
    let devices = || {
        vec![
            partition("device-1", "4Gi"),
            partition("device-2", "4Gi"),
            partition("device-3", "6Gi"),
            partition("device-4", "4Gi"),
        ]
    };
    let two = |memory| {
        world(
            memory,
            devices(),
            vec![request("r1", CLASS_A, 1), request("r2", CLASS_A, 2)],
        )
    };
    assert_eq!(
        two("18Gi").try_it(),
        "r1=device-1 r2=device-2 r2=device-3 @node-1"
    );
    // The third device is too large then; the fourth fits.
    assert_eq!(
        two("12Gi").try_it(),
        "r1=device-1 r2=device-2 r2=device-4 @node-1"
    );
    assert_eq!(two("11Gi").try_it(), "does not fit");
}

#[test]
fn partitionable_devices_multiple_capacity_pools_and_counters() {
    let both = |name: &str, a: &str, b: &str| {
        drawing(
            drawing(device(name), "gpu", &[("memory", a), ("slices", "1")]),
            "other",
            &[("memory", b)],
        )
    };
    let slices = |slices: &str| {
        let sets = sets(&[
            ("gpu", &[("memory", "8Gi"), ("slices", slices)]),
            ("other", &[("memory", "8Gi")]),
        ]);
        one_pool(vec![
            sets,
            slice_of(vec![
                both("device-1", "4Gi", "6Gi"),
                both("device-2", "4Gi", "4Gi"),
                both("device-3", "4Gi", "2Gi"),
            ]),
        ])
    };
    let two = |count| {
        World::new(
            slices(count),
            vec![claim("c", vec![request("r", CLASS_A, 2)])],
        )
        .try_it()
    };
    assert_eq!(
        two("2"),
        "r=device-1 r=device-3 @node-1",
        "the first two would take 10Gi of 8 of the second set"
    );
    assert_eq!(two("1"), "does not fit", "one slice is not enough for two");
}

#[test]
fn partitionable_devices_multiple_pools() {
    let second = |slice| in_pool(slice, DRIVER_A, "pool-2");
    let mut slices = one_pool(vec![
        gpu("4Gi"),
        slice_of(vec![
            partition("device-1", "4Gi"),
            partition("device-2", "4Gi"),
        ]),
    ]);
    let mut more: Vec<_> = one_pool(vec![
        gpu("4Gi"),
        slice_of(vec![
            partition("device-1", "4Gi"),
            partition("device-2", "4Gi"),
        ]),
    ])
    .into_iter()
    .map(second)
    .collect();
    slices.append(&mut more);
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 2)])]);
    assert_eq!(
        world.try_it(),
        "r=device-1 r=driver-a/pool-2/device-1 @node-1",
        "each pool has counters of its own"
    );
}

#[test]
fn a_second_driver_with_the_same_pool_name_has_counters_of_its_own() {
    let pool = || {
        one_pool(vec![
            gpu("4Gi"),
            slice_of(vec![partition("device-1", "4Gi")]),
        ])
    };
    let mut slices = pool();
    slices.extend(
        pool()
            .into_iter()
            .map(|s| with(s, |s| s.spec.driver = DRIVER_B.to_owned())),
    );
    let requests = vec![request("a", CLASS_A, 1), request("b", CLASS_B, 1)];
    let world = World::new(slices, vec![claim("c", requests)]);
    assert_eq!(
        world.try_it(),
        "a=device-1 b=driver-b/pool-1/device-1 @node-1"
    );
}

#[test]
fn partitionable_devices_unused_counters_in_counter_set() {
    let slices = one_pool(vec![
        sets(&[
            ("gpu", &[("memory", "4Gi"), ("unused", "1")]),
            ("unused", &[("memory", "0")]),
        ]),
        slice_of(vec![partition("device-1", "4Gi")]),
    ]);
    assert_eq!(
        World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 1)])]).try_it(),
        "r=device-1 @node-1"
    );
}

#[test]
fn partitionable_devices_no_capacity_available() {
    let devices = vec![partition("device-1", "4Gi"), partition("device-2", "4Gi")];
    let world = world("18Gi", devices, vec![request("r", CLASS_A, 1)]).held(&["device-2"]);
    assert_eq!(world.try_it(), "r=device-1 @node-1");
    let devices = vec![partition("device-1", "8Gi"), partition("device-2", "16Gi")];
    let world = self::world("18Gi", devices, vec![request("r", CLASS_A, 1)]).held(&["device-2"]);
    assert_eq!(world.try_it(), "does not fit");
}

#[test]
fn partitionable_devices_overallocated_capacity_pool() {
    // The driver has shrunk a set under an allocation: nothing that consumes counters of the pool
    // can be had.
    let slices = |devices| {
        one_pool(vec![
            sets(&[
                ("gpu", &[("memory", "16Gi")]),
                ("other", &[("memory", "8Gi")]),
            ]),
            slice_of(devices),
        ])
    };
    let devices = vec![
        partition("device-1", "20Gi"),
        drawing(device("device-2"), "other", &[("memory", "1Gi")]),
        device("device-3"),
    ];
    let claims = vec![claim("c", vec![request("r", CLASS_A, 1)])];
    let mut world = World::new(slices(devices), claims).held(&["device-1"]);
    assert_eq!(world.try_it(), "r=device-3 @node-1");
    world.claims = vec![claim("c", vec![request("r", CLASS_A, 2)])];
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 2 devices of class class-a, 1 of 3 available
  1 device is in use: device-1 by claim default/other
  1 device is blocked: claims hold more of counter memory of counter set gpu than exists (left -4Gi, held by claim default/other): device-2
hint: devices become free when the pods that use default/other end"#
    );
}

#[test]
fn partitionable_devices_with_attribute_selector() {
    let devices = vec![
        partition("device-1", "4Gi"),
        partition("big-2", "10Gi"),
        partition("big-3", "10Gi"),
    ];
    let big = selecting("r", CLASS_A, 1, r#"device.attributes["driver-a"].big"#);
    let world = world("18Gi", devices, vec![big, request("s", CLASS_A, 1)]);
    assert_eq!(world.try_it(), "r=big-2 s=device-1 @node-1");
}

#[test]
fn partitionable_devices_with_binding_conditions_and_taints() {
    let bound = Device {
        binding_conditions: Some(vec!["Ready".to_owned()]),
        ..partition("device-1", "4Gi")
    };
    let tainted = Device {
        taints: tainted("x-1", &[("a", "NoSchedule")]).taints,
        ..partition("device-2", "4Gi")
    };
    let world = world("8Gi", vec![bound, tainted], vec![request("r", CLASS_A, 1)]);
    assert_eq!(world.try_it(), "r=device-1 @node-1");
    let two = self::world(
        "8Gi",
        world.slices[1].spec.devices.clone().unwrap(),
        vec![request("r", CLASS_A, 2)],
    );
    assert_eq!(
        two.try_it(),
        "does not fit",
        "a tainted device must not keep the counters it was tried with"
    );
}

#[test]
fn partitionable_devices_per_device_node_selection() {
    let on = |name: &str, node: &str| Device {
        node_name: Some(node.to_owned()),
        ..partition(name, "4Gi")
    };
    let zoned = Device {
        node_selector: Some(zone("a")),
        ..partition("device-3", "4Gi")
    };
    let slices = one_pool(vec![
        on_all_nodes(gpu("8Gi")),
        on_all_nodes(slice_of(vec![
            on("device-1", "node-1"),
            on("device-2", "node-2"),
            zoned,
        ])),
    ]);
    let slices = vec![
        slices[0].clone(),
        with(slices[1].clone(), |s| {
            s.spec.all_nodes = None;
            s.spec.per_device_node_selection = Some(true);
        }),
    ];
    let mut world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 2)])]);
    assert_eq!(world.try_it(), "r=device-1 r=device-3 @node-1");
    // A device for another node draws on the same counters.
    world.held.push(holding("other", &["device-2"], false));
    assert_eq!(world.try_it(), "does not fit");
}

#[test]
fn devices_on_different_nodes_consume_same_counter_set() {
    let slices = one_pool(vec![
        on_all_nodes(gpu("8Gi")),
        slice_of(vec![
            partition("device-1", "4Gi"),
            partition("device-2", "4Gi"),
        ]),
        on_node(slice_of(vec![partition("device-3", "6Gi")]), "node-2"),
    ]);
    let world = World::new(
        slices.clone(),
        vec![claim("c", vec![request("r", CLASS_A, 2)])],
    );
    assert_eq!(world.try_it(), "r=device-1 r=device-2 @node-1");
    let world =
        World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 1)])]).held(&["device-3"]);
    assert_eq!(
        world.try_it(),
        "does not fit",
        "held on node-2, it leaves 2Gi for node-1"
    );
}

#[test]
fn same_counter_set_name_in_different_resource_slices() {
    let slices = one_pool(vec![
        gpu("8Gi"),
        gpu("8Gi"),
        slice_of(vec![partition("device-1", "4Gi")]),
    ]);
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 1)])]);
    assert!(
        world
            .try_it()
            .contains("is invalid: duplicate counter set name gpu"),
        "{}",
        world.try_it()
    );
}

#[test]
fn device_counter_consumption_references_counter_set_in_other_pool() {
    let mut slices = vec![in_pool(gpu("8Gi"), DRIVER_A, "pool-2")];
    slices.push(slice_of(vec![partition("device-1", "4Gi")]));
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 1)])]);
    assert!(
        world
            .try_it()
            .contains("device device-1 references unknown counter set gpu"),
        "{}",
        world.try_it()
    );
}

#[test]
fn partitionable_devices_validation_error_on_non_targeting_slice() {
    let elsewhere = on_node(
        slice_of(vec![drawing(
            device("device-2"),
            "unknown",
            &[("memory", "1")],
        )]),
        "node-2",
    );
    let slices = one_pool(vec![
        on_all_nodes(gpu("8Gi")),
        slice_of(vec![partition("device-1", "4Gi")]),
        elsewhere,
    ]);
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 1)])]);
    assert!(
        world
            .try_it()
            .contains("device device-2 references unknown counter set unknown"),
        "{}",
        world.try_it()
    );
}

#[test]
fn an_amount_that_is_none_makes_the_pool_invalid() {
    let world = world(
        "lots",
        vec![partition("device-1", "4Gi")],
        vec![request("r", CLASS_A, 1)],
    );
    assert!(
        world
            .try_it()
            .contains("is invalid: counter memory of counter set gpu: "),
        "{}",
        world.try_it()
    );
}

#[test]
fn all_devices_with_consumed_counters() {
    let devices = || vec![partition("device-1", "4Gi"), partition("device-2", "4Gi")];
    assert_eq!(
        world("8Gi", devices(), vec![all_of("r", CLASS_A)]).try_it(),
        "r=device-1 r=device-2 @node-1"
    );
    assert_eq!(
        world("7Gi", devices(), vec![all_of("r", CLASS_A)]).try_it(),
        "does not fit"
    );
}

#[test]
fn the_allocation_of_an_admin_charges_nothing() {
    let devices = vec![partition("device-1", "8Gi"), partition("device-2", "8Gi")];
    let mut world = world("8Gi", devices, vec![request("r", CLASS_A, 1)]);
    world.held.push(holding("monitor", &["device-1"], true));
    assert_eq!(world.try_it(), "r=device-1 @node-1");
}

#[test]
fn the_counter_that_is_short_and_its_holders_are_named() {
    let devices = vec![
        partition("whole", "8Gi"),
        partition("half-0", "4Gi"),
        partition("half-1", "4Gi"),
    ];
    let whole = selecting(
        "r",
        CLASS_A,
        1,
        r#"!has(device.attributes["driver-a"].index)"#,
    );
    let mut devices = devices;
    devices[0].attributes = None;
    let world = world("8Gi", devices, vec![whole]).held(&["half-1"]);
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 1 device of class class-a, 0 of 3 available
  1 device is blocked by devices in use (counter set gpu: whole needs memory 8Gi, left 4Gi, held by claim default/other): whole
  2 devices are not selected by claim default/c, selector #0 `!has(device.attributes["driver-a"].index)`
hint: devices become free when the pods that use default/other end"#
    );
}

#[test]
fn devices_that_exclude_one_another_are_said_to() {
    let devices = vec![partition("device-1", "6Gi"), partition("device-2", "6Gi")];
    let world = world("8Gi", devices, vec![request("r", CLASS_A, 2)]);
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: each device is available alone, but not so many together
claim default/c, request "r" needs 2 devices of class class-a, 2 of 2 available"#
    );
}
