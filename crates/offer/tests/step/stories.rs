//! A story for each thing that went wrong once.

use std::time::Duration;

use divvy_model::{CapsPromise, MemoryCaps};
use divvy_offer::{Event, Fact, Finding, KubeVersion, ModeConflict, OneMode, Published, Severity};

use crate::cluster::{Cluster, LEAVE, blocked, claimant, is_by_percent, settings};

const EVERYTHING: &str = r#"{"modes":["Whole","Mig","TimeSlicing"]}"#;
const WHOLE: &str = r#"{"modes":["Whole"]}"#;
const SHARES: &str = r#"{"modes":["TimeSlicing"]}"#;
const PERCENT: &str = r#"{"modes":["TimeSlicing"],"shares":{"unit":"Percent"}}"#;

const PROFILES: &str =
    r#""1g.10gb","1g.10gb+me","1g.20gb","2g.20gb","3g.40gb","4g.40gb","7g.80gb""#;

/// A withdrawn device stays for as long as a write may take and what replaces it is there at once.
#[test]
fn a_withdrawn_device_stays_as_long_as_a_write_may_take() {
    let mut cluster = Cluster::new("h100x1", WHOLE);
    assert_eq!(cluster.open(), ["gpu-0"]);
    // The scheduler has chosen the whole GPU; its write is held up for 25 s.
    let whole = "gpu-0".parse().unwrap();
    cluster.choose(&whole, 25);
    cluster.rules(SHARES);
    assert_eq!(
        (cluster.names(), cluster.open()),
        (vec!["gpu-0", "gpu-0-ts"], vec!["gpu-0-ts"])
    );
    let share = cluster
        .slices
        .device(&"gpu-0-ts".parse().unwrap())
        .unwrap()
        .clone();
    assert!(
        !cluster.can_be_given(&share),
        "the counters of the GPU are taken"
    );
    cluster.pass(LEAVE.saturating_sub(Duration::from_secs(1)));
    assert_eq!(cluster.ask, None, "the answer would be too early");
    cluster.pass(Duration::from_secs(2));
    cluster.answer(true);
    cluster.settle();
    assert_eq!(
        (cluster.names(), cluster.open()),
        (vec!["gpu-0", "gpu-0-ts"], vec!["gpu-0-ts"])
    );
    cluster.claims.clear();
    cluster.settle();
    assert_eq!(cluster.names(), ["gpu-0-ts"]);
}

/// Pods of NVIDIA's driver may still run where divvy takes its place: their GPUs are never offered
/// without a taint, not even for a moment.
#[test]
fn where_neighbours_come_first_nothing_is_offered_before_they_are_known() {
    let mut cluster = Cluster::new("h100x2", WHOLE);
    cluster.begin_with(divvy_offer::Settings {
        neighbours_first: true,
        ..settings()
    });
    cluster.answer(true);
    assert_eq!(cluster.out.pool, None);
    let used = divvy_offer::Use::Processes { pids: vec![7] };
    cluster.learn(Fact::Neighbours([(cluster.gpu(0), [used].into())].into()));
    cluster.answer(true);
    assert_eq!(cluster.names(), ["gpu-1", "gpu-0"]);
    assert_eq!(cluster.open(), ["gpu-1"]);
}

/// Returns whether the shares of GPU 0 are published by percent, and whether they are open.
fn shares_of(cluster: &Cluster) -> Option<(bool, bool)> {
    let share = cluster.slices.device(&"gpu-0-ts".parse().unwrap())?;
    Some((is_by_percent(share), !blocked(share)))
}

#[test]
fn shares_change_their_unit_when_the_last_claim_in_the_old_one_has_gone() {
    let mut cluster = Cluster::new("h100x1", SHARES);
    assert_eq!(shares_of(&cluster), Some((false, true)));
    // The scheduler has chosen a share by memory; its write is held up for 25 s.
    cluster.choose(&"gpu-0-ts".parse().unwrap(), 25);
    cluster.rules(PERCENT);
    assert_eq!(shares_of(&cluster), Some((false, false)), "memory, tainted");
    cluster.settle();
    assert_eq!(shares_of(&cluster), Some((false, false)), "held");
    // Another process knows from the grant of the earlier one.
    cluster.begin();
    cluster.answer(true);
    assert_eq!(shares_of(&cluster), Some((false, false)), "held");
    cluster.settle();
    assert_eq!(shares_of(&cluster), Some((false, false)), "held");
    cluster.claims.clear();
    cluster.settle();
    assert_eq!(shares_of(&cluster), Some((true, true)));
    // And back, without claims.
    cluster.rules(SHARES);
    assert_eq!(shares_of(&cluster), Some((true, false)));
    cluster.settle();
    assert_eq!(shares_of(&cluster), Some((false, true)));
}

/// The rules change while no process runs.
#[test]
fn a_unit_of_an_earlier_process_stays_while_claims_have_it() {
    let mut cluster = Cluster::new("h100x1", EVERYTHING);
    cluster.choose(&"gpu-0-ts".parse().unwrap(), 0);
    cluster.set_rules(r#"{"modes":["Whole","Mig","TimeSlicing"],"shares":{"unit":"Percent"}}"#);
    cluster.begin();
    cluster.answer(true);
    assert_eq!(shares_of(&cluster), Some((false, false)));
    cluster.settle();
    assert_eq!(shares_of(&cluster), Some((false, false)), "held");
    cluster.claims.clear();
    cluster.settle();
    assert_eq!(shares_of(&cluster), Some((true, true)));
}

/// A conflict with what was withdrawn fences one GPU and leaves the others their modes.
#[test]
fn a_conflict_with_a_withdrawn_mode_fences_one_gpu_only() {
    let mut cluster = Cluster::new("h100x2", EVERYTHING);
    cluster.rules(&format!(
        r#"{{"gpus":{{"ordinals":[0]}},"modes":["TimeSlicing"]}},{EVERYTHING}"#
    ));
    cluster.settle();
    assert!(
        cluster
            .names()
            .iter()
            .filter(|name| name.starts_with("gpu-0"))
            .eq(&["gpu-0-ts"])
    );
    let (share, whole) = ("gpu-0-ts".parse().unwrap(), "gpu-0".parse().unwrap());
    cluster.choose(&share, 0);
    cluster.claims[0].prepared = true;
    cluster.records();
    // A write that was on its way for minutes.
    cluster.choose(&whole, 0);
    let [holder, claim] = [0, 1].map(|n| claimant(&cluster.claims[n]));
    let gpu = cluster.gpu(0);
    cluster.learn(Fact::Conflict(ModeConflict {
        claim,
        device: whole,
        holder,
        held: share,
        gpu,
    }));
    let of_other = cluster.open().len();
    assert!(
        of_other == 20 && cluster.open().iter().all(|name| name.starts_with("gpu-1")),
        "{:?}",
        cluster.open()
    );
    assert_eq!(cluster.out.one_mode, None);
    let text = "claims hold gpu-0, gpu-0-ts, which exclude each other on one GPU (default/gpu-0 has gpu-0, refused at prepare, default/gpu-0-ts has gpu-0-ts): no part of gpu-0 is allocated until one of the claims is released";
    let twice = cluster
        .out
        .findings
        .iter()
        .find(|finding| finding.to_string() == text)
        .unwrap_or_else(|| panic!("{:#?}", cluster.out.findings));
    assert_eq!(twice.shown().event, Some(Event::Node("given-twice")));

    // The claim goes: the fence ends with it.
    cluster.answer(true);
    assert!(
        cluster
            .out
            .findings
            .iter()
            .any(|note| matches!(note, Finding::GivenTwice { .. }))
    );
    cluster.claims.remove(1);
    cluster.settle();
    assert_eq!(cluster.open().len(), 1 + 20);
    assert!(
        !cluster
            .out
            .findings
            .iter()
            .any(|note| matches!(note, Finding::GivenTwice { .. }))
    );
}

/// A scheduler that does not count costs the node its modes until the conflict is over.
#[test]
fn a_scheduler_that_does_not_count_costs_the_node_its_modes() {
    let mut cluster = Cluster::new("h100x2", EVERYTHING);
    let (share, whole) = ("gpu-0-ts".parse().unwrap(), "gpu-0".parse().unwrap());
    cluster.choose(&share, 0);
    cluster.choose(&whole, 0);
    let [holder, claim] = [0, 1].map(|n| claimant(&cluster.claims[n]));
    let gpu = cluster.gpu(0);
    cluster.learn(Fact::Conflict(ModeConflict {
        claim,
        device: whole,
        holder,
        held: share,
        gpu,
    }));
    assert_eq!(cluster.out.one_mode, Some(OneMode::Conflict));
    // The record of the share is read a moment later.
    cluster.claims[0].prepared = true;
    cluster.records();
    assert_eq!(cluster.out.one_mode, Some(OneMode::Conflict));
    cluster.settle();
    assert_eq!(cluster.open(), ["gpu-1"]);
    // The share ends: the other claim is served, and nothing is in its way.
    cluster.claims.remove(0);
    cluster.records();
    cluster.settle();
    assert_eq!(cluster.out.one_mode, None);
    assert_eq!(cluster.open().len(), 2 * 20);
}

/// A GPU that falls ill is tainted in the same step also while the API does not answer.
#[test]
fn a_gpu_that_falls_ill_is_tainted_at_once_although_the_api_is_away() {
    let mut cluster = Cluster::new("h100x2", EVERYTHING);
    cluster.rules(WHOLE);
    cluster.pass(LEAVE);
    assert!(cluster.ask.is_some(), "asked, and not answered");
    cluster.sick(1, true);
    assert_eq!(cluster.open(), ["gpu-0"]);
}

#[test]
fn an_older_scheduler_gets_the_next_mode_only_when_the_last_is_gone() {
    let mut cluster = Cluster::new("h100x1", WHOLE);
    cluster.server(KubeVersion::new(1, 36, 1));
    cluster.rules(SHARES);
    assert_eq!(cluster.open(), Vec::<&str>::new());
    cluster.settle();
    assert_eq!(cluster.open(), ["gpu-0-ts"]);
}

#[test]
fn a_grant_is_taken_back_only_when_no_claim_can_need_it() {
    let mut cluster = Cluster::new("h100x1", r#"{"modes":["Whole","Mig"]}"#);
    let gpu = cluster.gpu(0);
    assert_eq!(cluster.out.grants[&gpu].may_change_mode, Some(true));
    cluster.choose(&"gpu-0-mig-1g10gb-19-0".parse().unwrap(), 10);
    // No rule names the GPU: it is offered as it is.
    cluster.rules(r#"{"gpus":{"ordinals":[7]}}"#);
    assert_eq!(
        cluster.out.grants[&gpu].may_change_mode, None,
        "as granted before"
    );
    cluster.settle();
    assert_eq!(
        cluster.out.grants[&gpu].may_change_mode, None,
        "a claim has a partition"
    );
    cluster.claims.clear();
    cluster.settle();
    assert_eq!(cluster.out.grants[&gpu].may_change_mode, Some(false));
}

#[test]
fn the_number_of_a_gpu_that_is_gone_is_free_when_no_claim_refers_to_it() {
    let mut cluster = Cluster::new("h100x2", WHOLE);
    let gpu = cluster.gpu(1);
    cluster.choose(&"gpu-1".parse().unwrap(), 0);
    cluster.inventory.gpus.remove(&gpu);
    cluster.health.removed.insert(gpu.clone());
    cluster.learn(Fact::Health(std::sync::Arc::new(cluster.health.clone())));
    cluster.read();
    cluster.settle();
    assert_eq!(
        (cluster.names(), cluster.out.forget.len()),
        (vec!["gpu-1", "gpu-0"], 0)
    );
    cluster.claims.clear();
    cluster.settle();
    assert_eq!(cluster.names(), ["gpu-0"]);
    assert_eq!(cluster.out.forget, [gpu].into());
}

#[test]
fn a_number_is_kept_for_ten_rounds_of_questions_after_its_gpu_has_gone() {
    let mut cluster = Cluster::new("h100x2", WHOLE);
    let gpu = cluster.gpu(1);
    cluster.inventory.gpus.remove(&gpu);
    cluster.health.removed.insert(gpu.clone());
    cluster.learn(Fact::Health(std::sync::Arc::new(cluster.health.clone())));
    cluster.read();
    let mut kept = 0;
    while cluster.out.forget.is_empty() && kept < 1000 {
        cluster.pass(Duration::from_secs(10));
        cluster.answer(true);
        kept += 10;
    }
    assert_eq!(kept, 300, "seconds");
    assert_eq!(cluster.out.forget, [gpu].into());
}

/// A new process asks who holds what before it publishes less than an earlier one may have.
#[test]
fn a_new_process_asks_for_holders_before_it_publishes_less() {
    let all_profiles =
        |modes: &str| format!(r#"{{"modes":[{modes}],"mig":{{"profiles":[{PROFILES}]}}}}"#);
    let in_shares = all_profiles(r#""Whole","Mig","TimeSlicing""#)
        .replace(r#""mig":{"#, r#""mig":{"sharing":["TimeSlicing"],"#);
    for (rules, asks) in [
        (in_shares, false),
        // An earlier policy may have offered shares of partitions.
        (all_profiles(r#""Whole","Mig","TimeSlicing""#), true),
        (all_profiles(r#""Mig","TimeSlicing""#), true),
        (all_profiles(r#""Whole","Mig""#), true),
        (r#"{"modes":["Whole","TimeSlicing"]}"#.to_owned(), true),
        (
            r#"{"modes":["Whole","Mig","TimeSlicing"],"mig":{"profiles":["3g.40gb"]}}"#.to_owned(),
            true,
        ),
    ] {
        let mut cluster = Cluster::new("h100x1", &rules);
        cluster.begin();
        assert_eq!(
            (cluster.ask.is_some(), cluster.out.pool.is_none()),
            (asks, asks),
            "{rules}"
        );
        cluster.answer(false);
        assert_eq!(cluster.out.pool.is_none(), asks, "{rules}");
        cluster.pass(Duration::from_secs(5));
        cluster.answer(true);
        assert!(cluster.out.pool.is_some(), "{rules}");
    }
}

#[test]
fn a_held_device_of_an_earlier_process_is_published_again() {
    let mut cluster = Cluster::new("h100x1", SHARES);
    let share = "gpu-0-ts".parse().unwrap();
    cluster.choose(&share, 0);
    // Its pod waits for an image. A process with other rules meets an API that does not answer.
    cluster.set_rules(WHOLE);
    cluster.begin();
    while cluster.out.pool.is_none() {
        cluster.answer(false);
        cluster.pass(Duration::from_secs(5));
    }
    cluster.settle();
    assert_eq!(cluster.names(), ["gpu-0", "gpu-0-ts"]);
    assert!(!cluster.can_be_given(cluster.slices.device(&"gpu-0".parse().unwrap()).unwrap()));
}

#[test]
fn fenced_and_foreign_partitions_block_what_they_overlap_only() {
    let mut cluster = Cluster::new("h100x2", EVERYTHING);
    let (one, other) = (cluster.gpu(0), cluster.gpu(1));
    cluster.records_with(|records| records.fenced = [one].into());
    assert_eq!(cluster.open().len(), 20);
    assert!(
        cluster.open().iter().all(|name| name.starts_with("gpu-1")),
        "{:?}",
        cluster.open()
    );
    let at = divvy_model::mig::Placement { start: 0, size: 1 };
    cluster.records_with(|records| records.foreign = vec![(other, at)]);
    let open = cluster.open();
    let is_open = |name: &str| open.contains(&name);
    assert!(
        is_open("gpu-0") && is_open("gpu-1-mig-1g10gb-19-1"),
        "{open:?}"
    );
    assert!(
        !is_open("gpu-1") && !is_open("gpu-1-ts") && !is_open("gpu-1-mig-1g10gb-19-0"),
        "{open:?}"
    );
    cluster.records();
    assert_eq!(cluster.open().len(), 2 * 20);
}

#[test]
fn held_shares_without_memory_left_are_withdrawn_and_not_lost() {
    let mut cluster = Cluster::new("h100x1", SHARES);
    let share = "gpu-0-ts".parse().unwrap();
    cluster.choose(&share, 0);
    cluster.rules(r#"{"modes":["Whole","TimeSlicing"],"shares":{"reservedMemory":"80Gi"}}"#);
    for _ in 0..2 {
        let device = cluster.slices.device(&share).unwrap();
        let keys: Vec<&str> = device
            .taints
            .iter()
            .map(|taint| taint.key.as_str())
            .collect();
        assert_eq!(keys, ["gpu.divvy.dev/withdrawn"]);
        assert!(!cluster.can_be_given(cluster.slices.device(&"gpu-0".parse().unwrap()).unwrap()));
        cluster.settle();
    }
    let why = "its rule reserves all of the GPU's memory".to_owned();
    assert!(
        cluster
            .out
            .findings
            .contains(&Finding::HeldAndWithdrawn { device: share, why })
    );
    assert!(
        !cluster
            .out
            .findings
            .iter()
            .any(|note| matches!(note, Finding::HeldAndGone { .. }))
    );
    cluster.claims.clear();
    cluster.settle();
    assert_eq!(cluster.open(), ["gpu-0"]);
}

/// A GPU that would need a reset for every mode of its rule is said to be offered as nothing.
#[test]
fn a_gpu_that_needs_a_reset_for_every_mode_is_offered_as_nothing() {
    let mut cluster = Cluster::new("a100-40x1", r#"{"modes":["Mig"]}"#);
    let gpu = cluster.gpu(0);
    assert_eq!(cluster.names(), Vec::<&str>::new());
    let of_pool = |cluster: &Cluster| -> Vec<Finding> {
        let all = cluster.out.findings.iter().cloned();
        all.filter(|one| one.shown().severity != Severity::Info)
            .collect()
    };
    assert_eq!(
        of_pool(&cluster),
        [Finding::NothingOffered { gpu: gpu.clone() }]
    );
    cluster.rules(EVERYTHING);
    assert_eq!(cluster.open(), ["gpu-0", "gpu-0-ts"]);
    assert_eq!(of_pool(&cluster), [Finding::NeedsReset { gpu }]);
}

/// A promise of caps lasts until slices without it are accepted, also over a restart.
#[test]
fn a_promise_of_caps_ends_with_the_slices_that_make_it() {
    let mut cluster = Cluster::new("h100x1", SHARES);
    let promise = |cluster: &Cluster| cluster.out.grants[&cluster.gpu(0)].caps;
    let accepted = |cluster: &mut Cluster, at: i64| {
        let capped = cluster.slices.capped();
        cluster.learn(Fact::Published(Published { capped, at }));
    };
    let ended = |at: i64| Some(CapsPromise::Ended { at });
    assert_eq!(promise(&cluster), None, "nothing is published yet");
    accepted(&mut cluster, 10);
    assert_eq!(promise(&cluster), ended(10));
    // An end that is noted does not move with every write.
    accepted(&mut cluster, 20);
    assert_eq!(promise(&cluster), ended(10));

    cluster.inventory.system.memory_caps = MemoryCaps::Available;
    cluster.read();
    assert_eq!(promise(&cluster), Some(CapsPromise::Given));
    // The driver is exchanged before the first slices with the promise are accepted, which may
    // have been written in part.
    cluster.inventory.system.memory_caps = MemoryCaps::OldDriver;
    cluster.read();
    assert_eq!(promise(&cluster), None, "as before: given");
    accepted(&mut cluster, 30);
    assert_eq!(promise(&cluster), ended(30));

    cluster.inventory.system.memory_caps = MemoryCaps::Available;
    cluster.read();
    accepted(&mut cluster, 40);
    assert_eq!(promise(&cluster), Some(CapsPromise::Given));
    let still = cluster.slices.capped();
    assert_eq!(still, [0].into());
    // It falls while the plugin is down, and the API server refuses the next slices for a while.
    cluster.inventory.system.memory_caps = MemoryCaps::SwitchedOff;
    cluster.begin();
    cluster.answer(true);
    assert_eq!(promise(&cluster), None);
    let capped = still;
    cluster.learn(Fact::Published(Published { capped, at: 50 }));
    assert_eq!(promise(&cluster), None);
    accepted(&mut cluster, 60);
    assert_eq!(promise(&cluster), ended(60));
}
