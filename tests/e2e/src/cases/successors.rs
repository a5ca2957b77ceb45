//! One GPU, one pod after another: the next must not wait a kubelet's retry, and must not come too early.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::api::{at, has_condition};
use crate::case::{Env, PATIENCE};
use crate::objects::{Pod, claim, product};
use crate::process::say;
use crate::wait::wait_for;

/// A failed prepare costs at least 60 s, so this tells whether one failed.
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
            Ok(at(&env.claim("kept")?, "status.allocation").is_null().then_some(()))
        })?;
    }
    ensure!(allocated.len() == 2, "two pods have run");
    Ok(())
}

pub(super) fn force_deleted(env: &Env) -> Result<()> {
    for name in ["first", "second"] {
        env.create(&claim(name, &product("NVIDIA L4")))?;
    }
    env.create(&Pod::new("a").claim("first").build())?;
    let seen = env.check("a", "main", &["first"])?;
    let start = Instant::now();
    env.force_delete("a")?;
    env.create(&Pod::new("b").claim("second").build())?;
    env.wait_until_running("b")?;
    let took = start.elapsed();
    ensure!(env.check("b", "main", &["second"])? == seen, "the second pod has another GPU");
    say(&format!(
        "     a pod after a force-deleted one on the same GPU ran after {:.1} s",
        took.as_secs_f32()
    ));
    ensure!(took < NO_RETRY, "the second pod took {took:?}");
    Ok(())
}

/// A number that tells the stubborn pod's process from all others.
const MARK: &str = "314159";

pub(super) fn stubborn(env: &Env) -> Result<()> {
    for name in ["first", "second"] {
        env.create(&claim(name, &product("Tesla T4")))?;
    }
    let deaf = format!("trap '' TERM; echo that is all; while :; do sleep {MARK}; done");
    env.create(&Pod::new("a").claim("first").container_running("main", &["first"], &deaf).grace(8).build())?;
    env.wait_until_running("a")?;
    env.log("a", "main")?;
    let lives = || {
        Ok::<_, anyhow::Error>(
            !env.cluster.processes(|args| args.iter().any(|arg| arg.contains(MARK)))?.is_empty(),
        )
    };
    ensure!(lives()?, "the first pod's process is not found");

    env.force_delete("a")?;
    env.create(&Pod::new("b").claim("second").build())?;
    let path = env.path("Pod", "b")?;
    let (start, mut was_seen) = (Instant::now(), false);
    wait_for("running pod b", PATIENCE, || {
        // In this order: what runs now was started before, and what lives after that lived then.
        let runs = env.api().get(&path)?.is_some_and(|pod| has_condition(&pod, "Ready"));
        let alive = lives()?;
        was_seen |= alive;
        Ok((runs || (alive && start.elapsed() > NO_RETRY)).then_some(runs && !alive))
    })
    .and_then(|in_order| {
        ensure!(in_order, "the second pod ran while the first pod's process still lived");
        ensure!(was_seen, "the first pod ended at once, so nothing was shown");
        Ok(())
    })
}
