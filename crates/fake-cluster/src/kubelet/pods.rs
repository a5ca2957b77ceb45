//! Pods as the kubelet sees them: their claims are prepared before the containers start, and let go
//! after the last pod that uses them.

use std::collections::{BTreeMap, BTreeSet};

use divvy_proto::dra::v1::Device;
use divvy_proto::podresources::v1::{
    CdiDevice, ClaimResource, ContainerResources, DynamicResource, PodResources,
};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};

use super::{ClaimRef, FakeKubelet, KubeletError};

/// CDI devices of a container, in the order in which the runtime would get them.
pub type ContainerDevices = BTreeMap<String, Vec<String>>;

/// A claim in use on the node.
#[derive(Debug, Clone)]
pub(super) struct Claim {
    reference: ClaimRef,
    /// UIDs of the pods that use it.
    pods: BTreeSet<String>,
    /// Answers by driver; a driver that has not answered is missing.
    answers: BTreeMap<String, Vec<Device>>,
    /// The drivers in the allocation.
    drivers: BTreeSet<String>,
}

impl Claim {
    /// After a restart everything is prepared again at the next sandbox.
    pub(super) fn forget_answers(&mut self) {
        self.answers.clear();
    }
}

/// A pod's claim: the name the pod calls it, and the object.
struct Used {
    pod_name: String,
    reference: ClaimRef,
    drivers: BTreeSet<String>,
}

impl FakeKubelet {
    /// Prepares the claims of a pod in the API, and returns what each container gets. Checks first
    /// what the real kubelet checks: every claim exists, is allocated, and is reserved for the pod.
    /// Claims that are already prepared for another pod are not sent again.
    pub async fn start_pod(
        &self,
        namespace: &str,
        name: &str,
    ) -> Result<ContainerDevices, KubeletError> {
        let problem = |problem: String| KubeletError::Pod {
            pod: format!("{namespace}/{name}"),
            problem,
        };
        let api = &self.config().api;
        let pod: Pod = api
            .get(namespace, name)
            .ok_or_else(|| problem("not found".into()))?;
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        let used = self.claims_of(&pod).map_err(problem)?;
        let mut missing: BTreeMap<String, Vec<ClaimRef>> = BTreeMap::new();
        {
            let mut state = self.shared.lock();
            for one in &used {
                let claim = state
                    .claims
                    .entry(one.reference.uid.clone())
                    .or_insert_with(|| Claim {
                        reference: one.reference.clone(),
                        pods: BTreeSet::new(),
                        answers: BTreeMap::new(),
                        drivers: one.drivers.clone(),
                    });
                claim.pods.insert(uid.clone());
                for driver in one
                    .drivers
                    .iter()
                    .filter(|driver| !claim.answers.contains_key(*driver))
                {
                    missing
                        .entry(driver.clone())
                        .or_default()
                        .push(one.reference.clone());
                }
            }
        }
        for (driver, claims) in missing {
            for (claim_uid, outcome) in self.prepare(&driver, &claims).await? {
                let devices = outcome
                    .map_err(|e| problem(format!("failed to prepare claim {claim_uid}: {e}")))?;
                if let Some(claim) = self.shared.lock().claims.get_mut(&claim_uid) {
                    claim.answers.insert(driver.clone(), devices);
                }
            }
        }
        let containers = pod.spec.unwrap_or_default().containers;
        let resources = self.resources(namespace, name, &containers, &used);
        let devices = resources
            .containers
            .iter()
            .map(|c| (c.name.clone(), cdi_ids(c)))
            .collect();
        self.shared.lock().pods.insert(uid, resources);
        Ok(devices)
    }

    /// Ends a pod that was started: claims that no other pod of the node uses are unprepared, by
    /// every driver.
    pub async fn stop_pod(&self, uid: &str) -> Result<(), KubeletError> {
        let problem = |problem: String| KubeletError::Pod {
            pod: uid.to_owned(),
            problem,
        };
        let mut doomed: BTreeMap<String, Vec<ClaimRef>> = BTreeMap::new();
        {
            let mut state = self.shared.lock();
            state.pods.remove(uid);
            for claim in state
                .claims
                .values_mut()
                .filter(|claim| claim.pods.contains(uid))
            {
                if claim.pods.len() > 1 {
                    claim.pods.remove(uid);
                    continue;
                }
                // The pod stays noted until unprepare succeeded, so that the call can be repeated.
                for driver in &claim.drivers {
                    doomed
                        .entry(driver.clone())
                        .or_default()
                        .push(claim.reference.clone());
                }
            }
        }
        for (driver, claims) in doomed {
            for (claim_uid, outcome) in self.unprepare(&driver, &claims).await? {
                outcome
                    .map_err(|e| problem(format!("failed to unprepare claim {claim_uid}: {e}")))?;
                let mut state = self.shared.lock();
                if let Some(claim) = state.claims.get_mut(&claim_uid) {
                    claim.drivers.remove(&driver);
                    if claim.drivers.is_empty() {
                        state.claims.remove(&claim_uid);
                    }
                }
            }
        }
        Ok(())
    }

    fn claims_of(&self, pod: &Pod) -> Result<Vec<Used>, String> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let statuses = pod
            .status
            .as_ref()
            .and_then(|s| s.resource_claim_statuses.as_ref());
        let mut used = Vec::new();
        for one in pod
            .spec
            .iter()
            .flat_map(|spec| spec.resource_claims.iter().flatten())
        {
            let generated = statuses
                .into_iter()
                .flatten()
                .find(|status| status.name == one.name);
            let name = match (&one.resource_claim_name, generated) {
                (Some(name), _) => name.clone(),
                (None, Some(status)) => match &status.resource_claim_name {
                    Some(name) => name.clone(),
                    // The template made none: the pod does not need one.
                    None => continue,
                },
                (None, None) => return Err(format!("claim {} was not generated yet", one.name)),
            };
            let claim: ResourceClaim = self
                .config()
                .api
                .get(namespace, &name)
                .ok_or_else(|| format!("ResourceClaim {namespace}/{name} not found"))?;
            let claim_uid = claim.metadata.uid.clone().unwrap_or_default();
            let status = claim.status.unwrap_or_default();
            let group = pod
                .spec
                .as_ref()
                .and_then(|spec| spec.scheduling_group.as_ref()?.pod_group_name.as_ref());
            let is_for_it = |consumer: &ResourceClaimConsumerReference| match &*consumer.resource {
                "podgroups" => Some(&consumer.name) == group,
                _ => consumer.uid == uid,
            };
            if !status.reserved_for.iter().flatten().any(is_for_it) {
                return Err(format!(
                    "ResourceClaim {namespace}/{name} is not reserved for the pod"
                ));
            }
            let allocation = status
                .allocation
                .ok_or_else(|| format!("ResourceClaim {namespace}/{name} is not allocated"))?;
            let results = allocation
                .devices
                .and_then(|devices| devices.results)
                .unwrap_or_default();
            used.push(Used {
                pod_name: one.name.clone(),
                reference: ClaimRef::new(namespace, &name, &claim_uid),
                drivers: results.into_iter().map(|result| result.driver).collect(),
            });
        }
        Ok(used)
    }

    fn resources(
        &self,
        namespace: &str,
        name: &str,
        containers: &[Container],
        used: &[Used],
    ) -> PodResources {
        let state = self.shared.lock();
        let containers = containers.iter().map(|container| {
            let wanted = container
                .resources
                .iter()
                .flat_map(|r| r.claims.iter().flatten());
            let dynamic_resources = wanted.filter_map(|want| {
                let one = used.iter().find(|one| one.pod_name == want.name)?;
                let claim = state.claims.get(&one.reference.uid)?;
                let request = want.request.as_deref();
                let serves = |device: &&Device| {
                    let names = &device.request_names;
                    names.is_empty()
                        || request.is_none_or(|request| names.iter().any(|n| n == request))
                };
                let resources = claim.answers.iter().flat_map(|(driver, devices)| {
                    devices
                        .iter()
                        .filter(serves)
                        .map(|d| claim_resource(driver, d))
                });
                Some(DynamicResource {
                    claim_name: one.reference.name.clone(),
                    claim_namespace: one.reference.namespace.clone(),
                    claim_resources: resources.collect(),
                })
            });
            ContainerResources {
                name: container.name.clone(),
                dynamic_resources: dynamic_resources.collect(),
                ..ContainerResources::default()
            }
        });
        PodResources {
            name: name.into(),
            namespace: namespace.into(),
            containers: containers.collect(),
        }
    }
}

fn claim_resource(driver: &str, device: &Device) -> ClaimResource {
    ClaimResource {
        cdi_devices: device
            .cdi_device_ids
            .iter()
            .map(|id| CdiDevice { name: id.clone() })
            .collect(),
        driver_name: driver.into(),
        pool_name: device.pool_name.clone(),
        device_name: device.device_name.clone(),
        share_id: device.share_id.clone(),
    }
}

/// The CDI devices of a container, each once, in order of first mention.
fn cdi_ids(container: &ContainerResources) -> Vec<String> {
    let mut ids: Vec<String> = Vec::new();
    let resources = container
        .dynamic_resources
        .iter()
        .flat_map(|d| &d.claim_resources);
    for device in resources.flat_map(|r| &r.cdi_devices) {
        if !ids.contains(&device.name) {
            ids.push(device.name.clone());
        }
    }
    ids
}
