//! Changes in a container.

use divvy_cdi::{ContainerEdits, Hook, Mount, Stage};

use super::{host, pci, two_gpus};
use crate::*;

fn program(path: &str) -> HookProgram {
    HookProgram {
        path: path.to_owned(),
        socket: "/run/s".to_owned(),
    }
}

fn given() -> (DriverFiles, ControlNodes) {
    let file = |host: &str, container: &str| DriverFile {
        host: host.into(),
        container: container.into(),
    };
    let files = DriverFiles {
        version: "1.2".into(),
        libraries: vec![Library {
            file: file(
                "/d/libcuda.so.1.2",
                "/usr/local/nvidia/lib64/libcuda.so.1.2",
            ),
            soname: Some("libcuda.so.1".into()),
        }],
        symlinks: vec![
            Symlink {
                link: "/usr/local/nvidia/lib64/libcuda.so".into(),
                target: "libcuda.so.1".into(),
            },
            Symlink {
                link: "/usr/local/nvidia/lib64/libcuda.so.1".into(),
                target: "libcuda.so.1.2".into(),
            },
        ],
        binaries: vec![file("/d/nvidia-smi", "/usr/bin/nvidia-smi")],
        configs: vec![],
        firmware: vec![],
        sockets: vec![file("/run/x/socket", "/run/x/socket")],
    };
    let info = NodeInfo {
        major: 195,
        minor: 255,
        mode: 0o660,
        gid: 27,
    };
    (
        files,
        ControlNodes {
            nodes: vec![DeviceNode {
                path: "/dev/nvidiactl".into(),
                info,
            }],
            missing: vec![],
        },
    )
}

fn mount(host: &str, container: &str, options: &str) -> Mount {
    Mount {
        host_path: host.into(),
        container_path: container.into(),
        options: options.split(',').map(str::to_owned).collect(),
    }
}

const RO: &str = "ro,nosuid,nodev,rbind,rprivate";
const SOCKET: &str = "ro,nosuid,nodev,rbind,rprivate,noexec";

#[test]
fn with_a_hook_the_edits_are_exactly_these() {
    let (files, control) = given();
    let call = |args: &[&str]| {
        let args = std::iter::once("divvy-cdi-hook")
            .chain(args.iter().copied())
            .map(str::to_owned)
            .collect();
        Hook::new(
            Stage::CreateContainer,
            "/p/hook".into(),
            args,
            vec!["DIVVY_HOOK_SOCKET=/run/s".into()],
            30,
        )
    };
    let expected = ContainerEdits {
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".into()],
        device_nodes: control.nodes.iter().map(Into::into).collect(),
        mounts: vec![
            mount(
                "/d/libcuda.so.1.2",
                "/usr/local/nvidia/lib64/libcuda.so.1.2",
                RO,
            ),
            mount("/d/nvidia-smi", "/usr/bin/nvidia-smi", RO),
            mount("/run/x/socket", "/run/x/socket", SOCKET),
        ],
        hooks: vec![call(&[
            "create-symlinks",
            "--link",
            "libcuda.so.1::/usr/local/nvidia/lib64/libcuda.so",
            "--link",
            "libcuda.so.1.2::/usr/local/nvidia/lib64/libcuda.so.1",
            "then",
            "enable-cuda-compat",
            "--host-driver-version",
            "1.2",
            "--folder",
            "/usr/local/nvidia/lib64",
            "then",
            "update-ldcache",
            "--folder",
            "/usr/local/nvidia/lib64",
            "then",
            "disable-device-node-modification",
            "then",
            "update-application-profile",
        ])],
        additional_gids: vec![27],
    };
    assert_eq!(
        driver_edits(&files, &control, &LibraryDelivery::Hook(program("/p/hook"))),
        expected
    );
}

#[test]
fn without_a_hook_each_name_is_a_mount_and_the_path_is_set() {
    let (files, control) = given();
    let edits = driver_edits(&files, &control, &LibraryDelivery::MountsOnly);
    let library = |name: &str| {
        mount(
            "/d/libcuda.so.1.2",
            &format!("/usr/local/nvidia/lib64/{name}"),
            RO,
        )
    };
    let expected = [
        library("libcuda.so.1.2"),
        library("libcuda.so"),
        library("libcuda.so.1"),
        mount("/d/nvidia-smi", "/usr/bin/nvidia-smi", RO),
        mount("/run/x/socket", "/run/x/socket", SOCKET),
    ];
    assert_eq!(edits.mounts, expected);
    assert_eq!(edits.hooks, []);
    let path = "LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64";
    assert_eq!(edits.env, ["NVIDIA_VISIBLE_DEVICES=void", path]);
}

#[test]
fn no_two_mounts_of_a_whole_driver_go_to_the_same_place() {
    let (made, _dir) = host(&two_gpus());
    let files = driver_files(&made.host, &find_driver(&made.host, None).unwrap()).unwrap();
    let control = control_nodes(&made.host, &made.nodes).unwrap();
    for delivery in [
        LibraryDelivery::MountsOnly,
        LibraryDelivery::Hook(program("/h")),
    ] {
        let mounts = driver_edits(&files, &control, &delivery).mounts;
        let places: std::collections::BTreeSet<_> =
            mounts.iter().map(|m| &m.container_path).collect();
        assert_eq!(places.len(), mounts.len());
    }
}

/// Not by root in the container either: they are the node's.
#[test]
fn no_mount_of_a_driver_can_be_written() {
    let (made, _dir) = host(&two_gpus());
    let files = driver_files(&made.host, &find_driver(&made.host, None).unwrap()).unwrap();
    let control = control_nodes(&made.host, &made.nodes).unwrap();
    let mounts = driver_edits(&files, &control, &LibraryDelivery::Hook(program("/h"))).mounts;
    assert!(mounts.len() > 10, "{mounts:?}");
    for mount in mounts {
        let has = |option: &str| mount.options.iter().any(|one| one == option);
        assert!(has("ro") && has("nosuid") && has("nodev"), "{mount:?}");
    }
}

#[test]
fn a_gpus_edits_are_its_nodes_alone() {
    let (made, _dir) = host(&two_gpus());
    let nodes = gpu_nodes(&made.host, &made.nodes, 0, pci("0000:07:00.0")).unwrap();
    let all = std::iter::once(&nodes.main)
        .chain(&nodes.drm)
        .map(Into::into);
    let expected = ContainerEdits {
        device_nodes: all.collect(),
        ..ContainerEdits::default()
    };
    assert_eq!(gpu_edits(&nodes), expected);
    assert_eq!(expected.device_nodes.len(), 3);
}

#[test]
fn links_to_drm_nodes_come_with_the_nodes_where_the_host_has_them() {
    let (made, dir) = host(&two_gpus());
    fs_err::create_dir_all(dir.path().join("dev/dri/by-path")).unwrap();
    let mut nodes = gpu_nodes(&made.host, &made.nodes, 0, pci("0000:07:00.0")).unwrap();
    assert_eq!(
        gpu_edits(&nodes).mounts,
        [mount("/dev/dri/by-path", "/dev/dri/by-path", RO)]
    );
    let none = DeviceNodes::Given(std::collections::BTreeMap::new());
    nodes = gpu_nodes(&made.host, &none, 0, pci("0000:07:00.0")).unwrap();
    assert_eq!(
        gpu_edits(&nodes).mounts,
        [],
        "a folder of links that lead nowhere"
    );
}
