//! Servers that do not serve, seen beside those that do.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_model::{MpsFault, MpsServer};
use divvy_mps_supervisor::Unwell;
use divvy_mps_supervisor::socket::connect;

use super::{Node, Supervisor, attach, gpu, namespace, server, with_namespaces};

/// Returns in which way the server of the first GPU does not serve, by a look at all.
fn look(supervisor: &Supervisor) -> Option<Unwell> {
    supervisor.state(None).unwrap().running[&gpu(1)].unwell
}

fn found(supervisor: &Supervisor) -> Option<(MpsFault, Option<u32>)> {
    look(supervisor).map(|unwell| (unwell.fault, unwell.clients))
}

/// Number of the server of the first GPU.
fn server_of(supervisor: &Supervisor) -> u32 {
    supervisor.state(None).unwrap().running[&gpu(1)].pids[0]
}

#[test]
fn a_server_in_a_fault_is_seen_with_its_clients_until_it_serves_again() {
    for (server, is_v3) in [(server(4), false), (MpsServer::NAMESPACES, true)] {
        let node = Node::new();
        let supervisor = node.supervisor();
        supervisor.start(&gpu(1), None, server, false).unwrap();
        let client = if is_v3 {
            supervisor
                .put_namespace(&gpu(1), namespace(1, 30, 1024))
                .unwrap();
            attach(&node, 1)
        } else {
            let pipe = node.folder().join(gpu(1).to_string()).join("pipe");
            connect(&pipe.join("control")).unwrap()
        };
        assert_eq!(look(&supervisor), None, "a client alone is no fault");
        node.fault(&format!("fault {}", server_of(&supervisor)));
        let one = Some((MpsFault::Fault, Some(1)));
        assert_eq!(found(&supervisor), one);
        let before = look(&supervisor).unwrap().lasts;
        drop(client);
        node.wait_for("the client goes", || {
            found(&supervisor) == Some((MpsFault::Fault, Some(0)))
        });
        assert!(look(&supervisor).unwrap().lasts > before);
        // A question about its GPU gets the same answer.
        let asked = supervisor.state(Some(&gpu(1).gpu)).unwrap().running[&gpu(1)].unwell;
        assert_eq!(asked.map(|unwell| unwell.fault), Some(MpsFault::Fault));
        node.fault("");
        assert_eq!(look(&supervisor), None);
        supervisor.stop(&gpu(1)).unwrap();
        node.has_no_process();
    }
}

#[test]
fn a_server_that_was_started_anew_serves() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    node.fault(&format!("fault {}", server_of(&supervisor)));
    assert!(look(&supervisor).is_some());
    supervisor.stop(&gpu(1)).unwrap();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    // No look at all lies in between.
    let asked = supervisor.state(Some(&gpu(1).gpu)).unwrap().running[&gpu(1)].unwell;
    assert_eq!(asked, None);
    assert_eq!(look(&supervisor), None);
    supervisor.stop(&gpu(1)).unwrap();
}

/// A claim that waits does not wait for the state of a server of protocol v2.
#[test]
fn a_question_about_one_gpu_asks_no_server_with_slots() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let asked = || {
        let log = node.log(&gpu(1), "control.log");
        log.matches("Cmd:get_server_status").count()
    };
    let at_start = asked();
    supervisor.state(Some(&gpu(1).gpu)).unwrap();
    assert_eq!(asked(), at_start);
    supervisor.state(None).unwrap();
    assert_eq!(asked(), at_start + 1);
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_daemon_that_hangs_does_not_answer_and_keeps_its_namespaces() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    let one = namespace(1, 30, 1024);
    supervisor.put_namespace(&gpu(1), one).unwrap();
    node.fault("hang");
    assert_eq!(found(&supervisor), Some((MpsFault::NoAnswer, None)));
    let running = supervisor.state(None).unwrap().running;
    assert_eq!(running[&gpu(1)].namespaces, [one]);
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// A driver that is away says nothing about a daemon, which has its files open.
#[test]
fn a_program_that_is_missing_is_no_fault_of_the_daemon() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let program = node.bin().join("nvidia-cuda-mps-control");
    let aside = program.with_extension("aside");
    // A copy: the daemon is known by the name of its file, which a removal keeps.
    fs_err::copy(&program, &aside).unwrap();
    fs_err::remove_file(&program).unwrap();
    assert_eq!(look(&supervisor), None);
    fs_err::rename(&aside, &program).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// A daemon can refuse a command with exit status 0: its words are no list without clients.
#[test]
fn clients_that_cannot_be_listed_are_not_known() {
    for server in [server(4), MpsServer::NAMESPACES] {
        let node = Node::new();
        let supervisor = node.supervisor();
        supervisor.start(&gpu(1), None, server, false).unwrap();
        node.fault(&format!("fault {}\nrefuse-clients", server_of(&supervisor)));
        assert_eq!(found(&supervisor), Some((MpsFault::Fault, None)));
        supervisor.stop(&gpu(1)).unwrap();
    }
}

/// A driver that was exchanged under a daemon has another program, which may not know its protocol.
#[test]
fn a_program_that_refuses_its_arguments_is_no_fault_of_the_daemon() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    node.fault("no-v3");
    assert_eq!(look(&supervisor), None);
    node.fault("");
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// A server with slots that did not serve at the last look may serve again by now, and have
/// clients.
#[test]
fn a_server_that_serves_again_is_not_said_to_be_idle_and_in_a_fault() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    node.fault(&format!("fault {}", server_of(&supervisor)));
    assert_eq!(found(&supervisor), Some((MpsFault::Fault, Some(0))));
    // It serves again by itself, as its last client has ended, and another program comes.
    node.fault("");
    let pipe = node.folder().join(gpu(1).to_string()).join("pipe");
    let _client = connect(&pipe.join("control")).unwrap();
    let asked = supervisor.state(Some(&gpu(1).gpu)).unwrap().running[&gpu(1)].unwell;
    assert_eq!(asked, None);
    supervisor.stop(&gpu(1)).unwrap();
}

/// Containers have its folder of sockets mounted, and their next programs look for it there.
#[test]
fn a_server_that_is_started_anew_has_the_sockets_that_are_mounted() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let pipe = node.folder().join(gpu(1).to_string()).join("pipe");
    let mounted = fs_err::File::open(&pipe).unwrap();
    let by_container = format!("/proc/self/fd/{}/control", mounted.as_raw_fd());
    connect(by_container.as_ref()).unwrap();
    // As the plugin has a wedged server started anew.
    let before = node.processes();
    supervisor.start(&gpu(1), None, server(4), true).unwrap();
    let now = node.processes();
    assert!(now.len() == 2 && now.iter().all(|pid| !before.contains(pid)));
    let connected = connect(by_container.as_ref());
    supervisor.stop(&gpu(1)).unwrap();
    connected.unwrap();
}

/// A look at the moment of an end may find that the daemon does not answer any more.
#[test]
fn a_server_is_not_unwell_for_what_was_seen_of_the_one_before() {
    let node = Node::new();
    let supervisor = node.supervisor();
    for _ in 0..40 {
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        drop(supervisor.state(None));
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(20));
            supervisor.stop(&gpu(1)).unwrap();
            is_over.store(true, Ordering::Relaxed);
        });
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        let asked = supervisor.state(Some(&gpu(1).gpu)).unwrap().running[&gpu(1)].unwell;
        supervisor.stop(&gpu(1)).unwrap();
        assert_eq!(asked, None);
    }
}

/// A process of a container that connects to the daemon, and says nothing until it is ended.
pub(super) struct Silent(Child);

impl Silent {
    pub(super) fn connect(node: &Node) -> (Self, u32) {
        let pipe = node.folder().join(gpu(1).to_string()).join("pipe");
        // By way of another program: a child of this one would be a command of the supervisor.
        let own = std::env::current_exe().unwrap();
        let line = format!(
            "'{}' --exact health::silent_process --ignored --nocapture & wait",
            own.display()
        );
        let mut child = Command::new("sh")
            .args(["-c", &line])
            .env("SOCKET", pipe.join("control"))
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let pid = lines.find_map(|line| line.ok()?.strip_prefix("pid ")?.parse().ok());
        (Self(child), pid.unwrap())
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        let group = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
#[ignore = "a process of the test below"]
fn silent_process() {
    let _connection = connect(std::env::var_os("SOCKET").unwrap().as_ref()).unwrap();
    println!("\npid {}", std::process::id());
    std::thread::sleep(Duration::from_mins(10));
}

/// A user of a daemon holds it up for the others.
#[test]
fn a_process_that_says_nothing_to_a_daemon_is_found() {
    let node = Node::new();
    let supervisor = node.supervisor();
    node.fault("one-at-a-time");
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    assert_eq!(look(&supervisor), None);
    let (silent, pid) = Silent::connect(&node);
    let held = look(&supervisor).unwrap();
    assert_eq!((held.fault, held.holder), (MpsFault::Held, Some(pid)));
    drop(silent);
    node.wait_for("it serves again", || look(&supervisor).is_none());
    // A daemon that waits for something else is held by no process.
    node.fault("hang");
    let hangs = look(&supervisor).unwrap();
    assert_eq!((hangs.fault, hangs.holder), (MpsFault::NoAnswer, None));
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}
