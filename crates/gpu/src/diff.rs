//! The differences between a GPU and its goal: the changes of its parts, in order, that a call may
//! make.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Place, Target};

use crate::change::Change;
use crate::goal::Goal;
use crate::scope::Scope;
use crate::seen::GpuSeen;
use crate::servers::Ground;
use crate::state::GpuState;
use crate::{compute_mode, instances, mig_mode, namespaces, order, servers, time_slice};

/// Lists the changes that bring a GPU to its goal, as far as the call may make them. Empty at the
/// goal.
///
/// Expects notes that agree with the hardware ([`GpuState::correct`]) and no instance that is only
/// begun.
///
/// Invariants:
/// - It is safe to stop after any change. A crash in between leaves less than the goal, never
///   something that is not noted.
/// - A part that cannot be read is not at the goal: its change is listed, and carrying it out
///   reports the error. It is never taken for gone.
/// - With an empty list nothing is written but the claim's own record.
pub fn diff(state: &GpuState, seen: &GpuSeen, goal: &Goal, scope: &Scope) -> Vec<Change> {
    // Instances first: the servers in them depend on which of them go and which are made.
    let mut changes = instances::changes(&state.instances, &seen.places, &goal.instances);
    changes.retain(|change| scope.permits(change));
    let of_servers = {
        let ground = |target: Target| ground(target, state, seen, &changes);
        let (mps, goes_on) = (seen.mps.as_ref(), goal.restarts_wedged);
        servers::changes(&state.mps, mps, &goal.servers, ground, goes_on)
    };
    changes.extend(of_servers);
    changes.retain(|change| scope.permits(change));
    // A server that ends takes its namespaces with it.
    if !changes.contains(&Change::StopMps(Target::Gpu)) {
        let own: BTreeSet<_> = scope.own_namespaces().collect();
        let there = namespaces_there(state, seen, goal);
        let wanted = goal.servers.get(&Target::Gpu);
        let none = BTreeMap::new();
        // Where no claim is known to need the server, namespaces are ended and none is made.
        let wanted = wanted.map_or(&none, |_| &goal.namespaces);
        changes.extend(
            there
                .into_iter()
                .flat_map(|there| namespaces::changes(there, wanted, &own)),
        );
    }
    changes.extend(mig_mode::change(state.mig, seen.mig.as_ref(), goal.mig));
    changes.extend(time_slice::change(state.slice, seen.slice, goal.slice));
    changes.retain(|change| scope.permits(change));
    // The compute mode last: it is also set for the server that is started for those who hold a
    // place at it, since programs could get round it in another mode.
    let starts = changes.iter().any(|change| {
        matches!(
            change,
            Change::StartMps(Target::Gpu, _) | Change::RestartMps(Target::Gpu, _)
        )
    });
    let mode = compute_mode::change(state.compute, seen.compute.as_ref(), goal.compute);
    changes
        .extend(mode.filter(|mode| scope.permits(mode) || (starts && !scope.harms_others(mode))));
    order::sort(&mut changes);
    changes
}

/// Returns what the changes of instances leave for a server to run on.
fn ground(target: Target, state: &GpuState, seen: &GpuSeen, changes: &[Change]) -> Ground {
    let Some(place) = target.place() else {
        return Ground::There(None);
    };
    let is_made = changes.contains(&Change::Create(place));
    let is_removed = changes.contains(&Change::Remove(place));
    let lives = |place: Place| instances::may_live(&state.instances, &seen.places, place);
    match lives(place).filter(|_| !is_removed) {
        Some(partition) => Ground::There(Some(partition)),
        None if is_made => Ground::Made,
        None => Ground::Gone,
    }
}

/// Returns the reading of the namespaces, if the server of the whole GPU has some, or is to.
fn namespaces_there<'s>(
    state: &GpuState,
    seen: &'s GpuSeen,
    goal: &Goal,
) -> Option<namespaces::Seen<'s>> {
    let noted = state.mps.get(&Target::Gpu);
    let running = match &seen.mps {
        Some(Ok(running)) => running.get(&Target::Gpu),
        Some(Err(_)) | None => None,
    };
    let wanted = goal.servers.get(&Target::Gpu).copied();
    let known = running
        .map(|one| one.server)
        .or(noted.map(|noted| noted.server));
    if !wanted.or(known)?.has_namespaces() {
        return None;
    }
    if matches!(seen.mps, Some(Err(_))) {
        return Some(namespaces::Seen::Unread);
    }
    let stays = running.filter(|one| !servers::is_started_anew(one, noted, goal.restarts_wedged));
    Some(match stays.map(|one| one.namespaces.as_ref()) {
        None => namespaces::Seen::NoServer,
        Some(None) => namespaces::Seen::NotAsked,
        Some(Some(listed)) => namespaces::Seen::Listed(listed),
    })
}

#[cfg(test)]
mod tests;
