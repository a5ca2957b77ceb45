//! Partitions and disturbances: foreign instances, and an end of the plugin between any two calls.

use std::time::Duration;

use divvy_gpu_sim::{Engine, Fault, SimInstance};
use divvy_model::{GpuOp, GpuUuid, MigMode};

use super::{
    Context, Env, Result, allocated, check, create_pod, create_whole, end, ensure, everything,
    h100, names, only, places, poll, run_pod, tainted_as,
};
use crate::api::at;
use crate::case::PATIENCE;
use crate::cases::life::{BOOT, boot_id_file, edit};
use crate::cases::shares::{Policy, wait_for_modes};
use crate::objects::Pod;

/// The plugin is not notified of foreign instances; it looks once a minute.
const NOTICED: Duration = Duration::from_mins(2);

pub(in crate::cases) fn foreign(env: &Env) -> Result<()> {
    everything(env)?;
    let (gpu, gpus) = (h100(env, 6)?, env.driver.gpus());
    let ours = run_pod(env, "ours", gpu, "1g.10gb")?;

    let (caps, placement) = gpus.edit(gpu, |engine, uuid| -> Result<_> {
        let caps = engine.mig_capabilities(uuid)?;
        let name =
            |p: &divvy_model::mig::GpuInstanceProfile| caps.name(p).map(|name| name.to_string());
        let two = caps
            .profiles()
            .iter()
            .find(|p| name(p).as_deref() == Some("2g.20gb"));
        let two = two.context("an H100 has no 2g.20gb")?.id;
        engine.make_foreign_instance(uuid, two, 4)?;
        let placement = caps
            .placement(two, 4)
            .context("an H100 has no 2g.20gb at 4")?;
        Ok((caps, placement))
    })??;
    let theirs = |env: &Env| -> Result<SimInstance> {
        let living = env.driver.gpus().instances(gpu)?;
        living
            .into_iter()
            .find(|one| one.instance.placement == placement)
            .context("their instance is gone")
    };
    let before = theirs(env)?;
    poll(
        "taints on devices that overlap the foreign instance, and no others",
        NOTICED,
        || tainted_as(env, gpu, &caps, names::taints::FOREIGN, Some(placement)),
    )?;
    let beside = run_pod(env, "beside", gpu, "2g.20gb").context("beside the foreign instance")?;
    let blocked = create_pod(env, "blocked", gpu, "7g.80gb")?;
    env.wait_until_unschedulable("blocked")?;

    // Nor is it taken for a leftover by a plugin that starts, or when ours go.
    env.driver.kill()?;
    end(env, "ours", &ours)?;
    end(env, "beside", &beside)?;
    ensure!(
        places(env, gpu)?.len() == 1 && theirs(env)? == before,
        "their instance was touched"
    );
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
    poll(
        "end of the taints with that of their instance",
        NOTICED,
        || tainted_as(env, gpu, &caps, names::taints::FOREIGN, None),
    )?;
    check(env, "blocked", "main", &[("blocked", "")])?;
    end(env, "blocked", &blocked)?;
    only(env, gpu, &[])
}

/// Kills the plugin's process where it hangs; the next one meets no fault. Returns when that is
/// ready and the kubelet has been made to look at the pod again: by itself it would, after a failed
/// prepare, in a minute or more.
fn kill(env: &Env, gpu: &str, pod: &str) -> Result<()> {
    let clear = || {
        env.driver
            .gpus()
            .edit(gpu, |engine, _| engine.clear_faults(None))
    };
    env.driver.kill_and(clear)?;
    env.nudge(pod)
}

pub(in crate::cases) fn killed(env: &Env) -> Result<()> {
    everything(env)?;
    let (gpu, gpus) = (h100(env, 7)?, env.driver.gpus());
    // The call has done its work on the GPU, and the record does not have it.
    let hang_after = |op: GpuOp| {
        gpus.edit(gpu, |engine, uuid| {
            engine.set_fault(Fault::hang_after().of(op).on(uuid).times(1))
        })
        .map(drop)
    };
    let state = |what: &str, instances: usize, compute: usize| {
        poll(what, PATIENCE, || {
            let living = gpus.instances(gpu)?;
            Ok((
                living.len(),
                living.iter().map(|one| one.compute.len()).sum::<usize>(),
            ) == (instances, compute))
        })
    };

    for (round, op) in [GpuOp::CreateGpuInstance, GpuOp::CreateComputeInstance]
        .into_iter()
        .enumerate()
    {
        let name = format!("create-{round}");
        hang_after(op)?;
        let uid = create_pod(env, &name, gpu, "2g.20gb")?;
        state(
            "an instance that the plugin has made and not recorded",
            1,
            round,
        )?;
        kill(env, gpu, &name)?;
        check(env, &name, "main", &[(&name, "")])?;
        only(env, gpu, &[&name])?;

        let op = [GpuOp::DestroyComputeInstance, GpuOp::DestroyGpuInstance];
        hang_after(*op.get(round).context("two rounds")?)?;
        env.delete("Pod", &name)?;
        state(
            "an instance that the plugin has destroyed, which it has not recorded",
            1 - round,
            0,
        )?;
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

/// A reboot takes every partition with it: what a claim has is made again, what was let go
/// meanwhile is not.
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
        ensure!(
            places(env, gpu)?.is_empty(),
            "a partition outlived the reboot"
        );
        fs_err::write(&file, BOOT)?;
        env.delete("Pod", "ended")
    })?;
    let outcome = env
        .wait_until_gone("Pod", "ended")
        .and_then(|()| env.driver.wait_until_unprepared(&ended))
        .and_then(|()| {
            poll("the partition made again in its place", PATIENCE, || {
                Ok(places(env, gpu)? == before)
            })
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

/// An instance that is destroyed under a running pod: no container gets the device nodes of another
/// one, and nothing is made on the GPU until the pod is deleted.
pub(in crate::cases) fn gone(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 8)?;
    let lost = run_pod(env, "lost", gpu, "1g.10gb")?;
    ensure!(!env.driver.cdi_files(&lost)?.is_empty(), "no CDI file");
    env.driver.gpus().edit(gpu, |engine, uuid| -> Result<()> {
        for living in engine.gpu_instances(uuid)? {
            for inside in engine.compute_instances(uuid, living.id)? {
                engine.destroy_compute_instance(uuid, living.id, inside.id)?;
            }
            engine.destroy_gpu_instance(uuid, living.id)?;
        }
        Ok(())
    })??;
    poll("the end of the CDI file", NOTICED, || {
        Ok(env.driver.cdi_files(&lost)?.is_empty())
    })?;

    // The kubelet prepares a claim once: the second pod gets what the first would after a restart.
    env.create(&Pod::new("again").claim("lost").build())?;
    poll("a container that is refused", PATIENCE, || {
        let pod = env.api().get(&env.path("Pod", "again")?)?;
        let pod = pod.context("the second pod is gone")?;
        let waits = at(&pod, "status.containerStatuses.0.state.waiting.reason");
        Ok(waits.as_str().is_some_and(|why| why.ends_with("Error")))
    })?;
    create_pod(env, "next", gpu, "1g.10gb")?;
    env.wait_until_unschedulable("next")?;
    ensure!(places(env, gpu)?.is_empty(), "an instance was made");

    env.delete("Pod", "again")?;
    env.wait_until_gone("Pod", "again")?;
    end(env, "lost", &lost)?;
    check(env, "next", "main", &[("next", "")])?;
    let next = Env::uid(&env.claim("next")?)?;
    end(env, "next", &next)?;
    ensure!(places(env, gpu)?.is_empty(), "a partition is left");
    Ok(())
}

/// The node's label is taken off, as when the node goes to another driver: a GPU that no claim
/// holds has its MIG mode back before the plugin's pod is gone.
pub(in crate::cases) fn left(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 8)?;
    let is_on = || {
        let mode =
            |engine: &mut Engine, uuid: &GpuUuid| engine.mig_mode(uuid).is_ok_and(MigMode::is_on);
        env.driver.gpus().edit(gpu, mode)
    };
    let last = run_pod(env, "last", gpu, "1g.10gb")?;
    end(env, "last", &last)?;
    ensure!(is_on()?, "MIG mode is off while partitions are offered");
    env.driver.stop()?;
    let stays_on = is_on();
    env.driver.start()?;
    ensure!(!stays_on?, "MIG mode is still on");
    Ok(())
}

/// A policy whose partition was used and released is deleted: the MIG mode that divvy turned on for
/// it goes off, and the GPU is given out whole again.
pub(in crate::cases) fn policy_deleted(env: &Env) -> Result<()> {
    let gpu = h100(env, 8)?;
    let is_on = || {
        let mode =
            |engine: &mut Engine, uuid: &GpuUuid| engine.mig_mode(uuid).is_ok_and(MigMode::is_on);
        env.driver.gpus().edit(gpu, mode)
    };
    ensure!(
        env.driver.offer()? != "everything",
        "without a policy GPUs are offered in more than the mode that they were found in"
    );
    ensure!(!is_on()?, "MIG mode is on before the policy");
    let policy = Policy::modes(env, &[gpu], &["Whole", "Mig"])?;
    let last = run_pod(env, "last", gpu, "1g.10gb")?;
    end(env, "last", &last)?;
    ensure!(is_on()?, "MIG mode is off while partitions are offered");
    drop(policy);
    wait_for_modes(env, &[gpu], &["Whole"])?;
    poll("the end of MIG mode", NOTICED, || Ok(!is_on()?))?;
    let whole = create_whole(env, "whole", gpu)?;
    env.wait_until_running("whole")?;
    end(env, "whole", &whole)
}
