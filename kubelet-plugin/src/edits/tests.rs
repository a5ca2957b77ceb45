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

#[test]
fn claims_that_wait_for_a_driver_have_its_files_listed_once_a_second_however_many_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let at = DriverAt { seen: Some(dir.path().join("absent")), host: None };
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
    assert_eq!(edits.failed.lock().unwrap().as_ref().unwrap().0, just_now, "listed again");
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
    let script = format!("#!/bin/sh\necho $1 >>{}\ncp {} {}\n", paths[0], paths[1], paths[2]);
    fs_err::write(&modprobe, script).unwrap();
    fs_err::set_permissions(&modprobe, std::fs::Permissions::from_mode(0o755)).unwrap();

    let none = DeviceNodes::Given(BTreeMap::new());
    let edits = HostEdits::new(made.host, DriverAt::default(), none, LibraryDelivery::MountsOnly);
    let (module, away) = (dir.path().join("sys/module/nvidia"), dir.path().join("away"));
    let proc = (dir.path().join("proc/driver/nvidia"), dir.path().join("proc-away"));
    fs_err::rename(&module, &away).unwrap();
    fs_err::rename(&proc.0, &proc.1).unwrap();
    edits.control().unwrap();
    assert!(!calls.exists(), "the driver is not loaded");
    fs_err::rename(&away, &module).unwrap();
    fs_err::rename(&proc.1, &proc.0).unwrap();
    let uvm = |control: &ControlNodes| control.nodes.iter().any(|node| node.path == "/dev/nvidia-uvm");
    assert!(uvm(&edits.control().unwrap()));
    fs_err::write(&devices, &without).unwrap();
    assert!(!uvm(&edits.control().unwrap()), "an admin has unloaded it");
    assert_eq!(fs_err::read_to_string(&calls).unwrap(), "nvidia-uvm\n");
    fs_err::rename(&module, &away).unwrap();
    fs_err::rename(&proc.0, &proc.1).unwrap();
    edits.control().unwrap();
    fs_err::rename(&away, &module).unwrap();
    fs_err::rename(&proc.1, &proc.0).unwrap();
    assert!(uvm(&edits.control().unwrap()), "the driver was loaded again");
}

#[test]
fn a_hook_that_hangs_does_not_hang_the_container() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    let delivery = LibraryDelivery::Hook("/opt/divvy/divvy-cdi-hook".to_owned());
    let edits = HostEdits::new(made.host, DriverAt::default(), made.nodes, delivery);
    let common = edits.common().unwrap();
    let timeouts: Vec<_> = common.edits().hooks.iter().map(|hook| hook.timeout).collect();
    assert_eq!(timeouts, [30; 5]);
}

#[test]
fn a_module_that_was_loaded_again_with_another_major_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let made = Fixture::new(vec![gpu()]).build(dir.path()).unwrap();
    for node in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"] {
        let path = dir.path().join("dev").join(node);
        fs_err::remove_file(&path).unwrap();
        // Every machine has it; tests may not make nodes.
        fs_err::os::unix::fs::symlink("/dev/null", path).unwrap();
    }
    let edits =
        HostEdits::new(made.host, DriverAt::default(), DeviceNodes::Real, LibraryDelivery::MountsOnly);
    let major = || {
        let common = edits.common().unwrap();
        common.edits().device_nodes.iter().find(|n| n.path == "/dev/nvidia-uvm").unwrap().major
    };
    assert_eq!(major(), 511);
    let devices = dir.path().join("proc/devices");
    let later = fs_err::read_to_string(&devices).unwrap().replace("511 nvidia-uvm", "508 nvidia-uvm");
    fs_err::write(devices, later).unwrap();
    assert!(edits.refresh(false).unwrap(), "live CDI files are to be written again");
    assert_eq!(major(), 508);
}

#[test]
fn the_driver_that_vanishes_and_comes_back_newer_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let mut fixture = Fixture { driver_root: "/run/nvidia/driver".into(), ..Fixture::new(vec![gpu()]) };
    let made = fixture.build(dir.path()).unwrap();
    let at = DriverAt { seen: None, host: Some("/run/nvidia/driver".into()) };
    let edits = HostEdits::new(made.host, at, made.nodes, LibraryDelivery::MountsOnly);
    let common = edits.common().unwrap();
    assert!(common.edits().env.contains(&"NVIDIA_VISIBLE_DEVICES=void".to_owned()));
    assert!(common.edits().device_nodes.iter().any(|n| n.path == "/dev/nvidiactl" && n.major == 195));
    assert!(!edits.refresh(false).unwrap() && !edits.refresh(true).unwrap(), "nothing has changed");

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
        edits.common().unwrap().edits().mounts.iter().any(|m| m.host_path.ends_with("libcuda.so.590.10.01"))
    );
}
