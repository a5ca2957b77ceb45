//! The metadata of devices: what programs in a container can read about the devices of a request
//! (KEP-5304). A file for each request of a claim, worked out from the claim's record, so that the
//! same record always gives the same files.

use std::collections::BTreeMap;

use divvy_api::names::{Naming, attributes, metadata as only_here};
use divvy_model::{AttributeValue, ClaimUid, DeviceName};
use serde::{Deserialize, Serialize};

use crate::{Record, RecordedDevice, base_request, cdi_device_name};

/// Versions of the format, newest first; they have the same fields. A reader takes the first that
/// it knows.
const VERSIONS: [&str; 2] = ["v1beta1", "v1alpha1"];

/// Folder in which containers find the files.
const IN_CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// Attributes of a device by name, as divvy has it; the files have the published names.
pub type Attributes = BTreeMap<String, AttributeValue>;

/// Content of the files beyond the record's other fields, kept as it was when the claim was
/// prepared, or carried out again after a reboot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// The claim's name in its pod, if the claim was made from a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
    /// Attributes that are published of the devices.
    #[serde(default)]
    pub attributes: BTreeMap<DeviceName, Attributes>,
}

/// The file of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataFile {
    /// The request, without a subrequest.
    pub request: String,
    /// Name of the device, in the claim's CDI file, that brings it into containers: the request's
    /// first.
    pub cdi_device: String,
    /// Path at which containers find it.
    pub container_path: String,
    /// Content.
    pub bytes: Vec<u8>,
}

/// Returns a claim's files, one for each request; none for a record that was written without
/// metadata.
pub fn metadata_files(driver: &str, record: &Record) -> Vec<MetadataFile> {
    let Some(metadata) = &record.metadata else {
        return Vec::new();
    };
    let mut requests: Vec<(&str, Vec<&RecordedDevice>)> = Vec::new();
    for device in &record.devices {
        let base = base_request(&device.allocated.request);
        match requests.iter_mut().find(|(known, _)| *known == base) {
            Some((_, devices)) => devices.push(device),
            // It becomes a path: the API server has checked it, and one that it has not is not
            // trusted.
            None if is_label(base) => requests.push((base, vec![device])),
            None => {}
        }
    }
    // The path has the name by which the pod knows the claim: its entry in the pod's spec if a
    // template made it, else the claim's own.
    let file = |(request, devices): (&str, Vec<&RecordedDevice>)| {
        let first = &devices.first()?.allocated;
        let claim = match &metadata.pod_claim_name {
            Some(name) => format!("resourceclaimtemplates/{name}"),
            None => format!("resourceclaims/{}", record.name),
        };
        Some(MetadataFile {
            request: request.to_owned(),
            cdi_device: cdi_device_name(&record.uid, &first.device, first.share_id.as_deref()),
            container_path: format!("{IN_CONTAINER}/{claim}/{request}/{driver}-metadata.json"),
            bytes: content(driver, record, metadata, &devices),
        })
    };
    requests.into_iter().filter_map(file).collect()
}

/// A file's object: fields in alphabetical order, as they have been written since the first
/// version.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Object<'a> {
    api_version: String,
    kind: &'static str,
    metadata: ObjectMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<&'a str>,
    requests: [Request<'a>; 1],
}

#[derive(Serialize)]
struct ObjectMeta<'a> {
    generation: u32,
    name: &'a str,
    namespace: &'a str,
    uid: &'a ClaimUid,
}

#[derive(Serialize)]
struct Request<'a> {
    devices: &'a [Device<'a>],
    name: Option<&'a str>,
}

#[derive(Serialize)]
struct Device<'a> {
    attributes: Attributes,
    driver: &'a str,
    name: &'a DeviceName,
    pool: &'a str,
}

fn content(
    driver: &str,
    record: &Record,
    metadata: &Metadata,
    devices: &[&RecordedDevice],
) -> Vec<u8> {
    let described: Vec<Device<'_>> = devices
        .iter()
        .map(|device| Device {
            attributes: published(attributes_of(device, metadata), Naming::of(driver)),
            driver,
            name: &device.allocated.device,
            pool: &device.allocated.pool,
        })
        .collect();
    let name = devices
        .first()
        .map(|device| device.allocated.request.as_str());
    let mut bytes = Vec::new();
    // An object on each line, newest version first: a reader stops at the first that it knows.
    for version in VERSIONS {
        let object = Object {
            api_version: format!("metadata.resource.k8s.io/{version}"),
            kind: "DeviceMetadata",
            metadata: ObjectMeta {
                generation: 1,
                name: &record.name,
                namespace: &record.namespace,
                uid: &record.uid,
            },
            pod_claim_name: metadata.pod_claim_name.as_deref(),
            requests: [Request {
                devices: &described,
                name,
            }],
        };
        // Strings, numbers and lists of them: serialising has no way to fail.
        bytes.extend(serde_json::to_vec(&object).unwrap_or_default());
        bytes.push(b'\n');
    }
    bytes
}

/// Returns the attributes under the names under which they are published.
fn published(attributes: Attributes, naming: Naming) -> Attributes {
    attributes
        .into_iter()
        .map(|(name, value)| (naming.attribute(&name).into_owned(), value))
        .collect()
}

/// Returns the attributes that are published of the device, and those that are known only once a
/// claim has it.
fn attributes_of(device: &RecordedDevice, metadata: &Metadata) -> Attributes {
    let mut all = metadata
        .attributes
        .get(&device.allocated.device)
        .cloned()
        .unwrap_or_default();
    let mut put =
        |name: &str, value: String| all.insert(name.to_owned(), AttributeValue::String(value));
    if let Some(made) = &device.given {
        // The UUID of a MIG device exists only once it is made, so the published device could not
        // have it.
        put(attributes::UUID, made.uuid.to_string());
    }
    if device.sharing.is_shared() {
        let granted = device.amounts();
        for (name, amount) in [
            (only_here::MEMORY_GRANTED, granted.memory),
            (only_here::MEMORY_LIMIT, granted.limit),
            (only_here::CORES_GRANTED, granted.cores),
        ] {
            if let Some(amount) = amount {
                put(name, amount.to_string());
            }
        }
    }
    all
}

/// Returns true if this is a DNS label, as names of requests and of claims in pods are.
pub fn is_label(text: &str) -> bool {
    let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(is_inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

#[cfg(test)]
mod tests;
