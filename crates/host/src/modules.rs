//! Loading a kernel module, as the host would.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::driver::DriverRoot;
use crate::root::HostRoot;
use crate::smi::{Smi, start_program, wait};

/// A big module on a slow disk.
const WITHIN: Duration = Duration::from_secs(10);
const FOLDERS: [&str; 4] = ["sbin", "usr/sbin", "bin", "usr/bin"];

/// Loads a module with the host's `modprobe`, which knows where the host keeps modules and with
/// which options.
pub fn load_module(host: &HostRoot, module: &str) -> io::Result<()> {
    let seen = host.see(Path::new("/"));
    let root = DriverRoot::new(&seen, "/");
    let mut found = None;
    for folder in FOLDERS {
        // Its links are followed only to see whether it is there: by the name it is called by it
        // knows what it is to be.
        if found.is_none() && root.find(&[folder], "modprobe")?.is_some() {
            found = Some(Path::new(folder).join("modprobe"));
        }
    }
    let program =
        found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the host has no modprobe"))?;
    let mut command = Smi::new().inside(&seen, &program, None);
    command
        .arg(module)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = start_program(&mut command, WITHIN)?;
    match wait(&mut child, WITHIN)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(io::Error::other(format!(
            "modprobe {module} ended with {status}"
        ))),
        None => Err(io::Error::other(format!(
            "modprobe {module} has not ended within {WITHIN:?}"
        ))),
    }
}
