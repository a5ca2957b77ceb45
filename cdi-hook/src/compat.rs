//! `enable-cuda-compat`: an image of a CUDA that is newer than the host's driver may bring user-space libraries of a newer
//! driver, which NVIDIA's data-centre GPUs accept on an older kernel module (forward compatibility).
//!
//! The names by which libraries are asked for are links in our folder. For such an image they are led to its own libraries,
//! so that these are found by the cache and by an `LD_LIBRARY_PATH` that names our folder, as NVIDIA's images have it, alike.

use crate::error::HookError;
use crate::loader::is_library_name;
use crate::rootfs::RootFs;

const COMPAT: &str = "/usr/local/cuda/compat";
const CUDA: &str = "libcuda.so.";

/// Does nothing unless the image has libraries of exactly one driver, of a later branch than the host's.
pub(crate) fn enable(root: &RootFs, host_driver: &str, folder: &str) -> Result<(), HookError> {
    let names = root.names(COMPAT)?;
    let mut versions = names.iter().filter_map(|name| name.strip_prefix(CUDA)).filter(|v| v.contains('.'));
    let (Some(version), None) = (versions.next(), versions.next()) else { return Ok(()) };
    // Within a branch the host's libraries are as good, and belong to the host's module.
    let newer = branch(version).zip(branch(host_driver)).is_some_and(|(image, host)| image > host);
    if newer && root.exists(folder) {
        for name in names.iter().filter(|name| is_library_name(name)) {
            root.link(&format!("{COMPAT}/{name}"), &format!("{folder}/{name}"))?;
        }
    }
    Ok(())
}

/// `580.95.05` → 580.
fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}
