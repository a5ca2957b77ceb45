//! `/debug/state`: what the plugin knows and is doing, without opaque configs (those are users').

use std::sync::Arc;

use divvy_controller::PublishStatus;
use divvy_executor::Executor;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::app::config::Config;
use crate::claims::service::ClaimService;
use crate::node::State;
use crate::node::facts::{Effective, GpusSeen, Registered};

/// Where the state is read from.
pub(crate) struct Debug {
    pub(crate) config: Config,
    pub(crate) executor: Arc<Executor>,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    pub(crate) registered: watch::Receiver<Registered>,
    pub(crate) publishes: watch::Receiver<bool>,
    pub(crate) published: watch::Receiver<PublishStatus>,
    pub(crate) state: watch::Receiver<State>,
    pub(crate) service: Arc<ClaimService>,
}

impl Debug {
    /// All of it. Reads files, so it may block.
    pub(crate) fn state(&self) -> Value {
        // Copies: a reader that is slow must not hold the channel that the inventory writes.
        let seen = self.seen.borrow().clone();
        let gpus = seen.inventory.as_ref().map(|inventory| {
            let gpus = inventory.gpus.iter().map(|(uuid, gpu)| (uuid.to_string(), json!(gpu)));
            json!({
                "system": inventory.system,
                "gpus": gpus.collect::<serde_json::Map<_, _>>(),
                "unreadable": inventory.problems.iter().map(|p| p.error.to_string()).collect::<Vec<_>>(),
            })
        });
        let registered = match &*self.registered.borrow() {
            Registered::Yes => json!(true),
            Registered::NotYet => json!(false),
            Registered::Refused(why) => json!({ "refused": why }),
        };
        let publish = self.published.borrow().clone();
        let State {
            neighbours,
            health,
            effective,
            offering,
        } = self.state.borrow().clone();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "node": self.config.node_name,
            "driver": self.config.driver_name,
            "registered": registered,
            "publishes": *self.publishes.borrow(),
            "claimsRunning": self.service.running(),
            "inventory": gpus,
            "inventoryProblem": seen.problem,
            "driverDown": seen.down,
            "driverReleased": seen.released,
            "neighbours": neighbours,
            "health": {
                "gpus": health.book.gpus(),
                "removed": health.book.removed(),
                "unmonitored": health.unmonitored.iter().map(|(gpu, code)| (gpu.to_string(), json!(code.to_string()))).collect::<serde_json::Map<_, _>>(),
                "noEvents": health.no_events.as_ref().map(|(_, why)| why),
            },
            "offering": offering,
            "policy": effective.as_ref().map(Effective::state),
            "executor": self.executor.debug_state(),
            "pool": {
                "inSync": publish.in_sync,
                "generation": publish.generation,
                "publishedAt": publish.published_at.map(|at| at.to_string()),
                "slices": publish.slices,
                "devices": publish.devices,
                "lastError": publish.last_error,
                "watchError": publish.watch_error,
                "droppedFields": publish.dropped.iter().map(|f| f.gate()).collect::<Vec<_>>(),
                "alteredSlices": publish.altered,
                "foreignDeletes": publish.foreign_deletes,
                "published": publish.published.as_deref(),
            },
        })
    }
}
