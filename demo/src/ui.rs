//! The examples on the page of `divvy ui`, at a pace that a person can follow, over and over.
//! Everything on the page is read from the demo's API server as from a real one, but for the
//! figures of use: no process runs here.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_fake_cluster::{FakeApi, GpuNode, build};
use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;

use super::examples::{Example, Stay};
use super::start::Gpus;
use super::workload::Consumer;
use super::world::PATIENCE;
use divvy_cli::format;
use divvy_cli::status::read::{ClaimsWanted, PodWanted, SlicesWanted, Wanted};
use divvy_cli::ui::{Page, Reading, Source};
use divvy_cli::usage::Usage;
use divvy_cli::view::{self, View};

/// Time between two looks at the demo's API server.
const EVERY: Duration = Duration::from_millis(300);
/// Time to see a pod get its devices.
const STEP: Duration = Duration::from_millis(1500);
/// Time to read what all pods of an example got.
const SCENE: Duration = Duration::from_secs(5);
/// Seconds after which a claim is shown as idle: an example is gone before it could be ten minutes.
const IDLE: u64 = 3;

/// Plays until it is interrupted.
pub(super) async fn play(gpus: &Gpus, stays: &[Stay]) -> Result<ExitCode> {
    let show = Show(Some(Arc::default()));
    let page = Page::new(show.source(), EVERY);
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let served = divvy_cli::ui::open(page.clone(), listen, &[], true).await?;
    let played = async {
        page.watched().await;
        loop {
            for problem in super::perform(gpus, stays, &show).await?.problems() {
                format::talk(&format!("divvy demo: {problem}"));
            }
        }
    };
    tokio::select! {
        () = served => Ok(ExitCode::SUCCESS),
        failed = played => failed,
    }
}

/// The page, if there is one: without it nothing here does anything.
#[derive(Clone, Default)]
pub(super) struct Show(Option<Arc<watch::Sender<Scene>>>);

/// Example that is being played, and its API server.
#[derive(Default)]
struct Scene {
    api: Option<FakeApi>,
    driver: &'static str,
    caption: String,
}

impl Show {
    fn source(&self) -> Source {
        let scene = self.0.as_ref().map(|scene| scene.subscribe());
        Box::new(move || {
            let scene = scene.clone();
            async move {
                let mut scene = scene.context("a demo without a page")?;
                let (api, driver, caption) = {
                    let scene = scene.wait_for(|scene| scene.api.is_some()).await?;
                    (
                        scene.api.clone().context("no node yet")?,
                        scene.driver,
                        scene.caption.clone(),
                    )
                };
                let wanted = Wanted {
                    driver: Some(driver),
                    claims: ClaimsWanted::Waiting,
                    events: false,
                    policies: false,
                    plugins: false,
                    namespace: "default",
                    pod: PodWanted::No,
                    slices: SlicesWanted::All,
                };
                let snapshot = divvy_cli::status::read::read(&api.client(), wanted).await?;
                let usage = usage(&view::of(&snapshot, &Usage::default()));
                Ok(Reading {
                    snapshot,
                    usage,
                    caption: Some(caption),
                    cluster: Some("demo, in one process".to_owned()),
                })
            }
            .boxed()
        })
    }

    /// Another example begins.
    pub(super) fn begin(&self, api: &FakeApi, driver: &'static str, example: &Example) {
        let Some(scene) = &self.0 else { return };
        let title = example
            .title
            .as_deref()
            .map_or_else(String::new, |title| format!(": {title}"));
        let title = title.trim_end_matches('.');
        let caption = format!(
            "Example {}{title}. The GPUs are simulated, and what claims use of them is made up; everything else is the \
             real driver's work.",
            example.name
        );
        scene.send_modify(|scene| {
            *scene = Scene {
                api: Some(api.clone()),
                driver,
                caption,
            }
        });
    }

    /// A pod got its devices, or waits for them.
    pub(super) async fn placed(
        &self,
        api: &FakeApi,
        consumer: &Consumer,
        waits: bool,
    ) -> Result<()> {
        let (Some(_), Some(name)) = (&self.0, &consumer.pod) else {
            return Ok(());
        };
        if waits {
            let claims: Vec<&str> = consumer.claims.iter().map(String::as_str).collect();
            let status = PodStatus {
                phase: Some("Pending".to_owned()),
                ..PodStatus::default()
            };
            let pod = build::mk_pod(&consumer.namespace, name, None, &claims);
            api.put(&Pod {
                status: Some(status),
                ..pod
            })
            .context("a pod of the demo")?;
        } else if api.get::<Pod>(&consumer.namespace, name).is_some() {
            api.delete::<Pod>(&consumer.namespace, name)
                .context("a pod of the demo")?;
        }
        tokio::time::sleep(STEP).await;
        Ok(())
    }

    /// All of the example is to be seen.
    pub(super) async fn scene(&self) {
        if self.0.is_some() {
            tokio::time::sleep(SCENE).await;
        }
    }

    /// Waits until the node reports that everything was given back.
    pub(super) async fn end(&self, api: &FakeApi) -> Result<()> {
        if self.0.is_none() {
            return Ok(());
        }
        for pod in api.list::<Pod>() {
            let meta = pod.metadata;
            api.delete::<Pod>(
                &meta.namespace.unwrap_or_default(),
                &meta.name.unwrap_or_default(),
            )?;
        }
        let held = |node: &GpuNode| node.status.to_string().contains("\"holders\"");
        let empty = api
            .wait_until(|seen| !seen.list::<GpuNode>().iter().any(held), PATIENCE)
            .await;
        empty.context("the node still reports claims that were given back")?;
        tokio::time::sleep(STEP).await;
        Ok(())
    }
}

/// Figures that show what the page can: busy, idle, unknown, over the grant. Written as a plugin
/// serves them.
fn usage(view: &View) -> Usage {
    const MIB: u64 = 1 << 20;
    let mut served = String::new();
    for node in &view.nodes {
        for gpu in &node.gpus {
            let mut in_use = 600 * MIB;
            for hold in &gpu.holds {
                // A container that does not run yet, or no longer, uses nothing.
                let Some(granted) = hold
                    .usage
                    .memory_granted
                    .filter(|_| hold.phase == "prepared")
                else {
                    continue;
                };
                let kind = hold.claim.bytes().map(u64::from).sum::<u64>() % 8;
                let (percent, busy) = match kind {
                    0 => (62, 0.7),
                    1 => (88, 0.96),
                    2 => (9, 0.0),
                    3 => (35, 0.2),
                    4 => continue,
                    5 => (95, 0.55),
                    6 if hold.part.starts_with("share") => (112, 0.8),
                    _ => (48, 0.33),
                };
                // No longer than the claim has the device, which `divvy status` shows beside it.
                let idle = if kind == 2 {
                    seconds_since(&view.now, hold.since.as_deref())
                } else {
                    0
                };
                let used = granted / 100 * percent;
                in_use += used;
                let labels = format!(
                    "namespace=\"{}\",claim=\"{}\",device=\"{}\",UUID=\"{}\"",
                    hold.namespace, hold.claim, hold.device, gpu.uuid
                );
                for (name, value) in [
                    ("memory_used_bytes", used.to_string()),
                    ("utilization_ratio", busy.to_string()),
                    ("idle_seconds", idle.to_string()),
                    ("overuse", u8::from(percent > 100).to_string()),
                ] {
                    served += &format!("divvy_claim_{name}{{{labels}}} {value}\n");
                }
            }
            served += &format!(
                "divvy_gpu_memory_used_bytes{{UUID=\"{}\"}} {in_use}\n",
                gpu.uuid
            );
        }
    }
    let mut usage = Usage::default();
    usage.add(&served);
    usage.idle_after = Some(IDLE);
    usage
}

/// Returns the seconds from a time to another; 0 if one of them is not known.
fn seconds_since(now: &str, since: Option<&str>) -> u64 {
    let time = |text: &str| text.parse::<Timestamp>().ok();
    time(now)
        .zip(since.and_then(time))
        .and_then(|(now, since)| u64::try_from(now.duration_since(since).as_secs()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_cli::usage::{ClaimUsage, GpuUsage};
    use divvy_cli::view::{GpuView, Hold, NodeView};

    #[test]
    fn made_up_idleness_is_as_long_as_the_claim_has_had_the_device() {
        let hold = |claim: &str| Hold {
            namespace: "a".to_owned(),
            claim: claim.to_owned(),
            pods: Vec::new(),
            device: "gpu-0".to_owned(),
            part: "whole".to_owned(),
            place: None,
            within: None,
            phase: "prepared".to_owned(),
            since: Some("2026-11-21T20:00:00Z".to_owned()),
            usage: ClaimUsage {
                memory_granted: Some(1 << 30),
                ..ClaimUsage::default()
            },
            wasted: None,
            idle: false,
        };
        let claims = ["a", "b", "c", "d", "e", "f", "g", "h"];
        let gpu = GpuView {
            name: "gpu-0".to_owned(),
            uuid: "GPU-1".to_owned(),
            product: String::new(),
            mode: String::new(),
            troubles: Vec::new(),
            memory: None,
            usage: GpuUsage::default(),
            holds: claims.map(hold).to_vec(),
        };
        let view = View {
            now: "2026-11-21T20:00:07Z".to_owned(),
            caption: None,
            cluster: None,
            empty: None,
            free: None,
            nodes: vec![NodeView {
                name: "n".to_owned(),
                free: 0,
                trouble: String::new(),
                driver: String::new(),
                gpus: vec![gpu],
            }],
            troubles: Vec::new(),
            refused: Vec::new(),
            waiting: Vec::new(),
            unread: Vec::new(),
        };
        let made_up = usage(&view);
        let mut idle: Vec<u64> = claims
            .iter()
            .filter_map(|claim| made_up.of_claim("GPU-1", "a", claim, "gpu-0").idle_seconds)
            .collect();
        idle.sort_unstable();
        assert_eq!(idle, [0, 0, 0, 0, 0, 0, 7]);
    }
}
