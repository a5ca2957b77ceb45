//! NVIDIA's programs for MPS in a driver root.

use std::path::Path;

use anyhow::Result;
use fs_err as fs;

/// The daemon's program.
pub const DAEMON: &str = "nvidia-cuda-mps-control";
/// The server's program.
pub const SERVER: &str = "nvidia-cuda-mps-server";

/// The faults of the stand-in, beside it.
const FAULTS: &str = "faults";

/// Copies: each has a file of its own, as NVIDIA's have.
pub fn install(driver: &Path, stand_in: &Path) -> Result<()> {
    for name in [DAEMON, SERVER] {
        fs::copy(stand_in, driver.join("usr/bin").join(name))?;
    }
    Ok(())
}

/// Has a server be in the state FAULT, by its number; none any more without one.
pub(super) fn fault(driver: &Path, server: Option<u32>) -> Result<()> {
    let words = server.map(|pid| format!("fault {pid}")).unwrap_or_default();
    Ok(fs::write(driver.join("usr/bin").join(FAULTS), words)?)
}

pub(super) fn remove(driver: &Path) -> Result<()> {
    for name in [DAEMON, SERVER, FAULTS] {
        match fs::remove_file(driver.join("usr/bin").join(name)) {
            Err(error) if name != FAULTS => return Err(error.into()),
            // Only some cases write it.
            _ => {}
        }
    }
    Ok(())
}
