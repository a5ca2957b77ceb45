//! Samples of durations, and what is said about them.

use std::time::Duration;

/// Durations of the same thing, measured again and again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Samples(Vec<Duration>);

impl Samples {
    /// Adds a sample.
    pub(crate) fn push(&mut self, sample: Duration) {
        let at = self.0.partition_point(|s| *s <= sample);
        self.0.insert(at, sample);
    }

    /// Returns the number of samples.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the duration that this share of the samples does not exceed (nearest rank); zero
    /// without samples.
    pub(crate) fn quantile(&self, percent: usize) -> Duration {
        let rank = (self.0.len() * percent).div_ceil(100).max(1);
        self.0.get(rank - 1).copied().unwrap_or_default()
    }

    /// Returns the median.
    pub(crate) fn p50(&self) -> Duration {
        self.quantile(50)
    }

    /// Returns the duration that one in a hundred exceeds.
    pub(crate) fn p99(&self) -> Duration {
        self.quantile(99)
    }
}

/// Returns the median time of so many rounds.
pub(crate) fn median(rounds: usize, mut round: impl FnMut()) -> Duration {
    let mut samples = Samples::default();
    for _ in 0..rounds {
        let start = std::time::Instant::now();
        round();
        samples.push(start.elapsed());
    }
    samples.p50()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_a_sample_and_never_an_average() {
        let mut samples = Samples::default();
        assert_eq!(samples.p99(), Duration::ZERO);
        for millis in [3, 1, 2, 4] {
            samples.push(Duration::from_millis(millis));
        }
        assert_eq!(
            [samples.p50(), samples.p99()],
            [2, 4].map(Duration::from_millis)
        );
        for _ in 0..196 {
            samples.push(Duration::from_millis(1));
        }
        assert_eq!(
            [samples.p50(), samples.p99()],
            [1, 2].map(Duration::from_millis)
        );
    }
}
