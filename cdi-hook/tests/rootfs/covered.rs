//! Volumes of the pod where the driver's libraries or the loader's files are: they are not written
//! to, and the libraries are found all the same.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use std::path::Path;

use divvy_host::fixture::minimal_library;

use super::common::{Container, Outcome, namespaces_allowed, sh};
use super::mounts::{MUSL, Volume, under_a_volume};
use super::{LIB, LINKS, UPDATE, cuda, with_driver, with_glibc};

const INSTEAD: &str = "/usr/lib/divvy";
const FILE: &str = "libcuda.so.580.95.05";

/// Calls the hook where a volume is mounted at `place`, and in it the driver's library.
fn in_a_volume(container: &Container, volume: &Path, place: &str, calls: &[&[&str]]) -> Outcome {
    let library = container.bundle().join(FILE);
    fs_err::write(&library, minimal_library("libcuda.so.1")).unwrap();
    fs_err::create_dir_all(container.path(place)).unwrap();
    let calls: Vec<_> = calls
        .iter()
        .map(|call| container.command_line(call))
        .collect();
    sh(&format!(
        "unshare -Urm sh -ec 'mount --bind {} {}; mkdir -p {lib}; touch {lib}/{FILE}; \
         mount --bind {} {lib}/{FILE}; {}'",
        volume.display(),
        container.path(place).display(),
        library.display(),
        calls.join(" && "),
        lib = container.path(LIB).display(),
    ))
}

#[test]
fn libraries_in_a_volume_have_their_names_in_another_folder() {
    if !namespaces_allowed() {
        return;
    }
    for place in ["/usr/local/nvidia", LIB] {
        let container = with_glibc();
        let volume = Volume::with("own.so", b"");
        in_a_volume(&container, volume.path(), place, &[&LINKS, &UPDATE]).ok();
        assert_eq!(container.names(INSTEAD), ["libcuda.so", "libcuda.so.1"]);
        let to = |name: &str| container.read_link(&format!("{INSTEAD}/{name}"));
        assert_eq!(to("libcuda.so"), "libcuda.so.1");
        assert_eq!(to("libcuda.so.1"), format!("{LIB}/{FILE}"));
        let cache = fs_err::read(container.path("/etc/ld.so.cache")).unwrap();
        let cache = String::from_utf8_lossy(&cache).into_owned();
        for path in [
            format!("{INSTEAD}/libcuda.so"),
            format!("{INSTEAD}/libcuda.so.1"),
            format!("{LIB}/{FILE}"),
        ] {
            assert!(cache.contains(&format!("{path}\0")), "{path}");
        }
        let conf = container.read("/etc/ld.so.conf");
        assert!(conf.contains(&format!("{INSTEAD}\n{LIB}\n")), "{conf}");
        // In the volume there is what the runtime made, and nothing else.
        let left = sh(&format!(
            "find {} -name 'lib*.so*'",
            volume.path().display()
        ));
        assert_eq!(left.stdout.lines().count(), 1, "{}", left.stdout);
    }
}

/// An image of a newer CUDA has its own libraries first, there as well.
#[test]
fn an_images_newer_libraries_win_also_beside_a_volume() {
    if !namespaces_allowed() {
        return;
    }
    let container = with_glibc();
    let newer = "/usr/local/cuda/compat/libcuda.so.590.1";
    container.write(newer, &minimal_library("libcuda.so.1"));
    container.link("/usr/local/cuda/compat/libcuda.so.1", "libcuda.so.590.1");
    let volume = Volume::with("own", b"");
    let calls: [&[&str]; 3] = [&LINKS, &cuda::COMPAT, &UPDATE];
    in_a_volume(&container, volume.path(), "/usr/local/nvidia", &calls).ok();
    let to = container.read_link(&format!("{INSTEAD}/libcuda.so.1"));
    assert_eq!(to, "/usr/local/cuda/compat/libcuda.so.1");
}

/// Names for programs of graphics are not searched by a loader.
#[test]
fn a_name_in_a_folder_of_its_own_is_left_out_in_a_volume() {
    if !namespaces_allowed() {
        return;
    }
    let container = with_glibc();
    let volume = Volume::with("own", b"");
    let link = format!("../libnvidia-allocator.so.1::{LIB}/gbm/nvidia-drm_gbm.so");
    let call = ["create-symlinks", "--link", &link];
    let out = in_a_volume(&container, volume.path(), LIB, &[&call]);
    assert!(out.success && out.stderr.contains("left out"), "{out:?}");
    assert!(!container.path(INSTEAD).exists());
}

/// Whatever its programs have in `LD_LIBRARY_PATH`.
#[test]
fn a_volume_at_etc_leaves_links_where_the_loader_searches_last() {
    if !namespaces_allowed() {
        return;
    }
    let (triplet, other) = if cfg!(target_arch = "aarch64") {
        ("/usr/lib/aarch64-linux-gnu", "/usr/lib64")
    } else {
        ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")
    };
    for (folders, expected) in [
        (vec![triplet], vec![triplet]),
        (vec![other, triplet], vec![other, triplet]),
        (vec![], vec!["/usr/lib"]),
    ] {
        for is_closed in [false, true] {
            let container = with_glibc();
            for folder in &folders {
                fs_err::create_dir_all(container.path(folder)).unwrap();
            }
            let volume = Volume::with("passwd", b"");
            let out = under_a_volume(&container, volume.path(), "/etc", is_closed, &UPDATE);
            assert!(out.success, "{}", out.stderr);
            assert!(out.stderr.contains("left out"), "{}", out.stderr);
            for folder in &expected {
                let to = container.read_link(&format!("{folder}/{FILE}"));
                assert_eq!(to, format!("{LIB}/{FILE}"));
            }
            assert_eq!(fs_err::read_dir(volume.path()).unwrap().count(), 1);
        }
    }
    // musl searches another folder.
    let container = with_driver();
    container.write(MUSL.0, b"");
    fs_err::create_dir_all(container.path(other)).unwrap();
    let volume = Volume::with("passwd", b"");
    under_a_volume(&container, volume.path(), "/etc", true, &UPDATE).ok();
    assert_eq!(container.names("/usr/lib"), [FILE]);
}

/// Nothing is left to be written to: the container does not start, and its volumes are as they
/// were. Programs that search the driver's folder need none of it.
#[test]
fn volumes_in_all_places_are_not_written_to_and_said() {
    if !namespaces_allowed() {
        return;
    }
    for (path, status) in [
        (String::new(), 75),
        (format!("{LIB}64:/opt{LIB}"), 75),
        (format!("/usr/local/nvidia/lib:{LIB}/"), 0),
    ] {
        let container = with_glibc();
        container.set_env(&[&format!("LD_LIBRARY_PATH={path}")]);
        let volumes = ["/etc", "/usr/lib"].map(|place| (place, Volume::with("own", b"")));
        let mut lines = Vec::new();
        for (place, volume) in &volumes {
            let (from, to) = (volume.path().display(), container.path(place));
            fs_err::create_dir_all(&to).unwrap();
            lines.push(format!("mount --bind {from} {}", to.display()));
        }
        lines.push(container.command_line(&UPDATE));
        let out = sh(&format!("unshare -Urm sh -ec '{}'", lines.join("\n")));
        assert_eq!(out.status, status, "{path}: {}", out.stderr);
        assert!(out.stderr.contains("a volume is mounted there"), "{path}");
        for (place, volume) in &volumes {
            let left = fs_err::read_dir(volume.path()).unwrap().count();
            assert_eq!(left, 1, "{place}");
        }
    }
    // And where the names of libraries go: the volume covers both folders.
    let container = with_glibc();
    let usr = Volume::with("own", b"");
    let out = under_a_volume(&container, usr.path(), "/usr", false, &LINKS);
    assert_eq!(out.status, 75, "{}", out.stderr);
    assert_eq!(fs_err::read_dir(usr.path()).unwrap().count(), 1);
}
