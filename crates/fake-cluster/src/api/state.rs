//! Everything behind the server's lock, and the read-only view of it that conditions get.

use std::collections::{BTreeMap, VecDeque};
use std::time::SystemTime;

use jiff::{SignedDuration, Timestamp};

use super::faults::Faults;
use super::kinds::{Object, Res};
use super::store::{Key, Store};

/// Requests remembered for [`View::requests`].
const LOG: usize = 10_000;

/// A request as it arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Kubernetes verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: String,
    /// Plural resource name, with `/status` for the subresource.
    pub resource: String,
    /// Namespace, or "".
    pub namespace: String,
    /// Object name, or "".
    pub name: String,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) store: Store,
    pub(crate) faults: Faults,
    pub(crate) running: bool,
    /// Raised to end all open watches.
    pub(crate) epoch: u64,
    /// `major.minor.patch`.
    pub(crate) version: String,
    /// Lead of its clock over the machine's.
    pub(crate) ahead: SignedDuration,
    /// Answers of pods, by path.
    pub(crate) behind_proxy: BTreeMap<String, String>,
    log: VecDeque<Seen>,
    counts: BTreeMap<(String, String), u64>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            store: Store::default(),
            faults: Faults::default(),
            running: true,
            epoch: 0,
            version: "1.37.1".into(),
            ahead: SignedDuration::ZERO,
            behind_proxy: BTreeMap::new(),
            log: VecDeque::new(),
            counts: BTreeMap::new(),
        }
    }
}

impl State {
    pub(crate) fn count(&mut self, seen: Seen) {
        *self
            .counts
            .entry((seen.verb.clone(), seen.resource.clone()))
            .or_default() += 1;
        self.log.push_back(seen);
        if self.log.len() > LOG {
            self.log.pop_front();
        }
    }

    /// The time by the server's clock.
    pub(crate) fn time(&self) -> Timestamp {
        let now = Timestamp::try_from(SystemTime::now()).unwrap_or(Timestamp::UNIX_EPOCH);
        now.checked_add(self.ahead).unwrap_or(now)
    }

    /// The same as the API writes it.
    pub(crate) fn now(&self) -> String {
        self.time().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }

    pub(crate) fn forget_requests(&mut self) {
        self.log.clear();
        self.counts.clear();
    }

    /// The minor version, which decides about young field selectors.
    pub(crate) fn minor(&self) -> u32 {
        self.version
            .split('.')
            .nth(1)
            .and_then(|minor| minor.parse().ok())
            .unwrap_or(0)
    }
}

/// The server's state at one moment.
#[derive(Debug)]
pub struct View<'a>(pub(crate) &'a State);

impl View<'_> {
    /// All objects of a type, ordered by namespace and name.
    pub fn list<K: Object>(&self) -> Vec<K> {
        let res = Res::of::<K>();
        // Objects are stored in their typed form, so they parse unless two types share a
        // resource.
        self.0
            .store
            .list(&res, "")
            .filter_map(|object| serde_json::from_value(object.clone()).ok())
            .collect()
    }

    /// Returns an object; the namespace is "" for cluster-scoped types.
    pub fn get<K: Object>(&self, namespace: &str, name: &str) -> Option<K> {
        let key = Key {
            res: Res::of::<K>(),
            namespace: namespace.into(),
            name: name.into(),
        };
        self.0
            .store
            .find(&key)
            .and_then(|object| serde_json::from_value(object.clone()).ok())
    }

    /// Counts requests that arrived with this verb for this resource (`resourceclaims`,
    /// `resourceclaims/status`); `*` stands for any.
    pub fn count(&self, verb: &str, resource: &str) -> u64 {
        let hits = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        self.0
            .counts
            .iter()
            .filter(|((v, r), _)| hits(verb, v) && hits(resource, r))
            .map(|(_, n)| n)
            .sum()
    }

    /// The latest requests, oldest first.
    pub fn requests(&self) -> Vec<Seen> {
        self.0.log.iter().cloned().collect()
    }
}
