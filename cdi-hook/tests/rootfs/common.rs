//! A bundle in a temporary folder, and calls of the program on it.
#![expect(
    clippy::unwrap_used,
    reason = "only tests call it; clippy sees helpers of a test as ordinary code"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Outcome of a finished process.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) success: bool,
    /// Exit status; -1 after a signal.
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    fn of(output: std::process::Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self {
            success: output.status.success(),
            status: output.status.code().unwrap_or(-1),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    #[track_caller]
    pub(crate) fn ok(self) {
        assert!(self.success, "{}", self.stderr);
    }

    #[track_caller]
    pub(crate) fn failed(self) -> String {
        assert!(!self.success, "expected a failure");
        self.stderr
    }
}

pub(crate) struct Container {
    dir: tempfile::TempDir,
}

impl Container {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir(dir.path().join("rootfs")).unwrap();
        fs_err::write(
            dir.path().join("config.json"),
            br#"{"ociVersion":"1.2.0","root":{"path":"rootfs"}}"#,
        )
        .unwrap();
        fs_err::write(
            dir.path().join("state.json"),
            format!(r#"{{"bundle":"{}"}}"#, dir.path().display()),
        )
        .unwrap();
        Self { dir }
    }

    pub(crate) fn bundle(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.dir
            .path()
            .join("rootfs")
            .join(path.trim_start_matches('/'))
    }

    /// Gives the container's first process these variables.
    pub(crate) fn set_env(&self, variables: &[&str]) {
        let config = format!(r#"{{"root":{{"path":"rootfs"}},"process":{{"env":{variables:?}}}}}"#);
        fs_err::write(self.dir.path().join("config.json"), config).unwrap();
    }

    pub(crate) fn write(&self, path: &str, bytes: &[u8]) {
        fs_err::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs_err::write(self.path(path), bytes).unwrap();
    }

    pub(crate) fn link(&self, path: &str, target: &str) {
        fs_err::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs_err::os::unix::fs::symlink(target, self.path(path)).unwrap();
    }

    pub(crate) fn read(&self, path: &str) -> String {
        fs_err::read_to_string(self.path(path)).unwrap()
    }

    pub(crate) fn read_link(&self, path: &str) -> String {
        fs_err::read_link(self.path(path))
            .unwrap()
            .to_str()
            .unwrap()
            .to_owned()
    }

    pub(crate) fn names(&self, path: &str) -> Vec<String> {
        let entries = fs_err::read_dir(self.path(path)).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Outcome {
        run_with(
            arguments,
            &fs_err::read_to_string(self.dir.path().join("state.json")).unwrap(),
        )
    }

    /// Returns the call as a shell command.
    pub(crate) fn command_line(&self, arguments: &[&str]) -> String {
        let state = self.dir.path().join("state.json");
        format!(
            "{} {} <{}",
            env!("CARGO_BIN_EXE_divvy-cdi-hook"),
            arguments.join(" "),
            state.display()
        )
    }
}

pub(crate) fn run_with(arguments: &[&str], state: &str) -> Outcome {
    let mut child = Command::new(env!("CARGO_BIN_EXE_divvy-cdi-hook"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(state.as_bytes())
        .unwrap();
    Outcome::of(child.wait_with_output().unwrap())
}

/// Sets the permission bits of a file.
pub(crate) fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs_err::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs a line in a shell.
pub(crate) fn sh(line: &str) -> Outcome {
    Outcome::of(
        Command::new("sh")
            .args(["-c", line])
            .stdin(Stdio::null())
            .output()
            .unwrap(),
    )
}

/// Returns `true` if this machine allows user namespaces. If not, it says that the test was
/// skipped.
pub(crate) fn namespaces_allowed() -> bool {
    let allowed = sh("unshare -Urm true").success;
    if !allowed {
        skipped("user namespaces are not allowed here");
    }
    allowed
}

/// Prints why a test was skipped.
#[expect(
    clippy::print_stderr,
    reason = "a test that cannot run here must not look like one that ran"
)]
pub(crate) fn skipped(why: &str) {
    eprintln!("skipped: {why}");
}
