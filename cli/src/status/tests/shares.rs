//! Amounts of shares: of a GPU as a whole, and of its partitions.

use super::*;

const FIRST: &str = "gpu-0-mig-1g10gb-19-0-ts";
const SECOND: &str = "gpu-0-mig-1g10gb-19-1-ts";

/// n3 with its partitions published in shares, and these claims (name, device, memory, slots) of
/// them, prepared.
fn shared(held: &[(&str, &str, &str, &str)]) -> Snapshot {
    let mut world = world();
    let published = |name: &str| {
        json!({
            "name": name, "allowMultipleAllocations": true,
            "attributes": { "type": { "string": "mig-share" }, "profile": { "string": "1g.10gb" } },
            "capacity": { "memory": { "value": "10Gi" }, "slots": { "value": "4" } },
        })
    };
    let mut offered = slice("n3", &[]);
    offered["spec"]["devices"] = json!([published(FIRST), published(SECOND)]);
    world
        .slices
        .retain(|slice| slice.spec.node_name.as_deref() != Some("n3"));
    world.slices.push(typed(offered));
    let claims = held.iter().map(|(name, device, memory, slots)| {
        let mut claim = allocated(name, "n3", device);
        let result = &mut claim["status"]["allocation"]["devices"]["results"][0];
        result["consumedCapacity"] = json!({ "memory": memory, "slots": slots });
        typed::<k8s_openapi::api::resource::v1::ResourceClaim>(claim)
    });
    world.claims.extend(claims);
    let gpu = &mut world.reports.get_mut("n3").unwrap().gpus[0];
    "partitioned".clone_into(&mut gpu.mode);
    gpu.offered = vec!["partitions".to_owned(), "shares of partitions".to_owned()];
    gpu.holders = held
        .iter()
        .map(|(name, device, ..)| Holder {
            namespace: "default".to_owned(),
            name: (*name).to_owned(),
            device: (*device).to_owned(),
            phase: "prepared".to_owned(),
            ..Holder::default()
        })
        .collect();
    world
}

/// Two claims share one partition and a third has a share of another: each holder has its amounts,
/// and each partition what is left of it.
#[test]
fn shares_of_partitions_show_amounts_by_holder_and_what_is_left() {
    let world = shared(&[
        ("p", FIRST, "3Gi", "1"),
        ("q", FIRST, "5Gi", "2"),
        ("r", SECOND, "4Gi", "1"),
    ]);
    let report = report::gpu(&world, "n3/gpu-0").unwrap();
    golden("gpu-shared-partitions.txt", &render::gpu(&world, &report));
}

#[test]
fn a_claim_with_shares_of_two_partitions_has_the_amounts_of_each() {
    let mut world = shared(&[("p", FIRST, "3Gi", "1"), ("p", SECOND, "4Gi", "2")]);
    // One claim with two results instead of two claims.
    let other = world.claims.pop().unwrap();
    let results = |claim: &mut k8s_openapi::api::resource::v1::ResourceClaim| {
        let allocation = claim.status.as_mut()?.allocation.as_mut()?;
        allocation.devices.as_mut()?.results.take()
    };
    let second = results(&mut { other }).unwrap();
    let claim = world.claims.last_mut().unwrap();
    let mut both = results(claim).unwrap();
    both.extend(second);
    let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
    allocation.devices.as_mut().unwrap().results = Some(both);
    let report = report::gpu(&world, "n3/gpu-0").unwrap();
    let of = |device: &str| report.granted["default/p"][device].as_str();
    assert_eq!(
        (of(FIRST), of(SECOND)),
        ("memory 3 GiB, slots 1", "memory 4 GiB, slots 2")
    );
    let text = render::gpu(&world, &report);
    assert!(!text.contains(';'), "{text}");
}

/// Without the right to list claims, the amounts of others are unknown.
#[test]
fn nothing_is_said_to_be_left_where_claims_cannot_be_read() {
    let mut world = shared(&[("p", FIRST, "3Gi", "1")]);
    assert!(!report::gpu(&world, "n3/gpu-0").unwrap().left.is_empty());
    world
        .unread
        .push("ResourceClaims of other namespaces".to_owned());
    let report = report::gpu(&world, "n3/gpu-0").unwrap();
    assert_eq!(report.left, std::collections::BTreeMap::new());
}
