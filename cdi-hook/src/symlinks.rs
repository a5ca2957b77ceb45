//! `create-symlinks`: the names under which libraries are asked for.

use crate::args::Link;
use crate::error::HookError;
use crate::rootfs::RootFs;

/// Makes the links in the order given. Their targets are not looked at: a link is followed only
/// inside the container.
pub(crate) fn create(root: &RootFs, links: &[Link]) -> Result<(), HookError> {
    links
        .iter()
        .try_for_each(|link| root.link(&link.target, &link.path))
}
