use super::*;

fn world(devices: Vec<Device>, requests: Vec<DeviceRequest>) -> World {
    World::new(vec![slice_of(devices)], vec![claim("claim-0", requests)])
}

fn tolerant(name: &str, tolerations: Vec<DeviceToleration>) -> DeviceRequest {
    exact(name, CLASS_A, |r| r.tolerations = Some(tolerations))
}

#[test]
fn tainted_two_devices() {
    let devices = vec![
        tainted("device-1", &[("a", "NoSchedule")]),
        tainted("device-2", &[("a", "NoExecute")]),
    ];
    assert_eq!(
        world(devices, vec![request("r", CLASS_A, 1)]).try_it(),
        "does not fit"
    );
}

#[test]
fn tainted_one_device_of_two() {
    let devices = vec![
        tainted("device-1", &[("a", "NoSchedule")]),
        device("device-2"),
    ];
    assert_eq!(
        world(devices, vec![request("r", CLASS_A, 1)]).try_it(),
        "r=device-2 @node-1"
    );
}

#[test]
fn tainted_two_devices_tolerated_and_the_toleration_is_in_the_result() {
    let devices = vec![
        tainted("device-1", &[("a", "NoSchedule")]),
        tainted("device-2", &[("a", "NoExecute")]),
    ];
    let tolerations = vec![toleration("a", "Exists", "")];
    let world = world(devices, vec![tolerant("r", tolerations.clone())]);
    assert_eq!(world.try_it(), "r=device-1 @node-1");
    let results = world.results()[0].devices.clone().unwrap().results.unwrap();
    assert_eq!(results[0].tolerations, Some(tolerations));
}

#[test]
fn tainted_one_device_two_taints_one_or_both_tolerated() {
    let devices = || {
        vec![tainted(
            "device-1",
            &[("a", "NoSchedule"), ("b", "NoExecute")],
        )]
    };
    let one = vec![toleration("a", "Equal", "yes")];
    assert_eq!(
        world(devices(), vec![tolerant("r", one)]).try_it(),
        "does not fit"
    );
    let both = vec![toleration("a", "Equal", "yes"), toleration("b", "", "yes")];
    assert_eq!(
        world(devices(), vec![tolerant("r", both)]).try_it(),
        "r=device-1 @node-1"
    );
}

#[test]
fn a_toleration_must_match_key_value_and_effect() {
    let devices = || vec![tainted("device-1", &[("a", "NoSchedule")])];
    let effect = |effect: &str| DeviceToleration {
        effect: Some(effect.to_owned()),
        ..toleration("a", "Exists", "")
    };
    for (toleration, tolerated) in [
        (toleration("a", "Equal", "yes"), true),
        (toleration("a", "Equal", "no"), false),
        (toleration("b", "Exists", ""), false),
        (toleration("", "Exists", ""), true),
        (toleration("a", "Unknown", "yes"), false),
        (effect("NoSchedule"), true),
        (effect("NoExecute"), false),
    ] {
        let expected = if tolerated {
            "r=device-1 @node-1"
        } else {
            "does not fit"
        };
        assert_eq!(
            world(devices(), vec![tolerant("r", vec![toleration.clone()])]).try_it(),
            expected,
            "{toleration:?}"
        );
    }
}

#[test]
fn tainted_no_effect() {
    let devices = vec![tainted("device-1", &[("a", "None"), ("b", "SomethingNew")])];
    assert_eq!(
        world(devices, vec![request("r", CLASS_A, 1)]).try_it(),
        "r=device-1 @node-1"
    );
}

#[test]
fn tainted_disabled() {
    let devices = vec![tainted("device-1", &[("a", "NoSchedule")])];
    let world =
        world(devices, vec![request("r", CLASS_A, 1)]).features(|f| f.device_taints = false);
    assert_eq!(world.try_it(), "r=device-1 @node-1");
}

#[test]
fn tainted_prioritized_list() {
    let devices = || vec![tainted("device-1", &[("a", "NoSchedule")])];
    let tolerant = DeviceSubRequest {
        tolerations: Some(vec![toleration("a", "Exists", "")]),
        ..sub("tolerant", CLASS_A, 1)
    };
    let both = first_of("r", vec![sub("plain", CLASS_A, 1), tolerant]);
    assert_eq!(
        world(devices(), vec![both]).try_it(),
        "r/tolerant=device-1 @node-1"
    );
    let plain = first_of("r", vec![sub("plain", CLASS_A, 1)]);
    assert_eq!(world(devices(), vec![plain]).try_it(), "does not fit");
}

#[test]
fn tainted_admin_access() {
    let devices = vec![tainted("device-1", &[("a", "NoSchedule")])];
    let admin = exact("r", CLASS_A, |r| r.admin_access = Some(true));
    assert_eq!(world(devices, vec![admin]).try_it(), "does not fit");
}

#[test]
fn tainted_all_devices_single() {
    let devices = vec![
        device("device-1"),
        tainted("device-2", &[("a", "NoSchedule")]),
    ];
    assert_eq!(
        world(devices, vec![all_of("r", CLASS_A)]).try_it(),
        "does not fit"
    );
}
