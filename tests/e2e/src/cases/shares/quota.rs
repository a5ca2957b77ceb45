//! A namespace has no more GPU memory than its GpuQuota says, over shares and whole GPUs, and the
//! API server itself keeps what is not let through from being allocated.

use anyhow::bail;
use divvy_api::names;
use serde_json::{Value, json};

use super::{
    Context, Env, Policy, Result, at, create, end, ensure, h100, poll, run, share, wait_for_modes,
    whole,
};
use crate::case::PATIENCE;

pub(in crate::cases) fn quota(env: &Env) -> Result<()> {
    let (shared, alone) = (h100(env, 2)?, h100(env, 3)?);
    let rules = json!({"rules": [
        {"gpus": {"uuids": [shared]}, "modes": ["TimeSlicing"]},
        {"gpus": {"uuids": [alone]}, "modes": ["Whole"]},
    ]});
    let _policy = Policy::create(env, &env.namespace, &rules)?;
    wait_for_modes(env, &[shared], &["TimeSlicing"])?;
    wait_for_modes(env, &[alone], &["Whole"])?;
    env.driver.change(&[
        "clusterController.enabled=true",
        "clusterController.quota=true",
    ])?;
    let outcome = wrong(env).and_then(|()| kept(env, shared, alone));
    // The policies go with the value, and a quota without them counts nothing.
    env.driver.change(&[])?;
    outcome
}

fn quotas(env: &Env) -> String {
    format!(
        "/apis/divvy.dev/v1beta1/namespaces/{}/gpuquotas",
        env.namespace
    )
}

fn make(env: &Env, name: &str, limits: &Value) -> Result<Value> {
    let quota = json!({
        "apiVersion": names::API_VERSION, "kind": "GpuQuota",
        "metadata": {"name": name}, "spec": {"limits": limits},
    });
    env.api().create(&quotas(env), &quota)
}

/// Checks that the API server refuses quotas that cannot be meant, and a grant by anyone else.
fn wrong(env: &Env) -> Result<()> {
    let refused = |name: &str, limits: Value, words: &str| match make(env, name, &limits) {
        Ok(_) => bail!("a quota {name} with {limits} is taken"),
        Err(error) => {
            let said = format!("{error:#}");
            ensure!(said.contains(words), "{limits}: {said}");
            Ok(())
        }
    };
    refused("second", json!({"memory": "1Gi"}), "its name is default")?;
    refused("default", json!({"memory": "-1Gi"}), "spec.limits.memory")?;
    refused("default", json!({"percent": -1}), "spec.limits.percent")?;
    refused("default", json!({}), "spec.limits")?;
    let own = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "forged", "annotations": {names::annotations::QUOTA: "memory=1,percent=1"}},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": names::CLASS_GPU}}]}},
    });
    // The API server follows its policies with a delay.
    poll(
        "the refusal of a claim with a grant of its own",
        PATIENCE,
        || match env.create(&own) {
            Ok(_) => {
                env.delete("ResourceClaim", "forged")?;
                env.wait_until_gone("ResourceClaim", "forged")?;
                Ok(false)
            }
            Err(error) => {
                ensure!(format!("{error:#}").contains("leave it out"), "{error:#}");
                Ok(true)
            }
        },
    )
}

/// Runs a share of 30 GiB and a whole GPU under a limit of 115 GiB, where a share of 10 GiB waits
/// until another one goes.
fn kept(env: &Env, shared: &str, alone: &str) -> Result<()> {
    make(env, "default", &json!({"memory": "115Gi"}))?;
    let small = run(
        env,
        "small",
        &[share("gpu", &[shared], &[("memory", "30Gi")])],
    )?;
    let big = run(env, "big", &[whole(&[alone])])?;
    let next = create(
        env,
        "next",
        &[share("gpu", &[shared], &[("memory", "10Gi")])],
    )?;
    poll("the refusal of the third", PATIENCE, || {
        let said = env.messages("next");
        Ok(said
            .iter()
            .any(|message| message.contains("waits for the GpuQuota")))
    })?;
    let claim = env.claim("next")?;
    ensure!(
        at(&claim, "status.allocation").is_null(),
        "claim next is allocated: {claim}"
    );
    let (_, said) = env
        .driver
        .kubectl_divvy(&["status", "quota", "-n", &env.namespace])?;
    ensure!(
        said.contains("next") && said.contains("the rest of the quota is smaller"),
        "divvy status quota: {said}"
    );
    end(env, "small", &small)?;
    env.wait_until_running("next")
        .context("after the first share went")?;
    end(env, "next", &next)?;
    end(env, "big", &big)
}
