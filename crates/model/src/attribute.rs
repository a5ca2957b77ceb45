//! Attributes of devices, as the Kubernetes API has them.

use serde::{Deserialize, Serialize};

/// The value of an attribute. Lists are not used: they are alpha.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttributeValue {
    /// Yes or no.
    Bool(bool),
    /// A whole number.
    Int(i64),
    String(String),
    /// A semantic version.
    Version(String),
}
