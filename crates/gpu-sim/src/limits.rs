//! Limits of memory by control group, as drivers from R615 on keep them in one of two ways: in
//! files of the controller `dmem`, or, where the kernel has none, in a table of their own beside
//! the controller `misc`, keyed by the group's address and never tidied.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use divvy_model::{GpuError, GpuErrorCode, GpuOp, GpuUuid, MemoryCaps, MemoryLimit, SystemFacts};
use serde::{Deserialize, Serialize};

use crate::engine::Engine;

/// The controller by which the driver keeps limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LimitBackend {
    /// Files of the group: they go with it, and a program is held to the limit of each group above.
    Dmem,
    /// A table: an entry stays when its group is removed, a new group at the same address has it,
    /// and only the nearest entry counts.
    #[default]
    Misc,
}

/// A control group, as the driver sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimGroup {
    device: u64,
    inode: u64,
    /// Time of its making in nanoseconds: distinguishes it from an earlier group with its inode.
    born: i128,
    /// Controllers that it has.
    controllers: Vec<String>,
}

impl SimGroup {
    /// Reads a group and those above it, up to the root of the hierarchy: the last folder with a
    /// list of controllers.
    pub fn chain(path: &Path) -> io::Result<Vec<Self>> {
        let mut chain = Vec::new();
        for folder in path.ancestors() {
            let list = match fs_err::read_to_string(folder.join("cgroup.controllers")) {
                Ok(list) => list,
                Err(_) if !chain.is_empty() => break,
                Err(error) => return Err(error),
            };
            let data = fs_err::metadata(folder)?;
            let born = data.created().ok();
            let born = born.and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
            chain.push(Self {
                device: data.dev(),
                inode: data.ino(),
                born: born.map_or(0, |born| i128::try_from(born.as_nanos()).unwrap_or(0)),
                controllers: list.split_whitespace().map(str::to_owned).collect(),
            });
        }
        Ok(chain)
    }

    fn has(&self, controller: &str) -> bool {
        self.controllers.iter().any(|name| name == controller)
    }
}

/// A limit that was set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    gpu: GpuUuid,
    group: SimGroup,
    limit: MemoryLimit,
}

/// The limits of all groups.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimLimits {
    /// The driver's way of keeping them.
    pub backend: LimitBackend,
    entries: Vec<Entry>,
}

impl SimLimits {
    fn is_of(&self, entry: &Entry, gpu: &GpuUuid, group: &SimGroup) -> bool {
        let same = (entry.group.device, entry.group.inode) == (group.device, group.inode);
        // The table knows an address alone; a file is gone with its group.
        let lives = self.backend == LimitBackend::Misc || entry.group.born == group.born;
        entry.gpu == *gpu && same && lives
    }

    fn of(&self, gpu: &GpuUuid, group: &SimGroup) -> Option<MemoryLimit> {
        let mut entries = self.entries.iter();
        let entry = entries.find(|entry| self.is_of(entry, gpu, group))?;
        Some(entry.limit)
    }

    fn put(&mut self, gpu: &GpuUuid, group: &SimGroup, limit: MemoryLimit) {
        let known = self
            .entries
            .iter()
            .position(|entry| self.is_of(entry, gpu, group));
        match known.and_then(|at| self.entries.get_mut(at)) {
            Some(entry) => entry.limit = limit,
            None => self.entries.push(Entry {
                gpu: gpu.clone(),
                group: group.clone(),
                limit,
            }),
        }
    }
}

impl Engine {
    /// Returns what NVML says of the driver.
    pub fn system(&self) -> Result<SystemFacts, GpuError> {
        self.loaded(GpuOp::System, None)?;
        Ok(self.system_facts())
    }

    /// Returns the same, faults aside.
    pub(crate) fn system_facts(&self) -> SystemFacts {
        SystemFacts {
            memory_caps: if self.has_limits() {
                MemoryCaps::Available
            } else {
                MemoryCaps::OldDriver
            },
            ..self.system.clone()
        }
    }

    fn has_limits(&self) -> bool {
        MemoryCaps::since(&self.system.driver_version)
    }

    fn can_limit(&self, op: GpuOp, gpu: &GpuUuid) -> Result<(), GpuError> {
        self.find(op, gpu)?;
        if self.has_limits() {
            Ok(())
        } else {
            let code = GpuErrorCode::FUNCTION_NOT_FOUND;
            Err(GpuError::on_gpu(op, code, gpu))
        }
    }

    /// See [`divvy_model::GpuDriver::memory_limit`]; `groups` is the group and those above it.
    pub fn memory_limit(
        &self,
        gpu: &GpuUuid,
        groups: &[SimGroup],
    ) -> Result<MemoryLimit, GpuError> {
        const OP: GpuOp = GpuOp::MemoryLimit;
        self.can_limit(OP, gpu)?;
        let fail = |code| Err(GpuError::on_gpu(OP, code, gpu));
        match self.limits.backend {
            LimitBackend::Misc => {
                let nearest = groups.iter().find_map(|group| self.limits.of(gpu, group));
                nearest.map_or_else(|| fail(GpuErrorCode::NOT_SUPPORTED), Ok)
            }
            LimitBackend::Dmem => match groups.iter().find(|group| group.has("dmem")) {
                Some(group) => Ok(self.limits.of(gpu, group).unwrap_or(NO_LIMIT)),
                None => fail(GpuErrorCode::NOT_SUPPORTED),
            },
        }
    }

    /// See [`divvy_model::GpuDriver::set_memory_limit`]; `groups` is the group and those above it.
    pub fn set_memory_limit(
        &mut self,
        gpu: &GpuUuid,
        groups: &[SimGroup],
        hard: Option<u64>,
    ) -> Result<(), GpuError> {
        const OP: GpuOp = GpuOp::SetMemoryLimit;
        self.can_limit(OP, gpu)?;
        let fail = |code| Err(GpuError::on_gpu(OP, code, gpu));
        let [group, _, ..] = groups else {
            // The root has no limits.
            return fail(GpuErrorCode::NOT_SUPPORTED);
        };
        let known = self.limits.of(gpu, group);
        match self.limits.backend {
            LimitBackend::Dmem if !group.has("dmem") => return fail(GpuErrorCode::NOT_FOUND),
            LimitBackend::Misc
                if known.is_some_and(|known| hard.is_some_and(|hard| hard < known.used)) =>
            {
                return fail(GpuErrorCode::INVALID_ARGUMENT);
            }
            LimitBackend::Dmem | LimitBackend::Misc => {}
        }
        // Bytes that were allocated before an entry was there never count.
        let used = known.map_or(0, |known| known.used);
        self.limits.put(gpu, group, MemoryLimit { hard, used });
        Ok(())
    }

    /// Allocates memory for a program of a group, as the driver does: `Err` if a limit does not let
    /// it.
    pub fn allocate(
        &mut self,
        gpu: &GpuUuid,
        groups: &[SimGroup],
        bytes: u64,
    ) -> Result<(), GpuErrorCode> {
        // With MIG mode on nothing is charged.
        if self.mig_mode(gpu).is_ok_and(divvy_model::MigMode::is_on) {
            return Ok(());
        }
        let charged: Vec<&SimGroup> = match self.limits.backend {
            LimitBackend::Dmem => groups.iter().filter(|group| group.has("dmem")).collect(),
            // The controller's own group is the nearest that has it; an entry below is not looked
            // at.
            LimitBackend::Misc => groups
                .iter()
                .skip_while(|group| !group.has("misc"))
                .find(|group| self.limits.of(gpu, group).is_some())
                .into_iter()
                .collect(),
        };
        let after = |group: &SimGroup| {
            let limit = self.limits.of(gpu, group).unwrap_or(NO_LIMIT);
            let used = limit.used.saturating_add(bytes);
            MemoryLimit { used, ..limit }
        };
        let after: Vec<_> = charged.iter().map(|group| after(group)).collect();
        if after
            .iter()
            .any(|limit| limit.hard.is_some_and(|hard| limit.used > hard))
        {
            return Err(GpuErrorCode::MEMORY);
        }
        for (group, limit) in charged.into_iter().zip(after) {
            self.limits.put(gpu, group, limit);
        }
        Ok(())
    }

    /// Forgets all limits, as a driver does that is loaded anew.
    pub fn forget_limits(&mut self) {
        self.limits.entries.clear();
    }
}

const NO_LIMIT: MemoryLimit = MemoryLimit {
    hard: None,
    used: 0,
};
