//! The limits that the driver has for the groups of a pod.

use std::path::Path;

use divvy_model::{GpuError, GpuErrorCode, GpuUuid};

use super::ability::{backend, controllers};
use super::cap::Capper;
use super::note::PodCaps;

/// Difference between a limit and the one that stands for it while a hidden one is looked for.
const PROBE: u64 = 8 << 20;
/// Bound on what the kernel may round a limit down by: its largest page.
const ROUNDED: u64 = 2 << 20;

/// Returns whether a limit is the one that was set.
pub(super) fn is_limit(found: Option<u64>, set: u64) -> bool {
    found.is_some_and(|found| found <= set && set - found < ROUNDED)
}

/// Limit of a group.
struct Entry {
    path: String,
    /// Bytes that it is to have.
    wanted: u64,
    /// Bytes that it has; `None` while it has no limit.
    found: Option<u64>,
    /// Bytes that it has been given in this call.
    given: u64,
}

/// The limits of a pod after they were set.
#[derive(Debug, Default)]
pub(super) struct Entries {
    given: Vec<(String, u64)>,
    /// True if any was another before.
    pub(super) changed: bool,
    /// True if any was not there.
    pub(super) missed: bool,
}

impl Entries {
    /// Returns the limit that counts for a group of the pod.
    pub(super) fn of(&self, path: &str) -> u64 {
        let own = self.given.iter().find(|(of, _)| of == path);
        // The first is the pod's.
        own.or(self.given.first()).map_or(0, |(_, given)| *given)
    }
}

impl Capper {
    /// Sets the limits of a pod's groups: its own, and those that hide it. Each counts for itself,
    /// so at no time do they add up to more than the pod's shares. With `anew` the pod's is set
    /// although it reads as it should: it may be that of a group above.
    pub(super) fn set_entries(
        &self,
        gpu: &GpuUuid,
        caps: &PodCaps,
        anew: bool,
    ) -> Result<Entries, GpuError> {
        // Phase 1: what each has now. The pod's own is the first.
        let parts = caps.parts(gpu);
        let of_pod = (caps.group.clone(), parts.pod);
        let mut entries = Vec::new();
        for (path, wanted) in std::iter::once(of_pod).chain(parts.apart) {
            let found = self.limit(gpu, &self.groups.join(&path))?;
            entries.push(Entry {
                path,
                wanted,
                found,
                given: 0,
            });
        }
        let mut done = Entries {
            missed: entries.iter().any(|entry| entry.found.is_none()),
            ..Entries::default()
        };
        // Phase 2: those that have too much, or no limit. A program keeps what it has allocated:
        // the driver does not set less.
        let sum = caps.sum(gpu);
        for entry in &mut entries {
            entry.given = match entry.found {
                Some(found) if found <= entry.wanted => found,
                _ => self.lower(gpu, &entry.path, entry.wanted, sum)?,
            };
            done.changed |= !is_limit(entry.found, entry.given);
        }
        // Phase 3: those that have too little, by what is left.
        let given = entries.iter().map(|entry| entry.given);
        let mut left = sum.saturating_sub(given.fold(0, u64::saturating_add));
        for (number, entry) in entries.iter_mut().enumerate() {
            let more = left.min(entry.wanted.saturating_sub(entry.given));
            let next = entry.given.saturating_add(more);
            let is_set = is_limit(Some(entry.given), next);
            if !is_set || (anew && number == 0) {
                self.gpus
                    .set_memory_limit(gpu, &self.groups.join(&entry.path), Some(next))?;
            }
            done.changed |= !is_set;
            (left, entry.given) = (left - more, next);
        }
        let given = entries.into_iter().map(|entry| (entry.path, entry.given));
        done.given = given.collect();
        Ok(done)
    }

    /// Lowers a limit as far as the driver lets it, and returns how far that is. An error where
    /// more is in use than `most`, which is all that the pod has.
    fn lower(&self, gpu: &GpuUuid, path: &str, wanted: u64, most: u64) -> Result<u64, GpuError> {
        let group = self.groups.join(path);
        let set = |bytes| self.gpus.set_memory_limit(gpu, &group, Some(bytes));
        let Err(refused) = set(wanted) else {
            return Ok(wanted);
        };
        if refused.code != GpuErrorCode::INVALID_ARGUMENT {
            return Err(refused);
        }
        let used = self.gpus.memory_limit(gpu, &group)?.used;
        if used <= wanted || used > most {
            return Err(refused);
        }
        set(used).map(|()| used)
    }

    /// Returns whether a limit of a group, or of one between it and the pod's, comes before that of
    /// its pod, which was set to these bytes: with `misc` the nearest alone counts. Such a limit
    /// may have the very amount, so that the pod's has another one for a moment; a plugin that is
    /// killed in it leaves the pod with 8 MiB more until the next round.
    pub(super) fn is_hidden(
        &self,
        gpu: &GpuUuid,
        (of_pod, leaf): (&str, &str),
        bytes: u64,
    ) -> Result<bool, GpuError> {
        if of_pod == leaf {
            return Ok(false);
        }
        let (pod, leaf) = (self.groups.join(of_pod), self.groups.join(leaf));
        let other = bytes.saturating_add(PROBE);
        self.gpus.set_memory_limit(gpu, &pod, Some(other))?;
        let with_other = self.limit(gpu, &leaf);
        self.gpus.set_memory_limit(gpu, &pod, Some(bytes))?;
        let follows = is_limit(with_other?, other) && is_limit(self.limit(gpu, &leaf)?, bytes);
        Ok(!follows)
    }

    /// Returns whether limits of groups that are gone stay, and may hide that of a pod.
    pub(super) fn lingers(&self) -> std::io::Result<bool> {
        Ok(backend(&self.groups)? == Some("misc"))
    }

    /// Sets the limit of a container's own group where it has one besides its pod's: with `dmem`
    /// each group has, and it is what the program sees as the memory of its GPU.
    pub(super) fn set_own(&self, gpu: &GpuUuid, leaf: &str, bytes: u64) -> Result<(), GpuError> {
        let leaf = self.groups.join(leaf);
        let list = controllers(&leaf).ok().flatten().unwrap_or_default();
        if list.iter().any(|name| name == "dmem") {
            self.gpus.set_memory_limit(gpu, &leaf, Some(bytes))?;
        }
        Ok(())
    }

    /// Returns what the driver says of a group; `None` also where it has no entry.
    pub(super) fn limit(&self, gpu: &GpuUuid, group: &Path) -> Result<Option<u64>, GpuError> {
        match self.gpus.memory_limit(gpu, group) {
            Ok(limit) => Ok(limit.hard),
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A limit that was raised by others is none of ours, and neither is one far below.
    #[test]
    fn a_limit_is_what_was_set_but_for_what_the_kernel_rounds_down() {
        let set = 64 << 20;
        for (found, expected) in [
            (None, false),
            (Some(set), true),
            (Some(set - 4096), true),
            (Some(set - ROUNDED), false),
            (Some(set + 1), false),
            (Some(u64::MAX), false),
        ] {
            assert_eq!(is_limit(found, set), expected, "{found:?}");
        }
    }
}
