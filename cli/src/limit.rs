//! Limits of a claim's devices, as its node works them out from the claim's allocation.

use divvy_api::DeviceConfig;
use divvy_api::MpsLimits;
use divvy_api::names::attributes;
use divvy_claims::{ConfigEntry, ConfigSource, resolve_entry};
use divvy_model::Enforcement;
use k8s_openapi::api::resource::v1::{
    AllocationResult, Device, DeviceAllocationConfiguration, DeviceRequestAllocationResult,
};

use divvy_why::device::{kind, memory, share_memory, text};

/// Returns the bytes that the driver caps a share's memory to; `None` where it caps none, as the
/// device is published now, or where that is not known.
pub fn of_share(
    allocation: &AllocationResult,
    result: &DeviceRequestAllocationResult,
    device: Option<&Device>,
) -> Option<u64> {
    let level = text(device?, attributes::MEMORY_ENFORCEMENT);
    if level != Some(Enforcement::Cgroup.attribute()) {
        return None;
    }
    let request = share_memory(device, result.consumed_capacity.as_ref()?)?;
    let limit = config(allocation, result)?.memory_limit;
    let limit = limit.zip(memory(device?));
    Some(limit.map_or(request, |(bound, all)| bound.bytes(all >> 20)))
}

/// Returns the limits of the MPS server that a claim has on a whole GPU; `None` where it has none.
pub fn of_mps_server(
    allocation: &AllocationResult,
    result: &DeviceRequestAllocationResult,
) -> Option<MpsLimits> {
    let admin = result.admin_access == Some(true);
    let config = (!admin).then(|| config(allocation, result))??;
    config.mps_server
}

/// Returns it in words.
pub fn mps_in_words(limits: MpsLimits) -> String {
    let cores = limits.cores.map(|cores| format!("cores {cores}"));
    let memory = limits.memory;
    let memory = memory.map(|memory| format!("memory {}", crate::format::bytes(memory)));
    let words: Vec<String> = cores.into_iter().chain(memory).collect();
    if words.is_empty() {
        "by MPS".to_owned()
    } else {
        format!("by MPS (each program: {})", words.join(", "))
    }
}

/// Returns the config of a device. A claim whose config cannot be read is not served, which is
/// shown elsewhere.
fn config(
    allocation: &AllocationResult,
    result: &DeviceRequestAllocationResult,
) -> Option<DeviceConfig> {
    let entries = allocation
        .devices
        .iter()
        .flat_map(|devices| &devices.config);
    let entries: Vec<ConfigEntry> = entries.flatten().filter_map(entry).collect();
    let kind = kind(&result.device)?;
    resolve_entry(&entries, &result.driver, &result.request, &kind).ok()
}

fn entry(of: &DeviceAllocationConfiguration) -> Option<ConfigEntry> {
    let opaque = of.opaque.as_ref()?;
    let source = match of.source.as_str() {
        "FromClass" => ConfigSource::Class,
        _ => ConfigSource::Claim,
    };
    Some(ConfigEntry {
        source,
        requests: of.requests.clone().unwrap_or_default(),
        driver: opaque.driver.clone(),
        parameters: opaque.parameters.0.clone(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const GIB: u64 = 1 << 30;

    /// The limit of a share with this request, config entries (source, limit) and enforcement.
    fn limit(request: (&str, &str), entries: &[(&str, &str)], level: &str) -> Option<u64> {
        let config = |(source, limit): &(&str, &str)| {
            let limits = json!({ "memory": limit });
            let parameters = json!({ "apiVersion": "divvy.dev/v1beta1", "kind": "ShareConfig", "limits": limits });
            json!({ "source": source, "requests": [], "opaque": { "driver": "gpu.divvy.dev", "parameters": parameters } })
        };
        let config: Vec<_> = entries.iter().map(config).collect();
        let result = json!({
            "request": "gpu", "driver": "gpu.divvy.dev", "pool": "n", "device": "gpu-0-ts",
            "consumedCapacity": { request.0: request.1 },
        });
        let allocation = json!({ "devices": { "results": [result], "config": config } });
        let allocation: AllocationResult = serde_json::from_value(allocation).unwrap();
        let memory = json!({ "memory": { "value": "80Gi" } });
        let attributes =
            json!({ "memoryEnforcement": { "string": level }, "memoryMiB": { "int": 80 << 10 } });
        let device = json!({ "name": "gpu-0-ts", "attributes": attributes, "capacity": if request.0 == "memory" { memory } else { json!({}) } });
        let device: Device = serde_json::from_value(device).unwrap();
        let results = allocation.devices.as_ref().unwrap().results.as_ref();
        of_share(&allocation, &results.unwrap()[0], Some(&device))
    }

    #[test]
    fn a_whole_gpu_with_an_mps_server_is_named_with_its_limits() {
        let words = |device: &str, mps: serde_json::Value| {
            let parameters =
                json!({ "apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "mps": mps });
            let entry = json!({ "source": "FromClaim", "requests": [], "opaque": { "driver": "gpu.divvy.dev", "parameters": parameters } });
            let result = json!({ "request": "gpu", "driver": "gpu.divvy.dev", "pool": "n", "device": device });
            let allocation = json!({ "devices": { "results": [result], "config": [entry] } });
            let allocation: AllocationResult = serde_json::from_value(allocation).unwrap();
            let results = allocation.devices.as_ref().unwrap().results.as_ref();
            of_mps_server(&allocation, &results.unwrap()[0]).map(mps_in_words)
        };
        let limits = json!({ "limits": { "cores": 50, "memory": "10Gi" } });
        assert_eq!(
            words("gpu-0", limits.clone()).as_deref(),
            Some("by MPS (each program: cores 50, memory 10 GiB)")
        );
        assert_eq!(words("gpu-0", json!({})).as_deref(), Some("by MPS"));
        assert_eq!(words("gpu-0-ts", limits), None);
        assert_eq!(words("gpu-0", json!({ "limits": 7 })), None);
    }

    #[test]
    fn the_limit_of_a_share_is_what_its_node_works_out() {
        let (class, claim) = ("FromClass", "FromClaim");
        for (request, entries, level, expected) in [
            (("memory", "10Gi"), &[][..], "cgroup", Some(10 * GIB)),
            (("memory", "10Gi"), &[], "none", None),
            (
                ("memory", "10Gi"),
                &[(claim, "16Gi")],
                "cgroup",
                Some(16 * GIB),
            ),
            (("memory", "10Gi"), &[(claim, "16Gi")], "none", None),
            (
                ("memory", "10Gi"),
                &[(claim, "25%")],
                "cgroup",
                Some(20 * GIB),
            ),
            (
                ("percent", "50"),
                &[(claim, "75%")],
                "cgroup",
                Some(60 * GIB),
            ),
            (("percent", "50"), &[], "cgroup", Some(40 * GIB)),
            // That of the claim wins over that of its class.
            (
                ("memory", "10Gi"),
                &[(claim, "16Gi"), (class, "12Gi")],
                "cgroup",
                Some(16 * GIB),
            ),
            (("memory", "10Gi"), &[(claim, "16")], "cgroup", None),
        ] {
            assert_eq!(
                limit(request, entries, level),
                expected,
                "{request:?} {entries:?} {level}"
            );
        }
    }
}
