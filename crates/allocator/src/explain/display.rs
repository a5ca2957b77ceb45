//! The explanation as a text for people.

use std::collections::BTreeMap;
use std::fmt;

use super::{DeviceReason, Explanation, Reason, RequestReason};
use crate::allocate::MAX_RESULTS;

/// Devices that are named one by one; the rest is counted.
const NAMED: usize = 4;

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.competing && self.requests.len() > 1 {
            let what = if self.limited {
                format!("together they would exceed the {MAX_RESULTS} devices a claim can have")
            } else {
                "each request could be satisfied alone, not all of them together".to_owned()
            };
            write!(f, "node {}: {what}", self.node)?;
            for request in &self.requests {
                write!(f, "\n{}", request.headline())?;
            }
        } else {
            for (number, request) in self.requests.iter().enumerate() {
                let newline = if number == 0 { "" } else { "\n" };
                write!(f, "{newline}node {}: {}", self.node, request.headline())?;
                for line in lines(&request.refused) {
                    write!(f, "\n  {line}")?;
                }
            }
        }
        for (pool, problem) in &self.unusable_pools {
            write!(f, "\n  pool {pool} {problem}")?;
        }
        match self.hint() {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl RequestReason {
    /// Who wants how much and can have how much.
    fn headline(&self) -> String {
        let total = self.available + self.refused.len();
        let wanted = match self.wanted {
            Some(1) => "1 device".to_owned(),
            Some(count) => format!("{count} devices"),
            None => "all devices".to_owned(),
        };
        let Self { claim, request, class, available, .. } = self;
        format!(
            "claim {claim}, request {request:?} wants {wanted} of class {class}, {available} of {total} can be had"
        )
    }
}

impl Explanation {
    /// What the reader can do, where the reasons say it.
    fn hint(&self) -> Option<String> {
        if self.devices == 0 && !self.unusable_pools.is_empty() {
            return Some("wait for the driver to finish publishing, then try again".to_owned());
        }
        if self.devices == 0 {
            let elsewhere = match self.other_nodes.as_slice() {
                [] => "no driver publishes devices for any node: is one running?".to_owned(),
                nodes => format!("devices are published for {}", named(nodes.iter().map(String::as_str))),
            };
            return Some(format!("no driver publishes devices for node {}; {elsewhere}", self.node));
        }
        let reasons = || self.requests.iter().flat_map(|r| &r.refused).map(|d| &d.reason);
        if self.competing {
            return None;
        }
        if reasons().all(|r| matches!(r, Reason::SelectorFalse { .. })) {
            return Some("no device of the node is what the class and claim select; compare the attributes of the devices with the expressions".to_owned());
        }
        let holders = reasons().filter_map(|r| if let Reason::InUse { by } = r { by.first() } else { None });
        let mut holders: Vec<String> = holders.map(ToString::to_string).collect();
        holders.dedup();
        if !holders.is_empty() {
            let who = named(holders.iter().map(String::as_str));
            return Some(format!("devices come free when the pods that use {who} end"));
        }
        let tainted = reasons().any(|r| matches!(r, Reason::Tainted { .. }));
        tainted.then(|| {
            "a tainted device is kept free on purpose; a toleration in the request overrides that".to_owned()
        })
    }
}

/// Devices with the same reason in one line.
fn lines(refused: &[DeviceReason]) -> Vec<String> {
    let mut by_reason: BTreeMap<&Reason, Vec<&str>> = BTreeMap::new();
    let mut in_use = Vec::new();
    for DeviceReason { device, reason } in refused {
        if let Reason::InUse { by } = reason {
            let by = named(by.iter().map(ToString::to_string).collect::<Vec<_>>().iter().map(String::as_str));
            in_use.push(format!("{} by claim {by}", device.device));
        } else {
            by_reason.entry(reason).or_default().push(&device.device);
        }
    }
    let mut lines: Vec<String> = by_reason
        .into_iter()
        .map(|(reason, devices)| format!("{}: {}", many(devices.len(), reason), named(devices.into_iter())))
        .collect();
    if !in_use.is_empty() {
        let users = named(in_use.iter().map(String::as_str));
        lines.push(format!("{} in use: {users}", count(in_use.len())));
    }
    lines
}

fn count(devices: usize) -> String {
    if devices == 1 { "1 device is".to_owned() } else { format!("{devices} devices are") }
}

fn many(devices: usize, reason: &Reason) -> String {
    let count = count(devices);
    match reason {
        Reason::SelectorFalse { origin, index, expression } => {
            format!("{count} not selected by {origin}, selector #{index} `{}`", one_line(expression))
        }
        Reason::InUse { .. } => format!("{count} in use"),
        Reason::Tainted { taint } => {
            format!("{count} tainted with {taint}, which the request does not tolerate")
        }
        Reason::NotOnNode => format!("{count} for other nodes"),
        Reason::FeatureOff => format!("{count} not usable: a feature gate of the scheduler is off"),
        Reason::Failed { error } => format!("{count} not judged ({error})"),
    }
}

/// An expression written over several lines, in one.
pub(crate) fn one_line(expression: &str) -> String {
    expression.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A list that stays short.
fn named<'n>(names: impl ExactSizeIterator<Item = &'n str>) -> String {
    let total = names.len();
    let text = names.take(NAMED).collect::<Vec<_>>().join(", ");
    if total > NAMED { format!("{text} and {} more", total - NAMED) } else { text }
}
