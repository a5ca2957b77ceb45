//! Readiness and its gauges, kept as the parts of the plugin say.

use divvy_telemetry::ReadyHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::grpc::registration::Registered;
use crate::sinks::metrics::Metrics;
use crate::sources::inventory::GpusSeen;

/// Why no container can be given a GPU; `None` if one can, or the driver was let go on request.
pub(crate) fn what_is_missing(seen: &GpusSeen) -> Option<String> {
    match seen {
        GpusSeen { problem: Some(problem), .. } => Some(problem.clone()),
        GpusSeen { down: Some(why), released: None, .. } => Some(why.clone()),
        GpusSeen { inventory: Some(_), .. } => None,
        GpusSeen { inventory: None, .. } => Some("reading the GPUs".to_owned()),
    }
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
        let answers = matches!(&*seen, GpusSeen { problem: None, inventory: Some(_), .. });
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
