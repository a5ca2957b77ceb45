use divvy_model::MigMode;
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId, GpuInstanceProfileId, Placement};
use divvy_model::{CapsPromise, GpuUuid};

use super::*;
use crate::instances::{Made, Observed};

fn boot(n: u32) -> BootId {
    format!("boot-{n}").parse().unwrap()
}

fn place(start: u32) -> Place {
    Place {
        profile: GpuInstanceProfileId(19),
        placement: Placement { start, size: 1 },
    }
}

fn made(gi: u32) -> Made {
    Made {
        gi: GpuInstanceId(gi),
        ci: ComputeInstanceId(0),
        uuid: format!("MIG-{gi}").parse().unwrap(),
    }
}

fn instance(made_for: &str, life: Life, doubt: Option<&str>) -> Instance {
    Instance {
        made_for: made_for.parse().unwrap(),
        life,
        doubt: doubt.map(str::to_owned),
    }
}

/// A state with every field and every kind of note.
fn with_everything() -> GpuState {
    GpuState {
        boot: Some(boot(1)),
        grant: Granted {
            may_change_mode: true,
            offers_partitions: true,
            share_time_slice: Some(TimeSlice::Short),
            mps: MpsServer::equal(8, None),
            ..Granted::default()
        },
        mig: Some(Changed {
            found: false,
            ours: true,
            sure: true,
        }),
        compute: Some(Changed {
            found: ComputeMode::ExclusiveProcess,
            ours: ComputeMode::Default,
            sure: true,
        }),
        slice: Some(Changed {
            found: TimeSlice::Default,
            ours: TimeSlice::Long,
            sure: false,
        }),
        mps: [Target::Gpu, Target::Partition(place(0))]
            .map(|target| {
                let server = MpsServer::equal(4, Some(81_559)).unwrap();
                (target, MpsNote::new(server, true))
            })
            .into(),
        instances: [
            (place(0), instance("a", Life::Whole(made(7)), None)),
            (place(1), instance("b", Life::Begun, Some("a call hangs"))),
            (
                place(2),
                instance(
                    "c",
                    Life::Half {
                        gi: GpuInstanceId(9),
                    },
                    None,
                ),
            ),
            (place(3), instance("d", Life::Begun, Some("lost"))),
        ]
        .into(),
    }
}

#[test]
fn only_the_grant_and_mig_mode_outlast_a_boot() {
    let state = with_everything();
    assert_eq!(state.clone().in_boot(&boot(1)), state);
    let next = state.clone().in_boot(&boot(2));
    let expected = GpuState {
        boot: Some(boot(2)),
        grant: state.grant,
        mig: state.mig,
        ..GpuState::default()
    };
    assert_eq!(next, expected);
    assert_eq!(state.fences(&boot(2)).count(), 0);
    assert_eq!(state.fences(&boot(1)).count(), 2);
}

fn set(state: &mut GpuState, now: bool, to: bool) {
    let setting = Setting::Mig { now, to };
    state.note_setting(setting, Moment::Before);
    state.note_setting(setting, Moment::Done);
}

#[test]
fn the_first_found_value_is_given_back_and_then_nothing_is_noted() {
    let mut state = GpuState::default();
    set(&mut state, false, true);
    assert!(state.turned_mig_on());
    assert_eq!(state.mig.map(|mig| mig.found), Some(false));
    state.note_setting(
        Setting::Mig {
            now: true,
            to: false,
        },
        Moment::Before,
    );
    assert!(state.turned_mig_on(), "ours until it certainly is off");
    state.note_setting(
        Setting::Mig {
            now: true,
            to: false,
        },
        Moment::Done,
    );
    assert!(state.is_default());
    set(&mut state, true, false);
    assert!(!state.turned_mig_on());
    set(&mut state, false, true);
    assert!(state.is_default());
}

#[test]
fn a_change_whose_outcome_is_not_known_keeps_what_was_found() {
    let mut state = GpuState::default();
    let setting = Setting::Compute {
        now: ComputeMode::ExclusiveProcess,
        to: ComputeMode::Default,
    };
    state.note_setting(setting, Moment::Before);
    state.note_setting(setting, Moment::Unknown);
    let noted = state.compute.unwrap();
    assert_eq!(noted.found, ComputeMode::ExclusiveProcess);
    assert!(!noted.sure);
}

/// A slice cannot be read back, so the note of one that was set stays until it is given back, also
/// where it is the one that was found.
#[test]
fn the_note_of_a_time_slice_stays_until_it_is_given_back() {
    let mut state = GpuState::default();
    let (now, to) = (TimeSlice::Medium, TimeSlice::Long);
    state.note_setting(Setting::Slice { now, to }, Moment::Before);
    assert!(!state.slice.unwrap().sure, "the call may be cut short");
    state.note_setting(Setting::Slice { now, to }, Moment::Done);
    let to = TimeSlice::Medium;
    let setting = Setting::Slice {
        now: TimeSlice::Long,
        to,
    };
    state.note_setting(setting, Moment::Before);
    state.note_setting(setting, Moment::Done);
    let expected = Changed {
        found: TimeSlice::Medium,
        ours: TimeSlice::Medium,
        sure: true,
    };
    assert_eq!(state.slice, Some(expected));
    state.note_setting(Setting::SliceBack, Moment::Before);
    assert!(!state.slice.unwrap().sure, "the call may be cut short");
    state.note_setting(Setting::SliceBack, Moment::Done);
    assert!(state.is_default());
}

#[test]
fn a_contradicted_note_is_dropped_and_an_unread_one_is_kept() {
    let mode = |on| {
        Some(Ok(MigMode::Supported {
            current: on,
            pending: on,
        }))
    };
    let seen = |mig, compute| GpuSeen {
        mig,
        compute,
        ..GpuSeen::default()
    };
    let dropped = |seen: GpuSeen| {
        let mut state = with_everything();
        state.correct(&seen);
        (state.mig.is_none(), state.compute.is_none())
    };
    assert_eq!(dropped(seen(None, None)), (false, false));
    let as_noted = seen(mode(true), Some(Ok(ComputeMode::Default)));
    assert_eq!(dropped(as_noted), (false, false));
    let by_others = seen(mode(false), Some(Ok(ComputeMode::Prohibited)));
    assert_eq!(dropped(by_others.clone()), (true, true));
    let in_flight = GpuSeen {
        in_flight: Some(divvy_model::GpuOp::SetMigMode),
        ..by_others
    };
    assert_eq!(dropped(in_flight), (false, false), "it may set ours yet");
    let error = divvy_model::GpuError::on_gpu(
        divvy_model::GpuOp::MigMode,
        divvy_model::GpuErrorCode::UNKNOWN,
        &gpu(),
    );
    assert_eq!(dropped(seen(Some(Err(error)), None)), (false, false));
}

fn gpu() -> GpuUuid {
    "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap()
}

/// NVML gives ids out again, so the place alone says little; what is only begun may be any.
#[test]
fn a_living_instance_is_ours_by_its_place_and_its_id() {
    let state = with_everything();
    let ours = |start: u32, id: u32| {
        let living = GpuInstance {
            id: GpuInstanceId(id),
            profile: GpuInstanceProfileId(19),
            placement: Placement { start, size: 1 },
        };
        state.accounts_for(&boot(1), &living)
    };
    assert!(ours(0, 7) && !ours(0, 8));
    assert!(ours(1, 1) && ours(3, 1));
    assert!(ours(2, 9) && !ours(2, 7));
    assert!(!ours(4, 7));
}

#[test]
fn a_grant_is_kept_and_one_that_says_nothing_of_the_mode_leaves_it() {
    let mut state = GpuState::default();
    let shares = Grant {
        may_change_mode: None,
        offers_partitions: None,
        share_time_slice: Some(TimeSlice::Long),
        ..Grant::default()
    };
    let all = Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(true),
        ..shares
    };
    for (grant, may) in [(shares, false), (all, true), (shares, true)] {
        state.take(&grant);
        assert!(state.has(&grant));
        let expected = Granted {
            may_change_mode: may,
            offers_partitions: may,
            share_time_slice: Some(TimeSlice::Long),
            ..Granted::default()
        };
        assert_eq!(state.grant, expected);
    }
    assert!(!state.has(&Grant {
        offers_partitions: Some(false),
        ..all
    }));
    assert!(!state.is_default());
    state.take(&Grant {
        may_change_mode: Some(false),
        offers_partitions: Some(false),
        share_time_slice: None,
        ..Grant::default()
    });
    assert!(state.is_default());
}

#[test]
fn a_promise_of_caps_outlasts_grants_that_do_not_know() {
    let mut state = GpuState::default();
    let grant = |caps| Grant {
        caps,
        ..Grant::default()
    };
    let ended = CapsPromise::Ended { at: 7 };
    for (granted, kept) in [
        (Some(ended), CapsPromise::Never),
        (Some(CapsPromise::Given), CapsPromise::Given),
        (None, CapsPromise::Given),
        (Some(ended), ended),
        (None, ended),
    ] {
        state.take(&grant(granted));
        assert_eq!(state.grant.caps, kept);
        assert!(state.has(&grant(granted)));
    }
}

/// A value between the first and the last one is not given back.
#[test]
fn a_third_value_is_noted_beside_the_one_that_was_found() {
    let mut state = GpuState::default();
    let set = |now, to| Setting::Compute { now, to };
    let (found, first) = (ComputeMode::Default, ComputeMode::ExclusiveProcess);
    state.note_setting(set(found, first), Moment::Before);
    state.note_setting(set(first, ComputeMode::Prohibited), Moment::Before);
    let expected = Changed {
        found,
        ours: ComputeMode::Prohibited,
        sure: true,
    };
    assert_eq!(state.compute, Some(expected));
}

#[test]
fn an_answer_of_the_hardware_ends_a_doubt_and_another_half_is_not_ours() {
    let half = |gi| Observed::Half(GpuInstanceId(gi));
    let life = |gi| Life::Half {
        gi: GpuInstanceId(gi),
    };
    let begun = instance("a", Life::Begun, Some("a call hangs"));
    let settled = begun.clone().settled(place(0), half(3));
    assert_eq!(settled, Some(instance("a", life(3), None)));
    let whole = begun.settled(place(0), Observed::Whole(made(3)));
    assert_eq!(whole, Some(instance("a", Life::Whole(made(3)), None)));
    let noted = instance("a", life(3), Some("a call hangs"));
    let same = noted.clone().settled(place(0), half(3));
    assert_eq!(same, Some(instance("a", life(3), None)));
    assert_eq!(noted.settled(place(0), half(4)), None);
}

#[test]
fn a_change_that_was_not_made_leaves_the_notes_of_settings_as_they_were() {
    let before = with_everything();
    let mut state = before.clone();
    state.mig = None;
    state.compute = None;
    state.doubt_slice();
    state.doubt_server(Target::Gpu);
    assert!(!state.mps[&Target::Gpu].up);
    state.restore_settings(&before);
    let settings = |state: &GpuState| (state.mig, state.compute, state.slice);
    assert_eq!(settings(&state), settings(&before));
    assert!(!state.mps[&Target::Gpu].up, "a server is no setting");
}

#[test]
fn a_state_that_says_nothing_needs_no_file_in_any_boot() {
    assert!(GpuState::default().in_boot(&boot(1)).is_default());
    assert!(!with_everything().is_default());
}
