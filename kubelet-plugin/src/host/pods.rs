//! Pods as the host shows them: which one a process belongs to, from its control group, and their
//! UIDs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::SystemTime;

use divvy_claims::PodRef;
use divvy_host::HostRoot;
use divvy_usage::pods_of_cgroup;

/// UIDs of the pods of processes; those without one are left out. Nothing can be read any more of
/// a process that has ended, whose memory the driver still lists: it keeps the pod that it had
/// `before`.
pub(crate) fn of_processes(
    host: &HostRoot,
    pids: &[u32],
    before: &BTreeMap<u32, String>,
) -> BTreeMap<u32, String> {
    let pod = |pid: &u32| match host.cgroups(*pid) {
        Ok(text) => of_node(host, pods_of_cgroup(&text), String::as_str),
        Err(_) => before.get(pid).cloned(),
    };
    pids.iter()
        .filter_map(|pid| Some((*pid, pod(pid)?)))
        .collect()
}

/// Returns the pod of this node's kubelet among those that a process lies in, which are sorted from
/// the outermost. A kubelet may run in a pod of another one, and a pod of this node have a kubelet
/// in it; a container that may make groups can name one after a pod that is not its own, but only
/// below its own. The outermost that this node has is the one; where it has none, the deepest.
pub(crate) fn of_node<P>(
    host: &HostRoot,
    mut found: Vec<P>,
    uid: impl Fn(&P) -> &str,
) -> Option<P> {
    if found.len() > 1 {
        let known: BTreeSet<String> = uids(host).into_values().collect();
        if let Some(at) = found.iter().position(|pod| known.contains(uid(pod))) {
            return Some(found.swap_remove(at));
        }
    }
    found.pop()
}

/// By namespace and name.
pub(crate) type PodUids = BTreeMap<(String, String), String>;

/// Where the kubelet makes a folder for each pod before it starts, unless its `podLogsDir` is
/// another.
const LOGS: &str = "/var/log/pods";

/// UIDs of the node's pods. The kubelet's list of devices has no UIDs, and the plugin may not read
/// pods from the API: the names of the folders of their logs, `<namespace>_<name>_<uid>`, have all
/// three. The latest of one name counts; the others are of pods that are gone.
pub(crate) fn uids(host: &HostRoot) -> PodUids {
    let mut found = BTreeMap::<_, (SystemTime, String)>::new();
    // Without the folder no UID is known.
    for entry in fs_err::read_dir(host.see(Path::new(LOGS)))
        .into_iter()
        .flatten()
        .flatten()
    {
        let folder = entry.file_name();
        let mut parts = folder.to_str().unwrap_or_default().split('_');
        // None of the three has an underscore: namespace and name are DNS names, and a UID is made
        // of hexadecimal digits and dashes.
        let (Some(namespace), Some(name), Some(uid), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let changed = entry
            .metadata()
            .and_then(|of| of.modified())
            .unwrap_or(SystemTime::UNIX_EPOCH);
        let pod = (namespace.to_owned(), name.to_owned());
        // A pod of a StatefulSet comes back under its name with another UID, and the old folder may
        // be left for a while.
        if found.get(&pod).is_none_or(|(known, _)| *known <= changed) {
            found.insert(pod, (changed, uid.to_owned()));
        }
    }
    found
        .into_iter()
        .map(|(pod, (_, uid))| (pod, uid))
        .collect()
}

/// Returns the names that are of none of these pods.
pub(crate) fn unnamed(pods: &[PodRef], names: impl Iterator<Item = String>) -> BTreeSet<String> {
    names
        .filter(|name| !pods.iter().any(|pod| pod.name == *name))
        .collect()
}

/// Adds pods of one namespace to those of a claim: all of them or, if the UID of one is not known,
/// none, because a figure of all pods would be shown as that of the known ones.
pub(crate) fn add(
    pods: &mut Vec<PodRef>,
    namespace: &str,
    names: BTreeSet<String>,
    uids: &PodUids,
) {
    let pod = |name: String| {
        let uid = uids.get(&(namespace.to_owned(), name.clone()))?.clone();
        Some(PodRef { name, uid })
    };
    let all: Option<Vec<PodRef>> = names.into_iter().map(pod).collect();
    pods.extend(all.unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn uids_are_in_names_of_log_folders_and_the_latest_counts() {
        let dir = tempfile::tempdir().unwrap();
        let host = HostRoot::under(dir.path());
        assert_eq!(uids(&host), BTreeMap::new(), "no such folder");
        let now = SystemTime::now();
        for (folder, age) in [
            ("ns_a_u-3", 1),
            ("ns_a_u-1", 3),
            ("ns_a_u-2", 2),
            ("other_a_u-4", 0),
            ("lost+found", 0),
        ] {
            let path = dir.path().join("var/log/pods").join(folder);
            fs_err::create_dir_all(&path).unwrap();
            let folder = fs_err::File::open(path).unwrap();
            folder
                .file()
                .set_modified(now - Duration::from_secs(age))
                .unwrap();
        }
        let pod =
            |namespace: &str, uid: &str| ((namespace.to_owned(), "a".to_owned()), uid.to_owned());
        assert_eq!(uids(&host), [pod("ns", "u-3"), pod("other", "u-4")].into());
    }

    /// A pod that is there twice would count twice, and a pod of an unknown UID keeps others from
    /// being added.
    #[test]
    fn pods_that_the_status_names_are_not_added_again() {
        let known = ["a", "b"].map(|name| PodRef {
            name: name.to_owned(),
            uid: "u".to_owned(),
        });
        let listed = |names: &[&str]| unnamed(&known, names.iter().map(|name| (*name).to_owned()));
        assert_eq!(listed(&["b", "c", "a"]), ["c".to_owned()].into());
        assert_eq!(listed(&["b"]), BTreeSet::new());
    }

    #[test]
    fn pods_are_added_all_or_none() {
        let known = |name: &str| PodRef {
            name: name.to_owned(),
            uid: format!("u-{name}"),
        };
        let uids = ["a", "b"]
            .map(|name| (("ns".to_owned(), name.to_owned()), format!("u-{name}")))
            .into();
        let with = |names: &[&str], namespace: &str| {
            let mut pods = vec![known("first")];
            add(
                &mut pods,
                namespace,
                names.iter().map(|name| (*name).to_owned()).collect(),
                &uids,
            );
            pods
        };
        assert_eq!(with(&["b", "a"], "ns"), ["first", "a", "b"].map(known));
        assert_eq!(
            with(&["a", "later"], "ns"),
            [known("first")],
            "the kubelet has made no folder yet"
        );
        assert_eq!(with(&["a"], "other"), [known("first")]);
    }

    #[test]
    fn of_nested_pods_the_outermost_of_this_node_has_the_process() {
        const OUTER: &str = "ffffffff-9b1f-4a8e-b3f1-0123456789ab";
        const INNER: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
        let text = format!("0::/kubepods/pod{OUTER}/0a/kubepods/pod{INNER}/4f1c");
        for (of_node, expected) in [
            (&[][..], INNER),
            (&[INNER], INNER),
            (&[OUTER], OUTER),
            // A group that is named after another pod of the node.
            (&[OUTER, INNER], OUTER),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let host = HostRoot::under(dir.path());
            for (number, uid) in of_node.iter().enumerate() {
                let logs = dir.path().join(format!("var/log/pods/ns_p{number}_{uid}"));
                fs_err::create_dir_all(logs).unwrap();
            }
            let folder = dir.path().join("proc/1");
            fs_err::create_dir_all(&folder).unwrap();
            fs_err::write(folder.join("cgroup"), &text).unwrap();
            let found = of_processes(&host, &[1], &BTreeMap::new());
            assert_eq!(found, [(1, expected.to_owned())].into(), "{of_node:?}");
        }
    }

    #[test]
    fn an_ended_process_keeps_its_pod_and_its_numbers_next_does_not() {
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
