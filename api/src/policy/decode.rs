//! From an object of the API to a policy. Strict: an older schema in the cluster, or none, may have
//! let anything pass.

use std::collections::BTreeSet;

use divvy_model::Form;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    GpuPolicy, GpuPolicySpec, Instances, KIND, MigSettings, NodeMatch, OfferedMode, OveruseAction,
    PolicyRule, ShareSettings, ShareUnit,
};
use crate::names::API_VERSION;

/// Most rules of one policy.
pub(super) const MOST_RULES: usize = 64;
/// Most shares of one GPU.
pub(super) const MOST_SLOTS: u32 = 1024;
/// Lack of a rule that has settings of shares.
const SHARES_REQUIRE: &str = "requires TimeSlicing or Mps in modes, or mig.sharing";
/// All of a GPU.
const ALL_PERCENT: u32 = 100;

/// A claim is called idle after so many seconds at the earliest.
pub(super) const MOST_BRIEF_IDLENESS: u32 = 60;

/// A policy that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {problem}")]
pub struct PolicyError {
    /// Where in the object: `spec.rules[2]`.
    pub path: String,
    /// The fault there, and the value that is expected.
    pub problem: String,
}

fn wrong(path: impl Into<String>, problem: impl Into<String>) -> PolicyError {
    PolicyError {
        path: path.into(),
        problem: problem.into(),
    }
}

/// Reads a `GpuPolicy`, as the API has it or as a manifest has it.
pub fn decode_policy(object: &Value) -> Result<GpuPolicy, PolicyError> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let version = text("/apiVersion").unwrap_or_default();
    if version != API_VERSION {
        return Err(wrong(
            "apiVersion",
            format!("{version:?} is not read (expected {API_VERSION:?})"),
        ));
    }
    let kind = text("/kind").unwrap_or_default();
    if kind != KIND {
        return Err(wrong(
            "kind",
            format!("{kind:?} is no policy (expected {KIND:?})"),
        ));
    }
    let name = text("/metadata/name").ok_or_else(|| wrong("metadata.name", "is missing"))?;
    let spec = object
        .get("spec")
        .ok_or_else(|| wrong("spec", "is missing"))?;
    Ok(GpuPolicy {
        name: name.to_owned(),
        uid: text("/metadata/uid").map(str::to_owned),
        generation: object
            .pointer("/metadata/generation")
            .and_then(Value::as_i64),
        spec: decode_spec(spec)?,
    })
}

fn decode_spec(spec: &Value) -> Result<GpuPolicySpec, PolicyError> {
    // The rules one by one, so that an error says which.
    let mut rest = spec.clone();
    let rules = rest
        .as_object_mut()
        .and_then(|fields| fields.remove("rules"));
    let mut spec: GpuPolicySpec = part("spec", rest)?;
    let rules = match rules {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(rules)) => rules,
        Some(_) => return Err(wrong("spec.rules", "must be a list")),
    };
    if rules.len() > MOST_RULES {
        return Err(wrong(
            "spec.rules",
            format!("has {} entries, {MOST_RULES} are allowed", rules.len()),
        ));
    }
    check_nodes("spec.nodes", spec.nodes.as_ref())?;
    let mut names = BTreeSet::new();
    for (number, rule) in rules.into_iter().enumerate() {
        let path = format!("spec.rules[{number}]");
        let rule: PolicyRule = part(&path, rule)?;
        check_rule(&path, &rule)?;
        if let Some(name) = rule
            .name
            .as_ref()
            .filter(|name| !names.insert((*name).clone()))
        {
            return Err(wrong(
                format!("{path}.name"),
                format!("{name:?} is the name of an earlier rule, too"),
            ));
        }
        spec.rules.push(rule);
    }
    Ok(spec)
}

fn part<T: DeserializeOwned>(path: &str, value: Value) -> Result<T, PolicyError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        // Serde's words, less those of Rust.
        let problem = error
            .inner()
            .to_string()
            .replace("i32", "a whole number")
            .replace("u32", "a whole number");
        match error.path().to_string().as_str() {
            "." => wrong(path, problem),
            inside => wrong(format!("{path}.{inside}"), problem),
        }
    })
}

fn check_rule(path: &str, rule: &PolicyRule) -> Result<(), PolicyError> {
    check_nodes(&format!("{path}.nodes"), rule.nodes.as_ref())?;
    // An empty list would read as "all" to some and matches nothing; the same below.
    if let Some(gpus) = &rule.gpus
        && gpus.uuids.is_empty()
        && gpus.ordinals.is_empty()
        && gpus.products.is_empty()
        && gpus.pci_addresses.is_empty()
    {
        return Err(wrong(
            format!("{path}.gpus"),
            "fits nothing (leave it out to mean all GPUs)",
        ));
    }
    // Settings go with a mode that the rule names. Without modes a GPU is offered as its MIG mode
    // is, which can be partitions and never shares: `mig` may stand alone, `shares` may not.
    if let Some(modes) = &rule.modes {
        if modes.is_empty() {
            return Err(wrong(
                format!("{path}.modes"),
                "is empty (name a mode, or leave it out for the default)",
            ));
        }
        if rule.mig.is_some() && !modes.contains(&OfferedMode::Mig) {
            return Err(wrong(format!("{path}.mig"), "requires Mig in modes"));
        }
        let is_shared = |mode: &OfferedMode| Form::from(*mode).sharing.is_shared();
        let in_partitions = rule.mig.as_ref().is_some_and(|mig| mig.sharing.is_some());
        if rule.shares.is_some() && !in_partitions && !modes.iter().any(is_shared) {
            return Err(wrong(format!("{path}.shares"), SHARES_REQUIRE));
        }
    } else if rule.mig.as_ref().is_some_and(|mig| mig.sharing.is_some()) {
        let path = format!("{path}.mig.sharing");
        return Err(wrong(path, "requires Mig in modes"));
    } else if rule.shares.is_some() {
        return Err(wrong(format!("{path}.shares"), SHARES_REQUIRE));
    }
    if let Some(mig) = &rule.mig {
        check_sharing(&format!("{path}.mig.sharing"), mig)?;
        let overuse = rule.usage.as_ref().and_then(|usage| usage.overuse);
        if mig.sharing.is_some() && overuse == Some(OveruseAction::Evict) {
            let problem = "does not go with mig.sharing: harm is judged by the memory of the whole GPU, and not of \
                           the partition (use Report)";
            return Err(wrong(format!("{path}.usage.overuse"), problem));
        }
    }
    if let Some(profiles) = rule.mig.as_ref().and_then(|mig| mig.profiles.as_ref()) {
        let path = format!("{path}.mig.profiles");
        if profiles.is_empty() {
            return Err(wrong(
                path,
                "is empty (name a profile, or leave it out for all)",
            ));
        }
        if let Some(bad) = profiles.iter().find(|profile| !is_profile(profile)) {
            return Err(wrong(
                path,
                format!("{bad:?} is no MIG profile (such as \"1g.10gb\" or \"1g.10gb+me\")"),
            ));
        }
    }
    if let Some(shares) = &rule.shares {
        check_shares(&format!("{path}.shares"), shares)?;
    }
    let idle = rule.usage.as_ref().and_then(|usage| usage.idle.as_ref());
    if idle
        .and_then(|idle| idle.after_seconds)
        .is_some_and(|after| after < MOST_BRIEF_IDLENESS)
    {
        let problem = format!("must be {MOST_BRIEF_IDLENESS} or more");
        return Err(wrong(format!("{path}.usage.idle.afterSeconds"), problem));
    }
    Ok(())
}

/// Checks the ways in which partitions are shared.
fn check_sharing(path: &str, mig: &MigSettings) -> Result<(), PolicyError> {
    let Some(sharing) = &mig.sharing else {
        return Ok(());
    };
    if sharing.is_empty() {
        let problem =
            "is empty (name TimeSlicing or Mps, or leave it out: a claim for each partition)";
        return Err(wrong(path, problem));
    }
    if mig.instances == Some(Instances::Static) {
        let problem =
            "does not go with instances: Static (these partitions are for one claim each)";
        return Err(wrong(path, problem));
    }
    Ok(())
}

/// Checks the settings of shares.
fn check_shares(path: &str, shares: &ShareSettings) -> Result<(), PolicyError> {
    if shares
        .slots
        .is_some_and(|slots| !(1..=MOST_SLOTS).contains(&slots))
    {
        return Err(wrong(
            format!("{path}.slots"),
            format!("must be 1 to {MOST_SLOTS}"),
        ));
    }
    if shares.min_cores.is_some_and(|cores| cores > 100) {
        return Err(wrong(
            format!("{path}.minCores"),
            "must be 0 to 100 (percent)",
        ));
    }
    if shares.burst.is_some_and(|burst| burst.memory.is_none()) {
        return Err(wrong(
            format!("{path}.burst"),
            "is empty (set memory to a factor, such as \"1.5x\", or leave burst out)",
        ));
    }
    check_unit(path, shares)
}

/// Checks that settings of shares go with the unit in which these are given out.
fn check_unit(path: &str, shares: &ShareSettings) -> Result<(), PolicyError> {
    if shares.unit != Some(ShareUnit::Percent) {
        return match shares.min_percent {
            Some(_) => Err(wrong(
                format!("{path}.minPercent"),
                "requires unit: Percent (with amounts, use minMemory and minCores)",
            )),
            None => Ok(()),
        };
    }
    for (field, given) in [
        ("minMemory", shares.min_memory.is_some()),
        ("minCores", shares.min_cores.is_some()),
    ] {
        if given {
            return Err(wrong(
                format!("{path}.{field}"),
                "does not go with unit: Percent (use minPercent)",
            ));
        }
    }
    // More slots than percent would leave less than one step for a share.
    if shares.slots.is_some_and(|slots| slots > ALL_PERCENT) {
        return Err(wrong(
            format!("{path}.slots"),
            format!(
                "must be 1 to {ALL_PERCENT} with unit: Percent (a share has 1 percent or more)"
            ),
        ));
    }
    if shares
        .min_percent
        .is_some_and(|percent| !(1..=ALL_PERCENT).contains(&percent))
    {
        return Err(wrong(
            format!("{path}.minPercent"),
            format!("must be 1 to {ALL_PERCENT}"),
        ));
    }
    Ok(())
}

fn check_nodes(path: &str, nodes: Option<&NodeMatch>) -> Result<(), PolicyError> {
    let Some(nodes) = nodes else { return Ok(()) };
    if nodes.names.is_empty() && nodes.selector.is_none() {
        return Err(wrong(path, "fits nothing (leave it out to mean all nodes)"));
    }
    let mut expressions = nodes
        .selector
        .iter()
        .flat_map(|selector| &selector.match_expressions);
    if let Some(expression) = expressions.find(|expression| !expression.is_complete()) {
        let problem = format!(
            "values of {:?} do not go with its operator (In and NotIn need some, Exists and DoesNotExist have none)",
            expression.key
        );
        return Err(wrong(format!("{path}.selector"), problem));
    }
    Ok(())
}

/// `3g.40gb`, `1g.10gb+me`: the pattern of the schema.
fn is_profile(text: &str) -> bool {
    let number = |text: &str| {
        !text.is_empty() && text.len() <= 4 && text.bytes().all(|b| b.is_ascii_digit())
    };
    let Some((slices, rest)) = text.split_once("g.") else {
        return false;
    };
    let Some((memory, suffix)) = rest.split_once("gb") else {
        return false;
    };
    let suffix_is_fine = suffix.is_empty()
        || suffix.strip_prefix(['+', '-']).is_some_and(|s| {
            !s.is_empty() && s.bytes().all(|b| b.is_ascii_lowercase() || b == b'.')
        });
    number(slices) && number(memory) && suffix_is_fine
}
