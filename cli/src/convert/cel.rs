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
}

/// Says whether the attribute, without a domain, is one of divvy's.
pub(super) fn is_attribute(name: &str) -> bool {
    ATTRIBUTES.contains(&name)
}

/// Rewrites an expression that names NVIDIA's driver; `None` for any other.
pub(super) fn rewrite(expression: &str) -> Option<Rewritten> {
    let mut new = expression.to_owned();
    for quote in ['"', '\''] {
        let old = format!("{quote}{NVIDIA}{quote}");
        new = new.replace(&old, &format!("{quote}{}{quote}", names::DRIVER));
    }
    if new == expression {
        return None;
    }
    let read = names_after(&new, "attributes");
    let mut unknown: Vec<String> = read
        .iter()
        .filter(|name| !is_attribute(name))
        .cloned()
        .collect();
    let amounts = names_after(&new, "capacity");
    unknown.extend(
        amounts
            .into_iter()
            .filter(|name| !CAPACITIES.contains(&name.as_str())),
    );
    unknown.dedup();
    Some(Rewritten {
        expression: new,
        attributes: read,
        unknown,
    })
}

/// Returns the names that an expression reads below `device.FIELD["gpu.divvy.dev"]`.
fn names_after(expression: &str, field: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (place, _) in expression.match_indices(&format!("device.{field}[")) {
        let rest = expression.get(place..).unwrap_or_default();
        let Some((domain, rest)) = rest.split_once(']') else {
            continue;
        };
        if !domain.contains(names::DRIVER) {
            continue;
        }
        // .name, .?name and ["name"] read the same.
        let rest = rest.trim_start_matches(['.', '?', '[', '"', '\'']);
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        let name = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
        if !name.is_empty() {
            found.push(name.to_owned());
        }
    }
    found
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
        ] {
            let rewritten = rewrite(old).unwrap();
            assert_eq!(rewritten.expression, new);
            assert_eq!(rewritten.unknown, unknown, "{old}");
        }
        assert_eq!(rewrite("device.driver == \"other.example.com\""), None);
        assert_eq!(rewrite("device.driver == \"vfio.gpu.nvidia.com\""), None);
    }
}
