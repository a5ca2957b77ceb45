use super::*;

fn one(devices: &[&str], requests: Vec<DeviceRequest>) -> World {
    World::new(vec![slice(devices)], vec![claim("claim-0", requests)])
}

#[test]
fn empty_and_no_claims_to_allocate() {
    assert_eq!(World::new(Vec::new(), Vec::new()).try_it(), "");
    assert_eq!(
        World::new(
            vec![slice(&["device-1"])],
            vec![claim("claim-0", Vec::new())]
        )
        .try_it(),
        ""
    );
}

#[test]
fn simple() {
    assert_eq!(
        one(&["device-1"], vec![request("req-0", CLASS_A, 1)]).try_it(),
        "req-0=device-1 @node-1"
    );
}

#[test]
fn other_node() {
    let elsewhere = World::new(
        vec![on_node(slice(&["device-1"]), "node-2")],
        vec![claim("c", vec![request("r", CLASS_A, 1)])],
    );
    assert_eq!(elsewhere.try_it(), "does not fit");
}

#[test]
fn small_and_large() {
    let requests = vec![
        request("small", CLASS_A, 1),
        selecting("large", CLASS_A, 1, r#"device.attributes["driver-a"].big"#),
    ];
    assert_eq!(
        one(&["device-1", "big-2"], requests).try_it(),
        "small=device-1 large=big-2 @node-1"
    );
}

#[test]
fn small_and_large_backtrack_requests() {
    let requests = vec![
        request("small", CLASS_A, 1),
        selecting("large", CLASS_A, 1, r#"device.attributes["driver-a"].big"#),
    ];
    assert_eq!(
        one(&["big-1", "device-2"], requests).try_it(),
        "small=device-2 large=big-1 @node-1"
    );
}

#[test]
fn small_and_large_backtrack_claims() {
    let large = selecting("large", CLASS_A, 1, r#"device.attributes["driver-a"].big"#);
    let claims = vec![
        claim("a", vec![request("small", CLASS_A, 1)]),
        claim("b", vec![large]),
    ];
    let world = World::new(vec![slice(&["big-1", "device-2"])], claims);
    assert_eq!(
        world.try_it(),
        "small=device-2 @node-1 | large=big-1 @node-1"
    );
}

#[test]
fn devices_split_across_different_slices() {
    let slices = vec![
        part(slice(&["device-2"]), 2, 2),
        part(slice(&["device-1"]), 1, 2),
    ];
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 2)])]);
    assert_eq!(world.try_it(), "r=device-1 r=device-2 @node-1");
}

#[test]
fn no_slices_and_not_enough_suitable_devices() {
    assert_eq!(
        World::new(Vec::new(), vec![claim("c", vec![request("r", CLASS_A, 1)])]).try_it(),
        "does not fit"
    );
    assert_eq!(
        one(&["device-1"], vec![request("r", CLASS_A, 2)]).try_it(),
        "does not fit"
    );
}

#[test]
fn no_classes_unknown_class_and_empty_class() {
    let error = one(&["device-1"], vec![request("r", "unknown", 1)]).try_it();
    assert_eq!(
        error,
        "error: claim default/claim-0, request \"r\": device class \"unknown\" does not exist; `kubectl get deviceclasses` lists those that do"
    );
    let error = one(&["device-1"], vec![request("r", "", 1)]).try_it();
    assert_eq!(
        error,
        "error: claim default/claim-0, request \"r\": deviceClassName is empty (unsupported request type?)"
    );
}

fn admin(name: &str, count: i64) -> DeviceRequest {
    exact(name, CLASS_A, |r| {
        r.count = Some(count);
        r.admin_access = Some(true);
    })
}

#[test]
fn admin_access_enabled_sees_devices_in_use() {
    let world = one(&["device-1", "device-2"], vec![admin("r", 2)]).held(&["device-1"]);
    assert_eq!(
        world.try_it(),
        "r=device-1(admin) r=device-2(admin) @node-1"
    );
}

#[test]
fn admin_access_disabled() {
    let world = one(&["device-1"], vec![admin("r", 1)]).features(|f| f.admin_access = false);
    assert_eq!(
        world.try_it(),
        "error: claim default/claim-0, request \"r\": adminAccess needs the feature gate DRAAdminAccess, which is off"
    );
}

#[test]
fn separate_claims_share_device_admin_access() {
    let claims = vec![
        claim("a", vec![admin("r", 1)]),
        claim("b", vec![admin("r", 1)]),
    ];
    let world = World::new(vec![slice(&["device-1"])], claims);
    assert_eq!(
        world.try_it(),
        "r=device-1(admin) @node-1 | r=device-1(admin) @node-1"
    );
}

#[test]
fn admin_access_within_one_claim_gets_a_device_once() {
    assert_eq!(
        one(&["device-1"], vec![admin("a", 1), admin("b", 1)]).try_it(),
        "does not fit"
    );
}

#[test]
fn admin_access_claims_device_allocating_for_non_admin_access() {
    let claims = vec![
        claim("a", vec![request("r", CLASS_A, 1)]),
        claim("b", vec![admin("r", 1)]),
    ];
    let world = World::new(vec![slice(&["device-1"])], claims);
    assert_eq!(
        world.try_it(),
        "r=device-1 @node-1 | r=device-1(admin) @node-1"
    );
}

#[test]
fn an_admin_result_of_another_claim_does_not_hold_the_device() {
    let mut world = one(&["device-1"], vec![request("r", CLASS_A, 1)]);
    world.held.push(holding("admin", &["device-1"], true));
    assert_eq!(world.try_it(), "r=device-1 @node-1");
}

#[test]
fn network_attached_device() {
    let world = World::new(
        vec![in_zone(slice(&["device-1"]), "a")],
        vec![claim("c", vec![request("r", CLASS_A, 1)])],
    );
    assert_eq!(world.try_it(), "r=device-1 @zone In a");
    let elsewhere = World::new(
        vec![in_zone(slice(&["device-1"]), "b")],
        vec![claim("c", vec![request("r", CLASS_A, 1)])],
    );
    assert_eq!(elsewhere.try_it(), "does not fit");
}

#[test]
fn many_network_attached_devices_merge_their_selectors_once() {
    let slices = vec![
        in_pool(in_zone(slice(&["device-1"]), "a"), DRIVER_A, "pool-1"),
        in_pool(in_zone(slice(&["device-2"]), "a"), DRIVER_A, "pool-2"),
        in_pool(on_all_nodes(slice(&["device-3"])), DRIVER_A, "pool-3"),
    ];
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 3)])]);
    assert_eq!(
        world.try_it(),
        "r=device-1 r=driver-a/pool-2/device-2 r=driver-a/pool-3/device-3 @zone In a"
    );
}

#[test]
fn devices_of_all_nodes_are_available_everywhere() {
    let world = World::new(
        vec![on_all_nodes(slice(&["device-1"]))],
        vec![claim("c", vec![request("r", CLASS_A, 1)])],
    );
    assert_eq!(world.try_it(), "r=device-1");
}

#[test]
fn local_and_network_attached_devices() {
    let slices = vec![
        in_pool(in_zone(slice(&["device-1"]), "a"), DRIVER_A, "net"),
        slice(&["device-2"]),
    ];
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 2)])]);
    assert_eq!(world.try_it(), "r=driver-a/net/device-1 r=device-2 @node-1");
}

#[test]
fn several_different_drivers() {
    let slices = vec![
        in_pool(slice(&["device-1"]), DRIVER_B, "pool-b"),
        slice(&["device-1"]),
    ];
    let requests = vec![request("a", CLASS_A, 1), request("b", CLASS_B, 1)];
    let world = World::new(slices, vec![claim("c", requests)]);
    assert_eq!(
        world.try_it(),
        "a=device-1 b=driver-b/pool-b/device-1 @node-1"
    );
}

#[test]
fn already_allocated_devices() {
    let world = one(&["device-1", "device-2"], vec![request("r", CLASS_A, 1)]).held(&["device-1"]);
    assert_eq!(world.try_it(), "r=device-2 @node-1");
    let world = one(&["device-1"], vec![request("r", CLASS_A, 1)]).held(&["device-1"]);
    assert_eq!(world.try_it(), "does not fit");
}

#[test]
fn unknown_selector_allocation_mode_constraint_and_request() {
    let unknown = exact("r", CLASS_A, |r| {
        r.selectors = Some(vec![DeviceSelector { cel: None }]);
    });
    assert_eq!(
        one(&["device-1"], vec![unknown]).try_it(),
        "error: claim default/claim-0, request \"r\": claim default/claim-0: selector #0: CEL expression empty (unsupported selector type?)"
    );
    let unknown = exact("r", CLASS_A, |r| {
        r.allocation_mode = Some("Some".to_owned());
    });
    assert_eq!(
        one(&["device-1"], vec![unknown]).try_it(),
        "error: claim default/claim-0, request \"r\": unsupported allocationMode \"Some\""
    );
    let mut world = one(&["device-1"], vec![request("r", CLASS_A, 1)]);
    world.claims[0]
        .spec
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap()
        .constraints = Some(vec![
        k8s_openapi::api::resource::v1::DeviceConstraint::default(),
    ]);
    assert_eq!(
        world.try_it(),
        "error: claim default/claim-0, request \"spec.devices.constraints\": empty constraint (unsupported constraint type?)"
    );
    let neither = DeviceRequest {
        name: "r".to_owned(),
        ..DeviceRequest::default()
    };
    assert!(
        one(&["device-1"], vec![neither])
            .try_it()
            .contains("neither exactly nor firstAvailable is set")
    );
}

#[test]
fn invalid_cel_one_device_names_class_or_claim_and_the_error() {
    let bad = r#"device.attributes["driver-a"].noSuchAttribute"#;
    let world = one(&["device-1"], vec![selecting("r", CLASS_A, 1, bad)]);
    let error = world.outcome().unwrap_err();
    assert_eq!(
        error,
        AllocError::Selector(Box::new(SelectorError {
            origin: "claim default/claim-0".to_owned(),
            index: 0,
            expression: bad.to_owned(),
            device: Some(DeviceId {
                driver: DRIVER_A.to_owned(),
                pool: "pool-1".to_owned(),
                device: "device-1".to_owned()
            }),
            source: CelError::Runtime("no such key: noSuchAttribute".to_owned()),
        }))
    );
    assert_eq!(
        error.to_string(),
        r#"claim default/claim-0: selector #0: CEL runtime error for device driver-a/pool-1/device-1 in `device.attributes["driver-a"].noSuchAttribute`"#
    );
    assert_eq!(
        error.hint().as_deref(),
        Some(
            r#"not every device has "noSuchAttribute" and one that has not fails the whole pod: guard it with has(….noSuchAttribute) && … or read it with ….?noSuchAttribute.orValue(…)"#
        )
    );

    let mut world = one(&["device-1"], vec![request("r", CLASS_A, 1)]);
    world.classes[0].spec.as_mut().unwrap().selectors = Some(vec![selector(bad)]);
    assert!(
        world
            .try_it()
            .starts_with("error: class class-a: selector #0: CEL runtime")
    );
    world.classes[0].spec.as_mut().unwrap().selectors = Some(vec![selector("nope ==")]);
    assert_eq!(
        world.try_it(),
        "error: class class-a: selector #0: CEL compile error in `nope ==`"
    );
    assert!(!error.is_of_node());
}

#[test]
fn a_device_that_is_never_reached_is_never_evaluated() {
    let picky = r#"device.attributes["driver-a"].index == 1 || device.attributes["driver-a"].noSuchAttribute"#;
    let world = one(
        &["device-1", "device-2"],
        vec![selecting("r", CLASS_A, 1, picky)],
    );
    assert_eq!(world.try_it(), "r=device-1 @node-1");
}

fn many(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("device-{i}")).collect()
}

#[test]
fn too_many_devices_single_request_and_total() {
    let names = many(33);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let over = "error: claim default/claim-0: exceeds the limit of 32 devices per claim: 33 are asked for at least";
    assert_eq!(one(&names, vec![request("r", CLASS_A, 33)]).try_it(), over);
    assert_eq!(
        one(
            &names,
            vec![request("a", CLASS_A, 16), request("b", CLASS_A, 17)]
        )
        .try_it(),
        over
    );
}

#[test]
fn max_number_devices_and_many_devices_okay() {
    let names = many(40);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let result = one(&names, vec![request("r", CLASS_A, 32)]).results();
    assert_eq!(
        result[0]
            .devices
            .as_ref()
            .unwrap()
            .results
            .as_ref()
            .map(Vec::len),
        Some(32)
    );
    let claims = vec![
        claim("a", vec![request("r", CLASS_A, 20)]),
        claim("b", vec![request("r", CLASS_A, 20)]),
    ];
    assert_eq!(World::new(vec![slice(&names)], claims).results().len(), 2);
}

/// `source:requests=value` for each config of the only claim.
fn configs(world: &World) -> Vec<String> {
    let results = world.results();
    let devices = results[0].devices.clone().unwrap();
    let configs = devices.config.unwrap_or_default().into_iter().map(|c| {
        let value = c.opaque.unwrap().parameters.0["value"].clone();
        format!(
            "{}:{}={}",
            c.source,
            c.requests.unwrap_or_default().join(","),
            value.as_str().unwrap()
        )
    });
    configs.collect()
}

fn class_config(world: &mut World, class: usize, values: &[&str]) {
    let configs = values.iter().map(|v| DeviceClassConfiguration {
        opaque: Some(opaque(DRIVER_A, v)),
    });
    world.classes[class].spec.as_mut().unwrap().config = Some(configs.collect());
}

#[test]
fn with_class_device_config() {
    let mut world = one(&["device-1"], vec![request("r", CLASS_A, 1)]);
    class_config(&mut world, 0, &["class"]);
    assert_eq!(configs(&world), ["FromClass:=class"]);
}

#[test]
fn with_class_device_config_with_multiple_request_and_configs() {
    let requests = vec![
        request("a0", CLASS_A, 1),
        request("b0", CLASS_B, 1),
        request("a1", CLASS_A, 1),
    ];
    let slices = vec![
        slice(&["device-1", "device-2"]),
        in_pool(slice(&["device-1"]), DRIVER_B, "pool-b"),
    ];
    let mut world = World::new(
        slices,
        vec![configured(claim("c", requests), &[(&["b0"], "claim")])],
    );
    class_config(&mut world, 0, &["one", "two"]);
    class_config(&mut world, 1, &["b"]);
    assert_eq!(
        configs(&world),
        [
            "FromClass:a0,a1=one",
            "FromClass:a0,a1=two",
            "FromClass:b0=b",
            "FromClaim:b0=claim"
        ]
    );
}

#[test]
fn claim_with_device_config_for_some_requests_and_for_all() {
    let requests = || vec![request("a", CLASS_A, 1), request("b", CLASS_A, 1)];
    let world = |configs: &[(&[&str], &str)]| {
        World::new(
            vec![slice(&["device-1", "device-2"])],
            vec![configured(claim("c", requests()), configs)],
        )
    };
    assert_eq!(configs(&world(&[(&[], "all")])), ["FromClaim:=all"]);
    assert_eq!(
        configs(&world(&[
            (&["a"], "x"),
            (&["b"], "y"),
            (&["no-request"], "z")
        ])),
        ["FromClaim:a=x", "FromClaim:b=y"]
    );
}

#[test]
fn claim_config_covering_all_requests_is_cleared() {
    let requests = vec![request("a", CLASS_A, 1), request("b", CLASS_A, 1)];
    let claim = configured(claim("c", requests), &[(&["b", "a"], "both")]);
    assert_eq!(
        configs(&World::new(
            vec![slice(&["device-1", "device-2"])],
            vec![claim]
        )),
        ["FromClaim:=both"]
    );
}

#[test]
fn derived_attributes_are_refused_and_not_ignored() {
    let derived = k8s_openapi::api::resource::v1::DeviceDerivedAttribute {
        name: "derived/half".to_owned(),
        expression: r#"device.attributes["driver-a"].index / 2"#.to_owned(),
    };
    let request = exact("r", CLASS_A, |r| r.derived_attributes = Some(vec![derived]));
    assert_eq!(
        one(&["device-1"], vec![request]).try_it(),
        "error: claim default/claim-0, request \"r\": unknown: divvy cannot allocate derivedAttributes offline, only the scheduler can"
    );
}
