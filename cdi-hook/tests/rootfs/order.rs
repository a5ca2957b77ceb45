//! The order in which the machine's real `ldconfig` finds libraries after the hook.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use std::process::Command;

use super::common::{Container, namespaces_allowed, sh, skipped};
use super::{LIB, LINKS, UPDATE, cuda, with_glibc};
use divvy_host::fixture::minimal_library;

const COMPAT: &str = "/usr/local/cuda-12.9/compat";
const CUDA: &str = "libcuda.so.1";

/// Names of the files by which an image enters its own libraries: of vLLM and Triton, and such as
/// are sorted before and after any other. An image here has all of them.
const NAMES: [&str; 7] = [
    "00-cuda-compat.conf",
    "000_cuda.conf",
    "-x.conf",
    "!.conf",
    "00-divvy.conf",
    "cuda-compat.conf",
    "~.conf",
];

/// Texts of `/etc/ld.so.conf`; `@` stands for the image's folder.
const LAYOUTS: [&str; 13] = [
    "include /etc/ld.so.conf.d/*.conf\n",
    "include ld.so.conf.d/*.conf",
    "@\ninclude /etc/ld.so.conf.d/*.conf\n",
    "/opt/a\n@\n/opt/b\ninclude ld.so.conf.d/*.conf\n",
    "include /etc/other.d/*.conf\ninclude /etc/ld.so.conf.d/*.conf\n",
    "include /etc/other.d/*.conf /etc/ld.so.conf.d/*.conf\n",
    "include /etc/nested.conf\n",
    "include /etc/ld.so.conf.d/!.conf\n",
    "# include /etc/ld.so.conf.d/*.conf\n@\n",
    "\n\t@ # its own\r\ninclude /etc/ld.so.conf.d/*.conf\r\n",
    "@\n/usr/local/nvidia/lib64\n",
    "@",
    "",
];

/// Makes an image with a driver of its own in `/usr/local/cuda/compat` and in a default folder, and
/// with this configuration of the loader.
fn image(layout: &str, version: &str) -> Container {
    let container = with_glibc();
    let own = minimal_library(CUDA);
    for folder in [COMPAT, "/usr/lib"] {
        container.write(&format!("{folder}/libcuda.so.{version}"), &own);
        container.link(
            &format!("{folder}/{CUDA}"),
            &format!("libcuda.so.{version}"),
        );
    }
    container.link("/usr/local/cuda", "cuda-12.9");
    container.write("/etc/ld.so.conf", layout.replace('@', COMPAT).as_bytes());
    container.write("/etc/nested.conf", b"include /etc/ld.so.conf.d/*.conf\n");
    for folder in ["ld.so.conf.d", "other.d"] {
        for name in NAMES {
            let text = format!("{COMPAT}\n");
            container.write(&format!("/etc/{folder}/{name}"), text.as_bytes());
        }
    }
    fs_err::create_dir_all(container.path("/var/cache/ldconfig")).unwrap();
    container
}

/// Runs `ldconfig` as in the container.
fn ldconfig(container: &Container) {
    let root = container.path("/");
    sh(&format!("unshare -Ur /sbin/ldconfig -r {}", root.display())).ok();
}

/// Returns the path that the loader takes for the library.
fn first(container: &Container) -> String {
    let listing = Command::new("/sbin/ldconfig")
        .args(["-p", "-C"])
        .arg(container.path("/etc/ld.so.cache"))
        .output()
        .unwrap();
    let listing = String::from_utf8(listing.stdout).unwrap();
    let line = listing.lines().map(str::trim);
    let mut lines = line.filter(|line| line.starts_with(&format!("{CUDA} ")));
    let path = lines
        .next()
        .and_then(|line| Some(line.split_once("=> ")?.1.to_owned()));
    path.unwrap_or_default()
}

fn can_run() -> bool {
    if !std::path::Path::new("/sbin/ldconfig").exists() {
        skipped("there is no ldconfig");
        return false;
    }
    namespaces_allowed()
}

fn hook(container: &Container) {
    for arguments in [&LINKS[..], &cuda::COMPAT, &UPDATE] {
        container.run(arguments).ok();
    }
}

/// CUDA fails with error 803 if it gets the libraries of an older driver than the kernel's.
#[test]
fn the_hosts_libraries_are_first_after_an_ldconfig_in_any_image() {
    if !can_run() {
        return;
    }
    let expected = format!("{LIB}/{CUDA}");
    for layout in LAYOUTS {
        let container = image(layout, "575.57.08");
        ldconfig(&container);
        assert!(!first(&container).starts_with(LIB), "{layout:?}");
        hook(&container);
        assert_eq!(first(&container), expected, "{layout:?}");
        // The hook again, as for another container of the same layer, and a package manager.
        for _ in 0..2 {
            ldconfig(&container);
            assert_eq!(first(&container), expected, "{layout:?}: ldconfig");
            hook(&container);
        }
        let text = container.read("/etc/ld.so.conf");
        assert_eq!(text.matches("# by divvy").count(), 1, "{layout:?}");
        let host = container.read_link(&format!("{LIB}/{CUDA}"));
        assert_eq!(host, "libcuda.so.580.95.05", "{layout:?}");
    }
}

#[test]
fn newer_libraries_of_the_image_stay_its_choice_after_an_ldconfig() {
    if !can_run() {
        return;
    }
    let container = image(LAYOUTS[0], "590.44.01");
    hook(&container);
    for _ in 0..2 {
        let name = container.read_link(&format!("{LIB}/{CUDA}"));
        assert!(
            name == format!("/usr/local/cuda/compat/{CUDA}") || name == "libcuda.so.590.44.01",
            "{name}"
        );
        assert_eq!(first(&container), format!("{LIB}/{CUDA}"));
        ldconfig(&container);
    }
}

/// An image of a distribution without a configuration, or without `/etc`.
#[test]
fn an_image_without_a_configuration_keeps_the_libraries_after_an_ldconfig() {
    if !can_run() {
        return;
    }
    for folder in ["/etc", "/usr/share"] {
        let container = with_glibc();
        fs_err::create_dir_all(container.path(folder)).unwrap();
        fs_err::create_dir_all(container.path("/var/cache/ldconfig")).unwrap();
        hook(&container);
        ldconfig(&container);
        assert_eq!(first(&container), format!("{LIB}/{CUDA}"), "{folder}");
    }
}
