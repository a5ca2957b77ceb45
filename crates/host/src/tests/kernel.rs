//! Kernel files, topology, nodes.

use std::collections::BTreeMap;

use divvy_model::HostTopology;

use super::{chain, host, link, pci, two_gpus, write};
use crate::*;

#[test]
fn the_kernels_files_are_read() {
    let (fixture, _dir) = host(&two_gpus());
    let host = &fixture.host;
    assert_eq!(
        boot_id(host).unwrap(),
        "6f5902ac-237d-4d85-b20d-3ae1a2a0c1f4"
    );
    let majors = [
        ("drm", 226),
        ("mem", 1),
        ("nvidia-caps", 507),
        ("nvidia", 195),
        ("nvidia-uvm", 511),
        ("nvidiactl", 195),
    ];
    assert_eq!(
        char_majors(host).unwrap(),
        BTreeMap::from(majors.map(|(name, n)| (name.to_owned(), n)))
    );
    assert_eq!(
        nvidia_module(host).unwrap(),
        Some(NvidiaModule {
            version: Some("580.95.05".into())
        })
    );
    let params = nvidia_params(host).unwrap();
    assert_eq!(
        (params["DeviceFileMode"].as_str(), params["RmMsg"].as_str()),
        ("438", "")
    );
}

#[test]
fn the_modules_version_is_found_in_proc_when_sysfs_has_none() {
    for (text, expected) in [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42:15 UTC 2024\n",
            Some("535.161.08"),
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build\n",
            Some("595.71.05"),
        ),
        ("NVRM version: something else\n", None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), "proc/driver/nvidia/version", text.as_bytes());
        let module = nvidia_module(&HostRoot::under(dir.path()))
            .unwrap()
            .unwrap();
        assert_eq!(module.version.as_deref(), expected, "{text}");
    }
}

#[test]
fn a_host_without_the_module_has_no_module_and_no_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let host = HostRoot::under(dir.path());
    assert_eq!(nvidia_module(&host).unwrap(), None);
    assert_eq!(nvidia_params(&host).unwrap(), BTreeMap::new());
}

#[test]
fn an_unmounted_proc_says_what_was_looked_for_and_what_to_check() {
    let dir = tempfile::tempdir().unwrap();
    let host = HostRoot::default().with_proc(dir.path());
    let text = chain(&boot_id(&host).unwrap_err());
    let hint = "cannot read the boot id of the host; check the pod's mounts of the host's /proc and /sys: ";
    assert!(text.starts_with(hint), "{text}");
    assert!(text.contains("sys/kernel/random/boot_id"), "{text}");
    write(dir.path(), "sys/kernel/random/boot_id", b"\n");
    assert!(
        boot_id(&host)
            .unwrap_err()
            .to_string()
            .ends_with("the boot id is not of the expected form: \"\\n\"")
    );
}

#[test]
fn topology_is_what_sysfs_says_and_nothing_more() {
    let (fixture, _dir) = host(&two_gpus());
    let at = |address| topology(&fixture.host, pci(address));
    let expected = HostTopology {
        numa_node: Some(0),
        pcie_root: Some("pci0000:00".into()),
    };
    assert_eq!(at("0000:07:00.0").unwrap(), expected);
    let expected = HostTopology {
        numa_node: None,
        pcie_root: Some("pci0000:80".into()),
    };
    assert_eq!(at("0000:87:00.0").unwrap(), expected);
    let text = at("0000:99:00.0").unwrap_err().to_string();
    assert!(
        text.starts_with("PCI device 0000:99:00.0 is not in sysfs"),
        "{text}"
    );
}

#[test]
fn the_pcie_root_is_the_first_on_the_way_whatever_lies_before_and_behind() {
    for (target, expected) in [
        (
            "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0",
            Some("pci0000:3a"),
        ),
        (
            "../../../devices/pci0000:00/0000:00:0e.0/pci10000:00/10000:01:00.0",
            Some("pci0000:00"),
        ),
        (
            "../../../devices/platform/40000000.pcie/pci0008:00/0008:01:00.0",
            Some("pci0008:00"),
        ),
        ("../../../devices/vbus/0000:3b:00.0", None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        link(dir.path(), "sys/bus/pci/devices/0000:3b:00.0", target);
        let found = topology(&HostRoot::under(dir.path()), pci("0000:3b:00.0")).unwrap();
        assert_eq!(
            found,
            HostTopology {
                numa_node: None,
                pcie_root: expected.map(str::to_owned)
            },
            "{target}"
        );
    }
}

fn node(path: &str, major: u32, minor: u32) -> DeviceNode {
    DeviceNode {
        path: path.into(),
        info: NodeInfo {
            major,
            minor,
            mode: 0o666,
            gid: 0,
        },
    }
}

#[test]
fn nodes_follow_the_minor_number_and_bring_the_drm_nodes_of_the_address() {
    let (fixture, _dir) = host(&two_gpus());
    let nodes = gpu_nodes(&fixture.host, &fixture.nodes, 3, pci("0000:87:00.0")).unwrap();
    let drm = vec![
        node("/dev/dri/card1", 226, 1),
        node("/dev/dri/renderD129", 226, 129),
    ];
    assert_eq!(
        nodes,
        GpuNodes {
            main: node("/dev/nvidia3", 195, 3),
            drm,
            has_links: false
        }
    );
}

#[test]
fn drm_nodes_that_the_host_lacks_are_left_out() {
    let (fixture, _dir) = host(&two_gpus());
    let DeviceNodes::Given(mut table) = fixture.nodes else {
        panic!("a fixture gives its nodes")
    };
    table.remove("/dev/dri/card1");
    let nodes = gpu_nodes(
        &fixture.host,
        &DeviceNodes::Given(table),
        3,
        pci("0000:87:00.0"),
    )
    .unwrap();
    assert_eq!(nodes.drm, [node("/dev/dri/renderD129", 226, 129)]);
}

#[test]
fn nodes_are_made_on_the_host_with_their_rights_and_stale_ones_replaced() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    if !rustix::process::geteuid().is_root() {
        return; // only root may make nodes
    }
    let dir = tempfile::tempdir().unwrap();
    let host = HostRoot::under(dir.path());
    // The null and the zero device: every machine lets them be made.
    let null = DeviceNode {
        path: "/dev/nvidia-caps/nvidia-cap3".into(),
        ..node("", 1, 3)
    };
    let zero = DeviceNode {
        path: null.path.clone(),
        info: NodeInfo {
            minor: 5,
            mode: 0o444,
            ..null.info
        },
    };
    let seen = || {
        let meta = fs_err::metadata(dir.path().join("dev/nvidia-caps/nvidia-cap3")).unwrap();
        (
            rustix::fs::minor(meta.rdev()),
            meta.permissions().mode() & 0o777,
        )
    };
    let given = DeviceNodes::Given(BTreeMap::new());
    assert_eq!(
        make_nodes(&host, &given, [&null]).unwrap(),
        [""; 0],
        "not of a host that does not exist"
    );
    assert_eq!(
        make_nodes(&host, &DeviceNodes::Real, [&null]).unwrap(),
        [null.path.as_str()]
    );
    assert_eq!(seen(), (3, 0o666));
    assert_eq!(
        make_nodes(&host, &DeviceNodes::Real, [&null]).unwrap(),
        [""; 0],
        "made once"
    );
    assert_eq!(
        make_nodes(&host, &DeviceNodes::Real, [&zero]).unwrap(),
        [null.path.as_str()]
    );
    assert_eq!(seen(), (5, 0o444));
    assert_eq!(
        fs_err::read_dir(dir.path().join("dev/nvidia-caps"))
            .unwrap()
            .count(),
        1
    );
}

#[test]
fn missing_nodes_are_derived_from_the_majors() {
    let (fixture, dir) = host(&two_gpus());
    write(
        dir.path(),
        "proc/driver/nvidia/params",
        b"DeviceFileMode: 432\nDeviceFileGID: 27\n",
    );
    let none = DeviceNodes::Given(BTreeMap::new());
    let rights = |path: &str, major, minor| DeviceNode {
        path: path.into(),
        info: NodeInfo {
            major,
            minor,
            mode: 0o660,
            gid: 27,
        },
    };
    let control = control_nodes(&fixture.host, &none).unwrap();
    let nodes = vec![
        rights("/dev/nvidiactl", 195, 255),
        rights("/dev/nvidia-uvm", 511, 0),
        rights("/dev/nvidia-uvm-tools", 511, 1),
    ];
    let missing = vec![MissingNode {
        path: "/dev/nvidia-modeset".into(),
        module: "nvidia-modeset",
        needed: false,
    }];
    assert_eq!(control, ControlNodes { nodes, missing });
    let gpu = gpu_nodes(&fixture.host, &none, 3, pci("0000:87:00.0")).unwrap();
    assert_eq!(gpu.main, rights("/dev/nvidia3", 195, 3));
}

#[test]
fn without_node_and_module_the_error_says_what_to_load() {
    let (fixture, dir) = host(&two_gpus());
    write(
        dir.path(),
        "proc/devices",
        b"Character devices:\n  1 mem\n\nBlock devices:\n195 nvidia\n",
    );
    let none = DeviceNodes::Given(BTreeMap::new());
    assert_eq!(
        gpu_nodes(&fixture.host, &none, 3, pci("0000:87:00.0"))
            .unwrap_err()
            .to_string(),
        "/dev/nvidia3 does not exist and /proc/devices has no entry for nvidia; load the kernel module (nvidia) on the node"
    );
    let missing = control_nodes(&fixture.host, &none).unwrap().missing;
    let needed: Vec<_> = missing
        .iter()
        .filter(|m| m.needed)
        .map(|m| m.path.as_str())
        .collect();
    assert_eq!(needed, ["/dev/nvidiactl", "/dev/nvidia-uvm"]);
}

#[test]
fn a_file_in_a_nodes_place_is_not_taken_for_a_node() {
    let (fixture, _dir) = host(&two_gpus());
    let error = gpu_nodes(&fixture.host, &DeviceNodes::Real, 3, pci("0000:87:00.0")).unwrap_err();
    assert!(error.to_string().ends_with(
        "dev/nvidia3 is not a character device; remove it and run nvidia-modprobe, or reboot the node"
    ));
}

#[test]
fn numbers_of_real_nodes_come_from_the_node() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "proc/devices",
        b"Character devices:\n195 nvidia\n",
    );
    // Every machine has /dev/null: 1, 3.
    link(dir.path(), "dev/nvidia7", "/dev/null");
    let nodes = gpu_nodes(
        &HostRoot::under(dir.path()),
        &DeviceNodes::Real,
        7,
        pci("0000:87:00.0"),
    )
    .unwrap();
    assert_eq!(
        (
            nodes.main.info.major,
            nodes.main.info.minor,
            nodes.main.info.mode
        ),
        (1, 3, 0o666)
    );
}

/// `rmmod nvidia_uvm && modprobe nvidia_uvm` can give the module another major; the node in `/dev`
/// keeps the old one.
#[test]
fn the_kernels_major_wins_over_a_node_that_an_earlier_module_left() {
    let dir = tempfile::tempdir().unwrap();
    link(dir.path(), "dev/nvidia-uvm", "/dev/null");
    let uvm = |devices: &str| {
        write(dir.path(), "proc/devices", devices.as_bytes());
        let control = control_nodes(&HostRoot::under(dir.path()), &DeviceNodes::Real).unwrap();
        let info = control
            .nodes
            .iter()
            .find(|node| node.path == "/dev/nvidia-uvm")
            .unwrap()
            .info;
        (info.major, info.minor, info.mode)
    };
    assert_eq!(uvm("Character devices:\n511 nvidia-uvm\n"), (511, 0, 0o666));
    assert_eq!(
        uvm("Character devices:\n195 nvidia\n"),
        (1, 3, 0o666),
        "all there is while it is not loaded"
    );
}

#[test]
fn extra_nodes_are_those_that_the_host_has() {
    let dir = tempfile::tempdir().unwrap();
    let found =
        |nodes: &DeviceNodes, path: &str| extra_nodes(&HostRoot::under(dir.path()), nodes, path);
    let real = |path: &str| found(&DeviceNodes::Real, path);
    for (name, target) in [
        ("gdrdrv", "/dev/null"),
        ("nvidia-fs1", "/dev/zero"),
        ("nvidia-fs0", "/dev/null"),
    ] {
        link(dir.path(), &format!("dev/{name}"), target);
    }
    link(dir.path(), "dev/imex/channel0", "/dev/null");
    let fs = [node("/dev/nvidia-fs0", 1, 3), node("/dev/nvidia-fs1", 1, 5)];
    assert_eq!(real("/dev/gdrdrv").unwrap(), [node("/dev/gdrdrv", 1, 3)]);
    assert_eq!(real("/dev/nvidia-fs*").unwrap(), fs);
    assert_eq!(
        real("/dev/imex/channel*").unwrap(),
        [node("/dev/imex/channel0", 1, 3)]
    );
    assert_eq!(real("/dev/infiniband/uverbs*").unwrap(), []);
    assert_eq!(real("/dev/gdr").unwrap(), []);
    let table = fs
        .iter()
        .map(|node| (node.path.clone(), node.info))
        .collect();
    assert_eq!(
        found(&DeviceNodes::Given(table), "/dev/nvidia-fs*").unwrap(),
        fs
    );
    // A pattern is for nodes; a folder or file by name, or a file among nodes, cannot be given.
    fs_err::create_dir_all(dir.path().join("dev/nvidia-fs-by-path")).unwrap();
    assert_eq!(real("/dev/nvidia-fs*").unwrap(), fs);
    let refused = |path: &str| real(path).unwrap_err().to_string();
    assert_eq!(
        refused("/dev/imex"),
        "/dev/imex is a folder and no device node; ask for the nodes in it, by name or as /dev/imex/*"
    );
    write(dir.path(), "dev/nvidia-fs2", b"");
    assert_eq!(
        refused("/dev/nvidia-fs*"),
        "/dev/nvidia-fs2 is a file and no device node; ask for device nodes only, or remove it from the node"
    );
}

#[test]
fn a_table_of_nodes_reads_back_as_written() {
    let (fixture, _dir) = host(&two_gpus());
    let text = fs_err::read_to_string(&fixture.node_table).unwrap();
    assert_eq!(DeviceNodes::from_table(&text).unwrap(), fixture.nodes);
    assert_eq!(
        DeviceNodes::from_table("# nodes\n/dev/nvidia0 195 zero 666 0\n")
            .unwrap_err()
            .to_string(),
        "device table, line 2: expected \"path major minor mode(octal) gid\", got \"/dev/nvidia0 195 zero 666 0\""
    );
}

#[test]
fn a_module_whose_version_is_empty_in_sysfs_is_read_from_proc() {
    let (made, dir) = host(&two_gpus());
    write(dir.path(), "sys/module/nvidia/version", b"\n");
    let version = |version: Option<&str>| {
        let version = version.map(str::to_owned);
        Some(NvidiaModule { version })
    };
    assert_eq!(
        nvidia_module(&made.host).unwrap(),
        version(Some("580.95.05"))
    );
    fs_err::remove_file(dir.path().join("proc/driver/nvidia/version")).unwrap();
    assert_eq!(nvidia_module(&made.host).unwrap(), version(None));
}

#[test]
fn the_hook_is_installed_executable_once_and_replaced_when_it_differs() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let dir = tempfile::tempdir().unwrap();
    let (from, folder) = (dir.path().join("hook"), dir.path().join("opt/gpu"));
    fs_err::write(&from, b"one").unwrap();
    // As by a process with a narrow umask: a mapped root could not pass it.
    fs_err::create_dir_all(&folder).unwrap();
    fs_err::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    let to = install_hook(&from, &folder).unwrap();
    assert_eq!(to, folder.join("divvy-cdi-hook"));
    let first = fs_err::metadata(&to).unwrap();
    let mode = |path| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&to), mode(&folder)), (0o755, 0o755));
    install_hook(&from, &folder).unwrap();
    assert_eq!(fs_err::metadata(&to).unwrap().ino(), first.ino());
    fs_err::write(&from, b"two").unwrap();
    install_hook(&from, &folder).unwrap();
    assert_eq!(fs_err::read(&to).unwrap(), b"two");
    assert_eq!(fs_err::read_dir(to.parent().unwrap()).unwrap().count(), 1);

    fs_err::write(dir.path().join("file"), b"").unwrap();
    let text = chain(&install_hook(&from, &dir.path().join("file/hook")).unwrap_err());
    assert!(
        text.contains("(--hook-dir, chart value hookDir: a writable folder of the host"),
        "{text}"
    );
}
