//! What the API server refuses of a manifest when it is applied, by itself and by the policy that the chart installs,
//! beyond the shape of its objects; and what it takes although it cannot be what was meant. Pure. The place and the words are the API server's where it has any.

use std::collections::BTreeSet;

use divvy_api::names::{self, capacity};
use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceConstraint, DeviceRequest, DeviceToleration, ExactDeviceRequest,
    OpaqueDeviceConfiguration, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::workload;
use crate::manifests::Manifests;
use crate::strict::did_you_mean;

mod naming;
mod pod;
mod selector;

/// Lists of a claim have at most this many entries.
const MOST: usize = 32;
/// A request has at most this many alternatives.
const MOST_ALTERNATIVES: usize = 8;
/// Less memory than this is a forgotten unit.
const LITTLE_MEMORY: i128 = 1 << 20;

/// What there is in the cluster that manifests may name.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub(super) classes: BTreeSet<String>,
    /// With their domains.
    pub(super) attributes: BTreeSet<String>,
    pub(super) capacities: BTreeSet<String>,
}

impl Known {
    pub(super) fn of(slices: &[ResourceSlice], classes: impl IntoIterator<Item = String>) -> Self {
        let mut known = Self { classes: classes.into_iter().collect(), ..Self::default() };
        for slice in slices {
            let full = |name: &String| {
                if name.contains('/') { name.clone() } else { format!("{}/{name}", slice.spec.driver) }
            };
            for device in slice.spec.devices.iter().flatten() {
                known.attributes.extend(device.attributes.iter().flat_map(|all| all.keys().map(full)));
                known.capacities.extend(device.capacity.iter().flat_map(|all| all.keys().cloned()));
            }
        }
        known
    }
}

/// What is wrong with a manifest.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Findings {
    /// `kubectl apply` fails with it.
    pub(super) refused: Vec<String>,
    /// It is accepted, and means something else than its writer probably thinks.
    pub(super) doubtful: Vec<String>,
}

/// Looks through a manifest.
pub(super) fn review(manifests: &Manifests, known: &Known) -> Findings {
    let mut findings = Findings::default();
    for class in &manifests.classes {
        let place = findings.named("DeviceClass", &class.metadata);
        let at = format!("{place}: spec");
        findings.selectors(&at, class.spec.as_ref().and_then(|spec| spec.selectors.as_deref()), known);
        let configs = class.spec.iter().flat_map(|spec| spec.config.iter().flatten());
        for (number, opaque) in
            configs.enumerate().filter_map(|(n, config)| Some((n, config.opaque.as_ref()?)))
        {
            findings.config(&format!("{at}.config[{number}].opaque"), opaque, std::iter::empty());
        }
    }
    let claims =
        manifests.claims.iter().map(|claim| ("ResourceClaim", "spec", &claim.metadata, claim.spec.as_ref()));
    let templates = manifests.templates.iter().map(|template| {
        let spec = template.spec.as_ref().and_then(|spec| spec.spec.as_ref());
        ("ResourceClaimTemplate", "spec.spec", &template.metadata, spec)
    });
    for (kind, path, meta, spec) in claims.chain(templates) {
        let at = format!("{}: {path}.devices", findings.named(kind, meta));
        let devices = spec.and_then(|spec| spec.devices.as_ref());
        findings.devices(&at, devices, may_see_all(manifests, meta), known);
    }
    for pod in &manifests.pods {
        findings.pod(pod, manifests);
    }
    for policy in &manifests.policies {
        let rules = policy.spec.rules.iter().filter_map(|rule| rule.nodes.as_ref());
        for name in policy.spec.nodes.iter().chain(rules).flat_map(|nodes| &nodes.names) {
            if !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.') {
                findings.refused.push(format!(
                    "GpuPolicy {}: nodes.names: Invalid value: {name:?}: the name of a node (for several, use a selector)",
                    policy.name
                ));
            }
        }
    }
    findings
}

/// Whether the namespace of the object allows admin access.
fn may_see_all(manifests: &Manifests, of: &ObjectMeta) -> bool {
    let wanted = workload::namespace(of);
    let namespace = manifests.namespaces.iter().find(|n| n.metadata.name.as_deref() == Some(&wanted));
    let label = namespace.and_then(|namespace| namespace.metadata.labels.as_ref()?.get(ADMIN_LABEL));
    label.is_some_and(|value| value == "true")
}

/// What a namespace must say for claims with admin access.
const ADMIN_LABEL: &str = "resource.kubernetes.io/admin-access";

impl Findings {
    /// `at` is the object (kind, namespace and name), and the path in it.
    fn refuse(&mut self, at: &str, what: &str) {
        self.refused.push(format!("{at}: {what}"));
    }

    fn doubt(&mut self, at: &str, what: &str) {
        self.doubtful.push(format!("{at}: {what}"));
    }

    /// What the object is called; one without a proper name is refused.
    fn named(&mut self, kind: &str, meta: &ObjectMeta) -> String {
        let name = meta.name.as_deref().unwrap_or("(no name)");
        let place = format!("{kind} {}/{name}", workload::namespace(meta));
        self.subdomain(&place, meta.name.as_deref());
        place
    }

    fn at_most(&mut self, most: usize, count: usize, list: &str) {
        if count > most {
            self.refuse(list, &format!("Too many: {count}: must have at most {most} items"));
        }
    }

    fn devices(&mut self, at: &str, devices: Option<&DeviceClaim>, may_see_all: bool, known: &Known) {
        let Some(devices) = devices else { return };
        let requests = devices.requests.as_deref().unwrap_or_default();
        let configs = devices.config.as_deref().unwrap_or_default();
        let constraints = devices.constraints.as_deref().unwrap_or_default();
        for (what, count) in
            [("requests", requests.len()), ("config", configs.len()), ("constraints", constraints.len())]
        {
            self.at_most(MOST, count, &format!("{at}.{what}"));
        }
        self.labels(&format!("{at}.requests"), requests.iter().map(|request| request.name.as_str()));
        for (number, request) in requests.iter().enumerate() {
            self.request(&format!("{at}.requests[{number}]"), request, may_see_all, known);
        }
        let there = request_names(devices);
        for (number, config) in configs.iter().enumerate() {
            let at = format!("{at}.config[{number}]");
            let named = config.requests.as_deref().unwrap_or_default();
            self.requests_exist(&at, Some(named), &there);
            match &config.opaque {
                None => self.refuse(&format!("{at}.opaque"), "Required value"),
                Some(opaque) => {
                    let is_named = |request: &&DeviceRequest| named.contains(&request.name);
                    let classes =
                        requests.iter().filter(is_named).filter_map(|request| request.exactly.as_ref());
                    let classes = classes.map(|exactly| exactly.device_class_name.as_str());
                    self.config(&format!("{at}.opaque"), opaque, classes);
                }
            }
        }
        for (number, constraint) in constraints.iter().enumerate() {
            let at = format!("{at}.constraints[{number}]");
            self.requests_exist(&at, constraint.requests.as_deref(), &there);
            self.constraint(&at, constraint, known);
        }
    }

    /// A config, as the policy of the chart (`claimPolicy`) has it; `classes` are those of the requests that it names.
    fn config<'c>(
        &mut self,
        at: &str,
        of: &OpaqueDeviceConfiguration,
        classes: impl Iterator<Item = &'c str>,
    ) {
        if of.driver.is_empty() {
            return self.refuse(&format!("{at}.driver"), "Required value");
        }
        if of.driver != names::DRIVER {
            let hint = did_you_mean(&of.driver, [names::DRIVER]);
            let what = format!("{:?} is another driver, for whose devices it is{hint}", of.driver);
            return self.doubt(&format!("{at}.driver"), &what);
        }
        let at = &format!("{at}.parameters");
        let kind = match divvy_api::decode(&of.parameters.0) {
            Ok(config) => config.kind.name(),
            Err(error) => return self.refuse(at, &error.to_string()),
        };
        for class in classes {
            let takes = match class {
                names::CLASS_GPU | names::CLASS_ADMIN => "GpuConfig",
                names::CLASS_MIG => "MigConfig",
                names::CLASS_SHARE => "ShareConfig",
                _ => continue,
            };
            if takes != kind {
                self.refuse(at, &format!("a {kind} for a request of class {class}, which takes a {takes}"));
            }
        }
    }

    fn request(&mut self, at: &str, request: &DeviceRequest, may_see_all: bool, known: &Known) {
        let alternatives = request.first_available.as_deref().unwrap_or_default();
        if request.exactly.is_some() != alternatives.is_empty() {
            self.refuse(at, "Required value: exactly one of `exactly` or `firstAvailable` is required");
        }
        let list = format!("{at}.firstAvailable");
        self.at_most(MOST_ALTERNATIVES, alternatives.len(), &list);
        self.labels(&list, alternatives.iter().map(|alternative| alternative.name.as_str()));
        let alternatives = alternatives.iter().enumerate().map(|(number, alternative)| {
            let of = ExactDeviceRequest {
                device_class_name: alternative.device_class_name.clone(),
                allocation_mode: alternative.allocation_mode.clone(),
                count: alternative.count,
                capacity: alternative.capacity.clone(),
                selectors: alternative.selectors.clone(),
                tolerations: alternative.tolerations.clone(),
                ..ExactDeviceRequest::default()
            };
            (format!(".firstAvailable[{number}]"), of)
        });
        let all = request.exactly.iter().map(|of| (".exactly".to_owned(), of.clone())).chain(alternatives);
        for (step, of) in all {
            self.one(&format!("{at}{step}"), &of, may_see_all, known);
        }
    }

    fn one(&mut self, at: &str, of: &ExactDeviceRequest, may_see_all: bool, known: &Known) {
        self.selectors(at, of.selectors.as_deref(), known);
        let class = of.device_class_name.as_str();
        let admin = of.admin_access == Some(true);
        if class.is_empty() {
            self.refuse(&format!("{at}.deviceClassName"), "Required value");
        } else if !known.classes.contains(class) {
            let there: Vec<&str> = known.classes.iter().map(String::as_str).collect();
            let hint = did_you_mean(class, there.iter().copied());
            let what = format!("class {class:?} does not exist{hint}; there are {}", there.join(", "));
            self.doubt(&format!("{at}.deviceClassName"), &what);
        }
        // A count of 0 is one that is not set: the API server makes it 1.
        match (of.allocation_mode.as_deref(), of.count.unwrap_or(0)) {
            (None | Some("ExactCount"), ..=-1) => {
                self.refuse(&format!("{at}.count"), "Invalid value: must be greater than zero");
            }
            (Some("All"), count) if count != 0 => {
                self.refuse(
                    &format!("{at}.count"),
                    "Invalid value: must not be specified when allocationMode is All",
                );
            }
            (None | Some("ExactCount" | "All"), _) => {}
            (Some(other), _) => self.refuse(
                &format!("{at}.allocationMode"),
                &format!("Unsupported value: {other:?}: supported values: \"All\", \"ExactCount\""),
            ),
        }
        if admin && !may_see_all {
            self.refuse(
                &format!("{at}.adminAccess"),
                &format!("Forbidden: admin access to devices requires the label {ADMIN_LABEL}: \"true\" on the namespace"),
            );
        }
        if class == names::CLASS_ADMIN && !admin {
            self.refuse(at, "class admin.divvy.dev is for requests with adminAccess: true only, since it reserves nothing");
        }
        if matches!(class, names::CLASS_MIG | names::CLASS_SHARE) && admin {
            self.refuse(at, "adminAccess is for whole GPUs: use class admin.divvy.dev with it");
        }
        for (number, toleration) in of.tolerations.iter().flatten().enumerate() {
            self.toleration(&format!("{at}.tolerations[{number}]"), toleration);
        }
        for (name, amount) in of.capacity.iter().flat_map(|capacity| capacity.requests.iter().flatten()) {
            self.capacity(&format!("{at}.capacity.requests[{name}]"), name, amount, known);
        }
    }

    fn toleration(&mut self, at: &str, of: &DeviceToleration) {
        match of.operator.as_deref().unwrap_or("Equal") {
            "Exists" if of.value.as_deref().is_some_and(|value| !value.is_empty()) => {
                self.refuse(&format!("{at}.value"), "Invalid value: must be empty for operator `Exists`");
            }
            "Exists" | "Equal" => {}
            other => self.refuse(
                &format!("{at}.operator"),
                &format!("Unsupported value: {other:?}: supported values: \"Equal\", \"Exists\""),
            ),
        }
        let effects = ["", "NoExecute", "NoSchedule", "None"];
        if let Some(other) = of.effect.as_deref().filter(|effect| !effects.contains(effect)) {
            let what = format!(
                "Unsupported value: {other:?}: supported values: \"NoExecute\", \"NoSchedule\", \"None\""
            );
            self.refuse(&format!("{at}.effect"), &what);
        }
    }

    fn capacity(&mut self, at: &str, name: &str, amount: &Amount, known: &Known) {
        let Ok(wanted) = amount.0.parse::<Quantity>() else {
            return self.refuse(at, &format!("Invalid value: {:?}: not a quantity", amount.0));
        };
        let id = name.strip_prefix(names::DRIVER).and_then(|id| id.strip_prefix('/')).unwrap_or(name);
        if !known.capacities.contains(id) {
            let hint = did_you_mean(id, known.capacities.iter().map(String::as_str));
            return self.doubt(at, &format!("no device has capacity {name:?}{hint}"));
        }
        let shown = &amount.0;
        // As the policy of the chart has it.
        if id == capacity::MEMORY && wanted.rounded_up() < LITTLE_MEMORY {
            self.refuse(
                at,
                &format!("{shown} is less than 1Mi, most likely a number without its unit: write {shown}Mi"),
            );
        } else if wanted.signum() < 0 {
            self.refuse(at, "cores and slots of a request cannot be negative");
        } else if wanted.signum() == 0 {
            self.doubt(at, "0 is not more than nothing: the smallest share is granted");
        } else if wanted.nanos() % 1_000_000_000 != 0 {
            self.doubt(at, &format!("{shown} is rounded up to {}", wanted.rounded_up()));
        }
    }

    fn constraint(&mut self, at: &str, of: &DeviceConstraint, known: &Known) {
        let (step, attribute) = match (&of.match_attribute, &of.distinct_attribute) {
            (Some(attribute), None) => (".matchAttribute", attribute),
            (None, Some(attribute)) => (".distinctAttribute", attribute),
            _ => {
                let what =
                    "Required value: exactly one of `matchAttribute` or `distinctAttribute` is required";
                return self.refuse(at, what);
            }
        };
        let at = format!("{at}{step}");
        let hint = did_you_mean(attribute, known.attributes.iter().map(String::as_str));
        if !attribute.contains('/') {
            let ours = format!("{}/{attribute}", names::DRIVER);
            let hint =
                if known.attributes.contains(&ours) { format!(" (did you mean {ours:?}?)") } else { hint };
            self.refuse(
                &at,
                &format!("Invalid value: {attribute:?}: a valid name must include a domain{hint}"),
            );
        } else if !known.attributes.contains(attribute) {
            self.doubt(&at, &format!("no device has attribute {attribute:?}{hint}"));
        }
    }

    fn requests_exist(&mut self, at: &str, named: Option<&[String]>, there: &BTreeSet<String>) {
        let named = named.unwrap_or_default();
        for (number, name) in named.iter().enumerate() {
            if named.iter().take(number).any(|before| before == name) {
                self.refuse(&format!("{at}.requests[{number}]"), &format!("Duplicate value: {name:?}"));
            }
            if !there.contains(name) {
                let hint = did_you_mean(name, there.iter().map(String::as_str));
                let what = "must be the name of a request in claim or the name of a request and a subrequest separated by '/'";
                self.refuse(
                    &format!("{at}.requests[{number}]"),
                    &format!("Invalid value: {name:?}: {what}{hint}"),
                );
            }
        }
    }
}

/// The names by which a claim's requests can be meant.
fn request_names(devices: &DeviceClaim) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for request in devices.requests.iter().flatten() {
        let alternatives = request.first_available.iter().flatten();
        names.extend(alternatives.map(|alternative| format!("{}/{}", request.name, alternative.name)));
        names.insert(request.name.clone());
    }
    names
}
