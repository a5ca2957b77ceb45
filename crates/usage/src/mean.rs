//! Means over the last minute.

use std::collections::VecDeque;
use std::time::Duration;

/// Time that the mean is over.
const WINDOW: Duration = Duration::from_mins(1);

/// The mean of what was measured in the last minute.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Mean(VecDeque<(Duration, f64)>);

impl Mean {
    /// Adds a value, and returns the mean with it. `now` is any time that only grows.
    pub fn add(&mut self, now: Duration, value: f64) -> f64 {
        self.0.push_back((now, value));
        self.0.retain(|(at, _)| now.saturating_sub(*at) < WINDOW);
        let count = u32::try_from(self.0.len()).unwrap_or(u32::MAX).max(1);
        self.0.iter().map(|(_, value)| value).sum::<f64>() / f64::from(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_older_than_a_minute_does_not_count() {
        let mut mean = Mean::default();
        let mut at = |seconds, value| mean.add(Duration::from_secs(seconds), value);
        let close =
            |left: f64, right: f64| assert!((left - right).abs() < 1e-9, "{left} is not {right}");
        close(at(0, 1.0), 1.0);
        close(at(30, 0.0), 0.5);
        close(at(59, 0.5), 0.5);
        close(at(60, 1.0), 0.5);
        close(at(200, 0.25), 0.25);
    }
}
