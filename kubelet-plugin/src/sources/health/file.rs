//! A file of what a process that starts later cannot find out: faults known from events, which it
//! cannot poll where the driver reports no recovery action, and GPUs that are gone.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use divvy_model::health::Remembered;
use divvy_model::mig::{GpuInstanceId, Placement};
use divvy_model::{BootId, GpuUuid, PciAddress};
use serde::{Deserialize, Serialize};

use crate::host::saved;

/// The content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoredHealth {
    pub(super) gpus: BTreeMap<GpuUuid, Remembered>,
    /// Where the GPU instances are that something is wrong with.
    pub(super) places: Vec<(GpuUuid, GpuInstanceId, Placement)>,
    /// Where each GPU of the node was last seen.
    pub(super) slots: BTreeMap<GpuUuid, PciAddress>,
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

    /// Reads the file. An earlier boot counts for the places of GPUs only.
    pub(super) fn load(&self) -> StoredHealth {
        match saved::load(&self.path) {
            Some(Stored { boot, memory }) if boot == self.boot => memory,
            // A reboot resets the GPUs: faults of before it are over. A GPU that does not come back
            // with it is missing all the same.
            Some(Stored { memory, .. }) => StoredHealth {
                slots: memory.slots,
                ..StoredHealth::default()
            },
            None => StoredHealth::default(),
        }
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
        let slots = BTreeMap::from([(gpu.clone(), "0000:1b:00.0".parse().unwrap())]);
        let memory = StoredHealth {
            gpus: [(gpu, remembered)].into(),
            places,
            slots: slots.clone(),
        };
        file("b1").save(&memory).unwrap();
        assert_eq!(file("b1").load(), memory);
        let next = file("b2").load();
        assert_eq!(
            next,
            StoredHealth {
                slots,
                ..StoredHealth::default()
            }
        );
    }
}
