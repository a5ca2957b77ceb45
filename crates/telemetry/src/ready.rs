//! Readiness: a set of named parts, all of which must be ready.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Parts of a process that are ready, or not yet. Clones are handles to the same set; a set without
/// parts is ready.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<BTreeMap<&'static str, Option<String>>>>);

impl Readiness {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Option<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a part that is not ready until its handle says so.
    pub fn handle(&self, name: &'static str) -> ReadyHandle {
        let handle = ReadyHandle {
            readiness: self.clone(),
            name,
        };
        // Counted as missing from here on: a part that never reports is not taken for ready.
        handle.waiting("not yet");
        handle
    }

    /// The parts that are not ready, each as `name: why`, in order of name.
    pub fn missing(&self) -> Vec<String> {
        self.lock()
            .iter()
            .filter_map(|(name, why)| why.as_ref().map(|why| format!("{name}: {why}")))
            .collect()
    }
}

/// A part of a [`Readiness`].
#[derive(Debug, Clone)]
pub struct ReadyHandle {
    readiness: Readiness,
    name: &'static str,
}

impl ReadyHandle {
    /// The part is ready.
    pub fn ready(&self) {
        self.readiness.lock().insert(self.name, None);
    }

    /// The part is not ready, or no longer, and why.
    pub fn waiting(&self, why: impl Into<String>) {
        self.readiness.lock().insert(self.name, Some(why.into()));
    }
}
