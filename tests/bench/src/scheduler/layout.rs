//! What nodes publish, and what claims ask of it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use divvy_api::names;
use divvy_model::mig::ProfileVariant;
use divvy_offer::{AttributeValue, GpuRules, Modes, OfferedMode, Pool};
use serde_json::{Value, json};

use crate::offered::Offered;

/// What all GPUs are offered as.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) name: String,
    /// Whether the budget is meant for it.
    pub(crate) judged: bool,
    pub(crate) rules: GpuRules,
}

impl Layout {
    fn of(name: &str, modes: &[OfferedMode]) -> Self {
        let modes = Modes::Only(modes.iter().copied().collect());
        Self { name: name.to_owned(), judged: false, rules: GpuRules { modes, ..GpuRules::default() } }
    }
}

/// Whole GPUs only, and what may be added to them.
pub(crate) fn standard() -> Vec<Layout> {
    use OfferedMode::{Mig, TimeSlicing, Whole};
    let mut everything = Layout::of("everything", &OfferedMode::ALL);
    everything.judged = true;
    let mut rare = Layout::of("everything+rare", &OfferedMode::ALL);
    rare.rules.rare = BTreeSet::from([
        ProfileVariant::Media,
        ProfileVariant::AllMedia,
        ProfileVariant::NoMedia,
        ProfileVariant::Graphics,
    ]);
    vec![
        Layout::of("whole", &[Whole]),
        Layout::of("whole+shares", &[Whole, TimeSlicing]),
        Layout::of("whole+mig", &[Whole, Mig]),
        everything,
        rare,
    ]
}

/// Whole GPUs only, and one profile of these GPUs added to them.
pub(crate) fn profiles(gpus: &str, version: &str) -> Result<Vec<Layout>> {
    let mut layouts = vec![Layout::of("whole", &[OfferedMode::Whole])];
    let mut all = Layout::of("all profiles", &[OfferedMode::Whole, OfferedMode::Mig]);
    all.rules.rare.extend([
        ProfileVariant::Media,
        ProfileVariant::AllMedia,
        ProfileVariant::NoMedia,
        ProfileVariant::Graphics,
    ]);
    let pool = Offered::new(gpus, &all.rules, version)?.carve("any").pool;
    for profile in published_profiles(&pool).into_keys() {
        let mut layout = Layout::of(&format!("whole+{profile}"), &[OfferedMode::Whole, OfferedMode::Mig]);
        layout.rules.profiles = Some(BTreeSet::from([profile]));
        layouts.push(layout);
    }
    Ok(layouts)
}

/// How many partitions of each profile a pool has.
fn published_profiles(pool: &Pool) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for device in pool.devices() {
        if let Some(AttributeValue::String(profile)) = device.attributes.get(names::attributes::PROFILE) {
            *counts.entry(profile.clone()).or_default() += 1;
        }
    }
    counts
}

/// What claims ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A whole GPU.
    Whole,
    /// A partition of this profile.
    Partition(String),
    /// A share.
    Share,
}

impl Asked {
    /// One of each kind that a pool has; of partitions, those that there are most of.
    pub(crate) fn of(pool: &Pool) -> Vec<Self> {
        let mut asked = Vec::new();
        let partitions = published_profiles(pool);
        if pool.devices().any(|device| !device.allow_multiple && !is_partition(device)) {
            asked.push(Self::Whole);
        }
        let most = partitions.values().max();
        asked.extend(
            partitions
                .iter()
                .find(|(_, count)| Some(*count) == most)
                .map(|(profile, _)| Self::Partition(profile.clone())),
        );
        if pool.devices().any(|device| device.allow_multiple && !is_partition(device)) {
            asked.push(Self::Share);
        }
        asked
    }

    /// In a report.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Whole => "claims for whole GPUs".to_owned(),
            Self::Partition(profile) => format!("claims for {profile}"),
            Self::Share => "claims for shares".to_owned(),
        }
    }

    /// The spec of a claim, as users write it.
    pub(crate) fn spec(&self) -> Value {
        let driver = names::DRIVER;
        let exactly = match self {
            Self::Whole => json!({"deviceClassName": names::CLASS_GPU}),
            Self::Partition(profile) => {
                let fits = format!("device.attributes['{driver}'].profile == '{profile}'");
                json!({"deviceClassName": names::CLASS_MIG, "selectors": [{"cel": {"expression": fits}}]})
            }
            Self::Share => json!({"deviceClassName": names::CLASS_SHARE}),
        };
        json!({"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}})
    }
}

fn is_partition(device: &divvy_offer::Device) -> bool {
    device.attributes.contains_key(names::attributes::PROFILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layout_is_asked_for_each_kind_that_it_publishes() {
        let asked = |layout: &Layout| {
            let offered = Offered::new("h100x1", &layout.rules, "1.37.1").unwrap();
            Asked::of(&offered.carve("any").pool)
        };
        let (layouts, one) = (standard(), Asked::Partition("1g.10gb".to_owned()));
        let by_name = |name: &str| layouts.iter().find(|layout| layout.name == name).unwrap();
        assert_eq!(asked(by_name("whole")), [Asked::Whole]);
        assert_eq!(asked(by_name("whole+mig")), [Asked::Whole, one]);
        let of_one = profiles("h100x1", "1.37.1").unwrap();
        let last = of_one.last().unwrap();
        assert_eq!((last.name.as_str(), asked(last).len()), ("whole+7g.80gb", 2));
    }
}
