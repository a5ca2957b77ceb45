//! Attributes and capacities that claims name: those that no device has, and the ones that were
//! probably meant.

use std::collections::BTreeSet;

use divvy_api::names::{self, capacity};
use k8s_openapi::api::resource::v1::DeviceConstraint;

use super::{Findings, Known};
use divvy_why::driver;
use divvy_why::lookup::{self, meant};

/// The capacities of shares, in both units.
const OF_SHARES: [&str; 4] = [
    capacity::MEMORY,
    capacity::CORES,
    capacity::SLOTS,
    capacity::PERCENT,
];
/// Longest domain of a qualified name.
const LONGEST_DOMAIN: usize = 63;
/// Longest name behind the domain.
const LONGEST_NAME: usize = 32;

impl Findings {
    pub(super) fn constraint(&mut self, at: &str, of: &DeviceConstraint, known: &Known) {
        let (step, attribute) = match (&of.match_attribute, &of.distinct_attribute) {
            (Some(attribute), None) => (".matchAttribute", attribute),
            (None, Some(attribute)) => (".distinctAttribute", attribute),
            _ => {
                let what = "Required value: exactly one of `matchAttribute` or `distinctAttribute` is required";
                return self.refuse(at, what);
            }
        };
        let at = format!("{at}{step}");
        let (domain, name) = attribute.split_once('/').unwrap_or(("", attribute));
        let hint = meant(domain, name, &known.attributes)
            .map(|(domain, name)| format!(" (did you mean \"{domain}/{name}\"?)"))
            .unwrap_or_default();
        if domain.is_empty() {
            self.refuse(
                &at,
                &format!("Invalid value: {attribute:?}: a valid name must include a domain{hint}"),
            );
        } else if !is_identifier(name) {
            let what = format!(
                "Invalid value: {name:?}: a valid C identifier of at most {LONGEST_NAME} characters must start with alphabetic \
                 character or '_', followed by a string of alphanumeric characters or '_'{hint}"
            );
            self.refuse(&at, &what);
        } else if domain.len() > LONGEST_DOMAIN {
            self.refuse(
                &at,
                &format!("Too long: the domain may not be more than {LONGEST_DOMAIN} bytes"),
            );
        } else if !known.attributes.contains(attribute) {
            self.doubt(&at, &format!("no device has attribute {attribute:?}{hint}"));
        }
    }

    /// Returns the name of a capacity without our domain; notes one that no device ever has.
    /// Without any name there is nothing to compare it with.
    pub(super) fn known_capacity<'n>(
        &mut self,
        at: &str,
        capacity: &'n str,
        (driver, all): (&'n str, &BTreeSet<String>),
    ) -> Option<&'n str> {
        // Names without a domain are those of the device's driver.
        let (domain, name) = capacity.split_once('/').unwrap_or((driver, capacity));
        if all.is_empty() || all.contains(&format!("{domain}/{name}")) {
            return Some(name);
        }
        // Those of shares depend on the policy: what waits says which one is wanted, and an
        // alternative (`firstAvailable`) may be for other GPUs.
        let own = driver::capacity(driver, name) == format!("{domain}/{name}");
        if own && OF_SHARES.contains(&name) {
            return Some(name);
        }
        let there: BTreeSet<&str> = all
            .iter()
            .filter_map(|full| match full.split_once('/') {
                Some((domain, name)) if domain == driver => Some(name),
                Some((names::DRIVER, _)) => Some(full.as_str()),
                _ => None,
            })
            .collect();
        let mut there: Vec<&str> = there.into_iter().collect();
        there.sort_by_key(|name| *name != capacity::MEMORY);
        let hint = match meant(domain, name, all) {
            Some((domain, name)) if domain == driver => format!(" (did you mean {name:?}?)"),
            Some((domain, name)) => format!(" (did you mean \"{domain}/{name}\"?)"),
            None if there.is_empty() => String::new(),
            None => format!("; there are {}", there.join(", ")),
        };
        self.doubt(at, &format!("no capacity {capacity:?}{hint}"));
        None
    }

    /// Notes the names that an expression looks up and that no device has.
    pub(super) fn looked_up(
        &mut self,
        at: &str,
        expression: &str,
        attributes: &BTreeSet<String>,
        capacities: &BTreeSet<String>,
    ) {
        for what in lookup::unknown(expression, attributes, capacities) {
            self.doubt(at, &what);
        }
    }
}

fn is_identifier(name: &str) -> bool {
    name.len() <= LONGEST_NAME
        && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
