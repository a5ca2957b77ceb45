//! Constraints between the devices of a claim; the titles of the upstream groups are in the names.

use super::*;

fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute {
        int: Some(value),
        ..DeviceAttribute::default()
    }
}

fn list(values: &[&str]) -> DeviceAttribute {
    let values = values.iter().map(|v| (*v).to_owned()).collect();
    DeviceAttribute {
        strings: Some(values),
        ..DeviceAttribute::default()
    }
}

/// Devices 1, 2, … of these values of the attribute `rack`; `None` lacks it.
fn devices(values: Vec<Option<DeviceAttribute>>) -> Vec<ResourceSlice> {
    let devices = values.into_iter().enumerate().map(|(index, value)| {
        let device = device(&format!("device-{}", index + 1));
        match value {
            Some(value) => with_attribute(device, "rack", value),
            None => device,
        }
    });
    vec![slice_of(devices.collect())]
}

const RACK: &str = "driver-a/rack";

fn two() -> ResourceClaim {
    claim(
        "c",
        vec![request("r1", CLASS_A, 1), request("r2", CLASS_A, 1)],
    )
}

/// Devices of one value each and a class without a selector: one would fail for a value of an
/// unknown type.
fn unselected(values: Vec<Option<DeviceAttribute>>, claim: ResourceClaim) -> World {
    let mut world = World::new(devices(values), vec![claim]);
    for class in &mut world.classes {
        class.spec.as_mut().unwrap().selectors = None;
    }
    world
}

fn matched(values: Vec<Option<DeviceAttribute>>) -> String {
    unselected(values, matching(two(), RACK, &[])).try_it()
}

fn distinct(values: Vec<Option<DeviceAttribute>>) -> String {
    unselected(values, differing(two(), RACK, &[])).try_it()
}

#[test]
fn with_constraint() {
    let values = vec![Some(int(1)), Some(int(2)), Some(int(2))];
    assert_eq!(matched(values), "r1=device-2 r2=device-3 @node-1");
    let mut qualified = devices(vec![None, None]);
    for device in qualified[0].spec.devices.as_mut().unwrap() {
        *device = with_attribute(device.clone(), "example.com/rack", text("a"));
    }
    let claims = vec![matching(two(), "example.com/rack", &[])];
    assert_eq!(
        World::new(qualified, claims).try_it(),
        "r1=device-1 r2=device-2 @node-1"
    );
}

#[test]
fn with_constraint_non_existent_attribute() {
    let world = World::new(
        devices(vec![None, Some(int(1))]),
        vec![matching(two(), RACK, &["r1"])],
    );
    assert_eq!(world.try_it(), "r1=device-2 r2=device-1 @node-1");
    let world = World::new(
        devices(vec![None]),
        vec![matching(
            claim("c", vec![request("r", CLASS_A, 1)]),
            RACK,
            &[],
        )],
    );
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 1 device of class class-a, 0 of 1 available
  1 device is without a value for the claim's constraint matchAttribute driver-a/rack: device-1"#
    );
    // The attribute of another driver is not the device's.
    let other = World::new(
        devices(vec![Some(int(1)), Some(int(1))]),
        vec![matching(two(), "driver-b/rack", &[])],
    );
    assert_eq!(other.try_it(), "does not fit");
}

#[test]
fn with_constraint_not_matching_int_string_bool_or_version_attribute() {
    let bool = |v| DeviceAttribute {
        bool: Some(v),
        ..DeviceAttribute::default()
    };
    let version = |v: &str| DeviceAttribute {
        version: Some(v.to_owned()),
        ..DeviceAttribute::default()
    };
    for (a, b) in [
        (int(1), int(2)),
        (text("a"), text("b")),
        (bool(true), bool(false)),
        (version("1.0.0"), version("1.0.1")),
        (int(1), text("1")),
        (text("1.0.0"), version("1.0.0")),
    ] {
        let values = vec![Some(a.clone()), Some(b.clone())];
        assert_eq!(matched(values.clone()), "does not fit", "{a:?} {b:?}");
        assert_eq!(
            distinct(values),
            "r1=device-1 r2=device-2 @node-1",
            "{a:?} {b:?}"
        );
        let same = vec![Some(a.clone()), Some(a.clone())];
        assert_eq!(
            matched(same.clone()),
            "r1=device-1 r2=device-2 @node-1",
            "{a:?}"
        );
        assert_eq!(distinct(same), "does not fit", "{a:?}");
    }
}

#[test]
fn with_constraint_not_matching_int_attribute_all_devices() {
    let all = matching(claim("c", vec![all_of("r", CLASS_A)]), RACK, &[]);
    let world = World::new(devices(vec![Some(int(1)), Some(int(2))]), vec![all]);
    assert_eq!(
        world.try_it(),
        "error: claim default/c, request \"r\": cannot add device driver-a/pool-1/device-2 because a claim constraint would not be satisfied: matchAttribute driver-a/rack; all devices must satisfy it, so select fewer or drop the constraint"
    );
}

#[test]
fn with_constraint_for_request_and_retry() {
    let values = || devices(vec![Some(int(1)), Some(int(2)), Some(int(2))]);
    let three = claim(
        "c",
        vec![
            request("r1", CLASS_A, 1),
            request("r2", CLASS_A, 1),
            request("r3", CLASS_A, 1),
        ],
    );
    let world = World::new(values(), vec![matching(three, RACK, &["r2", "r3"])]);
    assert_eq!(
        world.try_it(),
        "r1=device-1 r2=device-2 r3=device-3 @node-1"
    );
    // The first choice for r1 leaves nothing alike for r2: it is tried again.
    let world = World::new(
        values(),
        vec![matching(
            claim("c", vec![request("r1", CLASS_A, 2)]),
            RACK,
            &["r1"],
        )],
    );
    assert_eq!(world.try_it(), "r1=device-2 r1=device-3 @node-1");
}

#[test]
fn prioritized_list_constraints_ref_parent_request_or_sub_request() {
    let values = || devices(vec![Some(int(1)), Some(int(2)), Some(int(2))]);
    let claim = |scope: &[&str]| {
        let first = first_of("r1", vec![sub("one", CLASS_A, 1), sub("other", CLASS_A, 1)]);
        matching(
            claim("c", vec![first, request("r2", CLASS_A, 1)]),
            RACK,
            scope,
        )
    };
    assert_eq!(
        World::new(values(), vec![claim(&["r1", "r2"])]).try_it(),
        "r1/one=device-2 r2=device-3 @node-1"
    );
    assert_eq!(
        World::new(values(), vec![claim(&["r1/other", "r2"])]).try_it(),
        "r1/one=device-1 r2=device-2 @node-1",
        "the constraint is not about the first alternative"
    );
}

#[test]
fn with_distinct_constraints_and_subrequests() {
    let values = || devices(vec![Some(int(1)), Some(int(1)), Some(int(2))]);
    assert_eq!(
        World::new(values(), vec![differing(two(), RACK, &[])]).try_it(),
        "r1=device-1 r2=device-3 @node-1"
    );
    // One request for two: devices differ, not requests.
    let counted = differing(claim("c", vec![request("r", CLASS_A, 2)]), RACK, &["r"]);
    assert_eq!(
        World::new(values(), vec![counted]).try_it(),
        "r=device-1 r=device-3 @node-1"
    );
    let first = first_of("r1", vec![sub("three", CLASS_A, 3), sub("two", CLASS_A, 2)]);
    let alternatives = differing(claim("c", vec![first]), RACK, &["r1"]);
    assert_eq!(
        World::new(values(), vec![alternatives]).try_it(),
        "r1/two=device-1 r1/two=device-3 @node-1"
    );
}

#[test]
fn with_distinct_constraints_attribute_not_set() {
    assert_eq!(distinct(vec![Some(int(1)), None]), "does not fit");
}

#[test]
fn with_distinct_constraints_unknown_type_attribute() {
    let unknown = DeviceAttribute::default();
    assert_eq!(
        distinct(vec![Some(unknown.clone()), Some(unknown.clone())]),
        "does not fit"
    );
    assert_eq!(
        distinct(vec![Some(int(1)), Some(unknown.clone())]),
        "r1=device-2 r2=device-1 @node-1",
        "as the first it is let in"
    );
    assert_eq!(
        matched(vec![Some(unknown.clone()), Some(unknown)]),
        "does not fit"
    );
}

#[test]
fn distinct_constraint_one_or_two_multi_allocatable_devices() {
    let share = |name: &str, rack| {
        with_attribute(
            shared(device(name), &[("memory", amount("2Gi"))]),
            "rack",
            int(rack),
        )
    };
    let claim = || {
        let requests = vec![
            wanting("r1", CLASS_A, 1, &[("memory", "1Gi")]),
            wanting("r2", CLASS_A, 1, &[("memory", "1Gi")]),
        ];
        vec![differing(claim("c", requests), RACK, &[])]
    };
    assert_eq!(
        World::new(vec![slice_of(vec![share("device-1", 1)])], claim()).try_it(),
        "does not fit"
    );
    let both = vec![slice_of(vec![share("device-1", 1), share("device-2", 2)])];
    assert_eq!(
        World::new(both, claim()).try_it(),
        "r1=device-1{memory=1Gi} r2=device-2{memory=1Gi} @node-1"
    );
}

#[test]
fn a_match_and_a_distinction_hold_together() {
    let placed = |name: &str, rack, slot| {
        with_attribute(
            with_attribute(device(name), "rack", int(rack)),
            "slot",
            int(slot),
        )
    };
    let all = vec![
        placed("device-1", 1, 1),
        placed("device-2", 2, 1),
        placed("device-3", 2, 1),
        placed("device-4", 2, 2),
    ];
    let claim = differing(matching(two(), RACK, &[]), "driver-a/slot", &[]);
    assert_eq!(
        World::new(vec![slice_of(all)], vec![claim]).try_it(),
        "r1=device-2 r2=device-4 @node-1"
    );
}

fn with_lists(
    values: Vec<Option<DeviceAttribute>>,
    constrain: fn(ResourceClaim, &str, &[&str]) -> ResourceClaim,
) -> String {
    unselected(values, constrain(two(), RACK, &[]))
        .features(|f| f.list_attributes = true)
        .try_it()
}

#[test]
fn list_attributes_match_constraint() {
    let fits = "r1=device-1 r2=device-2 @node-1";
    for (a, b, expected) in [
        (text("a"), text("a"), fits),
        (list(&["a", "b"]), list(&["b", "a"]), fits),
        (list(&["a", "b"]), list(&["b", "c"]), fits),
        (list(&["a"]), list(&["b"]), "does not fit"),
        (text("a"), list(&["b", "a"]), fits),
        (text("a"), list(&["b"]), "does not fit"),
        (int(1), list(&["1"]), "does not fit"),
        (DeviceAttribute::default(), text("a"), "does not fit"),
        (
            DeviceAttribute {
                ints: Some(vec![1, 2]),
                ..Default::default()
            },
            int(2),
            fits,
        ),
    ] {
        assert_eq!(
            with_lists(vec![Some(a.clone()), Some(b.clone())], matching),
            expected,
            "{a:?} {b:?}"
        );
    }
    // The intersection shrinks, and is what it was after a step back.
    let three = claim("c", vec![request("r", CLASS_A, 3)]);
    let values = vec![
        Some(list(&["a", "b"])),
        Some(list(&["a"])),
        Some(list(&["b"])),
        Some(list(&["b", "c"])),
    ];
    let world = World::new(devices(values), vec![matching(three, RACK, &[])]);
    assert_eq!(
        world.features(|f| f.list_attributes = true).try_it(),
        "r=device-1 r=device-3 r=device-4 @node-1"
    );
}

#[test]
fn list_attributes_distinct_constraint() {
    let fits = "r1=device-1 r2=device-2 @node-1";
    for (a, b, expected) in [
        (text("a"), text("b"), fits),
        (text("a"), text("a"), "does not fit"),
        (list(&["a", "b"]), list(&["c"]), fits),
        (list(&["a", "b"]), list(&["b", "c"]), "does not fit"),
        (text("a"), list(&["b"]), fits),
        (text("a"), list(&["b", "a"]), "does not fit"),
        (DeviceAttribute::default(), text("a"), "does not fit"),
    ] {
        assert_eq!(
            with_lists(vec![Some(a.clone()), Some(b.clone())], differing),
            expected,
            "{a:?} {b:?}"
        );
    }
}

#[test]
fn list_attributes_disabled_constraints_with_lists() {
    let values = vec![Some(list(&["a"])), Some(list(&["a"]))];
    assert_eq!(matched(values.clone()), "does not fit");
    assert_eq!(distinct(values), "does not fit");
}

#[test]
fn nine_distinct_of_eight_are_refused_at_once() {
    let values = (0..9).map(|v| Some(int(v % 8))).collect();
    let world = World::new(
        devices(values),
        vec![differing(
            claim("c", vec![request("r", CLASS_A, 9)]),
            RACK,
            &[],
        )],
    );
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: each device is available alone, but not so many together
claim default/c, request "r" needs 9 devices of class class-a, 9 of 9 available
  constraint distinctAttribute driver-a/rack of claim default/c: 9 devices must differ, but the available ones have only 8 values: 0, 1, 2, 3 …"#
    );
}
