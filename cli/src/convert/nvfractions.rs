//! `NvFractions` of KAI: annotations for the memory of a container's shares, its limit, and how
//! programs of several containers share the compute.

use divvy_api::names::capacity;
use divvy_model::Quantity;

use super::notes::Notes;
use super::resources::Ask;
use crate::claim::template::Request;
use crate::yaml::{Map, Node};

const PREFIX: &str = "nvidia.com/container.";
const REQUEST: &str = ".gpu-memory.request";
const LIMIT: &str = ".gpu-memory.limit";
const MODE: &str = ".gpu-compute.mode";

/// Says whether a pod with this annotation asks for a part of a GPU.
pub(super) fn is_request(annotation: &str) -> bool {
    annotation.starts_with(PREFIX) && [REQUEST, LIMIT].iter().any(|end| annotation.ends_with(end))
}

/// Request of a container.
#[derive(Debug)]
pub(super) struct Fraction {
    pub(super) container: String,
    pub(super) ask: Ask,
    /// Path of its annotation.
    pub(super) at: String,
}

/// Takes the annotations out, and returns what they ask for, `count` times each.
pub(super) fn take(
    annotations: &mut Map,
    metadata: &str,
    count: u64,
    notes: &mut Notes,
) -> Vec<Fraction> {
    let container = |name: &str| {
        let rest = name.strip_prefix(PREFIX)?;
        let ends = [REQUEST, LIMIT, MODE];
        let name = ends.iter().find_map(|end| rest.strip_suffix(end))?;
        Some(name.to_owned())
    };
    let mut containers: Vec<String> = annotations
        .iter()
        .filter_map(|(name, _)| container(name))
        .collect();
    containers.sort();
    containers.dedup();
    let of = |container| one(annotations, metadata, container, count, notes);
    containers.into_iter().filter_map(of).collect()
}

fn one(
    annotations: &mut Map,
    metadata: &str,
    container: String,
    count: u64,
    notes: &mut Notes,
) -> Option<Fraction> {
    let mut value = |end: &str| {
        let name = format!("{PREFIX}{container}{end}");
        let text = annotations.remove(&name)?.scalar().unwrap_or_default();
        Some((text, format!("{metadata}.annotations[{name}]")))
    };
    let (request, limit, mode) = (value(REQUEST), value(LIMIT), value(MODE));
    let amount = |of: &Option<(String, String)>, notes: &mut Notes| {
        let (text, at) = of.as_ref()?;
        let parsed = text.parse::<Quantity>().ok();
        let amount = parsed.filter(|amount| amount.signum() > 0);
        if amount.is_none() {
            notes.refuse(
                at,
                format!("{text:?} is not an amount: write one such as 10Gi"),
            );
        }
        Some((amount?, text.clone()))
    };
    let asked = amount(&request, notes);
    let most = amount(&limit, notes);
    // As for Kubernetes, a limit alone is the request, too.
    let (least, memory) = match (asked, &most) {
        (Some(asked), _) => asked,
        (None, Some(most)) => most.clone(),
        (None, None) => {
            if let Some((_, at)) = &mode {
                notes.note(at, "means nothing without gpu-memory.request: removed");
            }
            return None;
        }
    };
    let is_parallel = match &mode {
        Some((text, _)) if text == "sm-sharing" => true,
        Some((text, at)) if text != "time-slicing" => {
            notes.refuse(
                at,
                format!("{text:?} is not a mode: write time-slicing or sm-sharing"),
            );
            false
        }
        _ => false,
    };
    let (form, mut new) = if is_parallel {
        ("mps", Request::slots(count))
    } else {
        ("share", Request::shares(count, None, None))
    };
    new.capacity.push((capacity::MEMORY, Node::from(memory)));
    let (_, at) = request.or(limit.clone())?;
    if is_parallel {
        let what = "programs run at once under MPS, whose shares have a size with drivers from R615 on (docs/mps.md)";
        notes.note(&at, what);
    }
    if let Some(((most, text), (_, at))) = most.zip(limit)
        && most != least
    {
        if most < least {
            notes.refuse(
                &at,
                format!("{text} is below the request: write at least that"),
            );
            return None;
        }
        let least = least.nanos().max(1);
        // Rounded up: a smaller factor would not allow it.
        let percent = most.nanos().saturating_mul(100).saturating_add(least - 1) / least;
        let what = format!(
            "a limit above the request needs shares: {{burst: {{memory: {}.{:02}x}}}} in the GpuPolicy, and nodes that cap memory \
             (docs/memory-caps.md#request-and-limit)",
            percent / 100,
            percent % 100
        );
        notes.note(&at, what);
        new.limits.push((capacity::MEMORY, Node::from(text)));
    }
    Some(Fraction {
        container,
        ask: Ask::new(form, new),
        at,
    })
}
