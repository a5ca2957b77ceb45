//! Forty-eight claims of one GPU, as many as an MPS server takes, under kill -9 of the plugin and
//! of the supervisor. Both are processes; the GPUs are those of the mock library, which stay as
//! they are.
//!
//! More kills than the default:
//! `DIVVY_KILLS=100 cargo test -p divvy-mps-supervisor --test node kills -- --nocapture`.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use divvy_fake_cluster::ClaimRef;
use divvy_kubelet_plugin::{Args, start};
use divvy_model::ComputeMode;
use k8s_openapi::api::resource::v1::ResourceClaim;
use nvidia_ml::MockState;

use super::{DRIVER, Node, PATIENCE, PROGRAMS, process, wait};

/// Number of claims at once.
const CLAIMS: usize = 48;

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// The plugin, when this program is started as one.
#[test]
#[ignore = "a process of the test below"]
fn plugin_process() {
    let provider = rustls::crypto::ring::default_provider();
    provider.install_default().unwrap();
    start(Args::try_parse_from(["plugin"]).unwrap()).unwrap();
}

/// A process that does not outlive its test.
struct Plugin(Child);

impl Plugin {
    fn start(node: &Node, kubeconfig: &str) -> Self {
        let kubelet = node.kubelet.config();
        let dir = node.dir.path();
        let path = dir.join("kubeconfig");
        fs_err::write(&path, kubeconfig).unwrap();
        let own = std::env::current_exe().unwrap();
        let root = dir.join("h");
        let child = Command::new(&own)
            .args(["--exact", "kills::plugin_process", "--ignored"])
            .env_clear()
            .env("NODE_NAME", "n1")
            .env("LIBRARY_DELIVERY", "mounts")
            .env("HTTP_ADDR", "")
            .env("PLUGIN_DIR", kubelet.plugin_dir(DRIVER))
            .env("REGISTRY_DIR", kubelet.registry_dir())
            .env("POD_RESOURCES_SOCKET", kubelet.pod_resources_socket())
            .env("CDI_DIR", dir.join("cdi"))
            .env("HOST_ROOT", &root)
            .env("DRIVER_ROOT", &root)
            .env("HOST_DRIVER_ROOT", "/")
            .env("DEVICE_NODES", &node.host.node_table)
            .env("MPS_DIR", node.folder())
            .env("USAGE", "false")
            .env("NVML_LIBRARY", own.with_file_name("libnvidia_ml.so"))
            .env("KUBECONFIG", &path)
            .env("LOG_LEVEL", "error")
            .env("DIVVY_MOCK_STATE", dir.join("gpus.json"))
            .env("DIVVY_MOCK_GPUS", "h100x2")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    fn kill(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls until it works, as the kubelet does, through however many processes that takes.
async fn until_done(what: &str, mut call: impl AsyncFnMut() -> Result<(), String>) {
    let until = Instant::now() + PATIENCE * 4;
    while let Err(error) = call().await {
        assert!(Instant::now() < until, "{what} never worked: {error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn prepare(node: &Node, claim: &ClaimRef) -> Result<(), String> {
    let one = std::slice::from_ref(claim);
    let answers = node.kubelet.prepare(DRIVER, one).await;
    let mut answers = answers.map_err(|error| error.to_string())?;
    let answer = answers.remove(&claim.uid);
    answer
        .unwrap_or_else(|| Err("left out".to_owned()))
        .map(drop)
}

async fn unprepare(node: &Node, claim: &ClaimRef) -> Result<(), String> {
    let one = std::slice::from_ref(claim);
    let answers = node.kubelet.unprepare(DRIVER, one).await;
    let mut answers = answers.map_err(|error| error.to_string())?;
    let answer = answers.remove(&claim.uid);
    answer.unwrap_or_else(|| Err("left out".to_owned()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_eight_claims_of_a_gpu_outlive_kills_of_plugin_and_supervisor() {
    let kills = std::env::var("DIVVY_KILLS");
    let kills: u64 = kills.ok().and_then(|n| n.parse().ok()).unwrap_or(8);
    let mut node = Node::without_plugin(&PROGRAMS, u32::try_from(CLAIMS).unwrap());
    let state = node.dir.path().join("gpus.json");
    let state = MockState::open_or_create(state, &"h100x2".parse().unwrap()).unwrap();
    let server = node.api.serve_http().await.unwrap();
    let kubeconfig = server.kubeconfig();
    node.start_supervisor().await;
    let begun = Instant::now();
    let mut plugin = Plugin::start(&node, &kubeconfig);
    wait("the device", || node.device("gpu-0-mps")).await;

    // One claim stays all the while, and with it the daemon and its server.
    let anchor = node.share("anchor");
    until_done("the first prepare", async || prepare(&node, &anchor).await).await;
    let first = node.processes();
    assert_eq!(first.len(), 2, "a daemon and its server");
    let over = tokio_util::sync::CancellationToken::new();
    let (shared, stop) = (&node, &over);
    let lives = async |number: usize| {
        let mut dice = Dice(0x51ab_1e00 + number as u64);
        for round in 0_u64.. {
            let name = format!("c{number}-{round}");
            let claim = shared.share(&name);
            until_done("prepare", async || prepare(shared, &claim).await).await;
            if stop.is_cancelled() {
                return (claim, round);
            }
            tokio::time::sleep(Duration::from_millis(dice.below(300))).await;
            until_done("unprepare", async || unprepare(shared, &claim).await).await;
            shared
                .api
                .delete::<ResourceClaim>("default", &name)
                .unwrap();
        }
        unreachable!()
    };
    // The supervisor is killed by its number: the node has it.
    let mut supervisor = shared.supervisor.as_ref().unwrap().id();
    let kill = async {
        let mut dice = Dice(0x2545_f491);
        let mut others = Vec::new();
        for _ in 0..kills {
            tokio::time::sleep(Duration::from_millis(40 + dice.below(1500))).await;
            // One of them, or both at once.
            let which = dice.below(3);
            if which != 0 {
                let log = || fs_err::read_to_string(shared.dir.path().join("supervisor.log"));
                let Some(running) = process::read(supervisor) else {
                    panic!("the supervisor has ended: {}", log().unwrap())
                };
                process::kill(&running).unwrap();
                // Its folder has a lock, which ends with it.
                let is_gone = || process::read(supervisor).is_none().then_some(());
                wait("the end of the supervisor", is_gone).await;
            }
            if which != 1 {
                plugin.kill();
                plugin = Plugin::start(shared, &kubeconfig);
            }
            if which != 0 {
                let next = shared.spawn_supervisor();
                supervisor = next.id();
                others.push(next);
            }
        }
        stop.cancel();
        others
    };
    let all = futures::future::join_all((1..CLAIMS).map(lives));
    let (mut supervisors, last) = tokio::join!(kill, all);
    let rounds: u64 = last.iter().map(|(_, rounds)| rounds).sum();
    assert_eq!(last.len() + 1, CLAIMS);
    assert_eq!(node.processes(), first, "the same daemon and server");

    // One more has no place; they go in any order, and with the last one everything does.
    let late = node.share("late");
    let refused = prepare(&node, &late).await.unwrap_err();
    assert!(refused.contains("48 slots"), "{refused}");
    for (claim, _) in last.iter().rev() {
        until_done("unprepare", async || unprepare(&node, claim).await).await;
    }
    assert_eq!(node.processes(), first);
    until_done("unprepare", async || unprepare(&node, &anchor).await).await;
    wait("the end of the daemon", || {
        node.processes().is_empty().then_some(())
    })
    .await;
    let gpu = node.gpu();
    wait("the compute mode", || {
        let mode = state.edit(|engine| engine.gpu(&gpu).unwrap().facts.compute_mode);
        (mode.unwrap() == Some(ComputeMode::Default)).then_some(())
    })
    .await;
    let left = fs_err::read_dir(node.dir.path().join("cdi")).unwrap();
    assert_eq!(left.count(), 0, "CDI files");
    let folders = fs_err::read_dir(node.folder()).unwrap().flatten();
    let folders = folders.filter(|entry| entry.file_name().to_string_lossy().starts_with("GPU-"));
    assert_eq!(folders.count(), 0, "folders of daemons");
    for one in &mut supervisors {
        drop(one.kill());
        drop(one.wait());
    }
    eprintln!(
        "{kills} kills, {rounds} claims before the last {CLAIMS}, {:.1?}",
        begun.elapsed()
    );
}
