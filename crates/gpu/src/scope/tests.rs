use divvy_model::{ComputeMode, Hold, MpsNamespace, MpsServer, Sharing, TimeSlice};

use super::*;
use crate::holds::{Since, Standing};
use crate::instances::Life;

fn claim(name: &str) -> ClaimUid {
    name.parse().unwrap()
}

fn place(at: &str) -> Place {
    at.parse().unwrap()
}

fn one(name: &str, target: Target, sharing: Sharing) -> Use {
    let device = "gpu-0".parse().unwrap();
    let mps = (sharing == Sharing::Mps).then_some(MpsServer::NAMESPACES);
    Use {
        namespace: mps.map(|_| MpsNamespace {
            name: MpsNamespaceName::of(&claim(name), &device),
            cores: 10,
            memory_mib: None,
        }),
        hold: Hold {
            claim: claim(name),
            gpu: "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap(),
            device,
            target,
            sharing,
            theirs: false,
            time_slice: None,
            mps,
        },
        given: None,
        since: Since::ThisBoot,
        standing: Standing::Prepared,
    }
}

/// The calls that are about the claim `a`.
fn calls(own: &Use) -> [Whose; 3] {
    [
        Whose::Gets(claim("a"), vec![own.clone()]),
        Whose::LetsGo(claim("a"), vec![own.clone()]),
        Whose::Round,
    ]
}

fn scope(whose: Whose, others: &[Use], unknown: bool) -> Scope {
    let holds = Holds {
        others: others.to_vec(),
        unknown,
        whose,
    };
    Scope::new(holds, Granted::default(), &BTreeMap::new())
}

/// Returns in which of the calls a change is permitted.
fn permitted(own: &Use, others: &[Use], unknown: bool, change: &Change) -> [bool; 3] {
    calls(own).map(|whose| scope(whose, others, unknown).permits(change))
}

#[test]
fn a_partition_is_removed_by_its_own_claim_unless_others_hold_it() {
    let at = place("9@4+4");
    let share = |name| one(name, Target::Partition(at), Sharing::TimeSliced);
    let alone = one("a", Target::Partition(at), Sharing::Exclusive);
    let remove = Change::Remove(at);
    assert_eq!(
        permitted(&share("a"), &[], false, &remove),
        [true, true, false]
    );
    assert_eq!(
        permitted(&share("a"), &[share("b")], false, &remove),
        [false; 3]
    );
    // A record that cannot be read may share it, and no other claim shares what one has alone.
    assert_eq!(permitted(&share("a"), &[], true, &remove), [false; 3]);
    assert_eq!(permitted(&alone, &[], true, &remove), [true, true, false]);
    let beside = one("a", Target::Partition(place("9@0+4")), Sharing::Exclusive);
    assert_eq!(permitted(&beside, &[], false, &remove), [false; 3]);
    let create = Change::Create(at);
    assert_eq!(permitted(&alone, &[], false, &create), [true, false, false]);
    assert_eq!(
        permitted(&beside, &[share("b")], false, &create),
        [false; 3]
    );
}

/// An instance that no record holds stays for its own claim: no other call takes it away.
#[test]
fn an_instance_without_a_record_is_removed_by_its_own_claim_alone() {
    let (at, elsewhere) = (place("9@4+4"), place("9@0+4"));
    let instance = |made_for: &str| Instance {
        made_for: claim(made_for),
        life: Life::Begun,
        doubt: None,
    };
    let own = one("a", Target::Partition(elsewhere), Sharing::Exclusive);
    for (made_for, unknown, expected) in [
        ("a", false, [true, true, false]),
        ("b", false, [false; 3]),
        // A claim whose record cannot be read may share the one of the earlier allocation.
        ("a", true, [false; 3]),
    ] {
        let found = calls(&own).map(|whose| {
            let holds = Holds {
                others: Vec::new(),
                unknown,
                whose,
            };
            let notes = [(at, instance(made_for))].into();
            let scope = Scope::new(holds, Granted::default(), &notes);
            let ends = scope.permits(&Change::StopMps(Target::Partition(at)));
            let goes = scope.permits(&Change::Remove(at));
            // No partition goes under its server.
            assert!(ends || !goes);
            goes
        });
        assert_eq!(found, expected, "{made_for} {unknown}");
    }
}

/// A server of another partition is for a round: were it stopped here and did not end, the claim of
/// this partition would wait for it.
#[test]
fn a_server_is_ended_by_calls_about_its_target_unless_others_use_it() {
    let (own, other) = (place("19@0+1"), place("19@1+1"));
    let share = |name, at| one(name, Target::Partition(at), Sharing::Mps);
    let stop = |at| Change::StopMps(Target::Partition(at));
    let a = share("a", own);
    assert_eq!(permitted(&a, &[], false, &stop(own)), [true; 3]);
    assert_eq!(
        permitted(&a, &[], false, &stop(other)),
        [false, false, true]
    );
    assert_eq!(
        permitted(&a, &[share("b", own)], false, &stop(own)),
        [false; 3]
    );
    assert_eq!(permitted(&a, &[], true, &stop(own)), [false; 3]);
    let whole = one("a", Target::Gpu, Sharing::Exclusive);
    assert_eq!(permitted(&whole, &[], false, &stop(other)), [true; 3]);
    // A call starts one for its own claim; a round repairs.
    let start = |at| Change::StartMps(Target::Partition(at), MpsServer::NAMESPACES);
    assert_eq!(permitted(&a, &[], false, &start(own)), [true, false, true]);
    assert_eq!(
        permitted(&a, &[], false, &start(other)),
        [false, false, true]
    );
}

#[test]
fn a_namespace_is_ended_by_its_own_claim_or_in_a_round() {
    let share = |name| one(name, Target::Gpu, Sharing::Mps);
    let (a, b) = (share("a"), share("b"));
    let end = |one: &Use| Change::RemoveNamespace(one.namespace.unwrap().name);
    let put = |one: &Use| Change::PutNamespace(one.namespace.unwrap());
    assert_eq!(permitted(&a, &[], false, &end(&a)), [false, true, true]);
    assert_eq!(permitted(&a, &[], false, &end(&b)), [false, false, true]);
    assert_eq!(
        permitted(&a, std::slice::from_ref(&b), false, &end(&b)),
        [false; 3]
    );
    // A claim that is being undone needs it no more, and its own call may have failed.
    let undone = Use {
        standing: Standing::Undone,
        ..b.clone()
    };
    assert_eq!(
        permitted(&a, &[undone], false, &end(&b)),
        [false, false, true]
    );
    // A record that cannot be read may be of its claim.
    assert_eq!(permitted(&a, &[], true, &end(&b)), [false; 3]);
    assert_eq!(permitted(&a, &[], true, &end(&a)), [false, true, false]);
    assert_eq!(permitted(&a, &[], false, &put(&a)), [true, false, true]);
    assert_eq!(permitted(&a, &[], false, &put(&b)), [false, false, true]);
}

/// A setting that could not be given back is not the next claim's.
#[test]
fn settings_are_set_for_the_own_claim_and_given_back_when_unused() {
    let whole = one("a", Target::Gpu, Sharing::Exclusive);
    let share = |name| one(name, Target::Gpu, Sharing::TimeSliced);
    let (default, exclusive) = (ComputeMode::Default, ComputeMode::ExclusiveProcess);
    let compute = |to| Change::SetComputeMode(to);
    // It is given back, also before a claim gets the GPU.
    assert_eq!(
        permitted(&whole, &[], false, &compute(exclusive)),
        [true; 3]
    );
    assert_eq!(
        permitted(&whole, &[], true, &compute(exclusive)),
        [false; 3]
    );
    let gets = [true, false, false];
    assert_eq!(
        permitted(&share("a"), &[share("b")], false, &compute(default)),
        gets
    );
    assert_eq!(
        permitted(&share("a"), &[share("b")], false, &compute(exclusive)),
        [false; 3]
    );
    let slice = Change::SetTimeSlice(TimeSlice::Long);
    assert_eq!(permitted(&whole, &[], false, &slice), [true; 3]);
    assert_eq!(permitted(&whole, &[], true, &slice), [false; 3]);
    // For other users of the GPU a round gives it back.
    let others = [false, true, true];
    assert_eq!(permitted(&share("a"), &[share("b")], false, &slice), others);
    let mut sliced = one("b", Target::Gpu, Sharing::Exclusive);
    sliced.hold.time_slice = Some(TimeSlice::Short);
    assert_eq!(permitted(&whole, &[sliced], false, &slice), [false; 3]);
}

/// Turning the mode off may take long, which an unprepare does not wait for.
#[test]
fn mig_mode_is_set_for_the_own_claim_and_goes_back_in_a_round_alone() {
    let part = |name| one(name, Target::Partition(place("9@0+4")), Sharing::Exclusive);
    let whole = one("w", Target::Gpu, Sharing::Exclusive);
    let set = |on| Change::SetMigMode(on);
    assert_eq!(
        permitted(&part("a"), &[], false, &set(true)),
        [true, false, true]
    );
    assert_eq!(
        permitted(&part("a"), &[], false, &set(false)),
        [false, false, true]
    );
    assert_eq!(permitted(&part("a"), &[], true, &set(false)), [false; 3]);
    assert_eq!(
        permitted(&part("a"), &[part("b")], false, &set(false)),
        [false; 3]
    );
    assert_eq!(
        permitted(&part("a"), &[whole], false, &set(true)),
        [false; 3]
    );
    let offers = Granted {
        offers_partitions: true,
        ..Granted::default()
    };
    let round = Holds {
        others: Vec::new(),
        unknown: false,
        whose: Whose::Round,
    };
    let scope = Scope::new(round, offers, &BTreeMap::new());
    assert!(!scope.permits(&set(false)));
}
