//! `cargo xtask bench`: builds the programs as they are shipped and measures them with
//! `tests/bench`, a program of its own so that this one stays quick to build.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::needs::Need;
use crate::programs::succeeds;

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Passed on; see them with: cargo xtask bench -- --help.
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTIONS"
    )]
    options: Vec<OsString>,
}

impl Args {
    /// Returns the requirements of the machine.
    pub(crate) fn needs(&self) -> &'static [Need] {
        if self.options.iter().any(|option| option == "--cluster") {
            &[Need::Build, Need::Cluster]
        } else {
            &[Need::Build]
        }
    }
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let programs = [
        "--package",
        "divvy-kubelet-plugin",
        "--package",
        "divvy-nvml-mock",
        "--package",
        "divvy-mps-supervisor",
        "--package",
        "divvy-mps-stand-in",
    ];
    succeeds(
        Command::new("cargo")
            .args(["build", "--profile", "node"])
            .args(programs)
            .current_dir(root),
    )?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    let built = target.join("node");
    let mut measure = Command::new("cargo");
    measure
        .args(["run", "--release", "--package", "divvy-bench", "--"])
        .current_dir(root);
    measure
        .arg("--plugin")
        .arg(built.join("divvy-kubelet-plugin"));
    measure.arg("--mock").arg(built.join("libnvidia_ml.so"));
    succeeds(measure.args(&args.options))
}
