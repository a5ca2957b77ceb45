//! The signals that end a program.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that SIGTERM or SIGINT cancels. Fails if the runtime cannot handle signals.
pub fn stop_on_signals() -> std::io::Result<CancellationToken> {
    // Handlers are in place before this returns: process 1 of a container ignores a signal that it
    // has no handler for, and an early one would be lost.
    let (mut term, mut interrupt) = (
        signal(SignalKind::terminate())?,
        signal(SignalKind::interrupt())?,
    );
    let stop = CancellationToken::new();
    let asked = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => tracing::info!("SIGTERM"),
            _ = interrupt.recv() => tracing::info!("SIGINT"),
        }
        asked.cancel();
    });
    Ok(stop)
}
