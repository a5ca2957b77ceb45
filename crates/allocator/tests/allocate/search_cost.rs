//! The number of search steps: what keeps a change from making the search exponential.

use super::*;

fn steps(world: &World) -> u64 {
    match world.outcome() {
        Ok(Outcome::Fits(allocated)) => allocated.steps,
        other => panic!("{other:?}"),
    }
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("device-{i}")).collect()
}

fn devices(count: usize) -> ResourceSlice {
    let names = names(count);
    slice(&names.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn check_combinations_within_single_request_single_pool_single_slice() {
    let world = World::new(
        vec![devices(32)],
        vec![claim("c", vec![request("r", CLASS_A, 8)])],
    );
    assert_eq!(steps(&world), 11, "one for each device, one for each end");
}

#[test]
fn check_combinations_within_single_request_many_pools() {
    let slices = (0..8)
        .map(|i| in_pool(devices(4), DRIVER_A, &format!("pool-{i}")))
        .collect();
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 32)])]);
    assert_eq!(steps(&world), 35);
}

#[test]
fn check_combinations_with_backtracking_does_not_try_them_all() {
    // 16 of 32 devices for the first request leave 16, of which the second wants 16 in one rack,
    // and no rack has so many: 600 million combinations.
    let mut racks = devices(32);
    for (number, device) in racks.spec.devices.iter_mut().flatten().enumerate() {
        let rack = DeviceAttribute {
            string: Some(["a", "b", "c"][number / 15].to_owned()),
            ..DeviceAttribute::default()
        };
        device.attributes = Some([("rack".to_owned(), rack)].into());
    }
    let together = matching(
        claim("b", vec![request("r", CLASS_A, 16)]),
        "driver-a/rack",
        &[],
    );
    let claims = vec![claim("a", vec![request("r", CLASS_A, 16)]), together];
    let world = World::new(vec![racks], claims);
    assert!(
        matches!(world.outcome(), Err(AllocError::TooHard { .. })),
        "the scheduler times out too"
    );
    // One request too large is seen at once.
    let alone = World::new(
        vec![devices(31)],
        vec![claim("a", vec![request("r", CLASS_A, 32)])],
    );
    assert_eq!(alone.try_it(), "does not fit");
}

#[test]
fn all_devices_are_refused_at_once_if_an_earlier_request_takes_one() {
    let all = || all_of("all", CLASS_A);
    for first in [
        request("some", CLASS_A, 15),
        first_of("some", vec![sub("a", CLASS_A, 15), sub("b", CLASS_A, 8)]),
    ] {
        let world = World::new(vec![devices(16)], vec![claim("c", vec![first, all()])]);
        assert_eq!(world.try_it(), "does not fit");
    }
    let claims = vec![claim("c", vec![request("some", CLASS_A, 12), all()])];
    let world = World::new(vec![devices(20)], claims).held(&["device-19"]);
    assert_eq!(world.try_it(), "does not fit");
}

#[test]
fn check_combinations_with_backtracking_across_pools_finds_the_first_fit() {
    // The small request comes first and must leave the big devices alone; they are listed first.
    let mut names: Vec<String> = (0..7).map(|i| format!("big-{i}")).collect();
    names.extend((0..7).map(|i| format!("device-{i}")));
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let big = selecting("big", CLASS_A, 7, r#"device.attributes["driver-a"].big"#);
    let claims = vec![claim("c", vec![request("any", CLASS_A, 7), big])];
    let text = World::new(vec![slice(&all)], claims).try_it();
    assert!(text.starts_with("any=device-0 any=device-1"), "{text}");
}

#[test]
fn check_combinations_with_prioritized_list() {
    let greedy =
        |name: &str| first_of(name, vec![sub("many", CLASS_A, 10), sub("one", CLASS_A, 1)]);
    let requests = vec![greedy("a"), greedy("b"), request("rest", CLASS_A, 10)];
    let text = World::new(vec![devices(12)], vec![claim("c", requests)]).try_it();
    assert!(
        text.starts_with("a/one=device-0 b/one=device-1 rest=device-2"),
        "{text}"
    );
}

/// More than there is in all orders: counting says so where the scheduler times out.
#[test]
fn more_devices_than_there_are_is_no_question_of_their_order() {
    let ones = |count: usize| -> Vec<_> {
        let name = |i: usize| format!("c{i}");
        (0..count)
            .map(|i| claim(&name(i), vec![request("r", CLASS_A, 1)]))
            .collect()
    };
    for (available, claims) in [
        (8, ones(9)),
        (
            31,
            vec![
                claim("a", vec![request("r", CLASS_A, 16)]),
                claim("b", vec![request("r", CLASS_A, 16)]),
            ],
        ),
    ] {
        let wanted = available + 1;
        let explanation = World::new(vec![devices(available)], claims).explanation();
        assert_eq!(explanation.too_few, Some((wanted, available)));
        let text = detail(&explanation);
        let expected = format!(
            "not all together: {wanted} devices are wanted, {available} at most can be had"
        );
        assert!(text.contains(&expected), "{text}");
    }
}
