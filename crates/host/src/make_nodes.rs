//! Device nodes that are made on the host.
//!
//! A runtime creates a container's nodes itself, from the numbers in the CDI file; but not for a
//! pod with a user namespace, where nodes cannot be created: there it binds the host's, which must
//! then exist and match the CDI file.

use std::fs::Permissions;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::nodes::{DeviceNode, DeviceNodes, NodeInfo};
use crate::root::HostRoot;

/// Makes those of these nodes that the host lacks, or has with other numbers, left from a kernel
/// module that was loaded before. Returns their paths. Given nodes ([`DeviceNodes::Given`]) are not
/// made: they are of a host that does not exist.
pub fn make_nodes<'a>(
    host: &HostRoot,
    nodes: &DeviceNodes,
    wanted: impl IntoIterator<Item = &'a DeviceNode>,
) -> io::Result<Vec<String>> {
    let mut made = Vec::new();
    if *nodes == DeviceNodes::Real {
        for node in wanted {
            let path = host.dev(node.path.trim_start_matches("/dev/"));
            // Majors are given out when a module is loaded, so a node from before may have the
            // numbers of another device.
            if !is_there(&path, node.info)? {
                make(&path, node.info)?;
                made.push(node.path.clone());
            }
        }
    }
    Ok(made)
}

fn is_there(path: &Path, info: NodeInfo) -> io::Result<bool> {
    match fs_err::metadata(path) {
        Ok(meta) => Ok(meta.rdev() == makedev(info.major, info.minor)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whole from the first moment: made under another name, given its rights, and renamed.
fn make(path: &Path, info: NodeInfo) -> io::Result<()> {
    const FOLDER: u32 = 0o755;
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(());
    };
    if !folder.exists() {
        fs_err::create_dir_all(folder)?;
        fs_err::set_permissions(folder, Permissions::from_mode(FOLDER))?;
    }
    let temporary = folder.join(format!(
        ".{}.divvy-{}",
        name.to_string_lossy(),
        std::process::id()
    ));
    let mode = Mode::from_raw_mode(info.mode);
    let number = makedev(info.major, info.minor);
    let done = mknodat(CWD, &temporary, FileType::CharacterDevice, mode, number)
        .map_err(io::Error::from)
        // `mknod` applies the umask and the caller's group: set both before the node gets its name.
        .and_then(|()| fs_err::os::unix::fs::chown(&temporary, None, Some(info.gid)))
        .and_then(|()| fs_err::set_permissions(&temporary, Permissions::from_mode(info.mode)))
        .and_then(|()| fs_err::rename(&temporary, path));
    if done.is_err() {
        // The first failure is the one to report.
        let _ = fs_err::remove_file(&temporary);
    }
    done.map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot make {}: {error}", path.display()),
        )
    })
}
