//! Limits that really hold: by what the user of a device is kept within what it was given.

use crate::{MemoryCaps, Sharing, TargetKind};

/// A layer that keeps the user of a device within its memory or its compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Enforcement {
    /// The GPU: the user has the whole of it, or a partition that the others cannot reach.
    Hardware,
    /// The driver of the kernel, by the control group of the pod.
    Cgroup,
    /// The MPS server, for each of its clients.
    MpsServer,
    /// Nothing: amounts are counted by the scheduler, and a program can take more.
    Nothing,
}

impl Enforcement {
    /// Returns the value of the attributes `memoryEnforcement` and `computeEnforcement`.
    pub fn attribute(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
            Self::Cgroup => "cgroup",
            Self::MpsServer => "mps-server",
            Self::Nothing => "none",
        }
    }
}

/// Limits of one kind of device on a node, as they are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Enforcement of its memory.
    pub memory: Enforcement,
    /// Enforcement of its compute.
    pub compute: Enforcement,
    /// The value of the attribute `faultDomain`: a fatal fault of a program ends the programs that
    /// run in it.
    pub fault_domain: &'static str,
}

impl Limits {
    /// Returns the limits of a target in this use, on a node with this ability to cap memory.
    pub fn of(target: TargetKind, sharing: Sharing, caps: MemoryCaps) -> Self {
        let (memory, compute) = match (sharing, target) {
            // A device for admins says what its GPU says, as in the attribute `sharing`.
            (Sharing::Exclusive | Sharing::Admin, _) => {
                (Enforcement::Hardware, Enforcement::Hardware)
            }
            // The driver charges nothing to control groups with MIG mode on. An MPS server limits
            // memory too, but a program can make it drop that limit (ADR 18).
            (Sharing::TimeSliced | Sharing::Mps, TargetKind::Gpu) => {
                let memory = match caps {
                    MemoryCaps::Available => Enforcement::Cgroup,
                    _ => Enforcement::Nothing,
                };
                let compute = match sharing {
                    Sharing::Mps => Enforcement::MpsServer,
                    _ => Enforcement::Nothing,
                };
                (memory, compute)
            }
            (Sharing::TimeSliced, TargetKind::Partition) => {
                (Enforcement::Nothing, Enforcement::Nothing)
            }
            (Sharing::Mps, TargetKind::Partition) => (Enforcement::Nothing, Enforcement::MpsServer),
        };
        Self {
            memory,
            compute,
            fault_domain: match target {
                TargetKind::Gpu => "gpu",
                TargetKind::Partition => "partition",
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_gpus_and_partitions_are_limited_by_hardware_and_shares_not() {
        let said = |target, sharing, caps| {
            let limits = Limits::of(target, sharing, caps);
            let [memory, compute] = [limits.memory, limits.compute].map(Enforcement::attribute);
            (memory, compute, limits.fault_domain)
        };
        let (gpu, partition) = (TargetKind::Gpu, TargetKind::Partition);
        for (target, sharing, expected) in [
            (gpu, Sharing::Exclusive, ("hardware", "hardware", "gpu")),
            (
                partition,
                Sharing::Exclusive,
                ("hardware", "hardware", "partition"),
            ),
            (gpu, Sharing::TimeSliced, ("none", "none", "gpu")),
            (gpu, Sharing::Mps, ("none", "mps-server", "gpu")),
            (partition, Sharing::Mps, ("none", "mps-server", "partition")),
            (
                partition,
                Sharing::TimeSliced,
                ("none", "none", "partition"),
            ),
        ] {
            let old = MemoryCaps::OldDriver;
            assert_eq!(
                said(target, sharing, old),
                expected,
                "{target:?} {sharing:?}"
            );
            let capped = match (target, sharing) {
                (TargetKind::Gpu, Sharing::TimeSliced) => ("cgroup", "none", "gpu"),
                (TargetKind::Gpu, Sharing::Mps) => ("cgroup", "mps-server", "gpu"),
                _ => expected,
            };
            assert_eq!(
                said(target, sharing, MemoryCaps::Available),
                capped,
                "{target:?} {sharing:?}"
            );
        }
    }
}
