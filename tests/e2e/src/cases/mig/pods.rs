//! Pods with partitions when nothing goes wrong.

use super::super::shares::is_withdrawn;
use super::{
    Env, Pod, Result, Value, allocated, check, claim_for, create_pod, create_whole, end, ensure,
    everything, h100, is_partition, json, names, on, only, parent, partitions, poll, requests,
    run_pod,
};
use crate::api::at;
use crate::case::PATIENCE;

pub(in crate::cases) fn each_profile(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 0)?;
    let plugin = env.driver.pids()?;
    for profile in [
        "1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.20gb",
    ] {
        let name = profile.replace('.', "-");
        let uid = run_pod(env, &name, gpu, profile)?;
        only(env, gpu, &[&name])?;
        end(env, &name, &uid)?;
        only(env, gpu, &[])?;
    }
    ensure!(env.driver.pids()? == plugin, "the plugin was restarted");
    Ok(())
}

pub(in crate::cases) fn user_namespace(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 9)?;
    let spec = requests(&[partitions("part", &on(&[gpu], "1g.10gb"), 1)]);
    let uid = Env::uid(&env.create(&claim_for("mapped", &spec))?)?;
    env.create(
        &Pod::new("mapped")
            .claim("mapped")
            .in_user_namespace()
            .build(),
    )?;
    check(env, "mapped", "main", &[("mapped", "")])?;
    end(env, "mapped", &uid)
}

pub(in crate::cases) fn full_gpu(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 1)?;

    // A pod each: 4 + 2 + 1 is all. The 4g has one placement, which the scheduler would give to the
    // 2g if it came to that pod first; it takes a pod later than others if it sees the pod before
    // its claim.
    let mix = [("four", "4g.40gb"), ("two", "2g.20gb"), ("one", "1g.10gb")];
    let mut uids = Vec::new();
    for (name, profile) in mix {
        uids.push((name, create_pod(env, name, gpu, profile)?));
        allocated(env, name, "")?;
    }
    for (name, _) in mix {
        check(env, name, "main", &[(name, "")])?;
    }
    only(env, gpu, &mix.map(|(name, _)| name))?;
    let more = create_pod(env, "more", gpu, "1g.10gb")?;
    env.wait_until_unschedulable("more")?;
    // What ends makes room.
    for (name, uid) in &uids {
        end(env, name, uid)?;
    }
    check(env, "more", "main", &[("more", "")])?;
    end(env, "more", &more)?;

    // All of one kind, and a mix that fits only if the 3g is put in the upper half, each in one
    // claim.
    let seven = requests(&[partitions("part", &on(&[gpu], "1g.10gb"), 7)]);
    let mixed = requests(&[
        partitions("three", &on(&[gpu], "3g.40gb"), 1),
        partitions("two", &on(&[gpu], "2g.20gb"), 1),
        partitions("ones", &on(&[gpu], "1g.10gb"), 2),
    ]);
    for (name, spec, count) in [("seven", seven, 7), ("mixed", mixed, 4)] {
        let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
        env.create(&Pod::new(name).claim(name).build())?;
        check(env, name, "main", &[(name, "")])?;
        ensure!(
            allocated(env, name, "")?.len() == count,
            "claim {name} has not {count} partitions"
        );
        only(env, gpu, &[name])?;
        end(env, name, &uid)?;
    }
    only(env, gpu, &[])
}

pub(in crate::cases) fn whole_gpu(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 2)?;
    let part = run_pod(env, "part", gpu, "1g.10gb")?;
    let whole = create_whole(env, "whole", gpu)?;
    env.wait_until_unschedulable("whole")?;
    end(env, "part", &part)?;
    env.check("whole", "main", &["whole"])?;
    only(env, gpu, &[])?;

    // And the other way round.
    let again = create_pod(env, "again", gpu, "7g.80gb")?;
    env.wait_until_unschedulable("again")?;
    end(env, "whole", &whole)?;
    check(env, "again", "main", &[("again", "")])?;
    end(env, "again", &again)
}

pub(in crate::cases) fn two_containers(env: &Env) -> Result<()> {
    everything(env)?;
    let gpu = h100(env, 3)?;
    let spec = requests(&[
        partitions("small", &on(&[gpu], "1g.10gb"), 1),
        partitions("large", &on(&[gpu], "3g.40gb"), 1),
    ]);
    let uid = Env::uid(&env.create(&claim_for("parts", &spec))?)?;
    let pod = Pod::new("a").claim("parts");
    let pod = pod
        .container("x", &["parts/small"])
        .container("y", &["parts/large"]);
    // A third has both.
    env.create(&pod.container("both", &["parts"]).build())?;
    check(env, "a", "x", &[("parts", "small")])?;
    check(env, "a", "y", &[("parts", "large")])?;
    check(env, "a", "both", &[("parts", "")])?;
    only(env, gpu, &["parts"])?;
    env.end("a", &uid)?;
    only(env, gpu, &[])
}

pub(in crate::cases) fn same_gpu(env: &Env) -> Result<()> {
    everything(env)?;
    let (first, second) = (h100(env, 4)?, h100(env, 5)?);
    let together = |requests: &[Value], match_them: bool| {
        let attribute = format!("{}/parentUUID", names::DRIVER);
        let constraints = if match_them {
            json!([{"matchAttribute": attribute}])
        } else {
            json!([])
        };
        json!({"devices": {"requests": requests, "constraints": constraints}})
    };
    let both = |profile: &str| on(&[first, second], profile);

    // A 3g and a 4g fill a GPU. With a 4g on each there is room for a 3g on both, and for no 4g
    // beside it.
    let one = run_pod(env, "one", first, "4g.40gb")?;
    let spec = [
        partitions("x", &both("3g.40gb"), 1),
        partitions("y", &both("4g.40gb"), 1),
    ];
    let uid = Env::uid(&env.create(&claim_for("pair", &together(&spec, true)))?)?;
    env.create(&Pod::new("pair").claim("pair").build())?;
    check(env, "pair", "main", &[("pair", "")])?;
    for device in allocated(env, "pair", "")?.keys() {
        ensure!(
            parent(env, device)? == second,
            "{device} is not on the GPU that has room for both"
        );
    }
    end(env, "pair", &uid)?;

    // Two 4g fit on no GPU: on two without the constraint, nowhere with it.
    end(env, "one", &one)?;
    let spec = [
        partitions("x", &both("4g.40gb"), 1),
        partitions("y", &both("4g.40gb"), 1),
    ];
    env.create(&claim_for("never", &together(&spec, true)))?;
    env.create(&Pod::new("never").claim("never").build())?;
    env.wait_until_unschedulable("never")?;
    let uid = Env::uid(&env.create(&claim_for("apart", &together(&spec, false)))?)?;
    env.create(&Pod::new("apart").claim("apart").build())?;
    check(env, "apart", "main", &[("apart", "")])?;
    end(env, "apart", &uid)?;
    only(env, first, &[])?;
    only(env, second, &[])
}

pub(in crate::cases) fn ampere(env: &Env) -> Result<()> {
    everything(env)?;
    let a30 = ("A30", &["1g.6gb", "2g.12gb", "4g.24gb"][..]);
    let a100 = (
        "A100",
        &["1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"][..],
    );
    for (product, profiles) in [a30, a100] {
        let fitting = env.driver.gpus().of_product(product);
        let &[gpu] = fitting.as_slice() else {
            anyhow::bail!("there is not one {product}")
        };
        set_mode(env, gpu, true)?;
        poll(
            &format!("partitions in the place of the whole {product}"),
            PATIENCE,
            || {
                let devices = env.driver.devices()?;
                let parts = |device: &&Value| {
                    at(device, "attributes.parentUUID.string") == gpu && is_partition(device)
                };
                Ok(devices.iter().any(|device| parts(&device))
                    && !devices
                        .iter()
                        .any(|device| is_whole(device, gpu) && !is_withdrawn(device)))
            },
        )?;
        for profile in profiles {
            let name = profile.replace('.', "-");
            let uid = run_pod(env, &name, gpu, profile)?;
            only(env, gpu, &[&name])?;
            end(env, &name, &uid)?;
        }
        only(env, gpu, &[])?;
        set_mode(env, gpu, false)?;
    }
    poll("whole GPUs again", PATIENCE, || {
        let devices = env.driver.devices()?;
        let all = env.driver.gpus().of_product("");
        let offered = |gpu: &&str| devices.iter().any(|d| is_whole(d, gpu) && !is_withdrawn(d));
        Ok(all.iter().all(offered))
    })
}

/// Returns true if a device is all of this GPU, to one claim. The one for admins has its UUID too.
fn is_whole(device: &Value, gpu: &str) -> bool {
    at(device, "attributes.uuid.string") == gpu && at(device, "attributes.type.string") == "gpu"
}

/// An administrator's work, since here MIG mode needs a reset, for which the GPU must be unused.
fn set_mode(env: &Env, gpu: &str, on: bool) -> Result<()> {
    env.driver.stop()?;
    env.driver.gpus().edit(gpu, |engine, gpu| {
        engine.set_mig_mode(gpu, on)?;
        engine.reset_gpu(gpu)
    })??;
    env.driver.start()
}
