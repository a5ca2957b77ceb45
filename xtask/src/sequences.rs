//! `cargo xtask soak sequences`: the random tests of CI, with as many sequences as there is time
//! for.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use clap::ValueEnum;

use crate::programs::succeeds;

/// Arguments of `cargo xtask soak sequences`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The test
    #[arg(value_enum)]
    of: Of,
    /// Number of sequences
    #[arg(long, default_value_t = 1_000_000)]
    count: u64,
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Of {
    /// Odd answers of NVML, through inventory, offer and prepare
    Odd,
    /// Claims that come and go on a model of a GPU, with calls that fail, lie and land late
    Goals,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    let (package, test, only, count, seed) = match args.of {
        Of::Odd => (
            "divvy-executor",
            "executor",
            "odd::",
            "DIVVY_ODD_SEQUENCES",
            "DIVVY_SEED",
        ),
        Of::Goals => (
            "divvy-claims",
            "goals",
            "any_story",
            "DIVVY_GOAL_STORIES",
            "DIVVY_GOAL_SEED",
        ),
    };
    let mut command = Command::new("cargo");
    command
        .args(["test", "--locked", "--release", "--package", package])
        .args(["--test", test, "--", "--nocapture", only])
        .env(count, args.count.to_string())
        .env(seed, args.seed.to_string())
        .current_dir(root);
    succeeds(&mut command)
}
