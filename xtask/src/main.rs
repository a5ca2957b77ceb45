//! The project's own commands: `cargo xtask COMMAND`. Each is a file; this one only picks it.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

mod allocator;
mod bench;
mod book;
mod chart;
mod check;
mod ci;
mod cluster;
mod crds;
mod dist;
mod e2e;
mod figures;
mod image;
mod metadata;
mod mutants;
mod needs;
mod nvidia;
mod programs;
mod promises;
mod prose;
mod reference;
mod sequences;
mod soak;
mod sources;
mod ui;
mod words;
mod written;

use needs::Need;

/// The project's own commands.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Everything that CI runs: structure, licences, format, lints, tests, demo, real Kubernetes
    Ci(ci::Args),
    /// Only the structure: pure crates, one-way dependencies, forgotten files, links, words
    Check,
    /// Print measures of how easy the code is to live in
    Figures,
    /// Compare the chart's renders of many sets of values with golden files, with helm alone
    Chart,
    /// Write the chart's CustomResourceDefinitions from the types
    Crds,
    /// The documents as a site, in target/book/site
    Book,
    /// Write the pages of docs/reference that follow from code
    Reference,
    /// A real Kubernetes on this machine
    Cluster(cluster::Args),
    /// The end-to-end cases, on a cluster of their own
    E2e(e2e::Args),
    /// Measure the released plugin: latency, start, memory, CPU and size, each beside a reference
    /// and its budget
    Bench(bench::Args),
    /// Tests that take too long for CI: older releases of Kubernetes, a day in fast motion
    Soak(soak::Args),
    /// NVIDIA's own programs, fetched from Debian: whether they are as the tests have them
    Nvidia(nvidia::Args),
    /// The page of `divvy demo --ui` in a headless Chromium: size, speed, accessibility, markup in
    /// names
    Ui(ui::Args),
    /// The driver's container image as an OCI layout
    Image(image::Args),
    /// All that a release publishes: images for amd64 and arm64, chart, command line, SBOM, notes,
    /// checksums
    Dist(dist::Args),
}

impl Command {
    fn needs(&self) -> &'static [Need] {
        match self {
            Self::Check | Self::Figures | Self::Book | Self::Crds | Self::Reference => &[],
            Self::Image(_) | Self::Ui(_) | Self::Nvidia(_) => &[Need::Build],
            Self::Dist(_) => &[Need::Build, Need::Dist],
            Self::Cluster(args) => args.needs(),
            Self::Bench(args) => args.needs(),
            Self::Ci(args) => args.needs(),
            Self::Chart | Self::E2e(_) | Self::Soak(_) => &[Need::Build, Need::Cluster],
        }
    }
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Not `main() -> Result`, which would print a backtrace before the message.
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    let root = root();
    needs::ensure_all(&root, command.needs())?;
    match command {
        Command::Ci(args) => ci::run(&root, &args),
        Command::Check => check::run(&root),
        Command::Figures => figures::run(&root),
        Command::Chart => chart::run(&root),
        Command::Crds => written::write(&crds::wanted(&root)?),
        Command::Book => book::run(&root),
        Command::Reference => reference::run(&root),
        Command::Cluster(args) => cluster::run(&args),
        Command::E2e(args) => e2e::run(&args),
        Command::Bench(args) => bench::run(&root, &args),
        Command::Soak(args) => soak::run(&root, &args),
        Command::Nvidia(args) => nvidia::run(&root, &args),
        Command::Ui(args) => ui::run(&root, &args),
        Command::Image(args) => image::run(&args),
        Command::Dist(args) => dist::run(&root, &args),
    }
}

/// Returns the checkout this program was built from.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("."))
        .to_owned()
}

/// Prints a line on standard output. A closed pipe does not stop the work.
fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
