//! Which pod a process belongs to, from its control group.

use std::collections::BTreeMap;
use std::path::Path;

use divvy_host::HostRoot;

/// UIDs of the pods of processes; those without one, or gone, are left out.
pub(crate) fn of_processes(host: &HostRoot, pids: &[u32]) -> BTreeMap<u32, String> {
    pids.iter()
        .filter_map(|pid| {
            let path = host.see(Path::new(&format!("/proc/{pid}/cgroup")));
            Some((*pid, of_cgroup(&fs_err::read_to_string(path).ok()?)?))
        })
        .collect()
}

/// The pod UID in a `/proc/<pid>/cgroup` file: `…/kubepods/besteffort/pod<uid>/…`, or, under systemd,
/// `…-pod<uid with underscores>.slice/…`.
fn of_cgroup(text: &str) -> Option<String> {
    text.lines().find_map(|line| {
        line.split('/').find_map(|part| {
            let part = part.strip_suffix(".slice").unwrap_or(part);
            let (before, uid) = part.rsplit_once("pod")?;
            let uid = uid.replace('_', "-");
            let fits = (before.is_empty() || before.ends_with('-'))
                && uid.len() == 36
                && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
            fits.then_some(uid)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_control_group_drivers_are_understood() {
        let uid = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
        let cgroupfs = format!("0::/kubepods/besteffort/pod{uid}/4f1c");
        let systemd = "0::/kubepods.slice/kubepods-pod0b5a4a3e_9b1f_4a8e_b3f1_0123456789ab.slice/cri-containerd-4f1c.scope";
        assert_eq!(of_cgroup(&cgroupfs).as_deref(), Some(uid));
        assert_eq!(of_cgroup(systemd).as_deref(), Some(uid));
        assert_eq!(of_cgroup("0::/system.slice/podman.service"), None);
    }
}
