use k8s_openapi::api::resource::v1::ResourceClaimStatus;
use serde_json::json;

use super::*;
use crate::defrag::tests::{cluster, start, wanted};

/// Returns the ways in words.
fn ways(cluster: &Cluster, text: &str) -> Vec<String> {
    let ways = advise(cluster, &wanted(text, 0), 37).unwrap();
    let in_words = |way: Way| match way {
        Way::Now { node } => format!("now on {node}"),
        Way::Less {
            what, asked, fits, ..
        } => format!("{what} {fits} of {asked}"),
        Way::Form { fits, node, .. } => format!("{fits} on {node}"),
        Way::Wait { pods, more, .. } => format!("end of {} and {more}", pods.join(", ")),
    };
    ways.into_iter().map(in_words).collect()
}

#[test]
fn what_fits_needs_no_other_way() {
    assert_eq!(ways(&cluster(2, 1), "gpu"), ["now on node-0"]);
}

#[test]
fn the_most_that_fits_is_named() {
    let mut all = cluster(2, 4);
    assert!(start(&mut all, "a", "gpu", 0, 0));
    // Three are free on one node, four on the other, and none has six.
    assert_eq!(ways(&all, "6*gpu"), ["count 4 of 6"]);
    let mut one = cluster(1, 1);
    assert!(start(&mut one, "a", "share:50Gi", 0, 0));
    let found = ways(&one, "share:60Gi");
    assert_eq!(found[0], "memory 30Gi of 60Gi");
    // An amount that is no whole number of GiB, and cores beside it: each by itself.
    let found = ways(&one, "share:31000Mi/80");
    assert_eq!(found[0], "memory 30Gi of 31000Mi");
}

#[test]
fn amounts_of_which_only_both_together_are_too_much_are_not_named_alone() {
    let mut one = cluster(1, 1);
    assert!(start(&mut one, "a", "share:50Gi/60", 0, 0));
    // Less memory does not help while too many cores are asked for.
    assert_eq!(ways(&one, "share:60Gi/90"), ["end of ns/a and 0"]);
}

#[test]
fn partitions_and_shares_of_enough_memory_replace_each_other() {
    let mut one = cluster(1, 2);
    assert!(start(&mut one, "a", "share:10Gi", 0, 0));
    assert!(start(&mut one, "b", "share:75Gi", 0, 0));
    // Both GPUs are in shares now, with room for 70 and for 5.
    let found = ways(&one, "mig:half");
    assert!(
        found.contains(&"share:40Gi on node-0".to_owned()),
        "{found:?}"
    );
    let mut other = cluster(1, 1);
    assert!(start(&mut other, "a", "mig:half", 0, 0));
    assert!(ways(&other, "share:30Gi").contains(&"mig:half on node-0".to_owned()));
    // A partition of 40 GiB is no answer to a share of 50.
    let found = ways(&other, "share:50Gi");
    assert!(!found.iter().any(|way| way.starts_with("mig")), "{found:?}");
}

#[test]
fn a_whole_gpu_is_replaced_by_the_largest_part() {
    let mut one = cluster(1, 1);
    assert!(start(&mut one, "a", "share:50Gi", 0, 0));
    assert!(ways(&one, "gpu").contains(&"share:30Gi on node-0".to_owned()));
}

#[test]
fn pods_of_which_the_end_of_one_makes_room_are_named_up_to_three() {
    let mut all = cluster(1, 5);
    for name in ["a", "b", "c", "d", "e"] {
        assert!(start(&mut all, name, "gpu", 0, 0));
    }
    assert_eq!(ways(&all, "gpu"), ["end of ns/a, ns/b, ns/c and 2"]);
    // For two GPUs two pods would have to end.
    assert_eq!(ways(&all, "2*gpu"), Vec::<String>::new());
}

#[test]
fn every_way_is_true_in_random_worlds() {
    let requests = ["gpu", "2*gpu", "mig:half", "share:20Gi", "share:70Gi/40"];
    let mut dice = crate::random::Random::new(7);
    let mut seen = 0;
    for _ in 0..60 {
        let mut all = cluster(2, 2);
        for number in 0..dice.below(7) {
            let text = requests[dice.below(requests.len())];
            start(&mut all, &format!("p{number}"), text, dice.below(2), 0);
        }
        let text = requests[dice.below(requests.len())];
        let asked = wanted(text, 0);
        for way in advise(&all, &asked, 37).unwrap() {
            seen += 1;
            let (mut after, mut then) = (all.clone(), asked.clone());
            match &way {
                Way::Now { .. } => {}
                Way::Form { fits, .. } => then.shape = request::shape(fits).unwrap(),
                Way::Wait { pods, .. } => {
                    let gone = pods[0].trim_start_matches("ns/").to_owned();
                    after
                        .pods
                        .retain(|pod| pod.metadata.name.as_ref() != Some(&gone));
                    let held = |status: &Option<ResourceClaimStatus>| {
                        let users = status.iter().flat_map(|of| &of.reserved_for).flatten();
                        users.map(|user| user.name.clone()).next()
                    };
                    after
                        .claims
                        .retain(|claim| held(&claim.status) != Some(gone.clone()));
                }
                Way::Less { what, fits, .. } => {
                    let spec = then.shape.claims[0].spec.as_mut().unwrap();
                    let devices = spec.devices.as_mut().unwrap();
                    let exactly = devices.requests.as_mut().unwrap()[0]
                        .exactly
                        .as_mut()
                        .unwrap();
                    if what == "count" {
                        exactly.count = Some(fits.parse().unwrap());
                    } else {
                        let amounts = exactly.capacity.as_mut().unwrap().requests.as_mut();
                        amounts.unwrap().insert(what.clone(), Raw(fits.clone()));
                    }
                }
            }
            let again = advise(&after, &then, 37).unwrap();
            assert!(
                matches!(again.as_slice(), [Way::Now { .. }]),
                "{text}: {way:?} and then {again:?}, beside {}",
                json!(all.claims)
            );
        }
    }
    assert!(seen > 60, "{seen}");
}

/// 16 of 32 GPUs for one claim leave 16, of which another wants 16 in one rack, and no rack has so
/// many: more combinations than are tried.
#[test]
fn a_search_that_is_too_large_for_one_node_is_no_answer_for_all() {
    let mut all = cluster(1, 32);
    let devices = all
        .slices
        .iter_mut()
        .flat_map(|slice| &mut slice.spec.devices);
    for (number, device) in devices.flatten().enumerate() {
        let rack = ["a", "b", "c"][number / 4 / 15];
        let rack = json!({"string": rack});
        let attributes = device.attributes.as_mut().unwrap();
        attributes.insert("rack".to_owned(), serde_json::from_value(rack).unwrap());
    }
    let mut asked = wanted("16*gpu", 0);
    let mut together = asked.shape.claims[0].clone();
    let constraint = json!({"matchAttribute": "gpu.divvy.dev/rack"});
    together
        .spec
        .as_mut()
        .unwrap()
        .devices
        .as_mut()
        .unwrap()
        .constraints = Some(vec![serde_json::from_value(constraint).unwrap()]);
    asked.shape.claims.push(together);
    // The node fits neither way that was tried, and that is no error. Nor is it one of a plan.
    let plan = crate::defrag::plan(&all, &asked, 37).unwrap();
    assert_eq!(plan.plan, None);
    let ways = advise(&all, &asked, 37).unwrap();
    assert!(
        !ways.iter().any(|way| matches!(way, Way::Now { .. })),
        "{ways:?}"
    );
}
