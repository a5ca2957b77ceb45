//! Two nodes: one with an H100 that is everything at once, one with an L4.

use std::collections::BTreeMap;

use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Slices};
use divvy_api::names::annotations;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

use crate::{Amount, Catalogue, Limits, State, charge, look, price};

const GI: u64 = 1 << 30;
const DRIVER: &str = "gpu.divvy.dev";

fn device(name: &str, kind: &str, memory: &str, more: &Value) -> Value {
    let product = if memory == "24Gi" {
        "NVIDIA L4"
    } else {
        "NVIDIA H100"
    };
    let mut device = json!({
        "name": name,
        "attributes": {
            "type": {"string": kind}, "productName": {"string": product},
            "uuid": {"string": format!("uuid-of-{name}")}, "gpuUUID": {"string": "GPU-1"},
            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
        },
        "capacity": {"memory": {"value": memory}},
    });
    if let Some(profile) = more.get("profile") {
        device["attributes"]["profile"] = json!({"string": profile});
    }
    if let Some(default) = more.get("default") {
        device["allowMultipleAllocations"] = json!(true);
        device["capacity"]["memory"]["requestPolicy"] =
            json!({"default": default, "validRange": {"min": "1Gi", "step": "1Gi"}});
    }
    device
}

fn slice(node: &str, devices: &[Value]) -> ResourceSlice {
    serde_json::from_value(json!({
        "metadata": {"name": format!("{node}-0")},
        "spec": {
            "driver": DRIVER, "nodeName": node, "devices": devices,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
        },
    }))
    .unwrap()
}

fn slices() -> Vec<ResourceSlice> {
    let none = Value::Null;
    let small = json!({"profile": "1g.10gb"});
    let big = [
        device("gpu-0", "gpu", "80Gi", &none),
        device("gpu-0-ts", "gpu-share", "80Gi", &json!({"default": "4Gi"})),
        device("gpu-0-mig-1g10gb-19-0", "mig", "10Gi", &small),
        device("gpu-0-mig-1g10gb-19-1", "mig", "10Gi", &small),
        device(
            "gpu-0-mig-3g40gb-9-0",
            "mig",
            "40Gi",
            &json!({"profile": "3g.40gb"}),
        ),
    ];
    let little = [
        device("gpu-0", "gpu", "24Gi", &none),
        device("gpu-0-ts", "gpu-share", "24Gi", &json!({"default": "2Gi"})),
    ];
    vec![slice("big", &big), slice("little", &little)]
}

fn catalogue() -> Catalogue {
    let mut catalogue = Catalogue::new(DRIVER);
    for slice in slices() {
        catalogue.put(&slice);
    }
    catalogue
}

fn classes() -> BTreeMap<String, DeviceClass> {
    let class = |name: &str, expression: &str| {
        let class = json!({
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        });
        (name.to_owned(), serde_json::from_value(class).unwrap())
    };
    let of = |kind: &str| {
        format!("device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'")
    };
    BTreeMap::from([
        class("gpu.divvy.dev", &of("gpu")),
        class("mig.divvy.dev", &of("mig")),
        class("share.divvy.dev", &of("gpu-share")),
        class("nic.example.com", "device.driver == 'nic.example.com'"),
    ])
}

fn claim(name: &str, request: Value) -> ResourceClaim {
    let mut request = request;
    request["name"] = json!("r");
    serde_json::from_value(json!({
        "metadata": {"name": name, "namespace": "red", "uid": format!("uid-{name}")},
        "spec": {"devices": {"requests": [request]}},
    }))
    .unwrap()
}

fn exactly(class: &str, count: u32, selector: &str) -> Value {
    let mut exactly =
        json!({"deviceClassName": class, "count": count, "allocationMode": "ExactCount"});
    if !selector.is_empty() {
        exactly["selectors"] = json!([{"cel": {"expression": selector}}]);
    }
    json!({"exactly": exactly})
}

fn share(amount: &str) -> Value {
    let mut request = exactly("share.divvy.dev", 1, "");
    request["exactly"]["capacity"] = json!({"requests": {"memory": amount}});
    request
}

fn priced(request: Value) -> Result<Option<(u64, u64)>, String> {
    let price = price(&claim("c", request), &classes(), &mut catalogue());
    price
        .map(|amount| amount.map(|amount| (amount.memory / GI, amount.percent)))
        .map_err(|why| why.to_string())
}

const PROFILE: &str = "device.attributes['gpu.divvy.dev'].profile == '1g.10gb'";

#[test]
fn a_claim_is_priced_as_the_largest_device_that_it_may_get() {
    let all = [
        (exactly("gpu.divvy.dev", 2, ""), (160, 200_000)),
        (
            exactly(
                "gpu.divvy.dev",
                1,
                "device.attributes['gpu.divvy.dev'].productName == 'NVIDIA L4'",
            ),
            (24, 100_000),
        ),
        (exactly("mig.divvy.dev", 1, ""), (40, 50_000)),
        (exactly("mig.divvy.dev", 3, PROFILE), (30, 37_500)),
        (share("8Gi"), (8, 33_334)),
        // Rounded up as the scheduler does, and the default where none is named.
        (share("8500Mi"), (9, 37_500)),
        (exactly("share.divvy.dev", 1, ""), (4, 8_334)),
        (
            json!({"firstAvailable": [
                {"name": "a", "deviceClassName": "mig.divvy.dev"},
                {"name": "b", "deviceClassName": "gpu.divvy.dev"},
            ]}),
            (80, 100_000),
        ),
    ];
    for (request, expected) in all {
        assert_eq!(priced(request.clone()), Ok(Some(expected)), "{request}");
    }
    assert_eq!(priced(exactly("nic.example.com", 1, "")), Ok(None));
    let mut admin = exactly("gpu.divvy.dev", 1, "");
    admin["exactly"]["adminAccess"] = json!(true);
    assert_eq!(priced(admin), Ok(None));
}

#[test]
fn a_selector_that_reads_what_few_have_lowers_no_price() {
    let crafted = [
        "device.attributes['gpu.divvy.dev'].uuid == 'uuid-of-gpu-0-mig-1g10gb-19-0'",
        "device.attributes['gpu.divvy.dev']['uu' + 'id'] == 'x' || device.attributes['gpu.divvy.dev'].profile == '1g.10gb'",
        "device.attributes['gpu.divvy.dev'].profile == '1g.10gb' || device.attributes['gpu.divvy.dev']['UUID'.lowerAscii()] != ''",
        "device.attributes['gpu.divvy.dev'].exists(name, name.startsWith('uu')) || device.attributes['gpu.divvy.dev'].profile == '1g.10gb'",
        "device.attributes['gpu.divvy.dev'].?gpuUUID.orValue('') != '' || device.attributes['gpu.divvy.dev'].profile == '1g.10gb'",
        "device.attributes['gpu.divvy.dev']['\\u0075uid'] != '' || device.attributes['gpu.divvy.dev'].profile == '1g.10gb'",
    ];
    let of_maps = [
        "device.attributes['gpu.divvy.dev'].size() > 3",
        "device.attributes['resource.kubernetes.io'] != device.attributes['x']",
        "'resource.kubernetes.io' in device.attributes",
        "cel.bind(all, device.attributes['gpu.divvy.dev'], all.size() > 3)",
    ]
    .map(|reads| format!("{reads} || {PROFILE}"));
    let crafted = crafted.map(str::to_owned).into_iter().chain(of_maps);
    for expression in crafted {
        let price = priced(exactly("mig.divvy.dev", 1, &expression));
        assert_eq!(price, Ok(Some((40, 50_000))), "{expression}");
    }
}

#[test]
fn what_has_no_bound_says_why() {
    let unknown = priced(exactly("gone.example.com", 1, ""));
    assert_eq!(
        unknown.unwrap_err(),
        "request r: DeviceClass gone.example.com does not exist (kubectl get deviceclasses)"
    );
    let mut all = exactly("mig.divvy.dev", 1, "");
    all["exactly"]["allocationMode"] = json!("All");
    assert!(priced(all).unwrap_err().ends_with("name a count"));
    let none = priced(exactly(
        "mig.divvy.dev",
        1,
        "device.attributes['gpu.divvy.dev'].profile == '7g.80gb'",
    ));
    assert!(
        none.unwrap_err()
            .contains("no published device of class mig.divvy.dev")
    );
    assert!(priced(share("800Gi")).unwrap_err().contains("satisfies"));
}

fn let_through(mut claim: ResourceClaim, amount: Amount) -> ResourceClaim {
    let annotations = claim.metadata.annotations.get_or_insert_default();
    annotations.insert(annotations::QUOTA.to_owned(), amount.to_string());
    claim
}

/// Steps of a generator (splitmix64).
fn random(state: &mut u64, below: u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *state;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) % below
}

/// Claims of all forms come and go, in any order, and the scheduler's allocator serves those that
/// were let through: the quota is kept at every moment, and every claim is charged what it was
/// given, which is never more than its grant.
#[test]
fn no_order_of_claims_has_more_than_the_quota() {
    let limits = Limits {
        memory: Some(90 * GI),
        percent: Some(130_000),
    };
    let (slices, classes) = (slices(), classes());
    let list: Vec<_> = classes.values().cloned().collect();
    let node: fn(&str) -> Node =
        |name| serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    let mut full = 0;
    for seed in 0..12 {
        let (mut state, mut claims) = (seed, BTreeMap::<String, ResourceClaim>::new());
        let mut catalogue = catalogue();
        for step in 0..40 {
            let name = format!("c{step}");
            let request = match random(&mut state, 5) {
                0 => exactly("gpu.divvy.dev", 1, ""),
                1 => exactly("mig.divvy.dev", 1, PROFILE),
                2 => exactly("mig.divvy.dev", 1, ""),
                3 => share("3Gi"),
                _ => exactly("share.divvy.dev", 1, ""),
            };
            claims.insert(name.clone(), claim(&name, request));
            if random(&mut state, 3) == 0 {
                let gone = usize::try_from(random(&mut state, claims.len() as u64)).unwrap();
                let gone = claims.keys().nth(gone).unwrap().clone();
                claims.remove(&gone);
            }
            // The pod of a claim ends, and another may have the claim on another device.
            if random(&mut state, 3) == 0 {
                let mut has = claims.values_mut().filter(|claim| claim.status.is_some());
                if let Some(claim) = has.next() {
                    claim.status = None;
                }
            }
            let seen = look(limits, claims.values(), &classes, &mut catalogue);
            for grant in seen.grants {
                let claim = claims.remove(&grant.claim).unwrap();
                claims.insert(grant.claim, let_through(claim, grant.amount));
            }
            for (name, _) in seen.settled {
                claims.get_mut(&name).unwrap().metadata.annotations = None;
            }
            // The scheduler, on one of the nodes.
            let at = node(if random(&mut state, 2) == 0 {
                "big"
            } else {
                "little"
            });
            let allocated = AllocatedState::from_claims(claims.values());
            let ready = claims
                .values_mut()
                .find(|claim| claim.status.is_none() && claim.metadata.annotations.is_some());
            if let Some(ready) = ready {
                let slices = Slices::new(&slices);
                let inputs = Inputs {
                    slices: &slices,
                    classes: &list,
                    allocated: &allocated,
                    node: &at,
                };
                let found = Allocator::new(Features::default())
                    .fit(&inputs, &[ready])
                    .unwrap();
                if let Some(found) = found {
                    let allocation = found.results[0].clone();
                    let status = json!({"allocation": allocation});
                    ready.status = Some(serde_json::from_value(status).unwrap());
                    let given = charge(ready, &catalogue).unwrap().unwrap();
                    let grant: Amount = ready.metadata.annotations.as_ref().unwrap()
                        [annotations::QUOTA]
                        .parse()
                        .unwrap();
                    assert!(
                        given.memory <= grant.memory && given.percent <= grant.percent,
                        "{given} of {grant}"
                    );
                }
            }
            let has: Amount = claims
                .values()
                .filter_map(|claim| charge(claim, &catalogue))
                .map(Result::unwrap)
                .sum();
            assert!(limits.hold(has), "seed {seed}: {has}");
            let seen = look(limits, claims.values(), &classes, &mut catalogue);
            assert!(limits.hold(seen.used), "seed {seed}: {}", seen.used);
            full += usize::from(seen.waiting() > 0);
        }
    }
    assert!(full > 50, "the quota was reached {full} times");
}

#[test]
fn the_oldest_claims_come_first_and_a_large_one_keeps_none_back() {
    let mut claims = vec![
        claim("b", exactly("gpu.divvy.dev", 1, "")),
        claim("c", exactly("mig.divvy.dev", 1, PROFILE)),
        claim("a", exactly("mig.divvy.dev", 1, PROFILE)),
        claim("huge", exactly("gpu.divvy.dev", 9, "")),
    ];
    for (claim, at) in claims.iter_mut().zip(["09", "08", "07", "06"]) {
        let at = format!("2026-11-01T00:00:{at}Z");
        claim.metadata.creation_timestamp = Some(serde_json::from_value(json!(at)).unwrap());
    }
    let limits = Limits {
        memory: Some(20 * GI),
        percent: None,
    };
    let seen = look(limits, &claims, &classes(), &mut catalogue());
    let through: Vec<_> = seen
        .grants
        .iter()
        .map(|grant| grant.claim.as_str())
        .collect();
    assert_eq!(through, ["a", "c"]);
    assert_eq!(seen.used.memory, 20 * GI);
    let state = |name: &str| {
        &seen
            .claims
            .iter()
            .find(|line| line.claim == name)
            .unwrap()
            .state
    };
    assert_eq!(*state("a"), State::MayTake);
    let State::Waits(why) = state("huge") else {
        panic!()
    };
    assert!(why.starts_with("more than the whole quota"), "{why}");
}

/// A claim that was given less than its grant could take the rest of it after a deallocation, when
/// others have that rest: its grant counts until it is taken away.
#[test]
fn what_is_left_of_a_grant_is_free_only_when_the_grant_is_gone() {
    let limits = Limits {
        memory: Some(90 * GI),
        percent: None,
    };
    let mut small = claim("small", exactly("mig.divvy.dev", 1, ""));
    let status = json!({"allocation": {"devices": {"results": [
        {"request": "r", "driver": DRIVER, "pool": "big", "device": "gpu-0-mig-1g10gb-19-0"},
    ]}}});
    small.status = Some(serde_json::from_value(status).unwrap());
    let grant = Amount {
        memory: 40 * GI,
        percent: 50_000,
    };
    let mut small = let_through(small, grant);
    let large = claim("large", exactly("gpu.divvy.dev", 1, ""));
    let seen = look(limits, [&small, &large], &classes(), &mut catalogue());
    assert_eq!((seen.used, seen.grants.len()), (grant, 0));
    assert_eq!(seen.settled.len(), 1);

    small.metadata.annotations = None;
    let seen = look(limits, [&small, &large], &classes(), &mut catalogue());
    assert_eq!(seen.settled, []);
    assert_eq!((seen.used.memory, seen.grants.len()), (90 * GI, 1));
    // Deallocated, it waits as a new one does.
    small.status = None;
    let large = let_through(large, seen.grants[0].amount);
    let seen = look(limits, [&small, &large], &classes(), &mut catalogue());
    assert_eq!((seen.grants.len(), seen.waiting()), (0, 1));
}

/// A claim from before the quota counts with what it has; if that is not known, none is let
/// through, and a claim that was let through counts with its grant.
#[test]
fn what_is_not_known_is_not_taken_for_nothing() {
    let given = |mut claim: ResourceClaim| {
        let status = json!({"allocation": {"devices": {"results": [
            {"request": "r", "driver": DRIVER, "pool": "gone", "device": "gpu-0"},
        ]}}});
        claim.status = Some(serde_json::from_value(status).unwrap());
        claim
    };
    let old = given(claim("old", exactly("gpu.divvy.dev", 1, "")));
    let new = claim("new", exactly("mig.divvy.dev", 1, PROFILE));
    let limits = Limits {
        memory: Some(90 * GI),
        percent: None,
    };
    let seen = look(limits, [&old, &new], &classes(), &mut catalogue());
    assert_eq!(seen.grants, []);
    assert!(
        seen.blocked
            .unwrap()
            .contains("gpu-0 of pool gone is not published")
    );
    let known = let_through(
        old,
        Amount {
            memory: 80 * GI,
            percent: 100_000,
        },
    );
    let seen = look(limits, [&known, &new], &classes(), &mut catalogue());
    assert_eq!(seen.used.memory, 90 * GI);
    assert_eq!(seen.grants.len(), 1);
}

#[test]
fn an_amount_is_read_as_it_was_written() {
    for (memory, percent, text) in [
        (85_520_809_984, 100_000, "memory=85520809984,percent=100"),
        (1, 12_500, "memory=1,percent=12.5"),
        (0, 5, "memory=0,percent=0.005"),
    ] {
        let amount = Amount { memory, percent };
        assert_eq!(amount.to_string(), text);
        assert_eq!(text.parse(), Ok(amount));
    }
    for bad in [
        "",
        "memory=1",
        "memory=-1,percent=1",
        "memory=1,percent=1.2345",
        "memory=1,percent=x",
    ] {
        assert!(bad.parse::<Amount>().is_err(), "{bad}");
    }
}

#[test]
fn a_thousand_equal_nodes_are_a_few_kinds() {
    let mut catalogue = Catalogue::new(DRIVER);
    for node in 0..1000 {
        let mut slice = slices().remove(0);
        slice.metadata.name = Some(format!("n{node}-0"));
        slice.spec.pool.name = format!("n{node}");
        slice.spec.node_name = Some(format!("n{node}"));
        for device in slice.spec.devices.iter_mut().flatten() {
            let uuid = json!({"string": format!("{node}-{}", device.name)});
            let uuid = serde_json::from_value(uuid).unwrap();
            device
                .attributes
                .get_or_insert_default()
                .insert("uuid".to_owned(), uuid);
        }
        catalogue.put(&slice);
    }
    assert_eq!((catalogue.len(), catalogue.kinds().len()), (5000, 4));
    catalogue.keep(&["n7-0".to_owned()].into());
    assert_eq!(catalogue.len(), 5);
}
