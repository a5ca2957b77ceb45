//! Applies a claim's CDI edits to this program started anew: in a mount namespace with a root of its own, or, where that
//! is not allowed, as a plain process that gets the environment only.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{
    MountFlags, MountPropagationFlags, mount, mount_bind_recursive, mount_change, mount_remount,
};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::cuda;

/// What the container gets, as far as a CUDA program needs it.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Container {
    env: Vec<String>,
    /// Path, major, minor.
    nodes: Vec<(PathBuf, u32, u32)>,
    /// On the host, in the container.
    mounts: Vec<(PathBuf, PathBuf)>,
    /// An empty folder for its root; `None`: it is a plain process, or in its root already.
    root: Option<PathBuf>,
    /// Whether it is in a root of its own.
    apart: bool,
}

impl Container {
    /// What a CDI document of one device says.
    fn of(cdi: &Value) -> Result<Self> {
        let mut all = Self::default();
        let device = cdi.pointer("/devices/0/containerEdits");
        for edits in [cdi.get("containerEdits"), device].into_iter().flatten() {
            let list = |name: &str| edits.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
            let text = |v: &Value, name: &str| v.get(name).and_then(Value::as_str).map(PathBuf::from);
            let number = |v: &Value, name: &str| v.get(name).and_then(Value::as_u64)?.try_into().ok();
            all.env.extend(list("env").iter().filter_map(Value::as_str).map(str::to_owned));
            for node in list("deviceNodes") {
                let path = text(&node, "path").context("a device node without path")?;
                let numbers = number(&node, "major").zip(number(&node, "minor"));
                let (major, minor) = numbers.with_context(|| format!("{} has no numbers", path.display()))?;
                all.nodes.push((path, major, minor));
            }
            for mount in list("mounts") {
                let ends = text(&mount, "hostPath").zip(text(&mount, "containerPath"));
                all.mounts.push(ends.context("a mount without ends")?);
            }
        }
        ensure!(!all.nodes.is_empty() && !all.mounts.is_empty(), "the CDI file gives no nodes or no files");
        Ok(all)
    }
}

impl Container {
    /// Its environment. A plain process finds the libraries where the host has them.
    fn environment(&self) -> Vec<(String, String)> {
        const LIBRARIES: &str = "LD_LIBRARY_PATH";
        let pairs = self.env.iter().filter_map(|pair| pair.split_once('='));
        let mut all: Vec<_> = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        if self.root.is_none() {
            let is_library = |file: &Path| file.to_string_lossy().contains(".so");
            let folders =
                self.mounts.iter().filter(|(host, _)| is_library(host)).filter_map(|(h, _)| h.parent());
            let folders: BTreeSet<_> = folders.map(|folder| folder.display().to_string()).collect();
            all.retain(|(name, _)| name != LIBRARIES);
            all.push((LIBRARIES.to_owned(), folders.into_iter().collect::<Vec<_>>().join(":")));
        }
        all
    }
}

/// Runs the CUDA program as the claim's container would; what it saw, in words.
pub(crate) fn run(cdi: &Value) -> Result<String> {
    let mut container = Container::of(cdi)?;
    let folder = tempfile::tempdir()?;
    let root = folder.path().join("root");
    fs_err::create_dir(&root)?;
    for apart in [true, false] {
        container.root = apart.then(|| root.clone());
        let file = folder.path().join("container.json");
        fs_err::write(&file, serde_json::to_vec(&container)?)?;
        let out = Command::new(std::env::current_exe()?)
            .arg("--inside")
            .arg(&file)
            .env_clear()
            .envs(container.environment())
            .output()
            .context("starting the program in the container")?;
        let said = String::from_utf8_lossy(&out.stdout).trim().to_owned();
        match out.status.code() {
            Some(0) if apart => return Ok(format!("in a root of its own {said}")),
            Some(0) => {
                return Ok(format!(
                    "{said} (NOT TRIED: that it sees no other GPU, since namespaces are not allowed here)"
                ));
            }
            Some(NOT_ALLOWED) if apart => {}
            _ => bail!("the program in the container: {said}"),
        }
    }
    bail!("the program in the container did not run")
}

/// Namespaces are not allowed here.
const NOT_ALLOWED: i32 = 4;

/// The program in the container.
pub(crate) fn inside(file: &Path) -> Result<()> {
    let container: Container = serde_json::from_slice(&fs_err::read(file)?)?;
    if let Some(root) = &container.root {
        // SAFETY: no thread has been started in this process; only the mount namespace is left, not the file table.
        let alone = unsafe { unshare_unsafe(UnshareFlags::NEWNS) };
        if alone.is_err() {
            std::process::exit(NOT_ALLOWED);
        }
        enter(&container, root).context("making the container's root")?;
        let entered = Container { root: None, apart: true, ..container };
        fs_err::write(Path::new(FILE), serde_json::to_vec(&entered)?)?;
        // Started anew: the loader has looked for its folders where there were none.
        return Err(Command::new(PROGRAM).arg("--inside").arg(FILE).exec().into());
    }
    let seen = cuda::check()?;
    if container.apart {
        ensure!(seen.count == 1, "the claim has one GPU, and CUDA sees {}", seen.count);
    }
    crate::say(&seen.to_string());
    Ok(())
}

/// This program and its instructions, in the container.
const PROGRAM: &str = "/divvy-hardware";
const FILE: &str = "/divvy-hardware.json";
/// Folders of the host that its programs need to start. Nothing is put into them.
const SYSTEM: [&str; 6] = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/proc", "/sys"];

/// A root with the host's system libraries, the claim's files and nodes, and nothing else of the host.
fn enter(container: &Container, root: &Path) -> Result<()> {
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    mount("tmpfs", root, "tmpfs", MountFlags::NOSUID, None::<&std::ffi::CStr>)?;
    let inside = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    for host in SYSTEM.map(Path::new) {
        let Ok(meta) = fs_err::symlink_metadata(host) else { continue };
        let here = inside(host);
        fs_err::create_dir_all(here.parent().unwrap_or(root))?;
        if meta.is_symlink() {
            symlink(fs_err::read_link(host)?, &here)?;
        } else {
            fs_err::create_dir_all(&here)?;
            mount_bind_recursive(host, &here)?;
            mount_remount(&here, MountFlags::BIND | MountFlags::RDONLY, c"")?;
        }
    }
    let program = std::env::current_exe()?;
    let files = container.mounts.iter().map(|(host, path)| (host.as_path(), path.as_path()));
    for (host, path) in files.chain([(program.as_path(), Path::new(PROGRAM))]) {
        // Firmware, say, which is of no use here: it would have to be put into a folder of the host.
        if !host.exists() || SYSTEM.iter().any(|system| path.starts_with(system)) {
            continue;
        }
        let here = inside(path);
        if host.is_dir() {
            fs_err::create_dir_all(&here)?;
        } else {
            fs_err::create_dir_all(here.parent().unwrap_or(root))?;
            fs_err::write(&here, "")?;
        }
        mount_bind_recursive(host, &here)?;
    }
    for (path, major, minor) in &container.nodes {
        let here = inside(path);
        fs_err::create_dir_all(here.parent().unwrap_or(root))?;
        mknodat(CWD, &here, FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(*major, *minor))?;
    }
    rustix::process::chroot(root)?;
    rustix::process::chdir(CString::new("/")?.as_c_str())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claims_document_becomes_a_container() {
        let cdi = serde_json::json!({
            "containerEdits": {
                "env": ["NVIDIA_VISIBLE_DEVICES=void", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64"],
                "deviceNodes": [{ "path": "/dev/nvidiactl", "major": 195, "minor": 255 }],
                "mounts": [{ "hostPath": "/usr/lib/libcuda.so.1", "containerPath": "/usr/local/nvidia/lib64/libcuda.so.1" }],
            },
            "devices": [{ "name": "a", "containerEdits": { "deviceNodes": [{ "path": "/dev/nvidia0", "major": 195, "minor": 0 }] } }],
        });
        let expected = Container {
            env: vec!["NVIDIA_VISIBLE_DEVICES=void".into(), "LD_LIBRARY_PATH=/usr/local/nvidia/lib64".into()],
            nodes: vec![("/dev/nvidiactl".into(), 195, 255), ("/dev/nvidia0".into(), 195, 0)],
            mounts: vec![("/usr/lib/libcuda.so.1".into(), "/usr/local/nvidia/lib64/libcuda.so.1".into())],
            root: None,
            apart: false,
        };
        let container = Container::of(&cdi).unwrap();
        assert_eq!(container, expected);
        let path = |container: &Container| container.environment().pop().unwrap();
        assert_eq!(path(&container), ("LD_LIBRARY_PATH".into(), "/usr/lib".into()), "as the host has them");
        let apart = Container { root: Some("/r".into()), ..container };
        assert_eq!(path(&apart), ("LD_LIBRARY_PATH".into(), "/usr/local/nvidia/lib64".into()));
        let no_numbers = serde_json::json!({ "devices": [{ "containerEdits": { "deviceNodes": [{ "path": "/dev/nvidia0" }] } }] });
        assert_eq!(Container::of(&no_numbers).unwrap_err().to_string(), "/dev/nvidia0 has no numbers");
        assert!(Container::of(&serde_json::json!({})).is_err());
    }
}
