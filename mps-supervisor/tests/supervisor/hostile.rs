//! Folders that a container has mounted and writes to, as root: nothing in them is believed,
//! followed or waited for, and nothing but what was started is ended.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use divvy_model::{MpsProtocol, MpsServer};
use divvy_mps_supervisor::note::{Daemon, Note};
use divvy_mps_supervisor::{SupervisorError, process};
use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use super::{Node, gpu, name, namespace, namespaces, server, sockets, with_namespaces};

const PID_FILE: &str = "nvidia-cuda-mps-control.pid";
/// Far longer than the supervisor waits for anything.
const FOR_EVER: Duration = Duration::from_secs(40);

/// The folder of sockets of the first GPU, as a container has it.
fn pipe(node: &Node) -> PathBuf {
    node.folder().join(MpsProtocol::V2.pipe(&gpu(1)))
}

/// A process of the node, as the kubelet, with a child.
struct Victim {
    process: Child,
    child: u32,
}

impl Victim {
    fn start() -> Self {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 300 & wait"]).process_group(0);
        let process = command.spawn().unwrap();
        let pid = process.id();
        let until = Instant::now() + FOR_EVER;
        let child = loop {
            let text = fs_err::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
            if let Some(child) = text.split_whitespace().next() {
                break child.parse().unwrap();
            }
            assert!(Instant::now() < until);
            std::thread::yield_now();
        };
        Self { process, child }
    }

    fn lives(&self) -> bool {
        [self.process.id(), self.child]
            .into_iter()
            .all(|pid| process::read(pid).is_some())
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
        if let Some(child) = process::read(self.child) {
            drop(process::kill(&child));
        }
    }
}

/// Does `what` while a container does `attack` again and again.
fn during<T>(attack: impl Fn() + Sync, what: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                attack();
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let done = what();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

/// Returns whether `what` ends. It is left behind if it does not.
fn ends(what: impl FnOnce() + Send + 'static) -> bool {
    let work = std::thread::spawn(what);
    let until = Instant::now() + FOR_EVER;
    while !work.is_finished() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    work.is_finished()
}

fn fifo(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
}

/// With protocol v2 a container has the folder mounted also while its daemon is started anew.
#[test]
fn a_number_that_a_container_writes_has_no_process_killed() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let victim = Victim::start();
    let file = pipe(&node).join(PID_FILE);
    let text = format!("{:015}\n", victim.process.id());
    let write = || {
        // In place, so that it is never empty.
        let opened = fs_err::OpenOptions::new().write(true).open(&file);
        if let Ok(mut file) = opened {
            drop(std::io::Write::write_all(&mut file, text.as_bytes()));
        }
    };
    during(write, || {
        supervisor.start(&gpu(1), None, server(4), true).unwrap();
    });
    let running = supervisor.state(None).unwrap().running[&gpu(1)].clone();
    assert!(!running.pids.contains(&victim.process.id()), "{running:?}");
    supervisor.stop(&gpu(1)).unwrap();
    assert!(victim.lives());
    node.has_no_process();
}

/// A pipe without a writer, or a link to a device without an end. NVIDIA's program may wait for
/// such a thing, and then no server starts.
#[test]
fn a_file_that_a_container_puts_there_keeps_no_lock_for_ever() {
    for is_link in [false, true] {
        let node = Node::new();
        let supervisor = node.supervisor();
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        let file = pipe(&node).join(PID_FILE);
        let beside = file.with_extension("x");
        let put = || {
            let is_there = fs_err::symlink_metadata(&file)
                .is_ok_and(|of| of.file_type().is_fifo() || of.file_type().is_symlink());
            if !is_there && fs_err::symlink_metadata(&beside).is_err() {
                if is_link {
                    symlink("/dev/zero", &beside).unwrap();
                } else {
                    fifo(&beside);
                }
            }
            drop(fs_err::rename(&beside, &file));
        };
        let supervisor = std::sync::Arc::new(supervisor);
        let works = supervisor.clone();
        let came_back = during(put, || {
            ends(move || drop(works.start(&gpu(1), None, server(4), true)))
        });
        assert!(came_back, "link: {is_link}");
        supervisor.stop(&gpu(1)).unwrap();
        node.has_no_process();
    }
}

/// A start that was cut short has a folder and no note.
#[test]
fn a_supervisor_starts_whatever_lies_in_a_folder_of_sockets() {
    let node = Node::new();
    fs_err::create_dir_all(pipe(&node)).unwrap();
    fifo(&pipe(&node).join(PID_FILE));
    fifo(&pipe(&node).join("control"));
    let supervisor = node.supervisor();
    assert!(ends(move || assert_eq!(supervisor.adopt().unwrap(), 0)));
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// A note that cannot be read says nothing about other GPUs.
#[test]
fn a_gpu_whose_note_cannot_be_read_keeps_no_other_from_its_daemon() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(2), None, server(4), false).unwrap();
    let unreadable = node.folder().join(gpu(1).to_string()).join("daemon.json");
    fs_err::create_dir_all(&unreadable).unwrap();
    assert_eq!(node.supervisor().adopt().unwrap(), 1);
    supervisor.stop(&gpu(2)).unwrap();
    node.has_no_process();
}

/// Its process is this one, which would be killed as the daemon. It accepts no connection.
#[test]
fn a_process_that_listens_in_the_place_of_a_daemon_is_none() {
    let node = Node::new();
    let supervisor = node.supervisor();
    let socket = pipe(&node).join("control");
    let beside = socket.with_extension("x");
    let ours = Mutex::new(Vec::new());
    let replace = || {
        let mut ours = ours.lock().unwrap();
        let is_ours = |ino| ours.iter().any(|(one, _)| *one == ino);
        match fs_err::symlink_metadata(&socket) {
            Ok(there) if !is_ours(there.ino()) => {}
            _ => return,
        }
        let kind = SocketType::SEQPACKET;
        let listener = rustix::net::socket(AddressFamily::UNIX, kind, None).unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&beside).unwrap()).unwrap();
        rustix::net::listen(&listener, 128).unwrap();
        let ino = fs_err::symlink_metadata(&beside).unwrap().ino();
        fs_err::rename(&beside, &socket).unwrap();
        ours.push((ino, listener));
    };
    let error = during(replace, || supervisor.start(&gpu(1), None, server(4), true));
    let text = error.unwrap_err().to_string();
    assert!(text.contains("the MPS daemon was not there"), "{text}");
    assert!(!ours.into_inner().unwrap().is_empty());
    node.has_no_process();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// R535 writes no file with its number, and a start that fails would leave one daemon more each
/// time.
#[test]
fn a_daemon_that_writes_its_number_nowhere_is_found_and_ended() {
    let node = Node::new();
    let supervisor = node.supervisor();
    for server in [server(4), MpsServer::NAMESPACES] {
        node.fault("no-pid-file\nrefuse-limits");
        supervisor.start(&gpu(1), None, server, false).unwrap_err();
        node.has_no_process();
        node.fault("no-pid-file");
        supervisor.start(&gpu(1), None, server, false).unwrap();
        assert_eq!(
            supervisor.state(None).unwrap().running[&gpu(1)].pids.len(),
            2
        );
        // Without its note, as after a start that was cut short.
        fs_err::remove_file(node.folder().join(gpu(1).to_string()).join("daemon.json")).unwrap();
        supervisor.stop(&gpu(1)).unwrap();
        node.has_no_process();
    }
}

/// The kernel gives numbers out again.
#[test]
fn a_noted_process_is_killed_only_if_it_is_the_one_that_was_started() {
    let node = Node::new();
    let supervisor = node.supervisor();
    let victim = Victim::start();
    let process = process::read(victim.process.id()).unwrap();
    let path = node.folder().join(gpu(1).to_string()).join("daemon.json");
    let stop_with = |start_ticks, program: &str| {
        let daemon = Daemon {
            pid: process.pid,
            start_ticks,
            program: program.to_owned(),
        };
        let written = Note {
            server: server(4),
            partition: None,
            daemon,
            ready: true,
            namespaces: BTreeMap::new(),
        };
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        written.write(&path).unwrap();
        supervisor.stop(&gpu(1)).unwrap();
        victim.lives()
    };
    assert!(stop_with(process.start_ticks + 1, &process.program));
    assert!(stop_with(process.start_ticks, "nvidia-cuda-mps-control"));
    assert!(!stop_with(process.start_ticks, &process.program));
}

/// Programs with the variables of a daemon: one with another file, and NVIDIA's own where the
/// driver is mounted into a container, which has a process namespace of its own.
#[test]
fn a_process_that_looks_like_a_server_is_none_of_ours() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let with = |program: &OsStr| {
        let mut command = Command::new(program);
        command
            .env("CUDA_MPS_PIPE_DIRECTORY", pipe(&node))
            .env("CUDA_MPS_LOG_DIRECTORY", node.folder())
            .stdout(Stdio::null())
            .process_group(0);
        command
    };
    let mut other = with(OsStr::new("sleep")).arg("300").spawn().unwrap();
    let unshared = |program: &str| {
        let mut command = with(OsStr::new("unshare"));
        command.args(["-Urpf", "--kill-child"]);
        command
            .arg(node.bin().join(program))
            // One that lives on.
            .args(["--gpus", ""]);
        command
    };
    let allowed = Command::new("unshare").args(["-Urpf", "true"]).status();
    let mut container = Vec::new();
    // Where user namespaces are not allowed, the first half is all.
    if allowed.is_ok_and(|done| done.success()) {
        container.push(unshared("nvidia-cuda-mps-server").spawn().unwrap());
        node.wait_for("the server of the container", || {
            node.processes().len() == 3
        });
    }
    let strangers: Vec<u32> = {
        let ours = &supervisor.state(None).unwrap().running[&gpu(1)].pids;
        assert_eq!(ours.len(), 2);
        let all = node.processes().into_iter();
        all.filter(|pid| !ours.contains(pid)).collect()
    };
    assert_eq!(strangers.len(), container.len());
    supervisor.stop(&gpu(1)).unwrap();
    let lives = |pid: &u32| process::read(*pid).is_some();
    // The stand-in ends by itself when its folder has gone.
    assert!(lives(&other.id()));
    drop(other.kill());
    drop(other.wait());
    for mut one in container {
        drop(one.kill());
        drop(one.wait());
    }
}

#[test]
fn links_and_deep_folders_of_a_container_are_removed_and_not_followed() {
    for is_v3 in [false, true] {
        let node = Node::new();
        let outside = node.dir.path().join("outside");
        fs_err::create_dir_all(outside.join("below")).unwrap();
        fs_err::write(outside.join("below/file"), "kept").unwrap();
        let supervisor = if is_v3 {
            let supervisor = with_namespaces(&node);
            supervisor
                .put_namespace(&gpu(1), namespace(1, 30, 1024))
                .unwrap();
            supervisor
        } else {
            let supervisor = node.supervisor();
            supervisor.start(&gpu(1), None, server(4), false).unwrap();
            supervisor
        };
        let mounted = if is_v3 {
            sockets(&node, 1)
        } else {
            pipe(&node)
        };
        let fill = |levels| {
            symlink(&outside, mounted.join("link")).unwrap();
            symlink(outside.join("below/file"), mounted.join("file")).unwrap();
            // Deeper than files can be open, and longer than a path can be.
            let mut at = rustix::fs::open(&mounted, DIRECTORY, Mode::empty()).unwrap();
            for _ in 0..levels {
                rustix::fs::mkdirat(&at, "deep", Mode::RWXU).unwrap();
                rustix::fs::symlinkat(&outside, &at, "link-below").unwrap_or(());
                at = rustix::fs::openat(&at, "deep", DIRECTORY, Mode::empty()).unwrap();
            }
        };
        fill(1500);
        let kind = if is_v3 {
            MpsServer::NAMESPACES
        } else {
            server(4)
        };
        supervisor.start(&gpu(1), None, kind, true).unwrap();
        assert!(!mounted.join("link").is_symlink());
        assert!(!mounted.join("deep").exists());
        if is_v3 {
            supervisor
                .put_namespace(&gpu(1), namespace(1, 30, 1024))
                .unwrap();
            // NVIDIA's program has to remove it, too.
            fill(5);
            supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
            assert!(!mounted.exists());
        } else {
            fill(1500);
        }
        supervisor.stop(&gpu(1)).unwrap();
        assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
        let kept = fs_err::read_to_string(outside.join("below/file")).unwrap();
        assert_eq!(kept, "kept");
    }
}

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// A daemon that has its sockets elsewhere serves no container of the claim.
#[test]
fn a_namespace_whose_sockets_are_elsewhere_is_not_taken() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    node.fault("elsewhere");
    let error = supervisor.put_namespace(&gpu(1), namespace(1, 30, 1024));
    assert!(
        matches!(error, Err(SupervisorError::Elsewhere { .. })),
        "{error:?}"
    );
    assert_eq!(namespaces(&supervisor), []);
    node.fault("");
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}
