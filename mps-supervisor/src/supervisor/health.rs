//! Servers that do not serve: found when their daemon is asked, and since when that is so.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use divvy_model::{GpuTarget, MpsFault, MpsProtocol, lock};

use super::error::SupervisorError;
use super::files::Files;
use super::logs;
use super::programs::Settings;
use crate::control::{ControlError, Row};
use crate::holder;
use crate::note::{Daemon, Note};

/// Time limit for a question: it is asked at every look, of all daemons.
const ASK_WITHIN: Duration = Duration::from_secs(1);

/// The words of the program where it finds no daemon.
const NO_DAEMON: &str = "Cannot find MPS control daemon";

/// A server that does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unwell {
    pub fault: MpsFault,
    /// Time for which it has been seen like this.
    pub lasts: Duration,
    /// Number of its clients. `None`: not known.
    pub clients: Option<u32>,
    /// The process that its daemon waits for, with [`MpsFault::Held`].
    pub holder: Option<u32>,
}

/// A look at a server that does not serve.
#[derive(Debug, Clone, Copy)]
struct Found {
    fault: MpsFault,
    clients: Option<u32>,
    holder: Option<u32>,
}

/// A server that does not serve, as it was last seen.
#[derive(Debug, Clone)]
struct Seen {
    /// The daemon that was asked: nothing of it says anything about the next one.
    daemon: Daemon,
    found: Found,
    since: Instant,
}

/// The servers that do not serve. Lost with this process: their time begins anew then.
#[derive(Debug, Default)]
pub(super) struct Health(Mutex<BTreeMap<GpuTarget, Seen>>);

impl Health {
    /// Asks a daemon that runs for its namespaces and for the state of its server. A daemon of
    /// protocol v2 has no namespaces, and is asked only if `all` are, or if its server did not
    /// serve when it was last asked: a claim that waits does not wait for this, but nothing is
    /// ended because of what is not so any more. `None` for the namespaces: they are not known.
    pub(super) fn ask(
        &self,
        settings: &Settings,
        (target, files): (&GpuTarget, &Files),
        note: &Note,
        all: bool,
    ) -> Option<Vec<Row>> {
        let protocol = note.server.protocol;
        if protocol == MpsProtocol::V2 && !all && self.unwell(target, note).is_none() {
            return Some(Vec::new());
        }
        // Each question is logged.
        logs::bound(&files.log);
        // Ask. A server that serves is not asked for its clients.
        let answer = settings.with_control(files, protocol, |control| match protocol {
            MpsProtocol::V2 => Ok((Vec::new(), control.faulty_server(ASK_WITHIN)?)),
            MpsProtocol::V3 => {
                let rows = control.namespaces(ASK_WITHIN)?;
                let is_faulty = rows.iter().any(|row| row.is_faulty);
                let clients = is_faulty.then(|| control.count_clients(ASK_WITHIN).ok());
                Ok((rows, clients))
            }
        });
        // Keep how it is.
        let (rows, found) = match answer {
            Ok((rows, clients)) => (
                Some(rows),
                clients.map(|clients| Found {
                    fault: MpsFault::Fault,
                    clients,
                    holder: None,
                }),
            ),
            Err(error) => {
                tracing::warn!(%target, error = divvy_telemetry::chain(&error), "failed to ask an MPS daemon");
                let holder = || holder::of(&note.daemon, files.pipe(protocol));
                let found = is_silent(&error).then(holder).map(|holder| Found {
                    fault: holder.map_or(MpsFault::NoAnswer, |_| MpsFault::Held),
                    clients: None,
                    holder,
                });
                (None, found)
            }
        };
        self.keep(target, &note.daemon, found);
        rows
    }

    /// Returns how a server that does not serve was last seen; `None` of one that serves.
    pub(super) fn unwell(&self, target: &GpuTarget, note: &Note) -> Option<Unwell> {
        let unwell = lock(&self.0);
        let seen = unwell.get(target);
        let seen = seen.filter(|seen| seen.daemon == note.daemon)?;
        Some(Unwell {
            fault: seen.found.fault,
            lasts: seen.since.elapsed(),
            clients: seen.found.clients,
            holder: seen.found.holder,
        })
    }

    fn keep(&self, target: &GpuTarget, daemon: &Daemon, found: Option<Found>) {
        let mut unwell = lock(&self.0);
        match found {
            Some(found) => {
                // Its time goes on from one fault to another: it has served in neither.
                let before = unwell.get(target);
                let before = before.filter(|seen| seen.daemon == *daemon);
                let before = before.map(|seen| seen.since);
                let since = before.unwrap_or_else(Instant::now);
                unwell.insert(
                    target.clone(),
                    Seen {
                        daemon: daemon.clone(),
                        found,
                        since,
                    },
                );
            }
            None => drop(unwell.remove(target)),
        }
    }
}

/// Returns whether an error is that of a daemon that does not answer. A program that cannot be run,
/// or that does not know the command, as one of another driver, says nothing about the daemon.
fn is_silent(error: &SupervisorError) -> bool {
    match error {
        SupervisorError::Control(ControlError::TimedOut { .. }) => true,
        SupervisorError::Control(ControlError::NoDaemon { text, .. }) => text.contains(NO_DAEMON),
        _ => false,
    }
}
