//! Where this process sees the host.

use std::io;
use std::path::{Component, Path, PathBuf};

/// The folders through which this process sees the host's trees. On the host itself they are `/`,
/// `/proc`, `/sys`, `/dev`; in a container whatever the pod mounts; in tests a temporary folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRoot {
    root: PathBuf,
    proc: PathBuf,
    sys: PathBuf,
    dev: PathBuf,
}

impl Default for HostRoot {
    fn default() -> Self {
        Self::under("/")
    }
}

impl HostRoot {
    /// A host whose `/` is seen at `root`, with its proc, sys and dev below that.
    pub fn under(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self {
            proc: root.join("proc"),
            sys: root.join("sys"),
            dev: root.join("dev"),
            root,
        }
    }

    /// The same, with `/proc` seen elsewhere.
    #[must_use]
    pub fn with_proc(mut self, proc: impl Into<PathBuf>) -> Self {
        self.proc = proc.into();
        self
    }

    /// The same, with `/sys` seen elsewhere.
    #[must_use]
    pub fn with_sys(mut self, sys: impl Into<PathBuf>) -> Self {
        self.sys = sys.into();
        self
    }

    /// The same, with `/dev` seen elsewhere.
    #[must_use]
    pub fn with_dev(mut self, dev: impl Into<PathBuf>) -> Self {
        self.dev = dev.into();
        self
    }

    /// Returns the path by which this process opens a path of the host.
    pub fn see(&self, host_path: &Path) -> PathBuf {
        below(&self.root, host_path)
    }

    /// Reads the control groups of a process, as `/proc/<pid>/cgroup` has them.
    pub fn cgroups(&self, pid: u32) -> io::Result<String> {
        fs_err::read_to_string(self.see(Path::new(&format!("/proc/{pid}/cgroup"))))
    }

    pub(crate) fn proc(&self, rest: &str) -> PathBuf {
        self.proc.join(rest)
    }

    pub(crate) fn sys(&self, rest: &str) -> PathBuf {
        self.sys.join(rest)
    }

    pub(crate) fn dev(&self, rest: &str) -> PathBuf {
        self.dev.join(rest)
    }
}

/// `path` taken relative to `base`, whether or not it is absolute, with `.` and `..` resolved by
/// text and never above `base`.
pub(crate) fn below(base: &Path, path: &Path) -> PathBuf {
    let mut inside = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => inside.push(name),
            Component::ParentDir => drop(inside.pop()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    if inside.as_os_str().is_empty() {
        base.to_path_buf()
    } else {
        base.join(inside)
    }
}
