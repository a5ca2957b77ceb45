//! Manifests that the demo runs: those in `examples/`, or those that it is given.

use std::path::PathBuf;

use anyhow::Result;
use divvy_api::names::DRIVER;
use divvy_api::policy::GpuPolicy;

use super::needs;
use super::report::Scenario;
use divvy_cli::Usage;
use divvy_cli::manifests::{self, Manifests};
use divvy_why::cause;
use divvy_why::driver::NVIDIA;

macro_rules! examples {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../../examples/", $name, "/manifests.yaml")))),*]
    };
}

/// Every folder of `examples/`, in the order of the demo.
pub(super) const EXAMPLES: &[(&str, &str)] = examples![
    "mode-lock",
    "one-gpu",
    "two-pods-two-gpus",
    "shared-claim",
    "shared-claim-mps",
    "two-containers",
    "two-claims",
    "two-gpus",
    "select-by-attribute",
    "job",
    "deployment",
    "statefulset",
    "device-config",
    "extended-resource",
    "quota-per-class",
    "device-taint",
    "admin-access",
    "prioritised-list",
    "mig-partitions",
    "mig-two-containers",
    "mig-same-gpu",
    "share-small",
    "share-pytorch",
    "share-many",
    "share-spread",
    "share-pack",
    "share-interval",
    "share-limit",
    "whole-mig-and-shares",
    "class-per-team",
    "admin-beside-others",
    "policy-per-gpu",
    "policy-shares",
    "share-percent",
    "mps-share",
    "mig-share",
    "mig-mps",
    "policy-profiles",
    "policy-one-mode",
];

/// Every GPU in every mode.
const ALL_MODES: &str = include_str!("../../examples/all-modes.yaml");

/// Policies that the program has in it, by the names under which a checkout has them.
const BUILT_IN: [(&str, &str); 2] = [
    (cause::ALL_MODES, ALL_MODES),
    (
        cause::BY_PERCENT,
        include_str!("../../examples/by-percent.yaml"),
    ),
];

/// A manifest to run.
#[derive(Debug, Default)]
pub(super) struct Example {
    pub(super) name: String,
    /// The comment in its first line.
    pub(super) title: Option<String>,
    pub(super) manifests: Manifests,
}

impl Example {
    pub(super) fn parse(name: &str, text: &str) -> Result<Self> {
        let title = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("# "))
            .map(str::to_owned);
        Ok(Self {
            name: name.to_owned(),
            title,
            manifests: Manifests::parse(name, text)?,
        })
    }

    /// Returns what is known of it before it runs.
    pub(super) fn scenario(&self) -> Scenario {
        let passed_over = self.manifests.passed_over.iter();
        Scenario {
            name: self.name.clone(),
            title: self.title.clone(),
            policies: self
                .manifests
                .policies
                .iter()
                .map(|policy| policy.name.clone())
                .collect(),
            notes: passed_over
                .map(|what| format!("{what} is passed over: only pods and claims run here"))
                .collect(),
            ..Scenario::default()
        }
    }
}

/// Manifests that one node runs, one after another, under these policies.
#[derive(Debug)]
pub(super) struct Stay {
    /// Name of the node's driver.
    pub(super) driver: &'static str,
    pub(super) policies: Vec<GpuPolicy>,
    pub(super) examples: Vec<Example>,
    /// Permission to pass over manifests that the node cannot run.
    pub(super) selects: bool,
}

impl Default for Stay {
    fn default() -> Self {
        Self {
            driver: DRIVER,
            policies: Vec::new(),
            examples: Vec::new(),
            selects: false,
        }
    }
}

/// The demo's policy for examples that need all modes.
pub(super) fn all_modes() -> Result<Vec<GpuPolicy>> {
    Ok(Manifests::parse("all-modes.yaml", ALL_MODES)?.policies)
}

/// The examples whose names contain the text: those for all modes on one node, those without a
/// policy on another, and those with policies of their own on one each.
pub(super) fn stays(only: Option<&str>) -> Result<Vec<Stay>> {
    let mut in_all_modes = Stay {
        policies: all_modes()?,
        selects: true,
        ..Stay::default()
    };
    let mut by_default = Stay {
        selects: true,
        ..Stay::default()
    };
    let mut others = Vec::new();
    for (name, text) in EXAMPLES
        .iter()
        .filter(|(name, _)| only.is_none_or(|only| name.contains(only)))
    {
        let example = Example::parse(name, text)?;
        if !example.manifests.policies.is_empty() {
            let policies = example.manifests.policies.clone();
            others.push(Stay {
                policies,
                examples: vec![example],
                selects: true,
                ..Stay::default()
            });
        } else if needs::all_modes(&example.manifests)? {
            in_all_modes.examples.push(example);
        } else {
            by_default.examples.push(example);
        }
    }
    let mut stays = vec![in_all_modes, by_default];
    stays.extend(others);
    stays.retain(|stay| !stay.examples.is_empty());
    if stays.is_empty() {
        let names: Vec<&str> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        let only = only.unwrap_or_default();
        return Err(Usage(format!(
            "--only {only}: no example has that in its name ({})",
            names.join(", ")
        ))
        .into());
    }
    Ok(stays)
}

/// Reads files as one manifest: the policies in it are those of the node. Without any it is
/// as the chart leaves it. Without a name of the driver, it follows from the names that they use.
/// The error names all that are wrong.
pub(super) fn of_files(
    files: &[PathBuf],
    recursive: bool,
    driver: Option<&'static str>,
) -> Result<Stay> {
    let names: Vec<String> = files.iter().map(|file| manifests::source(file)).collect();
    let mut manifests = Manifests::default();
    let mut wrong = Vec::new();
    for file in files {
        let built_in = BUILT_IN.iter().find(|(name, _)| file.as_os_str() == *name);
        let texts = if let Some((name, text)) = built_in.filter(|_| !file.exists()) {
            vec![((*name).to_owned(), (*text).to_owned())]
        } else {
            let texts = manifests::texts(file, recursive);
            texts.map_err(|error| Usage(format!("{error:#}")))?
        };
        for (name, text) in texts {
            match manifests.add_all(&name, &text) {
                Err(error) if error.is::<Usage>() => return Err(error),
                Err(error) => wrong.push(format!("{error:#}")),
                Ok(()) => {}
            }
        }
    }
    manifests::together(&wrong)?;
    let policies = manifests.policies.clone();
    let found = manifests.is_for_nvidia().then_some(NVIDIA);
    if driver.is_none() && found.is_some() {
        manifests.notes.insert(
            0,
            "classes and configs here are those of NVIDIA's driver, so that divvy stands in for it \
             (--driver-name gpu.divvy.dev for its own name)"
                .to_owned(),
        );
    }
    let example = Example {
        name: names.join(", "),
        title: None,
        manifests,
    };
    Ok(Stay {
        driver: driver.or(found).unwrap_or(DRIVER),
        policies,
        examples: vec![example],
        selects: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_form_one_set() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs_err::write(&path, text).unwrap();
            path
        };
        let claim = write(
            "1-template.yaml",
            "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: t}\n",
        );
        let pod = write(
            "2-pod.yaml",
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n",
        );
        for files in [vec![claim.clone(), pod], vec![folder.path().to_owned()]] {
            let stay = of_files(&files, false, None).unwrap();
            let all = stay
                .examples
                .iter()
                .map(|e| (e.manifests.templates.len(), e.manifests.pods.len()));
            assert_eq!(all.collect::<Vec<_>>(), [(1, 1)]);
        }
        // A template alone is looked through, too.
        assert_eq!(of_files(&[claim], false, None).unwrap().examples.len(), 1);
    }

    #[test]
    fn every_example_is_in_the_demo_and_in_the_index() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let index = fs_err::read_to_string(folder.join("README.md")).unwrap();
        let entries = fs_err::read_dir(folder).unwrap().map(Result::unwrap);
        let folders = entries.filter(|entry| entry.path().is_dir());
        let mut there: Vec<String> = folders
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect();
        there.sort();
        let mut shown: Vec<&str> = EXAMPLES.iter().map(|(name, _)| *name).collect();
        shown.sort_unstable();
        assert_eq!(there, shown);
        for name in shown {
            assert!(
                index.contains(&format!("\n| [{name}]({name}/README.md) |")),
                "{name} is not in the index"
            );
        }
    }

    /// Checks what a stranger's cluster needs of an example: see `examples/README.md`.
    #[test]
    fn every_example_can_be_applied_to_any_cluster() {
        let images = [
            "image: docker.io/nvidia/cuda:12.9.1-base-ubuntu24.04",
            "image: docker.io/pytorch/pytorch:2.8.0-cuda12.8-cudnn9-runtime",
        ];
        for (name, text) in EXAMPLES {
            let example = Example::parse(name, text).unwrap().manifests;
            let namespace = Some(format!("divvy-{name}"));
            let namespaces: Vec<_> = example
                .namespaces
                .iter()
                .map(|n| n.metadata.name.clone())
                .collect();
            assert_eq!(
                namespaces.as_slice(),
                std::slice::from_ref(&namespace),
                "{name}"
            );
            let pods = example.all_pods();
            let claims = example.claims.iter().map(|claim| &claim.metadata);
            let templates = example.templates.iter().map(|template| &template.metadata);
            for meta in claims
                .chain(templates)
                .chain(pods.iter().map(|pod| &pod.metadata))
            {
                assert_eq!(meta.namespace, namespace, "{name}: {meta:?}");
            }
            assert!(
                !pods.is_empty(),
                "{name}: no pod proves that the GPU is there"
            );
            for pod in pods.iter().filter_map(|pod| pod.spec.as_ref()) {
                let tolerates = |of: &k8s_openapi::api::core::v1::Toleration| {
                    of.key.as_deref() == Some("nvidia.com/gpu")
                };
                assert!(pod.tolerations.iter().flatten().any(tolerates), "{name}");
            }
            for image in text
                .lines()
                .map(str::trim)
                .filter(|line| line.starts_with("image:"))
            {
                assert!(images.contains(&image), "{name}: {image}");
            }
            for policy in &example.policies {
                assert!(
                    policy.spec.nodes.is_some(),
                    "{name}: the policy is for all nodes"
                );
            }
            let readme = format!(
                "{}/../examples/{name}/README.md",
                env!("CARGO_MANIFEST_DIR")
            );
            let readme = fs_err::read_to_string(readme).unwrap();
            for command in ["apply", "delete --ignore-not-found"] {
                assert!(
                    readme.contains(&format!(
                        "kubectl {command} -f examples/{name}/manifests.yaml"
                    )),
                    "{name}"
                );
            }
        }
        assert!(
            all_modes()
                .unwrap()
                .iter()
                .all(|policy| policy.spec.nodes.is_some())
        );
    }
}
