//! Policies that change while claims are on their way: allocated, and not yet prepared.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::{
    Context, Env, Policy, Result, at, create, end, ensure, given, h100, names, poll, share, spec,
    wait_for_modes, whole,
};
use crate::api::has_condition;
use crate::case::PATIENCE;
use crate::process::say;
use crate::soak;

const ROUNDS: usize = 2;
const PODS: usize = 8;

/// Progress of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waits,
    Placed,
    Runs,
}

fn state(env: &Env, pod: &str) -> Result<State> {
    let pod = env
        .api()
        .get(&env.path("Pod", pod)?)?
        .with_context(|| format!("pod {pod} is gone"))?;
    Ok(
        match (
            at(&pod, "spec.nodeName").is_null(),
            has_condition(&pod, "Ready"),
        ) {
            (true, _) => State::Waits,
            (false, false) => State::Placed,
            (false, true) => State::Runs,
        },
    )
}

pub(in crate::cases) fn flips(env: &Env) -> Result<()> {
    let over = AtomicBool::new(false);
    let (outcome, seen) = thread::scope(|scope| {
        let watch = scope.spawn(|| soak::contradictions_until(env, &over));
        let outcome = rounds(env);
        over.store(true, Ordering::Relaxed);
        (outcome, watch.join())
    });
    let seen = seen.map_err(|_| anyhow::anyhow!("the watching thread panicked"))?;
    let caught = outcome?;
    ensure!(seen.is_empty(), "two holders: {seen:?}");
    say(&format!(
        "     {ROUNDS} times two policies under {PODS} pods each, {caught} of them allocated and not prepared"
    ));
    ensure!(
        caught > 0,
        "no policy changed between an allocation and its prepare"
    );
    Ok(())
}

/// A device that a claim holds is published as long as the claim exists, and no other claim gets
/// it.
fn kept(env: &Env, claim: &str) -> Result<()> {
    for one in given(env, claim)? {
        poll(
            &format!("tainted device {} of claim {claim}", one.device),
            PATIENCE,
            || {
                let devices = env.driver.devices()?;
                let Some(found) = devices
                    .iter()
                    .find(|found| at(found, "name") == one.device.as_str())
                else {
                    return Ok(false);
                };
                let taints = at(found, "taints").as_array().cloned().unwrap_or_default();
                Ok(taints
                    .iter()
                    .any(|taint| at(taint, "key") == names::taints::WITHDRAWN))
            },
        )?;
    }
    Ok(())
}

/// Returns the number of pods that were between allocation and prepare when the policy changed.
fn rounds(env: &Env) -> Result<usize> {
    let gpus = [h100(env, 4)?, h100(env, 5)?];
    let policy = Policy::modes(env, &gpus, &["TimeSlicing"])?;
    let mut caught = 0;
    for round in 0..ROUNDS {
        let mut pods = Vec::new();
        for number in 0..PODS {
            let name = format!("share-{round}-{number}");
            pods.push((
                create(env, &name, &[share("gpu", &gpus, &[("memory", "1Gi")])])?,
                name,
            ));
        }
        let states = || {
            pods.iter()
                .map(|(_, name)| state(env, name))
                .collect::<Result<Vec<State>>>()
        };
        poll("first pod that is placed", PATIENCE, || {
            Ok(states()?.contains(&State::Placed))
        })?;
        policy.change(&spec(&gpus, &["Whole"]))?;
        caught += states()?
            .iter()
            .filter(|state| **state == State::Placed)
            .count();
        let name = format!("whole-{round}");
        let exclusive = create(env, &name, &[whole(&gpus)])?;
        // What was promised is kept; who came too late waits.
        poll("end of everything that was on its way", PATIENCE, || {
            Ok(!states()?.contains(&State::Placed))
        })?;
        for (_, name) in &pods {
            if state(env, name)? == State::Runs {
                kept(env, name)?;
            }
        }
        policy.change(&spec(&gpus, &["TimeSlicing"]))?;
        for (_, name) in &pods {
            super::check(env, name, "main", name)?;
            let refused = env
                .messages(name)
                .into_iter()
                .find(|text| text.contains("prepare dynamic resources"));
            ensure!(refused.is_none(), "pod {name}: {refused:?}");
        }
        for (_, name) in &pods {
            env.delete("Pod", name)?;
        }
        for (uid, name) in &pods {
            end(env, name, uid)?;
        }
        policy.change(&spec(&gpus, &["Whole"]))?;
        super::check(env, &name, "main", &name)?;
        end(env, &name, &exclusive)?;
        policy.change(&spec(&gpus, &["TimeSlicing"]))?;
        wait_for_modes(env, &gpus, &["TimeSlicing"])?;
    }
    Ok(caught)
}
