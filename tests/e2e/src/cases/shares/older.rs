//! Clusters whose scheduler does not keep the modes of a GPU apart: it gets one, whatever a policy
//! asks for.

use super::{
    Env, Policy, Result, create, end, ensure, h100, offered, run, share, spec, still_waiting,
    types, wait_for_modes, whole,
};

const ALL: &[&str] = &["Whole", "Mig", "TimeSlicing"];

pub(in crate::cases) fn one_mode(env: &Env) -> Result<()> {
    let (gpu, other) = (h100(env, 0)?, h100(env, 10)?);
    let policy = Policy::create(env, &env.namespace, &spec(&[gpu], ALL))?;
    // Of several the first, as the GPU is.
    wait_for_modes(env, &[gpu], &["Whole"])?;
    let first = run(env, "first", &[whole(&[gpu])])?;
    let second = create(env, "second", &[whole(&[gpu])])?;
    env.wait_until_unschedulable("second")?;
    // Nor is anything added while it is in use, when another is asked for.
    policy.change(&spec(&[gpu], &["TimeSlicing"]))?;
    let sharing = create(
        env,
        "sharing",
        &[share("gpu", &[gpu], &[("memory", "1Gi")])],
    )?;
    still_waiting(env, &["second", "sharing"], other, 0)?;
    ensure!(
        !offered(env, gpu)?.contains("gpu-share"),
        "a GPU that a claim holds is also offered in shares"
    );
    policy.change(&spec(&[gpu], ALL))?;
    end(env, "first", &first)?;
    super::check(env, "second", "main", "second")?;
    end(env, "second", &second)?;
    env.delete("Pod", "sharing")?;
    env.wait_until_gone("Pod", "sharing")?;
    drop(sharing);
    Ok(())
}

/// Everything that can be asked for is asked for at once: what is given has one holder, or is a
/// share.
pub(in crate::cases) fn not_twice(env: &Env) -> Result<()> {
    let (first, second) = (h100(env, 1)?, h100(env, 2)?);
    let gpus = [first, second];
    let _policy = Policy::create(env, &env.namespace, &spec(&gpus, ALL))?;
    wait_for_modes(env, &gpus, &["Whole"])?;
    let mut uids = Vec::new();
    for number in 0..3 {
        for (kind, request) in [
            ("whole", whole(&gpus)),
            ("share", share("gpu", &gpus, &[("memory", "1Gi")])),
            ("part", super::partition("part", &gpus, "1g.10gb")),
        ] {
            let name = format!("{kind}-{number}");
            uids.push((create(env, &name, &[request])?, name));
        }
    }
    let waiting = |pod: &str| -> Result<bool> {
        let pod = env.api().get(&env.path("Pod", pod)?)?;
        Ok(pod.is_some_and(|pod| super::at(&pod, "spec.nodeName").is_null()))
    };
    // One of the three whole GPUs has to wait, and nothing else is there.
    super::poll("two pods with a GPU each", crate::case::PATIENCE, || {
        let placed = uids
            .iter()
            .map(|(_, name)| Ok(!waiting(name)?))
            .collect::<Result<Vec<bool>>>()?;
        Ok(placed.iter().filter(|placed| **placed).count() == 2)
    })?;
    let mut given = std::collections::BTreeSet::new();
    for (_, name) in &uids {
        if !waiting(name)? {
            ensure!(
                name.starts_with("whole"),
                "{name} was given something of a GPU that is offered whole"
            );
            env.wait_until_running(name)?;
            given.extend(super::given(env, name)?);
        }
    }
    ensure!(given.len() == 2, "two pods have {given:?}");
    ensure!(
        types(&["Whole"]) == offered(env, first)?,
        "the GPU is offered otherwise while it is in use"
    );
    for (_, name) in &uids {
        env.delete("Pod", name)?;
    }
    uids.iter()
        .try_for_each(|(uid, _)| env.driver.wait_until_unprepared(uid))
}
