//! A fault in one partition, with another beside it.

use divvy_api::names::taints;
use divvy_model::health::{GpuEventKind, RecoveryAction};

use super::{
    Context, Env, Result, allocated, at, end, ensure, everything, h100, poll, run_pod, tainted_as,
};
use crate::case::PATIENCE;
use crate::cases::health::{WELL, reported, wait_reported};

/// An Xid of class reset that the hardware can attribute to a GPU instance.
const UNCONTAINED_ECC: u32 = 95;

pub(in crate::cases) fn sick(env: &Env) -> Result<()> {
    everything(env)?;
    let (gpu, gpus) = (h100(env, 8)?, env.driver.gpus());
    // While the driver cannot say whether something is to be done, an Xid stays.
    let says = |action: Option<RecoveryAction>| {
        gpus.edit(gpu, |engine, uuid| engine.set_recovery(uuid, action))?
            .context("the GPU has no vitals")
    };
    says(None)?;
    let ill = run_pod(env, "ill", gpu, "2g.20gb")?;
    let beside = run_pod(env, "beside", gpu, "3g.40gb")?;
    let before = env.wait_until_running("beside")?;
    for pod in ["ill", "beside"] {
        wait_reported(env, pod, "Healthy")?;
    }

    let start = allocated(env, "ill", "")?
        .into_values()
        .next()
        .context("nothing is allocated")?
        .1;
    let living = gpus.instances(gpu)?;
    let instance = living
        .iter()
        .find(|one| one.instance.placement.start == start);
    let instance = &instance
        .with_context(|| format!("no instance lives at {start}"))?
        .instance;
    let caps = gpus.edit(gpu, |engine, uuid| engine.mig_capabilities(uuid))??;
    gpus.edit(gpu, |engine, uuid| {
        engine.send_event(
            uuid,
            GpuEventKind::Xid(UNCONTAINED_ECC),
            Some(instance.id.0),
        )
    })?;
    let others: Vec<&str> = gpus
        .of_product("")
        .into_iter()
        .filter(|uuid| *uuid != gpu)
        .collect();
    poll(
        "taints on what overlaps the sick partition, and on nothing else",
        PATIENCE,
        || {
            for other in &others {
                let found = env.driver.taints(other)?;
                ensure!(
                    !found.contains(&taints::XID.to_owned()),
                    "{other} is tainted, although {gpu} is sick"
                );
            }
            tainted_as(env, gpu, &caps, taints::XID, Some(instance.placement))
        },
    )?;
    let message = wait_reported(env, "ill", "Unhealthy")?;
    ensure!(
        message.contains("Xid 95"),
        "the pod's status says {message:?}"
    );
    // The kubelet hears of all devices of a node at once.
    let neighbour = reported(env, "beside")?;
    ensure!(
        neighbour.0 == "Healthy",
        "the partition beside it counts as {neighbour:?}"
    );
    let reported_of = format!("GPU instance {} of {gpu}", instance.id.0);
    poll("Event of the pod", PATIENCE, || {
        Ok(env.messages("ill").iter().any(|m| m.contains(&reported_of)))
    })?;
    says(Some(RecoveryAction::Nothing))?;
    poll("end of the taints", WELL, || {
        tainted_as(env, gpu, &caps, taints::XID, None)
    })?;
    wait_reported(env, "ill", "Healthy")?;

    let after = env.wait_until_running("beside")?;
    ensure!(
        ["metadata.uid", "status.containerStatuses"]
            .iter()
            .all(|path| at(&before, path) == at(&after, path)),
        "the pod of the partition beside it was touched: {after}"
    );
    ensure!(
        env.messages("beside")
            .iter()
            .all(|message| !message.contains("Xid")),
        "the pod of the partition beside it has an Event about the Xid"
    );
    end(env, "ill", &ill)?;
    end(env, "beside", &beside)
}
