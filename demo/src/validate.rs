//! `divvy validate`: objects judged before they are applied, against the attributes of a simulated
//! fleet or of a cluster.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use divvy_allocator::{
    AllocError, AllocatedState, Allocator, Explanation, Features, Inputs, Outcome, Slices,
};
use divvy_cli::Usage;
use divvy_cli::format::{self, Output};
use divvy_cli::manifests::{Manifests, namespace};
use divvy_cli::objects;
use divvy_cli::status::read::Access;
use divvy_fleet::Kind;
use divvy_why::cause::{self, Reader, Scene};
use divvy_why::driver;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceRequest, DeviceToleration, ExactDeviceRequest, ResourceClaim,
    ResourceClaimSpec, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

use crate::examples;
use crate::fleet::{Fleet, Spec};
use crate::review::{Known, review};
use crate::world::classes;

/// Exit status where there are warnings and no errors.
const WARNINGS: u8 = 3;

/// Arguments of `divvy validate`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Manifests: a file, a folder, or - for standard input; may be given several times
    #[arg(short, long = "file", value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// The fleet whose devices are meant: nodes and their GPUs, such as 40*h100x8,10*l40sx4+l4x2.
    /// GpuPolicies of the manifests decide what it publishes. Without it, the cluster is asked
    #[arg(long, value_name = "FLEET", conflicts_with_all = ["kubeconfig", "context"])]
    sim: Option<Spec>,
    /// Label of the simulated nodes, which policies can select; may be given several times
    #[arg(long, value_name = "KEY=VALUE", requires = "sim", value_parser = divvy_cli::inventory::label)]
    node_label: Vec<(String, String)>,
    #[command(flatten)]
    access: Access,
    /// Name of the driver; without it, it follows from the names that the manifests use
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(driver::KNOWN))]
    driver_name: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
}

/// Judgement of a set of manifests.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Judgement {
    /// Parts that the API server refuses, or that nothing can satisfy.
    pub(crate) errors: Vec<String>,
    /// Parts that are taken and probably mean something else.
    pub(crate) warnings: Vec<String>,
    /// Objects that were not judged.
    pub(crate) not_judged: Vec<String>,
}

/// Runs `divvy validate`. Exit status 1 with errors, 3 with warnings alone.
pub fn run(args: &Args) -> Result<ExitCode> {
    let named = driver::KNOWN
        .into_iter()
        .find(|name| args.driver_name.as_deref() == Some(name));
    let read = examples::of_files(&args.files, false, named)
        .map_err(|error| Usage(format!("{error:#}")))?;
    let mut manifests = Manifests::default();
    for example in read.examples {
        manifests = example.manifests;
    }
    let (fleet, installed) = match &args.sim {
        Some(spec) => {
            let fleet = spec.nodes(read.driver, &manifests.policies, &args.node_label)?;
            (fleet, classes(read.driver)?)
        }
        None => of_cluster(&args.access)?,
    };
    let judgement = judge(&manifests, read.driver, &fleet, &installed);
    format::show(&judgement, args.output.format(), table)?;
    Ok(
        match (judgement.errors.is_empty(), judgement.warnings.is_empty()) {
            (false, _) => ExitCode::FAILURE,
            (true, false) => ExitCode::from(WARNINGS),
            (true, true) => ExitCode::SUCCESS,
        },
    )
}

fn table(judgement: &Judgement) -> String {
    let line = |word: &'static str| move |what: &String| format!("{word}: {what}\n");
    let mut text: String = judgement.errors.iter().map(line("error")).collect();
    text.extend(judgement.warnings.iter().map(line("warning")));
    text.extend(judgement.not_judged.iter().map(line("not judged")));
    let count = |number: usize, what: &str| {
        let plural = if number == 1 { "" } else { "s" };
        format!("{number} {what}{plural}")
    };
    let errors = count(judgement.errors.len(), "error");
    text + &format!("{errors}, {}", count(judgement.warnings.len(), "warning"))
}

/// Reads what the nodes of a cluster publish, and its classes.
fn of_cluster(access: &Access) -> Result<(Fleet, Vec<DeviceClass>)> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let (client, _, server) = access.client().await?;
        let named = |error: anyhow::Error| error.context(server.clone());
        let slices = objects::all::<ResourceSlice>(&client)
            .await
            .map_err(named)?;
        let nodes = objects::all::<Node>(&client).await.map_err(named)?;
        let classes = objects::all::<DeviceClass>(&client).await.map_err(named)?;
        let kinds = nodes.into_iter().map(|node| {
            let name = node.metadata.name.clone().unwrap_or_default();
            let is_its = |slice: &&ResourceSlice| slice.spec.node_name.as_ref() == Some(&name);
            let slices = slices.iter().filter(is_its).cloned().collect();
            Kind {
                name,
                count: 1,
                node,
                slices,
                ..Kind::default()
            }
        });
        let fleet = Fleet {
            kinds: kinds.filter(|kind| !kind.slices.is_empty()).collect(),
            notes: Vec::new(),
        };
        Ok((fleet, classes))
    })
}

/// Judges manifests by what a fleet publishes; `installed` are the classes that are there already.
pub(crate) fn judge(
    manifests: &Manifests,
    driver: &'static str,
    fleet: &Fleet,
    installed: &[DeviceClass],
) -> Judgement {
    let name = |class: &DeviceClass| class.metadata.name.clone();
    let new: BTreeSet<Option<String>> = manifests.classes.iter().map(name).collect();
    let kept = installed.iter().filter(|class| !new.contains(&name(class)));
    let classes: Vec<DeviceClass> = kept.chain(&manifests.classes).cloned().collect();
    let slices: Vec<ResourceSlice> = fleet
        .kinds
        .iter()
        .flat_map(|kind| kind.slices.clone())
        .collect();
    let known = Known::of(driver, &slices, classes.iter().filter_map(name));
    let found = review(manifests, &known);
    let mut judgement = Judgement {
        errors: found.refused,
        warnings: found.doubtful,
        not_judged: manifests.passed_over.clone(),
    };
    judgement.warnings.extend(fleet.notes.iter().cloned());
    // An object with an error of its own has that as its reason.
    let has_error = |place: &str, errors: &[String]| {
        errors
            .iter()
            .any(|error| error.starts_with(&format!("{place}: ")))
    };
    let trial = Trial {
        allocator: Allocator::new(Features::of_kubernetes(37)),
        kinds: &fleet.kinds,
        classes: &classes,
        driver,
    };
    let mut unmet = Vec::new();
    for class in &manifests.classes {
        let place = format!("DeviceClass {}", name(class).unwrap_or_default());
        if !has_error(&place, &judgement.errors) {
            let why = trial.unmet(
                &one_of(class, driver),
                &format!("{place}: nothing satisfies it"),
            );
            unmet.extend(why);
        }
    }
    for (kind, meta, spec) in specs(manifests) {
        let name = meta.name.as_deref().unwrap_or("(no name)");
        let place = format!("{kind} {}/{name}", namespace(meta));
        if !has_error(&place, &judgement.errors) {
            let claim = ResourceClaim {
                metadata: ObjectMeta {
                    name: meta.name.clone(),
                    namespace: Some(namespace(meta)),
                    ..ObjectMeta::default()
                },
                spec: Some(spec.clone()),
                status: None,
            };
            unmet.extend(trial.unmet(
                &claim,
                &format!("{place}: no node has it, even when all is free"),
            ));
        }
    }
    judgement.errors.extend(unmet);
    judgement
}

/// The specs of all claims and templates.
fn specs(
    manifests: &Manifests,
) -> impl Iterator<Item = (&'static str, &ObjectMeta, &ResourceClaimSpec)> {
    let claims = manifests.claims.iter();
    let claims =
        claims.filter_map(|claim| Some(("ResourceClaim", &claim.metadata, claim.spec.as_ref()?)));
    let templates = manifests.templates.iter().filter_map(|template| {
        let spec = template.spec.as_ref()?.spec.as_ref()?;
        Some(("ResourceClaimTemplate", &template.metadata, spec))
    });
    claims.chain(templates)
}

/// Returns a claim for one device of a class, whatever its taints.
fn one_of(class: &DeviceClass, driver: &str) -> ResourceClaim {
    let name = class.metadata.name.clone().unwrap_or_default();
    let is_admin = driver::form(driver, &name) == Some(divvy_model::Form::ADMIN);
    let any = DeviceToleration {
        operator: Some("Exists".to_owned()),
        ..DeviceToleration::default()
    };
    let request = DeviceRequest {
        name: "one".to_owned(),
        exactly: Some(ExactDeviceRequest {
            device_class_name: name,
            admin_access: is_admin.then_some(true),
            tolerations: Some(vec![any]),
            ..ExactDeviceRequest::default()
        }),
        first_available: None,
    };
    ResourceClaim {
        spec: Some(ResourceClaimSpec {
            devices: Some(DeviceClaim {
                requests: Some(vec![request]),
                ..DeviceClaim::default()
            }),
        }),
        ..ResourceClaim::default()
    }
}

/// An empty fleet, on which claims are tried.
struct Trial<'f> {
    allocator: Allocator,
    kinds: &'f [Kind],
    classes: &'f [DeviceClass],
    driver: &'static str,
}

impl Trial<'_> {
    /// Says why a claim fits no node; nothing where it fits one, or where only the scheduler can
    /// know. `what` begins the sentence.
    fn unmet(&self, claim: &ResourceClaim, what: &str) -> Option<String> {
        let free = AllocatedState::default();
        let mut why: Option<(&Kind, Explanation)> = None;
        for kind in self.kinds {
            let slices = Slices::new(&kind.slices);
            let inputs = Inputs {
                slices: &slices,
                classes: self.classes,
                allocated: &free,
                node: &kind.node,
            };
            match self.allocator.allocate(&inputs, &[claim]) {
                // A class that is not there is a warning of the review.
                Ok(Outcome::Fits(_)) | Err(AllocError::NoClass { .. }) => return None,
                Ok(Outcome::DoesNotFit(explanation)) => {
                    why.get_or_insert((kind, explanation));
                }
                Err(error) if error.is_unknown() => return None,
                Err(error) => {
                    let scene = Scene::new(self.driver, &kind.slices, &[]);
                    let why = cause::of_error(&error, &scene, self.classes, Reader::Demo);
                    return Some(format!("{what}: {}", one_line(&why)));
                }
            }
        }
        let Some((kind, explanation)) = why else {
            return Some(format!("{what}: no node publishes devices"));
        };
        let scene = Scene::new(self.driver, &kind.slices, &[]);
        let cause = cause::of(&explanation, &scene);
        let place = format!("a node of {}", kind.name);
        Some(format!(
            "{what}: {}",
            one_line(&cause.full(&place, false, Reader::Demo))
        ))
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
