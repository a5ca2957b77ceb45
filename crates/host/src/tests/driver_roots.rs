//! The folder that is taken for the driver, and the message when none is.

use std::path::Path;

use super::{chain, host, link, two_gpus, write};
use crate::fixture::{Fixture, minimal_library};
use crate::*;

fn library(root: &Path, path: &str, soname: &str) {
    write(root, path, &minimal_library(soname));
}

/// The texts of a loader cache, as ldconfig writes them after its table of numbers: names, then
/// paths.
fn cache(folder: &str, names: &[&str]) -> Vec<u8> {
    let mut bytes = b"glibc-ld.so.cache1.1".to_vec();
    bytes.extend([2, 0, 0, 0, 0xff, 0xff, 0x2f, 0x6c, 0, 0]);
    for name in names {
        bytes.extend(format!("{name}\0/usr/lib/i386/{name}\0/{folder}/{name}\0").bytes());
        bytes.extend(format!("/{folder}/other-{name}\0").bytes());
    }
    bytes
}

/// The platforms that differ: where the libraries and programs are, and under which root they are
/// found.
#[test]
#[expect(clippy::too_many_lines, reason = "a table of platforms")]
fn drivers_are_found_on_every_known_platform() {
    struct Platform {
        name: &'static str,
        root: &'static str,
        libraries: &'static str,
        programs: &'static str,
    }
    let platforms = [
        Platform {
            name: "Ubuntu",
            root: "/",
            libraries: "usr/lib/x86_64-linux-gnu",
            programs: "usr/bin",
        },
        Platform {
            name: "Red Hat",
            root: "/",
            libraries: "usr/lib64",
            programs: "usr/bin",
        },
        Platform {
            name: "Ubuntu on Arm",
            root: "/",
            libraries: "usr/lib/aarch64-linux-gnu",
            programs: "usr/bin",
        },
        Platform {
            name: "GPU Operator",
            root: "/run/nvidia/driver",
            libraries: "usr/lib64",
            programs: "usr/bin",
        },
        Platform {
            name: "GKE",
            root: "/home/kubernetes/bin/nvidia",
            libraries: "lib64",
            programs: "bin",
        },
        Platform {
            name: "Flatcar",
            root: "/opt/nvidia/current",
            libraries: "usr/lib",
            programs: "usr/bin",
        },
        Platform {
            name: "Talos",
            root: "/",
            libraries: "usr/local/glibc/usr/lib",
            programs: "usr/local/bin",
        },
        Platform {
            name: "Talos from 1.13 on",
            root: "/",
            libraries: "usr/local/lib",
            programs: "usr/local/bin",
        },
        Platform {
            name: "NixOS",
            root: "/",
            libraries: "run/opengl-driver/lib",
            programs: "run/current-system/sw/bin",
        },
        Platform {
            name: "a distribution that is not known, by its loader's cache",
            root: "/",
            libraries: "opt/vendor/gpu/lib",
            programs: "usr/bin",
        },
        Platform {
            name: "Bottlerocket",
            root: "/",
            libraries: "usr/lib/nvidia/tesla",
            programs: "usr/libexec/nvidia/tesla/bin",
        },
    ];
    for platform in platforms {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join(platform.root.trim_start_matches('/'));
        for name in ["libnvidia-ml", "libcuda"] {
            library(
                &below,
                &format!("{}/{name}.so.580.95.05", platform.libraries),
                &format!("{name}.so.1"),
            );
            link(
                &below,
                &format!("{}/{name}.so.1", platform.libraries),
                &format!("{name}.so.580.95.05"),
            );
        }
        write(&below, &format!("{}/nvidia-smi", platform.programs), b"");
        if platform.name.contains("cache") {
            let names = ["libnvidia-ml.so.1", "libcuda.so.1"];
            write(
                &below,
                "etc/ld.so.cache",
                &cache(platform.libraries, &names),
            );
        }
        let host = HostRoot::under(dir.path());
        let driver =
            find_driver(&host, None).unwrap_or_else(|error| panic!("{}: {error}", platform.name));
        assert_eq!(
            driver.root.host(),
            Path::new(platform.root),
            "{}",
            platform.name
        );
        assert_eq!(driver.version, "580.95.05");
        let nvml = format!("{}/libnvidia-ml.so.580.95.05", platform.libraries);
        assert_eq!(driver.nvml_library, below.join(nvml), "{}", platform.name);
        assert_eq!(
            driver.nvidia_smi,
            Some(below.join(platform.programs).join("nvidia-smi")),
            "{}",
            platform.name
        );
        assert_eq!(
            driver_files(&host, &driver).unwrap().libraries.len(),
            2,
            "{}",
            platform.name
        );
    }
}

#[test]
fn links_are_followed_inside_the_root_even_when_absolute_or_leading_up() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    library(
        &root,
        "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.525.147.05",
        "libcuda.so.1",
    );
    link(
        &root,
        "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
        "libcuda.so.525.147.05",
    );
    link(
        &root,
        "etc/alternatives/libcuda",
        "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
    );
    link(
        &root,
        "usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/etc/alternatives/libcuda",
    );
    link(&root, "lib", "../../../usr/lib");
    link(&root, "loop", "loop");
    let root = DriverRoot::new(root, "/run/nvidia/driver");
    let resolved = |path: &str| root.resolve(Path::new(path)).unwrap();
    let expected = "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.525.147.05";
    assert_eq!(
        resolved("/lib/x86_64-linux-gnu/libcuda.so.1"),
        Some(expected.into())
    );
    assert_eq!(resolved("loop/x"), None);
    assert_eq!(resolved("usr/nothing"), None);
    assert_eq!(
        root.host_path(Path::new(expected)),
        Path::new("/run/nvidia/driver").join(expected)
    );
}

/// Paths that installers on the host write, and that the plugin sees: the host is below another
/// folder than `/`.
#[test]
fn absolute_links_of_the_host_are_followed_on_the_host() {
    let cases = [
        (
            "/opt/nvidia/580.95.05",
            "/opt/nvidia/current",
            [("opt/nvidia/current", "/opt/nvidia/580.95.05")],
        ),
        (
            "/run/nvidia/driver",
            "/var/run/nvidia/driver",
            [("var/run", "/run")],
        ),
        // A link to a link, and up.
        (
            "/srv/driver",
            "/opt/nvidia/current/x/../driver",
            [("opt/nvidia/current", "../../srv")],
        ),
    ];
    for (real, named, links) in cases {
        let mut fixture = two_gpus();
        fixture.driver_root = real.into();
        let (made, dir) = host(&fixture);
        for (path, target) in links {
            link(dir.path(), path, target);
        }
        fs_err::create_dir_all(dir.path().join("srv/x")).unwrap();
        let driver = find_driver(&made.host, Some(Path::new(named))).unwrap();
        assert_eq!(driver.root.host(), Path::new(real), "{named}");
        let files = driver_files(&made.host, &driver).unwrap();
        assert!(files.libraries[0].file.host.starts_with(real), "{named}");
    }
}

/// An installer on the host links files of the folder by their whole names.
#[test]
fn links_that_name_the_drivers_folder_on_the_host_are_followed_in_it() {
    let mut fixture = two_gpus();
    fixture.driver_root = "/opt/nvidia/current".into();
    let (made, dir) = host(&fixture);
    let folder = "/opt/nvidia/current/usr/lib/x86_64-linux-gnu";
    let name = format!("{folder}/libcuda.so.1");
    fs_err::remove_file(dir.path().join(name.trim_start_matches('/'))).unwrap();
    link(dir.path(), &name, &format!("{folder}/libcuda.so.580.95.05"));
    let driver = find_driver(&made.host, Some(Path::new("/opt/nvidia/current"))).unwrap();
    assert_eq!(driver.version, "580.95.05");
}

/// Debian's alternatives: all libraries below `nvidia/tesla`, and none beside it.
#[test]
fn debians_tesla_driver_is_found_by_the_loaders_cache() {
    let dir = tempfile::tempdir().unwrap();
    let lib = "usr/lib/x86_64-linux-gnu";
    let tesla = format!("{lib}/nvidia/tesla");
    for name in ["libnvidia-ml", "libcuda"] {
        let full = format!("{name}.so.535.216.01");
        library(
            dir.path(),
            &format!("{tesla}/{full}"),
            &format!("{name}.so.1"),
        );
        link(dir.path(), &format!("{tesla}/{name}.so.1"), &full);
    }
    let beside = format!("{lib}/libnvidia-cfg.so.535.216.01");
    library(dir.path(), &beside, "libnvidia-cfg.so.1");
    // The first entry is of a 32-bit library.
    let mut narrow = minimal_library("libcuda.so.1");
    narrow[4] = 1;
    write(dir.path(), "usr/lib/i386/libcuda.so.1", &narrow);
    let names = ["libnvidia-ml.so.1", "libcuda.so.1"];
    write(dir.path(), "etc/ld.so.cache", &cache(&tesla, &names));
    let host = HostRoot::under(dir.path());
    let driver = find_driver(&host, None).unwrap();
    assert_eq!(driver.version, "535.216.01");
    assert_eq!(driver_files(&host, &driver).unwrap().libraries.len(), 3);
}

/// Debian has packages of one branch beside those of the current driver. Alternatives lead to the
/// libraries that programs link with, the others are in the folder above.
#[test]
fn debians_drivers_of_one_branch_have_all_of_their_libraries() {
    const LIB: &str = "usr/lib/x86_64-linux-gnu";
    let put = |root: &Path, folder: &str, name: &str, version: &str| {
        let full = format!("{name}.so.{version}");
        library(root, &format!("{folder}/{full}"), &format!("{name}.so.1"));
        link(root, &format!("{folder}/{name}.so.1"), &full);
    };
    let found = |root: &Path| -> Vec<String> {
        let host = HostRoot::under(root);
        let driver = find_driver(&host, None).unwrap();
        assert_eq!(driver.version, "535.274.02");
        let libraries = driver_files(&host, &driver).unwrap().libraries.into_iter();
        libraries
            .map(|one| one.file.host.rsplit('/').next().unwrap().to_owned())
            .collect()
    };
    let all = ["libcuda", "libnvidia-ml", "libnvidia-rtcore"];
    let expected = all.map(|name| format!("{name}.so.535.274.02"));
    for flavour in ["tesla-535", "legacy-390xx", "current", "tesla"] {
        for (linked, split) in [(true, true), (false, true), (true, false)] {
            let dir = tempfile::tempdir().unwrap();
            let below = format!("{LIB}/nvidia/{flavour}");
            for name in all {
                // Where all is the other way round, the libraries to link with are above.
                let rare = name == "libnvidia-rtcore";
                let folder = if rare == split { LIB } else { &below };
                put(dir.path(), folder, name, "535.274.02");
                let alternative = format!("etc/alternatives/{name}.so.1");
                if linked && folder == below && !rare {
                    let target = format!("/{below}/{name}.so.1");
                    link(dir.path(), &alternative, &target);
                    let link_to = format!("/{alternative}");
                    link(dir.path(), &format!("{LIB}/{name}.so.1"), &link_to);
                }
            }
            // Folders of others.
            put(
                dir.path(),
                &format!("{LIB}/nvidia/xorg"),
                "libglxserver_nvidia",
                "535.274.02",
            );
            put(
                dir.path(),
                &format!("{LIB}/nvidia/tesla-470"),
                "libnvidia-tls",
                "470.256.02",
            );
            assert_eq!(found(dir.path()), expected, "{flavour} {linked} {split}");
        }
    }
}

#[test]
fn a_file_where_a_folder_is_looked_for_hides_no_other_folder() {
    let (made, dir) = host(&two_gpus());
    write(dir.path(), "usr/lib64", b"");
    assert_eq!(find_driver(&made.host, None).unwrap().version, "580.95.05");
    let root = DriverRoot::new(dir.path(), "/");
    let below = root.resolve(Path::new("usr/lib64/libcuda.so.1"));
    assert_eq!(below.unwrap(), None);
}

#[test]
fn platforms_that_are_not_supported_are_named() {
    for (mark, platform) in [
        ("usr/lib/wsl/lib/libnvidia-ml.so.1", "WSL2"),
        ("etc/nv_tegra_release", "NVIDIA Jetson"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), mark, b"");
        let error = find_driver(&HostRoot::under(dir.path()), None).unwrap_err();
        let expected = format!(
            "no usable NVIDIA driver found: /: it holds the driver of {platform}, which divvy does not support"
        );
        assert!(error.to_string().starts_with(&expected), "{error}");
        // A driver that is usable there is used.
        let (made, dir) = host(&two_gpus());
        write(dir.path(), mark, b"");
        find_driver(&made.host, None).unwrap();
    }
}

/// In a container on such a machine the libraries are where its toolkit puts them.
#[test]
fn platforms_that_only_the_loaders_cache_shows_are_named() {
    for (folder, libraries, platform) in [
        (
            "usr/lib/wsl/drivers/nv_dispi.inf_amd64_0123",
            &["libnvidia-ml.so.1", "libcuda.so.1"][..],
            Some("WSL2"),
        ),
        ("usr/lib/x86_64-linux-gnu", &["libdxcore.so"], Some("WSL2")),
        (
            "usr/lib/aarch64-linux-gnu/tegra",
            &["libcuda.so.1"],
            Some("NVIDIA Jetson"),
        ),
        (
            "usr/lib/aarch64-linux-gnu/nvidia",
            &["libcuda.so.1", "libnvrm_gpu.so"],
            Some("NVIDIA Jetson"),
        ),
        // A folder whose name only begins so, and libraries that are not there.
        ("opt/wslx/lib", &["libnvidia-ml.so.1"], None),
        ("", &["libnvrm_gpu.so"], None),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let there = libraries.iter().filter(|_| !folder.is_empty());
        for name in there {
            write(dir.path(), &format!("{folder}/{name}"), b"");
        }
        write(dir.path(), "etc/ld.so.cache", &cache(folder, libraries));
        let error = find_driver(&HostRoot::under(dir.path()), None).unwrap_err();
        let said = error.to_string();
        match platform {
            Some(platform) => {
                let expected = format!("/: it holds the driver of {platform}, which");
                assert!(said.contains(&expected), "{said}");
            }
            None => assert!(!said.contains("does not support"), "{said}"),
        }
    }
}

#[test]
fn a_relative_root_is_refused_with_what_is_wanted() {
    let (made, _dir) = host(&two_gpus());
    let error = find_driver(&made.host, Some(Path::new("root"))).unwrap_err();
    assert!(
        error.to_string().starts_with(
            "no usable NVIDIA driver found: root: the path is not absolute (give it from /, as the host names it); correct --driver-root"
        ),
        "{error}"
    );
}

#[test]
fn the_root_whose_libraries_match_the_loaded_module_is_taken() {
    let mut fixture = two_gpus();
    fixture.driver_root = "/run/nvidia/driver".into();
    let (made, dir) = host(&fixture);
    // Left behind by an earlier installation on the host itself.
    let old = Fixture {
        driver_version: "535.161.08".into(),
        ..Fixture::new(Vec::new())
    };
    let elsewhere = tempfile::tempdir().unwrap();
    old.build(elsewhere.path()).unwrap();
    fs_err::create_dir_all(dir.path().join("usr/lib")).unwrap();
    fs_err::rename(
        elsewhere.path().join("usr/lib/x86_64-linux-gnu"),
        dir.path().join("usr/lib/x86_64-linux-gnu"),
    )
    .unwrap();

    let driver = find_driver(&made.host, None).unwrap();
    assert_eq!(
        (driver.root.host(), driver.version.as_str()),
        (Path::new("/run/nvidia/driver"), "580.95.05")
    );
    let error = find_driver(&made.host, Some(Path::new("/")))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(
            "no usable NVIDIA driver found: /: its libraries are of version 535.161.08, but the loaded kernel module is 580.95.05 (reload the module or reboot);"
        ),
        "{error}"
    );
}

#[test]
fn a_driver_folder_mounted_apart_from_the_hosts_root_keeps_the_hosts_name() {
    let (made, dir) = host(&two_gpus());
    let root = DriverRoot::new(dir.path(), "/run/nvidia/driver");
    let driver = find_driver_at(&made.host, root).unwrap();
    let files = driver_files(&made.host, &driver).unwrap();
    assert_eq!(
        files.libraries[0].file.host,
        "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"
    );
}

#[test]
fn when_none_fits_each_root_has_its_reason_and_the_setting_is_named() {
    let dir = tempfile::tempdir().unwrap();
    fs_err::create_dir_all(dir.path().join("run/nvidia/driver")).unwrap();
    library(
        &dir.path().join("opt/nvidia/current"),
        "usr/lib/libnvidia-ml.so.1",
        "libnvidia-ml.so.1",
    );
    library(
        &dir.path().join("opt/nvidia/current"),
        "usr/lib/libcuda.so.1",
        "libcuda.so.1",
    );
    let error = find_driver(&HostRoot::under(dir.path()), None).unwrap_err();
    assert_eq!(
        chain(&error),
        "no usable NVIDIA driver found: /: no library folder has libnvidia-ml.so.1; \
         /run/nvidia/driver: the folder is empty (a driver container may still be installing); \
         /home/kubernetes/bin/nvidia: the folder does not exist; \
         /opt/nvidia/current: /opt/nvidia/current/usr/lib/libnvidia-ml.so.1 does not lead to a file whose name ends in a driver version; \
         /var/lib/nvidia: the folder does not exist; \
         library folders looked in, below each: usr/lib64, usr/lib/x86_64-linux-gnu, usr/lib/aarch64-linux-gnu, \
         usr/lib/x86_64-linux-gnu/nvidia/current, usr/lib/aarch64-linux-gnu/nvidia/current, lib64, lib/x86_64-linux-gnu, \
         lib/aarch64-linux-gnu, usr/lib64/nvidia, usr/lib/nvidia/tesla, usr/local/nvidia/lib64, usr/local/glibc/usr/lib, \
         usr/local/glibc/lib, usr/local/lib, run/opengl-driver/lib, usr/lib, lib, and those in its etc/ld.so.cache; \
         set --driver-root (chart value driverRoot) to the folder that holds the driver; known ones are \
         / (installed on the host), /run/nvidia/driver (GPU Operator), /home/kubernetes/bin/nvidia (GKE), /opt/nvidia/current (Flatcar)"
    );
}

#[test]
fn a_root_that_was_set_is_the_only_one_tried() {
    let (made, _dir) = host(&two_gpus());
    let error = find_driver(&made.host, Some(Path::new("/opt/driver"))).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no usable NVIDIA driver found: /opt/driver: the folder does not exist; correct --driver-root (chart value driverRoot), \
         or leave it empty to try / (installed on the host), /run/nvidia/driver (GPU Operator), \
         /home/kubernetes/bin/nvidia (GKE), /opt/nvidia/current (Flatcar)"
    );
}

#[test]
fn an_upgraded_driver_is_found_with_its_new_files_only() {
    let (made, dir) = host(&two_gpus());
    assert_eq!(
        find_driver_at(&made.host, made.driver_root.clone())
            .unwrap()
            .version,
        "580.95.05"
    );
    let upgraded = Fixture {
        driver_version: "595.71.05".into(),
        ..two_gpus()
    }
    .build(dir.path())
    .unwrap();
    let driver = find_driver_at(&upgraded.host, upgraded.driver_root).unwrap();
    assert_eq!(driver.version, "595.71.05");
    let files = driver_files(&upgraded.host, &driver).unwrap();
    assert!(
        files
            .libraries
            .iter()
            .all(|library| library.file.host.ends_with(".so.595.71.05")),
        "{files:?}"
    );
    assert!(
        files
            .libraries
            .iter()
            .all(|library| Path::new(&library.file.host).is_file()),
        "{files:?}"
    );
}
