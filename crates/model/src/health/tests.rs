use std::collections::BTreeSet;
use std::time::Duration;

use super::*;

fn gpu() -> GpuUuid {
    "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap()
}

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn event(kind: GpuEventKind, gpu_instance: Option<u32>) -> GpuEvent {
    let gpu_instance = gpu_instance.map(GpuInstanceId);
    GpuEvent {
        gpu: Some(gpu()),
        kind,
        gpu_instance,
        compute_instance: None,
    }
}

fn vitals(recovery: Option<u32>) -> GpuVitals {
    GpuVitals {
        recovery: recovery.map(RecoveryAction::from_nvml),
        ..GpuVitals::default()
    }
}

fn sick(book: &HealthBook) -> Vec<Ailment> {
    book.gpus()
        .get(&gpu())
        .map(|g| g.ailments.keys().copied().collect())
        .unwrap_or_default()
}

fn sick_partitions(book: &HealthBook) -> Vec<(u32, Ailment)> {
    let gpu = &book.gpus()[&gpu()];
    gpu.partitions
        .iter()
        .flat_map(|(id, all)| all.keys().map(|a| (id.0, *a)))
        .collect()
}

/// Polls every 30 s from `from` on with these vitals until the GPU is well; when that is.
fn well_at(book: &mut HealthBook, from: u64, answer: GpuVitals) -> Option<u64> {
    let rules = HealthRules::default();
    (0..20).map(|n| from + n * 30).find(|now| {
        book.poll(&rules, at(*now), &gpu(), Ok(answer));
        book.gpus()[&gpu()].is_well()
    })
}

#[test]
fn each_xid_has_the_effect_of_its_class() {
    // Xid, class, the effect on a GPU whose driver reports recovery actions, and on one whose
    // driver does not.
    let table = [
        (13, XidClass::Application, false, false),
        (31, XidClass::Application, false, false),
        (43, XidClass::Application, false, false),
        (45, XidClass::Application, false, false),
        (68, XidClass::Application, false, false),
        (94, XidClass::Application, false, false),
        (63, XidClass::Information, false, false),
        (48, XidClass::Reset, true, true),
        (64, XidClass::Reset, true, true),
        (95, XidClass::Reset, true, true),
        (109, XidClass::Reset, true, true),
        (119, XidClass::Reset, true, true),
        (79, XidClass::Node, true, true),
        (151, XidClass::Node, true, true),
        (74, XidClass::FollowUp, false, true),
        (154, XidClass::FollowUp, false, true),
        (167, XidClass::Unknown, true, true),
        (999, XidClass::Unknown, true, true),
    ];
    let rules = HealthRules::default();
    for (xid, class, with, without) in table {
        assert_eq!(XidClass::of(xid), class, "{xid}");
        for (recovery, expected) in [(Some(0), with), (None, without)] {
            let mut book = HealthBook::default();
            book.poll(&rules, at(0), &gpu(), Ok(vitals(recovery)));
            book.event(&rules, at(1), &event(GpuEventKind::Xid(xid), None));
            let expected: &[Ailment] = if expected { &[Ailment::Xid(xid)] } else { &[] };
            assert_eq!(sick(&book), expected, "Xid {xid}, recovery {recovery:?}");
        }
    }
}

#[test]
fn ignored_xids_count_for_nothing() {
    let rules = HealthRules {
        ignored_xids: BTreeSet::from([109]),
        ..HealthRules::default()
    };
    let mut book = HealthBook::default();
    assert_eq!(
        book.event(&rules, at(0), &event(GpuEventKind::Xid(109), None)),
        []
    );
    assert_eq!(book, HealthBook::default());
}

#[test]
fn an_xid_is_over_after_good_polls_and_time_and_a_new_one_restarts() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    book.poll(&rules, at(0), &gpu(), Ok(vitals(Some(0))));
    let change = |over| HealthChange {
        gpu: gpu(),
        partition: None,
        ailment: Ailment::Xid(48),
        over,
    };
    assert_eq!(
        book.event(&rules, at(10), &event(GpuEventKind::Xid(48), None)),
        [change(false)]
    );
    assert_eq!(
        book.event(&rules, at(12), &event(GpuEventKind::Xid(48), None)),
        []
    );
    for now in [13, 14, 15, 16] {
        assert_eq!(
            book.poll(&rules, at(now), &gpu(), Ok(vitals(Some(0)))),
            [],
            "too soon"
        );
    }
    book.event(&rules, at(70), &event(GpuEventKind::Xid(48), None));
    assert_eq!(book.poll(&rules, at(129), &gpu(), Ok(vitals(Some(0)))), []);
    assert_eq!(
        book.poll(&rules, at(131), &gpu(), Ok(vitals(Some(0)))),
        [],
        "only two polls"
    );
    assert_eq!(
        book.poll(&rules, at(132), &gpu(), Ok(vitals(Some(0)))),
        [change(true)]
    );
    assert!(!book.has_patients());
}

#[test]
fn without_recovery_actions_an_xid_stays_until_the_gpu_was_away() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    book.event(&rules, at(0), &event(GpuEventKind::Xid(79), Some(3)));
    assert_eq!(
        sick(&book),
        [Ailment::Xid(79)],
        "off the bus is the whole GPU's affair"
    );
    assert_eq!(well_at(&mut book, 100, vitals(None)), None);
    for gone in [GpuErrorCode::GPU_IS_LOST, GpuErrorCode::DRIVER_NOT_LOADED] {
        book.event(&rules, at(900), &event(GpuEventKind::Xid(79), None));
        book.poll(&rules, at(1000), &gpu(), Err(gone));
        assert_eq!(well_at(&mut book, 1001, vitals(None)), Some(1061), "{gone}");
    }
    book.event(&rules, at(1100), &event(GpuEventKind::Xid(79), None));
    book.all_away();
    assert_eq!(well_at(&mut book, 1200, vitals(None)), Some(1260));
}

#[test]
fn a_recovery_action_lasts_as_long_as_the_driver_says() {
    for (raw, action) in [
        (1, RecoveryAction::Reset),
        (2, RecoveryAction::Reboot),
        (3, RecoveryAction::DrainPeers),
        (4, RecoveryAction::DrainAndReset),
        (6, RecoveryAction::Unknown(6)),
    ] {
        let mut book = HealthBook::default();
        assert_eq!(well_at(&mut book, 0, vitals(Some(raw))), None);
        assert_eq!(sick(&book), [Ailment::Recovery(action)]);
        assert_eq!(well_at(&mut book, 600, vitals(Some(0))), Some(660));
    }
}

#[test]
fn a_fabric_that_is_not_ready_makes_the_gpu_sick_until_it_is() {
    let fabric = |state, status, health| GpuVitals {
        fabric: Some(FabricState {
            state,
            status,
            health,
        }),
        ..vitals(Some(0))
    };
    let table = [
        ((1, 0, 0), Some(FabricFault::NotStarted), "not-started"),
        ((2, 0, 0), Some(FabricFault::InProgress), "in-progress"),
        // The status of a registration that is not complete means nothing.
        ((2, 15, 0), Some(FabricFault::InProgress), "in-progress"),
        ((3, 999, 0), Some(FabricFault::Failed(999)), "failed"),
        ((3, 0, 2), Some(FabricFault::Unhealthy), "unhealthy"),
        // Without a fabric; ready; before R570; limited capacity; unknown.
        ((0, 0, 0), None, ""),
        ((3, 0, 1), None, ""),
        ((3, 0, 0), None, ""),
        ((3, 0, 3), None, ""),
        ((7, 0, 0), None, ""),
    ];
    for ((state, status, health), fault, name) in table {
        let mut book = HealthBook::default();
        let answer = fabric(state, status, health);
        let well = well_at(&mut book, 0, answer);
        let expected: Vec<_> = fault.into_iter().map(Ailment::Fabric).collect();
        assert_eq!(sick(&book), expected, "{state} {status} {health}");
        assert_eq!(well.is_none(), fault.is_some());
        assert_eq!(fault.map(FabricFault::name).unwrap_or_default(), name);
        // One question without an answer does not end it; the state that is good does.
        let unanswered = well_at(&mut book, 600, vitals(Some(0)));
        assert_eq!(unanswered.is_none(), fault.is_some());
        assert!(well_at(&mut book, 1200, fabric(3, 0, 1)).is_some());
    }
    let failed = Ailment::Fabric(FabricFault::Failed(999));
    assert_eq!(
        failed.to_string(),
        "could not be registered with its NVLink fabric (UNKNOWN (999))"
    );
    assert!(failed.remedy().contains("nvidia-fabricmanager"));
}

#[test]
fn bad_memory_and_a_lost_or_silent_gpu_are_distinguished() {
    let rules = HealthRules::default();
    let remap = |pending, failed| GpuVitals {
        remap: Some(RowRemap { pending, failed }),
        ..vitals(Some(0))
    };
    let mut book = HealthBook::default();
    book.poll(&rules, at(0), &gpu(), Ok(remap(true, true)));
    assert_eq!(sick(&book), [Ailment::RemapFailed, Ailment::RemapPending]);
    assert_eq!(well_at(&mut book, 30, remap(false, false)), Some(90));

    book.poll(&rules, at(200), &gpu(), Err(GpuErrorCode::GPU_IS_LOST));
    assert_eq!(sick(&book), [Ailment::Lost]);
    assert_eq!(well_at(&mut book, 210, vitals(None)), Some(270));

    for now in [300, 330] {
        book.poll(&rules, at(now), &gpu(), Err(GpuErrorCode::TIMEOUT));
    }
    assert_eq!(
        (sick(&book), book.has_patients()),
        (vec![], true),
        "a bad minute is no illness"
    );
    book.poll(&rules, at(360), &gpu(), Err(GpuErrorCode::TIMEOUT));
    assert_eq!(sick(&book), [Ailment::Silent]);
    assert_eq!(well_at(&mut book, 390, vitals(None)), Some(450));
}

#[test]
fn ecc_errors_count_from_the_first_look_on() {
    let rules = HealthRules::default();
    let ecc = |count| GpuVitals {
        uncorrected_ecc: Some(count),
        ..vitals(Some(0))
    };
    let mut book = HealthBook::default();
    book.poll(&rules, at(0), &gpu(), Ok(ecc(7)));
    assert_eq!(sick(&book), [], "old news");
    book.poll(&rules, at(30), &gpu(), Ok(ecc(8)));
    assert_eq!(sick(&book), [Ailment::Ecc]);
    assert_eq!(well_at(&mut book, 60, ecc(8)), Some(120));
    book.event(&rules, at(200), &event(GpuEventKind::UncorrectedEcc, None));
    book.event(
        &rules,
        at(200),
        &event(GpuEventKind::RetirementFailure, None),
    );
    assert_eq!(sick(&book), [Ailment::RemapFailed, Ailment::Ecc]);
}

#[test]
fn a_fault_of_a_partition_is_not_the_gpus_and_ends_with_the_partition() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    book.poll(&rules, at(0), &gpu(), Ok(vitals(Some(0))));
    book.event(&rules, at(1), &event(GpuEventKind::Xid(95), Some(9)));
    book.event(&rules, at(1), &event(GpuEventKind::Xid(95), Some(11)));
    assert_eq!(sick(&book), []);
    assert_eq!(
        sick_partitions(&book),
        [(9, Ailment::Xid(95)), (11, Ailment::Xid(95))]
    );
    book.event(&rules, at(3), &event(GpuEventKind::Xid(95), Some(12)));
    let over = book.living(at(2), &gpu(), &BTreeSet::from([GpuInstanceId(11)]));
    let left = [(11, Ailment::Xid(95)), (12, Ailment::Xid(95))];
    assert_eq!(
        sick_partitions(&book),
        left,
        "12 may have been made after the answer"
    );
    let all_over = book.living(at(4), &gpu(), &BTreeSet::from([GpuInstanceId(11)]));
    assert_eq!(all_over.len(), 1);
    let partition = Some(GpuInstanceId(9));
    assert_eq!(
        over,
        [HealthChange {
            gpu: gpu(),
            partition,
            ailment: Ailment::Xid(95),
            over: true
        }]
    );
    assert_eq!(well_at(&mut book, 30, vitals(Some(0))), Some(90));
}

#[test]
fn a_removed_gpu_is_forgotten_and_a_lost_one_only_after_a_while() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    let gone = Err(GpuErrorCode::NOT_FOUND);
    book.poll(&rules, at(0), &gpu(), Ok(vitals(Some(1))));
    let ailment = Ailment::Recovery(RecoveryAction::Reset);
    let over = |ailment| HealthChange {
        gpu: gpu(),
        partition: None,
        ailment,
        over: true,
    };
    assert_eq!(book.poll(&rules, at(30), &gpu(), gone), [over(ailment)]);
    assert_eq!(
        (book.gpus().len(), book.removed()),
        (0, &BTreeSet::from([gpu()]))
    );
    assert_eq!(book.poll(&rules, at(60), &gpu(), gone), []);

    book.poll(&rules, at(90), &gpu(), Err(GpuErrorCode::GPU_IS_LOST));
    book.poll(&rules, at(120), &gpu(), gone);
    assert_eq!(
        sick(&book),
        [Ailment::Lost],
        "a fresh session finds no lost GPUs"
    );
    assert_eq!(
        book.poll(&rules, at(690), &gpu(), gone),
        [over(Ailment::Lost)]
    );
    book.poll(&rules, at(700), &gpu(), Ok(vitals(Some(0))));
    assert_eq!(book.removed().len(), 0);
}

/// Ailments are reported by their changes: none may be left that no GPU has.
#[test]
fn all_that_a_removed_gpu_had_is_over_in_its_partitions_too() {
    let rules = HealthRules::default();
    for gone in [GpuErrorCode::NOT_FOUND, GpuErrorCode::GPU_NOT_FOUND] {
        let mut book = HealthBook::default();
        let mut begun = Vec::new();
        for part in [None, Some(7), Some(9)] {
            for kind in [GpuEventKind::Xid(95), GpuEventKind::UncorrectedEcc] {
                begun.extend(book.event(&rules, at(0), &event(kind, part)));
            }
        }
        assert_eq!(begun.len(), 6);
        let over = book.poll(&rules, at(30), &gpu(), Err(gone));
        for change in &mut begun {
            change.over = true;
        }
        assert_eq!(over, begun, "{gone}");
        assert!(book.gpus().is_empty());
    }
}

#[test]
fn an_ailment_says_what_it_is_and_what_helps() {
    let reset = Ailment::Recovery(RecoveryAction::Reset);
    assert_eq!(reset.to_string(), "needs recovery: reset");
    // A reset needs an empty node, and other programs of NVIDIA stopped: the page has the steps.
    for ailment in [reset, Ailment::Ecc, Ailment::RemapPending, Ailment::Lost] {
        assert!(ailment.remedy().contains("docs/maintenance.md"));
    }
    assert_eq!(Ailment::Xid(79).to_string(), "reported Xid 79 (node)");
    let all = [
        Ailment::Lost,
        reset,
        Ailment::Fabric(FabricFault::InProgress),
        Ailment::RemapFailed,
        Ailment::Xid(1),
        Ailment::Ecc,
        Ailment::RemapPending,
        Ailment::Silent,
    ];
    assert_eq!(all.map(Ailment::name), Ailment::NAMES);
}

#[test]
fn faults_from_events_survive_a_restart_until_the_gpu_was_away() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    book.poll(&rules, at(0), &gpu(), Ok(vitals(None)));
    book.event(&rules, at(1), &event(GpuEventKind::Xid(79), None));
    book.event(&rules, at(2), &event(GpuEventKind::Xid(95), Some(3)));
    let mut later = HealthBook::default();
    later.remember(at(0), book.remembered());
    assert_eq!(later.remembered(), book.remembered());
    assert_eq!(
        (sick(&later), sick_partitions(&later)),
        (vec![Ailment::Xid(79)], vec![(3, Ailment::Xid(95))])
    );
    assert_eq!(
        well_at(&mut later, 0, vitals(None)),
        None,
        "the driver does not say that it is over"
    );
    later.all_away();
    let mut latest = HealthBook::default();
    latest.remember(at(0), later.remembered());
    assert!(well_at(&mut latest, 0, vitals(None)).is_some());
    assert_eq!(latest.remembered(), std::collections::BTreeMap::new());
}

#[test]
fn bad_memory_is_not_over_because_the_gpu_does_not_report_it() {
    let mut book = HealthBook::default();
    let remap = |remap| GpuVitals {
        remap,
        ..vitals(Some(0))
    };
    let bad = remap(Some(RowRemap {
        pending: true,
        failed: true,
    }));
    book.poll(&HealthRules::default(), at(0), &gpu(), Ok(bad));
    assert_eq!(
        well_at(&mut book, 30, remap(None)),
        None,
        "as while MIG instances live"
    );
    assert_eq!(sick(&book), [Ailment::RemapFailed, Ailment::RemapPending]);
    assert!(well_at(&mut book, 1000, remap(Some(RowRemap::default()))).is_some());
}

#[test]
fn an_imex_domain_that_needs_help_makes_no_gpu_sick_and_lets_it_recover() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    book.poll(&rules, at(0), &gpu(), Ok(vitals(Some(5))));
    assert_eq!(sick(&book), []);
    book.poll(&rules, at(1), &gpu(), Ok(vitals(Some(1))));
    book.event(&rules, at(2), &event(GpuEventKind::Xid(95), None));
    assert!(well_at(&mut book, 30, vitals(Some(5))).is_some());
}

#[test]
fn ecc_errors_during_a_poll_without_the_count_are_counted() {
    let rules = HealthRules::default();
    let mut book = HealthBook::default();
    for count in [Some(1), None, Some(2)] {
        book.poll(
            &rules,
            at(0),
            &gpu(),
            Ok(GpuVitals {
                uncorrected_ecc: count,
                ..vitals(None)
            }),
        );
    }
    assert_eq!(sick(&book), [Ailment::Ecc]);
}

#[test]
fn bad_memory_that_cannot_be_read_now_is_known_to_a_later_process() {
    let (rules, remap) = (HealthRules::default(), |remap| GpuVitals {
        remap,
        ..vitals(Some(0))
    });
    let mut book = HealthBook::default();
    book.poll(
        &rules,
        at(0),
        &gpu(),
        Ok(remap(Some(RowRemap {
            pending: true,
            failed: false,
        }))),
    );
    book.event(&rules, at(1), &event(GpuEventKind::RetirementFailure, None));
    let mut later = HealthBook::default();
    later.remember(at(0), book.remembered());
    assert_eq!(well_at(&mut later, 30, remap(None)), None);
    assert_eq!(sick(&later), [Ailment::RemapFailed, Ailment::RemapPending]);
    assert!(well_at(&mut later, 1000, remap(Some(RowRemap::default()))).is_some());
}

#[test]
fn a_due_recovery_is_not_over_because_the_driver_does_not_answer() {
    let mut book = HealthBook::default();
    book.poll(&HealthRules::default(), at(0), &gpu(), Ok(vitals(Some(1))));
    assert_eq!(well_at(&mut book, 30, vitals(None)), None);
    assert!(well_at(&mut book, 900, vitals(Some(0))).is_some());
}

/// Covers a GPU that has MIG instances again when it is back.
#[test]
fn rows_awaiting_a_reset_are_done_once_the_gpu_was_away() {
    let (rules, remap) = (HealthRules::default(), |remap| GpuVitals {
        remap,
        ..vitals(Some(0))
    });
    let mut book = HealthBook::default();
    book.poll(
        &rules,
        at(0),
        &gpu(),
        Ok(remap(Some(RowRemap {
            pending: true,
            failed: false,
        }))),
    );
    book.all_away();
    assert!(well_at(&mut book, 30, remap(None)).is_some());
}
