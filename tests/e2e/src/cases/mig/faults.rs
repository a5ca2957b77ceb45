//! Partitions and disturbances: foreign instances, and an end of the plugin between any two calls.

use std::time::Duration;

use divvy_gpu_sim::{Engine, Fault, SimInstance};
use divvy_model::GpuOp;

use super::{
    Context, Env, Result, allocated, check, create_pod, end, ensure, everything, h100, names, only, places,
    poll, run_pod, tainted_as,
};
use crate::case::PATIENCE;
use crate::cases::life::{BOOT, boot_id_file, edit};

/// The plugin is not notified of foreign instances; it looks once a minute.
const NOTICED: Duration = Duration::from_mins(2);

pub(in crate::cases) fn foreign(env: &Env) -> Result<()> {
    everything(env)?;
    let (gpu, gpus) = (h100(env, 6)?, env.driver.gpus());
    let ours = run_pod(env, "ours", gpu, "1g.10gb")?;

    let (caps, placement) = gpus.edit(gpu, |engine, uuid| -> Result<_> {
        let caps = engine.mig_capabilities(uuid)?;
        let name = |p: &divvy_model::mig::GpuInstanceProfile| caps.name(p).map(|name| name.to_string());
        let two = caps.profiles().iter().find(|p| name(p).as_deref() == Some("2g.20gb"));
        let two = two.context("an H100 has no 2g.20gb")?.id;
        engine.make_foreign_instance(uuid, two, 4)?;
        let placement = caps.placement(two, 4).context("an H100 has no 2g.20gb at 4")?;
        Ok((caps, placement))
    })??;
    let theirs = |env: &Env| -> Result<SimInstance> {
        let living = env.driver.gpus().instances(gpu)?;
        living.into_iter().find(|one| one.instance.placement == placement).context("their instance is gone")
    };
    let before = theirs(env)?;
    poll("taints on devices that overlap the foreign instance, and no others", NOTICED, || {
        tainted_as(env, gpu, &caps, names::taints::FOREIGN, Some(placement))
    })?;
    let beside = run_pod(env, "beside", gpu, "2g.20gb").context("beside the foreign instance")?;
    let blocked = create_pod(env, "blocked", gpu, "7g.80gb")?;
    env.wait_until_unschedulable("blocked")?;

    // Nor is it taken for a leftover by a plugin that starts, or when ours go.
    env.driver.kill()?;
    end(env, "ours", &ours)?;
    end(env, "beside", &beside)?;
    ensure!(places(env, gpu)?.len() == 1 && theirs(env)? == before, "their instance was touched");
    ensure!(
        tainted_as(env, gpu, &caps, names::taints::FOREIGN, Some(placement))?,
        "the taints are gone, the instance is not"
    );

    gpus.edit(gpu, |engine, uuid| -> Result<()> {
        for compute in &before.compute {
            engine.destroy_compute_instance(uuid, before.instance.id, compute.id)?;
        }
        Ok(engine.destroy_gpu_instance(uuid, before.instance.id)?)
    })??;
    poll("end of the taints with that of their instance", NOTICED, || {
        tainted_as(env, gpu, &caps, names::taints::FOREIGN, None)
    })?;
    check(env, "blocked", "main", &[("blocked", "")])?;
    end(env, "blocked", &blocked)?;
    only(env, gpu, &[])
}

/// Kills the plugin's process where it hangs; the next one meets no fault. Returns when that is ready and the kubelet
/// has been made to look at the pod again: by itself it would, after a failed prepare, in a minute or more.
fn kill(env: &Env, gpu: &str, pod: &str) -> Result<()> {
    let clear = || env.driver.gpus().edit(gpu, |engine, _| engine.clear_faults(None));
    env.driver.kill_and(clear)?;
    env.nudge(pod)
}

pub(in crate::cases) fn killed(env: &Env) -> Result<()> {
    everything(env)?;
    let (gpu, gpus) = (h100(env, 7)?, env.driver.gpus());
    // The call has done its work on the GPU, and the record does not have it.
    let hang_after = |op: GpuOp| {
        gpus.edit(gpu, |engine, uuid| engine.set_fault(Fault::hang_after().of(op).on(uuid).times(1)))
            .map(drop)
    };
    let state = |what: &str, instances: usize, compute: usize| {
        poll(what, PATIENCE, || {
            let living = gpus.instances(gpu)?;
            Ok((living.len(), living.iter().map(|one| one.compute.len()).sum::<usize>())
                == (instances, compute))
        })
    };

    for (round, op) in [GpuOp::CreateGpuInstance, GpuOp::CreateComputeInstance].into_iter().enumerate() {
        let name = format!("create-{round}");
        hang_after(op)?;
        let uid = create_pod(env, &name, gpu, "2g.20gb")?;
        state("an instance that the plugin has made and not recorded", 1, round)?;
        kill(env, gpu, &name)?;
        check(env, &name, "main", &[(&name, "")])?;
        only(env, gpu, &[&name])?;

        let op = [GpuOp::DestroyComputeInstance, GpuOp::DestroyGpuInstance];
        hang_after(*op.get(round).context("two rounds")?)?;
        env.delete("Pod", &name)?;
        state("an instance that the plugin has destroyed, which it has not recorded", 1 - round, 0)?;
        kill(env, gpu, &name)?;
        end(env, &name, &uid)?;
        only(env, gpu, &[])?;
        // A new pod of the plugin, so that the kubelet does not make it wait ever longer.
        env.driver.stop()?;
        env.driver.start()?;
    }

    // And at no moment in particular: as soon as a pod is scheduled.
    for round in 0..3 {
        let name = format!("soon-{round}");
        let uid = create_pod(env, &name, gpu, "1g.10gb")?;
        allocated(env, &name, "")?;
        kill(env, gpu, &name)?;
        check(env, &name, "main", &[(&name, "")])?;
        only(env, gpu, &[&name])?;
        end(env, &name, &uid)?;
        only(env, gpu, &[])?;
    }
    env.driver.wait_until_ready().map(drop)
}

/// A reboot takes every partition with it: what a claim has is made again, what was let go meanwhile is not.
pub(in crate::cases) fn rebooted(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 5)?;
    let kept = run_pod(env, "kept", gpu, "2g.20gb")?;
    let before = places(env, gpu)?;
    let ended = run_pod(env, "ended", gpu, "1g.10gb")?;
    let file = boot_id_file(env);
    let real = fs_err::read_to_string(&file)?;
    env.driver.kill_and(|| {
        edit(env, Engine::reboot)?;
        ensure!(places(env, gpu)?.is_empty(), "a partition outlived the reboot");
        fs_err::write(&file, BOOT)?;
        env.delete("Pod", "ended")
    })?;
    let outcome = env
        .wait_until_gone("Pod", "ended")
        .and_then(|()| env.driver.wait_until_unprepared(&ended))
        .and_then(|()| {
            poll("the partition made again in its place", PATIENCE, || Ok(places(env, gpu)? == before))
        })
        .and_then(|()| end(env, "kept", &kept));
    // A new pod of the plugin: one that was killed often has to wait ever longer.
    env.driver.stop()?;
    fs_err::write(&file, &real)?;
    env.driver.start()?;
    outcome?;
    ensure!(places(env, gpu)?.is_empty(), "a partition is left");
    Ok(())
}
