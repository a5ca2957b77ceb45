//! Pods of one owner that wait for each other: a Deployment ends an old pod only when its new one
//! is ready, so that the new one waits for ever for devices of the old one. Pure.
//!
//! Pods that run are not read. Their names say whose they are: a ReplicaSet adds five characters of
//! its own to its name, and a Deployment before that the hash of the template.

use divvy_why::OwnPods;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::snapshot::namespace;

/// Characters of Kubernetes' own ends of names.
const SAFE: &str = "bcdfghjklmnpqrstvwxz2456789";
/// With so many pods a Deployment ends one of four by default, before the new one is ready.
const MANY: usize = 4;

/// Owner of pods that run on, each until it is replaced.
#[derive(Debug, PartialEq)]
enum Owner<'p> {
    Deployment { name: &'p str, hash: &'p str },
    ReplicaSet(&'p str),
    StatefulSet(&'p str),
}

impl<'p> Owner<'p> {
    fn of(pod: &'p Pod) -> Option<Self> {
        let owners = pod.metadata.owner_references.iter().flatten();
        let owner = owners
            .into_iter()
            .find(|owner| owner.controller == Some(true))?;
        let labels = pod.metadata.labels.as_ref();
        let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
        match (owner.kind.as_str(), hash) {
            ("ReplicaSet", Some(hash)) => {
                let name = owner.name.strip_suffix(hash.as_str())?.strip_suffix('-')?;
                Some(Self::Deployment { name, hash })
            }
            ("ReplicaSet", None) => Some(Self::ReplicaSet(&owner.name)),
            ("StatefulSet", _) => Some(Self::StatefulSet(&owner.name)),
            // Others end of themselves, or give up their devices otherwise.
            _ => None,
        }
    }

    /// Returns the hash of the template of a pod of this owner, which is empty where there is none;
    /// `None` of a pod of another one.
    fn hash_of<'n>(&self, pod: &'n str) -> Option<&'n str> {
        let is_safe = |text: &str| !text.is_empty() && text.chars().all(|c| SAFE.contains(c));
        match self {
            Self::Deployment { name, .. } => {
                let rest = pod.strip_prefix(name)?.strip_prefix('-')?;
                let (hash, end) = rest.split_once('-')?;
                (is_safe(hash) && end.len() == 5 && is_safe(end)).then_some(hash)
            }
            Self::ReplicaSet(name) => {
                let end = pod.strip_prefix(name)?.strip_prefix('-')?;
                (end.len() == 5 && is_safe(end)).then_some("")
            }
            Self::StatefulSet(name) => {
                let number = pod.strip_prefix(name)?.strip_prefix('-')?;
                number.parse::<u32>().is_ok().then_some("")
            }
        }
    }

    fn words(&self) -> String {
        match self {
            Self::Deployment { name, .. } => format!("Deployment {name}"),
            Self::ReplicaSet(name) => format!("ReplicaSet {name}"),
            Self::StatefulSet(name) => format!("StatefulSet {name}"),
        }
    }
}

/// Returns what makes the answers for two pods differ.
pub(super) fn key(pod: &Pod) -> String {
    let owner = Owner::of(pod).map(|owner| format!("{owner:?}"));
    format!("{} {}", namespace(&pod.metadata), owner.unwrap_or_default())
}

/// Says whether the claims that hold what a pod waits for are all of pods of its own owner.
pub(super) fn own(pod: &Pod, holders: &[&ResourceClaim]) -> Option<OwnPods> {
    let owner = Owner::of(pod)?;
    let mut users = Vec::new();
    for claim in holders {
        if namespace(&claim.metadata) != namespace(&pod.metadata) {
            return None;
        }
        let reserved = claim.status.as_ref()?.reserved_for.as_deref()?;
        if reserved.is_empty() {
            return None;
        }
        for user in reserved {
            users.push(
                owner
                    .hash_of(&user.name)
                    .filter(|_| user.resource == "pods")?,
            );
        }
    }
    let words = owner.words();
    let is_update = match &owner {
        Owner::Deployment { hash, .. } => users.iter().any(|user| user != hash),
        _ => false,
    };
    if users.is_empty() || is_update && users.len() >= MANY {
        return None;
    }
    Some(if is_update {
        OwnPods {
            cause: format!(
                "{words} ends its own pods there only when this one is ready, so it waits for ever"
            ),
            hint: format!(
                "set strategy: {{type: Recreate}} in {words}, or rollingUpdate: {{maxSurge: 0, maxUnavailable: 1}}; to go on now, delete an \
                 old pod"
            ),
        }
    } else {
        OwnPods {
            cause: format!("all are pods of {words} itself, which run on, so it waits for ever"),
            hint: format!("fewer replicas in {words}, more GPUs, or a smaller request"),
        }
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A pod of an owner that waits for a device which pods of these names have.
    fn said(kind: &str, of: &str, hash: Option<&str>, users: &[&str]) -> Option<OwnPods> {
        let labels = hash.map(|hash| json!({ "pod-template-hash": hash }));
        let owner = json!({ "apiVersion": "apps/v1", "kind": kind, "name": of, "uid": "u", "controller": true });
        let pod = json!({ "metadata": { "name": "p", "namespace": "ns", "labels": labels, "ownerReferences": [owner] } });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        let claims: Vec<ResourceClaim> = users.iter().map(|name| claim("ns", name)).collect();
        own(&pod, &claims.iter().collect::<Vec<_>>())
    }

    fn claim(namespace: &str, user: &str) -> ResourceClaim {
        let user = json!({ "resource": "pods", "name": user, "uid": "u" });
        let claim = json!({ "metadata": { "name": "c", "namespace": namespace }, "spec": {}, "status": { "reservedFor": [user] } });
        serde_json::from_value(claim).unwrap()
    }

    #[test]
    fn a_pod_that_waits_for_those_that_it_replaces_waits_for_ever() {
        let new = ("ReplicaSet", "server-7d9f8c6b5d", Some("7d9f8c6b5d"));
        let said = |users: &[&str]| said(new.0, new.1, new.2, users);
        let update = said(&["server-66b8df45c9-x2x4z"]).unwrap();
        assert!(
            update
                .hint
                .contains("{type: Recreate} in Deployment server, or"),
            "{update:?}"
        );
        let several = ["server-66b8df45c9-x2x4z", "server-7d9f8c6b5d-b4b5c"];
        assert_eq!(said(&several), Some(update));
        let same = said(&["server-7d9f8c6b5d-b4b5c"]).unwrap();
        assert!(same.hint.starts_with("fewer replicas"), "{same:?}");
        for others in [
            // Another Deployment, also one whose name begins so, and a pod on its own.
            &["train-66b8df45c9-x2x4z"][..],
            &["server-2-66b8df45c9-x2x4z"],
            &["server-66b8df45c9-x2x4z", "train-0"],
            &["server-old-pod"],
            // Of four it ends one first.
            &["server-66b8df45c9-x2x4z"; 4],
            &[],
        ] {
            assert_eq!(said(others), None, "{others:?}");
        }
    }

    #[test]
    fn replicas_that_wait_for_each_other_are_too_many() {
        for (kind, name, users, expected) in [
            ("StatefulSet", "db", &["db-0", "db-12"][..], true),
            ("StatefulSet", "db", &["db-0", "db-x"], false),
            ("ReplicaSet", "rs", &["rs-x2x4z"], true),
            ("ReplicaSet", "rs", &["rs-1-x2x4z"], false),
            // The pods of a Job end.
            ("Job", "job", &["job-x2x4z"], false),
        ] {
            let said = said(kind, name, None, users);
            assert_eq!(said.is_some(), expected, "{kind} {users:?}");
            assert!(said.is_none_or(|said| said.hint.starts_with("fewer replicas")));
        }
    }

    #[test]
    fn a_holder_of_another_namespace_or_without_a_pod_is_none_of_its_own() {
        let pod = json!({ "metadata": { "name": "db-1", "namespace": "ns",
            "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": true }] } });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert!(own(&pod, &[&claim("ns", "db-0")]).is_some());
        assert_eq!(own(&pod, &[&claim("other", "db-0")]), None);
        let mut unused = claim("ns", "db-0");
        unused.status.as_mut().unwrap().reserved_for = Some(Vec::new());
        assert_eq!(own(&pod, &[&unused]), None);
    }
}
