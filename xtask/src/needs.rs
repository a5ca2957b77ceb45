//! What a command needs of the machine, before it begins. The list is `.ci/need`, which CI runs before there is any Rust.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// What `.ci/need` can be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// To build the programs.
    Build,
    /// To build and run a real Kubernetes.
    Cluster,
}

/// Installs what is missing, or returns an error; what is missing is listed on standard error.
pub(crate) fn ensure_all(root: &Path, needs: &[Need]) -> Result<()> {
    if needs.is_empty() {
        return Ok(());
    }
    let names = needs.iter().map(|need| match need {
        Need::Build => "build",
        Need::Cluster => "cluster",
    });
    let status = Command::new("bash").arg(root.join(".ci/need")).args(names).status();
    ensure!(status.context("running bash")?.success(), "this machine lacks what is listed above");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Output;

    use super::*;

    /// Runs `.ci/need` where no other program can be found than those in a folder.
    fn need(programs: &Path, what: &str) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci/need");
        let mut command = Command::new("/bin/bash");
        command.arg(script).arg(what).env("PATH", programs).output().expect("bash runs")
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
        for package in ["gcc", "libseccomp-dev", "nftables", "iproute2", "busybox-static", "openssl"] {
            assert!(said.contains(&format!("Debian package {package}\n")), "{package} is not in: {said}");
        }
        assert!(said.contains("go 1.26 or later (Kubernetes is built with it; found: none)"), "{said}");
        let done = need(empty.path(), "build");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains("  cargo (") && said.contains("  rustup ("), "{said}");
        assert!(!said.contains("nftables"), "a build needs no cluster: {said}");
    }

    #[test]
    fn a_missing_target_is_added_to_the_toolchain() {
        let folder = tempfile::tempdir().expect("a folder");
        let (bin, libraries) = (folder.path().join("bin"), folder.path().join("musl"));
        fs_err::create_dir(&bin).expect("a writable folder");
        for name in ["gcc", "cargo"] {
            program(&bin, name, "");
        }
        program(&bin, "rustc", &format!("echo {}", libraries.display()));
        program(&bin, "rustup", &format!("echo \"rustup $*\"; /bin/mkdir {}", libraries.display()));
        let target = format!("target add {}-unknown-linux-musl", std::env::consts::ARCH);

        let said = need(&bin, "build");
        let text = String::from_utf8_lossy(&said.stderr);
        assert!(said.status.success(), "{text}");
        assert_eq!(text, format!("this machine lacks:\n  rustup {target}\nrustup {target}\n"));
        let again = need(&bin, "build");
        assert!(again.status.success() && again.stderr.is_empty(), "nothing is missing any more");
    }

    #[test]
    fn what_is_still_missing_after_the_installation_is_an_error() {
        let bin = tempfile::tempdir().expect("a folder");
        for name in ["gcc", "cargo", "rustup"] {
            program(bin.path(), name, "");
        }
        program(bin.path(), "rustc", "echo /nonexistent");
        let done = need(bin.path(), "build");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(1), "{said}");
        assert!(said.contains("still missing after the installation:\n  rustup target add"), "{said}");
    }
}
