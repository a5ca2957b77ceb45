//! Names of DeviceClasses that manifests use and no cluster has: those that were meant. Pure.

use divvy_api::names;
use divvy_model::Form;

use crate::cause::named;
use crate::driver;
use crate::spelling::did_you_mean;

/// Resources of NVIDIA's device plugin, which stand in `limits`.
const PARTITION: &str = "nvidia.com/mig-";

/// Says which class was probably meant by one that does not exist, or which there are. Classes of
/// MIG profiles are one entry.
pub fn instead<'c>(class: &str, there: impl IntoIterator<Item = &'c str>) -> String {
    let there: Vec<&str> = there.into_iter().collect();
    // A name that ends in a domain, before one that is spelt alike.
    let first = class.split_once('.').map_or(class, |(first, _)| first);
    let begins = |start: &str| {
        let start = format!("{start}.");
        let mut all: Vec<&str> = there
            .iter()
            .copied()
            .filter(|other| other.starts_with(&start) && *other != class)
            .collect();
        all.sort_by_key(|name| (name.len(), *name));
        all.first().copied()
    };
    let of_profile = || {
        let meant = driver::class_of(class);
        there.iter().copied().find(|other| *other == meant)
    };
    if let Some(meant) = begins(class).or_else(of_profile).or_else(|| begins(first)) {
        return format!(" (did you mean {meant:?}?)");
    }
    match did_you_mean(class, there.iter().copied()) {
        none if none.is_empty() => format!("; there are {}", listed(&there)),
        hint => hint,
    }
}

/// Lists classes: those of whole GPUs, partitions and shares first.
fn listed(there: &[&str]) -> String {
    let (of_profiles, mut others): (Vec<&str>, Vec<&str>) = there
        .iter()
        .partition(|name| driver::profile_of(name).is_some());
    let known = [
        names::CLASS_GPU,
        driver::NVIDIA,
        names::CLASS_MIG,
        driver::NVIDIA_MIG,
        names::CLASS_SHARE,
        names::CLASS_MPS,
    ];
    let place = |name: &str| known.iter().position(|known| *known == name);
    others.sort_by_key(|name| (place(name).unwrap_or(known.len()), *name));
    let profiles = if of_profiles.is_empty() {
        String::new()
    } else {
        format!(", and one for each MIG profile, as {}", first(&of_profiles))
    };
    format!("{}{profiles}", named(&others))
}

fn first<'n>(names: &[&'n str]) -> &'n str {
    names.iter().min().copied().unwrap_or_default()
}

/// Says what a name with a slash is, which no class has: a resource for `limits`.
pub fn resource(driver: &str, class: &str) -> Option<String> {
    if !class.contains('/') {
        return None;
    }
    let meant = match class.strip_prefix(PARTITION) {
        Some(profile) => driver::class_of(profile),
        None if class.ends_with("/gpu") => driver::class(driver, Form::WHOLE)?.to_owned(),
        None => return Some("that is a resource for a container's limits, no class".to_owned()),
    };
    Some(format!(
        "that is a resource for a container's limits; the class is {meant}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_without_its_domain_is_meant_before_one_spelt_alike() {
        let there = [
            "mig-1g.10gb.divvy.dev",
            "mig-1g.12gb.divvy.dev",
            "admin.divvy.dev",
            "gpu.divvy.dev",
            "mig.divvy.dev",
            "mig-share.divvy.dev",
            "share.divvy.dev",
        ];
        for (class, expected) in [
            ("gpu", " (did you mean \"gpu.divvy.dev\"?)"),
            ("gpu.nvidia.com", " (did you mean \"gpu.divvy.dev\"?)"),
            ("mig.nvidia.com", " (did you mean \"mig.divvy.dev\"?)"),
            ("1g.10gb", " (did you mean \"mig-1g.10gb.divvy.dev\"?)"),
            ("gpu.divy.dev", " (did you mean \"gpu.divvy.dev\"?)"),
            (
                "nvidia",
                "; there are gpu.divvy.dev, mig.divvy.dev, share.divvy.dev, admin.divvy.dev and 1 more, and one for each MIG profile, as \
                 mig-1g.10gb.divvy.dev",
            ),
        ] {
            assert_eq!(instead(class, there), expected, "{class}");
        }
    }

    #[test]
    fn a_resource_of_limits_is_no_class() {
        for (class, expected) in [
            ("nvidia.com/gpu", Some("the class is gpu.divvy.dev")),
            (
                "nvidia.com/mig-1g.10gb",
                Some("the class is mig-1g.10gb.divvy.dev"),
            ),
            ("example.com/card", Some("no class")),
            ("gpu.divvy.dev", None),
        ] {
            let said = resource(names::DRIVER, class);
            assert_eq!(said.is_some(), expected.is_some(), "{class}");
            assert!(
                said.unwrap_or_default()
                    .contains(expected.unwrap_or_default())
            );
        }
    }
}
