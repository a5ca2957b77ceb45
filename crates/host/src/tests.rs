//! All on hosts made by [`fixture`], or on folders written by hand where a platform differs from
//! it.

mod driver_roots;
mod edits;
mod files;
mod kernel;
mod mig;

use std::path::Path;

use divvy_model::PciAddress;

use crate::fixture::{Fixture, FixtureGpu, FixtureHost};

fn pci(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn two_gpus() -> Fixture {
    let gpu = |minor, address, numa_node, root: &str| FixtureGpu {
        minor,
        pci: pci(address),
        numa_node,
        pcie_root: root.to_owned(),
    };
    Fixture::new(vec![
        gpu(0, "0000:07:00.0", Some(0), "pci0000:00"),
        gpu(3, "0000:87:00.0", None, "pci0000:80"),
    ])
}

/// The host and the folder it lives in, which is removed when dropped.
fn host(fixture: &Fixture) -> (FixtureHost, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    (fixture.build(dir.path()).unwrap(), dir)
}

fn write(root: &Path, path: &str, bytes: &[u8]) {
    let path = root.join(path.trim_start_matches('/'));
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::write(path, bytes).unwrap();
}

fn link(root: &Path, path: &str, target: &str) {
    let path = root.join(path.trim_start_matches('/'));
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    fs_err::os::unix::fs::symlink(target, path).unwrap();
}

/// An error with all its causes, as a log shows it.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}
