//! A pod, or a template of pods: its extended resources and annotations become a claim.

use std::collections::BTreeSet;

use divvy_model::Quantity;

use super::Settings;
use super::beside;
use super::hints::{self, Hints};
use super::notes::{Notes, under};
use super::old;
use super::resources::{self, Ask, Part};
use crate::claim::template::{Claim, NAME, Request};
use crate::format::total;
use crate::runtime;
use crate::yaml::{Map, Node};

/// Devices of one claim at most.
const MOST_DEVICES: u64 = 32;
/// Characters of the name of a request at most.
const LONGEST: usize = 63;
/// Lists of containers, in the order in which they start.
const LISTS: [&str; 2] = ["initContainers", "containers"];

/// Place of a container in the pod: its list, and its number in it.
pub(super) type Place = (&'static str, usize);

/// A container with what it asks for.
pub(super) struct Asker {
    pub(super) place: Place,
    name: String,
    pub(super) asks: Vec<Ask>,
    /// True of an init container that ends before the others start.
    ends: bool,
    /// True of any other init container.
    is_sidecar: bool,
}

/// Devices that a pod asks for.
pub(super) struct Asked {
    pub(super) claim: Claim,
    /// True if the chart's classes stand for all of it.
    pub(super) stands: bool,
    /// Parts of a GPU that were made one number.
    pub(super) parts: Vec<Part>,
}

/// Makes a claim of what the pod asks for, and returns the pod as it is then. `template_of` makes
/// the ResourceClaimTemplate and returns its name.
pub(super) fn convert(
    template: &Map,
    settings: Settings,
    notes: &mut Notes,
    template_of: &mut dyn FnMut(Asked) -> String,
) -> Option<Map> {
    let converted = notes.attempt(|notes| {
        let mut new = template.clone();
        let found = ask(&mut new, settings, notes);
        (new, found)
    });
    let (mut new, found) = converted?;
    if let Some((asked, users)) = found {
        let requests = asked.claim.requests.len();
        let name = template_of(asked);
        link(&mut new, &name, requests, users);
    }
    (new != *template).then_some(new)
}

/// Containers, each with the name of a request that it uses.
type Users = Vec<(Place, String)>;

/// Takes out of the pod what asks for GPUs, and returns the claim that it is.
fn ask(template: &mut Map, settings: Settings, notes: &mut Notes) -> Option<(Asked, Users)> {
    let mut hints = hints::take(template, settings, notes);
    let at = "spec";
    let spec = template.get_mut("spec")?.map_mut()?;
    old::pod(spec, at, notes);
    for name in resources::of_pod(spec) {
        let what = "Kubernetes refuses it at the level of the pod: write it in a container's resources, from where it is converted";
        notes.refuse(&format!("{at}.resources[{name}]"), what);
    }
    let taints = resources::of_devices(spec);
    let mut askers = askers(spec, at, &hints, notes);
    for one in &hints.parts {
        part(&mut askers, one, at, notes);
    }
    let mut asks = askers.iter().flat_map(|asker| &asker.asks);
    if let Some((_, limit)) = &hints.core_limit
        && !asks.any(|ask| !ask.request.limits.is_empty())
    {
        notes.note(limit, "means nothing without vcuda-core below 100: removed");
    }
    if askers.iter().all(|asker| asker.asks.is_empty()) {
        for annotation in &hints.read {
            notes.note(annotation, "no container asks for a GPU: removed");
        }
        for (label, _) in &hints.labels.read {
            notes.note(label, "no container asks for a GPU: removed");
        }
        return None;
    }
    for (label, what) in &hints.labels.read {
        notes.note(label, what.as_str());
    }
    hints::scheduler(spec, at, notes);
    tolerate(spec, &taints, at, notes);
    if let Some(node) = spec.get("nodeName").and_then(Node::text) {
        let what = format!(
            "a pod that is bound to a node by name passes the scheduler by, and only the scheduler allocates claims: write \
             nodeSelector: {{kubernetes.io/hostname: {node}}}"
        );
        notes.refuse(&format!("{at}.nodeName"), what);
    }
    hints::notes_on_rest(spec, at, notes);
    beside::notes_on(spec, &askers, at, notes);
    let class = spec.get("runtimeClassName").and_then(Node::text);
    if let Some(lost) = class.and_then(|class| runtime::sandbox_note(class, None)) {
        notes.unknown(&under(at, "runtimeClassName"), lost);
    }
    let (requests, users) = requests(&askers, at, notes);
    let devices = total(requests.iter().map(|request| request.count));
    if devices > MOST_DEVICES {
        let what = format!(
            "{devices} devices: a claim has {MOST_DEVICES} at most; spread them over several pods"
        );
        notes.refuse(&format!("{at}.containers"), what);
    }
    let several = devices > 1;
    if !several && !hints.same.is_empty() {
        let annotation = "metadata.annotations[nvidia.com/numa-bind]";
        notes.note(annotation, "one device is at one NUMA node anyway: removed");
    }
    let mut claim = Claim {
        requests,
        same: if several {
            std::mem::take(&mut hints.same)
        } else {
            Vec::new()
        },
        ..Claim::default()
    };
    for request in &mut claim.requests {
        hints
            .selectors
            .iter()
            .for_each(|expression| request.select(expression.clone()));
    }
    let mut asks = askers.iter().flat_map(|asker| &asker.asks);
    let stands = claim.same.is_empty() && hints.selectors.is_empty() && asks.all(|ask| ask.stands);
    let parts = askers.iter().flat_map(|asker| &asker.asks);
    let parts = parts.filter_map(|ask| ask.part).collect();
    Some((
        Asked {
            claim,
            stands,
            parts,
        },
        users,
    ))
}

/// Lets the pod tolerate these taints, as it did by its extended resources.
fn tolerate(spec: &mut Map, taints: &BTreeSet<String>, at: &str, notes: &mut Notes) {
    for key in taints {
        let tolerated = |one: &Node| {
            let is_key = one
                .text_at(&["key"])
                .is_none_or(|other| [key, ""].contains(&other));
            let any_value = one.text_at(&["operator"]) == Some("Exists");
            let effect = one.text_at(&["effect"]).unwrap_or_default();
            is_key && any_value && ["", "NoSchedule"].contains(&effect)
        };
        let all = spec.get("tolerations").map(Node::items).unwrap_or_default();
        if all.iter().any(tolerated) {
            continue;
        }
        let new = Node::from([
            ("key", key.as_str().into()),
            ("operator", "Exists".into()),
            ("effect", "NoSchedule".into()),
        ]);
        if let Some(all) = spec.get_mut("tolerations").and_then(Node::items_mut) {
            all.push(new);
        } else {
            spec.remove("tolerations");
            let first = LISTS.into_iter().find(|list| spec.get(list).is_some());
            spec.set_before(first.unwrap_or("containers"), "tolerations", vec![new]);
        }
        let what = format!(
            "{key} is tolerated, as the admission plugin ExtendedResourceToleration adds it to pods with the extended resource, and \
             not to those with a claim"
        );
        notes.note(&under(at, "tolerations"), what);
    }
}

/// Takes out of each container what it asks for.
fn askers(spec: &mut Map, at: &str, hints: &Hints, notes: &mut Notes) -> Vec<Asker> {
    let mut all = Vec::new();
    for list in LISTS {
        let Some(containers) = spec.get_mut(list).and_then(Node::items_mut) else {
            continue;
        };
        for (number, node) in containers.iter_mut().enumerate() {
            let Some(container) = node.map_mut() else {
                continue;
            };
            let at = format!("{at}.{list}[{number}]");
            let asks = resources::take(container, &at, hints, notes);
            let text = |field: &str| container.get(field).and_then(Node::text);
            let is_init = list == "initContainers";
            let goes_on = text("restartPolicy") == Some("Always");
            all.push(Asker {
                place: (list, number),
                name: text("name").unwrap_or("container").to_owned(),
                asks,
                ends: is_init && !goes_on,
                is_sidecar: is_init && goes_on,
            });
        }
    }
    all
}

/// Gives the container that KAI's annotations are for the part of a GPU.
fn part(
    askers: &mut [Asker],
    (container, ask, annotation): &(Option<String>, Ask, String),
    at: &str,
    notes: &mut Notes,
) {
    let is_it = |asker: &&mut Asker| match container {
        Some(name) => asker.name == *name,
        None => asker.place == ("containers", 0),
    };
    let Some(asker) = askers.iter_mut().find(is_it) else {
        let name = container.as_deref().unwrap_or("(the first)");
        let what = format!(
            "there is no container {name:?}: name one of spec.containers in gpu-fraction-container-name"
        );
        return notes.refuse(annotation, what);
    };
    if !asker.asks.is_empty() {
        let (list, number) = asker.place;
        let what = "KAI refuses a container with both this and a part of a GPU by annotation: remove one of the two";
        return notes.refuse(&format!("{at}.{list}[{number}].resources"), what);
    }
    asker.asks.push(ask.clone());
}

/// Makes the requests of the claim. An init container uses the devices of a container that starts
/// later, as with a device plugin, if they are enough for it.
fn requests(askers: &[Asker], at: &str, notes: &mut Notes) -> (Vec<Request>, Users) {
    // Those that run on come first, then the init containers from the biggest to the smallest.
    let mut all: Vec<(&Asker, &Ask)> = askers
        .iter()
        .flat_map(|asker| asker.asks.iter().map(move |ask| (asker, ask)))
        .collect();
    all.sort_by_key(|(asker, ask)| {
        (
            asker.ends,
            std::cmp::Reverse(ask.request.count * u64::from(asker.ends)),
        )
    });
    let mut made: Vec<(&Asker, &Ask)> = Vec::new();
    let mut links: Vec<(&Asker, usize)> = Vec::new();
    for (asker, ask) in all {
        let fits = |(_, (other, of)): &(usize, &(&Asker, &Ask))| {
            // A sidecar has its devices for itself; one container uses no device twice.
            asker.ends
                && !other.is_sidecar
                && other.place != asker.place
                && covers(&of.request, &ask.request)
        };
        let enough = made
            .iter()
            .enumerate()
            .find(fits)
            .map(|(place, (_, of))| (place, *of));
        if let Some((place, of)) = enough {
            if of.request != ask.request {
                let (list, number) = asker.place;
                let what = "the init container gets the devices of a later container, which are more than it asks for";
                notes.note(&format!("{at}.{list}[{number}].resources"), what);
            }
            links.push((asker, place));
        } else {
            if asker.ends {
                let (list, number) = asker.place;
                let what = "no later container has enough for the init container: the claim holds its devices until the pod ends";
                notes.note(&format!("{at}.{list}[{number}].resources"), what);
            }
            links.push((asker, made.len()));
            made.push((asker, ask));
        }
    }
    let own = names(&made);
    let with_name = |((_, ask), name): (&(&Asker, &Ask), &String)| Request {
        name: name.clone(),
        ..ask.request.clone()
    };
    let requests = made.iter().zip(&own).map(with_name).collect();
    let users = links
        .into_iter()
        .map(|(asker, place)| (asker.place, own.get(place).cloned().unwrap_or_default()))
        .collect();
    (requests, users)
}

/// Says whether the devices of one request are enough for another.
fn covers(one: &Request, other: &Request) -> bool {
    let amount = |request: &Request, name: &str| {
        let found = request
            .capacity
            .iter()
            .find(|(capacity, _)| *capacity == name);
        found?.1.scalar()?.parse::<Quantity>().ok()
    };
    let enough = |name: &str| match (amount(one, name), amount(other, name)) {
        (Some(one), Some(other)) => one >= other,
        (one, other) => one == other,
    };
    let mut amounts = one.capacity.iter().chain(&other.capacity);
    one.class == other.class
        && one.limits == other.limits
        && one.selectors == other.selectors
        && one.count >= other.count
        && amounts.all(|(name, _)| enough(name))
}

/// Names the requests: by their container, and by the kind of device where it has several. A claim
/// has no name twice, so that one that is taken, or too long, gets a number.
fn names(made: &[(&Asker, &Ask)]) -> Vec<String> {
    if made.len() == 1 {
        return vec![NAME.to_owned()];
    }
    let is_only = |asker: &Asker| -> bool {
        let own = made.iter().filter(|(other, _)| other.place == asker.place);
        own.count() == 1
    };
    // Names of containers differ: those are given first.
    let mut taken: BTreeSet<String> = made
        .iter()
        .filter(|(asker, _)| is_only(asker))
        .map(|(asker, _)| asker.name.clone())
        .collect();
    let mut seen = BTreeSet::new();
    let name = |(asker, ask): &(&Asker, &Ask)| {
        if is_only(asker) && asker.name.len() <= LONGEST && seen.insert(asker.name.clone()) {
            return asker.name.clone();
        }
        let wanted = format!("{}-{}", asker.name, ask.form);
        let numbered = (2..).map(|number| format!("{wanted}-{number}"));
        let all = [wanted.clone()].into_iter().chain(numbered);
        let plain = (0..).map(|number| format!("request-{number}"));
        let name = all
            .take_while(|name| name.len() <= LONGEST)
            .chain(plain)
            .find(|name| taken.insert(name.clone()));
        name.unwrap_or(wanted)
    };
    made.iter().map(name).collect()
}

/// Adds the claim to the pod and to the containers that use it.
fn link(template: &mut Map, template_name: &str, requests: usize, users: Users) {
    let Some(spec) = template.get_mut("spec").and_then(Node::map_mut) else {
        return;
    };
    let taken = |name: &str| {
        let entries = spec
            .get("resourceClaims")
            .map(Node::items)
            .unwrap_or_default();
        entries
            .iter()
            .any(|entry| entry.text_at(&["name"]) == Some(name))
    };
    let mut name = NAME.to_owned();
    for number in 2.. {
        if !taken(&name) {
            break;
        }
        name = format!("{NAME}-{number}");
    }
    let entry = Node::from([
        ("name", name.as_str().into()),
        ("resourceClaimTemplateName", template_name.into()),
    ]);
    if let Some(entries) = spec.get_mut("resourceClaims").and_then(Node::items_mut) {
        entries.push(entry);
    } else {
        spec.remove("resourceClaims");
        let first = LISTS.into_iter().find(|list| spec.get(list).is_some());
        spec.set_before(first.unwrap_or("containers"), "resourceClaims", vec![entry]);
    }
    for ((list, number), request) in users {
        let containers = spec.get_mut(list).and_then(Node::items_mut);
        let Some(container) = containers
            .and_then(|all| all.get_mut(number))
            .and_then(Node::map_mut)
        else {
            continue;
        };
        let mut used = Map::from([("name", name.as_str().into())]);
        if requests > 1 {
            used.set("request", request);
        }
        if container.get("resources").and_then(Node::map).is_none() {
            container.set("resources", Map::default());
        }
        let resources = container.get_mut("resources").and_then(Node::map_mut);
        if let Some(resources) = resources {
            match resources.get_mut("claims").and_then(Node::items_mut) {
                Some(claims) => claims.push(used.into()),
                None => resources.set("claims", Node::List(vec![used.into()])),
            }
        }
    }
}
