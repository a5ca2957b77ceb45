//! The requirements of a command on the machine, checked before it begins. The list is `.ci/need`,
//! which CI runs before any Rust toolchain exists.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Arguments of `.ci/need`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// To build the programs.
    Build,
    /// To build and run a real Kubernetes.
    Cluster,
    /// To build for the other architecture, and to package the chart.
    Dist,
}

/// Lists what is missing on standard error, in one list, and installs it; an error if that is not
/// possible.
pub(crate) fn ensure_all(root: &Path, needs: &[Need]) -> Result<()> {
    if needs.is_empty() {
        return Ok(());
    }
    let names = needs.iter().map(|need| match need {
        Need::Build => "build",
        Need::Cluster => "cluster",
        Need::Dist => "dist",
    });
    let status = Command::new("bash")
        .arg(root.join(".ci/need"))
        .args(names)
        .status();
    ensure!(
        status.context("running bash")?.success(),
        "the requirements listed above are missing on this machine"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Output;

    use super::*;

    /// Runs `.ci/need` with no other programs than those in a folder.
    fn need(programs: &Path, what: &str) -> Output {
        script("need", &[what], programs)
    }

    /// Runs a script of `.ci` with no other programs than those in a folder.
    fn script(name: &str, arguments: &[&str], programs: &Path) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../.ci")
            .join(name);
        let mut command = Command::new("/bin/bash");
        command
            .arg(script)
            .args(arguments)
            .env("PATH", programs)
            .output()
            .expect("bash runs")
    }

    fn program(folder: &Path, name: &str, script: &str) {
        let path = folder.join(name);
        fs_err::write(&path, format!("#!/bin/bash\n{script}\n")).expect("a writable folder");
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
            .expect("its owner may do that");
    }

    #[test]
    fn all_that_is_missing_is_listed_at_once() {
        let empty = tempfile::tempdir().expect("a folder");
        let done = need(empty.path(), "cluster");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        for package in [
            "gcc",
            "libseccomp-dev",
            "nftables",
            "iproute2",
            "busybox-static",
            "openssl",
            "crun",
        ] {
            assert!(
                said.contains(&format!("Debian package {package}\n")),
                "{package} is not in: {said}"
            );
        }
        assert!(
            said.contains("go 1.26 or later (Kubernetes and helm are built with it; found: none)"),
            "{said}"
        );
        let done = need(empty.path(), "build");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(
            said.contains("  cargo (") && said.contains("  rustup ("),
            "{said}"
        );
        assert!(
            !said.contains("nftables"),
            "a build needs no cluster: {said}"
        );
    }

    #[test]
    fn a_missing_target_is_added_to_the_toolchain() {
        let folder = tempfile::tempdir().expect("a folder");
        let (bin, libraries) = (folder.path().join("bin"), folder.path().join("musl"));
        fs_err::create_dir(&bin).expect("a writable folder");
        for name in ["gcc", "git", "cargo"] {
            program(&bin, name, "");
        }
        program(&bin, "rustc", &format!("echo {}", libraries.display()));
        program(
            &bin,
            "rustup",
            &format!("echo \"rustup $*\"; /bin/mkdir {}", libraries.display()),
        );
        let target = format!("target add {}-unknown-linux-musl", std::env::consts::ARCH);

        let said = need(&bin, "build");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(said.status.success(), "{text}");
        assert_eq!(
            text,
            format!("missing on this machine:\n  rustup {target}\nrustup {target}\n")
        );
        let again = need(&bin, "build");
        assert!(
            again.status.success() && again.stderr.is_empty(),
            "nothing is missing any more"
        );
    }

    #[test]
    fn a_release_needs_tools_and_targets_of_the_other_architecture() {
        let (compiler, target) = match std::env::consts::ARCH {
            "aarch64" => ("gcc-x86-64-linux-gnu", "x86_64"),
            _ => ("gcc-aarch64-linux-gnu", "aarch64"),
        };
        let bin = tempfile::tempdir().expect("a folder");
        for name in ["gcc", "git", "cargo", "rustup"] {
            program(bin.path(), name, "");
        }
        program(bin.path(), "rustc", "echo /nonexistent");
        let done = need(bin.path(), "dist");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        for wanted in [
            format!("Debian package {compiler}\n"),
            "Debian package qemu-user-static\n".to_owned(),
            format!("rustup target add {target}-unknown-linux-gnu\n"),
            format!("rustup target add {target}-unknown-linux-musl\n"),
            "go 1.26 or later (".to_owned(),
        ] {
            assert!(said.contains(&wanted), "{wanted:?} is not in: {said}");
        }
    }

    #[test]
    fn what_is_still_missing_after_the_installation_is_an_error() {
        let bin = tempfile::tempdir().expect("a folder");
        for name in ["gcc", "git", "cargo", "rustup"] {
            program(bin.path(), name, "");
        }
        program(bin.path(), "rustc", "echo /nonexistent");
        let done = need(bin.path(), "build");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(
            said.contains("still missing after the installation:\n  rustup target add"),
            "{said}"
        );
    }

    #[test]
    fn ci_on_a_bare_machine_lists_all_requirements_at_once_and_builds_nothing() {
        let bin = tempfile::tempdir().expect("a folder");
        program(bin.path(), "cargo", "echo cargo ran");
        let began = std::time::Instant::now();
        let done = script("run", &[], bin.path());
        let (said, took) = (String::from_utf8_lossy(&done.stderr), began.elapsed());
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert_eq!(said.matches("missing").count(), 1, "one list: {said}");
        for wanted in [
            "package gcc\n",
            "package git\n",
            "package nftables\n",
            "rustup toolchain install\n",
            "  rustup (",
            "  go 1.26",
        ] {
            assert!(said.contains(wanted), "{wanted:?} is not in: {said}");
        }
        assert!(
            took < std::time::Duration::from_secs(5),
            "the list came after {took:?}"
        );
        assert!(
            done.stdout.is_empty(),
            "cargo did not run: {}",
            String::from_utf8_lossy(&done.stdout)
        );
    }

    #[test]
    fn ci_installs_packages_and_targets_before_it_runs() {
        let folder = tempfile::tempdir().expect("a folder");
        let (bin, libraries) = (folder.path().join("bin"), folder.path().join("musl"));
        fs_err::create_dir(&bin).expect("a writable folder");
        program(&bin, "rustc", &format!("echo {}", libraries.display()));
        program(
            &bin,
            "rustup",
            &format!("echo \"rustup $*\"; /bin/mkdir {}", libraries.display()),
        );
        // The programs of the packages appear when apt-get is asked for them.
        let tools = "gcc git pkg-config nft ip unshare nsenter busybox openssl crun";
        let install = format!(
            "for tool in {tools}; do : >{0}/$tool; /bin/chmod +x {0}/$tool; done",
            bin.display()
        );
        program(
            &bin,
            "apt-get",
            &format!("echo \"apt-get $*\"; [ \"$1\" != install ] || {{ {install}; }}"),
        );
        program(&bin, "go", "echo go1.26.0");
        program(&bin, "cargo", "echo \"cargo $*\"");

        let done = script("run", &[], &bin);
        let said = String::from_utf8_lossy(&done.stderr);
        if !is_root() {
            assert!(said.contains("  root ("), "{said}");
            return;
        }
        assert!(done.status.success(), "{said}");
        let (list, installs) = said
            .split_once("apt-get update -q\n")
            .expect("packages are installed");
        assert!(
            list.starts_with("missing on this machine:\n") && list.contains("rustup target add"),
            "{list}"
        );
        assert!(
            installs.contains("apt-get install") && installs.contains("\nrustup target add"),
            "{installs}"
        );
        let ran = String::from_utf8_lossy(&done.stdout);
        assert!(ran.ends_with("cargo xtask ci\n"), "{ran}");
    }

    fn is_root() -> bool {
        let id = Command::new("id").arg("-u").output().expect("id runs");
        id.stdout == b"0\n"
    }
}
