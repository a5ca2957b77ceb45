//! Requests in words: `gpu`, `4*gpu`, `mig:1g.10gb`, `share:10Gi`, `share:10Gi/20`, `mps:10Gi`.

use divvy_api::names::{self, attributes, capacity};
use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, CapacityRequirements, DeviceClaim, DeviceRequest, DeviceSelector,
    ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;
use thiserror::Error;

use crate::worlds::Shape;

/// Words that ask for nothing known.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "request {text:?}: {problem}; write gpu, 4*gpu, mig:1g.10gb, share:10Gi, share:10Gi/20 (cores) or mps:10Gi"
)]
pub struct RequestError {
    text: String,
    problem: &'static str,
}

/// Memory of the GPU of which parts are counted, in GiB.
const GPU_GIB: f64 = 80.0;

/// Returns how many GPUs words ask for: of a part its memory counts, of 80 GiB.
pub fn gpus(text: &str) -> f64 {
    let (count, what) = text.split_once('*').unwrap_or(("1", text));
    let count: f64 = count.parse().unwrap_or(1.0);
    let (kind, argument) = what.split_once(':').unwrap_or((what, ""));
    let gib = match kind {
        "mig" => {
            let (_, memory) = argument.split_once('.').unwrap_or_default();
            memory.split_once("gb").map(|(gib, _)| gib.parse().ok())
        }
        "share" | "mps" => {
            let memory = argument.split('/').next().unwrap_or_default();
            let amount = memory.parse::<Quantity>().ok();
            #[expect(clippy::cast_precision_loss, reason = "a part of a GPU")]
            Some(amount.map(|amount| amount.nanos() as f64 / 1e9 / f64::from(1 << 30)))
        }
        _ => None,
    };
    count * gib.flatten().map_or(1.0, |gib: f64| gib / GPU_GIB)
}

/// Returns the pod that asks for this.
pub fn shape(text: &str) -> Result<Shape, RequestError> {
    let fail = |problem| RequestError {
        text: text.to_owned(),
        problem,
    };
    let (count, what) = match text.split_once('*') {
        Some((count, what)) => {
            let count = count
                .parse::<i64>()
                .ok()
                .filter(|count| (1..=32).contains(count));
            (
                count.ok_or_else(|| fail("the number must be 1 to 32"))?,
                what,
            )
        }
        None => (1, text),
    };
    let (kind, argument) = what.split_once(':').unwrap_or((what, ""));
    let mut exactly = ExactDeviceRequest {
        count: Some(count),
        ..ExactDeviceRequest::default()
    };
    match kind {
        "gpu" if argument.is_empty() => names::CLASS_GPU.clone_into(&mut exactly.device_class_name),
        "mig" => {
            let is_profile = |c: char| c.is_ascii_alphanumeric() || ['.', '+', '-'].contains(&c);
            if argument.is_empty() || !argument.chars().all(is_profile) {
                return Err(fail("it names no profile"));
            }
            names::CLASS_MIG.clone_into(&mut exactly.device_class_name);
            let expression = format!(
                "device.attributes['{}'].{} == '{argument}'",
                names::DRIVER,
                attributes::PROFILE
            );
            exactly.selectors = Some(vec![DeviceSelector {
                cel: Some(CELDeviceSelector { expression }),
            }]);
        }
        "share" | "mps" => {
            let class = if kind == "share" {
                names::CLASS_SHARE
            } else {
                names::CLASS_MPS
            };
            class.clone_into(&mut exactly.device_class_name);
            let (memory, cores) = argument
                .split_once('/')
                .map_or((argument, None), |(memory, cores)| (memory, Some(cores)));
            let amounts = [(capacity::MEMORY, Some(memory)), (capacity::CORES, cores)];
            let mut requests = std::collections::BTreeMap::new();
            for (name, amount) in amounts {
                let Some(amount) = amount else { continue };
                let fine = amount
                    .parse::<Quantity>()
                    .is_ok_and(|amount| amount.signum() > 0);
                if !fine {
                    return Err(fail("its amount is none"));
                }
                requests.insert(name.to_owned(), Raw(amount.to_owned()));
            }
            exactly.capacity = Some(CapacityRequirements {
                requests: Some(requests),
            });
        }
        _ => return Err(fail("it asks for nothing known")),
    }
    let request = DeviceRequest {
        name: "gpu".to_owned(),
        exactly: Some(exactly),
        first_available: None,
    };
    let devices = DeviceClaim {
        requests: Some(vec![request]),
        ..DeviceClaim::default()
    };
    Ok(Shape {
        name: text.to_owned(),
        claims: vec![ResourceClaim {
            spec: Some(ResourceClaimSpec {
                devices: Some(devices),
            }),
            ..ResourceClaim::default()
        }],
        ..Shape::default()
    })
}
