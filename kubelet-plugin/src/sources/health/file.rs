//! A file of faults known from events: a process that starts later in the same boot cannot poll
//! them, where the driver reports no recovery action.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use divvy_model::health::Remembered;
use divvy_model::mig::{GpuInstanceId, Placement};
use divvy_model::{BootId, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::saved;

/// The content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredHealth {
    pub(super) gpus: BTreeMap<GpuUuid, Remembered>,
    /// Where the GPU instances are that something is wrong with.
    pub(super) places: Vec<(GpuUuid, GpuInstanceId, Placement)>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    boot: BootId,
    memory: StoredHealth,
}

/// The file.
#[derive(Debug)]
pub(crate) struct HealthFile {
    path: PathBuf,
    boot: BootId,
}

impl HealthFile {
    pub(crate) fn new(plugin_dir: &Path, boot: BootId) -> Self {
        Self {
            path: plugin_dir.join("health.json"),
            boot,
        }
    }

    /// Reads the file; nothing of an earlier boot counts.
    pub(super) fn load(&self) -> StoredHealth {
        // A reboot resets the GPUs: faults of before it are over.
        let stored = saved::load(&self.path).filter(|stored: &Stored| stored.boot == self.boot);
        stored.map(|stored| stored.memory).unwrap_or_default()
    }

    /// Replaces what was saved.
    pub(super) fn save(&self, memory: &StoredHealth) -> io::Result<()> {
        saved::save(
            &self.path,
            &Stored {
                boot: self.boot.clone(),
                memory: memory.clone(),
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::health::Ailment;

    use super::*;

    #[test]
    fn what_was_reported_is_known_for_the_rest_of_the_boot() {
        let dir = tempfile::tempdir().unwrap();
        let file = |boot: &str| HealthFile::new(dir.path(), boot.parse().unwrap());
        assert_eq!(file("b1").load(), StoredHealth::default());
        let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        let remembered = Remembered {
            ailments: [Ailment::Xid(79)].into(),
            partitions: [(GpuInstanceId(3), [Ailment::Xid(95)].into())].into(),
            away: true,
        };
        let places = vec![(
            gpu.clone(),
            GpuInstanceId(3),
            Placement { start: 4, size: 4 },
        )];
        let memory = StoredHealth {
            gpus: [(gpu, remembered)].into(),
            places,
        };
        file("b1").save(&memory).unwrap();
        assert_eq!(file("b1").load(), memory);
        assert_eq!(file("b2").load(), StoredHealth::default());
    }
}
