//! Profile names, such as `1g.10gb+me`: computed as nvidia-smi does, and read back.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The name of a profile. A name depends on the driver (the memory it keeps for itself changes), so
/// it is for people and selectors; the key is [`super::GpuInstanceProfileId`].
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ProfileName {
    compute_slices: Option<u32>,
    slices: u32,
    memory_gb: u64,
    suffix: String,
}

/// A text that is not a profile's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not the name of a MIG profile (expected a form such as 1g.10gb, 1g.10gb+me or 1c.2g.20gb)"
)]
pub struct ParseProfileNameError(pub String);

impl ProfileName {
    /// The name of the profile with `slices` compute slices and `memory_mib` MiB on a GPU with
    /// `total_bytes` of memory (as `nvmlDeviceGetMemoryInfo` counts it). `suffix` is
    /// [`super::ProfileVariant::suffix`].
    pub fn compute(slices: u32, memory_mib: u64, total_bytes: u64, suffix: &'static str) -> Self {
        let (bytes, total) = (u128::from(memory_mib) << 20, u128::from(total_bytes));
        // The GPU's memory in GiB, rounded up, times the profile's part of it in eighths, rounded
        // up.
        let eighths = if total == 0 {
            0
        } else {
            (bytes * 8).div_ceil(total)
        };
        // Rounded half up, as go-nvlib does, whose algorithm gives the names that nvidia-smi
        // prints.
        let gb = (eighths * total.div_ceil(1 << 30) + 4) / 8;
        let memory_gb = u64::try_from(gb).unwrap_or(u64::MAX);
        Self {
            compute_slices: None,
            slices,
            memory_gb,
            suffix: suffix.to_owned(),
        }
    }

    /// Slices of the compute instance, where the name says that it takes fewer than its GPU
    /// instance has.
    pub fn compute_slices(&self) -> Option<u32> {
        self.compute_slices
    }

    /// Compute slices of the GPU instance.
    pub fn slices(&self) -> u32 {
        self.slices
    }

    /// The memory in the name.
    pub fn memory_gb(&self) -> u64 {
        self.memory_gb
    }

    /// Sign and attributes, such as `+me`; empty for most.
    pub fn suffix(&self) -> &str {
        &self.suffix
    }
}

impl fmt::Display for ProfileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(slices) = self.compute_slices {
            write!(f, "{slices}c.")?;
        }
        write!(f, "{}g.{}gb{}", self.slices, self.memory_gb, self.suffix)
    }
}

impl FromStr for ProfileName {
    type Err = ParseProfileNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| ParseProfileNameError(text.to_owned()))
    }
}

fn parse(text: &str) -> Option<ProfileName> {
    let at = text.find(['+', '-']).unwrap_or(text.len());
    let (size, suffix) = text.split_at_checked(at)?;
    let (slices, memory) = size.strip_suffix("gb")?.split_once("g.")?;
    let (compute_slices, slices) = match slices.split_once("c.") {
        Some((compute, slices)) => (Some(number(compute)?), slices),
        None => (None, slices),
    };
    let slices = number(slices)?;
    // A compute instance takes one slice up to all of its GPU instance's.
    let fits = (1..=slices).contains(&compute_slices.unwrap_or(slices));
    if !fits || !is_suffix(suffix) {
        return None;
    }
    Some(ProfileName {
        compute_slices,
        slices,
        memory_gb: number(memory)?,
        suffix: suffix.to_owned(),
    })
}

/// A number without sign and leading zero: one name, one text.
pub(crate) fn number<T: FromStr>(text: &str) -> Option<T> {
    let plain = text.bytes().all(|b| b.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    if plain { text.parse().ok() } else { None }
}

/// Nothing, or one sign and different attributes with commas between them.
fn is_suffix(text: &str) -> bool {
    let Some(attributes) = text.strip_prefix(['+', '-']) else {
        return text.is_empty();
    };
    let mut seen = std::collections::BTreeSet::new();
    attributes.split(',').all(|attribute| {
        attribute.starts_with(|c: char| c.is_ascii_lowercase())
            && attribute
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'.')
            && seen.insert(attribute)
    })
}

impl TryFrom<String> for ProfileName {
    type Error = ParseProfileNameError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ProfileName> for String {
    fn from(name: ProfileName) -> Self {
        name.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_nvidia_smi_prints() {
        type Row = (u32, u64, &'static str);
        // Total MiB of the GPU, then MiB and published name of each profile. Boards with a
        // simulation are checked row by row beside their tables; here are others, and the cases
        // where rounding decides.
        let boards: &[(u64, &[Row])] = &[
            (
                40536,
                &[
                    (1, 4864, "1g.5gb"),
                    (2, 9856, "2g.10gb"),
                    (3, 19968, "3g.20gb"),
                    (7, 40192, "7g.40gb"),
                ],
            ),
            (
                143_771,
                &[
                    (1, 16384, "1g.18gb"),
                    (1, 33024, "1g.35gb"),
                    (4, 71168, "4g.71gb"),
                    (7, 143_104, "7g.141gb"),
                ],
            ),
            (189_471, &[(1, 22528, "1g.23gb"), (2, 46592, "2g.47gb")]),
            (0, &[(3, 0, "3g.0gb")]),
            (65536, &[(1, 0, "1g.0gb")]),
        ];
        for (total, rows) in boards {
            for (slices, mib, name) in *rows {
                assert_eq!(
                    ProfileName::compute(*slices, *mib, total << 20, "").to_string(),
                    *name
                );
            }
        }
        assert_eq!(
            ProfileName::compute(1, 9984, 81559 << 20, "+me").to_string(),
            "1g.10gb+me"
        );
    }

    #[test]
    fn names_read_back_as_written_and_nothing_else_is_accepted() {
        for good in [
            "1g.5gb",
            "7g.141gb",
            "1c.2g.10gb",
            "1g.5gb+me",
            "2g.48gb+me.all",
            "1g.24gb-me",
            "1g.0gb",
            "1g.24gb+gfx,me",
        ] {
            assert_eq!(
                good.parse::<ProfileName>().map(|name| name.to_string()),
                Ok(good.to_owned())
            );
        }
        for bad in [
            "",
            "1g",
            "1g.5",
            "g.5gb",
            "01g.5gb",
            "1g.05gb",
            "3c.2g.10gb",
            "0c.2g.10gb",
            "1g.5gb+",
            "1g.5gb+Me",
            "1g.5gb+1",
            "1g.5gb+me,me",
            "1g.5gb+me-gfx",
            "1g.5gb me",
            "MIG 1g.5gb",
            "+1g.5gb",
            "0g.5gb",
            "1g.99999999999999999999gb",
        ] {
            assert_eq!(
                bad.parse::<ProfileName>(),
                Err(ParseProfileNameError(bad.to_owned()))
            );
        }
    }
}
