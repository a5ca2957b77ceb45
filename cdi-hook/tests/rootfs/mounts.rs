//! Mounts in a container: the hook copies nothing out of them and writes nothing into them.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::common::{Container, Outcome, namespaces_allowed, set_mode, sh};
use super::{LIB, UPDATE, cuda, with_driver, with_glibc};
use divvy_host::fixture::minimal_library;

pub(crate) const MUSL: (&str, &str) = if cfg!(target_arch = "aarch64") {
    ("/lib/ld-musl-aarch64.so.1", "/etc/ld-musl-aarch64.path")
} else {
    ("/lib/ld-musl-x86_64.so.1", "/etc/ld-musl-x86_64.path")
};

/// Volume of a pod, mounted at `/vol`: a folder that only root may enter.
pub(crate) struct Volume(tempfile::TempDir);

impl Volume {
    pub(crate) fn with(name: &str, bytes: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join(name), bytes).unwrap();
        set_mode(&dir.path().join(name), 0o600);
        set_mode(dir.path(), 0o700);
        Self(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Runs the hook in a mount namespace where the volume and `/proc` are mounted, as they are
    /// when a runtime calls `createContainer` hooks.
    fn run(&self, container: &Container, arguments: &[&str]) -> Outcome {
        for folder in ["/vol", "/proc"] {
            fs_err::create_dir_all(container.path(folder)).unwrap();
        }
        sh(&format!(
            "unshare -Urm sh -c 'mount --rbind /proc {} && mount --bind {} {} && {}'",
            container.path("/proc").display(),
            self.path().display(),
            container.path("/vol").display(),
            container.command_line(arguments)
        ))
    }
}

/// Returns a file of the image; nothing if a link is in its place, which would be followed here.
fn copied(container: &Container, path: &str) -> Vec<u8> {
    let path = container.path(path);
    match fs_err::symlink_metadata(&path) {
        Ok(meta) if meta.is_file() => fs_err::read(path).unwrap(),
        _ => Vec::new(),
    }
}

fn has(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|part| part == text.as_bytes())
}

#[test]
fn no_configuration_is_copied_from_a_mount() {
    if !namespaces_allowed() {
        return;
    }
    let volume = Volume::with("secret", b"/for/root/only\n");
    for (target, content) in [
        ("/vol/secret", "/for/root/only"),
        ("../data/secret", "/for/root/only"),
        ("/proc/version", "Linux"),
        ("/proc/self/root/proc/version", "Linux"),
    ] {
        let container = with_glibc();
        container.link("/data", "/vol");
        container.link("/etc/ld.so.conf", target);
        volume.run(&container, &UPDATE).ok();
        let text = copied(&container, "/etc/ld.so.conf");
        assert!(!has(&text, content), "{target}");
        // Only `ldconfig` needs it: the container starts, with its libraries in the cache.
        assert_eq!(container.read_link("/etc/ld.so.conf"), target);
        assert!(has(&copied(&container, "/etc/ld.so.cache"), LIB));
    }
}

#[test]
fn no_cache_is_copied_from_a_mount() {
    if !namespaces_allowed() {
        return;
    }
    // A cache that is valid, of an image with a library of its own.
    let other = with_glibc();
    let secret = "/usr/local/nvidia/lib64/libsecret.so.1";
    other.write(secret, &minimal_library("libsecret.so.1"));
    other.run(&UPDATE).ok();
    let cache = fs_err::read(other.path("/etc/ld.so.cache")).unwrap();
    assert!(has(&cache, secret));
    let volume = Volume::with("cache", &cache);
    let container = with_glibc();
    container.link("/etc/ld.so.cache", "/vol/cache");
    volume.run(&container, &UPDATE).ok();
    assert_eq!(container.read_link("/etc/ld.so.cache"), "/vol/cache");
    assert_eq!(container.names("/usr/lib"), ["libcuda.so.580.95.05"]);
}

#[test]
fn no_path_file_of_musl_is_copied_from_a_mount() {
    if !namespaces_allowed() {
        return;
    }
    let volume = Volume::with("secret", b"/for/root/only\n");
    let container = with_driver();
    container.write(MUSL.0, b"");
    container.link(MUSL.1, "/vol/secret");
    volume.run(&container, &UPDATE).ok();
    assert_eq!(container.read_link(MUSL.1), "/vol/secret");
    assert_eq!(container.names("/usr/lib"), ["libcuda.so.580.95.05"]);
}

#[test]
fn names_in_a_folder_of_a_mount_are_not_copied() {
    if !namespaces_allowed() {
        return;
    }
    let library = minimal_library("libsecret.so.1");
    // In the place of the driver's libraries.
    let volume = Volume::with("libsecret.so.1", &library);
    let container = Container::new();
    container.link(LIB, "/vol");
    let message = volume.run(&container, &UPDATE).failed();
    assert!(message.contains(&format!("cannot list {LIB}")), "{message}");
    assert!(copied(&container, "/etc/ld.so.cache").is_empty());

    // In the place of compatibility libraries, whose names would become links.
    let volume = Volume::with("libcuda.so.590.1", &library);
    let container = with_driver();
    container.link("/usr/local/cuda/compat", "/vol");
    volume.run(&container, &cuda::COMPAT).ok();
    assert_eq!(container.names(LIB), ["libcuda.so.580.95.05"]);
}

#[test]
fn a_loader_in_a_mount_is_not_looked_for() {
    if !namespaces_allowed() {
        return;
    }
    let volume = Volume::with("loader", b"");
    let container = with_driver();
    container.link(MUSL.0, "/vol/loader");
    volume.run(&container, &UPDATE).ok();
    assert!(!container.path(MUSL.1).exists(), "it shows what is there");
}

#[test]
fn mounted_libraries_are_entered_under_every_name() {
    if !namespaces_allowed() {
        return;
    }
    let volume = Volume::with("libdriver.so", &minimal_library("libcuda.so.1"));
    let container = Container::new();
    container.write(&format!("{LIB}/libcuda.so.580.95.05"), b"");
    container.link(&format!("{LIB}/libcuda.so.1"), "libcuda.so.580.95.05");
    container.link(&format!("{LIB}/libcuda.so"), "libcuda.so.1");
    // Links of the image into other mounts; links in a circle.
    container.link(&format!("{LIB}/libsecret.so.1"), "/vol/libdriver.so");
    container.link(&format!("{LIB}/libsecret.so.2"), "below/libdriver.so");
    fs_err::create_dir_all(container.path(&format!("{LIB}/below"))).unwrap();
    container.link(&format!("{LIB}/libturn.so"), "libturn.so.1");
    container.link(&format!("{LIB}/libturn.so.1"), "libturn.so");
    fs_err::create_dir_all(container.path("/vol")).unwrap();
    let mounted = container.path(&format!("{LIB}/libcuda.so.580.95.05"));
    let out = sh(&format!(
        "unshare -Urm sh -c 'mount --bind {volume}/libdriver.so {} && mount --bind {volume} {} \
         && mount --bind {volume} {} && {}'",
        mounted.display(),
        container.path("/vol").display(),
        container.path(&format!("{LIB}/below")).display(),
        container.command_line(&UPDATE),
        volume = volume.path().display(),
    ));
    out.ok();
    let cache = copied(&container, "/etc/ld.so.cache");
    for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"] {
        assert!(has(&cache, &format!("{LIB}/{name}\0")), "{name}");
    }
    assert!(!has(&cache, "libsecret"));
    assert!(!has(&cache, "libturn"));
}

#[test]
fn a_configuration_that_the_pod_mounts_is_left_alone() {
    if !namespaces_allowed() {
        return;
    }
    let volume = Volume::with("ld.so.conf", b"include /etc/ld.so.conf.d/*.conf\n");
    let container = with_glibc();
    container.write("/etc/ld.so.conf", b"/image/lib\n");
    let out = sh(&format!(
        "unshare -Urm sh -c 'mount --bind {}/ld.so.conf {} && {}'",
        volume.path().display(),
        container.path("/etc/ld.so.conf").display(),
        container.command_line(&UPDATE)
    ));
    out.ok();
    assert_eq!(container.read("/etc/ld.so.conf"), "/image/lib\n");
    let text = fs_err::read_to_string(volume.path().join("ld.so.conf")).unwrap();
    assert_eq!(text, "include /etc/ld.so.conf.d/*.conf\n");
    // It includes this file, so that the libraries stay in the cache.
    let ours = container.read("/etc/ld.so.conf.d/00-divvy.conf");
    assert_eq!(ours, format!("# by divvy\n{LIB}\n"));
}

/// Runs the hook where a volume is mounted at `place`, perhaps read-only.
pub(crate) fn under_a_volume(
    container: &Container,
    volume: &Path,
    place: &str,
    is_closed: bool,
    arguments: &[&str],
) -> Outcome {
    fs_err::create_dir_all(container.path(place)).unwrap();
    let place = container.path(place);
    let place = place.display();
    let close = format!("mount -o remount,bind,ro {place}");
    sh(&format!(
        "unshare -Urm sh -c 'mount --bind {} {place} && {} && {}'",
        volume.display(),
        if is_closed { &close } else { "true" },
        container.command_line(arguments)
    ))
}

/// A ConfigMap at /etc/nvidia of a container that computes is common; the profile is for graphics.
#[test]
fn a_profile_that_a_volume_prevents_keeps_nothing_from_starting() {
    if !namespaces_allowed() {
        return;
    }
    let profiles = "/etc/nvidia/nvidia-application-profiles-rc.d";
    for place in ["/etc", "/etc/nvidia", profiles] {
        for is_closed in [false, true] {
            let volume = Volume::with("app.conf", b"");
            let container = with_glibc();
            container.write("/dev/nvidia0", b"");
            let at = volume.path();
            let profile = &["update-application-profile"];
            let out = under_a_volume(&container, at, place, is_closed, profile);
            assert!(out.success, "{place}: {}", out.stderr);
            let said = out.stderr.starts_with("divvy-cdi-hook: left out: ")
                && out.stderr.contains("EGL and Vulkan");
            assert!(said, "{place}: {}", out.stderr);
            assert_eq!(fs_err::read_dir(at).unwrap().count(), 1, "{place}");
        }
    }
}

/// An include folder of the pod: only an `ldconfig` in the container would read it.
#[test]
fn a_volume_among_the_configuration_of_ldconfig_is_in_nobodys_way() {
    if !namespaces_allowed() {
        return;
    }
    for is_closed in [false, true] {
        let volume = Volume::with("app.conf", b"/app\n");
        let container = with_glibc();
        let place = "/etc/ld.so.conf.d";
        under_a_volume(&container, volume.path(), place, is_closed, &UPDATE).ok();
        assert!(has(&copied(&container, "/etc/ld.so.cache"), LIB));
        assert_eq!(fs_err::read_dir(volume.path()).unwrap().count(), 1);
    }
}

const PARAMS: &str = "/proc/driver/nvidia/params";
const COVER: [&str; 1] = ["disable-device-node-modification"];

#[test]
fn the_drivers_setting_is_covered_and_nothing_else_is() {
    if !namespaces_allowed() {
        return;
    }
    let container = Container::new();
    container.write(PARAMS, b"ModifyDeviceFiles: 1\nDeviceFileMode: 438\n");
    container.write("/proc/driver/nvidia/version", b"580\n");
    let folder = container.path("/proc/driver/nvidia");
    let folder = folder.display();
    let hook = container.command_line(&COVER);
    // Under a umask that would close the copy to all but root, with which the driver's libraries
    // would take the setting's default.
    let out = sh(&format!(
        "umask 077; unshare -Urm sh -c '{hook} && cat {folder}/params {folder}/version \
         && {hook} && grep -c {folder} /proc/self/mounts; stat -c %a {folder}/params; \
         grep {folder} /proc/self/mounts | cut -d\" \" -f4; \
         echo x 2>/dev/null >{folder}/params || echo read-only'"
    ));
    let lines: Vec<&str> = out.stdout.lines().collect();
    assert_eq!(
        lines.get(..5).unwrap_or_default(),
        [
            "ModifyDeviceFiles: 0",
            "DeviceFileMode: 438",
            "580",
            "1",
            "444"
        ],
        "{out:?}"
    );
    let options: Vec<&str> = lines.get(5).unwrap().split(',').collect();
    for option in ["ro", "nosuid", "nodev", "noexec"] {
        assert!(options.contains(&option), "{option}: {options:?}");
    }
    assert_eq!(lines.get(6), Some(&"read-only"));
    assert_eq!(
        container.read(PARAMS),
        "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n"
    );
}

#[test]
fn a_setting_that_is_not_the_drivers_is_not_copied() {
    if !namespaces_allowed() {
        return;
    }
    let setting = b"ModifyDeviceFiles: 1\npassword: x\n";
    let run = |container: &Container| {
        let hook = container.command_line(&COVER);
        let out = sh(&format!("unshare -Urm {hook}"));
        // No GPU needs it.
        assert!(out.success, "{}", out.stderr);
        out.stderr
    };
    // An image without a /proc of the runtime leads to a file of its own.
    let container = Container::new();
    container.write("/secret", setting);
    container.link(PARAMS, "/secret");
    let message = run(&container);
    assert!(
        message.contains("(a link of the image leads in circles or stands where none may;"),
        "{message}"
    );
    // A file that others may not read would get readers.
    let container = Container::new();
    container.write(PARAMS, setting);
    set_mode(&container.path(PARAMS), 0o640);
    let message = run(&container);
    assert!(message.contains("not every user may read it"), "{message}");
    let mode = fs_err::metadata(container.path(PARAMS)).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o640);
}
