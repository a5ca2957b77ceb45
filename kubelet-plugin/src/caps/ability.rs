//! The node's ability to cap memory, beyond that of its driver.

use std::io;
use std::path::Path;

use divvy_model::MemoryCaps;

/// Controllers by which the driver caps memory; where the kernel has the first, it uses that.
pub(crate) const CONTROLLERS: [&str; 2] = ["dmem", "misc"];

/// The file that lists a group's controllers; groups of version 1 have none.
const LIST: &str = "cgroup.controllers";

/// Returns the controllers of a group; `None` if it has no list, as groups of version 1. A list
/// that cannot be read is an error: nothing is known then.
pub(crate) fn controllers(group: &Path) -> io::Result<Option<Vec<String>>> {
    match fs_err::read_to_string(group.join(LIST)) {
        Ok(list) => Ok(Some(list.split_whitespace().map(str::to_owned).collect())),
        Err(error) if error.kind() == io::ErrorKind::NotFound && group.is_dir() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the controller by which the driver caps memory in a hierarchy with this root. A driver
/// that uses `dmem` has its memory listed there; one that was switched to `misc` has not.
pub(crate) fn backend(root: &Path) -> io::Result<Option<&'static str>> {
    let Some(list) = controllers(root)? else {
        return Ok(None);
    };
    let has = |name: &str| list.iter().any(|has| has == name);
    let listed = fs_err::read_to_string(root.join("dmem.capacity"));
    let is_listed = listed.is_ok_and(|text| text.contains("nvidia/"));
    Ok(CONTROLLERS
        .into_iter()
        .find(|name| has(name) && (*name != "dmem" || is_listed)))
}

/// Works out the node's ability from its driver's, the controller by which that caps memory in the
/// hierarchy with this root, whether the administrator wants caps, and whether a program is called
/// when a container starts.
pub(crate) fn of_node(
    driver: MemoryCaps,
    root: &Path,
    wanted: bool,
    calls_hook: bool,
) -> MemoryCaps {
    match driver {
        MemoryCaps::Available if !wanted => MemoryCaps::SwitchedOff,
        MemoryCaps::Available if !calls_hook => MemoryCaps::NoHook,
        MemoryCaps::Available => match (controllers(root), backend(root)) {
            (Err(_), _) | (_, Err(_)) => MemoryCaps::GroupsUnreadable,
            (Ok(None), _) => MemoryCaps::NoCgroup2,
            (Ok(Some(_)), Ok(None)) => MemoryCaps::NoController,
            (Ok(Some(_)), Ok(Some(_))) => MemoryCaps::Available,
        },
        driver => driver,
    }
}

/// Returns whether the driver keeps limits of groups that are gone.
pub(crate) fn caps_linger(caps: MemoryCaps, root: &Path) -> bool {
    caps == MemoryCaps::Available && matches!(backend(root), Ok(Some("misc")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hierarchy whose root has these controllers; none: of version 1.
    fn hierarchy(list: Option<&str>) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        if let Some(list) = list {
            fs_err::write(root.path().join(LIST), list).unwrap();
        }
        root
    }

    #[test]
    fn a_node_caps_memory_only_if_nothing_is_lacking() {
        let available = MemoryCaps::Available;
        for (driver, list, wanted, hook, expected) in [
            (available, Some("cpu misc"), true, true, available),
            (
                available,
                Some("cpu io"),
                true,
                true,
                MemoryCaps::NoController,
            ),
            (available, None, true, true, MemoryCaps::NoCgroup2),
            (available, Some("misc"), true, false, MemoryCaps::NoHook),
            (
                available,
                Some("misc"),
                false,
                true,
                MemoryCaps::SwitchedOff,
            ),
            (
                MemoryCaps::OldDriver,
                Some("misc"),
                true,
                true,
                MemoryCaps::OldDriver,
            ),
            (
                MemoryCaps::NoCalls,
                Some("misc"),
                true,
                true,
                MemoryCaps::NoCalls,
            ),
        ] {
            let root = hierarchy(list);
            let found = of_node(driver, root.path(), wanted, hook);
            assert_eq!(found, expected, "{driver:?} {list:?} {wanted} {hook}");
            assert_eq!(found.lack().is_none(), expected == available);
            assert_eq!(caps_linger(found, root.path()), expected == available);
        }
    }

    /// Users would be sent to change what is right.
    #[test]
    fn groups_that_cannot_be_read_are_unknown_and_not_of_version_1() {
        let root = hierarchy(None);
        // A folder in the place of the file: reading fails for root, too.
        fs_err::create_dir(root.path().join(LIST)).unwrap();
        let gone = root.path().join("gone");
        for path in [root.path(), gone.as_path()] {
            assert!(controllers(path).is_err(), "{}", path.display());
            let found = of_node(MemoryCaps::Available, path, true, true);
            assert_eq!(found, MemoryCaps::GroupsUnreadable);
        }
    }

    #[test]
    fn the_controller_is_dmem_where_the_driver_has_its_memory_there() {
        assert_eq!(backend(hierarchy(None).path()).unwrap(), None);
        let root = hierarchy(Some("misc dmem"));
        let of = || {
            (
                backend(root.path()).unwrap(),
                caps_linger(MemoryCaps::Available, root.path()),
            )
        };
        assert_eq!(of(), (Some("misc"), true), "switched to it");
        let capacity = root.path().join("dmem.capacity");
        fs_err::write(&capacity, "drm/0000:01 8\nnvidia/0000:06:00.0/vidmem 9\n").unwrap();
        assert_eq!(of(), (Some("dmem"), false));
        let only = hierarchy(Some("dmem"));
        let found = of_node(MemoryCaps::Available, only.path(), true, true);
        assert_eq!(found, MemoryCaps::NoController, "the driver is not in it");
    }
}
