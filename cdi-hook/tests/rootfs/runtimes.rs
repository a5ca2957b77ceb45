//! The hook called by the container runtimes of this machine.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;

use super::common::{Container, Outcome, sh, skipped};
use super::{LIB, LINKS, UPDATE, with_glibc};

const BUSYBOX: &str = "/bin/busybox";
/// Name of the node plugin's socket, beside the bundle.
const SOCKET: &str = "hook.sock";

/// Writes a configuration with which the container lists what it has got, or fails if it can write
/// to a read-only root. It has volumes at these places.
fn configure(container: &Container, is_read_only: bool, volumes: &[&str]) {
    let hook = |arguments: &[&str]| {
        let name = ["divvy-cdi-hook"];
        serde_json::json!({
            "path": env!("CARGO_BIN_EXE_divvy-cdi-hook"),
            "args": name.iter().chain(arguments).collect::<Vec<_>>(),
            "env": [format!("DIVVY_HOOK_SOCKET={}", container.bundle().join(SOCKET).display())],
        })
    };
    let script = format!(
        "/busybox touch /x 2>/dev/null && {is_read_only} && exit 1; \
         /busybox ls {LIB} /etc /etc/nvidia; /busybox ls /usr/lib /usr/lib/divvy; true"
    );
    let tmpfs =
        |place: &str| serde_json::json!({"destination": place, "type": "tmpfs", "source": "tmpfs"});
    let mut mounts: Vec<_> = volumes.iter().map(|place| tmpfs(place)).collect();
    let own = serde_json::json!([
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            // A ConfigMap, and a device node.
            {"destination": "/etc/nvidia", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]},
            {"destination": "/dev/nvidia0", "type": "bind", "source": BUSYBOX, "options": ["bind", "ro"]},
            {"destination": format!("{LIB}/libdriver.so.1"), "type": "bind", "source": BUSYBOX, "options": ["bind", "ro"]},
    ]);
    mounts.extend(own.as_array().unwrap().iter().cloned());
    let config = serde_json::json!({
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs", "readonly": is_read_only},
        "process": {
            "user": {"uid": 0, "gid": 0}, "cwd": "/", "env": ["PATH=/"],
            "args": ["/busybox", "sh", "-c", script],
        },
        "mounts": mounts,
        "hooks": {"createContainer": [
            hook(&LINKS), hook(&UPDATE), hook(&["disable-device-node-modification"]),
            hook(&["update-application-profile"]),
        ]},
        "linux": {"namespaces": [
            {"type": "pid"}, {"type": "mount"}, {"type": "uts"}, {"type": "ipc"},
        ]},
    });
    fs_err::write(container.bundle().join("config.json"), config.to_string()).unwrap();
}

/// Runtimes of this machine that can run here, with their flags.
fn runtimes() -> Vec<&'static str> {
    let can_run = |runtime: &&str| {
        let (program, _) = runtime.split_once(' ').unwrap_or((runtime, ""));
        // Control groups of version 2 in a place of their own: crun wants them whole.
        let can = sh(&format!(
            "test $(id -u) = 0 && test -x {BUSYBOX} && {program} --version && \
             unshare -m mount -t cgroup2 none /sys/fs/cgroup"
        ));
        if !can.success {
            skipped(&format!("{program} cannot run here"));
        }
        can.success
    };
    let all = ["crun --cgroup-manager=disabled", "runc"];
    all.into_iter().filter(can_run).collect()
}

/// Starts a container by a runtime.
fn start(runtime: &str, is_read_only: bool, volumes: &[&str]) -> Outcome {
    let container = with_glibc();
    start_at(&container, runtime, is_read_only, volumes)
}

fn start_at(container: &Container, runtime: &str, is_read_only: bool, volumes: &[&str]) -> Outcome {
    fs_err::copy(BUSYBOX, container.path("/busybox")).unwrap();
    for folder in ["/proc", "/dev", "/sys", "/etc"] {
        fs_err::create_dir_all(container.path(folder)).unwrap();
    }
    configure(container, is_read_only, volumes);
    let bundle = container.bundle();
    let name = bundle.file_name().unwrap().to_str().unwrap();
    sh(&format!(
        "unshare -m sh -c 'mount -t cgroup2 none /sys/fs/cgroup; {runtime} --root {bundle}/state \
         run --bundle {bundle} {name}'",
        bundle = bundle.display(),
        name = name.trim_start_matches('.'),
    ))
}

/// Starts a container by each runtime, and returns the names that it listed.
fn listed(is_read_only: bool, volumes: &[&str]) -> Vec<(&'static str, Vec<String>)> {
    let listed = |runtime| {
        let out = start(runtime, is_read_only, volumes);
        assert!(out.success, "{runtime} {is_read_only}: {out:?}");
        (runtime, out.stdout.lines().map(str::to_owned).collect())
    };
    runtimes().into_iter().map(listed).collect()
}

/// Its report comes from the runtime's namespaces of the container, where the node's socket is, and
/// from a process whose number on the node the kernel says.
#[test]
fn each_runtime_lets_a_hook_that_fails_report_why() {
    for runtime in runtimes() {
        let container = with_glibc();
        let socket = container.bundle().join(SOCKET);
        let listener = UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let out = start_at(&container, runtime, false, &["/etc", "/usr/lib"]);
        assert!(!out.success, "{runtime}: {out:?}");
        // What it said waits in the queue: without an answer the hook goes on after a second.
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(false).unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        let said: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(said["status"], 75, "{runtime}: {said}");
        let why = said["why"].as_str().unwrap();
        let words = "cannot read /etc/ld.so.cache in the container";
        assert!(why.starts_with(words), "{runtime}: {why}");
        let peer = rustix::net::sockopt::socket_peercred(&stream).unwrap();
        assert!(peer.pid.as_raw_nonzero().get() > 1, "{runtime}");
        assert!(listener.accept().is_err(), "{runtime}: one report");
    }
}

/// crun before 1.26 makes a root read-only before it calls the hook, runc and later crun after it.
#[test]
fn each_runtime_starts_containers_with_open_and_with_read_only_roots() {
    for is_read_only in [false, true] {
        for (runtime, lines) in listed(is_read_only, &[]) {
            let has = |name: &str| lines.iter().any(|line| line == name);
            for name in ["libcuda.so.1", "libcuda.so", "ld.so.cache", "ld.so.conf"] {
                assert!(has(name), "{runtime} {is_read_only}: {lines:?}");
            }
            assert!(!has("nvidia-application-profiles-rc.d"), "{runtime}");
        }
    }
}

/// The runtime mounts the driver's libraries in a volume at their place.
#[test]
fn each_runtime_starts_containers_with_volumes_in_the_way() {
    for is_read_only in [false, true] {
        for (runtime, lines) in listed(is_read_only, &["/etc", "/usr/local/nvidia"]) {
            let count = |name: &str| lines.iter().filter(|line| *line == name).count();
            // In the folder that the loader searches last, and by names in another.
            assert_eq!(count("libdriver.so.1"), 2, "{runtime}: {lines:?}");
            assert_eq!(count("libcuda.so.1"), 2, "{runtime}: {lines:?}");
            assert_eq!(count("ld.so.cache"), 0, "{runtime}: {lines:?}");
        }
    }
}
