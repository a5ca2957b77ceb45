//! The node's ability to cap memory, beyond that of its driver.

use std::path::Path;

use divvy_model::MemoryCaps;

/// Controllers by which the driver caps memory; where the kernel has the first, it uses that.
pub(crate) const CONTROLLERS: [&str; 2] = ["dmem", "misc"];

/// The file that lists a group's controllers; groups of version 1 have none.
const LIST: &str = "cgroup.controllers";

/// Returns the controllers of a group; `None` if it has no list.
pub(crate) fn controllers(group: &Path) -> Option<Vec<String>> {
    let list = fs_err::read_to_string(group.join(LIST)).ok()?;
    Some(list.split_whitespace().map(str::to_owned).collect())
}

/// Returns the controller by which the driver caps memory in a hierarchy with this root. A driver that
/// uses `dmem` has its memory listed there; one that was switched to `misc` has not.
pub(crate) fn backend(root: &Path) -> Option<&'static str> {
    let list = controllers(root)?;
    let has = |name: &str| list.iter().any(|has| has == name);
    let listed = fs_err::read_to_string(root.join("dmem.capacity"));
    let is_listed = listed.is_ok_and(|text| text.contains("nvidia/"));
    CONTROLLERS
        .into_iter()
        .find(|name| has(name) && (*name != "dmem" || is_listed))
}

/// Works out the node's ability from its driver's, the controllers at the root of its groups
/// (`None`: groups of version 1), whether the administrator wants caps, and whether a program is called
/// when a container starts.
pub(crate) fn of_node(
    driver: MemoryCaps,
    controllers: Option<&[String]>,
    wanted: bool,
    calls_hook: bool,
) -> MemoryCaps {
    let is_one = |has: &String| CONTROLLERS.contains(&has.as_str());
    match (driver, controllers) {
        (MemoryCaps::Available, _) if !wanted => MemoryCaps::SwitchedOff,
        (MemoryCaps::Available, _) if !calls_hook => MemoryCaps::NoHook,
        (MemoryCaps::Available, None) => MemoryCaps::NoCgroup2,
        (MemoryCaps::Available, Some(list)) if !list.iter().any(is_one) => MemoryCaps::NoController,
        (driver, _) => driver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_caps_memory_only_if_nothing_is_lacking() {
        let list = |text: &str| Some(text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        for (driver, controllers, hook, expected) in [
            (
                MemoryCaps::Available,
                list("cpu misc"),
                true,
                MemoryCaps::Available,
            ),
            (
                MemoryCaps::Available,
                list("cpu dmem"),
                true,
                MemoryCaps::Available,
            ),
            (
                MemoryCaps::Available,
                list("cpu io"),
                true,
                MemoryCaps::NoController,
            ),
            (MemoryCaps::Available, None, true, MemoryCaps::NoCgroup2),
            (
                MemoryCaps::Available,
                list("misc"),
                false,
                MemoryCaps::NoHook,
            ),
            (
                MemoryCaps::OldDriver,
                list("misc dmem"),
                true,
                MemoryCaps::OldDriver,
            ),
        ] {
            let found = of_node(driver, controllers.as_deref(), true, hook);
            assert_eq!(found, expected, "{driver:?} {controllers:?} {hook}");
            assert_eq!(found.lack().is_none(), expected == MemoryCaps::Available);
        }
        let off = of_node(MemoryCaps::Available, list("misc").as_deref(), false, true);
        assert_eq!(off, MemoryCaps::SwitchedOff);
        let root = tempfile::tempdir().unwrap();
        assert_eq!(backend(root.path()), None);
        fs_err::write(root.path().join(LIST), "misc dmem").unwrap();
        assert_eq!(backend(root.path()), Some("misc"), "switched to it");
        let capacity = root.path().join("dmem.capacity");
        fs_err::write(&capacity, "drm/0000:01 8\nnvidia/0000:06:00.0/vidmem 9\n").unwrap();
        assert_eq!(backend(root.path()), Some("dmem"));
    }
}
