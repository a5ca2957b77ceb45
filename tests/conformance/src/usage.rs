//! Checks of a driver's answers about use: plausible, or that it does not know.

use divvy_model::{Architecture, GpuDriver, GpuError, GpuErrorCode, GpuFacts};

use crate::Violation;

/// Checks one GPU.
pub(crate) fn read_only(driver: &dyn GpuDriver, facts: &GpuFacts) -> Vec<Violation> {
    let (gpu, mut found) = (&facts.uuid, Vec::new());
    let mut check = |ok: bool, what: String| {
        if !ok {
            found.push(Violation(what));
        }
    };
    match driver.memory(gpu, None) {
        Ok(memory) => {
            let fits = memory.used.saturating_add(memory.reserved) <= memory.total;
            check(
                fits,
                format!("{gpu}: not more memory is used than there is, got {memory:?}"),
            );
            let total = facts.memory_bytes.is_none_or(|total| total == memory.total);
            check(
                total,
                format!("{gpu}: memory() and facts() agree, got {memory:?}"),
            );
        }
        Err(error) => check(
            is_unknown(&error),
            format!("memory() answers, or is not supported: {error}"),
        ),
    }
    match driver.utilization(gpu) {
        Ok(percent) => check(
            percent <= 100,
            format!("{gpu}: is used at most all the time, got {percent} %"),
        ),
        Err(error) => {
            check(
                is_unknown(&error),
                format!("utilization() answers, or is not supported: {error}"),
            );
        }
    }
    match driver.process_utilization(gpu, 0) {
        Ok(samples) => {
            check(
                samples.is_sorted(),
                format!("{gpu}: samples of processes are sorted"),
            );
            let newest = samples.iter().map(|sample| sample.at).max();
            let later =
                newest.map(|newest| driver.process_utilization(gpu, newest).unwrap_or_default());
            let all_later = later
                .iter()
                .flatten()
                .all(|sample| Some(sample.at) > newest);
            check(all_later, format!("{gpu}: samples are later than asked"));
        }
        Err(error) => {
            check(
                is_unknown(&error),
                format!("process_utilization() answers, or is not supported: {error}"),
            );
        }
    }
    match driver.sm_utilization(gpu, None) {
        Ok(first) => {
            check(
                first.is_none(),
                format!("{gpu}: nothing is compared the first time, got {first:?}"),
            );
            let has = facts.architecture >= Architecture::Hopper;
            check(has, format!("{gpu}: performance monitors come with Hopper"));
        }
        Err(error) => {
            check(
                is_unknown(&error),
                format!("sm_utilization() answers, or is not supported: {error}"),
            );
        }
    }
    found
}

fn is_unknown(error: &GpuError) -> bool {
    matches!(
        error.code,
        GpuErrorCode::NOT_SUPPORTED
            | GpuErrorCode::FUNCTION_NOT_FOUND
            | GpuErrorCode::NO_PERMISSION
    )
}
