//! An end-to-end case and what it has: a namespace of its own on a cluster with the driver.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::api::{Api, at, has_condition};
use crate::cluster::Cluster;
use crate::driver::Driver;
use crate::objects::{SAID, collection};
use crate::options::Gates;
use crate::parts::numbers;
use crate::wait::{poll, wait_for};

/// Time that a pod may take to run, or to end, on a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// A case: a sentence that is true of the driver, and the code that finds out.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The sentence, with `_` for spaces.
    pub name: &'static str,
    /// True if it disturbs others (it stops components), so that it has the cluster to itself.
    pub alone: bool,
    /// True if it is run on older releases, too: it is about partitions and shares, or about what
    /// an API server takes.
    pub of_sharing: bool,
    /// On which clusters it is true.
    pub clusters: Clusters,
    /// Returns an error if the sentence is not true.
    pub run: fn(&Env) -> Result<()>,
}

/// On which clusters a case is true.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clusters {
    All,
    /// Clusters whose scheduler keeps the modes of a GPU apart: 1.36.2 and later.
    SeveralModes,
    /// Clusters that know shares: 1.36 and later, 1.35 with their gates on.
    Shares,
    /// Clusters below 1.36.2.
    OneMode,
}

impl Case {
    /// Returns true if it suits a cluster of this version with these gates.
    pub fn suits(&self, version: &str, gates: Gates) -> bool {
        let at_least = |least| numbers(version).is_some_and(|numbers| numbers >= least);
        match self.clusters {
            Clusters::All => true,
            Clusters::SeveralModes => at_least((1, 36, 2)),
            Clusters::Shares => {
                at_least((1, 36, 0)) || (at_least((1, 35, 0)) && gates == Gates::Sharing)
            }
            Clusters::OneMode => !at_least((1, 36, 2)),
        }
    }
}

/// Cluster, driver and namespace of a case.
#[derive(Debug)]
pub struct Env<'a> {
    pub cluster: &'a Cluster,
    /// The driver on it.
    pub driver: &'a Driver<'a>,
    /// The case's own namespace.
    pub namespace: String,
}

impl Env<'_> {
    /// The cluster's objects.
    pub fn api(&self) -> Api {
        self.cluster.api()
    }

    /// The path of an object in the namespace.
    pub fn path(&self, kind: &str, name: &str) -> Result<String> {
        let collection =
            collection(kind, &self.namespace).with_context(|| format!("unknown kind {kind}"))?;
        Ok(format!("{collection}/{name}"))
    }

    /// Creates an object in the namespace and returns it as stored.
    pub fn create(&self, object: &Value) -> Result<Value> {
        let kind = at(object, "kind").as_str().unwrap_or_default();
        let path =
            collection(kind, &self.namespace).with_context(|| format!("unknown kind {kind}"))?;
        self.api().create(&path, object)
    }

    /// Deletes an object as its owner would.
    pub fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.api().delete(&self.path(kind, name)?, &json!({}))
    }

    /// Deletes a pod without waiting for its node.
    pub fn force_delete(&self, pod: &str) -> Result<()> {
        self.api()
            .delete(&self.path("Pod", pod)?, &json!({"gracePeriodSeconds": 0}))
    }

    /// Makes the kubelet look at a pod again: by itself it would, after a failed prepare, in a
    /// minute or more.
    pub fn nudge(&self, pod: &str) -> Result<()> {
        // Another value each time, or nothing would have changed.
        static TIMES: AtomicU32 = AtomicU32::new(0);
        let times = TIMES.fetch_add(1, Ordering::Relaxed).to_string();
        let change = json!({"metadata": {"annotations": {"e2e-look-again": times}}});
        match self.api().patch(&self.path("Pod", pod)?, &change) {
            // A pod that was on its way out may be gone by now.
            Err(error) if error.to_string().contains("404") => Ok(()),
            other => other.map(drop),
        }
    }

    /// Waits until an object is gone.
    pub fn wait_until_gone(&self, kind: &str, name: &str) -> Result<()> {
        let path = self.path(kind, name)?;
        wait_for(&format!("end of {kind} {name}"), PATIENCE, || {
            Ok(self.api().get(&path)?.is_none().then_some(()))
        })
    }

    /// Waits until a pod runs with all containers ready, and returns it.
    pub fn wait_until_running(&self, pod: &str) -> Result<Value> {
        let path = self.path("Pod", pod)?;
        wait_for(&format!("running pod {pod}"), PATIENCE, || {
            Ok(self
                .api()
                .get(&path)?
                .filter(|pod| has_condition(pod, "Ready")))
        })
        .with_context(|| format!("events of pod {pod}: {}", self.messages(pod).join("; ")))
    }

    /// Waits until this many pods of a Deployment are ready.
    pub fn wait_for_replicas(&self, deployment: &str, ready: u32) -> Result<()> {
        let path = self.path("Deployment", deployment)?;
        poll(
            &format!("{ready} ready pods of Deployment {deployment}"),
            PATIENCE,
            || {
                let found = self.api().get(&path)?;
                Ok(found.is_some_and(|found| at(&found, "status.availableReplicas") == ready))
            },
        )
    }

    /// Waits until the scheduler has said that it cannot place a pod, and returns its reason.
    pub fn wait_until_unschedulable(&self, pod: &str) -> Result<String> {
        let path = self.path("Pod", pod)?;
        wait_for(&format!("unschedulable pod {pod}"), PATIENCE, || {
            let Some(pod) = self.api().get(&path)? else {
                return Ok(None);
            };
            let conditions = at(&pod, "status.conditions")
                .as_array()
                .cloned()
                .unwrap_or_default();
            let refused = conditions
                .iter()
                .find(|condition| at(condition, "reason") == "Unschedulable");
            Ok(refused.map(|condition| {
                at(condition, "message")
                    .as_str()
                    .unwrap_or_default()
                    .to_owned()
            }))
        })
    }

    /// Returns the messages of Events about an object of the namespace.
    pub fn messages(&self, object: &str) -> Vec<String> {
        let path = collection("Event", &self.namespace).unwrap_or_default();
        let events = self.api().list(&path).unwrap_or_default();
        let about = events
            .iter()
            .filter(|event| at(event, "involvedObject.name") == object);
        about
            .map(|event| at(event, "message").as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// Returns the messages of Events about the node.
    pub fn node_messages(&self) -> Result<Vec<String>> {
        let events = self.api().list("/api/v1/namespaces/default/events")?;
        let about = events
            .iter()
            .filter(|event| at(event, "involvedObject.kind") == "Node");
        Ok(about
            .map(|event| at(event, "message").as_str().unwrap_or_default().to_owned())
            .collect())
    }

    /// A claim as it is now.
    pub fn claim(&self, name: &str) -> Result<Value> {
        self.api()
            .get(&self.path("ResourceClaim", name)?)?
            .with_context(|| format!("claim {name} is gone"))
    }

    /// The UID of an object.
    pub fn uid(object: &Value) -> Result<String> {
        Ok(at(object, "metadata.uid")
            .as_str()
            .context("no metadata.uid")?
            .to_owned())
    }

    /// The name of the claim that a pod got from a template.
    pub fn claim_of(pod: &Value) -> Result<String> {
        let name = at(pod, "status.resourceClaimStatuses.0.resourceClaimName").as_str();
        Ok(name
            .context("the pod has no claim from a template")?
            .to_owned())
    }

    /// Waits until a claim is allocated and returns the minor numbers of its GPUs.
    pub fn minors(&self, claim: &str) -> Result<BTreeSet<u32>> {
        let results = wait_for(&format!("allocation of claim {claim}"), PATIENCE, || {
            Ok(at(&self.claim(claim)?, "status.allocation.devices.results")
                .as_array()
                .cloned())
        })?;
        let minor = |result: &Value| {
            let device = at(result, "device")
                .as_str()
                .context("a result without device")?;
            Ok(self.driver.gpus().get(&self.driver.uuid_of(device)?)?.minor)
        };
        results.iter().map(minor).collect()
    }

    /// The minor numbers of the GPUs that a container says it sees.
    pub fn seen(&self, pod: &str, container: &str) -> Result<BTreeSet<u32>> {
        let text = self.log(pod, container)?;
        ensure!(
            text.contains("NVIDIA_VISIBLE_DEVICES=void\n"),
            "NVIDIA_VISIBLE_DEVICES is not void in {pod}: {text}"
        );
        Ok(text
            .lines()
            .filter_map(|line| line.strip_prefix("/dev/nvidia")?.parse().ok())
            .collect())
    }

    /// Everything a container says when it starts.
    pub fn log(&self, pod: &str, container: &str) -> Result<String> {
        let path = format!("{}/log?container={container}", self.path("Pod", pod)?);
        wait_for(
            &format!("words of container {container} of pod {pod}"),
            PATIENCE,
            || {
                let text = self.api().text(&path)?;
                Ok(text.contains(SAID).then_some(text))
            },
        )
    }

    /// Waits until a pod runs and checks that a container sees exactly the GPUs of these claims.
    pub fn check(&self, pod: &str, container: &str, claims: &[&str]) -> Result<BTreeSet<u32>> {
        self.wait_until_running(pod)?;
        let mut expected = BTreeSet::new();
        for claim in claims {
            expected.extend(self.minors(claim)?);
        }
        let seen = self.seen(pod, container)?;
        ensure!(
            seen == expected,
            "container {container} of pod {pod} sees GPUs {seen:?}; its claims have {expected:?}"
        );
        Ok(seen)
    }

    /// Deletes a pod and waits until it is gone and nothing of its claim is left on the node.
    pub fn end(&self, pod: &str, claim_uid: &str) -> Result<()> {
        self.delete("Pod", pod)?;
        self.wait_until_gone("Pod", pod)?;
        self.driver.wait_until_unprepared(claim_uid)
    }
}
