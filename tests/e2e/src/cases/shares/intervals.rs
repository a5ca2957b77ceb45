//! Time slices: set by the driver's own program as the policy says, seen by the scheduler, and
//! restored.

use divvy_model::TimeSlice;

use super::{
    Context, Env, Pod, Policy, Result, Value, at, check, claim_for, create, end, ensure, h100,
    json, names, of, poll, run, share, spec, wait_for_modes, whole,
};
use crate::case::PATIENCE;

/// A share of the GPU whose time slice is this one.
fn with_slice(gpu: &str, slice: TimeSlice) -> Value {
    let cel = format!(
        "device.attributes['{}'].timeSlice == '{slice}' && {}",
        names::DRIVER,
        of(&[gpu])
    );
    json!({"name": "gpu", "exactly": {
        "deviceClassName": names::CLASS_SHARE,
        "selectors": [{"cel": {"expression": cel}}],
        "capacity": {"requests": {"memory": "10Gi"}},
    }})
}

/// Changes the time slice of the GPU's shares, and waits until it is published.
fn change(env: &Env, policy: &Policy<'_>, gpu: &str, slice: TimeSlice) -> Result<()> {
    let shares = json!({"timeSlice": slice.name()});
    let rule = json!({"gpus": {"uuids": [gpu]}, "modes": ["TimeSlicing"], "shares": shares});
    policy.change(&json!({"rules": [rule]}))?;
    poll(&format!("shares with time slice {slice}"), PATIENCE, || {
        let devices = env.driver.devices()?;
        let mut own = devices
            .iter()
            .filter(|device| at(device, "attributes.gpuUUID.string") == gpu);
        Ok(own.any(|device| at(device, "attributes.timeSlice.string") == slice.name()))
    })
}

/// Creates an exclusive claim of two containers that asks for an interval. Returns its UID.
fn exclusive(env: &Env, gpu: &str, slice: TimeSlice) -> Result<String> {
    let slicing = json!({"interval": slice.name()});
    let parameters =
        json!({"apiVersion": names::API_VERSION, "kind": "GpuConfig", "timeSlicing": slicing});
    let spec = json!({"devices": {
        "requests": [whole(&[gpu])],
        "config": [{"opaque": {"driver": names::DRIVER, "parameters": parameters}}],
    }});
    let uid = Env::uid(&env.create(&claim_for("both", &spec))?)?;
    let pod = Pod::new("both")
        .claim("both")
        .container("x", &["both"])
        .container("y", &["both"]);
    env.create(&pod.build())?;
    Ok(uid)
}

pub(in crate::cases) fn intervals(env: &Env) -> Result<()> {
    let gpu = h100(env, 8)?;
    let gpus = env.driver.gpus();
    let is = |slice: TimeSlice| -> Result<()> {
        let found = gpus.time_slice(gpu)?;
        ensure!(
            found == slice,
            "the GPU's time slice is {found}, not {slice}"
        );
        Ok(())
    };
    let policy = Policy::modes(env, &[gpu], &["TimeSlicing"])?;
    let plain = run(env, "plain", &[share("gpu", &[gpu], &[("memory", "10Gi")])])?;
    ensure!(
        gpus.smi_calls(gpu)?.is_empty(),
        "no policy sets a time slice: {:?}",
        gpus.smi_calls(gpu)?
    );

    change(env, &policy, gpu, TimeSlice::Long)?;
    let long = run(env, "long", &[with_slice(gpu, TimeSlice::Long)])?;
    is(TimeSlice::Long)?;
    let call = format!(
        "compute-policy -i {gpu} --set-timeslice {}",
        TimeSlice::Long.number()
    );
    ensure!(
        gpus.smi_calls(gpu)?.contains(&call),
        "nvidia-smi was called as {:?}",
        gpus.smi_calls(gpu)?
    );

    // The scheduler sees it: a claim for another one waits, and its pod is bound to no node.
    let short = create(env, "short", &[with_slice(gpu, TimeSlice::Short)])?;
    env.wait_until_unschedulable("short")?;
    is(TimeSlice::Long)?;
    change(env, &policy, gpu, TimeSlice::Short)?;
    check(env, "short", "main", "short")?;
    is(TimeSlice::Short)?;
    for (name, uid) in [("long", &long), ("short", &short)] {
        end(env, name, uid)?;
        is(TimeSlice::Short).with_context(|| format!("a share is left when {name} has ended"))?;
    }
    end(env, "plain", &plain)?;
    is(TimeSlice::Default)?;

    // The same for one exclusive claim, which asks itself.
    policy.change(&spec(&[gpu], &["Whole"]))?;
    wait_for_modes(env, &[gpu], &["Whole"])?;
    let both = exclusive(env, gpu, TimeSlice::Medium)?;
    for container in ["x", "y"] {
        check(env, "both", container, "both")?;
    }
    is(TimeSlice::Medium)?;
    end(env, "both", &both)?;
    poll("the interval of the beginning", PATIENCE, || {
        Ok(gpus.time_slice(gpu)? == TimeSlice::Default)
    })
}
