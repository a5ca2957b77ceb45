//! Waiting for a driver that is not there yet: a node may start our pod before the driver's.

use std::ops::ControlFlow;
use std::time::Duration;

use divvy_model::{GpuDriver, GpuError, SystemFacts};

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(10);

/// Asks `driver` until it answers. Between two attempts `pause` gets the error and for how long to
/// wait; it waits (a sleep, a channel with a timeout), or breaks, and then the error is returned.
/// The waits grow from half a second to ten. Any error is waited out: a library that is not there
/// may be installed, a module loaded.
pub fn wait_for_driver(
    driver: &dyn GpuDriver,
    pause: &mut dyn FnMut(&GpuError, Duration) -> ControlFlow<()>,
) -> Result<SystemFacts, GpuError> {
    let mut wait = FIRST;
    loop {
        let error = match driver.system() {
            Ok(system) => return Ok(system),
            Err(error) => error,
        };
        if pause(&error, wait).is_break() {
            return Err(error);
        }
        // A missing library answers at once, so the waits alone keep this from a busy loop.
        wait = (wait * 2).min(LONGEST);
    }
}
