//! Programs that commands run.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Runs a program to its end, its output shown; an error unless it succeeds.
pub(crate) fn succeeds(command: &mut Command) -> Result<()> {
    // `cargo run` sets it, and crates that look at it would be built again by each that builds
    // without.
    command.env_remove("CARGO_MANIFEST_DIR");
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .collect();
    let words = words.join(" ".as_ref()).display().to_string();
    let status = command
        .status()
        .with_context(|| format!("running `{words}`"))?;
    ensure!(status.success(), "`{words}`: {status}");
    Ok(())
}

/// Returns the program of a crate, which is built once and kept outside the checkout.
pub(crate) fn installed(name: &str, version: &str, features: &[&str]) -> Result<PathBuf> {
    let cache = divvy_e2e::parts::cache_dir()?.join(format!("{name}-{version}"));
    let binary = cache.join("bin").join(name);
    if !binary.exists() {
        let mut cargo = Command::new("cargo");
        cargo
            .args(["install", "--locked", "--root"])
            .arg(&cache)
            .args(["--version", version]);
        succeeds(cargo.args(features).arg(name).current_dir(crate::root()))?;
    }
    Ok(binary)
}
