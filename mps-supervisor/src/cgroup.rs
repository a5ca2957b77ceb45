//! The control group of the daemons, in which they outlive the container of the supervisor: the
//! runtime kills what is in the groups of a container that ends.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Values without which a group of version 1 takes no process.
const OF_CPUSET: [&str; 2] = ["cpuset.cpus", "cpuset.mems"];

/// Moves a daemon to the group `named`, before it starts a server, which then is there too. A
/// failure costs it its life when the supervisor's container ends, and nothing before.
pub(crate) fn move_to(named: &Path, pid: u32) {
    let groups = groups(named);
    let moved = groups.and_then(|groups| {
        let none = || io::Error::new(io::ErrorKind::NotFound, "no control groups are there");
        let (last, _) = groups.split_last().ok_or_else(none)?;
        tracing::debug!(group = %last.display(), groups = groups.len(), pid, "moving an MPS daemon");
        groups.iter().try_for_each(|group| join(group, pid))
    });
    if let Err(error) = moved {
        tracing::warn!(
            %error,
            "the MPS daemon stays in the control group of the supervisor, and ends with its container"
        );
    }
}

/// Removes the group `named` once nothing runs in it: the kernel keeps one in which a daemon runs.
pub(crate) fn remove(named: &Path) {
    for group in groups(named).unwrap_or_default() {
        match std::fs::remove_dir(&group) {
            Ok(()) => {
                tracing::info!(group = %group.display(), "removed the control group of MPS daemons");
            }
            Err(error) => {
                tracing::debug!(group = %group.display(), %error, "the control group stays");
            }
        }
    }
}

/// Returns the folders of a group: one with control groups of version 2, one in each hierarchy of
/// version 1, where the folder above is no group.
fn groups(named: &Path) -> io::Result<Vec<PathBuf>> {
    let (Some(top), Some(name)) = (named.parent(), named.file_name()) else {
        return Ok(Vec::new());
    };
    if is_group(top) {
        return Ok(vec![named.to_owned()]);
    }
    let mut groups = Vec::new();
    for entry in fs_err::read_dir(top)? {
        let hierarchy = entry?.path();
        // One of several names of a hierarchy is a link.
        if is_group(&hierarchy) && !hierarchy.is_symlink() {
            groups.push(hierarchy.join(name));
        }
    }
    groups.sort();
    Ok(groups)
}

fn is_group(folder: &Path) -> bool {
    folder.join("cgroup.procs").exists()
}

fn join(group: &Path, pid: u32) -> io::Result<()> {
    fs_err::create_dir_all(group)?;
    for file in OF_CPUSET {
        let (own, above) = (group.join(file), group.with_file_name(file));
        // A new group has none, and version 2 takes those above by itself.
        if own.exists() && above.exists() && fs_err::read(&own)?.trim_ascii().is_empty() {
            fs_err::write(&own, fs_err::read(&above)?)?;
        }
    }
    // Never made: a folder without this file is no group, and the process would stay where it is.
    let procs = fs_err::OpenOptions::new()
        .write(true)
        .open(group.join("cgroup.procs"));
    procs?.write_all(pid.to_string().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: PathBuf, text: &str) {
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, text).unwrap();
    }

    #[test]
    fn a_group_is_one_folder_of_version_2_and_several_of_version_1() {
        let (two, one) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        file(two.path().join("cgroup.procs"), "");
        file(two.path().join("kubepods/cgroup.procs"), "");
        let named = two.path().join("divvy-mps");
        assert_eq!(groups(&named).unwrap(), [named]);
        for hierarchy in ["cpu", "pids", "unified"] {
            file(one.path().join(hierarchy).join("cgroup.procs"), "");
        }
        file(one.path().join("no-group/a"), "");
        let found = groups(&one.path().join("divvy-mps")).unwrap();
        let expected = ["cpu", "pids", "unified"].map(|of| one.path().join(of).join("divvy-mps"));
        assert_eq!(found, expected);
    }

    #[test]
    fn a_group_is_removed_in_each_hierarchy_unless_something_is_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let of = |hierarchy: &str| dir.path().join(hierarchy).join("divvy-mps");
        for hierarchy in ["cpu", "pids", "unified"] {
            file(dir.path().join(hierarchy).join("cgroup.procs"), "");
        }
        for hierarchy in ["cpu", "pids"] {
            fs_err::create_dir_all(of(hierarchy)).unwrap();
        }
        // The kernel refuses it as a folder with a file is refused.
        file(of("pids").join("daemon"), "");
        remove(&dir.path().join("divvy-mps"));
        assert!(!of("cpu").exists());
        assert!(of("pids").exists());
    }

    /// The folder above may be no mount of control groups at all.
    #[test]
    fn a_folder_that_is_no_group_is_not_made_to_look_like_one() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("divvy-mps");
        join(&group, 1).unwrap_err();
        assert!(!group.join("cgroup.procs").exists());
    }

    #[test]
    fn a_new_cpuset_gets_what_the_one_above_has() {
        let dir = tempfile::tempdir().unwrap();
        let group = dir.path().join("divvy-mps");
        for (name, above) in [("cpuset.cpus", "0-7\n"), ("cpuset.mems", "0\n")] {
            file(dir.path().join(name), above);
            file(group.join(name), "\n");
        }
        file(group.join("cgroup.procs"), "");
        join(&group, 42).unwrap();
        let text = |name: &str| fs_err::read_to_string(group.join(name)).unwrap();
        assert_eq!(text("cpuset.cpus"), "0-7\n");
        assert_eq!(text("cpuset.mems"), "0\n");
        assert_eq!(text("cgroup.procs"), "42");
    }
}
