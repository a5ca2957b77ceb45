//! The health of GPUs and partitions as a fact, and the taint and the sentence of each ailment.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::taints as keys;
use divvy_model::health::{Ailment, RecoveryAction};
use divvy_model::mig::Placement;
use divvy_model::{GpuUuid, Hold, HoldKind};
use serde::Serialize;

use crate::{Taint, TaintEffect};

/// The health of all GPUs at one moment; compared as a whole, so without times.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct HealthView {
    /// GPUs with which something is wrong, by UUID.
    pub sick: BTreeMap<GpuUuid, Sick>,
    /// GPUs that were taken out of the machine.
    pub removed: BTreeSet<GpuUuid>,
    /// GPUs whose events are not received: they are only polled.
    pub unmonitored: BTreeMap<GpuUuid, Unmonitored>,
}

/// Why the events of a GPU are not received.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unmonitored {
    /// What the driver says.
    pub why: String,
    /// Whether the driver has no events at all.
    pub for_good: bool,
}

/// What is wrong with a GPU and its partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Sick {
    /// With the whole GPU.
    pub gpu: BTreeSet<Ailment>,
    /// With single partitions, by place.
    pub partitions: Vec<(Placement, BTreeSet<Ailment>)>,
}

impl HealthView {
    /// What is wrong with the device that a claim holds.
    pub fn of(&self, hold: &Hold) -> BTreeSet<Ailment> {
        let Some(sick) = self.sick.get(&hold.gpu) else { return BTreeSet::new() };
        let mut all = sick.gpu.clone();
        if let HoldKind::Partition { placement, .. } = hold.kind {
            let its = sick.partitions.iter().filter(|(place, _)| place.overlaps(placement));
            all.extend(its.flat_map(|(_, ailments)| ailments));
        }
        all
    }
}

/// The taint of an ailment. Values are label values.
pub fn taint(ailment: Ailment, evict: bool) -> Taint {
    let (key, value) = match ailment {
        Ailment::Lost => (keys::LOST, None),
        Ailment::Silent => (keys::UNREADABLE, None),
        Ailment::Recovery(RecoveryAction::Unknown(raw)) => (keys::RECOVERY, Some(format!("unknown-{raw}"))),
        Ailment::Recovery(action) => (keys::RECOVERY, Some(action.name().to_owned())),
        Ailment::Xid(number) => (keys::XID, Some(number.to_string())),
        Ailment::Ecc => (keys::ECC, None),
        Ailment::RemapFailed => (keys::ROW_REMAP, Some("failed".to_owned())),
        Ailment::RemapPending => (keys::ROW_REMAP, Some("pending".to_owned())),
    };
    let effect = if evict { TaintEffect::NoExecute } else { TaintEffect::NoSchedule };
    Taint { key: key.to_owned(), value, effect }
}

/// What is wrong, as a sentence for people; nothing where nothing is.
pub fn sentence(ailments: &BTreeSet<Ailment>) -> Option<String> {
    let first = ailments.first()?;
    let all: Vec<String> = ailments.iter().map(Ailment::to_string).collect();
    Some(format!("the GPU {} ({})", all.join(" and "), first.remedy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ailment_has_a_taint_of_its_own() {
        let all = [
            Ailment::Lost,
            Ailment::Recovery(RecoveryAction::DrainAndReset),
            Ailment::RemapFailed,
            Ailment::Xid(79),
            Ailment::Ecc,
            Ailment::Silent,
        ];
        let text = |taint: &Taint| {
            format!("{}={}:{}", taint.key, taint.value.as_deref().unwrap_or_default(), taint.effect.name())
        };
        assert_eq!(
            all.map(|ailment| text(&taint(ailment, false))),
            [
                "gpu.divvy.dev/lost=:NoSchedule",
                "gpu.divvy.dev/recovery=drain-and-reset:NoSchedule",
                "gpu.divvy.dev/row-remap=failed:NoSchedule",
                "gpu.divvy.dev/xid=79:NoSchedule",
                "gpu.divvy.dev/ecc=:NoSchedule",
                "gpu.divvy.dev/unreadable=:NoSchedule",
            ]
        );
        assert_eq!(text(&taint(Ailment::Xid(95), true)), "gpu.divvy.dev/xid=95:NoExecute");
    }

    #[test]
    fn a_sentence_names_all_that_is_wrong_and_what_helps_against_the_worst() {
        assert_eq!(sentence(&BTreeSet::new()), None);
        assert_eq!(
            sentence(&[Ailment::Xid(79), Ailment::Lost].into()).unwrap(),
            "the GPU fell off the bus and reported Xid 79 (node) (reset the GPU or reboot the node; if it stays lost, check the board)"
        );
    }
}
