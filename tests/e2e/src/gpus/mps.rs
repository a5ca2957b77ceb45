//! NVIDIA's programs for MPS in a driver root.

use std::path::Path;

use anyhow::Result;
use fs_err as fs;

/// The daemon's program.
pub const DAEMON: &str = "nvidia-cuda-mps-control";
/// The server's program.
const SERVER: &str = "nvidia-cuda-mps-server";

/// Copies: each has a file of its own, as NVIDIA's have.
pub fn install(driver: &Path, stand_in: &Path) -> Result<()> {
    for name in [DAEMON, SERVER] {
        fs::copy(stand_in, driver.join("usr/bin").join(name))?;
    }
    Ok(())
}

pub(super) fn remove(driver: &Path) -> Result<()> {
    for name in [DAEMON, SERVER] {
        fs::remove_file(driver.join("usr/bin").join(name))?;
    }
    Ok(())
}
