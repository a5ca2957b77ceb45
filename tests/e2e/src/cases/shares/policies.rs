//! Effects of policies on GPUs, and of a change of one on those who hold GPUs already.

use super::{
    Context, Env, POLICIES, Policy, Result, Value, check, create, end, ensure, h100, json, names,
    offered, poll, run, share, spec, types, wait_for_modes, whole,
};
use crate::case::PATIENCE;
use crate::config::Layout;

pub(in crate::cases) fn per_gpu(env: &Env) -> Result<()> {
    let (shared, cut, exclusive) = (h100(env, 0)?, h100(env, 1)?, h100(env, 2)?);
    let rule = |gpu: &str, modes: &[&str]| json!({"gpus": {"uuids": [gpu]}, "modes": modes});
    let mut cut_rule = rule(cut, &["Mig"]);
    if let Some(fields) = cut_rule.as_object_mut() {
        fields.insert(
            "mig".to_owned(),
            json!({"profiles": ["1g.10gb", "3g.40gb"]}),
        );
    }
    let rules =
        json!({"rules": [rule(shared, &["TimeSlicing"]), cut_rule, rule(exclusive, &["Whole"])]});
    let _policy = Policy::create(env, &env.namespace, &rules)?;
    wait_for_modes(env, &[shared], &["TimeSlicing"])?;
    wait_for_modes(env, &[cut], &["Mig"])?;
    wait_for_modes(env, &[exclusive], &["Whole"])?;
    // What is no longer offered is tainted at once, and withdrawn when a late write of the
    // scheduler must have arrived.
    poll("only the profiles that the rule names", PATIENCE, || {
        let devices = env.driver.devices()?;
        let profiles: std::collections::BTreeSet<&str> = devices
            .iter()
            .filter(|device| super::at(device, "attributes.parentUUID.string") == cut)
            .filter(|device| !super::is_withdrawn(device))
            .filter_map(|device| super::at(device, "attributes.profile.string").as_str())
            .collect();
        Ok(profiles.iter().eq(&["1g.10gb", "3g.40gb"]))
    })?;
    // All three at once, on one node.
    let a = run(env, "a", &[share("gpu", &[shared], &[("cores", "10")])])?;
    let b = create(env, "b", &[super::partition("part", &[cut], "3g.40gb")])?;
    let c = run(env, "c", &[whole(&[exclusive])])?;
    env.wait_until_running("b")?;
    for (name, uid) in [("a", a), ("b", b), ("c", c)] {
        end(env, name, &uid)?;
    }
    Ok(())
}

pub(in crate::cases) fn per_node(env: &Env) -> Result<()> {
    let (by_name, by_label) = (h100(env, 3)?, h100(env, 4)?);
    let rules = |gpu: &str, nodes: &Value| {
        let mut rules = spec(&[gpu], &["TimeSlicing"]);
        rules
            .as_object_mut()
            .map(|fields| fields.insert("nodes".to_owned(), nodes.clone()));
        rules
    };
    let other = Policy::create(
        env,
        "e2e-other-node",
        &rules(by_name, &json!({"names": ["node-2"]})),
    )?;
    let named = Policy::create(
        env,
        "e2e-named-node",
        &rules(by_name, &json!({"names": [Layout::NODE]})),
    )?;
    let selector = json!({"selector": {"matchLabels": {"pool": "inference"}}});
    let labelled = Policy::create(env, "e2e-labelled-node", &rules(by_label, &selector))?;
    wait_for_modes(env, &[by_name], &["TimeSlicing"])?;
    ensure!(
        offered(env, by_label)? != types(&["TimeSlicing"]),
        "a policy for nodes with a label is followed without the label"
    );
    let node = format!("/api/v1/nodes/{}", Layout::NODE);
    let label = |value: Value| {
        env.api()
            .patch(&node, &json!({"metadata": {"labels": {"pool": value}}}))
    };
    label(json!("inference"))?;
    let followed = wait_for_modes(env, &[by_label], &["TimeSlicing"]);
    label(Value::Null)?;
    followed?;
    poll("end of what the label brought", PATIENCE, || {
        Ok(offered(env, by_label)? != types(&["TimeSlicing"]))
    })?;
    drop((other, named, labelled));
    Ok(())
}

/// A policy changes under claims that are prepared, and under one that is allocated and not yet
/// prepared.
pub(in crate::cases) fn hot(env: &Env) -> Result<()> {
    let gpu = h100(env, 5)?;
    let policy = Policy::modes(env, &[gpu], &["TimeSlicing"])?;
    let wanted = [("memory", "10Gi")];
    let prepared = run(env, "prepared", &[share("gpu", &[gpu], &wanted)])?;
    env.driver.stop()?;
    let allocated = create(env, "allocated", &[share("gpu", &[gpu], &wanted)])?;
    super::given(env, "allocated")?;
    policy.change(&spec(&[gpu], &["Whole"]))?;
    env.driver.start()?;
    // What was promised is kept.
    env.nudge("allocated")?;
    check(env, "allocated", "main", "allocated")?;
    // No other claim gets it, in neither way.
    poll("a share that no other claim gets", PATIENCE, || {
        Ok(!offered(env, gpu)?.contains("gpu-share"))
    })?;
    let late = create(env, "late", &[share("gpu", &[gpu], &wanted)])?;
    env.wait_until_unschedulable("late")?;
    let exclusive = create(env, "exclusive", &[whole(&[gpu])])?;
    env.wait_until_unschedulable("exclusive")?;
    end(env, "prepared", &prepared)?;
    end(env, "allocated", &allocated)?;
    check(env, "exclusive", "main", "exclusive")?;
    wait_for_modes(env, &[gpu], &["Whole"])?;
    end(env, "exclusive", &exclusive)?;
    // And back, for the one that still waits.
    policy.change(&spec(&[gpu], &["TimeSlicing"]))?;
    check(env, "late", "main", "late")?;
    end(env, "late", &late)
}

pub(in crate::cases) fn bad(env: &Env) -> Result<()> {
    let gpu = h100(env, 6)?;
    let refused = |spec: &Value, word: &str| -> Result<()> {
        let object = json!({
            "apiVersion": names::API_VERSION, "kind": "GpuPolicy", "metadata": {"name": "e2e-bad"}, "spec": spec,
        });
        match env.api().create(POLICIES, &object) {
            Ok(_) => {
                env.api()
                    .delete(&format!("{POLICIES}/e2e-bad"), &json!({}))?;
                anyhow::bail!("the API server stored {spec}")
            }
            Err(error) => {
                let said = format!("{error:#}");
                ensure!(
                    said.contains(word),
                    "the refusal does not say {word:?}: {said}"
                );
                Ok(())
            }
        }
    };
    refused(&spec(&[gpu], &["Timeslicing"]), "modes")?;
    let shares = json!({"rules": [{"modes": ["Whole"], "shares": {"slots": 4}}]});
    refused(&shares, "TimeSlicing")?;
    let slots = json!({"rules": [{"modes": ["TimeSlicing"], "shares": {"slots": 0}}]});
    refused(&slots, "slots")?;
    let both = json!({"unit": "Percent", "minMemory": "1Gi"});
    let amounts = json!({"minPercent": 10});
    for (shares, word) in [(both, "use minPercent"), (amounts, "requires unit Percent")] {
        let spec = json!({"rules": [{"modes": ["TimeSlicing"], "shares": shares}]});
        refused(&spec, word)?;
    }
    Ok(())
}

pub(in crate::cases) fn two(env: &Env) -> Result<()> {
    let gpu = h100(env, 7)?;
    let with = |modes: &[&str], priority: i32| {
        let mut spec = spec(&[gpu], modes);
        spec.as_object_mut()
            .map(|fields| fields.insert("priority".to_owned(), json!(priority)));
        spec
    };
    // Among equals the name decides.
    let first = Policy::create(env, "e2e-a", &with(&["TimeSlicing"], 0))?;
    let second = Policy::create(env, "e2e-b", &with(&["Whole"], 0))?;
    wait_for_modes(env, &[gpu], &["TimeSlicing"])?;
    second.change(&with(&["Whole"], 10))?;
    wait_for_modes(env, &[gpu], &["Whole"])?;
    drop(second);
    wait_for_modes(env, &[gpu], &["TimeSlicing"])?;
    drop(first);
    poll("the default again", PATIENCE, || {
        Ok(offered(env, gpu)? != types(&["TimeSlicing"]))
    })
    .context("policies were deleted")
}
