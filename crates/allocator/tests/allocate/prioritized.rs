use super::*;

fn world(devices: &[&str], requests: Vec<DeviceRequest>) -> World {
    World::new(vec![slice(devices)], vec![claim("claim-0", requests)])
}

fn big(name: &str, count: i64) -> DeviceSubRequest {
    let selectors = Some(vec![selector(r#"device.attributes["driver-a"].big"#)]);
    DeviceSubRequest {
        selectors,
        ..sub(name, CLASS_A, count)
    }
}

#[test]
fn prioritized_list_first_unavailable() {
    let request = first_of("r", vec![sub("b", CLASS_B, 1), sub("a", CLASS_A, 1)]);
    assert_eq!(
        world(&["device-1"], vec![request]).try_it(),
        "r/a=device-1 @node-1"
    );
}

#[test]
fn prioritized_list_takes_the_first_that_fits() {
    let request = first_of("r", vec![sub("two", CLASS_A, 2), sub("one", CLASS_A, 1)]);
    assert_eq!(
        world(&["device-1", "device-2"], vec![request]).try_it(),
        "r/two=device-1 r/two=device-2 @node-1"
    );
}

#[test]
fn prioritized_list_non_available() {
    let request = first_of("r", vec![sub("b", CLASS_B, 1), sub("a", CLASS_A, 2)]);
    assert_eq!(world(&["device-1"], vec![request]).try_it(), "does not fit");
}

#[test]
fn prioritized_list_disabled() {
    let request = first_of("r", vec![sub("a", CLASS_A, 1)]);
    assert_eq!(
        world(&["device-1"], vec![request])
            .features(|f| f.prioritized_list = false)
            .try_it(),
        "error: claim default/claim-0, request \"r\": firstAvailable needs the feature gate DRAPrioritizedList, which is off"
    );
}

#[test]
fn prioritized_list_subrequests_with_expressions() {
    let requests = vec![
        first_of("r", vec![big("big", 2), big("one-big", 1)]),
        request("other", CLASS_A, 1),
    ];
    assert_eq!(
        world(&["device-1", "big-2"], requests).try_it(),
        "r/one-big=big-2 other=device-1 @node-1"
    );
}

#[test]
fn prioritized_list_multi_request_and_backtracking() {
    // The first request may not keep both devices: the second needs one.
    let requests = vec![
        first_of("r", vec![sub("two", CLASS_A, 2), sub("one", CLASS_A, 1)]),
        request("other", CLASS_A, 1),
    ];
    assert_eq!(
        world(&["device-1", "device-2"], requests).try_it(),
        "r/one=device-1 other=device-2 @node-1"
    );
}

#[test]
fn prioritized_list_too_many_in_first_subrequest() {
    let request = first_of("r", vec![sub("many", CLASS_A, 500), sub("one", CLASS_A, 1)]);
    assert_eq!(
        world(&["device-1"], vec![request]).try_it(),
        "r/one=device-1 @node-1"
    );
}

#[test]
fn prioritized_list_max_allocation_limit_request() {
    let names: Vec<String> = (0..40).map(|i| format!("device-{i}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let requests = || {
        vec![
            first_of("a", vec![sub("many", CLASS_A, 30), sub("few", CLASS_A, 1)]),
            first_of("b", vec![sub("many", CLASS_A, 3), sub("more", CLASS_A, 4)]),
        ]
    };
    // 30 + 3 is over the limit, so the first request gives way.
    let text = world(&names, requests()).try_it();
    assert!(
        text.starts_with("a/few=device-0 b/many=device-1 b/many=device-2 b/many=device-3"),
        "{text}"
    );
}

#[test]
fn prioritized_list_allocation_mode_all() {
    let all = DeviceSubRequest {
        allocation_mode: Some("All".to_owned()),
        count: None,
        ..sub("all", CLASS_A, 1)
    };
    let request = first_of("r", vec![all, sub("one", CLASS_A, 1)]);
    assert_eq!(
        world(&["device-1", "device-2"], vec![request]).try_it(),
        "r/all=device-1 r/all=device-2 @node-1"
    );
}

/// `source:requests=value` for each config.
fn configs(world: &World) -> Vec<String> {
    let results = world.results();
    let configs = results[0]
        .devices
        .clone()
        .unwrap()
        .config
        .unwrap_or_default();
    let configs = configs.into_iter().map(|c| {
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

#[test]
fn prioritized_list_device_config_and_class_config() {
    let requests = vec![
        first_of("r", vec![sub("b", CLASS_B, 1), sub("a", CLASS_A, 1)]),
        request("other", CLASS_A, 1),
        request("third", CLASS_A, 1),
    ];
    let claim = configured(
        claim("c", requests),
        &[
            (&["r/b"], "lost"),
            (&["r/a"], "won"),
            (&["r"], "parent"),
            (&["other"], "other"),
        ],
    );
    let mut world = World::new(
        vec![slice(&["device-1", "device-2", "device-3"])],
        vec![claim],
    );
    for (class, value) in world.classes.iter_mut().zip(["a", "b"]) {
        let config = DeviceClassConfiguration {
            opaque: Some(opaque(DRIVER_A, value)),
        };
        class.spec.as_mut().unwrap().config = Some(vec![config]);
    }
    assert_eq!(
        configs(&world),
        [
            "FromClass:=a",
            "FromClaim:r/a=won",
            "FromClaim:r=parent",
            "FromClaim:other=other"
        ]
    );
}

#[test]
fn claim_config_scoped_to_subrequests_of_one_request() {
    let request = first_of("r", vec![sub("b", CLASS_B, 1), sub("a", CLASS_A, 1)]);
    let claim = configured(claim("c", vec![request]), &[(&["r/b", "r/a"], "either")]);
    assert_eq!(
        configs(&World::new(vec![slice(&["device-1"])], vec![claim])),
        ["FromClaim:=either"]
    );
}
