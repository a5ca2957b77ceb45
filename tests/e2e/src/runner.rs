//! Runs the cases on one cluster, in their order: neighbours that can at once, each of the others
//! by itself.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::json;

use crate::case::{Case, Env};
use crate::cluster::Cluster;
use crate::driver::Driver;

/// Settings of a run of the cases.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The cases, in the order they are started.
    pub cases: Vec<Case>,
    /// Number of cases that run at once.
    pub jobs: usize,
    /// Where a failed case leaves its folder.
    pub failures: PathBuf,
}

/// Numbers of cases that passed and that failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    pub passed: usize,
    pub failed: usize,
}

/// Runs all cases and reports each on standard output as it ends.
pub fn run(cluster: &Cluster, driver: &Driver, plan: &Plan) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for cases in plan.cases.chunk_by(|one, next| !one.alone && !next.alone) {
        let of_these = at_once(cluster, driver, cases, plan);
        outcome.passed += of_these.passed;
        outcome.failed += of_these.failed;
    }
    Ok(outcome)
}

fn at_once(cluster: &Cluster, driver: &Driver, cases: &[Case], plan: &Plan) -> Outcome {
    let outcome = Mutex::new(Outcome::default());
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let passed = one(cluster, driver, *case, plan);
            if let Ok(mut outcome) = outcome.lock() {
                outcome.count(passed);
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..plan.jobs.clamp(1, cases.len()) {
            scope.spawn(work);
        }
    });
    outcome
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Outcome {
    fn count(&mut self, passed: bool) {
        if passed {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }
}

/// Runs one case in a namespace of its own; what is in that is deleted afterwards.
fn one(cluster: &Cluster, driver: &Driver, case: Case, plan: &Plan) -> bool {
    let start = Instant::now();
    let env = Env {
        cluster,
        driver,
        namespace: namespace_of(&case),
    };
    let result = create_namespace(&env).and_then(|()| (case.run)(&env));
    let took = start.elapsed();
    let folder = plan.failures.join(case.name);
    if let Err(error) = &result {
        // Before the namespace goes: its objects are what explains the failure.
        let collected = leave(&env, &folder, error);
        report(
            "FAILED",
            case,
            took,
            &format!("\n    {error:#}\n    see {}", folder.display()),
        );
        if let Err(error) = collected {
            report(
                "",
                case,
                took,
                &format!("its folder is not complete: {error:#}"),
            );
        }
    } else {
        report("ok", case, took, "");
    }
    if let Err(error) = delete_namespace(&env, case.alone) {
        report("", case, took, &format!("its namespace is left: {error:#}"));
    }
    result.is_ok()
}

fn report(verdict: &str, case: Case, took: Duration, more: &str) {
    // One write: lines of cases that end together do not mix. Output that cannot be written does
    // not fail the run.
    let line = format!(
        "{verdict:<6} {:>6.1} s  {}{more}\n",
        took.as_secs_f32(),
        case.name
    );
    let _ = std::io::stdout().lock().write_all(line.as_bytes());
}

fn leave(env: &Env, folder: &Path, error: &anyhow::Error) -> Result<()> {
    fs_err::create_dir_all(folder)?;
    fs_err::write(
        folder.join("error.txt"),
        format!("namespace {}\n{error:?}\n", env.namespace),
    )?;
    env.cluster.collect_logs(folder)
}

/// A namespace's name may have 63 characters and no `_`.
fn namespace_of(case: &Case) -> String {
    case.name
        .replace('_', "-")
        .chars()
        .take(60)
        .collect::<String>()
        .trim_end_matches('-')
        .to_owned()
}

fn create_namespace(env: &Env) -> Result<()> {
    let object =
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": env.namespace}});
    env.api().create("/api/v1/namespaces", &object)?;
    let account = format!(
        "/api/v1/namespaces/{}/serviceaccounts/default",
        env.namespace
    );
    crate::wait_for(
        "default ServiceAccount of the namespace",
        crate::case::PATIENCE,
        || env.api().get(&account),
    )
    .map(drop)
}

/// A case that has the cluster to itself is followed by one that wants it as it was.
fn delete_namespace(env: &Env, wait: bool) -> Result<()> {
    let path = format!("/api/v1/namespaces/{}", env.namespace);
    env.api().delete(&path, &json!({}))?;
    if wait {
        let gone = || Ok(env.api().get(&path)?.is_none());
        crate::poll("end of the namespace", crate::case::PATIENCE, gone)
            .context("its pods do not end")?;
    }
    Ok(())
}
