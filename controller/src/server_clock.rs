//! The API server's clock, by its answers: times of objects are compared with it and not
//! with the node's, which may differ.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::{HeaderMap, header};
use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimeParser;
use tokio::time::Instant;

/// Time for which a clock that is ahead counts after its last answer: that server is away, or its
/// clock was set right.
const AHEAD_COUNTS: Duration = Duration::from_mins(5);

/// Dates of answers have whole seconds.
const ROUNDED: Duration = Duration::from_secs(2);

/// The API server's time. Clones are one clock. Before the first answer that has a date, nothing is
/// known. The clock of the server that is ahead counts, while it answers.
#[derive(Debug, Clone, Default)]
pub struct ServerClock(Arc<Mutex<Option<Reading>>>);

/// A time of the server, when it was read, and when an answer last agreed with it.
#[derive(Debug, Clone, Copy)]
struct Reading {
    server: Timestamp,
    at: Instant,
    confirmed: Instant,
}

impl Reading {
    /// Returns the server's time at an instant, if it can be written.
    fn at(self, now: Instant) -> Option<Timestamp> {
        let passed = now.saturating_duration_since(self.at);
        self.server.checked_add(passed).ok()
    }
}

impl ServerClock {
    /// Returns the server's time now; `None` while no answer had a date.
    pub fn now(&self) -> Option<Timestamp> {
        let reading = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        reading?.at(Instant::now())
    }

    /// Reads the date of an answer. An answer without a date that can be read says nothing.
    pub fn read(&self, headers: &HeaderMap) {
        let date = headers
            .get(header::DATE)
            .and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| DateTimeParser::new().parse_timestamp(date).ok());
        let Some(server) = date else { return };
        let at = Instant::now();
        let read = Reading {
            server,
            at,
            confirmed: at,
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((before, shown)) = known.and_then(|known| Some((known, known.at(at)?))) else {
            *known = Some(read);
            return;
        };
        let agrees = shown <= server.saturating_add(ROUNDED).unwrap_or(server);
        if shown < server || (!agrees && at - before.confirmed >= AHEAD_COUNTS) {
            *known = Some(read);
        } else if agrees {
            *known = Some(Reading {
                confirmed: at,
                ..before
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn answer(date: &str) -> HeaderMap {
        [(header::DATE, HeaderValue::from_str(date).unwrap())]
            .into_iter()
            .collect()
    }

    /// The form is that of Go's server. An answer of a server that is behind does not set it back.
    #[tokio::test(start_paused = true)]
    async fn the_clock_goes_by_the_dates_of_answers_and_on_between_them() {
        let clock = ServerClock::default();
        let shows = |time: &str| assert_eq!(clock.now().unwrap().to_string(), time);
        assert_eq!(clock.now(), None);
        for unknown in ["", "soon", "Sat, 28 Nov 2026 10:37"] {
            clock.read(&answer(unknown));
            assert_eq!(clock.now(), None, "{unknown}");
        }
        clock.read(&HeaderMap::new());
        assert_eq!(clock.now(), None);
        clock.read(&answer("Sat, 28 Nov 2026 10:37:59 GMT"));
        shows("2026-11-28T10:37:59Z");
        tokio::time::advance(Duration::from_secs(3)).await;
        shows("2026-11-28T10:38:02Z");
        clock.clone().read(&answer("Sat, 28 Nov 2026 10:37:02 GMT"));
        shows("2026-11-28T10:38:02Z");
        clock.clone().read(&answer("Sat, 28 Nov 2026 10:39:00 GMT"));
        shows("2026-11-28T10:39:00Z");
    }

    /// A clock that was hours ahead and is set right, or whose server left, counts for minutes.
    #[tokio::test(start_paused = true)]
    async fn a_clock_that_was_ahead_counts_only_while_it_answers() {
        let clock = ServerClock::default();
        let now = || clock.now().unwrap().to_string();
        clock.read(&answer("Sat, 28 Nov 2026 15:00:00 GMT"));
        for minute in 1..=12 {
            tokio::time::advance(Duration::from_mins(1)).await;
            // Both answer for six minutes.
            if minute <= 6 {
                clock.read(&answer(&format!("Sat, 28 Nov 2026 15:{minute:02}:00 GMT")));
            }
            clock.read(&answer(&format!("Sat, 28 Nov 2026 10:{minute:02}:00 GMT")));
            let hour = if minute <= 10 { 15 } else { 10 };
            assert_eq!(now(), format!("2026-11-28T{hour}:{minute:02}:00Z"));
        }
    }
}
