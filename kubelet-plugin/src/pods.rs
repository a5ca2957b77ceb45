//! Which pod a process belongs to, from its control group.

use std::collections::BTreeMap;
use std::path::Path;

use divvy_host::HostRoot;
use divvy_usage::pod_of_cgroup;

/// UIDs of the pods of processes; those without one are left out. Of a process that has ended, whose memory the driver
/// still lists, nothing can be read any more: it keeps the pod that it had `before`.
pub(crate) fn of_processes(
    host: &HostRoot,
    pids: &[u32],
    before: &BTreeMap<u32, String>,
) -> BTreeMap<u32, String> {
    let pod = |pid: &u32| {
        let path = host.see(Path::new(&format!("/proc/{pid}/cgroup")));
        match fs_err::read_to_string(path) {
            Ok(text) => pod_of_cgroup(&text),
            Err(_) => before.get(pid).cloned(),
        }
    };
    pids.iter().filter_map(|pid| Some((*pid, pod(pid)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_keeps_its_pod_and_another_of_its_number_does_not() {
        const UID: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
        let dir = tempfile::tempdir().unwrap();
        let host = HostRoot::under(dir.path());
        let write = |pid: u32, text: &str| {
            let folder = dir.path().join(format!("proc/{pid}"));
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join("cgroup"), text).unwrap();
        };
        write(1, &format!("0::/kubepods/pod{UID}/4f1c"));
        write(3, "0::/system.slice/sshd.service");
        let before = [2, 3].map(|pid| (pid, UID.to_owned())).into();
        let found = of_processes(&host, &[1, 2, 3, 4], &before);
        assert_eq!(found, [1, 2].map(|pid| (pid, UID.to_owned())).into());
    }
}
