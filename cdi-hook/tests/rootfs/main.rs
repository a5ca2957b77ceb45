//! The program on root file systems in temporary folders, good and hostile.

mod common;
mod covered;
mod cuda;
mod mounts;
mod order;
mod program;
mod read_only;
mod rights;
mod runtimes;

use common::{Container, run_with, sh};
use divvy_host::fixture::minimal_library;

const LIB: &str = "/usr/local/nvidia/lib64";
const LINKS: [&str; 5] = [
    "create-symlinks",
    "--link",
    "libcuda.so.1::/usr/local/nvidia/lib64/libcuda.so",
    "--link",
    "libcuda.so.580.95.05::/usr/local/nvidia/lib64/libcuda.so.1",
];
const UPDATE: [&str; 3] = ["update-ldcache", "--folder", LIB];

/// Makes a root as the runtime leaves it: the driver's library mounted, here a plain file.
fn with_driver() -> Container {
    let container = Container::new();
    container.write(
        &format!("{LIB}/libcuda.so.580.95.05"),
        &minimal_library("libcuda.so.1"),
    );
    container
}

/// Makes the same with the loader of glibc.
fn with_glibc() -> Container {
    let container = with_driver();
    container.write("/lib64/ld-linux-x86-64.so.2", b"");
    container.write("/lib/ld-linux-aarch64.so.1", b"");
    container
}

#[test]
fn links_are_made_replaced_and_made_again() {
    let container = with_driver();
    container.link(&format!("{LIB}/libcuda.so.1"), "libcuda.so.1.stub");
    container.write(&format!("{LIB}/libcuda.so"), b"a file of the image");
    for _ in 0..2 {
        container.run(&LINKS).ok();
        assert_eq!(
            container.read_link(&format!("{LIB}/libcuda.so")),
            "libcuda.so.1"
        );
        assert_eq!(
            container.read_link(&format!("{LIB}/libcuda.so.1")),
            "libcuda.so.580.95.05"
        );
        assert_eq!(
            container.names(LIB),
            ["libcuda.so", "libcuda.so.1", "libcuda.so.580.95.05"]
        );
    }
    container
        .run(&[
            "create-symlinks",
            "--link",
            "../libnvidia-allocator.so.1::/usr/new/gbm/nvidia-drm_gbm.so",
        ])
        .ok();
    assert_eq!(
        container.read_link("/usr/new/gbm/nvidia-drm_gbm.so"),
        "../libnvidia-allocator.so.1"
    );
}

#[test]
fn several_steps_of_a_call_run_in_order_until_one_fails() {
    let container = with_glibc();
    container
        .run(&[&LINKS[..], &["then"], &UPDATE].concat())
        .ok();
    assert_eq!(
        container.read_link(&format!("{LIB}/libcuda.so.1")),
        "libcuda.so.580.95.05"
    );
    assert!(container.path("/etc/ld.so.cache").exists());
    // A folder in the place of a link: the first step fails, and the second does not run.
    let other = with_glibc();
    fs_err::create_dir_all(other.path(&format!("{LIB}/libcuda.so/x"))).unwrap();
    let said = other
        .run(&[&LINKS[..], &["then"], &UPDATE].concat())
        .failed();
    assert!(said.contains("libcuda.so"), "{said}");
    assert!(!other.path("/etc/ld.so.cache").exists());
}

#[test]
fn a_glibc_image_gets_cache_and_configuration_that_ldconfig_reads() {
    let container = with_glibc();
    container.write("/etc/ld.so.conf", b"/opt/lib\n");
    container.write(&format!("{LIB}/libnvidia-ml.so.1"), b"no library");
    container.run(&LINKS).ok();
    container.run(&UPDATE).ok();
    container.run(&UPDATE).ok();
    assert_eq!(
        container.read("/etc/ld.so.conf"),
        "# by divvy\n/usr/local/nvidia/lib64\n/opt/lib\n"
    );
    assert_eq!(container.names("/etc"), ["ld.so.cache", "ld.so.conf"]);
    let Ok(listing) = std::process::Command::new("/sbin/ldconfig")
        .args(["-p", "-C"])
        .arg(container.path("/etc/ld.so.cache"))
        .output()
    else {
        return; // a machine without glibc's tools
    };
    let listing = String::from_utf8(listing.stdout).unwrap();
    let libraries: Vec<_> = listing
        .lines()
        .filter(|line| line.contains("=>"))
        .map(str::trim)
        .collect();
    let line = |name: &str| {
        format!(
            "{name} (libc6,{}) => {LIB}/{name}",
            if cfg!(target_arch = "aarch64") {
                "AArch64"
            } else {
                "x86-64"
            }
        )
    };
    assert_eq!(
        libraries,
        [
            line("libcuda.so.580.95.05"),
            line("libcuda.so.1"),
            line("libcuda.so")
        ],
        "{listing}"
    );
}

#[test]
fn a_musl_image_gets_a_path_file_that_keeps_the_default_and_own_folders() {
    let (loader, path) = if cfg!(target_arch = "aarch64") {
        ("/lib/ld-musl-aarch64.so.1", "/etc/ld-musl-aarch64.path")
    } else {
        ("/lib/ld-musl-x86_64.so.1", "/etc/ld-musl-x86_64.path")
    };
    let container = with_driver();
    container.write(loader, b"");
    container.run(&UPDATE).ok();
    container.run(&UPDATE).ok();
    assert_eq!(
        container.read(path),
        format!("{LIB}\n/lib\n/usr/local/lib\n/usr/lib\n")
    );
    assert_eq!(container.names("/etc"), [path.trim_start_matches("/etc/")]);
    for old in ["/lib:/opt/lib", &format!("/lib:{LIB}\n/opt/lib")] {
        container.write(path, old.as_bytes());
        container.run(&UPDATE).ok();
        assert_eq!(container.read(path), format!("{LIB}\n/lib\n/opt/lib\n"));
    }
}

#[test]
fn a_container_without_driver_files_is_left_alone() {
    let container = Container::new();
    container.run(&cuda::COMPAT).ok();
    container.run(&["update-application-profile"]).ok();
    container.run(&UPDATE).ok();
    container.run(&["disable-device-node-modification"]).ok();
    assert_eq!(container.names("/"), [""; 0]);
}

#[test]
fn links_of_the_image_never_lead_out_of_the_root() {
    // Targets of the link. The outside folder must be empty afterwards.
    let outside = tempfile::tempdir().unwrap();
    let absolute = outside.path().to_str().unwrap().to_owned();
    let upwards = format!("../../../../../../../../../..{absolute}");
    for target in [absolute.as_str(), upwards.as_str()] {
        for place in [
            "/etc",
            "/etc/ld.so.conf.d",
            "/usr",
            "/usr/local/nvidia/lib64",
        ] {
            let container = Container::new();
            container.link(place, target);
            for arguments in [&LINKS[..], &UPDATE[..]] {
                // Refused or done inside the root, but never outside.
                container.run(arguments);
            }
            assert_eq!(
                fs_err::read_dir(outside.path()).unwrap().count(),
                0,
                "{place} -> {target}"
            );
        }
    }
}

#[test]
fn a_link_that_leads_nowhere_fails_with_the_place() {
    let container = with_driver();
    container.link("/etc", "/not/here");
    let message = container.run(&UPDATE).failed();
    assert_eq!(
        message,
        "divvy-cdi-hook: cannot make the folder of /etc/ld.so.cache in the container: No such file or directory (os error 2)\n"
    );
    container.link("/opt", "opt");
    let message = container
        .run(&["create-symlinks", "--link", "a::/opt/b"])
        .failed();
    assert!(
        message.contains(
            "(a link of the image leads in circles or stands where none may; repair the image)"
        ),
        "{message}"
    );
}

#[test]
fn files_are_replaced_not_followed() {
    let outside = tempfile::tempdir().unwrap();
    let victim = outside.path().join("victim");
    fs_err::write(&victim, b"the host's").unwrap();
    let container = with_driver();
    for path in ["/etc/ld.so.cache", "/etc/ld.so.conf"] {
        container.link(path, victim.to_str().unwrap());
    }
    container.run(&UPDATE).ok();
    assert_eq!(fs_err::read(&victim).unwrap(), b"the host's");
    let ours = format!("# by divvy\n{LIB}\n");
    assert_eq!(container.read("/etc/ld.so.conf"), ours);
    // Inside the root, links are the image's business: a link to a folder is followed.
    container.link("/data/etc", "../etc");
    container
        .run(&["create-symlinks", "--link", "a::/data/etc/b"])
        .ok();
    assert_eq!(container.read_link("/etc/b"), "a");
}

#[test]
fn a_pipe_in_a_files_place_is_refused_instead_of_waited_for() {
    let container = with_driver();
    fs_err::create_dir_all(container.path("/etc")).unwrap();
    sh(&format!(
        "mkfifo {}",
        container.path("/etc/ld.so.cache").display()
    ));
    let message = container.run(&UPDATE).failed();
    assert_eq!(
        message,
        "divvy-cdi-hook: cannot read /etc/ld.so.cache in the container: not a regular file\n"
    );
}

#[test]
fn a_damaged_cache_is_replaced() {
    let container = with_driver();
    container.write(
        "/etc/ld.so.cache",
        b"glibc-ld.so.cache1.1 and then nothing of use",
    );
    container.run(&UPDATE).ok();
    assert!(
        fs_err::read(container.path("/etc/ld.so.cache"))
            .unwrap()
            .ends_with(b"divvy-cdi-hook")
    );
}

/// Makes a cache whose entries share one long name, which would be written out for each.
fn inflating_cache(entries: u32, name: usize) -> Vec<u8> {
    let strings = 48 + 24 * entries;
    let mut cache = b"glibc-ld.so.cache1.1".to_vec();
    cache.extend(entries.to_ne_bytes());
    cache.extend([0; 24]);
    for _ in 0..entries {
        cache.extend(
            [
                0u32.to_ne_bytes(),
                strings.to_ne_bytes(),
                strings.to_ne_bytes(),
            ]
            .concat(),
        );
        cache.extend([0; 12]);
    }
    cache.resize(cache.len() + name, b'x');
    cache.push(0);
    cache
}

#[test]
fn a_cache_that_would_grow_beyond_bounds_is_replaced() {
    const MEMORY_KIB: u32 = 128 << 10;
    // A string of 2 MB; paths as long as they may be, too many to be written; more entries than any
    // image has.
    for (entries, name) in [(2000, 2 << 20), (40_000, 250), (500_000, 1)] {
        let container = with_driver();
        container.write("/etc/ld.so.cache", &inflating_cache(entries, name));
        let hook = container.command_line(&UPDATE);
        let out = sh(&format!("ulimit -v {MEMORY_KIB}; {hook}"));
        assert!(out.success, "{entries} entries: {}", out.stderr);
        let cache = fs_err::read(container.path("/etc/ld.so.cache")).unwrap();
        assert!(
            cache.len() < 1 << 10,
            "{entries} entries: {} bytes",
            cache.len()
        );
        assert!(cache.windows(LIB.len()).any(|part| part == LIB.as_bytes()));
    }
}

#[test]
fn a_file_of_the_image_that_is_too_large_is_not_cut_off_but_refused() {
    for (file, is_needed) in [("/etc/ld.so.cache", true), ("/etc/ld.so.conf", false)] {
        let container = with_driver();
        container.write(file, b"");
        let made = fs_err::OpenOptions::new()
            .write(true)
            .open(container.path(file))
            .unwrap();
        made.set_len((16 << 20) + 1).unwrap();
        let out = container.run(&UPDATE);
        let why = format!("cannot read {file} in the container: larger than 16 MiB");
        assert!(out.stderr.contains(&why), "{}", out.stderr);
        assert_eq!(out.success, !is_needed, "{file}");
        let left = fs_err::metadata(container.path(file)).unwrap();
        assert_eq!(left.len(), (16 << 20) + 1, "{file}");
    }
}

#[test]
fn a_folder_with_more_files_than_any_driver_has_is_refused() {
    use std::os::unix::ffi::OsStrExt as _;
    // Names that are not text count, too.
    for prefix in [b"lib", b"\xff\xfe\xff"] {
        let container = with_driver();
        let folder = container.path(LIB);
        for number in 0..16_384 {
            let name = [prefix, format!("{number}.so").as_bytes()].concat();
            let path = folder.join(std::ffi::OsStr::from_bytes(&name));
            fs_err::os::unix::fs::symlink("nowhere", path).unwrap();
        }
        let message = container.run(&UPDATE).failed();
        assert_eq!(
            message,
            format!("divvy-cdi-hook: cannot list {LIB} in the container: more than 16384 files\n")
        );
    }
}

#[test]
fn libraries_of_other_machines_are_not_entered() {
    let container = with_glibc();
    let own = minimal_library("libown.so.1");
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut library = own.clone();
        change(&mut library);
        library
    };
    // e_machine of the other machine that divvy runs on; a file of 32 bits; another byte order; one
    // that ends within the header.
    let other = if cfg!(target_arch = "aarch64") {
        62
    } else {
        183
    };
    container.write(
        &format!("{LIB}/libmachine.so.1"),
        &with(&|file| file[18] = other),
    );
    container.write(&format!("{LIB}/libbits.so.1"), &with(&|file| file[4] = 1));
    container.write(&format!("{LIB}/liborder.so.1"), &with(&|file| file[5] = 2));
    container.write(
        &format!("{LIB}/libshort.so.1"),
        &with(&|file| file.truncate(19)),
    );
    container.write(&format!("{LIB}/libown.so.1"), &own);
    container.run(&UPDATE).ok();
    let cache = fs_err::read(container.path("/etc/ld.so.cache")).unwrap();
    let cache = String::from_utf8_lossy(&cache);
    assert!(cache.contains("libown.so.1"));
    for name in ["libmachine", "libbits", "liborder", "libshort"] {
        assert!(!cache.contains(name), "{name}");
    }
}

/// Only `ldconfig` reads its configuration: the container starts, with its libraries in the cache.
#[test]
fn a_configuration_that_is_no_file_keeps_nothing_from_starting() {
    for make in ["mkfifo", "mkdir", "ln -s ld.so.conf"] {
        let container = with_glibc();
        fs_err::create_dir_all(container.path("/etc")).unwrap();
        sh(&format!(
            "{make} {}",
            container.path("/etc/ld.so.conf").display()
        ))
        .ok();
        let out = container.run(&UPDATE);
        assert!(out.success, "{make}: {}", out.stderr);
        let said = "divvy-cdi-hook: left out: cannot read /etc/ld.so.conf in the container";
        assert!(out.stderr.starts_with(said), "{make}: {}", out.stderr);
        assert!(container.path("/etc/ld.so.cache").exists(), "{make}");
        assert!(!container.path("/etc/ld.so.conf").is_file(), "{make}");
    }
}

#[test]
fn a_cache_that_is_a_dangling_link_is_replaced() {
    let container = with_glibc();
    container.link("/etc/ld.so.cache", "/nowhere/cache");
    container.run(&UPDATE).ok();
    let meta = fs_err::symlink_metadata(container.path("/etc/ld.so.cache")).unwrap();
    assert!(meta.is_file());
}

#[test]
fn a_cache_that_is_a_folder_fails_with_the_place() {
    let container = with_glibc();
    fs_err::create_dir_all(container.path("/etc/ld.so.cache")).unwrap();
    assert_eq!(
        container.run(&UPDATE).failed(),
        "divvy-cdi-hook: cannot read /etc/ld.so.cache in the container: not a regular file\n"
    );
}

#[test]
fn a_folder_of_the_image_may_be_a_link_within_it() {
    let container = with_glibc();
    container.link("/etc", "/data/etc");
    fs_err::create_dir_all(container.path("/data/etc")).unwrap();
    container.run(&UPDATE).ok();
    assert!(container.path("/data/etc/ld.so.cache").exists());
}

#[test]
fn a_state_beyond_its_bound_is_refused() {
    let container = Container::new();
    // With all of it read, it would be a good state.
    let hook = container.command_line(&UPDATE);
    let (hook, state) = hook.split_once('<').unwrap();
    let out = sh(&format!(
        "{{ head -c {} /dev/zero | tr \"\\0\" \" \"; cat {state}; }} | {hook}",
        16 << 20
    ));
    let message = out.failed();
    assert!(message.ends_with(": longer than 16 MiB\n"), "{message}");
}

#[test]
fn the_hosts_own_root_is_not_a_containers() {
    let container = Container::new();
    fs_err::write(
        container.bundle().join("config.json"),
        br#"{"root":{"path":"/"}}"#,
    )
    .unwrap();
    let message = container.run(&UPDATE).failed();
    assert_eq!(
        message,
        "divvy-cdi-hook: the container's root / is the host's own\n"
    );
}

#[test]
fn what_is_not_a_containers_state_is_said() {
    let container = Container::new();
    let hook = |state: &str| run_with(&UPDATE, state).failed();
    assert!(hook("").starts_with("divvy-cdi-hook: the container's state on stdin is not JSON: "));
    assert_eq!(
        hook("{}"),
        "divvy-cdi-hook: the container's state has no bundle\n"
    );
    let message = hook(r#"{"bundle":"/no/such/bundle"}"#);
    assert!(
        message.contains(
            "cannot read the container's configuration: failed to open file `/no/such/bundle/config.json`"
        ),
        "{message}"
    );
    fs_err::write(container.bundle().join("config.json"), b"{}").unwrap();
    assert_eq!(
        container.run(&UPDATE).failed(),
        "divvy-cdi-hook: the container's config.json has no root.path\n"
    );
    fs_err::write(
        container.bundle().join("config.json"),
        br#"{"root":{"path":"gone"}}"#,
    )
    .unwrap();
    let message = container.run(&UPDATE).failed();
    assert!(
        message.starts_with("divvy-cdi-hook: cannot open the container's root "),
        "{message}"
    );
}
