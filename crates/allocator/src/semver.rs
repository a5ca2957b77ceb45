//! Versions of devices and drivers: strict semantic versions, and the lenient reading that CEL's
//! `semver(text, true)` asks for.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Why a text is not a version.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SemverError {
    /// Not a strict `major.minor.patch[-pre][+build]`.
    #[error("{text:?} is not a semantic version")]
    Format {
        /// Text that was given.
        text: String,
        /// Objection of the parser.
        #[source]
        source: ParseError,
    },
    /// `1.2-rc1`: a short version must be plain numbers.
    #[error("{0:?}: a short version cannot contain a pre-release or build part")]
    ShortWithSuffix(String),
}

/// Objection of the version parser.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct ParseError(String);

/// A semantic version; order and equality are by precedence, so build metadata does not count.
#[derive(Debug, Clone)]
pub struct Semver(semver::Version);

impl Semver {
    /// Reads `v1`, `1.2` and `01.2.3` too: a leading `v` goes, missing parts are 0, leading zeros
    /// go.
    pub fn parse_lenient(text: &str) -> Result<Self, SemverError> {
        let bare = text.strip_prefix('v').unwrap_or(text);
        let mut parts: Vec<String> = bare.splitn(3, '.').map(str::to_owned).collect();
        if parts.len() < 3 {
            if parts.last().is_some_and(|p| p.contains(['+', '-'])) {
                return Err(SemverError::ShortWithSuffix(text.to_owned()));
            }
            parts.resize(3, "0".to_owned());
        }
        for part in &mut parts {
            if part.len() > 1 {
                let trimmed = part.trim_start_matches('0');
                let digit_first = trimmed.starts_with(|c: char| c.is_ascii_digit());
                *part = if digit_first {
                    trimmed.to_owned()
                } else {
                    format!("0{trimmed}")
                };
            }
        }
        parts.join(".").parse()
    }

    /// The first number.
    pub fn major(&self) -> u64 {
        self.0.major
    }

    /// The second number.
    pub fn minor(&self) -> u64 {
        self.0.minor
    }

    /// The third number.
    pub fn patch(&self) -> u64 {
        self.0.patch
    }
}

impl FromStr for Semver {
    type Err = SemverError;

    fn from_str(text: &str) -> Result<Self, SemverError> {
        semver::Version::parse(text)
            .map(Self)
            .map_err(|e| SemverError::Format {
                text: text.to_owned(),
                source: ParseError(e.to_string()),
            })
    }
}

impl fmt::Display for Semver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for Semver {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Semver {}

impl PartialOrd for Semver {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Semver {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.cmp_precedence(&other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v(text: &str) -> Semver {
        text.parse().unwrap()
    }

    #[test]
    fn precedence_follows_the_specification() {
        let ordered = [
            "1.0.0-alpha",
            "1.0.0-alpha.1",
            "1.0.0-alpha.beta",
            "1.0.0-beta",
            "1.0.0-beta.2",
            "1.0.0-beta.11",
            "1.0.0-rc.1",
            "1.0.0",
            "1.0.1",
            "1.1.0",
            "2.0.0",
            "550.54.15",
            "580.95.5",
            "580.100.0",
        ];
        for pair in ordered.windows(2) {
            assert!(v(pair[0]) < v(pair[1]), "{pair:?}");
        }
        assert_eq!(v("1.2.3+a"), v("1.2.3+b"));
    }

    #[test]
    fn a_strict_version_has_three_plain_numbers() {
        for text in [
            "",
            "1",
            "1.2",
            "v1.2.3",
            "1.02.3",
            "580.95.05",
            "1.2.3.4",
            "a.b.c",
            " 1.2.3",
        ] {
            assert!(text.parse::<Semver>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_lenient_version_may_be_short_prefixed_or_padded() {
        for (text, strict) in [
            ("v1", "1.0.0"),
            ("1.2", "1.2.0"),
            ("580.95.05", "580.95.5"),
            ("01.00.003", "1.0.3"),
            ("v1.2.3-rc.1+b", "1.2.3-rc.1+b"),
            ("1.2.0-rc", "1.2.0-rc"),
            ("0", "0.0.0"),
        ] {
            assert_eq!(
                Semver::parse_lenient(text).map(|v| v.to_string()),
                Ok(strict.to_owned()),
                "{text}"
            );
        }
        assert_eq!(
            Semver::parse_lenient("1.2-rc1"),
            Err(SemverError::ShortWithSuffix("1.2-rc1".to_owned()))
        );
        assert!(Semver::parse_lenient("vv1").is_err());
    }
}
