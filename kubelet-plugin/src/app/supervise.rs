//! The tasks that run for as long as the plugin does: one that ends by itself ends the plugin.

use std::collections::HashMap;

use anyhow::anyhow;
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;

/// The tasks that run until they are stopped, by name.
pub(crate) struct Tasks {
    running: JoinSet<()>,
    names: HashMap<Id, &'static str>,
    pub(crate) stop: CancellationToken,
}

impl Tasks {
    pub(crate) fn new() -> Self {
        Self {
            running: JoinSet::new(),
            names: HashMap::new(),
            stop: CancellationToken::new(),
        }
    }

    pub(crate) fn add(
        &mut self,
        name: &'static str,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        let id = self.running.spawn(work).id();
        self.names.insert(id, name);
    }

    /// Waits for the first that ends, also by a panic; its name.
    pub(crate) async fn ended(&mut self) -> &'static str {
        // A panic counts as an end too, and has the id all the same.
        let id = match self.running.join_next_with_id().await {
            Some(Ok((id, ()))) => Some(id),
            Some(Err(died)) => Some(died.id()),
            None => None,
        };
        id.and_then(|id| self.names.get(&id))
            .copied()
            .unwrap_or("every task")
    }

    pub(crate) async fn stopped(&mut self) {
        self.stop.cancel();
        while self.running.join_next().await.is_some() {}
    }
}

/// A part that should run for ever has ended.
pub(crate) fn ended_unexpectedly(part: &str) -> anyhow::Error {
    anyhow!("{part} ended unexpectedly (a bug in divvy); the plugin exits and is restarted")
}
