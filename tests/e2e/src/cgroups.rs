//! The cgroups of a cluster's pods: made before the kubelet starts, removed after everything in
//! them has ended.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use fs_err as fs;

use crate::wait::poll;

const ROOT: &str = "/sys/fs/cgroup";

/// The folder `name` of every hierarchy of this machine.
fn folders(name: &str) -> Result<Vec<PathBuf>> {
    let root = Path::new(ROOT);
    if root.join("cgroup.controllers").exists() {
        return Ok(vec![root.join(name)]);
    }
    let mut folders = Vec::new();
    for entry in fs::read_dir(root)? {
        let hierarchy = entry?.path();
        if hierarchy.join("cgroup.procs").exists() {
            folders.push(hierarchy.join(name));
        }
    }
    folders.sort();
    Ok(folders)
}

/// Makes the cgroup `name`.
pub(crate) fn create(name: &str) -> Result<()> {
    for folder in folders(name)? {
        fs::create_dir_all(&folder)?;
        // A new cpuset of version 1 is empty, and nothing can be put into an empty one.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let parent = folder.parent().unwrap_or(Path::new(ROOT)).join(file);
            if parent.exists() {
                fs::write(folder.join(file), fs::read(parent)?)?;
            }
        }
    }
    Ok(())
}

/// Removes the cgroup `name` and all below, once what was killed there is gone.
pub(crate) fn remove(name: &str) -> Result<()> {
    poll("removal of the cgroups", Duration::from_secs(10), || {
        for folder in folders(name)?.iter().filter(|folder| folder.exists()) {
            remove_tree(folder)?;
        }
        Ok(true)
    })
}

/// The files of a cgroup cannot be removed, its folders can, deepest first.
fn remove_tree(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(folder).with_context(|| format!("{} is in use", folder.display()))
}
