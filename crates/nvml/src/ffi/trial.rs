//! Odd answers for tests: every call of the library is counted, and single ones are answered here
//! in the place of the library.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use divvy_model::GpuErrorCode;

/// The code by which a call succeeds without having written anything.
pub(crate) const WRITES_NOTHING: GpuErrorCode = GpuErrorCode(0);

/// The calls that were made, and those that are answered otherwise.
#[derive(Default)]
pub(crate) struct Trial(Mutex<State>);

#[derive(Default)]
struct State {
    calls: BTreeMap<&'static str, usize>,
    total: usize,
    odd: Vec<Odd>,
}

struct Odd {
    /// `None`: whichever function.
    function: Option<&'static str>,
    /// So many calls pass before.
    after: usize,
    /// So many are odd.
    times: usize,
    code: GpuErrorCode,
}

impl Trial {
    /// Has the call after so many others answer with a code, once.
    pub(crate) fn fail_once(&self, after: usize, code: GpuErrorCode) {
        self.lock().odd.push(Odd {
            function: None,
            after,
            times: 1,
            code,
        });
    }

    /// Has a function answer with a code, once, after so many calls of it.
    pub(crate) fn fail_once_in(&self, function: &'static str, after: usize, code: GpuErrorCode) {
        self.fail_in(function, after, 1, code);
    }

    /// Has a function answer with a code, so many times, after so many calls of it.
    pub(crate) fn fail_in(
        &self,
        function: &'static str,
        after: usize,
        times: usize,
        code: GpuErrorCode,
    ) {
        self.lock().odd.push(Odd {
            function: Some(function),
            after,
            times,
            code,
        });
    }

    /// Counts the calls of a function so far.
    pub(crate) fn calls(&self, function: &str) -> usize {
        self.lock().calls.get(function).copied().unwrap_or(0)
    }

    /// Counts all calls so far.
    pub(crate) fn total(&self) -> usize {
        self.lock().total
    }

    /// Returns whether all odd answers were given.
    pub(crate) fn was_met(&self) -> bool {
        self.lock().odd.is_empty()
    }

    /// Counts a call; the code that answers it, if it is an odd one.
    pub(super) fn answer(&self, function: &'static str) -> Option<u32> {
        let mut state = self.lock();
        state.total += 1;
        *state.calls.entry(function).or_default() += 1;
        let at = state.odd.iter_mut().position(|odd| {
            let is_meant = odd.function.is_none_or(|only| only == function);
            is_meant
                && odd
                    .after
                    .checked_sub(1)
                    .map(|left| odd.after = left)
                    .is_none()
        })?;
        let odd = state.odd.get_mut(at)?;
        odd.times = odd.times.saturating_sub(1);
        let (code, is_over) = (odd.code.0, odd.times == 0);
        if is_over {
            state.odd.remove(at);
        }
        Some(code)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        divvy_model::lock(&self.0)
    }
}
