//! Device names: what a GPU may become, as a name in a ResourceSlice.

use std::fmt;

use crate::mig::{PartitionName, number};
use crate::{DeviceName, Form, Sharing, TargetKind};

/// A device by the parts of its name: a target with a sharing. Ordinals are ours and stable
/// ([`crate::Ordinals`]); they are not NVML indexes and not minor numbers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceKind {
    /// The target as the name has it.
    pub target: NamedTarget,
    /// The way of use: what follows the target (`-ts`, `-mps`, `-admin`; nothing if exclusive).
    pub sharing: Sharing,
}

/// A target as a name has it: without the size of a partition, with what people see of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum NamedTarget {
    /// `gpu-<ordinal>`: the whole GPU.
    Gpu {
        /// Our stable ordinal of the GPU.
        ordinal: u32,
    },
    /// `gpu-<ordinal>-mig-<profile>-<profile id>-<start>`: a partition of it.
    Partition(PartitionName),
}

/// A device name that this version does not publish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "device name {0:?} is not one this driver publishes (expected gpu-<number>, gpu-<number>-ts, gpu-<number>-mps, gpu-<number>-admin, gpu-<number>-mig-<profile>-<profile id>-<start> or the same with -ts)"
)]
pub struct ParseDeviceNameError(pub String);

impl DeviceKind {
    /// Returns the device of a whole GPU for one claim.
    pub const fn whole(ordinal: u32) -> Self {
        Self::of_gpu(ordinal, Sharing::Exclusive)
    }

    /// Returns the device of a whole GPU that is used so.
    pub const fn of_gpu(ordinal: u32, sharing: Sharing) -> Self {
        Self {
            target: NamedTarget::Gpu { ordinal },
            sharing,
        }
    }

    /// The ordinal of the GPU the device belongs to.
    pub fn ordinal(&self) -> u32 {
        match &self.target {
            NamedTarget::Gpu { ordinal } => *ordinal,
            NamedTarget::Partition(name) => name.ordinal,
        }
    }

    /// Returns the partition that the device is, or is a share of.
    pub fn partition(&self) -> Option<&PartitionName> {
        match &self.target {
            NamedTarget::Gpu { .. } => None,
            NamedTarget::Partition(name) => Some(name),
        }
    }

    /// Returns the kind of target and the way of use.
    pub fn form(&self) -> Form {
        let target = match self.target {
            NamedTarget::Gpu { .. } => TargetKind::Gpu,
            NamedTarget::Partition(_) => TargetKind::Partition,
        };
        Form::new(target, self.sharing)
    }

    /// Returns whether this version publishes such devices. A partition that others made is for one
    /// claim.
    fn is_published(&self) -> bool {
        let shares_theirs =
            self.sharing.is_shared() && self.partition().is_some_and(|name| name.is_static);
        self.form().is_published() && !shares_theirs
    }

    /// The name in a ResourceSlice.
    pub fn device_name(&self) -> DeviceName {
        #[expect(
            clippy::expect_used,
            reason = "every form below is a DNS label by construction; tested"
        )]
        self.to_string()
            .parse()
            .expect("device names are DNS labels")
    }

    /// Reads the name of a device back, if this version publishes such devices.
    pub fn parse(name: &DeviceName) -> Result<Self, ParseDeviceNameError> {
        read(name.as_str())
            .filter(Self::is_published)
            .ok_or_else(|| ParseDeviceNameError(name.to_string()))
    }
}

/// Reads every name that a target and a sharing can make, published or not.
fn read(text: &str) -> Option<DeviceKind> {
    // No suffix is the end of another, so at most one fits. A second one (`gpu-0-ts-ts`) stays in
    // the target, which then is neither a number nor a partition.
    let shared = Sharing::ALL
        .into_iter()
        .filter(|sharing| !sharing.suffix().is_empty())
        .find_map(|sharing| Some((text.strip_suffix(sharing.suffix())?, sharing)));
    let (target, sharing) = shared.unwrap_or((text, Sharing::Exclusive));
    let target = match number(target.strip_prefix("gpu-")?) {
        Some(ordinal) => NamedTarget::Gpu { ordinal },
        None => NamedTarget::Partition(PartitionName::read(target)?),
    };
    Some(DeviceKind { target, sharing })
}

impl From<PartitionName> for DeviceKind {
    /// Returns the partition for one claim.
    fn from(name: PartitionName) -> Self {
        Self {
            target: NamedTarget::Partition(name),
            sharing: Sharing::Exclusive,
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            NamedTarget::Gpu { ordinal } => write!(f, "gpu-{ordinal}")?,
            NamedTarget::Partition(name) => name.fmt(f)?,
        }
        f.write_str(self.sharing.suffix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_as_written_and_nothing_else_is_accepted() {
        for ordinal in [0, 7, 15, u32::MAX] {
            for sharing in Sharing::ALL {
                let device = DeviceKind::of_gpu(ordinal, sharing);
                assert_eq!(device.ordinal(), ordinal);
                assert_eq!(DeviceKind::parse(&device.device_name()), Ok(device));
            }
        }
        let partition = DeviceKind::parse(&"gpu-3-mig-1g10gb-19-4".parse().unwrap()).unwrap();
        assert_eq!(
            (partition.ordinal(), partition.to_string()),
            (3, "gpu-3-mig-1g10gb-19-4".to_owned())
        );
        assert_eq!(
            DeviceKind::parse(&partition.device_name()),
            Ok(partition.clone())
        );
        for (sharing, name) in [
            (Sharing::TimeSliced, "gpu-3-mig-1g10gb-19-4-ts"),
            (Sharing::Mps, "gpu-3-mig-1g10gb-19-4-mps"),
        ] {
            let twin = DeviceKind {
                sharing,
                ..partition.clone()
            };
            assert_eq!(twin.to_string(), name);
            assert_eq!(DeviceKind::parse(&twin.device_name()), Ok(twin));
        }
        assert_eq!(
            DeviceKind::of_gpu(3, Sharing::TimeSliced).to_string(),
            "gpu-3-ts"
        );
        for bad in [
            "gpu-0-mig-19-0",
            "gpu-0-ts-1",
            "gpu-00-ts",
            "gpu-0-mps-1",
            "gpu-0-mig-static-1g10gb-19-0-ts",
            "gpu-0-mig-static-1g10gb-19-0-mps",
            "gpu-0-mig-1g10gb-19-0-admin",
            "gpu-0-ts-ts",
            "gpu-0-mps-ts",
            "gpu-4294967296",
            "gpu-ts",
            "gpu-admin",
            "gpu-00",
            "gpu-a",
            "gpu",
            "gpu-99999999999",
            "mig-0",
        ] {
            assert!(DeviceKind::parse(&bad.parse().unwrap()).is_err(), "{bad}");
        }
    }

    /// The name that is longest without a suffix has room for each.
    #[test]
    fn the_longest_name_of_each_sharing_is_a_dns_label() {
        let id = crate::mig::GpuInstanceProfileId(u32::MAX);
        let long = "7g.141gb+gfx,me.all,and.more.of.newer.drivers";
        let partition = PartitionName::new(u32::MAX, long, id, u32::MAX);
        let targets = [
            NamedTarget::Gpu { ordinal: u32::MAX },
            NamedTarget::Partition(partition.clone()),
            NamedTarget::Partition(partition.into_static()),
        ];
        let mut longest = 0;
        for target in targets {
            for sharing in Sharing::ALL {
                let target = target.clone();
                let device = DeviceKind { target, sharing };
                let name = device.device_name();
                longest = longest.max(name.as_str().len());
                assert_eq!(read(name.as_str()), Some(device));
            }
        }
        assert_eq!(longest, 63);
    }

    #[test]
    fn each_sharing_of_each_target_has_a_name_of_its_own() {
        for sharing in Sharing::ALL {
            for target in [
                "gpu-3",
                "gpu-3-mig-1g10gb-me-19-4",
                "gpu-3-mig-static-1g10gb-19-4",
            ] {
                let name = format!("{target}{}", sharing.suffix());
                let device = read(&name).unwrap();
                assert_eq!((device.ordinal(), device.sharing), (3, sharing), "{name}");
                assert_eq!(device.to_string(), name);
                let whole = DeviceKind {
                    sharing: Sharing::Exclusive,
                    ..device
                };
                assert_eq!(whole.to_string(), target);
            }
        }
    }
}
