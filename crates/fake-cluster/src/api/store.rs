//! The server's state: objects and their history. [`write`] says how they are written. No IO; the
//! clock is handed in.

mod write;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Value, json};

use super::error::ApiError;
use super::gates::Gate;
use super::json::set;
use super::kinds::{Kind, Res, builtin};

pub(crate) use self::write::{Part, Preconditions, Written};

/// Changes kept for watches; a watch that is further behind gets 410.
const HISTORY: usize = 10_000;

/// Where an object is stored.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) res: Res,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// A change, with the object before and after.
#[derive(Debug, Clone)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) res: Res,
    pub(crate) namespace: String,
    pub(crate) old: Option<Value>,
    /// The new object; `None` if it is gone.
    pub(crate) new: Option<Value>,
}

#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) kinds: Vec<Kind>,
    objects: BTreeMap<Key, Value>,
    /// Objects that each field manager applied last.
    applied: BTreeMap<(Key, String), Value>,
    history: VecDeque<Change>,
    version: u64,
    /// Changes after this version are all in `history`.
    complete_after: u64,
    names: u64,
    /// Objects from which reads of any version (`resourceVersion=0`) are answered, while
    /// it lags behind.
    stale: Option<BTreeMap<Key, Value>>,
    pub(crate) gates_off: BTreeSet<Gate>,
    /// Writes are answered as they would be, and nothing is stored.
    pub(crate) dry_run: bool,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            kinds: builtin(),
            objects: BTreeMap::new(),
            applied: BTreeMap::new(),
            history: VecDeque::new(),
            version: 1,
            complete_after: 1,
            names: 0,
            stale: None,
            gates_off: BTreeSet::new(),
            dry_run: false,
        }
    }
}

impl Store {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn kind(&self, res: &Res) -> Option<Kind> {
        self.kinds.iter().find(|k| k.res == *res).cloned()
    }

    pub(crate) fn find(&self, key: &Key) -> Option<&Value> {
        self.objects.get(key)
    }

    /// From now on the watch cache is as the objects are now; or, it keeps up again.
    pub(crate) fn freeze_cache(&mut self, frozen: bool) {
        self.stale = frozen.then(|| self.objects.clone());
    }

    /// Returns the objects that a read of this version sees.
    fn seen_at(&self, version: &str) -> &BTreeMap<Key, Value> {
        self.stale
            .as_ref()
            .filter(|_| version == "0")
            .unwrap_or(&self.objects)
    }

    pub(crate) fn get(&self, kind: &Kind, key: &Key) -> Result<Value, ApiError> {
        self.get_at(kind, key, "")
    }

    /// The same, as a read that asks for this version sees it.
    pub(crate) fn get_at(&self, kind: &Kind, key: &Key, version: &str) -> Result<Value, ApiError> {
        self.seen_at(version)
            .get(key)
            .cloned()
            .ok_or_else(|| ApiError::not_found(&kind.qualified(), &key.name))
    }

    /// The objects of a resource, in one namespace or ("") in all.
    pub(crate) fn list<'a>(
        &'a self,
        res: &'a Res,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Value> {
        self.list_at(res, namespace, "")
    }

    /// The same, as a read that asks for this version sees them.
    pub(crate) fn list_at<'a>(
        &'a self,
        res: &'a Res,
        namespace: &'a str,
        version: &str,
    ) -> impl Iterator<Item = &'a Value> {
        let first = Key {
            res: res.clone(),
            namespace: namespace.into(),
            name: String::new(),
        };
        self.seen_at(version)
            .range(first..)
            .take_while(move |(key, _)| {
                key.res == *res && (namespace.is_empty() || key.namespace == namespace)
            })
            .map(|(_, object)| object)
    }

    /// Changes after `version`; `None` if some of them are no longer known.
    pub(crate) fn changes(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        let known = version >= self.complete_after;
        known.then(|| {
            self.history
                .iter()
                .filter(move |change| change.version > version)
        })
    }

    /// Forgets the history: every watch that starts or resumes at a version seen so far gets 410.
    pub(crate) fn compact(&mut self) {
        self.version += 1;
        self.complete_after = self.version;
        self.history.clear();
    }

    fn commit(&mut self, key: &Key, old: Option<Value>, mut new: Value) -> Value {
        if self.dry_run {
            return new;
        }
        self.version += 1;
        set(
            &mut new,
            &["metadata", "resourceVersion"],
            Some(json!(self.version.to_string())),
        );
        self.objects.insert(key.clone(), new.clone());
        self.record(key, old, Some(new.clone()));
        new
    }

    fn remove(&mut self, key: &Key, mut old: Value) -> Value {
        if self.dry_run {
            return old;
        }
        self.version += 1;
        self.objects.remove(key);
        self.applied.retain(|(k, _), _| k != key);
        // The last event carries the version of the deletion, so that a watch can resume after it.
        set(
            &mut old,
            &["metadata", "resourceVersion"],
            Some(json!(self.version.to_string())),
        );
        self.record(key, Some(old.clone()), None);
        old
    }

    fn record(&mut self, key: &Key, old: Option<Value>, new: Option<Value>) {
        let (res, namespace) = (key.res.clone(), key.namespace.clone());
        self.history.push_back(Change {
            version: self.version,
            res,
            namespace,
            old,
            new,
        });
        while self.history.len() > HISTORY {
            self.complete_after = self
                .history
                .pop_front()
                .map_or(self.complete_after, |change| change.version);
        }
    }
}
