//! The document of one claim: self-contained, so that a running pod's devices do not depend on any other file.

use std::sync::Arc;

use crate::SpecError;
use crate::types::{ContainerEdits, Device, Spec};
use crate::validate::check_edits;
use crate::version::{CdiVersion, of_edits};

/// The class of all our documents.
const CLASS: &str = "claim";

/// The kind of a driver's claim documents: `<driver name>/claim`.
pub fn claim_kind(driver: &str) -> String {
    format!("{driver}/{CLASS}")
}

/// The name of a claim's file in the CDI folder. A function of driver and claim only, so that a file can be found, restored
/// and removed without any other state.
pub fn claim_file_name(driver: &str, claim_uid: &str) -> String {
    format!("{driver}-{CLASS}_{claim_uid}.json")
}

/// The name of one of a claim's devices. A share's id keeps apart two shares of the same device in one claim.
pub fn claim_device_name(claim_uid: &str, device: &str, share_id: Option<&str>) -> String {
    match share_id {
        Some(share) => format!("{claim_uid}-{device}-{share}"),
        None => format!("{claim_uid}-{device}"),
    }
}

/// What every container with any of a driver's devices gets. It is by far the largest part of each document and the same
/// in all of them: checked and turned into JSON once, then shared.
#[derive(Debug, Clone)]
pub struct CommonEdits(Arc<Common>);

#[derive(Debug)]
struct Common {
    edits: ContainerEdits,
    json: Vec<u8>,
    version: CdiVersion,
}

impl CommonEdits {
    pub fn new(edits: ContainerEdits) -> Result<Self, SpecError> {
        check_edits(Spec::COMMON, &edits)?;
        let json = serde_json::to_vec(&edits).map_err(SpecError::Json)?;
        let version = of_edits(&edits);
        Ok(Self(Arc::new(Common { edits, json, version })))
    }

    pub fn edits(&self) -> &ContainerEdits {
        &self.0.edits
    }
}

/// Builds a claim's document device by device.
#[derive(Debug, Clone)]
pub struct ClaimSpec {
    driver: String,
    claim_uid: String,
    common: CommonEdits,
    devices: Vec<Device>,
}

impl ClaimSpec {
    /// A document with what every container of the claim gets, and no devices yet.
    pub fn new(driver: &str, claim_uid: &str, common: CommonEdits) -> Self {
        Self { driver: driver.to_owned(), claim_uid: claim_uid.to_owned(), common, devices: Vec::new() }
    }

    /// Adds a device and returns the name by which the kubelet asks for it, such as
    /// `gpu.divvy.dev/claim=<claim UID>-gpu-0`.
    pub fn add(&mut self, device: &str, share_id: Option<&str>, edits: ContainerEdits) -> String {
        let name = claim_device_name(&self.claim_uid, device, share_id);
        let qualified = format!("{}={name}", claim_kind(&self.driver));
        self.devices.push(Device { name, container_edits: edits, ..Device::default() });
        qualified
    }

    /// The file's name in the CDI folder.
    pub fn file_name(&self) -> String {
        claim_file_name(&self.driver, &self.claim_uid)
    }

    /// The document, devices in the order of their names.
    pub fn into_spec(self) -> Spec {
        let common = self.common.clone();
        let mut spec = self.without_common();
        spec.container_edits = common.edits().clone();
        spec.cdi_version = spec.minimum_version().to_string();
        spec
    }

    /// The bytes of the claim's file: those of [`ClaimSpec::into_spec`], at a fraction of the work.
    pub fn into_json_bytes(self) -> Result<Vec<u8>, SpecError> {
        let common = self.common.0.clone();
        let mut spec = self.without_common();
        spec.validate()?;
        spec.cdi_version = spec.minimum_version().max(common.version).to_string();
        let mut bytes = serde_json::to_vec(&spec).map_err(SpecError::Json)?;
        // The common part is the last field, and left out where it is empty.
        if !common.edits.is_empty() && bytes.pop() == Some(b'}') {
            bytes.extend_from_slice(br#","containerEdits":"#);
            bytes.extend_from_slice(&common.json);
            bytes.push(b'}');
        }
        bytes.push(b'\n');
        Ok(bytes)
    }

    fn without_common(self) -> Spec {
        let mut devices = self.devices;
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        Spec { kind: claim_kind(&self.driver), devices, ..Spec::default() }
    }
}
