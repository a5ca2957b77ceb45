//! Readiness and its gauges, kept as the parts of the plugin say.

use divvy_telemetry::ReadyHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::registration::Registered;
use crate::sinks::metrics::Metrics;
use crate::sources::inventory::Seen;

/// Keeps what other parts say about themselves in the readiness set and the gauges.
pub(crate) struct ReadinessWatch {
    pub(crate) inventory: ReadyHandle,
    pub(crate) registration: ReadyHandle,
    pub(crate) metrics: Metrics,
    pub(crate) seen: watch::Receiver<Seen>,
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
        match &*seen {
            Seen { problem: Some(problem), .. } => self.inventory.waiting(problem.clone()),
            Seen { down: Some(why), released: None, .. } => self.inventory.waiting(why.clone()),
            Seen { inventory: Some(_), .. } => self.inventory.ready(),
            Seen { inventory: None, .. } => self.inventory.waiting("GPUs are being read"),
        }
        let answers = matches!(&*seen, Seen { problem: None, inventory: Some(_), .. });
        self.metrics.driver_up.set(answers.into());
        let registered = self.registered.borrow_and_update();
        match &*registered {
            Registered::Yes => self.registration.ready(),
            Registered::NotYet => {
                self.registration.waiting("the kubelet has not found the registration socket yet");
            }
            Registered::Refused(why) => self.registration.waiting(format!("the kubelet refused: {why}")),
        }
        self.metrics.registered.set((*registered == Registered::Yes).into());
        self.metrics.publishes.set((*self.publishes.borrow_and_update()).into());
    }
}
