//! The workload: pods of manifests, of a trace, and drawn ones.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};
use divvy_cli::extended;
use divvy_cli::manifests::{self, Manifests, namespace};
use divvy_cli::seen::Waiting;
use divvy_fleet::generate::{Mix, draw, mix};
use divvy_fleet::trace::{self, Line, milliseconds};
use divvy_fleet::{Job, Shape, pod, request};
use divvy_model::Quantity;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;

use super::Args;
use crate::workload::expand;

/// So many pods of a mix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Drawn {
    mix: Mix,
    pods: usize,
}

/// The most pods that can be drawn of a mix.
const MOST: usize = 1_000_000;

/// Takes a mix and a number, such as notebooks=2000.
pub(crate) fn drawn(text: &str) -> Result<Drawn, String> {
    let known = divvy_fleet::generate::MIXES.map(|mix| mix.name).join(", ");
    let (name, pods) = text
        .split_once('=')
        .ok_or(format!("write a mix ({known}), = and a number"))?;
    let mix = mix(name).ok_or(format!("{name:?} is no mix: there are {known}"))?;
    let pods = pods.parse().ok().filter(|pods| *pods <= MOST);
    let pods = pods.ok_or(format!("{text:?}: the number of pods is 0 to {MOST}"))?;
    Ok(Drawn { mix, pods })
}

/// Processor time in thousandths of a core, and memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resources([u64; 2]);

/// Takes processor time and memory, such as 192,2Ti.
pub(crate) fn resources(text: &str) -> Result<Resources, String> {
    let (cpu, memory) = text.split_once(',').unwrap_or((text, ""));
    let of = |text: &str, unit: i128| {
        let amount: Quantity = text.trim().parse().ok()?;
        let amount = u64::try_from(amount.nanos() / unit).ok();
        amount.filter(|amount| *amount > 0)
    };
    match (of(cpu, 1_000_000), of(memory, 1_000_000_000)) {
        (Some(cpu), Some(memory)) => Ok(Resources([cpu, memory])),
        _ => Err("write processor time and memory, such as 192,2Ti".to_owned()),
    }
}

impl Resources {
    /// Lets a node say that it has so much.
    pub(crate) fn give(self, node: &mut Node) {
        let [cpu, memory] = self.0;
        let amounts = [("cpu", format!("{cpu}m")), ("memory", memory.to_string())];
        let amounts = amounts.map(|(name, amount)| (name.to_owned(), Raw(amount)));
        let status = node.status.get_or_insert_default();
        status.allocatable = Some(amounts.into());
    }

    /// Returns the amounts for a part of a GPU, or for several.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "amounts of a simulation"
    )]
    fn times(self, gpus: f64) -> [u64; 2] {
        self.0.map(|amount| (amount as f64 * gpus).round() as u64)
    }
}

/// Takes a number of hours.
pub(crate) fn hours(text: &str) -> Result<f64, String> {
    let hours = text
        .parse::<f64>()
        .ok()
        .filter(|hours| hours.is_finite() && *hours > 0.0 && *hours <= 100_000.0);
    hours.ok_or_else(|| "hours are more than 0".to_owned())
}

/// Pods and their shapes.
#[derive(Debug, Default)]
pub(crate) struct Workload {
    pub(crate) shapes: Vec<Shape>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) notes: Vec<String>,
    /// Places of shapes by what makes them equal.
    known: BTreeMap<String, usize>,
}

impl Workload {
    /// Collects the pods: those that wait in the cluster, of manifests, of a trace, and drawn ones.
    pub(crate) fn of(
        args: &Args,
        manifests: &Manifests,
        classes: &[DeviceClass],
        waiting: &[Waiting],
    ) -> Result<Self> {
        let mut all = Self::default();
        for of in waiting {
            let name = of.shape.name.clone();
            let shape = all.shape(of.shape.clone())?;
            all.jobs.push(Job {
                at: 0,
                name,
                shape,
                duration: None,
                priority: of.priority,
            });
        }
        all.of_manifests(manifests, classes)?;
        let mut lines = Vec::new();
        if let Some(file) = &args.trace {
            for (name, text) in manifests::texts(file, false)? {
                lines.extend(trace::read(&text).with_context(|| name.clone())?);
            }
        }
        for of in &args.generate {
            let mut drawn = draw(&of.mix, of.pods, args.hours, args.seed);
            for line in &mut drawn {
                let count = line.request.strip_suffix("gpu");
                if let (Some(count), Some(resource)) = (count, &args.limits) {
                    line.request = format!("{count}{resource}");
                }
            }
            lines.extend(drawn);
        }
        for line in &lines {
            all.line(line, manifests, classes, args.pod_resources)?;
        }
        if all.jobs.is_empty() && all.notes.is_empty() {
            bail!(
                "no pods: give manifests (-f), a trace (--trace) or a mix (--generate notebooks=2000)"
            );
        }
        // In the order of arrival; pods of one moment as they were given.
        all.jobs.sort_by_key(|job| job.at);
        Ok(all)
    }

    fn shape(&mut self, shape: Shape) -> Result<usize> {
        let key = serde_json::to_string(&(
            &shape.claims,
            &shape.selector,
            &shape.tolerations,
            shape.resources,
            &shape.extended,
        ))?;
        let next = self.shapes.len();
        let place = *self.known.entry(key).or_insert(next);
        if place == next {
            self.shapes.push(shape);
        }
        Ok(place)
    }

    fn line(
        &mut self,
        line: &Line,
        manifests: &Manifests,
        classes: &[DeviceClass],
        resources: Option<Resources>,
    ) -> Result<()> {
        let mut shape = match line.request.strip_prefix("template:") {
            Some(name) => template(name, line, manifests)?,
            None => match extended_resource(&line.request, classes)? {
                Some(shape) => shape,
                None => request::shape(&line.request)?,
            },
        };
        if let Some(resources) = resources {
            shape.resources = resources.times(request::gpus(&line.request));
        }
        let shape = self.shape(shape)?;
        self.jobs.push(Job {
            at: milliseconds(line.time),
            name: line.namespace.clone(),
            shape,
            duration: line.duration.map(milliseconds),
            priority: line.priority.unwrap_or(0),
        });
        Ok(())
    }

    fn of_manifests(&mut self, manifests: &Manifests, classes: &[DeviceClass]) -> Result<()> {
        let found = expand(manifests, classes, &BTreeSet::new())?;
        self.notes.extend(found.stuck);
        let pods = manifests.all_pods();
        let mut used: BTreeSet<(String, String)> = BTreeSet::new();
        for consumer in &found.consumers {
            let key = |claim: &String| (consumer.namespace.clone(), claim.clone());
            let is_its = |claim: &&ResourceClaim| {
                let name = claim.metadata.name.clone().unwrap_or_default();
                namespace(&claim.metadata) == consumer.namespace && consumer.claims.contains(&name)
            };
            // The pods that use a claim after the first are where it is.
            if consumer
                .claims
                .iter()
                .any(|claim| used.contains(&key(claim)))
            {
                self.notes.push(format!(
                    "{} uses a claim of another pod: it is left out",
                    consumer.name()
                ));
                continue;
            }
            used.extend(consumer.claims.iter().map(key));
            let its = pods.iter().find(|pod| {
                consumer.pod.is_some()
                    && pod.metadata.name == consumer.pod
                    && namespace(&pod.metadata) == consumer.namespace
            });
            let claims = found.claims.iter().filter(is_its);
            let claims = claims.map(|claim| ResourceClaim {
                spec: claim.spec.clone(),
                ..ResourceClaim::default()
            });
            let spec = its.and_then(|pod: &Pod| pod.spec.as_ref());
            let extended = spec.map(|spec| extended::requests(spec, classes).requests);
            let extended = extended.into_iter().flatten().filter_map(|request| {
                let exactly = request.exactly?;
                let count = u64::try_from(exactly.count.unwrap_or(1)).ok()?;
                Some((exactly.device_class_name, count))
            });
            let shape = self.shape(Shape {
                name: consumer.name(),
                claims: claims.collect(),
                selector: spec.and_then(pod::selector),
                tolerations: spec
                    .and_then(|spec| spec.tolerations.clone())
                    .unwrap_or_default(),
                resources: spec.map(pod::resources).unwrap_or_default(),
                extended: sums(extended),
            })?;
            self.jobs.push(Job {
                at: 0,
                name: consumer.name(),
                shape,
                duration: None,
                priority: spec.and_then(|spec| spec.priority).unwrap_or(0),
            });
        }
        Ok(())
    }
}

fn sums(counts: impl Iterator<Item = (String, u64)>) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for (class, count) in counts {
        let sum: &mut u64 = all.entry(class).or_default();
        *sum = sum.saturating_add(count);
    }
    all
}

/// Returns the pod that asks for an extended resource, such as 4*nvidia.com/gpu; nothing of other
/// requests.
fn extended_resource(text: &str, classes: &[DeviceClass]) -> Result<Option<Shape>> {
    let (count, resource) = text.split_once('*').unwrap_or(("1", text));
    if resource.contains(':') || !extended::is_extended(resource) {
        return Ok(None);
    }
    let Some(class) = extended::class_of(resource, classes) else {
        bail!(
            "request {text:?}: no DeviceClass has the extended resource {resource}: give one with \
             extendedResourceName (-f)"
        );
    };
    let mut shape = request::shape(&format!("{count}*gpu"))?;
    let claim = shape.claims.first_mut();
    let devices = claim.and_then(|claim| claim.spec.as_mut()?.devices.as_mut());
    for request in devices
        .into_iter()
        .flat_map(|of| of.requests.iter_mut().flatten())
    {
        if let Some(exactly) = &mut request.exactly {
            exactly.device_class_name.clone_from(&class);
        }
    }
    shape.extended = [(class, count.parse()?)].into();
    text.clone_into(&mut shape.name);
    Ok(Some(shape))
}

/// Returns the pod that uses a template of the manifests, of its namespace or of the only one.
fn template(name: &str, line: &Line, manifests: &Manifests) -> Result<Shape> {
    let called = |meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta| {
        meta.name.as_deref() == Some(name)
    };
    let all: Vec<_> = manifests
        .templates
        .iter()
        .filter(|template| called(&template.metadata))
        .collect();
    let own = all
        .iter()
        .find(|template| namespace(&template.metadata) == line.namespace);
    let found = match (own, all.as_slice()) {
        (Some(own), _) => own,
        (None, [only]) => only,
        (None, []) => bail!(
            "request {:?}: no ResourceClaimTemplate {name:?} in the files (-f)",
            line.request
        ),
        (None, _) => bail!(
            "request {:?}: several namespaces have a template {name:?}, and {:?} none",
            line.request,
            line.namespace
        ),
    };
    let spec = found.spec.as_ref().and_then(|spec| spec.spec.as_ref());
    let spec: ResourceClaimSpec = spec.cloned().unwrap_or_default();
    Ok(Shape {
        name: line.request.clone(),
        claims: vec![ResourceClaim {
            spec: Some(spec),
            ..ResourceClaim::default()
        }],
        ..Shape::default()
    })
}
