//! Odd answers of NVML: each costs the fact that was asked for, and only until the next question.

use divvy_gpu_sim::Fault;
use divvy_model::health::{GpuVitals, RecoveryAction};
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, GpuUuid, HostTopology, Inventory, MigMode};

use crate::ffi::trial::WRITES_NOTHING;
use crate::test_library::TestLibrary;
use crate::{NvmlDriver, read_inventory, read_inventory_after};

/// Codes that one GPU may answer without reason: a success that says nothing, an unexpected error,
/// a moment's, and those that else mean that there is nothing to say.
const CODES: [GpuErrorCode; 7] = [
    WRITES_NOTHING,
    GpuErrorCode::UNKNOWN,
    GpuErrorCode::TIMEOUT,
    GpuErrorCode::NOT_READY,
    GpuErrorCode::NO_PERMISSION,
    GpuErrorCode::NOT_SUPPORTED,
    GpuErrorCode::INVALID_ARGUMENT,
];

fn names(inventory: &Inventory, gpu: &GpuUuid) -> Vec<String> {
    let Some(mig) = &inventory.gpus[gpu].mig else {
        return vec!["whole only".to_owned()];
    };
    let name = |profile| {
        let name = mig.capabilities.name(profile);
        name.map(|name| name.to_string()).unwrap_or_default()
    };
    let all = mig.capabilities.profiles().iter();
    all.map(|profile| format!("{}:{}", profile.id.0, name(profile)))
        .collect()
}

fn after(driver: &dyn GpuDriver, before: Option<&Inventory>) -> Inventory {
    read_inventory_after(driver, &|_| HostTopology::default(), before).unwrap()
}

/// A board with MIG mode on and two living partitions.
fn cut(board: &str) -> TestLibrary {
    let library = TestLibrary::new(board);
    let gpu = library.uuids().remove(0);
    let on = MigMode::Supported {
        current: true,
        pending: true,
    };
    library
        .state
        .edit(|e| {
            e.gpu(&gpu).unwrap().facts.mig_mode = on;
            let caps = e.mig_capabilities(&gpu).unwrap();
            let smallest = caps.profiles().first().unwrap();
            for at in smallest.placements.iter().take(2) {
                e.make_foreign_instance(&gpu, smallest.id, at.start)
                    .unwrap();
            }
        })
        .unwrap();
    library
}

/// Tries an odd answer, to each single call of the first reading and with each code, and good ones
/// ever after.
#[test]
fn any_single_odd_answer_is_forgotten_with_the_next() {
    for library in [TestLibrary::new("a100-40x1"), cut("h100x1")] {
        let gpu = library.uuids().remove(0);
        let good = library.open();
        let expected = after(&good, None);
        let calls = good.library.trial.total();
        let vitals = good.vitals(&gpu).unwrap();
        for call in 0..calls {
            let code = CODES[call % CODES.len()];
            let driver = library.open();
            driver.library.trial.fail_once(call, code);
            let mut seen = read_inventory(&driver, &|_| HostTopology::default()).ok();
            assert!(driver.library.trial.was_met(), "call {call}");
            for _ in 0..2 {
                seen = Some(after(&driver, seen.as_ref()));
            }
            assert_eq!(seen.unwrap(), expected, "call {call} answered {code}");
            assert_eq!(driver.vitals(&gpu).unwrap(), vitals, "call {call}");
        }
    }
}

#[test]
fn a_profile_without_places_for_a_while_is_offered_when_it_has_them() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let expected = names(&after(&library.open(), None), &gpu);
    // In each reading: field 199, and the places of the first profile.
    let fault = Fault::fail(GpuErrorCode::UNKNOWN)
        .of(GpuOp::MigCapabilities)
        .times(6);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    let mut seen = after(&driver, None);
    for _ in 0..2 {
        assert_eq!(names(&seen, &gpu), expected[1..]);
        seen = after(&driver, Some(&seen));
    }
    seen = after(&driver, Some(&seen));
    assert_eq!(names(&seen, &gpu), expected);
    let asked = driver
        .library
        .trial
        .calls("nvmlDeviceGetGpuInstancePossiblePlacements_v2");
    for _ in 0..3 {
        seen = after(&driver, Some(&seen));
    }
    let again = driver
        .library
        .trial
        .calls("nvmlDeviceGetGpuInstancePossiblePlacements_v2");
    let once = 2 * expected.len();
    assert_eq!(again - asked, once, "asked once more, to be sure of it");
}

/// A list of profiles is kept once it came twice in a row, which an odd one may have, too.
#[test]
fn a_profile_that_is_left_out_twice_in_a_row_is_not_lost_for_good() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let expected = names(&after(&library.open(), None), &gpu);
    let driver = library.open();
    let mut seen = None;
    for _ in 0..2 {
        let places = "nvmlDeviceGetGpuInstancePossiblePlacements_v2";
        let code = GpuErrorCode::NOT_SUPPORTED;
        driver.library.trial.fail_once_in(places, 0, code);
        let now = after(&driver, seen.as_ref());
        assert_eq!(names(&now, &gpu), expected[1..]);
        seen = Some(now);
    }
    let back = (0..20).find(|_| {
        seen = Some(after(&driver, seen.as_ref()));
        seen.as_ref()
            .is_some_and(|seen| names(seen, &gpu) == expected)
    });
    assert_eq!(back, Some(15));
}

/// An instance that is not listed counts as gone, and is never removed.
#[test]
fn one_odd_answer_hides_no_instance() {
    let library = cut("h100x1");
    let gpu = library.uuids().remove(0);
    let good = library.open();
    let all = good.gpu_instances(&gpu).unwrap();
    let inside = |driver: &NvmlDriver| driver.compute_instances(&gpu, all[0].id);
    let expected = inside(&good).unwrap();
    assert_eq!((all.len(), expected.len()), (2, 1));
    // A list that says that it is empty cannot be distinguished from one that is.
    for code in &CODES[1..] {
        for at in 0..good.library.trial.total() {
            let driver = library.open();
            driver.library.trial.fail_once(at, *code);
            if let Ok(seen) = driver.gpu_instances(&gpu) {
                assert_eq!(seen, all, "call {at}: {code}");
            }
            let driver = library.open();
            driver.library.trial.fail_once(at, *code);
            if let Ok(seen) = inside(&driver) {
                assert_eq!(seen, expected, "call {at}: {code}");
            }
        }
    }
}

/// An instance that is listed is believed to be gone only if another list lacks it.
#[test]
fn an_instance_that_is_listed_is_not_gone_whatever_is_said_of_it() {
    let library = cut("h100x1");
    let gpu = library.uuids().remove(0);
    let good = library.open();
    let all = good.gpu_instances(&gpu).unwrap();
    let inside = good.compute_instances(&gpu, all[0].id).unwrap();
    let infos = ["nvmlGpuInstanceGetInfo", "nvmlComputeInstanceGetInfo_v2"];
    for code in &[CODES, [GpuErrorCode::NOT_FOUND; 7]].concat()[1..8] {
        for (info, times) in [(infos[0], 2), (infos[0], 99), (infos[1], 2), (infos[1], 99)] {
            let driver = library.open();
            let ask = || {
                let listed = driver.gpu_instances(&gpu)?;
                Ok((listed, driver.compute_instances(&gpu, all[0].id)?))
            };
            driver.library.trial.fail_in(info, 0, times, *code);
            let answer: Result<_, divvy_model::GpuError> = ask();
            if times == 2 {
                assert_eq!(answer, Ok((all.clone(), inside.clone())), "{info}: {code}");
            } else {
                let error = answer.unwrap_err();
                assert_eq!(error.code, GpuErrorCode::UNKNOWN, "{info}: {error}");
            }
        }
    }
}

/// Compute instances are listed by the profiles that their GPU instance offers.
#[test]
fn a_compute_profile_that_is_left_out_at_first_hides_no_instance() {
    let library = cut("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let id = driver.gpu_instances(&gpu).unwrap()[0].id;
    let expected = library.open().compute_instances(&gpu, id).unwrap();
    assert_eq!(expected.len(), 1);
    let asked = "nvmlGpuInstanceGetComputeInstanceProfileInfo";
    let trial = &driver.library.trial;
    trial.fail_in(asked, 0, 2, GpuErrorCode::NOT_SUPPORTED);
    assert_eq!(driver.compute_instances(&gpu, id), Ok(expected));
    assert!(trial.was_met());
    let driver = library.open();
    let trial = &driver.library.trial;
    trial.fail_in(asked, 0, 999, GpuErrorCode::NOT_SUPPORTED);
    let error = driver.compute_instances(&gpu, id).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::UNKNOWN);
}

/// All that lives on a GPU that is gone, or that has no MIG mode, counts as gone.
#[test]
fn a_gpu_that_is_listed_is_there_whatever_is_said_of_it() {
    let library = cut("h100x2");
    let [gpu, other] = library.uuids().try_into().unwrap();
    let mode = library.open().mig_mode(&gpu);
    assert!(mode.as_ref().is_ok_and(|mode| mode.is_on()));
    let odd = |functions: &[&'static str], code| {
        let driver = library.open();
        let trial = &driver.library.trial;
        for function in functions {
            trial.fail_in(function, 0, 99, code);
        }
        driver
    };
    let by_uuid = "nvmlDeviceGetHandleByUUID";
    for code in [GpuErrorCode::NOT_FOUND, GpuErrorCode::NOT_SUPPORTED] {
        let driver = odd(&[by_uuid], code);
        assert_eq!(driver.mig_mode(&gpu), mode, "{code}");
        for function in [
            "nvmlDeviceGetCount_v2",
            "nvmlDeviceGetHandleByIndex_v2",
            "nvmlDeviceGetUUID",
        ] {
            let driver = odd(&[by_uuid, function], code);
            let error = driver.mig_mode(&gpu).unwrap_err();
            assert_eq!(error.code, GpuErrorCode::UNKNOWN, "{function}: {code}");
        }
    }
    let driver = odd(&["nvmlDeviceGetMigMode"], GpuErrorCode::NOT_FOUND);
    assert_eq!(
        driver.mig_mode(&gpu).unwrap_err().code,
        GpuErrorCode::UNKNOWN
    );
    assert_eq!(driver.facts(&gpu).unwrap_err().code, GpuErrorCode::UNKNOWN);
    // A GPU that was taken out is on no list.
    let out = |e: &mut divvy_gpu_sim::Engine| drop(e.remove_gpu(&other));
    library.state.edit(out).unwrap();
    let error = library.open().mig_mode(&other).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::NOT_FOUND);
}

/// The functions by which a GPU says that it has MIG.
const ABOUT_MIG: [&str; 3] = [
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetGpuInstanceProfileInfoV",
    "nvmlDeviceGetGpuInstanceProfileInfo",
];

/// All that would show that it is cut fails at once.
#[test]
fn a_gpu_that_was_cut_is_never_offered_whole_by_odd_answers() {
    let library = cut("a30x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let seen = after(&driver, None);
    let seen = after(&driver, Some(&seen));
    for function in ABOUT_MIG {
        let trial = &driver.library.trial;
        trial.fail_in(function, 0, 999, GpuErrorCode::NOT_SUPPORTED);
    }
    // In the same session it is unknown.
    assert_eq!(
        driver.mig_mode(&gpu).unwrap_err().code,
        GpuErrorCode::UNKNOWN
    );
    assert!(!after(&driver, Some(&seen)).gpus.contains_key(&gpu));
    // In another, it is what it was.
    let odd = TestLibrary::answering("a30x1", &ABOUT_MIG, GpuErrorCode::NOT_SUPPORTED);
    let mode = seen.gpus[&gpu].facts.mig_mode;
    assert!(mode.is_on());
    let mut now = seen;
    for _ in 0..3 {
        now = after(&odd.open(), Some(&now));
        assert_eq!(now.gpus[&gpu].facts.mig_mode, mode);
        let mig = now.gpus[&gpu].mig.as_ref().unwrap();
        assert_eq!(mig.instances.as_ref().map(Vec::len), Some(2));
    }
    // Also where it could not be read in between.
    let refused = TestLibrary::answering("a30x1", &["nvmlDeviceGetName"], GpuErrorCode::UNKNOWN);
    now = after(&refused.open(), Some(&now));
    assert!(!now.gpus.contains_key(&gpu));
    now = after(&odd.open(), Some(&now));
    assert_eq!(now.gpus[&gpu].facts.mig_mode, mode);
}

/// The first reading knows of no earlier one: a mode is asked for twice.
#[test]
fn a_cut_gpu_that_is_odd_once_at_first_is_not_whole() {
    let library = cut("a30x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let trial = &driver.library.trial;
    for (function, times) in ABOUT_MIG.into_iter().zip([1, 2, 1]) {
        trial.fail_in(function, 0, times, GpuErrorCode::NOT_SUPPORTED);
    }
    assert!(driver.facts(&gpu).unwrap().mig_mode.is_on());
    assert!(trial.was_met());
}

/// A call that succeeds and writes nothing has said nothing.
#[test]
fn zeros_are_no_names_addresses_profiles_or_places() {
    let library = cut("h100x1");
    let gpu = library.uuids().remove(0);
    let expected = after(&library.open(), None);
    let good = &expected.gpus[&gpu];
    let caps = &good.mig.as_ref().unwrap().capabilities;
    let functions = [
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetGpuInstanceProfileInfoV",
        "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        "nvmlGpuInstanceGetInfo",
    ];
    let tries = functions.iter().flat_map(|f| (0..3).map(move |at| (f, at)));
    for (function, at) in tries {
        let driver = library.open();
        let trial = &driver.library.trial;
        trial.fail_once_in(function, at, WRITES_NOTHING);
        let Ok(seen) = read_inventory(&driver, &|_| HostTopology::default()) else {
            continue;
        };
        assert_eq!(seen.system, expected.system, "{function} {at}");
        let Some(found) = seen.gpus.get(&gpu) else {
            continue;
        };
        let facts = |gpu: &divvy_model::Gpu| divvy_model::GpuFacts {
            memory_bytes: None,
            memory_reserved_bytes: None,
            multiprocessors: None,
            ..gpu.facts.clone()
        };
        assert_eq!(facts(found), facts(good), "{function} {at}");
        let memory = found.facts.memory_bytes;
        assert!(memory.is_none() || memory == good.facts.memory_bytes);
        let count = found.facts.multiprocessors;
        assert!(count.is_none() || count == good.facts.multiprocessors);
        let Some(mig) = &found.mig else { continue };
        for (profile, place) in mig.capabilities.placements() {
            let same = caps.profile(profile.id).unwrap();
            assert_eq!(profile.slices, same.slices, "{function} {at}");
            assert!(same.placements.contains(&place), "{function} {at}: {place}");
        }
        let living = good.mig.as_ref().unwrap().instances.as_ref().unwrap();
        let listed = mig.instances.iter().flatten();
        assert!(listed.into_iter().all(|one| living.contains(one)), "{at}");
    }
}

/// A board without MIG says so; one that is cut must not be taken for a whole GPU.
#[test]
fn a_gpu_that_has_profiles_has_a_mig_mode_whatever_is_said_of_it() {
    let library = cut("h100x1");
    let gpu = library.uuids().remove(0);
    let expected = after(&library.open(), None);
    for code in [
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::FUNCTION_NOT_FOUND,
    ] {
        let driver = library.open();
        let trial = &driver.library.trial;
        trial.fail_once_in("nvmlDeviceGetMigMode", 0, code);
        let seen = after(&driver, None);
        assert!(!seen.gpus.contains_key(&gpu), "{code}");
        assert_eq!(seen.problems[0].error.code, GpuErrorCode::UNKNOWN);
        assert_eq!(after(&driver, Some(&seen)), expected, "{code}");
    }
}

#[test]
fn partitions_are_never_named_after_a_size_that_is_not_known() {
    for board in ["h100x1", "a100-80x1", "a30x1", "b200x1", "h200x1"] {
        let all = ["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo"];
        let odd = TestLibrary::answering(board, &all, GpuErrorCode::UNKNOWN);
        let library = TestLibrary::new(board);
        let gpu = library.uuids().remove(0);
        let expected = names(&after(&library.open(), None), &gpu);
        let seen = after(&odd.open(), None);
        assert_eq!(names(&seen, &gpu), ["whole only"], "{board}");
        let seen = after(&library.open(), Some(&seen));
        assert_eq!(names(&seen, &gpu), expected, "{board}");
        let seen = after(&odd.open(), Some(&seen));
        assert_eq!(names(&seen, &gpu), expected, "{board}: known from before");
    }
}

#[test]
fn instances_that_were_never_listed_are_unknown_and_not_none() {
    let library = cut("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let living = |seen: &Inventory| {
        let mig = seen.gpus[&gpu].mig.as_ref().unwrap();
        mig.instances.as_ref().map(Vec::len)
    };
    let fault = Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::GpuInstances);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    let seen = after(&driver, None);
    assert_eq!(living(&seen), None);
    // None lived while MIG mode was off: that says nothing of now.
    let mut off = after(&TestLibrary::new("h100x1").open(), None);
    assert_eq!(living(&off), Some(0));
    off = after(&driver, Some(&off));
    assert_eq!(living(&off), None);
    library.state.edit(|e| e.clear_faults(None)).unwrap();
    let seen = after(&driver, Some(&seen));
    assert_eq!(living(&seen), Some(2));
}

/// A board without ECC and without rows to remap (GeForce): those two questions have no answer
/// whatever becomes of it, and the third fails.
#[test]
fn a_gpu_that_fails_the_only_question_that_it_has_does_not_answer() {
    let none = GpuVitals {
        recovery: Some(RecoveryAction::Nothing),
        remap: None,
        uncorrected_ecc: None,
        fabric: None,
    };
    let vitals = |library: &TestLibrary| {
        let gpu = library.uuids().remove(0);
        let edit = |e: &mut divvy_gpu_sim::Engine| e.gpu(&gpu).unwrap().vitals = none;
        library.state.edit(edit).unwrap();
        library.open().vitals(&gpu)
    };
    let asked = ["nvmlDeviceGetFieldValues"];
    for code in [
        GpuErrorCode::UNKNOWN,
        GpuErrorCode::TIMEOUT,
        GpuErrorCode::RESET_REQUIRED,
    ] {
        let library = TestLibrary::answering("h100x1", &asked, code);
        assert_eq!(vitals(&library).unwrap_err().code, code);
    }
    // A driver that has no answer to any of the three is no sick GPU.
    let library = TestLibrary::answering("h100x1", &asked, GpuErrorCode::NOT_SUPPORTED);
    assert_eq!(vitals(&library), Ok(GpuVitals::default()));
}

/// Entries of another length would be read as other processes.
#[test]
fn processes_are_not_guessed_while_the_version_of_the_driver_is_unknown() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver: NvmlDriver = library.open();
    let version = "nvmlSystemGetDriverVersion";
    let trial = &driver.library.trial;
    trial.fail_once_in(version, 0, GpuErrorCode::UNKNOWN);
    let error = driver.processes(&gpu).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::UNKNOWN);
    assert_eq!(driver.processes(&gpu), Ok(Vec::new()));
}
