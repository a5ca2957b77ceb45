//! CEL expressions and names of attributes of NVIDIA's DRA driver, as those of divvy.

use divvy_api::names::{self, attributes, capacity};

/// NVIDIA's driver, which is the domain of its attributes and capacities, too.
pub(super) const NVIDIA: &str = "gpu.nvidia.com";

/// Attributes in divvy's own domain.
const ATTRIBUTES: [&str; 17] = [
    attributes::TYPE,
    attributes::UUID,
    attributes::PARENT_UUID,
    attributes::PROFILE,
    attributes::PRODUCT_NAME,
    attributes::BRAND,
    attributes::ARCHITECTURE,
    attributes::CUDA_COMPUTE_CAPABILITY,
    attributes::DRIVER_VERSION,
    attributes::CUDA_DRIVER_VERSION,
    attributes::ADDRESSING_MODE,
    attributes::C2C_ENABLED,
    attributes::GPU_UUID,
    attributes::SHARING,
    attributes::ISOLATION,
    attributes::NVLINK_DOMAIN,
    attributes::NVLINK_PAIR,
];

/// Capacities of devices.
const CAPACITIES: [&str; 9] = [
    capacity::MEMORY,
    capacity::MULTIPROCESSORS,
    capacity::COPY_ENGINES,
    capacity::DECODERS,
    capacity::ENCODERS,
    capacity::JPEG_ENGINES,
    capacity::OFA_ENGINES,
    capacity::CORES,
    capacity::SLOTS,
];

/// An expression with divvy's names.
#[derive(Debug, PartialEq)]
pub(super) struct Rewritten {
    pub(super) expression: String,
    /// Attributes that it reads.
    pub(super) attributes: Vec<String>,
    /// Attributes and capacities that no device of divvy has.
    pub(super) unknown: Vec<String>,
    /// True if it reads attributes or capacities by names that are not written in it.
    pub(super) is_indirect: bool,
}

/// Says whether the attribute, without a domain, is one of divvy's.
pub(super) fn is_attribute(name: &str) -> bool {
    ATTRIBUTES.contains(&name)
}

/// Says whether the capacity, without a domain, is one of divvy's.
pub(super) fn is_capacity(name: &str) -> bool {
    CAPACITIES.contains(&name)
}

/// Rewrites an expression that names NVIDIA's driver, or may do so; `None` for any other.
pub(super) fn rewrite(expression: &str) -> Option<Rewritten> {
    let reads = Reads::of(expression);
    let mut new = expression.to_owned();
    for quote in ['"', '\''] {
        let old = format!("{quote}{NVIDIA}{quote}");
        new = new.replace(&old, &format!("{quote}{}{quote}", names::DRIVER));
    }
    if new == expression && !reads.is_indirect {
        return None;
    }
    let strange = |name: &&String| !is_attribute(name);
    let mut unknown: Vec<String> = reads.attributes.iter().filter(strange).cloned().collect();
    let strange = |name: &String| !CAPACITIES.contains(&name.as_str());
    unknown.extend(reads.capacities.into_iter().filter(strange));
    unknown.dedup();
    Some(Rewritten {
        expression: new,
        attributes: reads.attributes,
        unknown,
        is_indirect: reads.is_indirect,
    })
}

/// Renames an attribute of divvy's domain in a rewritten expression.
pub(super) fn rename(expression: &str, old: &str, new: &str) -> String {
    let mut text = expression.to_owned();
    for quote in ['"', '\''] {
        let domain = format!("{quote}{}{quote}]", names::DRIVER);
        for (before, after) in [(".", ""), (".?", ""), ("[\"", "\"]"), ("['", "']")] {
            text = text.replace(
                &format!("{domain}{before}{old}{after}"),
                &format!("{domain}{before}{new}{after}"),
            );
        }
    }
    text
}

/// A word of an expression.
#[derive(Debug, Clone, PartialEq)]
enum Word {
    Name(String),
    /// A text in quotes, as it is written between them.
    Text(String),
    Sign(char),
}

/// Splits an expression into its words, without spaces and comments.
fn words(expression: &str) -> Vec<Word> {
    let mut words = Vec::new();
    let mut rest = expression.trim_start();
    while let Some(first) = rest.chars().next() {
        let part = |end: usize| rest.get(..end).unwrap_or(rest);
        let end_of_name = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if matches!(first, '"' | '\'') {
            let (text, length) = quoted(rest, first);
            words.push(Word::Text(text.to_owned()));
            length
        } else if first.is_alphanumeric() || first == '_' {
            let length = end_of_name.unwrap_or(rest.len());
            words.push(Word::Name(part(length).to_owned()));
            length
        } else {
            words.push(Word::Sign(first));
            first.len_utf8()
        };
        rest = rest.get(length..).unwrap_or_default().trim_start();
    }
    words
}

/// Returns the text in quotes that an expression begins with, and its length with the quotes.
fn quoted(expression: &str, quote: char) -> (&str, usize) {
    let three = quote.to_string().repeat(3);
    let mark = if expression.starts_with(&three) { 3 } else { 1 };
    let inside = expression.get(mark..).unwrap_or_default();
    let end = inside.find(three.get(..mark).unwrap_or(&three));
    let text = end.and_then(|end| inside.get(..end)).unwrap_or(inside);
    (text, (text.len() + 2 * mark).min(expression.len()))
}

/// Attributes and capacities of NVIDIA's devices that an expression reads.
#[derive(Debug, Default)]
struct Reads {
    attributes: Vec<String>,
    capacities: Vec<String>,
    /// True if it reads some by names that are not written in it.
    is_indirect: bool,
}

impl Reads {
    fn of(expression: &str) -> Self {
        use Word::{Name, Sign, Text};
        let words = words(expression);
        let mut reads = Self::default();
        let is_name = |word: Option<&Word>, name: &str| matches!(word, Some(Name(n)) if n == name);
        for (place, word) in words.iter().enumerate() {
            let before = |steps: usize| place.checked_sub(steps).and_then(|at| words.get(at));
            let after = words.get(place + 1..).unwrap_or_default();
            match word {
                // The maps of a device, and not those of a macro's variable.
                Name(field) if is_name(before(2), "device") && before(1) == Some(&Sign('.')) => {
                    let into = match field.as_str() {
                        "attributes" => &mut reads.attributes,
                        "capacity" => &mut reads.capacities,
                        _ => continue,
                    };
                    match after {
                        [Sign('['), Text(domain), Sign(']'), of @ ..] if !domain.contains('\\') => {
                            if domain != NVIDIA {
                                continue;
                            }
                            match of {
                                // A macro or function of the whole map.
                                [Sign('.'), Name(_), Sign('('), ..] => reads.is_indirect = true,
                                [Sign('.'), Name(name), ..]
                                | [Sign('.'), Sign('?'), Name(name), ..]
                                | [Sign('['), Text(name), Sign(']'), ..]
                                | [Sign('['), Sign('?'), Text(name), Sign(']'), ..] => {
                                    into.push(name.clone());
                                }
                                // Asks only whether there is such a name.
                                _ if is_name(before(3), "in") => {}
                                _ => reads.is_indirect = true,
                            }
                        }
                        _ if is_name(before(3), "in") => {}
                        _ => reads.is_indirect = true,
                    }
                }
                Name(name) if name == "device" && after.first() != Some(&Sign('.')) => {
                    reads.is_indirect = true;
                }
                _ => {}
            }
        }
        reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_driver_are_replaced_and_unknown_ones_found() {
        for (old, new, unknown) in [
            (
                "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*a100.*$')",
                "device.attributes['gpu.divvy.dev'].productName.lowerAscii().matches('^.*a100.*$')",
                &[][..],
            ),
            (
                "device.driver == \"gpu.nvidia.com\" && device.capacity[\"gpu.nvidia.com\"].memory.compareTo(quantity(\"10Gi\")) > 0",
                "device.driver == \"gpu.divvy.dev\" && device.capacity[\"gpu.divvy.dev\"].memory.compareTo(quantity(\"10Gi\")) > 0",
                &[],
            ),
            (
                "device.attributes[\"gpu.nvidia.com\"].index < 4 && \"memorySlice0\" in device.capacity[\"gpu.nvidia.com\"]",
                "device.attributes[\"gpu.divvy.dev\"].index < 4 && \"memorySlice0\" in device.capacity[\"gpu.divvy.dev\"]",
                &["index"],
            ),
            (
                "device.attributes[\"gpu.nvidia.com\"].?gpuModuleID.orValue(0) == 1",
                "device.attributes[\"gpu.divvy.dev\"].?gpuModuleID.orValue(0) == 1",
                &["gpuModuleID"],
            ),
            (
                "device.attributes[ \"gpu.nvidia.com\" ].index < 4 // its number\n && device.attributes['gpu.nvidia.com']['minor'] < 9",
                "device.attributes[ \"gpu.divvy.dev\" ].index < 4 // its number\n && device.attributes['gpu.divvy.dev']['minor'] < 9",
                &["index", "minor"],
            ),
            // A text that looks like an expression is none.
            (
                "device.attributes[\"gpu.nvidia.com\"].productName != 'device.attributes[\"x\" + y]'",
                "device.attributes[\"gpu.divvy.dev\"].productName != 'device.attributes[\"x\" + y]'",
                &[],
            ),
            (
                "\"gpu.nvidia.com\" in device.attributes && device.driver in [\"gpu.nvidia.com\"]",
                "\"gpu.divvy.dev\" in device.attributes && device.driver in [\"gpu.divvy.dev\"]",
                &[],
            ),
        ] {
            let rewritten = rewrite(old).unwrap();
            assert_eq!(rewritten.expression, new);
            assert_eq!(rewritten.unknown, unknown, "{old}");
            assert!(!rewritten.is_indirect, "{old}");
        }
        assert_eq!(rewrite("device.driver == \"other.example.com\""), None);
        assert_eq!(rewrite("device.driver == \"vfio.gpu.nvidia.com\""), None);
    }

    #[test]
    fn names_that_are_bound_or_put_together_cannot_be_followed() {
        for expression in [
            "cel.bind(a, device.attributes[\"gpu.nvidia.com\"], a.index < 4)",
            "cel.bind(all, device.attributes, all[\"gpu.nvidia.com\"].index < 4)",
            "cel.bind(d, device, d.attributes[\"gpu.nvidia.com\"].index < 4)",
            "[device].exists(d, d.attributes[\"gpu.nvidia.com\"].index < 4)",
            "device.attributes[\"gpu\" + \".nvidia.com\"].index < 4",
            "device.attributes[\"gpu\\u002envidia.com\"].index < 4",
            "device.attributes[cel.bind(n, \"gpu.nvidia.com\", n)].index < 4",
            "device.attributes[\"gpu.nvidia.com\"][\"in\" + \"dex\"] < 4",
            "device.capacity[\"gpu.nvidia.com\"].exists(name, name == \"shares\")",
            "device.attributes[r\"gpu.nvidia.com\"].index < 4",
        ] {
            let rewritten = rewrite(expression);
            assert!(rewritten.is_some_and(|new| new.is_indirect), "{expression}");
        }
    }

    #[test]
    fn an_attribute_is_renamed_in_each_way_of_writing_it() {
        let old = "a[\"gpu.divvy.dev\"].uuid a[\"gpu.divvy.dev\"].?uuid a['gpu.divvy.dev'][\"uuid\"] b.uuid";
        let new = "a[\"gpu.divvy.dev\"].gpuUUID a[\"gpu.divvy.dev\"].?gpuUUID a['gpu.divvy.dev'][\"gpuUUID\"] b.uuid";
        assert_eq!(rename(old, attributes::UUID, attributes::GPU_UUID), new);
    }
}
