//! The differences between a GPU and its goal.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{
    ComputeMode, MigMode, MpsFault, MpsNamespace, MpsNamespaceName, MpsServer, Place, Target,
};

use crate::change::Change;
use crate::goal::{GpuGoal, Need, Want};
use crate::gpu_state::{GpuState, MpsNote};
use crate::holds::Ends;
use crate::seen::{GpuSeen, MpsSeen, Now};

/// Lists the changes that bring a GPU to its goal. Empty at the goal.
///
/// Expects notes that agree with the hardware ([`GpuState::correct`]) and no instance
/// that is only begun.
///
/// Invariants:
/// - The order is safe to stop after any change: forget what is gone, stop and remove what no claim
///   needs, change settings, and only then make and start something. A crash in between leaves less
///   than the goal, never something that is not noted.
/// - Only instances that are noted as ours are removed; no other instance is touched.
/// - A part that cannot be read is not at the goal: its change is listed, and carrying it out
///   reports the error.
/// - With an empty list nothing is written but the claim's own record.
pub fn diff(state: &GpuState, seen: &GpuSeen, goal: &GpuGoal) -> Vec<Change> {
    let (mut forget, mut remove) = (Vec::new(), Vec::new());
    for (place, instance) in &state.instances {
        let now = seen.of_noted(*place, instance);
        match goal.instances.get(place) {
            // Forget before anything else: NVML gives ids out again, and a removal by a stale id
            // would hit another owner's instance.
            _ if now == Now::Gone => forget.push(Change::Forget(*place)),
            None => remove.push(Change::Remove(*place, instance.life.clone())),
            // The remains of an earlier instance are removed, and it is made anew as a whole. An
            // instance that cannot be read may live whole: the creation below looks again.
            Some(Need::Make) if now == Now::Partly => {
                remove.push(Change::Remove(*place, instance.life.clone()));
            }
            Some(Need::Make | Need::Join | Need::Keep) => {}
        }
    }
    let is_whole = |place: Place| now_at(state, seen, place) == Some(Now::Whole);
    let wanted = goal.instances.iter();
    let make = wanted.filter(|(place, need)| need.is_made() && !is_whole(**place));
    let make = make.map(|(place, _)| Change::Create(*place));
    // MIG mode can change only once no instance is left, and instances can be made only once it is
    // on, so settings stand between removals and creations.
    let (stop, start) = mps(state, seen, goal);
    let (end, put) = namespaces(state, seen, goal);
    forget
        .into_iter()
        .chain(stop)
        .chain(end.into_iter().map(Change::RemoveNamespace))
        .chain(remove)
        .chain(mig(state, seen, goal))
        .chain(compute(state, seen, goal, &start))
        .chain(slice(state, seen, goal))
        .chain(make)
        .chain(start)
        .chain(put.into_iter().map(Change::PutNamespace))
        .collect()
}

fn mig(state: &GpuState, seen: &GpuSeen, goal: &GpuGoal) -> Option<Change> {
    let to = match goal.mig {
        Want::To(on) => on,
        Want::Found => state.mig?.found,
        Want::Leave => return None,
    };
    let is_so = match &seen.mig {
        Some(Ok(MigMode::Unsupported)) => !to,
        Some(Ok(mode)) => mode.is_on() == to,
        // The change says why it cannot be read.
        Some(Err(_)) | None => false,
    };
    (!is_so).then_some(Change::SetMigMode(to))
}

/// Returns what sets the compute mode. `start`: the MPS servers that are started.
fn compute(state: &GpuState, seen: &GpuSeen, goal: &GpuGoal, start: &[Change]) -> Option<Change> {
    let is_of_gpu = |change: &Change| {
        matches!(
            change,
            Change::StartMps(Target::Gpu, _) | Change::RestartMps(Target::Gpu, _)
        )
    };
    // Where the driver does not report compute mode, it is left as it is.
    let now = seen.compute.as_ref()?;
    let to = match goal.compute {
        Want::To(mode) => mode,
        Want::Found => state.compute?.found,
        // A server for those who hold a place at it: programs could get round it in another mode.
        Want::Leave if start.iter().any(is_of_gpu) => ComputeMode::ExclusiveProcess,
        Want::Leave => return None,
    };
    // The change says why it cannot be read.
    let is_so = now.as_ref().is_ok_and(|now| *now == to);
    (!is_so).then_some(Change::SetComputeMode(to))
}

/// Returns what ends MPS servers and what starts others. A server that runs with other limits
/// cannot be changed: clients keep what it was started with. A server in a partition ends with the
/// partition.
fn mps(state: &GpuState, seen: &GpuSeen, goal: &GpuGoal) -> (Vec<Change>, Vec<Change>) {
    let none = BTreeMap::new();
    let running = match &seen.mps {
        Some(Ok(running)) => Some(running),
        Some(Err(_)) | None => None,
    };
    let known = running.unwrap_or(&none).keys().chain(state.mps.keys());
    let targets: BTreeSet<Target> = known.chain(goal.mps.keys()).copied().collect();
    let (mut stop, mut start) = (Vec::new(), Vec::new());
    for target in targets {
        let noted = state.mps.get(&target);
        let runs = running.map(|running| running.get(&target));
        let lives = target
            .place()
            .is_none_or(|place| may_live(state, seen, place));
        let partition = target.place().and_then(|place| state.partition_at(place));
        let is = |one: &MpsSeen, server: MpsServer| {
            lives && one.server == server && (one.partition == partition || partition.is_none())
        };
        let need = target.place().map(|place| goal.instances.get(&place));
        let is_made = matches!(need, Some(Some(need)) if need.is_made());
        let noted_at = |place| state.instances.contains_key(&place);
        let goes = need == Some(None) && target.place().is_some_and(noted_at);
        let want = match goal.mps.get(&target) {
            // A partition that is gone and not made anew needs no server. That of other claims ends
            // with them: the answer may be an odd one.
            Some(Want::To(_)) if !lives && !is_made => {
                if goal.served.contains(&target) {
                    Want::Leave
                } else {
                    Want::Found
                }
            }
            // No partition is removed under its server.
            _ if goes => Want::Found,
            Some(want) => *want,
            None if goal.ends_mps.iter().any(|one| one.overlaps(target)) => Want::Found,
            None => Want::Leave,
        };
        // A server that cannot be found out is stopped or started all the same: both do nothing
        // where it is so already, and say why where they cannot be done.
        match want {
            // The note of a server that has ended is dropped by the same change.
            Want::Found if noted.is_some() || runs.flatten().is_some() => {
                stop.push(Change::StopMps(target));
            }
            Want::Found | Want::Leave => {}
            Want::To(server) => {
                let is_other = match runs {
                    Some(running) => running.is_some_and(|one| !is(one, server)),
                    None => noted.is_some_and(|noted| noted.server != server || !lives),
                };
                let same = runs.flatten().filter(|one| is(one, server));
                let is_noted = noted.is_some_and(|noted| noted.up && noted.server == server);
                let is_so = is_noted && same.is_some();
                let is_anew = same.is_some_and(|one| is_started_anew(one, noted, goal));
                // Under others' programs it stays, and the start says what is in its way.
                let is_ended = is_other && !goal.served.contains(&target);
                stop.extend(is_ended.then_some(Change::StopMps(target)));
                start.extend(if is_anew {
                    Some(Change::RestartMps(target, server))
                } else {
                    (!is_so).then_some(Change::StartMps(target, server))
                });
            }
        }
    }
    (stop, start)
}

/// Returns whether a server that runs is ended and started anew, since it will not serve by itself:
/// once it has no client, which nothing is taken from, or at once where rules say so.
fn is_started_anew(running: &MpsSeen, noted: Option<&MpsNote>, goal: &GpuGoal) -> bool {
    running.wedged(noted).is_some_and(|unwell| {
        // One process holds it up: the server of the others is not ended for that.
        let is_held = unwell.fault == MpsFault::Held;
        unwell.is_idle || (goal.restarts_wedged_mps && !is_held)
    })
}

/// Returns the state of the instance that is noted at a place.
fn now_at(state: &GpuState, seen: &GpuSeen, place: Place) -> Option<Now> {
    let noted = state.instances.get(&place)?;
    Some(seen.of_noted(place, noted))
}

/// Returns whether an instance that was made whole lives, as far as can be read: a server in it is
/// not ended because of an answer that is missing.
fn may_live(state: &GpuState, seen: &GpuSeen, place: Place) -> bool {
    state.partition_at(place).is_some()
        && matches!(now_at(state, seen, place), Some(Now::Whole | Now::Unknown))
}

/// Returns the namespaces that end and those that are made. A server that is started has none.
fn namespaces(
    state: &GpuState,
    seen: &GpuSeen,
    goal: &GpuGoal,
) -> (Vec<MpsNamespaceName>, Vec<MpsNamespace>) {
    let wanted = goal.mps.get(&Target::Gpu);
    if !matches!(wanted, Some(Want::To(server)) if server.has_namespaces()) {
        return (Vec::new(), Vec::new());
    }
    let running = match &seen.mps {
        // The server that takes its place has no namespace yet.
        Some(Ok(running)) => running
            .get(&Target::Gpu)
            .filter(|running| !is_started_anew(running, state.mps.get(&Target::Gpu), goal)),
        Some(Err(_)) | None => None,
    };
    let listed = match running {
        Some(running) => match &running.namespaces {
            Some(listed) => Some(listed),
            // Not asked for: as wanted.
            None => return (Vec::new(), Vec::new()),
        },
        None => None,
    };
    // A namespace of the claim that is let go may be there as long as nothing says that it is not.
    let unlisted = match (&seen.mps, &goal.ends) {
        (Some(Err(_)), Ends::These(names)) => Some(names),
        _ => None,
    };
    let names = listed.into_iter().flat_map(|listed| listed.keys());
    let names = names.chain(unlisted.into_iter().flatten());
    let goes = |name: &&MpsNamespaceName| match &goal.ends {
        Ends::Nothing => false,
        Ends::These(names) => names.contains(name),
        Ends::Strays => true,
    };
    let end = names.filter(|name| !goal.namespaces.contains_key(name));
    let end = end.filter(goes).copied().collect();
    let is_so = |wanted: &&MpsNamespace| {
        listed.is_some_and(|listed| listed.get(&wanted.name) == Some(*wanted))
    };
    let put = goal.namespaces.values().filter(|wanted| !is_so(wanted));
    (end, put.copied().collect())
}

fn slice(state: &GpuState, seen: &GpuSeen, goal: &GpuGoal) -> Option<Change> {
    match goal.slice {
        Want::To(to) => (seen.slice != Some(to)).then_some(Change::SetTimeSlice(to)),
        // NVML cannot read the slice back, so what was found is set even if it may be in force
        // already.
        Want::Found => Some(Change::SetTimeSlice(state.slice?.found)),
        Want::Leave => None,
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::mig::{
        ComputeInstanceId, GpuInstance, GpuInstanceId, GpuInstanceProfileId, Placement,
    };
    use divvy_model::{GpuError, GpuErrorCode, GpuOp, MpsFault, MpsProtocol};

    use super::*;
    use crate::change::Made;
    use crate::gpu_state::{Instance, Life};
    use crate::seen::{Living, Unwell};

    fn place() -> Place {
        Place {
            profile: GpuInstanceProfileId(9),
            placement: Placement { start: 4, size: 4 },
        }
    }

    #[test]
    fn a_board_without_mig_has_its_mode_off() {
        let seen = GpuSeen {
            mig: Some(Ok(MigMode::Unsupported)),
            ..GpuSeen::default()
        };
        for (on, expected) in [(false, vec![]), (true, vec![Change::SetMigMode(true)])] {
            let goal = GpuGoal {
                mig: Want::To(on),
                ..GpuGoal::default()
            };
            assert_eq!(diff(&GpuState::default(), &seen, &goal), expected);
        }
    }

    /// A mode that an administrator has set under a server stays; a server that is started gets its
    /// own.
    #[test]
    fn a_server_of_a_gpu_is_started_where_no_program_gets_round_it() {
        let server = MpsServer::NAMESPACES;
        let exclusive = Change::SetComputeMode(ComputeMode::ExclusiveProcess);
        let whole = Target::Gpu;
        let partition = Target::Partition(place());
        let running = |target| {
            let one = MpsSeen {
                server,
                partition: None,
                namespaces: None,
                unwell: None,
            };
            BTreeMap::from([(target, one)])
        };
        let changes = |target, runs, compute| {
            let seen = GpuSeen {
                mps: Some(Ok(runs)),
                compute: Some(Ok(compute)),
                ..GpuSeen::default()
            };
            let goal = GpuGoal {
                mps: [(target, Want::To(server))].into(),
                ..GpuGoal::default()
            };
            let mut state = GpuState::default();
            state.note_server(target, server, true);
            diff(&state, &seen, &goal)
        };
        let (default, set) = (ComputeMode::Default, ComputeMode::ExclusiveProcess);
        let start = Change::StartMps(whole, server);
        assert_eq!(changes(whole, running(whole), default), []);
        assert_eq!(
            changes(whole, BTreeMap::new(), default),
            [exclusive, start.clone()]
        );
        assert_eq!(changes(whole, BTreeMap::new(), set), [start]);
        let set = changes(partition, BTreeMap::new(), default);
        let is_mode = |change: &Change| matches!(change, Change::SetComputeMode(_));
        assert!(!set.iter().any(is_mode), "{set:?}");
    }

    #[test]
    fn remains_of_an_instance_are_removed_and_it_is_made_anew() {
        let (place, id) = (place(), GpuInstanceId(3));
        let life = Life::Half { gi: id };
        let noted = Instance {
            made_for: "a".parse().unwrap(),
            life: life.clone(),
            doubt: None,
        };
        let state = GpuState {
            instances: [(place, noted)].into(),
            ..GpuState::default()
        };
        let living = Living {
            instance: GpuInstance {
                id,
                profile: place.profile,
                placement: place.placement,
            },
            inside: Vec::new(),
        };
        let seen = GpuSeen {
            places: [(place, Ok(Some(living)))].into(),
            ..GpuSeen::default()
        };
        let goal = GpuGoal {
            instances: [(place, Need::Make)].into(),
            ..GpuGoal::default()
        };
        let expected = [Change::Remove(place, life), Change::Create(place)];
        assert_eq!(diff(&state, &seen, &goal), expected);
    }

    /// The claim that has a partition alone is taken up again while the partition cannot be read.
    #[test]
    fn the_server_of_a_partition_that_cannot_be_read_is_not_ended() {
        let (place, server) = (place(), MpsServer::of_claim(None, None));
        let target = Target::Partition(place);
        let made = Made {
            gi: GpuInstanceId(3),
            ci: ComputeInstanceId(0),
            uuid: "MIG-ours".parse().unwrap(),
        };
        let noted = Instance {
            made_for: "a".parse().unwrap(),
            life: Life::Whole(made.clone()),
            doubt: None,
        };
        let mut state = GpuState {
            instances: [(place, noted)].into(),
            ..GpuState::default()
        };
        state.note_server(target, server, true);
        let running = MpsSeen {
            server,
            partition: Some(made.uuid),
            namespaces: None,
            unwell: None,
        };
        let error = GpuError::global(GpuOp::GpuInstances, GpuErrorCode::UNKNOWN);
        let seen = GpuSeen {
            mps: Some(Ok([(target, running)].into())),
            places: [(place, Err(error))].into(),
            ..GpuSeen::default()
        };
        let goal = GpuGoal {
            instances: [(place, Need::Make)].into(),
            mps: [(target, Want::To(server))].into(),
            ..GpuGoal::default()
        };
        assert_eq!(diff(&state, &seen, &goal), [Change::Create(place)]);
    }

    /// A supervisor that does not answer: a server that may be another one is stopped, the same is
    /// not.
    #[test]
    fn a_server_that_is_not_known_is_started_again_and_another_one_stopped() {
        let server = MpsServer::NAMESPACES;
        let other = MpsServer::of_claim(None, None);
        assert_eq!(other.protocol, MpsProtocol::V2);
        let goal = GpuGoal {
            mps: [(Target::Gpu, Want::To(server))].into(),
            ..GpuGoal::default()
        };
        let seen = GpuSeen {
            mps: Some(Err("no answer".to_owned())),
            ..GpuSeen::default()
        };
        for (noted, expected) in [
            (server, vec![Change::StartMps(Target::Gpu, server)]),
            (
                other,
                vec![
                    Change::StopMps(Target::Gpu),
                    Change::StartMps(Target::Gpu, server),
                ],
            ),
        ] {
            let mut state = GpuState::default();
            state.note_server(Target::Gpu, noted, true);
            assert_eq!(diff(&state, &seen, &goal), expected);
        }
    }

    /// Starting what runs already does nothing but that its note is written.
    #[test]
    fn a_server_that_runs_as_wanted_and_is_noted_otherwise_is_noted_anew() {
        let server = MpsServer::NAMESPACES;
        let goal = GpuGoal {
            mps: [(Target::Gpu, Want::To(server))].into(),
            ..GpuGoal::default()
        };
        let running = MpsSeen {
            server,
            partition: None,
            namespaces: None,
            unwell: None,
        };
        let seen = GpuSeen {
            mps: Some(Ok([(Target::Gpu, running)].into())),
            ..GpuSeen::default()
        };
        let anew = || vec![Change::StartMps(Target::Gpu, server)];
        let other = MpsServer::of_claim(None, None);
        for (noted, up, expected) in [
            (server, true, vec![]),
            (server, false, anew()),
            (other, true, anew()),
            (other, false, anew()),
        ] {
            let mut state = GpuState::default();
            state.note_server(Target::Gpu, noted, up);
            assert_eq!(diff(&state, &seen, &goal), expected, "{noted:?} {up}");
        }
        assert_eq!(diff(&GpuState::default(), &seen, &goal), anew());
    }

    /// A server of another partition is for a round: were it stopped here and did not end, the
    /// claim of this partition would wait for it.
    #[test]
    fn a_call_ends_no_server_of_a_partition_that_it_is_not_about() {
        let target = |place: &str| Target::Partition(place.parse().unwrap());
        let (own, other) = (target("19@0+1"), target("19@1+1"));
        let mut state = GpuState::default();
        for noted in [own, other] {
            state.note_server(noted, MpsServer::of_claim(None, None), true);
        }
        for (about, expected) in [
            (vec![own], vec![own]),
            (vec![Target::Gpu], vec![own, other]),
            (vec![], vec![]),
        ] {
            let goal = GpuGoal {
                ends_mps: about,
                ..GpuGoal::default()
            };
            let expected: Vec<_> = expected.into_iter().map(Change::StopMps).collect();
            assert_eq!(diff(&state, &GpuSeen::as_noted(&state), &goal), expected);
        }
    }

    /// It goes once no program has a context in it, or where rules say so.
    #[test]
    fn a_wedged_server_is_started_anew_once_idle_or_at_once_by_the_rules() {
        let server = MpsServer::NAMESPACES;
        let mut state = GpuState::default();
        state.note_server(Target::Gpu, server, true);
        let anew = vec![Change::RestartMps(Target::Gpu, server)];
        for (is_idle, restarts_wedged_mps, is_lasting, expected) in [
            (false, false, true, vec![]),
            (true, false, true, anew.clone()),
            (false, true, true, anew.clone()),
            // It may serve in a moment.
            (true, true, false, vec![]),
        ] {
            let goal = GpuGoal {
                mps: [(Target::Gpu, Want::To(server))].into(),
                restarts_wedged_mps,
                ..GpuGoal::default()
            };
            let unwell = Unwell {
                fault: MpsFault::Fault,
                is_idle,
                is_lasting,
            };
            let running = MpsSeen {
                server,
                partition: None,
                namespaces: None,
                unwell: Some(unwell),
            };
            let seen = GpuSeen {
                mps: Some(Ok([(Target::Gpu, running)].into())),
                ..GpuSeen::default()
            };
            assert_eq!(diff(&state, &seen, &goal), expected);
            // No server is ended for a process that holds it up.
            let mut held = seen.clone();
            for running in held.mps.iter_mut().flatten().flatten() {
                running.1.unwell.as_mut().unwrap().fault = MpsFault::Held;
            }
            if !is_idle {
                assert_eq!(diff(&state, &held, &goal), []);
            }
            // A note keeps it wedged while it does not serve, also for a supervisor that is new,
            // and alone is no reason for a change.
            let mut state = state.clone();
            state.note_wedged(&seen);
            let noted = is_lasting.then_some(MpsFault::Fault);
            assert_eq!(state.mps[&Target::Gpu].wedged, noted);
            assert_eq!(diff(&state, &GpuSeen::as_noted(&state), &goal), []);
            let mut later = seen.clone();
            for running in later.mps.iter_mut().flatten().flatten() {
                running.1.unwell.as_mut().unwrap().is_lasting = false;
            }
            assert_eq!(diff(&state, &later, &goal), expected);
            state.note_wedged(&later);
            assert_eq!(state.mps[&Target::Gpu].wedged, noted);
        }
    }

    /// By notes alone it is not known which namespaces there are: the supervisor is asked.
    #[test]
    fn namespaces_that_were_not_asked_for_count_as_wanted() {
        let server = MpsServer::NAMESPACES;
        let name = MpsNamespaceName::of(&"a".parse().unwrap(), &"gpu-0-mps".parse().unwrap());
        let wanted = MpsNamespace {
            name,
            cores: 30,
            memory_mib: None,
        };
        let goal = GpuGoal {
            mps: [(Target::Gpu, Want::To(server))].into(),
            namespaces: [(name, wanted)].into(),
            ends: Ends::Strays,
            ..GpuGoal::default()
        };
        let mut state = GpuState::default();
        state.note_server(Target::Gpu, server, true);
        assert_eq!(diff(&state, &GpuSeen::as_noted(&state), &goal), []);
        let seen = |namespaces: &[MpsNamespace]| GpuSeen {
            mps: Some(Ok([(
                Target::Gpu,
                MpsSeen {
                    server,
                    partition: None,
                    namespaces: Some(namespaces.iter().map(|one| (one.name, *one)).collect()),
                    unwell: None,
                },
            )]
            .into())),
            in_flight: None::<GpuOp>,
            ..GpuSeen::default()
        };
        assert_eq!(
            diff(&state, &seen(&[]), &goal),
            [Change::PutNamespace(wanted)]
        );
        assert_eq!(diff(&state, &seen(&[wanted]), &goal), []);
        // A call ends those of its own claim, and a round all that nothing needs.
        let of = |claim: &str| {
            let device = "gpu-0-mps".parse().unwrap();
            let name = MpsNamespaceName::of(&claim.parse().unwrap(), &device);
            MpsNamespace { name, ..wanted }
        };
        let (own, other) = (of("b"), of("c"));
        let all = seen(&[wanted, own, other]);
        for (ends, expected) in [
            (Ends::Nothing, vec![]),
            (Ends::These([own.name].into()), vec![own.name]),
            (Ends::Strays, [own.name, other.name].into_iter().collect()),
        ] {
            let goal = GpuGoal {
                ends,
                ..goal.clone()
            };
            let mut found = diff(&state, &all, &goal);
            let mut expected: Vec<_> = expected.into_iter().map(Change::RemoveNamespace).collect();
            for list in [&mut found, &mut expected] {
                list.sort_by_key(|change| format!("{change:?}"));
            }
            assert_eq!(found, expected);
        }
        let begun = MpsNamespace { cores: 0, ..wanted };
        assert_eq!(
            diff(&state, &seen(&[begun]), &goal),
            [Change::PutNamespace(wanted)]
        );
    }
}
