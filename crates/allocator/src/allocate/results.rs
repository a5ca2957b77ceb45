//! From picked devices to the AllocationResult that the API stores.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceAllocationResult,
    DeviceRequestAllocationResult,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;

use super::AllocError;
use super::capacity;
use super::request::{Candidate, Claim, Prepared, Request};
use super::search::{Pick, Search};
use super::shares::{self, Share};
use crate::features::Features;
use crate::nodes;

/// The results of a search that found a solution, one a claim.
pub(super) fn assemble(
    prepared: &Prepared<'_>,
    search: &Search<'_, '_>,
) -> Result<Vec<AllocationResult>, AllocError> {
    let claims = prepared
        .claims
        .iter()
        .zip(&search.picks)
        .zip(&search.chosen);
    claims
        .map(|((claim, picks), chosen)| of_claim(prepared, claim, picks, chosen))
        .collect()
}

fn of_claim(
    prepared: &Prepared<'_>,
    claim: &Claim<'_>,
    picks: &[Pick],
    chosen: &[usize],
) -> Result<AllocationResult, AllocError> {
    let mut results = Vec::with_capacity(picks.len());
    let mut candidates = Vec::with_capacity(picks.len());
    for pick in picks {
        let choice = claim.requests.get(pick.request);
        let request = choice.and_then(|c| c.alternatives.get(pick.alternative));
        if let (Some(request), Some(candidate)) = (request, prepared.candidates.get(pick.candidate))
        {
            let mut result = result(prepared.features, request, candidate);
            if candidate.shared {
                let number = results.len();
                let share = Share {
                    claim: claim.object,
                    request: &request.name,
                    device: candidate.id(),
                    number,
                };
                result.share_id = Some(shares::id(prepared.inputs.allocated, share));
                result.consumed_capacity = consumed(prepared.features, request, candidate);
            }
            results.push(result);
            candidates.push(candidate);
        }
    }
    Ok(AllocationResult {
        allocation_timestamp: None,
        devices: Some(DeviceAllocationResult {
            config: some_unless_empty(configs(claim, chosen)),
            results: some_unless_empty(results),
        }),
        node_selector: node_selector(prepared, &candidates)?,
    })
}

fn some_unless_empty<T>(items: Vec<T>) -> Option<Vec<T>> {
    if items.is_empty() { None } else { Some(items) }
}

fn result(
    features: Features,
    request: &Request<'_>,
    candidate: &Candidate<'_>,
) -> DeviceRequestAllocationResult {
    let device = candidate.device;
    let binding = features.device_binding;
    DeviceRequestAllocationResult {
        request: request.name.clone(),
        driver: candidate.driver.to_owned(),
        pool: candidate.pool.to_owned(),
        device: device.name.clone(),
        admin_access: request.admin.then_some(true),
        tolerations: request.tolerations.filter(|t| !t.is_empty()).cloned(),
        binding_conditions: device.binding_conditions.clone().filter(|_| binding),
        binding_failure_conditions: device
            .binding_failure_conditions
            .clone()
            .filter(|_| binding),
        ..DeviceRequestAllocationResult::default()
    }
}

/// Computes what a share consumes of every capacity that the device has.
fn consumed(
    features: Features,
    request: &Request<'_>,
    candidate: &Candidate<'_>,
) -> Option<BTreeMap<String, Raw>> {
    // The search has computed the same: a device that is not fit is not picked.
    let demands = capacity::demands(
        request.capacity,
        candidate.device,
        features.fractional_capacity,
    )
    .ok()?
    .ok()?;
    let amounts: BTreeMap<String, Raw> = demands
        .into_iter()
        .map(|d| (d.capacity.to_owned(), Raw(d.amount.to_string())))
        .collect();
    (!amounts.is_empty()).then_some(amounts)
}

/// The configurations that apply: of the classes first, then of the claim; later ones win.
fn configs(claim: &Claim<'_>, chosen: &[usize]) -> Vec<DeviceAllocationConfiguration> {
    let requests: Vec<&Request<'_>> = claim
        .requests
        .iter()
        .zip(chosen)
        .filter_map(|(choice, alternative)| choice.alternatives.get(*alternative))
        .collect();
    let mut configs = Vec::new();
    let mut classes = BTreeSet::new();
    for request in &requests {
        let class = request.class;
        if !classes.insert(class.metadata.name.as_deref()) {
            continue;
        }
        // A class that several requests use counts once, for all of them.
        let users = requests
            .iter()
            .filter(|r| r.class.metadata.name == class.metadata.name);
        let users: Vec<String> = users.map(|r| r.name.clone()).collect();
        for config in class.spec.iter().flat_map(|s| s.config.iter().flatten()) {
            configs.push(DeviceAllocationConfiguration {
                source: "FromClass".to_owned(),
                requests: scope(users.clone(), &requests),
                opaque: config.opaque.clone(),
            });
        }
    }
    for config in claim.spec.config.iter().flatten() {
        let named = config.requests.clone().unwrap_or_default();
        if named.is_empty() || requests.iter().any(|r| covers(&named, r)) {
            configs.push(DeviceAllocationConfiguration {
                source: "FromClaim".to_owned(),
                requests: scope(named, &requests),
                opaque: config.opaque.clone(),
            });
        }
    }
    configs
}

/// Says whether a list of request names means the request: by its full name, or by that of its
/// parent.
fn covers(named: &[String], request: &Request<'_>) -> bool {
    let parent = request.name.split('/').next().unwrap_or_default();
    named.iter().any(|n| *n == request.name || n == parent)
}

/// Names that cover every request say no more than no names.
fn scope(named: Vec<String>, requests: &[&Request<'_>]) -> Option<Vec<String>> {
    if requests.iter().all(|r| covers(&named, r)) {
        None
    } else {
        some_unless_empty(named)
    }
}

/// Where the claim can be used: one node, what the devices' selectors have in common, or
/// everywhere.
fn node_selector(
    prepared: &Prepared<'_>,
    candidates: &[&Candidate<'_>],
) -> Result<Option<NodeSelector>, AllocError> {
    let mut merged = NodeSelectorTerm::default();
    for candidate in candidates {
        let (spec, device) = (&candidate.slice.spec, candidate.device);
        let per_device = spec.per_device_node_selection == Some(true);
        let (name, selector) = if per_device {
            (&device.node_name, &device.node_selector)
        } else {
            (&spec.node_name, &spec.node_selector)
        };
        if name.is_some() || device.binds_to_node == Some(true) {
            let node = nodes::name(prepared.inputs.node);
            let only = NodeSelectorRequirement {
                key: "metadata.name".to_owned(),
                operator: "In".to_owned(),
                values: Some(vec![node.to_owned()]),
            };
            let term = NodeSelectorTerm {
                match_fields: Some(vec![only]),
                match_expressions: None,
            };
            return Ok(Some(NodeSelector {
                node_selector_terms: vec![term],
            }));
        }
        let Some(selector) = selector else { continue };
        let [term] = selector.node_selector_terms.as_slice() else {
            return Err(AllocError::NodeSelectorTerms {
                slice: candidate.slice.metadata.name.clone().unwrap_or_default(),
                terms: selector.node_selector_terms.len(),
            });
        };
        merge(
            &mut merged.match_expressions,
            term.match_expressions.as_ref(),
        );
        merge(&mut merged.match_fields, term.match_fields.as_ref());
    }
    let somewhere = merged.match_expressions.is_some() || merged.match_fields.is_some();
    Ok(somewhere.then(|| NodeSelector {
        node_selector_terms: vec![merged],
    }))
}

/// Adds requirements that are not there yet; the order of values does not matter.
fn merge(
    into: &mut Option<Vec<NodeSelectorRequirement>>,
    from: Option<&Vec<NodeSelectorRequirement>>,
) {
    for requirement in from.into_iter().flatten() {
        let values = |r: &NodeSelectorRequirement| {
            r.values.iter().flatten().cloned().collect::<BTreeSet<_>>()
        };
        let same = |r: &NodeSelectorRequirement| {
            r.key == requirement.key
                && r.operator == requirement.operator
                && values(r) == values(requirement)
        };
        let list = into.get_or_insert_default();
        if !list.iter().any(same) {
            list.push(requirement.clone());
        }
    }
}
