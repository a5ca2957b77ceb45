//! The thread that waits for events. It waits only while the gate is open: a driver that is not
//! there, or is to be let go, is left alone.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use divvy_model::health::GpuEvents;
use divvy_model::{GpuDriver, GpuError, GpuErrorCode};
use tokio::sync::mpsc;

/// Time of one wait for events; for as long a closed gate may be passed.
const WAIT: Duration = Duration::from_secs(1);
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Retry interval when the driver does not support events.
const WITHOUT_EVENTS: Duration = Duration::from_mins(5);

/// Events, or why there are none.
pub(super) type Heard = Result<GpuEvents, GpuError>;

/// Starts the thread, with the gate closed. The values that are sent open and close it; without a
/// sender the thread ends.
pub(super) fn listen(gpus: Arc<dyn GpuDriver>, out: mpsc::Sender<Heard>) -> Sender<bool> {
    let (gate, words) = channel();
    let thread = std::thread::Builder::new().name("gpu-events".to_owned());
    if let Err(error) = thread.spawn(move || run(&*gpus, &out, &words)) {
        tracing::error!(%error, "failed to start the thread for GPU events; health is only polled");
    }
    gate
}

fn run(gpus: &dyn GpuDriver, out: &mpsc::Sender<Heard>, words: &Receiver<bool>) {
    let mut open = false;
    // The first answer is sent in any case.
    let mut last: Option<Heard> = None;
    let mut wait = Duration::ZERO;
    while may_pass(words, &mut open, wait) {
        let heard = gpus.wait_events(WAIT);
        wait = match &heard {
            Ok(_) => Duration::ZERO,
            Err(e)
                if matches!(
                    e.code,
                    GpuErrorCode::NOT_SUPPORTED | GpuErrorCode::FUNCTION_NOT_FOUND
                ) =>
            {
                WITHOUT_EVENTS
            }
            Err(_) => AFTER_FAILURE,
        };
        // Silence is no news, and neither is the same failure again: the task is woken for changes.
        let nothing_new = match (&heard, &last) {
            (Ok(now), Some(Ok(last))) => {
                now.events.is_empty() && now.unmonitored == last.unmonitored
            }
            (Err(now), Some(Err(last))) => now == last,
            _ => false,
        };
        if !nothing_new && out.blocking_send(heard.clone()).is_err() {
            return;
        }
        last = Some(heard);
    }
}

/// Waits for this long, or until the gate has been closed and is open again; `false` when it is
/// time to end.
fn may_pass(words: &Receiver<bool>, open: &mut bool, mut wait: Duration) -> bool {
    loop {
        // Every word that waits is read before the gate is passed: the last one counts.
        let word = if *open {
            words.recv_timeout(wait)
        } else {
            words.recv().map_err(Into::into)
        };
        match word {
            Ok(word) => *open = word,
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
        wait = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gate that was closed and opened again cuts the pause short and only the last word counts.
    #[test]
    fn a_gate_closed_and_opened_cuts_the_pause_and_the_last_word_counts() {
        let (gate, words) = channel();
        let mut open = true;
        for word in [false, true] {
            gate.send(word).unwrap();
        }
        assert!(may_pass(&words, &mut open, Duration::from_hours(1)));
        for word in [false, true, false] {
            gate.send(word).unwrap();
        }
        drop(gate);
        assert!(!may_pass(&words, &mut open, Duration::ZERO));
    }
}
