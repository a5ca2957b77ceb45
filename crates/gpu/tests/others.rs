//! Whatever was seen, whatever is noted: nothing that another claim's hold names is removed,
//! stopped or set otherwise, and the changes come in an order in which each finds what it needs.
//! `DIVVY_GPU_CASES=1000000 cargo test --release -p divvy-gpu --test others` tries a million.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "random cases; a failure is a panic"
)]

use std::collections::BTreeMap;

use divvy_gpu::{
    Change, Changed, Goal, GpuSeen, GpuState, Granted, Holds, Instance, Life, Living, Made,
    MpsNote, MpsSeen, Scope, Since, Standing, Unwell, Use, Whose, diff, needs,
};
use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfileId, GpuInstance, GpuInstanceId,
};
use divvy_model::{
    ComputeMode, GpuError, GpuErrorCode, GpuOp, Hold, MigMode, MpsFault, MpsNamespace,
    MpsNamespaceName, MpsServer, Place, Sharing, Target, TimeSlice,
};

/// A small deterministic source of chance.
struct Chance(u64);

impl Chance {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) >> 33).unwrap() % n
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

const PLACES: [&str; 3] = ["9@0+4", "9@4+4", "19@4+1"];

fn place(chance: &mut Chance) -> Place {
    chance.of(&PLACES).parse().unwrap()
}

fn target(chance: &mut Chance) -> Target {
    if chance.one_in(2) {
        Target::Gpu
    } else {
        Target::Partition(place(chance))
    }
}

fn server(chance: &mut Chance) -> MpsServer {
    let own = MpsServer::of_claim(Some(25), None);
    let slots = MpsServer::equal(4, None).unwrap();
    chance.of(&[
        own,
        slots,
        MpsServer::equal(2, None).unwrap(),
        MpsServer::NAMESPACES,
    ])
}

fn slice(chance: &mut Chance) -> TimeSlice {
    chance.of(&[TimeSlice::Default, TimeSlice::Short, TimeSlice::Long])
}

fn namespace(claim: &str) -> MpsNamespace {
    MpsNamespace {
        name: MpsNamespaceName::of(&claim.parse().unwrap(), &"gpu-0".parse().unwrap()),
        cores: 10,
        memory_mib: None,
    }
}

fn one(chance: &mut Chance, claim: &str) -> Use {
    let target = target(chance);
    let sharing = chance.of(&[Sharing::Exclusive, Sharing::TimeSliced, Sharing::Mps]);
    let has_server = match sharing {
        Sharing::Mps => true,
        Sharing::Exclusive => chance.one_in(2),
        Sharing::TimeSliced | Sharing::Admin => false,
    };
    let mps = has_server.then(|| server(chance));
    let namespace = mps.filter(|server| server.has_namespaces());
    let time_slice = chance.one_in(2).then(|| slice(chance));
    Use {
        hold: Hold {
            claim: claim.parse().unwrap(),
            gpu: "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap(),
            device: "gpu-0".parse().unwrap(),
            target,
            sharing,
            theirs: target != Target::Gpu && chance.one_in(8),
            time_slice,
            mps,
        },
        namespace: namespace.map(|_| self::namespace(claim)),
        given: None,
        since: chance.of(&[
            Since::ThisBoot,
            Since::ThisBoot,
            Since::Unknown,
            Since::EarlierBoot,
        ]),
        standing: chance.of(&[Standing::Prepared, Standing::Lingering, Standing::Undone]),
    }
}

/// Uses that can be had at once.
fn holds(chance: &mut Chance) -> Holds {
    let mut others: Vec<Use> = Vec::new();
    for claim in ["b", "c", "d"] {
        let new = one(chance, claim);
        if chance.one_in(2) && !others.iter().any(|other| other.hold.conflicts(&new.hold)) {
            others.push(new);
        }
    }
    let own = one(chance, "a");
    let own = (!others.iter().any(|other| other.hold.conflicts(&own.hold))).then_some(own);
    let own: Vec<_> = own.into_iter().collect();
    let claim = || "a".parse().unwrap();
    let whose = match chance.below(3) {
        0 => Whose::Gets(claim(), own),
        1 => Whose::LetsGo(claim(), own),
        _ => Whose::Round,
    };
    Holds {
        others,
        unknown: chance.one_in(4),
        whose,
    }
}

fn made(chance: &mut Chance) -> Made {
    let gi = u32::try_from(chance.below(3)).unwrap();
    Made {
        gi: GpuInstanceId(gi),
        ci: ComputeInstanceId(0),
        uuid: format!("MIG-{}", chance.below(3)).parse().unwrap(),
    }
}

fn changed<T>(found: T, ours: T) -> Changed<T> {
    Changed {
        found,
        ours,
        sure: true,
    }
}

fn state(chance: &mut Chance) -> GpuState {
    let mut state = GpuState::default();
    for at in PLACES {
        if chance.one_in(2) {
            let life = match chance.below(4) {
                0 => Life::Begun,
                1 => Life::Half {
                    gi: GpuInstanceId(1),
                },
                _ => Life::Whole(made(chance)),
            };
            let noted = Instance {
                made_for: chance.of(&["a", "b", "e"]).parse().unwrap(),
                life,
                doubt: chance.one_in(8).then(|| "a call hangs".to_owned()),
            };
            state.instances.insert(at.parse().unwrap(), noted);
        }
    }
    for _ in 0..chance.below(3) {
        let note = MpsNote::new(server(chance), chance.one_in(2));
        state.mps.insert(target(chance), note);
    }
    let modes = [
        ComputeMode::Default,
        ComputeMode::ExclusiveProcess,
        ComputeMode::Prohibited,
    ];
    state.mig = chance.one_in(2).then(|| changed(false, true));
    state.compute = chance
        .one_in(2)
        .then(|| changed(chance.of(&modes), chance.of(&modes)));
    state.slice = chance
        .one_in(2)
        .then(|| changed(TimeSlice::Default, slice(chance)));
    state.grant = Granted {
        offers_partitions: chance.one_in(2),
        share_time_slice: chance.one_in(2).then(|| slice(chance)),
        restarts_wedged_mps: chance.one_in(2),
        ..Granted::default()
    };
    state
}

fn error() -> GpuError {
    GpuError::global(GpuOp::GpuInstances, GpuErrorCode::UNKNOWN)
}

fn seen(chance: &mut Chance) -> GpuSeen {
    let mut seen = GpuSeen::default();
    for at in PLACES {
        let place: Place = at.parse().unwrap();
        let Made { gi, uuid, .. } = made(chance);
        let inside = ComputeInstance {
            id: ComputeInstanceId(0),
            gpu_instance: gi,
            profile: ComputeInstanceProfileId(0),
            uuid,
        };
        let living = Living {
            instance: GpuInstance {
                id: gi,
                profile: place.profile,
                placement: place.placement,
            },
            inside: if chance.one_in(2) {
                vec![inside]
            } else {
                Vec::new()
            },
        };
        let filling = match chance.below(4) {
            0 => continue,
            1 => Err(error()),
            2 => Ok(None),
            _ => Ok(Some(living)),
        };
        seen.places.insert(place, filling);
    }
    let mode = chance.one_in(2);
    seen.mig = match chance.below(4) {
        0 => None,
        1 => Some(Err(error())),
        2 => Some(Ok(MigMode::Unsupported)),
        _ => Some(Ok(MigMode::Supported {
            current: mode,
            pending: mode,
        })),
    };
    seen.compute = match chance.below(4) {
        0 => None,
        1 => Some(Err(error())),
        2 => Some(Ok(ComputeMode::Default)),
        _ => Some(Ok(ComputeMode::ExclusiveProcess)),
    };
    seen.slice = chance.one_in(2).then(|| slice(chance));
    seen.mps = match chance.below(4) {
        0 => None,
        1 => Some(Err("no answer".to_owned())),
        _ => {
            let mut servers = BTreeMap::new();
            for _ in 0..chance.below(3) {
                let unwell = Unwell {
                    fault: chance.of(&[MpsFault::Fault, MpsFault::Held]),
                    is_idle: chance.one_in(2),
                    is_lasting: chance.one_in(2),
                };
                let names = ["a", "b", "c", "e"].map(namespace);
                let listed = names.into_iter().filter(|_| chance.one_in(2));
                let listed = listed.map(|one| (one.name, one)).collect();
                let found = MpsSeen {
                    server: server(chance),
                    partition: chance.one_in(2).then(|| made(chance).uuid),
                    namespaces: chance.one_in(2).then_some(listed),
                    unwell: chance.one_in(2).then_some(unwell),
                };
                servers.insert(target(chance), found);
            }
            Some(Ok(servers))
        }
    };
    seen
}

/// Returns whether a change takes something that a hold names.
fn harms(change: &Change, other: &Use, is_idle: impl Fn(Target) -> bool, by_rule: bool) -> bool {
    let hold = &other.hold;
    let is_whole = hold.target == Target::Gpu;
    match change {
        Change::Remove(place) => hold.target == Target::Partition(*place),
        Change::StopMps(target) => hold.mps.is_some() && hold.target == *target,
        Change::RestartMps(target, _) => {
            hold.mps.is_some() && hold.target == *target && !is_idle(*target) && !by_rule
        }
        // One that is being undone, or of an earlier boot, has none any more.
        Change::RemoveNamespace(name) => {
            let is_gone = other.standing == Standing::Undone || other.since == Since::EarlierBoot;
            !is_gone && other.namespace.is_some_and(|one| one.name == *name)
        }
        Change::SetMigMode(on) => *on == is_whole,
        Change::SetComputeMode(to) if is_whole => match (hold.mps, hold.sharing) {
            (Some(_), _) => *to != ComputeMode::ExclusiveProcess,
            (None, Sharing::TimeSliced) => *to != ComputeMode::Default,
            _ => false,
        },
        // That of shares is the policy's, which may have changed.
        Change::SetTimeSlice(to) if is_whole && hold.sharing == Sharing::Exclusive => {
            hold.time_slice.is_some_and(|one| one != *to)
        }
        Change::SetComputeMode(_)
        | Change::SetTimeSlice(_)
        | Change::Forget(_)
        | Change::Create(_)
        | Change::StartMps(..)
        | Change::PutNamespace(_) => false,
    }
}

#[test]
fn whatever_was_seen_nothing_that_another_hold_names_is_taken() {
    let cases = std::env::var("DIVVY_GPU_CASES").map_or(100_000, |text| text.parse().unwrap());
    let mut kinds = BTreeMap::<&str, u64>::new();
    for case in 0..cases {
        let chance = &mut Chance(case);
        let (holds, state, seen) = (holds(chance), state(chance), seen(chance));
        let others = holds.others.clone();
        let (unknown, is_round) = (holds.unknown, holds.whose == Whose::Round);
        let scope = Scope::new(holds, state.grant, &state.instances);
        let goal = Goal::of(&scope, &state.mps);
        let changes = diff(&state, &seen, &goal, &scope);
        let said = || format!("case {case}: {changes:?}\n{scope:?}\n{state:?}\n{seen:?}");
        let is_idle = |target: Target| {
            let servers = seen.mps.as_ref().and_then(|servers| servers.as_ref().ok());
            let unwell = servers.and_then(|servers| servers.get(&target)?.unwell);
            unwell.is_some_and(|unwell| unwell.is_idle)
        };
        let by_rule = is_round && state.grant.restarts_wedged_mps;
        for (at, change) in changes.iter().enumerate() {
            let harmed = others
                .iter()
                .find(|other| harms(change, other, is_idle, by_rule));
            assert!(harmed.is_none(), "{change:?} harms {harmed:?}\n{}", said());
            // What cannot be read is not gone: a round gives nothing back then.
            let is_back = matches!(
                change,
                Change::StopMps(_) | Change::RemoveNamespace(_) | Change::SetMigMode(_)
            );
            assert!(!(is_back && is_round && unknown), "{change:?}\n{}", said());
            let removes = matches!(change, Change::Remove(_));
            assert!(!(removes && is_round), "{change:?}\n{}", said());
            let later = changes.iter().skip(at + 1);
            let is_early = later.clone().any(|other| needs(change, other));
            assert!(!is_early, "{change:?} is too early\n{}", said());
            let name = format!("{change:?}");
            let kind = name.split('(').next().unwrap();
            let kind = ALL.into_iter().find(|known| *known == kind).unwrap();
            *kinds.entry(kind).or_default() += 1;
        }
    }
    assert_eq!(kinds.len(), ALL.len(), "{kinds:?}");
}

const ALL: [&str; 11] = [
    "Create",
    "Forget",
    "PutNamespace",
    "Remove",
    "RemoveNamespace",
    "RestartMps",
    "SetComputeMode",
    "SetMigMode",
    "SetTimeSlice",
    "StartMps",
    "StopMps",
];
