//! The format of stored values: `{"checksum": "<sha256>", "body": {"version": …, …}}`. The checksum
//! covers the bytes of `body` as they stand in the file, never a re-serialisation.
//!
//! **Compatibility.** The envelope and the head (`version`, and in records `uid`, `namespace`,
//! `name`, `gpus`) never change, so that an older divvy knows whose file it cannot read and which
//! GPUs to avoid. Every file is of version 1 until the first release; a version that we do not know
//! is [`Stored::Newer`]: the file is left untouched.

use divvy_model::GpuUuid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::ClaimRef;

/// The four answers a stored file gives, and only one of them means "nothing there".
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored<T> {
    Absent,
    /// A file that is not what was written.
    Corrupt {
        /// Error, in words.
        reason: String,
    },
    /// A file of a later version of divvy.
    Newer {
        version: u32,
        /// The part that every version has.
        head: Head,
    },
    Fine(T),
}

impl<T> Stored<T> {
    /// Returns the value, if it could be read.
    pub fn fine(&self) -> Option<&T> {
        match self {
            Self::Fine(value) => Some(value),
            Self::Absent | Self::Corrupt { .. } | Self::Newer { .. } => None,
        }
    }
}

/// The part of a record that every version has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    #[serde(flatten)]
    pub claim: Option<ClaimRef>,
    /// GPUs concerned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuUuid>,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    checksum: String,
    #[serde(borrow)]
    body: &'a RawValue,
}

#[derive(Serialize)]
struct Body<'a, T> {
    #[serde(flatten)]
    head: &'a Head,
    #[serde(flatten)]
    value: &'a T,
    version: u32,
}

#[derive(Deserialize)]
struct VersionedHead {
    version: u32,
    #[serde(flatten)]
    head: Head,
}

pub(crate) fn checksum(body: &str) -> String {
    let hex = |half: u8| char::from_digit(u32::from(half), 16).unwrap_or('0');
    Sha256::digest(body.as_bytes())
        .iter()
        .flat_map(|b| [hex(b >> 4), hex(b & 0xf)])
        .collect()
}

pub(crate) fn encode(version: u32, head: &Head, value: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_value(Body {
        head,
        value,
        version,
    });
    // Strings, numbers and lists of them: serialising has no way to fail; a reader would answer
    // `Corrupt`.
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    format!("{{\"checksum\":\"{}\",\"body\":{body}}}\n", checksum(&body)).into_bytes()
}

/// Reads a file of any version up to `newest`.
pub(crate) fn decode<T: DeserializeOwned>(newest: u32, bytes: &[u8]) -> Stored<T> {
    let corrupt = |reason: String| Stored::Corrupt { reason };
    if bytes.is_empty() {
        return corrupt("the file is empty".to_owned());
    }
    let envelope: Envelope<'_> = match serde_json::from_slice(bytes) {
        Ok(envelope) => envelope,
        Err(error) if error.is_eof() => {
            return corrupt(format!("the file ends early, after {} bytes", bytes.len()));
        }
        Err(error) => return corrupt(format!("the file is not valid JSON: {error}")),
    };
    let body = envelope.body.get();
    // Check the bytes before their meaning: valid JSON with a flipped bit could name another GPU.
    // `RawValue` keeps the bytes as they stand in the file.
    if envelope.checksum != checksum(body) {
        return corrupt("the checksum does not match the content".to_owned());
    }
    // The head is read before the body: a later version may have changed everything else.
    let head: VersionedHead = match serde_json::from_str(body) {
        Ok(head) => head,
        Err(error) => return corrupt(format!("the head cannot be read: {error}")),
    };
    // Zero was never written, so it is treated like a version that is not known.
    if !(1..=newest).contains(&head.version) {
        return Stored::Newer {
            version: head.version,
            head: head.head,
        };
    }
    serde_json::from_str(body).map_or_else(
        |error| corrupt(format!("version {} cannot be read: {error}", head.version)),
        Stored::Fine,
    )
}
