//! The hook reports why it has failed, and users read it in Events of their claim and pod.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use divvy_kubelet_plugin::Config;
use k8s_openapi::api::events::v1::Event;
use serde_json::{Value, json};

use crate::node::{Node, Plugin, wait};

/// UID of the pod that claims of [`Node`] are reserved for.
const POD: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
const OTHER_POD: &str = "11111111-9b1f-4a8e-b3f1-0123456789ab";

/// A node whose containers get the driver by the hook.
struct Hooked {
    node: Node,
    config: Config,
}

impl Hooked {
    async fn start() -> (Self, Plugin) {
        let node = Node::new("h100x2");
        let text = |name: &str| node.dir.path().join(name).display().to_string();
        let (program, folder) = (text("hook"), text("opt"));
        fs_err::write(&program, "#!/bin/true").unwrap();
        let config = node.config(&[
            "--library-delivery",
            "hook",
            "--hook-path",
            &program,
            "--hook-dir",
            &folder,
        ]);
        let plugin = node.start_with(config.clone());
        plugin.wait_ready().await;
        let hooked = Self { node, config };
        wait("the socket", || UnixStream::connect(hooked.socket()).ok()).await;
        (hooked, plugin)
    }

    fn socket(&self) -> PathBuf {
        self.config.hook_socket()
    }

    /// Puts this process, which speaks for a hook, into a control group.
    fn in_group(&self, group: &str) {
        let host = self.node.dir.path().join("host");
        let folder = host.join(format!("proc/{}", std::process::id()));
        fs_err::create_dir_all(&folder).unwrap();
        fs_err::write(folder.join("cgroup"), format!("0::/{group}\n")).unwrap();
    }

    fn in_pod(&self, uid: &str) {
        self.in_group(&format!("kubepods/burstable/pod{uid}/4f1c"));
    }

    /// Says something as the hook does, and waits for the answer.
    fn says(&self, line: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        // The other end may close it in the middle of a line that is too long.
        drop(stream.write_all(line.as_bytes()));
        drop(stream.shutdown(Shutdown::Write));
        let mut answer = String::new();
        drop(stream.read_to_string(&mut answer));
        answer
    }

    fn fails(&self, status: u8, why: &str) -> String {
        self.says(&format!("{}\n", json!({ "status": status, "why": why })))
    }

    /// Reasons and notes of the Events about objects of a kind, by name.
    fn events(&self, kind: &str) -> Vec<(String, String, String)> {
        let all = self.node.api.list::<Event>().into_iter();
        let of_hook = |event: &Event| {
            let note = event.note.as_deref().unwrap_or_default();
            note.contains("of divvy-cdi-hook")
        };
        let mut found: Vec<_> = all
            .filter(of_hook)
            .filter_map(|event| {
                let about = event.regarding?;
                let is_it = about.kind.as_deref() == Some(kind);
                is_it.then_some((about.name?, event.reason?, event.note?))
            })
            .collect();
        found.sort();
        found
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hook_that_fails_is_in_events_of_its_claims_and_its_pod() {
    let (hooked, plugin) = Hooked::start().await;
    let claims = [
        hooked.node.claim("a", &["gpu-0"]),
        hooked.node.claim("b", &["gpu-1"]),
    ];
    for claim in &claims {
        hooked.node.prepare(claim).await.unwrap();
    }
    // The CDI file names the socket to the program.
    let files = hooked.node.cdi_files();
    let socket = format!("DIVVY_HOOK_SOCKET={}", hooked.socket().display());
    for file in files.values() {
        let hooks = file.pointer("/containerEdits/hooks").unwrap();
        for hook in hooks.as_array().unwrap() {
            assert_eq!(hook.get("env"), Some(&json!([socket])));
        }
    }
    hooked.in_pod(POD);
    let why = "cannot write /etc/ld.so.cache in the container (a volume is mounted there)";
    assert_eq!(hooked.fails(75, why), "");
    let claims = wait("Events of both claims", || {
        let found = hooked.events("ResourceClaim");
        (found.len() == 2).then_some(found)
    })
    .await;
    assert_eq!([&*claims[0].0, &*claims[1].0], ["a", "b"]);
    for (_, reason, note) in &claims {
        assert_eq!(reason, "VolumeInTheWay");
        assert!(note.starts_with("A container of pod default/pod does not start: cannot write"));
        assert!(note.contains(why), "{note}");
        assert!(note.contains("mount them elsewhere"), "{note}");
        assert!(note.contains("exit status 75"), "{note}");
    }
    let pods = wait("an Event of the pod", || {
        Some(hooked.events("Pod")).filter(|found| !found.is_empty())
    })
    .await;
    assert_eq!(pods.len(), 1);
    assert_eq!(pods[0].1, "VolumeInTheWay");
    // Said again at once, it is not written again; another reason is.
    hooked.fails(75, "something else");
    hooked.fails(74, "another reason");
    let reasons = wait("the other reason", || {
        let found = hooked.events("Pod");
        (found.len() > 1).then_some(found)
    })
    .await;
    let reasons: Vec<_> = reasons.iter().map(|(_, reason, _)| &**reason).collect();
    assert_eq!(reasons, ["RootReadOnly", "VolumeInTheWay"]);
    plugin.stop().await;
}

/// Names the pod by the folder of its logs: the record of a claim learns late of a further pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_no_record_names_gets_its_event_all_the_same() {
    let (hooked, plugin) = Hooked::start().await;
    let claim = hooked.node.claim("a", &["gpu-0"]);
    hooked.node.prepare(&claim).await.unwrap();
    hooked.in_pod(OTHER_POD);
    // A report without any object for an Event keeps no later one back.
    hooked.fails(76, "before the folder of its logs");
    let logs = format!("host/var/log/pods/team_later_{OTHER_POD}");
    fs_err::create_dir_all(hooked.node.dir.path().join(logs)).unwrap();
    hooked.fails(76, "a pipe at /etc/ld.so.cache");
    let found = wait("an Event of the pod", || {
        Some(hooked.events("Pod")).filter(|found| !found.is_empty())
    })
    .await;
    assert_eq!(found[0].0, "later");
    assert_eq!(found[0].1, "ImageInTheWay");
    assert_eq!(hooked.events("ResourceClaim"), [], "it is not its claim");
    plugin.stop().await;
}

/// Whatever is said, and by whom: nothing is written, nothing stops, and the next hook is heard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn words_of_no_pod_and_odd_words_are_not_heard() {
    let (hooked, plugin) = Hooked::start().await;
    let claim = hooked.node.claim("a", &["gpu-0"]);
    hooked.node.prepare(&claim).await.unwrap();
    // A program of the node, and one without a group.
    hooked.fails(75, "of no pod");
    for group in ["system.slice/sshd.service", "", "../../pod/x"] {
        hooked.in_group(group);
        assert_eq!(hooked.fails(75, "of no pod"), "", "{group}");
    }
    hooked.in_pod(POD);
    let long = format!("{}\n", json!({ "status": 75, "why": "x".repeat(100_000) }));
    for odd in [
        &long,
        "{}\n",
        "\n",
        "{\"status\": 75}\n",
        "{\"status\": 7500, \"why\": \"x\"}\n",
        "{\"status\": -1, \"why\": \"x\"}\n",
        "{\"status\": 75, \"why\": 7}\n",
        "[[[[[[[[[[\n",
    ] {
        let answer: Value = serde_json::from_str(&hooked.says(odd)).unwrap();
        let why = answer.get("refused").unwrap().as_str().unwrap();
        assert!(why.contains("is not one"), "{odd:.40}: {why}");
    }
    hooked.says("");
    assert_eq!(hooked.events("Pod"), []);
    // Of the pod of another: by the kernel's word, whatever the words are.
    hooked.fails(75, "of pod kube-system/other\nError: forged");
    let found = wait("an Event", || hooked.events("Pod").pop()).await;
    assert_eq!(found.0, "pod");
    assert!(!found.2.contains('\n'), "{}", found.2);
    assert!(found.2.contains("other\\nError"), "{}", found.2);
    plugin.stop().await;
}
