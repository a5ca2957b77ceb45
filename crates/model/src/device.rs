//! Device names: what a GPU may become, as a name in a ResourceSlice (DESIGN section 1).

use std::fmt;

use crate::DeviceName;

/// A published alternative of a GPU, by the ordinal in its name. Ordinals are ours and stable
/// ([`crate::Ordinals`]); they are not NVML indexes and not minor numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// `gpu-<ordinal>`: the whole GPU.
    Whole {
        /// Our stable ordinal of the GPU.
        ordinal: u32,
    },
}

/// A device name that this version does not publish.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device name {0:?} is not one this driver publishes (expected gpu-<number>)")]
pub struct ParseDeviceNameError(pub String);

impl DeviceKind {
    /// The ordinal of the GPU the device belongs to.
    pub fn ordinal(self) -> u32 {
        match self {
            Self::Whole { ordinal } => ordinal,
        }
    }

    /// The name in a ResourceSlice.
    pub fn device_name(self) -> DeviceName {
        #[expect(clippy::expect_used, reason = "every form below is a DNS label by construction; tested")]
        self.to_string().parse().expect("device names are DNS labels")
    }

    /// Reads a name back.
    pub fn parse(name: &DeviceName) -> Result<Self, ParseDeviceNameError> {
        let error = || ParseDeviceNameError(name.to_string());
        let rest = name.as_str().strip_prefix("gpu-").ok_or_else(error)?;
        // A leading zero would be a second name for the same device.
        if rest.is_empty()
            || !rest.bytes().all(|b| b.is_ascii_digit())
            || (rest.len() > 1 && rest.starts_with('0'))
        {
            return Err(error());
        }
        rest.parse().map(|ordinal| Self::Whole { ordinal }).map_err(|_| error())
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { ordinal } => write!(f, "gpu-{ordinal}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_as_written_and_nothing_else_is_accepted() {
        for ordinal in [0, 7, 15, u32::MAX] {
            let device = DeviceKind::Whole { ordinal };
            assert_eq!(DeviceKind::parse(&device.device_name()), Ok(device));
        }
        for bad in ["gpu-00", "gpu-a", "gpu", "gpu-99999999999", "mig-0"] {
            assert!(DeviceKind::parse(&bad.parse().unwrap()).is_err(), "{bad}");
        }
    }
}
