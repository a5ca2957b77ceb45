//! `enable-cuda-compat`: an image of a CUDA that is newer than the host's driver may bring
//! user-space libraries of a newer driver, which NVIDIA's data-centre GPUs accept on an older
//! kernel module (forward compatibility).
//!
//! The names by which libraries are asked for are links in our folder. For such an image they are
//! led to its own libraries, so that these are found by the cache and by an `LD_LIBRARY_PATH` that
//! names our folder, as NVIDIA's images have it, alike.

use crate::error::{HookError, left_out};
use crate::loader::is_library_name;
use crate::rootfs::{Reach, RootFs};
use crate::symlinks::INSTEAD;

const COMPAT: &str = "/usr/local/cuda/compat";
const CUDA: &str = "libcuda.so.";

/// Leads the names in `folder` to the image's libraries. Does nothing unless the image has those of
/// exactly one driver, of a later branch than the host's.
pub(crate) fn enable(root: &RootFs, host_driver: &str, folder: &str) -> Result<(), HookError> {
    let names = match root.names(COMPAT, Reach::Image) {
        Ok(names) => names,
        // Libraries of a volume are not the image's; names that only root may list stay unknown.
        Err(error) => {
            left_out(Err(error), "CUDA uses the host's libraries");
            return Ok(());
        }
    };
    // `libcuda.so.1` is a link and has no version; the file behind it has. With two drivers in the
    // folder it is not known which belongs to the rest.
    let mut versions = names
        .iter()
        .filter_map(|name| name.strip_prefix(CUDA))
        .filter(|v| v.contains('.'));
    let (Some(version), None) = (versions.next(), versions.next()) else {
        return Ok(());
    };
    // Within a branch the host's libraries are as good, and belong to the host's module.
    let newer = branch(version)
        .zip(branch(host_driver))
        .is_some_and(|(image, host)| image > host);
    // The links of a folder that a volume covers are elsewhere.
    let folder = [folder, INSTEAD].into_iter().find(|path| root.exists(path));
    if let Some(folder) = folder.filter(|_| newer) {
        // Links, since our folder is the `LD_LIBRARY_PATH` of CUDA images, which wins over any
        // cache.
        for name in names.iter().filter(|name| is_library_name(name)) {
            root.link(&format!("{COMPAT}/{name}"), &format!("{folder}/{name}"))?;
        }
    }
    Ok(())
}

/// Returns 580 for `580.95.05`.
fn branch(version: &str) -> Option<u32> {
    version.split('.').next()?.parse().ok()
}
