//! Differences of a node's slices from a template, and whether autoscalers take the node for ready.
//!
//! Cluster Autoscaler takes a node for ready when for each pool of its template the node has a pool
//! of the same driver whose devices have the same names (`kubernetes/autoscaler`,
//! `processors/customresources/dra_processor.go` at 41f98f74, `isEqualResourceSlices`); Karpenter
//! when each driver has a pool of which all slices are there (Go module `sigs.k8s.io/karpenter`
//! v1.14.1, `pkg/controllers/nodeclaim/lifecycle/initialization.go`, `DRADriversPublished`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use divvy_api::names::{Naming, attributes as attr, taints};
use divvy_controller::comparable_spec;
use divvy_offer::pool_name;
use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourceSlice, ResourceSliceSpec};
use serde::Serialize;

use super::{Template, anonymous};
use divvy_why::device::kind;

/// A node beside a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub node: String,
    pub driver: String,
    /// Why Cluster Autoscaler does not take the node for ready; empty if it does.
    pub cluster_autoscaler: Vec<String>,
    /// The same of Karpenter.
    pub karpenter: Vec<String>,
    /// All differences, those that keep the node from being ready first.
    pub differences: Vec<Difference>,
}

impl Report {
    /// Returns whether both take the node for ready.
    pub fn is_ready(&self) -> bool {
        self.cluster_autoscaler.is_empty() && self.karpenter.is_empty()
    }
}

/// Kind of a difference, in the order in which they are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum What {
    /// Devices of the template that the node lacks.
    Missing,
    /// Devices of the node that the template lacks.
    Extra,
    /// Devices that no pod gets for a taint.
    Tainted,
    Attribute,
    /// Capacities, counters that a device draws on, or its being shared.
    Amount,
    /// Counter sets.
    Counters,
    /// Order of devices or their division into slices.
    Order,
}

/// A difference that some devices have.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    pub what: What,
    pub text: String,
    pub devices: Vec<String>,
}

/// Compares the slices of a node, of this driver, with a template.
pub fn compare(template: &Template, node: &str, slices: &[ResourceSlice]) -> Report {
    let mut pools: BTreeMap<&str, Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in slices {
        let is_of_node = slice.spec.node_name.as_deref() == Some(node);
        if is_of_node && slice.spec.driver == template.driver {
            pools.entry(&slice.spec.pool.name).or_default().push(slice);
        }
    }
    let mut report = Report {
        node: node.to_owned(),
        driver: template.driver.clone(),
        cluster_autoscaler: Vec::new(),
        karpenter: Vec::new(),
        differences: Vec::new(),
    };
    // In the place of NVIDIA's driver, its own pool may be there, too.
    let own = pools.remove_entry(pool_name(node).as_str());
    let Some((pool, slices)) = own.or_else(|| pools.pop_first()) else {
        let absent = format!(
            "the node has no ResourceSlice of {}: look at the plugin's pod on it (kubectl divvy status node {node})",
            template.driver
        );
        report.cluster_autoscaler.push(absent.clone());
        report.karpenter.push(absent);
        return report;
    };
    let newest = newest(&slices);
    let count = newest
        .first()
        .map_or(0, |slice| slice.spec.pool.resource_slice_count);
    if usize::try_from(count) != Ok(newest.len()) {
        report.karpenter.push(format!(
            "{} of {count} slices of pool {pool} are there: the plugin is writing it, or was stopped while it did",
            newest.len()
        ));
    }
    // By name, as the template's, which is how the scheduler tries them.
    let mut newest = newest;
    newest.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let wanted = by_name(template.specs.iter());
    let found = by_name(newest.iter().map(|slice| &slice.spec));
    let names =
        |from: &BTreeMap<&str, &Device>, without: &BTreeMap<&str, &Device>| -> Vec<String> {
            let only = from.keys().filter(|name| !without.contains_key(*name));
            only.map(|name| (*name).to_owned()).collect()
        };
    for (what, devices, where_not) in [
        (What::Missing, names(&wanted, &found), "missing"),
        (What::Extra, names(&found, &wanted), "not in the template"),
    ] {
        let number = match devices.len() {
            0 => continue,
            1 => "1 device is".to_owned(),
            n => format!("{n} devices are"),
        };
        let text = format!("{number} {where_not}: {}", by_gpu(&devices));
        report.cluster_autoscaler.push(text.clone());
        report.differences.push(Difference {
            what,
            text,
            devices,
        });
    }
    report.differences.extend(tainted(&found));
    report
        .differences
        .extend(changed(&template.driver, &wanted, &found));
    let rest = in_whole(template, &newest, &report.differences);
    report.differences.extend(rest);
    report
}

/// Returns the slices of the newest generation.
fn newest<'s>(slices: &[&'s ResourceSlice]) -> Vec<&'s ResourceSlice> {
    let newest = slices.iter().map(|slice| slice.spec.pool.generation).max();
    let is_newest = |slice: &&&ResourceSlice| Some(slice.spec.pool.generation) == newest;
    slices.iter().filter(is_newest).copied().collect()
}

fn by_name<'s>(
    specs: impl Iterator<Item = &'s ResourceSliceSpec>,
) -> BTreeMap<&'s str, &'s Device> {
    specs
        .flat_map(|spec| spec.devices.iter().flatten())
        .map(|device| (device.name.as_str(), device))
        .collect()
}

/// Returns the taints of devices, each with the devices that have it.
fn tainted(found: &BTreeMap<&str, &Device>) -> Vec<Difference> {
    let mut all: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
    for device in found.values() {
        for taint in device.taints.iter().flatten() {
            let value = taint.value.as_ref().filter(|value| !value.is_empty());
            let value = value.map(|value| format!("={value}")).unwrap_or_default();
            let key = (
                format!("{}{value}:{}", taint.key, taint.effect),
                remedy(&taint.key).to_owned(),
            );
            all.entry(key).or_default().push(device.name.clone());
        }
    }
    let of = |((taint, remedy), devices): ((String, String), Vec<String>)| Difference {
        what: What::Tainted,
        text: format!("taint {taint} on {}{remedy}", by_gpu(&devices)),
        devices,
    };
    all.into_iter().map(of).collect()
}

/// Returns what a taint means for a node that is to be copied.
fn remedy(key: &str) -> &'static str {
    if key == taints::WITHDRAWN {
        ": they go when their claims do, and are not in the template"
    } else {
        ": no pod gets them, and a node that is copied from this one seems to have them tainted, too"
    }
}

/// Returns attributes and amounts that differ, each with the devices of which they do.
fn changed(
    driver: &str,
    wanted: &BTreeMap<&str, &Device>,
    found: &BTreeMap<&str, &Device>,
) -> Vec<Difference> {
    let mut all: BTreeMap<(What, String), Vec<String>> = BTreeMap::new();
    let mut note =
        |what, text, device: &str| all.entry((what, text)).or_default().push(device.to_owned());
    for (name, wanted) in wanted {
        let Some(found) = found.get(name) else {
            continue;
        };
        let pair = [*wanted, *found].map(|device| plain(driver, device));
        let [wanted, found] = &pair;
        let empty = BTreeMap::new();
        let [of_wanted, of_found] =
            [wanted, found].map(|device| device.attributes.as_ref().unwrap_or(&empty));
        for key in of_wanted
            .keys()
            .chain(of_found.keys())
            .collect::<BTreeSet<_>>()
        {
            let (here, there) = (of_wanted.get(key), of_found.get(key));
            if here != there {
                let [here, there] = [here, there].map(value);
                note(
                    What::Attribute,
                    format!("{key} is {there}, and {here} in the template"),
                    name,
                );
            }
        }
        let rest = |device: &Device| Device {
            attributes: None,
            ..device.clone()
        };
        let [wanted, found] = [wanted, found].map(rest);
        if wanted != found {
            let mut parts = Vec::new();
            if wanted.capacity != found.capacity {
                parts.push("capacity");
            }
            if wanted.consumes_counters != found.consumes_counters {
                parts.push("counters that it draws on");
            }
            if parts.is_empty() {
                parts.push("fields");
            }
            note(What::Amount, format!("other {}", parts.join(" and ")), name);
        }
    }
    let of = |((what, text), devices): ((What, String), Vec<String>)| Difference {
        what,
        text: format!("{text}: {}", by_gpu(&devices)),
        devices,
    };
    all.into_iter().map(of).collect()
}

/// Returns a device for comparing: without identity, taints, its address on the bus, which no
/// autoscaler reads, and with amounts in one way of writing them.
fn plain(driver: &str, device: &Device) -> Device {
    let spec = ResourceSliceSpec {
        devices: Some(vec![device.clone()]),
        ..ResourceSliceSpec::default()
    };
    let spec = comparable_spec(&anonymous(driver, spec));
    let mut device = spec
        .devices
        .into_iter()
        .flatten()
        .next()
        .unwrap_or_default();
    if let Some(attributes) = &mut device.attributes {
        attributes.retain(|name, _| Naming::ours(driver, name) != attr::PCI_BUS_ID);
    }
    device
}

/// Returns the value of an attribute as text.
fn value(attribute: Option<&k8s_openapi::api::resource::v1::DeviceAttribute>) -> String {
    let Some(attribute) = attribute else {
        return "absent".to_owned();
    };
    let text = attribute
        .string
        .clone()
        .or_else(|| attribute.version.clone());
    let number = attribute.int.map(|number| number.to_string());
    let flag = attribute.bool.map(|flag| flag.to_string());
    text.or(number)
        .or(flag)
        .unwrap_or_else(|| "of another kind".to_owned())
}

/// Returns what differs beside the devices themselves: counter sets, and the order of devices where
/// these are the same.
fn in_whole(
    template: &Template,
    newest: &[&ResourceSlice],
    so_far: &[Difference],
) -> Vec<Difference> {
    let mut all = Vec::new();
    let difference = |what, text: &str| Difference {
        what,
        text: text.to_owned(),
        devices: Vec::new(),
    };
    let sets =
        |specs: &mut dyn Iterator<Item = &ResourceSliceSpec>| -> BTreeMap<String, CounterSet> {
            let plain = specs.map(comparable_spec);
            let sets = plain.flat_map(|spec| spec.shared_counters.unwrap_or_default());
            sets.map(|set| (set.name.clone(), set)).collect()
        };
    let wanted = sets(&mut template.specs.iter());
    let found = sets(&mut newest.iter().map(|slice| &slice.spec));
    let names = wanted.keys().chain(found.keys()).collect::<BTreeSet<_>>();
    let differ: Vec<&str> = names
        .into_iter()
        .filter(|name| wanted.get(*name) != found.get(*name))
        .map(String::as_str)
        .collect();
    if !differ.is_empty() {
        let text = format!("counter sets differ: {}", differ.join(", "));
        all.push(difference(What::Counters, &text));
    }
    let order = |specs: &mut dyn Iterator<Item = &ResourceSliceSpec>| -> Vec<Vec<String>> {
        let names = |spec: &ResourceSliceSpec| {
            let devices = spec.devices.iter().flatten();
            devices.map(|device| device.name.clone()).collect()
        };
        specs.map(names).collect()
    };
    let is_other =
        order(&mut template.specs.iter()) != order(&mut newest.iter().map(|slice| &slice.spec));
    let has_others = so_far
        .iter()
        .any(|one| matches!(one.what, What::Missing | What::Extra));
    if is_other && !has_others {
        all.push(difference(
            What::Order,
            "the devices are in another order, or divided into slices otherwise",
        ));
    }
    all
}

/// Returns devices in short: the only one by name, of several the GPUs with how many of each.
fn by_gpu(devices: &[String]) -> String {
    if let [only] = devices {
        return only.clone();
    }
    let mut gpus: BTreeMap<Option<u32>, Vec<&str>> = BTreeMap::new();
    for device in devices {
        gpus.entry(kind(device).map(|kind| kind.ordinal()))
            .or_default()
            .push(device);
    }
    let each = gpus
        .into_iter()
        .map(|(gpu, devices)| match (gpu, devices.as_slice()) {
            (_, [only]) => (*only).to_owned(),
            (Some(gpu), all) => format!("{} of gpu-{gpu}", all.len()),
            (None, all) => format!("{} of no GPU of divvy's", all.len()),
        });
    each.collect::<Vec<_>>().join(", ")
}

/// Returns the report for people.
pub fn text(report: &Report) -> String {
    let mut text = String::new();
    for (autoscaler, why) in [
        ("Cluster Autoscaler", &report.cluster_autoscaler),
        ("Karpenter", &report.karpenter),
    ] {
        // Writing to a string does not fail.
        let _ = match why.as_slice() {
            [] => writeln!(text, "{autoscaler}: ready"),
            why => writeln!(text, "{autoscaler}: not ready: {}", why.join("; ")),
        };
    }
    if report.differences.is_empty() {
        text += "node and template are the same\n";
    }
    for difference in &report.differences {
        let _ = writeln!(text, "- {}", difference.text);
    }
    text.trim_end().to_owned()
}
