//! `divvy`: what the project does, on the command line. Data on standard output, talk on standard error.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod demo;
mod format;
mod inventory;
mod manifests;
mod slices;
mod table;

/// GPUs for Kubernetes, as all they can become.
///
/// Exit status: 0 all well, 1 something failed or stays pending (it says what and why), 2 wrong arguments.
#[derive(Debug, Parser)]
#[command(name = "divvy", version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the whole driver at work without a cluster and without a GPU
    Demo(demo::Args),
    /// Show the GPUs of this machine, or of a simulated one, and what divvy would publish
    Inventory(inventory::Args),
}

fn main() -> ExitCode {
    // Two providers in one build make kube panic: ours is chosen before anything else. A second choice is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match Args::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Inventory(args) => inventory::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            format::talk(&format!("divvy: {error:#}"));
            ExitCode::FAILURE
        }
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
