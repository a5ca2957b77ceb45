//! A program with this machine's own loader, that finds its libraries or does not start.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use super::common::{Container, Outcome, namespaces_allowed, sh, skipped};
use super::{LIB, LINKS, UPDATE};

/// A container with a program and its loader. The libraries that it needs are beside the root: they
/// are mounted in the driver's folder, as a runtime does it.
struct Program {
    container: Container,
    libraries: Vec<&'static str>,
}

impl Program {
    /// Makes it; `None`, and says so, where this machine cannot run it.
    fn new() -> Option<Self> {
        let maps = fs_err::read_to_string("/proc/self/maps").unwrap();
        let mapped = |name: &str| {
            let paths = maps
                .lines()
                .filter_map(|line| line.split_whitespace().nth(5));
            let mut found = paths.filter(|path| path.ends_with(name));
            found.next().map(str::to_owned)
        };
        let Some(loader) = mapped("/ld-linux-x86-64.so.2") else {
            skipped("this test program is static or not for x86_64");
            return None;
        };
        if !namespaces_allowed() {
            return None;
        }
        let container = Container::new();
        let copy = |from: &str, to: std::path::PathBuf| {
            fs_err::create_dir_all(to.parent().unwrap()).unwrap();
            fs_err::copy(from, to).unwrap();
        };
        copy(&loader, container.path("/lib64/ld-linux-x86-64.so.2"));
        copy(
            env!("CARGO_BIN_EXE_divvy-cdi-hook"),
            container.path("/hook"),
        );
        let mut libraries = Vec::new();
        for name in ["libc.so.6", "libgcc_s.so.1"] {
            if let Some(path) = mapped(&format!("/{name}")) {
                copy(&path, container.bundle().join(name));
                libraries.push(name);
            }
        }
        Some(Self {
            container,
            libraries,
        })
    }

    /// Mounts the libraries after what `first` does with the root, calls the hook, and then starts
    /// the program, all in a mount namespace.
    fn starts_after(&self, first: &str, calls: &[&[&str]]) -> Outcome {
        let root = self.container.path("/");
        let mut lines = vec![format!("root={}", root.display()), first.to_owned()];
        lines.push(format!("mkdir -p $root{LIB}"));
        for name in &self.libraries {
            let from = self.container.bundle().join(name);
            let to = format!("$root{LIB}/{name}");
            lines.push(format!(
                "touch {to} && mount --bind {} {to}",
                from.display()
            ));
        }
        lines.extend(calls.iter().map(|call| self.container.command_line(call)));
        lines.push("chroot $root /hook --version".to_owned());
        sh(&format!("unshare -Urm sh -ec '{}'", lines.join("\n")))
    }
}

fn started(out: &Outcome) {
    assert!(out.success, "{}", out.stderr);
    assert!(out.stdout.starts_with("divvy-cdi-hook "), "{}", out.stdout);
}

#[test]
fn a_program_finds_its_libraries_through_the_cache() {
    let Some(program) = Program::new() else {
        return;
    };
    let without = program.starts_after("true", &[]);
    let error = "error while loading shared libraries";
    assert!(!without.success && without.stderr.contains(error));
    started(&program.starts_after("true", &[&UPDATE]));
}

/// The loader's cache cannot be written there: it searches its own folders last.
#[test]
fn a_program_finds_its_libraries_although_a_volume_is_at_etc() {
    let Some(program) = Program::new() else {
        return;
    };
    let volume = tempfile::tempdir().unwrap();
    // As images of Debian have it, whose loader runs here.
    let triplet = "/usr/lib/x86_64-linux-gnu";
    fs_err::create_dir_all(program.container.path(triplet)).unwrap();
    let mount = format!(
        "mkdir -p $root/etc && mount --bind {} $root/etc",
        volume.path().display()
    );
    assert!(!program.starts_after(&mount, &[]).success);
    started(&program.starts_after(&mount, &[&UPDATE]));
    assert_eq!(fs_err::read_dir(volume.path()).unwrap().count(), 0);
}

/// The runtime mounts the driver's files in the volume, and nothing else may be written there.
#[test]
fn a_program_finds_its_libraries_although_a_volume_is_in_their_place() {
    for place in ["/usr/local/nvidia", LIB] {
        let Some(program) = Program::new() else {
            return;
        };
        let volume = tempfile::tempdir().unwrap();
        fs_err::write(volume.path().join("own"), "").unwrap();
        let mount = format!(
            "mkdir -p $root{place} && mount --bind {} $root{place}",
            volume.path().display()
        );
        assert!(!program.starts_after(&mount, &[]).success, "{place}");
        started(&program.starts_after(&mount, &[&LINKS, &UPDATE]));
    }
}

#[test]
fn a_program_finds_its_libraries_with_volumes_at_both_places() {
    let Some(program) = Program::new() else {
        return;
    };
    let (etc, nvidia) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs_err::create_dir_all(program.container.path("/usr/lib/x86_64-linux-gnu")).unwrap();
    let mount = format!(
        "mkdir -p $root/etc $root/usr/local/nvidia
         mount --bind {} $root/etc; mount --bind {} $root/usr/local/nvidia",
        etc.path().display(),
        nvidia.path().display()
    );
    started(&program.starts_after(&mount, &[&LINKS, &UPDATE]));
    assert_eq!(fs_err::read_dir(etc.path()).unwrap().count(), 0);
}
