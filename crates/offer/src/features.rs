//! Features that the API server can store and the scheduler can be trusted with.

use std::collections::BTreeSet;

use serde::Serialize;

use crate::{KubeVersion, ModeLock};

/// Fields of a ResourceSlice that come and go with a feature gate of the API server. A server
/// without the gate drops the fields silently.
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

/// The knowledge of what may be published: the versions seen and the features whose fields came
/// back missing.
///
/// Several API servers of different versions can stand behind one address (an upgrade runs for an
/// hour), so the lowest of the last [`ServerFeatures::MEMORY`] answers counts. When the lowest
/// rises the upgrade is over: only what the newer server drops is dropped then, and several modes
/// get another try. Gates and schedulers change with versions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ServerFeatures {
    seen: Vec<KubeVersion>,
    dropped: BTreeSet<Feature>,
    /// The features that the last dry run lost.
    tried: BTreeSet<Feature>,
    lock: ModeLock,
    conflict: bool,
}

/// Why a GPU may be published in one mode only.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum OneMode {
    /// The mode lock is off.
    #[error("the mode lock is turned off (--mode-lock, or modeLock of a GpuPolicy)")]
    TurnedOff,
    /// The scheduler has given a GPU out in two modes.
    #[error(
        "the scheduler has allocated a GPU in two modes at once: it does not count the modes of a GPU correctly (this lasts until one of the two claims is released)"
    )]
    Conflict,
    /// The scheduler is too old.
    #[error(
        "several modes of one GPU need Kubernetes {needed} or later, and the API server is {found}"
    )]
    TooOld {
        /// The version that counts.
        found: KubeVersion,
        /// The version that is needed.
        needed: KubeVersion,
    },
    /// The version of the API server is not known yet.
    #[error("the version of the API server is not known yet")]
    VersionUnknown,
    /// The server does not store what keeps the modes apart.
    #[error(
        "the API server does not store counters (Kubernetes 1.35 or later, feature gate DRAPartitionableDevices)"
    )]
    CountersDropped,
}

/// Why no partitions may be published, nor anything else that draws on counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum NoPartitions {
    /// The server does not store counters, or its version is not known yet.
    #[error("that needs Kubernetes 1.35 or later with the feature gate DRAPartitionableDevices")]
    NotStored,
    /// The scheduler ends with a nil pointer at a claim that asks for all devices, as long as one
    /// of them draws on counters.
    #[error(
        "any user's claim with `allocationMode: All` would end the scheduler of Kubernetes {found}; that needs {needed} or later, or `modeLock: Enabled` of a GpuPolicy where the scheduler was mended or such claims are refused (docs/versions.md)"
    )]
    EndsScheduler {
        /// The version that counts.
        found: KubeVersion,
        /// The first release of its minor version whose scheduler goes on.
        needed: KubeVersion,
    },
}

impl OneMode {
    /// Returns it as metrics and `/debug/state` name it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::TurnedOff => "turned-off",
            Self::Conflict => "conflict",
            Self::TooOld { .. } => "version",
            Self::VersionUnknown => "version-unknown",
            Self::CountersDropped => "dropped-fields",
        }
    }

    pub const NAMES: [&str; 5] = [
        "turned-off",
        "conflict",
        "version",
        "version-unknown",
        "dropped-fields",
    ];
}

impl ServerFeatures {
    /// The number of answers to the version question that are remembered.
    pub const MEMORY: usize = 8;
    /// From here on the scheduler charges counters of devices that several claims have.
    pub const SEVERAL_MODES: KubeVersion = KubeVersion::new(1, 36, 2);
    /// From here on counter sets have slices of their own.
    pub const PARTITIONS: KubeVersion = KubeVersion::new(1, 35, 0);
    /// Versions whose scheduler ends at a claim for all devices of which one draws on counters
    /// (kubernetes#138882): the first of each row, and the release that mends it. Pre-releases of
    /// 1.36.0 are in the second row.
    const ENDS_AT_ALL: [(KubeVersion, KubeVersion); 2] = [
        (KubeVersion::new(1, 35, 0), KubeVersion::new(1, 35, 6)),
        (
            KubeVersion::new(1, 35, u32::MAX),
            KubeVersion::new(1, 36, 2),
        ),
    ];
    /// From here on the scheduler compares what a claim asks for with the device that it is about
    /// to give. 1.34 compares it with another device of the same slice, the one whose place there
    /// is the number of the request's device: it refuses what that one lacks or has given away, and
    /// stops with a panic where there is none.
    pub const SHARES: KubeVersion = KubeVersion::new(1, 35, 0);

    /// Returns what is known after a server answered with its version. Unchanged if the answer
    /// changes nothing.
    #[must_use]
    pub fn observe(&self, version: KubeVersion) -> Self {
        let mut seen = self.seen.clone();
        seen.push(version);
        if seen.len() > Self::MEMORY {
            seen.remove(0);
        }
        let next = Self {
            seen,
            ..self.clone()
        };
        // A lowest version that rises means that the old server is gone from memory. Fields that it
        // lost may be stored now, so only the dry run of the newest counts.
        match (self.lowest(), next.lowest()) {
            (Some(before), Some(after)) if after > before => Self {
                dropped: next.tried.clone(),
                ..next
            },
            _ => next,
        }
    }

    /// Returns what is known after a dry run in which the fields of `dropped`, and of no other
    /// feature, did not come back.
    #[must_use]
    pub fn tried(&self, dropped: BTreeSet<Feature>) -> Self {
        Self {
            tried: dropped.clone(),
            ..self.without(dropped)
        }
    }

    /// Returns what is known after the fields of `features` were sent and did not come back.
    #[must_use]
    pub fn without(&self, features: impl IntoIterator<Item = Feature>) -> Self {
        let mut next = self.clone();
        next.dropped.extend(features);
        next
    }

    /// The same, where a claim was given a GPU that a living claim holds in another mode, or was
    /// not.
    #[must_use]
    pub fn with_conflict(&self, conflict: bool) -> Self {
        Self {
            conflict,
            ..self.clone()
        }
    }

    /// The same with this mode lock.
    #[must_use]
    pub fn with_mode_lock(&self, lock: ModeLock) -> Self {
        Self {
            lock,
            ..self.clone()
        }
    }

    /// The version that counts: the lowest seen. `None` before the first answer.
    pub fn lowest(&self) -> Option<KubeVersion> {
        self.seen.iter().copied().min()
    }

    /// Returns whether fields of a feature are worth sending. Taints are tried on every server,
    /// shares on every one whose scheduler counts them as they are meant: the version does not say
    /// whether their gate is on, the answer to a dry run does.
    pub fn supports(&self, feature: Feature) -> bool {
        let new_enough = match feature {
            Feature::Taints => true,
            Feature::Shares => self.lowest().is_none_or(|version| version >= Self::SHARES),
            Feature::Partitions => return self.no_partitions().is_none(),
        };
        new_enough && !self.dropped.contains(&feature)
    }

    /// Returns why nothing that draws on counters may be published; `None` if it may.
    pub fn no_partitions(&self) -> Option<NoPartitions> {
        let is_dropped = self.dropped.contains(&Feature::Partitions);
        let stores = |version: &KubeVersion| !is_dropped && *version >= Self::PARTITIONS;
        let Some(found) = self.lowest().filter(stores) else {
            return Some(NoPartitions::NotStored);
        };
        // With `On` the administrator vouches for the scheduler, whatever its version is.
        if self.lock == ModeLock::On {
            return None;
        }
        let mut rows = Self::ENDS_AT_ALL.into_iter();
        let row = rows.find(|(first, mended)| (first..mended).contains(&&found));
        row.map(|(_, needed)| NoPartitions::EndsScheduler { found, needed })
    }

    /// Why a GPU may be published in one mode only; `None` if it may be in several.
    pub fn one_mode(&self) -> Option<OneMode> {
        // The reasons in order of weight: what an admin said, what is not known, what the scheduler
        // cannot, what went wrong, what the server cannot.
        if self.lock == ModeLock::Off {
            return Some(OneMode::TurnedOff);
        }
        let Some(found) = self.lowest() else {
            return Some(OneMode::VersionUnknown);
        };
        // With `On` the administrator vouches for the scheduler, whatever its version is.
        if self.lock == ModeLock::Auto {
            if found < Self::SEVERAL_MODES {
                return Some(OneMode::TooOld {
                    found,
                    needed: Self::SEVERAL_MODES,
                });
            }
            if self.conflict {
                return Some(OneMode::Conflict);
            }
        }
        // Also with `On`: without counters nothing at all keeps two modes of a GPU apart.
        (!self.supports(Feature::Partitions)).then_some(OneMode::CountersDropped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const V: fn(u32, u32, u32) -> KubeVersion = KubeVersion::new;

    #[test]
    fn the_lowest_version_seen_counts_until_it_is_out_of_memory() {
        let old = ServerFeatures::default()
            .observe(V(1, 36, 1))
            .observe(V(1, 37, 1));
        assert_eq!(old.lowest(), Some(V(1, 36, 1)));
        assert!(old.one_mode().is_some() && !old.supports(Feature::Partitions));
        let new = (0..ServerFeatures::MEMORY).fold(old, |f, _| f.observe(V(1, 37, 1)));
        assert_eq!(new.one_mode(), None);
        let lower = new.observe(V(1, 34, 9));
        assert!(
            !lower.supports(Feature::Partitions),
            "a lower one counts at once"
        );
        assert!(!lower.supports(Feature::Shares) && lower.supports(Feature::Taints));
    }

    #[test]
    fn dropped_features_stay_off_until_the_lowest_version_rises() {
        let off = ServerFeatures::default()
            .observe(V(1, 35, 0))
            .without([Feature::Taints]);
        assert!(!off.supports(Feature::Taints) && off.supports(Feature::Shares));
        let mut later = off.observe(V(1, 36, 4));
        assert!(!later.supports(Feature::Taints), "1.35 is still in memory");
        for _ in 0..ServerFeatures::MEMORY {
            later = later.observe(V(1, 36, 4));
        }
        assert!(later.supports(Feature::Taints));
    }

    #[test]
    fn what_a_newer_server_drops_is_not_tried_again_after_the_upgrade() {
        let old = ServerFeatures::default()
            .observe(V(1, 35, 0))
            .tried([Feature::Taints, Feature::Shares].into());
        let mut upgraded = old.observe(V(1, 36, 4)).tried([Feature::Shares].into());
        assert!(
            !upgraded.supports(Feature::Taints),
            "1.35 is still in memory"
        );
        for _ in 0..ServerFeatures::MEMORY {
            upgraded = upgraded.observe(V(1, 36, 4));
            assert!(!upgraded.supports(Feature::Shares));
        }
        assert!(upgraded.supports(Feature::Taints));
    }

    #[test]
    fn counters_are_not_sent_to_a_scheduler_that_a_claim_can_end() {
        let ends = |needed| move |found| Some(NoPartitions::EndsScheduler { found, needed });
        let (of_135, of_136) = (ends(V(1, 35, 6)), ends(V(1, 36, 2)));
        for (version, why) in [
            (V(1, 34, 9), Some(NoPartitions::NotStored)),
            (V(1, 35, 0), of_135(V(1, 35, 0))),
            (V(1, 35, 5), of_135(V(1, 35, 5))),
            (V(1, 35, 6), None),
            (V(1, 35, 8), None),
            // A pre-release of 1.36.0 counts as the last of 1.35, and is not mended.
            (
                KubeVersion::parse("v1.36.0-rc.1").unwrap(),
                of_136(V(1, 35, u32::MAX)),
            ),
            (V(1, 36, 0), of_136(V(1, 36, 0))),
            (V(1, 36, 1), of_136(V(1, 36, 1))),
            (
                KubeVersion::parse("v1.36.2-rc.1").unwrap(),
                of_136(V(1, 36, 1)),
            ),
            (V(1, 36, 2), None),
            (V(1, 37, 0), None),
        ] {
            let features = ServerFeatures::default().observe(version);
            assert_eq!(features.no_partitions(), why, "{version}");
            assert_eq!(features.supports(Feature::Partitions), why.is_none());
            // Shares alone draw on none.
            assert_eq!(
                features.supports(Feature::Shares),
                version >= ServerFeatures::SHARES
            );
            let vouched = features.with_mode_lock(ModeLock::On);
            let stored = version >= ServerFeatures::PARTITIONS;
            assert_eq!(vouched.supports(Feature::Partitions), stored, "{version}");
            let off = features.with_mode_lock(ModeLock::Off);
            assert_eq!(off.no_partitions(), why, "{version}");
            // What the server drops counts before what its scheduler does.
            let dropped = vouched.without([Feature::Partitions]);
            assert_eq!(dropped.no_partitions(), Some(NoPartitions::NotStored));
        }
    }

    #[test]
    fn nothing_is_trusted_before_a_version_is_known() {
        let unknown = ServerFeatures::default();
        assert!(unknown.supports(Feature::Taints));
        assert!(!unknown.supports(Feature::Partitions) && unknown.one_mode().is_some());
    }

    #[test]
    fn a_conflict_leaves_one_mode_while_it_lasts_without_the_lock() {
        let new = ServerFeatures::default().observe(V(1, 36, 2));
        assert_eq!(new.one_mode(), None);
        let conflict = new.with_conflict(true);
        assert_eq!(conflict.one_mode(), Some(OneMode::Conflict));
        assert_eq!(
            conflict.with_mode_lock(ModeLock::On).one_mode(),
            None,
            "an admin who says on means it"
        );
        assert_eq!(conflict.with_conflict(false), new);
        assert_eq!(
            new.with_mode_lock(ModeLock::Off).one_mode(),
            Some(OneMode::TurnedOff)
        );
    }

    #[test]
    fn the_lock_overrides_the_version_but_not_what_the_server_drops() {
        let old = ServerFeatures::default().observe(V(1, 35, 8));
        let why = OneMode::TooOld {
            found: V(1, 35, 8),
            needed: V(1, 36, 2),
        };
        assert_eq!(old.one_mode(), Some(why));
        let on = old.with_mode_lock(ModeLock::On);
        assert_eq!(on.one_mode(), None);
        assert_eq!(
            on.without([Feature::Partitions]).one_mode(),
            Some(OneMode::CountersDropped)
        );
        assert_eq!(
            on.without([Feature::Shares]).one_mode(),
            None,
            "whole GPUs and partitions are left"
        );
    }
}
