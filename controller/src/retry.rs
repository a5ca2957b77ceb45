//! How long to wait before trying again.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

/// Doubling waits up to a limit, each shortened at random by up to a half, so that the nodes of a cluster do not come
/// back in step after an outage of the API server.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
}

impl Backoff {
    pub(crate) fn new(first: Duration, most: Duration) -> Self {
        Self { first, most, failures: 0 }
    }

    /// The wait after one more failure.
    pub(crate) fn next(&mut self) -> Duration {
        let wait = self.first.saturating_mul(1 << self.failures.min(16)).min(self.most);
        self.failures = self.failures.saturating_add(1);
        wait.saturating_sub(jitter(wait / 2))
    }

    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }
}

/// Something below `most`, at random. Std's hash keys are random; nothing here has to be unpredictable.
pub(crate) fn jitter(most: Duration) -> Duration {
    let random = RandomState::new().build_hasher().finish();
    let share = u32::try_from(random >> 32).unwrap_or_default();
    most.mul_f64(f64::from(share) / (f64::from(u32::MAX) + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_limit_and_start_over_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
        for expected in [200, 400, 800, 1600, 3200, 5000, 5000] {
            let wait = backoff.next().as_millis();
            assert!((expected / 2..=expected).contains(&wait), "{wait} of {expected}");
        }
        backoff.reset();
        assert!(backoff.next() <= Duration::from_millis(200));
    }
}
