//! CDI documents as values: what a container runtime must add to a container that got our devices.
//!
//! The crate builds, checks, writes (as bytes) and reads back the JSON documents of the Container Device Interface. It does
//! no IO: the executor decides where a document goes and writes it atomically; the kubelet plugin answers the kubelet with
//! the names made here. [`ClaimSpec`] is the usual way in; [`Spec`] is the plain document.
//!
//! Two rules of the format shape the code. A runtime refuses a whole file for one bad field, and refuses a file whose
//! `cdiVersion` is newer than itself: so a document is validated before it is turned into bytes, and carries the lowest
//! version its content needs ([`Spec::minimum_version`]).

mod claim;
mod names;
mod types;
mod validate;
mod version;

pub use claim::{ClaimSpec, CommonEdits, claim_device_name, claim_file_name, claim_kind};
pub use names::{Kind, NameError, check_device_name};
pub use types::{ContainerEdits, Device, DeviceNode, Hook, HookName, IntelRdt, Mount, NetDevice, Spec};
pub use validate::SpecError;
pub use version::CdiVersion;

/// Reading a document failed.
#[derive(Debug, thiserror::Error)]
pub enum ParseError {
    /// The bytes are not a CDI document at all: cut off, empty, or something else.
    #[error("the CDI document cannot be read; remove the file, and it is rebuilt from the claim's record")]
    Json(#[source] serde_json::Error),
}

impl Spec {
    /// The document as the bytes of a `.json` file: checked, with the lowest fitting `cdiVersion`, and the same bytes for
    /// the same content.
    ///
    /// ```
    /// use divvy_cdi::{ClaimSpec, CommonEdits, ContainerEdits, Spec};
    /// let common = CommonEdits::new(ContainerEdits::env(["NVIDIA_VISIBLE_DEVICES=void"])).unwrap();
    /// let mut claim = ClaimSpec::new("gpu.divvy.dev", "0f3c", common);
    /// claim.add("gpu-0", None, ContainerEdits::env(["A=b"]));
    /// let bytes = claim.clone().into_json_bytes().unwrap();
    /// assert_eq!(bytes, claim.into_spec().to_json_bytes().unwrap());
    /// assert_eq!(Spec::from_json_bytes(&bytes).unwrap().devices[0].name, "0f3c-gpu-0");
    /// ```
    pub fn to_json_bytes(&self) -> Result<Vec<u8>, SpecError> {
        self.validate()?;
        let versioned = Spec { cdi_version: self.minimum_version().to_string(), ..self.clone() };
        let mut bytes = serde_json::to_vec(&versioned).map_err(SpecError::Json)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads a document back. Unknown fields are ignored and nothing is validated: this is for our own files, perhaps
    /// written by a newer divvy, and the caller compares the outcome with what it would write today.
    pub fn from_json_bytes(bytes: &[u8]) -> Result<Spec, ParseError> {
        serde_json::from_slice(bytes).map_err(ParseError::Json)
    }
}

#[cfg(test)]
mod tests;
