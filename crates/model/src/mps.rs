//! Sharing of a GPU by MPS: the ability of a node, and the server of a GPU.

use serde::{Deserialize, Serialize};

use crate::Architecture;

/// Ability of a node to share GPUs by MPS, which is protocol v2 with equal slots (ADR 18).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MpsAbility {
    /// The driver has its programs for MPS, and a supervisor runs them.
    Available,
    /// An administrator has not switched MPS on (`mps.enabled=false`).
    #[default]
    SwitchedOff,
    /// The driver is older than R535.
    OldDriver,
    /// The driver is R615 or later, whose protocol v3 divvy does not use yet.
    NewDriver,
    /// The driver root has no programs for MPS.
    NoProgram,
}

impl MpsAbility {
    /// First branch of the driver whose servers take limits for their clients as divvy sets them.
    const FIRST_DRIVER: u32 = 535;
    /// First branch with protocol v3.
    const V3_DRIVER: u32 = 615;

    /// Returns the ability of a node with a driver of this version. `switched_on` says that the
    /// administrator wants MPS, `has_programs` that the driver root has both programs.
    pub fn of_node(driver_version: &str, switched_on: bool, has_programs: bool) -> Self {
        let branch = driver_version.split('.').next();
        let branch: Option<u32> = branch.and_then(|branch| branch.parse().ok());
        if !switched_on {
            Self::SwitchedOff
        } else if branch.is_none_or(|branch| branch < Self::FIRST_DRIVER) {
            Self::OldDriver
        } else if branch >= Some(Self::V3_DRIVER) {
            Self::NewDriver
        } else if has_programs {
            Self::Available
        } else {
            Self::NoProgram
        }
    }

    /// Returns what a GPU of this architecture or its node lacks for an MPS server; `None` if they lack
    /// nothing.
    pub fn lack_for(self, architecture: Architecture) -> Option<&'static str> {
        match architecture {
            Architecture::Kepler | Architecture::Maxwell | Architecture::Pascal => {
                Some("it is older than Volta, so that an MPS server sets no limits")
            }
            _ => self.lack(),
        }
    }

    /// Returns what the node lacks, for people; `None` if it lacks nothing.
    pub fn lack(self) -> Option<&'static str> {
        match self {
            Self::Available => None,
            Self::SwitchedOff => Some("MPS is switched off in divvy's chart (mps.enabled=false)"),
            Self::OldDriver => Some("its NVIDIA driver is older than R535"),
            Self::NewDriver => Some(
                "its NVIDIA driver is R615 or later, whose MPS (protocol v3) divvy does not use yet",
            ),
            Self::NoProgram => Some(
                "its driver root lacks nvidia-cuda-mps-control or nvidia-cuda-mps-server (install the driver's compute utilities)",
            ),
        }
    }
}

/// The MPS server of a GPU: limits that it sets for every client, the same for all, since a server of
/// protocol v2 has one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsServer {
    /// Number of equal slots, for as many claims. `None`: the server of a claim that has the GPU alone,
    /// with the limits of its config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// Part of the GPU's threads that a client can use, in percent.
    pub cores: u32,
    /// Memory in MiB that a client can allocate. `None`: all of it, or the board has none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

impl MpsServer {
    /// Number of clients that a server takes on all drivers that divvy uses MPS with: more slots would be
    /// published than can be used.
    pub const MOST_SLOTS: u32 = 48;

    /// Returns the server of a GPU with this memory for shares, cut into equal slots. `None` if
    /// nothing of the memory is left for a slot.
    pub fn equal(slots: u32, memory_mib: Option<u64>) -> Option<Self> {
        let slots = slots.clamp(1, Self::MOST_SLOTS);
        let memory_mib = match memory_mib {
            Some(mib) => Some(Some(mib / u64::from(slots)).filter(|mib| *mib > 0)?),
            None => None,
        };
        Some(Self {
            slots: Some(slots),
            cores: 100 / slots,
            memory_mib,
        })
    }

    /// Returns the server of a claim that has the GPU alone: without a limit of threads its clients can
    /// use all, and so with memory, here in bytes.
    pub fn of_claim(cores: Option<u32>, memory: Option<u64>) -> Self {
        Self {
            slots: None,
            cores: cores.unwrap_or(100),
            memory_mib: memory.map(|bytes| bytes >> 20),
        }
    }

    /// Returns the number of claims that it is for.
    pub fn places(self) -> u32 {
        self.slots.unwrap_or(1)
    }
}

/// Priority of the programs of an MPS client beside those of others: a hint to the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MpsPriority {
    /// The priority of a program that sets none.
    Normal,
    /// After the others.
    BelowNormal,
}

impl MpsPriority {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 2] = [Self::Normal, Self::BelowNormal];

    /// Returns it as people write and read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::BelowNormal => "BelowNormal",
        }
    }

    /// Returns the number that `CUDA_MPS_CLIENT_PRIORITY` takes.
    pub fn number(self) -> u32 {
        match self {
            Self::Normal => 0,
            Self::BelowNormal => 1,
        }
    }

    /// Reads a name back.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|priority| priority.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_shares_by_mps_only_if_nothing_is_lacking() {
        for (driver, on, programs, expected) in [
            ("535.54.03", true, true, MpsAbility::Available),
            ("610.43", true, true, MpsAbility::Available),
            ("580.95.05", true, false, MpsAbility::NoProgram),
            ("580.95.05", false, true, MpsAbility::SwitchedOff),
            ("525.147.05", true, true, MpsAbility::OldDriver),
            ("odd", true, true, MpsAbility::OldDriver),
            ("615.71.09", true, true, MpsAbility::NewDriver),
            ("620.1", true, false, MpsAbility::NewDriver),
        ] {
            let found = MpsAbility::of_node(driver, on, programs);
            assert_eq!(found, expected, "{driver} {on} {programs}");
            assert_eq!(found.lack().is_none(), expected == MpsAbility::Available);
        }
    }

    #[test]
    fn equal_slots_are_never_more_than_the_gpu_together() {
        for slots in [0, 1, 3, 7, 16, 48, 49, 1024] {
            let server = MpsServer::equal(slots, Some(81_559)).unwrap();
            assert!((1..=MpsServer::MOST_SLOTS).contains(&server.places()));
            assert!(server.places() * server.cores <= 100, "{server:?}");
            assert!(server.cores > 0, "{server:?}");
            let together = u64::from(server.places()) * server.memory_mib.unwrap();
            assert!(together <= 81_559, "{server:?}");
        }
        assert_eq!(MpsServer::equal(4, Some(3)), None);
        assert_eq!(MpsServer::equal(4, None).unwrap().memory_mib, None);
    }
}
