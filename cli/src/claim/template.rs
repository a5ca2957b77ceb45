//! Claims that divvy writes: the one place where a request becomes the fields of
//! `resource.k8s.io/v1`. Pure.

use divvy_api::names::{self, Naming, attributes, capacity};

use crate::yaml::{Map, Node};
use divvy_why::driver;

/// Name of the only request of a claim, and of the claim in its pod.
pub(crate) const NAME: &str = "gpu";

/// Devices to claim together.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Claim {
    /// Name of the driver, from which the names of classes and capacities follow.
    pub(crate) driver: &'static str,
    pub(crate) requests: Vec<Request>,
    /// Attributes that all devices of the claim have in common.
    pub(crate) same: Vec<String>,
    /// Limit of the memory of each share, where the driver caps it.
    pub(crate) limit: Option<String>,
}

impl Default for Claim {
    fn default() -> Self {
        Self {
            driver: names::DRIVER,
            requests: Vec::new(),
            same: Vec::new(),
            limit: None,
        }
    }
}

/// Devices of one kind.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Request {
    pub(crate) name: String,
    pub(crate) class: &'static str,
    /// Number of devices; 1 is not written.
    pub(crate) count: u64,
    /// CEL expressions.
    pub(crate) selectors: Vec<String>,
    /// Amounts of a share, by capacity.
    pub(crate) capacity: Vec<(&'static str, Node)>,
    /// Limits of a share above these amounts.
    pub(crate) limits: Vec<(&'static str, Node)>,
}

impl Request {
    fn of(class: &'static str, count: u64) -> Self {
        Self {
            name: NAME.to_owned(),
            class,
            count,
            ..Self::default()
        }
    }

    /// Asks for whole GPUs.
    pub(crate) fn gpus(count: u64) -> Self {
        Self::of(names::CLASS_GPU, count)
    }

    /// Asks for partitions.
    pub(crate) fn partitions(count: u64) -> Self {
        Self::of(names::CLASS_MIG, count)
    }

    /// Asks for partitions of a profile.
    pub(crate) fn of_profile(driver: &str, profile: &str, count: u64) -> Self {
        let mut request = Self::partitions(count);
        let has = attribute(driver, attributes::PROFILE);
        request.select(format!("{has} == {profile:?}"));
        request
    }

    /// Asks for shares of partitions of a profile.
    pub(crate) fn shares_of_profile(profile: &str, count: u64) -> Self {
        let of = Self::of_profile(names::DRIVER, profile, count);
        Self {
            class: names::CLASS_MIG_SHARE,
            ..of
        }
    }

    /// Asks for slots of GPUs with MPS.
    pub(crate) fn slots(count: u64) -> Self {
        Self::of(names::CLASS_MPS, count)
    }

    /// Asks for slots of partitions with MPS.
    pub(crate) fn slots_of_profile(profile: &str, count: u64) -> Self {
        let of = Self::of_profile(names::DRIVER, profile, count);
        Self {
            class: names::CLASS_MIG_MPS,
            ..of
        }
    }

    /// Asks for an MPS share. An amount that is not given is that of a slot.
    pub(crate) fn mps_share(memory: Option<&str>, cores: Option<u64>) -> Self {
        Self {
            class: names::CLASS_MPS,
            ..Self::shares(1, memory, cores)
        }
    }

    /// Asks for shares, each of another GPU. An amount that is not given is an equal part.
    pub(crate) fn shares(count: u64, memory: Option<&str>, cores: Option<u64>) -> Self {
        let mut request = Self::of(names::CLASS_SHARE, count);
        let memory = memory.map(|amount| (capacity::MEMORY, amount.into()));
        let cores = cores.map(|percent| (capacity::CORES, percent.into()));
        request.capacity.extend(memory.into_iter().chain(cores));
        request
    }

    /// Asks for shares that are a fraction of any GPU, in percent of its memory and compute.
    pub(crate) fn fractions(count: u64, percent: u64) -> Self {
        let mut request = Self::of(names::CLASS_SHARE, count);
        request.capacity.push((capacity::PERCENT, percent.into()));
        request
    }

    /// Says whether it is a fraction of a GPU, which needs a policy that divides by percent.
    pub(crate) fn is_fraction(&self) -> bool {
        self.capacity
            .iter()
            .any(|(name, _)| *name == capacity::PERCENT)
    }

    /// Adds a CEL expression that each device satisfies.
    pub(crate) fn select(&mut self, expression: String) {
        self.selectors.push(expression);
    }

    fn node(&self, of: &str) -> Node {
        let form = driver::form(names::DRIVER, self.class);
        let class = form.and_then(|form| driver::class(of, form));
        let class = class.unwrap_or(self.class);
        let mut exactly = Map::from([("deviceClassName", class.into())]);
        if self.count > 1 {
            exactly.set("count", self.count);
        }
        let selector = |expression: &String| {
            Node::from([("cel", [("expression", expression.as_str().into())].into())])
        };
        if !self.selectors.is_empty() {
            let all: Vec<Node> = self.selectors.iter().map(selector).collect();
            exactly.set("selectors", all);
        }
        if !self.capacity.is_empty() {
            let mut amounts = Map::default();
            for (name, amount) in &self.capacity {
                amounts.set(&Naming::of(of).capacity(name), amount.clone());
            }
            exactly.set("capacity", Map::from([("requests", amounts.into())]));
        }
        Node::from([
            ("name", self.name.as_str().into()),
            ("exactly", exactly.into()),
        ])
    }

    /// Describes it in one line: the class, and the fields beside it as in YAML.
    pub(crate) fn in_words(&self) -> String {
        let mut words = format!("class {}", self.class);
        if self.count > 1 {
            words += &format!(", count: {}", self.count);
        }
        for expression in &self.selectors {
            words += &format!(", selector {expression}");
        }
        let amounts: Vec<String> = self
            .capacity
            .iter()
            .map(|(name, amount)| format!("{name}: {}", amount.scalar().unwrap_or_default()))
            .collect();
        if !amounts.is_empty() {
            words += &format!(", capacity.requests {{{}}}", amounts.join(", "));
        }
        for (name, amount) in &self.limits {
            words += &format!(", limits.{name}: {}", amount.scalar().unwrap_or_default());
        }
        words
    }
}

impl Claim {
    /// Returns `spec.devices`.
    fn devices(&self) -> Map {
        let requests: Vec<Node> = self
            .requests
            .iter()
            .map(|of| of.node(self.driver))
            .collect();
        let mut devices = Map::from([("requests", requests.into())]);
        let constraint =
            |name: &String| Node::from([("matchAttribute", Node::from(name.as_str()))]);
        if !self.same.is_empty() {
            let all: Vec<Node> = self.same.iter().map(constraint).collect();
            devices.set("constraints", all);
        }
        let own = self.limit.iter().map(|limit| {
            let limits = vec![(capacity::MEMORY, Node::from(limit.as_str()))];
            self.config(None, &limits, names::CLASS_SHARE)
        });
        let of_requests = self.requests.iter().filter(|one| !one.limits.is_empty());
        let of_requests = of_requests.map(|one| {
            let name = (self.requests.len() > 1).then_some(one.name.as_str());
            self.config(name, &one.limits, one.class)
        });
        let configs: Vec<Node> = own.chain(of_requests).collect();
        if !configs.is_empty() {
            devices.set("config", configs);
        }
        devices
    }

    /// Returns the config with the limits of one request, or of all.
    fn config(&self, request: Option<&str>, limits: &[(&'static str, Node)], class: &str) -> Node {
        let mut config = Map::default();
        if let Some(request) = request {
            config.set("requests", vec![Node::from(request)]);
        }
        let opaque = Map::from([
            ("driver", self.driver.into()),
            ("parameters", limits_config(class, limits).into()),
        ]);
        config.set("opaque", opaque);
        config.into()
    }

    /// Returns the ResourceClaimTemplate.
    pub(crate) fn template(&self, name: &str, namespace: Option<&str>) -> Node {
        let mut metadata = Map::from([("name", name.into())]);
        if let Some(namespace) = namespace {
            metadata.set("namespace", namespace);
        }
        let spec = Map::from([("devices", self.devices().into())]);
        Node::from([
            ("apiVersion", "resource.k8s.io/v1".into()),
            ("kind", "ResourceClaimTemplate".into()),
            ("metadata", metadata.into()),
            ("spec", [("spec", spec.into())].into()),
        ])
    }
}

/// Returns the config of shares of a class with these limits.
fn limits_config(class: &str, all: &[(&'static str, Node)]) -> Map {
    let is_mps = [names::CLASS_MPS, names::CLASS_MIG_MPS].contains(&class);
    let kind = if is_mps {
        divvy_api::ConfigKind::Mps
    } else {
        divvy_api::ConfigKind::Share
    };
    let mut limits = Map::default();
    for (name, amount) in all {
        limits.set(name, amount.clone());
    }
    Map::from([
        ("apiVersion", names::API_VERSION.into()),
        ("kind", kind.name().into()),
        ("limits", limits.into()),
    ])
}

/// Returns an attribute of divvy's as CEL reads it of a driver of this name.
pub(crate) fn attribute(driver: &str, name: &str) -> String {
    let published = Naming::of(driver).attribute(name);
    let (domain, name) = Naming::in_cel(driver, &published);
    format!("device.attributes[\"{domain}\"].{name}")
}

/// Returns a capacity of divvy's as CEL reads it of a driver of this name.
pub(crate) fn capacity(driver: &str, name: &str) -> String {
    let published = Naming::of(driver).capacity(name);
    let (domain, name) = Naming::in_cel(driver, &published);
    format!("device.capacity[\"{domain}\"].{name}")
}
