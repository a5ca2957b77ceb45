//! MPS servers of a GPU: one for a target while claims share it so. A server that runs with other
//! limits cannot be changed, since clients keep what it was started with. A server in a partition
//! ends with the partition.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{GpuUuid, MigUuid, MpsFault, MpsNamespace, MpsNamespaceName, MpsServer, Target};
use serde::{Deserialize, Serialize};

use crate::change::Change;
use crate::holds::Use;

/// An MPS server that was started, or may have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsNote {
    /// Limits that it was started with.
    pub server: MpsServer,
    /// True if the start is known to have worked. The supervisor knows the process.
    pub up: bool,
    /// Fault because of which it has not served for long, by the last look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wedged: Option<MpsFault>,
}

impl MpsNote {
    /// Makes the note of a server that serves, as far as is known.
    pub fn new(server: MpsServer, up: bool) -> Self {
        let wedged = None;
        Self { server, up, wedged }
    }
}

/// An MPS server that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsSeen {
    /// Limits that it was started with.
    pub server: MpsServer,
    /// The partition that it sees; `None` for a whole GPU, and for one that was not asked for.
    pub partition: Option<MigUuid>,
    /// Its namespaces. `None`: not asked for, so that they count as wanted.
    pub namespaces: Option<BTreeMap<MpsNamespaceName, MpsNamespace>>,
    /// Set if it serves no new program.
    pub unwell: Option<Unwell>,
}

/// The state of an MPS server that serves no new program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unwell {
    pub fault: MpsFault,
    /// True if it certainly has no client.
    pub is_idle: bool,
    /// True if it has been so for long, as far as the supervisor knows, which may be new. A shorter
    /// fault may end by itself.
    pub is_lasting: bool,
}

impl MpsSeen {
    /// Returns the fault of a server that will not serve by itself any more: it has not for long,
    /// or was found so before, and has not served since.
    pub fn wedged(&self, noted: Option<&MpsNote>) -> Option<Unwell> {
        let was = noted.is_some_and(|noted| noted.wedged.is_some());
        self.unwell.filter(|unwell| unwell.is_lasting || was)
    }
}

/// Reading of the servers, or why they cannot be found out.
pub(crate) type Seen = Result<BTreeMap<Target, MpsSeen>, String>;

/// The target of a server after the changes of instances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ground {
    /// The whole GPU, or a partition that may live.
    There(Option<MigUuid>),
    /// A partition that is made by the same call.
    Made,
    /// A partition that is gone, or removed by the same call.
    Gone,
}

impl Ground {
    /// Returns whether a server that runs is the wanted one, in this very partition.
    fn has(&self, running: &MpsSeen, server: MpsServer) -> bool {
        match self {
            Self::There(partition) => {
                let is_here = partition.is_none() || running.partition == *partition;
                running.server == server && is_here
            }
            Self::Made | Self::Gone => false,
        }
    }
}

/// Returns the servers that users of targets need: the one that others have already, or that of the
/// claim that is the first (`gets`), or has the target alone.
pub(crate) fn want(
    gets: &[Use],
    others: &[Use],
    noted: &BTreeMap<Target, MpsNote>,
) -> BTreeMap<Target, MpsServer> {
    let mut wanted = BTreeMap::new();
    for other in others.iter().filter(|other| other.is_served()) {
        if let Some(server) = other.hold.mps {
            // Slots are those of the server that runs; a server of one claim is as its record has
            // it.
            let running = noted.get(&other.hold.target).map(|noted| noted.server);
            let running =
                running.filter(|running| running.slots.is_some() && server.slots.is_some());
            wanted.insert(other.hold.target, running.unwrap_or(server));
        }
    }
    for own in gets {
        if let Some(server) = own.hold.mps {
            wanted.entry(own.hold.target).or_insert(server);
        }
    }
    wanted
}

/// Returns what ends servers and what starts others. A server that cannot be found out is stopped
/// or started all the same: both do nothing where it is so already, and say why where they cannot
/// be done.
pub(crate) fn changes(
    notes: &BTreeMap<Target, MpsNote>,
    seen: Option<&Seen>,
    want: &BTreeMap<Target, MpsServer>,
    ground: impl Fn(Target) -> Ground,
    restarts_wedged: bool,
) -> Vec<Change> {
    let running = seen.and_then(|seen| seen.as_ref().ok());
    let known = running
        .into_iter()
        .flat_map(BTreeMap::keys)
        .chain(notes.keys());
    let targets: BTreeSet<Target> = known.chain(want.keys()).copied().collect();
    let mut changes = Vec::new();
    for target in targets {
        let note = notes.get(&target);
        let runs = running.map(|running| running.get(&target));
        let ground = ground(target);
        // A partition that is gone needs no server.
        let Some(server) = want
            .get(&target)
            .copied()
            .filter(|_| ground != Ground::Gone)
        else {
            // The note of a server that has ended is dropped by the same change.
            if note.is_some() || runs.flatten().is_some() {
                changes.push(Change::StopMps(target));
            }
            continue;
        };
        let same = runs.flatten().filter(|one| ground.has(one, server));
        let is_other = match runs {
            Some(running) => running.is_some() && same.is_none(),
            None => note.is_some_and(|noted| noted.server != server || ground == Ground::Made),
        };
        if is_other {
            changes.push(Change::StopMps(target));
        }
        let is_noted = note.is_some_and(|noted| noted.up && noted.server == server);
        match same {
            Some(one) if is_started_anew(one, note, restarts_wedged) => {
                changes.push(Change::RestartMps(target, server));
            }
            Some(_) if is_noted => {}
            _ => changes.push(Change::StartMps(target, server)),
        }
    }
    changes
}

/// Returns whether a server that runs is ended and started anew, since it will not serve by itself:
/// once it has no client, which nothing is taken from, or at once where rules say so.
pub(crate) fn is_started_anew(
    running: &MpsSeen,
    noted: Option<&MpsNote>,
    restarts_wedged: bool,
) -> bool {
    running.wedged(noted).is_some_and(|unwell| {
        // One process holds it up: the server of the others is not ended for that.
        let is_held = unwell.fault == MpsFault::Held;
        unwell.is_idle || (restarts_wedged && !is_held)
    })
}

/// Returns the servers as they are noted. The supervisor is asked for faults in each round: by its
/// note alone a server is not started anew.
pub(crate) fn as_noted(
    notes: &BTreeMap<Target, MpsNote>,
    partition: impl Fn(Target) -> Option<MigUuid>,
) -> Option<Seen> {
    let seen = |(target, noted): (&Target, &MpsNote)| {
        let seen = MpsSeen {
            server: noted.server,
            partition: partition(*target),
            namespaces: None,
            unwell: None,
        };
        noted.up.then_some((*target, seen))
    };
    let known: Option<_> = notes.iter().map(seen).collect();
    let known = known.ok_or_else(|| "a start or stop was cut short".to_owned());
    (!notes.is_empty()).then_some(known)
}

/// Notes which servers are wedged, once it is known which run. A server that has ended is not.
pub(crate) fn note_wedged(notes: &mut BTreeMap<Target, MpsNote>, seen: Option<&Seen>) {
    let Some(Ok(running)) = seen else {
        return;
    };
    for (target, noted) in notes {
        let found = running
            .get(target)
            .and_then(|found| found.wedged(Some(&*noted)));
        noted.wedged = found.map(|unwell| unwell.fault);
    }
}

/// Returns a stop in words.
pub(crate) fn stopped(target: Target, gpu: &GpuUuid) -> String {
    format!("stop the MPS server of {}", target.of(gpu))
}

/// Returns a restart in words.
pub(crate) fn restarted(target: Target, gpu: &GpuUuid) -> String {
    format!("restart the wedged MPS server of {}", target.of(gpu))
}

/// Returns a start in words.
pub(crate) fn started(target: Target, server: MpsServer, gpu: &GpuUuid) -> String {
    let on = target.of(gpu);
    match server.slots {
        Some(slots) => format!("start an MPS server with {slots} equal slots on {on}"),
        None if server.has_namespaces() => {
            format!("start an MPS server with namespaces on {on}")
        }
        None => format!("start the MPS server of a claim on {on}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: Target = Target::Gpu;
    const SERVER: MpsServer = MpsServer::NAMESPACES;

    fn there(_: Target) -> Ground {
        Ground::There(None)
    }

    fn running(server: MpsServer, unwell: Option<Unwell>) -> MpsSeen {
        MpsSeen {
            server,
            partition: None,
            namespaces: None,
            unwell,
        }
    }

    fn of(
        notes: &[(MpsServer, bool)],
        seen: Option<&Seen>,
        want: Option<MpsServer>,
    ) -> Vec<Change> {
        let note = |(server, up): &(MpsServer, bool)| (GPU, MpsNote::new(*server, *up));
        let want = want.map(|server| (GPU, server)).into_iter().collect();
        changes(&notes.iter().map(note).collect(), seen, &want, there, false)
    }

    /// A supervisor that does not answer: a server that may be another one is stopped, the same is
    /// not.
    #[test]
    fn a_server_that_is_not_known_is_started_again_and_another_one_stopped() {
        let other = MpsServer::of_claim(None, None);
        let seen = Err("no answer".to_owned());
        let (stop, start) = (Change::StopMps(GPU), Change::StartMps(GPU, SERVER));
        for (noted, expected) in [(SERVER, vec![start.clone()]), (other, vec![stop, start])] {
            assert_eq!(of(&[(noted, true)], Some(&seen), Some(SERVER)), expected);
        }
    }

    /// Starting what runs already does nothing but that its note is written.
    #[test]
    fn a_server_that_runs_as_wanted_and_is_noted_otherwise_is_noted_anew() {
        let seen = Ok([(GPU, running(SERVER, None))].into());
        let anew = || vec![Change::StartMps(GPU, SERVER)];
        let other = MpsServer::of_claim(None, None);
        for (noted, expected) in [
            (vec![(SERVER, true)], vec![]),
            (vec![(SERVER, false)], anew()),
            (vec![(other, true)], anew()),
            (vec![(other, false)], anew()),
            (vec![], anew()),
        ] {
            assert_eq!(of(&noted, Some(&seen), Some(SERVER)), expected, "{noted:?}");
        }
    }

    /// A server with other limits ends first; an unused one ends with its note.
    #[test]
    fn a_server_that_is_unused_ends_and_another_one_takes_its_place() {
        let other = MpsServer::of_claim(None, None);
        let seen = Ok([(GPU, running(other, None))].into());
        let none: Seen = Ok(BTreeMap::new());
        let (stop, start) = (Change::StopMps(GPU), Change::StartMps(GPU, SERVER));
        for (noted, seen, want, expected) in [
            (vec![], &seen, None, vec![stop.clone()]),
            (vec![(other, true)], &none, None, vec![stop.clone()]),
            (vec![], &none, None, vec![]),
            (
                vec![(other, true)],
                &seen,
                Some(SERVER),
                vec![stop, start.clone()],
            ),
            (vec![(SERVER, true)], &none, Some(SERVER), vec![start]),
        ] {
            assert_eq!(of(&noted, Some(seen), want), expected, "{noted:?} {seen:?}");
        }
    }

    /// A server needs its very partition: it ends with it, and another one is started in the next.
    #[test]
    fn a_server_ends_with_its_partition() {
        let target = Target::Partition("19@0+1".parse().unwrap());
        let [ours, before]: [MigUuid; 2] = ["MIG-1", "MIG-0"].map(|uuid| uuid.parse().unwrap());
        let server = MpsServer::of_claim(None, None);
        let (stop, start) = (Change::StopMps(target), Change::StartMps(target, server));
        let notes = [(target, MpsNote::new(server, true))].into();
        let want = [(target, server)].into();
        let there = |uuid: &MigUuid| Ground::There(Some(uuid.clone()));
        let again = || vec![stop.clone(), start.clone()];
        for (ground, expected) in [
            (there(&ours), vec![]),
            (there(&before), again()),
            (Ground::Made, again()),
            (Ground::Gone, vec![stop.clone()]),
        ] {
            let running = MpsSeen {
                partition: Some(ours.clone()),
                ..running(server, None)
            };
            let seen = Ok([(target, running)].into());
            let found = changes(&notes, Some(&seen), &want, |_| ground.clone(), false);
            assert_eq!(found, expected, "{ground:?}");
        }
    }

    /// It goes once no program has a context in it, or where rules say so.
    #[test]
    fn a_wedged_server_is_started_anew_once_idle_or_at_once_by_the_rules() {
        let anew = vec![Change::RestartMps(GPU, SERVER)];
        let want = [(GPU, SERVER)].into();
        for (is_idle, restarts, is_lasting, expected) in [
            (false, false, true, vec![]),
            (true, false, true, anew.clone()),
            (false, true, true, anew.clone()),
            // It may serve in a moment.
            (true, true, false, vec![]),
        ] {
            let notes = BTreeMap::from([(GPU, MpsNote::new(SERVER, true))]);
            let seen = |fault, is_lasting| {
                let unwell = Unwell {
                    fault,
                    is_idle,
                    is_lasting,
                };
                Seen::Ok([(GPU, running(SERVER, Some(unwell)))].into())
            };
            let of = |notes: &_, seen: &_| changes(notes, Some(seen), &want, there, restarts);
            let wedged = seen(MpsFault::Fault, is_lasting);
            assert_eq!(of(&notes, &wedged), expected);
            // No server is ended for a process that holds it up.
            if !is_idle {
                assert_eq!(of(&notes, &seen(MpsFault::Held, is_lasting)), []);
            }
            // A note keeps it wedged while it does not serve, also for a supervisor that is new,
            // and alone is no reason for a change.
            let mut notes = notes.clone();
            note_wedged(&mut notes, Some(&wedged));
            let fault = is_lasting.then_some(MpsFault::Fault);
            assert_eq!(notes[&GPU].wedged, fault);
            assert_eq!(of(&notes, &as_noted(&notes, |_| None).unwrap()), []);
            let later = seen(MpsFault::Fault, false);
            assert_eq!(of(&notes, &later), expected);
            note_wedged(&mut notes, Some(&later));
            assert_eq!(notes[&GPU].wedged, fault);
        }
    }
}
