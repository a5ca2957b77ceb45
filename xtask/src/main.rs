//! The project's own commands: `cargo xtask COMMAND`. One file per command; this one only picks it.

use anyhow::Result;
use clap::{Parser, Subcommand};

mod cluster;
mod image;

/// The project's own commands.
#[derive(Debug, Parser)]
#[command(bin_name = "cargo xtask")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A real Kubernetes on this machine
    Cluster(cluster::Args),
    /// The driver's container image as an OCI layout
    Image(image::Args),
}

fn main() -> Result<()> {
    match Args::parse().command {
        Command::Cluster(args) => cluster::run(&args),
        Command::Image(args) => image::run(&args),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
