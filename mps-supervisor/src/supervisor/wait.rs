//! Waits for processes.

use std::time::{Duration, Instant};

use super::error::SupervisorError;
use super::known::{LOOK, READY_WITHIN};
use crate::process::{self, Process};

/// Waits until processes have ended. A process that hangs in the kernel module has not.
pub(super) fn wait_until_gone(all: &[Process], within: Duration) -> Result<(), SupervisorError> {
    let until = Instant::now() + within;
    loop {
        match all.iter().find(|one| process::lives(one)) {
            None => return Ok(()),
            Some(one) if Instant::now() >= until => {
                return Err(SupervisorError::Stuck { pid: one.pid });
            }
            Some(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Waits until it is so; `None` if it is not in time.
pub(super) fn wait_for(mut is_so: impl FnMut() -> bool) -> Option<()> {
    let until = Instant::now() + READY_WITHIN;
    loop {
        if is_so() {
            return Some(());
        }
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(LOOK);
    }
}
