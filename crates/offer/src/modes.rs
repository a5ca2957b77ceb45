//! In which modes one GPU is offered: what its rules ask for, less what the board, its MIG mode and
//! the cluster cannot.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Form, Sharing, TargetKind};

use crate::{Feature, Instances, Modes, NoPartitions, OneMode, ServerFeatures};

/// Facts that the choice depends on.
#[derive(Debug, Clone, Copy)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "facts of a board, each by itself"
)]
pub(crate) struct Facts<'a> {
    pub(crate) asked: &'a Modes,
    pub(crate) instances: Instances,
    /// True if any MIG instance lives on it.
    pub(crate) any_lives: bool,
    /// True if it has a MIG mode at all.
    pub(crate) has_mig: bool,
    /// True if its MIG mode is on.
    pub(crate) on: bool,
    /// True if its MIG mode was on before divvy changed it, if it did.
    pub(crate) found_on: bool,
    /// True if its MIG mode can be changed without a reset.
    pub(crate) toggles: bool,
    /// True if its profiles are known, and its counters fit the API.
    pub(crate) cuttable: bool,
    /// Lacks of the GPU or its node, by the form that needs it.
    pub(crate) lacks: &'a BTreeMap<Form, &'static str>,
    pub(crate) features: &'a ServerFeatures,
    /// The modes in which it is used or allocated.
    pub(crate) in_use: &'a BTreeSet<Form>,
    /// The modes in which it may still be allocated.
    pub(crate) leaving: &'a BTreeSet<Form>,
    /// The modes in which it is used.
    pub(crate) recorded: &'a BTreeSet<Form>,
}

/// The modes to offer, and what became of the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) modes: BTreeSet<Form>,
    /// Modes that were asked for and cannot be offered.
    pub(crate) refused: Vec<Refused>,
    /// Why only one of several is offered.
    pub(crate) one_mode: Option<OneMode>,
    /// A mode in which it is held and that is not offered, where nothing but a taint keeps the
    /// others off it.
    pub(crate) guard: Option<Form>,
}

/// Why a mode cannot be offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Partitions need counters.
    NoCounters(NoPartitions),
    /// Shares need what the server drops.
    NoShares,
    /// MPS shares need what the GPU or its node lacks.
    NoMps(&'static str),
    /// The MIG mode would have to change, and that needs a reset.
    NeedsReset,
    /// The board cannot do it, or nothing is known of its profiles.
    NoMig,
    /// Instances live that are not ours to remove, or none does and none is ours to make.
    Static,
}

impl Choice {
    pub(crate) fn offers(&self, mode: Form) -> bool {
        self.modes.contains(&mode)
    }
}

/// Returns whether the GPU can be had in a mode without a change of its MIG mode.
pub(crate) fn fits_mig_mode(mode: Form, on: bool) -> bool {
    (mode.target == TargetKind::Partition) == on
}

pub(crate) fn choose(facts: &Facts<'_>) -> Choice {
    // A mode that divvy turned on for an earlier policy is given back: without a policy the GPU is
    // what it was found as.
    let as_is = BTreeSet::from([if facts.found_on {
        Form::PARTITIONS
    } else {
        Form::WHOLE
    }]);
    let asked = match facts.asked {
        Modes::AsIs => &as_is,
        Modes::Only(asked) => asked,
    };
    // First each mode by itself, then the modes together.
    let mut choice = Choice::default();
    for mode in asked {
        match obstacle(facts, *mode) {
            None => drop(choice.modes.insert(*mode)),
            Some(why) => choice.refused.push(why),
        }
    }
    let single = facts.features.one_mode();
    // Partitions and shares of them are two ways of use, which only the mode lock keeps apart.
    let is_twin =
        |mode: &Form| mode.target == TargetKind::Partition && mode.sharing != Sharing::Exclusive;
    if single.is_some() && choice.modes.extract_if(.., is_twin).count() > 0 {
        choice.one_mode.clone_from(&single);
    }
    if choice.modes.len() > 1 && single.is_some() {
        let among = |used: &BTreeSet<Form>| {
            choice
                .modes
                .iter()
                .find(|mode| used.contains(mode))
                .copied()
        };
        // The mode in use stays: by records before allocations, which may not be
        // carried out yet; then the one that needs no change of the MIG mode.
        let held = among(facts.recorded).or_else(|| among(facts.in_use));
        let fits = || {
            choice
                .modes
                .iter()
                .find(|mode| fits_mig_mode(**mode, facts.on))
                .copied()
        };
        let one = held.or_else(fits).or(choice.modes.first().copied());
        choice.modes = one.into_iter().collect();
        choice.one_mode.clone_from(&single);
    }
    // Without counters nothing but a taint keeps the offered mode off a GPU that is held in
    // another.
    if single.is_some() {
        let others = facts.in_use.iter().chain(facts.leaving);
        choice.guard = others.copied().find(|mode| !choice.offers(*mode));
    }
    choice
}

fn obstacle(facts: &Facts<'_>, mode: Form) -> Option<Refused> {
    let fits = fits_mig_mode(mode, facts.on);
    let no_counters = facts.features.no_partitions().map(Refused::NoCounters);
    let is_static = facts.instances == Instances::Static;
    match mode.target {
        // The server first: without the fields that it drops, a share would be another kind of
        // device.
        _ if mode.sharing.is_shared() && !facts.features.supports(Feature::Shares) => {
            Some(Refused::NoShares)
        }
        _ if facts.lacks.contains_key(&mode) => facts.lacks.get(&mode).copied().map(Refused::NoMps),
        // Without profiles it is not known what partitions there are, and without counters the
        // scheduler would allocate those that overlap.
        TargetKind::Partition if !facts.cuttable => Some(Refused::NoMig),
        TargetKind::Partition if no_counters.is_some() => no_counters,
        // Instances of an administrator are for one claim each.
        TargetKind::Partition if is_static && mode.sharing.is_shared() => Some(Refused::Static),
        // None lives, and none is made: a GPU in one mode only would be offered as nothing.
        TargetKind::Partition if is_static && !(facts.on && facts.any_lives) => {
            Some(Refused::Static)
        }
        // No whole GPU while instances of an administrator live on it: nothing here may remove
        // them.
        TargetKind::Gpu if is_static && facts.any_lives => Some(Refused::Static),
        // The MIG mode is right already, or prepare can change it at once.
        _ if fits || (facts.toggles && facts.cuttable) => None,
        // Before Hopper the mode changes only with a reset of the GPU, which is left to an
        // administrator.
        _ if facts.has_mig && !facts.toggles => Some(Refused::NeedsReset),
        _ => Some(Refused::NoMig),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::KubeVersion;

    const WHOLE: Form = Form::WHOLE;
    const MIG: Form = Form::PARTITIONS;
    const TIME_SLICED: Form = Form::TIME_SLICED;

    const NEW: KubeVersion = KubeVersion::new(1, 37, 1);

    /// An H100 with its MIG mode off, everything asked for, on a new cluster.
    struct Case {
        asked: Modes,
        on: bool,
        found_on: Option<bool>,
        toggles: bool,
        version: KubeVersion,
        in_use: BTreeSet<Form>,
        recorded: BTreeSet<Form>,
        instances: Instances,
        any_lives: bool,
        mps_lack: Option<&'static str>,
    }

    fn h100() -> Case {
        Case {
            asked: Modes::everything(),
            on: false,
            found_on: None,
            toggles: true,
            version: NEW,
            in_use: BTreeSet::new(),
            recorded: BTreeSet::new(),
            instances: Instances::Ours,
            any_lives: false,
            mps_lack: None,
        }
    }

    fn chosen(case: &Case) -> Vec<Form> {
        let features = ServerFeatures::default().observe(case.version);
        let lack = case.mps_lack;
        let lacks = lack.map(|lack| [Form::MPS, Form::MPS_PARTITIONS].map(|form| (form, lack)));
        let facts = Facts {
            asked: &case.asked,
            instances: case.instances,
            any_lives: case.any_lives,
            has_mig: true,
            on: case.on,
            found_on: case.found_on.unwrap_or(case.on),
            toggles: case.toggles,
            cuttable: true,
            lacks: &lacks.into_iter().flatten().collect(),
            features: &features,
            in_use: &case.in_use,
            leaving: &BTreeSet::new(),
            recorded: &case.recorded,
        };
        choose(&facts).modes.into_iter().collect()
    }

    #[test]
    fn what_is_asked_for_is_offered_as_far_as_the_board_can() {
        assert_eq!(chosen(&h100()), [WHOLE, MIG, TIME_SLICED]);
        assert_eq!(
            chosen(&Case { on: true, ..h100() }),
            [WHOLE, MIG, TIME_SLICED]
        );
        assert_eq!(
            chosen(&Case {
                toggles: false,
                ..h100()
            }),
            [WHOLE, TIME_SLICED]
        );
        assert_eq!(
            chosen(&Case {
                toggles: false,
                on: true,
                ..h100()
            }),
            [MIG]
        );
        let only = |mode| Modes::Only([mode].into());
        assert_eq!(
            chosen(&Case {
                asked: only(MIG),
                ..h100()
            }),
            [MIG],
            "prepare turns it on"
        );
        assert_eq!(
            chosen(&Case {
                asked: only(MIG),
                toggles: false,
                ..h100()
            }),
            []
        );
        assert_eq!(
            chosen(&Case {
                asked: Modes::AsIs,
                ..h100()
            }),
            [WHOLE]
        );
        assert_eq!(
            chosen(&Case {
                asked: Modes::AsIs,
                on: true,
                ..h100()
            }),
            [MIG]
        );
        // Turned on, or off, for a policy that is gone.
        for (found, offered) in [(false, WHOLE), (true, MIG)] {
            let case = Case {
                asked: Modes::AsIs,
                on: !found,
                found_on: Some(found),
                ..h100()
            };
            assert_eq!(chosen(&case), [offered]);
        }
        assert_eq!(
            chosen(&Case {
                asked: Modes::Only(BTreeSet::new()),
                ..h100()
            }),
            []
        );
    }

    /// Without counters nothing keeps a share of a partition and the partition apart.
    #[test]
    fn shares_of_partitions_are_not_offered_where_a_gpu_has_one_mode() {
        let twins = [Form::SHARED_PARTITIONS, Form::MPS_PARTITIONS];
        let asked = |more: &[Form]| {
            let modes = twins.iter().chain(more).copied();
            Modes::Only(modes.collect())
        };
        for (more, old) in [(&[][..], vec![]), (&[MIG], vec![MIG])] {
            let case = |version| Case {
                asked: asked(more),
                on: true,
                version,
                recorded: [Form::SHARED_PARTITIONS].into(),
                ..h100()
            };
            assert_eq!(chosen(&case(KubeVersion::new(1, 35, 8))), old);
            let all: Vec<_> = chosen(&case(NEW));
            assert_eq!(all.len(), more.len() + 2, "{all:?}");
        }
    }

    #[test]
    fn mps_is_offered_only_where_a_rule_names_it_and_nothing_is_lacking() {
        let asked = || Modes::Only([WHOLE, Form::MPS].into());
        let case = |asked, on, toggles, mps_lack| {
            chosen(&Case {
                asked,
                on,
                toggles,
                mps_lack,
                ..h100()
            })
        };
        assert_eq!(case(asked(), false, true, None), [WHOLE, Form::MPS]);
        assert_eq!(case(asked(), false, true, Some("no program")), [WHOLE]);
        // With MIG mode on that needs a reset to change, there is neither.
        assert_eq!(case(asked(), true, false, None), []);
        for everything in [Modes::everything(), Modes::AsIs] {
            let chosen = case(everything, false, true, None);
            assert!(!chosen.contains(&Form::MPS), "{chosen:?}");
        }
    }

    #[test]
    fn where_only_one_mode_is_allowed_holds_decide_then_the_mig_mode() {
        let old = || Case {
            version: KubeVersion::new(1, 35, 8),
            ..h100()
        };
        assert_eq!(chosen(&old()), [WHOLE]);
        assert_eq!(chosen(&Case { on: true, ..old() }), [MIG]);
        assert_eq!(
            chosen(&Case {
                in_use: [TIME_SLICED].into(),
                ..old()
            }),
            [TIME_SLICED]
        );
        assert_eq!(
            chosen(&Case {
                in_use: [MIG].into(),
                ..old()
            }),
            [MIG]
        );
        let all = || Form::OFFERED.into();
        let used = Case {
            in_use: all(),
            recorded: [TIME_SLICED].into(),
            ..old()
        };
        assert_eq!(
            chosen(&used),
            [TIME_SLICED],
            "what is used comes before what is only allocated"
        );
        let shares_or_partitions = Modes::Only([MIG, TIME_SLICED].into());
        assert_eq!(
            chosen(&Case {
                asked: shares_or_partitions,
                ..old()
            }),
            [TIME_SLICED]
        );
        let older = Case {
            version: KubeVersion::new(1, 34, 9),
            on: true,
            ..h100()
        };
        assert_eq!(
            chosen(&older),
            [WHOLE],
            "no counters, so no partitions; prepare turns the MIG mode off"
        );
    }

    #[test]
    fn instances_of_others_are_all_there_is_while_any_lives() {
        let fixed = || Case {
            instances: Instances::Static,
            ..h100()
        };
        assert_eq!(chosen(&fixed()), [WHOLE, TIME_SLICED]);
        assert_eq!(
            chosen(&Case {
                on: true,
                any_lives: true,
                ..fixed()
            }),
            [MIG]
        );
        // None does, and none is made: a GPU that is offered in one mode only must not be offered
        // as nothing.
        assert_eq!(
            chosen(&Case {
                on: true,
                ..fixed()
            }),
            [WHOLE, TIME_SLICED]
        );
        let old = KubeVersion::new(1, 35, 8);
        assert_eq!(
            chosen(&Case {
                on: true,
                version: old,
                ..fixed()
            }),
            [WHOLE]
        );
    }
}
