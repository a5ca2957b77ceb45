//! The driver's files.

use std::path::Path;

use super::{chain, host, link, two_gpus, write};
use crate::fixture::minimal_library;
use crate::*;

const LIB: &str = "usr/lib/x86_64-linux-gnu";

fn listed(made: &crate::fixture::FixtureHost) -> DriverFiles {
    driver_files(&made.host, &find_driver(&made.host, None).unwrap()).unwrap()
}

#[test]
fn the_files_of_a_driver_are_exactly_these() {
    let (made, _dir) = host(&two_gpus());
    let file = |host: &str, container: &str| DriverFile {
        host: host.into(),
        container: container.into(),
    };
    let library = |name: &str, soname: &str| Library {
        file: file(
            &format!("/{LIB}/{name}"),
            &format!("/usr/local/nvidia/lib64/{name}"),
        ),
        soname: Some(soname.into()),
    };
    let link = |name: &str, target: &str| Symlink {
        link: format!("/usr/local/nvidia/lib64/{name}"),
        target: target.into(),
    };
    let expected = DriverFiles {
        version: "580.95.05".into(),
        libraries: vec![
            library("libcuda.so.580.95.05", "libcuda.so.1"),
            library(
                "libnvidia-glcore.so.580.95.05",
                "libnvidia-glcore.so.580.95.05",
            ),
            library("libnvidia-ml.so.580.95.05", "libnvidia-ml.so.1"),
            library("libnvidia-nvvm.so.580.95.05", "libnvidia-nvvm.so.4"),
            library(
                "libnvidia-opticalflow.so.580.95.05",
                "libnvidia-opticalflow.so.1",
            ),
            library(
                "libnvidia-ptxjitcompiler.so.580.95.05",
                "libnvidia-ptxjitcompiler.so.1",
            ),
        ],
        symlinks: vec![
            link("libcuda.so", "libcuda.so.1"),
            link("libcuda.so.1", "libcuda.so.580.95.05"),
            link("libnvidia-ml.so", "libnvidia-ml.so.1"),
            link("libnvidia-ml.so.1", "libnvidia-ml.so.580.95.05"),
            link("libnvidia-nvvm.so.4", "libnvidia-nvvm.so.580.95.05"),
            link("libnvidia-opticalflow.so", "libnvidia-opticalflow.so.1"),
            link(
                "libnvidia-opticalflow.so.1",
                "libnvidia-opticalflow.so.580.95.05",
            ),
            link(
                "libnvidia-ptxjitcompiler.so.1",
                "libnvidia-ptxjitcompiler.so.580.95.05",
            ),
        ],
        binaries: ["nvidia-debugdump", "nvidia-smi"]
            .map(|n| file(&format!("/usr/bin/{n}"), &format!("/usr/bin/{n}")))
            .into(),
        configs: vec![file(
            "/usr/share/nvidia/nvoptix.bin",
            "/usr/share/nvidia/nvoptix.bin",
        )],
        firmware: vec![file(
            "/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
            "/lib/firmware/nvidia/580.95.05/gsp_ga10x.bin",
        )],
        sockets: vec![file(
            "/run/nvidia-persistenced/socket",
            "/run/nvidia-persistenced/socket",
        )],
    };
    assert_eq!(listed(&made), expected);
}

#[test]
fn debians_split_folders_are_both_listed_and_vdpau_keeps_its_folder() {
    let (made, dir) = host(&two_gpus());
    for (path, soname) in [
        (
            "nvidia/current/libnvidia-eglcore.so.580.95.05",
            "libnvidia-eglcore.so.580.95.05",
        ),
        ("vdpau/libvdpau_nvidia.so.580.95.05", "libvdpau_nvidia.so.1"),
        ("libnvidia-egl-gbm.so.1.1.2", "libnvidia-egl-gbm.so.1"),
        (
            "libnvidia-allocator.so.580.95.05",
            "libnvidia-allocator.so.1",
        ),
        ("libGLX_nvidia.so.580.95.05", "libGLX_nvidia.so.0"),
        // Not the driver's, or of another version.
        ("libz.so.1", "libz.so.1"),
        ("libnvidia-old.so.535.161.08", "libnvidia-old.so.1"),
    ] {
        write(
            dir.path(),
            &format!("{LIB}/{path}"),
            &minimal_library(soname),
        );
    }
    // A link that only the host knows.
    link(
        dir.path(),
        &format!("{LIB}/libnvidia-allocator.so"),
        "libnvidia-allocator.so.580.95.05",
    );
    link(dir.path(), &format!("{LIB}/libz.so"), "libz.so.1");
    let files = listed(&made);
    let names: Vec<_> = files
        .libraries
        .iter()
        .map(|l| l.file.container.trim_start_matches(LIBRARY_DIR))
        .collect();
    for name in [
        "/libnvidia-eglcore.so.580.95.05",
        "/vdpau/libvdpau_nvidia.so.580.95.05",
        "/libnvidia-egl-gbm.so.1.1.2",
    ] {
        assert!(names.contains(&name), "{name} in {names:?}");
    }
    assert!(
        !names
            .iter()
            .any(|name| name.contains("libz") || name.contains("old")),
        "{names:?}"
    );
    let links: Vec<_> = files
        .symlinks
        .iter()
        .map(|s| (s.link.trim_start_matches(LIBRARY_DIR), s.target.as_str()))
        .collect();
    for link in [
        (
            "/vdpau/libvdpau_nvidia.so.1",
            "libvdpau_nvidia.so.580.95.05",
        ),
        ("/libnvidia-egl-gbm.so.1", "libnvidia-egl-gbm.so.1.1.2"),
        (
            "/libnvidia-allocator.so",
            "libnvidia-allocator.so.580.95.05",
        ),
        ("/gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1"),
        ("/libGLX_indirect.so.0", "libGLX_nvidia.so.580.95.05"),
    ] {
        assert!(links.contains(&link), "{link:?} in {links:?}");
    }
    assert!(
        !links.iter().any(|(link, _)| link.contains("libz")),
        "{links:?}"
    );
}

#[test]
fn configuration_is_put_where_the_containers_loaders_look() {
    let (made, dir) = host(&two_gpus());
    for (there, expected) in [
        (
            "etc/OpenCL/vendors/nvidia.icd",
            "/etc/OpenCL/vendors/nvidia.icd",
        ),
        (
            "usr/share/vulkan/icd.d/nvidia_icd.aarch64.json",
            "/etc/vulkan/icd.d/nvidia_icd.aarch64.json",
        ),
        // GKE.
        (
            "vulkan/icd.d/nvidia_icd.json",
            "/etc/vulkan/icd.d/nvidia_icd.json",
        ),
        (
            "etc/glvnd/egl_vendor.d/10_nvidia.json",
            "/etc/glvnd/egl_vendor.d/10_nvidia.json",
        ),
        (
            "usr/local/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
            "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
        ),
        (
            "usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
            "/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
        ),
    ] {
        write(dir.path(), there, b"{}");
        let configs = listed(&made).configs;
        let found = configs.iter().find(|file| file.host == format!("/{there}"));
        assert_eq!(found.map(|file| file.container.as_str()), Some(expected));
    }
}

/// A mount cannot be replaced by the hook, a link can.
#[test]
fn a_library_whose_name_has_no_version_is_reached_through_a_link() {
    let (made, dir) = host(&two_gpus());
    write(
        dir.path(),
        &format!("{LIB}/libnvidia-nvvm70.so.4"),
        &minimal_library("libnvidia-nvvm70.so.4"),
    );
    let files = listed(&made);
    let mounted = files
        .libraries
        .iter()
        .find(|l| l.file.host.ends_with("nvvm70.so.4"))
        .unwrap();
    assert_eq!(
        mounted.file.container,
        format!("{LIBRARY_DIR}/libnvidia-nvvm70.so.4.580.95.05")
    );
    let link = files
        .symlinks
        .iter()
        .find(|s| s.link.ends_with("/libnvidia-nvvm70.so.4"))
        .unwrap();
    assert_eq!(link.target, "libnvidia-nvvm70.so.4.580.95.05");
}

#[test]
fn files_that_are_no_64_bit_libraries_are_left_out() {
    let (made, dir) = host(&two_gpus());
    let before = listed(&made);
    write(
        dir.path(),
        &format!("{LIB}/libscript.so.580.95.05"),
        b"INPUT(libcuda.so.1)",
    );
    let mut narrow = minimal_library("libnarrow.so.1");
    narrow[4] = 1;
    write(
        dir.path(),
        &format!("{LIB}/libnarrow.so.580.95.05"),
        &narrow,
    );
    assert_eq!(listed(&made), before);
}

#[test]
fn folders_and_links_with_the_name_of_a_library_or_firmware_are_left_out() {
    let (made, dir) = host(&two_gpus());
    let before = listed(&made);
    for folder in [
        format!("{LIB}/libnvidia-x.so.580.95.05"),
        format!("{LIB}/vdpau/libvdpau_nvidia.so.580.95.05"),
        "lib/firmware/nvidia/580.95.05/gsp_x.bin".to_owned(),
        "usr/bin/nvidia-imex".to_owned(),
        "etc/vulkan/icd.d/nvidia_icd.json".to_owned(),
    ] {
        fs_err::create_dir_all(dir.path().join(folder)).unwrap();
    }
    let to_folder = format!("{LIB}/libnvidia-x.so.1");
    link(dir.path(), &to_folder, "libnvidia-x.so.580.95.05");
    assert_eq!(listed(&made), before);
}

/// A link in the place of a mount would fail every pod.
#[test]
fn a_library_linked_under_its_own_name_is_mounted_and_not_linked() {
    let (made, dir) = host(&two_gpus());
    let name = "libnvidia-y.so.580.95.05";
    let real = format!("{LIB}/nvidia/current/{name}");
    write(dir.path(), &real, &minimal_library("libnvidia-y.so.1"));
    link(
        dir.path(),
        &format!("{LIB}/{name}"),
        &format!("nvidia/current/{name}"),
    );
    let files = listed(&made);
    let mounted: Vec<_> = files
        .libraries
        .iter()
        .map(|library| &library.file.container)
        .collect();
    assert!(mounted.iter().any(|path| path.ends_with(name)));
    let over = |link: &Symlink| mounted.contains(&&link.link);
    assert!(!files.symlinks.iter().any(over), "{:?}", files.symlinks);
}

#[test]
fn a_link_to_what_is_not_mounted_is_left_out() {
    let (made, dir) = host(&two_gpus());
    let before = listed(&made);
    write(
        dir.path(),
        &format!("{LIB}/libscript.so.580.95.05"),
        b"INPUT(libcuda.so.1)",
    );
    let name = format!("{LIB}/libscript.so");
    link(dir.path(), &name, "libscript.so.580.95.05");
    assert_eq!(listed(&made), before);
}

/// A damaged file must not have the plugin ask for memory without bound.
#[test]
fn sizes_in_a_library_that_no_library_has_are_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lib.so");
    let whole = minimal_library("libx.so.1");
    // Size in the file of the second segment, which is the dynamic one.
    let size = 64 + 56 + 32;
    for size_in_file in [(1_u64 << 20) + 16, 1 << 62, u64::MAX] {
        let mut bytes = whole.clone();
        bytes[size..size + 8].copy_from_slice(&size_in_file.to_le_bytes());
        // The file is as long as it says where that can be.
        fs_err::write(&path, &bytes).unwrap();
        let file = fs_err::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(4 << 20).unwrap();
        let read = Elf::read(&path);
        assert!(matches!(read, Err(ElfError::Damaged)), "{read:?}");
    }
}

#[test]
fn a_name_that_leads_elsewhere_is_no_name_of_a_library() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lib.so");
    for (soname, expected) in [
        ("libx.so.1", Some("libx.so.1")),
        ("../../bin/sh", None),
        ("/etc/passwd", None),
        ("", None),
    ] {
        fs_err::write(&path, minimal_library(soname)).unwrap();
        assert_eq!(Elf::read(&path).unwrap().soname.as_deref(), expected);
    }
}

#[test]
fn a_library_that_is_being_written_is_an_error_not_a_missing_library() {
    let (made, dir) = host(&two_gpus());
    let whole = minimal_library("libcut.so.1");
    write(
        dir.path(),
        &format!("{LIB}/libcut.so.580.95.05"),
        &whole[..whole.len() / 2],
    );
    let error = driver_files(&made.host, &find_driver(&made.host, None).unwrap()).unwrap_err();
    let text = chain(&error);
    assert!(
        text.ends_with("libcut.so.580.95.05 is damaged (the driver may still be installing): its dynamic section is damaged"),
        "{text}"
    );
}

#[test]
fn sockets_of_the_host_are_used_when_the_drivers_root_has_none() {
    let mut fixture = two_gpus();
    fixture.driver_root = "/run/nvidia/driver".into();
    let (made, dir) = host(&fixture);
    write(dir.path(), "run/nvidia-fabricmanager/socket", b"");
    let sockets: Vec<_> = listed(&made)
        .sockets
        .into_iter()
        .map(|s| (s.host, s.container))
        .collect();
    let own = "/run/nvidia/driver/run/nvidia-persistenced/socket";
    let expected = [
        (
            "/run/nvidia-fabricmanager/socket",
            "/run/nvidia-fabricmanager/socket",
        ),
        (own, "/run/nvidia-persistenced/socket"),
    ];
    assert_eq!(sockets, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
}

#[test]
fn the_name_in_a_real_library_is_read() {
    // The C library that this test runs with.
    let maps = fs_err::read_to_string("/proc/self/maps").unwrap();
    let Some(path) = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|p| p.contains("libc.so.6"))
    else {
        return; // a static test program has none
    };
    assert_eq!(
        Elf::read(Path::new(path)).unwrap().soname.as_deref(),
        Some("libc.so.6")
    );
}

#[test]
fn the_fixtures_libraries_are_accepted_by_a_real_loader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libcuda.so.1");
    fs_err::write(&path, minimal_library("libcuda.so.1")).unwrap();
    // The loader complains on stderr about what it cannot load, and a damaged library kills the
    // program.
    let out = std::process::Command::new("env")
        .env("LD_PRELOAD", &path)
        .output()
        .unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
    assert_eq!(
        Elf::read(&path).unwrap().soname.as_deref(),
        Some("libcuda.so.1")
    );
}
