use divvy_gpu_sim::Engine;
use serde_json::{Value, json};

use divvy_model::{Form, TimeSlice};

use super::*;
use crate::UsageRules;

fn node_of(spec: &str) -> (Inventory, Ordinals) {
    let inventory = Engine::new(&spec.parse().unwrap()).inventory();
    let mut ordinals = Ordinals::default();
    ordinals.assign(
        inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
    );
    (inventory, ordinals)
}

fn policy(name: &str, spec: &Value) -> GpuPolicy {
    let object = json!({
        "apiVersion": "divvy.dev/v1beta1", "kind": "GpuPolicy", "metadata": { "name": name }, "spec": spec,
    });
    divvy_api::policy::decode_policy(&object).unwrap()
}

/// The rule that decides about each GPU, by ordinal.
fn deciders(policies: &[GpuPolicy], gpus: &str, labels: &[(&str, &str)]) -> Vec<Option<String>> {
    let (inventory, ordinals) = node_of(gpus);
    let labels = labels
        .iter()
        .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
        .collect();
    let node = NodeFacts {
        name: "n1",
        labels: &labels,
    };
    let resolved = resolve(policies, &node, &inventory, &ordinals, &GpuRules::default());
    let count = u32::try_from(inventory.gpus.len()).unwrap();
    (0..count)
        .map(|n| {
            resolved
                .by
                .get(ordinals.gpu(n).unwrap())
                .map(ToString::to_string)
        })
        .collect()
}

fn by(names: &[&str]) -> Vec<Option<String>> {
    names
        .iter()
        .map(|name| (!name.is_empty()).then(|| (*name).to_owned()))
        .collect()
}

#[test]
fn without_a_policy_every_gpu_has_the_nodes_defaults() {
    let (inventory, ordinals) = node_of("h100x2");
    let defaults = GpuRules {
        modes: Modes::everything(),
        ..GpuRules::default()
    };
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let resolved = resolve(&[], &node, &inventory, &ordinals, &defaults);
    let rules = inventory
        .gpus
        .keys()
        .map(|uuid| (uuid.clone(), defaults.clone()))
        .collect();
    assert_eq!(
        resolved,
        Resolved {
            rules,
            ..Resolved::default()
        }
    );
}

#[test]
fn the_first_rule_that_matches_decides_and_each_gpu_may_have_its_own() {
    let (inventory, ordinals) = node_of("h100x4");
    let (first, second) = (
        ordinals.gpu(0).unwrap(),
        &inventory.gpus[ordinals.gpu(1).unwrap()],
    );
    let policy = policy(
        "p",
        &json!({ "rules": [
            { "name": "uuid", "gpus": { "uuids": [first.to_string().to_lowercase().replace("gpu-", "GPU-")] } },
            { "name": "pci", "gpus": { "pciAddresses": [second.facts.pci_address.to_string().to_uppercase()] } },
            { "name": "ordinal", "gpus": { "ordinals": [0, 1, 2] } },
            { "name": "h100", "gpus": { "products": ["nvidia*h100*"] } },
            { "name": "rest" },
            { "name": "never" },
        ] }),
    );
    let policies = [policy];
    assert_eq!(
        deciders(&policies, "h100x4", &[]),
        by(&["p/uuid", "p/pci", "p/ordinal", "p/h100"])
    );
    assert_eq!(
        deciders(&policies, "l4x4", &[])[3],
        Some("p/rest".to_owned())
    );
}

#[test]
fn policies_are_tried_by_priority_and_then_by_name() {
    let of = |name: &str, priority: i32, gpus: &Value| {
        policy(
            name,
            &json!({ "priority": priority, "rules": [{ "gpus": gpus }] }),
        )
    };
    let all = json!({ "products": ["*"] });
    let policies = [
        of("c", 0, &all),
        of("b", 0, &json!({ "ordinals": [1, 2] })),
        of("z", 5, &json!({ "ordinals": [2] })),
        of("a", -1, &all),
    ];
    let expected = by(&["c/rules[0]", "b/rules[0]", "z/rules[0]"]);
    assert_eq!(deciders(&policies, "h100x3", &[]), expected);
    let backwards: Vec<_> = policies.into_iter().rev().collect();
    assert_eq!(
        deciders(&backwards, "h100x3", &[]),
        expected,
        "the order of the list does not matter"
    );
}

#[test]
fn nodes_are_matched_by_name_or_by_labels_in_the_policy_and_in_the_rule() {
    let of = |nodes: &Value, rule: &Value| {
        policy(
            "p",
            &json!({ "nodes": nodes, "rules": [{ "nodes": rule }] }),
        )
    };
    let zone_a = json!({ "selector": { "matchLabels": { "zone": "a" } } });
    let (here, there) = (json!({ "names": ["n1"] }), json!({ "names": ["n2"] }));
    let matches = |nodes: &Value, rule: &Value, labels: &[(&str, &str)]| {
        deciders(&[of(nodes, rule)], "l4x1", labels) == by(&["p/rules[0]"])
    };
    assert!(matches(&here, &here, &[]));
    assert!(!matches(&there, &here, &[]) && !matches(&here, &there, &[]));
    assert!(
        matches(&zone_a, &here, &[("zone", "a")]) && !matches(&zone_a, &here, &[("zone", "b")])
    );
    assert!(!matches(&here, &zone_a, &[]));
    let named_or_selected =
        json!({ "names": ["n2"], "selector": { "matchLabels": { "zone": "a" } } });
    assert!(matches(&named_or_selected, &here, &[("zone", "a")]));
}

#[test]
fn limits_above_requests_have_no_effect_where_nothing_keeps_them() {
    let (mut inventory, ordinals) = node_of("h100x1");
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let rule = json!({ "modes": ["TimeSlicing"], "shares": { "burst": { "memory": "2x" } } });
    let policies = [policy("p", &json!({ "rules": [rule] }))];
    for (caps, expected) in [
        (MemoryCaps::Available, None),
        (
            MemoryCaps::SwitchedOff,
            Some(
                "shares.burst has no effect, since the node caps no memory of shares: caps are switched off in divvy's chart (memoryCaps=false)",
            ),
        ),
    ] {
        inventory.system.memory_caps = caps;
        let resolved = resolve(
            &policies,
            &node,
            &inventory,
            &ordinals,
            &GpuRules::default(),
        );
        let problems = resolved
            .problems
            .iter()
            .map(|problem| problem.problem.as_str());
        assert_eq!(problems.collect::<Vec<_>>(), Vec::from_iter(expected));
    }
}

#[test]
fn a_rule_changes_what_it_says_and_leaves_the_defaults() {
    let (mut inventory, ordinals) = node_of("h100x1");
    inventory.system.memory_caps = MemoryCaps::Available;
    let uuid = ordinals.gpu(0).unwrap();
    let defaults = GpuRules {
        held_back_mib: 7,
        ..GpuRules::default()
    };
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let rules = |rule: &Value| {
        let policies = [policy("p", &json!({ "rules": [rule] }))];
        let resolved = resolve(&policies, &node, &inventory, &ordinals, &defaults);
        assert_eq!(resolved.problems, []);
        resolved.rules[uuid].clone()
    };
    assert_eq!(rules(&json!({})), defaults);
    let full = rules(&json!({
        "modes": ["Mig", "TimeSlicing"],
        "mig": { "profiles": ["1g.10gb"], "placementOrder": "Descending", "instances": "Static" },
        "shares": { "slots": 4, "minMemory": "1Mi", "minCores": 10, "reservedMemory": "2Gi", "timeSlice": "Short",
            "burst": { "memory": "1.5x" } },
        "health": { "evict": true, "restartWedgedMps": true },
        "usage": {
            "overuse": "Evict",
            "idle": { "afterSeconds": 600, "action": "Reclaim", "graceSeconds": 60 },
        },
        "quota": { "counters": true },
    }));
    let expected = GpuRules {
        modes: Modes::Only([Form::PARTITIONS, Form::TIME_SLICED].into()),
        profiles: Some(["1g.10gb".to_owned()].into()),
        rare: BTreeSet::new(),
        order: PlacementOrder::Descending,
        shares: crate::ShareRules {
            unit: ShareUnit::Amounts,
            slots: 4,
            smallest_mib: Some(1),
            smallest_cores: 10,
            smallest_percent: None,
            time_slice: Some(TimeSlice::Short),
            burst: "1.5x".parse().unwrap(),
        },
        held_back_mib: 2048,
        instances: Instances::Static,
        no_execute: true,
        restarts_wedged_mps: true,
        usage: UsageRules {
            evict: true,
            idle_after: Some(600),
            reclaim: true,
            grace: 60,
        },
        counts_memory: true,
    };
    assert_eq!(full, expected);
    let idle =
        rules(&json!({ "usage": { "overuse": "Report", "idle": { "action": "Reclaim" } } })).usage;
    assert_eq!(
        idle,
        UsageRules {
            reclaim: true,
            grace: 600,
            ..UsageRules::default()
        }
    );
}

#[test]
fn the_first_policy_for_the_node_that_speaks_of_the_mode_lock_decides_it() {
    let (inventory, ordinals) = node_of("l4x1");
    let of = |name: &str, spec: &Value| policy(name, spec);
    let policies = [
        of("a", &json!({})),
        of(
            "b",
            &json!({ "nodes": { "names": ["n2"] }, "modeLock": "Enabled", "priority": 9 }),
        ),
        of("c", &json!({ "modeLock": "Disabled" })),
        of("d", &json!({ "modeLock": "Auto" })),
    ];
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let resolved = resolve(
        &policies,
        &node,
        &inventory,
        &ordinals,
        &GpuRules::default(),
    );
    assert_eq!(resolved.mode_lock, Some((ModeLock::Off, "c".to_owned())));
}

#[test]
fn missing_profiles_are_reported_if_a_gpu_has_none_of_a_rule() {
    let (mut inventory, ordinals) = node_of("h100x1,l4x1");
    let engine = Engine::new(&"h100x1,l4x1".parse().unwrap());
    let mut capable = 0;
    for gpu in engine.gpus() {
        let Some(capabilities) = divvy_gpu_sim::mig_capabilities(&gpu.model) else {
            continue;
        };
        capable += 1;
        let known = inventory.gpus.get_mut(&gpu.facts.uuid).unwrap();
        known.mig = Some(divvy_model::GpuMig {
            capabilities,
            instances: Some(Vec::new()),
            uuids: BTreeMap::new(),
        });
    }
    assert_eq!(capable, 1);
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let problems = |profiles: &[&str]| {
        let policies = [policy(
            "p",
            &json!({ "rules": [{ "mig": { "profiles": profiles } }] }),
        )];
        let resolved = resolve(
            &policies,
            &node,
            &inventory,
            &ordinals,
            &GpuRules::default(),
        );
        resolved
            .problems
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(problems(&["1g.10gb", "1g.5gb"]), Vec::<String>::new());
    let found = problems(&["1g.5gb", "1g.6gb"]);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].contains("none of the MIG profiles 1g.5gb, 1g.6gb (it has 1g.10gb"),
        "{found:?}"
    );
}

#[test]
fn a_percentage_of_memory_is_reserved_of_each_gpu_by_its_size() {
    let (inventory, ordinals) = node_of("l4x1,h100x1");
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let reserved = |part: &str| -> Vec<u64> {
        let shares = json!({ "reservedMemory": part });
        let rule = json!({ "modes": ["TimeSlicing"], "shares": shares });
        let policies = [policy("p", &json!({ "rules": [rule] }))];
        let defaults = GpuRules::default();
        let resolved = resolve(&policies, &node, &inventory, &ordinals, &defaults);
        let mut found: Vec<u64> = resolved.rules.values().map(|r| r.held_back_mib).collect();
        found.sort_unstable();
        found
    };
    // Of 23034 and of 81559 MiB.
    assert_eq!(reserved("10%"), [2304, 8156]);
    assert_eq!(reserved("2Gi"), [2048, 2048]);
}

#[test]
fn a_least_share_of_more_than_a_gpu_has_is_reported() {
    let (inventory, ordinals) = node_of("l4x1");
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let problems = |least: &str| {
        let shares = json!({ "minMemory": least, "reservedMemory": "2Gi", "timeSlice": "Short" });
        let policies = [policy(
            "p",
            &json!({ "rules": [{ "modes": ["TimeSlicing"], "shares": shares }] }),
        )];
        let resolved = resolve(
            &policies,
            &node,
            &inventory,
            &ordinals,
            &GpuRules::default(),
        );
        resolved
            .problems
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
    };
    assert_eq!(problems("20Gi"), Vec::<String>::new());
    let found = problems("200Gi");
    assert_eq!(found.len(), 1, "{found:?}");
    let words =
        "it has one share, of all its memory: minMemory is 204800Mi, and it has 20986Mi for shares";
    assert!(found[0].contains(words), "{found:?}");
}

/// The problems of one rule on a node with these GPUs.
fn problems_of(rule: &Value, gpus: &str) -> Vec<String> {
    let (inventory, ordinals) = node_of(gpus);
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let policies = [policy("p", &json!({ "rules": [rule] }))];
    let resolved = resolve(
        &policies,
        &node,
        &inventory,
        &ordinals,
        &GpuRules::default(),
    );
    let problems = resolved.problems.iter();
    problems.map(|problem| problem.problem.clone()).collect()
}

#[test]
fn more_slots_than_the_least_share_leaves_room_for_are_reported() {
    let rule = |slots: u32| {
        let shares = json!({ "slots": slots, "minMemory": "30Gi" });
        json!({ "modes": ["TimeSlicing"], "shares": shares })
    };
    assert_eq!(problems_of(&rule(2), "h100x1"), Vec::<String>::new());
    let found = problems_of(&rule(4), "h100x1");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("only 2 of its 4 slots can be used at once: minMemory is 30720Mi"),
        "{found:?}"
    );
    // The memory of the GPU is not that of a partition.
    let mut of_partitions = rule(4);
    of_partitions["modes"] = json!(["Mig"]);
    of_partitions["mig"] = json!({ "sharing": ["TimeSlicing"] });
    assert_eq!(problems_of(&of_partitions, "h100x1"), Vec::<String>::new());
}

/// Shares of partitions have all memory of their partition, whatever the rule reserves of the GPU.
#[test]
fn settings_that_shares_of_partitions_do_not_have_are_reported() {
    let rule = |modes: Value, shares: Value| json!({ "modes": modes, "mig": { "sharing": ["TimeSlicing"] }, "shares": shares });
    let reserved = || json!({ "reservedMemory": "2Gi" });
    assert_eq!(
        problems_of(&rule(json!(["Mig"]), reserved()), "h100x1"),
        [
            "shares.reservedMemory has no effect on shares of partitions (mig.sharing), which have all memory of their \
             partition, in turns of the driver's length: leave it out, or add TimeSlicing to modes for shares of the \
             whole GPU"
        ]
    );
    let both = rule(
        json!(["Mig", "TimeSlicing"]),
        json!({ "reservedMemory": "2Gi", "timeSlice": "Short" }),
    );
    let found = problems_of(&both, "h100x1");
    assert_eq!(found.len(), 1, "{found:?}");
    let (start, end) = (
        "shares.reservedMemory, shares.timeSlice have no effect on shares of partitions",
        "only shares of the whole GPU can have them",
    );
    let says = found[0].starts_with(start) && found[0].ends_with(end);
    assert!(says, "{found:?}");
    // It is no news of a GPU without partitions, nor without such a setting.
    let slots = rule(json!(["Mig"]), json!({ "slots": 4 }));
    assert_eq!(problems_of(&slots, "h100x1"), Vec::<String>::new());
    assert_eq!(problems_of(&both, "l4x1"), Vec::<String>::new());
}

#[test]
fn a_default_share_below_the_least_percent_is_reported() {
    let rule = |slots: u32| {
        let shares = json!({ "unit": "Percent", "slots": slots, "minPercent": 25 });
        json!({ "modes": ["TimeSlicing"], "shares": shares })
    };
    assert_eq!(problems_of(&rule(4), "h100x1"), Vec::<String>::new());
    assert_eq!(
        problems_of(&rule(5), "h100x1"),
        ["a share without a request gets 25 percent, not 100/5: minPercent is 25"]
    );
}

#[test]
fn a_rule_says_the_unit_of_shares_and_the_first_that_matches_decides() {
    let (inventory, ordinals) = node_of("l4x2");
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let shares = |unit: &Value| json!({ "modes": ["TimeSlicing"], "shares": unit });
    let mut first = shares(&json!({ "unit": "Percent", "minPercent": 10 }));
    first["gpus"] = json!({ "ordinals": [0] });
    let rules = [first, shares(&json!({ "slots": 4 }))];
    let policies = [policy("p", &json!({ "rules": rules }))];
    let resolved = resolve(
        &policies,
        &node,
        &inventory,
        &ordinals,
        &GpuRules::default(),
    );
    let of = |ordinal: u32| resolved.rules[ordinals.gpu(ordinal).unwrap()].shares;
    let said = |ordinal: u32| (of(ordinal).unit, of(ordinal).smallest_percent);
    assert_eq!(said(0), (ShareUnit::Percent, Some(10)));
    assert_eq!(said(1), (ShareUnit::Amounts, None));
}

#[test]
fn a_product_without_stars_that_is_a_part_of_a_name_is_reported() {
    let rule = |product: &str| json!({ "gpus": { "products": [product] }, "modes": ["Whole"] });
    assert_eq!(
        problems_of(&rule("h100"), "h100x1"),
        [
            "products: [h100] does not match NVIDIA H100 80GB HBM3: a pattern is for the whole name (write \"*h100*\")"
        ]
    );
    for fine in ["*h100*", "NVIDIA H100 80GB HBM3", "A100"] {
        assert_eq!(problems_of(&rule(fine), "h100x1"), Vec::<String>::new());
    }
}

#[test]
fn a_gpu_that_cannot_be_read_keeps_the_rule_it_had() {
    let (mut inventory, ordinals) = node_of("h100x2");
    let policies = [policy(
        "p",
        &json!({ "rules": [{ "gpus": { "products": ["*"] }, "modes": ["Mig"] }] }),
    )];
    let node = NodeFacts {
        name: "n1",
        labels: &BTreeMap::new(),
    };
    let look = |inventory: &Inventory| {
        resolve(&policies, &node, inventory, &ordinals, &GpuRules::default())
    };
    let before = look(&inventory);
    let lost = ordinals.gpu(0).unwrap();
    inventory.gpus.remove(lost);
    let mut after = look(&inventory);
    assert_eq!(after.by.get(lost), None);
    after.keep_unread(&before, &inventory);
    assert_eq!(after, before);
}

#[test]
fn patterns_match_the_whole_name() {
    for (pattern, text, expected) in [
        ("nvidia l4", "NVIDIA L4", true),
        ("NVIDIA L4", "NVIDIA L40S", false),
        ("*L4*", "NVIDIA L40S", true),
        ("*h100*hbm3", "NVIDIA H100 80GB HBM3", true),
        ("*H100*PCIe", "NVIDIA H100 80GB HBM3", false),
        ("*", "", true),
        ("", "", true),
        ("a*a", "a", false),
        ("a**b", "axb", true),
    ] {
        assert_eq!(is_like(text, pattern), expected, "{pattern} of {text}");
    }
}

#[test]
fn a_rule_counts_memory_or_does_not_whatever_the_node_does() {
    let (inventory, ordinals) = node_of("h100x2");
    let labels = BTreeMap::new();
    let node = NodeFacts {
        name: "n1",
        labels: &labels,
    };
    let rules = json!({"rules": [{"gpus": {"ordinals": [0]}, "quota": {"counters": true}},
        {"gpus": {"ordinals": [1]}, "quota": {"counters": false}}]});
    for by_default in [true, false] {
        let defaults = GpuRules {
            counts_memory: by_default,
            ..GpuRules::default()
        };
        let of = |policies: &[GpuPolicy]| {
            let resolved = resolve(policies, &node, &inventory, &ordinals, &defaults);
            [0, 1].map(|n| resolved.rules[ordinals.gpu(n).unwrap()].counts_memory)
        };
        assert_eq!(of(&[]), [by_default; 2]);
        assert_eq!(of(&[policy("p", &rules)]), [true, false]);
    }
}
