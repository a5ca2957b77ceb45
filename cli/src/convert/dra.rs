//! Claims, templates, classes and taint rules of NVIDIA's DRA driver, as those of divvy.

use std::collections::BTreeSet;

use divvy_api::names::{self, attributes, capacity, taints};

use super::cel::{self, NVIDIA};
use super::notes::{Notes, under};
use super::old;
use super::resources::ACCOUNTED;
use crate::format::total;
use crate::yaml::{Map, Node};

/// Class, and name, of HAMi's DRA driver.
pub(super) const HAMI: &str = "hami-core-gpu.project-hami.io";
/// Classes of shares.
const SHARES: [&str; 2] = [names::CLASS_SHARE, names::CLASS_MIG_SHARE];

/// Says whether objects of this kind can ask for devices of a driver.
pub(super) fn is_kind(version: &str, kind: &str) -> bool {
    version.starts_with("resource.k8s.io/")
        && [
            "ResourceClaim",
            "ResourceClaimTemplate",
            "DeviceClass",
            "DeviceTaintRule",
        ]
        .contains(&kind)
}

/// Converts an object; `None` if there is nothing of NVIDIA's or HAMi's in it and nothing of an
/// earlier version, or something was refused. `classes` are those of the input.
pub(super) fn convert(
    object: &Map,
    kind: &str,
    classes: &BTreeSet<String>,
    notes: &mut Notes,
) -> Option<Map> {
    let new = notes.attempt(|notes| {
        let mut new = object.clone();
        let is_old = old::claim(&mut new, kind, notes);
        let mut at = Converter {
            notes,
            classes,
            changed: false,
        };
        match kind {
            "ResourceClaim" => at.claim(new.get_mut("spec"), "spec"),
            "ResourceClaimTemplate" => {
                let spec = new.get_mut("spec").and_then(|spec| spec.at_mut(&["spec"]));
                at.claim(spec, "spec.spec");
            }
            "DeviceClass" => at.class(&mut new),
            _ => at.taint_rule(&mut new),
        }
        (new, at.changed, is_old)
    });
    // The status is about devices of the other driver.
    let (mut new, changed, is_old) = new?;
    if !changed && !is_old {
        return None;
    }
    if changed && new.remove("status").is_some() {
        notes.note("status", "is about devices of the other driver: removed");
    }
    Some(new)
}

struct Converter<'n> {
    notes: &'n mut Notes,
    classes: &'n BTreeSet<String>,
    changed: bool,
}

/// Capacities of shares that a request can name.
const OF_SHARES: [&str; 4] = [
    capacity::MEMORY,
    capacity::CORES,
    capacity::SLOTS,
    capacity::PERCENT,
];

impl Converter<'_> {
    fn claim(&mut self, spec: Option<&mut Node>, at: &str) {
        let at = under(at, "devices");
        let Some(devices) = spec.and_then(|spec| spec.at_mut(&["devices"])) else {
            return;
        };
        let Some(devices) = devices.map_mut() else {
            return;
        };
        let mut classes: Vec<(String, String)> = Vec::new();
        let requests = devices.get_mut("requests").and_then(Node::items_mut);
        for (number, node) in requests.into_iter().flatten().enumerate() {
            let at = format!("{at}.requests[{number}]");
            let Some(request) = node.map_mut() else {
                continue;
            };
            let name = request
                .get("name")
                .and_then(Node::text)
                .unwrap_or_default()
                .to_owned();
            if let Some(exactly) = request.get_mut("exactly").and_then(Node::map_mut) {
                let class = self.request(exactly, &under(&at, "exactly"));
                classes.push((name.clone(), class));
            }
            let alternatives = request.get_mut("firstAvailable").and_then(Node::items_mut);
            for (number, alternative) in alternatives.into_iter().flatten().enumerate() {
                if let Some(alternative) = alternative.map_mut() {
                    let at = format!("{at}.firstAvailable[{number}]");
                    let class = self.request(alternative, &at);
                    classes.push((name.clone(), class));
                }
            }
        }
        let constraints = devices.get_mut("constraints").and_then(Node::items_mut);
        for (number, node) in constraints.into_iter().flatten().enumerate() {
            for field in ["matchAttribute", "distinctAttribute"] {
                let at = format!("{at}.constraints[{number}].{field}");
                if let Some(value) = node.map_mut().and_then(|map| map.get_mut(field)) {
                    self.attribute(value, &at);
                }
            }
        }
        self.configs(devices, &at, &classes);
    }

    /// Converts one request, or an alternative, and returns its class.
    fn request(&mut self, request: &mut Map, at: &str) -> String {
        let class = request
            .get("deviceClassName")
            .and_then(Node::text)
            .unwrap_or_default()
            .to_owned();
        let selects_shares = request
            .get("selectors")
            .map(Node::items)
            .unwrap_or_default()
            .iter()
            .filter_map(|selector| selector.text_at(&["cel", "expression"]))
            .any(|expression| expression.contains("allowMultipleAllocations"));
        let is_share = selects_shares || request.get("capacity").is_some();
        let is_admin = request.get("adminAccess") == Some(&Node::Bool(true));
        let field = under(at, "deviceClassName");
        let new = match class.as_str() {
            NVIDIA | HAMI if is_admin => names::CLASS_ADMIN,
            NVIDIA if is_share => names::CLASS_SHARE,
            NVIDIA => names::CLASS_GPU,
            HAMI if request.get("capacity").is_some() => names::CLASS_SHARE,
            HAMI => {
                let what = "without capacity, a device of HAMi's is all of its GPU: a whole GPU";
                self.notes.note(&field, what);
                names::CLASS_GPU
            }
            "mig.nvidia.com" if is_share => names::CLASS_MIG_SHARE,
            "mig.nvidia.com" => names::CLASS_MIG,
            "vfio.gpu.nvidia.com" => {
                let what = "divvy does not pass GPUs through to virtual machines: keep these pods on nodes of NVIDIA's driver";
                self.notes.refuse(&field, what);
                return class;
            }
            other if other.contains("compute-domain") => {
                self.notes.note(
                    &field,
                    "ComputeDomains stay with NVIDIA's driver: not changed",
                );
                return class;
            }
            other => {
                self.others(other, &field);
                other
            }
        };
        if new != class {
            self.changed = true;
            request.set("deviceClassName", new);
        }
        self.selectors(request, at, new, new != class);
        self.capacity(request, at);
        self.tolerations(request, at);
        if class == HAMI {
            self.of_hami(request, at);
        }
        new.to_owned()
    }

    /// Names a class of GPUs that is neither known nor in the input.
    fn others(&mut self, class: &str, at: &str) {
        let vendors = ["amd.com", "intel.com"];
        let is_divvys = class.ends_with(names::CLASS_GPU.trim_start_matches("gpu"));
        if is_divvys || !is_of_gpus(class) || self.classes.contains(class) {
            return;
        }
        if vendors.iter().any(|vendor| class.ends_with(vendor)) {
            let what = "is for GPUs of another vendor: not changed";
            return self.notes.note(at, what);
        }
        let what = format!(
            "there is no rule for class {class:?}, and it is not in the files: if its devices are NVIDIA's GPUs, write the class of \
             divvy that is meant (docs/concepts.md), or convert the DeviceClass, too"
        );
        self.notes.unknown(at, what);
    }

    /// Renames the amounts of a claim for HAMi's driver, and refuses what has no counterpart.
    fn of_hami(&mut self, request: &mut Map, at: &str) {
        let amounts = request
            .get_mut("capacity")
            .and_then(|capacity| capacity.at_mut(&["requests"]))
            .and_then(Node::map_mut);
        if let Some(amounts) = amounts {
            let there: Vec<String> = amounts.iter().map(|(name, _)| name.to_owned()).collect();
            for name in there {
                let plain = name
                    .strip_prefix(HAMI)
                    .and_then(|rest| rest.strip_prefix('/'));
                let new = plain.unwrap_or(&name);
                let at = format!("{at}.capacity.requests[{name}]");
                if ![capacity::MEMORY, capacity::CORES].contains(&new) {
                    self.notes
                        .refuse(&at, "a share of divvy has memory and cores: remove it");
                } else if new != name {
                    amounts.rename(&name, new);
                }
            }
            self.notes.note(&under(at, "capacity"), ACCOUNTED);
        }
        let selectors = request
            .get("selectors")
            .map(Node::items)
            .unwrap_or_default();
        for (number, selector) in selectors.iter().enumerate() {
            let expression = selector.text_at(&["cel", "expression"]).unwrap_or_default();
            // Any attribute of HAMi's devices, or its name.
            if expression.contains("device.") {
                let at = format!("{at}.selectors[{number}].cel.expression");
                let what = "there is no rule for what HAMi's driver publishes: write it with divvy's attributes \
                            (docs/reference/attributes.md)";
                self.notes.refuse(&at, what);
            }
        }
    }

    /// Rewrites the expressions of a request or a class.
    ///
    /// Where devices are not NVIDIA's for sure (`is_nvidias`), only expressions that name its
    /// driver are changed.
    fn selectors(&mut self, of: &mut Map, at: &str, class: &str, is_nvidias: bool) {
        let selectors = of.get_mut("selectors").and_then(Node::items_mut);
        for (number, selector) in selectors.into_iter().flatten().enumerate() {
            let at = format!("{at}.selectors[{number}].cel.expression");
            let Some(node) = selector.at_mut(&["cel", "expression"]) else {
                continue;
            };
            let Some(new) = node.text().and_then(cel::rewrite) else {
                continue;
            };
            let names_nvidia = node.text() != Some(new.expression.as_str());
            if !names_nvidia && !is_nvidias {
                continue;
            }
            self.changed = true;
            if new.is_indirect {
                let what = "it reads attributes by names that convert cannot follow (of a variable, or put together): write each as \
                            device.attributes[\"gpu.nvidia.com\"].NAME";
                self.notes.refuse(&at, what);
                continue;
            }
            for name in &new.unknown {
                let what = format!(
                    "no device of divvy has {name}, so the expression would select none: select by another name \
                     (docs/reference/attributes.md)"
                );
                self.notes.refuse(&at, what);
            }
            let reads_uuid = new.attributes.iter().any(|name| name == attributes::UUID);
            let mut expression = new.expression;
            if reads_uuid && [names::CLASS_MIG, names::CLASS_MIG_SHARE].contains(&class) {
                let what = "a partition has no uuid before a claim has it: select by gpuUUID (its card) or profile";
                self.notes.refuse(&at, what);
            } else if reads_uuid && class == names::CLASS_SHARE {
                self.notes
                    .note(&at, "a share has the UUID of its card as gpuUUID");
                let new = cel::rename(&expression, attributes::UUID, attributes::GPU_UUID);
                if new == expression {
                    self.notes.refuse(&at, "a share has no uuid: write gpuUUID");
                }
                expression = new;
            }
            *node = expression.into();
        }
    }

    /// Renames the amounts of a share.
    fn capacity(&mut self, request: &mut Map, at: &str) {
        let amounts = request
            .get_mut("capacity")
            .and_then(|capacity| capacity.at_mut(&["requests"]))
            .and_then(Node::map_mut);
        let Some(amounts) = amounts else { return };
        let there: Vec<String> = amounts.iter().map(|(name, _)| name.to_owned()).collect();
        for name in there {
            let plain = name.strip_prefix("gpu.nvidia.com/").unwrap_or(&name);
            let new = match plain {
                "shares" => capacity::SLOTS,
                other => other,
            };
            if new != name {
                self.changed = true;
                amounts.rename(&name, new);
            }
            if ![capacity::MEMORY, capacity::SLOTS].contains(&new) && name.contains("nvidia") {
                let at = format!("{at}.capacity.requests[{name}]");
                let what = format!(
                    "a share of divvy has no such capacity: there are {}",
                    OF_SHARES.join(", ")
                );
                self.notes.refuse(&at, what);
            }
        }
    }

    fn tolerations(&mut self, request: &mut Map, at: &str) {
        let Some(all) = request.get_mut("tolerations").and_then(Node::items_mut) else {
            return;
        };
        for (number, toleration) in all.iter_mut().enumerate() {
            let Some(key) = toleration.map_mut().and_then(|map| map.get_mut("key")) else {
                continue;
            };
            let Some(name) = key
                .text()
                .and_then(|key| key.strip_prefix("gpu.nvidia.com/"))
            else {
                continue;
            };
            self.changed = true;
            let at = format!("{at}.tolerations[{number}].key");
            *key = match name {
                "xid" => taints::XID.into(),
                "gpu-lost" => taints::LOST.into(),
                _ => {
                    self.notes
                        .note(&at, "divvy has no such taint: it stays, without effect");
                    continue;
                }
            };
        }
    }

    /// Rewrites the name of an attribute in a constraint.
    fn attribute(&mut self, value: &mut Node, at: &str) {
        let Some(name) = value
            .text()
            .and_then(|name| name.strip_prefix("gpu.nvidia.com/"))
        else {
            return;
        };
        self.changed = true;
        if cel::is_attribute(name) {
            *value = format!("{}/{name}", names::DRIVER).into();
        } else {
            let what = format!(
                "no device of divvy has {name}, so nothing would be allocated: for NVLink, write gpu.divvy.dev/nvlinkDomain"
            );
            self.notes.refuse(at, what);
        }
    }

    fn class(&mut self, object: &mut Map) {
        let name = object
            .get("metadata")
            .and_then(|meta| meta.text_at(&["name"]));
        if name.is_some_and(|name| name.ends_with("nvidia.com")) {
            let what = "is a class of NVIDIA's chart, or of divvy's with nvidiaDeviceClasses: let the chart write it";
            self.notes.note("metadata.name", what);
        }
        let Some(spec) = object.get_mut("spec").and_then(Node::map_mut) else {
            return;
        };
        let is_mig = spec
            .get("selectors")
            .map(Node::items)
            .unwrap_or_default()
            .iter()
            .any(|selector| {
                let expression = selector.text_at(&["cel", "expression"]).unwrap_or_default();
                [".profile", "'mig'", "\"mig\""]
                    .iter()
                    .any(|sign| expression.contains(sign))
            });
        let class = if is_mig {
            names::CLASS_MIG
        } else {
            names::CLASS_GPU
        };
        self.selectors(spec, "spec", class, false);
        self.configs(spec, "spec", &[(String::new(), class.to_owned())]);
    }

    fn taint_rule(&mut self, object: &mut Map) {
        let driver = object
            .get_mut("spec")
            .and_then(|spec| spec.at_mut(&["deviceSelector", "driver"]));
        if let Some(driver) = driver.filter(|driver| driver.text() == Some(NVIDIA)) {
            *driver = names::DRIVER.into();
            self.changed = true;
            let what = "names of devices are divvy's then: kubectl get gpunodes lists them";
            self.notes.note("spec.deviceSelector", what);
        }
    }

    /// Converts the configs of a claim or a class; `classes` has each request with its class.
    fn configs(&mut self, of: &mut Map, at: &str, classes: &[(String, String)]) {
        let counts = devices(of);
        let Some(all) = of.get_mut("config").and_then(Node::items_mut) else {
            return;
        };
        let mut number = 0;
        all.retain_mut(|config| {
            let at = format!("{at}.config[{number}].opaque");
            number += 1;
            let driver = config.text_at(&["opaque", "driver"]);
            if driver == Some(HAMI) {
                let what = "there is no rule for configs of HAMi's driver: remove it, or write a ShareConfig \
                            (docs/reference/configs.md)";
                self.notes.refuse(&at, what);
            }
            if driver != Some(NVIDIA) {
                return true;
            }
            self.changed = true;
            let named = config
                .at(&["requests"])
                .map(Node::items)
                .unwrap_or_default();
            let is_for = |(name, _): &&(String, String)| {
                let is_it = |node: &Node| {
                    node.text()
                        .is_some_and(|n| n.split('/').next() == Some(name.as_str()))
                };
                named.is_empty() || named.iter().any(is_it)
            };
            let of_shares = classes
                .iter()
                .filter(is_for)
                .any(|(_, class)| SHARES.contains(&class.as_str()));
            let of = Of {
                shares: of_shares,
                several: total(
                    counts
                        .iter()
                        .filter(|(name, _)| is_for(&&(name.clone(), String::new())))
                        .map(|(_, count)| *count),
                ) > 1,
            };
            let parameters = config.at(&["opaque", "parameters"]).cloned();
            let new = self.config(
                &parameters.unwrap_or(Node::Null),
                &under(&at, "parameters"),
                of,
            );
            let Some((new, opaque)) = new.zip(config.at_mut(&["opaque"]).and_then(Node::map_mut))
            else {
                return false;
            };
            opaque.set("driver", names::DRIVER);
            opaque.set("parameters", new);
            true
        });
        of.remove_if_empty("config");
    }

    /// Converts the parameters of a config; `None` if divvy needs none for that.
    fn config(&mut self, parameters: &Node, at: &str, of: Of) -> Option<Node> {
        let kind = parameters.text_at(&["kind"]).unwrap_or_default();
        let sharing = parameters.at(&["sharing"]);
        let strategy = parameters.text_at(&["sharing", "strategy"]);
        if !["GpuConfig", "MigDeviceConfig"].contains(&kind) {
            let kinds = divvy_api::ConfigKind::ALL.map(divvy_api::ConfigKind::name);
            let what = format!(
                "{kind:?} has no counterpart: divvy has {} (docs/reference/configs.md)",
                kinds.join(", ")
            );
            self.notes.refuse(&under(at, "kind"), what);
            return None;
        }
        let known = |map: &Map, known: &[&str]| -> Option<String> {
            map.iter()
                .map(|(name, _)| name)
                .find(|name| !known.contains(name))
                .map(str::to_owned)
        };
        let strange = parameters
            .map()
            .and_then(|map| known(map, &["apiVersion", "kind", "sharing"]));
        let below = sharing.and_then(Node::map);
        let below =
            below.and_then(|map| known(map, &["strategy", "timeSlicingConfig", "mpsConfig"]));
        if let Some(field) = strange.or(below.map(|field| format!("sharing.{field}"))) {
            self.notes.refuse(
                &under(at, &field),
                "there is no rule for this field: remove it, or write the config by hand",
            );
            return None;
        }
        match strategy {
            Some("TimeSlicing") if kind == "GpuConfig" => {
                let interval = parameters.text_at(&["sharing", "timeSlicingConfig", "interval"]);
                if of.shares {
                    let what = "the time slice of shares belongs to their GPU: shares.timeSlice of a GpuPolicy sets it (docs/sharing.md); \
                                config removed";
                    self.notes.note(at, what);
                    return None;
                }
                let interval = interval.unwrap_or("Default");
                Some(Node::from([
                    ("apiVersion", names::API_VERSION.into()),
                    ("kind", "GpuConfig".into()),
                    ("timeSlicing", [("interval", interval.into())].into()),
                ]))
            }
            Some("TimeSlicing") => {
                self.notes.note(at, "a partition has its own compute, so time slices have no effect: config removed");
                None
            }
            Some("MPS") => self.config_of_mps(kind, parameters, at, of),
            Some(other) => {
                let what = format!("{other:?} is not TimeSlicing or MPS");
                self.notes.refuse(&under(at, "sharing.strategy"), what);
                None
            }
            None => {
                self.notes.note(at, "asks for nothing: config removed");
                None
            }
        }
    }

    /// Converts MPS; `None` where divvy has none for such requests.
    fn config_of_mps(&mut self, kind: &str, parameters: &Node, at: &str, of: Of) -> Option<Node> {
        let what = if of.several {
            "a claim of divvy has MPS of one GPU or partition (docs/mps.md#mps-in-a-claim): config removed; request each by a claim of its own, \
             in a container of its own, or name one of the requests in the config"
        } else if of.shares {
            "divvy's MPS is for a claim that has its GPU or partition alone, and for shares by a policy (docs/mps.md): config removed, so \
             programs run in turns, without limits of memory and threads"
        } else {
            let kind = if kind == "GpuConfig" {
                "GpuConfig"
            } else {
                "MigConfig"
            };
            return Some(self.mps(kind, parameters, at));
        };
        self.notes.note(&under(at, "sharing"), what);
        None
    }

    /// Converts MPS of a whole GPU or partition to a config of this kind.
    fn mps(&mut self, kind: &'static str, parameters: &Node, at: &str) -> Node {
        let of = |field| parameters.at(&["sharing", "mpsConfig", field]);
        let mut limits = Map::default();
        for (field, name) in [
            ("defaultActiveThreadPercentage", "cores"),
            ("defaultPinnedDeviceMemoryLimit", "memory"),
        ] {
            if let Some(limit) = of(field) {
                limits.set(name, limit.clone());
            }
        }
        if of("defaultPerDevicePinnedMemoryLimit").is_some() {
            let what = "a claim of divvy has MPS of one GPU (docs/mps.md#mps-in-a-claim): removed; write limits.memory for that GPU";
            let at = under(at, "sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit");
            self.notes.note(&at, what);
        }
        let mut mps = Map::default();
        if !limits.is_empty() {
            mps.set("limits", limits);
        }
        Node::from([
            ("apiVersion", names::API_VERSION.into()),
            ("kind", kind.into()),
            ("mps", mps.into()),
        ])
    }
}

/// The requests that a config is for.
#[derive(Debug, Clone, Copy)]
struct Of {
    /// True if any of them is for shares.
    shares: bool,
    /// True if they are for more than one device together.
    several: bool,
}

/// Returns the number of devices of each request of a claim; none for a class.
fn devices(of: &Map) -> Vec<(String, u64)> {
    let requests = of.get("requests").map(Node::items).unwrap_or_default();
    let count = |request: &Node| {
        let exactly = request.at(&["exactly"]).unwrap_or(request);
        if exactly.text_at(&["allocationMode"]) == Some("All") {
            return 2;
        }
        let count = exactly.at(&["count"]).and_then(Node::scalar);
        count.and_then(|count| count.parse().ok()).unwrap_or(1)
    };
    let named = |request: &Node| {
        let name = request.text_at(&["name"]).unwrap_or_default();
        (name.to_owned(), count(request))
    };
    requests.iter().map(named).collect()
}

/// Says whether a class is for GPUs, by the words of its name.
fn is_of_gpus(class: &str) -> bool {
    let class = class.to_lowercase();
    let mut words = class.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| {
        word.ends_with("gpu") || word.ends_with("gpus") || ["mig", "nvidia", "cuda"].contains(&word)
    })
}
