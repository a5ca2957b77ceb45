//! Libraries and settings that an image's programs find besides the host's libraries.

use super::common::Container;
use super::{LIB, LINKS, UPDATE, with_driver};
use divvy_host::fixture::minimal_library;

pub(crate) const COMPAT: [&str; 5] = [
    "enable-cuda-compat",
    "--host-driver-version",
    "580.95.05",
    "--folder",
    LIB,
];

/// Makes an image of CUDA with the compatibility libraries of this driver, as NVIDIA's packages
/// install them.
fn with_compat(version: &str) -> Container {
    let container = with_driver();
    container.link("/usr/local/cuda", "cuda-13.1");
    for (file, soname) in [
        ("libcuda.so", "libcuda.so.1"),
        ("libnvidia-nvvm70.so", "libnvidia-nvvm70.so.4"),
    ] {
        let real = format!("/usr/local/cuda-13.1/compat/{file}.{version}");
        container.write(&real, &minimal_library(soname));
        container.link(
            &format!("/usr/local/cuda-13.1/compat/{soname}"),
            &format!("{file}.{version}"),
        );
    }
    container.run(&LINKS).ok();
    container
}

#[test]
fn only_newer_libraries_of_cuda_win_and_under_every_name() {
    let container = with_compat("590.44.01");
    for other in ["README", "nvidia-smi", "libx.a"] {
        container.write(&format!("/usr/local/cuda-13.1/compat/{other}"), b"");
    }
    container.run(&COMPAT).ok();
    // Only libraries get a name in the folder.
    assert_eq!(
        container.names(LIB),
        [
            "libcuda.so",
            "libcuda.so.1",
            "libcuda.so.580.95.05",
            "libcuda.so.590.44.01",
            "libnvidia-nvvm70.so.4",
            "libnvidia-nvvm70.so.590.44.01",
        ]
    );
    for name in [
        "libcuda.so.1",
        "libcuda.so.590.44.01",
        "libnvidia-nvvm70.so.4",
    ] {
        let target = format!("/usr/local/cuda/compat/{name}");
        assert_eq!(container.read_link(&format!("{LIB}/{name}")), target);
    }
    // A name that leads to another leads to the image's, too; the cache has what only the image
    // brings.
    assert_eq!(
        container.read_link(&format!("{LIB}/libcuda.so")),
        "libcuda.so.1"
    );
    container.run(&UPDATE).ok();
    let cache = fs_err::read(container.path("/etc/ld.so.cache")).unwrap();
    assert!(String::from_utf8_lossy(&cache).contains("/lib64/libnvidia-nvvm70.so.4\0"));

    for version in ["580.105.08", "570.10"] {
        let container = with_compat(version);
        container.run(&COMPAT).ok();
        let left = container.read_link(&format!("{LIB}/libcuda.so.1"));
        assert_eq!(left, "libcuda.so.580.95.05", "{version}");
    }
}

#[test]
fn ambiguous_compatibility_libraries_are_left_alone() {
    let two = with_compat("590.44.01");
    two.write("/usr/local/cuda-13.1/compat/libcuda.so.595.1.2", b"");
    let odd = with_compat("newest.1");
    let file = with_driver();
    file.run(&LINKS).ok();
    file.write("/usr/local/cuda/compat", b"no folder");
    for container in [two, odd, file] {
        container.run(&COMPAT).ok();
        assert_eq!(
            container.read_link(&format!("{LIB}/libcuda.so.1")),
            "libcuda.so.580.95.05"
        );
    }
    let none = Container::new();
    none.write("/usr/local/cuda/compat/libcuda.so.590.44.01", b"");
    none.run(&COMPAT).ok();
    assert_eq!(
        none.names("/usr/local"),
        ["cuda"],
        "there is no driver to win over"
    );
}

/// The host's libraries are as good for most images: none fails for what is in this folder.
#[test]
fn a_folder_of_compatibility_libraries_without_end_is_left_alone() {
    let container = with_driver();
    container.run(&LINKS).ok();
    for number in 0..=16_384 {
        container.link(&format!("/usr/local/cuda/compat/{number}"), "nowhere");
    }
    container.write("/usr/local/cuda/compat/libcuda.so.590.44.01", b"");
    let out = container.run(&COMPAT);
    assert!(out.success, "{}", out.stderr);
    let said = "divvy-cdi-hook: left out: cannot list /usr/local/cuda/compat in the container: more than 16384 files";
    assert!(out.stderr.starts_with(said), "{}", out.stderr);
    let name = container.read_link(&format!("{LIB}/libcuda.so.1"));
    assert_eq!(name, "libcuda.so.580.95.05");
}

#[test]
fn egl_and_vulkan_are_pointed_to_the_containers_gpus() {
    let container = Container::new();
    for node in ["nvidia3", "nvidia9", "nvidiactl", "null"] {
        container.write(&format!("/dev/{node}"), b"");
    }
    container.run(&["update-application-profile"]).ok();
    let profile = container.read("/etc/nvidia/nvidia-application-profiles-rc.d/10-divvy.conf");
    assert_eq!(
        profile,
        "{\"profiles\": [{\"name\": \"divvy\", \"settings\": [\"EGLVisibleDGPUDevices\", 0x208]}], \
         \"rules\": [{\"pattern\": [], \"profile\": \"divvy\"}]}\n"
    );
}
