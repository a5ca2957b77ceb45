//! Volumes of the pod where the driver's libraries or the loader's files are. A volume is never
//! written to, so that the libraries are found in another way.

use crate::error::HookError;
use crate::rootfs::RootFs;
use crate::symlinks::INSTEAD;

use super::{is_library_name, is_native};

/// Lists names and paths of this machine's libraries of a folder in a volume: those that are
/// mounted in it, and the links to them in the folder instead. Nothing else of the volume is
/// looked at.
pub(super) fn libraries_of(
    root: &RootFs,
    folder: &str,
    outside: HookError,
) -> Result<Vec<(String, String)>, HookError> {
    let mut found = Vec::new();
    for name in root.mounted_in(folder)? {
        let path = format!("{folder}/{name}");
        let is_library =
            is_library_name(&name) && root.head_of_mount(&path).is_ok_and(|head| is_native(&head));
        if is_library {
            found.push((name, path));
        }
    }
    if found.is_empty() {
        return Err(outside);
    }
    for name in root.names(INSTEAD, crate::rootfs::Reach::Image)? {
        // A link into the volume cannot be read from here: it is one that this program made.
        let is_library = match root.head::<20>(INSTEAD, &name) {
            Ok(head) => is_native(&head),
            Err(error) => error.is_outside(),
        };
        if is_library_name(&name) && is_library {
            let path = format!("{INSTEAD}/{name}");
            found.push((name, path));
        }
    }
    Ok(found)
}

/// Makes the libraries found without the loader's files, which are in a volume: by links in the
/// folders that the loader searches last. Fails with `outside` where they are in a volume, too.
pub(super) fn link_in_defaults(
    root: &RootFs,
    defaults: &[&str],
    libraries: &[(String, String)],
    outside: HookError,
) -> Result<(), HookError> {
    let mut folders = Vec::new();
    for folder in defaults {
        match root.has(folder) {
            Ok(true) => folders.push(*folder),
            Ok(false) => {}
            Err(_) => return Err(outside),
        }
    }
    if folders.is_empty() {
        // Of musl, and of distributions without any of the others.
        folders.push("/usr/lib");
    }
    for folder in folders {
        for (name, path) in libraries {
            if root.link(path, &format!("{folder}/{name}")).is_err() {
                return Err(outside);
            }
        }
    }
    Ok(())
}
