//! Devices of a container that its programs cannot use together. Pure.

use divvy_model::{Form, Quantity, TargetKind};
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceClaim, DeviceRequest};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Findings;
use crate::workload;
use divvy_cli::extended;
use divvy_cli::manifests::{Manifests, WorkloadResource};
use divvy_why::driver;

/// Variable by which NVIDIA's runtime gives GPUs without asking the scheduler.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Devices of all requests that a container uses.
#[derive(Debug, Default, Clone, Copy)]
struct Held {
    /// GPUs, each as a whole or in a share.
    gpus: i64,
    partitions: i64,
    /// Whole GPUs and partitions of these, which are of one claim.
    alone: i64,
    /// GPUs for monitoring only.
    admin: i64,
    /// MPS servers, and the devices that they serve.
    servers: i64,
    served: i64,
    /// Devices of all these that `limits` ask for.
    by_limits: i64,
}

impl Held {
    /// Adds devices of a class; `has_server` if a config of the claim asks for an MPS server.
    fn add(&mut self, of: &str, class: &str, count: i64, has_server: bool) {
        let form = driver::form(of, class);
        let form = form.or(driver::profile_of(class).map(|_| Form::PARTITIONS));
        let devices = match form {
            Some(Form::ADMIN) => &mut self.admin,
            Some(form) => match form.target {
                TargetKind::Gpu => &mut self.gpus,
                TargetKind::Partition => &mut self.partitions,
            },
            None => return,
        };
        *devices = devices.saturating_add(count);
        if matches!(form, Some(Form::WHOLE | Form::PARTITIONS)) {
            self.alone = self.alone.saturating_add(count);
        }
        if matches!(form, Some(Form::MPS | Form::MPS_PARTITIONS)) {
            self.servers = self.servers.saturating_add(count);
            self.served = self.served.saturating_add(count);
        } else if has_server {
            self.servers = self.servers.saturating_add(1);
            self.served = self.served.saturating_add(count);
        }
    }

    fn all(self) -> i64 {
        let used = self.gpus.saturating_add(self.partitions);
        used.saturating_add(self.admin)
    }
}

/// Returns the class and the number of devices of a request; of alternatives those of the first.
fn asked(request: &DeviceRequest) -> Option<(&str, i64)> {
    let number = |mode: Option<&str>, count: Option<i64>| match mode {
        Some("All") => 1,
        _ => count.filter(|count| *count > 0).unwrap_or(1),
    };
    if let Some(of) = &request.exactly {
        let count = number(of.allocation_mode.as_deref(), of.count);
        return Some((&of.device_class_name, count));
    }
    let of = request.first_available.as_ref()?.first()?;
    let count = number(of.allocation_mode.as_deref(), of.count);
    Some((&of.device_class_name, count))
}

/// Says whether the devices of a request have an MPS server by a config of their claim.
fn has_server(of: &str, devices: &DeviceClaim, request: &str) -> bool {
    let configs = devices.config.iter().flatten();
    let mut opaque = configs.filter_map(|config| {
        let named = config.requests.as_deref().unwrap_or_default();
        let is_for = named.is_empty() || named.iter().any(|name| name == request);
        config
            .opaque
            .as_ref()
            .filter(|opaque| is_for && opaque.driver == of)
    });
    opaque.any(|opaque| {
        let config = divvy_api::decode_for(of, &opaque.parameters.0);
        config.is_ok_and(|config| config.mps_server.is_some())
    })
}

/// Returns the devices that a container has by its claims and limits; `None` where a claim is not
/// in the manifests.
fn held<'c>(
    of: &str,
    container: &Container,
    claim: &impl Fn(&str) -> Option<&'c DeviceClaim>,
) -> Option<Held> {
    let mut held = Held::default();
    let resources = container.resources.clone().unwrap_or_default();
    for used in resources.claims.iter().flatten() {
        let devices = claim(&used.name)?;
        let is_used = |request: &&DeviceRequest| {
            used.request
                .as_ref()
                .is_none_or(|name| *name == request.name)
        };
        for request in devices.requests.iter().flatten().filter(is_used) {
            if let Some((class, count)) = asked(request) {
                held.add(of, class, count, has_server(of, devices, &request.name));
            }
        }
    }
    let by_claims = held.all();
    for (name, count) in extended::asked(container) {
        if name == "nvidia.com/gpu" {
            held.gpus = held.gpus.saturating_add(count);
            held.alone = held.alone.saturating_add(count);
        } else if name.starts_with("nvidia.com/mig-") {
            held.partitions = held.partitions.saturating_add(count);
            held.alone = held.alone.saturating_add(count);
        } else if let Some(class) = extended::class_in(name) {
            held.add(of, class, count, false);
        }
    }
    held.by_limits = held.all().saturating_sub(by_claims);
    Some(held)
}

/// Says whether a pod has devices that no other pod gets at the same time.
pub(super) fn has_devices_alone(
    spec: &PodSpec,
    owner: &ObjectMeta,
    (manifests, of): (&Manifests, &str),
) -> bool {
    let entries = spec.resource_claims.as_deref().unwrap_or_default();
    let claim = |claim: &str| {
        let entry = entries.iter().find(|entry| entry.name == claim)?;
        // A claim by name is of the old pods, too.
        let made = entry.resource_claim_name.is_none();
        workload::devices_of(entry, owner, manifests).filter(|_| made)
    };
    let containers = spec
        .containers
        .iter()
        .filter_map(|one| held(of, one, &claim));
    let alone = |held: Held| held.alone > 0;
    containers.into_iter().any(alone)
}

/// Says whether a claim has a GPU or a partition whose users nothing divides.
fn is_undivided(of: &str, devices: &DeviceClaim) -> bool {
    devices.requests.iter().flatten().any(|request| {
        let mut held = Held::default();
        if let Some((class, count)) = asked(request) {
            held.add(of, class, count, has_server(of, devices, &request.name));
        }
        held.alone > 0 && held.servers == 0
    })
}

impl Findings {
    /// Notes claims that all pods of a workload have together.
    pub(super) fn one_claim_for_all(
        &mut self,
        at: &str,
        workload: &WorkloadResource,
        (manifests, driver): (&Manifests, &str),
    ) {
        let spec = workload.template.spec.as_ref();
        let entries = spec.and_then(|spec| spec.resource_claims.as_deref());
        let is_daemon = workload.kind == "DaemonSet";
        let pods = workload.counts.iter().map(|(_, count)| *count).min();
        let pods = pods.unwrap_or(1);
        for (number, entry) in entries.unwrap_or_default().iter().enumerate() {
            if entry.resource_claim_name.is_none() || (pods < 2 && !is_daemon) {
                continue;
            }
            let devices = workload::devices_of(entry, &workload.metadata, manifests);
            let undivided = devices.is_some_and(|devices| is_undivided(driver, devices));
            let what = if is_daemon {
                "one claim for the pods of all nodes: its devices are on one node, and the pods of the others wait for ever: \
                 resourceClaimTemplateName makes one for each pod"
                    .to_owned()
            } else if undivided {
                format!(
                    "{pods} pods use this claim at once, and nothing divides its devices between them: resourceClaimTemplateName makes a \
                     claim for each pod"
                )
            } else {
                continue;
            };
            self.doubt(&format!("{at}.resourceClaims[{number}]"), &what);
        }
    }

    /// Notes what programs in the container cannot use at once. `claim` has the devices of the
    /// pod's claim of a name.
    pub(super) fn together<'c>(
        &mut self,
        at: &str,
        of: &str,
        container: &Container,
        claim: &impl Fn(&str) -> Option<&'c DeviceClaim>,
    ) {
        let Some(held) = held(of, container, claim) else {
            return;
        };
        let place = format!("{at}.resources");
        if held.partitions > 1 {
            let what = format!(
                "{} partitions in one container: a CUDA program uses one, the first that it sees: give each container one, or start a \
                 program for each with the partition's UUID in CUDA_VISIBLE_DEVICES",
                held.partitions
            );
            self.doubt(&place, &what);
        } else if held.partitions > 0 && held.gpus > 0 {
            let what = "a partition and a GPU in one container: a CUDA program uses the one or the other: give them to containers \
                        of their own";
            self.doubt(&place, what);
        }
        if held.servers > 1 {
            let what = format!(
                "{} MPS servers in one container, which finds one (CUDA_MPS_PIPE_DIRECTORY): give each container a device of one",
                held.servers
            );
            self.doubt(&place, &what);
        } else if held.servers > 0 && held.gpus.saturating_add(held.partitions) > held.served {
            let what = "a device with an MPS server and others in one container: programs of the server are not served on the \
                        others: give them to containers of their own (docs/mps.md#mps-in-a-claim)";
            self.doubt(&place, what);
        }
        let by_claims = held.all().saturating_sub(held.by_limits);
        if held.by_limits > 0 && by_claims > 0 {
            let what = format!(
                "the container gets {} devices: {} by limits, and {by_claims} by its claims: remove one of them, unless both are meant",
                held.all(),
                held.by_limits
            );
            self.doubt(&place, &what);
        }
        self.visible(at, container, held.all());
    }

    /// Notes numbers of GPUs that the container does not have.
    fn visible(&mut self, at: &str, container: &Container, devices: i64) {
        for (number, variable) in container.env.iter().flatten().enumerate() {
            let value = variable.value.as_deref().unwrap_or_default();
            if variable.name == VISIBLE && devices == 0 && !["", "none", "void"].contains(&value) {
                let what = format!(
                    "{VISIBLE} gives no GPU of divvy: ask for nvidia.com/gpu in resources.limits, or name a claim (divvy claim prints one)"
                );
                self.doubt(&format!("{at}.env[{number}]"), &what);
            }
            let numbers = value.split(',').map(|part| part.trim().parse::<i64>());
            let mut beyond = numbers.flatten().filter(|number| *number >= devices);
            if variable.name != "CUDA_VISIBLE_DEVICES" || devices == 0 {
                continue;
            }
            if let Some(beyond) = beyond.next() {
                let what = format!(
                    "there is no GPU {beyond}: the GPUs of the container are numbered from 0, and it has {devices}, so that programs \
                     see none from this number on: remove it"
                );
                self.doubt(&format!("{at}.env[{number}]"), &what);
            }
        }
    }

    /// Notes an amount of a device that a request gets as a whole.
    pub(super) fn amount_of_whole(
        &mut self,
        at: &str,
        (form, class): (Option<Form>, &str),
        (name, amount): (&str, &str),
    ) {
        let instead = match form {
            Some(Form::WHOLE) => "for a part of a GPU, class share.divvy.dev",
            Some(Form::PARTITIONS) => "for another size, select by profile",
            None if driver::profile_of(class).is_some() => "for another size, another class",
            _ => return,
        };
        let asks = amount
            .parse::<Quantity>()
            .is_ok_and(|amount| amount.signum() > 0);
        if asks && !name.ends_with("cores") {
            let what = format!(
                "{amount} only selects a device that has as much, and the request gets all of it: {instead}"
            );
            self.doubt(at, &what);
        }
    }
}
