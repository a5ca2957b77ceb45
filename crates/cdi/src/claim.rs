//! The document of one claim: self-contained, so that a running pod's devices do not depend on any other file.

use crate::types::{ContainerEdits, Device, Spec};

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

/// Builds a claim's document device by device.
#[derive(Debug, Clone)]
pub struct ClaimSpec {
    driver: String,
    claim_uid: String,
    common: ContainerEdits,
    devices: Vec<Device>,
}

impl ClaimSpec {
    /// A document with what every container of the claim gets, and no devices yet.
    pub fn new(driver: &str, claim_uid: &str, common: ContainerEdits) -> Self {
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
        let mut devices = self.devices;
        devices.sort_by(|a, b| a.name.cmp(&b.name));
        let mut spec =
            Spec { kind: claim_kind(&self.driver), devices, container_edits: self.common, ..Spec::default() };
        spec.cdi_version = spec.minimum_version().to_string();
        spec
    }
}
