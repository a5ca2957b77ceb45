//! Shares whose memory can only be compared with their grants together: claims that have pods in
//! common.

use std::collections::BTreeSet;

use divvy_claims::{ClaimRef, PodRef};
use divvy_model::DeviceName;

use crate::reading::{Figure, Holding, Unknown};

/// Shares of one GPU, and what their pods use of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Claims with their devices.
    pub shares: Vec<(ClaimRef, DeviceName)>,
    /// Bytes.
    pub used: Figure<u64>,
    pub granted: Figure<u64>,
    /// Bytes that they may use: the limits that the driver keeps, elsewhere what was granted.
    pub allowed: Figure<u64>,
    /// True if the driver keeps a limit of each share.
    pub capped: bool,
}

/// The groups of a GPU; `memory` is what the processes of a pod have.
pub(crate) fn of(holdings: &[Holding], memory: impl Fn(&PodRef) -> Figure<u64>) -> Vec<Group> {
    let mut left: Vec<&Holding> = holdings
        .iter()
        .filter(|h| h.kind.sharing.is_shared())
        .collect();
    let mut groups = Vec::new();
    while let Some(first) = left.pop() {
        let mut members = vec![first];
        let mut pods: BTreeSet<&PodRef> = first.pods.iter().collect();
        // Grows while any share that is left has a pod in common: each pod that joins may bring
        // further claims.
        while let Some(at) = left
            .iter()
            .position(|other| other.pods.iter().any(|pod| pods.contains(pod)))
        {
            let more = left.swap_remove(at);
            pods.extend(&more.pods);
            members.push(more);
        }
        let all_known = members.iter().all(|member| !member.pods.is_empty());
        let used = pods.into_iter().map(&memory).sum::<Figure<u64>>();
        let granted = members
            .iter()
            .map(|member| member.granted.memory.ok_or(Unknown::NoGrant))
            .sum();
        let allowed = members.iter().map(|member| {
            let granted = &member.granted;
            granted.limit.or(granted.memory).ok_or(Unknown::NoGrant)
        });
        let allowed = allowed.sum();
        let capped = members.iter().all(|member| member.granted.limit.is_some());
        let mut shares: Vec<_> = members
            .into_iter()
            .map(|member| (member.claim.clone(), member.device.clone()))
            .collect();
        shares.sort();
        groups.push(Group {
            shares,
            used: if all_known {
                used
            } else {
                Err(Unknown::NoPods)
            },
            granted,
            allowed,
            capped,
        });
    }
    groups.sort_by(|one, other| one.shares.cmp(&other.shares));
    groups
}
