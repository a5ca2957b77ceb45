//! Roots that are read-only when the hook is called.

use super::common::{Container, Outcome, namespaces_allowed, sh};
use super::{LIB, LINKS, UPDATE, with_glibc};

const PROFILE: [&str; 1] = ["update-application-profile"];

/// Runs the hook, and then looks whether the root is read-only, in a mount namespace in which
/// `prepare` was run; `@` stands for the root.
fn run(container: &Container, prepare: &str, steps: &[&[&str]]) -> Outcome {
    let root = container.path("/").display().to_string();
    let root = root.trim_end_matches('/');
    let calls: Vec<_> = steps
        .iter()
        .map(|step| container.command_line(step))
        .collect();
    sh(&format!(
        "unshare -Urm sh -c '{} || exit 1; {}; status=$?; touch {root}/x 2>/dev/null && echo open; \
         grep \" {root} \" /proc/self/mountinfo | tail -n1 | cut -d\" \" -f6; exit $status'",
        prepare.replace('@', root),
        calls.join(" && "),
    ))
}

/// Command that closes a root as crun before 1.26 does.
const CLOSED: &str = "mount --bind @ @ && mount -o remount,bind,ro,nosuid,noexec @";

#[test]
fn a_root_that_the_runtime_has_closed_gets_all_and_is_closed_again() {
    if !namespaces_allowed() {
        return;
    }
    let container = with_glibc();
    container.write("/dev/nvidia0", b"");
    let out = run(&container, CLOSED, &[&LINKS, &UPDATE, &PROFILE]);
    assert!(out.success, "{}", out.stderr);
    assert_eq!(out.stdout, "ro,nosuid,noexec,relatime\n");
    assert_eq!(out.stderr, "");
    assert_eq!(
        container.read_link(&format!("{LIB}/libcuda.so")),
        "libcuda.so.1"
    );
    assert_eq!(
        container.names("/etc"),
        ["ld.so.cache", "ld.so.conf", "nvidia"]
    );
}

#[test]
fn a_step_that_fails_or_is_left_out_closes_the_root_again() {
    if !namespaces_allowed() {
        return;
    }
    for (step, status) in [(&UPDATE[..], 76), (&PROFILE, 0)] {
        let container = with_glibc();
        container.write("/dev/nvidia0", b"");
        container.write("/etc/nvidia", b"no folder");
        fs_err::create_dir_all(container.path("/etc/ld.so.cache")).unwrap();
        let out = run(&container, CLOSED, &[step]);
        assert_eq!(out.status, status, "{}", out.stderr);
        assert_eq!(out.stdout, "ro,nosuid,noexec,relatime\n");
        assert!(out.stderr.contains("in the container"), "{}", out.stderr);
    }
}

/// A layer that containers share, or a medium, is not changed.
#[test]
fn a_root_that_is_read_only_for_good_stays_so_with_a_status_of_its_own() {
    if !namespaces_allowed() {
        return;
    }
    for closed in [
        // A layer in the place of the root: it is another folder of the same file system.
        "mkdir @/layer && mount --bind @/layer @ && mount -o remount,bind,ro @",
        // A file system that is read-only.
        "mount -t tmpfs layer @ && mount -o remount,ro @",
    ] {
        let container = Container::new();
        let out = run(&container, closed, &[&LINKS]);
        assert_eq!(out.status, 74, "{closed}: {}", out.stderr);
        assert!(out.stdout.starts_with("ro"), "{closed}: {}", out.stdout);
        let said = "(the image's file system is read-only; set libraryDelivery=mounts";
        assert!(out.stderr.contains(said), "{closed}: {}", out.stderr);
    }
}

/// A volume is a mount of its own: it is not opened with the root, and neither written to.
#[test]
fn volumes_in_a_closed_root_stay_as_they_are() {
    if !namespaces_allowed() {
        return;
    }
    let volume = tempfile::tempdir().unwrap();
    for (place, step, is_left_out) in [
        ("/etc/nvidia", &PROFILE[..], true),
        ("/etc", &UPDATE, true),
        ("/usr/local/nvidia", &LINKS, false),
    ] {
        let container = with_glibc();
        container.write("/dev/nvidia0", b"");
        fs_err::create_dir_all(container.path(place)).unwrap();
        let at = volume.path().display();
        let prepare =
            format!("mount --bind @ @ && mount --bind {at} @{place} && mount -o remount,bind,ro @");
        let out = run(&container, &prepare, &[step]);
        assert_eq!(out.status, 0, "{place}: {}", out.stderr);
        let said = out.stderr.contains("left out");
        assert_eq!(said, is_left_out, "{}", out.stderr);
        assert_eq!(fs_err::read_dir(volume.path()).unwrap().count(), 0);
    }
}
