//! Review of a manifest as the API server does it when it is applied, by itself and by the policy
//! that
//! the chart installs, beyond the shape of its objects; and what it takes although it cannot be
//! what was meant. Pure. The place and the words are the API server's where it has any.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::MemoryBound;
use divvy_api::names::{self, attributes, capacity};
use divvy_model::{Form, Quantity, Sharing};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceRequest, DeviceToleration, ExactDeviceRequest, OpaqueDeviceConfiguration,
    ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use divvy_cli::manifests::{Manifests, namespace};
use divvy_why::lookup;
use divvy_why::spelling::did_you_mean;
use divvy_why::{classes, driver};

mod attribute;
mod class;
mod limits;
mod naming;
mod pod;
mod selector;
mod size;
mod together;
mod workload;

/// Lists of a claim have at most this many entries.
const MOST: usize = 32;
/// A request has at most this many alternatives.
const MOST_ALTERNATIVES: usize = 8;
/// A request has at most this many tolerations.
const MOST_TOLERATIONS: usize = 16;
/// Less memory than this is a forgotten unit.
const LITTLE_MEMORY: i128 = 1 << 20;

/// Attributes that only some forms of a GPU have.
const OF_SOME: [&str; 6] = [
    attributes::PROFILE,
    attributes::PARENT_UUID,
    attributes::TIME_SLICE,
    attributes::MEMORY_MIB,
    attributes::MEMORY_LIMIT_MAX_PERCENT,
    attributes::SHARING,
];

/// Names in the cluster that manifests may use.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Name of the driver.
    pub(super) driver: &'static str,
    pub(super) classes: BTreeSet<String>,
    /// Attributes of devices, as `domain/name`.
    pub(super) attributes: BTreeSet<String>,
    /// Capacities of devices, as `domain/name`.
    pub(super) capacities: BTreeSet<String>,
    pub(super) products: BTreeSet<String>,
    /// The same of the devices of one `type`.
    of_type: BTreeMap<String, OfType>,
    /// Limits that shares may have.
    limits: limits::Allowed,
    /// Drivers, pools and devices, for the selectors of DeviceTaintRules.
    pub(super) devices: BTreeSet<(String, String, String)>,
}

/// Names of the devices of one `type`.
#[derive(Debug, Default)]
struct OfType {
    attributes: BTreeSet<String>,
    capacities: BTreeSet<String>,
    /// Memory by profile, or by product where there is none, in bytes.
    memory: BTreeMap<String, u64>,
}

impl OfType {
    /// Returns what is known of shares where none is published: what requests can ask for.
    fn of_shares(driver: &str) -> Self {
        let names = [capacity::MEMORY, capacity::CORES, capacity::SLOTS];
        Self {
            capacities: names.map(|name| driver::capacity(driver, name)).into(),
            ..Self::default()
        }
    }
}

impl Known {
    /// Returns the names that a request of a class can use. Where no device of one of our classes
    /// is published, which the demo says, names of its devices are not known.
    fn of_class(&self, class: &str) -> OfType {
        let form = driver::form(self.driver, class).filter(|form| *form != Form::ADMIN);
        let Some(kind) = form else {
            return OfType {
                attributes: self.attributes.clone(),
                capacities: self.capacities.clone(),
                ..OfType::default()
            };
        };
        match self.of_type.get(kind.device_type()) {
            Some(found) => OfType {
                // An attribute that other forms have is no mistake of spelling.
                attributes: self.attributes.clone(),
                capacities: found.capacities.clone(),
                memory: found.memory.clone(),
            },
            None if kind.sharing == Sharing::TimeSliced => OfType::of_shares(self.driver),
            None if kind == Form::MPS => OfType {
                capacities: [driver::capacity(self.driver, capacity::SLOTS)].into(),
                ..OfType::default()
            },
            None => OfType::default(),
        }
    }

    /// Collects the names of published devices and of the classes.
    pub(super) fn of(
        driver: &'static str,
        slices: &[ResourceSlice],
        classes: impl IntoIterator<Item = String>,
    ) -> Self {
        let mut known = Self {
            driver,
            classes: classes.into_iter().collect(),
            ..Self::default()
        };
        // A form that is not offered has them, and that it is not offered is said of the claim.
        known
            .attributes
            .extend(OF_SOME.map(|name| driver::attribute(driver, name)));
        for slice in slices {
            let full = |name: &String| lookup::full(&slice.spec.driver, name);
            for device in slice.spec.devices.iter().flatten() {
                known.limits.add(device);
                known.attributes.extend(
                    device
                        .attributes
                        .iter()
                        .flat_map(|all| all.keys().map(full)),
                );
                known
                    .capacities
                    .extend(device.capacity.iter().flat_map(|all| all.keys().map(full)));
                let text = |name| divvy_why::device::text(device, name).map(str::to_owned);
                let product = text(attributes::PRODUCT_NAME);
                if let Some(kind) = text(attributes::TYPE) {
                    let of = known.of_type.entry(kind).or_default();
                    let names = device
                        .attributes
                        .iter()
                        .flat_map(|all| all.keys().map(full));
                    of.attributes.extend(names);
                    let names = device.capacity.iter().flat_map(|all| all.keys().map(full));
                    of.capacities.extend(names);
                    let name = text(attributes::PROFILE).or_else(|| product.clone());
                    if let Some((name, memory)) = name.zip(divvy_why::device::memory(device)) {
                        of.memory.insert(name, memory);
                    }
                }
                known.products.extend(product);
                known.devices.insert((
                    slice.spec.driver.clone(),
                    slice.spec.pool.name.clone(),
                    device.name.clone(),
                ));
            }
        }
        known
    }
}

/// Faults of a manifest.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Findings {
    /// Errors of `kubectl apply`.
    pub(super) refused: Vec<String>,
    /// Parts that are accepted and mean something else than their writer probably thinks.
    pub(super) doubtful: Vec<String>,
    /// Parts that are accepted and cannot be what was meant.
    pub(super) wrong: Vec<String>,
}

/// Looks through a manifest.
pub(super) fn review(manifests: &Manifests, known: &Known) -> Findings {
    let mut findings = Findings {
        refused: manifests.refused.clone(),
        doubtful: manifests.notes.clone(),
        wrong: Vec::new(),
    };
    for class in &manifests.classes {
        findings.class(class, known);
    }
    findings.extended_names(&manifests.classes);
    for rule in &manifests.taint_rules {
        findings.taint_rule(rule, known);
    }
    let claims = manifests.claims.iter().map(|claim| {
        (
            "ResourceClaim",
            "spec",
            &claim.metadata,
            claim.spec.as_ref(),
        )
    });
    let templates = manifests.templates.iter().map(|template| {
        let spec = template.spec.as_ref().and_then(|spec| spec.spec.as_ref());
        (
            "ResourceClaimTemplate",
            "spec.spec",
            &template.metadata,
            spec,
        )
    });
    for (kind, path, meta, spec) in claims.chain(templates) {
        let at = format!("{}: {path}.devices", findings.named(kind, meta));
        let devices = spec.and_then(|spec| spec.devices.as_ref());
        findings.devices(&at, devices, may_see_all(manifests, meta), known);
    }
    for pod in &manifests.pods {
        let place = findings.named("Pod", &pod.metadata);
        findings.pod(&place, pod, manifests, known.driver);
    }
    for workload in &manifests.workloads {
        findings.workload(workload, manifests, known.driver);
    }
    for policy in &manifests.policies {
        let rules = policy
            .spec
            .rules
            .iter()
            .filter_map(|rule| rule.nodes.as_ref());
        for name in policy
            .spec
            .nodes
            .iter()
            .chain(rules)
            .flat_map(|nodes| &nodes.names)
        {
            if !name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.')
            {
                findings.refused.push(format!(
                    "GpuPolicy {}: nodes.names: Invalid value: {name:?}: the name of a node (for several, use a selector)",
                    policy.name
                ));
            }
        }
    }
    findings
}

/// Says whether the namespace of the object allows admin access.
fn may_see_all(manifests: &Manifests, of: &ObjectMeta) -> bool {
    let wanted = namespace(of);
    let namespace = manifests
        .namespaces
        .iter()
        .find(|n| n.metadata.name.as_deref() == Some(&wanted));
    let label =
        namespace.and_then(|namespace| namespace.metadata.labels.as_ref()?.get(ADMIN_LABEL));
    label.is_some_and(|value| value == "true")
}

/// Label of a namespace that allows claims with admin access.
const ADMIN_LABEL: &str = "resource.kubernetes.io/admin-access";

impl Findings {
    /// Notes an error at the object (kind, namespace and name) and the path in it.
    fn refuse(&mut self, at: &str, what: &str) {
        self.refused.push(format!("{at}: {what}"));
    }

    fn fault(&mut self, at: &str, what: &str) {
        self.wrong.push(format!("{at}: {what}"));
    }

    fn doubt(&mut self, at: &str, what: &str) {
        self.doubtful.push(format!("{at}: {what}"));
    }

    /// Returns kind, namespace and name of an object, and refuses it without a proper name or with
    /// labels that are none.
    fn named(&mut self, kind: &str, meta: &ObjectMeta) -> String {
        let name = meta.name.as_deref().unwrap_or("(no name)");
        let place = format!("{kind} {}/{name}", namespace(meta));
        self.metadata(&place, meta);
        place
    }

    /// The same for a kind without namespaces.
    fn named_in_cluster(&mut self, kind: &str, meta: &ObjectMeta) -> String {
        let place = format!("{kind} {}", meta.name.as_deref().unwrap_or("(no name)"));
        self.metadata(&place, meta);
        place
    }

    fn metadata(&mut self, place: &str, meta: &ObjectMeta) {
        self.subdomain(place, meta.name.as_deref());
        self.label_values(&format!("{place}: metadata.labels"), meta.labels.as_ref());
    }

    fn at_most(&mut self, most: usize, count: usize, list: &str) {
        if count > most {
            self.refuse(
                list,
                &format!("Too many: {count}: must have at most {most} items"),
            );
        }
    }

    fn devices(
        &mut self,
        at: &str,
        devices: Option<&DeviceClaim>,
        may_see_all: bool,
        known: &Known,
    ) {
        let Some(devices) = devices else { return };
        let requests = devices.requests.as_deref().unwrap_or_default();
        let configs = devices.config.as_deref().unwrap_or_default();
        let constraints = devices.constraints.as_deref().unwrap_or_default();
        for (what, count) in [
            ("requests", requests.len()),
            ("config", configs.len()),
            ("constraints", constraints.len()),
        ] {
            self.at_most(MOST, count, &format!("{at}.{what}"));
        }
        self.labels(
            &format!("{at}.requests"),
            requests.iter().map(|request| request.name.as_str()),
        );
        for (number, request) in requests.iter().enumerate() {
            self.request(
                &format!("{at}.requests[{number}]"),
                request,
                may_see_all,
                known,
            );
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
                    let classes = requests
                        .iter()
                        .filter(is_named)
                        .filter_map(|request| request.exactly.as_ref());
                    let classes = classes.map(|exactly| exactly.device_class_name.as_str());
                    let at = format!("{at}.opaque");
                    let limit = self.config(&at, known.driver, opaque, classes);
                    if let Some(bound) = limit {
                        let at = format!("{at}.parameters");
                        self.memory_limit(&at, bound, (named, devices), known.limits);
                    }
                }
            }
        }
        for (number, constraint) in constraints.iter().enumerate() {
            let at = format!("{at}.constraints[{number}]");
            self.requests_exist(&at, constraint.requests.as_deref(), &there);
            self.constraint(&at, constraint, known);
        }
    }

    /// A config, as the policy of the chart (`claimPolicy`) has it; `classes` are those of the
    /// requests that it names. Returns the limit of memory that it sets.
    fn config<'c>(
        &mut self,
        at: &str,
        driver: &str,
        of: &OpaqueDeviceConfiguration,
        classes: impl Iterator<Item = &'c str>,
    ) -> Option<MemoryBound> {
        if of.driver.is_empty() {
            self.refuse(&format!("{at}.driver"), "Required value");
            return None;
        }
        if of.driver != driver {
            let hint = did_you_mean(&of.driver, [driver]);
            let what = format!(
                "this config is for driver {:?}{hint} and has no effect on divvy's devices",
                of.driver
            );
            self.doubt(&format!("{at}.driver"), &what);
            return None;
        }
        let at = &format!("{at}.parameters");
        let config = match divvy_api::decode_for(driver, &of.parameters.0) {
            Ok(config) => config,
            Err(error) => {
                self.refuse(at, &error.to_string());
                return None;
            }
        };
        let kind = config.kind.name();
        for class in classes {
            let takes = match driver::form(driver, class) {
                Some(Form::WHOLE | Form::ADMIN) => "GpuConfig",
                Some(Form::PARTITIONS) => "MigConfig",
                Some(Form::MPS | Form::MPS_PARTITIONS) => "MpsConfig",
                Some(form) if form.sharing.is_shared() => "ShareConfig",
                _ => continue,
            };
            if takes != kind {
                self.refuse(
                    at,
                    &format!("a {kind} for a request of class {class}, which takes a {takes}"),
                );
            }
        }
        config.memory_limit
    }

    fn request(&mut self, at: &str, request: &DeviceRequest, may_see_all: bool, known: &Known) {
        let alternatives = request.first_available.as_deref().unwrap_or_default();
        if request.exactly.is_some() != alternatives.is_empty() {
            self.refuse(
                at,
                "Required value: exactly one of `exactly` or `firstAvailable` is required",
            );
        }
        let list = format!("{at}.firstAvailable");
        self.at_most(MOST_ALTERNATIVES, alternatives.len(), &list);
        self.labels(
            &list,
            alternatives
                .iter()
                .map(|alternative| alternative.name.as_str()),
        );
        let alternatives = alternatives
            .iter()
            .enumerate()
            .map(|(number, alternative)| {
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
        let all = request
            .exactly
            .iter()
            .map(|of| (".exactly".to_owned(), of.clone()))
            .chain(alternatives);
        for (step, of) in all {
            self.one(&format!("{at}{step}"), &of, may_see_all, known);
        }
    }

    fn one(&mut self, at: &str, of: &ExactDeviceRequest, may_see_all: bool, known: &Known) {
        let there = known.of_class(&of.device_class_name);
        self.selectors(
            at,
            of.selectors.as_deref(),
            &there.attributes,
            &there.capacities,
        );
        self.sizes(at, of.selectors.as_deref(), &there.memory);
        let tolerations = of.tolerations.as_deref().unwrap_or_default();
        self.at_most(
            MOST_TOLERATIONS,
            tolerations.len(),
            &format!("{at}.tolerations"),
        );
        let class = of.device_class_name.as_str();
        let admin = of.admin_access == Some(true);
        if class.is_empty() {
            self.refuse(&format!("{at}.deviceClassName"), "Required value");
        } else if let Some(what) = classes::resource(known.driver, class) {
            let what = format!("Invalid value: {class:?}: {what}");
            self.refuse(&format!("{at}.deviceClassName"), &what);
        } else if !naming::is_subdomain(class) {
            let what = format!("Invalid value: {class:?}: {}", naming::SUBDOMAIN);
            self.refuse(&format!("{at}.deviceClassName"), &what);
        } else if !known.classes.contains(class) && class == driver::NVIDIA_VFIO {
            self.doubt(&format!("{at}.deviceClassName"), driver::NO_PASSTHROUGH);
        } else if !known.classes.contains(class) {
            let instead = classes::instead(class, known.classes.iter().map(String::as_str));
            self.doubt(
                &format!("{at}.deviceClassName"),
                &format!("class {class:?} does not exist{instead}"),
            );
        }
        // A count of 0 is one that is not set: the API server makes it 1.
        match (of.allocation_mode.as_deref(), of.count.unwrap_or(0)) {
            (None | Some("ExactCount"), ..=-1) => {
                self.refuse(
                    &format!("{at}.count"),
                    "Invalid value: must be greater than zero",
                );
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
        let form = driver::form(known.driver, class);
        let is_of_one = |form: Form| form == Form::PARTITIONS || form.sharing.is_shared();
        if admin && form.is_some_and(is_of_one) {
            self.refuse(
                at,
                "adminAccess is for whole GPUs: use class admin.divvy.dev with it",
            );
        }
        for (number, toleration) in of.tolerations.iter().flatten().enumerate() {
            self.toleration(&format!("{at}.tolerations[{number}]"), toleration);
        }
        self.share_amounts(at, of);
        for (name, amount) in capacity_requests(of) {
            self.capacity(
                &format!("{at}.capacity.requests[{name}]"),
                (name, amount),
                (known.driver, &there.capacities),
            );
            self.amount_of_whole(
                &format!("{at}.capacity.requests[{name}]"),
                (form, class),
                (name, &amount.0),
            );
        }
    }

    /// Notes amounts of a share that are hardly meant: in two units, or without memory.
    fn share_amounts(&mut self, at: &str, of: &ExactDeviceRequest) {
        let is_share =
            [names::CLASS_SHARE, names::CLASS_MIG_SHARE].contains(&of.device_class_name.as_str());
        let asks = |id: &str| {
            capacity_requests(of)
                .any(|(name, _)| name.rsplit_once('/').map_or(name.as_str(), |n| n.1) == id)
        };
        let amount = [capacity::MEMORY, capacity::CORES, capacity::SLOTS];
        if let Some(amount) = amount.into_iter().find(|amount| asks(amount))
            && is_share
            && asks(capacity::PERCENT)
        {
            self.doubt(
                &format!("{at}.capacity.requests"),
                &format!("{amount} and percent: no GPU is shared by both, so none has such a share (request one of them)"),
            );
        }
        let alone = [capacity::CORES, capacity::SLOTS]
            .into_iter()
            .find(|id| asks(id));
        if let Some(alone) = alone
            && is_share
            && !asks(capacity::MEMORY)
            && !asks(capacity::PERCENT)
        {
            let amount = capacity_requests(of).find_map(|(name, amount)| {
                let id = name
                    .rsplit_once('/')
                    .map_or(name.as_str(), |(_, name)| name);
                (id == alone).then_some(amount.0.as_str())
            });
            let amount = amount.unwrap_or_default();
            let what = if alone == capacity::CORES {
                format!(
                    "cores: {amount} is compute only, and memory stays the default, the part of one slot"
                )
            } else {
                format!(
                    "slots: {amount} only keeps places from others, and memory and cores stay the default, the part of one slot"
                )
            };
            self.doubt(
                &format!("{at}.capacity.requests"),
                &format!(
                    "{what}: request memory, too, or for half of a GPU percent: 50 alone, which needs a GpuPolicy with \
                     shares: {{unit: Percent}}"
                ),
            );
        }
    }

    fn toleration(&mut self, at: &str, of: &DeviceToleration) {
        if let Some(key) = of.key.as_deref().filter(|key| !key.is_empty()) {
            self.label_key(&format!("{at}.key"), key);
        }
        match of.operator.as_deref().unwrap_or("Equal") {
            "Exists" if of.value.as_deref().is_some_and(|value| !value.is_empty()) => {
                self.refuse(
                    &format!("{at}.value"),
                    "Invalid value: must be empty for operator `Exists`",
                );
            }
            "Exists" | "Equal" => {}
            other => self.refuse(
                &format!("{at}.operator"),
                &format!("Unsupported value: {other:?}: supported values: \"Equal\", \"Exists\""),
            ),
        }
        let effects = ["", "NoExecute", "NoSchedule", "None"];
        if let Some(other) = of
            .effect
            .as_deref()
            .filter(|effect| !effects.contains(effect))
        {
            let what = format!(
                "Unsupported value: {other:?}: supported values: \"NoExecute\", \"NoSchedule\", \"None\""
            );
            self.refuse(&format!("{at}.effect"), &what);
        }
    }

    fn capacity(
        &mut self,
        at: &str,
        (name, amount): (&str, &Amount),
        (driver, there): (&str, &BTreeSet<String>),
    ) {
        let Ok(wanted) = amount.0.parse::<Quantity>() else {
            // `10GB` and `10 Gi` are meant so.
            let letters = amount.0.trim_end_matches(['B', 'b', ' ']).replace(' ', "");
            // Of a capacity that is in percent already.
            if let Some(percent) = amount.0.trim().strip_suffix('%') {
                let what = if name.ends_with(capacity::MEMORY) {
                    "a part of any GPU is percent, in the place of memory and cores".to_owned()
                } else {
                    format!("write {}", percent.trim())
                };
                return self.refuse(
                    at,
                    &format!("Invalid value: {:?}: not a quantity ({what})", amount.0),
                );
            }
            let hint = letters.parse::<Quantity>().map_or_else(
                |_| String::new(),
                |_| match letters.strip_suffix(['K', 'k', 'M', 'G', 'T']) {
                    Some(_) => format!(" (write {letters} or {letters}i)"),
                    None => format!(" (write {letters})"),
                },
            );
            return self.refuse(
                at,
                &format!("Invalid value: {:?}: not a quantity{hint}", amount.0),
            );
        };
        let Some(id) = self.known_capacity(at, name, (driver, there)) else {
            return;
        };
        let shown = &amount.0;
        // As the policy of the chart has it.
        if id == capacity::MEMORY && wanted.rounded_up() < LITTLE_MEMORY {
            self.refuse(at, &little_memory(shown));
        } else if wanted.signum() < 0 {
            self.refuse(
                at,
                "cores, slots and percent of a request cannot be negative",
            );
        } else if wanted.signum() == 0 {
            self.doubt(
                at,
                "0 is not more than nothing: the smallest share is granted",
            );
        } else if wanted.nanos() % 1_000_000_000 != 0 {
            let percent = match id {
                capacity::CORES if wanted.rounded_up() == 1 => {
                    "; cores are percent of a GPU: 10 is a tenth of it, 50 a half"
                }
                capacity::PERCENT if wanted.rounded_up() == 1 => {
                    "; percent are of a GPU: 50 is half of it"
                }
                _ => "",
            };
            let whole = wanted.rounded_up();
            self.doubt(at, &format!("{shown} is rounded up to {whole}{percent}"));
        }
    }

    fn requests_exist(&mut self, at: &str, named: Option<&[String]>, there: &BTreeSet<String>) {
        let named = named.unwrap_or_default();
        for (number, name) in named.iter().enumerate() {
            if named.iter().take(number).any(|before| before == name) {
                self.refuse(
                    &format!("{at}.requests[{number}]"),
                    &format!("Duplicate value: {name:?}"),
                );
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

/// Says what is wrong with less than the least amount of memory.
fn little_memory(shown: &str) -> String {
    let meant = divvy_cli::claim::with_unit(shown);
    match meant.as_slice() {
        [] => format!("{shown} is less than 1Mi: write 1Mi or more, or leave it out"),
        units => format!(
            "{shown} is less than 1Mi, most likely a number without its unit: write {}",
            units.join(" or ")
        ),
    }
}

/// Returns the amounts that a request asks for, by name.
fn capacity_requests(of: &ExactDeviceRequest) -> impl Iterator<Item = (&String, &Amount)> {
    let requests = of.capacity.iter().filter_map(|c| c.requests.as_ref());
    requests.flatten()
}

/// Returns the names by which a claim's requests can be meant.
fn request_names(devices: &DeviceClaim) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for request in devices.requests.iter().flatten() {
        let alternatives = request.first_available.iter().flatten();
        names.extend(
            alternatives.map(|alternative| format!("{}/{}", request.name, alternative.name)),
        );
        names.insert(request.name.clone());
    }
    names
}
