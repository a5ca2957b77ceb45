//! `cargo xtask bench`: builds the programs as they are shipped and measures them. What is measured, and how, is in
//! `tests/bench`, a program of its own so that this one stays quick to build.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::needs::Need;

/// Arguments of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Passed on; see them with: cargo xtask bench -- --help.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    options: Vec<OsString>,
}

impl Args {
    /// What has to be on the machine first.
    pub(crate) fn needs(&self) -> &'static [Need] {
        if self.options.iter().any(|option| option == "--cluster") {
            &[Need::Build, Need::Cluster]
        } else {
            &[Need::Build]
        }
    }
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    cargo(
        root,
        &["build", "--profile", "node", "--package", "divvy-kubelet-plugin", "--package", "divvy-nvml-mock"],
        &[],
    )?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), Into::into);
    let built = target.join("node");
    let mut options: Vec<OsString> = vec!["--plugin".into(), built.join("divvy-kubelet-plugin").into()];
    options.extend(["--mock".into(), built.join("libnvidia_ml.so").into()]);
    options.extend(args.options.iter().cloned());
    cargo(root, &["run", "--release", "--package", "divvy-bench", "--"], &options)
}

fn cargo(root: &Path, args: &[&str], more: &[OsString]) -> Result<()> {
    let mut command = Command::new("cargo");
    // Output that people wait for goes through; `--quiet` only silences what cargo does on the way.
    let status = command.args(args).args(more).current_dir(root).status().context("running cargo")?;
    ensure!(status.success(), "cargo {} failed: {status}", args.join(" "));
    Ok(())
}
