//! Folders that containers can write to are file systems of their own: bounded, each server's apart
//! from those of others, kept while its server has users, and gone with the last of them.

use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

use divvy_model::MpsServer;
use divvy_proto::mps::v1::{Limits, StartRequest, StateRequest, StopRequest};

use super::{Node, Program, client, gpu, inode, limits};

/// Says why a test is left out.
#[expect(
    clippy::print_stderr,
    reason = "a test that cannot run here must not look like one that ran"
)]
fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}

/// In mounts of its own, where a process may mount.
#[test]
fn what_containers_write_is_bounded_and_gone_with_the_last_user() {
    let unshare = || Command::new("unshare");
    let allowed = unshare().args(["-Urm", "true"]).status();
    if !allowed.is_ok_and(|done| done.success()) {
        return skipped("user namespaces are not allowed here");
    }
    let out = unshare()
        .arg("-Urm")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "memory::in_mounts_of_its_own", "--ignored"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}

/// Fills a folder with a file, and returns how many MiB it took.
fn fill(dir: &Path) -> usize {
    let mut file = fs_err::File::create(dir.join("filler")).unwrap();
    let block = vec![1; 1 << 20];
    let mut mib = 0;
    while mib < 64 {
        match std::io::Write::write_all(&mut file, &block) {
            Ok(()) => mib += 1,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull);
                break;
            }
        }
    }
    mib
}

/// Owner and mode of a folder.
fn rights(dir: &Path) -> (u32, u32) {
    let of = fs_err::metadata(dir).unwrap();
    (of.uid(), of.mode() & 0o7777)
}

/// Bytes and files that the file system of a folder can hold.
fn bound_of(dir: &Path) -> (u64, u64) {
    let of = rustix::fs::statvfs(dir).unwrap();
    (of.f_blocks * of.f_frsize, of.f_files)
}

fn mounts() -> usize {
    let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap();
    mounts
        .lines()
        .filter(|line| line.starts_with("divvy-mps "))
        .count()
}

#[tokio::test]
#[ignore = "a process of the test above"]
async fn in_mounts_of_its_own() {
    let node = Node::new();
    let args = ["--mps-memory", "8Mi"];
    let program = Program::with(&node, &args);
    let mut asks = client(&node).await;
    let start = |number, anew| StartRequest {
        target: gpu(number).to_string(),
        limits: Some(limits()),
        partition_uuid: String::new(),
        anew,
    };
    for number in [1, 2] {
        asks.start(start(number, false)).await.unwrap();
    }
    let [memory, other] = [1, 2].map(|number| node.folder().join(MpsServer::memory(&gpu(number))));
    let pipe = memory.with_file_name("pipe");

    // Root alone puts sockets there; programs of all users share memory, and none removes those of
    // another.
    let owner = fs_err::metadata("/proc/self").unwrap().uid();
    assert_eq!(rights(&pipe), (owner, 0o755));
    assert_eq!(rights(&memory), (owner, 0o1777));
    assert_eq!(bound_of(&pipe), (1 << 20, 4096));
    assert_eq!(bound_of(&memory), (8 << 20, 65_536));

    // Neither the node nor the users of another server have less for it.
    assert_eq!(fill(&memory), 8);
    fs_err::write(other.join("file"), "of another server").unwrap();
    assert_eq!(fill(&pipe), 0);
    fs_err::write(node.folder().join("file"), "of the node").unwrap();
    // What a container puts beside the sockets leads nowhere on the node.
    symlink(node.folder().join("file"), pipe.join("link")).unwrap();
    let error = fs_err::read(pipe.join("link")).unwrap_err();
    let is_loop = error
        .to_string()
        .contains("Too many levels of symbolic links");
    assert!(is_loop, "{error}");
    fs_err::remove_file(memory.join("filler")).unwrap();
    fs_err::write(memory.join("file"), "of a tenant").unwrap();
    fs_err::remove_file(pipe.join("filler")).unwrap();

    // Daemon and servers have the memory of their own clients.
    let state = asks.state(StateRequest::default()).await.unwrap();
    let daemons = state.into_inner().daemons;
    let pids: Vec<&Vec<u32>> = daemons.iter().map(|daemon| &daemon.pids).collect();
    for (pids, text) in pids.iter().zip(["of a tenant", "of another server"]) {
        assert_eq!(pids.len(), 2);
        for pid in *pids {
            let seen = fs_err::read_to_string(format!("/proc/{pid}/root/dev/shm/file"));
            assert_eq!(seen.unwrap(), text);
        }
    }

    // A supervisor that is started anew, and a daemon that is, leave it to the containers.
    let held = [&memory, &pipe].map(|dir| (inode(dir), fs_err::File::open(dir).unwrap()));
    drop(program);
    let _program = Program::with(&node, &args);
    let mut asks = client(&node).await;
    let after = asks.state(StateRequest::default()).await.unwrap();
    assert_eq!(after.into_inner().daemons, daemons);
    asks.start(start(1, true)).await.unwrap();
    for ((before, dir), name) in held.iter().zip(["file", "control"]) {
        let seen = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
        assert!(Path::new(&seen).exists(), "{name}");
        let now = if name == "file" { &memory } else { &pipe };
        assert_eq!(inode(now), *before, "{name}");
    }

    // The next tenant finds nothing of it.
    assert_eq!(mounts(), 4);
    let target = gpu(1).to_string();
    asks.stop(StopRequest { target }).await.unwrap();
    assert_eq!(mounts(), 2);
    assert!(!memory.exists() && !pipe.exists());
    asks.start(start(1, false)).await.unwrap();
    assert_eq!(fs_err::read_dir(&memory).unwrap().count(), 0);
    for number in [1, 2] {
        let target = gpu(number).to_string();
        asks.stop(StopRequest { target }).await.unwrap();
    }
    assert_eq!(mounts(), 0);

    // The folders of namespaces are in one such file system.
    let server = MpsServer::NAMESPACES;
    let target = gpu(3).to_string();
    let namespaces = StartRequest {
        target: target.clone(),
        limits: Some(Limits {
            slots: 0,
            cores: server.cores,
            memory_mib: 0,
            protocol: server.protocol.number(),
        }),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(namespaces).await.unwrap();
    let pipe = node.folder().join(server.protocol.pipe(&gpu(3)));
    assert_eq!(rights(&pipe), (owner, 0o755));
    assert_eq!(bound_of(&pipe), (1 << 20, 4096));
    asks.stop(StopRequest { target }).await.unwrap();
    assert_eq!(mounts(), 0);
    node.has_no_process();
}
