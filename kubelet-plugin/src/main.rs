//! The node plugin's binary: flags in, exit code out; everything else is [`divvy_kubelet_plugin`].

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use divvy_kubelet_plugin::{Args, enter_root, start};
use divvy_telemetry::Chain;

fn main() -> ExitCode {
    // Runs nvidia-smi inside the driver's root: this program is started for that by itself.
    if let Some(code) = enter_root(std::env::args_os()) {
        return code.into();
    }
    // Before all else: a process has one TLS provider, and kube's client panics if nobody chose.
    drop(rustls::crypto::ring::default_provider().install_default());
    match start(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Logs may be what could not be set up.
            drop(writeln!(std::io::stderr(), "divvy-kubelet-plugin: {}", Chain(&error)));
            ExitCode::FAILURE
        }
    }
}
