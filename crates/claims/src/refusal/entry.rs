//! A config entry, as a refusal names it.

use crate::ConfigSource;

/// Which config entry is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryAt {
    /// Whether it stands in the DeviceClass or in the claim.
    pub source: ConfigSource,
    /// Its place among the entries of that source, of all drivers, from 0.
    pub index: usize,
}

impl EntryAt {
    pub(super) fn place(self) -> &'static str {
        match self.source {
            ConfigSource::Class => "the DeviceClass of claim",
            ConfigSource::Claim => "claim",
        }
    }

    pub(super) fn fix(self) -> &'static str {
        match self.source {
            ConfigSource::Class => {
                "correct spec.config of the DeviceClass, then delete the claim: it holds a copy"
            }
            ConfigSource::Claim => {
                "correct spec.devices.config of the claim or its template; a claim's spec is immutable, so make it anew"
            }
        }
    }
}
