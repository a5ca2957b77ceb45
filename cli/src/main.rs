//! `divvy`: what the project does, on the command line. Data on standard output, talk on standard error. Under the name
//! `kubectl-divvy` the same program is a plugin of kubectl.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

mod demo;
mod format;
mod inventory;
mod manifests;
mod slices;
mod status;
mod table;

/// GPUs for Kubernetes, as all they can become.
///
/// Exit status: 0 all well, 1 something failed or stays pending (it says what and why), 2 wrong arguments, 3 (status) all
/// was read and something needs a person.
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
    /// Show the GPUs of a cluster, who holds them, what is stuck since when and why, and what to do
    Status(status::Args),
}

/// How usage calls the program: as the user does.
fn called(program: Option<&OsStr>) -> &'static str {
    let name = program.map(Path::new).and_then(Path::file_stem);
    if name == Some(OsStr::new("kubectl-divvy")) { "kubectl divvy" } else { "divvy" }
}

/// The arguments; clap ends the process for `--help` and for what it does not understand.
fn arguments() -> Args {
    let name = called(std::env::args_os().next().as_deref());
    let matches = Args::command().bin_name(name).get_matches();
    Args::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
}

fn main() -> ExitCode {
    // Two providers in one build make kube panic: ours is chosen before anything else. A second choice is no error.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let result = match arguments().command {
        Command::Demo(args) => demo::run(&args),
        Command::Inventory(args) => inventory::run(&args),
        Command::Status(args) => status::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            format::talk(&format!("divvy: {}", divvy_telemetry::Chain(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use clap::CommandFactory as _;

    #[test]
    fn usage_calls_the_program_as_its_user_does() {
        let called = |name: &str| super::called(Some(OsStr::new(name)));
        assert_eq!(called("/usr/local/bin/kubectl-divvy"), "kubectl divvy");
        assert_eq!(called("kubectl-divvy.exe"), "kubectl divvy");
        assert_eq!(called("target/release/divvy"), "divvy");
        assert_eq!(super::called(None), "divvy");
    }

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
