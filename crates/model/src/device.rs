//! Device names: what a GPU may become, as a name in a ResourceSlice.

use std::fmt;

use crate::DeviceName;
use crate::mig::PartitionName;

/// A published alternative of a GPU, by the ordinal in its name. Ordinals are ours and stable
/// ([`crate::Ordinals`]); they are not NVML indexes and not minor numbers.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// `gpu-<ordinal>`: the whole GPU.
    Whole {
        /// Our stable ordinal of the GPU.
        ordinal: u32,
    },
    /// `gpu-<ordinal>-mig-<profile>-<profile id>-<start>`: a partition of it.
    Partition(PartitionName),
    /// `gpu-<ordinal>-ts`: time-sliced shares of the whole GPU, for many claims.
    Share {
        /// Our stable ordinal of the GPU.
        ordinal: u32,
    },
    /// `gpu-<ordinal>-admin`: the GPU for those with admin access, whatever others have of it (ADR 3).
    Admin {
        /// Our stable ordinal of the GPU.
        ordinal: u32,
    },
}

/// A device name that this version does not publish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "device name {0:?} is not one this driver publishes (expected gpu-<number>, gpu-<number>-ts, gpu-<number>-admin or gpu-<number>-mig-<profile>-<profile id>-<start>)"
)]
pub struct ParseDeviceNameError(pub String);

impl DeviceKind {
    /// The ordinal of the GPU the device belongs to.
    pub fn ordinal(&self) -> u32 {
        match self {
            Self::Whole { ordinal } | Self::Share { ordinal } | Self::Admin { ordinal } => *ordinal,
            Self::Partition(name) => name.ordinal,
        }
    }

    /// The name in a ResourceSlice.
    pub fn device_name(&self) -> DeviceName {
        #[expect(clippy::expect_used, reason = "every form below is a DNS label by construction; tested")]
        self.to_string().parse().expect("device names are DNS labels")
    }

    /// Reads a name back.
    pub fn parse(name: &DeviceName) -> Result<Self, ParseDeviceNameError> {
        if let Ok(partition) = PartitionName::parse(name) {
            return Ok(Self::Partition(partition));
        }
        let error = || ParseDeviceNameError(name.to_string());
        let rest = name.as_str().strip_prefix("gpu-").ok_or_else(error)?;
        let (rest, kind): (_, fn(u32) -> Self) = match rest.split_once('-') {
            None => (rest, |ordinal| Self::Whole { ordinal }),
            Some((rest, "ts")) => (rest, |ordinal| Self::Share { ordinal }),
            Some((rest, "admin")) => (rest, |ordinal| Self::Admin { ordinal }),
            Some(_) => return Err(error()),
        };
        // A leading zero would be a second name for the same device.
        if rest.is_empty()
            || !rest.bytes().all(|b| b.is_ascii_digit())
            || (rest.len() > 1 && rest.starts_with('0'))
        {
            return Err(error());
        }
        rest.parse().map(kind).map_err(|_| error())
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { ordinal } => write!(f, "gpu-{ordinal}"),
            Self::Share { ordinal } => write!(f, "gpu-{ordinal}-ts"),
            Self::Admin { ordinal } => write!(f, "gpu-{ordinal}-admin"),
            Self::Partition(name) => name.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_as_written_and_nothing_else_is_accepted() {
        for ordinal in [0, 7, 15, u32::MAX] {
            for device in
                [DeviceKind::Whole { ordinal }, DeviceKind::Share { ordinal }, DeviceKind::Admin { ordinal }]
            {
                assert_eq!(device.ordinal(), ordinal);
                assert_eq!(DeviceKind::parse(&device.device_name()), Ok(device));
            }
        }
        let partition = DeviceKind::parse(&"gpu-3-mig-1g10gb-19-4".parse().unwrap()).unwrap();
        assert_eq!((partition.ordinal(), partition.to_string()), (3, "gpu-3-mig-1g10gb-19-4".to_owned()));
        assert_eq!(DeviceKind::parse(&partition.device_name()), Ok(partition));
        assert_eq!(DeviceKind::Share { ordinal: 3 }.to_string(), "gpu-3-ts");
        for bad in [
            "gpu-0-mig-19-0",
            "gpu-0-ts-1",
            "gpu-00-ts",
            "gpu-0-mps",
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
}
