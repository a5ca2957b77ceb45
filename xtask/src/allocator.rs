//! `cargo xtask soak allocator`: the offline allocator against the one of the real scheduler.
//!
//! A Go program over the scheduler's own module (`crates/allocator/upstream`) makes worlds and
//! answers them; the test `upstream` of the crate answers them again and fails on a difference.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::programs::succeeds;

/// Arguments of `cargo xtask soak allocator`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Number of worlds that are compared
    #[arg(long, default_value_t = 20_000)]
    worlds: u64,
    /// Decides which
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let folder = root.join("target/upstream");
    fs_err::create_dir_all(&folder)?;
    let (program, worlds) = (folder.join("allocator"), folder.join("worlds.jsonl"));
    let mut build = Command::new("go");
    build
        .args([
            "build",
            "-trimpath",
            "-buildvcs=false",
            "-mod=readonly",
            "-o",
        ])
        .arg(&program)
        .arg(".");
    succeeds(
        build
            .current_dir(root.join("crates/allocator/upstream"))
            .env("GOWORK", "off"),
    )?;
    let mut generate = Command::new(&program);
    generate
        .arg("generate")
        .args([args.worlds, args.seed].map(|number| number.to_string()));
    succeeds(generate.stdout(fs_err::File::create(&worlds)?.into_parts().0))?;
    let mut compare = Command::new("cargo");
    compare.args([
        "test",
        "--locked",
        "--release",
        "--package",
        "divvy-allocator",
        "--test",
        "upstream",
    ]);
    compare
        .args(["--", "--ignored", "--nocapture"])
        .current_dir(root);
    succeeds(compare.stdin(Stdio::from(fs_err::File::open(&worlds)?.into_parts().0)))
        .with_context(|| format!("the worlds are in {}", worlds.display()))
}
