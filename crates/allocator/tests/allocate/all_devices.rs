use super::*;

fn world(devices: &[&str], requests: Vec<DeviceRequest>) -> World {
    World::new(vec![slice(devices)], vec![claim("claim-0", requests)])
}

#[test]
fn all_devices_single_and_many() {
    assert_eq!(
        world(&["device-1"], vec![all_of("r", CLASS_A)]).try_it(),
        "r=device-1 @node-1"
    );
    assert_eq!(
        world(&["device-1", "device-2"], vec![all_of("r", CLASS_A)]).try_it(),
        "r=device-1 r=device-2 @node-1"
    );
}

#[test]
fn all_devices_are_those_that_are_selected() {
    let all = exact("r", CLASS_A, |r| {
        r.allocation_mode = Some("All".to_owned());
        r.selectors = Some(vec![selector(r#"device.attributes["driver-a"].index > 1"#)]);
    });
    assert_eq!(
        world(&["device-1", "device-2", "device-3"], vec![all]).try_it(),
        "r=device-2 r=device-3 @node-1"
    );
}

#[test]
fn all_devices_of_the_incomplete_pool() {
    let world = World::new(
        vec![part(slice(&["device-1"]), 1, 2)],
        vec![claim("c", vec![all_of("r", CLASS_A)])],
    );
    assert_eq!(
        world.try_it(),
        "error: claim default/c, request \"r\": asks for all devices, but resource pool driver-a/pool-1 is currently being updated"
    );
}

#[test]
fn all_devices_of_an_invalid_pool() {
    let world = World::new(
        vec![slice(&["device-1", "device-1"])],
        vec![claim("c", vec![all_of("r", CLASS_A)])],
    );
    assert_eq!(
        world.try_it(),
        "error: claim default/c, request \"r\": asks for all devices, but resource pool driver-a/pool-1 is currently invalid: duplicate device name device-1"
    );
}

fn plus_another(reversed: bool) -> World {
    let mut requests = vec![all_of("all", CLASS_A), request("another", CLASS_B, 1)];
    if reversed {
        requests.reverse();
    }
    let slices = vec![
        slice(&["device-1", "device-2"]),
        in_pool(slice(&["device-1"]), DRIVER_B, "pool-b"),
    ];
    World::new(slices, vec![claim("c", requests)])
}

#[test]
fn all_devices_many_plus_another_and_reversed() {
    assert_eq!(
        plus_another(false).try_it(),
        "all=device-1 all=device-2 another=driver-b/pool-b/device-1 @node-1"
    );
    assert_eq!(
        plus_another(true).try_it(),
        "another=driver-b/pool-b/device-1 all=device-1 all=device-2 @node-1"
    );
}

#[test]
fn all_devices_no_solution_and_reversed() {
    for requests in [
        vec![all_of("all", CLASS_A), request("another", CLASS_A, 1)],
        vec![request("another", CLASS_A, 1), all_of("all", CLASS_A)],
    ] {
        assert_eq!(
            world(&["device-1", "device-2"], requests).try_it(),
            "does not fit"
        );
    }
}

#[test]
fn all_devices_slice_without_devices_and_no_slices() {
    assert_eq!(
        world(&[], vec![all_of("r", CLASS_A)]).try_it(),
        "does not fit"
    );
    assert_eq!(
        World::new(Vec::new(), vec![claim("c", vec![all_of("r", CLASS_A)])]).try_it(),
        "does not fit"
    );
}

#[test]
fn all_devices_some_allocated() {
    let world = world(&["device-1", "device-2"], vec![all_of("r", CLASS_A)]).held(&["device-2"]);
    assert_eq!(world.try_it(), "does not fit");
}

fn admin_all(name: &str) -> DeviceRequest {
    exact(name, CLASS_A, |r| {
        r.allocation_mode = Some("All".to_owned());
        r.admin_access = Some(true);
    })
}

#[test]
fn all_devices_some_allocated_admin_access() {
    let world = world(&["device-1", "device-2"], vec![admin_all("r")]).held(&["device-2"]);
    assert_eq!(
        world.try_it(),
        "r=device-1(admin) r=device-2(admin) @node-1"
    );
}

#[test]
fn all_devices_some_allocating_admin_access() {
    let claims = vec![
        claim("a", vec![request("r", CLASS_A, 1)]),
        claim("b", vec![admin_all("r")]),
    ];
    let world = World::new(vec![slice(&["device-1", "device-2"])], claims);
    assert_eq!(
        world.try_it(),
        "r=device-1 @node-1 | r=device-1(admin) r=device-2(admin) @node-1"
    );
}

#[test]
fn all_devices_some_allocated_prioritized_list() {
    let all = DeviceSubRequest {
        allocation_mode: Some("All".to_owned()),
        count: None,
        ..sub("all", CLASS_A, 1)
    };
    let one = sub("one", CLASS_A, 1);
    let world = world(
        &["device-1", "device-2"],
        vec![first_of("r", vec![all, one])],
    )
    .held(&["device-1"]);
    assert_eq!(world.try_it(), "r/one=device-2 @node-1");
}

#[test]
fn all_devices_slice_without_devices_prioritized_list() {
    let all = DeviceSubRequest {
        allocation_mode: Some("All".to_owned()),
        count: None,
        ..sub("all", CLASS_B, 1)
    };
    let world = world(
        &["device-1"],
        vec![first_of("r", vec![all, sub("one", CLASS_A, 1)])],
    );
    assert_eq!(world.try_it(), "r/one=device-1 @node-1");
}

#[test]
fn all_devices_invalid_cel() {
    let all = exact("r", CLASS_A, |r| {
        r.allocation_mode = Some("All".to_owned());
        r.selectors = Some(vec![selector(
            r#"device.attributes["driver-a"].noSuchAttribute"#,
        )]);
    });
    let error = world(&["device-1"], vec![all]).try_it();
    assert!(
        error.starts_with("error: claim default/claim-0: selector #0: CEL runtime"),
        "{error}"
    );
}

#[test]
fn all_devices_more_than_a_claim_can_have() {
    let names: Vec<String> = (0..33).map(|i| format!("device-{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(
        world(&names, vec![all_of("r", CLASS_A)]).try_it(),
        "error: claim default/claim-0: exceeds the limit of 32 devices per claim: 33 are asked for at least"
    );
}
