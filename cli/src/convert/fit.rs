//! Pods that could share a GPU before, and may not now.

use divvy_api::names;

use super::notes::Note;
use super::resources::Part;
use crate::claim::template::Request;

/// Notes parts that no longer fit together.
pub(super) fn notes(parts: &[Part], requests: &[Request]) -> Vec<Note> {
    let apart = apart(parts).map(|example| {
        Note::general(&format!(
            "HAMi counts memory and compute apart, and percent is one number for both: pods that shared a GPU may not fit now{example}; with \
             --gpu-memory AMOUNT they are converted to amounts, which stay apart"
        ))
    });
    let shares = || {
        requests
            .iter()
            .filter(|one| one.class == names::CLASS_SHARE)
    };
    let by_percent = shares().any(Request::is_fraction);
    let by_amount = shares().any(|one| !one.is_fraction() && !one.capacity.is_empty());
    let mixed = (by_percent && by_amount).then(|| {
        Note::general(
            "some pods ask in percent and others in amounts, which are never on one GPU (docs/sharing.md#shares-by-percent); with \
             --gpu-memory AMOUNT all are converted to amounts",
        )
    });
    apart.into_iter().chain(mixed).collect()
}

/// Returns an example if some pods have more compute than memory, and others less.
fn apart(parts: &[Part]) -> Option<String> {
    let more = |part: &&Part| part.cores > part.memory;
    let less = |part: &&Part| part.cores < part.memory;
    if parts.iter().find(more).is_none() || parts.iter().find(less).is_none() {
        return None;
    }
    let most = |part: &Part| part.memory.max(part.cores);
    let sum = |one: u64, other: u64| one.saturating_add(other);
    let both = parts
        .iter()
        .filter(more)
        .flat_map(|one| parts.iter().filter(less).map(move |other| (one, other)));
    let mut lost = both.filter(|(one, other)| {
        sum(one.memory, other.memory) <= 100
            && sum(one.cores, other.cores) <= 100
            && sum(most(one), most(other)) > 100
    });
    let example = lost
        .next()
        .map(|(one, other)| format!(" ({} + {} > 100)", most(one), most(other)));
    Some(example.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_parts_that_pull_apart_are_noted() {
        let part = |(memory, cores)| Part { memory, cores };
        for (parts, expected) in [
            (&[(40, 60), (60, 40)][..], Some(" (60 + 60 > 100)")),
            (&[(30, 50), (30, 10), (60, 40)], Some(" (50 + 60 > 100)")),
            // No two of them, but the three.
            (&[(20, 50), (50, 20), (30, 30)], Some("")),
            (&[(40, 60), (40, 60)], None),
            (&[(60, 0), (40, 0)], None),
            (&[(50, 50), (20, 30)], None),
        ] {
            let parts: Vec<Part> = parts.iter().copied().map(part).collect();
            assert_eq!(apart(&parts).as_deref(), expected, "{parts:?}");
        }
    }
}
