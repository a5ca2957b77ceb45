//! The steps that follow from what was found of a GPU's daemon. Pure.

use divvy_model::{MpsProtocol, MpsServer};

use crate::note::Note;
use crate::process::Process;

/// Daemon of a GPU, as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Nothing that is known of.
    Nothing,
    /// A folder or processes of a daemon that is gone, or of a start that was cut short.
    Remains,
    /// Our daemon, whose server was started with these limits.
    Running(MpsServer),
    /// Our daemon, whose server with these limits has ended. With protocol v2 it starts another one
    /// for the next client; until then the GPU is free for any process.
    Idle(MpsServer),
}

/// Returns what a note and the process under its number are together. The kernel gives numbers out
/// again: the start time says if it is the same process, and the program if it is what was started.
pub fn judge(note: Option<&Note>, process: Option<&Process>, remains: bool) -> Found {
    match (note, process) {
        (Some(note), Some(process)) if note.daemon.is(process) && note.ready => {
            Found::Running(note.server)
        }
        // A daemon that is not ready was being started by a process that has died since.
        (Some(_), _) => Found::Remains,
        (None, _) if remains => Found::Remains,
        (None, _) => Found::Nothing,
    }
}

/// A step of starting or stopping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Asks the daemon to quit and waits for it.
    Quit(MpsProtocol),
    /// Kills the daemon and the servers that are left, and waits until they are gone.
    Kill,
    /// Removes what is in the folder of sockets. The folder stays, and those of namespaces:
    /// containers have them mounted.
    Clear(MpsProtocol),
    /// Removes the folder and the note.
    Remove,
    /// Starts the daemon and notes which process it is.
    Launch(MpsProtocol),
    /// Sets the limits of the servers that the daemon will start.
    SetLimits(MpsServer),
    /// Starts the server and waits until it is there.
    StartServer,
    /// Makes the server of protocol v3, waits until it is ready, and limits its default namespace.
    CreateServer,
    /// Notes that it is ready.
    Ready,
}

/// Returns the steps of a start. `anew`: also of a server that runs with these limits.
pub fn start(found: &Found, server: MpsServer, anew: bool) -> Vec<Step> {
    let before = match found {
        Found::Running(running) if *running == server && !anew => return Vec::new(),
        // Its daemon has the limits still.
        Found::Idle(idle) if *idle == server && !anew => {
            return vec![Step::StartServer, Step::Ready];
        }
        Found::Nothing => Vec::new(),
        Found::Remains => vec![Step::Kill],
        // Limits are read by a server at its start. The node plugin stops it first; this is the
        // same.
        Found::Running(running) | Found::Idle(running) => {
            vec![Step::Quit(running.protocol), Step::Kill]
        }
    };
    let fresh = [Step::Clear(server.protocol), Step::Launch(server.protocol)];
    let serve = match server.protocol {
        MpsProtocol::V2 => vec![Step::SetLimits(server), Step::StartServer],
        MpsProtocol::V3 => vec![Step::CreateServer],
    };
    let steps = before.into_iter().chain(fresh).chain(serve);
    steps.chain([Step::Ready]).collect()
}

/// Returns the steps of a stop.
pub fn stop(found: &Found) -> Vec<Step> {
    match found {
        Found::Nothing => Vec::new(),
        Found::Remains => vec![Step::Kill, Step::Remove],
        // Killed all the same: a daemon that has quit may leave a server that hangs.
        Found::Running(running) | Found::Idle(running) => {
            vec![Step::Quit(running.protocol), Step::Kill, Step::Remove]
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::note::Daemon;

    fn server(slots: u32) -> MpsServer {
        MpsServer::equal(slots, Some(81_559)).unwrap()
    }

    fn note(ready: bool) -> Note {
        Note {
            server: server(4),
            partition: None,
            daemon: Daemon {
                pid: 7,
                start_ticks: 100,
                program: "nvidia-cuda-mps-control".to_owned(),
            },
            ready,
            namespaces: BTreeMap::new(),
        }
    }

    fn process(start_ticks: u64, program: &str) -> Process {
        Process {
            pid: 7,
            parent: 1,
            start_ticks,
            program: program.to_owned(),
        }
    }

    #[test]
    fn a_daemon_is_ours_by_number_start_time_and_program() {
        let control = "nvidia-cuda-mps-control";
        for (note, process, remains, expected) in [
            (None, None, false, Found::Nothing),
            (None, None, true, Found::Remains),
            (Some(note(true)), None, true, Found::Remains),
            (
                Some(note(true)),
                Some(process(100, control)),
                true,
                Found::Running(server(4)),
            ),
            // The number was given out again.
            (
                Some(note(true)),
                Some(process(101, control)),
                true,
                Found::Remains,
            ),
            (
                Some(note(true)),
                Some(process(100, "bash")),
                true,
                Found::Remains,
            ),
            (
                Some(note(false)),
                Some(process(100, control)),
                true,
                Found::Remains,
            ),
        ] {
            assert_eq!(judge(note.as_ref(), process.as_ref(), remains), expected);
        }
    }

    #[test]
    fn what_is_so_already_needs_no_step_and_remains_are_killed_first() {
        assert_eq!(start(&Found::Running(server(4)), server(4), false), []);
        assert_eq!(stop(&Found::Nothing), []);
        let idle = Found::Idle(server(4));
        let serve = [Step::StartServer, Step::Ready];
        assert_eq!(start(&idle, server(4), false), serve);
        let other = start(&idle, server(2), false);
        assert_eq!(other, start(&Found::Running(server(4)), server(2), false));
        assert_eq!(stop(&idle), stop(&Found::Running(server(4))));
        let anew = start(&Found::Running(server(4)), server(4), true);
        assert_eq!(anew, start(&Found::Running(server(2)), server(4), false));
        assert!(!anew.contains(&Step::Remove), "containers have its folder");
        assert_eq!(start(&Found::Remains, server(4), false)[0], Step::Kill);
        let other = start(&Found::Running(server(4)), server(2), false);
        assert_eq!(other[..2], [Step::Quit(MpsProtocol::V2), Step::Kill]);
        for steps in [start(&Found::Nothing, server(4), false), other] {
            let at = |step| steps.iter().position(|other| *other == step).unwrap();
            // A server takes the limits that are set when it is started.
            assert!(at(Step::Launch(MpsProtocol::V2)) < at(Step::SetLimits(steps_server(&steps))));
            assert!(at(Step::SetLimits(steps_server(&steps))) < at(Step::StartServer));
            assert_eq!(steps.last(), Some(&Step::Ready));
        }
    }

    #[test]
    fn a_server_with_namespaces_takes_the_place_of_one_with_slots() {
        let new = MpsServer::NAMESPACES;
        assert_eq!(start(&Found::Running(new), new, false), []);
        let (old, next) = (MpsProtocol::V2, MpsProtocol::V3);
        assert_eq!(
            start(&Found::Running(server(4)), new, false),
            [
                Step::Quit(old),
                Step::Kill,
                Step::Clear(next),
                Step::Launch(next),
                Step::CreateServer,
                Step::Ready
            ]
        );
        assert_eq!(stop(&Found::Running(new))[0], Step::Quit(next));
    }

    fn steps_server(steps: &[Step]) -> MpsServer {
        let limits = steps.iter().find_map(|step| match step {
            Step::SetLimits(server) => Some(*server),
            _ => None,
        });
        limits.unwrap()
    }
}
