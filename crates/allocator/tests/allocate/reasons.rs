use super::*;
use divvy_allocator::{DeviceReason, Reason};

fn named(name: &str, reason: Reason) -> DeviceReason {
    let (driver, pool) = (DRIVER_A.to_owned(), "pool-1".to_owned());
    DeviceReason {
        device: DeviceId {
            driver,
            pool,
            device: name.to_owned(),
        },
        reason,
    }
}

#[test]
fn every_device_has_its_reason() {
    let devices = vec![
        device("big-1"),
        device("device-2"),
        tainted("device-3", &[("divvy.dev/health", "NoSchedule")]),
        device("device-4"),
    ];
    let small = selecting("gpu", CLASS_A, 2, r#"!device.attributes["driver-a"].big"#);
    let world =
        World::new(vec![slice_of(devices)], vec![claim("train", vec![small])]).held(&["device-2"]);
    let explanation = world.explanation();
    assert_eq!(
        explanation.requests[0].refused,
        [
            named(
                "big-1",
                Reason::SelectorFalse {
                    origin: "claim default/train".to_owned(),
                    index: 0,
                    expression: r#"!device.attributes["driver-a"].big"#.to_owned()
                }
            ),
            named(
                "device-2",
                Reason::InUse {
                    by: vec![Holder {
                        namespace: "default".to_owned(),
                        name: "other".to_owned()
                    }]
                }
            ),
            named(
                "device-3",
                Reason::Tainted {
                    taint: "divvy.dev/health=yes:NoSchedule".to_owned()
                }
            ),
        ]
    );
    assert_eq!(
        detail(&explanation),
        r#"node node-1: claim default/train, request "gpu" needs 2 devices of class class-a, 1 of 4 available
  1 device is in use: device-2 by claim default/other
  1 device is tainted with divvy.dev/health=yes:NoSchedule, which the request does not tolerate: device-3
  1 device is not selected by claim default/train, selector #0 `!device.attributes["driver-a"].big`
hint: devices become free when the pods that use default/other end"#
    );
}

#[test]
fn a_class_that_selects_nothing_is_said_to() {
    let world = World::new(
        vec![slice(&["d-1", "d-2", "d-3", "d-4", "d-5"])],
        vec![claim("c", vec![request("r", CLASS_B, 1)])],
    );
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 1 device of class class-b, 0 of 5 available
  5 devices are not selected by class class-b, selector #0 `device.driver == "driver-b"`: d-1, d-2, d-3, d-4 and 1 more
hint: class class-b selects no device of this node: compare the attributes of the devices with the class, or use a node that has such devices"#
    );
}

#[test]
fn a_node_without_devices_names_those_that_have_some() {
    let world = World::new(
        vec![on_node(slice(&["device-1"]), "node-2")],
        vec![claim("c", vec![request("r", CLASS_A, 1)])],
    );
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 1 device of class class-a, 0 of 0 available
hint: no driver publishes devices for node node-1; devices are published for node-2"#
    );
}

#[test]
fn a_pool_that_is_being_updated_is_named() {
    let world = World::new(
        vec![part(slice(&["device-1"]), 1, 2)],
        vec![claim("c", vec![request("r", CLASS_A, 1)])],
    );
    assert_eq!(
        detail(&world.explanation()),
        r#"node node-1: claim default/c, request "r" needs 1 device of class class-a, 0 of 0 available
  pool driver-a/pool-1 is being updated: 1 of 2 slices exist
hint: wait for the driver to finish publishing, then try again"#
    );
}

#[test]
fn only_the_hopeless_request_is_reported() {
    let requests = vec![request("fine", CLASS_A, 1), request("hopeless", CLASS_B, 1)];
    let explanation =
        World::new(vec![slice(&["device-1"])], vec![claim("c", requests)]).explanation();
    assert_eq!(
        explanation
            .requests
            .iter()
            .map(|r| r.request.as_str())
            .collect::<Vec<_>>(),
        ["hopeless"]
    );
}

#[test]
fn requests_that_compete_are_all_reported() {
    let claims = vec![
        claim("a", vec![request("r", CLASS_A, 1)]),
        claim("b", vec![request("r", CLASS_A, 1)]),
    ];
    assert_eq!(
        detail(&World::new(vec![slice(&["device-1"])], claims).explanation()),
        r#"node node-1: each request can be met alone, but not all together: 2 devices are wanted, 1 at most can be had
claim default/a, request "r" needs 1 device of class class-a, 1 of 1 available
claim default/b, request "r" needs 1 device of class class-a, 1 of 1 available"#
    );
}

#[test]
fn every_alternative_of_a_prioritized_list_is_reported() {
    let request = first_of("r", vec![sub("b", CLASS_B, 1), sub("a", CLASS_A, 2)]);
    let explanation =
        World::new(vec![slice(&["device-1"])], vec![claim("c", vec![request])]).explanation();
    let lines: Vec<_> = explanation
        .requests
        .iter()
        .map(|r| (r.request.as_str(), r.wanted, r.available))
        .collect();
    assert_eq!(lines, [("r/b", Some(1), 0), ("r/a", Some(2), 1)]);
}

#[test]
fn the_device_that_keeps_a_request_for_all_from_fitting_is_named() {
    let world = World::new(
        vec![slice(&["device-1", "device-2"])],
        vec![claim("c", vec![all_of("r", CLASS_A)])],
    )
    .held(&["device-2"]);
    let text = detail(&world.explanation());
    assert!(
        text.contains("needs 2 devices of class class-a, 1 of 2 available"),
        "{text}"
    );
    assert!(
        text.contains("1 device is in use: device-2 by claim default/other"),
        "{text}"
    );
}
