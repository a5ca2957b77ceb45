//! Daemons and servers of protocol v2: started, found again and ended.

use super::*;

#[test]
fn a_daemon_is_started_with_its_limits_and_nothing_is_left_after_it() {
    let node = Node::new();
    let supervisor = node.supervisor();
    assert!(supervisor.state(None).unwrap().running.is_empty());
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let log = node.log(&gpu(1), "server.log");
    assert!(
        log.contains("Active Threads Percentage set to 25.0"),
        "{log}"
    );
    let bytes = format!("{:#x}", (81_559_u64 / 4) << 20);
    assert!(log.contains(&bytes), "{log} lacks {bytes}");
    let running = supervisor.state(None).unwrap().running[&gpu(1)].clone();
    assert_eq!(running.server, server(4));
    assert_eq!(running.pids.len(), 2, "the daemon and its server");
    // The same again is nothing; another GPU has a daemon of its own.
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running[&gpu(1)], running);
    supervisor.start(&gpu(2), None, server(2), false).unwrap();
    assert_eq!(node.processes().len(), 4);
    supervisor.stop(&gpu(1)).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running.len(), 1);
    supervisor.stop(&gpu(2)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

/// Partitions of a GPU have a daemon each, which sees nothing but its partition. A partition that
/// was made anew since has another UUID, and gets another daemon.
#[test]
fn a_partition_has_a_daemon_of_its_own_that_sees_nothing_else() {
    let node = Node::new();
    let supervisor = node.supervisor();
    let [one, other] = [partition(0), partition(1)];
    let [first, second, again] = ["MIG-1", "MIG-2", "MIG-3"].map(|uuid| uuid.parse().unwrap());
    supervisor
        .start(&one, Some(&first), server(4), false)
        .unwrap();
    supervisor
        .start(&other, Some(&second), server(2), false)
        .unwrap();
    let sees = |target: &GpuTarget| {
        let running = &supervisor.state(None).unwrap().running[target];
        let daemon = running.pids.last().unwrap();
        let variables = fs_err::read(format!("/proc/{daemon}/environ")).unwrap();
        let variables = String::from_utf8(variables).unwrap();
        let mut variables = variables.split('\0').map(str::to_owned);
        let sees = variables.find(|one| one.starts_with("CUDA_VISIBLE_DEVICES="));
        (running.partition.clone(), sees.unwrap())
    };
    let of = |uuid: &MigUuid| (Some(uuid.clone()), format!("CUDA_VISIBLE_DEVICES={uuid}"));
    assert_eq!(sees(&one), of(&first));
    assert_eq!(sees(&other), of(&second));
    let before = supervisor.state(None).unwrap().running;
    supervisor
        .start(&one, Some(&first), server(4), false)
        .unwrap();
    assert_eq!(
        supervisor.state(None).unwrap().running,
        before,
        "nothing to do"
    );
    supervisor
        .start(&one, Some(&again), server(4), false)
        .unwrap();
    assert_eq!(sees(&one), of(&again));
    assert_eq!(sees(&other), of(&second));
    assert_eq!(node.processes().len(), 4);
    // Asked about one GPU, it answers for that one and its partitions.
    let of = |number| {
        supervisor
            .state(Some(&gpu(number).gpu))
            .unwrap()
            .running
            .len()
    };
    assert_eq!((of(1), of(2)), (2, 0));
    supervisor.start(&gpu(2), None, server(4), false).unwrap();
    assert_eq!((of(1), of(2)), (2, 1));
    supervisor.stop(&gpu(2)).unwrap();
    // Another process finds them again.
    assert_eq!(node.supervisor().adopt().unwrap(), 2);
    supervisor.stop(&one).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running.len(), 1);
    supervisor.stop(&other).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

#[test]
fn other_limits_are_those_of_another_daemon() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let before = supervisor.state(None).unwrap().running;
    supervisor.start(&gpu(1), None, server(2), false).unwrap();
    let after = supervisor.state(None).unwrap().running;
    assert_eq!(after[&gpu(1)].server, server(2));
    assert_ne!(after, before);
    assert_eq!(node.processes().len(), 2);
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// The server of a claim that has the GPU alone is known as that, also by another supervisor.
#[test]
fn the_server_of_a_claim_has_its_limits_or_none() {
    let node = Node::new();
    let half = MpsServer::of_claim(Some(50), Some(10 << 30));
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, half, false).unwrap();
    let log = node.log(&gpu(1), "server.log");
    assert!(log.contains("Percentage set to 50.0"), "{log}");
    assert!(log.contains(&format!("{:#x}", 10_u64 << 30)), "{log}");
    drop(supervisor);
    let supervisor = node.supervisor();
    assert_eq!(
        supervisor.state(None).unwrap().running[&gpu(1)].server,
        half
    );
    let all = MpsServer::of_claim(None, None);
    supervisor.start(&gpu(1), None, all, false).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running[&gpu(1)].server, all);
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

#[test]
fn a_daemon_or_server_that_was_killed_leaves_nothing_and_starts_again() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let pipe = node.folder().join(gpu(1).to_string()).join("pipe");
    let mounted = inode(&pipe);
    let daemon: u32 = fs_err::read_to_string(pipe.join("nvidia-cuda-mps-control.pid"))
        .unwrap()
        .parse()
        .unwrap();
    kill(daemon);
    node.wait_for("the daemon ends", || process::read(daemon).is_none());
    assert_eq!(
        supervisor.state(None).unwrap().running.len(),
        0,
        "its server alone is none"
    );
    assert_eq!(node.processes().len(), 1, "which lives on");
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    assert_eq!(node.processes().len(), 2);
    assert_eq!(inode(&pipe), mounted, "containers have the folder mounted");
    // Killed again, and ended instead.
    let running = supervisor.state(None).unwrap().running[&gpu(1)].clone();
    running.pids.iter().for_each(|pid| kill(*pid));
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

#[test]
fn a_start_that_fails_says_why_and_leaves_no_process() {
    for (fault, expected) in [
        ("refuse-start", "`-d` failed"),
        ("server-dies", "the MPS server has ended before it served"),
        (
            "refuse-limits",
            "refused `set_default_active_thread_percentage 25`",
        ),
    ] {
        let node = Node::new();
        let supervisor = node.supervisor();
        node.fault(fault);
        let error = supervisor
            .start(&gpu(1), None, server(4), false)
            .unwrap_err();
        let text = divvy_model::chain(&error);
        assert!(text.contains(expected), "{fault}: {text}");
        node.has_no_process();
        node.fault("");
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        supervisor.stop(&gpu(1)).unwrap();
    }
}

#[test]
fn a_daemon_that_does_not_quit_is_killed() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    node.fault("slow-quit");
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

#[test]
fn a_missing_program_and_a_long_path_are_refused_in_words() {
    let node = Node::new();
    fs_err::remove_file(node.bin().join("nvidia-cuda-mps-server")).unwrap();
    let error = node
        .supervisor()
        .start(&gpu(1), None, server(4), false)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("has no nvidia-cuda-mps-control or no"),
        "{error}"
    );
    node.has_no_process();
    let long = Supervisor::new(Settings {
        dir: node.folder().join("a".repeat(60)),
        ..node.settings()
    });
    let error = long.start(&gpu(1), None, server(4), false).unwrap_err();
    assert!(
        error.to_string().contains("choose a shorter driver name"),
        "{error}"
    );
}

/// The driver of a driver container has a root of its own, which lacks the folder of sockets.
#[test]
fn a_driver_with_a_root_of_its_own_is_run_with_its_own_libraries() {
    let driver = "/run/nvidia/driver";
    let node = Node::with_driver_at(driver);
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let root = node.dir.path().join("root/run/nvidia/driver");
    for pid in node.processes() {
        let environ = fs_err::read_to_string(format!("/proc/{pid}/environ")).unwrap();
        let has = |name: &str, folder: &str| {
            let value = environ.split('\0').find_map(|one| one.strip_prefix(name));
            let first = value.and_then(|value| value.split(':').next());
            assert_eq!(first.map(Path::new), Some(&*root.join(folder)), "{environ}");
        };
        has("PATH=", "usr/bin");
        has("LD_LIBRARY_PATH=", "usr/lib/x86_64-linux-gnu");
    }
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// The daemon outlives the driver's files: a driver container that ends takes them along.
#[test]
fn a_daemon_ends_although_the_driver_is_gone() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    fs_err::remove_dir_all(node.dir.path().join("root")).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert!(supervisor.state(None).unwrap().running.is_empty());
    let error = supervisor
        .start(&gpu(1), None, server(4), false)
        .unwrap_err();
    assert_eq!(error.to_string(), "the NVIDIA driver cannot be found");
}
