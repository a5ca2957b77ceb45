//! The flag `--offer` of the node plugin and of `divvy inventory`.

use crate::Modes;

/// The forms in which GPUs that can do MIG are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Offer {
    /// The form of their present MIG mode: whole if it is off, partitions if it is on.
    #[default]
    Auto,
    /// In every mode, where that is possible.
    Everything,
}

impl Offer {
    /// The modes that it stands for.
    pub fn modes(self) -> Modes {
        match self {
            Self::Auto => Modes::AsIs,
            Self::Everything => Modes::everything(),
        }
    }
}
