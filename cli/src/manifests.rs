//! Kubernetes manifests from YAML files: the kinds that matter for claims, typed and decoded strictly. Workloads become
//! the pods that their controllers would make; other kinds are passed over, and named.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use divvy_api::names;
use divvy_api::policy::{self, GpuPolicy};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, ReplicaSet, StatefulSet};
use k8s_openapi::api::batch::v1::{CronJob, Job};
use k8s_openapi::api::core::v1::{Namespace, Pod, PodTemplateSpec};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::strict::decode;

/// The objects of a manifest, in the order of the file.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Manifests {
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) templates: Vec<ResourceClaimTemplate>,
    pub(crate) claims: Vec<ResourceClaim>,
    /// Those of the file, and those of its workloads.
    pub(crate) pods: Vec<Pod>,
    pub(crate) policies: Vec<GpuPolicy>,
    /// Objects of other kinds, as `kind name`.
    pub(crate) passed_over: Vec<String>,
}

/// What a file is called in messages.
pub(crate) fn source(path: &Path) -> String {
    if path.as_os_str() == "-" { "standard input".to_owned() } else { path.display().to_string() }
}

/// The files that `kubectl apply -f FOLDER` takes.
fn files_of(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> =
        fs_err::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|e| e == "yaml" || e == "yml" || e == "json"));
    files.sort();
    if files.is_empty() {
        bail!("{}: no .yaml, .yml or .json file in it", folder.display());
    }
    Ok(files)
}

/// What limits the pods that a Job runs at once.
const JOB: &[&str] = &["parallelism", "completions"];

impl Manifests {
    /// What is in all of these files, as one set.
    pub(crate) fn of_files(files: &[PathBuf]) -> Result<Self> {
        let mut manifests = Self::default();
        for file in files {
            manifests.read(file)?;
        }
        Ok(manifests)
    }

    /// Adds what is in a file, in those of a folder, or in standard input (`-`).
    fn read(&mut self, path: &Path) -> Result<()> {
        if path.as_os_str() == "-" {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("standard input")?;
            return self.add_all(&source(path), &text);
        }
        let files = if path.is_dir() { files_of(path)? } else { vec![path.to_owned()] };
        for file in files {
            self.add_all(&source(&file), &fs_err::read_to_string(&file)?)?;
        }
        Ok(())
    }

    /// Reads all documents of a YAML (or JSON) text; `name` says where it came from.
    pub(crate) fn parse(name: &str, text: &str) -> Result<Self> {
        let mut manifests = Self::default();
        manifests.add_all(name, text)?;
        Ok(manifests)
    }

    fn add_all(&mut self, name: &str, text: &str) -> Result<()> {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(text).with_context(|| format!("{name} is not YAML"))?;
        for (number, document) in documents.iter().enumerate() {
            if !document.is_null() {
                self.add(document).with_context(|| format!("{name}, document {}", number + 1))?;
            }
        }
        if documents.iter().all(Value::is_null) {
            bail!("{name}: no objects in it");
        }
        Ok(())
    }

    fn add(&mut self, object: &Value) -> Result<()> {
        let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default();
        let (version, kind) = (text("apiVersion"), text("kind"));
        match (version, kind) {
            ("", _) | (_, "") => bail!("apiVersion and kind must be set"),
            ("v1", "Namespace") => self.namespaces.push(typed(object)?),
            ("v1", "Pod") => self.pods.push(typed(object)?),
            ("apps/v1", "Deployment") => self.workload::<Deployment>(object, "/spec", &["replicas"])?,
            ("apps/v1", "ReplicaSet") => self.workload::<ReplicaSet>(object, "/spec", &["replicas"])?,
            ("apps/v1", "StatefulSet") => self.workload::<StatefulSet>(object, "/spec", &["replicas"])?,
            // One node, one pod.
            ("apps/v1", "DaemonSet") => self.workload::<DaemonSet>(object, "/spec", &[])?,
            ("batch/v1", "Job") => self.workload::<Job>(object, "/spec", JOB)?,
            ("batch/v1", "CronJob") => self.workload::<CronJob>(object, "/spec/jobTemplate/spec", JOB)?,
            ("resource.k8s.io/v1", "DeviceClass") => self.classes.push(typed(object)?),
            ("resource.k8s.io/v1", "ResourceClaim") => self.claims.push(typed(object)?),
            ("resource.k8s.io/v1", "ResourceClaimTemplate") => self.templates.push(typed(object)?),
            (names::API_VERSION, policy::KIND) => self.policies.push(policy::decode_policy(object)?),
            ("v1", "List") => {
                for item in object.get("items").and_then(Value::as_array).into_iter().flatten() {
                    self.add(item)?;
                }
            }
            (version, "DeviceClass" | "ResourceClaim" | "ResourceClaimTemplate")
                if version.starts_with("resource.k8s.io/") =>
            {
                bail!(
                    "{kind} of {version} is not read: write resource.k8s.io/v1 (served since Kubernetes 1.34)"
                )
            }
            (version, policy::KIND) => {
                bail!("{kind} of {version} does not exist: write {}", names::API_VERSION)
            }
            (_, kind) => self.passed_over.push(format!("{kind} {}", name_of(object))),
        }
        Ok(())
    }

    /// The pods that a controller makes of a workload: `spec` is where it has their template and what limits their count.
    fn workload<T: DeserializeOwned>(&mut self, object: &Value, spec: &str, limits: &[&str]) -> Result<()> {
        let _: T = typed(object)?;
        let meta: ObjectMeta = object.get("metadata").map(decode).transpose()?.unwrap_or_default();
        let spec = object.pointer(spec).unwrap_or(&Value::Null);
        let template: PodTemplateSpec = spec.get("template").map(decode).transpose()?.unwrap_or_default();
        let number_in = |field: &&str| spec.get(field).and_then(Value::as_u64);
        let first = limits.first().and_then(number_in).unwrap_or(1);
        for number in 0..limits.iter().filter_map(number_in).fold(first, u64::min) {
            let metadata = ObjectMeta {
                name: Some(format!("{}-{number}", meta.name.as_deref().unwrap_or("workload"))),
                namespace: meta.namespace.clone(),
                ..template.metadata.clone().unwrap_or_default()
            };
            self.pods.push(Pod { metadata, spec: template.spec.clone(), status: None });
        }
        Ok(())
    }
}

fn name_of(object: &Value) -> &str {
    object.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("(no name)")
}

fn typed<T: DeserializeOwned>(object: &Value) -> Result<T> {
    let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default();
    decode(object).with_context(|| format!("{kind} {}", name_of(object)))
}

#[cfg(test)]
mod tests {
    use super::Manifests;

    fn refused(text: &str) -> String {
        format!("{:#}", Manifests::parse("x.yaml", text).unwrap_err())
    }

    #[test]
    fn documents_are_sorted_by_kind_and_other_kinds_are_passed_over() {
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n---\n# nothing\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}}\n- {apiVersion: v1, kind: Service, metadata: {name: s}}\n";
        let read = Manifests::parse("x.yaml", text).unwrap();
        assert_eq!((read.pods.len(), read.claims.len()), (1, 1));
        assert_eq!(read.passed_over, ["Service s"]);
        let old = "apiVersion: resource.k8s.io/v1beta1\nkind: ResourceClaim\n";
        assert!(refused(old).contains("write resource.k8s.io/v1"), "{}", refused(old));
        assert!(refused("kind: Pod\n").contains("apiVersion and kind must be set"));
        assert!(refused("---\n").ends_with("no objects in it"));
    }

    #[test]
    fn workloads_become_the_pods_of_their_controllers() {
        let template = "template: {spec: {containers: []}}";
        for (version, kind, spec, pods) in [
            ("apps/v1", "Deployment", format!("replicas: 2, {template}"), 2),
            ("apps/v1", "ReplicaSet", template.to_owned(), 1),
            ("apps/v1", "StatefulSet", format!("replicas: 3, {template}"), 3),
            ("apps/v1", "DaemonSet", template.to_owned(), 1),
            ("batch/v1", "Job", format!("parallelism: 2, completions: 5, {template}"), 2),
            ("batch/v1", "Job", format!("parallelism: 5, completions: 2, {template}"), 2),
            ("batch/v1", "Job", format!("completions: 5, {template}"), 1),
            ("batch/v1", "CronJob", format!("schedule: '@daily', jobTemplate: {{spec: {{{template}}}}}"), 1),
            ("apps/v1", "Deployment", format!("replicas: 0, {template}"), 0),
        ] {
            let text = format!(
                "{{apiVersion: {version}, kind: {kind}, metadata: {{name: w, namespace: ns}}, spec: {{{spec}}}}}"
            );
            let read = Manifests::parse("x", &text).unwrap();
            assert_eq!(read.pods.len(), pods, "{kind}");
            if let Some(pod) = read.pods.last() {
                assert_eq!(pod.metadata.name, Some(format!("w-{}", pods - 1)));
                assert_eq!(pod.metadata.namespace.as_deref(), Some("ns"));
            }
        }
        let text = "{apiVersion: batch/v1, kind: Job, metadata: {name: w}, spec: {template: {spec: {container: []}}}}";
        assert_eq!(
            refused(text),
            "x.yaml, document 1: Job w: unknown field \"spec.template.spec.container\" (did you mean \"containers\"?)"
        );
    }
}
