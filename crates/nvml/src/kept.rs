//! Answers that stay the same while the driver is loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

use divvy_model::{GpuUuid, lock};

/// A kept answer lasts so many readings of its GPU before NVML is asked again: it may have been odd
/// twice in the same way.
const READINGS: u32 = 16;

/// An answer for each GPU, or each of something, kept for a while once it came twice in a row: a
/// single odd answer of NVML may have left something out, and must be forgotten with the next. It
/// ages by readings, and not by use: a pod that waits does not pay for asking again.
pub(crate) struct Kept<T, K = GpuUuid>(Mutex<BTreeMap<K, Answer<T>>>);

struct Answer<T> {
    value: T,
    /// So many readings it lasts; 0 if it came once only.
    left: u32,
    /// True if it was given since the last reading.
    is_used: bool,
}

impl<T, K> Default for Kept<T, K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone + PartialEq, K: Clone + Ord> Kept<T, K> {
    /// Returns the confirmed answer, or asks. The second value of an answer says whether it is
    /// whole: one that is known to lack something confirms nothing.
    pub(crate) fn get_or_ask<E>(
        &self,
        of: &K,
        ask: impl FnOnce() -> Result<(T, bool), E>,
    ) -> Result<T, E> {
        // A statement of its own: no lock is held while NVML is called.
        let confirmed = self.confirmed(of);
        if let Some(value) = confirmed {
            return Ok(value);
        }
        let (value, is_whole) = ask()?;
        self.learn(of, &value, is_whole);
        Ok(value)
    }

    /// Takes an answer in.
    fn learn(&self, of: &K, value: &T, is_whole: bool) {
        let mut kept = self.lock();
        // Two callers may have asked at once, which does no harm: their answers are compared like
        // any two in a row.
        if is_whole {
            let is_confirmed = kept.get(of).is_some_and(|before| before.value == *value);
            let answer = Answer {
                value: value.clone(),
                left: if is_confirmed { READINGS } else { 0 },
                is_used: true,
            };
            kept.insert(of.clone(), answer);
        } else {
            kept.remove(of);
        }
    }

    /// A GPU is read: its answers that were used since the last time are a reading older.
    pub(crate) fn age(&self, is_of: impl Fn(&K) -> bool) {
        for (of, answer) in self.lock().iter_mut() {
            if is_of(of) && std::mem::take(&mut answer.is_used) {
                answer.left = answer.left.saturating_sub(1);
            }
        }
    }

    fn confirmed(&self, of: &K) -> Option<T> {
        let mut kept = self.lock();
        let answer = kept.get_mut(of).filter(|answer| answer.left > 0)?;
        answer.is_used = true;
        Some(answer.value.clone())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, Answer<T>>> {
        lock(&self.0)
    }
}

impl<T: Clone + Ord, K: Clone + Ord> Kept<BTreeSet<T>, K> {
    /// Returns all that an answer ever named: what lives is listed by it, and what an odd answer
    /// leaves out would count as gone. The first time it is asked for twice.
    pub(crate) fn all_ever<E>(
        &self,
        of: &K,
        ask: impl Fn() -> Result<BTreeSet<T>, E>,
    ) -> Result<BTreeSet<T>, E> {
        self.get_or_ask(of, || {
            let mut all = ask()?;
            all.extend(self.ever(of).map_or_else(&ask, Ok)?);
            // An old driver with MIG mode off names none.
            let is_whole = !all.is_empty();
            Ok((all, is_whole))
        })
    }

    /// Takes in what another question has named.
    pub(crate) fn learn_also(&self, of: &K, mut all: BTreeSet<T>) {
        all.extend(self.ever(of).into_iter().flatten());
        self.learn(of, &all, !all.is_empty());
    }

    fn ever(&self, of: &K) -> Option<BTreeSet<T>> {
        self.lock().get(of).map(|before| before.value.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_takes_nothing_away_from_what_lives_is_listed_by() {
        let kept = Kept::<BTreeSet<u32>, u32>::default();
        // The first and the second answer are odd, and one after the answer was kept.
        let answers = [vec![1], vec![2], vec![1, 2, 3], vec![1, 2, 3], vec![]];
        let mut asked = answers.iter().cycle();
        let asked = Mutex::new(&mut asked);
        let ask = || Ok::<_, ()>(lock(&asked).next().into_iter().flatten().copied().collect());
        let mut seen = Vec::new();
        for _ in 0..40 {
            seen.push(kept.all_ever(&0, ask).unwrap());
            kept.age(|_| true);
        }
        seen.dedup();
        let [first, all] = [vec![1, 2], vec![1, 2, 3]].map(BTreeSet::from_iter);
        assert_eq!(seen, [first, all]);
    }

    #[test]
    fn an_answer_ages_by_readings_in_which_it_is_used_and_not_by_use() {
        let kept = Kept::<u32, u32>::default();
        let asked = Mutex::new(0);
        let get = || {
            kept.get_or_ask(&0, || {
                *lock(&asked) += 1;
                Ok::<_, ()>((7, true))
            })
        };
        let count = |readings: u32, uses: u32| {
            let before = *lock(&asked);
            for _ in 0..readings {
                kept.age(|of| *of == 0);
                for _ in 0..uses {
                    get().unwrap();
                }
            }
            *lock(&asked) - before
        };
        assert_eq!(count(1, 100), 2, "until it is confirmed");
        assert_eq!(count(100, 0), 0, "nothing is asked that is not needed");
        assert_eq!(count(1, 100), 0);
        assert_eq!(count(14, 1), 0);
        assert_eq!(count(2, 100), 1, "it still says the same");
    }
}
