//! Consumable capacity (KEP-5075); the titles of the upstream groups are in the names.

use super::*;
use k8s_openapi::api::resource::v1::DeviceCapacity;

fn world(devices: Vec<Device>, requests: Vec<DeviceRequest>) -> World {
    World::new(vec![slice_of(devices)], vec![claim("c", requests)])
}

/// A share of so much memory that another claim has of device-1.
fn sharing(world: World, name: &str, memory: &str) -> World {
    sharing_of(world, name, "device-1", &[("memory", memory)])
}

fn sharing_of(mut world: World, name: &str, device: &str, amounts: &[(&str, &str)]) -> World {
    let mut holder = holding(name, &[device], false);
    let allocation = holder.status.as_mut().unwrap().allocation.as_mut().unwrap();
    let result = &mut allocation
        .devices
        .as_mut()
        .unwrap()
        .results
        .as_mut()
        .unwrap()[0];
    result.share_id = Some(format!("share-of-{name}"));
    result.consumed_capacity = Some(
        amounts
            .iter()
            .map(|(n, v)| ((*n).to_owned(), raw(v)))
            .collect(),
    );
    world.held.push(holder);
    world
}

fn memory(value: &str) -> Device {
    shared(device("device-1"), &[("memory", amount(value))])
}

fn gib(name: &str, amount: &str) -> DeviceRequest {
    wanting(name, CLASS_A, 1, &[("memory", amount)])
}

#[test]
fn consumable_capacity_disabled_feature() {
    let off = |request| {
        world(vec![memory("2Gi")], vec![request])
            .features(|f| f.consumable_capacity = false)
            .try_it()
    };
    assert_eq!(
        off(gib("r", "1Gi")),
        "error: claim default/c, request \"r\": capacity needs the feature gate DRAConsumableCapacity, which is off"
    );
    let sub = DeviceSubRequest {
        capacity: Some(requirements(&[("memory", "1Gi")])),
        ..sub("s", CLASS_A, 1)
    };
    assert!(off(first_of("r", vec![sub])).contains("DRAConsumableCapacity"));
    // Without the feature the device is like any other, and a share is a hold like any other.
    assert_eq!(off(request("r", CLASS_A, 1)), "r=device-1 @node-1");
    let held = sharing(
        world(vec![memory("2Gi")], vec![request("r", CLASS_A, 1)]),
        "other",
        "1Gi",
    );
    assert_eq!(
        held.features(|f| f.consumable_capacity = false).try_it(),
        "does not fit"
    );
}

#[test]
fn multi_allocatable_device_with_missing_capacity_request() {
    let cores = wanting("r", CLASS_A, 1, &[("cores", "1")]);
    let world = world(vec![memory("2Gi")], vec![cores]);
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 1 device of class class-a, 0 of 1 available
  1 device is without capacity "cores" (there is memory): device-1
hint: change "cores" in the request's capacity.requests to a value that the devices offer (kubectl get resourceslices -o yaml)"#
    );
}

#[test]
fn consumable_capacity_without_capacity_without_capacity_request() {
    let none = world(
        vec![shared(device("device-1"), &[])],
        vec![request("a", CLASS_A, 1), request("b", CLASS_A, 1)],
    );
    assert_eq!(none.try_it(), "a=device-1 b=device-1 @node-1");
}

#[test]
fn consumable_capacity_without_policy_without_capacity_request_blocks() {
    let one = world(vec![memory("2Gi")], vec![request("a", CLASS_A, 1)]);
    assert_eq!(one.try_it(), "a=device-1{memory=2Gi} @node-1", "all of it");
    let two = world(
        vec![memory("2Gi")],
        vec![request("a", CLASS_A, 1), request("b", CLASS_A, 1)],
    );
    assert_eq!(two.try_it(), "does not fit");
}

#[test]
fn consumable_capacity_without_policy_with_capacity_request() {
    let two = world(vec![memory("2Gi")], vec![gib("a", "1Gi"), gib("b", "1Gi")]);
    assert_eq!(
        two.try_it(),
        "a=device-1{memory=1Gi} b=device-1{memory=1Gi} @node-1"
    );
    let three = world(
        vec![memory("2Gi")],
        vec![gib("a", "1Gi"), gib("b", "1Gi"), gib("c", "1")],
    );
    assert_eq!(three.try_it(), "does not fit");
}

/// Returns what a request gets of a device with one capacity of that policy.
fn gets(capacity: DeviceCapacity, asked: Option<&str>) -> String {
    let request = match asked {
        Some(amount) => gib("r", amount),
        None => request("r", CLASS_A, 1),
    };
    world(
        vec![shared(device("device-1"), &[("memory", capacity)])],
        vec![request],
    )
    .try_it()
}

#[test]
fn policy_without_capacity_request_and_zero_request_policy() {
    assert_eq!(
        gets(ranged("8Gi", "1Gi", "1Gi", "", ""), None),
        "r=device-1{memory=1Gi} @node-1"
    );
    assert_eq!(
        gets(ranged("8Gi", "0", "0", "0", ""), None),
        "r=device-1{memory=0} @node-1",
        "nothing is something too"
    );
    assert_eq!(
        gets(ranged("8Gi", "0", "0", "0", ""), Some("1")),
        "does not fit"
    );
}

#[test]
fn consumable_capacity_with_range_policy_and_step() {
    let steps = || ranged("10Gi", "1Gi", "1Gi", "7Gi", "2Gi");
    assert_eq!(
        gets(steps(), Some("512Mi")),
        "r=device-1{memory=1Gi} @node-1",
        "at least the minimum"
    );
    assert_eq!(gets(steps(), Some("3Gi")), "r=device-1{memory=3Gi} @node-1");
    assert_eq!(
        gets(steps(), Some("3073Mi")),
        "r=device-1{memory=5Gi} @node-1",
        "up to the next step"
    );
    assert_eq!(
        gets(steps(), Some("7168Mi")),
        "r=device-1{memory=7Gi} @node-1"
    );
    assert_eq!(
        gets(ranged("10Gi", "1Gi", "1Gi", "", ""), Some("1500Mi")),
        "r=device-1{memory=1500Mi} @node-1"
    );
}

#[test]
fn consumable_capacity_with_valid_values_policy_rounds_up() {
    let values = || listed("10Gi", "2Gi", &["2Gi", "4Gi", "8Gi"]);
    assert_eq!(
        gets(values(), Some("4Gi")),
        "r=device-1{memory=4Gi} @node-1"
    );
    assert_eq!(
        gets(values(), Some("3Gi")),
        "r=device-1{memory=4Gi} @node-1"
    );
    assert_eq!(gets(values(), None), "r=device-1{memory=2Gi} @node-1");
    assert_eq!(gets(values(), Some("9Gi")), "does not fit");
}

#[test]
fn exceeded_request_and_request_over_max_sharing_policy() {
    assert_eq!(gets(amount("2Gi"), Some("3Gi")), "does not fit");
    let world = world(
        vec![shared(
            device("device-1"),
            &[("memory", ranged("10Gi", "1Gi", "1Gi", "7Gi", "2Gi"))],
        )],
        vec![gib("r", "8Gi")],
    );
    let text = detail(&world.explanation());
    assert!(
        text.contains(
            "1 device is unable to grant memory 9Gi to one request, at most 7Gi: device-1"
        ),
        "{text}"
    );
}

#[test]
fn allocated_capacity_use_remaining_or_next_device() {
    let two = || {
        vec![
            memory("2Gi"),
            shared(device("device-2"), &[("memory", amount("2Gi"))]),
        ]
    };
    let after = |asked| sharing(world(two(), vec![gib("r", asked)]), "other", "1Gi").try_it();
    assert_eq!(after("1Gi"), "r=device-1{memory=1Gi} @node-1");
    assert_eq!(after("1025Mi"), "r=device-2{memory=1025Mi} @node-1");
}

#[test]
fn the_shares_of_all_claims_count_together() {
    let held = sharing(
        sharing(
            world(vec![memory("3Gi")], vec![gib("r", "1Gi")]),
            "one",
            "1Gi",
        ),
        "two",
        "1Gi",
    );
    assert_eq!(held.try_it(), "r=device-1{memory=1Gi} @node-1");
    let held = sharing(held, "three", "1Mi");
    assert_eq!(held.try_it(), "does not fit");
    assert_eq!(
        held.explanation().requests[0].refused[0].reason,
        divvy_allocator::Reason::CapacityShort {
            capacity: "memory".to_owned(),
            wanted: "1Gi".to_owned(),
            left: "1023Mi".to_owned(),
            by: ["one", "three", "two"]
                .map(|name| Holder {
                    namespace: "default".to_owned(),
                    name: name.to_owned()
                })
                .into(),
        }
    );
}

#[test]
fn consumable_capacity_with_multi_allocatable_device_backtrack() {
    // The first request could take either; only device-2 has room left for the second after it.
    let devices = vec![
        memory("2Gi"),
        shared(device("device-2"), &[("memory", amount("1Gi"))]),
    ];
    let two = world(devices, vec![gib("a", "1Gi"), gib("b", "2Gi")]);
    assert_eq!(
        two.try_it(),
        "a=device-2{memory=1Gi} b=device-1{memory=2Gi} @node-1"
    );
}

#[test]
fn consumable_capacity_multi_allocatable_device_with_subrequest() {
    let wanting = |name: &str, amount| DeviceSubRequest {
        capacity: Some(requirements(&[("memory", amount)])),
        ..sub(name, CLASS_A, 1)
    };
    let request = first_of("r", vec![wanting("much", "4Gi"), wanting("some", "1Gi")]);
    assert_eq!(
        world(vec![memory("2Gi")], vec![request]).try_it(),
        "r/some=device-1{memory=1Gi} @node-1"
    );
}

fn all_wanting(amount: &str) -> DeviceRequest {
    exact("r", CLASS_A, |r| {
        r.allocation_mode = Some("All".to_owned());
        r.capacity = Some(requirements(&[("memory", amount)]));
    })
}

#[test]
fn allocation_mode_all_filters_by_what_a_device_can_ever_give() {
    let devices = || {
        vec![
            memory("2Gi"),
            shared(device("device-2"), &[("memory", amount("1Gi"))]),
            device("device-3"),
        ]
    };
    let all = world(devices(), vec![all_wanting("2Gi")]);
    assert_eq!(all.try_it(), "r=device-1{memory=2Gi} @node-1");
    assert_eq!(
        world(devices(), vec![all_wanting("3Gi")]).try_it(),
        "does not fit"
    );
    // A device that could and has no room left fails the request; it is not passed over.
    let in_use = sharing(world(devices(), vec![all_wanting("1Gi")]), "other", "1Gi");
    assert_eq!(
        in_use.try_it(),
        "r=device-1{memory=1Gi} r=device-2{memory=1Gi} @node-1"
    );
    assert_eq!(sharing(in_use, "more", "1Gi").try_it(), "does not fit");
    let allocating = world(devices(), vec![gib("first", "1Gi"), all_wanting("1Gi")]);
    assert_eq!(
        allocating.try_it(),
        "first=device-1{memory=1Gi} r=device-1{memory=1Gi} r=device-2{memory=1Gi} @node-1"
    );
    assert_eq!(
        world(devices(), vec![gib("first", "2Gi"), all_wanting("1Gi")]).try_it(),
        "does not fit"
    );
}

#[test]
fn dedicated_device_with_one_or_more_capacity_requests() {
    let dedicated = || {
        vec![having(
            device("device-1"),
            &[("memory", amount("2Gi")), ("cores", amount("10"))],
        )]
    };
    assert_eq!(
        world(dedicated(), vec![gib("r", "1Gi")]).try_it(),
        "r=device-1 @node-1",
        "it is given whole"
    );
    let both = wanting("r", CLASS_A, 1, &[("memory", "2Gi"), ("cores", "10")]);
    assert_eq!(
        world(dedicated(), vec![both]).try_it(),
        "r=device-1 @node-1"
    );
    let over = wanting("r", CLASS_A, 1, &[("memory", "2Gi"), ("cores", "11")]);
    assert_eq!(world(dedicated(), vec![over]).try_it(), "does not fit");
    assert_eq!(
        world(dedicated(), vec![gib("a", "1Gi"), gib("b", "1Gi")]).try_it(),
        "does not fit"
    );
}

#[test]
fn consumable_capacity_with_partitionable_device_multiple_capacity_pools() {
    let draws = |device, amount| drawing(device, "gpu", &[("memory", amount)]);
    let devices = vec![
        draws(memory("4Gi"), "4Gi"),
        draws(
            shared(device("device-2"), &[("memory", amount("4Gi"))]),
            "4Gi",
        ),
    ];
    let slices = one_pool(vec![
        sets(&[("gpu", &[("memory", "4Gi")])]),
        slice_of(devices),
    ]);
    let requests = |amounts: &[&str]| {
        let list = amounts
            .iter()
            .enumerate()
            .map(|(i, amount)| gib(&format!("r{i}"), amount));
        World::new(slices.clone(), vec![claim("c", list.collect())])
    };
    assert_eq!(
        requests(&["1Gi", "3Gi"]).try_it(),
        "r0=device-1{memory=1Gi} r1=device-1{memory=3Gi} @node-1"
    );
    assert_eq!(
        requests(&["2Gi", "3Gi"]).try_it(),
        "does not fit",
        "the other device has no counters left"
    );
    // allow-multiple-allocations-with-shared-device-counter-cross-cycle
    let later = sharing(requests(&["3Gi"]), "other", "1Gi");
    assert_eq!(
        later.try_it(),
        "r0=device-1{memory=3Gi} @node-1",
        "charged by the other claim and not again"
    );
}

#[test]
fn exclude_multi_allocatable_device_by_class_selector() {
    let mut world = world(
        vec![memory("2Gi"), device("device-2")],
        vec![request("r", CLASS_A, 1)],
    );
    world.classes[0].spec.as_mut().unwrap().selectors =
        Some(vec![selector("!device.allowMultipleAllocations")]);
    assert_eq!(world.try_it(), "r=device-2 @node-1");
}

#[test]
fn a_device_changes_between_dedicated_and_shared() {
    let dedicated_before = world(vec![memory("2Gi")], vec![gib("r", "1Gi")]).held(&["device-1"]);
    assert_eq!(dedicated_before.try_it(), "does not fit");
    // As upstream: what shares consumed counts against a dedicated device too, which is consumed
    // whole unless asked.
    let now_dedicated = |r| {
        world(
            vec![having(device("device-1"), &[("memory", amount("2Gi"))])],
            vec![r],
        )
    };
    assert_eq!(
        sharing(now_dedicated(request("r", CLASS_A, 1)), "other", "1Gi").try_it(),
        "does not fit"
    );
    assert_eq!(
        sharing(now_dedicated(gib("r", "1025Mi")), "other", "1Gi").try_it(),
        "does not fit"
    );
}

#[test]
fn a_count_of_shares_is_as_many_devices() {
    let two = || wanting("r", CLASS_A, 2, &[("memory", "1Gi")]);
    assert_eq!(
        world(vec![memory("2Gi")], vec![two()]).try_it(),
        "does not fit"
    );
    let devices = vec![
        memory("2Gi"),
        shared(device("device-2"), &[("memory", amount("2Gi"))]),
    ];
    assert_eq!(
        world(devices, vec![two()]).try_it(),
        "r=device-1{memory=1Gi} r=device-2{memory=1Gi} @node-1"
    );
}

#[test]
fn an_admin_gets_a_share_too_and_it_does_not_count_later() {
    let admin = exact("r", CLASS_A, |r| r.admin_access = Some(true));
    let mut world = world(vec![memory("2Gi")], vec![admin]);
    assert_eq!(
        world.then(vec![claim("d", vec![gib("r", "2Gi")])]),
        "r=device-1(admin){memory=2Gi} @node-1"
    );
    assert_eq!(world.try_it(), "r=device-1{memory=2Gi} @node-1");
}

#[test]
fn a_capacity_that_cannot_be_computed_is_an_error_that_names_it() {
    for (capacity, asked, problem) in [
        (
            amount("-1"),
            "0",
            "device driver-a/pool-1/device-1, capacity \"memory\": ",
        ),
        (
            ranged("8Gi", "1Gi", "1Gi", "", "1Gi"),
            "100E",
            "the request 100E is not representable",
        ),
        (
            ranged("8Gi", "1Gi", "1Gi", "", "0"),
            "2Gi",
            "the step 0 of its valid range is not positive",
        ),
        (amount("much"), "1", "\"much\" is not a quantity"),
    ] {
        let answer = gets(capacity.clone(), Some(asked));
        let expected = if capacity.value.0 == "-1" {
            "does not fit"
        } else {
            problem
        };
        assert!(answer.contains(expected), "{answer}");
    }
    assert!(gets(amount("-1"), None).contains("-1 is negative"));
}

#[test]
fn ids_of_shares_are_derived_and_unique_on_the_device() {
    let world = world(vec![memory("2Gi")], vec![gib("a", "1Gi"), gib("b", "1Gi")]);
    let ids = |allocator: &Allocator, held: &[ResourceClaim]| -> Vec<String> {
        let (slices, allocated) = (
            Slices::new(&world.slices),
            AllocatedState::from_claims(held),
        );
        let inputs = Inputs {
            slices: &slices,
            classes: &world.classes,
            allocated: &allocated,
            node: &world.node,
        };
        let Ok(Outcome::Fits(found)) = allocator.allocate(&inputs, &[&world.claims[0]]) else {
            panic!()
        };
        let results = found.results[0].devices.clone().unwrap().results.unwrap();
        results.into_iter().map(|r| r.share_id.unwrap()).collect()
    };
    let derived = ids(&Allocator::new(Features::ALL), &[]);
    assert_eq!(
        derived,
        ids(&Allocator::new(Features::ALL), &[]),
        "the same question has the same answer"
    );
    assert_ne!(derived[0], derived[1]);
    for id in &derived {
        let shape: Vec<usize> = id.split('-').map(str::len).collect();
        assert_eq!(shape, [8, 4, 4, 4, 12]);
        assert!(
            id.bytes()
                .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f' | b'-'))
                && id.as_bytes()[14] == b'8',
            "{id}"
        );
    }
    // An id that an existing share of the device has is not given again.
    let mut taken = sharing_of(
        self::world(Vec::new(), Vec::new()),
        "other",
        "device-1",
        &[],
    )
    .held;
    let allocation = taken[0]
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap();
    allocation
        .devices
        .as_mut()
        .unwrap()
        .results
        .as_mut()
        .unwrap()[0]
        .share_id = Some(derived[0].clone());
    assert!(!ids(&Allocator::new(Features::ALL), &taken).contains(&derived[0]));
}
