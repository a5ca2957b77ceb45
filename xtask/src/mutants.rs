//! `cargo xtask soak mutants`: changes the deciding crates one place at a time and looks whether a
//! test fails.

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::programs::installed;

/// The version whose options are used here.
const VERSION: &str = "27.1.0";
/// The crates that decide, and the one that carries decisions out.
const CRATES: [&str; 3] = ["divvy-claims", "divvy-offer", "divvy-executor"];

/// Arguments of `cargo xtask soak mutants`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only mutants of these crates
    #[arg(long = "package", value_delimiter = ',', default_values = CRATES)]
    packages: Vec<String>,
    /// Passed on to cargo-mutants, for example `--shard 1/8` or `--file release.rs`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTIONS"
    )]
    options: Vec<OsString>,
}

/// Runs cargo-mutants; what survives is listed in `target/soak/mutants.out/missed.txt`.
pub(crate) fn run(root: &Path, args: &Args, out: &Path) -> Result<()> {
    fs_err::create_dir_all(out)?;
    let mut command = Command::new(installed("cargo-mutants", VERSION, &[])?);
    command
        .current_dir(root)
        .args(["mutants", "--no-shuffle", "--timeout", "120", "--output"])
        .arg(out);
    for package in &args.packages {
        command.args(["--package", package, "--test-package", package]);
    }
    let status = command
        .args(&args.options)
        .status()
        .context("cargo mutants cannot be run")?;
    // 2: some survived, 3: some ran into the time limit. Both are findings for people to read.
    let ran = status.success() || matches!(status.code(), Some(2 | 3));
    ensure!(ran, "cargo mutants failed: {status}");
    crate::say(&format!(
        "what survived: {}",
        out.join("mutants.out/missed.txt").display()
    ));
    Ok(())
}
