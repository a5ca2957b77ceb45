//! The plugin of an older commit is updated to this one under pods that come and go: what the old one wrote the new one
//! reads, and no claim fails. Going back is for emergencies: what the new one wrote in a newer version the old one leaves
//! alone, so that such pods run on, and their GPUs are free some minutes after the new one is back.

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::END;
use crate::api::at;
use crate::case::Env;
use crate::cases::{pod_with_gpu, under_pods, undisturbed};
use crate::cluster::Cluster;
use crate::driver::Driver;
use crate::images;
use crate::process::say;
use crate::programs::Programs;
use crate::wait::{poll, wait_for};

const NAMESPACE: &str = "soak-update";
/// The tag of the image with the new program; the old one has that of the chart.
const NEW: &str = "image.tag=new";

/// The version of a claim's record.
fn record_version(env: &Env, claim_uid: &str) -> Result<u64> {
    let text = fs_err::read_to_string(env.driver.record(claim_uid))?;
    let record: serde_json::Value = serde_json::from_str(&text)?;
    at(&record, "body.version").as_u64().context("a record without a version")
}

/// Lives through it, on a cluster of its own.
pub fn run(cluster: &Cluster, old: &Programs, new: &Programs) -> Result<()> {
    // The chart is the new one: it is installed before its pods are exchanged.
    // Plugins before `74788a7` need the CUDA version that NVML has from libcuda.
    let driver = Driver::install_with(cluster, old, "h100x8", &[("DIVVY_MOCK_LIBCUDA", "1")], &[])?;
    cluster.import(&new.image(&format!("{}:new", images::DRIVER))?)?;
    let env = Env { cluster, driver: &driver, namespace: NAMESPACE.to_owned() };
    env.api().create("/api/v1/namespaces", &json!({"metadata": {"name": NAMESPACE}}))?;
    let account = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default");
    wait_for("default ServiceAccount of the namespace", END, || env.api().get(&account))?;

    let by_old = pod_with_gpu(&env, "by-old")?;
    let before = record_version(&env, &by_old)?;
    let lived = under_pods(&env, || driver.upgrade(&[NEW])).context("from old to new")?;
    undisturbed(&env, "by-old")?;
    let by_new = pod_with_gpu(&env, "by-new")?;
    let after = record_version(&env, &by_new)?;
    say(&format!("updated under {lived} pods, none refused; records of version {before}, then {after}"));
    ensure!(after >= before, "the new program writes records of an older version");
    ensure!(lived > 0, "no pod came and went meanwhile");

    // Back: neither pod is disturbed, their GPUs stay theirs, and what is the old one's ends.
    driver.upgrade(&[])?;
    for pod in ["by-old", "by-new"] {
        undisturbed(&env, pod)?;
    }
    let beside = pod_with_gpu(&env, "beside")?;
    ensure!(env.minors("beside")? != env.minors("by-new")?, "one GPU was given out twice");
    env.end("beside", &beside)?;
    env.end("by-old", &by_old)?;
    env.delete("Pod", "by-new")?;
    env.wait_until_gone("Pod", "by-new")?;
    if after > before {
        let left = driver.record(&by_new).exists();
        ensure!(left, "the old program has removed a record that it cannot read");
    } else {
        driver.wait_until_unprepared(&by_new)?;
    }
    // And forward again: what the old one left, if it could not read it, is an orphan now, undone after its grace period.
    driver.upgrade(&[NEW])?;
    poll("end of what the old program left", END, || Ok(!driver.record(&by_new).exists()))?;
    say("back to the old program and forward again: no pod was disturbed, and nothing is left");
    let last = pod_with_gpu(&env, "last")?;
    env.end("last", &last)?;
    let claims =
        env.cluster.node_path(format!("/var/lib/kubelet/plugins/{}/claims", divvy_api::names::DRIVER));
    poll("end of all records of claims", END, || {
        let left = fs_err::read_dir(&claims)?.filter_map(Result::ok);
        Ok(left.filter(|file| file.path().extension().is_some_and(|e| e == "json")).count() == 0)
    })
}
