//! Amounts of memory as people write them: `100Mi`, `10Gi`, `1073741824`.

use std::fmt;
use std::str::FromStr;

use divvy_model::{Format, Quantity};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// An amount of memory in bytes. Written with a unit of 1024 (`Mi`) or of 1000 (`M`), without fractions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemorySize {
    /// In bytes.
    pub bytes: u64,
}

/// Not an amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no amount of memory (write a whole number with Ki, Mi, Gi or Ti, such as \"100Mi\")")]
pub struct MemoryError(String);

impl MemorySize {
    /// In MiB, rounded up.
    pub fn mib(self) -> u64 {
        self.bytes.div_ceil(1 << 20)
    }
}

impl FromStr for MemorySize {
    type Err = MemoryError;

    fn from_str(text: &str) -> Result<Self, MemoryError> {
        // A quantity without sign, fraction, exponent or one of the units below one.
        let plain = text.bytes().all(|b| b.is_ascii_digit() || b"KMGTPik".contains(&b));
        let amount = plain.then(|| text.parse::<Quantity>().ok()).flatten();
        let bytes = amount.and_then(|amount| amount.to_u64()).ok_or_else(|| MemoryError(text.to_owned()))?;
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
            "pattern": "^[0-9]{1,15}(Ki|Mi|Gi|Ti|k|M|G|T)?$",
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
                Ok(MemorySize { bytes })
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<MemorySize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Amount)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_with_their_unit_and_written_with_the_largest_that_fits() {
        for (text, bytes, written) in [
            ("0", 0, "0"),
            ("1023", 1023, "1023"),
            ("1024", 1024, "1Ki"),
            ("1536Mi", 1536 << 20, "1536Mi"),
            ("2048Mi", 2 << 30, "2Gi"),
            ("1G", 1_000_000_000, "1000000000"),
            ("1024Ti", 1 << 50, "1Pi"),
            ("1Pi", 1 << 50, "1Pi"),
        ] {
            let size: MemorySize = text.parse().unwrap();
            assert_eq!((size.bytes, size.to_string().as_str()), (bytes, written), "{text}");
        }
        for bad in
            ["", "Mi", "1.5Gi", "-1", "1e3", "1 Mi", "10mi", "99999999999999999999", "18446744073709551615Ki"]
        {
            assert!(bad.parse::<MemorySize>().is_err(), "{bad}");
        }
        assert_eq!("1".parse::<MemorySize>().unwrap().mib(), 1);
    }
}
