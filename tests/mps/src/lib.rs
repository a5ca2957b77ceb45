//! A stand-in for NVIDIA's programs for MPS, for the tests of other crates.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Returns the program, in the folder of the test that runs. Cargo builds it for no test of another
/// crate, or an old one is there.
///
/// # Panics
/// If it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(build);
    &PROGRAM
}

#[expect(
    clippy::expect_used,
    reason = "for tests, whose failure is a panic with its reason"
)]
fn build() -> PathBuf {
    // Tests are in `deps` of their profile's folder.
    let test = std::env::current_exe().expect("a test has a path");
    let folder = test.parent().and_then(Path::parent);
    let folder = folder.expect("a test is in a folder of cargo");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["build", "--quiet", "--package", "divvy-mps-stand-in"])
        .args(folder.ends_with("release").then_some("--release"))
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "the stand-in cannot be built");
    folder.join("divvy-mps-stand-in")
}
