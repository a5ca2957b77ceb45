//! Claims measured against the API server of a real Kubernetes.

use std::path::{Path, PathBuf};

use anyhow::Result;
use divvy_e2e::driver::Driver;
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::process::output;
use divvy_e2e::programs::Programs;
use divvy_e2e::{Cluster, Extent, Gates, Options};

use crate::table::Report;

const GPUS: &str = "h100x1";
const NAME: &str = "bench";

/// Brings a cluster up, measures, and takes it down. This program runs again for that, inside the
/// cluster's namespaces, where its API server can be reached.
pub(crate) fn measure(programs: &Programs, dir: &Path, quick: bool) -> Result<Report> {
    let version = parts::version_setting();
    Parts::ensure(&version)?;
    Cluster::down(NAME)?;
    let cluster = Cluster::up(&Options {
        name: NAME.to_owned(),
        version,
        owned: true,
        extent: Extent::Whole,
        gates: Gates::Default,
    })?;
    // The chart brings the CustomResourceDefinitions. Its plugin is not to compete with the one
    // that is measured.
    let driver = Driver::install(&cluster, programs, GPUS)?;
    driver.wait_until_ready()?;
    driver.stop()?;
    let report = cluster.state().join("bench.json");
    let admin = PathBuf::from(cluster.layout().kubeconfig("admin"));
    let mut command = cluster.command(std::env::current_exe()?, &[] as &[&str]);
    for (flag, value) in [
        ("--plugin", programs.plugin.as_path()),
        ("--mock", &programs.mock),
        ("--real-api", &admin),
        ("--dir", dir),
        ("--json", &report),
    ] {
        command.arg(flag).arg(value);
    }
    if quick {
        command.arg("--quick");
    }
    output(&mut command)?;
    Ok(serde_json::from_slice(&fs_err::read(report)?)?)
}
