//! A shell script stands for nvidia-smi.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

use super::*;
use crate::fixture::{Fixture, FixtureGpu};
use crate::{DriverRoot, find_driver_at};

const LONG_ENOUGH: Duration = Duration::from_secs(20);

fn gpu() -> GpuUuid {
    "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap()
}

/// A driver whose nvidia-smi does this.
fn driver(dir: &Path, script: &str) -> Driver {
    let gpus = vec![FixtureGpu {
        minor: 0,
        pci: "0000:3b:00.0".parse().unwrap(),
        numa_node: Some(0),
        pcie_root: "pci0000:00".into(),
    }];
    let made = Fixture::new(gpus).build(dir).unwrap();
    let program = dir.join("usr/bin/nvidia-smi");
    fs_err::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs_err::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    find_driver_at(&made.host, DriverRoot::new(dir, "/")).unwrap()
}

#[test]
fn it_is_run_with_the_gpus_uuid_and_the_drivers_libraries() {
    let dir = tempfile::tempdir().unwrap();
    let said = dir.path().join("said");
    let driver = driver(dir.path(), &format!("echo \"$*; $LD_LIBRARY_PATH\" >> {}", said.display()));
    let smi = Smi::default();
    smi.set_time_slice(&driver, &gpu(), TimeSlice::Long, LONG_ENOUGH).unwrap();
    let libraries = dir.path().join("usr/lib/x86_64-linux-gnu");
    let text = fs_err::read_to_string(&said).unwrap();
    let (args, path) = text.trim().split_once("; ").unwrap();
    assert_eq!(args, format!("compute-policy -i {} --set-timeslice 3", gpu()));
    assert_eq!(std::env::split_paths(path).next().unwrap(), libraries);
}

#[test]
fn its_table_is_read_however_it_is_drawn() {
    let table = "+------------------+\n| GPU compute policies: |\n|   0   Timeslice     Medium |\n+---+\n";
    assert_eq!(read_list(table), Some(TimeSlice::Medium));
    assert_eq!(read_list("GPU 0\n    Timeslice: default\n"), Some(TimeSlice::Default));
    assert_eq!(read_list("Timeslice 7 ms"), None);
    assert_eq!(read_list(""), None);
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "echo '| 0  Timeslice  Short |'");
    let found = Smi::default().time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap();
    assert_eq!(found, Some(TimeSlice::Short));
}

#[test]
fn the_fixtures_own_program_keeps_what_was_set() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(Vec::new()).build(dir.path()).unwrap();
    let driver = find_driver_at(&made.host, made.driver_root.clone()).unwrap();
    let smi = Smi::default();
    assert_eq!(smi.time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap(), Some(TimeSlice::Default));
    smi.set_time_slice(&driver, &gpu(), TimeSlice::Medium, LONG_ENOUGH).unwrap();
    assert_eq!(smi.time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap(), Some(TimeSlice::Medium));
    assert_eq!(made.time_slice(&gpu()), TimeSlice::Medium);
}

#[test]
fn exit_codes_say_whether_anything_may_have_happened() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |code: u32| {
        let driver = driver(dir.path(), &format!("echo 'code {code}' >&2; exit {code}"));
        let error =
            Smi::default().set_time_slice(&driver, &gpu(), TimeSlice::Short, LONG_ENOUGH).unwrap_err();
        (error.is_unclear(), error.to_string())
    };
    assert_eq!(refused(3), (false, "nvidia-smi reports that this is not supported: code 3".to_owned()));
    assert_eq!(
        refused(4),
        (false, "nvidia-smi refused (no permission: the plugin must run as root): code 4".to_owned())
    );
    assert_eq!(refused(9), (false, "nvidia-smi reports that no NVIDIA driver is loaded: code 9".to_owned()));
    assert_eq!(refused(255), (true, "nvidia-smi ended with exit status: 255: code 255".to_owned()));
    let killed = driver(dir.path(), "kill -9 $$");
    let error = Smi::default().set_time_slice(&killed, &gpu(), TimeSlice::Short, LONG_ENOUGH).unwrap_err();
    assert!(matches!(error, SmiError::Unclear { status, .. } if status.signal() == Some(9)), "{error}");
}

#[test]
fn one_that_hangs_is_killed_at_the_deadline_and_may_have_done_it() {
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "exec sleep 600");
    let smi = Smi::default();
    let begun = Instant::now();
    let error =
        smi.set_time_slice(&driver, &gpu(), TimeSlice::Short, Duration::from_millis(500)).unwrap_err();
    assert!(matches!(error, SmiError::TimedOut(_)) && error.is_unclear(), "{error}");
    assert!(begun.elapsed() < LONG_ENOUGH);
    smi.none_hangs().unwrap();
}

#[test]
fn without_the_program_the_driver_root_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = driver(dir.path(), "");
    driver.nvidia_smi = None;
    let error = Smi::default().set_time_slice(&driver, &gpu(), TimeSlice::Short, LONG_ENOUGH).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the driver root / has no nvidia-smi, which sets time slices (install the driver's utilities)"
    );
}

#[test]
fn a_whole_root_is_entered_and_one_with_the_drivers_files_only_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "");
    let smi = Smi { helper: Some("/usr/bin/divvy".into()), ..Smi::default() };
    let command = |smi: &Smi| {
        let command = smi.command(&driver).unwrap();
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect();
        (command.get_program().to_owned(), args)
    };
    let program = dir.path().join("usr/bin/nvidia-smi");
    let as_it_is = ["run-as-other", "/", &program.to_string_lossy()].map(str::to_owned);
    assert_eq!(command(&smi), ("/usr/bin/divvy".into(), as_it_is.to_vec()));
    for folder in ["lib64", "lib/glibc"] {
        fs_err::create_dir_all(dir.path().join(folder)).unwrap();
    }
    // An absolute link, as some distributions have: it leads somewhere in that root only.
    fs_err::write(dir.path().join("lib/glibc/ld.so"), "").unwrap();
    fs_err::os::unix::fs::symlink("/lib/glibc/ld.so", dir.path().join("lib64/ld-linux-x86-64.so.2")).unwrap();
    let inside = ["run-as-other", &dir.path().to_string_lossy(), "/usr/bin/nvidia-smi"].map(str::to_owned);
    assert_eq!(command(&smi), ("/usr/bin/divvy".into(), inside.to_vec()));
    assert_eq!(command(&Smi::default()), (program.into(), vec![]), "nothing to enter");
    assert_eq!(become_other(["divvy", "--help"].map(OsString::from)), None);
}
