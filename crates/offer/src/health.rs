//! The health of GPUs and partitions as a fact, and the taint and the sentence of each ailment.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::taints as keys;
use divvy_model::health::{Ailment, RecoveryAction};
use divvy_model::mig::Placement;
use divvy_model::{GpuUuid, Hold, Target};
use serde::Serialize;

use crate::{Taint, TaintEffect};

/// The health of all GPUs at one moment; compared as a whole, so without times.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct HealthView {
    /// GPUs with which something is wrong, by UUID.
    pub sick: BTreeMap<GpuUuid, Sick>,
    /// GPUs that were taken out of the machine.
    pub removed: BTreeSet<GpuUuid>,
    /// The missing ones among them: nothing is in their place, and the node's GpuNode was not
    /// deleted since.
    pub missing: BTreeSet<GpuUuid>,
    /// Places of partitions that claims hold and that are no longer there, after a reset of their
    /// GPU, say.
    pub gone: BTreeSet<(GpuUuid, Placement)>,
    /// GPUs whose events are not received: they are only polled.
    pub unmonitored: BTreeMap<GpuUuid, Unmonitored>,
}

/// Why the events of a GPU are not received.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unmonitored {
    /// The driver's words.
    pub why: String,
    /// True if the driver has no events at all.
    pub for_good: bool,
}

/// Faults of a GPU and its partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Sick {
    /// With the whole GPU.
    pub gpu: BTreeSet<Ailment>,
    /// With single partitions, by place.
    pub partitions: Vec<(Placement, BTreeSet<Ailment>)>,
    /// Faults of the whole GPU that may end by themselves, and are too young to evict pods.
    pub young: BTreeSet<Ailment>,
}

impl HealthView {
    /// Returns what is wrong with the device that a claim holds.
    pub fn of(&self, hold: &Hold) -> BTreeSet<Ailment> {
        let Some(sick) = self.sick.get(&hold.gpu) else {
            return BTreeSet::new();
        };
        // A fault of the whole GPU is one of every partition. A fault of a partition is one of what
        // overlaps it.
        let mut all = sick.gpu.clone();
        if let Some(held) = hold.target.place() {
            let its = sick
                .partitions
                .iter()
                .filter(|(place, _)| place.overlaps(held.placement));
            all.extend(its.flat_map(|(_, ailments)| ailments));
        }
        all
    }
}

impl HealthView {
    /// Returns why the device that a claim holds does not exist any more, if it does not.
    pub fn gone_under(&self, hold: &Hold) -> Option<&'static str> {
        if self.removed.contains(&hold.gpu) {
            return Some("the driver no longer lists its GPU");
        }
        match hold.target {
            Target::Partition(place)
                if self.gone.contains(&(hold.gpu.clone(), place.placement)) =>
            {
                Some(
                    "its MIG instance is gone (the GPU was reset, the driver loaded again, or the instance destroyed)",
                )
            }
            _ => None,
        }
    }

    /// Returns what is wrong with the device that a claim holds, as a sentence for people.
    pub fn problem(&self, hold: &Hold) -> Option<String> {
        match self.gone_under(hold) {
            Some(why) => Some(format!("the device is gone: {why} (delete the pod)")),
            None => sentence(&self.of(hold)),
        }
    }
}

/// Returns the key of an ailment's taint.
pub(crate) const fn key(ailment: Ailment) -> &'static str {
    match ailment {
        Ailment::Lost => keys::LOST,
        Ailment::Silent => keys::UNREADABLE,
        Ailment::Recovery(_) => keys::RECOVERY,
        Ailment::Fabric(_) => keys::FABRIC,
        Ailment::Xid(_) => keys::XID,
        Ailment::Ecc => keys::ECC,
        Ailment::RemapFailed | Ailment::RemapPending => keys::ROW_REMAP,
    }
}

/// Returns the taint of an ailment. Values are label values.
pub fn taint(ailment: Ailment, evict: bool) -> Taint {
    let value = match ailment {
        Ailment::Lost | Ailment::Silent | Ailment::Ecc => None,
        Ailment::Recovery(RecoveryAction::Unknown(raw)) => Some(format!("unknown-{raw}")),
        Ailment::Recovery(action) => Some(action.name().to_owned()),
        Ailment::Fabric(fault) => Some(fault.name().to_owned()),
        Ailment::Xid(number) => Some(number.to_string()),
        Ailment::RemapFailed => Some("failed".to_owned()),
        Ailment::RemapPending => Some("pending".to_owned()),
    };
    let effect = if evict {
        TaintEffect::NoExecute
    } else {
        TaintEffect::NoSchedule
    };
    Taint {
        key: key(ailment).to_owned(),
        value,
        effect,
    }
}

/// Returns what is wrong, as a sentence for people; nothing where nothing is.
pub fn sentence(ailments: &BTreeSet<Ailment>) -> Option<String> {
    // Ordered by gravity: the remedy is that of the gravest fault.
    let first = ailments.first()?;
    let all: Vec<String> = ailments.iter().map(Ailment::to_string).collect();
    Some(format!(
        "the GPU {} ({})",
        all.join(" and "),
        first.remedy()
    ))
}

#[cfg(test)]
mod tests {
    use divvy_model::health::FabricFault;

    use super::*;

    #[test]
    fn each_ailment_has_a_taint_of_its_own() {
        let all = [
            Ailment::Lost,
            Ailment::Recovery(RecoveryAction::DrainAndReset),
            Ailment::Fabric(FabricFault::InProgress),
            Ailment::RemapFailed,
            Ailment::Xid(79),
            Ailment::Ecc,
            Ailment::Silent,
        ];
        let text = |taint: &Taint| {
            format!(
                "{}={}:{}",
                taint.key,
                taint.value.as_deref().unwrap_or_default(),
                taint.effect.name()
            )
        };
        assert_eq!(
            all.map(|ailment| text(&taint(ailment, false))),
            [
                "gpu.divvy.dev/lost=:NoSchedule",
                "gpu.divvy.dev/recovery=drain-and-reset:NoSchedule",
                "gpu.divvy.dev/fabric=in-progress:NoSchedule",
                "gpu.divvy.dev/row-remap=failed:NoSchedule",
                "gpu.divvy.dev/xid=79:NoSchedule",
                "gpu.divvy.dev/ecc=:NoSchedule",
                "gpu.divvy.dev/unreadable=:NoSchedule",
            ]
        );
        assert_eq!(
            text(&taint(Ailment::Xid(95), true)),
            "gpu.divvy.dev/xid=95:NoExecute"
        );
    }

    #[test]
    fn a_sentence_names_all_that_is_wrong_and_what_helps_against_the_worst() {
        assert_eq!(sentence(&BTreeSet::new()), None);
        assert_eq!(
            sentence(&[Ailment::Xid(79), Ailment::Lost].into()).unwrap(),
            "the GPU fell off the bus and reported Xid 79 (node) (reset the GPU or reboot the node (docs/maintenance.md); if it stays lost, check the board)"
        );
    }
}
