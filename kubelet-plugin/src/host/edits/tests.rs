use divvy_host::HookProgram;
use divvy_host::fixture::{Fixture, FixtureGpu};

use super::*;

fn gpu() -> FixtureGpu {
    FixtureGpu {
        minor: 0,
        pci: "0000:3b:00.0".parse().unwrap(),
        numa_node: Some(0),
        pcie_root: "pci0000:00".into(),
    }
}

/// Claims that wait for a driver have its files listed once a second however many they are.
#[test]
fn waiting_claims_have_the_drivers_files_listed_once_a_second() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let at = DriverAt {
        seen: Some(dir.path().join("absent")),
        host: None,
    };
    let edits = HostEdits::new(made.host, at, made.nodes, LibraryDelivery::MountsOnly);
    edits.common().unwrap_err();
    let listed = |at: Instant| edits.failed.lock().unwrap().as_mut().unwrap().0 = at;
    // Just now, for as long as this test may take.
    let just_now = Instant::now() + Duration::from_mins(1);
    listed(just_now);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| drop(edits.common().unwrap_err()));
        }
    });
    assert_eq!(
        edits.failed.lock().unwrap().as_ref().unwrap().0,
        just_now,
        "listed again"
    );
    listed(Instant::now().checked_sub(LIST_AGAIN).unwrap());
    edits.common().unwrap_err();
    assert_ne!(edits.failed.lock().unwrap().as_ref().unwrap().0, just_now);
}

#[test]
fn uvm_is_loaded_once_and_only_under_a_loaded_driver() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let devices = dir.path().join("proc/devices");
    let with = fs_err::read_to_string(&devices).unwrap();
    let without = with.replace("511 nvidia-uvm\n", "");
    fs_err::write(&devices, &without).unwrap();
    let modprobe = dir.path().join("usr/sbin/modprobe");
    fs_err::create_dir_all(modprobe.parent().unwrap()).unwrap();
    let (loaded, calls) = (dir.path().join("loaded"), dir.path().join("calls"));
    fs_err::write(&loaded, &with).unwrap();
    let paths = [&calls, &loaded, &devices].map(|path| path.display().to_string());
    let script = format!(
        "#!/bin/sh\necho $1 >>{}\ncp {} {}\n",
        paths[0], paths[1], paths[2]
    );
    fs_err::write(&modprobe, script).unwrap();
    fs_err::set_permissions(&modprobe, std::fs::Permissions::from_mode(0o755)).unwrap();

    let none = DeviceNodes::Given(BTreeMap::new());
    let edits = HostEdits::new(
        made.host,
        DriverAt::default(),
        none,
        LibraryDelivery::MountsOnly,
    );
    let (module, away) = (
        dir.path().join("sys/module/nvidia"),
        dir.path().join("away"),
    );
    let proc = (
        dir.path().join("proc/driver/nvidia"),
        dir.path().join("proc-away"),
    );
    fs_err::rename(&module, &away).unwrap();
    fs_err::rename(&proc.0, &proc.1).unwrap();
    edits.control().unwrap();
    assert!(!calls.exists(), "the driver is not loaded");
    fs_err::rename(&away, &module).unwrap();
    fs_err::rename(&proc.1, &proc.0).unwrap();
    let uvm = |control: &ControlNodes| {
        control
            .nodes
            .iter()
            .any(|node| node.path == "/dev/nvidia-uvm")
    };
    assert!(uvm(&edits.control().unwrap()));
    fs_err::write(&devices, &without).unwrap();
    assert!(!uvm(&edits.control().unwrap()), "an admin has unloaded it");
    assert_eq!(fs_err::read_to_string(&calls).unwrap(), "nvidia-uvm\n");
    fs_err::rename(&module, &away).unwrap();
    fs_err::rename(&proc.0, &proc.1).unwrap();
    edits.control().unwrap();
    fs_err::rename(&away, &module).unwrap();
    fs_err::rename(&proc.1, &proc.0).unwrap();
    assert!(
        uvm(&edits.control().unwrap()),
        "the driver was loaded again"
    );
}

#[test]
fn a_hook_that_hangs_does_not_hang_the_container() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let delivery = LibraryDelivery::Hook(HookProgram {
        path: "/opt/divvy/divvy-cdi-hook".to_owned(),
        socket: "/run/divvy/hook.sock".to_owned(),
    });
    let edits = HostEdits::new(made.host, DriverAt::default(), made.nodes, delivery);
    let common = edits.common().unwrap();
    let timeouts: Vec<_> = common
        .edits()
        .hooks
        .iter()
        .map(|hook| hook.timeout)
        .collect();
    assert_eq!(timeouts, [30]);
}

#[test]
fn a_module_that_was_loaded_again_with_another_major_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    for node in [
        "nvidiactl",
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidia-modeset",
    ] {
        let path = dir.path().join("dev").join(node);
        fs_err::remove_file(&path).unwrap();
        // Every machine has it; tests may not make nodes.
        fs_err::os::unix::fs::symlink("/dev/null", path).unwrap();
    }
    let edits = HostEdits::new(
        made.host,
        DriverAt::default(),
        DeviceNodes::Real,
        LibraryDelivery::MountsOnly,
    );
    let major = || {
        let common = edits.common().unwrap();
        common
            .edits()
            .device_nodes
            .iter()
            .find(|n| n.path == "/dev/nvidia-uvm")
            .unwrap()
            .major
    };
    assert_eq!(major(), 511);
    let devices = dir.path().join("proc/devices");
    let later = fs_err::read_to_string(&devices)
        .unwrap()
        .replace("511 nvidia-uvm", "508 nvidia-uvm");
    fs_err::write(devices, later).unwrap();
    assert!(
        edits.refresh(false).unwrap(),
        "live CDI files are to be written again"
    );
    assert_eq!(major(), 508);
}

#[test]
fn the_driver_that_vanishes_and_comes_back_newer_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let mut fixture = Fixture {
        driver_root: "/run/nvidia/driver".into(),
        ..Fixture::new(vec![gpu()])
    };
    let made = fixture.build(dir.path()).unwrap();
    let at = DriverAt {
        seen: None,
        host: Some("/run/nvidia/driver".into()),
    };
    let edits = HostEdits::new(made.host, at, made.nodes, LibraryDelivery::MountsOnly);
    let common = edits.common().unwrap();
    assert!(
        common
            .edits()
            .env
            .contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned())
    );
    assert!(
        common
            .edits()
            .device_nodes
            .iter()
            .any(|n| n.path == "/dev/nvidiactl" && n.major == 195)
    );
    assert!(
        !edits.refresh(false).unwrap() && !edits.refresh(true).unwrap(),
        "nothing has changed"
    );

    let root = dir.path().join("run/nvidia/driver");
    fs_err::rename(&root, dir.path().join("away")).unwrap();
    let gone = edits.refresh(false).unwrap_err();
    assert!(crate::chain(&gone).starts_with("the NVIDIA driver's files were not found: no usable NVIDIA driver found: /run/nvidia/driver: the folder does not exist;"), "{}", crate::chain(&gone));
    let error = crate::chain(&edits.common().unwrap_err());

    fixture.driver_version = "590.10.01".into();
    fixture.build(dir.path()).unwrap();
    let again = crate::chain(&edits.common().unwrap_err());
    assert_eq!(again, error, "not looked for again within a second");
    edits.refresh(false).unwrap();
    assert!(
        edits
            .common()
            .unwrap()
            .edits()
            .mounts
            .iter()
            .any(|m| m.host_path.ends_with("libcuda.so.590.10.01"))
    );
}

/// Edits of a host with one GPU, and the folder of the driver's libraries.
fn upgrading(dir: &std::path::Path) -> (Fixture, HostEdits, PathBuf) {
    let fixture = Fixture::new(vec![gpu()]);
    let made = fixture.build(dir).unwrap();
    let edits = HostEdits::new(
        made.host,
        DriverAt::default(),
        made.nodes,
        LibraryDelivery::MountsOnly,
    );
    (fixture, edits, dir.join("usr/lib/x86_64-linux-gnu"))
}

/// The files that a claim would have mounted which is prepared now; `None` if it cannot be.
fn missing(edits: &HostEdits, dir: &std::path::Path) -> Option<Vec<String>> {
    let common = edits.common().ok()?;
    let mounts = common.edits().mounts.iter().map(|m| m.host_path.clone());
    let is_gone = |path: &String| !dir.join(path.trim_start_matches('/')).exists();
    Some(mounts.filter(is_gone).collect())
}

#[test]
fn files_of_a_gone_driver_are_not_given_while_the_next_is_partial() {
    let dir = tempfile::tempdir().unwrap();
    let (mut fixture, edits, lib) = upgrading(dir.path());
    edits.common().unwrap();
    fs_err::remove_dir_all(&lib).unwrap();
    fixture.driver_version = "590.10.01".into();
    fixture.build(dir.path()).unwrap();
    // Cut off: still being written.
    let unfinished = lib.join("libnvidia-nvvm.so.590.10.01");
    let whole = fs_err::read(&unfinished).unwrap();
    fs_err::write(&unfinished, &whole[..200]).unwrap();
    let error = crate::chain(&edits.refresh(false).unwrap_err());
    assert!(error.contains("may still be installing"), "{error}");
    assert_eq!(missing(&edits, dir.path()), None);
    assert!(edits.check().is_err());
    // It is complete.
    fs_err::write(&unfinished, &whole).unwrap();
    edits.refresh(false).unwrap();
    assert_eq!(missing(&edits, dir.path()), Some(Vec::new()));
}

#[test]
fn files_that_vanish_between_two_looks_at_the_driver_are_not_given() {
    let dir = tempfile::tempdir().unwrap();
    let (_fixture, edits, lib) = upgrading(dir.path());
    edits.common().unwrap();
    // A single one of many: the driver is still found.
    let name = fs_err::read_dir(&lib)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains("libnvidia-nvvm.so."));
    fs_err::remove_file(name.unwrap()).unwrap();
    assert_eq!(missing(&edits, dir.path()), Some(Vec::new()));
    // All.
    fs_err::remove_dir_all(&lib).unwrap();
    assert_eq!(missing(&edits, dir.path()), None);
}

#[test]
fn control_nodes_that_cannot_be_found_leave_no_files_either() {
    let dir = tempfile::tempdir().unwrap();
    let (_fixture, edits, _) = upgrading(dir.path());
    edits.common().unwrap();
    // A folder cannot be read as a file.
    let devices = dir.path().join("proc/devices");
    fs_err::remove_file(&devices).unwrap();
    fs_err::create_dir(&devices).unwrap();
    edits.refresh(false).unwrap_err();
    assert_eq!(missing(&edits, dir.path()), None);
}

#[test]
fn a_node_that_is_asked_for_several_times_is_given_once() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let DeviceNodes::Given(mut table) = made.nodes else {
        panic!()
    };
    for minor in 0..2 {
        let node = divvy_host::NodeInfo {
            major: 500,
            minor,
            mode: 0o666,
            gid: 0,
        };
        table.insert(format!("/dev/nvidia-fs{minor}"), node);
    }
    let edits = HostEdits::new(
        made.host,
        DriverAt::default(),
        DeviceNodes::Given(table),
        LibraryDelivery::MountsOnly,
    );
    let nodes = |wanted: &[&str]| -> Vec<String> {
        let wanted: Vec<String> = wanted.iter().map(|path| (*path).to_owned()).collect();
        let found = edits.extra_nodes(&wanted).unwrap();
        found.into_iter().map(|node| node.path).collect()
    };
    let both = ["/dev/nvidia-fs0", "/dev/nvidia-fs1"];
    assert_eq!(nodes(&["/dev/nvidia-fs0", "/dev/nvidia-fs*"]), both);
    assert_eq!(nodes(&["/dev/nvidia-fs*", "/dev/nvidia-fs1"]), both);
    assert_eq!(nodes(&["/dev/nvidia-fs0", "/dev/nvidia-fs0"]), both[..1]);
    assert_eq!(nodes(&["/dev/nvidia-f*", "/dev/nvidia-fs*"]), both);
}

#[test]
fn the_nodes_of_a_gpu_are_looked_for_again_after_each_look_at_the_driver() {
    let sim = divvy_gpu_sim::SimNode::parse("h100").unwrap();
    let gpus = sim.inventory().gpus;
    let gpu_read = gpus.values().next().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let none = DeviceNodes::Given(BTreeMap::new());
    let edits = HostEdits::new(
        made.host,
        DriverAt::default(),
        none,
        LibraryDelivery::MountsOnly,
    );
    let major = || edits.nodes_of(gpu_read, 0).unwrap().main.info.major;
    assert_eq!(major(), 195);
    let devices = dir.path().join("proc/devices");
    let before = fs_err::read_to_string(&devices).unwrap();
    fs_err::write(&devices, before.replace("195 nvidia", "196 nvidia")).unwrap();
    assert_eq!(major(), 195, "known");
    edits.refresh(false).unwrap();
    assert_eq!(major(), 196);
}
