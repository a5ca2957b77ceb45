//! Looks, from outside, whether a GPU has two holders.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::names;
use divvy_model::{ClaimUid, DeviceName, GpuUuid, Hold, Sharing, Target};
use serde::Deserialize;
use serde_json::Value;

use super::Shared;
use crate::api::at;
use crate::case::Env;

/// A device of a claim, by the driver's own record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Held {
    hold: Hold,
    claim: String,
    phase: String,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hold { device, gpu, .. } = &self.hold;
        write!(
            f,
            "{device} of {gpu} by claim {}, {}",
            self.claim, self.phase
        )
    }
}

/// The part of a record's device that says how it is used.
#[derive(Deserialize)]
struct Device {
    gpu: GpuUuid,
    target: Target,
    sharing: Sharing,
    allocated: Allocated,
}

#[derive(Deserialize)]
struct Allocated {
    device: DeviceName,
}

/// Returns what the driver has on record.
pub(super) fn records(env: &Env) -> Result<Vec<Held>> {
    let folder = format!("/var/lib/kubelet/plugins/{}/claims", names::DRIVER);
    let mut all = Vec::new();
    for entry in fs_err::read_dir(env.cluster.node_path(folder))? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        // It may have gone since it was listed.
        let Ok(bytes) = fs_err::read(&path) else {
            continue;
        };
        let record = of_record(&bytes);
        all.extend(record.with_context(|| format!("{} is no record", path.display()))?);
    }
    all.sort();
    Ok(all)
}

fn of_record(bytes: &[u8]) -> Result<Vec<Held>> {
    let record: Value = serde_json::from_slice(bytes)?;
    let body = at(&record, "body");
    let text = |path: &str| at(body, path).as_str().unwrap_or_default().to_owned();
    let uid: ClaimUid = text("uid").parse()?;
    let devices = at(body, "devices").as_array().into_iter().flatten();
    let held = devices.map(|device| {
        let device = Device::deserialize(device)?;
        let hold = Hold {
            claim: uid.clone(),
            gpu: device.gpu,
            device: device.allocated.device,
            target: device.target,
            sharing: device.sharing,
            theirs: false,
            time_slice: None,
            mps: None,
        };
        Ok(Held {
            hold,
            claim: text("name"),
            phase: text("phase.is"),
        })
    });
    held.collect()
}

/// Returns pairs of holds that contradict each other. Only what is prepared counts: a successor may
/// be on record while it waits.
fn contradictions(held: &[Held]) -> BTreeSet<String> {
    let prepared = held.iter().filter(|held| held.phase == "prepared");
    let prepared: Vec<&Held> = prepared.collect();
    let mut found = BTreeSet::new();
    for (index, one) in prepared.iter().enumerate() {
        for other in prepared.iter().skip(index + 1) {
            if one.hold.conflicts(&other.hold) {
                found.insert(format!("{one}, and {other}"));
            }
        }
    }
    found
}

/// Looks until the day is over. A contradiction seen twice in a row is no accident of looking while
/// files change.
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

/// Looks until it is over, for a case. A contradiction that is seen twice in a row counts.
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
    use serde_json::json;

    use super::{Held, contradictions, of_record};

    /// A claim with a device of a GPU, as the plugin's record has it.
    fn held(claim: &str, target: &serde_json::Value, sharing: &str, phase: &str) -> Vec<Held> {
        let device = json!({
            "gpu": "GPU-12345678-1234-1234-0000-123456780000",
            "target": target,
            "sharing": sharing,
            "allocated": {"device": "gpu-0"},
        });
        let body = json!({
            "uid": format!("uid-{claim}"),
            "name": claim,
            "phase": {"is": phase},
            "devices": [device],
        });
        of_record(json!({ "body": body }).to_string().as_bytes()).unwrap()
    }

    fn prepared(target: &serde_json::Value, sharing: &str, claim: &str) -> Vec<Held> {
        held(claim, target, sharing, "prepared")
    }

    /// Shares, other partitions and admin access do not contradict.
    #[test]
    fn two_modes_or_an_exclusive_device_twice_contradict() {
        let (gpu, small) = (json!("gpu"), json!({"partition": "19@0+1"}));
        let next = json!({"partition": "19@1+1"});
        let share = prepared(&gpu, "time-sliced", "a");
        let part = prepared(&small, "exclusive", "a");
        for (one, other) in [
            (&share, prepared(&gpu, "time-sliced", "b")),
            (&share, prepared(&gpu, "admin", "b")),
            (&share, held("b", &gpu, "exclusive", "preparing")),
            (&part, prepared(&next, "exclusive", "b")),
        ] {
            let both = [&one[..], &other].concat();
            assert_eq!(contradictions(&both).len(), 0, "{both:?}");
        }
        for (one, other) in [
            (&share, prepared(&gpu, "exclusive", "b")),
            (&part, prepared(&gpu, "time-sliced", "b")),
            (&part, prepared(&small, "exclusive", "b")),
            (&part, prepared(&small, "time-sliced", "b")),
        ] {
            let both = [&one[..], &other].concat();
            assert_eq!(contradictions(&both).len(), 1, "{both:?}");
        }
    }
}
