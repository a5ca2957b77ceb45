//! Looks, from outside, whether a GPU has two holders.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::names;
use serde_json::Value;

use super::Shared;
use crate::api::at;
use crate::case::Env;

/// A device of a claim, by the driver's own record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hold {
    gpu: String,
    device: String,
    kind: String,
    claim: String,
    phase: String,
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}) of {} by claim {}, {}",
            self.device, self.kind, self.gpu, self.claim, self.phase
        )
    }
}

/// What the driver has on record.
pub(super) fn records(env: &Env) -> Result<Vec<Hold>> {
    let folder = format!("/var/lib/kubelet/plugins/{}/claims", names::DRIVER);
    let mut holds = Vec::new();
    for entry in fs_err::read_dir(env.cluster.node_path(folder))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        // It may have gone since it was listed.
        let Ok(bytes) = fs_err::read(&path) else {
            continue;
        };
        let record: Value = serde_json::from_slice(&bytes)
            .with_context(|| format!("{} is no record", path.display()))?;
        let body = at(&record, "body");
        let text =
            |value: &Value, path: &str| at(value, path).as_str().unwrap_or_default().to_owned();
        for device in at(body, "devices").as_array().into_iter().flatten() {
            holds.push(Hold {
                gpu: text(device, "gpu"),
                device: text(device, "allocated.device"),
                kind: device.get("kind").map(kind_of).unwrap_or_default(),
                claim: text(body, "name"),
                phase: text(body, "phase.is"),
            });
        }
    }
    holds.sort();
    Ok(holds)
}

/// A kind is a word, or an object that says more.
fn kind_of(kind: &Value) -> String {
    let word = kind.as_str().map(str::to_owned);
    word.or_else(|| kind.as_object()?.keys().next().cloned())
        .unwrap_or_default()
}

/// What contradicts each other. Only what is prepared counts: a successor may be on record while it
/// waits.
fn contradictions(holds: &[Hold]) -> BTreeSet<String> {
    let mut by_gpu: BTreeMap<&str, Vec<&Hold>> = BTreeMap::new();
    for hold in holds
        .iter()
        .filter(|hold| hold.phase == "prepared" && hold.kind != "admin")
    {
        by_gpu.entry(&hold.gpu).or_default().push(hold);
    }
    let mut found = BTreeSet::new();
    for holds in by_gpu.values() {
        for (index, one) in holds.iter().enumerate() {
            for other in holds.iter().skip(index + 1) {
                let mode =
                    |hold: &Hold| hold.device.split('-').nth(2).unwrap_or("whole").to_owned();
                let (a, b) = (mode(one), mode(other));
                let shared = a == "ts" && b == "ts";
                let beside = a == "mig" && b == "mig" && one.device != other.device;
                if !shared && !beside {
                    found.insert(format!("{one}, and {other}"));
                }
            }
        }
    }
    found
}

/// Looks until the day is over. What is seen twice in a row is no accident of looking while files
/// change.
pub(super) fn run(shared: &Shared) {
    let (mut before, mut reported) = (BTreeSet::new(), BTreeSet::new());
    while !shared.is_over() {
        shared.rest(Duration::from_millis(500));
        let Ok(holds) = records(&shared.env) else {
            continue;
        };
        shared.count("looks for two holders");
        let now = contradictions(&holds);
        for what in now.intersection(&before) {
            if reported.insert(what.clone()) {
                shared.wrong(format!("two holders: {what}"));
            }
        }
        before = now;
    }
}

/// Looks until it is over, for a case. What is seen twice in a row counts.
pub(crate) fn contradictions_until(env: &Env, over: &AtomicBool) -> BTreeSet<String> {
    let (mut before, mut found) = (BTreeSet::new(), BTreeSet::new());
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(100));
        let Ok(holds) = records(env) else { continue };
        let now = contradictions(&holds);
        found.extend(now.intersection(&before).cloned());
        before = now;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{Hold, contradictions};

    fn hold(device: &str, claim: &str, phase: &str) -> Hold {
        let text = str::to_owned;
        Hold {
            gpu: text("GPU-1"),
            device: text(device),
            kind: text("x"),
            claim: text(claim),
            phase: text(phase),
        }
    }

    /// Shares and other partitions do not contradict.
    #[test]
    fn two_modes_or_an_exclusive_device_twice_contradict() {
        let fine = [
            hold("gpu-0-ts", "a", "prepared"),
            hold("gpu-0-ts", "b", "prepared"),
            hold("gpu-0", "c", "preparing"),
        ];
        assert!(contradictions(&fine).is_empty());
        let parts = [
            hold("gpu-0-mig-1g10gb-19-0", "a", "prepared"),
            hold("gpu-0-mig-1g10gb-19-1", "b", "prepared"),
        ];
        assert!(contradictions(&parts).is_empty());
        for other in ["gpu-0", "gpu-0-ts"] {
            let two = [
                hold("gpu-0-mig-1g10gb-19-0", "a", "prepared"),
                hold(other, "b", "prepared"),
            ];
            assert_eq!(contradictions(&two).len(), 1, "{other}");
        }
        assert_eq!(
            contradictions(&[
                hold("gpu-0", "a", "prepared"),
                hold("gpu-0", "b", "prepared")
            ])
            .len(),
            1
        );
    }
}
