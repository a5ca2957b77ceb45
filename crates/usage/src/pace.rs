//! Pauses between readings.

use std::time::Duration;

/// A reading that takes longer may hold up the applications on the GPU: the driver's lock is one
/// for all.
const SLOW: Duration = Duration::from_millis(50);
/// Longest pause between two readings.
const LONGEST: Duration = Duration::from_mins(1);

/// The pause between readings: the usual one, and twice as long after each slow one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    usual: Duration,
    now: Duration,
}

impl Pace {
    pub fn new(usual: Duration) -> Self {
        Self { usual, now: usual }
    }

    /// Returns the pause after a reading whose longest call took so long.
    pub fn after(&mut self, took: Duration) -> Duration {
        // A usual pause that is longer than the limit stays: the limit only bounds the doubling.
        let doubled = self.now.saturating_mul(2).min(LONGEST);
        self.now = if took > SLOW {
            doubled.max(self.usual)
        } else {
            self.usual
        };
        self.now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_readings_are_made_half_as_often_down_to_one_a_minute() {
        let seconds = |took: &[u64]| -> Vec<u64> {
            let mut pace = Pace::new(Duration::from_secs(5));
            took.iter()
                .map(|millis| pace.after(Duration::from_millis(*millis)).as_secs())
                .collect()
        };
        assert_eq!(
            seconds(&[0, 50, 51, 80, 15_000, 60, 60, 60]),
            [5, 5, 10, 20, 40, 60, 60, 60]
        );
        assert_eq!(seconds(&[60, 60, 50, 60]), [10, 20, 5, 10]);
        let mut rare = Pace::new(Duration::from_mins(2));
        assert_eq!(rare.after(Duration::from_secs(1)), Duration::from_mins(2));
    }
}
