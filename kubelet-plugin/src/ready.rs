//! Readiness and its gauges, kept as the parts of the plugin say.

use divvy_telemetry::ReadyHandle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::app::part;
use crate::inventory::Seen;
use crate::metrics::Metrics;
use crate::registration::Registered;

/// Why no container can be given a GPU; `None` if one can, or the driver was let go on request.
pub(crate) fn what_is_missing(seen: &Seen) -> Option<String> {
    match seen {
        Seen { problem: Some(problem), .. } => Some(problem.clone()),
        Seen { down: Some(why), released: None, .. } => Some(why.clone()),
        Seen { inventory: Some(_), .. } => None,
        Seen { inventory: None, .. } => Some("GPUs are being read".to_owned()),
    }
}

/// Keeps what others say about themselves in the readiness set and the gauges.
pub(crate) fn watch_readiness(
    parts: &mut JoinSet<&'static str>,
    (inventory, registration): (ReadyHandle, ReadyHandle),
    metrics: &Metrics,
    mut seen: watch::Receiver<Seen>,
    mut registered: watch::Receiver<Registered>,
    mut publishes: watch::Receiver<bool>,
    stop: &CancellationToken,
) {
    let (metrics, stop) = (metrics.clone(), stop.clone());
    part(parts, "the readiness watch", async move {
        loop {
            match what_is_missing(&seen.borrow_and_update()) {
                Some(missing) => inventory.waiting(missing),
                None => inventory.ready(),
            }
            let known = match &*registered.borrow_and_update() {
                Registered::Yes => {
                    registration.ready();
                    true
                }
                Registered::NotYet => {
                    registration.waiting("the kubelet has not found the registration socket yet");
                    false
                }
                Registered::Refused(why) => {
                    registration.waiting(format!("the kubelet refused: {why}"));
                    false
                }
            };
            metrics
                .driver_up
                .set(matches!(&*seen.borrow(), Seen { problem: None, inventory: Some(_), .. }).into());
            metrics.registered.set(known.into());
            metrics.publishes.set((*publishes.borrow_and_update()).into());
            tokio::select! {
                Ok(()) = seen.changed() => {}
                Ok(()) = registered.changed() => {}
                Ok(()) = publishes.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    });
}
