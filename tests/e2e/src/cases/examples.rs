//! The examples of the repository, applied as they are to a real Kubernetes. The cluster has
//! another image under the names of theirs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::api::{at, has_condition};
use crate::case::Env;
use crate::config::Layout;
use crate::process::say;
use crate::programs::workspace;
use crate::wait::{poll, wait_for};

#[path = "../../../../divvy/tests/documents/table.rs"]
mod documents;

use documents::How;

/// A pod may have to wait for what the policies of two examples offer: the old is published for a
/// minute and a half.
const PATIENCE: Duration = Duration::from_secs(150);
/// The label by which the policies of the examples choose nodes.
const LABEL: &str = "divvy.dev/try";
/// Output of the fixture's `nvidia-smi`: the driver's programs are in the container.
const SAID: &str = "nvidia-smi of driver";

/// Number of examples that run beside each other: no three need more GPUs than the node has.
const AT_ONCE: usize = 3;

/// Its GPUs must be in one mode: where a GPU is in use and offered in several, there is a class of
/// its own for monitors (ADR 3), which `admin-beside-others` uses.
const ONE_MODE: &str = "admin-access";
/// The examples that need the chart with MPS.
const NOT_HERE: [&str; 3] = ["mps-share", "shared-claim-mps", "mig-mps"];

pub(super) fn all(env: &Env) -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let entries = fs_err::read_dir(&folder)?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<_>>>()?;
    let is_run =
        |path: &PathBuf| path.is_dir() && !NOT_HERE.iter().any(|name| path.ends_with(name));
    let mut examples: Vec<PathBuf> = entries.into_iter().filter(is_run).collect();
    examples.sort();
    ensure!(
        examples.len() > 30,
        "{}: only {} examples",
        folder.display(),
        examples.len()
    );
    let (plain, examples): (Vec<_>, Vec<_>) = examples
        .into_iter()
        .partition(|path| path.ends_with(ONE_MODE));
    ensure!(plain.len() == 1, "no example {ONE_MODE}");
    in_one_mode(env)?;
    plain.iter().try_for_each(|example| run(env, example))?;
    label(env, &json!("true"))?;
    let ran = in_all_modes(env, &folder, &examples);
    label(env, &Value::Null)?;
    ran
}

/// Has the chart's default offered, and waits until whole GPUs draw on no counters, so until what
/// was offered before is withdrawn: a claim that took a GPU before that would keep its counters
/// published, and no monitor could have it.
fn in_one_mode(env: &Env) -> Result<()> {
    if env.driver.offer()? != "auto" {
        env.driver.upgrade(&[])?;
    }
    poll("whole GPUs in one mode", PATIENCE, || {
        let devices = env.driver.devices()?;
        let mut whole = devices
            .iter()
            .filter(|device| at(device, "attributes.type.string") == "gpu");
        Ok(whole.all(|gpu| at(gpu, "consumesCounters").is_null()))
    })
}

/// The commands of the README, the quick start, the runbooks and other pages that a cluster can be
/// asked, as they are printed, in the order of the table that a test compares with the documents.
pub(super) fn readme(env: &Env) -> Result<()> {
    super::mig::everything(env)?;
    let mut elsewhere = BTreeSet::new();
    let ran = documents::TABLE
        .iter()
        .try_for_each(|(command, how)| match how {
            How::Cluster(expected) => typed(env, command, expected),
            How::By(reason) | How::No(reason) => {
                elsewhere.insert(*reason);
                Ok(())
            }
        });
    let elsewhere: Vec<&str> = elsewhere.into_iter().collect();
    say(&format!("not typed here: {}", elsewhere.join("; ")));
    let manifests = ["one-gpu", "share-small", "mig-partitions"]
        .map(|example| format!("examples/{example}/manifests.yaml"));
    for file in &manifests {
        let file = workspace().join(file).display().to_string();
        env.cluster
            .kubectl(&["delete", "--ignore-not-found", "-f", &file])?;
    }
    ran
}

/// Types a command of a document into a shell, and waits until its output has a text: the plugin
/// reports what it holds every few seconds.
fn typed(env: &Env, command: &str, expected: &str) -> Result<()> {
    let words = [
        ("NAMESPACE/NAME", "divvy-one-gpu/one-gpu"),
        ("NAMESPACE", "divvy-one-gpu"),
        ("CLAIM", "one-gpu"),
        ("GROUP", "readers"),
        ("NODE", Layout::NODE),
    ];
    let filled = words
        .iter()
        .fold(command.to_owned(), |text, (word, value)| {
            text.replace(word, value)
        });
    poll(&format!("{expected:?} of {filled}"), PATIENCE, || {
        let mut shell = env.cluster.command("/bin/sh", &["-c", filled.as_str()]);
        let done = shell.current_dir(workspace()).output()?;
        let said = String::from_utf8_lossy(&done.stdout);
        // Cases beside this one have GPUs that need action: status 3 of `divvy status`.
        let well = done.status.success()
            || (done.status.code() == Some(3) && command.contains("divvy status"));
        ensure!(
            well,
            "{filled}: {}: {}",
            done.status,
            String::from_utf8_lossy(&done.stderr).trim()
        );
        Ok(said.contains(expected))
    })
}

fn label(env: &Env, value: &Value) -> Result<()> {
    let path = format!("/api/v1/nodes/{}", Layout::NODE);
    env.api()
        .patch(&path, &json!({"metadata": {"labels": {LABEL: value}}}))
        .map(drop)
}

/// All examples under the policy that many of them need; their own policies have a higher priority.
fn in_all_modes(env: &Env, folder: &Path, examples: &[PathBuf]) -> Result<()> {
    let policy = folder.join("all-modes.yaml").display().to_string();
    env.cluster.kubectl(&["apply", "-f", &policy])?;
    // A policy changes what the others are offered. Each is tried: one that fails says nothing
    // about the others.
    let (of_policies, beside): (Vec<_>, Vec<_>) = examples
        .iter()
        .partition(|example| changes_the_offer(example).unwrap_or(true));
    let mut failed: Vec<String> = beside_each_other(env, &beside);
    failed.extend(
        of_policies
            .iter()
            .filter_map(|example| run(env, example).err())
            .map(|error| format!("{error:#}")),
    );
    env.cluster.kubectl(&["delete", "-f", &policy])?;
    ensure!(
        failed.is_empty(),
        "{} examples failed: {}",
        failed.len(),
        failed.join("\n")
    );
    Ok(())
}

fn changes_the_offer(example: &Path) -> Result<bool> {
    Ok(fs_err::read_to_string(example.join("manifests.yaml"))?.contains("kind: GpuPolicy"))
}

/// Runs examples a few at a time, each in the namespace that it makes; the errors of those that
/// failed.
fn beside_each_other(env: &Env, examples: &[&PathBuf]) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let failed = Mutex::new(Vec::new());
    let work = || {
        while let Some(example) = examples.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = run(env, example) {
                failed
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(format!("{error:#}"));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(work);
        }
    });
    failed.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn run(env: &Env, example: &Path) -> Result<()> {
    let name = example
        .file_name()
        .context("a folder without a name")?
        .to_string_lossy()
        .into_owned();
    apply(env, example, &format!("divvy-{name}")).with_context(|| format!("example {name}"))
}

fn apply(env: &Env, example: &Path, namespace: &str) -> Result<()> {
    let file = example.join("manifests.yaml").display().to_string();
    env.cluster.kubectl(&["apply", "-f", &file])?;
    let ran = runs(env, namespace);
    // With the namespace goes what is in it, perhaps before its turn comes.
    env.cluster
        .kubectl(&["delete", "--wait", "--ignore-not-found", "-f", &file])?;
    ran.map(|pods| say(&format!("{namespace}: {pods} pods")))
}

/// Waits until everything in the namespace is as its writer wants it; how many pods there are.
fn runs(env: &Env, namespace: &str) -> Result<usize> {
    let list = |group: &str, kind: &str| {
        env.api()
            .list(&format!("/{group}/namespaces/{namespace}/{kind}"))
    };
    let mut missing = String::new();
    let pods = wait_for(&format!("everything in {namespace}"), PATIENCE, || {
        let pods = list("api/v1", "pods")?;
        let workloads = [
            list("apis/apps/v1", "deployments")?,
            list("apis/apps/v1", "statefulsets")?,
        ]
        .concat();
        let jobs = list("apis/batch/v1", "jobs")?;
        let few = workloads
            .iter()
            .filter(|of| at(of, "status.availableReplicas") != at(of, "spec.replicas"));
        let undone = jobs.iter().filter(|job| at(job, "status.succeeded") != 1);
        let idle = pods.iter().filter(|pod| !waits(pod) && !is_well(pod));
        let names: Vec<&str> = few
            .chain(undone)
            .chain(idle)
            .filter_map(|of| at(of, "metadata.name").as_str())
            .collect();
        missing = names.join(", ");
        Ok((missing.is_empty() && !pods.is_empty()).then_some(pods))
    })
    .with_context(|| format!("not ready: {missing}; {}", reasons(env, namespace)))?;
    for pod in pods.iter().filter(|pod| !waits(pod)) {
        let name = at(pod, "metadata.name").as_str().unwrap_or_default();
        for container in at(pod, "spec.containers").as_array().into_iter().flatten() {
            // The one that runs PyTorch has none in this image.
            if at(container, "command.2")
                .as_str()
                .is_some_and(|command| command.starts_with("nvidia-smi"))
            {
                said(
                    env,
                    namespace,
                    name,
                    at(container, "name").as_str().unwrap_or_default(),
                )?;
            }
        }
    }
    Ok(pods.len())
}

/// Returns the Events of the namespace as text.
fn reasons(env: &Env, namespace: &str) -> String {
    let columns = "custom-columns=OF:.involvedObject.name,WHAT:.message";
    let events = env.cluster.kubectl(&[
        "get",
        "events",
        "--namespace",
        namespace,
        "--output",
        columns,
    ]);
    events.unwrap_or_else(|error| format!("{error:#}"))
}

fn said(env: &Env, namespace: &str, pod: &str, container: &str) -> Result<()> {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/log?container={container}");
    wait_for(
        &format!("words of container {container} of pod {pod}"),
        PATIENCE,
        || {
            let text = env.api().text(&path)?;
            Ok(text.contains(SAID).then_some(()))
        },
    )
}

/// Returns true if the example says that the pod stays pending.
fn waits(pod: &Value) -> bool {
    let annotations = at(pod, "metadata.annotations");
    annotations
        .get("demo.divvy.dev/expect")
        .is_some_and(|expected| expected == "Pending")
}

fn is_well(pod: &Value) -> bool {
    has_condition(pod, "Ready") || at(pod, "status.phase") == "Succeeded"
}
