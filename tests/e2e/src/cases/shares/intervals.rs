//! Time slices: set by the driver's own program on request, the same for all claims on a GPU, and restored.

use divvy_model::TimeSlice;

use super::{
    Context, Env, Pod, Policy, Result, Value, check, claim_for, end, ensure, h100, json, names, poll, run,
    share, spec, wait_for_modes, whole,
};
use crate::case::PATIENCE;
use crate::wait::wait_for;

/// A pod, of these containers, with a claim of its own that asks for an interval. Returns the claim's UID.
fn create(
    env: &Env,
    name: &str,
    request: &Value,
    (kind, interval): (&str, &str),
    containers: &[&str],
) -> Result<String> {
    let parameters = json!({
        "apiVersion": names::API_VERSION, "kind": kind, "timeSlicing": {"interval": interval},
    });
    let spec = json!({"devices": {
        "requests": [request],
        "config": [{"opaque": {"driver": names::DRIVER, "parameters": parameters}}],
    }});
    let uid = Env::uid(&env.create(&claim_for(name, &spec))?)?;
    let pod = Pod::new(name).claim(name);
    let pod = containers.iter().fold(pod, |pod, container| pod.container(container, &[name]));
    env.create(&pod.build())?;
    Ok(uid)
}

pub(in crate::cases) fn intervals(env: &Env) -> Result<()> {
    let gpu = h100(env, 8)?;
    let gpus = env.driver.gpus();
    let is = |slice: TimeSlice| -> Result<()> {
        let found = gpus.time_slice(gpu)?;
        ensure!(found == slice, "the GPU's time slice is {found}, not {slice}");
        Ok(())
    };
    let policy = Policy::modes(env, &[gpu], &["TimeSlicing"])?;
    let wanted = share("gpu", &[gpu], &[("memory", "10Gi")]);
    let plain = run(env, "plain", std::slice::from_ref(&wanted))?;
    ensure!(gpus.smi_calls(gpu)?.is_empty(), "no claim requested a time slice: {:?}", gpus.smi_calls(gpu)?);

    let long = create(env, "long", &wanted, ("ShareConfig", "Long"), &["main"])?;
    check(env, "long", "main", "long")?;
    is(TimeSlice::Long)?;
    let call = format!("compute-policy -i {gpu} --set-timeslice {}", TimeSlice::Long.number());
    ensure!(gpus.smi_calls(gpu)?.contains(&call), "nvidia-smi was called as {:?}", gpus.smi_calls(gpu)?);

    // A GPU has one interval: the refusal of another one names the claim that has set it.
    let short = create(env, "short", &wanted, ("ShareConfig", "Short"), &["main"])?;
    wait_for("event of the pod that names the interval and its holder", PATIENCE, || {
        let reported = env.messages("short");
        let words = ["requests time slice Short", "/long", "Long is set for"];
        Ok(reported.into_iter().find(|text| words.iter().all(|word| text.contains(word))))
    })
    .with_context(|| format!("the pod's Events are {:?}", env.messages("short")))?;
    is(TimeSlice::Long)?;
    end(env, "long", &long)?;
    is(TimeSlice::Default)?;
    env.nudge("short")?;
    check(env, "short", "main", "short")?;
    is(TimeSlice::Short)?;
    end(env, "short", &short)?;
    // Restored when the last claim that requested it has gone, although another claim is still there.
    is(TimeSlice::Default)?;
    end(env, "plain", &plain)?;

    // The same within one exclusive claim.
    policy.change(&spec(&[gpu], &["Whole"]))?;
    wait_for_modes(env, &[gpu], &["Whole"])?;
    let both = create(env, "both", &whole(&[gpu]), ("GpuConfig", "Medium"), &["x", "y"])?;
    for container in ["x", "y"] {
        check(env, "both", container, "both")?;
    }
    is(TimeSlice::Medium)?;
    end(env, "both", &both)?;
    poll("the interval of the beginning", PATIENCE, || Ok(gpus.time_slice(gpu)? == TimeSlice::Default))
}
