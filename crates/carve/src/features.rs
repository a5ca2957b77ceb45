//! What the API server can store and the scheduler can be trusted with.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

/// Fields of a ResourceSlice that come and go with a feature gate of the API server. A server without the gate
/// drops the fields silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Feature {
    /// `taints`.
    Taints,
    /// `sharedCounters`, `consumesCounters`.
    Partitions,
    /// `allowMultipleAllocations`, `requestPolicy`.
    Shares,
}

impl Feature {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Taints, Self::Partitions, Self::Shares];

    /// The feature gate of the API server.
    pub fn gate(self) -> &'static str {
        match self {
            Self::Taints => "DRADeviceTaints",
            Self::Partitions => "DRAPartitionableDevices",
            Self::Shares => "DRAConsumableCapacity",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.gate())
    }
}

/// A version of Kubernetes. A pre-release counts as the release before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct KubeVersion {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
}

impl KubeVersion {
    /// A version by its numbers.
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// From `gitVersion` of `/version`: `v1.37.1`, `v1.36.4-eks-1a2b3c`, `v1.36.2-rc.1`. `None` for anything else.
    pub fn parse(git_version: &str) -> Option<Self> {
        let text = git_version.strip_prefix('v')?;
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (numbers, rest) = text.split_at_checked(end)?;
        let mut parts = numbers.split('.').map(str::parse);
        let mut next = || parts.next()?.ok();
        let (major, minor, patch) = (next()?, next()?, next()?);
        let pre = ["-alpha", "-beta", "-rc"].iter().any(|tag| rest.starts_with(tag));
        Some(match (pre, patch) {
            (false, _) => Self { major, minor, patch },
            (true, 1..) => Self { major, minor, patch: patch - 1 },
            (true, 0) => Self { major, minor: minor.saturating_sub(1), patch: u32::MAX },
        })
    }
}

impl fmt::Display for KubeVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// What may be published: the versions seen and the features whose fields came back missing.
///
/// Several API servers of different versions can stand behind one address (an upgrade runs for an hour), so the
/// lowest of the last [`ServerFeatures::MEMORY`] answers counts. When the lowest rises the upgrade is over, and
/// dropped features get another try: gates change with versions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ServerFeatures {
    seen: Vec<KubeVersion>,
    dropped: BTreeSet<Feature>,
}

impl ServerFeatures {
    /// How many answers of the version question are remembered.
    pub const MEMORY: usize = 8;
    /// From here on the scheduler charges counters of devices that several claims have (`field.md` 7a).
    pub const SEVERAL_MODES: KubeVersion = KubeVersion::new(1, 36, 2);
    /// From here on counter sets have slices of their own.
    pub const PARTITIONS: KubeVersion = KubeVersion::new(1, 35, 0);

    /// What is known after a server answered with its version. Unchanged if the answer changes nothing.
    #[must_use]
    pub fn observe(&self, version: KubeVersion) -> Self {
        let mut seen = self.seen.clone();
        seen.push(version);
        if seen.len() > Self::MEMORY {
            seen.remove(0);
        }
        let next = Self { seen, dropped: self.dropped.clone() };
        match (self.lowest(), next.lowest()) {
            (Some(before), Some(after)) if after > before => Self { dropped: BTreeSet::new(), ..next },
            _ => next,
        }
    }

    /// What is known after the fields of `features` were sent and did not come back.
    #[must_use]
    pub fn without(&self, features: impl IntoIterator<Item = Feature>) -> Self {
        let mut next = self.clone();
        next.dropped.extend(features);
        next
    }

    /// The version that counts: the lowest seen. `None` before the first answer.
    pub fn lowest(&self) -> Option<KubeVersion> {
        self.seen.iter().copied().min()
    }

    /// The features whose fields came back missing.
    pub fn dropped(&self) -> &BTreeSet<Feature> {
        &self.dropped
    }

    /// Whether fields of a feature are worth sending. Taints and shares are tried on every server: the version does
    /// not say whether their gate is on, the answer to a write does.
    pub fn supports(&self, feature: Feature) -> bool {
        let new_enough = match feature {
            Feature::Taints | Feature::Shares => true,
            Feature::Partitions => self.lowest().is_some_and(|version| version >= Self::PARTITIONS),
        };
        new_enough && !self.dropped.contains(&feature)
    }

    /// Whether one GPU may be published in several modes (the mode lock holds; DESIGN section 1).
    pub fn several_modes(&self) -> bool {
        self.lowest().is_some_and(|version| version >= Self::SEVERAL_MODES)
            && self.supports(Feature::Partitions)
            && self.supports(Feature::Shares)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: fn(u32, u32, u32) -> KubeVersion = KubeVersion::new;

    #[test]
    fn versions_are_read_and_a_pre_release_counts_as_the_release_before() {
        assert_eq!(KubeVersion::parse("v1.37.1"), Some(V(1, 37, 1)));
        assert_eq!(KubeVersion::parse("v1.36.4-eks-1a2b3c"), Some(V(1, 36, 4)));
        assert_eq!(KubeVersion::parse("v1.36.2+k3s1"), Some(V(1, 36, 2)));
        assert_eq!(KubeVersion::parse("v1.36.2-rc.1"), Some(V(1, 36, 1)));
        assert!(KubeVersion::parse("v1.36.0-beta.0").is_some_and(|v| v > V(1, 35, 9) && v < V(1, 36, 0)));
        for bad in ["", "1.37.1", "v1.37", "v1..1", "va.b.c", "v1.99999999999.1"] {
            assert_eq!(KubeVersion::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_lowest_version_seen_counts_until_it_is_out_of_memory() {
        let old = ServerFeatures::default().observe(V(1, 36, 1)).observe(V(1, 37, 1));
        assert_eq!(old.lowest(), Some(V(1, 36, 1)));
        assert!(!old.several_modes() && old.supports(Feature::Partitions));
        let new = (0..ServerFeatures::MEMORY).fold(old, |f, _| f.observe(V(1, 37, 1)));
        assert!(new.several_modes());
        assert!(!new.observe(V(1, 34, 0)).supports(Feature::Partitions), "a lower one counts at once");
    }

    #[test]
    fn dropped_features_stay_off_until_the_lowest_version_rises() {
        let off = ServerFeatures::default().observe(V(1, 35, 0)).without([Feature::Taints]);
        assert!(!off.supports(Feature::Taints) && off.supports(Feature::Shares));
        let mut later = off.observe(V(1, 36, 4));
        assert!(!later.supports(Feature::Taints), "1.35 is still in memory");
        for _ in 0..ServerFeatures::MEMORY {
            later = later.observe(V(1, 36, 4));
        }
        assert!(later.supports(Feature::Taints));
    }

    #[test]
    fn nothing_is_trusted_before_a_version_is_known() {
        let unknown = ServerFeatures::default();
        assert!(unknown.supports(Feature::Taints));
        assert!(!unknown.supports(Feature::Partitions) && !unknown.several_modes());
    }
}
