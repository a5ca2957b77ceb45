//! Gives the program the commit that it is built from, for reports of faults.

use std::path::PathBuf;
use std::process::Command;

/// Variable that says it where the sources have no history.
const GIVEN: &str = "DIVVY_COMMIT";

fn git(arguments: &[&str]) -> Option<String> {
    let done = Command::new("git").args(arguments).output().ok()?;
    let said = String::from_utf8(done.stdout).ok()?;
    done.status
        .success()
        .then(|| said.trim().to_owned())
        .filter(|said| !said.is_empty())
}

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={GIVEN}");
    // The log of HEAD grows with each commit and each checkout.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        let log = PathBuf::from(log);
        if log.exists() {
            println!("cargo::rerun-if-changed={}", log.display());
        }
    }
    let given = std::env::var(GIVEN)
        .ok()
        .filter(|commit| !commit.is_empty());
    let commit = given.or_else(|| git(&["rev-parse", "--short=12", "HEAD"]));
    println!(
        "cargo::rustc-env={GIVEN}={}",
        commit.as_deref().unwrap_or("unknown")
    );
}
