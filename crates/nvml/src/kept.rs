//! Answers that stay the same while the driver is loaded.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use divvy_model::{GpuUuid, lock};

/// A kept answer is given so often before NVML is asked again: it may have been odd twice in the same
/// way.
const TIMES: u32 = 16;

/// An answer for each GPU, kept for a while once it came twice in a row: a single odd answer of NVML
/// may have left something out, and must be forgotten with the next.
pub(crate) struct Kept<T>(Mutex<BTreeMap<GpuUuid, Answer<T>>>);

struct Answer<T> {
    value: T,
    /// So often it is given before it is asked for again; 0 if it came once only.
    left: u32,
}

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone + PartialEq> Kept<T> {
    /// Returns the confirmed answer, or asks. The second value of an answer says whether it is
    /// whole: one that is known to lack something confirms nothing.
    pub(crate) fn get_or_ask<E>(
        &self,
        gpu: &GpuUuid,
        ask: impl FnOnce() -> Result<(T, bool), E>,
    ) -> Result<T, E> {
        // A statement of its own: no lock is held while NVML is called.
        let confirmed = self.confirmed(gpu);
        if let Some(value) = confirmed {
            return Ok(value);
        }
        let (value, is_whole) = ask()?;
        let mut kept = self.lock();
        // Two callers may have asked at once, which does no harm: their answers are compared like
        // any two in a row.
        if is_whole {
            let is_confirmed = kept.get(gpu).is_some_and(|before| before.value == value);
            let answer = Answer {
                value: value.clone(),
                left: if is_confirmed { TIMES } else { 0 },
            };
            kept.insert(gpu.clone(), answer);
        } else {
            kept.remove(gpu);
        }
        Ok(value)
    }

    fn confirmed(&self, gpu: &GpuUuid) -> Option<T> {
        let mut kept = self.lock();
        let answer = kept.get_mut(gpu)?;
        answer.left = answer.left.checked_sub(1)?;
        Some(answer.value.clone())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, Answer<T>>> {
        lock(&self.0)
    }
}
