//! In which modes one GPU is offered: what its rules ask for, less what the board, its MIG mode and the cluster cannot.

use std::collections::BTreeSet;

use crate::{Feature, Instances, Modes, OfferedMode, OneMode, ServerFeatures};

/// What the choice depends on.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "facts of a board, each by itself")]
pub(crate) struct Facts<'a> {
    pub(crate) asked: &'a Modes,
    pub(crate) instances: Instances,
    /// Whether any MIG instance lives on it.
    pub(crate) any_lives: bool,
    /// Whether it has a MIG mode at all.
    pub(crate) has_mig: bool,
    /// Whether its MIG mode is on.
    pub(crate) on: bool,
    /// Whether its MIG mode can be changed without a reset.
    pub(crate) toggles: bool,
    /// Whether its profiles are known, and its counters fit the API.
    pub(crate) cuttable: bool,
    pub(crate) features: &'a ServerFeatures,
    /// The modes in which it is used or allocated.
    pub(crate) in_use: &'a BTreeSet<OfferedMode>,
    /// Those in which it may still be allocated.
    pub(crate) leaving: &'a BTreeSet<OfferedMode>,
    /// Those in which it is used.
    pub(crate) recorded: &'a BTreeSet<OfferedMode>,
}

/// The modes to offer, and what became of the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) modes: BTreeSet<OfferedMode>,
    /// Modes that were asked for and cannot be offered.
    pub(crate) refused: Vec<Refused>,
    /// Why only one of several is offered.
    pub(crate) one_mode: Option<OneMode>,
    /// A mode in which it is held and that is not offered, where nothing but a taint keeps the others off it.
    pub(crate) guard: Option<OfferedMode>,
}

/// Why a mode cannot be offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Partitions need counters.
    NoCounters,
    /// Shares need what the server drops.
    NoShares,
    /// The MIG mode would have to change, and that needs a reset.
    NeedsReset,
    /// The board cannot do it, or nothing is known of its profiles.
    NoMig,
    /// Instances live that are not ours to remove, or none does and none is ours to make.
    Static,
}

impl Choice {
    pub(crate) fn offers(&self, mode: OfferedMode) -> bool {
        self.modes.contains(&mode)
    }
}

/// Whether the GPU can be had in a mode without a change of its MIG mode.
pub(crate) fn fits_mig_mode(mode: OfferedMode, on: bool) -> bool {
    (mode == OfferedMode::Mig) == on
}

pub(crate) fn choose(facts: &Facts<'_>) -> Choice {
    let as_is = BTreeSet::from([if facts.on { OfferedMode::Mig } else { OfferedMode::Whole }]);
    let asked = match facts.asked {
        Modes::AsIs => &as_is,
        Modes::Only(asked) => asked,
    };
    let mut choice = Choice::default();
    for mode in asked {
        match obstacle(facts, *mode) {
            None => drop(choice.modes.insert(*mode)),
            Some(why) => choice.refused.push(why),
        }
    }
    let single = facts.features.one_mode();
    if choice.modes.len() > 1 && single.is_some() {
        let among =
            |used: &BTreeSet<OfferedMode>| choice.modes.iter().find(|mode| used.contains(mode)).copied();
        let held = among(facts.recorded).or_else(|| among(facts.in_use));
        let fits = || choice.modes.iter().find(|mode| fits_mig_mode(**mode, facts.on)).copied();
        let one = held.or_else(fits).or(choice.modes.first().copied());
        choice.modes = one.into_iter().collect();
        choice.one_mode.clone_from(&single);
    }
    if single.is_some() {
        let others = facts.in_use.iter().chain(facts.leaving);
        choice.guard = others.copied().find(|mode| !choice.offers(*mode));
    }
    choice
}

fn obstacle(facts: &Facts<'_>, mode: OfferedMode) -> Option<Refused> {
    let fits = fits_mig_mode(mode, facts.on);
    let counts = facts.features.supports(Feature::Partitions);
    let is_static = facts.instances == Instances::Static;
    match mode {
        OfferedMode::Mig if !facts.cuttable => Some(Refused::NoMig),
        OfferedMode::Mig if !counts => Some(Refused::NoCounters),
        // None lives, and none is made: a GPU in one mode only would be offered as nothing.
        OfferedMode::Mig if is_static && !(facts.on && facts.any_lives) => Some(Refused::Static),
        OfferedMode::TimeSlicing if !facts.features.supports(Feature::Shares) => Some(Refused::NoShares),
        OfferedMode::Whole | OfferedMode::TimeSlicing if is_static && facts.any_lives => {
            Some(Refused::Static)
        }
        _ if fits || (facts.toggles && facts.cuttable) => None,
        _ if facts.has_mig && !facts.toggles => Some(Refused::NeedsReset),
        _ => Some(Refused::NoMig),
    }
}

#[cfg(test)]
mod tests {
    use OfferedMode::{Mig, TimeSlicing, Whole};

    use super::*;
    use crate::KubeVersion;

    const NEW: KubeVersion = KubeVersion::new(1, 37, 1);

    /// An H100 with its MIG mode off, everything asked for, on a new cluster.
    struct Case {
        asked: Modes,
        on: bool,
        toggles: bool,
        version: KubeVersion,
        in_use: BTreeSet<OfferedMode>,
        recorded: BTreeSet<OfferedMode>,
        instances: Instances,
        any_lives: bool,
    }

    fn h100() -> Case {
        Case {
            asked: Modes::everything(),
            on: false,
            toggles: true,
            version: NEW,
            in_use: BTreeSet::new(),
            recorded: BTreeSet::new(),
            instances: Instances::Ours,
            any_lives: false,
        }
    }

    fn chosen(case: &Case) -> Vec<OfferedMode> {
        let features = ServerFeatures::default().observe(case.version);
        let facts = Facts {
            asked: &case.asked,
            instances: case.instances,
            any_lives: case.any_lives,
            has_mig: true,
            on: case.on,
            toggles: case.toggles,
            cuttable: true,
            features: &features,
            in_use: &case.in_use,
            leaving: &BTreeSet::new(),
            recorded: &case.recorded,
        };
        choose(&facts).modes.into_iter().collect()
    }

    #[test]
    fn what_is_asked_for_is_offered_as_far_as_the_board_can() {
        assert_eq!(chosen(&h100()), [Whole, Mig, TimeSlicing]);
        assert_eq!(chosen(&Case { on: true, ..h100() }), [Whole, Mig, TimeSlicing]);
        assert_eq!(chosen(&Case { toggles: false, ..h100() }), [Whole, TimeSlicing]);
        assert_eq!(chosen(&Case { toggles: false, on: true, ..h100() }), [Mig]);
        let only = |mode| Modes::Only([mode].into());
        assert_eq!(chosen(&Case { asked: only(Mig), ..h100() }), [Mig], "prepare turns it on");
        assert_eq!(chosen(&Case { asked: only(Mig), toggles: false, ..h100() }), []);
        assert_eq!(chosen(&Case { asked: Modes::AsIs, ..h100() }), [Whole]);
        assert_eq!(chosen(&Case { asked: Modes::AsIs, on: true, ..h100() }), [Mig]);
        assert_eq!(chosen(&Case { asked: Modes::Only(BTreeSet::new()), ..h100() }), []);
    }

    #[test]
    fn where_only_one_mode_is_allowed_holds_decide_then_the_mig_mode() {
        let old = || Case { version: KubeVersion::new(1, 36, 1), ..h100() };
        assert_eq!(chosen(&old()), [Whole]);
        assert_eq!(chosen(&Case { on: true, ..old() }), [Mig]);
        assert_eq!(chosen(&Case { in_use: [TimeSlicing].into(), ..old() }), [TimeSlicing]);
        assert_eq!(chosen(&Case { in_use: [Mig].into(), ..old() }), [Mig]);
        let all = || OfferedMode::ALL.into();
        let used = Case { in_use: all(), recorded: [TimeSlicing].into(), ..old() };
        assert_eq!(chosen(&used), [TimeSlicing], "what is used comes before what is only allocated");
        let shares_or_partitions = Modes::Only([Mig, TimeSlicing].into());
        assert_eq!(chosen(&Case { asked: shares_or_partitions, ..old() }), [TimeSlicing]);
        let older = Case { version: KubeVersion::new(1, 34, 9), on: true, ..h100() };
        assert_eq!(chosen(&older), [Whole], "no counters, so no partitions; prepare turns the MIG mode off");
    }

    #[test]
    fn instances_of_others_are_all_there_is_while_any_lives() {
        let fixed = || Case { instances: Instances::Static, ..h100() };
        assert_eq!(chosen(&fixed()), [Whole, TimeSlicing]);
        assert_eq!(chosen(&Case { on: true, any_lives: true, ..fixed() }), [Mig]);
        // None does, and none is made: a GPU that is offered in one mode only must not be offered as nothing.
        assert_eq!(chosen(&Case { on: true, ..fixed() }), [Whole, TimeSlicing]);
        let old = KubeVersion::new(1, 36, 1);
        assert_eq!(chosen(&Case { on: true, version: old, ..fixed() }), [Whole]);
    }
}
