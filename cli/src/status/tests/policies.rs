//! Policies: the GPUs that their rules decide about, and the reasons why parts have no effect.

use divvy_api::policy::decode_policy;

use super::*;
use crate::status::policy::{PolicyReport, policies};

/// Puts a policy into a world.
fn add(world: &mut Snapshot, name: &str, spec: &Value) {
    let object = json!({
        "apiVersion": "divvy.dev/v1beta1", "kind": "GpuPolicy",
        "metadata": { "name": name }, "spec": spec,
    });
    let policy = decode_policy(&object);
    world.policies.insert(name.to_owned(), policy);
}

/// Nodes n1 and n2 with two GPUs each, which these rules decide about; a partition of the first.
fn fleet(all: &[(&str, Value)], decided: [&str; 4]) -> Snapshot {
    let mut world = world();
    world.nodes = typed(json!([node("n1"), node("n2")]));
    world.reports.clear();
    for (name, rules) in [("n1", &decided[..2]), ("n2", &decided[2..])] {
        let gpus = (0..).zip(rules).map(|(number, rule)| {
            let mut gpu = gpu(number, None);
            (*rule).clone_into(&mut gpu.policy);
            gpu
        });
        let status = status(gpus.collect(), Vec::new(), "");
        world.reports.insert(name.to_owned(), status);
    }
    let mut slice = slice("n1", &[("gpu-0", false), ("gpu-0-mig-1g10gb-0-1", false)]);
    let devices = &mut slice["spec"]["devices"];
    devices[0]["attributes"]["resource.kubernetes.io/pciBusID"] =
        json!({ "string": "0000:3b:00.0" });
    devices[1]["attributes"]["profile"] = json!({ "string": "1g.10gb" });
    world.slices = typed(json!([slice]));
    for (name, spec) in all {
        add(&mut world, name, spec);
    }
    world
}

/// The parts of `p` without effect, `!` for action: `! p/rules[0]: why; do: remedy`.
fn idle(world: &Snapshot) -> Vec<String> {
    let report = policies(world, Some("p")).unwrap();
    let needs = report.troubles.iter().any(|one| !one.trouble.notice);
    assert_eq!(report.needs_person, needs);
    let line = |one: &report::NodeTrouble| {
        let trouble = &one.trouble;
        let mark = if trouble.notice { "" } else { "! " };
        let nodes = if one.node.is_empty() { "" } else { " " };
        format!(
            "{mark}{}{nodes}{}: {}; do: {}",
            one.node, trouble.subject, trouble.why, trouble.remedy
        )
    };
    report.troubles.iter().map(line).collect()
}

#[track_caller]
fn says(world: &Snapshot, expected: &[&str]) {
    assert_eq!(idle(world), expected);
}

const UNDECIDED: [&str; 4] = [""; 4];

/// A rule for these GPUs, or nodes.
fn rule(matched: Value) -> Value {
    let mut rule = matched;
    rule["modes"] = json!(["Whole"]);
    json!({ "rules": [rule] })
}

#[test]
fn a_rule_that_matches_no_gpu_names_the_list_and_the_entries() {
    for (gpus, expected) in [
        (
            json!({ "products": ["L4"] }),
            "gpus.products: L4 is only a part of NVIDIA L4, and has to match all of it; do: write \"*L4*\"",
        ),
        (
            json!({ "products": ["*H100*"] }),
            "gpus.products: no GPU of its nodes is like *H100* (they are NVIDIA L4); do",
        ),
        (
            json!({ "ordinals": [8, 9] }),
            "gpus.ordinals: no GPU of its nodes has 8, 9; do: `divvy status node NODE` lists numbers and UUIDs",
        ),
        (
            json!({ "uuids": ["GPU-00000000-0000-0000-0000-000000000000"] }),
            "gpus.uuids: no GPU of its nodes has GPU-00000000-0000-0000-0000-000000000000; do",
        ),
        (
            json!({ "pciAddresses": ["0000:5e:00.0"] }),
            "gpus.pciAddresses: no GPU of its nodes has 0000:5e:00.0; do",
        ),
    ] {
        let world = fleet(&[("p", rule(json!({ "gpus": gpus })))], UNDECIDED);
        let found = idle(&world);
        let [only] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert!(
            only.starts_with(&format!("! p/rules[0]: {expected}")),
            "{only}"
        );
        assert!(only.ends_with("`kubectl edit gpupolicy p`"), "{only}");
    }
}

#[test]
fn entries_that_match_nothing_beside_others_are_for_information() {
    let gpus = json!({
        "products": ["nvidia l4", "*T4*"], "ordinals": [0, 7],
        "pciAddresses": ["00000000:3B:00.0"], "uuids": ["gpu-12345678-1234-1234-1234-123456780001"],
    });
    let mut spec = rule(json!({ "gpus": gpus }));
    spec["nodes"] = json!({ "names": ["n1", "n2", "n9"] });
    // The schema has the pattern of UUIDs, in either case of letters.
    let mut world = fleet(&[("p", spec)], ["p/rules[0]"; 4]);
    says(
        &world,
        &[
            "p: nodes.names: no such node with divvy: n9; do: label a node, or correct nodes (`divvy status` lists those with divvy): `kubectl edit gpupolicy p`",
            "p/rules[0]: gpus.ordinals: no GPU of its nodes has 7; do: `divvy status node NODE` lists numbers and UUIDs: `kubectl edit gpupolicy p`",
            "p/rules[0]: gpus.products: no GPU of its nodes is like *T4* (they are NVIDIA L4); do: `kubectl edit gpupolicy p`",
        ],
    );
    // Addresses cannot be judged without slices.
    let address = rule(json!({ "gpus": { "pciAddresses": ["0000:5e:00.0"] } }));
    add(&mut world, "p", &address);
    world.unread = vec!["ResourceSlices cannot be listed".to_owned()];
    says(&world, &[]);
}

#[test]
fn a_policy_or_rule_for_nodes_that_do_not_exist_is_named() {
    let hint = "do: label a node, or correct nodes (`divvy status` lists those with divvy): `kubectl edit gpupolicy p`";
    let nodes = json!({ "names": ["n9"], "selector": { "matchLabels": { "disk": "slow" } } });
    let why = "nodes.names: no such node with divvy: n9; nodes.selector: it fits the labels of no node with divvy";
    let of_rule = fleet(&[("p", rule(json!({ "nodes": nodes })))], UNDECIDED);
    says(&of_rule, &[&format!("! p/rules[0]: {why}; {hint}")]);
    let mut spec = rule(json!({}));
    spec["nodes"] = nodes;
    let mut of_policy = fleet(&[("p", spec)], UNDECIDED);
    says(&of_policy, &[&format!("! p: {why}; {hint}")]);
    // Labels are unknown without nodes.
    of_policy.unread = vec!["Nodes cannot be listed".to_owned()];
    says(
        &of_policy,
        &[&format!(
            "! p: nodes.names: no such node with divvy: n9; {hint}"
        )],
    );
    add(
        &mut of_policy,
        "p",
        &json!({ "nodes": { "selector": { "matchLabels": { "disk": "slow" } } }, "rules": [{}] }),
    );
    says(&of_policy, &[]);
    let selected = json!({ "names": ["n1"], "selector": { "matchLabels": { "disk": "fast" } } });
    let mut entries = rule(json!({ "gpus": { "ordinals": [0, 7] } }));
    entries["nodes"] = selected;
    let mut unlabelled = fleet(&[("p", entries)], ["p/rules[0]", "", "p/rules[0]", ""]);
    unlabelled.unread = vec!["Nodes cannot be listed".to_owned()];
    says(&unlabelled, &[]);
    let applies = policies(&unlabelled, None).unwrap();
    assert_eq!(applies.policies[0].rules[0].nodes, ["n1", "n2"]);
    // Nothing is said of GPUs that no report shows.
    of_policy.unread = vec!["GpuNodes cannot be listed".to_owned()];
    add(
        &mut of_policy,
        "p",
        &json!({ "nodes": { "names": ["n9"] }, "rules": [{}] }),
    );
    says(&of_policy, &[]);
    let unknown = policies(&of_policy, None).unwrap();
    assert_eq!(unknown.policies[0].rules[0].gpus, None);
}

#[test]
fn a_rule_hidden_by_earlier_ones_names_them() {
    let everything = json!({ "priority": 5, "rules": [{ "name": "all" }] });
    let policy = json!({ "rules": [{ "gpus": { "ordinals": [1] } }, {}] });
    let all = [("p", policy.clone()), ("q", everything)];
    let hidden = |index: u32, by: &str| {
        format!(
            "p/rules[{index}]: rules that are asked earlier decide about all its GPUs: {by}; do: raise spec.priority, move the rule up, or remove it: `kubectl edit gpupolicy p`"
        )
    };
    let wholly = fleet(&all, ["q/all"; 4]);
    says(
        &wholly,
        &[
            &format!("! {}", hidden(0, "q/all")),
            &format!("! {}", hidden(1, "q/all")),
        ],
    );
    // The rest of a policy that has an effect.
    let rest = json!({ "rules": [{}, { "name": "rest" }] });
    let partly = fleet(&[("p", rest)], ["p/rules[0]"; 4]);
    says(
        &partly,
        &[&hidden(1, "p/rules[0]").replace("p/rules[1]", "p/rest")],
    );
    // Later rules cannot hide it: the nodes are behind.
    let late = fleet(
        &[("p", policy), ("q", json!({ "rules": [{}] }))],
        ["p/rules[1]", "q/rules[0]", "", ""],
    );
    let found = idle(&late);
    assert!(
        found[0].starts_with("p/rules[0]: n1/gpu-1, n2/gpu-1: the node has not reported yet"),
        "{found:?}"
    );
}

#[test]
fn an_empty_policy_a_hidden_lock_and_nodes_without_gpus_are_named() {
    says(
        &fleet(&[("p", json!({}))], UNDECIDED),
        &["! p: it has neither rules nor modeLock; do: `kubectl edit gpupolicy p`"],
    );
    let lock = json!({ "modeLock": "Enabled" });
    let other = json!({ "priority": 1, "modeLock": "Disabled" });
    says(&fleet(&[("p", lock.clone())], UNDECIDED), &[]);
    let hidden = fleet(&[("p", lock), ("q", other)], UNDECIDED);
    says(
        &hidden,
        &[
            "! p: modeLock: on each of its nodes, a policy that is asked earlier sets it; do: raise spec.priority, or leave it out: `kubectl edit gpupolicy p`",
        ],
    );
    let locks = policies(&hidden, None).unwrap();
    let locks = locks
        .policies
        .into_iter()
        .map(|line| line.mode_lock.unwrap());
    assert_eq!(locks.collect::<Vec<_>>(), [vec!["n1", "n2"], vec![]]);
    let mut bare = fleet(&[("p", rule(json!({})))], UNDECIDED);
    bare.reports.clear();
    says(
        &bare,
        &["p/rules[0]: its nodes report no GPU; do: `divvy status` shows their problems"],
    );
}

#[test]
fn a_profile_that_no_gpu_has_is_named_unless_instances_are_static() {
    let mig = |instances: &str| json!({ "rules": [{ "modes": ["Mig"], "mig": { "profiles": ["1g.10gb", "9g.90gb"], "instances": instances } }] });
    let mut world = fleet(&[("p", mig("OnDemand"))], ["p/rules[0]"; 4]);
    says(
        &world,
        &[
            "p/rules[0]: mig.profiles: none of its GPUs has 9g.90gb (they have 1g.10gb); do: `kubectl edit gpupolicy p`",
        ],
    );
    add(&mut world, "p", &mig("Static"));
    says(&world, &[]);
}

/// n1 cannot read the version of now, n1 and n2 report a word on a rule, n2 offers nothing.
fn refusing() -> Snapshot {
    let spec = json!({ "rules": [{ "name": "new" }] });
    let mut world = fleet(&[("p", spec)], ["p/old", "p/old", "p/new", "p/new"]);
    let trouble = |kind: &str, gpu: &str, subject: &str, why: &str, notice| Trouble {
        kind: kind.to_owned(),
        gpu: gpu.to_owned(),
        subject: subject.to_owned(),
        why: why.to_owned(),
        remedy: "x".to_owned(),
        notice,
        ..Trouble::default()
    };
    let slip =
        |gpu: &str, rule: &str| trouble("rule-without-effect", gpu, rule, "no such profile", true);
    let mut set = |node: &str, troubles| world.reports.get_mut(node).unwrap().troubles = troubles;
    let unread = trouble("bad-policy", "", "p", "spec.rules: must be a list", false);
    let other = trouble("bad-policy", "", "q", "is another's", false);
    set(
        "n1",
        vec![
            unread,
            other,
            slip("gpu-0", "p/old"),
            slip("gpu-1", "p/old"),
        ],
    );
    let nothing = trouble("not-offered", "gpu-1", "", "no claim can have it", false);
    // Missed by a star: said of all nodes together.
    set(
        "n2",
        vec![
            nothing,
            slip("gpu-0", "p/old"),
            slip("gpu-0", "p/idle"),
            lost(),
        ],
    );
    world
}

#[test]
fn reports_of_nodes_are_there_once_with_the_rules_they_still_follow() {
    let mut world = refusing();
    says(
        &world,
        &[
            "! n1 p: spec.rules: must be a list; do: x",
            "! n2 p/new: no claim can have it; do: x",
            "n1, n2 p/old: no such profile; do: x",
        ],
    );
    let rules = policies(&world, None).unwrap().policies.remove(0).rules;
    let rules: Vec<_> = rules
        .iter()
        .map(|r| (r.rule.as_str(), r.earlier, r.gpus))
        .collect();
    assert_eq!(rules, [("new", false, Some(2)), ("old", true, Some(2))]);
    // A policy that no reader can read is there without its rules.
    add(&mut world, "p", &json!({ "rules": {} }));
    assert_eq!(idle(&world).len(), 3, "its nodes say it");
    world.reports.clear();
    says(
        &world,
        &["! p: spec.rules: must be a list; do: `kubectl edit gpupolicy p`"],
    );
}

/// Policies of every kind.
fn mixed() -> (Snapshot, PolicyReport) {
    let override_ = json!({
        "priority": 100, "nodes": { "names": ["n2"] }, "rules": [{ "gpus": { "ordinals": [1] }, "modes": ["Whole"] }],
    });
    let inference = json!({ "modeLock": "Auto", "rules": [
        { "name": "notebooks", "gpus": { "ordinals": [0] }, "modes": ["TimeSlicing"] },
        { "name": "cut", "gpus": { "products": ["L4"] }, "modes": ["Mig"] },
    ] });
    let decided = [
        "inference/notebooks",
        "",
        "inference/notebooks",
        "node-2/rules[0]",
    ];
    let mut world = fleet(&[("node-2", override_), ("inference", inference)], decided);
    add(&mut world, "broken", &json!({ "rules": [{ "modes": [] }] }));
    let report = policies(&world, None).unwrap();
    (world, report)
}

#[test]
fn policies_show_what_they_decide_then_what_has_no_effect() {
    let (world, report) = mixed();
    assert!(report.needs_person);
    golden("policies.txt", &render::policies(&world, &report, false));
    golden(
        "policies.json",
        &serde_json::to_string_pretty(&report).unwrap(),
    );
    golden(
        "policies-wide.txt",
        &render::policies(&world, &report, true),
    );
    let one = policies(&world, Some("node-2")).unwrap();
    golden("policy.txt", &render::policies(&world, &one, true));
}

#[test]
fn a_policy_that_does_not_exist_is_an_error_with_those_that_do() {
    let (mut world, _) = mixed();
    let error = policies(&world, Some("infrence")).unwrap_err().to_string();
    assert_eq!(
        error,
        "GpuPolicy infrence does not exist; there are broken, inference, node-2"
    );
    world.policies.clear();
    let error = policies(&world, Some("p")).unwrap_err().to_string();
    assert_eq!(error, "GpuPolicy p does not exist");
    let none = policies(&world, None).unwrap();
    let text = render::policies(&world, &none, false);
    assert_eq!(
        text,
        "there is no GpuPolicy: the defaults of the nodes apply\n\nno action required"
    );
    world.unread = vec!["GpuPolicies cannot be listed".to_owned()];
    let none = policies(&world, None).unwrap();
    let text = render::policies(&world, &none, false);
    assert!(
        text.starts_with("GpuPolicies cannot be read\n\nunknown:"),
        "{text}"
    );
    assert!(text.ends_with("as far as is known"), "{text}");
}
