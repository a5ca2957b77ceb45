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
    let world = World::new(vec![devices(32)], vec![claim("c", vec![request("r", CLASS_A, 8)])]);
    assert_eq!(steps(&world), 11, "one for each device, one for each end");
}

#[test]
fn check_combinations_within_single_request_many_pools() {
    let slices = (0..8).map(|i| in_pool(devices(4), DRIVER_A, &format!("pool-{i}"))).collect();
    let world = World::new(slices, vec![claim("c", vec![request("r", CLASS_A, 32)])]);
    assert_eq!(steps(&world), 35);
}

#[test]
fn check_combinations_with_backtracking_does_not_try_them_all() {
    // 16 of 31 devices for the first request leave 15, the second wants 16: 300 million combinations.
    let claims =
        vec![claim("a", vec![request("r", CLASS_A, 16)]), claim("b", vec![request("r", CLASS_A, 16)])];
    let world = World::new(vec![devices(31)], claims);
    assert_eq!(world.try_it(), "does not fit");
}

#[test]
fn check_combinations_with_backtracking_across_pools_finds_the_first_fit() {
    // The small request comes first and must leave the big devices alone; they are listed first.
    let mut names: Vec<String> = (0..10).map(|i| format!("big-{i}")).collect();
    names.extend((0..10).map(|i| format!("device-{i}")));
    let all: Vec<&str> = names.iter().map(String::as_str).collect();
    let big = selecting("big", CLASS_A, 10, r#"device.attributes["driver-a"].big"#);
    let claims = vec![claim("c", vec![request("any", CLASS_A, 10), big])];
    let text = World::new(vec![slice(&all)], claims).try_it();
    assert!(text.starts_with("any=device-0 any=device-1"), "{text}");
}

#[test]
fn check_combinations_with_prioritized_list() {
    let greedy = |name: &str| first_of(name, vec![sub("many", CLASS_A, 10), sub("one", CLASS_A, 1)]);
    let requests = vec![greedy("a"), greedy("b"), request("rest", CLASS_A, 10)];
    let text = World::new(vec![devices(12)], vec![claim("c", requests)]).try_it();
    assert!(text.starts_with("a/one=device-0 b/one=device-1 rest=device-2"), "{text}");
}

/// The plainest search there is, over the same order: a slot a device, slots name their request.
fn plain(slots: &[usize], taken: &mut Vec<usize>, free: &dyn Fn(usize, usize) -> bool, count: usize) -> bool {
    let Some(request) = slots.get(taken.len()) else { return true };
    let same = taken.len().checked_sub(1).filter(|last| slots[*last] == *request);
    let start = same.map_or(0, |last| taken[last] + 1);
    for device in start..count {
        if !taken.contains(&device) && free(*request, device) {
            taken.push(device);
            if plain(slots, taken, free, count) {
                return true;
            }
            taken.pop();
        }
    }
    false
}

/// The same search without memory: small enough worlds to try everything.
#[test]
fn remembering_dead_ends_does_not_change_the_answer() {
    use proptest::prelude::*;
    let request_kinds = prop::collection::vec((0_usize..3, 1_i64..4), 1..5);
    let config = ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let worlds =
        (prop::collection::vec(any::<bool>(), 1..9), request_kinds, prop::collection::vec(0_usize..9, 0..3));
    runner
        .run(&worlds, |(bigs, requests, held)| {
            let names: Vec<String> = bigs
                .iter()
                .enumerate()
                .map(|(i, big)| format!("{}-{i}", if *big { "big" } else { "device" }))
                .collect();
            let all: Vec<&str> = names.iter().map(String::as_str).collect();
            let wants = |kind: usize, index: i64| match kind {
                0 => true,
                1 => bigs[usize::try_from(index).unwrap()],
                _ => index % 2 == 0,
            };
            let expressions = [
                "true",
                r#"device.attributes["driver-a"].big"#,
                r#"device.attributes["driver-a"].index % 2 == 0"#,
            ];
            let list = requests.iter().enumerate();
            let list = list
                .map(|(i, (kind, count))| selecting(&format!("r{i}"), CLASS_A, *count, expressions[*kind]));
            let held: Vec<&str> = held.iter().filter_map(|i| all.get(*i).copied()).collect();
            let world = World::new(vec![slice(&all)], vec![claim("c", list.collect())]).held(&held);
            let slots: Vec<usize> = requests
                .iter()
                .enumerate()
                .flat_map(|(i, (_, n))| vec![i; usize::try_from(*n).unwrap()])
                .collect();
            let mut taken = Vec::new();
            let free = |request: usize, device: usize| {
                !held.contains(&all[device]) && wants(requests[request].0, i64::try_from(device).unwrap())
            };
            let expected = if plain(&slots, &mut taken, &free, all.len()) {
                let picks = slots.iter().zip(&taken).map(|(r, d)| format!("r{r}={}", all[*d]));
                picks.chain(["@node-1".to_owned()]).collect::<Vec<_>>().join(" ")
            } else {
                "does not fit".to_owned()
            };
            prop_assert_eq!(world.try_it(), expected);
            Ok(())
        })
        .unwrap();
}
