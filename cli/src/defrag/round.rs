//! `divvy defrag --waiting`: a round over all pods that wait, the most important first.
//!
//! No person looks at its evictions, so they are under stricter rules: each evicted pod must fit a
//! node afterwards or be less important (`--preempt`), and be older than the pod that waits. The
//! round ends at the first thing that is not as it was planned.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_fleet::defrag::{Care, Plan, Victim, Wanted, plan};
use divvy_fleet::waiting::WaitingError;
use divvy_fleet::{Cluster, pod, waiting};
use divvy_telemetry::stop_on_signals;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::carry_out::{Settings, Wish, carry_out, only, read};
use super::{Args, closed};
use crate::format;
use crate::table::Table;

/// Pods of this priority and above are the system's.
const SYSTEM_PRIORITY: i32 = 2_000_000_000;
/// Releases of Kubernetes whose scheduler is known, 1.x.
const RELEASES: (u32, u32) = (34, 37);
/// Time that the scheduler has for a pod whose devices are free: its longest back-off is 10 s.
const PLACED: Duration = Duration::from_mins(1);
/// Time between looks at such a pod.
const PAUSE: Duration = Duration::from_millis(500);

/// Arguments of a round.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Options of --waiting")]
pub(super) struct Rules {
    /// All pods that wait for devices; each evicted pod must fit a node afterwards
    #[arg(long, conflicts_with_all = ["pod", "want"])]
    pub(super) waiting: bool,
    /// Time that a pod has waited before others are evicted for it
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 600,
        // What comes in the place of an evicted pod must be newer than the pod that waits.
        value_parser = clap::value_parser!(u64).range(1..),
        requires = "waiting"
    )]
    min_wait: u64,
    /// The most pods evicted in all
    #[arg(long, value_name = "PODS", default_value_t = 5, requires = "waiting")]
    max_evictions: usize,
    /// Where no move makes room: also plan or apply evictions of less important pods, which may
    /// then wait
    #[arg(long, value_enum, value_name = "HOW", requires = "waiting")]
    preempt: Option<Preempt>,
    /// Name of the driver whose devices are made free
    #[arg(long, value_name = "NAME", default_value = divvy_api::names::DRIVER, requires = "waiting")]
    driver: String,
    /// Write Events about the pods
    #[arg(long, requires = "waiting", conflicts_with = "objects")]
    events: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            waiting: false,
            min_wait: 600,
            max_evictions: 5,
            preempt: None,
            driver: divvy_api::names::DRIVER.to_owned(),
            events: false,
        }
    }
}

/// Values of `--preempt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Preempt {
    /// Only say who would be evicted
    Plan,
    /// Evict, where --apply is given
    Apply,
}

/// Rule by which pods may be evicted for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    /// Each fits a node afterwards.
    Move,
    /// Each is less important.
    Preempt,
}

/// Answer of a round.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Round {
    pods: Vec<Line>,
    /// Reason for which pods after the last one were not looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    ended: Option<String>,
}

/// A pod that waits.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    pod: String,
    priority: i32,
    waits_seconds: i64,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Result for a pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "camelCase")]
enum Outcome {
    /// Waits for something that evictions do not give, or that is not known.
    LeftAlone { why: String },
    /// The scheduler can place it.
    Fits { plan: Plan },
    /// No eviction that the rules allow makes room.
    NoRoom,
    /// The plan evicts more pods than the round may.
    TooMany { plan: Plan },
    /// Nothing is evicted in this round.
    Planned { plan: Plan, preempts: bool },
    /// Pods were evicted, and the pod is on its node.
    Runs { plan: Plan, preempts: bool },
    /// The pod does not run, whatever was evicted.
    Stopped { plan: Plan, why: String },
}

/// Runs `divvy defrag --waiting`.
pub(super) fn run(args: &Args) -> Result<ExitCode> {
    let round = if args.source.objects.is_some() {
        let cluster = args.source.cluster()?;
        plans(&cluster, args, args.source.kubernetes, Timestamp::now())
    } else {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let (client, _, server) = args.source.access.client().await?;
            of_cluster(&client, args).await.context(server)
        })?
    };
    format::show(&round, args.source.output.format(), table)?;
    Ok(ExitCode::SUCCESS)
}

/// Plans for all pods that wait, each as if no other was carried out.
fn plans(cluster: &Cluster, args: &Args, kubernetes: u32, now: Timestamp) -> Round {
    let cluster = only(cluster.clone(), Some(&args.rules.driver));
    let pods = candidates(&cluster, &args.rules, now).into_iter();
    let line = |(pod, waits): (Pod, i64)| {
        let most = args.rules.max_evictions;
        line(&pod, waits, decide(&cluster, &pod, args, most, kubernetes))
    };
    Round {
        pods: pods.map(line).collect(),
        ended: None,
    }
}

async fn of_cluster(client: &Client, args: &Args) -> Result<Round> {
    let version = client.apiserver_version().await?;
    let minor = version.minor.trim_end_matches('+').parse();
    let minor: u32 = minor.with_context(|| format!("unknown release 1.{}", version.minor))?;
    let kubernetes = minor.clamp(RELEASES.0, RELEASES.1);
    let cluster = only(read(client).await?, Some(&args.rules.driver));
    if args.apply {
        closed::open_all(client, &cluster).await?;
    }
    let cluster = closed::opened(cluster);
    let events = args.rules.events.then(|| Events::new(client));
    if !args.apply {
        let round = plans(&cluster, args, kubernetes, Timestamp::now());
        for line in &round.pods {
            say(events.as_ref(), &cluster, line).await;
        }
        return Ok(round);
    }
    applied(client, args, kubernetes, cluster, events.as_ref()).await
}

/// Carries out the plans, one pod after the other. The cluster is read again after each.
async fn applied(
    client: &Client,
    args: &Args,
    kubernetes: u32,
    mut cluster: Cluster,
    events: Option<&Events>,
) -> Result<Round> {
    let settings = Settings {
        kubernetes,
        patience: Duration::from_secs(args.patience),
        driver: Some(&args.rules.driver),
        stop: stop_on_signals().context("failed to handle signals")?,
    };
    let (mut round, mut left) = (Round::default(), args.rules.max_evictions);
    for (pod, waits) in candidates(&cluster, &args.rules, Timestamp::now()) {
        let mut outcome = decide(&cluster, &pod, args, left, kubernetes);
        let is_for_show = |preempts: bool| preempts && args.rules.preempt == Some(Preempt::Plan);
        let (mut is_over, mut unread) = (false, None);
        if let Outcome::Planned { plan, preempts } = &outcome
            && !is_for_show(*preempts)
        {
            let rule = if *preempts { Rule::Preempt } else { Rule::Move };
            let again = |now: &Cluster| wish(now, &pod, rule);
            let done = carry_out(client, plan, &settings, &again, &mut format::talk).await;
            left = left.saturating_sub(done.evicted.len());
            let (plan, preempts) = (plan.clone(), *preempts);
            for victim in &done.evicted {
                note_eviction(events, victim, &pod, preempts).await;
            }
            let why = if done.fits {
                placed(client, &pod, &settings).await
            } else {
                Some(done.why)
            };
            is_over = why.is_some();
            outcome = match why {
                None => Outcome::Runs { plan, preempts },
                Some(why) => Outcome::Stopped { plan, why },
            };
            match read(client).await {
                Ok(now) => cluster = only(now, Some(&args.rules.driver)),
                // What was done so far is reported all the same.
                Err(error) => {
                    unread = Some(format!("{error:#}: the rest is left for the next round"));
                }
            }
        }
        let line = line(&pod, waits, outcome);
        say(events, &cluster, &line).await;
        round.pods.push(line);
        if unread.is_some() {
            round.ended = unread;
            break;
        }
        if is_over {
            let why = "the last one did not go as planned: the rest is left for the next round";
            round.ended = Some(why.to_owned());
            break;
        }
    }
    Ok(round)
}

/// Returns the pods that have waited long enough, with the seconds.
fn candidates(cluster: &Cluster, rules: &Rules, now: Timestamp) -> Vec<(Pod, i64)> {
    let refused = waiting::refused(cluster).into_iter();
    let with_claims = refused.filter(|(pod, _)| {
        let shape = waiting::shape_of(pod, &cluster.claims);
        !matches!(shape, Err(WaitingError::NoClaims(_)))
    });
    let waits =
        with_claims.map(|(pod, since)| (pod.clone(), now.as_second() - since.0.as_second()));
    let least = i64::try_from(rules.min_wait).unwrap_or(i64::MAX);
    waits.filter(|(_, waits)| *waits >= least).collect()
}

/// Decides on a pod, of which at most so many others may be evicted.
fn decide(cluster: &Cluster, pod: &Pod, args: &Args, most: usize, kubernetes: u32) -> Outcome {
    if let Some(what) = waiting::unknown_demand(pod) {
        let why = format!("it demands {what}, which is not looked at");
        return Outcome::LeftAlone { why };
    }
    for rule in [Rule::Move, Rule::Preempt] {
        let policy = pod.spec.as_ref();
        let policy = policy.and_then(|spec| spec.preemption_policy.as_deref());
        let may_preempt = args.rules.preempt.is_some() && policy != Some("Never");
        if rule == Rule::Preempt && !may_preempt {
            continue;
        }
        let answer = match wanted(cluster, pod, rule) {
            Ok(wanted) => plan(cluster, &wanted, kubernetes),
            Err(error) => {
                let why = error.to_string();
                return Outcome::LeftAlone { why };
            }
        };
        let plan = match answer {
            Ok(answer) => answer.plan,
            Err(error) => {
                let why = divvy_telemetry::Chain(&error).to_string();
                return Outcome::LeftAlone { why };
            }
        };
        let Some(plan) = plan else { continue };
        let preempts = rule == Rule::Preempt;
        return match plan.evict.len() {
            0 => Outcome::Fits { plan },
            evict if evict > most => Outcome::TooMany { plan },
            _ => Outcome::Planned { plan, preempts },
        };
    }
    Outcome::NoRoom
}

fn wanted(cluster: &Cluster, pod: &Pod, rule: Rule) -> Result<Wanted, WaitingError> {
    let shape = waiting::shape_of(pod, &cluster.claims)?;
    let own = pod::priority(pod).min(SYSTEM_PRIORITY - 1);
    let care = Care {
        made_before: pod.metadata.creation_timestamp.clone(),
        all_fit: rule == Rule::Move,
    };
    let priority = match rule {
        Rule::Move => own,
        Rule::Preempt => own.saturating_sub(1),
    };
    Ok(Wanted {
        shape,
        priority,
        care,
    })
}

/// Returns what the same pod wants of the cluster as it is by then.
fn wish(now: &Cluster, pod: &Pod, rule: Rule) -> Wish {
    let mut pods = now.pods.iter();
    match pods.find(|of| of.metadata.uid == pod.metadata.uid) {
        Some(same) => Wish::of(wanted(now, same, rule)),
        None => Wish::Gone(format!("pod {} is gone", waiting::name(pod))),
    }
}

/// Waits until the scheduler has placed a pod; returns why it has not.
async fn placed(client: &Client, pod: &Pod, settings: &Settings<'_>) -> Option<String> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let until = Instant::now() + PLACED;
    loop {
        let now = match pods.get_opt(name).await {
            Ok(now) => now.filter(|now| now.metadata.uid == pod.metadata.uid),
            Err(error) => {
                let why = divvy_telemetry::Chain(&error);
                return Some(format!(
                    "room was made, and whether it was placed is not known: {why}"
                ));
            }
        };
        let Some(now) = now else {
            return Some("the pod is gone".to_owned());
        };
        if now.spec.is_some_and(|spec| spec.node_name.is_some()) {
            return None;
        }
        if settings.stop.is_cancelled() {
            return Some("room was made; interrupted before it was placed".to_owned());
        }
        if Instant::now() >= until {
            let seconds = PLACED.as_secs();
            let why = format!(
                "room was made, and the scheduler has not placed it after {seconds} s: another pod may have taken it"
            );
            return Some(why);
        }
        sleep(PAUSE).await;
    }
}

fn line(pod: &Pod, waits_seconds: i64, outcome: Outcome) -> Line {
    Line {
        pod: waiting::name(pod),
        priority: pod::priority(pod),
        waits_seconds,
        outcome,
    }
}

fn table(round: &Round) -> String {
    if round.pods.is_empty() {
        return "no pod has waited for devices for so long (--min-wait)".to_owned();
    }
    let mut pods = Table::new(["pod", "priority", "waits", "outcome"]);
    for line in &round.pods {
        let waits = format!("{} s", line.waits_seconds);
        let words = line.outcome.words();
        pods.row([line.pod.clone(), line.priority.to_string(), waits, words]);
    }
    let ended = round.ended.as_ref().map(|why| format!("\n\n{why}"));
    pods.render(0) + &ended.unwrap_or_default()
}

impl Outcome {
    fn words(&self) -> String {
        let evictions = |plan: &Plan, preempts: bool| {
            let how = if preempts { "preempt" } else { "move" };
            let pods: Vec<String> = plan.evict.iter().map(Victim::to_string).collect();
            format!("{how} {}", pods.join(", "))
        };
        match self {
            Self::LeftAlone { why } | Self::Stopped { why, .. } => why.clone(),
            Self::Fits { plan } => format!("fits node {} already", plan.node),
            Self::NoRoom => "no eviction that is allowed makes room".to_owned(),
            Self::TooMany { plan } => {
                let count = plan.evict.len();
                format!(
                    "{count} evictions make room on node {}: too many (--max-evictions)",
                    plan.node
                )
            }
            Self::Planned { plan, preempts } => {
                format!(
                    "{}; then it fits node {}",
                    evictions(plan, *preempts),
                    plan.node
                )
            }
            Self::Runs { plan, preempts } => {
                format!("{}: done, it is on its node", evictions(plan, *preempts))
            }
        }
    }
}

/// Writes Events about pods.
struct Events(Recorder);

impl Events {
    fn new(client: &Client) -> Self {
        Self(Recorder::new(
            client.clone(),
            Reporter {
                controller: "divvy-defrag".to_owned(),
                instance: None,
            },
        ))
    }

    async fn publish(&self, bad: bool, reason: &str, note: String, about: &ObjectReference) {
        let event = Event {
            type_: if bad {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: reason.to_owned(),
            note: Some(note),
            action: "Defragment".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.0.publish(&event, about).await {
            let error = divvy_telemetry::Chain(&error);
            format::talk(&format!("an Event was not written: {error}"));
        }
    }
}

/// Writes an Event on a pod that waits, where something is planned or done for it.
async fn say(events: Option<&Events>, cluster: &Cluster, line: &Line) {
    let reason = match &line.outcome {
        Outcome::Planned { .. } | Outcome::TooMany { .. } => "GpuDefragPlanned",
        Outcome::Runs { .. } => "GpuDefragDone",
        Outcome::Stopped { .. } => "GpuDefragStopped",
        Outcome::LeftAlone { .. } | Outcome::Fits { .. } | Outcome::NoRoom => return,
    };
    let pod = cluster
        .pods
        .iter()
        .find(|pod| waiting::name(pod) == line.pod);
    if let (Some(events), Some(pod)) = (events, pod) {
        let bad = reason == "GpuDefragStopped";
        let note = line.outcome.words();
        events
            .publish(bad, reason, note, &reference(&pod.metadata))
            .await;
    }
}

/// Writes an Event on an evicted pod, which names the pod that it was evicted for.
async fn note_eviction(events: Option<&Events>, victim: &Victim, pod: &Pod, preempts: bool) {
    let Some(events) = events else { return };
    let wanted = waiting::name(pod);
    let note = match (preempts, &victim.then) {
        (true, _) => {
            format!("evicted for pod {wanted}, which is more important and waits for its devices")
        }
        (false, Some(node)) => {
            format!("evicted so that pod {wanted} fits its node; it fits node {node} itself")
        }
        (false, None) => format!("evicted so that pod {wanted} fits its node"),
    };
    let about = ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(victim.namespace.clone()),
        name: Some(victim.name.clone()),
        uid: Some(victim.uid.clone()),
        ..ObjectReference::default()
    };
    events.publish(true, "GpuDefragEvicted", note, &about).await;
}

fn reference(of: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: of.namespace.clone(),
        name: of.name.clone(),
        uid: of.uid.clone(),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests;
