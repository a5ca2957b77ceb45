//! Selectors: what the API server refuses to compile, and names that no device has.

use divvy_allocator::CelError;
use k8s_openapi::api::resource::v1::DeviceSelector;

use super::{Findings, Known, MOST};
use crate::strict::did_you_mean;

impl Findings {
    /// Only the scheduler can say what is right about a selector that cannot be evaluated offline.
    pub(super) fn selectors(&mut self, at: &str, selectors: Option<&[DeviceSelector]>, known: &Known) {
        let selectors = selectors.unwrap_or_default();
        self.at_most(MOST, selectors.len(), &format!("{at}.selectors"));
        for (number, selector) in selectors.iter().enumerate() {
            let at = format!("{at}.selectors[{number}].cel");
            let Some(cel) = &selector.cel else {
                self.refuse(&at, "Required value");
                continue;
            };
            let at = format!("{at}.expression");
            match divvy_allocator::check_selector(&cel.expression) {
                Err(error @ (CelError::Compile(_) | CelError::TooLong { .. })) => {
                    self.refuse(&at, &format!("Invalid value: {error}"));
                }
                Err(CelError::Offline(_) | CelError::Runtime(_)) | Ok(()) => {
                    self.names(&at, &cel.expression, known);
                }
            }
        }
    }

    fn names(&mut self, at: &str, expression: &str, known: &Known) {
        for (what, there) in [("attribute", &known.attributes), ("capacity", &known.capacities)] {
            let map = if what == "attribute" { "device.attributes" } else { "device.capacity" };
            for (domain, name) in looked_up(expression, map) {
                let full = if what == "attribute" { format!("{domain}/{name}") } else { name.to_owned() };
                if !there.is_empty() && !there.contains(&full) {
                    let names =
                        there.iter().map(|name| name.rsplit_once('/').map_or(name.as_str(), |(_, n)| n));
                    let hint = did_you_mean(name, names);
                    self.doubt(at, &format!("no device has {what} {name:?} of {domain:?}{hint}"));
                }
            }
        }
    }
}

/// Domains and names that an expression takes from a map as `device.attributes["domain"].name`; other ways are not seen.
fn looked_up<'e>(expression: &'e str, map: &'e str) -> impl Iterator<Item = (&'e str, &'e str)> {
    expression.split(map).skip(1).filter_map(|rest| {
        let rest = rest.trim_start().strip_prefix('[')?.trim_start();
        let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let (domain, rest) = rest.get(1..)?.split_once(quote)?;
        let rest = rest.trim_start().strip_prefix(']')?.trim_start().strip_prefix('.')?;
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        // `.?name` asks whether there is one.
        rest.get(..end).filter(|name| !name.is_empty()).map(|name| (domain, name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_where_an_expression_takes_them_from_a_domain() {
        let text = r#"device.attributes["a"].one == 1 && device.attributes [ 'b' ] .two > device.attributes["c"].?three
            || "x" in device.attributes["d"] && device.capacity["a"].memory.compareTo(x) > 0 && device.attributes["e"]."#;
        assert_eq!(looked_up(text, "device.attributes").collect::<Vec<_>>(), [("a", "one"), ("b", "two")]);
        assert_eq!(looked_up(text, "device.capacity").collect::<Vec<_>>(), [("a", "memory")]);
    }
}
