//! `cargo xtask ci`: what CI runs, step by step, each with its wall time. Stops at the first step
//! that fails.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use crate::needs::Need;
use crate::programs::{installed, succeeds};

/// Arguments of `cargo xtask ci`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leave out the real Kubernetes (about half of the time)
    #[arg(long)]
    no_e2e: bool,
    /// Begin at this step
    #[arg(long, value_name = "STEP")]
    from: Option<String>,
}

/// Version of the licence and ban checker. Pinned: a newer one may need a newer configuration.
const CARGO_DENY: &str = "0.20.2";

impl Args {
    /// Returns the requirements of the machine.
    pub(crate) fn needs(&self) -> &'static [Need] {
        if self.no_e2e {
            &[Need::Build]
        } else {
            &[Need::Build, Need::Cluster]
        }
    }
}

struct Step {
    name: &'static str,
    command: &'static [&'static str],
}

/// The steps that are one command. `cargo test` is the README's test command.
const STEPS: &[Step] = &[
    Step {
        name: "format",
        command: &["cargo", "fmt", "--all", "--check"],
    },
    Step {
        name: "lint",
        command: &[
            "cargo",
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--",
            "-D",
            "warnings",
        ],
    },
    Step {
        name: "build",
        command: &[
            "cargo",
            "test",
            "--workspace",
            "--locked",
            "--no-run",
            "--quiet",
        ],
    },
    // What was built is gigabytes: tests whose files must reach the disk would wait for them.
    Step {
        name: "sync",
        command: &["sync"],
    },
    Step {
        name: "test",
        command: &["cargo", "test", "--workspace", "--locked"],
    },
    Step {
        name: "demo",
        command: &["cargo", "run", "--locked", "-p", "divvy", "--", "demo"],
    },
    Step {
        name: "nvidia",
        command: &["cargo", "xtask", "nvidia", "--must"],
    },
];

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let mut begun = args.from.is_none();
    let mut times = Vec::new();
    let mut step = |name: &str, run: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        begun = begun || args.from.as_deref() == Some(name);
        if !begun {
            return Ok(());
        }
        crate::say(&format!("\n=== {name}"));
        let start = Instant::now();
        let result = run().with_context(|| {
            format!("CI step {name} failed (again: cargo xtask ci --from {name})")
        });
        times.push((name.to_owned(), start.elapsed()));
        result
    };
    step("structure", &mut || crate::check::run(root))?;
    step("figures", &mut || {
        // A report for people: nothing in it fails CI.
        crate::figures::run(root).or_else(|error| {
            crate::say(&format!("no figures: {error:#}"));
            Ok(())
        })
    })?;
    step("licences", &mut || deny(root))?;
    for s in STEPS {
        step(s.name, &mut || command(root, s.command))?;
    }
    step("macos", &mut || macos(root))?;
    if !args.no_e2e {
        step("chart", &mut || crate::chart::run(root))?;
        step("e2e", &mut || command(root, &["cargo", "xtask", "e2e"]))?;
    }
    crate::say("\nstep        wall time");
    for (name, time) in times {
        crate::say(&format!("{name:<10} {:>8.1} s", time.as_secs_f64()));
    }
    Ok(())
}

fn command(root: &Path, words: &[&str]) -> Result<()> {
    let (program, args) = words.split_first().context("an empty command")?;
    succeeds(Command::new(program).args(args).current_dir(root))
}

/// Checks that the command line without the demo builds for macOS, where its parts can be had.
fn macos(root: &Path) -> Result<()> {
    const TARGET: &str = "aarch64-apple-darwin";
    let mut add = Command::new("rustup");
    if let Err(error) = succeeds(add.args(["target", "add", TARGET]).current_dir(root)) {
        crate::say(&format!(
            "skipped: the libraries of {TARGET} cannot be had: {error:#}"
        ));
        return Ok(());
    }
    let mut check = Command::new("cargo");
    check.args(["check", "--locked", "--package", "divvy"]);
    check.args(["--no-default-features", "--target", TARGET]);
    // Nothing is linked: what dependencies have in C is not compiled, since that needs Apple's SDK.
    for tool in ["CC", "AR"] {
        check.env(format!("{tool}_{}", TARGET.replace('-', "_")), "true");
    }
    succeeds(check.current_dir(root))
}

/// Checks bans, licences and sources.
fn deny(root: &Path) -> Result<()> {
    let mut deny = Command::new(installed("cargo-deny", CARGO_DENY, &[])?);
    deny.args([
        "--log-level",
        "error",
        "check",
        "bans",
        "licenses",
        "sources",
    ]);
    succeeds(deny.current_dir(root))?;
    crate::say("advisories were not checked: they need a network that CI does not have");
    Ok(())
}
