//! `disable-device-node-modification`: by default, NVIDIA's libraries read
//! `/proc/driver/nvidia/params` and create missing device nodes and change the rights of existing
//! ones. In a container they must not.
//!
//! The file is a view into the kernel module, so a changed copy is mounted over it, in the
//! container's mount namespace only. The copy lives in a small read-only tmpfs that has no other
//! place in the container.

use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags, fsconfig_create, fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string,
    fsmount, fsopen, fspick, move_mount, open_tree, unmount,
};
use std::io::{self, Write};

use crate::error::HookError;
use crate::rootfs::RootFs;

const FOLDER: &str = "/proc/driver/nvidia";
const PARAMS: &str = "/proc/driver/nvidia/params";
const NAME: &str = "params";
const SETTING: &str = "ModifyDeviceFiles:";

/// Covers the setting. Does nothing where there is no NVIDIA driver, or where it leaves nodes alone
/// anyway.
///
/// The copy is open to every user, so the original must be, and the copy is mounted over the very
/// file that was read: it cannot be reached by more users than the original.
pub(crate) fn disable_modification(root: &RootFs) -> Result<(), HookError> {
    let Some((target, params)) = root.read_of_runtime(PARAMS)? else {
        return Ok(());
    };
    let Some(changed) = changed(&String::from_utf8_lossy(&params.bytes)) else {
        return Ok(());
    };
    // The copy is readable by all. A volume that the pod mounts there could hold a file that only
    // root may read.
    if !params.rights.is_public() {
        let closed = io::Error::other("not every user may read it, so it is not the driver's");
        return Err(HookError::inside("copy", PARAMS, closed));
    }
    let folder = root.find(FOLDER)?;
    cover(&target, &folder, changed.as_bytes())
        .map_err(|error| HookError::inside("mount over", PARAMS, error))
}

/// Returns the text with the setting at 0; `None` if it is at 0 already.
fn changed(params: &str) -> Option<String> {
    let on = |line: &str| {
        line.strip_prefix(SETTING)
            .is_some_and(|value| value.trim() != "0")
    };
    if !params.lines().any(on) {
        return None;
    }
    let lines = params.lines().map(|line| {
        if on(line) {
            format!("{SETTING} 0\n")
        } else {
            format!("{line}\n")
        }
    });
    Some(lines.collect())
}

/// Mounts a file with `bytes` over `target`, which is in `folder`.
///
/// Phases: make a tmpfs with the file and make it read-only; put it over the folder for a moment,
/// because a single file can be mounted only from a file system that is itself mounted somewhere;
/// clone the file's mount; take the tmpfs away; put the clone over `target`, which was opened
/// before and stays what it is.
fn cover(
    target: &impl std::os::fd::AsFd,
    folder: &impl std::os::fd::AsFd,
    bytes: &[u8],
) -> io::Result<()> {
    // Phase 1: a tmpfs that is mounted nowhere, and the file in it.
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "size", "64k")?;
    fsconfig_set_string(&context, "mode", "0555")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let tmpfs = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&tmpfs, NAME, flags, Mode::from_raw_mode(0o444))?;
    std::fs::File::from(file).write_all(bytes)?;
    // The file system itself becomes read-only and not only this mount of it: the clone shares it.
    let picked = fspick(
        &tmpfs,
        "",
        FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC,
    )?;
    fsconfig_set_flag(&picked, "ro")?;
    fsconfig_reconfigure(&picked)?;

    // Phase 2: over the folder, for `open_tree` clones mounts of this mount namespace only.
    let onto = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    move_mount(&tmpfs, "", folder, "", onto)?;
    let clone = open_tree(
        &tmpfs,
        NAME,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    );
    // Taken away again before the outcome of the cloning is looked at: left there, it would hide
    // the driver's files.
    // `umount2` takes no descriptor. The working directory is this very mount, whatever a path
    // leads to by now.
    rustix::process::fchdir(&tmpfs)?;
    unmount(".", UnmountFlags::DETACH)?;
    rustix::process::chdir("/")?;
    // Phase 3: the clone over the file that was read.
    move_mount(clone?, "", target, "", onto)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_one_setting_is_changed_and_only_if_it_is_on() {
        let text = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 1\nDeviceFileMode: 438\n";
        let expected = "ResmanDebugLevel: 4294967295\nModifyDeviceFiles: 0\nDeviceFileMode: 438\n";
        assert_eq!(changed(text).as_deref(), Some(expected));
        assert_eq!(changed(expected), None);
        assert_eq!(changed("DeviceFileMode: 438\n"), None);
    }
}
