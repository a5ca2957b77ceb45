//! CDI documents as values: the changes that a container runtime makes to a container that got
//! devices of divvy.
//!
//! The crate builds, checks and writes (as bytes) the JSON documents of the Container Device
//! Interface, as far as divvy uses the format. It does no IO: the executor decides where a document
//! goes and writes it atomically.
//!
//! Two rules of the format shape the code. A runtime refuses a whole file for one bad field, and
//! refuses a file whose `cdiVersion` is newer than itself: so a document is validated before it is
//! turned into bytes, and carries the lowest version its content needs.

mod types;
mod validate;

pub use types::{ContainerEdits, Device, DeviceNode, Hook, Mount, Spec, Stage};
pub use validate::SpecError;

/// Edits of every container with any of a driver's devices. They are by far the largest part of
/// each document and the same in all of them: checked and turned into JSON once, then shared.
#[derive(Debug)]
pub struct CommonEdits {
    edits: ContainerEdits,
    json: Vec<u8>,
}

impl CommonEdits {
    /// Checks edits and turns them into JSON.
    pub fn new(edits: ContainerEdits) -> Result<Self, SpecError> {
        edits.check("containerEdits")?;
        let json = serde_json::to_vec(&edits).map_err(SpecError::Json)?;
        Ok(Self { edits, json })
    }

    /// Returns the edits.
    pub fn edits(&self) -> &ContainerEdits {
        &self.edits
    }
}

impl Spec {
    /// Turns the document into the bytes of a `.json` file, with the common edits in the place of
    /// its own: checked, with the lowest fitting `cdiVersion`, and the same bytes for the same
    /// content.
    ///
    /// ```
    /// use divvy_cdi::{CommonEdits, ContainerEdits, Device, Spec};
    /// let common = CommonEdits::new(ContainerEdits::env(["NVIDIA_VISIBLE_DEVICES=void"])).unwrap();
    /// let device = Device { name: "0f3c-gpu-0".to_owned(), container_edits: ContainerEdits::env(["A=b"]) };
    /// let spec = Spec { kind: "gpu.divvy.dev/claim".to_owned(), devices: vec![device], ..Spec::default() };
    /// let bytes = spec.clone().into_json_bytes(&common).unwrap();
    /// assert!(bytes.starts_with(br#"{"cdiVersion":"0.5.0","kind":"gpu.divvy.dev/claim","devices":["#));
    /// let whole = Spec { cdi_version: "0.5.0".to_owned(), container_edits: common.edits().clone(), ..spec };
    /// assert_eq!(serde_json::from_slice::<Spec>(&bytes).unwrap(), whole);
    /// ```
    pub fn into_json_bytes(mut self, common: &CommonEdits) -> Result<Vec<u8>, SpecError> {
        self.validate()?;
        // The common edits count for the version too, although they are spliced in as bytes below.
        self.minimum_version(&common.edits)
            .clone_into(&mut self.cdi_version);
        self.container_edits = ContainerEdits::default();
        let mut bytes = serde_json::to_vec(&self).map_err(SpecError::Json)?;
        // The common part is the last field, and left out where it is empty.
        if !common.edits.is_empty() && bytes.pop() == Some(b'}') {
            bytes.extend_from_slice(br#","containerEdits":"#);
            bytes.extend_from_slice(&common.json);
            bytes.push(b'}');
        }
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Returns the lowest version whose readers accept this document. Older runtimes refuse newer
    /// versions, so nothing higher than needed is ever written.
    fn minimum_version(&self, common: &ContainerEdits) -> &'static str {
        let mut edits = self
            .devices
            .iter()
            .map(|device| &device.container_edits)
            .chain([common]);
        if edits.any(|edits| !edits.additional_gids.is_empty()) {
            // `additionalGids` came with 0.7.0.
            "0.7.0"
        } else if self
            .devices
            .iter()
            .any(|device| device.name.starts_with(|c: char| c.is_ascii_digit()))
        {
            // Names of devices may begin with a digit since 0.5.0, and claim UIDs often do.
            "0.5.0"
        } else {
            "0.3.0"
        }
    }
}

#[cfg(test)]
mod tests;
