//! Words for the exit status of divvy's hook: crun shows nothing else of one that fails.

use divvy_model::HookFailure;

/// Returns what the exit status in a message of crun means; `None` of other messages. runc shows
/// the hook's own words.
pub(super) fn reason(message: &str) -> Option<&'static str> {
    let (_, end) = message.split_once("divvy-cdi-hook")?;
    let (_, status) = end.split_once("(exit code: ")?;
    let (status, _) = status.split_once(')')?;
    Some(HookFailure::of_status(status.parse().ok()?).text())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_that_crun_shows_has_words_and_a_row_of_the_page() {
        let page = include_str!("../../../docs/troubleshoot.md");
        for (status, expected) in [
            (1, "journal"),
            (70, "did not answer"),
            (71, "Events of the claim"),
            (72, "Events of the claim"),
            (73, "did not answer"),
            (74, "libraryDelivery=mounts"),
            (75, "volumes of the pod"),
            (76, "a file of the image"),
            (77, "lacks rights"),
        ] {
            let message = format!(
                "failed to create containerd task: error executing hook `/opt/divvy/divvy-cdi-hook` (exit code: {status}): unknown"
            );
            let found = reason(&message);
            assert!(
                found.is_some_and(|text| text.contains(expected)),
                "{status}: {found:?}"
            );
            let of_caps = (70..=73).contains(&status);
            assert!(
                of_caps || page.contains(&format!("\n| {status} | ")),
                "{status}"
            );
        }
        for other in [
            "error executing hook `/opt/other` (exit code: 75)",
            "hook #0: exit status 75, stderr: divvy-cdi-hook: cannot write /x",
            "divvy-cdi-hook (exit code: x)",
        ] {
            assert_eq!(reason(other), None, "{other}");
        }
    }
}
