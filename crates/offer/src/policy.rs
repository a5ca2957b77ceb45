//! Finds the rule that decides about a GPU. Pure: the node plugin calls it whenever policies, the
//! node's labels or its GPUs change, `divvy inventory` and `divvy demo` with policies from files.
//! `docs/policy.md` explains this to users.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use divvy_api::policy::{self as api, GpuMatch, GpuPolicy, NodeMatch, PolicyRule};
use divvy_model::{
    Form, Gpu, GpuUuid, Inventory, MemoryCaps, Ordinals, PciAddress, ShareUnit, TimeSlice,
};
use serde::Serialize;

use crate::{GpuRules, Instances, ModeLock, Modes, PlacementOrder, Rules};

/// Facts of a node that rules ask about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeFacts<'a> {
    pub name: &'a str,
    pub labels: &'a BTreeMap<String, String>,
}

/// Decisions of the policies about a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Resolved {
    /// The rules of every GPU that is known: those of its rule, or the node's defaults.
    pub rules: Rules,
    /// The rule that decided; nothing for GPUs that none matches.
    pub by: BTreeMap<GpuUuid, RuleRef>,
    /// The permission to publish one GPU in several modes, if a policy says it, and which policy.
    pub mode_lock: Option<(ModeLock, String)>,
    /// Problems that a person should look at.
    pub problems: Vec<PolicyProblem>,
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleRef {
    /// Name of the policy.
    pub policy: String,
    /// Index of the rule, from 0.
    pub index: usize,
    /// The rule's name, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{}/{name}", self.policy),
            None => write!(f, "{}/rules[{}]", self.policy, self.index),
        }
    }
}

/// A rule that matches a GPU and does not do what was probably meant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyProblem {
    pub rule: RuleRef,
    pub gpu: GpuUuid,
    /// Description of the problem, and what there is to choose from.
    pub problem: String,
}

impl fmt::Display for PolicyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}: {}", self.rule, self.gpu, self.problem)
    }
}

/// Finds the rule of every GPU: policies by priority (higher first), then by name; their rules in
/// order; the first that matches node and GPU decides. Its gaps are filled from `defaults`,
/// which are also the rules of the other GPUs.
pub fn resolve(
    policies: &[GpuPolicy],
    node: &NodeFacts<'_>,
    inventory: &Inventory,
    ordinals: &Ordinals,
    defaults: &GpuRules,
) -> Resolved {
    let mut policies: Vec<&GpuPolicy> = policies
        .iter()
        .filter(|policy| fits_node(policy.spec.nodes.as_ref(), node))
        .collect();
    policies.sort_by(|a, b| (b.spec.priority, &a.name).cmp(&(a.spec.priority, &b.name)));
    // Flat, in the order in which they decide: the first rule that fits ends the search for a GPU.
    let rules: Vec<(RuleRef, &PolicyRule)> = policies
        .iter()
        .flat_map(|policy| {
            let rules = policy.spec.rules.iter().enumerate();
            rules
                .filter(|(_, rule)| fits_node(rule.nodes.as_ref(), node))
                .map(|(index, rule)| {
                    (
                        RuleRef {
                            policy: policy.name.clone(),
                            index,
                            name: rule.name.clone(),
                        },
                        rule,
                    )
                })
        })
        .collect();
    let mut resolved = Resolved {
        mode_lock: policies.iter().find_map(|policy| {
            let lock = match policy.spec.mode_lock? {
                api::ModeLock::Auto => ModeLock::Auto,
                api::ModeLock::Enabled => ModeLock::On,
                api::ModeLock::Disabled => ModeLock::Off,
            };
            Some((lock, policy.name.clone()))
        }),
        ..Resolved::default()
    };
    // GPUs that cannot be read too: what they were last offered as is to last.
    let known: BTreeSet<&GpuUuid> = inventory
        .gpus
        .keys()
        .chain(ordinals.iter().map(|(uuid, _)| uuid))
        .collect();
    for uuid in known {
        let gpu = inventory.gpus.get(uuid);
        let fits = |(_, rule): &&(RuleRef, &PolicyRule)| {
            fits_gpu(rule.gpus.as_ref(), uuid, ordinals.of(uuid), gpu)
        };
        let found = rules.iter().find(fits);
        // Rules that were asked before: one that has missed the GPU by a star is most likely meant
        // for it.
        let missed = rules.iter().take_while(|rule| !fits(rule));
        let missed = missed.filter_map(|(by, rule)| {
            Some(PolicyProblem {
                rule: by.clone(),
                gpu: uuid.clone(),
                problem: missing_star(rule, gpu?)?,
            })
        });
        resolved.problems.extend(missed);
        let rules = match found {
            None => defaults.clone(),
            Some((by, rule)) => {
                let caps = inventory.system.memory_caps;
                let problems = gpu.map(|gpu| {
                    let of_gpu = [no_such_profile(rule, gpu), fewer_shares(rule, gpu, caps)];
                    let of_rule = [no_limits(rule, caps), not_in_partitions(rule, gpu, caps)];
                    of_gpu.into_iter().chain(of_rule)
                });
                resolved
                    .problems
                    .extend(problems.into_iter().flatten().flatten().map(|problem| {
                        PolicyProblem {
                            rule: by.clone(),
                            gpu: uuid.clone(),
                            problem,
                        }
                    }));
                resolved.by.insert(uuid.clone(), by.clone());
                apply(rule, gpu, defaults)
            }
        };
        resolved.rules.insert(uuid.clone(), rules);
    }
    resolved
}

impl Resolved {
    /// Keeps earlier decisions about GPUs that cannot be read now: a rule that names their product
    /// does not match them while it is unknown.
    pub fn keep_unread(&mut self, before: &Self, inventory: &Inventory) {
        let unread: Vec<GpuUuid> = self
            .rules
            .keys()
            .filter(|uuid| !inventory.gpus.contains_key(*uuid))
            .cloned()
            .collect();
        for uuid in unread {
            // Rules and the rule that decided go together, or a status would name a rule that does
            // not apply.
            let Some(rules) = before.rules.get(&uuid) else {
                continue;
            };
            self.rules.insert(uuid.clone(), rules.clone());
            match before.by.get(&uuid) {
                Some(by) => self.by.insert(uuid, by.clone()),
                None => self.by.remove(&uuid),
            };
        }
    }
}

/// Returns whether a policy or rule is for the node.
pub fn fits_node(wanted: Option<&NodeMatch>, node: &NodeFacts<'_>) -> bool {
    wanted.is_none_or(|wanted| {
        wanted.names.contains(node.name)
            || wanted
                .selector
                .as_ref()
                .is_some_and(|selector| selector.matches(node.labels))
    })
}

fn fits_gpu(
    wanted: Option<&GpuMatch>,
    uuid: &GpuUuid,
    ordinal: Option<u32>,
    gpu: Option<&Gpu>,
) -> bool {
    let Some(wanted) = wanted else { return true };
    wanted
        .uuids
        .iter()
        .any(|text| text.eq_ignore_ascii_case(uuid.as_str()))
        || ordinal.is_some_and(|ordinal| wanted.ordinals.contains(&ordinal))
        || gpu.is_some_and(|gpu| {
            let at = |text: &String| {
                text.parse::<PciAddress>()
                    .is_ok_and(|a| a == gpu.facts.pci_address)
            };
            wanted
                .products
                .iter()
                .any(|pattern| is_like(&gpu.facts.product_name, pattern))
                || wanted.pci_addresses.iter().any(at)
        })
}

/// Returns whether a product's name is like a pattern: `*` stands for any text; letter case does
/// not matter.
pub fn is_like(text: &str, pattern: &str) -> bool {
    let (text, pattern) = (text.to_lowercase(), pattern.to_lowercase());
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    // Beginning and end are fixed. A part between two stars is taken where it comes first, which
    // leaves the most for the others.
    for part in parts {
        let Some((_, after)) = rest.split_once(part) else {
            return false;
        };
        rest = after;
    }
    rest.ends_with(last)
}

fn apply(rule: &PolicyRule, gpu: Option<&Gpu>, defaults: &GpuRules) -> GpuRules {
    // Field by field over the defaults: a rule that names one thing leaves all others alone.
    let mut rules = defaults.clone();
    if let Some(modes) = &rule.modes {
        let mut modes: BTreeSet<_> = modes.iter().copied().map(Into::into).collect();
        let shares_partitions = rule.mig.as_ref().and_then(|mig| mig.sharing.as_ref());
        modes.extend(shares_partitions.into_iter().flatten().map(|by| match by {
            api::PartitionSharing::TimeSlicing => Form::SHARED_PARTITIONS,
            api::PartitionSharing::Mps => Form::MPS_PARTITIONS,
        }));
        rules.modes = Modes::Only(modes);
    }
    if let Some(mig) = &rule.mig {
        if mig.profiles.is_some() {
            rules.profiles.clone_from(&mig.profiles);
        }
        if let Some(order) = mig.placement_order {
            rules.order = match order {
                api::PlacementOrder::Ascending => PlacementOrder::Ascending,
                api::PlacementOrder::Descending => PlacementOrder::Descending,
            };
        }
        if let Some(instances) = mig.instances {
            rules.instances = match instances {
                api::Instances::OnDemand => Instances::Ours,
                api::Instances::Static => Instances::Static,
            };
        }
    }
    if let Some(shares) = &rule.shares {
        rules.shares.unit = shares.unit.map_or(rules.shares.unit, |unit| match unit {
            api::ShareUnit::Amounts => ShareUnit::Amounts,
            api::ShareUnit::Percent => ShareUnit::Percent,
        });
        rules.shares.smallest_percent = shares.min_percent.or(rules.shares.smallest_percent);
        rules.shares.slots = shares.slots.unwrap_or(rules.shares.slots);
        rules.shares.smallest_mib = shares
            .min_memory
            .map_or(rules.shares.smallest_mib, |memory| {
                Some(memory.mib().max(1))
            });
        rules.shares.smallest_cores = shares.min_cores.unwrap_or(rules.shares.smallest_cores);
        rules.shares.time_slice = shares
            .time_slice
            .map_or(rules.shares.time_slice, |slice| Some(time_slice(slice)));
        let burst = shares.burst.and_then(|burst| burst.memory);
        rules.shares.burst = burst.map_or(rules.shares.burst, |factor| factor.burst);
        let memory = gpu.and_then(|gpu| gpu.facts.memory_bytes);
        rules.held_back_mib = shares
            .reserved_memory
            .map_or(rules.held_back_mib, |part| part.mib_of(memory));
    }
    if let Some(health) = &rule.health {
        rules.no_execute = health.evict.unwrap_or(rules.no_execute);
        let restarts = health.restart_wedged_mps;
        rules.restarts_wedged_mps = restarts.unwrap_or(rules.restarts_wedged_mps);
    }
    let counters = rule.quota.as_ref().and_then(|quota| quota.counters);
    rules.counts_memory = counters.unwrap_or(rules.counts_memory);
    if let Some(usage) = &rule.usage {
        rules.usage.evict = usage.overuse == Some(api::OveruseAction::Evict);
        if let Some(idle) = &usage.idle {
            rules.usage.idle_after = idle.after_seconds;
            rules.usage.reclaim = idle.action == Some(api::IdleAction::Reclaim);
            rules.usage.grace = idle.grace_seconds.unwrap_or(rules.usage.grace);
        }
    }
    rules
}

fn time_slice(slice: api::TimeSlice) -> TimeSlice {
    match slice {
        api::TimeSlice::Default => TimeSlice::Default,
        api::TimeSlice::Short => TimeSlice::Short,
        api::TimeSlice::Medium => TimeSlice::Medium,
        api::TimeSlice::Long => TimeSlice::Long,
    }
}

/// Returns what is wrong with a rule whose pattern of products is a part of the product's name: it
/// matches whole names only.
fn missing_star(rule: &PolicyRule, gpu: &Gpu) -> Option<String> {
    let product = &gpu.facts.product_name;
    let is_part = |pattern: &&String| {
        !pattern.contains('*')
            && !pattern.is_empty()
            && !is_like(product, pattern)
            && is_like(product, &format!("*{pattern}*"))
    };
    let pattern = rule.gpus.as_ref()?.products.iter().find(is_part)?;
    Some(format!(
        "products: [{pattern}] does not match {product}: a pattern is for the whole name (write \"*{pattern}*\")"
    ))
}

/// Returns a word on fewer shares than a rule has slots, where its least share takes more memory
/// than there is for each slot, or more percent. A least share of more than the GPU has to give
/// makes one share of all of it.
fn fewer_shares(rule: &PolicyRule, gpu: &Gpu, caps: MemoryCaps) -> Option<String> {
    let shares = rule.shares.as_ref()?;
    if let (Some(slots), Some(least)) = (shares.slots, shares.min_percent)
        && 100 / slots.max(1) < least
    {
        return Some(format!(
            "a share without a request gets {least} percent, not 100/{slots}: minPercent is {least}"
        ));
    }
    // The memory of the GPU says nothing about shares of its partitions.
    let least = shares.min_memory.filter(|_| shares_gpu(rule))?.mib();
    let memory = gpu.facts.memory_bytes?;
    let held_back = shares
        .reserved_memory
        .map_or(0, |part| part.mib_of(Some(memory)));
    let rules = GpuRules {
        held_back_mib: held_back,
        ..GpuRules::default()
    };
    let has = (memory >> 20).saturating_sub(rules.withheld_mib(&gpu.facts, caps));
    if least > has {
        return Some(format!(
            "it has one share, of all its memory: minMemory is {least}Mi, and it has {has}Mi for shares"
        ));
    }
    let (slots, fit) = (u64::from(shares.slots?), has / least.max(1));
    (fit < slots).then(|| {
        format!(
            "only {fit} of its {slots} slots can be used at once: minMemory is {least}Mi, and it has {has}Mi for shares"
        )
    })
}

/// Returns whether a rule offers shares of the whole GPU.
fn shares_gpu(rule: &PolicyRule) -> bool {
    let mut modes = rule.modes.iter().flatten();
    modes.any(|mode| Form::from(*mode).sharing.is_shared())
}

/// Returns a word on limits above requests, where the node keeps none.
fn no_limits(rule: &PolicyRule, caps: MemoryCaps) -> Option<String> {
    rule.shares.as_ref()?.burst?;
    let lack = caps.lack()?;
    Some(format!(
        "shares.burst has no effect, since the node caps no memory of shares: {lack}"
    ))
}

/// Returns a word on settings of shares that shares of partitions do not have, where a rule offers
/// these.
fn not_in_partitions(rule: &PolicyRule, gpu: &Gpu, caps: MemoryCaps) -> Option<String> {
    rule.mig.as_ref()?.sharing.as_ref()?;
    gpu.mig.as_ref()?;
    let shares = rule.shares.as_ref()?;
    // Without caps in the node, `no_limits` reports it of all shares.
    let is_capped = caps.lack().is_none();
    let set = [
        ("reservedMemory", shares.reserved_memory.is_some()),
        ("timeSlice", shares.time_slice.is_some()),
        ("burst", shares.burst.is_some() && is_capped),
    ];
    let names = set.into_iter().filter(|(_, is_set)| *is_set);
    let names: Vec<String> = names.map(|(name, _)| format!("shares.{name}")).collect();
    let (of, have) = match names.as_slice() {
        [] => return None,
        [_] => ("has no effect", "it"),
        _ => ("have no effect", "them"),
    };
    let names = names.join(", ");
    let remedy = if shares_gpu(rule) {
        format!("only shares of the whole GPU can have {have}")
    } else {
        format!("leave {have} out, or add TimeSlicing to modes for shares of the whole GPU")
    };
    Some(format!(
        "{names} {of} on shares of partitions (mig.sharing), which have all memory of their partition, in turns of \
         the driver's length: {remedy}"
    ))
}

/// Profiles that no such GPU has are most likely a slip.
fn no_such_profile(rule: &PolicyRule, gpu: &Gpu) -> Option<String> {
    let wanted = rule.mig.as_ref()?.profiles.as_ref()?;
    let capabilities = &gpu.mig.as_ref()?.capabilities;
    let has: BTreeSet<String> = capabilities
        .profiles()
        .iter()
        .filter_map(|p| Some(capabilities.name(p)?.to_string()))
        .collect();
    (!has.is_empty() && wanted.is_disjoint(&has)).then(|| {
        format!(
            "it has none of the MIG profiles {} (it has {})",
            wanted.iter().cloned().collect::<Vec<_>>().join(", "),
            has.into_iter().collect::<Vec<_>>().join(", ")
        )
    })
}

#[cfg(test)]
mod tests;
