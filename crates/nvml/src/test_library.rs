//! The mock library for one test: a copy of its own (a loaded file has one set of statics), with
//! its state beside it.

use std::path::{Path, PathBuf};

use divvy_model::{GpuErrorCode, GpuUuid};
use nvidia_ml::{Generation, MockState, without_symbols};
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

    /// The library of a driver: without what that lacks, and answering as that does.
    pub(crate) fn of(driver: Generation, gpus: &str) -> Self {
        let library = Self::without(gpus, &driver.lacks());
        library
            .state
            .edit(|e| e.set_driver_version(driver.version, driver.cuda))
            .unwrap();
        library
    }

    /// A library that lacks some symbols, as an older driver's does.
    pub(crate) fn without(gpus: &str, symbols: &[&str]) -> Self {
        Self::changed(gpus, |bytes| {
            assert_eq!(
                without_symbols(bytes, symbols),
                [""; 0],
                "not in the library"
            );
        })
    }

    /// A library whose functions of these names do nothing and answer with a code.
    pub(crate) fn answering(gpus: &str, functions: &[&str], code: GpuErrorCode) -> Self {
        Self::changed(gpus, |bytes| {
            for function in functions {
                let at = place_of(function);
                let answer = answer(code.0);
                bytes[at..at + answer.len()].copy_from_slice(&answer);
            }
        })
    }

    fn changed(gpus: &str, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = fs_err::read(built()).unwrap();
        change(&mut bytes);
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
        self.state
            .read()
            .unwrap()
            .gpus()
            .iter()
            .map(|g| g.facts.uuid.clone())
            .collect()
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

fn built() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .parent()
        .unwrap()
        .join("libnvidia_ml.so")
}

/// Where a function's code is in the file.
fn place_of(function: &str) -> usize {
    // SAFETY: loading runs no code of ours beyond the standard library's.
    let library = unsafe { libloading::Library::new(built()) }.unwrap();
    // SAFETY: the symbol is looked up, not called.
    let address = unsafe { *library.get::<extern "C" fn()>(function).unwrap() } as usize;
    let maps = fs_err::read_to_string("/proc/self/maps").unwrap();
    let hex = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let offset = |line: &str| {
        let mut fields = line.split_whitespace();
        let (from, to) = fields.next()?.split_once('-')?;
        (hex(from)..hex(to))
            .contains(&address)
            .then(|| address - hex(from) + hex(fields.nth(1).unwrap()))
    };
    maps.lines().find_map(offset).unwrap()
}

/// A function that returns a number.
fn answer(number: u32) -> Vec<u8> {
    if cfg!(target_arch = "aarch64") {
        // mov w0, #number (16 bits); ret
        let mov = 0x5280_0000 | (number & 0xffff) << 5;
        [mov.to_le_bytes(), 0xd65f_03c0_u32.to_le_bytes()].concat()
    } else {
        // mov eax, number; ret
        [&[0xb8], &number.to_le_bytes()[..], &[0xc3]].concat()
    }
}
