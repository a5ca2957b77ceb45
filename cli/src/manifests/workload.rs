//! Objects of which controllers make pods, from Deployment to CronJob.

use anyhow::Result;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde_json::Value;

use super::{namespace, typed};
use crate::strict::decode;

/// Fields that limit the pods that a Job runs at once.
const JOB: &[&str] = &["parallelism", "completions"];

/// A workload resource: its template of pods, and the fields that its validation is about.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkloadResource {
    pub kind: &'static str,
    pub metadata: ObjectMeta,
    /// Path of the spec that has the template: `spec`, or `spec.jobTemplate.spec`.
    pub path: &'static str,
    pub selector: Option<LabelSelector>,
    /// Value of `manualSelector`, which only Jobs have.
    pub manual_selector: bool,
    pub template: PodTemplateSpec,
    /// Numbers of pods, by field; the smallest counts. The first field is 1 by default.
    pub counts: Vec<(&'static str, i64)>,
    /// Schedule of a CronJob.
    pub schedule: Option<String>,
    /// Field that keeps the controller from making pods, as `spec.suspend: true`.
    pub stopped: Option<&'static str>,
    /// True of a Deployment that ends no pod before a new one is ready.
    pub keeps_old: bool,
    /// Membership in a queue that resumes it, so that its pods run all the same.
    queued: bool,
    /// Number of pods that stand before it in the manifests.
    pub(super) after_pods: usize,
}

/// Says whether the strategy of a Deployment's spec ends no pod before a new one is ready.
fn keeps_old(spec: &Value) -> bool {
    let text = |path: &str| spec.pointer(path).and_then(Value::as_str);
    if text("/strategy/type") == Some("Recreate") {
        return false;
    }
    let replicas = spec.get("replicas").and_then(Value::as_i64).unwrap_or(1);
    // Percent of the pods: of those that end rounded down, of those beside them rounded up.
    let number = |field: &str, up: i64| {
        let of = spec.pointer(&format!("/strategy/rollingUpdate/{field}"));
        let percent = of.and_then(Value::as_str).unwrap_or("25%");
        let percent = percent
            .strip_suffix('%')
            .and_then(|percent| percent.parse::<i64>().ok());
        let part = || {
            replicas
                .saturating_mul(percent.unwrap_or(25))
                .saturating_add(up)
                / 100
        };
        of.and_then(Value::as_i64).unwrap_or_else(part)
    };
    // Kubernetes ends one where neither would be.
    number("maxUnavailable", 0) <= 0 && number("maxSurge", 99) > 0
}

impl WorkloadResource {
    /// Reads an object of one of the kinds, `None` for any other.
    pub(super) fn read(
        version: &str,
        kind: &str,
        object: &Value,
        after_pods: usize,
    ) -> Result<Option<Self>> {
        type Fields = &'static [&'static str];
        let replicas: Fields = &["replicas"];
        let (kind, counts, path, stopped): (_, Fields, _, _) = match (version, kind) {
            ("apps/v1", "Deployment") => {
                typed::<Deployment>(object)?;
                ("Deployment", replicas, "spec", "spec.paused")
            }
            ("apps/v1", "ReplicaSet") => {
                typed::<ReplicaSet>(object)?;
                ("ReplicaSet", replicas, "spec", "")
            }
            ("apps/v1", "StatefulSet") => {
                typed::<StatefulSet>(object)?;
                ("StatefulSet", replicas, "spec", "")
            }
            // One node, one pod.
            ("apps/v1", "DaemonSet") => {
                typed::<DaemonSet>(object)?;
                ("DaemonSet", &[], "spec", "")
            }
            ("batch/v1", "Job") => {
                typed::<Job>(object)?;
                ("Job", JOB, "spec", "spec.suspend")
            }
            ("batch/v1", "CronJob") => {
                typed::<CronJob>(object)?;
                ("CronJob", JOB, "spec.jobTemplate.spec", "spec.suspend")
            }
            _ => return Ok(None),
        };
        let at = |path: &str| object.pointer(&format!("/{}", path.replace('.', "/")));
        let spec = at(path).unwrap_or(&Value::Null);
        let number = |(place, field): (usize, &&'static str)| {
            let count = spec.get(*field).and_then(Value::as_i64);
            Some((*field, count.or((place == 0).then_some(1))?))
        };
        let is_set =
            |path: &str| !path.is_empty() && at(path).and_then(Value::as_bool) == Some(true);
        let stopped = Some(stopped).filter(|path| is_set(path));
        Ok(Some(Self {
            kind,
            metadata: object
                .get("metadata")
                .map(decode)
                .transpose()?
                .unwrap_or_default(),
            path,
            selector: spec.get("selector").map(decode).transpose()?,
            manual_selector: spec.get("manualSelector").and_then(Value::as_bool) == Some(true),
            template: spec
                .get("template")
                .map(decode)
                .transpose()?
                .unwrap_or_default(),
            counts: counts.iter().enumerate().filter_map(number).collect(),
            schedule: at("spec.schedule")
                .and_then(Value::as_str)
                .map(str::to_owned),
            stopped: stopped.map(|path| {
                if path == "spec.paused" {
                    "spec.paused: true"
                } else {
                    "spec.suspend: true"
                }
            }),
            keeps_old: kind == "Deployment" && keeps_old(spec),
            queued: object.pointer(super::QUEUE).is_some(),
            after_pods,
        }))
    }

    /// Returns `Kind namespace/name`.
    pub fn place(&self) -> String {
        let name = self.metadata.name.as_deref().unwrap_or("(no name)");
        format!("{} {}/{name}", self.kind, namespace(&self.metadata))
    }

    /// Says whether the pods have the same names on a cluster.
    pub(super) fn names_are_fixed(&self) -> bool {
        self.kind == "StatefulSet"
    }

    /// Returns the pods that the controller makes, named `NAME-N` with `infix` before the number.
    pub(super) fn pods(&self, infix: &str) -> Vec<Pod> {
        let runs = self.stopped.is_none() || self.queued;
        let count = self
            .counts
            .iter()
            .map(|(_, count)| *count)
            .min()
            .unwrap_or(1);
        let name = self.metadata.name.as_deref().unwrap_or("(no name)");
        let pod = |number| Pod {
            metadata: ObjectMeta {
                name: Some(format!("{name}-{infix}{number}")),
                generate_name: None,
                namespace: self.metadata.namespace.clone(),
                ..self.template.metadata.clone().unwrap_or_default()
            },
            spec: self.template.spec.clone(),
            status: None,
        };
        (0..if runs { count } else { 0 }).map(pod).collect()
    }

    /// Returns the refusal of a change of this object to the new one, if there is one.
    pub(super) fn refuses(&self, new: &Self) -> Option<String> {
        let immutable = |field: &str| Some(format!("spec.{field}: {}", super::IMMUTABLE));
        if self.kind == "CronJob" {
            None
        } else if self.selector != new.selector {
            immutable("selector")
        } else if self.kind == "Job" && self.template != new.template {
            immutable("template")
        } else {
            None
        }
    }
}
