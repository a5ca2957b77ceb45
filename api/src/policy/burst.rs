//! `shares.burst`: how far the limits of shares may be above their requests.

use std::fmt;

use divvy_model::{Burst, BurstError};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error, Visitor};
use serde::{Deserialize, Serialize, Serializer};

/// Limits of shares above their requests. Requests alone are counted by the scheduler: while
/// several pods use more than they requested, one of them can run out of memory within its limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct BurstSettings {
    /// The largest limits.memory of a share, as a factor of the memory that it requests, from 1x to
    /// 99.99x: with 1.5x, a share of 10Gi may have a limit of 15Gi. It applies where the node caps
    /// the memory of shares. The default is 1x: no limit is above the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Factor>,
}

/// A factor, written with an x.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Factor {
    /// Its value.
    pub burst: Burst,
}

impl fmt::Display for Factor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.burst.fmt(f)
    }
}

impl JsonSchema for Factor {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Factor".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": Burst::PATTERN })
    }
}

impl Serialize for Factor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Factor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Factor;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a factor, such as \"1.5x\"")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Factor, E> {
                let burst = text.parse().map_err(|error: BurstError| E::custom(error))?;
                Ok(Factor { burst })
            }
        }
        deserializer.deserialize_any(Text)
    }
}
