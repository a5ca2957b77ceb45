//! [`PartitionName`]: the name under which a partition is published.

use std::fmt;

use super::{GpuInstanceProfileId, name::number};
use crate::{DeviceName, Sharing};

/// `gpu-<ordinal>-mig-<profile>-<profile id>-<start>`, such as `gpu-0-mig-1g10gb-19-0`, or
/// `gpu-<ordinal>-mig-static-<profile>-<profile id>-<start>` for a partition that was made outside
/// divvy. The profile in it is for people and may change with the driver; GPU, profile id and start
/// say which partition is meant.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionName {
    /// Our stable ordinal of the GPU ([`crate::Ordinals`]).
    pub ordinal: u32,
    label: String,
    pub profile: GpuInstanceProfileId,
    /// First memory slice.
    pub start: u32,
    /// True if the partition was made outside divvy: prepare finds it, and never creates or
    /// destroys it.
    pub is_static: bool,
}

/// A device name that is not a partition's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "device name {0:?} is not a partition's (expected gpu-<number>-mig-<profile>-<profile id>-<start> or gpu-<number>-mig-static-<profile>-<profile id>-<start>)"
)]
pub struct ParsePartitionNameError(pub String);

/// The longest DNS label, so the longest name of a device.
const MAX_NAME: usize = 63;
/// In front of the profile of a partition that was made outside divvy. No profile name begins with
/// it.
const STATIC: &str = "static-";

impl PartitionName {
    /// The name of a partition. `profile_name` loses its dots, and other characters that a device
    /// name cannot have become dashes, as in NVIDIA's driver.
    pub fn new(
        ordinal: u32,
        profile_name: &str,
        profile: GpuInstanceProfileId,
        start: u32,
    ) -> Self {
        let mut label: String = profile_name
            .chars()
            .filter(|c| *c != '.')
            .map(|c| c.to_ascii_lowercase())
            .map(|c| {
                if c.is_ascii_lowercase() || c.is_ascii_digit() {
                    c
                } else {
                    '-'
                }
            })
            .collect();
        if label.is_empty() {
            label.push_str("unknown");
        }
        let name = Self {
            ordinal,
            label,
            profile,
            start,
            is_static: false,
        };
        name.cut()
    }

    /// The name of the same partition where it was made outside divvy (policy `mig.instances:
    /// Static`).
    #[must_use]
    pub fn into_static(mut self) -> Self {
        self.is_static = true;
        self.cut()
    }

    /// Cuts a label that is too long: profile id and start distinguish partitions, the label is for
    /// people.
    fn cut(mut self) -> Self {
        let most = self.most_of_label();
        self.label.truncate(most);
        self
    }

    /// Returns the number of characters that the label can have beside the other parts, so that the
    /// name of every share of the partition is a DNS label, too.
    fn most_of_label(&self) -> usize {
        let suffix = Sharing::ALL.map(|sharing| sharing.suffix().len());
        let rest = self.to_string().len() - self.label.len();
        MAX_NAME.saturating_sub(rest + suffix.into_iter().max().unwrap_or(0))
    }

    /// The profile as the name has it, such as `1g10gb-me`.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Returns whether both name the same partition, whatever they call its profile.
    pub fn is_same_partition(&self, other: &Self) -> bool {
        (self.ordinal, self.profile, self.start, self.is_static)
            == (other.ordinal, other.profile, other.start, other.is_static)
    }

    /// The name in a ResourceSlice.
    pub fn device_name(&self) -> DeviceName {
        #[expect(
            clippy::expect_used,
            reason = "a DNS label by construction; tested at its longest"
        )]
        self.to_string()
            .parse()
            .expect("partition names are DNS labels")
    }

    /// Reads a name back.
    pub fn parse(name: &DeviceName) -> Result<Self, ParsePartitionNameError> {
        Self::read(name.as_str()).ok_or_else(|| ParsePartitionNameError(name.to_string()))
    }

    /// Reads a name, or the part of a longer one that names the partition.
    pub(crate) fn read(text: &str) -> Option<Self> {
        read(text)
    }
}

fn read(text: &str) -> Option<PartitionName> {
    let (ordinal, rest) = text.strip_prefix("gpu-")?.split_once("-mig-")?;
    // From the end: labels have dashes (`1g10gb-me`), the two numbers behind them have none.
    let mut parts = rest.rsplitn(3, '-');
    let (start, profile, label) = (parts.next()?, parts.next()?, parts.next()?);
    let (is_static, label) = label
        .strip_prefix(STATIC)
        .map_or((false, label), |label| (true, label));
    let name = PartitionName {
        ordinal: number(ordinal)?,
        label: label.to_owned(),
        profile: GpuInstanceProfileId(number(profile)?),
        start: number(start)?,
        is_static,
    };
    // A longer label is not one that this driver writes.
    (1..=name.most_of_label())
        .contains(&name.label.len())
        .then_some(name)
}

impl fmt::Display for PartitionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ordinal,
            label,
            profile,
            start,
            is_static,
        } = self;
        let made_outside = if *is_static { STATIC } else { "" };
        write!(
            f,
            "gpu-{ordinal}-mig-{made_outside}{label}-{profile}-{start}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_as_written() {
        let cases = [
            ((0, "1g.10gb", 19, 0), "gpu-0-mig-1g10gb-19-0"),
            ((12, "1g.5gb+me", 20, 6), "gpu-12-mig-1g5gb-me-20-6"),
            ((3, "1g.24gb+me.all", 65, 9), "gpu-3-mig-1g24gb-meall-65-9"),
            ((3, "1g.24gb-me", 67, 9), "gpu-3-mig-1g24gb-me-67-9"),
            ((0, "", 4, 0), "gpu-0-mig-unknown-4-0"),
            (
                (
                    u32::MAX,
                    "A Very_Long.Name+of+something",
                    u32::MAX,
                    u32::MAX,
                ),
                "gpu-4294967295-mig-a-very-longname--4294967295-4294967295",
            ),
        ];
        for ((ordinal, profile, id, start), text) in cases {
            let name = PartitionName::new(ordinal, profile, GpuInstanceProfileId(id), start);
            assert_eq!(name.device_name().as_str(), text);
            assert_eq!(PartitionName::parse(&name.device_name()), Ok(name));
        }
    }

    #[test]
    fn a_partition_made_outside_divvy_has_a_name_of_its_own() {
        let cases = [
            ((0, "1g.10gb", 19, 0), "gpu-0-mig-static-1g10gb-19-0"),
            ((0, "", 4, 0), "gpu-0-mig-static-unknown-4-0"),
            (
                (
                    u32::MAX,
                    "A Very_Long.Name+of+something",
                    u32::MAX,
                    u32::MAX,
                ),
                "gpu-4294967295-mig-static-a-very-lo-4294967295-4294967295",
            ),
        ];
        for ((ordinal, profile, id, start), text) in cases {
            let ours = PartitionName::new(ordinal, profile, GpuInstanceProfileId(id), start);
            let name = ours.clone().into_static();
            assert_eq!(name.device_name().as_str(), text);
            assert_eq!(PartitionName::parse(&name.device_name()), Ok(name.clone()));
            assert!(!name.is_same_partition(&ours));
        }
    }

    #[test]
    fn other_names_are_not_partitions() {
        for bad in [
            "gpu-0",
            "gpu-0-mig",
            "gpu-0-mig-19-0",
            "gpu-00-mig-1g10gb-19-0",
            "gpu-0-mig-1g10gb-019-0",
            "gpu-0-mig-1g10gb-19-x",
            "gpu-a-mig-1g10gb-19-0",
            "gpu-0-mig--19-0",
            "gpu-0-mig-static--19-0",
            "gpu-0-mig-1g10gb-99999999999-0",
        ] {
            assert_eq!(
                PartitionName::parse(&bad.parse().unwrap()),
                Err(ParsePartitionNameError(bad.to_owned()))
            );
        }
    }

    #[test]
    fn another_name_of_the_profile_is_the_same_partition() {
        let name = |profile, start| PartitionName::new(0, profile, GpuInstanceProfileId(9), start);
        assert!(name("3g.139gb", 4).is_same_partition(&name("3g.126gb", 4)));
        assert!(!name("3g.139gb", 4).is_same_partition(&name("3g.139gb", 0)));
    }
}
