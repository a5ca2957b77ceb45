//! The run of a manifest, from its objects in the API to everything given back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_fake_cluster::ClaimRef;
use divvy_gpu_sim::SimNode;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice,
};

use super::covered;
use super::examples::Example;
use super::expect::Expected;
use super::gpus;
use super::report::{ClaimReport, DeviceReport, REFUSED, Round, Scenario, State};
use super::review::{Known, review};
use super::schedule::{Scheduler, Unplaced};
use super::ui::Show;
use super::workload::{Consumer, Workload, expand};
use super::world::{self, World};
use divvy_cli::manifests::Manifests;
use divvy_why::device::{percent, share_memory};

/// A claim by namespace and name.
type Key = (String, String);

/// Runs a manifest.
pub(super) async fn run(world: &World, sim: &SimNode, example: &Example, show: &Show) -> Scenario {
    let manifests = &example.manifests;
    let mut scenario = example.scenario();
    let there = world.api.list::<DeviceClass>();
    let classes: Vec<DeviceClass> = there
        .into_iter()
        .chain(manifests.classes.iter().cloned())
        .collect();
    let names = classes
        .iter()
        .filter_map(|class| class.metadata.name.clone());
    let known = Known::of(world.driver, &world.api.list(), names);
    let found = review(manifests, &known);
    scenario.notes.extend(found.doubtful);
    if !found.refused.is_empty() {
        let refused = found.refused.iter();
        let refused: Vec<String> = refused.map(|what| format!("{REFUSED}{what}")).collect();
        scenario.problem = Some(refused.join("\n"));
        return scenario;
    }
    if !manifests.not_run.is_empty() {
        scenario.problem = Some(manifests.not_run.join("\n"));
        return scenario;
    }
    let enacted = match expand(manifests, &classes, &known.products) {
        Ok(workload) => {
            if workload.claims.is_empty() && workload.stuck.is_empty() {
                scenario.notes.push(idle(manifests).to_owned());
            }
            show.begin(&world.api, world.driver, example);
            enact(Stage::new(world, sim, show), manifests, &workload).await
        }
        Err(error) => Err(error),
    };
    match enacted {
        Ok(rounds) => {
            let claims = rounds.iter().flat_map(|round| &round.claims);
            scenario
                .notes
                .extend(covered::volumes(&manifests.all_pods(), claims));
            scenario.rounds = rounds;
        }
        Err(error) => scenario.problem = Some(format!("{error:#}")),
    }
    match scenario.rounds.last_mut() {
        Some(last) => last.surprises.extend(found.wrong),
        None if scenario.problem.is_none() => {
            scenario.problem = Some(found.wrong.join("\n")).filter(|wrong| !wrong.is_empty());
        }
        None => scenario.notes.extend(found.wrong),
    }
    said_once(&mut scenario);
    scenario
}

/// Leaves out notes whose words are in a problem, too: the way out is read once.
fn said_once(scenario: &mut Scenario) {
    let problems = scenario.problems().join("\n");
    scenario.notes.retain(|note| {
        let mut ends = note.match_indices(": ");
        // From any step of the place on: what is left of it is in the problem's own words.
        !ends.any(|(place, _)| {
            let rest = note.get(place + 2..).unwrap_or_default();
            rest.len() > LEAST_WORDS && problems.contains(rest)
        })
    });
}

/// Characters of a note that are more than a field and its value.
const LEAST_WORDS: usize = 24;

/// Says why a manifest makes no claim.
fn idle(manifests: &Manifests) -> &'static str {
    if manifests.templates.is_empty() {
        "nothing here asks for a GPU: no pod names a claim or has an extended resource in its limits"
    } else {
        "nothing here asks for a GPU: a ResourceClaimTemplate makes a claim for each pod that names it, and no pod does"
    }
}

/// A manifest that runs.
struct Stage<'w> {
    world: &'w World,
    sim: &'w SimNode,
    show: &'w Show,
    scheduler: Scheduler,
    /// Reports of the claims so far.
    reports: BTreeMap<Key, ClaimReport>,
}

async fn enact(
    mut stage: Stage<'_>,
    manifests: &Manifests,
    workload: &Workload,
) -> Result<Vec<Round>> {
    let (world, show) = (stage.world, stage.show);
    for class in &manifests.classes {
        world
            .api
            .put(class)
            .context("a DeviceClass of the manifest")?;
    }
    for rule in &manifests.taint_rules {
        world
            .api
            .put(rule)
            .context("a DeviceTaintRule of the manifest")?;
    }
    for claim in &workload.claims {
        world
            .api
            .put(claim)
            .context("a ResourceClaim of the manifest")?;
    }
    let last = workload
        .consumers
        .iter()
        .filter_map(|consumer| consumer.ends)
        .max()
        .unwrap_or(0)
        + 1;
    let mut staying: Vec<&Consumer> = workload.consumers.iter().collect();
    let mut rounds = Vec::new();
    for number in 1..=last {
        let (ending, rest): (Vec<&Consumer>, Vec<&Consumer>) = staying
            .into_iter()
            .partition(|consumer| consumer.ends.is_some_and(|ends| ends < number));
        staying = rest;
        stage.end(&ending, &staying).await?;
        for consumer in staying.iter().copied() {
            if number > 1 && !stage.is_pending(consumer) {
                continue;
            }
            let may_wait = consumer.expected.may_wait(number == last);
            let soon = number > 1 && !may_wait;
            let placed = if soon {
                stage.place_soon(consumer).await
            } else {
                stage.scheduler.place(consumer)
            };
            let waits = placed.is_err();
            stage.prepare(consumer, placed, may_wait).await?;
            show.placed(&world.api, consumer, waits).await?;
        }
        let ended: Vec<String> = ending.iter().map(|consumer| consumer.name()).collect();
        if number == 1 || !ended.is_empty() {
            rounds.push(stage.round(ended, &staying));
            show.scene().await;
        }
    }
    let failed = stage.give_back().await?;
    if let Some(last) = rounds.last_mut() {
        last.surprises.extend(failed);
        last.surprises.extend(workload.stuck.iter().cloned());
    }
    clean(world, workload, manifests)?;
    world.settle().await?;
    show.end(&world.api).await?;
    Ok(rounds)
}

impl<'w> Stage<'w> {
    fn new(world: &'w World, sim: &'w SimNode, show: &'w Show) -> Self {
        let scheduler = Scheduler::new(world.api.clone(), world.driver);
        Self {
            world,
            sim,
            show,
            scheduler,
            reports: BTreeMap::new(),
        }
    }

    fn round(&self, ended: Vec<String>, staying: &[&Consumer]) -> Round {
        let slices = self.world.api.list::<ResourceSlice>();
        let claims: Vec<ClaimReport> = self.reports.values().cloned().collect();
        let gpus = gpus::pictures(&self.sim.inventory(), &slices, &claims);
        let was_to_wait = |consumer: &&&Consumer| {
            consumer.expected == Expected::Pending && !self.is_pending(consumer)
        };
        let surprises = staying
            .iter()
            .filter(was_to_wait)
            .map(|consumer| {
                format!(
                    "{} was expected to stay pending and does not",
                    consumer.name()
                )
            })
            .collect();
        Round {
            ended,
            claims,
            gpus,
            surprises,
        }
    }

    fn is_pending(&self, consumer: &Consumer) -> bool {
        let pending = |key: &Key| {
            self.reports
                .get(key)
                .is_some_and(|r| matches!(r.state, State::Pending { .. }))
        };
        keys(consumer).any(|key| pending(&key))
    }

    /// Places a consumer that others have made room for; what the plugin publishes may have to
    /// follow first.
    async fn place_soon(&self, consumer: &Consumer) -> Result<(), Unplaced> {
        let deadline = Instant::now() + world::PATIENCE;
        loop {
            let seen = self.world.api.list::<ResourceSlice>();
            let placed = self.scheduler.place(consumer);
            let left = deadline.saturating_duration_since(Instant::now());
            if placed.is_ok() || left.is_zero() {
                return placed;
            }
            let changed = |now: &divvy_fake_cluster::View<'_>| now.list::<ResourceSlice>() != seen;
            if self
                .world
                .api
                .wait_until(changed, left.min(Duration::from_secs(2)))
                .await
                .is_err()
            {
                return placed;
            }
        }
    }

    /// Prepares what a consumer needs and is not prepared yet, in one call as the kubelet does, and
    /// notes what came of it.
    async fn prepare(
        &mut self,
        consumer: &Consumer,
        placed: Result<(), Unplaced>,
        expected: bool,
    ) -> Result<()> {
        let mut call = Vec::new();
        for key in keys(consumer) {
            if let Some(known) = self.reports.get_mut(&key) {
                known.pods.extend(consumer.pod.clone());
                known.pods.dedup();
                if !matches!(known.state, State::Pending { .. }) {
                    continue;
                }
            }
            match &placed {
                Ok(()) => call.extend(self.reference(&key)),
                Err(unplaced) => {
                    let state = State::Pending {
                        reason: unplaced.reason.trim_end().to_owned(),
                        detail: unplaced.detail.clone(),
                        cause: unplaced.cause.as_deref().cloned(),
                        expected,
                    };
                    let claim = format!("{}/{}", key.0, key.1);
                    let pods = consumer.pod.iter().cloned().collect();
                    let report = ClaimReport {
                        claim,
                        pods,
                        state,
                        cdi: None,
                    };
                    // Pending once more is not another reason.
                    self.reports.insert(key, report);
                }
            }
        }
        if call.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let answers = self.world.kubelet.prepare(self.world.driver, &call).await?;
        let prepare_us = micros(started.elapsed());
        for reference in call {
            let allocation = self.allocation(&reference);
            let slices = self.world.api.list::<ResourceSlice>();
            let state = match answers.get(&reference.uid) {
                Some(Ok(devices)) => {
                    let devices = devices
                        .iter()
                        .map(|given| device(given, &allocation, &slices))
                        .collect();
                    State::Prepared {
                        devices,
                        prepare_us,
                    }
                }
                Some(Err(reason)) => State::Failed {
                    reason: reason.clone(),
                },
                None => State::Failed {
                    reason: "the plugin's answer leaves the claim out".to_owned(),
                },
            };
            let report = ClaimReport {
                claim: format!("{}/{}", reference.namespace, reference.name),
                pods: consumer.pod.iter().cloned().collect(),
                state,
                cdi: self.world.cdi(&reference.uid),
            };
            self.reports
                .insert((reference.namespace, reference.name), report);
        }
        Ok(())
    }

    /// A claim as the kubelet knows it.
    fn reference(&self, key: &Key) -> Option<ClaimRef> {
        let claim: ResourceClaim = self.world.api.get(&key.0, &key.1)?;
        Some(ClaimRef::new(&key.0, &key.1, &claim.metadata.uid?))
    }

    /// Returns the devices that the scheduler allocated to a claim.
    fn allocation(&self, claim: &ClaimRef) -> AllocationResult {
        let claim = self
            .world
            .api
            .get::<ResourceClaim>(&claim.namespace, &claim.name);
        let allocation = claim.and_then(|claim| claim.status?.allocation);
        allocation.unwrap_or_default()
    }

    /// Ends pods: their claims go, unless others use them too.
    async fn end(&mut self, ending: &[&Consumer], staying: &[&Consumer]) -> Result<()> {
        let used: Vec<Key> = staying.iter().flat_map(|consumer| keys(consumer)).collect();
        let free: Vec<Key> = ending.iter().flat_map(|consumer| keys(consumer)).collect();
        for key in free.into_iter().filter(|key| !used.contains(key)) {
            let (Some(reference), Some(report)) = (self.reference(&key), self.reports.remove(&key))
            else {
                continue;
            };
            if !matches!(report.state, State::Pending { .. }) {
                let answers = self
                    .world
                    .kubelet
                    .unprepare(self.world.driver, &[reference])
                    .await?;
                for answer in answers.into_values() {
                    answer
                        .map_err(anyhow::Error::msg)
                        .with_context(|| format!("unprepare of {}", report.claim))?;
                }
            }
            self.world.api.delete::<ResourceClaim>(&key.0, &key.1)?;
        }
        Ok(())
    }

    /// Unprepares every claim that was tried, prepared or not: after a failed prepare the kubelet
    /// does the same. Says what went wrong.
    async fn give_back(&self) -> Result<Vec<String>> {
        let tried: Vec<ClaimRef> = self
            .reports
            .iter()
            .filter(|(_, report)| !matches!(report.state, State::Pending { .. }))
            .filter_map(|(key, _)| self.reference(key))
            .collect();
        let answers = self
            .world
            .kubelet
            .unprepare(self.world.driver, &tried)
            .await?;
        let failed = answers.into_iter().filter_map(|(uid, answer)| {
            let reference = tried.iter().find(|reference| reference.uid == uid)?;
            let reason = answer.err()?;
            Some(format!(
                "claim {}/{} failed: unprepare: {reason}",
                reference.namespace, reference.name
            ))
        });
        Ok(failed.collect())
    }
}

/// The claims of a consumer.
fn keys(consumer: &Consumer) -> impl Iterator<Item = Key> {
    consumer
        .claims
        .iter()
        .map(|name| (consumer.namespace.clone(), name.clone()))
}

fn key_of(claim: &ResourceClaim) -> Key {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    (text(&claim.metadata.namespace), text(&claim.metadata.name))
}

/// A device as the plugin answered, with what the scheduler said of it.
fn device(
    given: &divvy_proto::dra::v1::Device,
    allocation: &AllocationResult,
    slices: &[ResourceSlice],
) -> DeviceReport {
    let share = given.share_id.as_deref().filter(|id| !id.is_empty());
    let devices = allocation.devices.as_ref();
    let mut results = devices.iter().flat_map(|d| &d.results).flatten();
    let result = results.find(|result| {
        result.device == given.device_name
            && (share.is_none() || result.share_id.as_deref() == share)
    });
    let consumed = result
        .and_then(|result| result.consumed_capacity.clone())
        .unwrap_or_default();
    let published = slices
        .iter()
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .find(|device| device.name == given.device_name);
    DeviceReport {
        requests: given.request_names.clone(),
        device: given.device_name.clone(),
        cdi_ids: given.cdi_device_ids.clone(),
        share: share.map(str::to_owned),
        memory_limit: result.and_then(|of| divvy_cli::limit::of_share(allocation, of, published)),
        memory_of_percent: percent(&consumed).and_then(|_| share_memory(published, &consumed)),
        consumed: consumed
            .into_iter()
            .map(|(name, amount)| (divvy_why::driver::plain(&name).to_owned(), amount.0))
            .collect(),
        admin: result.is_some_and(|result| result.admin_access == Some(true)),
    }
}

/// Takes the manifest's objects out of the API again.
fn clean(world: &World, workload: &Workload, manifests: &Manifests) -> Result<()> {
    for claim in &workload.claims {
        let (namespace, name) = key_of(claim);
        if world.api.get::<ResourceClaim>(&namespace, &name).is_some() {
            world.api.delete::<ResourceClaim>(&namespace, &name)?;
        }
    }
    let of_chart = world::classes(world.driver)?;
    let name = |class: &DeviceClass| class.metadata.name.clone();
    let names: BTreeSet<String> = manifests.classes.iter().filter_map(name).collect();
    for name in names.iter().filter(|ours| {
        of_chart
            .iter()
            .all(|class| name(class).as_ref() != Some(ours))
    }) {
        world.api.delete::<DeviceClass>("", name)?;
    }
    for rule in &manifests.taint_rules {
        let name = rule.metadata.name.as_deref().unwrap_or_default();
        world.api.delete::<DeviceTaintRule>("", name)?;
    }
    Ok(())
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
