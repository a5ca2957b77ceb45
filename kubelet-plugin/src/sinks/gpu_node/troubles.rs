//! Pure: the findings of a node as troubles in the status of its `GpuNode`.

use std::collections::BTreeSet;

use divvy_api::node::Trouble;
use divvy_model::{DeviceKind, Ordinals};
use divvy_offer::{Finding, Severity};

/// Returns what needs a person, then what is only worth knowing: about the node first, then by GPU.
pub(super) fn troubles(findings: &BTreeSet<Finding>, ordinals: &Ordinals) -> Vec<Trouble> {
    let all = findings.iter().filter_map(|one| trouble(one, ordinals));
    let mut all: Vec<Trouble> = all.collect();
    // A stable order: a report that only changes its order would be written again.
    all.sort_by_cached_key(|one| {
        (
            one.notice,
            ordinal(&one.gpu),
            one.kind.clone(),
            one.subject.clone(),
            one.claim.clone(),
        )
    });
    all
}

fn trouble(finding: &Finding, ordinals: &Ordinals) -> Option<Trouble> {
    let shown = finding.shown();
    shown.in_status.then(|| Trouble {
        kind: shown.kind.to_owned(),
        notice: shown.severity == Severity::Notice,
        gpu: finding.object().name(ordinals),
        subject: finding.subject(),
        claim: finding.claim().to_owned(),
        why: finding.why(),
        remedy: finding.remedy(),
        since: None,
    })
}

/// Returns the number in a GPU's name.
pub(super) fn ordinal(gpu: &str) -> Option<u32> {
    let kind = DeviceKind::parse(&gpu.parse().ok()?).ok()?;
    Some(kind.ordinal())
}

#[cfg(test)]
mod tests;
