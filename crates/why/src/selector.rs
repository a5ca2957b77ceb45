//! Selectors in CEL that select nothing, or fail: the part that is false with the values that there
//! are, and the comparison that CEL has for quantities and versions. Pure.

use std::collections::BTreeSet;

use divvy_allocator::evaluate;
use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::Device;

use crate::device::bytes;
use crate::driver::NVIDIA;
use crate::lookup::{self, Place};

/// Values and parts that are written out.
const NAMED: usize = 4;
/// Signs of a comparison, the longer first.
const SIGNS: [&str; 6] = [">=", "<=", "==", "!=", ">", "<"];

/// Part of a selector that no device satisfies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FalsePart {
    /// Values that are there, as `productName is "NVIDIA L4" here`.
    pub text: String,
    /// True if it asks for devices of NVIDIA's driver.
    pub of_nvidia: bool,
}

/// Returns the first part of a conjunction that is true of none of the devices, with the values
/// that they have.
pub fn false_part(expression: &str, devices: &[(&str, &Device)]) -> Option<FalsePart> {
    let parts = conjuncts(expression);
    let is_false = |part: &&str| {
        devices
            .iter()
            .all(|(driver, device)| evaluate(part, driver, device) == Ok(false))
    };
    let part = parts.iter().copied().find(is_false);
    let part = part.filter(|_| !devices.is_empty())?;
    let mut said: Vec<String> = Vec::new();
    let mut of_nvidia = false;
    if part.contains("device.driver") {
        let drivers: BTreeSet<&str> = devices.iter().map(|(driver, _)| *driver).collect();
        let drivers: Vec<&str> = drivers.into_iter().collect();
        said.push(format!("device.driver is {} here", drivers.join(", ")));
        of_nvidia = part.contains(NVIDIA) && !drivers.contains(&NVIDIA);
    }
    for place in lookup::places(part) {
        let values: BTreeSet<String> = devices
            .iter()
            .filter_map(|(driver, device)| value(driver, device, &place))
            .collect();
        let is = match values.len() {
            0 => continue,
            1..=NAMED => values.iter().cloned().collect::<Vec<_>>().join(" or "),
            more => {
                let first: Vec<String> = values.iter().take(NAMED).cloned().collect();
                format!("{} or one of {} more", first.join(", "), more - NAMED)
            }
        };
        let instead = instead(part, &place, &values);
        let sentence = format!("{} is {is} here{instead}", place.name);
        if !said.contains(&sentence) {
            said.push(sentence);
        }
    }
    if said.is_empty() {
        said.push("it is false of each of them".to_owned());
    }
    let said = said.join("; ");
    let text = if parts.len() > 1 {
        format!("{part:?} is false: {said}").replace("\\\"", "\"")
    } else {
        said
    };
    Some(FalsePart { text, of_nvidia })
}

/// Returns a device's value at a place, as CEL writes it; memory with GiB beside it.
fn value(driver: &str, device: &Device, place: &Place<'_>) -> Option<String> {
    let full = format!("{}/{}", place.domain, place.name);
    let is_it = |name: &String| lookup::full(driver, name) == full;
    if place.is_capacity {
        let all = device.capacity.as_ref()?;
        let (_, capacity) = all.iter().find(|(name, _)| is_it(name))?;
        let amount = &capacity.value.0;
        let units = amount.parse::<Quantity>().ok().map(|q| q.rounded_up());
        let memory = units
            .and_then(|units| u64::try_from(units).ok())
            .filter(|units| *units >= 1 << 20);
        return Some(memory.map_or_else(
            || amount.clone(),
            |units| format!("{amount} ({})", bytes(units)),
        ));
    }
    let all = device.attributes.as_ref()?;
    let (_, attribute) = all.iter().find(|(name, _)| is_it(name))?;
    let text = |value: &String| format!("{value:?}");
    let string = attribute.string.as_ref().map(text);
    let version = attribute.version.clone();
    let int = attribute.int.map(|value| value.to_string());
    let bool = attribute.bool.map(|value| value.to_string());
    string.or(version).or(int).or(bool)
}

/// Returns what to write in the place of a comparison with a part of a text, or of a text with a
/// quantity or version.
fn instead(part: &str, place: &Place<'_>, values: &BTreeSet<String>) -> String {
    let Some(comparison) = comparison(part, place) else {
        return String::new();
    };
    if place.is_capacity && matches!(comparison.operand, Operand::Text(_) | Operand::Number(_)) {
        return format!("; write {}", comparison.compared(false));
    }
    let Operand::Text(wanted) = comparison.operand else {
        return String::new();
    };
    let contains = values
        .iter()
        .any(|value| value.to_lowercase().contains(&wanted.to_lowercase()));
    if comparison.sign != "==" || !contains || wanted.len() < 2 {
        return String::new();
    }
    let quoted = |value: &&String| value.trim_matches('"').eq_ignore_ascii_case(wanted);
    if let Some(same) = values.iter().find(quoted) {
        return format!("; write {} == {same}", place.text);
    }
    // In the letters of the value.
    let found = values.iter().find_map(|value| {
        let at = value.to_lowercase().find(&wanted.to_lowercase())?;
        value.get(at..at + wanted.len())
    });
    format!(
        "; write {}.contains({:?})",
        place.text,
        found.unwrap_or(wanted)
    )
}

/// Returns the way to write a comparison that CEL does not have for its values, by the error about
/// it.
pub fn overload(expression: &str, error: &str) -> Option<String> {
    let quantities = error.contains("Quantity");
    let versions = error.contains("Semver");
    if error.contains("no such overload") && (quantities || versions) {
        let all: Vec<Place<'_>> = lookup::places(expression).collect();
        let mut own = all.iter().filter(|place| place.is_capacity == quantities);
        let found = own.find_map(|place| comparison(expression, place))?;
        let what = if quantities {
            "a capacity is a quantity"
        } else {
            "the attribute is a version"
        };
        return Some(format!("{what}: write {}", found.compared(versions)));
    }
    // `semver("9.0")` is no version.
    let (_, rest) = expression.split_once("semver(")?;
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''))?;
    let (version, _) = rest.get(1..)?.split_once(quote)?;
    let whole = three_parts(version)?;
    (whole != version).then(|| format!("a version has three parts: write semver({whole:?})"))
}

/// Comparison of a value of a device with something else.
struct Comparison<'e> {
    /// Value of the device, as written.
    value: &'e str,
    sign: &'static str,
    operand: Operand<'e>,
}

/// Other side of a comparison.
enum Operand<'e> {
    Text(&'e str),
    Number(&'e str),
    /// Argument of `quantity` or `semver`.
    Made(&'e str),
    Other,
}

impl Comparison<'_> {
    /// Returns the comparison as CEL has it for quantities, or for versions.
    fn compared(&self, of_version: bool) -> String {
        let text = match self.operand {
            Operand::Text(text) | Operand::Number(text) | Operand::Made(text) => text,
            Operand::Other => "…",
        };
        let (function, text) = if of_version {
            let whole = three_parts(text);
            ("semver", whole.unwrap_or_else(|| text.to_owned()))
        } else if text.parse::<u32>().is_ok_and(|number| number < 1 << 20) && self.is_memory() {
            // Of memory a bare number is hardly bytes.
            ("quantity", format!("{text}Gi"))
        } else {
            ("quantity", text.to_owned())
        };
        format!(
            "{}.compareTo({function}({text:?})) {} 0",
            self.value, self.sign
        )
    }

    fn is_memory(&self) -> bool {
        self.value
            .trim_end_matches(['"', '\'', ']'])
            .ends_with("memory")
    }
}

/// Returns a version with major, minor and patch, of one that has fewer.
fn three_parts(version: &str) -> Option<String> {
    let parts: Vec<&str> = version.split('.').collect();
    let is_number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !(1..=3).contains(&parts.len()) || !parts.iter().all(is_number) {
        return None;
    }
    let all = parts.into_iter().chain(["0", "0"]).take(3);
    // Numbers of a version have no zeros before them.
    let plain = |part: &str| {
        part.parse::<u64>()
            .map_or_else(|_| part.to_owned(), |n| n.to_string())
    };
    Some(all.map(plain).collect::<Vec<_>>().join("."))
}

/// Returns the comparison in which a value of a device stands, on either side.
fn comparison<'e>(expression: &'e str, place: &Place<'e>) -> Option<Comparison<'e>> {
    let after = expression
        .get(place.start + place.text.len()..)?
        .trim_start();
    let value = place.text;
    if let Some((sign, rest)) = signed(after) {
        let operand = operand(side(rest));
        return Some(Comparison {
            value,
            sign,
            operand,
        });
    }
    let before = expression.get(..place.start)?.trim_end();
    let sign = SIGNS.into_iter().find(|sign| before.ends_with(sign))?;
    let rest = before.strip_suffix(sign)?;
    let start = ["&&", "||", "("]
        .iter()
        .filter_map(|stop| Some(rest.rfind(stop)? + stop.len()))
        .max();
    let operand = operand(rest.get(start.unwrap_or(0)..)?);
    let sign = match sign {
        ">=" => "<=",
        "<=" => ">=",
        ">" => "<",
        "<" => ">",
        other => other,
    };
    Some(Comparison {
        value,
        sign,
        operand,
    })
}

/// Splits the sign of a comparison from what comes after it.
fn signed(text: &str) -> Option<(&'static str, &str)> {
    SIGNS
        .into_iter()
        .find_map(|sign| Some((sign, text.strip_prefix(sign)?)))
}

/// Returns one side of a comparison, up to where another part of the expression begins.
fn side(text: &str) -> &str {
    let mut depth = 0_usize;
    let mut end = text.len();
    for (place, c) in outside_quotes(text) {
        let rest = text.get(place..).unwrap_or_default();
        let stops = rest.starts_with("&&") || rest.starts_with("||");
        match c {
            '(' => depth += 1,
            ')' if depth == 0 => {
                end = place;
                break;
            }
            ')' => depth -= 1,
            _ if depth == 0 && stops => {
                end = place;
                break;
            }
            _ => {}
        }
    }
    text.get(..end).unwrap_or(text)
}

fn operand(text: &str) -> Operand<'_> {
    let text = text.trim();
    let quoted = |text: &'_ str| -> Option<(usize, usize)> {
        let quote = text.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let inner = text.get(1..)?.strip_suffix(quote)?;
        (!inner.contains(quote)).then_some((1, 1 + inner.len()))
    };
    let inner = |text: &'_ str| -> Option<(usize, usize)> {
        let argument = ["quantity(", "semver("]
            .iter()
            .find_map(|function| text.strip_prefix(function))?;
        let start = text.len() - argument.len();
        let argument = argument.strip_suffix(')')?;
        let (from, to) = quoted(argument)?;
        Some((start + from, start + to))
    };
    if let Some((from, to)) = quoted(text) {
        return text.get(from..to).map_or(Operand::Other, Operand::Text);
    }
    if let Some((from, to)) = inner(text) {
        return text.get(from..to).map_or(Operand::Other, Operand::Made);
    }
    if text.parse::<f64>().is_ok() {
        return Operand::Number(text);
    }
    Operand::Other
}

/// Returns the characters that are not inside of texts, with their places.
fn outside_quotes(text: &str) -> impl Iterator<Item = (usize, char)> {
    let mut quote = None;
    let mut escaped = false;
    text.char_indices().filter(move |(_, c)| {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if *c == '\\' => escaped = true,
            Some(open) if open == *c => quote = None,
            Some(_) => {}
            None if matches!(c, '"' | '\'') => quote = Some(*c),
            None => return true,
        }
        false
    })
}

/// Returns the parts of a conjunction, without the parentheses around them.
fn conjuncts(expression: &str) -> Vec<&str> {
    let expression = bare(expression);
    let mut depth = 0_usize;
    let mut start = 0;
    let mut parts = Vec::new();
    for (place, c) in outside_quotes(expression) {
        let rest = expression.get(place..).unwrap_or_default();
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            // What a disjunction or a choice holds is no part by itself.
            '|' | '?' if depth == 0 && (rest.starts_with("||") || rest.starts_with("? ")) => {
                return vec![expression];
            }
            '&' if depth == 0 && rest.starts_with("&&") => {
                parts.extend(expression.get(start..place));
                start = place + 2;
            }
            _ => {}
        }
    }
    if parts.is_empty() {
        return vec![expression];
    }
    parts.extend(expression.get(start..));
    parts.into_iter().flat_map(conjuncts).collect()
}

/// Removes parentheses around the whole.
fn bare(expression: &str) -> &str {
    let expression = expression.trim();
    let inside = expression
        .strip_prefix('(')
        .and_then(|rest| rest.strip_suffix(')'));
    let Some(inside) = inside else {
        return expression;
    };
    // Not those of two parts: `(a) && (b)`.
    let mut depth = 0_i32;
    for (_, c) in outside_quotes(inside) {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if depth < 0 {
            return expression;
        }
    }
    bare(inside)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const OURS: &str = "gpu.divvy.dev";

    fn device(product: &str, memory: &str) -> Device {
        let device = json!({"name": "gpu-0",
            "attributes": {
                "productName": {"string": product}, "type": {"string": "gpu"},
                "cudaComputeCapability": {"version": "9.0.0"}, "multiprocessors": {"int": 132}},
            "capacity": {"memory": {"value": memory}}});
        serde_json::from_value(device).unwrap()
    }

    fn part_of(expression: &str) -> Option<String> {
        let devices = [
            device("NVIDIA H100 80GB HBM3", "81559Mi"),
            device("NVIDIA L4", "23034Mi"),
        ];
        let devices: Vec<(&str, &Device)> = devices.iter().map(|d| (OURS, d)).collect();
        false_part(expression, &devices).map(|part| part.text)
    }

    #[test]
    fn the_false_part_is_named_with_the_values_there_are() {
        let attribute = "device.attributes[\"gpu.divvy.dev\"]";
        let capacity = "device.capacity[\"gpu.divvy.dev\"]";
        for (expression, expected) in [
            (
                format!("{attribute}.productName == \"h100\""),
                Some(format!(
                    "productName is \"NVIDIA H100 80GB HBM3\" or \"NVIDIA L4\" here; write {attribute}.productName.contains(\"H100\")"
                )),
            ),
            (
                format!("{attribute}.type == \"gpu\" && ({attribute}.multiprocessors > 200)"),
                Some(format!(
                    "\"{attribute}.multiprocessors > 200\" is false: multiprocessors is 132 here"
                )),
            ),
            (
                format!("({attribute}.type == \"gpu\" && {capacity}.memory.compareTo(quantity(\"100Gi\")) >= 0)"),
                Some(format!(
                    "\"{capacity}.memory.compareTo(quantity(\"100Gi\")) >= 0\" is false: memory is 23034Mi (22.5 GiB) or 81559Mi (79.6 GiB) \
                     here"
                )),
            ),
            (
                format!("{attribute}.productName == \"A\" || {attribute}.multiprocessors == 1 && true"),
                Some("productName is \"NVIDIA H100 80GB HBM3\" or \"NVIDIA L4\" here; multiprocessors is 132 here".to_owned()),
            ),
            (
                format!("{attribute}.type == 'GPU'"),
                Some(format!("type is \"gpu\" here; write {attribute}.type == \"gpu\"")),
            ),
            (
                "device.driver == \"gpu.nvidia.com\"".to_owned(),
                Some("device.driver is gpu.divvy.dev here".to_owned()),
            ),
            (format!("{attribute}.productName.contains(\"L4\") && {attribute}.productName.contains(\"H100\")"), None),
        ] {
            assert_eq!(part_of(&expression), expected, "{expression}");
        }
    }

    #[test]
    fn a_comparison_that_cel_does_not_have_is_written_anew() {
        let attribute = "device.attributes[\"gpu.divvy.dev\"].cudaComputeCapability";
        let capacity = "device.capacity[\"gpu.divvy.dev\"].memory";
        let (quantity, version) = (
            "no such overload: _>=_(kubernetes.Quantity, string)",
            "no such overload: _>=_(kubernetes.Semver, string)",
        );
        for (expression, error, expected) in [
            (
                format!("{capacity} >= \"40Gi\""),
                quantity,
                Some(format!("{capacity}.compareTo(quantity(\"40Gi\")) >= 0")),
            ),
            (
                format!("true && \"40Gi\" <= {capacity}"),
                quantity,
                Some(format!("{capacity}.compareTo(quantity(\"40Gi\")) >= 0")),
            ),
            (
                format!("{capacity} > 40"),
                quantity,
                Some(format!("{capacity}.compareTo(quantity(\"40Gi\")) > 0")),
            ),
            (
                format!("{capacity} >= quantity(\"40Gi\") && true"),
                quantity,
                Some(format!("{capacity}.compareTo(quantity(\"40Gi\")) >= 0")),
            ),
            (
                format!("{attribute} >= \"9.0\""),
                version,
                Some(format!("{attribute}.compareTo(semver(\"9.0.0\")) >= 0")),
            ),
            (
                format!("{attribute} < 8.0"),
                version,
                Some(format!("{attribute}.compareTo(semver(\"8.0.0\")) < 0")),
            ),
            (
                format!("{attribute}.compareTo(semver(\"9.0\")) >= 0"),
                "version is invalid",
                Some("semver(\"9.0.0\")".to_owned()),
            ),
            (format!("{attribute}.size() > 1"), "no such overload", None),
        ] {
            let said = overload(&expression, error);
            match expected {
                None => assert_eq!(said, None),
                Some(expected) => assert!(
                    said.as_ref().is_some_and(|said| said.ends_with(&expected)),
                    "{expression}: {said:?}"
                ),
            }
        }
    }
}
