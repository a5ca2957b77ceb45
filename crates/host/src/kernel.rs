//! Facts from the kernel: boot id, majors, the NVIDIA module.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::PathBuf;

use crate::root::HostRoot;

/// A file of proc or sysfs that is not as expected.
#[derive(Debug, thiserror::Error)]
pub enum HostFileError {
    /// It cannot be read. In a container this most often means that the host's tree is not mounted
    /// where it is looked for.
    #[error("cannot read {what} of the host; check the pod's mounts of the host's /proc and /sys")]
    Read {
        /// The fact that was to be known.
        what: &'static str,
        /// The failed operation, with its path.
        #[source]
        source: io::Error,
    },
    /// It holds something else.
    #[error("{}: {what} is not of the expected form: {text:?}", path.display())]
    Malformed {
        /// The fact that was to be known.
        what: &'static str,
        path: PathBuf,
        /// Its content.
        text: String,
    },
    /// The PCI device is not there.
    #[error("PCI device {pci} is not in sysfs ({} does not exist)", path.display())]
    NoPciDevice {
        pci: String,
        /// Where it should be.
        path: PathBuf,
    },
}

/// The id of this boot: state of the hardware that was recorded under another id is void.
pub fn boot_id(host: &HostRoot) -> Result<String, HostFileError> {
    const WHAT: &str = "the boot id";
    let path = host.proc("sys/kernel/random/boot_id");
    let text = read(&path, WHAT)?;
    let id = text.trim();
    if id.is_empty() {
        Err(HostFileError::Malformed {
            what: WHAT,
            path,
            text,
        })
    } else {
        Ok(id.to_owned())
    }
}

/// Majors of character devices by driver name, from `/proc/devices`.
pub fn char_majors(host: &HostRoot) -> Result<BTreeMap<String, u32>, HostFileError> {
    let text = read(&host.proc("devices"), "the majors of character devices")?;
    // The file lists character devices first and block devices after them, under headings that end
    // in a colon.
    let section = text
        .lines()
        .skip_while(|line| line.trim() != "Character devices:")
        .skip(1)
        .take_while(|line| !line.trim_end().ends_with(':'));
    Ok(section
        .filter_map(|line| {
            let (major, name) = line.trim().split_once(' ')?;
            Some((name.trim().to_owned(), major.parse().ok()?))
        })
        .collect())
}

/// The loaded NVIDIA kernel module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvidiaModule {
    /// Its version, such as `580.95.05`. User-space libraries of another version do not work with
    /// it.
    pub version: Option<String>,
}

/// The NVIDIA kernel module, if it is loaded.
pub fn nvidia_module(host: &HostRoot) -> Result<Option<NvidiaModule>, HostFileError> {
    const WHAT: &str = "the version of the nvidia kernel module";
    let from_sysfs =
        read_if_there(&host.sys("module/nvidia/version"), WHAT)?.map(|text| text.trim().to_owned());
    if let Some(version) = from_sysfs.filter(|v| !v.is_empty()) {
        return Ok(Some(NvidiaModule {
            version: Some(version),
        }));
    }
    // Older or patched modules have no version in sysfs.
    if let Some(text) = read_if_there(&host.proc("driver/nvidia/version"), WHAT)? {
        return Ok(Some(NvidiaModule {
            version: version_in(&text),
        }));
    }
    // A module that is loaded and reports no version still counts: devices can be used.
    let loaded = host.sys("module/nvidia").is_dir();
    Ok(loaded.then_some(NvidiaModule { version: None }))
}

/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build …`: the first
/// word that is a version.
fn version_in(text: &str) -> Option<String> {
    text.lines()
        .next()?
        .split_whitespace()
        .find(|word| is_driver_version(word))
        .map(str::to_owned)
}

/// Two or three numbers with dots between.
pub(crate) fn is_driver_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    (2..=3).contains(&parts.len())
        && parts
            .iter()
            .all(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
}

/// The module's parameters, from `/proc/driver/nvidia/params`; empty if there is no such file.
pub fn nvidia_params(host: &HostRoot) -> Result<BTreeMap<String, String>, HostFileError> {
    let text = read_if_there(
        &host.proc("driver/nvidia/params"),
        "the parameters of the nvidia kernel module",
    )?;
    let text = text.unwrap_or_default();
    Ok(text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| {
            (
                name.trim().to_owned(),
                value.trim().trim_matches('"').to_owned(),
            )
        })
        .collect())
}

pub(crate) fn read(path: &std::path::Path, what: &'static str) -> Result<String, HostFileError> {
    fs_err::read_to_string(path).map_err(|source| HostFileError::Read { what, source })
}

pub(crate) fn read_if_there(
    path: &std::path::Path,
    what: &'static str,
) -> Result<Option<String>, HostFileError> {
    match fs_err::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(HostFileError::Read { what, source }),
    }
}
