//! Advice about resources of other projects. Pure.

use std::collections::BTreeSet;

use divvy_api::names::{self, capacity};
use k8s_openapi::api::core::v1::Pod;

use crate::convert::{self, Foreign};

/// Says that a pod asks for a part of a GPU by the means of another project, and which claim that
/// is. A resource for which there is a class is the administrator's own.
pub fn foreign(pod: &Pod, without_class: &BTreeSet<String>) -> Option<String> {
    let Foreign { mut keys, meant } = convert::foreign(pod)?;
    keys.retain(|key| !key.contains('/') || without_class.contains(key));
    if keys.is_empty() {
        return None;
    }
    let keys = keys.join(", ");
    let instead = match meant {
        Ok(claim) => {
            let policy = if claim.contains(capacity::PERCENT) {
                " (which needs a GpuPolicy with shares: {unit: Percent})"
            } else if claim.contains(names::CLASS_SHARE) {
                " (which needs a GpuPolicy with modes: [TimeSlicing])"
            } else {
                ""
            };
            format!("the claim that is meant: {claim}{policy}; divvy convert -f FILE writes it")
        }
        Err(why) if why.is_empty() => {
            "divvy convert -f FILE says why it cannot become a claim".to_owned()
        }
        Err(why) => why,
    };
    Some(format!(
        "asks for {keys}, by which other projects give out parts of a GPU: {instead}"
    ))
}

/// Says what to do about a resource that no class stands for.
pub fn without_class(resource: &str) -> String {
    format!(
        "asks for {resource}, which no DeviceClass stands for: it stays Pending unless a device plugin offers it (add a \
         DeviceClass with extendedResourceName: {resource}, or let divvy convert -f FILE write the claim)"
    )
}
