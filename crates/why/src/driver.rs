//! The names that divvy's driver can have: its own, and that of NVIDIA's driver, for which it
//! stands in under `gpu.nvidia.com`. Classes follow from the driver's name as the chart makes them.

use std::collections::BTreeMap;

use divvy_api::names::{self, Naming};
use divvy_model::Form;

use crate::lookup;

/// Name of NVIDIA's driver, and of its class of whole GPUs.
pub const NVIDIA: &str = names::NVIDIA_DRIVER;
/// Its class of partitions.
pub const NVIDIA_MIG: &str = "mig.nvidia.com";
/// Its class for passthrough to virtual machines, which divvy does not have.
pub const NVIDIA_VFIO: &str = "vfio.gpu.nvidia.com";
/// Answer to a claim of that class.
pub const NO_PASSTHROUGH: &str = "class vfio.gpu.nvidia.com is passthrough to virtual machines, which divvy does not have: leave a node to \
     NVIDIA's driver for it";

/// The drivers for which the chart has classes.
pub const KNOWN: [&str; 2] = [names::DRIVER, NVIDIA];

/// Returns which of the known names this is; any other is for divvy's own.
pub fn known(name: &str) -> &'static str {
    let found = KNOWN.into_iter().find(|known| *known == name);
    found.unwrap_or(names::DRIVER)
}

/// Returns the name of the driver that is shown: the one that is asked for, else the one that most
/// nodes report, ours first, and what of other names is not shown then. `GpuNodes` are divvy's
/// alone, so that NVIDIA's driver is never taken for it. A node may report no name yet.
pub fn shown<'a>(
    asked: Option<&str>,
    reported: impl Iterator<Item = &'a str>,
) -> (String, Vec<String>) {
    if let Some(asked) = asked {
        return (asked.to_owned(), Vec::new());
    }
    let mut nodes: BTreeMap<&str, usize> = BTreeMap::new();
    for name in reported.filter(|name| !name.is_empty()) {
        *nodes.entry(name).or_default() += 1;
    }
    let most = nodes
        .iter()
        .max_by_key(|(name, count)| (**count, **name == names::DRIVER));
    let found = most.map_or(names::DRIVER, |(name, _)| name);
    let others = nodes.iter().filter(|(name, _)| **name != found);
    let others = others.map(|(name, count)| {
        let nodes = if *count == 1 {
            "1 node serves".to_owned()
        } else {
            format!("{count} nodes serve")
        };
        format!("devices and claims of driver {name}, which {nodes}: see --driver-name {name}")
    });
    (found.to_owned(), others.collect())
}

/// Returns the class of devices of a form; none of forms that have no class of their own.
pub fn class(driver: &str, form: Form) -> Option<&'static str> {
    let stands_in = driver == NVIDIA;
    Some(match form {
        Form::WHOLE if stands_in => NVIDIA,
        Form::PARTITIONS if stands_in => NVIDIA_MIG,
        Form::WHOLE => names::CLASS_GPU,
        Form::PARTITIONS => names::CLASS_MIG,
        Form::TIME_SLICED => names::CLASS_SHARE,
        Form::SHARED_PARTITIONS => names::CLASS_MIG_SHARE,
        Form::MPS => names::CLASS_MPS,
        Form::MPS_PARTITIONS => names::CLASS_MIG_MPS,
        Form::ADMIN => names::CLASS_ADMIN,
        _ => return None,
    })
}

/// Returns the form of the devices of a class of the chart.
pub fn form(driver: &str, name: &str) -> Option<Form> {
    let all = [Form::ADMIN].into_iter().chain(Form::HELD);
    let mut all = all.filter(|form| class(driver, *form).is_some());
    all.find(|form| class(driver, *form) == Some(name))
}

/// Returns the class that the chart has for one MIG profile.
pub fn class_of(profile: &str) -> String {
    let (kind, domain) = names::CLASS_MIG.split_once('.').unwrap_or_default();
    format!("{kind}-{profile}.{domain}")
}

/// Returns the profile of a class that the chart has for one MIG profile.
pub fn profile_of(class: &str) -> Option<&str> {
    let (kind, domain) = names::CLASS_MIG.split_once('.')?;
    let profile = class.strip_suffix(domain)?.strip_suffix('.')?;
    let profile = profile.strip_prefix(kind)?.strip_prefix('-')?;
    // Others of partitions, as mig-share, are of no one profile.
    profile
        .starts_with(|first: char| first.is_ascii_digit())
        .then_some(profile)
}

/// Returns an attribute of ours with its domain, as a driver of this name publishes it.
pub fn attribute(driver: &str, name: &str) -> String {
    lookup::full(driver, &Naming::of(driver).attribute(name))
}

/// Returns a capacity of ours with its domain, as a driver of this name publishes it.
pub fn capacity(driver: &str, name: &str) -> String {
    lookup::full(driver, &Naming::of(driver).capacity(name))
}

/// Returns what a map of a device has under a name of ours: plain in the driver's domain, or with
/// divvy's domain, as a stand-in publishes names that NVIDIA's driver does not have.
pub fn own<'m, V>(map: &'m BTreeMap<String, V>, name: &str) -> Option<&'m V> {
    let in_domain = |domain: &&str| map.get(&format!("{domain}/{name}"));
    map.get(name).or_else(|| KNOWN.iter().find_map(in_domain))
}

/// Returns a name of ours without a domain of ours.
pub fn plain(name: &str) -> &str {
    // Of other drivers no name has one of these domains.
    Naming::ours(NVIDIA, Naming::ours(names::DRIVER, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_the_one_that_most_nodes_report() {
        let (own, nvidia) = (names::DRIVER, names::NVIDIA_DRIVER);
        for (asked, reported, expected, others) in [
            (None, vec![], own, None),
            (None, vec![""], own, None),
            (None, vec![own, own], own, None),
            (None, vec![nvidia, ""], nvidia, None),
            (None, vec!["gpu.example.com"], "gpu.example.com", None),
            (
                None,
                vec![nvidia, nvidia, own],
                nvidia,
                Some("driver gpu.divvy.dev, which 1 node serves"),
            ),
            (
                None,
                vec![nvidia, own],
                own,
                Some("--driver-name gpu.nvidia.com"),
            ),
            (Some(nvidia), vec![own], nvidia, None),
        ] {
            let (found, not_shown) = shown(asked, reported.iter().copied());
            assert_eq!(found, expected, "{asked:?} {reported:?}");
            assert_eq!(not_shown.len(), usize::from(others.is_some()));
            let said = not_shown.first().map_or("", |text| text);
            assert!(said.contains(others.unwrap_or_default()), "{said}");
        }
    }

    #[test]
    fn classes_follow_from_the_name_of_the_driver() {
        for (driver, name, expected) in [
            (names::DRIVER, "gpu.divvy.dev", Some(Form::WHOLE)),
            (names::DRIVER, "gpu.nvidia.com", None),
            (NVIDIA, "gpu.nvidia.com", Some(Form::WHOLE)),
            (NVIDIA, "mig.nvidia.com", Some(Form::PARTITIONS)),
            (NVIDIA, "gpu.divvy.dev", None),
            (NVIDIA, "share.divvy.dev", Some(Form::TIME_SLICED)),
            (NVIDIA, "mig-share.divvy.dev", Some(Form::SHARED_PARTITIONS)),
            (NVIDIA, "mps.divvy.dev", Some(Form::MPS)),
            (NVIDIA, "mig-mps.divvy.dev", Some(Form::MPS_PARTITIONS)),
            (NVIDIA, "admin.divvy.dev", Some(Form::ADMIN)),
        ] {
            assert_eq!(form(driver, name), expected, "{driver} {name}");
        }
        assert_eq!(profile_of("mig-1g.10gb.divvy.dev"), Some("1g.10gb"));
        for other in [names::CLASS_MIG, names::CLASS_MIG_SHARE, names::CLASS_GPU] {
            assert_eq!(profile_of(other), None, "{other}");
        }
    }

    #[test]
    fn names_of_ours_are_found_with_and_without_our_domain() {
        let map = |name: &str| BTreeMap::from([(name.to_owned(), 1)]);
        assert_eq!(own(&map("cores"), "cores"), Some(&1));
        assert_eq!(own(&map("gpu.divvy.dev/cores"), "cores"), Some(&1));
        assert_eq!(own(&map("example.com/cores"), "cores"), None);
        assert_eq!(plain("gpu.divvy.dev/cores"), "cores");
        assert_eq!(plain("example.com/cores"), "example.com/cores");
    }
}
