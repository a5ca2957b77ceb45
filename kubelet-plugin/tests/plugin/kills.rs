//! The real plugin process with the mock library, killed at random moments of preparing and
//! unpreparing partitions. Its GPUs, like real ones, stay as they are. Nothing may leak, and no
//! intervention may be needed.
//!
//! More kills than the default: `DIVVY_KILLS=300 cargo test -p divvy-kubelet-plugin --test plugin
//! kills -- --nocapture`.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_fake_cluster::ClaimRef;
use divvy_gpu_sim::MigLatency;
use k8s_openapi::api::resource::v1::ResourceClaim;
use nvidia_ml::MockState;
use rustix::process::Signal;
use tokio::time::Instant;

use crate::binary::{Process, mock_state};
use crate::node::{DRIVER, Node, PATIENCE, wait};

/// Shapes that a GPU takes one after another: partitions, all of it, other partitions.
const SHAPES: [&[&str]; 4] = [
    &["mig-1g10gb-19-0", "mig-2g20gb-14-2", "mig-3g40gb-9-4"],
    &[""],
    &["mig-4g40gb-5-0", "mig-1g10gb-19-4", "mig-1g20gb-15-6"],
    &["mig-7g80gb-0-0"],
];

/// Numbers that look random and are the same every time.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Calls until it works, as the kubelet does, through however many processes that takes.
pub(crate) async fn until_done(what: &str, mut call: impl AsyncFnMut() -> Result<(), String>) {
    let until = Instant::now() + PATIENCE * 2;
    while let Err(error) = call().await {
        assert!(Instant::now() < until, "{what} never worked: {error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) async fn prepare(node: &Node, claim: &ClaimRef) -> Result<(), String> {
    let answers = node
        .kubelet
        .prepare(DRIVER, std::slice::from_ref(claim))
        .await;
    let mut answers = answers.map_err(|error| error.to_string())?;
    answers
        .remove(&claim.uid)
        .unwrap_or_else(|| Err("left out".to_owned()))
        .map(drop)
}

pub(crate) async fn unprepare(node: &Node, claim: &ClaimRef) -> Result<(), String> {
    let answers = node
        .kubelet
        .unprepare(DRIVER, std::slice::from_ref(claim))
        .await;
    let mut answers = answers.map_err(|error| error.to_string())?;
    answers
        .remove(&claim.uid)
        .unwrap_or_else(|| Err("left out".to_owned()))
}

/// Prepares and undoes a claim. Some give up in between, as a pod deleted while it starts does.
async fn life(node: &Node, claim: &ClaimRef, patient: bool) {
    if patient {
        until_done("prepare", async || prepare(node, claim).await).await;
    } else {
        let _whatever = prepare(node, claim).await;
    }
    until_done("unprepare", async || unprepare(node, claim).await).await;
    node.api
        .delete::<ResourceClaim>("default", &claim.name)
        .unwrap();
}

/// Kills and starts the plugin, again and again, until so many kills have been done, at most so
/// many milliseconds apart.
pub(crate) async fn killer(
    node: &Node,
    kubeconfig: &str,
    kills: u64,
    longest: u64,
    dice: &mut Dice,
) -> Process {
    let mut process = start(node, kubeconfig);
    for _ in 0..kills {
        // From before it is registered to in the middle of several claims.
        tokio::time::sleep(Duration::from_millis(40 + dice.below(longest))).await;
        process.signal(Signal::KILL);
        process.end().await;
        process = start(node, kubeconfig);
    }
    process
}

fn start(node: &Node, kubeconfig: &str) -> Process {
    Process::start_with(
        node,
        kubeconfig,
        &[("OFFER", "everything"), ("LOG_LEVEL", "error")],
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[expect(clippy::too_many_lines, reason = "one story")]
async fn a_plugin_killed_at_any_moment_leaks_nothing_and_needs_no_hand() {
    let kills = std::env::var("DIVVY_KILLS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(20);
    let node = Node::new("h100x2");
    let state = MockState::open_or_create(mock_state(&node), &"h100x2".parse().unwrap()).unwrap();
    // Long enough for kills to land in every call.
    state
        .edit(|engine| {
            engine.latency = MigLatency {
                create_ms: 30,
                destroy_ms: 30,
                mode_ms: 20,
            }
        })
        .unwrap();
    let server = node.api.serve_http().await.unwrap();
    let kubeconfig = server.kubeconfig();
    let begun = Instant::now();
    let over = tokio_util::sync::CancellationToken::new();

    let lives = async |gpu: usize| {
        let mut dice = Dice(0x9e37_79b9 + gpu as u64);
        let mut lived = 0_u64;
        for (round, shape) in SHAPES.iter().cycle().enumerate() {
            if over.is_cancelled() {
                break;
            }
            let claims: Vec<_> = shape
                .iter()
                .map(|part| {
                    let device = format!("gpu-{gpu}-{part}");
                    node.claim(
                        &format!("c{gpu}-{round}-{part}"),
                        &[device.trim_end_matches('-')],
                    )
                })
                .collect();
            let patient: Vec<bool> = claims.iter().map(|_| dice.below(4) > 0).collect();
            let each = claims
                .iter()
                .zip(patient)
                .map(|(claim, patient)| life(&node, claim, patient));
            futures::future::join_all(each).await;
            lived += claims.len() as u64;
        }
        lived
    };
    let kill = async {
        let mut dice = Dice(0x2545_f491);
        let process = killer(&node, &kubeconfig, kills, 400, &mut dice).await;
        over.cancel();
        process
    };
    let (mut process, first, second) = tokio::join!(kill, lives(0), lives(1));

    // Everything was given back: the last process alone clears away what is still there, by itself.
    let left = || {
        let instances: Vec<_> = state
            .read()
            .unwrap()
            .gpus()
            .iter()
            .flat_map(|gpu| gpu.instances.clone())
            .collect();
        let files = node.cdi_files().into_keys().chain(node.records());
        let files: BTreeSet<String> = files.collect();
        (instances, files)
    };
    let until = Instant::now() + PATIENCE;
    while left() != (vec![], BTreeSet::new()) {
        assert!(
            Instant::now() < until,
            "left: {:?}\n{:#?}",
            left(),
            node.record_texts()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for gpu in 0..2 {
        for device in [format!("gpu-{gpu}"), format!("gpu-{gpu}-mig-1g10gb-19-6")] {
            let claim = node.claim(&format!("last-{device}"), &[&device]);
            until_done("a last prepare", async || prepare(&node, &claim).await).await;
            until_done("a last unprepare", async || unprepare(&node, &claim).await).await;
            node.api
                .delete::<ResourceClaim>("default", &claim.name)
                .unwrap();
        }
    }
    wait("no taints", || {
        node.published()
            .iter()
            .all(|(_, taints)| taints.is_empty())
            .then_some(())
    })
    .await;
    assert_eq!(left(), (vec![], BTreeSet::new()));
    process.signal(Signal::TERM);
    assert!(process.end().await.success());

    // Files that were being written are removed once no writer can be left.
    let dir = node.kubelet.config().plugin_dir(DRIVER).join("claims");
    for name in node.records() {
        let long_ago = std::time::SystemTime::now() - Duration::from_mins(11);
        fs_err::File::options()
            .write(true)
            .open(dir.join(name))
            .unwrap()
            .file()
            .set_modified(long_ago)
            .unwrap();
    }
    if !node.records().is_empty() {
        let mut process = start(&node, &kubeconfig);
        wait("temporary files to go", || {
            node.records().is_empty().then_some(())
        })
        .await;
        process.signal(Signal::TERM);
        assert!(process.end().await.success());
    }
    eprintln!(
        "{kills} kills, {} claims, {:.1?}",
        first + second,
        begun.elapsed()
    );
}
