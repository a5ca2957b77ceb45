//! Amounts of memory in selectors: round figures that the devices meant by them do not reach.

use std::collections::BTreeMap;

use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::DeviceSelector;

use super::Findings;
use divvy_why::device::bytes;

/// Bytes of 1 GiB.
const GIB: u64 = 1 << 30;

impl Findings {
    /// Notes devices whose memory is just below a figure that a selector asks for: a partition
    /// `1g.10gb` has 9.8 GiB. `memory` is in bytes, by profile or product.
    pub(super) fn sizes(
        &mut self,
        at: &str,
        selectors: Option<&[DeviceSelector]>,
        memory: &BTreeMap<String, u64>,
    ) {
        for (number, selector) in selectors.into_iter().flatten().enumerate() {
            let Some(cel) = &selector.cel else { continue };
            for figure in least(&cel.expression) {
                let Some(wanted) = figure.parse::<Quantity>().ok().and_then(units) else {
                    continue;
                };
                let below: Vec<(&String, u64)> = memory
                    .iter()
                    .map(|(name, has)| (name, *has))
                    .filter(|(_, has)| {
                        *has < wanted && u128::from(*has) * 10 >= u128::from(wanted) * 9
                    })
                    .collect();
                let Some(least) = below.iter().map(|(_, has)| *has).min() else {
                    continue;
                };
                let all: Vec<String> = below
                    .iter()
                    .map(|(name, has)| format!("{name} has {}", bytes(*has)))
                    .collect();
                self.doubt(
                    &format!("{at}.selectors[{number}].cel.expression"),
                    &format!(
                        "memory of at least {figure} leaves out what is called so: {}; write {}Gi to include it",
                        all.join(", "),
                        least / GIB
                    ),
                );
            }
        }
    }
}

fn units(quantity: Quantity) -> Option<u64> {
    u64::try_from(quantity.rounded_up()).ok()
}

/// Returns the figures that an expression wants memory to reach, as in
/// `….memory.compareTo(quantity("10Gi")) >= 0` and `….memory.isGreaterThan(quantity("10Gi"))`.
fn least(expression: &str) -> Vec<&str> {
    let text = |rest: &'_ str| -> Option<(usize, usize, bool)> {
        let greater = rest.strip_prefix(".isGreaterThan(");
        let compared = rest.strip_prefix(".compareTo(");
        let inner = greater.or(compared)?;
        let inner = inner.trim_start().strip_prefix("quantity(")?.trim_start();
        let quote = inner.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let (figure, after) = inner.get(1..)?.split_once(quote)?;
        let after: String = after.split_whitespace().collect();
        let at_least = greater.is_some() || after.starts_with("))>");
        let start = rest.len() - inner.len() + 1;
        Some((start, start + figure.len(), at_least))
    };
    let mut found = Vec::new();
    for (place, _) in expression.match_indices(".memory") {
        let Some(rest) = expression.get(place + ".memory".len()..) else {
            continue;
        };
        if let Some((start, end, true)) = text(rest) {
            found.extend(rest.get(start..end));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::least;

    #[test]
    fn figures_are_those_that_memory_is_to_reach() {
        let of = "device.capacity[\"gpu.divvy.dev\"]";
        for (rest, expected) in [
            (".memory.compareTo(quantity(\"10Gi\")) >= 0", vec!["10Gi"]),
            (".memory.compareTo( quantity('10Gi') ) > 0", vec!["10Gi"]),
            (".memory.isGreaterThan(quantity(\"9Gi\"))", vec!["9Gi"]),
            (".memory.compareTo(quantity(\"10Gi\")) <= 0", vec![]),
            (".memory.isLessThan(quantity(\"10Gi\"))", vec![]),
            (".cores.isGreaterThan(quantity(\"10\"))", vec![]),
        ] {
            assert_eq!(least(&format!("{of}{rest}")), expected, "{rest}");
        }
    }
}
