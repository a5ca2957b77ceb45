//! The node's life under running pods: its driver goes and comes, it is switched off and on,
//! drained, used by others, and the plugin is updated while pods come and go. Each has the cluster
//! to itself.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_api::names::taints;
use divvy_gpu_sim::Engine;

use super::SHARED;
use super::faults::pod_with_gpu;
use crate::api::at;
use crate::case::Env;
use crate::config::Layout;
use crate::objects::{Pod, deployment, product, request, template};
use crate::process::say;
use crate::wait::poll;

/// The plugin is not notified of driver changes or of other users; it polls every few seconds.
const NOTICED: Duration = Duration::from_mins(1);
/// A process that no claim accounts for.
const STRANGER: u32 = 4_000_000;

/// Changes the simulated node as a whole.
pub(super) fn edit(env: &Env, change: impl FnOnce(&mut Engine)) -> Result<()> {
    let gpus = env.driver.gpus();
    let any = gpus
        .of_product("")
        .first()
        .copied()
        .context("the node has no GPU")?;
    gpus.edit(any, |engine, _| change(engine))
}

/// Waits until all published devices have a taint, or none has.
pub(super) fn all_tainted(env: &Env, key: &str, tainted: bool) -> Result<()> {
    let what = format!(
        "{} devices with the taint {key}",
        if tainted { "all" } else { "no" }
    );
    poll(&what, NOTICED, || {
        let devices = env.driver.devices()?;
        let has = |taint: &serde_json::Value| at(taint, "key") == key;
        let with = |device| {
            at(device, "taints")
                .as_array()
                .is_some_and(|taints| taints.iter().any(has))
        };
        Ok(!devices.is_empty() && devices.iter().all(|device| with(device) == tainted))
    })
}

pub(super) fn driver_reloaded(env: &Env) -> Result<()> {
    let before = pod_with_gpu(env, "before")?;
    edit(env, |engine| engine.set_driver_loaded(false))?;
    all_tainted(env, taints::DRIVER_DOWN, true)?;
    // Unprepare is served without NVML.
    env.end("before", &before)?;
    edit(env, |engine| engine.set_driver_loaded(true))?;
    all_tainted(env, taints::DRIVER_DOWN, false)?;
    let after = pod_with_gpu(env, "after")?;
    env.end("after", &after)
}

/// `kubectl drain`, as an admin calls it: pods leave, the driver is let go; afterwards they are
/// back.
pub(super) fn drained(env: &Env) -> Result<()> {
    let uid = pod_with_gpu(env, "last")?;
    env.create(&template("gpu", &request(&product(SHARED), 1)))?;
    env.create(&deployment("returns", 1, &Pod::new("").template("gpu")))?;
    env.wait_for_replicas("returns", 1)?;
    let outcome = cordoned(env, &uid);
    env.cluster.kubectl(&["uncordon", Layout::NODE])?;
    outcome?;
    all_tainted(env, taints::DRIVER_DOWN, false)?;
    env.wait_for_replicas("returns", 1)?;
    env.delete("Deployment", "returns")?;
    let next = pod_with_gpu(env, "next")?;
    env.end("next", &next)
}

fn cordoned(env: &Env, last: &str) -> Result<()> {
    env.cluster.kubectl(&["cordon", Layout::NODE])?;
    // Pods have GPUs: the driver is needed.
    all_tainted(env, taints::DRIVER_DOWN, false)?;
    let drain = [
        "drain",
        Layout::NODE,
        "--ignore-daemonsets",
        "--force",
        "--timeout=60s",
    ];
    env.cluster.kubectl(&drain)?;
    env.wait_until_gone("Pod", "last")?;
    env.driver.wait_until_unprepared(last)?;
    all_tainted(env, taints::DRIVER_DOWN, true).context("the driver is not let go")
}

/// The boot id after a reboot.
pub(super) const BOOT: &str = "3c5f6d1e-8a5b-4c7d-9e21-5d1f0a9b7c42";

/// The file that has the node's boot id.
pub(super) fn boot_id_file(env: &Env) -> PathBuf {
    env.driver
        .gpus()
        .root()
        .join("proc/sys/kernel/random/boot_id")
}

pub(super) fn rebooted(env: &Env) -> Result<()> {
    let file = boot_id_file(env);
    let real = fs_err::read_to_string(&file)?;
    let (uid, ended) = (pod_with_gpu(env, "kept")?, pod_with_gpu(env, "ended")?);
    let minors = env.minors("kept")?;
    thread::scope(|scope| {
        let back = scope.spawn(|| {
            // A pod whose unprepare waited over the reboot is let go without a driver; then that
            // comes.
            let gone = env
                .wait_until_gone("Pod", "ended")
                .and_then(|()| env.driver.wait_until_unprepared(&ended));
            edit(env, |engine| engine.set_driver_loaded(true))?;
            gone
        });
        let killed = env.driver.kill_and(|| {
            edit(env, |engine| {
                engine.reboot();
                engine.set_driver_loaded(false);
            })?;
            fs_err::write(&file, BOOT)?;
            env.delete("Pod", "ended")
        });
        killed.and(
            back.join()
                .map_err(|_| anyhow::anyhow!("the thread panicked"))?,
        )
    })?;
    let carried_out_again = poll("the record to be carried out again", NOTICED, || {
        Ok(fs_err::read_to_string(env.driver.record(&uid))?.contains(BOOT))
    });
    // What comes after is of the machine's own boot again.
    let outcome = carried_out_again.and_then(|()| {
        ensure!(
            !env.driver.cdi_files(&uid)?.is_empty(),
            "the CDI file is not there after the reboot"
        );
        ensure!(env.minors("kept")? == minors, "the claim has another GPU");
        let after = pod_with_gpu(env, "after")?;
        env.end("after", &after)?;
        env.end("kept", &uid)
    });
    env.driver.kill_and(|| Ok(fs_err::write(&file, &real)?))?;
    outcome
}

pub(super) fn strangers(env: &Env) -> Result<()> {
    let gpus = env.driver.gpus();
    let theirs = gpus
        .of_product(SHARED)
        .first()
        .copied()
        .context("the node has no such GPU")?;
    let is_tainted = |uuid: &str| {
        Ok(env
            .driver
            .taints(uuid)?
            .iter()
            .any(|key| key == taints::NEIGHBOUR))
    };
    gpus.start_process(theirs, STRANGER)?;
    let outcome = poll(
        "the taint of a GPU that a foreign process uses",
        NOTICED,
        || is_tainted(theirs),
    )
    .and_then(|()| {
        for other in gpus
            .of_product(SHARED)
            .into_iter()
            .filter(|uuid| *uuid != theirs)
        {
            ensure!(!is_tainted(other)?, "{other} is tainted for its neighbour");
        }
        // Another GPU is chosen.
        let uid = pod_with_gpu(env, "beside")?;
        let minor = gpus.get(theirs)?.minor;
        ensure!(
            env.minors("beside")? != BTreeSet::from([minor]),
            "the GPU was given out although it is used"
        );
        env.end("beside", &uid)
    });
    gpus.end_process(STRANGER)?;
    outcome?;
    poll("the end of the taint", NOTICED, || {
        is_tainted(theirs).map(|tainted| !tainted)
    })
}

pub(super) fn rolling_updates(env: &Env) -> Result<()> {
    const UPDATES: u32 = 3;
    let kept = pod_with_gpu(env, "kept")?;
    let lived = under_pods(env, || {
        (0..UPDATES).try_for_each(|n| {
            env.driver
                .upgrade(&[&format!("podAnnotations.update=n{n}")])
        })
    })?;
    env.end("kept", &kept)?;
    say(&format!(
        "     {UPDATES} rolling updates under {lived} pods, none refused"
    ));
    ensure!(lived >= UPDATES, "too few pods for a verdict: {lived}");
    env.driver.upgrade(&[])
}

/// Does something while pods come and go in three streams. None of them may be refused; returns how
/// many there were.
fn under_pods(env: &Env, what: impl FnOnce() -> Result<()>) -> Result<u32> {
    let over = AtomicBool::new(false);
    let stream = |name: &'static str| -> Result<u32> {
        let mut lived = 0;
        while !over.load(Ordering::Relaxed) {
            let pod = format!("{name}-{lived}");
            let uid = pod_with_gpu(env, &pod)?;
            let refused = env
                .messages(&pod)
                .into_iter()
                .find(|m| m.contains("prepare dynamic resources"));
            ensure!(refused.is_none(), "pod {pod}: {refused:?}");
            env.end(&pod, &uid)?;
            lived += 1;
        }
        Ok(lived)
    };
    thread::scope(|scope| {
        let streams = ["a", "b", "c"].map(|name| scope.spawn(move || stream(name)));
        let done = what();
        over.store(true, Ordering::Relaxed);
        let mut lived = 0;
        for stream in streams {
            lived += stream
                .join()
                .map_err(|_| anyhow::anyhow!("a stream of pods panicked"))??;
        }
        done.map(|()| lived)
    })
}
