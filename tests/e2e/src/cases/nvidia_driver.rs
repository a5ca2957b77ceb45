//! NVIDIA's driver is upgraded under running pods, comes later than the plugin, and the node's GPUs
//! are exchanged. Each has the cluster to itself.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_api::names::{self, taints};
use divvy_gpu_sim::Engine;

use super::SHARED;
use super::faults::{pod_with_gpu, undisturbed};
use super::life::{all_tainted, edit};
use crate::api::at;
use crate::case::Env;
use crate::config::Layout;
use crate::objects::{Pod, claim, product};
use crate::process::say;
use crate::wait::poll;

const NOTICED: Duration = Duration::from_mins(1);
/// New GPUs are looked for once a minute.
const FOUND: Duration = Duration::from_secs(100);
/// The driver that is installed in the place of the first.
const NEXT: &str = "590.44.01";
/// The same as a published attribute.
const NEXT_PUBLISHED: &str = "590.44.1";

/// Returns what a claim's containers get, as text.
fn cdi_text(env: &Env, claim_uid: &str) -> Result<String> {
    let texts: Vec<String> = env
        .driver
        .cdi_files(claim_uid)?
        .iter()
        .map(fs_err::read_to_string)
        .collect::<Result<_, _>>()?;
    Ok(texts.concat())
}

fn wait_for_library(env: &Env, claim_uid: &str, version: &str) -> Result<()> {
    let library = format!("libcuda.so.{version}\"");
    poll(&format!("CDI file with {library}"), NOTICED, || {
        Ok(cdi_text(env, claim_uid)?.contains(&library))
    })
}

fn published(env: &Env, version: &str) -> Result<()> {
    poll(&format!("all GPUs with driver {version}"), NOTICED, || {
        let devices = env.driver.devices()?;
        let is = |device| at(device, "attributes.driverVersion.version") == version;
        Ok(!devices.is_empty() && devices.iter().all(is))
    })
}

pub(super) fn upgraded(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let first = gpus.driver_version();
    let (kept, gone) = (pod_with_gpu(env, "kept")?, pod_with_gpu(env, "gone")?);
    wait_for_library(env, &kept, first)?;
    gpus.remove_driver()?;
    let upgraded = all_tainted(env, taints::DRIVER_DOWN, true)
        // Unprepare is served without NVML, and nothing lingers.
        .and_then(|()| env.end("gone", &gone))
        .and_then(|()| undisturbed(env, "kept"))
        .and_then(|()| gpus.install_driver(NEXT))
        .and_then(|()| wait_for_library(env, &kept, NEXT))
        .and_then(|()| {
            ensure!(
                !cdi_text(env, &kept)?.contains(first),
                "the live CDI file still names driver {first}"
            );
            all_tainted(env, taints::DRIVER_DOWN, false)?;
            published(env, NEXT_PUBLISHED)?;
            let after = pod_with_gpu(env, "after")?;
            wait_for_library(env, &after, NEXT)?;
            env.end("after", &after)
        });
    gpus.remove_driver()
        .or_else(|_| edit(env, |engine| engine.set_driver_loaded(false)))?;
    let down = all_tainted(env, taints::DRIVER_DOWN, true);
    gpus.install_driver(first)?;
    upgraded?;
    down?;
    wait_for_library(env, &kept, first)?;
    all_tainted(env, taints::DRIVER_DOWN, false)?;
    undisturbed(env, "kept")?;
    env.end("kept", &kept)
}

pub(super) fn late(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let first = gpus.driver_version();
    let (kept, ended) = (pod_with_gpu(env, "kept")?, pod_with_gpu(env, "ended")?);
    env.driver.stop()?;
    gpus.remove_driver()?;
    let without = env.driver.label_node(Layout::NODE, true).and_then(|()| {
        // Ended under a plugin that has never seen a driver.
        env.end("ended", &ended)?;
        undisturbed(env, "kept")?;
        let running = env.driver.pids()?;
        ensure!(
            running.len() == 1,
            "expected one plugin that waits for the driver, found {running:?}"
        );
        let ready = env
            .driver
            .pods()?
            .iter()
            .any(|pod| crate::api::has_condition(pod, "Ready"));
        ensure!(!ready, "a plugin without a driver says that it is ready");
        // Whatever the scheduler knows of the time before.
        env.create(&claim("early", &product(SHARED)))?;
        env.create(&Pod::new("early").claim("early").build())
            .map(drop)
    });
    gpus.install_driver(first)?;
    without?;
    env.driver.wait_until_ready()?;
    env.driver.wait_for_slices()?;
    all_tainted(env, taints::DRIVER_DOWN, false)?;
    env.nudge("early")?;
    env.check("early", "main", &["early"])?;
    let early = Env::uid(&env.claim("early")?)?;
    env.end("early", &early)?;
    undisturbed(env, "kept")?;
    env.end("kept", &kept)
}

/// The UUIDs of the GPUs that are published.
fn found(env: &Env) -> Result<Vec<String>> {
    let devices = env.driver.devices()?;
    let gpus = devices
        .iter()
        .filter(|device| at(device, "attributes.type.string") == "gpu");
    Ok(gpus
        .filter_map(|gpu| at(gpu, "attributes.uuid.string").as_str())
        .map(str::to_owned)
        .collect())
}

/// A card is exchanged for another one, which is then pulled out under a pod.
pub(super) fn exchanged(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let old = gpus.only("NVIDIA L40S")?;
    let name_of = |uuid: &str| -> Result<String> {
        let devices = env.driver.devices()?;
        let found = devices.iter().find(|device| {
            at(device, "attributes.type.string") == "gpu"
                && at(device, "attributes.uuid.string") == uuid
        });
        Ok(at(
            found.with_context(|| format!("{uuid} is not published"))?,
            "name",
        )
        .to_string())
    };
    let before = name_of(old)?;
    let profile = divvy_gpu_sim::profile("l40s").context("no such model")?;
    let (card, new) = gpus
        .edit(old, |engine, uuid| {
            let card = engine.remove_gpu(uuid);
            card.zip(engine.add_gpu(profile))
        })?
        .context("the card cannot be exchanged")?;
    // A card in the same slot has its device node; only the UUID is another one.
    let new = new.to_string();
    let start = std::time::Instant::now();
    let exchanged = poll("the new card in the place of the old", FOUND, || {
        let found = found(env)?;
        Ok(found.contains(&new) && !found.iter().any(|uuid| uuid == old))
    })
    .and_then(|()| {
        let seconds = start.elapsed().as_secs_f32();
        say(&format!(
            "     an exchanged card was published after {seconds:.0} s"
        ));
        ensure!(
            name_of(&new)? != before,
            "a new card has the name of an old one"
        );
        let this = format!("device.attributes['{}'].uuid == '{new}'", names::DRIVER);
        let uid = Env::uid(&env.create(&claim("new", &this))?)?;
        env.create(&Pod::new("a").claim("new").build())?;
        env.wait_until_running("a")?;
        Ok(uid)
    });
    let back = |engine: &mut Engine| {
        let found = engine
            .gpus()
            .iter()
            .find(|gpu| gpu.facts.uuid.to_string() == new);
        let uuid = found.map(|gpu| gpu.facts.uuid.clone());
        uuid.map(|uuid| engine.remove_gpu(&uuid));
        engine.insert_gpu(card);
    };
    // Pulled out under its pod, and the old one is back.
    edit(env, back)?;
    let uid = exchanged?;
    poll("the old card under its old name", FOUND, || {
        Ok(found(env)?.iter().any(|uuid| uuid == old) && name_of(old)? == before)
    })?;
    // A device that a claim holds is not withdrawn, and not allocated to another claim.
    let taints = env.driver.taints(&new)?;
    ensure!(!taints.is_empty(), "a card that is gone can still be had");
    env.end("a", &uid)?;
    env.delete("ResourceClaim", "new")?;
    poll("withdrawal of the card that is gone", FOUND, || {
        Ok(!found(env)?.contains(&new))
    })?;
    // The card that is gone stays a trouble until an administrator says that it is no longer
    // expected, as docs/runbooks/gpu-unhealthy.md has it. Later cases find the node well.
    super::status::gpu_node_deleted(env)
}
