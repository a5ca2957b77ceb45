//! Waiting for a state, never for a time.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};

/// Time between looks at a state. Looking costs about a millisecond, on both sides.
const PAUSE: Duration = Duration::from_millis(50);

/// Looks until `check` gives a value. An error of `check` is not final (servers come and go in
/// these tests), but the last one is the cause of the error when `timeout` has passed.
pub fn wait_for<T>(
    what: &str,
    timeout: Duration,
    mut check: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let last = match check() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if start.elapsed() >= timeout {
            let message = format!("{what}: not seen within {} s", timeout.as_secs_f32());
            return Err(last.map_or_else(
                || anyhow!(message.clone()),
                |error| error.context(message.clone()),
            ));
        }
        sleep(PAUSE);
    }
}

/// [`wait_for`] a condition that has no value.
pub fn poll(what: &str, timeout: Duration, mut check: impl FnMut() -> Result<bool>) -> Result<()> {
    wait_for(what, timeout, || Ok(check()?.then_some(())))
}
