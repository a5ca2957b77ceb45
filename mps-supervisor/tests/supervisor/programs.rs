//! The programs of a driver, and what the supervisor makes of them. Tried over the stand-in, and by
//! `cargo xtask nvidia` over NVIDIA's own control program, which `DIVVY_MPS_CONTROL` names then:
//! `all_users` where its MPS has a server for all users, `one_user` with the others.

use std::time::{Duration, Instant};

use divvy_model::MpsFault;
use divvy_proto::mps::v1::{Daemon, StartRequest, StateRequest, StopRequest};

use super::health::Silent;
use super::{Node, Program, Supervisor, client, gpu, kill, limits, process, server};

/// Far less than the time in which a server has to be ready.
const AT_ONCE: Duration = Duration::from_secs(5);

fn started() -> (Node, Supervisor) {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    (node, supervisor)
}

/// Processes of the daemon and of its server.
fn pids(supervisor: &Supervisor) -> (u32, u32) {
    let running = supervisor.state(None).unwrap().running[&gpu(1)].clone();
    let is_server =
        |pid: &u32| process::read(*pid).is_some_and(|one| one.program.ends_with("server"));
    let (servers, daemons): (Vec<u32>, Vec<u32>) = running.pids.into_iter().partition(is_server);
    assert_eq!((servers.len(), daemons.len()), (1, 1));
    (daemons[0], servers[0])
}

fn stopped(node: &Node, supervisor: &Supervisor) {
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

/// Asks a supervisor that is a process of its own.
async fn start(node: &Node) -> Result<(), tonic::Status> {
    let asked = StartRequest {
        target: gpu(1).to_string(),
        limits: Some(limits()),
        partition_uuid: String::new(),
        anew: false,
    };
    client(node).await.start(asked).await.map(drop)
}

async fn state(node: &Node) -> Vec<Daemon> {
    let asked = client(node).await.state(StateRequest::default()).await;
    asked.unwrap().into_inner().daemons
}

async fn stop(node: &Node) {
    let target = gpu(1).to_string();
    let asked = client(node).await.stop(StopRequest { target }).await;
    asked.unwrap();
    node.has_no_process();
}

mod all_users {
    use super::*;

    /// Its process is ended by signal 9.
    #[tokio::test]
    async fn a_killed_supervisor_is_followed_by_one_that_has_the_server() {
        let node = Node::new();
        let program = Program::start(&node);
        start(&node).await.unwrap();
        let before = state(&node).await;
        let processes = node.processes();
        assert_eq!((before.len(), processes.len()), (1, 2));
        drop(program);
        let program = Program::start(&node);
        assert_eq!(state(&node).await, before);
        start(&node).await.unwrap();
        assert_eq!(node.processes(), processes, "nothing to do");
        // And of a server that is in a fault when the supervisor is killed.
        let server = before[0].pids[0];
        node.fault(&format!("fault {server}\nclients 2"));
        drop(program);
        let _program = Program::start(&node);
        let seen = state(&node).await;
        assert_eq!(seen[0].pids, before[0].pids);
        assert_ne!(seen[0].unwell, before[0].unwell, "it is seen");
        node.fault("");
        stop(&node).await;
    }

    /// The daemon is there, and its server does not serve yet.
    #[tokio::test]
    async fn a_supervisor_killed_while_it_starts_a_server_leaves_none() {
        let node = Node::new();
        let program = Program::start(&node);
        assert!(state(&node).await.is_empty(), "it serves");
        node.fault("serves-after 1500");
        let asked = start(&node);
        let seen = async {
            while node.processes().len() < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            drop(program);
        };
        let (asked, ()) = tokio::join!(asked, seen);
        asked.unwrap_err();
        node.fault("");
        let _program = Program::start(&node);
        start(&node).await.unwrap();
        assert_eq!(node.processes().len(), 2);
        stop(&node).await;
    }

    #[test]
    fn a_server_has_its_limits_and_others_are_those_of_another() {
        let (node, supervisor) = started();
        let log = node.log(&gpu(1), "server.log");
        let bytes = format!("{:#x} bytes", (81_559_u64 / 4) << 20);
        for limit in ["Percentage set to 25.0", &bytes] {
            assert!(log.contains(limit), "{limit}: {log}");
        }
        let before = pids(&supervisor);
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        assert_eq!(pids(&supervisor), before, "nothing to do");
        supervisor.start(&gpu(1), None, server(2), false).unwrap();
        let after = pids(&supervisor);
        assert!(after.0 != before.0 && after.1 != before.1);
        let log = node.log(&gpu(1), "server.log");
        assert!(log.contains("Percentage set to 50.0"), "{log}");
        stopped(&node, &supervisor);
    }

    /// The daemon has the limits still, and the folder that containers have mounted.
    #[test]
    fn a_server_that_died_is_none_and_is_started_under_its_daemon() {
        let (node, supervisor) = started();
        let (daemon, died) = pids(&supervisor);
        kill(died);
        node.wait_for("the server ends", || process::read(died).is_none());
        assert!(
            supervisor.state(None).unwrap().running.is_empty(),
            "it has no server"
        );
        // Another supervisor keeps the daemon.
        let supervisor = node.supervisor();
        assert_eq!(supervisor.adopt().unwrap(), 1);
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        let (same, again) = pids(&supervisor);
        assert!(same == daemon && again != died, "{same} {again}");
        stopped(&node, &supervisor);
    }

    #[test]
    fn a_daemon_that_was_killed_is_started_again() {
        let (node, supervisor) = started();
        let (daemon, _) = pids(&supervisor);
        kill(daemon);
        node.wait_for("the daemon ends", || process::read(daemon).is_none());
        assert!(supervisor.state(None).unwrap().running.is_empty());
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        assert_ne!(pids(&supervisor).0, daemon);
        stopped(&node, &supervisor);
    }

    #[test]
    fn another_supervisor_finds_the_daemon() {
        let (node, supervisor) = started();
        let before = pids(&supervisor);
        drop(supervisor);
        let supervisor = node.supervisor();
        assert_eq!(supervisor.adopt().unwrap(), 1);
        assert_eq!(pids(&supervisor), before);
        stopped(&node, &supervisor);
    }

    /// A server is listed from its fork on, before it connects to the daemon, and after that the
    /// daemon answers no caller until it serves or is gone.
    #[test]
    fn a_server_that_dies_before_it_serves_was_not_started() {
        for words in [
            "server-dies",
            "connects-after 100\nserver-dies",
            "connects-after 100\nserves-after 1500\nserver-dies",
        ] {
            let node = Node::new();
            let supervisor = node.supervisor();
            node.fault(words);
            let begun = Instant::now();
            let error = supervisor.start(&gpu(1), None, server(4), false);
            let text = error.unwrap_err().to_string();
            assert!(begun.elapsed() < AT_ONCE, "{words}: {:?}", begun.elapsed());
            for part in [
                "the MPS server has ended before it served",
                "exited with status 1",
                "no CUDA-capable device",
            ] {
                assert!(text.contains(part), "{words}: {text}");
            }
            node.has_no_process();
            node.fault("");
            supervisor.start(&gpu(1), None, server(4), false).unwrap();
            stopped(&node, &supervisor);
        }
    }

    #[test]
    fn a_server_that_is_slow_is_waited_for() {
        let node = Node::new();
        let supervisor = node.supervisor();
        node.fault("connects-after 300\nserves-after 1500");
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        pids(&supervisor);
        stopped(&node, &supervisor);
    }

    #[test]
    fn a_server_in_a_fault_or_without_an_answer_is_seen_and_ended() {
        let (node, supervisor) = started();
        let (_, pid) = pids(&supervisor);
        let look = || {
            let unwell = supervisor.state(None).unwrap().running[&gpu(1)].unwell;
            unwell.map(|unwell| (unwell.fault, unwell.clients))
        };
        assert_eq!(look(), None);
        node.fault(&format!("fault {pid}\nclients 2"));
        assert_eq!(look(), Some((MpsFault::Fault, Some(2))));
        node.fault("");
        assert_eq!(look(), None);
        node.fault("mute");
        assert_eq!(look(), Some((MpsFault::NoAnswer, None)));
        stopped(&node, &supervisor);
    }

    #[test]
    fn a_process_that_says_nothing_is_named_for_as_long_as_it_is_there() {
        let node = Node::new();
        let supervisor = node.supervisor();
        node.fault("one-at-a-time");
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        let look = || supervisor.state(None).unwrap().running[&gpu(1)].unwell;
        assert_eq!(look(), None);
        let (silent, pid) = Silent::connect(&node);
        let held = look().unwrap();
        assert_eq!((held.fault, held.holder), (MpsFault::Held, Some(pid)));
        drop(silent);
        node.wait_for("it serves again", || look().is_none());
        stopped(&node, &supervisor);
    }

    #[test]
    fn a_server_with_clients_that_work_is_ended() {
        let (node, supervisor) = started();
        node.fault("clients 3");
        stopped(&node, &supervisor);
    }
}

mod one_user {
    use super::*;

    /// Kills it while the daemon runs by which it finds out the programs' abilities.
    #[tokio::test]
    async fn a_supervisor_killed_while_it_tries_the_programs_leaves_nothing() {
        let node = Node::new();
        node.fault("no-multiuser\nno-status\nno-pid-file");
        // The daemon's: from its first moment on the supervisor has a program to run before it
        // ends that, while a look at all processes takes longer than the whole trial may.
        let socket = node.folder().join("trial/pipe/control");
        let until = Instant::now() + Duration::from_mins(1);
        let mut caught = 0;
        while caught < 3 && Instant::now() < until {
            // That of the daemon before this one would be taken for its own.
            for left in [&socket, &node.folder().join("supervisor.sock")] {
                drop(fs_err::remove_file(left));
            }
            let mut program = Program::start(&node);
            while !socket.exists() && program.runs_without_socket(&node) {
                tokio::task::yield_now().await;
            }
            drop(program);
            // A program that only starts the daemon ends by itself.
            caught += usize::from(!node.processes().is_empty());
        }
        assert!(caught > 0, "no trial was seen");
        let _program = Program::start(&node);
        let refused = start(&node).await.unwrap_err();
        let text = refused.message();
        assert!(text.contains("serves programs of one user alone"), "{text}");
        node.has_no_process();
        assert!(!node.folder().join("trial").exists());
    }

    /// A server of another user would end it, and take its place.
    #[test]
    fn a_driver_whose_mps_serves_one_user_is_refused() {
        for words in ["no-multiuser", "no-multiuser\nno-status\nno-pid-file"] {
            let node = Node::new();
            node.fault(words);
            let supervisor = node.supervisor();
            for _ in 0..2 {
                let error = supervisor.start(&gpu(1), None, server(4), false);
                let text = error.unwrap_err().to_string();
                assert!(text.contains("serves programs of one user alone"), "{text}");
                node.has_no_process();
            }
            stopped(&node, &supervisor);
        }
    }
}

/// Only drivers that were not had know this flag alone.
#[test]
fn the_flag_for_all_users_is_found_by_trying() {
    let node = Node::new();
    node.fault("short-flag");
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    stopped(&node, &supervisor);
}

/// A driver can be updated under the supervisor.
#[test]
fn the_programs_of_another_driver_are_tried_again() {
    let node = Node::new();
    node.fault("no-multiuser");
    let supervisor = node.supervisor();
    let refused = supervisor.start(&gpu(1), None, server(4), false);
    refused.unwrap_err();
    node.fault("");
    let control = node.bin().join("nvidia-cuda-mps-control");
    let text = fs_err::read(&control).unwrap();
    fs_err::remove_file(&control).unwrap();
    fs_err::write(&control, text).unwrap();
    fs_err::set_permissions(
        &control,
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    stopped(&node, &supervisor);
}

#[test]
fn a_driver_without_the_states_of_servers_is_asked_by_its_log() {
    let node = Node::new();
    node.fault("no-status\nconnects-after 300");
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    pids(&supervisor);
    let log = node.log(&gpu(1), "control.log");
    assert!(log.contains(": Ready"), "{log}");
    stopped(&node, &supervisor);
}
