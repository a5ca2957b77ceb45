//! All the reasons of a node, device by device.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use divvy_allocator::{
    ConstraintReason, DeviceReason, Explanation, Holder, MAX_RESULTS, Reason, RequestReason,
};

use crate::cause::named;

/// Counter sets that have a line each; the rest is counted.
const SETS: usize = 4;

/// Returns a text of one line a reason, with a hint at the end.
pub fn detail(of: &Explanation) -> String {
    let mut text = String::new();
    // A string takes all that is written.
    let _ = write_all(of, &mut text);
    text
}

fn write_all(of: &Explanation, f: &mut String) -> fmt::Result {
    if of.competing {
        let what = if of.limited {
            format!("together they exceed the limit of {MAX_RESULTS} devices per claim")
        } else if of.requests.len() > 1 {
            "each request can be met alone, but not all together".to_owned()
        } else {
            "each device is available alone, but not so many together".to_owned()
        };
        write!(f, "node {}: {what}{}", of.node, counted(of))?;
        for request in &of.requests {
            write!(f, "\n{}", headline(request))?;
        }
        for ConstraintReason {
            claim,
            constraint,
            problem,
        } in &of.constraints
        {
            write!(f, "\n  constraint {constraint} of claim {claim}: {problem}")?;
        }
    } else {
        for (number, request) in of.requests.iter().enumerate() {
            let newline = if number == 0 { "" } else { "\n" };
            write!(f, "{newline}node {}: {}", of.node, headline(request))?;
            for line in lines(&request.refused) {
                write!(f, "\n  {line}")?;
            }
        }
    }
    for (pool, problem) in &of.unusable_pools {
        write!(f, "\n  pool {pool} {problem}")?;
    }
    match hint(of) {
        Some(hint) => write!(f, "\nhint: {hint}"),
        None => Ok(()),
    }
}

/// Names the claim, the number that it wants and the number that it can have.
fn headline(of: &RequestReason) -> String {
    let total = of.available + of.refused.len();
    let wanted = match of.wanted {
        Some(1) => "1 device".to_owned(),
        Some(count) => format!("{count} devices"),
        None => "all devices".to_owned(),
    };
    let RequestReason {
        claim,
        request,
        class,
        available,
        ..
    } = of;
    format!(
        "claim {claim}, request {request:?} needs {wanted} of class {class}, {available} of {total} available"
    )
}

/// Returns `: 9 devices are wanted, 8 at most can be had` where that is all there is to say of
/// requests that compete.
pub(crate) fn counted(of: &Explanation) -> String {
    match of.too_few.filter(|_| !of.limited) {
        Some((wanted, most)) => {
            format!(": {wanted} devices are wanted, {most} at most can be had")
        }
        None => String::new(),
    }
}

/// Returns the class that selects no device of the node at all, where that is the reason.
fn class_without_devices(of: &Explanation) -> Option<&str> {
    let request = of.requests.first().filter(|_| !of.competing)?;
    let class = format!("class {}", request.class);
    let is_class = |device: &DeviceReason| matches!(&device.reason, Reason::SelectorFalse { origin, .. } if *origin == class);
    let none = !request.refused.is_empty() && request.refused.iter().all(is_class);
    none.then_some(request.class.as_str())
}

/// Returns advice to the reader, where the reasons contain it.
pub(crate) fn hint(of: &Explanation) -> Option<String> {
    if of.devices == 0 && !of.unusable_pools.is_empty() {
        return Some("wait for the driver to finish publishing, then try again".to_owned());
    }
    if of.devices == 0 {
        let elsewhere = match of.other_nodes.as_slice() {
            [] => "no driver publishes devices on any node: check that the plugin is running"
                .to_owned(),
            nodes => format!("devices are published for {}", named(nodes)),
        };
        return Some(format!(
            "no driver publishes devices for node {}; {elsewhere}",
            of.node
        ));
    }
    let reasons = || {
        of.requests
            .iter()
            .flat_map(|r| &r.refused)
            .map(|d| &d.reason)
    };
    if of.competing {
        return None;
    }
    let beyond = of
        .requests
        .iter()
        .find_map(|r| Some((r, r.wanted?, selected(r))))
        .filter(|(_, wanted, selected)| {
            of.requests.len() == 1 && *selected > 0 && selected < wanted
        });
    if let Some((_, wanted, selected)) = beyond {
        let has = if selected == 1 {
            "1 device".to_owned()
        } else {
            format!("{selected} devices")
        };
        return Some(format!(
            "node {} has {has} that the class and claim select, in use or not, but {wanted} are requested: request fewer (spec.devices.requests count), or use a larger node",
            of.node
        ));
    }
    if let Some(class) = class_without_devices(of) {
        return Some(format!(
            "class {class} selects no device of this node: compare the attributes of the devices with the class, or use a node that has such devices"
        ));
    }
    if reasons().all(|r| matches!(r, Reason::SelectorFalse { .. })) {
        return Some("no device on this node matches the class and the claim's selectors; compare the attributes of the devices with the expressions".to_owned());
    }
    let mut holders: Vec<String> = reasons()
        .flat_map(Reason::holders)
        .map(ToString::to_string)
        .collect();
    let mut seen = BTreeSet::new();
    holders.retain(|holder| seen.insert(holder.clone()));
    if !holders.is_empty() {
        let who = named(&holders);
        return Some(format!(
            "devices become free when the pods that use {who} end"
        ));
    }
    if let Some(
        Reason::CapacityExceeded { capacity, .. } | Reason::NoSuchCapacity { capacity, .. },
    ) = reasons().find(|r| {
        matches!(
            r,
            Reason::CapacityExceeded { .. } | Reason::NoSuchCapacity { .. }
        )
    }) {
        return Some(format!(
            "change {capacity:?} in the request's capacity.requests to a value that the devices offer (kubectl get resourceslices -o yaml)"
        ));
    }
    let tainted = reasons().any(|r| matches!(r, Reason::Tainted { .. }));
    tainted.then(|| {
            "a taint keeps claims off the device until its cause is gone; a toleration is for monitoring and repair only"
                .to_owned()
        })
}

/// Counts the devices that the class and claim select, held or not.
fn selected(of: &RequestReason) -> usize {
    let not = |r: &&DeviceReason| {
        matches!(
            r.reason,
            Reason::SelectorFalse { .. } | Reason::NotOnNode | Reason::FeatureOff
        )
    };
    of.available + of.refused.len() - of.refused.iter().filter(not).count()
}

/// Returns devices with the same reason in one line. Devices that others hold come first: that may
/// change. Devices that the class and claim do not want come last, and by name only where there is
/// nothing else to say.
fn lines(refused: &[DeviceReason]) -> Vec<String> {
    let mut by_reason: BTreeMap<&Reason, Vec<&str>> = BTreeMap::new();
    let mut by_set: BTreeMap<&str, Vec<(&Reason, &str)>> = BTreeMap::new();
    let mut in_use = Vec::new();
    for DeviceReason { device, reason } in refused {
        match reason {
            Reason::InUse { by } => {
                in_use.push(format!("{} by claim {}", device.device, claims(by)));
            }
            Reason::CounterShort { set, .. } => by_set
                .entry(set)
                .or_default()
                .push((reason, &device.device)),
            _ => by_reason.entry(reason).or_default().push(&device.device),
        }
    }
    let mut lines = counters(&by_set);
    if !in_use.is_empty() {
        let users = named(&in_use);
        lines.push(format!("{} in use: {users}", count(in_use.len())));
    }
    let (unwanted, others): (Vec<_>, Vec<_>) = by_reason
        .into_iter()
        .partition(|(reason, _)| matches!(reason, Reason::SelectorFalse { .. }));
    for (reason, devices) in others {
        lines.push(format!(
            "{}: {}",
            many(devices.len(), reason),
            named(&devices)
        ));
    }
    let alone = lines.is_empty();
    for (reason, devices) in unwanted {
        let names = if alone {
            format!(": {}", named(&devices))
        } else {
            String::new()
        };
        lines.push(format!("{}{names}", many(devices.len(), reason)));
    }
    lines
}

/// Devices short of counters: a line for each of the first sets, which is one a GPU, and one for
/// the rest.
fn counters(by_set: &BTreeMap<&str, Vec<(&Reason, &str)>>) -> Vec<String> {
    let mut lines = Vec::new();
    for (set, devices) in by_set.iter().take(SETS) {
        let Some((
            Reason::CounterShort {
                counter,
                wanted,
                left,
                by,
                ..
            },
            first,
        )) = devices.first()
        else {
            continue;
        };
        let names: Vec<&str> = devices.iter().map(|(_, name)| *name).collect();
        let names = named(&names);
        let holders = if by.is_empty() {
            String::new()
        } else {
            format!(", held by claim {}", claims(by))
        };
        lines.push(format!(
            "{} blocked by devices in use (counter set {set}: {first} needs {counter} {wanted}, left {left}{holders}): {names}",
            count(devices.len())
        ));
    }
    let rest: Vec<_> = by_set.values().skip(SETS).collect();
    if !rest.is_empty() {
        let devices = rest.iter().map(|d| d.len()).sum();
        lines.push(format!(
            "{} blocked by devices in use ({} more counter sets)",
            count(devices),
            rest.len()
        ));
    }
    lines
}

fn claims(by: &[Holder]) -> String {
    let names: Vec<String> = by.iter().map(ToString::to_string).collect();
    named(&names)
}

fn count(devices: usize) -> String {
    if devices == 1 {
        "1 device is".to_owned()
    } else {
        format!("{devices} devices are")
    }
}

fn many(devices: usize, reason: &Reason) -> String {
    let count = count(devices);
    match reason {
        Reason::SelectorFalse {
            origin,
            index,
            expression,
        } => {
            format!(
                "{count} not selected by {origin}, selector #{index} `{}`",
                one_line(expression)
            )
        }
        Reason::InUse { .. } => format!("{count} in use"),
        Reason::CounterShort { set, .. } => {
            format!("{count} blocked by devices in use (counter set {set})")
        }
        Reason::PoolOverdrawn {
            set,
            counter,
            left,
            by,
        } => format!(
            "{count} blocked: claims hold more of counter {counter} of counter set {set} than exists (left {left}, held by claim {})",
            claims(by)
        ),
        Reason::NoSuchCapacity { capacity, has } => {
            let has = match has.as_slice() {
                [] => String::new(),
                has => format!(" (there is {})", has.join(", ")),
            };
            format!("{count} without capacity {capacity:?}{has}")
        }
        Reason::CapacityExceeded {
            capacity,
            wanted,
            most,
        } => {
            let most = most
                .as_ref()
                .map_or_else(String::new, |most| format!(", at most {most}"));
            format!("{count} unable to grant {capacity} {wanted} to one request{most}")
        }
        Reason::CapacityShort {
            capacity,
            wanted,
            left,
            by,
        } => format!(
            "{count} short of {capacity} ({wanted} requested, {left} left, shared by claim {})",
            claims(by)
        ),
        Reason::Tainted { taint } => {
            format!("{count} tainted with {taint}, which the request does not tolerate")
        }
        Reason::NoSuchAttribute { constraint } => {
            format!("{count} without a value for the claim's constraint {constraint}")
        }
        Reason::NotOnNode => format!("{count} on other nodes"),
        Reason::FeatureOff => format!("{count} not usable: a feature gate of the scheduler is off"),
        Reason::Failed { error } => format!("{count} not evaluated ({error})"),
    }
}

/// An expression written over several lines, in one.
fn one_line(expression: &str) -> String {
    expression.split_whitespace().collect::<Vec<_>>().join(" ")
}
