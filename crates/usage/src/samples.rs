//! Utilisation by processes, from the driver's samples.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::ProcessSample;

/// Returns the share of the GPU (0 to 1) that each of the `listed` processes has used since
/// `since`, and the time of the newest sample. Processes that have used nothing are left out. The
/// driver also writes values above 100, processes that are gone, and samples that it was not asked
/// for: these do not count.
pub fn computed(
    samples: &[ProcessSample],
    since: u64,
    listed: &BTreeSet<u32>,
) -> (BTreeMap<u32, f64>, Option<u64>) {
    let mut sums = BTreeMap::<u32, (u32, u32)>::new();
    let mut newest = None;
    for sample in samples {
        if sample.at <= since || sample.percent > 100 || !listed.contains(&sample.pid) {
            continue;
        }
        // Only after the checks: a sample that does not count must not hide later ones by its time.
        newest = newest.max(Some(sample.at));
        let (sum, count) = sums.entry(sample.pid).or_default();
        (*sum, *count) = (*sum + sample.percent, *count + 1);
    }
    let mean = |(sum, count): (u32, u32)| f64::from(sum) / f64::from(count.max(1)) / 100.0;
    (
        sums.into_iter().map(|(pid, of)| (pid, mean(of))).collect(),
        newest,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_of_what_is_plausible_counts() {
        let sample = |pid, at, percent| ProcessSample { pid, at, percent };
        let listed = BTreeSet::from([1, 2, 3]);
        let samples = [
            sample(1, 11, 40),
            sample(1, 12, 60),
            sample(2, 15, 100),
            sample(2, 9, 10),   // older than asked
            sample(2, 16, 101), // impossible
            sample(4, 99, 50),  // gone
        ];
        let (found, newest) = computed(&samples, 10, &listed);
        assert_eq!(found, BTreeMap::from([(1, 0.5), (2, 1.0)]));
        assert_eq!(newest, Some(15), "nothing implausible moves the time");
        assert_eq!(computed(&[], 10, &listed), (BTreeMap::new(), None));
        let garbage: Vec<_> = (0..100).map(|at| sample(1, at + 11, 4711)).collect();
        assert_eq!(computed(&garbage, 10, &listed), (BTreeMap::new(), None));
    }
}
