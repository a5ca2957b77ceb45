//! Pods that have a GPU one after another: the next must not wait a kubelet's retry, and must not
//! come too early.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use divvy_api::names;

use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim, product};
use crate::process::say;
use crate::wait::wait_for;

/// A failed prepare costs at least 60 s, so this shows whether one failed.
const NO_RETRY: Duration = Duration::from_secs(30);

pub(super) fn claim_reused(env: &Env) -> Result<()> {
    let uid = Env::uid(&env.create(&claim("kept", &product("NVIDIA A30")))?)?;
    let mut allocated = Vec::new();
    for pod in ["a", "b"] {
        env.create(&Pod::new(pod).claim("kept").build())?;
        env.check(pod, "main", &["kept"])?;
        let now = env.claim("kept")?;
        ensure!(Env::uid(&now)? == uid, "the claim is another one");
        allocated.push(at(&now, "status.allocation.allocationTimestamp").clone());
        env.end(pod, &uid)?;
        wait_for("claim without allocation", PATIENCE, || {
            Ok(at(&env.claim("kept")?, "status.allocation")
                .is_null()
                .then_some(()))
        })?;
    }
    ensure!(
        allocated.iter().all(serde_json::Value::is_string),
        "no time of allocation: {allocated:?}"
    );
    ensure!(
        allocated.first() != allocated.last(),
        "the claim was not allocated again: {allocated:?}"
    );
    Ok(())
}

pub(super) fn force_deleted(env: &Env) -> Result<()> {
    for name in ["first", "second"] {
        env.create(&claim(name, &product("NVIDIA L4")))?;
    }
    env.create(&Pod::new("a").claim("first").build())?;
    let seen = env.check("a", "main", &["first"])?;
    let gpu = env.driver.gpus().only("NVIDIA L4")?;
    env.driver.gpus().start_process(gpu, GHOST + 1)?;
    let start = Instant::now();
    env.force_delete("a")?;
    env.create(&Pod::new("b").claim("second").build())?;
    // The second claim has the GPU before the first has let go: its prepare waits for the process.
    ensure!(
        env.minors("second")? == seen,
        "the second pod has another GPU"
    );
    env.driver.gpus().end_process(GHOST + 1)?;
    env.wait_until_running("b")?;
    let took = start.elapsed();
    ensure!(
        env.check("b", "main", &["second"])? == seen,
        "the second pod has another GPU"
    );
    say(&format!(
        "     a pod after a force-deleted one on the same GPU ran after {:.1} s",
        took.as_secs_f32()
    ));
    ensure!(took < NO_RETRY, "the second pod took {took:?}");
    Ok(())
}

/// The id of a process that only the NVML library knows of.
const GHOST: u32 = 4_000_001;
/// Time that a GPU may take to be given out again after its last process has ended.
const SECONDS: Duration = Duration::from_secs(15);

pub(super) fn in_use(env: &Env) -> Result<()> {
    const PRODUCT: &str = "NVIDIA A100-SXM4-40GB";
    let gpu = env.driver.gpus().only(PRODUCT)?;
    let uid = Env::uid(&env.create(&claim("first", &product(PRODUCT)))?)?;
    env.create(&Pod::new("a").claim("first").build())?;
    env.check("a", "main", &["first"])?;
    env.driver.gpus().start_process(gpu, GHOST)?;
    env.delete("Pod", "a")?;
    env.wait_until_gone("Pod", "a")?;
    wait_for("taint of the GPU that is still in use", PATIENCE, || {
        Ok(env
            .driver
            .taints(gpu)?
            .iter()
            .any(|key| key == names::taints::LINGERING)
            .then_some(()))
    })?;
    ensure!(
        env.driver.cdi_files(&uid)?.is_empty(),
        "the CDI file of a claim without a pod is left"
    );

    env.create(&claim("second", &product(PRODUCT)))?;
    env.create(&Pod::new("b").claim("second").build())?;
    env.wait_until_unschedulable("b")?;
    env.driver.gpus().end_process(GHOST)?;
    let start = Instant::now();
    env.wait_until_running("b")?;
    let took = start.elapsed();
    env.check("b", "main", &["second"])?;
    ensure!(
        env.driver.taints(gpu)?.is_empty(),
        "the GPU is still tainted"
    );
    ensure!(
        !env.driver.record(&uid).exists(),
        "the first claim's record is left"
    );
    say(&format!(
        "     a GPU was given out {:.1} s after its last process had ended",
        took.as_secs_f32()
    ));
    ensure!(
        took < SECONDS,
        "the GPU was given out {took:?} after its last process had ended"
    );
    Ok(())
}

/// A number that distinguishes the stubborn pod's process from all others.
const MARK: &str = "314159";

pub(super) fn stubborn(env: &Env) -> Result<()> {
    for name in ["first", "second"] {
        env.create(&claim(name, &product("Tesla T4")))?;
    }
    let deaf = format!("trap '' TERM; echo that is all; while :; do sleep {MARK}; done");
    env.create(
        &Pod::new("a")
            .claim("first")
            .container_running("main", &["first"], &deaf)
            .grace(8)
            .build(),
    )?;
    env.wait_until_running("a")?;
    env.log("a", "main")?;
    let alive = || {
        env.cluster
            .processes(|args| args.iter().any(|arg| arg.contains(MARK)))
    };
    let shells = alive()?;
    let &pid = shells
        .first()
        .context("the first pod's process is not found")?;
    env.driver
        .gpus()
        .start_process(env.driver.gpus().only("Tesla T4")?, pid)?;

    env.force_delete("a")?;
    env.create(&Pod::new("b").claim("second").build())?;
    let runs = || {
        let pod = env.api().get(&env.path("Pod", "b")?)?;
        Ok::<_, anyhow::Error>(pod.is_some_and(|pod| has_condition(&pod, "Ready")))
    };
    let mut seen = 0;
    wait_for("end of the first pod's process", PATIENCE, || {
        // In this order: what runs now was started before, and what lives after that lived then.
        let (runs, alive) = (runs()?, !alive()?.is_empty());
        seen += u32::from(alive);
        Ok((runs || !alive).then_some(runs))
    })
    .and_then(|early| {
        ensure!(
            !early,
            "the second pod ran while the first pod's process still lived"
        );
        ensure!(
            seen > 0,
            "the first pod ended at once, so nothing was shown"
        );
        Ok(())
    })?;
    // What the driver frees last is the context on the GPU.
    env.driver.gpus().end_process(pid)?;
    let start = Instant::now();
    env.wait_until_running("b")?;
    let took = start.elapsed();
    say(&format!(
        "     a pod after a stubborn one on the same GPU ran {:.1} s after that had ended",
        took.as_secs_f32()
    ));
    ensure!(
        took < SECONDS,
        "the second pod took {took:?} after the first had ended"
    );
    Ok(())
}
