//! What belongs to a GPU and to no claim: what we changed on it, what it was before, and whether it is fenced.

use divvy_model::{BootId, ClaimUid, Hold, HoldKind};
use serde::{Deserialize, Serialize};

use crate::stored::{self, Stored, Versions};

/// A setting of a GPU that we may change and give back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "setting", rename_all = "camelCase")]
pub enum Setting {
    /// MIG mode.
    MigMode {
        /// On or off.
        on: bool,
    },
}

/// Why nothing new may be put on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fence {
    /// The claim whose step has an outcome nobody knows.
    pub claim: ClaimUid,
    /// What is not known.
    pub reason: String,
    /// In which boot; a reboot settles every open question about hardware.
    pub boot: BootId,
}

/// What is kept about a GPU (`gpus/<uuid>.json`). No file means the default: never touched, not fenced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuState {
    /// Settings as they were before we changed them.
    pub baseline: Vec<Setting>,
    /// Settings we changed. Only these are ever reset, to the baseline.
    pub applied: Vec<Setting>,
    /// Set while a step's outcome is not known.
    pub fence: Option<Fence>,
}

/// What a GPU should be, derived from its live holds and from nothing else. Letting go is recomputing this without
/// the hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Nobody holds it: what we applied may be reset.
    Idle,
    /// One claim holds all of it.
    Whole,
    /// Claims hold partitions of it: MIG mode must be on.
    Partitioned,
    /// Claims hold time-sliced shares of it.
    TimeSliced,
}

/// The goal for a GPU's live holds. Admin access does not count.
pub fn goal<'a>(holds: impl IntoIterator<Item = &'a Hold>) -> Goal {
    holds.into_iter().fold(Goal::Idle, |so_far, hold| match hold.kind {
        HoldKind::Whole => Goal::Whole,
        HoldKind::Partition { .. } => Goal::Partitioned,
        HoldKind::Share => Goal::TimeSliced,
        HoldKind::Admin => so_far,
    })
}

/// Version 1 of the file. Frozen once released: a change makes a version 2 beside it.
#[derive(Serialize, Deserialize)]
struct GpuStateV1 {
    baseline: Vec<Setting>,
    applied: Vec<Setting>,
    fence: Option<Fence>,
}

/// Newest first; adding a version breaks the fixture test until there is a fixture for it.
const VERSIONS: Versions<GpuState> = Versions {
    current: 1,
    encode: |s| {
        serde_json::to_value(GpuStateV1 {
            baseline: s.baseline.clone(),
            applied: s.applied.clone(),
            fence: s.fence.clone(),
        })
    },
    decode: &[(1, |text| {
        let v: GpuStateV1 = serde_json::from_str(text)?;
        Ok(GpuState { baseline: v.baseline, applied: v.applied, fence: v.fence })
    })],
};

impl GpuState {
    /// Whether we turned MIG mode on, so that we may turn it off again.
    pub fn turned_mig_on(&self) -> bool {
        self.applied.contains(&Setting::MigMode { on: true })
    }

    /// Notes that MIG mode is to be brought from what it is (`was`) to `on`. What was found the first time is the
    /// baseline; coming back to that leaves nothing applied.
    pub fn note_mig_mode(&mut self, was: bool, on: bool) {
        let mig = |setting: &Setting| match setting {
            Setting::MigMode { on } => *on,
        };
        let applied = self.applied.first().map(mig);
        // Somebody else (a reboot too) changed it since: what we applied is no longer there.
        if applied.is_some_and(|applied| applied != was) {
            *self = Self { fence: self.fence.take(), ..Self::default() };
        }
        if was == on {
            return;
        }
        let baseline = self.baseline.first().map_or(was, mig);
        let changed = baseline != on;
        self.baseline = changed.then_some(Setting::MigMode { on: baseline }).into_iter().collect();
        self.applied = changed.then_some(Setting::MigMode { on }).into_iter().collect();
    }

    /// Whether the state says nothing, so that no file is needed for it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        stored::encode(&VERSIONS, None, self)
    }

    /// Reads the bytes of a file.
    pub fn decode(bytes: &[u8]) -> Stored<Self> {
        stored::decode(&VERSIONS, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::GpuUuid;

    fn hold(kind: HoldKind) -> Hold {
        let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        Hold { claim: "c".parse().unwrap(), gpu, device: "gpu-0".parse().unwrap(), kind, time_slice: None }
    }

    #[test]
    fn the_goal_follows_from_the_live_holds_and_admin_access_is_not_one() {
        assert_eq!(goal([]), Goal::Idle);
        assert_eq!(goal([&hold(HoldKind::Admin)]), Goal::Idle);
        assert_eq!(
            goal([&hold(HoldKind::Share), &hold(HoldKind::Admin), &hold(HoldKind::Share)]),
            Goal::TimeSliced
        );
        assert_eq!(goal([&hold(HoldKind::Whole), &hold(HoldKind::Admin)]), Goal::Whole);
        let profile = divvy_model::mig::GpuInstanceProfileId(19);
        let placement = divvy_model::mig::Placement { start: 0, size: 1 };
        assert_eq!(
            goal([&hold(HoldKind::Admin), &hold(HoldKind::Partition { profile, placement })]),
            Goal::Partitioned
        );
    }

    #[test]
    fn only_what_we_changed_counts_as_applied_and_the_baseline_is_what_was_found_first() {
        let mut state = GpuState::default();
        state.note_mig_mode(true, true);
        assert!(state.is_default(), "it was on already");
        state.note_mig_mode(false, true);
        assert!(state.turned_mig_on());
        assert_eq!(state.baseline, [Setting::MigMode { on: false }]);
        state.note_mig_mode(true, true);
        assert!(state.turned_mig_on(), "still ours");
        state.note_mig_mode(true, false);
        assert!(state.is_default(), "back to the baseline");
        state.note_mig_mode(true, false);
        assert_eq!(state.applied, [Setting::MigMode { on: false }]);
        state.note_mig_mode(false, true);
        assert!(state.is_default(), "back to the baseline");
        state.note_mig_mode(false, true);
        state.note_mig_mode(false, false);
        assert!(state.is_default(), "a reboot turned it off");
    }

    #[test]
    fn every_version_of_a_gpu_state_has_a_captured_file_that_still_reads() {
        let expected = GpuState {
            baseline: vec![Setting::MigMode { on: true }],
            applied: vec![Setting::MigMode { on: false }],
            fence: Some(Fence {
                claim: "0f0e0d0c-1111-2222-3333-444455556666".parse().unwrap(),
                reason: "the call did not come back".to_owned(),
                boot: "b0071d00-0000-0000-0000-000000000001".parse().unwrap(),
            }),
        };
        let fixtures = [include_bytes!("../fixtures/gpu-state-v1.json").as_slice()];
        assert_eq!(fixtures.len(), usize::try_from(VERSIONS.current).unwrap(), "one fixture per version");
        for bytes in fixtures {
            assert_eq!(GpuState::decode(bytes), Stored::Fine(expected.clone()));
        }
        let body = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap()["body"].clone();
        assert_eq!(
            body(&expected.encode()),
            body(fixtures.last().unwrap()),
            "the newest version is written as captured"
        );
    }
}
