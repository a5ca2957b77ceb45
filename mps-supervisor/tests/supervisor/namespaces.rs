//! Namespaces of claims in servers of protocol v3.

use super::*;

#[test]
fn namespaces_of_claims_come_and_go_in_one_server() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    assert_eq!(node.processes().len(), 2, "the daemon and its server");
    assert_eq!(namespaces(&supervisor), []);
    let (a, b) = (namespace(1, 30, 10_240), namespace(2, 25, 1044));
    for one in [a, b, a] {
        supervisor.put_namespace(&gpu(1), one).unwrap();
    }
    assert_eq!(namespaces(&supervisor), [a, b]);
    assert!(sockets(&node, 1).join("control").exists());
    supervisor
        .start(&gpu(1), None, MpsServer::NAMESPACES, false)
        .unwrap();
    assert_eq!(namespaces(&supervisor), [a, b], "the same again is nothing");
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
    assert_eq!(namespaces(&supervisor), [b]);
    assert!(!sockets(&node, 1).exists());
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
    let error = supervisor.put_namespace(&gpu(1), a).unwrap_err();
    assert!(error.to_string().contains("no MPS server"), "{error}");
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
}

/// A client that comes without a namespace is not limited by its server.
#[test]
fn the_default_namespace_gets_next_to_nothing() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    let log = node.log(&gpu(1), "control.log");
    for limit in ["active-thread-percentage=1", "pinned-memory-limit=64M"] {
        let command = format!("Cmd:namespace set default --server=s --{limit}");
        assert!(log.contains(&command), "{log}");
    }
    let create = format!("Cmd:server create s --uid=0 --allowed-devices={}", gpu(1));
    assert!(log.contains(&create), "{log}");
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_size_changes_only_while_no_client_is_there() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    supervisor
        .put_namespace(&gpu(1), namespace(1, 30, 1024))
        .unwrap();
    let client = attach(&node, 1);
    let error = supervisor.put_namespace(&gpu(1), namespace(1, 50, 1024));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("has clients"), "{error}");
    assert_eq!(namespaces(&supervisor), [namespace(1, 30, 1024)]);
    // The same size is nothing to do.
    supervisor
        .put_namespace(&gpu(1), namespace(1, 30, 1024))
        .unwrap();
    drop(client);
    supervisor
        .put_namespace(&gpu(1), namespace(1, 50, 2048))
        .unwrap();
    assert_eq!(namespaces(&supervisor), [namespace(1, 50, 2048)]);
    // What is left of a claim that is gone goes with it.
    let _client = attach(&node, 1);
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
    assert_eq!(namespaces(&supervisor), []);
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_namespace_that_fails_says_why_and_leaves_nothing() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    node.fault("refuse-limits");
    let error = supervisor.put_namespace(&gpu(1), namespace(1, 30, 1024));
    let text = divvy_model::chain(&error.unwrap_err());
    assert!(text.contains("Invalid value"), "{text}");
    assert_eq!(namespaces(&supervisor), []);
    node.fault("");
    supervisor
        .put_namespace(&gpu(1), namespace(1, 30, 1024))
        .unwrap();
    node.fault("sticky");
    let error = supervisor.remove_namespace(&gpu(1), name(1)).unwrap_err();
    assert!(error.to_string().contains("could not be ended"), "{error}");
    assert_eq!(namespaces(&supervisor), [namespace(1, 30, 1024)]);
    node.fault("");
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_daemon_or_server_that_dies_takes_its_namespaces_along() {
    for whole in [true, false] {
        let node = Node::new();
        let supervisor = with_namespaces(&node);
        supervisor
            .put_namespace(&gpu(1), namespace(1, 30, 1024))
            .unwrap();
        let before = inode(&sockets(&node, 1));
        let pipe = node.folder().join(MpsProtocol::V3.pipe(&gpu(1)));
        let daemon = fs_err::read_to_string(pipe.join("nvidia-cuda-mps-control.pid"));
        let daemon: u32 = daemon.unwrap().parse().unwrap();
        let pids = node.processes();
        let victim = pids.into_iter().find(|pid| (*pid == daemon) == whole);
        let victim = victim.unwrap();
        kill(victim);
        node.wait_for("it ends", || process::read(victim).is_none());
        assert!(
            supervisor.state(None).unwrap().running.is_empty(),
            "{whole}"
        );
        supervisor
            .start(&gpu(1), None, MpsServer::NAMESPACES, false)
            .unwrap();
        assert_eq!(node.processes().len(), 2, "{whole}");
        assert_eq!(namespaces(&supervisor), [], "{whole}");
        supervisor
            .put_namespace(&gpu(1), namespace(1, 30, 1024))
            .unwrap();
        let after = inode(&sockets(&node, 1));
        assert_eq!(after, before, "containers have the folder mounted");
        supervisor.stop(&gpu(1)).unwrap();
        node.has_no_process();
    }
}

/// A server of another protocol takes its place, and comes back.
#[test]
fn a_server_with_slots_and_one_with_namespaces_follow_each_other() {
    let node = Node::new();
    let supervisor = node.supervisor();
    for server in [server(4), MpsServer::NAMESPACES, server(2)] {
        supervisor.start(&gpu(1), None, server, false).unwrap();
        assert_eq!(
            supervisor.state(None).unwrap().running[&gpu(1)].server,
            server
        );
        assert_eq!(node.processes().len(), 2);
    }
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

#[test]
fn a_server_of_v3_that_does_not_serve_is_no_server() {
    for (fault, gpus, expected) in [
        ("no-v3", None, "`-p 3 -m -d` failed"),
        ("server-dies", None, "the MPS server was not there"),
        (
            "",
            Some("GPU-other"),
            "Server encountered a fatal exception",
        ),
        ("refuse-limits", None, "refused `namespace set default`"),
    ] {
        let node = Node::new();
        let supervisor = node.supervisor();
        node.fault(fault);
        if let Some(known) = gpus {
            fs_err::write(node.bin().join("gpus"), known).unwrap();
        }
        let error = supervisor.start(&gpu(1), None, MpsServer::NAMESPACES, false);
        let text = divvy_model::chain(&error.unwrap_err());
        assert!(text.contains(expected), "{fault}: {text}");
        node.has_no_process();
        assert!(supervisor.state(None).unwrap().running.is_empty());
    }
}

/// A daemon can refuse a command with exit status 0: its words are no list without namespaces, and
/// no path.
#[test]
fn what_a_daemon_refuses_to_list_is_not_gone() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    let a = namespace(1, 30, 1024);
    supervisor.put_namespace(&gpu(1), a).unwrap();
    node.fault("refuse-lists");
    assert_eq!(namespaces(&supervisor), [a]);
    let error = supervisor.put_namespace(&gpu(1), namespace(2, 30, 1024));
    let error = divvy_telemetry::chain(&error.unwrap_err());
    assert!(error.contains("refused `namespace list`"), "{error}");
    node.fault("refuse-folder");
    let error = supervisor.put_namespace(&gpu(1), namespace(3, 30, 1024));
    let error = divvy_telemetry::chain(&error.unwrap_err());
    let refused = "refused `namespace get pipe-directory`: Server is busy";
    assert!(error.contains(refused), "{error}");
    node.fault("");
    assert_eq!(namespaces(&supervisor)[0], a);
    supervisor
        .put_namespace(&gpu(1), namespace(3, 30, 1024))
        .unwrap();
}
