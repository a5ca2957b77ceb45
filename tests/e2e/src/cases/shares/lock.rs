//! The mode lock as pods: the first claim that lands on a GPU decides what it becomes.

use super::{
    Env, Policy, Result, create, end, ensure, given, h100, partition, run, share, still_waiting,
    whole,
};

use crate::api::at;
use crate::case::PATIENCE;
use crate::wait::wait_for;

const ALL: &[&str] = &["Whole", "Mig", "TimeSlicing"];

pub(in crate::cases) fn over_capacity(env: &Env) -> Result<()> {
    let gpu = h100(env, 0)?;
    let _policy = Policy::modes(env, &[gpu], ALL)?;
    // 80 GB: 30 and 40 Gi fit, 20 more don't.
    let small = run(
        env,
        "small",
        &[share("gpu", &[gpu], &[("memory", "30Gi"), ("cores", "30")])],
    )?;
    let large = run(
        env,
        "large",
        &[share("gpu", &[gpu], &[("memory", "40Gi"), ("cores", "40")])],
    )?;
    create(
        env,
        "memory",
        &[share("gpu", &[gpu], &[("memory", "20Gi"), ("cores", "1")])],
    )?;
    env.wait_until_unschedulable("memory")?;
    create(
        env,
        "cores",
        &[share("gpu", &[gpu], &[("memory", "1Gi"), ("cores", "40")])],
    )?;
    env.wait_until_unschedulable("cores")?;
    let (first, second) = (given(env, "small")?, given(env, "large")?);
    let of = |given: &[super::Given]| given.first().cloned();
    let (Some(first), Some(second)) = (of(&first), of(&second)) else {
        anyhow::bail!("claims were given {first:?} and {second:?}");
    };
    ensure!(
        first.device == second.device,
        "two shares that fit are on {first:?} and {second:?}"
    );
    ensure!(
        first.share != second.share,
        "two shares have one shareID: {first:?}, {second:?}"
    );
    ensure!(
        (first.memory.as_str(), first.cores.as_str()) == ("30Gi", "30"),
        "granted {first:?}"
    );
    // What ends makes room.
    end(env, "large", &large)?;
    for name in ["memory", "cores"] {
        super::check(env, name, "main", name)?;
    }
    end(env, "small", &small)
}

pub(in crate::cases) fn whole_and_shares(env: &Env) -> Result<()> {
    let (gpu, other) = (h100(env, 1)?, h100(env, 10)?);
    let _policy = Policy::modes(env, &[gpu], ALL)?;
    let wanted = [("memory", "10Gi")];
    let first = run(env, "first", &[share("gpu", &[gpu], &wanted)])?;
    let second = run(env, "second", &[share("gpu", &[gpu], &wanted)])?;
    let waits = create(env, "whole", &[whole(&[gpu])])?;
    env.wait_until_unschedulable("whole")?;
    end(env, "first", &first)?;
    still_waiting(env, &["whole"], other, 0)?;
    end(env, "second", &second)?;
    super::check(env, "whole", "main", "whole")?;
    // And the other way round.
    let again = create(env, "again", &[share("gpu", &[gpu], &wanted)])?;
    env.wait_until_unschedulable("again")?;
    end(env, "whole", &waits)?;
    super::check(env, "again", "main", "again")?;
    end(env, "again", &again)
}

pub(in crate::cases) fn partitions_and_shares(env: &Env) -> Result<()> {
    let (gpu, other) = (h100(env, 2)?, h100(env, 10)?);
    let _policy = Policy::modes(env, &[gpu], ALL)?;
    let first = run(env, "first", &[share("gpu", &[gpu], &[("memory", "10Gi")])])?;
    let part = create(env, "part", &[partition("part", &[gpu], "1g.10gb")])?;
    env.wait_until_unschedulable("part")?;
    let second = run(
        env,
        "second",
        &[share("gpu", &[gpu], &[("memory", "10Gi")])],
    )?;
    end(env, "first", &first)?;
    still_waiting(env, &["part"], other, 0)?;
    end(env, "second", &second)?;
    env.wait_until_running("part")?;
    let living = env.driver.gpus().instances(gpu)?.len();
    ensure!(
        living == 1,
        "the GPU has {living} instances, its claims one"
    );
    let third = create(env, "third", &[share("gpu", &[gpu], &[("memory", "10Gi")])])?;
    env.wait_until_unschedulable("third")?;
    end(env, "part", &part)?;
    super::check(env, "third", "main", "third")?;
    end(env, "third", &third)?;
    ensure!(
        env.driver.gpus().instances(gpu)?.is_empty(),
        "an instance is left"
    );
    Ok(())
}

/// Sixteen shares come and go; the GPU is free exactly when the last has gone.
pub(in crate::cases) fn leaves(env: &Env) -> Result<()> {
    const SHARES: usize = 16;
    let gpu = h100(env, 3)?;
    let _policy = Policy::modes(env, &[gpu], ALL)?;
    let mut uids = Vec::new();
    for number in 0..SHARES {
        let name = format!("share-{number}");
        uids.push((
            create(env, &name, &[share("gpu", &[gpu], &[("memory", "1Gi")])])?,
            name,
        ));
    }
    for (round, (_, name)) in uids.iter().enumerate() {
        // Refused although there was room: docs/troubleshoot.md, "is not tried again".
        if !placed(env, name)? {
            still_waiting(env, &[], h100(env, 10)?, round)?;
        }
        super::check(env, name, "main", name)?;
    }
    // The default is sixteen slots.
    create(env, "more", &[share("gpu", &[gpu], &[("memory", "1Gi")])])?;
    env.wait_until_unschedulable("more")?;
    env.delete("Pod", "more")?;
    env.wait_until_gone("Pod", "more")?;
    let waits = create(env, "whole", &[whole(&[gpu])])?;
    env.wait_until_unschedulable("whole")?;
    env.driver.kill()?;
    let last = uids.pop();
    for (_, name) in &uids {
        env.delete("Pod", name)?;
    }
    for (uid, _) in &uids {
        env.driver.wait_until_unprepared(uid)?;
    }
    let pod = env.api().get(&env.path("Pod", "whole")?)?;
    ensure!(
        pod.is_some_and(|pod| at(&pod, "spec.nodeName").is_null()),
        "the whole GPU was given away although a share lives"
    );
    if let Some((uid, name)) = last {
        end(env, &name, &uid)?;
    }
    super::check(env, "whole", "main", "whole")?;
    end(env, "whole", &waits)
}

/// Returns true if the scheduler has placed a pod, as soon as it has placed or refused it.
fn placed(env: &Env, pod: &str) -> Result<bool> {
    let path = env.path("Pod", pod)?;
    wait_for(&format!("pod {pod} placed or refused"), PATIENCE, || {
        let Some(pod) = env.api().get(&path)? else {
            return Ok(None);
        };
        let conditions = at(&pod, "status.conditions")
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let refused = conditions
            .iter()
            .any(|condition| at(condition, "reason") == "Unschedulable");
        let placed = !at(&pod, "spec.nodeName").is_null();
        Ok((placed || refused).then_some(placed))
    })
}
