//! Rights of the files and folders that the hook makes, and files that are in its way.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use std::os::unix::fs::MetadataExt;

use super::common::{Container, set_mode, sh, skipped};
use super::{LIB, LINKS, UPDATE, with_driver, with_glibc};

fn mode(container: &Container, path: &str) -> String {
    let meta = fs_err::symlink_metadata(container.path(path)).unwrap();
    format!("{:o}", meta.mode() & 0o7777)
}

#[test]
fn a_changed_file_keeps_its_mode() {
    let container = with_glibc();
    container.run(&UPDATE).ok();
    container.write("/etc/ld.so.conf", b"/opt/lib\n");
    set_mode(&container.path("/etc/ld.so.cache"), 0o600);
    set_mode(&container.path("/etc/ld.so.conf"), 0o4640);
    container.run(&UPDATE).ok();
    assert_eq!(mode(&container, "/etc/ld.so.cache"), "600");
    assert_eq!(mode(&container, "/etc/ld.so.conf"), "640");
    assert!(container.read("/etc/ld.so.conf").ends_with("/opt/lib\n"));

    // A link of the image to a closed file of its own.
    let container = with_glibc();
    container.write("/root/closed", b"password\n");
    set_mode(&container.path("/root/closed"), 0o600);
    container.link("/etc/ld.so.conf", "../root/closed");
    container.run(&UPDATE).ok();
    assert_eq!(mode(&container, "/etc/ld.so.conf"), "600");

    let (loader, path) = if cfg!(target_arch = "aarch64") {
        ("/lib/ld-musl-aarch64.so.1", "/etc/ld-musl-aarch64.path")
    } else {
        ("/lib/ld-musl-x86_64.so.1", "/etc/ld-musl-x86_64.path")
    };
    let container = with_driver();
    container.write(loader, b"");
    container.write(path, b"/lib\n");
    set_mode(&container.path(path), 0o640);
    container.run(&UPDATE).ok();
    assert_eq!(mode(&container, path), "640");
}

#[test]
fn a_changed_file_keeps_its_owner() {
    let container = with_glibc();
    container.write("/etc/ld.so.conf", b"/opt/lib\n");
    let path = container.path("/etc/ld.so.conf");
    if std::os::unix::fs::chown(&path, Some(1000), Some(1001)).is_err() {
        skipped("only root can give a file to another user");
        return;
    }
    set_mode(&path, 0o640);
    container.run(&UPDATE).ok();
    let meta = fs_err::metadata(&path).unwrap();
    assert_eq!(
        (meta.uid(), meta.gid(), meta.mode() & 0o7777),
        (1000, 1001, 0o640)
    );
    assert!(container.read("/etc/ld.so.conf").ends_with("/opt/lib\n"));
}

#[test]
fn modes_do_not_depend_on_the_runtimes_umask() {
    let container = with_glibc();
    for name in ["nvidia0", "nvidiactl"] {
        container.write(&format!("/dev/{name}"), b"");
    }
    let gbm = format!("../a::{LIB}/gbm/nvidia-drm_gbm.so");
    for arguments in [
        &UPDATE[..],
        &["create-symlinks", "--link", &gbm],
        &["update-application-profile"],
    ] {
        let hook = container.command_line(arguments);
        sh(&format!("umask 077; {hook}")).ok();
    }
    let gbm = format!("{LIB}/gbm");
    let profiles = "/etc/nvidia/nvidia-application-profiles-rc.d";
    for folder in ["/etc", &gbm, "/etc/nvidia", profiles] {
        assert_eq!(mode(&container, folder), "755", "{folder}");
    }
    for file in [
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        &format!("{profiles}/10-divvy.conf"),
    ] {
        assert_eq!(mode(&container, file), "644", "{file}");
    }
}

#[test]
fn a_file_under_a_temporarys_name_is_replaced_and_not_written_to() {
    let container = with_glibc();
    container.write("/data", b"the image's");
    fs_err::create_dir_all(container.path("/etc")).unwrap();
    // `exec` keeps the shell's process, so that the name can be foreseen.
    let hook = container.command_line(&UPDATE);
    let (data, etc) = (container.path("/data"), container.path("/etc"));
    let out = sh(&format!(
        "ln {} {}/.ld.so.cache.divvy-$$ && exec {hook}",
        data.display(),
        etc.display()
    ));
    out.ok();
    assert_eq!(container.read("/data"), "the image's");
    assert_eq!(container.names("/etc"), ["ld.so.cache", "ld.so.conf"]);
}

#[test]
fn a_failed_call_leaves_no_temporary_file_behind() {
    let container = with_driver();
    container.write("/dev/nvidia0", b"");
    let profiles = "/etc/nvidia/nvidia-application-profiles-rc.d";
    fs_err::create_dir_all(container.path(&format!("{profiles}/10-divvy.conf"))).unwrap();
    let out = container.run(&["update-application-profile"]);
    let expected = format!("cannot write {profiles}/10-divvy.conf");
    assert!(out.stderr.contains(&expected), "{}", out.stderr);
    assert_eq!(container.names(profiles), ["10-divvy.conf"]);

    fs_err::create_dir_all(container.path(&format!("{LIB}/libcuda.so"))).unwrap();
    let message = container.run(&LINKS).failed();
    assert!(message.contains("cannot make the link"), "{message}");
    assert_eq!(container.names(LIB), ["libcuda.so", "libcuda.so.580.95.05"]);
}
