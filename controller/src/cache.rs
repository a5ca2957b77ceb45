//! Knowledge of existing slices from the watch, lists and own writes. Events can be older than an
//! own write; the resource version decides.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::ResourceExt;

/// The slices of this driver and node.
#[derive(Debug, Default)]
pub(crate) struct Cache {
    slices: BTreeMap<String, Kept>,
    /// Version of the last list: older events are already in it.
    listed: u64,
    /// Slices that we deleted and whose last event has not arrived yet, by UID.
    deleted: BTreeSet<String>,
}

/// A slice between two comparisons.
#[derive(Debug, PartialEq)]
struct Kept {
    metadata: ObjectMeta,
    /// The specification as JSON. The maps of its devices take eight times as much memory, and are
    /// needed only when the pool changes.
    spec: Box<[u8]>,
}

impl Kept {
    #[expect(
        clippy::expect_used,
        reason = "JSON holds every value of the type: its maps have strings as keys"
    )]
    fn new(slice: ResourceSlice) -> Self {
        let spec = serde_json::to_vec(&slice.spec).expect("a spec is valid JSON");
        Self {
            metadata: slice.metadata,
            spec: spec.into_boxed_slice(),
        }
    }

    #[expect(
        clippy::expect_used,
        reason = "the text was written by the same type, in this process"
    )]
    fn slice(&self) -> ResourceSlice {
        let spec = serde_json::from_slice(&self.spec).expect("a spec that was written can be read");
        ResourceSlice {
            metadata: self.metadata.clone(),
            spec,
        }
    }
}

/// Meaning of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
    /// Nothing that was not known.
    Old,
    /// Another client changed or created a slice.
    Changed,
    /// Another client deleted a slice.
    Deleted,
}

/// Versions are compared as numbers, as Kubernetes allows since 1.35; one that is none is never
/// old.
fn version(metadata: &ObjectMeta) -> u64 {
    metadata
        .resource_version
        .as_deref()
        .and_then(|v| v.parse().ok())
        .unwrap_or(u64::MAX)
}

impl Cache {
    pub(crate) fn all(&self) -> Vec<ResourceSlice> {
        self.slices.values().map(Kept::slice).collect()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.slices.contains_key(name)
    }

    /// A full list. Returns whether something was not known.
    pub(crate) fn replace(&mut self, slices: Vec<ResourceSlice>, version: Option<&str>) -> News {
        let listed: BTreeMap<_, _> = slices
            .into_iter()
            .map(|slice| (slice.name_any(), Kept::new(slice)))
            .collect();
        let news = if self.slices.keys().any(|name| !listed.contains_key(name)) {
            News::Deleted
        } else if self.slices == listed {
            News::Old
        } else {
            News::Changed
        };
        // Without a version the list is the watch's own: the events that follow it are newer in any
        // case.
        self.listed = version.and_then(|v| v.parse().ok()).unwrap_or(self.listed);
        // Events of deletes that the list has overtaken either never come, or are older than the
        // list.
        self.deleted.clear();
        self.slices = listed;
        news
    }

    pub(crate) fn apply(&mut self, slice: ResourceSlice) -> News {
        let name = slice.name_any();
        // An own write may have come back as an answer before its event: the higher version wins,
        // whichever came first.
        let known = self
            .slices
            .get(&name)
            .is_some_and(|had| version(&had.metadata) >= version(&slice.metadata));
        let ours = slice
            .metadata
            .uid
            .as_ref()
            .is_some_and(|uid| self.deleted.contains(uid));
        if known || ours || version(&slice.metadata) <= self.listed {
            return News::Old;
        }
        self.slices.insert(name, Kept::new(slice));
        News::Changed
    }

    pub(crate) fn delete(&mut self, slice: &ResourceSlice) -> News {
        if slice
            .metadata
            .uid
            .as_ref()
            .is_some_and(|uid| self.deleted.remove(uid))
            || version(&slice.metadata) <= self.listed
        {
            return News::Old;
        }
        let name = slice.name_any();
        match self.slices.get(&name) {
            // Deleted and created again in the meantime: another object, or a newer version.
            Some(had)
                if had.metadata.uid == slice.metadata.uid
                    && version(&had.metadata) <= version(&slice.metadata) =>
            {
                self.slices.remove(&name);
                News::Deleted
            }
            _ => News::Old,
        }
    }

    /// The answer to an own create or update.
    pub(crate) fn wrote(&mut self, slice: ResourceSlice) {
        self.slices.insert(slice.name_any(), Kept::new(slice));
    }

    /// An own delete succeeded.
    pub(crate) fn deleted(&mut self, name: &str) {
        if let Some(uid) = self
            .slices
            .remove(name)
            .and_then(|slice| slice.metadata.uid)
        {
            self.deleted.insert(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(name: &str, uid: &str, version: u32) -> ResourceSlice {
        let metadata = ObjectMeta {
            name: Some(name.into()),
            uid: Some(uid.into()),
            resource_version: Some(version.to_string()),
            ..ObjectMeta::default()
        };
        ResourceSlice {
            metadata,
            ..ResourceSlice::default()
        }
    }

    #[test]
    fn events_older_than_own_writes_and_lists_are_no_news() {
        let mut cache = Cache::default();
        assert_eq!(
            cache.replace(vec![slice("a", "1", 5)], Some("7")),
            News::Changed
        );
        assert_eq!(
            cache.apply(slice("b", "2", 6)),
            News::Old,
            "it was deleted before the list"
        );
        assert_eq!(
            cache.delete(&slice("a", "0", 7)),
            News::Old,
            "a twin that was deleted before the list"
        );
        cache.wrote(slice("a", "1", 9));
        assert_eq!(cache.apply(slice("a", "1", 8)), News::Old);
        assert_eq!(
            cache.apply(slice("a", "1", 9)),
            News::Old,
            "our own write comes back"
        );
        assert_eq!(cache.apply(slice("a", "1", 10)), News::Changed);
        assert_eq!(cache.delete(&slice("a", "1", 11)), News::Deleted);
        assert_eq!(cache.delete(&slice("a", "1", 11)), News::Old);
    }

    #[test]
    fn own_deletes_are_not_taken_for_foreign_ones() {
        let mut cache = Cache::default();
        cache.replace(vec![slice("a", "1", 5)], Some("5"));
        cache.deleted("a");
        assert_eq!(
            cache.apply(slice("a", "1", 6)),
            News::Old,
            "an event from before our delete"
        );
        assert_eq!(cache.delete(&slice("a", "1", 7)), News::Old);
        cache.wrote(slice("a", "2", 8));
        assert_eq!(cache.delete(&slice("a", "1", 7)), News::Old);
        assert_eq!(cache.all(), [slice("a", "2", 8)]);
    }

    #[test]
    fn a_new_list_shows_what_went_missing() {
        let mut cache = Cache::default();
        cache.replace(vec![slice("a", "1", 5), slice("b", "2", 5)], Some("5"));
        assert_eq!(
            cache.replace(vec![slice("a", "1", 5)], Some("6")),
            News::Deleted
        );
        assert_eq!(
            cache.replace(vec![slice("a", "1", 5)], Some("7")),
            News::Old
        );
    }
}
