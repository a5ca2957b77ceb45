//! The receiver of a device that was made free for a pod. On a full node with a real scheduler a
//! pod of low priority ends, another comes in its place at once, as its controller makes it, others
//! of low priority wait already, and one of high priority waits for the device.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use divvy_e2e::api::at;
use divvy_e2e::parts::version_setting;
use divvy_e2e::{Extent, Gates, poll};
use divvy_fleet::request;
use divvy_offer::GpuRules;
use serde_json::{Value, json};

use crate::scheduling::{ControlPlane, NodeSpec, PATIENCE, path};

const NAME: &str = "contention";
const CLASS: &str = "high";
const GPUS: usize = 8;

/// Counts how often a freed device goes to another pod.
#[derive(Debug, Parser)]
#[command(name = "divvy-bench contention")]
pub(crate) struct Args {
    /// Devices that are made free, for each way
    #[arg(long, default_value_t = 25)]
    rounds: usize,
    /// Pods of low priority that wait all the time
    #[arg(long, default_value_t = 4)]
    waiting: usize,
}

/// Counts, and prints a line for each way.
pub(crate) fn run(args: &Args) -> Result<()> {
    let node = NodeSpec {
        name: "node-000".to_owned(),
        gpus: format!("h100x{GPUS}"),
        rules: GpuRules::default(),
        cores: 192,
        memory: 2048,
    };
    let gates = (Extent::Scheduling, Gates::Default);
    let plane = ControlPlane::start(NAME, &version_setting(), gates, &[node])?;
    let class = json!({"metadata": {"name": CLASS}, "value": 1000});
    plane
        .api()
        .create("/apis/scheduling.k8s.io/v1/priorityclasses", &class)?;
    let claim = request::shape("gpu")?.claims.remove(0);
    let mut story = Story {
        plane: &plane,
        claim: serde_json::to_value(&claim.spec)?,
        low: Vec::new(),
        next: 0,
    };
    for _ in 0..GPUS + args.waiting {
        story.arrives()?;
    }
    story.settle()?;
    // The scheduler's longest back-off is 10 s: afterwards a pod is tried at once.
    for (way, pause) in [
        ("it has waited for 12 s", Duration::from_secs(12)),
        ("it was refused just before", Duration::ZERO),
    ] {
        let mut taken = 0;
        for _ in 0..args.rounds {
            taken += usize::from(!story.round(pause)?);
        }
        writeln!(
            std::io::stdout(),
            "{way}: another pod took {taken} of {} devices",
            args.rounds
        )?;
    }
    Ok(())
}

struct Story<'s> {
    plane: &'s ControlPlane,
    claim: Value,
    /// Pods of low priority that have not ended.
    low: Vec<String>,
    next: usize,
}

impl Story<'_> {
    fn create(&mut self, class: Option<&str>) -> Result<String> {
        let name = format!("pod-{:05}", self.next);
        self.next += 1;
        let claims = std::slice::from_ref(&self.claim);
        self.plane
            .create_of(&name, claims, [1000, 1 << 30], &BTreeMap::new(), class)?;
        Ok(name)
    }

    fn arrives(&mut self) -> Result<()> {
        let name = self.create(None)?;
        self.low.push(name);
        Ok(())
    }

    fn is_bound(&self, name: &str) -> Result<bool> {
        let pod = self.plane.api().get(&format!("{}/{name}", path("Pod")?))?;
        let pod = pod.context("the pod is gone")?;
        Ok(at(&pod, "spec.nodeName").is_string())
    }

    fn bound(&self) -> Result<Vec<String>> {
        let pods = self.plane.api().list(&path("Pod")?)?;
        let bound = pods
            .iter()
            .filter(|pod| at(pod, "spec.nodeName").is_string());
        let names = bound.filter_map(|pod| at(pod, "metadata.name").as_str());
        Ok(names.map(str::to_owned).collect())
    }

    /// Waits until the node is full.
    fn settle(&self) -> Result<()> {
        poll("a full node", PATIENCE, || Ok(self.bound()?.len() == GPUS))
    }

    /// Lets a pod wait, frees a device for it, and says whether it got that.
    fn round(&mut self, pause: Duration) -> Result<bool> {
        let high = self.create(Some(CLASS))?;
        let its = format!("{}/{high}", path("Pod")?);
        poll("a refusal", PATIENCE, || {
            let pod = self.plane.api().get(&its)?.context("the pod is gone")?;
            let conditions = at(&pod, "status.conditions").as_array();
            let mut conditions = conditions.into_iter().flatten();
            Ok(conditions.any(|condition| at(condition, "reason") == "Unschedulable"))
        })?;
        std::thread::sleep(pause);
        let bound = self.bound()?;
        let victim = self.low.iter().position(|name| bound.contains(name));
        let victim = self
            .low
            .remove(victim.context("no pod of low priority runs")?);
        // Its controller makes another one before it has ended.
        self.arrives()?;
        self.plane.end(&victim, 1)?;
        self.settle()?;
        let got = self.is_bound(&high)?;
        self.plane.end(&high, 1)?;
        self.settle()?;
        Ok(got)
    }
}
