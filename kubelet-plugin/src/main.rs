//! The node plugin's binary: flags in, exit code out; everything else is [`divvy_kubelet_plugin`].

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use divvy_kubelet_plugin::{Args, become_other, start};
use divvy_telemetry::Chain;

fn main() -> ExitCode {
    // Started by itself to run nvidia-smi.
    if let Some(code) = become_other(std::env::args_os()) {
        return code.into();
    }
    // First of all: a process has one TLS provider, and kube's client panics if none is installed.
    drop(rustls::crypto::ring::default_provider().install_default());
    match start(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Logs may be what could not be set up.
            drop(writeln!(
                std::io::stderr(),
                "divvy-kubelet-plugin: {}",
                Chain(error.as_ref())
            ));
            ExitCode::FAILURE
        }
    }
}
