//! Amounts of memory as people write them: `100Mi`, `10Gi`, `1073741824`; and parts of it: `10%`.

use std::fmt;
use std::str::FromStr;

use divvy_model::{Format, Quantity};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// An amount of memory in bytes. Written with a unit of 1024 (`Mi`) or of 1000 (`M`), without
/// fractions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemorySize {
    /// In bytes.
    pub bytes: u64,
}

/// Not an amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// It cannot be read.
    #[error(
        "{0:?} is no amount of memory (write a whole number with Ki, Mi, Gi or Ti, such as \"100Mi\")"
    )]
    Unreadable(String),
    /// A number of bytes that is no part of a GPU's memory worth the name: a unit was forgotten.
    #[error("{0} without a unit is {0} bytes, less than 1Mi (did you mean \"{0}Mi\"?)")]
    Crumb(u64),
}

/// The least number of bytes that may be written without a unit, besides 0.
const LEAST_PLAIN: u64 = 1 << 20;

impl MemorySize {
    /// Takes a number without a unit.
    fn plain(bytes: u64) -> Result<Self, MemoryError> {
        match bytes {
            1..LEAST_PLAIN => Err(MemoryError::Crumb(bytes)),
            bytes => Ok(Self { bytes }),
        }
    }

    /// In MiB, rounded up.
    pub fn mib(self) -> u64 {
        self.bytes.div_ceil(1 << 20)
    }
}

impl FromStr for MemorySize {
    type Err = MemoryError;

    fn from_str(text: &str) -> Result<Self, MemoryError> {
        // A quantity without sign, fraction, exponent or one of the units below one.
        let plain = text
            .bytes()
            .all(|b| b.is_ascii_digit() || b"KMGTPik".contains(&b));
        let amount = plain.then(|| text.parse::<Quantity>().ok()).flatten();
        let bytes = amount
            .and_then(|amount| amount.to_u64())
            .ok_or_else(|| MemoryError::Unreadable(text.to_owned()))?;
        if text.bytes().all(|b| b.is_ascii_digit()) {
            return Self::plain(bytes);
        }
        Ok(Self { bytes })
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Quantity::from_units(self.bytes, Format::BinarySi).fmt(f)
    }
}

impl JsonSchema for MemorySize {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "MemorySize".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "pattern": "^(0|[0-9]{7,15}|[0-9]{1,15}(Ki|Mi|Gi|Ti|k|M|G|T))$",
        })
    }
}

impl Serialize for MemorySize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemorySize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Amount;
        impl Visitor<'_> for Amount {
            type Value = MemorySize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an amount of memory, such as \"100Mi\"")
            }
            fn visit_u64<E: Error>(self, bytes: u64) -> Result<MemorySize, E> {
                MemorySize::plain(bytes).map_err(E::custom)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<MemorySize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Amount)
    }
}

/// A part of a GPU's memory: an amount, or a percentage of all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemoryPart {
    /// The same on every GPU.
    Amount(MemorySize),
    /// 0 to 99: with 100 nothing would be left.
    Percent(u8),
}

/// Neither an amount of memory nor a percentage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryPartError {
    /// It cannot be read.
    #[error(
        "{0:?} is no part of a GPU's memory (write a whole number with Ki, Mi, Gi or Ti, such as \"2Gi\", or 0 to 99 percent, such as \"10%\")"
    )]
    Unreadable(String),
    /// An amount without its unit.
    #[error(transparent)]
    Crumb(MemoryError),
}

impl MemoryPart {
    /// Returns the part in MiB, rounded up; a percentage is of a GPU with `bytes` of memory, and
    /// nothing where that is not known.
    pub fn mib_of(self, bytes: Option<u64>) -> u64 {
        match self {
            Self::Amount(size) => size.mib(),
            // In 128 bits: no size overflows.
            Self::Percent(percent) => bytes.map_or(0, |bytes| {
                let part = (u128::from(bytes) * u128::from(percent)).div_ceil(100 << 20);
                u64::try_from(part).unwrap_or(u64::MAX)
            }),
        }
    }
}

impl FromStr for MemoryPart {
    type Err = MemoryPartError;

    fn from_str(text: &str) -> Result<Self, MemoryPartError> {
        let wrong = || MemoryPartError::Unreadable(text.to_owned());
        let Some(number) = text.strip_suffix('%') else {
            return match text.parse() {
                Ok(size) => Ok(Self::Amount(size)),
                Err(MemoryError::Unreadable(_)) => Err(wrong()),
                Err(crumb) => Err(MemoryPartError::Crumb(crumb)),
            };
        };
        // Digits alone, as in the schema: no sign.
        let digits = matches!(number.len(), 1 | 2) && number.bytes().all(|b| b.is_ascii_digit());
        let percent = digits.then(|| number.parse().ok()).flatten();
        percent.map(Self::Percent).ok_or_else(wrong)
    }
}

impl fmt::Display for MemoryPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(size) => size.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl JsonSchema for MemoryPart {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "MemoryPart".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "x-kubernetes-int-or-string": true,
            "pattern": "^(0|[0-9]{7,15}|[0-9]{1,15}(Ki|Mi|Gi|Ti|k|M|G|T)|[0-9]{1,2}%)$",
        })
    }
}

impl Serialize for MemoryPart {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MemoryPart {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Part;
        impl Visitor<'_> for Part {
            type Value = MemoryPart;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a part of a GPU's memory, such as \"2Gi\" or \"10%\"")
            }
            fn visit_u64<E: Error>(self, bytes: u64) -> Result<MemoryPart, E> {
                MemorySize::plain(bytes)
                    .map(MemoryPart::Amount)
                    .map_err(E::custom)
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<MemoryPart, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_the_memory_is_an_amount_or_a_percentage() {
        const CARD: u64 = 81_559 << 20;
        for (text, mib, written) in [
            ("2Gi", 2048, "2Gi"),
            ("0", 0, "0"),
            ("0%", 0, "0%"),
            ("10%", 8156, "10%"),
            ("07%", 5710, "7%"),
            ("99%", 80_744, "99%"),
        ] {
            let part: MemoryPart = text.parse().unwrap();
            let found = (part.mib_of(Some(CARD)), part.to_string());
            assert_eq!(found, (mib, written.to_owned()), "{text}");
        }
        let tenth = MemoryPart::Percent(10);
        assert_eq!(tenth.mib_of(None), 0, "of a board without memory");
        assert_eq!(tenth.mib_of(Some(u64::MAX)), (u64::MAX >> 20) / 10 + 1);
        for bad in [
            "",
            "%",
            "100%",
            "-1%",
            "+1%",
            "1.5%",
            "10 %",
            "10percent",
            "1.5Gi",
        ] {
            let error = bad.parse::<MemoryPart>().unwrap_err().to_string();
            assert!(error.contains("such as \"10%\""), "{bad}: {error}");
        }
    }

    #[test]
    fn amounts_are_read_with_a_unit_and_written_with_the_largest_that_fits() {
        for (text, bytes, written) in [
            ("0", 0, "0"),
            ("1Ki", 1024, "1Ki"),
            ("1048576", 1 << 20, "1Mi"),
            ("1073741825", (1 << 30) + 1, "1073741825"),
            ("1536Mi", 1536 << 20, "1536Mi"),
            ("2048Mi", 2 << 30, "2Gi"),
            ("1G", 1_000_000_000, "1000000000"),
            ("1024Ti", 1 << 50, "1Pi"),
            ("1Pi", 1 << 50, "1Pi"),
        ] {
            let size: MemorySize = text.parse().unwrap();
            assert_eq!(
                (size.bytes, size.to_string().as_str()),
                (bytes, written),
                "{text}"
            );
        }
        for bad in [
            "",
            "Mi",
            "1.5Gi",
            "-1",
            "1e3",
            "1 Mi",
            "10mi",
            "99999999999999999999",
            "18446744073709551615Ki",
        ] {
            assert!(bad.parse::<MemorySize>().is_err(), "{bad}");
        }
        assert_eq!("1Ki".parse::<MemorySize>().unwrap().mib(), 1);
    }

    /// `minMemory: 4096` is meant in MiB, and would be a share of 1 MiB.
    #[test]
    fn a_number_without_a_unit_that_is_below_a_mebibyte_is_refused() {
        let words = "4096 without a unit is 4096 bytes, less than 1Mi (did you mean \"4096Mi\"?)"
            .to_owned();
        for written in ["4096", "\"4096\""] {
            let size = serde_json::from_str::<MemorySize>(written).unwrap_err();
            let part = serde_json::from_str::<MemoryPart>(written).unwrap_err();
            for error in [size.to_string(), part.to_string()] {
                assert!(error.starts_with(&words), "{written}: {error}");
            }
        }
        for (bytes, is_fine) in [(0, true), (1, false), (1_048_575, false), (1_048_576, true)] {
            let text = bytes.to_string();
            assert_eq!(text.parse::<MemorySize>().is_ok(), is_fine, "{text}");
            assert_eq!(text.parse::<MemoryPart>().is_ok(), is_fine, "{text}");
            assert_eq!(
                serde_json::from_str::<MemorySize>(&text).is_ok(),
                is_fine,
                "{text}"
            );
        }
    }
}
