//! Kubernetes manifests from YAML files: the kinds that matter for claims, typed and decoded
//! strictly, each object once as the API server keeps it. Other kinds are passed over, and named.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use divvy_api::names;
use divvy_api::policy::{self, GpuPolicy, GpuPolicySpec};
use k8s_openapi::Metadata;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceTaintRule, ResourceClaim, ResourceClaimTemplate,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::strict::{decode, known_fields, without_rust};
use crate::{Usage, convert};
use divvy_why::driver;

mod odd;
mod workload;

pub use workload::WorkloadResource;

/// Objects of a set of manifests, in the order in which they are first applied.
#[derive(Debug, Default, PartialEq)]
pub struct Manifests {
    pub namespaces: Vec<Namespace>,
    pub classes: Vec<DeviceClass>,
    pub templates: Vec<ResourceClaimTemplate>,
    pub claims: Vec<ResourceClaim>,
    /// Pods of the files themselves; [`Manifests::all_pods`] has those of the workloads, too.
    pub pods: Vec<Pod>,
    pub workloads: Vec<WorkloadResource>,
    pub taint_rules: Vec<DeviceTaintRule>,
    pub policies: Vec<GpuPolicy>,
    /// Handlers of RuntimeClasses, by name.
    pub handlers: BTreeMap<String, String>,
    /// Objects of other kinds, as `kind name`.
    pub passed_over: Vec<String>,
    /// Objects that ask for GPUs, or decide about them, and cannot be run here, with the reason.
    pub not_run: Vec<String>,
    /// Objects that the API server takes and the demo treats otherwise than a reader may think,
    /// each with the reason.
    pub notes: Vec<String>,
    /// Changes of an object of the same manifests that the API server refuses.
    pub refused: Vec<String>,
    /// Number of names made from `generateName`.
    generated: usize,
}

/// Returns the name of a file for messages.
pub fn source(path: &Path) -> String {
    if path.as_os_str() == "-" {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    }
}

/// Returns the files that `kubectl apply -f FOLDER` takes; `recursive` is its `-R`.
fn files_of(folder: &Path, recursive: bool) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs_err::read_dir(folder)? {
            let entry = entry?;
            // A link to a folder may lead in a circle.
            if entry.file_type()?.is_dir() {
                if recursive {
                    folders.push(entry.path());
                }
            } else {
                files.push(entry.path());
            }
        }
    }
    files.retain(|file| {
        file.extension()
            .is_some_and(|e| e == "yaml" || e == "yml" || e == "json")
    });
    files.sort();
    if files.is_empty() {
        let further = if recursive {
            ""
        } else {
            " (-R looks into its folders, too)"
        };
        bail!(
            "{}: no .yaml, .yml or .json file in it{further}",
            folder.display()
        );
    }
    Ok(files)
}

/// Reads a file, those of a folder, or standard input (`-`): the name of each, and its text.
pub fn texts(path: &Path, recursive: bool) -> Result<Vec<(String, String)>> {
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::stdin()
            .read_to_string(&mut text)
            .context("standard input")?;
        return Ok(vec![(source(path), text)]);
    }
    let files = if path.is_dir() {
        files_of(path, recursive)?
    } else {
        vec![path.to_owned()]
    };
    let read = |file: PathBuf| Ok((source(&file), fs_err::read_to_string(&file)?));
    files.into_iter().map(read).collect()
}

/// Words of the API server for a spec that cannot be changed.
const IMMUTABLE: &str = "Invalid value: field is immutable";
/// The same for Pods.
const POD_IMMUTABLE: &str =
    "Forbidden: pod updates may not change fields other than `spec.containers[*].image`";
/// Label that hands a workload to Kueue, which resumes it when its quota is free.
const QUEUE: &str = "/metadata/labels/kueue.x-k8s.io~1queue-name";

impl Manifests {
    /// Says whether they use names of NVIDIA's driver, and none of divvy's.
    pub fn is_for_nvidia(&self) -> bool {
        let used = self.names_of_drivers();
        let is = |domain: &str| used.iter().any(|name| name.ends_with(domain));
        (is(driver::NVIDIA) || is(driver::NVIDIA_MIG)) && !is(names::GROUP)
    }

    /// Returns the requests and configs of all claims and templates.
    fn devices(&self) -> impl Iterator<Item = &DeviceClaim> {
        let claims = self.claims.iter().filter_map(|claim| claim.spec.as_ref());
        let templates = self.templates.iter();
        let templates = templates.filter_map(|template| template.spec.as_ref()?.spec.as_ref());
        let all = claims.chain(templates);
        all.filter_map(|spec| spec.devices.as_ref())
    }

    /// Returns the names of drivers and of classes that claims and classes use.
    fn names_of_drivers(&self) -> Vec<&str> {
        let mut all = Vec::new();
        for devices in self.devices() {
            for request in devices.requests.iter().flatten() {
                let exactly = request.exactly.iter().map(|of| &of.device_class_name);
                let alternatives = request.first_available.iter().flatten();
                let alternatives = alternatives.map(|of| &of.device_class_name);
                all.extend(exactly.chain(alternatives).map(String::as_str));
            }
            let opaque = devices.config.iter().flatten();
            let opaque = opaque.filter_map(|config| config.opaque.as_ref());
            all.extend(opaque.map(|opaque| opaque.driver.as_str()));
        }
        let classes = self.classes.iter().filter_map(|class| class.spec.as_ref());
        let expressions = classes.flat_map(|spec| spec.selectors.iter().flatten());
        let expressions = expressions.filter_map(|selector| selector.cel.as_ref());
        // Of an expression, what it compares the driver with.
        all.extend(expressions.flat_map(|cel| cel.expression.split(['"', '\''])));
        all
    }

    /// Reads all of these files as one set.
    pub fn of_files(files: &[PathBuf]) -> Result<Self> {
        let mut manifests = Self::default();
        for file in files {
            manifests.read(file)?;
        }
        Ok(manifests)
    }

    /// Adds what is in a file, in those of a folder, or in standard input (`-`).
    pub fn read(&mut self, path: &Path) -> Result<()> {
        for (name, text) in texts(path, false)? {
            self.add_all(&name, &text)?;
        }
        Ok(())
    }

    /// Reads all documents of a YAML (or JSON) text; `name` says where it came from.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let mut manifests = Self::default();
        manifests.add_all(name, text)?;
        Ok(manifests)
    }

    /// Adds all documents of a text; `name` says where it came from. The error names all that are
    /// wrong.
    pub fn add_all(&mut self, name: &str, text: &str) -> Result<()> {
        let documents: Vec<Value> = match serde_saphyr::from_multiple(text) {
            _ if odd::is_template(text) => return Err(odd::template(name)),
            Ok(documents) => documents,
            Err(_) if text.contains("{{") => return Err(odd::template(name)),
            Err(error) => {
                let error = anyhow::Error::new(error).context(format!("{name} is not YAML"));
                return Err(Usage(format!("{error:#}")).into());
            }
        };
        let mut wrong = Vec::new();
        for (number, document) in documents.iter().enumerate() {
            if !document.is_null()
                && let Err(error) = self.add(document)
            {
                wrong.push(format!("{name}, document {}: {error:#}", number + 1));
            }
        }
        if documents.iter().all(Value::is_null) {
            bail!("{name}: no objects in it");
        }
        together(&wrong)
    }

    fn add(&mut self, object: &Value) -> Result<()> {
        let object = &self.named(object);
        let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or_default();
        let (version, kind) = (text("apiVersion"), text("kind"));
        match (version, kind) {
            ("", "") => bail!("{}", odd::no_object(object)),
            (_, "") if convert::is_configuration(object) => bail!("{}", odd::no_object(object)),
            ("", _) | (_, "") => bail!("apiVersion and kind must be set"),
            ("v1", "Namespace") => drop(apply(&mut self.namespaces, typed(object)?)),
            ("v1", "Pod") => {
                let changed = apply_fixed(&mut self.pods, object, POD_IMMUTABLE)?;
                self.refused.extend(changed);
            }
            ("resource.k8s.io/v1", "DeviceClass") => {
                drop(apply(&mut self.classes, typed(object)?));
            }
            ("resource.k8s.io/v1", "DeviceTaintRule") => {
                drop(apply(&mut self.taint_rules, typed(object)?));
            }
            ("resource.k8s.io/v1", "ResourceClaim") => {
                let changed = apply_fixed(&mut self.claims, object, IMMUTABLE)?;
                self.refused.extend(changed);
            }
            ("resource.k8s.io/v1", "ResourceClaimTemplate") => {
                let changed = apply_fixed(&mut self.templates, object, IMMUTABLE)?;
                self.refused.extend(changed);
            }
            (names::API_VERSION, policy::KIND) => {
                let spec = object.get("spec").unwrap_or(&Value::Null);
                known_fields::<GpuPolicySpec>(spec, "spec")
                    .with_context(|| format!("{kind} {}", name_of(object)))?;
                let policy = policy::decode_policy(object)
                    .map_err(|error| anyhow::anyhow!(without_rust(&error.to_string())))
                    .with_context(|| format!("{kind} {}", name_of(object)))?;
                self.policies.retain(|other| other.name != policy.name);
                self.policies.push(policy);
            }
            ("v1", "List") => {
                for item in object
                    .get("items")
                    .and_then(Value::as_array)
                    .into_iter()
                    .flatten()
                {
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
            (version, "DeviceTaintRule") if version.starts_with("resource.k8s.io/") => {
                bail!(
                    "{kind} of {version} is not read: write resource.k8s.io/v1 (served since Kubernetes 1.37)"
                )
            }
            (version, policy::KIND) => {
                bail!(
                    "{kind} of {version} does not exist: write {}",
                    names::API_VERSION
                )
            }
            (version, kind) => {
                match WorkloadResource::read(version, kind, object, self.pods.len())? {
                    Some(workload) => self.workload(workload, object),
                    None => self.pass_over(version, kind, object),
                }
            }
        }
        Ok(())
    }

    /// Gives an object that has only `generateName` a name, as the API server does at creation.
    fn named(&mut self, object: &Value) -> Value {
        let mut object = object.clone();
        let text = |field: &str| object.pointer(field).and_then(Value::as_str);
        let prefix = text("/metadata/generateName").unwrap_or_default();
        if prefix.is_empty() || text("/metadata/name").is_some_and(|name| !name.is_empty()) {
            return object;
        }
        let name = format!("{prefix}{}", suffix(self.generated));
        self.generated += 1;
        self.notes.push(format!(
            "{} {name}: metadata.generateName: kubectl create makes it, each time anew; kubectl apply refuses it",
            text("/kind").unwrap_or_default()
        ));
        if let Some(meta) = object.get_mut("metadata") {
            meta["name"] = json!(name);
        }
        object
    }

    /// Applies a workload: the same kind, namespace and name is the same object.
    fn workload(&mut self, new: WorkloadResource, object: &Value) {
        let place = new.place();
        if let Some(stopped) = new.stopped {
            let queued = object.pointer(QUEUE).is_some();
            self.notes.push(if queued {
                format!("{place}: {stopped}: it runs here as after its admission by Kueue")
            } else {
                format!("{place}: {stopped}: it makes no pods")
            });
        }
        let is_it = |old: &&mut WorkloadResource| {
            new.metadata.name.is_some() && old.kind == new.kind && old.place() == place
        };
        match self.workloads.iter_mut().find(is_it) {
            Some(old) => {
                self.refused
                    .extend(old.refuses(&new).map(|what| format!("{place}: {what}")));
                *old = new;
            }
            None => self.workloads.push(new),
        }
    }

    /// Notes an object that is not run, with what of it would make a difference on a cluster.
    fn pass_over(&mut self, version: &str, kind: &str, object: &Value) {
        let name = name_of(object);
        let what = format!("{kind} {name}");
        if let ("node.k8s.io/v1", "RuntimeClass", Some(handler)) =
            (version, kind, object.get("handler").and_then(Value::as_str))
        {
            self.handlers.insert(name.to_owned(), handler.to_owned());
        }
        let claims = [
            "/spec/resourceClaims",
            "/spec/podGroupTemplates",
            "/spec/template/spec/resourceClaims",
        ];
        let has_claims = claims.iter().any(|path| {
            object
                .pointer(path)
                .is_some_and(|value| value.to_string().contains("esourceClaim"))
        });
        let group = version.split('/').next().unwrap_or_default();
        let note = match (group, kind) {
            ("scheduling.k8s.io", "PodGroup" | "Workload") if has_claims => {
                "each pod gets claims of its own here, as with the feature gate DRAWorkloadResourceClaims off (its \
                 default); with the gate the pods of a group share the claims that the group names"
            }
            ("resource.k8s.io", "ResourceSlice") => {
                "the demo's node has only the devices of its own driver"
            }
            ("v1", "ResourceQuota" | "LimitRange") => {
                "quotas and limits of a namespace are not counted here"
            }
            ("kustomize.config.k8s.io", "Kustomization") => {
                return self.not_run.push(format!("{what} {}", odd::KUSTOMIZE));
            }
            ("nvidia.com", "ClusterPolicy") => {
                "divvy takes the place of its devicePlugin and migManager: docs/install/gpu-operator.md says which to turn off"
            }
            _ => return self.others(&what, object),
        };
        self.notes.push(format!("{what} is passed over: {note}"));
    }

    /// Takes the pods of an object whose controller does not run here, each once, and names what
    /// asks for GPUs and cannot be run.
    fn others(&mut self, what: &str, object: &Value) {
        let name = name_of(object);
        let mut paths = Vec::new();
        for (number, (path, template)) in convert::pods(object).into_iter().enumerate() {
            let mut template = template;
            let containers = template.pointer_mut("/spec/containers");
            for container in containers
                .and_then(Value::as_array_mut)
                .into_iter()
                .flatten()
            {
                // The controller knows the image.
                if container.get("image").is_none() {
                    container["image"] = json!("of-its-controller");
                }
            }
            let pod = Pod {
                metadata: ObjectMeta {
                    name: Some(format!("{name}-{number}")),
                    namespace: object
                        .pointer("/metadata/namespace")
                        .and_then(Value::as_str)
                        .map(str::to_owned),
                    ..part(&template, "metadata").unwrap_or_default()
                },
                spec: part(&template, "spec"),
                status: None,
            };
            if pod.spec.is_none() {
                self.not_run
                    .push(format!("{what}: {path} is not the spec of a pod"));
                continue;
            }
            self.pods.push(pod);
            paths.push(path);
        }
        if !paths.is_empty() {
            let paths = paths.join(", ");
            self.notes.push(format!(
                "{what}: its controller does not run here: the pod of {paths} runs, once"
            ));
        } else if let Some(path) = convert::asks_elsewhere(object) {
            self.not_run.push(format!(
                "{what} asks for a GPU in {path}, and its controller does not run here"
            ));
        } else if convert::is_configuration(object) {
            self.not_run.push(format!("{what} {}", odd::CONFIGURES));
        } else {
            self.passed_over.push(what.to_owned());
        }
    }

    /// Returns the pods of the files and those that controllers make of the workloads, in the
    /// order of the files. Their names differ: on a cluster only those of a StatefulSet are like
    /// these, and all others have a random end.
    pub fn all_pods(&self) -> Vec<Pod> {
        let mut pods = Vec::new();
        let name_of = |pod: &Pod| {
            (
                namespace(&pod.metadata),
                pod.metadata.name.clone().unwrap_or_default(),
            )
        };
        let fixed = self
            .workloads
            .iter()
            .filter(|workload| workload.names_are_fixed());
        let mut taken: std::collections::BTreeSet<(String, String)> =
            self.pods.iter().map(name_of).collect();
        taken.extend(
            fixed
                .flat_map(|workload| workload.pods(""))
                .map(|pod| name_of(&pod)),
        );
        let mut own = self.pods.iter().enumerate().peekable();
        for workload in &self.workloads {
            while let Some((_, pod)) = own.next_if(|(number, _)| *number < workload.after_pods) {
                pods.push(pod.clone());
            }
            let mut made = workload.pods("");
            if !workload.names_are_fixed() {
                if made.iter().any(|pod| taken.contains(&name_of(pod))) {
                    made = workload.pods(&format!("{}-", workload.kind.to_lowercase()));
                }
                taken.extend(made.iter().map(name_of));
            }
            pods.append(&mut made);
        }
        pods.extend(own.map(|(_, pod)| pod.clone()));
        pods
    }
}

/// Returns an error with these lines, if there is any.
pub fn together(wrong: &[String]) -> Result<()> {
    if wrong.is_empty() {
        Ok(())
    } else {
        bail!("{}", wrong.join("\n"))
    }
}

/// Returns the namespace of an object.
pub fn namespace(meta: &ObjectMeta) -> String {
    meta.namespace
        .clone()
        .unwrap_or_else(|| "default".to_owned())
}

/// Puts an object among those of its kind, as `kubectl apply` does: one with the namespace and
/// name of another takes its place. Returns the former one.
fn apply<T: Metadata<Ty = ObjectMeta>>(list: &mut Vec<T>, new: T) -> Option<T> {
    let same = |old: &ObjectMeta| {
        let new = new.metadata();
        new.name.is_some() && old.name == new.name && namespace(old) == namespace(new)
    };
    if let Some(old) = list.iter_mut().find(|old| same(old.metadata())) {
        Some(std::mem::replace(old, new))
    } else {
        list.push(new);
        None
    }
}

/// The same for a kind whose spec cannot be changed; returns the refusal of a change.
fn apply_fixed<T>(list: &mut Vec<T>, object: &Value, words: &str) -> Result<Option<String>>
where
    T: Metadata<Ty = ObjectMeta> + DeserializeOwned + Serialize,
{
    let new: T = typed(object)?;
    let place = format!(
        "{} {}/{}",
        object
            .get("kind")
            .and_then(Value::as_str)
            .unwrap_or_default(),
        namespace(new.metadata()),
        name_of(object)
    );
    let spec =
        |object: &T| Ok::<_, anyhow::Error>(serde_json::to_value(object)?.get("spec").cloned());
    let now = spec(&new)?;
    let before = apply(list, new).map(|old| spec(&old)).transpose()?;
    Ok(before
        .filter(|before| *before != now)
        .map(|_| format!("{place}: spec: {words} (the manifests have it twice, and not alike)")))
}

/// Returns the end of a generated name, of the characters that Kubernetes uses.
fn suffix(mut number: usize) -> String {
    const CHARACTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let mut end = [b'b'; 5];
    for place in end.iter_mut().rev() {
        *place = CHARACTERS
            .get(number % CHARACTERS.len())
            .copied()
            .unwrap_or(b'b');
        number /= CHARACTERS.len();
    }
    end.iter().map(|byte| char::from(*byte)).collect()
}

/// Reads a part of a template of pods; fields that a pod has not are left out.
fn part<T: DeserializeOwned>(template: &Value, field: &str) -> Option<T> {
    serde_json::from_value(template.get(field)?.clone()).ok()
}

fn name_of(object: &Value) -> &str {
    object
        .pointer("/metadata/name")
        .and_then(Value::as_str)
        .unwrap_or("(no name)")
}

fn typed<T: DeserializeOwned>(object: &Value) -> Result<T> {
    let kind = object
        .get("kind")
        .and_then(Value::as_str)
        .unwrap_or_default();
    decode(object).with_context(|| format!("{kind} {}", name_of(object)))
}

#[cfg(test)]
mod tests;
