//! Shares of one GPU and of its partitions: what each claim was granted, and what is left. Pure.

use std::collections::BTreeMap;

use divvy_api::names::capacity;
use divvy_api::node::GpuStatus;
use divvy_offer::pool_name;
use k8s_openapi::api::resource::v1::{AllocationResult, Device, DeviceRequestAllocationResult};

use super::read::CLAIMS;
use super::snapshot::{Snapshot, full_name};
use crate::format::{bytes, total};
use divvy_why::device::{amount, kind, memory, share_memory};
use divvy_why::driver::{own, plain};

/// Capacities of shares in the order in which they are shown.
const SHOWN: [&str; 4] = [
    capacity::MEMORY,
    capacity::PERCENT,
    capacity::CORES,
    capacity::SLOTS,
];

/// Returns the amounts that the shares of a GPU and of its partitions were granted, by claim and
/// device.
pub(super) fn granted(
    snapshot: &Snapshot,
    node: &str,
    gpu: &GpuStatus,
) -> BTreeMap<String, BTreeMap<String, String>> {
    let mut all: BTreeMap<String, BTreeMap<String, Vec<String>>> = BTreeMap::new();
    for (claim, allocation, result) in results(snapshot, node, gpu) {
        let device = device(snapshot, node, &result.device);
        let of_claim = all.entry(claim).or_default();
        let words = of_claim.entry(result.device.clone()).or_default();
        words.push(granted_by(allocation, result, device));
    }
    let joined = |words: BTreeMap<String, Vec<String>>| {
        let words = words.into_iter();
        words.map(|(device, words)| (device, words.join("; ")))
    };
    all.into_iter()
        .map(|(claim, words)| (claim, joined(words).collect()))
        .collect()
}

fn granted_by(
    allocation: &AllocationResult,
    result: &DeviceRequestAllocationResult,
    device: Option<&Device>,
) -> String {
    let consumed = result.consumed_capacity.iter().flatten();
    let mut words: Vec<String> = consumed
        .map(|(name, amount)| (plain(name), amount))
        .filter(|(name, _)| *name != capacity::MEMORY)
        .map(|(name, amount)| format!("{name} {}", amount.0))
        .collect();
    let memory = result.consumed_capacity.as_ref();
    if let Some(memory) = memory.and_then(|consumed| share_memory(device, consumed)) {
        let limit = crate::limit::of_share(allocation, result, device);
        let limit = limit.map_or_else(String::new, |limit| format!(" (limit {})", bytes(limit)));
        words.insert(0, format!("memory {}{limit}", bytes(memory)));
    }
    words.join(", ")
}

/// Returns the amounts that are left of the GPU or of each of its partitions that is given out in
/// shares, by device. Nothing is said to be left where claims cannot be read.
pub(super) fn left(snapshot: &Snapshot, node: &str, gpu: &GpuStatus) -> BTreeMap<String, String> {
    if snapshot.lacks(&CLAIMS) {
        return BTreeMap::new();
    }
    let mut held: BTreeMap<&str, Vec<&DeviceRequestAllocationResult>> = BTreeMap::new();
    for (.., result) in results(snapshot, node, gpu) {
        held.entry(&result.device).or_default().push(result);
    }
    held.into_iter()
        .filter_map(|(name, held)| {
            let left = left_of(device(snapshot, node, name)?, &held);
            (!left.is_empty()).then(|| (name.to_owned(), left))
        })
        .collect()
}

fn left_of(device: &Device, held: &[&DeviceRequestAllocationResult]) -> String {
    let words = SHOWN.into_iter().filter_map(|name| {
        let all = amount(&own(device.capacity.as_ref()?, name)?.value.0)?;
        let taken = |result: &&DeviceRequestAllocationResult| {
            amount(&own(result.consumed_capacity.as_ref()?, name)?.0)
        };
        let taken = total(held.iter().filter_map(taken));
        let left = all.saturating_sub(taken);
        Some(match name {
            capacity::MEMORY => format!("memory {} of {}", bytes(left), bytes(all)),
            capacity::PERCENT => {
                let of =
                    memory(device).map_or_else(String::new, |all| format!(" of {}", bytes(all)));
                format!("{left} percent{of}")
            }
            _ => format!("{name} {left} of {all}"),
        })
    });
    words.collect::<Vec<_>>().join(", ")
}

/// Returns a device of the node as it is published.
fn device<'s>(snapshot: &'s Snapshot, node: &str, name: &str) -> Option<&'s Device> {
    let pool = pool_name(node);
    snapshot
        .slices
        .iter()
        .filter(|slice| slice.spec.driver == snapshot.driver && slice.spec.pool.name == pool)
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == name)
}

/// Returns what claims have of the shares of the GPU and of its partitions, each with the claim's
/// name and allocation.
fn results<'s>(
    snapshot: &'s Snapshot,
    node: &str,
    gpu: &'s GpuStatus,
) -> impl Iterator<
    Item = (
        String,
        &'s AllocationResult,
        &'s DeviceRequestAllocationResult,
    ),
> {
    let pool = pool_name(node);
    let all = snapshot.claims.iter().flat_map(|claim| {
        let allocation = claim.status.as_ref().and_then(|s| s.allocation.as_ref());
        let of = move |allocation: &'s AllocationResult| {
            let results = allocation.devices.as_ref().and_then(|d| d.results.as_ref());
            let results = results.into_iter().flatten();
            results.map(move |result| (full_name(&claim.metadata), allocation, result))
        };
        allocation.into_iter().flat_map(of)
    });
    all.filter(move |(.., result)| {
        result.driver == snapshot.driver && result.pool == pool && is_share_of(&result.device, gpu)
    })
}

fn is_share_of(device: &str, gpu: &GpuStatus) -> bool {
    kind(device).is_some_and(|kind| {
        kind.sharing.is_shared() && gpu.name == format!("gpu-{}", kind.ordinal())
    })
}
