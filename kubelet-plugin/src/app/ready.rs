//! Readiness and its gauges, kept as the parts of the plugin say.

use divvy_telemetry::ReadyHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::node::facts::{GpusSeen, Registered, what_is_missing};

/// The parts that must be ready.
pub(crate) struct Ready {
    pub(crate) inventory: ReadyHandle,
    pub(crate) records: ReadyHandle,
    pub(crate) registered: ReadyHandle,
    pub(crate) slices: ReadyHandle,
    pub(crate) sockets: ReadyHandle,
}

/// Keeps what other parts say about themselves in the readiness set and the gauges.
pub(crate) struct ReadinessWatch {
    pub(crate) inventory: ReadyHandle,
    pub(crate) registration: ReadyHandle,
    pub(crate) metrics: Metrics,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    pub(crate) registered: watch::Receiver<Registered>,
    pub(crate) publishes: watch::Receiver<bool>,
}

impl ReadinessWatch {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            self.look();
            tokio::select! {
                Ok(()) = self.seen.changed() => {}
                Ok(()) = self.registered.changed() => {}
                Ok(()) = self.publishes.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    fn look(&mut self) {
        let seen = self.seen.borrow_and_update();
        match what_is_missing(&seen) {
            Some(missing) => self.inventory.waiting(missing),
            None => self.inventory.ready(),
        }
        let answers = matches!(
            &*seen,
            GpusSeen {
                problem: None,
                inventory: Some(_),
                ..
            }
        );
        self.metrics.driver_up.set(answers.into());
        let registered = self.registered.borrow_and_update();
        match &*registered {
            Registered::Yes => self.registration.ready(),
            Registered::NotYet => {
                self.registration
                    .waiting("the kubelet has not found the registration socket yet");
            }
            Registered::Refused(why) => self
                .registration
                .waiting(format!("the kubelet refused: {why}")),
        }
        self.metrics
            .registered
            .set((*registered == Registered::Yes).into());
        self.metrics
            .publishes
            .set((*self.publishes.borrow_and_update()).into());
    }
}
