//! Workloads that are drawn from three stated mixes.

use crate::random::Random;
use crate::trace::Line;

/// A mix: what is asked for, how often in 100, and how long pods run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mix {
    /// Name, and namespace of its pods.
    pub name: &'static str,
    /// Requests, and how many of 100 pods have each.
    pub requests: &'static [(&'static str, usize)],
    /// Median of the time that pods run, in hours; it is distributed log-normally.
    pub median_hours: f64,
    /// Standard deviation of the logarithm of that time.
    pub spread: f64,
    /// Priority of its pods.
    pub priority: i32,
}

/// The mixes.
pub const MIXES: [Mix; 3] = [
    Mix {
        name: "notebooks",
        requests: &[
            ("share:4Gi", 40),
            ("share:8Gi", 30),
            ("share:16Gi", 20),
            ("gpu", 10),
        ],
        median_hours: 2.0,
        spread: 1.0,
        priority: 0,
    },
    Mix {
        name: "inference",
        requests: &[
            ("mig:1g.10gb", 30),
            ("share:16Gi", 30),
            ("mig:3g.40gb", 20),
            ("gpu", 20),
        ],
        median_hours: 24.0,
        spread: 0.5,
        priority: 100,
    },
    Mix {
        name: "training",
        requests: &[("gpu", 40), ("2*gpu", 20), ("4*gpu", 20), ("8*gpu", 20)],
        median_hours: 4.0,
        spread: 1.2,
        priority: 0,
    },
];

/// Returns a mix by its name.
pub fn mix(name: &str) -> Option<Mix> {
    MIXES.into_iter().find(|mix| mix.name == name)
}

/// Draws so many pods of a mix, which arrive at random over the hours.
pub fn draw(mix: &Mix, pods: usize, hours: f64, seed: u64) -> Vec<Line> {
    // Each mix has numbers of its own, so that another beside it changes nothing.
    let of_name = mix
        .name
        .bytes()
        .fold(seed, |sum, byte| sum.rotate_left(8) ^ u64::from(byte));
    let mut random = Random::new(of_name);
    let mut lines: Vec<Line> = (0..pods)
        .map(|_| {
            let time = random.part() * hours * 3600.0;
            let mut drawn = random.below(100);
            let request = mix.requests.iter().find(|(_, share)| {
                let found = drawn < *share;
                drawn = drawn.saturating_sub(*share);
                found
            });
            let duration = mix.median_hours * 3600.0 * (mix.spread * random.normal()).exp();
            Line {
                time,
                namespace: mix.name.to_owned(),
                request: request.map_or("gpu", |(request, _)| request).to_owned(),
                duration: Some(duration),
                priority: Some(mix.priority),
            }
        })
        .collect();
    lines.sort_by(|a, b| a.time.total_cmp(&b.time));
    lines
}
