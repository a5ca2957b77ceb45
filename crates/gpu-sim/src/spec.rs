//! The GPUs to simulate, as a text a person writes: `h100x2`, `a100-40x4,l4x2`.

use std::fmt;
use std::str::FromStr;

use divvy_boards::{Profile, profile, profiles};

/// The most GPUs on a simulated node: more than any real server has.
pub const MAX_GPUS: usize = 16;

/// The GPUs of a node: models with how many of each.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SimSpec {
    groups: Vec<(&'static Profile, usize)>,
    node_number: u16,
}

/// A text that does not say which GPUs to simulate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SpecError {
    /// The model is not one of ours.
    #[error(
        "unknown simulated GPU model {model:?}; known models: {}; write MODELxCOUNT, such as h100x2 or a100-40x4,l4x2",
        known()
    )]
    UnknownModel {
        /// The text as written.
        model: String,
    },
    /// A part is empty, or its count is not a number of GPUs.
    #[error(
        "simulated GPUs {part:?} are not MODELxCOUNT with a count from 1 to {MAX_GPUS}, such as h100x2 or a100-40x4,l4x2 (or none)"
    )]
    BadCount {
        /// The part as written.
        part: String,
    },
    /// Too many in all.
    #[error("{count} simulated GPUs are too many for one node: at most {MAX_GPUS}")]
    TooMany {
        /// The number that was asked for.
        count: usize,
    },
}

fn known() -> String {
    profiles()
        .iter()
        .map(|p| p.key)
        .collect::<Vec<_>>()
        .join(", ")
}

impl SimSpec {
    /// Models with their counts, in the order given.
    pub fn groups(&self) -> impl Iterator<Item = (&'static Profile, usize)> {
        self.groups.iter().copied()
    }

    /// Counts the GPUs of all models.
    pub fn gpus(&self) -> usize {
        self.groups.iter().map(|(_, count)| count).sum()
    }

    /// The same GPUs with other UUIDs, for a cluster of simulated nodes. The default number is 0.
    #[must_use]
    pub fn on_node(self, node_number: u16) -> Self {
        Self {
            node_number,
            ..self
        }
    }

    pub(crate) fn node_number(&self) -> u16 {
        self.node_number
    }
}

impl FromStr for SimSpec {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        if text.trim() == "none" {
            return Ok(Self::default());
        }
        let mut groups = Vec::new();
        for part in text.split(',').map(str::trim) {
            groups.push(parse_group(part)?);
        }
        let spec = Self {
            groups,
            node_number: 0,
        };
        match spec.gpus() {
            count if count > MAX_GPUS => Err(SpecError::TooMany { count }),
            _ => Ok(spec),
        }
    }
}

fn parse_group(part: &str) -> Result<(&'static Profile, usize), SpecError> {
    let bad_count = || SpecError::BadCount {
        part: part.to_owned(),
    };
    if let Some(one) = profile(part) {
        return Ok((one, 1));
    }
    if part.is_empty() {
        return Err(bad_count());
    }
    let unknown = |model: &str| SpecError::UnknownModel {
        model: model.to_owned(),
    };
    let (model, count) = part.rsplit_once('x').ok_or_else(|| unknown(part))?;
    let profile = profile(model).ok_or_else(|| unknown(model))?;
    let count: usize = count.parse().map_err(|_| bad_count())?;
    if count == 0 {
        Err(bad_count())
    } else {
        Ok((profile, count))
    }
}

impl fmt::Display for SimSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.groups.is_empty() {
            return f.write_str("none");
        }
        for (i, (profile, count)) in self.groups.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{}x{count}", profile.key)?;
        }
        Ok(())
    }
}
