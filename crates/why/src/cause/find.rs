//! Finds the cause in the allocator's explanation.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{DeviceId, DeviceReason, Explanation, Holder, Reason, RequestReason};
use divvy_api::names::{self, attributes, capacity};
use divvy_model::{Form, Mode, TargetKind};
use k8s_openapi::api::resource::v1::Device;

use super::scene::{Mig, Scene};
use super::{Cause, Held, Need, Obstacle, in_words as amount, named};
use crate::detail::{counted, hint};
use crate::device::{kind, memory, text};
use crate::driver::{plain, profile_of};
use crate::lookup;
use crate::selector::{false_part, overload};

/// Says why the claims of the explanation get no devices on its node.
pub fn of(explanation: &Explanation, scene: &Scene<'_>) -> Cause {
    if explanation.devices == 0 || !explanation.unusable_pools.is_empty() {
        let text = match explanation.unusable_pools.first() {
            Some((pool, problem)) => format!("pool {pool} {problem}"),
            None => format!("no driver publishes devices for node {}", explanation.node),
        };
        let hint = hint(explanation).map(|hint| capital(&hint));
        return Cause::Other { text, hint };
    }
    if explanation.competing {
        return competing(explanation, scene);
    }
    let mut causes = explanation
        .requests
        .iter()
        .map(|request| of_request(request, scene));
    // An alternative that may become free counts before the others.
    let Some(first) = causes.next() else {
        let text = "no device fits".to_owned();
        return Cause::Other { text, hint: None };
    };
    let passing = |cause: &Cause| cause.may_pass();
    if passing(&first) {
        return first;
    }
    causes.find(passing).unwrap_or(first)
}

/// Requests that can be met alone, and not together.
fn competing(explanation: &Explanation, scene: &Scene<'_>) -> Cause {
    if let Some(constraint) = explanation.constraints.first() {
        let text = format!("{}: {}", constraint.constraint, constraint.problem);
        return Cause::Other { text, hint: None };
    }
    let mut all = Held::default();
    let mut needs = Vec::new();
    for request in &explanation.requests {
        let held = held(request, scene);
        needs.push(held.need);
        for gpu in held.gpus {
            if !all.gpus.contains(&gpu) {
                all.gpus.push(gpu);
            }
        }
    }
    if !all.gpus.is_empty() && !explanation.limited {
        let whole = needs.iter().all(|need| matches!(need, Need::Gpus(_)));
        all.need = match (needs.as_slice(), explanation.too_few) {
            (_, Some((wanted, most))) if whole => Need::Gpus(wanted.saturating_sub(most)),
            ([one], _) => one.clone(),
            _ if whole => Need::Gpus(1),
            _ => Need::Room("all that it asks for".to_owned()),
        };
        return Cause::Held(all);
    }
    let text = if explanation.limited {
        "together, its requests exceed the limit of devices of one claim".to_owned()
    } else {
        format!(
            "each of its requests can be met alone, but not all together{}",
            counted(explanation)
        )
    };
    Cause::Other { text, hint: None }
}

fn of_request(request: &RequestReason, scene: &Scene<'_>) -> Cause {
    let class = format!("class {}", request.class);
    let by_class = |refused: &&DeviceReason| matches!(&refused.reason, Reason::SelectorFalse { origin, .. } if *origin == class);
    if request.available == 0 && request.refused.iter().all(|refused| by_class(&refused)) {
        return class_without_devices(request, scene);
    }
    let of_class: Vec<&DeviceReason> = request.refused.iter().filter(|r| !by_class(r)).collect();
    let selected: Vec<&DeviceReason> = of_class
        .iter()
        .copied()
        .filter(|refused| {
            !matches!(
                refused.reason,
                Reason::SelectorFalse { .. } | Reason::NotOnNode | Reason::FeatureOff
            )
        })
        .collect();
    if selected.is_empty() && request.available == 0 {
        return not_selected(request, &of_class, scene);
    }
    let has = selected.len() + request.available;
    if let Some(wanted) = request.wanted.filter(|wanted| has < *wanted) {
        let what = what(&request.class, scene);
        return Cause::TooFew {
            wanted,
            has,
            what,
            by_limits: is_of_limits(&request.request),
        };
    }
    if let Some(overdrawn) = selected
        .iter()
        .find_map(|refused| overdrawn(&refused.reason))
    {
        return overdrawn;
    }
    let held = held(request, scene);
    if !held.gpus.is_empty() {
        return Cause::Held(held);
    }
    let taint = selected.iter().find_map(|refused| match &refused.reason {
        Reason::Tainted { taint } => Some(taint.clone()),
        _ => None,
    });
    let first = selected
        .iter()
        .map(|refused| &refused.reason)
        .find(|reason| !matches!(reason, Reason::Tainted { .. }));
    match (first, taint) {
        (
            Some(Reason::CapacityExceeded {
                capacity,
                wanted,
                most,
            }),
            _,
        ) => Cause::TooMuch {
            capacity: capacity.clone(),
            wanted: wanted.clone(),
            most: most.clone(),
        },
        (Some(Reason::NoSuchCapacity { capacity, .. }), _) => other_unit(&selected, scene)
            .unwrap_or_else(|| Cause::NoCapacity {
                capacity: capacity.clone(),
                there: capacities(&selected, scene),
            }),
        (Some(Reason::NoSuchAttribute { constraint }), _) => {
            let attribute = constraint.rsplit(' ').next().unwrap_or_default();
            let meant = lookup::meant_attribute(attribute, &scene.names().attributes);
            let hint = meant.map_or_else(String::new, |name| format!(" (did you mean {name:?}?)"));
            let text = if hint.is_empty() {
                format!("its devices have no value for the claim's {constraint}")
            } else {
                format!(
                    "no device has attribute {attribute:?}{hint}, which the claim's constraint names"
                )
            };
            Cause::Other { text, hint: None }
        }
        (Some(Reason::Failed { error }), _) => failed(request, error),
        (_, Some(taint)) => {
            let with = |refused: &&&DeviceReason| matches!(&refused.reason, Reason::Tainted { taint: other } if *other == taint);
            let gpus: BTreeSet<String> = selected
                .iter()
                .filter(with)
                .map(|refused| place(refused, scene))
                .collect();
            Cause::Tainted {
                gpus: gpus.into_iter().collect(),
                taint,
                rules: Vec::new(),
            }
        }
        (Some(_) | None, None) => Cause::Other {
            text: format!("{} of {has} devices are available", request.available),
            hint: None,
        },
    }
}

/// Returns the cause where shares are given out in another unit than that of the claim.
fn other_unit(selected: &[&DeviceReason], scene: &Scene<'_>) -> Option<Cause> {
    let mut found: Option<&String> = None;
    let mut gpus = BTreeSet::new();
    for refused in selected {
        let Reason::NoSuchCapacity {
            capacity: wanted,
            has,
        } = &refused.reason
        else {
            continue;
        };
        let has = |name: &str| has.iter().any(|of| plain(of) == name);
        let other = match plain(wanted) {
            capacity::MEMORY | capacity::CORES | capacity::SLOTS => has(capacity::PERCENT),
            capacity::PERCENT => has(capacity::SLOTS),
            _ => false,
        };
        if other && *found.get_or_insert(wanted) == wanted {
            gpus.insert(place(refused, scene));
        }
    }
    Some(Cause::OtherUnit {
        wanted: plain(found?).to_owned(),
        gpus: gpus.into_iter().collect(),
    })
}

/// More is held than there is: nothing of the pool can be allocated.
fn overdrawn(reason: &Reason) -> Option<Cause> {
    let Reason::PoolOverdrawn { set, by, .. } = reason else {
        return None;
    };
    let claims: Vec<String> = by.iter().map(ToString::to_string).collect();
    Some(Cause::Other {
        text: format!(
            "together the claims {} hold more of counter set {set} than it has, which blocks the node's other devices",
            named(&claims)
        ),
        hint: Some("Delete one of them with its pods".to_owned()),
    })
}

/// The GPUs whose users keep the request off them, each with its state.
fn held(request: &RequestReason, scene: &Scene<'_>) -> Held {
    let from = &request.claim.namespace;
    let mut gpus: BTreeMap<(String, u32), (String, String)> = BTreeMap::new();
    let mut others: BTreeMap<String, String> = BTreeMap::new();
    let mut partly = false;
    let mut forms: BTreeSet<Kind> = BTreeSet::new();
    for DeviceReason { device, reason } in &request.refused {
        let (Reason::InUse { by }
        | Reason::CounterShort { by, .. }
        | Reason::CapacityShort { by, .. }) = reason
        else {
            continue;
        };
        let Some(ordinal) = scene.gpu_of(device) else {
            others.insert(
                device.device.clone(),
                format!("is in use by {}", users(by, from, scene)),
            );
            continue;
        };
        let (mode, mut state) = scene
            .state(&device.pool, ordinal, from)
            .map_or((None, "is in use".to_owned()), |(mode, state)| {
                (Some(mode), state)
            });
        let form = Kind::of(device, scene);
        let is_partition = matches!(form, Kind::Partition(_) | Kind::PartitionShare);
        forms.insert(form);
        if let Reason::CapacityShort {
            capacity,
            wanted,
            left,
            ..
        } = reason
        {
            partly = true;
            let (left, wanted) = (amount(capacity, left), amount(capacity, wanted));
            state = format!("{state}, with {left} left, and {wanted} asked for");
        } else if is_partition && mode == Some(Mode::Partitioned) {
            partly = true;
        }
        gpus.entry((device.pool.clone(), ordinal))
            .or_insert((format!("gpu-{ordinal}"), state));
    }
    let wanted = request.wanted.unwrap_or(1);
    let need = match wanted {
        _ if forms.iter().all(|form| *form == Kind::Whole) => {
            Need::Gpus(wanted.saturating_sub(request.available))
        }
        // Devices are not GPUs: one free GPU has room for several partitions.
        2.. => Need::Room(in_words(wanted, &forms)),
        _ if partly => Need::Part,
        _ => Need::Gpus(1),
    };
    Held {
        gpus: gpus.into_values().chain(others).collect(),
        need,
    }
}

/// Kind of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Whole,
    /// A partition, by its profile.
    Partition(String),
    Share,
    /// A share of a partition.
    PartitionShare,
}

impl Kind {
    fn of(id: &DeviceId, scene: &Scene<'_>) -> Self {
        match kind(&id.device).map(|kind| kind.form()) {
            Some(Form::PARTITIONS) => {
                let profile = scene
                    .device(id)
                    .and_then(|device| text(device, attributes::PROFILE));
                Self::Partition(profile.unwrap_or_default().to_owned())
            }
            Some(form) if form.sharing.is_shared() => match form.target {
                TargetKind::Gpu => Self::Share,
                TargetKind::Partition => Self::PartitionShare,
            },
            _ => Self::Whole,
        }
    }
}

/// Names so many devices of these forms, as `3 partitions 1g.10gb`.
fn in_words(count: usize, forms: &BTreeSet<Kind>) -> String {
    let all: Vec<&Kind> = forms.iter().collect();
    let is_partition = |form: &&Kind| matches!(form, Kind::Partition(_));
    match all.as_slice() {
        [Kind::Partition(profile)] if !profile.is_empty() => {
            format!("{count} partitions {profile}")
        }
        all if all.iter().all(is_partition) => format!("{count} such partitions"),
        [Kind::Share] => format!("{count} shares"),
        [Kind::PartitionShare] => format!("{count} shares of partitions"),
        _ => format!("{count} such devices"),
    }
}

fn users(by: &[Holder], from: &str, scene: &Scene<'_>) -> String {
    let names: Vec<String> = by.iter().map(|holder| scene.user(holder, from)).collect();
    named(&names)
}

/// A class that selects no device of the node.
fn class_without_devices(request: &RequestReason, scene: &Scene<'_>) -> Cause {
    let mut wanted = request.expressions.iter().find_map(|e| profile(e));
    let class = request.class.as_str();
    let known = scene.form(class).filter(|form| *form != Form::ADMIN);
    let form = match (known, profile_of(class)) {
        (Some(form), _) => form,
        // The chart has a class for each common profile.
        (None, Some(profile)) => {
            let there = profiles(&request.refused.iter().collect::<Vec<_>>(), scene);
            wanted = Some(profile);
            if !there.is_empty() {
                return Cause::NoProfile {
                    profile: profile.to_owned(),
                    there: there.into_iter().map(str::to_owned).collect(),
                    obstacle: None,
                };
            }
            Form::PARTITIONS
        }
        (None, None) => {
            return Cause::Other {
                text: format!("class {class} selects no device of the node"),
                hint: None,
            };
        }
    };
    let (boards, undivided) = scene.boards(devices(request));
    let obstacle = obstacle(form, request, scene, (&boards, undivided));
    // A policy alone would not help: what is wrong in any case comes first.
    let memory_there = devices(request)
        .filter_map(|id| memory(scene.device(id)?))
        .max();
    let memory_wanted =
        asked(request, capacity::MEMORY).filter(|_| form == Form::TIME_SLICED && undivided);
    if let (Some(wanted), Some(most)) = (memory_wanted, memory_there)
        && crate::device::amount(wanted).is_some_and(|wanted| wanted > most)
    {
        return Cause::TooMuch {
            capacity: capacity::MEMORY.to_owned(),
            wanted: wanted.to_owned(),
            most: Some(format!("{}Mi", most >> 20)),
        };
    }
    let there = profiles_of(boards.iter().map(|(_, product)| product.as_str()));
    let wanted = wanted.filter(|_| form.target == TargetKind::Partition);
    match wanted.filter(|wanted| !there.is_empty() && !there.contains(*wanted)) {
        Some(profile) => Cause::NoProfile {
            profile: profile.to_owned(),
            // Profiles with media engines are not offered by default.
            there: (there.into_iter())
                .filter(|profile| !profile.contains(['+', '-']))
                .collect(),
            obstacle: Some(obstacle),
        },
        None => Cause::NotOffered(form, obstacle),
    }
}

/// Returns the devices that a request does not get.
fn devices(request: &RequestReason) -> impl Iterator<Item = &DeviceId> {
    request.refused.iter().map(|refused| &refused.device)
}

/// Says why a form is not offered by GPUs of these products; `undivided` if any is offered as more
/// than partitions.
fn obstacle(
    form: Form,
    request: &RequestReason,
    scene: &Scene<'_>,
    (boards, undivided): (&BTreeSet<(Mig, String)>, bool),
) -> Obstacle {
    let at_once = boards.iter().any(|(mig, _)| *mig == Mig::AtOnce);
    let with_reset = boards.iter().find(|(mig, _)| *mig == Mig::WithReset);
    let partitioned =
        devices(request).any(|id| kind(&id.device).is_some_and(|kind| kind.partition().is_some()));
    match (form.target, with_reset) {
        // Shares of partitions need a policy alone where there are partitions.
        (TargetKind::Partition, _) if at_once || partitioned => Obstacle::Policy,
        (TargetKind::Partition, Some((_, product))) => Obstacle::Reset {
            product: product.clone(),
            on: false,
        },
        (TargetKind::Partition, None) => match boards.first() {
            Some((_, product)) => Obstacle::NoMig {
                product: product.clone(),
                shared: devices(request).any(|id| Kind::of(id, scene) == Kind::Share),
            },
            None => Obstacle::Policy,
        },
        // Only partitions are published: MIG mode is on.
        (_, Some((_, product))) if !undivided && !at_once => Obstacle::Reset {
            product: product.clone(),
            on: true,
        },
        _ if form == Form::TIME_SLICED && asked(request, capacity::PERCENT).is_some() => {
            Obstacle::PolicyByPercent
        }
        _ => Obstacle::Policy,
    }
}

/// Returns the amount of a capacity that a request asks for.
fn asked<'r>(request: &'r RequestReason, capacity: &str) -> Option<&'r str> {
    let own = |name: &str| {
        name.rsplit_once('/')
            .map_or(name == capacity, |(_, n)| n == capacity)
    };
    let mut all = request.asked.iter();
    all.find(|(name, _)| own(name))
        .map(|(_, amount)| amount.as_str())
}

/// Returns the profiles of boards whose partitions are not published.
fn profiles_of<'p>(products: impl Iterator<Item = &'p str>) -> BTreeSet<String> {
    let board = |product: &str| {
        let mut boards = divvy_boards::profiles().iter();
        boards.find(|board| board.product_name == product)
    };
    let tables = products.filter_map(|product| divvy_boards::mig_capabilities(board(product)?.key));
    tables
        .flat_map(|table| {
            let name = |profile| Some(table.name(profile)?.to_string());
            table.profiles().iter().filter_map(name).collect::<Vec<_>>()
        })
        .collect()
}

/// The claim's selectors take none of the devices of the class.
fn not_selected(request: &RequestReason, of_class: &[&DeviceReason], scene: &Scene<'_>) -> Cause {
    let there = profiles(of_class, scene);
    let expressions = of_class.iter().filter_map(|refused| match &refused.reason {
        Reason::SelectorFalse { expression, .. } => Some(expression.as_str()),
        _ => None,
    });
    let expressions: BTreeSet<&str> = expressions.collect();
    let unknown = expressions
        .iter()
        .find_map(|expression| profile(expression))
        .filter(|profile| !there.is_empty() && !there.contains(profile));
    if let Some(profile) = unknown {
        return Cause::NoProfile {
            profile: profile.to_owned(),
            there: there.into_iter().map(str::to_owned).collect(),
            obstacle: None,
        };
    }
    let names = scene.names();
    let unknown =
        |expression: &&str| lookup::unknown(expression, &names.attributes, &names.capacities);
    let devices: Vec<(&str, &Device)> = of_class
        .iter()
        .filter_map(|refused| {
            let device = scene.device(&refused.device)?;
            Some((refused.device.driver.as_str(), device))
        })
        .collect();
    let part = expressions
        .iter()
        .find_map(|expression| false_part(expression, &devices));
    Cause::NotSelected {
        class: request.class.clone(),
        devices: of_class.len(),
        unknown: expressions.iter().flat_map(unknown).collect(),
        part,
    }
}

/// Says why a selector of the claim fails, and how it is written.
fn failed(request: &RequestReason, error: &str) -> Cause {
    let mut all = request.expressions.iter();
    let instead = all.find_map(|expression| overload(expression, error));
    let what = instead.as_deref().unwrap_or(error);
    Cause::Other {
        text: format!("the claim's selector fails: {what}"),
        hint: None,
    }
}

/// Says whether a request is one that the scheduler makes of a container's limits.
fn is_of_limits(request: &str) -> bool {
    let rest = request.strip_prefix("container-");
    rest.is_some_and(|rest| rest.contains("-request-"))
}

/// Returns the profiles of partitions among devices.
fn profiles<'s>(devices: &[&DeviceReason], scene: &'s Scene<'_>) -> BTreeSet<&'s str> {
    devices
        .iter()
        .filter_map(|refused| text(scene.device(&refused.device)?, attributes::PROFILE))
        .collect()
}

/// Returns the profile that an expression compares with, as in `….profile == "1g.10gb"`.
fn profile(expression: &str) -> Option<&str> {
    let (_, rest) = expression.split_once(attributes::PROFILE)?;
    let rest = rest.trim_start_matches(['"', '\'', ']', ' ']);
    let rest = rest.strip_prefix("==")?.trim_start();
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let (profile, _) = rest.get(1..)?.split_once(quote)?;
    Some(profile)
}

/// Names of the capacities that requests can name: those of shares first.
fn capacities(selected: &[&DeviceReason], scene: &Scene<'_>) -> Vec<String> {
    let mut all = BTreeSet::new();
    for refused in selected {
        let device = scene.device(&refused.device);
        let of = device.and_then(|device| device.capacity.as_ref());
        all.extend(of.into_iter().flat_map(BTreeMap::keys).cloned());
    }
    let mut all: Vec<String> = all.into_iter().collect();
    all.sort_by_key(|name| name != names::capacity::MEMORY);
    all
}

/// Devices of a class, in words.
fn what(class: &str, scene: &Scene<'_>) -> String {
    match scene.form(class) {
        Some(Form::WHOLE) => "whole GPUs".to_owned(),
        Some(Form::PARTITIONS) => "such partitions".to_owned(),
        Some(Form::TIME_SLICED) => "shares".to_owned(),
        Some(Form::SHARED_PARTITIONS) => "shares of partitions".to_owned(),
        Some(Form::MPS_PARTITIONS) => "MPS shares of partitions".to_owned(),
        _ => format!("devices of class {class}"),
    }
}

fn place(refused: &DeviceReason, scene: &Scene<'_>) -> String {
    scene
        .gpu_of(&refused.device)
        .map_or_else(|| refused.device.device.clone(), |n| format!("gpu-{n}"))
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars).collect(),
        None => String::new(),
    }
}
