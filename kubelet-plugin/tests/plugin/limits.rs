//! Caps of the memory of shares: what is published and written, and the hook's questions answered.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_fake_cluster::{ClaimRef, GpuPolicy, View};
use divvy_gpu_sim::{Fault, LimitBackend};
use divvy_kubelet_plugin::Config;
use divvy_model::{CudaVersion, GpuDriver, GpuErrorCode, GpuOp};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, OpaqueDeviceConfiguration, ResourceClaim, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};

use crate::node::{DRIVER, Node, PATIENCE, POOL, Plugin, wait};

mod promises;

const GIB: u64 = 1 << 30;
const POD: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";

/// Gives a node a driver that caps memory by `misc`, and the group of a pod. Returns the flags with
/// which a plugin caps there.
pub(crate) fn able(node: &Node, pod: &str) -> [String; 9] {
    let cuda = CudaVersion {
        major: 13,
        minor: 4,
    };
    node.sim.edit(|e| e.set_driver_version("615.71.09", cuda));
    let root = node.dir.path().join("cgroup");
    let group = root.join(format!("kubepods/pod{pod}"));
    fs_err::create_dir_all(&group).unwrap();
    for folder in group.ancestors().take(3) {
        fs_err::write(folder.join("cgroup.controllers"), "misc").unwrap();
    }
    let program = node.dir.path().join("hook");
    fs_err::write(&program, "#!/bin/true").unwrap();
    let text = |path: PathBuf| path.display().to_string();
    [
        "--memory-caps=true".to_owned(),
        "--library-delivery".to_owned(),
        "hook".to_owned(),
        "--hook-path".to_owned(),
        text(program),
        "--hook-dir".to_owned(),
        text(node.dir.path().join("opt")),
        "--cgroup-root".to_owned(),
        text(root),
    ]
}

/// A node with a driver that caps memory, and control groups.
struct Capped {
    node: Node,
    backend: LimitBackend,
}

impl Capped {
    fn new(backend: LimitBackend) -> Self {
        let node = Node::new("h100x1");
        let cuda = CudaVersion {
            major: 13,
            minor: 4,
        };
        node.sim.edit(|e| {
            e.set_driver_version("615.71.09", cuda);
            e.limits.backend = backend;
        });
        let burst = json!({ "burst": { "memory": "2x" } });
        let rule = json!({ "modes": ["Whole", "TimeSlicing"], "shares": burst });
        node.api
            .put(&GpuPolicy::new("shares", json!({ "rules": [rule] })))
            .unwrap();
        let capped = Self { node, backend };
        capped.group("");
        capped
    }

    fn groups(&self) -> PathBuf {
        self.node.dir.path().join("cgroup")
    }

    /// Makes a group with the controllers of the backend.
    fn group(&self, path: &str) -> PathBuf {
        let list = match self.backend {
            LimitBackend::Misc => "cpu misc",
            LimitBackend::Dmem => "cpu dmem misc",
        };
        let group = self.groups().join(path);
        fs_err::create_dir_all(&group).unwrap();
        fs_err::write(group.join("cgroup.controllers"), list).unwrap();
        if self.backend == LimitBackend::Dmem {
            let capacity = "nvidia/0000:06:00.0/vidmem 85899345920\n";
            fs_err::write(group.join("dmem.capacity"), capacity).unwrap();
        }
        group
    }

    fn pod_path() -> String {
        format!("kubepods/pod{POD}")
    }

    /// Makes a container's group and its process, which is about to start.
    fn container(&self, name: &str, pid: u32) {
        self.group("kubepods");
        self.group(&Self::pod_path());
        let leaf = format!("{}/{name}", Self::pod_path());
        self.group(&leaf);
        let proc = self.node.dir.path().join(format!("host/proc/{pid}"));
        fs_err::create_dir_all(&proc).unwrap();
        fs_err::write(proc.join("cgroup"), format!("0::/{leaf}\n")).unwrap();
    }

    fn config(&self) -> Config {
        self.config_with("true")
    }

    fn config_with(&self, memory_caps: &str) -> Config {
        let program = self.node.dir.path().join("hook");
        fs_err::write(&program, "#!/bin/true").unwrap();
        let folder = self.node.dir.path().join("opt");
        let groups = self.groups();
        let mut config = self.node.config(&[
            "--library-delivery",
            "hook",
            "--hook-path",
            program.to_str().unwrap(),
            "--hook-dir",
            folder.to_str().unwrap(),
            "--memory-caps",
            memory_caps,
            "--cgroup-root",
            groups.to_str().unwrap(),
        ]);
        config.timing.caps = Duration::from_millis(50);
        config
    }

    async fn start(&self) -> Plugin {
        let plugin = self.node.start_with(self.config());
        plugin.wait_ready().await;
        let is_capped = || (level(&self.node)? == "cgroup").then_some(());
        wait("the level", is_capped).await;
        plugin
    }

    /// A plugin on such a node, with a prepared claim of a share of 2 GiB.
    async fn prepared() -> (Self, Plugin, ClaimRef) {
        let capped = Self::new(LimitBackend::Misc);
        let plugin = capped.start().await;
        let claim = capped.share("c", 2);
        capped.node.prepare(&claim).await.unwrap();
        (capped, plugin, claim)
    }

    /// A claim of a share with so much memory.
    fn share(&self, name: &str, gib: u64) -> ClaimRef {
        self.share_allocated(name, gib, None)
    }

    /// Returns the GPU's file, as far as it is about the promise of caps.
    fn promise(&self) -> String {
        let gpu = self.node.sim.uuids().remove(0);
        let folder = self.node.kubelet.config().plugin_dir(DRIVER).join("gpus");
        let text = fs_err::read_to_string(folder.join(format!("{gpu}.json")));
        let file: Value = serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
        file.pointer("/body/grant/caps")
            .map_or_else(String::new, Value::to_string)
    }

    /// A claim of a share with so much memory, and a limit.
    fn limited(&self, name: &str, gib: u64, limit: &str) -> ClaimRef {
        let reference = self.share(name, gib);
        let mut claim = self.node.api.get::<ResourceClaim>("default", name).unwrap();
        let limits = json!({ "memory": limit });
        let parameters =
            json!({ "apiVersion": "divvy.dev/v1beta1", "kind": "ShareConfig", "limits": limits });
        let config = DeviceAllocationConfiguration {
            source: "FromClaim".to_owned(),
            requests: None,
            opaque: Some(OpaqueDeviceConfiguration {
                driver: DRIVER.to_owned(),
                parameters: RawExtension(parameters),
            }),
        };
        let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
        allocation.devices.as_mut().unwrap().config = Some(vec![config]);
        self.node.api.put(&claim).unwrap();
        reference
    }

    /// A claim of a share whose allocation has this time.
    fn share_allocated(&self, name: &str, gib: u64, at: Option<Time>) -> ClaimRef {
        let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0-ts");
        let granted = [
            ("memory", format!("{gib}Gi")),
            ("cores", "1".to_owned()),
            ("slots", "1".to_owned()),
        ];
        let granted = granted.map(|(name, amount)| (name.to_owned(), Quantity(amount)));
        result.share_id = Some(format!("s-{name}"));
        result.consumed_capacity = Some(BTreeMap::from(granted));
        let mut claim = allocated(mk_claim("default", name, DRIVER, 1), vec![result]);
        let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
        allocation.allocation_timestamp = at;
        self.node.put(claim)
    }

    /// A claim of a share that is made and allocated so much later than now.
    fn share_after(&self, name: &str, later: SignedDuration) -> ClaimRef {
        self.node.api.set_clock_ahead(later);
        self.share_allocated(name, 2, Some(Time(self.node.api.time())))
    }

    /// The hook's question for a claim, whose CDI file has one device, and the answer.
    fn ask(&self, claim: &ClaimRef, pid: u32) -> Value {
        let (_, device) = self.hook(claim);
        self.ask_for(&claim.uid, &device, pid)
    }

    fn ask_for(&self, claim: &str, device: &str, pid: u32) -> Value {
        let mut stream = UnixStream::connect(self.config().hook_socket()).unwrap();
        let question = json!({ "claim": claim, "device": device, "pid": pid, "container": "c" });
        stream
            .write_all(format!("{question}\n").as_bytes())
            .unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    /// The call in the CDI file of a claim, and the device it is of.
    fn hook(&self, claim: &ClaimRef) -> (Vec<String>, String) {
        let files = self.node.cdi_files();
        let file = files.iter().find(|(name, _)| name.contains(&claim.uid));
        let file = file.unwrap().1;
        let at = |pointer: &str| file.pointer(pointer).unwrap().clone();
        let hooks = at("/devices/0/containerEdits/hooks");
        let of_runtime =
            |hook: &&Value| hook.get("hookName").unwrap().as_str() == Some("createRuntime");
        let hook = hooks.as_array().unwrap().iter().find(of_runtime).unwrap();
        let args = hook.get("args").unwrap().as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        (args.map(text).collect(), text(&at("/devices/0/name")))
    }

    /// The limit that the driver says for a group.
    fn limit(&self, path: &str) -> Option<u64> {
        let gpu = self.node.sim.uuids().remove(0);
        let limit = self.node.sim.memory_limit(&gpu, &self.groups().join(path));
        limit.ok()?.hard
    }

    fn ledgers(&self) -> usize {
        let folder = self.config().own_run_dir().join("caps");
        fs_err::read_dir(folder).map_or(0, Iterator::count)
    }
}

/// The note of an Event about a claim.
fn event(node: &Node, reason: &str, claim: &str) -> Option<String> {
    let mut events = node.api.list::<Event>().into_iter();
    let found = events.find(|event| {
        let about = event.regarding.as_ref().and_then(|of| of.name.as_deref());
        event.reason.as_deref() == Some(reason) && about == Some(claim)
    });
    found?.note
}

fn level(node: &Node) -> Option<String> {
    let slices = node.api.list::<ResourceSlice>();
    let mut devices = slices
        .iter()
        .filter_map(|s| s.spec.devices.as_ref())
        .flatten();
    let share = devices.find(|device| device.name == "gpu-0-ts")?;
    share
        .attributes
        .as_ref()?
        .get("memoryEnforcement")?
        .string
        .clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_say_what_caps_them_and_an_older_driver_says_none() {
    let capped = Capped::new(LimitBackend::Misc);
    let plugin = capped.start().await;
    // The driver is exchanged for an older one: nothing is promised any more.
    let claim = capped.share("c", 2);
    capped.node.prepare(&claim).await.unwrap();
    let cuda = CudaVersion {
        major: 13,
        minor: 3,
    };
    capped
        .node
        .sim
        .edit(|e| e.set_driver_version("610.10.01", cuda));
    wait("the level", || {
        (level(&capped.node)? == "none").then_some(())
    })
    .await;
    let has_ended = || capped.promise().contains("ended").then_some(());
    wait("the end of the promise", has_ended).await;
    let older = capped.share_after("older", SignedDuration::from_hours(1));
    capped.node.prepare(&older).await.unwrap();
    let files = capped.node.cdi_files();
    let file = files.iter().find(|(name, _)| name.contains(&older.uid));
    assert!(!file.unwrap().1.to_string().contains("createRuntime"));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_held_to_the_sum_of_its_shares() {
    for backend in [LimitBackend::Misc, LimitBackend::Dmem] {
        let capped = Capped::new(backend);
        let plugin = capped.start().await;
        let [first, second] = ["first", "second"].map(|name| capped.share(name, 2));
        for claim in [&first, &second] {
            capped.node.prepare(claim).await.unwrap();
        }
        let (args, device) = capped.hook(&first);
        let socket = capped.config().hook_socket().display().to_string();
        let expected = [
            "divvy-cdi-hook",
            "limits",
            "--socket",
            &socket,
            "--claim",
            &first.uid,
            "--device",
            &device,
        ];
        assert_eq!(args, expected);

        let pod = Capped::pod_path();
        let sums = [
            (&first, "a", 2),
            (&first, "b", 2),
            (&first, "a", 2),
            (&second, "a", 4),
        ];
        for (pid, (claim, container, gib)) in (1..).zip(sums) {
            capped.container(container, pid);
            assert_eq!(
                capped.ask(claim, pid),
                json!({ "capped": true }),
                "{backend:?}"
            );
            assert_eq!(capped.limit(&pod), Some(gib * GIB), "{backend:?}");
            let leaf = capped.limit(&format!("{pod}/{container}"));
            assert_eq!(leaf, Some(gib * GIB), "{backend:?}: what the program sees");
        }

        // Driver and plugin begin anew; the pod runs on.
        plugin.kill().await;
        capped.node.sim.edit(divvy_gpu_sim::Engine::forget_limits);
        let plugin = capped.start().await;
        wait("the cap again", || capped.limit(&pod)).await;
        assert_eq!(capped.limit(&pod), Some(4 * GIB), "{backend:?}");
        for claim in ["first", "second"] {
            wait("an Event on the claim", || {
                let note = event(&capped.node, "LimitRestored", claim)?;
                assert!(note.contains("capped at 4096 MiB"), "{note}");
                Some(())
            })
            .await;
        }
        for claim in [&first, &second] {
            capped.node.unprepare(claim).await.unwrap();
        }
        assert_eq!(
            capped.limit(&pod),
            Some(4 * GIB),
            "its containers may still end"
        );
        fs_err::remove_dir_all(capped.groups().join(&pod)).unwrap();
        wait("the end of the ledger", || {
            (capped.ledgers() == 0).then_some(())
        })
        .await;
        plugin.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_without_its_cap_is_refused_with_the_reason() {
    let (capped, plugin, claim) = Capped::prepared().await;
    let (_, device) = capped.hook(&claim);
    let refusal = |answer: Value, kind: &str| {
        let text = answer.get(kind).and_then(Value::as_str);
        text.unwrap_or_else(|| panic!("{answer}")).to_owned()
    };
    // A process of no pod.
    let proc = capped.node.dir.path().join("host/proc/7");
    fs_err::create_dir_all(&proc).unwrap();
    fs_err::write(proc.join("cgroup"), "0::/system.slice/x.service\n").unwrap();
    let why = refusal(capped.ask(&claim, 7), "refused");
    assert!(
        why.contains("process 7 is in no pod's control group"),
        "{why}"
    );
    // Another device, and another claim.
    capped.container("a", 1);
    for (uid, device) in [(&*claim.uid, "gpu-9"), (POD, &*device)] {
        let why = refusal(capped.ask_for(uid, device, 1), "refused");
        assert!(why.contains("no share"), "{why}");
    }
    // The controller is not switched on for the pod.
    let list = capped
        .groups()
        .join(Capped::pod_path())
        .join("cgroup.controllers");
    fs_err::write(&list, "cpu").unwrap();
    let why = refusal(capped.ask(&claim, 1), "refused");
    assert!(
        why.contains("the controller misc is not switched on"),
        "{why}"
    );
    capped.container("a", 1);
    // The driver fails; then it does not.
    let fault = Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::SetMemoryLimit);
    capped.node.sim.fault(fault.times(1));
    let why = refusal(capped.ask(&claim, 1), "failed");
    assert!(why.contains("failed to cap the memory of"), "{why}");
    let events = || {
        let events = capped.node.api.list::<Event>().into_iter();
        let ours = events.filter(|event| event.reason.as_deref() == Some("MemoryCapFailed"));
        ours.filter_map(|event| event.note)
            .find(|note| note.contains("failed to cap"))
    };
    wait("an Event on the claim", events).await;
    assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
    plugin.stop().await;
}

/// An entry that an earlier group left at the address of the container's comes before the pod's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_entry_below_the_pod_does_not_hide_its_cap() {
    let (capped, plugin, claim) = Capped::prepared().await;
    capped.container("a", 1);
    let leaf = format!("{}/a", Capped::pod_path());
    let gpu = capped.node.sim.uuids().remove(0);
    let path = capped.groups().join(&leaf);
    // As an entry that was cleared: it stays, without a limit. Another has the very amount.
    for stale in [None, Some(2 * GIB)] {
        capped
            .node
            .sim
            .set_memory_limit(&gpu, &path, stale)
            .unwrap();
        assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
        assert_eq!(capped.limit(&leaf), Some(2 * GIB));
    }
    // A second share raises what hides the pod's cap, too.
    let second = capped.share("d", 2);
    capped.node.prepare(&second).await.unwrap();
    assert_eq!(capped.ask(&second, 1), json!({ "capped": true }));
    assert_eq!(capped.limit(&leaf), Some(4 * GIB));
    plugin.stop().await;
}

/// The socket of an instance that ends is bound again by one that still runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_socket_is_there_while_any_instance_runs() {
    let (capped, plugin, claim) = Capped::prepared().await;
    capped.container("a", 1);
    let socket = capped.config().hook_socket();
    for leaves_its_file in [false, true] {
        fs_err::remove_file(&socket).unwrap();
        if leaves_its_file {
            // The last instance took the socket and was killed.
            drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        }
        wait("the socket", || UnixStream::connect(&socket).ok()).await;
        assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
    }
    plugin.stop().await;
}

/// Switched off, nothing is capped but what was promised before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn switched_off_an_earlier_claim_keeps_its_cap_until_it_ends() {
    let (capped, plugin, claim) = Capped::prepared().await;
    capped.container("a", 1);
    assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
    plugin.stop().await;
    let socket = capped.config().hook_socket();
    let plugin = capped.node.start_with(capped.config_with("false"));
    wait("the socket", || UnixStream::connect(&socket).ok()).await;
    assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
    wait("the level", || {
        (level(&capped.node)? == "none").then_some(())
    })
    .await;
    capped.node.unprepare(&claim).await.unwrap();
    fs_err::remove_dir_all(capped.groups().join(Capped::pod_path())).unwrap();
    wait("the end of the cap", || {
        (capped.ledgers() == 0).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// Nothing that a prepare needs is asked of the API but the claim itself, on a node that caps
/// nothing, on one that does, and on one that lost it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prepare_asks_the_api_for_its_claim_and_nothing_else() {
    let capped = Capped::new(LimitBackend::Misc);
    for (round, caps) in ["false", "true", "false"].into_iter().enumerate() {
        let later = i64::try_from(round + 1).unwrap();
        // Nothing in the background reads the claim meanwhile: no round that checks it, and no
        // report of use that looks for conditions of an earlier instance.
        let mut config = capped.config_with(caps);
        config.timing.reconcile = Duration::from_hours(1);
        config.idle_after = None;
        let plugin = capped.node.start_with(config);
        plugin.wait_ready().await;
        let expected = if caps == "true" { "cgroup" } else { "none" };
        let is_so = || (level(&capped.node)? == expected).then_some(());
        wait("the level", is_so).await;
        if round == 2 {
            let has_ended = || capped.promise().contains("ended").then_some(());
            wait("the end of the promise", has_ended).await;
        }
        for device in ["share", "whole"] {
            let name = format!("{device}-{round}");
            let claim = match device {
                // Long after what the rounds before have promised.
                "share" => capped.share_after(&name, SignedDuration::from_hours(later)),
                _ => capped.node.claim(&name, &["gpu-0"]),
            };
            let api = &capped.node.api;
            api.forget_requests();
            capped.node.prepare(&claim).await.unwrap();
            // Tasks in the background list claims, and read the node and the slices.
            let of_claims = ["resourceclaims", "deviceclasses"];
            let read = |seen: &View<'_>| Some(seen.requests());
            let mut reads = api.wait_for(read, PATIENCE).await.unwrap();
            reads.retain(|read| read.verb == "get" && of_claims.contains(&&*read.resource));
            let reads: Vec<_> = reads.into_iter().map(|read| read.name).collect();
            assert_eq!(reads, [name]);
            assert_eq!(api.count("*", "deviceclasses"), 0);
            capped.node.unprepare(&claim).await.unwrap();
        }
        plugin.stop().await;
    }
}

/// A node may fall below what it published while a claim waits for another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_that_waits_while_its_cap_is_lost_is_refused() {
    let capped = Capped::new(LimitBackend::Misc);
    let mut config = capped.config();
    config.timing.call = PATIENCE;
    config.timing.executor.hand_over = PATIENCE;
    let plugin = capped.node.start_with(config);
    plugin.wait_ready().await;
    let becomes = async |expected: &str| {
        let is_so = || (level(&capped.node)? == expected).then_some(());
        wait("the level", is_so).await;
    };
    becomes("cgroup").await;
    let holder = capped.node.claim("holder", &["gpu-0"]);
    capped.node.prepare(&holder).await.unwrap();
    // Force-deleted: the kubelet releases it later.
    let api = &capped.node.api;
    api.delete::<ResourceClaim>("default", "holder").unwrap();
    let claim = capped.share("c", 2);
    let read = || api.count("get", "resourceclaims");
    let before = read();
    let falls = async {
        wait("the claim", || (read() > before).then_some(())).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let cuda = CudaVersion {
            major: 13,
            minor: 3,
        };
        let sim = &capped.node.sim;
        sim.edit(|e| e.set_driver_version("610.10.01", cuda));
        becomes("none").await;
        capped.node.unprepare(&holder).await
    };
    let (answer, left) = tokio::join!(capped.node.prepare(&claim), falls);
    left.unwrap();
    let why = answer.unwrap_err();
    assert!(why.contains("older than R615"), "{why}");
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_share_is_capped_at_its_limit_which_its_container_is_given() {
    let capped = Capped::new(LimitBackend::Misc);
    let plugin = capped.start().await;
    let claim = capped.limited("c", 2, "3Gi");
    capped.node.prepare(&claim).await.unwrap();
    capped.container("a", 1);
    assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
    assert_eq!(capped.limit(&Capped::pod_path()), Some(3 * GIB));
    let files = capped.node.cdi_files();
    let file = files.iter().find(|(name, _)| name.contains(&claim.uid));
    let file = file.unwrap().1.to_string();
    for variable in [
        format!("DIVVY_MEMORY_GPU_0_TS={}", 2 * GIB),
        format!("DIVVY_MEMORY_LIMIT_GPU_0_TS={}", 3 * GIB),
        // The hook of NVIDIA's toolkit would set the same.
        "NVIDIA_GPU_MEMORY_REQUEST=0".to_owned(),
        "NVIDIA_GPU_MEMORY_LIMIT=3072".to_owned(),
    ] {
        assert!(
            file.contains(&format!("\"{variable}\"")),
            "{variable}: {file}"
        );
    }
    for (name, limit, category) in [
        (
            "d",
            "1Gi",
            "is below the 2Gi that its share has been granted",
        ),
        (
            "e",
            "5Gi",
            "is above 4Gi, the most that the policy of its GPU allows",
        ),
        (
            "f",
            "90Gi",
            "is above the 81559Mi that all shares of its GPU have together",
        ),
    ] {
        let claim = capped.limited(name, 2, limit);
        let why = capped.node.prepare(&claim).await.unwrap_err();
        assert!(why.contains(category), "{why}");
    }
    plugin.stop().await;
}

/// Where limits of groups that are gone stay, one may be in the way of a program with all of a GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_gpu_calls_the_hook_only_where_limits_linger() {
    for (backend, calls) in [(LimitBackend::Misc, true), (LimitBackend::Dmem, false)] {
        let capped = Capped::new(backend);
        let plugin = capped.start().await;
        let result = mk_result("gpu", DRIVER, POOL, "gpu-0");
        let claim = mk_claim("default", "w", DRIVER, 1);
        let claim = capped.node.put(allocated(claim, vec![result]));
        capped.node.prepare(&claim).await.unwrap();
        let files = capped.node.cdi_files();
        let file = files.iter().find(|(name, _)| name.contains(&claim.uid));
        let file = file.unwrap().1.to_string();
        assert_eq!(file.contains("createRuntime"), calls, "{backend:?}");
        if calls {
            capped.container("a", 1);
            let leaf = format!("{}/a", Capped::pod_path());
            let (gpu, path) = (
                capped.node.sim.uuids().remove(0),
                capped.groups().join(&leaf),
            );
            let sim = &capped.node.sim;
            sim.set_memory_limit(&gpu, &path, Some(GIB)).unwrap();
            assert_eq!(capped.ask(&claim, 1), json!({ "capped": true }));
            assert_eq!(capped.limit(&leaf), None);
        }
        plugin.stop().await;
    }
}
