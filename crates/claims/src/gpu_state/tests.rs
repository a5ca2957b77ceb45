use super::*;
use divvy_model::GpuUuid;

fn hold(kind: HoldKind) -> Hold {
    Hold { claim: "c".parse().unwrap(), gpu: gpu(), device: "gpu-0".parse().unwrap(), kind, time_slice: None }
}

#[test]
fn the_wanted_time_slice_follows_from_the_live_holds_and_admin_access_is_not_one() {
    assert_eq!(wanted_time_slice([], None), None);
    assert_eq!(wanted_time_slice([&hold(HoldKind::Admin)], Some(TimeSlice::Long)), None);
    let asks = |kind, slice| Hold { time_slice: Some(slice), ..hold(kind) };
    // Shares have what the policy says now, whatever it said when they were prepared.
    let shares = [&asks(HoldKind::Share, TimeSlice::Long), &hold(HoldKind::Admin), &hold(HoldKind::Share)];
    for policy in [None, Some(TimeSlice::Short)] {
        assert_eq!(wanted_time_slice(shares, policy), policy);
    }
    let whole = [&hold(HoldKind::Whole), &hold(HoldKind::Admin)];
    assert_eq!(wanted_time_slice(whole, Some(TimeSlice::Long)), None);
    let whole = asks(HoldKind::Whole, TimeSlice::Short);
    assert_eq!(wanted_time_slice([&whole, &hold(HoldKind::Admin)], None), Some(TimeSlice::Short));
    let profile = divvy_model::mig::GpuInstanceProfileId(19);
    let placement = divvy_model::mig::Placement { start: 0, size: 1 };
    let partition = hold(HoldKind::Partition { profile, placement });
    assert_eq!(wanted_time_slice([&hold(HoldKind::Admin), &partition], Some(TimeSlice::Long)), None);
}

#[test]
fn only_what_we_changed_counts_as_applied_and_the_baseline_is_what_was_found_first() {
    let mut state = GpuState::default();
    state.note_mig_mode(true, true);
    assert!(state.is_default(), "it was on already");
    state.note_mig_mode(false, true);
    assert!(state.turned_mig_on());
    assert_eq!(state.baseline, [Setting::MigMode { on: false }]);
    state.note_mig_mode(true, true);
    assert!(state.turned_mig_on(), "still ours");
    state.note_mig_mode(true, false);
    assert!(state.is_default(), "back to the baseline");
    state.note_mig_mode(true, false);
    assert_eq!(state.applied, [Setting::MigMode { on: false }]);
    state.note_mig_mode(false, true);
    assert!(state.is_default(), "back to the baseline");
    state.note_mig_mode(false, true);
    state.note_mig_mode(false, false);
    assert!(state.is_default(), "a reboot turned it off");
}

#[test]
fn a_time_slice_is_noted_beside_mig_mode_with_what_was_first_found_and_does_not_outlast_the_boot() {
    let boot = |n: u32| format!("boot-{n}").parse::<BootId>().unwrap();
    let mut state = GpuState::default();
    state.note_time_slice(TimeSlice::Medium, TimeSlice::Long, &boot(1));
    state.note_mig_mode(true, false);
    // Read again while it was ours: the first answer stays the baseline.
    state.note_time_slice(TimeSlice::Long, TimeSlice::Short, &boot(1));
    assert_eq!(state.time_slice(&boot(1)), Some(TimeSlice::Short));
    assert_eq!(state.time_slice_before(&boot(1)), Some(TimeSlice::Medium));
    assert_eq!(state.applied[0], Setting::MigMode { on: false });
    assert_eq!((state.time_slice(&boot(2)), state.time_slice_before(&boot(2))), (None, None));
    state.note_time_slice(TimeSlice::Default, TimeSlice::Long, &boot(2));
    assert_eq!(state.time_slice_before(&boot(2)), Some(TimeSlice::Default));
    state.note_mig_mode(false, true);
    state.forget_time_slice();
    assert!(state.is_default());
}

#[test]
fn every_version_of_a_gpu_state_has_a_captured_file_that_still_reads() {
    let expected = GpuState {
        baseline: vec![Setting::MigMode { on: true }],
        applied: vec![Setting::MigMode { on: false }],
        fences: vec![Fence {
            claim: Some("0f0e0d0c-1111-2222-3333-444455556666".parse().unwrap()),
            reason: "the call did not come back".to_owned(),
            boot: "b0071d00-0000-0000-0000-000000000001".parse().unwrap(),
        }],
        ..GpuState::default()
    };
    let mut expected_v2 = expected.clone();
    let boot = "b0071d00-0000-0000-0000-000000000001".parse().unwrap();
    expected_v2.note_time_slice(TimeSlice::Default, TimeSlice::Long, &boot);
    let fixtures = [
        (include_bytes!("../../fixtures/gpu-state-v1.json").as_slice(), expected),
        (include_bytes!("../../fixtures/gpu-state-v2.json").as_slice(), expected_v2),
    ];
    assert_eq!(fixtures.len(), usize::try_from(VERSION).unwrap(), "one fixture per version");
    let (newest, live) = fixtures.last().unwrap().clone();
    for (bytes, expected) in fixtures {
        assert_eq!(GpuState::decode(bytes), Stored::Fine(expected));
    }
    let body = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap()["body"].clone();
    assert_eq!(body(&live.encode()), body(newest), "the newest version is written as captured");
}

fn gpu() -> GpuUuid {
    "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap()
}

/// All that version 2 has come to hold.
fn with_everything() -> GpuState {
    let boot: BootId = "b0071d00-0000-0000-0000-000000000001".parse().unwrap();
    let fence = |claim: &str| Fence {
        claim: Some(claim.parse().unwrap()),
        reason: "the call did not come back".to_owned(),
        boot: boot.clone(),
    };
    let step = |start| {
        crate::Step::create_partition(
            gpu(),
            divvy_model::mig::GpuInstanceProfileId(19),
            divvy_model::mig::Placement { start, size: 1 },
        )
    };
    let own = |claim: &str, start, progress| OwnedInstance {
        claim: claim.parse().unwrap(),
        boot: boot.clone(),
        state: StepState { step: step(start), progress },
    };
    let (gi, ci) = (divvy_model::mig::GpuInstanceId(7), divvy_model::mig::ComputeInstanceId(0));
    let made = crate::Outcome::Partition { gi, ci, uuid: "MIG-1".parse().unwrap() };
    let mut state = GpuState {
        fences: vec![fence("a"), fence("b")],
        may_change_mode: true,
        instances: vec![
            own("a", 0, crate::Progress::Done { outcome: made }),
            own("b", 1, crate::Progress::Intended { before: vec![gi] }),
        ],
        ..GpuState::default()
    };
    state.note_mig_mode(false, true);
    state
}

#[test]
fn what_a_gpus_file_has_come_to_hold_reads_as_it_was_captured() {
    let captured = include_bytes!("../../fixtures/gpu-state-v2-instances.json").as_slice();
    assert_eq!(GpuState::decode(captured), Stored::Fine(with_everything()));
    assert_eq!(String::from_utf8(with_everything().encode()).unwrap(), str::from_utf8(captured).unwrap());
}

#[test]
fn a_grant_is_kept_and_one_that_says_nothing_of_the_mode_leaves_it() {
    let mut state = GpuState::default();
    let shares = Grant { may_change_mode: None, share_time_slice: Some(TimeSlice::Long) };
    for grant in [Grant { may_change_mode: Some(true), share_time_slice: None }, shares] {
        assert!(!state.has(&grant));
        state.take(&grant);
        assert!(state.has(&grant));
    }
    assert!(state.may_change_mode);
    assert_eq!(GpuState::decode(&state.encode()), Stored::Fine(state));
}

/// The divvy before reads the settings and a fence of such a file, and what it writes back is read again: a rollback
/// under pods works. (The instances it drops are noted again from the claims' records.)
#[test]
fn the_version_before_understands_what_this_one_writes() {
    #[derive(Serialize, Deserialize)]
    struct FenceBefore {
        claim: ClaimUid,
        reason: String,
        boot: BootId,
    }
    #[derive(Serialize, Deserialize)]
    struct Before {
        version: u32,
        baseline: Vec<Setting>,
        applied: Vec<Setting>,
        fence: Option<FenceBefore>,
    }
    #[derive(Deserialize)]
    struct Envelope {
        body: Before,
    }
    let envelope: Envelope = serde_json::from_slice(&with_everything().encode()).unwrap();
    let before = envelope.body;
    assert_eq!((before.version, before.fence.as_ref().unwrap().claim.as_str()), (2, "a"));
    let body = serde_json::to_string(&before).unwrap();
    let written = format!("{{\"checksum\":\"{}\",\"body\":{body}}}", stored::checksum(&body));
    let all = with_everything();
    let left =
        GpuState { fences: all.fences[..1].to_vec(), may_change_mode: false, instances: Vec::new(), ..all };
    assert_eq!(GpuState::decode(written.as_bytes()), Stored::Fine(left));
}

#[test]
fn what_is_noted_is_known_and_only_nothing_is_the_default() {
    let boot = |n: u32| format!("boot-{n}").parse::<BootId>().unwrap();
    let mut state = GpuState::default();
    assert!(state.is_default() && !state.has_time_slice());
    assert!(!state.disagrees_with_mig_mode(true) && !state.disagrees_with_mig_mode(false));
    state.note_mig_mode(false, true);
    assert!(!state.is_default());
    assert!(!state.disagrees_with_mig_mode(true) && state.disagrees_with_mig_mode(false));
    state.note_time_slice(TimeSlice::Default, TimeSlice::Long, &boot(1));
    assert!(state.has_time_slice());
    let mut found = |mode, n| {
        state.note_compute_mode(mode, &boot(n));
        state.compute_mode_found.clone().unwrap().mode
    };
    assert_eq!(found(ComputeMode::ExclusiveProcess, 1), ComputeMode::ExclusiveProcess);
    assert_eq!(found(ComputeMode::Default, 1), ComputeMode::ExclusiveProcess, "what was found first");
    assert_eq!(found(ComputeMode::Default, 2), ComputeMode::Default, "of another boot nothing is left");
}
