//! From the kubelet's question and the API's object to a [`Claim`]: UID checked, only our driver's
//! results kept.

use std::collections::BTreeMap;
use std::fmt;

use divvy_api::names::Naming;
use divvy_claims::{
    AllocatedDevice, Allocation, Claim, ClaimRef, ConfigEntry, ConfigSource, PodRef, Times,
    base_request, is_label,
};
use divvy_model::{ClaimUid, DeviceName, IdError};
use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceAllocationResult, DeviceClaimConfiguration, DeviceRequest,
    DeviceRequestAllocationResult, ResourceClaim, ResourceClaimConsumerReference,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Where Kubernetes notes the claim's name in its pod, on claims that it makes from templates.
const POD_CLAIM_NAME: &str = "resource.kubernetes.io/pod-claim-name";

/// A claim as the kubelet names it; nothing about it is checked yet.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Asked {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl Asked {
    pub(crate) fn new(namespace: String, name: String, uid: String) -> Self {
        Self {
            namespace,
            name,
            uid,
        }
    }

    /// The same with a UID that can be relied on (it becomes a file name).
    pub(crate) fn check(&self) -> Result<ClaimRef, ClaimError> {
        let bad = |error: IdError| {
            let error = crate::chain(&error);
            ClaimError::new(
                "bad-uid",
                format!("the kubelet sent claim {self} with an invalid UID: {error}"),
            )
        };
        let uid = self.uid.parse().map_err(bad)?;
        Ok(ClaimRef {
            uid,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        })
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Why a claim is not prepared: found before the executor begins.
#[derive(Debug)]
pub(crate) struct ClaimError {
    /// A short stable name, for metrics.
    pub(crate) category: &'static str,
    /// The whole text, with its causes.
    pub(crate) message: String,
}

impl ClaimError {
    pub(crate) fn new(category: &'static str, message: String) -> Self {
        Self { category, message }
    }
}

/// The claim that was asked for, from the object found under its name.
pub(crate) fn from_api(
    asked: &ClaimRef,
    object: ResourceClaim,
    driver: &str,
) -> Result<Claim, ClaimError> {
    // The UID before anything else: the kubelet asks for a claim that it knows, and the name may be
    // another claim's by now.
    let found = object.metadata.uid.unwrap_or_default();
    if found != asked.uid.as_str() {
        let message = format!(
            "claim {asked} does not match the claim in the API, which has UID {found}: the claim was deleted and created again under the same name (delete the pod so that it gets the new claim)"
        );
        return Err(ClaimError::new("other-uid", message));
    }
    // Anyone who may write the claim may write this, and it becomes part of a path.
    let pod_claim_name = object
        .metadata
        .annotations
        .and_then(|mut all| all.remove(POD_CLAIM_NAME));
    let status = object.status.unwrap_or_default();
    let allocation = status.allocation.ok_or_else(|| {
        let message = format!(
            "claim {asked} has no allocation (the scheduler has not allocated it, or it was deallocated again)"
        );
        ClaimError::new("not-allocated", message)
    })?;
    let second = |time: Option<&Time>| time.map(|time| time.0.as_second());
    let times = Times {
        made: second(object.metadata.creation_timestamp.as_ref()),
        allocated: second(allocation.allocation_timestamp.as_ref()),
    };
    let allocated_at = allocation.allocation_timestamp.map(|time| rfc3339(&time));
    let devices = allocation.devices.unwrap_or_default();
    let spec = object.spec.and_then(|spec| spec.devices);
    let spec = spec.unwrap_or_default();
    let classes = classes(spec.requests.unwrap_or_default());
    let written = spec.config.unwrap_or_default();
    let results = devices
        .results
        .iter()
        .flatten()
        .filter(|result| result.driver == driver)
        .cloned();
    let results = results.map(allocated).collect::<Result<_, _>>();
    let results = results.map_err(|error| {
        let error = crate::chain(&error);
        let message =
            format!("claim {asked} has an allocated device with an invalid name: {error}");
        ClaimError::new("bad-device", message)
    })?;
    Ok(Claim {
        uid: asked.uid.clone(),
        namespace: asked.namespace.clone(),
        name: asked.name.clone(),
        pod_claim_name: pod_claim_name.filter(|name| is_label(name)),
        allocation: Allocation {
            allocated_at,
            results,
        },
        classes,
        configs: configs(devices, &written),
        times,
        pods: status
            .reserved_for
            .unwrap_or_default()
            .into_iter()
            .filter_map(pod)
            .collect(),
    })
}

/// Returns the class of each request, and of each of its alternatives, by its name in results.
fn classes(requests: Vec<DeviceRequest>) -> BTreeMap<String, String> {
    let mut classes = BTreeMap::new();
    for request in requests {
        for sub in request.first_available.into_iter().flatten() {
            let name = format!("{}/{}", request.name, sub.name);
            classes.insert(name, sub.device_class_name);
        }
        if let Some(exactly) = request.exactly {
            classes.insert(request.name, exactly.device_class_name);
        }
    }
    classes
}

/// Formats a time for records: the form is part of the stored format, so it is not left to a
/// library's choice.
fn rfc3339(time: &Time) -> String {
    time.0.strftime("%Y-%m-%dT%H:%M:%S%.fZ").to_string()
}

/// The claim with those of its devices that are in this node's pool. A claim that has only devices
/// elsewhere is refused: an empty answer would start its pod without a device. In the place of
/// NVIDIA's driver, a claim with any device of that driver is refused.
pub(crate) fn in_pool(mut claim: Claim, pool: &str, naming: Naming) -> Result<Claim, ClaimError> {
    let mut results = claim.allocation.results.iter();
    let theirs = results.find(|result| naming.stands_in() && result.pool != pool);
    if let Some(theirs) = theirs {
        let message = format!(
            "claim {} has {} of pool {}, allocated while NVIDIA's plugin served it: this node's pool is {pool} (delete the pods of the claim, so that it is allocated anew)",
            claim.reference(),
            theirs.device,
            theirs.pool
        );
        return Err(ClaimError::new("nvidias-pool", message));
    }
    let found = claim
        .allocation
        .results
        .first()
        .map(|result| result.pool.clone());
    claim
        .allocation
        .results
        .retain(|result| result.pool == pool);
    match found {
        Some(found) if claim.allocation.results.is_empty() => {
            let message = format!(
                "claim {} has devices of pool {found}, but none of this node's pool {pool} (delete the pod: it was bound to a node that its claim was not allocated for)",
                claim.reference()
            );
            Err(ClaimError::new("other-node", message))
        }
        _ => Ok(claim),
    }
}

/// A claim as it is now, by whatever UID it has; `None` unless it is allocated.
pub(crate) fn current(object: ResourceClaim, driver: &str) -> Option<Claim> {
    let uid: ClaimUid = object.metadata.uid.as_ref()?.parse().ok()?;
    let namespace = object.metadata.namespace.clone().unwrap_or_default();
    let name = object.metadata.name.clone().unwrap_or_default();
    from_api(
        &ClaimRef {
            uid,
            namespace,
            name,
        },
        object,
        driver,
    )
    .ok()
}

fn allocated(result: DeviceRequestAllocationResult) -> Result<AllocatedDevice, IdError> {
    let driver = result.driver;
    let device: DeviceName = result.device.parse()?;
    Ok(AllocatedDevice {
        request: result.request,
        pool: result.pool,
        device,
        share_id: result.share_id,
        admin_access: result.admin_access == Some(true),
        consumed_capacity: result
            .consumed_capacity
            .unwrap_or_default()
            .into_iter()
            .map(|(name, quantity)| (Naming::ours(&driver, &name).to_owned(), quantity.0))
            .collect(),
    })
}

/// The entries of an allocation, with the requests that their authors named. The scheduler of
/// Kubernetes 1.37 empties `requests` that cover all of the claim's; it copies the claim's entries
/// in order and leaves out those of alternatives that it did not choose. An entry without opaque
/// parameters is of a kind that does not exist yet: not ours to judge.
fn configs(
    devices: DeviceAllocationResult,
    written: &[DeviceClaimConfiguration],
) -> Vec<ConfigEntry> {
    let results = devices.results.unwrap_or_default();
    let is_for_a_result = |requests: &[String]| {
        let names = |result: &str| {
            requests
                .iter()
                .any(|r| r == result || r == base_request(result))
        };
        requests.is_empty() || results.iter().any(|result| names(&result.request))
    };
    // A single iterator for all entries: the copies are in the order of the originals, so each is
    // looked for behind the one before.
    let mut written = written.iter();
    let mut entry = |entry: DeviceAllocationConfiguration| {
        let opaque = entry.opaque?;
        let source = if entry.source == "FromClass" {
            ConfigSource::Class
        } else {
            ConfigSource::Claim
        };
        let mut requests = entry.requests.unwrap_or_default();
        let is_it = |own: &&DeviceClaimConfiguration| {
            own.opaque.as_ref() == Some(&opaque)
                && is_for_a_result(own.requests.as_deref().unwrap_or_default())
        };
        if source == ConfigSource::Claim
            && requests.is_empty()
            && let Some(own) = written.find(is_it)
        {
            requests = own.requests.clone().unwrap_or_default();
        }
        Some(ConfigEntry {
            source,
            requests,
            driver: opaque.driver,
            parameters: opaque.parameters.0,
        })
    };
    devices
        .config
        .unwrap_or_default()
        .into_iter()
        .filter_map(&mut entry)
        .collect()
}

fn pod(consumer: ResourceClaimConsumerReference) -> Option<PodRef> {
    let is_pod =
        consumer.resource == "pods" && consumer.api_group.is_none_or(|group| group.is_empty());
    is_pod.then_some(PodRef {
        name: consumer.name,
        uid: consumer.uid,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn asked() -> ClaimRef {
        Asked::new("ns".into(), "c".into(), "uid-1".into())
            .check()
            .unwrap()
    }

    #[expect(clippy::needless_pass_by_value, reason = "reads better at the call")]
    fn object(uid: &str, status: serde_json::Value) -> ResourceClaim {
        serde_json::from_value(json!({
            "metadata": { "namespace": "ns", "name": "c", "uid": uid },
            "spec": { "devices": {} }, "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn the_time_of_an_allocation_is_kept_as_utc_as_finely_as_it_is() {
        for (given, kept) in [
            ("2026-11-21T14:00:00Z", "2026-11-21T14:00:00Z"),
            ("2026-11-21T15:00:00+01:00", "2026-11-21T14:00:00Z"),
            ("2026-11-21T14:00:00.250Z", "2026-11-21T14:00:00.25Z"),
        ] {
            let time: Time = serde_json::from_value(json!(given)).unwrap();
            assert_eq!(rfc3339(&time), kept, "{given}");
        }
    }

    #[test]
    fn only_our_results_are_kept_and_all_configs_and_pods() {
        let claim = from_api(
            &asked(),
            object(
                "uid-1",
                json!({
                    "allocation": {
                        "allocationTimestamp": "2026-11-21T14:00:00Z",
                        "devices": {
                            "results": [
                                { "request": "nic", "driver": "nic.example.com", "pool": "n1", "device": "NOT_ours" },
                                { "request": "gpu/big", "driver": "d", "pool": "n1/divvy", "device": "gpu-3",
                                  "adminAccess": true, "shareID": "s", "consumedCapacity": { "memory": "4Gi" } },
                            ],
                            "config": [
                                { "source": "FromClass", "opaque": { "driver": "d", "parameters": { "a": 1 } } },
                                { "source": "FromClaim", "requests": ["nic"],
                                  "opaque": { "driver": "nic.example.com", "parameters": {} } },
                                { "source": "FromClaim" },
                            ],
                        },
                    },
                    "reservedFor": [
                        { "resource": "pods", "name": "p", "uid": "pod-1" },
                        { "apiGroup": "x.io", "resource": "things", "name": "t", "uid": "t-1" },
                    ],
                }),
            ),
            "d",
        )
        .unwrap();
        let config = |source, requests: &[&str], driver: &str, parameters| ConfigEntry {
            source,
            requests: requests.iter().map(|r| (*r).to_owned()).collect(),
            driver: driver.to_owned(),
            parameters,
        };
        assert_eq!(
            claim,
            Claim {
                uid: "uid-1".parse().unwrap(),
                namespace: "ns".into(),
                name: "c".into(),
                pod_claim_name: None,
                classes: BTreeMap::new(),
                times: Times {
                    made: None,
                    allocated: Some(1_795_269_600),
                },
                allocation: Allocation {
                    allocated_at: Some("2026-11-21T14:00:00Z".into()),
                    results: vec![AllocatedDevice {
                        request: "gpu/big".into(),
                        pool: "n1/divvy".into(),
                        device: "gpu-3".parse().unwrap(),
                        share_id: Some("s".into()),
                        admin_access: true,
                        consumed_capacity: [("memory".to_owned(), "4Gi".to_owned())].into(),
                    }],
                },
                configs: vec![
                    config(ConfigSource::Class, &[], "d", json!({ "a": 1 })),
                    config(ConfigSource::Claim, &["nic"], "nic.example.com", json!({})),
                ],
                pods: vec![PodRef {
                    name: "p".into(),
                    uid: "pod-1".into()
                }],
            }
        );
    }

    /// The server names what a share consumes as its slice does, and records as divvy does.
    #[test]
    fn consumed_capacity_has_the_names_of_divvy() {
        let consumed = |driver: &str, capacity: serde_json::Value| {
            let result = json!({ "request": "gpu", "driver": driver, "pool": "n1/divvy",
                "device": "gpu-0-ts", "consumedCapacity": capacity });
            let status = json!({ "allocation": { "devices": { "results": [result] } } });
            let claim = from_api(&asked(), object("uid-1", status), driver).unwrap();
            let [device] = claim.allocation.results.try_into().unwrap();
            device.consumed_capacity.into_keys().collect::<Vec<_>>()
        };
        let names = json!({ "memory": "4Gi", "gpu.divvy.dev/cores": "5" });
        assert_eq!(consumed("gpu.nvidia.com", names), ["cores", "memory"]);
        let names = json!({ "memory": "4Gi", "cores": "5" });
        assert_eq!(consumed("gpu.divvy.dev", names), ["cores", "memory"]);
        // A claim may write the driver's domain, too.
        for driver in ["gpu.divvy.dev", "gpu.nvidia.com", "gpu.example.com"] {
            let name = format!("{driver}/memory");
            assert_eq!(consumed(driver, json!({ name: "4Gi" })), ["memory"]);
        }
    }

    #[test]
    fn an_emptied_entrys_requests_are_those_that_its_author_named() {
        let opaque = |a: u32| json!({ "driver": "d", "parameters": { "a": a } });
        let object = |status: serde_json::Value| -> ResourceClaim {
            serde_json::from_value(json!({
                "metadata": { "namespace": "ns", "name": "c", "uid": "uid-1" },
                "spec": { "devices": { "config": [
                    { "requests": ["gpu/mig"], "opaque": opaque(1) },
                    { "requests": ["gpu/share"], "opaque": opaque(1) },
                    { "opaque": opaque(2) },
                    { "requests": ["gpu"], "opaque": opaque(3) },
                ] } },
                "status": { "allocation": { "devices": status } },
            }))
            .unwrap()
        };
        let status = json!({
            "results": [{ "request": "gpu/share", "driver": "d", "pool": "n1/divvy", "device": "gpu-0-ts" }],
            "config": [
                { "source": "FromClass", "opaque": opaque(1) },
                { "source": "FromClaim", "opaque": opaque(1) },
                { "source": "FromClaim", "opaque": opaque(2) },
                { "source": "FromClaim", "opaque": opaque(3) },
            ],
        });
        let claim = from_api(&asked(), object(status), "d").unwrap();
        let requests: Vec<_> = claim
            .configs
            .iter()
            .map(|entry| entry.requests.join(","))
            .collect();
        assert_eq!(requests, ["", "gpu/share", "", "gpu"]);
    }

    #[test]
    fn a_claim_with_devices_of_other_nodes_only_is_refused() {
        let result = |pool: &str| json!({ "request": "gpu", "driver": "d", "pool": pool, "device": "gpu-0" });
        let claim = |pools: &[&str]| {
            let results: Vec<_> = pools.iter().map(|pool| result(pool)).collect();
            let status = json!({ "allocation": { "devices": { "results": results } } });
            in_pool(
                from_api(&asked(), object("uid-1", status), "d").unwrap(),
                "n1/divvy",
                Naming::default(),
            )
        };
        let pools = |claim: Claim| {
            claim
                .allocation
                .results
                .into_iter()
                .map(|r| r.pool)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            pools(claim(&["n2/divvy", "n1/divvy"]).unwrap()),
            ["n1/divvy"]
        );
        assert_eq!(pools(claim(&[]).unwrap()), Vec::<String>::new());
        assert_eq!(
            claim(&["n2/divvy"]).unwrap_err().message,
            "claim ns/c (UID uid-1) has devices of pool n2/divvy, but none of this node's pool n1/divvy (delete the pod: it was bound to a node that its claim was not allocated for)"
        );
    }

    /// Pools of one driver's name are of two drivers there: a part of the devices would start the
    /// pod without the others.
    #[test]
    fn a_claim_with_devices_of_nvidias_pool_is_refused() {
        let driver = "gpu.nvidia.com";
        let claim = |pools: &[&str]| {
            let result = |pool: &&str| json!({ "request": "gpu", "driver": driver, "pool": pool, "device": "gpu-0" });
            let results: Vec<_> = pools.iter().map(result).collect();
            let status = json!({ "allocation": { "devices": { "results": results } } });
            let claim = from_api(&asked(), object("uid-1", status), driver).unwrap();
            in_pool(claim, "n1/divvy", Naming::of(driver))
        };
        assert_eq!(claim(&["n1/divvy"]).unwrap().allocation.results.len(), 1);
        for pools in [&["n1"][..], &["n1/divvy", "n1"]] {
            let error = claim(pools).unwrap_err();
            assert_eq!(error.category, "nvidias-pool");
            assert_eq!(
                error.message,
                "claim ns/c (UID uid-1) has gpu-0 of pool n1, allocated while NVIDIA's plugin served it: this node's pool is n1/divvy (delete the pods of the claim, so that it is allocated anew)"
            );
        }
    }

    #[test]
    fn a_claim_that_is_another_or_not_allocated_is_refused_in_words() {
        let refused = |object| from_api(&asked(), object, "d").unwrap_err().message;
        assert_eq!(
            refused(object("uid-2", json!({}))),
            "claim ns/c (UID uid-1) does not match the claim in the API, which has UID uid-2: the claim was deleted and created again under the same name (delete the pod so that it gets the new claim)"
        );
        assert_eq!(
            refused(object("uid-1", json!({}))),
            "claim ns/c (UID uid-1) has no allocation (the scheduler has not allocated it, or it was deallocated again)"
        );
        let error = Asked::new("ns".into(), "c".into(), "../x".into())
            .check()
            .unwrap_err();
        assert_eq!(
            error.message,
            "the kubelet sent claim ns/c with an invalid UID: claim UID \"../x\" is not valid: expected 1 to 63 letters, digits and dashes"
        );
    }
}
