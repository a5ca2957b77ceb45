//! Pods that a policy calls to reclaim are evicted by the cluster controller, and no others.

use divvy_api::names;
use serde_json::json;

use super::usage::{process, use_ends};
use super::{
    Context, Env, Policy, Result, at, end, ensure, h100, poll, run, share, wait_for_modes,
};
use crate::api::has_condition;
use crate::case::PATIENCE;
use crate::driver::NAMESPACE;

const GIB: u64 = 1 << 30;

/// A pod, its process, whether it is on the second GPU, GiB granted, GiB used if that is known,
/// percent.
type Scripted = (&'static str, u32, bool, u32, Option<u64>, u32);

/// On the first GPU one share takes what the others were granted. On the second one does too, but
/// what one of the others uses is not known. Nothing uses two of them; the owner of one keeps it.
const PODS: [Scripted; 7] = [
    ("over", 4_200_001, false, 20, Some(45), 50),
    ("fine", 4_200_002, false, 20, Some(19), 10),
    ("small", 4_200_003, false, 20, Some(1), 5),
    ("over-too", 4_200_004, true, 20, Some(45), 50),
    ("dark", 4_200_005, true, 10, None, 5),
    ("idle", 4_200_006, true, 10, Some(1), 0),
    ("kept", 4_200_007, true, 10, Some(1), 0),
];

pub(in crate::cases) fn reclaimed(env: &Env) -> Result<()> {
    let gpus = [h100(env, 2)?, h100(env, 3)?];
    let rule = json!({
        "gpus": {"uuids": gpus},
        "modes": ["TimeSlicing"],
        "usage": {"overuse": "Evict", "idle": {"afterSeconds": 60, "action": "Reclaim", "graceSeconds": 0}},
    });
    let _policy = Policy::create(env, &env.namespace, &json!({"rules": [rule]}))?;
    wait_for_modes(env, &gpus, &["TimeSlicing"])?;
    env.driver.change(&[
        "clusterController.enabled=true",
        "clusterController.dryRun=false",
    ])?;
    let mut uids = Vec::new();
    for (pod, _, second, granted, ..) in PODS {
        let wanted = [("memory", &*format!("{granted}Gi"))];
        uids.push((
            pod,
            run(env, pod, &[share("gpu", &[of(gpus, second)], &wanted)])?,
        ));
    }
    let keep = json!({"metadata": {"annotations": {names::annotations::KEEP_IDLE: "true"}}});
    env.api()
        .patch(&env.path("ResourceClaim", "kept")?, &keep)?;
    let outcome = play(env, gpus).and_then(|()| only_two_go(env));
    use_ends(env, PODS.map(|(_, pid, ..)| pid))?;
    env.driver.change(&[])?;
    outcome?;
    uids.iter().try_for_each(|(pod, uid)| end(env, pod, uid))
}

fn of([first, other]: [&str; 2], second: bool) -> &str {
    if second { other } else { first }
}

fn play(env: &Env, gpus: [&str; 2]) -> Result<()> {
    PODS.iter()
        .try_for_each(|(pod, pid, second, _, used, percent)| {
            let used = used.map(|gib| gib * GIB);
            process(env, of(gpus, *second), (pod, *pid), None, (used, *percent))
        })
}

fn only_two_go(env: &Env) -> Result<()> {
    poll(
        "the end of the idle pod and of the one over its grant",
        PATIENCE * 2,
        || {
            let gone =
                |pod| Ok::<_, anyhow::Error>(env.api().get(&env.path("Pod", pod)?)?.is_none());
            Ok(gone("idle")? && gone("over")?)
        },
    )
    .with_context(|| controller_log(env))?;
    for (pod, cause) in [
        ("over", "more GPU memory than granted"),
        ("idle", "nothing has used"),
    ] {
        let said = env.messages(pod);
        let is_it = |message: &String| message.starts_with("evicted: ") && message.contains(cause);
        ensure!(said.iter().any(is_it), "Events of pod {pod}: {said:?}");
    }
    for (pod, status) in [
        ("fine", None),
        ("small", None),
        ("over-too", None),
        ("dark", None),
        ("kept", Some("True")),
    ] {
        let object = env
            .api()
            .get(&env.path("Pod", pod)?)?
            .with_context(|| format!("pod {pod} is gone"))?;
        ensure!(
            has_condition(&object, "Ready"),
            "pod {pod} does not run any more"
        );
        let found = condition(env, pod, names::conditions::RECLAIM_DUE)?;
        ensure!(
            found.as_deref() == status,
            "claim {pod} has ReclaimDue {found:?}"
        );
    }
    let over = condition(env, "over-too", names::conditions::WITHIN_GRANT)?;
    ensure!(
        over.as_deref() == Some("False"),
        "claim over-too has WithinGrant {over:?}"
    );
    let (_, said) = env.driver.kubectl_divvy(&["status"])?;
    ensure!(
        said.contains("/kept (pods kept): ReclaimDue"),
        "divvy status: {said}"
    );
    Ok(())
}

/// The status of a condition of a claim's device.
fn condition(env: &Env, claim: &str, kind: &str) -> Result<Option<String>> {
    let object = env.claim(claim)?;
    let devices = at(&object, "status.devices")
        .as_array()
        .into_iter()
        .flatten();
    let mut conditions = devices
        .filter_map(|device| at(device, "conditions").as_array())
        .flatten();
    let found = conditions.find(|condition| at(condition, "type") == kind);
    Ok(found
        .and_then(|condition| at(condition, "status").as_str())
        .map(str::to_owned))
}

fn controller_log(env: &Env) -> String {
    let args = [
        "logs",
        "--namespace",
        NAMESPACE,
        "--selector=app.kubernetes.io/component=cluster-controller",
    ];
    let said = env
        .cluster
        .kubectl(&args)
        .unwrap_or_else(|error| format!("{error:#}"));
    format!("the controller's last lines:\n{said}")
}
