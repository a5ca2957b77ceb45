//! [`plan_sync`]: what to write so that the slices that exist become the pool that is wanted. Pure.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::Naming;
use divvy_offer::{Feature, Pool};
use k8s_openapi::api::resource::v1::{ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::content::{comparable_spec, differ_softly, dropped, keep_taint_times, specs};
use crate::names::slice_name;

/// Wanted content.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// Name of the driver.
    pub driver: &'a str,
    /// Name of the node.
    pub node: &'a str,
    /// The Node, which the slices go away with.
    pub owner: &'a OwnerReference,
    pub pool: &'a Pool,
    /// Results of earlier writes.
    pub accepted: &'a Accepted,
}

/// A write to the API server.
#[derive(Debug, Clone, PartialEq)]
pub enum Write {
    /// Delete this slice, if it is still this one.
    Delete {
        name: String,
        /// Its UID must be this.
        uid: Option<String>,
        /// Its resource version must be this.
        resource_version: Option<String>,
    },
    /// Replace a slice; carries the resource version it replaces.
    Update(Box<ResourceSlice>),
    /// Create a slice.
    Create(Box<ResourceSlice>),
}

impl Write {
    /// Name of the slice.
    pub fn name(&self) -> &str {
        match self {
            Self::Delete { name, .. } => name,
            Self::Update(slice) | Self::Create(slice) => {
                slice.metadata.name.as_deref().unwrap_or_default()
            }
        }
    }

    /// Returns the operation as a verb.
    pub fn verb(&self) -> &'static str {
        match self {
            Self::Delete { .. } => "delete",
            Self::Update(_) => "update",
            Self::Create(_) => "create",
        }
    }
}

/// The writes, in order, and the generation the pool has after them.
#[derive(Debug, Clone, PartialEq)]
pub struct Sync {
    /// Deletes, then updates, then creates.
    pub writes: Vec<Write>,
    pub generation: i64,
}

/// Stored forms of the specs that were sent, where the two differ: a server without a feature gate
/// drops fields silently. The stored form then counts as what was wanted, or every sync would send
/// it again.
#[derive(Debug, Clone, Default)]
pub struct Accepted(BTreeMap<String, Shape>);

#[derive(Debug, Clone)]
struct Shape {
    sent: ResourceSliceSpec,
    stored: ResourceSliceSpec,
    dropped: BTreeSet<Feature>,
}

impl Accepted {
    /// Remembers the answer to a write.
    pub fn remember(&mut self, sent: &ResourceSlice, stored: &ResourceSlice) {
        let name = stored.metadata.name.clone().unwrap_or_default();
        let (sent, stored) = (comparable_spec(&sent.spec), comparable_spec(&stored.spec));
        if sent == stored {
            self.0.remove(&name);
        } else {
            let dropped = dropped(&sent, &stored);
            self.0.insert(
                name,
                Shape {
                    sent,
                    stored,
                    dropped,
                },
            );
        }
    }

    /// Forgets slices that are gone.
    pub fn keep(&mut self, exists: impl Fn(&str) -> bool) {
        self.0.retain(|name, _| exists(name));
    }

    /// Features whose fields the server dropped, of the slices as they are now.
    pub fn dropped(&self) -> BTreeSet<Feature> {
        self.0
            .values()
            .flat_map(|form| form.dropped.iter().copied())
            .collect()
    }

    /// Slices that the server stored otherwise than they were sent, for whatever reason.
    pub fn altered(&self) -> BTreeSet<String> {
        self.0.keys().cloned().collect()
    }

    /// Returns the meaning of a stored spec: the spec that was sent when it was stored, else
    /// itself.
    fn meaning(&self, name: &str, stored: ResourceSliceSpec) -> ResourceSliceSpec {
        match self.0.get(name) {
            Some(form) if form.stored == stored => form.sent.clone(),
            _ => stored,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    /// Taints, attributes or the owner: each slice is right by itself, whatever the others say.
    Soft,
    /// Anything that has to change together with other slices.
    Hard,
}

/// Decides the writes. `existing` are the slices of this driver and node; others are left alone,
/// and in the place of NVIDIA's driver those of other pools too.
///
/// Slices are matched by name, which contains the index. A slice more or less, or two slices with
/// different devices, is a new generation on all of them: so that no reader sees half of the
/// change. A single slice is one write anyway, and taints and attributes need not change together,
/// so those keep the generation.
pub fn plan_sync(existing: &[ResourceSlice], target: &Target<'_>) -> Sync {
    let wanted: Vec<(String, ResourceSliceSpec)> = specs(target.driver, target.node, target.pool)
        .into_iter()
        .enumerate()
        .map(|(index, spec)| (slice_name(index, target.driver, target.node), spec))
        .collect();
    let names: BTreeSet<&str> = wanted.iter().map(|(name, _)| name.as_str()).collect();
    let of_pool = |slice: &&ResourceSlice| slice.spec.pool.name == target.pool.name;
    // In the place of NVIDIA's driver, another pool is that driver's, and not one that was ours
    // under an earlier name.
    let stands_in = Naming::of(target.driver).stands_in();
    let ours = existing.iter().filter(|slice| {
        slice.spec.driver == target.driver
            && slice.spec.node_name.as_deref() == Some(target.node)
            && (!stands_in || of_pool(slice))
    });
    // Driver, node and pool name cannot be changed: a slice of another pool cannot become one of
    // this.
    let (kept, obsolete): (Vec<_>, Vec<_>) =
        ours.partition(|slice| of_pool(slice) && names.contains(name_of(slice)));
    // Slices that are to go count too: a new generation must be above all that readers have seen.
    let newest = kept
        .iter()
        .chain(obsolete.iter().filter(|slice| of_pool(slice)))
        .map(|slice| slice.spec.pool.generation)
        .max();
    let kept: BTreeMap<&str, &ResourceSlice> = kept
        .into_iter()
        .map(|slice| (name_of(slice), slice))
        .collect();
    // An older generation is out of the pool already.
    let removed = obsolete
        .iter()
        .any(|s| of_pool(s) && Some(s.spec.pool.generation) == newest);
    let changes: Vec<Change> = wanted
        .iter()
        .map(|(name, spec)| change(kept.get(name.as_str()).copied(), spec, newest, target))
        .collect();
    // A missing slice counts as a changed one: consumers wait for it, and find the pool as it was.
    let in_place = !removed
        && changes
            .iter()
            .filter(|change| **change == Change::Hard)
            .count()
            <= 1;
    let generation = match newest {
        Some(newest) if in_place => newest,
        Some(newest) => newest.saturating_add(1),
        None => 1,
    };

    // Deletes first: a slice of another pool may have a name that is wanted, and a create of it
    // would be refused. With a new generation the pool is incomplete until the last write, and the
    // scheduler allocates nothing from it.
    let mut writes: Vec<Write> = obsolete.into_iter().filter_map(delete).collect();
    let mut creates = Vec::new();
    for ((name, mut spec), change) in wanted.into_iter().zip(changes) {
        spec.pool.generation = generation;
        match kept.get(name.as_str()) {
            None => {
                let owner_references = Some(vec![target.owner.clone()]);
                let metadata = ObjectMeta {
                    name: Some(name),
                    owner_references,
                    ..ObjectMeta::default()
                };
                creates.push(Write::Create(Box::new(ResourceSlice { metadata, spec })));
            }
            Some(stored) if change != Change::None || stored.spec.pool.generation != generation => {
                // The server would set the time of every taint to now.
                keep_taint_times(&mut spec, &stored.spec);
                let mut metadata = stored.metadata.clone();
                metadata.owner_references = Some(vec![target.owner.clone()]);
                metadata.managed_fields = None;
                writes.push(Write::Update(Box::new(ResourceSlice { metadata, spec })));
            }
            Some(_) => {}
        }
    }
    writes.append(&mut creates);
    Sync { writes, generation }
}

fn name_of(slice: &ResourceSlice) -> &str {
    slice.metadata.name.as_deref().unwrap_or_default()
}

fn delete(slice: &ResourceSlice) -> Option<Write> {
    // A slice that waits for finalizers is deleted already.
    slice
        .metadata
        .deletion_timestamp
        .is_none()
        .then(|| Write::Delete {
            name: name_of(slice).to_owned(),
            uid: slice.metadata.uid.clone(),
            resource_version: slice.metadata.resource_version.clone(),
        })
}

fn change(
    stored: Option<&ResourceSlice>,
    wanted: &ResourceSliceSpec,
    newest: Option<i64>,
    target: &Target<'_>,
) -> Change {
    let Some(stored) = stored else {
        return Change::Hard;
    };
    let pool = &stored.spec.pool;
    if Some(pool.generation) != newest
        || pool.resource_slice_count != wanted.pool.resource_slice_count
    {
        return Change::Hard;
    }
    let is = target
        .accepted
        .meaning(name_of(stored), comparable_spec(&stored.spec));
    let wanted = comparable_spec(wanted);
    let owned =
        stored.metadata.owner_references.as_deref() == Some(std::slice::from_ref(target.owner));
    if is == wanted {
        return if owned { Change::None } else { Change::Soft };
    }
    if differ_softly(&is, &wanted) {
        Change::Soft
    } else {
        Change::Hard
    }
}
