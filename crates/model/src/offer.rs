//! The offer of GPUs about which no policy decides.

use std::str::FromStr;

use crate::Form;

/// The offer of GPUs about which no policy decides: the plugin's flag `--offer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Offer {
    /// The form of their present MIG mode: whole if it is off, partitions if it is on.
    #[default]
    Auto,
    /// Each GPU whole, for one claim.
    Whole,
    /// MIG partitions.
    Partitions,
    /// Time-sliced shares.
    Shared,
    /// Every form at once, where that is possible.
    Everything,
}

impl Offer {
    /// All values, by name.
    const ALL: [(&str, Self); 5] = [
        ("auto", Self::Auto),
        ("whole", Self::Whole),
        ("partitions", Self::Partitions),
        ("shared", Self::Shared),
        ("everything", Self::Everything),
    ];

    /// Returns the names of all values.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::ALL.into_iter().map(|(name, _)| name)
    }

    /// Returns the forms that a GPU may take; `None`: the one of its present MIG mode.
    pub fn forms(self) -> Option<&'static [Form]> {
        match self {
            Self::Auto => None,
            Self::Whole => Some(&[Form::WHOLE]),
            Self::Partitions => Some(&[Form::PARTITIONS]),
            Self::Shared => Some(&[Form::TIME_SLICED]),
            Self::Everything => Some(&Form::OFFERED),
        }
    }
}

impl FromStr for Offer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, offer)| offer).ok_or_else(|| {
            let names: Vec<&str> = Self::names().collect();
            format!("{text:?} is none of {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Offer;

    #[test]
    fn every_name_is_read_as_its_value() {
        let read: Vec<Offer> = Offer::names().map(|name| name.parse().unwrap()).collect();
        assert_eq!(read.len(), 5);
        assert_eq!(read.first(), Some(&Offer::default()));
        let wrong = "all".parse::<Offer>().unwrap_err();
        assert_eq!(
            wrong,
            "\"all\" is none of auto, whole, partitions, shared, everything"
        );
    }
}
