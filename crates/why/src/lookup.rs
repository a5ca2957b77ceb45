//! Names of attributes and capacities that selectors read: those that no device has, and the ones
//! that were probably meant. Pure.

use std::collections::BTreeSet;

use divvy_api::names;

use crate::driver::NVIDIA;
use crate::spelling::nearest;

/// Returns a name with its domain: names without one are those of the device's driver.
pub fn full(driver: &str, name: &str) -> String {
    if name.contains('/') {
        name.to_owned()
    } else {
        format!("{driver}/{name}")
    }
}

/// Says which names an expression takes from a device that none has, with what was probably meant.
/// Where nothing is known of attributes or of capacities, there is nothing to compare with.
pub fn unknown(
    expression: &str,
    attributes: &BTreeSet<String>,
    capacities: &BTreeSet<String>,
) -> Vec<String> {
    let mut all = in_map(expression, "attributes", attributes, capacities);
    all.extend(in_map(expression, "capacity", capacities, attributes));
    all
}

/// Does the same for one map of a device: `attributes` or `capacity`. The names of the other one
/// are `others`.
fn in_map(
    expression: &str,
    map: &str,
    there: &BTreeSet<String>,
    others: &BTreeSet<String>,
) -> Vec<String> {
    let what = if map == "capacity" { map } else { "attribute" };
    let path = format!("device.{map}");
    let mut all = Vec::new();
    for lookup in lookups(expression, &path) {
        let Lookup {
            domain,
            name,
            member,
        } = lookup;
        // Unless devices of that driver are there: NVIDIA's own, or those of a stand-in.
        let is_there = |full: &String| full.starts_with(&format!("{NVIDIA}/"));
        if domain == NVIDIA && !there.iter().any(is_there) {
            let ours = names::DRIVER;
            all.push(format!(
                "divvy's domain is {ours}: write {path}[\"{ours}\"].{name}, not {domain}"
            ));
            continue;
        }
        if there.is_empty() {
            continue;
        }
        if there.contains(&format!("{domain}/{name}")) {
            if let Some(member) = member.filter(|_| what == "attribute") {
                all.push(format!(
                    "leave out \".{member}\" behind {path}[{domain:?}].{name}: it is the value itself"
                ));
            }
            continue;
        }
        // A name of the other map is meant before one that is spelt alike.
        if others.contains(&format!("{domain}/{name}")) {
            all.push(if map == "capacity" {
                format!("{name} is an attribute: write device.attributes[{domain:?}].{name}")
            } else {
                format!(
                    "{name} is a capacity: write device.capacity[{domain:?}].{name}.compareTo(quantity(\"40Gi\")) >= 0"
                )
            });
            continue;
        }
        let hint = match meant(domain, name, there) {
            // As a slice has it in YAML: `attributes["type"].string`.
            _ if !domain.contains(['.', '/'])
                && let Some((right, domain)) = meant("", domain, there) =>
            {
                format!(": write {path}[{right:?}].{domain}")
            }
            Some((right, meant)) if right == domain => format!(" (did you mean {meant:?}?)"),
            Some((right, meant)) => format!(" (did you mean {path}[{right:?}].{meant}?)"),
            None => String::new(),
        };
        all.push(format!("no device has {what} {name:?} of {domain:?}{hint}"));
    }
    all
}

/// Returns the attribute that was probably meant by one that no device has, with its domain.
pub fn meant_attribute(attribute: &str, known: &BTreeSet<String>) -> Option<String> {
    if known.contains(attribute) {
        return None;
    }
    let (domain, name) = attribute.split_once('/').unwrap_or(("", attribute));
    meant(domain, name, known).map(|(domain, name)| format!("{domain}/{name}"))
}

/// Finds the qualified name that was probably meant, as domain and name: the same name in another
/// domain, then one spelt alike in the same domain, then in any.
pub fn meant<'k>(
    domain: &str,
    name: &str,
    known: &'k BTreeSet<String>,
) -> Option<(&'k str, &'k str)> {
    let mut all: Vec<(&str, &str)> = known
        .iter()
        .filter_map(|full| full.split_once('/'))
        .collect();
    // Ours first.
    all.sort_by_key(|(of, _)| *of != names::DRIVER);
    let same = all
        .iter()
        .find(|(_, other)| other.eq_ignore_ascii_case(name));
    let alike = |within: &dyn Fn(&str) -> bool| {
        let names = all
            .iter()
            .filter(|(of, _)| within(of))
            .map(|(_, other)| *other);
        let found = nearest(name, names)?;
        all.iter().find(|(of, other)| within(of) && *other == found)
    };
    // The beginning of one name, as `nvlink` of `nvlinkDomain`.
    let longer = || {
        let short = name.to_lowercase();
        let begins = |(_, other): &&(&str, &str)| other.to_lowercase().starts_with(&short);
        all.iter().find(|found| short.len() > 3 && begins(found))
    };
    same.or_else(|| alike(&|of| of == domain))
        .or_else(|| alike(&|_| true))
        .or_else(longer)
        .copied()
}

/// Place in an expression that reads an attribute or a capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place<'e> {
    pub(crate) domain: &'e str,
    pub(crate) name: &'e str,
    pub(crate) is_capacity: bool,
    /// The place as it is written, and where it begins.
    pub(crate) text: &'e str,
    pub(crate) start: usize,
}

/// Returns the places at which an expression reads values of a device, in their order.
pub(crate) fn places(expression: &str) -> impl Iterator<Item = Place<'_>> {
    let of_map = |map: &'static str| {
        expression.match_indices(map).filter_map(move |(start, _)| {
            let rest = expression.get(start + map.len()..)?;
            let (domain, rest) = bracketed(rest)?;
            let (name, rest) = bracketed(rest).or_else(|| member(rest))?;
            let text = expression.get(start..expression.len() - rest.len())?;
            Some(Place {
                domain,
                name,
                is_capacity: map.ends_with("capacity"),
                text: text.trim_end(),
                start,
            })
        })
    };
    let mut all: Vec<Place<'_>> = of_map("device.attributes")
        .chain(of_map("device.capacity"))
        .collect();
    all.sort_by_key(|place| place.start);
    all.into_iter()
}

/// A value that an expression takes from a map of a device.
#[derive(Debug, PartialEq)]
struct Lookup<'e> {
    domain: &'e str,
    name: &'e str,
    /// Field of the value that is read, if it is called as the types of a slice's attributes are.
    member: Option<&'e str>,
}

/// Returns the values that an expression takes as `device.attributes["domain"].name` or
/// `["domain"]["name"]`; other ways are not seen, and `.?name` asks whether there is one.
fn lookups<'e>(expression: &'e str, map: &'e str) -> impl Iterator<Item = Lookup<'e>> {
    expression.split(map).skip(1).filter_map(|rest| {
        let (domain, rest) = bracketed(rest)?;
        let (name, rest) = bracketed(rest).or_else(|| member(rest))?;
        let types = ["string", "bool", "int", "version"];
        let member = member(rest)
            .map(|(name, _)| name)
            .filter(|name| types.contains(name));
        Some(Lookup {
            domain,
            name,
            member,
        })
    })
}

/// Splits `["text"]` from what comes after it.
fn bracketed(rest: &str) -> Option<(&str, &str)> {
    let rest = rest.trim_start().strip_prefix('[')?.trim_start();
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let (text, rest) = rest.get(1..)?.split_once(quote)?;
    Some((text, rest.trim_start().strip_prefix(']')?))
}

/// Splits `.name` from what comes after it.
fn member(rest: &str) -> Option<(&str, &str)> {
    let rest = rest.trim_start().strip_prefix('.')?;
    let end = rest
        .find(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .unwrap_or(rest.len());
    let (name, rest) = rest.split_at_checked(end)?;
    (!name.is_empty()).then_some((name, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(expression: &str, map: &str) -> Vec<(String, String, String)> {
        let owned = |text: &str| text.to_owned();
        lookups(expression, map)
            .map(|l| {
                (
                    owned(l.domain),
                    owned(l.name),
                    owned(l.member.unwrap_or_default()),
                )
            })
            .collect()
    }

    #[test]
    fn names_are_found_where_an_expression_takes_them_from_a_domain() {
        let text = r#"device.attributes["a"].one == 1 && device.attributes [ 'b' ] ["two"] > device.attributes["c"].?three
            || "x" in device.attributes["d"] && device.capacity["a"].memory.compareTo(x) > 0 && device.attributes["e"].
            || device.attributes["f"].four.string == "x""#;
        let row = |domain: &str, name: &str, member: &str| {
            (domain.to_owned(), name.to_owned(), member.to_owned())
        };
        assert_eq!(
            found(text, "device.attributes"),
            [
                row("a", "one", ""),
                row("b", "two", ""),
                row("f", "four", "string")
            ]
        );
        assert_eq!(found(text, "device.capacity"), [row("a", "memory", "")]);
    }

    #[test]
    fn a_name_of_the_other_map_is_meant_before_one_spelt_alike() {
        let known = |name: &str| BTreeSet::from([format!("gpu.divvy.dev/{name}")]);
        let (attributes, capacities) = (known("memoryMiB"), known("memory"));
        for (expression, expected) in [
            (
                r#"device.attributes["gpu.divvy.dev"].memory >= 40"#,
                r#"memory is a capacity: write device.capacity["gpu.divvy.dev"].memory.compareTo(quantity("40Gi")) >= 0"#,
            ),
            (
                r#"device.capacity["gpu.divvy.dev"].memoryMiB > 1"#,
                r#"memoryMiB is an attribute: write device.attributes["gpu.divvy.dev"].memoryMiB"#,
            ),
        ] {
            assert_eq!(unknown(expression, &attributes, &capacities), [expected]);
        }
    }

    #[test]
    fn the_same_name_in_another_domain_is_meant_before_one_spelt_alike() {
        let known: BTreeSet<String> = [
            "gpu.divvy.dev/brand",
            "gpu.divvy.dev/productName",
            "resource.kubernetes.io/numaNode",
        ]
        .map(str::to_owned)
        .into();
        for (domain, name, expected) in [
            (
                "gpu.divvy.dev",
                "numaNode",
                Some(("resource.kubernetes.io", "numaNode")),
            ),
            (
                "dra.net",
                "numanode",
                Some(("resource.kubernetes.io", "numaNode")),
            ),
            ("", "prodctName", Some(("gpu.divvy.dev", "productName"))),
            (
                "gpu.nvidia.com",
                "productName",
                Some(("gpu.divvy.dev", "productName")),
            ),
            (
                "gpu.divvy.dev",
                "prod",
                Some(("gpu.divvy.dev", "productName")),
            ),
            ("gpu.divvy.dev", "zzz", None),
        ] {
            assert_eq!(meant(domain, name, &known), expected, "{domain}/{name}");
        }
    }
}
