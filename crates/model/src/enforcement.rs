//! Limits that really hold: by what the user of a device is kept within what it was given.

use crate::{Sharing, TargetKind};

/// A layer that keeps the user of a device within its memory or its compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Enforcement {
    /// The GPU: the user has the whole of it, or a partition that the others cannot reach.
    Hardware,
    /// Nothing: amounts are counted by the scheduler, and a program can take more.
    Nothing,
}

impl Enforcement {
    /// Returns the value of the attributes `memoryEnforcement` and `computeEnforcement`.
    pub fn attribute(self) -> &'static str {
        match self {
            Self::Hardware => "hardware",
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
    /// Returns the limits of a target in this use.
    pub fn of(target: TargetKind, sharing: Sharing) -> Self {
        let held = match sharing {
            // A device for admins says what its GPU says, as in the attribute `sharing`.
            Sharing::Exclusive | Sharing::Admin => Enforcement::Hardware,
            Sharing::TimeSliced | Sharing::Mps => Enforcement::Nothing,
        };
        Self {
            memory: held,
            compute: held,
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
        let said = |target, sharing| {
            let limits = Limits::of(target, sharing);
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
            (
                partition,
                Sharing::TimeSliced,
                ("none", "none", "partition"),
            ),
        ] {
            assert_eq!(said(target, sharing), expected, "{target:?} {sharing:?}");
        }
    }
}
