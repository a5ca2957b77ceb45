//! Use of GPUs as the plugin's metrics show it: four pods on shares, two on partitions, with
//! scripted use.

use divvy_gpu_sim::Engine;
use divvy_model::{GpuProcess, GpuUuid};

use super::shown::agree;
use super::{
    Context, Env, Policy, Result, Value, at, end, ensure, h100, partition, poll, run, share,
    wait_for,
};
use crate::api::has_condition;
use crate::case::PATIENCE;
use crate::driver::NAMESPACE;

pub(super) const GIB: u64 = 1 << 30;
/// Processes that only the NVML library knows of, by the pods that they belong to.
const PIDS: [(&str, u32); 6] = [
    ("over", 4_100_001),
    ("fine", 4_100_002),
    ("idle", 4_100_003),
    ("dark", 4_100_004),
    ("left", 4_100_005),
    ("right", 4_100_006),
];

/// Use of GPUs by pods: memory in GiB, percent, and what that is read from.
pub(super) const SCRIPTED: [(&str, Option<u32>, u32, &str); 6] = [
    ("over", Some(12), 60, "process"),
    ("fine", Some(9), 10, "process"),
    ("idle", Some(1), 0, "process"),
    ("dark", None, 5, "process"),
    ("left", Some(3), 80, "gpm"),
    ("right", Some(5), 0, "gpm"),
];

fn start(
    env: &Env,
    gpu: &str,
    pod: &str,
    instance: Option<u32>,
    uses: (Option<u64>, u32),
) -> Result<()> {
    let known = PIDS
        .into_iter()
        .find(|(name, _)| *name == pod)
        .context("no such pod")?;
    process(env, gpu, known, instance, uses)
}

/// A process of a pod: its control group on the node, and its context on the GPU.
pub(super) fn process(
    env: &Env,
    gpu: &str,
    (pod, pid): (&str, u32),
    instance: Option<u32>,
    uses: (Option<u64>, u32),
) -> Result<()> {
    let object = env
        .api()
        .get(&env.path("Pod", pod)?)?
        .context("the pod is gone")?;
    let folder = env.driver.gpus().root().join(format!("proc/{pid}"));
    fs_err::create_dir_all(&folder)?;
    fs_err::write(
        folder.join("cgroup"),
        format!("0::/kubepods/besteffort/pod{}/4f1c", Env::uid(&object)?),
    )?;
    let (memory, percent) = uses;
    env.driver
        .gpus()
        .edit(gpu, |engine: &mut Engine, uuid: &GpuUuid| {
            if let Some(gpu) = engine.gpu(uuid) {
                gpu.processes.insert(GpuProcess::new(pid, instance));
            }
            engine.set_usage(uuid, pid, memory, percent);
        })
}

/// The node plugin's metrics.
fn metrics(env: &Env) -> Result<String> {
    let pod = env.driver.wait_until_ready()?;
    let name = at(&pod, "metadata.name")
        .as_str()
        .context("a pod without a name")?
        .to_owned();
    env.api().text(&format!(
        "/api/v1/namespaces/{NAMESPACE}/pods/{name}:8080/proxy/metrics"
    ))
}

/// The value of the series of a metric with all of these labels.
fn value(metrics: &str, name: &str, labels: &[String]) -> Option<f64> {
    let fits = |line: &&str| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with('{'))
            && labels.iter().all(|label| line.contains(label.as_str()))
    };
    metrics.lines().find(fits)?.rsplit(' ').next()?.parse().ok()
}

pub(in crate::cases) fn usage(env: &Env) -> Result<()> {
    with_pods(env, scripted)
}

/// Runs `check` with the pods and what they use, with the GPUs of the shares and of the partitions.
pub(super) fn with_pods(
    env: &Env,
    check: impl FnOnce(&Env, (&str, &str)) -> Result<()>,
) -> Result<()> {
    let (shared, cut) = (h100(env, 2)?, h100(env, 3)?);
    let _policy = Policy::modes(env, &[shared, cut], &["Mig", "TimeSlicing"])?;
    let mut uids = Vec::new();
    for pod in ["over", "fine", "idle", "dark"] {
        let wanted = [("memory", "10Gi"), ("cores", "20")];
        uids.push((pod, run(env, pod, &[share("gpu", &[shared], &wanted)])?));
    }
    let mut instances = Vec::new();
    for pod in ["left", "right"] {
        uids.push((pod, run(env, pod, &[partition("part", &[cut], "1g.10gb")])?));
        let living = env.driver.gpus().instances(cut)?;
        let new = living
            .iter()
            .map(|one| one.instance.id.0)
            .find(|id| !instances.contains(id));
        instances.push(new.with_context(|| format!("pod {pod} runs without an instance"))?);
    }
    let outcome = play(env, (shared, cut), &instances).and_then(|()| check(env, (shared, cut)));
    use_ends(env, PIDS.map(|(_, pid)| pid))?;
    outcome?;
    uids.iter().try_for_each(|(pod, uid)| end(env, pod, uid))
}

/// Ends processes.
pub(super) fn use_ends(env: &Env, pids: impl IntoIterator<Item = u32>) -> Result<()> {
    for pid in pids {
        env.driver.gpus().end_process(pid)?;
        let folder = env.driver.gpus().root().join(format!("proc/{pid}"));
        if folder.exists() {
            fs_err::remove_dir_all(folder)?;
        }
    }
    Ok(())
}

fn play(env: &Env, (shared, cut): (&str, &str), instances: &[u32]) -> Result<()> {
    let mut instances = instances.iter().copied();
    for (pod, gib, percent, source) in SCRIPTED {
        let is_share = source == "process";
        let instance = if is_share {
            None
        } else {
            Some(instances.next().context("too few instances")?)
        };
        let memory = gib.map(|gib| u64::from(gib) * GIB);
        start(
            env,
            if is_share { shared } else { cut },
            pod,
            instance,
            (memory, percent),
        )?;
    }
    Ok(())
}

fn scripted(env: &Env, (shared, cut): (&str, &str)) -> Result<()> {
    let mut wrong = Vec::new();
    poll(
        "metrics that agree with what was scripted",
        PATIENCE,
        || {
            let shown = metrics(env)?;
            wrong = SCRIPTED
                .iter()
                .filter_map(|row| differs(env, &shown, *row))
                .collect();
            Ok(wrong.is_empty())
        },
    )
    .with_context(|| format!("{wrong:#?}"))?;
    only_one_is_over(env)?;
    agree(env, (shared, cut))?;

    // Autoscalers read this: half a minute and more of 60 % with 20 % granted.
    let pod = [
        format!("namespace=\"{}\"", env.namespace),
        "pod=\"over\"".to_owned(),
    ];
    poll("the metric for autoscalers", PATIENCE, || {
        Ok(
            value(&metrics(env)?, "divvy_pod_gpu_utilization_ratio", &pod)
                .is_some_and(|ratio| ratio > 1.0),
        )
    })?;
    let used = [format!("UUID=\"{cut}\"")];
    let total = value(&metrics(env)?, "divvy_gpu_memory_used_bytes", &used)
        .context("no memory of the GPU")?;
    ensure!(
        (total - bytes(8)).abs() < 1.0,
        "the GPU of the partitions uses {total} bytes"
    );

    // It ends as it began.
    start(env, shared, "over", None, (Some(10 * GIB), 60))?;
    poll("the end of the overuse", PATIENCE, || {
        Ok(within_grant(&env.claim("over")?).as_deref() == Some("True"))
    })
}

fn bytes(gib: u32) -> f64 {
    f64::from(gib) * f64::from(1_u32 << 30)
}

/// Returns what is not as scripted in a pod's metrics.
fn differs(env: &Env, shown: &str, row: (&str, Option<u32>, u32, &str)) -> Option<String> {
    let (pod, gib, percent, source) = row;
    let labels = [
        format!("namespace=\"{}\"", env.namespace),
        format!("pod=\"{pod}\""),
        format!("claim=\"{pod}\""),
    ];
    let sourced = [&labels[..], &[format!("source=\"{source}\"")]].concat();
    let memory = value(shown, "divvy_claim_memory_used_bytes", &labels);
    let ratio = value(shown, "divvy_claim_utilization_ratio", &sourced);
    let close = |found: Option<f64>, wanted: Option<f64>| match (found, wanted) {
        (Some(found), Some(wanted)) => (found - wanted).abs() < 1e-6,
        (found, wanted) => found.is_none() && wanted.is_none(),
    };
    let fine = close(memory, gib.map(bytes)) && close(ratio, Some(f64::from(percent) / 100.0));
    (!fine).then(|| format!("{row:?}: {memory:?} bytes, {ratio:?}"))
}

/// The status of the condition that a claim has of its use.
fn within_grant(claim: &Value) -> Option<String> {
    let devices = at(claim, "status.devices").as_array()?;
    let conditions = devices
        .iter()
        .filter_map(|device| at(device, "conditions").as_array())
        .flatten();
    let mut ours = conditions.filter(|condition| at(condition, "type") == "WithinGrant");
    ours.next()
        .and_then(|condition| at(condition, "status").as_str())
        .map(str::to_owned)
}

/// The one is reported, with its reason where its owner looks; the others are not, and what is not
/// known least of all.
fn only_one_is_over(env: &Env) -> Result<()> {
    wait_for(
        "the condition of the claim over its grant",
        PATIENCE,
        || Ok(within_grant(&env.claim("over")?)),
    )
    .and_then(|status| {
        ensure!(
            status == "False",
            "the claim over its grant has WithinGrant {status}"
        );
        Ok(())
    })?;
    poll("an Event on the pod", PATIENCE, || {
        Ok(env
            .messages("over")
            .iter()
            .any(|message| message.contains("12288 MiB") && message.contains("10240 MiB")))
    })?;
    let shown = metrics(env)?;
    for (pod, expected) in [
        ("over", Some(1.0)),
        ("fine", Some(0.0)),
        ("idle", Some(0.0)),
        ("dark", None),
        ("left", None),
    ] {
        let labels = [
            format!("namespace=\"{}\"", env.namespace),
            format!("pod=\"{pod}\""),
        ];
        let found = value(&shown, "divvy_claim_overuse", &labels);
        ensure!(found == expected, "pod {pod} has an overuse of {found:?}");
        if pod != "over" {
            let said = within_grant(&env.claim(pod)?);
            ensure!(said.is_none(), "claim {pod} has WithinGrant {said:?}");
        }
        let object = env
            .api()
            .get(&env.path("Pod", pod)?)?
            .context("the pod is gone")?;
        ensure!(
            has_condition(&object, "Ready"),
            "pod {pod} does not run any more"
        );
    }
    Ok(())
}
