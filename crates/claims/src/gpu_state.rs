//! What belongs to a GPU and to no claim: what we changed on it, what it was before, and whether it is fenced.

use divvy_model::{BootId, ClaimUid, ComputeMode, Grant, Hold, HoldKind, TimeSlice};
use serde::{Deserialize, Serialize};

use crate::StepState;
use crate::stored::{self, Head, Stored};

/// A setting of a GPU that we may change and give back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "setting", rename_all = "camelCase")]
pub enum Setting {
    MigMode {
        /// On or off.
        on: bool,
    },
    /// How long contexts run in turn. Nothing of it outlasts a boot.
    TimeSlice {
        slice: TimeSlice,
        /// In which boot it was found or set.
        boot: BootId,
    },
}

/// Why nothing new may be put on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fence {
    /// The claim whose step has an outcome that is not known. `None`: the GPU's own file cannot be read.
    pub claim: Option<ClaimUid>,
    /// What is not known.
    pub reason: String,
    /// In which boot; a reboot settles every open question about hardware.
    pub boot: BootId,
}

/// A GPU instance that was made for a claim, or may be in the making. It is noted here before its creation begins, so that
/// a claim record that is lost or torn leaks nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnedInstance {
    /// The claim that it was made for.
    pub claim: ClaimUid,
    /// In which boot: it does not outlast one.
    pub boot: BootId,
    /// The step that makes it, and how far that has come.
    #[serde(flatten)]
    pub state: StepState,
}

/// What is kept about a GPU (`gpus/<uuid>.json`). No file means the default: never touched, not fenced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuState {
    /// Settings as they were before we changed them. One of each kind at most, MIG mode first.
    pub baseline: Vec<Setting>,
    /// Settings we changed, in the same order. Only these are ever reset, to the baseline.
    pub applied: Vec<Setting>,
    /// Steps whose outcome is not known: one fence for each claim at most.
    #[serde(flatten, with = "fences")]
    pub fences: Vec<Fence>,
    /// Whether a prepare may change the MIG mode, where that needs no reset: the node's policies say so. What we have
    /// turned on is turned off again for another use whatever this says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_change_mode: bool,
    /// The time slice of the GPU while claims have shares of it, as the node's policies say; `None`: none is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_time_slice: Option<TimeSlice>,
    /// GPU instances that we have made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<OwnedInstance>,
    /// The compute mode that was found before we set another, and comes back when no share needs ours any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_mode_found: Option<FoundComputeMode>,
}

/// A compute mode as it was found. Like the one that we set, it does not outlast a boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundComputeMode {
    /// What it was.
    pub mode: ComputeMode,
    /// In which boot.
    pub boot: BootId,
}

/// The time slice that a GPU should have: derived from its live holds, with the one that its policy has for shares, and
/// from nothing else. Letting go is working it out without the hold. Admin access does not count.
pub fn wanted_time_slice<'a>(
    holds: impl IntoIterator<Item = &'a Hold>,
    shares: Option<TimeSlice>,
) -> Option<TimeSlice> {
    holds.into_iter().fold(None, |so_far, hold| match hold.kind {
        HoldKind::Whole => so_far.or(hold.time_slice),
        HoldKind::Share => shares,
        HoldKind::Partition { .. } => None,
        HoldKind::Admin => so_far,
    })
}

/// Version 1 has the same fields and no time slices. Fields that can be missing came later without a new version: an older
/// divvy that does not know them still understands the settings and one fence, which is what it acts on. It drops them when
/// it writes the file; they are restored from the claims' records.
const VERSION: u32 = 2;

/// In the file the first fence has a field of its own.
mod fences {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Fence;

    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Fences {
        fence: Option<Fence>,
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        more_fences: Vec<Fence>,
    }

    pub(super) fn serialize<S: Serializer>(fences: &[Fence], to: S) -> Result<S::Ok, S::Error> {
        let mut fences = fences.iter().cloned();
        Fences { fence: fences.next(), more_fences: fences.collect() }.serialize(to)
    }

    pub(super) fn deserialize<'a, D: Deserializer<'a>>(from: D) -> Result<Vec<Fence>, D::Error> {
        let Fences { fence, more_fences } = Fences::deserialize(from)?;
        Ok(fence.into_iter().chain(more_fences).collect())
    }
}

fn mig_mode(settings: &[Setting]) -> Option<bool> {
    settings.iter().find_map(|setting| match setting {
        Setting::MigMode { on } => Some(*on),
        Setting::TimeSlice { .. } => None,
    })
}

fn time_slice(settings: &[Setting], in_boot: &BootId) -> Option<TimeSlice> {
    settings.iter().find_map(|setting| match setting {
        Setting::TimeSlice { slice, boot } if boot == in_boot => Some(*slice),
        Setting::TimeSlice { .. } | Setting::MigMode { .. } => None,
    })
}

impl GpuState {
    /// Whether we turned MIG mode on, so that we may turn it off again.
    pub fn turned_mig_on(&self) -> bool {
        self.applied.contains(&Setting::MigMode { on: true })
    }

    /// Whether MIG mode is `on` although we have set it otherwise: a reboot or an administrator has changed it since.
    pub fn disagrees_with_mig_mode(&self, on: bool) -> bool {
        mig_mode(&self.applied).is_some_and(|applied| applied != on)
    }

    /// Notes that MIG mode is to be brought from what it is (`was`) to `on`. What was found the first time is the
    /// baseline; coming back to that leaves nothing applied.
    pub fn note_mig_mode(&mut self, was: bool, on: bool) {
        // A reboot or an administrator has changed it since: what we applied is no longer there.
        if mig_mode(&self.applied).is_some_and(|applied| applied != was) {
            self.replace_mig_mode(None);
        }
        if was == on {
            return;
        }
        let baseline = mig_mode(&self.baseline).unwrap_or(was);
        self.replace_mig_mode((baseline != on).then_some((baseline, on)));
    }

    fn replace_mig_mode(&mut self, with: Option<(bool, bool)>) {
        for (settings, on) in [
            (&mut self.baseline, with.map(|(baseline, _)| baseline)),
            (&mut self.applied, with.map(|(_, applied)| applied)),
        ] {
            settings.retain(|setting| !matches!(setting, Setting::MigMode { .. }));
            settings.splice(0..0, on.map(|on| Setting::MigMode { on }));
        }
    }

    /// Keeps what a prepare may do.
    pub fn take(&mut self, grant: &Grant) {
        self.may_change_mode = grant.may_change_mode.unwrap_or(self.may_change_mode);
        self.share_time_slice = grant.share_time_slice;
    }

    /// Whether the grant is kept already.
    pub fn has(&self, grant: &Grant) -> bool {
        grant.may_change_mode.is_none_or(|may| may == self.may_change_mode)
            && grant.share_time_slice == self.share_time_slice
    }

    /// Whether a time slice is noted, of whichever boot.
    pub fn has_time_slice(&self) -> bool {
        self.applied.iter().chain(&self.baseline).any(|s| matches!(s, Setting::TimeSlice { .. }))
    }

    /// The time slice that we have set in this boot, or may have: it is noted before it is set.
    pub fn time_slice(&self, boot: &BootId) -> Option<TimeSlice> {
        time_slice(&self.applied, boot)
    }

    /// What the time slice was before we set it in this boot.
    pub fn time_slice_before(&self, boot: &BootId) -> Option<TimeSlice> {
        time_slice(&self.baseline, boot)
    }

    /// Notes that the time slice is to be brought to `to`. `was` is what it is now, which counts as the baseline unless
    /// one is noted in this boot.
    pub fn note_time_slice(&mut self, was: TimeSlice, to: TimeSlice, boot: &BootId) {
        let was = self.time_slice_before(boot).unwrap_or(was);
        self.forget_time_slice();
        self.baseline.push(Setting::TimeSlice { slice: was, boot: boot.clone() });
        self.applied.push(Setting::TimeSlice { slice: to, boot: boot.clone() });
    }

    /// It is not known whether the time slice was set: what it was before is kept, and it is set again.
    pub fn doubt_time_slice(&mut self) {
        self.applied.retain(|setting| !matches!(setting, Setting::TimeSlice { .. }));
    }

    /// Nothing of ours is left of the time slice.
    pub fn forget_time_slice(&mut self) {
        for settings in [&mut self.baseline, &mut self.applied] {
            settings.retain(|setting| !matches!(setting, Setting::TimeSlice { .. }));
        }
    }

    /// Notes the compute mode that is about to be changed, unless what was found before is noted in this boot.
    pub fn note_compute_mode(&mut self, mode: ComputeMode, boot: &BootId) {
        if self.compute_mode_found.as_ref().is_none_or(|found| found.boot != *boot) {
            self.compute_mode_found = Some(FoundComputeMode { mode, boot: boot.clone() });
        }
    }

    /// Whether the state says nothing, so that no file is needed for it.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        stored::encode(VERSION, &Head::default(), self)
    }

    /// Reads the bytes of a file.
    pub fn decode(bytes: &[u8]) -> Stored<Self> {
        stored::decode(VERSION, bytes)
    }
}

#[cfg(test)]
mod tests;
