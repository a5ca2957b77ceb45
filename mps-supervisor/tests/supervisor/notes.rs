//! Notes that are missing or cannot be read, and starts that were cut off.

use std::time::Duration;

use divvy_mps_supervisor::{Supervisor, process};
use divvy_proto::mps::v1::{StartRequest, StateRequest};

use super::{Node, Program, client, gpu, limits, server};

/// Number of the daemon of the first GPU.
fn daemon(supervisor: &Supervisor) -> u32 {
    let running = &supervisor.state(None).unwrap().running[&gpu(1)];
    *running.pids.last().unwrap()
}

fn note(node: &Node) -> std::path::PathBuf {
    node.folder().join(gpu(1).to_string()).join("daemon.json")
}

/// A server is not gone because its note cannot be read, and its neighbours are as they were.
#[test]
fn a_note_that_cannot_be_read_hides_no_other_daemon() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    supervisor.start(&gpu(2), None, server(2), false).unwrap();
    // A folder in its place cannot be read as a file.
    let aside = note(&node).with_extension("aside");
    fs_err::rename(note(&node), &aside).unwrap();
    fs_err::create_dir(note(&node)).unwrap();
    for of in [None, Some(gpu(1).gpu)] {
        let state = supervisor.state(of.as_ref()).unwrap();
        let unknown: Vec<_> = state.unknown.keys().cloned().collect();
        assert_eq!(unknown, [gpu(1)]);
        let running: Vec<_> = state.running.keys().cloned().collect();
        let expected = if of.is_none() { vec![gpu(2)] } else { vec![] };
        assert_eq!(running, expected);
    }
    let state = supervisor.state(Some(&gpu(2).gpu)).unwrap();
    assert_eq!((state.running.len(), state.unknown.len()), (1, 0));
    supervisor.stop(&gpu(2)).unwrap();
    assert_eq!(node.processes().len(), 2, "the other lives on");
    fs_err::remove_dir(note(&node)).unwrap();
    fs_err::rename(&aside, note(&node)).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// Over the socket, too: the plugin then knows which GPU it must not take for free.
#[tokio::test]
async fn a_target_that_is_not_known_is_named_over_the_socket() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(2), None, server(4), false).unwrap();
    fs_err::create_dir_all(note(&node)).unwrap();
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let state = asks.state(StateRequest::default()).await.unwrap();
    let state = state.into_inner();
    assert_eq!(state.daemons.len(), 1);
    assert_eq!(state.unknown.len(), 1);
    assert_eq!(state.unknown[0].target, gpu(1).to_string());
    assert!(state.unknown[0].why.contains("daemon.json"), "{state:?}");
    supervisor.stop(&gpu(2)).unwrap();
}

/// A daemon of a trial that hangs leaves its folder, say.
#[test]
fn a_trial_that_cannot_be_removed_keeps_no_daemon_from_being_found() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    fs_err::write(node.folder().join("trial"), "").unwrap();
    assert_eq!(node.supervisor().adopt().unwrap(), 1);
    // The driver's program is known already: it is not tried again for another GPU.
    supervisor.start(&gpu(2), None, server(4), false).unwrap();
    supervisor.stop(&gpu(2)).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// Cut off between its start and its note, which is written before it is asked anything.
#[test]
fn a_daemon_without_a_note_is_ended_by_whatever_comes_next() {
    let next: [fn(&Supervisor); 3] = [
        |supervisor| assert_eq!(supervisor.adopt().unwrap(), 0),
        |supervisor| supervisor.stop(&gpu(1)).unwrap(),
        |supervisor| supervisor.start(&gpu(1), None, server(4), false).unwrap(),
    ];
    for (nr, next) in next.into_iter().enumerate() {
        let node = Node::new();
        let supervisor = node.supervisor();
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        let before = daemon(&supervisor);
        fs_err::remove_file(note(&node)).unwrap();
        let state = supervisor.state(None).unwrap();
        assert!(state.running.is_empty(), "no server that is known");
        next(&node.supervisor());
        assert!(process::read(before).is_none(), "{nr}");
        let left = if nr == 2 { 2 } else { 0 };
        assert_eq!(node.processes().len(), left, "{nr}");
        supervisor.stop(&gpu(1)).unwrap();
        node.has_no_process();
    }
}

/// A daemon that does not answer, and cannot be killed, is known by its note.
#[tokio::test]
async fn a_daemon_is_noted_before_it_is_asked_anything() {
    let node = Node::new();
    // Tried while it answers.
    let mut program = Program::start(&node);
    let mut asks = client(&node).await;
    let programs = divvy_proto::mps::v1::ProgramsRequest {};
    asks.programs(programs).await.unwrap();
    node.fault("hang");
    let start = StartRequest {
        target: gpu(1).to_string(),
        limits: Some(limits()),
        partition_uuid: String::new(),
        anew: false,
    };
    let begun = tokio::spawn(async move { asks.start(start).await });
    let until = std::time::Instant::now() + Duration::from_secs(20);
    while !note(&node).is_file() {
        assert!(!begun.is_finished(), "no note while it is waited for");
        assert!(std::time::Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(program.0.kill());
    drop(program.0.wait());
    drop(begun.await);
    let noted: serde_json::Value =
        serde_json::from_slice(&fs_err::read(note(&node)).unwrap()).unwrap();
    assert_eq!(noted["ready"], false);
    let pid = u32::try_from(noted["daemon"]["pid"].as_u64().unwrap()).unwrap();
    assert!(node.processes().contains(&pid), "it lives on");
    assert_eq!(node.supervisor().adopt().unwrap(), 0);
    node.has_no_process();
}
