//! The difference between two lists of findings.

use std::collections::BTreeSet;

use crate::Finding;

/// A change of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News<'a> {
    /// It is new, or has new words.
    Began(&'a Finding),
    /// It is over.
    Ended(&'a Finding),
}

/// Returns what began and what ended between two lists.
pub fn news<'a>(
    before: &'a BTreeSet<Finding>,
    now: &'a BTreeSet<Finding>,
) -> impl Iterator<Item = News<'a>> {
    let is_new = |one: &&Finding| {
        // By words and not by value: a detail that no reader sees is no news. Words that change all
        // the time are news once.
        let known = |old: &Finding| {
            is_same(old, one) && (one.is_restless() || old.to_string() == one.to_string())
        };
        !before.contains(*one) && !before.iter().any(known)
    };
    let is_over = |old: &&Finding| !now.contains(*old) && !now.iter().any(|one| is_same(old, one));
    // Beginnings come first: where a finding takes the place of another, the log has the reason
    // before the end.
    let began = now.iter().filter(is_new).map(News::Began);
    began.chain(before.iter().filter(is_over).map(News::Ended))
}

/// Returns whether two findings are about the same thing. A rule decides about a GPU whichever rule
/// it is, and a reason of the whole node takes the place of another.
fn is_same(one: &Finding, other: &Finding) -> bool {
    use Finding::{OneModeForEach, RuleDecides};
    let alike = std::mem::discriminant(one) == std::mem::discriminant(other)
        && one.object() == other.object();
    let is_one_of_its_kind = matches!(one, OneModeForEach { .. } | RuleDecides { .. });
    alike
        && (is_one_of_its_kind || (one.subject(), one.claim()) == (other.subject(), other.claim()))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use divvy_model::GpuUuid;

    use super::*;
    use crate::{OneMode, RuleRef, Use};

    fn gpu() -> GpuUuid {
        "GPU-12345678-1234-1234-0000-123456780000".parse().unwrap()
    }

    fn shown(before: &[Finding], now: &[Finding]) -> Vec<(bool, String)> {
        let [before, now] = [before, now].map(|all| all.iter().cloned().collect());
        news(&before, &now)
            .map(|news| match news {
                News::Began(one) => (true, one.to_string()),
                News::Ended(one) => (false, one.ended().unwrap_or_default()),
            })
            .collect()
    }

    #[test]
    fn a_finding_with_new_words_is_news_and_its_end_is_the_end_of_its_kind() {
        let decides = |policy: &str| Finding::RuleDecides {
            gpu: gpu(),
            by: RuleRef {
                policy: policy.to_owned(),
                index: 0,
                name: None,
            },
        };
        let (one, other) = (decides("a"), decides("b"));
        let is_b = (true, other.to_string());
        assert_eq!(shown(from_ref(&one), from_ref(&one)), []);
        assert_eq!(shown(from_ref(&one), &[other]), [is_b]);
        let over = format!("no policy selects {} any more", gpu());
        assert_eq!(shown(&[one], &[]), [(false, over)]);
        let why = |why| Finding::OneModeForEach { why };
        let [off, conflict] = [why(OneMode::TurnedOff), why(OneMode::Conflict)];
        let began = (true, conflict.to_string());
        assert_eq!(shown(&[off], &[conflict]), [began]);
    }

    #[test]
    fn processes_that_come_and_go_are_news_once() {
        let used = |used| Finding::Neighbour { gpu: gpu(), used };
        let processes = |pids: &[u32]| {
            used(Use::Processes {
                pids: pids.to_vec(),
            })
        };
        let plugin = used(Use::DevicePlugin {
            resource: "nvidia.com/gpu".to_owned(),
            to: "pod a/b".to_owned(),
        });
        assert_eq!(shown(&[processes(&[1])], &[processes(&[2])]), []);
        let both = [processes(&[2]), plugin.clone()];
        assert_eq!(
            shown(&[processes(&[1])], &both),
            [(true, plugin.to_string())]
        );
        assert_eq!(shown(&[], &[processes(&[1])]).len(), 1);
    }
}
