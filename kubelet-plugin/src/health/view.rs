//! What the rest of the plugin is told of health: taints for the carver, answers for the kubelet.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::taints as keys;
use divvy_executor::HeldDevice;
use divvy_model::health::{Ailment, RecoveryAction};
use divvy_model::mig::Placement;
use divvy_model::{GpuUuid, HoldKind, Ordinals};
use divvy_offer::{Taint, TaintEffect};
use serde::Serialize;

/// What claims hold, and how GPUs are called.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Holdings {
    /// By claim.
    pub(crate) devices: Vec<HeldDevice>,
    /// The numbers in names.
    pub(crate) ordinals: Ordinals,
}

/// The health of all GPUs at one moment; compared as a whole, so without times.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct HealthView {
    /// GPUs with which something is wrong, by UUID.
    pub(crate) sick: BTreeMap<GpuUuid, Sick>,
    /// GPUs that were taken out of the machine.
    pub(crate) removed: BTreeSet<GpuUuid>,
    /// GPUs whose events are not heard: they are only polled.
    pub(crate) unmonitored: BTreeMap<GpuUuid, Unmonitored>,
}

/// Why the events of a GPU are not heard.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Unmonitored {
    /// What the driver says.
    pub(crate) why: String,
    /// Whether it has none, so that nobody can do anything about it.
    pub(crate) for_good: bool,
}

/// What is wrong with a GPU and its partitions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Sick {
    /// With the whole GPU.
    pub(crate) gpu: BTreeSet<Ailment>,
    /// With single partitions, by place.
    pub(crate) partitions: Vec<(Placement, BTreeSet<Ailment>)>,
}

impl HealthView {
    /// The taints of what is wrong with GPUs as a whole. `evicts`: whether running pods are to leave.
    pub(crate) fn taints(&self, evicts: impl Fn(&GpuUuid) -> bool) -> BTreeMap<GpuUuid, Vec<Taint>> {
        let sick = self.sick.iter().filter(|(_, sick)| !sick.gpu.is_empty());
        sick.map(|(gpu, sick)| (gpu.clone(), sick.gpu.iter().map(|a| taint(*a, evicts(gpu))).collect()))
            .collect()
    }

    /// The same for partitions: what overlaps them.
    pub(crate) fn places(
        &self,
        evicts: impl Fn(&GpuUuid) -> bool,
    ) -> impl Iterator<Item = (&GpuUuid, Placement, Taint)> {
        self.sick.iter().flat_map(move |(gpu, sick)| {
            let evict = evicts(gpu);
            sick.partitions.iter().flat_map(move |(placement, ailments)| {
                ailments.iter().map(move |ailment| (gpu, *placement, taint(*ailment, evict)))
            })
        })
    }

    /// What is wrong with the device that a claim holds.
    pub(crate) fn of(&self, held: &HeldDevice) -> BTreeSet<Ailment> {
        let Some(sick) = self.sick.get(&held.hold.gpu) else { return BTreeSet::new() };
        let mut all = sick.gpu.clone();
        if let HoldKind::Partition { placement, .. } = held.hold.kind {
            let its = sick.partitions.iter().filter(|(place, _)| place.overlaps(placement));
            all.extend(its.flat_map(|(_, ailments)| ailments));
        }
        all
    }
}

/// The taint of an ailment. Values are label values.
pub(crate) fn taint(ailment: Ailment, evict: bool) -> Taint {
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
pub(crate) fn sentence(ailments: &BTreeSet<Ailment>) -> Option<String> {
    let first = ailments.first()?;
    let all: Vec<String> = ailments.iter().map(Ailment::to_string).collect();
    Some(format!("the GPU {} ({})", all.join(" and "), first.remedy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(n: u8) -> GpuUuid {
        format!("GPU-12345678-1234-1234-1234-12345678000{n}").parse().unwrap()
    }

    #[test]
    fn each_ailment_has_a_taint_of_its_own_and_only_the_sick_have_any() {
        let all = [
            Ailment::Lost,
            Ailment::Recovery(RecoveryAction::DrainAndReset),
            Ailment::RemapFailed,
            Ailment::Xid(79),
            Ailment::Ecc,
            Ailment::Silent,
        ];
        let mut view = HealthView::default();
        view.sick.insert(gpu(1), Sick { gpu: all.into(), partitions: Vec::new() });
        let place = Placement { start: 4, size: 1 };
        view.sick.insert(
            gpu(2),
            Sick { gpu: BTreeSet::new(), partitions: vec![(place, [Ailment::Xid(95)].into())] },
        );
        let text = |taint: &Taint| {
            format!("{}={}:{}", taint.key, taint.value.as_deref().unwrap_or_default(), taint.effect.name())
        };
        let taints = view.taints(|_| false);
        assert_eq!(taints.keys().collect::<Vec<_>>(), [&gpu(1)]);
        assert_eq!(
            taints[&gpu(1)].iter().map(text).collect::<Vec<_>>(),
            [
                "gpu.divvy.dev/lost=:NoSchedule",
                "gpu.divvy.dev/recovery=drain-and-reset:NoSchedule",
                "gpu.divvy.dev/row-remap=failed:NoSchedule",
                "gpu.divvy.dev/xid=79:NoSchedule",
                "gpu.divvy.dev/ecc=:NoSchedule",
                "gpu.divvy.dev/unreadable=:NoSchedule",
            ]
        );
        let evicted = gpu(2);
        let places: Vec<_> = view
            .places(|gpu| *gpu == evicted)
            .map(|(gpu, at, taint)| (gpu.clone(), at, text(&taint)))
            .collect();
        assert_eq!(places, [(gpu(2), place, "gpu.divvy.dev/xid=95:NoExecute".to_owned())]);
    }

    #[test]
    fn a_sentence_names_all_that_is_wrong_and_what_helps_against_the_worst() {
        assert_eq!(sentence(&BTreeSet::new()), None);
        assert_eq!(
            sentence(&[Ailment::Xid(79), Ailment::Lost].into()).unwrap(),
            "the GPU fell off the bus and reported Xid 79 (node) (reset the GPU or reboot the node; if it stays away, look at the board)"
        );
    }
}
