//! Runtimes of pods, as a RuntimeClass names them: divvy is for those that run a container as
//! processes of the node.

/// Beginnings of the words by which runtimes that run pods in a kernel of their own are called, and
/// what these are. AKS, GKE and OpenShift use the names of the projects, too.
const SANDBOXES: [(&str, &str); 6] = [
    ("gvisor", "gVisor"),
    ("runsc", "gVisor"),
    ("kata", "Kata Containers"),
    ("firecracker", "Firecracker"),
    ("kuasar", "Kuasar"),
    ("quark", "Quark"),
];
/// The same of runtimes that run processes of the node.
const ORDINARY: [&str; 3] = ["nvidia", "runc", "crun"];

/// Returns the note about a RuntimeClass of a pod with GPUs; `handler` is its own, if it is known.
pub fn note(class: &str, handler: Option<&str>) -> String {
    if let Some(note) = sandbox_note(class, handler) {
        return note;
    }
    let is_ordinary = words(handler.unwrap_or(class)).any(|word| ORDINARY.contains(&word.as_str()));
    if is_ordinary {
        return format!(
            "{class:?} is not needed for GPUs of divvy; a cluster without this RuntimeClass refuses the pod"
        );
    }
    format!(
        "{class:?} may be any runtime: divvy is for runc and crun; sandboxes such as gVisor and Kata are not supported, and a \
         cluster without this RuntimeClass refuses the pod"
    )
}

/// Returns the note about a RuntimeClass whose pods run in a kernel of their own; `None` of others.
pub fn sandbox_note(class: &str, handler: Option<&str>) -> Option<String> {
    // A name can be anything; the handler is what the node runs.
    let name = handler.unwrap_or(class);
    let is_it = |start: &&str| words(name).any(|word| word.starts_with(start));
    let (_, project) = SANDBOXES.iter().find(|(start, _)| is_it(start))?;
    Some(format!(
        "{class:?} runs the pod in {project}, which is not supported: the claim's limits may not hold, and its program may see \
         other GPUs of the node, or none"
    ))
}

fn words(name: &str) -> impl Iterator<Item = String> {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric());
    words.map(str::to_ascii_lowercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_are_named_and_others_are_not_taken_for_them() {
        for (class, handler, expected) in [
            (
                "gvisor",
                None,
                "runs the pod in gVisor, which is not supported",
            ),
            ("gpu", Some("runsc-gpu"), "runs the pod in gVisor"),
            ("kata-qemu-nvidia-gpu", None, "in Kata Containers"),
            ("katacontainers", None, "in Kata Containers"),
            ("kata-vm-isolation", None, "the claim's limits may not hold"),
            ("aws-firecracker", None, "in Firecracker"),
            ("nvidia", None, "is not needed for GPUs of divvy"),
            ("nvidia-cdi", None, "is not needed for GPUs of divvy"),
            ("kata", Some("runc"), "is not needed for GPUs of divvy"),
            ("fast", Some("crun"), "is not needed for GPUs of divvy"),
            ("fast", None, "may be any runtime"),
            ("fast", Some("youki"), "may be any runtime"),
        ] {
            let note = note(class, handler);
            assert!(note.contains(expected), "{class} {handler:?}: {note}");
        }
        assert_eq!(sandbox_note("nvidia", None), None);
        assert_eq!(sandbox_note("fast", None), None);
    }
}
