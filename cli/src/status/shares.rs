//! Shares of one GPU: what each claim was granted, and what is left. Pure.

use std::collections::BTreeMap;

use divvy_api::names::capacity;
use divvy_api::node::GpuStatus;
use divvy_model::Alternative;
use divvy_offer::pool_name;
use k8s_openapi::api::resource::v1::{AllocationResult, Device, DeviceRequestAllocationResult};

use super::read::CLAIMS;
use super::snapshot::{Snapshot, full_name};
use crate::device::{amount, kind, memory, share_memory};
use crate::driver::{own, plain};
use crate::format::bytes;

/// Capacities of shares in the order in which they are shown.
const SHOWN: [&str; 4] = [
    capacity::MEMORY,
    capacity::PERCENT,
    capacity::CORES,
    capacity::SLOTS,
];

/// Returns the amounts that the shares of a GPU were granted, by claim.
pub(super) fn granted(
    snapshot: &Snapshot,
    node: &str,
    gpu: &GpuStatus,
) -> BTreeMap<String, String> {
    let device = device(snapshot, node, gpu);
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (claim, allocation, result) in results(snapshot, node, gpu) {
        let consumed = result.consumed_capacity.iter().flatten();
        let mut words: Vec<String> = consumed
            .map(|(name, amount)| (plain(name), amount))
            .filter(|(name, _)| *name != capacity::MEMORY)
            .map(|(name, amount)| format!("{name} {}", amount.0))
            .collect();
        let memory = result.consumed_capacity.as_ref();
        if let Some(memory) = memory.and_then(|consumed| share_memory(device, consumed)) {
            let limit = crate::limit::of_share(allocation, result, device);
            let limit =
                limit.map_or_else(String::new, |limit| format!(" (limit {})", bytes(limit)));
            words.insert(0, format!("memory {}{limit}", bytes(memory)));
        }
        all.entry(claim).or_default().push(words.join(", "));
    }
    all.into_iter()
        .map(|(claim, words)| (claim, words.join("; ")))
        .collect()
}

/// Returns the amounts that are left of a GPU that is given out in shares, or nothing where it is
/// not, or where claims cannot be read.
pub(super) fn left(snapshot: &Snapshot, node: &str, gpu: &GpuStatus) -> String {
    let held: Vec<_> = results(snapshot, node, gpu).collect();
    let Some(device) = device(snapshot, node, gpu).filter(|_| !held.is_empty()) else {
        return String::new();
    };
    if snapshot.lacks(&CLAIMS) {
        return String::new();
    }
    let words = SHOWN.into_iter().filter_map(|name| {
        let total = amount(&own(device.capacity.as_ref()?, name)?.value.0)?;
        let taken = |result: &DeviceRequestAllocationResult| {
            amount(&own(result.consumed_capacity.as_ref()?, name)?.0)
        };
        let taken: u64 = held.iter().filter_map(|(.., result)| taken(result)).sum();
        let left = total.saturating_sub(taken);
        Some(match name {
            capacity::MEMORY => format!("memory {} of {}", bytes(left), bytes(total)),
            capacity::PERCENT => {
                let of =
                    memory(device).map_or_else(String::new, |all| format!(" of {}", bytes(all)));
                format!("{left} percent{of}")
            }
            _ => format!("{name} {left} of {total}"),
        })
    });
    words.collect::<Vec<_>>().join(", ")
}

/// Returns the device whose shares of the GPU are given out: a GPU can be published in shares of two
/// kinds, and is held in one.
fn device<'s>(snapshot: &'s Snapshot, node: &str, gpu: &GpuStatus) -> Option<&'s Device> {
    let pool = pool_name(node);
    let (_, _, held) = results(snapshot, node, gpu).next()?;
    snapshot
        .slices
        .iter()
        .filter(|slice| slice.spec.driver == snapshot.driver && slice.spec.pool.name == pool)
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == held.device)
}

/// Returns what claims have of the GPU's shares, each with the claim's name and allocation.
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
        [Alternative::TIME_SLICED, Alternative::MPS].contains(&kind.alternative())
            && gpu.name == format!("gpu-{}", kind.ordinal())
    })
}
