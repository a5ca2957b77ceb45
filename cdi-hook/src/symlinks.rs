//! `create-symlinks`: the names under which libraries are asked for.

use std::collections::BTreeSet;

use crate::args::Link;
use crate::error::{HookError, left_out};
use crate::rootfs::RootFs;

/// Folder for names of libraries whose own folder is covered by a volume of the pod, which is never
/// written to. The libraries themselves are mounted in the volume.
pub(crate) const INSTEAD: &str = "/usr/lib/divvy";

/// Makes the links in the order given. Their targets are not looked at: a link is followed only
/// inside the container.
pub(crate) fn create(root: &RootFs, links: &[Link]) -> Result<(), HookError> {
    for link in links {
        match root.link(&link.target, &link.path) {
            Err(error) if error.is_outside() => elsewhere(root, links, link, error)?,
            done => done?,
        }
    }
    Ok(())
}

/// Makes a link that a volume keeps from its place, in the folder instead.
fn elsewhere(
    root: &RootFs,
    links: &[Link],
    link: &Link,
    error: HookError,
) -> Result<(), HookError> {
    let Some((folder, name)) = link.path.rsplit_once('/') else {
        return Err(error);
    };
    // A name in a folder of its own is not for the loader, but for a program that looks there.
    if link.target.contains('/') {
        left_out(Err(error), "programs for graphics may not find it");
        return Ok(());
    }
    let beside = links.iter().filter_map(|link| link.path.rsplit_once('/'));
    let beside: BTreeSet<_> = beside.filter(|(of, _)| *of == folder).collect();
    // Another link of this call is made there, too; anything else is mounted in the volume.
    let target = if beside.contains(&(folder, link.target.as_str())) {
        link.target.clone()
    } else {
        format!("{folder}/{}", link.target)
    };
    // The first error says more: people know their volume, and not this folder.
    root.link(&target, &format!("{INSTEAD}/{name}"))
        .map_err(|_| error)
}
