//! Reports to users: Events on the claim and a condition in its status.
//! Written after the kubelet has its answer; a failure to write never fails a prepare.

use std::collections::BTreeMap;

use divvy_api::names;
use divvy_claims::{AllocatedDevice, Claim, ClaimRef, PodRef};
use divvy_model::{DeviceName, MigUuid, fnv1a};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, MicroTime, ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client};
use serde_json::json;

// The limits of the API server's validation: a longer text would cost the whole Event or condition.
/// Longest note of an Event, in bytes.
const LONGEST_NOTE: usize = 1024;
/// Longest message of a condition, in bytes.
const LONGEST_MESSAGE: usize = 32 * 1024;

/// Where Events about cluster-scoped objects are.
const CLUSTER_SCOPED: &str = "default";
// Room for a dot and the 16 digits of a hash within the 253 characters of a name.
/// So much of a policy's name is in the name of an Event about it.
const LONGEST_POLICY: usize = 200;
/// Longest `reportingInstance`, in bytes.
const LONGEST_INSTANCE: usize = 128;
const UNAUTHORIZED: u16 = 401;
const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;
const ALREADY_EXISTS: u16 = 409;

/// A condition that is so from now on, with a reason in CamelCase and a message for people.
pub(crate) fn condition(kind: &str, status: bool, reason: &str, message: &str) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message: cut(message, LONGEST_MESSAGE),
        last_transition_time: Time(Timestamp::now()),
        observed_generation: None,
    }
}

/// The result of a write of conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// There is nothing left to do.
    Done,
    /// The server did not allow it.
    Denied,
    /// It may succeed later.
    Failed,
}

/// Writes Events and conditions for users.
pub(crate) struct Notifier {
    client: Client,
    recorder: Recorder,
    driver: String,
    /// Name of this node.
    pub(crate) node: String,
}

impl Notifier {
    pub(crate) fn new(client: Client, driver: &str, node: &str) -> Self {
        let reporter = Reporter {
            controller: names::REPORTER.to_owned(),
            instance: Some(node.to_owned()),
        };
        let recorder = Recorder::new(client.clone(), reporter);
        Self {
            client,
            recorder,
            driver: driver.to_owned(),
            node: node.to_owned(),
        }
    }

    /// A warning on this node, for the people who run it.
    pub(crate) async fn warn_node(&self, reason: &str, note: &str) {
        // Another note is about another GPU, say: counted as a repetition it would not be read.
        let action = format!("Publish {:x}", fnv1a(note.bytes()));
        self.event(EventType::Warning, reason, note, &action, &self.node())
            .await;
    }

    /// Writes an Event about a device on the node, a claim or a pod. Events of one reason about one
    /// object count as repetitions of the first; with an `action` that names the device each device
    /// has its own.
    pub(crate) async fn report_device(
        &self,
        about: &EventSubject<'_>,
        bad: bool,
        reason: &str,
        action: &str,
        note: &str,
    ) {
        let about = match about {
            EventSubject::Node => self.node(),
            EventSubject::Claim(claim) => claim_reference(claim),
            EventSubject::Pod(namespace, pod) => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                namespace: Some((*namespace).to_owned()),
                name: Some(pod.name.clone()),
                uid: Some(pod.uid.clone()),
                ..ObjectReference::default()
            },
        };
        let kind = if bad {
            EventType::Warning
        } else {
            EventType::Normal
        };
        self.event(kind, reason, note, action, &about).await;
    }

    fn node(&self) -> ObjectReference {
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(self.node.clone()),
            // The name, as in the kubelet's own Events: `kubectl describe node` looks for it here.
            uid: Some(self.node.clone()),
            ..ObjectReference::default()
        }
    }

    /// A warning on a policy. All nodes of a cluster find the same in it: the first that says it
    /// (of `what`, where a policy has several such things) says it for all, under a name that they
    /// agree on.
    pub(crate) async fn warn_policy(
        &self,
        policy: &PolicyRef,
        reason: &str,
        what: &str,
        note: &str,
    ) {
        let event = events::v1::Event {
            metadata: ObjectMeta {
                name: Some(policy.event_name(reason, what)),
                namespace: Some(CLUSTER_SCOPED.to_owned()),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(Timestamp::now())),
            reporting_controller: Some(names::REPORTER.to_owned()),
            reporting_instance: Some(cut(&self.node, LONGEST_INSTANCE)),
            action: Some("Publish".to_owned()),
            reason: Some(camel_case(reason)),
            regarding: Some(ObjectReference {
                api_version: Some(names::API_VERSION.to_owned()),
                kind: Some(divvy_api::policy::KIND.to_owned()),
                name: Some(policy.name.clone()),
                uid: policy.uid.clone(),
                ..ObjectReference::default()
            }),
            note: Some(cut(note, LONGEST_NOTE)),
            type_: Some("Warning".to_owned()),
            ..events::v1::Event::default()
        };
        let api = Api::<events::v1::Event>::namespaced(self.client.clone(), CLUSTER_SCOPED);
        match api.create(&PostParams::default(), &event).await {
            Ok(_) => {}
            // Another node was first, or this one before a restart.
            Err(kube::Error::Api(status)) if status.code == ALREADY_EXISTS => {}
            Err(error) => {
                tracing::warn!(
                    policy = policy.name,
                    error = crate::chain(&error),
                    "failed to write an Event"
                );
            }
        }
    }

    /// A warning on a claim.
    pub(crate) async fn warn(&self, claim: &ClaimRef, reason: &str, note: &str) {
        self.event(
            EventType::Warning,
            reason,
            note,
            "Prepare",
            &claim_reference(claim),
        )
        .await;
    }

    async fn event(
        &self,
        type_: EventType,
        reason: &str,
        note: &str,
        action: &str,
        about: &ObjectReference,
    ) {
        let event = Event {
            type_,
            reason: camel_case(reason),
            note: Some(cut(note, LONGEST_NOTE)),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, about).await {
            let error = crate::chain(&error);
            tracing::warn!(
                kind = about.kind,
                name = about.name,
                error,
                "failed to write an Event"
            );
        }
    }

    /// The claim can be used: reported after it was refused, and when there is news, such as the
    /// UUIDs of the partitions that were made for it. Returns whether its status says so.
    pub(crate) async fn prepared(
        &self,
        claim: &Claim,
        before: Option<&Condition>,
        partitions: &BTreeMap<DeviceName, MigUuid>,
    ) -> bool {
        let now = condition(
            names::conditions::PREPARED,
            true,
            "Prepared",
            "devices are prepared",
        );
        self.verdict(claim, before, now, partitions).await
    }

    /// The claim can never be prepared as it is.
    pub(crate) async fn refused(
        &self,
        claim: &Claim,
        before: Option<&Condition>,
        category: &str,
        message: &str,
    ) {
        let now = condition(
            names::conditions::PREPARED,
            false,
            &camel_case(category),
            message,
        );
        self.verdict(claim, before, now, &BTreeMap::new()).await;
    }

    /// Puts the verdict into the claim's status, unless it is there already.
    async fn verdict(
        &self,
        claim: &Claim,
        before: Option<&Condition>,
        mut now: Condition,
        partitions: &BTreeMap<DeviceName, MigUuid>,
    ) -> bool {
        if let Some(before) = before.filter(|before| before.status == now.status) {
            if partitions.is_empty() && before.reason == now.reason && before.message == now.message
            {
                return true;
            }
            // By the convention of the API this is the time at which the status changed, and not
            // its message.
            now.last_transition_time = before.last_transition_time.clone();
        }
        let devices = claim.allocation.results.iter().map(|result| {
            let data = partitions
                .get(&result.device)
                .map(|uuid| RawExtension(json!({ "uuid": uuid })));
            AllocatedDeviceStatus {
                data,
                ..self.entry(result, vec![now.clone()])
            }
        });
        let written = self
            .apply(&claim.reference(), names::FIELD_MANAGER, devices.collect())
            .await;
        if let Err(error) = &written {
            let error = crate::chain(error);
            tracing::warn!(claim = %claim.reference(), error, "failed to write the claim's condition");
        }
        written.is_ok()
    }

    /// Applies everything that is said of the use of a claim's devices. The conditions of prepare
    /// have another manager: neither takes those of the other away.
    pub(crate) async fn usage_conditions(
        &self,
        claim: &ClaimRef,
        devices: Vec<(&AllocatedDevice, Vec<Condition>)>,
    ) -> Written {
        let devices = devices
            .into_iter()
            .map(|(device, conditions)| self.entry(device, conditions));
        match self
            .apply(claim, names::FIELD_MANAGER_USAGE, devices.collect())
            .await
        {
            Ok(()) => Written::Done,
            // It is gone, or another of its name came.
            Err(kube::Error::Api(status)) if [NOT_FOUND, ALREADY_EXISTS].contains(&status.code) => {
                Written::Done
            }
            Err(error) => {
                let written = match &error {
                    kube::Error::Api(status)
                        if [UNAUTHORIZED, FORBIDDEN].contains(&status.code) =>
                    {
                        Written::Denied
                    }
                    // The server would refuse it again.
                    kube::Error::Api(status) if (400..429).contains(&status.code) => Written::Done,
                    _ => Written::Failed,
                };
                let error = crate::chain(&error);
                tracing::warn!(%claim, error, "failed to write the claim's conditions about its use");
                written
            }
        }
    }

    /// Returns the entry of one device in a claim's status.
    fn entry(&self, device: &AllocatedDevice, conditions: Vec<Condition>) -> AllocatedDeviceStatus {
        AllocatedDeviceStatus {
            driver: self.driver.clone(),
            pool: device.pool.clone(),
            device: device.device.to_string(),
            share_id: device.share_id.clone(),
            conditions: Some(conditions),
            ..AllocatedDeviceStatus::default()
        }
    }

    /// Applies a claim with nothing but this status. The UID keeps it away from a later claim of
    /// the same name.
    async fn apply(
        &self,
        claim: &ClaimRef,
        manager: &str,
        devices: Vec<AllocatedDeviceStatus>,
    ) -> Result<(), kube::Error> {
        let patch = ResourceClaim {
            metadata: ObjectMeta {
                namespace: Some(claim.namespace.clone()),
                name: Some(claim.name.clone()),
                uid: Some(claim.uid.to_string()),
                ..ObjectMeta::default()
            },
            status: Some(ResourceClaimStatus {
                devices: Some(devices),
                ..ResourceClaimStatus::default()
            }),
            ..ResourceClaim::default()
        };
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &claim.namespace);
        // Server-side apply takes away what a manager no longer lists, so all devices of a claim
        // are in one patch. Forced: a field that another manager has taken is ours again.
        let params = PatchParams::apply(manager).force();
        api.patch_status(&claim.name, &params, &Patch::Apply(patch))
            .await
            .map(drop)
    }
}

/// A policy in one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PolicyRef {
    pub(crate) name: String,
    pub(crate) uid: Option<String>,
    /// Version of its spec.
    pub(crate) generation: Option<i64>,
}

impl PolicyRef {
    /// The same on every node and for every process: nothing of a node goes into it.
    fn event_name(&self, reason: &str, what: &str) -> String {
        let generation = self
            .generation
            .map(|generation| generation.to_string())
            .unwrap_or_default();
        let parts = [
            self.uid.as_deref().unwrap_or_default(),
            &generation,
            reason,
            what,
        ];
        let hash = fnv1a(parts.iter().flat_map(|part| part.bytes().chain([0])));
        let end = self.name.len().min(LONGEST_POLICY);
        let name = self
            .name
            .get(..end)
            .unwrap_or_default()
            .trim_end_matches(['.', '-']);
        format!("{name}.{hash:016x}")
    }
}

/// The object that an Event is about.
pub(crate) enum EventSubject<'a> {
    /// This node.
    Node,
    Claim(&'a ClaimRef),
    /// A pod, by its namespace and names.
    Pod(&'a str, &'a PodRef),
}

fn claim_reference(claim: &ClaimRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("resource.k8s.io/v1".to_owned()),
        kind: Some("ResourceClaim".to_owned()),
        namespace: Some(claim.namespace.clone()),
        name: Some(claim.name.clone()),
        uid: Some(claim.uid.to_string()),
        ..ObjectReference::default()
    }
}

/// Our condition in a claim's status, as it was read. All our devices of a claim carry the same.
pub(crate) fn condition_of(object: &ResourceClaim, driver: &str) -> Option<Condition> {
    let ours = |device: &&AllocatedDeviceStatus| device.driver == driver;
    let devices = object
        .status
        .as_ref()?
        .devices
        .as_ref()?
        .iter()
        .filter(ours);
    let mut conditions = devices
        .filter_map(|device| device.conditions.as_ref())
        .flatten();
    conditions
        .find(|condition| condition.type_ == names::conditions::PREPARED)
        .cloned()
}

/// Devices of ours of which a claim's status says that they are used too much or not at all, with
/// the type of the condition.
pub(crate) fn usage_conditions_of(
    object: &ResourceClaim,
    driver: &str,
) -> Vec<(DeviceName, &'static str)> {
    let devices = object
        .status
        .iter()
        .flat_map(|status| status.devices.iter().flatten());
    let mut found = Vec::new();
    for entry in devices.filter(|device| device.driver == driver) {
        let Ok(device) = entry.device.parse::<DeviceName>() else {
            continue;
        };
        for condition in entry.conditions.iter().flatten() {
            use names::conditions::{IDLE, RECLAIM_DUE, WITHIN_GRANT};
            let bad = [
                (WITHIN_GRANT, "False"),
                (IDLE, "True"),
                (RECLAIM_DUE, "True"),
            ];
            let is = |(kind, status): &&(&str, &str)| {
                condition.type_ == *kind && condition.status == *status
            };
            found.extend(bad.iter().find(is).map(|(kind, _)| (device.clone(), *kind)));
        }
    }
    found
}

/// `wrong-mode` → `WrongMode`: categories as reasons.
fn camel_case(category: &str) -> String {
    category
        .split('-')
        .flat_map(|word| {
            let mut letters = word.chars();
            letters
                .next()
                .map(|first| first.to_ascii_uppercase())
                .into_iter()
                .chain(letters)
        })
        .collect()
}

/// Cuts at a character, with a mark.
pub(crate) fn cut(text: &str, longest: usize) -> String {
    if text.len() <= longest {
        return text.to_owned();
    }
    let mut end = longest.saturating_sub(3);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}...", text.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_nodes_give_an_event_of_a_policys_version_the_same_name() {
        let policy = |name: &str, generation| PolicyRef {
            name: name.to_owned(),
            uid: Some("u".to_owned()),
            generation: Some(generation),
        };
        let name = policy("p", 1).event_name("bad-policy", "");
        assert_eq!(name, policy("p", 1).event_name("bad-policy", ""));
        let others = [
            policy("p", 2).event_name("bad-policy", ""),
            policy("p", 1).event_name("rule-without-effect", ""),
            policy("p", 1).event_name("bad-policy", "what"),
        ];
        assert!(others.iter().all(|other| *other != name), "{others:?}");
        let long =
            policy(&format!("{}.{}", "a".repeat(199), "b".repeat(53)), 1).event_name("x", "");
        assert!(long.len() <= 253 && !long.contains(".."), "{long}");
    }

    #[test]
    fn reasons_and_notes_fit_the_api() {
        assert_eq!(camel_case("wrong-mode"), "WrongMode");
        assert_eq!(camel_case("held"), "Held");
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("äöüäöü", 9), "äöü...");
    }
}
