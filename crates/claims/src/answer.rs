//! Answers to the kubelet, and the names that CDI files and devices have.

use divvy_model::{ClaimUid, DeviceName};

use crate::{Record, base_request};

/// The kubelet's answer for one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreparedDevice {
    /// Base names of the requests it serves.
    pub requests: Vec<String>,
    pub pool: String,
    pub device: DeviceName,
    /// Fully qualified CDI names.
    pub cdi_ids: Vec<String>,
    /// Share, if the device is allocated in shares.
    pub share_id: Option<String>,
}

/// The answer to a prepare.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prepared {
    /// Entries, one for each allocated device of ours, in the API's order.
    pub devices: Vec<PreparedDevice>,
}

/// Returns the CDI kind of all claims: `<driver>/claim`.
pub fn cdi_kind(driver: &str) -> String {
    format!("{driver}/claim")
}

/// Returns the name of a claim's CDI file: `<driver>-claim_<uid>.json`.
pub fn cdi_file_name(driver: &str, claim: &ClaimUid) -> String {
    format!("{driver}-claim_{claim}.json")
}

/// Returns the claim that a CDI file is for, or `None` if the name is not one that this driver
/// gives.
pub fn claim_of_cdi_file(driver: &str, file: &str) -> Option<ClaimUid> {
    file.strip_prefix(driver)?
        .strip_prefix("-claim_")?
        .strip_suffix(".json")?
        .parse()
        .ok()
}

/// Returns the name of a device within a claim's CDI file: `<uid>-<device>`, and the share where
/// there is one.
pub fn cdi_device_name(claim: &ClaimUid, device: &DeviceName, share_id: Option<&str>) -> String {
    match share_id {
        Some(share) => format!("{claim}-{device}-{share}"),
        None => format!("{claim}-{device}"),
    }
}

impl Prepared {
    /// Returns the answer for a record: always the same for the same record.
    pub fn of(driver: &str, record: &Record) -> Self {
        let kind = cdi_kind(driver);
        // From the record alone, so that a repeated prepare gets the same answer whatever has
        // changed since.
        let devices = record.devices.iter().map(|d| {
            let a = &d.allocated;
            PreparedDevice {
                // The kubelet and containers know the request by the name in the pod's spec, which
                // has no subrequest.
                requests: vec![base_request(&a.request).to_owned()],
                pool: a.pool.clone(),
                device: a.device.clone(),
                cdi_ids: vec![format!(
                    "{kind}={}",
                    cdi_device_name(&record.uid, &a.device, a.share_id.as_deref())
                )],
                share_id: a.share_id.clone(),
            }
        });
        Self {
            devices: devices.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Container runtimes read files that end so. Files of another driver, also with a longer name,
    /// are not this driver's to remove.
    #[test]
    fn a_cdi_file_has_its_claim_in_its_name() {
        let claim: ClaimUid = "0f0e0d0c-1111".parse().unwrap();
        let file = cdi_file_name("gpu.divvy.dev", &claim);
        assert_eq!(file, "gpu.divvy.dev-claim_0f0e0d0c-1111.json");
        assert_eq!(claim_of_cdi_file("gpu.divvy.dev", &file), Some(claim));
        for other in [
            "gpu.divvy.dev-2-claim_0f0e0d0c-1111.json",
            "gpu.divvy.dev-claim_0f0e0d0c-1111.json.tmp",
            "gpu.divvy.dev-claim_.json",
            "gpu.divvy.dev.json",
            "nvidia.yaml",
        ] {
            assert_eq!(claim_of_cdi_file("gpu.divvy.dev", other), None, "{other}");
        }
    }
}
