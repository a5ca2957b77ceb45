//! The pod that a process belongs to, from its control group.

/// Returns the pod UIDs in a `/proc/<pid>/cgroup` file, the outermost first, wherever in a path
/// they are: `…/kubepods/besteffort/pod<uid>/…`, or, under systemd, `…-pod<uid with
/// underscores>.slice/…`. Static pods have UIDs of 32 digits without dashes. There are several
/// where a kubelet runs in a pod, or a container has named a group of its own so.
pub fn pods_of_cgroup(text: &str) -> Vec<String> {
    let of_line = |line: &str| line.split('/').filter_map(pod).collect::<Vec<_>>();
    let mut lines = text.lines().map(of_line);
    lines.find(|pods| !pods.is_empty()).unwrap_or_default()
}

/// Returns the deepest of the pods in a `/proc/<pid>/cgroup` file, or in a part of a path.
pub fn pod_of_cgroup(text: &str) -> Option<String> {
    pods_of_cgroup(text).pop()
}

/// Returns the pod UID of a part of a path.
fn pod(part: &str) -> Option<String> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    // From the right: the part begins with `kubepods` under systemd, and a UID, in hexadecimal
    // digits, cannot contain the word.
    let (before, uid) = part.rsplit_once("pod")?;
    let uid = uid.replace('_', "-");
    let digits = uid.bytes().filter(u8::is_ascii_hexdigit).count();
    let dashes = uid.bytes().filter(|b| *b == b'-').count();
    let fits = (before.is_empty() || before.ends_with('-'))
        && digits == 32
        && uid.len() == digits + dashes
        && (dashes == 0 || dashes == 4);
    fits.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
    const OUTER: &str = "ffffffff-9b1f-4a8e-b3f1-0123456789ab";
    const UNDERSCORES: &str = "0b5a4a3e_9b1f_4a8e_b3f1_0123456789ab";
    const STATIC: &str = "0b5a4a3e9b1f4a8eb3f10123456789ab";

    #[test]
    fn the_pod_is_found_in_the_paths_of_every_kubelet_and_runtime() {
        let cases = [
            (
                "v2, cgroupfs",
                format!("0::/kubepods/besteffort/pod{UID}/4f1c"),
            ),
            (
                "v2, cgroupfs, guaranteed",
                format!("0::/kubepods/pod{UID}/4f1c"),
            ),
            (
                "v2, systemd, containerd",
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORES}.slice/cri-containerd-4f1c.scope"
                ),
            ),
            (
                "v2, systemd, guaranteed, CRI-O",
                format!("0::/kubepods.slice/kubepods-pod{UNDERSCORES}.slice/crio-4f1c.scope"),
            ),
            (
                "v1: one line a controller",
                format!(
                    "12:pids:/kubepods/burstable/pod{UID}/4f1c\n11:memory:/kubepods/burstable/pod{UID}/4f1c\n1:name=systemd:/kubepods/burstable/pod{UID}/4f1c"
                ),
            ),
            (
                "v1: the first line has another",
                format!("13:misc:/\n4:memory:/kubepods/pod{UID}/4f1c"),
            ),
            (
                "kind",
                format!(
                    "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{UNDERSCORES}.slice/cri-containerd-4f1c.scope"
                ),
            ),
            (
                "nested in a container",
                format!(
                    "0::/system.slice/docker-99.scope/kubelet/kubepods/besteffort/pod{UID}/4f1c"
                ),
            ),
            (
                "a kubelet in a pod",
                format!("0::/kubepods/pod{OUTER}/0a/kubelet/kubepods/pod{UID}/4f1c"),
            ),
            (
                "seen from a private namespace",
                format!("0::/../../pod{UID}/4f1c"),
            ),
            (
                "a container with groups of its own",
                format!("0::/kubepods/pod{UID}/4f1c/init.scope/x"),
            ),
        ];
        for (name, text) in cases {
            assert_eq!(pod_of_cgroup(&text).as_deref(), Some(UID), "{name}");
            let expected: &[&str] = if text.contains(OUTER) {
                &[OUTER, UID]
            } else {
                &[UID]
            };
            assert_eq!(pods_of_cgroup(&text), expected, "{name}");
        }
        for text in [
            format!("0::/kubepods/pod{STATIC}/4f1c"),
            format!("0::/kubepods.slice/kubepods-pod{STATIC}.slice/x"),
        ] {
            assert_eq!(
                pod_of_cgroup(&text).as_deref(),
                Some(STATIC),
                "a static pod"
            );
        }
    }

    #[test]
    fn what_is_in_no_pod_has_none() {
        for text in [
            "0::/system.slice/podman.service",
            "0::/",
            "",
            "0::/user.slice/tripod0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab",
            "0::/kubepods/pod0b5a4a3e-9b1f",
            "0::/kubepods/pod0b5a4a3e-9b1f-4a8e-b3f1-0123456789az",
        ] {
            assert_eq!(pod_of_cgroup(text), None, "{text}");
        }
    }
}
