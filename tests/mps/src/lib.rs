//! A stand-in for NVIDIA's programs for MPS, for the tests of other crates, and the script by which
//! it is compared with them.

mod script;
mod steps;

pub use script::transcript;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

/// Drivers whose programs the stand-in was compared with: their branch, and the fault words that
/// make it one of them.
pub const DRIVERS: [(u32, &[&str]); 3] = [
    (
        535,
        &[
            "no-v3",
            "no-multiuser",
            "no-pid-file",
            "no-status",
            "no-owner",
        ],
    ),
    (550, &["no-v3", "no-multiuser"]),
    (555, &["no-v3"]),
];

/// Returns what the program of a driver answers to the script.
pub fn golden(branch: u32) -> std::io::Result<String> {
    fs_err::read_to_string(golden_file(branch))
}

/// Returns the file of [`golden`].
pub fn golden_file(branch: u32) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    folder.join(format!("r{branch}.txt"))
}

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
    let folder = test.ancestors().skip(1).find(|one| !one.ends_with("deps"));
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
