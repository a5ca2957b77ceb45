//! The mock library for one test: a copy of its own (a loaded file has one set of statics), with its state beside it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use divvy_model::GpuUuid;
use nvidia_ml::MockState;
use tempfile::TempDir;

use crate::NvmlDriver;

pub(crate) struct TestLibrary {
    dir: TempDir,
    pub(crate) state: MockState,
}

impl TestLibrary {
    pub(crate) fn new(gpus: &str) -> Self {
        Self::without(gpus, &[])
    }

    /// A library that lacks some symbols, as an older driver's does.
    pub(crate) fn without(gpus: &str, symbols: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let built = std::env::current_exe().unwrap().parent().unwrap().join("libnvidia_ml.so");
        let mut bytes = fs_err::read(built).unwrap();
        if !symbols.is_empty() {
            rename_symbols(&mut bytes, symbols);
        }
        let path = path_in(dir.path());
        fs_err::write(&path, bytes).unwrap();
        let state = MockState::open_or_create(state_of(&path), &gpus.parse().unwrap()).unwrap();
        Self { dir, state }
    }

    pub(crate) fn path(&self) -> PathBuf {
        path_in(self.dir.path())
    }

    pub(crate) fn open(&self) -> NvmlDriver {
        NvmlDriver::open(Some(&self.path())).unwrap()
    }

    pub(crate) fn uuids(&self) -> Vec<GpuUuid> {
        self.state.read().unwrap().gpus().iter().map(|g| g.facts.uuid.clone()).collect()
    }
}

fn path_in(dir: &Path) -> PathBuf {
    dir.join("libnvidia-ml.so.1")
}

fn state_of(library: &Path) -> PathBuf {
    let mut path = library.as_os_str().to_owned();
    path.push(".json");
    path.into()
}

/// Overwrites the first letter of names in the symbol table: the loader then finds nothing under the old ones.
fn rename_symbols(bytes: &mut [u8], symbols: &[&str]) {
    let mut left: BTreeSet<&str> = symbols.iter().copied().collect();
    for at in 1..bytes.len().saturating_sub(4) {
        if bytes[at - 1] != 0 || !bytes[at..].starts_with(b"nvml") {
            continue;
        }
        let end = bytes[at..].iter().position(|b| *b == 0).unwrap_or(0);
        let name = String::from_utf8_lossy(&bytes[at..at + end]).into_owned();
        if symbols.contains(&name.as_str()) {
            left.remove(name.as_str());
            bytes[at] = b'x';
        }
    }
    assert!(left.is_empty(), "{left:?} are not in the library");
}
