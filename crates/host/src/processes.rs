//! Who has a device open.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::kernel::HostFileError;
use crate::root::HostRoot;

/// A process that has a device file open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// Process id, in the namespace of the `/proc` that was read.
    pub pid: u32,
    /// The command's short name.
    pub command: String,
    /// The device file, such as `/dev/nvidia0`.
    pub device: String,
}

/// All holders found, and how far the search got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders {
    /// Sorted; a process is listed once per device.
    pub found: Vec<Holder>,
    /// Processes whose open files may not be read: if there are any, an empty list proves nothing.
    pub unreadable: Vec<u32>,
}

/// Who has one of `devices` (such as `/dev/nvidia0`) open, this process included.
///
/// Links are compared by name: in every container that got a GPU its node has the same name as on the host. Monitoring
/// daemons and an NVML session of our own hold GPUs too; the caller knows whom to leave out.
pub fn device_holders(host: &HostRoot, devices: &BTreeSet<String>) -> Result<Holders, HostFileError> {
    const WHAT: &str = "the list of processes";
    let mut holders = Holders::default();
    let entries =
        fs_err::read_dir(host.proc("")).map_err(|source| HostFileError::Read { what: WHAT, source })?;
    for entry in entries {
        let entry = entry.map_err(|source| HostFileError::Read { what: WHAT, source })?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        match open_devices(&entry.path(), devices) {
            Ok(open) if open.is_empty() => {}
            Ok(open) => {
                let command = command(&entry.path());
                holders.found.extend(open.into_iter().map(|device| Holder {
                    pid,
                    command: command.clone(),
                    device,
                }));
            }
            // It ended while we looked.
            Err(error) if gone(&error) => {}
            Err(_) => holders.unreadable.push(pid),
        }
    }
    holders.found.sort();
    holders.unreadable.sort_unstable();
    Ok(holders)
}

fn open_devices(process: &Path, devices: &BTreeSet<String>) -> io::Result<BTreeSet<String>> {
    let mut open = BTreeSet::new();
    for fd in fs_err::read_dir(process.join("fd"))? {
        let target = match fs_err::read_link(fd?.path()) {
            Ok(target) => target,
            Err(error) if gone(&error) => continue,
            Err(error) => return Err(error),
        };
        if let Some(device) = target.to_str().and_then(|target| devices.get(target)) {
            open.insert(device.clone());
        }
    }
    Ok(open)
}

fn command(process: &Path) -> String {
    let text = fs_err::read_to_string(process.join("comm")).unwrap_or_default();
    let name = text.trim();
    if name.is_empty() { "?".to_owned() } else { name.to_owned() }
}

fn gone(error: &io::Error) -> bool {
    const ESRCH: i32 = 3;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH)
}
