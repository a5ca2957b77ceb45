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
    let driver = driver(
        dir.path(),
        &format!("echo \"$*; $LD_LIBRARY_PATH\" >> {}", said.display()),
    );
    let smi = Smi::default();
    smi.set_time_slice(&driver, &gpu(), TimeSlice::Long, LONG_ENOUGH)
        .unwrap();
    let libraries = dir.path().join("usr/lib/x86_64-linux-gnu");
    let text = fs_err::read_to_string(&said).unwrap();
    let (args, path) = text.trim().split_once("; ").unwrap();
    assert_eq!(
        args,
        format!("compute-policy -i {} --set-timeslice 3", gpu())
    );
    assert_eq!(std::env::split_paths(path).next().unwrap(), libraries);
}

#[test]
fn its_table_is_read_however_it_is_drawn() {
    let table =
        "+------------------+\n| GPU compute policies: |\n|   0   Timeslice     Medium |\n+---+\n";
    assert_eq!(read_list(table), Some(TimeSlice::Medium));
    assert_eq!(
        read_list("GPU 0\n    Timeslice: default\n"),
        Some(TimeSlice::Default)
    );
    assert_eq!(read_list("Timeslice 7 ms"), None);
    assert_eq!(read_list(""), None);
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "echo '| 0  Timeslice  Short |'");
    let found = Smi::default()
        .time_slice(&driver, &gpu(), LONG_ENOUGH)
        .unwrap();
    assert_eq!(found, Some(TimeSlice::Short));
}

#[test]
fn the_fixtures_own_program_keeps_what_was_set() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(Vec::new()).build(dir.path()).unwrap();
    let driver = find_driver_at(&made.host, made.driver_root.clone()).unwrap();
    let smi = Smi::default();
    assert_eq!(
        smi.time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap(),
        Some(TimeSlice::Default)
    );
    smi.set_time_slice(&driver, &gpu(), TimeSlice::Medium, LONG_ENOUGH)
        .unwrap();
    assert_eq!(
        smi.time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap(),
        Some(TimeSlice::Medium)
    );
    assert_eq!(made.time_slice(&gpu()), TimeSlice::Medium);
}

#[test]
fn exit_codes_say_whether_anything_may_have_happened() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |code: u32| {
        let driver = driver(dir.path(), &format!("echo 'code {code}' >&2; exit {code}"));
        let error = Smi::default()
            .set_time_slice(&driver, &gpu(), TimeSlice::Short, LONG_ENOUGH)
            .unwrap_err();
        (error.is_unclear(), error.to_string())
    };
    assert_eq!(
        refused(3),
        (
            false,
            "nvidia-smi reports that this is not supported: code 3".to_owned()
        )
    );
    assert_eq!(
        refused(13),
        (
            false,
            "nvidia-smi reports that this is not supported: code 13".to_owned()
        )
    );
    assert_eq!(
        refused(4),
        (
            false,
            "nvidia-smi refused (no permission: the plugin must run as root): code 4".to_owned()
        )
    );
    assert_eq!(
        refused(9),
        (
            false,
            "nvidia-smi reports that no NVIDIA driver is loaded: code 9".to_owned()
        )
    );
    assert_eq!(
        refused(255),
        (
            true,
            "nvidia-smi ended with exit status: 255: code 255".to_owned()
        )
    );
    let killed = driver(dir.path(), "kill -9 $$");
    let error = Smi::default()
        .set_time_slice(&killed, &gpu(), TimeSlice::Short, LONG_ENOUGH)
        .unwrap_err();
    assert!(
        matches!(error, SmiError::Unclear { status, .. } if status.signal() == Some(9)),
        "{error}"
    );
}

#[test]
fn one_that_hangs_is_killed_at_the_deadline_and_may_have_done_it() {
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "exec sleep 600");
    let smi = Smi::default();
    let begun = Instant::now();
    let error = smi
        .set_time_slice(
            &driver,
            &gpu(),
            TimeSlice::Short,
            Duration::from_millis(500),
        )
        .unwrap_err();
    assert!(
        matches!(error, SmiError::TimedOut(_)) && error.is_unclear(),
        "{error}"
    );
    assert!(begun.elapsed() < LONG_ENOUGH);
    smi.none_hangs().unwrap();
}

#[test]
fn without_the_program_the_driver_root_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut driver = driver(dir.path(), "");
    driver.nvidia_smi = None;
    let error = Smi::default()
        .set_time_slice(&driver, &gpu(), TimeSlice::Short, LONG_ENOUGH)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the driver root / has no nvidia-smi, which sets time slices (install the driver's utilities)"
    );
}

#[test]
fn a_whole_root_is_entered_and_one_with_the_drivers_files_only_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "");
    let smi = Smi {
        helper: Some("/usr/bin/divvy".into()),
        ..Smi::default()
    };
    let command = |smi: &Smi| {
        let command = smi.command(&driver).unwrap();
        let args: Vec<_> = command
            .get_args()
            .map(|arg| arg.to_string_lossy().into_owned())
            .collect();
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
    fs_err::os::unix::fs::symlink(
        "/lib/glibc/ld.so",
        dir.path().join("lib64/ld-linux-x86-64.so.2"),
    )
    .unwrap();
    let inside = [
        "run-as-other",
        &dir.path().to_string_lossy(),
        "/usr/bin/nvidia-smi",
    ]
    .map(str::to_owned);
    assert_eq!(command(&smi), ("/usr/bin/divvy".into(), inside.to_vec()));
    assert_eq!(
        command(&Smi::default()),
        (program.into(), vec![]),
        "nothing to enter"
    );
    assert_eq!(become_other(["divvy", "--help"].map(OsString::from)), None);
}

/// More than a pipe holds would keep it from ending.
#[test]
fn one_that_says_much_is_read_while_it_runs_and_its_beginning_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let much = "head -c 300000 /dev/zero | tr '\\0' 'x'";
    let script = format!("echo '| 0 Timeslice Long |'; {much}; {much} >&2; exit $code");
    let smi = Smi::default();
    let said = |code: u32| {
        let script = format!("code={code}\n{script}");
        let driver = driver(dir.path(), &script);
        smi.time_slice(&driver, &gpu(), LONG_ENOUGH)
    };
    assert_eq!(said(0).unwrap(), Some(TimeSlice::Long));
    let SmiError::Unclear { text, .. } = said(255).unwrap_err() else {
        panic!("it failed in an unknown way")
    };
    assert_eq!(text.len(), 2 * MOST_TEXT, "of each pipe");
}

/// The holder of the pipes is not waited for: it may be a daemon that was started.
#[test]
fn one_that_leaves_a_process_behind_is_over_when_it_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    // The process that is left holds the pipes until this test ends.
    let fifo = dir.path().join("never-written");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let script = format!(
        "read x <> {} &\necho '| 0 Timeslice Short |'",
        fifo.display()
    );
    let driver = driver(dir.path(), &script);
    let said = Smi::default().time_slice(&driver, &gpu(), LONG_ENOUGH);
    fs_err::write(&fifo, "end\n").unwrap();
    assert_eq!(said.unwrap(), Some(TimeSlice::Short));
}

#[test]
fn nothing_is_started_beside_one_that_could_not_be_killed() {
    let dir = tempfile::tempdir().unwrap();
    let driver = driver(dir.path(), "echo '| 0 Timeslice Short |'");
    let smi = Smi::default();
    let hangs = Command::new("sleep").arg("600").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&hangs);
    smi.hanging.lock().unwrap().push(hangs);
    let error = smi.time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap_err();
    assert!(matches!(error, SmiError::Hangs), "{error}");
    assert!(!error.is_unclear(), "this one has not begun");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let mut left = smi.hanging.lock().unwrap().remove(0);
    left.wait().unwrap();
    smi.hanging.lock().unwrap().push(left);
    let said = smi.time_slice(&driver, &gpu(), LONG_ENOUGH).unwrap();
    assert_eq!(said, Some(TimeSlice::Short));
}

/// Names the program that [`helper`] becomes.
const BECOMES: &str = "DIVVY_TEST_BECOMES";

/// No test of its own: the main of a helper, in a process of its own.
#[test]
fn helper() {
    if let Some(script) = std::env::var_os(BECOMES) {
        let args = ["divvy", AS_OTHER, "/", "/bin/sh", "-c"].map(OsString::from);
        let code = become_other(args.into_iter().chain([script]));
        panic!("it did not become another: {code:?}");
    }
}

#[test]
fn a_program_dies_with_the_process_that_started_it() {
    use std::io::{BufRead, BufReader};
    // The process in between stands for the plugin. Its child waits for a line on its own standard
    // input, which is this test's.
    let mut plugin = Command::new("/bin/sh")
        .args(["-c", "exec 3<&0; \"$@\" <&3 & wait", "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "smi::tests::helper", "--nocapture"])
        .env(BECOMES, "echo ready; read line; echo outlived")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(plugin.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.unwrap().ends_with("ready")));
    let stdin = plugin.stdin.take();
    plugin.kill().unwrap();
    plugin.wait().unwrap();
    // A child that lives would read the end of its input now, and say so.
    drop(stdin);
    let rest: Vec<String> = said.map(Result::unwrap).collect();
    assert_eq!(rest, [""; 0]);
}

/// Debian has the control program in `/usr/bin` and the server, which that starts by its name, in
/// `/usr/sbin`.
#[test]
fn a_program_finds_the_mps_server_wherever_the_driver_has_it() {
    for (folder, is_first) in [
        ("usr/sbin", true),
        ("sbin", true),
        ("usr/local/nvidia/bin", true),
        ("opt/vendor", false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let driver = driver(dir.path(), "");
        let put = |path: &str, script: &str| {
            let path = dir.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            fs_err::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        put(&format!("{folder}/nvidia-cuda-mps-server"), "echo started");
        put("usr/bin/nvidia-cuda-mps-control", "nvidia-cuda-mps-server");
        let control = Path::new("usr/bin/nvidia-cuda-mps-control");
        let mut command = Smi::default().program(&driver, control, None);
        let path = command.get_envs().find(|(name, _)| *name == "PATH");
        let path = path.unwrap().1.unwrap().to_owned();
        let first = std::env::split_paths(&path).next().unwrap();
        let expected = if is_first { folder } else { "usr/bin" };
        assert_eq!(first, dir.path().join(expected));
        let said = command.output().unwrap();
        let started = String::from_utf8_lossy(&said.stdout).trim() == "started";
        assert_eq!(started, is_first, "{folder}: {path:?}");
        assert!(std::env::split_paths(&path).any(|dir| dir.ends_with("usr/sbin")));
    }
}
