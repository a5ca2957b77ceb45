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
const CRATES: [&str; 4] = ["divvy-gpu", "divvy-claims", "divvy-offer", "divvy-executor"];

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

/// Tests that take most of the time of a run, by parts of their names: orders and crashes without
/// number, which notice little that the others do not.
const SLOW: [&str; 9] = [
    "a_crash_at_every_call",
    "any_order_of_events_with_crashes",
    "odd_answers_publish",
    "no_slice_is_lost_leaked",
    "racing_threads_of_two",
    "whenever_the_process_dies",
    "a_record_that_stays_unreadable",
    "wherever_a_crash_cuts",
    "a_prepare_pays_for_no_answer",
];

/// Runs cargo-mutants twice: without the slow tests, and for the mutants that survive that, with
/// all. The survivors of both are listed in `target/soak/mutants.out/missed.txt`.
pub(crate) fn run(root: &Path, args: &Args, out: &Path) -> Result<()> {
    fs_err::create_dir_all(out)?;
    let mutants = installed("cargo-mutants", VERSION, &[])?;
    let quick = SLOW.into_iter().flat_map(|slow| ["--skip", slow]);
    let quick: Vec<_> = ["--", "--"].into_iter().chain(quick).collect();
    // In seconds; a test that waits for what never comes would cost the default of minutes each
    // time.
    let passes = [
        (&["--timeout", "40"][..], quick.as_slice()),
        (&["--timeout", "240", "--iterate"], &[]),
    ];
    for (options, tests) in passes {
        let mut command = Command::new(&mutants);
        command
            .current_dir(root)
            .args(["mutants", "--no-shuffle", "--output"])
            .arg(out);
        for package in &args.packages {
            command.args(["--package", package, "--test-package", package]);
        }
        // Each mutant is a small change of the one before; debug information serves none.
        let status = command
            .args(options)
            .args(&args.options)
            .args(tests)
            .envs([
                ("CARGO_INCREMENTAL", "1"),
                ("CARGO_PROFILE_DEV_DEBUG", "0"),
                ("CARGO_PROFILE_TEST_DEBUG", "0"),
            ])
            .status()
            .context("cargo mutants cannot be run")?;
        // 2: some survived, 3: some ran into the time limit. Both are findings for people to read.
        let ran = status.success() || matches!(status.code(), Some(2 | 3));
        ensure!(ran, "cargo mutants failed: {status}");
    }
    crate::say(&format!(
        "what survived: {}",
        out.join("mutants.out/missed.txt").display()
    ));
    Ok(())
}
