//! The control group of a container, and that of its pod.

use divvy_usage::pod_of_cgroup;

/// A container's group in the hierarchy of version 2, by paths below its root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// UID of the pod.
    pub(crate) pod: String,
    /// The pod's own group: above that of the container, however deep its runtime nests them.
    pub(crate) of_pod: String,
    /// The group of the process.
    pub(crate) leaf: String,
}

impl Group {
    /// Reads the text of `/proc/<pid>/cgroup`: the group in each pod that it lies in, the outermost
    /// first. Empty for a process of no pod, and where groups of version 2 do not say.
    pub(crate) fn all(text: &str) -> Vec<Self> {
        let mut lines = text.lines();
        let Some(path) = lines.find_map(|line| line.strip_prefix("0::/")) else {
            return Vec::new();
        };
        // A path that leads out of this namespace's root is of no folder here.
        if path.split('/').any(|part| part == "..") {
            return Vec::new();
        }
        let ends = path.match_indices('/').map(|(at, _)| at);
        let above = ends.filter_map(|end| path.get(..end)).chain([path]);
        let group = |above: &str| {
            let (_, part) = above.rsplit_once('/').unwrap_or(("", above));
            Some(Self {
                pod: pod_of_cgroup(part)?,
                of_pod: above.to_owned(),
                leaf: path.to_owned(),
            })
        };
        above.filter_map(group).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
    const OUTER: &str = "ffffffff-9b1f-4a8e-b3f1-0123456789ab";
    const UNDERSCORES: &str = "0b5a4a3e_9b1f_4a8e_b3f1_0123456789ab";

    #[test]
    fn the_pods_group_is_found_above_that_of_each_runtime() {
        let systemd = format!(
            "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORES}.slice"
        );
        for (name, pod, leaf) in [
            ("cgroupfs", format!("kubepods/burstable/pod{UID}"), "4f1c"),
            (
                "containerd under systemd",
                systemd.clone(),
                "cri-containerd-4f1c.scope",
            ),
            (
                "crun: a group below the scope",
                systemd.clone(),
                "crio-4f1c.scope/container",
            ),
            (
                "a kubelet in a pod",
                format!("kubepods/pod{OUTER}/0a/kubelet/kubepods/pod{UID}"),
                "4f1c",
            ),
            (
                "a kubelet in a container",
                format!("kubelet/kubepods/besteffort/pod{UID}"),
                "4f1c",
            ),
        ] {
            // Groups of version 1 beside it, as on a machine with both.
            let text = format!("4:memory:/elsewhere\n0::/{pod}/{leaf}\n");
            let group = Group::all(&text).pop().unwrap();
            let leaf = format!("{pod}/{leaf}");
            assert_eq!(
                (&*group.pod, &group.of_pod, &group.leaf),
                (UID, &pod, &leaf),
                "{name}"
            );
        }
    }

    #[test]
    fn a_process_of_no_pod_or_of_groups_of_version_1_has_none() {
        for text in [
            "0::/system.slice/sshd.service".to_owned(),
            "0::/".to_owned(),
            String::new(),
            format!("4:memory:/kubepods/pod{UID}/4f1c"),
            format!("0::/../../pod{UID}/4f1c"),
        ] {
            assert_eq!(Group::all(&text), [], "{text}");
        }
    }
}
